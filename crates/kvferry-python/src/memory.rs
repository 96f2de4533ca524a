//! Registered memory: this agent's regions and those of peers.

use crate::error;
use crate::shared::Shared;
use kvferry::Access;
use kvferry_cuda::DeviceName;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Registered memory: this agent may read and write it, peers what its access allows.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Region {
    pub(crate) region: kvferry::Region,
    /// Keeps the agent alive.
    shared: Arc<Shared>,
}

impl Region {
    pub(crate) fn new(region: kvferry::Region, shared: &Arc<Shared>) -> Self {
        Self { region, shared: Arc::clone(shared) }
    }

    /// The agent that it is registered with.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Whether kvferry allocated the memory, which then lives as long as this object.
    fn is_owned(&self) -> bool {
        self.region.read_at(0, &mut []).is_ok()
    }

    fn must_be_owned(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_owned() {
            return Ok(());
        }
        Err(error::new(
            py,
            kvferry::ErrorKind::Unsupported,
            "only memory that kvferry allocated can be viewed; this region is a buffer of the caller",
        ))
    }
}

#[pymethods]
impl Region {
    /// Unique within this agent's incarnation.
    #[getter]
    fn id(&self) -> u32 {
        self.region.id().0
    }

    /// The name by which peers find it, or None.
    #[getter]
    fn name(&self) -> Option<&str> {
        self.region.name()
    }

    /// The address of its first byte in this process.
    #[getter]
    fn addr(&self) -> usize {
        self.region.addr()
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.region.len()
    }

    /// Operations that peers may do: "rw", "r", "w" or "none".
    #[getter]
    fn access(&self) -> String {
        self.region.access().to_string()
    }

    /// True until it is unregistered, or its agent is shut down.
    #[getter]
    fn is_registered(&self) -> bool {
        self.region.is_registered()
    }

    /// True if it was unregistered, and something may still touch its memory: a process of this host that
    /// does not answer, a copy of a device or a file, or what the thread that unregisters it waits for. Its
    /// memory must not be used for anything else.
    #[getter]
    fn is_quarantined(&self) -> bool {
        self.region.is_quarantined()
    }

    /// The description by which a peer names this region in its transfers.
    fn remote(&self) -> RemoteRegion {
        RemoteRegion(self.region.remote())
    }

    /// A writable memoryview, which keeps the memory alive. Only for memory that kvferry allocated.
    fn memory(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        let py = slf.py();
        let this = slf.get();
        this.must_be_owned(py)?;
        let view = py.import(intern!(py, "kvferry._buffers"))?.getattr(intern!(py, "view"))?;
        Ok(view.call1((this.region.addr(), this.region.len(), slf))?.unbind())
    }

    /// The interface that `numpy.asarray(region)` uses, which copies nothing. Only memory that kvferry
    /// allocated has it.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.must_be_owned(py)?;
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.region.len(),))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.region.addr(), false))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    /// Copies `data` into the memory at `offset`. Only for memory that kvferry allocated.
    fn write_at(&self, py: Python<'_>, offset: usize, data: &[u8]) -> PyResult<()> {
        self.region.write_at(offset, data).map_err(|e| error::exception(py, &e))
    }

    /// Copies `nbytes` bytes at `offset` out of the memory. Only for memory that kvferry allocated.
    fn read_at<'py>(
        &self,
        py: Python<'py>,
        offset: usize,
        nbytes: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        if nbytes > self.region.len() {
            // Before the bytes object is allocated: `nbytes` may be huge.
            return Err(error::new(
                py,
                kvferry::ErrorKind::OutOfBounds,
                "a range reaches beyond its region",
            ));
        }
        PyBytes::new_with(py, nbytes, |bytes| {
            self.region.read_at(offset, bytes).map_err(|e| error::exception(py, &e))
        })
    }

    fn __len__(&self) -> usize {
        self.region.len()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| {
            Arc::ptr_eq(&self.shared, &other.get().shared)
                && self.region.id() == other.get().region.id()
        })
    }

    fn __hash__(&self) -> u64 {
        hash(&(Arc::as_ptr(&self.shared) as usize, self.region.id().0))
    }

    fn __repr__(&self) -> String {
        format!(
            "<kvferry.Region {} {:#x}+{} {}{}>",
            self.region.id(),
            self.region.addr(),
            self.region.len(),
            self.region.access(),
            if self.region.is_registered() { "" } else { " unregistered" }
        )
    }
}

/// The description of a peer's region.
#[pyclass(frozen, module = "kvferry")]
#[derive(Clone)]
pub(crate) struct RemoteRegion(pub(crate) kvferry::RemoteRegion);

