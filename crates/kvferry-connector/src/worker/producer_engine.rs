//! A producing engine that this rank can read from, and the bytes that a request reads from it.

use crate::address::AgentAddress;
use crate::codes::code_of;
use crate::rank::{ReadMapper, ReadRequest, Source};
use crate::rank_metadata::RankMetadata;
use kvferry::{After, Batch, Incarnation, Region, RegionId, RemoteRegion};
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::{EngineId, Pairing};
use kvferry_proto::handoff::{BlockTable, Need};
use kvferry_proto::layout::{Group, Kind, Layer, Layout, Plane};
use kvferry_proto::plan::{Ask, Blocks, Map, Plan, Share};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;

/// Units that the blocks of all of an engine's ranks may fall into together: a few times the limit of one map, which
/// takes a tenth of a second.
const PIECES_MAX: u64 = 1 << 24;

/// Blocks that an engine may have of a request beyond those of its tokens, for draft tokens and states.
const LOOKAHEAD: u32 = 64;

#[derive(Debug)]
pub(super) struct Memory {
    pub(super) layout: Layout,
    /// Bytes of a token in all layers, at most. States are not counted: they are read at the end.
    pub(super) token_bytes: u64,
    regions: FxHashMap<RegionId, Region>,
}

/// One incarnation of a producing engine, with the state that all handoffs from it share.
#[derive(Debug)]
pub(super) struct ProducerEngine {
    pub(super) id: EngineId,
    ranks: Vec<ProducerRank>,
    cards: CardsHash,
    /// Bytes that the engine takes, about.
    size: usize,
}

/// A hash of the encoded metadata of ranks, from which their maps are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CardsHash(blake3::Hash);

/// A rank that this rank reads from, or only frees.
#[derive(Debug)]
struct ProducerRank {
    /// Number of the rank in its engine.
    theirs: usize,
    source: Source,
    /// The incarnation whose memory the maps are of; `None` without memory.
    incarnation: Option<Incarnation>,
    share: Share,
    /// Map of everything but states.
    map: Arc<Map>,
    /// Maps states. They are valid only at the end: until then the producer changes them in place.
    states: Arc<Map>,
    layers: u32,
    groups: u32,
    /// Tokens per block of the group with the smallest blocks.
    block_tokens: u32,
    regions: FxHashMap<RegionId, RemoteRegion>,
}

impl Memory {
    pub(super) fn new(layout: Layout, regions: &[Region]) -> Self {
        let of_layer = |layer: &Layer| {
            let Group { kind, block_tokens, context, .. } = &layout.groups()[layer.group];
            let bytes =
                |it: &Plane| u64::from(it.heads.count) * u64::from(it.rows) * u64::from(it.content);
            let block: u64 = layer.planes.iter().map(bytes).sum();
            if *kind == Kind::State {
                0
            } else {
                block / u64::from(*block_tokens) / u64::from(context.size)
            }
        };
        let token_bytes = layout.layers().iter().map(of_layer).sum();
        let regions = regions.iter().map(|it| (it.id(), it.clone())).collect();
        Self { layout, token_bytes, regions }
    }

    pub(super) fn regions(&self) -> Vec<Region> {
        self.regions.values().cloned().collect()
    }

    fn is_state(&self, layer: &str) -> bool {
        let layer = self.layout.layers().iter().find(|it| it.name == layer);
        layer.is_some_and(|layer| self.layout.groups()[layer.group].kind == Kind::State)
    }
}

impl ProducerEngine {
    /// Maps the ranks of a producing engine onto the rank numbered `rank` here. `cards` is the hash of its cards.
    ///
    /// # Errors
    /// The layouts do not match, or a rank's metadata are malformed.
    pub(super) fn new(
        memory: &Memory,
        rank: usize,
        pairing: &Pairing,
        cards: CardsHash,
    ) -> Result<Self, (WireCode, String)> {
        let (mut ranks, mut pieces, mut bytes) = (Vec::new(), 0, 0);
        for &theirs in pairing.routing.sources_of(rank) {
            let source = ProducerRank::new(memory, rank, theirs, pairing)?;
            for map in [&source.map, &source.states] {
                pieces += map.pieces();
                bytes += map.size();
            }
            if pieces > PIECES_MAX {
                let words =
                    format!("{pieces} pieces of blocks are beyond the limit of {PIECES_MAX}");
                return Err((WireCode::LayoutMismatch, words));
            }
            ranks.push(source);
        }
        let size = bytes + pairing.cards.values().map(Vec::len).sum::<usize>();
        Ok(Self { id: pairing.engine, ranks, cards, size })
    }

