//! Cost of registering and unregistering as many regions as an engine with a region per layer and block pool, or a
//! client of NIXL with a region per block, has.

use crate::Failure;
use crate::counters::Counts;
use crate::kept::Figures;
use crate::target::agent;
use crate::transfers::note;
use kvferry::{Access, Agent, Region};

const REGIONS: usize = 10_000;
const REGION_BYTES: usize = 4096;
/// The table of regions has grown to its size, and pages are there.
const WARM_UP: usize = 1;
const ROUNDS: usize = 5;

/// Counts registering one by one and all at once, and unregistering all at once.
pub(crate) fn count() -> Result<Figures, Failure> {
    // Peers on this host see the table of regions.
    let agent = agent("regions", "tcp,local")?;
    // A byte between two regions, so that none could be merged with the next.
    let mut memory = vec![1_u8; REGIONS * (REGION_BYTES + 1)];
    let ranges: Vec<(*mut u8, usize)> = memory
        .chunks_exact_mut(REGION_BYTES + 1)
        .map(|range| (range.as_mut_ptr(), REGION_BYTES))
        .collect();
    let mut counted = [const { Vec::new() }; 3];
    for round in 0..WARM_UP + ROUNDS {
        let mut regions = Vec::with_capacity(REGIONS);
        let singly = counts_of(|| {
            for &(addr, len) in &ranges {
                // SAFETY: `memory` outlives the regions, which are unregistered below, and nothing refers to it
                // meanwhile.
                regions.push(unsafe { agent.register(addr, len, Access::READ_WRITE) }?);
            }
            Ok(())
        })?;
        let unregistered = counts_of(|| Ok(agent.unregister_batch(&regions)?))?;
        let mut regions = Vec::new();
        let at_once = counts_of(|| {
            regions = register_all(&agent, &ranges)?;
            Ok(())
        })?;
        agent.unregister_batch(&regions)?;
        if round >= WARM_UP {
            for (rounds, counts) in counted.iter_mut().zip([singly, at_once, unregistered]) {
                rounds.push(counts);
            }
        }
    }
    drop(memory);
    let mut figures = Figures::default();
    let names = [
        "register 10000 regions one by one",
        "register 10000 regions at once",
        "unregister 10000 regions at once",
    ];
    for (name, rounds) in names.iter().zip(&counted) {
        note(&mut figures, name, rounds);
    }
    Ok(figures)
}

fn register_all(agent: &Agent, ranges: &[(*mut u8, usize)]) -> Result<Vec<Region>, Failure> {
    // SAFETY: as in `count`.
    Ok(unsafe { agent.register_batch(ranges, Access::READ_WRITE) }?)
}

fn counts_of(work: impl FnOnce() -> Result<(), Failure>) -> Result<Counts, Failure> {
    let before = Counts::now();
    work()?;
    Ok(Counts::now().since(&before))
}
