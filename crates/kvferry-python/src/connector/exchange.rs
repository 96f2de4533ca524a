//! Prompts that `kvferry.trtllm` hands over, found by their content.

use super::refused;
use super::worker::producers_of;
use crate::agent::Agent;
use crate::blocking::{self, Stop, seconds};
use crate::error::Failure;
use crate::memory::Region;
use kvferry_connector::{
    ContentKey, ExchangeConfig, Layout, Missed, Model, Prompt, PromptId, StagedRank,
};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A prompt as Python gives it: key, identity, blocks.
type GivenPrompt = ([u8; 32], [u8; 16], u32);

/// Why a prompt was not fetched: what happened, in one word; the reason, or the publisher; seconds for which that one is
/// not asked.
type Reason = (&'static str, String, f64);

/// The slots of a prompt, and why others have not handed it over.
type Fetched = (Option<(u32, u32)>, Vec<Reason>);

/// Hands prompts over, in both directions, through slots of staging memory. Its calls wait for locks that threads hold
/// for a step of the rendezvous, so none keeps the interpreter's lock.
#[pyclass(frozen, module = "kvferry.connector")]
pub(crate) struct Exchange(Arc<Half>);

struct Half(kvferry_connector::Exchange);

impl Stop for Half {
    fn stop(&self) {
        self.0.close();
    }
}

fn prompt((key, identity, blocks): GivenPrompt) -> Prompt {
    Prompt { key: ContentKey(key), identity: PromptId::from_bytes(identity), blocks }
}

#[pymethods]
impl Exchange {
    #[new]
    #[pyo3(signature = (agent, ranks, groups, *, block_tokens, slots, timeout, model = BTreeMap::new(), producers = None, publishes = false, follows = Vec::new()))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python call")]
    fn new(
        py: Python<'_>,
        agent: &Bound<'_, Agent>,
        ranks: Vec<(Bound<'_, Agent>, String, Bound<'_, Region>)>,
        groups: usize,
        block_tokens: u32,
        slots: u32,
        timeout: f64,
        model: BTreeMap<String, String>,
        producers: Option<Vec<String>>,
        publishes: bool,
        follows: Vec<String>,
    ) -> PyResult<Self> {
        let staged = ranks.iter().map(|(agent, layout, region)| {
            let agent = agent.get().core(py)?.clone();
            let layout: Layout = serde_json::from_str(layout).map_err(refused)?;
            Ok(StagedRank { agent, layout, region: region.get().region.clone() })
        });
        let staged = staged.collect::<PyResult<Vec<_>>>()?;
        let config = ExchangeConfig {
            groups,
            block_tokens,
            slots,
            timeout: seconds(py, timeout)?,
            model: Model(model),
            producers: producers_of(producers)?,
            publishes,
            follows,
        };
        let control = agent.get().core(py)?;
        let started = py.detach(|| {
            kvferry_connector::Exchange::start(control, staged, config).map_err(|e| e.to_string())
        });
        let half = Arc::new(Half(started.map_err(refused)?));
        blocking::stop_at_exit(py, &half);
        Ok(Self(half))
    }

    fn offer(&self, py: Python<'_>, given: GivenPrompt) -> PyResult<Option<(u64, u32)>> {
        let offered = py.detach(|| self.0.0.offer(&prompt(given)));
        offered.map_err(|missed| PyMemoryError::new_err(missed.to_string()))
    }

    fn copies(&self, py: Python<'_>, offer: u64, begin: u32, end: u32, copy: u64) {
        py.detach(|| self.0.0.copies(offer, begin..end, copy));
    }

    fn ended(&self, py: Python<'_>, offer: u64, copy: u64) {
        py.detach(|| self.0.0.ended(offer, copy));
    }

    fn made(&self, py: Python<'_>, copied: u64, lost: u64) {
        py.detach(|| self.0.0.made(copied, lost));
    }

    fn fetch(
        &self,
        py: Python<'_>,
        given: GivenPrompt,
        first: u32,
        timeout: f64,
    ) -> PyResult<Fetched> {
        let timeout = seconds(py, timeout)?;
        let prompt = prompt(given);
        let (slots, missed) = blocking::run(py, |interrupt| {
            Ok::<_, Failure>(self.0.0.fetch(&prompt, first, timeout, interrupt))
        })?;
        let reason = |missed| match missed {
            Missed::NoRoom { blocks } => ("room", blocks.to_string(), 0.0),
            Missed::Failed(detail) => ("failed", detail, 0.0),
            Missed::TimedOut { address, pause } => ("timeout", address, pause.as_secs_f64()),
        };
        let slots = slots.map(|slots| (slots.start, slots.end));
        Ok((slots, missed.into_iter().map(reason).collect()))
    }

    fn give(&self, py: Python<'_>, slots: (u32, u32)) {
        py.detach(|| self.0.0.give(slots.0..slots.1));
    }

    #[getter]
    fn followers(&self, py: Python<'_>) -> usize {
        py.detach(|| self.0.0.directory().followers())
    }

    #[getter]
    fn refused(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.0.0.directory().refused())
    }

    fn gauges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let gauges = PyDict::new(py);
        for (name, value) in py.detach(|| self.0.0.gauges()) {
            gauges.set_item(name, value)?;
        }
        Ok(gauges)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.stop());
    }
}
