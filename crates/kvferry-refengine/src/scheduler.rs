//! Which tokens of which requests a step computes, and what becomes of them.

use crate::block_pool::BlockHash;
use crate::cache::{CacheManager, Hit, Tables};
use crate::config::{EngineConfig, LoadFailurePolicy};
use crate::contract::trt::RequestData;
use crate::contract::vllm::{CachedRequestData, ConnectorOutput, Match, NewRequestData};
use crate::contract::{Channel, RequestView, Violation, trt, vllm};
use crate::layout::BlockId;
use crate::request::{
    FinishReason, Finished, Output, Params, Request, RequestId, RequestStatus, SubmitError,
};
use crate::worker::Sequence;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// How many requests that have ended are remembered, so that a late report can be named.
const RETIRED_MAX: usize = 4096;

/// The scheduler half of a connector, and whose rules hold.
pub(crate) enum Seam {
    None,
    Vllm(Box<dyn vllm::SchedulerConnector>),
    Trt(Box<dyn trt::SchedulerConnector>),
}

impl Seam {
    fn matched(&mut self, request: &RequestView<'_>, computed: usize) -> Match {
        match self {
            Self::None => Match::NONE,
            Self::Vllm(connector) => connector.get_num_new_matched_tokens(request, computed),
            Self::Trt(connector) => {
                let (tokens, load_async) = connector.get_num_new_matched_tokens(request, computed);
                Match::Tokens { tokens, load_async }
            }
        }
    }

    fn allocated(&mut self, request: &RequestView<'_>, blocks: &[Vec<BlockId>], external: usize) {
        match self {
            Self::None => {}
            Self::Vllm(connector) => connector.update_state_after_alloc(request, blocks, external),
            Self::Trt(connector) => connector.update_state_after_alloc(request, &pages(blocks)),
        }
    }

    fn finished(
        &mut self,
        request: &RequestView<'_>,
        blocks: &[Vec<BlockId>],
    ) -> (bool, Option<Params>) {
        match self {
            Self::None => (false, None),
            Self::Vllm(connector) => connector.request_finished(request, blocks),
            Self::Trt(connector) => (connector.request_finished(request, &pages(blocks)), None),
        }
    }

    const fn is_trt(&self) -> bool {
        matches!(self, Self::Trt(_))
    }
}

fn pages(blocks: &[Vec<BlockId>]) -> Vec<Vec<i32>> {
    blocks.iter().map(|group| group.iter().map(|id| trt::page(*id)).collect()).collect()
}

/// An asynchronous load.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// Tokens in the cache once it is done.
    tokens: usize,
    /// Tokens that no failure has been reported of.
    valid: usize,
    done: bool,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    id: RequestId,
    prompt_len: usize,
    /// The prompt, and what has been said.
    tokens: Vec<u32>,
    max_tokens: usize,
    stop_token: Option<u32>,
    params: Option<Params>,
    status: RequestStatus,
    computed: usize,
    /// Tokens that were in the cache when the request was admitted.
    cached: usize,
    tables: Tables,
    hashes: Vec<Vec<BlockHash>>,
    load: Option<Load>,
    preempted: bool,
    /// After the end: who still holds its blocks.
    sending: bool,
    receiving: bool,
    /// TensorRT-LLM: an abort that waits for the load.
    abort: bool,
    /// TensorRT-LLM: tokens and pages that have been in an iteration's metadata; `None` before.
    told: Option<(usize, Vec<usize>)>,
    /// Tokens that the connector loads, or has loaded, for its admission.
    external: usize,
}

impl Entry {
    fn view(&self) -> RequestView<'_> {
        RequestView {
            id: &self.id,
            number: self.number,
            prompt: &self.tokens[..self.prompt_len],
            tokens: &self.tokens,
            computed: self.computed,
            params: self.params.as_ref(),
            status: self.status,
            block_hashes: &self.hashes,
        }
    }

    fn is_loading(&self) -> bool {
        self.status == RequestStatus::WaitingForRemoteKvs && self.load.is_some_and(|it| !it.done)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    New,
    Resumed,
    Running,
}

