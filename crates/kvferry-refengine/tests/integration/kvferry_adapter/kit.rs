//! Two engines and a router between them, with what the tests assert of them.

pub(crate) use crate::basics::{Random, config, dense, hybrid, models, windowed};
use kvferry::{Agent, Transports};
use kvferry_refengine::EngineConfig;
use kvferry_refengine::kvferry_adapter::KvferryAdapterConfig;
pub(crate) use kvferry_refengine::pair::{Flow, Node, Pair, prompt, there, transfer};
use kvferry_testkit::{PATIENCE, Watchdog};
use std::time::Duration;

pub(crate) fn bounded() -> Watchdog {
    Watchdog::new(PATIENCE)
}

/// An agent for each rank.
fn agents(config: &EngineConfig, transports: &str, secret: &str) -> Vec<Agent> {
    let transports = Transports::parse(transports).unwrap();
    let agent = || {
        let builder = Agent::builder().transports(transports).io_threads(1);
        let builder = builder.silence(PATIENCE);
        if secret.is_empty() { builder } else { builder.secret(secret.as_bytes()) }.start().unwrap()
    };
    config.ranks().iter().map(|_| agent()).collect()
}

/// Behind vLLM's seam.
pub(crate) fn node(config: &EngineConfig, adapter: &KvferryAdapterConfig) -> Node {
    node_over(config, adapter, "tcp", "")
}

pub(crate) fn node_over(
    config: &EngineConfig,
    adapter: &KvferryAdapterConfig,
    transports: &str,
    secret: &str,
) -> Node {
    Node::vllm(config, adapter, agents(config, transports, secret))
}

/// The timeout is longer than any test runs: a test that ends has waited for none.
pub(crate) fn kvferry_adapter() -> KvferryAdapterConfig {
    KvferryAdapterConfig { timeout: LONG, ..KvferryAdapterConfig::default() }
}

pub(crate) const LONG: Duration = Duration::from_secs(3600);

pub(crate) fn pair(flow: Flow, prefill: &EngineConfig, decode: &EngineConfig) -> Pair {
    let node = |config| node(config, &kvferry_adapter());
    Pair::of(flow, node(prefill), node(decode))
}

/// Two engines of the same settings, both with these connectors.
pub(crate) fn alike(flow: Flow, config: &EngineConfig, adapter: &KvferryAdapterConfig) -> Pair {
    Pair::of(flow, node(config, adapter), node(config, adapter))
}

/// Assertions about a pair.
pub(crate) trait Asserts {
    /// A handoff from beginning to end.
    fn works(&mut self, id: &str, n: u64);
    fn tick_until(&mut self, reached: impl FnMut(&Self) -> bool);
    fn assert_right(&self, id: &str);
    /// Runs to the end, and asserts that nothing is left on either side.
    fn assert_empty(&mut self);
    /// Runs to the end; asserts that these requests produced the right tokens and that nothing is left.
    fn finish(&mut self, ids: &[&str]);
}

impl Asserts for Pair {
    fn works(&mut self, id: &str, n: u64) {
        self.hand_off(id, prompt(n, 40), 6);
        self.finish(&[id]);
    }

    fn tick_until(&mut self, mut reached: impl FnMut(&Self) -> bool) {
        while !reached(self) {
            assert!(self.tick(), "nothing more happens");
        }
    }

    fn assert_right(&self, id: &str) {
        self.check_right(id).unwrap();
    }

    fn assert_empty(&mut self) {
        self.check_empty(PATIENCE / 2).unwrap();
    }

    fn finish(&mut self, ids: &[&str]) {
        self.run();
        for id in ids {
            self.assert_right(id);
        }
        self.assert_empty();
    }
}
