//! The data known about a stock peer, and requests to it.

use super::MooncakeServer;
use super::connect::{handshake_request, understood};
use super::exchange::{Failure, ask};
use super::lanes::{LaneKeepers, open_lane};
use super::wire::{Alive, Buffer, Descriptor, Kind, Notify, STATUS_VERSION, SUCCESS, frame};
use kvferry::transport::{Backend, Core, Link, now};
use kvferry::{Access, Error, ErrorKind, Notification, RemoteRegion, Result};
use kvferry_proto::{Incarnation, RegionId};
use kvferry_sys::sync::{Mutex, MutexGuard};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(super) struct MooncakePeer {
    server: Weak<MooncakeServer>,
    /// The address of its data port.
    pub(super) data: SocketAddr,
    /// The peer answers a write when its bytes are in place (version 2 of the protocol).
    pub(super) acknowledges: bool,
    /// The link's keeper on the control thread.
    keeper: u64,
    lanes: Arc<LaneKeepers>,
    descriptor: Mutex<Descriptor>,
}

impl MooncakePeer {
    /// From the descriptor in the answer to the handshake with the peer at `at`.
    pub(super) fn new(
        descriptor: Descriptor,
        at: SocketAddr,
        keeper: u64,
        server: Option<&Arc<MooncakeServer>>,
    ) -> Result<Self> {
        if !descriptor.protocol.split(',').any(|p| p.trim() == "tcp") {
            return Err(Error::new(ErrorKind::Unsupported, "the Mooncake peer offers no TCP")
                .with("protocol", &descriptor.protocol));
        }
        if descriptor.tcp_data_port == 0 {
            return Err(Error::new(ErrorKind::Protocol, "the Mooncake peer names no data port"));
        }
        Ok(Self {
            server: server.map_or_else(Weak::new, Arc::downgrade),
            data: data_addr(&descriptor, at),
            acknowledges: descriptor.tcp_proto_version >= STATUS_VERSION,
            keeper,
            lanes: Arc::default(),
            descriptor: Mutex::new(descriptor),
        })
    }

    fn descriptor(&self) -> MutexGuard<'_, Descriptor> {
        self.descriptor.lock()
    }

    pub(super) fn lanes(&self) -> &Arc<LaneKeepers> {
        &self.lanes
    }

    /// The buffers in the peer's last descriptor.
    pub(super) fn buffers(&self) -> Vec<Buffer> {
        self.descriptor().buffers.clone()
    }

    /// Stores a new descriptor; false if it comes from another process than before.
    pub(super) fn update(&self, fresh: Descriptor) -> bool {
        let mut known = self.descriptor();
        let same = known.tcp_data_port == fresh.tcp_data_port
            && known.name == fresh.name
            && known.kvferry == fresh.kvferry;
        *known = fresh;
        same
    }

    /// The request for the peer's descriptor.
    pub(super) fn request(&self) -> Result<Vec<u8>> {
        let server = self.server.upgrade().ok_or_else(Error::shutdown)?;
        Ok(handshake_request(&server, false))
    }
}

impl Backend for MooncakePeer {
    fn open_lane(&self, link: &Arc<Link>) {
        open_lane(self, link);
    }

    fn wake(&self, core: &Core) {
        core.threads.control.wake(self.keeper);
    }

    /// Asks the peer for its buffers. They have addresses only: a stock peer has no incarnation,
    /// and does not declare the access to a buffer.
    fn regions(&self, link: &Arc<Link>, timeout: Duration) -> Result<Vec<RemoteRegion>> {
        let answer = wait(link, Kind::Metadata, self.request()?, timeout)?;
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
            // Another process has the address now; the next call connects to it.
            let error = Error::new(ErrorKind::PeerReset, "another process has replaced the peer");
            end(link, error.with("peer", &link.address));
        }
        Ok(regions)
    }

    /// Probes the peer; returns the time it took, connecting included.
    fn probe(&self, link: &Arc<Link>, timeout: Duration) -> Result<Duration> {
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

    /// Sends a notification; returns once the peer has queued it.
    fn notify(
        &self,
        link: &Arc<Link>,
        notification: &Notification,
        timeout: Duration,
    ) -> Option<Result<()>> {
        let sent = notify_frame(notification)
            .and_then(|request| wait(link, Kind::Notify, request, timeout))
            .and_then(|answer| notified(&answer).map_err(|e| e.with("peer", &link.address)));
        Some(sent)
    }
}

