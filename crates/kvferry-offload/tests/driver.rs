//! The beginning and the end of a driver.
#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

use kvferry::{Access, Agent, Region};
use kvferry_blocks::{Action, BlockManager, Config, GroupConfig, Key, Outcome, Request};
use kvferry_offload::{Driver, Error, Options, Pages, Piece};
use kvferry_store::Namespace;
use std::time::Duration;

const PAGE_LEN: usize = 4096;

fn pages() -> (Agent, Region, Pages) {
    let agent = Agent::builder().name("engine").start().unwrap();
    let region = agent.allocate_private(PAGE_LEN, Access::NONE).unwrap();
    let len = PAGE_LEN as u64;
    let pages = Pages::new(vec![vec![Piece { region: region.clone(), base: 0, stride: len, len }]]);
    (agent, region, pages)
}

fn options() -> Options {
    Options::new(Namespace::new("model"))
}

/// The actions of a manager of one page that gives it to another prompt.
fn an_offload() -> Vec<Action> {
    let group = GroupConfig { primary_blocks: 1, secondary_blocks: 1 };
    let mut manager = BlockManager::new(&Config::new(4, [group])).unwrap();
    let retention = kvferry_blocks::RetentionConfig::default();
    for prompt in 1..3 {
        let keys = [Key([prompt, 0])];
        let request =
            Request { prompt_tokens: 4, keys: &keys, tokens: &[], salt: 0, retention: &retention };
        let sequence = manager.allocate(&request, 0).unwrap().sequence;
        if prompt == 1 {
            manager.free(sequence, &keys, &[], 0).unwrap();
        }
    }
    std::iter::from_fn(|| manager.poll_action()).collect()
}

#[test]
fn a_closed_driver_fails_what_is_submitted() {
    let (agent, region, pages) = pages();
    let driver = Driver::start(&agent, pages, &[1], options()).unwrap();
    driver.close();
    driver.close();
    agent.unregister(&region).unwrap();
    driver.submit(an_offload());
    assert!(driver.wait(Duration::from_secs(60)), "its end is there to take");
    let outcomes: Vec<Outcome> = driver.take_finished(9).into_iter().map(|ended| ended.1).collect();
    assert_eq!(outcomes, [Outcome::Failed]);
    assert_eq!(driver.under_way(), 0);
    assert_eq!(driver.stats().offloaded, 0);
}

#[test]
fn a_block_store_that_can_not_be_made_is_refused_at_the_start() {
    let (agent, _, pages) = pages();
    let refused = Driver::start(&agent, pages, &[1], options().store_bytes(1 << 20)).unwrap_err();
    assert!(matches!(&refused, Error::Store(_)), "{refused}");
    assert!(refused.to_string().contains("has only 0 segments"), "{refused}");
}
