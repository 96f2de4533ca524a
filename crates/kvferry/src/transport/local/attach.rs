//! The initiator finds out whether its peer is on the same host, and within reach.
//!
//! Any process of this network namespace can listen on the peer's abstract name if the peer does
//! not. So the initiator sends nothing to a listener of another user, proves the session's key in a
//! form that is useless outside this socket, and does nothing else before the listener has proved
//! the key, too. [`ROUNDS`] detects a listener that does not answer.

use super::copier::lost;
use super::maps::Maps;
use super::registry::{RegistryView, Seen};
use super::route::LocalRoute;
use super::writers::WriterPage;
use super::{LocalPeer, PACKETS_PER_CALL, name_of};
use crate::host::is_on_this_host;
use crate::reactor::{Cause, Cx, Handler, Next, now};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use crate::transfer::link::Link;
use crate::transfer::requests::PROBE;
use crate::transport::service::Attached;
use kvferry_proto::auth::macs_equal;
use kvferry_proto::local::{PACKET_LEN, PROBE_LEN, PROOF};
use kvferry_proto::{CAPABILITY_LOCAL, LocalPacket, RegionId, StreamId, Timestamp, WireCode};
use kvferry_sys::poll::Interest;
use kvferry_sys::shared::Shared;
use kvferry_sys::unix::{Channel, Packet};
use kvferry_sys::{fd::Fd, process_vm};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

const NOT_THE_PEER: &str = "the process that listens on the peer's local name is not the peer";

/// Requests that the peer answers over the control connection, one after the other, while its local
/// socket stays silent, before the initiator concludes that another process listens there.
///
/// The peer's control thread serves both. Between two answers it accepts 64 local connections, and
/// at most 1024 wait, so the peer itself would have answered by then. A request takes one round
/// trip: tens of microseconds within a host.
const ROUNDS: u32 = 32;

/// Silence of the peer's local socket after which the first of these requests is sent. The peer
/// answers sooner, unless its host is busy, and its first transfer does not wait for requests.
const ROUNDS_AFTER: Duration = Duration::from_millis(10);

/// Attaches to the peer of a newly established session, if it is on this host.
pub(super) fn attach(link: &Arc<Link>, attached: Attached) {
    match begin(link) {
        Ok(Begun { channel, pid, page, stream }) => {
            let control = &link.core.threads.control;
            let (token, began) = (control.token(), now());
            let handler = Attach {
                link: Arc::clone(link),
                token,
                channel: Arc::new(channel),
                pid,
                rounds: Rounds::default(),
                stage: Stage::Offer { page, stream },
                attached: Some(attached),
                rounds_at: began + ROUNDS_AFTER,
                deadline: began + link.core.settings.handshake_timeout(),
                was_reset: false,
            };
            control.add(token, Box::new(handler));
        }
        Err(obstacle) => failed(link, obstacle, attached),
    }
}

fn failed(link: &Link, obstacle: String, attached: Attached) {
    if link.end().is_none() && is_on_this_host(link.peer_addr) {
        warn_limited!(
            peer = %link.address, reason = %obstacle,
            "the peer is on this host, but its memory is out of reach"
        );
    }
    attached(Some(obstacle));
}

struct Begun {
    channel: Channel,
    /// The listener's pid; `None` if it is in another process namespace.
    pid: Option<i32>,
    page: WriterPage,
    stream: StreamId,
}

