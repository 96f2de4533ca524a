//! Stops writers in other processes of this host, or detects that one does not stop.
//!
//! A process that copies into this agent's memory directly does so inside gates, as the agent's own
//! copiers do (`crate::memory::gate`), but the gates are in a page shared by both processes. The
//! argument is the same: the writer stores "inside", then loads whether the region is registered,
//! from the owner's table ([`registry`](super::registry)); the owner clears the region's entry,
//! then loads the writer's gates. All four accesses are sequentially consistent, so the writer
//! finds the region gone or the owner finds the writer inside.
//!
//! The difference: the owner can't make a writer leave, because the writer's process may be
//! stopped. Then the range is *quarantined* until the writer was seen outside or is gone. A writer
//! is gone when the connection that it attached by hangs up, which the kernel does when the last
//! thread that could be inside has closed its descriptors, or when its process has exited.

use crate::memory::gate::Touches;
use crate::memory::user::Copier;
use crate::reactor::now;
use crate::sync::atomic::{AtomicBool, Ordering, fence};
use crate::sync::{Arc, Mutex};
use kvferry_proto::{RegionId, Timestamp};
use kvferry_sys::fd::Fd;
use kvferry_sys::shared::Shared;
use kvferry_sys::unix::Channel;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// "kvfgate" and the version of the page.
const MAGIC: u64 = u64::from_le_bytes(*b"kvfgate\x01");
const AT_MAGIC: usize = 0;
/// Offset of the number of gates that have ever been used.
const AT_HIGH: usize = 8;
const GATE: usize = 64;
/// Threads of one process that copy to one other process at the same time; further threads wait.
const GATES: u32 = 255;
const LEN: usize = GATE * (GATES as usize + 1);

// Words of a gate: the sequence, odd while inside; bytes written, bytes read, batches; the touched
// region.
const STATE: usize = 0;
const WRITTEN: usize = 8;
const READ: usize = 16;
const BATCHES: usize = 24;
const TOUCHES: usize = 32;

const fn at(gate: u32) -> usize {
    GATE * (gate as usize + 1)
}

/// The writer's side: its gates.
#[derive(Debug)]
pub(crate) struct WriterPage {
    shared: Shared,
    /// Free gates, the lowest last, and how many gates were ever used.
    free: Mutex<(Vec<u32>, u32)>,
}

/// A gate of a [`WriterPage`], until dropped.
#[derive(Debug)]
pub(crate) struct WriterGate<'a> {
    page: &'a WriterPage,
    gate: u32,
}

/// The writer is inside the gate until this is dropped.
#[derive(Debug)]
pub(crate) struct WriterInside<'a>(&'a WriterGate<'a>);

impl WriterPage {
    pub(crate) fn create() -> io::Result<Self> {
        let shared = Shared::create("kvferry-writers", LEN)?;
        shared.word(AT_MAGIC).store(MAGIC, Ordering::SeqCst);
        shared.seal_against_writes()?;
        Ok(Self { shared, free: Mutex::new(((0..GATES).rev().collect(), 0)) })
    }

    /// The page's descriptor, for the owner of the memory, which maps it read-only.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.shared)
    }

    /// A gate for one thread; `None` while all are in use.
    pub(crate) fn gate(&self) -> Option<WriterGate<'_>> {
        let mut free = self.free.lock();
        let gate = free.0.pop()?;
        if gate >= free.1 {
            free.1 = gate + 1;
            // Before a writer enters the gate: the owner checks only gates below this number.
            self.shared.word(AT_HIGH).store(free.1.into(), Ordering::SeqCst);
        }
        Some(WriterGate { page: self, gate })
    }
}

impl Drop for WriterGate<'_> {
    fn drop(&mut self) {
        self.page.free.lock().0.push(self.gate);
    }
}

impl WriterGate<'_> {
    pub(crate) fn enter(&self, touches: Touches) -> WriterInside<'_> {
        // A thread that loads this word and sees an earlier entry's end also sees all that was done
        // inside that entry.
        let word = self.page.shared.word(at(self.gate) + TOUCHES);
        word.store(touches.to_word(), Ordering::Release);
        self.page.shared.word(at(self.gate) + STATE).fetch_add(1, Ordering::SeqCst);
        WriterInside(self)
    }

    /// Adds to the figures that the owner's counters read.
    pub(crate) fn count(&self, written: u64, read: u64, batches: u64) {
        for (word, more) in [(WRITTEN, written), (READ, read), (BATCHES, batches)] {
            if more > 0 {
                self.page.shared.word(at(self.gate) + word).fetch_add(more, Ordering::Relaxed);
            }
        }
    }
}

impl Drop for WriterInside<'_> {
    fn drop(&mut self) {
        let gate = self.0;
        gate.page.shared.word(at(gate.gate) + STATE).fetch_add(1, Ordering::Release);
    }
}

/// Figures of copies, as the writers report them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) written: u64,
    pub(crate) read: u64,
    pub(crate) batches: u64,
}

