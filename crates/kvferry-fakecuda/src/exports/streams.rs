//! Streams, their captures, and host functions.

use std::ffi::{c_int, c_uint};

use super::{Out, enter, enter_current};
use crate::abi::{CAPTURE_GLOBAL, CAPTURE_RELAXED, Error, HostFn, Result, STREAM_NON_BLOCKING};
use crate::faults::Fault;
use crate::ops::{Touches, Work};
use crate::state::Session;
use crate::streams::{Capture, Stream};
use crate::submit::Order;
use crate::thread;
use crate::timeline::Engine;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreate(stream: Out<usize>, flags: c_uint) -> c_int {
    enter_current("cuStreamCreate", |session, device| {
        stream.require()?;
        if flags & !STREAM_NON_BLOCKING != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if session.faults.hit(Fault::StreamOom) {
            return Err(Error::OUT_OF_MEMORY);
        }
        let actor = session.checker.new_actor();
        let mut made = Stream::new(device, flags & STREAM_NON_BLOCKING == 0, actor);
        made.slow = session.faults.hit(Fault::StreamSlow);
        let handle = session.new_handle();
        session.streams.insert(handle, made);
        stream.set(handle)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamDestroy_v2(stream: usize) -> c_int {
    enter_current("cuStreamDestroy_v2", |session, device| {
        let handle = session.stream_handle(stream, device)?;
        let known = session.stream(handle)?;
        if !known.owned {
            return Err(Error::INVALID_HANDLE);
        }
        known.dying = true;
        if known.queue.is_empty() {
            session.remove_stream(handle);
        }
        Ok(())
    })
}

/// The stream's handle for a call that looks at its progress, which a capture forbids.
fn observed(session: &mut Session, stream: usize, device: usize) -> Result<usize> {
    let handle = session.stream_handle(stream, device)?;
    if session.capture_takes(handle)? {
        if let Some(capture) = &mut session.stream(handle)?.capture {
            capture.invalidated = true;
        }
        return Err(Error::STREAM_CAPTURE_UNSUPPORTED);
    }
    session.unsafe_in_capture()?;
    Ok(handle)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamQuery(stream: usize) -> c_int {
    enter_current("cuStreamQuery", |session, device| {
        let handle = observed(session, stream, device)?;
        let last = session.stream(handle)?.last;
        if session.pending.contains(&last) {
            return Err(Error::NOT_READY);
        }
        join_stream(session, handle)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    enter_current("cuStreamSynchronize", |session, device| {
        let handle = observed(session, stream, device)?;
        let (last, owner) = {
            let stream = session.stream(handle)?;
            (stream.last, stream.device)
        };
        let (clock, end) = seen(session, handle)?;
        session.wait_op(last);
        session.check_lost(owner)?;
        session.join(&clock, end);
        Ok(())
    })
}

/// Clock and number of the stream's last operation.
fn seen(
    session: &mut Session,
    handle: usize,
) -> Result<(std::sync::Arc<crate::clocks::Clock>, u64)> {
    let stream = session.stream(handle)?;
    Ok((std::sync::Arc::new(stream.clock.clone()), stream.end))
}

fn join_stream(session: &mut Session, handle: usize) -> Result {
    let device = session.stream(handle)?.device;
    session.check_lost(device)?;
    let (clock, end) = seen(session, handle)?;
    session.join(&clock, end);
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamWaitEvent(
    stream: usize,
    event: usize,
    flags: c_uint,
) -> c_int {
    enter_current("cuStreamWaitEvent", |session, device| {
        let handle = session.stream_handle(stream, device)?;
        if flags > 1 {
            return Err(Error::INVALID_VALUE);
        }
        let Some(record) = session.event(event)?.record.clone() else { return Ok(()) };
        if let Some((origin, from)) = record.captured {
            return join_capture(session, handle, origin, from);
        }
        session.wait_for(handle, &record)
    })
}

/// A wait for an event that `from` recorded in a capture pulls the stream into the capture.
fn join_capture(session: &mut Session, handle: usize, origin: usize, from: usize) -> Result {
    let capture = session.stream(origin)?.capture.clone().ok_or(Error::CAPTURED_EVENT)?;
    let stream = session.stream(handle)?;
    match &stream.capture {
        Some(own) if own.origin == origin => {
            if let Some(capture) = &mut session.stream(from)?.capture {
                capture.joined = true;
            }
            Ok(())
        }
        Some(_) => Err(Error(902)),
        None if stream.legacy => Err(Error::STREAM_CAPTURE_IMPLICIT),
        None => {
            stream.capture = Some(capture);
            Ok(())
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetCtx(stream: usize, context: Out<usize>) -> c_int {
    enter_current("cuStreamGetCtx", |session, device| {
        let handle = session.stream_handle(stream, device)?;
        let device = session.stream(handle)?.device;
        context.set(session.primary(device)?.handle)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamIsCapturing(stream: usize, status: Out<c_int>) -> c_int {
    enter_current("cuStreamIsCapturing", |session, device| {
        let handle = session.stream_handle(stream, device)?;
        if session.stream(handle)?.legacy {
            session.capture_takes(handle)?;
        }
        let capture = &session.stream(handle)?.capture;
        status.set(capture.as_ref().map_or(0, |capture| 1 + c_int::from(capture.invalidated)))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamBeginCapture_v2(stream: usize, mode: c_int) -> c_int {
    enter_current("cuStreamBeginCapture_v2", |session, device| {
        let handle = session.stream_handle(stream, device)?;
        if !(CAPTURE_GLOBAL..=CAPTURE_RELAXED).contains(&mode) {
            return Err(Error::INVALID_VALUE);
        }
        let known = session.stream(handle)?;
        if known.legacy {
            return Err(Error::STREAM_CAPTURE_UNSUPPORTED);
        }
        if known.capture.is_some() {
            return Err(Error::ILLEGAL_STATE);
        }
        let thread = thread::with(|local| local.id);
        let origin = handle;
        known.capture = Some(Capture { origin, mode, thread, invalidated: false, joined: false });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamEndCapture(stream: usize, graph: Out<usize>) -> c_int {
    enter_current("cuStreamEndCapture", |session, device| {
        graph.set(0)?;
        let handle = session.stream_handle(stream, device)?;
        let capture = session.stream(handle)?.capture.clone().ok_or(Error::ILLEGAL_STATE)?;
        if capture.origin != handle {
            return Err(Error::STREAM_CAPTURE_UNMATCHED);
        }
        let thread = thread::with(|local| local.id);
        if capture.mode != CAPTURE_RELAXED && capture.thread != thread {
            return Err(Error::STREAM_CAPTURE_WRONG_THREAD);
        }
        let mut invalidated = false;
        let mut unjoined = false;
        for (&own, stream) in &mut session.streams {
            if let Some(part) = stream.capture.take_if(|part| part.origin == handle) {
                invalidated |= part.invalidated;
                unjoined |= own != handle && !part.joined;
            }
        }
        if invalidated {
            return Err(Error::STREAM_CAPTURE_INVALIDATED);
        }
        if unjoined {
            return Err(Error::STREAM_CAPTURE_UNJOINED);
        }
        let made = session.new_handle();
        session.graphs.insert(made);
        graph.set(made)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphDestroy(graph: usize) -> c_int {
    enter("cuGraphDestroy", |session| {
        if session.graphs.remove(&graph) { Ok(()) } else { Err(Error::INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    enter("cuThreadExchangeStreamCaptureMode", |_| {
        let new = super::In(mode.cast_const()).get()?;
        if !(CAPTURE_GLOBAL..=CAPTURE_RELAXED).contains(&new) {
            return Err(Error::INVALID_VALUE);
        }
        let old = thread::with(|local| std::mem::replace(&mut local.capture_mode, new));
        Out(mode).set(old)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchHostFunc(
    stream: usize,
    function: Option<HostFn>,
    user: usize,
) -> c_int {
    enter_current("cuLaunchHostFunc", |session, device| {
        let function = function.ok_or(Error::INVALID_VALUE)?;
        let handle = session.stream_handle(stream, device)?;
        let order = Order {
            work: Work::Host { function, user },
            engine: Engine::None,
            touches: Touches::default(),
            ns: session.config.rates.op_ns,
            what: "host function".to_owned(),
        };
        session.submit(handle, order)?;
        Ok(())
    })
}
