//! `kvferry bench transfers`.

use std::net::SocketAddr;

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::options::TransferBench;
use kvferry_bench::transfers;

use super::Figures;

const EXAMPLES: &str = "\
Examples:
  kvferry bench transfers                     two processes on this host, some minutes
  kvferry bench transfers --quick             a minute, too short to judge by
  kvferry bench transfers --transport tcp --op write --sizes 32KiB:1024 --streams auto,1,4
  kvferry bench transfers --only throughput --model llama-3.1-8b --tokens 4096 --requests 2
  kvferry bench transfers --only throughput --trace blocks.jsonl --plot report
  kvferry bench transfers --only latency --rounds 15
  kvferry bench transfers --faults --check    kill peers, too; exit code 1 if a bound is missed
  kvferry bench transfers --serve --listen 10.0.0.5:7400  on one host, and on the other
  kvferry bench transfers --target 10.0.0.5:7400 --json

Every figure stands beside those of plain programs, measured in turn in the same rounds:
  floor       over TCP: one message per batch with vectored I/O, over sockets with the options of
              kvferry's; call size, socket buffers and number of streams are the fastest of a trial
  raw         over TCP: one stream, 256 MiB in calls of 1 MiB
  raw x 4     the same over four streams at once
  process_vm  within a host: process_vm_writev or readv of the same table
  memcpy      the same table within one process
Ratios are taken round by round; their medians and quartiles are shown. Each configuration is
verified before and after its rounds, against a poisoned destination, never while the clock runs.

A trace has one batch per line, in either form; offsets are into the two processes' memory:
  [[LOCAL_OFFSET, REMOTE_OFFSET, LENGTH], ...]
  {\"block_bytes\": 65536, \"local\": [7, 3], \"remote\": [12, 40]}

--peers measures Mooncake and NIXL in the same rounds, from Python; `make bench-peers` installs
them. Their processes are stopped (SIGSTOP) outside their turns: some spin as long as they run.

With KVFERRY_SECRET_FILE set, --serve serves only hosts with the same secret; without it, every host
that can connect. Its agent listens on the same address.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct TransfersArgs {
    /// Be the target of a bench on another host, until interrupted
    #[arg(long, conflicts_with = "target")]
    serve: bool,
    /// Where --serve listens
    #[arg(long, default_value = "127.0.0.1:7400", requires = "serve", value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    #[command(flatten)]
    options: TransferBench,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

pub(super) fn run(args: &TransfersArgs) -> Result<(), Failure> {
    if args.serve {
        return transfers::serve(args.listen);
    }
    args.figures.of(&[transfers::SCHEMA], args.check, transfers::drawings, |bar| {
        transfers::measure(&args.options, bar)
    })
}