impl Totals {
    fn add(&mut self, more: Self) {
        self.written = self.written.wrapping_add(more.written);
        self.read = self.read.wrapping_add(more.read);
        self.batches = self.batches.wrapping_add(more.batches);
    }
}

/// The owner's side: a process that may copy into this agent's memory.
#[derive(Debug)]
pub(crate) struct Writer {
    shared: Shared,
    pub(crate) channel: Arc<Channel>,
    pidfd: Fd,
    /// Names the process in logs.
    pub(crate) name: String,
    gone: AtomicBool,
}

impl Writer {
    pub(crate) fn open(fd: OwnedFd, channel: Arc<Channel>, name: String) -> io::Result<Self> {
        let shared = Shared::open(fd, LEN, false)?;
        if shared.load(AT_MAGIC) != MAGIC {
            let what = "not a page of gates, or a page of another version";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let pidfd = channel.peer_pidfd()?;
        Ok(Self { shared, channel, pidfd, name, gone: AtomicBool::new(false) })
    }

    /// Whether the process can never enter a gate again.
    pub(crate) fn is_gone(&self) -> bool {
        if !self.gone.load(Ordering::Acquire) && self.channel.is_gone(&self.pidfd) {
            self.gone.store(true, Ordering::Release);
        }
        self.gone.load(Ordering::Acquire)
    }

    fn gates(&self) -> u32 {
        u32::try_from(self.shared.load(AT_HIGH)).unwrap_or(GATES).min(GATES)
    }

    fn state(&self, gate: u32) -> u64 {
        self.shared.load(at(gate) + STATE)
    }

    fn touches(&self, gate: u32) -> u64 {
        self.shared.load(at(gate) + TOUCHES)
    }

    fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for at in (0..self.gates()).map(at) {
            totals.add(Totals {
                written: self.shared.load(at + WRITTEN),
                read: self.shared.load(at + READ),
                batches: self.shared.load(at + BATCHES),
            });
        }
        totals
    }
}

/// A gate in which a process was seen.
#[derive(Clone, Debug)]
pub(crate) struct Occupied {
    pub(crate) writer: Arc<Writer>,
    gate: u32,
    state: u64,
}

impl Copier for Occupied {
    fn name(&self) -> &str {
        &self.writer.name
    }

    /// Whether the process has left the gate since.
    fn is_left(&self) -> bool {
        self.writer.state(self.gate) != self.state || self.writer.is_gone()
    }

    fn wait(&self, until: Timestamp) -> bool {
        for attempt in 0u32.. {
            if self.is_left() {
                return true;
            }
            let left = until.saturating_since(now());
            if left.is_zero() {
                return false;
            }
            match attempt {
                0..50 => std::hint::spin_loop(),
                50..100 => crate::sync::thread::yield_now(),
                _ => {
                    let step = Duration::from_micros(200).min(left);
                    self.writer.channel.wait_gone(&self.writer.pidfd, step);
                    if self.writer.state(self.gate) == self.state {
                        // Not gone: the wait may have ended early for another reason.
                        crate::sync::thread::sleep(step);
                    }
                }
            }
        }
        unreachable!("the range of attempts is endless")
    }
}

/// The processes that may copy into an agent's memory.
#[derive(Debug, Default)]
pub(crate) struct Writers {
    live: Mutex<Vec<Arc<Writer>>>,
    /// The figures of processes that are gone.
    before: Mutex<Totals>,
}

impl Writers {
    pub(crate) fn add(&self, writer: Arc<Writer>) {
        self.forget_gone();
        self.live.lock().push(writer);
    }

    /// Drops the processes that are gone. Others stay even if their connection is not served any
    /// more: they may be inside a gate.
    pub(crate) fn forget_gone(&self) {
        // Each is asked by a system call, so without the locks.
        let gone: Vec<_> = self.all().into_iter().filter(|writer| writer.is_gone()).collect();
        if gone.is_empty() {
            return;
        }
        let mut sum = self.before.lock();
        self.live.lock().retain(|writer| {
            let stays = !gone.iter().any(|gone| Arc::ptr_eq(gone, writer));
            if !stays {
                sum.add(writer.totals());
            }
            stays
        });
    }

    fn all(&self) -> Vec<Arc<Writer>> {
        self.live.lock().clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.live.lock().len()
    }

    pub(crate) fn totals(&self) -> Totals {
        let mut sum = *self.before.lock();
        self.live.lock().iter().for_each(|writer| sum.add(writer.totals()));
        sum
    }

    /// The gates that a process may be inside now, to touch one of these regions (`None`: any region).
    /// Every later entry sees stores to the table made before the call. Wait for each of them with
    /// [`Occupied::wait`].
    #[must_use]
    pub(crate) fn inside(&self, regions: Option<&[RegionId]>) -> Vec<Occupied> {
        fence(Ordering::SeqCst);
        let mut occupied = Vec::new();
        for writer in self.live.lock().iter() {
            for gate in 0..writer.gates() {
                let state = writer.state(gate);
                let concerns = |regions| Touches::may_be(writer.touches(gate), regions);
                if state & 1 == 1 && regions.is_none_or(concerns) {
                    occupied.push(Occupied { writer: Arc::clone(writer), gate, state });
                }
            }
        }
        occupied
    }

