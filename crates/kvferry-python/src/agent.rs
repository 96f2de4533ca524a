//! The agent, and the Python buffers that are registered with it.

use crate::blocking::{self, seconds};
use crate::error;
use crate::files::{self, FileRegion, Files, Opening};
use crate::memory::{Place, Region, Span, parse_access};
use crate::notification::Notification;
use crate::order::Orders;
use crate::peer::Peer;
use crate::shared::Shared;
use kvferry::{Access, Checksum, Config, ErrorKind, Secret, Transports};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

/// A kvferry endpoint in this process: owns regions, sessions and transfers.
///
/// Settings that are not given come from the environment (KVFERRY_LISTEN, KVFERRY_SECRET, …), then
/// from the defaults. `silence` and `timeout` are in seconds. The agent ends with `shutdown()`, with
/// the `with` block, or with the last object that refers to it.
#[pyclass(frozen, weakref, module = "kvferry")]
pub(crate) struct Agent(Arc<Shared>);

fn milliseconds(py: Python<'_>, value: f64) -> PyResult<u64> {
    let rounded_up = seconds(py, value)?.as_nanos().div_ceil(1_000_000);
    u64::try_from(rounded_up).map_err(|_| error::invalid(py, "too many seconds"))
}

fn parse_checksum(obj: &Bound<'_, PyAny>) -> PyResult<Checksum> {
    if let Ok(on) = obj.extract::<bool>() {
        return Ok(if on { Checksum::On } else { Checksum::Off });
    }
    match obj.extract::<String>()?.as_str() {
        "auto" => Ok(Checksum::Auto),
        "on" => Ok(Checksum::On),
        "off" => Ok(Checksum::Off),
        other => Err(error::invalid(
            obj.py(),
            &format!("checksum must be \"auto\", \"on\" or \"off\", not {other:?}"),
        )),
    }
}

fn parse_transports(obj: &Bound<'_, PyAny>) -> PyResult<Transports> {
    let names = match obj.cast::<PyString>() {
        Ok(text) => text.to_str()?.to_owned(),
        Err(_) => obj.extract::<Vec<String>>()?.join(","),
    };
    Transports::parse(&names).map_err(|e| error::exception(obj.py(), &e))
}

fn parse_secret(obj: &Bound<'_, PyAny>) -> PyResult<Secret> {
    let secret = if let Ok(text) = obj.cast::<PyString>() {
        Secret::new(text.to_str()?)
    } else if let Ok(bytes) = obj.cast::<PyBytes>() {
        Secret::new(bytes.as_bytes())
    } else {
        // The message must not contain the value.
        return Err(PyTypeError::new_err("a secret must be bytes or str"));
    };
    secret.ok_or_else(|| error::invalid(obj.py(), "a secret has at least one byte"))
}

/// Registers memory of the host or of a GPU.
fn register_span(
    py: Python<'_>,
    agent: &kvferry::Agent,
    span: &Span,
    access: Access,
) -> PyResult<kvferry::Region> {
    let registered = match span.place {
        Place::Host => {
            let (addr, len) = (span.addr, span.len);
            // Detached: a CUDA driver of the process is asked whose memory it is, and that call may wait for one that
            // itself waits for the interpreter.
            // SAFETY: `hold` keeps a Python buffer's memory until the region is unregistered or the
            // agent is shut down; for a bare address the Python caller promises it.
            py.detach(|| unsafe { agent.register(pointer(addr), len, access) })
        }
        Place::Gpu(device) => {
            let (address, len) = (span.addr as u64, span.len as u64);
            // Detached: the first call loads the driver, which takes up to seconds.
            let memory = py
                .detach(|| match device {
                    Some(name) => kvferry_cuda::memory_on(address, len, name),
                    None => kvferry_cuda::memory(address, len, None),
                })
                .map_err(|e| error::invalid(py, &e.to_string()))?;
            agent.register_device(memory, access)
        }
    };
    registered.map_err(|e| error::exception(py, &e))
}

/// Registers all or none.
fn register_spans(
    py: Python<'_>,
    agent: &kvferry::Agent,
    spans: &[Span],
    access: Access,
) -> PyResult<Vec<kvferry::Region>> {
    if spans.iter().all(|span| span.place == Place::Host) {
        let ranges: Vec<_> = spans.iter().map(|o| (o.addr, o.len)).collect();
        let regions = py.detach(|| {
            let ranges: Vec<_> = ranges.iter().map(|&(addr, len)| (pointer(addr), len)).collect();
            // SAFETY: as for `register_span`.
            unsafe { agent.register_batch(&ranges, access) }
        });
        return regions.map_err(|e| error::exception(py, &e));
    }
    let mut regions = Vec::with_capacity(spans.len());
    for span in spans {
        match register_span(py, agent, span, access) {
            Ok(region) => regions.push(region),
            Err(error) => {
                // No peer knows them yet.
                let _ = agent.unregister_batch(&regions);
                return Err(error);
            }
        }
    }
    Ok(regions)
}

