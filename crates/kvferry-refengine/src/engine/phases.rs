//! The phases of a step, and the work of each rank in them.

use crate::config::Launch;
use crate::contract::vllm::{ConnectorMeta, WorkerConnector};
use crate::layout::KvCaches;
use crate::quorum::Report;
use crate::request::RequestId;
use crate::worker::{Forward, LayerEvent, Ranks};
use std::sync::Arc;

/// A part of a step. Each ends on all ranks before the next begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    HandlePreemptions,
    Scribble,
    Bind,
    StartLoad,
    WaitForLayer(usize),
    Compute(usize),
    SaveLayer(usize),
    WaitForSave,
    Report,
}

pub(super) fn vllm_phases(
    ranks: &Ranks,
    launch: Launch,
    forward: Option<&Arc<Forward>>,
    has_sync_loads: bool,
) -> Vec<Phase> {
    // As vLLM's second model runner: it zeroes new blocks before the connector learns of the step.
    let mut phases = vec![Phase::Scribble, Phase::HandlePreemptions, Phase::Bind];
    let layers = layer_phases(ranks, launch, forward);
    if has_sync_loads {
        phases.push(Phase::StartLoad);
        phases.extend(layers);
    } else {
        // Loads for later steps begin after the computation was launched.
        phases.extend(layers);
        phases.push(Phase::StartLoad);
    }
    phases.extend([Phase::WaitForSave, Phase::Report]);
    phases
}

/// A layer without a `Compute` phase is computed after all phases, or when a thread waits for it.
fn layer_phases(ranks: &Ranks, launch: Launch, forward: Option<&Arc<Forward>>) -> Vec<Phase> {
    let layers = if forward.is_some() { 0..ranks.model.layers.len() } else { 0..0 };
    let mut phases = vec![];
    for layer in layers {
        phases.push(Phase::WaitForLayer(layer));
        if launch == Launch::Eager {
            phases.push(Phase::Compute(layer));
        }
        phases.push(Phase::SaveLayer(layer));
    }
    phases
}

/// The input of a step's phases.
pub(super) struct Step<'a> {
    pub(super) ranks: &'a Ranks,
    pub(super) forward: Option<&'a Arc<Forward>>,
}

impl Step<'_> {
    /// Whether a rank has the layer.
    fn holds(&self, caches: &KvCaches, layer: usize) -> bool {
        self.ranks.places[layer].0 == caches.layout.rank.pp
    }

    fn forward(&self) -> &Arc<Forward> {
        self.forward.expect("layers are of a forward pass")
    }

    fn event(&self, layer: usize) -> LayerEvent {
        LayerEvent { forward: self.forward().clone(), layer }
    }

    /// Computes a layer, on all ranks at once.
    pub(super) fn compute(&self, layer: usize) {
        self.forward().run_through(layer);
    }
}

pub(super) struct VllmRank<'a> {
    pub(super) caches: &'a KvCaches,
    pub(super) worker: &'a mut dyn WorkerConnector,
    pub(super) report: Report,
}

impl VllmRank<'_> {
    pub(super) fn perform(
        &mut self,
        phase: Phase,
        step: &Step<'_>,
        meta: &ConnectorMeta,
        finished: &[RequestId],
    ) {
        match phase {
            Phase::HandlePreemptions => self.worker.handle_preemptions(meta),
            Phase::Bind => self.worker.bind_connector_metadata(meta),
            Phase::StartLoad => self.worker.start_load_kv(),
            Phase::WaitForLayer(layer) if step.holds(self.caches, layer) => {
                self.worker.wait_for_layer_load(layer);
            }
            Phase::SaveLayer(layer) if step.holds(self.caches, layer) => {
                self.worker.save_kv_layer(layer, &step.event(layer));
            }
            Phase::WaitForSave => self.worker.wait_for_save(),
            Phase::Report => {
                let results = self.worker.get_transfer_results(finished);
                let invalid = self.worker.get_block_ids_with_load_errors();
                let meta = self.worker.build_connector_worker_meta();
                self.report = Report { results, invalid, meta };
                self.worker.clear_connector_metadata();
            }
            _ => {}
        }
    }
}
