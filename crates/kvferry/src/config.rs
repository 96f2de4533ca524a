//! [`Config`]: the settings of an agent, and the environment variables that they come from.
//!
//! A setting made with the builder wins over the environment, which wins over the default.

use crate::address::{self, AdvertisedBy};
use crate::core::{Settings, Sizing};
use crate::error::{Error, ErrorKind, Result};
use crate::peer_memory::{PEER_MEMORY_MIN, default_budget};
use crate::transport::Transports;
use crate::transport::settings::TransportSettings;
use kvferry_proto::Secret;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;
use zeroize::Zeroizing;

/// The version of [`Config`] that this build writes, and the highest it reads.
pub const CONFIG_VERSION: u32 = 1;

/// Whether payload carries CRC32C checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checksum {
    /// Checksums are on between hosts and off on one host.
    #[default]
    Auto,
    /// Checksums are on with every peer that supports them.
    On,
    /// Off, unless the peer requires them.
    Off,
}

impl Checksum {
    fn parse(text: &str) -> Result<Self> {
        match text.to_ascii_lowercase().as_str() {
            "auto" | "" => Ok(Self::Auto),
            "on" | "1" | "true" => Ok(Self::On),
            "off" | "0" | "false" => Ok(Self::Off),
            _ => {
                Err(Error::invalid("the checksum setting must be auto, on or off")
                    .with("value", text))
            }
        }
    }
}

/// The settings of an agent: versioned, and keyed by name as JSON.
///
/// | field | environment | default |
/// |---|---|---|
/// | `name` | `KVFERRY_NAME` | `kvferry-<pid>` |
/// | `listen` | `KVFERRY_LISTEN` | `127.0.0.1:0` |
/// | `advertise` | `KVFERRY_ADVERTISE`, `HOST_IP`, `POD_IP` | see [`AgentBuilder::advertise`](crate::AgentBuilder::advertise) |
/// | `transports` | `KVFERRY_TRANSPORTS` | all that the program has |
/// | `secret` | `KVFERRY_SECRET_FILE` (trailing white space removed), `KVFERRY_SECRET` | none |
/// | `io_threads` | `KVFERRY_IO_THREADS` | half of the cores, 1 to 64 |
/// | `streams_per_peer` | `KVFERRY_STREAMS` | 2 × I/O threads, 4 to 64 |
/// | `checksum` | `KVFERRY_CHECKSUM` | auto |
/// | `silence_ms` | `KVFERRY_SILENCE_MS` | 3000 |
/// | `timeout_ms` | `KVFERRY_TIMEOUT_MS` | 30000 |
/// | `peer_memory` | `KVFERRY_PEER_MEMORY` | 1/64 of the memory that the process may use, at least 64 MiB |
///
/// Transports have settings of their own, which the JSON has beside these: [`TransportSettings::all`] lists
/// them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Config {
    /// Version of this structure; see [`CONFIG_VERSION`].
    pub version: u32,
    /// The agent's name, 1 to 256 bytes. Peers see it in notifications, errors and logs.
    pub name: String,
    /// The `host:port` to listen on. Port 0 lets the kernel choose; `0.0.0.0` or `[::]` means every
    /// interface.
    pub listen: Option<String>,
    /// The `host` or `host:port` that the agent tells its peers.
    pub advertise: Option<String>,
    /// The transports that the agent may use. In JSON: their names, separated by commas.
    pub transports: Transports,
    /// The secret, shared by all agents that may connect to each other. Not part of the JSON.
    #[serde(skip)]
    pub secret: Option<Secret>,
    /// Number of threads for inbound streams and asynchronous transfers, 1 to 64.
    pub io_threads: Option<usize>,
    /// The largest number of data connections to one peer, 1 to 64.
    pub streams_per_peer: Option<usize>,
    /// Whether payload carries checksums.
    pub checksum: Checksum,
    /// Longest silence of a peer during a transfer, after which its session ends, in milliseconds, 100 to 600 000.
    pub silence_ms: u64,
    /// The time limit of a transfer whose caller sets none, in milliseconds, 1 to 86 400 000.
    pub timeout_ms: u64,
    /// Bytes that all peers together may make the agent hold: heads of requests, control messages, and
    /// answers that they do not read, beyond 64 KiB for each connection in each direction. One host gets at most a fifth of
    /// it, and all hosts of one network a third; messages that wait
    /// for slow peers get a half of it. At least 16 MiB. Requests and sessions that need more end with `Busy`.
    pub peer_memory: Option<u64>,
    /// The settings of the transports. They refuse fields of the JSON that nothing knows.
    #[serde(flatten)]
    pub transport_settings: TransportSettings,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            version: CONFIG_VERSION,
            name: format!("kvferry-{}", std::process::id()),
            listen: None,
            advertise: None,
            transports: Transports::ALL,
            secret: None,
            io_threads: None,
            streams_per_peer: None,
            checksum: Checksum::Auto,
            silence_ms: 3_000,
            timeout_ms: 30_000,
            peer_memory: None,
            transport_settings: TransportSettings::default(),
        }
    }
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn env_number<T: std::str::FromStr>(name: &'static str) -> Result<Option<T>> {
    let Some(text) = env(name) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| {
        Error::invalid("the environment variable must hold a number in range")
            .with("variable", name)
            .with("value", text)
    })
}

