//! Comparison of all bytes, before and after the timed part, never in it.
//!
//! Each place of the source has its own bytes, and the destination is poisoned with bytes that only its
//! owner knows. After a move, every block must hold the bytes of its place at the source, and everything
//! between the blocks the poison.

use fastrand::Rng;
use kvferry::Region;

use crate::failure::Failure;
use crate::machine::random;

use super::pages::Pages;
use super::tables::Pair;

/// Memory of a program: a region of an agent, or pages of a plain program.
pub(crate) trait Memory {
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

/// Contents are generated in pieces of this many bytes.
const PIECE: usize = 4096;

/// Writes to `buffer` what memory that was filled with this seed holds from `at` on.
fn image(seed: u64, mut at: usize, buffer: &mut [u8]) {
    let mut rest = buffer;
    while !rest.is_empty() {
        let (piece, skip) = ((at / PIECE) as u64, at % PIECE);
        let now = rest.len().min(PIECE - skip);
        let (part, tail) = rest.split_at_mut(now);
        // Neighbouring seeds have unlike first numbers, and overlapping sequences after them.
        let mut rng = Rng::with_seed(Rng::with_seed(seed.wrapping_add(piece)).u64(..));
        if now == PIECE {
            rng.fill(part);
        } else {
            let mut whole = [0; PIECE];
            rng.fill(&mut whole);
            part.copy_from_slice(&whole[skip..][..now]);
        }
        (rest, at) = (tail, at + now);
    }
}

/// Checks a request of another host.
fn must_fit(memory: &(impl Memory + ?Sized), span: usize) -> Result<(), Failure> {
    if span > memory.bytes() {
        let bytes = memory.bytes();
        return Err(Failure::Usage(format!(
            "{span} bytes were asked for, this memory has {bytes}"
        )));
    }
    Ok(())
}

/// Fills the first `span` bytes of a source.
pub(crate) fn fill(
    memory: &mut (impl Memory + ?Sized),
    seed: u64,
    span: usize,
) -> Result<(), Failure> {
    must_fit(memory, span)?;
    let mut buffer = vec![0; 64 * PIECE];
    for at in (0..span).step_by(buffer.len()) {
        let part = &mut buffer[..(64 * PIECE).min(span - at)];
        image(seed, at, part);
        memory.put(at, part)?;
    }
    Ok(())
}

/// Poisons the first `span` bytes of a destination with bytes that only this process knows. Returns their
/// seed.
pub(crate) fn poison(memory: &mut (impl Memory + ?Sized), span: usize) -> Result<u64, Failure> {
    let poison = random();
    fill(memory, poison, span)?;
    Ok(poison)
}

/// Touches every page: the first transfer must not pay for that.
pub(crate) fn touched(mut region: Region) -> Result<Region, Failure> {
    let bytes = region.len();
    poison(&mut region, bytes)?;
    Ok(region)
}

/// Describes an error in the first `span` bytes of a destination, if there is one.
pub(crate) fn check(
    memory: &(impl Memory + ?Sized),
    seed: u64,
    poison: u64,
    span: usize,
    pairs: &[Pair],
) -> Result<Option<String>, Failure> {
    must_fit(memory, span)?;
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_by_key(|&pair| pairs[pair].destination);
    let mut at = 0;
    for number in order {
        let Pair { source, destination, len } = pairs[number];
        let end = destination.checked_add(len).filter(|&end| destination >= at && end <= span);
        if end.is_none() || source.checked_add(len).is_none_or(|end| end > span) {
            return Err(Failure::Usage(format!(
                "block {number} reaches beyond {span} bytes, or overlaps another"
            )));
        }
        if let Some(wrong) = differs(memory, poison, at, at, destination - at)? {
            return Ok(Some(format!("byte {wrong} belongs to no block, but was written")));
        }
        if let Some(wrong) = differs(memory, seed, source, destination, len)? {
            let offset = wrong - destination;
            return Ok(Some(format!("block {number} differs at its byte {offset}")));
        }
        at = destination + len;
    }
    let wrong = differs(memory, poison, at, at, span - at)?;
    Ok(wrong.map(|wrong| format!("byte {wrong} belongs to no block, but was written")))
}

/// The first of `len` bytes from `held_at` on that differs from the seed's bytes from `image_at` on.
fn differs(
    memory: &(impl Memory + ?Sized),
    seed: u64,
    image_at: usize,
    held_at: usize,
    len: usize,
) -> Result<Option<usize>, Failure> {
    const AT_ONCE: usize = 16 * PIECE;
    let (mut held, mut right) = (vec![0; len.min(AT_ONCE)], vec![0; len.min(AT_ONCE)]);
    for from in (0..len).step_by(AT_ONCE) {
        let now = AT_ONCE.min(len - from);
        memory.take(held_at + from, &mut held[..now])?;
        image(seed, image_at + from, &mut right[..now]);
        if held[..now] != right[..now] {
            let wrong = held.iter().zip(&right).position(|(held, right)| held != right);
            return Ok(Some(held_at + from + wrong.expect("they are not equal")));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Size;
    use crate::transfers::tables::Table;

    #[test]
    fn spans_and_blocks_beyond_the_memory_are_refused() {
        let mut memory = Pages::filled(0, 4096);
        assert!(fill(&mut memory, 1, 4097).is_err() && check(&memory, 1, 1, 4097, &[]).is_err());
        for (source, destination, len) in [(1, 0, 4096), (0, 1, 4096), (0, usize::MAX, 2)] {
            let pairs = [Pair { source, destination, len }];
            let poison = poison(&mut memory, 4096).expect("in bounds");
            let checked = check(&memory, 1, poison, 4096, &pairs);
            assert!(checked.is_err() || checked.expect("looked").is_some());
        }
    }

    #[test]
    fn only_an_exact_scattered_copy_passes() {
        const SPAN: usize = 20_000;
        let table = Table::scatter(100, Size { block: 500, count: 32 });
        let (mut source, mut destination) = (Pages::filled(0, SPAN), Pages::filled(0, SPAN));
        fill(&mut source, 5, SPAN).expect("in bounds");
        let poison = poison(&mut destination, SPAN).expect("in bounds");
        let wrong = |destination: &Pages| {
            check(destination, 5, poison, SPAN, &table.pairs).expect("in bounds")
        };
        assert!(wrong(&destination).is_some(), "poison is wrong");
        for &Pair { source: from, destination: to, len } in &table.pairs {
            destination[to..][..len].copy_from_slice(&source[from..][..len]);
        }
        assert_eq!(wrong(&destination), None);
        destination[table.pairs[9].destination + 3] ^= 1;
        assert_eq!(wrong(&destination), Some("block 9 differs at its byte 3".into()));
        destination[table.pairs[9].destination + 3] ^= 1;
        destination[50] ^= 1;
        assert_eq!(
            wrong(&destination),
            Some("byte 50 belongs to no block, but was written".into())
        );
        destination[50] ^= 1;
        destination[SPAN - 1] ^= 1;
        assert!(wrong(&destination).expect("the end, too").starts_with("byte 19999"));
    }

    #[test]
    fn an_image_does_not_depend_on_how_it_is_cut() {
        let mut whole = vec![0; 3 * PIECE];
        image(9, 0, &mut whole);
        for (at, len) in [(0, 10), (4090, 20), (1, PIECE), (PIECE, PIECE), (5000, 5000)] {
            let mut part = vec![0; len];
            image(9, at, &mut part);
            assert_eq!(part, whole[at..at + len], "{at}+{len}");
        }
    }
}
