//! From a peer's name to its address: directly, or by Mooncake's HTTP metadata server.
//!
//! The server stores JSON values by key. `mooncake/rpc_meta/<name>` is the address at which an engine
//! accepts handshakes, `mooncake/ram/<name>` its segment descriptor, which stock engines read before
//! a transfer. This engine publishes both and reads the first only: the handshake with the peer
//! gives the rest.

use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// The time limit of a request, as in Mooncake.
const SERVER_LIMIT: Duration = Duration::from_secs(3);
/// The time limit of a request when the engine ends.
const FAREWELL_LIMIT: Duration = Duration::from_millis(500);
/// The most bytes of an answer that are read.
const ANSWER_MAX: u64 = 16 << 20;
/// The type of the handshake that asks for a segment descriptor.
const METADATA_REQUEST: u8 = 1;
/// The port of a peer whose name has none, as with Mooncake.
const DEFAULT_PORT: u16 = 12_001;

/// Source of the peers' addresses.
#[derive(Clone, Debug)]
pub(crate) enum Directory {
    /// A peer's name is its address.
    PeerToPeer,
    /// The server maps names to addresses.
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
            "the metadata server must be P2PHANDSHAKE or http://host:port/metadata, not {server:?}"
        ))
    }
}

/// Mooncake's HTTP metadata server.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    url: String,
}

/// The errors say why a request failed, for people.
impl Server {
    /// The address at which the engine of this name accepts handshakes.
    pub(crate) fn look_up(&self, name: &str) -> Result<String, String> {
        let (status, text) = self.call("GET", &location_key(name), None, SERVER_LIMIT)?;
        if status != 200 {
            return Err(format!(
                "the metadata server at {} does not know {name:?} (status {status})",
                self.url
            ));
        }
        let malformed = || {
            format!(
                "malformed answer of the metadata server: the value of {name:?} is not an address"
            )
        };
        let value: Value = serde_json::from_str(&text).map_err(|_| malformed())?;
        let host = value["ip_or_host_name"].as_str().filter(|host| !host.is_empty());
        let port = value["rpc_port"].as_u64().and_then(|port| u16::try_from(port).ok());
        match (host, port) {
            (Some(host), Some(port)) => Ok(join(host, port)),
            _ => Err(malformed()),
        }
    }

    /// Publishes the address at which this engine accepts handshakes.
    pub(crate) fn publish_location(&self, name: &str, advertised: &str) -> Result<(), String> {
        let (host, port) = advertised.rsplit_once(':').unwrap_or((advertised, "0"));
        let location = json!({
            "ip_or_host_name": host.trim_matches(['[', ']']),
            "rpc_port": port.parse::<u16>().unwrap_or(0),
        });
        self.put(&location_key(name), &location)
    }

    /// Publishes this engine's segment descriptor under its name.
    pub(crate) fn publish_segment(&self, name: &str, mut segment: Value) -> Result<(), String> {
        segment["name"] = name.into();
        for buffer in segment["buffers"].as_array_mut().into_iter().flatten() {
            buffer["name"] = name.into();
        }
        self.put(&segment_key(name), &segment)
    }

    /// Deletes what was published. Stops at the first failure: the server may be dead.
    pub(crate) fn forget(&self, name: &str) {
        for key in [segment_key(name), location_key(name)] {
            if let Err(failed) = self.call("DELETE", &key, None, FAREWELL_LIMIT) {
                tracing::debug!("{failed}");
                return;
            }
        }
    }

    fn put(&self, key: &str, value: &Value) -> Result<(), String> {
        match self.call("PUT", key, Some(value.to_string()), SERVER_LIMIT)? {
            (200, _) => Ok(()),
            (status, _) => Err(format!(
                "the metadata server at {} refused {key:?} (status {status})",
                self.url
            )),
        }
    }

    fn call(
        &self,
        method: &str,
        key: &str,
        body: Option<String>,
        limit: Duration,
    ) -> Result<(u16, String), String> {
        let failed = |error: ureq::Error| {
            format!("the request to the metadata server at {} failed: {error}", self.url)
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

/// The segment descriptor of the engine that listens at `addr` in this process, by a handshake as a
/// stock peer makes it. `None` if the engine does not accept stock peers.
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
        // Of version 2: this engine is no peer whose writes come without asking for a status.
        let json = br#"{"tcp_proto_version":2}"#;
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
