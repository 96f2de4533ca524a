//! The two engines, and the queues that are idle or in use.
//!
//! io_uring carries out an operation that would wait on a thread of the kernel, and writes to regular files one after the
//! other there: all that have the same hash of their inode, of 64 for each thread that submits, whatever device they
//! are on. A write through the page cache takes such a thread until it has ended, so that a device that does not answer
//! would hold up writes to others. So these go to the threads of the pool. Writes past the page cache end
//! without a thread, once they have begun.

use super::posix::{Pool, PoolQueue};
use super::queue::{DEPTH, Memory, OPERATION_BYTES_MAX, Operation, Queue};
use super::targets::Use;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::region::RegionUse;
use crate::memory::user::RegionKey;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, OnceLock};
use kvferry_sys::pins::Pins;
use kvferry_sys::span::HostSpan;
use kvferry_sys::uring::{Range, Ring};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// A waiting thread wakes up when one of so many operations has ended. The device works on the others.
const WAKE_SHARE: usize = 4;
/// Queues that are kept for the next transfers. Each takes some thirty KiB.
const IDLE_QUEUES: usize = 16;
/// Transfers with files under way at once: each takes a queue, which takes a descriptor.
const LEASED_MAX: usize = 256;

/// Bytes of a region that are registered with the kernel at once. A registration keeps the pages in memory
/// and takes some 0.1 ms per MiB.
const RANGE_BYTES: usize = 16 << 20;
/// Ranges overlap by the bytes of the longest operation, so that each lies in one range.
const OVERLAP_BYTES: usize = 1 << 20;
const _: () = assert!(OPERATION_BYTES_MAX <= OVERLAP_BYTES as u64);

/// A region's registrations with rings. An operation makes them while it holds the region.
impl RegionKey for Pins {
    fn release(&self) -> bool {
        self.close();
        true
    }
}

/// The range of the region that may be registered for operations on `span`; `None` for a span that is
/// longer than ranges overlap.
fn range(held: &RegionUse, span: HostSpan) -> Option<Range<'_>> {
    let region = held.region();
    let number = (span.as_ptr() as usize).wrapping_sub(region.base) / RANGE_BYTES;
    let first = number * RANGE_BYTES;
    let len = region.len.checked_sub(first)?.min(RANGE_BYTES + OVERLAP_BYTES);
    let whole = region.span(first as u64, len);
    let is_inside = span.as_ptr() as usize + span.len() <= whole.as_ptr() as usize + len;
    let pins = region.keys.get(Pins::new);
    is_inside.then_some(Range { pins, number: number as u64, span: whole })
}

/// Values of the setting: io_uring if the system permits it, else threads.
pub(super) const AUTO: &str = "auto";
/// io_uring: opening a file fails where the system does not permit it.
const URING: &str = "uring";
/// Threads that call `pread` and `pwrite`.
const POSIX: &str = "posix";

/// Parses the setting.
pub(super) fn parse(text: &str) -> Result<&'static str, &'static str> {
    match text.to_ascii_lowercase().as_str() {
        AUTO | "" => Ok(AUTO),
        URING | "io_uring" => Ok(URING),
        POSIX => Ok(POSIX),
        _ => Err("must be auto, uring or posix"),
    }
}

/// State that the rings of an agent share.
#[derive(Default)]
struct Rings {
    /// Operations whose memory was registered with the kernel.
    registered: AtomicU64,
    /// The reason why a ring can't register memory.
    refusal: OnceLock<String>,
}

struct RingQueue {
    ring: Ring<Operation>,
    rings: Arc<Rings>,
}

impl RingQueue {
    fn new(rings: &Arc<Rings>) -> io::Result<Self> {
        Ok(Self { ring: Ring::new(DEPTH)?, rings: Arc::clone(rings) })
    }
}

impl Queue for RingQueue {
    fn in_flight(&self) -> usize {
        self.ring.in_flight()
    }

    fn push(&mut self, operation: Operation) {
        let Operation { way, offset, span, is_direct, .. } = operation;
        let range = match &operation.memory {
            Memory::Region(held) if is_direct => range(held, span),
            _ => None,
        };
        let place = range.and_then(|range| self.ring.place(range, span));
        if place.is_some() {
            self.rings.registered.fetch_add(1, Ordering::Relaxed);
        } else if let Some(e) = self.ring.refusal()
            && self.rings.refusal.get().is_none()
        {
            let hint = match e.kind() {
                io::ErrorKind::OutOfMemory => " (the limit of locked memory, ulimit -l)",
                _ => "",
            };
            let _ = self.rings.refusal.set(format!("{e}{hint}"));
        }
        let file = Arc::clone(&operation.file);
        self.ring.push(&file, way, offset, span, place, operation);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.ring.submit()
    }

    fn is_submitted(&self) -> bool {
        self.ring.is_submitted()
    }

    fn stop(&mut self) {
        // What is queued can't be taken back; the kernel has it complete as soon as it takes it.
        let _ = self.ring.submit();
    }

