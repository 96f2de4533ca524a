//! Options for opening a store.

use crate::error::{Error, Result};
use crate::index::{MAX_SEGMENTS, MAX_SLOTS};
use crate::tiers::objects::ObjectTier;
use kvferry::DirectIo;
use std::path::PathBuf;
use std::time::Duration;

/// Bytes of a segment: at least, at most, and in steps of.
const SEGMENT_BYTES: (u64, u64, u64) = (1 << 20, 1 << 32, 1 << 20);
/// Segments that a store is cut into, if the caller does not say how long they are.
pub(crate) const SEGMENTS: u64 = 256;
/// Segments of a store, at least: one is written, one is free, one is collected into, and one or more hold
/// what is kept.
const SEGMENTS_MIN: u64 = 8;
/// Default time limit of an operation, after which its directory hangs.
const HANG_AFTER: Duration = Duration::from_secs(10);
/// Bytes of other files in the directories: those that say what the directories are.
const OTHER_BYTES: u64 = 1 << 16;
/// Bytes of disk per block, if the caller does not say how many blocks there may be.
const BYTES_PER_BLOCK: u64 = 32 << 10;

/// Where a store is, and how large it may become.
///
/// ```
/// use kvferry_store::StoreOptions;
///
/// let options = StoreOptions::new("/var/cache/kv", 100 << 30).blocks_max(1_000_000);
/// ```
#[derive(Clone, Debug)]
pub struct StoreOptions {
    pub(crate) directories: Vec<PathBuf>,
    pub(crate) capacity: u64,
    pub(crate) segment_bytes: Option<u64>,
    pub(crate) blocks_max: Option<u32>,
    pub(crate) direct: DirectIo,
    pub(crate) host_bytes: u64,
    pub(crate) put_wait: Duration,
    pub(crate) hang_after: Duration,
    pub(crate) adopt_empty: bool,
    pub(crate) must_exist: bool,
    pub(crate) objects: Option<ObjectTier>,
}

impl StoreOptions {
    /// A store in `directory`, which is made if it does not exist. All its files together never have more
    /// than `capacity` bytes.
    ///
    /// The directory, its capacity and the options below are those of the process that makes the store.
    /// Another capacity may be given later: a smaller one deletes the segments beyond it, with their blocks, which is
    /// logged. A store has 16 TiB at most, and with
    /// segments of 1 MiB, 1 TiB: what is given beyond that is not used, which is logged.
    pub fn new(directory: impl Into<PathBuf>, capacity: u64) -> Self {
        Self {
            directories: vec![directory.into()],
            capacity,
            segment_bytes: None,
            blocks_max: None,
            direct: DirectIo::Off,
            host_bytes: 0,
            put_wait: Duration::ZERO,
            hang_after: HANG_AFTER,
            adopt_empty: false,
            must_exist: false,
            objects: None,
        }
    }

