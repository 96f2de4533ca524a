//! Random requests of a naive engine. It never reuses a block, so the blocks in the metadata can be
//! compared with the blocks of the requests.

use super::{
    CHUNK, Calls, FULL, RANKS, STATE, WINDOW, assert_idle, consumes, outcome, produces, request,
    scheduler, step,
};
use kvferry_connector::{
    BlockTable, Compute, ConnectorMetadata, EndingKind, FinishReason, GroupRule, Match, NULL_BLOCK,
    Notes, Params, Request, Scheduled, Scheduler, producer_params,
};
use kvferry_proto::WireCode;
use kvferry_proto::fuzzing::Script;
use kvferry_proto::layout::Kind;
use proptest::prelude::*;
use std::collections::BTreeMap;

const NAMES: usize = 6;

#[derive(Debug, PartialEq, Eq)]
enum Role {
    Nothing,
    Nonsense,
    Produce(Option<u8>),
    Consume(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    Loading,
    Running,
    /// It has ended and is held, or its fetch has not ended yet.
    Ending,
}

#[derive(Debug)]
struct Live {
    role: Role,
    params: Params,
    /// Tokens of the prompt after the engine has cut it.
    prompt: u64,
    /// How many tokens it generates before it ends by its length; it computes all but the last.
    generates: u64,
    computed: u64,
    phase: Phase,
    /// Whether its next step carries all its blocks.
    all: bool,
    /// Per group.
    blocks: Vec<Vec<u32>>,
    /// How many of `blocks` steps have carried, per group.
    carried: Vec<usize>,
    /// Ranks that have reported it, if it is loading or held.
    reported: [bool; RANKS],
    was_lost: bool,
    /// Its end must be handed over.
    handed_over: bool,
    /// It has had blocks.
    had_blocks: bool,
}

/// What the worker halves know.
#[derive(Debug, Default)]
struct Workers {
    offers: BTreeMap<String, OfferedBlocks>,
    endings: BTreeMap<String, Vec<EndingKind>>,
    fetches: BTreeMap<String, usize>,
    cancels: BTreeMap<String, usize>,
    /// Fetches by handoff.
    fetched: BTreeMap<String, usize>,
    frees: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct OfferedBlocks {
    tokens: u32,
    until: u32,
    tables: Vec<BlockTable>,
}

struct World {
    scheduler: Scheduler,
    groups: Vec<GroupRule>,
    requests: BTreeMap<String, Live>,
    workers: Workers,
    names: usize,
    blocks: u32,
    /// How often a handoff had its first live request: it is fetched or freed each time.
    owners: BTreeMap<String, usize>,
}

impl Role {
    fn read(script: &mut Script<'_>) -> Self {
        let name = script.below(NAMES) as u8;
        match script.below(14) {
            0 => Self::Nothing,
            1 => Self::Nonsense,
            2 | 3 => Self::Produce(None),
            4..8 => Self::Produce(Some(name)),
            _ => Self::Consume(name),
        }
    }

    fn params(&self) -> Params {
        match self {
            Self::Nothing => Params::new(),
            Self::Nonsense => {
                let mut params = producer_params(None);
                params.insert("do_remote_prefill".to_owned(), true.into());
                params
            }
            Self::Produce(None) => producer_params(None),
            Self::Produce(Some(name)) => produces(&name.to_string()),
            Self::Consume(name) => consumes(&name.to_string()),
        }
    }
}

impl Live {
    fn view<'a>(&'a self, id: &'a str) -> Request<'a> {
        Request { max_tokens: self.generates, ..request(id, self.prompt, &self.params) }
    }

    const fn is_done(&self) -> bool {
        self.computed >= self.prompt + self.generates - 1
    }

    /// It has lost its blocks, or they have not been fetched.
    fn start_over(&mut self) {
        self.blocks.iter_mut().for_each(Vec::clear);
        self.carried.fill(0);
        (self.computed, self.all, self.phase) = (0, true, Phase::Waiting);
    }
}

impl World {
    fn new(groups: &[GroupRule], eager: bool) -> Self {
        Self {
            scheduler: scheduler(groups, eager),
            groups: groups.to_vec(),
            requests: BTreeMap::new(),
            workers: Workers::default(),
            names: 0,
            blocks: 0,
            owners: BTreeMap::new(),
        }
    }

