//! One transfer between memory and files: keeps a queue full of operations until all have ended.

use super::Shared;
use super::engine::Leased;
use super::filled::Cut;
use super::queue::{Memory, OPERATION_BYTES_MAX, Operation, Queue};
use super::staged::Staged;
use super::targets::{Order, Side, Targets};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::gate::Gate;
use crate::memory::held::NotHeld;
use crate::memory::pieces::{Fault, MemoryFault, Position};
use crate::memory::region::RegionUse;
use crate::memory::stages::Wake;
use crate::reactor::{Cause, Cx, Handler, Next};
use crate::sync::Arc;
use crate::transfer::batch::Frame;
use crate::transfer::drive::{Drive, Progress, STEP_BYTES};
use crate::transfer::job::{Job, Op};
use crate::transfer::link::Link;
use crate::transfer::still_moving::StillMoving;
use kvferry_proto::{Limits, Timestamp};
use kvferry_sys::poll::Interest;
use kvferry_sys::uring::Way;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Bytes of all operations under way, from which on no other is begun: four milliseconds of a device that
/// moves 8 GB/s. Cold reads are slower with 8 MiB. Operations can't be stopped, so no more than needed.
const IN_FLIGHT_BYTES_MAX: usize = 32 << 20;
/// Longest wait of a stopped transfer, whose deadline has passed, for the device.
const DEVICE_GRACE: Duration = Duration::from_millis(20);
/// Time after which operations that the kernel did not take are submitted again.
const RESUBMIT_AFTER: Duration = Duration::from_millis(10);

pub(super) struct FileShare {
    shared: Arc<Shared>,
    link: Arc<Link>,
    job: Arc<Job>,
    targets: Targets,
    gate: Arc<Gate>,
    /// Held by each operation.
    operations: Arc<()>,
    limits: Limits,
    /// Whether the caller's thread drives the share: it starts operations when it waits, in one call.
    is_callers: bool,
    /// Kept until the share is dropped: the descriptor that its driver waits for.
    queue: Option<Leased>,
    /// The transfer's frames, once the share has begun; they are complete when the last operation is.
    frames: Vec<Frame>,
    /// Device memory of the batch, if it has any.
    staged: Option<Staged>,
    /// The order of the pairs of host memory.
    order: Order,
    /// The next byte of host memory without an operation: its pair, and the number of the pair's bytes before it.
    at: Option<Position>,
    /// Remainders of operations that moved only a part, to be queued again.
    rest: Vec<Operation>,
    /// Bytes of the operations under way.
    in_flight: usize,
    /// Bytes of the operations that have ended.
    moved: u64,
    stopped_at: Option<Timestamp>,
    has_ended: bool,
}

impl FileShare {
    pub(super) fn new(
        shared: &Arc<Shared>,
        link: &Arc<Link>,
        job: &Arc<Job>,
        targets: Targets,
        is_callers: bool,
    ) -> Result<Self> {
        let is_host = job.batch.local.all_host();
        Ok(Self {
            // With device memory, the driver waits for the device, too.
            is_callers: is_callers && is_host,
            queue: Some(shared.engine.take(targets.queue_use(job.op))?),
            shared: Arc::clone(shared),
            link: Arc::clone(link),
            job: Arc::clone(job),
            targets,
            gate: job.core.memory.gates.gate(),
            operations: Arc::default(),
            limits: Limits::default(),
            frames: Vec::new(),
            staged: None,
            order: Order::new(if is_host { Side::All } else { Side::Host }),
            at: None,
            rest: Vec::new(),
            in_flight: 0,
            moved: 0,
            stopped_at: None,
            has_ended: false,
        })
    }

    /// The share, with `wake` to be called when its device memory may be ready.
    pub(super) fn woken_by(mut self, wake: Wake) -> Self {
        let (job, gate) = (&self.job, &self.gate);
        self.staged = (!job.batch.local.all_host()).then(|| Staged::new(job.op, gate, wake));
        self
    }

    fn queue(&mut self) -> &mut dyn Queue {
        &mut **self.queue.as_mut().expect("only drop takes the queue")
    }

