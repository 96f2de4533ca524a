//! io_uring: reads and writes of files that the kernel carries out while the caller does other things.
//!
//! What an operation needs, its memory included, belongs to the operation until the kernel has
//! completed it. A caller that loses interest can only stop looking: [`Ring::completed`] gives the
//! owner of the memory back, and nothing else does. A ring that is dropped with operations under
//! way waits for them; if the device does not answer, ring and owners are leaked, for the kernel may
//! still write.

use crate::fd;
use crate::file::File;
use crate::poll::Interest;
use crate::retry_on_intr;
use crate::span::HostSpan;
use io_uring::{IoUring, Probe, opcode, types};
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a dropped ring waits for its operations.
const DRAIN_MAX: Duration = Duration::from_secs(1);

/// Whether bytes go to the file or come from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the file.
    Read,
    /// To the file.
    Write,
}

/// What keeps an operation's file open and its memory valid.
struct Flight<T> {
    _file: Arc<File>,
    owner: T,
}

/// A queue of reads and writes. One thread uses it at a time.
pub struct Ring<T> {
    ring: ManuallyDrop<fd::Tracked<IoUring>>,
    /// By the number that the kernel gives back.
    flights: ManuallyDrop<Vec<Option<Flight<T>>>>,
    /// Numbers without a flight.
    free: Vec<usize>,
    /// Operations that were queued and not submitted.
    unsubmitted: usize,
}

impl<T> Ring<T> {
    /// A ring for up to `entries` operations at once, 1 to 4096.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where the system forbids io_uring or does not have it; `Unsupported` if it
    /// can't read and write (before Linux 5.6); `ENOMEM` beyond the limit of locked memory.
    pub fn new(entries: usize) -> io::Result<Self> {
        let entries = entries.clamp(1, 4096);
        let ring = IoUring::new(u32::try_from(entries).expect("at most 4096"))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if ![opcode::Read::CODE, opcode::Write::CODE].iter().all(|code| probe.is_supported(*code)) {
            let why = "this kernel's io_uring can't read and write files";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        Ok(Self {
            ring: ManuallyDrop::new(fd::Tracked::new(ring)),
            flights: ManuallyDrop::new((0..entries).map(|_| None).collect()),
            free: (0..entries).rev().collect(),
            unsubmitted: 0,
        })
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

    /// Queues an operation. The span is used until `owner` comes back from [`Ring::completed`].
    ///
    /// # Panics
    /// If the ring is full.
    pub fn push(&mut self, file: &Arc<File>, way: Way, offset: u64, span: HostSpan, owner: T) {
        let number = self.free.pop().expect("the caller looked whether the ring is full");
        let fd = types::Fd(file.as_raw_fd());
        let len = u32::try_from(span.len()).unwrap_or(1 << 30);
        let entry = match way {
            Way::Read => opcode::Read::new(fd, span.as_ptr(), len).offset(offset).build(),
            Way::Write => opcode::Write::new(fd, span.as_ptr(), len).offset(offset).build(),
        };
        let entry = entry.user_data(number as u64);
        self.flights[number] = Some(Flight { _file: Arc::clone(file), owner });
        // SAFETY: the flight keeps file and memory until the kernel has completed the operation, and
        // outlives the ring if the ring can't be drained.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("as many entries as flights");
        self.unsubmitted += 1;
    }

    /// Gives the kernel what was queued. What it does not take now it gets at the next call.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn submit(&mut self) -> io::Result<()> {
        while self.unsubmitted > 0 {
            match retry_on_intr(|| self.ring.submit()) {
                Ok(0) => break,
                Ok(taken) => self.unsubmitted = self.unsubmitted.saturating_sub(taken),
                Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => break,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Submits what was queued and waits until an operation has ended, for `timeout` at most, in one system
    /// call. Returns early if a signal came.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        if !self.ring.params().is_feature_ext_arg() {
            self.submit()?;
            return crate::poll::wait_one(self.as_fd(), Interest::Read, Some(timeout)).map(drop);
        }
        let timeout = types::Timespec::from(timeout);
        let args = types::SubmitArgs::new().timespec(&timeout);
        match self.ring.submitter().submit_with_args(1, &args) {
            Ok(taken) => self.unsubmitted = self.unsubmitted.saturating_sub(taken),
            // What was queued is taken before the wait, whose end by time or signal hides how many.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {
                self.unsubmitted = self.ring.submission().len();
            }
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Takes one operation that has ended: its owner, and the bytes it moved.
    pub fn completed(&mut self) -> Option<(T, io::Result<usize>)> {
        let entry = self.ring.completion().next()?;
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

impl<T> AsFd for Ring<T> {
    /// Readable while there are completions.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor, which is open for as long as the ring is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl<T> fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring[{} of {} in flight]", self.in_flight(), self.flights.len())
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        if self.ring.was_forked() {
            // The parent's ring and the parent's operations.
            return;
        }
        self.drain(Instant::now() + DRAIN_MAX);
        if self.in_flight() > 0 {
            return;
        }
        // SAFETY: dropped once, here, and not used any more. No operation is under way.
        unsafe {
            ManuallyDrop::drop(&mut self.ring);
            ManuallyDrop::drop(&mut self.flights);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::How;
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

    /// One test, since they count the same owners.
    #[test]
    fn owners_come_back_once_and_a_dropped_ring_waits_for_the_rest() {
        let Some(mut ring) = ring(8) else { return };
        let path = std::env::temp_dir().join(format!("kvferry-uring-{}", std::process::id()));
        let how = How { read: true, write: true, create: true, direct: false };
        let file = Arc::new(File::open(&path, how).expect("a file"));
        for i in 0..8u8 {
            let owner = Owner::new(i);
            let span = owner.0.span(0, 4096);
            ring.push(&file, Way::Write, u64::from(i) * 4096, span, owner);
        }
        assert!(ring.is_full());
        ring.submit().expect("a ring");
        ring.drain(Instant::now() + Duration::from_secs(30));
        assert_eq!((ring.in_flight(), ALIVE.load(Ordering::SeqCst)), (0, 0));

        let owner = Owner::new(0xff);
        let span = owner.0.span(0, 4096);
        ring.push(&file, Way::Read, 3 * 4096, span, owner);
        let owner = Owner::new(0xff);
        let span = owner.0.span(0, 4096);
        ring.push(&file, Way::Read, 8 * 4096, span, owner);
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
        ring.push(&file, Way::Write, 0, span, owner);
        drop(ring);
        assert_eq!(ALIVE.load(Ordering::SeqCst), 0);
        assert_eq!(Arc::strong_count(&file), 1);
        let bytes = std::fs::read(&path).expect("written above");
        assert_eq!((bytes.len(), bytes[0], bytes[7 * 4096]), (8 * 4096, 1, 7));
        std::fs::remove_file(&path).expect("made above");
    }
}
