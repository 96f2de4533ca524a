//! The object tier, with an object store in memory that fails as a test wants.

mod outages;

use crate::{Engine, Folder, MIB, POOL, options, prompt};
use kvferry_store::inspect::{Files, State};
use kvferry_store::log::Record;
use kvferry_store::objects::{Done, Fault, GetResult, IfExists, ObjectTier, Objects};
use kvferry_store::policy::Retention;
use kvferry_store::{Error, Namespace, Retain, Stats, StoreOptions};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

const LEN: u64 = 64 << 10;
const CAPACITY: u64 = 24 * MIB;
/// Bounds a wait for what happens at once.
const SOON: Duration = Duration::from_secs(150);

/// An object store in memory.
#[derive(Default)]
struct Memory {
    state: Mutex<MemoryState>,
    changed: Condvar,
}

#[derive(Default)]
struct MemoryState {
    objects: BTreeMap<String, Vec<u8>>,
    /// Names of requests, in their order.
    gets: Vec<String>,
    puts: Vec<String>,
    does_fail: bool,
    does_drop: bool,
    does_refuse_puts: bool,
    /// Fails each put of the object that was put first.
    does_fail_first: bool,
    is_held: bool,
    /// What carries out requests that are held.
    held: Vec<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Memory")
    }
}

impl Memory {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn state(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock().expect("no test has panicked with it")
    }

    /// Changes how requests are carried out.
    fn set(&self, change: impl FnOnce(&mut MemoryState)) {
        change(&mut self.state());
    }

    /// Waits until so many requests are held.
    fn wait_held(&self, count: usize) {
        let few = |state: &mut MemoryState| state.held.len() < count;
        let (state, waited) =
            self.changed.wait_timeout_while(self.state(), SOON, few).expect("no panic");
        assert!(!waited.timed_out(), "{} requests of {count}", state.held.len());
    }

    /// Carries out the requests that are held. Returns how many.
    fn release(&self) -> usize {
        let held = std::mem::take(&mut self.state().held);
        let count = held.len();
        held.into_iter().for_each(|request| request());
        count
    }

    fn gets(&self) -> usize {
        self.state().gets.len()
    }

    fn request<T: Send + 'static>(
        self: &Arc<Self>,
        done: Done<T>,
        carry_out: impl FnOnce(&mut MemoryState) -> T + Send + 'static,
    ) {
        let memory = Arc::clone(self);
        let request = move || {
            let mut state = memory.state();
            if state.does_drop {
                drop(state);
                return drop(done);
            }
            let outcome = match state.does_fail {
                true => Err(Fault::Failed("503".into())),
                false => Ok(carry_out(&mut state)),
            };
            drop(state);
            done.end(outcome);
        };
        let mut state = self.state();
        if state.is_held {
            state.held.push(Box::new(request));
            self.changed.notify_all();
        } else {
            drop(state);
            request();
        }
    }
}

/// The tier's end of it.
#[derive(Debug)]
struct Remote(Arc<Memory>);

impl Objects for Remote {
    fn get(&self, name: &str, len_max: u64, done: Done<GetResult>) {
        let name = name.to_owned();
        self.0.set(|state| state.gets.push(name.clone()));
        self.0.request(done, move |state| match state.objects.get(&name) {
            Some(object) if object.len() as u64 > len_max => GetResult::TooLong,
            Some(object) => GetResult::Found(object.clone()),
            None => GetResult::Absent,
        });
    }

    fn put(&self, name: &str, content: Vec<u8>, if_exists: IfExists, done: Done<()>) {
        let name = name.to_owned();
        self.0.set(|state| state.puts.push(name.clone()));
        if self.0.state().does_refuse_puts {
            return done.end(Err(Fault::Refused("403".into())));
        }
        let is_first = self.0.state().puts.first() == Some(&name);
        if is_first && self.0.state().does_fail_first {
            return done.end(Err(Fault::Failed("500".into())));
        }
        self.0.request(done, move |state| match if_exists {
            IfExists::Replace => drop(state.objects.insert(name, content)),
            IfExists::Keep => drop(state.objects.entry(name).or_insert(content)),
        });
    }

