//! The engine that offers prompts.

use super::{Content, Waiting, directory_limits, limits, machine};
use crate::exchange::machine::{Machine, Seam};
use crate::metadata::{Compute, ConnectorMetadata, Ending, EndingKind, Notes, RequestOutcome};
use kvferry_proto::directory::{ContentKey, Publisher};
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::{
    BlockTable, HandoffId, HandoffMessage, Outcome, PeerId, Producer, ProducerAction, Progress,
};
use kvferry_proto::{Timestamp, WireCode};
use std::collections::BTreeMap;
use std::ops::Range;

/// What a slot has that no offer has.
pub(super) const POISON: u64 = 0;

pub(super) struct Prefill {
    pub(super) engine: EngineId,
    pub(super) machine: Machine,
    pub(super) side: Side,
    pub(super) computing: Vec<Computing>,
    /// The number of the last copy that has begun.
    pub(super) copies: u64,
    peers: Vec<PeerId>,
    /// The last copy that all ranks have made, and the last that a rank has not.
    made: (u64, u64),
}

/// A request whose prompt is computed.
pub(super) struct Computing {
    pub(super) offer: u64,
    pub(super) content: Content,
    /// Blocks that were scheduled.
    pub(super) blocks: u32,
    /// The last copy that has blocks of it.
    pub(super) copy: u64,
}

pub(super) struct Side {
    pub(super) now: Timestamp,
    pub(super) stopped: bool,
    pub(super) waiting: Waiting,
    pub(super) ranks: Vec<Rank>,
    pub(super) publisher: Publisher,
    /// When the last copy ends.
    pub(super) busy: Timestamp,
}

pub(super) struct Rank {
    pub(super) machine: Producer,
    pub(super) produced: BTreeMap<String, Produced>,
    pub(super) memory: Vec<u64>,
    sent: Vec<String>,
    lost: Vec<RequestOutcome>,
}

/// A request on one rank.
pub(super) struct Produced {
    transfer: HandoffId,
    tokens: u32,
    offered: bool,
    tables: Vec<BlockTable>,
    until: u32,
    complete: bool,
    ended: bool,
    held: bool,
}

impl Prefill {
    pub(super) fn new(numbers: &mut u64, ranks: usize, now: Timestamp) -> Self {
        let mut number = || {
            *numbers += 1;
            *numbers
        };
        let engine = EngineId(number().into());
        let rank = || Rank {
            machine: Producer::new(limits()),
            produced: BTreeMap::new(),
            memory: vec![POISON; super::SLOTS as usize],
            sent: Vec::new(),
            lost: Vec::new(),
        };
        let publisher = Publisher::new(engine, "10.0.0.1:1".to_owned(), directory_limits());
        let side = Side {
            now,
            stopped: false,
            waiting: Waiting::new(),
            ranks: (0..ranks).map(|_| rank()).collect(),
            publisher,
            busy: now,
        };
        let peers = (0..=ranks).map(|_| PeerId(number())).collect();
        let machine = machine(engine, ranks);
        Self { engine, machine, side, computing: Vec::new(), copies: 0, peers, made: (0, 0) }
    }

    /// A rank's, or at the end the directory's.
    pub(super) fn peer(&self, at: usize) -> PeerId {
        self.peers[at]
    }

    pub(super) fn next_timeout(&self) -> Option<Timestamp> {
        let ranks = self.side.ranks.iter().filter_map(|rank| rank.machine.next_timeout());
        ranks.chain(self.side.publisher.next_timeout()).min()
    }

    pub(super) fn expire(&mut self, now: Timestamp) {
        self.side.ranks.iter_mut().for_each(|rank| rank.machine.expire(now));
        self.side.publisher.expire(now);
    }

    /// All ranks have made a copy, or one of them has not.
    pub(super) fn copied(
        &mut self,
        offer: u64,
        content: Content,
        blocks: Range<u32>,
        copy: u64,
        lost: bool,
    ) {
        let slots = self.machine.offered(offer).expect("I2: slots are kept until they were copied");
        for (number, rank) in self.side.ranks.iter_mut().enumerate() {
            for block in blocks.clone().filter(|_| !lost || number > 0) {
                rank.memory[(slots.start + block) as usize] = content.kv(block, number);
            }
        }
        self.made = (copy, if lost { copy } else { self.made.1 });
        self.machine.made(self.made.0, self.made.1);
        self.machine.announce(&mut self.side);
    }

    /// Does what a rank's machine says. Returns the messages.
    pub(super) fn poll(&mut self, rank: usize) -> Vec<(PeerId, HandoffMessage)> {
        let rank = &mut self.side.ranks[rank];
        let mut messages = Vec::new();
        while let Some(action) = rank.machine.poll() {
            match action {
                ProducerAction::Send { to, message } => messages.push((to, message)),
                ProducerAction::Watch { .. } => {}
                ProducerAction::Ended { id, outcome } => rank.ended(&id, outcome),
            }
        }
        messages
    }

