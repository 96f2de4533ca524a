//! The worker half.

use super::{Ending, refused};
use crate::agent::Agent;
use crate::blocking::{self, Stop, seconds};
use crate::memory::Region;
use crate::order::Orders;
use kvferry_connector::{
    Announce, ComputeEvent, HandoffId, Layout, Limits, Load, Loads, Model, Producers, WireCode,
    Worker, WorkerConfig, WorkerError,
};
use kvferry_cuda::Edge;
use kvferry_sys::sync::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The end of a load: the request, seconds from its first read to its end, bytes; if it failed, what
/// went wrong and the reason in words.
type Ended = (String, f64, u64, Option<(String, String)>);

/// One rank's side: announces what is computed, fetches, reports what has ended.
#[pyclass(frozen, module = "kvferry.connector")]
pub(crate) struct WorkerHalf(Arc<Half>);

struct Half {
    /// The worker half; `None` once it is closed.
    worker: Mutex<Option<Arc<Worker>>>,
    card: Vec<u8>,
    loads: Arc<Loads>,
    /// Numbers of the GPUs whose memory has the KV; empty for host memory.
    devices: Vec<i32>,
}

impl Stop for Half {
    fn stop(&self) {
        let worker = self.worker.lock().take();
        if let Some(worker) = worker {
            worker.close();
        }
    }
}

/// A label of a metric: a producer may send any number of codes.
fn reason_of(code: WireCode) -> String {
    match code {
        WireCode::Other(_) => "other".to_owned(),
        code => code.to_string(),
    }
}

/// The producers that KV is fetched from; `None` for those that an agent has by itself.
pub(super) fn producers_of(list: Option<Vec<String>>) -> PyResult<Option<Producers>> {
    list.map(|it| Producers::parse(&it)).transpose().map_err(refused)
}

impl WorkerHalf {
    fn worker(&self) -> PyResult<Arc<Worker>> {
        self.0.worker.lock().clone().ok_or_else(|| refused("the worker half is closed"))
    }

    /// The orders in `after` for KV in memory of GPUs; none for host memory.
    fn orders(&self, after: Option<&Bound<'_, PyAny>>) -> PyResult<Orders> {
        match after {
            Some(after) if !self.0.devices.is_empty() => Orders::read(after),
            None if !self.0.devices.is_empty() => Err(refused(
                "the KV is in memory of a GPU: say what this comes after, a stream or an event",
            )),
            _ => Ok(Orders::default()),
        }
    }

    /// The event of the work that `after` names; `None` if the KV needs none.
    fn computed(
        &self,
        py: Python<'_>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Box<dyn ComputeEvent>>> {
        let edges = self.orders(after)?.edges(py, &self.0.devices).map_err(refused)?;
        let computed = Computed { edges, failure: OnceLock::new() };
        Ok((!computed.edges.is_empty()).then(|| Box::new(computed) as Box<dyn ComputeEvent>))
    }
}

/// Work of a GPU that computes KV.
struct Computed {
    edges: Vec<Edge>,
    /// The reason why the work will never end.
    failure: OnceLock<String>,
}

/// Time between two checks of an event: a fraction of the time that it has taken so far, within these bounds.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(500));
const PAUSE_FRACTION: u32 = 16;

impl ComputeEvent for Computed {
    fn is_ready(&self) -> bool {
        self.edges.iter().all(|edge| edge.has_happened().unwrap_or(false))
    }

    fn wait(&self, is_over: &dyn Fn() -> bool) {
        let began = Instant::now();
        for edge in &self.edges {
            loop {
                match edge.has_happened() {
                    Ok(true) => break,
                    Ok(false) if is_over() => return,
                    Ok(false) => {
                        let pause = began.elapsed() / PAUSE_FRACTION;
                        std::thread::sleep(pause.clamp(PAUSE.0, PAUSE.1));
                    }
                    Err(error) => {
                        self.failure.get_or_init(|| error.to_string());
                        return;
                    }
                }
            }
        }
    }

    fn failure(&self) -> Option<String> {
        self.failure.get().cloned()
    }
}