#[derive(Debug)]
struct Item {
    number: u64,
    admission: Admission,
    count: usize,
    new_blocks: Vec<Vec<BlockId>>,
}

/// What one step does.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    items: Vec<Item>,
    preempted: Vec<RequestId>,
    pub(crate) finished: Vec<RequestId>,
    pub(crate) has_sync_loads: bool,
    /// Requests that began to load, by number.
    pub(crate) loading: Vec<u64>,
}

impl Plan {
    pub(crate) fn tokens(&self) -> usize {
        self.items.iter().map(|item| item.count).sum()
    }
}

/// Whether a report about a request makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Expected,
    Unknown,
    Ended,
    NotHeld,
    NotFinished,
    NotLoading,
}

pub(crate) struct Scheduler {
    pub(crate) cache: CacheManager,
    seam: Seam,
    requests: BTreeMap<u64, Entry>,
    numbers: FxHashMap<RequestId, u64>,
    waiting: VecDeque<u64>,
    running: Vec<u64>,
    limits: Limits,
    next_number: u64,
    steps: u64,
    /// Since the last step.
    finished: Vec<RequestId>,
    restarted: Vec<RequestId>,
    /// TensorRT-LLM: requests that began to save, by number.
    saving: Vec<u64>,
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
            saving: vec![],
            retired: FxHashMap::default(),
            retired_order: VecDeque::new(),
            outputs: vec![],
            violations: vec![],
            preemptions: 0,
        }
    }

    pub(crate) fn seam(&mut self) -> &mut Seam {
        &mut self.seam
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

    /// A new entry, in no queue.
    fn enter(&mut self, request: Request) -> Result<u64, SubmitError> {
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
            abort: false,
            told: None,
            external: 0,
        };
        self.requests.insert(number, entry);
        Ok(number)
    }

    /// TensorRT-LLM counts on every block a request could ever have; vLLM on those it has at once.
    fn chunk(&self, tokens: usize, chunk: usize) -> usize {
        if self.seam.is_trt() { tokens } else { chunk }
    }

    pub(crate) fn submit(&mut self, request: Request) -> Result<(), SubmitError> {
        self.validate(&request)?;
        let number = self.enter(request)?;
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

    /// A request that is refused before it could be scheduled, of which a connector is told.
    pub(crate) fn reject(&mut self, request: Request) -> Result<(), SubmitError> {
        let number = self.enter(request)?;
        self.finish(number, FinishReason::Abort);
        Ok(())
    }

    /// Ends a request; whether there was one that could be ended.
    pub(crate) fn abort(&mut self, id: &RequestId) -> bool {
        let Some(number) = self.numbers.get(id).copied() else { return false };
        let trt = self.seam.is_trt();
        let entry = self.entry_mut(number);
        if matches!(entry.status, RequestStatus::Finished(_)) {
            return false;
        }
        if trt && entry.is_loading() {
            return !std::mem::replace(&mut entry.abort, true);
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

    /// Requests that have ended since the last step, of which workers do not know yet.
    pub(crate) fn has_news(&self) -> bool {
        !self.finished.is_empty() || !self.restarted.is_empty()
    }

    /// Live requests: those that have not ended, and those whose blocks somebody still holds.
    pub(crate) fn live(&self) -> Vec<RequestId> {
        self.requests.values().map(|entry| entry.id.clone()).collect()
    }

    /// How many requests keep blocks after their end.
    pub(crate) fn held(&self) -> usize {
        self.requests.values().filter(|it| it.sending || it.receiving).count()
    }

    pub(crate) fn take_saving(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.saving)
    }

    pub(crate) fn number_to_id(&self, number: u64) -> Option<RequestId> {
        self.requests.get(&number).map(|entry| entry.id.clone())
    }
}

/// Making a plan.
impl Scheduler {
    pub(crate) fn schedule(&mut self) -> Plan {
        let mut plan = Plan {
            preempted: std::mem::take(&mut self.restarted),
            finished: std::mem::take(&mut self.finished),
            ..Plan::default()
        };
        self.steps += 1;
        let mut budget = self.limits.step_tokens;
        let preemptions = self.preemptions;
        self.schedule_running(&mut budget, &mut plan);
        if preemptions == self.preemptions {
            self.schedule_waiting(&mut budget, &mut plan);
        }
        plan
    }

    fn schedule_running(&mut self, budget: &mut usize, plan: &mut Plan) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let number = self.running[at];
            let entry = self.entry(number);
            let count =
                (entry.tokens.len() - entry.computed).min(*budget).min(self.limits.chunk_tokens);
            let new_blocks = loop {
                if let Some(new) = self.allocate(number, None, count) {
                    break new;
                }
                debug_assert!(!self.seam.is_trt(), "all blocks were there at admission");
                let victim = *self.running.last().expect("at least this request runs");
                // A request that lost its blocks to others that only wait would get them back, and
                // lose them again, for ever.
                if victim == number && self.evict_waiting(None, plan) {
                    continue;
                }
                // Whoever came last goes first.
                self.running.pop();
                self.preempt(victim);
                plan.preempted.push(self.entry(victim).id.clone());
                if victim == number {
                    return;
                }
            };
            *budget -= count;
            plan.items.push(Item { number, admission: Admission::Running, count, new_blocks });
            at += 1;
        }
    }

    /// Room for `count` more tokens.
    fn allocate(
        &mut self,
        number: u64,
        hit: Option<&Hit>,
        count: usize,
    ) -> Option<Vec<Vec<BlockId>>> {
        let entry = self.requests.get_mut(&number).expect("queues name live requests");
        let next = entry.computed;
        self.cache.allocate(&mut entry.tables, hit, next, next + count)
    }

    /// Takes the blocks of a request that is in no queue, and puts it back to the first place.
    fn preempt(&mut self, number: u64) {
        self.start_over(number);
        self.waiting.push_front(number);
    }

    /// Takes the blocks of a request: everything is to be computed, or loaded, again.
    fn start_over(&mut self, number: u64) {
        let entry = self.requests.get_mut(&number).expect("queues name live requests");
        self.cache.release(&mut entry.tables);
        entry.status = RequestStatus::Preempted;
        (entry.computed, entry.cached, entry.preempted, entry.load) = (0, 0, true, None);
        self.preemptions += 1;
    }

    /// Takes the blocks of the last request that waits after its load, but of `keep`; whether there
    /// was one.
    fn evict_waiting(&mut self, keep: Option<u64>, plan: &mut Plan) -> bool {
        let holds = |number: &&u64| {
            let entry = self.entry(**number);
            !entry.is_loading() && !entry.tables.is_empty() && keep != Some(entry.number)
        };
        let Some(victim) = self.waiting.iter().rev().find(holds).copied() else { return false };
        self.start_over(victim);
        plan.preempted.push(self.entry(victim).id.clone());
        true
    }

    fn schedule_waiting(&mut self, budget: &mut usize, plan: &mut Plan) {
        let mut at = 0;
        while at < self.waiting.len() && *budget > 0 && self.running.len() < self.limits.running {
            let number = self.waiting[at];
            if self.entry(number).is_loading() {
                at += 1;
                continue;
            }
            self.settle_load(number);
            match self.admit(number, *budget) {
                Admitted::NotYet => at += 1,
                Admitted::Loading => {
                    plan.loading.push(number);
                    at += 1;
                }
                Admitted::NoRoom => {
                    // Requests that were loaded, and wait, could hold so many blocks that none of
                    // them can go on.
                    let idle = plan.items.is_empty() && self.running.is_empty();
                    if !idle || self.seam.is_trt() || !self.evict_waiting(Some(number), plan) {
                        break;
                    }
                }
                Admitted::Running(item) => {
                    self.waiting.remove(at);
                    self.running.push(number);
                    *budget -= item.count;
                    let entry = self.entry_mut(number);
                    let loaded = entry.load.take().is_some();
                    plan.has_sync_loads |= entry.external > 0 && !loaded;
                    plan.items.push(item);
                }
            }
        }
    }

    /// What a load that ended leaves of a request that is to be admitted again.
    fn settle_load(&mut self, number: u64) {
        let entry = self.requests.get_mut(&number).expect("queues name live requests");
        let (RequestStatus::WaitingForRemoteKvs, Some(load)) = (entry.status, entry.load) else {
            return;
        };
        entry.status =
            if entry.preempted { RequestStatus::Preempted } else { RequestStatus::Waiting };
        // What came before the window of a token in the midst of a load is not here.
        let usable = self.cache.keeps_all() || load.valid == load.tokens;
        let valid = if usable { load.valid } else { 0 };
        // The last token is computed here, also if it came along.
        let computed = valid.min(entry.tokens.len() - 1);
        if computed == 0 {
            self.cache.release(&mut entry.tables);
            (entry.cached, entry.load) = (0, None);
            return;
        }
        (entry.computed, entry.cached) = (computed, computed);
        self.cache.offer(&mut entry.tables, &entry.hashes, computed);
    }

    fn admit(&mut self, number: u64, budget: usize) -> Admitted {
        if self.entry(number).computed > 0 {
            return self.admit_loaded(number, budget);
        }
        if self.seam.is_trt() && !self.fits_to_the_end(number) {
            return Admitted::NoRoom;
        }
        let entry = self.requests.get(&number).expect("queues name live requests");
        let hit = self.cache.find(&entry.hashes, entry.tokens.len() - 1);
        let matched = self.seam.matched(&entry.view(), hit.tokens);
        let Match::Tokens { tokens, load_async } = matched else { return Admitted::NotYet };
        let (external, load_async) = self.audit_match(number, hit.tokens, tokens, load_async);

        let entry = self.requests.get_mut(&number).expect("queues name live requests");
        let have = hit.tokens + external;
        let next = have.min(entry.tokens.len() - 1);
        let most = budget.min(self.limits.chunk_tokens);
        let count = if load_async { 0 } else { (entry.tokens.len() - have).min(most) };
        let Some(new_blocks) =
            self.cache.allocate(&mut entry.tables, Some(&hit), next, have + count)
        else {
            debug_assert!(!self.seam.is_trt(), "all blocks were there");
            return Admitted::NoRoom;
        };
        self.seam.allocated(&entry.view(), &entry.tables.blocks, external);
        (entry.cached, entry.external) = (have, external);
        if load_async {
            entry.status = RequestStatus::WaitingForRemoteKvs;
            entry.load = Some(Load { tokens: have, valid: have, done: false });
            return Admitted::Loading;
        }
        entry.computed = have;
        Admitted::Running(Self::start(entry, count, new_blocks))
    }

    /// A request that has its blocks already.
    fn admit_loaded(&mut self, number: u64, budget: usize) -> Admitted {
        let entry = self.entry(number);
        let most = budget.min(self.limits.chunk_tokens);
        let count = (entry.tokens.len() - entry.computed).min(most);
        let Some(new_blocks) = self.allocate(number, None, count) else {
            return Admitted::NoRoom;
        };
        let entry = self.requests.get_mut(&number).expect("queues name live requests");
        if let Seam::Vllm(connector) = &mut self.seam {
            connector.update_state_after_alloc(&entry.view(), &entry.tables.blocks, 0);
        }
        Admitted::Running(Self::start(entry, count, new_blocks))
    }

    fn start(entry: &mut Entry, count: usize, new_blocks: Vec<Vec<BlockId>>) -> Item {
        let resumed = entry.status == RequestStatus::Preempted;
        entry.status = RequestStatus::Running;
        let admission = if resumed { Admission::Resumed } else { Admission::New };
        Item { number: entry.number, admission, count, new_blocks }
    }

    fn audit_match(
        &mut self,
        number: u64,
        local: usize,
        tokens: usize,
        load_async: bool,
    ) -> (usize, bool) {
        let entry = self.entry(number);
        let id = || entry.id.clone();
        // A state after the last token is no use to whoever computes that token again.
        let whole = load_async && !self.limits.has_state && !self.seam.is_trt();
        let available = entry.tokens.len() - usize::from(!whole) - local;
        let violation = if tokens > available {
            Violation::TooManyTokens { id: id(), tokens, available }
        } else if tokens == 0 && load_async {
            Violation::AsyncWithoutTokens { id: id() }
        } else {
            return (tokens, load_async);
        };
        self.violations.push(violation);
        (0, false)
    }

    /// TensorRT-LLM's GUARANTEED_NO_EVICT: whether all blocks are free that this request and all
    /// that were admitted before it may come to need.
    fn fits_to_the_end(&self, number: u64) -> bool {
        let demand = |entry: &Entry| {
            let total = entry.prompt_len + entry.max_tokens;
            self.cache.demand(total, total)
        };
        let mut needed = demand(self.entry(number));
        let admitted = self.requests.values().filter(|entry| !entry.tables.is_empty());
        for entry in admitted.filter(|entry| !matches!(entry.status, RequestStatus::Finished(_))) {
            let pools = demand(entry).into_iter().zip(self.cache.held(&entry.tables));
            for (needed, (demand, held)) in needed.iter_mut().zip(pools) {
                *needed += demand.saturating_sub(held);
            }
        }
        self.cache.free().iter().zip(needed).all(|(free, needed)| *free >= needed)
    }
}

