//! The transport in memory, with every fault.
//!
//! Jobs wait in one queue. A worker takes the first, moves a slice of it and puts it at the end,
//! so that small ones are not starved. A piece is moved inside the gates of both regions;
//! `unregister` closes a gate and waits until every worker has left it. A timer ends a job that is
//! past its deadline while it waits in the queue, or its worker for a device that makes no progress.

mod side;

use super::Fault;
use crate::fabric::{
    Aim, Endpoint, Failure, Handle, Move, Outcome, Pair, Region, TransferStats, Way,
};
use crate::memory::{Memory, MemoryKind};
use crate::pattern::MARKER;
use crate::slow::{Direction, SlowMemory};
use kvferry::{Access, Notification, Options};
use kvferry_sys::map::Mapping;
use kvferry_sys::poll::EventFd;
use kvferry_sys::sync::{Condvar, Mutex, RwLock};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use side::Side;

const PIECE_BYTES: usize = 64 * 1024;
const SLICE_BYTES: usize = 1024 * 1024;
const SLICE_MOVES: usize = 512;
const WORKERS: usize = 4;

/// Time after a deadline in which a worker may notice it before the timer does.
const GRACE: Duration = Duration::from_millis(30);
/// Big batches that a transport which prefers them moves before a small one.
const BIG_FIRST: u64 = 20;
/// Time that a late byte waits for its memory to be used again.
const LATE_MAX: Duration = Duration::from_secs(10);

pub(super) fn pair(fault: Option<Fault>) -> Pair {
    let wire = Arc::new(Wire {
        fault,
        queue: Mutex::default(),
        wake: Condvar::new(),
        ends: Default::default(),
        next_id: AtomicU64::new(1),
        timed: Mutex::default(),
        stopped: AtomicBool::new(false),
        whole_jobs: Mutex::new(()),
        shared_buffer: Mutex::new(Arc::new(buffer())),
        cache: Mutex::default(),
        penalty: AtomicBool::new(false),
        bigs: AtomicU64::new(0),
        was_full: AtomicBool::new(false),
        refusals: AtomicU64::new(0),
    });
    for _ in 0..WORKERS {
        spawn(&wire, Wire::work);
    }
    spawn(&wire, Wire::watch_deadlines);
    let wire = Arc::new(StopOnDrop(wire));
    let end = |side| -> Arc<dyn Endpoint> { Arc::new(Side { side, wire: Arc::clone(&wire) }) };
    Pair { near: end(0), far: end(1) }
}

fn spawn(wire: &Arc<Wire>, work: fn(&Arc<Wire>)) {
    let wire = Arc::clone(wire);
    thread::spawn(move || work(&wire));
}

fn buffer() -> Mapping {
    Mapping::anonymous(PIECE_BYTES).expect("the machine has memory")
}

/// Ends the threads of the wire with the last of its sides.
struct StopOnDrop(Arc<Wire>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stopped.store(true, SeqCst);
        self.0.wake.notify_all();
    }
}

struct Wire {
    fault: Option<Fault>,
    queue: Mutex<VecDeque<Arc<Job>>>,
    wake: Condvar,
    ends: [End; 2],
    next_id: AtomicU64,
    timed: Mutex<Vec<Arc<Job>>>,
    stopped: AtomicBool,
    // Only faults use these.
    whole_jobs: Mutex<()>,
    shared_buffer: Mutex<Arc<Mapping>>,
    cache: Mutex<HashMap<(u64, u64, usize), Vec<u8>>>,
    /// The next transfer is held up.
    penalty: AtomicBool,
    /// Big batches that a worker has taken.
    bigs: AtomicU64,
    was_full: AtomicBool,
    refusals: AtomicU64,
}

#[derive(Default)]
struct End {
    regions: Mutex<HashMap<u64, Arc<Registered>>>,
    notes: Mutex<Notes>,
    noted: Condvar,
    in_flight: AtomicUsize,
    closed: AtomicBool,
}

#[derive(Default)]
struct Notes {
    queue: VecDeque<Notification>,
    delivered: usize,
    overtaken: Option<Notification>,
}

struct Registered {
    id: u64,
    memory: Memory,
    offset: usize,
    len: u64,
    access: Access,
    alive: AtomicBool,
    gate: RwLock<()>,
}

impl Registered {
    fn address(&self) -> u64 {
        self.memory.as_ptr() as u64 + self.offset as u64
    }
}