#[pymethods]
impl Agent {
    #[new]
    #[pyo3(signature = (
        name = None, *, listen = None, advertise = None, secret = None, transports = None, checksum = None,
        silence = None, timeout = None, streams_per_peer = None, io_threads = None, mooncake = None,
        ptracer_any = None, file_engine = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn new(
        py: Python<'_>,
        name: Option<String>,
        listen: Option<String>,
        advertise: Option<String>,
        secret: Option<&Bound<'_, PyAny>>,
        transports: Option<&Bound<'_, PyAny>>,
        checksum: Option<&Bound<'_, PyAny>>,
        silence: Option<f64>,
        timeout: Option<f64>,
        streams_per_peer: Option<usize>,
        io_threads: Option<usize>,
        mooncake: Option<bool>,
        ptracer_any: Option<bool>,
        file_engine: Option<&str>,
    ) -> PyResult<Self> {
        let mut config = Config::from_env().map_err(|e| error::exception(py, &e))?;
        if let Some(name) = name {
            config.name = name;
        }
        config.listen = listen.or(config.listen);
        config.advertise = advertise.or(config.advertise);
        if let Some(secret) = secret {
            config.secret = Some(parse_secret(secret)?);
        }
        if let Some(transports) = transports {
            config.transports = parse_transports(transports)?;
        }
        if let Some(checksum) = checksum {
            config.checksum = parse_checksum(checksum)?;
        }
        if let Some(silence) = silence {
            config.silence_ms = milliseconds(py, silence)?;
        }
        if let Some(timeout) = timeout {
            config.timeout_ms = milliseconds(py, timeout)?;
        }
        config.streams_per_peer = streams_per_peer.or(config.streams_per_peer);
        config.io_threads = io_threads.or(config.io_threads);
        let settings = [
            ("mooncake", mooncake.map(|on| on.to_string())),
            ("ptracer_any", ptracer_any.map(|on| on.to_string())),
            ("file_engine", file_engine.map(str::to_owned)),
        ];
        for (name, value) in settings {
            let Some(value) = value else { continue };
            let set = config.transport_settings.set(name, value);
            set.map_err(|e| error::exception(py, &e))?;
        }

        let agent = blocking::run(py, |_| kvferry::Agent::start(config))?;
        crate::log::warn(py, agent.take_warning())?;
        let shared = Arc::new(Shared::new(agent));
        blocking::stop_at_exit(py, &shared);
        Ok(Self(shared))
    }

    /// The name that notifications and logs show.
    #[getter]
    fn name(&self) -> &str {
        self.0.core().name()
    }

    /// 32 hexadecimal digits, drawn when the agent started. A restarted agent is another peer.
    #[getter]
    fn incarnation(&self) -> String {
        self.0.core().incarnation().to_string()
    }

    /// The address it listens on, `(host, port)`.
    #[getter]
    fn local_address(&self) -> (String, u16) {
        let addr = self.0.core().local_addr();
        (addr.ip().to_string(), addr.port())
    }

    /// The address to give to peers, "host:port".
    #[getter]
    fn address(&self) -> &str {
        self.0.core().advertised()
    }

