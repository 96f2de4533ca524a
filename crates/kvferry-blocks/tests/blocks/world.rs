//! An engine with memory: what is in its blocks tells whether the manager has said something wrong.

use kvferry_blocks::{
    Action, Allocation, Block, BlockManager, Config, Error, Key, Outcome, PinId, Request,
    RetentionConfig, SequenceId, Tier, Transfer,
};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The KV of a token depends on all tokens before it.
type Kv = u64;

pub(crate) struct Running {
    pub(crate) id: SequenceId,
    pub(crate) tokens: Vec<u32>,
    pub(crate) salt: u64,
    /// None: it waits for copies.
    pub(crate) reused: Option<u32>,
    /// How many tokens have their KV in the blocks.
    pub(crate) computed: usize,
}

pub(crate) struct World {
    pub(crate) manager: BlockManager,
    pub(crate) running: Vec<Running>,
    pub(crate) pins: Vec<PinId>,
    /// Copies that have begun, with what their sources had.
    pub(crate) copies: Vec<(Transfer, Vec<Kv>)>,
    pub(crate) now_ms: u64,
    /// Names of files.
    pub(crate) discarded: Vec<String>,
    memory: HashMap<(u16, Block), Vec<Kv>>,
    files: HashMap<(String, String), Vec<Kv>>,
    block: usize,
    groups: u16,
    garbage: Kv,
}

pub(crate) fn kv_of(salt: u64, tokens: &[u32]) -> Kv {
    let mut hasher = DefaultHasher::new();
    (salt, tokens).hash(&mut hasher);
    hasher.finish()
}

pub(crate) fn keys_of(salt: u64, tokens: &[u32], block: usize) -> Vec<Key> {
    let ends = (1..=tokens.len() / block).map(|n| n * block);
    ends.map(|end| Key([kv_of(salt, &tokens[..end]), end as u64])).collect()
}

