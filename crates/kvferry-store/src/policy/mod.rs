//! Which blocks stay when a tier is full.
//!
//! Prompts are chains of blocks; a block is of use only behind its whole prefix. So blocks leave from
//! the ends of chains, and no block leaves before those behind it.
//!
//! Blocks that were used together, with the same history, form a *run*. A run is worth what it is
//! expected to bring for the place it takes: the best ratio, over all times to come, of the
//! probability that it is used again by then to the expected time that it is kept until then (the
//! Gittins index of a job that is either used or given up). The probabilities are learned while the
//! cache is used, by *class* of run and by age (`reuse`). Classes tell apart the turns of a
//! conversation, prompts that many requests share, and prompts that come once: after an answer, a
//! conversation goes on within minutes or never, which an order by last use does not see.
//!
//! The run that is worth least leaves, from its end. It may be one of the request that has just come:
//! so the policy decides about admission, too.
//!
//! What has left is remembered for a while (`ghosts`), so that a block that comes back has its
//! history, and the time of its absence is learned from.
//!
//! A block has a priority ([`Retention`]), which comes before its worth. Priorities and worths order
//! the blocks that have nothing behind them; so a block stays as long as the highest priority behind it
//! wants, and no maximum over a tree has to be kept.
//!
//! # Driving it
//!
//! A policy is a value: no clock, no I/O, no thread. Times are milliseconds on one clock of the caller;
//! a time before the last one counts as the last one.
//!
//! - *Events in*: [`Policy::used`] for each request, [`Policy::added`] for what is stored,
//!   [`Policy::removed`] for what has left without the policy.
//! - *Decisions out*: [`Policy::evict`] when room is needed, [`Policy::evict_due`] now and then.
//!
//! Between processes, events may be lost, late or given twice: the newest one is believed. A block that is not known is
//! not evicted, and one that has left may be evicted again, so the caller asks its index before it
//! believes an eviction; [`Policy::rebuild`] begins anew with what the index holds.

mod blocks;
mod ghosts;
mod keyed;
mod lost;
mod names;
mod rebuild;
mod requests;
mod retention;
mod reuse;
mod runs;
#[cfg(test)]
mod tests;

pub use keyed::Keyed;
pub use names::{Key, Slot};
pub use rebuild::Kept;
pub use retention::{OnExpiry, Retention};

use blocks::{Blocks, Link, PENDING};
use fastrand::Rng;
use ghosts::{Ghost, Ghosts};
use requests::{Request, Requests};
use reuse::{ClassId, IntervalId, Reuse, Traits};
use runs::{New, Runs};
use rustc_hash::{FxHashMap, FxHashSet};

/// Runs that are compared when one has to leave: those that were worth least the last time, and some that
/// are drawn. To compare all of them brings no more hits.
const POOL: usize = 64;
const DRAWN: usize = 64;
/// Runs that are remembered after they have left, as a share of the slots; at least; and at most.
const REMEMBERED: f64 = 0.5;
const REMEMBERED_MIN: usize = 4096;
const REMEMBERED_MAX: usize = 1 << 16;
/// The choice of samples is the same in every run.
const SEED: u64 = 20_251_123;

/// Earlier uses of a block, as known when it is used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KnownUses {
    /// Number of uses. Zero: the block is not known.
    uses: u32,
    used_at: u64,
}

/// Rank of a block for eviction: see [`Policy::standing`]. A block that is not known is worth nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Standing {
    /// Blocks are behind it, which are of no use without it.
    is_needed: bool,
    level: u8,
    worth: f64,
    used_at: u64,
}

impl Standing {
    /// Expected uses per millisecond kept.
    pub(crate) fn worth(&self) -> f64 {
        self.worth
    }

    /// Orders blocks by eviction: the block that leaves first is the least.
    pub(crate) fn total_cmp(&self, other: &Self) -> std::cmp::Ordering {
        let first = (self.level, self.is_needed).cmp(&(other.level, other.is_needed));
        first.then(self.worth.total_cmp(&other.worth)).then(self.used_at.cmp(&other.used_at))
    }
}

/// Consecutive blocks of a request of which the same is known.
#[derive(Clone, Copy, Debug)]
struct RequestPart {
    len: usize,
    known: KnownUses,
    retention: Retention,
}

