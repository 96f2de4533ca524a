//! Prompts on offer between real agents. What the protocol promises is tested in virtual time, in `kvferry-models`.

use kvferry::{Agent, Channel, Error, Message, MessageHandler, Receipt};
use kvferry_connector::{
    ContentKey, Directory, DirectoryConfig, EngineId, Found, HandoffId, Place, Refusal,
};
use kvferry_proto::directory::{DirectoryMessage, Follow, Gone, Limits};
use kvferry_testkit::ports::KeptPort;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn bounded() -> Watchdog {
    Watchdog::new(PATIENCE)
}

/// An agent that waits as long as a test for a peer on a busy machine.
fn agent(listen: &str) -> Agent {
    let listen: SocketAddr = listen.parse().expect("an address");
    Agent::builder().listen(listen).silence(PATIENCE).start().expect("it starts")
}

fn limits() -> Limits {
    Limits { answer: PATIENCE, lease: PATIENCE, offer_ttl: PATIENCE, ..Limits::default() }
}

fn start(agent: &Agent, engine: u128, publishes: bool, follows: &[&str]) -> Directory {
    let config = DirectoryConfig {
        engine: EngineId(engine),
        publishes: publishes.then(|| agent.advertised().to_owned()),
        follows: follows.iter().map(|&it| it.to_owned()).collect(),
        limits: limits(),
    };
    Directory::start(agent, config).expect("no other message handler")
}

fn key(number: u8) -> ContentKey {
    ContentKey([number; 32])
}

fn transfer(number: usize) -> HandoffId {
    HandoffId::new(&format!("xfer-{number}")).expect("short")
}

fn publish(directory: &Directory, of: u8, number: usize) {
    assert_eq!(directory.publish(key(of), &transfer(number)), Ok(()));
}

fn gauge(directory: &Directory, name: &str) -> usize {
    let gauges = directory.gauges();
    gauges.iter().find(|(it, _)| *it == name).map_or(0, |(_, count)| *count)
}

fn found(directory: &Directory, of: u8) -> Found {
    let mut found = None;
    eventually("the prompt is on offer", || {
        found = found.take().or_else(|| directory.take(&key(of)));
        found.is_some()
    });
    found.expect("it was waited for")
}

#[test]
fn a_prompt_is_found_by_the_engine_that_follows_until_it_is_retracted() {
    let _bounded = bounded();
    let prefill = agent("127.0.0.1:0");
    let publisher = start(&prefill, 1, true, &[]);
    publish(&publisher, 1, 1);
    let decode = agent("127.0.0.1:0");
    let subscriber = start(&decode, 2, false, &[prefill.advertised()]);
    eventually("the publisher has one follower", || publisher.followers() == 1);
    publish(&publisher, 2, 2);
    for of in [1, 2] {
        let (transfer, address) = (transfer(of.into()), prefill.advertised().to_owned());
        let expected = Found { place: Place(0), transfer, engine: EngineId(1), address };
        assert_eq!(found(&subscriber, of), expected);
        assert_eq!(subscriber.take(&key(of)), None);
    }
    (3..6).for_each(|number| publish(&publisher, 3, number));
    eventually("what is on offer is heard", || gauge(&subscriber, "heard") == 3);
    publisher.retract(&transfer(5));
    eventually("what is on offer is heard", || gauge(&subscriber, "heard") == 2);
    assert_eq!(found(&subscriber, 3).transfer, transfer(4));
    assert_eq!(
        subscriber.publish(key(1), &transfer(1)),
        Err(Refusal::Misuse("this engine does not publish"))
    );
}

#[test]
fn two_engines_may_follow_each_other() {
    let _bounded = bounded();
    let (kept, agents) = (KeptPort::new(), agent("127.0.0.1:0"));
    let first = start(&agents, 1, true, &[kept.address()]);
    let other = agent(kept.address());
    let second = start(&other, 2, true, &[agents.advertised()]);
    eventually("both follow", || first.followers() == 1 && second.followers() == 1);
    publish(&first, 1, 1);
    publish(&second, 2, 2);
    assert_eq!(found(&second, 1).engine, EngineId(1));
    assert_eq!(found(&first, 2).engine, EngineId(2));
}

