//! What is known of a stock peer, and asking it.

use super::exchange::{Failure, ask};
use super::lanes::LaneKeepers;
use super::meet::{introduction, understood};
use super::wire::{Alive, Buffer, Descriptor, Kind, Notify, SUCCESS, frame};
use crate::agent::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::region::{Access, RemoteRegion};
use crate::notify::Notification;
use crate::reactor::now;
use crate::session::link::Link;
use crate::transfer::drive::Slot;
use kvferry_proto::{Incarnation, RegionId};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What is known of a stock peer.
#[derive(Debug)]
pub(crate) struct MooncakePeer {
    /// Where its memory is reached.
    pub(super) data: SocketAddr,
    /// It answers writes when they are applied (version 2 of the protocol).
    pub(super) acknowledges: bool,
    /// The link's keeper on the control thread.
    keeper: u64,
    lanes: LaneKeepers,
    descriptor: Mutex<Descriptor>,
}

impl MooncakePeer {
    /// From the descriptor that the peer at `at` answered the handshake with.
    pub(super) fn new(descriptor: Descriptor, at: SocketAddr, keeper: u64) -> Result<Self> {
        if !descriptor.protocol.split(',').any(|p| p.trim() == "tcp") {
            return Err(Error::new(ErrorKind::Unsupported, "the Mooncake peer offers no TCP")
                .with("protocol", &descriptor.protocol));
        }
        if descriptor.tcp_data_port == 0 {
            return Err(Error::new(ErrorKind::Protocol, "the Mooncake peer names no data port"));
        }
        Ok(Self {
            data: data_addr(&descriptor, at),
            acknowledges: descriptor.tcp_proto_version >= 2,
            keeper,
            lanes: LaneKeepers::default(),
            descriptor: Mutex::new(descriptor),
        })
    }

    fn descriptor(&self) -> MutexGuard<'_, Descriptor> {
        self.descriptor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keeper(&self) -> u64 {
        self.keeper
    }

    pub(super) fn lanes(&self) -> &LaneKeepers {
        &self.lanes
    }

    /// The buffers that the peer told of when it was asked last.
    pub(super) fn buffers(&self) -> Vec<Buffer> {
        self.descriptor().buffers.clone()
    }

    /// Takes over what the peer says now; false if it is another process than before.
    pub(super) fn update(&self, fresh: Descriptor) -> bool {
        let mut known = self.descriptor();
        let same = known.tcp_data_port == fresh.tcp_data_port
            && known.name == fresh.name
            && known.kvferry == fresh.kvferry;
        *known = fresh;
        same
    }

    /// Asks the peer for its buffers. They have addresses only: a stock peer has no name for this
    /// life of its own, and does not say what may be done with a buffer.
    pub(crate) fn regions(&self, link: &Arc<Link>, timeout: Duration) -> Result<Vec<RemoteRegion>> {
        let answer = wait(link, Kind::Metadata, introduction(&link.core), timeout)?;
        let fresh = understood(&answer).map_err(|e| e.with("peer", &link.address))?;
        let regions = fresh.buffers.iter().map(|buffer| RemoteRegion {
            incarnation: Incarnation(0),
            id: RegionId::ABSOLUTE,
            addr: buffer.addr,
            len: buffer.length,
            access: Access::READ_WRITE,
        });
        let regions = regions.collect();
        if !self.update(fresh) {
            // Another process answers there now; the next call meets it.
            let error =
                Error::new(ErrorKind::PeerReset, "another process has taken the peer's place");
            end(link, error.with("peer", &link.address));
        }
        Ok(regions)
    }

    /// Asks for a sign of life; how long it took, connecting included.
    pub(crate) fn probe(&self, link: &Arc<Link>, timeout: Duration) -> Result<Duration> {
        let start = now();
        let request = frame(Kind::Probe, &serde_json::Map::new());
        let answer = wait(link, Kind::Probe, request, timeout)?;
        let took = now().saturating_since(start);
        match serde_json::from_slice::<Alive>(&answer) {
            Ok(alive) if alive.status == SUCCESS => Ok(took),
            _ => Err(Error::new(
                ErrorKind::Protocol,
                "the peer answered a probe with something else",
            )
            .with("peer", &link.address)),
        }
    }

    /// Sends a notification; returns when the peer has queued it.
    pub(crate) fn notify(
        &self,
        link: &Arc<Link>,
        notification: &Notification,
        timeout: Duration,
    ) -> Result<()> {
        let request = notify_frame(notification)?;
        let answer = wait(link, Kind::Notify, request, timeout)?;
        notified(&answer).map_err(|e| e.with("peer", &link.address))
    }
}

