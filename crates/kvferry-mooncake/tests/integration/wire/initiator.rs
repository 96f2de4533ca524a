//! kvferry as initiator: it writes and reads the memory of another implementation.

use crate::wire::fake::{BASE, Behaviour, Fake};
use crate::wire::{
    LONG, PAGE, agent, builder, bytes_of, filled, pattern, scattered, settles, turned,
};
use kvferry::{
    Access, Agent, Batch, Device as _, ErrorKind, Notification, Options, Peer, Region, RegionId,
};
use kvferry_sys::map::Mapping;
use kvferry_testkit::ports::KeptPort;
use kvferry_testkit::region::moved;
use kvferry_testkit::slow::SlowMemory;
use kvferry_testkit::user::as_another_user;
use kvferry_testkit::{PATIENCE, Watchdog, Way};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The limit of agents whose peer falls silent: on a loaded machine, a healthy peer may stand still for some seconds.
const PATIENT: Duration = Duration::from_secs(6);

fn options() -> Options<'static> {
    Options { timeout: Some(LONG), ..Options::default() }
}

fn peer(agent: &Agent, fake: &Fake) -> Peer {
    agent.peer(&fake.address()).expect("an address")
}

fn round_trip(behaviour: Behaviour, block: usize, blocks: usize, streams: usize) {
    let fake = Fake::start(block * blocks, behaviour);
    let agent = agent();
    let source = filled(&agent, 3, block * blocks);
    let peer = peer(&agent, &fake);
    let options = Options { streams: Some(streams), ..options() };
    let moved = peer.write(&scattered(&source, BASE, block, blocks), &options).expect("written");
    assert_eq!(moved.transport, Some(kvferry_mooncake::KIND));
    assert_eq!((moved.bytes, moved.descriptors), ((block * blocks) as u64, blocks));
    assert!(fake.memory() == turned(&bytes_of(&source), block), "{behaviour:?} {block}x{blocks}");
    let sink = filled(&agent, 0, block * blocks);
    peer.read(&scattered(&sink, BASE, block, blocks), &options).expect("read");
    assert!(bytes_of(&sink) == bytes_of(&source), "{behaviour:?} {block}x{blocks}");
}

#[test]
fn every_byte_arrives_in_both_directions_whatever_the_shape() {
    for version in [1, 2] {
        let behaviour = Behaviour { version, ..Behaviour::default() };
        for (block, blocks, streams) in [
            (1, 1, 1),
            (PAGE, 1, 1),
            (1, 700, 1),
            (PAGE, 3000, 1),
            (PAGE, 3000, 4),
            (20 << 20, 3, 2),
        ] {
            round_trip(behaviour, block, blocks, streams);
        }
    }
}

/// Memory of a device with so many stages, filled with a pattern.
struct TestDevice {
    slow: SlowMemory,
    mapping: Arc<Mapping>,
    region: Region,
}

impl TestDevice {
    fn new(agent: &Agent, seed: u8, len: usize, stages: usize) -> Self {
        let mapping = Arc::new(Mapping::anonymous(len).expect("memory"));
        mapping.span(0, len).copy_from(&pattern(seed, len));
        let slow = SlowMemory::with_stages(Arc::clone(&mapping), 0, len, 1, stages);
        let region = agent.register_device(slow.memory(), Access::NONE).expect("a region");
        Self { slow, mapping, region }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.slow.len()];
        self.mapping.span(0, bytes.len()).copy_to(&mut bytes);
        bytes
    }
}