/// A move whose regions were found and checked.
struct Resolved {
    local: Arc<Registered>,
    local_at: u64,
    remote: Arc<Registered>,
    remote_at: u64,
    len: u64,
}

impl Resolved {
    /// Source and destination of the bytes.
    fn ends(&self, way: Way) -> [(&Arc<Registered>, u64); 2] {
        let (local, remote) = ((&self.local, self.local_at), (&self.remote, self.remote_at));
        match way {
            Way::Write => [local, remote],
            Way::Read => [remote, local],
        }
    }
}

struct Job {
    side: usize,
    way: Way,
    moves: Vec<Move>,
    note: Option<Notification>,
    deadline: Option<Instant>,
    cancelled: AtomicBool,
    refusals_before: u64,
    bigs_before: u64,
    progress: Mutex<Progress>,
    outcome: Mutex<Option<Outcome>>,
    /// The outcome that replaces the first one once that was read.
    second: Mutex<Option<Outcome>>,
    /// Threads that wait for the end.
    waiting: AtomicUsize,
    ended: Condvar,
    event: EventFd,
}

#[derive(Default)]
struct Progress {
    resolved: Option<Vec<Resolved>>,
    index: usize,
    offset: u64,
}

enum Step {
    Again,
    End(Outcome),
    /// The job has no outcome; only faults do this.
    Forget,
}

impl Job {
    fn moved(&self) -> TransferStats {
        TransferStats {
            bytes: self.moves.iter().map(|m| m.len).sum(),
            descriptors: self.moves.len(),
        }
    }

    /// Whether host and device memory meet in it.
    fn is_mixed(&self) -> bool {
        let mut moves = self.moves.iter();
        moves.any(|m| m.local.memory.kind() != m.remote.memory.kind())
    }

    /// The outcome, which only faults replace.
    fn read(&self, outcome: &mut Option<Outcome>) -> Option<Outcome> {
        let read = outcome.clone();
        if read.is_some()
            && let Some(second) = self.second.lock().take()
        {
            *outcome = Some(second);
        }
        read
    }

    /// True if one of its devices makes no progress.
    fn is_held(&self) -> bool {
        let mut regions = self.moves.iter().flat_map(|m| [&m.local, &m.remote]);
        regions.any(|region| region.memory.device().is_some_and(SlowMemory::is_held))
    }
}

/// Waits for a condition, and for no longer than a second.
fn within_a_second(condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(1);
    while !condition() && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
}

/// The last byte of a job, which is in place, and its memory.
fn last_byte(job: &Job) -> Option<(Memory, isize, Memory)> {
    let progress = job.progress.lock();
    let last = progress.resolved.as_ref()?.last().filter(|m| m.len > 0)?;
    let [_, (target, at)] = last.ends(job.way);
    let at = (target.offset as u64 + at + last.len - 1) as isize;
    let byte = Memory::new(MemoryKind::Host, 1);
    target.memory.transport_copy(Direction::Out, at, byte.span(0, 1)).ok()?;
    Some((target.memory.clone(), at, byte))
}

fn early(kind: &str, quiesced: bool) -> Outcome {
    Err(Failure { quiesced: Some(quiesced), ..Failure::new(kind) })
}

impl Wire {
    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn submit(self: &Arc<Self>, job: Job) -> Arc<Job> {
        let job = Arc::new(job);
        self.ends[job.side].in_flight.fetch_add(1, SeqCst);
        if job.moves.is_empty() && self.has(Fault::EmptyBatchHangs) {
            return job;
        }
        if job.deadline.is_some() && !self.has(Fault::DeadlinesIgnored) && !self.has(Fault::Hang) {
            self.timed.lock().push(Arc::clone(&job));
        }
        let mut queue = self.queue.lock();
        if self.has(Fault::FullQueue) && queue.len() >= 48 {
            self.was_full.store(true, SeqCst);
        } else {
            queue.push_back(Arc::clone(&job));
        }
        drop(queue);
        self.wake.notify_one();
        job
    }

    fn work(self: &Arc<Self>) {
        let own = Arc::new(buffer());
        while !self.stopped.load(SeqCst) {
            let one_by_one = self.has(Fault::Starvation) || self.has(Fault::PrefersBig);
            let turn = one_by_one.then(|| self.whole_jobs.lock());
            let mut queue = self.queue.lock();
            let Some(job) = self.next_job(&mut queue) else {
                drop(turn);
                drop(self.wake.wait(queue, Duration::from_millis(50)));
                continue;
            };
            drop(queue);
            if self.penalty.swap(false, SeqCst) {
                thread::sleep(Duration::from_secs(1));
            }
            let mut step = self.step(&job, &own);
            while turn.is_some() && matches!(step, Step::Again) {
                step = self.step(&job, &own);
            }
            match step {
                Step::Again => self.queue.lock().push_back(job),
                Step::End(outcome) => self.complete(&job, outcome),
                Step::Forget => {}
            }
        }
    }

