//! What a model says, without pages, ranks, chunks or schedulers: what engines are held against.

use crate::mix;
use crate::model::{Attention, ModelSpec};

/// Everything a model keeps of one sequence.
#[derive(Debug)]
struct Dense<'a> {
    model: &'a ModelSpec,
    /// Per layer and KV head: the digest of the rows at each position, or of the state alone.
    digests: Vec<Vec<Vec<u64>>>,
}

/// The `count` tokens that `model` says after `prompt`.
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
    let mut said = vec![];
    for at in 0..count {
        let token = next.expect("a prompt has tokens");
        said.push(token);
        if at + 1 < count {
            next = Some(dense.token(prompt.len() + at, token));
        }
    }
    said
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
                    attended = attended.wrapping_add(mix::term(query, *row, at as u64));
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
                    .fold(key, |state, plane| mix::digest(state, &vec![0; plane.bytes]))
            });
            self.model.state_seed(layer, head, before, hidden)
        } else {
            self.model.row_seed(layer, head, position, hidden)
        };
        let mut digest = key;
        for (n, plane) in spec.planes.iter().enumerate() {
            let mut row = vec![0; plane.bytes];
            ModelSpec::row(seed, n, &mut row);
            digest = mix::digest(digest, &row);
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
        let said = continuation(&model, &[1, 2, 3, 4], 4);
        assert_eq!(said, continuation(&model, &[1, 2, 3, 4], 4));
        for other in [[9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 9], [2, 1, 3, 4]] {
            assert_ne!(said, continuation(&model, &other, 4));
        }
        assert_eq!(said[1..], continuation(&model, &[1, 2, 3, 4, said[0]], 3));
    }

    #[test]
    fn a_window_forgets_and_a_state_does_not() {
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
