//! io_uring: reads and writes of files that the kernel carries out while the caller does other things.
//!
//! What an operation needs, its memory included, belongs to the operation until the kernel has
//! completed it. A caller that loses interest can only stop looking: [`Ring::completed`] gives the
//! owner of the memory back, and nothing else does. A ring that is dropped with operations under
//! way waits for them; if the device does not answer, ring and owners are leaked, for the kernel may
//! still write.
//!
//! Memory and files that are used again and again are registered with the kernel, which then need not look
//! them up for each operation. See [`crate::pins`] for when a registration ends.

use crate::fd;
use crate::file::File;
use crate::pins::{Pins, Tables};
use crate::poll::Interest;
use crate::retry_on_intr;
use crate::span::HostSpan;
use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait of a dropped ring for its operations.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// Ranges of memory that a ring registers at most. The pages of a range stay in memory, and the kernel
/// keeps 16 bytes for each.
const MEMORY_PLACES: u32 = 512;
/// Files that a ring registers at most.
const FILE_PLACES: u32 = 64;
/// A file is registered at its operation of this number; one that is used once is not.
const FILE_USES: u64 = 16;
/// Ranges and files whose uses are counted.
const COUNTED_MAX: usize = 4096;

/// Whether bytes go to the file or come from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Bytes are read from the file.
    Read,
    /// Bytes are written to the file.
    Write,
}

/// Memory that a ring may register: it contains the span of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Range<'a> {
    /// The registrations of the memory that the range is a part of.
    pub pins: &'a Pins,
    /// Number of the range among those of `pins`.
    pub number: u64,
    /// Valid until `pins` is closed.
    pub span: HostSpan,
}

/// Registered memory in the table of one ring, for one operation that starts before `pins` is closed.
#[derive(Debug)]
pub struct Place(u16);

/// Key of a memory range or of a file: the numbers of its pins and of the range.
type Key = (u64, u64);

/// State of a memory range or of a file in a ring's register.
#[derive(Clone, Copy)]
enum RegisterState {
    /// The bytes or operations so far.
    Counted(u64),
    Registered(u32),
    /// The kernel does not register it.
    Refused,
}

/// State of all memory, or of all files, in a ring.
///
/// What was registered and is not any more stays here until its place is taken: nothing asks for
/// its key again, since keys are not used twice.
#[derive(Default)]
struct Register {
    known: HashMap<Key, RegisterState>,
    keys: HashMap<u32, Key>,
}

impl Register {
    /// Returns the place of memory or of a file; registers it once its uses weigh `enough`.
    fn place(
        &mut self,
        key: Key,
        weight: u64,
        enough: u64,
        register: impl FnOnce() -> io::Result<Option<u32>>,
    ) -> io::Result<Option<u32>> {
        if self.known.len() >= COUNTED_MAX {
            self.known.retain(|_, known| matches!(known, RegisterState::Registered(_)));
        }
        let known = self.known.entry(key).or_insert(RegisterState::Counted(0));
        match known {
            RegisterState::Registered(place) => return Ok(Some(*place)),
            RegisterState::Refused => return Ok(None),
            RegisterState::Counted(uses) => {
                *uses = uses.saturating_add(weight);
                if *uses < enough {
                    return Ok(None);
                }
            }
        }
        *known = match register() {
            Ok(Some(place)) => RegisterState::Registered(place),
            // There may be a place later.
            Ok(None) => RegisterState::Counted(0),
            Err(e) => {
                *known = RegisterState::Refused;
                return Err(e);
            }
        };
        let RegisterState::Registered(place) = *known else { return Ok(None) };
        if let Some(former) = self.keys.insert(place, key) {
            self.known.remove(&former);
        }
        Ok(Some(place))
    }
}

/// The owners that keep an operation's file open and its memory valid.
struct Flight<T> {
    _file: Arc<File>,
    owner: T,
}

/// A queue of reads and writes. One thread uses it at a time.
pub struct Ring<T> {
    tables: ManuallyDrop<Arc<Tables>>,
    /// Operations under way, indexed by their `user_data`.
    flights: ManuallyDrop<Vec<Option<Flight<T>>>>,
    /// Numbers without a flight.
    free: Vec<usize>,
    /// Operations that were queued and not submitted.
    unsubmitted: usize,
    memory: Register,
    files: Register,
    /// The error for which no further memory is registered, such as the limit of locked memory.
    refusal: Option<io::Error>,
}

/// A ring whose completions do not interrupt the thread that submitted: it takes them when it enters the
/// kernel, which it does to wait. Before Linux 5.19 they interrupt it.
fn make(entries: u32) -> io::Result<IoUring> {
    match IoUring::builder().setup_coop_taskrun().build(entries) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        made => made,
    }
}