    fn completed(&mut self) -> Option<(Operation, io::Result<usize>)> {
        self.ring.completed()
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        let count = (self.ring.in_flight() / WAKE_SHARE).max(1);
        self.ring.wait(count, timeout)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

/// The engine of an agent; chosen when the first file is opened.
pub(crate) struct Engine {
    /// The setting: [`AUTO`], [`URING`] or [`POSIX`].
    asked: &'static str,
    chosen: OnceLock<Chosen>,
    rings: Arc<Rings>,
    idle: Mutex<Idle>,
    /// Queues that are not idle.
    leased: Arc<AtomicUsize>,
}

/// Queues without operations.
#[derive(Default)]
struct Idle {
    rings: Vec<Box<dyn Queue>>,
    pooled: Vec<Box<dyn Queue>>,
}

impl Idle {
    fn of(&mut self, engine: Kind) -> &mut Vec<Box<dyn Queue>> {
        match engine {
            Kind::Ring => &mut self.rings,
            Kind::Pool => &mut self.pooled,
        }
    }

    /// Keeps a queue. Returns it if there is no place for it.
    #[must_use]
    fn keep(&mut self, engine: Kind, queue: Box<dyn Queue>) -> Option<Box<dyn Queue>> {
        let idle = self.of(engine);
        if idle.len() >= IDLE_QUEUES {
            return Some(queue);
        }
        idle.push(queue);
        None
    }
}

/// One of the two engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Ring,
    Pool,
}

/// A queue in use.
pub(super) struct Leased {
    /// Kept until drop.
    queue: Option<Box<dyn Queue>>,
    engine: Kind,
    leased: Arc<AtomicUsize>,
}

impl Deref for Leased {
    type Target = dyn Queue;

    fn deref(&self) -> &Self::Target {
        &**self.queue.as_ref().expect("taken when it is given back")
    }
}

impl DerefMut for Leased {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut **self.queue.as_mut().expect("taken when it is given back")
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        self.leased.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Chosen {
    /// The engine of all operations but writes through the page cache.
    engine: Kind,
    /// The threads; none is started before the first operation.
    pool: Arc<Pool>,
    /// The engine's name, with the reason if it is not io_uring.
    text: String,
}

impl Chosen {
    fn engine(&self, wanted: Use) -> Kind {
        match wanted {
            Use::Others => self.engine,
            Use::CachedWrites => Kind::Pool,
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("asked", &self.asked).finish_non_exhaustive()
    }
}

impl Engine {
    pub(super) fn new(asked: &'static str) -> Self {
        let (chosen, idle, leased) = (OnceLock::new(), Mutex::default(), Arc::default());
        Self { asked, chosen, rings: Arc::default(), idle, leased }
    }

    /// Chooses the engine, at the first call.
    pub(crate) fn choose(&self) -> Result<()> {
        self.chosen().map(drop)
    }

    fn chosen(&self) -> Result<&Chosen> {
        if let Some(chosen) = self.chosen.get() {
            return Ok(chosen);
        }
        let ring = match self.asked {
            POSIX => Err("posix: as the setting file_engine says".to_owned()),
            _ => RingQueue::new(&self.rings).map_err(|e| {
                let hint = match e.kind() {
                    io::ErrorKind::PermissionDenied => {
                        "; a container's seccomp profile or kernel.io_uring_disabled forbids it"
                    }
                    _ => "",
                };
                format!("posix: io_uring can't be used: {e}{hint}")
            }),
        };
        let (engine, text) = match ring {
            Ok(ring) => {
                self.keep(Kind::Ring, Box::new(ring));
                (Kind::Ring, "uring".to_owned())
            }
            Err(why) if self.asked == URING => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "io_uring can't be used; set the file engine to posix or auto",
                )
                .with("reason", why));
            }
            Err(text) => (Kind::Pool, text),
        };
        tracing::info!(engine = text, "files");
        Ok(self.chosen.get_or_init(|| Chosen { engine, pool: Arc::new(Pool::new()), text }))
    }

    /// The engine's name, why it is not io_uring, and why io_uring registers no memory; `None` before a
    /// file was opened.
    pub(crate) fn text(&self) -> Option<String> {
        let text = &self.chosen.get()?.text;
        Some(match self.rings.refusal.get() {
            Some(why) => format!("{text}, without registered memory: {why}"),
            None => text.clone(),
        })
    }

    /// Operations so far whose memory was registered with the kernel.
    pub(crate) fn registered_operations(&self) -> u64 {
        self.rings.registered.load(Ordering::Relaxed)
    }

    /// A queue without operations.
    pub(super) fn take(&self, wanted: Use) -> Result<Leased> {
        let chosen = self.chosen()?;
        let engine = chosen.engine(wanted);
        if self.leased.fetch_add(1, Ordering::Relaxed) >= LEASED_MAX {
            self.leased.fetch_sub(1, Ordering::Relaxed);
            let what = "too many transfers with files are under way; wait until some have ended";
            return Err(Error::new(ErrorKind::Busy, what).with("max", LEASED_MAX));
        }
        let mut leased = Leased { queue: None, engine, leased: Arc::clone(&self.leased) };
        let idle = self.idle.lock().of(engine).pop();
        leased.queue = Some(match (idle, engine) {
            (Some(queue), _) => queue,
            (None, Kind::Pool) => made(PoolQueue::new(&chosen.pool))?,
            (None, Kind::Ring) => made(RingQueue::new(&self.rings))?,
        });
        Ok(leased)
    }

