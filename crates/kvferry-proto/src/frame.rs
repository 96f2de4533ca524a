//! Data frames: what crosses a data stream once it is open.
//!
//! All integers are little-endian. A request is
//!
//! ```text
//! RequestHeader (64)  | descriptors * WireDescriptor (16) | notification | payload | trailer
//!                       \______ covered by head_crc, with the header ______/
//! ```
//!
//! The payload is there for a `Write` only, in descriptor order; the trailer only with
//! [`Flags::CHECKSUM`]: one CRC32C (`u32`) per piece of at most [`CHECKSUM_PIECE`] bytes, counted
//! from the payload's start without regard to descriptors. The answer to each request is a
//! [`ResponseHeader`], for a `Read` followed by payload and trailer in the same form.
//!
//! The heads always have a CRC: they are short, and a flipped bit in an offset would overwrite the
//! blocks of another request.
//!
//! # Version 2
//!
//! In a session with a secret, frames have version 2: keyed tags ([`crate::keyed`]) in place of the
//! CRCs. The tag of a request is in bytes 48..64 of its header and covers header, table and
//! notification; that of an answer is behind the 40 bytes of the header. A checksum trailer has a tag
//! behind it. Payload has none. A receiver takes the version of its session and no other.

mod checksum;

use crate::code::WireCode;
use crate::id::{RegionId, TransferId};
use crate::keyed::{Forged, Seal, TAG_LEN};
use checksum::crc_of;
pub use checksum::{CHECKSUM_PIECE, PieceDigest, crc32c, crc32c_append, piece_count, trailer_len};
use crc_fast::{CrcAlgorithm, Digest};
use thiserror::Error;

/// The first bytes of every native connection.
///
/// Read as a little-endian `u64` it is far beyond the longest handshake of Mooncake (128 MiB),
/// with which native connections share a port.
pub const MAGIC: [u8; 8] = *b"KVFERRY\x01";

/// Version of the two headers with a CRC.
const VERSION: u8 = 1;
/// Version of the two headers with a keyed tag.
const KEYED: u8 = 2;
const REQUEST_MAGIC: [u8; 4] = *b"KVFq";
const RESPONSE_MAGIC: [u8; 4] = *b"KVFr";

/// Upper bounds on what a receiver accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Descriptors in one request.
    pub descriptors_max: u32,
    /// Bytes of an encoded [`Notification`].
    pub notify_max: u32,
    /// Bytes of payload in one request or response.
    pub payload_max: u64,
}

impl Default for Limits {
    /// 65536 descriptors (1 MiB of table), 64 KiB of notification, 1 TiB of payload.
    fn default() -> Self {
        Self { descriptors_max: 1 << 16, notify_max: 64 * 1024, payload_max: 1 << 40 }
    }
}

/// Error for bytes that are not a valid frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum FrameError {
    /// Not the start of a frame: the stream is out of step.
    #[error("not a frame: starts with {0:02x?}")]
    Magic([u8; 4]),
    /// A header version this build does not read.
    #[error("unknown frame version {0}")]
    Version(u8),
    /// An operation this build does not know.
    #[error("unknown operation {0}")]
    Op(u8),
    /// A flag this build does not know.
    #[error("unknown flags {0:#04x}")]
    Flags(u8),
    /// Bytes that must be zero are not.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// More than the receiver takes.
    #[error("{what} {value} is beyond the limit of {limit}")]
    Limit { what: &'static str, value: u64, limit: u64 },
    /// Fields that contradict each other.
    #[error("inconsistent frame: {0}")]
    Inconsistent(&'static str),
    /// A length does not fit its integer.
    #[error("a length does not fit its integer")]
    Overflow,
    /// A CRC does not fit its bytes.
    #[error("checksum of the frame's head differs")]
    Checksum,
    /// A keyed tag does not fit.
    #[error("a frame was changed, replayed or lost on its way")]
    Forged,
}

impl From<Forged> for FrameError {
    fn from(_: Forged) -> Self {
        Self::Forged
    }
}

impl FrameError {
    /// The code for the sender.
    pub const fn code(&self) -> WireCode {
        match self {
            Self::Magic(_) | Self::Reserved | Self::Inconsistent(_) => WireCode::Malformed,
            Self::Version(_) => WireCode::VersionMismatch,
            Self::Op(_) | Self::Flags(_) => WireCode::Unsupported,
            Self::Limit { .. } => WireCode::TooLarge,
            Self::Overflow => WireCode::Overflow,
            Self::Checksum => WireCode::Checksum,
            Self::Forged => WireCode::Forged,
        }
    }
}

/// Operation of a request. Exhaustive on purpose: a target must serve all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Payload follows, to be written to the descriptors' ranges.
    Write = 1,
    /// Send the bytes of the descriptors' ranges.
    Read = 2,
    /// Deliver the notification. There are no descriptors and no payload.
    Notify = 3,
}