enum Admitted {
    /// The connector does not know yet.
    NotYet,
    /// Not enough blocks.
    NoRoom,
    /// It has blocks, and waits for its load.
    Loading,
    Running(Item),
}

/// What a plan means to workers.
impl Scheduler {
    pub(crate) fn batch(&self, plan: &Plan) -> Vec<Sequence> {
        let sequences = plan.items.iter().map(|item| {
            let entry = self.entry(item.number);
            Sequence {
                tokens: entry.tokens[entry.computed..entry.computed + item.count].to_vec(),
                start: entry.computed,
                tables: entry.tables.blocks.clone(),
            }
        });
        sequences.collect()
    }

    pub(crate) fn vllm_output(&self, plan: &Plan) -> vllm::SchedulerOutput {
        let mut output = vllm::SchedulerOutput {
            step: self.steps,
            finished_req_ids: plan.finished.clone(),
            preempted_req_ids: plan.preempted.clone(),
            has_sync_kv_loads: plan.has_sync_loads,
            ..Default::default()
        };
        for item in &plan.items {
            let entry = self.entry(item.number);
            let (id, computed) = (entry.id.clone(), entry.computed);
            output.num_scheduled_tokens.insert(id.clone(), item.count);
            if item.admission == Admission::New {
                output.scheduled_new_reqs.push(NewRequestData {
                    id,
                    prompt: entry.tokens[..entry.prompt_len].to_vec(),
                    block_ids: entry.tables.blocks.clone(),
                    num_computed_tokens: computed,
                });
                continue;
            }
            let resumed = item.admission == Admission::Resumed;
            let blocks = if resumed { &entry.tables.blocks } else { &item.new_blocks };
            output.scheduled_cached_reqs.push(CachedRequestData {
                id,
                resumed,
                block_ids: blocks.clone(),
                num_computed_tokens: computed,
                num_output_tokens: entry.tokens.len() - entry.prompt_len,
            });
        }
        output
    }