/// The blocks of a tier, and their order of leaving.
#[derive(Debug)]
pub struct Policy {
    blocks: Blocks,
    runs: Runs,
    pins: FxHashMap<Slot, u32>,
    /// Slots of removed blocks that have blocks behind them.
    holes: FxHashSet<Slot>,
    requests: Requests,
    ghosts: Ghosts,
    reuse: Reuse,
    rng: Rng,
    now: u64,
}

impl Policy {
    /// A policy of the slots `0..slots`, of 2^31 - 2 at most.
    pub fn new(slots: usize) -> Self {
        let share = (slots as f64 * REMEMBERED) as usize;
        let remembered = share.clamp(REMEMBERED_MIN, REMEMBERED_MAX);
        Self {
            blocks: Blocks::new(slots),
            runs: Runs::new(),
            pins: FxHashMap::default(),
            holes: FxHashSet::default(),
            requests: Requests::default(),
            ghosts: Ghosts::new(remembered),
            reuse: Reuse::new(remembered),
            rng: Rng::with_seed(SEED),
            now: 0,
        }
    }

    /// Blocks that are known.
    pub fn len(&self) -> usize {
        self.blocks.known()
    }

    /// Whether no block is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the block of a slot is known.
    pub fn contains(&self, slot: Slot) -> bool {
        self.blocks.is_known(slot)
    }

    /// A request used the blocks of `chain`, the first of its prompt first; `missing` more of its prompt
    /// were not cached. Call it for every request, also if it found nothing.
    ///
    /// The chain ends for the policy at a slot that it does not know. A block that it knows behind another
    /// one is moved to where the chain has it.
    pub fn used(&mut self, now_ms: u64, chain: &[Slot], missing: usize) {
        self.now = self.now.max(now_ms);
        self.runs.expire(self.now);
        self.runs.forget_chosen();
        let cached = &chain[..self.follow(chain)];
        let parts = self.leave_runs(cached);
        let turns = parts.last().map_or(0, |part| part.known.uses);
        let is_whole = missing == 0 && cached.len() == chain.len();
        let request =
            Request { tail: cached.last().copied(), at: self.now, missing, new: missing, turns };
        self.form_runs(cached, parts, &request, is_whole);
        self.requests.remember(request);
        self.reuse.pass_time(self.now);
    }

    /// Blocks were stored, in the order of their prompt, the first behind `parent`. [`Policy::used`] comes
    /// before: a request is found again by `parent` and by how many blocks it misses, and tells what its
    /// blocks are worth. A prompt may be stored in pieces; if requests overlap, less is learned from
    /// pieces. The end of the retention is rounded up as [`Retention::to_bits`] does.
    ///
    /// A slot that the policy knows behind another parent holds a new block now. A parent that is not
    /// known may be added later.
    pub fn added(
        &mut self,
        now_ms: u64,
        parent: Option<Slot>,
        blocks: &[(Slot, Key)],
        retention: Retention,
    ) {
        self.now = self.now.max(now_ms);
        let mut request = self.requests.take(parent, blocks.len()).unwrap_or(Request {
            tail: parent,
            at: self.now,
            missing: blocks.len(),
            new: blocks.len(),
            turns: parent.and_then(|parent| self.known(parent)).map_or(0, |known| known.uses),
        });
        let is_slot = |slot: &Slot| (*slot as usize) < self.blocks.slots();
        let blocks = &blocks[..blocks.iter().take_while(|(slot, _)| is_slot(slot)).count()];
        let mut before = match parent {
            Some(parent) if !is_slot(&parent) => Link::Lost,
            parent => Link::from(parent),
        };
        let mut first = 0;
        for (i, &(slot, _)) in blocks.iter().enumerate() {
            if self.blocks.is_known(slot) || self.holes.contains(&slot) {
                self.form_added(&blocks[first..i], &mut request, retention);
                first = i;
            }
            if self.blocks.is_known(slot) && self.blocks.link(slot) == before {
                first = i + 1;
            } else {
                self.make_unknown(slot);
                let link = match before {
                    Link::Behind(before) if self.is_behind(before, slot) => {
                        self.form_added(&blocks[first..i], &mut request, retention);
                        first = i;
                        Link::Lost
                    }
                    before => before,
                };
                self.blocks.insert(slot, link, PENDING);
                self.count_child(link);
            }
            request.tail = Some(slot);
            before = Link::Behind(slot);
        }
        self.form_added(&blocks[first..], &mut request, retention);
        self.requests.remember(request);
    }

