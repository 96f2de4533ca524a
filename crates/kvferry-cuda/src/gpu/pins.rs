//! Pins stages, each when it is used first.

#![allow(unsafe_code, reason = "the driver pins memory of the stage pool")]

use super::{Counts, STAGE_BYTES, Shared};
use kvferry::DeviceCopy;
use kvferry_sys::HostSpan;
use kvferry_sys::cuda::HostRegistration;

/// Registrations of the stages, indexed as the pool has them. A stage is a registration of its own, so that no copy
/// crosses two.
#[derive(Debug, Default)]
pub(super) struct Pins(Vec<Pin>);

#[derive(Debug, Default)]
enum Pin {
    #[default]
    Unused,
    Pinned {
        _until_drop: HostRegistration,
    },
    Refused,
}

impl Pins {
    /// Whether the stage of a batch is pinned, now or before.
    pub(super) fn pin(&mut self, shared: &Shared, copy: &DeviceCopy) -> bool {
        let begin = shared.stages.as_ptr() as usize;
        let index = (copy.as_ptr() as usize - begin) / STAGE_BYTES;
        if self.0.len() <= index {
            self.0.resize_with(index + 1, Pin::default);
        }
        if matches!(self.0[index], Pin::Unused) {
            self.0[index] = Self::register(shared, index);
        }
        matches!(self.0[index], Pin::Pinned { .. })
    }

    fn register(shared: &Shared, index: usize) -> Pin {
        let at = shared.stages.as_ptr().wrapping_add(index * STAGE_BYTES);
        // SAFETY: the pool's memory stays mapped as long as the pool, which `shared` keeps. It is never referenced.
        let span = unsafe { HostSpan::new(at, STAGE_BYTES) };
        // SAFETY: the pages stay mapped, as above. The thread drops its pins after the last batch has ended, and after
        // it has leaked one, it leaks them.
        match unsafe { HostRegistration::new(&shared.context, span) } {
            Ok(registration) => {
                Counts::add(&shared.counts.pinned_stages, 1);
                Pin::Pinned { _until_drop: registration }
            }
            Err(error) => {
                Counts::add(&shared.counts.unpinned_stages, 1);
                let device = shared.device;
                tracing::warn!(
                    device,
                    %error,
                    "host memory for copies of the GPU can't be pinned; copies are slow. Raise the limit of locked memory"
                );
                Pin::Refused
            }
        }
    }
}
