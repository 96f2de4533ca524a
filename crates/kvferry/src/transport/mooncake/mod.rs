//! Mooncake's protocol over TCP, with stock Mooncake peers at the other end.
//!
//! | file | what |
//! |---|---|
//! | `wire` | handshake frames, segment descriptors, heads and statuses: pure |
//! | `greet` | the target's side of the handshake, on the shared port |
//! | `inbound` | the target's side of the data port |
//! | `exchange`, `meet` | the initiator's side of the handshake |
//! | `peer` | what is known of a stock peer, and asking it |
//! | `lanes` | data connections to a stock peer: opening them, noticing their end |
//! | `outbound` | the initiator's side of a data connection: one share of a transfer |
//! | `layout`, `vigil` | its system calls taken apart; noticing a silent peer |
//! | `inquest` | why a data connection broke |
//!
//! A handshake is one connection with one frame each way, on the port that the native protocol
//! listens on too. Its answer describes the peer: the memory it registered and its data port. A
//! kvferry agent adds a field of its own, by which another one recognises it and goes on in the
//! native protocol; stock peers ignore fields they do not know.
//!
//! On a data connection, a request is a head of 24 bytes that names one range by its virtual
//! address, and its payload. Stock initiators wait for each answer before the next request; a
//! stock target merely serves one after another, so requests are sent ahead here, many heads and
//! payloads in one system call.
//!
//! What a stock peer can't do: prove who it is, name its life, confirm that it has stopped. A
//! write that was cancelled or cut off may still be applied from what the peer's kernel had
//! received ([`Fence::PeerExit`]); the error says so (`quiesced` is false).

mod exchange;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod greet;
mod inbound;
mod inquest;
mod lanes;
mod layout;
mod meet;
mod outbound;
mod peer;
mod vigil;
mod wire;

pub(crate) use greet::greet;
pub(crate) use inbound::{listen, serve};
pub(crate) use meet::meet;
pub(crate) use peer::MooncakePeer;

use crate::memory::device::Wake;
use crate::session::link::{Lane, Link};
use crate::transfer::job::Job;
use crate::transport::{Capabilities, Fence, Moving, Transport, TransportKind};
use std::sync::Arc;
use std::time::Duration;

/// How long a data connection may be idle before the kernel looks whether the peer's host is
/// still there: nothing in the protocol would tell.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// What an agent keeps for the stock peers it serves.
#[derive(Debug, Default)]
pub(crate) struct Doors {
    lobby: greet::Lobby,
    rooms: inbound::Rooms,
}

/// The transport.
#[derive(Debug)]
struct Mooncake;

impl Transport for Mooncake {
    fn kind(&self) -> TransportKind {
        TransportKind::Mooncake
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            write_fence: Fence::PeerExit,
            read_fence: Fence::Local,
            confirms_cancel: false,
            notifications: true,
            checksums: false,
            regions: false,
        }
    }

    fn drive(&self, link: &Arc<Link>, lane: Arc<Lane>, job: Arc<Job>, wake: Wake) -> Moving {
        Moving::Other(Box::new(outbound::Share::new(Arc::clone(link), lane, job, wake)))
    }
}
