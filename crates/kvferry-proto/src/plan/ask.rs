//! A consumer's request as block tables, and the units that it consists of.

use super::copies::{Run, Table};
use super::map::{Map, Pair, Section};
use crate::layout::{Context, End, Group, Kind, NO_BLOCK};
use std::ops::Range;
use thiserror::Error;

/// The longest request, in tokens.
const TOKENS_MAX: u64 = 1 << 40;

/// The most units that one plan is made of.
const UNITS_MAX: u64 = 1 << 24;

/// Some blocks of a request that one rank has in one group, in the order of their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks<'a> {
    /// Index of the first of these blocks among the rank's blocks of this request, from 0.
    pub first: u32,
    /// Ids of logical blocks, [`NO_BLOCK`] for holes.
    pub ids: &'a [u32],
}

impl<'a> Blocks<'a> {
    /// Blocks that begin with the request's first block.
    pub const fn from_start(ids: &'a [u32]) -> Self {
        Self { first: 0, ids }
    }

    /// The last blocks of a request of `tokens` tokens: what an engine gives that lists only the
    /// blocks it has no prefix for. `None` if these are more than the request has.
    pub fn last(ids: &'a [u32], tokens: u64, group: &Group) -> Option<Self> {
        let first = group.local_blocks(tokens).checked_sub(ids.len() as u64)?;
        Some(Self { first: u32::try_from(first).ok()?, ids })
    }

    /// The id of a block, if it is listed.
    fn get(&self, block: u64) -> Option<u32> {
        let at = block.checked_sub(self.first.into())?;
        self.ids.get(usize::try_from(at).ok()?).copied()
    }

    fn range(&self) -> Range<u64> {
        let first = u64::from(self.first);
        first..first + self.ids.len() as u64
    }
}

/// A consumer rank's request for KV, and the block tables of both ranks.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// The tokens that the consumer wants the KV of: from the first it does not have to the end of
    /// what is handed over. States are those after the last one.
    pub tokens: Range<u64>,
    /// The part that is sent now, in tokens of the request: for prefill in chunks, those that are
    /// new since the last part. Each piece is sent with the part that completes it; states, and the
    /// rest of the last block, with the part that reaches the end. Parts that follow each other
    /// send everything once.
    ///
    /// With the part that begins where `tokens` do, all of the consumer's blocks are checked. The
    /// time that a later part takes depends on its own tokens and not on the request's; it relies on
    /// unchanged tables of the consumer.
    pub part: Range<u64>,
    /// Block tables, per group of the producer's layout. Blocks that are not asked for may be
    /// listed or missing.
    pub producer: &'a [Blocks<'a>],
    /// Block tables, per group of the consumer's layout. Blocks outside of the tokens asked for may
    /// be listed.
    pub consumer: &'a [Blocks<'a>],
}

impl<'a> Ask<'a> {
    /// Everything at once.
    pub const fn whole(
        tokens: Range<u64>,
        producer: &'a [Blocks<'a>],
        consumer: &'a [Blocks<'a>],
    ) -> Self {
        Self { part: tokens.start..tokens.end, tokens, producer, consumer }
    }
}

/// A block of the consumer that stays unfilled, at least in part: it is there, but lies before the
/// window, and the producer has let go of it. It must not be taken for valid KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Unfilled {
    /// The group, as an index into the consumer's.
    pub group: usize,
    /// Index of the block among the request's blocks on this rank.
    pub block: u64,
}

