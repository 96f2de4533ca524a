//! `kv_transfer_params`: what a router and two engines exchange about a request.
//!
//! Plain JSON as in vLLM's API, with vLLM's names where it has one:
//!
//! | key | in | |
//! |---|---|---|
//! | `do_remote_decode` | a producer's request | true: keep its KV for a consumer |
//! | `do_remote_prefill` | a consumer's request | true: a producer has, or will have, its KV |
//! | `transfer_id` | both | the handoff's id; a producer without one draws its own |
//! | `remote_request_id` | a consumer's | the same, for routers that pass on only NIXL's names |
//! | `remote_address` | a consumer's | `host:port` of the agent of any rank of the producing engine |
//! | `remote_host`, `remote_port` | a consumer's | the same, with NIXL's names |
//! | `remote_bootstrap_addr` | a consumer's | `http://host:port` of the producer's bootstrap server, with Mooncake's name |
//! | `remote_engine_id` | a consumer's, optional | the incarnation of that engine, from its response |
//! | `remote_num_tokens` | a consumer's, optional | how many tokens the producer has the KV of |
//!
//! Of several ids or addresses the first in this table is used. `null` is the same as a key that is
//! not there.
//!
//! Concurrent: a router gives both requests one `transfer_id`, and the consumer's an address.
//! Sequential: the producer's response carries what the consumer's request needs ([`ConsumerParams`]).

use crate::address::{AgentAddress, ProducerAddress};
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::HandoffId;
use serde_json::{Map, Value, json};
use thiserror::Error;

/// `kv_transfer_params` of a request or response.
pub type Params = Map<String, Value>;

/// Role in a handoff that a request's parameters ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Keep its KV for a consumer.
    Produce {
        /// The handoff's id, if the router chose one.
        transfer: Option<HandoffId>,
    },
    /// Fetch its KV from a producer.
    Consume(ConsumerParams),
}

/// Address and handoff of the KV that a consumer's request fetches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerParams {
    /// The handoff's id.
    pub transfer: HandoffId,
    /// An agent of the producing engine, or its bootstrap server.
    pub address: ProducerAddress,
    /// The incarnation of that engine that is meant, if it is known.
    pub engine: Option<EngineId>,
    /// Number of tokens of which the producer has the KV. If unknown: all that the consumer can use.
    pub tokens: Option<u64>,
}

/// Invalid parameters of a request that asks for a handoff.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("kv_transfer_params: {key} {problem}")]
pub struct ParamsError {
    /// The key of `kv_transfer_params`.
    pub key: &'static str,
    /// Description of what is wrong with the key's value.
    pub problem: &'static str,
}

/// The producer runs another connector: NIXL's and Mooncake's engine ids are no digits.
const FOREIGN: &str = "is not 32 hexadecimal digits: the producer does not run KVFerryConnector";

impl ParamsError {
    /// Whether the request's producer runs another connector.
    pub fn is_foreign(&self) -> bool {
        self.problem == FOREIGN
    }
}

impl Role {
    /// Parses the parameters; `None` if they ask for no handoff.
    ///
    /// # Errors
    /// A key is missing or has a wrong value.
    pub fn parse(params: Option<&Params>) -> Result<Option<Self>, ParamsError> {
        let Some(params) = params else { return Ok(None) };
        let produce = flag(params, "do_remote_decode")?;
        let consume = flag(params, "do_remote_prefill")?;
        match (produce, consume) {
            (false, false) => Ok(None),
            (true, true) => {
                Err(wrong("do_remote_decode", "and do_remote_prefill exclude each other"))
            }
            (true, false) => {
                Ok(Some(Self::Produce { transfer: transfer(params, &["transfer_id"])? }))
            }
            (false, true) => Ok(Some(Self::Consume(ConsumerParams::parse(params)?))),
        }
    }
}

impl ConsumerParams {
    fn parse(params: &Params) -> Result<Self, ParamsError> {
        let engine = match text(params, "remote_engine_id")? {
            None => None,
            Some(id) => Some(EngineId::parse(id).ok_or(wrong("remote_engine_id", FOREIGN))?),
        };
        let transfer = transfer(params, &["transfer_id", "remote_request_id"])?;
        let transfer = transfer.ok_or(wrong("transfer_id", "is missing"))?;
        let address = address(params)?.ok_or(wrong("remote_address", "is missing"))?;
        let tokens = number(params, "remote_num_tokens")?;
        Ok(Self { transfer, address, engine, tokens })
    }

