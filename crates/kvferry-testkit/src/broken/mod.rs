//! A small transport in memory, correct unless it is told to break in one particular way.
//!
//! The conformance suite is only worth something if it notices broken transports. Each [`Fault`]
//! is a mistake that a real transport has made or could make; a test asserts that the suite
//! notices it, and by which promise.

mod wire;

use crate::fabric::{Effort, Fabric, Failure, Pair};
use crate::memory::MemoryKind;
use std::time::Duration;

macro_rules! faults {
    ($($(#[$doc:meta])+ $name:ident => $promise:ident),+ $(,)?) => {
        /// One way to be broken.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Fault {
            $($(#[$doc])+ $name,)+
        }

        impl Fault {
            /// Every fault.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The promise it breaks before all others: a scenario's name.
            pub const fn breaks(self) -> &'static str {
                match self { $(Self::$name => stringify!($promise),)+ }
            }
        }
    };
}

faults! {
    /// Says done before the last piece is there.
    EarlyCompletion => done_means_all_bytes_are_there,
    /// Writes the last byte once more, after it said done.
    LateByte => nothing_lands_after_done,
    /// Leaves out the last byte of a batch.
    LostTail => every_byte_lands_and_nothing_else,
    /// Says failed, and a little later done.
    DoubleOutcome => an_outcome_never_changes,
    /// Says cancelled and goes on.
    IgnoredCancel => nothing_lands_after_a_confirmed_cancel,
    /// Never ends a transfer that was cancelled.
    EndlessCancel => a_cancelled_transfer_ends_as_cancelled_or_done,
    /// Confirms a cancel while the device still copies.
    HastyCancel => a_cancel_is_not_confirmed_while_the_device_copies,
    /// Writes one byte after each descriptor's end.
    NeighbourWritten => every_byte_lands_and_nothing_else,
    /// Swaps the targets of two descriptors of one length.
    SwappedDescriptors => scattered_blocks_land_where_they_were_aimed,
    /// Treats descriptors as if they were sorted and disjoint: takes each source byte once.
    SourceTakenOnce => overlapping_sources_are_read_as_often_as_asked,
    /// Moves whole words only.
    AlignedOnly => misaligned_ends_land_whole,
    /// Reads the source, and sends it, after the call failed.
    SourceReadAfterReturn => a_source_is_never_read_after_its_call_returned,
    /// Says done when the target refused.
    SwallowedError => out_of_bounds_is_refused_and_nothing_lands,
    /// Does not look at bounds.
    UncheckedBounds => out_of_bounds_is_refused_and_nothing_lands,
    /// Looks at bounds with arithmetic that wraps.
    WrappingBounds => out_of_bounds_is_refused_and_nothing_lands,
    /// Looks at the bounds of writes only.
    UncheckedReads => out_of_bounds_reads_are_refused,
    /// Takes registered neighbours for one region.
    MergedNeighbours => neighbouring_regions_are_not_one,
    /// Does not look at what a region allows.
    UncheckedAccess => a_region_allows_only_what_its_owner_said,
    /// Punishes all traffic with a pause after it refused something.
    PenaltyAfterRefusal => out_of_bounds_is_refused_and_nothing_lands,
    /// Lets one refusal fail what runs beside it.
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
    /// Never says how it ended.
    Hang => done_means_all_bytes_are_there,
    /// Loses a byte of each descriptor longer than 64 KiB.
    TornBigDescriptor => done_means_all_bytes_are_there,
    /// Loses a bit of a length beyond 4 MiB.
    TruncatedLength => more_than_64_mib_land_whole,
    /// Does no more than 4 096 descriptors of a batch.
    DescriptorsDropped => seventy_thousand_descriptors_land_whole,
    /// Answers reads from a cache.
    StaleRead => reads_fetch_the_bytes_of_now,
    /// Goes on writing after unregister returned.
    WriteAfterUnregister => nothing_lands_after_unregister_returned,
    /// Goes on reading the peer's memory after unregister returned there.
    ReadAfterUnregister => nothing_is_read_after_unregister_returned,
    /// Goes on with local memory after unregister returned.
    LocalAfterUnregister => a_local_region_is_left_alone_after_unregister_returned,
    /// Does not wait for device copies in unregister.
    UnregisterForgetsDevice => unregister_waits_for_the_device,
    /// Does not wait in unregister for the copier that is at it.
    HastyUnregister => unregister_leaves_no_copier_inside,
    /// Finds a new region by an old one's name.
    StaleNames => unregistered_ranges_are_refused,
    /// Does three quarters of a batch and says all of it was done.
    PartialBatch => scattered_blocks_land_where_they_were_aimed,
    /// Counts wrong what it moved.
    WrongCount => every_byte_lands_and_nothing_else,
    /// Ends when it ends.
    DeadlinesIgnored => a_deadline_is_honoured,
    /// Does not count failed transfers as ended.
    LeakedCounter => gauges_return_to_zero,
    /// Keeps something of an endpoint that was closed.
    LeakedSession => nothing_is_left_of_endpoints_that_were_closed,
    /// Shares one buffer between transfers.
    SharedBuffer => ten_callers_at_once_all_land,
    /// Serves in the order of arrival, each batch as a whole.
    Starvation => a_small_batch_is_not_starved_by_big_ones,
    /// Serves small batches when there are no big ones.
    PrefersBig => callers_take_turns,
    /// Forgets transfers beyond a full queue.
    FullQueue => hundreds_of_transfers_in_flight_all_end,
    /// Never signals the event fd.
    SilentEventFd => the_event_fd_is_readable_once_it_ended,
    /// Cancels when the last handle is dropped.
    DropCancels => dropped_handles_neither_cancel_nor_leak,
    /// Cancels when a wait runs out of time.
    WaitCancels => waiting_does_not_end_a_transfer,
    /// Lets whoever waits sleep until its time is up.
    SleepyWait => a_wait_ends_with_its_transfer,
    /// Takes a device's failure for success.
    DeviceErrorSwallowed => a_failing_device_fails_its_transfer,
    /// Waits for one device before it serves anybody else.
    OneDeviceBlocksAll => a_stuck_device_does_not_stop_other_regions,
    /// Does not end an empty batch.
    EmptyBatchHangs => an_empty_batch_ends_at_once,
    /// Moves a byte for a descriptor of no length.
    ZeroMeansOne => zero_length_descriptors_move_nothing,
}

impl Fault {
    /// Whether it may show as a transfer without an end, which the suite has to give up on.
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
}

/// The transport in memory.
#[derive(Clone, Copy, Debug)]
pub struct InMemory {
    fault: Option<Fault>,
    effort: Effort,
    patience: Duration,
}

impl InMemory {
    /// Without a fault.
    pub const fn correct() -> Self {
        Self { fault: None, effort: Effort::Full, patience: Duration::from_secs(20) }
    }

    /// Without a fault, and otherwise like [`InMemory::broken`].
    pub const fn brief() -> Self {
        Self { fault: None, ..Self::broken(Fault::Hang) }
    }

    /// With one fault; asks the suite to be brief and to have little patience.
    pub const fn broken(fault: Fault) -> Self {
        Self { fault: Some(fault), effort: Effort::Brief, patience: Duration::from_millis(2500) }
    }
}

impl Fabric for InMemory {
    fn name(&self) -> String {
        match self.fault {
            None => "in memory".into(),
            Some(fault) => format!("in memory, {fault:?}"),
        }
    }

    fn pair(&self, _: MemoryKind) -> Result<Pair, Failure> {
        Ok(wire::pair(self.fault))
    }

    fn effort(&self) -> Effort {
        self.effort
    }

    fn patience(&self) -> Duration {
        self.patience
    }
}
