//! The agent as a program uses it: in one process, over loopback.

use kvferry::{
    Access, Agent, Batch, Error, ErrorKind, Moved, Notification, Options, Region, RemoteRegion,
    Transfer, TransportKind, Transports,
};
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{Watchdog, stretched};
use std::os::fd::BorrowedFd;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

fn bounded() -> Watchdog {
    Watchdog::new(Duration::from_secs(60))
}

fn agent() -> Agent {
    Agent::builder().start().expect("an agent starts")
}

fn filled(agent: &Agent, len: usize, access: Access, seed: u64) -> Region {
    let region = agent.allocate(len, access).expect("memory");
    region.write_at(0, &Pattern::new(seed).bytes(len)).expect("owned memory");
    region
}

fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_at(0, &mut bytes).expect("owned memory");
    bytes
}

fn batch(local: &Region, remote: &RemoteRegion, block: usize) -> Batch {
    let len = local.len().min(remote.len as usize);
    let mut batch = Batch::with_capacity(len / block);
    for at in (0..len / block).map(|i| (i * block) as u64) {
        batch.push(local, at, remote, at, block as u64).expect("inside both");
    }
    batch
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

/// The smallest executor there is.
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

/// Ends when all of them have.
struct All(Vec<(Transfer, Option<Result<Moved, Error>>)>);

impl Future for All {
    type Output = Vec<Result<Moved, Error>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        for (transfer, outcome) in &mut self.0 {
            if outcome.is_none()
                && let Poll::Ready(ended) = Pin::new(transfer).poll(context)
            {
                *outcome = Some(ended);
            }
        }
        if self.0.iter().any(|(_, outcome)| outcome.is_none()) {
            return Poll::Pending;
        }
        Poll::Ready(self.0.drain(..).filter_map(|(_, outcome)| outcome).collect())
    }
}

fn readable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    use kvferry_sys::poll::{Interest, wait_one};
    wait_one(fd, Interest::Read, Some(timeout)).expect("poll").read
}

#[test]
fn ten_callers_with_five_hundred_blocks_each_all_succeed() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let block = 32 * KIB;
    let len = 500 * block;
    let peer = near.peer(far.advertised()).expect("an address");
    let pairs: Vec<_> = (0..10)
        .map(|seed| {
            let to = far.allocate(len, Access::READ_WRITE).expect("memory");
            (filled(&near, len, Access::NONE, seed), to)
        })
        .collect();
    thread::scope(|scope| {
        for (from, to) in &pairs {
            let peer = &peer;
            scope.spawn(move || {
                let moves = batch(from, &to.remote(), block);
                for _ in 0..4 {
                    let moved = peer.write(&moves, &Options::default()).expect("no call fails");
                    assert_eq!((moved.bytes, moved.descriptors), (len as u64, 500));
                }
            });
        }
    });
    for (seed, (_, to)) in (0..).zip(&pairs) {
        assert!(content(to) == Pattern::new(seed).bytes(len), "the blocks of caller {seed}");
    }
}

#[test]
fn seventy_thousand_descriptors_are_a_normal_batch() {
    let _bound = bounded();
    for (names, kind) in [("tcp", TransportKind::Tcp), ("tcp,local", TransportKind::Local)] {
        let transports = Transports::parse(names).expect("names");
        let start = || Agent::builder().transports(transports).start().expect("an agent starts");
        let (near, far) = (start(), start());
        let len = 70_000 * 512;
        let from = filled(&near, len, Access::NONE, 1);
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        let peer = near.peer(far.advertised()).expect("an address");
        let note = Notification::new("all of them", "");
        let options = Options { notify: Some(note), ..Options::default() };
        let moved = peer.write(&batch(&from, &to.remote(), 512), &options).expect("done");
        assert_eq!(moved.descriptors, 70_000);
        assert_eq!(moved.transport, Some(kind));
        assert!(content(&to) == Pattern::new(1).bytes(len));
        // More than one message for it, still one notification, and after all of the data.
        let note = far.wait_notification(Duration::from_secs(5)).expect("it was sent");
        assert_eq!((note.name.as_str(), note.from.as_str()), ("all of them", near.name()));
        assert!(far.notifications().is_empty());
    }
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
        |to: &Region| peer.write_async(batch(&from, &to.remote(), 4096), Options::default());
    let outcomes = block_on(All(to.iter().map(|to| (start(to), None)).collect()));
    assert_eq!(outcomes.len(), count);
    for (outcome, to) in outcomes.into_iter().zip(&to) {
        assert_eq!(outcome.expect("done").bytes, len as u64);
        assert!(content(to) == Pattern::new(1).bytes(len));
    }
    // One that failed, one that has ended long ago, and one that is asked by somebody else too.
    let outside = RemoteRegion { len: u64::MAX, ..to[0].remote() };
    let mut refused = Batch::new();
    refused.push(&from, 0, &outside, len as u64, 16).expect("a forgery fits itself");
    let refused = peer.write_async(refused, Options::default());
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
fn a_dropped_future_is_no_cancel() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let len = 8 * MIB;
    let (from, to) = (filled(&near, len, Access::NONE, 1), far.allocate(len, Access::WRITE));
    let to = to.expect("memory");
    let peer = near.peer(far.advertised()).expect("an address");
    let options = Options { notify: Some(Notification::new("there", "")), ..Options::default() };
    let mut transfer = peer.write_async(batch(&from, &to.remote(), 4096), options);
    let waker = Arc::new(Unpark(thread::current())).into();
    drop(Pin::new(&mut transfer).poll(&mut Context::from_waker(&waker)));
    drop(transfer);
    far.wait_notification(Duration::from_secs(20)).expect("the transfer went on");
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
        assert!(readable(fd, Duration::from_secs(5)), "five are queued");
        let got: Vec<_> = far.notifications().into_iter().map(|n| n.message).collect();
        assert_eq!(got, [[0], [1], [2], [3], [4]]);
        assert!(!readable(fd, Duration::from_millis(20)), "none is queued any more");
    }
    let waited = Instant::now();
    assert!(far.wait_notification(Duration::from_millis(50)).is_none());
    assert!(waited.elapsed() >= Duration::from_millis(49));
}

