//! A mark in shared memory that the kernel sets when a thread ends.
//!
//! The mark is the lock word of a robust mutex that the thread holds. When the thread ends (it
//! returns, a signal kills it, or any thread of its process calls `execve`), the kernel sets
//! `FUTEX_OWNER_DIED` in the word before it releases the thread's address space. Another process
//! checks the mark with one load. A pidfd costs a system call and does not report `execve`.

use crate::shared::Shared;
use std::io;
use std::sync::Arc;
use std::thread::ThreadId;

/// Bytes of shared memory that one mark occupies.
pub const MARK_LEN: usize = 64;
const _: () = assert!(size_of::<libc::pthread_mutex_t>() <= MARK_LEN);

/// Offset of the lock word in the C library's mutex.
const LOCK_WORD: usize = if cfg!(target_env = "musl") { 4 } else { 0 };
const OWNER_DIED: u64 = 0x4000_0000;

/// Marks the thread that made it as alive, until dropped on that thread.
#[derive(Debug)]
pub struct AliveMark {
    /// Keeps the mutex mapped while it is locked.
    shared: Arc<Shared>,
    at: usize,
    thread: ThreadId,
}

impl AliveMark {
    /// Marks this thread as alive in the [`MARK_LEN`] bytes of `shared` at `at`. Nothing else may
    /// ever use these bytes.
    ///
    /// # Errors
    /// The C library's error.
    ///
    /// # Panics
    /// If the bytes are not inside the mapping, `at` is not a multiple of 8, or the mapping is
    /// read-only.
    pub fn new(shared: Arc<Shared>, at: usize) -> io::Result<Self> {
        let mutex = mutex(&shared, at);
        // SAFETY: the attributes are initialised before they are used. The mutex lies in mapped
        // memory that the caller reserves for it, is aligned, and does not move: the value made
        // here owns a share of the mapping, and unlocks the mutex before it releases that share.
        let locked = unsafe {
            let mut attributes = std::mem::zeroed();
            first_error([
                libc::pthread_mutexattr_init(&raw mut attributes),
                libc::pthread_mutexattr_setrobust(&raw mut attributes, libc::PTHREAD_MUTEX_ROBUST),
                libc::pthread_mutexattr_setpshared(
                    &raw mut attributes,
                    libc::PTHREAD_PROCESS_SHARED,
                ),
                libc::pthread_mutex_init(mutex, &raw const attributes),
                libc::pthread_mutexattr_destroy(&raw mut attributes),
                libc::pthread_mutex_lock(mutex),
            ])
        };
        locked.map(|()| Self { shared, at, thread: std::thread::current().id() })
    }
}

fn mutex(shared: &Shared, at: usize) -> *mut libc::pthread_mutex_t {
    // Panics if the bytes are not inside the mapping.
    shared.span(at, MARK_LEN);
    shared.word(at).as_ptr().cast()
}

fn first_error<const N: usize>(codes: [libc::c_int; N]) -> io::Result<()> {
    match codes.into_iter().find(|&code| code != 0) {
        Some(code) => Err(io::Error::from_raw_os_error(code)),
        None => Ok(()),
    }
}

impl Drop for AliveMark {
    fn drop(&mut self) {
        if self.thread == std::thread::current().id() {
            // SAFETY: locked by this thread in `new`, and still mapped.
            unsafe { libc::pthread_mutex_unlock(mutex(&self.shared, self.at)) };
        } else {
            // Only the thread that locked the mutex can unlock it. The kernel and the C library
            // access the mutex when that thread ends, so it stays mapped.
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}

/// Whether the thread that made the mark at `at` has ended without dropping it. False if there
/// never was a mark there.
pub fn has_ended(shared: &Shared, at: usize) -> bool {
    let word = shared.load(at) >> (8 * LOCK_WORD);
    word & OWNER_DIED != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    const AT: usize = 128;

    fn page() -> Arc<Shared> {
        Arc::new(Shared::create("kvferry-test", 4096).expect("memory"))
    }

    #[test]
    fn a_thread_that_ends_is_marked_and_one_that_drops_its_mark_is_not() {
        let shared = page();
        assert!(!has_ended(&shared, AT), "no mark");
        let mark = |forget| {
            let (shared, here) = (Arc::clone(&shared), Arc::clone(&shared));
            let thread = std::thread::spawn(move || {
                let mark = AliveMark::new(shared, AT).expect("a mutex");
                assert!(!has_ended(&here, AT), "the thread is alive");
                if forget {
                    std::mem::forget(mark);
                }
            });
            thread.join().expect("no panic");
        };
        mark(false);
        assert!(!has_ended(&shared, AT));
        mark(true);
        assert!(has_ended(&shared, AT));
    }

    #[test]
    fn a_process_that_runs_another_program_is_marked_although_its_pid_stays() {
        let shared = page();
        let here = Arc::clone(&shared);
        let mut sleep = Command::new("sleep");
        // SAFETY: between fork and exec, only a mutex of this memory is made and locked.
        unsafe {
            sleep.arg("60").pre_exec(move || {
                std::mem::forget(AliveMark::new(Arc::clone(&here), AT)?);
                Ok(())
            });
        }
        let mut child = sleep.spawn().expect("a program");
        let marked = has_ended(&shared, AT);
        let runs = child.try_wait().expect("our child").is_none();
        child.kill().expect("our child");
        child.wait().expect("our child");
        assert!(marked && runs, "marked: {marked}, still runs with the same pid: {runs}");
    }
}
