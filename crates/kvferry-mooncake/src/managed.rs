//! Buffers that the engine allocates for the caller.
//!
//! Sizes are powers of two from 8 KiB to 256 MiB, split from registered chunks of 256 MiB that stay
//! until the engine ends; a bigger buffer is a region of its own. A peer that asks for the first
//! registered address gets the address of a chunk, as with Mooncake.

use kvferry::{Access, Agent, Error, Region};
use std::collections::HashMap;

const SMALLEST: usize = 8 << 10;
const CLASSES: usize = 16;
const CHUNK: usize = SMALLEST << (CLASSES - 1);

/// The buffers of one engine.
#[derive(Debug, Default)]
pub(crate) struct Managed {
    chunks: Vec<Region>,
    free: [Vec<usize>; CLASSES],
    used: HashMap<usize, Use>,
}

#[derive(Debug)]
enum Use {
    Piece { class: usize },
    Own(Region),
}

impl Managed {
    /// Allocates at least `len` bytes.
    pub(crate) fn allocate(&mut self, agent: &Agent, len: usize) -> Result<usize, Error> {
        let (addr, how) = match class_of(len) {
            Some(class) => (self.piece(agent, class)?, Use::Piece { class }),
            None => {
                let region = agent.allocate(len, Access::READ_WRITE)?;
                (region.addr(), Use::Own(region))
            }
        };
        self.used.insert(addr, how);
        Ok(addr)
    }

    fn piece(&mut self, agent: &Agent, class: usize) -> Result<usize, Error> {
        let split_from = (class..CLASSES).find(|from| !self.free[*from].is_empty());
        let (mut addr, from) = match split_from {
            Some(from) => (self.free[from].pop(), from),
            None => (None, CLASSES - 1),
        };
        if addr.is_none() {
            let chunk = agent.allocate(CHUNK, Access::READ_WRITE)?;
            addr = Some(chunk.addr());
            self.chunks.push(chunk);
        }
        let addr = addr.expect("found or just allocated");
        for half in (class..from).rev() {
            self.free[half].push(addr + (SMALLEST << half));
        }
        Ok(addr)
    }

    /// Frees a buffer: `None` if there is no such buffer, else the region to unregister if the buffer
    /// was one.
    pub(crate) fn free(&mut self, addr: usize) -> Option<Option<Region>> {
        match self.used.remove(&addr)? {
            Use::Piece { class } => {
                self.free[class].push(addr);
                Some(None)
            }
            Use::Own(region) => Some(Some(region)),
        }
    }
}

fn class_of(len: usize) -> Option<usize> {
    (0..CLASSES).find(|class| len <= SMALLEST << class)
}
