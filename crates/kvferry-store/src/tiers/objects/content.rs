//! The bytes of an object: one block.
//!
//! An object is `v1/<namespace>/<key>` below the tier's prefix: the namespace's id in 16 hexadecimal digits, the
//! block's key in 32. Integers are little-endian; a *sum* is a CRC-64/NVME.
//!
//! | bytes    | field                                                               |
//! |----------|---------------------------------------------------------------------|
//! | 0..8     | magic `kvfobjct`                                                    |
//! | 8..12    | version, 1                                                          |
//! | 12..16   | length of the data in bytes                                         |
//! | 16..32   | key, two words                                                      |
//! | 32..48   | key of the block before it, zero for none                           |
//! | 48..56   | namespace                                                           |
//! | 56..64   | check: 64 bits of a digest of the block's whole name                |
//! | 64..72   | sum of the data, padded with zeros to whole pages, xor check        |
//! | 72..80   | when the retention ends, Unix seconds; zero for never               |
//! | 80       | priority, 0 to 100                                                  |
//! | 81       | what the block is then: 0 of the default priority, 1 to leave       |
//! | 82..120  | zero                                                                |
//! | 120..128 | sum of bytes 0..120                                                 |
//! | 128..    | the data                                                            |

use crate::key::Key;
use crate::log::{Block, format};
use crate::policy::{OnExpiry, Retention};

/// Bytes before the data.
pub(crate) const HEADER_BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"kvfobjct";
const VERSION: u32 = 1;
const SUM_AT: usize = HEADER_BYTES - 8;

/// The name of a block's object, below the prefix.
pub(crate) fn name_of(namespace: u64, key: Key) -> String {
    format!("v1/{namespace:016x}/{:016x}{:016x}", key.0[0], key.0[1])
}

/// Identity of a block that is to be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) key: Key,
    pub(crate) namespace: u64,
    pub(crate) check: u64,
}

/// Reason why an object is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// No such object exists, or none that this release can read.
    Unknown,
    /// The object is not what was uploaded.
    Damaged(&'static str),
}