#[test]
fn every_byte_of_device_memory_arrives_in_both_directions() {
    for version in [1, 2] {
        for (block, blocks, streams, stages) in
            [(1, 700, 1, 6), (3000, 1500, 1, 1), (PAGE, 3000, 4, 2), (20 << 20, 3, 2, 3)]
        {
            let len = block * blocks;
            let what = format!("version {version}, {block}x{blocks}, {stages} stages");
            let fake = Fake::start(len, Behaviour { version, ..Behaviour::default() });
            let agent = agent();
            let [source, sink] = [3, 0].map(|seed| TestDevice::new(&agent, seed, len, stages));
            let peer = peer(&agent, &fake);
            let options = Options { streams: Some(streams), ..options() };
            let written = scattered(&source.region, BASE, block, blocks);
            peer.write(&written, &options).expect("written");
            assert!(fake.memory() == turned(&source.bytes(), block), "{what}");
            let read = scattered(&sink.region, BASE, block, blocks);
            peer.read_async(&read, &options).wait(LONG).expect("in time").expect("read");
            assert!(sink.bytes() == source.bytes(), "{what}");
            for device in [source, sink] {
                settles("the stages are free", || device.slow.stages().free() == stages);
                assert_eq!(device.slow.misuse(), Vec::<String>::new(), "{what}");
            }
        }
    }
}

#[test]
fn a_peer_that_does_not_answer_holds_no_stage_that_another_transfer_waits_for() {
    // More requests than may be unanswered, and a batch of the device that ends between two of them.
    const BLOCKS: usize = 700;
    const WINDOW: usize = 512;
    const BLOCK: usize = 3000;
    for blocks in [false, true] {
        let stopped = Behaviour { answers_after: usize::MAX, ..Behaviour::default() };
        let stopped = Fake::start(BLOCK * BLOCKS, stopped);
        let healthy = Fake::start(BLOCK * BLOCKS, Behaviour::default());
        let agent = builder().silence(2 * LONG).start().expect("an agent");
        let device = TestDevice::new(&agent, 3, BLOCK * BLOCKS, 1);
        let batch = scattered(&device.region, BASE, BLOCK, BLOCKS);
        let [stuck, other] = [&stopped, &healthy].map(|fake| peer(&agent, fake));
        let is_over = AtomicBool::new(false);
        let stop = || is_over.load(Ordering::SeqCst);
        let call = Options { timeout: Some(2 * LONG), interrupt: Some(&stop), ..options() };
        thread::scope(|scope| {
            let waits = scope.spawn(|| match blocks {
                true => stuck.write(&batch, &call).expect_err("interrupted").kind(),
                false => {
                    let transfer = stuck.write_async(&batch, &call);
                    settles("the other one has ended", stop);
                    transfer.cancel();
                    transfer.wait(LONG).expect("in time").expect_err("cancelled").kind()
                }
            });
            settles("the window is full", || stopped.requests() == WINDOW);
            let written = other.write(&batch, &options());
            is_over.store(true, Ordering::SeqCst);
            let wanted = if blocks { ErrorKind::Interrupted } else { ErrorKind::Cancelled };
            assert_eq!(waits.join().expect("no panic"), wanted);
            written.expect("it needs nothing of the peer that does not answer");
        });
        assert!(healthy.memory() == turned(&device.bytes(), BLOCK));
        settles("the stage is free", || device.slow.stages().free() == 1);
    }
}

#[test]
fn a_transfer_whose_device_loses_a_batch_ends() {
    let _bound = Watchdog::new(PATIENCE);
    let brief = Options { timeout: Some(Duration::from_millis(100)), ..Options::default() };
    let fake = Fake::start(PAGE, Behaviour::default());
    let agent = builder().silence(Duration::from_millis(500)).start().expect("a port");
    let peer = peer(&agent, &fake);
    for way in Way::ALL {
        for blocks in [true, false] {
            let device = TestDevice::new(&agent, 3, PAGE, 2);
            let batch = scattered(&device.region, BASE, PAGE, 1);
            device.slow.lose_next(1);
            let error = loop {
                let outcome = match (blocks, way) {
                    (true, _) => moved(way, &peer, &batch, &brief),
                    (_, Way::Write) => peer.write_async(&batch, &brief).wait(LONG).expect("ends"),
                    (_, Way::Read) => peer.read_async(&batch, &brief).wait(LONG).expect("ends"),
                };
                // A loaded machine may need longer to connect.
                if device.slow.losing() == 0 {
                    break outcome.expect_err("a batch never ends");
                }
            };
            assert_eq!(error.quiesced(), Some(false), "{way}, blocks: {blocks}: {error}");
            let refused = agent.unregister(&device.region).expect_err("the device may copy");
            assert_eq!(refused.kind(), ErrorKind::Quarantined);
            settles("another transfer", || {
                let region = agent.register_device(device.slow.memory(), Access::NONE);
                let batch = scattered(&region.expect("a region"), BASE, PAGE, 1);
                moved(way, &peer, &batch, &options()).is_ok()
            });
        }
    }
}

