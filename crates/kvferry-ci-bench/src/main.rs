//! Benchmarks that count instead of measuring time, so that a busy machine makes no difference:
//! system calls, allocations and bytes copied of fixed batches, on both sides, in steady state, and of
//! registering 10 000 regions, wake-ups of threads for a handoff, and instructions of fixed work of the
//! protocol.
//!
//! `kvferry-ci-bench FILE` counts and compares with what FILE keeps: one number per line, so that a
//! regression shows in a diff. It exits with 1 if anything got worse by more than its tolerance.
//! `--keep` writes the figures to FILE.
//!
//! How it counts: this program defines the functions by which the system is called, memory is
//! allocated and memory is copied, and passes them on ([`counters`]). That needs no privilege and
//! disturbs nothing, but sees only calls through libc, so `--cfg rustix_use_libc` must be set; where
//! strace is installed, its list of calls is compared with ours. Instructions come from callgrind.

mod counters;
mod handoffs;
mod instructions;
mod kept;
mod regions;
mod target;
mod transfers;

use kept::Figures;
use std::process::ExitCode;

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["target", transport] => target::serve(transport).map(|()| true),
        ["producer", transport] => handoffs::produce(transport).map(|()| true),
        ["handoffs"] => handoffs::count().map(|_| true),
        ["work", name, rounds] => instructions::work(name, rounds).map(|()| true),
        ["regions"] => regions::count().map(|_| true),
        ["transfers"] => transfers::count(transfers::FEW_ROUNDS).map(|_| true),
        [file] => compare(file, false),
        [file, "--keep"] => compare(file, true),
        _ => Err("usage: kvferry-ci-bench FILE [--keep]".into()),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("kvferry-ci-bench: {e}");
            ExitCode::from(2)
        }
    }
}

/// Whether nothing got worse.
fn compare(file: &str, keep: bool) -> Result<bool, Failure> {
    transfers::uncounted_calls()?;
    let mut figures = Figures::default();
    figures.extend(transfers::count(transfers::ROUNDS)?);
    figures.extend(regions::count()?);
    figures.extend(handoffs::count()?);
    figures.extend(instructions::count()?);
    figures.write("target/bench/counted.json")?;
    if keep {
        figures.write(file)?;
        println!("kept in {file}");
        return Ok(true);
    }
    Ok(figures.compare(&Figures::read(file)?))
}
