//! Fixed batches, and what one of them costs each side once everything is warm.

use crate::Failure;
use crate::counters::{Counts, watch};
use crate::kept::Figures;
use crate::target::{REGION_BYTES, Target, agent};
use kvferry::{Access, Batch, Options, Peer, Region};
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};

/// Transports that are measured.
const TRANSPORTS: &[&str] = &["tcp", "local"];

/// Blocks of so many bytes, and how many of them.
const BATCHES: &[(&str, usize, usize)] = &[
    ("4 KiB x 1", 4 << 10, 1),
    ("4 KiB x 1024", 4 << 10, 1024),
    ("32 KiB x 256", 32 << 10, 256),
    ("1 MiB x 16", 1 << 20, 16),
];

/// Rounds before anything is counted.
const WARM_UP: usize = 30;
pub(crate) const ROUNDS: usize = 101;
/// Rounds that are enough to separate the cost of a batch from one-time costs.
pub(crate) const FEW_ROUNDS: usize = 12;

/// Calls that move bytes, besides those that begin with `process_vm_`.
const MOVING: &[&str] =
    &["read", "write", "readv", "writev", "recvfrom", "sendto", "recvmsg", "sendmsg"];
/// Calls that wait; their number depends on the scheduler.
const WAITING: &[&str] = &[
    "sched_yield",
    "futex",
    "poll",
    "ppoll",
    "epoll_wait",
    "epoll_pwait",
    "epoll_pwait2",
    "nanosleep",
    "clock_nanosleep",
];

/// Counts all batches over all transports.
pub(crate) fn count(rounds: usize) -> Result<Figures, Failure> {
    let mut figures = Figures::default();
    for transport in TRANSPORTS {
        for (name, block, blocks) in BATCHES {
            for write in [true, false] {
                let way = if write { "write" } else { "read" };
                let what = format!("{transport} {way} {name}");
                let counts = one(transport, *block, *blocks, write, rounds)?;
                for (side, rounds) in ["initiator", "acceptor"].iter().zip(counts) {
                    note(&mut figures, &format!("{what}, {side}"), &rounds);
                }
            }
        }
    }
    Ok(figures)
}

/// Counts of each round, of the initiator and of the target.
fn one(
    transport: &str,
    block: usize,
    blocks: usize,
    write: bool,
    rounds_counted: usize,
) -> Result<[Vec<Counts>; 2], Failure> {
    let mut target = Target::start(transport)?;
    let agent = agent("initiator", transport)?;
    let region = agent.allocate_private(REGION_BYTES, Access::READ_WRITE)?;
    watch(region.addr(), REGION_BYTES);
    // Pages are there before anything is counted.
    (0..REGION_BYTES).step_by(4096).try_for_each(|at| region.write_at(at, &[1]))?;
    let peer = agent.peer(&target.address)?;
    let batch = scattered(&region, &target, block, blocks)?;
    let mut rounds = [Vec::new(), Vec::new()];
    for round in 0..WARM_UP + rounds_counted {
        let theirs_before = target.counts()?;
        let ours_before = Counts::now();
        transfer(&peer, &batch, write)?;
        let ours = Counts::now().since(&ours_before);
        // The target has answered before it has done the last thing about a batch.
        std::thread::sleep(std::time::Duration::from_millis(2));
        let theirs = target.counts()?.since(&theirs_before);
        if round >= WARM_UP {
            rounds[0].push(ours);
            rounds[1].push(theirs);
        }
    }
    Ok(rounds)
}

fn transfer(peer: &Peer, batch: &Batch, write: bool) -> Result<(), Failure> {
    let options = Options::default();
    if write {
        peer.write(batch, &options)?
    } else {
        peer.read(batch, &options)?
    };
    Ok(())
}

/// Every second block, in another order at the peer.
fn scattered(
    region: &Region,
    target: &Target,
    block: usize,
    blocks: usize,
) -> Result<Batch, Failure> {
    let mut batch = Batch::with_capacity(blocks);
    for i in 0..blocks {
        let (ours, theirs) = (2 * i * block, 2 * (blocks - 1 - i) * block);
        batch.push(region, ours as u64, &target.region, theirs as u64, block as u64)?;
    }
    Ok(batch)
}

