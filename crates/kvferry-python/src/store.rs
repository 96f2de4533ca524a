//! The block store.

use crate::agent::Agent;
use crate::blocking::{self, Stop, seconds};
use crate::error;
use crate::files::parse_direct;
use crate::shared::Shared;
use crate::store_blocks::{Hashes, memory_of};
use crate::store_pending::{Pending, Put, Value};
use crate::store_watch::{Groups, Watch};
use kvferry_store::{Namespace, OnExpiry, Retain, Stats, StoreOptions};
use kvferry_sys::sync::Mutex;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyMapping, PyString};
use std::path::PathBuf;
use std::sync::Arc;

/// A store that was opened, and its agent.
pub(crate) struct Open {
    // Dropped before its agent.
    store: kvferry_store::Store,
    agent: Arc<Shared>,
}

impl Open {
    /// Raises in a process that was forked from the one that opened the store.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.agent.agent(py).map(drop)
    }

    pub(crate) fn store(&self) -> &kvferry_store::Store {
        &self.store
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.store.close());
    }
}

impl Stop for Open {
    fn stop(&self) {
        // Does nothing in a forked child.
        self.store.close();
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.agent.is_forked() {
            // A thread of the parent may have held any lock of the store at the fork: drop nothing.
            return std::mem::forget(self.store.clone());
        }
        // Closing joins native threads: detach meanwhile, if the dropping thread is attached.
        if Python::try_attach(|py| self.close(py)).is_none() {
            self.store.close();
        }
    }
}

/// Blocks of KV on local disks, shared by the processes of a host.
#[pyclass(frozen, weakref, module = "kvferry")]
pub(crate) struct Store {
    open: Arc<Open>,
    first: PathBuf,
}

/// A directory, or a sequence of directories.
struct Directories(Vec<PathBuf>);

impl FromPyObject<'_, '_> for Directories {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match obj.extract::<PathBuf>() {
            Ok(one) => Ok(Self(vec![one])),
            Err(not_a_path) => obj.extract().map(Self).map_err(|_| not_a_path),
        }
    }
}

