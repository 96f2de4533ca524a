//! The scheduler half.

use super::ints::{self, Ids};
use super::{Group, group_rule, refused, values};
use crate::blocking::seconds;
use kvferry_connector::{
    EngineId, FinishReason, IdleLimit, Match, Producers, PromptHasher, PromptId, Refused, Request,
    Scheduled, Scheduler, SchedulerConfig, Stats, WireCode,
};
use kvferry_sys::sync::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyDict};

/// A request in a step: its id, tokens in the cache before the step, tokens that the step computes,
/// whether the blocks are all it has, and the blocks per group.
type Step = (PyBackedStr, u64, u64, bool, Vec<Ids>);

/// Decides, where requests are scheduled, what is handed over. One per engine.
#[pyclass(frozen, module = "kvferry.connector")]
pub(crate) struct SchedulerHalf {
    half: Mutex<Scheduler>,
    id: EngineId,
}

/// A request that was added before, or asks for nothing.
fn known(id: &str, prompt_tokens: u64) -> Request<'_> {
    Request { id, prompt_tokens, max_tokens: 0, params: None, prompt: None }
}

/// The identity of a prompt, for [`SchedulerHalf::arrived`]: 16 bytes.
#[pyfunction]
#[pyo3(signature = (tokens, extra = Vec::new()))]
pub(crate) fn prompt_id<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    extra: Vec<PyBackedStr>,
) -> PyResult<Bound<'py, PyBytes>> {
    let extra: Vec<_> = extra.iter().map(|key| key.as_bytes()).collect();
    let mut hasher = PromptHasher::new(&extra);
    ints::read(tokens, |tokens| hasher.update(tokens.as_flattened()))?;
    Ok(PyBytes::new(py, &hasher.finish().to_bytes()))
}

/// The reasons that counters can have, by the counter: so that each has a series before it counts.
#[pyfunction]
pub(crate) fn counted_reasons(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let reasons = PyDict::new(py);
    reasons.set_item("refused_requests", Stats::reasons())?;
    reasons.set_item("withdrawn_offers", Stats::failures())?;
    let failures = WireCode::KNOWN.iter().filter(|code| !code.is_ok());
    reasons.set_item("failed_loads", failures.map(ToString::to_string).collect::<Vec<_>>())?;
    Ok(reasons)
}

#[pymethods]
impl SchedulerHalf {
    #[new]
    #[pyo3(signature = (groups, *, ranks, timeout, eager = true, recomputed_tokens = 0, null_block = None, idle = None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python call")]
    fn new(
        py: Python<'_>,
        groups: Vec<Group>,
        ranks: usize,
        timeout: f64,
        eager: bool,
        recomputed_tokens: u32,
        null_block: Option<u32>,
        idle: Option<(u32, u32)>,
    ) -> PyResult<Self> {
        let groups = groups.into_iter().map(group_rule).collect::<PyResult<_>>()?;
        let timeout = seconds(py, timeout)?;
        let limit = |(pool_blocks, idle_blocks)| IdleLimit { pool_blocks, idle_blocks };
        let config = SchedulerConfig {
            groups,
            ranks,
            timeout,
            eager,
            recomputed_tokens,
            null_block,
            idle: idle.map(limit),
        };
        let id = EngineId(u128::from_le_bytes(kvferry_sys::random::bytes().map_err(refused)?));
        Ok(Self { half: Mutex::new(Scheduler::new(config, id)), id })
    }

    /// 32 hexadecimal digits, drawn for this incarnation of the engine.
    #[getter]
    fn engine_id(&self) -> String {
        self.id.to_string()
    }

    fn set_ranks(&self, cards: Vec<Vec<u8>>) -> PyResult<()> {
        self.half.lock().set_ranks(cards).map_err(refused)
    }

    fn set_producers(&self, producers: Vec<String>) -> PyResult<()> {
        let producers = Producers::parse(&producers).map_err(refused)?;
        self.half.lock().set_producers(producers);
        Ok(())
    }

    #[pyo3(signature = (id, reason = "internal"))]
    fn refuse(&self, id: &str, reason: &str) -> PyResult<()> {
        let reason = match reason {
            "internal" => Refused::Internal,
            "resumable" => Refused::Resumable,
            "prompt_logprobs" => Refused::PromptLogprobs,
            "changed_weights" => Refused::ChangedWeights,
            other => return Err(PyValueError::new_err(format!("no reason to refuse: {other:?}"))),
        };
        self.half.lock().refuse(id, reason);
        Ok(())
    }

