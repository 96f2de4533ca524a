//! How long the operations of the index take when it is full: required, reached, spread.
//!
//! `cargo run --release -p kvferry-store --example index_latency [SLOTS] [PROCESSES]`
//!
//! - *alone*: one process, with small pages and then with huge ones.
//! - *together*: each of PROCESSES does all operations on blocks of its choice, at once, and all of them are measured.
//! - *beside*: one process is measured beside the others, which are killed at the end, and swept.
//!
//! A figure is the median of the runs, and the spread their quartiles. In *together*, a run is as short as a few time
//! slices. Where there are fewer processors than processes, a process that the system stops is slow for another reason
//! than the index: operations count in groups of [`GROUP`], and groups during which the system's count of involuntary
//! switches rose do not. How many these were is printed, with the 99th percentile of all. A process that waits for a lock
//! gives its processor up: if the owner of the lock was stopped, that group does not count either.

use kvferry_store::Key;
use kvferry_store::index::{Entry, Geometry, Index, Inserted, Member, New};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of a run of one process.
const SAMPLES: usize = 50_000;
const PREFIX: usize = 1000;
const PREFIXES: usize = 100;
const RUNS: usize = 9;
/// Of a run of one of several processes.
const GROUPS: usize = 200;
const GROUP: usize = 64;
const BACKLOG: usize = 8192;
/// Required of one operation, and of a prefix of 1000 blocks.
const P50_MAX: Duration = Duration::from_micros(2);
const P99_MAX: Duration = Duration::from_micros(20);
const PREFIX_P50_MAX: Duration = Duration::from_micros(100);
/// A path of the memory, for another process.
const MEMORY: &str = "KVFERRY_INDEX_MEMORY";
/// What another process does: it takes part, or it only loads the index.
const ROLE: &str = "KVFERRY_INDEX_ROLE";
const OPERATIONS: [&str; 4] = ["find", "touch", "remove", "insert"];

