//! What the store promises to one process.

use crate::faults::warned;
use crate::{Engine, Folder, MIB, POOL, content, options, prompt};
use kvferry::Access;
use kvferry_store::{BlockMemory, Error, Namespace, Retain, StoreOptions};
use kvferry_testkit::{PATIENCE, eventually};
use std::time::Duration;

const LEN: u64 = 64 << 10;

#[test]
fn what_was_put_is_read_back_from_the_beginning_on() {
    let folder = Folder::new("put-get");
    let engine = Engine::open(&options(folder.path(), 32 * MIB), LEN);
    let prompt = prompt(1, 20);
    assert_eq!(engine.kv.lookup(&prompt).expect("looks"), 0);
    let put = engine.put(&prompt[..12], 0);
    assert_eq!((put.stored, put.present, put.refused, put.failed), (12, 0, 0, 0));
    assert_eq!(engine.kv.lookup(&prompt).expect("looks"), 12);
    assert_eq!(engine.get(&prompt, 0), 12);
    assert_eq!(engine.get(&prompt, 5), 7, "from the sixth block on");
    assert_eq!(engine.get(&prompt, 12), 0);
    let put = engine.put(&prompt, 10);
    assert_eq!((put.stored, put.present), (8, 2), "two were there");
    assert_eq!(engine.get(&prompt, 0), 20);
    let stats = engine.store.stats();
    assert_eq!((stats.blocks, stats.hits, stats.corrupt), (20, 39, 0));
}

#[test]
fn blocks_of_other_namespaces_are_not_found() {
    let folder = Folder::new("namespaces");
    let engine = Engine::open(&options(folder.path(), 32 * MIB), LEN);
    let prompt = prompt(1, 4);
    engine.put(&prompt, 0);
    for other in [Namespace::new("other"), Namespace::new("model").shard(1, 2)] {
        assert_eq!(engine.store.space(&other).lookup(&prompt).expect("looks"), 0);
    }
}

#[test]
fn a_block_may_be_in_pieces_and_of_any_length() {
    let folder = Folder::new("pieces");
    let engine = Engine::open(&options(folder.path(), 32 * MIB), LEN);
    let prompt = prompt(7, 5);
    for (len, hash) in [1, 4095, 4097, 40_000, 65_535].into_iter().zip(&prompt) {
        let region = engine.agent.allocate(3 * 65_536, Access::NONE).expect("memory");
        let bytes = content(hash, len);
        let (half, at) = (len / 2, 65_541);
        region.write_at(at, &bytes[..half as usize]).expect("inside");
        region.write_at(3, &bytes[half as usize..]).expect("inside");
        let memory = BlockMemory::new(&region, at as u64, half).and(&region, 3, len - half);
        let one = [*hash];
        let put = engine.kv.put(&one, 0, &[memory], Retain::default()).expect("a put");
        assert_eq!(put.stored, 1);
        let whole = BlockMemory::new(&region, 131_072, len);
        assert_eq!(engine.kv.get(&one, 0, &[whole]).expect("a get"), 1);
        let mut back = vec![0; len as usize];
        region.read_at(131_072, &mut back).expect("inside");
        assert!(back == bytes, "{len} bytes");
        let other = BlockMemory::new(&region, 131_072, len + 1);
        assert_eq!(engine.kv.get(&one, 0, &[other]).expect("a get"), 0, "another length");
    }
}

#[test]
fn blocks_are_there_after_the_store_was_closed_or_dropped() {
    let folder = Folder::new("reopen");
    let prompt = prompt(3, 40);
    for round in 0..4 {
        let engine = Engine::open(&options(folder.path(), 64 * MIB), LEN);
        assert_eq!(engine.get(&prompt, 0), round * 10);
        engine.put(&prompt[..(round + 1) * 10], round * 10);
        if round % 2 == 0 {
            engine.store.close();
            assert!(matches!(engine.kv.lookup(&prompt), Err(Error::Closed)));
        }
    }
}