fn sorted(rounds: &[Counts], value: impl Fn(&Counts) -> u64) -> Vec<u64> {
    let mut values: Vec<u64> = rounds.iter().map(value).collect();
    values.sort_unstable();
    values
}

/// The cost of an undisturbed round: the least of all rounds. Waits depend on the scheduler; of them the
/// median.
pub(crate) fn note(figures: &mut Figures, what: &str, rounds: &[Counts]) {
    let sum = |counts: &Counts, wanted: &dyn Fn(&str) -> bool| -> u64 {
        counts.calls.iter().filter(|(name, _)| wanted(name)).map(|(_, n)| n).sum()
    };
    let moving = |name: &str| MOVING.contains(&name) || name.starts_with("process_vm_");
    let other = |name: &str| !moving(name) && !WAITING.contains(&name);
    let waits = |name: &str| WAITING.contains(&name) && name != "sched_yield";
    let mut least = |kind: &str, value: &dyn Fn(&Counts) -> u64| {
        figures.set(&format!("{what}: {kind}"), sorted(rounds, value)[0]);
    };
    least("calls that move bytes", &|c| sum(c, &moving));
    least("other calls", &|c| sum(c, &other));
    least("allocations", &|c| c.allocations);
    least("bytes allocated", &|c| c.allocated);
    least("bytes copied", &|c| c.copied);
    least("payload bytes copied", &|c| c.payload_copied);
    let waits = sorted(rounds, |c| sum(c, &waits));
    figures.set(&format!("{what}: waits"), waits[waits.len() / 2]);
    let mut names: BTreeMap<&str, u64> = BTreeMap::new();
    for counts in rounds {
        for (name, n) in &counts.calls {
            *names.entry(name).or_default() += n;
        }
    }
    let mean: Vec<String> = names
        .iter()
        .map(|(name, n)| format!("{name} {:.1}", *n as f64 / rounds.len() as f64))
        .collect();
    println!("{what}: {} per round", mean.join(", "));
}

/// Checks that every call that strace sees in a run is one that is counted, if strace is installed.
pub(crate) fn uncounted_calls() -> Result<(), Failure> {
    let dir = std::env::temp_dir().join(format!("kvferry-ci-bench-{}", std::process::id()));
    let status = Command::new("strace")
        .args(["-f", "-c", "-U", "name,calls", "-o"])
        .arg(&dir)
        .arg(std::env::current_exe()?)
        .arg("transfers")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let why = match status {
        Ok(status) if status.success() => "",
        Ok(_) => "may not trace here",
        Err(_) => "is not here",
    };
    if !why.is_empty() {
        println!("SKIPPED: whether all system calls are counted: strace {why}");
        return Ok(());
    }
    let seen: BTreeSet<String> = std::fs::read_to_string(&dir)?
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (name, calls) = (words.next()?, words.next()?.parse::<u64>().ok()?);
            // What happens now and then, at a start and an end, is no cost of a batch.
            (calls >= RARE && !STARTING.contains(&name)).then(|| name.to_owned())
        })
        .collect();
    let _ = std::fs::remove_file(&dir);
    let uncounted: Vec<&String> =
        seen.iter().filter(|name| !crate::counters::is_counted(name)).collect();
    if uncounted.is_empty() {
        println!("strace sees {} frequent system calls, all of them are counted", seen.len());
        return Ok(());
    }
    Err(format!("system calls that are not counted: {uncounted:?}; add them to `calls!`").into())
}

/// Calls that are made less often than there are transfers.
const RARE: u64 = (TRANSPORTS.len() * BATCHES.len() * 2 * (WARM_UP + FEW_ROUNDS)) as u64;
/// Calls of a process's start, and strace's own last line. `rt_sigprocmask` belongs to the start of a thread.
const STARTING: &[&str] = &["rt_sigaction", "rt_sigprocmask", "total"];
