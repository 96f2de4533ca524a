//! The blocks of a request at a producer rank, as they cross the wire.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use thiserror::Error;

/// A missing block: it left the attention window, or was never needed. It is not read.
pub const NULL_BLOCK: u32 = u32::MAX;

/// The most blocks of one group of one request.
pub const BLOCKS_MAX: usize = 1 << 20;

/// Consecutive blocks of one group of a request, by the numbers the producer's engine gives them.
///
/// On the wire they are one string of bytes: for each run of consecutive numbers its length and the
/// distance from the run before, both as variable-length integers. A random table takes 3 to 4
/// bytes per block, one of a few runs a few bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// Index of the first of them among the request's blocks of that group.
    pub first: u32,
    /// Numbers, or [`NULL_BLOCK`].
    pub blocks: Vec<u32>,
}

/// Error for a table that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum TableError {
    /// There is a gap between the known blocks and the added ones.
    #[error("blocks from index {first} on were added, but only {known} are known")]
    Gap { first: u32, known: u64 },
    /// A known block was announced with another number. `index` is among the request's blocks.
    #[error("block {index} was announced as number {before}, and now as {now}")]
    Changed { index: u64, before: u32, now: u32 },
    /// More than [`BLOCKS_MAX`].
    #[error("more than {BLOCKS_MAX} blocks")]
    TooMany,
    /// The bytes are malformed.
    #[error("malformed block table")]
    Malformed,
}

impl BlockTable {
    /// The blocks from `first` on.
    pub const fn new(first: u32, blocks: Vec<u32>) -> Self {
        Self { first, blocks }
    }

    /// The index behind the last block.
    pub fn end(&self) -> u64 {
        u64::from(self.first) + self.blocks.len() as u64
    }

    /// The number of a block of the request; `None` if it is missing or unknown.
    pub fn block(&self, index: u32) -> Option<u32> {
        let at = index.checked_sub(self.first)? as usize;
        self.blocks.get(at).copied().filter(|block| *block != NULL_BLOCK)
    }

    /// Adds later blocks. Known blocks may be repeated, or be missing by now.
    ///
    /// # Errors
    /// There would be a gap or too many blocks, or a known block would change its number. Nothing
    /// was added.
    pub fn merge(&mut self, more: &Self) -> Result<(), TableError> {
        if self.blocks.is_empty() {
            self.clone_from(more);
            return Ok(());
        }
        if more.blocks.is_empty() {
            return Ok(());
        }
        if u64::from(more.first) > self.end() || more.first < self.first {
            return Err(TableError::Gap { first: more.first, known: self.end() });
        }
        let at = (more.first - self.first) as usize;
        let common = (self.blocks.len() - at).min(more.blocks.len());
        if at + more.blocks.len() > BLOCKS_MAX {
            return Err(TableError::TooMany);
        }
        let pairs = self.blocks[at..].iter().zip(&more.blocks);
        for (n, (&before, &now)) in pairs.enumerate() {
            if before != now && before != NULL_BLOCK && now != NULL_BLOCK {
                let index = u64::from(more.first) + n as u64;
                return Err(TableError::Changed { index, before, now });
            }
        }
        self.blocks[at..at + common].copy_from_slice(&more.blocks[..common]);
        self.blocks.extend_from_slice(&more.blocks[common..]);
        Ok(())
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(8 + self.blocks.len() * 3);
        put(&mut out, u64::from(self.first));
        let mut next = 0_i64;
        let mut rest = &self.blocks[..];
        while let Some(&start) = rest.first() {
            let follows = |at: usize, block: u32| match start {
                NULL_BLOCK => block == NULL_BLOCK,
                _ => block != NULL_BLOCK && u64::from(block) == u64::from(start) + at as u64,
            };
            let run = rest.iter().enumerate().take_while(|&(at, &b)| follows(at, b)).count();
            put(&mut out, (run as u64) << 1 | u64::from(start == NULL_BLOCK));
            if start != NULL_BLOCK {
                put(&mut out, zigzag(i64::from(start) - next));
                next = i64::from(start) + run as i64;
            }
            rest = &rest[run..];
        }
        out
    }

