//! Puts into a store that is full, with and without a tier in host memory.

mod index_full;
mod locks;

use super::*;
use crate::bench::Bench;
use crate::fault_points::Op;
use crate::power::recorder::{Event, Recording};
use crate::{Namespace, Retain, Store, StoreOptions};
use kvferry::Access;
use kvferry_sys::map::Mapping;
use kvferry_testkit::Watchdog;
use kvferry_testkit::hanging::HangingDisk;
use kvferry_testkit::slow::SlowMemory;
use std::sync::Barrier;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Relaxed, SeqCst},
};

const LEN: u64 = 60_000;
const HOUR: Duration = Duration::from_secs(3600);
/// Longest wait for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

fn prompt(first: u64, blocks: u64) -> Vec<[u8; 32]> {
    (first..first + blocks).map(|it| *blake3::hash(&it.to_le_bytes()).as_bytes()).collect()
}

fn bench(name: &str) -> Bench {
    Bench::new(&format!("put-{name}"), 64 * LEN as usize)
}

impl Bench {
    fn options(&self) -> StoreOptions {
        StoreOptions::new(&self.folder, 12 << 20).segment_bytes(1 << 20)
    }

    fn open(&self, options: &StoreOptions) -> (Store, Space) {
        let store = Store::open(&self.agent, options).expect("a store");
        let kv = store.space(&Namespace::new("model"));
        (store, kv)
    }

    fn with_host(&self) -> (Store, Space) {
        self.open(&self.options().host_bytes(4 << 20))
    }

    /// Memory of blocks, from this place on.
    fn memory(&self, place: u64, blocks: usize) -> Vec<BlockMemory> {
        let at = |block| BlockMemory::new(&self.pool, (place + block as u64) % 64 * LEN, LEN);
        (0..blocks).map(at).collect()
    }

    /// Bytes of blocks, from this place on.
    fn bytes(&self, place: usize, blocks: usize) -> Vec<u8> {
        let mut bytes = vec![0; blocks * LEN as usize];
        self.pool.read_at(place * LEN as usize, &mut bytes).expect("inside");
        bytes
    }

    /// Puts blocks, each with bytes of its own.
    fn put(&self, kv: &Space, place: u64, prompt: &[[u8; 32]]) -> Put {
        for (block, hash) in (place..).zip(prompt) {
            let mut bytes = vec![0; LEN as usize];
            let seed = u64::from_le_bytes(hash[..8].try_into().expect("8 bytes"));
            fastrand::Rng::with_seed(seed).fill(&mut bytes);
            self.pool.write_at((block % 64 * LEN) as usize, &bytes).expect("inside");
        }
        let memory = self.memory(place, prompt.len());
        kv.put(prompt, 0, &memory, Retain::default()).expect("a put")
    }

    /// Puts blocks that can't leave, until there is no room. Returns the pins, and how many blocks there are: the last
    /// eight have no place on the disk.
    fn fill(&self, store: &Store, kv: &Space) -> (Vec<crate::Pin>, u64) {
        let (mut pins, mut count) = (Vec::new(), 0);
        loop {
            let kept = prompt(count, 8);
            let put = self.put(kv, 0, &kept);
            assert_eq!((put.stored, put.failed), (8, 0), "{put:?}");
            let is_full = is_full(store);
            pins.push(kv.pin(&kept, HOUR).expect("a pin"));
            count += 8;
            if is_full {
                return (pins, count);
            }
            assert!(count < 400, "{:?}", store.stats());
        }
    }
}

/// Whether blocks that were put find no place on the disk, and the keeper can free none. A sync that fails alone may
/// only show that the keeper is late.
fn is_full(store: &Store) -> bool {
    let member = &store.inner().core.member;
    while store.sync().is_err() {
        let (freed, looks) = (member.freed(), member.vain_looks());
        until("the keeper looks for space", || {
            store.inner().wake_keeper();
            // A look that had begun before may have seen less than the next one.
            member.freed() != freed || member.vain_looks().wrapping_sub(looks) > 1
        });
        if store.sync().is_err() && member.freed() == freed {
            return true;
        }
    }
    false
}

