//! What sender and receiver say to each other.

use crate::blocks::Offered;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// One message. `id` is the sender's number of the send, unique in the life of its process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Sender: blocks to be read under a key.
    Offer {
        /// The number of the send.
        id: u64,
        /// Where the two sides meet.
        key: String,
        /// How long the offer is valid, in milliseconds.
        budget_ms: u64,
        /// Descriptions of the sender's regions; not interpreted here.
        regions: Vec<ByteBuf>,
        /// The blocks.
        blocks: Vec<Offered>,
    },
    /// Sender: the send has ended early; stop reading.
    Withdraw {
        /// The number of the send.
        id: u64,
        /// [`crate::Code::to_wire`].
        code: u16,
        /// Why.
        text: String,
    },
    /// Receiver: all is read; was the offer valid until now?
    Confirm {
        /// The number of the send.
        id: u64,
    },
    /// Sender: the answer to `Confirm`.
    Confirmed {
        /// The number of the send.
        id: u64,
        /// False if the send had ended.
        valid: bool,
    },
    /// Receiver: the task failed or there is none.
    Refuse {
        /// The number of the send.
        id: u64,
        /// [`crate::Code::to_wire`].
        code: u16,
        /// Why.
        text: String,
    },
}
