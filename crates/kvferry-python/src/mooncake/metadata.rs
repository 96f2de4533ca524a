//! How a peer's name becomes its address: it is one, or an HTTP server knows it.
//!
//! Mooncake's HTTP server keeps JSON values by key. Two matter: `mooncake/rpc_meta/<name>` is where
//! an engine takes handshakes, `mooncake/ram/<name>` is its segment descriptor, which stock engines
//! look at before they write or read. We publish both and read the first: what else we want to know
//! of a peer it tells itself, in the handshake.

use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// How long the server may take, as with Mooncake.
const SERVER_LIMIT: Duration = Duration::from_secs(3);
/// How long it may take when the engine ends: nobody waits for a dead server then.
const FAREWELL_LIMIT: Duration = Duration::from_millis(500);
/// Bytes of an answer that are read.
const ANSWER_MAX: u64 = 16 << 20;
/// The type of the handshake that asks for a segment descriptor.
const METADATA_REQUEST: u8 = 1;
/// The port of a peer whose name has none, as with Mooncake.
const DEFAULT_PORT: u16 = 12_001;

/// Where peers are looked up.
#[derive(Clone, Debug)]
pub(crate) enum Directory {
    /// A peer's name is its address.
    PeerToPeer,
    /// An HTTP server knows.
    Http(Server),
}

impl Directory {
    /// Reads `initialize`'s second argument.
    pub(crate) fn parse(server: &str) -> Result<Self, String> {
        if server == "P2PHANDSHAKE" {
            return Ok(Self::PeerToPeer);
        }
        if server.starts_with("http://") {
            return Ok(Self::Http(Server { url: server.to_owned() }));
        }
        Err(format!(
            "no metadata server of this kind is supported: {server:?}; there are P2PHANDSHAKE and \
             http://host:port/metadata"
        ))
    }
}

/// Why the server was of no help.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unhelpful {
    /// It does not know the name.
    Unknown(String),
    /// It can't be asked, or talks nonsense.
    Failed(String),
}

impl Unhelpful {
    pub(crate) fn why(&self) -> &str {
        match self {
            Self::Unknown(why) | Self::Failed(why) => why,
        }
    }
}

/// Mooncake's HTTP metadata server.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    url: String,
}

impl Server {
    /// Where the engine of this name takes handshakes.
    pub(crate) fn look_up(&self, name: &str) -> Result<String, Unhelpful> {
        let (status, text) = self.call("GET", &location_key(name), None, SERVER_LIMIT)?;
        if status != 200 {
            return Err(Unhelpful::Unknown(format!(
                "the metadata server at {} knows no {name:?} (status {status})",
                self.url
            )));
        }
        let nonsense = || {
            Unhelpful::Failed(format!(
                "what the metadata server says of {name:?} is not an address"
            ))
        };
        let value: Value = serde_json::from_str(&text).map_err(|_| nonsense())?;
        let host = value["ip_or_host_name"].as_str().filter(|host| !host.is_empty());
        let port = value["rpc_port"].as_u64().and_then(|port| u16::try_from(port).ok());
        match (host, port) {
            (Some(host), Some(port)) => Ok(join(host, port)),
            _ => Err(nonsense()),
        }
    }

    /// Says where this engine takes handshakes.
    pub(crate) fn publish_location(&self, name: &str, advertised: &str) -> Result<(), Unhelpful> {
        let (host, port) = advertised.rsplit_once(':').unwrap_or((advertised, "0"));
        let location = json!({
            "ip_or_host_name": host.trim_matches(['[', ']']),
            "rpc_port": port.parse::<u16>().unwrap_or(0),
        });
        self.put(&location_key(name), &location)
    }

    /// Says what memory this engine has registered, in its own words but under its name.
    pub(crate) fn publish_segment(&self, name: &str, mut segment: Value) -> Result<(), Unhelpful> {
        segment["name"] = name.into();
        for buffer in segment["buffers"].as_array_mut().into_iter().flatten() {
            buffer["name"] = name.into();
        }
        self.put(&segment_key(name), &segment)
    }

