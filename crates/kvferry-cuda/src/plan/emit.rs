//! The steps of a choice.

use super::choose::{Chooser, KernelShare, Model};
use super::gather::{self, Sink};
use super::{Plan, Step};
use crate::capabilities::{KernelLimits, LINE, Staging};
use crate::cost::Method;
use crate::job::Job;

/// Adds the steps of a choice to a plan: those of the kernel come first.
pub(super) fn emit(
    model: &Model<'_>,
    jobs: &[Job],
    chosen: &Chooser,
    runs: &mut Vec<Job>,
    plan: &mut Plan,
) {
    let of = |wanted: bool| {
        let zipped = jobs.iter().zip(&chosen.is_engine);
        zipped.filter(move |(_, is_engine)| **is_engine == wanted).map(|(job, _)| *job)
    };
    match chosen.rest {
        KernelShare::None | KernelShare::Scatter(..) => {}
        KernelShare::Kernel(limits) => {
            let first = plan.jobs.len();
            of(false).for_each(|job| limits.divide(&job, &mut plan.jobs));
            divide(plan, Method::Kernel, first, limits.jobs_max as usize);
        }
        KernelShare::Gather(limits, staging) => {
            runs.clear();
            let outstanding_max = model.outstanding_max;
            let first = plan.jobs.len();
            let mut windows = Windows { plan, runs, limits, outstanding_max, first };
            gather::lay_out(of(false), staging, limits, &mut windows);
        }
    }
    if let KernelShare::Scatter(limits, staging) = chosen.rest {
        scatter(jobs, limits, staging, plan);
    }
    let first = plan.jobs.len();
    plan.jobs.extend(of(true));
    let (method, count_max) = match model.are_single(&chosen.engine) {
        true => (Method::Copy, model.outstanding_max),
        false => (Method::Batch, model.batch_entries),
    };
    divide(plan, method, first, count_max);
}

/// Adds one copy of all sources, which follow each other in some order, and one launch.
fn scatter(jobs: &[Job], limits: KernelLimits, staging: Staging, plan: &mut Plan) {
    let src = jobs.iter().map(|job| job.src).min().expect("a plan has jobs");
    let len = jobs.iter().map(|job| job.len).sum();
    // Each byte in the staging has the alignment of its source.
    let dst = staging.address + src % LINE;
    plan.jobs.push(Job { src, dst, len });
    plan.steps.push(Step { method: Method::Copy, first: 0, count: 1 });
    for job in jobs {
        limits.divide(&Job { src: dst + (job.src - src), ..*job }, &mut plan.jobs);
    }
    plan.steps.push(Step { method: Method::Gather, first: 1, count: plan.jobs.len() - 1 });
}

/// Steps of up to `count_max` jobs for all jobs from `first` on.
fn divide(plan: &mut Plan, method: Method, first: usize, count_max: usize) {
    let end = plan.jobs.len();
    let starts = (first..end).step_by(count_max);
    plan.steps.extend(starts.map(|first| Step {
        method,
        first,
        count: count_max.min(end - first),
    }));
}

/// Makes a layout's steps.
struct Windows<'a> {
    plan: &'a mut Plan,
    runs: &'a mut Vec<Job>,
    limits: KernelLimits,
    outstanding_max: usize,
    /// The first job of the window.
    first: usize,
}

impl Sink for Windows<'_> {
    fn part(&mut self, part: Job) {
        self.limits.divide(&part, &mut self.plan.jobs);
    }

    fn run(&mut self, run: Job) {
        self.runs.push(run);
    }

    fn end_window(&mut self) {
        let copies = self.plan.jobs.len();
        let count = copies - self.first;
        self.plan.steps.push(Step { method: Method::Gather, first: self.first, count });
        self.plan.jobs.append(self.runs);
        divide(self.plan, Method::Copy, copies, self.outstanding_max);
        self.first = self.plan.jobs.len();
    }
}