#[test]
fn transfers_succeed_with_a_peer_that_moves_a_few_bytes_at_a_time() {
    for version in [1, 2] {
        round_trip(Behaviour { version, sends_pieces: true, ..Behaviour::default() }, 3001, 9, 1);
    }
}

#[test]
fn requests_are_sent_ahead_of_their_answers() {
    // This peer answers only after it has read all requests.
    round_trip(Behaviour { answers_after: 200, ..Behaviour::default() }, 64, 200, 1);
}

#[test]
fn the_data_host_may_be_missing_or_be_no_address() {
    for data_host in ["", "0.0.0.0", "somewhere.invalid"] {
        round_trip(Behaviour { data_host, ..Behaviour::default() }, PAGE, 2, 1);
    }
}

#[test]
fn asynchronous_transfers_and_many_callers_share_the_lanes() {
    const CALLERS: usize = 10;
    const LEN: usize = 100 * PAGE;
    let fake = Fake::start(CALLERS * LEN, Behaviour::default());
    let agent = agent();
    let peer = peer(&agent, &fake);
    thread::scope(|scope| {
        for i in 0..CALLERS {
            let (agent, peer) = (&agent, &peer);
            scope.spawn(move || {
                let source = filled(agent, u8::try_from(i).expect("few"), LEN);
                let batch = scattered(&source, BASE + (i * LEN) as u64, PAGE, 100);
                for _ in 0..5 {
                    peer.write(&batch, &options()).expect("written");
                    let transfer = peer.write_async(&batch, &options());
                    transfer.wait(LONG).expect("in time").expect("written");
                }
            });
        }
    });
    let memory = fake.memory();
    for i in 0..CALLERS {
        let expected = turned(&pattern(u8::try_from(i).expect("few"), LEN), PAGE);
        assert!(memory[i * LEN..(i + 1) * LEN] == expected, "caller {i}");
    }
    let stats = agent.stats();
    assert_eq!((stats.transfers_failed, stats.transfers_in_flight), (0, 0));
    assert!(fake.connections() <= agent.config().streams_per_peer.unwrap_or(64));
}

#[test]
fn a_refused_range_is_named_and_the_next_transfer_is_not_delayed() {
    let fake = Fake::start(100 * PAGE, Behaviour::default());
    let agent = agent();
    let peer = peer(&agent, &fake);
    let source = filled(&agent, 1, 100 * PAGE);
    let good = scattered(&source, BASE, PAGE, 100);
    peer.write(&good, &options()).expect("written");
    for (addr, kind) in [
        (BASE + 99 * PAGE as u64 + 1, ErrorKind::OutOfBounds),
        (BASE - 1, ErrorKind::NotRegistered),
        (u64::MAX - PAGE as u64, ErrorKind::NotRegistered),
    ] {
        for way in Way::ALL {
            let mut batch = scattered(&source, BASE, PAGE, 50);
            batch.push_to_address(&source, 0, addr, PAGE as u64).expect("no wrapping");
            let result = moved(way, &peer, &batch, &options());
            let e = result.expect_err("refused");
            assert_eq!((e.kind(), e.context("descriptor")), (kind, Some("50")), "{e}");
            assert_eq!(e.quiesced(), Some(true));
            peer.write(&good, &options()).expect("healthy");
        }
    }
    assert_eq!(agent.stats().sessions_opened, 1, "a refusal does not end the session");
}

