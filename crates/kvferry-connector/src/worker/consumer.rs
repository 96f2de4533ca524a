//! The worker half of a consumer.

use super::bootstrap;
use super::names::{Found, LOOKUPS_MAX, is_literal};
use super::producer_engine::{FetchMapper, ProducerEngine};
use super::state::{Action, Inner, PendingAction, Stage, State};
use crate::clock::now;
use crate::codes::code_of;
use crate::metadata::{Cancel, Claim, FetchRequest, Free, RequestOutcome};
use crate::quorum::bounded;
use crate::rank::{RankError, SideData};
use kvferry::Peer;
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::{Failure, Pairing};
use kvferry_proto::handoff::{HandoffId, Outcome, Refusal};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

impl Inner {
    /// Runs an action at a producing engine. Learns the engine and looks its names up first, if it must.
    pub(super) fn run(&self, state: &mut State, mut pending: PendingAction) {
        let (address, id) = (pending.action.address(), pending.action.engine());
        if bootstrap::is_url(address) {
            let Some(behind) = state.names.engine(address, id) else {
                let names = vec![address.to_owned()];
                return self.look_up(state, pending, names);
            };
            pending.action.set_engine(behind.clone());
        }
        let address = pending.action.address();
        let engine = state.engines.get(address, pending.action.engine());
        let mut names = match &engine {
            Some(engine) => engine.addresses().collect(),
            None => vec![address.to_owned()],
        };
        names.retain(|name| !state.names.is_known(name));
        if !names.is_empty() {
            return self.look_up(state, pending, names);
        }
        if let Some(engine) = engine {
            return self.run_at(state, pending, &engine);
        }
        state.tickets += 1;
        let ticket = state.tickets;
        let left = pending.deadline.saturating_since(now());
        let peer = self.peer(state, address);
        match peer.and_then(|peer| self.rank().learn_engine(ticket, &peer, left)) {
            Ok(()) => drop(state.learning.insert(ticket, pending)),
            Err(error) => self.fail(state, pending.action, &failure_of(&error)),
        }
    }

    /// The peer at an address that is known without a lookup.
    fn peer(&self, state: &State, address: &str) -> Result<Peer, RankError> {
        match state.names.known.get(address) {
            Some(peer) => Ok(peer.clone()),
            None => {
                debug_assert!(is_literal(address), "names are looked up without the lock");
                Ok((self.look_up)(address)?)
            }
        }
    }

    /// Looks names up on a thread of its own, then runs what waits for them.
    fn look_up(&self, state: &mut State, pending: PendingAction, names: Vec<String>) {
        let engine = pending.action.address().to_owned();
        if !state.names.has_room(&engine) {
            let detail = format!("{LOOKUPS_MAX} addresses are being looked up");
            return self.fail(state, pending.action, &failure(WireCode::Busy, detail));
        }
        let deadline = pending.deadline;
        if !state.names.wait(engine.clone(), pending) {
            return;
        }
        let (look_up, me) = (Arc::clone(&self.look_up), Weak::clone(&self.me));
        let thread = {
            let engine = engine.clone();
            kvferry_sys::thread::spawn("kvferry-lookup".into(), move || {
                let find_peer = |name: String| {
                    if now() >= deadline {
                        let detail = format!("looking up {name} took too long");
                        return Err(failure(WireCode::Deadline, detail));
                    }
                    let peer = look_up(&name).map_err(|e| failure_of(&RankError::Agent(e)))?;
                    Ok((name, peer))
                };
                let found = if bootstrap::is_url(&engine) {
                    let found = bootstrap::query(&engine).map(Found::Engines);
                    found.map_err(|(code, detail)| failure(code, detail))
                } else {
                    let found = names.into_iter().map(find_peer).collect();
                    Result::map(found, Found::Peers)
                };
                if let Some(inner) = me.upgrade() {
                    inner.looked_up(&engine, found);
                }
            })
        };
        if let Err(error) = thread {
            let failure = failure_of(&RankError::Thread(error));
            for pending in state.names.take(&engine) {
                self.fail(state, pending.action, &failure);
            }
        }
    }

