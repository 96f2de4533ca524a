//! Mooncake's transfer engine as its users see it, done by a kvferry agent.
//!
//! Plain Rust: calls take addresses and return codes, nothing here knows Python. What Mooncake
//! tolerates is tolerated (local memory that is not registered, empty batches, empty pieces, a
//! second `initialize`), with these differences: a call that failed has stopped copying when it
//! returns; ids can't be confused; a peer that restarted is met anew; a call before `initialize`
//! fails instead of crashing.

use super::codes::{self, status};
use super::handles::Handles;
use super::managed::Managed;
use super::metadata::{Directory, Unhelpful, host_of, join, own_segment, with_port};
use crate::aside::{ASK, Interrupt, NoAnswer, aside};
use kvferry::{
    Access, Agent, Batch, Config, Error, ErrorKind, Notification, Options, Peer, TransportKind,
};
use std::collections::HashMap;
use std::fmt::Display;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Peers whose resolved names are remembered. Beyond it the memory is emptied, which costs a
/// resolution each.
const PEERS_MAX: usize = 4_096;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the peer's memory.
    Read,
    /// To the peer's memory.
    Write,
}

/// What a transfer call says.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) direction: Direction,
    pub(crate) target: &'a str,
    /// Local addresses, peer addresses, lengths.
    pub(crate) lists: &'a [Vec<u64>; 3],
    /// Name and message.
    pub(crate) notify: Option<(String, String)>,
}

/// Mooncake's `TransferEngine`.
#[derive(Debug)]
pub(crate) struct MooncakeEngine {
    running: Mutex<Option<Arc<Running>>>,
    last_error: Mutex<String>,
    pid: u32,
    identity: u64,
}

/// The engine between `initialize` and its end.
#[derive(Debug)]
struct Running {
    agent: Agent,
    /// What `initialize` was told; peers know the engine by it where an HTTP server is asked.
    name: String,
    /// The names by which this engine's user may mean itself.
    own_names: [String; 3],
    directory: Directory,
    peers: Mutex<HashMap<String, Peer>>,
    handles: Mutex<Handles>,
    managed: Mutex<Managed>,
    timeout: Duration,
}

/// Why a call fails: its code, and why in words.
#[derive(Debug)]
struct Refusal {
    code: i32,
    why: String,
    kind: Option<ErrorKind>,
}

impl Refusal {
    fn new(code: i32, why: impl Display) -> Self {
        Self { code, why: why.to_string(), kind: None }
    }

    fn invalid(why: impl Display) -> Self {
        Self::new(codes::INVALID, why)
    }

    /// Of a transfer it is only said that it failed.
    fn uncoded(self) -> Self {
        Self { code: codes::INVALID, ..self }
    }

    fn coded(code: i32, error: &Error) -> Self {
        Self { code, why: error.to_string(), kind: Some(error.kind()) }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Overlap => codes::OVERLAP,
            ErrorKind::NotRegistered => codes::NOT_REGISTERED,
            _ => codes::INVALID,
        };
        Self::coded(code, &error)
    }
}

impl From<Unhelpful> for Refusal {
    fn from(reason: Unhelpful) -> Self {
        Self::new(codes::METADATA, reason.why())
    }
}

impl From<NoAnswer> for Refusal {
    fn from(reason: NoAnswer) -> Self {
        match reason {
            NoAnswer::Interrupted => Self::invalid("interrupted"),
            NoAnswer::Thread(error) => {
                Self::invalid(format_args!("no thread for the call: {error}"))
            }
        }
    }
}

type Answer<T> = Result<T, Refusal>;

impl MooncakeEngine {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            running: Mutex::default(),
            last_error: Mutex::default(),
            pid: std::process::id(),
            identity: NEXT.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Starts an agent for this engine; ends the one before.
    pub(crate) fn initialize(
        &self,
        local_hostname: &str,
        metadata_server: &str,
        protocol: &str,
        interrupt: Interrupt<'_>,
    ) -> i32 {
        self.code(self.try_initialize(local_hostname, metadata_server, protocol, interrupt))
    }