    fn decode(bytes: &[u8]) -> Result<Self, TableError> {
        let (first, mut runs) = Runs::of(bytes)?;
        // A run takes two bytes at least, and most runs are one block.
        let mut blocks = Vec::with_capacity(bytes.len() / 2);
        while let Some(run) = runs.next()? {
            run.extend(&mut blocks, run.len);
        }
        Ok(Self { first, blocks })
    }
}

/// A [`BlockTable`] as it crosses the wire: checked and counted, but not expanded. A few bytes can stand for a
/// million blocks, and a peer sends tables that nothing here needs.
#[derive(Clone, PartialEq, Eq)]
pub struct PackedTable {
    first: u32,
    blocks: u32,
    bytes: Vec<u8>,
}

impl PackedTable {
    /// Index of the first block among the request's blocks of that group.
    pub const fn first(&self) -> u32 {
        self.first
    }

    /// Number of blocks in the table.
    pub const fn blocks(&self) -> usize {
        self.blocks as usize
    }

    /// The index behind the last block.
    pub fn end(&self) -> u64 {
        u64::from(self.first) + u64::from(self.blocks)
    }

    /// The table.
    pub fn unpack(&self) -> BlockTable {
        BlockTable::decode(&self.bytes).expect("it was checked")
    }

    fn decode(bytes: &[u8]) -> Result<Self, TableError> {
        let (first, mut runs) = Runs::of(bytes)?;
        while runs.next()?.is_some() {}
        Ok(Self { first, blocks: runs.blocks as u32, bytes: bytes.to_vec() })
    }

    /// Calls `each` for each run with its index among the request's blocks, until it fails.
    fn runs<E>(&self, mut each: impl FnMut(u64, Run) -> Result<(), E>) -> Result<(), E> {
        let (_, mut runs) = Runs::of(&self.bytes).expect("it was checked");
        loop {
            let at = u64::from(self.first) + runs.blocks as u64;
            match runs.next().expect("it was checked") {
                Some(run) => each(at, run)?,
                None => return Ok(()),
            }
        }
    }
}

impl std::fmt::Debug for PackedTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PackedTable({}..{})", self.first, self.end())
    }
}

impl From<&BlockTable> for PackedTable {
    fn from(table: &BlockTable) -> Self {
        let blocks = u32::try_from(table.blocks.len()).unwrap_or(u32::MAX);
        Self { first: table.first, blocks, bytes: table.encode() }
    }
}

impl From<BlockTable> for PackedTable {
    fn from(table: BlockTable) -> Self {
        Self::from(&table)
    }
}

/// The blocks of a group that were announced. Those beyond a bound are counted and not kept: nothing here
/// needs them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KnownTable {
    /// Up to the bound.
    pub(super) table: BlockTable,
    /// Number of announced blocks, from the first on.
    announced: usize,
}

impl KnownTable {
    /// Whether `more` can follow. Known blocks may be repeated, or be missing by now.
    ///
    /// # Errors
    /// There would be a gap or too many blocks, or a known block would change its number.
    pub(super) fn check(&self, more: &PackedTable) -> Result<(), TableError> {
        if self.announced == 0 || more.blocks == 0 {
            return Ok(());
        }
        let (first, known) =
            (self.table.first, u64::from(self.table.first) + self.announced as u64);
        if u64::from(more.first) > known || more.first < first {
            return Err(TableError::Gap { first: more.first, known });
        }
        if more.end() - u64::from(first) > BLOCKS_MAX as u64 {
            return Err(TableError::TooMany);
        }
        more.runs(|index, run| {
            let at = (index - u64::from(first)) as usize;
            let known = self.table.blocks.get(at..).unwrap_or_default();
            for (n, &before) in known.iter().take(run.len).enumerate() {
                let now = run.block(n);
                if before != now && before != NULL_BLOCK && now != NULL_BLOCK {
                    return Err(TableError::Changed { index: index + n as u64, before, now });
                }
            }
            Ok(())
        })
    }

    /// Adds blocks that [`KnownTable::check`] has passed, as far as their index is below `most`.
    pub(super) fn add(&mut self, more: &PackedTable, most: u32) {
        if self.announced == 0 {
            self.table.first = more.first;
        }
        let first = self.table.first;
        let most = most.saturating_sub(first) as usize;
        let blocks = &mut self.table.blocks;
        if more.blocks > 0 {
            let end = (more.end() - u64::from(first)) as usize;
            self.announced = self.announced.max(end);
            blocks.reserve(end.min(most).saturating_sub(blocks.len()));
        }
        let added = more.runs::<std::convert::Infallible>(|index, run| {
            let at = (index - u64::from(first)) as usize;
            let kept = run.len.min(most.saturating_sub(at));
            let known = blocks.len().saturating_sub(at).min(kept);
            for (n, block) in blocks.iter_mut().skip(at).take(known).enumerate() {
                *block = run.block(n);
            }
            run.skip(known).extend(blocks, kept - known);
            Ok(())
        });
        let Ok(()) = added;
    }
}

