//! Runs an engine that offloads beside one that does not, and compares what they cache.

pub(crate) use crate::basics::{config, dense, windowed};
use kvferry::Agent;
use kvferry_blocks::{RetentionConfig, TransferMode};
use kvferry_offload::{Options, Stats};
use kvferry_refengine::offload::Offload;
pub(crate) use kvferry_refengine::pair::{Outputs, prompt};
use kvferry_refengine::{
    BlockId, Connector, Engine, EngineConfig, Request, RequestId, RequestStatus, StepReport,
    continuation,
};
use kvferry_store::Namespace;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// For what must come.
pub(crate) const LONG: Duration = Duration::from_secs(60);
pub(crate) const BLOCK: usize = 8;

/// A folder of its own, removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvferry-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Files of a folder and of the folders in it.
pub(crate) fn paths_below(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let below = |path: PathBuf| if path.is_dir() { paths_below(&path) } else { vec![path] };
    entries.flat_map(|entry| below(entry.path())).collect()
}

pub(crate) fn agent() -> Agent {
    Agent::builder().name("engine").start().unwrap()
}

/// Small stores.
pub(crate) fn options() -> Options {
    Options::new(Namespace::new("test")).store_bytes(24 << 20).segment_bytes(1 << 20)
}

pub(crate) fn to_files(mode: TransferMode, folder: &Path) -> RetentionConfig {
    RetentionConfig::default().transfer(mode, folder.to_str()).unwrap()
}

/// In each of which a block is somewhere else.
pub(crate) const MODES: [TransferMode; 3] =
    [TransferMode::Dram, TransferMode::PosixDebugFallback, TransferMode::Gds];

/// What an engine without offloading caches for a request: the bytes of each position.
#[derive(Debug)]
struct Right {
    tokens: Vec<u32>,
    positions: Vec<Vec<Vec<u8>>>,
}

/// An engine that offloads, with what its requests must have.
pub(crate) struct Rig {
    pub(crate) engine: Engine,
    right: BTreeMap<RequestId, (Right, usize)>,
    known: BTreeMap<(Vec<u32>, usize), std::rc::Rc<Right>>,
    pub(crate) outputs: Outputs,
    values: u64,
}

impl Rig {
    /// Of `blocks` pages and `secondary` blocks.
    pub(crate) fn new(blocks: usize, secondary: u32) -> Self {
        Self::of(config(&dense(), BLOCK, blocks + 1), secondary, options())
    }

    pub(crate) fn of(config: EngineConfig, secondary: u32, options: Options) -> Self {
        let agent = agent();
        let offload = Offload::new(&agent, secondary).options(options);
        Self::with(config, offload)
    }

    pub(crate) fn with(config: EngineConfig, offload: Offload) -> Self {
        let engine = Engine::with_offload(config, offload).unwrap();
        let (right, known, outputs) = Default::default();
        Self { engine, right, known, outputs, values: 0 }
    }

    pub(crate) fn submit(&mut self, id: &str, prompt: Vec<u32>, max_tokens: usize) {
        self.submit_with(id, prompt, max_tokens, RetentionConfig::default());
    }

    pub(crate) fn submit_with(
        &mut self,
        id: &str,
        prompt: Vec<u32>,
        max_tokens: usize,
        retention: RetentionConfig,
    ) {
        let config = self.engine.config().clone();
        let known = self.known.entry((prompt.clone(), max_tokens));
        let right = known.or_insert_with(|| right(&config, &prompt, max_tokens).into());
        let right = Right { tokens: right.tokens.clone(), positions: right.positions.clone() };
        self.right.insert(id.into(), (right, prompt.len()));
        self.engine.submit_with(Request::new(id, prompt, max_tokens), retention).unwrap();
    }

    /// One step, after which the blocks of requests that run are compared.
    pub(crate) fn step(&mut self) -> StepReport {
        let report = self.engine.step().unwrap();
        let outputs = self.engine.take_outputs();
        let ids: Vec<RequestId> = outputs.iter().map(|output| output.id.clone()).collect();
        self.outputs.add(outputs);
        for id in ids {
            let said = &self.outputs.tokens[&id];
            let (right, prompt_len) = &self.right[&id];
            assert_eq!(*said, right.tokens[..said.len()], "{id}");
            if self.engine.status(&id) == Some(RequestStatus::Running) && !said.is_empty() {
                let computed = prompt_len + said.len() - 1;
                let blocks = self.engine.blocks(&id).unwrap().to_vec();
                for position in 0..computed {
                    let have = at_position(&self.engine, &blocks, position);
                    let right = &right.positions[position];
                    // The other engine gives back what has left a window.
                    let is_wrong =
                        |(have, right): (&Vec<u8>, &Vec<u8>)| !right.is_empty() && have != right;
                    let wrong = have.iter().zip(right).any(is_wrong);
                    assert!(!wrong, "{id}: a wrong KV value of token {position}");
                    self.values += 1;
                }
            }
        }
        report
    }