#[test]
fn a_range_that_a_version_1_peer_refused_is_named_too() {
    let fake = Fake::start(2 * PAGE, Behaviour { version: 1, ..Behaviour::default() });
    let agent = agent();
    let peer = peer(&agent, &fake);
    let source = filled(&agent, 1, PAGE);
    for (addr, kind) in
        [(BASE - 1, ErrorKind::NotRegistered), (BASE + PAGE as u64 + 1, ErrorKind::OutOfBounds)]
    {
        let mut batch = scattered(&source, BASE, 1024, 4);
        batch.push_to_address(&source, 0, addr, PAGE as u64).expect("no wrapping");
        let e = peer.write(&batch, &options()).expect_err("refused");
        assert_eq!((e.kind(), e.context("descriptor")), (kind, Some("4")), "{e}");
        peer.write(&scattered(&source, BASE, PAGE, 1), &options()).expect("healthy");
    }
}

#[test]
fn a_peer_that_stalls_is_silent_after_the_silence_window() {
    let stalls = |version, stalls_after, block| {
        let behaviour = Behaviour { version, stalls_after, ..Behaviour::default() };
        let fake = Fake::start(block * 8, behaviour);
        let agent = builder().silence(PATIENT).start().expect("a port");
        let peer = peer(&agent, &fake);
        let source = filled(&agent, 1, block * 8);
        let batch = scattered(&source, BASE, block, 8);
        let e = peer.write(&batch, &options()).expect_err("the peer does not answer");
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::PeerSilent, Some(false)), "{e}");
        peer.connect(LONG).expect("its handshake works");
    };
    thread::scope(|scope| {
        for version in [1, 2] {
            for (stalls_after, block) in [(0, PAGE), (3, 4 << 20)] {
                scope.spawn(move || stalls(version, stalls_after, block));
            }
        }
    });
}

#[test]
fn a_stalled_peer_is_silent_although_other_transfers_of_the_device_wait_for_stages() {
    let _bound = Watchdog::new(PATIENCE);
    // More than sockets hold.
    const BLOCK: usize = 8 << 20;
    const LEN: usize = 8 * BLOCK;
    let stalls = Behaviour { stalls_after: 0, ..Behaviour::default() };
    let fakes = [(); 2].map(|()| Fake::start(LEN, stalls));
    let agent = builder().silence(PATIENT).start().expect("a port");
    let device = TestDevice::new(&agent, 3, LEN, 1);
    let batch = scattered(&device.region, BASE, BLOCK, 8);
    let patient = Options { timeout: Some(PATIENCE), ..Options::default() };
    let peers = fakes.each_ref().map(|fake| peer(&agent, fake));
    // Each waits for the stage of the other one.
    let errors = thread::scope(|scope| {
        let calls = peers.each_ref().map(|peer| scope.spawn(|| peer.write(&batch, &patient)));
        calls.map(|call| call.join().expect("no panic").expect_err("its peer takes nothing"))
    });
    for e in errors {
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::PeerSilent, Some(false)), "{e}");
    }
    // As many as all bytes of both, and no more by waiting.
    let (copies, _) = device.slow.started();
    assert!(copies <= 2 * LEN / device.slow.stages().stage_bytes(), "{copies} copies");

    // A read whose peer sends nothing waits for the stage of a copy that does not end.
    let healthy = Fake::start(LEN, Behaviour::default());
    device.slow.hold();
    let holds = peer(&agent, &healthy);
    let holds = holds.write_async(&scattered(&device.region, BASE, PAGE, 1), &patient);
    settles("the device copies", || device.slow.pending() > 0);
    let e = peers[0].read(&batch, &patient).expect_err("its peer sends nothing");
    assert_eq!(e.kind(), ErrorKind::PeerSilent, "{e}");
    device.slow.release();
    holds.wait(LONG).expect("in time").expect("written");
    settles("the stage is free", || device.slow.stages().free() == 1);
}

