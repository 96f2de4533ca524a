//! The locks of writers. A lock is a word that names its owner: a member and its generation.
//!
//! Every moment at which an owner can die leaves the chains whole, so the lock of a dead member is
//! taken over.

use super::Index;
use super::member::MemberId;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

/// Locks. A bucket's is its number modulo this.
pub(super) const STRIPES: u32 = 4096;
/// A cache line.
pub(super) const STRIPE_LEN: usize = 64;

/// How long a writer waits for a stripe. An owner holds it for microseconds unless it is stopped or
/// not scheduled.
pub const PATIENCE: Duration = Duration::from_millis(10);
/// The kernel marks a member as dead when one of its threads ends. When it kills a process, the
/// others end within microseconds of that one.
pub(super) const EXIT_GRACE: Duration = Duration::from_millis(2);
const SPINS: usize = 100;

/// A stripe that is locked until dropped.
#[derive(Debug)]
pub(super) struct Stripe<'a>(&'a AtomicU64);

impl Index {
    /// Locks the stripe of a bucket. `None`: its owner kept it for too long.
    pub(super) fn lock(&self, member: MemberId, bucket: u32) -> Option<Stripe<'_>> {
        let at = self.layout.stripes + (bucket % STRIPES) as usize * STRIPE_LEN;
        let word = self.shared.word(at);
        let swap = |from| word.compare_exchange(from, member.to_word(), Acquire, Relaxed);
        let Err(mut owner) = swap(0) else { return Some(Stripe(word)) };
        for _ in 0..SPINS {
            std::hint::spin_loop();
            match swap(0) {
                Ok(_) => return Some(Stripe(word)),
                Err(now) => owner = now,
            }
        }
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let mut from = 0;
            if owner != 0 && !self.is_alive(MemberId::from_word(owner)) {
                std::thread::sleep(EXIT_GRACE);
                from = owner;
            }
            match swap(from) {
                Ok(_) => return Some(Stripe(word)),
                Err(now) => owner = now,
            }
            std::thread::yield_now();
        }
        None
    }
}

impl Drop for Stripe<'_> {
    fn drop(&mut self) {
        self.0.store(0, Release);
    }
}
