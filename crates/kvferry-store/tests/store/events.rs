//! What a subscriber hears of a store that several processes share, some of which are killed.

use crate::processes::Other;
use crate::{Engine, Folder, MIB, options, prompt};
use kvferry_store::{Error, Event, Events, Key, Namespace, Polled, Report, StoreOptions, Watch};
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const LEN: u64 = 64 << 10;
const SMALL: u64 = 24 * MIB;
const BLOCKS: usize = 6;
/// A test that waits for longer has failed.
const WATCHDOG: Duration = Duration::from_secs(150);

/// A set that follows a store by its events alone.
struct Shadow {
    events: Events,
    here: HashSet<Key>,
    snapshots: usize,
    removed: usize,
}

impl Shadow {
    fn new(engine: &Engine) -> Self {
        let events = engine.store.events().expect("it is open");
        let mut shadow = Self { events, here: HashSet::new(), snapshots: 0, removed: 0 };
        shadow.follow();
        assert_eq!(shadow.snapshots, 1);
        shadow
    }

    fn follow(&mut self) {
        loop {
            let mut new = Vec::new();
            let polled = self.events.poll(100, &mut new).expect("it is open");
            for event in new {
                match event {
                    Event::Stored(key) => _ = self.here.insert(key),
                    Event::Removed(key) => self.removed += usize::from(self.here.remove(&key)),
                }
            }
            match polled {
                Polled::All => return,
                Polled::More => {}
                Polled::Lost => {
                    self.snapshots += 1;
                    self.here = self.events.snapshot().collect();
                }
            }
        }
    }

    /// Waits until the set is what the index has. What is lost stays lost, so that this does not end.
    fn settle(&mut self, why: &str) {
        let began = Instant::now();
        loop {
            self.follow();
            let there: HashSet<Key> = self.events.snapshot().collect();
            if self.here == there {
                return;
            }
            let (more, less) = (self.here.difference(&there), there.difference(&self.here));
            assert!(
                began.elapsed() < WATCHDOG,
                "{why}: {} too many, {} too few",
                more.count(),
                less.count()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Puts prompts until so many bytes were stored, and has the shadow follow.
fn fill(engine: &Engine, shadow: &mut Shadow, bytes: u64, first: u64) {
    let (mut stored, mut seed, began) = (0, first, Instant::now());
    while stored < bytes {
        assert!(began.elapsed() < WATCHDOG, "{stored} bytes: {:?}", engine.store.stats());
        let put = engine.put(&prompt(seed, BLOCKS), 0);
        stored += put.stored as u64 * LEN;
        seed += 1;
        if put.refused > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        shadow.follow();
    }
}

/// Changes a byte in each of so many bytes of all segments.
fn damage(folder: &Path, each: usize) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("it can be read").path();
        if !path.to_string_lossy().contains("segment-") {
            continue;
        }
        let file = File::options().read(true).write(true).open(&path).expect("a segment");
        let len = file.metadata().expect("open").len();
        for at in (70_000..len).step_by(each) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).expect("inside");
            file.write_all_at(&[byte[0] ^ 1], at).expect("inside");
        }
    }
}

#[test]
fn events_of_all_processes_lead_to_what_is_in_the_store_after_evictions_and_kills_of_writers() {
    let folder = Folder::new("events-killed");
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    let mut shadow = Shadow::new(&engine);
    let mut rng = fastrand::Rng::with_seed(5);
    for round in 0..8 {
        let first = 1 + round * 100_000;
        let mut others =
            [0, 50_000].map(|to| Other::start(folder.path(), SMALL, first + to, u64::MAX / 2));
        others.iter_mut().for_each(|other| _ = other.next());
        fill(&engine, &mut shadow, rng.u64(1..16) * MIB, first + 25_000);
        others.iter().for_each(|other| other.signal("-KILL"));
        drop(others);
        shadow.settle("writers were killed");
    }
    assert!(shadow.removed > 0 && engine.store.stats().evicted > 0);
}

#[test]
fn events_lead_to_what_is_in_the_store_after_the_keeper_was_killed() {
    let folder = Folder::new("events-keeper");
    let mut rng = fastrand::Rng::with_seed(6);
    for round in 0..6 {
        // The first process is the keeper. It puts nothing more: the shadow begins with one snapshot.
        let first = 1 + round * 100_000;
        let mut keeper = Other::start(folder.path(), SMALL, first, 5);
        while keeper.next() != Some(0) {}
        let engine = Engine::open(&options(folder.path(), SMALL), LEN);
        let mut shadow = Shadow::new(&engine);
        let mut other = Other::start(folder.path(), SMALL, first + 25_000, u64::MAX / 2);
        other.next();
        // The keeper frees space for both.
        let began = Instant::now();
        let run = Duration::from_millis(rng.u64(20..300));
        while began.elapsed() < run {
            engine.put(&prompt(round * 100_000 + 50_000 + shadow.here.len() as u64, BLOCKS), 0);
            shadow.follow();
        }
        keeper.signal("-KILL");
        // Else it may become the keeper.
        drop(other);
        fill(&engine, &mut shadow, SMALL, round * 100_000 + 75_000);
        drop(keeper);
        shadow.settle("the keeper was killed");
        assert_eq!(engine.store.stats().is_keeper, 1);
    }
}