#[test]
fn a_slow_peer_is_not_silent() {
    let behaviour = Behaviour { sends_pieces: true, ..Behaviour::default() };
    let fake = Fake::start(1 << 20, behaviour);
    let silence = Duration::from_secs(2);
    let agent = builder().silence(silence).start().expect("a port");
    // At five bytes per 50 µs and more, this takes longer than the window.
    let len = 300_000;
    fake.fill(&pattern(5, len));
    let sink = filled(&agent, 0, len);
    let peer = peer(&agent, &fake);
    let is_read = || {
        let start = Instant::now();
        let read = peer.read(&scattered(&sink, BASE, len, 1), &options());
        assert!(start.elapsed() > silence || read.is_err());
        read.inspect_err(|e| println!("the peer stood still: {e}")).is_ok()
    };
    // On a loaded machine, the fake's thread may stand still for the whole window.
    assert!((0..6).any(|_| is_read()), "no read ends");
    assert!(bytes_of(&sink) == pattern(5, len));
}

#[test]
fn a_peer_that_dies_is_noticed_at_once_and_its_successor_met() {
    let port = KeptPort::new();
    let closing = Behaviour { closes_after: 3, ..Behaviour::default() };
    let fake = Fake::start_at(port.address(), 64 << 20, closing);
    let agent = agent();
    let peer = peer(&agent, &fake);
    let source = filled(&agent, 1, 64 << 20);
    let batch = scattered(&source, BASE, 8 << 20, 8);
    let e = peer.write(&batch, &options()).expect_err("it died");
    assert_eq!((e.kind(), e.quiesced()), (ErrorKind::PeerReset, Some(false)), "{e}");
    drop(fake);
    let e = peer.write(&batch, &options()).expect_err("no process listens");
    assert_eq!(e.kind(), ErrorKind::Unreachable, "{e}");
    let successor = Fake::start_at(port.address(), 64 << 20, Behaviour::default());
    peer.write(&batch, &options()).expect("the successor takes it");
    assert!(successor.memory() == turned(&bytes_of(&source), 8 << 20));
}

#[test]
fn a_peer_that_dies_while_nothing_is_under_way_costs_no_call() {
    let port = KeptPort::new();
    let first = Fake::start_at(port.address(), PAGE, Behaviour::default());
    let agent = agent();
    let peer = peer(&agent, &first);
    let source = filled(&agent, 1, PAGE);
    let batch = scattered(&source, BASE, PAGE, 1);
    peer.write(&batch, &options()).expect("written");
    drop(first);
    settles("the end of the peer goes unnoticed", || peer.transport().is_none());
    let _second = Fake::start_at(port.address(), PAGE, Behaviour::default());
    peer.write(&batch, &options()).expect("the first call after the restart");
    assert_eq!(agent.stats().transfers_failed, 0);
}

#[test]
fn lanes_that_the_peer_closed_are_not_used_again() {
    let fake = Fake::start(PAGE, Behaviour::default());
    let agent = agent();
    let peer = peer(&agent, &fake);
    let source = filled(&agent, 1, PAGE);
    let batch = scattered(&source, BASE, PAGE, 1);
    for links in 1..=20 {
        peer.write(&batch, &options()).expect("written");
        assert_eq!(fake.connections(), links, "a write of one piece needs one connection");
        fake.cut();
        settles("the end of the streams goes unnoticed", || peer.transport().is_none());
        settles("a stream is left over", || agent.stats().streams == 0);
    }
}

#[test]
fn what_is_no_status_is_a_protocol_error() {
    for lie in [0, u64::MAX, 0x4d43_5456_0000_0007] {
        for way in Way::ALL {
            let fake =
                Fake::start(PAGE, Behaviour { false_status: Some(lie), ..Behaviour::default() });
            let agent = agent();
            let peer = peer(&agent, &fake);
            let local = filled(&agent, 1, PAGE);
            let batch = scattered(&local, BASE, PAGE, 1);
            let result = moved(way, &peer, &batch, &options());
            assert_eq!(result.expect_err("a lie").kind(), ErrorKind::Protocol);
        }
    }
}

