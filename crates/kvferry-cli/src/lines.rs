//! Questions and answers between the tool's own processes: one JSON value per line.

use std::io::{self, BufRead, BufReader, Read, Write};

use kvferry::RemoteRegion;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// A region's description on its way to the other process: the bytes that were made for it.
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

/// The longest line taken. The block tables of a large demo are the longest, at a few MiB.
const LINE_LIMIT: u64 = 64 << 20;

/// Both directions of a control connection.
#[derive(Debug)]
pub(crate) struct Lines<R, W> {
    reader: BufReader<R>,
    writer: W,
}

/// What is answered: the value asked for, or why not.
pub(crate) type Answer<T> = Result<T, Failure>;

impl<R: Read, W: Write> Lines<R, W> {
    pub(crate) fn new(reader: R, writer: W) -> Self {
        Lines { reader: BufReader::new(reader), writer }
    }

    pub(crate) fn send<T: Serialize>(&mut self, value: &T) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.writer.write_all(&line)?;
        self.writer.flush()
    }

    /// `None` when the other side has closed.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
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

    /// Asks and waits for the answer. The outer error is the connection's, the inner the other's.
    pub(crate) fn ask<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        ask: &Q,
    ) -> io::Result<Answer<A>> {
        self.send(ask)?;
        self.receive()?.ok_or_else(|| {
            io::Error::new(io::ErrorKind::UnexpectedEof, "the other process has gone")
        })
    }

    /// The two ends again, for a connection that changes its use. Nothing read ahead may be lost.
    pub(crate) fn into_parts(self) -> io::Result<(R, W)> {
        if !self.reader.buffer().is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "bytes follow too early"));
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
    fn a_peer_that_closes_instead_of_answering_is_an_error() {
        let mut closed = Lines::new(io::empty(), io::sink());
        let refusal = closed.ask::<_, u8>(&1).expect_err("no answer came");
        assert_eq!(refusal.kind(), io::ErrorKind::UnexpectedEof);
    }
}
