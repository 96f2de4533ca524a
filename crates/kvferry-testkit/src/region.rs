//! Regions of an agent in this process: filled, read back, and paired in a batch.

use crate::fabric::Way;
use crate::pattern::Pattern;
use kvferry::{
    Access, After, Agent, Batch, Error, Options, Peer, Region, RemoteRegion, TransferStats,
};

/// New memory of `agent` that holds the pattern of `seed`.
///
/// # Panics
/// If the agent can't allocate it.
pub fn filled(agent: &Agent, len: usize, access: Access, seed: u64) -> Region {
    let region = agent.allocate(len, access).expect("memory");
    refill(&region, seed);
    region
}

/// Fills memory that an agent allocated with the pattern of `seed`.
///
/// # Panics
/// If the agent did not allocate it.
pub fn refill(region: &Region, seed: u64) {
    region.write_at(0, &Pattern::new(seed).bytes(region.len())).expect("owned memory");
}

/// Returns the content of memory that an agent allocated.
///
/// # Panics
/// If the agent did not allocate it.
pub fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_at(0, &mut bytes).expect("owned memory");
    bytes
}

/// A batch of blocks of one size, at the same offsets on both sides, as many as fit, without work to wait for.
///
/// # Panics
/// If a region is not what it says.
pub fn batch(local: &Region, remote: &RemoteRegion, block: usize) -> Batch {
    let len = local.len().min(remote.len as usize);
    let mut batch = Batch::with_capacity(len / block);
    batch.set_after(After::host());
    for at in (0..len / block).map(|i| (i * block) as u64) {
        batch.push(local, at, remote, at, block as u64).expect("inside both");
    }
    batch
}

/// A blocking transfer.
///
/// # Errors
/// Those of the transfer.
pub fn moved(
    way: Way,
    peer: &Peer,
    batch: &Batch,
    options: &Options<'_>,
) -> Result<TransferStats, Error> {
    match way {
        Way::Write => peer.write(batch, options),
        Way::Read => peer.read(batch, options),
    }
}
