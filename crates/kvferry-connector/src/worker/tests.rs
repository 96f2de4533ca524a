//! Tests that need the inside of a worker half.

use super::engines::{Engines, FRESH};
use super::names::Names;
use super::producer_engine::ProducerEngine;
use super::*;
use crate::address::{ProducerAddress, is_literal};
use crate::metadata::{Cancel, Compute, FetchRequest, Free, Offer};
use kvferry::{Access, Peer};
use kvferry_models::engines::{layout, topology};
use kvferry_proto::engine_handshake::{EngineId, Failure, Model};
use kvferry_proto::handoff::{BlockTable, Limits, Refusal};
use kvferry_proto::layout::{Heads, Packing, Shape};
use kvferry_proto::plan::Routing;
use kvferry_proto::{Origin, Timestamp};
use kvferry_testkit::PATIENCE;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const BLOCK_TOKENS: u32 = 4;
const BUDGET_MS: u32 = 60_000;

/// The only rank of an engine with one layer.
fn start(engine: u128, look_up: impl FnOnce(&Agent) -> LookUp) -> (Worker, Agent) {
    start_as("127.0.0.1", engine, look_up)
}

/// Starts a worker as [`start`] does, for an engine that advertises this host to its peers.
fn start_as(host: &str, engine: u128, look_up: impl FnOnce(&Agent) -> LookUp) -> (Worker, Agent) {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    start_at(any, host, engine, look_up)
}

fn start_at(
    listen: SocketAddr,
    host: &str,
    engine: u128,
    look_up: impl FnOnce(&Agent) -> LookUp,
) -> (Worker, Agent) {
    // No test is about the silence limit; a loaded machine delays heartbeats.
    let builder = Agent::builder().listen(listen).advertise(host).silence(PATIENCE);
    let agent = builder.start().expect("an agent");
    let shape = Shape { layers: 1, blocks: 8, heads: 1, rows: 4, content: 8, kernel_blocks: 1 };
    let len = shape.bytes().expect("small");
    let memory = agent.allocate(len as usize, Access::READ).expect("memory");
    let heads = Heads::shard(1, 0, 1).expect("one head");
    let layout = layout(memory.id(), heads, &shape, Packing::Lbhnc);
    let (announce, limits) = (Announce::Chunks, Limits::default());
    let config =
        WorkerConfig { rank: 0, model: Model::default(), announce, limits, producers: None };
    let look_up = look_up(&agent);
    let worker =
        Worker::start_with(&agent, layout, &[memory], config, look_up).expect("a worker half");
    let ranks = vec![worker.rank_metadata().to_vec().into()];
    let engine = Some(EngineMetadata { id: EngineId(engine), ranks });
    apply(&worker, ConnectorMetadata { engine, ..ConnectorMetadata::default() });
    (worker, agent)
}

fn agents_peer(agent: &Agent) -> LookUp {
    let agent = agent.clone();
    Arc::new(move |name| agent.peer(name))
}

fn apply(worker: &Worker, metadata: ConnectorMetadata) {
    worker.apply(&metadata.encode()).expect("valid metadata");
}

fn id(request: &str) -> HandoffId {
    HandoffId::new(request).expect("short")
}

fn fetch_request(request: &str, address: &str) -> FetchRequest {
    FetchRequest {
        request: request.to_owned(),
        transfer: id(request),
        address: address.parse().expect("an address"),
        engine: None,
        tokens: (0, BLOCK_TOKENS),
        blocks: vec![BlockTable::new(0, vec![0])],
        budget_ms: BUDGET_MS,
    }
}

fn fetch(worker: &Worker, request: &str, address: &str) {
    begin(worker, fetch_request(request, address));
}

fn begin(worker: &Worker, fetch: FetchRequest) {
    apply(worker, ConnectorMetadata { fetches: vec![fetch], ..ConnectorMetadata::default() });
    worker.fetch();
}

fn cancel(worker: &Worker, request: &str) {
    let (request, detail) = (request.to_owned(), String::new());
    let cancel = Cancel { request, code: WireCode::Cancelled, detail };
    apply(worker, ConnectorMetadata { cancels: vec![cancel], ..ConnectorMetadata::default() });
    worker.fetch();
}

