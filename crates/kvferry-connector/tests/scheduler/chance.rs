//! Random requests under a naive engine, whose blocks are never used twice, so that whatever is
//! told of them can be held against what they are.

use super::{
    CHUNK, FULL, RANKS, STATE, WINDOW, assert_nothing_is_left, consumes, outcome, produces,
    request, scheduler, step,
};
use kvferry_connector::{
    BlockTable, Compute, Finish, GroupRule, How, Match, NULL_BLOCK, Notes, Orders, Params,
    Scheduled, Scheduler, produce,
};
use kvferry_proto::WireCode;
use kvferry_proto::layout::Kind;
use proptest::prelude::*;
use std::collections::BTreeMap;

const NAMES: u8 = 6;

#[derive(Clone, Debug)]
enum Op {
    /// A request of these parameters; `announced` if the engine says that it arrived.
    Arrive { wish: Wish, prompt: u64, says: u64, announced: bool },
    /// One that the engine does not take.
    Reject { wish: Wish },
    /// A request is looked at, and admitted if it can be, with so many of its tokens in the cache.
    Admit { which: usize, cached: u64, admitted: bool },
    /// All that run compute at most so many tokens; one of them may lose its blocks.
    Step { chunk: u64, preempted: Option<usize> },
    /// A request ends for another reason than its length.
    Finish { which: usize, how: Finish },
    /// A rank is through with a request; on the way it may lose a producer's.
    Report { which: usize, rank: usize, code: WireCode, noted: bool },
}

#[derive(Clone, Debug)]
enum Wish {
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
    /// It has ended, and is held, or its load has not ended yet.
    Lingering,
}

#[derive(Debug)]
struct Live {
    wish: Wish,
    params: Params,
    /// What the engine has cut it to.
    prompt: u64,
    /// How many tokens it says before it ends by its length; it computes all but the last.
    says: u64,
    computed: u64,
    phase: Phase,
    /// Whether the next step it is in tells all blocks.
    all: bool,
    /// Per group; and how many of them were told in steps.
    blocks: Vec<Vec<u32>>,
    told: Vec<usize>,
    /// Ranks that are through with it, if it is loading or held.
    through: [bool; RANKS],
    was_lost: bool,
    /// Whether it had blocks before.
    taken: bool,
}

/// What the worker halves know, as far as it can be held against the engine.
#[derive(Debug, Default)]
struct Workers {
    offers: BTreeMap<String, Offered>,
    endings: BTreeMap<String, Vec<How>>,
    wants: BTreeMap<String, usize>,
    cancels: BTreeMap<String, usize>,
    /// By the name of the handoff.
    wanted: BTreeMap<String, usize>,
    frees: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct Offered {
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
    /// Per handoff: how many requests that may take or free it came when no other one was there.
    first: BTreeMap<String, usize>,
}

fn params(wish: &Wish) -> Params {
    match wish {
        Wish::Nothing => Params::new(),
        Wish::Nonsense => {
            let mut params = produce(None);
            params.insert("do_remote_prefill".to_owned(), true.into());
            params
        }
        Wish::Produce(None) => produce(None),
        Wish::Produce(Some(name)) => produces(&name.to_string()),
        Wish::Consume(name) => consumes(&name.to_string()),
    }
}

impl Live {
    const fn is_done(&self) -> bool {
        self.computed >= self.prompt + self.says - 1
    }

    fn consumes(&self, name: u8) -> bool {
        matches!(self.wish, Wish::Consume(other) if other == name)
    }

