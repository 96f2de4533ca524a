//! The transport `local`: peers of the same host, whose memory is copied directly.

use super::unauthenticated::RawPeer;
use super::*;
use kvferry::TransportKind;
use kvferry_proto::{Incarnation, Session, SessionConfig, Timestamp};
use kvferry_sys::map::Mapping;
use kvferry_testkit::network::Network;
use kvferry_testkit::process::Resources;
use kvferry_testkit::user::as_another_user;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

const LOCAL: &str = "local,tcp";

fn near() -> Agent {
    agent_over(LOCAL)
}

fn far() -> (Child, String) {
    Child::with_agent(peer_config_over(LOCAL))
}

/// A pair over `local`. The peer's memory is not mapped here, but copied to by process number.
fn local_pair(len: usize) -> Pair {
    local_pair_within(len, NEVER)
}

/// The same, with this silence limit on both sides.
fn local_pair_within(len: usize, silence: Duration) -> Pair {
    let (mut child, address) = Child::with_agent(peer_config_with(LOCAL, silence));
    let region = child.allocate_private(len, "rw", 2);
    pair_with(agent_with(LOCAL, silence), child, address, region)
}

/// Memory of a child that other processes can map, or that they can't.
fn allocate(child: &mut Child, is_private: bool, len: usize) -> ChildRegion {
    if is_private { child.allocate_private(len, "rw", 2) } else { child.allocate(len, "rw", 2) }
}

/// The mappings of a peer's memory in this process.
fn mapped() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("a list");
    let lines = maps.lines().filter(|line| line.contains("memfd:kvferry-region"));
    lines.map(str::to_owned).collect()
}

/// Registered memory of this process that no other process can map.
struct Private {
    map: Mapping,
    region: Region,
}

fn private(agent: &Agent, len: usize, access: Access, seed: u64) -> Private {
    let map = Mapping::anonymous(len).expect("memory");
    map.span(0, len).copy_from(&Pattern::new(seed).bytes(len));
    // SAFETY: the mapping lives until the end of the test, which shuts the agent down or
    // unregisters the region first, and is only copied to and from.
    let region = unsafe { agent.register(map.as_ptr(), len, access) }.expect("no overlap");
    Private { map, region }
}

fn content_of(memory: &Private) -> Vec<u8> {
    let mut bytes = vec![0; memory.map.len()];
    memory.map.span(0, bytes.len()).copy_to(&mut bytes);
    bytes
}

