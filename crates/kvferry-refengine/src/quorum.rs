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

/// TensorRT-LLM's rule for one direction: an id counts when every rank has reported it.
#[derive(Debug)]
pub(crate) struct Intersection {
    channel: Channel,
    /// The ranks that have reported each id that was handed in.
    pending: FxHashMap<u64, FxHashSet<Rank>>,
}

impl Intersection {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { channel, pending: FxHashMap::default() }
    }

    /// Awaits reports of these ids.
    pub(crate) fn hand_in(&mut self, numbers: &[u64]) {
        self.pending.extend(numbers.iter().map(|number| (*number, FxHashSet::default())));
    }

    /// Counts one rank's report.
    pub(crate) fn report(&mut self, rank: Rank, numbers: &[u64], scheduler: &mut Scheduler) {
        let channel = self.channel;
        for number in numbers {
            let new = self.pending.get_mut(number).map(|ranks| ranks.insert(rank));
            let violation = match (new, scheduler.number_to_id(*number)) {
                (Some(true), _) => continue,
                (Some(false), Some(id)) => Violation::ReportedTwice { rank, channel, id },
                _ => Violation::NotHandedIn { rank, channel, number: *number },
            };
            scheduler.violations.push(violation);
        }
    }

    /// Takes the ids that all `ranks` have reported.
    pub(crate) fn take_complete(&mut self, ranks: usize) -> Vec<u64> {
        let mut complete: Vec<_> = self
            .pending
            .iter()
            .filter(|(_, reported)| reported.len() == ranks)
            .map(|(number, _)| *number)
            .collect();
        complete.sort_unstable();
        for number in &complete {
            self.pending.remove(number);
        }
        complete
    }
}
