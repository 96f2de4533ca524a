//! The name of a block's content.

use std::fmt;

/// The chained hash of a block's tokens and of all tokens before them. Equal keys are the same content in a group.
///
/// The caller's hash must cover everything that the KV depends on: model, adapter, tenant. The manager never compares
/// tokens of full blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub [u64; 2]);

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0[0], self.0[1])
    }
}
