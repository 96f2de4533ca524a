//! A prefill and a decode engine of one process, and the router between them.
//!
//! [`Pair::hand_off`] begins a request, [`Pair::tick`] steps both engines and carries responses from one to the other.
//! The caller provides the engines: a [`Node`] is one with kvferry's connector. [`invented`] adds a client that makes
//! up the parameters of its requests.

pub mod invented;

use crate::config::EngineConfig;
use crate::engine::{Connector, Engine};
use crate::kvferry_adapter::{KvferryAdapter, KvferryAdapterConfig};
use crate::oracle::continuation;
use crate::request::{FinishReason, Finished, Output, Params, Request, RequestId, RequestStatus};
use kvferry::Agent;
use kvferry_connector::{ConsumerParams, HandoffId, producer_params};
use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

/// Steps by which the first engine is ahead in a concurrent flow.
const AHEAD: usize = 3;
/// Pause after a tick in which both engines waited: for the network or another thread.
const PAUSE: Duration = Duration::from_micros(200);

/// An engine and its connector.
#[derive(Debug)]
pub struct Node {
    /// The engine.
    pub engine: Engine,
    /// Its connector.
    pub kvferry_adapter: KvferryAdapter,
    /// One per rank.
    agents: Vec<Agent>,
    /// Tokens computed so far.
    pub computed: usize,
}

impl Node {
    /// An engine with the connector behind vLLM's seam. Each rank has its agent.
    ///
    /// # Panics
    /// If the configuration is invalid, or there are not as many agents as ranks.
    pub fn vllm(config: &EngineConfig, adapter: &KvferryAdapterConfig, agents: Vec<Agent>) -> Self {
        let kvferry_adapter = KvferryAdapter::new(config, agents.clone(), adapter.clone());
        let engine = Engine::new(config.clone(), Connector::Vllm(kvferry_adapter.vllm()));
        let engine = engine.expect("the caller's configuration is valid");
        Self { engine, kvferry_adapter, agents, computed: 0 }
    }

    /// Bytes that the ranks have read from peers.
    pub fn bytes_read(&self) -> u64 {
        self.agents.iter().map(|agent| agent.stats().bytes_read).sum()
    }

    /// Steps if there is work. False if there is none.
    ///
    /// # Panics
    /// If the connector breaks the contract or fails.
    pub fn step(&mut self) -> bool {
        let works = self.engine.has_work();
        if works {
            self.computed += self.engine.step().expect("the connector keeps the contract").tokens;
        }
        works
    }

    /// A gauge of the scheduler half.
    ///
    /// # Panics
    /// If there is no such gauge.
    pub fn gauge(&self, name: &str) -> usize {
        let name = format!("scheduler: {name}");
        let gauges = self.kvferry_adapter.gauges();
        gauges.into_iter().find(|(is, _)| *is == name).expect("there is such a gauge").1
    }

    /// Gauges of what is kept beyond tombstones, connected peers and known engines.
    fn left(&self) -> Vec<(String, usize)> {
        let stays =
            |name: &str| ["tombstones", "peers", "engines"].iter().any(|it| name.ends_with(it));
        let gauges = self.kvferry_adapter.gauges().into_iter();
        gauges.filter(|(name, value)| *value > 0 && !stays(name)).collect()
    }
}

/// Order in which the router asks the two engines. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// The decode engine gets the parameters of the prefill engine's response.
    Sequential,
    /// Both get the transfer id, the decode engine some steps earlier.
    ConsumerFirst,
    /// Both get the transfer id, the prefill engine some steps earlier.
    ProducerFirst,
}

impl Flow {
    /// All orders.
    pub const ALL: [Self; 3] = [Self::Sequential, Self::ConsumerFirst, Self::ProducerFirst];
}

/// The tokens of requests, and how they ended.
#[derive(Debug, Default)]
pub struct Outputs {
    /// Tokens, by request.
    pub tokens: BTreeMap<RequestId, Vec<u32>>,
    /// Ends, by request.
    pub finished: BTreeMap<RequestId, Finished>,
}

