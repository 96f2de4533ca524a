//! Which copies are gathered.
//!
//! A selection is the least sum, by dynamic programming over the copies in the order of their host addresses, of a linear
//! form of the costs: a copy by the engine takes its entry's time, a gathered one the kernel's and a part of the copy out
//! of staging in proportion to its bytes, and each run of gathered copies one more call.

use super::choose::{Item, SINGLES_MAX};
use crate::cost::Cost;
use crate::job::Job;

/// Copies among which the few for single calls are sought. For more, those would save little.
const FEW_OF_MAX: usize = 128;

/// Which copies to select.
#[derive(Clone, Copy)]
pub(super) enum Select {
    /// All that the kernel copies.
    All,
    /// Those that are better off, beside batches in which an entry costs so many nanoseconds more.
    BesideBatches(f64),
    /// Those that are better off, beside up to [`SINGLES_MAX`] single calls.
    BesideFew,
}

/// A selection, and what it is made of.
#[derive(Debug, Default)]
pub(super) struct Selection {
    is_engine: Vec<bool>,
    terms: Vec<Term>,
    /// Nanoseconds of a copy of few bytes.
    run_ns: f64,
    /// How the best selections up to each copy continue those up to the one before. Bit `n` belongs to those with
    /// `n` single calls: whether the copy before is gathered, if this one is not (first), and if it is (second).
    before: Vec<(u8, u8)>,
}

#[derive(Clone, Copy, Debug)]
struct Term {
    gather_ns: f64,
    /// Whether it continues the run of the copy before.
    follows: bool,
}

impl Selection {
    /// Prepares selections. True if gathering any copy is better than a batch's entry for it.
    pub(super) fn weigh(&mut self, copy: &Cost, items: &[Item], jobs: &[Job]) -> bool {
        self.run_ns = copy.single(1);
        let byte_ns = copy.entry.slope();
        self.terms.clear();
        let (mut end, mut is_clear) = (None, true);
        for (item, job) in items.iter().zip(jobs) {
            let gather_ns = item.gather_ns + byte_ns * job.len as f64;
            let follows = end.replace(job.dst + job.len).is_none_or(|end| end == job.dst);
            let alone = if follows { gather_ns } else { gather_ns + self.run_ns };
            is_clear &= alone < item.batch_ns.min(item.copy_ns);
            self.terms.push(Term { gather_ns, follows });
        }
        is_clear
    }

    /// Makes a selection, and returns the number of gathered copies.
    pub(super) fn select(&mut self, items: &[Item], select: Select) -> usize {
        match select {
            Select::All => {
                self.is_engine.clear();
                self.is_engine.extend(items.iter().map(|item| item.gather_ns.is_infinite()));
                self.is_engine.iter().filter(|is_engine| !**is_engine).count()
            }
            Select::BesideBatches(price) => self.beside_batches(items, price),
            Select::BesideFew if items.len() <= FEW_OF_MAX => self.beside_few(items),
            Select::BesideFew => 0,
        }
    }

    /// Whether the engine makes a copy.
    pub(super) fn is_engine(&self) -> &[bool] {
        &self.is_engine
    }

    pub(super) fn copy_to(&self, is_engine: &mut Vec<bool>) {
        is_engine.clone_from(&self.is_engine);
    }

    /// Leaves the copies from this destination on to the engine.
    pub(super) fn leave(&mut self, jobs: &[Job], start: u64) {
        let first = jobs.partition_point(|job| job.dst + job.len <= start);
        self.is_engine[first..].fill(true);
    }

    fn beside_batches(&mut self, items: &[Item], price: f64) -> usize {
        let run_ns = self.run_ns;
        self.before.clear();
        let (mut engine, mut gather) = (0.0, f64::INFINITY);
        for (item, term) in items.iter().zip(&self.terms) {
            let joined = if term.follows { gather } else { gather + run_ns };
            let begun = engine + run_ns;
            self.before.push((u8::from(gather < engine), u8::from(joined < begun)));
            engine = engine.min(gather) + item.batch_ns + price;
            gather = joined.min(begun) + term.gather_ns;
        }
        self.trace(0, gather < engine, false)
    }

    fn beside_few(&mut self, items: &[Item]) -> usize {
        let run_ns = self.run_ns;
        self.before.clear();
        let mut engine = [f64::INFINITY; SINGLES_MAX + 1];
        let mut gather = engine;
        engine[0] = 0.0;
        for (item, term) in items.iter().zip(&self.terms) {
            let (last_engine, last_gather) = (engine, gather);
            let (mut to_engine, mut to_gather) = (0, 0);
            for n in 0..=SINGLES_MAX {
                let joined = if term.follows { last_gather[n] } else { last_gather[n] + run_ns };
                let begun = last_engine[n] + run_ns;
                to_gather |= u8::from(joined < begun) << n;
                gather[n] = joined.min(begun) + term.gather_ns;
                engine[n] = f64::INFINITY;
                if let Some(fewer) = n.checked_sub(1) {
                    to_engine |= u8::from(last_gather[fewer] < last_engine[fewer]) << n;
                    engine[n] = last_engine[fewer].min(last_gather[fewer]) + item.copy_ns;
                }
            }
            self.before.push((to_engine, to_gather));
        }
        let least = |n: &usize| engine[*n].min(gather[*n]);
        let best = (0..=SINGLES_MAX).min_by(|a, b| least(a).total_cmp(&least(b)));
        let n = best.expect("at least no single call");
        if least(&n).is_infinite() { 0 } else { self.trace(n, gather[n] < engine[n], true) }
    }

    /// Follows the best selection back from its end, where so many single calls are left.
    fn trace(&mut self, mut singles: usize, mut is_gathered: bool, counts: bool) -> usize {
        self.is_engine.clear();
        self.is_engine.resize(self.before.len(), true);
        let mut count = 0;
        for (is_engine, before) in self.is_engine.iter_mut().zip(&self.before).rev() {
            *is_engine = !is_gathered;
            count += usize::from(is_gathered);
            let bits = if is_gathered { before.1 } else { before.0 };
            let was_gathered = bits >> singles & 1 == 1;
            singles -= usize::from(counts && !is_gathered);
            is_gathered = was_gathered;
        }
        count
    }
}
