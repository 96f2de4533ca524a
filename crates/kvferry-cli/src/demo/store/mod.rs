//! `kvferry demo store`: KV cache that outlives its engine, in a store of blocks on disk.
//!
//! Each start of the engine is a process (`engine.rs`) that opens the store, serves prompts and ends; one is killed
//! while it writes. `connector.rs` is between engine and store, `report.rs` judges what the processes answer.

mod args;
mod connector;
pub(crate) mod engine;
mod report;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::ProgressBar;
use kvferry_bench::child::Child;
use kvferry_bench::failure::Failure;
use kvferry_bench::lines::Answer;
use kvferry_refengine::{EngineConfig, GroupCache, GroupSpec, LoadFailurePolicy, ModelSpec};

use crate::output;

pub(super) use args::StoreArgs;
use connector::Fault;
use engine::{Served, Start, StoreAt};
use report::{Killed, Report, Runs};

/// The hidden command that [`engine::run`] is.
const COMMAND: &str = "demo-store-engine";

/// The model's shape: 4 KiB of KV per token. Short rows, so that computing a token costs more than moving its KV.
const LAYERS: usize = 4;
const HEADS: usize = 8;
const HEAD_BYTES: usize = 64;
const TOKEN_BYTES: usize = LAYERS * HEADS * 2 * HEAD_BYTES;

const BLOCK_TOKENS: usize = 16;

/// Tokens of a prompt after the prefix that all prompts share.
const OWN_TOKENS: usize = 40;

/// Tokens by which the last prompt of the second start is longer than the first one.
const LONGER_BY: usize = 200;

/// Tokens that each request produces.
const SAYS: usize = 4;

/// Processes that are killed until one has left a prompt half written. The moment is random: one that is late
/// finds everything written.
const KILLS_MAX: usize = 5;

/// Time limit of a start. The longest prefix is computed in some 20 s.
const PATIENCE: Duration = Duration::from_secs(600);

const PREFIX_TOKENS: u32 = 8192;
const REQUESTS: u32 = 3;

pub(super) fn run(args: &StoreArgs) -> Result<(), Failure> {
    let plan = Plan::new(args);
    let place = Place::new(args.directory.as_deref())?;
    if !args.quiet {
        output::note(&plan.describe(&place.directory));
    }
    let bar = output::step_bar(args.quiet);
    let runs = plan.measure(&place, &bar);
    bar.finish_and_clear();
    let report = Report::new(&plan, &runs?);
    output::show(&report, args.json)?;
    report.complaint().map_or(Ok(()), |why| Err(Failure::Check(why)))
}

/// The directory of the store.
struct Place {
    directory: PathBuf,
    is_temporary: bool,
}

impl Place {
    /// A new directory, or the caller's: an existing store in it could lose blocks to the demo's capacity.
    fn new(given: Option<&Path>) -> Result<Place, Failure> {
        let failed =
            |directory: &Path, error| Failure::Failed(format!("{}: {error}", directory.display()));
        let Some(given) = given else {
            let name = format!("kvferry-demo-store-{}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            fs::create_dir(&directory).map_err(|error| failed(&directory, error))?;
            output::remove_when_interrupted(&directory);
            return Ok(Place { directory, is_temporary: true });
        };
        fs::create_dir_all(given).map_err(|error| failed(given, error))?;
        let mut entries = fs::read_dir(given).map_err(|error| failed(given, error))?;
        if entries.next().is_some() {
            return Err(Failure::Usage(format!(
                "{}: the directory is not empty: give one that is empty or does not exist",
                given.display()
            )));
        }
        Ok(Place { directory: given.to_path_buf(), is_temporary: false })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_temporary {
            let _ = fs::remove_dir_all(&self.directory);
        }
    }
}

/// The model, the engine and the prompts.
#[derive(Debug)]
struct Plan {
    prefix_tokens: usize,
    model: ModelSpec,
    /// Prompts with a common prefix.
    prompts: Vec<Vec<u32>>,
    /// The first prompt and more.
    longer: Vec<u32>,
    /// Whether the second start computes on a wrong byte.
    has_fault: bool,
}

impl Plan {
    fn new(args: &StoreArgs) -> Plan {
        let model = ModelSpec::new(vec![GroupSpec::full(HEADS, HEAD_BYTES)], LAYERS);
        let prefix_tokens = args.prefix_tokens.unwrap_or(PREFIX_TOKENS) as usize;
        let prefix = random_tokens(&model, 0, prefix_tokens);
        let prompt = |number| [prefix.clone(), random_tokens(&model, number, OWN_TOKENS)].concat();
        let prompts: Vec<_> =
            (1..=u64::from(args.requests.unwrap_or(REQUESTS))).map(prompt).collect();
        let longer = [prompts[0].clone(), random_tokens(&model, u64::MAX, LONGER_BY)].concat();
        Plan { prefix_tokens, model, prompts, longer, has_fault: args.inject_fault }
    }