/// The data port's address. A peer that tells no usable host means the one that was called:
/// nobody else's loopback can be reached, and names are left to whoever resolved the peer's.
fn data_addr(descriptor: &Descriptor, at: SocketAddr) -> SocketAddr {
    let mut addr = at;
    if let Ok(told) = descriptor.tcp_data_host.parse::<IpAddr>()
        && !told.is_unspecified()
        && (!told.is_loopback() || at.ip().is_loopback())
        && told != at.ip()
    {
        addr.set_ip(told);
    }
    addr.set_port(descriptor.tcp_data_port);
    addr
}

/// A notification's frame.
pub(super) fn notify_frame(notification: &Notification) -> Result<Vec<u8>> {
    let message = std::str::from_utf8(&notification.message).map_err(|e| {
        Error::new(ErrorKind::InvalidArgument, "a Mooncake peer takes notifications of text only")
            .caused_by(e)
    })?;
    let notify = Notify { name: notification.name.clone(), notify_msg: message.to_owned() };
    Ok(frame(Kind::Notify, &notify))
}

/// What the answer to a notification says.
pub(super) fn notified(answer: &[u8]) -> Result<()> {
    match serde_json::from_slice::<Notify>(answer) {
        Ok(answer) if answer.notify_msg == SUCCESS => Ok(()),
        Ok(answer) => Err(Error::new(ErrorKind::Busy, "the peer did not take a notification")
            .with("answer", answer.notify_msg)),
        Err(e) => Err(Error::new(
            ErrorKind::Protocol,
            "the peer answered a notification with something else",
        )
        .caused_by(e)),
    }
}

/// Asks on the control thread, waits on this one.
fn wait(link: &Arc<Link>, kind: Kind, request: Vec<u8>, timeout: Duration) -> Result<Vec<u8>> {
    let slot = Slot::new();
    let fill = Arc::clone(&slot);
    ask(
        &link.core,
        link.peer_addr,
        kind,
        request,
        timeout,
        Box::new(move |_, answer| fill.fill(answer)),
    );
    // The exchange has the same deadline and says more about why; the grace is for its word.
    let answer = slot.wait(now() + timeout + Duration::from_secs(1), None)?;
    answer.map_err(Failure::into_error).map_err(|e| {
        let error = e.with("peer", &link.address);
        if error.kind() == ErrorKind::Unreachable {
            end(link, error.clone());
        }
        error
    })
}

/// Ends a link to a stock peer: the next call meets the peer afresh.
pub(super) fn end(link: &Arc<Link>, error: Error) {
    if link.end().is_none() {
        tracing::info!(peer = %link.address, reason = %error, "a Mooncake peer was lost");
    }
    let core: &Core = &link.core;
    core.remove_session(link);
    link.terminate(error);
    link.wake_control();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(host: &str, at: &str) -> String {
        let descriptor =
            Descriptor { tcp_data_host: host.into(), tcp_data_port: 7, ..Descriptor::default() };
        data_addr(&descriptor, at.parse().expect("a test's address")).to_string()
    }

    #[test]
    fn the_data_host_is_the_one_told_unless_it_can_not_be_meant() {
        assert_eq!(told("10.0.0.9", "10.0.0.7:1"), "10.0.0.9:7");
        assert_eq!(told("", "10.0.0.7:1"), "10.0.0.7:7");
        assert_eq!(told("0.0.0.0", "10.0.0.7:1"), "10.0.0.7:7");
        assert_eq!(told("127.0.0.1", "10.0.0.7:1"), "10.0.0.7:7");
        assert_eq!(told("127.0.0.1", "127.0.0.1:1"), "127.0.0.1:7");
        assert_eq!(told("node-3", "10.0.0.7:1"), "10.0.0.7:7");
        assert_eq!(told("fd00::9", "[fd00::7]:1"), "[fd00::9]:7");
    }

    #[test]
    fn what_can_not_be_reached_over_tcp_is_refused() {
        let at = "10.0.0.7:1".parse().expect("an address");
        let rdma =
            Descriptor { protocol: "rdma".into(), tcp_data_port: 7, ..Descriptor::default() };
        let e = MooncakePeer::new(rdma, at, 0).expect_err("no TCP");
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        let portless = Descriptor { protocol: "tcp".into(), ..Descriptor::default() };
        let e = MooncakePeer::new(portless, at, 0).expect_err("no port");
        assert_eq!(e.kind(), ErrorKind::Protocol);
    }
}
