//! Batches of descriptors, and reading them from lists of numbers.

use crate::error;
use crate::memory::{Region, RemoteRegion};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

/// The descriptors of one transfer: pieces of local memory, each with its place at the peer. A batch
/// may be used many times.
#[pyclass(module = "kvferry")]
#[derive(Default)]
pub(crate) struct Batch(pub(crate) kvferry::Batch);

#[pymethods]
impl Batch {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Adds `nbytes` bytes of a local region and their place in a peer's region. Checks the bounds of
    /// both.
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

    /// Adds `nbytes` bytes of a local region and their address in the peer's process. Checks the local
    /// bounds; the peer checks its address.
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

    /// Adds one descriptor per row: offsets in a local region, offsets in a peer's region,
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
        let table = Table::read(local_offsets, remote_offsets, nbytes)?;
        table.must_be_even(py)?;
        let (local, remote) = (&local.get().region, &remote.get().0);
        let mut extended = self.0.clone();
        for row in table.rows() {
            let (local_offset, remote_offset, len) = row?;
            extended
                .push(local, local_offset, remote, remote_offset, len)
                .map_err(|e| error::exception(py, &e))?;
        }
        self.0 = extended;
        Ok(())
    }

    /// Adds one descriptor per row: local addresses, addresses in the peer's process, lengths
    /// (or one length for all). The local memory must stay valid until the transfer's outcome; the
    /// peer checks its end.
    fn extend(
        &mut self,
        local_addrs: &Bound<'_, PyAny>,
        remote_addrs: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        Table::read(local_addrs, remote_addrs, nbytes)?.push_to(local_addrs.py(), &mut self.0)
    }

    /// Removes all descriptors.
    fn clear(&mut self) {
        self.0.clear();
    }

    /// The sum of the lengths.
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

/// Local addresses (or offsets), remote addresses (or offsets) and lengths, one row per descriptor.
///
/// The numbers of lists stay Python objects until a row is read: a list of 1 024 is the usual
/// argument of an engine, and one pass over three lists costs less than three copies.
pub(crate) struct Table<'py> {
    local: Column<'py>,
    remote: Column<'py>,
    lengths: Column<'py>,
    rows: usize,
}

/// The reason why a table can't become a batch.
pub(crate) enum TableError {
    /// An element is no integer of 64 bits without a sign.
    Number(PyErr),
    /// The core refuses a row.
    Row(kvferry::Error),
}

impl From<kvferry::Error> for TableError {
    fn from(error: kvferry::Error) -> Self {
        Self::Row(error)
    }
}

impl TableError {
    fn into_exception(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Number(error) => error,
            Self::Row(error) => error::exception(py, &error),
        }
    }
}

impl<'py> Table<'py> {
    /// Takes sequences of numbers; a single number for all three or for the lengths only will do.
    pub(crate) fn read(
        local: &Bound<'py, PyAny>,
        remote: &Bound<'py, PyAny>,
        lengths: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let lengths = Column::or_number(lengths)?;
        let (local, remote) = (Column::or_number(local)?, Column::or_number(remote)?);
        let is_number = |column: &Column<'_>| matches!(column, Column::Same(_));
        if is_number(&local) != is_number(&remote) {
            return Err(PyTypeError::new_err(
                "expected two sequences of integers, or two integers",
            ));
        }
        let rows = local.len();
        Ok(Self { local, remote, lengths, rows })
    }

    /// Takes sequences of numbers only.
    pub(crate) fn of_sequences(columns: [&Bound<'py, PyAny>; 3]) -> PyResult<Self> {
        let [local, remote, lengths] = columns.map(Column::read);
        let (local, remote, lengths) = (local?, remote?, lengths?);
        let rows = local.len();
        Ok(Self { local, remote, lengths, rows })
    }

    /// True if the columns have the same number of rows.
    pub(crate) fn is_even(&self) -> bool {
        [&self.local, &self.remote, &self.lengths].into_iter().all(|column| match column {
            Column::Same(_) => true,
            column => column.len() == self.rows,
        })
    }

    fn must_be_even(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_even() {
            return Ok(());
        }
        Err(error::invalid(py, "the local, remote and length lists differ in length"))
    }

    fn rows(&self) -> impl Iterator<Item = PyResult<(u64, u64, u64)>> {
        (0..self.rows)
            .map(|at| Ok((self.local.get(at)?, self.remote.get(at)?, self.lengths.get(at)?)))
    }

    /// Reads all numbers of a table whose columns may differ in length, for their errors.
    pub(crate) fn check_numbers(&self) -> PyResult<()> {
        let mut columns = [&self.local, &self.remote, &self.lengths].into_iter();
        columns.try_for_each(|column| (0..column.len()).try_for_each(|at| column.get(at).map(drop)))
    }

    pub(crate) fn into_batch(self, py: Python<'_>) -> PyResult<kvferry::Batch> {
        let mut batch = kvferry::Batch::new();
        self.push_to(py, &mut batch)?;
        Ok(batch)
    }

    fn push_to(&self, py: Python<'_>, batch: &mut kvferry::Batch) -> PyResult<()> {
        self.must_be_even(py)?;
        self.push_addresses(batch, |_| true).map_err(|error| error.into_exception(py))
    }

    /// Adds the rows for which `keep` is true of the length. The columns must have the same length.
    pub(crate) fn push_addresses(
        &self,
        batch: &mut kvferry::Batch,
        keep: impl Fn(u64) -> bool,
    ) -> Result<(), TableError> {
        let rows = self.rows().filter(|row| !matches!(row, Ok((.., len)) if !keep(*len)));
        let rows = rows.map(|row| {
            let (local, remote, len) = row.map_err(TableError::Number)?;
            let local = usize::try_from(local).map_err(|_| {
                TableError::Number(PyValueError::new_err("a local address exceeds this machine's"))
            })?;
            Ok((std::ptr::with_exposed_provenance_mut(local), remote, len))
        });
        // SAFETY: the Python caller promises that the memory is valid until the outcome, as with
        // any API of Python that takes addresses; the documentation of every such call says so.
        unsafe { batch.extend_raw(rows) }
    }
}

/// A column of a [`Table`].
pub(crate) enum Column<'py> {
    List(Bound<'py, PyList>),
    Numbers(Vec<u64>),
    /// The same number in every row.
    Same(u64),
}

impl<'py> Column<'py> {
    fn read(obj: &Bound<'py, PyAny>) -> PyResult<Self> {
        match obj.cast::<PyList>() {
            Ok(list) => Ok(Self::List(list.clone())),
            Err(_) => numbers(obj).map(Self::Numbers),
        }
    }

