//! Random numbers, models and settings for all tests.

use kvferry_refengine::{EngineConfig, GroupCache, GroupSpec, ModelSpec};

/// Seeded random choices.
#[derive(Debug)]
pub(crate) struct Random(fastrand::Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0.usize(..end)
    }

    pub(crate) fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    pub(crate) fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

pub(crate) fn dense() -> ModelSpec {
    ModelSpec::new(vec![GroupSpec::full(4, 12)], 3)
}

/// All kinds of groups.
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

/// Full attention and a sliding window.
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
