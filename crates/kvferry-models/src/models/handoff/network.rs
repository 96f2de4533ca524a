//! Time, messages and connections, and ranks that are killed and stopped.

use super::*;

impl World<'_, '_> {
    pub(super) fn cut(&mut self, p: usize, d: usize, code: WireCode, comes_back: bool) {
        let wire = self.wires.get_mut(&(p, d)).unwrap();
        if !wire.up {
            return;
        }
        wire.up = false;
        wire.dead = false;
        wire.connection += 1;
        let (producer, consumer) = (self.producers[p].incarnation, self.consumers[d].incarnation);
        let gone = !comes_back;
        self.producers[p].machine.lost(consumer, code, gone, self.now);
        self.consumers[d].machine.lost(producer, code, gone, self.now);
        let after = ms(self.script.below(150) as u64 * 10);
        self.at(self.now + after, Event::Reconnect(p, d));
    }

    pub(super) fn reconnect(&mut self, p: usize, d: usize) {
        if !self.producers[p].runs() || !self.consumers[d].runs() {
            let later = self.now + ms(100);
            return self.at(later, Event::Reconnect(p, d));
        }
        let wire = self.wires.get_mut(&(p, d)).unwrap();
        if wire.up {
            return;
        }
        wire.up = true;
        wire.delay = 1;
        wire.busy = [self.now; 2];
        let (producer, consumer) = (self.producers[p].incarnation, self.consumers[d].incarnation);
        self.producers[p].machine.met(consumer);
        self.consumers[d].machine.met(
            producer,
            kvferry_proto::Incarnation(producer.0.into()),
            self.now,
        );
    }

    pub(super) fn kill_producer(&mut self, p: usize) {
        for request in 0..REQUESTS {
            if let Some(made) = self.made.remove(&(request, p)) {
                self.disturbed.insert(request);
                self.free[p].extend(made.blocks);
            }
            if self.got.keys().any(|(other, _)| *other == request) {
                self.disturbed.insert(request);
            }
        }
        self.memory[p] = [[0; LAYERS as usize]; BLOCKS as usize];
        let is_noticed = self.script.flip();
        for d in 0..self.consumers.len() {
            if is_noticed {
                // Refused when it is tried again, or answered by another incarnation.
                self.cut(p, d, WireCode::Closed, false);
            } else {
                // No session led to it, or one that was open in name only.
                self.cut(p, d, WireCode::Closed, true);
            }
            let incarnation = self.producers[p].incarnation;
            self.consumers[d].machine.lost(incarnation, WireCode::StaleIncarnation, true, self.now);
        }
        self.producers[p] = self.producer(self.producers[p].origin);
    }

    pub(super) fn kill_consumer(&mut self, d: usize) {
        for request in 0..REQUESTS {
            self.got.remove(&(request, d));
            self.disturbed.insert(request);
        }
        self.reads.retain(|(consumer, _), _| *consumer != d);
        for p in 0..self.producers.len() {
            self.cut(p, d, WireCode::Closed, false);
            let incarnation = self.consumers[d].incarnation;
            self.producers[p].machine.lost(incarnation, WireCode::StaleIncarnation, true, self.now);
        }
        let (machine, origin) = (Consumer::new(self.limits.clone()), self.consumers[d].origin);
        self.consumers[d] = self.rank(machine, origin);
    }