/// A producer whose ranks have a host name, its address, a consumer, and how many names that has looked up.
fn with_host_name() -> (Worker, String, Arc<Worker>, Arc<AtomicU32>, [Agent; 2]) {
    let counted = |agent: &Agent, lookups: &Arc<AtomicU32>| -> LookUp {
        let (agent, lookups) = (agent.clone(), Arc::clone(lookups));
        Arc::new(move |name: &str| -> kvferry::Result<Peer> {
            lookups.fetch_add(u32::from(!is_literal(name)), Ordering::Relaxed);
            agent.peer(name)
        })
    };
    let lookups = Arc::default();
    let (producer, p) = start_as("localhost", 1, |agent| counted(agent, &Arc::default()));
    let (consumer, d) = start(2, |agent| counted(agent, &lookups));
    let address = p.advertised().to_owned();
    assert!(address.starts_with("localhost:"), "{address}");
    (producer, address, Arc::new(consumer), lookups, [p, d])
}

fn hand_over(producer: &Worker, consumer: &Arc<Worker>, request: &str, address: &str) {
    offer(producer, request);
    fetch(consumer, request, address);
    assert_eq!(outcome(consumer), (request.to_owned(), true));
}

/// Has a fetch fail because another engine than the named one listens at the address.
fn name_another(consumer: &Arc<Worker>, request: &str, address: &str) {
    let engine = Some(EngineId(99));
    begin(consumer, FetchRequest { engine, ..fetch_request(request, address) });
    assert_eq!(outcome(consumer), (request.to_owned(), false));
}

/// Has the names of a producer looked up again, as after the loss of a rank of it.
fn doubt(consumer: &Worker, address: &str) {
    consumer.inner.state.lock().doubt_names(address);
}

/// Takes all places that lookups of addresses get from which no handoff has come.
fn fill_places(consumer: &Worker) {
    let mut state = consumer.inner.state.lock();
    let far = crate::clock::now() + Duration::from_secs(3600);
    for taken in 0.. {
        let action = Action::Fetch(fetch_request("hangs", &format!("name-{taken}:1")));
        let action = PendingAction::new(action, far);
        if !state.names.has_room(&action) {
            assert_eq!(taken, names::LOOKUPS_MAX / 2);
            return;
        }
        state.names.wait(action, Vec::new(), far);
    }
}

#[test]
fn a_cancelled_request_has_no_name_of_its_producer_looked_up_again() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, address, consumer, lookups, _agents) = with_host_name();
    hand_over(&producer, &consumer, "first", &address);
    fetch(&consumer, "invented", &address);
    let is_fetching = || consumer.inner.state.lock().fetched_for.contains_key(&id("invented"));
    while !is_fetching() {
        std::thread::yield_now();
    }
    cancel(&consumer, "invented");
    assert_eq!(outcome(&consumer), ("invented".to_owned(), false));
    hand_over(&producer, &consumer, "second", &address);
    assert_eq!(lookups.load(Ordering::Relaxed), 1);
}

#[test]
fn a_producer_that_a_handoff_came_from_is_looked_up_while_other_lookups_fill_their_places() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, address, consumer, lookups, _agents) = with_host_name();
    hand_over(&producer, &consumer, "first", &address);
    doubt(&consumer, &address);
    fill_places(&consumer);
    hand_over(&producer, &consumer, "second", &address);
    assert_eq!(lookups.load(Ordering::Relaxed), 2);
}

#[test]
fn a_name_that_was_found_before_is_used_while_no_lookup_has_a_place() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, address, consumer, lookups, _agents) = with_host_name();
    name_another(&consumer, "another-engine", &address);
    doubt(&consumer, &address);
    fill_places(&consumer);
    hand_over(&producer, &consumer, "first", &address);
    assert_eq!(lookups.load(Ordering::Relaxed), 1);
}

#[test]
fn an_invented_engine_id_has_no_name_of_a_producer_looked_up_again() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, address, consumer, lookups, _agents) = with_host_name();
    name_another(&consumer, "before", &address);
    hand_over(&producer, &consumer, "first", &address);
    for n in 0..3 {
        name_another(&consumer, &format!("invented-{n}"), &address);
    }
    hand_over(&producer, &consumer, "second", &address);
    assert_eq!(lookups.load(Ordering::Relaxed), 1);
}

#[test]
fn a_producer_is_reached_where_it_was_while_the_lookup_of_its_name_fails() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let is_out = Arc::new(AtomicBool::new(false));
    let (producer, p) = start_as("localhost", 1, agents_peer);
    let (consumer, _d) = start(2, |agent| {
        let (agent, is_out) = (agent.clone(), Arc::clone(&is_out));
        Arc::new(move |name: &str| {
            let fails = !is_literal(name) && is_out.load(Ordering::Relaxed);
            agent.peer(if fails { "no address" } else { name })
        })
    });
    let consumer = Arc::new(consumer);
    hand_over(&producer, &consumer, "first", p.advertised());
    is_out.store(true, Ordering::Relaxed);
    for request in ["second", "third"] {
        doubt(&consumer, p.advertised());
        hand_over(&producer, &consumer, request, p.advertised());
    }
    // A name that was never found is not reached.
    let stranger = p.advertised().replace("localhost", "localhost.");
    fetch(&consumer, "stranger", &stranger);
    assert_eq!(outcome(&consumer), ("stranger".to_owned(), false));
}

