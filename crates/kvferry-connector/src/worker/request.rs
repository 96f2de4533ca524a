//! A producer's request on one rank: what of it is computed, and when that is announced.
//!
//! The engine says what a step *will* compute when it schedules the step, and that the step *was*
//! computed when an event has happened, perhaps much later. In between the request may lose its blocks
//! and be computed again. Each time is an *attempt*; events of an earlier attempt are dropped.

use super::pieces::Pieces;
use super::types::Announce;
use crate::metadata::Offer;
use crate::rank::{Rank, RankError};
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{BlockTable, HandoffId, Outcome, Progress, Refusal};
use kvferry_sys::sync::{Mutex, MutexGuard};
use std::ops::Range;
use std::sync::Arc;

/// A producer's request. Its lock is held for one call of the rank at a time.
#[derive(Debug)]
pub(super) struct ProducedRequest(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    transfer: HandoffId,
    /// Tokens to hand over.
    tokens: u32,
    /// Complete with the last of `tokens`; else with the request's end.
    eager: bool,
    attempt: u32,
    offered: bool,
    unannounced: Vec<BlockTable>,
    /// Tokens computed after the steps so far of this attempt.
    until: u32,
    complete: bool,
    ended: Option<Outcome>,
    held: bool,
}

/// A request's part of a step.
#[derive(Clone, Debug)]
pub(super) struct Part {
    request: Arc<ProducedRequest>,
    attempt: u32,
    /// Tokens computed before and after the step.
    from: u32,
    until: u32,
    pieces: Pieces,
}

impl ProducedRequest {
    pub(super) fn new(transfer: HandoffId) -> Self {
        Self(Mutex::new(Inner {
            transfer,
            tokens: 0,
            eager: false,
            attempt: 0,
            offered: false,
            unannounced: Vec::new(),
            until: 0,
            complete: false,
            ended: None,
            held: false,
        }))
    }

    /// A step is going to compute up to token `until`; `blocks` are new. `pieces` is given the
    /// chunk, and how many tokens are handed over.
    ///
    /// # Errors
    /// The rank refuses the offer.
    pub(super) fn compute(
        self: &Arc<Self>,
        rank: &Rank,
        offer: Option<Offer>,
        until: u32,
        blocks: Vec<BlockTable>,
        pieces: impl FnOnce(&Range<u32>, u32) -> Pieces,
    ) -> Result<Option<Part>, RankError> {
        let mut inner = self.0.lock();
        if inner.ended.is_some() {
            return Ok(None);
        }
        if let Some(offer) = offer {
            (inner.tokens, inner.eager) = (offer.tokens, offer.eager);
            (inner.until, inner.complete) = (0, false);
            inner.unannounced.clear();
            if !inner.offered {
                rank.offer(&inner.transfer)?;
                inner.offered = true;
            }
        }
        if !inner.offered || !inner.add(blocks) {
            return Ok(None);
        }
        let (from, until) = (inner.until, until.min(inner.tokens));
        if until <= from {
            return Ok(None);
        }
        inner.until = until;
        let pieces = pieces(&(from..until), inner.tokens);
        Ok(Some(Part { request: Arc::clone(self), attempt: inner.attempt, from, until, pieces }))
    }

    pub(super) fn restart(&self, rank: &Rank) {
        let mut inner = self.0.lock();
        inner.attempt += 1;
        (inner.until, inner.complete) = (0, false);
        inner.unannounced.clear();
        if inner.offered && inner.ended.is_none() {
            match rank.restart(&inner.transfer) {
                // `Unknown`: it has just ended. The rank reports that.
                Ok(()) | Err(RankError::Refused(Refusal::Unknown)) => {}
                // It was complete, and some of its readers may be done.
                Err(_) => {
                    let detail = "the producer's request lost its blocks when it was complete";
                    drop(rank.withdraw(&inner.transfer, WireCode::Revoked, detail));
                }
            }
        }
    }

    /// Withdraws the request: nothing of it can be fetched after this.
    pub(super) fn withdraw(&self, rank: &Rank, code: WireCode, detail: &str) {
        let mut inner = self.0.lock();
        inner.attempt += 1;
        if inner.ended.is_none() {
            drop(rank.withdraw(&inner.transfer, code, detail));
        }
    }

    /// Withdraws the request if no consumer has asked for it.
    pub(super) fn reclaim(&self, rank: &Rank) {
        let inner = self.0.lock();
        if inner.offered && inner.ended.is_none() {
            rank.reclaim(
                &inner.transfer,
                "no consumer had asked for it when its blocks were needed",
            );
        }
    }

