//! The connector's scheduler half, if there is one.

use crate::contract::RequestView;
use crate::contract::vllm::{Match, SchedulerConnector};
use crate::layout::BlockId;
use crate::request::Params;

/// The scheduler half of a connector.
pub(crate) enum Seam {
    None,
    Vllm(Box<dyn SchedulerConnector>),
}

impl Seam {
    pub(super) fn matched(&mut self, request: &RequestView<'_>, computed: usize) -> Match {
        match self {
            Self::None => Match::NONE,
            Self::Vllm(connector) => connector.get_num_new_matched_tokens(request, computed),
        }
    }

    pub(super) fn allocated(
        &mut self,
        request: &RequestView<'_>,
        blocks: &[Vec<BlockId>],
        external: usize,
    ) {
        if let Self::Vllm(connector) = self {
            connector.update_state_after_alloc(request, blocks, external);
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
        }
    }
}