#[test]
fn private_and_shared_memory_are_written_and_read_in_blocks_of_every_size() {
    let _bound = bounded();
    let agent = near();
    let (mut child, address) = far();
    let peer = agent.peer(&address).expect("an address");
    let len = 9 * MIB;
    for (is_private, seed) in [(true, 1), (false, 2)] {
        let region = allocate(&mut child, is_private, len);
        let mut seed = seed * 10;
        for block in [512, 4 * KIB, 96 * KIB, len] {
            // Twice: the child's shared memory may be mapped after the first round.
            for _ in 0..2 {
                seed += 1;
                let from = source(&agent, len, seed);
                let moved = peer
                    .write(&batch(&from, &region.remote, block), &Options::default())
                    .expect("done");
                assert_eq!(moved.transport, Some(TransportKind::LOCAL));
                let to = private(&agent, len, Access::NONE, 0);
                peer.read(&batch(&to.region, &region.remote, block), &Options::default())
                    .expect("done");
                let whole = len / block * block;
                assert!(content_of(&to)[..whole] == Pattern::new(seed).bytes(len)[..whole]);
                agent.unregister(&to.region).expect("registered");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

#[test]
fn i2_memory_that_a_stopped_process_may_write_is_quarantined_until_it_is_seen_to_be_out() {
    let _bound = bounded();
    for by_death in [false, true] {
        // `unregister` waits so long for the stopped process.
        let agent = agent_with(LOCAL, SILENCE);
        let mut to = private(&agent, 32 * MIB, Access::WRITE, 0);
        let mut child = Child::spawn();
        child.start(peer_config_over(LOCAL));
        let from = child.allocate(32 * MIB, "", 7);
        let writing = |to: &Private| {
            command("keep_writing", agent.advertised(), &from, &to.region.remote(), 256 * KIB)
        };
        let writer = child.call(writing(&to))["writer"].clone();
        // Stop the writer during a copy. It copies most of the time.
        let (mut tries, mut before) = (0, 0);
        let error = loop {
            tries += 1;
            assert!(tries < 50, "never stopped during a copy");
            eventually("something arrives", || agent.stats().bytes_received > before);
            child.stop();
            match agent.unregister(&to.region) {
                Ok(()) => {
                    child.resume();
                    to = private(&agent, 32 * MIB, Access::WRITE, 0);
                    before = agent.stats().bytes_received;
                    child.call(writing(&to));
                }
                Err(error) => {
                    break error;
                }
            }
        };
        println!("stopped during a copy at try {tries}");
        assert_eq!(error.kind(), ErrorKind::Quarantined, "{error}");
        assert!(error.to_string().contains("peer=peer"), "{error}");
        assert!(to.region.is_quarantined() && !to.region.is_registered());
        assert_eq!(agent.stats().regions_quarantined, 1);
        // SAFETY: the call is refused; the memory lives in any case.
        let again = unsafe { agent.register(to.map.as_ptr(), MIB, Access::READ) };
        assert_eq!(again.expect_err("in quarantine").kind(), ErrorKind::Quarantined);
        if by_death {
            child.kill();
        } else {
            child.resume();
        }
        eventually("the quarantine ends", || agent.stats().regions_quarantined == 0);
        assert!(!to.region.is_quarantined());
        agent.unregister(&to.region).expect("the quarantine has ended");
        // No byte lands afterwards.
        to.map.span(0, 32 * MIB).copy_from(&vec![0x5a; 32 * MIB]);
        thread::sleep(Duration::from_millis(50));
        assert!(content_of(&to).iter().all(|b| *b == 0x5a), "something landed after the fence");
        // SAFETY: as in `private`.
        unsafe { agent.register(to.map.as_ptr(), MIB, Access::READ) }.expect("free again");
        if !by_death {
            assert!(!child.stop_writing(&writer).is_empty(), "every write was done");
        }
        agent.shutdown();
    }
}

#[test]
fn i2_nothing_lands_after_unregister_returned_while_two_processes_write_and_read() {
    let _bound = bounded();
    let agent = near();
    let mut children: Vec<_> = (0..2)
        .map(|_| {
            let mut child = Child::spawn();
            child.start(peer_config_over(LOCAL));
            let from = child.allocate(4 * MIB, "", 7);
            (child, from)
        })
        .collect();
    for round in 0..40 {
        let to = private(&agent, 4 * MIB, Access::READ_WRITE, 0);
        let before = agent.stats().bytes_received;
        let writers: Vec<_> = children
            .iter_mut()
            .map(|(child, from)| {
                let remote = to.region.remote();
                let block = [512, 4 * KIB, 4 * MIB][round % 3];
                child.call(command("keep_writing", agent.advertised(), from, &remote, block))
                    ["writer"]
                    .clone()
            })
            .collect();
        eventually("something arrives", || agent.stats().bytes_received > before);
        agent.unregister(&to.region).expect("no process is stopped");
        to.map.span(0, 4 * MIB).copy_from(&vec![0x5a; 4 * MIB]);
        thread::sleep(Duration::from_millis(3));
        assert!(content_of(&to).iter().all(|b| *b == 0x5a), "round {round}: something landed");
        for ((child, _), writer) in children.iter_mut().zip(writers) {
            child.stop_writing(&writer);
        }
    }
}

#[test]
fn a_killed_peer_fails_writes_at_once_and_a_restarted_peer_is_reconnected() {
    let _bound = bounded();
    let agent = near();
    let from = source(&agent, 16 * MIB, 1);
    let port = KeptPort::new();
    let mut config = peer_config_over(LOCAL);
    config["listen"] = json!(port.address());
    let (mut child, address) = Child::with_agent(config.clone());
    for is_private in [true, false] {
        let region = allocate(&mut child, is_private, 16 * MIB);
        let peer = agent.peer(&address).expect("an address");
        let moves = batch(&from, &region.remote, 64 * KIB);
        peer.write(&moves, &Options::default()).expect("a healthy write");
        let error = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                loop {
                    if let Err(error) = peer.write(&moves, &Options::default()) {
                        return error;
                    }
                }
            });
            thread::sleep(Duration::from_millis(30));
            child.kill();
            writer.join().expect("writers don't panic")
        });
        let gone = [ErrorKind::PeerReset, ErrorKind::PeerClosed, ErrorKind::Unreachable];
        assert!(gone.contains(&error.kind()), "{error:?}");
        assert_ne!(error.quiesced(), Some(false), "the copier is ours: {error:?}");
        // A restarted peer at the same address.
        let (second, again) = Child::with_agent(config.clone());
        assert_eq!(again, address);
        child = second;
        eventually("the death is noticed", || peer.transport().is_none());
        let stale =
            peer.write(&moves, &Options::default()).expect_err("a handle from before the restart");
        assert_eq!(stale.kind(), ErrorKind::StaleIncarnation, "{stale:?}");
        let fresh = child.allocate_private(16 * MIB, "rw", 2);
        peer.write(&batch(&from, &fresh.remote, 64 * KIB), &Options::default())
            .expect("connected again");
        assert!(child.matches(&fresh, 1));
    }
}

