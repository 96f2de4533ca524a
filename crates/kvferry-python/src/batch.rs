//! Batches of descriptors, and the lists of numbers that Python gives for them.

use crate::error;
use crate::memory::{Region, RemoteRegion};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

/// What one transfer moves: pieces of local memory, each with its place at the peer. May be used
/// again and again.
#[pyclass(module = "kvferry")]
#[derive(Default)]
pub(crate) struct Batch(pub(crate) kvferry::Batch);

#[pymethods]
impl Batch {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Adds `nbytes` bytes of a local region and their place in a peer's region. Both ends are
    /// checked.
    fn push(
        &mut self,
        py: Python<'_>,
        local: &Bound<'_, Region>,
        local_offset: u64,
        remote: &Bound<'_, RemoteRegion>,
        remote_offset: u64,
        nbytes: u64,
    ) -> PyResult<()> {
        self.0
            .push(&local.get().region, local_offset, &remote.get().0, remote_offset, nbytes)
            .map_err(|e| error::exception(py, &e))
    }

    /// Adds `nbytes` bytes of a local region and their address in the peer's process. The local end
    /// is checked here, the other by the peer.
    fn push_to_address(
        &mut self,
        py: Python<'_>,
        local: &Bound<'_, Region>,
        local_offset: u64,
        remote_addr: u64,
        nbytes: u64,
    ) -> PyResult<()> {
        self.0
            .push_to_address(&local.get().region, local_offset, remote_addr, nbytes)
            .map_err(|e| error::exception(py, &e))
    }

    /// Adds one descriptor per element: offsets in a local region, offsets in a peer's region,
    /// lengths (or one length for all). Adds all or nothing.
    fn extend_regions(
        &mut self,
        local: &Bound<'_, Region>,
        local_offsets: &Bound<'_, PyAny>,
        remote: &Bound<'_, RemoteRegion>,
        remote_offsets: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = local.py();
        let columns = Columns::read(local_offsets, remote_offsets, nbytes)?;
        let (local, remote) = (&local.get().region, &remote.get().0);
        let mut extended = self.0.clone();
        for (local_offset, remote_offset, len) in columns.rows() {
            extended
                .push(local, local_offset, remote, remote_offset, len)
                .map_err(|e| error::exception(py, &e))?;
        }
        self.0 = extended;
        Ok(())
    }

    /// Adds one descriptor per element: local addresses, addresses in the peer's process, lengths
    /// (or one length for all). The local memory must stay valid until the transfer's outcome; the
    /// peer checks its end.
    fn extend(
        &mut self,
        local_addrs: &Bound<'_, PyAny>,
        remote_addrs: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        Columns::read(local_addrs, remote_addrs, nbytes)?.push_to(local_addrs.py(), &mut self.0)
    }

    /// Forgets all descriptors.
    fn clear(&mut self) {
        self.0.clear();
    }

    /// Bytes in all descriptors together.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.Batch {} descriptors, {} bytes>", self.0.len(), self.0.bytes())
    }
}

/// Three columns of one table: local, remote, length.
pub(crate) struct Columns {
    local: Vec<u64>,
    remote: Vec<u64>,
    lengths: Lengths,
}

enum Lengths {
    Each(Vec<u64>),
    All(u64),
}

impl Columns {
    /// Reads numbers or columns of them.
    pub(crate) fn read(
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = local.py();
        let lengths = match lengths.extract::<u64>() {
            Ok(one) => Lengths::All(one),
            Err(_) => Lengths::Each(column(lengths)?),
        };
        let (local, remote) = match (local.extract::<u64>(), remote.extract::<u64>()) {
            (Ok(local), Ok(remote)) => (vec![local], vec![remote]),
            _ => (column(local)?, column(remote)?),
        };
        let same = local.len() == remote.len()
            && match &lengths {
                Lengths::Each(each) => each.len() == local.len(),
                Lengths::All(_) => true,
            };
        if !same {
            return Err(error::invalid(py, "the local, remote and length lists differ in length"));
        }
        Ok(Self { local, remote, lengths })
    }

    fn rows(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let length = |i: usize| match &self.lengths {
            Lengths::Each(each) => each[i],
            Lengths::All(one) => *one,
        };
        self.local.iter().zip(&self.remote).enumerate().map(move |(i, (l, r))| (*l, *r, length(i)))
    }

    pub(crate) fn into_batch(self, py: Python<'_>) -> PyResult<kvferry::Batch> {
        let mut batch = kvferry::Batch::with_capacity(self.local.len());
        self.push_to(py, &mut batch)?;
        Ok(batch)
    }