    /// A block has left for another reason than that the policy said so. What is behind it is of no use
    /// until a request finds it behind another block: it is due to leave ([`Policy::evict_due`]).
    ///
    /// The caller asks its index first whether the slot holds another block already.
    pub fn removed(&mut self, slot: Slot) {
        let Some(id) = self.blocks.run(slot) else { return };
        if self.pins.remove(&slot).is_some() {
            self.blocks.drop_child(slot);
        }
        let id = self.divide_behind(id, slot);
        self.runs.get_mut(id).is_remembered = true;
        self.leave_end(id, slot);
        if self.blocks.children(slot) > 0 {
            self.holes.insert(slot);
        }
    }

    /// Keeps a block and all before it until it is unpinned as often. False if it is not known. Pins end
    /// with the block if it is removed, and do not outlive the policy.
    pub fn pin(&mut self, slot: Slot) -> bool {
        if !self.blocks.is_known(slot) {
            return false;
        }
        let pins = self.pins.entry(slot).or_default();
        *pins = pins.saturating_add(1);
        if *pins == 1 {
            // A pin counts as a block behind it.
            self.count_child(Link::Behind(slot));
        }
        true
    }

    /// Ends a pin. False if there is none.
    pub fn unpin(&mut self, slot: Slot) -> bool {
        let Some(pins) = self.pins.get_mut(&slot) else { return false };
        *pins -= 1;
        if *pins == 0 {
            self.pins.remove(&slot);
            self.drop_child(Link::Behind(slot));
        }
        true
    }

    /// The block that leaves next, which has none behind it; the policy forgets it. `key_of` gives the key
    /// of a slot; it is asked at most once, for that block. `None`: all known blocks are pinned, or before
    /// one that is.
    pub fn evict(&mut self, now_ms: u64, key_of: impl FnOnce(Slot) -> Key) -> Option<Slot> {
        let (id, _) = self.least_worth(now_ms)?;
        Some(self.take_last(id, key_of))
    }

    /// Like [`Policy::evict`], but only for the blocks that leave even if there is room: their retention has ended so,
    /// or they were behind a block that was removed.
    pub fn evict_due(&mut self, now_ms: u64, key_of: impl FnOnce(Slot) -> Key) -> Option<Slot> {
        let (id, is_due) = self.least_worth(now_ms)?;
        is_due.then(|| self.take_last(id, key_of))
    }

    /// Blocks that can't leave now: they, or blocks behind them, are pinned, or have a higher priority than others that
    /// can.
    pub(crate) fn held(&self) -> FxHashSet<Slot> {
        self.with_those_before(self.pins.keys().copied().chain(self.runs.ends_above_lowest()))
    }

    /// Blocks that are pinned, and those before them.
    pub(crate) fn pinned(&self) -> FxHashSet<Slot> {
        self.with_those_before(self.pins.keys().copied())
    }

    /// Returns the blocks in `slots`, and those before them.
    pub(crate) fn with_those_before(&self, slots: impl Iterator<Item = Slot>) -> FxHashSet<Slot> {
        let mut held = FxHashSet::default();
        for last in slots {
            let chain = std::iter::successors(Some(last), |slot| self.blocks.before(*slot));
            for slot in chain {
                if !held.insert(slot) {
                    break;
                }
            }
        }
        held
    }

    /// Standing of a block, without the worth of those behind it.
    pub(crate) fn standing(&self, now_ms: u64, slot: Slot) -> Standing {
        let id = self.blocks.run(slot).filter(|id| *id != PENDING);
        let Some(run) = id.map(|id| self.runs.get(id)) else { return Standing::default() };
        let age = self.now.max(now_ms).saturating_sub(run.used_at);
        Standing {
            is_needed: self.blocks.children(slot) > 0,
            level: run.level(),
            worth: self.reuse.worth(run.class, age),
            used_at: run.used_at,
        }
    }

    /// Memory that is reserved, in bytes. Of the slots, only that is touched which was used.
    pub fn bytes(&self) -> usize {
        self.blocks.bytes() + self.runs.bytes() + self.ghosts.bytes() + self.reuse.bytes()
    }

    fn known(&self, slot: Slot) -> Option<KnownUses> {
        let run = self.runs.get(self.blocks.run(slot)?);
        Some(KnownUses { uses: run.uses, used_at: run.used_at })
    }

