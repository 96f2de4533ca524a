//! The bytes of a store on disk, version 3.
//!
//! Integers are little-endian. A *page* is 4096 bytes; a *sum* is a CRC-64/NVME. All times and the
//! fields marked *opaque* are the writer's; a reader of the log does not interpret them.
//!
//! # Directories
//!
//! A store has one directory or several. Each has these files:
//!
//! | file               | content                                                           |
//! |--------------------|-------------------------------------------------------------------|
//! | `kvferry.store`    | the superblock, replaced only by an atomic rename                 |
//! | `segment-00000000` | segment 0 (eight decimal digits), of the superblock's segment size |
//!
//! Segment *n* is in the directory whose number is *n* modulo the count of directories. Each directory also has the
//! files `join` and `members`, which are empty and locked by processes.
//!
//! # Superblock
//!
//! | bytes  | field                                                |
//! |--------|------------------------------------------------------|
//! | 0..8   | magic `kvfstore`                                     |
//! | 8..12  | format version; this and the magic never move        |
//! | 12..16 | the version's complement                             |
//! | 16..32 | store id, random                                     |
//! | 32..40 | segment size in bytes: whole pages, 1 MiB to 4 GiB   |
//! | 40..48 | creation time, Unix milliseconds                     |
//! | 48..52 | number of this directory, from 0 on                  |
//! | 52..56 | count of the store's directories                     |
//! | 56..64 | directory id, random; 0 while the store is being made |
//! | 64..72 | sum of bytes 0..64                                   |
//!
//! The superblocks of a store differ only in the number and the id of the directory. An empty directory that takes the
//! place of a lost one gets an id of its own. When a store is made, all directories get a superblock without an id
//! first: while no directory has an id, the store has no blocks, and one that has no superblock yet belongs to it.
//!
//! Version 2 had no directory id: bytes 56..64 were the sum of bytes 0..56, and the end.
//!
//! Version 1 had a superblock in directory 0 only. It did not say the number and the count: bytes 48..56 were the
//! sum of bytes 0..48, and the end. The segments of version 1 are the same.
//!
//! # Segment
//!
//! | pages     | content                                                                |
//! |-----------|------------------------------------------------------------------------|
//! | 0         | segment header                                                         |
//! | 1..       | extents: a header page each, then the blocks that it describes         |
//! | footer    | once sealed: all records of written blocks, packed, padded with zeros  |
//! | the last  | once sealed: the trailer                                               |
//!
//! The footer ends where the trailer begins. Pages between are unused: zeros, or what an earlier use
//! of the segment left there.
//!
//! A segment is reused under a new *incarnation*, with a new *nonce*. A *seeded* sum of bytes is the
//! sum of the segment's nonce followed by the bytes. The nonce is in the segment header only, so
//! neither a page of an earlier incarnation nor data that a user chose can pass for a page of the log.
//!
//! A segment whose header does not hold for this store and this segment is free.
//!
//! Segment header (page 0, the rest is zero):
//!
//! | bytes  | field                                           |
//! |--------|-------------------------------------------------|
//! | 0..8   | sum of bytes 8..4096                            |
//! | 8..16  | magic `kvfsegmt`                                |
//! | 16..20 | version of the segment's format: 1              |
//! | 20..24 | segment number                                  |
//! | 24..40 | store id                                        |
//! | 40..48 | incarnation: grows with each use in the store   |
//! | 48..64 | nonce, random                                   |
//! | 64..72 | time of this incarnation's begin, Unix milliseconds |
//!
//! Extent header and trailer have the same first 64 bytes:
//!
//! | bytes  | extent header           | trailer                              |
//! |--------|-------------------------|--------------------------------------|
//! | 0..8   | seeded sum of bytes 8..4096 | the same                         |
//! | 8..16  | magic `kvfextnt`        | magic `kvftrail`                     |
//! | 16..24 | incarnation             | the same                             |
//! | 24..28 | own page number         | the same                             |
//! | 28..32 | records, 1 to 56        | records of the footer                |
//! | 32..36 | zero                    | the footer's first page              |
//! | 36..40 | zero                    | zero                                 |
//! | 40..48 | zero                    | seeded sum of the footer, with padding |
//! | 48..64 | zero                    | zero                                 |
//! | 64..   | records                 | zero                                 |
//!
//! Record, 72 bytes:
//!
//! | bytes  | field                                                              |
//! |--------|--------------------------------------------------------------------|
//! | 0..16  | key, two words                                                     |
//! | 16..32 | parent's key, zero for none                                        |
//! | 32..40 | sum of the data (with its padding) xor check                       |
//! | 40..48 | check                                                              |
//! | 48..56 | namespace, opaque                                                  |
//! | 56..60 | first page of the data, in the segment                             |
//! | 60..64 | length of the data in bytes, without padding                       |
//! | 64..68 | retention, opaque                                                  |
//! | 68..72 | time, opaque                                                       |
//!
//! Data begins at a page and is padded with zeros to whole pages, one at least.
//!
//! To read a segment: if the trailer holds and so does the footer, the footer lists the records. If
//! not, look at each page from 1 on; behind an extent header that holds, go on at the end of its last
//! block. Blocks of a listed record may be missing or torn; their sum tells.

