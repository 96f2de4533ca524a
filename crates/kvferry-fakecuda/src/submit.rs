//! How an operation gets into a stream, and what captures make of it.

use std::sync::Arc;

use crate::abi::{
    CAPTURE_GLOBAL, CAPTURE_RELAXED, CAPTURE_THREAD_LOCAL, Error, Result, STREAM_LEGACY,
    STREAM_PER_THREAD,
};
use crate::clocks::Clock;
use crate::faults::Fault;
use crate::ops::{Op, Touches, Work};
use crate::races::Point;
use crate::state::State;
use crate::streams::{Event, EventRecord, Stream};
use crate::thread;
use crate::timeline::Engine;

/// An operation for [`State::submit`].
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) work: Work,
    pub(crate) engine: Engine,
    pub(crate) touches: Touches,
    /// The virtual time that it takes.
    pub(crate) ns: u64,
    pub(crate) what: String,
}

impl State {
    /// The stream behind a handle, default streams included. `device` has the current context.
    pub(crate) fn stream_handle(&mut self, handle: usize, device: usize) -> Result<usize> {
        match handle {
            0 | STREAM_LEGACY => {
                let known = self.primary(device)?.legacy;
                if let Some(stream) = known {
                    return Ok(stream);
                }
                let stream = self.new_default_stream(device);
                self.stream(stream)?.legacy = true;
                self.primary(device)?.legacy = Some(stream);
                Ok(stream)
            }
            STREAM_PER_THREAD => {
                let key = (device, thread::with(|local| local.id));
                if let Some(&stream) = self.thread_streams.get(&key) {
                    return Ok(stream);
                }
                let stream = self.new_default_stream(device);
                self.thread_streams.insert(key, stream);
                Ok(stream)
            }
            _ => {
                let stream = self.stream(handle)?;
                if stream.dying { Err(Error::INVALID_HANDLE) } else { Ok(handle) }
            }
        }
    }

    fn new_default_stream(&mut self, device: usize) -> usize {
        let mut stream = Stream::new(device, true, self.checker.new_actor());
        stream.owned = false;
        let handle = self.new_handle();
        self.streams.insert(handle, stream);
        handle
    }

    pub(crate) fn stream(&mut self, handle: usize) -> Result<&mut Stream> {
        let orphan = self.orphans.contains(&handle);
        let missing = if orphan { Error::CONTEXT_IS_DESTROYED } else { Error::INVALID_HANDLE };
        self.streams.get_mut(&handle).ok_or(missing)
    }

    pub(crate) fn event(&mut self, handle: usize) -> Result<&mut Event> {
        let orphan = self.orphans.contains(&handle);
        let missing = if orphan { Error::CONTEXT_IS_DESTROYED } else { Error::INVALID_HANDLE };
        self.events.get_mut(&handle).ok_or(missing)
    }

    /// Operations that the legacy stream's rules put before the next one of `handle`, with the
    /// streams that they are the last of.
    fn implicit_edges(&self, handle: usize) -> Vec<usize> {
        let stream = &self.streams[&handle];
        let joins = |other: &Stream| {
            other.device == stream.device
                && if stream.legacy { other.blocking } else { stream.blocking && other.legacy }
        };
        self.streams.iter().filter(|(h, s)| **h != handle && joins(s)).map(|(h, _)| *h).collect()
    }

    /// Appends an operation. `None`: a capture has taken it.
    pub(crate) fn submit(&mut self, handle: usize, order: Order) -> Result<Option<u64>> {
        if self.capture_takes(handle)? {
            self.counters.captured += 1;
            return Ok(None);
        }
        let device = self.streams[&handle].device;
        self.check_lost(device)?;
        let Order { work, engine, touches, ns, what } = order;
        let mut after = Vec::new();
        let mut clock = self.streams[&handle].clock.clone();
        let mut ready = self.streams[&handle].end;
        for other in self.implicit_edges(handle) {
            let other = &self.streams[&other];
            clock.join(&other.clock);
            ready = ready.max(other.end);
            after.push(other.last);
        }
        after.retain(|op| self.pending.contains(op));
        let point = self.edges(handle, clock, &touches, &what);
        let id = self.new_op();
        let stalled = self.faults.hit(Fault::StreamStalls);
        let times = if self.streams[&handle].slow { self.config.slow_times } else { 1 };
        let end = self.timeline.book(device, engine, ready, ns.saturating_mul(times));
        let stream = self.stream(handle)?;
        stream.end = end;
        stream.last = id;
        let op = Op { id, work, engine, after, point, started: false, stalled, not_before: None };
        stream.queue.push_back(op);
        self.pending.insert(id);
        if stalled {
            self.stuck.push(id);
        }
        self.counters.submitted += 1;
        self.work_ready();
        Ok(Some(id))
    }

