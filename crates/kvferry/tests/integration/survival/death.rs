//! Peers that are killed and restarted.

use super::*;

/// The error kinds for a lost connection.
const GONE: [ErrorKind; 2] = [ErrorKind::PeerReset, ErrorKind::PeerClosed];

fn assert_gone(error: &kvferry::Error) {
    assert!(error.kind() == ErrorKind::Unreachable || GONE.contains(&error.kind()), "{error:?}");
}

#[test]
fn a_killed_peer_fails_calls_at_once() {
    let _bound = bounded();
    let agent = agent();
    let from = source(&agent, 48 * MIB, 1);
    for (block, synchronous) in
        [(48 * MIB, true), (32 * KIB, true), (48 * MIB, false), (4 * KIB, false)]
    {
        let (mut child, address) = Child::with_agent(peer_config());
        let region = child.allocate(48 * MIB, "w", 2);
        let peer = agent.peer(&address).expect("an address");
        peer.connect(PATIENCE).expect("the peer is there");
        // Stop the peer, so that the batch is still in flight when the peer is killed.
        child.stop();
        let batch = batch(&from, &region.remote, block);
        let outcome = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                if synchronous {
                    peer.write(&batch, &within(NEVER))
                } else {
                    let transfer = peer.write_async(&batch, &within(NEVER));
                    transfer.wait(PATIENCE).expect("the death of the peer ends it")
                }
            });
            eventually("the batch is in flight", || agent.stats().transfers_in_flight == 1);
            thread::sleep(Duration::from_millis(120));
            assert!(!writer.is_finished(), "a stopped peer can't have taken 48 MiB");
            child.kill();
            writer.join().expect("writers don't panic")
        });
        let error = outcome.expect_err("the peer is dead");
        assert!(GONE.contains(&error.kind()), "{error:?}");
        // Later calls do not wait for a dead peer.
        let error = peer.write(&batch, &Options::default()).expect_err("the peer is dead");
        assert_gone(&error);
    }
    assert_eq!(agent.stats().transfers_in_flight, 0);
}

#[test]
fn a_restarted_peer_is_reconnected_and_old_handles_are_refused() {
    let _bound = bounded();
    let port = KeptPort::new();
    let mut config = peer_config();
    config["listen"] = json!(port.address());
    let (mut child, address) = Child::with_agent(config.clone());
    let old = child.allocate(MIB, "rw", 2);
    let Pair { agent, from, mut child, address, region: old, peer } =
        pair_with(agent(), child, address, old);
    let stale = batch(&from, &old.remote, 4096);
    peer.write(&stale, &Options::default()).expect("a healthy write");
    child.kill();

    // At the same address.
    let (mut second, again) = Child::with_agent(config);
    assert_eq!(address, again);
    let new = second.allocate(MIB, "rw", 3);
    eventually("the death is noticed", || peer.transport().is_none());
    peer.write(&batch(&from, &new.remote, 4096), &Options::default())
        .expect("the first call to the restarted peer");
    assert!(second.matches(&new, 1));
    let before = second.memory(&new);
    for _ in 0..3 {
        for outcome in [
            peer.write(&stale, &Options::default()),
            peer.read(&stale, &Options::default()),
            peer.write_async(&stale, &Options::default()).wait(PATIENCE).expect("refused"),
        ] {
            let error = outcome.expect_err("the handle is from before the restart");
            assert_eq!(error.kind(), ErrorKind::StaleIncarnation, "{error:?}");
        }
    }
    assert!(second.memory(&new) == before, "a stale handle reached the restarted peer");

    // A peer at another address, after the first one was killed.
    let (mut third, elsewhere) = Child::with_agent(peer_config());
    second.kill();
    let region = third.allocate(MIB, "w", 4);
    let peer = agent.peer(&elsewhere).expect("an address");
    peer.write(&batch(&from, &region.remote, MIB), &Options::default()).expect("a healthy write");
}

#[test]
fn a_call_to_a_peer_killed_while_idle_is_not_delayed() {
    let _bound = bounded();
    let Pair { agent: _agent, from, mut child, region, peer, .. } = pair(64 * KIB);
    let moves = batch(&from, &region.remote, 4096);
    peer.write(&moves, &Options::default()).expect("a healthy write");
    child.kill();
    for _ in 0..5 {
        let error = peer.write(&moves, &Options::default()).expect_err("no process listens");
        assert_gone(&error);
    }
}

#[test]
fn a_killed_writer_leaves_no_request_and_no_late_bytes() {
    let _bound = bounded();
    let agent = agent();
    let to = agent.allocate(32 * MIB, Access::WRITE).expect("memory");
    for block in [32 * MIB, 16 * KIB] {
        let mut child = Child::spawn();
        child.start(peer_config());
        let from = child.allocate(32 * MIB, "", 7);
        let writing = command("keep_writing", agent.advertised(), &from, &to.remote(), block);
        child.call(writing);
        eventually("something arrives", || agent.stats().bytes_received > MIB as u64);
        child.kill();
        eventually("the requests of the dead writer end", || {
            let stats = agent.stats();
            (stats.requests_in_flight, stats.sessions, stats.streams) == (0, 0, 0)
        });
        refill(&to, 8);
        thread::sleep(Duration::from_millis(100));
        assert!(content(&to) == Pattern::new(8).bytes(to.len()), "late bytes of a dead writer");
    }
}