    /// Takes back what was published, if the server lives.
    pub(crate) fn forget(&self, name: &str) {
        for key in [segment_key(name), location_key(name)] {
            if let Err(failed) = self.call("DELETE", &key, None, FAREWELL_LIMIT) {
                tracing::debug!("{}", failed.why());
                return;
            }
        }
    }

    fn put(&self, key: &str, value: &Value) -> Result<(), Unhelpful> {
        match self.call("PUT", key, Some(value.to_string()), SERVER_LIMIT)? {
            (200, _) => Ok(()),
            (status, _) => Err(Unhelpful::Failed(format!(
                "the metadata server at {} did not take {key:?} (status {status})",
                self.url
            ))),
        }
    }

    fn call(
        &self,
        method: &str,
        key: &str,
        body: Option<String>,
        limit: Duration,
    ) -> Result<(u16, String), Unhelpful> {
        let failed = |error: ureq::Error| {
            Unhelpful::Failed(format!(
                "the metadata server at {} can't be asked: {error}",
                self.url
            ))
        };
        let client: ureq::Agent = ureq::Agent::config_builder()
            .timeout_global(Some(limit))
            .http_status_as_error(false)
            .build()
            .into();
        let mut answer = match body {
            Some(body) => {
                client.put(&self.url).query("key", key).content_type("application/json").send(body)
            }
            None if method == "DELETE" => client.delete(&self.url).query("key", key).call(),
            None => client.get(&self.url).query("key", key).call(),
        }
        .map_err(failed)?;
        let text = answer.body_mut().with_config().limit(ANSWER_MAX).read_to_string();
        Ok((answer.status().as_u16(), text.map_err(failed)?))
    }
}

fn location_key(name: &str) -> String {
    format!("mooncake/rpc_meta/{name}")
}

fn segment_key(name: &str) -> String {
    format!("mooncake/ram/{name}")
}

/// The segment descriptor of the engine that listens at `addr` in this process, by asking it as any
/// peer would. `None` if it does not speak with stock peers.
pub(crate) fn own_segment(addr: SocketAddr) -> Option<Value> {
    let ip = match addr.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    let ask = || -> io::Result<Value> {
        let mut stream =
            TcpStream::connect_timeout(&SocketAddr::new(ip, addr.port()), SERVER_LIMIT)?;
        stream.set_read_timeout(Some(SERVER_LIMIT))?;
        stream.set_write_timeout(Some(SERVER_LIMIT))?;
        let json = b"{}";
        let mut request = (1 + json.len() as u64).to_le_bytes().to_vec();
        request.push(METADATA_REQUEST);
        request.extend_from_slice(json);
        stream.write_all(&request)?;
        let mut head = [0; 9];
        stream.read_exact(&mut head)?;
        let mut answer = Vec::new();
        stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
        Ok(serde_json::from_slice(&answer)?)
    };
    ask().inspect_err(|error| tracing::debug!(%error, "no segment descriptor to publish")).ok()
}

/// The host in `host`, `host:port`, `[v6]:port` or a bare IPv6 address.
pub(crate) fn host_of(name: &str) -> &str {
    if let Some(rest) = name.strip_prefix('[') {
        return rest.split_once(']').map_or(rest, |(host, _)| host);
    }
    match name.split_once(':') {
        Some((host, port)) if !port.contains(':') => host,
        _ => name,
    }
}

/// A peer's name with a port.
pub(crate) fn with_port(name: &str) -> String {
    let has_port = match name.rsplit_once(':') {
        Some((host, _)) => host.ends_with(']') || !host.contains(':'),
        None => false,
    };
    if has_port { name.to_owned() } else { join(name.trim_matches(['[', ']']), DEFAULT_PORT) }
}

/// A host and a port as one address.
pub(crate) fn join(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}
