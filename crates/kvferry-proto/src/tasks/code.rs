//! Outcomes of tasks.

/// Result of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// Every byte is in place.
    Done,
    /// The task was cancelled, or taken from the receiver before a sender came.
    Cancelled,
    /// The task's time has passed.
    Timeout,
    /// The receiver wants a block that the sender lacks, or of another length.
    Mismatch,
    /// Another task has the key.
    Duplicate,
    /// The peer can't be connected to.
    Unreachable,
    /// The connection to the peer ended.
    PeerLost,
    /// The receiver's read failed.
    ReadFailed,
    /// A limit was exceeded.
    Busy,
    /// An argument is invalid.
    Invalid,
    /// The list of blocks is longer than a message.
    TooLarge,
    /// The work that computes the bytes to send has failed.
    NotComputed,
    /// A code of a later version.
    Other(u16),
}

/// The codes of the wire; the number is the place. Never reordered.
const WIRE: [Code; 12] = [
    Code::Done,
    Code::Cancelled,
    Code::Timeout,
    Code::Mismatch,
    Code::Duplicate,
    Code::Unreachable,
    Code::PeerLost,
    Code::ReadFailed,
    Code::Busy,
    Code::Invalid,
    Code::TooLarge,
    Code::NotComputed,
];

impl Code {
    /// The number on the wire.
    pub fn to_wire(self) -> u16 {
        match (self, WIRE.iter().position(|known| *known == self)) {
            (Self::Other(number), _) => number,
            (_, place) => place.expect("every code but `Other` is in the table") as u16,
        }
    }

    /// The code of a number; one that is not known is kept.
    pub fn from_wire(number: u16) -> Self {
        WIRE.get(usize::from(number)).copied().unwrap_or(Self::Other(number))
    }
}

/// The end of a task, or why a call is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Result code.
    pub code: Code,
    /// Explanation in one line, for people; empty for [`Code::Done`].
    pub text: String,
}

impl Outcome {
    /// An outcome with its reason.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    pub(crate) fn done() -> Self {
        Self::new(Code::Done, "")
    }
}