    /// Returns the number of leading blocks of a chain that are known. Moves those that are known elsewhere.
    fn follow(&mut self, chain: &[Slot]) -> usize {
        let mut before = Link::Root;
        for (i, &slot) in chain.iter().enumerate() {
            if !self.blocks.is_known(slot) {
                return i;
            }
            if self.blocks.link(slot) != before {
                // What is before it is a chain from its root. Only a block of that would close a circle.
                if chain[..i].contains(&slot) {
                    return i;
                }
                self.move_behind(slot, before);
            }
            before = Link::Behind(slot);
        }
        chain.len()
    }

    /// Takes blocks out of their runs, which they are the first of. Says what was known of them. Ends the
    /// intervals of runs that are used to their end.
    fn leave_runs(&mut self, chain: &[Slot]) -> Vec<RequestPart> {
        let mut parts: Vec<RequestPart> = Vec::new();
        let mut rest = chain;
        while let Some(id) = rest.first().and_then(|first| self.blocks.run(*first)) {
            let len = rest.iter().take_while(|slot| self.blocks.run(**slot) == Some(id)).count();
            let run = *self.runs.get(id);
            // A run is observed by its end: what is used of a chain is used from its beginning.
            if rest[len - 1] == run.last && !run.is_remembered {
                self.reuse.used(run.interval, self.now);
            }
            let known = KnownUses { uses: run.uses, used_at: run.used_at };
            parts.push(RequestPart { len, known, retention: run.retention() });
            self.runs.shrink(id, u32::try_from(len).expect("at most the run"));
            rest = &rest[len..];
        }
        parts
    }

    /// Forms the runs of blocks that were added one behind the other.
    fn form_added(&mut self, blocks: &[(Slot, Key)], request: &mut Request, retention: Retention) {
        if blocks.is_empty() {
            return;
        }
        let before = self.blocks.before(blocks[0].0);
        let (known, of_run_before) = self.remembered(blocks);
        self.correct_piece(before, of_run_before, known[0], request);
        if request.new == request.missing {
            let continued = known.iter().take_while(|known| known.uses > 0).count();
            if let Some(last) = continued.checked_sub(1) {
                request.turns = known[last].uses;
                request.new = request.new.saturating_sub(continued);
                self.correct_classes(before, request);
            }
        }
        request.missing = request.missing.saturating_sub(blocks.len());
        let alike = known.chunk_by(|a, b| a == b);
        let part =
            |known: &[KnownUses]| RequestPart { len: known.len(), known: known[0], retention };
        let parts = alike.map(part).collect();
        let slots: Vec<Slot> = blocks.iter().map(|(slot, _)| *slot).collect();
        self.form_runs(&slots, parts, request, request.missing == 0);
    }

    /// Corrects the classes of the runs that a request used, up to `tail`: less of it is new than seemed.
    fn correct_classes(&mut self, tail: Option<Slot>, request: &Request) {
        let mut corrected = None;
        let mut block = tail;
        while let Some(slot) = block
            && let Some(id) = self.blocks.run(slot)
            && self.runs.get(id).used_at == request.at
        {
            if corrected.replace(id) != Some(id) {
                let (class, interval) = (self.runs.get(id).class, self.runs.get(id).interval);
                let class = self.reuse.class_with_new(class, request.new);
                self.runs.get_mut(id).class = class;
                self.reuse.move_to(interval, class);
            }
            block = self.blocks.before(slot);
        }
    }

    /// Corrects the run of the piece before: its last `len` blocks had left with those that come now.
    fn correct_piece(
        &mut self,
        last: Option<Slot>,
        len: usize,
        known: KnownUses,
        request: &mut Request,
    ) {
        let Some((last, mut id)) = last.and_then(|last| Some((last, self.blocks.run(last)?)))
        else {
            return;
        };
        let run = *self.runs.get(id);
        if run.last != last || run.uses > 1 || run.used_at != request.at || len == 0 {
            return;
        }
        let len = len.min(run.len as usize);
        let mut blocks = std::iter::successors(Some(last), |block| self.blocks.before(*block));
        if let Some(before) = blocks.nth(len).filter(|_| len < run.len as usize) {
            self.divide_behind(id, before);
            id = self.blocks.run(last).expect("it is known");
        }
        request.new = request.new.saturating_sub(len);
        let uses = known.uses.saturating_add(1);
        let class = self.reuse.class(Traits {
            uses,
            is_end: false,
            new: request.new,
            turns: request.turns,
            gap: request.at.saturating_sub(known.used_at),
        });
        self.reuse.move_to(run.interval, class);
        let run = self.runs.get_mut(id);
        (run.uses, run.class, run.whole) = (uses, class, run.len);
    }

