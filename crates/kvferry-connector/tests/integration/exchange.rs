//! Prompts between real agents, found by their content.

use kvferry::{Access, Agent, Region};
use kvferry_connector::{
    ContentKey, Directory, DirectoryConfig, EngineId, Exchange, ExchangeConfig, HandoffId, Layout,
    Limits, Missed, Model, Prompt, PromptId, Rank, StagedRank,
};
use kvferry_proto::directory::Limits as DirectoryLimits;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use serde_json::json;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const SLOTS: u32 = 8;
const TOKENS: u32 = 4;
/// Bytes of a block of one group on one rank.
const BYTES: u64 = 64;
const GROUPS: usize = 2;
const RANKS: usize = 2;

fn bounded() -> Watchdog {
    Watchdog::new(PATIENCE)
}

fn agent() -> Agent {
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    Agent::builder().listen(listen).silence(PATIENCE).start().expect("it starts")
}

fn prompt(number: u8, blocks: u32) -> Prompt {
    let key = ContentKey([number; 32]);
    Prompt { key, identity: PromptId::new(&[], &[number.into()]), blocks }
}

fn at(group: usize, slot: u32) -> usize {
    (group as u64 * u64::from(SLOTS) * BYTES + u64::from(slot) * BYTES) as usize
}

/// The KV of a block.
fn kv(number: u8, block: u32, rank: usize, group: usize) -> Vec<u8> {
    [number, block as u8, rank as u8, group as u8].repeat(BYTES as usize / 4)
}

struct Engine {
    control: Agent,
    agents: Vec<Agent>,
    regions: Vec<Region>,
    exchange: Exchange,
    copies: u64,
}

fn layout(rank: usize, region: &Region) -> Layout {
    let of = |group: usize| {
        let shape = json!({
            "role": "kv", "encoding": "test", "bits": 8, "heads_total": RANKS, "head_start": rank,
            "heads": 1, "rows": 1, "content": BYTES, "block_stride": BYTES, "kernel_blocks": 1,
            "kernel_stride": 0, "head_stride": 0, "row_stride": 0,
        });
        let name = format!("group-{group}");
        let in_group =
            json!({ "name": name, "kind": "full", "block_tokens": TOKENS, "blocks": SLOTS });
        let plane = json!({ "shape": group, "region": 0, "base": at(group, 0) });
        let layer = json!({ "name": name, "group": group, "planes": [plane] });
        (in_group, shape, layer)
    };
    let all: Vec<_> = (0..GROUPS).map(of).collect();
    let layout = json!({
        "v": 1,
        "regions": [{ "id": region.id(), "len": region.len() }],
        "groups": all.iter().map(|it| it.0.clone()).collect::<Vec<_>>(),
        "shapes": all.iter().map(|it| it.1.clone()).collect::<Vec<_>>(),
        "layers": all.iter().map(|it| it.2.clone()).collect::<Vec<_>>(),
    });
    serde_json::from_value(layout).expect("a layout")
}

impl Engine {
    fn new(model: &str, publishes: bool, follows: &[&str]) -> Self {
        let (control, mut agents, mut regions, mut ranks) = (agent(), vec![], vec![], vec![]);
        for rank in 0..RANKS {
            let agent = agent();
            let region = agent.allocate(at(GROUPS, 0), Access::READ).expect("memory");
            let layout = layout(rank, &region);
            ranks.push(StagedRank { agent: agent.clone(), layout, region: region.clone() });
            agents.push(agent);
            regions.push(region);
        }
        let config = ExchangeConfig {
            groups: GROUPS,
            block_tokens: TOKENS,
            slots: SLOTS,
            timeout: PATIENCE,
            model: Model([("model".to_owned(), model.to_owned())].into()),
            producers: None,
            publishes,
            follows: follows.iter().map(|&it| it.to_owned()).collect(),
        };
        let exchange = Exchange::start(&control, ranks, config).expect("it starts");
        Self { control, agents, regions, exchange, copies: 0 }
    }

    /// Computes a prompt and offers it.
    fn prefill(&mut self, number: u8, blocks: u32) {
        let (offer, slot) =
            self.exchange.offer(&prompt(number, blocks)).expect("room").expect("a follower");
        self.write(number, slot, 0..blocks);
        self.copies += 1;
        self.exchange.copies(offer, 0..blocks, self.copies);
        self.exchange.ended(offer, self.copies);
        self.exchange.made(self.copies, 0);
    }

    fn write(&self, number: u8, slot: u32, blocks: std::ops::Range<u32>) {
        for (rank, region) in self.regions.iter().enumerate() {
            for group in 0..GROUPS {
                for block in blocks.clone() {
                    let bytes = kv(number, block, rank, group);
                    region.write_at(at(group, slot + block), &bytes).expect("inside");
                }
            }
        }
    }