    /// Makes the operation's step in the order of events and records its accesses.
    fn edges(
        &mut self,
        handle: usize,
        mut clock: Clock,
        touches: &Touches,
        what: &str,
    ) -> Arc<Point> {
        let host = self.host_key();
        let name = self.describe(handle, what);
        if !self.config.race_checks {
            return Arc::new(Point { actor: 0, step: 0, before: Arc::default(), what: name });
        }
        let host_clock = self.checker.host_clock(host);
        clock.join(&host_clock);
        let stream = self.streams.get_mut(&handle).expect("submit has looked it up");
        stream.step += 1;
        let (actor, step) = (stream.actor, stream.step);
        let point =
            Arc::new(Point { actor, step, before: Arc::new(clock.clone()), what: name.clone() });
        clock.set(actor, step);
        stream.clock = clock;
        if touches.batch {
            let all = [touches.ordered.as_slice(), &touches.any, &touches.during].concat();
            self.checker.check_within(&all, &name);
        }
        if !touches.during.is_empty() {
            let during = self.checker.host_point(host, format!("{name} (during the call)"));
            self.checker.record(&touches.during, &during);
        }
        if !touches.any.is_empty() {
            let what = format!("{name} (in any order)");
            let any = Arc::new(Point { actor, step, before: Arc::new(host_clock), what });
            self.checker.record(&touches.any, &any);
        }
        self.checker.record(&touches.ordered, &point);
        self.checker.host_step(host);
        point
    }

    fn describe(&self, handle: usize, what: &str) -> String {
        let stack = if self.config.stacks {
            format!("\n{}\n ", std::backtrace::Backtrace::force_capture())
        } else {
            String::new()
        };
        format!("{what} (operation {}) of stream {handle:#x}{stack}", self.next_op + 1)
    }

    /// Puts a marker into the stream that waits for the record.
    pub(crate) fn wait_for(&mut self, handle: usize, record: &EventRecord) -> Result {
        let stream = self.stream(handle)?;
        stream.clock.join(&record.clock);
        stream.end = stream.end.max(record.end);
        let order = Order {
            work: Work::Marker,
            engine: Engine::None,
            touches: Touches::default(),
            ns: 0,
            what: "wait".to_owned(),
        };
        let submitted = self.submit(handle, order)?;
        if submitted.is_some() && self.pending.contains(&record.op) {
            let op = self.stream(handle)?.queue.back_mut();
            op.expect("submit has pushed it").after.push(record.op);
        }
        Ok(())
    }

    /// Records an event in the stream. The caller has checked their contexts.
    pub(crate) fn record(&mut self, event: usize, handle: usize) -> Result {
        if self.capture_takes(handle)? {
            let capture = &self.stream(handle)?.capture;
            let captured = capture.as_ref().map(|capture| (capture.origin, handle));
            let record = EventRecord { op: 0, clock: Arc::default(), end: 0, captured };
            self.event(event)?.record = Some(record);
            return Ok(());
        }
        let order = Order {
            work: Work::Marker,
            engine: Engine::None,
            touches: Touches::default(),
            ns: 0,
            what: "record".to_owned(),
        };
        let op = self.submit(handle, order)?.expect("no capture takes it");
        let never = self.faults.hit(Fault::EventNeverSignals);
        let op = if never { self.new_stuck_op() } else { op };
        let stream = &self.streams[&handle];
        let (clock, end) = (Arc::new(stream.clock.clone()), stream.end);
        self.event(event)?.record = Some(EventRecord { op, clock, end, captured: None });
        Ok(())
    }

    /// Whether the stream captures. An error where the call is not possible beside a capture.
    pub(crate) fn capture_takes(&mut self, handle: usize) -> Result<bool> {
        let stream = self.stream(handle)?;
        if let Some(capture) = &mut stream.capture {
            capture.joined = false;
            return if capture.invalidated {
                Err(Error::STREAM_CAPTURE_INVALIDATED)
            } else {
                Ok(true)
            };
        }
        if !stream.legacy {
            return Ok(false);
        }
        let device = stream.device;
        let blocked = self
            .streams
            .values_mut()
            .filter(|s| s.device == device && s.blocking)
            .filter_map(|s| s.capture.as_mut());
        let mut any = false;
        for capture in blocked {
            capture.invalidated = true;
            any = true;
        }
        if any { Err(Error::STREAM_CAPTURE_IMPLICIT) } else { Ok(false) }
    }

    /// Checks a call that a capture may forbid on this thread; it ends the captures it breaks.
    pub(crate) fn unsafe_in_capture(&mut self) -> Result {
        let (id, mode) = thread::with(|local| (local.id, local.capture_mode));
        if mode == CAPTURE_RELAXED {
            return Ok(());
        }
        let mut broken = false;
        for capture in self.streams.values_mut().filter_map(|s| s.capture.as_mut()) {
            let hits = match capture.mode {
                CAPTURE_GLOBAL => mode == CAPTURE_GLOBAL || capture.thread == id,
                CAPTURE_THREAD_LOCAL => capture.thread == id,
                _ => false,
            };
            if hits {
                capture.invalidated = true;
                broken = true;
            }
        }
        if broken { Err(Error::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }
}