    /// Keeps a queue without operations for the next transfer.
    pub(super) fn put(&self, mut leased: Leased) {
        if let Some(queue) = leased.queue.take() {
            self.keep(leased.engine, queue);
        }
    }

    fn keep(&self, engine: Kind, queue: Box<dyn Queue>) {
        let surplus = self.idle.lock().keep(engine, queue);
        // Without the lock: closing a ring may take long.
        drop(surplus);
    }

    /// Gives the next transfer, of either use, a queue that `make` makes.
    #[cfg(test)]
    pub(super) fn keep_for_all(&self, make: impl Fn() -> Box<dyn Queue>) {
        for engine in [Kind::Ring, Kind::Pool] {
            self.keep(engine, make());
        }
    }
}

fn made<T: Queue + 'static>(queue: io::Result<T>) -> Result<Box<dyn Queue>> {
    match queue {
        Ok(queue) => Ok(Box::new(queue)),
        Err(e) => Err(Error::io("a queue for files can't be made", e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_transfers_at_once_than_there_are_queues_are_refused_until_one_ends() {
        let engine = Engine::new(POSIX);
        let take = || engine.take(Use::Others);
        let mut leased: Vec<_> = (0..LEASED_MAX).map(|_| take().expect("a place")).collect();
        let refused = take().err().expect("all are taken");
        assert_eq!((refused.kind(), refused.context("max")), (ErrorKind::Busy, Some("256")));
        engine.put(leased.pop().expect("many"));
        drop(leased.pop());
        let again = [take().expect("one was given back"), take().expect("one dropped")];
        assert!(take().is_err());
        drop((leased, again));
        assert_eq!(engine.leased.load(Ordering::Relaxed), 0);
        assert!(engine.idle.lock().pooled.len() <= IDLE_QUEUES);
    }

    /// Reports, when it is dropped, whether other transfers can take queues meanwhile.
    #[cfg(not(loom))]
    struct Surplus {
        engine: crate::sync::Weak<Engine>,
        is_lock_free: std::sync::mpsc::Sender<bool>,
    }

    #[cfg(not(loom))]
    impl Queue for Surplus {
        fn in_flight(&self) -> usize {
            0
        }

        fn push(&mut self, _: Operation) {
            unreachable!("the test moves nothing")
        }

        fn submit(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn stop(&mut self) {}

        fn completed(&mut self) -> Option<(Operation, io::Result<usize>)> {
            None
        }

        fn fd(&self) -> BorrowedFd<'_> {
            unreachable!("the test waits for nothing")
        }
    }

    #[cfg(not(loom))]
    impl Drop for Surplus {
        fn drop(&mut self) {
            if let Some(engine) = self.engine.upgrade() {
                let _ = self.is_lock_free.send(engine.idle.try_lock().is_some());
            }
        }
    }

    #[test]
    #[cfg(not(loom))]
    fn a_queue_for_which_there_is_no_place_is_closed_without_the_lock() {
        let engine = Arc::new(Engine::new(POSIX));
        let (is_lock_free, reported) = std::sync::mpsc::channel();
        let lease = |_| {
            let mut leased = engine.take(Use::Others).expect("a place");
            let (engine, is_lock_free) = (Arc::downgrade(&engine), is_lock_free.clone());
            leased.queue = Some(Box::new(Surplus { engine, is_lock_free }));
            leased
        };
        let leased: Vec<_> = (0..=IDLE_QUEUES).map(lease).collect();
        leased.into_iter().for_each(|leased| engine.put(leased));
        assert_eq!(reported.try_recv(), Ok(true));
    }

    #[test]
    fn writes_through_the_page_cache_get_queues_of_the_threads() {
        let engine = Engine::new(AUTO);
        let [others, cached] = [Use::Others, Use::CachedWrites].map(|wanted| {
            let leased = engine.take(wanted).expect("a place");
            let kind = leased.engine;
            engine.put(leased);
            kind
        });
        assert_eq!(cached, Kind::Pool);
        let is_uring = engine.text().as_deref() == Some("uring");
        assert_eq!(others, if is_uring { Kind::Ring } else { Kind::Pool });
        // Queues that were given back are used for what they are for.
        assert_eq!(engine.take(Use::CachedWrites).expect("a place").engine, Kind::Pool);
        assert_eq!(engine.take(Use::Others).expect("a place").engine, others);
    }

    #[test]
    fn the_engine_and_why_it_was_chosen_are_known() {
        let engine = Engine::new(POSIX);
        assert_eq!(engine.text(), None);
        engine.choose().expect("always there");
        assert_eq!(engine.text().as_deref(), Some("posix: as the setting file_engine says"));
        assert_eq!((parse("Auto"), parse("io_uring")), (Ok(AUTO), Ok(URING)));
        assert!(parse("aio").is_err());
    }
}