/// Pins blocks that are on the disk, each by a lease of its own: else the keeper frees those behind one that is removed,
/// if it looks before they are behind another block.
fn pin_all(kv: &Space, prompt: &[[u8; 32]]) -> Vec<crate::Pin> {
    let pin = |blocks: usize| {
        let pin = kv.pin(&prompt[..blocks], HOUR).expect("a pin");
        assert_eq!(pin.blocks(), blocks);
        pin
    };
    (1..=prompt.len()).map(pin).collect()
}

/// Counts the blocks of `prompt` that are on the disk.
fn on_disk(kv: &Space, prompt: &[[u8; 32]]) -> usize {
    let keys = kv.keys(prompt).expect("hashes");
    keys.iter().filter(|key| kv.store.core.member.find(key).is_some()).count()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn sync_fails_while_a_block_in_host_memory_has_no_place_on_the_disk_and_its_put_is_not_present() {
    let bench = bench("unwritten");
    let (store, kv) = bench.with_host();
    let (pins, count) = bench.fill(&store, &kv);
    let stats = store.stats();
    assert!(stats.unwritten_blocks > 0 && stats.waiting_bytes > 0, "{stats:?}");
    assert!(store.sync().is_err(), "it is not said once only");
    let lost = prompt(count - 8, 8);
    let again = bench.put(&kv, 0, &lost);
    assert!(again.refused_no_space > 0, "{again:?}");
    assert_eq!(again.present + again.refused, 8, "{again:?}");
    // Once there is room, they are written.
    drop(pins);
    until("a sync", || store.sync().is_ok());
    assert_eq!((store.stats().unwritten_blocks, store.stats().waiting_bytes), (0, 0));
    let again = bench.put(&kv, 0, &lost);
    assert_eq!(again.present, 8, "{again:?}");
    store.close();
}

#[test]
fn a_sync_beside_other_puts_succeeds_only_once_all_that_was_put_before_is_on_the_disk() {
    let bench = bench("sync-beside-puts");
    let (store, kv) = bench.with_host();
    let (_pins, count) = bench.fill(&store, &kv);
    let lost = prompt(count - 8, 8);
    assert!(on_disk(&kv, &lost) < 8);
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Relaxed) {
                bench.put(&kv, 8, &lost);
            }
        });
        for _ in 0..500 {
            if store.sync().is_ok() && on_disk(&kv, &lost) < 8 {
                has_ended.store(true, Relaxed);
                panic!("a sync has succeeded, and the blocks are on no disk");
            }
            assert!(bench.put(&kv, 0, &lost).present < 8, "they are called present");
        }
        has_ended.store(true, Relaxed);
    });
}

#[test]
fn a_sync_covers_a_block_that_another_process_has_written_while_it_waited_here() {
    let bench = bench("written-elsewhere");
    let (other, its) = bench.open(&bench.options());
    // It has a segment with room.
    assert_eq!(bench.put(&its, 0, &prompt(1 << 40, 1)).stored, 1);
    let (store, kv) = bench.with_host();
    let (_pins, count) = bench.fill(&store, &kv);
    let waits = prompt(count - 8, 8);
    let keys = kv.keys(&waits).expect("hashes");
    let core = &kv.store.core;
    let missing = keys.iter().position(|key| core.member.find(key).is_none()).expect("it waits");
    let put = bench.put(&its, 0, &waits);
    assert_eq!(put.stored + put.present, 8, "{put:?}");
    let entry = core.member.find(&keys[missing]).expect("the other process has put it");
    let path = core.disk.path_of(core.superblock.geometry.locate(entry.page).0);
    let recording = Recording::start(&bench.folder);
    until("a sync", || store.sync().is_ok());
    let is_sync = |it: &Event| matches!(it, Event::Begin(_, Op::Sync(of)) if *of == path);
    assert!(recording.take().iter().any(is_sync), "nothing has synced {}", path.display());
    store.close();
    other.close();
}

