//! That the bytes are right: before and after the timed part, never in it.

use kvferry::Region;
use serde::{Deserialize, Serialize};

use crate::blocks::scattered;
use crate::content::{self, Content};
use crate::failure::Failure;

use super::pages::Pages;

/// Blocks side by side, from `at` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Blocks {
    pub(super) at: usize,
    pub(super) block: usize,
    pub(super) count: usize,
}

impl Blocks {
    /// All of the memory, in pieces that are easy to hold.
    pub(super) fn all_of(bytes: usize) -> Blocks {
        let block = bytes.clamp(1, 1 << 20);
        Blocks { at: 0, block, count: bytes / block }
    }

    /// What another host asks for is not to be trusted with our memory.
    fn must_fit(self, bytes: usize) -> Result<(), Failure> {
        let end = self.block.checked_mul(self.count).and_then(|len| len.checked_add(self.at));
        match end {
            Some(end) if end <= bytes && self.block > 0 => Ok(()),
            _ => Err(Failure::Usage(format!("{self:?} is not within {bytes} bytes"))),
        }
    }
}

/// Memory of either program: a region of the agent, or the floor's pages.
pub(super) trait Memory {
    fn bytes(&self) -> usize;
    fn put(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Failure>;
    fn take(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Failure>;
}

impl Memory for Region {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Failure> {
        Ok(self.write_at(offset, bytes)?)
    }

    fn take(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Failure> {
        Ok(self.read_at(offset, bytes)?)
    }
}

impl Memory for Pages {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Failure> {
        self[offset..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn take(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Failure> {
        bytes.copy_from_slice(&self[offset..][..bytes.len()]);
        Ok(())
    }
}

/// The source: block after block, each with content of its own.
pub(super) fn fill(memory: &mut impl Memory, seed: u64, blocks: Blocks) -> Result<(), Failure> {
    blocks.must_fit(memory.bytes())?;
    let mut buffer = vec![0; blocks.block];
    (0..blocks.count).try_for_each(|index| {
        Content::of(&[seed, index as u64]).fill(&mut buffer);
        memory.put(blocks.at + index * blocks.block, &buffer)
    })
}

/// The destination: bytes that only this process knows.
pub(super) fn poison(memory: &mut impl Memory, blocks: Blocks) -> Result<(), Failure> {
    fill(memory, content::random(), blocks)
}

/// The first block that is not what the source should have held, if any.
pub(super) fn check(
    memory: &impl Memory,
    seed: u64,
    blocks: Blocks,
) -> Result<Option<String>, Failure> {
    blocks.must_fit(memory.bytes())?;
    let (mut held, mut scratch) = (vec![0; blocks.block], Vec::new());
    for index in 0..blocks.count {
        let place = scattered(index, blocks.count);
        memory.take(blocks.at + place * blocks.block, &mut held)?;
        if let Err(offset) = Content::of(&[seed, index as u64]).check(&held, &mut scratch) {
            return Ok(Some(format!(
                "block {index}, which belongs at {place}, differs at byte {offset}"
            )));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_beyond_the_memory_are_refused() {
        let mut memory = Pages::filled(0, 4096);
        for (at, block, count) in [(1, 4096, 1), (0, 0, 1), (0, usize::MAX, 2), (4096, 1, 1)] {
            let blocks = Blocks { at, block, count };
            assert!(fill(&mut memory, 1, blocks).is_err() && check(&memory, 1, blocks).is_err());
        }
        assert_eq!(Blocks::all_of(3 << 20), Blocks { at: 0, block: 1 << 20, count: 3 });
        assert_eq!(Blocks::all_of(100), Blocks { at: 0, block: 100, count: 1 });
    }

    #[test]
    fn only_a_scattered_copy_of_the_source_is_right() {
        let blocks = Blocks { at: 100, block: 64, count: 32 };
        let (mut source, mut destination) = (Pages::filled(0, 4096), Pages::filled(0, 4096));
        fill(&mut source, 5, blocks).expect("in bounds");
        poison(&mut destination, blocks).expect("in bounds");
        assert!(check(&destination, 5, blocks).expect("in bounds").is_some(), "poison is wrong");
        for index in 0..32 {
            let (from, to) = (100 + index * 64, 100 + scattered(index, 32) * 64);
            destination[to..][..64].copy_from_slice(&source[from..][..64]);
        }
        assert_eq!(check(&destination, 5, blocks).expect("in bounds"), None);
        destination[100 + scattered(9, 32) * 64 + 3] ^= 1;
        let wrong = check(&destination, 5, blocks).expect("in bounds").expect("one byte is wrong");
        assert!(wrong.starts_with("block 9,") && wrong.ends_with("byte 3"), "{wrong}");
    }
}
