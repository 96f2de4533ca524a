//! What needs the inside of a rank.

use super::*;
use kvferry::{Channel, Message, MessageHandler};
use kvferry_models::engines::{here, own_engine, topology};
use kvferry_proto::engine_handshake::{
    EngineHandshakeMessage, EngineHandshakes, Failure, Introduce, Model, Pairing,
};
use kvferry_proto::handoff::PeerId;
use kvferry_testkit::eventually;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const RANKS: u32 = 512;

struct NoMessages;

impl MessageHandler for NoMessages {
    fn began(&self, _channel: &Channel) {}
    fn received(&self, _channel: &Channel, _message: Message<'_>) {}
    fn ended(&self, _channel: &Channel, _error: &Error) {}
}

fn agent() -> Agent {
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    Agent::builder().listen(any).start().expect("an agent")
}

/// The agent's control thread takes the rank's lock for each message and sends the heartbeats.
#[test]
fn the_rank_is_not_locked_while_an_engine_handshake_is_worked_out() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, consumer) = (agent(), agent());
    let rank = Rank::start(&producer, &Limits::default()).expect("the agent has no handler");
    rank.set_own_engine(own_engine(1, 0, topology(RANKS, RANKS), 8)).expect("this process");
    consumer.set_message_handler(Arc::new(NoMessages)).expect("the agent has no handler");
    let (sender, receiver) = std::sync::mpsc::channel();
    let peer = consumer.peer(producer.advertised()).expect("an address");
    peer.open_channel(Box::new(move |met| drop(sender.send(met))));
    let channel = receiver.recv().expect("an answer").expect("a channel");
    let (topology_of, model) = (topology(RANKS, RANKS).encode(), Model::default());
    let question = Introduce { topology: topology_of, model, ranks: vec![0] };
    let own = own_engine(1, 0, topology(RANKS, RANKS), 8);
    let mut machine = EngineHandshakes::new(Duration::ZERO, Duration::ZERO);
    machine.know(own);
    let began = Instant::now();
    machine.receive(PeerId(1), here(), question.clone().into());
    let takes = began.elapsed();
    let question = EngineHandshakeMessage::from(question).encode();
    let is_over = AtomicBool::new(false);
    let mut waits: Vec<Duration> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // A full queue drains; a question that waits replaces the one before.
                drop(channel.send(question.clone()));
                std::thread::sleep(takes / 4);
            }
        });
        std::thread::sleep(20 * takes);
        let waits = (0..200).map(|_| {
            std::thread::sleep(takes / 7);
            let began = Instant::now();
            rank.gauges();
            began.elapsed()
        });
        let waits = waits.collect();
        is_over.store(true, Ordering::Relaxed);
        waits
    });
    waits.sort_unstable();
    let median = waits[waits.len() / 2];
    assert!(median < takes / 10, "the lock takes {median:?}, one handshake takes {takes:?}");
}

const PATIENCE: Duration = Duration::from_secs(60);

/// Signals each call.
struct Called(std::sync::mpsc::Sender<ThreadId>);

impl RankObserver for Called {
    fn ended(&self, _event: Event) {}
    fn learned_engine(&self, _ticket: u64, _result: Result<Arc<Pairing>, Failure>) {}
    fn lost_peer(&self, _address: &str) {}
    fn answered(&self, _id: &HandoffId) {}
    fn read(&self, _id: &HandoffId, _part: ReadPart) {}
    fn called(&self) {
        self.0.send(std::thread::current().id()).ok();
    }
}

/// A rank whose observer's calls are received, and whose thread waits for something to do.
fn observed_rank(
    agent: &Agent,
) -> (Rank, Arc<dyn RankObserver>, std::sync::mpsc::Receiver<ThreadId>) {
    let (sender, calls) = std::sync::mpsc::channel();
    let observer: Arc<dyn RankObserver> = Arc::new(Called(sender));
    let rank = Rank::observed(agent, &Limits::default(), Some(Arc::downgrade(&observer)));
    let rank = rank.expect("the agent has no handler");
    rank.call_observer(1);
    calls.recv_timeout(PATIENCE).expect("a call");
    while rank.shared.lock().driver.is_some() {
        std::thread::yield_now();
    }
    (rank, observer, calls)
}

