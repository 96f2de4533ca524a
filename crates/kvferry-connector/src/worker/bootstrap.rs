//! Bootstrap servers, which know where the engines of a prefill instance listen: Mooncake's
//! `GET /query`, over HTTP without TLS. It blocks, for at most [`TIMEOUT`].

use crate::address::{AgentAddress, ProducerAddress};
use crate::producers::Producers;
use kvferry_proto::WireCode;
use kvferry_proto::engine_handshake::EngineId;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;
use ureq::config::Config;
use ureq::http::{StatusCode, Uri};
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

/// Longest time of a query, not counting the lookup of the host's name.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The longest answer, in bytes.
const ANSWER_MAX: u64 = 1 << 20;

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
    let found = url.host_and_port().to_socket_addrs();
    let addresses: Vec<_> = found.map_err(|e| (WireCode::Closed, at(e.to_string())))?.collect();
    let checked = producers.check_found(url.as_str(), &addresses);
    checked.map_err(|error| (WireCode::ForbiddenProducer, error.to_string()))?;
    let failed = |error| {
        let (code, why) = described(error);
        (code, at(why))
    };
    let (status, body) = get(url, CheckedAddresses(addresses)).map_err(failed)?;
    let malformed = |what: String| (WireCode::Malformed, at(what));
    if status != StatusCode::OK {
        return Err(malformed(format!("GET /query was answered with {status}")));
    }
    let answer: Answer = serde_json::from_slice(&body)
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

/// The addresses that a server's name had when they were checked. A query connects to no others.
#[derive(Debug)]
struct CheckedAddresses(Vec<SocketAddr>);

impl Resolver for CheckedAddresses {
    fn resolve(
        &self,
        _: &Uri,
        _: &Config,
        _: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let mut addresses = self.empty();
        // What the client has no room for is not tried.
        let _ = self.0.iter().try_for_each(|address| addresses.try_push(*address));
        if addresses.is_empty() { Err(ureq::Error::HostNotFound) } else { Ok(addresses) }
    }
}

/// The status and the body of the answer to `GET /query`.
fn get(
    url: &ProducerAddress,
    addresses: CheckedAddresses,
) -> Result<(StatusCode, Vec<u8>), ureq::Error> {
    let config = Config::builder()
        .timeout_global(Some(TIMEOUT))
        .http_status_as_error(false)
        // Neither the server nor the environment leads to an address that was not checked.
        .max_redirects(0)
        .proxy(None)
        .build();
    let client = ureq::Agent::with_parts(config, DefaultConnector::new(), addresses);
    let mut answer = client.get(format!("{}/query", url.as_str())).call()?;
    let body = answer.body_mut().with_config().limit(ANSWER_MAX).read_to_vec()?;
    Ok((answer.status(), body))
}

/// What a failed query means for the handoff, and why it failed.
fn described(error: ureq::Error) -> (WireCode, String) {
    match error {
        ureq::Error::Timeout(_) => (WireCode::Closed, "it takes too long".to_owned()),
        ureq::Error::BodyExceedsLimit(limit) => {
            (WireCode::Closed, format!("its answer has more than {limit} bytes"))
        }
        ureq::Error::Io(e) => (WireCode::Closed, e.to_string()),
        ureq::Error::Protocol(e) => (WireCode::Malformed, format!("its answer is not HTTP: {e}")),
        other => (WireCode::Closed, other.to_string()),
    }
}