    fn location(&self) -> &str {
        "memory"
    }
}

fn tier(memory: &Arc<Memory>) -> ObjectTier {
    // Short enough for a test, and long enough that nothing is tried meanwhile by accident.
    let (soon, never) = (Duration::from_millis(1), Duration::from_secs(3600));
    ObjectTier::new(Arc::new(Remote(Arc::clone(memory)))).away(3, soon, soon).absent_for(never)
}

fn with_objects(folder: &Folder, tier: ObjectTier) -> StoreOptions {
    options(folder.path(), CAPACITY).objects(tier)
}

fn engine(folder: &Folder, memory: &Arc<Memory>) -> Engine {
    Engine::open(&with_objects(folder, tier(memory)), LEN)
}

fn prefetch(engine: &Engine, prompt: &[[u8; 32]]) -> usize {
    let pending = engine.kv.prefetch(prompt).expect("a prefetch");
    let outcome = pending.wait(Some(SOON)).expect("it ends");
    *outcome.as_ref().as_ref().expect("it does not fail")
}

fn flush(engine: &Engine) -> Stats {
    assert!(engine.store.flush_objects(SOON).expect("it is open"), "{:?}", engine.store.stats());
    engine.store.stats()
}

/// A prompt that one host has put and uploaded.
fn uploaded(memory: &Arc<Memory>, blocks: usize) -> Vec<[u8; 32]> {
    let folder = Folder::new("source");
    let source = engine(&folder, memory);
    let prompt = prompt(1, blocks);
    for first in (0..blocks).step_by(POOL) {
        source.put(&prompt[..blocks.min(first + POOL)], first);
    }
    assert_eq!(flush(&source).uploaded, blocks as u64);
    prompt
}

fn wait_failed(engine: &Engine, uploads: u64) {
    let began = std::time::Instant::now();
    while engine.store.stats().upload_failed < uploads {
        assert!(began.elapsed() < SOON, "{:?}", engine.store.stats());
        std::thread::yield_now();
    }
}

#[test]
fn blocks_that_one_host_has_put_are_fetched_by_another() {
    let (memory, folder) = (Memory::new(), Folder::new("fetched"));
    let prompt = uploaded(&memory, 50);
    let engine = engine(&folder, &memory);
    assert_eq!(engine.kv.lookup(&prompt).expect("it is open"), 0);
    assert_eq!(prefetch(&engine, &prompt), 50);
    assert_eq!(engine.get(&prompt, 0), 50);
    let stats = engine.store.stats();
    assert_eq!((stats.fetched, stats.blocks, stats.hits), (50, 50, 50));
    assert_eq!((stats.fetch_missed, stats.fetch_failed, stats.fetch_corrupt), (0, 0, 0));
    // What was fetched is on the disk, and is not uploaded again.
    assert_eq!((flush(&engine).uploaded, memory.state().puts.len()), (0, 50));
    assert_eq!(prefetch(&engine, &prompt), 50);
    assert_eq!(memory.gets(), 50);
}

#[test]
fn fetched_blocks_are_there_when_the_store_is_opened_again() {
    let (memory, folder) = (Memory::new(), Folder::new("reopened"));
    let prompt = uploaded(&memory, 20);
    assert_eq!(prefetch(&engine(&folder, &memory), &prompt), 20);
    let without = Engine::open(&options(folder.path(), CAPACITY), LEN);
    assert_eq!(without.get(&prompt, 0), 20);
    assert_eq!(prefetch(&without, &prompt), 20);
}

#[test]
fn blocks_that_are_here_are_passed_over() {
    let (memory, folder) = (Memory::new(), Folder::new("passed-over"));
    let prompt = uploaded(&memory, 12);
    let engine = engine(&folder, &memory);
    engine.put(&prompt[..3], 0);
    engine.put(&prompt[..8], 6);
    assert_eq!(prefetch(&engine, &prompt), 12);
    assert_eq!(memory.gets(), 7);
    assert_eq!(engine.get(&prompt, 0), 12);
}

