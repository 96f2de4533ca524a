//! Bootstrap servers, which know where the engines of a prefill instance listen: Mooncake's
//! `GET /query`, as plain HTTP/1.0. It blocks, for at most [`TIMEOUT`].

use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::EngineId;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long a query takes at most, not counting the lookup of the host's name.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The longest answer, in bytes.
const ANSWER_MAX: usize = 1 << 20;

const SCHEME: &str = "http://";

/// An answer: by data-parallel rank, with the addresses of its ranks.
type Answer = BTreeMap<String, Entry>;

#[derive(Deserialize)]
struct Entry {
    engine_id: String,
    /// By tensor-parallel rank, then by pipeline rank.
    worker_addr: BTreeMap<String, BTreeMap<String, String>>,
}

/// The engines behind a bootstrap server, each with the address of an agent of it.
#[derive(Debug, Default)]
pub(super) struct Engines(Vec<(EngineId, String)>);

/// Whether an address is a bootstrap server's.
pub(super) fn is_url(address: &str) -> bool {
    address.starts_with(SCHEME)
}

/// Asks the bootstrap server at `url`, `http://host:port`, for its engines. Blocks.
///
/// # Errors
/// In words, with the address.
pub(super) fn query(url: &str) -> Result<Engines, (WireCode, String)> {
    let at = |what: String| format!("bootstrap server {url}: {what}");
    let answer = get(url).map_err(|e| (WireCode::Closed, at(e.to_string())))?;
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
        Some((id, entry.worker_addr.get("0")?.get("0")?.clone()))
    });
    Ok(Engines(engines.collect()))
}

impl Engines {
    /// The engine that is meant, or else the only one: routers ask for ids when they start, and send
    /// that of an engine's earlier life as long as they run. A handoff's id is the same in both
    /// requests, so an engine that was not meant does not have it.
    ///
    /// # Errors
    /// In words, with the server's address.
    pub(super) fn pick(
        &self,
        url: &str,
        engine: Option<EngineId>,
    ) -> Result<(EngineId, String), (WireCode, String)> {
        let named = engine.and_then(|id| self.0.iter().find(|(of, _)| *of == id));
        let found = named.or(match &self.0[..] {
            [only] => Some(only),
            _ => None,
        });
        let known = self.0.len();
        found.cloned().ok_or_else(|| match engine {
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
        })
    }
}

fn get(url: &str) -> io::Result<String> {
    let host = url.trim_start_matches(SCHEME).trim_end_matches('/');
    let addresses: Vec<_> = host.to_socket_addrs()?.collect();
    let until = Instant::now() + TIMEOUT;
    let left = || match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::Error::new(io::ErrorKind::TimedOut, "it takes too long")),
        left => Ok(left),
    };
    let mut tried = Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    for address in &addresses {
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
