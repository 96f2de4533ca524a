//! What other commands want of a `bench --serve`: to find out whether an address is one, and how
//! fast its memory can be written and read.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kvferry::{Access, Agent, Batch, Options};

use crate::failure::Failure;
use crate::lines::Answer;
use crate::stats::median;

use super::link::Link;
use super::messages::{Door, Hello, Sizes};

/// Rounds at least.
const LEAST: usize = 3;

/// Who answers a bench's greeting.
#[derive(Debug)]
pub(crate) enum Greeting {
    /// A `bench --serve`, and where its agent is.
    Served { agent: String },
    /// Somebody else; what they did, in words.
    Said(&'static str),
    /// Somebody who says nothing to that.
    Quiet,
}

/// Greets whoever listens as a bench does. Nothing is begun by it.
pub(crate) fn greet(address: SocketAddr, patience: Duration) -> Greeting {
    let bytes = answer(address, patience).unwrap_or_default();
    match serde_json::from_slice::<Answer<Door>>(&bytes) {
        Ok(Ok(door)) => Greeting::Served { agent: door.agent },
        _ if bytes.is_empty() => Greeting::Quiet,
        _ => Greeting::Said(said(&bytes)),
    }
}

/// The first bytes that come in answer, up to a line or until the peer has had time enough.
fn answer(address: SocketAddr, patience: Duration) -> std::io::Result<Vec<u8>> {
    const LONGEST: usize = 4096;
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    let mut hello = serde_json::to_vec(&Hello::Control)?;
    hello.push(b'\n');
    stream.write_all(&hello)?;
    let (mut bytes, mut buffer) = (Vec::new(), [0; 512]);
    // Who hangs up or says nothing more has said what there was to say.
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        bytes.extend_from_slice(&buffer[..n]);
        if bytes.len() >= LONGEST || bytes.contains(&b'\n') {
            break;
        }
    }
    Ok(bytes)
}

/// What first bytes tell of who sent them.
fn said(bytes: &[u8]) -> &'static str {
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

/// Medians, in GB/s.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measured {
    pub(crate) write: f64,
    pub(crate) read: f64,
}

/// Writes and reads `bytes` in blocks, for `time` each way.
pub(crate) fn measure(
    agent: &Agent,
    target: &str,
    bytes: usize,
    block: usize,
    time: Duration,
) -> Result<Measured, Failure> {
    let sizes = Sizes { arena: bytes, shared: 0, floor: 0 };
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
        // The first one opens streams and touches pages.
        once()?;
        let (mut rates, began) = (Vec::new(), Instant::now());
        while rates.len() < LEAST || began.elapsed() < time {
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
    fn strangers_are_known_by_their_first_bytes() {
        for (bytes, word) in [
            (&b"HTTP/1.1 400 Bad Request\r\n"[..], "web"),
            (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH"),
            (b"\x15\x03\x01\x00\x02\x02\x46", "TLS"),
            (b"what?", "not known"),
        ] {
            assert!(said(bytes).contains(word), "{}", said(bytes));
        }
    }
}