    pub(crate) fn or_number(obj: &Bound<'py, PyAny>) -> PyResult<Self> {
        if obj.cast::<PyList>().is_err()
            && let Ok(number) = obj.extract()
        {
            return Ok(Self::Same(number));
        }
        Self::read(obj)
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Numbers(numbers) => numbers.len(),
            Self::Same(_) => 1,
        }
    }

    #[inline]
    pub(crate) fn get(&self, at: usize) -> PyResult<u64> {
        match self {
            Self::List(list) => list_item(list, at),
            Self::Numbers(numbers) => Ok(numbers[at]),
            Self::Same(number) => Ok(*number),
        }
    }
}

/// Numbers that fit 64 bits without a sign, from a list, a tuple, an array of 64-bit integers or
/// any other sequence.
pub(crate) fn numbers(obj: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(list) = obj.cast::<PyList>() {
        return (0..list.len()).map(|at| list_item(list, at)).collect();
    }
    if let Ok(tuple) = obj.cast::<PyTuple>() {
        return tuple.iter_borrowed().map(|item| item.extract()).collect();
    }
    if let Some(memory) = integers(obj)? {
        return memory.to_vec(obj);
    }
    if obj.cast::<PyString>().is_ok() || obj.len().is_err() {
        // The elements of a string or an iterator are hardly meant.
        return Err(PyTypeError::new_err("expected a sequence of integers"));
    }
    obj.try_iter()?.map(|item| item?.extract()).collect()
}

/// An integer of a list, without counting a reference to it: lists of addresses come a thousand at
/// a time.
#[inline]
fn list_item(list: &Bound<'_, PyList>, at: usize) -> PyResult<u64> {
    // SAFETY: we are attached to the interpreter, and `list` is a list. The item is borrowed from
    // it: no other Python code runs between the two calls that could take it out.
    // `PyLong_AsSize_t` checks that it is an `int` and runs no code of the object's.
    let number = unsafe {
        let item = ffi::PyList_GetItem(list.as_ptr(), at.cast_signed());
        if item.is_null() {
            return Err(PyErr::fetch(list.py()));
        }
        // On these machines as wide as an address, and several times faster than
        // `PyLong_AsUnsignedLongLong` in Python 3.10 to 3.12.
        ffi::PyLong_AsSize_t(item)
    };
    if number == usize::MAX && PyErr::take(list.py()).is_some() {
        // Not an `int`, or out of range: the general way converts what else is a number, and
        // raises what fits.
        return list.get_item(at)?.extract();
    }
    Ok(number as u64)
}

/// 64-bit integers in memory.
struct Integers {
    addr: usize,
    len: usize,
    signed: bool,
}

/// The memory of a contiguous array of 64-bit integers, by numpy or `array`; `None` for any other
/// object.
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
    /// Copies the numbers out. `_owner` owns the memory.
    fn to_vec(&self, _owner: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
        if self.len == 0 {
            return Ok(Vec::new());
        }
        let mut numbers = vec![0_u64; self.len];
        let source: *const u8 = std::ptr::with_exposed_provenance(self.addr);
        // SAFETY: the array gave this address and `len` integers of 8 bytes a moment ago; it is alive
        // (`_owner`), and nothing can resize it while we are attached to the interpreter. The copy
        // is by bytes, so alignment does not matter.
        unsafe {
            std::ptr::copy_nonoverlapping(source, numbers.as_mut_ptr().cast::<u8>(), self.len * 8);
        }
        if self.signed && numbers.iter().any(|n| n.cast_signed() < 0) {
            return Err(PyValueError::new_err("an address or length is negative"));
        }
        Ok(numbers)
    }
}
