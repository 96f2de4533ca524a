//! Hits of the store's policy on a trace: `kvferry bench store --trace FILE`.
//!
//! Beside it: least recently used, as the engines' own caches are, S3-FIFO, and Belady's optimum, which knows
//! the future. A replay is exact: the same trace has the same hits. And the hits of a store of real segments, which frees
//! space by segments, while nothing waits for it and while puts wait all the time.

mod baselines;
pub(crate) mod events;
mod full;
mod speed;
mod tool_calls;
mod trace;

use indicatif::ProgressBar;
use kvferry_store::policy::Keyed;
use kvferry_store::replay::{Press, Replay};

use crate::failure::Failure;
use crate::options::{Capacity, StoreBench, StoreRows};
use crate::report::{Bound, Report, Row};
use crate::stats::Spread;
use crate::units;

use baselines::{Lru, S3Fifo};
pub use speed::fill;
use trace::{Request, Trace};

/// The form of the report's JSON.
const SCHEMA: &str = "kvferry.bench-store/2";
/// Required share of the gap between least recently used and the optimum.
const GAP_CLOSED: Bound = Bound::AtLeast(0.25);
/// Points by which a store has fewer hits while puts wait all the time than the same store while none does, at most.
const LOST_TO_WAITING: f64 = 2.0;
/// A smaller store has too few segments.
const SEGMENTED_MIN: usize = 2048;

/// Forms of the report's JSON: of a replay, of puts and gets, of puts into full stores, and of reports of changes.
pub const SCHEMAS: [&str; 4] = [SCHEMA, speed::SCHEMA, full::SCHEMA, events::SCHEMA];

/// Measures what `options` ask for; `bar` shows the progress.
///
/// # Errors
/// [`Failure::Usage`] if the trace can't be read; [`Failure::Check`] for a wrong byte; otherwise what the store failed
/// with.
pub fn measure(options: &StoreBench, bar: &ProgressBar) -> Result<Report, Failure> {
    match (&options.trace, options.rows) {
        (Some(trace), _) => replay(&Trace::read(trace)?, options, bar),
        (None, _) if options.tool_calls => replay(&Trace::of(tool_calls::requests()), options, bar),
        (None, StoreRows::Speed) => speed::measure(options, bar),
        (None, StoreRows::Full) => full::measure(options, bar),
        (None, StoreRows::Events) => events::measure(options, bar),
    }
}

