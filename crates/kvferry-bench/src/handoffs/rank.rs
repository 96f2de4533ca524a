//! One rank of an engine that computes nothing: an agent, memory in the shape of a cache, and a worker
//! half, which gets its metadata from the bench instead of a scheduler half.

use std::ops::Range;
use std::time::Duration;

use kvferry::{Access, Agent, Region, Transports};
use kvferry_connector::{
    Announce, BlockTable, Compute, ConnectorMetadata, Ending, EndingKind, EngineId, EngineMetadata,
    FetchRequest, HandoffId, Limits, Model, Offer, Reports, Worker, WorkerConfig,
};
use kvferry_proto::layout::{
    ContextShard, Encoding, Group, Heads, Kind, Layer, Layout, Packing, Plane, Region as Place,
    Shape,
};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::transfers::tables::Pair;
use crate::transfers::verify;

use super::PIECES;

/// Longer than any handoff here takes.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// A cache's shape.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Geometry {
    pub(super) layers: u32,
    pub(super) blocks: u32,
    pub(super) block_tokens: u32,
    pub(super) heads: u32,
    /// Bytes per layer, head and token.
    pub(super) content: u32,
}

impl Geometry {
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.layers) * u64::from(self.blocks) * self.block_bytes()
    }

    /// Bytes of a block in one layer.
    fn block_bytes(&self) -> u64 {
        u64::from(self.block_tokens) * u64::from(self.heads) * u64::from(self.content)
    }
}

/// Times at which a producer announces blocks: [`Announce`], as the pipe carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Ready {
    Layers { least_bytes: u64 },
    Chunks,
}

impl From<Ready> for Announce {
    fn from(ready: Ready) -> Announce {
        match ready {
            Ready::Layers { least_bytes } => Announce::Layers { pieces: PIECES, least_bytes },
            Ready::Chunks => Announce::Chunks,
        }
    }
}

/// Everything that a rank is built from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Build {
    pub(super) engine: u64,
    pub(super) transport: String,
    pub(super) ready: Ready,
    pub(super) geometry: Geometry,
}

#[derive(Debug)]
pub(super) struct Rank {
    pub(super) agent: Agent,
    pub(super) worker: Worker,
    pub(super) memory: Region,
    layout: Layout,
    geometry: Geometry,
}

impl Rank {
    /// The only rank of an engine.
    pub(super) fn start(build: &Build) -> Result<Rank, Failure> {
        let rank = Rank::without_engine(build)?;
        let ranks = vec![rank.worker.rank_metadata().to_vec().into()];
        let engine = Some(EngineMetadata { id: EngineId(build.engine.into()), ranks });
        rank.apply(&ConnectorMetadata { engine, ..ConnectorMetadata::default() })?;
        Ok(rank)
    }

    /// Starts a rank as it is before a scheduler half names its engine.
    pub(super) fn without_engine(build: &Build) -> Result<Rank, Failure> {
        let agent = Agent::builder().transports(Transports::parse(&build.transport)?).start()?;
        let geometry = build.geometry;
        // Private, as memory that an engine allocated.
        let memory = agent.allocate_private(geometry.bytes() as usize, Access::READ)?;
        let bytes = Encoding::new("bytes", 8);
        let layout = layout(&geometry, Packing::Lbhnc, (0, 1), &bytes, memory.id())?;
        let limits = Limits::default();
        let config = WorkerConfig {
            rank: 0,
            model: Model::default(),
            announce: build.ready.into(),
            limits,
            producers: None,
        };
        let regions = std::slice::from_ref(&memory);
        let worker = Worker::start(&agent, layout.clone(), regions, config).map_err(failed)?;
        Ok(Rank { agent, worker, memory, layout, geometry })
    }

    pub(super) fn layers(&self) -> usize {
        self.layout.layers().len()
    }

    pub(super) fn apply(&self, metadata: &ConnectorMetadata) -> Result<(), Failure> {
        self.worker.apply(&metadata.encode()).map_err(failed)
    }

    /// Begins to fetch a request's first tokens.
    pub(super) fn fetch(
        &self,
        request: &str,
        from: &str,
        blocks: &[u32],
        tokens: u32,
    ) -> Result<(), Failure> {
        let fetches = vec![fetch_request(request, from, blocks, tokens)];
        self.apply(&ConnectorMetadata { fetches, ..ConnectorMetadata::default() })?;
        self.worker.fetch();
        Ok(())
    }

