//! `kvferry bench-handoff`: what a handoff costs beyond moving its bytes, beside what it may cost.
//!
//! The consumer is this process, the producer a second one of this host. `exposed.rs`, `control.rs`
//! and `step.rs` order worker halves about by hand (`rank.rs`, `producer.rs`); `engines.rs` runs the
//! reference engine on the connector; `plan.rs` needs no process.

mod control;
pub(crate) mod engines;
mod exposed;
mod plan;
pub(crate) mod producer;
mod rank;
mod report;
mod step;

use indicatif::ProgressBar;

use crate::cli::{BenchHandoffArgs, Measure};
use crate::failure::Failure;
use crate::output;

use report::Report;

/// Block tables that look random are the same in every run.
const SEED: u64 = 20_240_817;

/// In how many pieces a producer announces a chunk, as the reference engine does by default. The last
/// piece is exposed: with 4 chunks that is an eighth of the transfer.
const PIECES: u32 = 2;

/// Seven or more to judge by.
const ROUNDS: usize = 7;
const QUICK_ROUNDS: usize = 2;

/// The command line with its defaults filled in.
struct Settings {
    args: BenchHandoffArgs,
    transports: Vec<String>,
    rounds: usize,
    bar: ProgressBar,
    remarks: Vec<String>,
}

pub(crate) fn run(args: &BenchHandoffArgs) -> Result<(), Failure> {
    let rounds = match (args.rounds, args.quick) {
        (Some(rounds), _) => rounds as usize,
        (None, true) => QUICK_ROUNDS,
        (None, false) => ROUNDS,
    };
    let measures = if args.only.is_empty() { Measure::ALL.to_vec() } else { args.only.clone() };
    let mut settings = Settings {
        args: args.clone(),
        transports: args.transport.clone(),
        rounds,
        bar: output::step_bar(args.quiet, measures.len() as u64),
        remarks: Vec::new(),
    };
    let mut rows = Vec::new();
    for measure in measures {
        rows.extend(match measure {
            Measure::Exposed => exposed::run(&mut settings)?,
            Measure::Step => step::run(&mut settings)?,
            Measure::Plan => plan::run(&mut settings)?,
            Measure::Control => control::run(&mut settings)?,
            Measure::OneBlock => engines::run(&mut settings)?,
        });
        settings.bar.inc(1);
    }
    settings.bar.finish_and_clear();
    let report = Report::new(args.quick, settings.remarks, rows);
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.to_table())?;
    }
    report.shortfall().map_or(Ok(()), |shortfall| Err(Failure::Check(shortfall)))
}
