//! What prefill and decode say to each other over the pipe.

use serde::{Deserialize, Serialize};

use crate::lines::Described;

use super::pool::Shape;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Start an agent and a pool of this shape. Answered by [`Opened`].
    Open { shape: Shape, request_blocks: u32, raw_bytes: usize },
    /// Poison the pool and choose blocks. Answered by the block table of each request.
    Prepare(WaveId),
    /// Digest what is there. Answered by [`Verified`].
    Verify(WaveId),
}

/// The requests that are in the pools together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WaveId {
    pub(super) seed: u64,
    pub(super) round: u32,
    pub(super) first_request: u32,
    pub(super) requests: u32,
}

impl WaveId {
    /// The content of one page: the `ordinal`th block of the wave's `request`th request.
    pub(super) fn page(&self, request: u32, layer: u32, ordinal: u32) -> crate::content::Content {
        let request = u64::from(self.first_request + request);
        let (layer, ordinal) = (u64::from(layer), u64::from(ordinal));
        crate::content::Content::of(&[self.seed, u64::from(self.round), request, layer, ordinal])
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Opened {
    /// Where decode's agent is reached.
    pub(super) agent: String,
    /// One region per layer.
    pub(super) layers: Vec<Described>,
    /// Where one raw TCP stream may be measured.
    pub(super) raw: std::net::SocketAddr,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Verified {
    /// When decode was told of each request of the wave, in nanoseconds of the shared clock.
    pub(super) told_ns: Vec<u64>,
    pub(super) pages: u64,
    /// Pages that belong to no request and still hold the poison.
    pub(super) untouched_pages: u64,
    pub(super) wrong_pages: u64,
    pub(super) wrong: Option<Wrong>,
}

/// The first page that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wrong {
    pub(super) round: u32,
    /// `None`: the block belongs to no request, and somebody wrote to it.
    pub(super) request: Option<u32>,
    pub(super) layer: u32,
    /// In decode's pool.
    pub(super) block: u32,
    /// Of the first wrong byte in the page.
    pub(super) offset: usize,
    /// Nothing arrived: the poison is still there.
    pub(super) poison: bool,
}

impl Wrong {
    pub(super) fn describe(&self, wrong_pages: u64) -> String {
        let Wrong { round, layer, block, offset, .. } = self;
        let whose = match self.request {
            Some(request) => format!("request {request}"),
            None => "no request's block".to_string(),
        };
        let how = match (self.request, self.poison) {
            (None, _) => "was written to",
            (_, true) => "was never written (it still holds the poison)",
            (_, false) => "holds other bytes than the source",
        };
        format!(
            "WRONG BYTES: round {}, {whose}: layer {layer}, block {block} {how}, first at byte \
             {offset} of the page; {wrong_pages} wrong pages in this wave",
            round + 1
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_wave_all_differ_and_waves_too() {
        let wave = WaveId { seed: 1, round: 0, first_request: 0, requests: 2 };
        let later = WaveId { round: 1, ..wave };
        let next = WaveId { first_request: 2, ..wave };
        let pages =
            [wave.page(0, 0, 0), wave.page(1, 0, 0), wave.page(0, 1, 0), wave.page(0, 0, 1)];
        for (at, page) in pages.iter().enumerate() {
            assert!(pages[at + 1..].iter().all(|other| other != page));
            assert!(*page != later.page(0, 0, 0) && *page != next.page(0, 0, 0));
        }
        assert_eq!(next.page(0, 3, 4), WaveId { requests: 9, ..wave }.page(2, 3, 4));
    }

    #[test]
    fn a_wrong_page_is_named_by_layer_and_block() {
        let wrong =
            Wrong { round: 0, request: Some(3), layer: 31, block: 77, offset: 12, poison: false };
        let text = wrong.describe(1);
        assert!(text.contains("request 3: layer 31, block 77"), "{text}");
        let stray = Wrong { request: None, ..wrong };
        assert!(stray.describe(1).contains("was written to"));
    }
}
