//! Hits of the store's policy on a trace: `kvferry bench store --trace FILE`.
//!
//! Beside it: least recently used, as the engines' own caches are, and Belady's optimum, which knows
//! the future. A replay is exact: the same trace has the same hits.

mod baselines;
pub mod speed;
mod trace;

use indicatif::ProgressBar;
use kvferry_store::policy::Keyed;

use crate::failure::Failure;
use crate::options::StoreBench;
use crate::report::{Report, Row};
use crate::stats::Spread;
use crate::units;

use trace::{Request, Trace};

/// The form of the report's JSON.
const SCHEMA: &str = "kvferry.bench-store/1";
/// Of the gap between least recently used and the optimum.
const GAP_CLOSED: f64 = 0.25;

/// Replays the trace that `options` name; `bar` shows the progress.
///
/// # Errors
/// [`Failure::Usage`] if the trace can't be read.
pub fn measure(options: &StoreBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let trace = Trace::read(&options.trace)?;
    bar.inc_length(3 * options.blocks.len() as u64);
    let mut rows = Vec::new();
    for &blocks in &options.blocks {
        let replay = |name: &str, hits: &dyn Fn() -> Vec<usize>| {
            bar.set_message(format!("{} blocks: {name}", units::count(blocks as u64)));
            let hits = hits();
            bar.inc(1);
            hits
        };
        let lru = replay("least recently used", &|| baselines::lru(&trace.requests, blocks));
        let best = replay("the optimum", &|| baselines::optimum(&trace.requests, blocks));
        let ours = replay("kvferry", &|| policy(&trace.requests, blocks));
        rows.extend(rows_of(&trace, blocks, [&lru, &ours, &best]));
    }
    let remarks = vec![format!(
        "{} requests, {} blocks, {} of them different; the second half begins after request {}",
        units::count(trace.requests.len() as u64),
        units::count(trace.blocks as u64),
        units::count(trace.different as u64),
        units::count(trace.half() as u64),
    )];
    Ok(Report::new(SCHEMA, false, remarks, rows).of_replay())
}

/// The hits of each request.
fn policy(requests: &[Request], blocks: usize) -> Vec<usize> {
    let longest = requests.iter().map(|request| request.blocks.len()).max().unwrap_or_default();
    let (mut tier, mut left) = (Keyed::new(blocks, longest), Vec::new());
    let hits = requests.iter().map(|request| {
        left.clear();
        tier.request(request.at, &request.blocks, &mut left)
    });
    hits.collect()
}

/// Of least recently used, kvferry and the optimum.
fn rows_of(trace: &Trace, blocks: usize, hits: [&Vec<usize>; 3]) -> Vec<Row> {
    let half = trace.half();
    let mut rows = Vec::new();
    for (part, from) in [("whole trace", 0), ("second half", half)] {
        let all: usize = trace.requests[from..].iter().map(|request| request.blocks.len()).sum();
        let share = |hits: &[usize]| hits[from..].iter().sum::<usize>() as f64 / all.max(1) as f64;
        let [lru, ours, best] = hits.map(|hits| share(hits));
        let name = |what: &str| format!("{} blocks, {part}: {what}", units::count(blocks as u64));
        let row = |what: &str, unit, value: f64| {
            Row::new("hits", name(what), unit, Spread::of(vec![value]))
        };
        rows.push(row("least recently used", "%", 100.0 * lru));
        rows.push(row("kvferry", "%", 100.0 * ours));
        rows.push(row("the optimum", "%", 100.0 * best));
        if best > lru {
            let closed = row("share of the gap closed", "", (ours - lru) / (best - lru));
            rows.push(if from == 0 { closed.at_least(GAP_CLOSED) } else { closed });
        }
    }
    rows
}
