use super::*;
use fastrand::Rng;
use kvferry_testkit::eventually;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

const KEYS: u64 = 24;

/// Changes a few blocks, at random, until `goes_on` returns false.
pub(super) fn churn(member: &Member, seed: u64, goes_on: impl Fn() -> bool) {
    let mut rng = Rng::with_seed(seed);
    while goes_on() {
        let n = rng.u64(0..KEYS);
        let page = rng.u32(0..70 * PAGES_PER_SEGMENT);
        match (rng.u32(0..8), member.find(&key(n))) {
            (0..3, Some(entry)) => drop(member.remove(&entry)),
            (3, Some(entry)) => {
                member.relocate(&entry, page / VARIANTS * VARIANTS + entry.page % VARIANTS);
            }
            _ => drop(insert(member, n, page)),
        }
    }
}

/// Looks for the blocks of [`churn`]; fails if one is not whole. Adds those that it finds to `found`.
pub(super) fn look(index: &Index, seed: u64, found: &AtomicU64, goes_on: impl Fn() -> bool) {
    let mut rng = Rng::with_seed(seed);
    let mut out = Vec::new();
    while goes_on() {
        let n = rng.u64(0..KEYS);
        if let Some(entry) = index.find(&key(n)) {
            assert_is_whole(&entry, n);
            index.touch(&entry, 1);
            found.fetch_add(1, SeqCst);
        }
        let keys: Vec<Key> = (n..KEYS).map(key).collect();
        out.clear();
        index.find_prefix(&keys, &mut out);
        (n..).zip(&out).for_each(|(n, entry)| assert_is_whole(entry, n));
    }
}

#[test]
fn readers_never_see_parts_of_two_blocks_while_slots_are_reused() {
    // Fewer slots than keys, so that slots pass from chain to chain.
    let index = index(16);
    let runs = AtomicBool::new(true);
    let running = || runs.load(SeqCst);
    let found = AtomicU64::new(0);
    let members = [(); 2].map(|()| index.join().expect("a member"));
    thread::scope(|scope| {
        for (seed, member) in (0..).zip(&members) {
            scope.spawn(move || churn(member, seed, running));
        }
        for seed in 0..4 {
            let (index, found) = (&index, &found);
            scope.spawn(move || look(index, seed, found, running));
        }
        thread::sleep(Duration::from_millis(1500));
        eventually("readers find blocks", || found.load(SeqCst) > 1000);
        runs.store(false, SeqCst);
    });
    verify(&index);
}

#[test]
fn a_block_that_stays_is_always_found_while_others_come_and_go() {
    let index = index(16);
    let members = [(); 2].map(|()| index.join().expect("a member"));
    let stays = KEYS + 1;
    assert!(matches!(insert(&members[0], stays, 0), Inserted::New(_)));
    let runs = AtomicBool::new(true);
    let running = || runs.load(SeqCst);
    thread::scope(|scope| {
        for (seed, member) in (0..).zip(&members) {
            scope.spawn(move || churn(member, seed, running));
        }
        for _ in 0..300_000 {
            assert!(index.find(&key(stays)).is_some());
        }
        runs.store(false, SeqCst);
    });
    verify(&index);
}

#[test]
fn threads_that_share_few_numbers_never_own_one_twice_and_lose_none() {
    use crate::index::bitmap::Bitmap;
    let len = 64 * 3 + 5;
    let shared = kvferry_sys::shared::Shared::create("kvferry-test", 16 << 12).expect("memory");
    let mut end = 0;
    let bitmap = Bitmap::new(len, |bytes| {
        let at = end;
        end += bytes;
        at
    });
    bitmap.initialise(&shared);
    let owners: Vec<AtomicBool> = (0..len).map(|_| AtomicBool::new(false)).collect();
    thread::scope(|scope| {
        for seed in 0..4 {
            let (bitmap, shared, owners) = (&bitmap, &shared, &owners);
            scope.spawn(move || {
                let mut rng = Rng::with_seed(seed);
                let mut own = Vec::new();
                for _ in 0..100_000 {
                    if rng.bool() {
                        let Some(number) = bitmap.take(shared) else { continue };
                        assert!(!owners[number as usize].swap(true, SeqCst), "{number} twice");
                        own.push(number);
                    } else if !own.is_empty() {
                        let number = own.swap_remove(rng.usize(0..own.len()));
                        owners[number as usize].store(false, SeqCst);
                        bitmap.give(shared, number);
                    }
                }
                for number in own {
                    owners[number as usize].store(false, SeqCst);
                    bitmap.give(shared, number);
                }
            });
        }
    });
    let mut all: Vec<u32> = std::iter::from_fn(|| bitmap.take(&shared)).collect();
    all.sort_unstable();
    assert_eq!(all, (0..len).collect::<Vec<_>>());
}

#[test]
fn huge_pages_hold_what_small_pages_held_while_the_index_is_read_and_changed() {
    let slots = 300_000;
    let index = index(slots);
    let filler = index.join().expect("a member");
    assert!(!index.collapse(1), "nothing is filled");
    for n in 0..slots {
        insert(&filler, u64::from(n), 0);
    }
    let taken = || rustix::fs::fstat(index.memory()).expect("open").st_blocks * 512;
    let before = taken();
    let runs = AtomicBool::new(true);
    let running = || runs.load(SeqCst);
    let found = AtomicU64::new(0);
    thread::scope(|scope| {
        let changes = index.join().expect("a member");
        scope.spawn(move || churn(&changes, 1, running));
        let reads = &index;
        let found = &found;
        scope.spawn(move || look(reads, 2, found, running));
        let mut calls = 1;
        while index.collapse(2) {
            calls += 1;
        }
        runs.store(false, SeqCst);
        assert!(calls <= 9, "{calls} calls for less than 18 huge pages");
    });
    assert!(taken() <= before, "{} of {before}", taken());
    assert!(!index.collapse(100), "all is done");
    verify(&index);
    for n in KEYS..slots.into() {
        assert_is_whole(&index.find(&key(n)).expect("it was inserted"), n);
    }
}
