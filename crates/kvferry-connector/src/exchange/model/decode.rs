//! The engine that fetches prompts.

use super::prefill::{POISON, outcome};
use super::{
    Content, LOOK_UP, SLOTS, THERE, Waiting, Wire, directory_limits, limits, machine, prompt,
};
use crate::exchange::machine::{Machine, Seam};
use crate::metadata::{Cancel, ConnectorMetadata, FetchRequest, Notes, RequestOutcome};
use kvferry_proto::directory::{ContentKey, Subscriber};
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::{
    BlockTable, Consumer, ConsumerAction, HandoffId, HandoffMessage, NULL_BLOCK, Need, Outcome,
    PeerId, ProducerRank, ReadId, Refusal,
};
use kvferry_proto::{Timestamp, WireCode};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

pub(super) struct Decode {
    pub(super) engine: EngineId,
    pub(super) machine: Machine,
    pub(super) side: Side,
    pub(super) look_ups: Vec<LookUp>,
    /// The slots of fetched prompts that are not given back yet.
    pub(super) kept: Vec<Range<u32>>,
    peers: Vec<PeerId>,
}

/// A look-up that waits for its fetch.
pub(super) struct LookUp {
    pub(super) request: String,
    pub(super) content: Content,
    /// The first block that is needed.
    pub(super) first: u32,
    pub(super) began: Timestamp,
    pub(super) until: Timestamp,
    /// The time that each fetch before this one has taken in vain.
    pub(super) missed: Vec<Duration>,
}

pub(super) struct Side {
    pub(super) now: Timestamp,
    pub(super) stopped: bool,
    pub(super) waiting: Waiting,
    pub(super) ranks: Vec<Rank>,
    pub(super) subscriber: Subscriber,
    /// The sessions of the ranks.
    pub(super) wires: Vec<Wire>,
}

pub(super) struct Rank {
    pub(super) machine: Consumer,
    memory: Vec<u64>,
    pub(super) fetches: BTreeMap<HandoffId, Fetching>,
    pub(super) reads: BTreeMap<ReadId, Reading>,
    fetched: Vec<RequestOutcome>,
    answered: Vec<String>,
}

/// A fetch on one rank.
pub(super) struct Fetching {
    request: String,
    tokens: (u32, u32),
    table: BlockTable,
    cancelled: Option<(WireCode, String)>,
}

pub(super) struct Reading {
    id: HandoffId,
    /// The slots here and there.
    places: Vec<(u32, u32)>,
    is_cancelled: bool,
}

impl Decode {
    pub(super) fn new(numbers: &mut u64, ranks: usize, now: Timestamp) -> Self {
        let mut number = || {
            *numbers += 1;
            *numbers
        };
        let engine = EngineId(number().into());
        let rank = || Rank {
            machine: Consumer::new(limits()),
            memory: vec![POISON; SLOTS as usize],
            fetches: BTreeMap::new(),
            reads: BTreeMap::new(),
            fetched: Vec::new(),
            answered: Vec::new(),
        };
        let side = Side {
            now,
            stopped: false,
            waiting: Waiting::new(),
            ranks: (0..ranks).map(|_| rank()).collect(),
            subscriber: Subscriber::new(engine, THERE.0 + 1, directory_limits(), now),
            wires: Vec::new(),
        };
        let peers = (0..=ranks).map(|_| PeerId(number())).collect();
        let machine = machine(engine, ranks);
        Self { engine, machine, side, look_ups: Vec::new(), kept: Vec::new(), peers }
    }

    /// A rank's, or at the end the directory's.
    pub(super) fn peer(&self, at: usize) -> PeerId {
        self.peers[at]
    }

    pub(super) fn next_timeout(&self) -> Option<Timestamp> {
        let ranks = self.side.ranks.iter().filter_map(|rank| rank.machine.next_timeout());
        ranks.chain(self.side.subscriber.next_timeout()).min()
    }

    pub(super) fn expire(&mut self, now: Timestamp) {
        self.side.ranks.iter_mut().for_each(|rank| rank.machine.expire(now));
        self.side.subscriber.expire(now);
    }