/// Time limit of an operation, in a store of two directories.
const HANG_AFTER: Duration = Duration::from_secs(5);

impl Bench {
    /// Two directories in memory, which answer also while the machine's disk is busy. `None` where they can't be mounted.
    fn two_in_memory(&self) -> Option<([HangingDisk; 2], StoreOptions)> {
        let mount = |name| {
            let path = self.folder.join(name);
            std::fs::create_dir_all(&path).expect("a folder");
            HangingDisk::mount(&path)
        };
        Some(([mount("a")?, mount("b")?], self.two()))
    }

    fn two(&self) -> StoreOptions {
        StoreOptions::new(self.folder.join("a"), 12 << 20)
            .and_directory(self.folder.join("b"))
            .segment_bytes(1 << 20)
            .hang_after(HANG_AFTER)
    }
}

#[test]
fn a_sync_waits_for_a_pass_for_longer_than_a_directory_hangs_that_gets_nothing_of_it() {
    let _watchdog = Watchdog::new(PATIENCE);
    let bench = bench("hanging-other");
    let Some((_disks, options)) = bench.two_in_memory() else { return };
    let (store, kv) = bench.open(&options.host_bytes(4 << 20));
    let disk = &store.inner().core.disk;
    let hangs = disk.hang(1);
    // Making the first segment takes longer than a read may, and not as long as it may take itself.
    let held = disk.hold_creates(0);
    assert_eq!(bench.put(&kv, 0, &prompt(0, 1)).stored, 1);
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| store.sync());
        std::thread::sleep(HANG_AFTER + HANG_AFTER / 4);
        drop(held);
        sync.join().expect("no panic").expect("its block is in the other directory");
    });
    assert_eq!((on_disk(&kv, &prompt(0, 1)), disk.hanging()), (1, 1));
    drop(hangs);
    store.close();
}

#[test]
fn a_sync_does_not_wait_for_blocks_that_were_put_after_it_had_begun() {
    let _watchdog = Watchdog::new(PATIENCE);
    let bench = bench("sync-own");
    let never = Duration::from_secs(3600);
    let (store, kv) = bench.open(&bench.two().host_bytes(4 << 20).hang_after(never));
    let (disk, behind) = (&store.inner().core.disk, &store.inner().behind);
    let [first, second] = [0, 1].map(|it| disk.hold_creates(it));
    assert_eq!(bench.put(&kv, 0, &prompt(0, 1)).stored, 1);
    std::thread::scope(|scope| {
        let begun = behind.asked();
        let sync = scope.spawn(|| store.sync());
        until("it waits", || behind.asked() > begun);
        // More than the first segment has room for.
        let later = prompt(100, 20);
        assert_eq!(bench.put(&kv, 1, &later).stored, 20);
        drop(first);
        sync.join().expect("no panic").expect("its block is on the disk");
        assert!(store.stats().waiting_bytes > 0, "the next segment can't be made");
        drop(second);
        store.sync().expect("no device fails");
        assert_eq!(on_disk(&kv, &later), 20);
    });
    store.close();
}

#[test]
fn of_two_puts_of_a_block_at_the_same_time_the_copy_that_stays_in_memory_is_written() {
    let bench = bench("twice");
    let (store, kv) = bench.with_host();
    let (pins, count) = bench.fill(&store, &kv);
    for round in 0..12 {
        let both = Barrier::new(2);
        let put = |place| {
            both.wait();
            bench.put(&kv, place, &prompt(1_000 + round * 2, 2));
        };
        std::thread::scope(|scope| {
            scope.spawn(|| put(0));
            put(16);
        });
        // Takes memory that was given back.
        bench.put(&kv, 32, &prompt(2_000 + round, 1));
    }
    drop(pins);
    until("a sync", || store.sync().is_ok());
    let (_other, reads) = bench.open(&bench.options());
    let memory = bench.memory(0, 1);
    for block in (count - 8..count).chain(1_000..1_024).chain(2_000..2_012) {
        let _ = reads.get(&prompt(block, 1), 0, &memory);
    }
    assert_eq!(reads.store.core.counters.read().corrupt, 0);
}