    /// An engine without ranks that takes so many bytes.
    #[cfg(test)]
    pub(super) const fn of_size(size: usize) -> Self {
        let cards = CardsHash(blake3::Hash::from_bytes([0; 32]));
        Self { id: EngineId(1), ranks: Vec::new(), cards, size }
    }

    /// Bytes that the engine takes, about.
    pub(super) const fn size(&self) -> usize {
        self.size
    }

    pub(super) fn sources(&self) -> impl Iterator<Item = &Source> {
        self.ranks.iter().map(|rank| &rank.source)
    }

    /// The ranks that this rank reads from, each with the incarnation that was learned and what this rank can use of the
    /// announcements of a request of so many tokens.
    pub(super) fn needs(
        &self,
        tokens: u32,
    ) -> impl Iterator<Item = (&Source, Option<Incarnation>, Need)> {
        let need = move |rank: &ProducerRank| {
            let blocks = tokens.div_ceil(rank.block_tokens).saturating_add(LOOKAHEAD);
            Need { groups: rank.groups, blocks }
        };
        self.ranks.iter().map(move |rank| (&rank.source, rank.incarnation, need(rank)))
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = String> {
        self.sources().map(|source| source.address.as_str().to_owned())
    }

    /// Whether [`ProducerEngine::new`] would return the same for `pairing`: the engine was learned at
    /// another of its addresses. Its id alone proves nothing, since an engine chooses it. `cards` is the hash of those of
    /// `pairing`.
    pub(super) fn is_of(&self, rank: usize, pairing: &Pairing, cards: CardsHash) -> bool {
        let is_rank = |(of, &theirs): (&ProducerRank, &usize)| {
            let address = pairing.addresses[theirs].parse::<AgentAddress>();
            of.theirs == theirs
                && address.as_ref() == Ok(&of.source.address)
                && pairing.routing.readers_of(theirs).len() as u32 == of.source.readers
                && pairing.routing.share(theirs, rank) == of.share
        };
        let sources = pairing.routing.sources_of(rank);
        self.id == pairing.engine
            && self.cards == cards
            && self.ranks.len() == sources.len()
            && self.ranks.iter().zip(sources).all(is_rank)
    }

    pub(super) fn has_rank_at(&self, address: &str) -> bool {
        self.sources().any(|source| source.address.as_str() == address)
    }
}

impl CardsHash {
    /// Takes milliseconds for long cards.
    pub(super) fn of(pairing: &Pairing) -> Self {
        let mut hasher = blake3::Hasher::new();
        for (rank, card) in &pairing.cards {
            hasher.update(&[*rank as u64, card.len() as u64].map(u64::to_le_bytes).concat());
            hasher.update(card);
        }
        Self(hasher.finalize())
    }
}

impl ProducerRank {
    fn new(
        memory: &Memory,
        ours: usize,
        theirs: usize,
        pairing: &Pairing,
    ) -> Result<Self, (WireCode, String)> {
        let metadata = match pairing.cards.get(&theirs).map(|it| RankMetadata::decode(it)) {
            Some(Ok(metadata)) => Ok(metadata),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("the engine sent no metadata of it".to_owned()),
        };
        let RankMetadata { layout, regions, .. } = metadata
            .map_err(|why| (WireCode::Malformed, format!("producer rank {theirs}: {why}")))?;
        let share = pairing.routing.share(theirs, ours);
        let is_state = |layer: &str| memory.is_state(layer);
        let map = |share: Share| {
            let map = Map::new(&layout, &memory.layout, &share);
            map.map(Arc::new).map_err(|error| (WireCode::LayoutMismatch, error.to_string()))
        };
        let (map, states) =
            (map(share.retain(|layer| !is_state(layer)))?, map(share.retain(is_state))?);
        let block_tokens = layout.groups().iter().map(|group| group.block_tokens).min();
        let block_tokens = block_tokens.unwrap_or(1).max(1);
        let address = &pairing.addresses[theirs];
        let address = address.parse().map_err(|error| {
            (
                WireCode::Malformed,
                format!("producer rank {theirs}: address {address:.80?}: {error}"),
            )
        })?;
        let readers = pairing.routing.readers_of(theirs).len() as u32;
        Ok(Self {
            theirs,
            source: Source { address, readers },
            incarnation: regions.first().map(|region| region.incarnation),
            share,
            map,
            states,
            layers: layout.layers().len() as u32,
            groups: layout.groups().len() as u32,
            block_tokens,
            regions: regions.into_iter().map(|region| (region.id, region)).collect(),
        })
    }
}

/// Maps one request's blocks here onto the producers'.
#[derive(Debug)]
pub(super) struct FetchMapper {
    pub(super) memory: Arc<Memory>,
    pub(super) engine: Arc<ProducerEngine>,
    pub(super) tokens: Range<u64>,
    /// The request's blocks here, one table per group.
    pub(super) blocks: Vec<BlockTable>,
    /// The work of a device that used the blocks before.
    pub(super) after: After,
}

impl ReadMapper for FetchMapper {
    fn map(&mut self, read: &ReadRequest<'_>) -> Result<Batch, (WireCode, String)> {
        let mismatch = |words: String| (WireCode::LayoutMismatch, words);
        let from = self.engine.ranks.iter().find(|it| it.source.address.as_str() == read.from);
        let from =
            from.ok_or_else(|| mismatch(format!("{} is no producer of this request", read.from)))?;
        let (given, wanted) = (read.slice.to, self.tokens.end);
        let has_states = !from.states.is_empty();
        let given = u64::from(given.tokens);
        // A state is the one after the last token handed over, so both ends must agree on that token.
        if read.slice.last && (given < wanted || (has_states && given != wanted)) {
            return Err(mismatch(format!("{given} of {wanted} tokens are handed over")));
        }
        let mut batch = Batch::new();
        batch.set_after(self.after.clone());
        let (theirs, ours) = (blocks(read.tables), blocks(&self.blocks));
        let plan = |map: &Arc<Map>, part| {
            let ask = Ask { tokens: self.tokens.clone(), part, producer: &theirs, consumer: &ours };
            let plan = map.plan(&ask).map_err(|error| mismatch(error.to_string()))?;
            let Some(unfilled) = plan.unfilled().first() else { return Ok(plan) };
            let group = &self.memory.layout.groups()[unfilled.group].name;
            Err(mismatch(format!(
                "group {group}: block {} lies before the window, and the producer has given it back",
                unfilled.block
            )))
        };
        for rectangle in read.slice.from.until(&read.slice.to, from.layers) {
            let within = |token: u32| u64::from(token).clamp(self.tokens.start, self.tokens.end);
            let part = within(rectangle.tokens.start)..within(rectangle.tokens.end);
            if part.is_empty() || from.map.is_empty() {
                continue;
            }
            let layers = rectangle.layers.start as usize..rectangle.layers.end as usize;
            self.push(&mut batch, from, &plan(&from.map, part)?.for_layers(layers))?;
        }
        if read.slice.last && has_states {
            self.push(&mut batch, from, &plan(&from.states, self.tokens.clone())?)?;
        }
        Ok(batch)
    }
}

impl FetchMapper {
    fn push(
        &self,
        batch: &mut Batch,
        from: &ProducerRank,
        plan: &Plan,
    ) -> Result<(), (WireCode, String)> {
        for copy in plan.copies() {
            let local = self.memory.regions.get(&copy.to.region);
            let remote = from.regions.get(&copy.from.region);
            let (Some(local), Some(remote)) = (local, remote) else {
                return Err((WireCode::UnknownRegion, "a layout names no region".to_owned()));
            };
            batch
                .push(local, copy.to.offset, remote, copy.from.offset, copy.len)
                .map_err(|error| (code_of(error.kind()), error.to_string()))?;
        }
        Ok(())
    }
}

fn blocks(tables: &[BlockTable]) -> Vec<Blocks<'_>> {
    tables.iter().map(|table| Blocks { first: table.first, ids: &table.blocks }).collect()
}
