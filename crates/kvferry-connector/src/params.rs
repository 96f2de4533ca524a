//! `kv_transfer_params`: what a router and two engines exchange about a request.
//!
//! Plain JSON as in vLLM's API, with vLLM's names where it has one:
//!
//! | key | in | |
//! |---|---|---|
//! | `do_remote_decode` | a producer's request | true: keep its KV for a consumer |
//! | `do_remote_prefill` | a consumer's request | true: a producer has, or will have, its KV |
//! | `transfer_id` | both | the handoff's id; a producer without one draws its own |
//! | `remote_address` | a consumer's | `host:port` of the agent of any rank of the producing engine |
//! | `remote_engine_id` | a consumer's, optional | the life of that engine, from its response |
//! | `remote_num_tokens` | a consumer's, optional | how many tokens the producer has the KV of |
//!
//! Concurrent: a router gives both requests one `transfer_id`, and the consumer's the address.
//! Sequential: the producer's response carries what the consumer's request needs ([`ConsumerParams`]).

use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::HandoffId;
use serde_json::{Map, Value, json};
use thiserror::Error;

/// `kv_transfer_params` of a request or response.
pub type Params = Map<String, Value>;

/// What a request's parameters ask for.
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

/// Where a consumer finds the KV of its request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerParams {
    /// The handoff's id.
    pub transfer: HandoffId,
    /// `host:port` of an agent of the producing engine.
    pub address: String,
    /// The life of that engine that is meant, if it is known.
    pub engine: Option<EngineId>,
    /// How many tokens the producer has the KV of. If unknown: all that the consumer can use.
    pub tokens: Option<u64>,
}

/// Invalid parameters of a request that asks for a handoff.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("kv_transfer_params: {key} {problem}")]
pub struct ParamsError {
    /// The key of `kv_transfer_params`.
    pub key: &'static str,
    /// What is wrong with its value.
    pub problem: &'static str,
}

impl Role {
    /// What the parameters ask for; `None` if they ask for no handoff.
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
            (true, false) => Ok(Some(Self::Produce { transfer: transfer(params)? })),
            (false, true) => {
                let transfer = transfer(params)?.ok_or(wrong("transfer_id", "is missing"))?;
                let address = text(params, "remote_address")?
                    .filter(|address| !address.is_empty())
                    .ok_or(wrong("remote_address", "is missing"))?;
                let engine = match text(params, "remote_engine_id")? {
                    None => None,
                    Some(id) => Some(EngineId::parse(id).ok_or(wrong(
                        "remote_engine_id",
                        "is not an engine's id: 32 hexadecimal digits",
                    ))?),
                };
                let tokens = match params.get("remote_num_tokens") {
                    None | Some(Value::Null) => None,
                    Some(value) => {
                        Some(value.as_u64().ok_or(wrong("remote_num_tokens", "is not a number"))?)
                    }
                };
                let address = address.to_owned();
                Ok(Some(Self::Consume(ConsumerParams { transfer, address, engine, tokens })))
            }
        }
    }
}

impl ConsumerParams {
    /// The parameters of a consumer's request.
    pub fn to_params(&self) -> Params {
        let mut params = Params::new();
        params.insert("do_remote_prefill".to_owned(), json!(true));
        params.insert("do_remote_decode".to_owned(), json!(false));
        params.insert("transfer_id".to_owned(), json!(self.transfer.as_str()));
        params.insert("remote_address".to_owned(), json!(self.address));
        if let Some(engine) = self.engine {
            params.insert("remote_engine_id".to_owned(), json!(engine.to_string()));
        }
        if let Some(tokens) = self.tokens {
            params.insert("remote_num_tokens".to_owned(), json!(tokens));
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

fn transfer(params: &Params) -> Result<Option<HandoffId>, ParamsError> {
    let Some(name) = text(params, "transfer_id")? else { return Ok(None) };
    let id = HandoffId::new(name);
    id.map(Some).map_err(|_| wrong("transfer_id", "must have 1 to 256 bytes"))
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
            address: "10.0.0.1:4711".to_owned(),
            engine: Some(EngineId(7 << 100)),
            tokens: Some(8191),
        };
        assert_eq!(Role::parse(Some(&offered.to_params())), Ok(Some(Role::Consume(offered))));
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
        ] {
            assert_eq!(Role::parse(Some(&params(value))).expect_err("wrong").key, key);
        }
    }
}
