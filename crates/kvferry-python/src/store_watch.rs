//! Events of a store's blocks, as an engine reports them to a router.

use crate::blocking::{self, seconds};
use crate::error::Failure;
use crate::store::{Open, Space};
use crate::store_blocks::Hashes;
use kvferry_store::Report;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval at which a thread that gathers checks for signals. Rarely: it waits for as long as its engine lives.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Watches blocks of a store by their hashes: which have come, and which have left.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Watch {
    // Dropped before its store.
    watch: kvferry_store::Watch,
    open: Arc<Open>,
}

/// The spaces of each group.
pub(crate) type Groups<'py> = Vec<Vec<PyRef<'py, Space>>>;

fn spaces(groups: &Groups<'_>) -> Vec<Vec<kvferry_store::Space>> {
    groups.iter().map(|group| group.iter().map(|it| it.space().clone()).collect()).collect()
}

impl Watch {
    pub(crate) fn new(py: Python<'_>, open: &Arc<Open>, groups: &Groups<'_>) -> PyResult<Self> {
        open.check(py)?;
        let groups = spaces(groups);
        let watch = blocking::run(py, |_| open.store().watch(&groups))?;
        Ok(Self { watch, open: Arc::clone(open) })
    }
}

#[pymethods]
impl Watch {
    /// Watches blocks of a group. Those that are in the store are reported at once, the others when they come.
    fn add(&self, py: Python<'_>, group: u32, hashes: Hashes) -> PyResult<()> {
        self.open.check(py)?;
        blocking::run(py, |_| self.watch.add(group, &hashes.slices()))
    }

    /// Waits for changes of the store and turns them into reports. Returns how many were made: 0 if `timeout` seconds
    /// passed first. For a thread of its own.
    fn gather(&self, py: Python<'_>, timeout: f64) -> PyResult<usize> {
        self.open.check(py)?;
        let timeout = seconds(py, timeout)?;
        let until = Instant::now().checked_add(timeout);
        blocking::run(py, |interrupt| {
            loop {
                let left = until.map_or(timeout, |it| it.saturating_duration_since(Instant::now()));
                let made = self.watch.gather(left.min(LOOK_EVERY)).map_err(Failure::from)?;
                if made > 0 || left.is_zero() {
                    return Ok(made);
                }
                if interrupt() {
                    return Err(Failure::Interrupted);
                }
            }
        })
    }

    /// Takes reports in their order: of removed blocks `budget` at most, of stored ones an eighth of it. Each is a group,
    /// whether the blocks were removed, and their hashes.
    fn take<'py>(&self, py: Python<'py>, budget: usize) -> PyResult<Bound<'py, PyList>> {
        self.open.check(py)?;
        let reports = py.detach(|| self.watch.take(budget));
        let report = |Report { group, is_removed, hashes }: Report| {
            let hashes = PyList::new(py, hashes.iter().map(|hash| PyBytes::new(py, hash)))?;
            Ok((group, is_removed, hashes))
        };
        PyList::new(py, reports.into_iter().map(report).collect::<PyResult<Vec<_>>>()?)
    }

    /// Reports that wait to be taken.
    #[getter]
    fn reports(&self, py: Python<'_>) -> PyResult<usize> {
        self.open.check(py)?;
        Ok(py.detach(|| self.watch.reports()))
    }

    /// Watches other groups. All blocks that were reported as stored are reported as removed.
    fn reset(&self, py: Python<'_>, groups: Groups<'_>) -> PyResult<()> {
        self.open.check(py)?;
        let groups = spaces(&groups);
        blocking::run(py, |_| self.watch.reset(&groups))
    }

    fn __repr__(&self) -> String {
        "<kvferry.Watch>".into()
    }
}
