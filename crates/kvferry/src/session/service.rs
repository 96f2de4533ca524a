//! What a peer may ask over the control connection.

use crate::channel::Channel;
use crate::memory::region::{Region, RemoteRegion};
use crate::notify::Notification;
use crate::session::link::{Link, StreamFault};
use crate::sync::Arc;
use kvferry_proto::pack;
pub(crate) use kvferry_proto::pack::encode;
use kvferry_proto::{StreamId, WireCode};
use rmp_serde::decode::Error as Malformed;
use serde::de::Error as _;
use serde::{Deserialize, Serialize};

/// The regions this agent lets peers reach, a page at a time.
pub(crate) const REGIONS: u16 = 1;
/// Nothing; measures the round trip.
pub(crate) const PROBE: u16 = 2;

/// A stream of yours ends in the middle of an answer, and why. The stream is closed when this was
/// answered, so that the reason is there before the end.
pub(crate) const STREAM_FAULT: u16 = 3;

/// A notification for this agent, of data that is in place.
pub(crate) const NOTIFY: u16 = 4;

/// A message for whoever corresponds here; not interpreted.
pub(crate) const MESSAGE: u16 = 5;

/// Regions in one answer: about 100 bytes each, well below the size of a control message.
const PAGE: usize = 4096;

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RegionsQuery {
    /// Regions with higher ids only.
    pub(crate) after: u32,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RegionsPage {
    pub(crate) regions: Vec<RemoteRegion>,
    /// There may be further ones.
    pub(crate) more: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StreamFaultNote {
    pub(crate) stream: u32,
    pub(crate) code: u16,
    pub(crate) index: u32,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Note {
    pub(crate) name: String,
    #[serde(with = "serde_bytes")]
    pub(crate) message: Vec<u8>,
}

impl RegionsPage {
    /// The page that answers a query for regions after an id. They come in the order of their
    /// ids, so that a list of pages has an end.
    pub(crate) fn parse(body: &[u8], mut after: u32) -> Result<Self, Malformed> {
        let page: Self = pack::decode(body)?;
        if page.regions.len() > PAGE {
            return Err(Malformed::custom("more regions than a page has"));
        }
        for region in &page.regions {
            if region.id.0 <= after {
                return Err(Malformed::custom("regions out of order"));
            }
            after = region.id.0;
        }
        Ok(page)
    }
}

/// Answers one request.
pub(crate) fn answer(link: &Arc<Link>, kind: u16, body: &[u8]) -> (WireCode, Vec<u8>) {
    let core = &link.core;
    match kind {
        PROBE => (WireCode::Ok, Vec::new()),
        MESSAGE => match core.correspondent() {
            Some(correspondent) => {
                correspondent.received(&Channel::new(link), body);
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
        NOTIFY => match pack::decode::<Note>(body) {
            Ok(Note { name, message }) => {
                let from = link.info().map_or_else(String::new, |info| info.name.clone());
                if core.inbox.push(Notification { from, name, message }) {
                    core.counters.notifications_received.one();
                    (WireCode::Ok, Vec::new())
                } else {
                    (WireCode::Busy, Vec::new())
                }
            }
            Err(_) => (WireCode::Malformed, Vec::new()),
        },
        _ => (WireCode::Unsupported, Vec::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::region::Access;
    use kvferry_proto::{Incarnation, RegionId};

    #[test]
    fn a_list_of_regions_goes_on_where_the_last_page_ended_or_is_malformed() {
        let region = |id| RemoteRegion {
            incarnation: Incarnation(1),
            id: RegionId(id),
            addr: 1,
            len: 1,
            access: Access::READ,
        };
        let page = |ids: &[u32]| {
            let regions = ids.iter().map(|&id| region(id)).collect();
            encode(&RegionsPage { regions, more: true })
        };
        assert_eq!(RegionsPage::parse(&page(&[6, 9]), 5).expect("in order").regions.len(), 2);
        for ids in [&[5][..], &[7, 6], &[7, 7], &[0]] {
            assert!(RegionsPage::parse(&page(ids), 5).is_err(), "{ids:?} after 5");
        }
        let long: Vec<u32> = (6..).take(PAGE + 1).collect();
        assert!(RegionsPage::parse(&page(&long), 5).is_err(), "longer than a page");
    }
}
