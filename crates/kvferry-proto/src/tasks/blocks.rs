//! Matches the sender's bytes with the receiver's blocks.
//!
//! The receiver's list is authoritative: what it does not ask for is not read, and what it asks for and
//! the sender lacks is a mismatch that names the block.

use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// A block that the receiver wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The block's key.
    pub key: i64,
    /// Bytes of each part; 0 is a part that is not wanted.
    pub lens: Vec<u64>,
}

/// A range of one of the sender's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part(
    /// The place of the region in the offer's list.
    pub u32,
    /// The offset in the region, in bytes.
    pub u64,
    /// The length, in bytes; 0 is a part that the sender does not have.
    pub u64,
);

/// A block that the sender has: its key and its parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offered(
    /// The block's key.
    pub i64,
    /// The parts.
    pub Vec<Part>,
);

/// A range to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The place of the part among all parts of the receiver's blocks, in order.
    pub local: usize,
    /// The sender's range.
    pub from: Part,
}

/// The reads that fill `wanted` from `offered`.
///
/// # Errors
/// A text that names the block that is missing or of another length.
pub(super) fn matched(wanted: &[Wanted], offered: &[Offered]) -> Result<Vec<Copy>, String> {
    let by_key: HashMap<i64, &[Part]> = offered.iter().map(|block| (block.0, &*block.1)).collect();
    let mut copies = Vec::new();
    let mut local = 0;
    for block in wanted {
        let key = block.key;
        let parts = by_key.get(&key).ok_or_else(|| format!("the sender lacks block {key}"))?;
        for (at, len) in block.lens.iter().copied().enumerate() {
            if len > 0 {
                let from = parts.get(at).filter(|part| part.2 > 0);
                let from =
                    from.ok_or_else(|| format!("the sender lacks part {at} of block {key}"))?;
                if from.2 != len {
                    let theirs = from.2;
                    return Err(format!(
                        "part {at} of block {key} has {theirs} bytes at the sender and {len} at the receiver"
                    ));
                }
                copies.push(Copy { local, from: *from });
            }
            local += 1;
        }
    }
    if copies.is_empty() {
        return Err("the receiver's task has no bytes".to_owned());
    }
    Ok(copies)
}