    fn act(&mut self, script: &mut Script<'_>) {
        match script.below(34) {
            0..4 => {
                let role = Role::read(script);
                let (prompt, generates) = (1 + script.below(29), 1 + script.below(5));
                // A request that is not announced is known when it is matched: too late to cut its
                // prompt, and to own its handoff.
                let named = matches!(role, Role::Consume(_) | Role::Produce(Some(_)));
                let announced = script.flip() || named || self.groups != [FULL];
                self.arrive(role, prompt as u64, generates as u64, announced);
            }
            4 => {
                // It is rejected.
                let id = self.arrive(Role::read(script), 5, 1, false);
                self.finish(&id, FinishReason::Abort);
            }
            5..13 => {
                if let Some(id) = self.pick(script, &[Phase::Waiting]) {
                    self.admit(&id, script.below(30) as u64, script.below(5) > 0);
                }
            }
            13..21 => {
                let loses_blocks = script.below(5) == 0;
                let preempted = loses_blocks.then(|| self.pick(script, &[Phase::Running]));
                self.step(1 + script.below(15) as u64, preempted.flatten());
            }
            21 => {
                if let Some(id) =
                    self.pick(script, &[Phase::Waiting, Phase::Loading, Phase::Running])
                {
                    let ends = [FinishReason::Stop, FinishReason::Abort, FinishReason::Error];
                    self.finish(&id, script.pick(&ends));
                }
            }
            _ => {
                if let Some(id) =
                    self.pick(script, &[Phase::Running, Phase::Loading, Phase::Ending])
                {
                    let code = if script.below(5) == 0 { WireCode::Closed } else { WireCode::Ok };
                    self.report(&id, script.below(RANKS), code, script.flip());
                }
            }
        }
    }

    fn in_phase(&self, phases: &[Phase]) -> Vec<String> {
        let fitting = self.requests.iter().filter(|(_, live)| phases.contains(&live.phase));
        fitting.map(|(id, _)| id.clone()).collect()
    }

    fn pick(&self, script: &mut Script<'_>, phases: &[Phase]) -> Option<String> {
        let mut ids = self.in_phase(phases);
        (!ids.is_empty()).then(|| ids.swap_remove(script.below(ids.len())))
    }

    fn arrive(&mut self, role: Role, prompt: u64, generates: u64, announced: bool) -> String {
        let id = format!("r{}", self.names);
        self.names += 1;
        let is_live = self.requests.values().any(|live| live.role == role);
        if !is_live && let Role::Consume(name) = role {
            *self.owners.entry(name.to_string()).or_default() += 1;
        }
        let params = role.params();
        let is_taken = is_live && matches!(role, Role::Produce(Some(_)));
        let role = if is_taken { Role::Nothing } else { role };
        let prompt = if announced {
            let view = request(&id, prompt, &params);
            self.scheduler.arrived(&Request { max_tokens: generates, ..view })
        } else {
            prompt
        };
        let groups = self.groups.len();
        let live = Live {
            role,
            params,
            prompt,
            generates,
            computed: 0,
            phase: Phase::Waiting,
            all: true,
            blocks: vec![vec![]; groups],
            carried: vec![0; groups],
            reported: [false; RANKS],
            was_lost: false,
            handed_over: false,
            had_blocks: false,
        };
        self.requests.insert(id.clone(), live);
        id
    }

    fn admit(&mut self, id: &str, cached: u64, admitted: bool) {
        let live = &self.requests[id];
        let cached = cached.min(live.prompt - 1);
        let view = live.view(id);
        let is_loading = |other: &Live| {
            other.role == live.role && matches!(other.phase, Phase::Loading | Phase::Ending)
        };
        let Match::Tokens(external) = self.scheduler.match_request(&view, cached) else {
            assert!(self.requests.values().any(is_loading), "{id} waits for nothing");
            return;
        };
        assert_eq!(self.scheduler.match_request(&view, cached), Match::Tokens(external));
        let is_consumer = matches!(live.role, Role::Consume(_));
        assert!(is_consumer || external == 0, "{id}: {live:?}");
        assert!(!live.had_blocks || external == 0, "{id} is fetched twice");
        assert!(external == 0 || !self.requests.values().any(is_loading), "{id} is being fetched");
        if !admitted {
            return;
        }
        self.allocate(id, cached + external);
        let live = self.requests.get_mut(id).expect("live");
        let view = live.view(id);
        self.scheduler.give_blocks(&view, cached, external, &live.blocks);
        live.computed = cached + external;
        live.had_blocks = true;
        live.reported = [false; RANKS];
        live.phase = if external > 0 { Phase::Loading } else { Phase::Running };
    }

