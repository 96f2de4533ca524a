//! Gives a plan's copies to the driver.

#![allow(
    unsafe_code,
    reason = "the driver copies to and from memory of batches, which their owner keeps"
)]

use super::{Counts, Shared};
use crate::cost::Method;
use crate::plan::Plan;
use kvferry::DeviceCopy;
use kvferry_sys::cuda::{self, CopyBatch, SourceOrder, Stream, copy_async, copy_batch};

/// What the driver reads until a batch has ended.
#[derive(Debug)]
pub(super) struct Submitted {
    /// The batch, whose stage and regions stay until it is completed.
    pub(super) copy: DeviceCopy,
    _lists: Vec<CopyBatch>,
    /// Calls that may be in the stream.
    pub(super) calls: usize,
    /// The first call that failed.
    pub(super) error: Option<cuda::Error>,
}

/// Gives the driver the copies of a batch. If a call fails, those after it are not made. The caller keeps the result until
/// an event behind it has been reached, or for ever.
pub(super) fn submit(
    shared: &Shared,
    stream: &Stream,
    copy: DeviceCopy,
    plan: &Plan,
    order: SourceOrder,
) -> Submitted {
    let mut submitted = Submitted { copy, _lists: Vec::new(), calls: 0, error: None };
    for (at, step) in plan.steps.iter().enumerate() {
        let jobs = plan.jobs_of(step).iter();
        let copies = jobs
            .map(|job| (job.dst, job.src, usize::try_from(job.len).expect("a stage is shorter")));
        let made = match step.method {
            Method::Batch => {
                submitted.calls += 1;
                Counts::add(&shared.counts.batch_calls, 1);
                submitted._lists.push(copies.collect());
                let list = submitted._lists.last().expect("it was pushed");
                // SAFETY: the pieces are in regions that the batch holds, and the stage is the batch's. Both stay until
                // the caller has seen an event behind this call. A gate keeps others from the regions' memory meanwhile,
                // and nothing writes the stage of a batch that is given to a device.
                unsafe { copy_batch(stream, list, order) }.map_err(|failed| failed.error)
            }
            Method::Copy => {
                let is_first = at == 0;
                // A stream holds about a thousand calls; the next one would wait for the device, with its lock held.
                let waited = if is_first { Ok(()) } else { stream.synchronize() };
                submitted.calls += step.count;
                Counts::add(&shared.counts.single_calls, step.count as u64);
                waited.and_then(|()| {
                    for (to, from, len) in copies {
                        // SAFETY: as above.
                        unsafe { copy_async(stream, to, from, len) }?;
                    }
                    Ok(())
                })
            }
            Method::Kernel | Method::Gather => {
                unreachable!("no plan has a kernel: none is allowed")
            }
        };
        if let Err(error) = made {
            submitted.error = Some(error);
            break;
        }
    }
    submitted
}