    fn try_initialize(
        &self,
        local_hostname: &str,
        metadata_server: &str,
        protocol: &str,
        interrupt: Interrupt<'_>,
    ) -> Answer<()> {
        self.must_not_be_forked()?;
        if protocol == "xgmi" {
            // Mooncake's own Python API has it by another name, and says no as well.
            return Err(Refusal::invalid("protocol \"xgmi\" is not available here"));
        }
        let directory = Directory::parse(metadata_server).map_err(Refusal::invalid)?;
        let config = settings(local_hostname, &directory)?;
        let timeout = time_limit(&config);
        let agent = Agent::start(config)?;
        let port = agent.local_addr().port();
        let running = Arc::new(Running {
            own_names: [
                join(host_of(local_hostname), port),
                agent.advertised().to_owned(),
                local_hostname.to_owned(),
            ],
            name: local_hostname.to_owned(),
            agent,
            directory,
            peers: Mutex::default(),
            handles: Mutex::default(),
            managed: Mutex::default(),
            timeout,
        });
        if let Directory::Http(_) = running.directory {
            let published = Arc::clone(&running);
            aside(interrupt, move || published.publish())?
                .map_err(Refusal::uncoded)
                .inspect_err(|_| running.end())?;
        }
        let before = lock(&self.running).replace(running);
        if let Some(before) = before {
            before.end();
        }
        Ok(())
    }

