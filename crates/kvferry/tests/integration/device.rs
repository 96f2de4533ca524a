//! Device memory: how often a device is called, what it waits for, how its stages are shared.

mod lost;

use kvferry::{
    Access, After, Agent, Batch, Device, Error, ErrorKind, Options, Peer, Region, Transfer,
    TransportKind, Transports,
};
use kvferry_sys::map::Mapping;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::slow::SlowMemory;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const PIECE: usize = 64;

/// A loaded machine delays heartbeats: an agent whose silence no test is about waits for long.
fn agent(kind: TransportKind) -> Agent {
    impatient(kind, PATIENCE / 5)
}

fn impatient(kind: TransportKind, silence: Duration) -> Agent {
    let transports = Transports::only(TransportKind::TCP).with(kind);
    Agent::builder().transports(transports).silence(silence).start().expect("an agent starts")
}

/// A device, and its memory as the test sees it.
struct TestDevice {
    slow: SlowMemory,
    mapping: Arc<Mapping>,
}

impl TestDevice {
    fn new(len: usize, seed: u64) -> Self {
        Self::made(len, seed, |mapping| SlowMemory::new(mapping, 0, len, seed))
    }

    fn with_stages(len: usize, seed: u64, stages: usize) -> Self {
        Self::made(len, seed, |mapping| SlowMemory::with_stages(mapping, 0, len, seed, stages))
    }

    fn made(len: usize, seed: u64, slow: impl FnOnce(Arc<Mapping>) -> SlowMemory) -> Self {
        let mapping = Arc::new(Mapping::anonymous(len).expect("memory"));
        mapping.span(0, len).copy_from(&Pattern::new(seed).bytes(len));
        Self { slow: slow(Arc::clone(&mapping)), mapping }
    }

    fn register(&self, agent: &Agent) -> Region {
        agent.register_device(self.slow.memory(), Access::READ_WRITE).expect("a region")
    }

    /// Waits until no copy and no transfer has a stage; then, nothing may have been misused.
    fn comes_to_rest(&self) {
        let stages = self.slow.stages();
        eventually("the stages are free", || stages.free() == stages.stages());
        assert_eq!(self.slow.misuse(), Vec::<String>::new());
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mapping.span(at, len).copy_to(&mut bytes);
        bytes
    }
}

fn options() -> Options<'static> {
    Options { timeout: Some(PATIENCE), ..Options::default() }
}

fn peer_of(near: &Agent, far: &Agent) -> Peer {
    near.peer(far.advertised()).expect("an address")
}

fn ended(transfer: &Transfer) -> Result<(), Error> {
    transfer.wait(PATIENCE).expect("it ends").map(drop)
}

/// Pairs of pieces, each at twice its place, so that no two of them touch.
fn scattered(local: &Region, remote: &Region, count: usize) -> Batch {
    let mut batch = Batch::new();
    batch.set_after(After::host());
    let remote = remote.remote();
    for at in (0..count).map(|i| (2 * i * PIECE) as u64) {
        batch.push(local, at, &remote, at, PIECE as u64).expect("inside");
    }
    batch
}

#[test]
fn many_pieces_cost_a_device_one_call_for_each_batch_of_them() {
    let _bound = Watchdog::new(PATIENCE);
    const COUNT: usize = 1000;
    let len = 2 * COUNT * PIECE;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let peer = peer_of(&near, &far);
        let (ours, theirs) = (TestDevice::new(len, 1), TestDevice::new(len, 2));
        let batch = scattered(&ours.register(&near), &theirs.register(&far), COUNT);
        let calls = COUNT.div_ceil(ours.slow.pieces_max());
        peer.write(&batch, &options()).expect("written");
        assert!((0..COUNT).all(|i| {
            let at = 2 * i * PIECE;
            theirs.bytes(at, PIECE) == ours.bytes(at, PIECE)
        }));
        assert_eq!(ours.slow.started(), (calls, COUNT), "{kind}");
        let far_calls = theirs.slow.started();
        assert_eq!(far_calls.1, COUNT, "{kind}");
        assert!(kind == TransportKind::LOCAL || far_calls.0 == calls, "{kind}: {far_calls:?}");
        peer.read(&batch, &options()).expect("read");
        assert_eq!(ours.slow.started(), (2 * calls, 2 * COUNT), "{kind}");
    }
}

