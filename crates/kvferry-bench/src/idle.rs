//! Processor time and wake-ups of processes with nothing to do: `kvferry bench idle`.
//!
//! Each subject is a helper process, which works once, so that its sessions are open and its threads have run. Then all
//! have nothing to do at the same time. Each counts its own processor time, all threads, and the times that its
//! threads other than the main one slept, a wake-up each.

use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::ProgressBar;
use kvferry::{Access, Agent, TransportKind, Transports};
use kvferry_store::{BlockMemory, Namespace, Retain, Store, StoreOptions};
use serde::{Deserialize, Serialize};

use crate::child::{self, Child, answer_parent};
use crate::failure::Failure;
use crate::options::IdleBench;
use crate::report::{Report, Row};
use crate::stats::Spread;
use crate::{helper, machine};

/// The form of the report's JSON.
pub const SCHEMA: &str = "kvferry.bench-idle/1";
/// The most processor time, in percent of a core.
const PERCENT_MAX: f64 = 0.02;
/// Time after the work until a process counts as idle: files are sealed, late answers have arrived.
const SETTLE: Duration = Duration::from_secs(2);
/// Time for the work, and for an answer once the idle time is over.
const PATIENCE: Duration = Duration::from_secs(60);
const BLOCKS: u64 = 16;
const BLOCK: u64 = 128 << 10;

/// A command to a subject.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Answered once the work is done.
    Ready,
    /// Do nothing for so long. Answered by [`Used`].
    Idle(Duration),
}

/// Usage of a process while it had nothing to do.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Used {
    percent_of_a_core: f64,
    wakes_per_second: f64,
    threads: usize,
}

/// Measures all subjects at once; `bar` shows the progress.
///
/// # Errors
/// The failure of a subject.
pub fn measure(options: &IdleBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let folder = Folder::new(options)?;
    let store = folder.0.to_string_lossy().into_owned();
    let subjects: [(&str, &[&str]); 4] = [
        ("agent with 8 sessions over TCP", &["agent", "tcp"]),
        ("agent with 8 sessions within the host", &["agent", "local"]),
        ("block store", &["store", &store]),
        ("connector: scheduler half and worker half", &["connector"]),
    ];
    bar.inc_length(2);
    bar.set_message("working once");
    let mut processes = Vec::new();
    for (_, arguments) in &subjects {
        processes.push(helper::spawn(&[&["idle"], *arguments].concat())?);
    }
    for process in &mut processes {
        let () = process.ask_within(&Ask::Ready, PATIENCE)?;
    }
    bar.inc(1);
    std::thread::sleep(SETTLE);
    bar.set_message(format!("nothing to do for {} s", options.seconds));
    let idle = Duration::from_secs(options.seconds.into());
    for process in &mut processes {
        process.tell(&Ask::Idle(idle))?;
    }
    let mut rows = Vec::new();
    for ((name, _), process) in subjects.iter().zip(&mut processes) {
        let used: Used = Child::hear_within(process, idle + PATIENCE)?;
        let row = |what: String, unit, value| {
            Row::new("idle processes", what, unit, Spread::of(vec![value]))
        };
        rows.push(
            row((*name).to_owned(), "% of a core", used.percent_of_a_core).at_most(PERCENT_MAX),
        );
        let threads = format!("{name}: wake-ups of {} threads", used.threads);
        rows.push(row(threads, "per s", used.wakes_per_second));
    }
    bar.inc(1);
    let remark = format!("processor time of all threads, counted over {} s", options.seconds);
    Ok(Report::new(SCHEMA, false, vec![remark], rows))
}

/// The folder of the store.
struct Folder(PathBuf);

impl Folder {
    fn new(options: &IdleBench) -> Result<Folder, Failure> {
        let folder = options.folder.clone().unwrap_or_else(std::env::temp_dir);
        let folder = folder.join(format!("kvferry-bench-idle-{}", std::process::id()));
        std::fs::create_dir_all(&folder)
            .map_err(|error| Failure::Failed(format!("{}: {error}", folder.display())))?;
        Ok(Folder(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Serves the parent, in a subject whose work is done.
pub(crate) fn serve() -> Result<(), Failure> {
    answer_parent(|ask| match ask {
        Ask::Ready => child::value(&()),
        Ask::Idle(time) => child::value(&idle(time)?),
    })
}

/// Does nothing for `time`, on the main thread.
fn idle(time: Duration) -> Result<Used, Failure> {
    let (_, before) = machine::waits_of_others()?;
    let (cpu, began) = (machine::process_time(), machine::shared_clock());
    std::thread::sleep(time);
    let (cpu, took) = (machine::process_time() - cpu, machine::shared_clock() - began);
    let (threads, after) = machine::waits_of_others()?;
    Ok(Used {
        percent_of_a_core: cpu.as_secs_f64() / took.as_secs_f64() * 100.0,
        wakes_per_second: after.saturating_sub(before) as f64 / took.as_secs_f64(),
        threads,
    })
}

/// The helper `idle store`: a store with a few blocks, which have been read.
pub(crate) fn run_store(folder: &Path) -> Result<(), Failure> {
    let failed = |error: kvferry_store::Error| Failure::Failed(error.to_string());
    let transports = Transports::only(TransportKind::TCP);
    let agent = Agent::builder().name("bench-idle").transports(transports).start()?;
    let options = StoreOptions::new(folder, 256 << 20).segment_bytes(16 << 20);
    let store = Store::open(&agent, &options).map_err(failed)?;
    let memory = agent.allocate((BLOCKS * BLOCK) as usize, Access::NONE)?;
    let blocks = (0..BLOCKS).map(|at| BlockMemory::new(&memory, at * BLOCK, BLOCK));
    let blocks: Vec<BlockMemory> = blocks.collect();
    let hashes: Vec<[u8; 16]> = (0..BLOCKS).map(|at| u128::from(at + 1).to_be_bytes()).collect();
    let space = store.space(&Namespace::new("bench"));
    let put = space.put(&hashes, 0, &blocks, Retain::default()).map_err(failed)?;
    let read = space.get(&hashes, 0, &blocks).map_err(failed)?;
    if (put.stored, read) != (hashes.len(), hashes.len()) {
        return Err(Failure::Failed(format!("{put:?}, and {read} were read")));
    }
    serve()
}