use crc_fast::{CrcAlgorithm, Digest};

/// The unit of the log.
pub const PAGE_BYTES: usize = 4096;
/// The format that this release writes.
pub const VERSION: u32 = 3;
/// The format of segments.
const SEGMENT_VERSION: u32 = 1;
/// Records of one extent at most: as many as fit into its header page.
pub const EXTENT_RECORDS: usize = (PAGE_BYTES - RECORDS_AT) / RECORD_BYTES;

pub(super) const RECORD_BYTES: usize = 72;
const RECORDS_AT: usize = 64;

const SEGMENT_MAGIC: [u8; 8] = *b"kvfsegmt";
const EXTENT_MAGIC: [u8; 8] = *b"kvfextnt";
const TRAILER_MAGIC: [u8; 8] = *b"kvftrail";

/// A page in memory, aligned for direct I/O.
#[derive(Clone, Debug)]
#[repr(C, align(4096))]
pub struct Page(pub [u8; PAGE_BYTES]);

impl Page {
    fn zeroed() -> Box<Self> {
        Box::new(Self([0; PAGE_BYTES]))
    }
}

/// The size of a store's segments, and what follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pages: u32,
}

impl Geometry {
    /// The smallest segment.
    pub const MIN_SEGMENT_BYTES: u64 = 1 << 20;
    /// The largest segment.
    pub const MAX_SEGMENT_BYTES: u64 = 4 << 30;

    /// Segments of `segment_bytes`: whole pages, within the bounds above.
    pub fn new(segment_bytes: u64) -> Option<Self> {
        let in_bounds =
            (Self::MIN_SEGMENT_BYTES..=Self::MAX_SEGMENT_BYTES).contains(&segment_bytes);
        let whole = segment_bytes.is_multiple_of(PAGE_BYTES as u64);
        (in_bounds && whole).then(|| Self { pages: (segment_bytes / PAGE_BYTES as u64) as u32 })
    }

    /// Segments smaller than a store may have, so that tests can try each byte.
    #[cfg(test)]
    pub(super) fn tiny(pages: u32) -> Self {
        Self { pages }
    }

    /// The size of a segment.
    pub fn segment_bytes(self) -> u64 {
        bytes_of(self.pages)
    }

    /// Pages of a segment.
    pub fn pages(self) -> u32 {
        self.pages
    }

    /// Segments that places can name.
    pub fn max_segments(self) -> u32 {
        u32::try_from((1 << 32) / u64::from(self.pages)).unwrap_or(u32::MAX)
    }

    /// The largest block that fits into an empty segment.
    pub fn max_block_bytes(self) -> u32 {
        (self.pages - 2 - footer_pages(1)) * PAGE_BYTES as u32
    }

    /// The number, over all segments, of a page of `segment`, which is below
    /// [`max_segments`](Self::max_segments).
    pub fn place(self, segment: u32, page: u32) -> u32 {
        debug_assert!(segment < self.max_segments() && page < self.pages);
        segment * self.pages + page
    }

    /// The segment and the page in it that a place names.
    pub fn locate(self, place: u32) -> (u32, u32) {
        (place / self.pages, place % self.pages)
    }
}

/// Pages that data of `len` bytes takes.
pub fn pages_of(len: u32) -> u32 {
    len.div_ceil(PAGE_BYTES as u32).max(1)
}

/// The offset of a page in its segment.
pub fn bytes_of(pages: u32) -> u64 {
    u64::from(pages) * PAGE_BYTES as u64
}

/// Pages of a footer with its trailer.
pub(super) fn footer_pages(records: u32) -> u32 {
    (u64::from(records) * RECORD_BYTES as u64).div_ceil(PAGE_BYTES as u64) as u32 + 1
}

/// A block's sum, as its record holds it: of its data with the padding, xor `check`.
pub fn sum(data: &[u8], check: u64) -> u64 {
    let padding = bytes_of(pages_of(data.len() as u32)) as usize - data.len();
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(data);
    digest.update(&[0; PAGE_BYTES][..padding]);
    digest.finalize() ^ check
}

