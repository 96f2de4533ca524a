//! The output of a model, computed without pages, ranks, chunks or a scheduler: the reference for engines.

use crate::digest;
use crate::model::{Attention, ModelSpec};

/// Cache of one sequence, without pages.
#[derive(Debug)]
struct Dense<'a> {
    model: &'a ModelSpec,
    /// Digests of the rows at each position, or the digest of the state, per layer and KV head.
    digests: Vec<Vec<Vec<u64>>>,
}

/// The `count` tokens that `model` generates after `prompt`.
///
/// # Panics
/// If the prompt is empty.
pub fn continuation(model: &ModelSpec, prompt: &[u32], count: usize) -> Vec<u32> {
    let digests = model.layers.iter().map(|group| vec![vec![]; model.groups[*group].heads]);
    let mut dense = Dense { model, digests: digests.collect() };
    let mut next = None;
    for (position, token) in prompt.iter().enumerate() {
        next = Some(dense.token(position, *token));
    }
    let mut output = vec![];
    for at in 0..count {
        let token = next.expect("a prompt has tokens");
        output.push(token);
        if at + 1 < count {
            next = Some(dense.token(prompt.len() + at, token));
        }
    }
    output
}

impl Dense<'_> {
    fn token(&mut self, position: usize, token: u32) -> u32 {
        let model = self.model;
        let mut hidden = model.embed(token);
        for (layer, group) in model.layers.iter().enumerate() {
            let spec = &model.groups[*group];
            for head in 0..spec.heads {
                self.keep(layer, head, position, hidden);
            }
            let mut sum = 0u64;
            for query_head in 0..model.query_heads {
                let query = model.query(layer, query_head, hidden);
                let rows = &self.digests[layer][model.kv_head(*group, query_head)];
                let seen = match spec.attention {
                    Attention::Full | Attention::State => 0,
                    Attention::Window { tokens } => (position + 1).saturating_sub(tokens),
                };
                let mut attended = 0u64;
                for (at, row) in rows.iter().enumerate().skip(seen) {
                    attended = attended.wrapping_add(digest::term(query, *row, at as u64));
                }
                sum = sum.wrapping_add(model.output(layer, query_head, attended));
            }
            hidden = model.next_hidden(layer, hidden, sum);
        }
        model.sample(hidden)
    }

    fn keep(&mut self, layer: usize, head: usize, position: usize, hidden: u64) {
        let spec = &self.model.groups[self.model.layers[layer]];
        let kept = &mut self.digests[layer][head];
        let key = self.model.row_key(layer, head);
        let seed = if spec.attention == Attention::State {
            let before = kept.pop().unwrap_or_else(|| {
                spec.planes
                    .iter()
                    .fold(key, |state, plane| digest::extend(state, &vec![0; plane.bytes]))
            });
            self.model.state_seed(layer, head, before, hidden)
        } else {
            self.model.row_seed(layer, head, position, hidden)
        };
        let mut digest = key;
        for (n, plane) in spec.planes.iter().enumerate() {
            let mut row = vec![0; plane.bytes];
            ModelSpec::row(seed, n, &mut row);
            digest = digest::extend(digest, &row);
        }
        kept.push(digest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::GroupSpec;

    #[test]
    fn a_token_depends_on_every_token_before_it_and_on_their_order() {
        let model = ModelSpec::new(vec![GroupSpec::full(2, 8)], 2);
        let output = continuation(&model, &[1, 2, 3, 4], 4);
        assert_eq!(output, continuation(&model, &[1, 2, 3, 4], 4));
        for other in [[9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 9], [2, 1, 3, 4]] {
            assert_ne!(output, continuation(&model, &other, 4));
        }
        assert_eq!(output[1..], continuation(&model, &[1, 2, 3, 4, output[0]], 3));
    }

    #[test]
    fn a_token_beyond_a_window_has_no_effect_and_every_token_of_a_state_has() {
        let window = ModelSpec::new(vec![GroupSpec::window(1, 8, 3)], 1);
        assert_eq!(
            continuation(&window, &[1, 5, 6, 7], 1),
            continuation(&window, &[2, 5, 6, 7], 1)
        );
        assert_ne!(
            continuation(&window, &[5, 1, 6, 7], 1),
            continuation(&window, &[5, 2, 6, 7], 1)
        );
        let state = ModelSpec::new(vec![GroupSpec::state(2, 8, 16)], 1);
        assert_ne!(continuation(&state, &[1, 5, 6, 7], 1), continuation(&state, &[2, 5, 6, 7], 1));
    }
}