    fn next_job(&self, queue: &mut VecDeque<Arc<Job>>) -> Option<Arc<Job>> {
        if self.is_filling() {
            return None;
        }
        if !self.has(Fault::PrefersBig) {
            return queue.pop_front();
        }
        let big = |job: &Arc<Job>| job.moved().bytes > PIECE_BYTES as u64;
        if let Some(at) = queue.iter().position(big) {
            self.bigs.fetch_add(1, SeqCst);
            return queue.remove(at);
        }
        let bigs = self.bigs.load(SeqCst);
        let is_due = |job: &Arc<Job>| match job.bigs_before {
            0 => true,
            before => bigs >= before + BIG_FIRST,
        };
        queue.iter().position(is_due).and_then(|at| queue.remove(at))
    }

    /// Whether the wire lies still until its queue is full: one that is as fast as its callers never has a full queue.
    fn is_filling(&self) -> bool {
        self.has(Fault::FullQueue) && !self.was_full.load(SeqCst)
    }

    fn watch_deadlines(self: &Arc<Self>) {
        while !self.stopped.load(SeqCst) {
            thread::sleep(Duration::from_millis(4));
            let late: Vec<_> = {
                let mut timed = self.timed.lock();
                timed.retain(|job| job.outcome.lock().is_none());
                let now = Instant::now();
                timed
                    .iter()
                    .filter(|j| j.deadline.is_some_and(|d| now > d + GRACE))
                    .cloned()
                    .collect()
            };
            for job in late {
                // A worker that moves a piece ends the job afterwards: it may not have read the source yet.
                let unmoved = job.progress.try_lock();
                if unmoved.is_some() || job.is_held() {
                    job.cancelled.store(true, SeqCst);
                    self.complete(&job, early("deadline", false));
                }
            }
        }
    }

    fn complete(self: &Arc<Self>, job: &Arc<Job>, outcome: Outcome) {
        if self.has(Fault::SleepyWait) {
            // Nothing shows while no thread waits.
            within_a_second(|| job.waiting.load(SeqCst) > 0);
        }
        let mut slot = job.outcome.lock();
        if slot.is_some() {
            return;
        }
        let failed = outcome.is_err();
        let last = (self.has(Fault::LateByte) && !failed).then(|| last_byte(job)).flatten();
        if let Some(note) = &job.note
            && (!failed
                || self.has(Fault::NotificationOfFailure)
                || self.has(Fault::NotificationOfCancel))
            && !self.has(Fault::NotificationBeforeData)
        {
            self.deliver(1 - job.side, note.clone());
        }
        if !(failed && self.has(Fault::LeakedCounter)) {
            self.ends[job.side].in_flight.fetch_sub(1, SeqCst);
        }
        *slot = Some(outcome.clone());
        if self.has(Fault::DoubleOutcome) && !failed {
            *slot = Some(Err(Failure::new("peer_reset")));
            *job.second.lock() = Some(outcome);
        }
        drop(slot);
        if !self.has(Fault::SilentEventFd) {
            job.event.signal();
        }
        if !self.has(Fault::SleepyWait) {
            job.ended.notify_all();
        }
        if let Some((memory, at, byte)) = last {
            thread::spawn(move || {
                // The owner notices the late byte only where it has written others before it.
                let give_up = Instant::now() + LATE_MAX;
                let is_unchanged = || memory.load(at.unsigned_abs(), 1) == byte.load(0, 1);
                while is_unchanged() && Instant::now() < give_up {
                    thread::sleep(Duration::from_millis(1));
                }
                drop(memory.transport_copy(Direction::In, at, byte.span(0, 1)));
            });
        }
    }

    fn deliver(&self, side: usize, note: Notification) {
        let end = &self.ends[side];
        let mut notes = end.notes.lock();
        notes.delivered += 1;
        let fifth = notes.delivered.is_multiple_of(5);
        match self.fault {
            Some(Fault::NotificationLost) if fifth => {}
            Some(Fault::NotificationTwice) if fifth => {
                notes.queue.push_back(note.clone());
                notes.queue.push_back(note);
            }
            Some(Fault::NotificationsReordered) if fifth && notes.overtaken.is_none() => {
                notes.overtaken = Some(note);
            }
            _ => {
                notes.queue.push_back(note);
                let overtaken = notes.overtaken.take();
                notes.queue.extend(overtaken);
            }
        }
        drop(notes);
        end.noted.notify_all();
    }

