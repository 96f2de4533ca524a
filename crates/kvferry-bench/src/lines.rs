//! Questions and answers between the tool's own processes: one JSON value per line.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kvferry::RemoteRegion;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// A region's description as the pipe carries it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(into = "Vec<u8>", try_from = "Vec<u8>")]
pub(crate) struct Described(pub(crate) RemoteRegion);

impl From<Described> for Vec<u8> {
    fn from(described: Described) -> Vec<u8> {
        described.0.to_bytes()
    }
}

impl TryFrom<Vec<u8>> for Described {
    type Error = kvferry::Error;

    fn try_from(bytes: Vec<u8>) -> Result<Described, kvferry::Error> {
        RemoteRegion::from_bytes(&bytes).map(Described)
    }
}

/// The longest line that is read. Block tables to be checked are the longest, a few MiB.
const LINE_LIMIT: u64 = 64 << 20;

/// A control connection, with both directions.
#[derive(Debug)]
pub struct Lines<R, W> {
    reader: BufReader<R>,
    writer: W,
}

/// The value that was asked for, or why there is none.
pub type Answer<T> = Result<T, Failure>;

impl<R: Read, W: Write> Lines<R, W> {
    /// Reads from `reader`, buffered, and writes to `writer`.
    pub fn new(reader: R, writer: W) -> Self {
        Lines { reader: BufReader::new(reader), writer }
    }

    /// Writes a line.
    ///
    /// # Errors
    /// What the writer says.
    pub fn send<T: Serialize>(&mut self, value: &T) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.writer.write_all(&line)?;
        self.writer.flush()
    }

    /// The next line; `None` when the other side has closed.
    ///
    /// # Errors
    /// What the reader says, or `InvalidData` for a line that is cut off or is no `T`.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut line = Vec::new();
        self.reader.by_ref().take(LINE_LIMIT).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a control line is cut off"));
        }
        Ok(Some(serde_json::from_slice(&line)?))
    }

    /// As [`Lines::receive`], but fails with `TimedOut` after `patience`.
    ///
    /// # Errors
    /// Those of [`Lines::receive`], and `TimedOut`.
    pub fn receive_within<T: DeserializeOwned>(
        &mut self,
        patience: Duration,
    ) -> io::Result<Option<T>>
    where
        R: AsFd,
    {
        let asked = Instant::now();
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            if self.reader.buffer().is_empty() && !self.is_readable(patience, asked)? {
                let why = format!("no answer within {} s", patience.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            let buffer = self.reader.fill_buf()?;
            let end = buffer.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
            let taken = end.unwrap_or(buffer.len());
            if taken == 0 {
                return Ok(None);
            }
            line.extend_from_slice(&buffer[..taken]);
            self.reader.consume(taken);
            if line.len() as u64 > LINE_LIMIT {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a control line is too long",
                ));
            }
        }
        Ok(Some(serde_json::from_slice(&line)?))
    }

    /// Waits for something to read, or the end of the other side's output.
    fn is_readable(&self, patience: Duration, since: Instant) -> io::Result<bool>
    where
        R: AsFd,
    {
        loop {
            let left = patience.saturating_sub(since.elapsed());
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let reader = self.reader.get_ref();
            match poll(&mut [PollFd::new(reader, PollFlags::IN)], Some(&left)) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Asks and waits for the answer. The outer error is the connection's, the inner the other side's.
    pub(crate) fn ask<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        ask: &Q,
    ) -> io::Result<Answer<A>> {
        self.send(ask)?;
        self.receive()?.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the other process has closed the connection",
            )
        })
    }

    /// The two ends, for a connection that changes its protocol. Fails if bytes were read ahead.
    pub(crate) fn into_parts(self) -> io::Result<(R, W)> {
        if !self.reader.buffer().is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "bytes were sent before they were asked for",
            ));
        }
        Ok((self.reader.into_inner(), self.writer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_cross_one_per_line() {
        let mut out = Lines::new(io::empty(), Vec::new());
        out.send(&("block", 7)).expect("memory takes it");
        let refusal = Answer::<u8>::Err(Failure::Check("no".into()));
        out.send(&refusal).expect("memory takes it");
        let (_, written) = out.into_parts().expect("nothing was read");
        let mut back = Lines::new(written.as_slice(), io::sink());
        assert_eq!(back.receive().expect("whole line"), Some(("block".to_string(), 7)));
        assert_eq!(back.receive().expect("whole line"), Some(refusal));
        assert_eq!(back.receive::<u8>().expect("clean end"), None);
    }

    #[test]
    fn a_line_that_is_cut_off_is_an_error_and_not_a_value() {
        let mut cut = Lines::new(&b"12"[..], io::sink());
        assert!(cut.receive::<u8>().is_err());
    }

    #[test]
    fn a_late_answer_times_out_and_is_read_later() {
        let (mut one, other) = std::os::unix::net::UnixStream::pair().expect("two ends");
        let mut lines = Lines::new(other, io::sink());
        let wait = Duration::from_millis(20);
        one.write_all(b"1\n2").expect("room");
        assert_eq!(lines.receive_within(wait).expect("a whole line"), Some(1));
        let late = lines.receive_within::<u8>(wait).expect_err("half a line");
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        one.write_all(b"3\n").expect("room");
        assert_eq!(lines.receive_within(wait).expect("a whole line"), Some(3));
        drop(one);
        assert_eq!(lines.receive_within::<u8>(wait).expect("clean end"), None);
    }

    #[test]
    fn a_peer_that_closes_instead_of_answering_is_an_error() {
        let mut closed = Lines::new(io::empty(), io::sink());
        let refusal = closed.ask::<_, u8>(&1).expect_err("no answer came");
        assert_eq!(refusal.kind(), io::ErrorKind::UnexpectedEof);
    }
}