#[test]
fn a_smaller_capacity_deletes_segments_with_a_warning_and_a_larger_one_brings_none_back() {
    let folder = Folder::new("smaller-capacity");
    let with = |capacity| options(folder.path(), capacity);
    let prompts: Vec<_> = (0..16).map(|seed| prompt(seed, 15)).collect();
    let engine = Engine::open(&with(32 * MIB), LEN);
    assert!(prompts.iter().all(|prompt| engine.put(prompt, 0).stored == 15));
    let found = |engine: &Engine| -> usize {
        let of = |prompt: &Vec<[u8; 32]>| (0..15).map(|at| engine.get(&prompt[..=at], at)).sum();
        prompts.iter().map(|prompt| -> usize { of(prompt) }).sum()
    };
    assert_eq!(found(&engine), 16 * 15);
    // It joins: its capacity is not used.
    let (joined, warnings) = warned(|| Engine::open(&with(12 * MIB), LEN));
    assert_eq!((found(&joined), warnings), (16 * 15, Vec::new()));
    drop((engine, joined));
    let files = || std::fs::read_dir(folder.path()).expect("a folder").count();
    let before = files();
    let (engine, warnings) = warned(|| Engine::open(&with(12 * MIB), LEN));
    let deleted = before - files();
    let said = format!("smaller capacity than before: {deleted} segments beyond it were removed");
    assert!(deleted > 0 && warnings.len() == 1 && warnings[0].contains(&said), "{warnings:?}");
    let left = found(&engine);
    assert!((1..16 * 15).contains(&left), "{left}");
    drop(engine);
    let (engine, warnings) = warned(|| Engine::open(&with(32 * MIB), LEN));
    assert_eq!(warnings, Vec::<String>::new());
    // The keeper goes on to free space until the store is closed.
    let again = found(&engine);
    assert!((1..=left).contains(&again), "{again} of {left}");
}

#[test]
fn a_capacity_beyond_the_largest_is_used_as_far_as_it_goes_with_a_warning() {
    let folder = Folder::new("largest-capacity");
    let asked = 1_u64 << 50;
    let with = StoreOptions::new(folder.path(), asked).blocks_max(1024);
    // 16 TiB but for a segment of 4 GiB, and 64 KiB for other files.
    let most = (1 << 44) - (4 << 30) + (64 << 10);
    for _ in ["new", "opened again"] {
        let (engine, warnings) = warned(|| Engine::open(&with, LEN));
        let said = format!("the store uses {most} of its capacity of {asked} bytes");
        assert!(warnings.len() == 1 && warnings[0].contains(&said), "{warnings:?}");
        // One that joins has nothing to say.
        let (joined, warnings) = warned(|| Engine::open(&with, LEN));
        assert_eq!(warnings, Vec::<String>::new());
        let used = [&engine, &joined].map(|it| it.store.stats().capacity_bytes);
        assert_eq!(used, [most; 2]);
    }
}

