//! A plan as the workers and the connector get it.

use super::Scheduler;
use super::plan::{Admission, Plan};
use crate::contract::vllm::{CachedRequestData, NewRequestData, SchedulerOutput};
use crate::worker::Sequence;

impl Scheduler {
    pub(crate) fn batch(&self, plan: &Plan) -> Vec<Sequence> {
        let sequences = plan.items.iter().map(|item| {
            let entry = self.entry(item.number);
            Sequence {
                tokens: entry.tokens[entry.computed..entry.computed + item.count].to_vec(),
                start: entry.computed,
                tables: entry.tables.blocks.clone(),
            }
        });
        sequences.collect()
    }

    pub(crate) fn vllm_output(&self, plan: &Plan) -> SchedulerOutput {
        let mut output = SchedulerOutput {
            step: self.steps,
            finished_req_ids: plan.finished.clone(),
            preempted_req_ids: plan.preempted.clone(),
            has_sync_kv_loads: plan.has_sync_loads,
            ..Default::default()
        };
        for item in &plan.items {
            let entry = self.entry(item.number);
            let (id, computed) = (entry.id.clone(), entry.computed);
            output.num_scheduled_tokens.insert(id.clone(), item.count);
            if item.admission == Admission::New {
                output.scheduled_new_reqs.push(NewRequestData {
                    id,
                    prompt: entry.tokens[..entry.prompt_len].to_vec(),
                    block_ids: entry.tables.blocks.clone(),
                    num_computed_tokens: computed,
                });
                continue;
            }
            let resumed = item.admission == Admission::Resumed;
            let blocks = if resumed { &entry.tables.blocks } else { &item.new_blocks };
            output.scheduled_cached_reqs.push(CachedRequestData {
                id,
                resumed,
                block_ids: blocks.clone(),
                num_computed_tokens: computed,
                num_output_tokens: entry.tokens.len() - entry.prompt_len,
            });
        }
        output
    }
}