#[test]
fn a_block_that_has_left_the_disk_is_written_again_where_host_memory_still_has_it() {
    let bench = bench("left-the-disk");
    let (store, kv) = bench.with_host();
    let blocks = prompt(1, 4);
    assert_eq!(bench.put(&kv, 0, &blocks).stored, 4);
    store.sync().expect("on the disk");
    let member = &kv.store.core.member;
    // The last one first: the keeper, if it looks meanwhile, frees those behind one that is missing.
    for key in kv.keys(&blocks).expect("hashes").into_iter().rev() {
        assert!(member.remove(&member.find(&key).expect("it was synced")));
    }
    let again = bench.put(&kv, 0, &blocks);
    assert_eq!((again.stored, again.present), (4, 0), "{again:?}");
    store.sync().expect("on the disk");
    let (_other, reads) = bench.open(&bench.options());
    assert_eq!(reads.get(&blocks, 0, &bench.memory(8, 4)).expect("a get"), 4);
}

#[test]
fn blocks_that_found_no_space_are_written_once_there_is_some_without_another_call() {
    let bench = bench("space-comes");
    let (store, kv) = bench.with_host();
    let (pins, count) = bench.fill(&store, &kv);
    assert!(store.stats().unwritten_blocks > 0);
    drop(pins);
    until("they are written", || store.stats().waiting_bytes == 0);
    assert_eq!(store.stats().unwritten_blocks, 0);
    assert_eq!(on_disk(&kv, &prompt(count - 8, 8)), 8);
}

#[test]
fn closing_the_store_writes_blocks_that_found_no_space_before() {
    let bench = bench("space-at-close");
    let (store, kv) = bench.with_host();
    let (other, _) = bench.open(&bench.options());
    let (pins, count) = bench.fill(&store, &kv);
    assert!(store.stats().unwritten_blocks > 0);
    drop(pins);
    store.close();
    let there = other.space(&Namespace::new("model"));
    assert_eq!(on_disk(&there, &prompt(count - 8, 8)), 8);
}

#[test]
fn closing_a_store_whose_thread_can_not_be_started_writes_blocks_that_found_no_space_before() {
    let _watchdog = Watchdog::new(PATIENCE);
    for hangs in [false, true] {
        let bench = bench(&format!("no-thread-{hangs}"));
        let Some((_disks, options)) = bench.two_in_memory() else { return };
        let (store, kv) = bench.open(&options.clone().host_bytes(4 << 20));
        store.inner().behind.refuse_thread();
        let _hangs = hangs.then(|| store.inner().core.disk.hang(1));
        let (other, _) = bench.open(&options);
        let (pins, count) = bench.fill(&store, &kv);
        assert!(store.stats().unwritten_blocks > 0);
        drop(pins);
        store.close();
        let there = other.space(&Namespace::new("model"));
        assert_eq!(on_disk(&there, &prompt(count - 8, 8)), 8, "a directory hangs: {hangs}");
    }
}

#[test]
fn a_load_in_the_background_does_not_wait_for_puts_that_wait_for_space() {
    let bench = bench("loads");
    // Its leases keep all blocks.
    let (keeps, kv) = bench.with_host();
    let (_pins, _) = bench.fill(&keeps, &kv);
    let is_first = |round: u64| {
        // A process that does not know yet that nothing is freed.
        let (_store, kv) = bench.with_host();
        let puts = [0, 1, 2, 3].map(|put| {
            let new = prompt(10_000 + round * 1_000 + put * 100, 40);
            kv.put_async(&new, 0, &bench.memory(0, 40), Retain::default(), Duration::ZERO)
                .expect("a put")
        });
        let got = kv.get_async(&prompt(0, 8), 0, &bench.memory(48, 8)).expect("a get");
        let got = got.wait(Some(PATIENCE)).expect("it ends");
        assert!(matches!(*got, Ok(8)), "{got:?}");
        puts.iter().all(|put| put.outcome().is_none())
    };
    assert!((0..10).any(is_first), "each load has ended after a put");
}

