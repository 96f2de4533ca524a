//! Mooncake's transfer engine, implemented by a kvferry agent.
//!
//! Plain Rust without Python: calls take addresses and return Mooncake's codes. Like Mooncake, the
//! engine accepts local memory that is not registered, empty batches, empty pieces and a second
//! `initialize`. The differences: a call that failed has stopped copying when it returns; ids are
//! unique; a peer that restarted is connected to again; a call before `initialize` fails instead of
//! crashing.

use super::codes::{self, status};
use super::handles::Handles;
use super::managed::Managed;
use super::metadata::{Directory, host_of, join, own_segment, with_port};
use crate::blocking::lock;
use crate::run_interruptible::{CHECK_INTERVAL, Interrupt, NoAnswer, run_interruptible};
use kvferry::{
    Access, Agent, Batch, Config, Error, ErrorKind, Notification, Options, Peer, TransportKind,
};
use std::collections::HashMap;
use std::fmt::Display;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The most peers whose resolved names are kept. When it is reached the cache is cleared, and every
/// name is resolved once more.
const PEERS_MAX: usize = 4_096;

/// What a transfer moves, and which way.
#[derive(Debug)]
pub(crate) struct Moves {
    /// To the peer's memory, rather than from it.
    pub(crate) write: bool,
    /// The peer's name.
    pub(crate) target: String,
    /// The pieces, or why the caller's lists are no batch.
    pub(crate) batch: Result<Batch, String>,
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
    /// The first argument of `initialize`: the name under which a metadata server knows the engine.
    name: String,
    /// The names by which the caller may address this engine itself.
    own_names: [String; 3],
    directory: Directory,
    peers: Mutex<HashMap<String, Peer>>,
    handles: Mutex<Handles>,
    managed: Mutex<Managed>,
    timeout: Duration,
}

/// Why a call fails.
#[derive(Debug)]
struct Refusal {
    /// What the call returns.
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

    fn metadata(why: String) -> Self {
        Self::new(codes::METADATA, why)
    }

    /// Transfers return one code for every failure.
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

impl From<NoAnswer> for Refusal {
    fn from(reason: NoAnswer) -> Self {
        match reason {
            NoAnswer::Interrupted => Self::invalid("interrupted"),
            NoAnswer::Thread(error) => Self::invalid(format_args!(
                "the call needs a thread, which can't be started: {error}"
            )),
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

    /// Starts an agent for this engine; shuts down the one before.
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
            // Mooncake fails, too.
            return Err(Refusal::invalid("kvferry does not support the protocol \"xgmi\""));
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
            run_interruptible(interrupt, move || published.publish())?
                .map_err(Refusal::uncoded)
                .inspect_err(|_| running.end())?;
        }
        let before = lock(&self.running).replace(running);
        if let Some(before) = before {
            before.end();
        }
        Ok(())
    }

    /// Shuts the agent down, if there is one.
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

    /// A number that identifies this engine while it runs, else 0.
    pub(crate) fn identity(&self) -> u64 {
        if self.is_running() { self.identity } else { 0 }
    }

    /// The port that peers connect to; 0 while the engine does not run.
    pub(crate) fn rpc_port(&self) -> u16 {
        self.running().map_or(0, |running| running.agent.local_addr().port())
    }

