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
//!   [`Tasks::receive`], [`Tasks::lost`], [`Tasks::read_ended`], [`Tasks::unsent`].
//! * **What to do** comes out of [`Tasks::poll`], one action at a time, to be carried out in order.
//! * **Time**: [`Tasks::expire`] is due at [`Tasks::next_timeout`].
//! * **Queries**: [`Tasks::gauges`].
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
//! # Why tasks are no handoffs
//!
//! * **Round trips.** A [handoff](crate::handoff) begins at its consumer: `Consumer::want` sends `Ask`, and a
//!   consumer drops an `Offer` without one. A sender would have to invite the receiver first: Invite → Ask →
//!   Offer → read → Confirm. Today it is Offer → read → Confirm, one round trip less before the first byte.
//! * **Wire.** The messages of `kvferry_tasks.h` would change.
//! * **Ends.** A task that is cancelled, or whose time has passed, while it waits for the answer to its
//!   `Confirm` ends at once. A settled handoff must wait for its answer.
//! * **Code.** Matching of keys, parked offers with their shares, given-up keys, steal, forget and matching of
//!   blocks would stay as they are.
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
mod receiving;
mod sending;

pub use blocks::{Copy, Offered, Part, Wanted};
pub use code::{Code, Outcome};
pub use message::Message;

use crate::handoff::{PeerId, Watched};
use crate::origin::Origin;
use crate::pack;
use crate::shares::Shares;
use crate::text::sanitized;
use crate::time::Timestamp;
use serde_bytes::ByteBuf;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

/// Tasks of one role, offers that wait, and keys that were given up, at most.
const COUNT_MAX: usize = 65_536;
/// Bytes of memory that all offers without a task take, at most. Peers share them.
const PARKED_BYTES_MAX: usize = 256 * 1024 * 1024;
/// Minimum size that is counted for an offer, so that there are no more than [`COUNT_MAX`].
const PARKED_MIN: usize = PARKED_BYTES_MAX / COUNT_MAX;
/// Longest time that an offer waits for a task. The sender's budget can only shorten it.
const PARKED_TIME_MAX: Duration = Duration::from_secs(3600);
/// Bytes of a key, at most.
const KEY_MAX: usize = 1024;
/// Bytes of a peer's text that are kept.
const TEXT_MAX: usize = 512;

/// A send, by a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SendId(pub u64);

/// A receive task, by a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecvId(pub u64);

/// An action for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Connect to the receiver of a send, then call [`Tasks::opened`].
    Connect {
        /// The send that needs the connection.
        send: SendId,
    },
    /// Send the offer of a send. Without room for it call [`Tasks::unsent`].
    Offer {
        /// The receiver.
        to: PeerId,
        /// The send.
        send: SendId,
        /// An encoded [`Message`].
        bytes: Vec<u8>,
    },
    /// Send a message.
    Message {
        /// The peer.
        to: PeerId,
        /// An encoded [`Message`].
        bytes: Vec<u8>,
    },
    /// Read, then call [`Tasks::read_ended`].
    Read {
        /// The task whose memory is written.
        task: RecvId,
        /// The sender.
        from: PeerId,
        /// The sender's regions.
        regions: Vec<ByteBuf>,
        /// Ranges to read, each with its place in the task's memory.
        copies: Vec<Copy>,
        /// The time that is left.
        budget: Duration,
    },
    /// Stop a task's read. Its end is still reported.
    StopRead {
        /// The task.
        task: RecvId,
    },
    /// Start or stop the heartbeat to a peer. It must run while a task waits for the peer.
    Watch {
        /// The peer.
        peer: PeerId,
        /// Whether to start it.
        on: bool,
    },
    /// A send has ended.
    SendEnded {
        /// The send.
        id: SendId,
        /// Outcome of the send.
        outcome: Outcome,
    },
    /// A receive task has ended: nothing writes to its memory any more.
    RecvEnded {
        /// The task.
        id: RecvId,
        /// Outcome of the task.
        outcome: Outcome,
    },
}

/// Counts of what a process must not accumulate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Sends that have not ended.
    pub sends: usize,
    /// Receive tasks that were not forgotten.
    pub recvs: usize,
    /// Offers without a task.
    pub parked: usize,
    /// Keys that the receiver gave up, until their time has passed.
    pub taken: usize,
    /// Reads in progress.
    pub reads: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Send(SendId),
    Recv(RecvId),
    Parked(String),
    Taken(String),
}

/// The tasks of one process.
#[derive(Debug)]
pub struct Tasks {
    last: u64,
    sends: HashMap<SendId, sending::Send>,
    recvs: HashMap<RecvId, receiving::Recv>,
    /// The tasks that offers find.
    by_key: HashMap<String, RecvId>,
    /// Where each offer is, by its sender and the sender's number of it.
    by_offer: HashMap<(PeerId, u64), receiving::OfferPlace>,
    parked: HashMap<String, receiving::Parked>,
    /// The memory of each parked offer, and at least [`PARKED_MIN`].
    parked_sizes: Shares<String>,
    /// Keys that the receiver gave up, and until when offers for them are refused.
    taken: HashMap<String, Timestamp>,
    timers: BTreeSet<(Timestamp, Timer)>,
    watched: Watched,
    actions: VecDeque<Action>,
}

