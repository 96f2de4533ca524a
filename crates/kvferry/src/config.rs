//! What an agent is told: one versioned structure, keyed by name, and where each value may come
//! from.
//!
//! A value given to the builder wins over the environment, which wins over the default.

use crate::address::{self, AdvertisedBy};
use crate::error::{Error, ErrorKind, Result};
use crate::transport::Transports;
use kvferry_proto::Secret;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The version of [`Config`] that this build writes, and the highest it reads.
pub const CONFIG_VERSION: u32 = 1;

/// Whether payload carries CRC32C checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checksum {
    /// On between hosts, off on one host.
    #[default]
    Auto,
    /// Always, with peers that can.
    On,
    /// Unless the peer asks for them.
    Off,
}

impl Checksum {
    fn parse(text: &str) -> Result<Self> {
        match text.to_ascii_lowercase().as_str() {
            "auto" | "" => Ok(Self::Auto),
            "on" | "1" | "true" => Ok(Self::On),
            "off" | "0" | "false" => Ok(Self::Off),
            _ => {
                Err(Error::new(ErrorKind::InvalidArgument, "a checksum setting is auto, on or off")
                    .with("value", text))
            }
        }
    }
}

/// A secret that is never shown: not by `Debug`, not in JSON.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SecretString(Vec<u8>);

impl SecretString {
    /// Takes over a secret; an empty one is none.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    pub(crate) fn to_secret(&self) -> Option<Secret> {
        Secret::new(self.0.clone())
    }
}

impl fmt::Debug for SecretString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretString(..)")
    }
}

/// The settings of an agent.
///
/// | field | environment | default |
/// |---|---|---|
/// | `name` | `KVFERRY_NAME` | `kvferry-<pid>` |
/// | `listen` | `KVFERRY_LISTEN` | `127.0.0.1:0` |
/// | `advertise` | `KVFERRY_ADVERTISE`, `HOST_IP`, `POD_IP` | see [`AgentBuilder::advertise`](crate::AgentBuilder::advertise) |
/// | `transports` | `KVFERRY_TRANSPORTS` | all this build has |
/// | `secret` | `KVFERRY_SECRET_FILE`, `KVFERRY_SECRET` | none |
/// | `io_threads` | `KVFERRY_IO_THREADS` | half of the cores, 1 to 4 |
/// | `streams_per_peer` | `KVFERRY_STREAMS` | 2 × I/O threads, at least 4 |
/// | `checksum` | `KVFERRY_CHECKSUM` | auto |
/// | `silence_ms` | `KVFERRY_SILENCE_MS` | 3000 |
/// | `timeout_ms` | `KVFERRY_TIMEOUT_MS` | 30000 |
/// | `mooncake` | – | false |
/// | `ptracer_any` | `KVFERRY_PTRACER_ANY` | false |
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Version of this structure; see [`CONFIG_VERSION`].
    pub version: u32,
    /// The agent's name, for people and notifications. At most 256 bytes.
    pub name: String,
    /// `host:port` to listen on; port 0 lets the kernel choose. `0.0.0.0` or `[::]` is every
    /// interface.
    pub listen: Option<String>,
    /// `host` or `host:port` that peers are told.
    pub advertise: Option<String>,
    /// The transports that may be used, separated by commas; all if not given.
    pub transports: Option<String>,
    /// Shared by all agents that may talk to each other. Not part of the JSON.
    #[serde(skip)]
    pub secret: Option<SecretString>,
    /// Threads that move what comes in and what is asynchronous, 1 to 64.
    pub io_threads: Option<usize>,
    /// Connections that carry data to one peer at most, 1 to 64.
    pub streams_per_peer: Option<usize>,
    /// Whether payload carries checksums.
    pub checksum: Checksum,
    /// Milliseconds that a peer may be silent while something is in flight, 100 to 600 000.
    pub silence_ms: u64,
    /// Milliseconds a transfer may take if its caller does not say, 1 to 86 400 000.
    pub timeout_ms: u64,
    /// Whether stock Mooncake peers are served: opens a second port.
    pub mooncake: bool,
    /// Whether any process of the same user may attach to this one; see
    /// [`AgentBuilder::ptracer_any`](crate::AgentBuilder::ptracer_any).
    pub ptracer_any: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            version: CONFIG_VERSION,
            name: format!("kvferry-{}", std::process::id()),
            listen: None,
            advertise: None,
            transports: None,
            secret: None,
            io_threads: None,
            streams_per_peer: None,
            checksum: Checksum::Auto,
            silence_ms: 3_000,
            timeout_ms: 30_000,
            mooncake: false,
            ptracer_any: false,
        }
    }
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn env_number<T: std::str::FromStr>(name: &'static str) -> Result<Option<T>> {
    let Some(text) = env(name) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| {
        Error::new(ErrorKind::InvalidArgument, "an environment variable should hold a number")
            .with("variable", name)
            .with("value", text)
    })
}

fn secret_from_env() -> Result<Option<SecretString>> {
    if let Some(path) = env("KVFERRY_SECRET_FILE") {
        let bytes = std::fs::read(&path).map_err(|e| {
            Error::io("the file that KVFERRY_SECRET_FILE names can't be read", e).with("file", path)
        })?;
        return Ok(Some(SecretString::new(bytes.trim_ascii_end())));
    }
    Ok(env("KVFERRY_SECRET").map(SecretString::new))
}