    /// Waits for the gates that a process may be inside now; returns those not left by `until`.
    #[cfg(test)]
    pub(crate) fn quiesce(&self, regions: Option<&[RegionId]>, until: Timestamp) -> Vec<Occupied> {
        let mut occupied = self.inside(regions);
        occupied.retain(|gate| !gate.wait(until));
        occupied
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer() -> (WriterPage, Channel, Arc<Writer>, Writers) {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvferry-writers-{}-{number}", std::process::id());
        let listener = Channel::listen(name.as_bytes()).expect("a free name");
        let there = Channel::connect(name.as_bytes()).expect("the listener is open");
        let here = Arc::new(listener.accept().expect("a connection waits"));
        let page = WriterPage::create().expect("memory");
        let fd = page.fd().try_clone_to_owned().expect("a descriptor");
        let writer = Arc::new(Writer::open(fd, here, "test".into()).expect("a page of gates"));
        let writers = Writers::default();
        writers.add(Arc::clone(&writer));
        (page, there, writer, writers)
    }

    fn soon(ms: u64) -> Timestamp {
        now() + Duration::from_millis(ms)
    }

    #[test]
    fn quiesce_waits_for_a_writer_inside_and_then_returns_its_gate() {
        let (page, _there, _writer, writers) = writer();
        let gate = page.gate().expect("a free one");
        assert!(writers.quiesce(None, soon(1)).is_empty());
        let inside = gate.enter(Touches::Any);
        let occupied = writers.quiesce(None, soon(20));
        assert_eq!(occupied.len(), 1);
        assert!(!occupied[0].is_left());
        drop(inside);
        assert!(occupied[0].is_left());
        assert!(writers.quiesce(None, soon(1)).is_empty());
    }

    #[test]
    fn a_writer_that_has_left_since_is_not_reported_when_the_time_is_over() {
        let (page, _there, _writer, writers) = writer();
        let gate = page.gate().expect("a free one");
        let inside = gate.enter(Touches::Any);
        let occupied = writers.inside(None);
        drop(inside);
        let _again = gate.enter(Touches::Any);
        assert!(occupied.len() == 1 && occupied[0].wait(now()));
    }

    #[test]
    fn quiesce_does_not_wait_for_a_writer_of_another_region() {
        let (page, _there, _writer, writers) = writer();
        let gate = page.gate().expect("a free one");
        let _inside = gate.enter(Touches::Only(RegionId(7)));
        assert!(writers.quiesce(Some(&[RegionId(6), RegionId(8)]), soon(5_000)).is_empty());
        assert_eq!(writers.quiesce(Some(&[RegionId(6), RegionId(7)]), soon(5)).len(), 1);
        assert_eq!(writers.quiesce(None, soon(5)).len(), 1);
    }

    #[test]
    fn quiesce_does_not_wait_for_a_later_entry() {
        let (page, _there, _writer, writers) = writer();
        let gate = page.gate().expect("a free one");
        drop(gate.enter(Touches::Any));
        std::thread::scope(|scope| {
            let mut inside = gate.enter(Touches::Any);
            let waiting = scope.spawn(|| writers.quiesce(None, soon(5_000)));
            // Outside for so short that a thread that waits for the gate to be left would not see it.
            while !waiting.is_finished() {
                crate::sync::thread::sleep(Duration::from_millis(20));
                drop(inside);
                inside = gate.enter(Touches::Any);
            }
            assert!(waiting.join().expect("no panic").is_empty());
        });
    }

    #[test]
    fn a_writer_whose_connection_hung_up_is_gone() {
        let (page, there, writer, writers) = writer();
        let gate = page.gate().expect("a free one");
        let _inside = gate.enter(Touches::Any);
        assert!(!writer.is_gone());
        drop(there);
        assert!(writers.quiesce(None, soon(5_000)).is_empty());
        assert!(writer.is_gone());
    }

    #[test]
    fn the_figures_of_a_writer_are_kept_after_its_end() {
        let (page, there, writer, writers) = writer();
        page.gate().expect("a free one").count(10, 0, 1);
        page.gate().expect("the same one").count(5, 7, 2);
        let sum = Totals { written: 15, read: 7, batches: 3 };
        assert_eq!(writers.totals(), sum);
        writers.forget_gone();
        assert_eq!(writers.count(), 1, "{} may still write", writer.name);
        drop(there);
        writers.forget_gone();
        assert_eq!((writers.totals(), writers.count()), (sum, 0));
    }

    #[test]
    fn gates_are_reused_lowest_first() {
        let (page, _there, writer, _writers) = writer();
        let all: Vec<_> = (0..GATES).map(|_| page.gate().expect("a free one")).collect();
        assert!(page.gate().is_none());
        assert_eq!(writer.gates(), GATES);
        drop(all);
        assert!(page.gate().is_some());
    }
}
