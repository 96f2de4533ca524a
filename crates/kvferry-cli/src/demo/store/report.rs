//! The result of `kvferry demo store`, and what it must be.

use kvferry_bench::machine::Machine;
use kvferry_bench::{table, units};
use serde::Serialize;
use std::time::Duration;

use super::engine::{Answered, Served};
use super::{BLOCK_TOKENS, Plan, SAYS, TOKEN_BYTES};
use crate::output;

/// Answers of the engine processes.
#[derive(Debug)]
pub(super) struct Runs {
    /// Engine without a store: the shared prompts and the longer one.
    pub(super) without: Served,
    pub(super) first: Served,
    /// The same and the longer prompt.
    pub(super) second: Served,
    /// Engine without a store: the prompt of the killed engine.
    pub(super) right: Served,
    /// The prompts of `second`, and that of the killed engine.
    pub(super) after: Served,
    pub(super) killed: Killed,
}

/// Blocks that a killed engine left of the prompt that it was writing.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Killed {
    /// Engines that were killed until one left a prompt half written.
    kills: usize,
    blocks: usize,
    /// Blocks that the store had taken before the call that was cut off.
    whole_blocks: usize,
    /// Blocks that the next start read.
    found_blocks: usize,
}

impl Killed {
    pub(super) fn new(prompt: &[u32], kills: usize, after: &Served) -> Killed {
        let found = after.requests.last().map_or(0, |last| last.loaded_tokens);
        let blocks = prompt.len() / BLOCK_TOKENS;
        Killed { kills, blocks, whole_blocks: blocks / 2, found_blocks: found / BLOCK_TOKENS }
    }

    pub(super) fn is_half_written(&self) -> bool {
        self.found_blocks < self.blocks
    }
}

/// `kvferry demo store --json`.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    schema: &'static str,
    version: &'static str,
    machine: Machine,
    prefix_tokens: usize,
    block_tokens: usize,
    token_bytes: usize,
    /// Origin of the engine's times.
    cost: &'static str,
    /// An engine without a store.
    without: StartReport,
    starts: Vec<StartReport>,
    killed: Killed,
    /// The first start's time to the first token by that of the second start.
    first_token_ratio: f64,
    tokens_verified: usize,
    wrong_tokens: usize,
    /// Promises that were not kept.
    complaints: Vec<String>,
}

const COST: &str = "measured: what the engine takes to compute its integers; no time is added";

/// Figures of one start. Times are in milliseconds.
#[derive(Debug, Serialize)]
struct StartReport {
    name: &'static str,
    requests: usize,
    prompt_tokens: usize,
    loaded_blocks: usize,
    loaded_tokens: usize,
    cached_tokens: usize,
    computed_tokens: usize,
    stored_blocks: usize,
    corrupt_blocks: u64,
    store_opened_ms: f64,
    /// Time to the first token of the first request, from its submission.
    first_token_ms: f64,
    all_ms: f64,
    wrong_tokens: usize,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Tokens that differ, or are missing.
fn wrong(given: &[u32], right: &[u32]) -> usize {
    let differ = given.iter().zip(right).filter(|(given, right)| given != right).count();
    differ + given.len().abs_diff(right.len())
}

impl StartReport {
    fn new(name: &'static str, served: &Served, prompts: &[&[u32]], right: &[&[u32]]) -> Self {
        let sum = |of: fn(&Answered) -> usize| served.requests.iter().map(of).sum::<usize>();
        let prompt_tokens: usize = prompts.iter().map(|prompt| prompt.len()).sum();
        let loaded_tokens = sum(|it| it.loaded_tokens);
        let cached_tokens = sum(|it| it.cached_tokens);
        let missing = right.len().abs_diff(served.requests.len()) * SAYS;
        let answers = served.requests.iter().zip(right);
        let whole: Duration = served.requests.iter().map(|it| it.whole).sum();
        Self {
            name,
            requests: served.requests.len(),
            prompt_tokens,
            loaded_blocks: loaded_tokens / BLOCK_TOKENS,
            loaded_tokens,
            cached_tokens,
            computed_tokens: prompt_tokens.saturating_sub(loaded_tokens + cached_tokens),
            stored_blocks: served.stored,
            corrupt_blocks: served.corrupt,
            store_opened_ms: ms(served.opened),
            first_token_ms: served.requests.first().map_or(0.0, |it| ms(it.first_token)),
            all_ms: ms(whole),
            wrong_tokens: missing
                + answers.map(|(given, right)| wrong(&given.tokens, right)).sum::<usize>(),
        }
    }

