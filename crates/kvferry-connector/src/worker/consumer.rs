//! The worker half of a consumer.

use super::bootstrap;
use super::engines::Lookup;
use super::names::{LOOKUP_LIMIT, LookupResult};
use super::producer_engine::{FetchMapper, ProducerEngine};
use super::state::{Action, FetchedFor, Inner, PendingAction, Stage, State};
use super::unplanned::Unplanned;
use crate::address::{AgentAddress, ProducerAddress, is_literal};
use crate::clock::now;
use crate::codes::code_of;
use crate::metadata::{Cancel, Claim, FetchRequest, Free, RequestOutcome};
use crate::producers::ForbiddenProducer;
use crate::quorum::bounded;
use crate::rank::{RankError, ReadFrom, SideData, host_of};
use kvferry::{Incarnation, Peer};
use kvferry_proto::engine_handshake::Failure;
use kvferry_proto::handoff::{HandoffId, Outcome, Refusal};
use kvferry_proto::plan::SOURCES_MAX;
use kvferry_proto::{Origin, WireCode};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

impl Inner {
    /// Runs an action. If that panics, its request fails.
    pub(super) fn run_whatever_happens(&self, state: &mut State, pending: PendingAction) {
        let fetch = match &pending.action {
            Action::Fetch(fetch) => Some((fetch.request.clone(), fetch.transfer.clone())),
            Action::Claim(_) | Action::Free(_) => None,
        };
        let run = AssertUnwindSafe(|| self.run(state, pending));
        if catch_unwind(run).is_err()
            && let Some((request, transfer)) = fetch
        {
            let (code, detail) =
                (WireCode::Internal, "a fault of kvferry: its panic is in the log");
            self.cancel(state, Cancel { request, code, detail: detail.to_owned() });
            // There may be a claim.
            drop(self.rank().cancel(&transfer, code, detail));
        }
    }

    /// Runs an action at a producing engine. Learns the engine and looks its names up first, if it must.
    pub(super) fn run(&self, state: &mut State, mut pending: PendingAction) {
        let (address, id) = (pending.action.address(), pending.action.engine());
        if let Err(error) = self.producers.check_canonical(address.as_str()) {
            return self.fail(state, pending.action, &forbidden(&error));
        }
        let mut is_checked = true;
        if address.is_bootstrap() {
            let can_look_up = state.names.has_room(&pending);
            match state.names.engine(address, id, can_look_up, now()) {
                Some(Ok(behind)) => {
                    pending.set_engine(behind);
                    is_checked = false;
                }
                Some(Err((code, detail))) => {
                    return self.refuse(state, pending.action, &failure(code, detail));
                }
                None => {
                    let names = vec![address.as_str().to_owned()];
                    return self.look_up(state, pending, names);
                }
            }
        }
        let address = pending.action.address().as_str();
        let engine = match state.engines.find(address, pending.action.engine(), now()) {
            Lookup::Known(engine) => Some(engine),
            Lookup::Another => return self.refuse(state, pending.action, &restarted()),
            Lookup::Unknown => None,
        };
        let mut names = match &engine {
            Some(engine) => engine.addresses().collect(),
            None => vec![address.to_owned()],
        };
        // A producer names its other ranks itself.
        let mut unchecked = names.iter().filter(|name| !(is_checked && *name == address));
        if let Some(error) = unchecked.find_map(|it| self.producers.check_canonical(it).err()) {
            return self.fail(state, pending.action, &forbidden(&error));
        }
        let can_look_up = state.names.has_room(&pending);
        names.retain(|name| !state.names.is_known(name, can_look_up));
        if !names.is_empty() {
            return self.look_up(state, pending, names);
        }
        if let Some(engine) = engine {
            return self.run_at(state, pending, &engine);
        }
        state.tickets += 1;
        let ticket = state.tickets;
        let left = pending.deadline.saturating_since(now());
        if left.is_zero() {
            let detail = "the producing engine is not known in time".to_owned();
            return self.fail(state, pending.action, &failure(WireCode::Deadline, detail));
        }
        let peer = self.peer(state, address);
        let to_free = matches!(pending.action, Action::Free(_));
        match peer.and_then(|peer| self.rank().learn_engine(ticket, &peer, to_free, left)) {
            Ok(()) => drop(state.learning.insert(ticket, pending)),
            Err(error) => self.fail(state, pending.action, &failure_of(&error)),
        }
    }

