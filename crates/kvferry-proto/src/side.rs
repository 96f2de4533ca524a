//! The two ends of a session.

/// An end of a session. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The end that opened the control connection. It also opens the data streams.
    Initiator,
    /// The end that accepted it.
    Acceptor,
}