#[test]
fn a_damaged_block_that_a_process_finds_is_removed_for_all() {
    let folder = Folder::new("events-damaged");
    let engines = [(); 2].map(|()| Engine::open(&options(folder.path(), 512 * MIB), LEN));
    let mut shadows = engines.each_ref().map(Shadow::new);
    for seed in 0..10 {
        assert_eq!(engines[0].put(&prompt(seed, BLOCKS), 0).stored, BLOCKS);
    }
    shadows.iter_mut().for_each(|it| it.settle("put"));
    assert_eq!(shadows[1].here.len(), 10 * BLOCKS);
    damage(folder.path(), 100_000);
    for seed in 0..10 {
        for at in 0..BLOCKS {
            engines[1].get(&prompt(seed, at + 1), at);
        }
    }
    assert!(engines[1].store.stats().corrupt > 0);
    // The keeper evicts blocks behind damaged ones. It removes a block and counts it one after the other.
    let lost = || {
        let stats = engines.iter().map(|it| it.store.stats());
        stats.map(|it| (it.corrupt + it.evicted) as usize).sum::<usize>()
    };
    let began = Instant::now();
    loop {
        shadows.iter_mut().for_each(|it| it.settle("damaged"));
        let (removed, lost) = (shadows.each_ref().map(|it| it.removed), lost());
        if removed == [lost; 2] {
            break;
        }
        assert!(began.elapsed() < WATCHDOG, "{removed:?} removed, {lost} lost");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_directory_that_is_lost_while_processes_use_it_has_its_blocks_removed_for_all() {
    let folder = Folder::new("events-directory");
    let paths = ["a", "b"].map(|name| folder.path().join(name));
    let options = options(&paths[0], SMALL).and_directory(&paths[1]);
    let engines = [(); 2].map(|()| Engine::open(&options, LEN));
    let mut shadows = engines.each_ref().map(Shadow::new);
    for seed in 0..20 {
        engines[0].put(&prompt(seed, BLOCKS), 0);
    }
    shadows[1].settle("put");
    // Its segments can't be read any more, nor written.
    for entry in std::fs::read_dir(&paths[1]).expect("a folder") {
        let path = entry.expect("it can be read").path();
        if path.to_string_lossy().contains("segment-") {
            File::options().write(true).open(&path).and_then(|it| it.set_len(0)).expect("cut");
        }
    }
    for seed in 0..20 {
        for at in 0..BLOCKS {
            engines[1].get(&prompt(seed, at + 1), at);
        }
    }
    fill(&engines[0], &mut shadows[0], SMALL, 1000);
    shadows.iter_mut().for_each(|it| it.settle("cut"));
    assert!(shadows.iter().all(|it| it.removed > 0));
}

#[test]
fn after_a_restart_with_another_capacity_or_fewer_directories_a_snapshot_has_what_is_left() {
    let folder = Folder::new("events-restart");
    let paths = ["a", "b"].map(|name| folder.path().join(name));
    let with = |capacity| options(&paths[0], capacity).and_directory(&paths[1]);
    let engine = Engine::open(&with(SMALL), LEN);
    let mut shadow = Shadow::new(&engine);
    fill(&engine, &mut shadow, SMALL / 2, 0);
    shadow.settle("put");
    let before = shadow.here.clone();
    drop((shadow, engine));
    let reopen = |options: &StoreOptions| {
        let engine = Engine::open(options, LEN);
        let mut shadow = Shadow::new(&engine);
        shadow.settle("reopened");
        (engine, shadow)
    };
    let (engine, shadow) = reopen(&with(SMALL));
    assert!(shadow.here == before);
    drop((shadow, engine));
    let (engine, shadow) = reopen(&with(12 * MIB));
    assert!(shadow.here.is_subset(&before) && shadow.here.len() < before.len());
    let before = shadow.here.clone();
    drop((shadow, engine));
    std::fs::remove_dir_all(&paths[1]).expect("it exists");
    let (_engine, shadow) = reopen(&with(12 * MIB));
    assert!(shadow.here.is_subset(&before) && shadow.here.len() < before.len());
}

#[test]
fn a_subscriber_that_waits_ends_when_the_store_is_closed() {
    let folder = Folder::new("events-closed");
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    let shadow = Shadow::new(&engine);
    let watch = engine.store.watch(&[vec![engine.kv.clone()]]).expect("it is open");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| shadow.events.wait(WATCHDOG * 10));
        let gathers = scope.spawn(|| watch.gather(WATCHDOG * 10));
        std::thread::sleep(Duration::from_millis(20));
        engine.store.close();
        assert!(matches!(waits.join().expect("no panic"), Err(Error::Closed)));
        assert!(matches!(gathers.join().expect("no panic"), Err(Error::Closed)));
    });
}

