//! Pins stages: the first ones while nothing is copied, since the driver may let a call that pins memory wait for a kernel
//! that is held; the others when they are used first.

#![allow(unsafe_code, reason = "the driver pins memory of the stage pool")]

use super::{Counts, STAGE_BYTES, Shared};
use crate::error::Error;
use kvferry::DeviceCopy;
use kvferry_sys::HostSpan;
use kvferry_sys::cuda::HostRegistration;

/// Codes of the driver: `CUDA_ERROR_OUT_OF_MEMORY` and `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
const OUT_OF_MEMORY: i32 = 2;
const ALREADY_REGISTERED: i32 = 712;

/// Registrations of the stages, indexed as the pool has them. A stage is a registration of its own, so that no copy
/// crosses two.
#[derive(Debug)]
pub(super) struct Pins {
    stages: Vec<Pin>,
    /// The first stage that may still have to be pinned ahead.
    next: usize,
    /// The end of the stages that are pinned ahead.
    ahead: usize,
}

#[derive(Debug, Default)]
enum Pin {
    #[default]
    Unused,
    Pinned {
        _until_drop: HostRegistration,
        is_mapped: bool,
    },
    Refused,
    /// The driver takes the memory for registered, though kvferry has not registered it. A copy might go to pages that had
    /// the address before.
    Taken,
}

/// The way in which the driver has pinned a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pinned {
    No,
    Yes,
    /// The stage is pinned, and kernels find it at the same address as the process.
    Mapped,
}

impl Pins {
    /// No stage is pinned yet, and `ahead` of them will be before they are used.
    pub(super) fn new(shared: &Shared, ahead: usize) -> Self {
        let stages: Vec<Pin> = (0..shared.stages.stages()).map(|_| Pin::default()).collect();
        let ahead = ahead.min(stages.len());
        Self { stages, next: 0, ahead }
    }

    /// True if a stage may have to be pinned ahead.
    pub(super) fn is_due(&self) -> bool {
        self.next < self.ahead
    }

    /// Pins the next stage ahead. None is pinned any more after a refusal, or once the GPU is lost. The first use of a stage
    /// that was refused tries again.
    pub(super) fn pin_next(&mut self, shared: &Shared) {
        let next = (self.next..self.ahead).find(|at| matches!(self.stages[*at], Pin::Unused));
        self.next = self.ahead;
        if let Some(at) = next.filter(|_| shared.lost().is_none()) {
            self.stages[at] = Self::register(shared, at);
            match self.stages[at] {
                Pin::Pinned { .. } => self.next = at + 1,
                Pin::Refused => self.stages[at] = Pin::Unused,
                Pin::Unused | Pin::Taken => {}
            }
        }
    }

    /// Pins stages ahead, and then waits, until work has come. False: the last memory is gone.
    pub(super) fn pin_until_work(&mut self, shared: &Shared) -> bool {
        let mut inbox = shared.inbox.lock();
        while inbox.copies.is_empty() && inbox.waits.is_empty() {
            if inbox.has_ended {
                return false;
            }
            if self.is_due() {
                drop(inbox);
                self.pin_next(shared);
                inbox = shared.inbox.lock();
            } else {
                inbox = shared.changed.wait(inbox, None);
            }
        }
        true
    }

    /// Pins the stage of a batch, unless it was pinned before. A batch whose stage the driver takes for registered moves to a
    /// free one.
    ///
    /// # Errors
    /// If no free stage can be used, or the GPU is lost, which pinning may find out.
    pub(super) fn pin(&mut self, shared: &Shared, copy: &mut DeviceCopy) -> Result<Pinned, Error> {
        loop {
            let pinned = if shared.lost().is_some() { None } else { self.pin_own(shared, copy) };
            match (shared.lost(), pinned) {
                (Some(lost), _) => return Err(lost),
                (None, Some(pinned)) => return Ok(pinned),
                (None, None) if copy.leave_stage() => {}
                (None, None) => return Err(Error::NoStage { device: shared.device }),
            }
        }
    }

    fn pin_own(&mut self, shared: &Shared, copy: &DeviceCopy) -> Option<Pinned> {
        let begin = shared.stages.as_ptr() as usize;
        let index = (copy.as_ptr() as usize - begin) / STAGE_BYTES;
        if matches!(self.stages[index], Pin::Unused) {
            self.stages[index] = Self::register(shared, index);
        }
        match self.stages[index] {
            Pin::Pinned { is_mapped: true, .. } => Some(Pinned::Mapped),
            Pin::Pinned { .. } => Some(Pinned::Yes),
            Pin::Unused | Pin::Refused => Some(Pinned::No),
            Pin::Taken => None,
        }
    }

    fn register(shared: &Shared, index: usize) -> Pin {
        let at = shared.stages.as_ptr().wrapping_add(index * STAGE_BYTES);
        // SAFETY: the pool's memory stays mapped as long as the pool, which `shared` keeps. It is never referenced.
        let span = unsafe { HostSpan::new(at, STAGE_BYTES) };
        // SAFETY: the pages stay mapped, as above. The thread drops its pins after the last batch has ended, and after
        // it has leaked one, it leaks them.
        let register = || unsafe { HostRegistration::new(&shared.context, span) };
        let mut registered = register();
        let is_taken =
            registered.as_ref().is_err_and(|error| error.code() == Some(ALREADY_REGISTERED));
        if is_taken {
            // SAFETY: only this thread registers the pool's memory, which nobody else has, and it has not registered this
            // stage. So the registration is of memory that had the address before.
            let _ = unsafe { HostRegistration::end_stale(&shared.context, span) };
            registered = register();
        }
        match registered {
            Ok(registration) => {
                Counts::add(&shared.counts.pinned_stages, 1);
                let is_mapped = registration.device_address() == Ok(at as u64);
                Pin::Pinned { _until_drop: registration, is_mapped }
            }
            Err(error) => {
                let counts = &shared.counts;
                let by_reason = match error.code() {
                    _ if is_taken => &counts.unpinned_registered,
                    Some(OUT_OF_MEMORY) => &counts.unpinned_memory,
                    _ => &counts.unpinned_other,
                };
                Counts::add(&counts.unpinned_stages, 1);
                Counts::add(by_reason, 1);
                let device = shared.device;
                let is_memory = error.code() == Some(OUT_OF_MEMORY);
                let what = match is_taken {
                    true => {
                        "host memory for copies of the GPU is out of use: the driver has it for registered"
                    }
                    false if is_memory => {
                        "host memory for copies of the GPU can't be pinned; copies are slow. Raise the limit of locked memory"
                    }
                    false => "host memory for copies of the GPU can't be pinned; copies are slow",
                };
                tracing::warn!(device, %error, "{what}");
                shared.is_lost_by(&error);
                if is_taken {
                    return Pin::Taken;
                }
                Pin::Refused
            }
        }
    }
}
