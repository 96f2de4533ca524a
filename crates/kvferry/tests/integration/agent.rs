//! The agent as a program uses it: in one process, over loopback.

mod callbacks;
mod devices;

use kvferry::{
    Access, Agent, AgentBuilder, Batch, Channel, Device, DeviceCopy, DeviceMemory, Error,
    ErrorKind, Message, MessageHandler, Notification, Options, Region, RemoteRegion, StagePool,
    Transfer, TransportKind, Transports,
};
use kvferry_sys::map::Mapping;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::ports::ClosedPort;
use kvferry_testkit::region::{batch, content, filled};
use kvferry_testkit::slow::SlowMemory;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::future::poll_fn;
use std::os::fd::BorrowedFd;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

fn bounded() -> Watchdog {
    Watchdog::new(PATIENCE)
}

/// The longest silence that may be set, longer than any test runs: what ends before is not ended by it.
const NEVER: Duration = Duration::from_secs(600);

/// The builder of all agents but those whose silence limit is the subject.
fn builder() -> AgentBuilder {
    Agent::builder().silence(NEVER)
}

fn agent() -> Agent {
    builder().start().expect("an agent starts")
}

fn kind<T: std::fmt::Debug>(result: Result<T, Error>) -> ErrorKind {
    result.expect_err("an error").kind()
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls a future on this thread until it is ready.
fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Arc::new(Unpark(thread::current())).into();
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park_timeout(Duration::from_secs(30)),
        }
    }
}

fn readable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    use kvferry_sys::poll::{Interest, wait_one};
    wait_one(fd, Interest::Read, Some(timeout)).expect("poll").read
}

#[test]
fn transfers_are_futures() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let (count, len) = (64, 256 * KIB);
    let from = filled(&near, len, Access::NONE, 1);
    let to: Vec<_> =
        (0..count).map(|_| far.allocate(len, Access::READ_WRITE).expect("memory")).collect();
    let peer = near.peer(far.advertised()).expect("an address");
    let start =
        |to: &Region| peer.write_async(&batch(&from, &to.remote(), 4096), &Options::default());
    // One task for all of them. Those that have ended are polled again.
    let mut running: Vec<_> = to.iter().map(start).collect();
    let outcomes: Vec<_> = block_on(poll_fn(|context| {
        let polled = running.iter_mut().map(|transfer| Pin::new(transfer).poll(context));
        let polled: Vec<_> = polled.collect();
        if polled.iter().any(Poll::is_pending) {
            return Poll::Pending;
        }
        Poll::Ready(running.iter().filter_map(Transfer::outcome).collect())
    }));
    assert_eq!(outcomes.len(), count);
    for (outcome, to) in outcomes.into_iter().zip(&to) {
        assert_eq!(outcome.expect("done").bytes, len as u64);
        assert!(content(to) == Pattern::new(1).bytes(len));
    }
    // A transfer that failed, one that has ended, and one that four threads poll.
    let outside = RemoteRegion { len: u64::MAX, ..to[0].remote() };
    let mut refused = Batch::new();
    refused.push(&from, 0, &outside, len as u64, 16).expect("a forgery fits itself");
    let refused = peer.write_async(&refused, &Options::default());
    assert_eq!(kind(block_on(refused.clone())), ErrorKind::OutOfBounds);
    assert_eq!(kind(block_on(refused)), ErrorKind::OutOfBounds);
    let shared = start(&to[0]);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| block_on(shared.clone()).expect("done"));
        }
    });
}