#[test]
fn windows_grow_with_what_is_found() {
    let (memory, folder) = (Memory::new(), Folder::new("windows"));
    let prompt = uploaded(&memory, 30);
    let engine = engine(&folder, &memory);
    memory.set(|state| state.is_held = true);
    let pending = engine.kv.prefetch(&prompt).expect("a prefetch");
    let mut windows = Vec::new();
    for expected in [1, 4, 16, 9] {
        memory.wait_held(expected);
        windows.push(memory.release());
    }
    assert_eq!(windows, [1, 4, 16, 9]);
    assert!(matches!(*pending.wait(Some(SOON)).expect("it ends"), Ok(30)));
}

#[test]
fn no_more_requests_are_under_way_than_allowed() {
    let (memory, folder) = (Memory::new(), Folder::new("concurrency"));
    let prompt = uploaded(&memory, 30);
    let engine = Engine::open(&with_objects(&folder, tier(&memory).concurrency(2)), LEN);
    memory.set(|state| state.is_held = true);
    let pending = engine.kv.prefetch(&prompt).expect("a prefetch");
    let mut rounds = 0;
    while pending.outcome().is_none() {
        let state = memory.state();
        let (state, _) = memory
            .changed
            .wait_timeout_while(state, Duration::from_millis(20), |it| it.held.is_empty())
            .expect("no panic");
        assert!(state.held.len() <= 2, "{}", state.held.len());
        drop(state);
        rounds += usize::from(memory.release() > 0);
    }
    assert!(rounds >= 15 && engine.get(&prompt, 0) == 30);
}

#[test]
fn a_prompt_that_is_not_there_costs_one_request_and_then_none() {
    let (memory, folder) = (Memory::new(), Folder::new("absent"));
    let engine = engine(&folder, &memory);
    for requests in [1, 1, 1] {
        assert_eq!(prefetch(&engine, &prompt(7, 40)), 0);
        assert_eq!(memory.gets(), requests);
    }
    assert_eq!(engine.store.stats().fetch_missed, 3);
    let folder = Folder::new("absent-not-remembered");
    let forgets = with_objects(&folder, tier(&memory).absent_for(Duration::ZERO));
    let forgets = Engine::open(&forgets, LEN);
    assert_eq!((prefetch(&forgets, &prompt(7, 40)), prefetch(&forgets, &prompt(7, 40))), (0, 0));
    assert_eq!(memory.gets(), 3);
}

#[test]
fn two_prefetches_of_one_prompt_make_one_request_for_each_block() {
    let (memory, folder) = (Memory::new(), Folder::new("single-flight"));
    let prompt = uploaded(&memory, 21);
    let engine = engine(&folder, &memory);
    memory.set(|state| state.is_held = true);
    let pending = [(); 5].map(|()| engine.kv.prefetch(&prompt).expect("a prefetch"));
    for expected in [1, 4, 16] {
        memory.wait_held(expected);
        assert_eq!(memory.release(), expected);
    }
    for pending in pending {
        assert!(matches!(*pending.wait(Some(SOON)).expect("it ends"), Ok(21)));
    }
    assert_eq!((memory.gets(), engine.get(&prompt, 0)), (21, 21));
    // Each was written once.
    assert_eq!(engine.store.stats().bytes_written, 21 * LEN);
}

#[test]
fn more_prefetches_than_may_run_at_once_all_end() {
    let (memory, folder) = (Memory::new(), Folder::new("many"));
    let there = uploaded(&memory, 8);
    let engine = engine(&folder, &memory);
    let pending: Vec<_> = (0..500)
        .map(|seed| match seed % 5 {
            0 => engine.kv.prefetch(&there).expect("a prefetch"),
            _ => engine.kv.prefetch(&prompt(100 + seed, 3)).expect("a prefetch"),
        })
        .collect();
    for (seed, pending) in pending.into_iter().enumerate() {
        let expected = if seed % 5 == 0 { 8 } else { 0 };
        let outcome = pending.wait(Some(SOON)).expect("it ends");
        assert!(matches!(*outcome, Ok(here) if here == expected), "{seed}: {outcome:?}");
    }
}

