//! The connector's scheduler half behind either seam.

use crate::contract::vllm::Match;
use crate::contract::{RequestView, trt, vllm};
use crate::layout::BlockId;
use crate::request::Params;

/// The scheduler half of a connector. The variant decides which engine's rules hold.
pub(crate) enum Seam {
    None,
    Vllm(Box<dyn vllm::SchedulerConnector>),
    Trt(Box<dyn trt::SchedulerConnector>),
}

impl Seam {
    pub(super) fn matched(&mut self, request: &RequestView<'_>, computed: usize) -> Match {
        match self {
            Self::None => Match::NONE,
            Self::Vllm(connector) => connector.get_num_new_matched_tokens(request, computed),
            Self::Trt(connector) => {
                let (tokens, load_async) = connector.get_num_new_matched_tokens(request, computed);
                Match::Tokens { tokens, load_async }
            }
        }
    }

    pub(super) fn allocated(
        &mut self,
        request: &RequestView<'_>,
        blocks: &[Vec<BlockId>],
        external: usize,
    ) {
        match self {
            Self::None => {}
            Self::Vllm(connector) => connector.update_state_after_alloc(request, blocks, external),
            Self::Trt(connector) => connector.update_state_after_alloc(request, &pages(blocks)),
        }
    }

    pub(super) fn finished(
        &mut self,
        request: &RequestView<'_>,
        blocks: &[Vec<BlockId>],
    ) -> (bool, Option<Params>) {
        match self {
            Self::None => (false, None),
            Self::Vllm(connector) => connector.request_finished(request, blocks),
            Self::Trt(connector) => (connector.request_finished(request, &pages(blocks)), None),
        }
    }

    pub(super) const fn is_trt(&self) -> bool {
        matches!(self, Self::Trt(_))
    }
}

fn pages(blocks: &[Vec<BlockId>]) -> Vec<Vec<i32>> {
    blocks.iter().map(|group| group.iter().map(|id| trt::page(*id)).collect()).collect()
}
