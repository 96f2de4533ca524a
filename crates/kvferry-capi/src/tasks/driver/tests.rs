use super::*;
use kvferry::{Access, Region};
use kvferry_proto::tasks::Part;
use kvferry_sys::map::Mapping;
use kvferry_testkit::ports::ClosedPort;
use kvferry_testkit::slow::SlowMemory;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::sync::mpsc;

/// An hour: nothing in these tests ends by a deadline.
const NEVER: Duration = Duration::from_secs(3600);

/// An agent of TCP, whose requests of its own would time out soon, and whose sessions end by no silence.
fn agent() -> Agent {
    let builder = Agent::builder().listen(([127, 0, 0, 1], 0)).timeout(Duration::from_millis(200));
    let builder = builder.silence(PATIENCE);
    builder
        .transports(kvferry::Transports::parse("tcp").expect("a name"))
        .start()
        .expect("an agent")
}

fn endpoint(agent: &Agent) -> Arc<Endpoint> {
    let endpoint = Endpoint::start(agent.clone()).map_err(|failure| failure.text);
    endpoint.expect("an endpoint")
}

/// A send of one part of a region.
fn send(endpoint: &Endpoint, to: &Agent, key: &str, region: &Region) -> Arc<End> {
    let peer = endpoint.agent().peer(to.advertised()).expect("an address");
    let blocks = vec![Offered(1, vec![Part(0, 0, region.len() as u64)])];
    let what = (vec![region.remote().to_bytes()], blocks, After::default());
    endpoint.send(peer, key, what, NEVER, None).expect("there is room").1
}

/// A send that fails, whose callback runs on the endpoint's thread.
fn call_back(endpoint: &Endpoint, done: impl FnOnce() + Send + 'static) {
    let closed = ClosedPort::new();
    let peer = endpoint.agent().peer(closed.address()).expect("an address");
    let blocks = vec![Offered(1, vec![Part(0, 0, 1)])];
    let done: Done = Box::new(move |_| {
        drop(closed);
        done();
    });
    endpoint
        .send(peer, "unknown", (Vec::new(), blocks, After::default()), NEVER, Some(done))
        .expect("there is room");
}

#[test]
fn a_sender_that_floods_a_slow_callback_waits_and_all_its_offers_arrive() {
    const OFFERS: usize = 4000;
    let _bound = Watchdog::new(PATIENCE);
    let (sends, receives) = (agent(), agent());
    let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
    let memory = sends.allocate(4096, Access::READ).expect("memory");
    let (release, released) = mpsc::channel();
    let (began, begins) = mpsc::channel();
    call_back(&receiver, move || {
        began.send(()).expect("the test waits");
        let _ = released.recv();
    });
    begins.recv().expect("the callback is called");
    let ends: Vec<_> = (0..OFFERS)
        .map(|number| send(&sender, &receives, &format!("{number:01000}"), &memory))
        .collect();
    let held = || receiver.inbox.message_bytes();
    eventually("the window is full", || held() > 200 * 1000);
    // Longer than the time limit of the sender's requests.
    std::thread::sleep(Duration::from_millis(600));
    assert!(held() <= Channel::WINDOW_BYTES, "{} bytes wait", held());
    assert_eq!(sends.stats().sessions, 1, "the session goes on");
    release.send(()).expect("the callback waits");
    eventually("all offers have arrived", || receiver.gauges().parked == OFFERS);
    assert_eq!((sends.stats().sessions_opened, sends.stats().sessions), (1, 1));
    assert!(ends.iter().all(|end| end.wait(Some(Duration::ZERO)).is_none()));
    sender.close();
    receiver.close();
}

#[test]
fn sends_to_a_receiver_that_takes_no_message_end_as_busy_and_its_session_goes_on() {
    const OFFERS: usize = 40_000;
    let _bound = Watchdog::new(PATIENCE);
    let (sends, receives) = (agent(), agent());
    let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
    let memory = sends.allocate(4096, Access::READ).expect("memory");
    let held = receiver.state.lock();
    let ends: Vec<_> =
        (0..OFFERS).map(|number| send(&sender, &receives, &number.to_string(), &memory)).collect();
    eventually("some are refused", || sender.gauges().sends < OFFERS);
    let busy = ends.iter().filter_map(|end| end.wait(Some(Duration::ZERO))).next();
    assert_eq!(busy.map(|outcome| outcome.code), Some(Code::Busy));
    assert_eq!(sends.stats().sessions, 1, "the session goes on");
    drop(held);
    eventually("the others arrive", || {
        let (waiting, arrived) = (sender.gauges().sends, receiver.gauges().parked);
        waiting == arrived && arrived >= Channel::QUEUE_MAX / 2
    });
    sender.close();
    receiver.close();
}

/// A task that waits for one part, of `len` bytes.
fn receive(endpoint: &Endpoint, key: &str, len: usize) -> Arc<End> {
    let into = endpoint.agent().allocate(len, Access::NONE).expect("memory");
    let wanted = vec![Wanted { key: 1, lens: vec![len as u64] }];
    let places = (vec![Some((into, 0))], After::default());
    let received = endpoint.recv(key, wanted, places, NEVER, None);
    received.expect("there is room").1
}

