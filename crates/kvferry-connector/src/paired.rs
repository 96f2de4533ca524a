//! A producing engine that this rank can read from, and what is read from it for a request.

use crate::card::RankCard;
use crate::codes::code_of;
use crate::rank::{Mapper, Read, Source};
use kvferry::{Batch, Incarnation, Region, RegionId, RemoteRegion};
use kvferry_proto::WireCode;
use kvferry_proto::handoff::BlockTable;
use kvferry_proto::introduction::{EngineId, Pairing};
use kvferry_proto::layout::{Kind, Layout};
use kvferry_proto::plan::{Ask, Blocks, Map, Plan};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;

/// This rank's memory.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) layout: Layout,
    regions: FxHashMap<RegionId, Region>,
}

/// A life of a producing engine, with what is the same for all handoffs from it.
#[derive(Debug)]
pub(crate) struct Paired {
    pub(crate) engine: EngineId,
    sources: Vec<PairedSource>,
}

/// A rank of it that this rank deals with.
#[derive(Debug)]
struct PairedSource {
    source: Source,
    /// Of everything but states.
    map: Arc<Map>,
    /// Of states, which are good at the end only: until then the producer carries them on.
    states: Arc<Map>,
    layers: u32,
    regions: FxHashMap<RegionId, RemoteRegion>,
}

impl Memory {
    pub(crate) fn new(layout: Layout, regions: &[Region]) -> Self {
        Self { layout, regions: regions.iter().map(|it| (it.id(), it.clone())).collect() }
    }

    /// Whether a layer keeps a state.
    fn is_state(&self, name: &str) -> bool {
        let layer = self.layout.layers().iter().find(|layer| layer.name == name);
        layer.is_some_and(|layer| self.layout.groups()[layer.group].kind == Kind::State)
    }
}

impl Paired {
    /// What rank `rank` of our engine has to do with theirs.
    ///
    /// # Errors
    /// They do not fit, or one of them says what cannot be.
    pub(crate) fn new(
        memory: &Memory,
        rank: usize,
        pairing: &Pairing,
    ) -> Result<Self, (WireCode, String)> {
        let sources = pairing.routing.sources_of(rank).iter().map(|&theirs| {
            let card = pairing.cards.get(&theirs).map(|card| RankCard::decode(card));
            let card = match card {
                Some(Ok(card)) => card,
                Some(Err(error)) => {
                    return Err((WireCode::Malformed, format!("producer rank {theirs}: {error}")));
                }
                None => {
                    return Err((
                        WireCode::Malformed,
                        format!("producer rank {theirs} has no card"),
                    ));
                }
            };
            let share = pairing.routing.share(theirs, rank);
            let is_state = |name: &str| memory.is_state(name);
            let map = |share| {
                let map = Map::new(&card.layout, &memory.layout, &share);
                map.map(Arc::new).map_err(|error| (WireCode::LayoutMismatch, error.to_string()))
            };
            let (map, states) =
                (map(share.retain(|layer| !is_state(layer)))?, map(share.retain(is_state))?);
            Ok(PairedSource {
                source: Source {
                    address: pairing.addresses[theirs].clone(),
                    readers: pairing.routing.readers_of(theirs).len() as u32,
                },
                map,
                states,
                layers: card.layout.layers().len() as u32,
                regions: card.regions.into_iter().map(|region| (region.id, region)).collect(),
            })
        });
        Ok(Self { engine: pairing.engine, sources: sources.collect::<Result<_, _>>()? })
    }

    /// The ranks that are read from, or only released.
    pub(crate) fn sources(&self) -> Vec<Source> {
        self.sources.iter().map(|it| it.source.clone()).collect()
    }

    /// Whether it has anything to do with a life of an agent.
    pub(crate) fn is_with(&self, life: Incarnation) -> bool {
        let mut regions = self.sources.iter().filter_map(|it| it.regions.values().next());
        regions.any(|region| region.incarnation == life)
    }
}

/// What one request gets.
#[derive(Debug)]
pub(crate) struct Fetch {
    pub(crate) memory: Arc<Memory>,
    pub(crate) paired: Arc<Paired>,
    /// The tokens that are fetched.
    pub(crate) tokens: Range<u64>,
    /// Per group, the request's blocks here.
    pub(crate) blocks: Vec<BlockTable>,
}

impl Mapper for Fetch {
    fn map(&mut self, read: &Read<'_>) -> Result<Batch, (WireCode, String)> {
        let mismatch = |words: String| (WireCode::LayoutMismatch, words);
        let from = self.paired.sources.iter().find(|it| it.source.address == read.from);
        let from = from.ok_or_else(|| mismatch(format!("{} is no source of it", read.from)))?;
        let (given, wanted) = (read.slice.to, self.tokens.end);
        let has_states = !from.states.is_empty();
        let given = u64::from(given.tokens);
        // A state is that after the last token that is handed over, whatever is wanted.
        if read.slice.last && (given < wanted || (has_states && given != wanted)) {
            return Err(mismatch(format!("{given} of {wanted} tokens are handed over")));
        }
        let mut batch = Batch::new();
        let (theirs, ours) = (blocks(read.tables), blocks(&self.blocks));
        let plan = |map: &Arc<Map>, part| {
            let ask = Ask { tokens: self.tokens.clone(), part, producer: &theirs, consumer: &ours };
            let plan = map.plan(&ask).map_err(|error| mismatch(error.to_string()))?;
            let Some(unfilled) = plan.unfilled().first() else { return Ok(plan) };
            let group = &self.memory.layout.groups()[unfilled.group].name;
            Err(mismatch(format!(
                "group {group}: block {} lies before the window, and the producer has let go of it",
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

impl Fetch {
    fn push(
        &self,
        batch: &mut Batch,
        from: &PairedSource,
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

/// Who of a refused engine's ranks is told by rank `rank` of `ranks`: all of them are by somebody.
pub(crate) fn to_be_told(addresses: &[String], rank: usize, ranks: usize) -> Vec<Source> {
    let ours = addresses.iter().enumerate().filter(|(at, _)| at % ranks == rank);
    ours.map(|(_, address)| Source { address: address.clone(), readers: 1 }).collect()
}
