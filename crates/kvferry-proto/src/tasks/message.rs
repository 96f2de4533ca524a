//! Messages between sender and receiver.

use super::Offered;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// A message. `id` is the sender's number of the send, unique in the sender's incarnation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Sender: blocks to be read under a key.
    Offer {
        /// The number of the send.
        id: u64,
        /// Key under which the two sides meet.
        key: String,
        /// Time for which the offer is valid, in milliseconds.
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
        /// [`super::Code::to_wire`].
        code: u16,
        /// Explanation, for people.
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
        /// [`super::Code::to_wire`].
        code: u16,
        /// Explanation, for people.
        text: String,
    },
}
