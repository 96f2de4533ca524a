//! The arguments of `kvferry demo`, and the help that teaches them.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use super::store::StoreArgs;

const EXAMPLES: &str = "\
Examples:
  kvferry demo                                     two prefill engines of TP 2, a decode engine of TP 4
  kvferry demo --prefill-tp 4 --decode 2 --decode-tp 1 --transport tcp
  kvferry demo --flow sequential --announce end    nothing is pushed while prefill computes
  kvferry demo --sizes 64,4096 --requests 20 --plot demo.html
  kvferry demo --json --quiet | jq .sizes          for a program
  kvferry demo --device cuda --sizes 32,128        caches in memory of a GPU, each row a copy of the driver
  kvferry demo store                               KV on disk that outlives its engine

Every engine is a process with a small model, a paged KV cache and a scheduler, driven as vLLM drives
its own, with an agent per rank. This process is the router. It gives each request to a prefill and a
decode engine: to both at once with one transfer_id (concurrent), or to the decode engine with what
prefill responded (sequential). The model computes integers from every byte of KV that a token may
see: a wrong byte is a wrong token. The tokens of every request are compared with those of the model
without engines, caches and handoffs. At the end no engine may hold a request, a block or a transfer.

Columns:
  latency          from the last layer that prefill computes until the last decode rank has received
                   everything
  waiting          median of the latency's part before the first read: the decode engine computes a
                   step of other requests, and a fetch begins with a step
  transfer         from the first read to the same end
  exposed          the rest of the latency as a part of the transfer
  GB/s             bytes of a request by the time in which any of them were being read
  machine's limit  plain code, nothing else running: blocks of the same size by process_vm_readv
                   (local) or over loopback (tcp), on a thread per reading rank, at most one per
                   core. Agents allocate the caches and copy them directly within a host, which
                   can be faster than process_vm_readv.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct DemoArgs {
    #[command(subcommand)]
    pub(in crate::demo) of: Option<OtherDemo>,
    /// Requests, of all sizes in turn
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(in crate::demo) requests: u32,
    /// Requests in flight at once [default: two per prefill engine]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(in crate::demo) concurrency: Option<u32>,
    /// Prefill engines, a process each
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(in crate::demo) prefill: u32,
    /// Decode engines, a process each
    #[arg(long, default_value_t = 1, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(in crate::demo) decode: u32,
    /// TP ranks of a prefill engine: 1, 2, 4 or 8
    #[arg(long, default_value_t = 2, value_name = "RANKS", value_parser = ranks)]
    pub(in crate::demo) prefill_tp: u32,
    /// TP ranks of a decode engine: 1, 2, 4 or 8
    #[arg(long, default_value_t = 4, value_name = "RANKS", value_parser = ranks)]
    pub(in crate::demo) decode_tp: u32,
    /// How KV moves
    #[arg(long, value_enum, default_value = "local")]
    pub(in crate::demo) transport: DemoTransport,
    /// Memory of the KV caches: `cpu`, or `cuda`, `cuda:1` for that of a GPU. The processor computes either way
    #[arg(long, default_value = "cpu", value_parser = device)]
    pub(in crate::demo) device: Device,
    /// Prompt lengths in tokens, 32 KiB of KV each
    #[arg(long, default_value = "32,128,512,2048", value_delimiter = ',', value_name = "TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=32_768))]
    pub(in crate::demo) sizes: Vec<u32>,
    /// When the router gives a request to the decode engine
    #[arg(long, value_enum, default_value = "concurrent")]
    pub(in crate::demo) flow: Flow,
    /// When a prefill engine announces blocks that are ready
    #[arg(long, value_enum, default_value = "layers")]
    pub(in crate::demo) announce: AnnounceWhen,
    /// Draw the figures into this HTML file
    #[arg(long, value_name = "FILE")]
    pub(in crate::demo) plot: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub(in crate::demo) json: bool,
    /// No progress bar and no remarks
    #[arg(long, short)]
    pub(in crate::demo) quiet: bool,
    /// Flip one byte of a prefill engine's cache after it was computed: the demo must notice
    #[arg(long, hide = true)]
    pub(in crate::demo) inject_fault: bool,
}

/// Demo of another thing than handoffs.
#[derive(Debug, Clone, Subcommand)]
pub(in crate::demo) enum OtherDemo {
    /// Keep the KV cache of an engine on disk over restarts and a kill
    Store(StoreArgs),
}

/// Transport that the engines of a demo use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::demo) enum DemoTransport {
    /// Copies between the memories of processes of one host
    Local,
    /// TCP, over loopback
    Tcp,
}

/// Time at which a router gives a request to the decode engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::demo) enum Flow {
    /// At once with the prefill engine
    Concurrent,
    /// After the prefill engine's response
    Sequential,
}

/// Time at which a prefill engine announces blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::demo) enum AnnounceWhen {
    /// After each half of the layers of a chunk
    Layers,
    /// After each chunk
    Chunks,
    /// Once, at the end
    End,
}

/// Memory of KV caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::demo) struct Device(pub(in crate::demo) Option<i32>);

fn device(text: &str) -> Result<Device, String> {
    let number = match text.split_once(':') {
        None if text == "cpu" => return Ok(Device(None)),
        None if text == "cuda" => Ok(0),
        Some(("cuda", number)) => number.parse::<u16>(),
        _ => return Err("expected cpu, cuda or cuda:NUMBER".to_owned()),
    };
    number.map(|number| Device(Some(number.into()))).map_err(|error| error.to_string())
}

/// Numbers of ranks among which the model's heads can be shared.
fn ranks(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(ranks @ (1 | 2 | 4 | 8)) => Ok(ranks),
        _ => Err("the heads of the model can be shared among 1, 2, 4 or 8 ranks".to_string()),
    }
}