/// Starts the attachment, if the peer permits it and listens.
fn begin(link: &Arc<Link>) -> Result<Begun, String> {
    let info = link.info().expect("the session is established");
    if info.capabilities & CAPABILITY_LOCAL == 0 {
        return Err("the peer does not allow local".into());
    }
    if info.checksum {
        return Err("checksums are on, which copies within a host don't have".into());
    }
    let channel = Channel::connect(name_of(info.incarnation).as_bytes()).map_err(|e| {
        if e.kind() == io::ErrorKind::ConnectionRefused {
            "the peer is on another host, or in another network namespace".to_owned()
        } else {
            format!("can't connect to the peer's local socket: {e}")
        }
    })?;
    let listener =
        channel.credentials().map_err(|e| format!("the peer's process is not known: {e}"))?;
    if !listener.is_own_user() {
        return Err("the process that listens on the peer's local name runs as another user".into());
    }
    let failed = |e: io::Error| format!("the page of gates can't be made: {e}");
    let page = WriterPage::create().map_err(failed)?;
    let (stream, hello) = link.backend().prove(PROOF).ok_or("the session ended")?;
    match channel.send(&hello, &[page.fd()]) {
        Ok(()) => {}
        // It closed the connection at once, and has sent the reason.
        Err(e)
            if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
        Err(e) => return Err(format!("the peer's local socket can't be written to: {e}")),
    }
    Ok(Begun { channel, pid: listener.pid, page, stream })
}

enum Stage {
    /// Waiting for the address of the peer's probe.
    Offer {
        page: WriterPage,
        stream: StreamId,
    },
    /// Waiting for the peer's confirmation that it has mapped this side's gates.
    Attached {
        peer: Box<LocalPeer>,
    },
    /// Attached; memory that the peer shares may still arrive.
    Live(Arc<LocalPeer>),
    Over,
}

/// Sends requests to the peer while its local socket has not answered.
#[derive(Default)]
struct Rounds {
    asked: u32,
    answered: Arc<AtomicU32>,
}

struct Attach {
    link: Arc<Link>,
    token: u64,
    channel: Arc<Channel>,
    pid: Option<i32>,
    rounds: Rounds,
    stage: Stage,
    attached: Option<Attached>,
    rounds_at: Timestamp,
    deadline: Timestamp,
    was_reset: bool,
}

impl Attach {
    fn fail(&mut self, obstacle: String) -> Next {
        if let Stage::Live(peer) = std::mem::replace(&mut self.stage, Stage::Over) {
            // A live peer keeps this socket open for as long as the session is up.
            lost(&self.link, peer.loss(obstacle.clone()));
        }
        if let Some(attached) = self.attached.take() {
            failed(&self.link, obstacle, attached);
        }
        Next::Close
    }

    fn take(&mut self, bytes: &[u8], fds: Vec<std::os::fd::OwnedFd>) -> Result<(), String> {
        let packet =
            LocalPacket::decode(bytes).map_err(|e| format!("the peer's local socket sent {e}"))?;
        let mut fds = fds.into_iter();
        match (std::mem::replace(&mut self.stage, Stage::Over), packet) {
            (Stage::Offer { page, stream }, LocalPacket::Offer { code, probe, mac }) => {
                if !code.is_ok() {
                    return Err(format!("the peer refused: {}", in_words(code)));
                }
                let registry = fds.next().ok_or("the peer sent no table of its regions")?;
                self.offered(page, stream, registry, probe, &mac)
            }
            (Stage::Attached { peer }, LocalPacket::Attached { code }) => {
                if !code.is_ok() {
                    return Err(format!("the peer refused: {}", in_words(code)));
                }
                let peer: Arc<LocalPeer> = Arc::from(peer);
                tracing::info!(
                    peer = %self.link.address, pid = peer.pid, by_number = peer.vm.is_ok(),
                    "the peer is on this host: bytes are copied, not sent"
                );
                self.link.add_route(Arc::new(LocalRoute(Arc::clone(&peer))));
                self.stage = Stage::Live(peer);
                if let Some(attached) = self.attached.take() {
                    attached(None);
                }
                Ok(())
            }
            (Stage::Live(peer), LocalPacket::Mapped { region, code, len }) => {
                mapped(&peer, region, code, len, fds.next());
                self.stage = Stage::Live(peer);
                Ok(())
            }
            (Stage::Live(peer), LocalPacket::Unmapped { region }) => {
                peer.maps.forget(region);
                self.stage = Stage::Live(peer);
                Ok(())
            }
            _ => Err("the peer's local socket sent an unexpected packet".into()),
        }
    }

