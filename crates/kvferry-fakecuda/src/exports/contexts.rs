//! Primary contexts and the current context of a thread.

use std::ffi::{c_int, c_uint};

use super::{Out, enter, enter_current};
use crate::abi::{Error, Result};
use crate::devices::Primary;
use crate::faults::Fault;
use crate::state::Session;
use crate::thread;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: Out<usize>,
    device: c_int,
) -> c_int {
    enter("cuDevicePrimaryCtxRetain", |session| {
        context.require()?;
        let device = session.device(device)?;
        if let Some(primary) = &mut session.devices[device].primary {
            primary.references += 1;
            return context.set(primary.handle);
        }
        if let Some(error) = session.devices[device].removed {
            return Err(error);
        }
        if session.faults.hit(Fault::ContextOom) {
            return Err(Error::OUT_OF_MEMORY);
        }
        let handle = session.new_handle();
        let charge = session.config.context_charge;
        session.devices[device].used += charge;
        session.devices[device].enabled = 0;
        session.devices[device].primary =
            Some(Primary { handle, references: 1, lost: None, legacy: None });
        session.counters.contexts_created += 1;
        context.set(handle)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    enter("cuDevicePrimaryCtxRelease_v2", |session| {
        let device = session.device(device)?;
        let primary = session.devices[device].primary.as_mut().ok_or(Error::INVALID_CONTEXT)?;
        primary.references -= 1;
        if primary.references == 0 {
            session.destroy_context(device);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: Out<c_uint>,
    active: Out<c_int>,
) -> c_int {
    enter("cuDevicePrimaryCtxGetState", |session| {
        let device = session.device(device)?;
        flags.set(0)?;
        active.set(c_int::from(session.devices[device].primary.is_some()))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    enter("cuCtxPushCurrent_v2", |session| {
        session.context_device(context)?;
        thread::with(|local| local.contexts.push(context));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPopCurrent_v2(context: Out<usize>) -> c_int {
    enter("cuCtxPopCurrent_v2", |_| {
        let popped = thread::with(|local| local.contexts.pop()).ok_or(Error::INVALID_CONTEXT)?;
        context.set_if_wanted(popped);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetCurrent(context: Out<usize>) -> c_int {
    enter("cuCtxGetCurrent", |_| {
        context.set(thread::with(|local| local.contexts.last().copied()).unwrap_or(0))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    enter("cuCtxSetCurrent", |session| {
        if context != 0 {
            session.context_device(context)?;
        }
        thread::with(|local| {
            local.contexts.pop();
            if context != 0 {
                local.contexts.push(context);
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetDevice(device: Out<c_int>) -> c_int {
    enter("cuCtxGetDevice", |session| {
        let handle = thread::with(|local| local.contexts.last().copied());
        let found = session.context_device(handle.ok_or(Error::INVALID_CONTEXT)?)?;
        device.set(found as c_int)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSynchronize() -> c_int {
    enter_current("cuCtxSynchronize", |session, device| {
        session.unsafe_in_capture()?;
        wait_device(session, device)
    })
}

/// Waits for all that is submitted to the device.
pub(super) fn wait_device(session: &mut Session, device: usize) -> Result {
    let streams = session.streams.values().filter(|stream| stream.device == device);
    let last: Vec<u64> = streams.map(|stream| stream.last).collect();
    for op in last {
        session.wait_op(op);
    }
    session.check_lost(device)?;
    session.join_device(device);
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxEnablePeerAccess(context: usize, flags: c_uint) -> c_int {
    enter_current("cuCtxEnablePeerAccess", |session, device| {
        let peer = session.context_device(context)?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if peer == device {
            return Err(Error::INVALID_DEVICE);
        }
        if !session.peer(device, peer) {
            return Err(Error::PEER_ACCESS_UNSUPPORTED);
        }
        if session.devices[device].enabled >> peer & 1 == 1 {
            return Err(Error::PEER_ACCESS_ALREADY_ENABLED);
        }
        session.devices[device].enabled |= 1 << peer;
        Ok(())
    })
}