/// The header of a block. `created_s` is when the store was made, in Unix seconds: the retention counts from it.
pub(crate) fn header(block: &Block, created_s: u64) -> [u8; HEADER_BYTES] {
    let retention = Retention::from_bits(block.retention);
    let until_s = retention.until_s.map_or(0, |until_s| created_s + u64::from(until_s));
    let parent = block.parent.unwrap_or_default();
    let words = [
        (16, block.key[0]),
        (24, block.key[1]),
        (32, parent[0]),
        (40, parent[1]),
        (48, block.namespace),
        (56, block.check),
        (64, block.sum),
        (72, until_s),
    ];
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&block.len.to_le_bytes());
    for (at, word) in words {
        header[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }
    header[80] = retention.priority;
    header[81] = u8::from(retention.then == OnExpiry::Leave);
    let sum = crc_fast::crc64_nvme(&header[..SUM_AT]);
    header[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Decodes the block of an object, if it is the one that is wanted and each byte is right. Its data is
/// `content[HEADER_BYTES..]`.
pub(crate) fn verify(content: &[u8], wanted: &Wanted, created_s: u64) -> Result<Block, Unusable> {
    let Some((header, data)) = content.split_at_checked(HEADER_BYTES) else {
        return Err(Unusable::Damaged("it is shorter than its header"));
    };
    if header[..8] != MAGIC {
        return Err(Unusable::Damaged("it is no block of a kvferry store"));
    }
    if u64_at(header, SUM_AT) != crc_fast::crc64_nvme(&header[..SUM_AT]) {
        return Err(Unusable::Damaged("its header is damaged"));
    }
    if u32_at(header, 8) != VERSION {
        return Err(Unusable::Unknown);
    }
    let (key, check) = ([u64_at(header, 16), u64_at(header, 24)], u64_at(header, 56));
    if key != wanted.key.0 || u64_at(header, 48) != wanted.namespace || check != wanted.check {
        return Err(Unusable::Damaged("it is another block"));
    }
    let len = u32_at(header, 12);
    if len == 0 || data.len() as u64 != u64::from(len) {
        return Err(Unusable::Damaged("it does not have the length that its header says"));
    }
    let sum = u64_at(header, 64);
    if format::sum(data, check) != sum {
        return Err(Unusable::Damaged("its bytes are not what was put"));
    }
    let until_s = match u64_at(header, 72) {
        0 => None,
        unix_s => Some(u32::try_from(unix_s.saturating_sub(created_s)).unwrap_or(u32::MAX)),
    };
    let then = if header[81] == 1 { OnExpiry::Leave } else { OnExpiry::Default };
    let parent = [u64_at(header, 32), u64_at(header, 40)];
    Ok(Block {
        key,
        parent: (parent != [0, 0]).then_some(parent),
        sum,
        check,
        namespace: wanted.namespace,
        len,
        retention: Retention { priority: header[80], until_s, then }.to_bits(),
        time: 0,
    })
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Namespace;

    /// An object, and what its reader knows of it.
    fn object(len: usize, retention: Retention) -> (Block, Vec<u8>, Wanted) {
        let identity = Namespace::new("model").identity();
        let key = identity.key(&[7; 32]).expect("a hash");
        let (namespace, check) = (identity.id, identity.check(&[7; 32]));
        let mut data = vec![0; len];
        fastrand::Rng::with_seed(len as u64).fill(&mut data);
        let block = Block {
            key: key.0,
            parent: Some([8, 9]),
            sum: format::sum(&data, check),
            check,
            namespace,
            len: u32::try_from(len).expect("short"),
            retention: retention.to_bits(),
            time: 0,
        };
        let content = [&header(&block, 1000)[..], &data].concat();
        (block, content, Wanted { key, namespace, check })
    }

    #[test]
    fn a_block_is_what_was_uploaded_with_its_retention_on_the_clock_of_another_store() {
        for len in [1, 4095, 4096, 4097, 70_000] {
            let until_s = Some(3200);
            let retention = Retention { priority: 80, until_s, then: OnExpiry::Leave };
            let (block, content, wanted) = object(len, retention);
            assert_eq!(verify(&content, &wanted, 1000), Ok(block));
            let later = verify(&content, &wanted, 1000 + 1600).expect("right");
            let retention = Retention { until_s: Some(1600), ..retention };
            assert_eq!(Retention::from_bits(later.retention), retention);
        }
    }

    #[test]
    fn an_object_with_any_bit_flipped_is_not_taken() {
        let (_, content, wanted) = object(300, Retention::DEFAULT);
        for bit in 0..content.len() * 8 {
            let mut damaged = content.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(verify(&damaged, &wanted, 1000).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn an_object_that_is_cut_or_longer_is_not_taken() {
        let (_, content, wanted) = object(300, Retention::DEFAULT);
        for len in 0..content.len() {
            assert!(verify(&content[..len], &wanted, 1000).is_err(), "{len} bytes");
        }
        let longer = [&content[..], &[0]].concat();
        assert!(verify(&longer, &wanted, 1000).is_err());
    }

    #[test]
    fn another_block_or_one_of_another_namespace_is_not_taken() {
        let (_, content, wanted) = object(300, Retention::DEFAULT);
        let others = [
            Wanted { key: Key([1, 2]), ..wanted },
            Wanted { namespace: 1, ..wanted },
            Wanted { check: 1, ..wanted },
        ];
        for other in others {
            assert_eq!(
                verify(&content, &other, 1000),
                Err(Unusable::Damaged("it is another block"))
            );
        }
    }

    #[test]
    fn an_object_of_a_later_release_is_not_taken_for_damaged() {
        let (_, mut content, wanted) = object(300, Retention::DEFAULT);
        content[8] = 2;
        let sum = crc_fast::crc64_nvme(&content[..SUM_AT]);
        content[SUM_AT..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(verify(&content, &wanted, 1000), Err(Unusable::Unknown));
    }

    #[test]
    fn names_do_not_depend_on_the_machine() {
        let name = name_of(0x1234, Key([0xab, 0xcd]));
        assert_eq!(name, "v1/0000000000001234/00000000000000ab00000000000000cd");
    }
}
