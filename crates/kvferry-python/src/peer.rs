//! Peers, and what transfers and sessions report.

use crate::batch::{Batch, Table};
use crate::blocking::{self, seconds};
use crate::error;
use crate::memory::RemoteRegion;
use crate::notification::Notice;
use crate::order::Orders;
use crate::shared::Shared;
use crate::transfer::{Transfer, TransferStats};
use kvferry::Options;
use kvferry_mooncake::interrupt::Interrupt;
use kvferry_sys::host::LoadedDriver;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;
use std::time::Duration;

/// Another agent, by its address.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Peer {
    peer: kvferry::Peer,
    shared: Arc<Shared>,
}

impl Peer {
    pub(crate) fn new(peer: kvferry::Peer, shared: &Arc<Shared>) -> Self {
        Self { peer, shared: Arc::clone(shared) }
    }

    fn limit(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Duration>> {
        self.shared.agent(py)?;
        timeout.map(|timeout| seconds(py, timeout)).transpose()
    }
}

/// The keywords of a transfer: `timeout`, `notify`, `streams`, `after`.
#[derive(Default)]
struct Settings {
    timeout: Option<Duration>,
    notify: Option<kvferry::Notification>,
    streams: Option<usize>,
    after: Orders,
}

impl FromPyObject<'_, '_> for Settings {
    type Error = PyErr;