#[test]
fn a_cancelled_transfer_whose_device_hangs_holds_up_no_other_one() {
    let fake = Fake::start(2 * PAGE, Behaviour::default());
    // A device is waited for as long as a silent peer.
    let agent = builder().io_threads(1).silence(LONG).start().expect("an agent");
    let peer = peer(&agent, &fake);
    let source = filled(&agent, 1, PAGE);
    let TestDevice { slow: device, region, .. } = TestDevice::new(&agent, 2, PAGE, 1);
    for write in [true, false] {
        device.hold();
        let batch = scattered(&region, BASE, PAGE, 1);
        let hangs = match write {
            true => peer.write_async(&batch, &options()),
            false => peer.read_async(&batch, &options()),
        };
        settles("the device copies", || device.pending() > 0);
        hangs.cancel();
        // The only I/O thread serves others.
        let other = scattered(&source, BASE + PAGE as u64, PAGE, 1);
        let other = peer.write_async(&other, &options());
        other.wait(LONG).expect("in time").expect("written");
        assert!(hangs.outcome().is_none(), "a device still copies for it");
        device.release();
        let e = hangs.wait(LONG).expect("in time").expect_err("cancelled");
        assert_eq!(e.kind(), ErrorKind::Cancelled, "{e}");
    }
}

#[test]
fn a_cancelled_write_is_unconfirmed_and_its_source_is_not_read_again() {
    let behaviour = Behaviour { stalls_after: 1, ..Behaviour::default() };
    let fake = Fake::start(64 << 20, behaviour);
    let agent = agent();
    let peer = peer(&agent, &fake);
    let source = filled(&agent, 1, 64 << 20);
    let transfer = peer.write_async(&scattered(&source, BASE, 8 << 20, 8), &options());
    // The fake takes no bytes after the second head, and more are left than sockets hold.
    settles("the second request does not come", || fake.requests() >= 2);
    transfer.cancel();
    let e = transfer.wait(LONG).expect("in time").expect_err("cancelled");
    assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Cancelled, Some(false)), "{e}");
    assert_eq!(agent.stats().transfers_unconfirmed, 1);
    agent.unregister(&source).expect("no transfer uses it");
}

#[test]
fn i1_a_write_that_is_cancelled_while_its_notification_is_under_way_ends_as_its_peer_answers() {
    for answers in [true, false] {
        let fake = Fake::start(PAGE, Behaviour { holds_notes: true, ..Behaviour::default() });
        let agent = agent();
        let source = filled(&agent, 1, PAGE);
        let note = Some(Notification::new("layer", "done"));
        let options = Options { notify: note, ..options() };
        let batch = scattered(&source, BASE, PAGE, 1);
        let transfer = peer(&agent, &fake).write_async(&batch, &options);
        settles("the notification does not come", || fake.notified().len() == 1);
        transfer.cancel();
        fake.end_notes(answers);
        let outcome = transfer.wait(LONG).expect("in time").map_err(|e| e.kind());
        let expected = if answers { Ok(PAGE as u64) } else { Err(ErrorKind::Cancelled) };
        assert_eq!(outcome.map(|moved| moved.bytes), expected);
    }
}

