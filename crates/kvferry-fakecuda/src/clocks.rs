//! Vector clocks.

use std::collections::BTreeMap;

/// A host thread or a stream.
pub(crate) type Actor = u32;

/// The last step of each actor that is known to have happened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Clock(BTreeMap<Actor, u64>);

impl Clock {
    pub(crate) fn of(&self, actor: Actor) -> u64 {
        self.0.get(&actor).copied().unwrap_or(0)
    }

    pub(crate) fn set(&mut self, actor: Actor, step: u64) {
        self.0.insert(actor, step);
    }

    /// Learns all that `other` knows.
    pub(crate) fn join(&mut self, other: &Self) {
        for (&actor, &step) in &other.0 {
            let own = self.0.entry(actor).or_insert(0);
            *own = step.max(*own);
        }
    }

    pub(crate) fn forget(&mut self, actor: Actor) {
        self.0.remove(&actor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_keeps_the_later_step_of_each_actor() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.set(1, 5);
        a.set(2, 1);
        b.set(2, 7);
        b.set(3, 2);
        a.join(&b);
        assert_eq!([a.of(1), a.of(2), a.of(3), a.of(4)], [5, 7, 2, 0]);
    }
}
