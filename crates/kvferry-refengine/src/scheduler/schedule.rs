//! Making the plan of a step: which requests compute how many tokens, or begin to load.

use super::Scheduler;
use super::entry::{Entry, Load};
use super::plan::{Admission, Item, Plan};
use super::seam::Seam;
use crate::cache::Hit;
use crate::contract::Violation;
use crate::contract::vllm::Match;
use crate::layout::BlockId;
use crate::request::RequestStatus;

/// Result of getting blocks for a running request's next tokens.
pub(super) enum Growth {
    /// The request has the blocks. Lists the new ones, per group; nothing under the block manager.
    Now(Vec<Vec<BlockId>>),
    /// The request has the blocks once copies have ended.
    Later,
    /// The request has the blocks once another request has lost its own.
    NoRoom,
}

pub(super) enum Admitted {
    /// The connector does not know yet.
    NotYet,
    /// Not enough blocks.
    NoRoom,
    /// The request has blocks and waits for its load.
    Loading,
    Running(Item),
}

impl Scheduler {
    pub(crate) fn schedule(&mut self) -> Plan {
        let mut plan = Plan {
            preempted: std::mem::take(&mut self.restarted),
            finished: std::mem::take(&mut self.finished),
            ..Plan::default()
        };
        self.steps += 1;
        self.take_ended_copies();
        let mut budget = self.limits.step_tokens;
        let preemptions = self.preemptions;
        self.schedule_running(&mut budget, &mut plan);
        if preemptions == self.preemptions {
            self.schedule_waiting(&mut budget, &mut plan);
        }
        self.carry_out_actions();
        plan
    }

    fn schedule_running(&mut self, budget: &mut usize, plan: &mut Plan) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let number = self.running[at];
            let entry = self.entry(number);
            if entry.waits_for_pages() {
                at += 1;
                continue;
            }
            let count =
                (entry.tokens.len() - entry.computed).min(*budget).min(self.limits.chunk_tokens);
            let new_blocks = loop {
                match self.grow(number, count) {
                    Growth::Now(new) => break Some(new),
                    Growth::Later => break None,
                    Growth::NoRoom => {}
                }
                let victim = *self.running.last().expect("at least this request runs");
                // Take blocks from waiting requests before the last running one gives up its own: it
                // would get them back and lose them again, for ever.
                if victim == number && self.evict_waiting(None, plan) {
                    continue;
                }
                // The last admitted request loses its blocks first.
                self.running.pop();
                self.preempt(victim);
                plan.preempted.push(self.entry(victim).id.clone());
                if victim == number {
                    return;
                }
            };
            let Some(new_blocks) = new_blocks else {
                at += 1;
                continue;
            };
            *budget -= count;
            plan.items.push(Item { number, admission: Admission::Running, count, new_blocks });
            at += 1;
        }
    }

    /// Has blocks for `count` more tokens.
    fn grow(&mut self, number: u64, count: usize) -> Growth {
        if self.managed.is_some() {
            return self.grow_managed(number, count);
        }
        self.allocate(number, None, count).map_or(Growth::NoRoom, Growth::Now)
    }

    /// Allocates blocks for `count` more tokens.
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

    /// Takes the blocks of a request that is in no queue, and puts it first in the waiting queue.
    pub(super) fn preempt(&mut self, number: u64) {
        self.start_over(number);
        self.waiting.push_front(number);
    }

    /// Takes the blocks of a request. All its tokens must be computed or loaded again.
    fn start_over(&mut self, number: u64) {
        self.release(number);
        let entry = self.entry_mut(number);
        entry.status = RequestStatus::Preempted;
        (entry.computed, entry.cached, entry.preempted, entry.load) = (0, 0, true, None);
        self.preemptions += 1;
    }

    /// Takes the blocks of the last request, other than `keep`, that waits after its load. False if
    /// there is none.
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
                Admitted::NotYet | Admitted::Loading => at += 1,
                Admitted::NoRoom => {
                    // Waiting requests that were loaded may hold so many blocks that none of them can
                    // continue.
                    let idle = plan.items.is_empty() && self.running.is_empty();
                    if !idle || !self.evict_waiting(Some(number), plan) {
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

    /// Takes over what an ended load has loaded, before the request is admitted again.
    fn settle_load(&mut self, number: u64) {
        let entry = self.requests.get_mut(&number).expect("queues name live requests");
        let (RequestStatus::WaitingForRemoteKvs, Some(load)) = (entry.status, entry.load) else {
            return;
        };
        entry.status =
            if entry.preempted { RequestStatus::Preempted } else { RequestStatus::Waiting };
        if self.managed.is_some() {
            (entry.computed, entry.cached) = (load.valid, load.valid);
            return;
        }
        // The blocks before the window of a token in the middle of the load were not loaded.
        let usable = self.cache.keeps_all() || load.valid == load.tokens;
        let valid = if usable { load.valid } else { 0 };
        // The last token is always computed here.
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
        if self.managed.is_some() {
            return self.admit_managed(number, budget);
        }
        if self.entry(number).computed > 0 {
            return self.admit_loaded(number, budget);
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

    /// Admits a request that has blocks from its load.
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

    pub(super) fn start(entry: &mut Entry, count: usize, new_blocks: Vec<Vec<BlockId>>) -> Item {
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
        // The last token cannot be computed again from a state that includes it.
        let whole = load_async && !self.limits.has_state;
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
}
