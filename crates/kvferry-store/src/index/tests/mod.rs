//! Tests of the index in one process, between threads, and between processes that die.

mod changes;
pub(super) mod crash;
mod events;
mod model;
mod processes;
mod segments;
mod threads;

use super::chain::Step;
use super::slot::{Link, State};
use super::{Geometry, Index, Inserted, Member, New};
use crate::Key;
use std::collections::HashMap;
use std::sync::Arc;

const PAGES_PER_SEGMENT: u32 = 1024;
/// Places differ by a multiple of this where a block is relocated.
const VARIANTS: u32 = 64;

fn index(slots: u32) -> Arc<Index> {
    let geometry = Geometry { slots, segments: 70, pages_per_segment: PAGES_PER_SEGMENT };
    Arc::new(Index::create(geometry).expect("memory"))
}

fn key(n: u64) -> Key {
    Key([n.wrapping_mul(0x9e37_79b9_7f4a_7c15), n])
}

/// A block whose sum and length follow from its key and its variant, which relocation keeps.
fn block(n: u64, page: u32) -> New {
    let variant = page % VARIANTS;
    let sum = (n << 32 | u64::from(variant)).wrapping_mul(0xd1b5_4a32_d192_ed03);
    New { sum, parent: None, page, len: (variant + 1) * 5000, retention: variant, now: 0 }
}

fn insert(member: &Member, n: u64, page: u32) -> Inserted {
    member.insert(key(n), block(n, page))
}

/// Fails if what a reader found is not one block.
fn assert_is_whole(entry: &super::Entry, n: u64) {
    let expected = block(n, entry.page);
    assert_eq!(entry.key, key(n));
    assert_eq!(
        (entry.sum, entry.len, entry.retention),
        (expected.sum, expected.len, expected.retention)
    );
}

/// Fails if anything of an index that no member changes is not right, counters included. Returns the
/// number of blocks.
fn verify(index: &Index) -> u32 {
    let mut chained = HashMap::new();
    for bucket in 0..index.layout.bucket_count {
        let mut step = index.first(bucket);
        loop {
            let id = match step {
                Step::Slot(id) => id,
                Step::End => break,
                Step::OtherChain => panic!("the chain of bucket {bucket} ends in another bucket"),
            };
            let entry = index.entry(id).expect("slots in chains are live");
            assert_eq!(index.bucket_of(&entry.key), bucket);
            assert!(chained.insert(entry.key, id).is_none(), "{:?} is there twice", entry.key);
            step = index.follow(Link::from_next(index.slot(id).next()), bucket);
        }
    }
    let mut segments = vec![(0, 0); index.geometry().segments as usize];
    for id in 0..index.geometry().slots {
        match index.slot(id).version().state() {
            State::Live => {
                let entry = index.entry(id).expect("live");
                assert_eq!(chained.get(&entry.key), Some(&id), "slot {id} is in no chain");
                let (pages, blocks) = &mut segments[(entry.page / PAGES_PER_SEGMENT) as usize];
                (*pages, *blocks) = (*pages + entry.len.div_ceil(4096), *blocks + 1);
            }
            State::Free => {
                assert!(!index.layout.taken_slots.is_taken(&index.shared, id), "slot {id} is lost");
            }
            State::Held(member) => panic!("slot {id} is held by member {member}"),
        }
    }
    for (number, segment) in index.segments() {
        assert_eq!((segment.live_pages, segment.live_blocks), segments[number as usize]);
    }
    assert_eq!(index.live(), chained.len() as u64);
    chained.len() as u32
}