impl Outputs {
    /// Adds the outputs of a step.
    ///
    /// # Panics
    /// If a request has output after its end.
    pub fn add(&mut self, outputs: Vec<Output>) {
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

    /// The tokens of a request.
    ///
    /// # Panics
    /// If the request has no output.
    pub fn of(&self, id: &str) -> &[u32] {
        &self.tokens[&RequestId::from(id)]
    }
}

/// Two engines and the router.
#[derive(Debug)]
pub struct Pair {
    /// The prefill engine.
    pub prefill: Node,
    /// The decode engine.
    pub decode: Node,
    /// Order of the requests of [`Pair::hand_off`].
    pub flow: Flow,
    /// Outputs of the prefill engine.
    pub prefilled: Outputs,
    /// Outputs of the decode engine.
    pub outputs: Outputs,
    /// Prompts and numbers of tokens of the requests of [`Pair::hand_off`].
    pub wanted: BTreeMap<RequestId, (Vec<u32>, usize)>,
    /// Requests for the decode engine once the prefill engine has answered.
    answered: HashSet<RequestId>,
    /// Requests that are submitted after so many ticks, and whether each is for the prefill engine.
    pub later: Vec<(usize, bool, Request)>,
    /// True if decode requests are kept instead of submitted.
    pub hold_decodes: bool,
    /// Stop token of prefill requests.
    pub prefill_stop: Option<u32>,
    /// Tokens that a prefill request generates.
    pub prefill_tokens: usize,
}

/// The `n`th prompt. Prompts share no prefix.
pub fn prompt(n: u64, len: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(n + 1);
    (0..len).map(|_| u32::try_from(random.usize(..50_000)).expect("fits")).collect()
}

/// The id of the prefill engine's request.
pub fn there(id: &str) -> RequestId {
    format!("{id}-prefill").into()
}

/// The transfer id of a request.
///
/// # Panics
/// If `id` is too long.
pub fn transfer(id: &str) -> HandoffId {
    HandoffId::new(&format!("xfer-{id}")).expect("a short id")
}

impl Pair {
    /// Two engines that have no requests.
    pub fn of(flow: Flow, prefill: Node, decode: Node) -> Self {
        Self {
            prefill,
            decode,
            flow,
            prefilled: Outputs::default(),
            outputs: Outputs::default(),
            wanted: BTreeMap::new(),
            answered: HashSet::new(),
            later: vec![],
            hold_decodes: false,
            prefill_stop: None,
            prefill_tokens: 1,
        }
    }

    /// Parameters of the decode engine's request in a concurrent flow.
    ///
    /// # Panics
    /// If `id` is too long.
    pub fn offered(&self, id: &str) -> Params {
        let ranks = self.prefill.engine.config().ranks().len();
        let (transfer, any) = (transfer(id), id.len() % ranks);
        let address = self.prefill.kvferry_adapter.address(any).parse();
        let address = address.expect("the address of an agent");
        ConsumerParams { transfer, address, engine: None, tokens: None }.to_params()
    }

    /// Begins a handoff.
    ///
    /// # Panics
    /// If an engine refuses the request.
    pub fn hand_off(&mut self, id: &str, prompt: Vec<u32>, max_tokens: usize) {
        let mut first = Request::new(there(id), prompt.clone(), self.prefill_tokens);
        first.stop_token = self.prefill_stop;
        let second = Request::new(id, prompt.clone(), max_tokens);
        self.wanted.insert(id.into(), (prompt, max_tokens));
        if self.flow == Flow::Sequential {
            self.answered.insert(first.id.clone());
            submit(&mut self.prefill, first.with_params(producer_params(None)));
            return;
        }
        let first = first.with_params(producer_params(Some(&transfer(id))));
        let second = second.with_params(self.offered(id));
        let (a, b) = if self.flow == Flow::ProducerFirst { (0, AHEAD) } else { (AHEAD, 0) };
        self.later.extend([(a, true, first), (b, false, second)]);
        self.submit_due();
    }

    fn submit_due(&mut self) -> bool {
        let waits = !self.later.is_empty();
        let later = std::mem::take(&mut self.later);
        for (ticks, prefill, request) in later {
            if ticks > 0 || (!prefill && self.hold_decodes) {
                self.later.push((ticks.saturating_sub(1), prefill, request));
                continue;
            }
            submit(if prefill { &mut self.prefill } else { &mut self.decode }, request);
        }
        waits
    }