    fn fetch(&self, number: u8, blocks: u32, first: u32) -> (bool, Vec<Missed>) {
        let (slots, missed) =
            self.exchange.fetch(&prompt(number, blocks), first, PATIENCE / 2, &|| false);
        let Some(slots) = slots else { return (false, missed) };
        assert_eq!(slots.len() as u32, blocks - first);
        for (rank, region) in self.regions.iter().enumerate() {
            for group in 0..GROUPS {
                for (slot, block) in slots.clone().zip(first..) {
                    let mut bytes = vec![0; BYTES as usize];
                    region.read_at(at(group, slot), &mut bytes).expect("inside");
                    assert_eq!(bytes, kv(number, block, rank, group), "block {block}");
                }
            }
        }
        self.exchange.give(slots);
        (true, missed)
    }

    fn gauge(&self, name: &str) -> usize {
        let gauges = self.exchange.gauges();
        gauges.iter().find(|(it, _)| *it == name).map_or(0, |(_, count)| *count)
    }

    fn hears(&self, count: usize) {
        eventually("what is on offer is heard", || self.gauge("heard") == count);
    }

    /// Nothing is under way, and no slot is taken.
    fn settled(&self) {
        let left = || {
            let gauges = self.exchange.gauges();
            let mut gauges = gauges.into_iter();
            gauges.any(|(name, count)| count > 0 && !["followers", "following"].contains(&name))
        };
        eventually("nothing is under way", || !left());
    }
}

fn pair() -> (Engine, Engine) {
    let prefill = Engine::new("a", true, &[]);
    let decode = Engine::new("a", false, &[prefill.control.advertised()]);
    eventually("the publisher is followed", || prefill.gauge("followers") == 1);
    (prefill, decode)
}

#[test]
fn i8_prompts_are_handed_over_and_nothing_is_left() {
    let _bounded = bounded();
    let (mut prefill, decode) = pair();
    for round in 0..5 {
        (0..4).for_each(|it| prefill.prefill(round * 4 + it, 2));
        decode.hears(4);
        assert_eq!(
            prefill.exchange.offer(&prompt(100, 1)),
            Err(Missed::NoRoom { blocks: 1 }),
            "all slots are taken"
        );
        for it in 0..4 {
            let first = u32::from(it % 2);
            assert_eq!(decode.fetch(round * 4 + it, 2, first), (true, vec![]));
        }
        prefill.settled();
        decode.settled();
    }
    assert_eq!(decode.fetch(0, 2, 0), (false, vec![]), "nothing is on offer");
}

#[test]
fn a_prompt_that_is_there_already_frees_its_offer() {
    let _bounded = bounded();
    let (mut prefill, decode) = pair();
    prefill.prefill(1, 2);
    decode.hears(1);
    assert_eq!(decode.fetch(1, 2, 2), (false, vec![]));
    prefill.settled();
    decode.settled();
}

#[test]
fn a_prompt_is_offered_when_all_of_its_copies_are_made_and_not_if_one_is_lost() {
    let _bounded = bounded();
    let (mut prefill, decode) = pair();
    for (number, lost) in [(1, 2), (2, 0)] {
        let offered = prefill.exchange.offer(&prompt(number, 3)).expect("room");
        let (offer, slot) = offered.expect("a follower");
        prefill.write(number, slot, 0..3);
        prefill.exchange.copies(offer, 0..2, prefill.copies + 1);
        prefill.exchange.copies(offer, 2..3, prefill.copies + 2);
        prefill.exchange.made(prefill.copies + 1, 0);
        prefill.exchange.ended(offer, prefill.copies + 2);
        assert!(prefill.gauge("offers") == 1 && decode.gauge("heard") == 0);
        prefill.copies += 2;
        prefill.exchange.made(prefill.copies, lost);
        if lost > 0 {
            prefill.settled();
        }
    }
    decode.hears(1);
    assert_eq!(decode.fetch(1, 3, 0), (false, vec![]));
    assert_eq!(decode.fetch(2, 3, 0), (true, vec![]));
    prefill.settled();
}

#[test]
fn another_model_is_refused_and_another_engine_is_asked() {
    let _bounded = bounded();
    let (mut first, mut other) = (Engine::new("a", true, &[]), Engine::new("b", true, &[]));
    let follows = [first.control.advertised(), other.control.advertised()];
    let decode = Engine::new("a", false, &follows);
    for (engine, heard) in [(&mut first, 1), (&mut other, 2)] {
        eventually("the publisher is followed", || engine.gauge("followers") == 1);
        engine.prefill(1, 2);
        decode.hears(heard);
    }
    let (is_here, missed) = decode.fetch(1, 2, 0);
    assert!(is_here);
    let [Missed::Failed(why)] = &missed[..] else { panic!("{missed:?}") };
    assert!(why.contains("models do not match"), "{why}");
    decode.settled();
    // The first one has nothing to keep any more.
    first.settled();
}

