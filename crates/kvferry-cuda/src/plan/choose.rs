//! The choice of methods: that of the least modelled time.

use super::alike;
use super::gather::{self, Tally};
use super::select::{EXACT_MAX, Select, Selection};
use crate::calibration::Calibration;
use crate::capabilities::{Capabilities, KernelLimits, LINE, Staging};
use crate::cost::{Cost, Place};
use crate::job::{Direction, Job};

/// Copies that single calls make, at most, where there is a batch call.
pub(super) const SINGLES_MAX: usize = 4;

/// Plans use the kernel where it takes less than this part of the copy engine's time. Else they leave the multiprocessors
/// to the inference engine's kernels, which can't even run beside it if they are of another process.
const WORTH: f64 = 0.95;

/// The methods that a plan may use, with their costs.
pub(super) struct Model<'a> {
    pub(super) copy: &'a Cost,
    pub(super) batch: Option<&'a Cost>,
    pub(super) batch_entries: usize,
    pub(super) outstanding_max: usize,
    limits: Option<KernelLimits>,
    pub(super) kernel: Option<(&'a Cost, KernelLimits)>,
    pub(super) gather: Option<Parts<'a>>,
    /// The same as `gather`, for copies into the device whose sources follow each other.
    pub(super) scatter: Option<Parts<'a>>,
}

/// The cost of gathering or scattering, and the limits and memory for it.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    pub(super) cost: &'a Cost,
    pub(super) limits: KernelLimits,
    pub(super) staging: Staging,
}

impl<'a> Model<'a> {
    pub(super) fn new(
        direction: Direction,
        calibration: &'a Calibration,
        capabilities: &Capabilities,
        is_packed: bool,
    ) -> Self {
        let costs = calibration.costs(direction);
        let limits = capabilities.kernel;
        let parts = match (&costs.gather, limits, capabilities.staging) {
            (Some(cost), Some(limits), Some(staging)) => Some(Parts { cost, limits, staging }),
            _ => None,
        };
        Self {
            copy: &costs.copy,
            batch: costs.batch.as_ref().filter(|_| capabilities.batch),
            batch_entries: calibration.batch_entries as usize,
            outstanding_max: capabilities.outstanding_max as usize,
            limits,
            kernel: costs.kernel.as_ref().zip(limits),
            gather: parts.filter(|_| direction == Direction::Out),
            scatter: parts.filter(|_| direction == Direction::In && is_packed),
        }
    }

    /// Nanoseconds that the copy engine takes.
    pub(super) fn engine_ns(&self, engine: &Engine) -> f64 {
        match self.batch {
            Some(batch) if !self.are_single(engine) => {
                engine.count.div_ceil(self.batch_entries) as f64 * batch.call_ns + engine.batch_ns
            }
            _ => engine.copy_ns,
        }
    }

    /// True if these copies are made by single calls.
    pub(super) fn are_single(&self, engine: &Engine) -> bool {
        let Some(batch) = self.batch else { return true };
        engine.count <= SINGLES_MAX && engine.copy_ns <= batch.call_ns + engine.batch_ns
    }

    fn batch_call_ns(&self) -> f64 {
        self.batch.map_or(0.0, |batch| batch.call_ns)
    }
}

/// The copies of the copy engine: their number, and the times of their entries.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Engine {
    count: usize,
    copy_ns: f64,
    batch_ns: f64,
}

impl Engine {
    /// Sums the times of `count` copies that each take those of `item`.
    fn of(item: &Item, count: usize) -> Self {
        let of_all = |ns: f64| ns * count as f64;
        Self { count, copy_ns: of_all(item.copy_ns), batch_ns: of_all(item.batch_ns) }
    }

    fn add(&mut self, item: &Item) {
        self.count += 1;
        self.copy_ns += item.copy_ns;
        self.batch_ns += item.batch_ns;
    }
}

/// Time that one copy takes by each method, without calls that it shares.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) copy_ns: f64,
    /// Equal to that of single copies where there is no batch call.
    pub(super) batch_ns: f64,
    /// Infinite if the kernel does not copy it.
    pub(super) kernel_ns: f64,
    pub(super) gather_ns: f64,
    pub(super) slices: u64,
}