    pub(crate) fn trt_output(&mut self, plan: &Plan) -> trt::SchedulerOutput {
        let mut output = trt::SchedulerOutput::default();
        for item in &plan.items {
            let entry = self.requests.get_mut(&item.number).expect("plans name live requests");
            let blocks = &entry.tables.blocks;
            let is_new = entry.told.is_none();
            let (tokens, told) = entry.told.take().unwrap_or((0, vec![0; blocks.len()]));
            let data = RequestData {
                request_id: item.number,
                new_tokens: entry.tokens[tokens..].to_vec(),
                new_block_ids: blocks
                    .iter()
                    .zip(told)
                    .map(|(group, told)| group[told..].iter().map(|id| trt::page(*id)).collect())
                    .collect(),
                computed_position: entry.computed - std::mem::take(&mut entry.external),
                num_scheduled_tokens: item.count,
            };
            entry.told = Some((entry.tokens.len(), blocks.iter().map(Vec::len).collect()));
            if is_new { &mut output.new_requests } else { &mut output.cached_requests }.push(data);
        }
        output
    }
}

/// What comes back.
impl Scheduler {
    /// Takes the token after each sequence of the plan.
    pub(crate) fn update(&mut self, plan: &Plan, sampled: &[u32], invalid: &[BlockId]) {
        let affected = self.invalidate(invalid);
        for (item, token) in plan.items.iter().zip(sampled) {
            if affected.contains(&item.number) {
                continue;
            }
            let entry = self.requests.get_mut(&item.number).expect("nothing ends during a step");
            entry.computed += item.count;
            let mut ended = None;
            if entry.computed == entry.tokens.len() {
                entry.tokens.push(*token);
                self.cache.extend_hashes(&mut entry.hashes, &entry.tokens);
                self.outputs.push(Output {
                    id: entry.id.clone(),
                    tokens: vec![*token],
                    finished: None,
                });
                if entry.stop_token == Some(*token) {
                    ended = Some(FinishReason::Stop);
                } else if entry.tokens.len() - entry.prompt_len == entry.max_tokens {
                    ended = Some(FinishReason::Length);
                }
            }
            self.cache.offer(&mut entry.tables, &entry.hashes, entry.computed);
            if let Some(reason) = ended {
                self.finish(item.number, reason);
            }
        }
    }

