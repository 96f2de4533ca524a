//! Registrations of memory and files with io_uring, and when they end.
//!
//! A ring may register memory, whose pages it then keeps, and files, which it then keeps open. A
//! registration belongs to the memory or the file and not to the ring: [`Pins`] has all of them. It
//! takes them back when it is closed, and when it is dropped with its owner. So no ring keeps the pages of
//! memory that its owner has unmapped. A ring finds a registration by the number of its `Pins`, which
//! is never used again.

use crate::fd::Tracked;
use crate::span::HostSpan;
use crate::sync::Mutex;
use io_uring::IoUring;
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// The registrations of one range of memory, or of one file.
pub struct Pins {
    id: u64,
    /// The registrations; `None` once closed.
    registrations: Mutex<Option<Vec<Registration>>>,
}

impl Pins {
    /// Creates pins without registrations.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, registrations: Mutex::new(Some(Vec::new())) }
    }

    /// Id of the pins, unique in this process.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Takes all registrations back and refuses later ones. No operation may use the memory any more.
    pub fn close(&self) {
        let registrations = self.registrations.lock().take();
        drop(registrations);
    }

    /// Whether later registrations are refused. For tests.
    pub fn is_closed(&self) -> bool {
        self.registrations.lock().is_none()
    }

    /// Number of rings that have a registration. For tests.
    pub fn count(&self) -> usize {
        let is_alive = |registration: &&Registration| registration.ring.strong_count() > 0;
        self.registrations.lock().iter().flatten().filter(is_alive).count()
    }

    /// False if closed: the registration is taken back.
    fn add(&self, registration: Registration) -> bool {
        let mut registrations = self.registrations.lock();
        let Some(registrations) = &mut *registrations else { return false };
        if registrations.len() == registrations.capacity() {
            registrations.retain(|registration| registration.ring.strong_count() > 0);
        }
        registrations.push(registration);
        true
    }
}

impl Default for Pins {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pins").field("id", &self.id).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Memory,
    File,
}

/// A place in a table of a ring. Dropped, the place is empty again.
struct Registration {
    ring: Weak<Tables>,
    kind: Kind,
    place: u32,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(tables) = self.ring.upgrade() else { return };
        let emptied = match self.kind {
            // SAFETY: an empty place: no memory is named.
            Kind::Memory => unsafe {
                let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
                tables.ring.submitter().register_buffers_update(self.place, &[nothing], None)
            },
            Kind::File => {
                tables.ring.submitter().register_files_update(self.place, &[-1]).map(drop)
            }
        };
        // In a forked child the ring is the parent's and can't be reached.
        if emptied.is_ok() {
            tables.free(self.kind).lock().push(self.place);
        }
    }
}

/// A ring and the free places of its tables.
pub(crate) struct Tables {
    pub(crate) ring: Tracked<IoUring>,
    memory: Mutex<Vec<u32>>,
    files: Mutex<Vec<u32>>,
}

impl Tables {
    /// Makes tables of so many places; none where the kernel has no such tables (before Linux 5.19).
    pub(crate) fn new(ring: Tracked<IoUring>, memory: u32, files: u32) -> Self {
        let places = |made: io::Result<()>, count: u32| match made {
            Ok(()) => Mutex::new((0..count).rev().collect()),
            Err(_) => Mutex::default(),
        };
        let memory = places(ring.submitter().register_buffers_sparse(memory), memory);
        let files = places(ring.submitter().register_files_sparse(files), files);
        Self { ring, memory, files }
    }

    fn free(&self, kind: Kind) -> &Mutex<Vec<u32>> {
        match kind {
            Kind::Memory => &self.memory,
            Kind::File => &self.files,
        }
    }

    /// Registers memory for as long as `pins` is open. `None` if there is no place.
    ///
    /// # Errors
    /// `ENOMEM` beyond the limit of locked memory; `EFAULT` or `EOPNOTSUPP` for memory that can't be
    /// kept, such as read-only memory.
    pub(crate) fn register_memory(
        self: &Arc<Self>,
        span: HostSpan,
        pins: &Pins,
    ) -> io::Result<Option<u32>> {
        self.register(Kind::Memory, pins, |place| {
            let span = std::slice::from_ref(&span);
            // SAFETY: `pins` ends the registration before the memory is unmapped.
            unsafe {
                let span = HostSpan::as_iovecs(span);
                self.ring.submitter().register_buffers_update(place, span, None)
            }
        })
    }

    /// Registers a file for as long as `pins` is open. `None` if there is no place.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn register_file(
        self: &Arc<Self>,
        fd: RawFd,
        pins: &Pins,
    ) -> io::Result<Option<u32>> {
        let update = |place| self.ring.submitter().register_files_update(place, &[fd]);
        self.register(Kind::File, pins, |place| update(place).map(drop))
    }

    fn register(
        self: &Arc<Self>,
        kind: Kind,
        pins: &Pins,
        update: impl FnOnce(u32) -> io::Result<()>,
    ) -> io::Result<Option<u32>> {
        let Some(place) = self.free(kind).lock().pop() else { return Ok(None) };
        if let Err(e) = update(place) {
            self.free(kind).lock().push(place);
            return Err(e);
        }
        let registration = Registration { ring: Arc::downgrade(self), kind, place };
        Ok(pins.add(registration).then_some(place))
    }
}
