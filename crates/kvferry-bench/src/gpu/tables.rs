//! Tables of scattered blocks, and the bytes that they must have.

use kvferry::{Batch, HostSpan};
use kvferry_cuda::Direction;
use kvferry_cuda::raw::{Buffers, Method, Piece, Table};

use super::bench::failed;
use super::ours;
use crate::blocks::shuffled;
use crate::failure::Failure;

/// Every byte of a table of at most this length is compared; of longer ones, the ends of all blocks and some whole blocks.
const WHOLE_BYTES: usize = 16 << 20;
/// The number of blocks of longer tables that are compared as a whole.
const WHOLE_BLOCKS: usize = 16;

/// Blocks at random places of the device memory, one after the other on the host.
pub(super) fn scattered(block: usize, count: usize, seed: u64) -> Vec<Piece> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let order = shuffled(u32::try_from(count).expect("few"), &mut rng);
    let place = |(at, &index): (usize, &u32)| Piece {
        device_at: index as usize * block,
        host_at: at * block,
        len: block,
    };
    order.iter().enumerate().map(place).collect()
}

/// The word at this index of the host memory.
fn word(index: usize) -> u64 {
    (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// `len` bytes of the pattern from `at` on, both multiples of 8.
fn pattern(at: usize, len: usize) -> Vec<u8> {
    (at / 8..(at + len) / 8).flat_map(|index| word(index).to_le_bytes()).collect()
}

/// Writes the pattern to the first `len` bytes of the host memory.
pub(super) fn fill_host(buffers: &Buffers, len: usize) {
    const STEP: usize = 1 << 20;
    for at in (0..len).step_by(STEP) {
        buffers.write_host(at, &pattern(at, STEP.min(len - at)));
    }
}

/// Ranges of the host memory that are compared: start and bytes.
fn marks(pieces: &[Piece]) -> Vec<(usize, usize)> {
    let bytes: usize = pieces.iter().map(|piece| piece.len).sum();
    let every = (pieces.len() / WHOLE_BLOCKS).max(1);
    let mut marks = Vec::new();
    for (at, piece) in pieces.iter().enumerate() {
        if bytes <= WHOLE_BYTES || at.is_multiple_of(every) {
            marks.push((piece.host_at, piece.len));
        } else {
            marks.push((piece.host_at, 8));
            marks.push((piece.host_at + piece.len - 8, 8));
        }
    }
    marks
}

/// Makes the bytes of the host memory wrong that [`is_pattern`] compares.
pub(super) fn spoil_host(buffers: &Buffers, pieces: &[Piece]) {
    for (at, len) in marks(pieces) {
        buffers.write_host(at, &vec![0xee; len]);
    }
}

/// True if the host memory of these pieces has the pattern.
pub(super) fn is_pattern(buffers: &Buffers, pieces: &[Piece]) -> bool {
    marks(pieces).into_iter().all(|(at, len)| {
        let mut bytes = vec![0; len];
        buffers.read_host(at, &mut bytes);
        bytes == pattern(at, len)
    })
}

/// A table in both directions, for plain calls and for kvferry.
pub(super) struct Case<'a> {
    pub(super) buffers: &'a Buffers,
    pub(super) pieces: Vec<Piece>,
    out: Table,
    into: Table,
    pub(super) batch: Batch,
}

impl<'a> Case<'a> {
    /// Makes the tables, and copies the pattern to the device memory.
    pub(super) fn new(
        buffers: &'a Buffers,
        subject: &ours::Subject,
        pieces: Vec<Piece>,
    ) -> Result<Case<'a>, Failure> {
        let table = |direction| Table::new(buffers, direction, &pieces).map_err(failed);
        let (out, into) = (table(Direction::Out)?, table(Direction::In)?);
        let batch = subject.batch(&pieces)?;
        fill_host(buffers, usize::try_from(out.bytes()).expect("it fits into the buffers"));
        let case = Case { buffers, pieces, out, into, batch };
        buffers.copy(&case.into, Method::Single).map_err(failed)?;
        Ok(case)
    }

    pub(super) fn table(&self, direction: Direction) -> &Table {
        match direction {
            Direction::Out => &self.out,
            Direction::In => &self.into,
        }
    }

    /// Copies by a plain method, and compares the bytes.
    pub(super) fn verify(&self, direction: Direction, method: Method) -> Result<(), Failure> {
        let name = method.name(self.buffers);
        self.prepare(direction)?;
        self.buffers.copy(self.table(direction), method).map_err(failed)?;
        self.compare(direction, &name)
    }

    /// Copies by kvferry, and compares the bytes.
    pub(super) fn verify_ours(&self, direction: Direction) -> Result<(), Failure> {
        self.prepare(direction)?;
        let mut at = 0;
        let mut stage = |span: HostSpan| {
            let mut bytes = vec![0; span.len()];
            match direction {
                Direction::Out => {
                    span.copy_to(&mut bytes);
                    self.buffers.write_host(at, &bytes);
                }
                Direction::In => {
                    self.buffers.read_host(at, &mut bytes);
                    span.copy_from(&bytes);
                }
            }
            at += span.len();
        };
        ours::copy_with(direction, &self.batch, &mut stage)?;
        self.compare(direction, "kvferry")
    }

    /// Makes all compared bytes of the destination wrong.
    fn prepare(&self, direction: Direction) -> Result<(), Failure> {
        match direction {
            Direction::Out => spoil_host(self.buffers, &self.pieces),
            Direction::In => self.buffers.fill_device(0xee).map_err(failed)?,
        }
        Ok(())
    }

    fn compare(&self, direction: Direction, who: &str) -> Result<(), Failure> {
        if direction == Direction::In {
            spoil_host(self.buffers, &self.pieces);
            self.buffers.copy(&self.out, Method::Single).map_err(failed)?;
        }
        match is_pattern(self.buffers, &self.pieces) {
            true => Ok(()),
            false => Err(Failure::Check(format!("{who}: a wrong byte, {direction:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_of_a_table_is_there_once_and_compared_at_both_ends() {
        let pieces = scattered(32 << 10, 1024, 3);
        let mut places: Vec<usize> = pieces.iter().map(|piece| piece.device_at).collect();
        places.sort_unstable();
        assert!(places.iter().enumerate().all(|(at, place)| at * (32 << 10) == *place));
        let marks = marks(&pieces);
        assert_eq!(marks.iter().filter(|(_, len)| *len == 32 << 10).count(), WHOLE_BLOCKS);
        assert_eq!(marks.len(), WHOLE_BLOCKS + 2 * (1024 - WHOLE_BLOCKS));
        assert_eq!(pattern(4096, 16)[8..], word(513).to_le_bytes());
    }
}
