//! Secondary blocks in a block store.

use crate::carrier::Carrier;
use kvferry_blocks::{Outcome, Tier, Transfer};
use kvferry_store::{BlockMemory, Retain, Space, Store};
use std::sync::atomic::Ordering::Relaxed;

type Hash = [u8; 16];

#[derive(Debug)]
pub(crate) struct Stored {
    store: Store,
    /// Resets of the manager before the blocks were stored to which `spaces` belong.
    resets: u32,
    /// Spaces of the store, indexed by group.
    spaces: Vec<Space>,
}

impl Stored {
    pub(crate) fn open(carrier: &Carrier, path: &str) -> Result<Self, String> {
        let options = carrier.options.store(path);
        let store = Store::open(&carrier.agent, &options).map_err(|error| error.to_string())?;
        let mut stored = Self { store, resets: 0, spaces: Vec::new() };
        stored.name(carrier, 0);
        Ok(stored)
    }

    fn name(&mut self, carrier: &Carrier, resets: u32) {
        let groups = 0..u16::try_from(carrier.pages.groups()).unwrap_or(u16::MAX);
        self.spaces =
            groups.map(|group| self.store.space(&carrier.names.of(group, resets))).collect();
        self.resets = resets;
    }

    /// Carries out copies of one direction, with one call to the store for each group. All blocks were stored after the
    /// same number of resets, and each copy has another block. Blocks that they follow in their prompts may be in the
    /// engine's memory, so the store keeps each for itself.
    pub(crate) fn carry(
        &mut self,
        carrier: &Carrier,
        transfers: &[&Transfer],
    ) -> Result<Vec<Outcome>, String> {
        let resets = transfers.first().map_or(self.resets, |transfer| transfer.resets);
        if resets != self.resets {
            self.name(carrier, resets);
        }
        let mut outcomes = vec![Outcome::Failed; transfers.len()];
        for (group, space) in self.spaces.iter().enumerate() {
            let of_group = |at: &usize| usize::from(transfers[*at].group) == group;
            let chosen: Vec<usize> = (0..transfers.len()).filter(of_group).collect();
            if chosen.is_empty() {
                continue;
            }
            let is_put = transfers[chosen[0]].to.tier == Tier::Secondary;
            let hashes: Vec<Hash> = chosen.iter().map(|&at| hash(transfers[at])).collect();
            let page = |at: &usize| {
                let transfer = transfers[*at];
                let page = if is_put { transfer.from } else { transfer.to };
                carrier.pages.memory(group, page.index)
            };
            let memory: Vec<BlockMemory> = chosen.iter().map(page).collect();
            let done = match is_put {
                true => put(carrier, space, &hashes, &memory),
                false => space.get_each(&hashes, &memory),
            };
            for (at, is_done) in chosen.into_iter().zip(done.map_err(|error| error.to_string())?) {
                if is_done {
                    outcomes[at] = Outcome::Done;
                }
            }
        }
        Ok(outcomes)
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        self.store.close();
    }
}

fn hash(transfer: &Transfer) -> Hash {
    let [high, low] = transfer.key.0;
    (u128::from(high) << 64 | u128::from(low)).to_be_bytes()
}

/// Puts blocks. Returns for each whether the store has it.
fn put(
    carrier: &Carrier,
    space: &Space,
    hashes: &[Hash],
    memory: &[BlockMemory],
) -> kvferry_store::Result<Vec<bool>> {
    let put = space.put_each(hashes, memory, Retain::default())?;
    carrier.counters.present.fetch_add(put.present as u64, Relaxed);
    if put.stored + put.present == hashes.len() {
        return Ok(vec![true; hashes.len()]);
    }
    hashes.iter().map(|hash| Ok(space.lookup(&[hash])? == 1)).collect()
}
