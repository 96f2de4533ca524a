//! Results of a step: sampled tokens, ends of requests, the ranks' reports.

use super::Scheduler;
use super::entry::{Entry, Load};
use super::plan::Plan;
use crate::config::{LoadFailurePolicy, Rank};
use crate::contract::vllm::ConnectorOutput;
use crate::contract::{Channel, Violation};
use crate::layout::BlockId;
use crate::request::{FinishReason, Finished, Output, RequestId, RequestStatus};

/// Number of ended requests that are remembered, to distinguish a late report from one of an
/// unknown request.
const RETIRED_MAX: usize = 4096;

impl Scheduler {
    /// Takes the sampled token after each sequence of the plan.
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
            match self.managed {
                Some(_) => self.store_computed(item.number),
                None => self.cache.offer(&mut entry.tables, &entry.hashes, entry.computed),
            }
            if let Some(reason) = ended {
                self.finish(item.number, reason);
            }
        }
    }

    /// Ends a request, and frees its blocks unless the connector holds them.
    pub(super) fn finish(&mut self, number: u64, reason: FinishReason) {
        self.waiting.retain(|other| *other != number);
        self.running.retain(|other| *other != number);
        let entry = self.requests.get_mut(&number).expect("only live requests end");
        // The block manager frees the blocks of a load when it has ended.
        entry.receiving = entry.is_loading() && self.managed.is_none();
        entry.status = RequestStatus::Finished(reason);
        if self.managed.is_none() {
            self.cache.leave_behind_at_end(&mut entry.tables, entry.computed);
        }
        let (sending, params) = self.seam.finished(&entry.view(), &entry.tables.blocks);
        entry.sending = sending;
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
        self.release(number);
        let entry = self.requests.remove(&number).expect("looked up just now");
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

    /// Takes blocks out of use that could not be loaded. Returns the requests of the step whose sampled
    /// tokens are invalid.
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
            if failed && fail {
                self.finish(number, FinishReason::Error);
            }
        }
        for id in &output.finished_sending {
            let number = self.numbers[id];
            self.entry_mut(number).sending = false;
            self.free_unless_held(number, true);
        }
    }

    /// Breach by a rank that reports `id` on `channel`; `None` if it may.
    pub(crate) fn breach(&self, rank: Rank, channel: Channel, id: &RequestId) -> Option<Violation> {
        let entry = self.numbers.get(id).map(|number| self.entry(*number));
        let id = id.clone();
        Some(match (channel, entry) {
            (Channel::Sending, Some(entry)) if entry.sending => return None,
            (Channel::Sending, Some(entry)) => match entry.status {
                RequestStatus::Finished(_) => Violation::NotHeld { rank, channel, id },
                _ => Violation::NotFinished { rank, channel, id },
            },
            (_, Some(entry)) if entry.is_loading() || entry.receiving => return None,
            (_, Some(_)) => Violation::NotLoading { rank, channel, id },
            (_, None) => match self.retired.get(&id) {
                Some((_, false)) if channel == Channel::Sending => {
                    Violation::NotHeld { rank, channel, id }
                }
                Some(_) => Violation::AlreadyEnded { rank, channel, id },
                None => Violation::UnknownId { rank, channel, id: id.as_str().to_owned() },
            },
        })
    }
}
