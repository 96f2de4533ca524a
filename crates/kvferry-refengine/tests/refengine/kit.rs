//! What tests share: prompts, models, and running an engine until it has nothing to do.

use kvferry_refengine::teleport::{Faults, LoadMode, Teleport, produce};
use kvferry_refengine::{
    Connector, Engine, EngineConfig, FinishReason, Finished, GroupCache, GroupSpec, ModelSpec,
    Output, Request, RequestId, continuation,
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
    (0..len).map(|_| u32::try_from(dice.roll(50_000)).unwrap()).collect()
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

pub(crate) fn engine(config: EngineConfig) -> Engine {
    Engine::new(config, Connector::None).unwrap()
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

/// Steps until there is nothing to do.
pub(crate) fn run(engine: &mut Engine) -> Said {
    let mut said = Said::default();
    for _ in 0..100_000 {
        if !engine.has_work() {
            return said;
        }
        engine.step().unwrap();
        said.add(engine.take_outputs());
    }
    panic!("{engine:?} goes on for ever");
}

/// Submits the requests, runs them, and asserts that each says what it should, and that nothing
/// is left.
pub(crate) fn assert_right(mut engine: Engine, requests: &[Request]) -> Engine {
    for request in requests {
        engine.submit(request.clone()).unwrap();
    }
    let said = run(&mut engine);
    for request in requests {
        let right = continuation(&engine.config().model, &request.prompt, request.max_tokens);
        assert_eq!(said.of(request.id.as_str()), right, "{}", request.id);
    }
    engine.check_empty().unwrap();
    engine
}

pub(crate) fn requests(count: u64, prompt_len: usize, max_tokens: usize) -> Vec<Request> {
    (0..count)
        .map(|n| Request::new(format!("r{n}"), prompt(n, prompt_len + n as usize), max_tokens))
        .collect()
}

/// A prefill and a decode engine, and what a router does between them.
pub(crate) struct Pair {
    pub(crate) prefill: Engine,
    pub(crate) decode: Engine,
    pub(crate) teleport: Teleport,
    pub(crate) prefilled: Said,
    pub(crate) said: Said,
    /// What is to be asked of the decode engine once the prefill engine has answered.
    wanted: BTreeMap<RequestId, (Vec<u32>, usize)>,
    /// Requests for the decode engine.
    pub(crate) decodes: Vec<Request>,
    /// Whether they are kept instead of submitted.
    pub(crate) hold_decodes: bool,
    pub(crate) prefill_stop: Option<u32>,
    /// Tokens that the decode engine has computed.
    pub(crate) decoded: usize,
}

impl Pair {
    pub(crate) fn new(
        mode: LoadMode,
        faults: Faults,
        prefill: &EngineConfig,
        decode: &EngineConfig,
    ) -> Self {
        Self::of(&Teleport::new(mode, faults), prefill, decode)
    }

    pub(crate) fn of(teleport: &Teleport, prefill: &EngineConfig, decode: &EngineConfig) -> Self {
        let engine = |config: &EngineConfig| {
            Engine::new(config.clone(), Connector::Vllm(teleport.vllm(config))).unwrap()
        };
        Self {
            prefill: engine(prefill),
            decode: engine(decode),
            teleport: teleport.clone(),
            prefilled: Said::default(),
            said: Said::default(),
            wanted: BTreeMap::new(),
            decodes: vec![],
            hold_decodes: false,
            prefill_stop: None,
            decoded: 0,
        }
    }

    pub(crate) fn hand_off(&mut self, id: &str, prompt: Vec<u32>, max_tokens: usize) {
        let there = RequestId::from(format!("{id}-prefill"));
        let mut request = Request::new(there.clone(), prompt.clone(), 1).with_params(produce());
        request.stop_token = self.prefill_stop;
        self.prefill.submit(request).unwrap();
        self.wanted.insert(there, (prompt, max_tokens));
    }

    /// One step of each engine that has something to do; whether there was one.
    pub(crate) fn tick(&mut self) -> bool {
        let mut worked = false;
        if self.prefill.has_work() {
            self.prefill.step().unwrap();
            worked = true;
        }
        for output in self.prefill.take_outputs() {
            let params = output.finished.as_ref().and_then(|finished| finished.params.clone());
            if let (Some(params), Some((prompt, max_tokens))) =
                (params, self.wanted.get(&output.id))
            {
                let id = output.id.as_str().trim_end_matches("-prefill");
                let request = Request::new(id, prompt.clone(), *max_tokens);
                self.decodes.push(request.with_params(params));
            }
            self.prefilled.add(vec![output]);
        }
        if !self.hold_decodes {
            worked |= !self.decodes.is_empty();
            for request in self.decodes.drain(..) {
                self.decode.submit(request).unwrap();
            }
        }
        if self.decode.has_work() {
            self.decoded += self.decode.step().unwrap().tokens;
            worked = true;
        }
        self.said.add(self.decode.take_outputs());
        worked
    }

    pub(crate) fn run(&mut self) {
        for _ in 0..100_000 {
            if !self.tick() {
                return;
            }
        }
        panic!("{:?} and {:?} go on for ever", self.prefill, self.decode);
    }

    pub(crate) fn decoded_of(&self, id: &str) -> Option<FinishReason> {
        self.said.finished.get(&RequestId::from(id)).map(|finished| finished.reason)
    }

    pub(crate) fn assert_right(&self, id: &str) {
        let (prompt, max_tokens) = &self.wanted[&RequestId::from(format!("{id}-prefill"))];
        let right = continuation(&self.decode.config().model, prompt, *max_tokens);
        assert_eq!(self.said.of(id), right, "{id}");
        assert_eq!(self.decoded_of(id), Some(FinishReason::Length), "{id}");
    }

    pub(crate) fn assert_empty(&self) {
        self.prefill.check_empty().unwrap();
        self.decode.check_empty().unwrap();
        assert_eq!(self.teleport.offers(), 0);
    }

    pub(crate) fn into_decode(self) -> Engine {
        self.decode
    }
}