#[test]
fn a_name_whose_lookup_takes_too_long_is_used_as_it_was_found_before() {
    let at = |seconds: u64| Timestamp::from_nanos(seconds * 1_000_000_000);
    let (_worker, agent) = start(1, agents_peer);
    let peer = agent.peer(agent.advertised()).expect("an address");
    let mut names = Names::default();
    names.learn(vec![("a:1".to_owned(), peer)]);
    names.doubt("a:1");
    let address: ProducerAddress = "a:1".parse().expect("an address");
    for (lookup, is_found) in [(vec!["a:1", "b:1"], false), (vec!["a:1"], true)] {
        let lookup: Vec<_> = lookup.into_iter().map(str::to_owned).collect();
        let action = Action::Fetch(fetch_request("r", "a:1"));
        names.wait(PendingAction::new(action, at(9)), lookup, at(5));
        assert!(!names.is_found(&address));
        names.expire(at(5));
        assert_eq!(names.is_found(&address), is_found);
        names.end(&address);
        names.doubt("a:1");
    }
}

#[test]
fn a_request_for_another_engine_than_was_just_found_needs_no_handshake() {
    let (producer, p) = start(1, agents_peer);
    let (consumer, _d) = start(2, agents_peer);
    let consumer = Arc::new(consumer);
    hand_over(&producer, &consumer, "first", p.advertised());
    let known = std::mem::take(&mut consumer.inner.state.lock().engines);
    let then = crate::clock::now();
    let engines::Lookup::Known(engine) = { known }.find(p.advertised(), None, then) else {
        panic!("it was found");
    };
    let mut engines = Engines::default();
    let name = p.advertised().parse().expect("an address");
    assert!(engines.insert(name, origin(p.advertised()), &engine, then).is_empty());
    let mut find = |id: u128, now| match engines.find(p.advertised(), Some(EngineId(id)), now) {
        engines::Lookup::Known(_) => "known",
        engines::Lookup::Another => "another",
        engines::Lookup::Unknown => "unknown",
    };
    let almost = then + FRESH.saturating_sub(Duration::from_nanos(1));
    assert_eq!([find(1, then), find(99, then), find(99, almost)], ["known", "another", "another"]);
    assert_eq!([find(1, then + FRESH), find(99, then + FRESH)], ["known", "unknown"]);
}

#[test]
fn a_bootstrap_server_is_asked_once_a_moment_however_many_ids_are_invented() {
    let at = |millis: u64| Timestamp::from_nanos(millis * 1_000_000);
    let id = |id: u128| Some(EngineId(id));
    let url = ProducerAddress::bootstrap("prefill:8998").expect("an address");
    let answer = |of: &[u128]| {
        let agent = |id: &u128| (EngineId(*id), format!("10.0.0.{id}:7"));
        bootstrap::Engines::of(of.iter().map(agent))
    };
    let mut names = Names::default();
    names.learn_engines(&url, answer(&[1]), [EngineId(9)].into_iter(), at(0));
    let mut found = |asked, now| {
        let found = names.engine(&url, asked, true, at(now));
        found.map(|it| it.expect("the only engine").0)
    };
    for n in 0..1000 {
        assert_eq!(found(id(1000 + n), 999), id(1));
    }
    assert_eq!(found(None, 999), id(1));
    // The id in the answer, and the one that a router has kept, need no further answer.
    for asked in [1, 9] {
        assert_eq!(found(id(asked), 3_600_000), id(1));
    }
    assert_eq!([found(id(1000), 1000), found(None, 1000)], [None, None]);
    // Only what is asked for is kept, and not without end.
    names.learn_engines(&url, answer(&[1, 2]), (100..200).map(EngineId), at(2000));
    let mut pick = |asked| names.engine(&url, id(asked), true, at(9000)).map(|it| it.is_ok());
    assert_eq!([pick(1), pick(2), pick(9), pick(199)], [Some(true), Some(true), None, Some(false)]);
    // The engine has moved.
    names.doubt("10.0.0.1:7");
    assert!(names.engine(&url, id(1), true, at(2001)).is_none());
    assert!(names.engine(&url, id(1), false, at(2001)).is_some());
}