    /// Earlier uses of blocks that have left, and the number of blocks before them that share those of the first.
    fn remembered(&mut self, blocks: &[(Slot, Key)]) -> (Vec<KnownUses>, usize) {
        let mut known = vec![KnownUses::default(); blocks.len()];
        let mut of_run_before = 0;
        for (i, (_, key)) in blocks.iter().enumerate() {
            let Some(ghost) = self.ghosts.take(*key) else { continue };
            self.reuse.used(ghost.interval, self.now);
            if known[0].uses == 0 {
                of_run_before = (ghost.len as usize).saturating_sub(i + 1);
            }
            // The ghost stands for its whole run.
            for j in (0..=i).rev().take(ghost.len as usize) {
                if known[j].uses == 0 {
                    known[j] = KnownUses { uses: ghost.uses, used_at: ghost.used_at };
                } else if j < i {
                    of_run_before = 0;
                    break;
                }
            }
        }
        (known, of_run_before)
    }

    /// Forms runs of blocks that follow each other and are in none. `is_whole`: the last one ends its
    /// prompt.
    fn form_runs(
        &mut self,
        slots: &[Slot],
        mut parts: Vec<RequestPart>,
        request: &Request,
        is_whole: bool,
    ) {
        if let Some(last) = parts.last_mut().filter(|_| is_whole) {
            last.len -= 1;
            let end = RequestPart { len: 1, ..*last };
            parts.push(end);
        }
        let mut formed: Vec<(ClassId, RequestPart)> = Vec::with_capacity(parts.len());
        for (i, part) in parts.iter().enumerate().filter(|(_, part)| part.len > 0) {
            let class = self.reuse.class(Traits {
                uses: part.known.uses.saturating_add(1),
                is_end: is_whole && i + 1 == parts.len(),
                new: request.new,
                turns: request.turns,
                gap: request.at.saturating_sub(part.known.used_at),
            });
            let is_like = |(of, before): &&mut (ClassId, RequestPart)| {
                *of == class
                    && before.known.uses == part.known.uses
                    && before.retention == part.retention
            };
            match formed.last_mut().filter(is_like) {
                Some((_, before)) => before.len += part.len,
                None => formed.push((class, *part)),
            }
        }
        let mut rest = slots;
        for (class, part) in formed {
            let (slots, behind) = rest.split_at(part.len);
            self.form_run(slots, class, &part, request.at);
            rest = behind;
        }
    }

    /// Forms one run, or lengthens the one before it if that is alike and of the same time.
    fn form_run(&mut self, slots: &[Slot], class: ClassId, part: &RequestPart, at: u64) {
        let (Some(first), Some(last)) = (slots.first(), slots.last()) else { return };
        let mut new = New {
            last: *last,
            len: u32::try_from(slots.len()).expect("fewer blocks than slots"),
            uses: part.known.uses.saturating_add(1),
            used_at: at,
            interval: IntervalId::NONE,
            class,
            retention: part.retention,
        };
        let before = self.blocks.before(*first).and_then(|before| {
            self.blocks.run(before).filter(|id| self.runs.get(*id).last == before)
        });
        let id = match before.filter(|id| self.runs.lengthen(*id, &new)) {
            Some(id) => id,
            None => {
                new.interval = self.reuse.begin(at, class);
                self.runs.form(new, self.now)
            }
        };
        for slot in slots {
            self.blocks.set_run(*slot, id);
        }
        self.review(id);
    }

    /// Makes a run a candidate, or none.
    fn review(&mut self, id: u32) {
        match self.blocks.children(self.runs.get(id).last) {
            0 => self.runs.enter(id),
            _ => self.runs.leave(id),
        }
    }

    /// Counts one more behind a block.
    fn count_child(&mut self, link: Link) {
        let Link::Behind(slot) = link else { return };
        self.blocks.add_child(slot);
        self.review_end(slot);
    }

    /// Counts one less behind a block.
    fn drop_child(&mut self, link: Link) {
        let Link::Behind(slot) = link else { return };
        if self.blocks.drop_child(slot) == 0 {
            self.holes.remove(&slot);
        }
        self.review_end(slot);
    }

