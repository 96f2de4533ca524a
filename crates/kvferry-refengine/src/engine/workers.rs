//! The connector's worker halves, and how they are set up.

use crate::config::{ConfigError, EngineConfig, Rank};
use crate::contract::vllm::WorkerConnector;
use crate::layout::{KvCaches, RankLayout};
use crate::memory::{HeapMemory, KvMemory};
use crate::quorum::Countdown;
use crate::scheduler::{Scheduler, Seam};
use std::sync::Arc;

/// The worker halves, with the counts of their reports.
pub(super) enum Workers {
    None,
    Vllm { workers: Vec<Box<dyn WorkerConnector>>, countdown: Countdown },
}

impl Workers {
    /// Allocates the caches of all ranks.
    pub(super) fn caches(
        &mut self,
        config: &EngineConfig,
        ranks: &[Rank],
    ) -> Result<Vec<Arc<KvCaches>>, ConfigError> {
        let mut all = vec![];
        for (at, rank) in ranks.iter().copied().enumerate() {
            let layout = RankLayout::new(config, rank);
            let mut storages = vec![];
            for (storage, len) in layout.storages.iter().copied().enumerate() {
                let memory = match self {
                    Self::None => None,
                    Self::Vllm { workers, .. } => {
                        workers[at].allocate_kv_memory(rank, storage, len)
                    }
                };
                let memory: Arc<dyn KvMemory> =
                    memory.unwrap_or_else(|| Arc::new(HeapMemory::new(len)));
                if memory.bytes() != len {
                    let (wanted_bytes, len_bytes) = (len, memory.bytes());
                    return Err(ConfigError::Memory { rank, len_bytes, wanted_bytes });
                }
                storages.push(memory);
            }
            all.push(Arc::new(KvCaches { layout, storages }));
        }
        Ok(all)
    }

    /// Gives the caches to the worker halves, and their handshake metadata to the scheduler half.
    pub(super) fn register(&mut self, caches: &[Arc<KvCaches>], scheduler: &mut Scheduler) {
        let Self::Vllm { workers, .. } = self else { return };
        for (worker, caches) in workers.iter_mut().zip(caches) {
            worker.register_kv_caches(caches);
        }
        let pins = scheduler.cache.pins();
        let Seam::Vllm(connector) = &mut scheduler.seam else { return };
        connector.bind_block_pools(pins);
        connector.get_finished_count();
        let handshakes: Vec<_> = workers
            .iter_mut()
            .zip(caches)
            .map(|(worker, caches)| (caches.layout.rank, worker.get_handshake_metadata()))
            .collect();
        connector.set_xfer_handshake_metadata(&handshakes);
    }
}