    /// Takes the result of an operation.
    fn completed(&mut self, mut operation: Operation, moved: io::Result<usize>) {
        let len = operation.span.len();
        self.in_flight -= len;
        match moved {
            Ok(moved) if moved == len => self.ended(operation.memory, len),
            Ok(0) => {
                let (kind, what) = match operation.way {
                    Way::Read => (io::ErrorKind::UnexpectedEof, "the file ends before the range"),
                    Way::Write => (io::ErrorKind::WriteZero, "the file takes no more bytes"),
                };
                self.fail(&operation, Error::io(what, kind.into()));
            }
            Ok(moved) => {
                self.moved += self.counted(&operation.memory, moved);
                operation.span = operation.span.split_at(moved.min(len)).1;
                operation.offset += moved as u64;
                // What is left may not be aligned.
                operation.file = Arc::clone(self.targets.get(operation.pair).buffered());
                operation.is_direct = false;
                self.rest.push(operation);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => self.rest.push(operation),
            Err(e) => {
                let what = match operation.way {
                    Way::Read => "the file can't be read",
                    Way::Write => "the file can't be written",
                };
                self.fail(&operation, Error::io(what, e));
            }
        }
    }

    /// The bytes of an operation that have reached their destination. Bytes that were read into a stage have not.
    fn counted(&self, memory: &Memory, bytes: usize) -> u64 {
        let is_there = matches!(memory, Memory::Region(_)) || self.job.op == Op::Write;
        if is_there { bytes as u64 } else { 0 }
    }

    /// Counts an operation that has moved its last `len` bytes, and goes on with its stage.
    fn ended(&mut self, memory: Memory, len: usize) {
        self.moved += self.counted(&memory, len);
        if let (Memory::Stage(filled), Some(staged)) = (memory, &mut self.staged)
            // An earlier operation may have failed, and left the stage without its bytes.
            && !self.job.is_stopped()
            && let Err(fault) = staged.moved(filled, &self.job.batch.local)
        {
            self.job.fail(local_error(fault));
        }
    }

    /// Takes the results of the device's copies.
    fn reap(&mut self) {
        match self.staged.as_mut().map_or(Ok(0), Staged::reap) {
            Ok(moved) => self.moved += moved,
            Err(fault) => self.job.fail(local_error(fault)),
        }
    }

    fn fail(&self, operation: &Operation, error: Error) {
        let path = self.targets.get(operation.pair).path();
        let error = error.with("file", path.display()).with("offset", operation.offset);
        let pair = match &operation.memory {
            Memory::Region(_) => operation.pair,
            Memory::Stage(filled) => filled.pair_of(operation.span),
        };
        self.job.fail(error.with("len", operation.span.len()).with("pair", pair));
    }

    /// The next operation; `None` if all were made or the job is stopped.
    fn next(&mut self) -> Result<Option<Operation>> {
        if self.job.is_stopped() {
            return Ok(None);
        }
        if let Some(operation) = self.rest.pop() {
            return Ok(Some(operation));
        }
        if self.frames.is_empty() {
            self.frames.extend(std::iter::from_fn(|| self.job.next_frame(&self.limits)));
        }
        if let Some(operation) = self.next_staged() {
            return Ok(Some(operation));
        }
        let batch = &self.job.batch;
        let at = match self.at {
            Some(at) => at,
            None => match self.order.next(batch, self.job.op, &self.targets) {
                Some(piece) => Position { piece, within: 0 },
                None => return Ok(None),
            },
        };
        let (piece, part) = (&batch.local.pieces[at.piece], &batch.remote[at.piece]);
        let len = piece.len - at.within;
        let memory = batch.local.address(piece).wrapping_add(at.within);
        let file = self.targets.get(at.piece);
        let target = file.target(part.offset + at.within, len, memory, OPERATION_BYTES_MAX);
        let size = usize::try_from(target.len).expect("at most OPERATION_BYTES_MAX");
        let (held, span) = RegionUse::new(&batch.local, &self.gate, at, size).map_err(|e| {
            let error = match e {
                NotHeld::Unregistered => unregistered(),
                NotHeld::Unsupported => {
                    let what = "memory that was not registered can't be moved to or from a file";
                    Error::new(ErrorKind::Unsupported, what)
                }
            };
            error.with("pair", at.piece)
        })?;
        let within = at.within + target.len;
        self.at = (within < piece.len).then_some(Position { within, ..at });
        Ok(Some(Operation {
            way: self.way(),
            file: target.file,
            offset: target.offset,
            span,
            is_direct: target.is_direct,
            memory: Memory::Region(held),
            pair: at.piece,
            _share: Arc::clone(&self.operations),
        }))
    }

    fn way(&self) -> Way {
        if self.job.op == Op::Write { Way::Write } else { Way::Read }
    }

    /// The next operation on a stage of a device.
    fn next_staged(&mut self) -> Option<Operation> {
        let way = self.way();
        let staged = self.staged.as_mut()?;
        let (cut, is_last) = staged.ready()?.next(&self.targets, OPERATION_BYTES_MAX);
        if is_last {
            staged.leave_ready();
        }
        let Cut { file, offset, is_direct, span, pair, filled } = cut;
        let (memory, _share) = (Memory::Stage(filled), Arc::clone(&self.operations));
        Some(Operation { way, file, offset, span, is_direct, memory, pair, _share })
    }

    /// Fills the queue, up to the bytes of one step. True if there was room for more.
    fn fill(&mut self) -> bool {
        if let Some(staged) = &mut self.staged
            && let Err(fault) = staged.begin(&self.job.batch, &self.targets)
        {
            self.job.fail(local_error(fault));
        }
        let mut budget = STEP_BYTES;
        while budget > 0 && !self.queue().is_full() && self.in_flight < IN_FLIGHT_BYTES_MAX {
            match self.next() {
                Ok(Some(operation)) => {
                    budget = budget.saturating_sub(operation.span.len());
                    self.in_flight += operation.span.len();
                    self.queue().push(operation);
                }
                Ok(None) => break,
                Err(e) => self.job.fail(e),
            }
        }
        if !self.is_callers
            && let Err(e) = self.queue().submit()
        {
            self.job.fail(Error::io("operations on files can't be started", e));
        }
        budget == 0
    }

    /// Ends the share of a stopped job once the device has stopped, or does not answer.
    fn stop(&mut self, now: Timestamp) -> Progress {
        self.rest.clear();
        if let Some(staged) = &mut self.staged {
            staged.stop();
        }
        self.queue().stop();
        if self.queue().in_flight() == 0 {
            // The driver ends the share if the copies take too long.
            return if self.gate.has_copies() { Progress::Memory } else { self.end() };
        }
        let stopped_at = *self.stopped_at.get_or_insert(now);
        // A caller without a deadline gets its memory back, however long that takes; but not from an agent
        // that is shut down, which nothing else could end.
        let is_without_end = self.job.deadline == now + Duration::MAX && !self.job.core.is_closed();
        let grace = match now >= self.job.deadline {
            true => DEVICE_GRACE,
            false => self.job.core.settings.silence,
        };
        if now.saturating_since(stopped_at) >= grace && !is_without_end {
            // The operations keep their memory until the device answers.
            self.has_ended = true;
            self.job.share_abandoned(&self.link, None, self.still_moving());
            return Progress::Done;
        }
        self.waits()
    }

    /// A caller's thread waits by the queue's own means, which also start what was pushed.
    fn waits(&self) -> Progress {
        Progress::Wait(if self.is_callers { Interest::None } else { Interest::Read })
    }

    fn end(&mut self) -> Progress {
        self.has_ended = true;
        // Also of a job that was stopped too late.
        if self.moved == self.job.batch.bytes() {
            for frame in &self.frames {
                let note = self.job.acknowledged(frame);
                debug_assert!(note.is_none(), "refused before the transfer began");
            }
        }
        self.job.share_ended(&self.link, None);
        Progress::Done
    }
}

fn unregistered() -> Error {
    Error::new(ErrorKind::Revoked, "the local region was unregistered")
}

/// The error of device memory that can't be used any more.
fn local_error(fault: Fault) -> Error {
    match fault {
        Fault::Memory(MemoryFault { device: None, index, .. }) => {
            unregistered().with("pair", index)
        }
        Fault::Memory(MemoryFault { code, index, device: Some(e) }) => {
            let what = "a device failed to copy local memory";
            Error::new(ErrorKind::from_wire(code), what).caused_by(e).with("pair", index)
        }
        Fault::Shut | Fault::Io(_) => {
            Error::new(ErrorKind::Internal, "a transfer with a file was stopped")
        }
    }
}

impl Drive for FileShare {
    fn wait(&mut self, timeout: Duration) -> Option<io::Result<()>> {
        Some(self.queue().wait(timeout))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.as_ref().map(|queue| queue.fd())
    }

