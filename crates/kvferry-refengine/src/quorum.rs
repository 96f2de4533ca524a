//! Checks the ranks' reports against the contract and counts them.

use crate::config::Rank;
use crate::contract::vllm::{ConnectorOutput, TransferResults};
use crate::contract::{Channel, Violation};
use crate::layout::BlockId;
use crate::request::RequestId;
use crate::scheduler::Scheduler;
use rustc_hash::{FxHashMap, FxHashSet};

/// A rank's report after a step.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) results: TransferResults,
    pub(crate) invalid: Vec<BlockId>,
    pub(crate) meta: Option<Vec<u8>>,
}

/// vLLM's rule: a request counts when enough ranks have reported it. It failed if it failed on any of
/// them.
#[derive(Debug, Default)]
pub(crate) struct Countdown {
    sending: FxHashMap<RequestId, FxHashSet<Rank>>,
    recving: FxHashMap<RequestId, FxHashSet<Rank>>,
    failed: FxHashSet<RequestId>,
}

impl Countdown {
    pub(crate) fn count(
        &mut self,
        reports: Vec<(Rank, Report)>,
        expected: usize,
        blocks: &[usize],
        scheduler: &mut Scheduler,
    ) -> ConnectorOutput {
        let mut output = ConnectorOutput::default();
        for (rank, Report { results, invalid, meta }) in reports {
            let (sent, received) = (&results.finished_sending, &results.finished_recving);
            for (channel, ids, waiting, done) in [
                (Channel::Sending, sent, &mut self.sending, &mut output.finished_sending),
                (Channel::Recving, received, &mut self.recving, &mut output.finished_recving),
            ] {
                for id in ids {
                    let twice = waiting.get(id).is_some_and(|ranks| ranks.contains(&rank))
                        || done.contains(id);
                    let violation = match twice {
                        true => Some(Violation::ReportedTwice { rank, channel, id: id.clone() }),
                        false => scheduler.breach(rank, channel, id),
                    };
                    if let Some(violation) = violation {
                        scheduler.violations.push(violation);
                        continue;
                    }
                    let ranks = waiting.entry(id.clone()).or_default();
                    ranks.insert(rank);
                    if ranks.len() >= expected {
                        waiting.remove(id);
                        done.push(id.clone());
                    }
                }
            }
            for id in results.failed_recving {
                if results.finished_recving.contains(&id) {
                    self.failed.insert(id);
                } else {
                    scheduler.violations.push(Violation::FailedWithoutFinished { rank, id });
                }
            }
            collect_invalid(rank, invalid, blocks, scheduler, &mut output);
            output.worker_meta.extend(meta.map(|meta| (rank, meta)));
        }
        let failed = output.finished_recving.iter().filter(|id| self.failed.remove(*id));
        output.failed_recving = failed.cloned().collect();
        // Drop failures whose reports were refused as violations.
        self.failed.retain(|id| self.recving.contains_key(id));
        output
    }
}

fn collect_invalid(
    rank: Rank,
    invalid: Vec<BlockId>,
    blocks: &[usize],
    scheduler: &mut Scheduler,
    output: &mut ConnectorOutput,
) {
    if invalid.is_empty() {
        return;
    }
    let [blocks] = *blocks else {
        let groups = blocks.len();
        scheduler.violations.push(Violation::BlockErrorsOfGroups { rank, groups });
        return;
    };
    for block in invalid {
        if block.is_null() || block.index() >= blocks {
            scheduler.violations.push(Violation::UnknownBlock { rank, block, blocks });
        } else if !output.invalid_block_ids.contains(&block) {
            output.invalid_block_ids.push(block);
        }
    }
}