    fn extract(keywords: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let py = keywords.py();
        let mut settings = Self::default();
        for (name, value) in keywords.cast::<PyDict>()?.iter() {
            let name = name.extract::<String>()?;
            let unusable = |e| argument_error(py, &name, e);
            match name.as_str() {
                "timeout" => {
                    let timeout: Option<f64> = value.extract().map_err(unusable)?;
                    settings.timeout = timeout.map(|timeout| seconds(py, timeout)).transpose()?;
                }
                "notify" => {
                    let notify: Option<Notice> = value.extract().map_err(unusable)?;
                    settings.notify = notify.map(|notice| notice.0);
                }
                "streams" => {
                    settings.streams = value.extract().map_err(unusable)?;
                    if settings.streams == Some(0) {
                        return Err(error::invalid(py, "a transfer needs at least one stream"));
                    }
                }
                "after" => settings.after = Orders::read(&value)?,
                unknown => {
                    return Err(PyTypeError::new_err(format!(
                        "unexpected keyword argument {unknown:?}"
                    )));
                }
            }
        }
        Ok(settings)
    }
}

/// Names the argument in a `TypeError`.
fn argument_error(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyTypeError>(py) {
        return PyTypeError::new_err(format!("argument '{name}': {}", error.value(py)));
    }
    error
}

impl Settings {
    fn into_options(self, interrupt: Option<Interrupt<'_>>) -> Options<'_> {
        let Self { timeout, notify, streams, after: _ } = self;
        Options { timeout, notify, interrupt, streams }
    }
}

/// Reads the batch of a transfer: a copy of the caller's, or one of three lists.
fn read_batch(
    first: &Bound<'_, PyAny>,
    remote: Option<&Bound<'_, PyAny>>,
    lengths: Option<&Bound<'_, PyAny>>,
) -> PyResult<kvferry::Batch> {
    match (first.cast::<Batch>(), remote, lengths) {
        (Ok(batch), None, None) => Ok(batch.try_borrow()?.0.clone()),
        (Err(_), Some(remote), Some(lengths)) => {
            Table::read(first, remote, lengths)?.into_batch(first.py())
        }
        _ => Err(PyTypeError::new_err(
            "a transfer takes a kvferry.Batch, or three lists: local addresses, remote addresses, lengths",
        )),
    }
}

/// Has the transfer come after this work, if the batch has memory of a GPU.
fn order(
    py: Python<'_>,
    peer: &kvferry::Peer,
    batch: &mut kvferry::Batch,
    after: &Orders,
) -> PyResult<()> {
    if LoadedDriver::find().is_some() {
        // Detached: a call of the driver may wait for one that itself waits for the interpreter.
        py.detach(|| peer.find_device_memory(batch)).map_err(|e| {
            let text = format!("{e}: a kvferry.Batch names memory of a GPU by its region");
            error::new(py, e.kind(), &text)
        })?;
    }
    after.apply(py, batch)
}

impl Peer {
    fn run(
        &self,
        py: Python<'_>,
        batch: PyResult<kvferry::Batch>,
        settings: Option<Settings>,
        call: fn(&kvferry::Peer, &kvferry::Batch, &Options<'_>) -> Outcome,
    ) -> PyResult<TransferStats> {
        self.shared.agent(py)?;
        let mut batch = batch?;
        let mut settings = settings.unwrap_or_default();
        let after = self.shared.after(std::mem::take(&mut settings.after));
        order(py, &self.peer, &mut batch, &after)?;
        // The batch is dropped while detached, because the driver destroys the events of its edges. The caller may change
        // its own batch meanwhile.
        let peer = &self.peer;
        blocking::run(py, move |interrupt| {
            call(peer, &batch, &settings.into_options(Some(interrupt)))
        })
        .map(TransferStats)
    }

    fn submit(
        &self,
        py: Python<'_>,
        batch: PyResult<kvferry::Batch>,
        settings: Option<Settings>,
        call: fn(&kvferry::Peer, &kvferry::Batch, &Options<'_>) -> kvferry::Transfer,
    ) -> PyResult<Transfer> {
        self.shared.agent(py)?;
        let mut batch = batch?;
        let mut settings = settings.unwrap_or_default();
        let after = self.shared.after(std::mem::take(&mut settings.after));
        order(py, &self.peer, &mut batch, &after)?;
        let options = settings.into_options(None);
        let peer = &self.peer;
        let transfer = py.detach(move || call(peer, &batch, &options));
        Ok(Transfer::new(transfer, &self.shared))
    }
}

type Outcome = Result<kvferry::TransferStats, kvferry::Error>;

#[pymethods]
impl Peer {
    /// The address that `Agent.peer` was given.
    #[getter]
    fn address(&self) -> &str {
        self.peer.address()
    }

    /// The transport of the live session ("tcp", "local", "mooncake"), or None without a session.
    #[getter]
    fn transport(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.shared.agent(py)?;
        Ok(self.peer.transport().map(kvferry::TransportKind::as_str))
    }

    /// Connects to the peer now instead of at the first transfer. `timeout` is in seconds.
    #[pyo3(signature = (timeout = None))]
    fn connect(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<PeerSummary> {
        let limit = self.limit(py, timeout)?;
        let peer = self.peer.clone();
        blocking::run_on_own_thread(py, move || peer.connect(limit)).map(PeerSummary)
    }

    /// The regions that the peer lets this agent reach. `timeout` is in seconds.
    #[pyo3(signature = (timeout = None))]
    fn regions(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Vec<RemoteRegion>> {
        let limit = self.limit(py, timeout)?;
        let peer = self.peer.clone();
        let regions = blocking::run_on_own_thread(py, move || peer.regions(limit))?;
        Ok(regions.into_iter().map(RemoteRegion).collect())
    }

    /// The peer's region of that name. `timeout` is in seconds.
    #[pyo3(signature = (name, timeout = None))]
    fn region(&self, py: Python<'_>, name: String, timeout: Option<f64>) -> PyResult<RemoteRegion> {
        let limit = self.limit(py, timeout)?;
        let peer = self.peer.clone();
        blocking::run_on_own_thread(py, move || peer.region(&name, limit)).map(RemoteRegion)
    }

    /// The round-trip time to the peer, in seconds. `timeout` is in seconds.
    #[pyo3(signature = (timeout = None))]
    fn probe(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<f64> {
        let limit = self.limit(py, timeout)?;
        let peer = self.peer.clone();
        Ok(blocking::run_on_own_thread(py, move || peer.probe(limit))?.as_secs_f64())
    }

    /// Writes local memory to the peer and returns when it is there.
    ///
    /// Takes a Batch, or three lists: local addresses, addresses in the peer's process, lengths in
    /// bytes (a single length may stand for all). Bare addresses must stay valid during the call.
    /// `timeout` is in seconds; without it the agent's applies. The peer gets `notify` after the
    /// data. `streams` limits the connections that the transfer uses. `after` says what the transfer comes
    /// after where local memory is a GPU's: a stream or an event of torch, cupy or cuda.core, a handle of a
    /// stream, a list of these, or "host" if the caller has waited for what uses the memory.
    #[pyo3(
        signature = (what, remote_addrs = None, nbytes = None, **settings),
        text_signature = "($self, what, remote_addrs=None, nbytes=None, *, timeout=None, notify=None, streams=None, after=None)"
    )]
    fn write(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        remote_addrs: Option<&Bound<'_, PyAny>>,
        nbytes: Option<&Bound<'_, PyAny>>,
        settings: Option<Settings>,
    ) -> PyResult<TransferStats> {
        self.run(py, read_batch(what, remote_addrs, nbytes), settings, kvferry::Peer::write)
    }

    /// Reads the peer's memory into local memory and returns when it is there. Takes what `write`
    /// takes.
    #[pyo3(
        signature = (what, remote_addrs = None, nbytes = None, **settings),
        text_signature = "($self, what, remote_addrs=None, nbytes=None, *, timeout=None, notify=None, streams=None, after=None)"
    )]
    fn read(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        remote_addrs: Option<&Bound<'_, PyAny>>,
        nbytes: Option<&Bound<'_, PyAny>>,
        settings: Option<Settings>,
    ) -> PyResult<TransferStats> {
        self.run(py, read_batch(what, remote_addrs, nbytes), settings, kvferry::Peer::read)
    }

    /// Starts a write in the background. Never blocks; errors of the transfer are its outcome. Bare
    /// addresses must stay valid until then. Takes what `write` takes.
    #[pyo3(
        signature = (what, remote_addrs = None, nbytes = None, **settings),
        text_signature = "($self, what, remote_addrs=None, nbytes=None, *, timeout=None, notify=None, streams=None, after=None)"
    )]
    fn write_async(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        remote_addrs: Option<&Bound<'_, PyAny>>,
        nbytes: Option<&Bound<'_, PyAny>>,
        settings: Option<Settings>,
    ) -> PyResult<Transfer> {
        self.submit(
            py,
            read_batch(what, remote_addrs, nbytes),
            settings,
            kvferry::Peer::write_async,
        )
    }