#[test]
fn the_bound_holds_while_much_more_is_put_than_fits() {
    let folder = Folder::new("bound");
    let capacity = 24 * MIB;
    let engine = Engine::open(&options(folder.path(), capacity), LEN);
    let on_disk = || {
        let files = std::fs::read_dir(folder.path()).expect("a folder");
        files.map(|file| file.expect("a file").metadata().expect("its length").len()).sum::<u64>()
    };
    let mut stored = 0;
    for seed in 0..400 {
        let prompt = prompt(seed, 8);
        // A put is refused while the keeper frees space.
        let mut at = 0;
        let began = std::time::Instant::now();
        while at < prompt.len() && began.elapsed() < PATIENCE / 2 {
            let put = engine.put(&prompt, at);
            at += put.stored + put.present;
            stored += put.stored;
            assert_eq!(put.failed, 0);
            if put.refused > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(at, prompt.len(), "the keeper frees space");
        assert!(on_disk() <= capacity, "{} of {capacity}", on_disk());
        if seed >= 2 {
            engine.get(&crate::prompt(seed - 2, 8), 0);
        }
    }
    let stats = engine.store.stats();
    assert!(stored as u64 * LEN > 8 * capacity);
    assert!(stats.evicted > 0 && stats.bytes_collected > 0 && stats.corrupt == 0, "{stats:?}");
    assert!(stats.blocks * LEN > capacity / 2, "most of the disk is used: {stats:?}");
    assert!(stats.hits > 1000, "{stats:?}");
}

#[test]
fn blocks_of_a_low_priority_leave_first() {
    let folder = Folder::new("retention");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let kept = prompt(1, 32);
    let keep = Retain { priority: 100, ..Retain::default() };
    let put = |prompt: &[[u8; 32]], retain| {
        let memory: Vec<_> = (0..prompt.len()).map(|block| engine.memory(block)).collect();
        for (at, hash) in prompt.iter().enumerate() {
            engine.fill(at, &content(hash, LEN));
        }
        let mut at = 0;
        while at < prompt.len() {
            let put = engine.kv.put(prompt, at, &memory[at..], retain).expect("a put");
            at += put.stored + put.present;
            std::thread::sleep(Duration::from_millis(u64::from(put.refused > 0)));
        }
    };
    put(&kept, keep);
    for seed in 10..100 {
        put(&prompt(seed, POOL / 8), Retain::default());
    }
    let got = engine.get(&kept, 0);
    assert_eq!(got, 32, "{:?}, then {}", engine.store.stats(), engine.get(&kept, 0));
}

#[test]
fn what_is_in_the_background_ends_once_and_before_a_close() {
    let folder = Folder::new("async");
    let engine = Engine::open(&options(folder.path(), 32 * MIB), LEN);
    let prompt = prompt(1, 8);
    for (at, hash) in prompt.iter().enumerate() {
        engine.fill(at, &content(hash, LEN));
    }
    let memory: Vec<_> = (0..8).map(|block| engine.memory(block)).collect();
    let put =
        engine.kv.put_async(&prompt, 0, &memory, Retain::default(), Duration::ZERO).expect("a put");
    let outcome = put.wait(Some(PATIENCE / 2)).expect("an outcome");
    assert_eq!(outcome.as_ref().as_ref().expect("no error").stored, 8);
    let memory: Vec<_> = (8..16).map(|block| engine.memory(block)).collect();
    let get = engine.kv.get_async(&prompt, 0, &memory).expect("a get");
    let outcome = get.wait(None).expect("an outcome");
    assert_eq!(*outcome.as_ref().as_ref().expect("no error"), 8);
    assert!(engine.bytes(15) == content(&prompt[7], LEN));
    let gets: Vec<_> =
        (0..64).map(|_| engine.kv.get_async(&prompt, 0, &memory).expect("a get")).collect();
    engine.store.close();
    for get in gets {
        let outcome = get.outcome().expect("carried out before the close");
        assert_eq!(*outcome.as_ref().as_ref().expect("no error"), 8);
    }
    assert!(matches!(engine.kv.get_async(&prompt, 0, &memory), Err(Error::Closed)));
}

#[test]
fn pinned_blocks_stay_until_their_lease_ends() {
    let folder = Folder::new("pins");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let other = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let [kept, short] = [1, 2].map(|seed| prompt(seed, 32));
    engine.put(&kept, 0);
    engine.put(&short, 0);
    let hour = Duration::from_secs(3600);
    // By another process than the one that evicts.
    let pin = other.kv.pin(&kept, hour).expect("pins");
    let given_back = other.kv.pin(&short, hour).expect("pins");
    assert_eq!((pin.blocks(), given_back.blocks()), (32, 32));
    drop(given_back);
    let mut seeds = 10_u64..;
    let mut churn = || {
        for seed in seeds.by_ref().take(20) {
            let prompt = prompt(seed, POOL / 2);
            eventually("the keeper frees space", || engine.put(&prompt, 0).refused == 0);
        }
    };
    // What was put later is worth more, in the end. A look-up is no use of a block.
    let mut is_evicted = |prompt: &[[u8; 32]]| {
        churn();
        engine.kv.lookup(prompt).expect("looks up") < 32
    };
    eventually("blocks whose pin was given back leave", || is_evicted(&short));
    assert_eq!(engine.get(&kept, 0), 32);
    drop(pin);
    eventually("blocks whose lease has ended leave", || is_evicted(&kept));
    let absent = engine.kv.pin(&prompt(u64::MAX, 3), hour).expect("pins");
    assert_eq!(absent.blocks(), 0);
}

#[test]
fn a_put_that_may_wait_is_not_refused_by_a_full_store() {
    let folder = Folder::new("put-wait");
    let options = options(folder.path(), 24 * MIB).put_wait(PATIENCE / 2);
    let engine = Engine::open(&options, LEN);
    for seed in 0..200 {
        let put = engine.put(&prompt(seed, 16), 0);
        assert_eq!((put.stored, put.refused, put.failed), (16, 0, 0), "{put:?}");
    }
    let stats = engine.store.stats();
    assert_eq!((stats.refused, stats.corrupt), (0, 0), "{stats:?}");
    assert!(stats.blocks * LEN > 12 * MIB, "most of the disk is used: {stats:?}");
}

#[test]
fn blocks_behind_host_memory_are_not_refused_by_a_full_store_and_are_on_the_disk_after_a_sync() {
    let folder = Folder::new("behind-full");
    let engine = Engine::open(&options(folder.path(), 24 * MIB).host_bytes(4 * MIB), LEN);
    for seed in 0..200 {
        let put = engine.put(&prompt(seed, 16), 0);
        assert_eq!((put.stored, put.refused, put.failed), (16, 0, 0), "{put:?}");
    }
    engine.store.sync().expect("all were written");
    let stats = engine.store.stats();
    assert_eq!(
        (stats.refused, stats.unwritten_blocks, stats.waiting_bytes),
        (0, 0, 0),
        "{stats:?}"
    );
}

#[test]
fn pinned_blocks_stay_while_puts_find_no_space() {
    let folder = Folder::new("pins-pressed");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let kept = prompt(1, 32);
    engine.put(&kept, 0);
    let pin = engine.kv.pin(&kept, Duration::from_secs(3600)).expect("pins");
    assert_eq!(pin.blocks(), 32);
    // From the first refusal on there is pressure.
    let (mut seed, mut refused) = (10, 0);
    let mut press = || {
        refused += engine.put(&prompt(seed, 16), 0).refused_no_space;
        seed += 1;
        refused
    };
    eventually("puts find no space", || press() > 0);
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        press();
    }
    assert_eq!(engine.get(&kept, 0), 32, "{:?}", engine.store.stats());
}
