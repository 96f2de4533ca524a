//! The producing process: one rank that offers and computes what its parent asks. Its device is a timer:
//! computing takes time but no processor, as with a GPU.

use std::time::Duration;

use kvferry_connector::{BlockTable, ComputeEvent, ConnectorMetadata};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::child::{Child, answer_parent};
use crate::failure::Failure;
use crate::transfers::usage::Usage;
use crate::{child, helper, machine};

use super::rank::{Build, PATIENCE, Rank, compute, failed, held};

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// The first ask. Answers the address of its agent.
    Start(Build),
    /// Fills the memory with the seed's bytes.
    Fill(u64),
    /// Applies metadata. Blocks that they compute are ready at once.
    Apply(Vec<u8>),
    /// Computes a request by the timer. Answers afterwards: the moment of its last layer, on the shared
    /// clock.
    Prefill(Prefill),
    /// Waits until this many requests have been sent.
    Sent(usize),
    /// Answers [`RankUsage`].
    Used,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Prefill {
    pub(super) request: String,
    pub(super) tokens: u32,
    pub(super) chunk_tokens: u32,
    pub(super) blocks: Vec<u32>,
    /// The time of all chunks together.
    pub(super) takes: Duration,
}

/// Usage since the start.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct RankUsage {
    pub(super) cpu: Duration,
    /// See [`kvferry::Stats`].
    pub(super) control_bytes: u64,
}

impl RankUsage {
    pub(super) fn of(rank: &Rank) -> Result<RankUsage, Failure> {
        let control_bytes = rank.agent.stats().control_bytes_sent;
        Ok(RankUsage { cpu: Usage::here()?.cpu, control_bytes })
    }
}

/// The parent's side of the process.
#[derive(Debug)]
pub(super) struct Producer {
    child: Child,
    pub(super) address: String,
}

impl Producer {
    pub(super) fn start(build: &Build) -> Result<Producer, Failure> {
        let mut child = helper::spawn(&["producer"])?;
        let address = child.ask(&Ask::Start(build.clone()))?;
        Ok(Producer { child, address })
    }

    pub(super) fn ask<A: serde::de::DeserializeOwned>(&mut self, ask: &Ask) -> Result<A, Failure> {
        self.child.ask_within(ask, PATIENCE)
    }

    pub(super) fn apply(&mut self, metadata: &ConnectorMetadata) -> Result<(), Failure> {
        self.ask(&Ask::Apply(metadata.encode()))
    }

    /// Computes a request's tokens at once, and holds them until they are fetched.
    pub(super) fn produce(
        &mut self,
        name: &str,
        tokens: u32,
        blocks: Vec<u32>,
    ) -> Result<(), Failure> {
        let computes = vec![compute(name, 0..tokens, tokens, BlockTable::new(0, blocks))];
        self.apply(&ConnectorMetadata { computes, ..ConnectorMetadata::default() })?;
        let endings = vec![held(name)];
        self.apply(&ConnectorMetadata { endings, ..ConnectorMetadata::default() })
    }

    /// Begins to compute; [`Producer::computed`] returns the moment of the last layer.
    pub(super) fn prefill(&mut self, prefill: Prefill) -> Result<(), Failure> {
        self.child.tell(&Ask::Prefill(prefill))
    }

    pub(super) fn computed(&mut self) -> Result<Duration, Failure> {
        self.child.hear_within(PATIENCE)
    }
}

/// The helper `producer`.
pub(crate) fn run() -> Result<(), Failure> {
    let mut rank = None;
    answer_parent(|ask: Ask| {
        if let Ask::Start(build) = ask {
            let started = Rank::start(&build)?;
            let address = started.agent.advertised().to_owned();
            rank = Some(started);
            return child::value(&address);
        }
        let rank =
            rank.as_mut().ok_or_else(|| Failure::Usage("the rank has not started".into()))?;
        answer(rank, ask)
    })
}

fn answer(rank: &mut Rank, ask: Ask) -> Result<Value, Failure> {
    match ask {
        Ask::Start(_) => Err(Failure::Usage("the rank has started already".into())),
        Ask::Fill(seed) => child::value(&rank.fill(seed)?),
        Ask::Apply(metadata) => {
            rank.worker.apply(&metadata).map_err(failed)?;
            rank.worker.step_computed(None);
            rank.worker.fetch();
            child::value(&())
        }
        Ask::Prefill(prefill) => child::value(&compute_by_timer(rank, &prefill)?),
        Ask::Sent(count) => {
            let mut sent = 0;
            while sent < count {
                sent += rank.next_reports()?.sent.len();
            }
            child::value(&())
        }
        Ask::Used => child::value(&RankUsage::of(rank)?),
    }
}

/// Steps as an engine does: makes a step's calls when it is launched, layer by layer, and schedules the
/// next step when it has been computed.
fn compute_by_timer(rank: &Rank, prefill: &Prefill) -> Result<Duration, Failure> {
    let Prefill { request, tokens, chunk_tokens, blocks, takes } = prefill;
    let per_block = (*tokens as usize / blocks.len()) as u32;
    let chunks = tokens.div_ceil(*chunk_tokens);
    let mut computed = machine::shared_clock();
    for chunk in 0..chunks {
        let part = chunk * chunk_tokens..tokens.min(&((chunk + 1) * chunk_tokens)).to_owned();
        let (first, end) = (part.start / per_block, part.end.div_ceil(per_block));
        let new = BlockTable::new(first, blocks[first as usize..end as usize].to_vec());
        let computes = vec![compute(request, part, *tokens, new)];
        rank.apply(&ConnectorMetadata { computes, ..ConnectorMetadata::default() })?;
        let began = machine::shared_clock();
        let step = Step { began, layers: rank.layers(), takes: *takes / chunks };
        for layer in 0..step.layers {
            rank.worker.layer_computed(layer, Some(Box::new(step.event(layer))));
        }
        let last = step.event(step.layers - 1);
        rank.worker.step_computed(Some(Box::new(last)));
        last.wait(&|| false);
        computed = last.0;
    }
    let endings = vec![held(request)];
    rank.apply(&ConnectorMetadata { endings, ..ConnectorMetadata::default() })?;
    Ok(computed)
}

/// A step on a device that takes the same time for each layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) began: Duration,
    pub(super) layers: usize,
    pub(super) takes: Duration,
}

impl Step {
    pub(super) fn event(&self, layer: usize) -> Timer {
        Timer(self.began + self.takes.mul_f64((layer + 1) as f64 / self.layers as f64))
    }
}

/// An event at a moment of the shared clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timer(pub(super) Duration);

impl ComputeEvent for Timer {
    fn is_ready(&self) -> bool {
        machine::shared_clock() >= self.0
    }

    fn wait(&self, _: &dyn Fn() -> bool) {
        std::thread::sleep(self.0.saturating_sub(machine::shared_clock()));
    }
}