#[test]
fn an_action_waits_for_a_lookup_until_its_own_deadline_at_most() {
    let at = |seconds: u64| Timestamp::from_nanos(seconds * 1_000_000_000);
    let mut names = Names::default();
    for (request, deadline) in [("short", 1), ("long", 9)] {
        let action = Action::Fetch(fetch_request(request, "a:1"));
        let action = PendingAction::new(action, at(deadline));
        names.wait(action, Vec::new(), at(5));
    }
    let expired = |names: &mut Names, now| {
        let expired = names.expire(at(now)).into_iter().flat_map(|(_, actions)| actions);
        expired.map(|it| it.deadline).collect::<Vec<_>>()
    };
    assert_eq!(names.next_limit(), Some(at(1)));
    assert_eq!(expired(&mut names, 0), []);
    assert_eq!(expired(&mut names, 1), [at(1)]);
    assert_eq!(names.next_limit(), Some(at(5)));
    assert_eq!(expired(&mut names, 4), []);
    assert_eq!(expired(&mut names, 5), [at(9)]);
    assert_eq!(names.next_limit(), None);
}

fn offer(worker: &Worker, request: &str) {
    let offer = Offer { transfer: id(request), tokens: BLOCK_TOKENS, eager: true };
    let compute = Compute {
        request: request.to_owned(),
        offer: Some(offer),
        until: BLOCK_TOKENS,
        blocks: vec![BlockTable::new(0, vec![0])],
    };
    apply(worker, ConnectorMetadata { computes: vec![compute], ..ConnectorMetadata::default() });
    worker.step_computed(None);
}

/// Passes the outcome of the next fetch on, or fails: the worker's lock may be held for ever.
fn outcome(worker: &Arc<Worker>) -> (String, bool) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let worker = Arc::clone(worker);
    std::thread::spawn(move || {
        while !worker.wait(Duration::from_secs(1)) {}
        let reports = worker.reports();
        drop(sender.send((reports.received[0].clone(), reports.failed.is_empty())));
    });
    receiver.recv_timeout(PATIENCE / 4).expect("a fetch ends")
}

#[test]
fn a_name_lookup_that_hangs_holds_up_only_the_requests_that_wait_for_it() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, p) = start(1, agents_peer);
    let address = p.advertised().replace("127.0.0.1", "localhost");
    let released = Arc::new((Mutex::new(false), Condvar::new()));
    let gate = Arc::clone(&released);
    let lookups = AtomicU32::new(0);
    let (consumer, _d) = start(2, |agent| {
        let agent = agent.clone();
        Arc::new(move |name: &str| -> kvferry::Result<Peer> {
            // The name of the producer is found once. All other lookups hang.
            let is_first =
                || name.contains("localhost") && lookups.fetch_add(1, Ordering::Relaxed) == 0;
            if is_literal(name) || is_first() {
                return agent.peer(name);
            }
            let state = gate.0.lock();
            drop(gate.1.wait_while(state, None, |released| !*released));
            agent.peer("no address")
        })
    });
    let consumer = Arc::new(consumer);
    for request in ["first", "second"] {
        fetch(&consumer, "hangs", "nowhere.invalid:1");
        offer(&producer, request);
        fetch(&consumer, request, &address);
        assert_eq!(outcome(&consumer), (request.to_owned(), true));
        *released.0.lock() = true;
        released.1.notify_all();
        assert_eq!(outcome(&consumer), ("hangs".to_owned(), false));
        *released.0.lock() = false;
    }
}

#[test]
fn lookups_that_hang_give_their_places_back_and_a_later_name_is_found() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, p) = start(1, |agent| {
        let agent = agent.clone();
        Arc::new(move |name| agent.peer(name))
    });
    let address = p.advertised().replace("127.0.0.1", "localhost");
    let (consumer, _d) = start(2, |agent| {
        let agent = agent.clone();
        Arc::new(move |name: &str| -> kvferry::Result<Peer> {
            while name.ends_with(".invalid:1") {
                std::thread::park_timeout(Duration::from_secs(100));
            }
            agent.peer(name)
        })
    });
    let consumer = Arc::new(consumer);
    for at in 0..names::LOOKUPS_MAX {
        fetch(&consumer, &format!("hangs-{at}"), &format!("name-{at}.invalid:1"));
    }
    let mut failed = 0;
    while failed < names::LOOKUPS_MAX {
        assert!(consumer.wait(Duration::from_secs(60)), "a lookup never gives up");
        failed += consumer.reports().failed.len();
    }
    offer(&producer, "later");
    fetch(&consumer, "later", &address);
    assert_eq!(outcome(&consumer), ("later".to_owned(), true));
}

