//! Pins stages: the first ones while nothing is copied, since the driver may let a call that pins memory wait for a kernel
//! that is held; the others when they are used first. If a setting says so, the others are unpinned, one by one, once
//! nothing was copied for a while, and pinned again when they are used again.

#![allow(unsafe_code, reason = "the driver pins memory of the stage pool")]

use super::settings::Settings;
use super::{Counts, STAGE_BYTES, Shared};
use crate::error::Error;
use kvferry::DeviceCopy;
use kvferry_sys::HostSpan;
use kvferry_sys::cuda::HostRegistration;
use std::time::{Duration, Instant};

/// Codes of the driver: `CUDA_ERROR_OUT_OF_MEMORY` and `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
const OUT_OF_MEMORY: i32 = 2;
const ALREADY_REGISTERED: i32 = 712;

/// Time after which the use of a stage that was refused tries again, and the longest such time: each refusal doubles it.
const RETRY_AFTER: Duration = Duration::from_secs(5);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

/// Registrations of the stages, indexed as the pool has them. A stage is a registration of its own, so that no copy
/// crosses two.
#[derive(Debug)]
pub(super) struct Pins {
    stages: Vec<Pin>,
    /// The first stage that may still have to be pinned ahead.
    next: usize,
    /// The end of the stages that are pinned ahead.
    ahead: usize,
    /// Stages behind those that are pinned.
    beyond: usize,
    /// Time without a copy after which they are unpinned. `None`: never.
    unpin_after: Option<Duration>,
    /// Time at which they are unpinned. `None`: none is to be before the next copy.
    idle_at: Option<Instant>,
    /// The first stage that may then have to be unpinned.
    unpin_from: usize,
    /// Time from which the use of a stage that was refused tries again, and the time between this and the last refusal.
    retry_at: Instant,
    retry_after: Duration,
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
    /// No stage is pinned yet.
    pub(super) fn new(shared: &Shared, settings: Settings) -> Self {
        let stages = (0..shared.stages.all_stages()).map(|_| Pin::default()).collect();
        let ahead = settings.pin_ahead.min(shared.stages.stages());
        Self {
            stages,
            next: 0,
            ahead,
            beyond: 0,
            unpin_after: settings.unpin_after,
            idle_at: None,
            unpin_from: ahead,
            retry_at: Instant::now(),
            retry_after: RETRY_AFTER,
        }
    }

    /// True if a stage may have to be pinned ahead.
    pub(super) fn is_due(&self) -> bool {
        self.next < self.ahead
    }

    /// Pins the next stage ahead. None is pinned any more after a refusal, or once the GPU is lost. The first use of a stage
    /// that was refused tries again. One that the driver takes for registered is left out.
    pub(super) fn pin_next(&mut self, shared: &Shared) {
        let next = (self.next..self.ahead).find(|at| matches!(self.stages[*at], Pin::Unused));
        self.next = self.ahead;
        if let Some(at) = next.filter(|_| shared.lost().is_none()) {
            self.stages[at] = Self::register(shared, at);
            match self.stages[at] {
                Pin::Pinned { .. } => self.next = at + 1,
                Pin::Taken => {
                    self.next = at + 1;
                    shared.stages.retire(at);
                }
                Pin::Refused => self.stages[at] = Pin::Unused,
                Pin::Unused => {}
            }
        }
    }

    /// Notes that copies use stages now.
    pub(super) fn note_use(&mut self) {
        let unpin_after = self.unpin_after.filter(|_| self.beyond > 0);
        self.idle_at = unpin_after.and_then(|after| Instant::now().checked_add(after));
        self.unpin_from = self.ahead;
    }

    /// Time until stages are unpinned if nothing is copied before; `None` if none will be.
    pub(super) fn until_unpinned(&self) -> Option<Duration> {
        self.idle_at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Unpins the next stage, if nothing was copied for long. One that a transfer has stays pinned until after the next copy.
    pub(super) fn unpin_idle(&mut self, shared: &Shared) {
        if !self.until_unpinned().is_some_and(|time| time.is_zero()) {
            return;
        }
        while shared.lost().is_none() && self.unpin_from < self.stages.len() {
            let at = self.unpin_from;
            self.unpin_from += 1;
            let pin = &mut self.stages[at];
            let is_pinned = matches!(pin, Pin::Pinned { .. });
            if is_pinned && shared.stages.give_up(at, || *pin = Pin::Unused) {
                self.beyond -= 1;
                Counts::subtract(&shared.counts.pinned_stages, 1);
                return;
            }
        }
        self.idle_at = None;
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

    /// Pins the stage of a batch, unless it was pinned before. A batch whose stage the driver takes for registered moves to
    /// one in reserve, or a free one.
    ///
    /// # Errors
    /// If none of these can be used, or the GPU is lost, which pinning may find out.
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
        let was_refused = matches!(self.stages[index], Pin::Refused);
        if matches!(self.stages[index], Pin::Unused)
            || was_refused && Instant::now() >= self.retry_at
        {
            self.stages[index] = Self::register(shared, index);
            self.note_answer(index, was_refused);
            if index >= self.ahead && matches!(self.stages[index], Pin::Pinned { .. }) {
                self.beyond += 1;
                self.note_use();
            }
        }
        match self.stages[index] {
            Pin::Pinned { is_mapped: true, .. } => Some(Pinned::Mapped),
            Pin::Pinned { .. } => Some(Pinned::Yes),
            Pin::Unused | Pin::Refused => Some(Pinned::No),
            Pin::Taken => None,
        }
    }

    /// Notes when stages that were refused are tried again. If the driver takes one of them now, it may take the others.
    fn note_answer(&mut self, index: usize, was_refused: bool) {
        let now = Instant::now();
        match self.stages[index] {
            Pin::Pinned { .. } if was_refused => {
                (self.retry_at, self.retry_after) = (now, RETRY_AFTER);
            }
            Pin::Refused => {
                if was_refused {
                    self.retry_after = (2 * self.retry_after).min(RETRY_AFTER_MAX);
                }
                self.retry_at = now + self.retry_after;
            }
            Pin::Unused | Pin::Pinned { .. } | Pin::Taken => {}
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
            // SAFETY: the pool's memory is known to this thread alone, which has not registered this stage. So the
            // registration is of memory that had the address before.
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