    /// The settings in force, without the secret.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("json")?.call_method1("loads", (self.0.core().config().to_json(),))
    }

    /// Has transfers of memory of GPUs that name nothing in `after` come after this: a stream, which stands for the work
    /// that it has when a transfer is started, an event, "host", or a list of these. With None such transfers are refused
    /// again. Transfers that were started before keep their order.
    fn set_after(&self, py: Python<'_>, after: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.agent(py)?;
        self.0.set_after(Orders::read(after)?);
        Ok(())
    }

    /// Registers memory. `access` says what peers may do with it: "rw", "r", "w" or "none".
    ///
    /// `buffer` is an object with contiguous writable memory (bytearray, memoryview, numpy array,
    /// torch tensor on the CPU, …), which the agent holds until the region is unregistered, or a pair
    /// `(address, nbytes)` of memory that the caller keeps valid until then. Peers find the region by
    /// its `name`, if it has one.
    ///
    /// Memory of a GPU is that of a torch tensor on CUDA, of an object with `__cuda_array_interface__` or
    /// `__dlpack__`, or a pair with `device` "cuda", "cuda:1", a number, a UUID ("GPU-…") or an address on
    /// the PCI bus ("0000:1b:00.0"). Transfers of it name in `after` what they come after.
    #[pyo3(signature = (buffer, access = "rw", *, name = None, device = None))]
    fn register(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        access: &str,
        name: Option<&str>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Region> {
        let agent = self.0.agent(py)?;
        let access = parse_access(access)?;
        let span = Span::of(buffer, Place::of(device)?)?;
        let region = register_span(py, agent, &span, access)?;
        if let Some(hold) = span.hold {
            self.0.hold(&region, hold);
        }
        self.name_region(py, region, name)
    }

    /// Registers many buffers at once, all or none. See `register`; all pairs are on one `device`.
    #[pyo3(signature = (buffers, access = "rw", *, device = None))]
    fn register_batch(
        &self,
        py: Python<'_>,
        buffers: Vec<Bound<'_, PyAny>>,
        access: &str,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Region>> {
        let agent = self.0.agent(py)?;
        let access = parse_access(access)?;
        let place = Place::of(device)?;
        let spans = buffers.iter().map(|it| Span::of(it, place)).collect::<PyResult<Vec<_>>>()?;
        let regions = register_spans(py, agent, &spans, access)?;
        for (region, span) in regions.iter().zip(spans) {
            if let Some(hold) = span.hold {
                self.0.hold(region, hold);
            }
        }
        Ok(regions.into_iter().map(|region| Region::new(region, &self.0)).collect())
    }

    /// Allocates zeroed memory and registers it. The memory lives as long as the region object and
    /// its views. Peers find the region by its `name`, if it has one.
    #[pyo3(signature = (nbytes, access = "rw", *, name = None))]
    fn allocate(
        &self,
        py: Python<'_>,
        nbytes: usize,
        access: &str,
        name: Option<&str>,
    ) -> PyResult<Region> {
        let agent = self.0.agent(py)?;
        let access = parse_access(access)?;
        let region = blocking::run(py, |_| agent.allocate(nbytes, access))?;
        self.name_region(py, region, name)
    }

    /// The registered region of that name, or None.
    fn region(&self, py: Python<'_>, name: &str) -> PyResult<Option<Region>> {
        let region = self.0.agent(py)?.region(name);
        Ok(region.map(|region| Region::new(region, &self.0)))
    }

    /// Unregisters a region. When this returns, no peer and no transfer of this agent accesses its
    /// memory any more, and the agent no longer holds its buffer.
    fn unregister(&self, py: Python<'_>, region: &Bound<'_, Region>) -> PyResult<()> {
        let agent = self.0.agent(py)?;
        let region = &region.get().region;
        blocking::run(py, |_| agent.unregister(region))?;
        self.0.release(std::slice::from_ref(region));
        Ok(())
    }

    /// Unregisters many regions, each even if another fails; raises the first failure.
    fn unregister_batch(&self, py: Python<'_>, regions: Vec<Bound<'_, Region>>) -> PyResult<()> {
        let agent = self.0.agent(py)?;
        let regions: Vec<_> = regions.iter().map(|region| region.get().region.clone()).collect();
        let result = blocking::run(py, |_| agent.unregister_batch(&regions));
        self.0.release(&regions);
        result
    }

    /// The registered regions, in the order of registration.
    fn regions(&self, py: Python<'_>) -> PyResult<Vec<Region>> {
        let regions = self.0.agent(py)?.regions();
        Ok(regions.into_iter().map(|region| Region::new(region, &self.0)).collect())
    }

    /// The peer at "host:port". Sends nothing yet; a name is resolved.
    fn peer(&self, py: Python<'_>, address: String) -> PyResult<Peer> {
        let agent = self.0.agent(py)?;
        let peer = if address.parse::<std::net::SocketAddr>().is_ok() {
            agent.peer(&address).map_err(|e| error::exception(py, &e))?
        } else {
            // Resolving a name may block.
            let agent = agent.clone();
            blocking::run_on_own_thread(py, move || agent.peer(&address))?
        };
        Ok(Peer::new(peer, &self.0))
    }

    /// Opens a range of a file as a region that batches can name as their remote side.
    ///
    /// `access` is "r" or "rw". With `create` the file is made if it does not exist, and the space for
    /// `nbytes` bytes at `offset` is reserved. Without `nbytes` the region is the whole file. `direct`
    /// says whether aligned ranges go past the page cache: "auto" (where the file system can), "off" or
    /// "require".
    #[pyo3(signature = (path, access = "r", *, create = false, offset = 0, nbytes = None, direct = "auto"))]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn open_file(
        &self,
        py: Python<'_>,
        path: PathBuf,
        access: &str,
        create: bool,
        offset: u64,
        nbytes: Option<u64>,
        direct: &str,
    ) -> PyResult<FileRegion> {
        files::open(py, &self.0, path, &Opening { access, create, offset, nbytes, direct })
    }

    /// As `open_file`, for an open descriptor, which is duplicated: a file without a name, or a device. A descriptor that appends
    /// (`O_APPEND`, mode `"a"`) is refused for `"rw"`.
    #[pyo3(signature = (fd, access = "r", *, offset = 0, nbytes = None, direct = "auto"))]
    fn register_file(
        &self,
        py: Python<'_>,
        fd: i32,
        access: &str,
        offset: u64,
        nbytes: Option<u64>,
        direct: &str,
    ) -> PyResult<FileRegion> {
        files::adopt(py, &self.0, fd, &Opening { access, create: false, offset, nbytes, direct })
    }

    /// Moves batches between this agent's memory and its file regions.
    #[getter]
    fn files(&self, py: Python<'_>) -> PyResult<Files> {
        Files::of(py, &self.0)
    }

    /// Takes the notifications that have arrived.
    fn notifications(&self, py: Python<'_>) -> PyResult<Vec<Notification>> {
        Ok(self.0.agent(py)?.notifications().into_iter().map(Notification).collect())
    }

    /// Waits for a notification and takes it; None if none arrives within `timeout` seconds. Raises
    /// ShutdownError when the agent is shut down and all notifications were taken.
    #[pyo3(signature = (timeout = None))]
    fn wait_notification(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Notification>> {
        let agent = self.0.agent(py)?;
        let timeout = timeout.map(|timeout| seconds(py, timeout)).transpose()?;
        let found = blocking::wait(py, timeout, |slice| agent.wait_notification(slice).transpose());
        let found = found?.transpose().map_err(|e| error::exception(py, &e))?;
        Ok(found.map(Notification))
    }

    /// A file descriptor that is readable while there are notifications to take. It belongs to the
    /// agent: do not close it.
    fn notification_fd(&self, py: Python<'_>) -> PyResult<i32> {
        let fd = self.0.agent(py)?.notification_fd();
        fd.map(|fd| fd.as_raw_fd()).map_err(|e| error::exception(py, &e))
    }

    /// The agent's counters since it started, by name. `fallbacks_peer_device`, `fallbacks_out_of_reach` and
    /// `fallbacks_unlisted` count the transfers within the host that did not go over "local", by the reason.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = serde_json::to_value(self.0.agent(py)?.stats())
            .map_err(|e| error::new(py, ErrorKind::Internal, &e.to_string()))?;
        let counters = PyDict::new(py);
        for (name, value) in stats.as_object().into_iter().flatten() {
            counters.set_item(name, value.as_u64())?;
        }
        for (name, value) in kvferry_cuda::Gpu::named_counters() {
            counters.set_item(name, value)?;
        }
        Ok(counters)
    }

    /// Ends sessions, transfers and threads. Later calls raise ShutdownError; a second shutdown does
    /// nothing.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        let agent = self.0.agent(py)?;
        py.detach(|| agent.shutdown());
        self.0.release_all();
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _exception: &Bound<'_, pyo3::types::PyTuple>,
    ) -> PyResult<()> {
        if self.0.is_forked() { Ok(()) } else { self.shutdown(py) }
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.Agent {:?} at {}>", self.0.core().name(), self.0.core().advertised())
    }
}

impl Agent {
    /// The core's agent.
    pub(crate) fn core(&self, py: Python<'_>) -> PyResult<&kvferry::Agent> {
        self.0.agent(py)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }

    /// Names a new region; unregisters it if it can't have the name.
    fn name_region(
        &self,
        py: Python<'_>,
        region: kvferry::Region,
        name: Option<&str>,
    ) -> PyResult<Region> {
        let agent = self.0.agent(py)?;
        if let Some(name) = name
            && let Err(refused) = agent.name_region(&region, name)
        {
            blocking::run(py, |_| agent.unregister(&region))?;
            self.0.release(std::slice::from_ref(&region));
            return Err(error::exception(py, &refused));
        }
        Ok(Region::new(region, &self.0))
    }
}

fn pointer(addr: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(addr)
}
