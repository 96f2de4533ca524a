//! Peers that are stopped: connected, but silent.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Ends the loop of another thread on drop, also if the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_stopped_peer_is_noticed_by_heartbeat_and_delays_no_other_peer() {
    let _bound = bounded();
    let Pair { agent, from, child: mut stopped, region, peer, .. } = pair_within(32 * MIB, SILENCE);
    let (mut healthy, other) = Child::with_agent(peer_config());
    let healthy_region = healthy.allocate(MIB, "w", 3);
    let [large, small] = [32 * MIB, MIB].map(|block| batch(&from, &region.remote, block));

    let ended = AtomicBool::new(false);
    // Calls to the other peer that succeeded, and that failed.
    let calls = [AtomicUsize::new(0), AtomicUsize::new(0)];
    thread::scope(|scope| {
        let (agent, other, ended, calls) = (&agent, &other, &ended, &calls);
        let ends = Ends(ended);
        let beside = scope.spawn(move || {
            let (from, peer) = (source(agent, MIB, 5), agent.peer(other).expect("an address"));
            let moves = batch(&from, &healthy_region.remote, 4096);
            while !ended.load(Ordering::Relaxed) {
                let outcome = peer.write(&moves, &Options::default());
                calls[usize::from(outcome.is_err())].fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(5));
            }
        });

        let count = || calls.each_ref().map(|it| it.load(Ordering::Relaxed));
        let noticed = || -> Result<(), String> {
            eventually("a healthy write", || peer.write(&small, &Options::default()).is_ok());
            let before = count();
            stopped.stop();
            let outcome = peer.write(&large, &Options::default());
            let now = count();
            stopped.resume();
            let first = peer.write(&small, &Options::default());
            let error = outcome.expect_err("the peer is stopped");
            // The peer did not confirm.
            if (error.kind(), error.quiesced()) != (ErrorKind::PeerSilent, Some(false)) {
                return Err(format!("{error:?}"));
            }
            let [served, failed] = [0, 1].map(|at| now[at] - before[at]);
            // A call that waited for the stopped peer would be one of two or three.
            if served <= 3 || failed > 0 {
                return Err(format!(
                    "of another peer's calls, {served} succeeded, {failed} failed"
                ));
            }
            first.map(drop).map_err(|e| format!("the first call to a resumed peer: {e:?}"))
        };
        // A process that does not run for a part of the limit ends its sessions and makes few calls, once.
        in_one_try(noticed);

        drop(ends);
        beside.join().expect("writers don't panic");
    });
    assert!(stopped.matches(&region, 1));
}

#[test]
fn a_peer_stopped_before_the_first_connection_is_noticed_without_a_deadline() {
    let _bound = bounded();
    let Pair { agent, from, child, address, region, .. } = pair_within(MIB, SILENCE);
    let moves = batch(&from, &region.remote, 4096);
    // The kernel of a stopped peer still accepts connections: for the session or the first stream.
    for connected in [false, true] {
        let peer = agent.peer(&address).expect("an address");
        if connected {
            eventually("the peer is there", || peer.connect(PATIENCE).is_ok());
        } else {
            peer.disconnect();
        }
        child.stop();
        for way in Way::ALL {
            let outcome = moved(way, &peer, &moves, &within(NEVER));
            let error = outcome.expect_err("the peer is stopped");
            let kinds = [ErrorKind::PeerSilent, ErrorKind::Unreachable];
            assert!(kinds.contains(&error.kind()), "connected: {connected}, {way}: {error:?}");
        }
        child.resume();
        // Calls are refused at once until a probe is answered.
        eventually("a call to a resumed peer", || peer.write(&moves, &Options::default()).is_ok());
        peer.disconnect();
    }
}

/// A pair of this agent and a peer with this setting of checksums.
fn checked_pair(agent: &Agent, len: usize, checksum: &str) -> Pair {
    let mut config = peer_config_with("tcp", SILENCE);
    config["checksum"] = json!(checksum);
    let (mut child, address) = Child::with_agent(config);
    let region = child.allocate(len, "w", 2);
    pair_with(agent.clone(), child, address, region)
}