    /// Until no request is left. Then no block is in use.
    pub(crate) fn run(&mut self) -> Stats {
        for _ in 0..100_000 {
            if !self.engine.has_work() {
                assert!(self.engine.finish_copies(LONG), "copies do not end");
                self.engine.check_empty().unwrap();
                assert!(self.values > 0, "nothing was compared");
                return self.engine.offload_stats();
            }
            if self.step().tokens == 0 && self.engine.copies_under_way() > 0 {
                assert!(self.engine.wait_for_copy(LONG), "a copy does not end");
            }
        }
        panic!("{:?} goes on for ever", self.engine);
    }

    /// Submits a request and runs it. Returns how many tokens were computed for it, with those it said.
    pub(crate) fn serve(
        &mut self,
        id: &str,
        prompt: Vec<u32>,
        retention: &RetentionConfig,
    ) -> usize {
        self.submit_with(id, prompt, 3, retention.clone());
        let mut computed = 0;
        while self.engine.has_work() {
            let report = self.step();
            computed += report.tokens;
            if report.tokens == 0 && self.engine.copies_under_way() > 0 {
                assert!(self.engine.wait_for_copy(LONG), "a copy does not end");
            }
        }
        assert_eq!(self.outputs.of(id).len(), 3, "{id}");
        computed
    }

    /// Serves requests of other prompts until none of the blocks before is left in the engine's pages.
    pub(crate) fn push_out(&mut self, from: u64, retention: &RetentionConfig) {
        let blocks = self.engine.config().groups[0].blocks - 1;
        for n in 0..2 {
            let len = blocks * BLOCK - 3;
            self.serve(&format!("other-{from}-{n}"), prompt(from + n, len), retention);
        }
        assert!(self.engine.finish_copies(LONG));
    }

    pub(crate) fn is_right(&self, id: &str) -> bool {
        self.outputs.of(id) == self.right[&RequestId::from(id)].0.tokens
    }
}

fn right(config: &EngineConfig, prompt: &[u32], max_tokens: usize) -> Right {
    let mut config = config.clone();
    for group in &mut config.groups {
        group.blocks = 256;
    }
    let tokens = continuation(&config.model, prompt, max_tokens);
    let mut engine = Engine::new(config, Connector::None).unwrap();
    engine.submit(Request::new("right", prompt.to_vec(), max_tokens + 1)).unwrap();
    let mut said = 0;
    let mut positions = vec![vec![]; prompt.len() + max_tokens - 1];
    let mut from = 0;
    while said < max_tokens {
        engine.step().unwrap();
        said += engine.take_outputs().iter().map(|output| output.tokens.len()).sum::<usize>();
        if said == 0 && engine.config().model.groups.len() == 1 {
            continue;
        }
        // Windows give blocks back: each position is read as soon as it is computed.
        let blocks = engine.blocks(&"right".into()).unwrap().to_vec();
        let computed = if said == 0 { 0 } else { prompt.len() + said - 1 };
        for (position, values) in positions.iter_mut().enumerate().take(computed).skip(from) {
            *values = at_position(&engine, &blocks, position);
        }
        from = computed;
    }
    Right { tokens, positions }
}

/// All bytes of a position: of each rank, layer, plane and head. Of a block that has left a window, none.
fn at_position(engine: &Engine, blocks: &[Vec<BlockId>], position: usize) -> Vec<Vec<u8>> {
    let mut values = vec![];
    for rank in engine.config().ranks() {
        let caches = engine.caches(rank);
        for layer in &caches.layout.layers {
            let block = blocks[layer.group][position / BLOCK];
            for (plane, view) in layer.planes.iter().enumerate() {
                for head in 0..view.heads {
                    values.push(match block.is_null() {
                        true => vec![],
                        false => caches.row(layer, plane, block, head, position % BLOCK),
                    });
                }
            }
        }
    }
    values
}
