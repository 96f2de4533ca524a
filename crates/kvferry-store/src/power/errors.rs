//! Errors of devices, at each operation on a file.

use super::recorder::{Fault, Recording};
use super::{CAPACITY, Engine, Folder, PATIENCE, Process, bytes_of_segments, hash, options};
use kvferry_sys::sync::Mutex;
use kvferry_testkit::Journal;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use tracing::Level;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EDQUOT: i32 = 122;
/// Cases at the same time: they mostly wait until the store tries again.
const THREADS: usize = 12;
/// Cases that are run at least, spread over all operations.
const AT_LEAST: usize = 48;
/// Time limit of the test that `make test` runs.
const QUICK: Duration = Duration::from_secs(10);
/// A case that takes longer hangs.
const HANGS: Duration = Duration::from_secs(180);
/// All cases together that take longer hang.
const ALL_HANG: Duration = Duration::from_secs(1800);
/// Blocks of the store that is there before.
const BEFORE: std::ops::Range<u64> = 1..260;
/// Log lines about faults come at most so often.
const LINES_EVERY: Duration = Duration::from_secs(10);

/// A store that the failing operations find.
#[derive(Clone, Copy, Debug)]
enum Start {
    /// No store: it is made.
    New,
    /// A full store, so that space must be freed.
    Full,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    number: usize,
    start: Start,
    fault: Fault,
}

/// Journal of the lines that stores log.
fn lines() -> &'static Journal {
    static LINES: OnceLock<Journal> = OnceLock::new();
    LINES.get_or_init(|| {
        let lines = Journal::new("kvferry_store", Level::WARN);
        tracing::subscriber::set_global_default(lines.clone()).expect("no other test sets one");
        lines
    })
}

/// Takes the lines about a folder.
fn lines_about(folder: &Path) -> Vec<String> {
    lines().take_with(&folder.to_string_lossy())
}

/// Result of a case.
#[derive(Clone, Debug, Default)]
struct Outcome {
    /// Calls that returned an error.
    errors: usize,
    /// Blocks that were counted as failed or refused.
    failed: u64,
    /// Lines that were logged.
    lines: Vec<String>,
    /// The operations that failed.
    injected: Vec<String>,
    operations: usize,
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder").map(|it| it.expect("an entry")) {
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).expect("room for a store");
        }
    }
}

/// Makes a store that is full. Stores have names in common with their copies, so that each case makes its own.
fn fill(engine: &Engine, folder: &Path) {
    let process = Process::open(engine, &options(folder), 0).expect("a store");
    for blocks in BEFORE.collect::<Vec<_>>().chunks(3) {
        let since = Instant::now();
        while engine.put(&process.kv, 0, blocks).expect("memory is registered").refused > 0 {
            assert!(since.elapsed() < PATIENCE);
            thread::yield_now();
        }
    }
    process.store.close();
}

