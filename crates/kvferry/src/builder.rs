//! [`AgentBuilder`]: the settings of an agent, one method each.

use crate::agent::Agent;
use crate::config::{Checksum, Config, empty_secret};
use crate::error::Result;
use crate::transport::Transports;
use kvferry_proto::Secret;
use std::net::SocketAddr;
use std::time::Duration;

/// The settings of an agent to be started. A setting made here wins over the environment variables
/// of [`Config`], which win over the defaults.
#[derive(Debug, Default)]
pub struct AgentBuilder {
    config: Option<Config>,
    name: Option<String>,
    listen: Option<String>,
    advertise: Option<String>,
    /// `Some(None)`: the caller passed an empty secret, which [`AgentBuilder::build`] refuses.
    secret: Option<Option<Secret>>,
    transports: Option<Transports>,
    io_threads: Option<usize>,
    streams_per_peer: Option<usize>,
    checksum: Option<Checksum>,
    silence: Option<Duration>,
    timeout: Option<Duration>,
    peer_memory: Option<u64>,
    /// Settings of transports, in the order of the calls.
    settings: Vec<(String, String)>,
}

impl AgentBuilder {
    /// Starts from this configuration instead of the environment.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// The agent's name, 1 to 256 bytes.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The address to listen on; port 0 lets the kernel choose.
    #[must_use]
    pub fn listen(mut self, addr: impl Into<SocketAddr>) -> Self {
        self.listen = Some(addr.into().to_string());
        self
    }

    /// The `host` or `host:port` that the agent tells its peers.
    ///
    /// Without it: the first of `KVFERRY_ADVERTISE`, `HOST_IP` and `POD_IP` that is set, unless the
    /// agent listens on loopback only; else the listening address, if it belongs to one interface;
    /// else the source address of the default route. A peer on another host never gets a loopback
    /// address; it gets the address that it connected to.
    #[must_use]
    pub fn advertise(mut self, address: impl Into<String>) -> Self {
        self.advertise = Some(address.into());
        self
    }

    /// The secret, shared by all agents that may connect to each other. [`AgentBuilder::build`]
    /// refuses an empty one.
    #[must_use]
    pub fn secret(mut self, secret: &[u8]) -> Self {
        self.secret = Some(Secret::new(secret));
        self
    }

    /// The transports that the agent may use. Default: all that the program
    /// has ([`transport::link`](crate::transport::link)).
    #[must_use]
    pub fn transports(mut self, transports: Transports) -> Self {
        self.transports = Some(transports);
        self
    }

    /// Number of I/O threads, 1 to 64. Default: half of the cores.
    #[must_use]
    pub fn io_threads(mut self, n: usize) -> Self {
        self.io_threads = Some(n);
        self
    }

    /// The largest number of data streams to one peer, 1 to 64. Default: twice the I/O threads, at
    /// least 4.
    #[must_use]
    pub fn streams_per_peer(mut self, n: usize) -> Self {
        self.streams_per_peer = Some(n);
        self
    }

    /// Whether payload carries CRC32C checksums.
    #[must_use]
    pub fn checksum(mut self, checksum: Checksum) -> Self {
        self.checksum = Some(checksum);
        self
    }

    /// Sets the longest silence of a peer during a transfer, after which its session ends with
    /// `PeerSilent`: 0.1 to 600 s. Default: 3 s.
    #[must_use]
    pub fn silence(mut self, silence: Duration) -> Self {
        self.silence = Some(silence);
        self
    }

    /// The time limit of a transfer whose caller sets none, 1 ms to 24 h. Default: 30 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Bytes that all peers together may make the agent hold; see [`Config::peer_memory`]. Default: 1/64
    /// of the memory that the process may use, at least 64 MiB.
    #[must_use]
    pub fn peer_memory(mut self, bytes: u64) -> Self {
        self.peer_memory = Some(bytes);
        self
    }

    /// Sets a setting of a transport by its name, such as `setting("ptracer_any", true)` or
    /// `setting("file_engine", "posix")`. [`TransportSettings::all`](crate::TransportSettings::all) lists
    /// them. [`AgentBuilder::build`] refuses unknown names and values.
    #[must_use]
    pub fn setting(mut self, name: &str, value: impl ToString) -> Self {
        self.settings.push((name.to_owned(), value.to_string()));
        self
    }

    /// The configuration that [`AgentBuilder::start`] would use.
    ///
    /// # Errors
    /// As [`Config::from_env`]; `InvalidArgument` if the secret is empty, or a setting of a transport is
    /// unknown or does not have the value.
    pub fn build(self) -> Result<Config> {
        let mut config = match self.config {
            Some(config) => config,
            None => Config::from_env()?,
        };
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        if let Some(secret) = self.secret {
            config.secret = Some(secret.ok_or_else(|| empty_secret("the secret"))?);
        }
        config.name = self.name.unwrap_or(config.name);
        config.listen = self.listen.or(config.listen);
        config.advertise = self.advertise.or(config.advertise);
        config.transports = self.transports.unwrap_or(config.transports);
        config.io_threads = self.io_threads.or(config.io_threads);
        config.streams_per_peer = self.streams_per_peer.or(config.streams_per_peer);
        config.checksum = self.checksum.unwrap_or(config.checksum);
        config.silence_ms = self.silence.map_or(config.silence_ms, ms);
        config.timeout_ms = self.timeout.map_or(config.timeout_ms, ms);
        config.peer_memory = self.peer_memory.or(config.peer_memory);
        for (name, value) in self.settings {
            config.transport_settings.set(&name, value)?;
        }
        Ok(config)
    }

    /// Starts the agent.
    ///
    /// # Errors
    /// As [`Agent::start`] and [`AgentBuilder::build`].
    pub fn start(self) -> Result<Agent> {
        Agent::start(self.build()?)
    }
}