#[test]
fn dropping_a_future_does_not_cancel_its_transfer() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let len = 8 * MIB;
    let (from, to) = (filled(&near, len, Access::NONE, 1), far.allocate(len, Access::WRITE));
    let to = to.expect("memory");
    let peer = near.peer(far.advertised()).expect("an address");
    let options = Options { notify: Some(Notification::new("there", "")), ..Options::default() };
    let mut transfer = peer.write_async(&batch(&from, &to.remote(), 4096), &options);
    let waker = Arc::new(Unpark(thread::current())).into();
    drop(Pin::new(&mut transfer).poll(&mut Context::from_waker(&waker)));
    drop(transfer);
    let note = far.wait_notification(PATIENCE).expect("open");
    let note = note.expect("the transfer went on");
    assert_eq!(note.from_ip, Some(std::net::Ipv4Addr::LOCALHOST.into()));
    assert!(content(&to) == Pattern::new(1).bytes(len));
}

#[test]
fn notifications_can_be_waited_for_with_a_descriptor() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let peer = near.peer(far.advertised()).expect("an address");
    let fd = far.notification_fd().expect("a descriptor");
    assert!(!readable(fd, Duration::from_millis(20)), "nothing was sent yet");
    for round in 0..3 {
        for i in 0..5u8 {
            let note = Notification::new(format!("note {round}"), vec![i]);
            peer.notify(note, &Options::default()).expect("delivered");
        }
        assert!(readable(fd, PATIENCE), "five are queued");
        let got: Vec<_> = far.notifications().into_iter().map(|n| n.message).collect();
        assert_eq!(got, [[0], [1], [2], [3], [4]]);
        assert!(!readable(fd, Duration::from_millis(20)), "none is queued any more");
    }
    let waited = Instant::now();
    assert_eq!(far.wait_notification(Duration::from_millis(50)).expect("open"), None);
    assert!(waited.elapsed() >= Duration::from_millis(49));
}

#[test]
fn ten_thousand_regions_are_registered_together_and_one_by_one() {
    let _bound = bounded();
    let agent = agent();
    let pool = agent.allocate(10_000 * 64, Access::NONE).expect("memory");
    agent.unregister(&pool).expect("registered");
    let ranges: Vec<_> = (0..10_000).map(|i| ((pool.addr() + i * 64) as *mut u8, 64)).collect();
    // SAFETY: the ranges are parts of a pool that lives until the end of this test, and no
    // reference to its bytes exists.
    let regions = unsafe { agent.register_batch(&ranges, Access::READ_WRITE) };
    let regions = regions.expect("nothing overlaps");
    assert_eq!(agent.stats().regions, 10_000);
    agent.unregister_batch(&regions).expect("all were registered");
    assert_eq!(agent.stats().regions, 0);
    for (addr, len) in ranges {
        // SAFETY: as above.
        unsafe { agent.register(addr, len, Access::READ) }.expect("nothing overlaps");
    }
    assert_eq!(agent.stats().regions, 10_000);
}

