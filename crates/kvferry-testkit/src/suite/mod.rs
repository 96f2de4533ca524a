//! The conformance suite: the promises of every transport, one scenario for each.
//!
//! ```ignore
//! kvferry_testkit::conformance!(tcp, AgentFabric::new("tcp"));
//! ```
//!
//! makes a module `tcp` with one `#[test]` per scenario and kind of memory, such as
//! `tcp::slow::nothing_lands_after_a_confirmed_cancel`. A scenario makes its own pair of endpoints,
//! runs in its own thread and has a limit of time. At its end it compares every byte of its memory
//! with a model, checks that no device was misused, and expects every gauge at zero.
//!
//! A scenario that does not apply to a kind of memory prints so.

mod bounds;
mod bytes;
mod cancel;
mod load;
mod mixed;
mod notify;
mod outcome;
mod revoke;
mod rig;

use crate::fabric::Way::{self, Read, Write};
use crate::fabric::{Aim, Fabric, Handle, Move, Outcome, Region};
use crate::memory::{Memory, MemoryKind};
use crate::violation::{Violation, ensure};
use kvferry::{Access, Notification, Options};
use rig::{Rig, Side, done, failed, needs_far_device, pieces, watch, with_devices, within};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

type Result<T = ()> = std::result::Result<T, Violation>;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// A promise and its test.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// The promise.
    pub name: &'static str,
    run: fn(&Rig<'_>) -> Result,
}

impl fmt::Debug for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Scenario {
    /// The scenario of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        SCENARIOS.iter().find(|scenario| scenario.name == name)
    }

    /// Runs the scenario for at most `limit`; the thread of one that takes longer is abandoned.
    ///
    /// # Errors
    /// The broken promise, also if the scenario panics or does not end.
    pub fn run_within(
        &'static self,
        fabric: &Arc<dyn Fabric>,
        kind: MemoryKind,
        limit: Duration,
    ) -> Result {
        let (tell, told) = mpsc::channel();
        let fabric = Arc::clone(fabric);
        thread::Builder::new()
            .name(self.name.into())
            .spawn(move || {
                let run = || {
                    let rig = Rig::new(&*fabric, kind)?;
                    (self.run)(&rig)?;
                    rig.finish()
                };
                drop(tell.send(catch_unwind(AssertUnwindSafe(run))));
            })
            .map_err(|e| Violation::new(format!("no thread for the scenario: {e}")))?;
        match told.recv_timeout(limit) {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => {
                let text = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                    .unwrap_or_default();
                Err(Violation::new(format!("the scenario panicked: {text}")))
            }
            Err(_) => Err(Violation::new(format!("the scenario did not end within {limit:?}"))),
        }
    }
}

/// Runs one scenario as a test. What [`conformance!`](crate::conformance) expands to.
///
/// # Panics
/// If the transport breaks the promise.
pub fn check(fabric: impl Fabric + 'static, name: &str, kind: MemoryKind) {
    let fabric: Arc<dyn Fabric> = Arc::new(fabric);
    let scenario = Scenario::named(name).expect("the macro and the table have one source");
    let limit = fabric.patience() * 3;
    if let Err(violation) = scenario.run_within(&fabric, kind, limit) {
        panic!("{} on {kind} memory breaks \"{name}\": {violation}", fabric.name());
    }
}

macro_rules! scenarios {
    ($d:tt $($module:ident { $($name:ident),+ $(,)? })+) => {
        /// Every scenario.
        pub const SCENARIOS: &[Scenario] = &[
            $($(Scenario { name: stringify!($name), run: $module::$name },)+)+
        ];

        /// One `#[test]` per scenario and kind of memory for a [`Fabric`](crate::Fabric);
        /// with `host: Host` after it, for host memory only. A fabric without sessions names slow memory by address:
        /// `host: Host, addressed: Addressed`.
        #[macro_export]
        macro_rules! conformance {
            ($d transport:ident, $d fabric:expr $d(,)?) => {
                $d crate::conformance!($d transport, $d fabric, host: Host, slow: Slow);
            };
            ($d transport:ident, $d fabric:expr, $d($d kind:ident: $d variant:ident),+ $d(,)?) => {
                mod $d transport {
                    #[allow(unused_imports, reason = "the expression may name anything")]
                    use super::*;

                    $d(
                        mod $d kind {
                            #[allow(unused_imports, reason = "the expression may name anything")]
                            use super::*;
                            $($(
                                #[test]
                                fn $name() {
                                    $d crate::suite::check(
                                        $d fabric,
                                        stringify!($name),
                                        $d crate::MemoryKind::$d variant,
                                    );
                                }
                            )+)+
                        }
                    )+
                }
            };
        }
    };
}

scenarios! { $
    bytes {
        every_byte_lands_and_nothing_else,
        done_means_all_bytes_are_there,
        more_than_64_mib_land_whole,
        seventy_thousand_descriptors_land_whole,
        scattered_blocks_land_where_they_were_aimed,
        overlapping_sources_are_read_as_often_as_asked,
        misaligned_ends_land_whole,
        zero_length_descriptors_move_nothing,
        an_empty_batch_ends_at_once,
        reads_fetch_the_bytes_of_now,
        reads_take_every_byte_and_touch_nothing_else,
        both_directions_at_once,
    }
    outcome {
        an_outcome_never_changes,
        the_event_fd_is_readable_once_it_ended,
        waiting_does_not_end_a_transfer,
        a_wait_ends_with_its_transfer,
        dropped_handles_neither_cancel_nor_leak,
        a_deadline_is_honoured,
        a_failing_device_fails_its_transfer,
        a_stuck_device_does_not_stop_other_regions,
    }
    cancel {
        a_cancelled_transfer_ends_as_cancelled_or_done,
        nothing_lands_after_a_confirmed_cancel,
        a_cancel_is_not_confirmed_while_the_device_copies,
        a_source_is_never_read_after_its_call_returned,
        a_source_is_never_read_after_a_confirmed_cancel,
        nothing_lands_after_done,
    }
    bounds {
        out_of_bounds_is_refused_and_nothing_lands,
        out_of_bounds_reads_are_refused,
        unregistered_ranges_are_refused,
        neighbouring_regions_are_not_one,
        a_region_allows_only_what_its_owner_said,
        one_bad_descriptor_fails_the_batch_and_lands_nothing_beyond,
        refusals_do_not_disturb_healthy_traffic,
    }
    revoke {
        nothing_lands_after_unregister_returned,
        nothing_is_read_after_unregister_returned,
        a_local_region_is_left_alone_after_unregister_returned,
        unregister_waits_for_the_device,
        unregister_leaves_no_copier_inside,
        regions_come_and_go,
    }
    mixed {
        host_and_device_memory_in_one_batch_land_whole,
        a_confirmed_cancel_leaves_no_copy_between_host_and_device,
        a_close_waits_for_the_copies_of_its_devices,
    }
    notify {
        a_notification_comes_after_its_data_exactly_once,
        notifications_keep_the_order_of_their_caller,
        a_failed_batch_notifies_nobody,
        a_cancelled_batch_notifies_only_with_all_of_its_data,
    }
    load {
        ten_callers_at_once_all_land,
        hundreds_of_transfers_in_flight_all_end,
        a_small_batch_is_not_starved_by_big_ones,
        callers_take_turns,
        gauges_return_to_zero,
        nothing_is_left_of_endpoints_that_were_closed,
    }
}
