//! What is counted, and how the calls are caught.
//!
//! A function that a program defines is called instead of the one with the same name in a shared
//! library. So everything here that has a name of libc's is called by `std`, `libc` and `rustix`,
//! and passes on to the real one, which the dynamic linker finds.

#![allow(unsafe_code, reason = "an edge to C; each block has its argument")]

use serde::{Deserialize, Serialize};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static ALLOCATED: AtomicU64 = AtomicU64::new(0);
static COPIED: AtomicU64 = AtomicU64::new(0);
static PAYLOAD_COPIED: AtomicU64 = AtomicU64::new(0);
/// Address at which the payload begins.
static PAYLOAD_AT: AtomicUsize = AtomicUsize::new(0);
static PAYLOAD_END: AtomicUsize = AtomicUsize::new(0);
static COUNTING: AtomicBool = AtomicBool::new(true);

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Leaves this thread out of everything.
pub(crate) fn be_quiet() {
    QUIET.set(true);
}

/// Copies from or to this memory are copies of payload.
pub(crate) fn watch(at: usize, len: usize) {
    PAYLOAD_AT.store(at, Relaxed);
    PAYLOAD_END.store(at + len, Relaxed);
}

fn counts() -> bool {
    COUNTING.load(Relaxed) && !QUIET.try_with(Cell::get).unwrap_or(true)
}

/// Everything that was counted so far in this process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Counts {
    /// Number of calls by name.
    pub(crate) calls: BTreeMap<String, u64>,
    pub(crate) allocations: u64,
    pub(crate) allocated: u64,
    /// Bytes copied by `memcpy` and `memmove`.
    pub(crate) copied: u64,
    /// Bytes of these from or to the memory that is watched.
    pub(crate) payload_copied: u64,
}

impl Counts {
    pub(crate) fn now() -> Self {
        COUNTING.store(false, Relaxed);
        let calls = CALLS
            .iter()
            .zip(&MADE)
            .map(|(name, count)| ((*name).to_owned(), count.load(Relaxed)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let counts = Self {
            calls,
            allocations: ALLOCATIONS.load(Relaxed),
            allocated: ALLOCATED.load(Relaxed),
            copied: COPIED.load(Relaxed),
            payload_copied: PAYLOAD_COPIED.load(Relaxed),
        };
        COUNTING.store(true, Relaxed);
        counts
    }

    pub(crate) fn since(&self, before: &Self) -> Self {
        let calls = self.calls.iter().map(|(name, count)| {
            (name.clone(), count - before.calls.get(name).copied().unwrap_or(0))
        });
        Self {
            calls: calls.filter(|(_, count)| *count > 0).collect(),
            allocations: self.allocations - before.allocations,
            allocated: self.allocated - before.allocated,
            copied: self.copied - before.copied,
            payload_copied: self.payload_copied - before.payload_copied,
        }
    }
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocated(bytes: usize) {
    if counts() {
        ALLOCATIONS.fetch_add(1, Relaxed);
        ALLOCATED.fetch_add(bytes as u64, Relaxed);
    }
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        allocated(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        allocated(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        allocated(size.saturating_sub(layout.size()));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Whether calls of this name, as strace writes it, are counted.
pub(crate) fn is_counted(name: &str) -> bool {
    CALLS.contains(&name)
}

/// The real function of this name, looked up once.
fn real(name: &'static std::ffi::CStr, known: &AtomicUsize) -> usize {
    match known.load(Relaxed) {
        0 => {
            // SAFETY: a name that ends with zero; the result is looked at before it is used.
            let at = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } as usize;
            assert_ne!(at, 0, "libc has no {name:?}");
            known.store(at, Relaxed);
            at
        }
        at => at,
    }
}

fn called(call: Call, arguments: &[usize]) {
    // To look without waiting is not to wait.
    let looks = matches!(call, Call::epoll_wait | Call::epoll_pwait) && arguments[3] as i32 == 0;
    if counts() && !looks {
        MADE[call as usize].fetch_add(1, Relaxed);
    }
}

macro_rules! calls {
    ($($name:ident($($argument:ident),*) $(as $system:literal)?;)*) => {
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "names of libc")]
        enum Call { $($name),* }

        /// The names of the calls, as strace writes them.
        const CALLS: &[&str] = &[$(calls!(@system $name $($system)?)),*];
        static MADE: [AtomicU64; CALLS.len()] = [const { AtomicU64::new(0) }; CALLS.len()];

        $(
            /// Counts, and calls the real one. The arguments are integers and pointers, which are
            /// passed alike; the real function sees them as they came.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: usize),*) -> isize {
                static REAL: AtomicUsize = AtomicUsize::new(0);
                called(Call::$name, &[$($argument),*]);
                const NAME: &std::ffi::CStr =
                    match std::ffi::CStr::from_bytes_with_nul(
                        concat!(stringify!($name), "\0").as_bytes(),
                    ) {
                        Ok(name) => name,
                        Err(_) => panic!("a name without zeros"),
                    };
                let real = real(NAME, &REAL);
                // SAFETY: libc's function of this name takes these arguments, integers and
                // pointers, in these registers, and returns an integer that fits.
                unsafe {
                    let real: unsafe extern "C" fn($(calls!(@word $argument)),*) -> isize =
                        std::mem::transmute(real);
                    real($($argument),*)
                }
            }
        )*
    };
    (@system $name:ident) => { stringify!($name) };
    (@system $name:ident $system:literal) => { $system };
    (@word $argument:ident) => { usize };
}

// Where the call behind a function has another name, it is said. What only looks at the clock is
// no system call.
calls! {
    read(fd, buffer, len);
    write(fd, buffer, len);
    readv(fd, vector, len);
    writev(fd, vector, len);
    recv(fd, buffer, len, flags) as "recvfrom";
    send(fd, buffer, len, flags) as "sendto";
    recvmsg(fd, message, flags);
    sendmsg(fd, message, flags);
    recvfrom(fd, buffer, len, flags, address, address_len);
    sendto(fd, buffer, len, flags, address, address_len);
    process_vm_readv(pid, local, local_len, remote, remote_len, flags);
    process_vm_writev(pid, local, local_len, remote, remote_len, flags);
    poll(fds, len, timeout);
    ppoll(fds, len, timeout, mask);
    epoll_wait(fd, events, len, timeout);
    epoll_pwait(fd, events, len, timeout, mask);
    epoll_pwait2(fd, events, len, timeout, mask);
    epoll_ctl(fd, op, other, event);
    ioctl(fd, request, argument);
    fcntl(fd, command, argument);
    getsockopt(fd, level, name, value, len);
    setsockopt(fd, level, name, value, len);
    shutdown(fd, how);
    close(fd);
    sched_yield();
    nanosleep(time, left);
    clock_nanosleep(clock, flags, time, left);
    eventfd(value, flags) as "eventfd2";
    mmap(at, len, protection, flags, fd, offset);
    munmap(at, len);
    madvise(at, len, advice);
    syscall(number, a, b, c, d, e, f) as "futex";
}

/// # Safety
/// As of libc's `memcpy`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    copied(to, from, len);
    // SAFETY: the caller promises two ranges of `len` bytes that do not overlap.
    unsafe { copy_upwards(to, from, len) };
    to
}

/// # Safety
/// As of libc's `memmove`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    copied(to, from, len);
    if (to as usize).wrapping_sub(from as usize) >= len {
        // SAFETY: the caller promises two ranges of `len` bytes, and the first byte of the target
        // is not inside the source.
        unsafe { copy_upwards(to, from, len) };
    } else {
        // SAFETY: the caller promises two ranges of `len` bytes.
        unsafe { copy_downwards(to, from, len) };
    }
    to
}