impl Item {
    pub(super) fn new(model: &Model<'_>, job: &Job) -> Self {
        let place = Place::of(job.len);
        let copy_ns = model.copy.call_ns + model.copy.entry.at_place(place);
        let batch_ns = model.batch.map_or(copy_ns, |batch| batch.entry.at_place(place));
        let (mut kernel_ns, mut gather_ns, mut slices) = (f64::INFINITY, f64::INFINITY, 0);
        if let Some(limits) = model.limits.filter(|limits| limits.takes(job.len)) {
            let slowdown = job.unit().slowdown();
            let by = |cost: &Cost| cost.entry.at_place(place) * slowdown;
            kernel_ns = model.kernel.map_or(kernel_ns, |(cost, _)| by(cost));
            let parts = model.gather.or(model.scatter);
            gather_ns = parts.map_or(gather_ns, |parts| by(parts.cost));
            slices = limits.slices(job.dst, job.len);
        }
        Self { copy_ns, batch_ns, kernel_ns, gather_ns, slices }
    }
}

/// Which copies the copy engine does not make, and how these are copied.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum KernelShare {
    /// There are none.
    #[default]
    None,
    /// The kernel copies them.
    Kernel(KernelLimits),
    /// The kernel gathers them.
    Gather(KernelLimits, Staging),
    /// One copy takes all to the staging, from where the kernel scatters them.
    Scatter(KernelLimits, Staging),
}

/// The choice, and what it was made of.
#[derive(Debug, Default)]
pub(super) struct Chooser {
    /// True for copies that the copy engine makes.
    pub(super) is_engine: Vec<bool>,
    pub(super) engine: Engine,
    pub(super) rest: KernelShare,
    items: Vec<Item>,
    /// Copies that a batch makes faster than the kernel, by how much.
    savings: Vec<(f64, usize)>,
    selection: Selection,
}

impl Chooser {
    /// Chooses, and returns the nanoseconds that the choice takes.
    pub(super) fn choose(&mut self, model: &Model<'_>, jobs: &[Job]) -> f64 {
        self.rest = KernelShare::None;
        self.is_engine.clear();
        self.is_engine.resize(jobs.len(), true);
        let alike = alike::item(model, jobs);
        match &alike {
            Some(item) => self.engine = Engine::of(item, jobs.len()),
            None => self.weigh(model, jobs),
        }
        let engine = self.engine;
        let engine_ns = model.engine_ns(&engine);
        let chosen = alike.and_then(|item| alike::choose(model, jobs, &item, &engine));
        let best = match chosen {
            Some((ns, KernelShare::None)) => ns,
            Some((ns, rest)) => {
                self.is_engine.fill(false);
                (self.engine, self.rest) = (Engine::default(), rest);
                ns
            }
            None => {
                if alike.is_some() {
                    self.weigh(model, jobs);
                }
                self.search(model, jobs, engine_ns)
            }
        };
        if best < engine_ns * WORTH {
            return best;
        }
        self.is_engine.fill(true);
        (self.engine, self.rest) = (engine, KernelShare::None);
        engine_ns
    }

    /// Tries the methods, and the copy engine beside each. Returns the least time.
    fn search(&mut self, model: &Model<'_>, jobs: &[Job], mut best: f64) -> f64 {
        if let Some((cost, limits)) = model.kernel {
            best = self.try_kernel(model, cost, limits, best);
        }
        if let Some(parts) = model.gather {
            best = self.try_gather(model, parts, jobs, best);
        }
        if let Some(parts) = model.scatter {
            best = self.try_scatter(model, parts, jobs, best);
        }
        best
    }

    /// Sets what each copy takes, and what the engine takes for all.
    fn weigh(&mut self, model: &Model<'_>, jobs: &[Job]) {
        self.items.clear();
        let mut engine = Engine::default();
        let mut last: Option<(Job, Item)> = None;
        for job in jobs {
            let item = match last {
                Some((like, item)) if is_like(&like, job) => item,
                _ => Item::new(model, job),
            };
            last = Some((*job, item));
            engine.add(&item);
            self.items.push(item);
        }
        self.engine = engine;
    }