    fn offered(
        &mut self,
        page: WriterPage,
        stream: StreamId,
        registry: std::os::fd::OwnedFd,
        probe: u64,
        mac: &[u8; kvferry_proto::auth::MAC_LEN],
    ) -> Result<(), String> {
        let expected = self.link.backend().answer_proof(PROOF, stream);
        if !expected.is_some_and(|expected| macs_equal(&expected, mac)) {
            return Err(NOT_THE_PEER.into());
        }
        let channel = &self.channel;
        let context = |what: &'static str| move |e: io::Error| format!("{what}: {e}");
        let pidfd: Fd =
            channel.peer_pidfd().map_err(context("the peer's process can't be watched"))?;
        let registry =
            RegistryView::open(registry).map_err(context("the peer's regions can't be mapped"))?;
        let (vm, reply) = self.probe(probe);
        channel
            .send(&reply.encode(), &[])
            .map_err(context("the peer's local socket can't be written to"))?;
        let peer = LocalPeer {
            handler: self.token,
            pid: self.pid.unwrap_or_default(),
            vm,
            channel: Arc::clone(channel),
            pidfd,
            registry,
            page,
            maps: Maps::default(),
            gates: Mutex::default(),
            seen_alive: AtomicU64::new(0),
            detached: AtomicBool::new(false),
        };
        self.stage = Stage::Attached { peer: Box::new(peer) };
        Ok(())
    }

    /// Sends the next request over the control connection. False after the last one.
    fn next_round(&mut self) -> bool {
        if self.rounds.answered.load(Ordering::Relaxed) < self.rounds.asked {
            return true;
        }
        if self.rounds.asked == ROUNDS {
            return false;
        }
        self.rounds.asked += 1;
        let answered = Arc::clone(&self.rounds.answered);
        let (control, token) = (self.link.core.threads.control.clone(), self.token);
        let budget = self.link.core.settings.handshake_timeout();
        let count = Box::new(move |code: WireCode, _| {
            if code.is_ok() {
                answered.fetch_add(1, Ordering::Relaxed);
                control.wake(token);
            }
        });
        self.link.request(PROBE, Vec::new(), budget, count);
        true
    }

    /// Reads the peer's probe by its pid.
    fn probe(&self, at: u64) -> (Result<(), String>, LocalPacket) {
        let refused = LocalPacket::Probe { code: WireCode::Unsupported, bytes: [0; PROBE_LEN] };
        let Some(pid) = self.pid else {
            return (Err("the peer is in another process namespace".into()), refused);
        };
        let mut bytes = [0; PROBE_LEN];
        let read = usize::try_from(at)
            .map_err(|_| io::ErrorKind::InvalidInput.into())
            .and_then(|at| process_vm::read_bytes(pid, at, &mut bytes));
        match read {
            Ok(()) => (Ok(()), LocalPacket::Probe { code: WireCode::Ok, bytes }),
            Err(e) => (Err(explain(&e)), refused),
        }
    }
}

fn mapped(
    peer: &LocalPeer,
    region: RegionId,
    code: WireCode,
    len: u64,
    fd: Option<std::os::fd::OwnedFd>,
) {
    let (true, Some(fd), Ok(len)) = (code.is_ok(), fd, usize::try_from(len)) else { return };
    // The memory of a region that is gone is not mapped.
    let Some(writable) = peer.registry.index().known(region).map(Seen::is_writable) else { return };
    match Shared::open(fd, len, writable) {
        Ok(map) => peer.maps.fill(region, map),
        Err(e) => tracing::debug!(%region, error = %e, "a peer's memory can't be mapped"),
    }
}

fn in_words(code: WireCode) -> &'static str {
    match code {
        WireCode::AccessDenied => "the peer runs as another user",
        WireCode::AuthFailed => "what this process read is not the peer's memory",
        WireCode::Busy => "too many processes are attached to the peer",
        WireCode::UnknownSession | WireCode::Closed => "the session ended",
        _ => "the peer does not allow it",
    }
}

