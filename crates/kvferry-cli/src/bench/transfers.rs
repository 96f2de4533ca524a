//! `kvferry bench transfers`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::model::{Dtype, Model};
use kvferry_bench::options::{
    Checksums, Op, Part, Placement, Shape, Size, Streams, TransferOptions,
};
use kvferry_bench::transfers;

use super::Figures;

const EXAMPLES: &str = "\
Examples:
  kvferry bench transfers                                two processes on this host, some minutes
  kvferry bench transfers --quick                        a minute, too short to judge by
  kvferry bench transfers --transport tcp --op write --sizes 32KiB:1024 --streams auto,1,4
  kvferry bench transfers --only throughput --model llama-3.1-8b --tokens 4096 --requests 2
  kvferry bench transfers --only throughput --trace blocks.jsonl --plot report
  kvferry bench transfers --only latency --rounds 15
  kvferry bench transfers --faults --check               kill peers, too; exit code 1 if a bound is missed
  kvferry bench transfers --serve --listen 10.0.0.5:7400         on one host, and on the other
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
    /// A `kvferry bench transfers --serve` on another host, instead of a second process here
    #[arg(long, value_name = "HOST:PORT")]
    target: Option<String>,
    /// Transports, each measured by itself; `auto` is the choice of the two agents
    /// [default: tcp,local; with --target: auto]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    transport: Vec<String>,
    /// What to move
    #[arg(long, value_enum, value_delimiter = ',', default_value = "write,read")]
    op: Vec<Op>,
    /// Block size and blocks per batch [default: 4KiB:1024,32KiB:1024,256KiB:256,1MiB:256,16MiB:16,
    /// unless --model or --trace is given]
    #[arg(long, value_delimiter = ',', value_name = "BLOCK:COUNT")]
    sizes: Vec<Size>,
    /// Move requests of this model: one batch has every block of every layer of a request
    #[arg(long, value_parser = Model::find)]
    model: Option<Model>,
    /// Length of each request of --model
    #[arg(long, default_value_t = 2048, requires = "model", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Requests of --model
    #[arg(long, default_value_t = 1, requires = "model", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    requests: u32,
    /// Tokens in a block of --model
    #[arg(long, default_value_t = 16, requires = "model", value_parser = clap::value_parser!(u32).range(1..=4096))]
    block_tokens: u32,
    /// What the cache of --model is stored as
    #[arg(long, value_enum, default_value = "bf16", requires = "model")]
    dtype: Dtype,
    /// Move the batches of this file, one per line (see below)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Streams that a batch is striped over; with `auto` the agent chooses
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    streams: Vec<Streams>,
    /// Checksums of the payload over TCP
    #[arg(long, value_enum, default_value = "both")]
    checksums: Checksums,
    /// Numbers of concurrent callers; each total is compared with one caller
    #[arg(long, value_delimiter = ',', default_value = "1,10",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    callers: Vec<u32>,
    /// Cores for the two processes of a latency measurement on one host [default: apart,together]
    #[arg(long, value_enum, value_delimiter = ',')]
    placement: Vec<Placement>,
    /// Rounds; seven or more to judge by [default: 11, with --peers 7, with --quick 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Parts to run [default: all but faults]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Measure faults, too: peers that are killed or stopped
    #[arg(long)]
    faults: bool,
    /// A Python interpreter with a stock Mooncake, for faulty peers of that kind
    #[arg(long, value_name = "PATH", requires = "faults")]
    stock: Option<PathBuf>,
    /// The Python interpreter whose calls are measured [default: the virtual environment's, else
    /// .venv/bin/python or python3, if it has kvferry]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// A Python interpreter with Mooncake, NIXL and `kvferry_peers`, to measure them beside kvferry
    #[arg(long, value_name = "PATH", conflicts_with = "target")]
    peers: Option<PathBuf>,
    /// Small and short
    #[arg(long)]
    quick: bool,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

impl TransfersArgs {
    fn options(&self) -> TransferOptions {
        let TransfersArgs { tokens, requests, block_tokens, dtype, .. } = *self;
        let shape = |model| Shape { model, tokens, requests, block_tokens, dtype };
        TransferOptions {
            target: self.target.clone(),
            transports: self.transport.clone(),
            ops: self.op.clone(),
            sizes: self.sizes.clone(),
            shape: self.model.map(shape),
            trace: self.trace.clone(),
            streams: self.streams.clone(),
            checksums: self.checksums,
            callers: self.callers.iter().map(|&callers| callers as usize).collect(),
            placements: self.placement.clone(),
            rounds: self.rounds.map(|rounds| rounds as usize),
            parts: self.only.clone(),
            faults: self.faults,
            stock: self.stock.clone(),
            python: self.python.clone(),
            peers: self.peers.clone(),
            quick: self.quick,
        }
    }
}

pub(super) fn run(args: &TransfersArgs) -> Result<(), Failure> {
    if args.serve {
        return transfers::serve(args.listen);
    }
    args.figures.of(&[transfers::SCHEMA], args.check, transfers::drawings, |bar| {
        transfers::measure(&args.options(), bar)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: TransfersArgs,
    }

    #[test]
    fn lists_are_separated_by_commas() {
        let line = "bench --sizes 4KiB:1024,1MiB:256 --streams auto,4 --callers 1,10 --op read";
        let options = Line::parse_from(line.split(' ')).args.options();
        assert_eq!(options.sizes[1], Size { block: 1 << 20, count: 256 });
        assert_eq!(options.streams, [Streams(None), Streams(Some(4))]);
        assert_eq!((options.callers, options.ops), (vec![1, 10], vec![Op::Read]));
    }
}
