//! How fast blocks are offloaded and onboarded: `kvferry bench offload`.
//!
//! The block manager decides, its driver copies, a block store keeps the blocks. The pages are those of the reference
//! engine. Beside it, in the same rounds: the same pages through the block store, by one thread that waits for each
//! call. And the block manager by itself, full.

mod calls;
mod copies;
mod manager;

use indicatif::ProgressBar;

use crate::failure::Failure;
use crate::options::OffloadBench;
use crate::report::{Report, Row};
use crate::stats::Spread;
use calls::Calls;
use copies::{Case, Place};

/// The form of the report's JSON.
pub const SCHEMA: &str = "kvferry.bench-offload/2";
/// Required share of the block store's rate.
const SHARE: f64 = 0.9;

/// Measures what `options` ask for; `bar` shows the progress.
///
/// # Errors
/// [`Failure::Check`] for a wrong byte; otherwise what failed.
pub fn measure(options: &OffloadBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let rounds = options.effort.rounds();
    let place = Place::new(options)?;
    let cases = Case::all();
    bar.inc_length((cases.len() * rounds) as u64 + 1);
    let mut rates: Vec<[[Vec<f64>; 2]; 2]> = cases.iter().map(|_| Default::default()).collect();
    let mut calls = Calls::default();
    for round in 0..rounds {
        for (case, rates) in cases.iter().zip(&mut rates) {
            bar.set_message(format!("round {}/{rounds}: {}", round + 1, case.name()));
            calls.begin(round);
            // In turns: what one has written, the device may still move during the other's.
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for who in order {
                let moved = match who {
                    0 => place.managed(case, round as u64, &mut calls)?,
                    _ => place.direct(case, round as u64)?,
                };
                for (op, rate) in moved.into_iter().enumerate() {
                    rates[op][who].push(rate);
                }
            }
            bar.inc(1);
        }
    }
    let mut rows = Vec::new();
    for (case, rates) in cases.iter().zip(rates) {
        for (what, [ours, direct]) in ["offload", "onboard"].into_iter().zip(rates) {
            let name = format!("{what} {}", case.name());
            let row = Row::new("offload", name, "GB/s", Spread::of(ours));
            rows.push(row.at_least_of(SHARE, "the store", Spread::of(direct)));
        }
    }
    rows.extend(calls.rows());
    bar.set_message("the block manager");
    rows.extend(manager::rows(options.effort.quick)?);
    bar.inc(1);
    let remarks = vec![
        format!("folder: {}", place.folder().display()),
        format!(
            "kvferry and the store: with checksums, page cache, {} of pages at a time, in the same order; the store by \
             one thread that waits for each call",
            crate::units::bytes(copies::CALL_BYTES)
        ),
        "scheduler, manager: CPU is the thread's processor time, which has the bound; wall time has what the kernel gave to \
         other threads in it; waits: how often a call left the processor to wait for something"
            .into(),
    ];
    Ok(Report::new(SCHEMA, options.effort.quick, remarks, rows))
}
