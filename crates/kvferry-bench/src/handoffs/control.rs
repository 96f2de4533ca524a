//! Bytes of control messages of a handoff.
//!
//! Numbers of blocks are what is sent, and a large pool has long ones. Its blocks have one byte, because
//! their contents do not matter.

use fastrand::Rng;

use crate::blocks::table;
use crate::failure::Failure;
use crate::stats::Spread;

use super::exposed::{BLOCK_TOKENS, CHUNK_TOKENS, LAYERS, TOKENS};
use super::producer::{Ask, Prefill, Producer, RankUsage};
use super::rank::{Build, Geometry, Rank, Ready};
use super::{PIECES, Settings};
use crate::report::Row;

const KIB_MAX: f64 = 4.0;
/// Blocks of a pool of 64 GiB, if each had 2 MiB.
const POOL: u32 = 32 * 1024;
/// Long enough that every piece is announced by itself.
const TAKES: std::time::Duration = std::time::Duration::from_millis(200);

pub(super) fn run(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for transport in &settings.options.transports {
        settings.bar.set_message(format!("control, {transport}"));
        rows.extend(over(settings, transport)?);
    }
    Ok(rows)
}

fn over(settings: &Settings, transport: &str) -> Result<Vec<Row>, Failure> {
    let geometry =
        Geometry { layers: LAYERS, blocks: POOL, block_tokens: BLOCK_TOKENS, heads: 1, content: 1 };
    let ready = Ready::Layers { least_bytes: 0 };
    let build = |engine| Build { engine, transport: transport.to_owned(), ready, geometry };
    let (mut producer, consumer) = (Producer::start(&build(1))?, Rank::start(&build(2))?);
    let mut rng = Rng::with_seed(super::SEED);
    let mut sent = Vec::new();
    for round in 0..=settings.rounds {
        let [blocks, here] = [0, 1].map(|_| table(POOL, TOKENS / BLOCK_TOKENS, &mut rng));
        // As long as the ids of routers.
        let request = format!("cmpl-{:032x}", rng.u64(..) as u128 * (round as u128 + 1));
        let before = control_bytes(&mut producer, &consumer)?;
        consumer.fetch(&request, &producer.address, &here, TOKENS)?;
        let (tokens, chunk_tokens) = (TOKENS, CHUNK_TOKENS);
        producer.prefill(Prefill { request, tokens, chunk_tokens, blocks, takes: TAKES })?;
        consumer.next_reports()?;
        producer.computed()?;
        producer.ask::<()>(&Ask::Sent(1))?;
        let after = control_bytes(&mut producer, &consumer)?;
        sent.push((after - before) as f64 / 1024.0);
    }
    let first = sent.remove(0);
    let each = Spread::of(sent);
    let engine_handshake = Spread::of(vec![first - each.median]);
    let chunks = TOKENS / CHUNK_TOKENS;
    let what = format!(
        "{TOKENS} tokens, {LAYERS} layers, {chunks} chunks in up to {PIECES} pieces, the last halved"
    );
    Ok(vec![
        Row::new("control", what, "KiB", each).over(transport).at_most(KIB_MAX),
        Row::new("control", "handshakes of agents and engines, once", "KiB", engine_handshake)
            .over(transport),
    ])
}

/// Bytes that both sides have sent so far.
fn control_bytes(producer: &mut Producer, consumer: &Rank) -> Result<u64, Failure> {
    let there: RankUsage = producer.ask(&Ask::Used)?;
    Ok(there.control_bytes + RankUsage::of(consumer)?.control_bytes)
}