    /// Waits until something ends. It must not have failed.
    pub(super) fn next_reports(&self) -> Result<Reports, Failure> {
        if !self.worker.wait(PATIENCE) {
            return Err(Failure::Failed("a handoff has not ended in time".into()));
        }
        let reports = self.worker.reports();
        if reports.failed.is_empty() {
            return Ok(reports);
        }
        let notes = reports.notes.as_deref().map(kvferry_connector::Notes::decode);
        Err(Failure::Failed(format!("a handoff failed: {notes:?}")))
    }

    /// The blocks of a handoff between two ranks of this shape, as offsets.
    pub(super) fn pairs(&self, from: &[u32], to: &[u32]) -> Vec<Pair> {
        let len = self.geometry.block_bytes() as usize;
        let layers = self.layout.layers().iter().map(|layer| layer.planes[0].view);
        let at = |base: u64, stride: u64, block: u32| (base + stride * u64::from(block)) as usize;
        let pairs = layers.flat_map(|view| {
            from.iter().zip(to).map(move |(&from, &to)| Pair {
                source: at(view.base, view.block_stride, from),
                destination: at(view.base, view.block_stride, to),
                len,
            })
        });
        pairs.collect()
    }

    pub(super) fn fill(&mut self, seed: u64) -> Result<(), Failure> {
        let span = self.memory.len();
        verify::fill(&mut self.memory, seed, span)
    }

    pub(super) fn poison(&mut self) -> Result<u64, Failure> {
        let span = self.memory.len();
        verify::poison(&mut self.memory, span)
    }

    pub(super) fn check(&self, seed: u64, poison: u64, pairs: &[Pair]) -> Result<(), Failure> {
        match verify::check(&self.memory, seed, poison, self.memory.len(), pairs)? {
            None => Ok(()),
            Some(wrong) => Err(Failure::Check(wrong)),
        }
    }
}

pub(super) fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::Failed(error.to_string())
}

pub(super) fn id(request: &str) -> HandoffId {
    HandoffId::new(request).expect("names here are short")
}

pub(super) fn fetch_request(
    request: &str,
    from: &str,
    blocks: &[u32],
    tokens: u32,
) -> FetchRequest {
    FetchRequest {
        request: request.to_owned(),
        transfer: id(request),
        address: from.parse().expect("the address of an agent"),
        engine: None,
        tokens: (0, tokens),
        blocks: vec![BlockTable::new(0, blocks.to_vec())],
        budget_ms: PATIENCE.as_millis() as u32,
    }
}

/// The next step computes `tokens` of a request of `whole` tokens, in these blocks.
pub(super) fn compute(
    request: &str,
    tokens: Range<u32>,
    whole: u32,
    blocks: BlockTable,
) -> Compute {
    let offer = Offer { transfer: id(request), tokens: whole, eager: true };
    Compute {
        request: request.to_owned(),
        offer: (tokens.start == 0).then_some(offer),
        until: tokens.end,
        blocks: vec![blocks],
    }
}

pub(super) fn held(request: &str) -> Ending {
    let how = EndingKind::Held { side_data: None };
    Ending { request: request.to_owned(), transfer: id(request), how }
}

/// The layout of one rank of `ranks` in an engine of this shape.
pub(super) fn layout(
    geometry: &Geometry,
    packing: Packing,
    (rank, ranks): (u32, u32),
    encoding: &Encoding,
    region: kvferry::RegionId,
) -> Result<Layout, Failure> {
    let Geometry { layers, blocks, block_tokens, heads, content } = *geometry;
    let unsound = || Failure::Usage("no cache has this shape".to_owned());
    let heads = Heads::shard(heads, rank, ranks).ok_or_else(unsound)?;
    let rows = block_tokens;
    let shape = Shape { layers, blocks, heads: heads.count, rows, content, kernel_blocks: 1 };
    let views = packing.views(&shape, 0, 0).ok_or_else(unsound)?;
    let group = Group {
        name: "full".to_owned(),
        kind: Kind::Full,
        block_tokens,
        blocks,
        context: ContextShard::WHOLE,
    };
    let layers = views.into_iter().enumerate().map(|(at, view)| Layer {
        name: format!("model.layers.{at}.self_attn.attn"),
        group: 0,
        planes: vec![Plane {
            role: "kv".to_owned(),
            encoding: encoding.clone(),
            heads,
            rows,
            content,
            view,
        }],
    });
    let places = vec![Place { id: region, len: shape.bytes().ok_or_else(unsound)? }];
    Layout::new(places, vec![group], layers.collect())
        .map_err(|error| Failure::Usage(error.to_string()))
}