/// Consecutive numbers, or missing blocks.
#[derive(Clone, Copy)]
struct Run {
    start: u32,
    len: usize,
}

impl Run {
    const fn block(&self, n: usize) -> u32 {
        if self.start == NULL_BLOCK { NULL_BLOCK } else { self.start + n as u32 }
    }

    const fn skip(self, n: usize) -> Self {
        if self.start == NULL_BLOCK {
            return Self { len: self.len - n, ..self };
        }
        // Behind the last number this is the null block, and the length is zero.
        Self { start: self.start + n as u32, len: self.len - n }
    }

    /// Appends the first `len` blocks of it.
    fn extend(self, blocks: &mut Vec<u32>, len: usize) {
        if self.start == NULL_BLOCK {
            blocks.resize(blocks.len() + len, NULL_BLOCK);
        } else {
            blocks.extend(self.start..self.start + len as u32);
        }
    }
}

/// Reads the runs of a packed table.
struct Runs<'a> {
    bytes: &'a [u8],
    next: i64,
    /// Blocks of the runs so far.
    blocks: usize,
}

impl<'a> Runs<'a> {
    /// The index of the first block, and the runs.
    fn of(mut bytes: &'a [u8]) -> Result<(u32, Self), TableError> {
        let first = take(&mut bytes).and_then(|n| u32::try_from(n).ok());
        Ok((first.ok_or(TableError::Malformed)?, Self { bytes, next: 0, blocks: 0 }))
    }

    fn next(&mut self) -> Result<Option<Run>, TableError> {
        if self.bytes.is_empty() {
            return Ok(None);
        }
        let head = take(&mut self.bytes).ok_or(TableError::Malformed)?;
        let len = usize::try_from(head >> 1).unwrap_or(usize::MAX);
        if len == 0 {
            return Err(TableError::Malformed);
        }
        if len > BLOCKS_MAX - self.blocks {
            return Err(TableError::TooMany);
        }
        self.blocks += len;
        if head & 1 == 1 {
            return Ok(Some(Run { start: NULL_BLOCK, len }));
        }
        let distance = unzigzag(take(&mut self.bytes).ok_or(TableError::Malformed)?);
        let start = self.next.checked_add(distance).ok_or(TableError::Malformed)?;
        let end = start.checked_add(len as i64).ok_or(TableError::Malformed)?;
        if start < 0 || end > i64::from(NULL_BLOCK) {
            return Err(TableError::Malformed);
        }
        self.next = end;
        Ok(Some(Run { start: start as u32, len }))
    }
}

impl Serialize for BlockTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.encode())
    }
}

impl Serialize for PackedTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.bytes)
    }
}

impl<'de> Deserialize<'de> for PackedTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes: Cow<'_, [u8]> = serde_bytes::deserialize(deserializer)?;
        Self::decode(&bytes).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for BlockTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes: Cow<'_, [u8]> = serde_bytes::deserialize(deserializer)?;
        Self::decode(&bytes).map_err(D::Error::custom)
    }
}

fn zigzag(n: i64) -> u64 {
    (n.cast_unsigned() << 1) ^ (n >> 63).cast_unsigned()
}

fn unzigzag(n: u64) -> i64 {
    (n >> 1).cast_signed() ^ -(n & 1).cast_signed()
}