#[test]
fn one_call_takes_pieces_of_all_regions_of_a_device() {
    let _bound = Watchdog::new(PATIENCE);
    const COUNT: usize = 100;
    let len = 4 * COUNT * PIECE;
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let device = TestDevice::new(len, 3);
    let half = len / 2;
    let layers = [0, half].map(|at| {
        near.register_device(device.slow.part(at, half), Access::NONE).expect("a region")
    });
    let to = far.allocate(len, Access::READ_WRITE).expect("memory");
    let mut batch = Batch::new();
    batch.set_after(After::host());
    for i in 0..COUNT {
        let (layer, at) = (i % 2, (2 * i * PIECE) as u64);
        batch.push(&layers[layer], at, &to.remote(), at, PIECE as u64).expect("inside");
    }
    peer_of(&near, &far).write(&batch, &options()).expect("written");
    assert_eq!(device.slow.started(), (1, COUNT));
    let mut bytes = vec![0; PIECE];
    for i in 0..COUNT {
        to.read_at(2 * i * PIECE, &mut bytes).expect("inside");
        assert!(bytes == device.bytes((i % 2) * half + 2 * i * PIECE, PIECE), "piece {i}");
    }
}

#[test]
fn a_transfer_touches_memory_of_its_device_only_after_its_edges() {
    let _bound = Watchdog::new(PATIENCE);
    let len = 2 * 100 * PIECE;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let peer = peer_of(&near, &far);
        let (ours, theirs) = (TestDevice::new(len, 1), TestDevice::new(len, 2));
        let mut batch = scattered(&ours.register(&near), &theirs.register(&far), 100);
        for write in [true, false] {
            let (edge, after) = SlowMemory::edge();
            batch.set_after(after);
            let transfer = match write {
                true => peer.write_async(&batch, &options()),
                false => peer.read_async(&batch, &options()),
            };
            eventually("the transfer waits", || ours.slow.waiting() > 0);
            assert!(transfer.outcome().is_none(), "{kind}, write: {write}");
            let stages = ours.slow.stages();
            assert_eq!((ours.slow.pending(), stages.free()), (0, stages.stages()));
            // The work that the edge stands for.
            let fresh = Pattern::new(if write { 5 } else { 6 }).bytes(len);
            ours.mapping.span(0, len).copy_from(&fresh);
            edge.happen();
            ended(&transfer).expect("done");
            let (from, to) = if write { (&ours, &theirs) } else { (&theirs, &ours) };
            for at in (0..100).map(|i| 2 * i * PIECE) {
                assert!(from.bytes(at, PIECE) == to.bytes(at, PIECE), "{kind}, write: {write}");
            }
            assert!(!write || theirs.bytes(0, PIECE) == fresh[..PIECE], "the bytes of its kernel");
        }
    }
}

#[test]
fn an_edge_that_a_device_does_not_know_fails_the_transfer() {
    let _bound = Watchdog::new(PATIENCE);
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let ours = TestDevice::new(4096, 1);
    let to = far.allocate(4096, Access::READ_WRITE).expect("memory");
    let mut batch = scattered(&ours.register(&near), &to, 8);
    batch.set_after(After::all([Arc::new("an event of another maker") as Arc<_>]));
    let error = peer_of(&near, &far).write(&batch, &options()).expect_err("it can't wait for that");
    let source = std::error::Error::source(&error).expect("the device's error").to_string();
    assert_eq!(source, "an edge of another kind of device");
}

