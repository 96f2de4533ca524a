//! Two engines and a router between them.

pub(crate) use crate::basics::{Outputs, Random, config, dense, hybrid, models, prompt, windowed};
use kvferry::{Agent, Transports};
use kvferry_connector::{ConsumerParams, HandoffId, producer_params};
use kvferry_refengine::kvferry_adapter::{KvferryAdapter, KvferryAdapterConfig};
use kvferry_refengine::{
    Connector, Engine, EngineConfig, FinishReason, Params, Request, RequestId, RequestStatus,
    continuation,
};
use kvferry_testkit::{PATIENCE, Watchdog};
use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

pub(crate) fn bounded() -> Watchdog {
    Watchdog::new(PATIENCE)
}

fn agent(transports: &str, secret: &str, silence: Duration) -> Agent {
    let transports = Transports::parse(transports).unwrap();
    let builder = Agent::builder().transports(transports).io_threads(1).silence(silence);
    if secret.is_empty() { builder } else { builder.secret(secret.as_bytes()) }.start().unwrap()
}

/// An engine and its connector.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) kvferry_adapter: KvferryAdapter,
    /// One per rank.
    agents: Vec<Agent>,
    /// Tokens computed so far.
    pub(crate) computed: usize,
}

impl Node {
    pub(crate) fn new(config: &EngineConfig, adapter: &KvferryAdapterConfig) -> Self {
        Self::with(config, adapter, "tcp", "")
    }

    pub(crate) fn with(
        config: &EngineConfig,
        adapter: &KvferryAdapterConfig,
        transports: &str,
        secret: &str,
    ) -> Self {
        let vllm = |adapter: &KvferryAdapter| Connector::Vllm(adapter.vllm());
        let agents = config.ranks().iter().map(|_| agent(transports, secret, PATIENCE)).collect();
        Self::behind(vllm, config, adapter, agents)
    }

    /// A node that soon gives up addresses at which nothing answers.
    pub(crate) fn impatient(config: &EngineConfig, adapter: &KvferryAdapterConfig) -> Self {
        let silence = Duration::from_secs(2);
        let agents = config.ranks().iter().map(|_| agent("tcp", "", silence)).collect();
        Self::behind(|adapter| Connector::Vllm(adapter.vllm()), config, adapter, agents)
    }

    pub(crate) fn trt(config: &EngineConfig, adapter: &KvferryAdapterConfig) -> Self {
        let agents = config.ranks().iter().map(|_| agent("tcp", "", PATIENCE)).collect();
        Self::behind(|adapter| Connector::Trt(adapter.trt()), config, adapter, agents)
    }

    fn behind(
        seam: impl Fn(&KvferryAdapter) -> Connector,
        config: &EngineConfig,
        adapter: &KvferryAdapterConfig,
        agents: Vec<Agent>,
    ) -> Self {
        let kvferry_adapter = KvferryAdapter::new(config, agents.clone(), adapter.clone());
        let engine = Engine::new(config.clone(), seam(&kvferry_adapter)).unwrap();
        Self { engine, kvferry_adapter, agents, computed: 0 }
    }

    /// Bytes that its ranks have read from peers.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.agents.iter().map(|agent| agent.stats().bytes_read).sum()
    }

    /// Steps if there is work. False if there is none.
    pub(crate) fn step(&mut self) -> bool {
        let works = self.engine.has_work();
        if works {
            self.computed += self.engine.step().unwrap().tokens;
        }
        works
    }

    /// A gauge of the scheduler half.
    pub(crate) fn gauge(&self, name: &str) -> usize {
        let name = format!("scheduler: {name}");
        let gauges = self.kvferry_adapter.gauges();
        gauges.into_iter().find(|(is, _)| *is == name).expect("there is such a gauge").1
    }

    /// What is kept beyond tombstones, connected peers and known engines.
    pub(crate) fn left(&self) -> Vec<(String, usize)> {
        let stays =
            |name: &str| ["tombstones", "peers", "engines"].iter().any(|it| name.ends_with(it));
        let gauges = self.kvferry_adapter.gauges().into_iter();
        gauges.filter(|(name, value)| *value > 0 && !stays(name)).collect()
    }
}

/// In which order a router asks the two engines. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// The decode engine gets the parameters of the prefill engine's response.
    Sequential,
    /// Both get the transfer id, the decode engine some steps earlier.
    ConsumerFirst,
    /// Both get the transfer id, the prefill engine some steps earlier.
    ProducerFirst,
}

impl Flow {
    pub(crate) const ALL: [Self; 3] = [Self::Sequential, Self::ConsumerFirst, Self::ProducerFirst];
}

/// By how many steps the first engine is ahead.
const AHEAD: usize = 3;

pub(crate) struct Pair {
    pub(crate) prefill: Node,
    pub(crate) decode: Node,
    pub(crate) flow: Flow,
    pub(crate) prefilled: Outputs,
    pub(crate) outputs: Outputs,
    pub(crate) wanted: BTreeMap<RequestId, (Vec<u32>, usize)>,
    /// Requests for the decode engine once the prefill engine has answered.
    answered: HashSet<RequestId>,
    /// Requests for the prefill and the decode engine, and after how many ticks.
    pub(crate) later: Vec<(usize, bool, Request)>,
    /// Keep decode requests instead of submitting them.
    pub(crate) hold_decodes: bool,
    pub(crate) prefill_stop: Option<u32>,
    pub(crate) prefill_tokens: usize,
}