fn replay(trace: &Trace, options: &StoreBench, bar: &ProgressBar) -> Result<Report, Failure> {
    bar.inc_length(6 * options.blocks.len() as u64);
    let mut rows = Vec::new();
    for capacity in &options.blocks {
        let blocks = match *capacity {
            Capacity::Blocks(blocks) => blocks,
            Capacity::OneOf(parts) => (trace.different / parts).max(1),
        };
        let replay = |name: &str, hits: &dyn Fn() -> Vec<usize>| {
            bar.set_message(format!("{} blocks: {name}", units::count(blocks as u64)));
            let hits = hits();
            bar.inc(1);
            hits
        };
        let lru = || baselines::hits(&trace.requests, Lru::new(blocks));
        let s3_fifo = || baselines::hits(&trace.requests, S3Fifo::new(blocks));
        let lru = replay("least recently used", &lru);
        let s3_fifo = replay("S3-FIFO", &s3_fifo);
        let best = replay("the optimum", &|| baselines::optimum(&trace.requests, blocks));
        let ours = replay("kvferry", &|| policy(&trace.requests, blocks));
        rows.extend(rows_of(trace, blocks, [&lru, &s3_fifo, &ours, &best]));
        let mut replays = Vec::new();
        for press in [Press::Not, Press::Always] {
            bar.set_message(format!("{} blocks: in segments", units::count(blocks as u64)));
            if blocks >= SEGMENTED_MIN && !options.policies_only {
                replays.push(in_segments(trace, blocks, press)?);
            }
            bar.inc(1);
        }
        if let [calm, pressed] = replays.as_slice() {
            rows.extend(segment_rows(trace, blocks, ours.iter().sum(), [calm, pressed]));
        }
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

/// Replay of a trace through a store of segments.
struct InSegments {
    hits: usize,
    /// Bytes that were copied for each byte that was put.
    copied: f64,
    refused: u64,
}

fn in_segments(trace: &Trace, blocks: usize, press: Press) -> Result<InSegments, Failure> {
    let failed = |e: kvferry_store::Error| Failure::Failed(e.to_string());
    let folder = std::env::temp_dir().join(format!("kvferry-replay-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let mut replay = Replay::new(&folder, blocks as u64, press).map_err(failed)?;
    let requests = trace.requests.iter();
    let hits = requests.map(|request| replay.request(request.at, &request.blocks)).sum();
    let (copied, refused) = (replay.copied(), replay.refused());
    drop(replay);
    let _ = std::fs::remove_dir_all(&folder);
    Ok(InSegments { hits, copied, refused })
}

/// Rows of a store of segments while no put waits, and while puts wait all the time; `policy` are the hits of the policy
/// alone.
fn segment_rows(
    trace: &Trace,
    blocks: usize,
    policy: usize,
    [calm, pressed]: [&InSegments; 2],
) -> Vec<Row> {
    let percent = |hits: usize| 100.0 * hits as f64 / trace.blocks.max(1) as f64;
    let less = |than: usize, hits: usize| percent(than) - percent(hits);
    let rows = |when: &str, of: &InSegments, baseline: Option<usize>| {
        let row = |what: &str, unit, value: f64| {
            let name = format!("{} blocks, {when}: {what}", units::count(blocks as u64));
            Row::new("segments", name, unit, Spread::of(vec![value]))
        };
        let waiting = baseline.map(|without| {
            let lost = less(without, of.hits);
            row("less than without waiting puts", "points", lost).at_most(LOST_TO_WAITING)
        });
        let mut rows = vec![row("hits", "%", percent(of.hits))];
        rows.extend(waiting);
        rows.extend([
            row("less than the policy", "points", less(policy, of.hits)),
            row("copied for each byte that was put", "B", of.copied),
            row("refused", "blocks", of.refused as f64).at_most(0.0),
        ]);
        rows
    };
    let mut all = rows("in segments", calm, None);
    all.extend(rows("in segments, while puts wait all the time", pressed, Some(calm.hits)));
    all
}

/// Rows for one capacity. The hits are those of least recently used, S3-FIFO, kvferry and the optimum.
fn rows_of(trace: &Trace, blocks: usize, hits: [&Vec<usize>; 4]) -> Vec<Row> {
    let row = |(part, from): (&str, usize)| {
        let all: usize = trace.requests[from..].iter().map(|request| request.blocks.len()).sum();
        let share = |hits: &[usize]| hits[from..].iter().sum::<usize>() as f64 / all.max(1) as f64;
        let [lru, s3_fifo, ours, best] = hits.map(|hits| share(hits));
        let percent = |share: f64| Spread::of(vec![100.0 * share]);
        let work = format!("{} blocks, {part}", units::count(blocks as u64));
        let mut row = Row::new("hits", work, "%", percent(ours))
            .beside("least recently used", percent(lru))
            .beside("S3-FIFO", percent(s3_fifo))
            .beside("the optimum", percent(best));
        if best > lru {
            let closed = Spread::of(vec![(ours - lru) / (best - lru)]);
            row = row.beside("of the gap", percent(closed.median));
            if from == 0 {
                let what = format!("{}, above least recently used", row.work);
                row.judge(what, "the gap to the optimum", Some(closed), GAP_CLOSED);
            }
        }
        row
    };
    [("whole trace", 0), ("second half", trace.half())].map(row).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_while_puts_wait_are_judged_by_those_of_the_same_store_without_waiting_puts() {
        // Of 1000 blocks that are asked for.
        let trace = Trace::of(vec![Request { at: 0, blocks: (0..1000).collect() }]);
        let of = |hits| InSegments { hits, copied: 0.5, refused: 0 };
        for (pressed, lost, ok) in [(480, 2.0, true), (470, 3.0, false), (510, -1.0, true)] {
            // The policy alone is further ahead than the bound.
            let rows = segment_rows(&trace, 4096, 550, [&of(500), &of(pressed)]);
            let blocks = units::count(4096);
            let row = |what: &str| {
                let name =
                    format!("{blocks} blocks, in segments, while puts wait all the time: {what}");
                rows.iter().find(|row| row.work == name).expect("a row")
            };
            let judged: Vec<_> = rows.iter().flat_map(|row| &row.judged).collect();
            let [_, by_waiting, _] = judged[..] else { panic!("{}", judged.len()) };
            assert_eq!(by_waiting.what, row("less than without waiting puts").work);
            assert!((by_waiting.reached.median - lost).abs() < 1e-9, "{lost}");
            assert_eq!(by_waiting.ok, ok, "{lost}");
            assert!(row("less than the policy").judged.is_empty());
        }
    }
}