/// The data port's address. If the descriptor has no usable host, the handshake's address is used:
/// another host's loopback can't be reached, and names are not resolved, because the caller has
/// already resolved the peer's.
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

pub(super) fn notify_frame(notification: &Notification) -> Result<Vec<u8>> {
    let message = std::str::from_utf8(&notification.message).map_err(|e| {
        Error::invalid("a Mooncake peer accepts only text notifications").caused_by(e)
    })?;
    let notify = Notify { name: notification.name.clone(), notify_msg: message.to_owned() };
    Ok(frame(Kind::Notify, &notify))
}

/// Parses the answer to a notification.
pub(super) fn notified(answer: &[u8]) -> Result<()> {
    match serde_json::from_slice::<Notify>(answer) {
        Ok(answer) if answer.notify_msg == SUCCESS => Ok(()),
        Ok(answer) => Err(Error::new(ErrorKind::Busy, "the peer did not queue the notification")
            .with("answer", answer.notify_msg)),
        Err(e) => Err(Error::new(
            ErrorKind::Protocol,
            "the peer answered a notification with something else",
        )
        .caused_by(e)),
    }
}

/// Makes an exchange on the control thread and waits for its result.
fn wait(link: &Arc<Link>, kind: Kind, request: Vec<u8>, timeout: Duration) -> Result<Vec<u8>> {
    let (tell, told) = mpsc::sync_channel(1);
    ask(
        &link.core,
        link.peer_addr,
        kind,
        request,
        timeout,
        // A caller that has given up is not told.
        Box::new(move |_, answer| drop(tell.send(answer))),
    );
    // The exchange has the same deadline and a more precise error; the grace period lets that error
    // arrive first.
    let patience = timeout.saturating_add(Duration::from_secs(1));
    let answer = told.recv_timeout(patience).map_err(|e| {
        Error::new(ErrorKind::Deadline, "the exchange with the peer did not end in time")
            .caused_by(e)
    })?;
    answer.map_err(Failure::into_error).map_err(|e| {
        let error = e.with("peer", &link.address);
        if error.kind() == ErrorKind::Unreachable {
            end(link, error.clone());
        }
        error
    })
}

/// Ends a link to a stock peer: the next call connects again.
pub(super) fn end(link: &Arc<Link>, error: Error) {
    if link.end().is_none() {
        tracing::info!(peer = %link.address, reason = %error, "lost a Mooncake peer");
    }
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
    fn the_data_host_is_the_descriptors_unless_it_is_not_reachable() {
        assert_eq!(told("10.0.0.9", "10.0.0.7:1"), "10.0.0.9:7");
        assert_eq!(told("", "10.0.0.7:1"), "10.0.0.7:7");
        assert_eq!(told("0.0.0.0", "10.0.0.7:1"), "10.0.0.7:7");
        assert_eq!(told("127.0.0.1", "10.0.0.7:1"), "10.0.0.7:7");
        assert_eq!(told("127.0.0.1", "127.0.0.1:1"), "127.0.0.1:7");
        assert_eq!(told("node-3", "10.0.0.7:1"), "10.0.0.7:7");
        assert_eq!(told("fd00::9", "[fd00::7]:1"), "[fd00::9]:7");
    }

    #[test]
    fn a_peer_that_can_not_be_reached_over_tcp_is_refused() {
        let at = "10.0.0.7:1".parse().expect("an address");
        let rdma =
            Descriptor { protocol: "rdma".into(), tcp_data_port: 7, ..Descriptor::default() };
        let e = MooncakePeer::new(rdma, at, 0, None).err().expect("no TCP");
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        let portless = Descriptor { protocol: "tcp".into(), ..Descriptor::default() };
        let e = MooncakePeer::new(portless, at, 0, None).err().expect("no port");
        assert_eq!(e.kind(), ErrorKind::Protocol);
    }
}