/// What ends a transfer that waits for its edge.
#[derive(Clone, Copy, Debug)]
enum End {
    Cancel,
    Deadline,
    Unregister,
}

#[test]
fn a_transfer_that_waits_for_its_edge_keeps_nothing_from_its_owner() {
    let _bound = Watchdog::new(PATIENCE);
    let len = 4096;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let peer = peer_of(&near, &far);
        let ours = TestDevice::new(len, 1);
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        for end in [End::Cancel, End::Deadline, End::Unregister] {
            for write in [true, false] {
                let what = format!("{kind}, {end:?}, write: {write}");
                let region = ours.register(&near);
                let mut batch = scattered(&region, &to, 8);
                let (edge, after) = SlowMemory::edge();
                batch.set_after(after);
                let brief = Some(Duration::from_millis(200));
                let timeout = if matches!(end, End::Deadline) { brief } else { Some(PATIENCE) };
                let options = Options { timeout, ..options() };
                let transfer = match write {
                    true => peer.write_async(&batch, &options),
                    false => peer.read_async(&batch, &options),
                };
                eventually("the transfer waits, or has waited", || {
                    ours.slow.waiting() > 0 || transfer.outcome().is_some()
                });
                match end {
                    End::Cancel => transfer.cancel(),
                    End::Deadline => {}
                    End::Unregister => {
                        near.unregister(&region).expect("no copy has begun");
                        edge.happen();
                    }
                }
                let error = ended(&transfer).expect_err(&what);
                let wanted = match end {
                    End::Cancel => ErrorKind::Cancelled,
                    End::Deadline => ErrorKind::Deadline,
                    End::Unregister => ErrorKind::Revoked,
                };
                assert_eq!((error.kind(), error.quiesced()), (wanted, Some(true)), "{what}");
                let names = error.to_string().contains("it still waited for slow edge 1; look at");
                assert_eq!(names, matches!(end, End::Deadline), "{what}: {error}");
                if region.is_registered() {
                    near.unregister(&region).expect("nothing copies");
                }
                eventually("nothing waits", || ours.slow.waiting() == 0);
                assert_eq!(ours.slow.started(), (0, 0), "{what}");
                ours.comes_to_rest();
            }
        }
    }
}

#[test]
fn i6_a_call_whose_edges_have_happened_ends_in_time_while_it_connects() {
    let _bound = Watchdog::new(PATIENCE);
    let near = Agent::builder().silence(PATIENCE).start().expect("an agent starts");
    // It accepts connections and never says a word.
    let mute = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let far = agent(TransportKind::TCP);
    let ours = TestDevice::new(4096, 1);
    let to = far.allocate(4096, Access::READ_WRITE).expect("memory");
    let mut batch = scattered(&ours.register(&near), &to, 8);
    let at = mute.local_addr().expect("an address").to_string();
    let peer = near.peer(&at).expect("an address");
    for interrupts in [false, true] {
        let (edge, after) = SlowMemory::edge();
        batch.set_after(after);
        edge.happen();
        let stop = || true;
        let interrupt = interrupts.then_some(&stop as &(dyn Fn() -> bool + Sync));
        let timeout = if interrupts { PATIENCE } else { Duration::from_millis(200) };
        let options = Options { timeout: Some(timeout), interrupt, ..Options::default() };
        let wanted = if interrupts { ErrorKind::Interrupted } else { ErrorKind::Deadline };
        assert_eq!(peer.write(&batch, &options).expect_err("nobody answers").kind(), wanted);
    }
}