    /// Tries the kernel with the copy engine beside it: for the few copies for which single calls save most, and for all
    /// that batches make faster, but for those that do not save the last calls.
    fn try_kernel(
        &mut self,
        model: &Model<'_>,
        cost: &Cost,
        limits: KernelLimits,
        best: f64,
    ) -> f64 {
        let mut split =
            Split { cost, limits, engine: Engine::default(), kernel_ns: 0.0, slices: 0 };
        let mut singles = Singles::default();
        self.savings.clear();
        for (index, item) in self.items.iter().enumerate() {
            if item.kernel_ns.is_infinite() {
                split.engine.add(item);
                continue;
            }
            split.kernel_ns += item.kernel_ns;
            split.slices += item.slices;
            singles.offer(item.kernel_ns - item.copy_ns, index);
            if item.batch_ns < item.kernel_ns {
                self.savings.push((item.kernel_ns - item.batch_ns, index));
            }
        }
        if split.slices == 0 {
            return best;
        }
        let few = SINGLES_MAX.saturating_sub(split.engine.count);
        let mut by_single = (split.ns(model), 0, split.engine);
        let mut moved = split;
        for (at, index) in singles.indexes(few).enumerate() {
            moved.give(&self.items[index]);
            let ns = moved.ns(model);
            if ns < by_single.0 {
                by_single = (ns, at + 1, moved.engine);
            }
        }
        let saving = worthwhile(model, split.engine.count, &mut self.savings);
        saving.iter().for_each(|saving| split.give(&self.items[saving.1]));
        let by_batch = split.ns(model);
        let (ns, count, engine) = by_single;
        if by_batch.min(ns) >= best {
            return best;
        }
        self.is_engine.clear();
        self.is_engine.extend(self.items.iter().map(|item| item.kernel_ns.is_infinite()));
        self.rest = KernelShare::Kernel(limits);
        if by_batch <= ns {
            saving.iter().for_each(|saving| self.is_engine[saving.1] = true);
            self.engine = split.engine;
        } else {
            singles.indexes(count).for_each(|index| self.is_engine[index] = true);
            self.engine = engine;
        }
        ns.min(by_batch)
    }

    /// Tries to scatter all copies.
    fn try_scatter(&mut self, model: &Model<'_>, parts: Parts<'_>, jobs: &[Job], best: f64) -> f64 {
        let Parts { cost, limits, staging } = parts;
        let scatter_ns = self.items.iter().map(|item| item.gather_ns).sum::<f64>();
        if scatter_ns >= best {
            return best;
        }
        let bytes = jobs.iter().map(|job| job.len).sum::<u64>();
        let slices = self.items.iter().map(|item| item.slices).sum::<u64>();
        let ns = model.copy.single(bytes) + cost.call_ns + scatter_ns;
        let is_one = bytes + LINE <= staging.bytes && slices <= u64::from(limits.jobs_max);
        if !is_one || ns >= best {
            return best;
        }
        self.is_engine.fill(false);
        (self.engine, self.rest) = (Engine::default(), KernelShare::Scatter(limits, staging));
        ns
    }

    /// Tries selections of copies to gather. One that needs several windows is also tried without the last.
    fn try_gather(&mut self, model: &Model<'_>, parts: Parts<'_>, jobs: &[Job], best: f64) -> f64 {
        let amortised = model.batch_call_ns() / model.batch_entries as f64;
        let is_clear = self.selection.weigh(model.copy, &self.items, jobs, amortised);
        let (mut found, mut tried) = (best, usize::MAX);
        for select in [Select::All, Select::BesideBatches(amortised), Select::BesideFew] {
            let gathered = self.selection.select(&self.items, select);
            if gathered == 0 || gathered == tried {
                continue;
            }
            tried = gathered;
            let (ns, last_window) = self.try_selection(model, parts, jobs, found);
            found = ns;
            if let Some(start) = last_window {
                self.selection.leave(jobs, start);
                found = self.try_selection(model, parts, jobs, found).0;
            } else if is_clear {
                return found;
            }
        }
        if jobs.len() > EXACT_MAX {
            return found;
        }
        for by_singles in [false, true] {
            if !self.selection.exact(model.copy, &self.items, jobs, by_singles) {
                continue;
            }
            let (ns, last_window) = self.try_selection(model, parts, jobs, found);
            found = ns;
            if let Some(start) = last_window {
                self.selection.leave(jobs, start);
                found = self.try_selection(model, parts, jobs, found).0;
            }
        }
        found
    }

    /// Takes the selection if it is better. Returns the least time, and the destination at which the last window begins
    /// if there are several.
    fn try_selection(
        &mut self,
        model: &Model<'_>,
        parts: Parts<'_>,
        jobs: &[Job],
        best: f64,
    ) -> (f64, Option<u64>) {
        let Gathered { ns, engine, last_window } = self.gathered(model, parts, jobs);
        if ns < best {
            self.selection.copy_to(&mut self.is_engine);
            (self.engine, self.rest) = (engine, KernelShare::Gather(parts.limits, parts.staging));
        }
        (ns.min(best), last_window)
    }

