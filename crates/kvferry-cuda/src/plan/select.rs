//! Which copies are gathered.
//!
//! A selection is the least sum, by dynamic programming over the copies in the order of their host addresses, of a linear
//! form of the costs: a copy by the engine takes its entry's time, a gathered one the kernel's and a part of the copy out
//! of staging in proportion to its bytes, and each run of gathered copies one more call.

use super::choose::{Item, SINGLES_MAX};
use crate::cost::Cost;
use crate::job::Job;

/// The most copies among which the best selection is sought: the time grows with the square of their number.
pub(super) const EXACT_MAX: usize = 16;

/// The mark of a table of selections that the copy engine makes the last copy.
const BY_ENGINE: usize = usize::MAX;

/// Copies among which the few for single calls are sought. For more, those would save little.
const FEW_OF_MAX: usize = 128;

/// The copies to select.
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
    /// Nanoseconds of the copy that begins if the one before is gathered: none if it continues that one's run.
    join_ns: f64,
}

impl Selection {
    /// Prepares selections. True if gathering is better for each copy, even where an entry of a batch costs only `price`
    /// more, its part of the call.
    pub(super) fn weigh(&mut self, copy: &Cost, items: &[Item], jobs: &[Job], price: f64) -> bool {
        self.run_ns = copy.single(1);
        let byte_ns = copy.entry.slope();
        self.terms.clear();
        let (mut end, mut is_clear) = (None, true);
        for (item, job) in items.iter().zip(jobs) {
            let gather_ns = item.gather_ns + byte_ns * job.len as f64;
            let follows = end.replace(job.dst + job.len).is_none_or(|end| end == job.dst);
            let join_ns = if follows { 0.0 } else { self.run_ns };
            is_clear &= gather_ns + join_ns < least(item.batch_ns + price, item.copy_ns);
            self.terms.push(Term { gather_ns, join_ns });
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

    /// True for copies that the engine makes.
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
        self.before.clear();
        let (mut engine, mut gather) = (0.0, f64::INFINITY);
        self.before.extend(items.iter().zip(&self.terms).map(|(item, term)| {
            let (joined, begun) = (gather + term.join_ns, engine + self.run_ns);
            let before = (u8::from(gather < engine), u8::from(joined < begun));
            engine = least(engine, gather) + item.batch_ns + price;
            gather = least(joined, begun) + term.gather_ns;
            before
        }));
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
                let joined = last_gather[n] + term.join_ns;
                let begun = last_engine[n] + run_ns;
                to_gather |= u8::from(joined < begun) << n;
                gather[n] = least(joined, begun) + term.gather_ns;
                engine[n] = f64::INFINITY;
                if let Some(fewer) = n.checked_sub(1) {
                    to_engine |= u8::from(last_gather[fewer] < last_engine[fewer]) << n;
                    engine[n] = least(last_engine[fewer], last_gather[fewer]) + item.copy_ns;
                }
            }
            self.before.push((to_engine, to_gather));
        }
        let total = |n: &usize| least(engine[*n], gather[*n]);
        let best = (0..=SINGLES_MAX).min_by(|a, b| total(a).total_cmp(&total(b)));
        let n = best.expect("at least no single call");
        if total(&n).is_infinite() { 0 } else { self.trace(n, gather[n] < engine[n], true) }
    }

    /// Finds, for at most [`EXACT_MAX`] copies, the selection that takes the least time if it fits into one window. The
    /// time counts each run, and beside them one batch, or up to [`SINGLES_MAX`] single calls. False if nothing is
    /// gathered.
    pub(super) fn exact(
        &mut self,
        copy: &Cost,
        items: &[Item],
        jobs: &[Job],
        by_singles: bool,
    ) -> bool {
        // The least time, and where the last run begins. Indexed by the number of copies, and of single calls among them.
        let mut least = [[f64::INFINITY; SINGLES_MAX + 1]; EXACT_MAX + 1];
        let mut last = [[BY_ENGINE; SINGLES_MAX + 1]; EXACT_MAX + 1];
        least[0][0] = 0.0;
        for end in 1..=items.len() {
            let item = &items[end - 1];
            if by_singles {
                for n in 1..=SINGLES_MAX {
                    least[end][n] = least[end - 1][n - 1] + item.copy_ns;
                }
            } else {
                least[end][0] = least[end - 1][0] + item.batch_ns;
            }
            let (mut run_ns, mut bytes) = (0.0, 0);
            for start in (0..end).rev() {
                run_ns += items[start].gather_ns;
                if run_ns.is_infinite() {
                    break;
                }
                bytes += jobs[start].len;
                let ns = run_ns + copy.single(bytes);
                for n in 0..=SINGLES_MAX {
                    if least[start][n] + ns < least[end][n] {
                        (least[end][n], last[end][n]) = (least[start][n] + ns, start);
                    }
                }
                if start > 0 && jobs[start - 1].dst + jobs[start - 1].len != jobs[start].dst {
                    break;
                }
            }
        }
        let of_all = &least[items.len()];
        let best = (0..=SINGLES_MAX).min_by(|a, b| of_all[*a].total_cmp(&of_all[*b]));
        let mut singles = best.expect("at least no single call");
        self.is_engine.clear();
        self.is_engine.resize(items.len(), true);
        let mut end = items.len();
        while end > 0 && least[end][singles].is_finite() {
            match last[end][singles] {
                BY_ENGINE => {
                    singles -= usize::from(by_singles);
                    end -= 1;
                }
                start => {
                    self.is_engine[start..end].fill(false);
                    end = start;
                }
            }
        }
        self.is_engine.contains(&false)
    }

    /// Follows the best selection back from its end, where so many single calls are left.
    fn trace(&mut self, mut singles: usize, mut is_gathered: bool, counts: bool) -> usize {
        self.is_engine.clear();
        self.is_engine.resize(self.before.len(), true);
        let mut count = 0;
        for (is_engine, before) in self.is_engine.iter_mut().zip(&self.before).rev() {
            *is_engine = !is_gathered;
            count += usize::from(is_gathered);
            // Without branches: the choices follow no pattern.
            let bits = [before.0, before.1][usize::from(is_gathered)];
            let was_gathered = bits >> singles & 1 == 1;
            singles -= usize::from(counts & !is_gathered);
            is_gathered = was_gathered;
        }
        count
    }
}

/// The lesser of two numbers, neither of which is NaN: faster than `f64::min`.
fn least(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}
