//! One entry per decoder. An entry asserts more than the absence of panics: a message that was
//! decoded and encoded again is unchanged, limits hold, lengths add up, and the division of the
//! bytes into chunks makes no difference.

pub mod agent;
pub mod directory;
pub mod engine_handshake;
pub mod frames;
pub mod handoff;
pub mod layouts;
pub mod messages;
pub mod rank_message;
pub mod session;
pub mod tasks;
pub mod topologies;

/// Separator between the parts of one input: the byte that begins no MessagePack value.
const BETWEEN: [u8; 4] = [0xc1; 4];

/// Splits an input into three parts; missing ones are empty.
///
/// Parts are separated by a marker and not by leading lengths, so that a fuzzer can change one part
/// and leave the others as they are.
fn parts(bytes: &[u8]) -> [&[u8]; 3] {
    let mut rest = Some(bytes);
    [(); 3].map(|()| {
        let part = rest.unwrap_or_default();
        let end = part.windows(BETWEEN.len()).position(|it| it == BETWEEN);
        rest = end.map(|end| &part[end + BETWEEN.len()..]);
        &part[..end.unwrap_or(part.len())]
    })
}

/// Joins these parts to one input.
fn joined(parts: &[&[u8]]) -> Vec<u8> {
    parts.join(&BETWEEN[..])
}

const fn least_common_multiple(a: u64, b: u64) -> u64 {
    a / greatest_common_divisor(a, b) * b
}

const fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
