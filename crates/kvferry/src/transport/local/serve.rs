//! The target's side: lets processes of the same user on this host reach this agent's memory.

use super::own::{OwnMemory, lend};
use super::registry::Registry;
use super::writers::Writer;
use super::{PACKETS_PER_CALL, name_of};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::quota::Permit;
use crate::reactor::{ACCEPTS_PER_CALL, Cause, Cx, Handler, Next};
use crate::sync::{Arc, Weak};
use crate::transfer::link::Copying;
use crate::transport::service::Directory;
use kvferry_proto::auth::MAC_LEN;
use kvferry_proto::local::{PROBE_LEN, PROOF};
use kvferry_proto::{
    LocalPacket, Opener, Opening, PREAUTH_MAX, Sniff, Sniffer, StreamHello, Timestamp, WireCode,
};
use kvferry_sys::alive::AliveMark;
use kvferry_sys::map::Mapping;
use kvferry_sys::poll::Interest;
use kvferry_sys::random;
use kvferry_sys::unix::{Channel, Packet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Opens the socket and makes the table by which processes of this host reach the agent's memory.
pub(super) fn listen(core: &Arc<Core>, directory: &Arc<dyn Directory>) -> Result<Arc<OwnMemory>> {
    let channel = Channel::listen(name_of(core.incarnation).as_bytes())
        .map_err(|e| Error::io("a local socket can't be made", e))?;
    let registry = Registry::create().map_err(|e| Error::io("shared memory can't be made", e))?;
    let memory = OwnMemory::new(registry);
    core.memory.regions.add_user(Arc::clone(&memory) as _);
    let listener = LocalListener {
        core: Arc::downgrade(core),
        directory: Arc::downgrade(directory),
        memory: Arc::clone(&memory),
        channel,
        alive: None,
    };
    core.threads.control.add(core.threads.control.token(), Box::new(listener));
    Ok(memory)
}

struct LocalListener {
    core: Weak<Core>,
    directory: Weak<dyn Directory>,
    memory: Arc<OwnMemory>,
    channel: Channel,
    /// Belongs to the control thread, which makes and drops it.
    alive: Option<AliveMark>,
}

impl Handler for LocalListener {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.as_fd())
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let Some(core) = self.core.upgrade() else { return Next::Close };
        if self.alive.is_none() {
            // Made before any process can map the table.
            match self.memory.mark_alive() {
                Ok(mark) => self.alive = Some(mark),
                Err(e) => {
                    tracing::warn!(error = %e, "transfers within the host take another route");
                    return Next::Close;
                }
            }
        }
        for _ in 0..ACCEPTS_PER_CALL {
            match self.channel.accept() {
                Ok(channel) => {
                    // Any process of this host may connect. One of another user gets a refusal and
                    // no handler.
                    let ours = channel.credentials().is_ok_and(|who| who.is_own_user());
                    if !ours {
                        refuse(&channel, WireCode::AccessDenied);
                        continue;
                    }
                    let Some(permit) = core.quota.copying_process() else {
                        core.counters.connections_refused.one();
                        refuse(&channel, WireCode::Busy);
                        continue;
                    };
                    let conn = HandshakeConn {
                        core: Weak::clone(&self.core),
                        directory: Weak::clone(&self.directory),
                        memory: Arc::clone(&self.memory),
                        channel: Arc::new(channel),
                        stage: Stage::Hello,
                        deadline: cx.now + core.settings.handshake_timeout(),
                        copying: None,
                        _permit: permit,
                    };
                    cx.remote.add(cx.remote.token(), Box::new(conn));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => {
                    warn_limited!(error = %e, "a local connection can't be accepted");
                    let later = cx.now + std::time::Duration::from_millis(50);
                    return Next::Wait { interest: Interest::None, deadline: Some(later) };
                }
            }
        }
        Next::Wait { interest: Interest::Read, deadline: None }
    }
}

fn refuse(channel: &Channel, code: WireCode) {
    let offer = LocalPacket::Offer { code, probe: 0, mac: [0; MAC_LEN] };
    let _ = channel.send(&offer.encode(), &[]);
}

enum Stage {
    /// Waiting for the initiator's hello, which names its session.
    Hello,
    /// Waiting for the initiator's probe: the bytes it read at the address that this side sent.
    Probe { writer: Arc<Writer>, _probe: Mapping, bytes: [u8; PROBE_LEN] },
    /// The initiator may copy.
    Attached(Arc<Writer>),
}

struct HandshakeConn {
    core: Weak<Core>,
    directory: Weak<dyn Directory>,
    memory: Arc<OwnMemory>,
    channel: Arc<Channel>,
    stage: Stage,
    deadline: Timestamp,
    /// Set when the hello has been accepted.
    copying: Option<Copying>,
    _permit: Permit,
}

impl HandshakeConn {
    /// Handles one packet; an error is the code to refuse with.
    fn take(&mut self, core: &Arc<Core>, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), WireCode> {
        match &mut self.stage {
            Stage::Hello => self.hello(bytes, fds),
            Stage::Probe { writer, bytes: expected, .. } => {
                let Ok(LocalPacket::Probe { code, bytes: read }) = LocalPacket::decode(bytes)
                else {
                    return Err(WireCode::Malformed);
                };
                if code.is_ok() && read != *expected {
                    return Err(WireCode::AuthFailed);
                }
                let writer = Arc::clone(writer);
                // Before the message that lets the initiator begin.
                self.memory.writers.add(Arc::clone(&writer));
                self.stage = Stage::Attached(writer);
                let attached = LocalPacket::Attached { code: WireCode::Ok };
                self.channel.send(&attached.encode(), &[]).map_err(|_| WireCode::Closed)
            }
            Stage::Attached(writer) => match LocalPacket::decode(bytes) {
                Ok(LocalPacket::Map { region }) => {
                    let found = core.memory.regions.by_id(region);
                    lend(writer, region, found.as_ref().map(|region| &*region.0));
                    Ok(())
                }
                _ => Err(WireCode::Malformed),
            },
        }
    }