#[pymethods]
impl RemoteRegion {
    /// Decodes what `to_bytes` encoded.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        kvferry::RemoteRegion::from_bytes(data).map(Self).map_err(|e| error::exception(py, &e))
    }

    /// Encodes the description, to be sent to a peer by any means.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    /// The incarnation of the agent that owns the region, 32 hexadecimal digits.
    #[getter]
    fn incarnation(&self) -> String {
        self.0.incarnation.to_string()
    }

    /// The region's id at its owner.
    #[getter]
    fn id(&self) -> u32 {
        self.0.id.0
    }

    /// The address of its first byte in the owner's process.
    #[getter]
    fn addr(&self) -> u64 {
        self.0.addr
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len
    }

    /// Operations that this agent may do: "rw", "r", "w" or "none".
    #[getter]
    fn access(&self) -> String {
        self.0.access.to_string()
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let py = slf.py();
        let from_bytes = py.get_type::<Self>().getattr(intern!(py, "from_bytes"))?;
        Ok((from_bytes, PyTuple::new(py, [slf.get().to_bytes(py)])?))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| self.0 == other.get().0)
    }

    fn __hash__(&self) -> u64 {
        hash(&(self.0.incarnation, self.0.id))
    }

    fn __repr__(&self) -> String {
        format!(
            "<kvferry.RemoteRegion {} {:#x}+{} {} of {}>",
            self.0.id, self.0.addr, self.0.len, self.0.access, self.0.incarnation
        )
    }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Memory to be registered.
pub(crate) struct Span {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    /// The object that owns the memory; none for a bare address.
    pub(crate) hold: Option<Py<PyAny>>,
    pub(crate) place: Place,
}

/// Owner of memory to be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    /// A GPU: the one of this name, or the one that the driver says.
    Gpu(Option<DeviceName>),
}

impl Place {
    /// A number, "cuda", "cuda:1", a UUID, a PCI address or "cpu"; None for the host.
    pub(crate) fn of(device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(device) = device else { return Ok(Self::Host) };
        if let Ok(number) = device.extract::<i32>() {
            return Ok(Self::Gpu(Some(DeviceName::Ordinal(number))));
        }
        // torch.device, too.
        let text = device.str()?.to_string();
        let host = text.strip_prefix("cpu:").map_or(text == "cpu", |it| it.parse::<i32>().is_ok());
        match text.parse::<DeviceName>() {
            _ if host => Ok(Self::Host),
            _ if text == "cuda" => Ok(Self::Gpu(None)),
            Ok(name) => Ok(Self::Gpu(Some(name))),
            Err(_) => Err(PyValueError::new_err(format!(
                "device must be \"cpu\", \"cuda\", \"cuda:N\", a UUID (\"GPU-…\") or an address on the PCI bus \
                 (\"0000:1b:00.0\"), not {text:?}"
            ))),
        }
    }
}

impl Span {
    /// A pair `(address, length)` of memory in `place`, or an object that exports its memory and says where it is.
    pub(crate) fn of(obj: &Bound<'_, PyAny>, place: Place) -> PyResult<Self> {
        if obj.cast::<PyTuple>().is_ok() {
            let (addr, len) = obj.extract()?;
            return Ok(Self { addr, len, hold: None, place });
        }
        let py = obj.py();
        let span = py.import(intern!(py, "kvferry._buffers"))?.getattr(intern!(py, "span"))?;
        let (addr, len, hold, gpu) = span.call1((obj,))?.extract::<(_, _, _, Option<i32>)>()?;
        let own = match (gpu, place) {
            (None, _) => Place::Host,
            // The object does not say which: the driver does.
            (Some(..0), Place::Gpu(_)) => place,
            (Some(..0), Place::Host) => Place::Gpu(None),
            // The driver tells whether the GPU of that name has the object's number.
            (Some(_), Place::Gpu(Some(DeviceName::Uuid(_) | DeviceName::Pci(_)))) => place,
            (Some(number), _) => Place::Gpu(Some(DeviceName::Ordinal(number))),
        };
        let fits =
            place == Place::Host || place == own || (place == Place::Gpu(None) && gpu.is_some());
        if !fits {
            return Err(PyValueError::new_err("the object's memory is not on that device"));
        }
        Ok(Self { addr, len, hold: Some(hold), place: own })
    }
}

/// How much room to make for the items of a Python object that says that it has so many: what it says need not be true, and a
/// `range` may have more than there is memory for.
pub(crate) fn room(items: usize) -> usize {
    items.min(1 << 16)
}

pub(crate) fn parse_access(text: &str) -> PyResult<Access> {
    match text {
        "rw" | "wr" => Ok(Access::READ_WRITE),
        "r" => Ok(Access::READ),
        "w" => Ok(Access::WRITE),
        "none" | "" => Ok(Access::NONE),
        _ => Err(PyValueError::new_err(format!(
            "access must be \"rw\", \"r\", \"w\" or \"none\", not {text:?}"
        ))),
    }
}
