//! The bytes of an exported stream, version 1.
//!
//! Integers are little-endian; a *sum* is a CRC-64/NVME. A stream is a header, records in any number, and an end.
//! Several streams may follow each other.
//!
//! Header, 64 bytes:
//!
//! | bytes  | field                                          |
//! |--------|------------------------------------------------|
//! | 0..8   | magic `kvfexprt`                               |
//! | 8..12  | format version; this and the magic never move  |
//! | 12..16 | the version's complement                       |
//! | 16..32 | export id, random                              |
//! | 32..40 | the store's creation time, Unix milliseconds   |
//! | 40..56 | the store's id                                 |
//! | 56..64 | sum of bytes 0..56                             |
//!
//! Record, 112 bytes and then the data:
//!
//! | bytes    | field                                                                    |
//! |----------|--------------------------------------------------------------------------|
//! | 0..8     | magic `kvfblock`                                                         |
//! | 8..24    | export id                                                                |
//! | 24..40   | key, two words                                                           |
//! | 40..56   | parent's key, zero for none                                              |
//! | 56..64   | sum of the data, followed by zeros up to a multiple of 4096 bytes, xor check |
//! | 64..72   | check: of the block's full identity                                      |
//! | 72..80   | namespace                                                                |
//! | 80..84   | length of the data in bytes, 1 to 64 MiB                                 |
//! | 84..88   | retention: `policy::Retention::to_bits`; its end counts from the store's creation |
//! | 88..92   | when the block was put, in seconds from the store's creation             |
//! | 92..96   | zero                                                                     |
//! | 96..104  | the store's creation time, Unix milliseconds                             |
//! | 104..112 | sum of bytes 0..104                                                      |
//! | 112..    | data                                                                     |
//!
//! End, 48 bytes:
//!
//! | bytes  | field                      |
//! |--------|----------------------------|
//! | 0..8   | magic `kvfexend`           |
//! | 8..24  | export id                  |
//! | 24..32 | records                    |
//! | 32..40 | bytes of data of all       |
//! | 40..48 | sum of bytes 0..40         |
//!
//! To read a stream that is damaged: where no header, record or end holds, look for the next one byte by byte. A
//! record whose data does not have its sum may be one from whose data bytes are missing: look for the next from the
//! record's own magic on. Records have the export id, which is random, so that data can't pass for one.

use crate::log::Block;
use crate::memory::BLOCK_LEN_MAX;

pub(super) const VERSION: u32 = 1;
pub(super) const HEADER_BYTES: usize = 64;
pub(super) const RECORD_BYTES: usize = 112;
pub(super) const END_BYTES: usize = 48;
pub(super) const MAGIC_BYTES: usize = 8;

const HEADER_MAGIC: [u8; 8] = *b"kvfexprt";
const RECORD_MAGIC: [u8; 8] = *b"kvfblock";
const END_MAGIC: [u8; 8] = *b"kvfexend";

/// Header of a stream: the export's id, and the store that the blocks are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) export: [u8; 16],
    pub(super) created_ms: u64,
    pub(super) store: [u8; 16],
}

/// A block, whose data follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) export: [u8; 16],
    pub(super) block: Block,
    pub(super) created_ms: u64,
}

/// End of a stream: how many records it has, and how many bytes of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) export: [u8; 16],
    pub(super) records: u64,
    pub(super) bytes: u64,
}

/// Decoded part of a stream, without a record's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Header(Header),
    /// A later version's header.
    Newer(u32),
    Record(Record),
    End(End),
}

/// The length of the part whose magic this is; `None` if it is none.
pub(super) fn len_of(magic: &[u8]) -> Option<usize> {
    match <[u8; 8]>::try_from(magic).ok()? {
        HEADER_MAGIC => Some(HEADER_BYTES),
        RECORD_MAGIC => Some(RECORD_BYTES),
        END_MAGIC => Some(END_BYTES),
        _ => None,
    }
}

/// Decodes the part that begins with these bytes, if they are whole and right.
pub(super) fn decode(bytes: &[u8]) -> Option<Part> {
    let len = len_of(bytes.get(..MAGIC_BYTES)?)?;
    let bytes = bytes.get(..len)?;
    let words = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    let id = |at: usize| bytes[at..at + 16].try_into().expect("16 bytes");
    if len == HEADER_BYTES && half(8) == !half(12) && half(8) > VERSION {
        return Some(Part::Newer(half(8)));
    }
    if words(len - 8) != crc_fast::crc64_nvme(&bytes[..len - 8]) {
        return None;
    }
    match len {
        HEADER_BYTES if half(8) == VERSION && half(12) == !VERSION => {
            Some(Part::Header(Header { export: id(16), created_ms: words(32), store: id(40) }))
        }
        RECORD_BYTES => {
            let parent = [words(40), words(48)];
            let block = Block {
                key: [words(24), words(32)],
                parent: (parent != [0, 0]).then_some(parent),
                sum: words(56),
                check: words(64),
                namespace: words(72),
                len: half(80),
                retention: half(84),
                time: half(88),
            };
            let is_in_bounds = (1..=BLOCK_LEN_MAX).contains(&block.len.into());
            let record = Record { export: id(8), block, created_ms: words(96) };
            (is_in_bounds && block.key != [0, 0]).then_some(Part::Record(record))
        }
        END_BYTES => Some(Part::End(End { export: id(8), records: words(24), bytes: words(32) })),
        _ => None,
    }
}

fn sealed<const N: usize>(mut bytes: [u8; N]) -> [u8; N] {
    let sum = crc_fast::crc64_nvme(&bytes[..N - 8]);
    bytes[N - 8..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&HEADER_MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(!VERSION).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.export);
        bytes[32..40].copy_from_slice(&self.created_ms.to_le_bytes());
        bytes[40..56].copy_from_slice(&self.store);
        sealed(bytes)
    }
}

impl Record {
    pub(super) fn encode(&self) -> [u8; RECORD_BYTES] {
        let Block { key, parent, sum, check, namespace, len, retention, time } = self.block;
        let parent = parent.unwrap_or_default();
        let mut bytes = [0; RECORD_BYTES];
        bytes[..8].copy_from_slice(&RECORD_MAGIC);
        bytes[8..24].copy_from_slice(&self.export);
        let words = [key[0], key[1], parent[0], parent[1], sum, check, namespace];
        for (to, word) in bytes[24..80].chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        for (to, half) in bytes[80..92].chunks_exact_mut(4).zip([len, retention, time]) {
            to.copy_from_slice(&half.to_le_bytes());
        }
        bytes[96..104].copy_from_slice(&self.created_ms.to_le_bytes());
        sealed(bytes)
    }
}

impl End {
    pub(super) fn encode(&self) -> [u8; END_BYTES] {
        let mut bytes = [0; END_BYTES];
        bytes[..8].copy_from_slice(&END_MAGIC);
        bytes[8..24].copy_from_slice(&self.export);
        bytes[24..32].copy_from_slice(&self.records.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        sealed(bytes)
    }
}
