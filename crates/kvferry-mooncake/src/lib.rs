//! Mooncake, for kvferry: its protocol as a transport of agents, and its transfer engine, implemented by an agent.
//!
//! [`link`] adds the transport for stock Mooncake peers to those of the program.
//!
//! [`MooncakeEngine`] is Mooncake's surface, once for all languages: `kvferry-python` makes the
//! Python module of it, `kvferry-capi` the functions of `transfer_engine_c.h`. The edges translate
//! arguments and decide nothing.
//!
//! | module | what is in it |
//! |---|---|
//! | `transport` | the protocol of stock Mooncake peers, in both directions |
//! | `engine` | calls that block or return the id of a transfer, as Python's module has them |
//! | `by_number` | calls that name segments, batches and tasks by number, as the C API has them |
//! | `segments`, `batches`, `notifier` | these numbers, and what is sent after a batch's tasks |
//! | `running` | the agent between `initialize` and the end, and its settings |
//! | `metadata` | from a peer's name to its address |
//! | `managed` | buffers that the engine allocates |
//! | `memory` | whether an address is host memory or a GPU's, and the order of transfers of the latter |
//! | `codes` | the codes that calls return |
//! | `interrupt` | calls that have a time limit but cannot be interrupted |

pub mod batches;
mod by_number;
pub mod codes;
mod engine;
mod handles;
pub mod interrupt;
mod managed;
mod memory;
mod metadata;
mod notifier;
mod refusal;
mod running;
mod segments;
mod transport;

pub use engine::{MooncakeEngine, Moves};
pub use memory::Owner;
pub use segments::LOCAL_SEGMENT;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use transport::fuzzing;
pub use transport::{KIND, link};
