//! Requests made like those of tools and agents.
//!
//! Two kinds come at random times of an hour. A call of a tool has the prompt of the tool, which all its calls share, and
//! a few blocks of its own, which never come again. A conversation begins with a block that all share, and goes on after
//! some minutes, or never; a turn repeats the blocks of the turn before, except the last one, which was not full.
//!
//! The kinds, shares and lengths are those of 94 consecutive requests of `mooncake_trace.jsonl`, which the Mooncake project
//! released with its technical report. So the number of requests, their mean length and the share of blocks that came before
//! are close to those of the project's "tool and agent" workload (Qin et al., FAST 2025, table 2): 23 608, 8 596 tokens, 59 %.

use std::ops::RangeInclusive;

use fastrand::Rng;

use super::trace::Request;

const DURATION_MS: u64 = 3_600_000;
/// Calls of tools, and first turns of conversations.
const ARRIVALS: usize = 19_700;
/// The arrivals that are calls of a tool; the others begin a conversation.
const TOOLS: [Tool; 2] =
    [Tool { percent: 45, shared: 12, own: 1..=4 }, Tool { percent: 17, shared: 5, own: 1..=2 }];
/// Blocks of the system prompt that all conversations share.
const SYSTEM_PROMPT: u64 = 1;
/// Blocks that are new in the first turn of a conversation, and in each later one.
const FIRST_TURN: RangeInclusive<u64> = 1..=64;
const LATER_TURN: RangeInclusive<u64> = 1..=16;
/// Milliseconds between two turns of a conversation.
const BETWEEN_TURNS_MS: RangeInclusive<u64> = 40_000..=700_000;
/// Probability of another turn after the first one, and after each later one.
const SECOND_TURN: f64 = 0.25;
const FURTHER_TURN: f64 = 0.6;
/// The requests are the same in every run.
const SEED: u64 = 20_250_221;

struct Tool {
    /// Percentage of the arrivals that call this tool.
    percent: u32,
    /// Blocks that all calls begin with.
    shared: u64,
    /// Blocks that only one call has.
    own: RangeInclusive<u64>,
}

/// Requests in the order of their times.
pub(super) fn requests() -> Vec<Request> {
    let mut maker = Maker { rng: Rng::with_seed(SEED), next: 0, requests: Vec::new() };
    let system_prompt = maker.blocks(SYSTEM_PROMPT);
    let (mut tools, mut below) = (Vec::new(), 0);
    for tool in TOOLS {
        below += tool.percent;
        tools.push((below, maker.blocks(tool.shared), tool.own));
    }
    for _ in 0..ARRIVALS {
        let at = maker.rng.u64(..DURATION_MS);
        let drawn = maker.rng.u32(..100);
        match tools.iter().find(|(below, ..)| drawn < *below) {
            Some((_, prompt, own)) => maker.call(at, prompt, own),
            None => maker.converse(at, &system_prompt),
        }
    }
    maker.requests.sort_by_key(|request| request.at);
    maker.requests
}

struct Maker {
    rng: Rng,
    /// Id of the next new block.
    next: u64,
    requests: Vec<Request>,
}

impl Maker {
    fn blocks(&mut self, count: u64) -> Vec<u64> {
        let first = self.next;
        self.next += count;
        (first..self.next).collect()
    }

    fn some_blocks(&mut self, count: &RangeInclusive<u64>) -> Vec<u64> {
        let count = self.draw(count);
        self.blocks(count)
    }

    /// A number whose logarithm is distributed evenly.
    fn draw(&mut self, range: &RangeInclusive<u64>) -> u64 {
        let [least, beyond] = [*range.start() as f64, *range.end() as f64 + 1.0];
        let drawn = least * (beyond / least).powf(self.rng.f64());
        (drawn as u64).min(*range.end())
    }

    fn call(&mut self, at: u64, prompt: &[u64], own: &RangeInclusive<u64>) {
        let blocks = [prompt, &self.some_blocks(own)].concat();
        self.requests.push(Request { at, blocks });
    }

    fn converse(&mut self, mut at: u64, system_prompt: &[u64]) {
        let mut blocks = [system_prompt, &self.some_blocks(&FIRST_TURN)].concat();
        let mut probability = SECOND_TURN;
        while at < DURATION_MS {
            self.requests.push(Request { at, blocks: blocks.clone() });
            if self.rng.f64() >= probability {
                return;
            }
            at += self.draw(&BETWEEN_TURNS_MS);
            blocks.pop();
            blocks.extend(self.some_blocks(&LATER_TURN));
            probability = FURTHER_TURN;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    #[test]
    fn the_requests_have_the_shape_that_was_published() {
        let requests = requests();
        assert!((23_000..24_200).contains(&requests.len()), "{}", requests.len());
        assert!(requests.is_sorted_by_key(|request| request.at));
        let (mut seen, mut repeated) = (HashSet::new(), 0);
        for request in &requests {
            repeated += request.blocks.iter().take_while(|block| seen.contains(*block)).count();
            seen.extend(request.blocks.iter().copied());
        }
        let blocks: usize = requests.iter().map(|request| request.blocks.len()).sum();
        let [mean, again] =
            [blocks as f64 / requests.len() as f64, repeated as f64 / blocks as f64];
        assert!((15.0..18.0).contains(&mean), "{mean} blocks");
        assert!((0.54..0.62).contains(&again), "{again} came before");
    }

    #[test]
    fn a_block_has_one_block_before_it() {
        let mut before = HashMap::new();
        for request in requests() {
            let mut parent = None;
            for block in request.blocks {
                assert_eq!(*before.entry(block).or_insert(parent), parent);
                parent = Some(block);
            }
        }
    }
}