fn check(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// Puts, gets and syncs while a fault is there. Returns the blocks that were stored.
fn work(process: &Process<'_>, outcome: &mut Outcome) -> Result<Vec<u64>, String> {
    let (mut stored, mut failed) = (Vec::new(), 0);
    for first in (1000..1080).step_by(2) {
        let put = process.engine.put(&process.kv, 0, &[first, first + 1]);
        let put = put.map_err(|e| format!("a put returned {e}"))?;
        let sum = put.stored + put.present + put.refused + put.failed;
        check(sum == 2, || format!("the parts of {put:?} are not 2"))?;
        failed += put.failed as u64;
        if put.stored == 2 {
            stored.extend([first, first + 1]);
        }
        for block in [first, first - 1000, first + 1] {
            process.engine.get(&process.kv, 0, block)?;
        }
        if first % 20 == 0 {
            outcome.errors += usize::from(process.store.sync().is_err());
        }
        let bytes = process.store.stats().disk_bytes;
        check(bytes <= CAPACITY, || format!("{bytes} bytes are more than the capacity"))?;
    }
    let stats = process.store.stats();
    check(stats.failed >= failed, || format!("{failed} blocks were not stored: {stats:?}"))?;
    outcome.failed = stats.failed + stats.refused;
    Ok(stored)
}

fn run(engine: &Engine, template: &Path, folder: &Path, case: Case) -> Result<Outcome, String> {
    let _ = fs::remove_dir_all(folder);
    match case.start {
        Start::New => fs::create_dir_all(folder).expect("a folder"),
        Start::Full => copy(template, folder),
    }
    // What the end of the case before has said.
    lines_about(folder);
    let (began, mut outcome) = (Instant::now(), Outcome::default());
    let recording = Recording::start(folder);
    recording.fail(Some(case.fault));
    let process = match Process::open(engine, &options(folder), 0) {
        Ok(process) => process,
        Err(_) => {
            outcome.errors += 1;
            recording.fail(None);
            Process::open(engine, &options(folder), 0)
                .map_err(|e| format!("it does not open without errors either: {e}"))?
        }
    };
    let stored = work(&process, &mut outcome)?;
    if case.number.is_multiple_of(2) {
        // With the errors.
        process.store.close();
    }
    (outcome.operations, outcome.injected) = recording.injected();
    recording.fail(None);
    if !case.number.is_multiple_of(2) {
        (5000..5003).try_for_each(|block| engine.must_have(&process.kv, 0, block))?;
        process.store.close();
    }
    let corrupt = process.store.stats().corrupt;
    check(corrupt == 0, || format!("{corrupt} blocks are corrupt"))?;
    outcome.lines = lines_about(folder);
    // One when it is opened, one later.
    let allowed = 2 + began.elapsed().as_secs() / LINES_EVERY.as_secs();
    let lines = &outcome.lines;
    check(lines.len() as u64 <= allowed, || format!("{} lines: {lines:#?}", lines.len()))?;
    // Without errors, all that is there is right.
    let process = Process::open(engine, &options(folder), 0)
        .map_err(|e| format!("it does not open again: {e}"))?;
    let mut missing = Vec::new();
    for block in BEFORE.chain(1000..1080) {
        if !engine.get(&process.kv, 0, block)? && stored.contains(&block) {
            missing.push(block);
        }
    }
    (6000..6003).try_for_each(|block| engine.must_have(&process.kv, 0, block))?;
    process.store.close();
    let stats = process.store.stats();
    // A segment that could not be sealed may list blocks whose write failed.
    check(stats.failed == 0, || format!("opened again: {stats:?}"))?;
    let bytes = bytes_of_segments(folder);
    check(bytes <= CAPACITY, || format!("{bytes} bytes are more than the capacity"))?;
    let left = recording.evicted();
    missing.retain(|block| {
        let key = process.kv.keys(&[hash(*block)]).expect("a hash")[0];
        !left.contains(&key.0)
    });
    // A block that can't be read is gone.
    check(missing.is_empty() || case.fault.errno == EIO, || format!("{missing:?} are missed"))?;
    Ok(outcome)
}

/// An engine and a folder with stores, on which one thread runs cases.
struct Runner {
    engine: Engine,
    /// The folder has the full store `full`, of which each case gets a copy.
    folder: Folder,
}

impl Runner {
    fn new(number: usize) -> Self {
        let (engine, folder) = (Engine::start(), Folder::new(&format!("errors-{number}")));
        let template = folder.0.join("full");
        fs::create_dir_all(&template).expect("a folder");
        fill(&engine, &template);
        Self { engine, folder }
    }

    fn run(&self, case: Case) -> Result<Outcome, String> {
        run(&self.engine, &self.folder.0.join("full"), &self.folder.0.join("work"), case)
    }
}

/// Runs cases on threads: the first [`AT_LEAST`], and the others until the time is over; without a `time`, all. Returns
/// what they have shown.
fn run_all(cases: Vec<Case>, time: Option<Duration>) -> Vec<(Case, Outcome)> {
    lines();
    let (count, cases) = (cases.len(), Arc::new(cases));
    let runners: Vec<_> = thread::scope(|scope| {
        let new = |number| scope.spawn(move || Runner::new(number));
        let new: Vec<_> = (0..THREADS.min(count)).map(new).collect();
        new.into_iter().map(|it| it.join().expect("a full store")).collect()
    });
    // To fill the stores takes none of the time.
    let (next, began) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let (done, ended) = mpsc::channel();
    let under_way: Arc<Mutex<BTreeMap<usize, Instant>>> = Arc::default();
    for runner in runners {
        let (cases, next, done) = (Arc::clone(&cases), Arc::clone(&next), done.clone());
        let under_way = Arc::clone(&under_way);
        thread::spawn(move || {
            loop {
                let number = next.fetch_add(1, SeqCst);
                let Some(case) = cases.get(number) else { return };
                if number >= AT_LEAST && time.is_some_and(|time| began.elapsed() >= time) {
                    return;
                }
                under_way.lock().insert(case.number, Instant::now());
                let outcome = runner.run(*case);
                under_way.lock().remove(&case.number);
                if done.send((*case, outcome)).is_err() {
                    return;
                }
            }
        });
    }
    drop(done);
    let mut outcomes = Vec::new();
    loop {
        match ended.recv_timeout(HANGS) {
            Ok((case, outcome)) => match outcome {
                Ok(outcome) => outcomes.push((case, outcome)),
                Err(what) => panic!("{case:?}: {what}"),
            },
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("hangs: {:?}", under_way.lock()),
        }
        assert!(began.elapsed() < ALL_HANG, "{} of {count} cases, and no end", outcomes.len());
    }
    assert!(!lines().has(&["panicked"]), "{:?}", lines());
    outcomes
}

/// All cases: each operation of a workload, with each error, once or from then on.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for start in [Start::New, Start::Full] {
        let never = Fault { at: usize::MAX, stays: false, errno: EIO, is_of_syncs: false };
        let outcomes = run_all(vec![Case { number: 0, start, fault: never }], None);
        let operations = outcomes[0].1.operations;
        for at in 0..operations {
            let other = [ENOSPC, EROFS, EDQUOT][at % 3];
            for (errno, stays) in [(EIO, false), (EIO, true), (other, false), (other, true)] {
                let fault = Fault { at, stays, errno, is_of_syncs: false };
                cases.push(Case { number: cases.len(), start, fault });
            }
        }
    }
    cases
}

