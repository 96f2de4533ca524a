//! For fuzzers and model tests only, behind the feature `fuzzing`; not part of the API.
//!
//! The session's queues, heartbeat and stream window are private, so the models that compare them
//! with a simple oracle are here. `kvferry-models` runs them. What the ranks of a topology hold is
//! public only through a routing, which is compared with it.

use crate::frame::{FrameError, Limits, RequestHeader, ResponseHeader};
use crate::keyed::{Seal, TAG_LEN};
use crate::layout::{ContextShard, LayerSpec};
use crate::plan::Topology;
pub use crate::session::models::{heartbeat, inbox, outbox, stream_window};
use std::ops::Range;

/// Called with an operation and the state it was applied in, for tables of what a run has tried.
pub type Met<'a> = &'a mut dyn FnMut(&'static str, &'static str);

/// Decisions read from bytes. With random bytes a model is a property test, with bytes from a fuzzer
/// it is a fuzz target. Beyond the end all decisions are zero.
#[derive(Clone, Debug)]
pub struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    /// A script of these bytes.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether all bytes were read.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// Whether the next byte is odd.
    pub fn flip(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// A number of two bytes.
    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// A number of eight bytes.
    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A number below `n`, which is at most 256 and not zero.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n
    }

    /// Returns an element of `choices`, which has at most 256 elements.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// The next `len` bytes, or as many as there are.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Returns all bytes not yet read.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

/// The heads of one direction of a data stream with keyed tags. A fuzzer does not guess tags: they are put right
/// first if it says so.
#[derive(Debug)]
pub struct KeyedHeads {
    ours: Seal,
    theirs: Seal,
}

impl Default for KeyedHeads {
    fn default() -> Self {
        let seal = || Seal::new([0x5e; 32]);
        Self { ours: seal(), theirs: seal() }
    }
}

impl KeyedHeads {
    /// Bytes of an answer's head.
    pub const ANSWER_LEN: usize = ResponseHeader::KEYED_LEN;
    /// Range of the tag in a request's head.
    pub const REQUEST_TAG: Range<usize> = RequestHeader::LEN - TAG_LEN..RequestHeader::LEN;

    /// The header of the request whose head begins here; its tag is not looked at.
    ///
    /// # Errors
    /// As [`RequestHeader::decode`].
    pub fn request(
        bytes: &[u8; RequestHeader::LEN],
        limits: &Limits,
    ) -> Result<RequestHeader, FrameError> {
        RequestHeader::decode_keyed(bytes, limits)
    }

    /// Writes a header and the tag of the next head to the front of a head, whose table and notification are
    /// there.
    pub fn seal_request(&mut self, header: &RequestHeader, head: &mut [u8]) {
        header.seal_keyed(head, &mut self.ours);
    }

    /// Checks the tag of the next head.
    ///
    /// # Errors
    /// The tag is of another head, or of another place.
    pub fn open_request(&mut self, head: &mut [u8]) -> Result<(), FrameError> {
        RequestHeader::open_keyed(head, &mut self.theirs)
    }

    /// The next answer's head.
    pub fn seal_answer(&mut self, header: &ResponseHeader) -> Vec<u8> {
        header.encode_with(Some(&mut self.ours)).as_ref().to_vec()
    }

    /// Puts the tag of the next answer right.
    pub fn put_right(&mut self, head: &mut [u8; Self::ANSWER_LEN]) {
        self.ours.seal(head, ResponseHeader::LEN);
    }

    /// Checks the next answer's head.
    ///
    /// # Errors
    /// As [`ResponseHeader::decode`].
    pub fn open_answer(
        &mut self,
        head: &mut [u8; Self::ANSWER_LEN],
        limits: &Limits,
    ) -> Result<ResponseHeader, FrameError> {
        ResponseHeader::decode_keyed(head, limits, &mut self.theirs)
    }
}

/// The part of a layer that a rank holds.
#[derive(Clone, Debug)]
pub struct Held {
    /// Number of the rank.
    pub rank: usize,
    /// Kind, planes and formats of the layer.
    pub layer: LayerSpec,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Heads that the rank holds, for each plane of the layer.
    pub heads: Vec<Range<u32>>,
    /// Tokens that the rank holds.
    pub context: ContextShard,
}

/// Lists the parts of layers that the ranks of a topology hold, rank by rank and layer by layer.
pub fn held(topology: &Topology) -> impl Iterator<Item = Held> {
    topology.held()
}
