//! Copies that write the same bytes.

use crate::job::Job;

/// Leaves one copy for each byte that several jobs write: that of the job whose destination begins first. The jobs come in the
/// order of their destinations; those that have no byte left are gone.
///
/// For jobs that [`super::Planner::plan`] refuses with [`super::PlanError::Overlap`] alone: where either may win.
pub fn make_disjoint(jobs: &mut Vec<Job>) {
    jobs.sort_by_key(|job| job.dst);
    let mut end = 0u64;
    jobs.retain_mut(|job| {
        let cut = job.len.min(end.saturating_sub(job.dst));
        *job = Job { src: job.src + cut, dst: job.dst + cut, len: job.len - cut };
        end = end.max(job.dst + job.len);
        job.len > 0
    });
}
