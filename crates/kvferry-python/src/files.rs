//! Files: regions of files, and moving batches between memory and them.

use crate::batch::Batch;
use crate::blocking::{self, seconds};
use crate::error;
use crate::memory::RemoteRegion;
use crate::order::Orders;
use crate::shared::Shared;
use crate::transfer::{Transfer, TransferStats};
use kvferry::{DirectIo, FileOptions, Options};
use pyo3::prelude::*;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) fn parse_direct(py: Python<'_>, text: &str) -> PyResult<DirectIo> {
    match text {
        "auto" => Ok(DirectIo::Auto),
        "off" => Ok(DirectIo::Off),
        "require" => Ok(DirectIo::Require),
        other => Err(error::invalid(
            py,
            &format!("direct must be \"auto\", \"off\" or \"require\", not {other:?}"),
        )),
    }
}

/// The keywords with which a file is opened.
pub(crate) struct Opening<'a> {
    pub(crate) access: &'a str,
    pub(crate) create: bool,
    pub(crate) offset: u64,
    pub(crate) nbytes: Option<u64>,
    pub(crate) direct: &'a str,
}

impl Opening<'_> {
    fn options(&self, py: Python<'_>) -> PyResult<FileOptions> {
        let options = match (self.access, self.create, self.nbytes) {
            ("r", false, _) => FileOptions::read_only(),
            ("rw", false, _) => FileOptions::read_write(),
            ("rw", true, Some(nbytes)) => FileOptions::create(nbytes),
            ("r" | "rw", true, _) => {
                return Err(error::invalid(py, "create needs access \"rw\" and nbytes"));
            }
            (other, ..) => {
                let what = format!("access must be \"r\" or \"rw\", not {other:?}");
                return Err(error::invalid(py, &what));
            }
        };
        let options = match (self.nbytes, self.offset) {
            (Some(nbytes), offset) => options.range(offset, nbytes),
            (None, 0) => options,
            (None, _) => return Err(error::invalid(py, "an offset needs nbytes")),
        };
        Ok(options.direct(parse_direct(py, self.direct)?))
    }
}

/// Opens a file for `Agent.open_file`.
pub(crate) fn open(
    py: Python<'_>,
    shared: &Arc<Shared>,
    path: PathBuf,
    opening: &Opening<'_>,
) -> PyResult<FileRegion> {
    let agent = shared.agent(py)?;
    let options = opening.options(py)?;
    let file = blocking::run(py, |_| agent.open_file(&path, &options))?;
    Ok(FileRegion { file, shared: Arc::clone(shared) })
}

/// Duplicates a descriptor for `Agent.register_file`.
pub(crate) fn adopt(
    py: Python<'_>,
    shared: &Arc<Shared>,
    fd: i32,
    opening: &Opening<'_>,
) -> PyResult<FileRegion> {
    let agent = shared.agent(py)?;
    let options = opening.options(py)?;
    if fd < 0 {
        return Err(error::invalid(py, &format!("a descriptor can't be {fd}")));
    }
    // SAFETY: borrowed for this call only, in which the caller keeps it open; a number that is no
    // descriptor makes the duplication fail.
    let ours = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
    let file = blocking::run(py, |_| agent.register_file(ours, &options))?;
    Ok(FileRegion { file, shared: Arc::clone(shared) })
}

/// A range of a file of this host.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct FileRegion {
    file: kvferry::FileRegion,
    /// Keeps the agent alive.
    shared: Arc<Shared>,
}

#[pymethods]
impl FileRegion {
    /// Unique among the regions of this agent's incarnation.
    #[getter]
    fn id(&self) -> u32 {
        self.file.id().0
    }

    /// The file's path; "descriptor N" if it was made from a descriptor.
    #[getter]
    fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    /// Length of the range in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.file.len()
    }

    /// True if aligned ranges go past the page cache.
    #[getter]
    fn is_direct(&self) -> bool {
        self.file.is_direct()
    }

    /// The region as the remote side of a batch.
    fn remote(&self) -> RemoteRegion {
        RemoteRegion(self.file.remote())
    }

    /// Returns when everything that was written before is on the device. Transfers never wait for that.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.agent(py)?;
        let file = self.file.clone();
        blocking::run_on_own_thread(py, move || file.sync())
    }

    /// Closes it: later transfers refuse it. Those that have begun keep the file open until they end.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let agent = self.shared.agent(py)?;
        agent.close_file(&self.file).map_err(|e| error::exception(py, &e))
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.FileRegion {} {} bytes>", self.file.path().display(), self.file.len())
    }
}