    /// Gives a request the blocks for this many tokens, and takes those that left its windows.
    fn allocate(&mut self, id: &str, tokens: u64) {
        let live = self.requests.get_mut(id).expect("live");
        for (group, blocks) in self.groups.iter().zip(&mut live.blocks) {
            let size = u64::from(group.block_tokens);
            let left = match group.kind {
                Kind::State => live.computed.saturating_sub(1) / size,
                kind => kind.horizon(live.computed) / size,
            };
            while (blocks.len() as u64) < tokens.div_ceil(size) {
                self.blocks += 1;
                blocks.push(self.blocks);
            }
            let left = (left as usize).min(blocks.len());
            blocks[..left].fill(NULL_BLOCK);
        }
    }

    /// Running requests compute at most `chunk` tokens each. One of them may lose its blocks.
    fn step(&mut self, chunk: u64, preempted: Option<String>) {
        if let Some(id) = &preempted {
            self.requests.get_mut(id).expect("live").start_over();
        }
        let running = self.in_phase(&[Phase::Running]);
        let mut plan = vec![];
        for id in &running {
            let live = &self.requests[id];
            let end = if live.computed < live.prompt { live.prompt } else { live.computed + 1 };
            let tokens = chunk.min(end - live.computed);
            let until = live.computed + tokens;
            self.allocate(id, until);
            let live = self.requests.get_mut(id).expect("live");
            // As an engine does, steps that do not matter are left out below.
            let new_blocks =
                live.blocks.iter().zip(&live.carried).map(|(it, carried)| it[*carried..].to_vec());
            let scheduled = Scheduled {
                request: id,
                computed: live.computed,
                tokens,
                all: live.all,
                blocks: new_blocks.collect(),
            };
            live.carried = live.blocks.iter().map(Vec::len).collect();
            (live.all, live.computed) = (false, until);
            if self.scheduler.produces(id) {
                plan.push(scheduled);
            }
        }
        let preempted: Vec<&str> = preempted.iter().map(String::as_str).collect();
        let metadata = step(&mut self.scheduler, plan, &preempted);
        self.apply_metadata(metadata);
        self.check_offers(&running);
        for id in running {
            if self.requests[&id].is_done() {
                self.finish(&id, FinishReason::Length);
            }
        }
    }

    /// Does what the worker halves do with metadata, in the order of the fields.
    fn apply_metadata(&mut self, metadata: ConnectorMetadata) {
        let workers = &mut self.workers;
        for id in metadata.restarts {
            assert!(workers.offers.remove(&id).is_some(), "{id} is restarted without an offer");
        }
        for ending in metadata.endings {
            workers.offers.remove(&ending.request);
            workers.endings.entry(ending.request).or_default().push(ending.how);
        }
        for compute in metadata.computes {
            assert!(
                !workers.endings.contains_key(&compute.request),
                "{compute:?} of an ended request"
            );
            workers.compute(compute);
        }
        for fetch in metadata.fetches {
            let live = self.requests.get(&fetch.request).expect("it is awaited");
            assert_eq!(u64::from(fetch.tokens.1), live.computed);
            *workers.fetches.entry(fetch.request).or_default() += 1;
            let name = fetch.transfer.as_str().to_owned();
            *workers.fetched.entry(name).or_default() += 1;
        }
        for free in metadata.frees {
            *workers.frees.entry(free.transfer.as_str().to_owned()).or_default() += 1;
        }
        for cancel in metadata.cancels {
            assert!(workers.fetches.contains_key(&cancel.request), "{cancel:?} without a fetch");
            *workers.cancels.entry(cancel.request).or_default() += 1;
        }
    }