/// What a watch has reported: the hashes of a group that are in the store.
#[derive(Default)]
struct Told(HashSet<(u32, Vec<u8>)>);

impl Told {
    /// Takes all reports. None may say what was said before.
    fn take(&mut self, watch: &Watch) {
        loop {
            let reports = watch.take(1000);
            if reports.is_empty() {
                return;
            }
            for Report { group, is_removed, hashes } in reports {
                for hash in hashes {
                    let name = (group, hash.into_vec());
                    let is_new =
                        if is_removed { self.0.remove(&name) } else { self.0.insert(name) };
                    assert!(is_new, "said twice");
                }
            }
        }
    }

    /// Gathers until what was told is what is wanted.
    fn settle(&mut self, watch: &Watch, is: impl Fn(&HashSet<(u32, Vec<u8>)>) -> bool) {
        let began = Instant::now();
        loop {
            watch.gather(Duration::from_millis(1)).expect("it is open");
            self.take(watch);
            if is(&self.0) {
                return;
            }
            assert!(began.elapsed() < WATCHDOG, "{} are told", self.0.len());
        }
    }
}

#[test]
fn each_engine_that_has_stored_or_found_a_block_is_told_once_when_it_leaves() {
    let folder = Folder::new("watch-evicted");
    let engines = [(); 2].map(|()| Engine::open(&options(folder.path(), SMALL), LEN));
    let watch =
        |engine: &Engine| engine.store.watch(&[vec![engine.kv.clone()]]).expect("it is open");
    let watches = engines.each_ref().map(watch);
    let mut told = [Told::default(), Told::default()];
    let mut known = Vec::new();
    for seed in 0..10 {
        let prompt = prompt(seed, BLOCKS);
        // Before they come, and after.
        watches[0].add(0, &prompt).expect("it is open");
        assert_eq!(engines[0].put(&prompt, 0).stored, BLOCKS);
        watches[1].add(0, &prompt).expect("it is open");
        watches[1].add(0, &prompt).expect("twice is once");
        known.extend(prompt.map_names());
    }
    let known: HashSet<_> = known.into_iter().collect();
    for (told, watch) in told.iter_mut().zip(&watches) {
        told.settle(watch, |told| *told == known);
    }
    let mut shadow = Shadow::new(&engines[0]);
    fill(&engines[0], &mut shadow, 3 * SMALL, 1000);
    let is_there = |(_, hash): &&(u32, Vec<u8>)| engines[0].kv.lookup(&[hash]).expect("open") == 1;
    for (told, watch) in told.iter_mut().zip(&watches) {
        told.settle(watch, |told| *told == known.iter().filter(is_there).cloned().collect());
        assert!(told.0.len() < known.len());
        // That of a block that left only now may follow.
        told.settle(watch, |_| watch.reports() == 0);
    }
}

trait Names {
    fn map_names(&self) -> Vec<(u32, Vec<u8>)>;
}

impl Names for Vec<[u8; 32]> {
    fn map_names(&self) -> Vec<(u32, Vec<u8>)> {
        self.iter().map(|hash| (0, hash.to_vec())).collect()
    }
}

#[test]
fn a_name_whose_block_has_not_come_waits_however_many_blocks_of_later_names_come() {
    let folder = Folder::new("watch-waits");
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    // Names are of a group each: a few blocks have many.
    let groups = 1024;
    let watch = engine.store.watch(&vec![vec![engine.kv.clone()]; groups + 1]).expect("it is open");
    let (last, mut told) = (prompt(1, 1), Told::default());
    watch.add(0, &last).expect("it is open");
    for seed in 2..5 {
        let prompt = prompt(seed, 32);
        for group in 1..=groups {
            watch.add(group.try_into().expect("few"), &prompt).expect("it is open");
        }
        assert_eq!(engine.put(&prompt, 0).stored, 32);
        told.settle(&watch, |told| told.contains(&(groups as u32, prompt[31].to_vec())));
    }
    assert_eq!(engine.put(&last, 0).stored, 1);
    told.settle(&watch, |told| told.contains(&(0, last[0].to_vec())));
}