#[test]
fn a_transfer_goes_on_while_more_than_the_stages_wait_for_the_edge_that_comes_after_it() {
    let _bound = Watchdog::new(PATIENCE);
    let part = 1 << 20;
    let count = 16;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let peer = peer_of(&near, &far);
        let ours = TestDevice::new(count * part, 1);
        assert!(ours.slow.stages().stages() < count);
        let (from, to) =
            (ours.register(&near), far.allocate(count * part, Access::READ_WRITE).expect("memory"));
        let (edge, after) = SlowMemory::edge();
        let batch = |i: usize| {
            let mut batch = Batch::new();
            batch.set_after(After::host());
            let (at, len) = ((i * part) as u64, part as u64);
            batch.push(&from, at, &to.remote(), at, len).expect("inside");
            batch
        };
        let saves: Vec<_> = (1..count)
            .map(|i| {
                let mut save = batch(i);
                save.set_after(after.clone());
                peer.write_async(&save, &options())
            })
            .collect();
        eventually("the first of them wait", || ours.slow.waiting() > 0);
        // A load that the kernel needs before it runs, after which the saves may begin.
        ended(&peer.read_async(&batch(0), &options())).expect("it needs nothing of the saves");
        edge.happen();
        saves.iter().for_each(|save| ended(save).expect("written"));
        ours.comes_to_rest();
    }
}

#[test]
fn a_batch_under_way_is_waited_for_by_what_ends_its_transfer() {
    let _bound = Watchdog::new(PATIENCE);
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let ours = TestDevice::new(4096, 1);
    let region = ours.register(&near);
    let to = far.allocate(4096, Access::READ_WRITE).expect("memory");
    ours.slow.hold();
    let peer = peer_of(&near, &far);
    let transfer = peer.write_async(&scattered(&region, &to, 8), &options());
    eventually("the device has the batch", || ours.slow.pending() > 0);
    transfer.cancel();
    std::thread::scope(|scope| {
        let unregister = scope.spawn(|| {
            near.unregister(&region).expect("the device goes on");
            assert_eq!(ours.slow.pending(), 0, "it copies while the memory is given back");
        });
        eventually("the region is taken out", || near.stats().regions == 0);
        assert!(transfer.outcome().is_none(), "the device may still read the memory");
        ours.slow.release();
        unregister.join().expect("no panic");
    });
    let error = ended(&transfer).expect_err("cancelled");
    assert_eq!((error.kind(), error.quiesced()), (ErrorKind::Cancelled, Some(true)));
    ours.slow.free();
    ours.comes_to_rest();
}

#[test]
fn a_device_that_fails_in_the_middle_of_a_batch_fails_its_transfer_and_no_other() {
    let _bound = Watchdog::new(PATIENCE);
    const COUNT: usize = 500;
    let len = 2 * COUNT * PIECE;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let peer = peer_of(&near, &far);
        let ours = TestDevice::new(len, 1);
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        let batch = scattered(&ours.register(&near), &to, COUNT);
        for write in [true, false] {
            let run = || match write {
                true => peer.write(&batch, &options()),
                false => peer.read(&batch, &options()),
            };
            ours.slow.fail_next(1);
            let error = run().expect_err("a batch failed");
            assert_eq!(error.kind(), ErrorKind::Internal, "{kind}: {error}");
            let source = std::error::Error::source(&error).expect("the device's error");
            assert_eq!(source.to_string(), "the device failed this copy on purpose", "{kind}");
            run().expect("the next one is as it should be");
            ours.comes_to_rest();
        }
    }
}