    fn step(self: &Arc<Self>, job: &Arc<Job>, own: &Arc<Mapping>) -> Step {
        let _device = (self.has(Fault::OneDeviceBlocksAll)
            && job.moves.iter().any(|m| m.remote.memory.kind() == MemoryKind::Slow))
        .then(|| self.whole_jobs.lock());
        let mut progress = job.progress.lock();
        if let Some(step) = self.early_end(job) {
            return step;
        }
        if progress.resolved.is_none() {
            if let (true, Some(note)) = (self.has(Fault::NotificationBeforeData), &job.note) {
                self.deliver(1 - job.side, note.clone());
                // Nothing shows before it is taken.
                let notes = &self.ends[1 - job.side].notes;
                within_a_second(|| notes.lock().queue.is_empty());
                thread::sleep(Duration::from_millis(2));
            }
            match self.resolve_all(job) {
                Ok(resolved) => progress.resolved = Some(resolved),
                Err(failure) => return self.refuse(job, failure),
            }
        }
        let Progress { resolved, index, offset } = &mut *progress;
        let moves = resolved.as_deref().unwrap_or_default();
        let (mut bytes, mut count) = (0, 0);
        while let Some(m) = moves.get(*index) {
            if bytes >= SLICE_BYTES || count >= SLICE_MOVES {
                return Step::Again;
            }
            let len = (m.len - *offset).min(PIECE_BYTES as u64) as usize;
            let last_of_move = *offset + len as u64 == m.len;
            let last = last_of_move && *index + 1 == moves.len();
            if last && self.has(Fault::EarlyCompletion) {
                self.complete(job, Ok(job.moved()));
                thread::sleep(Duration::from_millis(2));
            }
            let skipped = self.skips(job, moves, *index);
            if len > 0 && !skipped {
                if let Err(failure) = self.move_piece(job, m, *offset, len, last, own) {
                    return Step::End(Err(failure));
                }
                if let Some(step) = self.early_end(job) {
                    return step;
                }
            }
            bytes += len;
            *offset += len as u64;
            if last_of_move {
                count += 1;
                *index += 1;
                *offset = 0;
            }
        }
        if self.has(Fault::Hang) {
            return Step::Forget;
        }
        let mut moved = job.moved();
        if self.has(Fault::WrongCount) && moved.descriptors > 1 {
            moved.bytes -= 1;
        }
        Step::End(Ok(moved))
    }

    fn early_end(self: &Arc<Self>, job: &Arc<Job>) -> Option<Step> {
        let goes_on = self.has(Fault::IgnoredCancel) || self.has(Fault::SourceReadAfterReturn);
        if goes_on && job.outcome.lock().is_some() {
            // So slowly that the owner of the memory has the time to write it anew.
            thread::sleep(Duration::from_millis(2));
        }
        if self.has(Fault::RefusalFailsAll) {
            // The other transfers are under way when one is refused.
            thread::sleep(Duration::from_millis(2));
        }
        if job.cancelled.load(SeqCst) {
            let step = match self.fault {
                Some(Fault::EndlessCancel) => Step::Forget,
                _ => Step::End(early("cancelled", true)),
            };
            return Some(step);
        }
        if self.has(Fault::RefusalFailsAll) && self.refusals.load(SeqCst) != job.refusals_before {
            return Some(Step::End(Err(Failure::new("peer_reset"))));
        }
        if job.deadline.is_some_and(|deadline| Instant::now() > deadline) {
            match self.fault {
                Some(Fault::DeadlinesIgnored) => return None,
                Some(Fault::SourceReadAfterReturn) => {
                    self.complete(job, early("deadline", true));
                    return None;
                }
                _ => return Some(Step::End(early("deadline", true))),
            }
        }
        None
    }

    fn refuse(&self, job: &Job, failure: Failure) -> Step {
        self.refusals.fetch_add(1, SeqCst);
        if self.has(Fault::PenaltyAfterRefusal) {
            self.penalty.store(true, SeqCst);
        }
        Step::End(if self.has(Fault::SwallowedError) { Ok(job.moved()) } else { Err(failure) })
    }

