//! What engines ask of their ranks: offers, claims, wants, and what they compute.

use super::*;

impl World<'_, '_> {
    pub(super) fn expect_everywhere(&mut self, request: usize) {
        for p in 0..self.producers.len() {
            let known = self.made.contains_key(&(request, p));
            if self.producers[p].runs() {
                let expected = self.producers[p].machine.expect(&id(request), self.now);
                assert!(
                    expected.is_err() || !known,
                    "a name is good for one handoff in an incarnation"
                );
            }
        }
    }

    pub(super) fn offer_everywhere(&mut self, request: usize) {
        (0..self.producers.len()).for_each(|p| self.offer(request, p));
    }

    pub(super) fn offer(&mut self, request: usize, p: usize) {
        if !self.producers[p].runs() {
            return;
        }
        let known = self.made.contains_key(&(request, p));
        match self.producers[p].machine.offer(&id(request), self.now) {
            Ok(()) => {
                assert!(!known, "a name is good for one handoff in an incarnation");
                let (blocks, progress) = (Vec::new(), Progress::NONE);
                let made = ProducedRequest { blocks, progress, complete: false, ended: None };
                self.made.insert((request, p), made);
            }
            Err(Refusal::InUse | Refusal::Ended(_)) => {}
            Err(refusal) => panic!("{refusal}"),
        }
    }

    /// The producers' ranks as a consumer rank sees them.
    pub(super) fn sources(&self, d: usize) -> Vec<ProducerRank> {
        let readers = self.consumers.len() as u32;
        let rank = |(p, rank): (usize, &Rank<Producer>)| ProducerRank {
            peer: rank.incarnation,
            incarnation: None,
            readers,
            connected: self.wires[&(p, d)].up,
            need: Need::ALL,
        };
        self.producers.iter().enumerate().map(rank).collect()
    }

    pub(super) fn claim_everywhere(&mut self, request: usize) {
        for d in 0..self.consumers.len() {
            let (from, known) = (self.sources(d), self.got.contains_key(&(request, d)));
            if self.consumers[d].runs() {
                let claimed = self.consumers[d].machine.claim(&id(request), &from, self.now);
                assert!(
                    claimed.is_err() || !known,
                    "a name is good for one handoff in an incarnation"
                );
            }
        }
    }

    pub(super) fn want_everywhere(&mut self, request: usize) {
        (0..self.consumers.len()).for_each(|d| self.want(request, d));
    }

    pub(super) fn want(&mut self, request: usize, d: usize) {
        if !self.consumers[d].runs() {
            return;
        }
        let (from, known) = (self.sources(d), self.got.contains_key(&(request, d)));
        match self.consumers[d].machine.want(&id(request), &from, BUDGET, self.now) {
            Ok(()) => {
                assert!(!known, "a name is good for one handoff in an incarnation");
                self.got.insert((request, d), ConsumedRequest::default());
            }
            Err(Refusal::InUse | Refusal::Ended(_)) => {}
            Err(refusal) => panic!("{refusal}"),
        }
    }

    /// The next layer, or the next chunk.
    pub(super) fn compute(&mut self, request: usize, p: usize) {
        let Some(made) = self.made.get_mut(&(request, p)) else { return };
        if made.ended.is_some() || made.complete || !self.producers[p].runs() {
            return;
        }
        let at = made.progress;
        let next = if at.layers > 0 {
            match at.layers + 1 {
                LAYERS => Progress::tokens(at.layer_tokens),
                layers => at.and(layers, at.layer_tokens),
            }
        } else if at.tokens < tokens_of(request) {
            let chunk = 1 + self.script.below(3) as u32;
            at.and(1, (at.tokens + chunk).min(tokens_of(request)))
        } else {
            return;
        };
        self.publish(request, p, next, false);
    }

    /// Computes up to `to` and says so.
    pub(super) fn publish(&mut self, request: usize, p: usize, to: Progress, last: bool) {
        let made = self.made.get_mut(&(request, p)).unwrap();
        let known = made.blocks.len();
        while (made.blocks.len() as u32) < to.reach() {
            let Some(block) = self.free[p].pop_last() else { return };
            // Others are preferred, so that tables are not all in order.
            made.blocks.push(block);
        }
        for rectangle in made.progress.until(&to, LAYERS) {
            for layer in rectangle.layers {
                for token in rectangle.tokens.clone() {
                    let block = made.blocks[token as usize] as usize;
                    self.memory[p][block][layer as usize] = truth(request, p, token, layer);
                }
            }
        }
        made.progress = to;
        made.complete = last;
        let added = BlockTable::new(known as u32, made.blocks[known..].to_vec());
        let tables = if added.blocks.is_empty() { Vec::new() } else { vec![added] };
        let machine = &mut self.producers[p].machine;
        let side = last.then(|| side_data_of(request, p));
        let said = match last {
            true => machine.complete(&id(request), tables, to, side, self.now),
            false => machine.advance(&id(request), tables, to),
        };
        assert_eq!(said, Ok(()), "it is under way");
    }

    pub(super) fn finish_everywhere(&mut self, request: usize) {
        for p in 0..self.producers.len() {
            let Some(made) = self.made.get(&(request, p)) else { continue };
            if made.ended.is_none() && !made.complete && self.producers[p].runs() {
                self.publish(request, p, Progress::tokens(tokens_of(request)), true);
            }
        }
    }

    pub(super) fn preempt(&mut self, request: usize, p: usize) {
        if !self.producers[p].runs() {
            return;
        }
        if self.producers[p].machine.restart(&id(request)).is_ok() {
            self.take_back(request, p);
            self.made.get_mut(&(request, p)).unwrap().progress = Progress::NONE;
        }
    }

    /// The blocks of a request get other content at once, and other owners.
    pub(super) fn take_back(&mut self, request: usize, p: usize) {
        let Some(made) = self.made.get_mut(&(request, p)) else { return };
        for block in made.blocks.drain(..) {
            self.memory[p][block as usize] = [0; LAYERS as usize];
            self.free[p].insert(block);
        }
    }
}
