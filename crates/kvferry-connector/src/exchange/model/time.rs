//! Virtual time, and what passes between the engines in it.

use super::{Decode, Event, Machine, SILENCE, THERE, World, here, ms};
use kvferry_proto::WireCode;
use kvferry_proto::directory::{DirectoryMessage, PublisherAction, SubscriberAction};
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::{HandoffMessage, PeerId};
use std::ops::Range;
use std::time::Duration;

impl World<'_> {
    pub(super) fn tell_decode(&mut self) {
        let side = &mut self.decode.side;
        side.now = self.now;
        side.wires = self.wires[..self.ranks].to_vec();
    }

    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            self.work();
            let mut due: Vec<_> =
                self.events.keys().next().map(|(at, _)| *at).into_iter().collect();
            if !self.prefill.side.stopped {
                due.extend(self.prefill.next_timeout());
            }
            if !self.decode.side.stopped {
                due.extend(self.decode.next_timeout());
            }
            let Some(next) = due.into_iter().min().filter(|next| *next <= until) else { break };
            self.now = self.now.max(next);
            while let Some(first) = self.events.first_entry()
                && first.key().0 <= self.now
            {
                let event = first.remove();
                self.happen(event);
            }
            if !self.prefill.side.stopped {
                self.prefill.expire(self.now);
            }
            if !self.decode.side.stopped {
                self.decode.expire(self.now);
            }
        }
        self.now = until;
        self.work();
    }

    fn happen(&mut self, event: Event) {
        match event.clone() {
            Event::Handoff { wire: at, from, to, message, connection } => {
                let wire = &self.wires[at];
                if !wire.up || wire.dead || wire.connection != connection {
                    return;
                }
                if self.prefill.peer(at) == to {
                    if self.prefill.side.stopped {
                        return self.prefill.side.waiting.push_back(event);
                    }
                    let machine = &mut self.prefill.side.ranks[at].machine;
                    machine.receive(from, here(), message, self.now);
                } else if self.decode.peer(at) == to {
                    if self.decode.side.stopped {
                        return self.decode.side.waiting.push_back(event);
                    }
                    let machine = &mut self.decode.side.ranks[at].machine;
                    machine.receive(from, here(), message, self.now);
                }
            }
            Event::Directory { to_prefill, message, connection } => {
                let wire = &self.wires[self.ranks];
                if !wire.up || wire.dead || wire.connection != connection {
                    return;
                }
                let [producer, consumer] = wire.peers;
                if to_prefill && self.prefill.peer(self.ranks) == producer {
                    if self.prefill.side.stopped {
                        return self.prefill.side.waiting.push_back(event);
                    }
                    self.prefill.side.publisher.receive(consumer, here(), &message, self.now);
                } else if !to_prefill && self.decode.peer(self.ranks) == consumer {
                    if self.decode.side.stopped {
                        return self.decode.side.waiting.push_back(event);
                    }
                    self.decode.side.subscriber.receive(THERE, message, self.now);
                }
            }
            Event::Copied { engine, offer, content, blocks, copy, lost } => {
                if engine != self.prefill.engine {
                    return;
                }
                if self.prefill.side.stopped {
                    return self.prefill.side.waiting.push_back(event);
                }
                self.prefill.side.now = self.now;
                self.prefill.copied(offer, content, blocks, copy, lost);
            }
            Event::Read { rank, to, read } => {
                if self.decode.peer(rank) != to {
                    return;
                }
                if self.decode.side.stopped {
                    return self.decode.side.waiting.push_back(event);
                }
                let is_slow = self.now < self.slow_until;
                if is_slow {
                    self.struck("reads are slow");
                }
                let slower = if is_slow { 50 } else { 1 };
                let delay = 1 + self.script.below(20) as u64 * slower;
                let is_cancelled_now = self.script.below(4) == 0;
                let wire = self.wires[rank].clone();
                let theirs = (self.prefill.peer(rank) == wire.peers[0])
                    .then(|| self.prefill.side.ranks[rank].memory.clone());
                let goes_on =
                    self.decode.read(rank, read, &wire, theirs, is_cancelled_now, self.now);
                if goes_on {
                    self.at(self.now + ms(delay), event);
                }
            }
            Event::Reconnect(at) => self.reconnect(at),
            Event::Refused(engine) => {
                if self.decode.engine == engine {
                    self.decode.side.subscriber.lost(THERE, self.now);
                }
            }
            Event::Silent(at, connection) => {
                if self.wires[at].connection == connection {
                    self.cut(at, WireCode::Silent, false);
                }
            }
            Event::Wake(engine) => self.wake(engine),
            Event::LookUpEnds { engine, request } => {
                if engine != self.decode.engine {
                    return;
                }
                if self.decode.side.stopped {
                    return self.decode.side.waiting.push_back(event);
                }
                let mut all = self.decode.look_ups.iter();
                if let Some(at) = all.position(|it| it.request == request) {
                    self.end_look_up(at);
                }
            }
            Event::Give { engine, slots, content, first } => {
                if engine != self.decode.engine {
                    return;
                }
                if self.decode.side.stopped {
                    return self.decode.side.waiting.push_back(event);
                }
                self.decode.check(content, first, &slots);
                self.decode.kept.retain(|kept| *kept != slots);
                self.decode.machine.give(slots);
            }
        }
        self.work();
    }

    /// An engine that was stopped takes what has waited for it, and notices what is overdue: the one or the other first.
    fn wake(&mut self, engine: EngineId) {
        let expires_first = self.script.flip();
        let waiting = if self.prefill.engine == engine {
            self.prefill.side.stopped = false;
            if expires_first {
                self.prefill.expire(self.now);
            }
            std::mem::take(&mut self.prefill.side.waiting)
        } else if self.decode.engine == engine {
            self.decode.side.stopped = false;
            if expires_first {
                self.decode.expire(self.now);
            }
            std::mem::take(&mut self.decode.side.waiting)
        } else {
            return;
        };
        waiting.into_iter().for_each(|event| self.happen(event));
    }

    /// Does what the machines say, until they say nothing.
    pub(super) fn work(&mut self) {
        self.prefill.side.now = self.now;
        self.tell_decode();
        let mut goes_on = true;
        while goes_on {
            goes_on = self.work_of_prefill() | self.work_of_decode();
        }
        own_their_slots(&self.prefill.machine, self.prefill.machine.all_offered());
        let kept = self.decode.kept.iter().cloned();
        own_their_slots(&self.decode.machine, self.decode.machine.all_fetched().chain(kept));
    }

    fn work_of_prefill(&mut self) -> bool {
        if self.prefill.side.stopped {
            return false;
        }
        let mut has_worked = false;
        for rank in 0..self.ranks {
            for (to, message) in self.prefill.poll(rank) {
                has_worked = true;
                self.send(rank, self.prefill.peer(rank), to, message);
            }
        }
        while let Some(action) = self.prefill.side.publisher.poll() {
            has_worked = true;
            match action {
                PublisherAction::Send { message, .. } => self.tell(false, message),
                PublisherAction::Refused { .. } => panic!("there is room for one follower"),
                PublisherAction::Disconnect { .. } => self.cut(self.ranks, WireCode::Closed, false),
            }
        }
        self.prefill.side.now = self.now;
        has_worked | self.prefill.report()
    }

    fn work_of_decode(&mut self) -> bool {
        if self.decode.side.stopped {
            return false;
        }
        let mut has_worked = false;
        for rank in 0..self.ranks {
            let (messages, reads) = self.decode.poll(rank);
            has_worked |= !messages.is_empty() || !reads.is_empty();
            for (to, message) in messages {
                self.send(rank, self.decode.peer(rank), to, message);
            }
            for read in reads {
                let to = self.decode.peer(rank);
                let soon = self.now + ms(self.script.below(20) as u64);
                self.at(soon, Event::Read { rank, to, read });
            }
        }
        while let Some(action) = self.decode.side.subscriber.poll() {
            has_worked = true;
            match action {
                SubscriberAction::Connect { .. } => self.connect(),
                SubscriberAction::Send { message, .. } => self.tell(true, message),
                SubscriberAction::Watch { .. } | SubscriberAction::Refused { .. } => {}
                SubscriberAction::Disconnect { .. } => {
                    self.cut(self.ranks, WireCode::Silent, false)
                }
            }
        }
        self.tell_decode();
        has_worked |= self.decode.report();
        let Decode { machine, look_ups, .. } = &self.decode;
        if let Some(at) = look_ups.iter().position(|it| !machine.is_under_way(&it.request)) {
            self.end_look_up(at);
            return true;
        }
        has_worked
    }

    /// The subscriber opens a session to the publisher.
    fn connect(&mut self) {
        let stopped = self.prefill.side.stopped;
        let at = self.ranks;
        let peers = [self.prefill.peer(at), self.decode.peer(at)];
        let wire = &mut self.wires[at];
        if stopped || wire.dead {
            let engine = self.decode.engine;
            return self.at(self.now + SILENCE, Event::Refused(engine));
        }
        (wire.up, wire.peers, wire.busy) = (true, peers, [self.now; 2]);
        self.decode.side.subscriber.opened(THERE, here(), self.now);
    }

    fn send(&mut self, at: usize, from: PeerId, to: PeerId, message: HandoffMessage) {
        let wire = &mut self.wires[at];
        if !wire.up || !wire.peers.contains(&to) {
            return;
        }
        let way = usize::from(wire.peers[1] == to);
        let arrives = (self.now + ms(1)).max(wire.busy[way]);
        wire.busy[way] = arrives;
        let connection = wire.connection;
        self.at(arrives, Event::Handoff { wire: at, from, to, message, connection });
    }

    fn tell(&mut self, to_prefill: bool, message: DirectoryMessage) {
        let wire = &mut self.wires[self.ranks];
        if !wire.up {
            return;
        }
        let way = usize::from(to_prefill);
        let arrives = (self.now + ms(1)).max(wire.busy[way]);
        wire.busy[way] = arrives;
        let connection = wire.connection;
        self.at(arrives, Event::Directory { to_prefill, message, connection });
    }
}

/// Checks that these are all slots that are taken, and that each has one owner.
fn own_their_slots(machine: &Machine, owned: impl Iterator<Item = Range<u32>>) {
    let mut owned: Vec<_> = owned.flatten().collect();
    let gauges = machine.gauges();
    let taken = gauges.iter().find(|(name, _)| *name == "slots").map(|(_, count)| *count);
    assert_eq!(Some(owned.len()), taken, "I8: slots, {owned:?}");
    owned.sort_unstable();
    owned.dedup();
    assert_eq!(Some(owned.len()), taken, "I2: a slot has two owners, {owned:?}");
}