    /// Adds a directory, on another device. Segments are spread over the directories evenly.
    ///
    /// All directories of the store are given each time, in any order: each one says which it is. One that is
    /// missing or can't be read costs its own blocks.
    #[must_use]
    pub fn and_directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directories.push(directory.into());
        self
    }

    /// Bytes of a segment: 1 MiB to 4 GiB, in whole MiB. By default a 256th of the capacity. A process that
    /// puts blocks has a segment of its own, and space is freed by segments.
    #[must_use]
    pub fn segment_bytes(self, bytes: u64) -> Self {
        Self { segment_bytes: Some(bytes), ..self }
    }

    /// How many blocks there may be. Each takes some 64 bytes of memory, whether or not it exists, once as
    /// many blocks have been there at the same time. By default, one for each 32 KiB of the capacity.
    #[must_use]
    pub fn blocks_max(self, blocks: u32) -> Self {
        Self { blocks_max: Some(blocks), ..self }
    }

    /// Whether blocks go past the page cache. By default they do not: what was used last is then read from
    /// memory that nothing else needs.
    #[must_use]
    pub fn direct(self, direct: DirectIo) -> Self {
        Self { direct, ..self }
    }

    /// A tier in host memory, of this process alone: 0, the default, for none, or 1 MiB and more, which are
    /// allocated at once.
    ///
    /// What is put is copied there and written to the disk in the background; what is read stays there.
    /// [`Space::put`](crate::Space::put) then returns before its blocks are on the disk: other processes find
    /// them a little later, and a process that is killed loses those that were not written.
    /// [`Store::sync`](crate::Store::sync) waits for them. Of use where blocks go past the page cache, or
    /// where the disk is slower than the engine.
    #[must_use]
    pub fn host_bytes(self, bytes: u64) -> Self {
        Self { host_bytes: bytes, ..self }
    }

    /// How long one [`Space::put`](crate::Space::put) waits, all its blocks together and from the call on, for space where
    /// no segment is free, and for a lock of the index that a stopped process holds: 0, the default, refuses such blocks
    /// at once. Of a
    /// [`Space::put_async`](crate::Space::put_async) with a `wait` it counts from its turn on. Where others have waited for
    /// as long and nothing was freed since, a put does not wait again. Closing the store ends all waits.
    ///
    /// Blocks that wait in host memory are written once there is space. A put of blocks for which that memory has no
    /// room waits for 10 s, or for this time if it is longer.
    #[must_use]
    pub fn put_wait(self, longest: Duration) -> Self {
        Self { put_wait: longest, ..self }
    }

    /// How long an operation on a directory may take until the directory *hangs*: 10 s by default. Syncing, making and
    /// removing a file may take six times as long; of several directories, one that does not answer a read beside them
    /// hangs after twice the time.
    ///
    /// A directory hangs until the operation has ended. Meanwhile its blocks are missed, and nothing is put there; they
    /// are there again afterwards. With several directories, the threads of the store do not wait for one that hangs.
    /// A `get` or `put` whose memory the device may still touch waits until it has answered.
    #[must_use]
    pub fn hang_after(self, longest: Duration) -> Self {
        Self { hang_after: longest, ..self }
    }

    /// Whether an empty directory takes the place of one that the store has lost. By default it does not, and counts as
    /// lost, too: it may be the folder below a device that is not mounted. What a process writes there would be on the
    /// file system of the folder, and hidden once the device is mounted.
    ///
    /// It counts for the first process that opens the store, and not while another directory can't be read, which could be
    /// the one of that number. `kvferry store adopt` does the same once.
    #[must_use]
    pub fn adopt_empty(self, adopts: bool) -> Self {
        Self { adopt_empty: adopts, ..self }
    }

    /// Whether opening fails with [`Error::NoStore`](crate::Error::NoStore) where none of the directories has a store. By
    /// default a store is made there, also in the folder below a device that is not mounted, on the file system of that
    /// folder. Where some of the directories have the store and others are empty, those count as lost either way.
    #[must_use]
    pub fn must_exist(self, must: bool) -> Self {
        Self { must_exist: must, ..self }
    }

    /// An object store, to which this process uploads the blocks that it puts, and from which
    /// [`Space::prefetch`](crate::Space::prefetch) brings blocks. By default there is none.
    #[must_use]
    pub fn objects(self, tier: ObjectTier) -> Self {
        Self { objects: Some(tier), ..self }
    }

    /// Checks the sizes, without opening anything.
    ///
    /// # Errors
    /// `InvalidArgument`: the capacity or the segments are too small or too large for a new store.
    pub fn check(&self) -> Result<()> {
        self.geometry(None).map(drop)
    }

    /// Bytes of a store with segments of this length, at most.
    pub(crate) fn capacity_max(segment_bytes: u64) -> u64 {
        let segments = ((1 << 32) / (segment_bytes >> 12) - 1).min(MAX_SEGMENTS.into());
        segments * segment_bytes + OTHER_BYTES
    }

    /// The capacity in segments, of the size that an existing store has, or of that of a new one.
    pub(crate) fn geometry(&self, existing: Option<u64>) -> Result<Geometry> {
        let (min, max, step) = SEGMENT_BYTES;
        let default = (self.capacity / SEGMENTS / step * step).clamp(min, max);
        let segment_bytes = existing.or(self.segment_bytes).unwrap_or(default);
        if !(min..=max).contains(&segment_bytes) || !segment_bytes.is_multiple_of(step) {
            return Err(Error::InvalidArgument(format!(
                "segments have 1 MiB to 4 GiB, in whole MiB, got {segment_bytes} bytes"
            )));
        }
        let capacity = self.capacity.min(Self::capacity_max(segment_bytes));
        let segments = capacity.saturating_sub(OTHER_BYTES) / segment_bytes;
        if segments < SEGMENTS_MIN {
            return Err(Error::InvalidArgument(format!(
                "a capacity of {} bytes has only {segments} segments of {segment_bytes} bytes, \
                 {SEGMENTS_MIN} are needed",
                self.capacity
            )));
        }
        let blocks = segments * segment_bytes / BYTES_PER_BLOCK;
        let blocks_max = self.blocks_max.unwrap_or(u32::try_from(blocks).unwrap_or(u32::MAX));
        Ok(Geometry {
            segments: u32::try_from(segments).expect("fewer than pages"),
            segment_bytes,
            blocks_max: blocks_max.clamp(1024, MAX_SLOTS),
        })
    }
}

/// A store in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) segments: u32,
    pub(crate) segment_bytes: u64,
    pub(crate) blocks_max: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_segments_together_stay_below_the_capacity() {
        for capacity in [9 << 20, 100 << 20, (3 << 30) + 12_345, 1 << 40, 1 << 45, 120 << 40] {
            let geometry = StoreOptions::new("kv", capacity).geometry(None).expect("large enough");
            assert!(geometry.blocks_max <= MAX_SLOTS);
            let bytes = u64::from(geometry.segments) * geometry.segment_bytes;
            assert!(bytes + (1 << 16) <= capacity, "{geometry:?}");
            assert!(bytes * 10 >= capacity.min(1 << 44) * 7, "{geometry:?} of {capacity}");
            assert!(bytes >> 12 < 1 << 32);
        }
    }

    #[test]
    fn a_store_has_as_many_segments_as_the_index_has_room_for() {
        let options = StoreOptions::new("kv", 8 << 40).segment_bytes(1 << 20);
        let geometry = options.geometry(None).expect("large enough");
        assert_eq!(geometry.segments, MAX_SEGMENTS);
    }

    #[test]
    fn a_capacity_that_is_too_small_is_refused() {
        assert!(StoreOptions::new("kv", 5 << 20).geometry(None).is_err());
        assert!(StoreOptions::new("kv", 1 << 30).segment_bytes(1 << 30).geometry(None).is_err());
        assert!(StoreOptions::new("kv", 1 << 30).segment_bytes(5000).geometry(None).is_err());
    }
}
