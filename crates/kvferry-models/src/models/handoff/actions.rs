//! The actions of the machines, carried out: messages, reads, and what ends.

use super::*;

impl World<'_, '_> {
    /// A read copies a little, or finds that it can't.
    pub(super) fn step(&mut self, d: usize, incarnation: PeerId, read: ReadId) {
        if self.consumers[d].incarnation != incarnation {
            return;
        }
        if let Some(until) = self.consumers[d].stopped {
            return self.at(until + ms(1), Event::Step { consumer: d, incarnation, read });
        }
        let Some(reading) = self.reads.get_mut(&(d, read)) else { return };
        let p = reading.producer;
        let wire = &self.wires[&(p, d)];
        let is_same = self.producers[p].incarnation == reading.incarnation;
        // A cancelled read may end later.
        let end = if reading.cancelled && self.script.below(4) == 0 {
            Err((WireCode::Cancelled, String::new()))
        } else if !is_same || !wire.up {
            Err((WireCode::Closed, String::new()))
        } else if std::mem::take(&mut self.fail_next_read) {
            Err((WireCode::Checksum, "a piece differs".to_owned()))
        } else if wire.dead {
            let later = self.now + ms(100);
            return self.at(later, Event::Step { consumer: d, incarnation, read });
        } else if let Some((token, layer, block)) = reading.places.pop() {
            let request = reading.request;
            let value = self.memory[p][block as usize][layer as usize];
            let got = self.got.get_mut(&(request, d)).expect("it was wanted");
            assert!(got.ended.is_none(), "I2: written to after it ended");
            got.values.insert((p, token, layer), value);
            let later = self.now + ms(self.script.below(8) as u64);
            return self.at(later, Event::Step { consumer: d, incarnation, read });
        } else {
            Ok(())
        };
        self.reads.remove(&(d, read));
        self.consumers[d].machine.read_ended(read, end, self.now);
    }

    /// Does what the machines ask for, until they ask for nothing.
    pub(super) fn work(&mut self) {
        for p in 0..self.producers.len() {
            while self.producers[p].runs()
                && let Some(action) = self.producers[p].machine.poll()
            {
                self.do_for_producer(p, action);
            }
        }
        for d in 0..self.consumers.len() {
            while self.consumers[d].runs()
                && let Some(action) = self.consumers[d].machine.poll()
            {
                self.do_for_consumer(d, action);
            }
        }
    }

    pub(super) fn do_for_producer(&mut self, p: usize, action: ProducerAction) {
        match action {
            ProducerAction::Send { to, message } => {
                self.send(self.producers[p].incarnation, to, message);
            }
            ProducerAction::Watch { .. } => {}
            ProducerAction::Ended { id, outcome } => {
                let request = request_of(&id);
                let made = self.made.get_mut(&(request, p)).expect("I1: it was offered");
                assert_eq!(made.ended, None, "I1: it ends once");
                made.ended = Some(outcome);
                self.take_back(request, p);
            }
        }
    }

    pub(super) fn do_for_consumer(&mut self, d: usize, action: ConsumerAction) {
        match action {
            ConsumerAction::Send { to, message } => {
                self.send(self.consumers[d].incarnation, to, message);
            }
            ConsumerAction::Read { read, id, from, slice } => {
                self.begin_read(d, read, &id, from, slice)
            }
            ConsumerAction::Watch { .. } => {}
            ConsumerAction::CancelRead(read) => {
                if let Some(reading) = self.reads.get_mut(&(d, read)) {
                    reading.cancelled = true;
                }
            }
            ConsumerAction::Answered { id } => {
                // A claim that a want has not continued yet is answered, too.
                if let Some(got) = self.got.get_mut(&(request_of(&id), d)) {
                    assert_eq!(got.ended, None, "the answer comes before the end");
                    assert!(!got.is_answered, "one answer is said of a want");
                    got.is_answered = true;
                }
            }
            ConsumerAction::Ended { id, outcome, side_data } => {
                let request = request_of(&id);
                let mut reads = self.reads.iter();
                let is_read = reads.any(|((of, _), read)| *of == d && read.request == request);
                assert!(!is_read, "I2: nothing is read any more");
                let got = self.got.get_mut(&(request, d)).expect("I1: it was wanted");
                assert_eq!(got.ended, None, "I1: it ends once");
                if outcome.code == WireCode::StaleIncarnation && !got.is_answered {
                    // It may be wanted again, from the incarnation that is there.
                    self.got.remove(&(request, d));
                    return;
                }
                if outcome.is_done() {
                    assert!(got.is_answered, "what is done was answered");
                    let places = (0..self.producers.len()).flat_map(|p| {
                        let tokens = 0..tokens_of(request);
                        tokens.flat_map(move |token| (0..LAYERS).map(move |l| (p, token, l)))
                    });
                    for (p, token, layer) in places {
                        let right = truth(request, p, token, layer);
                        let value = got.values.get(&(p, token, layer));
                        assert_eq!(value, Some(&right), "I2, I7: right bytes");
                    }
                    let mut sides: Vec<_> = side_data.into_iter().map(|(_, data)| data).collect();
                    sides.sort();
                    let expected: Vec<_> =
                        (0..self.producers.len()).map(|p| side_data_of(request, p)).collect();
                    let is_some_dropped = self.limits.announced_bytes < ROOMS[0];
                    assert!(sides.iter().all(|side| expected.contains(side)));
                    assert!(is_some_dropped || sides == expected, "all side data is handed over");
                }
                got.ended = Some(outcome);
            }
        }
    }

    pub(super) fn begin_read(
        &mut self,
        d: usize,
        read: ReadId,
        id: &HandoffId,
        from: PeerId,
        slice: Slice,
    ) {
        let request = request_of(id);
        let tables = self.consumers[d].machine.table(id, from).expect("it is under way");
        let tables: Vec<_> = tables.collect();
        let mut places = Vec::new();
        for rectangle in slice.from.until(&slice.to, LAYERS) {
            for token in rectangle.tokens {
                let block = tables[0].block(token).expect("what is ready has a block");
                assert_ne!(block, NULL_BLOCK);
                places.extend(rectangle.layers.clone().map(|layer| (token, layer, block)));
            }
        }
        let Some((producer, _)) = self.places(from, self.consumers[d].incarnation) else {
            // It was killed a moment ago.
            let lost = Err((WireCode::Closed, String::new()));
            return self.consumers[d].machine.read_ended(read, lost, self.now);
        };
        let reading = Reading { request, producer, incarnation: from, places, cancelled: false };
        self.reads.insert((d, read), reading);
        let incarnation = self.consumers[d].incarnation;
        let soon = self.now + ms(self.script.below(8) as u64);
        self.at(soon, Event::Step { consumer: d, incarnation, read });
    }
}