#[test]
fn a_fetch_that_is_cancelled_before_its_success_is_reported_is_reported_as_failed() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, address, consumer, _lookups, _agents) = with_host_name();
    let is_fetching =
        |request: &str| consumer.inner.state.lock().fetched_for.contains_key(&id(request));
    offer(&producer, "ended");
    fetch(&consumer, "ended", &address);
    while consumer.inner.state.lock().fetched.is_empty() {
        std::thread::yield_now();
    }
    cancel(&consumer, "ended");
    assert_eq!(outcome(&consumer), ("ended".to_owned(), false));
    // The cancel comes too late for the rank.
    fetch(&consumer, "ending", &address);
    while !is_fetching("ending") {
        std::thread::yield_now();
    }
    let why = Failure { code: WireCode::Cancelled, detail: String::new(), addresses: Vec::new() };
    consumer.inner.state.lock().fetched_for.get_mut(&id("ending")).expect("a fetch").cancelled =
        Some(why);
    offer(&producer, "ending");
    assert_eq!(outcome(&consumer), ("ending".to_owned(), false));
}

#[test]
fn of_what_a_rank_has_offered_nothing_is_fetched_once_it_could_not_read_a_step() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, address, consumer, _lookups, _agents) = with_host_name();
    hand_over(&producer, &consumer, "before", &address);
    offer(&producer, "offered");
    let restarts = vec!["offered".to_owned()];
    let step = ConnectorMetadata { restarts, ..ConnectorMetadata::default() }.encode();
    let refused = producer.apply(&step[..step.len() - 1]);
    assert!(matches!(refused, Err(WorkerError::Metadata(_))), "{refused:?}");
    fetch(&consumer, "offered", &address);
    assert_eq!(outcome(&consumer), ("offered".to_owned(), false));
    hand_over(&producer, &consumer, "later", &address);
}

#[test]
fn i7_a_rank_that_could_not_read_a_step_fails_the_fetches_that_the_step_may_have_cancelled() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, address, consumer, _lookups, _agents) = with_host_name();
    hand_over(&producer, &consumer, "before", &address);
    offer(&producer, "ended");
    fetch(&consumer, "ended", &address);
    kvferry_testkit::eventually("a fetch has ended", || consumer.wait(Duration::ZERO));
    fetch(&consumer, "waits", &address);
    kvferry_testkit::eventually("a fetch has begun", || {
        consumer.inner.state.lock().fetched_for.contains_key(&id("waits"))
    });
    learn(&consumer, 7);
    // Its metadata are applied, and it has not begun.
    offer(&producer, "applied");
    let fetches = vec![fetch_request("applied", &address)];
    apply(&consumer, ConnectorMetadata { fetches, ..ConnectorMetadata::default() });
    let detail = String::new();
    let cancel = Cancel { request: "waits".to_owned(), code: WireCode::Cancelled, detail };
    let step = ConnectorMetadata { cancels: vec![cancel], ..ConnectorMetadata::default() }.encode();
    let refused = consumer.apply(&step[..step.len() - 1]);
    assert!(matches!(refused, Err(WorkerError::Metadata(_))), "{refused:?}");
    consumer.fetch();
    let failed = with_code(&["7", "applied", "ended", "waits"], WireCode::Internal);
    assert_eq!(outcomes(&consumer, 4), failed);
    hand_over(&producer, &consumer, "later", &address);
}