    /// Registers ranges, all or none. Ignores lengths beyond the number of addresses, as Mooncake
    /// does.
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
            // SAFETY: the caller promises that the memory stays mapped until it is unregistered, as in
            // Mooncake.
            let regions = unsafe { running.agent.register_batch(&ranges, Access::READ_WRITE) }?;
            running.publish_segment().inspect_err(|_| {
                // Memory that peers can't find out about does not stay registered.
                let _ = running.agent.unregister_batch(&regions);
            })
        }))
    }

    /// Unregisters ranges, each even if another fails. Returns the first failure.
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

    /// Moves bytes and waits for the outcome. The notification, a name and a message, follows them.
    pub(crate) fn transfer(
        &self,
        moves: Moves,
        notify: Option<(String, String)>,
        interrupt: Interrupt<'_>,
    ) -> i32 {
        let Moves { write, target, batch } = moves;
        let done = self.running().and_then(|running| {
            let peer = running.peer(&target, interrupt)?;
            let batch = batch.map_err(Refusal::invalid)?;
            running
                .run(&peer, write, &batch, notify, interrupt)
                .inspect_err(|refusal| running.forget(&target, refusal))
        });
        self.code(done.map_err(Refusal::uncoded))
    }

    /// Starts moving bytes. Returns the id that [`Self::wait`] and [`Self::check`] take, or
    /// [`codes::NO_ID`].
    pub(crate) fn submit(&self, moves: Moves, interrupt: Interrupt<'_>) -> u64 {
        let Moves { write, target, batch } = moves;
        let submitted = self.running().and_then(|running| {
            let peer = running.peer(&target, interrupt)?;
            let batch = batch.map_err(Refusal::invalid)?;
            if lock(&running.handles).is_full() {
                return Err(Refusal::invalid(TOO_MANY_IDS));
            }
            // Report an unreachable peer at once: callers test the id, and may never ask for the
            // status.
            running
                .connect(&peer, interrupt)
                .inspect_err(|refusal| running.forget(&target, refusal))?;
            let options = running.options(&batch);
            let transfer = if write {
                peer.write_async(&batch, &options)
            } else {
                peer.read_async(&batch, &options)
            };
            lock(&running.handles).add(transfer).map_err(|transfer| {
                transfer.cancel();
                Refusal::invalid(TOO_MANY_IDS)
            })
        });
        self.note(submitted).unwrap_or(codes::NO_ID)
    }

    /// Waits for the outcome of all ids and uses them up. If interrupted, the ids left stay valid.
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
                    if let Some(outcome) = transfer.wait(CHECK_INTERVAL) {
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

    /// The status of an id, see [`status`].
    pub(crate) fn check(&self, id: u64) -> i32 {
        let checked = self.running().and_then(|running| {
            let mut handles = lock(&running.handles);
            let Some(transfer) = handles.get(id) else {
                return Err(Refusal::new(
                    status::FAILED,
                    format_args!("no transfer has the id {id}"),
                ));
            };
            match transfer.outcome() {
                None => Ok(status::RUNNING),
                Some(Ok(_)) => {
                    handles.take(id);
                    Ok(status::DONE)
                }
                // The id stays valid, as in Mooncake: callers ask again, or wait for it.
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

    /// Frees memory of [`Self::allocate`].
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
            let regions = run_interruptible(interrupt, move || peer.regions(timeout))??;
            Ok(regions.first().map_or(0, |region| region.addr))
        });
        self.note(found).unwrap_or(0)
    }

    /// Takes the notifications that have arrived: names and messages.
    pub(crate) fn notifications(&self) -> Vec<(String, String)> {
        let text = |notification: Notification| {
            (notification.name, String::from_utf8_lossy(&notification.message).into_owned())
        };
        self.running()
            .map(|running| running.agent.notifications().into_iter().map(text).collect())
            .unwrap_or_default()
    }

    /// Checks that a peer answers.
    pub(crate) fn probe(&self, target: &str, interrupt: Interrupt<'_>) -> i32 {
        self.code(self.running().and_then(|running| {
            let peer = running.peer(target, interrupt)?;
            let timeout = running.timeout;
            run_interruptible(interrupt, move || peer.probe(timeout))?
                .map(drop)
                .map_err(|error| Refusal::coded(codes::SOCKET, &error))
                .inspect_err(|refusal| running.forget(target, refusal))
        }))
    }

    /// The reason of the last failure; empty if no call failed.
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

    /// Check this before any lock: another thread may have held the lock at the fork.
    fn must_not_be_forked(&self) -> Answer<()> {
        if std::process::id() == self.pid { Ok(()) } else { Err(Refusal::invalid(FORKED)) }
    }

    fn code(&self, answer: Answer<()>) -> i32 {
        self.note(answer).map_or_else(|code| code, |()| codes::OK)
    }

    /// Stores the reason of a failure and returns its code.
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

const TOO_MANY_IDS: &str = "too many transfers have an outcome that was never asked for";
const FORKED: &str =
    "this process was forked from the one that created the engine; create another here";

impl Running {
    /// Publishes the engine's address and regions at the metadata server, if there is one.
    fn publish(&self) -> Answer<()> {
        if let Directory::Http(server) = &self.directory {
            let location = self.agent.advertised();
            server.publish_location(&self.name, location).map_err(Refusal::metadata)?;
        }
        self.publish_segment()
    }

    fn publish_segment(&self) -> Answer<()> {
        if let Directory::Http(server) = &self.directory
            && let Some(segment) = own_segment(self.agent.local_addr())
        {
            server.publish_segment(&self.name, segment).map_err(Refusal::metadata)?;
        }
        Ok(())
    }

    fn end(&self) {
        if let Directory::Http(server) = &self.directory {
            server.forget(&self.name);
        }
        self.agent.shutdown();
    }

    /// The peer of this name, from the cache or resolved.
    fn peer(&self, target: &str, interrupt: Interrupt<'_>) -> Answer<Peer> {
        if let Some(peer) = lock(&self.peers).get(target) {
            return Ok(peer.clone());
        }
        let address = match &self.directory {
            Directory::PeerToPeer => with_port(target),
            Directory::Http(server) => {
                let (server, name) = (server.clone(), target.to_owned());
                run_interruptible(interrupt, move || server.look_up(&name))?
                    .map_err(Refusal::metadata)?
            }
        };
        let unknown = |error: Error| Refusal::coded(codes::NAME, &error);
        let peer = if address.parse::<std::net::SocketAddr>().is_ok() {
            self.agent.peer(&address).map_err(unknown)?
        } else {
            // Resolving a name may block.
            let agent = self.agent.clone();
            run_interruptible(interrupt, move || agent.peer(&address))?.map_err(unknown)?
        };
        let mut peers = lock(&self.peers);
        if peers.len() >= PEERS_MAX {
            peers.clear();
        }
        peers.insert(target.to_owned(), peer.clone());
        Ok(peer)
    }

    /// Drops a name from the cache if the peer may have another address now.
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
        // Mooncake's rule: the time limit plus one nanosecond per byte.
        let timeout = self.timeout + Duration::from_nanos(batch.bytes());
        Options { timeout: Some(timeout), ..Options::default() }
    }

    /// Connects to the peer if there is no session.
    fn connect(&self, peer: &Peer, interrupt: Interrupt<'_>) -> Answer<()> {
        if peer.transport().is_none() {
            let (peer, timeout) = (peer.clone(), self.timeout);
            run_interruptible(interrupt, move || peer.connect(timeout))??;
        }
        Ok(())
    }

    fn run(
        &self,
        peer: &Peer,
        write: bool,
        batch: &Batch,
        notify: Option<(String, String)>,
        interrupt: Interrupt<'_>,
    ) -> Answer<()> {
        let mut options = self.options(batch);
        options.interrupt = Some(interrupt);
        let mut notification = notify.map(|(name, message)| Notification {
            from: String::new(),
            name,
            message: message.into_bytes(),
        });
        if batch.is_empty() || notification.is_some() {
            // An empty batch fails, too, if the peer cannot be reached.
            self.connect(peer, interrupt)?;
        }
        if peer.transport() != Some(TransportKind::MOONCAKE) {
            options.notify = notification.take();
        }
        if write { peer.write(batch, &options) } else { peer.read(batch, &options) }?;
        // Mooncake's transfers carry no notification: a stock peer gets it after the data.
        if let Some(notification) = notification {
            peer.notify(notification, &options)?;
        }
        Ok(())
    }
}

/// The agent's settings: the environment's, else Mooncake's defaults.
fn settings(local_hostname: &str, directory: &Directory) -> Answer<Config> {
    let mut config = Config::from_env()?;
    let host = host_of(local_hostname);
    let ip = host.parse::<IpAddr>().ok();
    if config.listen.is_none() {
        // All interfaces, as Mooncake; only loopback if the host is loopback.
        let listen = match ip {
            Some(IpAddr::V4(ip)) if ip.is_loopback() => "127.0.0.1:0",
            Some(IpAddr::V6(ip)) if ip.is_loopback() => "[::1]:0",
            Some(IpAddr::V6(_)) => "[::]:0",
            None if host == "localhost" => "127.0.0.1:0",
            _ => "0.0.0.0:0",
        };
        config.listen = Some(listen.to_owned());
    }
    // Mooncake accepts any name. Without a metadata server, advertise every name that may be a host;
    // with one, names are keys of that server, so advertise IP addresses only.
    let is_name = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.' | b'_');
    let may_be_address =
        matches!(directory, Directory::PeerToPeer) && !host.is_empty() && host.bytes().all(is_name);
    if ip.is_some() || may_be_address {
        config.advertise = Some(host.to_owned());
    }
    config.mooncake = true;
    Ok(config)
}

/// The time limit of a transfer: `KVFERRY_TIMEOUT_MS`, else Mooncake's `MC_TRANSFER_TIMEOUT`, else
/// the default.
fn time_limit(config: &Config) -> Duration {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    if set("KVFERRY_TIMEOUT_MS").is_none()
        && let Some(seconds) = set("MC_TRANSFER_TIMEOUT").and_then(|s| s.trim().parse::<u32>().ok())
    {
        return Duration::from_secs(seconds.max(5).into());
    }
    Duration::from_millis(config.timeout_ms)
}

fn size(value: u64) -> Answer<usize> {
    usize::try_from(value).map_err(|_| {
        Refusal::invalid(format_args!("{value:#x} does not fit an address of this machine"))
    })
}

fn pointer(addr: u64) -> Answer<*mut u8> {
    size(addr).map(std::ptr::with_exposed_provenance_mut)
}