    /// The time to gather the selected copies.
    fn gathered(&self, model: &Model<'_>, parts: Parts<'_>, jobs: &[Job]) -> Gathered {
        let Parts { cost, limits, staging } = parts;
        let mut engine = Engine::default();
        let (mut ns, mut bytes, mut slices) = (0.0, 0, 0);
        let mut run: Option<(u64, u64)> = None;
        for ((item, job), is_engine) in self.items.iter().zip(jobs).zip(self.selection.is_engine())
        {
            if *is_engine {
                engine.add(item);
                continue;
            }
            ns += item.gather_ns;
            if ns.is_infinite() {
                return Gathered { ns, engine, last_window: None };
            }
            slices += item.slices;
            match &mut run {
                Some((_, end)) if *end == job.dst => *end += job.len,
                _ => {
                    let ended = run.replace((job.dst, job.dst + job.len));
                    ns += ended.map_or(0.0, |(start, end)| model.copy.single(end - start));
                    bytes += 2 * LINE;
                }
            }
            bytes += job.len;
        }
        if run.is_none() {
            return Gathered { ns: model.engine_ns(&engine), engine, last_window: None };
        }
        ns += run.map_or(0.0, |(start, end)| model.copy.single(end - start));
        let mut windows = Tally::new(model.copy);
        let is_one = bytes <= staging.bytes && slices <= u64::from(limits.jobs_max);
        if !is_one {
            let chosen = jobs.iter().zip(self.selection.is_engine());
            let gathered = chosen.filter(|(_, is_engine)| !**is_engine).map(|(job, _)| *job);
            gather::lay_out(gathered, staging, limits, &mut windows);
            ns = windows.copies_ns;
            let gathers = self.items.iter().zip(self.selection.is_engine());
            ns += gathers
                .filter(|(_, is_engine)| !**is_engine)
                .map(|(item, _)| item.gather_ns)
                .sum::<f64>();
        }
        ns += windows.count.max(1) as f64 * cost.call_ns + model.engine_ns(&engine);
        let last_window = (windows.count > 1).then_some(windows.last_start);
        Gathered { ns, engine, last_window }
    }
}

/// The time to gather a selection while the copy engine makes the other copies.
struct Gathered {
    ns: f64,
    engine: Engine,
    /// The destination at which the last window begins, if there are several.
    last_window: Option<u64>,
}

/// True if two jobs take the same time.
pub(super) fn is_like(a: &Job, b: &Job) -> bool {
    (a.len, a.unit(), a.dst % LINE) == (b.len, b.unit(), b.dst % LINE)
}

/// What the copy engine and the kernel have, while copies are given from the kernel to the engine.
#[derive(Clone, Copy)]
struct Split<'a> {
    cost: &'a Cost,
    limits: KernelLimits,
    engine: Engine,
    kernel_ns: f64,
    slices: u64,
}

impl Split<'_> {
    fn give(&mut self, item: &Item) {
        self.engine.add(item);
        self.kernel_ns -= item.kernel_ns;
        self.slices -= item.slices;
    }

    fn ns(&self, model: &Model<'_>) -> f64 {
        let launches = self.slices.div_ceil(u64::from(self.limits.jobs_max)) as f64;
        model.engine_ns(&self.engine) + launches * self.cost.call_ns + self.kernel_ns
    }
}

/// The copies to batch, beside `others`, of those that batches make faster: without those of the last calls where these
/// save less than a call takes.
fn worthwhile<'a>(
    model: &Model<'_>,
    others: usize,
    savings: &'a mut [(f64, usize)],
) -> &'a [(f64, usize)] {
    let call_ns = model.batch_call_ns();
    let mut count = savings.len();
    while count > 0 && call_ns > 0.0 {
        let in_last = (others + count - 1) % model.batch_entries + 1;
        let kept = count.saturating_sub(in_last);
        if kept > 0 {
            savings[..count].select_nth_unstable_by(kept, |a, b| b.0.total_cmp(&a.0));
        }
        // A call that others need, too, is not saved.
        let is_saved = count >= in_last;
        if !is_saved || savings[kept..count].iter().map(|saving| saving.0).sum::<f64>() >= call_ns {
            break;
        }
        count = kept;
    }
    &savings[..count]
}

/// The copies for which single calls save most time, the best first.
#[derive(Clone, Copy, Default)]
struct Singles {
    best: [(f64, usize); SINGLES_MAX],
    count: usize,
}

impl Singles {
    fn offer(&mut self, saved_ns: f64, index: usize) {
        let is_full = self.count == SINGLES_MAX;
        if saved_ns <= 0.0 || is_full && saved_ns <= self.best[SINGLES_MAX - 1].0 {
            return;
        }
        self.count += usize::from(!is_full);
        let mut at = self.count - 1;
        while at > 0 && self.best[at - 1].0 < saved_ns {
            self.best[at] = self.best[at - 1];
            at -= 1;
        }
        self.best[at] = (saved_ns, index);
    }

    /// The indexes of up to `count` copies.
    fn indexes(&self, count: usize) -> impl Iterator<Item = usize> {
        self.best[..self.count.min(count)].iter().map(|(_, index)| *index)
    }
}