    /// The peer at an address that is known without a lookup.
    fn peer(&self, state: &State, address: &str) -> Result<Peer, RankError> {
        match state.names.peer(address) {
            Some(peer) => Ok(peer.clone()),
            None => {
                debug_assert!(is_literal(address), "names are looked up without the lock");
                Ok((self.look_up)(address)?)
            }
        }
    }

    /// The host of the address by which a request names an engine.
    fn host_of_engine(state: &State, address: &str) -> Option<Origin> {
        let literal = || Some(Origin::from(address.parse::<SocketAddr>().ok()?.ip()));
        state.names.peer(address).and_then(host_of).or_else(literal)
    }

    /// The host of an engine, as [`Inner::host_of_engine`] finds it; names that are not known any more share one.
    pub(super) fn host_named(state: &State, address: &str) -> Origin {
        let unknown = || Origin::from(IpAddr::from(Ipv4Addr::UNSPECIFIED));
        Self::host_of_engine(state, address).unwrap_or_else(unknown)
    }

    /// Looks names up on a thread of its own, then runs what waits for them.
    fn look_up(&self, state: &mut State, pending: PendingAction, names: Vec<String>) {
        let engine = pending.action.address().clone();
        let deadline = pending.deadline;
        // What was led here by a lookup must not go on without end.
        if deadline <= now() {
            let detail = format!("looking up {engine} took too long");
            return self.fail(state, pending.action, &failure(WireCode::Deadline, detail));
        }
        if !state.names.has_room(&pending) {
            let detail = "too many addresses are being looked up".to_owned();
            return self.fail(state, pending.action, &failure(WireCode::Busy, detail));
        }
        let until = now() + LOOKUP_LIMIT;
        let begins = state.names.wait(pending, names.clone(), until);
        self.rank().call_observer_at(until.min(deadline));
        if !begins {
            return;
        }
        let (look_up, me) = (Arc::clone(&self.look_up), Weak::clone(&self.me));
        let producers = self.producers.clone();
        let thread = {
            let engine = engine.clone();
            kvferry_sys::thread::spawn("kvferry-lookup".into(), move || {
                let find_peer = |name: &str| {
                    if now() >= until {
                        let detail = format!("looking up {name} took too long");
                        return Err(failure(WireCode::Deadline, detail));
                    }
                    let peer = look_up(name).map_err(|e| failure_of(&RankError::Agent(e)))?;
                    let checked = producers.check_found(name, peer.socket_addrs());
                    checked.map_err(|error| forbidden(&error))?;
                    Ok(peer)
                };
                let found = if engine.is_bootstrap() {
                    let found = bootstrap::query(&engine, &producers);
                    LookupResult::Engines(found.map_err(|(code, detail)| failure(code, detail)))
                } else {
                    let find = |name: String| {
                        let found = find_peer(&name);
                        (name, found)
                    };
                    LookupResult::Peers(names.into_iter().map(find).collect())
                };
                if let Some(inner) = me.upgrade() {
                    inner.looked_up(&engine, found);
                }
            })
        };
        if let Err(error) = thread {
            let failure = failure_of(&RankError::Thread(error));
            for pending in state.names.end(&engine) {
                self.fail(state, pending.action, &failure);
            }
        }
    }

    /// Frees the places of lookups that take too long. What waits for one fails, unless it was found before.
    pub(super) fn expire_lookups(&self, state: &mut State) {
        let now = now();
        for (address, waiting) in state.names.expire(now) {
            let is_found = state.names.is_found(&address);
            for pending in waiting {
                if is_found && pending.deadline > now {
                    state.pending.push(pending);
                    continue;
                }
                let detail = format!("looking up {address} took too long");
                self.fail(state, pending.action, &failure(WireCode::Deadline, detail));
            }
        }
        if let Some(next) = state.names.next_limit() {
            self.rank().call_observer_at(next);
        }
    }

    fn looked_up(&self, address: &ProducerAddress, found: LookupResult) {
        let mut state = self.state.lock();
        let waiting = state.names.end(address);
        match found {
            LookupResult::Peers(names) => self.found_peers(&mut state, names, waiting),
            LookupResult::Engines(found) => self.found_engines(&mut state, address, found, waiting),
        }
        drop(state);
        self.rank().call_observer(1);
    }