impl<T> Ring<T> {
    /// A ring for up to `entries` operations at once, 1 to 4096.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where the system forbids io_uring or does not have it; `Unsupported` if it
    /// can't read and write (before Linux 5.6); `ENOMEM` beyond the limit of locked memory.
    pub fn new(entries: usize) -> io::Result<Self> {
        let entries = entries.clamp(1, 4096);
        let ring = make(u32::try_from(entries).expect("at most 4096"))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if ![opcode::Read::CODE, opcode::Write::CODE].iter().all(|code| probe.is_supported(*code)) {
            let why = "this kernel's io_uring can't read and write files";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        Ok(Self {
            tables: ManuallyDrop::new(Arc::new(Tables::new(
                fd::Tracked::new(ring),
                MEMORY_PLACES,
                FILE_PLACES,
            ))),
            flights: ManuallyDrop::new((0..entries).map(|_| None).collect()),
            free: (0..entries).rev().collect(),
            unsubmitted: 0,
            memory: Register::default(),
            files: Register::default(),
            refusal: None,
        })
    }

    fn submission(&mut self) -> squeue::SubmissionQueue<'_> {
        // SAFETY: only this value uses the queue, and it is borrowed for as long; registrations don't.
        unsafe { self.tables.ring.submission_shared() }
    }