    fn produces(&self, name: u8) -> bool {
        matches!(self.wish, Wish::Produce(Some(other)) if other == name)
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
            first: BTreeMap::new(),
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Arrive { wish, prompt, says, announced } => {
                // What is not announced is first known when it has blocks: too late to be cut, and
                // to have been the first to name a handoff.
                let named = matches!(wish, Wish::Consume(_) | Wish::Produce(Some(_)));
                let announced = announced || named || self.groups.contains(&STATE);
                self.arrive(wish, prompt, says, announced);
            }
            Op::Reject { wish } => {
                let id = self.arrive(wish, 5, 1, false);
                self.finish(&id, Finish::Abort);
            }
            Op::Admit { which, cached, admitted } => {
                if let Some(id) = self.pick(which, &[Phase::Waiting]) {
                    self.admit(&id, cached, admitted);
                }
            }
            Op::Step { chunk, preempted } => self.step(chunk, preempted),
            Op::Finish { which, how } => {
                let phases = [Phase::Waiting, Phase::Loading, Phase::Running];
                if let Some(id) = self.pick(which, &phases) {
                    self.finish(&id, how);
                }
            }
            Op::Report { which, rank, code, noted } => self.report(which, rank, code, noted),
        }
    }

    fn pick(&self, which: usize, phases: &[Phase]) -> Option<String> {
        let fitting = self.requests.iter().filter(|(_, live)| phases.contains(&live.phase));
        let ids: Vec<&String> = fitting.map(|(id, _)| id).collect();
        (!ids.is_empty()).then(|| ids[which % ids.len()].clone())
    }

    fn arrive(&mut self, wish: Wish, prompt: u64, says: u64, announced: bool) -> String {
        let id = format!("r{}", self.names);
        self.names += 1;
        let is_taken = match wish {
            Wish::Consume(name) => self.requests.values().any(|live| live.consumes(name)),
            Wish::Produce(Some(name)) => self.requests.values().any(|live| live.produces(name)),
            _ => false,
        };
        if !is_taken && let Wish::Consume(name) = wish {
            *self.first.entry(name.to_string()).or_default() += 1;
        }
        let params = params(&wish);
        let wish = if is_taken { Wish::Nothing } else { wish };
        if announced {
            self.scheduler.arrived(&request(&id, prompt, &params));
        }
        let prompt = self.scheduler.prompt_tokens_to_prefill(&request(&id, prompt, &params));
        let groups = self.groups.len();
        let live = Live {
            wish,
            params,
            prompt,
            says,
            computed: 0,
            phase: Phase::Waiting,
            all: true,
            blocks: vec![vec![]; groups],
            told: vec![0; groups],
            through: [false; RANKS],
            was_lost: false,
            taken: false,
        };
        self.requests.insert(id.clone(), live);
        id
    }

    fn admit(&mut self, id: &str, cached: u64, admitted: bool) {
        let live = &self.requests[id];
        let cached = cached.min(live.prompt - 1);
        let view = request(id, live.prompt, &live.params);
        let Match::Tokens(external) = self.scheduler.matched(&view, cached) else {
            panic!("it always knows");
        };
        assert_eq!(self.scheduler.matched(&view, cached), Match::Tokens(external));
        let is_consumer = matches!(live.wish, Wish::Consume(_));
        assert!(is_consumer || external == 0, "{id}: {live:?}");
        assert!(!live.taken || external == 0, "{id} is taken twice");
        if !admitted {
            return;
        }
        self.allocate(id, cached + external);
        let live = self.requests.get_mut(id).expect("live");
        let view = request(id, live.prompt, &live.params);
        self.scheduler.allocated(&view, cached, external, &live.blocks);
        live.computed = cached + external;
        live.taken = true;
        live.through = [false; RANKS];
        live.phase = if external > 0 { Phase::Loading } else { Phase::Running };
    }

    /// Gives a request the blocks that it needs for so many tokens, and takes those that it does
    /// not look at any more.
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

