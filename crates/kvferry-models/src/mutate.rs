//! Seeded mutations of kept inputs, for a toolchain without a fuzzer. The same in every run.

use fastrand::Rng;

/// Numbers at which decoders tend to break.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 63,
    u64::MAX,
];

const LEN_MAX: usize = 8192;

/// A mutation of `of`, possibly with parts of `other`.
pub fn mutate(of: &[u8], other: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = of.to_vec();
    for _ in 0..1 + rng.usize(..4) {
        step(&mut bytes, other, rng);
        bytes.truncate(LEN_MAX);
    }
    bytes
}

fn step(bytes: &mut Vec<u8>, other: &[u8], rng: &mut Rng) {
    let at = below(rng, bytes.len());
    let span = at..(at + 1 + rng.usize(..16)).min(bytes.len());
    match rng.usize(..9) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << rng.usize(..8),
        1 if !bytes.is_empty() => bytes[at] = rng.u8(..),
        2 => bytes.insert(at, rng.u8(..)),
        3 if !bytes.is_empty() => drop(bytes.drain(span)),
        4 => bytes.truncate(at),
        5 if !bytes.is_empty() => {
            let copy = bytes[span].to_vec();
            let to = below(rng, bytes.len());
            bytes.splice(to..to, copy);
        }
        6 => {
            let width = 1 << rng.usize(..4);
            let edge = EDGES[rng.usize(..EDGES.len())].to_le_bytes();
            let (from, to) = if rng.usize(..2) == 0 { (0, width) } else { (8 - width, 8) };
            for (byte, new) in bytes[at..].iter_mut().zip(&edge[from..to]) {
                *byte = *new;
            }
        }
        7 => {
            let from = below(rng, other.len());
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        _ => {
            let more = 1 + rng.usize(..64);
            bytes.extend(std::iter::repeat_with(|| rng.u8(..)).take(more));
        }
    }
}

/// A number below `n`; zero if `n` is.
fn below(rng: &mut Rng, n: usize) -> usize {
    if n == 0 { 0 } else { rng.usize(..n) }
}