#[test]
fn invalid_and_overlapping_registrations_are_refused() {
    let _bound = bounded();
    let agent = agent();
    // Twice the region's bytes, so that a range that ends after the region is mapped too.
    let memory = agent.allocate(2 * MIB, Access::NONE).expect("memory");
    agent.unregister(&memory).expect("registered");
    // SAFETY: inside memory that outlives the agent's use of it; refused ones are never used.
    let register = |addr, len| unsafe { agent.register(addr, len, Access::READ) };
    let pool = register(memory.addr() as *mut u8, MIB).expect("free");
    let at = |offset: usize| (pool.addr() + offset) as *mut u8;
    for (offset, len) in [(0, MIB), (0, 1), (100, 100), (MIB - 1, 1), (MIB - 1, 100)] {
        assert_eq!(kind(register(at(offset), len)), ErrorKind::Overlap, "{offset}+{len}");
    }
    assert_eq!(kind(register(at(0), 0)), ErrorKind::InvalidArgument);
    assert_eq!(kind(register(std::ptr::null_mut(), 16)), ErrorKind::InvalidArgument);
    assert_eq!(kind(register(usize::MAX as *mut u8, 16)), ErrorKind::InvalidArgument);
    assert_eq!(kind(agent.allocate(0, Access::READ)), ErrorKind::InvalidArgument);
    agent.unregister(&pool).expect("registered");
    assert_eq!(kind(agent.unregister(&pool)), ErrorKind::NotRegistered);
    // Unaligned ranges, and adjacent ones.
    let (left, right) = (register(at(3), 13), register(at(16), 1));
    let (left, right) = (left.expect("free"), right.expect("free"));
    assert_ne!(left.id(), right.id());
    assert_eq!(agent.region_at(pool.addr() + 3).map(|r| r.id()), Some(left.id()));
    assert!(agent.region_at(pool.addr() + 4).is_none());
    let holding = |offset, len| agent.region_holding(pool.addr() + offset, len).map(|r| r.id());
    assert_eq!(
        [holding(3, 13), holding(15, 1), holding(16, 0)],
        [Some(left.id()), Some(left.id()), Some(right.id())]
    );
    assert_eq!([holding(2, 1), holding(3, 14), holding(17, 1), holding(4, u64::MAX)], [None; 4]);
    // All or nothing.
    let ranges = [(at(100), 10), (at(200), 10), (at(205), 10)];
    // SAFETY: as above.
    let overlapping = unsafe { agent.register_batch(&ranges, Access::READ) };
    assert_eq!(kind(overlapping), ErrorKind::Overlap);
    assert_eq!(agent.stats().regions, 2);
    // All that can be unregistered are; the first error is returned.
    let gone = agent.unregister_batch(&[pool, left, right]);
    assert_eq!(kind(gone), ErrorKind::NotRegistered);
    assert_eq!(agent.stats().regions, 0);
}

#[test]
fn a_batch_holds_regions_of_one_incarnation_only() {
    let _bound = bounded();
    let (near, far, other) = (agent(), agent(), agent());
    let from = filled(&near, 4096, Access::NONE, 1);
    let a = far.allocate(4096, Access::WRITE).expect("memory").remote();
    let b = other.allocate(4096, Access::WRITE).expect("memory").remote();
    assert_eq!(RemoteRegion::from_bytes(&a.to_bytes()).expect("own bytes"), a);
    assert_eq!(kind(RemoteRegion::from_bytes(b"something else")), ErrorKind::InvalidArgument);
    let mut mixed = Batch::new();
    mixed.push(&from, 0, &a, 0, 64).expect("inside");
    assert_eq!(kind(mixed.push(&from, 0, &b, 0, 64)), ErrorKind::StaleIncarnation);
    assert_eq!((mixed.len(), mixed.bytes()), (1, 64));
    let mut wrong = Batch::new();
    wrong.push(&from, 0, &b, 0, 64).expect("inside");
    let peer = near.peer(far.advertised()).expect("an address");
    assert_eq!(kind(peer.write(&wrong, &Options::default())), ErrorKind::StaleIncarnation);
    let wrong = peer.write_async(&wrong, &Options::default());
    let outcome = wrong.wait(PATIENCE / 2).expect("refused at once");
    assert_eq!(kind(outcome), ErrorKind::StaleIncarnation);
    peer.write(&mixed, &Options::default()).expect("the right incarnation");
}

#[test]
fn a_batch_takes_raw_memory_and_addresses() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let to = far.allocate(8192, Access::READ_WRITE).expect("memory");
    let peer = near.peer(far.advertised()).expect("an address");
    let mut source = Pattern::new(3).bytes(5000);
    let mut moves = Batch::new();
    // SAFETY: `source` outlives the call that uses it, and is not touched meanwhile.
    unsafe { moves.push_raw(source.as_mut_ptr(), to.addr() as u64 + 11, 5000) }
        .expect("an address");
    peer.write(&moves, &Options::default()).expect("done");
    assert!(content(&to)[11..5011] == source);
    let mut target = vec![0u8; 5000];
    let mut moves = Batch::new();
    // SAFETY: as above, for `target`.
    unsafe { moves.push_raw(target.as_mut_ptr(), to.addr() as u64 + 11, 5000) }
        .expect("an address");
    peer.read(&moves, &Options::default()).expect("done");
    assert!(target == source);
    let local = filled(&near, 100, Access::NONE, 4);
    let mut moves = Batch::new();
    moves.push_to_address(&local, 10, to.addr() as u64, 90).expect("inside");
    peer.write(&moves, &Options::default()).expect("done");
    assert!(content(&to)[..90] == Pattern::new(4).bytes(100)[10..]);
}