impl Op {
    const fn from_u8(byte: u8) -> Result<Self, FrameError> {
        match byte {
            1 => Ok(Self::Write),
            2 => Ok(Self::Read),
            3 => Ok(Self::Notify),
            other => Err(FrameError::Op(other)),
        }
    }
}

/// Flags of a frame: a set of bits, unknown ones are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The payload is followed by its piece checksums. In a `Read` request: that of the answer is.
    pub const CHECKSUM: Self = Self(1);

    /// Whether all bits of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// [`Flags::CHECKSUM`] if `checksum`, else none.
    pub const fn with_checksum(checksum: bool) -> Self {
        if checksum { Self::CHECKSUM } else { Self::NONE }
    }

    const fn from_u8(byte: u8) -> Result<Self, FrameError> {
        if byte & !Self::CHECKSUM.0 != 0 { Err(FrameError::Flags(byte)) } else { Ok(Self(byte)) }
    }
}

/// The head of a request.
///
/// ```text
///  0  magic "KVFq"        16  payload_len  u64      36  reserved, zero (24)
///  4  version u8          24  transfer     u64      60  head_crc u32
///  5  op u8               32  budget_ms    u32
///  6  flags u8
///  7  reserved, zero
///  8  descriptors u32
/// 12  notify_len u32
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// The operation.
    pub op: Op,
    /// Whether payload has checksums.
    pub flags: Flags,
    /// Descriptors in the table that follows; zero for [`Op::Notify`], else at least one.
    pub descriptors: u32,
    /// Bytes of the encoded [`Notification`] after the table; zero for none.
    pub notify_len: u32,
    /// Sum of the descriptors' lengths in bytes: what follows a `Write`, what a `Read` asks for.
    pub payload_len: u64,
    /// The transfer that the request is part of; chosen by the initiator.
    pub transfer: TransferId,
    /// Milliseconds from the arrival of the header until the initiator gives up; 0 for none.
    pub budget_ms: u32,
    /// CRC32C over header (with this field zero), table and notification: see [`head_crc`].
    pub head_crc: u32,
}

impl RequestHeader {
    /// Bytes of the encoded header.
    pub const LEN: usize = 64;
    const CRC_AT: usize = 60;
    const TAG_AT: usize = Self::LEN - TAG_LEN;