    fn row(&self) -> Vec<String> {
        let count = |number: usize| units::count(number as u64);
        let time = |ms: f64| units::duration(Duration::from_secs_f64(ms / 1e3));
        vec![
            self.name.to_string(),
            count(self.requests),
            count(self.prompt_tokens),
            count(self.loaded_blocks),
            count(self.loaded_tokens),
            if self.store_opened_ms > 0.0 { time(self.store_opened_ms) } else { "-".into() },
            time(self.first_token_ms),
            time(self.all_ms),
            if self.wrong_tokens == 0 { "right".into() } else { "WRONG".into() },
        ]
    }
}

impl Report {
    pub(super) fn new(plan: &Plan, runs: &Runs) -> Report {
        let cut_short = plan.cut_short(runs.killed.kills - 1);
        let mut prompts: Vec<&[u32]> = plan.prompts.iter().map(Vec::as_slice).collect();
        prompts.extend([plan.longer.as_slice(), &cut_short]);
        let right = runs.without.requests.iter().chain(&runs.right.requests);
        let right: Vec<&[u32]> = right.map(|it| it.tokens.as_slice()).collect();
        let start = |name, served, requests: usize| {
            StartReport::new(
                name,
                served,
                &prompts[..requests],
                &right[..requests.min(right.len())],
            )
        };
        let shared = plan.prompts.len();
        let without = start("without a store", &runs.without, shared + 1);
        let starts = vec![
            start("first start", &runs.first, shared),
            start("second start", &runs.second, shared + 1),
            start("after the kill", &runs.after, shared + 2),
        ];
        let wrong_tokens = starts.iter().map(|start| start.wrong_tokens).sum();
        let complaints = complaints(runs, &prompts, wrong_tokens);
        Report {
            schema: "kvferry.demo-store/1",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            prefix_tokens: plan.prefix_tokens,
            block_tokens: BLOCK_TOKENS,
            token_bytes: TOKEN_BYTES,
            cost: COST,
            killed: runs.killed,
            first_token_ratio: starts[0].first_token_ms / starts[1].first_token_ms,
            tokens_verified: starts.iter().map(|start| start.requests * SAYS).sum(),
            wrong_tokens,
            complaints,
            without,
            starts,
        }
    }

    pub(super) fn complaint(&self) -> Option<String> {
        (!self.complaints.is_empty()).then(|| self.complaints.join("; "))
    }