#[test]
fn an_agent_can_be_its_own_peer() {
    let _bound = bounded();
    let agent = agent();
    let from = filled(&agent, MIB, Access::NONE, 1);
    let to = agent.allocate(MIB, Access::READ_WRITE).expect("memory");
    let peer = agent.peer(agent.advertised()).expect("an address");
    peer.write(&batch(&from, &to.remote(), 4096), &Options::default()).expect("done");
    assert!(content(&to) == Pattern::new(1).bytes(MIB));
}

#[test]
fn a_peer_reports_its_name_and_its_accessible_regions() {
    let _bound = bounded();
    let near = agent();
    let far = builder().name("far away").start().expect("an agent");
    let peer = near.peer(far.advertised()).expect("an address");
    assert_eq!(peer.transport(), None, "no call has connected yet");
    let summary = peer.connect(PATIENCE).expect("it is there");
    assert_eq!(summary.name, "far away");
    assert_eq!(summary.incarnation, Some(far.incarnation()));
    assert_eq!((summary.transport, summary.fallback), (TransportKind::LOCAL, None));
    assert!(!summary.authenticated);
    assert_eq!(peer.transport(), Some(TransportKind::LOCAL));
    let began = Instant::now();
    let took = peer.probe(PATIENCE).expect("it answers");
    assert!(took > Duration::ZERO && took <= began.elapsed(), "{took:?}");
    let wanted: Vec<_> =
        (0..3000).map(|_| far.allocate(64, Access::READ).expect("memory").remote()).collect();
    far.allocate(64, Access::NONE).expect("memory");
    let mut listed = peer.regions(PATIENCE).expect("it answers");
    listed.sort_by_key(|r| r.id);
    assert_eq!(listed, wanted, "all accessible regions, and no other");
    peer.disconnect();
    assert_eq!(peer.transport(), None);
    peer.connect(PATIENCE).expect("connected again");
    assert_eq!(kind(near.peer("no port here")), ErrorKind::InvalidArgument);
}

#[test]
fn calls_to_a_missing_or_mute_peer_fail() {
    let _bound = bounded();
    let near = agent();
    let from = filled(&near, 64, Access::NONE, 1);
    let closed = ClosedPort::new();
    let dead = agent().allocate(64, Access::WRITE).expect("memory").remote();
    let peer = near.peer(closed.address()).expect("an address");
    let moves = batch(&from, &dead, 64);
    for _ in 0..5 {
        assert_eq!(kind(peer.write(&moves, &Options::default())), ErrorKind::Unreachable);
        assert_eq!(kind(peer.connect(PATIENCE)), ErrorKind::Unreachable);
    }
    // The kernel accepts the connection, and no process answers.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = mute.local_addr().expect("bound").to_string();
    let peer = near.peer(&address).expect("an address");
    let timeout = Some(Duration::from_millis(300));
    let error = peer
        .write(&moves, &Options { timeout, ..Options::default() })
        .expect_err("the listener never answers");
    assert!([ErrorKind::Deadline, ErrorKind::PeerSilent].contains(&error.kind()), "{error:?}");
}

