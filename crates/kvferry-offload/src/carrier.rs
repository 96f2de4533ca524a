//! The state that all threads of a driver share.

use crate::host::Host;
use crate::names::Names;
use crate::options::{Fault, Options};
use crate::pages::Pages;
use crate::stats::Counters;
use kvferry::Agent;
use kvferry_blocks::{Outcome, Tier, Transfer};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Pages, host memory, names and counters of one driver.
#[derive(Debug)]
pub(crate) struct Carrier {
    pub(crate) agent: Agent,
    pub(crate) pages: Pages,
    pub(crate) host: Host,
    pub(crate) options: Options,
    pub(crate) names: Names,
    pub(crate) counters: Arc<Counters>,
}

impl Carrier {
    pub(crate) fn ask(&self, transfer: &Transfer) -> Fault {
        self.options.intercept.as_ref().map_or(Fault::None, |intercept| intercept.ask(transfer))
    }

    pub(crate) fn count(&self, transfer: &Transfer, outcome: Outcome) {
        let counters = &self.counters;
        if outcome == Outcome::Failed {
            counters.failed.fetch_add(1, Relaxed);
            return;
        }
        let kind = match (transfer.from.tier, transfer.to.tier) {
            (_, Tier::Secondary) => &counters.offloaded,
            (Tier::Secondary, Tier::Primary) => &counters.onboarded,
            (Tier::Primary, Tier::Primary) => &counters.copied,
        };
        kind.fetch_add(1, Relaxed);
        counters.bytes.fetch_add(self.pages.page_bytes(transfer.group.into()), Relaxed);
    }
}
