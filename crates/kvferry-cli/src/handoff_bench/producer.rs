//! The producing process: one rank, told what to offer and what to compute. Its device is a timer:
//! computing takes time and no processor, as beside a GPU.

use std::time::Duration;

use kvferry_connector::{BlockTable, Computed, Orders};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bench::usage::Usage;
use crate::child::{Child, answer_parent};
use crate::failure::Failure;
use crate::{child, machine};

use super::rank::{Build, PATIENCE, Rank, compute, failed, held};

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// First. Answers where its agent listens.
    Start(Build),
    /// Has the memory hold bytes that say where they are.
    Fill(u64),
    /// Carries orders out; what they compute has been computed.
    Obey(Vec<u8>),
    /// Has a request computed by the timer. Answers the moment when its last layer was, by the
    /// shared clock, when that is over.
    Prefill(Prefill),
    /// Waits until so many requests have been sent.
    Sent(usize),
    /// Answers [`Used`].
    Used,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Prefill {
    pub(super) request: String,
    pub(super) tokens: u32,
    pub(super) chunk_tokens: u32,
    pub(super) blocks: Vec<u32>,
    /// Of all chunks together.
    pub(super) takes: Duration,
}

/// So far.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Used {
    pub(super) cpu: Duration,
    /// See [`kvferry::Stats`].
    pub(super) control_bytes: u64,
}

impl Used {
    pub(super) fn of(rank: &Rank) -> Result<Used, Failure> {
        let control_bytes = rank.agent.stats().control_bytes_sent;
        Ok(Used { cpu: Usage::here()?.cpu, control_bytes })
    }
}

/// The process, as the one that measures sees it.
#[derive(Debug)]
pub(super) struct Producer {
    child: Child,
    pub(super) address: String,
}

impl Producer {
    pub(super) fn start(build: &Build) -> Result<Producer, Failure> {
        let mut child = Child::spawn(&["bench-handoff-producer"])?;
        let address = child.ask(&Ask::Start(build.clone()))?;
        Ok(Producer { child, address })
    }

    pub(super) fn ask<A: serde::de::DeserializeOwned>(&mut self, ask: &Ask) -> Result<A, Failure> {
        self.child.ask_within(ask, PATIENCE)
    }

    pub(super) fn obey(&mut self, orders: &Orders) -> Result<(), Failure> {
        self.ask(&Ask::Obey(orders.encode()))
    }

    /// Begins to compute; [`Producer::computed`] says when it was.
    pub(super) fn prefill(&mut self, prefill: Prefill) -> Result<(), Failure> {
        self.child.tell(&Ask::Prefill(prefill))
    }

    pub(super) fn computed(&mut self) -> Result<Duration, Failure> {
        self.child.hear_within(PATIENCE)
    }
}

/// `kvferry bench-handoff-producer`.
pub(crate) fn run() -> Result<(), Failure> {
    let mut rank = None;
    answer_parent(|ask: Ask| {
        if let Ask::Start(build) = ask {
            let started = Rank::start(&build)?;
            let address = started.agent.advertised().to_owned();
            rank = Some(started);
            return child::value(&address);
        }
        let rank = rank.as_mut().ok_or_else(|| Failure::Usage("it has not started".into()))?;
        answer(rank, ask)
    })
}

fn answer(rank: &mut Rank, ask: Ask) -> Result<Value, Failure> {
    match ask {
        Ask::Start(_) => Err(Failure::Usage("it has started".into())),
        Ask::Fill(seed) => child::value(&rank.fill(seed)?),
        Ask::Obey(orders) => {
            rank.worker.obey(&orders).map_err(failed)?;
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
        Ask::Used => child::value(&Used::of(rank)?),
    }
}

/// Steps as an engine does: a step's calls are made when it is launched, layer by layer, and the
/// next one is scheduled when it has been computed.
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
        rank.obey(&Orders { computes, ..Orders::default() })?;
        let began = machine::shared_clock();
        let step = Step { began, layers: rank.layers(), takes: *takes / chunks };
        for layer in 0..step.layers {
            rank.worker.layer_computed(layer, Some(Box::new(step.event(layer))));
        }
        let last = step.event(step.layers - 1);
        rank.worker.step_computed(Some(Box::new(last)));
        last.wait();
        computed = last.0;
    }
    rank.obey(&Orders { endings: vec![held(request)], ..Orders::default() })?;
    Ok(computed)
}

/// A step on a device that takes as long for each layer.
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

/// An event that happens at a moment of the shared clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timer(pub(super) Duration);

impl Computed for Timer {
    fn is_ready(&self) -> bool {
        machine::shared_clock() >= self.0
    }

    fn wait(&self) {
        std::thread::sleep(self.0.saturating_sub(machine::shared_clock()));
    }
}