/// Metadata of a block in the log, without its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The block's key in the index.
    pub key: [u64; 2],
    /// The key of the block before it, which is not zero.
    pub parent: Option<[u64; 2]>,
    /// See [`sum`].
    pub sum: u64,
    /// Check of the block's full identity. It is stored so that data can be verified without the identity.
    pub check: u64,
    /// Opaque.
    pub namespace: u64,
    /// Bytes of data, without padding.
    pub len: u32,
    /// Opaque.
    pub retention: u32,
    /// Opaque.
    pub time: u32,
}

/// A block and where its data begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Metadata that the writer gave.
    pub block: Block,
    /// The first page of its data in the segment.
    pub page: u32,
}

impl Record {
    /// The page behind the data.
    pub fn end(&self) -> u64 {
        u64::from(self.page) + u64::from(pages_of(self.block.len))
    }

    fn encode(&self, bytes: &mut [u8]) {
        let Block { key, parent, sum, check, namespace, len, retention, time } = self.block;
        let parent = parent.unwrap_or_default();
        let words = [key[0], key[1], parent[0], parent[1], sum, check, namespace];
        for (to, word) in bytes[..56].chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        for (to, word) in bytes[56..].chunks_exact_mut(4).zip([self.page, len, retention, time]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }

    fn decode(bytes: &[u8]) -> Self {
        let parent = [u64_at(bytes, 16), u64_at(bytes, 24)];
        let block = Block {
            key: [u64_at(bytes, 0), u64_at(bytes, 8)],
            parent: (parent != [0, 0]).then_some(parent),
            sum: u64_at(bytes, 32),
            check: u64_at(bytes, 40),
            namespace: u64_at(bytes, 48),
            len: u32_at(bytes, 60),
            retention: u32_at(bytes, 64),
            time: u32_at(bytes, 68),
        };
        Self { block, page: u32_at(bytes, 56) }
    }
}

/// Header of a segment, which describes one use of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The store that the segment belongs to.
    pub store: [u8; 16],
    /// The segment's number.
    pub segment: u32,
    /// Greater than that of every earlier use of any segment of the store.
    pub incarnation: u64,
    /// Random bytes from the system, new for each incarnation.
    pub nonce: [u8; 16],
    /// Time at which this incarnation began, Unix milliseconds.
    pub created_ms: u64,
}

