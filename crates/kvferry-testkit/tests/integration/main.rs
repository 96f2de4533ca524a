//! The conformance suite held against transports that keep every promise and against broken ones.

mod broken;
mod in_memory;