#[test]
fn writes_to_a_stopped_peer_succeed_and_it_finds_the_bytes_when_it_resumes() {
    let _bound = bounded();
    let Pair { agent: _agent, from, mut child, region, peer, .. } = local_pair_within(MIB, SILENCE);
    let moves = batch(&from, &region.remote, 4096);
    // A process that does not run for a part of the limit ends the session, once.
    eventually("a write while its memory is there and it does not run", || {
        child.resume();
        let is_there = peer.connect(PATIENCE).is_ok();
        child.stop();
        is_there && peer.write(&moves, &Options::default()).is_ok()
    });
    // A notification needs an answer of the peer.
    let note = kvferry::Notification::new("n", "m");
    let options = Options { notify: Some(note), ..within(NEVER) };
    let error = peer.write(&moves, &options).expect_err("it does not answer");
    assert_eq!(error.kind(), ErrorKind::PeerSilent, "{error:?}");
    thread::sleep(SILENCE);
    child.resume();
    assert!(child.matches(&region, 1));
    refill(&from, 3);
    eventually("a call to a resumed peer", || peer.write(&moves, &Options::default()).is_ok());
    assert!(child.matches(&region, 3));
    let names = child.call(json!({"op": "notifications"}));
    assert_eq!(
        names["names"],
        json!([]),
        "a notification that was reported as failed is not delivered later"
    );
}

#[test]
fn a_cancelled_write_is_quiesced_at_once() {
    let _bound = bounded();
    let Pair { agent: _agent, from, mut child, region, peer, .. } = local_pair(64 * MIB);
    peer.connect(PATIENCE).expect("it is there");
    let mut cancelled = 0;
    let delays_us = [0, 200, 1_000, 4_000, 8_000];
    // All of them, and then again until two writes were in the middle.
    for (tried, delay_us) in delays_us.into_iter().cycle().take(6 * delays_us.len()).enumerate() {
        if tried >= delays_us.len() && cancelled >= 2 {
            break;
        }
        refill(&from, 1);
        let transfer =
            peer.write_async(&batch(&from, &region.remote, 16 * KIB), &Options::default());
        thread::sleep(Duration::from_micros(delay_us));
        transfer.cancel();
        let outcome = transfer.wait(PATIENCE).expect("it ends");
        from.write_at(0, &vec![MARKER; from.len()]).expect("owned");
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error:?}");
            assert_eq!(error.quiesced(), Some(true), "{error:?}");
            cancelled += 1;
        }
        let digest = child.digest(&region);
        let changed = child.changes(&region, &digest, Duration::from_millis(50));
        assert!(!changed, "bytes landed after the outcome");
        let held = child.memory(&region);
        assert!(!held.contains(&MARKER), "the source was read after the outcome");
        child.fill(&region, 2);
    }
    assert!(cancelled >= 2, "only {cancelled} were caught in the middle");
}