    /// The parameters of a consumer's request. NIXL's names repeat what they can: some routers pass
    /// on only those.
    pub fn to_params(&self) -> Params {
        let mut params = Params::new();
        let mut insert = |key: &str, value| params.insert(key.to_owned(), value);
        insert("do_remote_prefill", json!(true));
        insert("do_remote_decode", json!(false));
        insert("transfer_id", json!(self.transfer.as_str()));
        insert("remote_request_id", json!(self.transfer.as_str()));
        let address = self.address.as_str();
        if self.address.is_bootstrap() {
            insert("remote_bootstrap_addr", json!(address));
        } else {
            insert("remote_address", json!(address));
            if let Some((host, port)) = address.rsplit_once(':')
                && let Ok(port) = port.parse::<u16>()
            {
                insert("remote_host", json!(host.trim_matches(['[', ']'])));
                insert("remote_port", json!(port));
            }
        }
        if let Some(engine) = self.engine {
            insert("remote_engine_id", json!(engine.to_string()));
        }
        if let Some(tokens) = self.tokens {
            insert("remote_num_tokens", json!(tokens));
        }
        params
    }
}

/// The parameters of a producer's request; in the concurrent flow with the handoff's id.
pub fn producer_params(transfer: Option<&HandoffId>) -> Params {
    let mut params = Params::new();
    params.insert("do_remote_decode".to_owned(), json!(true));
    params.insert("do_remote_prefill".to_owned(), json!(false));
    if let Some(transfer) = transfer {
        params.insert("transfer_id".to_owned(), json!(transfer.as_str()));
    }
    params
}

const fn wrong(key: &'static str, problem: &'static str) -> ParamsError {
    ParamsError { key, problem }
}

fn flag(params: &Params, key: &'static str) -> Result<bool, ParamsError> {
    match params.get(key) {
        None | Some(Value::Null) => Ok(false),
        Some(value) => value.as_bool().ok_or(wrong(key, "is neither true nor false")),
    }
}

fn text<'a>(params: &'a Params, key: &'static str) -> Result<Option<&'a str>, ParamsError> {
    match params.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_str().map(Some).ok_or(wrong(key, "is not a string")),
    }
}

fn number(params: &Params, key: &'static str) -> Result<Option<u64>, ParamsError> {
    match params.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or(wrong(key, "is not a number")),
    }
}

