//! kvferry's own protocol over TCP.
//!
//! A request is one message: header, descriptor table, notification, payload, checksums
//! (`kvferry_proto::frame`). The initiator gathers the payload from its memory with one vectored
//! call per chunk; the target scatters it straight into place with one vectored call per chunk.
//! No payload byte is copied in user space, nothing is sent per descriptor.
//!
//! Ownership: a lane belongs to one transfer at a time, an inbound stream to one I/O thread. Each
//! has a gate; memory is touched only inside it (`crate::memory::gate`), one non-blocking call at
//! a time.
//!
//! Wake-up: who waits for a socket waits in `poll` (a caller) or `epoll` (an I/O thread),
//! level-triggered, so a wake-up can't be missed. When a session ends its sockets are shut down,
//! which wakes both.

mod inbound;
mod outbound;

pub(crate) use inbound::InboundStream;
pub(crate) use outbound::Share;

use crate::memory::device::Wake;
use crate::session::link::{Lane, Link};
use crate::transfer::job::Job;
use crate::transport::{Capabilities, Fence, Moving, Transport, TransportKind};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Tcp;

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            write_fence: Fence::Local,
            read_fence: Fence::Local,
            confirms_cancel: true,
            notifications: true,
            checksums: true,
            regions: true,
        }
    }

    fn drive(&self, link: &Arc<Link>, lane: Arc<Lane>, job: Arc<Job>, wake: Wake) -> Moving {
        Moving::Tcp(Share::new(Arc::clone(link), lane, job, wake))
    }
}