#[test]
fn another_revision_of_the_model_or_another_tenant_misses() {
    let (memory, folder) = (Memory::new(), Folder::new("names"));
    let prompt = uploaded(&memory, 3);
    let engine = engine(&folder, &memory);
    let others = [
        Namespace::new("model@2"),
        Namespace::new("model").tenant("acme"),
        Namespace::new("model").layout("fp8"),
        Namespace::new("model").shard(1, 2),
    ];
    for other in others {
        let pending = engine.store.space(&other).prefetch(&prompt).expect("a prefetch");
        assert!(matches!(*pending.wait(Some(SOON)).expect("it ends"), Ok(0)));
    }
    assert_eq!(engine.store.stats().fetch_missed, 4);
    assert_eq!(prefetch(&engine, &prompt), 3);
}

#[test]
fn a_prompt_ends_at_its_first_block_that_is_not_there() {
    let (memory, folder) = (Memory::new(), Folder::new("hole"));
    let prompt = uploaded(&memory, 20);
    let name = memory.state().puts[9].clone();
    memory.set(|state| drop(state.objects.remove(&name)));
    let engine = engine(&folder, &memory);
    assert_eq!(prefetch(&engine, &prompt), 9);
    assert_eq!(engine.get(&prompt, 0), 9);
    let before = memory.gets();
    assert_eq!((prefetch(&engine, &prompt), memory.gets()), (9, before));
}

#[test]
fn damaged_cut_and_swapped_objects_are_missed_counted_and_replaced_by_the_next_upload() {
    type Damage = fn(&mut Vec<u8>, &[u8]);
    let damages: [(&str, Damage); 7] = [
        ("a bit of the header", |object, _| object[40] ^= 4),
        ("a bit of the data", |object, _| object[10_000] ^= 1),
        ("cut", |object, _| object.truncate(5000)),
        ("cut in the header", |object, _| object.truncate(100)),
        ("empty", |object, _| object.clear()),
        ("too long", |object, _| object.resize(4 << 20, 0)),
        ("another block", |object, other| *object = other.to_vec()),
    ];
    let memory = Memory::new();
    let prompt = uploaded(&memory, 6);
    let names = memory.state().puts.clone();
    let whole = memory.state().objects[&names[2]].clone();
    let other = memory.state().objects[&names[3]].clone();
    for (what, damage) in damages {
        memory.set(|state| damage(state.objects.get_mut(&names[2]).expect("uploaded"), &other));
        let folder = Folder::new("damaged");
        let engine = engine(&folder, &memory);
        assert_eq!(prefetch(&engine, &prompt), 2, "{what}");
        assert_eq!(engine.get(&prompt, 0), 2, "{what}");
        let stats = engine.store.stats();
        assert_eq!((stats.fetch_corrupt, stats.fetch_failed), (1, 0), "{what}");
        // The engine computes it again.
        engine.put(&prompt[..3], 2);
        assert_eq!(flush(&engine).uploaded, 1, "{what}");
        assert!(memory.state().objects[&names[2]] == whole, "{what}");
    }
}

#[test]
fn an_object_that_exists_is_not_replaced() {
    let (memory, folder) = (Memory::new(), Folder::new("exists"));
    let prompt = uploaded(&memory, 2);
    let name = memory.state().puts[0].clone();
    memory.set(|state| state.objects.get_mut(&name).expect("uploaded").push(1));
    let engine = engine(&folder, &memory);
    engine.put(&prompt, 0);
    assert_eq!(flush(&engine).uploaded, 2);
    assert_eq!(memory.state().objects[&name].last(), Some(&1));
}