    /// Takes the requests on. False if nothing has changed.
    pub(super) fn report(&mut self) -> bool {
        let mut has_changed = false;
        for number in 0..self.side.ranks.len() {
            let rank = &mut self.side.ranks[number];
            let (sent, lost) = (std::mem::take(&mut rank.sent), std::mem::take(&mut rank.lost));
            has_changed |= !sent.is_empty() || !lost.is_empty();
            let notes = Notes { lost, ..Notes::default() };
            if !notes.is_empty() {
                self.machine.noted(number, &notes.encode());
            }
            for request in sent {
                self.machine.sent(&mut self.side, number, &request);
            }
        }
        if has_changed {
            self.machine.carry(&mut self.side, None);
        }
        let mut kept = vec![false; super::SLOTS as usize];
        self.machine.all_offered().flatten().for_each(|slot| kept[slot as usize] = true);
        for rank in &mut self.side.ranks {
            let free = rank.memory.iter_mut().zip(&kept).filter(|(_, is_kept)| !**is_kept);
            free.for_each(|(value, _)| *value = POISON);
        }
        has_changed
    }
}

impl Seam for Side {
    fn carry(&mut self, metadata: &[u8], _is_computed: bool) {
        let metadata = ConnectorMetadata::decode(metadata).expect("it was encoded");
        let of_consumers = (&metadata.claims, &metadata.fetches, &metadata.frees);
        assert!(
            of_consumers.0.is_empty() && of_consumers.1.is_empty() && of_consumers.2.is_empty()
        );
        for rank in &mut self.ranks {
            rank.apply(&metadata, self.now);
        }
    }

    fn publish(&mut self, key: ContentKey, transfer: &HandoffId) -> bool {
        self.publisher.publish(key, transfer, self.now).is_ok()
    }

    fn retract(&mut self, transfer: &HandoffId) {
        self.publisher.retract(transfer);
    }
}

impl Rank {
    fn apply(&mut self, metadata: &ConnectorMetadata, now: Timestamp) {
        assert!(metadata.restarts.is_empty(), "no exchange preempts a request");
        for ending in &metadata.endings {
            self.end(ending, now);
        }
        for compute in &metadata.computes {
            self.compute(compute, now);
        }
        for expect in &metadata.expects {
            self.machine.expect(&expect.transfer, now).expect("there is room");
        }
    }

    fn compute(&mut self, Compute { request, offer, until, blocks }: &Compute, now: Timestamp) {
        if let Some(offer) = offer {
            let new = Produced {
                transfer: offer.transfer.clone(),
                tokens: offer.tokens,
                offered: false,
                tables: Vec::new(),
                until: 0,
                complete: false,
                ended: false,
                held: false,
            };
            assert!(offer.eager, "an exchange offers what is complete as soon as it is");
            let known = self.produced.entry(request.clone()).or_insert(new);
            match self.machine.offer(&offer.transfer, now) {
                Ok(()) => known.offered = true,
                Err(refusal) => {
                    let (code, detail) = (refusal.code(), refusal.to_string());
                    self.lost.push(outcome(request, code, detail));
                }
            }
        }
        let Some(known) = self.produced.get_mut(request) else { return };
        if known.ended || !known.offered {
            return;
        }
        for (at, table) in blocks.iter().enumerate() {
            match known.tables.get_mut(at) {
                Some(all) => all.merge(table).expect("blocks follow each other"),
                None => known.tables.push(table.clone()),
            }
        }
        known.until = (*until).min(known.tokens);
        let (tables, progress) = (std::mem::take(&mut known.tables), Progress::tokens(known.until));
        let announced = if known.until == known.tokens {
            known.complete = true;
            self.machine.complete(&known.transfer, tables, progress, None, now)
        } else {
            self.machine.advance(&known.transfer, tables, progress)
        };
        // It may have ended a moment ago.
        drop(announced);
    }

    fn end(&mut self, Ending { request, transfer, how }: &Ending, now: Timestamp) {
        let known = self.produced.get_mut(request);
        match (how, known) {
            (EndingKind::Withdrawn { code, detail, held }, known) => {
                let has_ended = known.as_ref().is_some_and(|known| known.ended);
                let is_held = known.is_some_and(|known| known.held);
                if !has_ended {
                    drop(self.machine.withdraw(transfer, *code, detail, now));
                }
                if *held {
                    self.forget(request);
                } else if !is_held {
                    self.produced.remove(request);
                }
            }
            (EndingKind::Held { .. }, Some(known)) => {
                if !known.ended && !known.complete && known.offered {
                    let (code, detail) = (WireCode::Internal, "it was not computed");
                    drop(self.machine.withdraw(transfer, code, detail, now));
                }
                known.held = true;
                if !known.offered {
                    drop(self.machine.withdraw(transfer, WireCode::Busy, "not offered", now));
                }
                if known.ended || !known.offered {
                    self.forget(request);
                }
            }
            (EndingKind::Held { .. }, None) => {
                drop(self.machine.withdraw(transfer, WireCode::Busy, "not offered", now));
                self.forget(request);
            }
        }
    }

    fn forget(&mut self, request: &str) {
        self.produced.remove(request);
        self.sent.push(request.to_owned());
    }

    fn ended(&mut self, id: &HandoffId, outcome: Outcome) {
        let found = self.produced.iter_mut().find(|(_, known)| known.transfer == *id);
        let Some((request, known)) = found else { return };
        known.ended = true;
        let (request, is_held) = (request.clone(), known.held);
        if !outcome.is_done() {
            self.lost.push(self::outcome(&request, outcome.code, outcome.detail));
        }
        if is_held {
            self.forget(&request);
        }
    }
}

pub(super) fn outcome(request: &str, code: WireCode, detail: String) -> RequestOutcome {
    RequestOutcome { request: request.to_owned(), code, detail, side_data: Vec::new() }
}
