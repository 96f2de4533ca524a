//! The arguments of `kvferry demo store`, and the help that teaches them.

use std::path::PathBuf;

use clap::Args;

const EXAMPLES: &str = "\
Examples:
  kvferry demo store                                some seconds, in the folder of temporary files
  kvferry demo store --prefix-tokens 32768          a longer prefix: computing it takes longer
  kvferry demo store --directory /mnt/nvme/kv       keep the store; look at it with kvferry store stat
  kvferry demo store --json --quiet | jq .killed    for a program

Each engine is a process. All but the first put the blocks of their KV into a store of kvferry on disk:
  without a store  serves the prompts of the second start: the right tokens
  first start      computes prompts that share a long prefix, and puts their blocks
  second start     opens the same directory, serves the same prompts and a longer one
  (killed)         computes another prompt, and kills itself with SIGKILL while it puts the blocks
  after the kill   opens the directory, serves all of these prompts
The model computes integers from every byte of KV that a token may see: a wrong byte is a wrong token.
The tokens of every request are compared with those of an engine without a store. The engine's times
are measured. Nothing is added to them: it really computes what it does not read.

Exit code 1: a token is wrong, a block that was put before is computed again, the first start finds
blocks, or none of five kills comes while blocks are written. Times are shown, not judged.

Columns:
  blocks read     blocks that came from the store
  not computed    their tokens. Later prompts of a start find the prefix in the engine's own cache
  store open      until the store in the directory was open
  first token     of the first prompt, from its submission to its first token
  all prompts     the same for all tokens of all prompts, one after another
  output          whether all tokens are those of an engine without a store

The store takes 8 KiB of disk for each token of the prefix, more if several engines must be killed.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(in crate::demo) struct StoreArgs {
    /// Tokens that all prompts begin with, 4 KiB of KV each [default: 8192]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(256..=32_768))]
    pub(super) prefix_tokens: Option<u32>,
    /// Prompts with this prefix [default: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) requests: Option<u32>,
    /// Where the store is made; it stays there. Must be empty, or not exist
    /// [default: a folder of temporary files, removed in the end]
    #[arg(long, value_name = "DIRECTORY")]
    pub(super) directory: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// No progress bar and no remarks
    #[arg(long, short)]
    pub(super) quiet: bool,
    /// Flip one byte of a block after the second start has read it: the demo must notice
    #[arg(long, hide = true)]
    pub(super) inject_fault: bool,
}
