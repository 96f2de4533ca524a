//! What a handoff costs beyond moving its bytes: `kvferry bench handoff`.
//!
//! The consumer is this process, the producer a second one of this host. `exposed.rs`, `second.rs`,
//! `control.rs` and `step.rs` call worker halves themselves (`rank.rs`, `producer.rs`); `engines.rs` runs
//! the reference engine on the connector. `invented.rs` has both engines in this process; `plan.rs` needs no process.

mod control;
pub(crate) mod engines;
mod exposed;
pub(crate) mod idle;
mod invented;
mod plan;
pub(crate) mod producer;
mod rank;
mod second;
mod step;

use clap::ValueEnum;
use indicatif::ProgressBar;

use crate::failure::Failure;
use crate::options::{HandoffBench, Measure};
use crate::report::Report;

/// The form of the report's JSON.
pub const SCHEMA: &str = "kvferry.bench-handoff/2";
/// Seed of the block tables: they are the same in every run.
const SEED: u64 = 20_240_817;

/// Pieces in which a producer announces a chunk, as it does by default. The last piece of the prompt is
/// halved until it is a 64th of the prompt.
const PIECES: u32 = 2;

/// The options with their defaults filled in.
struct Settings {
    options: HandoffBench,
    rounds: usize,
    bar: ProgressBar,
    /// Parts of the options that were not carried out.
    remarks: Vec<String>,
}

/// Measures what `options` ask for; `bar` shows the progress.
///
/// # Errors
/// [`Failure::Check`] for a wrong byte or token; otherwise what a transfer or a process failed with.
pub fn measure(options: &HandoffBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let rounds = options.effort.rounds();
    let mut measures = options.measures.clone();
    if measures.is_empty() {
        measures = Measure::value_variants().to_vec();
    }
    bar.inc_length(measures.len() as u64);
    let (options, bar) = (options.clone(), bar.clone());
    let mut settings = Settings { options, rounds, bar, remarks: Vec::new() };
    let mut rows = Vec::new();
    for measure in measures {
        rows.extend(match measure {
            Measure::Exposed => exposed::run(&mut settings)?,
            Measure::Step => step::run(&settings)?,
            Measure::Plan => plan::run(&settings)?,
            Measure::Control => control::run(&settings)?,
            Measure::Second => second::run(&mut settings)?,
            Measure::OneBlock => engines::run(&settings)?,
            Measure::Invented => invented::run(&settings)?,
        });
        settings.bar.inc(1);
    }
    Ok(Report::new(SCHEMA, settings.options.effort.quick, settings.remarks, rows))
}
