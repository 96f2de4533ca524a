//! Send and receive tasks: two processes meet at a key, and blocks move from one to the other.
//!
//! A sender offers blocks under a key to a receiver's address; a receiver has a task for that key. Either
//! may come first. [`Tasks`] is the state machine of one process, for both roles. It has no clock, no
//! threads, no sockets and no memory: a driver passes in what happened, and carries out what comes out.
//!
//! # How a driver runs it
//!
//! * **What happened** goes in: [`Tasks::send`], [`Tasks::recv`], [`Tasks::cancel_send`],
//!   [`Tasks::cancel_recv`], [`Tasks::steal`], [`Tasks::forget`], [`Tasks::opened`],
//!   [`Tasks::received`], [`Tasks::lost`], [`Tasks::read_ended`].
//! * **What to do** comes out of [`Tasks::poll`], one action at a time, to be carried out in order.
//! * **Time**: [`Tasks::expire`] is due at [`Tasks::next_timeout`].
//! * **Queries**: [`Tasks::gauges`], [`Tasks::is_used`].
//!
//! # Who moves the bytes
//!
//! The receiver reads. Nothing but its own reads writes to its memory, and a task ends only after the
//! driver has said that its read has ended. So no byte arrives after the end of a task, even from a faulty
//! sender.
//!
//! ```text
//! sender                          receiver
//!   send ────────── Offer ──────>   parked until recv, or recv came first
//!                                   read ... read
//!        <───────── Confirm ─────   is the offer still valid?
//!   done ───────── Confirmed ───>   done
//! ```
//!
//! A sender that ends early says `Withdraw`, and answers a late `Confirm` with no: its memory may have
//! been reused. A receiver that ends early says `Refuse`, with its reason.
//!
//! # Outcomes
//!
//! If the receiver's task ends well, so has the send. A receiver that gives up after its `Confirm` has left
//! may not have the bytes of a send that ends well.
//!
//! Each task ends once. A receive task ends with the first of these that applies when its memory is
//! quiet: its time has passed, it was cancelled, what the sender or the read reports.

mod blocks;
mod code;
mod message;
mod tasks;
#[cfg(test)]
mod tests;

pub use blocks::{Copy, Offered, Part, Wanted, matched};
pub use code::{Code, Outcome};
pub use message::Message;
pub use tasks::{Action, Conn, Gauges, RecvId, SendId, Tasks};
