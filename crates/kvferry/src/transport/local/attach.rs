//! The initiator finds out whether its peer is on the same host, and within reach.

use super::copier::lost;
use super::{LocalPeer, name_of};
use crate::error::{Error, ErrorKind};
use crate::memory::registry::RegistryView;
use crate::memory::writers::WriterPage;
use crate::reactor::{Cause, Cx, Handler, Next, now};
use crate::session::control::Met;
use crate::session::link::Link;
use crate::session::service::PROBE;
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::{Arc, Mutex, PoisonError, RwLock};
use crate::transport::TransportKind;
use kvferry_proto::auth::macs_equal;
use kvferry_proto::local::{PACKET_LEN, PROBE_LEN};
use kvferry_proto::{CAPABILITY_LOCAL, LocalPacket, RegionId, StreamId, Timestamp, WireCode};
use kvferry_sys::poll::Interest;
use kvferry_sys::shared::Shared;
use kvferry_sys::unix::{self, Channel, Packet};
use kvferry_sys::{fd::Fd, process_vm};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// Attaches to the peer of a session that was established a moment ago, if it is on this host;
/// then tells `met`, either way.
pub(crate) fn attach(link: &Arc<Link>, met: Met) {
    match begin(link) {
        Ok(Begun { channel, page, stream }) => {
            let control = &link.core.control;
            let token = control.token();
            let handler = Attach {
                link: Arc::clone(link),
                token,
                channel: Arc::new(channel),
                stage: Stage::Offer { page, stream },
                met: Some(met),
                deadline: now() + link.core.handshake_timeout(),
                was_reset: false,
            };
            control.add(token, Box::new(handler));
        }
        Err(obstacle) => conclude(link, Some(obstacle), met),
    }
}

/// Says how it went: with `local`, or why not.
fn conclude(link: &Arc<Link>, obstacle: Option<String>, met: Met) {
    if let Some(end) = link.session_end() {
        return met(link, Err(end));
    }
    if let Some(obstacle) = obstacle {
        if !link.core.allows(TransportKind::Tcp) {
            // One that is ending looks the same, and has said so by the time it would answer.
            let asked = Arc::clone(link);
            let answered = Box::new(move |_, _| unsupported(&asked, &obstacle, met));
            return link.request(PROBE, Vec::new(), link.core.handshake_timeout(), answered);
        }
        if link.core.allows(TransportKind::Local) && link.is_same_host() {
            tracing::warn!(
                peer = %link.address, reason = %obstacle,
                "the peer is on this host, but bytes go over tcp"
            );
        }
        link.set_obstacle(obstacle);
    }
    met(link, Ok(()));
}

/// Nothing that is allowed reaches a peer that lives.
fn unsupported(link: &Arc<Link>, obstacle: &str, met: Met) {
    let error = link.session_end().unwrap_or_else(|| {
        let what = format!("local is the only transport allowed, and {obstacle}");
        let error = Error::new(ErrorKind::Unsupported, what).with("peer", &link.address);
        link.close(error.clone());
        error
    });
    met(link, Err(error));
}

struct Begun {
    channel: Channel,
    page: WriterPage,
    stream: StreamId,
}

/// Introduces us to the peer, if we may and it listens.
fn begin(link: &Arc<Link>) -> Result<Begun, String> {
    if !link.core.is_local() {
        return Err(link.core.local_obstacle());
    }
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
            format!("the peer's local socket can't be connected to: {e}")
        }
    })?;
    let failed = |e: io::Error| format!("the page of gates can't be made: {e}");
    let page = WriterPage::create().map_err(failed)?;
    let native = link.native.as_ref().expect("established sessions are native");
    let hello = native.session.lock().unwrap_or_else(PoisonError::into_inner).stream_hello();
    let (stream, hello) = hello.ok_or("the session ended")?;
    match channel.send(&hello, &[page.fd()]) {
        Ok(()) => {}
        // It hung up at once; it has said why.
        Err(e)
            if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
        Err(e) => return Err(format!("the peer's local socket can't be written to: {e}")),
    }
    Ok(Begun { channel, page, stream })
}