#[test]
fn a_stopped_target_discards_the_bytes_that_its_kernel_held() {
    let _bound = bounded();
    let agent = agent_with("tcp", SILENCE);
    let cases: [(&str, usize, usize, Option<u64>, &str); 8] = [
        // Name, length, block, milliseconds from write to stop (`None`: stop first), checksum.
        ("one block in the kernel", 4 * KIB, 4 * KIB, None, "off"),
        ("small blocks in the kernel", 64 * KIB, 512, None, "on"),
        ("a megabyte in the kernel", MIB, 4 * KIB, None, "off"),
        ("more than the kernel takes", 24 * MIB, 24 * MIB, None, "off"),
        ("blocks, stopped at once", 24 * MIB, 32 * KIB, Some(0), "off"),
        ("blocks, stopped in the middle", 24 * MIB, 32 * KIB, Some(3), "on"),
        ("one range, stopped in the middle", 24 * MIB, 24 * MIB, Some(6), "off"),
        ("one range, stopped later", 24 * MIB, 24 * MIB, Some(12), "off"),
    ];
    let mut children: Vec<_> = cases
        .iter()
        .map(|(_, len, _, _, checksum)| {
            let Pair { from, child, region, peer, .. } = checked_pair(&agent, *len, checksum);
            // Opens the streams that the first round uses.
            let moves = batch(&from, &region.remote, *len);
            eventually("a healthy write", || peer.write(&moves, &Options::default()).is_ok());
            (child, region, peer, from)
        })
        .collect();
    // Rounds in which the stop came before the end of five transfers.
    let mut caught = 0;
    for round in 0..6 {
        for (child, region, _, from) in &mut children {
            child.fill(region, 2);
            refill(from, 1);
        }
        let mut running = Vec::new();
        for ((_, len, block, delay, _), (child, region, peer, from)) in
            cases.iter().zip(&mut children)
        {
            let moves = batch(from, &region.remote, *block);
            assert_eq!(moves.bytes(), *len as u64);
            if delay.is_none() {
                child.stop();
            }
            let transfer = peer.write_async(&moves, &within(NEVER));
            if let Some(ms) = delay {
                thread::sleep(Duration::from_millis(*ms));
                child.stop();
            }
            running.push(transfer);
        }
        let mut unconfirmed = 0;
        let mut done = Vec::new();
        for ((what, ..), (transfer, (_, _, _, from))) in
            cases.iter().zip(running.iter().zip(&children))
        {
            let outcome = transfer.wait(PATIENCE).expect("heartbeats end it");
            done.push(outcome.is_ok());
            if let Err(error) = outcome {
                // The second if the session had ended: this process did not run for a part of the limit.
                let kinds = [ErrorKind::PeerSilent, ErrorKind::Unreachable];
                assert!(kinds.contains(&error.kind()), "{what}: {error:?}");
                unconfirmed += usize::from(error.quiesced() == Some(false));
                from.write_at(0, &vec![MARKER; from.len()]).expect("owned memory");
            }
        }
        caught += usize::from(unconfirmed >= 5);
        // Longer than the silence limit of both sides.
        thread::sleep(2 * SILENCE);
        let held: Vec<_> =
            children.iter().map(|(child, region, ..)| child.memory(region)).collect();
        for (child, ..) in &children {
            child.resume();
        }
        for ((what, ..), (((child, region, ..), held), done)) in
            cases.iter().zip(children.iter_mut().zip(&held).zip(&done))
        {
            if *done {
                continue;
            }
            let digest = child.digest(region);
            let changed = child.changes(region, &digest, Duration::from_millis(250));
            assert!(!changed, "{what}, round {round}");
            assert!(
                child.memory(region) == *held,
                "{what}, round {round}: the target applied bytes that its kernel had held"
            );
            assert!(!held.contains(&MARKER), "{what}: the source was read after the outcome");
        }
        for ((what, _, block, ..), (child, region, peer, from)) in cases.iter().zip(&mut children) {
            refill(from, 9);
            let moves = batch(from, &region.remote, *block);
            eventually(&format!("{what}: a write to a resumed peer"), || {
                peer.write(&moves, &Options::default()).is_ok()
            });
            assert!(child.matches(region, 9), "{what}");
        }
        if caught == 2 {
            return;
        }
    }
    panic!("the stop came in time in {caught} of six rounds");
}

#[test]
fn a_short_stop_fails_no_transfer() {
    let _bound = bounded();
    // So long that a busy machine does not reach what is left of it.
    let limit = 8 * SILENCE;
    let Pair { agent: _agent, from, mut child, region, peer, .. } = pair_within(32 * MIB, limit);
    peer.connect(PATIENCE).expect("the peer is there");
    child.stop();
    let transfer = peer.write_async(&batch(&from, &region.remote, 64 * KIB), &within(NEVER));
    thread::sleep(limit / 4);
    child.resume();
    transfer
        .wait(PATIENCE)
        .expect("it ends")
        .expect("a stop of a quarter of the silence limit fails no transfer");
    assert!(child.matches(&region, 1));
}