    /// The header as it crosses the wire, with `head_crc` as the field says.
    ///
    /// To fill the field: encode, compute [`head_crc`] over the result and what follows it, and
    /// put it in with [`RequestHeader::set_head_crc`], or let [`RequestHeader::seal`] do all that.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0..4].copy_from_slice(&REQUEST_MAGIC);
        out[4] = VERSION;
        out[5] = self.op as u8;
        out[6] = self.flags.0;
        out[8..12].copy_from_slice(&self.descriptors.to_le_bytes());
        out[12..16].copy_from_slice(&self.notify_len.to_le_bytes());
        out[16..24].copy_from_slice(&self.payload_len.to_le_bytes());
        out[24..32].copy_from_slice(&self.transfer.0.to_le_bytes());
        out[32..36].copy_from_slice(&self.budget_ms.to_le_bytes());
        out[Self::CRC_AT..].copy_from_slice(&self.head_crc.to_le_bytes());
        out
    }

    /// The encoded header with the right `head_crc` for what follows it; the field is ignored.
    pub fn seal(&self, table: &[u8], notify: &[u8]) -> [u8; Self::LEN] {
        let mut out = self.encode();
        let crc = head_crc(&out, table, notify);
        Self::set_head_crc(&mut out, crc);
        out
    }

    /// Puts `crc` into an encoded header.
    pub fn set_head_crc(encoded: &mut [u8; Self::LEN], crc: u32) {
        encoded[Self::CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    }

    /// Parses a header and checks everything that can be checked without what follows it.
    ///
    /// The CRC is not checked here: call [`verify_head`] when table and notification have arrived.
    /// Until then only the bounded lengths of the header may be used.
    ///
    /// # Errors
    /// Out of `limits`, inconsistent, or of an unknown version, operation or flag. The stream
    /// cannot be used any further.
    pub fn decode(bytes: &[u8; Self::LEN], limits: &Limits) -> Result<Self, FrameError> {
        Self::decode_as(VERSION, bytes, limits)
    }

    /// Like [`RequestHeader::decode`], for a header of version 2. [`RequestHeader::open_keyed`]
    /// must follow.
    pub(crate) fn decode_keyed(
        bytes: &[u8; Self::LEN],
        limits: &Limits,
    ) -> Result<Self, FrameError> {
        let mut untagged = *bytes;
        untagged[Self::TAG_AT..].fill(0);
        Self::decode_as(KEYED, &untagged, limits)
    }

    /// Writes the header, of version 2, to the front of a head whose table and notification are
    /// there.
    pub(crate) fn seal_keyed(&self, head: &mut [u8], seal: &mut Seal) {
        head[..Self::LEN].copy_from_slice(&self.encode());
        head[4] = KEYED;
        seal.seal(head, Self::TAG_AT);
    }

    /// Checks the tag of a whole head of version 2.
    pub(crate) fn open_keyed(head: &mut [u8], seal: &mut Seal) -> Result<(), FrameError> {
        Ok(seal.open(head, Self::TAG_AT)?)
    }

    fn decode_as(
        version: u8,
        bytes: &[u8; Self::LEN],
        limits: &Limits,
    ) -> Result<Self, FrameError> {
        expect_magic(bytes, REQUEST_MAGIC)?;
        expect_version(bytes[4], version)?;
        let header = Self {
            op: Op::from_u8(bytes[5])?,
            flags: Flags::from_u8(bytes[6])?,
            descriptors: u32_at(bytes, 8),
            notify_len: u32_at(bytes, 12),
            payload_len: u64_at(bytes, 16),
            transfer: TransferId(u64_at(bytes, 24)),
            budget_ms: u32_at(bytes, 32),
            head_crc: u32_at(bytes, Self::CRC_AT),
        };
        if bytes[7] != 0 || bytes[36..Self::CRC_AT].iter().any(|&b| b != 0) {
            return Err(FrameError::Reserved);
        }
        header.check(limits)?;
        Ok(header)
    }

    /// Bytes of the descriptor table.
    pub const fn table_len(&self) -> usize {
        self.descriptors as usize * WireDescriptor::LEN
    }

    /// Bytes of payload that follow this request (none for a `Read`).
    pub const fn payload_follows(&self) -> u64 {
        match self.op {
            Op::Write => self.payload_len,
            Op::Read | Op::Notify => 0,
        }
    }

    /// Bytes of checksum trailer that follow this request's payload.
    pub const fn trailer_follows(&self) -> u64 {
        if self.flags.contains(Flags::CHECKSUM) { trailer_len(self.payload_follows()) } else { 0 }
    }

    /// Parses the descriptor table that belongs to this header.
    ///
    /// # Errors
    /// `table` is not [`RequestHeader::table_len`] bytes, or the descriptors' lengths do not add
    /// up to `payload_len`.
    pub fn decode_table(&self, table: &[u8]) -> Result<Vec<WireDescriptor>, FrameError> {
        if table.len() != self.table_len() {
            return Err(FrameError::Inconsistent("table length"));
        }
        let (entries, _) = table.as_chunks::<{ WireDescriptor::LEN }>();
        let descriptors: Vec<_> = entries.iter().map(WireDescriptor::read).collect();
        // At most 2^32 descriptors of at most 2^32 bytes: the sum fits.
        let sum: u64 = descriptors.iter().map(|d| u64::from(d.len)).sum();
        if sum != self.payload_len {
            return Err(FrameError::Inconsistent("descriptors do not add up to the payload"));
        }
        Ok(descriptors)
    }

    fn check(&self, limits: &Limits) -> Result<(), FrameError> {
        within("descriptor count", self.descriptors.into(), limits.descriptors_max.into())?;
        within("notification length", self.notify_len.into(), limits.notify_max.into())?;
        within("payload length", self.payload_len, limits.payload_max)?;
        // The most that this many descriptors can name.
        let nameable = u64::from(self.descriptors) * u64::from(u32::MAX);
        match self.op {
            Op::Notify if self.descriptors != 0 || self.payload_len != 0 => {
                Err(FrameError::Inconsistent("a notify with descriptors or payload"))
            }
            Op::Notify if self.notify_len == 0 => {
                Err(FrameError::Inconsistent("a notify without a notification"))
            }
            Op::Write | Op::Read if self.payload_len > nameable => {
                Err(FrameError::Inconsistent("more payload than the descriptors can name"))
            }
            Op::Write | Op::Read if self.descriptors == 0 => {
                Err(FrameError::Inconsistent("a transfer without descriptors"))
            }
            Op::Write | Op::Read | Op::Notify => Ok(()),
        }
    }
}

