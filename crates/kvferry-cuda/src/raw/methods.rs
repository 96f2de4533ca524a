//! The ways to copy a table.

use super::buffers::{Buffers, Kernel};
use super::table::{CALLS, Table};
use crate::error::Error;
use crate::job::{Direction, Job};
use kvferry_sys::cuda::{self, Driver, Grid, SourceOrder, Stream, copy_async, copy_batch, launch};
use std::ops::Range;
use std::time::{Duration, Instant};

/// A way to copy a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `cuMemcpyAsync` for each piece.
    Single,
    /// `cuMemcpyBatchAsync` in calls of 128 copies (index 0), of 512 (1), or in one call for all (2).
    Batch(usize),
    /// A kernel on mapped host memory: its number, and the most blocks of a launch.
    Kernel(usize, u32),
    /// A kernel inside the device, with the same values, and copies of contiguous bytes of up to 16 MiB between the
    /// device's staging and the host.
    Gather(usize, u32),
}

impl Method {
    /// The name of the method, for a table's head.
    pub fn name(self, buffers: &Buffers) -> String {
        let kernel = |kernel| match buffers.kernel_name(kernel) {
            crate::ptx::ENTRY => "kernel".to_owned(),
            entry => entry.to_owned(),
        };
        match self {
            Self::Single => "single".into(),
            Self::Batch(index) if CALLS[index] == usize::MAX => "batch all".into(),
            Self::Batch(index) => format!("batch {}", CALLS[index]),
            Self::Kernel(at, blocks) => format!("{} {blocks}", kernel(at)),
            Self::Gather(at, _) if buffers.kernel_name(at) == crate::ptx::ENTRY => "gather".into(),
            Self::Gather(at, _) => format!("gather {}", kernel(at)),
        }
    }
}

/// The methods that the driver has without kernels.
///
/// # Errors
/// If the driver can't be used.
pub fn supported() -> Result<Vec<Method>, Error> {
    let batches = Driver::get()?.batch_call().map(|_| (0..CALLS.len()).map(Method::Batch));
    Ok(std::iter::once(Method::Single).chain(batches.into_iter().flatten()).collect())
}

impl Buffers {
    /// Copies a table, and waits. Returns the time from the first call on.
    ///
    /// # Errors
    /// If the driver refuses, or a copy fails.
    ///
    /// # Panics
    /// If there is no such kernel.
    pub fn copy(&self, table: &Table, method: Method) -> Result<Duration, Error> {
        let _current = self.context.enter()?;
        let began = Instant::now();
        let submitted = self.submit(table, method);
        let ended = self.wait();
        let took = began.elapsed();
        submitted.and(ended)?;
        Ok(took)
    }

    /// Gives the copies of a table to the driver, and waits. Returns the time of the calls, without the wait.
    ///
    /// # Errors
    /// If the driver refuses, or a copy fails.
    ///
    /// # Panics
    /// If there is no such kernel.
    pub fn submit_time(
        &self,
        table: &Table,
        method: Method,
        clock: fn() -> Duration,
    ) -> Result<Duration, Error> {
        let _current = self.context.enter()?;
        let before = clock();
        let submitted = self.submit(table, method);
        let took = clock().saturating_sub(before);
        submitted.and(self.wait())?;
        Ok(took)
    }

    /// Copies the first `bytes` of the device memory out, and as many behind them in, at the same time: to the first bytes
    /// of the host memory, and from those behind them.
    ///
    /// # Errors
    /// If the driver refuses, or a copy fails.
    ///
    /// # Panics
    /// If either memory has fewer than twice as many bytes.
    pub fn copy_both_ways(&self, bytes: usize) -> Result<Duration, Error> {
        assert!(2 * bytes <= self.device_len() && 2 * bytes <= self.host_len(), "too many bytes");
        let _current = self.context.enter()?;
        let (device, host) = (self.device.address(), self.host.address());
        let next = bytes as u64;
        let began = Instant::now();
        // SAFETY: four ranges of the buffers that do not overlap, and both streams are waited for below.
        let submitted = unsafe {
            copy_async(&self.out, host, device, bytes)
                .and_then(|()| copy_async(&self.into, device + next, host + next, bytes))
        };
        let ended = self.wait();
        let took = began.elapsed();
        submitted.and(ended)?;
        Ok(took)
    }

