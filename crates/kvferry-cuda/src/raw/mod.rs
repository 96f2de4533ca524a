//! Copies by the driver's own calls, written plainly, and a kernel that computes: what benches compare kvferry's copies
//! with. Nothing of kvferry's planner, stages or thread is used.
//!
//! Ownership: [`Buffers`] has the memory on both sides and the streams, and a [`Table`] the lists that the driver reads.
//! Each copy waits until the driver has ended it, so that no work is left when a method returns, and none when a value is
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
