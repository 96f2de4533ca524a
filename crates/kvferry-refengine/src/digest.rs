//! The arithmetic of the model, on wrapping integers: every rank, build and machine computes the same.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const ODD: u64 = 0xd6e8_feb8_6659_fd93;

/// A bijection in which every bit of the input affects every bit of the output.
pub(crate) const fn scramble(word: u64) -> u64 {
    let word = (word ^ (word >> 32)).wrapping_mul(ODD);
    let word = (word ^ (word >> 32)).wrapping_mul(ODD);
    word ^ (word >> 32)
}

/// Combines two words; a bijection of each while the other is fixed.
pub(crate) const fn pair(a: u64, b: u64) -> u64 {
    scramble(a.wrapping_mul(GOLDEN) ^ scramble(b.wrapping_add(GOLDEN)))
}

/// A step of a running digest; a bijection of each argument while the other is fixed.
const fn absorb(state: u64, word: u64) -> u64 {
    let product = (state ^ word).wrapping_mul(ODD);
    product ^ (product >> 29)
}

/// Continues the digest `state` over `bytes`. Inputs of one length that differ within one word always
/// have different digests; others with a probability of 1 - 2^-64.
pub(crate) fn extend(state: u64, bytes: &[u8]) -> u64 {
    let (words, tail) = bytes.as_chunks::<8>();
    let mut state = state;
    for word in words {
        state = absorb(state, u64::from_le_bytes(*word));
    }
    if !tail.is_empty() {
        let mut word = [0; 8];
        word[..tail.len()].copy_from_slice(tail);
        state = absorb(state, u64::from_le_bytes(word));
    }
    // The last word has not affected the low bits yet.
    absorb(state.rotate_left(32), GOLDEN)
}

/// Fills `out` with pseudo-random bytes.
pub(crate) fn fill(seed: u64, out: &mut [u8]) {
    let mut counter = seed;
    for chunk in out.chunks_mut(8) {
        counter = counter.wrapping_add(GOLDEN);
        chunk.copy_from_slice(&scramble(counter).to_le_bytes()[..chunk.len()]);
    }
}

/// Contribution of one position to the attention of a query. A bijection of `digest` that differs at every position: a
/// changed row changes the sum, and so do two exchanged rows.
pub(crate) const fn term(query: u64, digest: u64, position: u64) -> u64 {
    // The factor is odd, so the multiplication is a bijection.
    let product = (digest ^ query).wrapping_mul(GOLDEN.wrapping_mul(2 * position + 1));
    product ^ (product >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_changes_a_digest() {
        for len in [1, 7, 8, 9, 31, 64] {
            let mut bytes = vec![0; len];
            fill(7, &mut bytes);
            let before = extend(1, &bytes);
            for bit in 0..len * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(extend(1, &bytes), before, "bit {bit} of {len} bytes");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn a_fill_depends_on_its_seed_and_differs_from_word_to_word() {
        let (mut a, mut b) = ([0; 20], [0; 20]);
        fill(1, &mut a);
        fill(2, &mut b);
        assert!(a[..8] != b[..8] && a[8..16] != a[..8] && a[16..] != [0; 4]);
    }
}