impl Config {
    /// The defaults, with what the environment says.
    ///
    /// # Errors
    /// `InvalidArgument` if a variable holds nonsense, `Io` if the secret's file can't be read.
    pub fn from_env() -> Result<Self> {
        let mut config = Self::default();
        if let Some(name) = env("KVFERRY_NAME") {
            config.name = name;
        }
        config.listen = env("KVFERRY_LISTEN");
        config.transports = env("KVFERRY_TRANSPORTS");
        config.secret = secret_from_env()?;
        config.io_threads = env_number("KVFERRY_IO_THREADS")?;
        config.streams_per_peer = env_number("KVFERRY_STREAMS")?;
        if let Some(text) = env("KVFERRY_CHECKSUM") {
            config.checksum = Checksum::parse(&text)?;
        }
        config.ptracer_any = env_number::<u8>("KVFERRY_PTRACER_ANY")?.is_some_and(|on| on != 0);
        if let Some(ms) = env_number("KVFERRY_SILENCE_MS")? {
            config.silence_ms = ms;
        }
        if let Some(ms) = env_number("KVFERRY_TIMEOUT_MS")? {
            config.timeout_ms = ms;
        }
        Ok(config)
    }

    /// Reads what [`Config::to_json`] wrote; fields that are missing have their defaults.
    ///
    /// # Errors
    /// `InvalidArgument` for anything else, including unknown fields and later versions.
    pub fn from_json(json: &str) -> Result<Self> {
        let config: Self = serde_json::from_str(json).map_err(|e| {
            Error::new(ErrorKind::InvalidArgument, "not a configuration").caused_by(e)
        })?;
        config.check()?;
        Ok(config)
    }

    /// The configuration as JSON, without the secret.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain values always encode")
    }

    /// Whether an agent would take this configuration.
    ///
    /// # Errors
    /// `InvalidArgument` and `VersionMismatch`, with what is wrong.
    pub fn check(&self) -> Result<()> {
        let range = |what: &'static str, value: u64, min: u64, max: u64| {
            if (min..=max).contains(&value) {
                return Ok(());
            }
            Err(Error::new(ErrorKind::InvalidArgument, format!("{what} is {min} to {max}"))
                .with("value", value))
        };
        if self.version == 0 || self.version > CONFIG_VERSION {
            return Err(Error::new(
                ErrorKind::VersionMismatch,
                "the configuration is of a version this build does not read",
            )
            .with("version", self.version)
            .with("highest", CONFIG_VERSION));
        }
        range("silence_ms", self.silence_ms, 100, 600_000)?;
        range("timeout_ms", self.timeout_ms, 1, 86_400_000)?;
        range("io_threads", self.io_threads() as u64, 1, 64)?;
        range("streams_per_peer", self.streams_per_peer() as u64, 1, 64)?;
        if self.name.is_empty() || self.name.len() > 256 {
            return Err(Error::new(ErrorKind::InvalidArgument, "a name has 1 to 256 bytes"));
        }
        self.transports()?;
        Ok(())
    }

    pub(crate) fn io_threads(&self) -> usize {
        self.io_threads.unwrap_or_else(|| (kvferry_sys::thread::cores() / 2).clamp(1, 4))
    }

    pub(crate) fn streams_per_peer(&self) -> usize {
        self.streams_per_peer.unwrap_or_else(|| (2 * self.io_threads()).clamp(4, 64))
    }

    pub(crate) fn silence(&self) -> Duration {
        Duration::from_millis(self.silence_ms)
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    pub(crate) fn transports(&self) -> Result<Transports> {
        self.transports.as_deref().map_or_else(|| Ok(Transports::ALL), Transports::parse)
    }

    /// Where an agent with this configuration listens, what its peers are told, and by which rule;
    /// found without starting one. A port of 0 is the kernel's to choose.
    ///
    /// # Errors
    /// `InvalidArgument` for nonsense, `Io` if no address can be found.
    pub fn addresses(&self) -> Result<(std::net::SocketAddr, String, AdvertisedBy)> {
        let listening = self.listen_addr()?;
        let (told, by) = address::advertised_by(self.advertise.as_deref(), listening)?;
        Ok((listening, told, by))
    }

    pub(crate) fn listen_addr(&self) -> Result<std::net::SocketAddr> {
        address::parse_listen(self.listen.as_deref().unwrap_or("127.0.0.1:0"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_of_version_1_stays_readable() {
        let golden = r#"{"version":1,"name":"decode-0","listen":"0.0.0.0:18515","advertise":null,
            "transports":"tcp","io_threads":4,"streams_per_peer":8,"checksum":"on",
            "silence_ms":3000,"timeout_ms":30000,"mooncake":true}"#;
        let config = Config::from_json(golden).expect("golden");
        assert_eq!(config.checksum, Checksum::On);
        assert_eq!(config.streams_per_peer(), 8);
        assert_eq!(Config::from_json(&config.to_json()).expect("own output"), config);
    }

    #[test]
    fn unknown_fields_and_later_versions_are_refused() {
        assert!(Config::from_json(r#"{"version":1,"nmae":"x"}"#).is_err());
        let e = Config::from_json(r#"{"version":2}"#).expect_err("from the future");
        assert_eq!(e.kind(), ErrorKind::VersionMismatch);
    }

    #[test]
    fn a_secret_is_never_shown() {
        let config = Config { secret: Some(SecretString::new("hunter2")), ..Config::default() };
        assert!(!format!("{config:?}").contains("hunter2"));
        assert!(!config.to_json().contains("hunter2"));
    }

    #[test]
    fn nonsense_is_refused() {
        for json in [
            r#"{"silence_ms":1}"#,
            r#"{"io_threads":0}"#,
            r#"{"streams_per_peer":1000}"#,
            r#"{"transports":"carrier-pigeon"}"#,
            r#"{"name":""}"#,
        ] {
            assert!(Config::from_json(json).is_err(), "{json}");
        }
    }
}
