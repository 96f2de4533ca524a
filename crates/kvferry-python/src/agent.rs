//! The agent, and what keeps it and the buffers registered with it alive.

use crate::blocking::{self, Stop, lock};
use crate::error;
use crate::memory::{Offer, Region, parse_access};
use crate::notification::Notification;
use crate::peer::Peer;
use kvferry::{Checksum, Config, ErrorKind, SecretString};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A kvferry endpoint in this process: owns regions, sessions and transfers.
///
/// What is not given here comes from the environment (KVFERRY_LISTEN, KVFERRY_SECRET, …), then from
/// the defaults. The agent ends with `shutdown()`, with the `with` block, or with the last object
/// that came from it.
#[pyclass(frozen, weakref, module = "kvferry")]
pub(crate) struct Agent(Arc<Shared>);

/// The core's agent, and the Python buffers that it may touch.
pub(crate) struct Shared {
    agent: kvferry::Agent,
    /// By region id. Only ever locked for a moment by threads that are attached to the interpreter,
    /// or by `stop`.
    holds: Mutex<HashMap<u32, Py<PyAny>>>,
    pid: u32,
}

impl Shared {
    /// The agent, unless this process was forked from the one that started it.
    pub(crate) fn agent(&self, py: Python<'_>) -> PyResult<&kvferry::Agent> {
        if std::process::id() == self.pid {
            return Ok(&self.agent);
        }
        Err(error::new(
            py,
            ErrorKind::Forked,
            "this process was forked from the one that started the agent; start another here",
        ))
    }
}

impl Stop for Shared {
    fn stop(&self) {
        if std::process::id() == self.pid {
            self.agent.shutdown();
        }
    }
}

impl Shared {
    /// Lets go of all buffers, after the agent was shut down.
    fn let_go(&self) {
        let released = std::mem::take(&mut *lock(&self.holds));
        if self.agent.stats().regions_quarantined == 0 {
            drop(released);
        } else {
            // A process that does not answer may still write to them: they stay, for good.
            std::mem::forget(released);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The holds go only after no copier can touch their memory any more. Whoever drops the last
        // handle may be attached to the interpreter, and joining threads is no time to be.
        let stop = || self.stop();
        if Python::try_attach(|py| py.detach(stop)).is_none() {
            self.stop();
        }
        self.let_go();
    }
}

/// Seconds of Python, which may have a fraction.
pub(crate) fn seconds(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    /// Beyond any deadline that anyone waits for, and well within the clock's range.
    const LONGEST: f64 = 10.0 * 365.0 * 86_400.0;
    if seconds.is_nan() || seconds < 0.0 {
        return Err(error::invalid(py, &format!("{seconds} is no number of seconds to wait")));
    }
    Ok(Duration::from_secs_f64(seconds.min(LONGEST)))
}

fn milliseconds(py: Python<'_>, value: f64) -> PyResult<u64> {
    let rounded_up = seconds(py, value)?.as_nanos().div_ceil(1_000_000);
    u64::try_from(rounded_up).map_err(|_| error::invalid(py, "too many seconds"))
}

/// Reads a checksum setting: a word or a boolean.
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
            &format!("checksum is \"auto\", \"on\" or \"off\", not {other:?}"),
        )),
    }
}

fn parse_transports(obj: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(text) = obj.cast::<PyString>() {
        return Ok(text.to_str()?.to_owned());
    }
    Ok(obj.extract::<Vec<String>>()?.join(","))
}

fn parse_secret(obj: &Bound<'_, PyAny>) -> PyResult<SecretString> {
    if let Ok(text) = obj.cast::<PyString>() {
        return Ok(SecretString::new(text.to_str()?.as_bytes()));
    }
    if let Ok(bytes) = obj.cast::<PyBytes>() {
        return Ok(SecretString::new(bytes.as_bytes()));
    }
    // The value itself must not end up in a message.
    Err(PyTypeError::new_err("a secret is bytes or text"))
}