    /// The request has ended and keeps its blocks. Called in order with what was computed of it.
    pub(super) fn finish(&self, rank: &Rank, side_data: Option<Vec<u8>>) {
        let mut inner = self.0.lock();
        if inner.ended.is_some() || inner.complete || !inner.offered {
            return;
        }
        if inner.until < inner.tokens {
            let (until, tokens) = (inner.until, inner.tokens);
            let detail = format!("{until} of {tokens} tokens were computed when it ended");
            drop(rank.withdraw(&inner.transfer, WireCode::Internal, &detail));
            return;
        }
        inner.complete(rank, side_data);
    }

    /// Holds the request, so that its end is reported. True if it has ended already.
    pub(super) fn hold(&self, rank: &Rank) -> bool {
        let mut inner = self.0.lock();
        inner.held = true;
        if !inner.offered {
            // The rank refused the offer. Consumers that ask for it get this.
            let why = "the producer could not offer it";
            drop(rank.withdraw(&inner.transfer, WireCode::Busy, why));
        }
        inner.ended.is_some() || !inner.offered
    }

    /// True if the engine waits for a report of the request's end.
    pub(super) fn is_held(&self) -> bool {
        self.0.lock().held
    }

    /// Records the outcome of the request's handoff. True if the request is held.
    pub(super) fn ended(&self, outcome: Outcome) -> bool {
        let mut inner = self.0.lock();
        inner.ended = Some(outcome);
        inner.held
    }
}

impl Inner {
    /// Adds blocks to announce. False if they do not continue the earlier ones.
    fn add(&mut self, blocks: Vec<BlockTable>) -> bool {
        if self.unannounced.is_empty() {
            self.unannounced = blocks;
            return true;
        }
        blocks.is_empty()
            || (blocks.len() == self.unannounced.len()
                && self
                    .unannounced
                    .iter_mut()
                    .zip(&blocks)
                    .all(|(all, new)| all.merge(new).is_ok()))
    }

    fn complete(&mut self, rank: &Rank, side_data: Option<Vec<u8>>) {
        let tables = std::mem::take(&mut self.unannounced);
        let progress = Progress::tokens(self.tokens);
        self.complete = true;
        let announced = rank.complete(&self.transfer, tables, progress, side_data);
        self.withdraw_if_refused(rank, announced);
    }

    fn advance(&mut self, rank: &Rank, progress: Progress) {
        let tables = std::mem::take(&mut self.unannounced);
        let announced = rank.advance(&self.transfer, tables, progress);
        self.withdraw_if_refused(rank, announced);
    }

    /// An announcement that does not continue the earlier ones is a bug. It costs only this request.
    fn withdraw_if_refused(&self, rank: &Rank, announced: Result<(), RankError>) {
        match announced {
            // `Unknown`: it has just ended. The rank reports that.
            Ok(()) | Err(RankError::Refused(Refusal::Unknown)) => {}
            Err(error) => {
                tracing::error!(transfer = %self.transfer, %error, "a handoff can't be announced");
                drop(rank.withdraw(&self.transfer, WireCode::Internal, &error.to_string()));
            }
        }
    }
}

impl Part {
    pub(super) fn request(&self) -> &ProducedRequest {
        &self.request
    }

    pub(super) const fn pieces(&self) -> Pieces {
        self.pieces
    }

    /// Announces the request's progress if a piece ends with these computed layers of the step.
    pub(super) fn layers(&self, rank: &Rank, layers: &Range<u32>) {
        if self.pieces.end_between(layers.start, layers.end)
            && let Some(mut inner) = self.current()
        {
            inner.advance(rank, Progress::tokens(self.from).and(layers.end, self.until));
        }
    }

    pub(super) fn step(&self, rank: &Rank, announce: Announce) {
        let Some(mut inner) = self.current() else { return };
        if inner.eager && self.until >= inner.tokens {
            inner.complete(rank, None);
        } else if announce != Announce::End {
            inner.advance(rank, Progress::tokens(self.until));
        }
    }

    /// The request, if this attempt at it is still under way.
    fn current(&self) -> Option<MutexGuard<'_, Inner>> {
        let inner = self.request.0.lock();
        let is_over = inner.complete || inner.ended.is_some();
        (inner.attempt == self.attempt && !is_over).then_some(inner)
    }
}
