//! Which calls copy a batch.
//!
//! Copies that follow each other on both sides are merged. Then each is given to the copy engine, by single calls or
//! batches, or to the kernel: whatever takes the least time by the [`Calibration`]. The kernel copies to or from mapped
//! host memory. Out of the device, it may also gather into staging memory of the device, from where the copy engine copies
//! whole runs of host memory. The search compares these choices:
//!
//! - the copy engine for all copies;
//! - the kernel, beside the copy engine for any number of the copies for which that is better;
//! - gathering, beside the copy engine for the copies that break a run least.
//!
//! Into the device, all copies may also be made by one copy to the staging memory, from where the kernel scatters them, if
//! their sources follow each other in the order in which they are given.
//!
//! The kernel is not used both ways in one plan. Where there is a batch call, single calls are used for up to four copies:
//! each costs time of the thread that makes it.

mod alike;
mod choose;
mod emit;
mod gather;
mod overlaps;
mod select;

use crate::calibration::{Calibration, CalibrationError};
use crate::capabilities::Capabilities;
use crate::cost::Method;
use crate::job::{Direction, Job};
use choose::Chooser;

pub use overlaps::make_disjoint;

/// Copies of one plan, at most.
pub const JOBS_MAX: usize = 1 << 20;

/// Driver calls of one kind. The steps of a plan are made in their order on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// How its jobs are copied: [`Method::Copy`] takes a call for each, the others take one call. At the end of a step
    /// of single copies, no more calls than [`Capabilities::outstanding_max`] may be in progress before the next begins.
    pub method: Method,
    /// The index of its first job.
    pub first: usize,
    /// Number of its jobs.
    pub count: usize,
}

/// The calls that copy a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The jobs of all steps, one step after the other.
    pub jobs: Vec<Job>,
    /// The steps.
    pub steps: Vec<Step>,
    /// Nanoseconds that the plan takes by the calibration.
    pub modelled_ns: f64,
}

impl Plan {
    /// The jobs of a step of this plan.
    pub fn jobs_of(&self, step: &Step) -> &[Job] {
        &self.jobs[step.first..step.first + step.count]
    }

    /// Driver calls that copy, without uploads of jobs and waits.
    pub fn calls(&self) -> usize {
        let calls = |step: &Step| if step.method == Method::Copy { step.count } else { 1 };
        self.steps.iter().map(calls).sum()
    }
}

/// Plans batches. Its memory, and that of the plan, is used again: it allocates only for more jobs than any before.
#[derive(Debug, Default)]
pub struct Planner {
    /// Indexes of the jobs by their destinations, in the lower bits of numbers whose higher bits are the destinations.
    order: Vec<u64>,
    /// Merged copies, by their destinations.
    merged: Vec<Job>,
    chooser: Chooser,
    /// Copies out of staging that await the end of a gather step.
    runs: Vec<Job>,
}

impl Planner {
    /// Replaces `plan` by that of these jobs.
    ///
    /// # Errors
    /// An empty job, one beyond the last address, or two whose destinations overlap; limits or costs that are none.
    /// Then the plan is empty.
    pub fn plan(
        &mut self,
        jobs: &[Job],
        direction: Direction,
        calibration: &Calibration,
        capabilities: &Capabilities,
        plan: &mut Plan,
    ) -> Result<(), PlanError> {
        plan.jobs.clear();
        plan.steps.clear();
        plan.modelled_ns = 0.0;
        calibration.check()?;
        if let Some(what) = capabilities.fault() {
            return Err(PlanError::Limits { what });
        }
        let index_bits = self.sort(jobs)?;
        self.merge(jobs, index_bits, capabilities.merges)?;
        if self.merged.is_empty() {
            return Ok(());
        }
        let is_packed = jobs.is_sorted_by(|job, next| job.src + job.len == next.src);
        let model = choose::Model::new(direction, calibration, capabilities, is_packed);
        plan.modelled_ns = self.chooser.choose(&model, &self.merged);
        emit::emit(&model, &self.merged, &self.chooser, &mut self.runs, plan);
        Ok(())
    }

    /// Brings the jobs in the order of their destinations. Returns the bits of an element of `order` that are the index.
    fn sort(&mut self, jobs: &[Job]) -> Result<u64, PlanError> {
        if jobs.len() > JOBS_MAX {
            return Err(PlanError::TooManyJobs { count: jobs.len() });
        }
        let (mut low, mut high) = (u64::MAX, 0);
        for (index, job) in jobs.iter().enumerate() {
            if job.len == 0 {
                return Err(PlanError::ZeroLength { index });
            }
            if job.src.checked_add(job.len).is_none() || job.dst.checked_add(job.len).is_none() {
                return Err(PlanError::Wraps { index });
            }
            (low, high) = (low.min(job.dst), high.max(job.dst));
        }
        self.order.clear();
        // Destinations and indexes mostly fit into one number, which is sorted in half the time.
        let bits = jobs.len().next_power_of_two().ilog2();
        if high.saturating_sub(low) >> (u64::BITS - 1 - bits) == 0 {
            let key = |(index, job): (usize, &Job)| (job.dst - low) << bits | index as u64;
            self.order.extend(jobs.iter().enumerate().map(key));
            self.order.sort_unstable();
            return Ok((1 << bits) - 1);
        }
        self.order.extend(0..jobs.len() as u64);
        self.order.sort_unstable_by_key(|index| jobs[*index as usize].dst);
        Ok(u64::MAX)
    }

    fn merge(&mut self, jobs: &[Job], index_bits: u64, merges: bool) -> Result<(), PlanError> {
        self.merged.clear();
        let mut before = 0;
        for element in &self.order {
            let index = (element & index_bits) as usize;
            let job = jobs[index];
            match self.merged.last_mut() {
                Some(last) if last.dst + last.len > job.dst => {
                    return Err(PlanError::Overlap { first: before, second: index });
                }
                Some(last) if merges && last.is_before(&job) => last.len += job.len,
                _ => self.merged.push(job),
            }
            before = index;
        }
        Ok(())
    }
}

/// The plan of these jobs, by a planner that is used once.
///
/// # Errors
/// Those of [`Planner::plan`].
pub fn plan(
    jobs: &[Job],
    direction: Direction,
    calibration: &Calibration,
    capabilities: &Capabilities,
) -> Result<Plan, PlanError> {
    let mut plan = Plan::default();
    Planner::default().plan(jobs, direction, calibration, capabilities, &mut plan)?;
    Ok(plan)
}

/// Reason why there is no plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A job has no bytes.
    #[error("job {index} has no bytes")]
    ZeroLength {
        /// The job's index.
        index: usize,
    },
    /// A job ends beyond the last address.
    #[error("job {index} ends beyond the last address")]
    Wraps {
        /// The job's index.
        index: usize,
    },
    /// Two jobs write the same byte. The order of their copies is not known.
    #[error("the destinations of jobs {first} and {second} overlap")]
    Overlap {
        /// The index of the job with the lower destination.
        first: usize,
        /// The index of the other job.
        second: usize,
    },
    /// More jobs than [`JOBS_MAX`].
    #[error("{count} jobs, at most {JOBS_MAX} are planned")]
    TooManyJobs {
        /// Number of jobs.
        count: usize,
    },
    /// A limit is out of range.
    #[error("{what}")]
    Limits {
        /// The value that is out of range.
        what: &'static str,
    },
    /// The calibration is not valid.
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
}
