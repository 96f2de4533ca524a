//! The helper `idle connector` of `kvferry bench idle`: both halves, with a request that was fetched from another process.

use kvferry_connector::ConnectorMetadata;

use super::exposed::{BLOCK_TOKENS, LAYERS};
use super::rank::{Geometry, failed, fetch_request};
use super::step::with_peer;
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
    let (mut peer, rank, mut scheduler) = with_peer(geometry, "tcp")?;
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