    fn progress(&mut self, now: Timestamp) -> Progress {
        if self.has_ended {
            return Progress::Done;
        }
        while let Some((operation, moved)) = self.queue().completed() {
            self.completed(operation, moved);
        }
        self.reap();
        if self.job.core.is_closed() {
            self.job.stop(Error::shutdown());
        }
        let has_more = !self.job.is_stopped() && self.fill();
        if self.job.is_stopped() {
            return self.stop(now);
        }
        if has_more {
            return Progress::Again;
        }
        if self.queue().in_flight() > 0 {
            return self.waits();
        }
        if self.staged.as_ref().is_some_and(|staged| !staged.has_ended()) {
            return Progress::Memory;
        }
        self.end()
    }

    fn still_moving(&self) -> StillMoving {
        StillMoving::new(&self.gate, &self.operations)
    }

    fn check_at(&self) -> Option<Timestamp> {
        let queue = self.queue.as_ref().filter(|_| !self.is_callers)?;
        // The kernel took no more; perhaps nothing that is under way will wake the share.
        (!queue.is_submitted()).then(|| crate::reactor::now() + RESUBMIT_AFTER)
    }
}

impl Drop for FileShare {
    fn drop(&mut self) {
        let Some(mut leased) = self.queue.take() else { return };
        // Operations end without the share; nothing waits for them here.
        leased.stop();
        while leased.completed().is_some() {}
        if leased.in_flight() == 0 {
            self.shared.engine.put(leased);
        } else if !self.job.core.is_closed() {
            let control = &self.job.core.threads.control;
            control.add(control.token(), Box::new(Leftover(leased)));
        }
    }
}

/// The queue of a transfer that has ended before its operations.
struct Leftover(Leased);

impl Handler for Leftover {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.fd())
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        self.0.stop();
        while self.0.completed().is_some() {}
        match self.0.in_flight() {
            0 => Next::Close,
            _ => {
                let again = (!self.0.is_submitted()).then(|| cx.now + RESUBMIT_AFTER);
                Next::Wait { interest: Interest::Read, deadline: again }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Mutex;
    use crate::transfer::batch::Batch;
    use crate::transport::file::Storage;
    use crate::transport::file::targets::SORTED_PAIRS;
    use crate::{Access, Agent, FileOptions, Options};
    use kvferry_sys::poll::EventFd;
    use kvferry_testkit::{PATIENCE, eventually};
    use std::collections::VecDeque;
    use std::thread;
    use std::time::Instant;

    /// A queue whose operations end when the test says so, with the result that it says.
    #[derive(Clone)]
    struct Scripted(Arc<Script>);

    struct Script {
        pushed: Mutex<VecDeque<Operation>>,
        ended: Mutex<VecDeque<(Operation, io::Result<usize>)>>,
        event: EventFd,
    }

    impl Scripted {
        fn new() -> Self {
            let event = EventFd::new().expect("a descriptor");
            Self(Arc::new(Script { pushed: Mutex::default(), ended: Mutex::default(), event }))
        }

        /// Bytes of the operations that have been pushed and have not ended.
        fn pushed_bytes(&self) -> usize {
            self.0.pushed.lock().iter().map(|operation| operation.span.len()).sum()
        }

        /// Ends the operation that was pushed first; false if there is none.
        fn end_one(&self, result: impl FnOnce(&Operation) -> io::Result<usize>) -> bool {
            // With the lock, so that the operation is counted at each moment.
            let mut pushed = self.0.pushed.lock();
            let Some(operation) = pushed.pop_front() else {
                return false;
            };
            let result = result(&operation);
            self.0.ended.lock().push_back((operation, result));
            drop(pushed);
            self.0.event.signal();
            true
        }
    }

    impl Queue for Scripted {
        fn in_flight(&self) -> usize {
            let pushed = self.0.pushed.lock();
            pushed.len() + self.0.ended.lock().len()
        }

        fn push(&mut self, operation: Operation) {
            self.0.pushed.lock().push_back(operation);
        }

        fn submit(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn stop(&mut self) {}

        fn completed(&mut self) -> Option<(Operation, io::Result<usize>)> {
            let mut ended = self.0.ended.lock();
            if ended.is_empty() {
                self.0.event.clear();
            }
            ended.pop_front()
        }

        fn fd(&self) -> BorrowedFd<'_> {
            use std::os::fd::AsFd;
            self.0.event.as_fd()
        }
    }

    struct Rig {
        agent: Agent,
        queue: Scripted,
        memory: crate::Region,
        file: crate::FileRegion,
        batch: Batch,
    }

    fn storage(agent: &Agent) -> Arc<Storage> {
        agent.services().get().expect("every agent has files")
    }

    /// A batch of 100 000 bytes that the scripted queue moves.
    fn rig(name: &str) -> Rig {
        rig_with(name, Duration::from_millis(200))
    }

    fn rig_with(name: &str, silence: Duration) -> Rig {
        let agent = Agent::builder().name(name).silence(silence).start().expect("an agent");
        let path = std::env::temp_dir().join(format!("kvferry-{}-{name}", std::process::id()));
        let file = agent.open_file(&path, &FileOptions::create(100_000)).expect("a file");
        std::fs::remove_file(&path).expect("made above");
        let memory = agent.allocate_private(100_000, Access::NONE).expect("memory");
        let mut batch = Batch::new();
        batch.push(&memory, 0, &file.remote(), 0, 100_000).expect("inside");
        let queue = Scripted::new();
        storage(&agent).engine().keep_for_all(|| Box::new(queue.clone()));
        Rig { agent, queue, memory, file, batch }
    }

    fn within(timeout: Duration) -> Options<'static> {
        Options { timeout: Some(timeout), ..Options::default() }
    }

    #[test]
    fn a_device_that_does_not_answer_ends_the_transfer_in_time_and_keeps_the_memory() {
        // `unregister` waits that long for the device.
        let rig = rig_with("silent", PATIENCE);
        let timeout = Duration::from_millis(100);
        // A transfer whose time is over before it begins has asked the device for nothing.
        let e = loop {
            let began = Instant::now();
            let transfer = rig.agent.files().read_async(&rig.batch, &within(timeout));
            let e = transfer.wait(PATIENCE).expect("it ends").expect_err("no answer");
            assert!(began.elapsed() >= timeout);
            if rig.queue.in_flight() > 0 {
                break e;
            }
        };
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Deadline, Some(false)), "{e}");
        let (agent, memory) = (rig.agent.clone(), rig.memory.clone());
        let unregistering = thread::spawn(move || agent.unregister(&memory));
        thread::sleep(Duration::from_millis(50));
        assert!(!unregistering.is_finished(), "the device may still write to the memory");
        while rig.queue.end_one(|operation| Ok(operation.span.len())) {}
        unregistering.join().expect("no panic").expect("registered");
        assert_eq!(rig.agent.stats().transfers_unconfirmed, 1);
        rig.agent.shutdown();
    }

    #[test]
    fn a_transfer_without_a_deadline_ends_when_the_device_has_answered_also_if_it_is_cancelled() {
        let rig = rig("without-end");
        let transfer = rig.agent.files().read_async(&rig.batch, &within(Duration::MAX));
        eventually("the device is asked for all of it", || rig.queue.pushed_bytes() == 100_000);
        transfer.cancel();
        // Longer than the agent's limit of silence.
        assert!(transfer.wait(Duration::from_millis(600)).is_none(), "the device may still write");
        while rig.queue.end_one(|operation| Ok(operation.span.len())) {}
        let outcome = transfer.wait(Duration::from_secs(60)).expect("it ends");
        assert!(outcome.as_ref().is_ok_and(|it| it.bytes == 100_000), "{outcome:?}");
        rig.agent.shutdown();
    }

    #[test]
    fn a_cancelled_transfer_waits_for_a_silent_device_as_long_as_for_a_silent_peer() {
        let rig = rig("cancelled");
        let transfer = rig.agent.files().read_async(&rig.batch, &within(Duration::from_secs(600)));
        eventually("it begins", || rig.queue.in_flight() > 0);
        let began = Instant::now();
        transfer.cancel();
        let e = transfer.wait(Duration::from_secs(30)).expect("it ends").expect_err("no answer");
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Cancelled, Some(false)), "{e}");
        assert!(!transfer.is_quiet(), "the device may still write to the memory");
        assert!(began.elapsed() >= Duration::from_millis(190), "{:?}", began.elapsed());
        assert!(!rig.memory.is_quarantined(), "it is registered");
        while rig.queue.end_one(|operation| Ok(operation.span.len())) {}
        // An I/O thread that runs late takes the answers only after the limit of silence.
        eventually("nothing writes to the memory", || transfer.is_quiet());
        eventually("the memory goes back", || rig.agent.unregister(&rig.memory).is_ok());
        rig.agent.shutdown();
    }

    #[test]
    fn a_part_that_was_moved_is_followed_by_the_rest() {
        let rig = rig("parts");
        let transfer = rig.agent.files().write_async(&rig.batch, &within(Duration::from_secs(30)));
        let mut moved: Vec<(u64, usize)> = Vec::new();
        let mut calls = 0;
        while transfer.outcome().is_none() {
            let ended = rig.queue.end_one(|operation| {
                calls += 1;
                let len = operation.span.len();
                match calls % 3 {
                    0 => Err(io::ErrorKind::Interrupted.into()),
                    _ => {
                        let part = len.div_ceil(3).max(1000).min(len);
                        moved.push((operation.offset, part));
                        Ok(part)
                    }
                }
            });
            if !ended {
                thread::sleep(Duration::from_micros(100));
            }
        }
        transfer.outcome().expect("seen above").expect("all moved");
        moved.sort_unstable();
        let mut at = 0;
        for (offset, len) in moved {
            assert_eq!(offset, at, "each byte once");
            at += len as u64;
        }
        assert_eq!(at, 100_000);
        rig.agent.shutdown();
    }

    #[test]
    fn each_pair_is_moved_once_and_neighbours_in_the_file_one_after_the_other() {
        let rig = rig("order");
        let mut batch = Batch::new();
        let pairs = 3 * SORTED_PAIRS as u64 / 2;
        for pair in 0..pairs {
            let at = pair * 7919 % pairs;
            batch.push(&rig.memory, 0, &rig.file.remote(), at * 8, 8).expect("inside");
        }
        let shared = &storage(&rig.agent).shared;
        let targets = Targets::of(&batch, Op::Read, &shared.table).expect("an open file");
        let mut order = Order::new(Side::All);
        let pairs: Vec<usize> =
            std::iter::from_fn(|| order.next(&batch, Op::Write, &targets)).collect();
        let sorted = |pairs: &[usize]| pairs.is_sorted_by_key(|pair| batch.remote[*pair].offset);
        assert!(sorted(&pairs[..SORTED_PAIRS]) && sorted(&pairs[SORTED_PAIRS..]));
        let mut each = pairs.clone();
        each.sort_unstable();
        assert!(each.into_iter().eq(0..pairs.len()));
        rig.agent.shutdown();
    }

    #[test]
    fn one_failure_is_the_outcome_once_all_other_operations_have_ended() {
        let rig = rig("failure");
        let transfer = rig.agent.files().write_async(&rig.batch, &within(Duration::from_secs(30)));
        let mut first = true;
        let give_up = Instant::now() + Duration::from_secs(30);
        while transfer.outcome().is_none() {
            assert!(Instant::now() < give_up, "it does not end");
            rig.queue.end_one(|operation| match std::mem::take(&mut first) {
                true => Err(io::Error::from_raw_os_error(5)),
                false => Ok(operation.span.len()),
            });
            thread::sleep(Duration::from_micros(100));
        }
        let e = transfer.outcome().expect("seen above").expect_err("the device failed");
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Io, Some(true)), "{e}");
        assert_eq!(e.context("file"), Some(&*rig.file.path().display().to_string()));
        assert_eq!(rig.queue.in_flight(), 0);
        rig.agent.unregister(&rig.memory).expect("nothing uses it");
        rig.agent.shutdown();
    }
}
