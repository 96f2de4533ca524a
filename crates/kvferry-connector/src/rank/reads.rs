//! Reads: submitted when a part of a handoff became ready, polled when the agent wakes them.

use super::state::{DrivingThread, Notice, Running, Shared, State};
use super::types::{ReadPart, ReadRequest};
use crate::codes::code_of;
use kvferry::{Channel, Options};
use kvferry_proto::handoff::{HandoffId, PeerId, ReadId, Slice};
use kvferry_proto::{Timestamp, WireCode};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// How long beyond its handoff's deadline a read may take.
const BEYOND: Duration = Duration::from_secs(3);
/// Time between two looks at reads that have ended while a device still copies for them.
const LOOK_EVERY: Duration = Duration::from_millis(10);

impl Shared {
    /// Tells the machines of reads that have ended.
    pub(super) fn poll_reads(self: &Arc<Self>, state: &mut State, now: Timestamp) {
        let mut woken = std::mem::take(&mut *self.woken.lock());
        if state.unquiet.at.take_if(|at| *at <= now).is_some() {
            woken.append(&mut state.unquiet.reads);
        }
        for read in woken {
            let Some(running) = state.reads.get_mut(&read) else { continue };
            let waker = Waker::from(Arc::new(ReadWaker { shared: Arc::downgrade(self), read }));
            let transfer = Pin::new(&mut running.transfer);
            let Poll::Ready(outcome) = Future::poll(transfer, &mut Context::from_waker(&waker))
            else {
                continue;
            };
            if outcome.as_ref().is_err_and(|e| e.quiesced() == Some(false))
                && !running.transfer.is_quiet()
            {
                // The device writes the blocks until its copy ends. The engine must not reuse them before.
                state.unquiet.reads.push(read);
                state.unquiet.at.get_or_insert(now + LOOK_EVERY);
                continue;
            }
            let Running { id, bytes, began, from, channel: before, .. } =
                state.reads.remove(&read).expect("polled above");
            if outcome.is_ok() && self.observer.is_some() {
                let part = ReadPart { bytes, began, ended: Instant::now() };
                state.notices.push_back(Notice::Read(id.clone(), part));
            }
            let result = outcome.map(drop).map_err(|e| match code_of(e.kind()) {
                // The read's deadline is beyond the handoff's: it failed because no stream opened.
                WireCode::Deadline => (WireCode::Silent, e.to_string()),
                code => (code, e.to_string()),
            });
            let is_lost = matches!(&result, Err((WireCode::Closed | WireCode::Silent, _)));
            state.consumer.read_ended(read, result, now);
            let channel = state.peers.channel(from).filter(|channel| channel.end().is_none());
            if is_lost && let Some(incarnation) = channel.map(Channel::incarnation) {
                // Either its session ended and has a successor, or only its stream was lost.
                let is_new = channel != before.as_ref();
                if is_new || state.may_retry(&id) {
                    state.consumer.met(from, incarnation, now);
                }
            }
        }
    }

    pub(super) fn begin_read(
        self: &Arc<Self>,
        read: ReadId,
        id: &HandoffId,
        from: PeerId,
        slice: Slice,
    ) {
        let mut state = self.state.lock();
        let mapper = state.mappers.remove(id);
        let place = state.peers.place_of(from);
        let place = place.map(|(address, place)| (address.to_owned(), place.peer.clone()));
        let tables = state.consumer.table(id, from);
        let tables: Option<Vec<_>> = tables.map(|tables| tables.cloned().collect());
        let channel = state.peers.channel(from).cloned();
        // The machine cancels the read at the handoff's deadline. This ends a read that can't be
        // cancelled.
        let left = state.consumer.deadline(id).map(|at| at.saturating_since(self.now()));
        let timeout = left.map(|left| left + BEYOND);
        drop(state);
        let (Some(mut mapper), Some((address, peer)), Some(tables)) = (mapper, place, tables)
        else {
            return self.read_ended(read, Err((WireCode::Closed, String::new())));
        };
        let part = ReadRequest { from: &address, tables: &tables, slice };
        let mapped = catch_unwind(AssertUnwindSafe(|| mapper.map(&part)))
            .unwrap_or_else(|_| Err((WireCode::Internal, "its mapper panicked".to_owned())));
        let began = Instant::now();
        let begun = mapped.map(|batch| {
            let bytes = batch.bytes();
            (bytes > 0).then(|| {
                (bytes, peer.read_async(&batch, &Options { timeout, ..Options::default() }))
            })
        });
        let mut state = self.state.lock();
        state.mappers.insert(id.clone(), mapper);
        if let Ok(Some((bytes, transfer))) = begun {
            let id = id.clone();
            state.reads.insert(read, Running { transfer, id, bytes, began, from, channel });
            drop(state);
            self.wake(read);
        } else {
            drop(state);
            self.read_ended(read, begun.map(drop));
        }
    }

    /// The thread that drives the machines calls it, and goes on.
    fn read_ended(&self, read: ReadId, result: Result<(), (WireCode, String)>) {
        self.state.lock().consumer.read_ended(read, result, self.now());
    }

    /// Has the read polled: on this thread, or on the one that drives the machines.
    fn wake(self: &Arc<Self>, read: ReadId) {
        self.woken.lock().push(read);
        self.drive(DrivingThread::Agent);
    }
}

struct ReadWaker {
    shared: Weak<Shared>,
    read: ReadId,
}

impl Wake for ReadWaker {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.shared.upgrade() {
            shared.wake(self.read);
        }
    }
}
