//! Answers the requests that peers send over the control connection.

use crate::callback::contain;
use crate::channel::Channel;
use crate::error::{Error, ErrorKind};
use crate::memory::region::Region;
use crate::notify::Notification;
use crate::session::sessions::Sessions;
use crate::sync::Arc;
use crate::transfer::lanes::StreamFault;
use crate::transfer::link::Link;
use crate::transfer::requests::{
    MESSAGE, NOTIFY, Note, PAGE, PROBE, REGION, REGIONS, RegionsPage, RegionsQuery, STREAM_FAULT,
    StreamFaultNote, encode,
};
use kvferry_proto::{StreamId, WireCode, pack};

/// The error that ends a session whose message handler panicked: whether the handler took the message
/// is not known.
pub(crate) fn panicked() -> Error {
    Error::new(ErrorKind::Internal, "the message handler of this agent panicked")
}

/// Answers one request. Runs on the control thread.
pub(crate) fn answer(
    sessions: &Sessions,
    link: &Arc<Link>,
    kind: u16,
    body: &[u8],
) -> (WireCode, Vec<u8>) {
    let core = &link.core;
    match kind {
        PROBE => (WireCode::Ok, Vec::new()),
        MESSAGE => match sessions.message_handler() {
            Some(message_handler) => {
                let channel = Channel::new(link);
                let received = || message_handler.received(&channel, body);
                if contain("a message handler", received).is_none() {
                    channel.close(panicked());
                }
                (WireCode::Ok, Vec::new())
            }
            None => (WireCode::Unsupported, Vec::new()),
        },
        STREAM_FAULT => match pack::decode::<StreamFaultNote>(body) {
            Ok(note) => {
                let fault = StreamFault { code: WireCode::from_u16(note.code), index: note.index };
                link.note_fault(StreamId(note.stream), fault);
                (WireCode::Ok, Vec::new())
            }
            Err(_) => (WireCode::Malformed, Vec::new()),
        },
        REGIONS => {
            let Ok(query) = pack::decode::<RegionsQuery>(body) else {
                return (WireCode::Malformed, Vec::new());
            };
            let mut regions: Vec<_> = core
                .memory
                .regions
                .all()
                .iter()
                .filter(|r| r.id().0 > query.after && (r.access().read || r.access().write))
                .map(Region::remote)
                .take(PAGE + 1)
                .collect();
            let more = regions.len() > PAGE;
            regions.truncate(PAGE);
            (WireCode::Ok, encode(&RegionsPage { regions, more }))
        }
        REGION => {
            let name = std::str::from_utf8(body).unwrap_or_default();
            let named = core.memory.regions.by_name(name);
            match named.filter(|r| r.access().read || r.access().write) {
                Some(region) => (WireCode::Ok, region.remote().to_bytes()),
                None => (WireCode::UnknownRegion, Vec::new()),
            }
        }
        NOTIFY => match pack::decode::<Note>(body) {
            Ok(Note { name, message }) => {
                let from = link.info().map_or_else(String::new, |info| info.name.clone());
                let code = core.inbox.push(Notification { from, name, message });
                if code.is_ok() {
                    core.counters.notifications_received.one();
                }
                (code, Vec::new())
            }
            Err(_) => (WireCode::Malformed, Vec::new()),
        },
        _ => (WireCode::Unsupported, Vec::new()),
    }
}