#[test]
fn i9_a_batch_of_tiny_pieces_can_be_interrupted() {
    const PIECE: usize = 8;
    const PIECES: usize = 3_000_000;
    let _bound = bounded();
    let Pair { agent, region, peer, child: _child, .. } = local_pair(64 * KIB);
    let from = private(&agent, 64 * KIB, Access::NONE, 1);
    let mut tiny = Batch::with_capacity(PIECES);
    // Not adjacent: adjacent pieces are copied as one.
    for at in (0..PIECES).map(|i| (2 * i * PIECE % (64 * KIB)) as u64) {
        tiny.push(&from.region, at, &region.remote, at, PIECE as u64).expect("inside both");
    }
    let asked = std::sync::atomic::AtomicUsize::new(0);
    // The first call may come before anything is copied.
    let interrupt = || asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 1;
    // One stream: the calling thread copies alone.
    let options = Options { interrupt: Some(&interrupt), streams: Some(1), ..Options::default() };
    let error = peer.write(&tiny, &options).expect_err("it is interrupted");
    assert_eq!(error.kind(), ErrorKind::Interrupted, "{error:?}");
    agent.unregister(&from.region).expect("registered");
}

#[test]
fn mapped_memory_is_unmapped_when_its_owner_unregisters_it() {
    let _bound = bounded();
    let agent = near();
    let from = source(&agent, 2 * MIB, 1);
    let (mut child, address) = far();
    let peer = agent.peer(&address).expect("an address");
    let before = mapped();
    let region = child.allocate(2 * MIB, "rw", 2);
    eventually("the child's memory is mapped here", || {
        peer.write(&batch(&from, &region.remote, MIB), &Options::default()).expect("done");
        mapped().len() > before.len()
    });
    child.call(json!({"op": "release", "region": region.id}));
    eventually("the mapping is gone", || mapped() == before);
    let error = peer
        .write(&batch(&from, &region.remote, MIB), &Options::default())
        .expect_err("unregistered");
    assert_eq!(error.kind(), ErrorKind::NotRegistered, "{error:?}");
}

/// The file of the mapping at an address of a process: its inode, unique while a process maps it.
#[cfg(debug_assertions)]
fn inode_at(pid: u32, addr: u64) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process runs");
    let holds_addr = |line: &&str| {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let (from, to) = range.expect("a range");
        let number = |hex| u64::from_str_radix(hex, 16).expect("an address");
        (number(from)..number(to)).contains(&addr)
    };
    let line = maps.lines().find(holds_addr).expect("the address is mapped");
    line.split_whitespace().nth(4).and_then(|inode| inode.parse().ok()).expect("an inode")
}

/// True if this process has a descriptor of the file.
#[cfg(debug_assertions)]
fn is_open(inode: u64) -> bool {
    use std::os::unix::fs::MetadataExt;
    let open = std::fs::read_dir("/proc/self/fd").expect("a list");
    // Other threads close some meanwhile.
    let files = open.flatten().filter_map(|entry| std::fs::metadata(entry.path()).ok());
    files.map(|file| file.ino()).any(|ino| ino == inode)
}

