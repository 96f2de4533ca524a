//! How large a demo is: what was asked for, cut to what the machine has.

use std::ops::Range;

use crate::cli::DemoArgs;
use crate::failure::Failure;
use crate::model::{Dtype, Model};
use crate::units;

use super::pool::Shape;

/// Prompts in a round, if nobody says how many.
const REQUESTS: u32 = 8;

/// Handoffs in flight, if nobody says how many.
const IN_FLIGHT: u32 = 8;

/// A demo that fits.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) model: Model,
    pub(super) dtype: Dtype,
    pub(super) tokens: u32,
    pub(super) block_tokens: u32,
    pub(super) requests: u32,
    pub(super) concurrency: u32,
    pub(super) rounds: u32,
    /// Requests the pools hold at once.
    pub(super) slots: u32,
    /// What was made smaller, and why.
    pub(super) remarks: Vec<String>,
}

impl Plan {
    pub(super) fn new(args: &DemoArgs, available: u64) -> Result<Plan, Failure> {
        let requests = args.requests.unwrap_or(REQUESTS);
        let mut plan = Plan {
            model: args.model,
            dtype: args.dtype,
            tokens: args.tokens,
            block_tokens: args.block_tokens,
            requests,
            concurrency: args.concurrency.unwrap_or(IN_FLIGHT),
            rounds: args.rounds,
            slots: requests,
            remarks: Vec::new(),
        };
        let budget = plan.budget(args.memory, available);
        plan.fit(budget)?;
        Ok(plan)
    }

    /// The memory both pools may take together.
    fn budget(&mut self, asked: u64, available: u64) -> u64 {
        let sensible = available / 10 * 6;
        if asked > sensible {
            let (asked, sensible) = (units::bytes(asked), units::bytes(sensible));
            self.remarks.push(format!(
                "the machine has {} free: both pools take at most {sensible} instead of {asked}",
                units::bytes(available)
            ));
        }
        asked.min(sensible)
    }

    /// First fewer requests in the pools at once, then, if not even one fits, shorter ones.
    fn fit(&mut self, budget: u64) -> Result<(), Failure> {
        let block_bytes = 2 * self.page_bytes() * u64::from(self.model.layers);
        let most_blocks = budget / block_bytes;
        if most_blocks == 0 {
            let (block, budget) = (units::bytes(block_bytes), units::bytes(budget));
            return Err(Failure::Usage(format!(
                "one block of {} in both pools takes {block}, and there is room for {budget}",
                self.model.name
            )));
        }
        if u64::from(self.request_blocks()) > most_blocks {
            let tokens = (most_blocks * u64::from(self.block_tokens)) as u32;
            self.remarks.push(format!(
                "a prompt of {} tokens does not fit into {}: {tokens} tokens instead (see --memory)",
                self.tokens,
                units::bytes(budget)
            ));
            self.tokens = tokens;
        }
        let most_slots = most_blocks / u64::from(self.request_blocks());
        if u64::from(self.slots) > most_slots {
            self.slots = most_slots as u32;
            self.remarks.push(format!(
                "{} requests of {} do not fit into two pools of {} together: {} at a time (see --memory)",
                self.requests,
                units::bytes(self.request_bytes()),
                units::bytes(budget / 2),
                self.slots
            ));
        }
        self.concurrency = self.concurrency.min(self.slots);
        Ok(())
    }

    pub(super) fn page_bytes(&self) -> u64 {
        self.model.page_bytes(self.block_tokens, self.dtype)
    }

    pub(super) fn request_blocks(&self) -> u32 {
        self.tokens.div_ceil(self.block_tokens)
    }

    pub(super) fn request_pages(&self) -> u64 {
        u64::from(self.request_blocks()) * u64::from(self.model.layers)
    }

    pub(super) fn request_bytes(&self) -> u64 {
        self.request_pages() * self.page_bytes()
    }

    pub(super) fn wave_bytes(&self) -> u64 {
        u64::from(self.slots) * self.request_bytes()
    }

    pub(super) fn handoffs(&self) -> u64 {
        u64::from(self.rounds) * u64::from(self.requests)
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.handoffs() * self.request_bytes()
    }

    /// A few blocks more than the requests take: they must stay untouched.
    pub(super) fn shape(&self) -> Shape {
        let taken = self.slots * self.request_blocks();
        let blocks = taken + (taken / 64).max(4);
        Shape { layers: self.model.layers, blocks, page_bytes: self.page_bytes() }
    }

    /// The requests of a round, as many at a time as the pools hold.
    pub(super) fn waves(&self) -> impl Iterator<Item = Range<u32>> {
        let (slots, requests) = (self.slots, self.requests);
        (0..requests.div_ceil(slots))
            .map(move |wave| wave * slots..((wave + 1) * slots).min(requests))
    }

    pub(super) fn describe(&self) -> String {
        format!(
            "{} ({}, {}): {} requests of {} tokens, {} each in {} pages of {}, {} in flight, {} rounds",
            self.model.name,
            self.model.describe(),
            self.dtype.name(),
            self.requests,
            self.tokens,
            units::bytes(self.request_bytes()),
            units::count(self.request_pages()),
            units::bytes(self.page_bytes()),
            self.concurrency,
            self.rounds,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn plan(line: &[&str], available: u64) -> Result<Plan, Failure> {
        let cli = Cli::try_parse_from(["kvferry", "demo", "--without-engines"].iter().chain(line))
            .expect("well formed");
        let Command::Demo(args) = cli.command else { panic!("demo was asked for") };
        Plan::new(&args, available)
    }

    #[test]
    fn the_defaults_fit_into_four_gib_without_a_remark() {
        let plan = plan(&[], 20 << 30).expect("fits");
        assert_eq!((plan.slots, plan.concurrency), (8, 8));
        assert_eq!(plan.request_bytes(), 256 << 20);
        assert!(plan.remarks.is_empty(), "{:?}", plan.remarks);
    }

    #[test]
    fn long_prompts_go_in_waves_and_say_so() {
        let plan = plan(&["--tokens", "8192", "--requests", "5"], 20 << 30).expect("fits");
        assert_eq!((plan.tokens, plan.slots, plan.concurrency), (8192, 2, 2));
        assert_eq!(plan.remarks.len(), 1);
        assert_eq!(plan.waves().collect::<Vec<_>>(), [0..2, 2..4, 4..5]);
    }

    #[test]
    fn a_small_machine_gets_shorter_prompts_and_none_is_larger_than_its_memory() {
        let small = plan(&["--tokens", "8192"], 1 << 30).expect("fits once reduced");
        assert!(small.tokens < 8192 && small.slots == 1, "{small:?}");
        assert!(2 * small.request_bytes() <= (1 << 30) / 10 * 6);
        assert!(small.remarks.len() >= 2);
        assert!(matches!(plan(&[], 1 << 20), Err(Failure::Usage(_))));
    }

    #[test]
    fn the_last_block_of_a_prompt_may_be_partly_filled() {
        let plan = plan(&["--tokens", "17", "--requests", "1"], 20 << 30).expect("fits");
        assert_eq!(plan.request_blocks(), 2);
        assert_eq!(plan.shape().blocks, 2 + 4, "some blocks stay untouched");
    }
}
