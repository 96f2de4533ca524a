//! Several processes with one store, some of which are killed or stopped.

use crate::{Engine, Folder, MIB, options, prompt};
use kvferry::DirectIo;
use kvferry_sys::lock::LockFile;
use kvferry_testkit::hanging::HangingDisk;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const LEN: u64 = 64 << 10;
const CAPACITY: u64 = 2048 * MIB;
const SMALL: u64 = 24 * MIB;
const BLOCKS: usize = 6;
/// Set for a process that goes past the page cache.
const DIRECT: &str = "KVFERRY_STORE_TEST_DIRECT";

/// A process with the store open, which puts prompts and says the seed of each when it is stored.
pub(crate) struct Other {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Other {
    /// Puts the prompts of seeds from `first` on: `count` of them, and then waits.
    pub(crate) fn start(folder: &Path, capacity: u64, first: u64, count: u64) -> Self {
        Self::start_with(folder, capacity, first, count, |_| ())
    }

    /// As [`Other::start`], past the page cache.
    pub(crate) fn start_direct(folder: &Path, capacity: u64, first: u64, count: u64) -> Self {
        Self::start_with(folder, capacity, first, count, |it| _ = it.env(DIRECT, "1"))
    }

    fn start_with(
        folder: &Path,
        capacity: u64,
        first: u64,
        count: u64,
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let this = std::env::current_exe().expect("the path of this program");
        let mut command = Command::new(this);
        change(&mut command);
        let mut child = command
            .args(["--exact", "processes::other", "--ignored", "--nocapture"])
            .env("KVFERRY_STORE_TEST", folder)
            .env("KVFERRY_STORE_TEST_PUTS", format!("{capacity} {first} {count}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, said }
    }

    /// The next seed that it says; `None` once it is dead.
    pub(crate) fn next(&mut self) -> Option<u64> {
        loop {
            let mut line = String::new();
            if self.said.read_line(&mut line).expect("reads") == 0 {
                return None;
            }
            if let Some(seed) = line.trim().strip_prefix("stored ") {
                return seed.parse().ok();
            }
        }
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status().expect("kill runs");
        assert!(sent.success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "the other process of the tests below"]
fn other() {
    // `make test-slow` runs all ignored tests. Without a parent, this one has nothing to do.
    let Ok(folder) = std::env::var("KVFERRY_STORE_TEST") else { return };
    let puts = std::env::var("KVFERRY_STORE_TEST_PUTS").expect("given with the folder");
    let mut numbers = puts.split(' ').map(|number| number.parse::<u64>().expect("a number"));
    let mut next = || numbers.next().expect("three numbers");
    let (capacity, first, count) = (next(), next(), next());
    let direct = match std::env::var(DIRECT) {
        Ok(_) => DirectIo::Auto,
        Err(_) => DirectIo::Off,
    };
    let engine = Engine::open(&options(Path::new(&folder), capacity).direct(direct), LEN);
    for seed in first..first.saturating_add(count) {
        let put = engine.put(&prompt(seed, BLOCKS), 0);
        if put.stored + put.present == BLOCKS {
            println!("stored {seed}");
        }
    }
    println!("stored 0");
    let _ = std::io::stdout().flush();
    // Until the parent closes the pipe, or kills.
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn a_process_finds_what_another_has_put_at_once() {
    let folder = Folder::new("two");
    let engine = Engine::open(&options(folder.path(), CAPACITY), LEN);
    let mut other = Other::start(folder.path(), CAPACITY, 1, 20);
    let mut count = 0;
    while let Some(seed) = other.next().filter(|seed| *seed > 0) {
        assert_eq!(engine.get(&prompt(seed, BLOCKS), 0), BLOCKS, "{seed}");
        count += 1;
    }
    assert_eq!((count, engine.store.stats().processes), (20, 2));
    drop(other.child.stdin.take());
    assert!(other.child.wait().expect("ends").success());
}

#[test]
fn a_process_that_is_killed_while_it_writes_costs_no_block_that_was_put() {
    let folder = Folder::new("killed");
    let mut rng = fastrand::Rng::with_seed(1);
    let mut stored = Vec::new();
    for round in 0..8u64 {
        let mut other = Other::start(folder.path(), CAPACITY, 1 + round * 10_000, u64::MAX / 2);
        stored.extend(other.next());
        std::thread::sleep(Duration::from_micros(rng.u64(..60_000)));
        other.signal("-KILL");
        while let Some(seed) = other.next() {
            stored.push(seed);
        }
        let engine = Engine::open(&options(folder.path(), CAPACITY), LEN);
        // What was put last: earlier prompts may have left for it.
        for seed in stored.iter().rev().take(300) {
            assert_eq!(engine.get(&prompt(*seed, BLOCKS), 0), BLOCKS, "{seed} in round {round}");
        }
        assert_eq!(engine.store.stats().corrupt, 0);
    }
}

/// Puts and gets until the store was filled twice. What is put may leave at once, for what is worth more.
fn fill_twice(engine: &Engine, first: u64) {
    let (mut bytes, mut hits, mut seed, began) = (0, 0, first, Instant::now());
    while bytes < 2 * SMALL {
        assert!(began.elapsed() < PATIENCE / 2, "{bytes} bytes only");
        let put = engine.put(&prompt(seed, BLOCKS), 0);
        bytes += put.stored as u64 * LEN;
        if put.refused_no_space > 0 {
            std::thread::sleep(Duration::from_millis(1));
        } else {
            // A process that is stopped may hold the lock of a block: the next prompt has others.
            hits += engine.get(&prompt(seed, BLOCKS), 0);
            seed += 1;
        }
    }
    assert!(hits as u64 * LEN > SMALL / 2, "{hits} hits");
}

#[test]
fn when_the_keeper_is_killed_another_process_becomes_it() {
    let folder = Folder::new("keeper");
    let mut first = Other::start(folder.path(), SMALL, 1, 5);
    while first.next() != Some(0) {}
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    assert_eq!(engine.store.stats().is_keeper, 0);
    first.signal("-KILL");
    fill_twice(&engine, 100);
    let stats = engine.store.stats();
    assert_eq!((stats.is_keeper, stats.processes, stats.corrupt), (1, 1, 0), "{stats:?}");
}

#[test]
fn what_a_device_writes_late_of_a_process_that_was_killed_lands_in_no_block_of_another() {
    let _bound = Watchdog::new(PATIENCE);
    let folder = Folder::new("late-write");
    let Some(disk) = HangingDisk::mount(folder.path()) else { return };
    let with = options(folder.path(), SMALL).direct(DirectIo::Auto);
    let engine = Engine::open(&with, LEN);
    assert_eq!(engine.put(&prompt(1 << 40, 1), 0).stored, 1);
    if !engine.agent.files().engine().is_some_and(|it| it.starts_with("uring")) {
        println!("SKIPPED: without io_uring, threads of the process wait for the device");
        return;
    }
    // The header of an extent and a block.
    disk.lose_direct_writes(2);
    let mut other = Other::start_direct(folder.path(), SMALL, 1, 1);
    eventually("the device has the writes", || disk.lost() == 2);
    other.signal("-KILL");
    assert_eq!(other.next(), None, "it was not told that its blocks are stored");
    // No thread waits for the device.
    other.child.wait().expect("it ends");
    fill_twice(&engine, 100);
    assert_eq!(disk.lost(), 2);
    disk.release();
    eventually("it writes", || disk.lost() == 0);
    let seeds = 100..1000;
    let hits: usize = seeds.map(|seed| engine.get(&prompt(seed, BLOCKS), 0)).sum();
    let stats = engine.store.stats();
    assert!(hits > 0 && stats.corrupt == 0, "{hits} hits, {stats:?}");
    eventually("what the process held is given back", || engine.store.stats().processes == 1);
    engine.store.close();
}

#[test]
fn a_process_that_is_stopped_holds_up_no_other() {
    let folder = Folder::new("stopped");
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    let mut rng = fastrand::Rng::with_seed(2);
    for round in 0..4u64 {
        let mut other = Other::start(folder.path(), SMALL, 1 + round * 100_000, u64::MAX / 2);
        other.next();
        std::thread::sleep(Duration::from_micros(rng.u64(..20_000)));
        other.signal("-STOP");
        fill_twice(&engine, 1_000_000 + round * 10_000);
    }
}

#[test]
fn while_the_keeper_is_stopped_the_others_read_and_are_refused_at_worst() {
    let folder = Folder::new("keeper-stopped");
    let mut keeper = Other::start(folder.path(), SMALL, 1, 5);
    while keeper.next() != Some(0) {}
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    keeper.signal("-STOP");
    let _bound = Watchdog::new(PATIENCE);
    let (mut refused, mut hits) = (0, 0);
    for seed in 100..300 {
        refused += engine.put(&prompt(seed, BLOCKS), 0).refused;
        hits += engine.get(&prompt(seed, BLOCKS), 0);
    }
    assert!(refused > 0 && hits > 0, "{refused} refused, {hits} hits");
    assert_eq!(engine.get(&prompt(100, BLOCKS), 0), BLOCKS);
    keeper.signal("-CONT");
    fill_twice(&engine, 1000);
}

#[test]
fn a_keeper_that_the_system_refuses_to_let_wait_answers_once_it_may() {
    let folder = Folder::new("keeper-limit");
    let mut keeper = Other::start(folder.path(), SMALL, 1, 5);
    while keeper.next() != Some(0) {}
    let pid = keeper.child.id().to_string();
    // Below the number of descriptors that it waits for, which is an error.
    let limit = |limit: &str| {
        let mut prlimit = Command::new("prlimit");
        prlimit.args(["--pid", &pid, &format!("--nofile={limit}:")]);
        prlimit.status().is_ok_and(|done| done.success())
    };
    if !limit("1") {
        println!("SKIPPED: prlimit can't set another process's limits");
        return;
    }
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| Engine::try_open(&options(folder.path(), SMALL), LEN));
        // Each change of the keeper's descriptors ends its wait, and it waits again.
        for _ in 0..20 {
            assert!(limit("1"));
            std::thread::sleep(Duration::from_millis(5));
            assert!(limit("1024"));
            std::thread::sleep(Duration::from_millis(5));
        }
        let engine = opened.join().expect("no panic").expect("the keeper answers");
        assert_eq!(engine.get(&prompt(1, BLOCKS), 0), BLOCKS);
        assert_eq!(engine.store.stats().is_keeper, 0);
    });
}

#[test]
fn a_lock_that_outlives_its_process_for_a_moment_only_delays_the_next_one() {
    let folder = Folder::new("lock");
    drop(Engine::open(&options(folder.path(), SMALL), LEN));
    let lock = LockFile::open(&folder.path().join("members")).expect("a lock");
    assert!(lock.try_shared().expect("locks"));
    let left = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(lock);
    });
    let engine = Engine::open(&options(folder.path(), SMALL), LEN);
    assert_eq!(engine.store.stats().is_keeper, 1);
    left.join().expect("it sleeps");
}