    fn hello(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), WireCode> {
        let hello = parse_hello(bytes).ok_or(WireCode::Malformed)?;
        let page = fds.into_iter().next().ok_or(WireCode::Malformed)?;
        let directory = self.directory.upgrade().ok_or(WireCode::Closed)?;
        let link = directory.verify(PROOF, &hello)?;
        let mac = link.backend().answer_proof(PROOF, hello.stream).ok_or(WireCode::Closed)?;
        let internal = |e: io::Error| {
            warn_limited!(peer = %link.address, error = %e, "a process can't be attached");
            WireCode::Internal
        };
        let bytes: [u8; PROBE_LEN] = random::bytes().map_err(internal)?;
        let probe = Mapping::anonymous(PROBE_LEN).map_err(internal)?;
        probe.span(0, PROBE_LEN).copy_from(&bytes);
        let registry = self.memory.registry_fd().map_err(internal)?;
        let offer = LocalPacket::Offer { code: WireCode::Ok, probe: probe.as_ptr() as u64, mac };
        let name = link.info().map_or_else(|| link.address.clone(), |info| info.name.clone());
        let writer = Writer::open(page, Arc::clone(&self.channel), name).map_err(internal)?;
        self.stage = Stage::Probe { writer: Arc::new(writer), _probe: probe, bytes };
        self.copying = Some(Copying::new(link));
        self.channel.send(&offer.encode(), &[registry.as_fd()]).map_err(|_| WireCode::Closed)
    }
}

/// Handles the first packet of a connection, which joins a session as a stream.
fn parse_hello(bytes: &[u8]) -> Option<StreamHello> {
    let mut sniffer = Sniffer::new();
    let (head, rest) = bytes.split_at_checked(sniffer.wanted())?;
    if sniffer.feed(head) != Sniff::Native {
        return None;
    }
    match Opener::new().feed(rest) {
        Ok(Some(Opening::Stream { hello, .. })) => Some(hello),
        _ => None,
    }
}

impl Handler for HandshakeConn {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        let Some(core) = self.core.upgrade() else { return Next::Close };
        // After the last of them the descriptor stays ready, and other handlers have their turn.
        let mut is_drained = false;
        for _ in 0..PACKETS_PER_CALL {
            let mut buffer = [0; PREAUTH_MAX];
            match self.channel.recv(&mut buffer) {
                Ok(Packet { len: 0, .. }) => return Next::Close,
                Ok(Packet { len, fds }) => {
                    if let Err(code) = self.take(&core, &buffer[..len], fds) {
                        tracing::debug!(%code, "a process of this host was refused");
                        if matches!(self.stage, Stage::Hello) {
                            refuse(&self.channel, code);
                        } else {
                            let attached = LocalPacket::Attached { code };
                            let _ = self.channel.send(&attached.encode(), &[]);
                        }
                        return Next::Close;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    is_drained = true;
                    break;
                }
                Err(_) => return Next::Close,
            }
        }
        if is_drained && cause.ready.closed {
            return Next::Close;
        }
        if matches!(self.stage, Stage::Attached(_)) {
            return Next::Wait { interest: Interest::Read, deadline: None };
        }
        if cx.now >= self.deadline {
            return Next::Close;
        }
        Next::Wait { interest: Interest::Read, deadline: Some(self.deadline) }
    }
}

impl Drop for HandshakeConn {
    fn drop(&mut self) {
        if matches!(self.stage, Stage::Attached(_)) {
            self.memory.writers.forget_gone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::writers::WriterPage;
    use super::*;
    use crate::Agent;
    use crate::reactor::now;
    use crate::session::sessions::Sessions;
    use kvferry_proto::RegionId;
    use kvferry_proto::local::PACKET_LEN;

    #[test]
    fn an_attached_process_that_sends_more_than_a_call_takes_waits_for_the_next_call() {
        const MORE: usize = 8;
        let agent = Agent::builder().start().expect("an agent");
        let core = agent.core();
        let name = format!("kvferry-serve-{}", std::process::id());
        let listener = Channel::listen(name.as_bytes()).expect("a free name");
        let there = Channel::connect(name.as_bytes()).expect("just made");
        let here = Arc::new(listener.accept().expect("connected"));
        let page = WriterPage::create().expect("memory");
        let fd = page.fd().try_clone_to_owned().expect("a descriptor");
        let writer = Writer::open(fd, Arc::clone(&here), "test".into()).expect("a page of gates");
        let mut conn = HandshakeConn {
            core: Arc::downgrade(core),
            directory: Weak::<Sessions>::new(),
            memory: OwnMemory::new(Registry::create().expect("memory")),
            channel: here,
            stage: Stage::Attached(Arc::new(writer)),
            deadline: now(),
            copying: None,
            _permit: core.quota.copying_process().expect("the first"),
        };
        let map = LocalPacket::Map { region: RegionId(1) }.encode();
        for _ in 0..PACKETS_PER_CALL + MORE {
            there.send(&map, &[]).expect("room");
        }
        let control = &core.threads.control;
        let cx = Cx { now: now(), token: control.token(), remote: control };
        for expected in [PACKETS_PER_CALL, MORE] {
            let next = conn.handle(Cause::default(), &cx);
            assert!(matches!(next, Next::Wait { interest: Interest::Read, .. }), "{next:?}");
            let answers = std::iter::from_fn(|| there.recv(&mut [0; PACKET_LEN]).ok()).count();
            assert_eq!(answers, expected);
        }
        drop(conn);
        agent.shutdown();
    }
}