    /// Compares what was fetched.
    pub(super) fn check(&self, content: Content, first: u32, slots: &Range<u32>) {
        assert_eq!(slots.len() as u32, prompt(content.prompt).blocks - first);
        for (rank, it) in self.side.ranks.iter().enumerate() {
            for (slot, block) in slots.clone().zip(first..) {
                let value = it.memory[slot as usize];
                assert_eq!(value, content.kv(block, rank), "I7: block {block} on rank {rank}");
            }
        }
    }

    /// Does what a rank's machine says. Returns the messages, and reads to begin.
    pub(super) fn poll(&mut self, rank: usize) -> (Vec<(PeerId, HandoffMessage)>, Vec<ReadId>) {
        let rank = &mut self.side.ranks[rank];
        let (mut messages, mut reads) = (Vec::new(), Vec::new());
        while let Some(action) = rank.machine.poll() {
            match action {
                ConsumerAction::Send { to, message } => messages.push((to, message)),
                ConsumerAction::Watch { .. } => {}
                ConsumerAction::Read { read, id, from, slice } => {
                    let fetch = &rank.fetches[&id];
                    let mut tables = rank.machine.table(&id, from).expect("it is under way");
                    let table = tables.next().expect("there is one group");
                    let mut places = Vec::new();
                    for rectangle in slice.from.until(&slice.to, 1) {
                        let needed = |token: &u32| (fetch.tokens.0..fetch.tokens.1).contains(token);
                        for token in rectangle.tokens.filter(needed) {
                            let theirs = table.block(token).expect("what is ready has a block");
                            let ours = fetch.table.block(token).expect("it has blocks for all");
                            assert!(theirs != NULL_BLOCK && ours != NULL_BLOCK);
                            places.push((ours, theirs));
                        }
                    }
                    drop(tables);
                    rank.reads.insert(read, Reading { id, places, is_cancelled: false });
                    reads.push(read);
                }
                ConsumerAction::CancelRead(read) => {
                    if let Some(reading) = rank.reads.get_mut(&read) {
                        reading.is_cancelled = true;
                    }
                }
                ConsumerAction::Answered { id } => {
                    let fetch = rank.fetches.get(&id);
                    rank.answered.extend(fetch.map(|fetch| fetch.request.clone()));
                }
                ConsumerAction::Ended { id, outcome, .. } => rank.ended(&id, &outcome),
            }
        }
        (messages, reads)
    }

    /// A read copies a slot, or finds that it can't. False if it has ended. `theirs`: the memory of the rank that it reads
    /// from, if that is still there.
    pub(super) fn read(
        &mut self,
        rank: usize,
        read: ReadId,
        wire: &Wire,
        theirs: Option<Vec<u64>>,
        ends_if_cancelled: bool,
        now: Timestamp,
    ) -> bool {
        let rank = &mut self.side.ranks[rank];
        let Some(reading) = rank.reads.get_mut(&read) else { return false };
        let end = if reading.is_cancelled && ends_if_cancelled {
            Err((WireCode::Cancelled, String::new()))
        } else if !wire.up {
            Err((WireCode::Closed, String::new()))
        } else if wire.dead {
            return true;
        } else if let Some((ours, there)) = reading.places.pop() {
            let Some(theirs) = theirs else { return true };
            let request = &rank.fetches[&reading.id].request;
            let slots =
                self.machine.fetched(request).expect("I2: it writes to slots that are kept");
            assert!(slots.contains(&ours), "I2: {ours} of {slots:?}");
            rank.memory[ours as usize] = theirs[there as usize];
            return true;
        } else {
            Ok(())
        };
        rank.reads.remove(&read);
        rank.machine.read_ended(read, end, now);
        false
    }

    /// Takes the fetches on. False if nothing has changed.
    pub(super) fn report(&mut self) -> bool {
        let mut has_changed = false;
        for number in 0..self.side.ranks.len() {
            let rank = &mut self.side.ranks[number];
            let (fetched, answered) =
                (std::mem::take(&mut rank.fetched), std::mem::take(&mut rank.answered));
            let ends: Vec<_> =
                fetched.iter().map(|it| (it.request.clone(), !it.code.is_ok())).collect();
            let notes = Notes { fetched, answered, ..Notes::default() };
            if notes.is_empty() {
                continue;
            }
            has_changed = true;
            self.machine.noted(number, &notes.encode());
            for (request, has_failed) in ends {
                self.machine.received(number, &request, has_failed);
            }
        }
        if has_changed {
            self.machine.carry(&mut self.side, None);
        }
        has_changed
    }
}

