//! How long the operations of the index take when it is full, alone and beside other processes.
//!
//! `cargo run --release -p kvferry-store --example index_latency [SLOTS] [PROCESSES]`

use kvferry_store::Key;
use kvferry_store::index::{Entry, Geometry, Index, Inserted, Member, New};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SAMPLES: usize = 200_000;
const PREFIX: usize = 1000;
const PREFIXES: usize = 500;
/// A path of the memory, for a process that only loads the index.
const MEMORY: &str = "KVFERRY_INDEX_MEMORY";

fn main() {
    if let Ok(memory) = std::env::var(MEMORY) {
        return load(&memory);
    }
    let mut args = std::env::args().skip(1).map(|arg| arg.parse().expect("a number"));
    let slots = args.next().unwrap_or(10_000_000);
    let processes = args.next().unwrap_or(1) as usize;
    let geometry = Geometry { slots, segments: 1 << 16, pages_per_segment: 1 << 16 };
    let index = Arc::new(Index::create(geometry).expect("memory"));
    let member = index.join().expect("a member");
    let began = Instant::now();
    (0..slots.into()).for_each(|n| insert(&member, n));
    let took = began.elapsed();
    println!("{slots} slots, {:.1} MB: filled in {took:.1?}", index.memory().len() as f64 / 1e6);
    measure(&member, "alone");
    let began = Instant::now();
    let count = index.iter().count();
    println!("iter over {count} slots: {:.1?}", began.elapsed());
    let began = Instant::now();
    member.recount();
    println!("recount: {:.1?}", began.elapsed());
    for others in 1..=processes {
        let mut children: Vec<Child> = (0..others).map(|_| start_load(&index)).collect();
        while index.members().count() <= others {
            std::thread::yield_now();
        }
        measure(&member, &format!("beside {others}"));
        for child in &mut children {
            child.kill().expect("our child");
            child.wait().expect("our child");
        }
        let dead: Vec<_> = index.members().filter(|&id| index.has_died(id)).collect();
        let began = Instant::now();
        dead.iter().for_each(|&id| assert!(member.sweep(id)));
        println!("sweep of {} killed members: {:.1?}", dead.len(), began.elapsed());
    }
}

fn key(n: u64) -> Key {
    let mixed = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Key([mixed ^ mixed >> 29, mixed.rotate_left(31) ^ n])
}

fn insert(member: &Member, n: u64) {
    let page = n as u32;
    let new = New { sum: n, parent: None, page, len: 1 << 17, retention: 0, now: 0 };
    let inserted = member.insert(key(n), new);
    // On a machine with fewer processors than processes, the owner of a lock may have to wait for one.
    if inserted == Inserted::Contended {
        eprintln!("contended: {n}");
    }
}

/// Finds, touches, removes and inserts until killed.
fn load(memory: &str) {
    let memory = File::options().read(true).write(true).open(memory).expect("of the parent");
    let index = Arc::new(Index::open(memory.into()).expect("an index"));
    let member = index.join().expect("a member");
    let slots = index.geometry().slots.into();
    loop {
        let n = fastrand::u64(0..slots);
        match member.find(&key(n)) {
            Some(entry) if fastrand::u32(0..4) == 0 => {
                member.remove(&entry);
                insert(&member, n);
            }
            Some(entry) => member.touch(&entry, 1),
            None => insert(&member, n),
        }
    }
}

fn start_load(index: &Index) -> Child {
    let fd = index.memory().as_fd().as_raw_fd();
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.env(MEMORY, format!("/proc/{}/fd/{fd}", std::process::id()));
    child.spawn().expect("a process")
}

fn measure(member: &Member, situation: &str) {
    println!("{situation}:");
    let slots: u64 = member.geometry().slots.into();
    let chosen: Vec<u64> = (0..SAMPLES).map(|_| fastrand::u64(0..slots)).collect();
    let mut entries: Vec<Entry> = Vec::with_capacity(SAMPLES);
    time("find", &chosen, |&n| entries.extend(member.find(&key(n))));
    time("find, not there", &chosen, |&n| assert!(member.find(&key(n + slots)).is_none()));
    fastrand::shuffle(&mut entries);
    time("touch", &entries, |entry| member.touch(entry, 2));
    let mut removed = 0;
    time("remove", &entries, |entry| removed += usize::from(member.remove(entry)));
    time("insert", &chosen, |&n| insert(member, n));
    println!("    {removed} of {} were removed", entries.len());
    let mut out = Vec::with_capacity(PREFIX);
    let mut time_prefixes = |name: &str, key_at: &dyn Fn(u64, u64) -> u64| {
        let prefixes: Vec<Vec<Key>> = (0..PREFIXES)
            .map(|_| fastrand::u64(0..slots.saturating_sub(PREFIX as u64).max(1)))
            .map(|first| (0..PREFIX as u64).map(|i| key(key_at(first, i))).collect())
            .collect();
        let mut found = 0;
        time(name, &prefixes, |keys| {
            out.clear();
            found += member.find_prefix(keys, &mut out);
        });
        println!("    length found, on average: {}", found / PREFIXES);
    };
    time_prefixes("1000, in one go", &|first, i| first + i);
    time_prefixes("1000, scattered", &|_, _| fastrand::u64(0..slots));
}

/// Prints how long `operation` takes.
fn time<T>(name: &str, items: &[T], mut operation: impl FnMut(&T)) {
    let mut took: Vec<Duration> = items
        .iter()
        .map(|item| {
            let began = Instant::now();
            operation(item);
            began.elapsed()
        })
        .collect();
    took.sort_unstable();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    println!(
        "    {name:20} p50 {:>9.2?}  p99 {:>9.2?}  p99.9 {:>9.2?}",
        at(0.5),
        at(0.99),
        at(0.999)
    );
}