    fn step(&mut self, chunk: u64, preempted: Option<usize>) {
        let preempted = preempted.and_then(|which| self.pick(which, &[Phase::Running]));
        if let Some(id) = &preempted {
            let live = self.requests.get_mut(id).expect("live");
            live.blocks.iter_mut().for_each(Vec::clear);
            live.told.fill(0);
            (live.computed, live.all, live.phase) = (0, true, Phase::Waiting);
        }
        let running: Vec<String> = self
            .requests
            .iter()
            .filter(|(_, live)| live.phase == Phase::Running)
            .map(|(id, _)| id.clone())
            .collect();
        let mut plan = vec![];
        for id in &running {
            let live = &self.requests[id];
            let end = if live.computed < live.prompt { live.prompt } else { live.computed + 1 };
            let tokens = chunk.min(end - live.computed);
            let until = live.computed + tokens;
            self.allocate(id, until);
            let live = self.requests.get_mut(id).expect("live");
            // As the engine does, what does not matter is not told; it makes up for it with all.
            let news = live.blocks.iter().zip(&live.told).map(|(it, told)| it[*told..].to_vec());
            let scheduled = Scheduled {
                request: id,
                computed: live.computed,
                tokens,
                all: live.all,
                blocks: news.collect(),
            };
            live.told = live.blocks.iter().map(Vec::len).collect();
            (live.all, live.computed) = (false, until);
            if self.scheduler.produces(id) {
                plan.push(scheduled);
            }
        }
        let preempted: Vec<&str> = preempted.iter().map(String::as_str).collect();
        let orders = step(&mut self.scheduler, plan, &preempted);
        self.obey(orders);
        self.check_offers(&running);
        for id in running {
            if self.requests[&id].is_done() {
                self.finish(&id, Finish::Length);
            }
        }
    }

    /// What the worker halves do with their orders, in their order.
    fn obey(&mut self, orders: Orders) {
        let workers = &mut self.workers;
        for id in orders.restarts {
            assert!(workers.offers.remove(&id).is_some(), "{id} is restarted without an offer");
        }
        for ending in orders.endings {
            workers.offers.remove(&ending.request);
            workers.endings.entry(ending.request).or_default().push(ending.how);
        }
        for compute in orders.computes {
            assert!(!workers.endings.contains_key(&compute.request), "{compute:?} of what ended");
            workers.compute(compute);
        }
        for want in orders.wants {
            let live = self.requests.get(&want.request).expect("it is awaited");
            assert_eq!(u64::from(want.tokens.1), live.computed);
            *workers.wants.entry(want.request).or_default() += 1;
            let name = want.transfer.as_str().to_owned();
            *workers.wanted.entry(name).or_default() += 1;
        }
        for free in orders.frees {
            *workers.frees.entry(free.transfer.as_str().to_owned()).or_default() += 1;
        }
        for cancel in orders.cancels {
            assert!(workers.wants.contains_key(&cancel.request), "{cancel:?} of nothing");
            *workers.cancels.entry(cancel.request).or_default() += 1;
        }
    }

    /// What was told of requests is what they have, but for what leaves their windows.
    fn check_offers(&self, running: &[String]) {
        for id in running {
            let (live, offer) = (&self.requests[id], self.workers.offers.get(id));
            let Some(offer) = offer.filter(|_| !live.was_lost) else { continue };
            assert_eq!(u64::from(offer.tokens), live.prompt, "{id}");
            assert_eq!(u64::from(offer.until), live.computed.min(live.prompt), "{id}");
            for (at, group) in self.groups.iter().enumerate() {
                let table = &offer.tables[at];
                let size = u64::from(group.block_tokens);
                let needed = u64::from(offer.until).div_ceil(size);
                assert_eq!((table.first, table.blocks.len() as u64), (0, needed), "{id}");
                let horizon = group.kind.horizon(live.prompt - 1);
                for (n, (told, is)) in table.blocks.iter().zip(&live.blocks[at]).enumerate() {
                    if (n as u64 + 1) * size <= horizon {
                        assert_eq!(*told, NULL_BLOCK, "{id}: block {n} leaves {group:?}");
                    } else if group.kind == Kind::State {
                        assert!(told == is || *is == NULL_BLOCK, "{id}: state {n}");
                    } else {
                        assert_eq!(told, is, "{id}: block {n} of {group:?}");
                    }
                }
            }
        }
    }

