//! Peers, and what is known about them and their transfers.

use crate::agent::{Shared, seconds};
use crate::aside::Interrupt;
use crate::batch::{Batch, Columns};
use crate::blocking;
use crate::error;
use crate::memory::RemoteRegion;
use crate::notification::Notice;
use crate::transfer::Transfer;
use kvferry::Options;
use pyo3::prelude::*;
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

    fn limit(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Duration> {
        let agent = self.shared.agent(py)?;
        timeout.map_or_else(
            || Ok(Duration::from_millis(agent.config().timeout_ms)),
            |timeout| seconds(py, timeout),
        )
    }
}

/// The settings of one call.
struct Terms {
    timeout: Option<Duration>,
    notify: Option<kvferry::Notification>,
    streams: Option<usize>,
}

impl Terms {
    fn read(
        py: Python<'_>,
        timeout: Option<f64>,
        notify: Option<Notice>,
        streams: Option<usize>,
    ) -> PyResult<Self> {
        if streams == Some(0) {
            return Err(error::invalid(py, "a transfer needs at least one stream"));
        }
        Ok(Self {
            timeout: timeout.map(|timeout| seconds(py, timeout)).transpose()?,
            notify: notify.map(|notice| notice.0),
            streams,
        })
    }

    fn into_options(self, interrupt: Option<Interrupt<'_>>) -> Options<'_> {
        let Self { timeout, notify, streams } = self;
        Options { timeout, notify, interrupt, streams }
    }
}

/// The two ways to say what is moved: a batch, or three lists.
enum Work<'py> {
    Batch(PyRef<'py, Batch>),
    Lists(kvferry::Batch),
}

impl<'py> Work<'py> {
    fn read(
        first: &Bound<'py, PyAny>,
        remote: Option<&Bound<'py, PyAny>>,
        lengths: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        match (first.cast::<Batch>(), remote, lengths) {
            (Ok(batch), None, None) => Ok(Self::Batch(batch.try_borrow()?)),
            (Err(_), Some(remote), Some(lengths)) => {
                Columns::read(first, remote, lengths)?.into_batch(first.py()).map(Self::Lists)
            }
            _ => Err(pyo3::exceptions::PyTypeError::new_err(
                "what to move is a kvferry.Batch, or three lists: local addresses, remote addresses, lengths",
            )),
        }
    }

    fn batch(&self) -> &kvferry::Batch {
        match self {
            Self::Batch(batch) => &batch.0,
            Self::Lists(batch) => batch,
        }
    }

    fn into_batch(self) -> kvferry::Batch {
        match self {
            Self::Batch(batch) => batch.0.clone(),
            Self::Lists(batch) => batch,
        }
    }
}

#[pymethods]
impl Peer {
    /// The address it was asked for by.
    #[getter]
    fn address(&self) -> &str {
        self.peer.address()
    }

    /// How bytes move in the live session ("tcp", "mooncake"), or None if there is none.
    #[getter]
    fn transport(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.shared.agent(py)?;
        Ok(self.peer.transport().map(kvferry::TransportKind::as_str))
    }

    /// Meets the peer now instead of at the first transfer.
    #[pyo3(signature = (timeout = None))]
    fn connect(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<PeerSummary> {
        let limit = self.limit(py, timeout)?;
        let peer = self.peer.clone();
        blocking::run_aside(py, move || peer.connect(limit)).map(PeerSummary)
    }

    /// What the peer lets us reach.
    #[pyo3(signature = (timeout = None))]
    fn regions(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Vec<RemoteRegion>> {
        let limit = self.limit(py, timeout)?;
        let peer = self.peer.clone();
        let regions = blocking::run_aside(py, move || peer.regions(limit))?;
        Ok(regions.into_iter().map(RemoteRegion).collect())
    }

    /// Asks the peer for a sign of life and returns the seconds it took.
    #[pyo3(signature = (timeout = None))]
    fn probe(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<f64> {
        let limit = self.limit(py, timeout)?;
        let peer = self.peer.clone();
        Ok(blocking::run_aside(py, move || peer.probe(limit))?.as_secs_f64())
    }

    /// Writes local memory to the peer and returns when it is there.
    ///
    /// What to move is a Batch, or three lists: local addresses, addresses in the peer's process,
    /// lengths (a single length may stand for all). Bare addresses must stay valid during the call.
    #[pyo3(signature = (what, remote_addrs = None, nbytes = None, *, timeout = None, notify = None, streams = None))]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn write(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        remote_addrs: Option<&Bound<'_, PyAny>>,
        nbytes: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        notify: Option<Notice>,
        streams: Option<usize>,
    ) -> PyResult<Moved> {
        self.shared.agent(py)?;
        let work = Work::read(what, remote_addrs, nbytes)?;
        let terms = Terms::read(py, timeout, notify, streams)?;
        let (peer, batch) = (&self.peer, work.batch());
        blocking::run(py, |interrupt| peer.write(batch, &terms.into_options(Some(interrupt))))
            .map(Moved)
    }

    /// Reads the peer's memory into local memory and returns when it is there. Takes what `write`
    /// takes.
    #[pyo3(signature = (what, remote_addrs = None, nbytes = None, *, timeout = None, notify = None, streams = None))]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn read(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        remote_addrs: Option<&Bound<'_, PyAny>>,
        nbytes: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        notify: Option<Notice>,
        streams: Option<usize>,
    ) -> PyResult<Moved> {
        self.shared.agent(py)?;
        let work = Work::read(what, remote_addrs, nbytes)?;
        let terms = Terms::read(py, timeout, notify, streams)?;
        let (peer, batch) = (&self.peer, work.batch());
        blocking::run(py, |interrupt| peer.read(batch, &terms.into_options(Some(interrupt))))
            .map(Moved)
    }

    /// Starts a write in the background. Never blocks; what goes wrong is the transfer's outcome.
    /// Bare addresses must stay valid until then.
    #[pyo3(signature = (what, remote_addrs = None, nbytes = None, *, timeout = None, notify = None, streams = None))]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn write_async(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        remote_addrs: Option<&Bound<'_, PyAny>>,
        nbytes: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        notify: Option<Notice>,
        streams: Option<usize>,
    ) -> PyResult<Transfer> {
        self.shared.agent(py)?;
        let batch = Work::read(what, remote_addrs, nbytes)?.into_batch();
        let options = Terms::read(py, timeout, notify, streams)?.into_options(None);
        let transfer = py.detach(|| self.peer.write_async(batch, options));
        Ok(Transfer::new(transfer, &self.shared))
    }