impl Side {
    /// Overwrites slots on all ranks.
    pub(super) fn poison(&mut self, slots: Range<u32>) {
        for rank in &mut self.ranks {
            rank.memory[slots.start as usize..slots.end as usize].fill(POISON);
        }
    }

    /// Has the publisher paused for fetches of a look-up.
    pub(super) fn misses(&mut self, missed: &[Duration]) {
        for took in missed {
            self.subscriber.failed(THERE, *took, LOOK_UP, self.now);
        }
    }
}

impl Seam for Side {
    fn carry(&mut self, metadata: &[u8], _is_computed: bool) {
        let metadata = ConnectorMetadata::decode(metadata).expect("it was encoded");
        assert!(metadata.computes.is_empty() && metadata.endings.is_empty());
        for (rank, wire) in self.ranks.iter_mut().zip(&self.wires) {
            rank.apply(&metadata, wire, self.now);
        }
    }

    fn publish(&mut self, _: ContentKey, _: &HandoffId) -> bool {
        unreachable!("this engine computes nothing")
    }

    fn retract(&mut self, _: &HandoffId) {
        unreachable!("this engine computes nothing")
    }
}

impl Rank {
    pub(super) fn apply(&mut self, metadata: &ConnectorMetadata, wire: &Wire, now: Timestamp) {
        let peer = wire.peers[0];
        let source = ProducerRank {
            peer,
            incarnation: None,
            readers: 1,
            connected: wire.up,
            need: Need::ALL,
        };
        for claim in &metadata.claims {
            drop(self.machine.claim(&claim.transfer, &[source], now));
        }
        for fetch in &metadata.fetches {
            self.fetch(fetch, source, wire, now);
        }
        for free in &metadata.frees {
            drop(self.machine.free(&free.transfer, &[(peer, None)], free.code, "", now));
        }
        for cancel in &metadata.cancels {
            self.cancel(cancel, now);
        }
    }

    fn fetch(
        &mut self,
        FetchRequest { request, transfer, engine, tokens, blocks, budget_ms, .. }: &FetchRequest,
        source: ProducerRank,
        wire: &Wire,
        now: Timestamp,
    ) {
        if *engine != Some(wire.engine) {
            let detail = "the engine was restarted".to_owned();
            self.fetched.push(outcome(request, WireCode::StaleIncarnation, detail));
            return;
        }
        let budget = Duration::from_millis((*budget_ms).into());
        match self.machine.want(transfer, &[source], budget, now) {
            Ok(()) => {
                let (request, table) = (request.clone(), blocks[0].clone());
                let fetch = Fetching { request, tokens: *tokens, table, cancelled: None };
                self.fetches.insert(transfer.clone(), fetch);
            }
            Err(refusal) => {
                if !matches!(refusal, Refusal::InUse) {
                    let from = [(source.peer, None)];
                    drop(self.machine.free(transfer, &from, refusal.code(), "", now));
                }
                self.fetched.push(outcome(request, refusal.code(), refusal.to_string()));
            }
        }
    }

    fn cancel(&mut self, Cancel { request, code, detail }: &Cancel, now: Timestamp) {
        let mut fetches = self.fetches.iter_mut();
        if let Some((id, fetch)) = fetches.find(|(_, fetch)| fetch.request == *request) {
            fetch.cancelled.get_or_insert((*code, detail.clone()));
            drop(self.machine.cancel(id, *code, detail, now));
            return;
        }
        let mut done = self.fetched.iter_mut().filter(|it| it.code.is_ok());
        if let Some(it) = done.find(|it| it.request == *request) {
            (it.code, it.detail) = (*code, detail.clone());
        }
    }

    fn ended(&mut self, id: &HandoffId, how: &Outcome) {
        let is_read = self.reads.values().any(|reading| reading.id == *id);
        assert!(!is_read, "I2: nothing is read any more");
        let Some(fetch) = self.fetches.remove(id) else { return };
        let (code, detail) = match fetch.cancelled {
            Some(cancelled) if how.code.is_ok() => cancelled,
            _ => (how.code, how.detail.clone()),
        };
        self.fetched.push(outcome(&fetch.request, code, detail));
    }
}
