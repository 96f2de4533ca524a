//! The control functions `fakecuda_*`, which tests call; no driver has them.
//!
//! They work in the host functions too, and before `cuInit`. Results are `CUresult` codes, with
//! 500 for a name that means nothing.

use std::ffi::{c_char, c_int, c_void};
use std::time::Instant;

use super::{In, Out, Text, enter_early};
use crate::abi::{Error, Result};
use crate::faults::Fault;
use crate::gauges::NAMES;
use crate::ops::{Entry, Move, Source, Touches, Work};
use crate::races::{Point, Touch};
use crate::state::wake_hosts;
use crate::submit::Order;
use crate::thread;
use crate::timeline::Engine;

/// Bytes from an address on.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    start: u64,
    len: u64,
}

/// A fake kernel, as `fakecuda_launch` takes it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct FakeKernel {
    name: *const c_char,
    reads: *const Range,
    read_count: usize,
    writes: *const Range,
    write_count: usize,
    /// The byte that it writes.
    fill: c_int,
    /// The byte that all it reads must have, -1 for any.
    expect: c_int,
    /// Real and virtual time, in ns, before it reads.
    delay_ns: u64,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_set(key: Text, value: Text) -> c_int {
    enter_early("fakecuda_set", |session| {
        let (key, value) = (key.read()?, value.read()?);
        session.config.set(&key, &value)?;
        if key == "seed" {
            let seed = session.config.seed;
            session.rng.seed(seed);
            session.call_rng.seed(seed);
        }
        session.work_ready();
        Ok(())
    })
}

/// Starts over: nothing is initialized or allocated, and the settings are those of `FAKECUDA`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_reset() -> c_int {
    enter_early("fakecuda_reset", |session| {
        session.reset();
        wake_hosts();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_fault(name: Text, at: u64, count: u64) -> c_int {
    enter_early("fakecuda_fault", |session| {
        let fault = Fault::named(&name.read()?).ok_or(Error::NOT_FOUND)?;
        session.faults.arm(fault, at, count);
        Ok(())
    })
}

/// Switches all faults off. What they stopped goes on, and errors that stick are gone.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_clear_faults() -> c_int {
    enter_early("fakecuda_clear_faults", |session| {
        session.faults.clear();
        for op in std::mem::take(&mut session.stuck) {
            let queued = session.streams.values_mut().flat_map(|stream| &mut stream.queue);
            let mut in_stream = false;
            for queued in queued.filter(|queued| queued.id == op) {
                queued.stalled = false;
                in_stream = true;
            }
            if !in_stream {
                session.pending.remove(&op);
            }
        }
        for stream in session.streams.values_mut().filter(|stream| stream.slow) {
            stream.slow = false;
            if let Some(op) = stream.queue.front_mut() {
                op.not_before = op.not_before.map(|_| Instant::now());
            }
        }
        for device in &mut session.devices {
            device.removed = None;
            if let Some(primary) = &mut device.primary {
                primary.lost = None;
            }
        }
        session.work_ready();
        wake_hosts();
        Ok(())
    })
}

/// Keeps engines from starting anything: 1 H2D, 2 D2H, 4 D2D, 8 compute. 0 releases all.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_hold(engines: u32) -> c_int {
    enter_early("fakecuda_hold", |session| {
        session.held = engines;
        session.work_ready();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_counter(name: Text, value: Out<u64>) -> c_int {
    enter_early("fakecuda_counter", |session| {
        value.set(session.counter(&name.read()?).ok_or(Error::NOT_FOUND)?)
    })
}

/// All counters, one `name value` a line, and the calls of each symbol.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_counters(
    buffer: Out<c_char>,
    room: usize,
    needed: Out<usize>,
) -> c_int {
    enter_early("fakecuda_counters", |session| {
        let mut lines: Vec<String> = NAMES
            .iter()
            .filter_map(|name| session.counter(name).map(|value| format!("{name} {value}")))
            .collect();
        let calls = session.counters.calls.iter();
        let mut calls: Vec<String> = calls.map(|(name, n)| format!("call:{name} {n}")).collect();
        calls.sort();
        lines.extend(calls);
        give_text(&lines.join("\n"), &buffer, room, &needed)
    })
}

/// The findings so far, separated by blank lines.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_findings(
    buffer: Out<c_char>,
    room: usize,
    needed: Out<usize>,
) -> c_int {
    enter_early("fakecuda_findings", |session| {
        give_text(&session.checker.findings().join("\n\n"), &buffer, room, &needed)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_clear_findings() -> c_int {
    enter_early("fakecuda_clear_findings", |session| {
        session.checker.clear_findings();
        Ok(())
    })
}

/// Writes what fits, without an end mark, and the length of the whole.
fn give_text(text: &str, buffer: &Out<c_char>, room: usize, needed: &Out<usize>) -> Result {
    needed.set(text.len())?;
    if room == 0 {
        return Ok(());
    }
    let bytes: Vec<c_char> = text.bytes().map(|byte| byte as c_char).collect();
    buffer.set_slice(&bytes, room)
}

/// Reads device or host memory past all rules of order.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_read(address: u64, into: Out<u8>, len: usize) -> c_int {
    enter_early("fakecuda_read", |session| {
        let mut bytes = vec![0; len];
        session.memory.read(address, &mut bytes)?;
        if len == 0 { Ok(()) } else { into.set_slice(&bytes, len) }
    })
}

/// Writes device or host memory past all rules of order.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_write(address: u64, from: In<u8>, len: usize) -> c_int {
    enter_early("fakecuda_write", |session| session.memory.write(address, &from.slice(len)?))
}

/// Tells the race checker of an access by the calling thread, or by the operation whose host
/// function calls.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_host_access(
    pointer: *const c_void,
    len: usize,
    write: c_int,
) -> c_int {
    enter_early("fakecuda_host_access", |session| {
        let touch = Touch::new(pointer as u64, len as u64, write != 0);
        let host = session.host_key();
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("?").to_owned();
        let mut point = session.checker.host_point(host, format!("host thread {name}"));
        if let Some(callback) = thread::with(|local| local.callback.clone()) {
            point = std::sync::Arc::new(Point {
                actor: callback.actor,
                step: callback.step,
                before: callback.before.clone(),
                what: callback.what.clone(),
            });
        }
        session.checker.record(&[touch], &point);
        Ok(())
    })
}

/// Publishes what the calling thread has seen, for [`fakecuda_host_acquire`] on another one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_host_release(token: u64) -> c_int {
    enter_early("fakecuda_host_release", |session| {
        let host = session.host_key();
        session.checker.release(host, token);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_host_acquire(token: u64) -> c_int {
    enter_early("fakecuda_host_acquire", |session| {
        let host = session.host_key();
        session.checker.acquire(host, token);
        Ok(())
    })
}

/// The host's virtual time in ns.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_now(ns: Out<u64>) -> c_int {
    enter_early("fakecuda_now", |session| ns.set(session.timeline.now()))
}

/// Lets the host work for so many virtual ns.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_advance(ns: u64) -> c_int {
    enter_early("fakecuda_advance", |session| {
        session.timeline.advance(ns);
        Ok(())
    })
}

/// Destroys the primary context of a device, although users have retained it.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_destroy_context(device: c_int) -> c_int {
    enter_early("fakecuda_destroy_context", |session| {
        let device = session.device(device)?;
        session.destroy_context(device);
        Ok(())
    })
}