#[cfg(debug_assertions)]
#[test]
fn an_agent_serves_others_while_the_memory_of_a_peer_that_died_is_unmapped() {
    // Enough that another thread unmaps it.
    const LEN: usize = 8 * MIB;
    let _bound = bounded();
    let agent = near();
    let from = source(&agent, LEN, 1);
    let to = filled(&agent, MIB, Access::READ_WRITE, 2);
    let (mut child, address) = far();
    let peer = agent.peer(&address).expect("an address");
    let region = child.allocate(LEN, "rw", 2);
    let inode = inode_at(child.pid(), region.addr);
    let is_mapped = || {
        let inode = inode.to_string();
        mapped().iter().any(|line| line.split_whitespace().nth(4) == Some(inode.as_str()))
    };
    eventually("the child's memory is mapped here", || {
        peer.write(&batch(&from, &region.remote, MIB), &Options::default()).expect("done");
        is_mapped()
    });
    assert!(is_open(inode));
    let (mut third, _) = far();
    let bytes = third.allocate(MIB, "", 3);
    let held = kvferry_sys::unmap::HOLD.lock();
    child.kill();
    // The descriptor is closed right before the mapping is given up.
    eventually("the control thread gives the memory up", || !is_open(inode));
    third.call(command("write", agent.advertised(), &bytes, &to.remote(), 4096));
    assert!(content(&to) == Pattern::new(3).bytes(MIB));
    assert!(is_mapped(), "the control thread has unmapped it");
    drop(held);
    eventually("the memory is unmapped", || !is_mapped());
}

#[test]
fn read_only_memory_is_mapped_read_only() {
    let _bound = bounded();
    let agent = near();
    let (mut child, address) = far();
    let peer = agent.peer(&address).expect("an address");
    let to = private(&agent, 2 * MIB, Access::NONE, 0);
    assert_eq!(mapped(), Vec::<String>::new());
    let region = child.allocate(2 * MIB, "r", 2);
    let read = || peer.read(&batch(&to.region, &region.remote, MIB), &Options::default());
    eventually("the child's memory is mapped here", || {
        read().expect("done");
        !mapped().is_empty()
    });
    assert!(mapped().iter().all(|line| line.contains(" r--s ")), "{:?}", mapped());
    read().expect("through the mapping");
    assert!(content_of(&to) == Pattern::new(2).bytes(2 * MIB));
    let e = peer
        .write(&batch(&to.region, &region.remote, MIB), &Options::default())
        .expect_err("the region is read-only");
    assert_eq!(e.kind(), ErrorKind::AccessDenied, "{e:?}");
    agent.unregister(&to.region).expect("registered");
}

#[test]
fn ended_local_sessions_leak_no_descriptor() {
    let _bound = bounded();
    let agent = near();
    let (child, address) = far();
    let peer = agent.peer(&address).expect("an address");
    for _ in 0..3 {
        let summary = peer.connect(PATIENCE).expect("there");
        assert_eq!(summary.transport, TransportKind::LOCAL);
        peer.disconnect();
    }
    let mine = std::process::id();
    let fds = |pid| Resources::of(pid).descriptors;
    // Those that are still being closed are in it.
    let before = comes_to_rest(|| (fds(mine), fds(child.pid())));
    for _ in 0..50 {
        peer.connect(PATIENCE).expect("there");
        peer.disconnect();
    }
    eventually("descriptors are closed", || fds(mine) <= before.0 && fds(child.pid()) <= before.1);
}

const SECRET: &str = "a secret of both agents";

/// Starts a child after `prepare`; asserts that transfers fall back to tcp in at least one direction
/// and that the reason contains each of `words`.
fn falls_back(what: &str, prepare: impl Fn(&mut Child), words: &[&str]) {
    // Without a secret, an agent refuses another user's connections.
    let transports = Transports::parse(LOCAL).expect("names");
    let builder = Agent::builder().silence(NEVER).transports(transports);
    let agent = builder.secret(SECRET.as_bytes()).start().expect("an agent starts");
    let mut child = Child::spawn();
    prepare(&mut child);
    let mut config = peer_config_over(LOCAL);
    config["secret"] = json!(SECRET);
    let address = child.start(config);
    let region = child.allocate_private(MIB, "rw", 2);
    let from = child.allocate_private(MIB, "", 3);
    let peer = agent.peer(&address).expect("an address");
    // From this process to the child, and back: at least one direction is refused.
    let summary = peer.connect(PATIENCE).expect("there is tcp");
    let back = child.call(json!({
        "op": "connect", "peer": agent.advertised(), "timeout_ms": 60_000,
    }));
    println!("{what}: {:?}; the other way {}", summary.fallback, back["fallback"]);
    let ours = private(&agent, MIB, Access::READ_WRITE, 1);
    let moved = peer
        .write(&batch(&ours.region, &region.remote, 4096), &Options::default())
        .expect("local or tcp");
    assert!(child.matches(&region, 1), "{what}");
    child.call(command("write", agent.advertised(), &from, &ours.region.remote(), 4096));
    assert!(content_of(&ours) == Pattern::new(3).bytes(MIB), "{what}");
    let mut said = Vec::new();
    if summary.transport == TransportKind::TCP {
        assert_eq!(moved.transport, Some(TransportKind::TCP), "{what}");
        said.push(summary.fallback.expect("a reason"));
    }
    if back["transport"] == "tcp" {
        said.push(back["fallback"].as_str().expect("a reason").to_owned());
    }
    assert!(!said.is_empty(), "{what}: nothing fell back");
    for word in words {
        assert!(said.iter().any(|text| text.contains(word)), "{what}: {word:?} in {said:?}");
    }
    agent.shutdown();
}