#[test]
fn i1_of_a_step_that_a_rank_could_not_read_each_fetch_and_each_held_request_is_reported_once() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, address, consumer, _lookups, _agents) = with_host_name();
    // What the ranks have heard of before, and what they have not.
    ["offered", "withdrawn", "dropped"].iter().for_each(|request| offer(&producer, request));
    let held = EndingKind::Held { side_data: None };
    let withdrawn = |held| {
        let (code, detail) = (WireCode::Cancelled, String::new());
        EndingKind::Withdrawn { code, detail, held }
    };
    let endings = [
        ("offered", held.clone()),
        ("new", held),
        ("withdrawn", withdrawn(true)),
        ("dropped", withdrawn(false)),
    ];
    let endings = endings.map(|(request, how)| {
        let (request, transfer) = (request.to_owned(), id(request));
        Ending { request, transfer, how }
    });
    let (fetches, endings) = (vec![fetch_request("fetched", &address)], endings.into());
    let step = ConnectorMetadata { fetches, endings, ..ConnectorMetadata::default() };
    let (bytes, (fetches, endings)) = (step.encode(), step.awaited());
    for worker in [&producer, &*consumer] {
        let refused = worker.apply(&bytes[..bytes.len() - 1]);
        assert!(matches!(refused, Err(WorkerError::Metadata(_))), "{refused:?}");
        worker.lose_step(fetches.clone(), endings.clone());
        worker.fetch();
        let mut all = Reports::default();
        // What the rank itself has to say of its handoffs comes on other threads.
        for _ in 0..50 {
            let reports = worker.reports();
            all.sent.extend(reports.sent);
            all.received.extend(reports.received);
            all.failed.extend(reports.failed);
            std::thread::sleep(Duration::from_millis(1));
        }
        all.sent.sort();
        assert_eq!(all.sent, ["new", "offered", "withdrawn"]);
        assert_eq!(
            (all.received, all.failed),
            (vec!["fetched".to_owned()], vec!["fetched".to_owned()])
        );
        let kept =
            worker.gauges().into_iter().filter(|(name, _)| ["produced", "fetches"].contains(name));
        assert!(kept.map(|(_, count)| count).eq([0, 0]), "{:?}", worker.gauges());
    }
    for request in ["offered", "new", "withdrawn", "dropped"] {
        fetch(&consumer, request, &address);
        assert_eq!(outcome(&consumer), (request.to_owned(), false));
    }
    hand_over(&producer, &consumer, "later", &address);
}

#[test]
fn an_answer_to_a_freed_handoff_says_nothing_of_another_one_of_the_same_request() {
    let mut state = super::state::State::default();
    let [first, second] = ["first", "second"].map(|name| HandoffId::new(name).expect("short"));
    state.wait_for_answer("a".to_owned(), first.clone());
    state.answered_by_producer(&first);
    state.forget_answer(&first);
    // The client uses the id again.
    state.wait_for_answer("a".to_owned(), second.clone());
    assert!(state.answered.is_empty());
    state.answered_by_producer(&second);
    assert!(state.answered.into_values().eq(["a"]));
}

/// A producer, engine 1, at an address, and a consumer to which it has handed a request over.
fn handed_over_at(address: &str) -> ((Worker, Agent), (Arc<Worker>, Agent)) {
    let first = start_at(address.parse().expect("an address"), "127.0.0.1", 1, agents_peer);
    let (consumer, agent) = start(2, agents_peer);
    let consumer = Arc::new(consumer);
    hand_over(&first.0, &consumer, "first", address);
    (first, (consumer, agent))
}

/// The engine that a consumer knows at an address.
fn known_engine(consumer: &Worker, address: &str) -> Arc<ProducerEngine> {
    match consumer.inner.state.lock().engines.find(address, None, crate::clock::now()) {
        engines::Lookup::Known(engine) => engine,
        other => panic!("{other:?}"),
    }
}

/// A consumer that knows the engine at an address, which is started again while no session leads to it: as after a
/// session that gave its place to another, after which the consumer keeps what it knows.
fn restart_unnoticed(
    consumer: &Worker,
    (producer, agent): (Worker, Agent),
    engine: u128,
) -> (Worker, Agent) {
    let address = agent.advertised().to_owned();
    let before = known_engine(consumer, &address);
    drop(producer);
    agent.shutdown();
    drop(agent);
    kvferry_testkit::eventually("the consumer's session has ended", || {
        consumer.inner.state.lock().engines.known.is_empty()
    });
    let name = address.parse().expect("an address");
    keep(consumer, name, &before);
    let listen = address.parse().expect("an address");
    start_at(listen, "127.0.0.1", engine, agents_peer)
}

#[test]
fn a_request_that_names_no_engine_is_served_by_the_one_that_was_restarted_unnoticed() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let port = kvferry_testkit::ports::KeptPort::new();
    let address = port.address();
    let (first, (consumer, _d)) = handed_over_at(address);
    let stale = known_engine(&consumer, address);
    let (producer, _p) = restart_unnoticed(&consumer, first, 3);
    hand_over(&producer, &consumer, "second", address);
    // A session leads to the engine of today, and what is known of it is of an earlier incarnation.
    let name: ProducerAddress = address.parse().expect("an address");
    keep(&consumer, name, &stale);
    hand_over(&producer, &consumer, "third", address);
    assert_eq!(known_engine(&consumer, address).id, EngineId(3));
}

/// The host of an address without a name.
fn origin(address: &str) -> Origin {
    Origin::from(address.parse::<SocketAddr>().expect("an address").ip())
}

/// The consumer takes this engine for the one at an address.
fn keep(consumer: &Worker, name: ProducerAddress, engine: &Arc<ProducerEngine>) {
    let host = origin(name.as_str());
    drop(consumer.inner.state.lock().engines.insert(name, host, engine, crate::clock::now()));
}

