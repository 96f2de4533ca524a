//! The checksums of heads, and of a payload's pieces.

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of payload under one checksum.
pub const CHECKSUM_PIECE: usize = 256 * 1024;

/// CRC32C (Castagnoli, as in iSCSI) of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The CRC32C of everything `crc` was computed over, followed by `bytes`. Start with 0.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    // A finished CRC32C is the inverted state.
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    crc_of(&digest)
}

/// Pieces that `payload_len` bytes are checksummed in.
pub const fn piece_count(payload_len: u64) -> u64 {
    payload_len.div_ceil(CHECKSUM_PIECE as u64)
}

/// Bytes of the checksum trailer of `payload_len` bytes of payload.
pub const fn trailer_len(payload_len: u64) -> u64 {
    piece_count(payload_len) * 4
}

/// Computes the checksums of a payload, piece by piece, from spans of any size.
///
/// Feed it right after a span was copied, while the bytes are in the cache. Allocates only the list
/// of results: 4 bytes per 256 KiB.
#[derive(Clone, Debug)]
pub struct PieceDigest {
    pieces: Vec<u32>,
    current: Digest,
    filled: usize,
}

impl Default for PieceDigest {
    fn default() -> Self {
        Self::new()
    }
}

impl PieceDigest {
    /// A digest of no bytes.
    pub fn new() -> Self {
        Self { pieces: Vec::new(), current: Digest::new(CrcAlgorithm::Crc32Iscsi), filled: 0 }
    }

    /// Takes the next bytes of the payload.
    pub fn update(&mut self, mut span: &[u8]) {
        while !span.is_empty() {
            let (piece, rest) = span.split_at(span.len().min(CHECKSUM_PIECE - self.filled));
            self.current.update(piece);
            self.filled += piece.len();
            if self.filled == CHECKSUM_PIECE {
                self.end_piece();
            }
            span = rest;
        }
    }

    /// Bytes fed so far.
    pub const fn len(&self) -> u64 {
        self.pieces.len() as u64 * CHECKSUM_PIECE as u64 + self.filled as u64
    }

    /// True before the first byte.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The checksums of all pieces, the last one possibly of a shorter piece.
    pub fn finish(mut self) -> Vec<u32> {
        if self.filled > 0 {
            self.end_piece();
        }
        self.pieces
    }

    /// The trailer as it crosses the wire.
    pub fn finish_trailer(self) -> Vec<u8> {
        self.finish().into_iter().flat_map(u32::to_le_bytes).collect()
    }

    /// Compares with a received trailer.
    ///
    /// # Errors
    /// The index of the first piece that differs; a trailer of the wrong length differs where the
    /// shorter one ends.
    pub fn verify(self, trailer: &[u8]) -> Result<(), usize> {
        let ours = self.finish_trailer();
        if ours == trailer {
            return Ok(());
        }
        let same = ours.iter().zip(trailer).take_while(|(a, b)| a == b).count();
        Err(same / 4)
    }

    fn end_piece(&mut self) {
        self.pieces.push(crc_of(&self.current));
        self.current.reset();
        self.filled = 0;
    }
}

pub(super) fn crc_of(digest: &Digest) -> u32 {
    // A 32-bit algorithm: the upper half of what the library returns is zero.
    digest.finalize() as u32
}