/// Error of a request for which no plan can be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum PlanError {
    /// Block tables for more or fewer groups than the layout has.
    #[error("the {end} gives block tables for {given} groups and has {groups}")]
    Groups { end: End, given: usize, groups: usize },
    /// The tokens are not a range, or too many.
    #[error("tokens {start} to {end} are not a range below {limit}")]
    Tokens { start: u64, end: u64, limit: u64 },
    /// A block is needed and not in the table, which has blocks `first..after`. `block` counts the
    /// request's blocks on that rank, `token` is a token of it that is wanted.
    #[error(
        "group {group}: block {block}, which has token {token}, is not among the {end}'s blocks {first} to {after}"
    )]
    Missing { end: End, group: String, block: u64, token: u64, first: u64, after: u64 },
    /// A block is needed and is a hole. `block` and `token` are as in [`PlanError::Missing`].
    #[error("group {group}: block {block}, which has token {token}, is a hole at the {end}")]
    Hole { end: End, group: String, block: u64, token: u64 },
    /// A block id beyond the number of blocks. `block` is as in [`PlanError::Missing`].
    #[error(
        "group {group}: block {block} of the {end} has id {id}, but there are only {blocks} blocks"
    )]
    Id { end: End, group: String, block: u64, id: u32, blocks: u32 },
    /// A block of the consumer would be written twice.
    #[error("group {group}: the consumer gives block id {id} twice")]
    Twice { group: String, id: u32 },
    /// The consumer reads a state and the producer has none.
    #[error("group {group}: the producer has no state, its {listed} blocks are holes")]
    NoState { group: String, listed: usize },
    /// More than can be planned at once.
    #[error("the request falls into more than {limit} pieces")]
    TooMany { limit: u64 },
}

/// The units that `ask` is about, of each section of the map.
pub(super) fn tables(map: &Map, ask: &Ask<'_>) -> Result<(Vec<Table>, Vec<Unfilled>), PlanError> {
    check(map, ask)?;
    let mut tables = Vec::new();
    let mut unfilled = Vec::new();
    if ask.tokens.is_empty() || ask.part.is_empty() {
        return Ok((tables, unfilled));
    }
    let mut units_left = UNITS_MAX;
    for (pair_at, pair) in map.pairs.iter().enumerate() {
        if pair.sections.is_empty() {
            continue;
        }
        let units = Units {
            from: Listing::new(End::Producer, &map.producer[pair.from], &ask.producer[pair.from]),
            to: Listing::new(End::Consumer, &map.consumer[pair.to], &ask.consumer[pair.to]),
            pair,
            ask,
        };
        let window = (units.to.group.kind != Kind::State).then(|| units.window());
        if let Some(window) = &window {
            units.check(window)?;
        }
        for (section_at, section) in pair.sections.iter().enumerate() {
            let runs = match &window {
                None => units.state()?,
                Some(window) => units.tokens(window, section, &mut units_left, &mut unfilled)?,
            };
            if !runs.is_empty() {
                tables.push(Table { pair: pair_at, section: section_at, runs: runs.into() });
            }
        }
    }
    unfilled.sort_unstable();
    unfilled.dedup();
    Ok((tables, unfilled))
}

fn check(map: &Map, ask: &Ask<'_>) -> Result<(), PlanError> {
    for (end, groups, given) in [
        (End::Producer, map.producer.len(), ask.producer.len()),
        (End::Consumer, map.consumer.len(), ask.consumer.len()),
    ] {
        if groups != given {
            return Err(PlanError::Groups { end, given, groups });
        }
    }
    for range in [&ask.tokens, &ask.part] {
        if range.start > range.end || range.end > TOKENS_MAX {
            let (start, end, limit) = (range.start, range.end, TOKENS_MAX);
            return Err(PlanError::Tokens { start, end, limit });
        }
    }
    Ok(())
}

/// A block table and what it is a table of.
struct Listing<'a> {
    end: End,
    group: &'a Group,
    blocks: &'a Blocks<'a>,
}

impl<'a> Listing<'a> {
    const fn new(end: End, group: &'a Group, blocks: &'a Blocks<'a>) -> Self {
        Self { end, group, blocks }
    }

    /// The id of a block that may be a hole.
    fn id(&self, block: u64) -> Result<Option<u32>, PlanError> {
        match self.blocks.get(block) {
            None | Some(NO_BLOCK) => Ok(None),
            Some(id) if id < self.group.blocks => Ok(Some(id)),
            Some(id) => {
                let (end, group, blocks) = (self.end, self.group.name.clone(), self.group.blocks);
                Err(PlanError::Id { end, group, block, id, blocks })
            }
        }
    }