    /// Ends the agent, if there is one.
    pub(crate) fn shutdown(&self) {
        if self.must_not_be_forked().is_err() {
            return;
        }
        let before = lock(&self.running).take();
        if let Some(before) = before {
            before.end();
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running().is_ok()
    }

    /// A number that stands for this engine while it runs.
    pub(crate) fn identity(&self) -> u64 {
        if self.is_running() { self.identity } else { 0 }
    }

    /// The port to give to peers.
    pub(crate) fn rpc_port(&self) -> u16 {
        self.running().map_or(0, |running| running.agent.local_addr().port())
    }

    /// Registers ranges, all or none. Of lists of different lengths the longer one's rest is not
    /// looked at.
    pub(crate) fn register(&self, addrs: &[u64], lengths: &[u64]) -> i32 {
        self.code(self.running().and_then(|running| {
            if lengths.len() < addrs.len() {
                return Err(Refusal::invalid("there are fewer capacities than addresses"));
            }
            let ranges = addrs
                .iter()
                .zip(lengths)
                .map(|(addr, len)| Ok((pointer(*addr)?, size(*len)?)))
                .collect::<Answer<Vec<_>>>()?;
            if ranges.is_empty() {
                return Ok(());
            }
            // SAFETY: that the memory stays mapped until it is unregistered is the caller's
            // promise, as in Mooncake.
            let regions = unsafe { running.agent.register_batch(&ranges, Access::READ_WRITE) }?;
            running.publish_segment().inspect_err(|_| {
                // Registered is what peers can know of.
                let _ = running.agent.unregister_batch(&regions);
            })
        }))
    }

    /// Takes ranges out, each even if another fails.
    pub(crate) fn unregister(&self, addrs: &[u64]) -> i32 {
        self.code(self.running().and_then(|running| {
            let mut first = Ok(());
            for addr in addrs {
                let region = size(*addr).ok().and_then(|addr| running.agent.region_at(addr));
                let result = match region {
                    Some(region) => running.agent.unregister(&region).map_err(Refusal::from),
                    None => Err(Refusal::new(
                        codes::NOT_REGISTERED,
                        format_args!("nothing is registered at {addr:#x}"),
                    )),
                };
                first = first.and(result);
            }
            first.and(running.publish_segment())
        }))
    }

    /// Moves bytes and waits until they are there.
    pub(crate) fn transfer(&self, call: &Call<'_>, interrupt: Interrupt<'_>) -> i32 {
        let done = self.running().and_then(|running| {
            let peer = running.peer(call.target, interrupt)?;
            let batch = batch(call.lists)?;
            running
                .run(&peer, call, &batch, interrupt)
                .inspect_err(|refusal| running.forget(call.target, refusal))
        });
        self.code(done.map_err(Refusal::uncoded))
    }

    /// Starts moving bytes; the id to ask for the outcome by, or [`codes::NO_ID`].
    pub(crate) fn submit(&self, call: &Call<'_>, interrupt: Interrupt<'_>) -> u64 {
        let submitted = self.running().and_then(|running| {
            let peer = running.peer(call.target, interrupt)?;
            let batch = batch(call.lists)?;
            if lock(&running.handles).is_full() {
                return Err(Refusal::invalid("too many transfers whose status nobody asked for"));
            }
            // An unreachable peer is said at once: callers test the id, and may never ask for the
            // status.
            running
                .meet(&peer, interrupt)
                .inspect_err(|refusal| running.forget(call.target, refusal))?;
            let options = running.options(&batch);
            let transfer = match call.direction {
                Direction::Write => peer.write_async(batch, options),
                Direction::Read => peer.read_async(batch, options),
            };
            lock(&running.handles).add(transfer).map_err(|transfer| {
                transfer.cancel();
                Refusal::invalid("too many transfers whose status nobody asked for")
            })
        });
        self.note(submitted).unwrap_or(codes::NO_ID)
    }

    /// Waits for all ids. They are used up, unless interrupted.
    pub(crate) fn wait(&self, ids: &[u64], interrupt: Interrupt<'_>) -> i32 {
        if ids.is_empty() {
            return codes::OK;
        }
        self.code(self.running().and_then(|running| {
            let mut first = Ok(());
            for id in ids {
                let Some(transfer) = lock(&running.handles).take(*id) else {
                    let unknown = Refusal::invalid(format_args!("no transfer has the id {id}"));
                    first = first.and(Err(unknown));
                    continue;
                };
                loop {
                    if let Some(outcome) = transfer.wait(ASK) {
                        first = first.and(outcome.map(drop).map_err(Refusal::from));
                        break;
                    }
                    if interrupt() {
                        lock(&running.handles).put_back(*id, transfer);
                        return Err(NoAnswer::Interrupted.into());
                    }
                }
            }
            first.map_err(Refusal::uncoded)
        }))
    }

    /// What became of an id.
    pub(crate) fn check(&self, id: u64) -> i32 {
        let checked = self.running().and_then(|running| {
            let mut handles = lock(&running.handles);
            let Some(transfer) = handles.get(id) else {
                return Err(Refusal::new(
                    status::FAILED,
                    format_args!("no transfer has the id {id}"),
                ));
            };
            match transfer.poll() {
                None => Ok(status::RUNNING),
                Some(Ok(_)) => {
                    handles.take(id);
                    Ok(status::DONE)
                }
                // Stays, as in Mooncake: callers ask again, or wait for it.
                Some(Err(error)) if error.kind() == ErrorKind::Deadline => {
                    Err(Refusal::coded(status::OUT_OF_TIME, &error))
                }
                Some(Err(error)) => {
                    handles.take(id);
                    Err(Refusal::coded(status::FAILED, &error))
                }
            }
        });
        self.note(checked).unwrap_or_else(|code| code)
    }

    /// Allocates registered memory; its address, or 0.
    pub(crate) fn allocate(&self, len: u64) -> u64 {
        let allocated = self.running().and_then(|running| {
            let len = size(len)?;
            let addr = lock(&running.managed).allocate(&running.agent, len)?;
            running.publish_segment()?;
            Ok(addr)
        });
        self.note(allocated).map_or(0, |addr| addr as u64)
    }

    /// Gives such memory back.
    pub(crate) fn free(&self, addr: u64) -> i32 {
        self.code(self.running().and_then(|running| {
            let freed = lock(&running.managed).free(size(addr)?);
            match freed {
                None => Err(Refusal::invalid(format_args!("no buffer was allocated at {addr:#x}"))),
                Some(None) => Ok(()),
                Some(Some(region)) => {
                    running.agent.unregister(&region)?;
                    running.publish_segment()
                }
            }
        }))
    }

    /// The first address that a peer registered, or 0.
    pub(crate) fn first_address(&self, segment: &str, interrupt: Interrupt<'_>) -> u64 {
        let found = self.running().and_then(|running| {
            if running.own_names.iter().any(|own| own == segment) {
                return Ok(running
                    .agent
                    .regions()
                    .first()
                    .map_or(0, |region| region.addr() as u64));
            }
            let peer = running.peer(segment, interrupt)?;
            let timeout = running.timeout;
            let regions = aside(interrupt, move || peer.regions(timeout))??;
            Ok(regions.first().map_or(0, |region| region.addr))
        });
        self.note(found).unwrap_or(0)
    }

    /// What peers said, as names and messages.
    pub(crate) fn notifications(&self) -> Vec<(String, String)> {
        let text = |notification: Notification| {
            (notification.name, String::from_utf8_lossy(&notification.message).into_owned())
        };
        self.running()
            .map(|running| running.agent.notifications().into_iter().map(text).collect())
            .unwrap_or_default()
    }

    /// Asks a peer for a sign of life.
    pub(crate) fn probe(&self, target: &str, interrupt: Interrupt<'_>) -> i32 {
        self.code(self.running().and_then(|running| {
            let peer = running.peer(target, interrupt)?;
            let timeout = running.timeout;
            aside(interrupt, move || peer.probe(timeout))?
                .map(drop)
                .map_err(|error| Refusal::coded(codes::SOCKET, &error))
                .inspect_err(|refusal| running.forget(target, refusal))
        }))
    }

    /// Why the last call that failed did so.
    pub(crate) fn last_error(&self) -> String {
        if self.must_not_be_forked().is_err() {
            return FORKED.to_owned();
        }
        lock(&self.last_error).clone()
    }

    fn running(&self) -> Answer<Arc<Running>> {
        self.must_not_be_forked()?;
        lock(&self.running).clone().ok_or_else(|| Refusal::invalid("the engine is not initialized"))
    }

    /// Comes before any lock: another thread may have held it when the process was forked.
    fn must_not_be_forked(&self) -> Answer<()> {
        if std::process::id() == self.pid { Ok(()) } else { Err(Refusal::invalid(FORKED)) }
    }

    fn code(&self, answer: Answer<()>) -> i32 {
        self.note(answer).map_or_else(|code| code, |()| codes::OK)
    }

    /// Keeps the words of a failure, and lets only its code through.
    fn note<T>(&self, answer: Answer<T>) -> Result<T, i32> {
        answer.map_err(|refusal| {
            tracing::warn!(code = refusal.code, "{}", refusal.why);
            if self.must_not_be_forked().is_ok() {
                *lock(&self.last_error) = refusal.why;
            }
            refusal.code
        })
    }
}

impl Drop for MooncakeEngine {
    fn drop(&mut self) {
        self.shutdown();
    }
}

const FORKED: &str = "this process was forked from the one that made the engine; make another here";

impl Running {
    /// Tells the metadata server, if there is one, where this engine is and what it has.
    fn publish(&self) -> Answer<()> {
        if let Directory::Http(server) = &self.directory {
            server.publish_location(&self.name, self.agent.advertised())?;
        }
        self.publish_segment()
    }