/// The secret from the environment: bytes, not necessarily UTF-8. `file` and `value` are the values
/// of `KVFERRY_SECRET_FILE` and `KVFERRY_SECRET`.
///
/// A variable that is set but empty is an error. If it counted as "no secret", a missing file or an
/// empty template value would switch authentication off.
fn secret_from(file: Option<OsString>, value: Option<OsString>) -> Result<Option<Secret>> {
    if let Some(path) = file {
        let path = PathBuf::from(path);
        if path.as_os_str().is_empty() {
            return Err(empty_secret("KVFERRY_SECRET_FILE"));
        }
        let bytes = std::fs::read(&path).map(Zeroizing::new).map_err(|e| {
            Error::io("the file named by KVFERRY_SECRET_FILE can't be read", e)
                .with("file", path.display())
        })?;
        let secret = Secret::new(bytes.trim_ascii_end()).ok_or_else(|| {
            empty_secret("the file named by KVFERRY_SECRET_FILE").with("file", path.display())
        })?;
        return Ok(Some(secret));
    }
    let Some(value) = value else { return Ok(None) };
    Secret::new(value.into_vec()).map(Some).ok_or_else(|| empty_secret("KVFERRY_SECRET"))
}

pub(crate) fn empty_secret(source: &str) -> Error {
    let what = format!("{source} is empty; set a secret of at least one byte, or unset it");
    Error::invalid(what)
}

impl Config {
    /// The settings from the environment, and the defaults for variables that are not set.
    ///
    /// # Errors
    /// `InvalidArgument` if a variable can't be parsed or the secret is empty, `Io` if the file of
    /// the secret can't be read.
    pub fn from_env() -> Result<Self> {
        let mut config = Self::default();
        if let Some(name) = env("KVFERRY_NAME") {
            config.name = name;
        }
        config.listen = env("KVFERRY_LISTEN");
        if let Some(names) = env("KVFERRY_TRANSPORTS") {
            config.transports = Transports::parse(&names)?;
        }
        config.secret = secret_from(
            std::env::var_os("KVFERRY_SECRET_FILE"),
            std::env::var_os("KVFERRY_SECRET"),
        )?;
        config.io_threads = env_number("KVFERRY_IO_THREADS")?;
        config.streams_per_peer = env_number("KVFERRY_STREAMS")?;
        if let Some(text) = env("KVFERRY_CHECKSUM") {
            config.checksum = Checksum::parse(&text)?;
        }
        if let Some(ms) = env_number("KVFERRY_SILENCE_MS")? {
            config.silence_ms = ms;
        }
        if let Some(ms) = env_number("KVFERRY_TIMEOUT_MS")? {
            config.timeout_ms = ms;
        }
        config.peer_memory = env_number("KVFERRY_PEER_MEMORY")?;
        config.transport_settings = TransportSettings::from_env(env)?;
        Ok(config)
    }

    /// Parses the JSON of [`Config::to_json`]. A missing field gets its default.
    ///
    /// # Errors
    /// `InvalidArgument` for malformed JSON, an unknown field or a value out of range;
    /// `VersionMismatch` for a later version.
    pub fn from_json(json: &str) -> Result<Self> {
        let config: Self = serde_json::from_str(json)
            .map_err(|e| Error::invalid("malformed configuration").caused_by(e))?;
        config.check()?;
        Ok(config)
    }