/// The items of a mapping, as text: options may be given as numbers, too.
fn text_items(mapping: &Bound<'_, PyMapping>) -> PyResult<Vec<(String, String)>> {
    mapping
        .items()?
        .iter()
        .map(|item| {
            let (key, value): (String, Bound<'_, PyAny>) = item.extract()?;
            let is_value = value.is_instance_of::<PyString>()
                || value.is_instance_of::<PyInt>()
                || value.is_instance_of::<PyFloat>();
            if !is_value {
                let what = "the values of object_options are strings, numbers or booleans";
                return Err(PyTypeError::new_err(what));
            }
            Ok((key, value.str()?.extract()?))
        })
        .collect()
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(
        signature = (agent, directory, capacity, *, segment_bytes = None, blocks_max = None, direct = "off", host_bytes = 0, put_wait = 0.0, hang_after = 10.0, adopt_empty = false, must_exist = false, objects = None, object_options = None)
    )]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn new(
        agent: &Bound<'_, Agent>,
        directory: Directories,
        capacity: u64,
        segment_bytes: Option<u64>,
        blocks_max: Option<u32>,
        direct: &str,
        host_bytes: u64,
        put_wait: f64,
        hang_after: f64,
        adopt_empty: bool,
        must_exist: bool,
        objects: Option<String>,
        object_options: Option<&Bound<'_, PyMapping>>,
    ) -> PyResult<Self> {
        let py = agent.py();
        let shared = agent.get().shared();
        let mut directories = directory.0.into_iter();
        let first = directories
            .next()
            .ok_or_else(|| error::invalid(py, "a store has at least one directory"))?;
        let mut options = directories
            .fold(StoreOptions::new(&first, capacity), StoreOptions::and_directory)
            .direct(parse_direct(py, direct)?)
            .host_bytes(host_bytes)
            .put_wait(seconds(py, put_wait)?)
            .hang_after(seconds(py, hang_after)?)
            .adopt_empty(adopt_empty)
            .must_exist(must_exist);
        if let Some(bytes) = segment_bytes {
            options = options.segment_bytes(bytes);
        }
        if let Some(blocks) = blocks_max {
            options = options.blocks_max(blocks);
        }
        let core = shared.agent(py)?.clone();
        let object_options = object_options.map(text_items).transpose()?;
        if objects.is_none() && object_options.is_some() {
            return Err(error::invalid(
                py,
                "object_options needs objects, the URL that they are for",
            ));
        }
        let store = blocking::run_on_own_thread(py, move || {
            let options = match objects {
                Some(url) => {
                    let given = object_options.unwrap_or_default();
                    options.objects(kvferry_store_objects::open(&url, &given)?)
                }
                None => options,
            };
            kvferry_store::Store::open(&core, &options)
        })?;
        let open = Arc::new(Open { store, agent: Arc::clone(shared) });
        blocking::stop_at_exit(py, &open);
        Ok(Self { open, first })
    }

    /// The blocks of one namespace: all that two blocks must have in common, besides their hash, to
    /// be the same.
    #[pyo3(
        signature = (model, *, layout = b"".as_slice(), tenant = b"".as_slice(), adapter = "", group = 0, shard = (0, 1)),
        text_signature = "($self, model, *, layout=b'', tenant=b'', adapter='', group=0, shard=(0, 1))"
    )]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn space(
        &self,
        py: Python<'_>,
        model: &str,
        layout: &[u8],
        tenant: &[u8],
        adapter: &str,
        group: u32,
        shard: (u32, u32),
    ) -> PyResult<Space> {
        self.open.check(py)?;
        let namespace = Namespace::new(model)
            .layout(layout)
            .tenant(tenant)
            .adapter(adapter)
            .group(group)
            .shard(shard.0, shard.1);
        Ok(Space {
            space: self.open.store.space(&namespace),
            model: model.to_owned(),
            open: Arc::clone(&self.open),
        })
    }

    /// Watches blocks by their hashes: of each group those that are in all of its spaces.
    fn watch(&self, py: Python<'_>, groups: Groups<'_>) -> PyResult<Watch> {
        Watch::new(py, &self.open, &groups)
    }

    /// Returns when the blocks that this process has put before would survive a loss of power.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.open.check(py)?;
        let store = self.open.store.clone();
        blocking::run_on_own_thread(py, move || store.sync())
    }

    /// Waits until the blocks that this process has put before are uploaded, or dropped. False if
    /// `timeout` seconds passed first.
    #[pyo3(signature = (timeout = None))]
    fn flush_objects(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.open.check(py)?;
        let timeout = timeout.map(|timeout| seconds(py, timeout)).transpose()?;
        let flush = |slice| match self.open.store.flush_objects(slice) {
            Ok(false) => None,
            ended => Some(ended),
        };
        match blocking::wait(py, timeout, flush)? {
            Some(ended) => ended.map_err(|error| error::store_exception(py, &error)),
            None => Ok(false),
        }
    }

    /// What this process has done with the store since it opened it, and what the store holds now,
    /// by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.open.check(py)?;
        let stats = py.detach(|| self.open.store.stats());
        let Stats { blocks, disk_bytes, capacity_bytes, processes, is_keeper, .. } = stats;
        let Stats { host_blocks, host_bytes, waiting_bytes, uploads_waiting, is_away, .. } = stats;
        let Stats { unwritten_blocks, hanging_directories, .. } = stats;
        let now = [
            ("blocks", blocks),
            ("disk_bytes", disk_bytes),
            ("hanging_directories", hanging_directories),
            ("capacity_bytes", capacity_bytes),
            ("host_blocks", host_blocks),
            ("host_bytes", host_bytes),
            ("waiting_bytes", waiting_bytes),
            ("unwritten_blocks", unwritten_blocks),
            ("processes", processes),
            ("is_keeper", is_keeper),
            ("uploads_waiting", uploads_waiting),
            ("is_away", is_away),
        ];
        let by_name = PyDict::new(py);
        for (name, value) in stats.counters().chain(now) {
            by_name.set_item(name, value)?;
        }
        Ok(by_name)
    }

    /// Waits for what runs in the background, and seals what this process has written. Later calls
    /// raise ShutdownError; a second close does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.open.check(py)?;
        self.open.close(py);
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.open.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.Store {}>", self.first.display())
    }
}

/// The blocks of one namespace of a store.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Space {
    space: kvferry_store::Space,
    model: String,
    open: Arc<Open>,
}

/// Parses the arguments of a call that say how long blocks stay.
fn retain(py: Python<'_>, priority: u8, duration: Option<f64>, leave: bool) -> PyResult<Retain> {
    if priority > 100 {
        return Err(error::invalid(py, &format!("a priority is 0 to 100, not {priority}")));
    }
    if leave && duration.is_none() {
        return Err(error::invalid(py, "leave needs a duration"));
    }
    let duration = duration.map(|duration| seconds(py, duration)).transpose()?;
    Ok(Retain { priority, duration, then: if leave { OnExpiry::Leave } else { OnExpiry::Default } })
}

impl Space {
    pub(crate) fn space(&self) -> &kvferry_store::Space {
        &self.space
    }

    fn pending<T: Value>(
        &self,
        py: Python<'_>,
        submit: impl FnOnce() -> kvferry_store::Result<kvferry_store::Pending<T>> + Send,
    ) -> PyResult<Pending> {
        Ok(Pending::new(blocking::run(py, |_| submit())?, &self.open))
    }
}

#[pymethods]
impl Space {
    /// How many blocks of a prompt, from its beginning, are in the store. This is no use of them.
    fn lookup(&self, py: Python<'_>, hashes: Hashes) -> PyResult<usize> {
        self.open.check(py)?;
        blocking::run(py, |_| self.space.lookup(&hashes.slices()))
    }

    /// Counts as a use of the blocks of a prompt that are in the store. Returns how many.
    fn touch(&self, py: Python<'_>, hashes: Hashes) -> PyResult<usize> {
        self.open.check(py)?;
        blocking::run(py, |_| self.space.touch(&hashes.slices()))
    }