/// Seven bits a byte, the lowest first; the top bit says that more follow.
fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut n = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return None;
        }
        n |= bits << shift;
        if byte < 0x80 {
            return Some(n);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn known(table: &BlockTable) -> KnownTable {
        let mut known = KnownTable::default();
        merge(&mut known, table).expect("the first blocks");
        known
    }

    fn merge(known: &mut KnownTable, more: &BlockTable) -> Result<(), TableError> {
        let more = PackedTable::from(more);
        known.check(&more).map(|()| known.add(&more, u32::MAX))
    }

    proptest! {
        #[test]
        fn tables_announced_in_parts_that_overlap_add_up_to_the_whole(
            blocks in prop::collection::vec(0..1000_u32, 1..50), cut in 0..50_usize, back in 0..50_usize,
        ) {
            let whole = BlockTable::new(7, blocks);
            let cut = cut.min(whole.blocks.len());
            let mut known = known(&BlockTable::new(7, whole.blocks[..cut].to_vec()));
            let from = cut.saturating_sub(back);
            let more = BlockTable::new(7 + from as u32, whole.blocks[from..].to_vec());
            if cut > 0 || more.first == 7 {
                prop_assert_eq!(merge(&mut known, &more), Ok(()));
                prop_assert_eq!(known.table, whole);
            }
        }

        #[test]
        fn a_bound_cuts_what_is_kept_and_nothing_else(
            blocks in prop::collection::vec(0..20_u32, 1..50), cut in 0..50_usize, most in 0..60_u32,
        ) {
            let whole = BlockTable::new(7, blocks);
            let cut = cut.min(whole.blocks.len());
            let (one, two) = whole.blocks.split_at(cut);
            let parts = [
                BlockTable::new(7, one.to_vec()),
                BlockTable::new(7 + cut as u32, two.to_vec()),
            ];
            let mut known = KnownTable::default();
            for part in parts.iter().filter(|part| !part.blocks.is_empty()) {
                let part = PackedTable::from(part);
                prop_assert_eq!(known.check(&part), Ok(()));
                known.add(&part, most);
            }
            let kept = (most.saturating_sub(7) as usize).min(whole.blocks.len());
            prop_assert_eq!(&known.table.blocks[..], &whole.blocks[..kept]);
            prop_assert!(known.table.blocks.capacity() <= 2 * kept.max(4));
            prop_assert_eq!(known.announced, whole.blocks.len());
        }
    }

    #[test]
    fn a_random_table_of_8k_tokens_takes_2_kib_and_an_orderly_one_nothing() {
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u32 % 60_000
        };
        let random = BlockTable::new(0, (0..512).map(|_| random()).collect()).encode();
        assert!(random.len() <= 512 * 4 + 2, "{}", random.len());
        assert!(BlockTable::new(0, (0..512).collect()).encode().len() <= 5);
    }

    #[test]
    fn a_run_that_claims_more_than_there_may_be_costs_nothing() {
        let mut bytes = vec![0];
        put(&mut bytes, u64::MAX);
        assert_eq!(BlockTable::decode(&bytes), Err(TableError::TooMany));
        assert_eq!(PackedTable::decode(&bytes), Err(TableError::TooMany));
    }

    #[test]
    fn a_table_that_arrives_takes_the_bytes_that_it_has_on_the_wire() {
        let million = BlockTable::new(0, (0..BLOCKS_MAX as u32).collect());
        let table = PackedTable::decode(&million.encode()).expect("a table");
        assert_eq!((table.blocks(), table.end()), (BLOCKS_MAX, BLOCKS_MAX as u64));
        assert!(table.bytes.capacity() < 16, "{}", table.bytes.capacity());
        let mut known = KnownTable::default();
        known.add(&table, 100);
        assert_eq!(known.table.blocks, (0..100).collect::<Vec<_>>());
        assert!(known.table.blocks.capacity() < 200);
        assert_eq!(table.unpack(), million);
    }

    #[test]
    fn gaps_and_changes_are_named_and_holes_are_none() {
        let mut known = known(&BlockTable::new(2, vec![10, 11, 12]));
        let gap = BlockTable::new(6, vec![1]);
        assert_eq!(merge(&mut known, &gap), Err(TableError::Gap { first: 6, known: 5 }));
        let changed = BlockTable::new(4, vec![13]);
        let error = TableError::Changed { index: 4, before: 12, now: 13 };
        assert_eq!(merge(&mut known, &changed), Err(error));
        assert_eq!(merge(&mut known, &BlockTable::new(2, vec![NULL_BLOCK, 11, 12, 13])), Ok(()));
        assert_eq!(known.table.blocks, [NULL_BLOCK, 11, 12, 13]);
        assert_eq!(
            [1, 2, 3, 5, 6].map(|index| known.table.block(index)),
            [None, None, Some(11), Some(13), None]
        );
    }
}
