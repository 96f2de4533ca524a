//! kvferry's copies: an agent with the device memory of the buffers.

use std::time::{Duration, Instant};

use kvferry::{
    Access, Agent, Batch, HostSpan, Region, RemoteRegion, TransportKind, Transports, staged,
};
use kvferry_cuda::Direction;
use kvferry_cuda::raw::{Buffers, Piece};

use super::bench::failed;
use crate::failure::Failure;

/// An agent, and its region: the device memory of buffers, which outlive this value.
pub(super) struct Subject {
    agent: Agent,
    region: Region,
    remote: RemoteRegion,
}

impl Subject {
    pub(super) fn new(buffers: &Buffers) -> Result<Subject, Failure> {
        let agent = Agent::builder()
            .name("bench-gpu")
            .transports(Transports::only(TransportKind::TCP))
            .start()?;
        let (address, len) = (buffers.device_address(), buffers.device_len() as u64);
        let memory = kvferry_cuda::memory(address, len, None).map_err(failed)?;
        let region = agent.register_device(memory, Access::READ_WRITE)?;
        let remote = region.remote();
        Ok(Subject { agent, region, remote })
    }

    /// Makes a batch of the pieces, in their order. The other side of the batch is not used.
    pub(super) fn batch(&self, pieces: &[Piece]) -> Result<Batch, Failure> {
        let mut batch = Batch::with_capacity(pieces.len());
        for piece in pieces {
            let (at, len) = (piece.device_at as u64, piece.len as u64);
            batch.push(&self.region, at, &self.remote, at, len)?;
        }
        Ok(batch)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        // An agent that can't unregister the region keeps it until the agent ends.
        let _ = self.agent.unregister(&self.region);
    }
}

/// Copies a batch through stages, and neither reads nor writes their bytes.
pub(super) fn copy(direction: Direction, batch: &Batch) -> Result<Duration, Failure> {
    copy_with(direction, batch, &mut |_| ())
}

/// Copies a batch through stages, and passes them to `with` one after the other.
pub(super) fn copy_with(
    direction: Direction,
    batch: &Batch,
    with: &mut dyn FnMut(HostSpan),
) -> Result<Duration, Failure> {
    let began = Instant::now();
    match direction {
        Direction::Out => staged::copy_out(batch, with)?,
        Direction::In => staged::copy_in(batch, with)?,
    }
    Ok(began.elapsed())
}
