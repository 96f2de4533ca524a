//! The engine's blocks as pages of a driver.

use crate::config::EngineConfig;
use crate::kvferry_adapter::RegionMemory;
use crate::layout::{KvCaches, PlaneView, RankLayout};
use crate::memory::KvMemory;
use kvferry::{Access, Agent, Region};
use kvferry_offload::{Pages, Piece};
use std::sync::Arc;

/// The caches of all ranks of an engine, in memory of an agent.
#[derive(Debug)]
#[non_exhaustive]
pub struct EnginePages {
    /// Caches of each rank.
    pub caches: Vec<Arc<KvCaches>>,
    /// Page `n` is the engine's block `n + 1`: its block 0 stands for none.
    pub pages: Pages,
}

impl EnginePages {
    /// Allocates the caches.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn allocate(agent: &Agent, config: &EngineConfig) -> kvferry::Result<Self> {
        let mut groups = vec![vec![]; config.groups.len()];
        let mut caches = vec![];
        for rank in config.ranks() {
            let layout = RankLayout::new(config, rank);
            let regions: Vec<Region> = layout
                .storages
                .iter()
                .map(|len| agent.allocate(*len, Access::NONE))
                .collect::<kvferry::Result<_>>()?;
            for layer in &layout.layers {
                for view in &layer.planes {
                    add(&mut groups[layer.group], view, &regions[view.storage]);
                }
            }
            let memory = |region| Arc::new(RegionMemory::new(region)) as Arc<dyn KvMemory>;
            let storages = regions.into_iter().map(memory).collect();
            caches.push(Arc::new(KvCaches { layout, storages }));
        }
        Ok(Self { caches, pages: Pages::new(groups) })
    }
}

/// The bytes of block 1 of a plane, run by run.
fn add(pieces: &mut Vec<Piece>, view: &PlaneView, region: &Region) {
    let stride = (view.block_stride * view.split) as u64;
    let mut add = |offset: usize, len: usize| {
        let base = (view.base + offset) as u64 + stride;
        pieces.push(Piece { region: region.clone(), base, stride, len: len as u64 });
    };
    for part in 0..view.split {
        let part = part * view.block_stride;
        if view.is_together() {
            add(part, view.kernel_bytes());
            continue;
        }
        for head in 0..view.heads {
            for token in 0..view.tokens {
                add(part + head * view.head_stride + token * view.token_stride, view.bytes);
            }
        }
    }
}
