//! The exposed part of a transfer: how long decode waits after prefill has computed the last layer.
//!
//! The whole transfer is the time of the same handoff when all is ready beforehand, from the fetch to the
//! report. In the same round the same blocks are fetched while they are computed in chunks, which takes
//! twice as long. The exposed time is from the last layer to the report.

use std::time::Duration;

use fastrand::Rng;
use kvferry_connector::Announce;

use crate::blocks::table;
use crate::failure::Failure;
use crate::machine;
use crate::stats::Spread;

use super::producer::{Ask, Prefill, Producer, RankUsage};
use super::rank::{Build, Geometry, Rank, Ready};
use super::{PIECES, Settings};
use crate::report::Row;

pub(super) const TOKENS: u32 = 8192;
pub(super) const CHUNK_TOKENS: u32 = 2048;
pub(super) const LAYERS: u32 = 64;
pub(super) const BLOCK_TOKENS: u32 = 16;
const HEADS: u32 = 8;
/// Bytes per layer, head and token of a rank with 128 KiB per token.
const CONTENT: u32 = 256;
/// A pool has some more blocks than the request, which must stay as they are.
const POOL: u32 = TOKENS / BLOCK_TOKENS * 17 / 16;

const WITH_LAYERS_MAX: f64 = 0.06;
/// More than the last chunk.
const WITHOUT_LAYERS_MORE: f64 = 0.05;
/// Computing takes this many times the transfer.
const COMPUTE: u32 = 2;

pub(super) fn run(settings: &mut Settings) -> Result<Vec<Row>, Failure> {
    let geometry = geometry(settings, 1);
    let mut rows = Vec::new();
    for transport in settings.options.transports.clone() {
        let chunks = TOKENS / CHUNK_TOKENS;
        let without = 1.0 / f64::from(chunks) + WITHOUT_LAYERS_MORE;
        let layers = Ready::Layers { least_bytes: Announce::LEAST_BYTES };
        let with = format!("layer events, up to {PIECES} pieces a chunk, the last halved");
        rows.extend(over(settings, &transport, geometry, layers, &with, WITH_LAYERS_MAX)?);
        let no_layers = format!("no layer events, {chunks} chunks");
        rows.extend(over(settings, &transport, geometry, Ready::Chunks, &no_layers, without)?);
    }
    Ok(rows)
}

/// The shape of a handoff as large as asked for, or as memory allows if `pairs` of producers and
/// consumers are alive at once.
pub(super) fn geometry(settings: &mut Settings, pairs: u64) -> Geometry {
    let of = |content| Geometry {
        layers: LAYERS,
        blocks: POOL,
        block_tokens: BLOCK_TOKENS,
        heads: HEADS,
        content,
    };
    let per_content = u64::from(TOKENS) * u64::from(LAYERS) * u64::from(HEADS);
    let asked = settings
        .options
        .size_bytes
        .map_or(if settings.options.effort.quick { CONTENT / 16 } else { CONTENT }, |size| {
            u32::try_from(size / per_content).unwrap_or(u32::MAX).max(1)
        });
    // Both processes of each pair have it, and need some more.
    let room = machine::available_memory() / 10 * 7 / 2 / pairs;
    let mut content = asked;
    while content > 1 && of(content).bytes() > room {
        content /= 2;
    }
    if content < asked {
        let bytes = crate::units::bytes(per_content * u64::from(content));
        settings
            .remarks
            .push(format!("memory is short: handoffs of {bytes} instead of what was asked for"));
    }
    of(content)
}

/// Bytes of a handoff's blocks.
pub(super) fn handoff_bytes(geometry: &Geometry) -> u64 {
    u64::from(TOKENS) * u64::from(LAYERS * HEADS * geometry.content)
}

/// A producer in a second process, and a consumer in this one.
pub(super) struct Pair {
    producer: Producer,
    consumer: Rank,
    /// Blocks of the request at the producer and at the consumer.
    tables: [Vec<u32>; 2],
    handoffs: u32,
}

/// Times of one round.
struct Times {
    whole: Duration,
    exposed: Duration,
    cpu: Duration,
}