#[test]
fn i12_either_end_may_be_restarted() {
    let _bounded = bounded();
    let kept = KeptPort::new();
    let decode = agent("127.0.0.1:0");
    let subscriber = start(&decode, 9, false, &[kept.address()]);
    for engine in 1..4 {
        let prefill = agent(kept.address());
        let publisher = start(&prefill, engine, true, &[]);
        publish(&publisher, 1, 1);
        eventually("the publisher has one follower", || publisher.followers() == 1);
        eventually("the restarted publisher offers it", || {
            subscriber.take(&key(1)).is_some_and(|it| it.engine == EngineId(engine))
        });
        let another = agent("127.0.0.1:0");
        let restarted = start(&another, 10, false, &[kept.address()]);
        assert_eq!(found(&restarted, 1).engine, EngineId(engine));
        another.shutdown();
        eventually("the publisher has one follower", || publisher.followers() == 1);
        publisher.close();
        prefill.shutdown();
    }
}

#[test]
fn a_publisher_that_can_not_be_reached_delays_no_other() {
    let _bounded = bounded();
    let (away, silent) = (kvferry_testkit::ports::ClosedPort::new(), agent("127.0.0.1:0"));
    let prefill = agent("127.0.0.1:0");
    let publisher = start(&prefill, 1, true, &[]);
    let decode = agent("127.0.0.1:0");
    let follows =
        [away.address(), "no-such-host.invalid:1", silent.advertised(), prefill.advertised()];
    let subscriber = start(&decode, 2, false, &follows);
    eventually("the publisher has one follower", || publisher.followers() == 1);
    publish(&publisher, 1, 1);
    assert_eq!(found(&subscriber, 1).place, Place(3));
}

#[test]
fn a_publisher_that_timed_out_is_not_asked_for_a_while() {
    let _bounded = bounded();
    let prefill = agent("127.0.0.1:0");
    let publisher = start(&prefill, 1, true, &[]);
    let decode = agent("127.0.0.1:0");
    let subscriber = start(&decode, 2, false, &[prefill.advertised()]);
    publish(&publisher, 1, 1);
    publish(&publisher, 1, 2);
    eventually("what is on offer is heard", || gauge(&subscriber, "heard") == 2);
    let (pause, second) = (Limits::default().pause.0, Duration::from_secs(1));
    assert_eq!(subscriber.failed(Place(0), second, second), Some(pause));
    assert_eq!(subscriber.failed(Place(0), second, second), Some(2 * pause));
    assert_eq!(subscriber.failed(Place(0), second, 3 * second), None);
    subscriber.worked(Place(0));
    assert_eq!(subscriber.take(&key(1)).map(|it| it.transfer), Some(transfer(2)));
}

#[test]
fn messages_that_are_malformed_or_of_another_protocol_change_nothing() {
    let _bounded = bounded();
    let prefill = agent("127.0.0.1:0");
    let publisher = start(&prefill, 1, true, &[]);
    let stranger = agent("127.0.0.1:0");
    // It takes the answers, which an agent without a handler refuses.
    let _takes = start(&stranger, 7, false, &[]);
    let channel = stranger.peer(prefill.advertised()).expect("an address").channel(PATIENCE);
    let channel = channel.expect("it listens");
    let follow = || DirectoryMessage::from(Follow { engine: EngineId(7) }).encode();
    let deep = vec![0x91; 5000];
    for bytes in [b"\xff".to_vec(), b"{}".to_vec(), deep, vec![3], Vec::new()] {
        channel.send(bytes).expect("the session lives");
    }
    channel.send(DirectoryMessage::from(Gone { transfer: transfer(1) }).encode()).expect("alive");
    channel.send(follow()).expect("the session lives");
    eventually("the publisher has one follower", || publisher.followers() == 1);
    assert!(channel.end().is_none());
}

