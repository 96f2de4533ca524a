//! Runs the queued operations of one directory.

use crate::carrier::Carrier;
use crate::files::Files;
use crate::options::Fault;
use crate::queue::Task;
use crate::stored::Stored;
use kvferry_blocks::{Outcome, Transfer, TransferId, TransferMode};
use std::sync::Arc;

/// A directory of requests: files of blocks, or a block store, or both.
#[derive(Debug)]
pub(crate) struct Directory {
    path: Arc<str>,
    files: Option<Files>,
    store: Option<Stored>,
    has_failed: bool,
}

impl Directory {
    pub(crate) fn new(path: Arc<str>) -> Self {
        Self { path, files: None, store: None, has_failed: false }
    }

    /// Returns how the copies among the tasks have ended.
    pub(crate) fn carry_out(
        &mut self,
        carrier: &Carrier,
        tasks: Vec<Task>,
    ) -> Vec<(TransferId, Outcome)> {
        let mut copies = Vec::with_capacity(tasks.len());
        for task in tasks {
            match task {
                Task::Copy(transfer) => copies.push(transfer),
                Task::Remove(discard) => {
                    if let Some(files) = &self.files {
                        files.remove(carrier, &discard);
                    }
                }
            }
        }
        let mut outcomes = vec![Outcome::Failed; copies.len()];
        let is_wanted = |transfer: &&Transfer| carrier.ask(transfer) == Fault::None;
        let wanted: Vec<usize> = (0..copies.len()).filter(|&at| is_wanted(&&copies[at])).collect();
        let chosen: Vec<&Transfer> = wanted.iter().map(|&at| &copies[at]).collect();
        let carried = match chosen.first().map(|transfer| transfer.mode) {
            None => Ok(Vec::new()),
            Some(TransferMode::Gds) => self.in_store(carrier, &chosen),
            Some(_) => self.in_files(carrier, &chosen),
        };
        match carried {
            Ok(carried) => {
                for (at, outcome) in wanted.into_iter().zip(carried) {
                    outcomes[at] = outcome;
                }
                self.has_failed &= copies.is_empty();
            }
            Err(why) => self.complain(&why),
        }
        for (transfer, outcome) in copies.iter().zip(&outcomes) {
            carrier.count(transfer, *outcome);
        }
        copies.iter().map(|transfer| transfer.id).zip(outcomes).collect()
    }

    fn in_store(
        &mut self,
        carrier: &Carrier,
        transfers: &[&Transfer],
    ) -> Result<Vec<Outcome>, String> {
        let store = match &mut self.store {
            Some(store) => store,
            empty => empty.insert(Stored::open(carrier, &self.path)?),
        };
        let outcomes = store.carry(carrier, transfers);
        if outcomes.is_err() {
            // The next call opens it again.
            self.store = None;
        }
        outcomes
    }

    fn in_files(
        &mut self,
        carrier: &Carrier,
        transfers: &[&Transfer],
    ) -> Result<Vec<Outcome>, String> {
        let files = match &mut self.files {
            Some(files) => files,
            empty => empty.insert(Files::open(carrier, &self.path)?),
        };
        transfers.iter().map(|transfer| files.carry(carrier, transfer)).collect()
    }

    /// Once until a copy succeeds again.
    fn complain(&mut self, why: &str) {
        if !std::mem::replace(&mut self.has_failed, true) {
            let directory = &*self.path;
            tracing::warn!(
                directory,
                "blocks can't be offloaded to the directory, or not be read from it: {why}; requests compute them"
            );
        }
    }
}
