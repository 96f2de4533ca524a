//! kvferry's own protocol over TCP.
//!
//! A request is one message: header, descriptor table, notification, payload, checksums
//! (`kvferry_proto::frame`). The initiator gathers the payload from its memory with one vectored
//! call per chunk; the target scatters it directly into place with one vectored call per chunk. No
//! payload byte is copied in user space, and no message is sent per descriptor.
//!
//! Ownership: a lane belongs to one transfer at a time, an inbound stream to one I/O thread. Each
//! has a gate; memory is touched only inside it (`crate::memory::gate`), one non-blocking call at a
//! time.
//!
//! Wake-up: a caller waits for its socket in `poll`, an I/O thread in `epoll`, both
//! level-triggered, so no wake-up is lost. When a session ends, its sockets are shut down, which
//! wakes both.

mod inbound;
mod outbound;

use crate::error::{self, Error, ErrorKind};
use crate::memory::cursor::{Cursor, Lent, lent};
use crate::memory::pieces::Fault;
use crate::memory::stages::Wake;
use crate::transfer::drive::{OnLanes, SEND_CHUNK};
use crate::transfer::job::Job;
use crate::transfer::kind::{Capabilities, Fence, Transport, TransportKind};
use crate::transfer::lanes::{Lane, StreamFault};
use crate::transfer::link::Link;
use crate::transfer::requests::{STREAM_FAULT, StreamFaultNote};
use crate::transport::service::{
    AcceptedStream, Answer, Attached, Service, Start, Startup, Streams,
};
use inbound::InboundStream;
use kvferry_proto::lane::Transmit;
use kvferry_proto::{PieceDigest, StreamId, WireCode, pack};
use kvferry_sys::HostSpan;
use kvferry_sys::socket::Socket;
use std::sync::Arc;

/// The transport, its service, and its route; all are stateless.
#[derive(Clone, Copy)]
pub(crate) struct Tcp;

impl Tcp {
    pub(crate) const KIND: TransportKind = TransportKind::new("tcp");
}

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        Self::KIND
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["native", "kvferry"]
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            write_fence: Fence::Local,
            read_fence: Fence::Local,
            notifications: true,
            checksums: true,
        }
    }
}

impl Start for Tcp {
    fn start(&self, _cx: &Startup<'_>) -> error::Result<Arc<dyn Service>> {
        Ok(Arc::new(Self))
    }
}

impl Service for Tcp {
    /// Lanes are opened on demand, the first one in advance.
    fn attach(&self, link: &Arc<Link>, attached: Attached) {
        link.add_lanes(*self);
        link.open_ahead();
        attached(None);
    }

    /// The peer says why it ends one of its streams.
    fn answer(&self, link: &Arc<Link>, kind: u16, body: &[u8]) -> Option<Answer> {
        if kind != STREAM_FAULT {
            return None;
        }
        let note = pack::decode::<StreamFaultNote>(body).map(|note| {
            let fault = StreamFault { code: WireCode::from_u16(note.code), index: note.index };
            link.lanes.note_fault(StreamId(note.stream), fault);
            Vec::new()
        });
        Some(note.map_err(|_| WireCode::Malformed))
    }

    fn streams(&self) -> Option<&dyn Streams> {
        Some(self)
    }
}

impl Streams for Tcp {
    /// Serves the stream on an I/O thread.
    fn accept(&self, stream: AcceptedStream) {
        let remote = stream.link.core.threads.io();
        remote.add(remote.token(), Box::new(InboundStream::new(stream)));
    }
}

impl OnLanes for Tcp {
    type Share = outbound::Share;

    fn transport(&self) -> &'static dyn Transport {
        &Self
    }

    fn share(&self, link: &Arc<Link>, lane: Arc<Lane>, job: &Arc<Job>, wake: Wake) -> Self::Share {
        outbound::Share::new(Arc::clone(link), lane, Arc::clone(job), wake)
    }
}

/// The end of a session whose frames were changed on their way.
fn forged(link: &Link) -> Error {
    let what = "a frame was changed, replayed or lost between the two agents; the session ends";
    Error::new(ErrorKind::Protocol, what).with("peer", &link.address)
}

/// Sends what [`Transmit`] lists in one call: its bytes, then payload of `source`. Returns how many
/// bytes were sent, and the result.
fn transmit_once(
    socket: &Socket,
    source: Option<&mut Cursor>,
    transmit: Transmit<'_>,
) -> (usize, Result<Lent, Fault>) {
    let Transmit { bytes, payload, mut digest } = transmit;
    let mut sent = 0;
    let result = match source {
        Some(source) if payload > 0 => source.lend(SEND_CHUNK, &mut |spans| {
            sent = socket.send_spans(bytes, spans)?;
            let of_payload = sent.saturating_sub(bytes.len());
            if let Some(digest) = &mut digest {
                digest_spans(digest, spans, of_payload);
            }
            Ok(of_payload)
        }),
        _ => lent(socket.send(bytes).inspect(|n| sent = *n)),
    };
    (sent, result)
}

/// Adds the first `len` bytes of the spans to a digest, right after they were moved.
fn digest_spans(digest: &mut PieceDigest, spans: &[HostSpan], len: usize) {
    let mut left = len;
    for span in spans {
        let n = span.len().min(left);
        span.truncated(n).for_each_copy(|bytes| digest.update(bytes));
        left -= n;
        if left == 0 {
            return;
        }
    }
}