    /// Whether what a request has can be handed over.
    fn must_be_held(&self, id: &str, how: Finish) -> bool {
        let live = &self.requests[id];
        let is_produced = matches!(live.wish, Wish::Produce(_));
        if !is_produced || how != Finish::Length || live.was_lost {
            return false;
        }
        self.groups.iter().zip(&live.blocks).all(|(group, blocks)| match group.kind {
            Kind::State => live.computed == live.prompt,
            kind => {
                let first = kind.horizon(live.prompt - 1) / u64::from(group.block_tokens);
                !blocks[first as usize..].contains(&NULL_BLOCK)
            }
        })
    }

    fn finish(&mut self, id: &str, how: Finish) {
        let held = self.must_be_held(id, how);
        let live = self.requests.get_mut(id).expect("live");
        let is_loading = live.phase == Phase::Loading;
        let view = request(id, live.prompt, &live.params);
        let finished = self.scheduler.finished(&view, how, Some(vec![1]));
        assert_eq!(finished.held, held, "{id} {how:?}: {live:?}");
        assert!(finished.params.is_none(), "nobody knows an address");
        if held {
            live.through = [false; RANKS];
        }
        if held || is_loading {
            live.phase = Phase::Lingering;
        } else {
            self.leave(id);
        }
    }

    /// A request is gone: what was said of it in all.
    fn leave(&mut self, id: &str) {
        let orders = step(&mut self.scheduler, [], &[]);
        self.obey(orders);
        let live = self.requests.remove(id).expect("live");
        let workers = &self.workers;
        let endings = workers.endings.get(id).map_or(&[][..], Vec::as_slice);
        match live.wish {
            Wish::Produce(name) => {
                let held = endings.iter().filter(|how| matches!(how, How::Held { .. })).count();
                assert_eq!(held, usize::from(live.phase == Phase::Lingering), "{id}");
                assert!(endings.len() == 1 || name.is_none() && endings.is_empty(), "{id}");
                assert!(!workers.offers.contains_key(id), "{id} is still offered");
            }
            Wish::Nothing | Wish::Nonsense | Wish::Consume(_) => assert!(endings.is_empty()),
        }
        let wants = workers.wants.get(id).copied().unwrap_or(0);
        assert!(wants <= 1 && (wants == 0 || matches!(live.wish, Wish::Consume(_))), "{id}");
        let cancels = workers.cancels.get(id).copied().unwrap_or(0);
        assert!(cancels <= wants, "{id}: cancelled {cancels} times");
        if live.phase == Phase::Lingering && wants == 1 {
            assert_eq!(cancels, 1, "{id} ended while it was fetched");
        }
    }

    fn report(&mut self, which: usize, rank: usize, code: WireCode, noted: bool) {
        let phases = [Phase::Running, Phase::Loading, Phase::Lingering];
        let Some(id) = self.pick(which, &phases) else { return };
        let live = self.requests.get_mut(&id).expect("live");
        let is_consumer = matches!(live.wish, Wish::Consume(_));
        if live.phase == Phase::Running {
            if !is_consumer && self.workers.offers.contains_key(&id) {
                live.was_lost |= !code.is_ok();
                let lost = vec![outcome(&id, code)];
                self.scheduler.reported(rank, &Notes { lost, ..Notes::default() }.encode());
            }
            return;
        }
        let workers = &self.workers;
        let is_told = workers.wants.contains_key(&id) || workers.endings.contains_key(&id);
        if !is_told || std::mem::replace(&mut live.through[rank], true) {
            return;
        }
        if is_consumer && noted {
            let fetched = vec![outcome(&id, code)];
            self.scheduler.reported(rank, &Notes { fetched, ..Notes::default() }.encode());
        }
        if live.through != [true; RANKS] {
            return;
        }
        if is_consumer {
            self.scheduler.received([&id[..]]);
        } else {
            self.scheduler.sent([&id[..]]);
        }
        if live.phase == Phase::Lingering {
            self.leave(&id);
        } else {
            live.phase = Phase::Running;
            if !code.is_ok() {
                // It is computed again.
                (live.computed, live.phase) = (0, Phase::Waiting);
                live.blocks.iter_mut().for_each(Vec::clear);
                live.told.fill(0);
                live.all = true;
            }
        }
    }

