//! The locks of writers. A lock is a word that names its owner: a member and its generation.
//!
//! Every moment at which an owner can die leaves the chains whole, so the lock of a dead member is
//! taken over. Beside the lock is the key that its owner changes: the member that takes the lock over publishes it, as
//! the dead one may not have ([`super::changes`]).

use super::Index;
use super::layout::{MemberId, STRIPE_LEN, STRIPES};
use super::member::Member;
use crate::Key;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;
use std::time::{Duration, Instant};

/// Longest wait of a writer for a stripe. An owner holds it for microseconds unless it is stopped or not scheduled.
pub const PATIENCE: Duration = Duration::from_millis(10);
/// The kernel marks a member as dead when one of its threads ends. When it kills a process, the
/// others end within microseconds of that one.
pub(super) const EXIT_GRACE: Duration = Duration::from_millis(2);
const SPINS: usize = 100;

/// The key that the owner changes: two words behind the lock. Zero before the first change.
const CHANGED: [usize; 2] = [8, 16];

/// A stripe that is locked until dropped.
#[derive(Debug)]
pub(super) struct Stripe<'a> {
    owner: &'a AtomicU64,
    changed: [&'a AtomicU64; 2],
}

impl Stripe<'_> {
    /// Has the block of a key published, should this process be killed from now on.
    pub(super) fn note(&self, key: Key) {
        for (word, value) in self.changed.into_iter().zip(key.0) {
            word.store(value, Relaxed);
        }
        // The changes that follow come after it.
        fence(Release);
    }
}

impl Index {
    /// The member that has locked a stripe; 0: none.
    pub(super) fn stripe_owner(&self, stripe: u32) -> u64 {
        self.stripe_words(stripe).0.load(Acquire)
    }

    fn stripe_words(&self, stripe: u32) -> (&AtomicU64, [&AtomicU64; 2]) {
        let at = self.layout.stripes + stripe as usize * STRIPE_LEN;
        (self.shared.word(at), CHANGED.map(|word| self.shared.word(at + word)))
    }
}

impl Member {
    /// The lock of a block, which a process holds that is stopped.
    #[cfg(test)]
    pub(crate) fn hold_stripe<'a>(&'a self, key: &Key) -> impl Drop + use<'a> {
        self.lock(self.bucket_of(key)).expect("free")
    }

    /// Locks the stripe of a bucket. `None`: its owner kept it for too long.
    pub(super) fn lock(&self, bucket: u32) -> Option<Stripe<'_>> {
        let (word, changed) = self.stripe_words(bucket % STRIPES);
        let swap = |from| word.compare_exchange(from, self.id().to_word(), Acquire, Relaxed);
        let Err(mut owner) = swap(0) else { return Some(Stripe { owner: word, changed }) };
        for _ in 0..SPINS {
            std::hint::spin_loop();
            match swap(0) {
                Ok(_) => return Some(Stripe { owner: word, changed }),
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
                Ok(_) => {
                    if from != 0 {
                        self.publish(Key(changed.map(|word| word.load(Relaxed))));
                    }
                    return Some(Stripe { owner: word, changed });
                }
                Err(now) => owner = now,
            }
            std::thread::yield_now();
        }
        None
    }

    /// Takes the locks over that a dead member has left. If this fails, another member was faster.
    pub(super) fn unlock_dead(&self, dead: MemberId) {
        let owner = dead.to_word();
        for stripe in (0..STRIPES).filter(|stripe| self.stripe_owner(*stripe) == owner) {
            drop(self.lock(stripe));
        }
    }
}

impl Drop for Stripe<'_> {
    fn drop(&mut self) {
        self.owner.store(0, Release);
    }
}