    /// The metadata carried the blocks that the requests have, except those that leave a window.
    fn check_offers(&self, running: &[String]) {
        for id in running {
            let (live, offer) = (&self.requests[id], self.workers.offers.get(id));
            let Some(offer) = offer.filter(|_| !live.was_lost) else { continue };
            assert_eq!(u64::from(offer.tokens), live.prompt, "{id}");
            assert_eq!(u64::from(offer.until), live.computed.min(live.prompt), "{id}");
            for (at, group) in self.groups.iter().enumerate() {
                let table = &offer.tables[at];
                let size = u64::from(group.block_tokens);
                if group.kind == Kind::State {
                    let last = ((live.prompt - 1) / size) as u32;
                    let is_complete = u64::from(offer.until) == live.prompt;
                    assert_eq!(table.blocks.len(), usize::from(is_complete), "{id}");
                    let is = live.blocks[at].get(last as usize).filter(|_| is_complete);
                    assert_eq!(table.block(last), is.copied(), "{id}");
                    continue;
                }
                let needed = u64::from(offer.until).div_ceil(size);
                assert_eq!((table.first, table.blocks.len() as u64), (0, needed), "{id}");
                let horizon = group.kind.horizon(live.prompt);
                for (n, (carried, is)) in table.blocks.iter().zip(&live.blocks[at]).enumerate() {
                    if (n as u64 + 1) * size <= horizon {
                        assert_eq!(*carried, NULL_BLOCK, "{id}: block {n} leaves {group:?}");
                    } else {
                        assert_eq!(carried, is, "{id}: block {n} of {group:?}");
                    }
                }
            }
        }
    }

    /// Whether a request that ends by `how` must be handed over.
    fn must_be_handed_over(&self, id: &str, how: FinishReason) -> bool {
        let live = &self.requests[id];
        let is_produced = matches!(live.role, Role::Produce(_));
        let ends = matches!(how, FinishReason::Length | FinishReason::Stop);
        let is_withdrawn = self.workers.endings.contains_key(id);
        if !is_produced || !ends || live.was_lost || is_withdrawn || live.computed < live.prompt {
            return false;
        }
        self.groups.iter().zip(&live.blocks).all(|(group, blocks)| match group.kind {
            Kind::State => live.computed == live.prompt,
            kind => {
                let size = u64::from(group.block_tokens);
                let (first, end) = (kind.horizon(live.prompt) / size, live.prompt.div_ceil(size));
                !blocks[first as usize..end as usize].contains(&NULL_BLOCK)
            }
        })
    }

    fn finish(&mut self, id: &str, how: FinishReason) {
        // The engine frees what has left the windows before it lists the blocks.
        self.allocate(id, 0);
        let handed_over = self.must_be_handed_over(id, how);
        // Consumers may read what was offered until all ranks have withdrawn it.
        let held = handed_over || self.workers.offers.contains_key(id);
        let live = self.requests.get_mut(id).expect("live");
        let is_loading = live.phase == Phase::Loading;
        let view = live.view(id);
        let finished = self.scheduler.end_request(&view, how, Some(&live.blocks), Some(vec![1]));
        assert_eq!(finished.held, held, "{id} {how:?}: {live:?}");
        assert!(finished.params.is_none(), "the address is not known");
        live.handed_over = handed_over;
        if held {
            live.reported = [false; RANKS];
        }
        if held || is_loading {
            live.phase = Phase::Ending;
        } else {
            self.leave(id);
        }
    }

    /// Forgets a request and checks all that was carried of it.
    fn leave(&mut self, id: &str) {
        let metadata = step(&mut self.scheduler, [], &[]);
        self.apply_metadata(metadata);
        let live = self.requests.remove(id).expect("live");
        let workers = &self.workers;
        let endings = workers.endings.get(id).map_or(&[][..], Vec::as_slice);
        match live.role {
            Role::Produce(name) => {
                let held =
                    endings.iter().filter(|how| matches!(how, EndingKind::Held { .. })).count();
                assert_eq!(held, usize::from(live.handed_over), "{id}");
                assert!(endings.len() == 1 || name.is_none() && endings.is_empty(), "{id}");
                assert!(!workers.offers.contains_key(id), "{id} is still offered");
            }
            Role::Nothing | Role::Nonsense | Role::Consume(_) => assert!(endings.is_empty()),
        }
        let fetches = workers.fetches.get(id).copied().unwrap_or(0);
        assert!(fetches <= 1 && (fetches == 0 || matches!(live.role, Role::Consume(_))), "{id}");
        let cancels = workers.cancels.get(id).copied().unwrap_or(0);
        assert!(cancels <= fetches, "{id}: cancelled {cancels} times");
        if live.phase == Phase::Ending && fetches == 1 {
            assert_eq!(cancels, 1, "{id} ended during its fetch");
        }
    }