fn over(
    settings: &Settings,
    transport: &str,
    geometry: Geometry,
    ready: Ready,
    how: &str,
    most: f64,
) -> Result<Vec<Row>, Failure> {
    let mut pair = Pair::start(transport, ready, geometry)?;
    // The first of each kind touches pages.
    pair.round()?;
    let mut rounds = Vec::new();
    for _ in 0..settings.rounds {
        settings.bar.set_message(format!("exposed, {transport}: {how}"));
        rounds.push(pair.round()?);
    }
    pair.verify()?;
    let ms = |of: fn(&Times) -> Duration| -> Vec<f64> {
        rounds.iter().map(|times| of(times).as_secs_f64() * 1e3).collect()
    };
    let (whole, exposed) = (ms(|times| times.whole), ms(|times| times.exposed));
    let bytes = handoff_bytes(&geometry);
    let per_gb = rounds.iter().map(|times| times.cpu.as_secs_f64() / (bytes as f64 / 1e9));
    let row = |what: &str, unit, spread| {
        Row::new("exposed", format!("{how}: {what}"), unit, spread).over(transport)
    };
    let of = format!("exposed, of the whole {}", crate::units::bytes(bytes));
    Ok(vec![
        row(&of, "of it", Spread::ratio(&exposed, &whole)).at_most(most),
        row("exposed", "ms", Spread::of(exposed)),
        row("the whole, ready beforehand", "ms", Spread::of(whole)),
        row("processor time, both processes", "s/GB", Spread::of(per_gb.collect())),
    ])
}

impl Pair {
    pub(super) fn start(
        transport: &str,
        ready: Ready,
        geometry: Geometry,
    ) -> Result<Pair, Failure> {
        let build = |engine| Build { engine, transport: transport.to_owned(), ready, geometry };
        let mut rng = Rng::with_seed(super::SEED);
        let tables = [0, 1].map(|_| table(POOL, TOKENS / BLOCK_TOKENS, &mut rng));
        let (producer, consumer) = (Producer::start(&build(1))?, Rank::start(&build(2))?);
        let mut pair = Pair { producer, consumer, tables, handoffs: 0 };
        pair.producer.ask::<()>(&Ask::Fill(super::SEED))?;
        Ok(pair)
    }

    fn round(&mut self) -> Result<Times, Failure> {
        let whole = self.ready_beforehand()?;
        let (exposed, cpu) = self.while_computing(whole * COMPUTE)?;
        Ok(Times { whole, exposed, cpu })
    }

    fn next_name(&mut self) -> String {
        self.handoffs += 1;
        format!("handoff-{}", self.handoffs)
    }

    /// Time of a handoff whose blocks were computed before.
    pub(super) fn ready_beforehand(&mut self) -> Result<Duration, Failure> {
        let name = self.next_name();
        let [there, here] = self.tables.clone();
        self.producer.produce(&name, TOKENS, there)?;
        let began = machine::shared_clock();
        self.consumer.fetch(&name, &self.producer.address, &here, TOKENS)?;
        self.consumer.next_reports()?;
        let took = machine::shared_clock() - began;
        self.producer.ask::<()>(&Ask::Sent(1))?;
        Ok(took)
    }

    /// The exposed time, and processor time of both sides.
    fn while_computing(&mut self, takes: Duration) -> Result<(Duration, Duration), Failure> {
        let request = self.next_name();
        let [there, here] = self.tables.clone();
        let before = self.used()?;
        self.consumer.fetch(&request, &self.producer.address, &here, TOKENS)?;
        let (blocks, chunk_tokens) = (there, CHUNK_TOKENS);
        self.producer.prefill(Prefill { request, tokens: TOKENS, chunk_tokens, blocks, takes })?;
        self.consumer.next_reports()?;
        let received = machine::shared_clock();
        let computed = self.producer.computed()?;
        self.producer.ask::<()>(&Ask::Sent(1))?;
        Ok((received.saturating_sub(computed), self.used()? - before))
    }

    fn used(&mut self) -> Result<Duration, Failure> {
        let there: RankUsage = self.producer.ask(&Ask::Used)?;
        Ok(there.cpu + RankUsage::of(&self.consumer)?.cpu)
    }

    /// One more handoff of each kind, into poisoned memory, of which every byte is compared.
    fn verify(&mut self) -> Result<(), Failure> {
        let [there, here] = &self.tables;
        let pairs = self.consumer.pairs(there, here);
        let poison = self.consumer.poison()?;
        let whole = self.ready_beforehand()?;
        self.consumer.check(super::SEED, poison, &pairs)?;
        let poison = self.consumer.poison()?;
        self.while_computing(whole * COMPUTE)?;
        self.consumer.check(super::SEED, poison, &pairs)
    }
}