#[test]
fn a_transfer_of_device_memory_is_refused_until_it_names_what_it_comes_after() {
    let _bound = Watchdog::new(PATIENCE);
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let peer = peer_of(&near, &far);
        let (ours, theirs) = (TestDevice::new(4096, 1), TestDevice::new(4096, 2));
        let (from, to) = (ours.register(&near), theirs.register(&far));
        let calls = |batch: &Batch| {
            [
                peer.write(batch, &options()).map(drop),
                peer.read(batch, &options()).map(drop),
                ended(&peer.write_async(batch, &options())),
                ended(&peer.read_async(batch, &options())),
            ]
        };
        let mut batch = Batch::new();
        batch.push(&from, 0, &to.remote(), 0, 4096).expect("inside");
        for unnamed in [After::default(), After::all([])] {
            batch.set_after(unnamed);
            for outcome in calls(&batch) {
                let error = outcome.expect_err("it names nothing");
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{kind}: {error}");
                let text = error.to_string();
                assert!(text.contains("say what the transfer comes after"), "{text}");
                assert!(text.contains("After::host()"), "{text}");
            }
        }
        assert_eq!((ours.slow.started(), theirs.slow.started()), ((0, 0), (0, 0)));
        batch.set_after(After::host());
        calls(&batch).into_iter().for_each(|outcome| outcome.expect("the caller has waited"));
        // The peer's device is not this side's matter.
        let host = near.allocate(4096, Access::NONE).expect("memory");
        batch.clear();
        batch.push(&host, 0, &to.remote(), 0, 4096).expect("inside");
        calls(&batch).into_iter().for_each(|outcome| outcome.expect("host memory has no order"));
        batch.push(&from, 0, &to.remote(), 0, 64).expect("inside");
        let [refused, ..] = calls(&batch);
        assert_eq!(refused.expect_err("cleared").kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn a_batch_without_pieces_does_not_reach_a_device() {
    let _bound = Watchdog::new(PATIENCE);
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let mut batch = Batch::new();
    batch.set_after(SlowMemory::edge().1);
    peer_of(&near, &far).write(&batch, &options()).expect("nothing to do");
}

#[test]
fn a_list_of_ranges_with_a_bad_one_leaves_no_device_in_the_batch() {
    let near = agent(TransportKind::TCP);
    let (device, host) = (TestDevice::new(4096, 1), near.allocate(4096, Access::WRITE).unwrap());
    let ours = device.register(&near);
    let mut batch = Batch::new();
    batch.push(&host, 0, &host.remote(), 64, 64).expect("inside");
    let bad = [(0, 0, 64), (4095, 0, 2)];
    let refused = batch.extend(&ours, &host.remote(), bad.into_iter()).expect_err("out of bounds");
    assert_eq!(refused.kind(), ErrorKind::OutOfBounds);
    assert!(batch.devices().is_empty());
    batch.extend(&ours, &host.remote(), bad[..1].iter().copied()).expect("inside");
    assert_eq!((batch.len(), batch.devices().len()), (2, 1));
}

#[test]
fn pieces_of_two_devices_and_host_memory_in_one_batch_land_where_they_were_aimed() {
    let _bound = Watchdog::new(PATIENCE);
    // Longer than a stage, and not a multiple of anything.
    const LEN: usize = 300_001;
    const COUNT: usize = 12;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let peer = peer_of(&near, &far);
        let devices = [1, 2].map(|seed| TestDevice::new(COUNT * LEN, seed));
        let host = near.allocate(COUNT * LEN, Access::NONE).expect("memory");
        host.write_at(0, &Pattern::new(3).bytes(COUNT * LEN)).expect("inside");
        let sources = [devices[0].register(&near), devices[1].register(&near), host.clone()];
        let (edge, after) = SlowMemory::edge();
        let transfers: Vec<_> = (0..4)
            .map(|first| {
                let to = TestDevice::new(COUNT * LEN, 9);
                let region = to.register(&far);
                let mut batch = Batch::new();
                batch.set_after(after.clone());
                for i in 0..COUNT {
                    let (from, at) = (&sources[(first + i) % 3], (i * LEN) as u64);
                    batch.push(from, at, &region.remote(), at, LEN as u64).expect("inside");
                }
                (first, to, peer.write_async(&batch, &options()))
            })
            .collect();
        edge.happen();
        for (first, to, transfer) in transfers {
            ended(&transfer).unwrap_or_else(|e| panic!("{kind}: {e}"));
            for i in 0..COUNT {
                let mut bytes = vec![0; LEN];
                match (first + i) % 3 {
                    2 => host.read_at(i * LEN, &mut bytes).expect("inside"),
                    device => bytes = devices[device].bytes(i * LEN, LEN),
                }
                assert!(bytes == to.bytes(i * LEN, LEN), "{kind}, transfer {first}, piece {i}");
            }
            to.comes_to_rest();
        }
        devices.iter().for_each(TestDevice::comes_to_rest);
    }
}

#[test]
fn a_peer_that_does_not_read_holds_no_stage_that_another_transfer_waits_for() {
    let _bound = Watchdog::new(PATIENCE);
    let [near, stuck, healthy] = [(); 3].map(|()| agent(TransportKind::TCP));
    let part = 32 << 20;
    let (ours, held) = (TestDevice::new(4 * part, 1), TestDevice::new(4 * part, 2));
    let (from, to) = (ours.register(&near), held.register(&stuck));
    held.slow.hold();
    let write = |peer: &Peer, to: &Region, i: usize| {
        let mut batch = Batch::new();
        batch.set_after(After::host());
        let (at, len) = ((i * part) as u64, part as u64);
        batch.push(&from, at, &to.remote(), at, len).expect("inside");
        peer.write_async(&batch, &options())
    };
    let peer = peer_of(&near, &stuck);
    let waiting: Vec<_> = (0..4).map(|i| write(&peer, &to, i)).collect();
    eventually("the device of the peer has its batches", || held.slow.pending_in() > 0);
    let other = healthy.allocate(4 * part, Access::READ_WRITE).expect("memory");
    let peer = peer_of(&near, &healthy);
    for i in 0..4 {
        ended(&write(&peer, &other, i)).expect("written");
    }
    assert!(waiting.iter().all(|transfer| transfer.outcome().is_none()), "the peer is stuck");
    held.slow.release();
    waiting.iter().for_each(|transfer| ended(transfer).expect("written"));
    assert!(ours.bytes(0, 4 * part) == held.bytes(0, 4 * part));
    [&ours, &held].into_iter().for_each(TestDevice::comes_to_rest);
}

#[test]
fn the_device_of_a_blocking_write_whose_peer_does_not_read_copies_nothing_again_and_again() {
    let _bound = Watchdog::new(PATIENCE);
    // Fewer than the lanes of a peer: the other transfer needs one.
    const LANES: usize = 3;
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let peer = peer_of(&near, &far);
    let len = 128 << 20;
    let (ours, held) = (TestDevice::with_stages(len, 1, 2), TestDevice::new(len, 2));
    let (from, to) = (ours.register(&near), held.register(&far));
    let striped = Options { streams: Some(LANES), ..options() };
    let small = [&near, &far].map(|agent| agent.allocate(PIECE, Access::WRITE).expect("memory"));
    let small = scattered(&small[0], &small[1], 1);
    eventually("there are lanes", || {
        peer.write(&small, &striped).expect("written").streams == LANES
    });
    let mut batch = Batch::new();
    batch.set_after(After::host());
    batch.push(&from, 0, &to.remote(), 0, len as u64).expect("inside");
    held.slow.hold();
    thread::scope(|scope| {
        let write = scope.spawn(|| peer.write(&batch, &striped).expect("written"));
        eventually("the device of the peer has its batches", || held.slow.pending_in() > 0);
        // A device whose copies are thrown away is never at rest.
        let comes_to_rest = || {
            eventually("the device rests", || {
                let before = ours.slow.started();
                thread::sleep(Duration::from_millis(200));
                ours.slow.pending() == 0 && ours.slow.started() == before
            });
        };
        comes_to_rest();
        // It waits for no stage.
        let healthy = far.allocate(PIECE, Access::WRITE).expect("memory");
        ended(&peer.write_async(&scattered(&from, &healthy, 1), &options())).expect("written");
        comes_to_rest();
        assert!(!write.is_finished(), "its peer reads nothing");
        held.slow.release();
        assert_eq!(write.join().expect("no panic").streams, LANES);
    });
    assert!(ours.bytes(0, len) == held.bytes(0, len));
    [&ours, &held].into_iter().for_each(TestDevice::comes_to_rest);
}

/// Writes `count` parts of `part` bytes by as many transfers, all of them under way together.
fn write_all_at_once(peer: &Peer, from: &Region, to: &Region, count: usize, part: usize) {
    let running: Vec<_> = (0..count)
        .map(|i| {
            let mut batch = Batch::new();
            batch.set_after(After::host());
            let (at, len) = ((i * part) as u64, part as u64);
            batch.push(from, at, &to.remote(), at, len).expect("inside");
            peer.write_async(&batch, &options())
        })
        .collect();
    running.iter().for_each(|transfer| ended(transfer).expect("written"));
}

#[test]
fn more_transfers_than_a_device_has_stages_all_end_and_give_them_back() {
    let _bound = Watchdog::new(PATIENCE);
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let peer = peer_of(&near, &far);
    let part = 1 << 20;
    let count = 24;
    let (ours, theirs) = (TestDevice::new(count * part, 1), TestDevice::new(count * part, 2));
    assert!(ours.slow.stages().stages() < count);
    let (from, to) = (ours.register(&near), theirs.register(&far));
    write_all_at_once(&peer, &from, &to, count, part);
    assert!(ours.bytes(0, count * part) == theirs.bytes(0, count * part));
    [&ours, &theirs].into_iter().for_each(TestDevice::comes_to_rest);
}

#[test]
fn both_ends_of_transfers_can_use_the_stages_of_one_device() {
    let _bound = Watchdog::new(PATIENCE);
    let part = 1 << 20;
    let count = 12;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let peer = peer_of(&near, &far);
        let device = TestDevice::new(2 * count * part, 1);
        assert!(device.slow.stages().stages() < count);
        let half = count * part;
        let from = near.register_device(device.slow.part(0, half), Access::NONE).expect("a region");
        let to = device.slow.part(half, half);
        let to = far.register_device(to, Access::READ_WRITE).expect("a region");
        write_all_at_once(&peer, &from, &to, count, part);
        assert!(device.bytes(0, half) == device.bytes(half, half), "{kind}");
        device.comes_to_rest();
    }
}