    /// Steps each engine that has work. False if neither has.
    ///
    /// # Panics
    /// If a connector breaks the contract or fails, or an engine refuses a request.
    pub fn tick(&mut self) -> bool {
        let mut worked = self.submit_due() && !self.hold_decodes;
        let before = self.prefill.computed + self.decode.computed;
        worked |= self.prefill.step();
        self.take_prefilled();
        worked |= self.decode.step();
        self.outputs.add(self.decode.engine.take_outputs());
        if worked && self.prefill.computed + self.decode.computed == before {
            std::thread::sleep(PAUSE);
        }
        worked
    }

    fn take_prefilled(&mut self) {
        for output in self.prefill.engine.take_outputs() {
            let params = output.finished.as_ref().and_then(|finished| finished.params.clone());
            let is_awaited = output.finished.is_some() && self.answered.remove(&output.id);
            if let (Some(params), true) = (params, is_awaited) {
                let id = output.id.as_str().trim_end_matches("-prefill");
                let (prompt, max_tokens) = self.wanted[&RequestId::from(id)].clone();
                let request = Request::new(id, prompt, max_tokens).with_params(params);
                self.later.push((0, false, request));
            }
            self.prefilled.add(vec![output]);
        }
    }

    /// Steps until no engine has work.
    ///
    /// # Panics
    /// The cases of [`Pair::tick`].
    pub fn run(&mut self) {
        while self.tick() {}
    }

    /// Steps so many times.
    ///
    /// # Panics
    /// The cases of [`Pair::tick`].
    pub fn ticks(&mut self, count: usize) {
        for _ in 0..count {
            self.tick();
        }
    }

    /// The status of a live request in the prefill engine, or in the decode engine.
    pub fn status(&self, prefill: bool, id: &str) -> Option<RequestStatus> {
        match prefill {
            true => self.prefill.engine.status(&there(id)),
            false => self.decode.engine.status(&id.into()),
        }
    }

    /// The reason for which a request has ended in the decode engine.
    pub fn ended(&self, id: &str) -> Option<FinishReason> {
        self.outputs.finished.get(&RequestId::from(id)).map(|finished| finished.reason)
    }

    /// Checks that a request has ended with the model's own tokens.
    ///
    /// # Errors
    /// The difference, in words.
    ///
    /// # Panics
    /// If the request was not begun by [`Pair::hand_off`].
    pub fn check_right(&self, id: &str) -> Result<(), String> {
        let (prompt, max_tokens) = &self.wanted[&RequestId::from(id)];
        match self.ended(id) {
            Some(FinishReason::Length) => {}
            other => return Err(format!("{id}: it ended with {other:?}")),
        }
        let right = continuation(&self.decode.engine.config().model, prompt, *max_tokens);
        match self.outputs.of(id) {
            tokens if tokens == right => Ok(()),
            tokens => Err(format!("{id}: its tokens are {tokens:?}, not {right:?}")),
        }
    }

    /// Runs to the end, and checks that nothing is left on either side. The last messages between the two sides may
    /// take `patience`.
    ///
    /// # Errors
    /// The names and counts of what is left.
    ///
    /// # Panics
    /// The cases of [`Pair::tick`].
    pub fn check_empty(&mut self, patience: Duration) -> Result<(), String> {
        self.run();
        for node in [&self.prefill, &self.decode] {
            node.engine.check_empty().map_err(|leak| leak.to_string())?;
            if !node.engine.violations().is_empty() {
                return Err(format!("{:?}", node.engine.violations()));
            }
        }
        let began = Instant::now();
        loop {
            let left = [self.prefill.left(), self.decode.left()];
            if left.iter().all(Vec::is_empty) {
                return Ok(());
            }
            if began.elapsed() >= patience {
                return Err(format!("{left:?} are left"));
            }
            std::thread::sleep(Duration::from_millis(1));
            self.run();
        }
    }

    /// How many requests the decode engine fetched, and how many of the fetches failed on a rank.
    pub fn fetched(&self) -> (u64, u64) {
        let outcomes = self.decode.kvferry_adapter.outcomes();
        let count = |wanted: bool| {
            let of = outcomes.iter().filter(|(code, _)| code.is_ok() == wanted);
            of.map(|(_, count)| count).sum()
        };
        (count(true), count(false))
    }
}

fn submit(node: &mut Node, request: Request) {
    node.engine.submit(request).expect("the engine takes the request");
}