#[test]
fn notifications_follow_the_data_and_probes_and_regions_are_answered() {
    let fake = Fake::start(8 * PAGE, Behaviour::default());
    let agent = agent();
    let peer = peer(&agent, &fake);
    let source = filled(&agent, 1, 8 * PAGE);
    let batch = scattered(&source, BASE, PAGE, 8);
    let with = |name: &str| Options { notify: Some(Notification::new(name, "m")), ..options() };
    peer.write(&batch, &with("sync")).expect("written");
    let transfer = peer.write_async(&batch, &with("async"));
    transfer.wait(LONG).expect("in time").expect("written");
    peer.read(&batch, &with("read")).expect("read");
    peer.write(&Batch::new(), &with("empty")).expect("notified");
    peer.notify(Notification::new("bare", "m"), &options()).expect("notified");
    let names: Vec<_> = fake.notified().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["sync", "async", "read", "empty", "bare"]);

    let binary = Options { notify: Some(Notification::new("b", [0xff])), ..options() };
    let e = peer.write(&batch, &binary).expect_err("text only");
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);

    assert!(peer.probe(LONG).expect("alive") < LONG);
    let regions = peer.regions(LONG).expect("listed");
    assert_eq!((regions[0].addr, regions[0].len), (BASE, 8 * PAGE as u64));
    assert_eq!(regions[0].id, RegionId::ABSOLUTE);
    let mut by_region = Batch::new();
    by_region.push(&source, 0, &regions[0], PAGE as u64, PAGE as u64).expect("in bounds");
    assert!(by_region.push(&source, 0, &regions[0], 8 * PAGE as u64, 1).is_err());
    peer.write(&by_region, &options()).expect("written");
    assert!(fake.memory()[PAGE..2 * PAGE] == pattern(1, PAGE));
}

#[test]
fn an_idle_agent_with_a_stock_peer_shuts_down_clean() {
    let fake = Fake::start(PAGE, Behaviour::default());
    let agent = agent();
    let peer = peer(&agent, &fake);
    peer.connect(LONG).expect("connected");
    assert_eq!(agent.stats().sessions, 1);
    peer.disconnect();
    peer.connect(LONG).expect("connected again");
    agent.shutdown();
    let stats = agent.stats();
    assert_eq!((stats.sessions, stats.streams, stats.gates), (0, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_batch_arrives_at_a_peer_of_any_habit(
        lens in prop::collection::vec(1usize..9_000, 1..300),
        gap in 0usize..50,
        version in 1u32..3,
        sends_pieces in any::<bool>(),
        streams in 1usize..4,
        asynchronous in any::<bool>(),
    ) {
        // Small pieces are slow.
        let lens = if sends_pieces { &lens[..lens.len().min(3)] } else { &lens[..] };
        let len: usize = lens.iter().map(|l| l + gap).sum();
        let fake = Fake::start(len, Behaviour { version, sends_pieces, ..Behaviour::default() });
        let agent = agent();
        let peer = peer(&agent, &fake);
        let (source, sink) = (filled(&agent, 3, len), filled(&agent, 77, len));
        let (mut out, mut back, mut at) = (Batch::new(), Batch::new(), 0);
        let (written, mut expected) = (pattern(3, len), (vec![0; len], pattern(77, len)));
        for l in lens {
            // One side's memory is filled from its start, the other's from its end.
            let (near, l64) = ((len - at - l) as u64, *l as u64);
            out.push_to_address(&source, near, BASE + at as u64, l64).expect("in bounds");
            back.push_to_address(&sink, near, BASE + at as u64, l64).expect("in bounds");
            let near = len - at - l;
            expected.0[at..at + l].copy_from_slice(&written[near..near + l]);
            expected.1[near..near + l].copy_from_slice(&written[near..near + l]);
            at += l + gap;
        }
        let options = Options { streams: Some(streams), ..options() };
        if asynchronous {
            peer.write_async(&out, &options).wait(LONG).expect("in time").expect("written");
            peer.read_async(&back, &options).wait(LONG).expect("in time").expect("read");
        } else {
            peer.write(&out, &options).expect("written");
            peer.read(&back, &options).expect("read");
        }
        prop_assert!(fake.memory() == expected.0);
        prop_assert!(bytes_of(&sink) == expected.1);
    }
}

#[test]
fn i11_a_stock_peer_of_another_user_of_the_host_is_sent_nothing() {
    let start = || Fake::start(PAGE, Behaviour::default());
    let Some(fake) = as_another_user("a stock peer of another user", start) else { return };
    let agent = agent();
    let peer = agent.peer(&fake.address()).expect("an address");
    let refusal = peer.connect(LONG).expect_err("it is another user's");
    assert_eq!(refusal.kind(), ErrorKind::AccessDenied, "{refusal}");
}
