//! The command line: its subcommands, and the first help. Each subcommand's arguments are in its own file.

use std::ffi::OsString;

use clap::{Parser, Subcommand, ValueEnum};

use crate::bench::BenchArgs;
use crate::demo::DemoArgs;
use crate::doctor::DoctorArgs;
use crate::doctor::helper::Probe;
use crate::store::StoreArgs;

const EXAMPLES_AND_EXIT_CODES: &str = "\
Start with:
  kvferry demo                  prefill engines hand KV cache to decode engines, half a minute
  kvferry demo store            KV cache on disk outlives its engine, some seconds
  kvferry doctor                what works on this host, and how to get what does not
  kvferry bench transfers --quick   how fast it is, beside plain TCP
  kvferry bench                 what else can be measured; every subcommand has examples under --help

Exit codes:
  0  success
  1  a byte or token was wrong, a request of a demo failed, a figure missed its bound under
     --check, the doctor found something bad, or a block of a store is bad
  2  the command line is wrong
  3  the peer does not answer, or refuses this agent
  4  a transfer or a helper process failed

Agents also read their settings from the environment: KVFERRY_SECRET_FILE, KVFERRY_TRANSPORTS,
KVFERRY_IO_THREADS, KVFERRY_STREAMS, KVFERRY_SILENCE_MS,
KVFERRY_PEER_MEMORY.";

/// kvferry moves KV cache for LLM serving. This command shows it, measures it and checks hosts.
#[derive(Debug, Parser)]
#[command(name = "kvferry", version, after_help = EXAMPLES_AND_EXIT_CODES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Hand KV cache from prefill to decode engines and check every token
    Demo(Box<DemoArgs>),
    /// Measure kvferry beside what plain programs reach in the same rounds
    Bench(BenchArgs),
    /// Check this host, or the way to an agent elsewhere
    Doctor(DoctorArgs),
    /// Look at a store of blocks on disk, verify it, clean it, export and import blocks
    Store(StoreArgs),
    /// Print the version
    Version {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// An engine of a demo
    #[command(hide = true)]
    DemoEngine,
    /// An engine of `demo store`
    #[command(hide = true)]
    DemoStoreEngine,
    /// A helper process of a bench
    #[command(hide = true, name = kvferry_bench::helper::COMMAND)]
    BenchHelper { arguments: Vec<String> },
    /// A helper of the doctor
    #[command(hide = true)]
    DoctorProbe {
        /// What it tries
        #[arg(value_enum)]
        probe: Probe,
    },
}

/// A value as it is written on the command line.
pub(crate) fn name(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("every value can be asked for");
    value.get_name().to_owned()
}

/// The command line of this process.
pub(crate) fn parse() -> Cli {
    Cli::parse_from(with_named_bench(std::env::args_os().collect()))
}

/// Replaces the older names of benches: `bench-handoff`, and `bench` with the flags of `bench transfers`.
fn with_named_bench(mut line: Vec<OsString>) -> Vec<OsString> {
    let is_flag = |word: &OsString| word.as_encoded_bytes().starts_with(b"-");
    let is_help = |word: &OsString| word == "-h" || word == "--help";
    match &line[..] {
        [_, older, ..] if older == "bench-handoff" => {
            line.splice(1..2, ["bench".into(), "handoff".into()]);
        }
        [_, bench, flag, ..] if bench == "bench" && is_flag(flag) && !is_help(flag) => {
            line.insert(2, "transfers".into());
        }
        _ => {}
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        let words = ["kvferry"].into_iter().chain(line.split(' '));
        Cli::try_parse_from(with_named_bench(words.map(OsString::from).collect()))
    }

    #[test]
    fn older_names_of_benches_are_understood() {
        let same = |older: &str, name: &str| {
            let [older, name] = [older, name].map(|line| parse(line).expect(line).command);
            assert_eq!(format!("{older:?}"), format!("{name:?}"));
        };
        same("bench --quick --op read", "bench transfers --quick --op read");
        same("bench-handoff --only step", "bench handoff --only step");
        let listed = parse("bench --help").expect_err("help").to_string();
        for bench in ["transfers", "handoff", "file", "store", "offload", "idle", "gpu"] {
            assert!(listed.contains(&format!("\n  {bench}")), "{listed}");
        }
    }

    #[test]
    fn contradictions_and_numbers_out_of_range_are_refused() {
        for line in [
            "bench",
            "bench transfers --serve --target a:1",
            "demo --requests 0",
            "bench transfers --callers 0",
            "bench transfers --op x",
            "demo store --prefix-tokens 9",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
