//! The `kvferry` command: it shows KV cache moving between engines, and measures how fast.
//!
//! `cli.rs` is what can be typed, `demo/`, `bench/`, `handoff_bench/` and `doctor/` are what then happens, and the rest are their
//! tools: block tables (`blocks.rs`), bytes that say where they belong (`content.rs`), model shapes
//! (`model.rs`), statistics (`stats.rs`), helper processes (`child.rs`, `lines.rs`).

#![forbid(unsafe_code)]

mod bench;
mod blocks;
mod child;
mod cli;
mod content;
mod demo;
mod doctor;
mod failure;
mod files;
mod handoff_bench;
mod layer_times;
mod lines;
mod machine;
mod model;
mod output;
mod stats;
mod table;
mod units;
mod version;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Demo(args) => interruptible(|| demo::run(&args)),
        Command::Bench(args) => interruptible(|| bench::run(&args)),
        Command::BenchHandoff(args) => interruptible(|| handoff_bench::run(&args)),
        Command::Doctor(args) => interruptible(|| doctor::run(&args)),
        Command::Version { json } => version::run(json),
        Command::DemoDecode => demo::pools::decode::run(),
        Command::DemoEngine => demo::engines::node::run(),
        Command::BenchTarget { core } => bench::target::run_child(core),
        Command::BenchHandoffProducer => handoff_bench::producer::run(),
        Command::BenchHandoffPrefill => handoff_bench::engines::run_prefill(),
        Command::BenchMemory { bytes } => bench::yardstick::hold(bytes),
        Command::DoctorProbe { probe } => doctor::helper::run(probe),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::note(&format!("kvferry: {failure}"));
            ExitCode::from(failure.code())
        }
    }
}

fn interruptible(run: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    output::clear_when_interrupted()?;
    run()
}