/// The handoff's id under the first of `keys` that is there.
fn transfer(params: &Params, keys: &[&'static str]) -> Result<Option<HandoffId>, ParamsError> {
    for key in keys {
        if let Some(name) = text(params, key)? {
            let id = HandoffId::new(name);
            return id.map(Some).map_err(|_| wrong(key, "must have 1 to 256 bytes"));
        }
    }
    Ok(None)
}

/// The address at which the producing engine can be asked.
fn address(params: &Params) -> Result<Option<ProducerAddress>, ParamsError> {
    let given = |key| Ok(text(params, key)?.filter(|text| !text.is_empty()));
    let agent = |text: &str| text.parse::<AgentAddress>().map(ProducerAddress::from);
    if let Some(address) = given("remote_address")? {
        let address = agent(address).map_err(|_| wrong("remote_address", "is not host:port"));
        return address.map(Some);
    }
    if let Some(host) = given("remote_host")? {
        let port = number(params, "remote_port")?.ok_or(wrong("remote_port", "is missing"))?;
        let port = u16::try_from(port).map_err(|_| wrong("remote_port", "is not a port"))?;
        let is_ipv6 = host.contains(':') && !host.starts_with('[');
        let address = if is_ipv6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let wrong = wrong("remote_host", "is neither a host name nor an address");
        return agent(&address).map(Some).map_err(|_| wrong);
    }
    let Some(bootstrap) = given("remote_bootstrap_addr")? else { return Ok(None) };
    let address = ProducerAddress::bootstrap(bootstrap);
    address.map(Some).map_err(|_| wrong("remote_bootstrap_addr", "is not http://host:port"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(value: Value) -> Params {
        value.as_object().expect("an object").clone()
    }

    #[test]
    fn a_consumer_parses_what_an_offer_encodes() {
        let offered = ConsumerParams {
            transfer: HandoffId::new("xfer-1").expect("short"),
            address: "10.0.0.1:4711".parse().expect("an address"),
            engine: Some(EngineId(7 << 100)),
            tokens: Some(8191),
        };
        assert_eq!(Role::parse(Some(&offered.to_params())), Ok(Some(Role::Consume(offered))));
    }

    #[test]
    fn a_router_that_passes_on_only_nixls_names_reaches_the_producer() {
        let nixl = ["do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_host"];
        let nixl = [&nixl[..], &["remote_port", "remote_request_id", "remote_block_ids"]].concat();
        for address in ["10.0.0.1:4711", "prefill-0.local:4711", "[fd00::1]:4711"] {
            let offered = ConsumerParams {
                transfer: HandoffId::new("xfer-1").expect("short"),
                address: address.parse().expect("an address"),
                engine: Some(EngineId(7 << 100)),
                tokens: None,
            };
            let mut params = offered.to_params();
            params.retain(|key, _| nixl.contains(&key.as_str()));
            assert_eq!(Role::parse(Some(&params)), Ok(Some(Role::Consume(offered))));
        }
    }

    #[test]
    fn a_bootstrap_address_is_taken_if_there_is_no_other() {
        for (given, expected) in [
            ("http://10.0.0.1:8998", "http://10.0.0.1:8998"),
            ("http://10.0.0.1:8998/", "http://10.0.0.1:8998"),
            ("prefill:8998", "http://prefill:8998"),
        ] {
            let mut it = params(json!({"do_remote_prefill": true, "transfer_id": "x",
                                       "remote_bootstrap_addr": given, "remote_host": null}));
            let Ok(Some(Role::Consume(consumes))) = Role::parse(Some(&it)) else {
                panic!("{it:?}")
            };
            assert_eq!(consumes.address.as_str(), expected);
            assert_eq!(Role::parse(Some(&consumes.to_params())), Ok(Some(Role::Consume(consumes))));
            it.insert("remote_address".to_owned(), json!("a:1"));
            let Ok(Some(Role::Consume(consumes))) = Role::parse(Some(&it)) else {
                panic!("{it:?}")
            };
            assert_eq!(consumes.address.as_str(), "a:1");
        }
    }

    #[test]
    fn requests_that_spell_one_address_differently_name_one_producer() {
        let of = |address: Value| {
            let mut it = params(json!({"do_remote_prefill": true, "transfer_id": "x"}));
            it.extend(params(address));
            match Role::parse(Some(&it)) {
                Ok(Some(Role::Consume(consumes))) => consumes.address,
                other => panic!("{it:?}: {other:?}"),
            }
        };
        let plain = of(json!({"remote_address": "10.0.0.5:7000"}));
        for other in [
            json!({"remote_address": "10.0.0.5:07000"}),
            json!({"remote_address": "[::ffff:10.0.0.5%7]:7000"}),
            json!({"remote_host": "::ffff:a00:5", "remote_port": 7000}),
        ] {
            assert_eq!(of(other), plain);
        }
        let bootstrap = of(json!({"remote_bootstrap_addr": "http://prefill:8998"}));
        assert_eq!(of(json!({"remote_bootstrap_addr": "PREFILL:08998/"})), bootstrap);
    }

    #[test]
    fn a_producer_of_another_connector_is_recognised() {
        for (engine, is_foreign) in [
            (json!("5a2b7c0e-95d5-4c0c-a4a1-2f4a3b1d9c3e_dp0"), true),
            (json!("zz"), true),
            (json!(7), false),
        ] {
            let it = params(json!({"do_remote_prefill": true, "remote_engine_id": engine,
                                   "remote_request_id": "cmpl-1", "remote_host": "a"}));
            let error = Role::parse(Some(&it)).expect_err("no engine of this connector");
            assert_eq!((error.key, error.is_foreign()), ("remote_engine_id", is_foreign));
        }
    }

    #[test]
    fn unknown_and_null_parameters_ask_for_no_handoff() {
        for value in [
            json!({}),
            json!({"do_remote_decode": false, "do_remote_prefill": null}),
            json!({"lmcache": {"a": 1}}),
        ] {
            assert_eq!(Role::parse(Some(&params(value))), Ok(None));
        }
        assert_eq!(Role::parse(None), Ok(None));
    }

    #[test]
    fn errors_name_the_key_that_is_missing_or_wrong() {
        for (value, key) in [
            (json!({"do_remote_decode": 1}), "do_remote_decode"),
            (json!({"do_remote_decode": true, "do_remote_prefill": true}), "do_remote_decode"),
            (json!({"do_remote_decode": true, "transfer_id": ""}), "transfer_id"),
            (json!({"do_remote_prefill": true}), "transfer_id"),
            (json!({"do_remote_prefill": true, "transfer_id": "x"}), "remote_address"),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x", "remote_address": "a:1",
                       "remote_engine_id": "zz"}),
                "remote_engine_id",
            ),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x", "remote_address": "a:1",
                       "remote_num_tokens": -3}),
                "remote_num_tokens",
            ),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x", "remote_host": "a"}),
                "remote_port",
            ),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x", "remote_host": "a",
                       "remote_port": 70000}),
                "remote_port",
            ),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x",
                       "remote_bootstrap_addr": "https://a:1"}),
                "remote_bootstrap_addr",
            ),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x",
                       "remote_bootstrap_addr": "http://a:1\r\nx"}),
                "remote_bootstrap_addr",
            ),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x",
                       "remote_address": "10.0.0.1 a.prefill:1"}),
                "remote_address",
            ),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x",
                       "remote_address": "127.1:1"}),
                "remote_address",
            ),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x",
                       "remote_address": "http://a:1"}),
                "remote_address",
            ),
            (
                json!({"do_remote_prefill": true, "transfer_id": "x", "remote_port": 1,
                       "remote_host": "10.0.0.1 a.prefill"}),
                "remote_host",
            ),
        ] {
            assert_eq!(Role::parse(Some(&params(value))).expect_err("wrong").key, key);
        }
    }
}