    fn found_peers(
        &self,
        state: &mut State,
        names: Vec<(String, Result<Peer, Failure>)>,
        waiting: Vec<PendingAction>,
    ) {
        let (mut found, mut unknown) = (Vec::new(), None);
        for (name, peer) in names {
            match peer {
                Ok(peer) => found.push((name, peer)),
                Err(failure) if state.names.keep(&name, &failure) => {}
                Err(failure) => unknown = unknown.or(Some(failure)),
            }
        }
        state.names.learn(found);
        match unknown {
            None => state.pending.extend(waiting),
            Some(failure) => {
                for pending in waiting {
                    self.fail(state, pending.action, &failure);
                }
            }
        }
    }

    fn found_engines(
        &self,
        state: &mut State,
        url: &ProducerAddress,
        found: Result<bootstrap::Engines, Failure>,
        waiting: Vec<PendingAction>,
    ) {
        let engines = match found {
            Ok(engines) => engines,
            Err(failure) => {
                for pending in waiting {
                    if state.names.keep_engines(url, pending.action.engine()) {
                        state.pending.push(pending);
                    } else {
                        self.fail(state, pending.action, &failure);
                    }
                }
                return;
            }
        };
        let asked: Vec<_> = waiting.iter().filter_map(|it| it.action.engine()).collect();
        for mut pending in waiting {
            match engines.pick(url, pending.action.engine()) {
                Ok(found) => {
                    pending.set_engine(found);
                    state.pending.push(pending);
                }
                Err((code, detail)) => {
                    self.refuse(state, pending.action, &failure(code, detail));
                }
            }
        }
        state.names.learn_engines(url, engines, asked.into_iter(), now());
    }

