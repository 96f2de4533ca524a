//! Uploads: new blocks are read back from the disk and written to the object store.
//!
//! A thread does it. Completed requests put their outcomes into the queue, and the thread takes them from there, so
//! completion threads hold only the queue.

use super::content::{HEADER_BYTES, header, name_of};
use super::outage::{Direction, Permit};
use super::{Done, IfExists, Outcome, Shared, key_of};
use crate::log::format::{bytes_of, pages_of};
use crate::log::{Block, Disk};
use crate::policy::Retention;
use crate::stats::Counters;
use crc_fast::{CrcAlgorithm, checksum};
use kvferry_sys::sync::{Condvar, Mutex};
use rustc_hash::FxHashSet;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of uploads under way, beside the first one: they are in memory.
const IN_FLIGHT_BYTES: u64 = 256 << 20;
/// Failures after which a block is not tried again. A failure counts if another upload has succeeded since the last.
const TRIES_MAX: u32 = 3;
/// Most tries to read a block that is moved while it is read.
const READS_MAX: u32 = 3;

/// Blocks that wait for their upload.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<UploadJob>,
    /// Keys of the blocks that wait or are being uploaded.
    keys: FxHashSet<[u64; 2]>,
    /// Bytes of the blocks that wait.
    bytes: u64,
    ended: Vec<(SentUpload, Outcome<()>)>,
    /// Uploads under way, and their bytes.
    in_flight: usize,
    in_flight_bytes: u64,
    /// Uploads that have succeeded.
    succeeded: u64,
    /// No block is taken any more.
    is_refusing: bool,
    is_stopping: bool,
}

#[derive(Debug)]
struct UploadJob {
    block: Block,
    tries: u32,
    /// Number of uploads that had succeeded when the last try failed.
    failed_after: Option<u64>,
}

impl UploadJob {
    /// A failure says something of the block only if the object store has taken another one since the last:
    /// else it is the object store's.
    fn failed(&mut self, succeeded: u64) {
        self.tries += u32::from(self.failed_after != Some(succeeded));
        self.failed_after = Some(succeeded);
    }
}

/// An upload under way.
#[derive(Debug)]
struct SentUpload {
    job: UploadJob,
    permit: Permit,
}

impl Queue {
    /// Has the thread look at the queue again.
    pub(super) fn wake(&self) {
        // Under the lock, so that a thread that is about to wait does not miss it.
        let _state = self.state.lock();
        self.changed.notify_all();
    }

    pub(super) fn len(&self) -> usize {
        self.state.lock().keys.len()
    }

    pub(super) fn refuse(&self) {
        self.state.lock().is_refusing = true;
    }

    /// Waits until no block is left. False if the time passed, or `is_vain`, first.
    pub(super) fn wait_idle(&self, timeout: Duration, is_vain: impl Fn() -> bool) -> bool {
        let until = Instant::now().checked_add(timeout);
        let mut state = self.state.lock();
        while !state.keys.is_empty() {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if state.is_stopping || left == Some(Duration::ZERO) || is_vain() {
                return false;
            }
            state = self.changed.wait(state, left);
        }
        true
    }

    fn ended(&self, sent: SentUpload, outcome: Outcome<()>) {
        self.state.lock().ended.push((sent, outcome));
        self.changed.notify_all();
    }
}

impl State {
    fn take(&mut self, concurrency: usize) -> Option<UploadJob> {
        let len = u64::from(self.waiting.front()?.block.len);
        let is_much = self.in_flight > 0 && self.in_flight_bytes + len > IN_FLIGHT_BYTES;
        if self.in_flight >= concurrency || is_much {
            return None;
        }
        let job = self.waiting.pop_front()?;
        self.bytes -= len;
        self.in_flight += 1;
        self.in_flight_bytes += len;
        Some(job)
    }

    /// Takes a block out of the counts of uploads under way.
    fn landed(&mut self, block: &Block) {
        self.in_flight -= 1;
        self.in_flight_bytes -= u64::from(block.len);
    }
}

#[derive(Debug)]
pub(super) struct Uploader {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Uploader {
    pub(super) fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let run = Arc::clone(shared);
        let thread = kvferry_sys::thread::spawn("kvferry-store-up".into(), move || serve(&run))?;
        Ok(Self { shared: Arc::clone(shared), thread: Mutex::new(Some(thread)) })
    }

    /// Adds blocks to the queue. Those that it has no room for are dropped, and counted.
    pub(super) fn offer(&self, blocks: &[Block]) {
        let settings = self.shared.settings;
        let mut dropped = 0;
        let mut state = self.shared.uploads.state.lock();
        for block in blocks.iter().copied() {
            if Retention::from_bits(block.retention).priority < settings.priority_min
                || state.keys.contains(&block.key)
            {
                continue;
            }
            let bytes = state.bytes + u64::from(block.len);
            let is_full =
                state.waiting.len() >= settings.waiting_blocks || bytes > settings.waiting_bytes;
            if is_full || state.is_refusing {
                dropped += 1;
                continue;
            }
            state.bytes = bytes;
            state.keys.insert(block.key);
            state.waiting.push_back(UploadJob { block, tries: 0, failed_after: None });
        }
        drop(state);
        self.shared.uploads.changed.notify_all();
        Counters::add(&self.shared.core.counters.upload_dropped, dropped);
    }

