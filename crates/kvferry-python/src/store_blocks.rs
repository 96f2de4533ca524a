//! The arguments of a store: hashes of blocks, and where their bytes are in memory.

use crate::batch::Column;
use crate::error;
use crate::memory::{Region, room};
use crate::shared::Shared;
use kvferry::ErrorKind;
use kvferry_store::BlockMemory;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use std::sync::Arc;

/// An argument that is a sequence of `bytes`. They are copied out, because the call that uses them is
/// detached from the interpreter.
pub(crate) struct Hashes {
    bytes: Vec<u8>,
    /// End of each hash in `bytes`.
    ends: Vec<usize>,
}

impl Hashes {
    pub(crate) fn slices(&self) -> Vec<&[u8]> {
        let mut begin = 0;
        let slice = |&end: &usize| &self.bytes[std::mem::replace(&mut begin, end)..end];
        self.ends.iter().map(slice).collect()
    }

    fn push(&mut self, item: &Bound<'_, PyAny>) -> PyResult<()> {
        let hash = item.cast::<PyBytes>().map_err(|_| {
            PyTypeError::new_err("expected a sequence of hashes, each of them bytes")
        })?;
        self.bytes.extend_from_slice(hash.as_bytes());
        self.ends.push(self.bytes.len());
        Ok(())
    }
}

impl FromPyObject<'_, '_> for Hashes {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let count = room(obj.len()?);
        let mut hashes =
            Self { bytes: Vec::with_capacity(count * 32), ends: Vec::with_capacity(count) };
        match obj.cast::<PyList>() {
            Ok(list) => list.iter().try_for_each(|item| hashes.push(&item))?,
            Err(_) => obj.try_iter()?.try_for_each(|item| hashes.push(&item?))?,
        }
        Ok(hashes)
    }
}

/// Where the bytes of blocks are in memory. May be used many times, as a batch.
#[pyclass(module = "kvferry")]
pub(crate) struct Blocks {
    memory: Arc<Vec<BlockMemory>>,
    agent: Arc<Shared>,
}

#[pymethods]
impl Blocks {
    /// One block per offset in a region, with these lengths (or one length for all).
    #[new]
    fn new(
        region: &Bound<'_, Region>,
        offsets: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = region.py();
        let region = region.get();
        let memory = ranges(region, offsets, nbytes)?
            .map(|range| add(py, BlockMemory::default(), region, range?))
            .collect::<PyResult<_>>()?;
        Ok(Self { memory: Arc::new(memory), agent: Arc::clone(region.shared()) })
    }

    /// Adds a piece to the end of each block: one offset per block, in this or another region of the
    /// same agent. Adds all or nothing.
    fn add_pieces(
        &mut self,
        region: &Bound<'_, Region>,
        offsets: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = region.py();
        let region = region.get();
        must_be_of(py, region, &self.agent)?;
        let ranges = ranges(region, offsets, nbytes)?;
        if ranges.len() != self.memory.len() {
            let (count, pieces) = (self.memory.len(), ranges.len());
            let what = format!("{pieces} pieces were given for {count} blocks");
            return Err(error::invalid(py, &what));
        }
        let longer = self.memory.iter().cloned().zip(ranges);
        let longer = longer.map(|(memory, range)| add(py, memory, region, range?));
        self.memory = Arc::new(longer.collect::<PyResult<_>>()?);
        Ok(())
    }

    /// The sum of the lengths.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.memory.iter().map(BlockMemory::len).fold(0, u64::saturating_add)
    }

    fn __len__(&self) -> usize {
        self.memory.len()
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.Blocks {} blocks, {} bytes>", self.memory.len(), self.nbytes())
    }
}

/// An argument that is a `Blocks`, or a sequence with one item per block: `(region, offset, nbytes)`, or
/// a sequence of these. The regions must be of the store's agent.
pub(crate) fn memory_of(
    obj: &Bound<'_, PyAny>,
    agent: &Arc<Shared>,
) -> PyResult<Arc<Vec<BlockMemory>>> {
    let py = obj.py();
    if let Ok(blocks) = obj.cast::<Blocks>() {
        let blocks = blocks.try_borrow()?;
        must_be_same(py, &blocks.agent, agent)?;
        return Ok(Arc::clone(&blocks.memory));
    }
    let mut memory = Vec::with_capacity(room(obj.len()?));
    for block in obj.try_iter()? {
        let block = block?;
        memory.push(match as_piece(&block) {
            Some(piece) => add_piece(BlockMemory::default(), &piece, agent)?,
            None => block.try_iter()?.try_fold(BlockMemory::default(), |memory, piece| {
                let piece = piece?;
                let piece = as_piece(&piece).ok_or_else(|| {
                    PyTypeError::new_err(
                        "the memory of a block must be (region, offset, nbytes), or a sequence of these",
                    )
                })?;
                add_piece(memory, &piece, agent)
            })?,
        });
    }
    Ok(Arc::new(memory))
}

/// A tuple of three that begins with a region.
fn as_piece<'py>(obj: &Bound<'py, PyAny>) -> Option<Bound<'py, PyTuple>> {
    let tuple = obj.cast::<PyTuple>().ok()?;
    let begins = tuple.get_item(0).is_ok_and(|first| first.is_instance_of::<Region>());
    (begins && tuple.len() == 3).then(|| tuple.clone())
}

fn add_piece(
    memory: BlockMemory,
    piece: &Bound<'_, PyTuple>,
    agent: &Arc<Shared>,
) -> PyResult<BlockMemory> {
    let py = piece.py();
    let (region, offset, nbytes): (Bound<'_, Region>, u64, u64) = piece.extract()?;
    must_be_of(py, region.get(), agent)?;
    add(py, memory, region.get(), (offset, nbytes))
}

/// Adds a range of a region to a block.
fn add(
    py: Python<'_>,
    memory: BlockMemory,
    region: &Region,
    (offset, nbytes): (u64, u64),
) -> PyResult<BlockMemory> {
    let end = offset.checked_add(nbytes);
    if end.is_none_or(|end| end > region.region.len() as u64) {
        return Err(error::new(
            py,
            ErrorKind::OutOfBounds,
            "a block's range reaches beyond its region",
        ));
    }
    Ok(memory.and(&region.region, offset, nbytes))
}

/// Offsets, each with its length. The caller checks the bounds.
fn ranges<'py>(
    region: &Region,
    offsets: &Bound<'py, PyAny>,
    nbytes: &Bound<'py, PyAny>,
) -> PyResult<impl ExactSizeIterator<Item = PyResult<(u64, u64)>> + use<'py>> {
    let py = offsets.py();
    region.shared().agent(py)?;
    let (offsets, nbytes) = (Column::or_number(offsets)?, Column::or_number(nbytes)?);
    if !matches!(nbytes, Column::Same(_)) && nbytes.len() != offsets.len() {
        return Err(error::invalid(py, "the offset and length lists differ in length"));
    }
    Ok((0..offsets.len()).map(move |at| Ok((offsets.get(at)?, nbytes.get(at)?))))
}

fn must_be_of(py: Python<'_>, region: &Region, agent: &Arc<Shared>) -> PyResult<()> {
    must_be_same(py, region.shared(), agent)
}

fn must_be_same(py: Python<'_>, one: &Arc<Shared>, other: &Arc<Shared>) -> PyResult<()> {
    if Arc::ptr_eq(one, other) {
        return Ok(());
    }
    Err(error::invalid(py, "the memory of blocks must be regions of one agent, the store's"))
}
