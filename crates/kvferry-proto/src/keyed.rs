//! Keyed tags: the frames of an authenticated session, each bound to its place.
//!
//! With a secret, every control frame after the handshake and every head, answer and checksum
//! trailer of a data stream ends in, or contains, a tag of [`TAG_LEN`] bytes: BLAKE3 in keyed mode
//! over the frame, with the number of the frame in the place of the tag. Each direction of each
//! connection has a key of its own, derived from the session's key, and counts its frames. So a
//! frame that was changed, replayed, reordered, dropped, or taken from another stream, session or
//! direction does not fit, and ends the session as [`WireCode::Forged`](crate::WireCode::Forged).
//!
//! A relay between two agents of one secret can still read everything, delay it, and end the
//! connection. It can also change *payload*. A checksum trailer is keyed, but its CRC32C values are
//! not collision resistant: a relay finds other payload with the same values.

use blake3::Hash;
use std::fmt;
use zeroize::Zeroize;

/// Bytes of a tag.
pub const TAG_LEN: usize = 16;

/// The key of one direction of one connection, and the number of its next frame. Wiped from memory
/// on drop.
pub(crate) struct Seal {
    key: [u8; 32],
    next: u64,
}

/// A tag does not fit its frame or its frame's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forged;

impl Seal {
    pub(crate) const fn new(key: [u8; 32]) -> Self {
        Self { key, next: 0 }
    }

    /// Writes the tag of the next frame to `frame[at..at + TAG_LEN]`. The bytes there before have
    /// no effect on it.
    pub(crate) fn seal(&mut self, frame: &mut [u8], at: usize) {
        let tag = self.tag(frame, at);
        frame[at..at + TAG_LEN].copy_from_slice(&tag);
        self.next += 1;
    }

    /// Checks the tag in `frame[at..at + TAG_LEN]`, which is overwritten.
    pub(crate) fn open(&mut self, frame: &mut [u8], at: usize) -> Result<(), Forged> {
        let mut theirs = [0; TAG_LEN];
        theirs.copy_from_slice(&frame[at..at + TAG_LEN]);
        let ours = self.tag(frame, at);
        // Comparing hashes takes a time that does not depend on where they differ.
        if widened(&ours) != widened(&theirs) {
            return Err(Forged);
        }
        self.next += 1;
        Ok(())
    }

    /// Takes back the tag of the last frame, of which no byte was sent.
    pub(crate) const fn take_back(&mut self) {
        self.next -= 1;
    }

    /// Counts a frame that is discarded unread.
    pub(crate) const fn skip(&mut self) {
        self.next += 1;
    }

    /// Appends the tag of the next frame to it.
    pub(crate) fn seal_end(&mut self, frame: &mut Vec<u8>) {
        let at = frame.len();
        frame.resize(at + TAG_LEN, 0);
        self.seal(frame, at);
    }

    fn tag(&self, frame: &mut [u8], at: usize) -> [u8; TAG_LEN] {
        // One buffer is hashed in one call, and nothing is allocated.
        let field = &mut frame[at..at + TAG_LEN];
        field.fill(0);
        field[..8].copy_from_slice(&self.next.to_le_bytes());
        let mut tag = [0; TAG_LEN];
        tag.copy_from_slice(&blake3::keyed_hash(&self.key, frame).as_bytes()[..TAG_LEN]);
        tag
    }
}

fn widened(tag: &[u8; TAG_LEN]) -> Hash {
    let mut bytes = [0; 32];
    bytes[..TAG_LEN].copy_from_slice(tag);
    Hash::from_bytes(bytes)
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seal({})", self.next)
    }
}

impl Drop for Seal {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

/// The seals of a connection's two directions, seen from one of its ends.
#[derive(Debug)]
pub struct Seals {
    pub(crate) outgoing: Seal,
    pub(crate) incoming: Seal,
}

/// Protection of the heads of a data stream.
#[derive(Debug)]
pub enum Guard {
    /// CRC32C: sessions without a secret.
    Crc,
    /// Keyed tags: sessions with a secret. Boxed, because it moves between transfers.
    Keyed(Box<Seals>),
}

impl Guard {
    /// Whether heads have keyed tags.
    pub const fn is_keyed(&self) -> bool {
        matches!(self, Self::Keyed(_))
    }

    pub(crate) fn outgoing(&mut self) -> Option<&mut Seal> {
        match self {
            Self::Crc => None,
            Self::Keyed(seals) => Some(&mut seals.outgoing),
        }
    }

    pub(crate) fn incoming(&mut self) -> Option<&mut Seal> {
        match self {
            Self::Crc => None,
            Self::Keyed(seals) => Some(&mut seals.incoming),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(seal: &mut Seal, text: &[u8]) -> Vec<u8> {
        let mut frame = text.to_vec();
        seal.seal_end(&mut frame);
        frame
    }

    fn open(seal: &mut Seal, frame: &[u8]) -> Result<(), Forged> {
        seal.open(&mut frame.to_vec(), frame.len() - TAG_LEN)
    }

    #[test]
    fn a_frame_fits_its_own_place_and_key_only() {
        let mut out = Seal::new([7; 32]);
        let frames: Vec<_> = (0..3).map(|_| sealed(&mut out, b"the same text")).collect();
        assert!(frames[0] != frames[1] && frames[1] != frames[2]);
        let mut into = Seal::new([7; 32]);
        assert_eq!(open(&mut into, &frames[1]), Err(Forged), "one was dropped");
        assert_eq!(open(&mut into, &frames[0]), Ok(()));
        assert_eq!(open(&mut into, &frames[0]), Err(Forged), "replayed");
        assert_eq!(open(&mut into, &frames[1]), Ok(()));
        let mut other = Seal::new([8; 32]);
        assert_eq!(open(&mut other, &frames[0]), Err(Forged), "another key");
    }

    #[test]
    fn every_bit_of_a_frame_and_of_its_tag_counts() {
        let frame = sealed(&mut Seal::new([7; 32]), &[0x5a; 100]);
        for bit in 0..frame.len() * 8 {
            let mut changed = frame.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&mut Seal::new([7; 32]), &changed), Err(Forged), "bit {bit}");
        }
    }
}
