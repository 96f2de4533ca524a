//! The model, the engines and the requests of a demo.

use kvferry_refengine::{EngineConfig, GroupCache, GroupSpec, Launch, ModelSpec, continuation};

use super::args::{DemoArgs, DemoTransport};
use kvferry_bench::failure::Failure;
use kvferry_bench::units;

/// The model's shape: 32 KiB of KV per token. Few layers and long rows, because what an engine
/// computes costs one or two nanoseconds per byte of KV, and more per row.
const LAYERS: usize = 4;
const HEADS: usize = 8;
const HEAD_BYTES: usize = 512;
const ROW_BYTES: usize = 2 * HEAD_BYTES;
pub(super) const TOKEN_BYTES: u64 = (LAYERS * HEADS * ROW_BYTES) as u64;

/// Tokens of a block, for all engines.
const BLOCK_TOKENS: usize = 16;

/// Tokens of a prompt that prefill computes in one step: longer prompts are handed over while they
/// are computed.
const CHUNK_TOKENS: usize = 512;

/// Tokens that each request produces.
pub(super) const SAYS: usize = 4;

/// Requests in flight per prefill engine by default: one is computed while one is handed over.
const PER_PREFILL: u32 = 2;

/// A request and its right tokens.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) prompt: Vec<u32>,
    pub(super) right: Vec<u32>,
}

/// Engines and requests of a demo.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) options: DemoArgs,
    pub(super) model: ModelSpec,
    pub(super) concurrency: u32,
}

impl Plan {
    pub(super) fn new(args: &DemoArgs, available: u64) -> Result<Plan, Failure> {
        let per_engine = args.prefill.saturating_mul(PER_PREFILL);
        let plan = Plan {
            model: ModelSpec::new(vec![GroupSpec::full(HEADS, HEAD_BYTES)], LAYERS),
            concurrency: args.concurrency.unwrap_or(per_engine),
            options: args.clone(),
        };
        let (needed, sensible) = (plan.memory(), available / 10 * 6);
        if needed > sensible {
            return Err(Failure::Usage(format!(
                "the caches of these engines need {}, and this machine can spare {}: choose \
                 shorter --sizes, fewer engines or a smaller --concurrency",
                units::bytes(needed),
                units::bytes(sensible)
            )));
        }
        Ok(plan)
    }

    /// Bytes of all caches. The machine's limit is measured before, with fewer bytes.
    fn memory(&self) -> u64 {
        let cache = |engines: u32| {
            let blocks = self.blocks(engines) as u64;
            u64::from(engines) * blocks * BLOCK_TOKENS as u64 * TOKEN_BYTES
        };
        cache(self.options.prefill) + cache(self.options.decode)
    }

    fn longest(&self) -> u32 {
        self.options.sizes.iter().copied().max().expect("there is a size")
    }

    /// Blocks of each of `engines`: for its share of the requests in flight, if all are the longest, and
    /// the null block.
    fn blocks(&self, engines: u32) -> usize {
        let each = (self.longest() as usize + SAYS).div_ceil(BLOCK_TOKENS);
        each * self.concurrency.div_ceil(engines) as usize + 1
    }

    pub(super) fn prefill(&self) -> EngineConfig {
        self.config(self.options.prefill, self.options.prefill_tp)
    }

    pub(super) fn decode(&self) -> EngineConfig {
        let mut config = self.config(self.options.decode, self.options.decode_tp);
        // As on a GPU: a step's fetches begin before its tokens have been computed.
        config.launch = Launch::Deferred;
        config
    }

    fn config(&self, engines: u32, tp: u32) -> EngineConfig {
        let mut config = EngineConfig::new(self.model.clone());
        config.tp = tp as usize;
        config.groups = vec![GroupCache::new(BLOCK_TOKENS, self.blocks(engines))];
        // Prompts have no common prefix.
        config.prefix_caching = false;
        (config.step_tokens, config.chunk_tokens) = (CHUNK_TOKENS, CHUNK_TOKENS);
        config.max_running = self.concurrency as usize;
        config.max_tokens = self.longest() as usize + SAYS;
        config
    }