    /// The error for a block that is needed and has no id.
    fn lacks(&self, block: u64, token: u64) -> PlanError {
        let (end, group) = (self.end, self.group.name.clone());
        let Range { start: first, end: after } = self.blocks.range();
        if (first..after).contains(&block) {
            PlanError::Hole { end, group, block, token }
        } else {
            PlanError::Missing { end, group, block, token, first, after }
        }
    }

    /// The last block that is no hole.
    fn last(&self) -> Result<Option<u32>, PlanError> {
        let Some(at) = self.blocks.ids.iter().rposition(|&id| id != NO_BLOCK) else {
            return Ok(None);
        };
        self.id(u64::from(self.blocks.first) + at as u64)
    }
}

/// The units that move from one group to another for one request.
struct Units<'a> {
    from: Listing<'a>,
    to: Listing<'a>,
    pair: &'a Pair,
    ask: &'a Ask<'a>,
}

/// Token ranges as a pair of ranks counts them.
struct Window {
    /// Tokens to write.
    wanted: Range<u64>,
    /// Units whose last wanted token is in here are sent now.
    part: Range<u64>,
    /// Whether that is the first part.
    first: bool,
    /// First token that the producer must have; earlier ones may be missing.
    horizon: u64,
    from: Context,
    to: Context,
}

