//! State that the groups of a manager share.

use crate::config::Config;
use crate::events::EventRing;
use crate::transfer::{Action, Job, Transfers};
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) transfers: Transfers,
    pub(crate) actions: VecDeque<Action>,
    pub(crate) events: EventRing,
    /// The latest time that a caller gave.
    pub(crate) now_ms: u64,
    /// Resets of the manager.
    pub(crate) resets: u32,
    /// Release counter; lower is older.
    tick: u64,
    pub(crate) offload_priority_min: u8,
    pub(crate) tokens_per_block: u32,
    /// See [`Config`](crate::Config).
    pub(crate) background_per_call: u32,
}

impl Shared {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            transfers: Transfers::default(),
            actions: VecDeque::with_capacity(1024),
            events: EventRing::new(config.events),
            now_ms: 0,
            resets: 0,
            tick: 0,
            offload_priority_min: config.secondary_offload_min_priority,
            tokens_per_block: config.tokens_per_block,
            background_per_call: config.background_per_call,
        }
    }

    pub(crate) fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    /// Opens a transfer, and hands it out if it depends on none.
    pub(crate) fn start(&mut self, job: Job, after: [Option<u32>; 2]) -> u32 {
        let id = self.transfers.open(job, after);
        if after == [None; 2] {
            self.hand_out(id);
        }
        id
    }

    pub(crate) fn hand_out(&mut self, id: u32) {
        let transfer = self.transfers.issue(id);
        self.actions.push_back(Action::Copy(transfer));
    }
}