    /// Ends the thread. What still waits is dropped, and counted. Idempotent.
    pub(super) fn stop(&self) {
        let left = {
            let mut state = self.shared.uploads.state.lock();
            state.is_stopping = true;
            state.is_refusing = true;
            state.waiting.clear();
            state.bytes = 0;
            std::mem::take(&mut state.keys).len()
        };
        Counters::add(&self.shared.core.counters.upload_dropped, left);
        self.shared.uploads.changed.notify_all();
        if let Some(thread) = self.thread.lock().take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Next action of the upload thread.
enum NextUpload {
    Settle(Vec<(SentUpload, Outcome<()>)>),
    Upload(UploadJob),
    Stop,
}

fn serve(shared: &Shared) {
    loop {
        match next(shared) {
            NextUpload::Settle(ended) => {
                ended.into_iter().for_each(|(sent, outcome)| settle(shared, sent, outcome));
            }
            NextUpload::Upload(job) => upload(shared, job),
            NextUpload::Stop => return,
        }
    }
}

/// Waits until there is something to do.
fn next(shared: &Shared) -> NextUpload {
    let queue = &shared.uploads;
    let mut state = queue.state.lock();
    loop {
        if state.is_stopping {
            return NextUpload::Stop;
        }
        if !state.ended.is_empty() {
            return NextUpload::Settle(std::mem::take(&mut state.ended));
        }
        let now_ms = shared.now_ms();
        // Not while nothing waits: there is nothing to wake up for.
        let not_before_ms = match state.waiting.is_empty() {
            true => None,
            false => shared.gate.lock().look(Direction::Up, now_ms),
        };
        let left = match not_before_ms {
            None => {
                if let Some(job) = state.take(shared.settings.concurrency) {
                    return NextUpload::Upload(job);
                }
                None
            }
            // A probe is under way.
            Some(u64::MAX) => None,
            Some(ms) => Some(Duration::from_millis(ms.saturating_sub(now_ms))),
        };
        state = queue.changed.wait(state, left);
    }
}

fn upload(shared: &Shared, job: UploadJob) {
    let queue = Arc::clone(&shared.uploads);
    let Some(content) = read(shared, &job.block) else {
        // It has left the disk.
        finish(shared, &job.block, |counters| &counters.upload_dropped);
        return;
    };
    let permit = shared.gate.lock().admit(Direction::Up, shared.now_ms());
    let Some(permit) = permit else { return again(shared, job, true) };
    let is_damaged = shared.damaged.lock().contains(&key_of(&job.block), shared.now_ms());
    let if_exists = if is_damaged { IfExists::Replace } else { IfExists::Keep };
    let name = name_of(job.block.namespace, key_of(&job.block));
    let sent = SentUpload { job, permit };
    let done = Done::new(move |outcome| queue.ended(sent, outcome));
    shared.put(&name, content, if_exists, done);
}

/// The bytes of a block's object; `None` if the block is not on the disk any more.
fn read(shared: &Shared, block: &Block) -> Option<Vec<u8>> {
    let core = &shared.core;
    let data_bytes = usize::try_from(bytes_of(pages_of(block.len))).expect("at most a segment");
    for _ in 0..READS_MAX {
        let entry = core.member.find(&key_of(block)).filter(|it| it.sum == block.sum)?;
        let (segment, page) = core.superblock.geometry.locate(entry.page);
        let mut content = vec![0; HEADER_BYTES + data_bytes];
        core.disk.read_at(segment, bytes_of(page), &mut content[HEADER_BYTES..]).ok()?;
        // The sum covers the padding, which is not uploaded. Wrong: the block was moved or removed meanwhile.
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &content[HEADER_BYTES..]) ^ block.check;
        if sum == block.sum {
            content[..HEADER_BYTES].copy_from_slice(&header(block, shared.created_s()));
            content.truncate(HEADER_BYTES + block.len as usize);
            return Some(content);
        }
    }
    None
}

fn settle(shared: &Shared, sent: SentUpload, outcome: Outcome<()>) {
    let SentUpload { mut job, permit } = sent;
    shared.note(Direction::Up, permit, &outcome);
    let counters = &shared.core.counters;
    match outcome {
        Ok(()) => {
            shared.damaged.lock().remove(&key_of(&job.block));
            shared.uploads.state.lock().succeeded += 1;
            finish(shared, &job.block, |counters| &counters.uploaded);
        }
        Err(_) => {
            Counters::add(&counters.upload_failed, 1);
            job.failed(shared.uploads.state.lock().succeeded);
            match job.tries < TRIES_MAX {
                // Behind the others: another one is the next probe of an object store that is away.
                true => again(shared, job, false),
                false => finish(shared, &job.block, |counters| &counters.upload_dropped),
            }
        }
    }
}

/// Puts a block back that was not uploaded: behind the others, or before them.
fn again(shared: &Shared, job: UploadJob, is_first: bool) {
    let mut state = shared.uploads.state.lock();
    state.landed(&job.block);
    if state.is_stopping {
        // It was counted.
        return;
    }
    state.bytes += u64::from(job.block.len);
    match is_first {
        true => state.waiting.push_front(job),
        false => state.waiting.push_back(job),
    }
    drop(state);
    // `close` looks whether the object store is away now.
    shared.uploads.changed.notify_all();
}

/// Counts what became of a block, unless it was counted when the thread was stopped.
fn finish(shared: &Shared, block: &Block, counter: fn(&Counters) -> &std::sync::atomic::AtomicU64) {
    let mut state = shared.uploads.state.lock();
    state.landed(block);
    let is_mine = state.keys.remove(&block.key);
    if is_mine {
        // Before the queue is seen empty.
        Counters::add(counter(&shared.core.counters), 1);
    }
    drop(state);
    shared.uploads.changed.notify_all();
}
