//! The scheduler half, driven by an engine's calls and plain data.

mod random;
mod rules;

use kvferry_connector::{
    ConnectorMetadata, ConsumerParams, EngineId, FinishReason, Finished, GroupRule, HandoffId,
    Match, Notes, Params, Request, RequestOutcome, Scheduled, Scheduler, SchedulerConfig,
    producer_params,
};
use kvferry_proto::WireCode;
use kvferry_proto::layout::Kind;
use std::time::Duration;

const ENGINE: EngineId = EngineId(0xe);
const PRODUCER: EngineId = EngineId(0xf);
const RANKS: usize = 3;

const FULL: GroupRule = GroupRule { kind: Kind::Full, block_tokens: 4 };
const WINDOW: GroupRule = GroupRule { kind: Kind::Window { tokens: 6 }, block_tokens: 2 };
const CHUNK: GroupRule = GroupRule { kind: Kind::Chunk { tokens: 8 }, block_tokens: 2 };
const STATE: GroupRule = GroupRule { kind: Kind::State, block_tokens: 4 };

fn config(groups: &[GroupRule], eager: bool) -> SchedulerConfig {
    SchedulerConfig {
        groups: groups.to_vec(),
        ranks: RANKS,
        timeout: Duration::from_secs(7),
        eager,
        recomputed_tokens: 0,
        null_block: Some(0),
        idle: None,
    }
}

fn scheduler(groups: &[GroupRule], eager: bool) -> Scheduler {
    Scheduler::new(config(groups, eager), ENGINE)
}

fn transfer(name: &str) -> HandoffId {
    HandoffId::new(name).expect("short")
}

fn offered(name: &str, tokens: Option<u64>) -> ConsumerParams {
    let address = "10.0.0.9:4711".parse().expect("an address");
    ConsumerParams { transfer: transfer(name), address, engine: Some(PRODUCER), tokens }
}

/// Parameters of a consumer of the handoff `name`.
fn consumes(name: &str) -> Params {
    offered(name, None).to_params()
}

/// Parameters of a producer of the handoff `name`.
fn produces(name: &str) -> Params {
    producer_params(Some(&transfer(name)))
}

fn request<'a>(id: &'a str, prompt_tokens: u64, params: &'a Params) -> Request<'a> {
    Request { id, prompt_tokens, max_tokens: 1, params: Some(params), prompt: None }
}

/// Calls for a request that arrives with them, unless it has arrived before.
trait Calls {
    fn match_request(&mut self, request: &Request<'_>, computed: u64) -> Match;

    fn give_blocks(
        &mut self,
        request: &Request<'_>,
        computed: u64,
        external: u64,
        blocks: &[Vec<u32>],
    );

    fn end_request(
        &mut self,
        request: &Request<'_>,
        how: FinishReason,
        blocks: Option<&[Vec<u32>]>,
        side_data: Option<Vec<u8>>,
    ) -> Finished;
}

impl Calls for Scheduler {
    fn match_request(&mut self, request: &Request<'_>, computed: u64) -> Match {
        self.arrived(request);
        self.matched(request.id, computed)
    }

    fn give_blocks(
        &mut self,
        request: &Request<'_>,
        computed: u64,
        external: u64,
        blocks: &[Vec<u32>],
    ) {
        self.match_request(request, computed);
        self.allocated(request.id, external, blocks);
    }

    fn end_request(
        &mut self,
        request: &Request<'_>,
        how: FinishReason,
        blocks: Option<&[Vec<u32>]>,
        side_data: Option<Vec<u8>>,
    ) -> Finished {
        self.arrived(request);
        self.finished(request.id, how, blocks, side_data).unwrap_or_default()
    }
}

/// A request's first step, or its first after it lost its blocks.
fn first<'a>(request: &'a str, tokens: u64, blocks: &[&[u32]]) -> Scheduled<'a> {
    let blocks = blocks.iter().map(|blocks| blocks.to_vec()).collect();
    Scheduled { request, computed: 0, tokens, all: true, blocks }
}

fn next<'a>(request: &'a str, computed: u64, tokens: u64, blocks: &[&[u32]]) -> Scheduled<'a> {
    Scheduled { computed, all: false, ..first(request, tokens, blocks) }
}

/// A step's metadata as the worker halves decode them.
fn step<'a>(
    scheduler: &mut Scheduler,
    scheduled: impl IntoIterator<Item = Scheduled<'a>>,
    preempted: &[&'a str],
) -> ConnectorMetadata {
    let metadata = scheduler.step(scheduled, preempted.iter().copied());
    let arrived = ConnectorMetadata::decode(&metadata.encode()).expect("it was just encoded");
    assert_eq!(arrived, metadata);
    metadata
}

fn fetched(request: &str, code: WireCode) -> Notes {
    Notes { fetched: vec![outcome(request, code)], ..Notes::default() }
}

fn lost(request: &str, code: WireCode) -> Notes {
    Notes { lost: vec![outcome(request, code)], ..Notes::default() }
}

fn outcome(request: &str, code: WireCode) -> RequestOutcome {
    let (request, detail) = (request.to_owned(), format!("because {code}"));
    RequestOutcome { request, code, detail, side_data: vec![] }
}

fn assert_idle(scheduler: &Scheduler) {
    for (name, value) in scheduler.gauges() {
        assert_eq!(value, 0, "{name}");
    }
    assert!(!scheduler.has_pending_work());
}