    /// Everything ends.
    fn end(mut self) {
        while let Some(id) = self.pick(0, &[Phase::Waiting, Phase::Loading, Phase::Running]) {
            self.finish(&id, Finish::Abort);
        }
        assert!(self.scheduler.has_pending_work() || self.requests.is_empty());
        let orders = step(&mut self.scheduler, [], &[]);
        self.obey(orders);
        while let Some(id) = self.pick(0, &[Phase::Lingering]) {
            let rank = self.requests[&id].through.iter().position(|through| !through);
            self.report(0, rank.expect("it lingers"), WireCode::Ok, true);
        }
        let orders = step(&mut self.scheduler, [], &[]);
        self.obey(orders);
        assert_nothing_is_left(&self.scheduler);
        for (name, first) in &self.first {
            let count = |counts: &BTreeMap<String, usize>| counts.get(name).copied().unwrap_or(0);
            let (wanted, freed) = (count(&self.workers.wanted), count(&self.workers.frees));
            assert_eq!(wanted + freed, *first, "handoff {name} is taken or freed");
        }
    }
}

impl Workers {
    fn compute(&mut self, compute: Compute) {
        let Compute { request, offer, until, blocks } = compute;
        if let Some(offer) = offer {
            let new = Offered { tokens: offer.tokens, until: 0, tables: vec![] };
            assert!(self.offers.insert(request.clone(), new).is_none(), "{request} offered twice");
        }
        let known = self.offers.get_mut(&request).expect("it was offered");
        assert!(until > known.until, "{request} does not go on");
        known.until = until;
        known.tables.resize(blocks.len().max(known.tables.len()), BlockTable::default());
        for (table, more) in known.tables.iter_mut().zip(&blocks) {
            assert_eq!(u64::from(more.first), table.end(), "{request}: neither twice nor a gap");
            table.merge(more).expect("they follow");
        }
    }
}

fn wish() -> impl Strategy<Value = Wish> {
    prop_oneof![
        1 => Just(Wish::Nothing),
        1 => Just(Wish::Nonsense),
        2 => Just(Wish::Produce(None)),
        4 => (0..NAMES).prop_map(|name| Wish::Produce(Some(name))),
        6 => (0..NAMES).prop_map(Wish::Consume),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let hows = prop_oneof![Just(Finish::Stop), Just(Finish::Abort), Just(Finish::Error)];
    let codes = prop_oneof![4 => Just(WireCode::Ok), 1 => Just(WireCode::Closed)];
    prop_oneof![
        4 => (wish(), 1..30_u64, 1..6_u64, any::<bool>()).prop_map(
            |(wish, prompt, says, announced)| Op::Arrive { wish, prompt, says, announced }
        ),
        1 => wish().prop_map(|wish| Op::Reject { wish }),
        8 => (any::<usize>(), 0..30_u64, prop::bool::weighted(0.8)).prop_map(
            |(which, cached, admitted)| Op::Admit { which, cached, admitted }
        ),
        8 => (1..16_u64, prop::option::weighted(0.2, any::<usize>()))
            .prop_map(|(chunk, preempted)| Op::Step { chunk, preempted }),
        1 => (any::<usize>(), hows).prop_map(|(which, how)| Op::Finish { which, how }),
        12 => (any::<usize>(), 0..RANKS, codes, any::<bool>()).prop_map(
            |(which, rank, code, noted)| Op::Report { which, rank, code, noted }
        ),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_every_handoff_ends_once_on_either_side_and_nothing_is_left(
        groups in prop_oneof![
            Just(vec![FULL]),
            Just(vec![FULL, WINDOW]),
            Just(vec![CHUNK, FULL, WINDOW]),
            Just(vec![FULL, STATE]),
        ],
        eager in any::<bool>(),
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let mut world = World::new(&groups, eager);
        for op in ops {
            world.apply(op);
        }
        world.end();
    }
}