fn outcome(end: &End) -> String {
    end.wait(Some(PATIENCE / 2)).expect("it ends").text
}

#[test]
fn a_sender_can_not_offer_the_memory_of_a_third_agent() {
    let _bound = Watchdog::new(PATIENCE);
    let (sends, receives, third) = (agent(), agent(), agent());
    let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
    let foreign = third.allocate(4096, Access::READ).expect("memory");
    let end = receive(&receiver, "k", 4096);
    let _sent = send(&sender, &receives, "k", &foreign);
    assert!(outcome(&end).contains("offers memory of another agent"), "{}", outcome(&end));
    assert_eq!(third.stats().sessions_opened, 0, "it is not asked");
    sender.close();
    receiver.close();
}

#[test]
fn a_sender_that_advertises_a_name_is_not_looked_up() {
    let _bound = Watchdog::new(PATIENCE);
    let sends = Agent::builder().listen(([127, 0, 0, 1], 0)).advertise("sender.invalid:1");
    let (sends, receives) = (sends.silence(PATIENCE).start().expect("an agent"), agent());
    let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
    let memory = sends.allocate(4096, Access::READ).expect("memory");
    let end = receive(&receiver, "k", 4096);
    let _sent = send(&sender, &receives, "k", &memory);
    let text = outcome(&end);
    assert!(text.contains("advertises the name sender.invalid:1, not an address"), "{text}");
    sender.close();
    receiver.close();
}

#[test]
fn a_callback_may_free_a_task_whose_memory_is_being_written() {
    const LEN: usize = 65_536;
    let _bound = Watchdog::new(PATIENCE);
    let (sends, receives) = (agent(), agent());
    let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
    let mapping = Arc::new(Mapping::anonymous(LEN).expect("memory"));
    let device = SlowMemory::new(mapping, 0, LEN, 1);
    device.hold();
    let from = sends.register_device(device.memory(), Access::READ).expect("a region");
    let into = receives.allocate(LEN, Access::NONE).expect("memory");
    let wanted = vec![Wanted { key: 1, lens: vec![LEN as u64] }];
    let places = (vec![Some((into, 0))], After::default());
    let (task, end) = receiver.recv("k", wanted, places, NEVER, None).expect("there is room");
    let _sent = send(&sender, &receives, "k", &from);
    eventually("it is read", || receiver.gauges().reads == 1 && device.pending() > 0);
    let (freed, frees) = mpsc::channel();
    let (of, at) = (Arc::clone(&receiver), Arc::clone(&end));
    call_back(&receiver, move || {
        of.free(task, &at);
        freed.send(at.wait(Some(Duration::ZERO)).is_some()).expect("the test waits");
    });
    assert!(frees.recv().expect("the callback returns"), "nothing writes to the memory");
    assert_eq!(receiver.gauges().recvs, 0);
    // Later callbacks come.
    let (called, calls) = mpsc::channel();
    call_back(&receiver, move || called.send(()).expect("the test waits"));
    calls.recv().expect("it is called");
    device.release();
    sender.close();
    receiver.close();
}

#[test]
fn i2_a_task_whose_read_was_given_up_ends_when_its_device_has_ended_the_copy() {
    const LEN: usize = 65_536;
    let _bound = Watchdog::new(PATIENCE);
    for transports in ["tcp", "local"] {
        let brief = || {
            let transports = kvferry::Transports::parse(transports).expect("a name");
            let builder = Agent::builder().listen(([127, 0, 0, 1], 0)).transports(transports);
            // Longer than a thread is late on a loaded machine: the sessions must not end by it.
            builder.silence(Duration::from_secs(8)).start().expect("an agent")
        };
        let (sends, receives) = (brief(), brief());
        let (sender, receiver) = (endpoint(&sends), endpoint(&receives));
        let mapping = Arc::new(Mapping::anonymous(LEN).expect("memory"));
        let device = SlowMemory::new(mapping, 0, LEN, 1);
        device.hold();
        let from = sends.allocate(LEN, Access::READ).expect("memory");
        let into = receives.register_device(device.memory(), Access::NONE).expect("a region");
        let wanted = vec![Wanted { key: 1, lens: vec![LEN as u64] }];
        let places = (vec![Some((into, 0))], After::host());
        let received = receiver.recv("k", wanted, places, NEVER, None);
        let (task, end) = received.expect("there is room");
        let _sent = send(&sender, &receives, "k", &from);
        eventually("the device has a copy", || device.pending_in() > 0);
        receiver.cancel_recv(task);
        eventually("the read is given up", || receives.stats().transfers_unconfirmed == 1);
        let early = end.wait(Some(Duration::from_millis(200)));
        assert!(early.is_none(), "{transports}: the device may still write");
        device.release();
        assert!(end.wait(Some(PATIENCE / 2)).is_some(), "{transports}: it ends");
        assert_eq!(device.pending(), 0, "{transports}");
        sender.close();
        receiver.close();
    }
}