#[test]
fn blocks_count_as_stored_once_they_are_on_the_disk_and_as_refused_if_they_never_are() {
    let bench = bench("counts");
    let (store, kv) = bench.with_host();
    let (_pins, count) = bench.fill(&store, &kv);
    let stats = store.stats();
    assert!(stats.unwritten_blocks > 0);
    assert_eq!(stats.stored + stats.unwritten_blocks, count, "{stats:?}");
    store.close();
    let closed = store.stats();
    assert_eq!((closed.stored, closed.refused), (stats.stored, count - stats.stored), "{closed:?}");
    assert_eq!(closed.refused_no_space, closed.refused, "{closed:?}");
}

#[test]
fn puts_of_a_store_in_which_nothing_is_freed_wait_once_and_not_once_each() {
    let bench = bench("wait-once");
    let (keeps, kv) = bench.with_host();
    let (_pins, _) = bench.fill(&keeps, &kv);
    let (_store, kv) = bench.open(&bench.options().put_wait(Duration::from_secs(1)));
    for block in 0..20 {
        let put = bench.put(&kv, 0, &prompt(1_000 + block, 1));
        assert_eq!(put.refused_no_space, 1, "{put:?}");
    }
    let waits = kv.store.waits.count();
    assert!((1..=3).contains(&waits), "{waits} waits of 20 puts");
}

#[test]
fn closing_the_store_ends_the_waits_for_space() {
    let bench = bench("close-waits");
    let (keeps, kv) = bench.with_host();
    let (_pins, _) = bench.fill(&keeps, &kv);
    let (store, kv) = bench.open(&bench.options().put_wait(Duration::MAX));
    let put = |block| {
        let new = prompt(1_000 + block, 1);
        kv.put_async(&new, 0, &bench.memory(block, 1), Retain::default(), Duration::ZERO)
            .expect("a put")
    };
    let puts: Vec<_> = (0..40).map(put).collect();
    until("a put waits", || kv.store.waits.count() > 0);
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        store.close();
        let _ = done.send(());
    });
    is_done.recv_timeout(PATIENCE).expect("it is closed");
    for put in puts {
        let outcome = put.outcome().expect("carried out before the close");
        assert!(matches!(*outcome, Ok(Put { refused_no_space: 1, .. })), "{outcome:?}");
    }
}

#[test]
fn a_put_that_waits_for_its_turn_is_refused_once_cancelled_or_late_and_carried_out_by_the_close() {
    let bench = bench("turns");
    let (keeps, kv) = bench.with_host();
    let (_pins, _) = bench.fill(&keeps, &kv);
    // No thread takes the place of those that wait for space.
    let (store, kv) = bench.open(&bench.options().put_wait(Duration::MAX).hang_after(HOUR));
    let put = |block, wait| {
        let new = prompt(1_000 + block, 1);
        kv.put_async(&new, 0, &bench.memory(block, 1), Retain::default(), wait).expect("a put")
    };
    let held = [0, 1, 2, 3].map(|block| put(block, HOUR));
    until("all threads wait for space", || kv.store.waits.count() >= held.len());
    let (waits, cancelled, late) = (put(4, HOUR), put(5, HOUR), put(6, Duration::from_millis(20)));
    let refused = Put { refused: 1, refused_waiting: 1, ..Put::default() };
    let outcome = late.wait(Some(PATIENCE)).expect("it ends");
    assert!(matches!(*outcome, Ok(put) if put == refused), "{outcome:?}");
    assert_eq!([cancelled.cancel(), cancelled.cancel(), late.cancel()], [true, false, false]);
    let outcome = cancelled.outcome().expect("it has ended");
    assert!(matches!(*outcome, Ok(put) if put == refused), "{outcome:?}");
    assert!(held.iter().all(|put| !put.cancel() && put.outcome().is_none()));
    assert!(waits.outcome().is_none());
    assert_eq!(store.stats().refused_waiting, 2);
    let got = kv.get_async(&prompt(0, 8), 0, &bench.memory(48, 8)).expect("a get");
    assert!(!got.cancel(), "only puts are cancelled");
    store.close();
    for put in held.iter().chain([&waits]) {
        let outcome = put.outcome().expect("carried out before the close");
        assert!(matches!(*outcome, Ok(Put { refused_no_space: 1, .. })), "{outcome:?}");
    }
}