/// CRC32C over a request's header (its CRC field taken as zero), table and notification.
pub fn head_crc(header: &[u8; RequestHeader::LEN], table: &[u8], notify: &[u8]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&header[..RequestHeader::CRC_AT]);
    digest.update(&[0; 4]);
    digest.update(table);
    digest.update(notify);
    crc_of(&digest)
}

/// Checks a request's `head_crc` once everything it covers has arrived.
///
/// # Errors
/// [`FrameError::Checksum`]: nothing of the head can be believed, the stream is of no further use.
pub fn verify_head(
    header: &[u8; RequestHeader::LEN],
    table: &[u8],
    notify: &[u8],
) -> Result<(), FrameError> {
    if head_crc(header, table, notify) == u32_at(header, RequestHeader::CRC_AT) {
        Ok(())
    } else {
        Err(FrameError::Checksum)
    }
}

/// A range of a region of the side that serves the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WireDescriptor {
    /// Bytes from the region's start, or a virtual address with [`RegionId::ABSOLUTE`].
    pub offset: u64,
    /// Bytes.
    pub len: u32,
    /// Id of the region.
    pub region: RegionId,
}

impl WireDescriptor {
    /// Bytes of an encoded descriptor.
    pub const LEN: usize = 16;

    /// Appends the encoded descriptor: offset, length, region.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        let mut bytes = [0; Self::LEN];
        bytes[0..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.region.0.to_le_bytes());
        out.extend_from_slice(&bytes);
    }

    /// The descriptor in these bytes. Any bytes are one; whether it may be used is another matter.
    pub fn read(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            offset: u64_at(bytes, 0),
            len: u32_at(bytes, 8),
            region: RegionId(u32_at(bytes, 12)),
        }
    }
}

/// A message to the peer's user, delivered after the request it came with is done.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Notification {
    /// Name by which the receiver selects notifications.
    pub name: String,
    /// Not interpreted.
    pub message: Vec<u8>,
}

impl Notification {
    /// Bytes of the encoded notification.
    pub const fn encoded_len(&self) -> usize {
        4 + self.name.len() + self.message.len()
    }

    /// Appends length of the name (`u32`), name and message.
    ///
    /// # Errors
    /// [`FrameError::Limit`] if it would be longer than `limits` allow; nothing is appended.
    pub fn write_to(&self, out: &mut Vec<u8>, limits: &Limits) -> Result<(), FrameError> {
        within("notification length", self.encoded_len() as u64, limits.notify_max.into())?;
        let name_len = u32::try_from(self.name.len()).map_err(|_| FrameError::Overflow)?;
        out.reserve(self.encoded_len());
        out.extend_from_slice(&name_len.to_le_bytes());
        out.extend_from_slice(self.name.as_bytes());
        out.extend_from_slice(&self.message);
        Ok(())
    }

    /// Parses the `notify_len` bytes of a request.
    ///
    /// # Errors
    /// [`FrameError::Inconsistent`] if the name does not fit or is not UTF-8.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let (name_len, rest) =
            bytes.split_first_chunk::<4>().ok_or(FrameError::Inconsistent("short notification"))?;
        let (name, message) = usize::try_from(u32::from_le_bytes(*name_len))
            .ok()
            .and_then(|len| rest.split_at_checked(len))
            .ok_or(FrameError::Inconsistent("a notification's name exceeds it"))?;
        let name = std::str::from_utf8(name)
            .map_err(|_| FrameError::Inconsistent("a notification's name is not UTF-8"))?;
        Ok(Self { name: name.to_owned(), message: message.to_vec() })
    }
}

/// The head of an answer.
///
/// ```text
///  0  magic "KVFr"        8  transfer u64       24  aux u64
///  4  code u16           16  index u32          32  payload_len u64
///  6  flags u8           20  crc u32 (over the header with this field zero)
///  7  version u8
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseHeader {
    /// Whether the request succeeded, or why not.
    pub code: WireCode,
    /// Whether piece checksums follow the payload.
    pub flags: Flags,
    /// The request's transfer.
    pub transfer: TransferId,
    /// Index of the descriptor that failed, if one did; else 0.
    pub index: u32,
    /// A number that goes with the code, such as the limit that was exceeded; else 0.
    pub aux: u64,
    /// Bytes of payload that follow: those asked for by a `Read` that went well, else 0.
    pub payload_len: u64,
}