/// An engine of one layer as a consumer learns it, with a card of its only rank.
pub(super) fn pairing(engine: u128, card: Vec<u8>) -> Arc<Pairing> {
    pairing_at(engine, card, vec!["127.0.0.1:1".to_owned()])
}

fn pairing_at(engine: u128, card: Vec<u8>, addresses: Vec<String>) -> Arc<Pairing> {
    let topology = topology(1, 1);
    let routing = Routing::new(&topology, &topology).expect("the same model");
    let (engine, cards) = (EngineId(engine), [(0, card)].into());
    Arc::new(Pairing { engine, routing, addresses, cards })
}

/// A fetch that waits, as if an engine handshake was under way for it.
fn learn_at(consumer: &Worker, ticket: u64, address: &str, patience: Duration) {
    let fetch = fetch_request(&format!("{ticket}"), address);
    let mut state = consumer.inner.state.lock();
    state.fetches.insert(fetch.request.clone(), Stage::Pending);
    let pending = PendingAction::new(Action::Fetch(fetch), crate::clock::now() + patience);
    state.learning.insert(ticket, pending);
}

fn learn(consumer: &Worker, ticket: u64) {
    learn_at(consumer, ticket, "127.0.0.1:1", PATIENCE);
}

/// Has the engines planned that wait: the thread that plans them seemed to run.
fn plan_all(consumer: &Worker) {
    const LAST: u64 = 1 << 32;
    consumer.inner.state.lock().is_planning = false;
    learn(consumer, LAST);
    consumer.inner.engine_learned(LAST, Ok(pairing(LAST.into(), Vec::new())));
}

/// The requests and codes of so many fetches that end, in the order of the requests.
fn outcomes(worker: &Worker, count: usize) -> Vec<(String, WireCode)> {
    let mut ended = Vec::new();
    kvferry_testkit::eventually("the fetches end", || {
        let fetched = std::mem::take(&mut worker.inner.state.lock().fetched);
        ended.extend(fetched.into_iter().map(|it| (it.request, it.code)));
        ended.len() >= count
    });
    ended.sort_by(|a, b| a.0.cmp(&b.0));
    ended
}

fn with_code(requests: &[&str], code: WireCode) -> Vec<(String, WireCode)> {
    requests.iter().map(|request| ((*request).to_owned(), code)).collect()
}

#[test]
fn i8_engines_wait_to_be_planned_on_a_thread_of_their_own_and_too_many_are_refused() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, p) = start(1, agents_peer);
    let (consumer, _d) = start(2, agents_peer);
    let consumer = Arc::new(consumer);
    hand_over(&producer, &consumer, "before", p.advertised());
    let inner = &consumer.inner;
    (1..=5).for_each(|ticket| learn(&consumer, ticket));
    // As while the thread plans another engine.
    inner.state.lock().is_planning = true;
    let long = |engine| pairing(engine, vec![0; 30 << 20]);
    let first = long(1);
    inner.engine_learned(1, Ok(Arc::clone(&first)));
    inner.engine_learned(2, Ok(first));
    inner.engine_learned(3, Ok(long(3)));
    assert!(!inner.state.lock().has_reports());
    inner.engine_learned(4, Ok(long(4)));
    assert_eq!(outcomes(&consumer, 1), with_code(&["4"], WireCode::Busy));
    // Handoffs go on meanwhile.
    hand_over(&producer, &consumer, "meanwhile", p.advertised());
    inner.state.lock().is_planning = false;
    // The thread plans all that wait.
    inner.engine_learned(5, Ok(pairing(5, Vec::new())));
    assert_eq!(outcomes(&consumer, 4), with_code(&["1", "2", "3", "5"], WireCode::Malformed));
    kvferry_testkit::eventually("the thread has ended", || !inner.state.lock().is_planning);
    assert!(inner.state.lock().learning.is_empty());
}

#[test]
fn a_fetch_whose_engine_is_not_planned_in_time_fails() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (consumer, _d) = start(2, agents_peer);
    let inner = &consumer.inner;
    inner.state.lock().is_planning = true;
    learn(&consumer, 1);
    let soon = Duration::from_millis(20);
    for (ticket, patience) in [(2, soon), (3, 3 * soon)] {
        learn_at(&consumer, ticket, "127.0.0.1:1", patience);
    }
    (1..=3).for_each(|n| inner.engine_learned(n, Ok(pairing(n.into(), Vec::new()))));
    assert_eq!(outcomes(&consumer, 2), with_code(&["2", "3"], WireCode::Deadline));
    let state = inner.state.lock();
    assert!(state.learning.keys().eq(&[1]) && state.unplanned.tickets().eq([1]));
}