    /// Starts a read in the background. See `write_async`.
    #[pyo3(signature = (what, remote_addrs = None, nbytes = None, *, timeout = None, notify = None, streams = None))]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of the Python call")]
    fn read_async(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        remote_addrs: Option<&Bound<'_, PyAny>>,
        nbytes: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        notify: Option<Notice>,
        streams: Option<usize>,
    ) -> PyResult<Transfer> {
        self.shared.agent(py)?;
        let batch = Work::read(what, remote_addrs, nbytes)?.into_batch();
        let options = Terms::read(py, timeout, notify, streams)?.into_options(None);
        let transfer = py.detach(|| self.peer.read_async(batch, options));
        Ok(Transfer::new(transfer, &self.shared))
    }

    /// Sends a notification that follows no data.
    #[pyo3(signature = (notification, *, timeout = None))]
    fn notify(&self, py: Python<'_>, notification: Notice, timeout: Option<f64>) -> PyResult<()> {
        self.shared.agent(py)?;
        let terms = Terms::read(py, timeout, None, None)?;
        let peer = &self.peer;
        blocking::run(py, |interrupt| {
            peer.notify(notification.0, &terms.into_options(Some(interrupt)))
        })
    }

    /// Ends the session, if there is one. The next call meets the peer anew.
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

/// What a transfer moved.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Moved(pub(crate) kvferry::Moved);

#[pymethods]
impl Moved {
    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes
    }

    /// Descriptors.
    #[getter]
    fn descriptors(&self) -> usize {
        self.0.descriptors
    }

    /// Connections that took part.
    #[getter]
    fn streams(&self) -> usize {
        self.0.streams
    }

    /// How: "tcp", "local", "mooncake"; None if there was nothing to move.
    #[getter]
    fn transport(&self) -> Option<&'static str> {
        self.0.transport.map(kvferry::TransportKind::as_str)
    }

    fn __repr__(&self) -> String {
        let kvferry::Moved { bytes, descriptors, streams, .. } = self.0;
        let transport = self.transport().unwrap_or("none");
        format!(
            "<kvferry.Moved {bytes} bytes in {descriptors} descriptors over {streams} streams of \
             {transport}>"
        )
    }
}

/// What a peer said of itself when it was met.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct PeerSummary(kvferry::PeerSummary);

#[pymethods]
impl PeerSummary {
    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// Its life, 32 hexadecimal digits; None for stock Mooncake peers.
    #[getter]
    fn incarnation(&self) -> Option<String> {
        self.0.incarnation.map(|incarnation| incarnation.to_string())
    }

    /// How bytes move: "tcp", "local", "mooncake".
    #[getter]
    fn transport(&self) -> &'static str {
        self.0.transport.as_str()
    }

    /// Why bytes do not go the fastest way within one host, in words; None if they do.
    #[getter]
    fn fallback(&self) -> Option<&str> {
        self.0.fallback.as_deref()
    }

    /// The protocol's version; 0 for stock Mooncake peers.
    #[getter]
    fn version(&self) -> u16 {
        self.0.version
    }

    /// Whether both ends proved that they know the secret.
    #[getter]
    fn authenticated(&self) -> bool {
        self.0.authenticated
    }

    /// Whether payload carries checksums.
    #[getter]
    fn checksum(&self) -> bool {
        self.0.checksum
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.PeerSummary {:?} over {}>", self.0.name, self.0.transport)
    }
}
