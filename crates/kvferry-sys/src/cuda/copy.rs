//! Copies and fills, in the order of a stream.
//!
//! Host and device addresses share one space: the driver finds out the direction. Host memory that is not
//! registered may be copied before the call returns.

use super::abi::*;
use super::error::{Error, Result};
use super::load::{Driver, call};
use super::stream::Stream;
use std::fmt;

/// When the driver may read the sources of a batch. Destinations are always written in the stream's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceOrder {
    /// The driver reads them after the stream's earlier work.
    Stream,
    /// The driver has read them when the call returns.
    DuringCall,
    /// The driver reads them at any time until the copy has run, even before the stream's earlier work.
    Any,
}

/// Form of the batch call that the driver has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchCall {
    /// The form of CUDA 12.8, which reports the first copy that failed.
    V1,
    /// The form of CUDA 13.0, which does not report it.
    V2,
}

/// Copies that one call gives to the driver, in no order among themselves.
#[derive(Clone, Debug, Default)]
pub struct CopyBatch {
    to: Vec<u64>,
    from: Vec<u64>,
    len: Vec<usize>,
}

impl CopyBatch {
    /// An empty batch with room for `n` copies.
    pub fn with_capacity(n: usize) -> Self {
        Self { to: Vec::with_capacity(n), from: Vec::with_capacity(n), len: Vec::with_capacity(n) }
    }

    /// Adds a copy of `len` bytes, at least one.
    pub fn push(&mut self, to: u64, from: u64, len: usize) {
        self.to.push(to);
        self.from.push(from);
        self.len.push(len);
    }

    /// Removes all copies and keeps the room.
    pub fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.len.clear();
    }

    /// Number of copies.
    pub fn len(&self) -> usize {
        self.len.len()
    }

    /// Whether there is no copy.
    pub fn is_empty(&self) -> bool {
        self.len.is_empty()
    }

    /// The copies as (to, from, bytes).
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64, usize)> {
        let addresses = self.to.iter().zip(&self.from);
        addresses.zip(&self.len).map(|((&to, &from), &len)| (to, from, len))
    }
}

impl Extend<(u64, u64, usize)> for CopyBatch {
    fn extend<I: IntoIterator<Item = (u64, u64, usize)>>(&mut self, copies: I) {
        copies.into_iter().for_each(|(to, from, len)| self.push(to, from, len));
    }
}

impl FromIterator<(u64, u64, usize)> for CopyBatch {
    fn from_iter<I: IntoIterator<Item = (u64, u64, usize)>>(copies: I) -> Self {
        let mut batch = Self::default();
        batch.extend(copies);
        batch
    }
}

/// A batch that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchError {
    /// What went wrong.
    pub error: Error,
    /// Index of the first copy that failed, if the driver says so.
    pub failed_at: Option<usize>,
    /// The driver was called: any of the copies may run. Otherwise none does.
    pub started: bool,
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.failed_at {
            Some(index) => write!(f, "copy {index} of a batch: {}", self.error),
            None => write!(f, "a batch of copies: {}", self.error),
        }
    }
}

impl std::error::Error for BatchError {}

impl Driver {
    /// The form of the batch call that [`copy_batch`] uses; `None` with a driver before CUDA 12.8.
    pub fn batch_call(&self) -> Option<BatchCall> {
        let table = self.table();
        if table.memcpy_batch_v2.function.is_some() {
            Some(BatchCall::V2)
        } else {
            table.memcpy_batch_v1.function.map(|_| BatchCall::V1)
        }
    }
}

/// Copies `len` bytes after the stream's earlier work.
///
/// # Errors
/// If the driver refuses, or in a forked child. If the driver was called, the copy may run nevertheless.
///
/// # Safety
/// Until an event recorded on the stream after this call is reached, or the stream is synchronised, both
/// ranges stay allocated and, on the host, mapped; nothing else writes them; nothing reads the destination.
/// That holds after an error of the driver, too.
pub unsafe fn copy_async(stream: &Stream, to: u64, from: u64, len: usize) -> Result<()> {
    let _entered = stream.context().enter()?;
    // SAFETY: the caller promised that both ranges are valid until the copy has run.
    unsafe { call!(stream.context().driver(), memcpy(to, from, len, stream.handle())) }
}

/// Gives the driver all copies of a batch with one call, after the stream's earlier work. They run in no
/// order, so none may overlap another's destination.
///
/// # Errors
/// [`Error::NotSupported`] with a driver before CUDA 12.8; if the driver refuses, or in a forked child.
/// See [`BatchError::started`] for what may run nevertheless.
///
/// # Safety
/// What [`copy_async`] requires, of each copy. With [`SourceOrder::Any`] nothing writes the sources from before
/// this call on, on the host or on a stream. `batch` stays unchanged until the copies have run: the driver
/// does not promise to have read the lists when the call returns.
pub unsafe fn copy_batch(
    stream: &Stream,
    batch: &CopyBatch,
    order: SourceOrder,
) -> std::result::Result<(), BatchError> {
    let not_started = |error| BatchError { error, failed_at: None, started: false };
    if batch.is_empty() {
        return Ok(());
    }
    let driver = stream.context().driver();
    let call = driver.batch_call().ok_or(not_started(Error::NotSupported("cuMemcpyBatchAsync")))?;
    let _entered = stream.context().enter().map_err(not_started)?;
    // One attribute covers all copies: both lists of attributes have one entry.
    let mut attributes = CUmemcpyAttributes {
        src_access_order: match order {
            SourceOrder::Stream => CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            SourceOrder::DuringCall => CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL,
            SourceOrder::Any => CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
        },
        ..CUmemcpyAttributes::default()
    };
    let mut first_copy = 0;
    let mut failed_at = usize::MAX;
    // The driver's lists are `const` in all but their type.
    let (to, from) = (batch.to.as_ptr().cast_mut(), batch.from.as_ptr().cast_mut());
    let (len, count) = (batch.len.as_ptr().cast_mut(), batch.len());
    let attributes = &raw mut attributes;
    let first_copy = &raw mut first_copy;
    // SAFETY: the lists have `count` entries, and one entry; the caller promised that all ranges are valid
    // until the copies have run.
    let done = unsafe {
        match call {
            BatchCall::V1 => call!(
                driver,
                memcpy_batch_v1(
                    to,
                    from,
                    len,
                    count,
                    attributes,
                    first_copy,
                    1,
                    &raw mut failed_at,
                    stream.handle()
                )
            ),
            BatchCall::V2 => call!(
                driver,
                memcpy_batch_v2(to, from, len, count, attributes, first_copy, 1, stream.handle())
            ),
        }
    };
    done.map_err(|error| BatchError {
        failed_at: (failed_at < count).then_some(failed_at),
        started: matches!(error, Error::Driver(_)),
        error,
    })
}

/// Fills device memory with a byte after the stream's earlier work.
///
/// # Errors
/// If the driver refuses, or in a forked child.
///
/// # Safety
/// What [`copy_async`] requires of a destination.
pub unsafe fn fill_async(stream: &Stream, to: u64, byte: u8, len: usize) -> Result<()> {
    let _entered = stream.context().enter()?;
    // SAFETY: the caller promised that the range is valid until the fill has run.
    unsafe { call!(stream.context().driver(), memset(to, byte, len, stream.handle())) }
}
