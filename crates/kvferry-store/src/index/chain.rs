//! Reading the hash chains.

use super::Index;
use super::slot::{Entry, Link, SlotId, State};
use crate::Key;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Acquire;

/// Slots that a reader looks at, over all its beginnings, before it answers "not there". There are
/// about as many buckets as slots, so a chain this long is a damaged one.
pub(super) const MAX_HOPS: usize = 4096;

// How far ahead of the key that is looked up a batch prefetches: its bucket, and then slot after slot of its chain,
// until one has the key. A cache miss takes as long as two or three lookups from the cache.
const BUCKETS_AHEAD: usize = 20;
const SLOTS_AHEAD: [usize; 4] = [16, 12, 8, 4];
const ON_THEIR_WAY: usize = (BUCKETS_AHEAD + 1).next_power_of_two();

impl Index {
    /// The block of `key`, if it is there.
    pub fn find(&self, key: &Key) -> Option<Entry> {
        let bucket = self.bucket_of(key);
        find_from(self, bucket, self.first(bucket), key)
    }

    /// Appends to `out` the blocks of the longest prefix of `keys` that is there. Returns its length.
    pub fn find_prefix(&self, keys: &[Key], out: &mut Vec<Entry>) -> usize {
        let before = out.len();
        let mut ahead = Ahead { index: self, keys, lookups: [Lookup::default(); ON_THEIR_WAY] };
        (0..BUCKETS_AHEAD).for_each(|i| ahead.advance(i));
        for (i, key) in keys.iter().enumerate() {
            ahead.advance(i + BUCKETS_AHEAD);
            let Lookup { bucket, step } = ahead.lookups[i % ON_THEIR_WAY];
            match find_from(self, bucket, step, key) {
                Some(entry) => out.push(entry),
                None => break,
            }
        }
        out.len() - before
    }

    #[inline]
    pub(super) fn bucket_of(&self, key: &Key) -> u32 {
        let [a, b] = key.0;
        let mixed = u128::from(a ^ 0x9e37_79b9_7f4a_7c15) * u128::from(b ^ 0xd1b5_4a32_d192_ed03);
        let hash = (mixed >> 64) as u64 ^ mixed as u64;
        ((u128::from(hash) * u128::from(self.layout.bucket_count)) >> 64) as u32
    }

    #[inline]
    pub(super) fn bucket(&self, bucket: u32) -> &AtomicU32 {
        &self.shared.words32::<1>(self.bucket_offset(bucket))[0]
    }

    pub(super) fn bucket_offset(&self, bucket: u32) -> usize {
        self.layout.buckets + bucket as usize * size_of::<u32>()
    }

    /// Next step of a reader in the chain of `bucket`.
    #[inline]
    pub(super) fn follow(&self, link: Option<Link>, bucket: u32) -> Step {
        match link {
            Some(Link::Slot(slot)) if slot < self.layout.geometry.slots => Step::Slot(slot),
            Some(Link::End(end)) if end == bucket => Step::End,
            _ => Step::OtherChain,
        }
    }

    #[inline]
    pub(super) fn first(&self, bucket: u32) -> Step {
        let raw = self.bucket(bucket).load(Acquire);
        self.follow(Some(Link::from_bucket(raw, bucket)), bucket)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Slot(SlotId),
    /// The whole chain was seen.
    End,
    /// A slot was reused, and the reader came into another chain.
    OtherChain,
}

/// Looks on in a chain. The slots before `step` are other keys'.
#[inline]
fn find_from(index: &Index, bucket: u32, step: Step, key: &Key) -> Option<Entry> {
    let mut step = step;
    for _ in 0..MAX_HOPS {
        step = match step {
            Step::End => return None,
            Step::OtherChain => index.first(bucket),
            Step::Slot(id) => {
                let slot = index.slot(id);
                let version = slot.version();
                if version.state() == State::Live && slot.key() == *key {
                    match slot.read(version) {
                        Some(entry) if entry.key == *key => return Some(entry),
                        _ => index.first(bucket),
                    }
                } else {
                    index.follow(Link::from_next(slot.next()), bucket)
                }
            }
        };
    }
    None
}

/// State of a key's lookup: its bucket, and its position in the chain.
#[derive(Clone, Copy)]
struct Lookup {
    bucket: u32,
    step: Step,
}

impl Default for Lookup {
    fn default() -> Self {
        Self { bucket: 0, step: Step::OtherChain }
    }
}

/// Prefetches for a batch, in stages.
struct Ahead<'a> {
    index: &'a Index,
    keys: &'a [Key],
    /// Lookups in progress, indexed by the key's position modulo [`ON_THEIR_WAY`].
    lookups: [Lookup; ON_THEIR_WAY],
}

impl Ahead<'_> {
    /// Begins with the `i`th key, and goes on with those before it.
    #[inline]
    fn advance(&mut self, i: usize) {
        if let Some(key) = self.keys.get(i) {
            let bucket = self.index.bucket_of(key);
            self.lookups[i % ON_THEIR_WAY] = Lookup { bucket, step: Step::OtherChain };
            self.index.shared.prefetch(self.index.bucket_offset(bucket));
        }
        let [first, others @ ..] = SLOTS_AHEAD;
        if let Some((_, lookup)) = self.behind(i, first) {
            let step = self.index.first(lookup.bucket);
            self.go_on(i, first, step);
        }
        for ahead in others {
            if let Some((key, lookup)) = self.behind(i, ahead)
                && let Step::Slot(slot) = lookup.step
                && let slot = self.index.slot(slot)
                && slot.key() != *key
            {
                let step = self.index.follow(Link::from_next(slot.next()), lookup.bucket);
                self.go_on(i, ahead, step);
            }
        }
    }

    /// The key that is `ahead` of the one looked up, when the `i`th begins.
    #[inline]
    fn behind(&self, i: usize, ahead: usize) -> Option<(&Key, Lookup)> {
        let i = i.checked_sub(BUCKETS_AHEAD - ahead)?;
        Some((self.keys.get(i)?, self.lookups[i % ON_THEIR_WAY]))
    }

    #[inline]
    fn go_on(&mut self, i: usize, ahead: usize, step: Step) {
        self.lookups[(i + ahead - BUCKETS_AHEAD) % ON_THEIR_WAY].step = step;
        if let Step::Slot(slot) = step {
            self.index.prefetch_slot(slot);
        }
    }
}