#[test]
fn a_stopped_writer_does_not_resume_its_old_request() {
    let _bound = bounded();
    let agent = agent_with("tcp", SILENCE);
    let to = agent.allocate(32 * MIB, Access::WRITE).expect("memory");
    let mut child = Child::spawn();
    child.start(peer_config_with("tcp", SILENCE));
    let from = child.allocate(32 * MIB, "", 7);
    let writing = command("keep_writing", agent.advertised(), &from, &to.remote(), 256 * KIB);
    let writer = child.call(writing)["writer"].clone();
    eventually("something arrives", || agent.stats().bytes_received > MIB as u64);
    // Until it is stopped in the middle of a request.
    eventually("a stop in the middle of a request", || {
        child.stop();
        let now = || (agent.stats().bytes_received, agent.stats().requests_in_flight);
        let (received, running) = comes_to_rest(now);
        eventually("the requests of the stopped writer end", || now().1 == 0);
        // A request of which this host's kernel had all bytes has ended well.
        let caught = running > 0 && now().0 == received;
        if !caught {
            child.resume();
        }
        caught
    });
    refill(&to, 8);
    thread::sleep(SILENCE);
    child.send(json!({"op": "stop_writing", "writer": writer}));
    child.resume();
    // The writer may write again in a new session, but its old request must not go on. The command
    // to stop was sent before it was resumed.
    let report = child.reply_within(PATIENCE / 2).expect("the writer stops");
    let report = report.expect("stopping can't fail");
    assert_ne!(
        report["errors"],
        json!([]),
        "the write that was stopped can't have been done: {report}"
    );
}

#[test]
fn a_blocked_call_can_be_interrupted() {
    let _bound = bounded();
    let Pair { agent: _agent, from, child, region, peer, .. } = pair_within(32 * MIB, SILENCE);
    let moves = batch(&from, &region.remote, MIB);
    for way in Way::ALL {
        let interrupted = || -> Result<(), String> {
            // Opens the streams that the next call uses.
            eventually("a healthy write", || peer.write(&moves, &Options::default()).is_ok());
            child.stop();
            let began = Instant::now();
            let interrupt = || began.elapsed() > Duration::from_millis(150);
            let options = Options { interrupt: Some(&interrupt), ..within(NEVER) };
            let outcome = moved(way, &peer, &moves, &options);
            child.resume();
            let error = outcome.expect_err("the peer is stopped");
            // The interrupt is checked every 100 ms; then the call waits for the peer to confirm.
            let is_confirmed = way == Way::Write && error.quiesced() != Some(false);
            match error.kind() == ErrorKind::Interrupted && !is_confirmed {
                true => Ok(()),
                false => Err(format!("{error:?}")),
            }
        };
        // A caller that does not run for the silence limit is late with its check, or has lost its session.
        in_one_try(interrupted);
        eventually("a healthy write", || peer.write(&moves, &Options::default()).is_ok());
    }
    // With a peer that answers, an interrupted call returns at once.
    let Pair { agent: _agent, from, child: _child, region, peer, .. } = pair(32 * MIB);
    let moves = batch(&from, &region.remote, MIB);
    for way in Way::ALL {
        let interrupt = || true;
        let options = Options { interrupt: Some(&interrupt), ..Options::default() };
        let outcome = moved(way, &peer, &moves, &options);
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::Interrupted, "{error:?}");
            assert_ne!(error.quiesced(), Some(false), "{error:?}");
        }
    }
}

#[test]
fn calls_to_a_peer_known_to_be_silent_fail_at_once_until_a_probe_finds_it_back() {
    let _bound = bounded();
    let Pair { agent, from, child, region, peer, .. } = pair_within(MIB, SILENCE);
    let moves = batch(&from, &region.remote, 4096);
    let first_call_after_a_probe = |connected: bool| {
        if connected {
            eventually("a healthy write", || peer.write(&moves, &Options::default()).is_ok());
        } else {
            peer.disconnect();
        }
        let slept = agent.stats().slept;
        child.stop();
        let error = peer.write(&moves, &Options::default()).expect_err("the peer is stopped");
        assert_eq!(error.kind(), ErrorKind::PeerSilent, "connected: {connected}: {error:?}");
        // A session that ended because this process did not run says nothing about the peer.
        eventually("the peer is known to be silent", || {
            let error = peer.write(&moves, &Options::default()).expect_err("the peer is stopped");
            let is_known = error.context("since").is_some();
            assert!(is_known || agent.stats().slept > slept, "connected: {connected}: {error:?}");
            is_known
        });
        for _ in 0..20 {
            let error = peer.write(&moves, &Options::default()).expect_err("the peer is stopped");
            assert_eq!(error.kind(), ErrorKind::PeerSilent, "connected: {connected}: {error:?}");
            assert!(error.context("since").is_some(), "connected: {connected}: {error:?}");
            let running = peer.write_async(&moves, &Options::default());
            running.wait(PATIENCE).expect("it ends").expect_err("the peer is stopped");
        }
        child.resume();
        eventually("a probe finds the peer back", || peer.transport().is_some());
        let first = peer.write(&moves, &Options::default());
        first.map_err(|e| format!("connected: {connected}: the first call after a probe: {e:?}"))
    };
    // Silence is noticed during a transfer, or while connecting.
    for connected in [true, false] {
        in_one_try(|| first_call_after_a_probe(connected));
    }
}
