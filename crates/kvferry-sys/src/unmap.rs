//! Gives large mappings back on a thread of their own.
//!
//! The last mapping of shared memory frees its pages, which takes a quarter of a second per GiB. That
//! may be a mapping of a peer's memory, after the peer has died, so a thread that serves others must not
//! do it. `later` hands an address range to a thread that is started when there is one, and ends when
//! there are no more.

use crate::sync::{Condvar, Mutex};
use crate::{fd, thread};
use std::collections::VecDeque;

/// Bytes below which a range is unmapped at once: a millisecond's work.
pub(crate) const LATER_MIN: usize = 4 << 20;

/// Bytes unmapped by one system call, which keeps the lock of this process's address space.
const STEP: usize = 64 << 20;

/// An address range that its owner has given up.
struct Unowned {
    at: usize,
    len: usize,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Unowned>,
    /// A thread works on the queue.
    running: bool,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { waiting: VecDeque::new(), running: false });
static EMPTIED: Condvar = Condvar::new();

/// While a test holds this lock, the thread that unmaps does not go on.
#[cfg(any(test, debug_assertions))]
pub static HOLD: Mutex<()> = Mutex::new(());

/// Unmaps the range: soon, on another thread, or now if it is small.
///
/// # Safety
/// Exactly a range that was mapped, and that nothing refers to any more.
pub(crate) unsafe fn later(at: *mut u8, len: usize) {
    let range = Unowned { at: at as usize, len };
    // A forked child has no thread for it, may have inherited the lock locked, and frees no page that
    // its parent maps.
    if len < LATER_MIN || fd::forks() > 0 {
        return unmap(&range);
    }
    let mut queue = QUEUE.lock();
    queue.waiting.push_back(range);
    if queue.running {
        return;
    }
    queue.running = thread::spawn("kvferry-unmap".into(), work).is_ok();
    if !queue.running {
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        waiting.iter().for_each(unmap);
    }
}

/// Waits until every range that was given up is unmapped: before much memory is requested, which may be
/// the same again.
pub(crate) fn settle() {
    if fd::forks() > 0 {
        return;
    }
    let mut queue = QUEUE.lock();
    while queue.running {
        queue = EMPTIED.wait(queue, None);
    }
}

fn work() {
    let mut queue = QUEUE.lock();
    while let Some(range) = queue.waiting.pop_front() {
        drop(queue);
        #[cfg(any(test, debug_assertions))]
        drop(HOLD.lock());
        unmap(&range);
        queue = QUEUE.lock();
    }
    queue.running = false;
    EMPTIED.notify_all();
}

fn unmap(range: &Unowned) {
    for from in (0..range.len).step_by(STEP) {
        let at = std::ptr::with_exposed_provenance_mut(range.at + from);
        // SAFETY: a part of a range that was mapped and that nothing refers to, as the caller of `later`
        // promised. The range can't be mapped anew before this call.
        let _ = unsafe { rustix::mm::munmap(at, STEP.min(range.len - from)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::Shared;

    fn is_mapped(at: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("this is Linux");
        maps.lines().any(|line| line.starts_with(&format!("{at:x}-")))
    }

    #[test]
    fn dropping_a_large_mapping_leaves_the_unmapping_to_another_thread() {
        let held = HOLD.lock();
        let ours = Shared::create("kvferry-test", LATER_MIN).expect("memory");
        let small = Shared::create("kvferry-test", 4096).expect("memory");
        let (at, at_small) = (ours.as_ptr() as usize, small.as_ptr() as usize);
        drop((ours, small));
        assert!(is_mapped(at), "this thread has unmapped it");
        assert!(!is_mapped(at_small), "a small one is unmapped at once");
        drop(held);
        settle();
        assert!(!is_mapped(at));
    }
}
