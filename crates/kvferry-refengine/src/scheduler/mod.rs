//! The engine's scheduler: requests, their queues and their blocks.
//!
//! | for | open |
//! |---|---|
//! | a live request | `entry.rs` |
//! | what a step computes and loads | `schedule.rs`, `plan.rs` |
//! | how workers and the connector get it | `output.rs` |
//! | tokens, ends and reports after a step | `update.rs` |
//! | the connector's scheduler half | `seam.rs` |
//! | blocks by kvferry's block manager | `managed.rs` |

mod entry;
mod managed;
mod output;
mod plan;
mod schedule;
mod seam;
mod update;

use crate::cache::CacheManager;
use crate::config::{EngineConfig, LoadFailurePolicy};
use crate::contract::Violation;
use crate::layout::BlockId;
use crate::offload::Managed;
use crate::request::{FinishReason, Output, Request, RequestId, RequestStatus, SubmitError};
use entry::Entry;
use kvferry_blocks::RetentionConfig;
pub(crate) use plan::Plan;
use rustc_hash::FxHashMap;
pub(crate) use seam::Seam;
use std::collections::{BTreeMap, VecDeque};

pub(crate) struct Scheduler {
    pub(crate) cache: CacheManager,
    pub(crate) seam: Seam,
    /// Decides on blocks instead of `cache`.
    pub(crate) managed: Option<Managed>,
    requests: BTreeMap<u64, Entry>,
    numbers: FxHashMap<RequestId, u64>,
    waiting: VecDeque<u64>,
    running: Vec<u64>,
    limits: Limits,
    next_number: u64,
    steps: u64,
    /// Requests that ended, or lost their blocks, since the last step.
    finished: Vec<RequestId>,
    restarted: Vec<RequestId>,
    retired: FxHashMap<RequestId, (u64, bool)>,
    retired_order: VecDeque<(u64, RequestId)>,
    pub(crate) outputs: Vec<Output>,
    pub(crate) violations: Vec<Violation>,
    pub(crate) preemptions: u64,
}

#[derive(Debug)]
struct Limits {
    step_tokens: usize,
    chunk_tokens: usize,
    running: usize,
    tokens: usize,
    vocab: u32,
    load_failure: LoadFailurePolicy,
    has_state: bool,
}

impl Scheduler {
    pub(crate) fn new(config: &EngineConfig, seam: Seam) -> Self {
        Self {
            cache: CacheManager::new(config),
            seam,
            managed: None,
            requests: BTreeMap::new(),
            numbers: FxHashMap::default(),
            waiting: VecDeque::new(),
            running: vec![],
            limits: Limits {
                step_tokens: config.step_tokens,
                chunk_tokens: config.chunk_tokens.min(config.step_tokens),
                running: config.max_running,
                tokens: config.max_tokens,
                vocab: config.model.vocab,
                load_failure: config.load_failure,
                has_state: config.model.has_state(),
            },
            next_number: 1,
            steps: 0,
            finished: vec![],
            restarted: vec![],
            retired: FxHashMap::default(),
            retired_order: VecDeque::new(),
            outputs: vec![],
            violations: vec![],
            preemptions: 0,
        }
    }

    fn entry(&self, number: u64) -> &Entry {
        self.requests.get(&number).expect("queues name live requests")
    }

    fn entry_mut(&mut self, number: u64) -> &mut Entry {
        self.requests.get_mut(&number).expect("queues name live requests")
    }

    fn validate(&self, request: &Request) -> Result<(), SubmitError> {
        let Limits { tokens: most, vocab, chunk_tokens, .. } = self.limits;
        let tokens = request.prompt.len() + request.max_tokens;
        if request.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if request.max_tokens == 0 {
            return Err(SubmitError::NoTokens);
        }
        if tokens > most {
            return Err(SubmitError::TooLong { tokens, most });
        }
        if let Some(token) = request.prompt.iter().find(|token| **token >= vocab) {
            return Err(SubmitError::Vocabulary { token: *token, vocab });
        }
        let (blocks, capacity) = self.cache.worst(tokens, self.chunk(tokens, chunk_tokens));
        if blocks > capacity {
            return Err(SubmitError::TooLarge { blocks, capacity });
        }
        Ok(())
    }