#[test]
fn a_block_in_parts_has_come_with_its_last_part_and_left_with_the_first() {
    let folder = Folder::new("watch-parts");
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    let part = |at| engine.store.space(&Namespace::new("model").shard(at, 2));
    let parts = [part(0), part(1)];
    let watch = engine.store.watch(&[vec![], parts.to_vec()]).expect("it is open");
    let hash = prompt(1, 1);
    watch.add(1, &hash).expect("it is open");
    watch.add(0, &hash).expect("a group without parts has no blocks");
    let mut told = Told::default();
    let put = |at: usize| {
        engine.fill(0, &[at as u8; LEN as usize]);
        let put = parts[at].put(&hash, 0, &[engine.memory(0)], Default::default());
        assert_eq!(put.expect("open").stored, 1);
    };
    put(0);
    watch.gather(Duration::from_millis(100)).expect("open");
    told.take(&watch);
    assert!(told.0.is_empty(), "a part is missing");
    put(1);
    let expected = HashSet::from([(1, hash[0].to_vec())]);
    told.settle(&watch, |told| *told == expected);
    damage(folder.path(), 65_536);
    while parts[0].get(&hash, 0, &[engine.memory(0)]).expect("open") == 1 {
        damage(folder.path(), 9000);
    }
    told.settle(&watch, HashSet::is_empty);
}

#[test]
fn a_block_that_has_left_and_is_added_again_is_waited_for_as_long_as_any_other() {
    let folder = Folder::new("watch-again");
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    let watch = engine.store.watch(&[vec![engine.kv.clone()]]).expect("it is open");
    let hash = prompt(1, 1);
    let add_others = |count: usize, first: u64| {
        let hashes: Vec<_> =
            (first..).take(count).map(|n| [n, !n].map(u64::to_le_bytes).concat()).collect();
        watch.add(0, &hashes).expect("open");
    };
    let mut told = Told::default();
    watch.add(0, &hash).expect("open");
    engine.put(&hash, 0);
    told.settle(&watch, |told| told.len() == 1);
    while engine.kv.get(&hash, 0, &[engine.memory(0)]).expect("open") == 1 {
        damage(folder.path(), 9000);
    }
    told.settle(&watch, HashSet::is_empty);
    add_others(40_000, 0);
    watch.add(0, &hash).expect("open");
    // 65 536 names that have not come are kept, and there were more since the first time.
    add_others(40_000, 1 << 32);
    engine.put(&hash, 0);
    told.settle(&watch, |told| told.len() == 1);
}

#[test]
fn a_watch_that_is_reset_takes_back_all_that_it_has_said() {
    let folder = Folder::new("watch-reset");
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    let watch = engine.store.watch(&[vec![engine.kv.clone()]]).expect("it is open");
    let prompt = prompt(1, BLOCKS);
    engine.put(&prompt, 0);
    watch.add(0, &prompt).expect("open");
    let mut told = Told::default();
    told.take(&watch);
    assert_eq!(told.0.len(), BLOCKS);
    let other = engine.store.space(&Namespace::new("model").tenant("salt"));
    watch.reset(&[vec![other]]).expect("open");
    watch.add(0, &prompt).expect("open");
    told.take(&watch);
    assert!(told.0.is_empty());
    assert!(matches!(watch.add(1, &prompt), Err(Error::InvalidArgument(_))));
    assert!(matches!(watch.add(0, &[[0; 8]]), Err(Error::InvalidArgument(_))));
}

#[test]
fn a_call_takes_no_more_reports_than_it_has_time_for_and_keeps_their_order() {
    let folder = Folder::new("watch-take");
    let engine = Engine::open(&options(folder.path(), 256 * MIB), LEN);
    let watch = engine.store.watch(&[vec![engine.kv.clone()]]).expect("it is open");
    let prompt = prompt(1, 40);
    engine.put(&prompt, 0);
    watch.add(0, &prompt).expect("open");
    watch.reset(&[vec![engine.kv.clone()]]).expect("open");
    // 40 were stored, and are removed.
    let taken = watch.take(8 * 10 + 7);
    assert_eq!(taken.len(), 1);
    assert_eq!((taken[0].is_removed, taken[0].hashes.len()), (false, 10));
    let taken = watch.take(8 * 30 + 15);
    let lens: Vec<_> = taken.iter().map(|it| (it.is_removed, it.hashes.len())).collect();
    assert_eq!((lens, watch.reports()), (vec![(false, 30), (true, 15)], 25));
}