/// The files of an agent.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Files {
    files: kvferry::Files,
    shared: Arc<Shared>,
}

/// The batch, with the edges of `after`.
fn ordered(
    shared: &Shared,
    batch: &Bound<'_, Batch>,
    after: Option<&Bound<'_, PyAny>>,
) -> PyResult<kvferry::Batch> {
    let named = after.map(Orders::read).transpose()?.unwrap_or_default();
    let mut batch_of_call = batch.try_borrow()?.0.clone();
    shared.after(named).apply(batch.py(), &mut batch_of_call)?;
    Ok(batch_of_call)
}

type Call = fn(&kvferry::Files, &kvferry::Batch, &Options<'_>) -> Outcome;
type Outcome = Result<kvferry::TransferStats, kvferry::Error>;

impl Files {
    pub(crate) fn of(py: Python<'_>, shared: &Arc<Shared>) -> PyResult<Self> {
        Ok(Self { files: shared.agent(py)?.files(), shared: Arc::clone(shared) })
    }

    fn run(
        &self,
        batch: &Bound<'_, Batch>,
        timeout: Option<f64>,
        after: Option<&Bound<'_, PyAny>>,
        call: Call,
    ) -> PyResult<TransferStats> {
        let py = batch.py();
        self.shared.agent(py)?;
        let timeout = timeout.map(|timeout| seconds(py, timeout)).transpose()?;
        let batch = ordered(&self.shared, batch, after)?;
        blocking::run(py, |interrupt| {
            let options = Options { timeout, interrupt: Some(interrupt), ..Options::default() };
            call(&self.files, &batch, &options)
        })
        .map(TransferStats)
    }

    fn submit(
        &self,
        batch: &Bound<'_, Batch>,
        timeout: Option<f64>,
        after: Option<&Bound<'_, PyAny>>,
        call: fn(&kvferry::Files, &kvferry::Batch, &Options<'_>) -> kvferry::Transfer,
    ) -> PyResult<Transfer> {
        let py = batch.py();
        self.shared.agent(py)?;
        let timeout = timeout.map(|timeout| seconds(py, timeout)).transpose()?;
        let batch = ordered(&self.shared, batch, after)?;
        let options = Options { timeout, ..Options::default() };
        Ok(Transfer::new(py.detach(|| call(&self.files, &batch, &options)), &self.shared))
    }
}

#[pymethods]
impl Files {
    /// How files are read and written: "uring", or "posix" and why it is not "uring". None before the
    /// first file was opened.
    #[getter]
    fn engine(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.shared.agent(py)?;
        Ok(self.files.engine())
    }

    /// Writes memory to files (offload) and returns when every reader of the files sees it. `timeout` is
    /// in seconds; without it the agent's applies. `after` is as for `Peer.write`.
    #[pyo3(signature = (batch, *, timeout = None, after = None))]
    fn write(
        &self,
        batch: &Bound<'_, Batch>,
        timeout: Option<f64>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<TransferStats> {
        self.run(batch, timeout, after, kvferry::Files::write)
    }

    /// Reads files into memory (onboard) and returns when it is there.
    #[pyo3(signature = (batch, *, timeout = None, after = None))]
    fn read(
        &self,
        batch: &Bound<'_, Batch>,
        timeout: Option<f64>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<TransferStats> {
        self.run(batch, timeout, after, kvferry::Files::read)
    }

    /// Starts a write in the background. Errors are its outcome.
    #[pyo3(signature = (batch, *, timeout = None, after = None))]
    fn write_async(
        &self,
        batch: &Bound<'_, Batch>,
        timeout: Option<f64>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        self.submit(batch, timeout, after, kvferry::Files::write_async)
    }

    /// Starts a read in the background. Errors are its outcome.
    #[pyo3(signature = (batch, *, timeout = None, after = None))]
    fn read_async(
        &self,
        batch: &Bound<'_, Batch>,
        timeout: Option<f64>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        self.submit(batch, timeout, after, kvferry::Files::read_async)
    }
}
