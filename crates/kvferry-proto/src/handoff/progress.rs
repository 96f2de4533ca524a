//! How far a request's KV is ready, and what became ready between two points.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The part of a request's KV that is ready: all layers of its first `tokens` tokens, and the first
/// `layer_tokens` tokens of its first `layers` layers.
///
/// Ordered as a prefill computes: chunk by chunk, and within a chunk layer by layer. Layers are
/// numbered as at the producer rank.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Progress {
    /// Tokens of which all layers are ready.
    #[serde(rename = "n")]
    pub tokens: u32,
    /// Tokens up to the end of the current chunk; equal to `tokens` between chunks.
    #[serde(rename = "m", default)]
    pub layer_tokens: u32,
    /// Layers of the current chunk that are ready.
    #[serde(rename = "l", default)]
    pub layers: u32,
}

/// Some tokens of some layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rectangle {
    /// Layers, as numbered at the producer rank.
    pub layers: Range<u32>,
    /// Positions in the request.
    pub tokens: Range<u32>,
}

impl Progress {
    /// Nothing is ready.
    pub const NONE: Self = Self { tokens: 0, layer_tokens: 0, layers: 0 };

    /// Progress with all layers of the first `tokens` tokens.
    pub const fn tokens(tokens: u32) -> Self {
        Self { tokens, layer_tokens: tokens, layers: 0 }
    }

    /// Adds the tokens up to `layer_tokens` of the first `layers` layers.
    #[must_use]
    pub const fn and(self, layers: u32, layer_tokens: u32) -> Self {
        Self { layers, layer_tokens, ..self }
    }

    /// Whether the fields are consistent.
    pub const fn is_sound(&self) -> bool {
        self.layer_tokens >= self.tokens && (self.layers > 0 || self.layer_tokens == self.tokens)
    }

    /// Tokens of which the first layer is ready. They need blocks.
    pub const fn reach(&self) -> u32 {
        self.layer_tokens
    }

    /// Tokens of which the layer with this number is ready.
    fn of_layer(&self, layer: u32) -> u32 {
        if layer < self.layers { self.layer_tokens } else { self.tokens }
    }

    /// Returns the tokens and layers that became ready between this progress and `later`, on a rank
    /// with `layers` layers: at most three rectangles, none of them empty, none overlapping.
    pub fn until(&self, later: &Self, layers: u32) -> impl Iterator<Item = Rectangle> + use<> {
        let (from, to) = (*self, *later);
        let (low, high) =
            (from.layers.min(to.layers).min(layers), from.layers.max(to.layers).min(layers));
        [0..low, low..high, high..layers].into_iter().filter_map(move |layers| {
            let tokens = from.of_layer(layers.start)..to.of_layer(layers.start);
            (!layers.is_empty() && !tokens.is_empty()).then_some(Rectangle { layers, tokens })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LAYERS: u32 = 5;

    fn progress() -> impl Strategy<Value = Progress> {
        (0..6_u32, 0..6_u32, 0..=LAYERS).prop_map(|(tokens, more, layers)| match (more, layers) {
            (0, _) | (_, 0) => Progress::tokens(tokens),
            _ => Progress::tokens(tokens).and(layers, tokens + more),
        })
    }

    fn is_ready(progress: &Progress, layer: u32, token: u32) -> bool {
        token < progress.tokens || (layer < progress.layers && token < progress.layer_tokens)
    }

    proptest! {
        #[test]
        fn what_lies_between_is_what_became_ready_each_element_once(
            from in progress(), to in progress(),
        ) {
            prop_assert!(from.is_sound() && to.is_sound());
            let rectangles: Vec<_> = from.until(&to, LAYERS).collect();
            for layer in 0..LAYERS {
                for token in 0..12 {
                    let times = rectangles
                        .iter()
                        .filter(|r| r.layers.contains(&layer) && r.tokens.contains(&token))
                        .count();
                    let became = is_ready(&to, layer, token) && !is_ready(&from, layer, token);
                    prop_assert_eq!(times, usize::from(became), "{} {}", layer, token);
                }
            }
        }
    }

    #[test]
    fn progress_grows_from_layer_to_layer_and_chunk_to_chunk() {
        let steps = [
            Progress::NONE,
            Progress::NONE.and(1, 8),
            Progress::NONE.and(2, 8),
            Progress::tokens(8),
            Progress::tokens(8).and(1, 12),
            Progress::tokens(12),
        ];
        assert!(steps.is_sorted_by(|a, b| a < b));
        assert!(!Progress { tokens: 3, layer_tokens: 2, layers: 1 }.is_sound());
    }
}