    /// Waits for all streams. If the driver reports an error, the context is lost: nothing of it runs any more.
    fn wait(&self) -> cuda::Result<()> {
        let streams = [&self.out, &self.into, &self.kernels];
        streams.map(Stream::synchronize).into_iter().collect()
    }

    fn submit(&self, table: &Table, method: Method) -> cuda::Result<()> {
        let stream = match table.direction {
            Direction::Out => &self.out,
            Direction::In => &self.into,
        };
        match method {
            // SAFETY: the table was made for ranges of these buffers, which do not overlap; the caller waits before it
            // returns, and both are borrowed until then.
            Method::Single => table
                .copies
                .iter()
                .try_for_each(|(to, from, len)| unsafe { copy_async(stream, to, from, len) }),
            Method::Batch(index) => table.calls[index].iter().try_for_each(|call| {
                // SAFETY: as above. The lists are the table's.
                unsafe { copy_batch(stream, call, SourceOrder::Stream) }.map_err(|it| it.error)
            }),
            Method::Kernel(kernel, blocks) => {
                self.upload(table, stream)?;
                self.launch(table, kernel, blocks, 0..table.job_count, stream)
            }
            Method::Gather(kernel, blocks) => self.gather(table, kernel, blocks, stream),
        }
    }

    /// Copies the jobs to the device.
    fn upload(&self, table: &Table, stream: &Stream) -> cuda::Result<()> {
        let (from, len) = table.job_list();
        // SAFETY: both ranges are the table's, as in `submit`.
        unsafe { copy_async(stream, table.device_jobs.address(), from, len) }
    }

    fn launch(
        &self,
        table: &Table,
        kernel: usize,
        blocks_max: u32,
        jobs: Range<u32>,
        stream: &Stream,
    ) -> cuda::Result<()> {
        let Kernel { function, threads, threads_of_job, .. } = &self.loaded[kernel];
        let blocks = (jobs.len() as u32).div_ceil(threads / threads_of_job).clamp(1, blocks_max);
        let grid = Grid { blocks, threads: *threads, shared_bytes: 0 };
        let first = table.device_jobs.address() + u64::from(jobs.start) * Job::BYTES as u64;
        // SAFETY: the jobs are on the device before: by this stream, or by one that it waits for. They are copies between
        // ranges of the buffers that do not overlap, as in `submit`. The kernel touches nothing else: see `load_kernel`.
        unsafe { launch(stream, function, grid, &[first, jobs.len() as u64]) }
    }

    /// Gathers and copies window by window: the kernel of one runs beside the copy of another.
    fn gather(
        &self,
        table: &Table,
        kernel: usize,
        blocks: u32,
        stream: &Stream,
    ) -> cuda::Result<()> {
        self.upload(table, &self.kernels)?;
        for window in &table.windows {
            let (at, len) = (window.bytes.start, window.bytes.end - window.bytes.start);
            let (staging, host) = (self.staging.address() + at, self.host.address() + at);
            let len = len as usize;
            match table.direction {
                Direction::Out => {
                    self.launch(table, kernel, blocks, window.jobs.clone(), &self.kernels)?;
                    self.pass(&self.kernels, stream)?;
                    // SAFETY: the window is inside both buffers, as in `submit`.
                    unsafe { copy_async(stream, host, staging, len) }?;
                }
                Direction::In => {
                    // SAFETY: as above.
                    unsafe { copy_async(stream, staging, host, len) }?;
                    self.pass(stream, &self.kernels)?;
                    self.launch(table, kernel, blocks, window.jobs.clone(), &self.kernels)?;
                }
            }
        }
        Ok(())
    }

    /// Has later work of one stream wait for the earlier work of another.
    fn pass(&self, from: &Stream, to: &Stream) -> cuda::Result<()> {
        self.passed.record(from)?;
        to.wait(&self.passed)
    }
}