    /// Lets time pass, event by event.
    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            self.work();
            let producers = self.producers.iter().filter(|rank| rank.runs());
            let consumers = self.consumers.iter().filter(|rank| rank.runs());
            let timers = producers.filter_map(|rank| rank.machine.next_timeout());
            let others = consumers.filter_map(|rank| rank.machine.next_timeout());
            let event = self.events.keys().next().map(|(at, _)| *at);
            let next = timers.chain(others).chain(event).min();
            let Some(next) = next.filter(|next| *next <= until) else { break };
            self.now = self.now.max(next);
            while let Some(first) = self.events.first_entry()
                && first.key().0 <= self.now
            {
                let event = first.remove();
                self.happen(event);
            }
            for rank in self.producers.iter_mut().filter(|rank| rank.runs()) {
                rank.machine.expire(self.now);
            }
            for rank in self.consumers.iter_mut().filter(|rank| rank.runs()) {
                rank.machine.expire(self.now);
            }
        }
        self.now = until;
        self.work();
    }

    pub(super) fn happen(&mut self, event: Event) {
        match event.clone() {
            Event::Message { to, from, message, connection } => {
                let Some((p, d)) = self.places(from, to) else { return };
                let wire = &self.wires[&(p, d)];
                if connection.is_some_and(|c| c != wire.connection || !wire.up) || wire.dead {
                    return;
                }
                let is_producer = self.producers[p].incarnation == to;
                let stopped = *self.stopped(is_producer, if is_producer { p } else { d });
                match stopped {
                    Some(until) => self.at(until + ms(1), event),
                    None if is_producer => {
                        let origin = self.consumers[d].origin;
                        self.producers[p].machine.receive(from, origin, message, self.now);
                    }
                    None => self.hear(d, from, message),
                }
            }
            Event::Step { consumer, incarnation, read } => self.step(consumer, incarnation, read),
            Event::Reconnect(p, d) => self.reconnect(p, d),
            Event::Silent(p, d, connection) => {
                // A stopped rank notices when it goes on; here both notice at once.
                if self.wires[&(p, d)].connection == connection {
                    self.cut(p, d, WireCode::Silent, false);
                }
            }
            Event::Wake(is_producer, rank) => {
                let now = self.now;
                let stopped = self.stopped(is_producer, rank);
                *stopped = stopped.filter(|until| *until > now);
            }
        }
        self.work();
    }

    /// A message arrives at a consumer. What it refuses for room, it refuses to those that have too much of what it has
    /// not read.
    pub(super) fn hear(&mut self, d: usize, from: PeerId, message: HandoffMessage) {
        let (origin, now) = (self.origins[&from], self.now);
        let more = match &message {
            HandoffMessage::Offer(it) => Some(request_of(&it.id)),
            HandoffMessage::Ready(it) => Some(request_of(&it.id)),
            _ => None,
        };
        let machine = &mut self.consumers[d].machine;
        machine.expire(now);
        let (before, mut held) = (self.under_way(d), self.held(d));
        self.consumers[d].machine.receive(from, origin, message, now);
        let announced = gauge(&self.consumers[d].machine, "announced_bytes");
        let room = self.limits.announced_bytes;
        assert!(announced <= room, "I8: announcements take {announced} of {room} bytes");
        let Some(more) = more else { return };
        *held.entry(from).or_default() += announced_bytes(more);
        let after = self.under_way(d);
        for request in before.keys().filter(|request| !after.contains_key(*request)) {
            let is_over = before[request].iter().any(|peer| self.has_too_much(&held, *peer));
            assert!(is_over, "I8: request {request} is refused for what others have: {held:?}");
        }
    }

    /// Requests that a consumer asks for, each with the producers from which it has not read everything.
    pub(super) fn under_way(&self, d: usize) -> BTreeMap<usize, Vec<PeerId>> {
        let machine = &self.consumers[d].machine;
        let states = |request| {
            let state = move |peer: &PeerId| Some((*peer, machine.state(&id(request), *peer)?));
            self.origins.keys().filter_map(state).filter(|(_, state)| *state != "ending")
        };
        let is_read = |state: &str| matches!(state, "confirming" | "confirmed");
        let all = (0..REQUESTS).filter(|request| states(*request).next().is_some());
        let unread = |request| states(request).filter(|(_, state)| !is_read(state));
        all.map(|it| (it, unread(it).map(|(peer, _)| peer).collect())).collect()
    }

    /// Bytes of the announcements of each producer that a consumer keeps, at most.
    pub(super) fn held(&self, d: usize) -> BTreeMap<PeerId, usize> {
        let machine = &self.consumers[d].machine;
        let of_peer = |peer: PeerId| {
            let tables = (0..REQUESTS).filter_map(|request| machine.table(&id(request), peer));
            let bytes = |it: &BlockTable| 4 * it.blocks.len();
            tables.map(|tables| tables.map(bytes).sum::<usize>() + SIDE_BYTES).sum()
        };
        self.origins.keys().map(|peer| (*peer, of_peer(*peer))).collect()
    }

    /// Whether a producer, its host and its network may each have more than an equal part of the room.
    pub(super) fn has_too_much(&self, held: &BTreeMap<PeerId, usize>, peer: PeerId) -> bool {
        let network = |peer: PeerId| self.origins[&peer].network();
        let host = |peer: PeerId| self.origins[&peer].host();
        let held = || held.iter().filter(|(_, bytes)| **bytes > 0).map(|(peer, it)| (*peer, *it));
        let networks: BTreeSet<_> = held().map(|(other, _)| network(other)).collect();
        let of_network = || held().filter(|(other, _)| network(*other) == network(peer));
        let hosts: BTreeSet<_> = of_network().map(|(other, _)| host(other)).collect();
        let of_host = || of_network().filter(|(other, _)| host(*other) == host(peer));
        let own = of_host().filter(|(other, _)| *other == peer).map(|(_, bytes)| bytes).sum();
        let sum = |all: &mut dyn Iterator<Item = (PeerId, usize)>| all.map(|(_, it)| it).sum();
        let sizes: [usize; 3] = [sum(&mut of_network()), sum(&mut of_host()), own];
        let (networks, hosts, peers) = (networks.len(), hosts.len(), of_host().count());
        let parts = [networks, networks * hosts, networks * hosts * peers];
        sizes.into_iter().zip(parts).all(|(size, parts)| size * parts > self.limits.announced_bytes)
    }

    pub(super) fn stopped(&mut self, is_producer: bool, rank: usize) -> &mut Option<Timestamp> {
        match is_producer {
            true => &mut self.producers[rank].stopped,
            false => &mut self.consumers[rank].stopped,
        }
    }

    /// The ranks of two incarnations, a producer's and a consumer's in any order, unless one is over.
    pub(super) fn places(&self, a: PeerId, b: PeerId) -> Option<(usize, usize)> {
        let producer = self
            .producers
            .iter()
            .position(|rank| rank.incarnation == a || rank.incarnation == b)?;
        let consumer = self
            .consumers
            .iter()
            .position(|rank| rank.incarnation == a || rank.incarnation == b)?;
        Some((producer, consumer))
    }

    pub(super) fn send(&mut self, from: PeerId, to: PeerId, message: HandoffMessage) {
        let read = HandoffMessage::decode(&message.encode());
        assert_eq!(read.as_ref(), Ok(&message), "what is sent can be read");
        let Some((p, d)) = self.places(from, to) else { return };
        let way = usize::from(self.producers[p].incarnation == to);
        let wire = self.wires.get_mut(&(p, d)).unwrap();
        if !wire.up {
            return;
        }
        let event = Event::Message { to, from, message, connection: Some(wire.connection) };
        let arrives = (self.now + ms(wire.delay)).max(wire.busy[way]);
        wire.busy[way] = arrives;
        wire.last = Some(event.clone());
        self.at(arrives, event);
    }
}
