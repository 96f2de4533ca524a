//! Test data: seeded patterns, and a marker byte that no pattern holds.

use std::sync::atomic::{AtomicU64, Ordering};

/// A byte that no [`Pattern`] holds. A test writes it to a source after a call returned, and looks
/// for it at the target, to notice a copier that reads late.
pub const MARKER: u8 = 0xEE;

/// The finaliser of SplitMix64: patterns need any word without those before it, which a generator can't give.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// An endless sequence of bytes below 128, which differs by seed and by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern(u64);

impl Pattern {
    /// The sequence of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A sequence that this process has not used before.
    pub fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let pid = u64::from(std::process::id());
        Self(mix(pid << 32 | NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    fn word(self, index: u64) -> [u8; 8] {
        (mix(self.0 ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15)) & 0x7F7F_7F7F_7F7F_7F7F)
            .to_le_bytes()
    }

    /// Fills `to` with the bytes of the sequence from position `at` on.
    pub fn fill(self, at: u64, to: &mut [u8]) {
        let (mut index, skip) = (at / 8, (at % 8) as usize);
        let head = to.len().min((8 - skip) % 8);
        let (first, rest) = to.split_at_mut(head);
        if head > 0 {
            first.copy_from_slice(&self.word(index)[skip..skip + head]);
            index += 1;
        }
        let mut words = rest.chunks_exact_mut(8);
        for chunk in &mut words {
            chunk.copy_from_slice(&self.word(index));
            index += 1;
        }
        let tail = words.into_remainder();
        let len = tail.len();
        tail.copy_from_slice(&self.word(index)[..len]);
    }

    /// The first `len` bytes of the sequence.
    pub fn bytes(self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(0, &mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_of_a_pattern_equals_that_piece_of_the_whole() {
        let pattern = Pattern::new(7);
        let whole = pattern.bytes(200);
        for at in 0..20 {
            for len in 0..40 {
                let mut piece = vec![0; len];
                pattern.fill(at as u64, &mut piece);
                assert_eq!(piece, whole[at..at + len], "{len} bytes at {at}");
            }
        }
    }

    #[test]
    fn no_pattern_holds_the_marker() {
        assert!(!Pattern::fresh().bytes(100_000).contains(&MARKER));
    }

    #[test]
    fn patterns_differ() {
        assert_ne!(Pattern::fresh().bytes(64), Pattern::fresh().bytes(64));
    }
}
