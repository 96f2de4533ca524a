//! Reads a stream, and finds the records around what is damaged.

use super::format::{self, MAGIC_BYTES, Part, RECORD_BYTES, Record, decode, len_of};
use crate::log;
use std::io::{self, Read};

/// Bytes that are read at once.
const READ_BYTES: usize = 1 << 20;

/// Item that [`Reader`] finds in a stream.
#[derive(Debug)]
pub(super) enum StreamItem {
    Record(Record, Vec<u8>),
    /// Bytes that are no part of a stream, or a record whose data is wrong.
    Damage,
    /// A later release wrote the stream.
    Newer(u32),
}

#[derive(Debug)]
pub(super) struct Reader<R> {
    from: R,
    /// Bytes that were read; those from `begin` on are not consumed.
    buffer: Vec<u8>,
    begin: usize,
    /// Export id of the current stream. `None` between streams.
    export: Option<[u8; 16]>,
    is_stream: bool,
    /// The bytes before were damaged, too.
    is_damaged: bool,
    /// Records that were right, of this stream, and those that its end speaks of.
    right: u64,
    missing: u64,
    has_end: bool,
    consumed: u64,
}

impl<R: Read> Reader<R> {
    pub(super) fn new(from: R) -> Self {
        Self {
            from,
            buffer: Vec::new(),
            begin: 0,
            export: None,
            is_stream: false,
            is_damaged: false,
            right: 0,
            missing: 0,
            has_end: false,
            consumed: 0,
        }
    }

    /// Whether a stream was recognised, by its header or one of its records.
    pub(super) fn is_stream(&self) -> bool {
        self.is_stream
    }

    /// Whether the last stream was read to its end.
    pub(super) fn has_end(&self) -> bool {
        self.has_end
    }

    /// Records that the ends of streams count and that were not right.
    pub(super) fn missing(&self) -> u64 {
        self.missing
    }

    /// Bytes of the stream so far.
    pub(super) fn consumed(&self) -> u64 {
        self.consumed
    }

    /// The next record that is right, or damage. `None` at the end.
    pub(super) fn next(&mut self) -> io::Result<Option<StreamItem>> {
        loop {
            self.fill(MAGIC_BYTES)?;
            if self.rest().is_empty() {
                return Ok(None);
            }
            match self.part()? {
                Some(Part::Newer(version)) => return Ok(Some(StreamItem::Newer(version))),
                Some(Part::Header(header)) => {
                    self.consume(format::HEADER_BYTES);
                    self.export = Some(header.export);
                    (self.is_stream, self.right, self.has_end) = (true, 0, false);
                }
                Some(Part::End(end)) => {
                    self.consume(format::END_BYTES);
                    self.missing += end.records.saturating_sub(self.right);
                    (self.export, self.right, self.has_end) = (None, 0, true);
                }
                Some(Part::Record(record)) => match self.data(&record)? {
                    Some(data) => {
                        self.export = Some(record.export);
                        self.right += 1;
                        (self.is_stream, self.has_end) = (true, false);
                        return Ok(Some(StreamItem::Record(record, data)));
                    }
                    None => {
                        self.skip()?;
                        self.is_damaged = true;
                        return Ok(Some(StreamItem::Damage));
                    }
                },
                None => {
                    self.skip()?;
                    if !std::mem::replace(&mut self.is_damaged, true) {
                        return Ok(Some(StreamItem::Damage));
                    }
                }
            }
        }
    }

    /// The part that begins here, if it is right and of this stream.
    fn part(&mut self) -> io::Result<Option<Part>> {
        let Some(len) = self.rest().get(..MAGIC_BYTES).and_then(len_of) else { return Ok(None) };
        self.fill(len)?;
        let part = decode(self.rest());
        let is_ours = |export: [u8; 16]| self.export.is_none_or(|it| it == export);
        Ok(part.filter(|part| match part {
            // Another stream begins behind the end of one, or where its beginning was lost.
            Part::Header(_) | Part::Newer(_) => true,
            Part::Record(record) => is_ours(record.export),
            Part::End(end) => is_ours(end.export),
        }))
    }

    /// Takes a record and its data; `None`, and nothing is taken, if the data is not what was put.
    fn data(&mut self, record: &Record) -> io::Result<Option<Vec<u8>>> {
        let len = RECORD_BYTES + record.block.len as usize;
        self.fill(len)?;
        let Some(data) = self.rest().get(RECORD_BYTES..len) else { return Ok(None) };
        if log::format::sum(data, record.block.check) != record.block.sum {
            return Ok(None);
        }
        let data = data.to_vec();
        self.consume(len);
        self.is_damaged = false;
        Ok(Some(data))
    }

    /// Skips one byte, and all before the next magic.
    fn skip(&mut self) -> io::Result<()> {
        self.advance(1);
        loop {
            let rest = self.rest();
            let is_magic = |bytes: &[u8]| bytes[0] == b'k' && len_of(bytes).is_some();
            if let Some(at) = rest.windows(MAGIC_BYTES).position(is_magic) {
                self.advance(at);
                return Ok(());
            }
            // The last bytes may begin a magic.
            let seen = rest.len().saturating_sub(MAGIC_BYTES - 1);
            self.advance(seen);
            let before = self.rest().len();
            self.fill(before + 1)?;
            if self.rest().len() == before {
                self.advance(before);
                return Ok(());
            }
        }
    }

    fn rest(&self) -> &[u8] {
        &self.buffer[self.begin..]
    }

    /// Takes a part that is right.
    fn consume(&mut self, len: usize) {
        self.advance(len);
        self.is_damaged = false;
    }

    fn advance(&mut self, len: usize) {
        self.begin += len;
        self.consumed += len as u64;
    }

    /// Reads until `len` bytes are there, or the end is reached.
    fn fill(&mut self, len: usize) -> io::Result<()> {
        if self.rest().len() >= len {
            return Ok(());
        }
        self.buffer.drain(..self.begin);
        self.begin = 0;
        while self.buffer.len() < len {
            let wanted = (len - self.buffer.len()).max(READ_BYTES);
            let read = (&mut self.from).take(wanted as u64).read_to_end(&mut self.buffer)?;
            if read == 0 {
                break;
            }
        }
        Ok(())
    }
}