/// Names the likely reasons of the kernel's refusal to read another process's memory.
fn explain(e: &io::Error) -> String {
    let mut text = format!("the kernel does not let this process reach the peer's memory ({e})");
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let scope = scope.ok().and_then(|s| s.trim().parse::<u8>().ok()).unwrap_or(0);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let seccomp = status.lines().find_map(|l| l.strip_prefix("Seccomp:")).map(str::trim);
    if scope > 0 {
        text += &format!(
            "; kernel.yama.ptrace_scope is {scope}: set it to 0, or, if it is 1, start both \
             processes with KVFERRY_PTRACER_ANY=1"
        );
    }
    if seccomp.is_some_and(|mode| mode != "0") {
        text += "; a seccomp filter is active: it must allow process_vm_readv and \
                 process_vm_writev";
    }
    text
}

impl Handler for Attach {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        if self.link.end().is_some() {
            return self.fail("the session ended".into());
        }
        // After the last of them the descriptor stays ready, and other handlers have their turn.
        let mut is_drained = false;
        for _ in 0..PACKETS_PER_CALL {
            let mut buffer = [0; PACKET_LEN];
            match self.channel.recv(&mut buffer) {
                Ok(Packet { len: 0, .. }) => {
                    return self.fail("the peer closed its local socket".into());
                }
                Ok(Packet { len, fds }) => {
                    if let Err(obstacle) = self.take(&buffer[..len], fds) {
                        return self.fail(obstacle);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    is_drained = true;
                    break;
                }
                // Sent once, before the peer closed its socket.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset && !self.was_reset => {
                    self.was_reset = true;
                }
                Err(e) => return self.fail(format!("the peer's local socket failed: {e}")),
            }
        }
        if is_drained && cause.ready.closed {
            return self.fail("the peer closed its local socket".into());
        }
        if matches!(self.stage, Stage::Live(_)) {
            return Next::Wait { interest: Interest::Read, deadline: None };
        }
        if matches!(self.stage, Stage::Offer { .. }) {
            if cx.now < self.rounds_at {
                return Next::Wait { interest: Interest::Read, deadline: Some(self.rounds_at) };
            }
            if !self.next_round() {
                return self.fail(NOT_THE_PEER.into());
            }
        }
        if cx.now >= self.deadline {
            return self.fail("the peer's local socket does not answer in time".into());
        }
        Next::Wait { interest: Interest::Read, deadline: Some(self.deadline) }
    }
}

impl Drop for Attach {
    fn drop(&mut self) {
        self.fail("the agent was shut down".into());
    }
}

#[cfg(test)]
mod tests {
    use super::super::registry::Registry;
    use super::super::tests::{link, peer};
    use super::*;
    use crate::Agent;

    #[test]
    fn a_peer_that_sends_more_than_a_call_takes_waits_for_the_next_call() {
        const MORE: usize = 8;
        let agent = Agent::builder().start().expect("an agent");
        let registry = Registry::create().expect("memory");
        let (peer, there) = peer(&registry, Ok(()));
        let channel = Arc::clone(&peer.channel);
        let control = &agent.core().threads.control;
        let (token, at) = (control.token(), now());
        let mut attached = Attach {
            link: link(&agent),
            token,
            channel: Arc::clone(&channel),
            pid: None,
            rounds: Rounds::default(),
            stage: Stage::Live(peer),
            attached: None,
            rounds_at: at,
            deadline: at,
            was_reset: false,
        };
        let unmapped = LocalPacket::Unmapped { region: RegionId(1) }.encode();
        for _ in 0..PACKETS_PER_CALL + MORE {
            there.send(&unmapped, &[]).expect("room");
        }
        let cx = Cx { now: at, token, remote: control };
        let next = attached.handle(Cause::default(), &cx);
        assert!(matches!(next, Next::Wait { interest: Interest::Read, .. }), "{next:?}");
        let left = std::iter::from_fn(|| channel.recv(&mut [0; PACKET_LEN]).ok()).count();
        assert_eq!(left, MORE);
        drop(attached);
        agent.shutdown();
    }
}
