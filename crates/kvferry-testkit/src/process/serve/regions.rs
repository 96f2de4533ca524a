//! A child's regions: allocated by its agent, or memory of the child that is only registered.

use super::command::Command;
use super::{Outcome, Server};
use crate::pattern::Pattern;
use kvferry::{Access, Agent, Region};
use kvferry_sys::map::Mapping;
use serde_json::json;
use std::time::Instant;

/// A region and its memory.
pub(super) struct ServedRegion {
    pub(super) region: Region,
    /// The memory of a region that the agent did not allocate.
    private: Option<Mapping>,
}

/// FNV-1a over words: enough to tell whether memory changed.
fn digest(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        let mut padded = [0; 8];
        padded[..word.len()].copy_from_slice(word);
        (hash ^ u64::from_le_bytes(padded)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl ServedRegion {
    fn new(agent: &Agent, command: Command<'_>) -> Result<Self, kvferry::Error> {
        let access = match command.text("access") {
            "r" => Access::READ,
            "w" => Access::WRITE,
            "rw" => Access::READ_WRITE,
            _ => Access::NONE,
        };
        let len = command.number("len") as usize;
        let held = if command.get("private") == true {
            let map = Mapping::anonymous(len).expect("memory");
            // SAFETY: the mapping is kept until the process ends, and only copied to and from.
            let region = unsafe { agent.register(map.as_ptr(), len, access)? };
            Self { region, private: Some(map) }
        } else {
            Self { region: agent.allocate(len, access)?, private: None }
        };
        held.store(&Pattern::new(command.number("seed")).bytes(len))?;
        Ok(held)
    }

    fn load(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.region.len()];
        match &self.private {
            Some(map) => map.span(0, bytes.len()).copy_to(&mut bytes),
            None => self.region.read_at(0, &mut bytes).expect("the agent allocated the region"),
        }
        bytes
    }

    fn store(&self, bytes: &[u8]) -> Result<(), kvferry::Error> {
        match &self.private {
            Some(map) => map.span(0, bytes.len()).copy_from(bytes),
            None => self.region.write_at(0, bytes)?,
        }
        Ok(())
    }
}

impl Server {
    pub(super) fn region(&self, command: Command<'_>) -> &ServedRegion {
        &self.regions[&command.number("region")]
    }

    pub(super) fn allocate(&mut self, command: Command<'_>) -> Outcome {
        let held = ServedRegion::new(self.agent(), command)?;
        let id = self.new_id();
        let (addr, remote) = (held.region.addr(), held.region.remote().to_bytes());
        self.regions.insert(id, held);
        Ok(json!({"id": id, "addr": addr, "remote": remote}))
    }

    pub(super) fn fill(&self, command: Command<'_>) -> Outcome {
        let held = self.region(command);
        held.store(&Pattern::new(command.number("seed")).bytes(held.region.len()))?;
        Ok(json!({}))
    }

    pub(super) fn digest(&self, command: Command<'_>) -> Outcome {
        Ok(json!({"digest": digest(&self.region(command).load())}))
    }

    /// Whether the memory differed from a digest at any time within `for_ms`.
    pub(super) fn watch(&self, command: Command<'_>) -> Outcome {
        let end = Instant::now() + command.millis("for_ms");
        let wanted = command.number("digest");
        loop {
            if digest(&self.region(command).load()) != wanted {
                return Ok(json!({"changed": true}));
            }
            if Instant::now() >= end {
                return Ok(json!({"changed": false}));
            }
        }
    }

    pub(super) fn matches(&self, command: Command<'_>) -> Outcome {
        let bytes = self.region(command).load();
        let wanted = Pattern::new(command.number("seed")).bytes(bytes.len());
        Ok(json!({"matches": bytes == wanted}))
    }

    pub(super) fn unregister(&self, command: Command<'_>) -> Outcome {
        self.agent().unregister(&self.region(command).region)?;
        Ok(json!({}))
    }

    /// Unregisters the region if it still is registered, and drops it.
    pub(super) fn release(&mut self, command: Command<'_>) -> Outcome {
        if let Some(held) = self.regions.remove(&command.number("region")) {
            drop(self.agent().unregister(&held.region));
            // The agent may still have the region: its memory stays mapped.
            self.forgotten.extend(held.private);
        }
        Ok(json!({}))
    }
}