#[test]
fn i8_an_engine_whose_plan_panics_fails_its_fetches_and_no_others() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (consumer, _d) = start(2, agents_peer);
    let consumer = Arc::new(consumer);
    let inner = &consumer.inner;
    (1..=3).for_each(|ticket| learn(&consumer, ticket));
    inner.state.lock().is_planning = true;
    // No handshake ends with an engine that has too few addresses.
    let broken = pairing_at(1, consumer.rank_metadata().to_vec(), Vec::new());
    inner.engine_learned(1, Ok(Arc::clone(&broken)));
    inner.engine_learned(2, Ok(broken));
    inner.state.lock().is_planning = false;
    inner.engine_learned(3, Ok(pairing(3, Vec::new())));
    let mut expected = with_code(&["1", "2"], WireCode::Internal);
    expected.extend(with_code(&["3"], WireCode::Malformed));
    assert_eq!(outcomes(&consumer, 3), expected);
    kvferry_testkit::eventually("the thread has ended", || !inner.state.lock().is_planning);
    let state = inner.state.lock();
    assert!(state.learning.is_empty() && state.unplanned.is_empty());
}

#[test]
fn an_engine_is_as_old_as_its_handshake_and_one_that_was_lost_since_is_learned_anew() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    for is_lost in [false, true] {
        let (producer, p) = start(1, agents_peer);
        let (consumer, _d) = start(2, agents_peer);
        let (consumer, address) = (Arc::new(consumer), p.advertised());
        let inner = &consumer.inner;
        inner.state.lock().is_planning = true;
        offer(&producer, "1");
        learn_at(&consumer, 1, address, PATIENCE);
        // As of an incarnation before.
        let card = producer.rank_metadata().to_vec();
        inner.engine_learned(1, Ok(pairing_at(9, card, vec![address.to_owned()])));
        let learned = crate::clock::now();
        if is_lost {
            inner.lost_peer(address);
        }
        std::thread::sleep(Duration::from_millis(2));
        let lost = crate::clock::now();
        plan_all(&consumer);
        assert_eq!(outcomes(&consumer, 2)[0], ("1".to_owned(), WireCode::Ok));
        let state = inner.state.lock();
        let known = state.engines.known[address].learned;
        let id = state.engines.id(address).expect("it is known");
        assert!(if is_lost { known > lost } else { known <= learned });
        assert_eq!(id, EngineId(if is_lost { 1 } else { 9 }));
    }
}

#[test]
fn a_producer_is_told_that_it_may_free_blocks_though_its_engine_can_not_be_planned() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let (producer, p) = start(1, agents_peer);
    let (consumer, _d) = start(2, agents_peer);
    let rank = producer.inner.rank();
    for (ticket, engine) in [(1, None), (2, Some(EngineId(9))), (3, Some(EngineId(1)))] {
        let transfer = id(&format!("{ticket}"));
        offer(&producer, transfer.as_str());
        let address = p.advertised().parse().expect("an address");
        let (code, budget_ms) = (WireCode::NotNeeded, BUDGET_MS);
        let free = Free { transfer: transfer.clone(), address, engine, code, budget_ms };
        let pending = PendingAction::new(Action::Free(free), crate::clock::now() + PATIENCE);
        consumer.inner.state.lock().learning.insert(ticket, pending);
        let pairing = pairing_at(1, Vec::new(), vec![p.advertised().to_owned()]);
        consumer.inner.engine_learned(ticket, Ok(pairing));
        if engine != Some(EngineId(9)) {
            kvferry_testkit::eventually("the producer is told", || {
                let expected = rank.expect(&transfer);
                matches!(expected, Err(RankError::Refused(Refusal::Ended(WireCode::NotNeeded))))
            });
        }
    }
    // Another engine than the one that is meant is told nothing.
    let expected = rank.expect(&id("2"));
    assert!(!matches!(expected, Err(RankError::Refused(Refusal::Ended(_)))), "{expected:?}");
}

#[test]
fn i12_a_request_that_names_an_engine_that_was_restarted_unnoticed_fails() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let port = kvferry_testkit::ports::KeptPort::new();
    let address = port.address();
    let (first, (consumer, _d)) = handed_over_at(address);
    let (producer, _p) = restart_unnoticed(&consumer, first, 3);
    offer(&producer, "second");
    let engine = Some(EngineId(1));
    begin(&consumer, FetchRequest { engine, ..fetch_request("second", address) });
    assert_eq!(outcome(&consumer), ("second".to_owned(), false));
}
