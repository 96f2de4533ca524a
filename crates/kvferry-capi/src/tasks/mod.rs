//! Send and receive tasks: `kvferry_tasks.h`.
//!
//! The rules are those of the crate `kvferry-tasks`, a state machine. [`driver`] runs it with an agent;
//! the other modules are the functions of C.

pub mod driver;
pub mod endpoint;
pub mod receive;
pub mod send;
