//! The worker half of a producer.

use super::events::Job;
use super::pieces::Pieces;
use super::request::{Part, ProducedRequest};
use super::state::{Inner, State};
use crate::metadata::{Compute, Ending, EndingKind, Expect, RequestOutcome};
use crate::rank::RankError;
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{HandoffId, Outcome};
use std::sync::Arc;

impl Inner {
    /// Whether a piece of the current step's layers ends with this layer. Layers that are not reported
    /// belong to the next one that is.
    pub(super) fn ends_piece(&self, state: &State, layer: usize) -> bool {
        let done = u32::try_from(layer + 1).unwrap_or(u32::MAX);
        state.pieces.iter().any(|pieces| pieces.end_between(state.announced, done))
    }

    /// A request has arrived that will be offered.
    pub(super) fn expect(&self, Expect { request, transfer }: &Expect) {
        if let Err(error) = self.rank().expect(transfer) {
            // The offer is refused, too, and that is reported.
            tracing::debug!(request, %transfer, %error, "a handoff can't be expected");
        }
    }

    pub(super) fn compute(&self, state: &mut State, compute: Compute) {
        let Compute { request, offer, until, blocks } = compute;
        if let Some(offer) = &offer
            && !state.produced.contains_key(&request)
        {
            let transfer = offer.transfer.clone();
            let produced = Arc::new(ProducedRequest::new(transfer.clone()));
            state.produced_as.insert(transfer.clone(), request.clone());
            state.produced.insert(request.clone(), (transfer, produced));
        }
        let Some((_, produced)) = state.produced.get(&request) else { return };
        let (memory, announce) = (&self.memory, self.config.announce);
        let layers = memory.layout.layers().len() as u32;
        let pieces =
            |chunk: &_, tokens| Pieces::new(announce, layers, memory.token_bytes, chunk, tokens);
        match produced.compute(self.rank(), offer, until, blocks, pieces) {
            Ok(None) => {}
            Ok(Some(part)) => {
                let pieces = part.pieces();
                if !state.pieces.contains(&pieces) {
                    state.pieces.push(pieces);
                }
                state.parts.push(part);
            }
            Err(error) => {
                tracing::warn!(request, %error, "a request's KV can't be offered");
                let code = match &error {
                    RankError::Refused(refusal) => refusal.code(),
                    _ => WireCode::Internal,
                };
                self.lost(state, request, code, error.to_string());
            }
        }
    }

    pub(super) fn end(&self, state: &mut State, ending: Ending) {
        let Ending { request, transfer, how } = ending;
        let known = state.produced.get(&request).map(|(_, produced)| Arc::clone(produced));
        match (how, known) {
            (EndingKind::Withdrawn { code, detail, held }, known) => {
                let produced = known.unwrap_or_else(|| Arc::new(ProducedRequest::new(transfer)));
                produced.withdraw(self.rank(), code, &detail);
                if held {
                    self.sent(state, request);
                } else if !produced.is_held() {
                    state.forget(&request);
                }
            }
            (EndingKind::Held { side_data }, Some(produced)) => {
                self.run_job(None, Job::Finish(Arc::clone(&produced), side_data));
                if produced.hold(self.rank()) {
                    self.sent(state, request);
                }
            }
            // It was never offered here. The scheduler half did not know that yet.
            (EndingKind::Held { .. }, None) => {
                ProducedRequest::new(transfer).hold(self.rank());
                self.sent(state, request);
            }
        }
    }

    fn sent(&self, state: &mut State, request: String) {
        state.forget(&request);
        self.observe(|observer| observer.sent(&request));
        state.sent.push(request);
        self.arrived.notify_all();
    }

    fn lost(&self, state: &mut State, request: String, code: WireCode, detail: String) {
        self.observe(|observer| observer.sent(&request));
        state.lost.push(RequestOutcome { request, code, detail, side_data: Vec::new() });
        self.arrived.notify_all();
    }

    pub(super) fn produced(&self, id: &HandoffId, outcome: Outcome) {
        let mut state = self.state.lock();
        let Some(request) = state.produced_as.get(id).cloned() else { return };
        let Some((_, produced)) = state.produced.get(&request) else { return };
        let is_done = outcome.is_done();
        let (code, detail) = (outcome.code, outcome.detail.clone());
        if produced.ended(outcome) {
            if !is_done {
                let (request, side_data) = (request.clone(), Vec::new());
                state.lost.push(RequestOutcome { request, code, detail, side_data });
            }
            self.sent(&mut state, request);
        } else if !is_done {
            self.lost(&mut state, request, code, detail);
        }
    }
}

impl State {
    /// The parts of the current step that are handed over; `None` if there are none.
    pub(super) fn step(&mut self) -> Option<Arc<[Part]>> {
        if self.step.is_none() && !self.parts.is_empty() {
            self.step = Some(std::mem::take(&mut self.parts).into());
        }
        self.step.clone()
    }

    fn forget(&mut self, request: &str) {
        if let Some((transfer, _)) = self.produced.remove(request) {
            self.produced_as.remove(&transfer);
        }
    }
}
