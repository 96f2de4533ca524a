//! Runs an engine, or a pair of them, until there is no work.

pub(crate) use crate::basics::{Outputs, Random, config, dense, hybrid, models, prompt, windowed};
use kvferry_refengine::in_process::{Faults, InProcess, LoadMode, produce};
use kvferry_refengine::{
    Connector, Engine, EngineConfig, FinishReason, Request, RequestId, continuation,
};
use std::collections::BTreeMap;

pub(crate) fn engine(config: EngineConfig) -> Engine {
    Engine::new(config, Connector::None).unwrap()
}

/// Steps until there is no work.
pub(crate) fn run(engine: &mut Engine) -> Outputs {
    let mut outputs = Outputs::default();
    for _ in 0..100_000 {
        if !engine.has_work() {
            return outputs;
        }
        engine.step().unwrap();
        outputs.add(engine.take_outputs());
    }
    panic!("{engine:?} goes on for ever");
}

/// Submits the requests and runs them. Asserts that their tokens are right and that nothing is left.
pub(crate) fn assert_right(mut engine: Engine, requests: &[Request]) -> Engine {
    for request in requests {
        engine.submit(request.clone()).unwrap();
    }
    let outputs = run(&mut engine);
    for request in requests {
        let right = continuation(&engine.config().model, &request.prompt, request.max_tokens);
        assert_eq!(outputs.of(request.id.as_str()), right, "{}", request.id);
    }
    engine.check_empty().unwrap();
    engine
}

pub(crate) fn requests(count: u64, prompt_len: usize, max_tokens: usize) -> Vec<Request> {
    (0..count)
        .map(|n| Request::new(format!("r{n}"), prompt(n, prompt_len + n as usize), max_tokens))
        .collect()
}

/// A prefill and a decode engine, and a router between them.
pub(crate) struct Pair {
    pub(crate) prefill: Engine,
    pub(crate) decode: Engine,
    pub(crate) in_process: InProcess,
    pub(crate) prefilled: Outputs,
    pub(crate) outputs: Outputs,
    /// The request for the decode engine once the prefill engine has answered.
    wanted: BTreeMap<RequestId, (Vec<u32>, usize)>,
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
        let in_process = InProcess::new(mode, faults);
        let engine = |config: &EngineConfig| {
            Engine::new(config.clone(), Connector::Vllm(in_process.vllm(config))).unwrap()
        };
        Self {
            prefill: engine(prefill),
            decode: engine(decode),
            in_process,
            prefilled: Outputs::default(),
            outputs: Outputs::default(),
            wanted: BTreeMap::new(),
            decoded: 0,
        }
    }

    pub(crate) fn hand_off(&mut self, id: &str, prompt: Vec<u32>, max_tokens: usize) {
        let there = RequestId::from(format!("{id}-prefill"));
        let request = Request::new(there.clone(), prompt.clone(), 1).with_params(produce());
        self.prefill.submit(request).unwrap();
        self.wanted.insert(there, (prompt, max_tokens));
    }

    /// Steps each engine that has work. False if neither has.
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
                self.decode.submit(request.with_params(params)).unwrap();
                worked = true;
            }
            self.prefilled.add(vec![output]);
        }
        if self.decode.has_work() {
            self.decoded += self.decode.step().unwrap().tokens;
            worked = true;
        }
        self.outputs.add(self.decode.take_outputs());
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
        self.outputs.finished.get(&RequestId::from(id)).map(|finished| finished.reason)
    }

    pub(crate) fn assert_right(&self, id: &str) {
        let (prompt, max_tokens) = &self.wanted[&RequestId::from(format!("{id}-prefill"))];
        let right = continuation(&self.decode.config().model, prompt, *max_tokens);
        assert_eq!(self.outputs.of(id), right, "{id}");
        assert_eq!(self.decoded_of(id), Some(FinishReason::Length), "{id}");
    }

    pub(crate) fn assert_empty(&self) {
        self.prefill.check_empty().unwrap();
        self.decode.check_empty().unwrap();
        assert_eq!(self.in_process.offers(), 0);
    }
}
