//! The tier in host memory.

use crate::{Engine, Folder, MIB, POOL, content, options, prompt};
use kvferry_store::{Error, Retain};
use std::collections::HashMap;

const LEN: u64 = 64 << 10;

#[test]
fn what_was_put_or_got_is_in_host_memory() {
    let folder = Folder::new("host");
    let prompt = prompt(1, 8);
    {
        let engine = Engine::open(&options(folder.path(), 32 * MIB).host_bytes(4 * MIB), LEN);
        assert_eq!(engine.put(&prompt, 0).stored, 8);
        assert_eq!(engine.get(&prompt, 0), 8);
        let stats = engine.store.stats();
        assert_eq!((stats.hits, stats.host_hits, stats.disk_reads), (8, 8, 0));
        assert_eq!((stats.host_blocks, stats.host_bytes), (8, 8 * LEN));
    }
    let engine = Engine::open(&options(folder.path(), 32 * MIB).host_bytes(4 * MIB), LEN);
    assert_eq!(engine.get(&prompt, 0), 8, "closing the store has written them");
    assert_eq!(engine.get(&prompt, 0), 8);
    let stats = engine.store.stats();
    assert_eq!((stats.hits, stats.host_hits, stats.disk_reads), (16, 8, 8));
}

#[test]
fn a_prefetch_brings_blocks_from_the_disk_to_host_memory() {
    let folder = Folder::new("host-prefetch");
    let prompt = prompt(1, 48);
    Engine::open(&options(folder.path(), 32 * MIB), LEN).put(&prompt[..40], 0);
    let engine = Engine::open(&options(folder.path(), 32 * MIB).host_bytes(8 * MIB), LEN);
    let here = engine.kv.prefetch(&prompt).expect("begins").wait(None).expect("ends");
    assert!(matches!(*here, Ok(40)), "{here:?}");
    assert_eq!(engine.store.stats().host_blocks, 40);
    assert_eq!(engine.get(&prompt, 0), 40);
    let stats = engine.store.stats();
    assert_eq!((stats.host_hits, stats.disk_reads), (40, 40));
}

#[test]
fn after_a_sync_others_find_what_was_put() {
    let folder = Folder::new("host-sync");
    let one = Engine::open(&options(folder.path(), 32 * MIB).host_bytes(4 * MIB), LEN);
    let other = Engine::open(&options(folder.path(), 32 * MIB), LEN);
    let prompt = prompt(1, 40);
    assert_eq!(one.put(&prompt, 0).stored, 40);
    one.store.sync().expect("on the disk");
    assert_eq!(other.get(&prompt, 0), 40);
    assert_eq!(one.store.stats().waiting_bytes, 0);
}

#[test]
fn more_than_may_wait_goes_to_the_disk_while_the_caller_waits() {
    let folder = Folder::new("host-full");
    let engine = Engine::open(&options(folder.path(), 32 * MIB).host_bytes(MIB), LEN);
    for seed in 0..4 {
        let prompt = prompt(seed, POOL);
        let put = engine.put(&prompt, 0);
        assert_eq!((put.stored, put.refused, put.failed), (POOL, 0, 0));
        assert_eq!(engine.get(&prompt, 0), POOL);
        assert!(engine.store.stats().host_bytes <= MIB);
    }
}

#[test]
fn a_tier_that_is_too_small_is_refused() {
    let folder = Folder::new("host-small");
    let opened = Engine::try_open(&options(folder.path(), 32 * MIB).host_bytes(4096), LEN);
    assert!(matches!(opened.err(), Some(Error::InvalidArgument(_))));
}

/// Prompts that share prefixes, of blocks of several lengths, are put and got by several threads at once.
#[test]
fn no_block_is_ever_wrong_while_blocks_of_all_lengths_come_and_go() {
    let folder = Folder::new("host-churn");
    let engine = Engine::open(&options(folder.path(), 16 * MIB).host_bytes(2 * MIB), LEN);
    // The length of a block is a part of its content.
    let len_of = |hash: &[u8; 32]| 1 + u64::from(u16::from_le_bytes([hash[0], hash[1]]));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let engine = &engine;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(thread);
                let at = |block: usize| thread as usize * (POOL / 4) + block;
                let mut hits = HashMap::new();
                for _ in 0..150 {
                    let prompt = prompt(rng.u64(..12), 1 + rng.usize(..POOL / 4));
                    let memory: Vec<_> = prompt
                        .iter()
                        .enumerate()
                        .map(|(block, hash)| engine.part(at(block), len_of(hash)))
                        .collect();
                    for block in 0..prompt.len() {
                        engine.fill(at(block), &[0; 64]);
                    }
                    let got = engine.kv.get(&prompt, 0, &memory).expect("a get");
                    for (block, hash) in prompt[..got].iter().enumerate() {
                        let len = len_of(hash) as usize;
                        assert!(engine.bytes(at(block))[..len] == content(hash, LEN)[..len]);
                    }
                    *hits.entry(got > 0).or_insert(0) += 1;
                    for (block, hash) in prompt.iter().enumerate() {
                        engine.fill(at(block), &content(hash, LEN)[..len_of(hash) as usize]);
                    }
                    let put = engine.kv.put(&prompt[..], 0, &memory, Retain::default());
                    put.expect("a put");
                }
                assert!(hits[&true] > 50, "{hits:?}");
            });
        }
    });
    let stats = engine.store.stats();
    assert_eq!((stats.corrupt, stats.failed), (0, 0), "{stats:?}");
    assert!(stats.host_hits > 0 && stats.disk_reads > 0, "{stats:?}");
    engine.store.sync().expect("on the disk");
    assert_eq!(engine.store.stats().waiting_bytes, 0);
}