#[test]
fn an_object_store_that_fails_is_left_alone_and_found_again() {
    let (memory, folder) = (Memory::new(), Folder::new("outage"));
    let there = uploaded(&memory, 5);
    let long = Duration::from_secs(3600);
    let engine = Engine::open(&with_objects(&folder, tier(&memory).away(3, long, long)), LEN);
    memory.set(|state| state.does_fail = true);
    for seed in 10..20 {
        assert_eq!(prefetch(&engine, &prompt(seed, 4)), 0);
    }
    let stats = engine.store.stats();
    assert_eq!((memory.gets(), stats.fetch_failed, stats.fetch_missed), (3, 3, 7));
    assert_eq!(stats.is_away, 1);
    // It waits for no one, and neither does closing.
    assert_eq!(engine.put(&prompt(1, 2), 0).stored, 2);
    assert!(!engine.store.flush_objects(Duration::ZERO).expect("it is open"));
    engine.store.close();
    assert_eq!(engine.store.stats().upload_dropped, 2);

    let folder = Folder::new("outage-over");
    let engine = self::engine(&folder, &memory);
    for seed in 10..13 {
        assert_eq!(prefetch(&engine, &prompt(seed, 4)), 0);
    }
    assert_eq!(engine.store.stats().is_away, 1);
    memory.set(|state| state.does_fail = false);
    // As soon as its time has passed.
    let began = std::time::Instant::now();
    while prefetch(&engine, &there) < 5 {
        assert!(began.elapsed() < SOON, "{:?}", engine.store.stats());
        std::thread::yield_now();
    }
    assert_eq!((engine.store.stats().is_away, engine.get(&there, 0)), (0, 5));
}

#[test]
fn a_prefetch_of_more_than_the_store_holds_ends_and_leaves_right_blocks() {
    let (memory, folder) = (Memory::new(), Folder::new("too-much"));
    let prompt = prompt(1, 600);
    let large = Folder::new("too-much-source");
    let source = Engine::open(&options(large.path(), 96 * MIB).objects(tier(&memory)), LEN);
    for first in (0..600).step_by(POOL) {
        source.put(&prompt[..600.min(first + POOL)], first);
    }
    assert_eq!(flush(&source).uploaded, 600);
    let engine = engine(&folder, &memory);
    let here = prefetch(&engine, &prompt);
    assert!(here < 600, "{here} blocks in {CAPACITY} bytes");
    let there = engine.kv.lookup(&prompt).expect("it is open");
    assert_eq!(engine.get(&prompt[..there.min(POOL)], 0), there.min(POOL));
}

#[test]
fn a_prefetch_into_a_full_store_waits_for_space_and_asks_for_each_block_once() {
    let (memory, folder) = (Memory::new(), Folder::new("full-store"));
    let there = uploaded(&memory, 60);
    // The keeper frees space, however late it looks.
    let tier = tier(&memory).priority_min(101).no_room_for(Duration::from_secs(3600));
    let engine = Engine::open(&with_objects(&folder, tier), LEN);
    let (mut stored, began) = (0, std::time::Instant::now());
    for seed in 100.. {
        stored += engine.put(&prompt(seed, 8), 0).stored as u64;
        if stored * LEN > 3 * CAPACITY {
            break;
        }
        assert!(began.elapsed() < SOON, "{:?}", engine.store.stats());
    }
    assert_eq!((prefetch(&engine, &there), engine.get(&there, 0)), (60, 60));
    assert_eq!(memory.gets(), 60);
}

#[test]
fn puts_and_prefetches_of_one_prompt_at_once_agree() {
    let memory = Memory::new();
    let there = uploaded(&memory, 60);
    for round in 0..5 {
        let folder = Folder::new("at-once");
        let engine = engine(&folder, &memory);
        std::thread::scope(|threads| {
            for _ in 0..3 {
                threads.spawn(|| prefetch(&engine, &there));
            }
            threads.spawn(|| engine.put(&there, 0));
        });
        assert_eq!((prefetch(&engine, &there), engine.get(&there, 0)), (60, 60), "{round}");
        let stats = flush(&engine);
        assert_eq!((stats.corrupt, stats.fetch_corrupt, stats.upload_dropped), (0, 0, 0));
        // What was fetched was not uploaded again: only what the put has stored.
        assert_eq!(stats.uploaded, stats.stored);
    }
}

