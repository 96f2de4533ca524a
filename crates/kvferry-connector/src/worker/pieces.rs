//! The pieces of layers in which a request's part of a step is announced.
//!
//! When the prompt has been computed, only the piece that was announced last remains to be read. So the
//! last piece of a prompt is halved repeatedly; each other piece is long enough to be worth a message.

use super::types::Announce;
use std::ops::Range;

/// The last piece of a prompt is halved until it is this part of the prompt: one 64th.
const LAST_PART: u64 = 64;

/// Division of a step's layers into pieces. The end of the step ends the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pieces {
    layers: u32,
    /// Pieces of about the same length, 1 to `layers`.
    count: u32,
    /// Number of times that the last of them is halved.
    halvings: u32,
}

impl Pieces {
    /// Divides a step that computes all `layers`, at least 1, of a `chunk` of a prompt of so many `tokens`.
    /// `token_bytes` are those of a token in all layers.
    pub(super) fn new(
        announce: Announce,
        layers: u32,
        token_bytes: u64,
        chunk: &Range<u32>,
        tokens: u32,
    ) -> Self {
        let Announce::Layers { pieces, least_bytes } = announce else {
            return Self { layers, count: 1, halvings: 0 };
        };
        let (size, left) = (u64::from(chunk.end - chunk.start), u64::from(tokens - chunk.end));
        let worth = u32::try_from(size * token_bytes / least_bytes.max(1)).unwrap_or(u32::MAX);
        // Chunks in between are read long before the prompt's end, whole or not.
        let is_between = chunk.start > 0 && left > size;
        let count = if is_between { 1 } else { pieces.min(layers).min(worth).max(1) };
        if left > 0 {
            return Self { layers, count, halvings: 0 };
        }
        let parts = (LAST_PART * size).div_ceil(u64::from(count) * u64::from(tokens));
        let wanted = parts.next_power_of_two().ilog2();
        let halvings = (worth / count).checked_ilog2().unwrap_or(0).min(wanted);
        Self { layers, count, halvings }
    }

    /// Whether a piece ends with one of these layers, given as counts of computed layers: after
    /// `before`, and with `done` at the latest.
    pub(super) fn end_between(self, before: u32, done: u32) -> bool {
        done < self.layers && self.ended(done) > self.ended(before)
    }

    /// The pieces that have ended when the first `done` layers are computed, fewer than all.
    fn ended(self, done: u32) -> u32 {
        let whole = u64::from(done) * u64::from(self.count) / u64::from(self.layers);
        let (last, left) = (self.layers / self.count, self.layers - done);
        whole as u32 + (last / left).checked_ilog2().unwrap_or(0).min(self.halvings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lengths of the pieces, with 1000 bytes a token.
    fn lengths(announce: Announce, layers: u32, chunk: Range<u32>, tokens: u32) -> Vec<u32> {
        let pieces = Pieces::new(announce, layers, 1000, &chunk, tokens);
        let (mut lengths, mut before) = (Vec::new(), 0);
        for done in 1..layers {
            if pieces.end_between(before, done) {
                lengths.push(done - before);
                before = done;
            }
        }
        lengths.push(layers - before);
        lengths
    }

    const fn pieces(pieces: u32) -> Announce {
        Announce::Layers { pieces, least_bytes: 1000 }
    }

    #[test]
    fn the_last_piece_of_a_prompt_is_halved_until_it_is_a_64th_of_the_prompt() {
        assert_eq!(lengths(pieces(2), 64, 3000..4000, 4000), [32, 16, 8, 4, 4]);
        assert_eq!(lengths(pieces(2), 64, 0..4000, 4000), [32, 16, 8, 4, 2, 1, 1]);
        assert_eq!(lengths(pieces(3), 61, 0..4000, 4000), [21, 20, 10, 5, 3, 1, 1]);
        assert_eq!(lengths(pieces(1), 5, 0..4000, 4000), [3, 1, 1]);
        assert_eq!(lengths(pieces(9), 4, 0..4000, 4000), [1, 1, 1, 1]);
        assert_eq!(lengths(pieces(0), 1, 0..4000, 4000), [1]);
        assert_eq!(lengths(pieces(2), 64, 63_000..64_000, 64_000), [32, 32]);
        assert_eq!(lengths(Announce::Chunks, 64, 0..4000, 4000), [64]);
    }

    #[test]
    fn chunks_before_the_last_have_equal_pieces_and_chunks_in_between_are_whole() {
        assert_eq!(lengths(pieces(2), 64, 0..1000, 4000), [32, 32]);
        assert_eq!(lengths(pieces(2), 64, 1000..2000, 4000), [64]);
        assert_eq!(lengths(pieces(2), 64, 2000..3000, 4000), [32, 32]);
    }

    #[test]
    fn no_piece_is_smaller_than_a_message_is_worth() {
        assert_eq!(lengths(pieces(2), 64, 0..8, 8), [32, 16, 8, 8]);
        assert_eq!(lengths(pieces(4), 64, 0..2, 8), [32, 32]);
        assert_eq!(lengths(pieces(4), 64, 0..1, 1), [64]);
    }
}