impl World {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            manager: BlockManager::new(config).expect("a right config"),
            running: Vec::new(),
            pins: Vec::new(),
            copies: Vec::new(),
            now_ms: 0,
            discarded: Vec::new(),
            memory: HashMap::new(),
            files: HashMap::new(),
            block: config.tokens_per_block as usize,
            groups: config.groups.len() as u16,
            garbage: 0,
        }
    }

    fn garbage(&mut self) -> Vec<Kv> {
        self.garbage += 1;
        vec![Kv::MAX - self.garbage; self.block]
    }

    pub(crate) fn allocate(
        &mut self,
        tokens: &[u32],
        salt: u64,
        retention: &RetentionConfig,
    ) -> Result<Allocation, Error> {
        let keys = keys_of(salt, tokens, self.block);
        let prompt_tokens = tokens.len() as u32;
        let request = Request { prompt_tokens, keys: &keys, tokens, salt, retention };
        let allocated = self.manager.allocate(&request, self.now_ms);
        if let Ok(Allocation { sequence: id, reused_tokens, is_ready, .. }) = allocated {
            assert!(reused_tokens < prompt_tokens, "a token is left to compute");
            let reused = is_ready.then_some(reused_tokens);
            self.running.push(Running { id, tokens: tokens.to_vec(), salt, reused, computed: 0 });
            if is_ready {
                self.expect_reused(self.running.len() - 1);
            }
        }
        self.act();
        allocated
    }

    pub(crate) fn append(&mut self, at: usize, tokens: &[u32]) -> Result<u32, Error> {
        let running = &mut self.running[at];
        let appended = self.manager.append(running.id, tokens.len() as u32, self.now_ms);
        if appended.is_ok() {
            running.tokens.extend(tokens);
            if !self.manager.is_ready(running.id).expect("it runs") {
                running.reused = None;
            }
        }
        self.act();
        appended
    }

    /// The engine fills the blocks of a sequence. False: it has to wait.
    pub(crate) fn compute(&mut self, at: usize) -> bool {
        let running = &self.running[at];
        let Some(reused) = running.reused else { return false };
        let len = running.tokens.len();
        let from = running.computed.max(reused as usize);
        for group in 0..self.groups {
            for token in from..len {
                let index = self.page(group, at, token / self.block);
                let others = (0..self.running.len()).filter(|&other| other != at);
                for other in others {
                    let pages =
                        self.manager.blocks(self.running[other].id, group).expect("it runs");
                    assert!(!pages.contains(&index), "a block that is written has one owner");
                }
                let kv = kv_of(self.running[at].salt, &self.running[at].tokens[..=token]);
                let garbage = self.garbage();
                let block = Block { tier: Tier::Primary, index };
                self.memory.entry((group, block)).or_insert(garbage)[token % self.block] = kv;
            }
        }
        self.running[at].computed = self.running[at].tokens.len();
        true
    }

    pub(crate) fn store(&mut self, at: usize) -> Result<u32, Error> {
        let running = &self.running[at];
        let computed = &running.tokens[..running.computed];
        let keys = keys_of(running.salt, computed, self.block);
        let stored = self.manager.store(running.id, &keys, computed);
        self.act();
        stored
    }

    pub(crate) fn free(&mut self, at: usize, is_aborted: bool) {
        let running = self.running.swap_remove(at);
        let computed = if is_aborted { 0 } else { running.computed };
        let computed = &running.tokens[..computed];
        let keys = keys_of(running.salt, computed, self.block);
        self.manager.free(running.id, &keys, computed, self.now_ms).expect("it runs");
        self.act();
    }

    pub(crate) fn pin(&mut self, at: usize) {
        let pinned = self.manager.pin(self.running[at].id);
        assert_eq!(pinned.is_ok(), self.running[at].reused.is_some());
        self.pins.extend(pinned);
    }

    pub(crate) fn unpin(&mut self, at: usize) {
        let pin = self.pins.swap_remove(at);
        self.manager.unpin(pin, self.now_ms).expect("pinned");
        self.act();
        assert_eq!(self.manager.unpin(pin, self.now_ms), Err(Error::UnknownPin));
    }

    pub(crate) fn reset(&mut self) {
        let is_used = !self.running.is_empty() || !self.pins.is_empty();
        assert_eq!(self.manager.reset().is_err(), is_used);
        self.act();
    }

    /// A copy ends.
    pub(crate) fn finish(&mut self, at: usize, outcome: Outcome) {
        let at = self.first_of_file(at);
        let (transfer, source) = self.copies.remove(at);
        // A file that is removed while it is read can be read to its end.
        if let Some(found) = self.find(&transfer, transfer.from) {
            assert_eq!(found, &source, "the source has not changed");
        } else {
            assert!(self.file(&transfer, transfer.from).is_some(), "the source is there");
        }
        let mut target = self.garbage();
        if outcome == Outcome::Done {
            let tokens = transfer.tokens as usize;
            target[..tokens].copy_from_slice(&source[..tokens]);
        }
        match self.file(&transfer, transfer.to) {
            Some(file) => self.files.insert(file, target),
            None => self.memory.insert((transfer.group, transfer.to), target),
        };
        self.manager.finished(transfer.id, outcome, self.now_ms).expect("not finished yet");
        let again = self.manager.finished(transfer.id, outcome, self.now_ms);
        assert_eq!(again, Err(Error::UnknownTransfer));
        self.act();
    }

    fn file(&self, transfer: &Transfer, block: Block) -> Option<(String, String)> {
        let directory = transfer.directory.as_ref()?;
        (block.tier == Tier::Secondary).then(|| (directory.to_string(), transfer.file_name()))
    }

    /// Copies from and to files of one name are in order.
    pub(crate) fn first_of_file(&self, at: usize) -> usize {
        let file = |transfer: &Transfer| {
            self.file(transfer, transfer.to).or_else(|| self.file(transfer, transfer.from))
        };
        let wanted = file(&self.copies[at].0);
        match wanted {
            None => at,
            Some(_) => {
                let mut copies = self.copies.iter();
                copies.position(|(copy, _)| file(copy) == wanted).expect("it is one of them")
            }
        }
    }

    fn find(&self, transfer: &Transfer, block: Block) -> Option<&Vec<Kv>> {
        match self.file(transfer, block) {
            Some(file) => self.files.get(&file),
            None => self.memory.get(&(transfer.group, block)),
        }
    }

    fn read(&self, transfer: &Transfer, block: Block) -> Vec<Kv> {
        let found = self.find(transfer, block).cloned();
        found.unwrap_or_else(|| panic!("nothing was written to the source of {transfer:?}"))
    }

    fn act(&mut self) {
        while let Some(action) = self.manager.poll_action() {
            match action {
                Action::Copy(transfer) => {
                    let source = self.read(&transfer, transfer.from);
                    self.copies.push((transfer, source));
                }
                Action::Discard(discard) => {
                    let file_name = discard.file_name();
                    self.discarded.push(file_name.clone());
                    let removed = self.files.remove(&(discard.directory.to_string(), file_name));
                    assert!(removed.is_some(), "the file was written");
                }
                Action::Ready { sequence, reused_tokens } => {
                    let at = self.at(sequence);
                    self.running[at].reused = Some(reused_tokens);
                    self.expect_reused(at);
                }
                Action::Cut { sequence, reused_tokens, blocks } => {
                    let at = self.at(sequence);
                    let running = &mut self.running[at];
                    assert!(reused_tokens as usize <= blocks as usize * self.block);
                    assert_eq!(running.computed, 0, "only what was never ready is cut");
                    running.tokens.truncate(blocks as usize * self.block);
                }
                other => panic!("unknown {other:?}"),
            }
        }
    }

    fn at(&self, id: SequenceId) -> usize {
        self.running.iter().position(|running| running.id == id).expect("it runs")
    }

    fn page(&self, group: u16, at: usize, block: usize) -> u32 {
        self.manager.blocks(self.running[at].id, group).expect("it runs")[block]
    }

    /// What need not be computed is there.
    fn expect_reused(&mut self, at: usize) {
        let reused = self.running[at].reused.expect("ready") as usize;
        self.expect_tokens(at, reused);
    }

    fn expect_tokens(&self, at: usize, tokens: usize) {
        let running = &self.running[at];
        for group in 0..self.groups {
            for token in 0..tokens {
                let index = self.page(group, at, token / self.block);
                let kv = &self.memory[&(group, Block { tier: Tier::Primary, index })];
                let wanted = kv_of(running.salt, &running.tokens[..=token]);
                assert_eq!(kv[token % self.block], wanted, "token {token} of group {group}");
            }
        }
    }

    /// Nothing that was computed has been overwritten, each block has one owner, and files are those of slots in use.
    pub(crate) fn check(&self) {
        self.manager.check().unwrap_or_else(|text| panic!("{text}"));
        for (at, running) in self.running.iter().enumerate() {
            self.expect_tokens(at, running.computed);
            assert_eq!(self.manager.is_ready(running.id), Some(running.reused.is_some()));
            for group in 0..self.groups {
                let pages = self.manager.blocks(running.id, group).expect("it runs").len();
                assert_eq!(pages, running.tokens.len().div_ceil(self.block));
            }
        }
    }

    /// Everything ends; then all blocks are free or cached.
    pub(crate) fn settle(&mut self, config: &Config) {
        while !self.running.is_empty() {
            self.free(0, true);
        }
        while !self.pins.is_empty() {
            self.unpin(0);
        }
        while !self.copies.is_empty() {
            self.finish(0, Outcome::Done);
        }
        self.check();
        for (number, group) in (0..).zip(&config.groups) {
            let usage = self.manager.usage(number).expect("a group");
            assert_eq!(usage.primary_free + usage.primary_cached, group.primary_blocks);
        }
        assert_eq!(self.manager.poll_action(), None);
    }
}