#[test]
fn a_host_that_may_not_upload_fetches() {
    let (memory, folder) = (Memory::new(), Folder::new("read-only"));
    let there = uploaded(&memory, 5);
    let long = Duration::from_secs(3600);
    let engine = Engine::open(&with_objects(&folder, tier(&memory).away(3, long, long)), LEN);
    memory.set(|state| state.does_refuse_puts = true);
    engine.put(&prompt(2, 20), 0);
    wait_failed(&engine, 3);
    assert_eq!((prefetch(&engine, &there), engine.get(&there, 0)), (5, 5));
    assert_eq!(engine.store.stats().is_away, 1);
    // Closing does not wait for what is refused.
    engine.store.close();
    assert_eq!(engine.store.stats().upload_dropped, 20);
}

#[test]
fn blocks_for_which_the_queue_has_no_room_are_dropped_and_counted() {
    for (blocks, bytes) in [(4, u64::MAX), (1000, 4 * LEN)] {
        let (memory, folder) = (Memory::new(), Folder::new("full"));
        let tier = tier(&memory).concurrency(1).waiting_max(blocks, bytes);
        let engine = Engine::open(&with_objects(&folder, tier), LEN);
        memory.set(|state| state.is_held = true);
        engine.put(&prompt(1, 1), 0);
        memory.wait_held(1);
        assert_eq!(engine.put(&prompt(2, 10), 0).stored, 10);
        let stats = engine.store.stats();
        assert_eq!((stats.upload_dropped, stats.uploads_waiting), (6, 5));
        memory.set(|state| state.is_held = false);
        memory.release();
        assert_eq!(flush(&engine).uploaded, 5);
    }
}

#[test]
fn blocks_of_a_low_priority_are_not_uploaded() {
    let (memory, folder) = (Memory::new(), Folder::new("priority"));
    let engine = Engine::open(&with_objects(&folder, tier(&memory).priority_min(35)), LEN);
    for (seed, priority) in [(1, 34), (2, 35), (3, 100), (4, 0)] {
        let retain = Retain { priority, ..Retain::default() };
        let memory = [engine.memory(0), engine.memory(1)];
        assert_eq!(engine.kv.put(&prompt(seed, 2), 0, &memory, retain).expect("a put").stored, 2);
    }
    assert_eq!(flush(&engine).uploaded, 4);
}

#[test]
fn the_retention_of_a_block_goes_with_it() {
    let memory = Memory::new();
    let (from, to) = (Folder::new("retention-from"), Folder::new("retention-to"));
    let source = engine(&from, &memory);
    let retain = Retain { priority: 90, ..Retain::default() };
    source.kv.put(&prompt(1, 1), 0, &[source.memory(0)], retain).expect("a put");
    flush(&source);
    let target = engine(&to, &memory);
    assert_eq!(prefetch(&target, &prompt(1, 1)), 1);
    drop(target);
    let files = Files::open(&[to.path().to_path_buf()]).expect("a store");
    let mut priorities = Vec::new();
    for segment in files.segments().expect("a folder") {
        if let State::Used(scanned) = segment.state {
            let of = |it: &Record| Retention::from_bits(it.block.retention).priority;
            priorities.extend(scanned.records.iter().map(of));
        }
    }
    assert_eq!(priorities, [90]);
}

