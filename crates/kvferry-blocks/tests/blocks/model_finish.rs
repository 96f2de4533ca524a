//! What the model does when a copy ends.

use crate::model::{At, Copy, Holder, Model, Place};
use kvferry_blocks::Tier;

impl Model {
    /// A copy that has started ends; then those that waited for it start, or fail.
    pub(crate) fn finish(&mut self, at: usize, is_done: bool) {
        let id = self.started.remove(at);
        self.end(id, is_done);
        while let Some(id) = self.next_to_start() {
            let copy = self.copies.iter().find(|copy| copy.id == id).expect("it has not ended");
            let is_wanted = copy.is_partial || self.is_of_block(copy);
            match is_wanted && !copy.is_doomed {
                true => self.started.push(id),
                false => self.end(id, false),
            }
        }
    }

    fn next_to_start(&self) -> Option<u64> {
        let waiting =
            self.copies.iter().map(|copy| copy.id).filter(|id| !self.started.contains(id));
        waiting.into_iter().find(|id| self.may_start(*id))
    }

    /// The block can be found, and is that of the copy.
    fn is_of_block(&self, copy: &Copy) -> bool {
        let cached = self.groups[copy.group].cached.get(&copy.key);
        cached.is_some_and(|cached| cached.born == copy.born)
    }

    fn end(&mut self, id: u64, is_done: bool) {
        let at = self.copies.iter().position(|copy| copy.id == id).expect("it has not ended");
        let copy = self.copies.remove(at);
        if !is_done {
            let readers = self.copies.iter_mut().filter(|it| it.group == copy.group);
            readers.filter(|it| it.from == copy.to).for_each(|it| it.is_doomed = true);
        }
        let (group, key) = (copy.group, copy.key);
        let depth = key.0[1] as usize / self.block - 1;
        let is_found = self.is_of_block(&copy);
        let mut cut = None;
        if copy.is_partial {
            if is_found {
                let is_in_secondary =
                    matches!(self.cached(group, key).place, Place::Secondary { .. });
                if !is_done && is_in_secondary && matches!(copy.from, At::Slot(_)) {
                    self.remove(group, key);
                }
                self.unhold(group, key, Holder::Copy(id));
            }
            cut = (!is_done).then_some(true);
        } else if is_found {
            let cached = self.cached(group, key);
            match cached.place {
                Place::Offloading { slot, copy } if copy == id => {
                    cached.place = Place::Secondary { slot };
                    cached.announced = Tier::Secondary;
                    if !is_done {
                        self.remove(group, key);
                    }
                }
                Place::Onboarding { page, copy } if copy == id => {
                    cached.place = Place::Primary { page };
                    cached.announced = Tier::Primary;
                    if !is_done {
                        self.remove(group, key);
                        cut = Some(false);
                    }
                }
                // It is wanted again already.
                Place::Onboarding { .. } if is_done => cached.announced = Tier::Secondary,
                _ => {}
            }
        }
        for waiter in copy.waiters {
            if let Some(keeps_blocks) = cut {
                self.cut(waiter, depth, keeps_blocks);
            }
        }
    }

    fn cut(&mut self, id: u64, blocks: usize, keeps_blocks: bool) {
        let tokens = blocks * self.block;
        if !keeps_blocks {
            self.truncate(id, blocks);
            self.sequence(id).tokens.truncate(tokens);
        }
        let sequence = self.sequence(id);
        sequence.reused = sequence.reused.min(tokens as u32);
    }
}