    /// Starts a read in the background. See `write_async`.
    #[pyo3(
        signature = (what, remote_addrs = None, nbytes = None, **settings),
        text_signature = "($self, what, remote_addrs=None, nbytes=None, *, timeout=None, notify=None, streams=None, after=None)"
    )]
    fn read_async(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        remote_addrs: Option<&Bound<'_, PyAny>>,
        nbytes: Option<&Bound<'_, PyAny>>,
        settings: Option<Settings>,
    ) -> PyResult<Transfer> {
        self.submit(py, read_batch(what, remote_addrs, nbytes), settings, kvferry::Peer::read_async)
    }

    /// Sends a notification without data. `timeout` is in seconds.
    #[pyo3(signature = (notification, *, timeout = None))]
    fn notify(&self, py: Python<'_>, notification: Notice, timeout: Option<f64>) -> PyResult<()> {
        let timeout = self.limit(py, timeout)?;
        blocking::run(py, |interrupt| {
            let options = Options { timeout, interrupt: Some(interrupt), ..Options::default() };
            self.peer.notify(notification.0, &options)
        })
    }

    /// Ends the session, if there is one. The next call connects again.
    fn disconnect(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.agent(py)?;
        py.detach(|| self.peer.disconnect());
        Ok(())
    }

    fn __repr__(&self) -> String {
        match self.peer.transport() {
            Some(kind) => format!("<kvferry.Peer {} over {kind}>", self.peer.address()),
            None => format!("<kvferry.Peer {}>", self.peer.address()),
        }
    }
}

/// Properties of a connection that the handshake established.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct PeerSummary(kvferry::PeerSummary);

#[pymethods]
impl PeerSummary {
    /// The name that the peer gave itself.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// 32 hexadecimal digits, drawn when the peer's agent started; None for stock Mooncake peers.
    #[getter]
    fn incarnation(&self) -> Option<String> {
        self.0.incarnation.map(|incarnation| incarnation.to_string())
    }

    /// "tcp", "local" or "mooncake".
    #[getter]
    fn transport(&self) -> &'static str {
        self.0.transport.as_str()
    }

    /// Why the peer, or memory that a transfer named, is not reached by the fastest transport within one host; None if it is.
    #[getter]
    fn fallback(&self) -> Option<&str> {
        self.0.fallback.as_deref()
    }

    /// The version of kvferry's protocol; 0 for stock Mooncake peers.
    #[getter]
    fn version(&self) -> u16 {
        self.0.version
    }

    /// True if both ends proved that they have the secret.
    #[getter]
    fn authenticated(&self) -> bool {
        self.0.authenticated
    }

    /// True if payload carries checksums.
    #[getter]
    fn checksum(&self) -> bool {
        self.0.checksum
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.PeerSummary {:?} over {}>", self.0.name, self.0.transport)
    }
}