impl ResponseHeader {
    /// Bytes of the encoded header.
    pub const LEN: usize = 40;
    /// Bytes of the encoded header and its keyed tag.
    pub const KEYED_LEN: usize = Self::LEN + TAG_LEN;
    const CRC_AT: usize = 20;

    /// The header as it crosses the wire, with the tag of `seal` or, without one, with a CRC.
    pub(crate) fn encode_with(&self, seal: Option<&mut Seal>) -> AnswerBytes {
        let mut bytes = [0; Self::KEYED_LEN];
        bytes[..Self::LEN].copy_from_slice(&self.encode());
        let Some(seal) = seal else { return AnswerBytes { bytes, len: Self::LEN } };
        bytes[7] = KEYED;
        bytes[Self::CRC_AT..Self::CRC_AT + 4].fill(0);
        seal.seal(&mut bytes, Self::LEN);
        AnswerBytes { bytes, len: Self::KEYED_LEN }
    }

    /// Parses and checks a header of version 2.
    pub(crate) fn decode_keyed(
        bytes: &mut [u8; Self::KEYED_LEN],
        limits: &Limits,
        seal: &mut Seal,
    ) -> Result<Self, FrameError> {
        // First: nothing of a forged header counts.
        seal.open(bytes, Self::LEN)?;
        let header = bytes.first_chunk().expect("longer than a header");
        expect_version(header[7], KEYED)?;
        Self::parse(header, limits)
    }

    /// The header as it crosses the wire, its CRC included.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0..4].copy_from_slice(&RESPONSE_MAGIC);
        out[4..6].copy_from_slice(&self.code.to_u16().to_le_bytes());
        out[6] = self.flags.0;
        out[7] = VERSION;
        out[8..16].copy_from_slice(&self.transfer.0.to_le_bytes());
        out[16..20].copy_from_slice(&self.index.to_le_bytes());
        out[24..32].copy_from_slice(&self.aux.to_le_bytes());
        out[32..40].copy_from_slice(&self.payload_len.to_le_bytes());
        let crc = crc32c(&out);
        out[Self::CRC_AT..Self::CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Parses and checks a header.
    ///
    /// # Errors
    /// A wrong CRC, out of `limits`, inconsistent, or of an unknown version or flag. The stream
    /// cannot be used any further. Unknown *codes* are no error.
    pub fn decode(bytes: &[u8; Self::LEN], limits: &Limits) -> Result<Self, FrameError> {
        expect_magic(bytes, RESPONSE_MAGIC)?;
        expect_version(bytes[7], VERSION)?;
        let mut covered = *bytes;
        covered[Self::CRC_AT..Self::CRC_AT + 4].fill(0);
        if crc32c(&covered) != u32_at(bytes, Self::CRC_AT) {
            return Err(FrameError::Checksum);
        }
        Self::parse(bytes, limits)
    }

    fn parse(bytes: &[u8; Self::LEN], limits: &Limits) -> Result<Self, FrameError> {
        expect_magic(bytes, RESPONSE_MAGIC)?;
        let header = Self {
            code: WireCode::from_u16(u16::from_le_bytes([bytes[4], bytes[5]])),
            flags: Flags::from_u8(bytes[6])?,
            transfer: TransferId(u64_at(bytes, 8)),
            index: u32_at(bytes, 16),
            aux: u64_at(bytes, 24),
            payload_len: u64_at(bytes, 32),
        };
        within("payload length", header.payload_len, limits.payload_max)?;
        if header.payload_len != 0 && !header.code.is_ok() {
            return Err(FrameError::Inconsistent("a failure with payload"));
        }
        Ok(header)
    }

    /// Bytes of checksum trailer after the payload.
    pub const fn trailer_follows(&self) -> u64 {
        if self.flags.contains(Flags::CHECKSUM) { trailer_len(self.payload_len) } else { 0 }
    }
}

/// An encoded answer's header, with its CRC or its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerBytes {
    bytes: [u8; ResponseHeader::KEYED_LEN],
    len: usize,
}

impl AsRef<[u8]> for AnswerBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

fn within(what: &'static str, value: u64, limit: u64) -> Result<(), FrameError> {
    if value > limit { Err(FrameError::Limit { what, value, limit }) } else { Ok(()) }
}

fn expect_magic(bytes: &[u8], magic: [u8; 4]) -> Result<(), FrameError> {
    let found = u32_at(bytes, 0).to_le_bytes();
    if found == magic { Ok(()) } else { Err(FrameError::Magic(found)) }
}

const fn expect_version(version: u8, expected: u8) -> Result<(), FrameError> {
    if version == expected { Ok(()) } else { Err(FrameError::Version(version)) }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(field)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}
