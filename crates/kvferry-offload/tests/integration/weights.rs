//! Engines whose keys and namespace do not name the weights, and that load others.

use kvferry::{Access, Agent, Region};
use kvferry_blocks::{
    Action, BlockManager, Config, GroupConfig, Key, Request, RetentionConfig, SequenceId,
    TransferMode,
};
use kvferry_offload::{Driver, Options, Pages, Piece, Stats};
use kvferry_store::Namespace;
use std::path::{Path, PathBuf};
use std::time::Duration;

const TOKENS: u32 = 4;
const PAGES: u32 = 4;
const PAGE_LEN: usize = 8192;
const LONG: Duration = Duration::from_secs(60);
const FILE_MODES: [TransferMode; 2] = [TransferMode::PosixDebugFallback, TransferMode::Gds];

struct Directory(PathBuf);

impl Directory {
    fn new(name: &str, mode: TransferMode) -> Self {
        let name = format!("kvferry-{name}-{mode:?}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An engine of one group, whose KV is its weights in each byte.
struct Engine {
    weights: u8,
    region: Region,
    manager: BlockManager,
    driver: Driver,
    retention: RetentionConfig,
}

impl Engine {
    fn start(weights: u8, mode: TransferMode, directory: &Path) -> Self {
        Self::with(weights, mode, directory, Options::new(Namespace::new("model")))
    }

    fn with(weights: u8, mode: TransferMode, directory: &Path, options: Options) -> Self {
        let agent = Agent::builder().name("engine").start().unwrap();
        let region = agent.allocate_private(PAGES as usize * PAGE_LEN, Access::NONE).unwrap();
        let len = PAGE_LEN as u64;
        let piece = Piece { region: region.clone(), base: 0, stride: len, len };
        let group = GroupConfig { primary_blocks: PAGES, secondary_blocks: 64 };
        let options = options.store_bytes(24 << 20).segment_bytes(1 << 20);
        Self {
            weights,
            region,
            manager: BlockManager::new(&Config::new(TOKENS, [group])).unwrap(),
            driver: Driver::start(&agent, Pages::new(vec![vec![piece]]), &[64], options).unwrap(),
            retention: RetentionConfig::default().transfer(mode, directory.to_str()).unwrap(),
        }
    }

    /// Runs a prompt, whose key is its name. Returns how many of its blocks were reused: each has the KV of the engine's
    /// weights.
    fn serve(&mut self, prompt: u64) -> usize {
        let keys: Vec<Key> = (0..u64::from(PAGES)).map(|block| Key([prompt, block])).collect();
        let request = Request {
            prompt_tokens: PAGES * TOKENS,
            keys: &keys,
            tokens: &[],
            salt: 0,
            retention: &self.retention,
        };
        let allocation = self.manager.allocate(&request, 0).unwrap();
        let mut reused = allocation.reused_tokens;
        while let Some(cut) = self.carry_out(allocation.sequence) {
            reused = cut;
        }
        let pages = self.manager.blocks(allocation.sequence, 0).unwrap().to_vec();
        let reused = (reused / TOKENS) as usize;
        for (at, page) in pages.into_iter().enumerate() {
            let offset = page as usize * PAGE_LEN;
            let mut have = vec![0; PAGE_LEN];
            self.region.read_at(offset, &mut have).unwrap();
            match at < reused {
                true => {
                    let is_right = have.iter().all(|byte| *byte == self.weights);
                    assert!(is_right, "KV of weights {}, not of {}", have[0], self.weights);
                }
                false => self.region.write_at(offset, &vec![self.weights; PAGE_LEN]).unwrap(),
            }
        }
        self.manager.free(allocation.sequence, &keys, &[], 0).unwrap();
        reused
    }

    /// Makes the copies that the manager wants. Returns the tokens that are reused, if these became fewer.
    fn carry_out(&mut self, of: SequenceId) -> Option<u32> {
        let mut cut = None;
        loop {
            let actions: Vec<Action> = std::iter::from_fn(|| self.manager.poll_action()).collect();
            for action in &actions {
                if let Action::Cut { sequence, reused_tokens, blocks } = action
                    && *sequence == of
                {
                    cut = Some(*reused_tokens);
                    self.manager.append(of, (PAGES - blocks) * TOKENS, 0).unwrap();
                }
            }
            self.driver.submit(actions);
            if self.driver.under_way() == 0 && self.manager.is_ready(of) != Some(false) {
                let ended = self.driver.take_finished(usize::MAX);
                if ended.is_empty() {
                    return cut;
                }
                for (id, outcome) in ended {
                    self.manager.finished(id, outcome, 0).unwrap();
                }
                continue;
            }
            assert!(self.driver.wait(LONG), "a copy does not end");
            for (id, outcome) in self.driver.take_finished(usize::MAX) {
                self.manager.finished(id, outcome, 0).unwrap();
            }
        }
    }

    /// Offloads what is in the pages.
    fn push_out(&mut self, from: u64) {
        for prompt in from..from + 2 {
            self.serve(prompt);
        }
    }

    fn stats(&self) -> Stats {
        self.driver.stats()
    }
}

#[test]
fn after_a_reset_no_kv_of_the_old_weights_comes_back_under_equal_keys() {
    for mode in FILE_MODES {
        let directory = Directory::new("offload-reset", mode);
        let mut engine = Engine::start(1, mode, &directory.0);
        for weights in 1..5 {
            engine.weights = weights;
            assert_eq!(engine.serve(7), 0, "{mode:?}: the cache is empty");
            engine.push_out(100);
            assert_eq!(engine.serve(7), 3, "{mode:?}: it was offloaded");
            engine.manager.reset().unwrap();
        }
        let stats = engine.stats();
        assert_eq!((stats.failed, stats.present), (0, 0), "{mode:?}");
    }
}

#[test]
fn an_engine_that_starts_with_other_weights_reads_none_of_the_old_ones() {
    for mode in FILE_MODES {
        let directory = Directory::new("offload-other-weights", mode);
        for weights in 1..4 {
            let mut engine = Engine::start(weights, mode, &directory.0);
            assert_eq!(engine.serve(7), 0, "{mode:?}");
            engine.push_out(100);
            assert_eq!(engine.serve(7), 3, "{mode:?}");
        }
    }
}

#[test]
fn two_engines_of_one_directory_read_their_own_kv_and_remove_nothing_of_the_other() {
    for mode in FILE_MODES {
        let directory = Directory::new("offload-two", mode);
        let mut one = Engine::start(1, mode, &directory.0);
        one.serve(7);
        one.push_out(100);
        let mut other = Engine::start(2, mode, &directory.0);
        other.serve(7);
        other.push_out(100);
        assert_eq!((one.serve(7), other.serve(7)), (3, 3), "{mode:?}");
        for engine in [&one, &other] {
            assert_eq!(engine.stats().failed, 0, "{mode:?}");
        }
    }
}

#[test]
fn what_is_shared_by_name_is_not_written_again_until_a_reset() {
    let mode = TransferMode::Gds;
    let directory = Directory::new("offload-shared", mode);
    let options = Options::new(Namespace::new("model@1")).share_names();
    let mut present = Vec::new();
    for _ in 0..2 {
        let mut engine = Engine::with(1, mode, &directory.0, options.clone());
        engine.serve(7);
        engine.push_out(100);
        present.push(engine.stats().present);
        engine.manager.reset().unwrap();
        engine.weights = 2;
        engine.serve(7);
        engine.push_out(100);
        assert_eq!(engine.serve(7), 3);
        assert_eq!(engine.stats().present, *present.last().unwrap());
    }
    assert!(present[0] == 0 && present[1] >= 3, "{present:?}");
}
