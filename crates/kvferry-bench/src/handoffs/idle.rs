//! The helper `idle connector` of `kvferry bench idle`: both halves, with a request that was fetched from another process.

use kvferry_connector::{ConnectorMetadata, EngineId, GroupRule, Scheduler, SchedulerConfig};
use kvferry_proto::layout::Kind;

use super::exposed::{BLOCK_TOKENS, LAYERS};
use super::producer::Producer;
use super::rank::{Build, Geometry, PATIENCE, Rank, Ready, failed, fetch_request};
use crate::failure::Failure;

const BLOCKS: u32 = 8;
const REQUEST: &str = "fetched";

/// Fetches a request, then serves the parent.
pub(crate) fn run() -> Result<(), Failure> {
    let geometry = Geometry {
        layers: LAYERS,
        blocks: BLOCKS,
        block_tokens: BLOCK_TOKENS,
        heads: 1,
        content: 64,
    };
    let build = |engine| Build {
        engine,
        transport: "tcp".to_owned(),
        ready: Ready::Layers { least_bytes: 0 },
        geometry,
    };
    let (mut peer, rank) = (Producer::start(&build(1))?, Rank::without_engine(&build(2))?);
    let config = SchedulerConfig {
        groups: vec![GroupRule { kind: Kind::Full, block_tokens: BLOCK_TOKENS }],
        ranks: 1,
        timeout: PATIENCE,
        eager: true,
        recomputed_tokens: 0,
        null_block: None,
        idle: None,
    };
    let mut scheduler = Scheduler::new(config, EngineId(2));
    scheduler.set_ranks(vec![rank.worker.rank_metadata().to_vec()]).map_err(failed)?;
    rank.worker.apply(&scheduler.step([], []).encode()).map_err(failed)?;
    let blocks: Vec<u32> = (0..BLOCKS).collect();
    let tokens = BLOCKS * BLOCK_TOKENS;
    peer.produce(REQUEST, tokens, blocks.clone())?;
    let fetches = vec![fetch_request(REQUEST, &peer.address, &blocks, tokens)];
    rank.apply(&ConnectorMetadata { fetches, ..ConnectorMetadata::default() })?;
    rank.worker.fetch();
    let reports = rank.next_reports()?;
    if let Some(notes) = &reports.notes {
        scheduler.reported(0, notes);
    }
    scheduler.received(reports.received.iter().map(String::as_str));
    crate::idle::serve()
}