    fn skips(&self, job: &Job, moves: &[Resolved], index: usize) -> bool {
        match self.fault {
            Some(Fault::PartialBatch) => moves.len() >= 8 && index >= moves.len() / 4 * 3,
            Some(Fault::DescriptorsDropped) => index >= 4096,
            Some(Fault::SourceTakenOnce) => {
                index > 0 && {
                    let (before, m) = (&moves[index - 1], &moves[index]);
                    let ([(_, a), _], [(_, b), _]) = (before.ends(job.way), m.ends(job.way));
                    a < b && b < a + before.len
                }
            }
            _ => false,
        }
    }

    fn move_piece(
        &self,
        job: &Job,
        m: &Resolved,
        offset: u64,
        len: usize,
        last: bool,
        own: &Arc<Mapping>,
    ) -> Result<(), Failure> {
        let [(source, from), (target, to)] = m.ends(job.way);
        let mut len = len;
        let end_of_move = offset + len as u64 == m.len;
        match self.fault {
            Some(Fault::LostTail) if last => len -= 1,
            Some(Fault::TornBigDescriptor) if m.len > PIECE_BYTES as u64 && offset == 0 => len -= 1,
            Some(Fault::AlignedOnly) if end_of_move && len > 8 => len &= !7,
            Some(Fault::MixDropped) if source.memory.kind() != target.memory.kind() => {
                return Ok(());
            }
            Some(Fault::TruncatedLength) if m.len > 4 << 20 && offset >= m.len % (4 << 20) => {
                return Ok(());
            }
            _ => {}
        }
        let ignores_gates = |region: &Arc<Registered>| match self.fault {
            Some(Fault::WriteAfterUnregister) => {
                job.way == Way::Write && Arc::ptr_eq(region, &m.remote)
            }
            Some(Fault::ReadAfterUnregister) => {
                job.way == Way::Read && Arc::ptr_eq(region, &m.remote)
            }
            Some(Fault::LocalAfterUnregister) => Arc::ptr_eq(region, &m.local),
            _ => false,
        };
        let enter = |region: &Arc<Registered>| -> Result<(), Failure> {
            if region.alive.load(SeqCst) || ignores_gates(region) {
                return Ok(());
            }
            Err(Failure { quiesced: Some(true), ..Failure::new("revoked") })
        };
        // A thread that closes one of the gates waits for this piece.
        let passes = [source, target].map(|region| {
            let gate = (!ignores_gates(region)).then_some(&region.gate);
            gate.map(|gate| gate.read())
        });
        enter(source)?;
        enter(target)?;
        if [source, target].into_iter().any(|it| ignores_gates(it) && !it.alive.load(SeqCst)) {
            // The owner has the time to write all of the memory anew.
            thread::sleep(Duration::from_millis(20));
        }
        let shared = self.has(Fault::SharedBuffer).then(|| Arc::clone(&self.shared_buffer.lock()));
        let span = shared.as_ref().unwrap_or(own).span(0, len);
        let at = |region: &Registered, at: u64| (region.offset as u64).wrapping_add(at) as isize;
        let copied = source
            .memory
            .transport_copy(Direction::Out, at(source, from.wrapping_add(offset)), span)
            .and_then(|()| {
                if self.has(Fault::StaleRead) && job.way == Way::Read {
                    self.remember(source.id, from + offset, span);
                }
                if self.has(Fault::SharedBuffer) {
                    thread::yield_now();
                }
                if self.has(Fault::HastyUnregister) {
                    thread::sleep(Duration::from_micros(300));
                    if !target.alive.load(SeqCst) {
                        // The owner has the time to write all of the memory anew, so that the
                        // piece lands on it and not under it.
                        thread::sleep(Duration::from_millis(20));
                    }
                }
                let place = at(target, to.wrapping_add(offset));
                target.memory.transport_copy(Direction::In, place, span)
            });
        if self.has(Fault::NeighbourWritten) && end_of_move {
            let byte = Memory::new(MemoryKind::Host, 1);
            byte.store(0, &[!MARKER]);
            let place = at(target, to + m.len);
            drop(target.memory.transport_copy(Direction::In, place, byte.span(0, 1)));
        }
        drop(passes);
        match copied {
            Err(e) if !self.has(Fault::DeviceErrorSwallowed) => {
                Err(Failure { text: e.to_string(), ..Failure::new("io") })
            }
            _ => Ok(()),
        }
    }

