//! Sessions with peers: connecting, accepting, heartbeats, requests. Runs on the control thread.
//!
//! The protocol is `kvferry_proto::session`, a state machine without clock or socket. This module
//! drives it.
//!
//! | file | what |
//! |---|---|
//! | `sessions` | the tables of peers and links; the suspend timer |
//! | `connect` | one peer by address: drives the search for it |
//! | `search` | when to try which address, and which error callers get meanwhile |
//! | `accept` | the listener; detects the protocol of a new connection |
//! | `admission` | the places of connections that are not authenticated yet |
//! | `channel` | short messages between agents, for the layers above transfers |
//! | `control` | the control connection: drives one session |
//! | `native` | the backend of a native session's link |
//! | `lane` | opens a data stream of a native session |
//! | `service` | answers the requests of a peer |

pub(crate) mod accept;
mod admission;
pub(crate) mod channel;
pub(crate) mod connect;
pub(crate) mod control;
mod lane;
pub(crate) mod native;
mod search;
mod service;
pub(crate) mod sessions;
