//! How a copy is judged and submitted.

use crate::abi::{Error, ORDER_ANY, ORDER_DURING_CALL, ORDER_STREAM, Result};
use crate::config::AnyOrder;
use crate::memory::Place;
use crate::ops::{Entry, Move, Source, Touches, Work};
use crate::races::Touch;
use crate::state::{Session, State};
use crate::submit::Order;
use crate::timeline::Engine;

/// One copy of a batch as the caller describes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) destination: u64,
    pub(crate) source: u64,
    pub(crate) len: u64,
    /// One of the `ORDER_` constants.
    pub(crate) order: i32,
}

/// A copy whose two sides are known.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Judged {
    request: Request,
    from: Place,
    to: Place,
}

impl Judged {
    fn engine(&self) -> Engine {
        let host = |place| matches!(place, Place::Pinned | Place::Pageable);
        match (host(self.from), host(self.to)) {
            (true, false) => Engine::HostToDevice,
            (false, true) => Engine::DeviceToHost,
            (false, false) => Engine::DeviceToDevice,
            (true, true) => Engine::None,
        }
    }
}

impl State {
    /// Finds out what both sides are.
    pub(crate) fn judge(&self, request: Request) -> Result<Judged> {
        if !(ORDER_STREAM..=ORDER_ANY).contains(&request.order) {
            return Err(Error::INVALID_VALUE);
        }
        let from = self.memory.place(request.source, request.len)?;
        let to = self.memory.place(request.destination, request.len)?;
        Ok(Judged { request, from, to })
    }

    /// The source of the bytes, some of which are read now.
    fn source(&mut self, judged: &Judged) -> Result<(Source, bool)> {
        let Request { source: address, len, order, .. } = judged.request;
        let host = judged.from == Place::Pinned;
        if order == ORDER_DURING_CALL || judged.from == Place::Pageable {
            return Ok((Source::Taken(self.take_bytes(address, len)?), false));
        }
        if order == ORDER_STREAM {
            return Ok((Source::Memory { address, host }, false));
        }
        let when = match self.config.any_order {
            AnyOrder::Seeded => match self.call_rng.u8(..3) {
                0 => AnyOrder::Call,
                1 => AnyOrder::Between,
                _ => AnyOrder::Execution,
            },
            fixed => fixed,
        };
        let bytes = match when {
            AnyOrder::Call => Some(self.take_bytes(address, len)?),
            _ => None,
        };
        let between = when == AnyOrder::Between;
        Ok((Source::Early { address, host, bytes }, between))
    }

    fn take_bytes(&self, address: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        self.memory.read(address, &mut bytes).map_err(|_| Error::INVALID_VALUE)?;
        Ok(bytes)
    }

    /// Builds the operation of copies in one stream.
    fn copy_order(&mut self, copies: &[Judged], batch: bool) -> Result<Order> {
        let mut touches = Touches { batch: true, ..Touches::default() };
        let mut moving = Move::default();
        let engine = copies.first().map_or(Engine::None, Judged::engine);
        for judged in copies.iter().filter(|judged| judged.request.len > 0) {
            let Request { destination, source, len, order } = judged.request;
            let (bytes, between) = self.source(judged)?;
            if between {
                moving.early.push(moving.entries.len());
            }
            moving.entries.push(Entry { destination, len, source: bytes });
            let read = Touch::new(source, len, false);
            if order == ORDER_DURING_CALL || judged.from == Place::Pageable {
                touches.during.push(read);
            } else if order == ORDER_ANY {
                touches.any.push(read);
            } else {
                touches.ordered.push(read);
            }
            touches.ordered.push(Touch::new(destination, len, true));
        }
        self.call_rng.shuffle(&mut moving.early);
        let lens = copies.iter().map(|judged| judged.request.len);
        let ns = self.config.rates.copy_ns(engine, lens);
        let what = match copies {
            _ if batch => format!("batch of {} in {}", copies.len(), engine.name()),
            [one] => {
                let Request { destination, source, len, .. } = one.request;
                format!("{} {source:#x} -> {destination:#x} of {len} bytes", engine.name())
            }
            _ => engine.name().to_owned(),
        };
        Ok(Order { work: Work::Move(moving), engine, touches, ns, what })
    }
}

/// Submits copies. Returns when the driver's rules for pageable memory allow it.
pub(crate) fn submit(
    session: &mut Session,
    handle: usize,
    copies: &[Judged],
    batch: bool,
) -> Result {
    let pageable = copies.iter().any(|judged| judged.from == Place::Pageable);
    let synchronous =
        copies.iter().any(|judged| judged.to == Place::Pageable || judged.engine() == Engine::None);
    let call_ns = session.config.rates.call_ns;
    session.timeline.advance(call_ns);
    let device = session.stream(handle)?.device;
    if session.capture_takes(handle)? {
        session.counters.captured += 1;
        return Ok(());
    }
    if pageable {
        // The driver stages the bytes after what the stream has before the copy.
        let last = session.stream(handle)?.last;
        session.wait_op(last);
        session.check_lost(device)?;
        let end = session.stream(handle)?.end;
        session.timeline.reach(end);
    }
    let order = session.copy_order(copies, batch)?;
    let submitted = session.submit(handle, order)?;
    if let (true, Some(op)) = (synchronous, submitted) {
        let stream = session.stream(handle)?;
        let (clock, end) = (std::sync::Arc::new(stream.clock.clone()), stream.end);
        session.wait_op(op);
        session.check_lost(device)?;
        session.join(&clock, end);
    }
    Ok(())
}
