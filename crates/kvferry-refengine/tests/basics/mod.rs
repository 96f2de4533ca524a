//! What both test binaries share: chance, prompts, models, and what requests have said.

use kvferry_refengine::{
    EngineConfig, Finished, GroupCache, GroupSpec, ModelSpec, Output, RequestId,
};
use std::collections::BTreeMap;

/// A generator of numbers that look random: the same for the same seed.
#[derive(Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1)
    }

    /// Less than `sides`.
    pub(crate) fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as usize % sides
    }

    pub(crate) fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.roll(of.len())].clone()
    }

    pub(crate) fn percent(&mut self, percent: usize) -> bool {
        self.roll(100) < percent
    }
}

/// The `n`th of prompts that have nothing in common.
pub(crate) fn prompt(n: u64, len: usize) -> Vec<u32> {
    let mut dice = Dice::new(n + 1);
    (0..len).map(|_| u32::try_from(dice.roll(50_000)).expect("fits")).collect()
}

pub(crate) fn dense() -> ModelSpec {
    ModelSpec::new(vec![GroupSpec::full(4, 12)], 3)
}

/// Every kind of group there is.
pub(crate) fn hybrid() -> ModelSpec {
    let groups = vec![
        GroupSpec::full(4, 8).with_scales(3),
        GroupSpec::window(2, 16, 21),
        GroupSpec::state(4, 9, 40),
        GroupSpec::mla(24),
        GroupSpec::apart(1, 8),
    ];
    ModelSpec::new(groups, 10)
}

/// Without a state, which not every connector takes.
pub(crate) fn windowed() -> ModelSpec {
    ModelSpec::new(vec![GroupSpec::full(2, 8), GroupSpec::window(2, 8, 19)], 4)
}

pub(crate) fn models() -> [ModelSpec; 3] {
    [dense(), windowed(), hybrid()]
}

pub(crate) fn config(model: &ModelSpec, block_tokens: usize, blocks: usize) -> EngineConfig {
    let mut config = EngineConfig::new(model.clone());
    config.groups = vec![GroupCache::new(block_tokens, blocks); model.groups.len()];
    config
}

/// What requests have said, and how they ended.
#[derive(Debug, Default)]
pub(crate) struct Said {
    pub(crate) tokens: BTreeMap<RequestId, Vec<u32>>,
    pub(crate) finished: BTreeMap<RequestId, Finished>,
}

impl Said {
    pub(crate) fn add(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            let said = self.tokens.entry(output.id.clone()).or_default();
            assert!(!self.finished.contains_key(&output.id), "{} goes on after its end", output.id);
            said.extend(output.tokens);
            if let Some(finished) = output.finished {
                self.finished.insert(output.id, finished);
            }
        }
    }

    pub(crate) fn of(&self, id: &str) -> &[u32] {
        &self.tokens[&RequestId::from(id)]
    }
}