/// Submits a fake kernel to a stream of the current context.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fakecuda_launch(stream: usize, kernel: In<FakeKernel>) -> c_int {
    enter_early("fakecuda_launch", |session| {
        let kernel = kernel.get()?;
        let device = session.current()?;
        let handle = session.stream_handle(stream, device)?;
        let reads = In(kernel.reads).slice(kernel.read_count)?;
        let writes = In(kernel.writes).slice(kernel.write_count)?;
        let byte = u8::try_from(kernel.fill).map_err(|_| Error::INVALID_VALUE)?;
        let touch = |range: &Range, write| Touch::new(range.start, range.len, write);
        let ordered = reads.iter().map(|range| touch(range, false));
        let ordered = ordered.chain(writes.iter().map(|range| touch(range, true))).collect();
        let entry = |range: &Range| Entry {
            destination: range.start,
            len: range.len,
            source: Source::Byte(byte),
        };
        let moving = Move {
            entries: writes.iter().map(entry).collect(),
            reads: reads.iter().map(|range| (range.start, range.len)).collect(),
            expect: u8::try_from(kernel.expect).ok(),
            delay_ns: kernel.delay_ns,
            ..Move::default()
        };
        let bytes = reads.iter().chain(&writes).map(|range| range.len).sum();
        let order = Order {
            work: Work::Move(moving),
            engine: Engine::Compute,
            touches: Touches { ordered, ..Touches::default() },
            ns: kernel.delay_ns + session.config.rates.kernel_ns(bytes, false),
            what: format!("kernel `{}`", Text(kernel.name).read()?),
        };
        session.submit(handle, order)?;
        Ok(())
    })
}