fn copied(to: *const u8, from: *const u8, len: usize) {
    if counts() {
        COPIED.fetch_add(len as u64, Relaxed);
        let payload = PAYLOAD_AT.load(Relaxed)..PAYLOAD_END.load(Relaxed);
        if payload.contains(&(to as usize)) || payload.contains(&(from as usize)) {
            PAYLOAD_COPIED.fetch_add(len as u64, Relaxed);
        }
    }
}

// In assembly: a loop would be compiled to a call of the function it is in.

#[cfg(target_arch = "x86_64")]
unsafe fn copy_upwards(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the direction flag is clear by convention; both ranges are the caller's promise.
    unsafe {
        std::arch::asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _,
            inout("rsi") from => _, options(nostack, preserves_flags));
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn copy_downwards(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: from the last byte to the first, with the direction flag set and cleared again; both
    // ranges are the caller's promise, and `len` is not zero or the ranges would not overlap.
    unsafe {
        std::arch::asm!("std", "rep movsb", "cld", inout("rcx") len => _,
            inout("rdi") to.add(len).sub(1) => _, inout("rsi") from.add(len).sub(1) => _,
            options(nostack));
    }
}

#[cfg(target_arch = "aarch64")]
unsafe fn copy_upwards(to: *mut u8, from: *const u8, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: `len` steps of one byte; both ranges are the caller's promise.
    unsafe {
        std::arch::asm!("2:", "ldrb {byte:w}, [{from}], #1", "strb {byte:w}, [{to}], #1",
            "subs {len}, {len}, #1", "b.ne 2b", byte = out(reg) _, from = inout(reg) from => _,
            to = inout(reg) to => _, len = inout(reg) len => _, options(nostack));
    }
}

#[cfg(target_arch = "aarch64")]
unsafe fn copy_downwards(to: *mut u8, from: *const u8, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: as above, from the last byte to the first.
    unsafe {
        std::arch::asm!("2:", "subs {len}, {len}, #1", "ldrb {byte:w}, [{from}, {len}]",
            "strb {byte:w}, [{to}, {len}]", "b.ne 2b", byte = out(reg) _, from = in(reg) from,
            to = in(reg) to, len = inout(reg) len => _, options(nostack));
    }
}
