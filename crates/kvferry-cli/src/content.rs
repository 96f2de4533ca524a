//! Bytes that say where they belong, so that a wrong one is seen and named.
//!
//! Every page of every request and round has its own content, computed from numbers that both
//! processes know. The process whose memory was written digests what it *holds* and compares with
//! the digest of what the source *should* hold; it does not have to trust the sender for either.

use crate::blocks::mix;

/// The content of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Content {
    start: u64,
}

/// Odd, so that the words of a page repeat only after 2^64 of them.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

impl Content {
    /// The content named by these numbers, in this order.
    pub(crate) fn of(numbers: &[u64]) -> Content {
        Content {
            start: numbers.iter().fold(0, |state, &number| {
                mix(state.rotate_left(17) ^ mix(number.wrapping_add(STEP)))
            }),
        }
    }

    /// Writes the content. One addition per word: filling must not be what a demo waits for.
    pub(crate) fn fill(self, buffer: &mut [u8]) {
        let mut word = self.start;
        let mut words = buffer.chunks_exact_mut(8);
        for bytes in &mut words {
            bytes.copy_from_slice(&(word ^ (word >> 29)).to_le_bytes());
            word = word.wrapping_add(STEP);
        }
        let rest = words.into_remainder();
        rest.copy_from_slice(&(word ^ (word >> 29)).to_le_bytes()[..rest.len()]);
    }

    /// `Err(offset)` of the first byte that is not this content. `scratch` is only there to be reused.
    pub(crate) fn check(self, held: &[u8], scratch: &mut Vec<u8>) -> Result<(), usize> {
        scratch.resize(held.len(), 0);
        self.fill(scratch);
        if blake3::hash(held) == blake3::hash(scratch) {
            return Ok(());
        }
        let differs = held.iter().zip(&*scratch).position(|(held, right)| held != right);
        Err(differs.expect("different digests come from different bytes"))
    }
}

/// A number nobody else knows: what poisons a destination must not be computable by the sender.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the kernel gives eight random bytes without a condition");
    u64::from_ne_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(content: Content, len: usize) -> Vec<u8> {
        let mut buffer = vec![0; len];
        content.fill(&mut buffer);
        buffer
    }

    #[test]
    fn content_depends_on_every_number_and_on_their_order() {
        let page = |numbers: &[u64]| filled(Content::of(numbers), 64);
        assert_eq!(page(&[1, 2, 3]), page(&[1, 2, 3]));
        for other in [[1, 2, 4], [1, 3, 2], [0, 2, 3], [3, 2, 1]] {
            assert_ne!(page(&[1, 2, 3]), page(&other), "{other:?}");
        }
    }

    #[test]
    fn no_word_repeats_within_a_page() {
        let page = filled(Content::of(&[9]), 64 << 10);
        let words: std::collections::HashSet<&[u8]> = page.chunks(8).collect();
        assert_eq!(words.len(), page.len() / 8);
    }

    #[test]
    fn one_wrong_byte_is_found_where_it_is() {
        let (content, mut scratch) = (Content::of(&[1, 2]), Vec::new());
        for len in [1, 7, 8, 4096, 4099] {
            let mut page = filled(content, len);
            assert_eq!(content.check(&page, &mut scratch), Ok(()));
            page[len - 1] ^= 1;
            assert_eq!(content.check(&page, &mut scratch), Err(len - 1));
        }
    }

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random(), random());
    }
}