#[test]
fn blocks_that_have_left_before_their_upload_are_dropped() {
    let (memory, folder) = (Memory::new(), Folder::new("left"));
    let tier = tier(&memory).concurrency(1);
    let engine = Engine::open(&with_objects(&folder, tier), LEN);
    memory.set(|state| state.is_held = true);
    // Far more than the store has room for.
    let (mut stored, began) = (0, std::time::Instant::now());
    for seed in 0.. {
        stored += engine.put(&prompt(seed, 8), 0).stored as u64;
        if stored * LEN > 3 * CAPACITY {
            break;
        }
        assert!(began.elapsed() < SOON, "{:?}", engine.store.stats());
    }
    memory.set(|state| state.is_held = false);
    memory.release();
    let stats = flush(&engine);
    assert_eq!(stats.uploaded + stats.upload_dropped, stored);
    assert!(stats.upload_dropped > 0 && stats.uploaded >= stats.blocks, "{stats:?}");
    assert_eq!(memory.state().objects.len() as u64, stats.uploaded);
}

#[test]
fn nothing_but_a_prefetch_waits_for_the_object_store() {
    let (memory, folder) = (Memory::new(), Folder::new("no-wait"));
    let there = uploaded(&memory, 3);
    let engine = engine(&folder, &memory);
    memory.set(|state| state.is_held = true);
    let pending = engine.kv.prefetch(&there).expect("a prefetch");
    memory.wait_held(1);
    let prompt = prompt(2, 4);
    assert_eq!(engine.put(&prompt, 0).stored, 4);
    engine.store.sync().expect("a disk");
    assert_eq!((engine.kv.lookup(&there).expect("open"), engine.get(&prompt, 0)), (0, 4));
    assert!(pending.outcome().is_none());
}

#[test]
fn closing_uploads_what_waits() {
    let (memory, folder) = (Memory::new(), Folder::new("close"));
    let engine = Engine::open(&with_objects(&folder, tier(&memory).close_timeout(SOON)), LEN);
    memory.set(|state| state.is_held = true);
    engine.put(&prompt(1, 40), 0);
    memory.wait_held(16);
    let closing = {
        let store = engine.store.clone();
        std::thread::spawn(move || store.close())
    };
    memory.set(|state| state.is_held = false);
    memory.release();
    closing.join().expect("it closes");
    assert_eq!((engine.store.stats().uploaded, memory.state().objects.len()), (40, 40));
    assert!(matches!(engine.store.flush_objects(SOON), Err(Error::Closed)));
}

#[test]
fn closing_ends_while_the_object_store_does_not_answer() {
    let (memory, folder) = (Memory::new(), Folder::new("close-hung"));
    let tier = tier(&memory).close_timeout(Duration::from_millis(10));
    let engine = Engine::open(&with_objects(&folder, tier), LEN);
    memory.set(|state| state.is_held = true);
    engine.put(&prompt(1, 40), 0);
    let pending = engine.kv.prefetch(&prompt(2, 4)).expect("a prefetch");
    memory.wait_held(17);
    engine.store.close();
    assert!(matches!(*pending.wait(Some(SOON)).expect("it ends"), Err(Error::Closed)));
    let stats = engine.store.stats();
    assert_eq!((stats.uploaded, stats.upload_dropped, stats.uploads_waiting), (0, 40, 0));
    // Their ends come too late for anything.
    assert_eq!(memory.release(), 17);
    assert_eq!(engine.store.stats(), stats);
}

#[test]
fn a_store_that_nobody_holds_any_more_ends_its_prefetches() {
    let (memory, folder) = (Memory::new(), Folder::new("dropped"));
    let there = uploaded(&memory, 5);
    let remote = Arc::new(Remote(Arc::clone(&memory)));
    let engine = {
        let tier = ObjectTier::new(Arc::clone(&remote) as Arc<dyn Objects>);
        Engine::open(&with_objects(&folder, tier), LEN)
    };
    memory.set(|state| state.is_held = true);
    let pending = engine.kv.prefetch(&there).expect("a prefetch");
    memory.wait_held(1);
    drop(engine);
    memory.set(|state| state.is_held = false);
    memory.release();
    assert!(matches!(*pending.wait(Some(SOON)).expect("it ends"), Err(Error::Closed)));
    let began = std::time::Instant::now();
    while Arc::strong_count(&remote) > 1 {
        assert!(began.elapsed() < SOON, "the store's threads run");
        std::thread::yield_now();
    }
}