impl SegmentHeader {
    /// Page 0 of the segment.
    pub fn encode(&self) -> Box<Page> {
        let mut page = Page::zeroed();
        let bytes = &mut page.0;
        bytes[8..16].copy_from_slice(&SEGMENT_MAGIC);
        bytes[16..20].copy_from_slice(&SEGMENT_VERSION.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.segment.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.store);
        bytes[40..48].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[48..64].copy_from_slice(&self.nonce);
        bytes[64..72].copy_from_slice(&self.created_ms.to_le_bytes());
        let crc = crc_fast::crc64_nvme(&bytes[8..]);
        bytes[..8].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// The header in a segment's page 0, or `None` for a free segment.
    pub fn decode(page: &[u8], store: &[u8; 16], segment: u32) -> Option<Self> {
        let holds = page[8..16] == SEGMENT_MAGIC
            && u32_at(page, 16) == SEGMENT_VERSION
            && u64_at(page, 0) == crc_fast::crc64_nvme(&page[8..PAGE_BYTES]);
        let header = Self {
            store: array_at(page, 24),
            segment: u32_at(page, 20),
            incarnation: u64_at(page, 40),
            nonce: array_at(page, 48),
            created_ms: u64_at(page, 64),
        };
        (holds && header.store == *store && header.segment == segment).then_some(header)
    }

    /// Whether a page 0 belongs to a segment of another store.
    pub fn is_of_another_store(page: &[u8], store: &[u8; 16]) -> bool {
        Self::store_of(page).is_some_and(|theirs| theirs != *store)
    }

    /// The store that a page 0 belongs to; `None` for a free segment.
    pub fn store_of(page: &[u8]) -> Option<[u8; 16]> {
        let store = array_at(page, 24);
        Self::decode(page, &store, u32_at(page, 20)).map(|_| store)
    }

    /// The sum of `parts`, one behind the other, seeded with the nonce.
    fn seeded<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&self.nonce);
        for part in parts {
            digest.update(part);
        }
        digest.finalize()
    }

    /// Completes a page of the log that has its fields from byte 28 on.
    fn stamp(&self, bytes: &mut [u8; PAGE_BYTES], magic: [u8; 8], page: u32) {
        bytes[8..16].copy_from_slice(&magic);
        bytes[16..24].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[24..28].copy_from_slice(&page.to_le_bytes());
        let crc = self.seeded([&bytes[8..]]);
        bytes[..8].copy_from_slice(&crc.to_le_bytes());
    }

    fn is_stamped(&self, bytes: &[u8], magic: [u8; 8], page: u32) -> bool {
        // The magic first: this is asked of each page of a segment that is not sealed.
        bytes[8..16] == magic
            && u64_at(bytes, 16) == self.incarnation
            && u32_at(bytes, 24) == page
            && u64_at(bytes, 0) == self.seeded([&bytes[8..PAGE_BYTES]])
    }

    /// The header page, at `page`, of an extent of 1 to [`EXTENT_RECORDS`] records.
    pub fn encode_extent(&self, page: u32, records: &[Record]) -> Box<Page> {
        debug_assert!((1..=EXTENT_RECORDS).contains(&records.len()));
        let mut buffer = Page::zeroed();
        buffer.0[28..32].copy_from_slice(&(records.len() as u32).to_le_bytes());
        encode_records(records, &mut buffer.0[RECORDS_AT..]);
        self.stamp(&mut buffer.0, EXTENT_MAGIC, page);
        buffer
    }

    /// The records of the extent header at `page`; `None` if it is none of this incarnation.
    pub fn decode_extent<'a>(
        &self,
        page: u32,
        bytes: &'a [u8],
    ) -> Option<impl Iterator<Item = Record> + use<'a>> {
        if !self.is_stamped(bytes, EXTENT_MAGIC, page) {
            return None;
        }
        let records = u32_at(bytes, 28) as usize;
        (1..=EXTENT_RECORDS)
            .contains(&records)
            .then(|| decode_records(&bytes[RECORDS_AT..], records))
    }

    /// The footer with its trailer, and the page that it begins at.
    pub fn encode_footer(&self, geometry: Geometry, records: &[Record]) -> (u32, Vec<u8>) {
        let count = records.len() as u32;
        let first = geometry.pages - footer_pages(count);
        let mut bytes = vec![0; bytes_of(footer_pages(count)) as usize];
        let (footer, trailer) =
            bytes.split_last_chunk_mut::<PAGE_BYTES>().expect("a footer has a trailer");
        encode_records(records, footer);
        trailer[28..32].copy_from_slice(&count.to_le_bytes());
        trailer[32..36].copy_from_slice(&first.to_le_bytes());
        trailer[40..48].copy_from_slice(&self.seeded([&*footer]).to_le_bytes());
        self.stamp(trailer, TRAILER_MAGIC, geometry.pages - 1);
        (first, bytes)
    }

    /// Decodes the segment's last page, which describes the footer; `None` if the segment is not sealed.
    pub fn decode_trailer(&self, geometry: Geometry, bytes: &[u8]) -> Option<Trailer> {
        if !self.is_stamped(bytes, TRAILER_MAGIC, geometry.pages - 1) {
            return None;
        }
        let trailer = Trailer {
            records: u32_at(bytes, 28),
            first: u32_at(bytes, 32),
            sum: u64_at(bytes, 40),
        };
        let end = u64::from(trailer.first) + u64::from(footer_pages(trailer.records));
        (trailer.first > 0 && end == u64::from(geometry.pages)).then_some(trailer)
    }

    /// The records of a footer's pages, without the trailer; `None` if they are damaged.
    pub fn decode_footer<'a>(
        &self,
        trailer: Trailer,
        bytes: &'a [u8],
    ) -> Option<impl Iterator<Item = Record> + use<'a>> {
        (self.seeded([bytes]) == trailer.sum)
            .then(|| decode_records(bytes, trailer.records as usize))
    }
}

/// Trailer of a sealed segment: where the footer is, and its sum.
#[derive(Clone, Copy, Debug)]
pub struct Trailer {
    /// Records in the footer.
    pub records: u32,
    /// The footer's first page.
    pub first: u32,
    sum: u64,
}

fn encode_records(records: &[Record], bytes: &mut [u8]) {
    for (record, to) in records.iter().zip(bytes.chunks_exact_mut(RECORD_BYTES)) {
        record.encode(to);
    }
}

fn decode_records(bytes: &[u8], records: usize) -> impl Iterator<Item = Record> {
    bytes.chunks_exact(RECORD_BYTES).take(records).map(Record::decode)
}

pub(super) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the slice has N bytes")
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}
