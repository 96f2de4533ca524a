//! Sessions: meeting peers, and staying in touch with them, on the control thread.
//!
//! The protocol itself is `kvferry_proto::session`, a value without clock or socket; here it gets
//! both.

pub(crate) mod connect;
pub(crate) mod control;
pub(crate) mod greet;
pub(crate) mod link;
pub(crate) mod pulse;
pub(crate) mod service;
