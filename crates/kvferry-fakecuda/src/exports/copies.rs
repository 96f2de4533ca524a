//! Copies, batches of copies, and fills.

use std::ffi::{c_int, c_uchar};

use super::{In, Out, enter_current};
use crate::abi::{
    CopyAttributes, DevicePtr, Error, ORDER_ANY, ORDER_STREAM, Result, STREAM_LEGACY,
};
use crate::copies::{Judged, Request, submit};
use crate::faults::Fault;
use crate::memory::Place;
use crate::ops::{Entry, Move, Source, Touches, Work};
use crate::races::Touch;
use crate::state::Session;
use crate::submit::Order;
use crate::timeline::Engine;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyAsync(
    destination: DevicePtr,
    source: DevicePtr,
    len: usize,
    stream: usize,
) -> c_int {
    enter_current("cuMemcpyAsync", |session, device| {
        let handle = session.stream_handle(stream, device)?;
        if len == 0 {
            return Ok(());
        }
        let len = len as u64;
        let judged = session.judge(Request { destination, source, len, order: ORDER_STREAM })?;
        submit(session, handle, &[judged], false)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD8Async(
    destination: DevicePtr,
    byte: c_uchar,
    len: usize,
    stream: usize,
) -> c_int {
    enter_current("cuMemsetD8Async", |session, device| {
        let handle = session.stream_handle(stream, device)?;
        let len = len as u64;
        if len == 0 {
            return Ok(());
        }
        if session.memory.place(destination, len)? == Place::Pageable {
            return Err(Error::INVALID_VALUE);
        }
        let entries = vec![Entry { destination, len, source: Source::Byte(byte) }];
        let touches =
            Touches { ordered: vec![Touch::new(destination, len, true)], ..Touches::default() };
        let order = Order {
            work: Work::Move(Move { entries, ..Move::default() }),
            engine: Engine::Compute,
            touches,
            ns: session.config.rates.kernel_ns(len, false),
            what: format!("memset {destination:#x} of {len} bytes"),
        };
        session.submit(handle, order)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyBatchAsync(
    destinations: In<DevicePtr>,
    sources: In<DevicePtr>,
    lens: In<usize>,
    count: usize,
    attributes: In<CopyAttributes>,
    attribute_starts: In<usize>,
    attribute_count: usize,
    fail_index: Out<usize>,
    stream: usize,
) -> c_int {
    enter_current("cuMemcpyBatchAsync", |session, device| {
        fail_index.set_if_wanted(usize::MAX);
        let lists = (destinations, sources, lens);
        let attributes = (attributes, attribute_starts, attribute_count);
        batch(session, device, &lists, count, &attributes, stream).map_err(|(index, error)| {
            fail_index.set_if_wanted(index.unwrap_or(usize::MAX));
            error
        })
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    destinations: In<DevicePtr>,
    sources: In<DevicePtr>,
    lens: In<usize>,
    count: usize,
    attributes: In<CopyAttributes>,
    attribute_starts: In<usize>,
    attribute_count: usize,
    stream: usize,
) -> c_int {
    enter_current("cuMemcpyBatchAsync_v2", |session, device| {
        let lists = (destinations, sources, lens);
        let attributes = (attributes, attribute_starts, attribute_count);
        batch(session, device, &lists, count, &attributes, stream).map_err(|(_, error)| error)
    })
}

type Failure = (Option<usize>, Error);
type Lists = (In<DevicePtr>, In<DevicePtr>, In<usize>);
type Attributes = (In<CopyAttributes>, In<usize>, usize);

fn batch(
    session: &mut Session,
    device: usize,
    lists: &Lists,
    count: usize,
    attributes: &Attributes,
    stream: usize,
) -> std::result::Result<(), Failure> {
    let whole = |error| (None, error);
    if stream == 0 || stream == STREAM_LEGACY {
        return Err((None, Error::INVALID_VALUE));
    }
    let handle = session.stream_handle(stream, device).map_err(whole)?;
    let requests = requests(lists, count, attributes).map_err(whole)?;
    if session.capture_takes(handle).map_err(whole)? {
        if session.config.capture_drops {
            session.counters.captured_batches += 1;
            return Ok(());
        }
        if let Some(capture) = &mut session.stream(handle).map_err(whole)?.capture {
            capture.invalidated = true;
        }
        return Err((None, Error::STREAM_CAPTURE_UNSUPPORTED));
    }
    let mut judged: Vec<Judged> = Vec::with_capacity(count);
    let mut failed = None;
    for (index, request) in requests.into_iter().enumerate() {
        match session.judge(request) {
            Ok(one) => judged.push(one),
            Err(error) => {
                failed = Some((index, error));
                break;
            }
        }
    }
    if failed.is_none() && session.faults.hit(Fault::BatchEntry) {
        let chosen = session.config.fail_index.map(|index| index as usize);
        let index = chosen.unwrap_or_else(|| session.call_rng.usize(..count)).min(count - 1);
        failed = Some((index, Error::INVALID_VALUE));
    }
    if let Some((index, _)) = failed {
        // Any number of the copies before the one that failed may run.
        judged.truncate(session.call_rng.usize(..=index));
    }
    if !judged.is_empty() {
        submit(session, handle, &judged, true).map_err(whole)?;
    }
    failed.map_or(Ok(()), |(index, error)| Err((Some(index), error)))
}

/// Reads the caller's arrays and checks the rules of the attributes.
fn requests(lists: &Lists, count: usize, attributes: &Attributes) -> Result<Vec<Request>> {
    let (attributes, starts, attribute_count) = attributes;
    if count == 0 || *attribute_count == 0 || *attribute_count > count {
        return Err(Error::INVALID_VALUE);
    }
    let destinations = lists.0.slice(count)?;
    let sources = lists.1.slice(count)?;
    let lens = lists.2.slice(count)?;
    let attributes = attributes.slice(*attribute_count)?;
    let starts = starts.slice(*attribute_count)?;
    let rising = starts.windows(2).all(|pair| pair[0] < pair[1]);
    if starts[0] != 0 || !rising || starts.last().is_some_and(|&last| last >= count) {
        return Err(Error::INVALID_VALUE);
    }
    if attributes.iter().any(|a| !(ORDER_STREAM..=ORDER_ANY).contains(&a.source_order)) {
        return Err(Error::INVALID_VALUE);
    }
    let mut which = 0;
    Ok((0..count)
        .map(|index| {
            if starts.get(which + 1) == Some(&index) {
                which += 1;
            }
            Request {
                destination: destinations[index],
                source: sources[index],
                len: lens[index] as u64,
                order: attributes[which].source_order,
            }
        })
        .collect())
}