impl Default for Tasks {
    fn default() -> Self {
        Self::new()
    }
}

impl Tasks {
    /// No tasks.
    pub fn new() -> Self {
        Self {
            last: 0,
            sends: HashMap::new(),
            recvs: HashMap::new(),
            by_key: HashMap::new(),
            by_offer: HashMap::new(),
            parked: HashMap::new(),
            parked_sizes: Shares::new(PARKED_BYTES_MAX),
            taken: HashMap::new(),
            timers: BTreeSet::new(),
            watched: Watched::default(),
            actions: VecDeque::new(),
        }
    }

    /// The next action.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Time when [`Tasks::expire`] is due.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        self.timers.first().map(|(when, _)| *when)
    }

    /// Ends what is due.
    pub fn expire(&mut self, now: Timestamp) {
        while self.timers.first().is_some_and(|(when, _)| *when <= now) {
            let Some((_, timer)) = self.timers.pop_first() else { return };
            match timer {
                Timer::Send(id) => self.send_expired(id),
                Timer::Recv(id) => self.recv_expired(id),
                Timer::Parked(key) => self.parked_expired(&key),
                Timer::Taken(key) => drop(self.taken.remove(&key)),
            }
        }
    }

    /// A message arrived from a peer, whose session comes from `origin`.
    ///
    /// # Errors
    /// A text for a message that is malformed; it has no effect.
    pub fn receive(
        &mut self,
        from: PeerId,
        origin: Origin,
        bytes: &[u8],
        now: Timestamp,
    ) -> Result<(), String> {
        let message = pack::decode(bytes).map_err(|error| {
            // It may quote the peer.
            sanitized(&format!("malformed message: {error}"), TEXT_MAX)
        })?;
        match message {
            Message::Offer { id, key, budget_ms, regions, blocks } => {
                if key.len() > KEY_MAX {
                    return Err(format!("a key of {} bytes", key.len()));
                }
                let budget = Duration::from_millis(budget_ms).min(PARKED_TIME_MAX);
                let until = now + budget;
                let len = receiving::memory_of(&key, &regions, &blocks);
                let offer = receiving::Parked { from, id, until, len, regions, blocks };
                self.offered(key, origin, offer, now);
            }
            Message::Withdraw { id, code, text } => {
                self.withdrawn(from, id, reported(code, &text));
            }
            Message::Confirmed { id, valid } => self.confirmed(from, id, valid, now),
            Message::Confirm { id } => self.confirm(from, SendId(id)),
            Message::Refuse { id, code, text } => {
                self.refused(from, SendId(id), reported(code, &text));
            }
        }
        Ok(())
    }

    /// The connection to a peer has ended: no message of it follows, and its number is not used again.
    pub fn lost(&mut self, peer: PeerId, why: &str) {
        self.sends_lost(peer, why);
        self.recvs_lost(peer, why);
    }

    /// The gauges; all are 0 when everything has ended, was forgotten and has timed out.
    pub fn gauges(&self) -> Gauges {
        Gauges {
            sends: self.sends.len(),
            recvs: self.recvs.len(),
            parked: self.parked.len(),
            taken: self.taken.len(),
            reads: self.recvs.values().filter(|task| task.is_reading()).count(),
        }
    }

    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn say(&mut self, to: PeerId, message: &Message) {
        self.actions.push_back(Action::Message { to, bytes: pack::encode(message) });
    }

    fn watch(&mut self, peer: PeerId, on: bool) {
        let changes = if on { self.watched.add(peer) } else { self.watched.remove(peer) };
        if changes {
            self.actions.push_back(Action::Watch { peer, on });
        }
    }
}

/// What a peer says of an end. Its text reaches logs, programs and other peers.
fn reported(code: u16, text: &str) -> Outcome {
    Outcome::new(Code::from_wire(code), sanitized(text, TEXT_MAX))
}

fn check_key(key: &str) -> Result<(), Outcome> {
    if key.is_empty() || key.len() > KEY_MAX {
        let text = format!("a key has 1 to {KEY_MAX} bytes, not {}", key.len());
        return Err(Outcome::new(Code::Invalid, text));
    }
    Ok(())
}

fn check_count(count: usize, what: &str) -> Result<(), Outcome> {
    if count >= COUNT_MAX {
        return Err(Outcome::new(
            Code::Busy,
            format!("there are {count} {what}; wait for their ends"),
        ));
    }
    Ok(())
}

fn plan(wanted: &[Wanted], offered: &[Offered]) -> Result<Vec<Copy>, Outcome> {
    blocks::matched(wanted, offered).map_err(|text| Outcome::new(Code::Mismatch, text))
}