#[test]
fn puts_of_blocks_that_can_not_be_written_do_not_have_all_of_them_tried_each_time() {
    let bench = bench("passes");
    let (store, kv) = bench.with_host();
    let (_pins, count) = bench.fill(&store, &kv);
    let before = kv.store.behind.passes();
    for _ in 0..300 {
        assert!(bench.put(&kv, 0, &prompt(count - 8, 8)).refused_no_space > 0);
    }
    let passes = kv.store.behind.passes() - before;
    assert!(passes < 100, "{passes} passes for 300 puts");
}

#[test]
fn a_process_with_blocks_that_can_not_be_written_looks_once_for_each_time_that_it_tries_them() {
    let bench = bench("looks");
    let (store, kv) = bench.with_host();
    let (_pins, _) = bench.fill(&store, &kv);
    let behind = &kv.store.behind;
    let (looks, passes) = (behind.looks(), behind.passes());
    until("it tries again", || behind.passes() >= passes + 3);
    let (looks, passes) = (behind.looks() - looks, behind.passes() - passes);
    // A look that ends early is repeated.
    assert!(looks <= 4 * passes, "{looks} looks for {passes} passes");
}

#[test]
fn a_block_that_is_put_behind_one_that_was_present_is_behind_that_one_in_the_index() {
    let bench = bench("present");
    let (store, kv) = bench.open(&bench.options());
    let whole = prompt(0, 6);
    assert_eq!(bench.put(&kv, 0, &whole).stored, 6);
    let _pins = pin_all(&kv, &whole);
    let keys = kv.keys(&whole).expect("hashes");
    let member = &store.inner().core.member;
    let entry = |block: usize| member.find(&keys[block]).expect("it was put");
    assert!([1, 4].into_iter().all(|block| member.remove(&entry(block))));
    let put = bench.put(&kv, 0, &whole);
    assert_eq!((put.stored, put.present), (2, 4));
    assert_eq!(entry(1).parent, Some(entry(0).slot));
    assert_eq!(entry(4).parent, Some(entry(3).slot));
    store.close();
}

#[test]
fn a_block_that_is_found_behind_one_that_is_there_again_is_behind_that_one_in_the_index() {
    let pieces = [&[6][..], &[3, 6], &[2, 6]];
    for (ends, host_bytes) in pieces.into_iter().flat_map(|it| [(it, 0), (it, 4 << 20)]) {
        let bench = bench("found");
        let (store, kv) = bench.open(&bench.options().host_bytes(host_bytes));
        let whole = prompt(0, 6);
        assert_eq!(bench.put(&kv, 0, &whole).stored, 6);
        store.sync().expect("written");
        let _pins = pin_all(&kv, &whole);
        let keys = kv.keys(&whole).expect("hashes");
        let member = &store.inner().core.member;
        let entry = |block: usize| member.find(&keys[block]).expect("it was put");
        let before = entry(2);
        assert!(member.remove(&before));
        // Another block has its slot.
        assert_eq!(bench.put(&kv, 8, &prompt(8, 1)).stored, 1);
        store.sync().expect("written");
        let mut first = 0;
        for end in ends {
            let memory = bench.memory(first as u64, end - first);
            kv.put(&whole, first, &memory, Retain::default()).expect("a put");
            first = *end;
        }
        store.sync().expect("written");
        assert_ne!(entry(2).slot, before.slot);
        for block in 1..6 {
            let expected = Some(entry(block - 1).slot);
            assert_eq!(entry(block).parent, expected, "{block} {ends:?} {host_bytes}");
        }
        store.close();
    }
}

