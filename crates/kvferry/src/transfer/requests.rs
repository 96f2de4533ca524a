//! The requests over the control connection: their kinds and bodies.

use crate::memory::region::RemoteRegion;
use kvferry_proto::pack;
pub(crate) use kvferry_proto::pack::encode;
use rmp_serde::decode::Error as Malformed;
use serde::de::Error as _;
use serde::{Deserialize, Serialize};

/// The regions that this agent makes accessible, one page per request.
pub(crate) const REGIONS: u16 = 1;
/// An empty request, which measures the round trip.
pub(crate) const PROBE: u16 = 2;

/// The reason why the sender ends one of its streams in the middle of an answer. The sender closes
/// the stream once this request is answered, so the reason arrives before the end.
pub(crate) const STREAM_FAULT: u16 = 3;

/// A notification for the receiving agent; its data is in place.
pub(crate) const NOTIFY: u16 = 4;

/// A message for the message handler; its body is not interpreted.
pub(crate) const MESSAGE: u16 = 5;

/// Looks a region up by name: the body is the name, the response a [`RemoteRegion`].
pub(crate) const REGION: u16 = 6;

/// Regions in one response: about 100 bytes each, well below the size of a control message.
pub(crate) const PAGE: usize = 4096;

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RegionsQuery {
    /// Only regions with higher ids.
    pub(crate) after: u32,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RegionsPage {
    pub(crate) regions: Vec<RemoteRegion>,
    /// There may be further regions.
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
    /// Parses the response to a query for regions after an id. Regions must come in the order of
    /// their ids, so that a list of pages ends.
    pub(crate) fn parse(body: &[u8], mut after: u32) -> Result<Self, Malformed> {
        let page: Self = pack::decode(body)?;
        if page.regions.len() > PAGE {
            return Err(Malformed::custom("more regions than fit on a page"));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::region::Access;
    use kvferry_proto::{Incarnation, RegionId};

    #[test]
    fn a_page_of_regions_that_does_not_follow_the_last_one_is_malformed() {
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