    fn closing(&self) -> String {
        if let Some(why) = self.complaint() {
            return format!("not as it must be: {why}");
        }
        let Killed { blocks, found_blocks, .. } = self.killed;
        format!(
            "the second start read {} blocks instead of computing {} tokens, and had the first token {} times sooner;\n\
             after a kill in the middle of writing, {found_blocks} of {blocks} blocks were whole and were read;\n\
             all {} tokens are those of an engine without a store",
            units::count(self.starts[1].loaded_blocks as u64),
            units::count(self.starts[1].loaded_tokens as u64),
            units::figure(self.first_token_ratio),
            self.tokens_verified,
        )
    }
}

/// Returns the promises of a store that the runs did not keep. Times are shown, not judged.
fn complaints(runs: &Runs, prompts: &[&[u32]], wrong_tokens: usize) -> Vec<String> {
    let mut all = Vec::new();
    let mut must = |holds: bool, what: &str| {
        if !holds {
            all.push(what.to_string());
        }
    };
    // The last token of a prompt is always computed.
    let reusable = |prompt: &[u32]| (prompt.len() - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
    let reused = |it: &Answered| it.cached_tokens + it.loaded_tokens;
    let all_reused = |served: &Served, requests: usize| {
        let mut pairs = served.requests.iter().zip(prompts).take(requests);
        pairs.all(|(it, prompt)| reused(it) == reusable(prompt))
    };
    let shared = runs.first.requests.len();
    must(wrong_tokens == 0, &format!("{wrong_tokens} tokens are wrong"));
    must(
        runs.first.requests.iter().all(|it| it.loaded_tokens == 0),
        "the first start found blocks in an empty store",
    );
    let not_stored = runs.first.not_stored + runs.second.not_stored + runs.after.not_stored;
    must(not_stored == 0, &format!("the store did not take {not_stored} blocks"));
    let from_store = runs.second.requests.first().map_or(0, |it| it.loaded_tokens);
    must(
        from_store == reusable(prompts[0]) && all_reused(&runs.second, shared),
        "the second start computed blocks that the first start had put",
    );
    let longer = runs.second.requests.get(shared).map_or(0, reused);
    must(
        longer >= reusable(prompts[0]),
        "the second start computed what the longer prompt begins with",
    );
    must(runs.second.corrupt == 0, "the second start found damaged blocks");
    must(
        all_reused(&runs.after, shared + 1),
        "the start after the kill computed blocks that were put before it",
    );
    let Killed { kills, whole_blocks, found_blocks, .. } = runs.killed;
    must(
        found_blocks >= whole_blocks,
        &format!(
            "the start after the kill found {found_blocks} blocks of the killed engine, which had put {whole_blocks}"
        ),
    );
    must(
        runs.killed.is_half_written(),
        &format!("none of {kills} kills came while blocks were written"),
    );
    all
}

impl output::Report for Report {
    fn text(&self) -> String {
        let starts = std::iter::once(&self.without).chain(&self.starts);
        let rows: Vec<_> = starts.map(StartReport::row).collect();
        let header = [
            "engine",
            "prompts",
            "prompt tokens",
            "blocks read",
            "not computed",
            "store open",
            "first token",
            "all prompts",
            "output",
        ];
        format!(
            "{}\ntime to compute is {COST}\n\n{}\n",
            table::aligned(&header, &rows),
            self.closing()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(reused: &[(usize, usize)]) -> Served {
        let answered = |&(cached_tokens, loaded_tokens): &(usize, usize)| Answered {
            tokens: vec![1, 2, 3, 4],
            first_token: Duration::from_millis(2),
            whole: Duration::from_millis(3),
            cached_tokens,
            loaded_tokens,
        };
        Served {
            opened: Duration::from_millis(1),
            requests: reused.iter().map(answered).collect(),
            stored: 5,
            not_stored: 0,
            corrupt: 0,
        }
    }

    /// One prompt of 40 tokens, a longer one of 80, and one of a killed engine, of 64.
    fn runs() -> Runs {
        let after = served(&[(0, 32), (32, 32), (0, 32)]);
        Runs {
            without: served(&[(0, 0), (32, 0)]),
            first: served(&[(0, 0)]),
            second: served(&[(0, 32), (32, 0)]),
            right: served(&[(0, 0)]),
            killed: Killed::new(&[0; 64], 1, &after),
            after,
        }
    }

    fn judged(runs: &Runs) -> Vec<String> {
        let prompts: [&[u32]; 3] = [&[0; 40], &[0; 80], &[0; 64]];
        complaints(runs, &prompts, 0)
    }

    #[test]
    fn a_run_as_promised_has_no_complaint() {
        assert_eq!(judged(&runs()), Vec::<String>::new());
    }

    #[test]
    fn each_broken_promise_is_named() {
        type Break = fn(&mut Runs);
        let breaks: [(Break, &str); 6] = [
            (|it| it.first.requests[0].loaded_tokens = 16, "empty store"),
            (|it| it.first.not_stored = 1, "did not take 1 blocks"),
            (|it| it.second.requests[0].loaded_tokens = 16, "the first start had put"),
            (|it| it.second.corrupt = 1, "damaged"),
            (|it| it.killed.found_blocks = 1, "which had put 2"),
            (|it| it.killed.found_blocks = 4, "none of 1 kills"),
        ];
        for (broken, named) in breaks {
            let mut runs = runs();
            broken(&mut runs);
            let complaints = judged(&runs);
            assert!(complaints.len() == 1 && complaints[0].contains(named), "{complaints:?}");
        }
    }

    #[test]
    fn tokens_that_differ_and_tokens_that_are_missing_are_wrong() {
        assert_eq!(wrong(&[1, 2, 3], &[1, 2, 3]), 0);
        assert_eq!(wrong(&[1, 9, 3], &[1, 2, 3]), 1);
        assert_eq!(wrong(&[1], &[1, 2, 3]), 2);
    }
}