    fn looked_up(&self, address: &str, found: Result<Found, Failure>) {
        let mut state = self.lock();
        let waiting = state.names.take(address);
        let engines = match found {
            Ok(Found::Peers(names)) => {
                state.names.learn(names);
                state.pending.extend(waiting);
                drop(state);
                return self.rank().call_observer(1);
            }
            Ok(Found::Engines(engines)) => Ok(engines),
            Err(failure) => Err(failure),
        };
        for mut pending in waiting {
            let id = pending.action.engine();
            let pick = |engines: &bootstrap::Engines| {
                engines.pick(address, id).map_err(|(code, detail)| failure(code, detail))
            };
            match engines.as_ref().map_err(Failure::clone).and_then(pick) {
                Ok(found) => {
                    if let Some(id) = id {
                        state.names.learn_engine(address.to_owned(), id, found.clone());
                    }
                    pending.action.set_engine(found);
                    state.pending.push(pending);
                }
                Err(failure) => self.fail(&mut state, pending.action, &failure),
            }
        }
        drop(state);
        self.rank().call_observer(1);
    }

    pub(super) fn engine_learned(&self, ticket: u64, result: Result<Arc<Pairing>, Failure>) {
        let (address, id, known) = {
            let mut state = self.lock();
            let Some(pending) = state.learning.get(&ticket) else { return };
            let (address, id) = (pending.action.address().to_owned(), pending.action.engine());
            let known = state.engines.get(&address, None);
            (address, id, known)
        };
        let engine = result.and_then(|pairing| match known {
            // Another action has learned the same engine.
            Some(known) if known.id == pairing.engine => Ok(known),
            _ => self.plan(&pairing),
        });
        let mut state = self.lock();
        let Some(pending) = state.learning.remove(&ticket) else { return };
        match engine {
            Ok(engine) => {
                state.engines.insert(address, &engine);
                if id.is_some_and(|id| id != engine.id) {
                    let detail = "the producing engine was restarted".to_owned();
                    let failure = failure(WireCode::StaleIncarnation, detail);
                    self.fail(&mut state, pending.action, &failure);
                } else {
                    self.run(&mut state, pending);
                }
            }
            Err(failure) => self.fail(&mut state, pending.action, &failure),
        }
    }

    /// Computes the maps between a producing engine and this rank. Takes milliseconds.
    fn plan(&self, pairing: &Pairing) -> Result<Arc<ProducerEngine>, Failure> {
        let plan = || ProducerEngine::new(&self.memory, self.config.rank, pairing);
        let engine = catch_unwind(AssertUnwindSafe(plan))
            .unwrap_or_else(|_| Err((WireCode::Internal, "planning the copies panicked".into())));
        engine.map(Arc::new).map_err(|(code, detail)| {
            let addresses = pairing.addresses.clone();
            Failure { code, detail, addresses }
        })
    }

    /// Runs an action at a known engine, all of whose names are known.
    fn run_at(&self, state: &mut State, pending: PendingAction, engine: &Arc<ProducerEngine>) {
        let sources = engine.sources().map(|it| Ok((self.peer(state, &it.address)?, it.readers)));
        let sources: Vec<_> = match sources.collect::<Result<_, RankError>>() {
            Ok(sources) => sources,
            Err(error) => return self.fail(state, pending.action, &failure_of(&error)),
        };
        let peers: Vec<_> = sources.iter().map(|(peer, _)| peer.clone()).collect();
        let fetch = match pending.action {
            Action::Fetch(fetch) => fetch,
            Action::Claim(Claim { transfer, .. }) => {
                if let Err(error) = self.rank().claim_from(&transfer, &sources) {
                    tracing::debug!(%transfer, %error, "a handoff can't be claimed");
                }
                return;
            }
            Action::Free(Free { transfer, code, .. }) => {
                if let Err(error) = self.rank().free_at(&transfer, &peers, code, "") {
                    tracing::debug!(%transfer, %error, "a handoff can't be freed");
                }
                return;
            }
        };
        let FetchRequest { request, transfer, address, tokens: (start, end), blocks, .. } = fetch;
        let budget = pending.deadline.saturating_since(now());
        let mapper = FetchMapper {
            memory: Arc::clone(&self.memory),
            engine: Arc::clone(engine),
            tokens: start.into()..end.into(),
            blocks,
        };
        match self.rank().fetch_from(&transfer, &sources, budget, Box::new(mapper)) {
            Ok(()) => {
                state.fetches.insert(request.clone(), Stage::Fetching(transfer.clone()));
                state.fetched_for.insert(transfer, (request, address));
            }
            Err(error) => {
                let failure = failure_of(&error);
                if failure.code != Refusal::InUse.code() {
                    // The producer need not wait for a consumer that has failed.
                    let detail = failure.detail.as_str();
                    drop(self.rank().free_at(&transfer, &peers, failure.code, detail));
                }
                self.fetched(state, request, failure, Vec::new());
            }
        }
    }