    /// Ends a request, and frees its blocks unless somebody holds them.
    fn finish(&mut self, number: u64, reason: FinishReason) {
        self.waiting.retain(|other| *other != number);
        self.running.retain(|other| *other != number);
        let entry = self.requests.get_mut(&number).expect("only live requests end");
        entry.receiving = entry.is_loading();
        entry.status = RequestStatus::Finished(reason);
        let (sending, params) = self.seam.finished(&entry.view(), &entry.tables.blocks);
        entry.sending = sending;
        if sending {
            self.saving.push(number);
        }
        self.finished.push(entry.id.clone());
        let finished = Finished { reason, params };
        match self.outputs.last_mut() {
            Some(last) if last.id == entry.id && last.finished.is_none() => {
                last.finished = Some(finished);
            }
            _ => {
                let id = entry.id.clone();
                self.outputs.push(Output { id, tokens: vec![], finished: Some(finished) });
            }
        }
        self.free_unless_held(number, sending);
    }

    fn free_unless_held(&mut self, number: u64, was_sending: bool) {
        let entry = self.entry(number);
        if entry.sending || entry.receiving {
            return;
        }
        let mut entry = self.requests.remove(&number).expect("looked up just now");
        self.cache.release(&mut entry.tables);
        self.numbers.remove(&entry.id);
        self.retired.insert(entry.id.clone(), (number, was_sending));
        self.retired_order.push_back((number, entry.id));
        if self.retired_order.len() > RETIRED_MAX {
            let oldest = self.retired_order.pop_front();
            let (number, id) = oldest.expect("there are more than the most");
            if self.retired.get(&id).is_some_and(|(latest, _)| *latest == number) {
                self.retired.remove(&id);
            }
        }
    }