/// Takes no message: each waits for its receipt.
#[derive(Default)]
struct Slow {
    receipts: Mutex<Vec<Receipt>>,
    has_ended: AtomicBool,
}

impl MessageHandler for Slow {
    fn began(&self, _channel: &Channel) {}

    fn received(&self, _channel: &Channel, message: Message<'_>) {
        let (_, receipt) = message.take_later();
        self.receipts.lock().expect("no panic").push(receipt);
    }

    fn ended(&self, _channel: &Channel, _error: &Error) {
        self.has_ended.store(true, Ordering::Release);
    }
}

#[test]
fn i8_a_follower_that_takes_its_messages_too_slowly_loses_its_session_and_no_other_does() {
    let _bounded = bounded();
    let prefill = agent("127.0.0.1:0");
    let publisher = start(&prefill, 1, true, &[]);
    let (stranger, slow) = (agent("127.0.0.1:0"), Arc::new(Slow::default()));
    stranger.set_message_handler(Arc::<Slow>::clone(&slow)).expect("it has none");
    let channel = stranger.peer(prefill.advertised()).expect("an address").channel(PATIENCE);
    let channel = channel.expect("it listens");
    channel.send(DirectoryMessage::from(Follow { engine: EngineId(7) }).encode()).expect("alive");
    let decode = agent("127.0.0.1:0");
    let subscriber = start(&decode, 2, false, &[prefill.advertised()]);
    eventually("both follow", || publisher.followers() == 2);
    // More than the queue of a session holds, at a pace that the other follower keeps up with.
    for number in 0..Channel::QUEUE_MAX {
        publish(&publisher, 1, number);
        publisher.retract(&transfer(number));
        if number % 256 == 0 {
            publish(&publisher, 2, number);
            eventually("the other follower hears of it", || subscriber.take(&key(2)).is_some());
            publisher.retract(&transfer(number));
        }
        if publisher.followers() == 1 {
            break;
        }
    }
    eventually("the slow follower's session has ended", || slow.has_ended.load(Ordering::Acquire));
    eventually("the other follower is left", || publisher.followers() == 1);
}

#[test]
fn a_closed_directory_and_one_of_an_agent_that_was_shut_down_do_nothing() {
    let _bounded = bounded();
    let prefill = agent("127.0.0.1:0");
    let publisher = start(&prefill, 1, true, &[]);
    let decode = agent("127.0.0.1:0");
    let subscriber = start(&decode, 2, false, &[prefill.advertised()]);
    eventually("the publisher has one follower", || publisher.followers() == 1);
    subscriber.close();
    subscriber.close();
    decode.shutdown();
    assert_eq!(subscriber.take(&key(1)), None);
    eventually("the follower is forgotten", || publisher.followers() == 0);
    publish(&publisher, 1, 1);
    prefill.shutdown();
    publisher.retract(&transfer(1));
    drop(publisher);
}

#[test]
fn engines_with_different_secrets_do_not_follow_each_other() {
    let _bounded = bounded();
    let with = |secret: &str| {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let builder = Agent::builder().listen(listen).silence(PATIENCE);
        let builder = builder.secret(secret.as_bytes());
        builder.start().expect("it starts")
    };
    let prefill = with("a secret of the test, long enough");
    let publisher = start(&prefill, 1, true, &[]);
    let other = with("another secret of the test, too");
    let subscriber = start(&other, 2, false, &[prefill.advertised()]);
    let same = with("a secret of the test, long enough");
    let follower = start(&same, 3, false, &[prefill.advertised()]);
    eventually("the publisher has one follower", || publisher.followers() == 1);
    publish(&publisher, 1, 1);
    assert_eq!(found(&follower, 1).engine, EngineId(1));
    assert_eq!((subscriber.take(&key(1)), gauge(&subscriber, "following")), (None, 0));
}