#[test]
fn memory_of_a_device_is_refused_and_nothing_is_copied_from_or_to_it() {
    let bench = bench("device");
    let (store, kv) = bench.open(&bench.options());
    let prompt = prompt(0, 1);
    assert_eq!(bench.put(&kv, 0, &prompt).stored, 1);
    store.sync().expect("written");
    let mapping = Arc::new(Mapping::anonymous(LEN as usize).expect("memory"));
    mapping.span(0, LEN as usize).copy_from(&[7; LEN as usize]);
    let device = SlowMemory::new(Arc::clone(&mapping), 0, LEN as usize, 1);
    let region = bench.agent.register_device(device.memory(), Access::NONE).expect("a region");
    let memory = [BlockMemory::new(&region, 0, LEN)];
    for refused in [
        kv.get(&prompt, 0, &memory).map(drop),
        kv.get_each(&prompt, &memory).map(drop),
        kv.get_async(&prompt, 0, &memory).map(drop),
        kv.put(&prompt, 0, &memory, Retain::default()).map(drop),
    ] {
        assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    }
    let mut bytes = vec![0; LEN as usize];
    mapping.span(0, LEN as usize).copy_to(&mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 7) && device.started() == (0, 0));
    bench.agent.unregister(&region).expect("registered");
    store.close();
}

#[test]
fn each_of_two_calls_that_close_a_store_returns_when_it_is_closed() {
    let bench = bench("closing");
    let (store, kv) = bench.with_host();
    bench.put(&kv, 0, &prompt(0, 8));
    let may_close = AtomicBool::new(false);
    std::thread::scope(|threads| {
        // A call that goes on keeps the first call of `close` in its middle.
        let call = kv.store.enter().expect("open");
        for _ in 0..2 {
            threads.spawn(|| {
                store.close();
                assert!(may_close.load(SeqCst), "closed while a call goes on");
            });
        }
        until("one of them closes the store", || kv.store.check().is_err());
        may_close.store(true, SeqCst);
        drop(call);
    });
}

#[test]
fn blocks_of_any_prompts_are_put_and_got_each_for_itself() {
    for host_bytes in [0, 4 << 20] {
        let bench = bench("each");
        let (store, kv) = bench.open(&bench.options().host_bytes(host_bytes));
        let [one, other] = [prompt(0, 4), prompt(4, 4)];
        assert_eq!(bench.put(&kv, 0, &one).stored, 4);
        assert_eq!(bench.put(&kv, 4, &other).stored, 4);
        let (expected, memory) = (bench.bytes(0, 8), bench.memory(8, 4));
        // The third one is there, behind another block; the second is not.
        let mixed = [other[3], [7; 32], one[0], prompt(8, 1)[0]];
        bench.pool.write_at(11 * LEN as usize, &expected[LEN as usize..2 * LEN as usize]).unwrap();
        let put = kv.put_each(&mixed[2..], &memory[2..], Retain::default()).expect("a put");
        assert_eq!((put.stored, put.present), (1, 1));
        store.sync().expect("written");
        let keys = kv.keys(&[mixed[3], one[1]]).expect("hashes");
        let parent = |key| store.inner().core.member.find(key).expect("it was put").parent;
        assert_eq!(parent(&keys[0]), None);
        assert!(parent(&keys[1]).is_some());
        let read = kv.get_each(&mixed, &memory).expect("a get");
        assert_eq!(read, [true, false, true, true], "{host_bytes}");
        let got = bench.bytes(8, 4);
        let (block, len) = (|at: usize| at * LEN as usize, LEN as usize);
        assert!(got[..len] == expected[block(7)..]);
        assert!(got[block(2)..block(3)] == expected[..len]);
        assert!(got[block(3)..] == expected[len..2 * len]);
        // No prompt has changed.
        assert_eq!((kv.lookup(&one).unwrap(), kv.lookup(&other).unwrap()), (4, 4));
        store.close();
    }
}
