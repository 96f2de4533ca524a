//! One start of the engine, in a process of its own: opens the store, serves prompts one after another, ends.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvferry::{Agent, TransportKind, Transports};
use kvferry_bench::child;
use kvferry_bench::failure::Failure;
use kvferry_refengine::{Connector, Engine, EngineConfig, FinishReason, Request, RequestId};
use kvferry_store::{Namespace, Store, StoreOptions};
use serde::{Deserialize, Serialize};

use super::connector::{self, Fault, Shared};

/// Task of one engine process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Start {
    pub(super) config: EngineConfig,
    /// The store. Without one, the engine computes everything.
    pub(super) store: Option<StoreAt>,
    pub(super) prompts: Vec<Vec<u32>>,
    /// Tokens that each request produces.
    pub(super) says: usize,
    pub(super) fault: Fault,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StoreAt {
    pub(super) directory: PathBuf,
    pub(super) capacity: u64,
}

/// Answer of one engine process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Served {
    /// Time until the store was open.
    pub(super) opened: Duration,
    /// Results in the order of the prompts.
    pub(super) requests: Vec<Answered>,
    /// Blocks that the store stored now.
    pub(super) stored: usize,
    /// Blocks that the store did not take, because of space or a device.
    pub(super) not_stored: usize,
    /// Blocks whose sums were wrong when they were read. They were missed.
    pub(super) corrupt: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answered {
    pub(super) tokens: Vec<u32>,
    pub(super) first_token: Duration,
    pub(super) whole: Duration,
    /// Tokens of the prompt that the engine had in its own cache.
    pub(super) cached_tokens: usize,
    /// Tokens of the prompt that were read from the store.
    pub(super) loaded_tokens: usize,
}

/// `kvferry demo-store-engine`.
pub(crate) fn run() -> Result<(), Failure> {
    child::answer_parent(|start: Start| {
        let served = serve(&start)?;
        serde_json::to_value(&served).map_err(|error| Failure::Failed(error.to_string()))
    })
}

pub(super) fn serve(start: &Start) -> Result<Served, Failure> {
    let Some(at) = &start.store else {
        let engine = open(&start.config, Connector::None)?;
        return Ok(Served {
            opened: Duration::ZERO,
            requests: answer_all(start, engine, &Shared::default())?,
            stored: 0,
            not_stored: 0,
            corrupt: 0,
        });
    };
    let failed = |error: kvferry_store::Error| Failure::Failed(error.to_string());
    let agent = Agent::builder()
        .name("demo-store")
        .transports(Transports::only(TransportKind::TCP))
        .start()?;
    let began = Instant::now();
    let store = Store::open(&agent, &StoreOptions::new(&at.directory, at.capacity));
    let store = store.map_err(failed)?;
    let opened = began.elapsed();
    let block_tokens = start.config.groups[0].block_tokens;
    let space = store.space(&namespace(&start.config));
    let (connector, shared) = connector::connector(&agent, &space, block_tokens, start.fault);
    let engine = open(&start.config, Connector::Vllm(connector))?;
    let requests = answer_all(start, engine, &shared)?;
    let (put, corrupt) = (shared.lock().put, store.stats().corrupt);
    store.close();
    let not_stored = put.refused + put.failed;
    Ok(Served { opened, requests, stored: put.stored, not_stored, corrupt })
}

/// Names what the bytes of a block depend on, besides its tokens.
fn namespace(config: &EngineConfig) -> Namespace {
    let model = &config.model;
    let layout = format!("{}, {:?}, {:?}", config.layout, model.groups, config.groups[0]);
    Namespace::new(format!("demo, {} layers, seed {}", model.layers.len(), model.seed))
        .layout(layout)
}

fn open(config: &EngineConfig, connector: Connector) -> Result<Engine, Failure> {
    Engine::new(config.clone(), connector).map_err(|error| Failure::Usage(error.to_string()))
}

