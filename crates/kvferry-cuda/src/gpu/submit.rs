//! Gives a plan's copies to the driver.

#![allow(
    unsafe_code,
    reason = "the driver copies to and from memory of batches, which their owner keeps"
)]

use super::Counts;
use super::kernel::{Kernels, Refusal};
use super::tables::Table;
use crate::cost::Method;
use crate::job::{Direction, Job};
use crate::plan::{Plan, Step};
use kvferry_sys::cuda::{self, CopyBatch, SourceOrder, Stream, copy_async, copy_batch};

/// Single copies that a stream may hold, at most.
pub(super) const OUTSTANDING_MAX: u32 = 512;

/// Lists and tables that the driver reads until an event behind the calls has been reached.
#[derive(Debug, Default)]
pub(super) struct Calls {
    lists: Vec<CopyBatch>,
    tables: Vec<Table>,
    /// Calls that may be in the stream.
    pub(super) count: usize,
    /// The error of the first copy call that failed.
    pub(super) error: Option<cuda::Error>,
}

/// Gives the driver the copies of a plan, and makes no call after one that fails. An `Err` is a failure of the kernel: the
/// caller may then make all copies of the plan again, by other calls behind these.
///
/// # Safety
/// The memory of the plan's jobs stays allocated, and on the host mapped, until an event behind the calls has been
/// reached. Nothing else writes it meanwhile, nor reads the bytes that the copies write. `calls` stays, too.
pub(super) unsafe fn submit(
    counts: &Counts,
    stream: &Stream,
    direction: Direction,
    plan: &Plan,
    kernels: &mut Kernels,
    calls: &mut Calls,
) -> Result<(), Refusal> {
    let order = match direction {
        Direction::Out => SourceOrder::Stream,
        // Nothing writes the stage before the batch has ended.
        Direction::In => SourceOrder::Any,
    };
    for step in &plan.steps {
        let jobs = plan.jobs_of(step);
        let made = match step.method {
            Method::Batch => {
                Counts::add(&counts.batch_calls, 1);
                calls.count += 1;
                calls.lists.push(jobs.iter().map(copy).collect());
                let list = calls.lists.last().expect("it was pushed");
                // SAFETY: the caller keeps the memory, and the list, until an event behind this call.
                unsafe { copy_batch(stream, list, order) }.map_err(|failed| failed.error)
            }
            Method::Copy => {
                Counts::add(&counts.single_calls, step.count as u64);
                // SAFETY: as above.
                unsafe { copy_singly(stream, step, jobs, calls) }
            }
            Method::Kernel | Method::Gather => {
                let is_gather = step.method == Method::Gather;
                let count = if is_gather { &counts.gather_calls } else { &counts.kernel_calls };
                Counts::add(count, 1);
                calls.count += 1;
                // SAFETY: as above. The memory to gather or scatter in is the stream's.
                unsafe { kernels.launch(stream, step.method, jobs, &mut calls.tables) }?;
                Ok(())
            }
        };
        if let Err(error) = made {
            calls.error = Some(error);
            break;
        }
    }
    Ok(())
}

/// Makes each copy of a step by a call of its own.
///
/// # Safety
/// The same as for [`submit`].
unsafe fn copy_singly(
    stream: &Stream,
    step: &Step,
    jobs: &[Job],
    calls: &mut Calls,
) -> Result<(), cuda::Error> {
    let is_full = calls.count > 0 && calls.count + step.count > OUTSTANDING_MAX as usize;
    calls.count += step.count;
    if is_full {
        // A stream holds about a thousand calls; the next one would wait for the device, with its lock held.
        stream.synchronize()?;
    }
    for (to, from, len) in jobs.iter().map(copy) {
        // SAFETY: the caller keeps the memory until an event behind this call.
        unsafe { copy_async(stream, to, from, len) }?;
    }
    Ok(())
}

fn copy(job: &Job) -> (u64, u64, usize) {
    (job.dst, job.src, usize::try_from(job.len).expect("a stage is shorter"))
}