    /// Runs an action at a known engine, all of whose names are known.
    fn run_at(&self, state: &mut State, pending: PendingAction, engine: &Arc<ProducerEngine>) {
        let tokens = match &pending.action {
            Action::Fetch(fetch) => fetch.tokens.1,
            Action::Claim(claim) => claim.tokens,
            Action::Free(_) => 0,
        };
        let sources = engine.needs(tokens).map(|(source, incarnation, need)| {
            let peer = self.peer(state, source.address.as_str())?;
            Ok(ReadFrom { peer, incarnation, readers: source.readers, need })
        });
        let sources: Vec<_> = match sources.collect::<Result<_, RankError>>() {
            Ok(sources) => sources,
            Err(error) => return self.fail(state, pending.action, &failure_of(&error)),
        };
        let peers: Vec<_> =
            sources.iter().map(|from| (from.peer.clone(), from.incarnation)).collect();
        let (again, at) = (pending.again(), pending.action.address().clone());
        let host = Self::host_of_engine(state, at.as_str());
        let fetch = match pending.action {
            Action::Fetch(fetch) => fetch,
            Action::Claim(Claim { request, transfer, .. }) => {
                match self.rank().claim_from(&transfer, host, &sources) {
                    Ok(()) => state.wait_for_answer(request, transfer),
                    Err(error) => {
                        if is_restarted(&error)
                            && let Some(again) = again
                        {
                            return self.run_anew(state, &at, again);
                        }
                        tracing::debug!(%transfer, %error, "a handoff can't be claimed");
                    }
                }
                return;
            }
            Action::Free(Free { transfer, code, .. }) => {
                state.forget_answer(&transfer);
                if let Err(error) = self.rank().free_at(&transfer, host, &peers, code, "") {
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
            after: pending.after,
        };
        match self.rank().fetch_from(&transfer, host, &sources, budget, Box::new(mapper)) {
            Ok(()) => {
                state.fetches.insert(request.clone(), Stage::Fetching(transfer.clone()));
                state.wait_for_answer(request.clone(), transfer.clone());
                let bootstrap = pending.bootstrap.map(|(url, _)| url);
                let fetched = FetchedFor { request, address, bootstrap, cancelled: None, again };
                state.fetched_for.insert(transfer, fetched);
            }
            Err(error) => {
                if is_restarted(&error)
                    && let Some(again) = again
                {
                    return self.run_anew(state, &at, again);
                }
                let failure = failure_of(&error);
                if failure.code != Refusal::InUse.code() {
                    // The producer need not wait for a consumer that has failed.
                    let detail = failure.detail.as_str();
                    drop(self.rank().free_at(&transfer, host, &peers, failure.code, detail));
                }
                self.fetched(state, request, failure, Vec::new());
            }
        }
    }

    /// Begins an action of a step for which `after` failed. A fetch fails, and its producer gives the blocks back.
    pub(super) fn begin_unordered(
        &self,
        state: &mut State,
        mut pending: PendingAction,
        why: String,
    ) {
        if let Action::Fetch(FetchRequest { request, .. }) = &pending.action {
            let (request, code) = (request.clone(), WireCode::Internal);
            pending.action.give_up(&request, code);
            self.fetched(state, request, failure(code, why), Vec::new());
        }
        state.pending.push(pending);
    }

    /// Runs an action anew whose engine, known at this address, was restarted.
    fn run_anew(&self, state: &mut State, address: &ProducerAddress, again: PendingAction) {
        state.doubt_names(address.as_str());
        state.engines.forget(address);
        self.run_whatever_happens(state, again);
    }

    /// Refuses an action that failed before the rank began it, perhaps because the engine has moved.
    pub(super) fn fail(&self, state: &mut State, action: Action, failure: &Failure) {
        if !matches!(action, Action::Free(_)) {
            state.doubt_names_after(failure.code, action.address().as_str());
        }
        self.refuse(state, action, failure);
    }

    /// Refuses an action that failed before the rank began it, for a reason unrelated to the engine's address.
    pub(super) fn refuse(&self, state: &mut State, action: Action, failure: &Failure) {
        let Failure { code, detail, addresses } = failure;
        let fetch = match action {
            Action::Fetch(fetch) => fetch,
            Action::Claim(Claim { transfer, .. }) => {
                // The fetch that follows tries again, also where the engine may be by then.
                tracing::debug!(%transfer, %code, detail, "a handoff can't be claimed");
                return;
            }
            Action::Free(Free { transfer, address, code: why, .. }) => {
                state.forget_answer(&transfer);
                // Where no rank can be told, the producer's offer ends by its timer.
                tracing::debug!(%transfer, %code, detail, "a handoff can't be freed on all ranks");
                let (host, peers) = self.share_to_tell(state, address.as_str(), addresses);
                if !peers.is_empty() {
                    drop(self.rank().free_at(&transfer, host, &peers, why, ""));
                }
                return;
            }
        };
        let FetchRequest { request, transfer, address, .. } = fetch;
        state.log_failure(&request, address.as_str(), *code, detail);
        let (host, peers) = self.share_to_tell(state, address.as_str(), addresses);
        let told = match peers.is_empty() {
            // There may be a claim.
            true => self.rank().cancel(&transfer, *code, detail),
            false => self.rank().free_at(&transfer, host, &peers, *code, detail),
        };
        if let Err(error) = told {
            tracing::debug!(%transfer, %error, "the producer can't be told of a failed fetch");
        }
        let detail = format!("{detail} (producer {address})");
        self.fetched(state, request, self::failure(*code, detail), Vec::new());
    }

    /// The ranks of an engine, which listen at `addresses`, that this rank tells of an end, and the host that they count for.
    fn share_to_tell(
        &self,
        state: &State,
        engine: &str,
        addresses: &[String],
    ) -> (Option<Origin>, Vec<(Peer, Option<Incarnation>)>) {
        // The ranks of this engine share the ranks of the other. Those with a host name are not told:
        // the name would have to be looked up. Their offers end by their timers.
        let share = addresses.iter().skip(self.config.rank).step_by(state.ranks.unwrap_or(1));
        // A rank reads from no more.
        let share = share.take(SOURCES_MAX);
        let share = share.filter_map(|it| it.parse::<AgentAddress>().ok());
        let share = share.filter(|it| it.is_literal() && self.producers.check(it.as_str()).is_ok());
        let peers = share.filter_map(|it| self.peer(state, it.as_str()).ok());
        let peers = peers.map(|peer| (peer, None)).collect();
        (Self::host_of_engine(state, engine), peers)
    }

    pub(super) fn fetched(
        &self,
        state: &mut State,
        request: String,
        how: Failure,
        side_data: SideData,
    ) {
        let Failure { code, detail, .. } = how;
        match state.fetches.remove(&request) {
            Some(Stage::Fetching(transfer)) => state.forget_answer(&transfer),
            // It may have been claimed.
            _ => state.forget_claim(&request),
        }
        let side_data = bounded(side_data.into_iter().map(|(_, data)| data.into())).collect();
        // The outcome is there, whatever an observer does.
        state.fetched.push(RequestOutcome { request, code, detail, side_data });
        self.arrived.notify_all();
        let outcome = state.fetched.last().expect("it was added");
        self.observe(|it| it.received(&outcome.request, outcome.code, &outcome.detail));
    }

    /// Reports all fetches as failed: this half is closed.
    pub(super) fn end_fetches(&self, state: &mut State) {
        state.pending.clear();
        state.learning.clear();
        state.unplanned = Unplanned::default();
        state.names.forget_waiting();
        state.fetched_for.clear();
        state.unanswered.clear();
        let requests: Vec<_> = state.fetches.keys().cloned().collect();
        for request in requests {
            let detail = "this rank's connector was closed".to_owned();
            self.fetched(state, request, failure(WireCode::Shutdown, detail), Vec::new());
        }
    }

    /// A fetch that succeeds all the same, or has succeeded and was not reported, is reported as cancelled: the engine may
    /// have got other weights since.
    pub(super) fn cancel(&self, state: &mut State, cancel: Cancel) {
        let Cancel { request, code, detail } = cancel;
        match state.fetches.get(&request) {
            None => {
                let mut succeeded = state.fetched.iter_mut().filter(|it| it.code.is_ok());
                if let Some(it) = succeeded.find(|it| it.request == request) {
                    (it.code, it.detail) = (code, detail);
                    it.side_data.clear();
                }
            }
            Some(Stage::Fetching(id)) => {
                if let Some(it) = state.fetched_for.get_mut(id) {
                    it.cancelled.get_or_insert_with(|| failure(code, detail.clone()));
                }
                drop(self.rank().cancel(id, code, &detail));
            }
            Some(Stage::Pending) => {
                let State { pending, learning, names, .. } = state;
                let waiting = pending.iter_mut().chain(learning.values_mut());
                for pending in waiting.chain(names.waiting_actions()) {
                    pending.action.give_up(&request, code);
                }
                self.fetched(state, request, failure(code, detail), Vec::new());
            }
        }
    }

    pub(super) fn consumed(&self, id: &HandoffId, outcome: &Outcome, side_data: SideData) {
        let mut state = self.state.lock();
        let Some(fetched) = state.fetched_for.remove(id) else { return };
        let FetchedFor { request, address, bootstrap, cancelled, again } = fetched;
        let (code, detail) = (outcome.code, outcome.detail.clone());
        if code == WireCode::StaleIncarnation
            && cancelled.is_none()
            && let Some(again) = again
        {
            state.forget_answer(id);
            state.fetches.insert(request, Stage::Pending);
            return self.run_anew(&mut state, &address, again);
        }
        if !matches!(code, WireCode::Ok | WireCode::Cancelled | WireCode::NotNeeded) {
            state.log_failure(&request, address.as_str(), code, &detail);
        }
        if code.is_ok() {
            let from = [Some(&address), bootstrap.as_ref()];
            from.into_iter().flatten().for_each(|it| state.names.prove(it));
        }
        state.doubt_names_after(code, address.as_str());
        if matches!(code, WireCode::StaleIncarnation | WireCode::UnknownRegion) {
            // A rank of the engine is not the one that the engine described.
            state.engines.known.remove(&address);
        }
        let (how, side_data) = match cancelled {
            Some(cancelled) if code.is_ok() => (cancelled, Vec::new()),
            _ => (failure(code, detail), side_data),
        };
        self.fetched(&mut state, request, how, side_data);
    }
}

fn is_restarted(error: &RankError) -> bool {
    matches!(error, RankError::Refused(Refusal::Restarted))
}

/// The failure of a request whose address leads to another engine than the one it means.
pub(super) fn restarted() -> Failure {
    failure(WireCode::StaleIncarnation, "the producing engine was restarted".to_owned())
}

fn forbidden(error: &ForbiddenProducer) -> Failure {
    failure(WireCode::ForbiddenProducer, error.to_string())
}

pub(super) const fn failure(code: WireCode, detail: String) -> Failure {
    Failure { code, detail, addresses: Vec::new() }
}

pub(super) fn failure_of(error: &RankError) -> Failure {
    let code = match error {
        RankError::Refused(refusal) => refusal.code(),
        RankError::Agent(error) => code_of(error.kind()),
        RankError::Forked => WireCode::Shutdown,
        RankError::Thread(_) => WireCode::Internal,
    };
    failure(code, error.to_string())
}