/// The timeout is longer than any test runs: a test that ends has waited for none.
pub(crate) fn kvferry_adapter() -> KvferryAdapterConfig {
    KvferryAdapterConfig { timeout: Duration::from_secs(3600), ..KvferryAdapterConfig::default() }
}

/// The id of the prefill engine's request.
pub(crate) fn there(id: &str) -> RequestId {
    format!("{id}-prefill").into()
}

pub(crate) fn transfer(id: &str) -> HandoffId {
    HandoffId::new(&format!("xfer-{id}")).unwrap()
}

impl Pair {
    pub(crate) fn new(flow: Flow, prefill: &EngineConfig, decode: &EngineConfig) -> Self {
        let node = |config| Node::new(config, &kvferry_adapter());
        Self::of(flow, node(prefill), node(decode))
    }

    /// Two engines of the same settings, both with these connectors.
    pub(crate) fn alike(flow: Flow, config: &EngineConfig, adapter: &KvferryAdapterConfig) -> Self {
        Self::of(flow, Node::new(config, adapter), Node::new(config, adapter))
    }

    pub(crate) fn of(flow: Flow, prefill: Node, decode: Node) -> Self {
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
    pub(crate) fn offered(&self, id: &str) -> Params {
        let ranks = self.prefill.engine.config().ranks().len();
        let (transfer, any) = (transfer(id), id.len() % ranks);
        let address = self.prefill.kvferry_adapter.address(any).parse().unwrap();
        ConsumerParams { transfer, address, engine: None, tokens: None }.to_params()
    }

    pub(crate) fn hand_off(&mut self, id: &str, prompt: Vec<u32>, max_tokens: usize) {
        let mut first = Request::new(there(id), prompt.clone(), self.prefill_tokens);
        first.stop_token = self.prefill_stop;
        let second = Request::new(id, prompt.clone(), max_tokens);
        self.wanted.insert(id.into(), (prompt, max_tokens));
        if self.flow == Flow::Sequential {
            self.answered.insert(first.id.clone());
            self.prefill.engine.submit(first.with_params(producer_params(None))).unwrap();
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
            let node = if prefill { &mut self.prefill } else { &mut self.decode };
            node.engine.submit(request).unwrap();
        }
        waits
    }

    /// Steps each engine that has work. False if neither has.
    pub(crate) fn tick(&mut self) -> bool {
        let mut worked = self.submit_due() && !self.hold_decodes;
        let before = self.prefill.computed + self.decode.computed;
        worked |= self.prefill.step();
        self.take_prefilled();
        worked |= self.decode.step();
        self.outputs.add(self.decode.engine.take_outputs());
        if worked && self.prefill.computed + self.decode.computed == before {
            // Both wait: for the network or another thread.
            std::thread::sleep(Duration::from_micros(200));
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

    pub(crate) fn run(&mut self) {
        while self.tick() {}
    }

    pub(crate) fn ticks(&mut self, count: usize) {
        for _ in 0..count {
            self.tick();
        }
    }

    /// A handoff from beginning to end.
    pub(crate) fn works(&mut self, id: &str, n: u64) {
        self.hand_off(id, prompt(n, 40), 6);
        self.finish(&[id]);
    }

    pub(crate) fn tick_until(&mut self, mut reached: impl FnMut(&Self) -> bool) {
        while !reached(self) {
            assert!(self.tick(), "nothing more happens");
        }
    }

    pub(crate) fn status(&self, prefill: bool, id: &str) -> Option<RequestStatus> {
        match prefill {
            true => self.prefill.engine.status(&there(id)),
            false => self.decode.engine.status(&id.into()),
        }
    }

    pub(crate) fn ended(&self, id: &str) -> Option<FinishReason> {
        self.outputs.finished.get(&RequestId::from(id)).map(|finished| finished.reason)
    }

    pub(crate) fn assert_right(&self, id: &str) {
        let (prompt, max_tokens) = &self.wanted[&RequestId::from(id)];
        let right = continuation(&self.decode.engine.config().model, prompt, *max_tokens);
        assert_eq!(self.ended(id), Some(FinishReason::Length), "{id}");
        assert_eq!(self.outputs.of(id), right, "{id}");
    }

    /// Runs to the end, and asserts that nothing is left on either side.
    pub(crate) fn assert_empty(&mut self) {
        self.run();
        for node in [&self.prefill, &self.decode] {
            node.engine.check_empty().unwrap();
            assert_eq!(node.engine.violations(), []);
        }
        // The last messages between the two sides take a moment.
        let began = Instant::now();
        loop {
            let left = [self.prefill.left(), self.decode.left()];
            if left.iter().all(Vec::is_empty) {
                return;
            }
            assert!(began.elapsed() < PATIENCE / 2, "{left:?} are left");
            std::thread::sleep(Duration::from_millis(1));
            self.run();
        }
    }

    /// How many requests the decode engine fetched, and how many of the fetches failed on a rank.
    pub(crate) fn fetched(&self) -> (u64, u64) {
        let outcomes = self.decode.kvferry_adapter.outcomes();
        let count = |wanted: bool| {
            let of = outcomes.iter().filter(|(code, _)| code.is_ok() == wanted);
            of.map(|(_, count)| count).sum()
        };
        (count(true), count(false))
    }

    /// Runs to the end; asserts that these requests produced the right tokens and that nothing is left.
    pub(crate) fn finish(&mut self, ids: &[&str]) {
        self.run();
        for id in ids {
            self.assert_right(id);
        }
        self.assert_empty();
    }
}