fn answer_all(
    start: &Start,
    mut engine: Engine,
    shared: &Shared,
) -> Result<Vec<Answered>, Failure> {
    let one = |(number, prompt): (usize, &Vec<u32>)| {
        let id = RequestId::from(format!("request-{number}"));
        let request = Request::new(id.clone(), prompt.clone(), start.says);
        answer(&mut engine, request, shared).map_err(|failure| failure.while_doing(id.as_str()))
    };
    start.prompts.iter().enumerate().map(one).collect()
}

fn answer(engine: &mut Engine, request: Request, shared: &Shared) -> Result<Answered, Failure> {
    let id = request.id.clone();
    let began = Instant::now();
    let (mut tokens, mut first_token) = (Vec::new(), None);
    engine.submit(request).map_err(|error| Failure::Failed(error.to_string()))?;
    while engine.has_work() {
        engine.step().map_err(|error| Failure::Check(error.to_string()))?;
        if let Some(failure) = shared.lock().failure.take() {
            return Err(Failure::Failed(format!("the store: {failure}")));
        }
        for output in engine.take_outputs() {
            tokens.extend(output.tokens);
            if !tokens.is_empty() {
                first_token.get_or_insert_with(|| began.elapsed());
            }
            match output.finished.map(|finished| finished.reason) {
                None | Some(FinishReason::Length | FinishReason::Stop) => {}
                Some(reason) => return Err(Failure::Failed(format!("it ended by {reason:?}"))),
            }
        }
    }
    let whole = began.elapsed();
    let reused = shared.lock().reused.get(&id).copied().unwrap_or_default();
    Ok(Answered {
        tokens,
        first_token: first_token.unwrap_or(whole),
        whole,
        cached_tokens: reused.cached_tokens,
        loaded_tokens: reused.loaded_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_refengine::{GroupCache, GroupSpec, LoadFailurePolicy, ModelSpec, continuation};
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    const SAYS: usize = 3;

    fn start(directory: &Path, prompt: &[u32]) -> Start {
        let mut config = EngineConfig::new(ModelSpec::new(vec![GroupSpec::full(4, 64)], 2));
        config.groups = vec![GroupCache::new(16, 64)];
        config.load_failure = LoadFailurePolicy::Recompute;
        Start {
            config,
            store: Some(StoreAt { directory: directory.to_owned(), capacity: 32 << 20 }),
            prompts: vec![prompt.to_vec()],
            says: SAYS,
            fault: Fault::None,
        }
    }

    /// Flips a byte of a block in the middle of what each segment holds.
    fn damage(directory: &Path) {
        for entry in fs::read_dir(directory).expect("the store's directory") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with("segment-") {
                let file = fs::File::options().read(true).write(true).open(&path).expect("a file");
                let mut byte = [0];
                if file.read_exact_at(&mut byte, 100_000).is_ok() {
                    file.write_all_at(&[!byte[0]], 100_000).expect("it was read");
                }
            }
        }
    }

    /// A prompt of several steps; blocks of 16 tokens, 16 KiB each.
    #[test]
    fn a_block_that_is_damaged_on_disk_is_computed_again_and_no_block_is_put_that_follows_from_it()
    {
        let name = format!("kvferry-demo-engine-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(&directory).expect("a directory");
        let longer: Vec<u32> = (0..300).collect();
        let serve = |prompt: &[u32]| {
            let start = start(&directory, prompt);
            let mut served = serve(&start).expect("it serves");
            let only = served.requests.pop().expect("one request");
            assert_eq!(only.tokens, continuation(&start.config.model, prompt, SAYS));
            (served.stored, served.corrupt, only.loaded_tokens)
        };
        assert_eq!(serve(&longer[..200]), (12, 0, 0));
        assert_eq!(serve(&longer[..200]), (0, 0, 192));
        damage(&directory);
        let (_, corrupt, loaded) = serve(&longer);
        assert!(corrupt > 0 && 0 < loaded && loaded < 192, "{corrupt} {loaded}");
        // What was computed again has been put.
        assert_eq!(serve(&longer), (0, 0, 288));
        let _ = fs::remove_dir_all(&directory);
    }
}