impl Units<'_> {
    /// The unit of a state: the last one of both.
    fn state(&self) -> Result<Vec<Run>, PlanError> {
        if self.ask.part.end < self.ask.tokens.end {
            return Ok(Vec::new());
        }
        let Some(to_block) = self.to.last()? else { return Ok(Vec::new()) };
        let Some(from_block) = self.from.last()? else {
            let (group, listed) = (self.from.group.name.clone(), self.from.blocks.ids.len());
            return Err(PlanError::NoState { group, listed });
        };
        Ok(vec![Run { from_block, from_unit: 0, to_block, to_unit: 0, units: 1, clip: None }])
    }

    fn window(&self) -> Window {
        let Range { start, end } = self.ask.tokens;
        let horizon = self.to.group.kind.horizon(end);
        let wanted = start - start % u64::from(self.pair.granule)..end;
        // The first part is also of what rounding has added.
        let first = self.ask.part.start <= start;
        let part = if first { 0 } else { self.ask.part.start }..self.ask.part.end;
        let (from, to) = (Context::of(self.from.group), Context::of(self.to.group));
        if from != to {
            return Window { wanted, part, first, horizon, from, to };
        }
        // Both hold the same tokens: all that matters is how they number them.
        let local = |range: Range<u64>| to.local(range.start)..to.local(range.end);
        Window {
            wanted: local(wanted),
            part: local(part),
            first,
            horizon: to.local(horizon),
            from: Context::whole(self.from.group.block_tokens),
            to: Context::whole(self.to.group.block_tokens),
        }
    }

    /// Checks with the first part that there are blocks for all wanted tokens, none of them twice.
    fn check(&self, window: &Window) -> Result<(), PlanError> {
        if !window.first {
            return Ok(());
        }
        let wanted = self.blocks(window, window.wanted.clone());
        let listed = self.listed(&wanted, window)?;
        let mut ids = Vec::with_capacity(listed.clone().count());
        for block in listed {
            ids.extend(self.target(block, window)?);
        }
        ids.sort_unstable();
        match ids.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(()),
            Some(pair) => {
                let group = self.to.group.name.clone();
                Err(PlanError::Twice { group, id: pair[0] })
            }
        }
    }

    /// The consumer's blocks that have some of these tokens.
    fn blocks(&self, window: &Window, tokens: Range<u64>) -> Range<u64> {
        let to_tokens = u64::from(self.to.group.block_tokens);
        let local = window.to.local(tokens.start)..window.to.local(tokens.end);
        if local.is_empty() {
            return 0..0;
        }
        local.start / to_tokens..local.end.div_ceil(to_tokens)
    }

    /// The id of a block of the consumer, if it is not one that it let go of.
    fn target(&self, block: u64, window: &Window) -> Result<Option<u32>, PlanError> {
        let id = self.to.id(block)?;
        if id.is_none() && self.to.group.kind == Kind::Full {
            let first = block * u64::from(self.to.group.block_tokens);
            return Err(self.to.lacks(block, window.to.global(first)));
        }
        Ok(id)
    }

    /// The units of tokens that are sent now, as runs.
    fn tokens(
        &self,
        window: &Window,
        section: &Section,
        units_left: &mut u64,
        unfilled: &mut Vec<Unfilled>,
    ) -> Result<Vec<Run>, PlanError> {
        let (from_tokens, to_tokens) =
            (u64::from(self.from.group.block_tokens), u64::from(self.to.group.block_tokens));
        let unit = u64::from(section.unit);
        let local = window.to.local(window.wanted.start)..window.to.local(window.wanted.end);
        // A unit that ends in the part may begin before it.
        let Range { start, end } = window.part;
        let begun = start.saturating_sub(unit).max(window.wanted.start)..end.min(window.wanted.end);
        let listed = self.listed(&self.blocks(window, begun), window)?;
        let mut runs =
            Runs { runs: Vec::new(), from_units: from_tokens / unit, to_units: to_tokens / unit };
        for block in listed {
            let Some(to_block) = self.target(block, window)? else { continue };
            let begin = block * to_tokens;
            let first = local.start.saturating_sub(begin) / unit;
            let end = (local.end - begin).min(to_tokens).div_ceil(unit);
            *units_left = units_left
                .checked_sub(end - first)
                .ok_or(PlanError::TooMany { limit: UNITS_MAX })?;
            for to_unit in first..end {
                let token = window.to.global(begin + to_unit * unit);
                let skip = window.wanted.start.saturating_sub(token);
                let take = unit.min(window.wanted.end - token);
                let complete = token + take;
                if !window.from.holds(token)
                    || complete <= window.part.start
                    || complete > window.part.end
                {
                    continue;
                }
                let theirs = window.from.local(token);
                let from_at = theirs / from_tokens;
                let Some(from_block) = self.from.id(from_at)? else {
                    if complete > window.horizon {
                        return Err(self.from.lacks(from_at, token + skip));
                    }
                    unfilled.push(Unfilled { group: self.pair.to, block });
                    continue;
                };
                runs.push(Run {
                    from_block,
                    from_unit: (theirs % from_tokens / unit) as u32,
                    to_block,
                    to_unit: to_unit as u32,
                    units: 1,
                    clip: (skip > 0 || take < unit).then_some((skip as u32, take as u32)),
                });
            }
        }
        Ok(runs.runs)
    }

    /// The blocks that are both needed and listed. All must be listed if all are there.
    fn listed(&self, needed: &Range<u64>, window: &Window) -> Result<Range<u64>, PlanError> {
        if needed.is_empty() {
            return Ok(0..0);
        }
        let listed = self.to.blocks.range();
        let both = needed.start.max(listed.start)..needed.end.min(listed.end);
        if self.to.group.kind == Kind::Full && both != *needed {
            let missing = if listed.contains(&needed.start) { both.end } else { needed.start };
            let first = missing * u64::from(self.to.group.block_tokens);
            return Err(self.to.lacks(missing, window.to.global(first)));
        }
        Ok(both)
    }
}

/// Runs being gathered.
struct Runs {
    runs: Vec<Run>,
    from_units: u64,
    to_units: u64,
}

impl Runs {
    /// Adds a unit, to the last run if it continues it at both ends.
    fn push(&mut self, next: Run) {
        if let Some(last) = self.runs.last_mut()
            && last.clip.is_none()
            && next.clip.is_none()
        {
            let at = |block: u32, unit: u32, units: u64| u64::from(block) * units + u64::from(unit);
            let from = at(last.from_block, last.from_unit, self.from_units);
            let to = at(last.to_block, last.to_unit, self.to_units);
            let units = u64::from(last.units);
            if at(next.from_block, next.from_unit, self.from_units) == from + units
                && at(next.to_block, next.to_unit, self.to_units) == to + units
            {
                last.units += 1;
                return;
            }
        }
        self.runs.push(next);
    }
}