#[test]
fn scattered_pieces_of_a_device_land_where_they_were_aimed_in_host_memory() {
    let _bound = Watchdog::new(PATIENCE);
    const COUNT: usize = 3000;
    const LEN: usize = 2 * COUNT * PIECE;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let peer = peer_of(&near, &far);
        // Mapped memory, and memory that is copied by the number of its process.
        let shared = far.allocate(1 << 20, Access::READ_WRITE).expect("memory");
        let private = far.allocate_private(LEN, Access::READ_WRITE).expect("memory");
        for host in [&shared, &private] {
            let device = TestDevice::new(LEN, 1);
            let batch = scattered(&device.register(&near), host, COUNT);
            host.write_at(0, &[7; LEN]).expect("inside");
            let former = device.bytes(0, LEN);
            peer.write(&batch, &options()).expect("written");
            let mut bytes = vec![0; LEN];
            host.read_at(0, &mut bytes).expect("inside");
            for (i, (got, from)) in bytes.chunks(PIECE).zip(former.chunks(PIECE)).enumerate() {
                let expected = if i % 2 == 0 { from } else { &[7; PIECE] };
                assert!(got == expected, "{kind}: piece {i} written");
            }
            let other = Pattern::new(5).bytes(LEN);
            host.write_at(0, &other).expect("inside");
            peer.read(&batch, &options()).expect("read");
            let pieces = device.bytes(0, LEN);
            let whence = other.chunks(PIECE).zip(former.chunks(PIECE));
            for (i, (got, (new, old))) in pieces.chunks(PIECE).zip(whence).enumerate() {
                assert!(got == if i % 2 == 0 { new } else { old }, "{kind}: piece {i} read");
            }
            assert_eq!(device.slow.misuse(), Vec::<String>::new());
        }
    }
}