#[test]
fn calls_after_a_shutdown_fail_and_no_transfer_is_left() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let len = 32 * MIB;
    let from = filled(&near, len, Access::NONE, 1);
    let to = far.allocate(len, Access::WRITE).expect("memory");
    let peer = near.peer(far.advertised()).expect("an address");
    let moves = batch(&from, &to.remote(), 64 * KIB);
    peer.write(&moves, &Options::default()).expect("a healthy write");
    let running: Vec<_> = (0..8).map(|_| peer.write_async(&moves, &Options::default())).collect();
    let blocked = {
        let (peer, moves) = (peer.clone(), moves.clone());
        thread::spawn(move || peer.write(&moves, &Options::default()))
    };
    thread::sleep(Duration::from_millis(3));
    near.shutdown();
    near.shutdown();
    for transfer in running {
        let outcome = transfer.wait(PATIENCE).expect("every transfer ends");
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::Shutdown, "{error:?}");
        }
    }
    if let Err(error) = blocked.join().expect("no panic") {
        assert_eq!(error.kind(), ErrorKind::Shutdown, "{error:?}");
    }
    assert_eq!(kind(peer.write(&moves, &Options::default())), ErrorKind::Shutdown);
    let late = peer.write_async(&moves, &Options::default());
    assert_eq!(kind(late.wait(PATIENCE).expect("at once")), ErrorKind::Shutdown);
    assert_eq!(kind(near.allocate(64, Access::NONE)), ErrorKind::Shutdown);
    assert_eq!(kind(peer.connect(PATIENCE)), ErrorKind::Shutdown);
    assert_eq!(near.stats().transfers_in_flight, 0);
    // The peer notices the shutdown and ends the session.
    eventually("the peer ends the session", || {
        let stats = far.stats();
        stats.sessions == 0 && stats.requests_in_flight == 0
    });
    far.unregister(&to).expect("registered");
}

#[test]
fn a_shutdown_during_transfers_returns() {
    let _bound = bounded();
    let far = agent();
    let to = far.allocate(4096, Access::WRITE).expect("memory");
    for _ in 0..400 {
        let near = builder().io_threads(1).start().expect("an agent");
        let from = near.allocate(4096, Access::NONE).expect("memory");
        let peer = near.peer(far.advertised()).expect("an address");
        let moves = batch(&from, &to.remote(), 4096);
        peer.write(&moves, &Options::default()).expect("a healthy write");
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            // Calls wake the agent's threads all the time during the shutdown.
            let callers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        while !ended.load(Ordering::Relaxed) {
                            let transfer = peer.write_async(&moves, &Options::default());
                            let outcome = transfer.wait(PATIENCE / 2);
                            drop(outcome.expect("every transfer ends"));
                        }
                    })
                })
                .collect();
            thread::sleep(Duration::from_micros(300));
            let (done, stopped) = mpsc::channel();
            let stopping = near.clone();
            thread::spawn(move || {
                stopping.shutdown();
                let _ = done.send(());
            });
            let stopped = stopped.recv_timeout(PATIENCE / 2);
            ended.store(true, Ordering::Relaxed);
            stopped.expect("a shutdown ends");
            callers.into_iter().for_each(|c| c.join().expect("callers don't panic"));
        });
    }
}

#[test]
fn a_write_to_an_agent_that_shuts_down_reports_that_the_peer_is_gone() {
    let _bound = bounded();
    for transport in [TransportKind::LOCAL, TransportKind::TCP] {
        let start = || {
            let transports = Transports::only(transport);
            builder().transports(transports).start().expect("an agent")
        };
        let near = start();
        let from = near.allocate(MIB, Access::NONE).expect("memory");
        for round in 0..150 {
            let far = start();
            let to = far.allocate(MIB, Access::WRITE).expect("memory");
            let peer = near.peer(far.advertised()).expect("an address");
            let moves = batch(&from, &to.remote(), 512 << (round % 8));
            peer.write(&moves, &Options::default()).expect("a healthy write");
            thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        let error = loop {
                            if let Err(error) = peer.write(&moves, &Options::default()) {
                                break error;
                            }
                        };
                        // Not that the region was revoked or is unknown.
                        let gone =
                            [ErrorKind::PeerClosed, ErrorKind::PeerReset, ErrorKind::Unreachable];
                        assert!(gone.contains(&error.kind()), "{transport:?}: {error:?}");
                    });
                }
                thread::sleep(Duration::from_micros(100 * (round % 7)));
                far.shutdown();
            });
        }
    }
}