    fn describe(&self, directory: &Path) -> String {
        format!(
            "{} prompts share {} tokens, {} KiB of KV each token; the store is in {}",
            self.prompts.len(),
            self.prefix_tokens,
            TOKEN_BYTES >> 10,
            directory.display()
        )
    }

    /// The prompt whose blocks an engine puts when it is killed. No other prompt has one of its blocks.
    fn cut_short(&self, kill: usize) -> Vec<u32> {
        random_tokens(&self.model, (1 << 32) + kill as u64, self.prefix_tokens + OWN_TOKENS)
    }

    fn config(&self) -> EngineConfig {
        let longest = self.longer.len() + SAYS;
        let tokens = 2 * longest + self.prompts.len() * (OWN_TOKENS + SAYS + BLOCK_TOKENS);
        let mut config = EngineConfig::new(self.model.clone());
        config.groups = vec![GroupCache::new(BLOCK_TOKENS, tokens.div_ceil(BLOCK_TOKENS) + 2)];
        // A prompt is computed in one step, so its blocks are put in one call.
        (config.step_tokens, config.chunk_tokens) = (longest, longest);
        config.max_tokens = longest;
        config.load_failure = LoadFailurePolicy::Recompute;
        config
    }

    /// Twice the bytes of all blocks, and room for the segments that each start begins.
    fn capacity(&self) -> u64 {
        let shared = self.longer.len() + self.prompts.len() * OWN_TOKENS;
        let tokens = shared + KILLS_MAX * (self.prefix_tokens + OWN_TOKENS);
        (2 * tokens * TOKEN_BYTES) as u64 + (64 << 20)
    }

    fn start(&self, store: Option<&StoreAt>, prompts: Vec<Vec<u32>>, fault: Fault) -> Start {
        Start { config: self.config(), store: store.cloned(), prompts, says: SAYS, fault }
    }

    fn measure(&self, place: &Place, bar: &ProgressBar) -> Result<Runs, Failure> {
        let store = StoreAt { directory: place.directory.clone(), capacity: self.capacity() };
        let step = |what: &str| {
            bar.inc_length(1);
            bar.set_message(what.to_string());
        };
        let serve_with = |what: &'static str, start: Start| {
            step(what);
            let served = Child::spawn(&[COMMAND])?.ask_within::<_, Served>(&start, PATIENCE);
            bar.inc(1);
            served.map_err(|failure| failure.while_doing(what))
        };
        let serve =
            |what, store, prompts| serve_with(what, self.start(store, prompts, Fault::None));
        let all = [&self.prompts[..], std::slice::from_ref(&self.longer)].concat();
        let without = serve("an engine without a store", None, all.clone())?;
        let first = serve("the first start", Some(&store), self.prompts.clone())?;
        let fault = if self.has_fault { Fault::Flip } else { Fault::None };
        let again = self.start(Some(&store), all.clone(), fault);
        let second = serve_with("the second start", again)?;
        let mut kills = 0;
        loop {
            let cut_short = self.cut_short(kills);
            let right = serve("an engine without a store", None, vec![cut_short.clone()])?;
            step("an engine that is killed while it writes");
            kill(&self.start(Some(&store), vec![cut_short.clone()], Fault::Kill))
                .map_err(|failure| failure.while_doing("the engine to kill"))?;
            bar.inc(1);
            kills += 1;
            let prompts = [&all[..], std::slice::from_ref(&cut_short)].concat();
            let after = serve("the start after the kill", Some(&store), prompts)?;
            let killed = Killed::new(&cut_short, kills, &after);
            if killed.is_half_written() || kills == KILLS_MAX {
                return Ok(Runs { without, first, second, right, after, killed });
            }
        }
    }
}

fn random_tokens(model: &ModelSpec, seed: u64, count: usize) -> Vec<u32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| rng.u32(..model.vocab)).collect()
}

/// Starts an engine that kills itself, and checks that it was killed.
fn kill(start: &Start) -> Result<(), Failure> {
    let mut child = Child::spawn(&[COMMAND])?;
    let (mut answers, mut asks) = child.take_pipe()?;
    asks.send(start)?;
    match answers.receive_within::<Answer<Served>>(PATIENCE)? {
        Some(Ok(_)) => Err(Failure::Failed("it ended before it was killed".into())),
        Some(Err(failure)) => Err(failure),
        None => {
            let how = child.how_it_ended()?;
            let was_killed = how.contains("SIGKILL");
            if was_killed { Ok(()) } else { Err(Failure::Failed(how)) }
        }
    }
}
