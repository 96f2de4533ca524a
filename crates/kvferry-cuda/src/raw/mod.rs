//! Copies by the driver's own calls, written plainly, and a kernel that computes. Benches compare kvferry's copies with
//! these, which use nothing of kvferry's planner, stages or thread.
//!
//! Ownership: [`Buffers`] has the memory on both sides and the streams, and a [`Table`] the lists that the driver reads.
//! Each copy waits until the driver has ended it, so that no copy is left when a method returns, or when a value is
//! dropped.

#![allow(unsafe_code, reason = "the driver copies to and from memory that the buffers own")]

mod buffers;
mod compute;
mod methods;
mod table;

pub use buffers::{Buffers, context, device, pin_time};
pub use compute::Compute;
pub use methods::{Method, supported};
pub use table::{Piece, Table};
