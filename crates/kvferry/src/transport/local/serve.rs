//! The acceptor lets processes of its user on this host reach its memory.

use super::{lock, name_of};
use crate::agent::Core;
use crate::error::{Error, Result};
use crate::memory::region::RegionInner;
use crate::memory::registry::Registry;
use crate::memory::writers::Writer;
use crate::reactor::{Cause, Cx, Handler, Next};
use crate::session::greet::verify_stream;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Arc, Weak};
use kvferry_proto::auth::MAC_LEN;
use kvferry_proto::local::PROBE_LEN;
use kvferry_proto::{
    Incarnation, LocalPacket, Opener, Opening, PREAUTH_MAX, RegionId, Sniff, Sniffer, StreamHello,
    Timestamp, WireCode,
};
use kvferry_sys::map::Mapping;
use kvferry_sys::poll::Interest;
use kvferry_sys::random;
use kvferry_sys::unix::{self, Channel, Packet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Connections accepted before others have their turn.
const ACCEPTS: usize = 64;
/// Processes of our own user that may be attached, or be about to.
const GUESTS_MAX: usize = 4096;

/// What an agent needs to be reached by processes of its host.
pub(crate) fn listen(incarnation: Incarnation) -> Result<(Channel, Registry)> {
    let channel = Channel::listen(name_of(incarnation).as_bytes())
        .map_err(|e| Error::io("a local socket can't be made", e))?;
    let registry = Registry::create().map_err(|e| Error::io("shared memory can't be made", e))?;
    Ok((channel, registry))
}

/// Tells whoever has mapped a region that it is gone.
pub(crate) fn unmap(core: &Core, region: &RegionInner) {
    if region.shared().is_none() {
        return;
    }
    for writer in core.writers.all() {
        if lock(&writer.mapped).remove(&region.id.0) {
            // If its buffer is full, it keeps the memory until its session ends.
            let _ = writer.channel.send(&LocalPacket::Unmapped { region: region.id }.encode(), &[]);
        }
    }
}

pub(crate) struct LocalListener {
    core: Weak<Core>,
    channel: Channel,
    guests: Arc<AtomicUsize>,
}

impl LocalListener {
    pub(crate) fn new(core: Weak<Core>, channel: Channel) -> Self {
        Self { core, channel, guests: Arc::default() }
    }
}

impl Handler for LocalListener {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.as_fd())
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let Some(core) = self.core.upgrade() else { return Next::Close };
        for _ in 0..ACCEPTS {
            match self.channel.accept() {
                Ok(channel) => {
                    // Anybody on this host may connect. Whoever is not our user is told so and
                    // costs nothing further.
                    let ours = channel.credentials().is_ok_and(|who| who.uid == unix::user());
                    let code = match ours {
                        false => WireCode::AccessDenied,
                        true if self.guests.load(Ordering::Relaxed) >= GUESTS_MAX => WireCode::Busy,
                        true => WireCode::Ok,
                    };
                    if !code.is_ok() {
                        refuse(&channel, code);
                        continue;
                    }
                    self.guests.fetch_add(1, Ordering::Relaxed);
                    let guest = Guest {
                        core: Weak::clone(&self.core),
                        guests: Arc::clone(&self.guests),
                        channel: Arc::new(channel),
                        stage: Stage::Hello,
                        deadline: cx.now + core.handshake_timeout(),
                    };
                    cx.remote.add(cx.remote.token(), Box::new(guest));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => {
                    tracing::warn!(error = %e, "a local connection can't be accepted");
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
    /// It is to say which session it belongs to.
    Hello,
    /// It is to say what it read at the address it was told.
    Probe { writer: Arc<Writer>, _probe: Mapping, bytes: [u8; PROBE_LEN] },
    /// It copies.
    Attached(Arc<Writer>),
}

struct Guest {
    core: Weak<Core>,
    guests: Arc<AtomicUsize>,
    channel: Arc<Channel>,
    stage: Stage,
    deadline: Timestamp,
}

impl Guest {
    /// Acts on one packet; the code to refuse with otherwise.
    fn take(
        &mut self,
        core: &Arc<Core>,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> std::result::Result<(), WireCode> {
        match &mut self.stage {
            Stage::Hello => self.hello(core, bytes, fds),
            Stage::Probe { writer, bytes: expected, .. } => {
                let Ok(LocalPacket::Probe { code, bytes: read }) = LocalPacket::decode(bytes)
                else {
                    return Err(WireCode::Malformed);
                };
                if code.is_ok() && read != *expected {
                    return Err(WireCode::AuthFailed);
                }
                let writer = Arc::clone(writer);
                // Before it is told that it may begin.
                core.writers.add(Arc::clone(&writer));
                self.stage = Stage::Attached(writer);
                let attached = LocalPacket::Attached { code: WireCode::Ok };
                self.channel.send(&attached.encode(), &[]).map_err(|_| WireCode::Closed)
            }
            Stage::Attached(writer) => match LocalPacket::decode(bytes) {
                Ok(LocalPacket::Map { region }) => {
                    map(core, writer, region);
                    Ok(())
                }
                _ => Err(WireCode::Malformed),
            },
        }
    }

    fn hello(
        &mut self,
        core: &Arc<Core>,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> std::result::Result<(), WireCode> {
        let hello = parse_hello(bytes).ok_or(WireCode::Malformed)?;
        let page = fds.into_iter().next().ok_or(WireCode::Malformed)?;
        let link = verify_stream(core, &hello)?;
        let native = link.native.as_ref().expect("accepted sessions are native");
        let session = native.session.lock().unwrap_or_else(crate::sync::PoisonError::into_inner);
        let mac = session.local_mac(hello.stream).ok_or(WireCode::Closed)?;
        drop(session);
        let internal = |e: io::Error| {
            tracing::warn!(peer = %link.address, error = %e, "a process can't be attached");
            WireCode::Internal
        };
        let bytes: [u8; PROBE_LEN] = random::bytes().map_err(internal)?;
        let probe = Mapping::anonymous(PROBE_LEN).map_err(internal)?;
        probe.span(0, PROBE_LEN).copy_from(&bytes);
        let registry = core.regions.registry_fd().ok_or(WireCode::Unsupported)?;
        let offer = LocalPacket::Offer { code: WireCode::Ok, probe: probe.as_ptr() as u64, mac };
        let name = link.info().map_or_else(|| link.address.clone(), |info| info.name.clone());
        let writer = Writer::open(page, Arc::clone(&self.channel), name).map_err(internal)?;
        self.stage = Stage::Probe { writer: Arc::new(writer), _probe: probe, bytes };
        self.channel.send(&offer.encode(), &[registry.as_fd()]).map_err(|_| WireCode::Closed)
    }
}

/// A guest's first packet: as a stream of its session.
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

/// Lets a guest map the memory of a region.
fn map(core: &Core, writer: &Writer, region: RegionId) {
    let found = core.regions.by_id(region);
    let shared = found.as_ref().and_then(|r| r.0.shared());
    let (code, len) = match shared {
        Some(shared) => (WireCode::Ok, shared.len() as u64),
        None => (WireCode::UnknownRegion, 0),
    };
    if code.is_ok() {
        lock(&writer.mapped).insert(region.0);
    }
    let fds: Vec<BorrowedFd<'_>> = shared.iter().map(|shared| shared.as_fd()).collect();
    let _ = writer.channel.send(&LocalPacket::Mapped { region, code, len }.encode(), &fds);
}

impl Handler for Guest {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        let Some(core) = self.core.upgrade() else { return Next::Close };
        loop {
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
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Next::Close,
            }
        }
        if cause.ready.closed {
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

impl Drop for Guest {
    fn drop(&mut self) {
        self.guests.fetch_sub(1, Ordering::Relaxed);
        if let (Stage::Attached(_), Some(core)) = (&self.stage, self.core.upgrade()) {
            core.writers.forget_gone();
        }
    }
}