#[test]
fn ten_thousand_regions_are_registered_in_no_time() {
    let _bound = bounded();
    let agent = agent();
    let pool = agent.allocate(10_000 * 64, Access::NONE).expect("memory");
    agent.unregister(&pool).expect("registered");
    let ranges: Vec<_> = (0..10_000).map(|i| ((pool.addr() + i * 64) as *mut u8, 64)).collect();
    let began = Instant::now();
    // SAFETY: the ranges are parts of a pool that lives until the end of this test, and nobody
    // holds a reference to its bytes.
    let regions = unsafe { agent.register_batch(&ranges, Access::READ_WRITE) };
    let regions = regions.expect("nothing overlaps");
    let together = began.elapsed();
    assert_eq!(agent.stats().regions, 10_000);
    let began = Instant::now();
    agent.unregister_batch(&regions).expect("all were registered");
    let away = began.elapsed();
    assert_eq!(agent.stats().regions, 0);
    let began = Instant::now();
    for (addr, len) in ranges {
        // SAFETY: as above.
        unsafe { agent.register(addr, len, Access::READ) }.expect("nothing overlaps");
    }
    let one_by_one = began.elapsed();
    // 20 ms with the factor of three, and without optimisation.
    let allowed = Duration::from_millis(60) * if cfg!(debug_assertions) { 3 } else { 1 };
    for (what, took) in [("together", together), ("one by one", one_by_one), ("and away", away)] {
        assert!(took < stretched(allowed), "10 000 regions {what} took {took:?}");
    }
}

#[test]
fn every_odd_registration_is_defined() {
    let _bound = bounded();
    let agent = agent();
    let pool = agent.allocate(MIB, Access::NONE).expect("memory");
    let at = |offset: usize| (pool.addr() + offset) as *mut u8;
    // SAFETY: inside a pool that outlives the agent's use of it; refused ones are never used.
    let register = |addr, len| unsafe { agent.register(addr, len, Access::READ) };
    for (offset, len) in [(0, MIB), (0, 1), (100, 100), (MIB - 1, 1), (MIB - 1, 100)] {
        assert_eq!(kind(register(at(offset), len)), ErrorKind::Overlap, "{offset}+{len}");
    }
    assert_eq!(kind(register(at(0), 0)), ErrorKind::InvalidArgument);
    assert_eq!(kind(register(std::ptr::null_mut(), 16)), ErrorKind::InvalidArgument);
    assert_eq!(kind(register(usize::MAX as *mut u8, 16)), ErrorKind::InvalidArgument);
    assert_eq!(kind(agent.allocate(0, Access::READ)), ErrorKind::InvalidArgument);
    agent.unregister(&pool).expect("registered");
    assert_eq!(kind(agent.unregister(&pool)), ErrorKind::NotRegistered);
    // Unaligned, and neighbours.
    let (left, right) = (register(at(3), 13), register(at(16), 1));
    let (left, right) = (left.expect("free"), right.expect("free"));
    assert_ne!(left.id(), right.id());
    assert_eq!(agent.region_at(pool.addr() + 3).map(|r| r.id()), Some(left.id()));
    assert!(agent.region_at(pool.addr() + 4).is_none());
    // All or nothing.
    let ranges = [(at(100), 10), (at(200), 10), (at(205), 10)];
    // SAFETY: as above.
    let overlapping = unsafe { agent.register_batch(&ranges, Access::READ) };
    assert_eq!(kind(overlapping), ErrorKind::Overlap);
    assert_eq!(agent.stats().regions, 2);
    // The first error, after all that could be done was done.
    let gone = agent.unregister_batch(&[pool, left, right]);
    assert_eq!(kind(gone), ErrorKind::NotRegistered);
    assert_eq!(agent.stats().regions, 0);
}