#[test]
fn held_changes_are_carried_out_when_they_are_released_and_not_before() {
    // Few changes are carried out by the thread that releases them, many by the rank's.
    for (actions, is_own) in [(1, true), (3, false)] {
        let agent = agent();
        let (rank, _observer, calls) = observed_rank(&agent);
        let by = if is_own { std::thread::current().id() } else { rank.thread_id };
        // The rank's thread may run for another reason, such as its start, and carries them out then.
        eventually("held changes wait for their release", || {
            let (outer, inner) = (rank.hold(), rank.hold());
            rank.call_observer(actions);
            drop(inner);
            if calls.recv_timeout(Duration::from_millis(20)).is_ok() {
                return false;
            }
            drop(outer);
            calls.recv_timeout(PATIENCE).expect("released") == by
        });
    }
}

#[test]
fn changes_that_are_released_by_a_panic_are_carried_out() {
    let agent = agent();
    let (rank, _observer, calls) = observed_rank(&agent);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _held = rank.hold();
        rank.call_observer(1);
        panic!("as an engine's step may");
    }));
    assert!(panicked.is_err());
    calls.recv_timeout(PATIENCE).expect("released");
    // The rank goes on.
    rank.call_observer(1);
    calls.recv_timeout(PATIENCE).expect("a call");
}

/// Maps nothing: nothing is read.
struct NoReads;

impl ReadMapper for NoReads {
    fn map(&mut self, _read: &ReadRequest<'_>) -> Result<kvferry::Batch, (WireCode, String)> {
        unreachable!("nothing is announced")
    }
}

/// Another engine can list an address as one of its ranks', with an incarnation that it has made up.
#[test]
fn i12_an_incarnation_that_no_session_has_shown_fails_no_fetch_that_means_another_one() {
    let _bound = kvferry_testkit::Watchdog::new(PATIENCE);
    let (near, far) = (agent(), agent());
    let start = |agent| Rank::start(agent, &Limits::default()).expect("the agent has no handler");
    let (consumer, producer) = (start(&near), start(&far));
    let peer = near.peer(far.advertised()).expect("an address");
    let name = |name| HandoffId::new(name).expect("short");
    let fetch = |id, incarnation| {
        let from = [ReadFrom { peer: peer.clone(), incarnation, readers: 1, need: Need::ALL }];
        consumer.fetch_from(&name(id), &from, PATIENCE, Box::new(NoReads)).expect("a new name");
    };
    for id in ["there", "any"] {
        producer.withdraw(&name(id), WireCode::NotNeeded, "").expect("a new name");
    }
    let unmet = consumer.hold();
    let made_up = Some(kvferry::Incarnation(far.incarnation().0 ^ 1));
    fetch("made up", made_up);
    {
        // As the driver does at once, while the session opens. It may be up already.
        let peers = &mut consumer.shared.lock().peers;
        let places = peers.places([(&peer, made_up)]).into_iter().flatten();
        places.for_each(|(id, _)| peers.watch(id, true));
    }
    fetch("there", Some(far.incarnation()));
    fetch("any", None);
    drop(unmet);
    let mut ended: Vec<_> = (0..3)
        .map(|_| match consumer.wait(PATIENCE) {
            Some(Event::Consumed { id, outcome, .. }) => (id, outcome.code),
            other => panic!("{other:?}"),
        })
        .collect();
    ended.sort_by(|a, b| a.0.cmp(&b.0));
    let (gone, here) = (WireCode::StaleIncarnation, WireCode::NotNeeded);
    assert_eq!(
        ended,
        [("any", here), ("made up", gone), ("there", here)].map(|(id, code)| (name(id), code))
    );
}

/// In a child, the locks are as the other threads of its parent had them, and these threads are gone.
#[test]
fn a_fork_touches_no_lock_of_a_rank() {
    let _bound = kvferry_testkit::Watchdog::new(kvferry_testkit::PATIENCE);
    let agent = agent();
    let mut rank = Rank::start(&agent, &Limits::default()).expect("the agent has no handler");
    rank.forks += 1;
    let shared = Arc::clone(&rank.shared);
    let held = shared.lock();
    assert_eq!(rank.events(), []);
    assert_eq!(rank.wait(Duration::MAX), None);
    assert_eq!(rank.gauges(), []);
    assert!(!rank.close());
    let refused = rank.expect(&HandoffId::new("a").expect("short"));
    assert!(matches!(refused, Err(RankError::Forked)), "{refused:?}");
    drop(held);
    rank.forks -= 1;
}