    fn publish_segment(&self) -> Answer<()> {
        if let Directory::Http(server) = &self.directory
            && let Some(segment) = own_segment(self.agent.local_addr())
        {
            server.publish_segment(&self.name, segment)?;
        }
        Ok(())
    }

    fn end(&self) {
        if let Directory::Http(server) = &self.directory {
            server.forget(&self.name);
        }
        self.agent.shutdown();
    }

    /// The peer of this name. Resolves it if need be.
    fn peer(&self, target: &str, interrupt: Interrupt<'_>) -> Answer<Peer> {
        if let Some(peer) = lock(&self.peers).get(target) {
            return Ok(peer.clone());
        }
        let address = match &self.directory {
            Directory::PeerToPeer => with_port(target),
            Directory::Http(server) => {
                let (server, name) = (server.clone(), target.to_owned());
                aside(interrupt, move || server.look_up(&name))??
            }
        };
        let unknown = |error: Error| Refusal::coded(codes::NAME, &error);
        let peer = if address.parse::<std::net::SocketAddr>().is_ok() {
            self.agent.peer(&address).map_err(unknown)?
        } else {
            // A name server may take its time.
            let agent = self.agent.clone();
            aside(interrupt, move || agent.peer(&address))?.map_err(unknown)?
        };
        let mut peers = lock(&self.peers);
        if peers.len() >= PEERS_MAX {
            peers.clear();
        }
        peers.insert(target.to_owned(), peer.clone());
        Ok(peer)
    }

    /// Has a name resolved anew next time if the peer may have moved.
    fn forget(&self, target: &str, refusal: &Refusal) {
        if matches!(
            refusal.kind,
            Some(
                ErrorKind::Unreachable
                    | ErrorKind::PeerReset
                    | ErrorKind::PeerSilent
                    | ErrorKind::PeerClosed
            )
        ) {
            lock(&self.peers).remove(target);
        }
    }

    fn options(&self, batch: &Batch) -> Options<'static> {
        // Mooncake's rule: the time limit, and a nanosecond for each byte.
        let timeout = self.timeout + Duration::from_nanos(batch.bytes());
        Options { timeout: Some(timeout), ..Options::default() }
    }

    /// Makes sure that there is a session.
    fn meet(&self, peer: &Peer, interrupt: Interrupt<'_>) -> Answer<()> {
        if peer.transport().is_none() {
            let (peer, timeout) = (peer.clone(), self.timeout);
            aside(interrupt, move || peer.connect(timeout))??;
        }
        Ok(())
    }

