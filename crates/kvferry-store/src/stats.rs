//! Counters of a store.

use crate::outcome::Put;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        /// What this process has done with a store since it opened it, and what the store holds now.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// Blocks in the store.
            pub blocks: u64,
            /// Bytes of all segments that exist, garbage included. What other processes make or remove shows with a
            /// later call: each call has the files counted anew in the background.
            pub disk_bytes: u64,
            /// Directories that hang now: their blocks are missed, and their bytes are those that were known last.
            pub hanging_directories: u64,
            /// Bytes that the store may take.
            pub capacity_bytes: u64,
            /// Blocks in this process's tier in host memory.
            pub host_blocks: u64,
            /// Bytes that they take.
            pub host_bytes: u64,
            /// Bytes of blocks in host memory that are not on the disk yet.
            pub waiting_bytes: u64,
            /// Blocks in host memory that could not be written at the last try. They are tried again, and count as
            /// refused or failed if they never are written.
            pub unwritten_blocks: u64,
            /// Processes that have the store open.
            pub processes: u64,
            /// 1 if this process is the one that frees space.
            pub is_keeper: u64,
            /// Blocks that wait for their upload, or are being uploaded.
            pub uploads_waiting: u64,
            /// 1 if the object store fails: no requests are made for a while.
            pub is_away: u64,
        }

        impl Counters {
            pub(crate) fn read(&self) -> Stats {
                Stats { $($name: self.$name.load(Relaxed),)* ..Stats::default() }
            }
        }

        impl Stats {
            /// The counters, by name.
            pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Blocks that were asked for.
    asked,
    /// Blocks that were read and whose sums were right.
    hits,
    /// Hits on blocks in host memory.
    host_hits,
    /// Hits on blocks that another call was reading at the same time.
    shared_hits,
    /// Blocks that were read from the disk, also to look at them once more.
    disk_reads,
    /// Bytes of hits.
    bytes_read,
    /// Blocks that were stored on the disk.
    stored,
    /// Bytes of stored blocks.
    bytes_written,
    /// Blocks that were not stored because they were there.
    present,
    /// Blocks that were not stored, for one of the reasons below.
    refused,
    /// Blocks that were refused because no segment was free.
    refused_no_space,
    /// Blocks that were refused because a stopped process holds a lock of the index.
    refused_contended,
    /// Blocks that were refused because the index had no room.
    refused_index_full,
    /// Blocks that were put in the background and refused before the put began: too much waited, the put has waited for
    /// too long, or it was cancelled.
    refused_waiting,
    /// Blocks that were not stored, or not read, because of a device's error.
    failed,
    /// Blocks that were found damaged, and removed.
    corrupt,
    /// Blocks that had to leave for others.
    evicted,
    /// Bytes of blocks that were copied to free their segments.
    bytes_collected,
    /// Blocks that were uploaded to the object store, or were there.
    uploaded,
    /// Blocks that were not uploaded: too many waited, they had left the disk, or uploading them failed for good.
    upload_dropped,
    /// Requests to upload a block that failed. A block is dropped after three that count: another upload has succeeded
    /// since the last.
    upload_failed,
    /// Blocks that were fetched from the object store.
    fetched,
    /// Blocks that a prefetch did not find in the object store, or did not ask for because they were not there
    /// before, or the object store was away.
    fetch_missed,
    /// Requests to fetch a block that failed.
    fetch_failed,
    /// Objects that were not what was uploaded.
    fetch_corrupt,
    /// Directories that could not be read when this process opened the store.
    lost_directories,
}

impl Counters {
    /// Counts the blocks of a put that were not stored, or were there.
    pub(crate) fn add_not_stored(&self, put: &Put) {
        Self::add(&self.present, put.present);
        Self::add(&self.failed, put.failed);
        Self::add(&self.refused, put.refused);
        Self::add(&self.refused_no_space, put.refused_no_space);
        Self::add(&self.refused_contended, put.refused_contended);
        Self::add(&self.refused_index_full, put.refused_index_full);
        Self::add(&self.refused_waiting, put.refused_waiting);
    }

    pub(crate) fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Relaxed);
    }
}
