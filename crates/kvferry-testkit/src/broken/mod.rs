//! A small transport in memory, correct unless it is made with a fault.
//!
//! It tests the conformance suite. Each [`Fault`] is an error that a transport could have; a test
//! asserts that the suite finds it, by the scenario that the fault names.

mod wire;

use crate::fabric::{Effort, Fabric, Failure, Pair};
use std::time::Duration;

macro_rules! faults {
    ($($(#[$doc:meta])+ $name:ident => $promise:ident),+ $(,)?) => {
        /// An error of the transport.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Fault {
            $($(#[$doc])+ $name,)+
        }

        impl Fault {
            /// Every fault.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The name of the scenario that must find it.
            pub const fn breaks(self) -> &'static str {
                match self { $(Self::$name => stringify!($promise),)+ }
            }
        }
    };
}

faults! {
    /// Reports done before the last piece has arrived.
    EarlyCompletion => done_means_all_bytes_are_there,
    /// Writes the last byte again after it reported done.
    LateByte => nothing_lands_after_done,
    /// Leaves out the last byte of a batch.
    LostTail => every_byte_lands_and_nothing_else,
    /// Reports a failure, and done once the failure was read.
    DoubleOutcome => an_outcome_never_changes,
    /// Reports cancelled and continues.
    IgnoredCancel => nothing_lands_after_a_confirmed_cancel,
    /// Never ends a transfer that was cancelled.
    EndlessCancel => a_cancelled_transfer_ends_as_cancelled_or_done,
    /// Confirms a cancel while the device still copies.
    HastyCancel => a_cancel_is_not_confirmed_while_the_device_copies,
    /// Confirms a cancel while the device copies to or from host memory.
    HastyCancelOfMix => a_confirmed_cancel_leaves_no_copy_between_host_and_device,
    /// Moves nothing between host and device memory.
    MixDropped => host_and_device_memory_in_one_batch_land_whole,
    /// Does not wait for the copies of a device when an endpoint is closed.
    HastyClose => a_close_waits_for_the_copies_of_its_devices,
    /// Writes one byte after each descriptor's end.
    NeighbourWritten => every_byte_lands_and_nothing_else,
    /// Swaps the targets of two descriptors of one length.
    SwappedDescriptors => scattered_blocks_land_where_they_were_aimed,
    /// Assumes that sources are sorted and disjoint: moves each source byte once.
    SourceTakenOnce => overlapping_sources_are_read_as_often_as_asked,
    /// Moves whole words only.
    AlignedOnly => misaligned_ends_land_whole,
    /// Reads the source, and sends it, after the call failed.
    SourceReadAfterReturn => a_source_is_never_read_after_its_call_returned,
    /// Reports done although the target refused.
    SwallowedError => out_of_bounds_is_refused_and_nothing_lands,
    /// Does not check bounds.
    UncheckedBounds => out_of_bounds_is_refused_and_nothing_lands,
    /// Checks bounds with arithmetic that wraps.
    WrappingBounds => out_of_bounds_is_refused_and_nothing_lands,
    /// Checks the bounds of writes only.
    UncheckedReads => out_of_bounds_reads_are_refused,
    /// Treats adjacent regions as one.
    MergedNeighbours => neighbouring_regions_are_not_one,
    /// Does not check the access of a region.
    UncheckedAccess => a_region_allows_only_what_its_owner_said,
    /// Holds the next transfer up for a second after a refusal.
    PenaltyAfterRefusal => out_of_bounds_is_refused_and_nothing_lands,
    /// Fails concurrent transfers after a refusal.
    RefusalFailsAll => refusals_do_not_disturb_healthy_traffic,
    /// Delivers the notification first.
    NotificationBeforeData => a_notification_comes_after_its_data_exactly_once,
    /// Delivers some notifications twice.
    NotificationTwice => a_notification_comes_after_its_data_exactly_once,
    /// Loses some notifications.
    NotificationLost => a_notification_comes_after_its_data_exactly_once,
    /// Lets notifications overtake each other.
    NotificationsReordered => notifications_keep_the_order_of_their_caller,
    /// Delivers the notification of a batch that failed.
    NotificationOfFailure => a_failed_batch_notifies_nobody,
    /// Delivers the notification of a batch that was cancelled halfway.
    NotificationOfCancel => a_cancelled_batch_notifies_only_with_all_of_its_data,
    /// Never reports an outcome.
    Hang => done_means_all_bytes_are_there,
    /// Loses a byte of each descriptor longer than 64 KiB.
    TornBigDescriptor => done_means_all_bytes_are_there,
    /// Loses a bit of a length beyond 4 MiB.
    TruncatedLength => more_than_64_mib_land_whole,
    /// Moves only the first 4 096 descriptors of a batch.
    DescriptorsDropped => seventy_thousand_descriptors_land_whole,
    /// Answers reads from a cache.
    StaleRead => reads_fetch_the_bytes_of_now,
    /// Continues to write after unregister returned.
    WriteAfterUnregister => nothing_lands_after_unregister_returned,
    /// Continues to read the peer's memory after unregister returned there.
    ReadAfterUnregister => nothing_is_read_after_unregister_returned,
    /// Continues to access local memory after unregister returned.
    LocalAfterUnregister => a_local_region_is_left_alone_after_unregister_returned,
    /// Does not wait for device copies in unregister.
    UnregisterForgetsDevice => unregister_waits_for_the_device,
    /// Does not wait in unregister for a copier inside the region.
    HastyUnregister => unregister_leaves_no_copier_inside,
    /// Resolves an old region's name to a new region at its address.
    StaleNames => unregistered_ranges_are_refused,
    /// Moves three quarters of a batch and reports all of it.
    PartialBatch => scattered_blocks_land_where_they_were_aimed,
    /// Reports a wrong number of bytes.
    WrongCount => every_byte_lands_and_nothing_else,
    /// Ignores deadlines.
    DeadlinesIgnored => a_deadline_is_honoured,
    /// Does not count failed transfers as ended.
    LeakedCounter => gauges_return_to_zero,
    /// Leaks a session of an endpoint that was closed.
    LeakedSession => nothing_is_left_of_endpoints_that_were_closed,
    /// Shares one buffer between transfers.
    SharedBuffer => ten_callers_at_once_all_land,
    /// Moves batches in the order of arrival, each as a whole.
    Starvation => a_small_batch_is_not_starved_by_big_ones,
    /// Moves twenty big batches before each small one.
    PrefersBig => callers_take_turns,
    /// Forgets transfers beyond a full queue.
    FullQueue => hundreds_of_transfers_in_flight_all_end,
    /// Never signals the event fd.
    SilentEventFd => the_event_fd_is_readable_once_it_ended,
    /// Cancels when the last handle is dropped.
    DropCancels => dropped_handles_neither_cancel_nor_leak,
    /// Cancels when a wait runs out of time.
    WaitCancels => waiting_does_not_end_a_transfer,
    /// Does not wake threads that wait: each sleeps until its time-out.
    SleepyWait => a_wait_ends_with_its_transfer,
    /// Ignores a device's failure.
    DeviceErrorSwallowed => a_failing_device_fails_its_transfer,
    /// Blocks all transfers while one waits for a device.
    OneDeviceBlocksAll => a_stuck_device_does_not_stop_other_regions,
    /// Does not end an empty batch.
    EmptyBatchHangs => an_empty_batch_ends_at_once,
    /// Moves a byte for a descriptor of no length.
    ZeroMeansOne => zero_length_descriptors_move_nothing,
}

impl Fault {
    /// Whether it may show as a transfer that never ends, so that the scenario runs out of time.
    pub const fn hangs(self) -> bool {
        matches!(
            self,
            Self::Hang
                | Self::EndlessCancel
                | Self::EmptyBatchHangs
                | Self::FullQueue
                | Self::PrefersBig
        )
    }

    /// Whether it shows only when the suite has lost its patience: it waits for what does not come.
    const fn shows_late(self) -> bool {
        self.hangs()
            || matches!(
                self,
                Self::NotificationLost
                    | Self::NotificationsReordered
                    | Self::SilentEventFd
                    | Self::SleepyWait
                    | Self::DropCancels
                    | Self::DeadlinesIgnored
                    | Self::LeakedCounter
                    | Self::LeakedSession
                    | Self::OneDeviceBlocksAll
            )
    }
}

/// The transport in memory.
#[derive(Clone, Copy, Debug)]
pub struct InMemory {
    fault: Option<Fault>,
    effort: Effort,
    patience: Duration,
}

impl InMemory {
    /// A fabric without a fault.
    pub const fn correct() -> Self {
        Self { fault: None, effort: Effort::Full, patience: Duration::from_secs(60) }
    }

    /// A fabric without a fault that asks the suite for less work.
    pub const fn brief() -> Self {
        Self { fault: None, effort: Effort::Brief, patience: Duration::from_secs(60) }
    }

    /// A fabric with one fault. Asks the suite for less work; and for little patience, but more than a busy machine takes,
    /// if the suite loses it because of the fault.
    pub const fn broken(fault: Fault) -> Self {
        let patience = Duration::from_secs(if fault.shows_late() { 5 } else { 60 });
        Self { fault: Some(fault), effort: Effort::Brief, patience }
    }
}

impl Fabric for InMemory {
    fn name(&self) -> String {
        match self.fault {
            None => "in memory".into(),
            Some(fault) => format!("in memory, {fault:?}"),
        }
    }

    fn pair(&self) -> Result<Pair, Failure> {
        Ok(wire::pair(self.fault))
    }

    fn effort(&self) -> Effort {
        self.effort
    }

    fn patience(&self) -> Duration {
        self.patience
    }
}
