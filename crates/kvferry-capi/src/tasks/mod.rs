//! Send and receive tasks: `kvferry_tasks.h`.
//!
//! The rules are those of [`kvferry_proto::tasks`], a state machine. [`driver`] runs it with an agent;
//! [`endpoint`], [`send`] and [`receive`] are the functions of C.

pub mod driver;
pub mod end;
pub mod endpoint;
mod inbox;
pub mod receive;
pub mod send;
mod state;
