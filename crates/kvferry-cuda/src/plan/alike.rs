//! The choice for many copies that take the same time: a stage full of an engine's blocks.
//!
//! One method makes all of them. Among so many, the few that another method could make beside it would save little time.

use super::choose::{Engine, Item, KernelShare, Model, is_like};
use crate::capabilities::LINE;
use crate::job::Job;

/// The least number of such copies. Among fewer, one call more or less counts.
const COUNT_MIN: usize = 128;

/// Returns the times of one copy if there are many, all take the same time, and gathering them makes one run.
pub(super) fn item(model: &Model<'_>, jobs: &[Job]) -> Option<Item> {
    if jobs.len() < COUNT_MIN {
        return None;
    }
    let is_run = |job: &Job, next: &Job| job.dst + job.len == next.dst;
    let are_alike = jobs.windows(2).all(|pair| {
        is_like(&pair[0], &pair[1]) && (model.gather.is_none() || is_run(&pair[0], &pair[1]))
    });
    are_alike.then(|| Item::new(model, &jobs[0]))
}

/// Returns the least time in which one method makes all copies, and that method. `None` if that takes several launches.
pub(super) fn choose(
    model: &Model<'_>,
    jobs: &[Job],
    item: &Item,
    engine: &Engine,
) -> Option<(f64, KernelShare)> {
    let count = jobs.len() as u64;
    let bytes = count * jobs[0].len;
    let slices = count * item.slices;
    let mut best = (model.engine_ns(engine), KernelShare::None);
    let mut offer = |ns: f64, rest| {
        if ns < best.0 {
            best = (ns, rest);
        }
    };
    if let Some((cost, limits)) = model.kernel.filter(|_| item.kernel_ns.is_finite()) {
        if slices > u64::from(limits.jobs_max) {
            return None;
        }
        offer(cost.call_ns + item.kernel_ns * count as f64, KernelShare::Kernel(limits));
    }
    if let Some(parts) = model.gather.or(model.scatter).filter(|_| item.gather_ns.is_finite()) {
        let room = if model.gather.is_some() { 2 * LINE } else { LINE };
        let is_one =
            bytes + room <= parts.staging.bytes && slices <= u64::from(parts.limits.jobs_max);
        if !is_one {
            return None;
        }
        let ns = model.copy.single(bytes) + parts.cost.call_ns + item.gather_ns * count as f64;
        let rest = match model.gather {
            Some(_) => KernelShare::Gather(parts.limits, parts.staging),
            None => KernelShare::Scatter(parts.limits, parts.staging),
        };
        offer(ns, rest);
    }
    Some(best)
}
