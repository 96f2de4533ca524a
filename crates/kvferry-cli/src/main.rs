//! The `kvferry` command: it shows KV cache moving between engines, and measures how fast.
//!
//! `cli.rs` has the list of commands. `demo/`, `bench/`, `doctor/` and `store/` are the commands with their arguments
//! and their help, `output.rs` and `files.rs` what they print and write. `kvferry-bench` measures and draws.

#![forbid(unsafe_code)]

mod bench;
mod cli;
mod demo;
mod doctor;
mod files;
mod output;
mod store;
mod version;

use std::process::ExitCode;

use kvferry_bench::failure::Failure;
use kvferry_bench::roles;

use cli::Command;

fn main() -> ExitCode {
    kvferry_mooncake::link();
    let outcome = match cli::parse().command {
        Command::Demo(args) => interruptible(|| demo::run(&args)),
        Command::Bench(args) => interruptible(|| bench::run(&args)),
        Command::Doctor(args) => interruptible(|| doctor::run(&args)),
        Command::Store(args) => interruptible(|| store::run(&args)),
        Command::Version { json } => version::run(json),
        Command::DemoEngine => demo::node::run(),
        Command::DemoStoreEngine => demo::store::engine::run(),
        Command::BenchHelper { arguments } => roles::run(&arguments),
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
