//! What the test binaries share: random numbers, prompts, models, outputs.

use kvferry_refengine::{
    EngineConfig, Finished, GroupCache, GroupSpec, ModelSpec, Output, RequestId,
};
use std::collections::BTreeMap;

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

/// The `n`th prompt. Prompts share no prefix.
pub(crate) fn prompt(n: u64, len: usize) -> Vec<u32> {
    let mut random = Random::new(n + 1);
    (0..len).map(|_| u32::try_from(random.below(50_000)).expect("fits")).collect()
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

/// Without a state, which not every connector supports.
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

/// The tokens of requests, and how they ended.
#[derive(Debug, Default)]
pub(crate) struct Outputs {
    pub(crate) tokens: BTreeMap<RequestId, Vec<u32>>,
    pub(crate) finished: BTreeMap<RequestId, Finished>,
}

impl Outputs {
    pub(crate) fn add(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            let tokens = self.tokens.entry(output.id.clone()).or_default();
            assert!(
                !self.finished.contains_key(&output.id),
                "{} has output after its end",
                output.id
            );
            tokens.extend(output.tokens);
            if let Some(finished) = output.finished {
                self.finished.insert(output.id, finished);
            }
        }
    }

    pub(crate) fn of(&self, id: &str) -> &[u32] {
        &self.tokens[&RequestId::from(id)]
    }
}
