//! The scheduler half.

use super::ints::{self, Ids};
use super::{Group, group_rule, refused, values};
use crate::blocking::seconds;
use kvferry_connector::{
    ConnectorMetadata, EngineId, FinishReason, Finished, IdleLimit, Match, Producers, PromptHasher,
    PromptId, Refused, Request, Scheduled, Scheduler, SchedulerConfig, Stats, WireCode,
};
use kvferry_sys::sync::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyDict};

/// A request in a step: its id, tokens in the cache before the step, tokens that the step computes,
/// whether the blocks are all it has, and the blocks per group.
type Step = (PyBackedStr, u64, u64, bool, Vec<Ids>);

/// What `step_of` answers: the step, whether any request was scheduled, and what `WorkerHalf.apply` reports of the step if
/// it can't be read: the loads, and the endings.
type StepOf<'py> = (Bound<'py, PyBytes>, bool, Vec<String>, Vec<super::Ending>);

/// What `finished` answers: whether the blocks are held, and the parameters of the response.
type Ended<'py> = (bool, Option<Bound<'py, PyDict>>);

/// Decides, where requests are scheduled, what is handed over. One per engine.
#[pyclass(frozen, module = "kvferry.connector")]
pub(crate) struct SchedulerHalf {
    half: Mutex<Scheduler>,
    id: EngineId,
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
    ) -> u64 {
        let (params, prompt) = (values::params(params), prompt.map(PromptId::from_bytes));
        let params = params.as_ref();
        let request = Request { id, prompt_tokens, max_tokens, params, prompt };
        self.half.lock().arrived(&request)
    }

    fn matched(&self, id: &str, computed: u64) -> Option<u64> {
        match self.half.lock().matched(id, computed) {
            Match::Unknown => None,
            Match::Tokens(tokens) => Some(tokens),
        }
    }

    fn allocated(&self, id: &str, external: u64, blocks: Vec<Ids>) {
        self.half.lock().allocated(id, external, &Ids::of(blocks));
    }

    fn waits_for_blocks(&self, id: &str) -> bool {
        self.half.lock().waits_for_blocks(id)
    }

    fn step<'py>(
        &self,
        py: Python<'py>,
        scheduled: Vec<Step>,
        preempted: Vec<PyBackedStr>,
    ) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.metadata(scheduled, &preempted).encode())
    }

    fn step_of<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<'py, PyDict>,
        steps: &Bound<'py, PyAny>,
        preempted: Vec<PyBackedStr>,
    ) -> PyResult<StepOf<'py>> {
        let scheduled = match self.producing(py, ids)? {
            Some(producing) => steps.call1((producing,))?.extract::<Vec<Step>>()?,
            None => Vec::new(),
        };
        let computes = !scheduled.is_empty();
        let metadata = self.metadata(scheduled, &preempted);
        let (loads, endings) = metadata.awaited();
        let endings = endings.into_iter();
        let endings = endings.map(|(id, transfer, held)| (id, String::from(transfer), held));
        Ok((PyBytes::new(py, &metadata.encode()), computes, loads, endings.collect()))
    }

    fn give_up(&self, ids: Vec<PyBackedStr>) {
        self.half.lock().give_up(ids.iter().map(|id| &**id));
    }

    fn give_up_all(&self) {
        self.half.lock().give_up_all();
    }

    #[pyo3(signature = (id, reason, blocks, side_data = None))]
    fn finished<'py>(
        &self,
        py: Python<'py>,
        id: &str,
        reason: &str,
        blocks: Option<&Bound<'py, PyAny>>,
        side_data: Option<Vec<u8>>,
    ) -> PyResult<Option<Ended<'py>>> {
        let how = match reason {
            "length" => FinishReason::Length,
            "stop" => FinishReason::Stop,
            "abort" => FinishReason::Abort,
            "error" => FinishReason::Error,
            other => {
                return Err(PyValueError::new_err(format!("no reason of an end: {other:?}")));
            }
        };
        // To read them takes longer than all the rest.
        let reads_blocks = blocks.is_some() && self.half.lock().reads_blocks(id);
        let blocks = blocks.filter(|_| reads_blocks).map(|blocks| blocks.extract::<Vec<Ids>>());
        let blocks = blocks.transpose()?.map(Ids::of);
        let finished = self.half.lock().finished(id, how, blocks.as_deref(), side_data);
        let Some(Finished { held, params }) = finished else { return Ok(None) };
        let params = params.map(|params| values::dict(py, &params)).transpose()?;
        Ok(Some((held, params)))
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

impl SchedulerHalf {
    /// The metadata of a step.
    fn metadata(&self, mut scheduled: Vec<Step>, preempted: &[PyBackedStr]) -> ConnectorMetadata {
        let scheduled =
            scheduled.iter_mut().map(|(request, computed, tokens, all, blocks)| Scheduled {
                request,
                computed: *computed,
                tokens: *tokens,
                all: *all,
                blocks: Ids::of(std::mem::take(blocks)),
            });
        let preempted = preempted.iter().map(|id| &**id);
        self.half.lock().step(scheduled, preempted)
    }

    /// Those of `ids` that may be handed over, each with whether all of its steps matter. `None` if there are none.
    fn producing<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<'py, PyDict>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let mut found = Vec::new();
        let half = self.half.lock();
        if half.has_producers() {
            for (id, _) in ids {
                let name = id.extract::<PyBackedStr>()?;
                if half.may_restart(&name) {
                    found.push((id, half.produces(&name)));
                }
            }
        }
        // To allocate objects may run any code.
        drop(half);
        if found.is_empty() {
            return Ok(None);
        }
        let producing = PyDict::new(py);
        for (id, produces) in found {
            producing.set_item(id, produces)?;
        }
        Ok(Some(producing))
    }
}