/// Shuffles all cases behind [`AT_LEAST`] that are spread over them: of each error, once or from then on.
fn shuffled() -> Vec<Case> {
    let mut cases = cases();
    // Four cases in a row are of one operation.
    let step = cases.len() / AT_LEAST / 4 * 4 + 1;
    let spread: Vec<_> = cases.iter().copied().step_by(step).take(AT_LEAST).collect();
    cases.retain(|case| !spread.iter().any(|it| it.number == case.number));
    fastrand::shuffle(&mut cases);
    spread.into_iter().chain(cases).collect()
}

/// Checks what was shown by those of so many cases that have run: [`AT_LEAST`].
fn judge(cases: usize, outcomes: &[(Case, Outcome)]) {
    let hit = outcomes.iter().filter(|(_, it)| !it.injected.is_empty()).count();
    let errors: usize = outcomes.iter().map(|(_, it)| it.errors).sum();
    let failed: u64 = outcomes.iter().map(|(_, it)| it.failed).sum();
    println!(
        "{} of {cases} cases; in {hit} an operation failed; {errors} calls returned an error, {failed} \
         blocks were counted",
        outcomes.len()
    );
    assert!(cases >= AT_LEAST, "{cases} cases are too few for a store");
    assert!(outcomes.len() >= AT_LEAST, "{} of {cases} cases", outcomes.len());
    assert!(hit > outcomes.len() / 4 && errors > 0 && failed > 0);
    for (case, it) in outcomes {
        let is_silent = it.errors == 0 && it.failed == 0 && it.lines.is_empty();
        // What could not be read or opened at once was tried once more.
        let is_again = |op: &String| op.starts_with("Read(") || op.starts_with("Open ");
        let is_harmless = !case.fault.stays && it.injected.iter().all(is_again);
        assert!(
            !is_silent || it.injected.is_empty() || is_harmless,
            "nothing said: {case:?} {:?}",
            it.injected
        );
    }
}

#[test]
fn an_error_of_a_device_costs_blocks_and_nothing_else() {
    let cases = shuffled();
    judge(cases.len(), &run_all(cases.clone(), Some(QUICK)));
}

#[test]
fn a_sync_says_that_a_full_segment_could_not_be_synced() {
    lines();
    let (engine, folder) = (Engine::start(), Folder::new("sync-fails"));
    let recording = Recording::start(&folder.0);
    let process = Process::open(&engine, &options(&folder.0), 0).expect("a store");
    recording.fail(Some(Fault { at: 0, stays: true, errno: EIO, is_of_syncs: true }));
    let (began, mut block) = (Instant::now(), 0);
    let name = folder.0.to_string_lossy();
    while !lines().has(&["can't seal", &name]) {
        block += 1;
        engine.put(&process.kv, 0, &[block]).expect("memory is registered");
        assert!(began.elapsed() < PATIENCE, "no segment was sealed");
    }
    recording.fail(None);
    // The log line comes before its segment is known to be unsynced.
    let is_said = || process.store.sync().is_err();
    let began = Instant::now();
    while !is_said() {
        assert!(began.elapsed() < PATIENCE, "no call of `sync` says it");
    }
    assert!(is_said(), "as long as its blocks are in the store");
    assert_eq!(lines_about(&folder.0).len(), 1);
}

#[test]
#[ignore = "slow: make test-slow"]
fn an_error_of_a_device_at_each_operation_costs_blocks_and_nothing_else() {
    let cases = shuffled();
    let outcomes = run_all(cases.clone(), None);
    judge(cases.len(), &outcomes);
    assert_eq!(outcomes.len(), cases.len(), "each case has run");
}
