//! Seeded mutations of kept inputs, for a toolchain without a fuzzer. The same in every run.

/// A pseudo-random generator: xorshift64*.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub const fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`; zero if `n` is.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() >> 11) as usize % n }
    }
}

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
pub fn mutate(of: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = of.to_vec();
    for _ in 0..1 + random.below(4) {
        step(&mut bytes, other, random);
        bytes.truncate(LEN_MAX);
    }
    bytes
}

fn step(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(bytes.len());
    let span = at..(at + 1 + random.below(16)).min(bytes.len());
    match random.below(9) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
        1 if !bytes.is_empty() => bytes[at] = random.next() as u8,
        2 => bytes.insert(at, random.next() as u8),
        3 if !bytes.is_empty() => drop(bytes.drain(span)),
        4 => bytes.truncate(at),
        5 if !bytes.is_empty() => {
            let copy = bytes[span].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, copy);
        }
        6 => {
            let width = 1 << random.below(4);
            let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
            let (from, to) = if random.below(2) == 0 { (0, width) } else { (8 - width, 8) };
            for (byte, new) in bytes[at..].iter_mut().zip(&edge[from..to]) {
                *byte = *new;
            }
        }
        7 => {
            let from = random.below(other.len());
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        _ => {
            let more = 1 + random.below(64);
            bytes.extend(std::iter::repeat_with(|| random.next() as u8).take(more));
        }
    }
}