enum Stage {
    /// The peer is to say where its probe lies.
    Offer {
        page: WriterPage,
        stream: StreamId,
    },
    /// The peer is to say that it knows our gates.
    Attached {
        peer: Box<LocalPeer>,
    },
    /// It can be copied to; memory it shares may still come.
    Live(Arc<LocalPeer>),
    Over,
}

struct Attach {
    link: Arc<Link>,
    token: u64,
    channel: Arc<Channel>,
    stage: Stage,
    met: Option<Met>,
    deadline: Timestamp,
    was_reset: bool,
}

impl Attach {
    fn fail(&mut self, obstacle: String) -> Next {
        if let Stage::Live(peer) = std::mem::replace(&mut self.stage, Stage::Over) {
            // A peer that lives keeps this socket for as long as the session is up.
            lost(&self.link, peer.loss(obstacle.clone()));
        }
        if let Some(met) = self.met.take() {
            conclude(&self.link, Some(obstacle), met);
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
                if let Some(obstacle) = peer.obstacle() {
                    // Only memory that it shares can be reached.
                    self.link.set_obstacle(obstacle.to_owned());
                }
                tracing::info!(
                    peer = %self.link.address, pid = peer.pid, by_number = peer.vm.is_ok(),
                    "the peer is on this host: bytes are copied, not sent"
                );
                self.link.set_local(&peer);
                self.stage = Stage::Live(peer);
                if let Some(met) = self.met.take() {
                    conclude(&self.link, None, met);
                }
                Ok(())
            }
            (Stage::Live(peer), LocalPacket::Mapped { region, code, len }) => {
                mapped(&peer, region, code, len, fds.next());
                self.stage = Stage::Live(peer);
                Ok(())
            }
            (Stage::Live(peer), LocalPacket::Unmapped { region }) => {
                peer.set_map(region, None);
                self.stage = Stage::Live(peer);
                Ok(())
            }
            _ => Err("the peer's local socket sent something out of turn".into()),
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
        let native = self.link.native.as_ref().expect("attached sessions are native");
        let expected =
            native.session.lock().unwrap_or_else(PoisonError::into_inner).local_mac(stream);
        if !expected.is_some_and(|expected| macs_equal(&expected, mac)) {
            return Err("who listens on the peer's name is not the peer".into());
        }
        let channel = &self.channel;
        let said = |what: &'static str| move |e: io::Error| format!("{what}: {e}");
        let who = channel.credentials().map_err(said("the peer's process is not known"))?;
        if who.uid != unix::user() {
            return Err(in_words(WireCode::AccessDenied).into());
        }
        let pidfd: Fd =
            channel.peer_pidfd().map_err(said("the peer's process can't be watched"))?;
        let registry =
            RegistryView::open(registry).map_err(said("the peer's regions can't be mapped"))?;
        let (vm, reply) = self.probe(who.pid, probe);
        channel
            .send(&reply.encode(), &[])
            .map_err(said("the peer's local socket can't be written to"))?;
        let peer = LocalPeer {
            handler: self.token,
            pid: who.pid.unwrap_or_default(),
            vm,
            channel: Arc::clone(channel),
            pidfd,
            registry,
            page,
            maps: RwLock::default(),
            asked: Mutex::default(),
            gates: Mutex::default(),
            seen_alive: AtomicU64::new(0),
            detached: AtomicBool::new(false),
        };
        self.stage = Stage::Attached { peer: Box::new(peer) };
        Ok(())
    }

    /// Reads the peer's probe under its process number.
    fn probe(&self, pid: Option<i32>, at: u64) -> (Result<(), String>, LocalPacket) {
        let refused = LocalPacket::Probe { code: WireCode::Unsupported, bytes: [0; PROBE_LEN] };
        let Some(pid) = pid else {
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
    match Shared::open(fd, len, true) {
        Ok(map) => peer.set_map(region, Some(map)),
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

/// Why the kernel may have refused to read another process's memory.
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
        loop {
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
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                // Said once, before what the peer sent when it hung up.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset && !self.was_reset => {
                    self.was_reset = true;
                }
                Err(e) => return self.fail(format!("the peer's local socket failed: {e}")),
            }
        }
        if cause.ready.closed {
            return self.fail("the peer closed its local socket".into());
        }
        if matches!(self.stage, Stage::Live(_)) {
            return Next::Wait { interest: Interest::Read, deadline: None };
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