    fn remember(&self, region: u64, at: u64, span: kvferry_sys::HostSpan) {
        let mut cache = self.cache.lock();
        let mut now = vec![0; span.len()];
        span.copy_to(&mut now);
        if cache.len() < 200 {
            span.copy_from(cache.entry((region, at, span.len())).or_insert(now));
        }
    }

    fn resolve_all(&self, job: &Job) -> Result<Vec<Resolved>, Failure> {
        let mut resolved = Vec::with_capacity(job.moves.len());
        for m in &job.moves {
            resolved.push(self.resolve(job, m)?);
        }
        if self.has(Fault::SwappedDescriptors)
            && let Some(i) = (1..resolved.len()).find(|&i| resolved[i].len == resolved[i - 1].len)
        {
            let at = resolved[i].remote_at;
            resolved[i].remote_at = std::mem::replace(&mut resolved[i - 1].remote_at, at);
        }
        Ok(resolved)
    }

    fn resolve(&self, job: &Job, m: &Move) -> Result<Resolved, Failure> {
        let (read, write) = (job.way == Way::Read, job.way == Way::Write);
        let local = m.local.inner.clone().downcast::<Registered>().expect("a region of this wire");
        let named = m.remote.inner.clone().downcast::<Registered>().expect("a region of this wire");
        let unchecked =
            self.has(Fault::UncheckedBounds) || (self.has(Fault::UncheckedReads) && read);
        let fits = |region: &Registered, at: u64, len: u64| {
            let wrapped = self.has(Fault::WrappingBounds).then(|| at.wrapping_add(len));
            wrapped.or_else(|| at.checked_add(len)).is_some_and(|end| end <= region.len)
        };
        let allowed = |access: Access| {
            (access.read >= read && access.write >= write) || self.has(Fault::UncheckedAccess)
        };
        if !local.alive.load(SeqCst) {
            return Err(Failure::new("not_registered"));
        }
        if !fits(&local, m.local_offset, m.len) {
            return Err(Failure::new("out_of_bounds"));
        }
        if m.aim == Aim::Honest && !unchecked {
            if !fits(&named, m.remote_offset, m.len) {
                return Err(Failure::new("out_of_bounds"));
            }
            if !allowed(m.remote.access) {
                return Err(Failure::new("access_denied"));
            }
        }
        let (remote, remote_at) = self.find(1 - job.side, m, &named, unchecked)?;
        let merged = self.has(Fault::MergedNeighbours) && remote.memory.kind() == MemoryKind::Host;
        if !unchecked && !merged && !fits(&remote, remote_at, m.len) {
            return Err(Failure::new("out_of_bounds"));
        }
        if merged && !self.covered(1 - job.side, &remote, remote_at, m.len) {
            return Err(Failure::new("out_of_bounds"));
        }
        if !allowed(remote.access) {
            return Err(Failure::new("access_denied"));
        }
        let len = if self.has(Fault::ZeroMeansOne) { m.len.max(1) } else { m.len };
        Ok(Resolved { local, local_at: m.local_offset, remote, remote_at, len })
    }

    /// The registered region that a move names, and where in it.
    fn find(
        &self,
        side: usize,
        m: &Move,
        named: &Arc<Registered>,
        unchecked: bool,
    ) -> Result<(Arc<Registered>, u64), Failure> {
        let regions = self.ends[side].regions.lock();
        if m.aim == Aim::Address {
            let address = named.address().wrapping_add(m.remote_offset);
            return regions
                .values()
                .find(|r| r.address() <= address && address - r.address() < r.len)
                .map(|r| (Arc::clone(r), address - r.address()))
                .or_else(|| unchecked.then(|| (Arc::clone(named), m.remote_offset)))
                .ok_or_else(|| Failure::new("not_registered"));
        }
        let stale = || {
            let same = regions.values().find(|r| r.address() == named.address());
            same.filter(|_| self.has(Fault::StaleNames)).cloned()
        };
        let found = regions.get(&named.id).cloned().or_else(stale);
        found.map(|r| (r, m.remote_offset)).ok_or_else(|| Failure::new("not_registered"))
    }

    /// Whether regions side by side cover a range that starts in the first of them.
    fn covered(&self, side: usize, region: &Registered, at: u64, len: u64) -> bool {
        let regions = self.ends[side].regions.lock();
        let Some(end) = region.address().checked_add(at).and_then(|a| a.checked_add(len)) else {
            return false;
        };
        let mut reached = region.address() + region.len;
        while reached < end {
            match regions.values().find(|r| r.address() == reached) {
                Some(next) => reached += next.len,
                None => return false,
            }
        }
        true
    }
}