    /// Takes blocks out of use that could not be loaded; the requests of the step whose tokens
    /// mean nothing now.
    fn invalidate(&mut self, invalid: &[BlockId]) -> Vec<u64> {
        if invalid.is_empty() {
            return vec![];
        }
        // Only engines with a single group get here.
        let block_tokens = self.cache.block_tokens(0);
        let first_bad = |entry: &Entry, tokens: usize| {
            let blocks = entry.tables.blocks[0].iter().take(tokens.div_ceil(block_tokens));
            blocks.into_iter().position(|id| invalid.contains(id)).map(|at| at * block_tokens)
        };
        let waiting: Vec<_> = self.waiting.iter().copied().collect();
        for number in waiting {
            let entry = self.entry_mut(number);
            let Some(load) = entry.load.filter(|_| entry.is_loading()) else { continue };
            if let Some(valid) = first_bad(entry, load.tokens) {
                entry.load = Some(Load { valid: load.valid.min(valid), ..load });
                if self.limits.load_failure == LoadFailurePolicy::Fail {
                    self.finish(number, FinishReason::Error);
                }
            }
        }
        let mut affected = vec![];
        for number in self.running.clone() {
            let entry = self.entry(number);
            let Some(valid) = first_bad(entry, entry.cached) else { continue };
            affected.push(number);
            let entry = self.requests.get_mut(&number).expect("it runs");
            self.cache.retract(&mut entry.tables, valid);
            if self.limits.load_failure == LoadFailurePolicy::Fail {
                self.finish(number, FinishReason::Error);
                continue;
            }
            let entry = self.requests.get_mut(&number).expect("it runs");
            if self.cache.keeps_all() {
                (entry.computed, entry.cached) = (valid, valid);
            } else {
                // What came before the window of the first bad token is gone.
                self.restarted.push(entry.id.clone());
                self.running.retain(|other| *other != number);
                self.preempt(number);
            }
        }
        affected
    }