    /// A rank reports a request, or loses a running one.
    fn report(&mut self, id: &str, rank: usize, code: WireCode, noted: bool) {
        let live = self.requests.get_mut(id).expect("live");
        let is_consumer = matches!(live.role, Role::Consume(_));
        if live.phase == Phase::Running {
            if !is_consumer && self.workers.offers.contains_key(id) {
                live.was_lost |= !code.is_ok();
                let lost = vec![outcome(id, code)];
                self.scheduler.reported(rank, &Notes { lost, ..Notes::default() }.encode());
            }
            return;
        }
        let workers = &self.workers;
        let is_known = workers.fetches.contains_key(id) || workers.endings.contains_key(id);
        if !is_known || std::mem::replace(&mut live.reported[rank], true) {
            return;
        }
        if is_consumer && noted {
            let fetched = vec![outcome(id, code)];
            self.scheduler.reported(rank, &Notes { fetched, ..Notes::default() }.encode());
        }
        if live.reported != [true; RANKS] {
            return;
        }
        if is_consumer {
            self.scheduler.received([id]);
        } else {
            self.scheduler.sent([id]);
        }
        if live.phase == Phase::Ending {
            self.leave(id);
        } else {
            live.phase = Phase::Running;
            if !code.is_ok() {
                // The engine computes it.
                live.start_over();
            }
        }
    }

    /// Ends all requests.
    fn end(mut self) {
        for id in self.in_phase(&[Phase::Waiting, Phase::Loading, Phase::Running]) {
            self.finish(&id, FinishReason::Abort);
        }
        assert!(self.scheduler.has_pending_work() || self.requests.is_empty());
        let metadata = step(&mut self.scheduler, [], &[]);
        self.apply_metadata(metadata);
        for id in self.in_phase(&[Phase::Ending]) {
            let reported = self.requests[&id].reported;
            for rank in (0..RANKS).filter(|rank| !reported[*rank]) {
                self.report(&id, rank, WireCode::Ok, true);
            }
        }
        let metadata = step(&mut self.scheduler, [], &[]);
        self.apply_metadata(metadata);
        assert_idle(&self.scheduler);
        for (name, owners) in &self.owners {
            let count = |counts: &BTreeMap<String, usize>| counts.get(name).copied().unwrap_or(0);
            let (fetched, freed) = (count(&self.workers.fetched), count(&self.workers.frees));
            assert_eq!(fetched + freed, *owners, "handoff {name} is fetched or freed");
        }
    }
}

impl Workers {
    fn compute(&mut self, compute: Compute) {
        let Compute { request, offer, until, blocks } = compute;
        if let Some(offer) = offer {
            let new = OfferedBlocks { tokens: offer.tokens, until: 0, tables: vec![] };
            assert!(self.offers.insert(request.clone(), new).is_none(), "{request} offered twice");
        }
        let known = self.offers.get_mut(&request).expect("it was offered");
        assert!(until > known.until, "{request} makes no progress");
        known.until = until;
        known.tables.resize(blocks.len().max(known.tables.len()), BlockTable::default());
        for (table, more) in known.tables.iter_mut().zip(&blocks) {
            let follows = u64::from(more.first) == table.end();
            // The only block of a state is not its first.
            assert!(follows || table.blocks.is_empty(), "{request}: no overlap and no gap");
            table.merge(more).expect("they are contiguous");
        }
    }
}

proptest! {
    #[test]
    fn every_handoff_ends_once_on_each_side_and_leaves_nothing(
        bytes in prop::collection::vec(any::<u8>(), 1..600),
    ) {
        let mut script = Script::new(&bytes);
        let groups = [&[FULL][..], &[FULL, WINDOW], &[CHUNK, FULL, WINDOW], &[FULL, STATE]];
        let mut world = World::new(script.pick(&groups), script.flip());
        while !script.is_empty() {
            world.act(&mut script);
        }
        world.end();
    }
}