    fn push_to(&self, py: Python<'_>, batch: &mut kvferry::Batch) -> PyResult<()> {
        for (local, remote, len) in self.rows() {
            let local = usize::try_from(local)
                .map_err(|_| PyValueError::new_err("a local address is beyond this machine's"))?;
            // SAFETY: that the memory is valid until the outcome is what the Python caller promises
            // by passing bare addresses, as with any pointer API of Python's; the documentation of
            // every such call says so.
            unsafe { batch.push_raw(std::ptr::with_exposed_provenance_mut(local), remote, len) }
                .map_err(|e| error::exception(py, &e))?;
        }
        Ok(())
    }
}

/// Numbers that fit 64 bits without a sign, from a list, a tuple, an array of 64-bit integers or
/// any other sequence.
pub(crate) fn column(obj: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(list) = obj.cast::<PyList>() {
        return list_column(list);
    }
    if let Ok(tuple) = obj.cast::<PyTuple>() {
        return tuple.iter_borrowed().map(|item| item.extract()).collect();
    }
    if let Some(memory) = integers(obj)? {
        return memory.to_vec(obj);
    }
    if obj.cast::<PyString>().is_ok() || obj.len().is_err() {
        // A string's or an iterator's elements are hardly meant.
        return Err(PyTypeError::new_err("expected a sequence of integers"));
    }
    obj.try_iter()?.map(|item| item?.extract()).collect()
}

/// The integers of a list. Block tables come this way, a thousand at a time, so it is worth going
/// around the reference count and the type check of each.
fn list_column(list: &Bound<'_, PyList>) -> PyResult<Vec<u64>> {
    let py = list.py();
    let len = list.len();
    let mut numbers = Vec::with_capacity(len);
    for at in 0..len {
        // SAFETY: we are attached to the interpreter, and `list` is a list. The item is borrowed from
        // it: nothing between the two calls lets other Python code run, which could take it out.
        // `PyLong_AsUnsignedLongLong` checks that it is an `int` and runs no code of the object's.
        let number = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), at.cast_signed());
            if item.is_null() {
                return Err(PyErr::fetch(py));
            }
            ffi::PyLong_AsUnsignedLongLong(item)
        };
        if number == u64::MAX && PyErr::take(py).is_some() {
            // Not an `int`, or not in range: the general way knows what else may be a number, and
            // what to say.
            numbers.push(list.get_item(at)?.extract()?);
        } else {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// 64-bit integers in memory.
struct Integers {
    addr: usize,
    len: usize,
    signed: bool,
}

/// Finds the memory of numpy's and `array`'s 64-bit integers, if `obj` is such a thing and lies in
/// one piece.
fn integers(obj: &Bound<'_, PyAny>) -> PyResult<Option<Integers>> {
    let py = obj.py();
    if let Some(interface) = obj.getattr_opt(intern!(py, "__array_interface__"))? {
        let typestr: String = interface.get_item("typestr")?.extract()?;
        let native = if cfg!(target_endian = "little") { '<' } else { '>' };
        let signed = match typestr.strip_prefix(native) {
            Some("u8") => false,
            Some("i8") => true,
            _ => return Ok(None),
        };
        let strided = interface.get_item("strides").is_ok_and(|strides| !strides.is_none());
        let Ok((len,)) = interface.get_item("shape")?.extract::<(usize,)>() else {
            return Ok(None);
        };
        let (addr, _read_only): (usize, bool) = interface.get_item("data")?.extract()?;
        return Ok((!strided).then_some(Integers { addr, len, signed }));
    }
    if let Some(info) = obj.getattr_opt(intern!(py, "buffer_info"))? {
        let typecode: String = obj.getattr(intern!(py, "typecode"))?.extract()?;
        let eight = obj.getattr(intern!(py, "itemsize"))?.extract::<usize>()? == 8;
        let signed = match typecode.as_str() {
            "Q" | "L" if eight => false,
            "q" | "l" if eight => true,
            _ => return Ok(None),
        };
        let (addr, len): (usize, usize) = info.call0()?.extract()?;
        return Ok(Some(Integers { addr, len, signed }));
    }
    Ok(None)
}

impl Integers {
    /// Copies the numbers out; `_owner` is what the memory belongs to.
    fn to_vec(&self, _owner: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
        if self.len == 0 {
            return Ok(Vec::new());
        }
        let mut numbers = vec![0_u64; self.len];
        let source: *const u8 = std::ptr::with_exposed_provenance(self.addr);
        // SAFETY: the array said a moment ago that `len` integers of 8 bytes lie there; it is alive
        // (`_owner`), and nothing can resize it while we are attached to the interpreter. Bytes are
        // copied, so alignment is no matter.
        unsafe {
            std::ptr::copy_nonoverlapping(source, numbers.as_mut_ptr().cast::<u8>(), self.len * 8);
        }
        if self.signed && numbers.iter().any(|n| n.cast_signed() < 0) {
            return Err(PyValueError::new_err("an address or length is negative"));
        }
        Ok(numbers)
    }
}