#[test]
fn an_agent_that_does_not_allow_tcp_takes_no_bytes_over_it() {
    let _bound = bounded();
    let start = |kind| builder().transports(Transports::only(kind)).start();
    let near = start(TransportKind::TCP).expect("an agent");
    let far = start(TransportKind::LOCAL).expect("an agent");
    let from = filled(&near, 4096, Access::NONE, 1);
    let to = filled(&far, 4096, Access::READ_WRITE, 2);
    let peer = near.peer(far.advertised()).expect("an address");
    let moves = batch(&from, &to.remote(), 4096);
    for refused in [peer.write(&moves, &Options::default()), peer.read(&moves, &Options::default())]
    {
        let e = refused.expect_err("the peer does not allow it");
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        assert!(e.to_string().contains("the peer does not allow tcp"), "{e}");
    }
    assert!(content(&to) == Pattern::new(2).bytes(4096));
}

#[test]
fn a_shutdown_ends_the_wait_for_a_notification_with_an_error() {
    let _bound = bounded();
    let (agent, other, sender) = (agent(), agent(), agent());
    let waiting = {
        let agent = agent.clone();
        thread::spawn(move || agent.wait_notification(Duration::MAX))
    };
    thread::sleep(Duration::from_millis(50));
    agent.shutdown();
    assert_eq!(kind(waiting.join().expect("no panic")), ErrorKind::Shutdown);
    // A later call fails at once.
    assert_eq!(kind(agent.wait_notification(Duration::MAX)), ErrorKind::Shutdown);
    // Notifications that arrived before can be taken.
    let peer = sender.peer(other.advertised()).expect("an address");
    peer.notify(Notification::new("last", ""), &Options::default()).expect("delivered");
    other.shutdown();
    let last = other.wait_notification(Duration::ZERO).expect("one is left");
    assert_eq!(last.expect("one is left").name, "last");
    assert_eq!(kind(other.wait_notification(Duration::ZERO)), ErrorKind::Shutdown);
}

#[test]
fn transports_are_parsed_from_names_and_aliases() {
    let _bound = bounded();
    for text in ["", "unknown", "tcp,unknown"] {
        assert_eq!(kind(Transports::parse(text)), ErrorKind::InvalidArgument, "{text:?}");
    }
    for text in ["tcp", "TCP", " tcp "] {
        let set = Transports::parse(text).expect("a name");
        assert_eq!(set, Transports::only(TransportKind::TCP), "{text:?}");
    }
    for text in ["native", "kvferry", "tcp,local"] {
        let set = Transports::parse(text).expect("an alias");
        let both = Transports::only(TransportKind::TCP).with(TransportKind::LOCAL);
        assert_eq!(set, both, "{text:?}");
    }
    let agent = Agent::builder().transports(Transports::only(TransportKind::TCP)).start();
    assert_eq!(agent.expect("an agent").transports().to_string(), "tcp");
}

/// A region of device memory whose copies wait until the device is released.
fn held_device(agent: &Agent, len: usize) -> (SlowMemory, Region) {
    let device = SlowMemory::new(Arc::new(Mapping::anonymous(len).expect("memory")), 0, len, 1);
    device.hold();
    let region = agent.register_device(device.memory(), Access::READ_WRITE);
    (device, region.expect("a region"))
}

/// A write to a region of `far` that waits for its device. One that ends before it reaches the device, because the silence
/// limit of `far` is short, is followed by another.
fn held_write(near: &Agent, far: &Agent, device: &SlowMemory, to: &Region) -> Transfer {
    let from = filled(near, to.len(), Access::NONE, 1);
    let peer = near.peer(far.advertised()).expect("an address");
    let moves = batch(&from, &to.remote(), to.len());
    let options = Options { timeout: Some(NEVER), ..Options::default() };
    let mut writing = peer.write_async(&moves, &options);
    eventually("a write waits for its device", || {
        let waits = device.pending() > 0;
        if !waits && writing.outcome().is_some() {
            writing = peer.write_async(&moves, &options);
        }
        waits
    });
    writing
}