#[pymethods]
impl WorkerHalf {
    #[new]
    #[pyo3(signature = (agent, layout, regions, *, rank, timeout, wait = 30.0, model = BTreeMap::new(), announce = "layers", pieces = 2, producers = None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python call")]
    fn new(
        py: Python<'_>,
        agent: &Bound<'_, Agent>,
        layout: &str,
        regions: Vec<Bound<'_, Region>>,
        rank: usize,
        timeout: f64,
        wait: f64,
        model: BTreeMap<String, String>,
        announce: &str,
        pieces: u32,
        producers: Option<Vec<String>>,
    ) -> PyResult<Self> {
        let agent = agent.get().core(py)?;
        let producers = producers_of(producers)?;
        let layout: Layout = serde_json::from_str(layout).map_err(refused)?;
        let regions: Vec<_> = regions.iter().map(|region| region.get().region.clone()).collect();
        let announce = match announce {
            "layers" => Announce::Layers { pieces, least_bytes: Announce::LEAST_BYTES },
            "chunks" => Announce::Chunks,
            "end" => Announce::End,
            other => return Err(refused(format!("no way of announcing: {other:?}"))),
        };
        let cap = seconds(py, timeout)?;
        let wait = seconds(py, wait)?.min(cap);
        let limits = Limits { cap, rendezvous: wait, offer_ttl: wait, ..Limits::default() };
        let config = WorkerConfig { rank, model: Model(model), announce, limits, producers };
        let worker =
            py.detach(|| Worker::start(agent, layout, &regions, config)).map_err(refused)?;
        let loads = Arc::new(Loads::default());
        worker.set_observer(Arc::<Loads>::clone(&loads));
        let card = worker.rank_metadata().to_vec();
        let devices = kvferry_cuda::devices(regions.iter().filter_map(|it| it.device_memory()));
        let worker = Mutex::new(Some(Arc::new(worker)));
        let half = Arc::new(Half { worker, card, loads, devices });
        blocking::stop_at_exit(py, &half);
        Ok(Self(half))
    }

    #[getter]
    fn card<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.card)
    }

    #[getter]
    fn producers(&self) -> PyResult<Vec<String>> {
        Ok(self.worker()?.producers().list())
    }

    #[pyo3(signature = (metadata, after = None, *, loads = Vec::new(), endings = Vec::new()))]
    fn apply(
        &self,
        py: Python<'_>,
        metadata: &[u8],
        after: Option<&Bound<'_, PyAny>>,
        loads: Vec<String>,
        endings: Vec<Ending>,
    ) -> PyResult<()> {
        // What a step has beside loads needs no order, and is carried out in any case.
        let orders = self.orders(after);
        let after = || match &orders {
            Ok(orders) => orders.after(py, &self.0.devices).map_err(|error| error.to_string()),
            Err(error) => Err(error.value(py).to_string()),
        };
        let worker = self.worker()?;
        let applied = worker.apply_after(metadata, after);
        // After other errors the step was carried out.
        if matches!(applied, Err(WorkerError::Metadata(_))) {
            // A name that this version refuses has no handoff here.
            let named =
                |(id, transfer, held): Ending| Some((id, HandoffId::new(&transfer).ok()?, held));
            worker.lose_step(loads, endings.into_iter().filter_map(named).collect());
        }
        applied.map_err(refused)?;
        orders.map(drop)
    }

    fn fetch(&self) -> PyResult<()> {
        self.worker()?.fetch();
        Ok(())
    }

    #[pyo3(signature = (layer, after = None))]
    fn layer_computed(
        &self,
        py: Python<'_>,
        layer: usize,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let worker = self.worker()?;
        // An event is recorded only if a request needs it.
        if self.0.devices.is_empty() || worker.wants_layer(layer) {
            match self.computed(py, after)? {
                None => worker.layer_computed(layer, None),
                // Detached: the call asks the driver for the event, or destroys it.
                computed => py.detach(|| worker.layer_computed(layer, computed)),
            }
        }
        Ok(())
    }

    #[pyo3(signature = (after = None))]
    fn step_computed(&self, py: Python<'_>, after: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let worker = self.worker()?;
        match self.computed(py, after)? {
            None => worker.step_computed(None),
            // Detached, as above.
            computed => py.detach(|| worker.step_computed(computed)),
        }
        Ok(())
    }

    fn step_failed(&self, detail: &str) -> PyResult<()> {
        self.worker()?.step_failed(detail);
        Ok(())
    }

    #[expect(clippy::type_complexity, reason = "it is a tuple for Python")]
    fn reports<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Vec<String>, Vec<String>, Vec<String>, Option<Bound<'py, PyBytes>>)> {
        let reports = self.worker()?.reports();
        let notes = reports.notes.map(|notes| PyBytes::new(py, &notes));
        Ok((reports.sent, reports.received, reports.failed, notes))
    }

    fn take_loads(&self) -> Vec<Ended> {
        let ended = |Load { request, took, bytes, failure }| {
            let failure = failure.map(|(code, detail)| (reason_of(code), detail));
            (request, took.as_secs_f64(), bytes, failure)
        };
        self.0.loads.take().into_iter().map(ended).collect()
    }

    fn gauges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let gauges = PyDict::new(py);
        for (name, value) in self.worker()?.gauges() {
            gauges.set_item(name, value)?;
        }
        Ok(gauges)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.stop());
    }
}