#[test]
fn a_seccomp_filter_falls_back_to_tcp_and_is_named() {
    let _bound = bounded();
    let deny = |child: &mut Child| drop(child.call(json!({"op": "deny_process_vm"})));
    falls_back("a seccomp filter", deny, &["seccomp", "process_vm_readv"]);
}

#[test]
fn another_user_falls_back_to_tcp_and_is_named() {
    let _bound = bounded();
    if kvferry_sys::unix::user() != 0 {
        println!("SKIPPED: another user: only root can start a process of another user");
        return;
    }
    let become_another_user = |child: &mut Child| {
        assert_eq!(child.call(json!({"op": "become_user", "uid": 65_534}))["done"], true);
    };
    falls_back("another user", become_another_user, &["another user"]);
}

#[test]
fn i11_an_agent_on_loopback_without_a_secret_refuses_another_user_of_the_host() {
    let _bound = bounded();
    if as_another_user("another user that connects", || ()).is_none() {
        return;
    }
    // The agent's process is another user's, and this one the superuser's, which may come in anyway.
    let mut child = Child::spawn();
    assert_eq!(child.call(json!({"op": "become_user", "uid": 65_534}))["done"], true);
    let address = child.start(peer_config());
    let root = SessionConfig::new(Incarnation(0x57), "root");
    assert!(RawPeer::call(&address, root).is_ok());
    let ours = agent();
    // The child's own check would have it send nothing.
    let hello = || {
        let mut stream = TcpStream::connect(ours.local_addr()).expect("the agent listens");
        let config = SessionConfig::new(Incarnation(0x58), "another user");
        let mut session = Session::initiator(config, None, [7; 32], Timestamp::from_nanos(1));
        let hello = session.poll_transmit().expect("a hello");
        stream.write_all(&hello).expect("a fresh connection");
        stream.set_read_timeout(Some(PATIENCE / 2)).expect("a socket");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("the agent ends the connection");
        answer
    };
    let answer = as_another_user("another user that connects", hello).expect("as before");
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("refused") && text.contains("another user"), "{text:?}");
    assert_eq!((ours.stats().sessions_accepted, ours.stats().handshakes_failed), (0, 1));
}

#[test]
fn i11_an_agent_on_loopback_without_a_secret_sends_nothing_to_another_user_of_the_host() {
    let _bound = bounded();
    let listen = || TcpListener::bind("127.0.0.1:0").expect("a port");
    let Some(listener) = as_another_user("another user that listens", listen) else { return };
    let address = listener.local_addr().expect("bound").to_string();
    let near = agent();
    let peer = near.peer(&address).expect("an address");
    let refusal = peer.connect(PATIENCE).expect_err("it is another user's");
    assert_eq!(refusal.kind(), ErrorKind::AccessDenied, "{refusal}");
    let mut sent = Vec::new();
    let (mut accepted, _) = listener.accept().expect("it was called");
    accepted.set_read_timeout(Some(PATIENCE / 2)).expect("a socket");
    // The end of the connection, or its reset.
    let _ = accepted.read_to_end(&mut sent);
    assert!(sent.is_empty(), "{sent:x?}");
    assert_eq!((near.stats().sessions_opened, near.stats().handshakes_failed), (0, 1));
    // The secret decides where there is one.
    let mut child = Child::spawn();
    assert_eq!(child.call(json!({"op": "become_user", "uid": 65_534}))["done"], true);
    let mut config = peer_config();
    config["secret"] = json!(SECRET);
    let address = child.start(config);
    let transports = Transports::parse("tcp").expect("a name");
    let builder = Agent::builder().silence(NEVER).transports(transports);
    let proven = builder.secret(SECRET.as_bytes()).start().expect("an agent starts");
    proven.peer(&address).expect("an address").connect(PATIENCE / 2).expect("the same secret");
}