/// An engine that offers a handoff which its rank does not know, so that a fetch of it waits.
struct Forger {
    control: Agent,
    directory: Directory,
    rank: Rank,
    agent: Agent,
}

impl Forger {
    fn new() -> Self {
        let (control, agent) = (agent(), agent());
        let rank = Rank::start(&agent, &Limits::default()).expect("no other message handler");
        let config = DirectoryConfig {
            engine: EngineId(7),
            publishes: Some(agent.advertised().to_owned()),
            follows: Vec::new(),
            limits: DirectoryLimits::default(),
        };
        let directory = Directory::start(&control, config).expect("no other message handler");
        Self { control, directory, rank, agent }
    }

    fn offer(&self, number: u8) {
        let transfer = HandoffId::new(&format!("forged-{number}")).expect("short");
        self.directory.publish(ContentKey([number; 32]), &transfer).expect("room");
    }
}

#[test]
fn i6_a_fetch_takes_no_longer_than_its_time_and_its_engine_is_not_asked_for_a_while() {
    let _bounded = bounded();
    let forger = Forger::new();
    let decode = Engine::new("a", false, &[forger.control.advertised()]);
    (1..3).for_each(|number| forger.offer(number));
    decode.hears(2);
    let fetch =
        |number| decode.exchange.fetch(&prompt(number, 2), 0, Duration::from_secs(1), &|| false);
    let began = Instant::now();
    let (slots, missed) = fetch(1);
    let address = forger.control.advertised().to_owned();
    let pause = DirectoryLimits::default().pause.0;
    assert_eq!((slots, missed), (None, vec![Missed::TimedOut { address, pause }]));
    let (slots, missed) = fetch(2);
    // Unless this thread has slept for longer than the pause, which begins after `began`.
    assert!(began.elapsed() >= pause || (slots.is_none() && missed.is_empty()), "{missed:?}");
    assert!(decode.gauge("slots") <= 4);
    drop((forger.rank, forger.agent));
}

#[test]
fn an_engine_that_fails_after_most_of_the_time_is_paused() {
    let _bounded = bounded();
    let hung = Forger::new();
    let decode = Engine::new("a", false, &[hung.control.advertised()]);
    hung.offer(1);
    decode.hears(1);
    let (time, pause) = (Duration::from_secs(1), DirectoryLimits::default().pause.0);
    let missed = std::thread::scope(|scope| {
        let fetch = || decode.exchange.fetch(&prompt(1, 2), 0, time, &|| false).1;
        let waiting = scope.spawn(fetch);
        let is_ended = || waiting.is_finished();
        eventually("the prompt is fetched", || decode.gauge("fetches") == 1 || is_ended());
        // It fails after most of the time; or the time is over first.
        std::thread::sleep(time * 3 / 4);
        hung.agent.shutdown();
        waiting.join().expect("no panic")
    });
    match &missed[0] {
        Missed::Failed(why) => {
            let told = format!("{} is not asked for 2s", hung.control.advertised());
            assert!(why.ends_with(&told), "{why}");
        }
        it => assert!(matches!(it, Missed::TimedOut { pause: it, .. } if *it == pause), "{it:?}"),
    }
    drop(hung.rank);
}

#[test]
fn a_time_beyond_the_clock_is_no_limit() {
    let _bounded = bounded();
    let (mut prefill, decode) = pair();
    prefill.prefill(1, 2);
    decode.hears(1);
    let (slots, missed) = decode.exchange.fetch(&prompt(1, 2), 0, Duration::MAX, &|| false);
    assert_eq!(missed, []);
    decode.exchange.give(slots.expect("it is handed over"));
    decode.settled();
}

#[test]
fn i1_a_fetch_ends_when_it_is_interrupted_or_its_exchange_is_closed() {
    let _bounded = bounded();
    let forger = Forger::new();
    let decode = Engine::new("a", false, &[forger.control.advertised()]);
    (1..3).for_each(|number| forger.offer(number));
    decode.hears(2);
    let (slots, missed) = decode.exchange.fetch(&prompt(1, 2), 0, 10 * PATIENCE, &|| true);
    assert_eq!((slots, missed), (None, vec![]));
    std::thread::scope(|scope| {
        let fetch = || decode.exchange.fetch(&prompt(2, 2), 0, 10 * PATIENCE, &|| false);
        let waiting = scope.spawn(fetch);
        eventually("the prompt is fetched", || decode.gauge("heard") == 0);
        decode.exchange.close();
        assert_eq!(waiting.join().expect("no panic"), (None, vec![]));
    });
    decode.exchange.close();
    decode.agents.iter().for_each(Agent::shutdown);
    assert_eq!(decode.exchange.offer(&prompt(1, 1)), Ok(None));
    assert_eq!(decode.fetch(1, 1, 0), (false, vec![]));
}