/// Writes 4 KiB, three times, and checks them.
fn healthy_write(near: &Agent, far: &Agent, when: &str) {
    let from = filled(near, 4096, Access::NONE, 7);
    let to = far.allocate(4096, Access::READ_WRITE).expect("memory");
    let peer = near.peer(far.advertised()).expect("an address");
    let options = Options { timeout: Some(PATIENCE / 2), ..Options::default() };
    for _ in 0..3 {
        let writing = peer.write_async(&batch(&from, &to.remote(), 512), &options);
        let outcome = writing.wait(PATIENCE / 2).expect("it ends");
        outcome.unwrap_or_else(|e| panic!("a healthy write after {when}: {e:?}"));
    }
    assert!(content(&to) == Pattern::new(7).bytes(4096));
}

/// An agent with one thread for all streams: if the thread ends, every transfer fails.
fn one_thread_agent() -> Agent {
    let transports = Transports::only(TransportKind::TCP);
    builder().io_threads(1).transports(transports).start().expect("an agent starts")
}

#[test]
fn a_list_of_ranges_with_a_bad_one_leaves_the_batch_as_it_was() {
    let _bound = bounded();
    let near = agent();
    let local = near.allocate(4096, Access::NONE).expect("memory");
    let remote = near.allocate(4096, Access::WRITE).expect("memory").remote();
    let mut batch = Batch::new();
    let bad = [(0, 0, 64), (64, 64, 64), (4095, 0, 2)];
    let refused = batch.extend(&local, &remote, bad.into_iter()).expect_err("out of bounds");
    assert_eq!(refused.kind(), ErrorKind::OutOfBounds);
    assert_eq!((batch.len(), batch.bytes()), (0, 0));
    batch.extend(&local, &remote, bad[..2].iter().copied()).expect("within bounds");
    batch.extend(&local, &remote, bad.into_iter()).expect_err("out of bounds");
    assert_eq!((batch.len(), batch.bytes()), (2, 128));
}

#[test]
fn a_peer_finds_a_region_by_its_name_until_it_is_unregistered() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let [kv, hidden] =
        [Access::READ, Access::NONE].map(|access| far.allocate(4096, access).expect("memory"));
    far.name_region(&kv, "kv").expect("a free name");
    far.name_region(&hidden, "hidden").expect("a free name");
    let peer = near.peer(far.advertised()).expect("an address");
    assert_eq!(peer.region("kv", None).expect("it has the name"), kv.remote());
    assert_eq!((kv.name(), far.region("kv").map(|r| r.id())), (Some("kv"), Some(kv.id())));
    for unknown in ["hidden", "other", ""] {
        let e = peer.region(unknown, None).expect_err("no peer reaches such a region");
        assert_eq!(e.kind(), ErrorKind::NotRegistered, "{e}");
    }
    let refused = |region: &Region, name: &str| {
        far.name_region(region, name).expect_err("not to be had").kind()
    };
    let other = far.allocate(4096, Access::READ).expect("memory");
    assert_eq!(refused(&other, "kv"), ErrorKind::Overlap);
    assert_eq!(refused(&kv, "again"), ErrorKind::InvalidArgument);
    assert_eq!(refused(&other, ""), ErrorKind::InvalidArgument);
    assert_eq!(refused(&other, &"n".repeat(257)), ErrorKind::InvalidArgument);
    far.unregister(&kv).expect("registered");
    assert_eq!(refused(&kv, "late"), ErrorKind::NotRegistered);
    assert!(peer.region("kv", None).is_err());
    far.name_region(&other, "kv").expect("the name is free again");
    assert_eq!(peer.region("kv", None).expect("it has the name"), other.remote());
}
