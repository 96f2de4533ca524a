//! Tells other commands whether an address is a `bench --serve`, and how fast its memory can be written and read.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kvferry::{Access, Agent, Batch, Options};

use crate::failure::Failure;
use crate::lines::Answer;
use crate::stats::median;

use super::link::Link;
use super::messages::{Challenge, Hello, Sizes};

/// Rounds at least.
const ROUNDS_MIN: usize = 3;

/// Answer of an address to the first message of a bench.
#[derive(Debug)]
pub enum Answered {
    /// Answer of a `bench --serve`, with the address of its agent.
    Bench(String),
    /// Answer in another protocol, with its name in words.
    Other(&'static str),
    /// No answer in time.
    Nothing,
}

/// Finds out what listens at `address`. Starts no bench.
pub fn identify(address: SocketAddr, patience: Duration) -> Answered {
    let bytes = answer(address, patience).unwrap_or_default();
    match serde_json::from_slice::<Answer<Challenge>>(&bytes) {
        Ok(Ok(challenge)) => Answered::Bench(challenge.agent),
        _ if bytes.is_empty() => Answered::Nothing,
        _ => Answered::Other(protocol(&bytes)),
    }
}

/// The first bytes of the answer, up to a line or until the time is over.
fn answer(address: SocketAddr, patience: Duration) -> std::io::Result<Vec<u8>> {
    const LONGEST: usize = 4096;
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    let mut hello = serde_json::to_vec(&Hello::Control)?;
    hello.push(b'\n');
    stream.write_all(&hello)?;
    let (mut bytes, mut buffer) = (Vec::new(), [0; 512]);
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        bytes.extend_from_slice(&buffer[..n]);
        if bytes.len() >= LONGEST || bytes.contains(&b'\n') {
            break;
        }
    }
    Ok(bytes)
}

/// The protocol that an answer's first bytes belong to, in words.
fn protocol(bytes: &[u8]) -> &'static str {
    let known: [(&[u8], &str); 7] = [
        (b"HTTP/", "it answers as a web server does"),
        (b"<!DOCTYPE", "it answers as a web server does"),
        (b"SSH-", "it answers as an SSH server does"),
        (b"\x15\x03", "it answers as a TLS server does"),
        (b"-ERR", "it answers as Redis does"),
        (b"220", "it answers as a mail or FTP server does"),
        (b"\x00\x00", "it answers in a binary protocol"),
    ];
    match known.iter().find(|(start, _)| bytes.starts_with(start)) {
        Some((_, words)) => words,
        None => "it answers in a protocol that is not known here",
    }
}

/// Median rates, in GB/s.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Measured {
    pub write: f64,
    pub read: f64,
}

/// Writes and reads `bytes` in blocks at a `bench --serve`, for `time` each way.
///
/// # Errors
/// [`Failure::Unreachable`] if there is no such bench at `target` or it refuses this agent; otherwise what
/// the transfer failed with.
pub fn measure(
    agent: &Agent,
    target: &str,
    bytes: usize,
    block: usize,
    time: Duration,
) -> Result<Measured, Failure> {
    let sizes = Sizes { arena: bytes, shared: 0, floor: 0, floor_streams: 0 };
    let link = Link::connect(agent, target, sizes)?;
    let here = agent.allocate(bytes, Access::NONE)?;
    let mut batch = Batch::with_capacity(bytes / block);
    for at in (0..bytes / block).map(|index| (index * block) as u64) {
        batch.push(&here, at, link.region(), at, block as u64)?;
    }
    let rounds = |write: bool| {
        let once = || {
            let began = Instant::now();
            let options = Options::default();
            let moved = if write {
                link.peer.write(&batch, &options)
            } else {
                link.peer.read(&batch, &options)
            };
            moved.map(|_| bytes as f64 / began.elapsed().as_secs_f64() / 1e9)
        };
        // The first transfer opens streams and touches pages.
        once()?;
        let (mut rates, began) = (Vec::new(), Instant::now());
        while rates.len() < ROUNDS_MIN || began.elapsed() < time {
            rates.push(once()?);
        }
        Ok::<_, kvferry::Error>(median(&rates))
    };
    Ok(Measured { write: rounds(true)?, read: rounds(false)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_protocols_are_known_by_their_first_bytes() {
        for (bytes, word) in [
            (&b"HTTP/1.1 400 Bad Request\r\n"[..], "web"),
            (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH"),
            (b"\x15\x03\x01\x00\x02\x02\x46", "TLS"),
            (b"what?", "not known"),
        ] {
            assert!(protocol(bytes).contains(word), "{}", protocol(bytes));
        }
    }
}