    /// The configuration as JSON, without the secret.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain values always encode")
    }

    /// Checks the version and the range of each value.
    ///
    /// # Errors
    /// `InvalidArgument` or `VersionMismatch`, with the name of the setting and its range.
    pub fn check(&self) -> Result<()> {
        let range = |what: &'static str, value: u64, min: u64, max: u64| {
            if (min..=max).contains(&value) {
                return Ok(());
            }
            Err(Error::invalid(format!("{what} must be {min} to {max}")).with("value", value))
        };
        if self.version == 0 || self.version > CONFIG_VERSION {
            return Err(Error::new(
                ErrorKind::VersionMismatch,
                "this build does not read this version of the configuration",
            )
            .with("version", self.version)
            .with("highest", CONFIG_VERSION));
        }
        range("silence_ms", self.silence_ms, 100, 600_000)?;
        range("timeout_ms", self.timeout_ms, 1, 86_400_000)?;
        if let Some(bytes) = self.peer_memory {
            range("peer_memory", bytes, PEER_MEMORY_MIN as u64, usize::MAX as u64)?;
        }
        range("io_threads", self.io_threads() as u64, 1, 64)?;
        range("streams_per_peer", self.streams_per_peer() as u64, 1, 64)?;
        if self.name.is_empty() || self.name.len() > 256 {
            return Err(Error::invalid("name must have 1 to 256 bytes"));
        }
        Ok(())
    }

    pub(crate) fn io_threads(&self) -> usize {
        self.io_threads.unwrap_or_else(|| (kvferry_sys::thread::cores() / 2).clamp(1, 64))
    }

    /// Threads that only copy within the host: as many as I/O threads, while there are cores for them.
    pub(crate) fn copy_threads(&self) -> usize {
        if self.transports.has_copiers() {
            self.io_threads().min(kvferry_sys::thread::cores().saturating_sub(self.io_threads()))
        } else {
            0
        }
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

    pub(crate) fn settings(&self) -> Settings {
        let (silence, timeout) = (self.silence(), self.timeout());
        let peer_memory = self.peer_memory.map_or_else(default_budget, |it| it as usize);
        Settings { name: self.name.clone(), silence, timeout, peer_memory }
    }

    pub(crate) fn sizing(&self) -> Sizing {
        let cores = kvferry_sys::thread::cores();
        Sizing {
            streams_per_peer: self.streams_per_peer(),
            stripe_default: (cores / 2).clamp(1, self.streams_per_peer()),
            copiers_default: (self.io_threads() + self.copy_threads()).clamp(1, cores),
        }
    }

    /// The address that an agent with this configuration listens on, the address that it tells its
    /// peers, and the rule that chose the latter. Starts no agent; port 0 means that the kernel
    /// chooses.
    ///
    /// # Errors
    /// `InvalidArgument` if an address can't be parsed, `Io` if no interface has an address.
    pub fn addresses(&self) -> Result<(std::net::SocketAddr, String, AdvertisedBy)> {
        let listening = self.listen_addr()?;
        let (advertised, by) = address::advertised(self.advertise.as_deref(), listening)?;
        Ok((listening, advertised, by))
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
            "silence_ms":3000,"timeout_ms":30000,"ptracer_any":true}"#;
        let config = Config::from_json(golden).expect("the JSON of version 1");
        assert_eq!(config.checksum, Checksum::On);
        assert_eq!(config.streams_per_peer(), 8);
        assert_eq!(config.transport_settings.get("ptracer_any"), Some("true"));
        assert!(config.to_json().contains(r#""ptracer_any": true"#), "{}", config.to_json());
        assert_eq!(Config::from_json(&config.to_json()).expect("the output of to_json"), config);
    }

    #[test]
    fn the_json_of_version_1_stays_readable_where_a_transport_that_it_names_is_not_linked() {
        // As every agent wrote it that did not say which transports it uses.
        let golden = r#"{"version":1,"name":"decode-0","listen":null,"advertise":null,
            "transports":"tcp,local,mooncake","io_threads":null,"streams_per_peer":null,"checksum":"auto",
            "silence_ms":3000,"timeout_ms":30000,"peer_memory":null,"ptracer_any":false,"mooncake":false,
            "file_engine":"auto"}"#;
        let config = Config::from_json(golden).expect("the JSON of version 1");
        assert_eq!(config, Config { name: "decode-0".to_owned(), ..Config::default() });
        assert_eq!(Config::from_json(&config.to_json()).expect("the output of to_json"), config);
        for needed in
            [r#"{"mooncake":true}"#, r#"{"mooncake":"on"}"#, r#"{"transports":"Mooncake"}"#]
        {
            let refused = Config::from_json(needed).expect_err("it is not linked").to_string();
            assert!(refused.contains("kvferry_mooncake::link()"), "{needed}: {refused}");
        }
        let refused = Config::from_json(r#"{"mooncake":"perhaps"}"#).expect_err("no such value");
        assert!(refused.to_string().contains("the setting mooncake must be"), "{refused}");
    }

    #[test]
    fn unknown_fields_and_later_versions_are_refused() {
        for value in ["\"x\"", "true", "4", "-0.5", "null", "[1]", "{}"] {
            let e = Config::from_json(&format!(r#"{{"version":1,"nmae":{value}}}"#));
            let e = e.expect_err("no such field").to_string();
            assert!(e.contains("unknown setting") && e.contains("nmae"), "{value}: {e}");
            let e = Config::from_json(&format!(r#"{{"file_engine":{value}}}"#));
            let e = e.expect_err("no such value").to_string();
            assert!(e.contains("the setting file_engine must be"), "{value}: {e}");
        }
        let e = Config::from_json(r#"{"version":2}"#).expect_err("a later version");
        assert_eq!(e.kind(), ErrorKind::VersionMismatch);
    }

    #[test]
    fn a_secret_that_is_set_and_empty_is_refused() {
        let path = std::env::temp_dir().join(format!("kvferry-secret-{}", std::process::id()));
        for content in ["", "\n", " \t\n"] {
            std::fs::write(&path, content).expect("a temporary file");
            let e = secret_from(Some(path.clone().into()), None).expect_err("an empty file");
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
            assert_eq!(e.context("file"), path.to_str(), "{e}");
        }
        std::fs::remove_file(&path).expect("the file was written above");
        let e = secret_from(Some(path.into()), Some("hush".into())).expect_err("no such file");
        assert_eq!(e.kind(), ErrorKind::Io, "{e}");
        let e = secret_from(Some(OsString::new()), None).expect_err("an empty path");
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        let e = secret_from(None, Some(OsString::new())).expect_err("an empty variable");
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        assert_eq!(secret_from(None, None).expect("no variable is set"), None);
        let builder = crate::Agent::builder().config(Config::default()).secret(b"");
        let e = builder.build().expect_err("an empty secret");
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    }

    #[test]
    fn a_secret_may_be_any_bytes() {
        let bytes = b"\xff\xfe\0key";
        let value = OsString::from_vec(bytes.to_vec());
        assert_eq!(secret_from(None, Some(value)).expect("bytes"), Secret::new(bytes));
        let path = std::env::temp_dir().join(format!("kvferry-bytes-{}", std::process::id()));
        std::fs::write(&path, [&bytes[..], b"\r\n"].concat()).expect("a temporary file");
        let read = secret_from(Some(path.clone().into()), None);
        std::fs::remove_file(path).expect("the file was written above");
        assert_eq!(read.expect("bytes"), Secret::new(bytes));
    }

    #[test]
    fn debug_and_json_do_not_show_the_secret() {
        let config = Config { secret: Secret::new("hunter2"), ..Config::default() };
        assert!(!format!("{config:?}").contains("hunter2"));
        assert!(!config.to_json().contains("hunter2"));
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for json in [
            r#"{"silence_ms":1}"#,
            r#"{"io_threads":0}"#,
            r#"{"peer_memory":4096}"#,
            r#"{"streams_per_peer":1000}"#,
            r#"{"transports":"unknown"}"#,
            r#"{"name":""}"#,
            r#"{"file_engine":"aio"}"#,
            r#"{"ptracer_any":"perhaps"}"#,
        ] {
            assert!(Config::from_json(json).is_err(), "{json}");
        }
    }
}