#[test]
fn a_batch_names_one_life_of_a_peer() {
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
    let wrong = peer.write_async(wrong, Options::default());
    let outcome = wrong.wait(Duration::from_secs(5)).expect("refused at once");
    assert_eq!(kind(outcome), ErrorKind::StaleIncarnation);
    peer.write(&mixed, &Options::default()).expect("the right life");
}

#[test]
fn raw_memory_and_addresses_will_do() {
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
fn a_peer_tells_who_it_is_and_what_it_lets_us_reach() {
    let _bound = bounded();
    let near = agent();
    let far = Agent::builder().name("far away").start().expect("an agent");
    let peer = near.peer(far.advertised()).expect("an address");
    assert_eq!(peer.transport(), None, "nothing happens before it is asked for");
    let summary = peer.connect(Duration::from_secs(5)).expect("it is there");
    assert_eq!(summary.name, "far away");
    assert_eq!(summary.incarnation, Some(far.incarnation()));
    assert_eq!((summary.transport, summary.fallback), (TransportKind::Local, None));
    assert!(!summary.authenticated);
    assert_eq!(peer.transport(), Some(TransportKind::Local));
    assert!(peer.probe(Duration::from_secs(5)).expect("it answers") < Duration::from_secs(1));
    let wanted: Vec<_> =
        (0..3000).map(|_| far.allocate(64, Access::READ).expect("memory").remote()).collect();
    far.allocate(64, Access::NONE).expect("memory");
    let mut told = peer.regions(Duration::from_secs(5)).expect("it answers");
    told.sort_by_key(|r| r.id);
    assert_eq!(told, wanted, "all that is ours to reach, and nothing else");
    peer.disconnect();
    assert_eq!(peer.transport(), None);
    peer.connect(Duration::from_secs(5)).expect("met again");
    assert_eq!(kind(near.peer("no port here")), ErrorKind::InvalidArgument);
}

#[test]
fn nobody_there_is_an_error_in_time() {
    let _bound = bounded();
    let near = agent();
    let from = filled(&near, 64, Access::NONE, 1);
    let dead = {
        let far = agent();
        (far.advertised().to_owned(), far.allocate(64, Access::WRITE).expect("memory").remote())
    };
    let peer = near.peer(&dead.0).expect("an address");
    let moves = batch(&from, &dead.1, 64);
    for _ in 0..5 {
        let began = Instant::now();
        assert_eq!(kind(peer.write(&moves, &Options::default())), ErrorKind::Unreachable);
        assert_eq!(kind(peer.connect(Duration::from_secs(5))), ErrorKind::Unreachable);
        assert!(began.elapsed() < stretched(Duration::from_millis(300)), "{:?}", began.elapsed());
    }
    // Connected by the kernel, and never answered.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = mute.local_addr().expect("bound").to_string();
    let peer = near.peer(&address).expect("an address");
    let began = Instant::now();
    let timeout = Some(Duration::from_millis(300));
    let error = peer
        .write(&moves, &Options { timeout, ..Options::default() })
        .expect_err("it says nothing");
    assert!([ErrorKind::Deadline, ErrorKind::PeerSilent].contains(&error.kind()), "{error:?}");
    assert!(began.elapsed() < stretched(Duration::from_millis(900)), "{:?}", began.elapsed());
}

#[test]
fn after_a_shutdown_everything_says_so_and_nothing_is_left() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let len = 32 * MIB;
    let from = filled(&near, len, Access::NONE, 1);
    let to = far.allocate(len, Access::WRITE).expect("memory");
    let peer = near.peer(far.advertised()).expect("an address");
    let moves = batch(&from, &to.remote(), 64 * KIB);
    peer.write(&moves, &Options::default()).expect("a healthy write");
    let running: Vec<_> =
        (0..8).map(|_| peer.write_async(moves.clone(), Options::default())).collect();
    let blocked = {
        let (peer, moves) = (peer.clone(), moves.clone());
        thread::spawn(move || peer.write(&moves, &Options::default()))
    };
    thread::sleep(Duration::from_millis(3));
    let began = Instant::now();
    near.shutdown();
    near.shutdown();
    for transfer in running {
        let outcome = transfer.wait(Duration::from_secs(5)).expect("every transfer ends");
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::Shutdown, "{error:?}");
        }
    }
    if let Err(error) = blocked.join().expect("no panic") {
        assert_eq!(error.kind(), ErrorKind::Shutdown, "{error:?}");
    }
    assert!(
        began.elapsed() < stretched(Duration::from_secs(3)),
        "shutting down took {:?}",
        began.elapsed()
    );
    assert_eq!(kind(peer.write(&moves, &Options::default())), ErrorKind::Shutdown);
    let late = peer.write_async(moves.clone(), Options::default());
    assert_eq!(kind(late.wait(Duration::from_secs(1)).expect("at once")), ErrorKind::Shutdown);
    assert_eq!(kind(near.allocate(64, Access::NONE)), ErrorKind::Shutdown);
    assert_eq!(kind(peer.connect(Duration::from_secs(1))), ErrorKind::Shutdown);
    assert_eq!(near.stats().transfers_in_flight, 0);
    // The other side is told, and goes on with its life.
    let give_up = Instant::now() + Duration::from_secs(3);
    while far.stats().sessions > 0 || far.stats().requests_in_flight > 0 {
        assert!(Instant::now() < give_up, "{:?}", far.stats());
        thread::sleep(Duration::from_millis(2));
    }
    far.unregister(&to).expect("registered");
}