    fn completion(&mut self) -> cqueue::CompletionQueue<'_> {
        // SAFETY: as in `submission`.
        unsafe { self.tables.ring.completion_shared() }
    }

    /// The error for which no further memory is registered, such as the limit of locked memory; `None` without a
    /// refusal.
    pub fn refusal(&self) -> Option<&io::Error> {
        self.refusal.as_ref()
    }

    /// Operations that the kernel has not completed, or whose completion was not taken.
    pub fn in_flight(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// Whether no further operation fits.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Whether the kernel has taken everything that was queued.
    pub fn is_submitted(&self) -> bool {
        self.unsubmitted == 0
    }

    /// The place of registered memory that contains `span`. The range is registered once as many bytes of it
    /// were asked for as it has: the kernel has looked up as many pages then as a registration does.
    pub fn place(&mut self, range: Range<'_>, span: HostSpan) -> Option<Place> {
        let (tables, may_register) = (&self.tables, self.refusal.is_none());
        let key = (range.pins.id(), range.number);
        let len = range.span.len() as u64;
        let place = self.memory.place(key, span.len() as u64, len, || match may_register {
            true => tables.register_memory(range.span, range.pins),
            false => Ok(None),
        });
        match place {
            Ok(place) => place.and_then(|place| u16::try_from(place).ok()).map(Place),
            Err(e) => {
                // Other errors are of this memory only.
                if matches!(e.raw_os_error(), Some(libc::ENOMEM | libc::EPERM)) {
                    self.refusal = Some(e);
                }
                None
            }
        }
    }

    /// Queues an operation. The span is used until `owner` comes back from [`Ring::completed`]. A file that is
    /// used often is registered.
    ///
    /// # Panics
    /// If the ring is full.
    pub fn push(
        &mut self,
        file: &Arc<File>,
        way: Way,
        offset: u64,
        span: HostSpan,
        place: Option<Place>,
        owner: T,
    ) {
        let number = self.free.pop().expect("the caller looked whether the ring is full");
        let entry = match self.registered_file(file) {
            Some(fd) => entry(way, fd, offset, span, place).flags(squeue::Flags::FIXED_FILE),
            None => entry(way, file.as_raw_fd(), offset, span, place),
        };
        let entry = entry.user_data(number as u64);
        self.flights[number] = Some(Flight { _file: Arc::clone(file), owner });
        // SAFETY: the flight keeps file and memory until the kernel has completed the operation, and
        // outlives the ring if the ring can't be drained.
        let pushed = unsafe { self.submission().push(&entry) };
        pushed.expect("as many entries as flights");
        self.unsubmitted += 1;
    }

    fn registered_file(&mut self, file: &File) -> Option<i32> {
        let tables = &self.tables;
        let register = || tables.register_file(file.as_raw_fd(), file.pins());
        let place = self.files.place((file.pins().id(), 0), 1, FILE_USES, register);
        place.ok().flatten().and_then(|place| i32::try_from(place).ok())
    }

    /// Gives the kernel what was queued. What it does not take now it gets at the next call.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn submit(&mut self) -> io::Result<()> {
        while self.unsubmitted > 0 {
            match retry_on_intr(|| self.tables.ring.submit()) {
                Ok(0) => break,
                Ok(taken) => self.unsubmitted = self.unsubmitted.saturating_sub(taken),
                Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => break,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Submits what was queued and waits until `count` operations have ended, for `timeout` at most, in one
    /// system call. Returns early if a signal came. Before Linux 5.11, waits for one operation.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn wait(&mut self, count: usize, timeout: Duration) -> io::Result<()> {
        if !self.tables.ring.params().is_feature_ext_arg() {
            self.submit()?;
            return crate::poll::wait_one(self.as_fd(), Interest::Read, Some(timeout)).map(drop);
        }
        let timeout = types::Timespec::from(timeout);
        let args = types::SubmitArgs::new().timespec(&timeout);
        match self.tables.ring.submitter().submit_with_args(count, &args) {
            Ok(taken) => self.unsubmitted = self.unsubmitted.saturating_sub(taken),
            // What was queued is taken before the wait, whose end by time or signal hides how many.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {
                let queued = self.submission().len();
                self.unsubmitted = queued;
            }
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Takes one operation that has ended: its owner, and the bytes it moved.
    pub fn completed(&mut self) -> Option<(T, io::Result<usize>)> {
        let entry = self.completion().next()?;
        let number = usize::try_from(entry.user_data()).expect("as it was queued");
        let flight = self.flights[number].take().expect("the kernel completes an operation once");
        self.free.push(number);
        let moved = usize::try_from(entry.result())
            .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
        Some((flight.owner, moved))
    }

    fn drain(&mut self, until: Instant) {
        let _ = self.submit();
        while self.in_flight() > 0 {
            if self.completed().is_some() {
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let _ = crate::poll::wait_one(self.as_fd(), Interest::Read, Some(left));
        }
    }
}

fn entry(way: Way, fd: i32, offset: u64, span: HostSpan, place: Option<Place>) -> squeue::Entry {
    let (fd, ptr) = (types::Fd(fd), span.as_ptr());
    let len = u32::try_from(span.len()).unwrap_or(1 << 30);
    match (way, place) {
        (Way::Read, None) => opcode::Read::new(fd, ptr, len).offset(offset).build(),
        (Way::Write, None) => opcode::Write::new(fd, ptr, len).offset(offset).build(),
        (Way::Read, Some(Place(at))) => {
            opcode::ReadFixed::new(fd, ptr, len, at).offset(offset).build()
        }
        (Way::Write, Some(Place(at))) => {
            opcode::WriteFixed::new(fd, ptr, len, at).offset(offset).build()
        }
    }
}

impl<T> AsFd for Ring<T> {
    /// Readable while there are completions.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor, which is open for as long as the ring is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.tables.ring.as_raw_fd()) }
    }
}

impl<T> fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring[{} of {} in flight]", self.in_flight(), self.flights.len())
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        if self.tables.ring.was_forked() {
            // The parent's ring and the parent's operations.
            return;
        }
        self.drain(Instant::now() + DRAIN_MAX);
        if self.in_flight() > 0 {
            return;
        }
        // SAFETY: dropped once, here, and not used any more. No operation is under way.
        unsafe {
            ManuallyDrop::drop(&mut self.tables);
            ManuallyDrop::drop(&mut self.flights);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::OpenFlags;
    use crate::map::Mapping;
    use std::sync::atomic::{AtomicUsize, Ordering};

    static ALIVE: AtomicUsize = AtomicUsize::new(0);

    /// Owns the memory of an operation.
    struct Owner(Mapping);

    impl Owner {
        fn new(byte: u8) -> Self {
            ALIVE.fetch_add(1, Ordering::SeqCst);
            let mapping = Mapping::anonymous(4096).expect("memory");
            mapping.span(0, 4096).copy_from(&[byte; 4096]);
            Self(mapping)
        }
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            ALIVE.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn ring(entries: usize) -> Option<Ring<Owner>> {
        match Ring::new(entries) {
            Ok(ring) => Some(ring),
            Err(e) => {
                println!("SKIPPED: io_uring can't be used here: {e}");
                None
            }
        }
    }

    /// A single test, since both parts count the same owners.
    #[test]
    fn owners_come_back_once_and_a_dropped_ring_waits_for_the_rest() {
        let Some(mut ring) = ring(8) else { return };
        let path = std::env::temp_dir().join(format!("kvferry-uring-{}", std::process::id()));
        let how = OpenFlags { read: true, write: true, create: true, direct: false };
        let file = Arc::new(File::open(&path, how).expect("a file"));
        for i in 0..8u8 {
            let owner = Owner::new(i);
            let span = owner.0.span(0, 4096);
            ring.push(&file, Way::Write, u64::from(i) * 4096, span, None, owner);
        }
        assert!(ring.is_full());
        ring.submit().expect("a ring");
        ring.drain(Instant::now() + Duration::from_secs(30));
        assert_eq!((ring.in_flight(), ALIVE.load(Ordering::SeqCst)), (0, 0));

        let owner = Owner::new(0xff);
        let span = owner.0.span(0, 4096);
        ring.push(&file, Way::Read, 3 * 4096, span, None, owner);
        let owner = Owner::new(0xff);
        let span = owner.0.span(0, 4096);
        ring.push(&file, Way::Read, 8 * 4096, span, None, owner);
        ring.submit().expect("a ring");
        let mut moved = Vec::new();
        while moved.len() < 2 {
            if let Some((owner, result)) = ring.completed() {
                let mut first = [0];
                owner.0.span(0, 1).copy_to(&mut first);
                moved.push((result.expect("a file"), first[0]));
            }
        }
        moved.sort_unstable();
        assert_eq!(moved, [(0, 0xff), (4096, 3)], "the second is behind the end of the file");

        let owner = Owner::new(1);
        let span = owner.0.span(0, 4096);
        ring.push(&file, Way::Write, 0, span, None, owner);
        drop(ring);
        assert_eq!(ALIVE.load(Ordering::SeqCst), 0);
        assert_eq!(Arc::strong_count(&file), 1);
        let bytes = std::fs::read(&path).expect("written above");
        assert_eq!((bytes.len(), bytes[0], bytes[7 * 4096]), (8 * 4096, 1, 7));
        std::fs::remove_file(&path).expect("made above");
    }

    #[test]
    fn memory_is_registered_once_that_pays_and_until_its_pins_are_closed() {
        let Ok(mut ring) = Ring::<()>::new(4) else {
            println!("SKIPPED: io_uring can't be used here");
            return;
        };
        let mapping = Mapping::anonymous(1 << 20).expect("memory");
        let (whole, part) = (mapping.span(0, 1 << 20), mapping.span(4096, 256 << 10));
        let range = |pins| Range { pins, number: 0, span: whole };
        let (first, second) = (Pins::new(), Pins::new());
        let places: Vec<_> =
            (0..5).map(|_| ring.place(range(&first), part).map(|at| at.0)).collect();
        if ring.refusal().is_some() || first.count() == 0 {
            println!("SKIPPED: memory can't be registered here: {:?}", ring.refusal());
            return;
        }
        assert_eq!(places[..3], [None; 3], "less was asked for than the range has");
        assert!(places[3].is_some() && places[3] == places[4]);
        first.close();
        assert_eq!(first.count(), 0);
        let again: Vec<_> =
            (0..4).map(|_| ring.place(range(&second), part).map(|at| at.0)).collect();
        assert_eq!(again[3], places[3], "the place was empty again");
        for _ in 0..4 {
            let _ = ring.place(range(&first), part);
        }
        assert_eq!((first.count(), second.count()), (0, 1), "nothing is registered once closed");
        drop(ring);
        assert_eq!(second.count(), 0);
    }

    #[test]
    fn a_file_that_is_used_often_is_registered_until_it_is_closed() {
        let Ok(mut ring) = Ring::<()>::new(4) else {
            println!("SKIPPED: io_uring can't be used here");
            return;
        };
        let path = std::env::temp_dir().join(format!("kvferry-often-{}", std::process::id()));
        let how = OpenFlags { read: true, write: true, create: true, direct: false };
        let file = Arc::new(File::open(&path, how).expect("a file"));
        std::fs::remove_file(&path).expect("made above");
        let mapping = Mapping::anonymous(4096).expect("memory");
        for _ in 0..2 * FILE_USES {
            ring.push(&file, Way::Write, 0, mapping.span(0, 4096), None, ());
            ring.drain(Instant::now() + Duration::from_secs(30));
        }
        assert!(file.pins().count() <= 1);
        println!("registered: {}", file.pins().count() == 1);
        assert_eq!(Arc::strong_count(&file), 1, "a registration does not keep the value");
        drop(file);
        let other = Arc::new(File::open(&path, how).expect("a file"));
        std::fs::remove_file(&path).expect("made above");
        for _ in 0..2 * FILE_USES {
            ring.push(&other, Way::Write, 0, mapping.span(0, 4096), None, ());
            ring.drain(Instant::now() + Duration::from_secs(30));
        }
        assert_eq!(other.len().expect("a file"), Some(4096), "the operations reached this file");
    }
}
