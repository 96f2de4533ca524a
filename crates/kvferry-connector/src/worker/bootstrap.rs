//! Bootstrap servers, which know where the engines of a prefill instance listen: Mooncake's
//! `GET /query`, as plain HTTP/1.0. It blocks, for at most [`TIMEOUT`].

use crate::address::{AgentAddress, ProducerAddress};
use crate::producers::Producers;
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::EngineId;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Longest time of a query, not counting the lookup of the host's name.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The longest answer, in bytes.
const ANSWER_MAX: usize = 1 << 20;

/// The most engines of an answer.
const ENGINES_MAX: usize = 1024;

/// An answer: by data-parallel rank, with the addresses of its ranks.
type Answer = BTreeMap<String, Entry>;

#[derive(Deserialize)]
struct Entry {
    engine_id: String,
    /// Addresses by tensor-parallel rank, then by pipeline rank.
    worker_addr: BTreeMap<String, BTreeMap<String, String>>,
}

/// The engines behind a bootstrap server, each with the address of an agent of it, or with what the server
/// calls one.
///
/// An engine's address is an agent's, never a bootstrap server's: an action is led to an engine once, so a
/// server can't lead it on to another server, or to itself, for ever.
#[derive(Debug, Default)]
pub(super) struct Engines(Vec<(EngineId, Result<AgentAddress, String>)>);

/// Asks the bootstrap server at `url` for its engines. Blocks.
///
/// # Errors
/// In words, with the address.
pub(super) fn query(
    url: &ProducerAddress,
    producers: &Producers,
) -> Result<Engines, (WireCode, String)> {
    let at = |what: String| format!("bootstrap server {url}: {what}");
    let host = url.host_and_port();
    let failed = |e: io::Error| (WireCode::Closed, at(e.to_string()));
    let addresses: Vec<_> = host.to_socket_addrs().map_err(failed)?.collect();
    let checked = producers.check_found(url.as_str(), &addresses);
    checked.map_err(|error| (WireCode::ForbiddenProducer, error.to_string()))?;
    let answer = get(host, &addresses).map_err(failed)?;
    let malformed = |what: String| (WireCode::Malformed, at(what));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.lines().next().unwrap_or_default();
    if status.split_ascii_whitespace().nth(1) != Some("200") {
        return Err(malformed(format!("GET /query was answered with {status:.80?}")));
    }
    let answer: Answer = serde_json::from_str(body)
        .map_err(|e| malformed(format!("GET /query was not answered with engines: {e}")))?;
    // Entries with other ids are of other connectors.
    let engines = answer.into_values().filter_map(|entry| {
        let id = EngineId::parse(&entry.engine_id)?;
        let address = entry.worker_addr.get("0")?.get("0")?;
        Some((id, address.parse().map_err(|_| format!("{address:.80?}"))))
    });
    let engines: Vec<_> = engines.collect();
    if engines.len() > ENGINES_MAX {
        return Err(malformed(format!("{} engines, more than {ENGINES_MAX}", engines.len())));
    }
    Ok(Engines(engines))
}

impl Engines {
    #[cfg(test)]
    pub(super) fn of(engines: impl Iterator<Item = (EngineId, String)>) -> Self {
        Self(engines.map(|(id, address)| (id, address.parse().map_err(|_| address))).collect())
    }

    /// The engine that is meant, or else the only one: routers ask for ids when they start, and send
    /// the id of an engine's earlier incarnation as long as they run. A handoff's id is the same in both
    /// requests, so an engine that was not meant does not have it.
    ///
    /// # Errors
    /// In words, with the server's address.
    pub(super) fn pick(
        &self,
        url: &ProducerAddress,
        engine: Option<EngineId>,
    ) -> Result<(EngineId, AgentAddress), (WireCode, String)> {
        let named = engine.and_then(|id| self.named(id));
        let found = named.or(match &self.0[..] {
            [only] => Some(only),
            _ => None,
        });
        let known = self.0.len();
        let (id, address) = found.ok_or_else(|| match engine {
            Some(id) => (
                WireCode::StaleIncarnation,
                format!("bootstrap server {url}: none of its {known} engines has the id {id}"),
            ),
            None => (
                WireCode::Malformed,
                format!(
                    "bootstrap server {url}: it has {known} engines, and the request names none"
                ),
            ),
        })?;
        let agent = address.clone().map_err(|address| {
            let what = format!("bootstrap server {url}: {address} is not host:port");
            (WireCode::Malformed, what)
        })?;
        Ok((*id, agent))
    }

    fn named(&self, id: EngineId) -> Option<&(EngineId, Result<AgentAddress, String>)> {
        self.0.iter().find(|(of, _)| *of == id)
    }

    pub(super) fn has(&self, id: EngineId) -> bool {
        self.named(id).is_some()
    }

    /// True if an agent of an engine listens at `host:port`.
    pub(super) fn lead_to(&self, agent: &str) -> bool {
        self.0.iter().any(|(_, it)| it.as_ref().is_ok_and(|it| it.as_str() == agent))
    }
}

fn get(host: &str, addresses: &[SocketAddr]) -> io::Result<String> {
    let until = Instant::now() + TIMEOUT;
    let left = || match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::Error::new(io::ErrorKind::TimedOut, "it takes too long")),
        left => Ok(left),
    };
    let mut tried = Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    for address in addresses {
        tried = left().and_then(|left| TcpStream::connect_timeout(address, left));
        if tried.is_ok() {
            break;
        }
    }
    let mut stream = tried?;
    stream.set_write_timeout(Some(left()?))?;
    let question = format!("GET /query HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(question.as_bytes())?;
    let mut answer = Vec::new();
    loop {
        // One read may return a byte, so each gets only what is left.
        stream.set_read_timeout(Some(left()?))?;
        let mut piece = [0; 4096];
        let len = match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => len,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
            Err(e) => return Err(e),
        };
        answer.extend_from_slice(&piece[..len]);
        if answer.len() > ANSWER_MAX {
            let why = format!("its answer has more than {ANSWER_MAX} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
    }
    let not_text = |_| io::Error::new(io::ErrorKind::InvalidData, "its answer is no text");
    String::from_utf8(answer).map_err(not_text)
}