#[test]
fn a_shutdown_in_the_middle_of_work_ends() {
    let _bound = bounded();
    let far = agent();
    let to = far.allocate(4096, Access::WRITE).expect("memory");
    for _ in 0..400 {
        let near = Agent::builder().io_threads(1).start().expect("an agent");
        let from = near.allocate(4096, Access::NONE).expect("memory");
        let peer = near.peer(far.advertised()).expect("an address");
        let moves = batch(&from, &to.remote(), 4096);
        peer.write(&moves, &Options::default()).expect("a healthy write");
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            // The agent's threads are woken all the time while they are told to end.
            let callers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        while !ended.load(Ordering::Relaxed) {
                            let transfer = peer.write_async(moves.clone(), Options::default());
                            let outcome = transfer.wait(Duration::from_secs(10));
                            drop(outcome.expect("every transfer ends"));
                        }
                    })
                })
                .collect();
            thread::sleep(Duration::from_micros(300));
            let (tell, told) = mpsc::channel();
            let stopping = near.clone();
            thread::spawn(move || {
                stopping.shutdown();
                let _ = tell.send(());
            });
            let stopped = told.recv_timeout(Duration::from_secs(10));
            ended.store(true, Ordering::Relaxed);
            stopped.expect("a shutdown ends");
            callers.into_iter().for_each(|c| c.join().expect("callers don't panic"));
        });
    }
}

#[test]
fn whoever_writes_to_an_agent_that_is_shut_down_hears_that_it_is_gone() {
    let _bound = bounded();
    for transport in [TransportKind::Local, TransportKind::Tcp] {
        let start = || {
            let transports = Transports::only(transport);
            Agent::builder().transports(transports).start().expect("an agent")
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
                        // Never that the region was revoked, or is none: nobody did that.
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
fn a_shutdown_ends_the_wait_for_a_notification() {
    let _bound = bounded();
    let agent = agent();
    let waiting = {
        let agent = agent.clone();
        thread::spawn(move || agent.wait_notification(Duration::from_secs(20)))
    };
    thread::sleep(Duration::from_millis(50));
    let began = Instant::now();
    agent.shutdown();
    assert!(waiting.join().expect("no panic").is_none());
    assert!(began.elapsed() < stretched(Duration::from_secs(1)), "it took {:?}", began.elapsed());
}

#[test]
fn transports_are_what_was_asked_for() {
    let _bound = bounded();
    for text in ["", "carrier-pigeon", "tcp,pigeon"] {
        assert_eq!(kind(Transports::parse(text)), ErrorKind::InvalidArgument, "{text:?}");
    }
    for text in ["tcp", "TCP", " tcp "] {
        let set = Transports::parse(text).expect("a name");
        assert_eq!(set, Transports::only(TransportKind::Tcp), "{text:?}");
    }
    for text in ["native", "kvferry", "tcp,local"] {
        let set = Transports::parse(text).expect("an alias");
        let both = Transports::only(TransportKind::Tcp).with(TransportKind::Local);
        assert_eq!(set, both, "{text:?}");
    }
    let agent = Agent::builder().transports(Transports::only(TransportKind::Tcp)).start();
    assert_eq!(agent.expect("an agent").transports().to_string(), "tcp");
}
