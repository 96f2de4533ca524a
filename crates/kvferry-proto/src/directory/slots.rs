//! Slots of staging memory, each with room for one block of all ranks and groups.

use crate::handoff::Refusal;
use std::collections::BTreeMap;
use std::ops::Range;

/// Which of a number of slots are free. Slots are taken in runs of consecutive numbers.
#[derive(Clone, Debug)]
pub struct Slots {
    /// Free runs, as far apart as they can be: end by begin.
    free: BTreeMap<u32, u32>,
    taken: u32,
    count: u32,
}

impl Slots {
    /// Slots `0..count`, all free.
    pub fn new(count: u32) -> Self {
        let free = (count > 0).then_some((0, count)).into_iter().collect();
        Self { free, taken: 0, count }
    }

    /// Takes the first free run of `count` slots. `None` if there is no such run, and for no slots.
    pub fn take(&mut self, count: u32) -> Option<Range<u32>> {
        let fits = |(begin, end): &(&u32, &u32)| count > 0 && **end - **begin >= count;
        let (&begin, &end) = self.free.iter().find(fits)?;
        self.free.remove(&begin);
        if begin + count < end {
            self.free.insert(begin + count, end);
        }
        self.taken += count;
        Some(begin..begin + count)
    }

    /// Gives back a run that [`Slots::take`] has returned.
    ///
    /// # Errors
    /// [`Refusal::Misuse`]: a slot of it is free, or there is no such slot. Nothing was given back.
    pub fn give(&mut self, run: Range<u32>) -> Result<(), Refusal> {
        if run.is_empty() {
            return Ok(());
        }
        let Range { mut start, mut end } = run;
        let before = self.free.range(..=start).next_back().map(|(&begin, &end)| (begin, end));
        let behind = self.free.range(start..).next().map(|(&begin, &end)| (begin, end));
        let is_free = before.is_some_and(|(_, until)| until > start)
            || behind.is_some_and(|(begin, _)| begin < end);
        if is_free || end > self.count {
            return Err(Refusal::Misuse("slots are given back that were not taken"));
        }
        self.taken -= end - start;
        if let Some((begin, until)) = before
            && until == start
        {
            start = begin;
        }
        if let Some((begin, until)) = behind
            && begin == end
        {
            self.free.remove(&begin);
            end = until;
        }
        self.free.insert(start, end);
        Ok(())
    }

    /// The number of slots that are taken.
    pub const fn taken(&self) -> u32 {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_taken_once_in_first_fit_and_merge_when_they_come_back() {
        const COUNT: u32 = 40;
        let mut slots = Slots::new(COUNT);
        let mut is_taken = [false; COUNT as usize];
        let mut held: Vec<Range<u32>> = Vec::new();
        let mut random = 1u64;
        let mut below = |bound: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % bound
        };
        for _ in 0..20_000 {
            if below(2) == 0 && !held.is_empty() {
                let run = held.swap_remove(below(held.len()));
                is_taken[run.start as usize..run.end as usize].fill(false);
                assert_eq!(slots.give(run), Ok(()));
            } else {
                let count = below(12);
                // The right answer, by a look at each slot.
                let fits =
                    |from: &usize| count > 0 && is_taken[*from..from + count].iter().all(|it| !it);
                let first = (0..=COUNT as usize - count).find(fits).map(|it| it as u32);
                let run = slots.take(count as u32);
                assert_eq!(run, first.map(|first| first..first + count as u32));
                if let Some(run) = run {
                    is_taken[run.start as usize..run.end as usize].fill(true);
                    held.push(run);
                }
            }
            assert_eq!(slots.taken() as usize, is_taken.iter().filter(|it| **it).count());
        }
        held.into_iter().for_each(|run| assert_eq!(slots.give(run), Ok(())));
        assert_eq!((slots.taken(), slots.take(COUNT)), (0, Some(0..COUNT)));
        assert_eq!((Slots::new(0).take(1), Slots::new(1).take(0)), (None, None));
    }

    #[test]
    fn slots_that_were_not_taken_are_not_given_back() {
        let mut slots = Slots::new(4);
        assert_eq!(slots.take(3), Some(0..3));
        for run in [2..4, 3..4, 3..5, 4..5] {
            assert!(slots.give(run.clone()).is_err(), "{run:?}");
        }
        assert_eq!((slots.give(1..2), slots.taken()), (Ok(()), 2));
        assert!(slots.give(0..2).is_err());
        assert_eq!(
            (slots.give(1..1), slots.give(0..1), slots.give(2..3)),
            (Ok(()), Ok(()), Ok(()))
        );
        assert_eq!(slots.take(4), Some(0..4));
    }
}
