//! A paged KV pool: one region per layer, cut into blocks.

use kvferry::{Access, Agent, Region};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// What a pool looks like; both processes have one of the same shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Shape {
    pub(super) layers: u32,
    /// Blocks in the pool, the same in each layer.
    pub(super) blocks: u32,
    /// One block of one layer.
    pub(super) page_bytes: u64,
}

/// The pool of one process.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) shape: Shape,
    pub(super) layers: Vec<Region>,
}

impl Pool {
    pub(super) fn allocate(agent: &Agent, shape: Shape, access: Access) -> Result<Pool, Failure> {
        let layer_bytes =
            usize::try_from(u64::from(shape.blocks) * shape.page_bytes).map_err(|_| {
                Failure::Usage("a layer is larger than this machine can address".into())
            })?;
        let layers = (0..shape.layers).map(|_| agent.allocate(layer_bytes, access));
        Ok(Pool { shape, layers: layers.collect::<Result<_, _>>()? })
    }

    pub(super) fn write(&self, layer: u32, block: u32, page: &[u8]) -> Result<(), Failure> {
        Ok(self.layers[layer as usize].write_at(self.offset(block), page)?)
    }

    pub(super) fn read(&self, layer: u32, block: u32, page: &mut [u8]) -> Result<(), Failure> {
        Ok(self.layers[layer as usize].read_at(self.offset(block), page)?)
    }

    fn offset(&self, block: u32) -> usize {
        (u64::from(block) * self.shape.page_bytes) as usize
    }

    /// Runs `work` for every layer, on all cores, with a page-sized buffer to use.
    pub(super) fn for_each_layer<F>(&self, work: F) -> Result<(), Failure>
    where
        F: Fn(u32, &mut [u8]) -> Result<(), Failure> + Sync,
    {
        let workers = (crate::machine::cpus() as u32).clamp(1, self.shape.layers);
        let worker = |first: u32| {
            let mut page = vec![0; self.shape.page_bytes as usize];
            let mut layers = (first..self.shape.layers).step_by(workers as usize);
            layers.try_for_each(|layer| work(layer, &mut page))
        };
        let worker = &worker;
        std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..workers).map(|first| scope.spawn(move || worker(first))).collect();
            workers
                .into_iter()
                .try_for_each(|worker| worker.join().expect("no layer's work panics"))
        })
    }
}