    /// Adds an entry that is in no queue.
    fn enter(&mut self, request: Request, retention: RetentionConfig) -> Result<u64, SubmitError> {
        if self.numbers.contains_key(&request.id) {
            return Err(SubmitError::Duplicate { id: request.id });
        }
        let number = self.next_number;
        self.next_number += 1;
        let mut hashes = vec![];
        self.cache.extend_hashes(&mut hashes, &request.prompt);
        self.retired.remove(&request.id);
        self.numbers.insert(request.id.clone(), number);
        let entry = Entry {
            number,
            id: request.id,
            prompt_len: request.prompt.len(),
            tokens: request.prompt,
            max_tokens: request.max_tokens,
            stop_token: request.stop_token,
            params: request.params,
            status: RequestStatus::Waiting,
            computed: 0,
            cached: 0,
            tables: self.cache.tables(),
            hashes,
            load: None,
            preempted: false,
            sending: false,
            receiving: false,
            external: 0,
            retention,
            held: None,
        };
        self.requests.insert(number, entry);
        Ok(number)
    }

    /// The block manager reserves the blocks of all tokens at once; vLLM those of a chunk.
    fn chunk(&self, tokens: usize, chunk: usize) -> usize {
        if self.managed.is_some() { tokens } else { chunk }
    }

    pub(crate) fn submit(
        &mut self,
        request: Request,
        retention: RetentionConfig,
    ) -> Result<(), SubmitError> {
        self.validate(&request)?;
        let number = self.enter(request, retention)?;
        self.waiting.push_back(number);
        if let Seam::Vllm(connector) = &mut self.seam {
            let entry = self.requests.get_mut(&number).expect("just entered");
            connector.on_new_request(&entry.view());
            let tokens = connector.prompt_tokens_to_prefill(&entry.view());
            if tokens == 0 || tokens > entry.prompt_len {
                let (id, prompt) = (entry.id.clone(), entry.prompt_len);
                self.violations.push(Violation::PromptCut { id, tokens, prompt });
            } else if tokens < entry.prompt_len {
                entry.prompt_len = tokens;
                entry.tokens.truncate(tokens);
                entry.hashes.clear();
                self.cache.extend_hashes(&mut entry.hashes, &entry.tokens);
            }
        }
        Ok(())
    }

    /// Rejects a request before it is scheduled. The connector gets its end.
    pub(crate) fn reject(&mut self, request: Request) -> Result<(), SubmitError> {
        let number = self.enter(request, RetentionConfig::default())?;
        self.finish(number, FinishReason::Abort);
        Ok(())
    }

    /// Aborts a request. False if it does not run.
    pub(crate) fn abort(&mut self, id: &RequestId) -> bool {
        let Some(number) = self.numbers.get(id).copied() else { return false };
        if matches!(self.entry(number).status, RequestStatus::Finished(_)) {
            return false;
        }
        self.finish(number, FinishReason::Abort);
        true
    }

    pub(crate) fn status(&self, id: &RequestId) -> Option<RequestStatus> {
        Some(self.entry(*self.numbers.get(id)?).status)
    }

    pub(crate) fn tables(&self, id: &RequestId) -> Option<&[Vec<BlockId>]> {
        Some(&self.entry(*self.numbers.get(id)?).tables.blocks)
    }

    /// Requests that have not ended.
    pub(crate) fn unfinished(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// Whether requests have ended or lost their blocks since the last step.
    pub(crate) fn has_news(&self) -> bool {
        !self.finished.is_empty() || !self.restarted.is_empty()
    }

    /// Requests that have not ended, and those whose blocks the connector still holds.
    pub(crate) fn live(&self) -> Vec<RequestId> {
        self.requests.values().map(|entry| entry.id.clone()).collect()
    }

    /// Number of requests that keep blocks after their end.
    pub(crate) fn held(&self) -> usize {
        self.requests.values().filter(|it| it.sending || it.receiving).count()
    }
}