    fn run(
        &self,
        peer: &Peer,
        call: &Call<'_>,
        batch: &Batch,
        interrupt: Interrupt<'_>,
    ) -> Answer<()> {
        let mut options = self.options(batch);
        options.interrupt = Some(interrupt);
        let mut notification = notification(call);
        if batch.is_empty() || notification.is_some() {
            // Nothing to move is still a failure if the peer is not there.
            self.meet(peer, interrupt)?;
        }
        if peer.transport() != Some(TransportKind::Mooncake) {
            options.notify = notification.take();
        }
        match call.direction {
            Direction::Write => peer.write(batch, &options),
            Direction::Read => peer.read(batch, &options),
        }?;
        // A stock peer is told when the bytes are there, as Mooncake does.
        if let Some(notification) = notification {
            peer.notify(notification, &options)?;
        }
        Ok(())
    }
}

/// The words of `initialize_ext`'s last two arguments as one of `initialize`'s.
pub(crate) fn connection_string(kind: &str, server: &str) -> String {
    if server == "P2PHANDSHAKE" || server.contains("://") {
        return server.to_owned();
    }
    format!("{kind}://{server}")
}

/// This machine's topology in Mooncake's JSON: its memory nodes, none of which prefers an adapter.
pub(crate) fn local_topology() -> String {
    let mut nodes: Vec<u32> = std::fs::read_dir("/sys/devices/system/node")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("node")?.parse().ok())
        .collect();
    nodes.sort_unstable();
    if nodes.is_empty() {
        nodes.push(0);
    }
    let node = |node| format!("\t\"cpu:{node}\" : \n\t[\n\t\t[],\n\t\t[]\n\t]");
    let nodes: Vec<_> = nodes.into_iter().map(node).collect();
    format!("{{\n{}\n}}\n", nodes.join(",\n"))
}

/// The agent's settings: the environment's, with Mooncake's habits where it does not say.
fn settings(local_hostname: &str, directory: &Directory) -> Answer<Config> {
    let mut config = Config::from_env()?;
    let host = host_of(local_hostname);
    let ip = host.parse::<IpAddr>().ok();
    if config.listen.is_none() {
        // All interfaces, as Mooncake does; but whoever says loopback means it.
        let listen = match ip {
            Some(IpAddr::V4(ip)) if ip.is_loopback() => "127.0.0.1:0",
            Some(IpAddr::V6(ip)) if ip.is_loopback() => "[::1]:0",
            Some(IpAddr::V6(_)) => "[::]:0",
            None if host == "localhost" => "127.0.0.1:0",
            _ => "0.0.0.0:0",
        };
        config.listen = Some(listen.to_owned());
    }
    // Mooncake takes any name; one that can't be an address is not advertised. Where names are
    // looked up, only what is an address for certain is.
    let is_name = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.' | b'_');
    let may_be_address =
        matches!(directory, Directory::PeerToPeer) && !host.is_empty() && host.bytes().all(is_name);
    if ip.is_some() || may_be_address {
        config.advertise = Some(host.to_owned());
    }
    config.mooncake = true;
    Ok(config)
}

/// How long a transfer may take: what kvferry is told, else what Mooncake is told, else the
/// default.
fn time_limit(config: &Config) -> Duration {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    if set("KVFERRY_TIMEOUT_MS").is_none()
        && let Some(seconds) = set("MC_TRANSFER_TIMEOUT").and_then(|s| s.trim().parse::<u32>().ok())
    {
        return Duration::from_secs(seconds.max(5).into());
    }
    Duration::from_millis(config.timeout_ms)
}

fn notification(call: &Call<'_>) -> Option<Notification> {
    let (name, message) = call.notify.clone()?;
    Some(Notification { from: String::new(), name, message: message.into_bytes() })
}

/// The pieces to move. Empty ones are nothing to move, wherever they are.
fn batch([locals, remotes, lengths]: &[Vec<u64>; 3]) -> Answer<Batch> {
    if locals.len() != remotes.len() || locals.len() != lengths.len() {
        return Err(Refusal::invalid(
            "the lists of buffers, peer addresses and lengths differ in length",
        ));
    }
    let mut batch = Batch::with_capacity(locals.len());
    for ((local, remote), len) in locals.iter().zip(remotes).zip(lengths) {
        if *len == 0 {
            continue;
        }
        if *local == 0 {
            return Err(Refusal::invalid("a local buffer is null"));
        }
        let local = pointer(*local)?;
        // SAFETY: that local memory is valid until the outcome is the caller's promise, as in
        // Mooncake, which does not ask for its registration either.
        unsafe { batch.push_raw(local, *remote, *len) }?;
    }
    Ok(batch)
}

fn size(value: u64) -> Answer<usize> {
    usize::try_from(value)
        .map_err(|_| Refusal::invalid(format_args!("{value:#x} is beyond this machine")))
}

fn pointer(addr: u64) -> Answer<*mut u8> {
    size(addr).map(std::ptr::with_exposed_provenance_mut)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
