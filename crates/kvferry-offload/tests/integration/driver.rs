//! The beginning and the end of a driver.

use kvferry::{Access, Agent, Region};
use kvferry_blocks::{Action, BlockManager, Config, GroupConfig, Key, Outcome, Request};
use kvferry_offload::{Driver, Error, Fault, Intercept, Options, Pages, Piece};
use kvferry_store::Namespace;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

const PAGE_LEN: usize = 4096;

fn pages(count: usize) -> (Agent, Region, Pages) {
    let agent = Agent::builder().name("engine").start().unwrap();
    let region = agent.allocate_private(count * PAGE_LEN, Access::NONE).unwrap();
    let len = PAGE_LEN as u64;
    let pages = Pages::new(vec![vec![Piece { region: region.clone(), base: 0, stride: len, len }]]);
    (agent, region, pages)
}

fn options() -> Options {
    Options::new(Namespace::new("model"))
}

/// The actions of a manager that gives all its pages to another prompt: the offload of each.
fn offloads(pages: u32) -> Vec<Action> {
    let group = GroupConfig { primary_blocks: pages, secondary_blocks: pages };
    let mut manager = BlockManager::new(&Config::new(4, [group])).unwrap();
    let retention = kvferry_blocks::RetentionConfig::default();
    for prompt in 1..3 {
        let keys: Vec<Key> = (0..pages).map(|block| Key([prompt, block.into()])).collect();
        let prompt_tokens = 4 * pages;
        let request =
            Request { prompt_tokens, keys: &keys, tokens: &[], salt: 0, retention: &retention };
        let sequence = manager.allocate(&request, 0).unwrap().sequence;
        if prompt == 1 {
            manager.free(sequence, &keys, &[], 0).unwrap();
        }
    }
    std::iter::from_fn(|| manager.poll_action()).collect()
}

#[test]
fn a_closed_driver_fails_what_is_submitted() {
    let (agent, region, pages) = pages(1);
    let driver = Driver::start(&agent, pages, &[1], options()).unwrap();
    driver.close();
    driver.close();
    agent.unregister(&region).unwrap();
    driver.submit(offloads(1));
    assert!(driver.wait(Duration::from_secs(60)), "its end is there to take");
    let outcomes: Vec<Outcome> = driver.take_finished(9).into_iter().map(|ended| ended.1).collect();
    assert_eq!(outcomes, [Outcome::Failed]);
    assert_eq!(driver.under_way(), 0);
    assert_eq!(driver.stats().offloaded, 0);
}

#[test]
fn a_driver_that_is_closed_makes_no_copy_that_it_has_not_begun() {
    let _bound = Watchdog::new(PATIENCE);
    let (agent, region, pages) = pages(8);
    let (begins, begun) = channel();
    let (release, held) = channel::<()>();
    let (begins, held) = (Mutex::new(begins), Mutex::new(held));
    let intercept = Intercept::new(move |_| {
        begins.lock().unwrap().send(()).unwrap();
        held.lock().unwrap().recv().ok();
        Fault::None
    });
    let driver = Driver::start(&agent, pages, &[8], options().intercept(intercept)).unwrap();
    driver.submit(offloads(8));
    begun.recv().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| driver.close());
        eventually("the others have failed", || driver.under_way() == 1);
        drop(release);
    });
    let outcomes = driver.take_finished(9).into_iter().map(|ended| ended.1);
    let (done, failed): (Vec<_>, Vec<_>) = outcomes.partition(|it| *it == Outcome::Done);
    assert_eq!((done.len(), failed.len(), begun.try_iter().count()), (1, 7, 0));
    agent.unregister(&region).unwrap();
}

#[test]
fn a_block_store_that_can_not_be_made_is_refused_at_the_start() {
    let (agent, _, pages) = pages(1);
    let refused = Driver::start(&agent, pages, &[1], options().store_bytes(1 << 20)).unwrap_err();
    assert!(matches!(&refused, Error::Store(_)), "{refused}");
    assert!(refused.to_string().contains("has only 0 segments"), "{refused}");
}