    /// Reviews the run of which a block is the last, if it is.
    fn review_end(&mut self, slot: Slot) {
        let id = self.blocks.run(slot).filter(|id| *id != PENDING);
        if let Some(id) = id.filter(|id| self.runs.get(*id).last == slot) {
            self.review(id);
        }
    }

    /// Whether a block is `slot` or behind it.
    fn is_behind(&self, block: Slot, slot: Slot) -> bool {
        let mut chain = std::iter::successors(Some(block), |block| self.blocks.before(*block));
        block == slot || self.blocks.children(slot) > 0 && chain.any(|block| block == slot)
    }

    /// Makes a slot one whose block is not known and which nothing is behind, except what awaits it.
    fn make_unknown(&mut self, slot: Slot) {
        self.removed(slot);
        if self.holes.contains(&slot) {
            self.settle();
        }
    }

    fn move_behind(&mut self, slot: Slot, link: Link) {
        let before = self.blocks.link(slot);
        if let Link::Behind(before) = before
            && let Some(id) = self.blocks.run(before)
            && self.blocks.run(slot) == Some(id)
        {
            self.divide_behind(id, before);
        }
        self.blocks.set_link(slot, link);
        self.count_child(link);
        self.drop_child(before);
    }

    /// Divides a run so that one of its blocks is the last of a run. Returns that run.
    fn divide_behind(&mut self, id: u32, slot: Slot) -> u32 {
        let run = *self.runs.get(id);
        let from_end = std::iter::successors(Some(run.last), |block| self.blocks.before(*block));
        let behind = from_end.take_while(|block| *block != slot).count();
        if behind == 0 {
            return id;
        }
        let len = run.len - u32::try_from(behind).expect("at most the run");
        let divided = self.runs.divide(id, slot, len);
        let mut block = Some(slot);
        for _ in 0..len {
            let of_run = block.expect("the blocks of a run are linked");
            self.blocks.set_run(of_run, divided);
            block = self.blocks.before(of_run);
        }
        divided
    }

    /// The candidate of the lowest level that is worth least, as far as is known; the oldest of equals.
    /// And whether it is due to leave.
    fn least_worth(&mut self, now_ms: u64) -> Option<(u32, bool)> {
        self.now = self.now.max(now_ms);
        self.settle();
        self.runs.expire(self.now);
        if let Some(chosen) = self.runs.chosen() {
            return Some((chosen, false));
        }
        let (candidates, is_due) = self.runs.lowest()?;
        if is_due {
            return Some((*candidates.last()?, true));
        }
        let mut compared = self.runs.pool().to_vec();
        if candidates.len() <= POOL {
            compared = candidates.to_vec();
        } else {
            let drawn = DRAWN.max(POOL - compared.len());
            compared.extend((0..drawn).map(|_| candidates[self.rng.usize(..candidates.len())]));
        }
        let mut worths: Vec<(f64, u64, u32)> = compared
            .into_iter()
            .map(|id| {
                let run = self.runs.get(id);
                let age = self.now.saturating_sub(run.used_at);
                (self.reuse.worth(run.class, age), run.used_at, id)
            })
            .collect();
        worths.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        worths.dedup();
        self.runs.set_pool(worths.into_iter().take(POOL).map(|(_, _, id)| id).collect());
        self.runs.chosen().map(|chosen| (chosen, false))
    }

    /// Takes the last block of a candidate.
    fn take_last(&mut self, id: u32, key_of: impl FnOnce(Slot) -> Key) -> Slot {
        let run = self.runs.get_mut(id);
        let slot = run.last;
        if !std::mem::replace(&mut run.is_remembered, true) {
            let (uses, used_at, len) = (run.uses, run.used_at, run.whole);
            let interval = run.interval;
            self.ghosts.remember(key_of(slot), Ghost { uses, used_at, len, interval });
        }
        self.leave_end(id, slot);
        slot
    }

    /// Takes the last block out of a run, and of what is known.
    fn leave_end(&mut self, id: u32, slot: Slot) {
        let before = self.blocks.link(slot);
        self.blocks.remove(slot);
        if let Link::Behind(before) = before {
            self.runs.get_mut(id).last = before;
        }
        self.runs.shrink(id, 1);
        self.drop_child(before);
    }
}
