//! Leases of blocks.

use crate::error::Result;
use crate::index::{Entry, PinId};
use crate::open_store::OpenStore;
use crate::space::Space;
use std::sync::Arc;
use std::time::Duration;

/// A lease of blocks: they stay in the store until it is dropped, or ends.
#[derive(Debug)]
pub struct Pin {
    store: Arc<OpenStore>,
    id: Option<PinId>,
    blocks: usize,
}

impl Pin {
    /// Number of pinned blocks, from the beginning of the prompt.
    pub fn blocks(&self) -> usize {
        self.blocks
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(id) = &self.id
            && !kvferry_sys::fd::forked_since(self.store.forks)
        {
            self.store.core.member.unpin(id);
        }
    }
}

impl Space {
    /// Keeps the blocks of a prompt that are on the disk, from its beginning, until the value is dropped or
    /// `lease` has passed, whichever is first: a process that dies keeps nothing for longer. The pin says how many
    /// blocks they are: none while all processes together hold 4096 leases. Blocks of a directory that hangs do not
    /// count, as in [`Space::lookup`], and are not kept.
    ///
    /// A block that leaves at this moment may be counted and gone: [`Space::get`] tells. What a device loses is
    /// lost.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a hash that is too short or too long.
    pub fn pin<H: AsRef<[u8]>>(&self, prompt: &[H], lease: Duration) -> Result<Pin> {
        let _call = self.store.enter()?;
        let core = &self.store.core;
        let keys = self.keys(prompt)?;
        let on_disk = |keys| self.find(keys).into_iter().map_while(|entry| entry).collect();
        let mut found: Vec<Entry> = on_disk(&keys);
        found.truncate(core.readable(&found));
        let now = core.clock.now_s();
        let seconds = lease.as_secs().saturating_add(u64::from(lease.subsec_nanos() > 0));
        let until =
            now.saturating_add(u32::try_from(seconds).unwrap_or(u32::MAX)).saturating_add(1);
        let id = found.last().and_then(|last| core.member.pin(last.slot, now, until));
        let blocks = match &id {
            Some(_) => on_disk(&keys[..found.len()]).len(),
            None => 0,
        };
        Ok(Pin { store: Arc::clone(&self.store), id, blocks })
    }
}
