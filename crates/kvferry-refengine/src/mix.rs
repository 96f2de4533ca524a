//! The arithmetic of the model: everything is a wrapping integer, so that every rank, build and
//! machine computes the same.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const ODD: u64 = 0xd6e8_feb8_6659_fd93;

/// A bijection in which every bit of the input reaches every bit of the output.
pub(crate) const fn scramble(word: u64) -> u64 {
    let word = (word ^ (word >> 32)).wrapping_mul(ODD);
    let word = (word ^ (word >> 32)).wrapping_mul(ODD);
    word ^ (word >> 32)
}

/// Two words as one; a bijection of either while the other stays.
pub(crate) const fn pair(a: u64, b: u64) -> u64 {
    scramble(a.wrapping_mul(GOLDEN) ^ scramble(b.wrapping_add(GOLDEN)))
}

/// One step of a running digest; a bijection of either argument while the other stays.
const fn absorb(state: u64, word: u64) -> u64 {
    let product = (state ^ word).wrapping_mul(ODD);
    product ^ (product >> 29)
}

/// Continues the digest `state` over `bytes`. Bytes of the same length that differ within one word
/// have different digests, always; others but for one chance in 2^64.
pub(crate) fn digest(state: u64, bytes: &[u8]) -> u64 {
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
    // What was absorbed last has not reached the low bits yet.
    absorb(state.rotate_left(32), GOLDEN)
}

/// Fills `out` with what follows from `seed`.
pub(crate) fn fill(seed: u64, out: &mut [u8]) {
    let mut counter = seed;
    for chunk in out.chunks_mut(8) {
        counter = counter.wrapping_add(GOLDEN);
        chunk.copy_from_slice(&scramble(counter).to_le_bytes()[..chunk.len()]);
    }
}

/// What one position adds to the attention of a query: a bijection of `digest`, a different one at
/// every position, so that neither a changed row nor an exchange of two goes unnoticed in a sum.
pub(crate) const fn term(query: u64, digest: u64, position: u64) -> u64 {
    // Odd times odd is odd: the multiplication loses nothing.
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
            let before = digest(1, &bytes);
            for bit in 0..len * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(digest(1, &bytes), before, "bit {bit} of {len} bytes");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn exchanged_rows_do_not_cancel_in_a_sum() {
        let of = |rows: [u64; 3]| {
            rows.iter()
                .enumerate()
                .fold(0u64, |sum, (at, row)| sum.wrapping_add(term(9, *row, at as u64)))
        };
        let sums = [[1, 2, 3], [1, 3, 2], [2, 1, 3], [2, 3, 1], [3, 1, 2], [3, 2, 1]].map(of);
        for (n, a) in sums.iter().enumerate() {
            assert!(!sums[..n].contains(a));
        }
    }

    #[test]
    fn a_fill_depends_on_its_seed_and_goes_on_past_a_word() {
        let (mut a, mut b) = ([0; 20], [0; 20]);
        fill(1, &mut a);
        fill(2, &mut b);
        assert!(a[..8] != b[..8] && a[8..16] != a[..8] && a[16..] != [0; 4]);
    }
}
