//! The engine between `initialize` and its end, and the settings of its agent.

use crate::batches::Batches;
use crate::codes;
use crate::handles::Handles;
use crate::interrupt::{Interrupt, run_interruptible};
use crate::managed::Managed;
use crate::memory::Orders;
use crate::metadata::{Directory, host_of, join, own_segment, with_port};
use crate::notifier::Notifier;
use crate::refusal::{Answer, Refusal};
use crate::segments::{LOCAL_SEGMENT, Segments};
use crate::transport::{KIND, link};
use kvferry::{Agent, Batch, Config, Error, ErrorKind, Notification, Options, Peer};
use kvferry_sys::sync::Mutex;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// The most peers whose resolved names are kept. When it is reached the cache is cleared, and every
/// name is resolved once more.
const PEERS_MAX: usize = 4_096;

/// The engine between `initialize` and its end.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) agent: Agent,
    /// The first argument of `initialize`: the name under which a metadata server knows the engine.
    name: String,
    /// The names by which the caller may address this engine itself.
    pub(crate) own_names: [String; 3],
    pub(crate) directory: Directory,
    peers: Mutex<HashMap<String, Peer>>,
    pub(crate) handles: Mutex<Handles>,
    pub(crate) managed: Mutex<Managed>,
    pub(crate) segments: Mutex<Segments>,
    pub(crate) batches: Batches,
    pub(crate) notifier: Notifier,
    pub(crate) timeout: Duration,
    /// The order of transfers of memory of GPUs.
    pub(crate) after: Mutex<Orders>,
}

impl Running {
    /// Starts the agent. `host` is where peers connect to; if it is empty, the host in the name.
    pub(crate) fn start(local_hostname: &str, host: &str, directory: Directory) -> Answer<Self> {
        let reachable = if host.is_empty() { local_hostname } else { host };
        let config = settings(reachable, &directory)?;
        let timeout = time_limit(&config);
        let after = Mutex::new(Orders::from_env()?);
        let agent = Agent::start(config)?;
        let port = agent.local_addr().port();
        Ok(Self {
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
            segments: Mutex::default(),
            batches: Batches::default(),
            notifier: Notifier::default(),
            timeout,
            after,
        })
    }

    /// Publishes the engine's address and regions at the metadata server, if there is one.
    pub(crate) fn publish(&self) -> Answer<()> {
        if let Directory::Http(server) = &self.directory {
            let location = self.agent.advertised();
            server.publish_location(&self.name, location).map_err(Refusal::metadata)?;
        }
        self.publish_segment()
    }

    pub(crate) fn publish_segment(&self) -> Answer<()> {
        if let Directory::Http(server) = &self.directory
            && let Some(segment) = own_segment(self.agent.local_addr())
        {
            server.publish_segment(&self.name, segment).map_err(Refusal::metadata)?;
        }
        Ok(())
    }

    pub(crate) fn end(&self) {
        if let Directory::Http(server) = &self.directory {
            server.forget(&self.name);
        }
        self.agent.shutdown();
    }

    /// The peer of this name, from the cache or resolved.
    pub(crate) fn peer(&self, target: &str, interrupt: Interrupt<'_>) -> Answer<Peer> {
        if let Some(peer) = self.peers.lock().get(target) {
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
        let peer = if address.parse::<SocketAddr>().is_ok() {
            self.agent.peer(&address).map_err(unknown)?
        } else {
            // Resolving a name may block.
            let agent = self.agent.clone();
            run_interruptible(interrupt, move || agent.peer(&address))?.map_err(unknown)?
        };
        let mut peers = self.peers.lock();
        if peers.len() >= PEERS_MAX {
            peers.clear();
        }
        peers.insert(target.to_owned(), peer.clone());
        Ok(peer)
    }

    /// The peer that a number stands for.
    pub(crate) fn segment(&self, number: i32) -> Answer<Peer> {
        if number == LOCAL_SEGMENT {
            return Ok(self.agent.peer(&self_address(self.agent.local_addr()).to_string())?);
        }
        let name = self.segments.lock().name(number).map(str::to_owned);
        let unknown = || Refusal::invalid(format_args!("no segment has the number {number}"));
        self.peer(&name.ok_or_else(unknown)?, &|| false)
    }

    /// Drops a name from the cache if the peer may have another address now.
    pub(crate) fn forget(&self, target: &str, refusal: &Refusal) {
        if matches!(
            refusal.kind,
            Some(
                ErrorKind::Unreachable
                    | ErrorKind::PeerReset
                    | ErrorKind::PeerSilent
                    | ErrorKind::PeerClosed
            )
        ) {
            self.forget_name(target);
        }
    }

    /// Drops a name from the cache.
    pub(crate) fn forget_name(&self, target: &str) {
        self.peers.lock().remove(target);
    }

    /// Finds memory of GPUs in a batch, and orders its transfers.
    pub(crate) fn prepare(&self, batch: &mut Batch) -> Answer<()> {
        let after = self.after.lock().clone();
        after.apply(self, batch)
    }

    pub(crate) fn options(&self, batch: &Batch) -> Options<'static> {
        // Mooncake's rule: the time limit plus one nanosecond per byte.
        let timeout = self.timeout + Duration::from_nanos(batch.bytes());
        Options { timeout: Some(timeout), ..Options::default() }
    }

    /// Connects to the peer if there is no session.
    pub(crate) fn connect(&self, peer: &Peer, interrupt: Interrupt<'_>) -> Answer<()> {
        if peer.transport().is_none() {
            let (peer, timeout) = (peer.clone(), self.timeout);
            run_interruptible(interrupt, move || peer.connect(timeout))??;
        }
        Ok(())
    }

    pub(crate) fn run(
        &self,
        peer: &Peer,
        write: bool,
        batch: &Batch,
        notify: Option<(String, String)>,
        interrupt: Interrupt<'_>,
    ) -> Answer<()> {
        let mut options = self.options(batch);
        options.interrupt = Some(interrupt);
        let mut notification = notify.map(|(name, message)| Notification::new(name, message));
        if batch.is_empty() || notification.is_some() {
            // An empty batch fails, too, if the peer cannot be reached.
            self.connect(peer, interrupt)?;
        }
        if peer.transport() != Some(KIND) {
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

/// The address at which an agent reaches itself.
fn self_address(listening: SocketAddr) -> SocketAddr {
    let ip = match listening.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, listening.port())
}

/// The agent's settings: the environment's, else Mooncake's defaults.
fn settings(local_hostname: &str, directory: &Directory) -> Answer<Config> {
    link();
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
    config.transport_settings.set("mooncake", true)?;
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

pub(crate) fn size(value: u64) -> Answer<usize> {
    usize::try_from(value).map_err(|_| {
        Refusal::invalid(format_args!("{value:#x} does not fit an address of this machine"))
    })
}

pub(crate) fn pointer(addr: u64) -> Answer<*mut u8> {
    size(addr).map(std::ptr::with_exposed_provenance_mut)
}