    /// Transports, written as in `KVFERRY_TRANSPORTS`. `local` sessions begin over `tcp`.
    pub(super) fn transports(&self) -> &'static str {
        match self.options.transport {
            DemoTransport::Local => "local,tcp",
            DemoTransport::Tcp => "tcp",
        }
    }

    pub(super) fn size(&self, request: usize) -> u32 {
        self.options.sizes[request % self.options.sizes.len()]
    }

    /// Bytes of a prompt that are handed over: whole blocks.
    pub(super) fn bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens).next_multiple_of(BLOCK_TOKENS as u64) * TOKEN_BYTES
    }

    pub(super) fn total_bytes(&self) -> u64 {
        (0..self.options.requests as usize).map(|request| self.bytes(self.size(request))).sum()
    }

    /// Bytes that are contiguous in both caches: heads of a block that both ranks hold.
    pub(super) fn piece_bytes(&self) -> usize {
        let ranks = self.options.prefill_tp.max(self.options.decode_tp) as usize;
        HEADS / ranks * BLOCK_TOKENS * ROW_BYTES
    }

    /// A request's prompt, and the model's tokens for it.
    pub(super) fn asked(&self, request: usize) -> Asked {
        let mut rng = fastrand::Rng::with_seed(request as u64);
        let prompt: Vec<u32> =
            (0..self.size(request)).map(|_| rng.u32(..self.model.vocab)).collect();
        Asked { right: continuation(&self.model, &prompt, SAYS), prompt }
    }

    pub(super) fn describe(&self) -> String {
        let DemoArgs { prefill, decode, prefill_tp, decode_tp, .. } = self.options;
        let engines = |n: u32, what: &str, tp: u32| {
            let plural = if n == 1 { "" } else { "s" };
            format!("{n} {what} engine{plural} of TP {tp}")
        };
        let sizes: Vec<String> =
            self.options.sizes.iter().map(|&size| units::bytes(self.bytes(size))).collect();
        format!(
            "{} → {}: {} requests with {} of KV, {} in flight",
            engines(prefill, "prefill", prefill_tp),
            engines(decode, "decode", decode_tp),
            self.options.requests,
            sizes.join(", "),
            self.concurrency
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn plan(line: &[&str], available: u64) -> Result<Plan, Failure> {
        let cli = Cli::try_parse_from(["kvferry", "demo"].iter().chain(line)).expect("well formed");
        let Command::Demo(args) = cli.command else { panic!("demo was asked for") };
        Plan::new(&args, available)
    }

    #[test]
    fn the_defaults_span_one_to_sixty_four_mebibytes() {
        let plan = plan(&[], 20 << 30).expect("fits");
        let sizes: Vec<u64> = (0..4).map(|request| plan.bytes(plan.size(request)) >> 20).collect();
        assert_eq!(sizes, [1, 4, 16, 64]);
        assert_eq!(plan.size(4), plan.size(0));
        assert_eq!(plan.total_bytes(), 24 * (85 << 20));
        assert_eq!((plan.concurrency, plan.piece_bytes()), (4, 32 << 10));
    }

    #[test]
    fn caches_beyond_the_memory_are_refused_before_anything_is_started() {
        assert!(matches!(plan(&[], 1 << 29), Err(Failure::Usage(_))));
        assert!(plan(&["--sizes", "32", "--concurrency", "1"], 1 << 29).is_ok());
    }

    #[test]
    fn every_engine_has_room_for_its_share_of_what_is_in_flight() {
        let plan = plan(&["--prefill", "3", "--concurrency", "4", "--sizes", "20,33"], 20 << 30);
        let plan = plan.expect("fits");
        // 37 tokens are three blocks, two requests at a time.
        assert_eq!(plan.prefill().groups[0].blocks, 2 * 3 + 1);
        assert_eq!(plan.decode().groups[0].blocks, 4 * 3 + 1);
    }

    #[test]
    fn prompts_differ_between_requests_but_not_between_runs() {
        let plan = plan(&["--sizes", "20"], 20 << 30).expect("fits");
        let (one, other) = (plan.asked(0), plan.asked(1));
        assert_ne!(one.prompt, other.prompt);
        assert_eq!(one.prompt, plan.asked(0).prompt);
        assert_eq!((one.prompt.len(), one.right.len()), (20, SAYS));
    }
}
