//! What needs the inside of a rank.

use super::*;
use kvferry::{Channel, ErrorKind, Incarnation, Message, MessageHandler};
use kvferry_models::engines::{here, own_engine, topology};
use kvferry_proto::engine_handshake::{
    EngineHandshakeMessage, EngineHandshakes, Failure, Introduce, Model, Pairing,
};
use kvferry_proto::handoff::PeerId;
use kvferry_testkit::eventually;
use kvferry_testkit::ports::KeptPort;
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
    Agent::builder().listen(any).silence(PATIENCE).start().expect("an agent")
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
    // The least of some: a thread that stops makes one longer.
    let handshakes = (0..5).map(|_| {
        let mut machine = EngineHandshakes::new(Duration::ZERO, Duration::ZERO);
        machine.know(own_engine(1, 0, topology(RANKS, RANKS), 8));
        let began = Instant::now();
        machine.receive(PeerId(1), here(), question.clone().into());
        began.elapsed()
    });
    let takes = handshakes.min().expect("five");
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
    while rank.shared.state.lock().driver.is_some() {
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
    let (consumer, producer) = (rank(&near), rank(&far));
    let peer = near.peer(far.advertised()).expect("an address");
    let fetch = |id, incarnation| {
        fetch(&consumer, id, &peer, incarnation).expect("a new name");
    };
    for id in ["there", "any"] {
        producer.withdraw(&name(id), WireCode::NotNeeded, "").expect("a new name");
    }
    let unmet = consumer.hold();
    let made_up = Some(kvferry::Incarnation(far.incarnation().0 ^ 1));
    fetch("made up", made_up);
    {
        // As the driver does at once, while the session opens. It may be up already.
        let peers = &mut consumer.shared.state.lock().peers;
        let places = peers.places(None, [(&peer, made_up)]);
        places.into_iter().flatten().for_each(|(id, _)| peers.watch(id, true));
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

/// An agent whose sessions end by no silence.
fn patient(listen: &str) -> Agent {
    Agent::builder()
        .listen(listen.parse::<std::net::SocketAddr>().expect("an address"))
        .silence(PATIENCE)
        .start()
        .expect("an agent")
}

fn rank(agent: &Agent) -> Rank {
    Rank::start(agent, &Limits::default()).expect("the agent has no handler")
}

fn name(name: &str) -> HandoffId {
    HandoffId::new(name).expect("short")
}

fn fetch(
    consumer: &Rank,
    id: &str,
    peer: &Peer,
    incarnation: Option<Incarnation>,
) -> Result<(), RankError> {
    let from = [ReadFrom { peer: peer.clone(), incarnation, readers: 1, need: Need::ALL }];
    consumer.fetch_from(&name(id), None, &from, 10 * PATIENCE, Box::new(NoReads))
}

/// Fetches what the producer has withdrawn. When it has ended, the producer has got all earlier messages.
fn fetch_withdrawn(consumer: &Rank, producer: &Rank, id: &str, peer: &Peer) {
    producer.withdraw(&name(id), WireCode::NotNeeded, "").expect("a new name");
    fetch(consumer, id, peer, None).expect("a new name");
    while consumer_ended(consumer) != name(id) {}
}

fn consumer_ended(consumer: &Rank) -> HandoffId {
    match consumer.wait(PATIENCE) {
        Some(Event::Consumed { id, .. }) => id,
        other => panic!("{other:?}"),
    }
}

/// The restarted producer may have a request of the same name, with another consumer.
#[test]
fn i12_a_restarted_producer_is_not_told_of_the_end_of_what_the_one_before_had() {
    let _bound = kvferry_testkit::Watchdog::new(2 * PATIENCE);
    let port = KeptPort::new();
    let near = patient("127.0.0.1:0");
    let consumer = rank(&near);
    let peer = near.peer(port.address()).expect("an address");
    let before = patient(port.address());
    let producer = rank(&before);
    producer.offer(&name("x")).expect("a new name");
    fetch(&consumer, "x", &peer, None).expect("a new name");
    let place = consumer.shared.state.lock().peers.places(None, [(&peer, None)]).pop();
    let (number, _) = place.expect("one for each").expect("there is room");
    eventually("the producer has answered", || {
        consumer.shared.state.lock().consumer.state(&name("x"), number) == Some("reading")
    });
    // This thread stands for the driver, so that no session is opened meanwhile.
    eventually("no thread drives", || {
        let mut state = consumer.shared.state.lock();
        let is_free = state.driver.is_none();
        if is_free {
            state.driver = Some(std::thread::current().id());
        }
        is_free
    });
    let channel = consumer.shared.state.lock().peers.channel(number).cloned().expect("a session");
    let silent = Error::new(ErrorKind::PeerSilent, "as if it was stopped");
    Handler(Arc::downgrade(&consumer.shared)).ended(&channel, &silent);
    drop(producer);
    before.shutdown();
    {
        let mut state = consumer.shared.state.lock();
        state.consumer.expire(consumer.shared.now() + 2 * PATIENCE);
        assert_eq!(state.consumer.unheard().collect::<Vec<_>>(), [number]);
        state.peers.watch(number, false);
    }
    let after = patient(port.address());
    let producer = rank(&after);
    producer.withdraw(&name("y"), WireCode::NotNeeded, "").expect("a new name");
    fetch(&consumer, "y", &peer, None).expect("a new name");
    consumer.shared.state.lock().driver = None;
    consumer.shared.wakeup.wake();
    while consumer_ended(&consumer) != name("y") {}
    fetch_withdrawn(&consumer, &producer, "z", &peer);
    producer.expect(&name("x")).expect("nothing was said of it here");
    assert_eq!(consumer.shared.state.lock().consumer.unheard().next(), None);
}

#[test]
fn i12_what_means_another_incarnation_than_the_one_at_its_address_ends_nothing_there() {
    let _bound = kvferry_testkit::Watchdog::new(2 * PATIENCE);
    let far = patient("127.0.0.1:0");
    let producer = rank(&far);
    let made_up = Some(Incarnation(far.incarnation().0 ^ 1));
    for is_met in [false, true] {
        let near = patient("127.0.0.1:0");
        let consumer = rank(&near);
        let peer = near.peer(far.advertised()).expect("an address");
        let id = |what: &str| format!("{what} {is_met}");
        if is_met {
            fetch_withdrawn(&consumer, &producer, "first", &peer);
        }
        let unmet = consumer.hold();
        consumer
            .free_at(&name(&id("freed")), None, &[(peer.clone(), made_up)], WireCode::NotNeeded, "")
            .expect("a new name");
        let fetched = fetch(&consumer, &id("fetched"), &peer, made_up);
        assert!(fetched.is_err() || !is_met, "{fetched:?}");
        match fetched {
            // The session may have been opened by now, and have ended it.
            Ok(()) => drop(consumer.cancel(&name(&id("fetched")), WireCode::Cancelled, "")),
            Err(refused) => assert!(matches!(refused, RankError::Refused(Refusal::Restarted))),
        }
        drop(unmet);
        // The second is asked for over the session that the first has opened.
        for what in ["next", "last"] {
            fetch_withdrawn(&consumer, &producer, &id(what), &peer);
        }
        for what in ["freed", "fetched"] {
            producer.expect(&name(&id(what))).expect("nothing was said of it here");
        }
        assert_eq!(consumer.shared.state.lock().consumer.unheard().next(), None);
    }
}

#[test]
fn i8_a_producer_gets_the_end_of_a_handoff_that_finds_no_room_for_its_address() {
    let _bound = kvferry_testkit::Watchdog::new(2 * PATIENCE);
    let (near, far) = (patient("127.0.0.1:0"), patient("127.0.0.1:0"));
    let (consumer, producer) = (rank(&near), rank(&far));
    consumer.shared.state.lock().peers.take_all_places(&near);
    let peer = near.peer(far.advertised()).expect("an address");
    producer.offer(&name("x")).expect("a new name");
    let refused = fetch(&consumer, "x", &peer, None);
    assert!(matches!(refused, Err(RankError::Refused(Refusal::Addresses { .. }))), "{refused:?}");
    consumer.free_at(&name("x"), None, &[(peer, None)], WireCode::Busy, "").expect("a new name");
    match producer.wait(PATIENCE) {
        Some(Event::Produced { id, outcome }) => {
            assert_eq!((id, outcome.code), (name("x"), WireCode::Busy));
        }
        other => panic!("{other:?}"),
    }
}

/// In a child, the locks are as the other threads of its parent had them, and these threads are gone.
#[test]
fn a_fork_touches_no_lock_of_a_rank() {
    let _bound = kvferry_testkit::Watchdog::new(kvferry_testkit::PATIENCE);
    let agent = agent();
    let mut rank = Rank::start(&agent, &Limits::default()).expect("the agent has no handler");
    rank.forks += 1;
    let shared = Arc::clone(&rank.shared);
    let held = shared.state.lock();
    assert_eq!(rank.events(), []);
    assert_eq!(rank.wait(Duration::MAX), None);
    assert_eq!(rank.gauges(), []);
    assert!(!rank.close());
    let refused = rank.expect(&HandoffId::new("a").expect("short"));
    assert!(matches!(refused, Err(RankError::Forked)), "{refused:?}");
    drop(held);
    rank.forks -= 1;
}