fn main() -> ExitCode {
    if let (Ok(memory), Ok(role)) = (std::env::var(MEMORY), std::env::var(ROLE)) {
        let member = join(&memory);
        match role.as_str() {
            "load" => load(&member),
            _ => take_part(&member).expect("the parent waits"),
        }
        return ExitCode::SUCCESS;
    }
    let mut args = std::env::args().skip(1).map(|arg| arg.parse().expect("a number"));
    let slots = args.next().unwrap_or(10_000_000);
    let processes = args.next().unwrap_or(8) as usize;
    let geometry = Geometry { slots, segments: 1 << 16, pages_per_segment: 1 << 16 };
    let index = Arc::new(Index::create(geometry).expect("memory"));
    let member = index.join().expect("a member");
    let began = Instant::now();
    (0..slots.into()).for_each(|n| assert!(insert(&member, n)));
    println!("{slots} slots, {:.1} MB: filled in {:.1?}", bytes(&index), began.elapsed());
    let mut table = Table::default();
    alone(&member, "alone, small pages", &mut table);
    let began = Instant::now();
    while index.collapse(8) {}
    println!("huge pages: {:.1?}", began.elapsed());
    alone(&member, "alone", &mut table);
    scans(&member);
    together(&member, processes, &mut table);
    beside(&member, processes, &mut table);
    table.print();
    if table.is_short { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn bytes(index: &Index) -> f64 {
    index.memory().len() as f64 / 1e6
}

fn key(n: u64) -> Key {
    let mixed = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Key([mixed ^ mixed >> 29, mixed.rotate_left(31) ^ n])
}

/// False if another process kept a lock for too long. On a machine with fewer processors than processes, the owner of
/// a lock may have to wait for one.
fn insert(member: &Member, n: u64) -> bool {
    let page = n as u32;
    let new = New { sum: n, parent: None, page, len: 1 << 17, retention: 0, now: 0 };
    member.insert(key(n), new) != Inserted::Contended
}

fn any(member: &Member) -> u64 {
    fastrand::u64(0..member.geometry().slots.into())
}

/// One process, which does each operation on all samples before the next operation.
fn alone(member: &Member, situation: &str, table: &mut Table) {
    let slots: u64 = member.geometry().slots.into();
    let mut rows: [Runs; 7] = Default::default();
    for _ in 0..RUNS {
        let [find, absent, touch, remove, inserts, near, far] = &mut rows;
        let chosen: Vec<u64> = (0..SAMPLES).map(|_| any(member)).collect();
        let mut entries: Vec<Entry> = Vec::with_capacity(SAMPLES);
        find.time(&chosen, |&n| entries.extend(member.find(&key(n))));
        absent.time(&chosen, |&n| assert!(member.find(&key(n + slots)).is_none()));
        fastrand::shuffle(&mut entries);
        touch.time(&entries, |entry| member.touch(entry, 2));
        let mut removed = 0;
        remove.time(&entries, |entry| removed += usize::from(member.remove(entry)));
        inserts.time(&chosen, |&n| assert!(insert(member, n)));
        near.time_prefixes(member, &|first, i| first + i);
        far.time_prefixes(member, &|_, _| any(member));
    }
    let [find, absent, touch, remove, inserts, near, far] = &rows;
    for (name, runs) in [("find", find), ("find, not there", absent), ("touch", touch)] {
        table.row(situation, name, runs, Some((P50_MAX, P99_MAX)));
    }
    for (name, runs) in [("remove", remove), ("insert", inserts)] {
        table.row(situation, name, runs, Some((P50_MAX, P99_MAX)));
    }
    table.row(situation, "1000 inserted in a row", near, None);
    let is_required = situation == "alone";
    let required = is_required.then_some((PREFIX_P50_MAX, Duration::MAX));
    table.row(situation, "1000 scattered", far, required);
}

fn scans(member: &Member) {
    let began = Instant::now();
    let count = member.iter().count();
    println!("iter over {count} slots: {:.1?}", began.elapsed());
    let began = Instant::now();
    member.recount();
    println!("recount: {:.1?}", began.elapsed());
}

/// A process that takes part in *together*.
struct Part {
    child: Child,
    go: ChildStdin,
    samples: BufReader<ChildStdout>,
}

/// All processes do all operations at once.
fn together(member: &Member, processes: usize, table: &mut Table) {
    let before = member.members().count();
    let mut parts: Vec<Part> = (0..processes).map(|_| start_part(member)).collect();
    while member.members().count() < before + processes {
        std::thread::yield_now();
    }
    let mut all: [Runs; OPERATIONS.len()] = Default::default();
    let mut undisturbed: [Runs; OPERATIONS.len()] = Default::default();
    let mut worst = [Duration::ZERO; OPERATIONS.len()];
    let (mut stopped, mut contended) = (0, 0);
    // The first run does not count: the processes map the memory.
    for run in 0..=RUNS {
        for part in &mut parts {
            part.go.write_all(b"\n").expect("it waits");
        }
        let mut together: [[Vec<Duration>; 2]; OPERATIONS.len()] = Default::default();
        for part in &mut parts {
            for (at, sorted) in together.iter_mut().enumerate() {
                let mut mine = [(); 2].map(|()| read_samples(&mut part.samples).expect("samples"));
                mine[0].sort_unstable();
                if run > 0 {
                    worst[at] = worst[at].max(at_share(&mine[0], 0.99));
                }
                for (sorted, mine) in sorted.iter_mut().zip(mine) {
                    sorted.extend(mine);
                }
            }
            contended += read_word(&mut part.samples).expect("a count");
        }
        if run > 0 {
            stopped += together[0][1].len();
            for (at, [clean, stopped]) in together.into_iter().enumerate() {
                all[at].add(clean.iter().chain(&stopped).copied().collect());
                undisturbed[at].add(clean);
            }
        }
    }
    for part in &mut parts {
        part.child.kill().expect("our child");
        part.child.wait().expect("our child");
    }
    let share = stopped as f64 / (RUNS * processes * GROUPS * GROUP) as f64 * 100.0;
    println!(
        "together: {share:.1} % of the operations in groups during which the process was stopped;"
    );
    println!("    {contended} inserts gave up waiting for a lock whose owner was stopped");
    for (at, name) in OPERATIONS.iter().enumerate() {
        println!(
            "    {name:8} p99 with these {:.2?}; p99 of the worst run of any process without them {:.2?}",
            all[at].median(0.99),
            worst[at]
        );
        let situation = format!("together, {processes} processes");
        table.row(&situation, name, &undisturbed[at], Some((P50_MAX, P99_MAX)));
    }
    sweep(member);
}

fn start(index: &Index, role: &str) -> Command {
    let fd = index.memory().as_fd().as_raw_fd();
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.env(MEMORY, format!("/proc/{}/fd/{fd}", std::process::id())).env(ROLE, role);
    child
}

fn start_part(member: &Member) -> Part {
    let mut command = start(member, "part");
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
    let (go, samples) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
    Part { child, go, samples: BufReader::new(samples) }
}

fn join(memory: &str) -> Member {
    let memory = File::options().read(true).write(true).open(memory).expect("of the parent");
    let index = Arc::new(Index::open(memory.into()).expect("an index"));
    index.join().expect("a member")
}

/// A run for each byte of the standard input: for each operation, the samples of groups that were not disturbed, and
/// those of the others; then how many inserts found a lock taken for too long.
fn take_part(member: &Member) -> io::Result<()> {
    let mut samples = BufWriter::new(io::stdout().lock());
    let mut backlog = Backlog::default();
    (0..4 * BACKLOG).for_each(|_| _ = backlog.operate(member));
    for go in io::stdin().lock().bytes() {
        go?;
        backlog.contended = 0;
        let mut took: [[Vec<Duration>; 2]; OPERATIONS.len()] = Default::default();
        for _ in 0..GROUPS {
            let before = switches()?;
            let group: Vec<_> = (0..GROUP).map(|_| backlog.operate(member)).collect();
            let is_disturbed = usize::from(switches()? != before);
            for (at, took) in took.iter_mut().enumerate() {
                took[is_disturbed].extend(group.iter().filter_map(|it| it[at]));
            }
        }
        for of in took.iter().flatten() {
            write_word(&mut samples, of.len() as u32)?;
            for took in of {
                write_word(&mut samples, u32::try_from(took.as_nanos()).unwrap_or(u32::MAX))?;
            }
        }
        write_word(&mut samples, backlog.contended)?;
        samples.flush()?;
    }
    Ok(())
}

/// Blocks that were found, touched or removed, for the operation that follows. Each waits so long that the processor's
/// fastest caches have forgotten it.
#[derive(Default)]
struct Backlog {
    found: VecDeque<(u64, Entry)>,
    touched: VecDeque<(u64, Entry)>,
    removed: VecDeque<u64>,
    contended: u32,
}

impl Backlog {
    /// Each operation once, on different blocks; fewer until enough wait.
    fn operate(&mut self, member: &Member) -> [Option<Duration>; OPERATIONS.len()] {
        let mut took = [None; OPERATIONS.len()];
        let n = any(member);
        let began = Instant::now();
        let entry = member.find(&key(n));
        took[0] = Some(began.elapsed());
        self.found.extend(entry.map(|entry| (n, entry)));
        if let Some((n, entry)) = next(&mut self.found) {
            let began = Instant::now();
            member.touch(&entry, 2);
            took[1] = Some(began.elapsed());
            self.touched.push_back((n, entry));
        }
        if let Some((n, entry)) = next(&mut self.touched) {
            let began = Instant::now();
            let is_removed = member.remove(&entry);
            took[2] = Some(began.elapsed());
            self.removed.extend(is_removed.then_some(n));
        }
        if let Some(n) = next(&mut self.removed) {
            let began = Instant::now();
            let is_there = insert(member, n);
            took[3] = Some(began.elapsed());
            self.contended += u32::from(!is_there);
        }
        took
    }
}

fn next<T>(waiting: &mut VecDeque<T>) -> Option<T> {
    (waiting.len() > BACKLOG).then(|| waiting.pop_front()).flatten()
}

fn write_word(to: &mut impl Write, word: u32) -> io::Result<()> {
    to.write_all(&word.to_le_bytes())
}

fn read_word(from: &mut impl Read) -> io::Result<u32> {
    let mut word = [0; 4];
    from.read_exact(&mut word)?;
    Ok(u32::from_le_bytes(word))
}

fn read_samples(from: &mut impl Read) -> io::Result<Vec<Duration>> {
    let nanos = |nanos: u32| Duration::from_nanos(nanos.into());
    (0..read_word(from)?).map(|_| read_word(from).map(nanos)).collect()
}

/// How often the system has stopped this thread to run another one.
fn switches() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/thread-self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// One process beside others that only load the index, and are killed.
fn beside(member: &Member, others: usize, table: &mut Table) {
    let before = member.members().count();
    let mut children: Vec<Child> =
        (0..others).map(|_| start(member, "load").spawn().expect("a process")).collect();
    while member.members().count() < before + others {
        std::thread::yield_now();
    }
    let mut find = Runs::default();
    for _ in 0..RUNS {
        let chosen: Vec<u64> = (0..SAMPLES).map(|_| any(member)).collect();
        find.time(&chosen, |&n| _ = member.find(&key(n)));
    }
    table.row(&format!("beside {others} that are killed"), "find", &find, None);
    for child in &mut children {
        child.kill().expect("our child");
        child.wait().expect("our child");
    }
    sweep(member);
}

/// Finds, touches, removes and inserts until killed.
fn load(member: &Member) {
    loop {
        let n = any(member);
        match member.find(&key(n)) {
            Some(entry) if fastrand::u32(0..4) == 0 => {
                member.remove(&entry);
                insert(member, n);
            }
            Some(entry) => member.touch(&entry, 1),
            None => _ = insert(member, n),
        }
    }
}

/// What the keeper does after deaths.
fn sweep(member: &Member) {
    let dead: Vec<_> = member.members().filter(|&id| member.has_died(id)).collect();
    let began = Instant::now();
    dead.iter().for_each(|&id| assert!(member.sweep(id)));
    println!("sweep of {} killed members: {:.1?}", dead.len(), began.elapsed());
}

/// The sorted times of each run.
#[derive(Default)]
struct Runs(Vec<Vec<Duration>>);

impl Runs {
    fn add(&mut self, took: Vec<Duration>) {
        let mut took = took;
        took.sort_unstable();
        if !took.is_empty() {
            self.0.push(took);
        }
    }

    fn time<T>(&mut self, items: &[T], mut operation: impl FnMut(&T)) {
        let timed = items.iter().map(|item| {
            let began = Instant::now();
            operation(item);
            began.elapsed()
        });
        self.add(timed.collect());
    }

    fn time_prefixes(&mut self, member: &Member, key_at: &dyn Fn(u64, u64) -> u64) {
        let slots: u64 = member.geometry().slots.into();
        let prefixes: Vec<Vec<Key>> = (0..PREFIXES)
            .map(|_| fastrand::u64(0..slots.saturating_sub(PREFIX as u64).max(1)))
            .map(|first| (0..PREFIX as u64).map(|i| key(key_at(first, i))).collect())
            .collect();
        let mut out = Vec::with_capacity(PREFIX);
        self.time(&prefixes, |keys| {
            out.clear();
            member.find_prefix(keys, &mut out);
        });
    }

    /// Of a share of the samples, sorted by run.
    fn at(&self, share: f64) -> Vec<Duration> {
        let mut of_runs: Vec<_> = self.0.iter().map(|run| at_share(run, share)).collect();
        of_runs.sort_unstable();
        of_runs
    }

    fn median(&self, share: f64) -> Duration {
        at_share(&self.at(share), 0.5)
    }
}

fn at_share(sorted: &[Duration], share: f64) -> Duration {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
}

/// Rows with what is required and what was reached.
#[derive(Default)]
struct Table {
    lines: Vec<String>,
    is_short: bool,
}

impl Table {
    fn row(&mut self, situation: &str, name: &str, runs: &Runs, max: Option<(Duration, Duration)>) {
        let name = format!("{situation}: {name}");
        let mut line = format!("{name:48}");
        let (p50_max, p99_max) = max.unwrap_or((Duration::MAX, Duration::MAX));
        for (share, max) in [(0.5, p50_max), (0.99, p99_max)] {
            let (reached, runs) = (runs.median(share), runs.at(share));
            let required =
                if max == Duration::MAX { String::new() } else { format!("≤ {max:.0?}") };
            let verdict = match reached <= max {
                _ if required.is_empty() => "",
                true => "ok",
                false => "SHORT",
            };
            self.is_short |= verdict == "SHORT";
            let spread = format!("[{:.2?} {:.2?}]", at_share(&runs, 0.25), at_share(&runs, 0.75));
            line += &format!(
                "  {required:>8} {:>9} {spread:>21} {verdict:5}",
                format!("{reached:.2?}")
            );
        }
        self.lines.push(line);
    }

    fn print(&self) {
        let one = |name| format!("  {:>8} {name:>9} {:>21} {:5}", "required", "[spread]", "");
        println!("{:48}{}{}", "", one("p50"), one("p99"));
        self.lines.iter().for_each(|line| println!("{line}"));
    }
}
