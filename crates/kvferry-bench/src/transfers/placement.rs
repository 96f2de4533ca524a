//! Placement of the two processes on cores.
//!
//! A block of 4 KiB takes about as long as waking the process that waits for it. That depends on whether
//! it sleeps on the caller's core or on another, by a factor of ten in a virtual machine, and the kernel
//! may choose differently for each process. So latency is measured with all subjects on the same cores.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::failure::Failure;
use crate::options::Placement;

/// Keeps this thread, and the threads that it starts, on one core until dropped.
#[derive(Debug)]
pub(super) struct Pinned {
    before: CpuSet,
    /// The target's core.
    pub(super) target: usize,
}

impl Pinned {
    /// `None` if the placement leaves it to the kernel. An error if there are too few cores.
    pub(super) fn new(placement: Placement) -> Result<Option<Pinned>, Failure> {
        let before = sched_getaffinity(None).map_err(std::io::Error::from)?;
        let Some((here, target)) = choose(placement, &cores(&before))? else { return Ok(None) };
        pin(here)?;
        Ok(Some(Pinned { before, target }))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // If the cores are not available any more, the thread stays on its core.
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// Puts this thread, and the threads that it will start, on one core.
pub(super) fn pin(core: usize) -> Result<(), Failure> {
    if core >= CpuSet::MAX_CPU {
        return Err(Failure::Usage(format!("this host has no core {core}")));
    }
    let mut only = CpuSet::new();
    only.set(core);
    Ok(sched_setaffinity(None, &only).map_err(std::io::Error::from)?)
}

/// Number of cores that this process may use.
pub(super) fn usable_cores() -> usize {
    sched_getaffinity(None).map_or(1, |set| cores(&set).len())
}

fn cores(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

fn choose(placement: Placement, cores: &[usize]) -> Result<Option<(usize, usize)>, Failure> {
    match (placement, cores) {
        (Placement::Free, _) => Ok(None),
        (Placement::Together, [.., last]) => Ok(Some((*last, *last))),
        (Placement::Apart, [.., before, last]) => Ok(Some((*last, *before))),
        _ => Err(Failure::Usage(format!("{placement:?} needs more than {} cores", cores.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apart_is_two_cores_and_together_is_one() {
        let choose = |placement, cores| choose(placement, cores).expect("enough cores");
        assert_eq!(choose(Placement::Apart, &[0, 1, 5]), Some((5, 1)));
        assert_eq!(choose(Placement::Together, &[0, 1, 5]), Some((5, 5)));
        assert_eq!(choose(Placement::Free, &[0]), None);
        assert!(super::choose(Placement::Apart, &[0]).is_err());
    }

    #[test]
    fn a_pinned_thread_is_free_again_afterwards() {
        let before = usable_cores();
        let pinned = Pinned::new(Placement::Together).expect("one core is enough").expect("pinned");
        assert_eq!(usable_cores(), 1);
        drop(pinned);
        assert_eq!(usable_cores(), before);
    }
}
