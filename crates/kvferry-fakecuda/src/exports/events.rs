//! Events.

use std::ffi::{c_int, c_uint};

use super::{Out, enter, enter_current};
use crate::abi::{EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, Error, Result};
use crate::faults::Fault;
use crate::state::Session;
use crate::streams::{Event, EventRecord};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventCreate(event: Out<usize>, flags: c_uint) -> c_int {
    enter_current("cuEventCreate", |session, device| {
        event.require()?;
        let untimed = flags & EVENT_DISABLE_TIMING != 0;
        if flags > 7 || flags & EVENT_INTERPROCESS != 0 && !untimed {
            return Err(Error::INVALID_VALUE);
        }
        if session.faults.hit(Fault::EventOom) {
            return Err(Error::OUT_OF_MEMORY);
        }
        let handle = session.new_handle();
        session.events.insert(handle, Event { device, timing: !untimed, record: None });
        event.set(handle)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventDestroy_v2(event: usize) -> c_int {
    enter_current("cuEventDestroy_v2", |session, _| {
        session.events.remove(&event).map(|_| ()).ok_or(Error::INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventRecord(event: usize, stream: usize) -> c_int {
    enter_current("cuEventRecord", |session, device| {
        let handle = session.stream_handle(stream, device)?;
        if session.event(event)?.device != session.stream(handle)?.device {
            return Err(Error::INVALID_HANDLE);
        }
        session.record(event, handle)
    })
}

/// The event's last record. `None`: there is none, which counts as complete.
fn observed(session: &mut Session, event: usize) -> Result<Option<EventRecord>> {
    session.unsafe_in_capture()?;
    let device = session.event(event)?.device;
    session.check_lost(device)?;
    let record = session.event(event)?.record.clone();
    if let Some((origin, _)) = record.as_ref().and_then(|record| record.captured) {
        if let Ok(stream) = session.stream(origin)
            && let Some(capture) = &mut stream.capture
        {
            capture.invalidated = true;
        }
        return Err(Error::CAPTURED_EVENT);
    }
    Ok(record)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventQuery(event: usize) -> c_int {
    enter("cuEventQuery", |session| {
        let Some(record) = observed(session, event)? else { return Ok(()) };
        if session.pending.contains(&record.op) {
            return Err(Error::NOT_READY);
        }
        session.join(&record.clock, record.end);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventSynchronize(event: usize) -> c_int {
    enter("cuEventSynchronize", |session| {
        let Some(record) = observed(session, event)? else { return Ok(()) };
        let device = session.event(event)?.device;
        session.wait_until(|state| {
            !state.pending.contains(&record.op) || state.check_lost(device).is_err()
        });
        session.check_lost(device)?;
        session.join(&record.clock, record.end);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventElapsedTime(
    ms: Out<f32>,
    start: usize,
    end: usize,
) -> c_int {
    enter("cuEventElapsedTime", |session| {
        let mut ends = [0; 2];
        for (slot, event) in ends.iter_mut().zip([start, end]) {
            let known = session.event(event)?;
            let record = known.record.clone().filter(|_| known.timing);
            let record = record.ok_or(Error::INVALID_HANDLE)?;
            if session.pending.contains(&record.op) {
                return Err(Error::NOT_READY);
            }
            *slot = record.end;
        }
        ms.set((ends[1] as f64 - ends[0] as f64) as f32 / 1e6)
    })
}