#[pymethods]
impl Agent {
    #[new]
    #[pyo3(signature = (
        name = None, *, listen = None, advertise = None, secret = None, transports = None, checksum = None,
        silence = None, timeout = None, streams_per_peer = None, io_threads = None, mooncake = None,
        ptracer_any = None
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
            config.transports = Some(parse_transports(transports)?);
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
        config.mooncake = mooncake.unwrap_or(config.mooncake);
        config.ptracer_any = ptracer_any.unwrap_or(config.ptracer_any);

        let agent = blocking::run(py, |_| kvferry::Agent::start(config))?;
        let shared = Arc::new(Shared { agent, holds: Mutex::default(), pid: std::process::id() });
        blocking::stop_at_exit(py, &shared);
        Ok(Self(shared))
    }

    /// The agent's name, for people and notifications.
    #[getter]
    fn name(&self) -> &str {
        self.0.agent.name()
    }

    /// This life of the agent, 32 hexadecimal digits. A restarted agent is another peer.
    #[getter]
    fn incarnation(&self) -> String {
        self.0.agent.incarnation().to_string()
    }

    /// The address it listens on, `(host, port)`.
    #[getter]
    fn local_address(&self) -> (String, u16) {
        let addr = self.0.agent.local_addr();
        (addr.ip().to_string(), addr.port())
    }

    /// The address to give to peers, "host:port".
    #[getter]
    fn address(&self) -> &str {
        self.0.agent.advertised()
    }

    /// The settings in force, without the secret.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("json")?.call_method1("loads", (self.0.agent.config().to_json(),))
    }

    /// Registers memory that peers may then reach as far as `access` says: "rw", "r", "w" or
    /// "none".
    ///
    /// `buffer` is an object with writable memory in one piece (bytearray, memoryview, numpy array,
    /// torch tensor on the CPU, …), which is held until the region is unregistered, or a pair
    /// `(address, nbytes)` of memory that stays valid until then.
    #[pyo3(signature = (buffer, access = "rw"))]
    fn register(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        access: &str,
    ) -> PyResult<Region> {
        let agent = self.0.agent(py)?;
        let access = parse_access(access)?;
        let offer = Offer::of(buffer)?;
        // SAFETY: `hold` keeps a Python buffer's memory until the region is unregistered or the
        // agent is down; for a bare address the Python caller promises it.
        let region = unsafe { agent.register(pointer(offer.addr), offer.len, access) }
            .map_err(|e| error::exception(py, &e))?;
        if let Some(hold) = offer.hold {
            lock(&self.0.holds).insert(region.id().0, hold);
        }
        Ok(Region::new(region, &self.0))
    }

    /// Registers many pieces of memory at once, all or none.
    #[pyo3(signature = (buffers, access = "rw"))]
    fn register_batch(
        &self,
        py: Python<'_>,
        buffers: Vec<Bound<'_, PyAny>>,
        access: &str,
    ) -> PyResult<Vec<Region>> {
        let agent = self.0.agent(py)?;
        let access = parse_access(access)?;
        let offers = buffers.iter().map(Offer::of).collect::<PyResult<Vec<_>>>()?;
        let ranges: Vec<_> = offers.iter().map(|o| (pointer(o.addr), o.len)).collect();
        // SAFETY: as for `register`.
        let regions = unsafe { agent.register_batch(&ranges, access) }
            .map_err(|e| error::exception(py, &e))?;
        let mut holds = lock(&self.0.holds);
        for (region, offer) in regions.iter().zip(offers) {
            if let Some(hold) = offer.hold {
                holds.insert(region.id().0, hold);
            }
        }
        drop(holds);
        Ok(regions.into_iter().map(|region| Region::new(region, &self.0)).collect())
    }

    /// Allocates zeroed memory and registers it. It lives as long as the region object, or a view
    /// of it.
    #[pyo3(signature = (nbytes, access = "rw"))]
    fn allocate(&self, py: Python<'_>, nbytes: usize, access: &str) -> PyResult<Region> {
        let agent = self.0.agent(py)?;
        let access = parse_access(access)?;
        let region = blocking::run(py, |_| agent.allocate(nbytes, access))?;
        Ok(Region::new(region, &self.0))
    }

    /// Takes a region out. When this returns, no peer and no transfer of this agent touches its
    /// memory any more, and its buffer is no longer held.
    fn unregister(&self, py: Python<'_>, region: &Bound<'_, Region>) -> PyResult<()> {
        let agent = self.0.agent(py)?;
        let region = &region.get().region;
        blocking::run(py, |_| agent.unregister(region))?;
        self.release(std::slice::from_ref(region));
        Ok(())
    }

    /// Takes many regions out, each even if another fails; raises the first failure.
    fn unregister_batch(&self, py: Python<'_>, regions: Vec<Bound<'_, Region>>) -> PyResult<()> {
        let agent = self.0.agent(py)?;
        let regions: Vec<_> = regions.iter().map(|region| region.get().region.clone()).collect();
        let result = blocking::run(py, |_| agent.unregister_batch(&regions));
        self.release(&regions);
        result
    }

    /// The registered regions, in the order of registration.
    fn regions(&self, py: Python<'_>) -> PyResult<Vec<Region>> {
        let regions = self.0.agent(py)?.regions();
        Ok(regions.into_iter().map(|region| Region::new(region, &self.0)).collect())
    }

    /// The peer at "host:port". Nothing is sent yet.
    fn peer(&self, py: Python<'_>, address: String) -> PyResult<Peer> {
        let agent = self.0.agent(py)?;
        let peer = if address.parse::<std::net::SocketAddr>().is_ok() {
            agent.peer(&address).map_err(|e| error::exception(py, &e))?
        } else {
            // A name server may take its time.
            let agent = agent.clone();
            blocking::run_aside(py, move || agent.peer(&address))?
        };
        Ok(Peer::new(peer, &self.0))
    }

    /// The notifications that have arrived, which are thereby taken.
    fn notifications(&self, py: Python<'_>) -> PyResult<Vec<Notification>> {
        Ok(self.0.agent(py)?.notifications().into_iter().map(Notification).collect())
    }

    /// Waits for a notification and takes it; None if none came within `timeout` seconds.
    #[pyo3(signature = (timeout = None))]
    fn wait_notification(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Notification>> {
        let agent = self.0.agent(py)?;
        let timeout = timeout.map(|timeout| seconds(py, timeout)).transpose()?;
        let found = blocking::wait(py, timeout, |slice| agent.wait_notification(slice))?;
        Ok(found.map(Notification))
    }

    /// A file descriptor that is readable while notifications are waiting. It belongs to the agent:
    /// do not close it.
    fn notification_fd(&self, py: Python<'_>) -> PyResult<i32> {
        let fd = self.0.agent(py)?.notification_fd();
        fd.map(|fd| fd.as_raw_fd()).map_err(|e| error::exception(py, &e))
    }

    /// The agent's counters since it started, by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = serde_json::to_value(self.0.agent(py)?.stats())
            .map_err(|e| error::new(py, ErrorKind::Internal, &e.to_string()))?;
        let counters = PyDict::new(py);
        for (name, value) in stats.as_object().into_iter().flatten() {
            counters.set_item(name, value.as_u64())?;
        }
        Ok(counters)
    }

    /// Ends sessions, transfers and threads. Whatever is called afterwards raises ShutdownError; a
    /// second shutdown does nothing.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        let agent = self.0.agent(py)?;
        py.detach(|| agent.shutdown());
        self.0.let_go();
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
        if std::process::id() == self.0.pid { self.shutdown(py) } else { Ok(()) }
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.Agent {:?} at {}>", self.0.agent.name(), self.0.agent.advertised())
    }
}

impl Agent {
    /// Lets go of the buffers of regions that are no longer registered.
    fn release(&self, regions: &[kvferry::Region]) {
        let mut released = Vec::new();
        let mut holds = lock(&self.0.holds);
        let ours = |region: &&kvferry::Region| {
            let ended = !region.is_registered() && !region.is_quarantined();
            region.remote().incarnation == self.0.agent.incarnation() && ended
        };
        for region in regions.iter().filter(ours) {
            released.extend(holds.remove(&region.id().0));
        }
        drop(holds);
        // Only now: a buffer's end may run any Python code, which may come back here.
        drop(released);
    }
}

fn pointer(addr: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(addr)
}