    /// Takes what all ranks have reported.
    pub(crate) fn transferred(&mut self, output: &ConnectorOutput) {
        for id in &output.finished_recving {
            let number = self.numbers[id];
            let fail = self.limits.load_failure == LoadFailurePolicy::Fail;
            let entry = self.entry_mut(number);
            if entry.receiving {
                entry.receiving = false;
                let sending = entry.sending;
                self.free_unless_held(number, sending);
                continue;
            }
            let failed = output.failed_recving.contains(id);
            let load = entry.load.as_mut().expect("it waits for its load");
            load.done = true;
            if failed {
                load.valid = 0;
            }
            if (failed && fail) || entry.abort {
                let error = failed && !entry.abort;
                self.finish(number, if error { FinishReason::Error } else { FinishReason::Abort });
            }
        }
        for id in &output.finished_sending {
            let number = self.numbers[id];
            self.entry_mut(number).sending = false;
            self.free_unless_held(number, true);
        }
    }

    /// Whether a rank may report `id` there.
    pub(crate) fn standing(&self, id: &RequestId, channel: Channel) -> Standing {
        let entry = self.numbers.get(id).map(|number| self.entry(*number));
        match (channel, entry) {
            (Channel::Sending, Some(entry)) if entry.sending => Standing::Expected,
            (Channel::Sending, Some(entry)) => match entry.status {
                RequestStatus::Finished(_) => Standing::NotHeld,
                _ => Standing::NotFinished,
            },
            (Channel::Recving | Channel::Failed, Some(entry)) => {
                if entry.is_loading() || entry.receiving {
                    Standing::Expected
                } else {
                    Standing::NotLoading
                }
            }
            (channel, None) => match self.retired.get(id) {
                Some((_, false)) if channel == Channel::Sending => Standing::NotHeld,
                Some(_) => Standing::Ended,
                None => Standing::Unknown,
            },
        }
    }
}