    /// Reads blocks of a prompt into memory: those from the `first` on, one for each memory. Returns
    /// how many were read, one after another from the first.
    #[pyo3(signature = (hashes, memory, first = 0))]
    fn get(
        &self,
        py: Python<'_>,
        hashes: Hashes,
        memory: &Bound<'_, PyAny>,
        first: usize,
    ) -> PyResult<usize> {
        self.open.check(py)?;
        let memory = memory_of(memory, &self.open.agent)?;
        blocking::run(py, |_| self.space.get(&hashes.slices(), first, &memory))
    }

    /// Stores blocks of a prompt: those from the `first` on, one for each memory. Blocks that are
    /// there are not written again.
    #[pyo3(signature = (hashes, memory, first = 0, *, priority = 35, duration = None, leave = false))]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn put(
        &self,
        py: Python<'_>,
        hashes: Hashes,
        memory: &Bound<'_, PyAny>,
        first: usize,
        priority: u8,
        duration: Option<f64>,
        leave: bool,
    ) -> PyResult<Put> {
        self.open.check(py)?;
        let retain = retain(py, priority, duration, leave)?;
        let memory = memory_of(memory, &self.open.agent)?;
        blocking::run(py, |_| self.space.put(&hashes.slices(), first, &memory, retain)).map(Put)
    }

    /// Does what `get` does, in the background. Errors of the memory are its outcome.
    #[pyo3(signature = (hashes, memory, first = 0))]
    fn get_async(
        &self,
        py: Python<'_>,
        hashes: Hashes,
        memory: &Bound<'_, PyAny>,
        first: usize,
    ) -> PyResult<Pending> {
        self.open.check(py)?;
        let memory = memory_of(memory, &self.open.agent)?;
        self.pending(py, || self.space.get_async(&hashes.slices(), first, &memory))
    }

    /// As `put`, in the background. Four puts are carried out at a time, the others wait for their turn, in the order of the
    /// calls: this one for `wait` seconds at most, after which all its blocks are refused, or with 0 for as long as it takes.
    /// Beyond 2 GiB (with 0: 256 MiB) or 65 536 blocks of puts that wait, it is refused at once. `put_wait` counts from its
    /// turn, or with 0 from the call.
    #[pyo3(
        signature = (hashes, memory, first = 0, *, priority = 35, duration = None, leave = false, wait = 0.0)
    )]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn put_async(
        &self,
        py: Python<'_>,
        hashes: Hashes,
        memory: &Bound<'_, PyAny>,
        first: usize,
        priority: u8,
        duration: Option<f64>,
        leave: bool,
        wait: f64,
    ) -> PyResult<Pending> {
        self.open.check(py)?;
        let wait = seconds(py, wait)?;
        let retain = retain(py, priority, duration, leave)?;
        let memory = memory_of(memory, &self.open.agent)?;
        self.pending(py, || self.space.put_async(&hashes.slices(), first, &memory, retain, wait))
    }

    /// Keeps the blocks of a prompt that are on the disk until the pin is released, or `lease` seconds
    /// have passed.
    fn pin(&self, py: Python<'_>, hashes: Hashes, lease: f64) -> PyResult<Pin> {
        self.open.check(py)?;
        let lease = seconds(py, lease)?;
        let pin = blocking::run(py, |_| self.space.pin(&hashes.slices(), lease))?;
        Ok(Pin {
            blocks: pin.blocks(),
            lease: Mutex::new(Some(pin)),
            _open: Arc::clone(&self.open),
        })
    }

    /// Brings blocks of a prompt that are missing here from the object store to the disk, one after
    /// another, and those on the disk to host memory, where there are such tiers. Returns how many blocks of the prompt, from its beginning, are here then.
    fn prefetch(&self, py: Python<'_>, hashes: Hashes) -> PyResult<usize> {
        self.open.check(py)?;
        let pending = blocking::run(py, |_| self.space.prefetch(&hashes.slices()))?;
        let outcome = blocking::wait(py, None, |slice| pending.wait(Some(slice)))?;
        match outcome.as_deref() {
            Some(Ok(here)) => Ok(*here),
            Some(Err(error)) => Err(error::store_exception(py, error)),
            None => Err(error::store_exception(py, &kvferry_store::Error::Closed)),
        }
    }

    /// Does what `prefetch` does, in the background.
    fn prefetch_async(&self, py: Python<'_>, hashes: Hashes) -> PyResult<Pending> {
        self.open.check(py)?;
        self.pending(py, || self.space.prefetch(&hashes.slices()))
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.Space {:?}>", self.model)
    }
}

/// A lease of blocks, which stay in the store until it is released, or ends.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Pin {
    // Dropped before its store.
    lease: Mutex<Option<kvferry_store::Pin>>,
    blocks: usize,
    _open: Arc<Open>,
}

#[pymethods]
impl Pin {
    /// Number of blocks, from the beginning of the prompt.
    #[getter]
    fn blocks(&self) -> usize {
        self.blocks
    }

    /// Lets the blocks leave. A second call does nothing.
    fn release(&self) {
        drop(self.lease.lock().take());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.release();
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.Pin of {} blocks>", self.blocks)
    }
}