    /// An action failed before the rank began it.
    fn fail(&self, state: &mut State, action: Action, failure: &Failure) {
        let Failure { code, detail, addresses } = failure;
        let fetch = match action {
            Action::Fetch(fetch) => fetch,
            Action::Claim(Claim { transfer, address, .. }) => {
                // The fetch that follows tries again, also where the engine may be by then.
                tracing::debug!(%transfer, %code, detail, "a handoff can't be claimed");
                state.forget_names(&address);
                return;
            }
            Action::Free(Free { transfer, .. }) => {
                // The producer's offer ends by its timer.
                tracing::debug!(%transfer, %code, "a handoff can't be freed");
                return;
            }
        };
        let FetchRequest { request, transfer, address, .. } = fetch;
        tracing::warn!(request, producer = address, %code, detail, "KV can't be fetched");
        state.forget_names(&address);
        // The ranks of this engine share the ranks of the other. Those with a host name are not told:
        // the name would have to be looked up. Their offers end by their timers.
        let share = addresses.iter().skip(self.config.rank).step_by(state.ranks.unwrap_or(1));
        let share = share.filter(|address| is_literal(address));
        let peers: Vec<_> = share.filter_map(|it| self.peer(state, it).ok()).collect();
        let told = match peers.is_empty() {
            // There may be a claim.
            true => self.rank().cancel(&transfer, *code, detail),
            false => self.rank().free_at(&transfer, &peers, *code, detail),
        };
        if let Err(error) = told {
            tracing::debug!(%transfer, %error, "the producer can't be told of a failed fetch");
        }
        let detail = format!("{detail} (producer {address})");
        self.fetched(state, request, self::failure(*code, detail), Vec::new());
    }

    fn fetched(&self, state: &mut State, request: String, how: Failure, side_data: SideData) {
        let Failure { code, detail, .. } = how;
        state.fetches.remove(&request);
        let side_data = bounded(side_data.into_iter().map(|(_, data)| data.into())).collect();
        self.observe(|observer| observer.received(&request, code, &detail));
        state.fetched.push(RequestOutcome { request, code, detail, side_data });
        self.arrived.notify_all();
    }

    /// Reports all fetches as failed: this half is closed.
    pub(super) fn end_fetches(&self, state: &mut State) {
        state.pending.clear();
        state.learning.clear();
        state.names.waiting.clear();
        state.fetched_for.clear();
        let requests: Vec<_> = state.fetches.keys().cloned().collect();
        for request in requests {
            let detail = "this rank's connector was closed".to_owned();
            self.fetched(state, request, failure(WireCode::Shutdown, detail), Vec::new());
        }
    }

    pub(super) fn cancel(&self, state: &mut State, cancel: Cancel) {
        let Cancel { request, code, detail } = cancel;
        match state.fetches.get(&request) {
            None => {}
            // A fetch that has just ended is reported as it ended.
            Some(Stage::Fetching(id)) => drop(self.rank().cancel(id, code, &detail)),
            Some(Stage::Pending) => {
                let State { pending, learning, names, .. } = state;
                let waiting = pending.iter_mut().chain(learning.values_mut());
                for pending in waiting.chain(names.waiting.values_mut().flatten()) {
                    pending.action.give_up(&request, code);
                }
                self.fetched(state, request, failure(code, detail), Vec::new());
            }
        }
    }

    pub(super) fn consumed(&self, id: &HandoffId, outcome: &Outcome, side_data: SideData) {
        let mut state = self.lock();
        let Some((request, address)) = state.fetched_for.remove(id) else { return };
        let (code, detail) = (outcome.code, outcome.detail.clone());
        if !matches!(code, WireCode::Ok | WireCode::Cancelled | WireCode::NotNeeded) {
            tracing::warn!(request, producer = address, %code, detail, "KV can't be fetched");
        }
        if !code.is_ok() {
            state.forget_names(&address);
        }
        if matches!(code, WireCode::StaleIncarnation | WireCode::UnknownRegion) {
            // A rank of the engine is not the one that the engine described.
            state.engines.known.remove(&address);
        }
        self.fetched(&mut state, request, failure(code, detail), side_data);
    }
}

const fn failure(code: WireCode, detail: String) -> Failure {
    Failure { code, detail, addresses: Vec::new() }
}

fn failure_of(error: &RankError) -> Failure {
    let code = match error {
        RankError::Refused(refusal) => refusal.code(),
        RankError::Agent(error) => code_of(error.kind()),
        RankError::Forked => WireCode::Shutdown,
        RankError::Thread(_) => WireCode::Internal,
    };
    failure(code, error.to_string())
}
