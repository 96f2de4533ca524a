//! Answers the requests that peers send over the control connection.

use crate::error::{Error, ErrorKind};
use crate::memory::region::Region;
use crate::notify::Notification;
use crate::sync::Arc;
use crate::transfer::link::Link;
use crate::transfer::requests::{
    NOTIFY, Note, PAGE, PROBE, REGION, REGIONS, RegionsPage, RegionsQuery, encode,
};
use crate::transport::Services;
use kvferry_proto::{RegionId, WireCode, pack};
use serde::de::DeserializeOwned;

/// The error that ends a session whose message handler panicked: whether the handler took the message
/// is not known.
pub(crate) fn panicked() -> Error {
    Error::new(ErrorKind::Internal, "the message handler of this agent panicked")
}

/// Answers one request. Runs on the control thread.
pub(crate) fn answer(
    services: &Services,
    link: &Arc<Link>,
    kind: u16,
    body: &[u8],
) -> (WireCode, Vec<u8>) {
    match serve(services, link, kind, body) {
        Ok(body) => (WireCode::Ok, body),
        Err(code) => (code, Vec::new()),
    }
}

fn serve(
    services: &Services,
    link: &Arc<Link>,
    kind: u16,
    body: &[u8],
) -> Result<Vec<u8>, WireCode> {
    let core = &link.core;
    match kind {
        PROBE => {}
        REGIONS => {
            let query: RegionsQuery = parse(body)?;
            let after = RegionId(query.after);
            let reachable = core.memory.regions.reachable_after(after, PAGE + 1);
            let mut regions: Vec<_> = reachable.iter().map(Region::remote).collect();
            let more = regions.len() > PAGE;
            regions.truncate(PAGE);
            return Ok(encode(&RegionsPage { regions, more }));
        }
        REGION => {
            let name = std::str::from_utf8(body).unwrap_or_default();
            let named = core.memory.regions.by_name(name);
            let reachable = named.filter(|r| r.access().read || r.access().write);
            return Ok(reachable.ok_or(WireCode::UnknownRegion)?.remote().to_bytes());
        }
        NOTIFY => {
            let Note { name, message } = parse(body)?;
            let from = link.info().map_or_else(String::new, |info| info.name.clone());
            let from_ip = Some(link.peer_addr.ip());
            match core.deliver(Notification { from, from_ip, name, message }) {
                WireCode::Ok => {}
                code => return Err(code),
            }
        }
        _ => return services.answer(link, kind, body).unwrap_or(Err(WireCode::Unsupported)),
    }
    Ok(Vec::new())
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, WireCode> {
    pack::decode(body).map_err(|_| WireCode::Malformed)
}