    fn arrived(
        &self,
        id: &str,
        prompt_tokens: u64,
        max_tokens: u64,
        params: Option<&Bound<'_, PyDict>>,
        prompt: Option<[u8; 16]>,
    ) {
        let (params, prompt) = (values::params(params), prompt.map(PromptId::from_bytes));
        let params = params.as_ref();
        let request = Request { id, prompt_tokens, max_tokens, params, prompt };
        self.half.lock().arrived(&request);
    }

    fn prompt_tokens_to_prefill(&self, id: &str, prompt_tokens: u64) -> u64 {
        self.half.lock().prompt_tokens_to_prefill(&known(id, prompt_tokens))
    }

    fn matched(&self, id: &str, prompt_tokens: u64, computed: u64) -> Option<u64> {
        match self.half.lock().matched(&known(id, prompt_tokens), computed) {
            Match::Unknown => None,
            Match::Tokens(tokens) => Some(tokens),
        }
    }

    fn allocated(
        &self,
        id: &str,
        prompt_tokens: u64,
        computed: u64,
        external: u64,
        blocks: Vec<Ids>,
    ) {
        let (request, blocks) = (known(id, prompt_tokens), Ids::of(blocks));
        self.half.lock().allocated(&request, computed, external, &blocks);
    }

    fn waits_for_blocks(&self, id: &str) -> bool {
        self.half.lock().waits_for_blocks(id)
    }

    fn is_known(&self, id: &str) -> bool {
        self.half.lock().is_known(id)
    }

    fn produces(&self, id: &str) -> bool {
        self.half.lock().produces(id)
    }

    fn step<'py>(
        &self,
        py: Python<'py>,
        scheduled: Vec<Step>,
        preempted: Vec<PyBackedStr>,
    ) -> Bound<'py, PyBytes> {
        let mut scheduled = scheduled;
        let scheduled =
            scheduled.iter_mut().map(|(request, computed, tokens, all, blocks)| Scheduled {
                request,
                computed: *computed,
                tokens: *tokens,
                all: *all,
                blocks: Ids::of(std::mem::take(blocks)),
            });
        let preempted = preempted.iter().map(|id| &**id);
        PyBytes::new(py, &self.half.lock().step(scheduled, preempted).encode())
    }

    #[pyo3(signature = (id, prompt_tokens, params, prompt, reason, blocks, side_data = None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python call")]
    fn finished<'py>(
        &self,
        py: Python<'py>,
        id: &str,
        prompt_tokens: u64,
        params: Option<&Bound<'py, PyDict>>,
        prompt: Option<[u8; 16]>,
        reason: &str,
        blocks: Option<Vec<Ids>>,
        side_data: Option<Vec<u8>>,
    ) -> PyResult<(bool, Option<Bound<'py, PyDict>>)> {
        let how = match reason {
            "length" => FinishReason::Length,
            "stop" => FinishReason::Stop,
            "abort" => FinishReason::Abort,
            "error" => FinishReason::Error,
            other => {
                return Err(PyValueError::new_err(format!("no reason of an end: {other:?}")));
            }
        };
        let (params, prompt) = (values::params(params), prompt.map(PromptId::from_bytes));
        let params = params.as_ref();
        let request = Request { id, prompt_tokens, max_tokens: 0, params, prompt };
        let blocks = blocks.map(Ids::of);
        let finished = self.half.lock().finished(&request, how, blocks.as_deref(), side_data);
        let params = finished.params.map(|params| values::dict(py, &params)).transpose()?;
        Ok((finished.held, params))
    }

    fn reported(&self, rank: usize, notes: &[u8]) {
        self.half.lock().reported(rank, notes);
    }

    fn sent(&self, ids: Vec<PyBackedStr>) {
        self.half.lock().sent(ids.iter().map(|id| &**id));
    }

    fn received(&self, ids: Vec<PyBackedStr>) {
        self.half.lock().received(ids.iter().map(|id| &**id));
    }

    fn take_side_data(&self, id: &str) -> Vec<Vec<u8>> {
        self.half.lock().take_side_data(id)
    }

    fn has_pending_work(&self) -> bool {
        self.half.lock().has_pending_work()
    }

    fn reset_cache(&self) {
        self.half.lock().reset_cache();
    }

    fn take_stats<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let stats = self.half.lock().take_stats();
        if stats.is_empty() {
            return Ok(None);
        }
        values::python(py, &serde_json::to_value(stats).map_err(refused)?).map(Some)
    }

    fn gauges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let gauges = PyDict::new(py);
        for (name, value) in self.half.lock().gauges() {
            gauges.set_item(name, value)?;
        }
        Ok(gauges)
    }
}
