//! Times at which an engine computes the layers of a step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry_refengine::Engine;

use crate::machine::shared_clock;

/// Moments of the latest step, in nanoseconds of the shared clock. Written by the engine's thread, read
/// by any.
#[derive(Debug, Default)]
pub struct LayerTimes {
    began: AtomicU64,
    ended: AtomicU64,
}

impl LayerTimes {
    /// Records the steps of an engine behind vLLM's seam.
    pub fn of(engine: &mut Engine) -> Arc<LayerTimes> {
        let times = Arc::<LayerTimes>::default();
        let (noted, last) = (Arc::clone(&times), engine.config().model.layers.len() - 1);
        engine.on_layer(move |layer, is_computed| match (layer, is_computed) {
            (0, false) => note(&noted.began),
            (layer, true) if layer == last => note(&noted.ended),
            _ => {}
        });
        times
    }

    /// Time at which the step's first layer began.
    pub fn began(&self) -> u64 {
        self.began.load(Ordering::Relaxed)
    }

    /// Time at which the step's last layer had been computed, before the worker half learns of it.
    pub fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }
}

fn note(moment: &AtomicU64) {
    let now = u64::try_from(shared_clock().as_nanos()).unwrap_or(u64::MAX);
    moment.store(now, Ordering::Relaxed);
}