/// Whether Yama lets only parents attach here, and this process is subject to it.
fn is_under_yama(what: &str) -> bool {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let subject = scope.trim() == "1" && kvferry_sys::unix::user() != 0;
    if !subject {
        println!(
            "SKIPPED: {what}: needs a kernel with kernel.yama.ptrace_scope=1 and a user other than \
             root; `make test-yama` boots one"
        );
    }
    subject
}

#[test]
fn yama_falls_back_to_tcp_except_for_parents_and_is_named() {
    let _bound = bounded();
    if is_under_yama("Yama") {
        falls_back("Yama", |_| {}, &["ptrace_scope is 1", "KVFERRY_PTRACER_ANY=1"]);
    }
}

#[test]
fn a_process_that_lets_any_process_attach_is_reached_under_yama() {
    let _bound = bounded();
    if !is_under_yama("ptracer_any under Yama") {
        return;
    }
    let builder = Agent::builder().name("parent").setting("ptracer_any", true);
    let agent = builder.start().expect("an agent starts");
    let ours = private(&agent, MIB, Access::READ_WRITE, 1);
    let mut child = Child::spawn();
    child.start(peer_config_over("local"));
    let from = child.allocate_private(MIB, "", 3);
    child.call(command("write", agent.advertised(), &from, &ours.region.remote(), 4096));
    assert!(content_of(&ours) == Pattern::new(3).bytes(MIB));
    agent.shutdown();
}

#[test]
fn shared_memory_is_reached_even_where_copying_by_number_is_refused() {
    let _bound = bounded();
    let agent = near();
    let to = agent.allocate(MIB, Access::READ_WRITE).expect("memory");
    let mut child = Child::spawn();
    child.call(json!({"op": "deny_process_vm"}));
    child.start(peer_config_over("local"));
    let from = child.allocate(MIB, "", 5);
    let write = command("write", agent.advertised(), &from, &to.remote(), 4096);
    eventually("the memory is mapped in the child", || child.try_call(write.clone()).is_ok());
    assert!(content(&to) == Pattern::new(5).bytes(MIB));
    // `local` alone can't reach private memory here; the error says so.
    let own = private(&agent, MIB, Access::READ_WRITE, 1);
    let write = command("write", agent.advertised(), &from, &own.region.remote(), 4096);
    let refusal = child.try_call(write).expect_err("local is the only transport");
    assert_eq!(refusal.kind, "unsupported", "{refusal:?}");
    agent.shutdown();
}

#[test]
fn another_network_namespace_falls_back_to_tcp_and_is_named() {
    let _bound = bounded();
    let Some(network) = Network::or_skip("local between two network namespaces") else { return };
    let mut config = peer_config_over(LOCAL);
    // Checksums alone would make it use tcp.
    config["checksum"] = json!("off");
    let mut writer = Child::spawn_in(&network.near);
    config["listen"] = json!(format!("{}:0", Network::NEAR));
    writer.start(config.clone());
    let mut target = Child::spawn_in(&network.far);
    config["listen"] = json!(format!("{}:0", Network::FAR));
    let address = target.start(config);
    let summary = writer.call(json!({"op": "connect", "peer": address, "timeout_ms": 60_000}));
    assert_eq!(summary["transport"], "tcp");
    let fallback = summary["fallback"].as_str().expect("a reason");
    assert!(fallback.contains("another network namespace"), "{fallback}");
}
