//! Effects of transfers on a target in another process, checked there.

use super::*;
use kvferry::ErrorKind;
use kvferry_testkit::pattern::MARKER;
use kvferry_testkit::process::Child;
use std::thread;

fn digest(child: &mut Child, region: &ChildRegion) -> Value {
    child.call(json!({"op": "digest", "region": region.id}))["digest"].clone()
}

fn assert_quiet(child: &mut Child, region: &ChildRegion, digest: &Value, what: &str) {
    let watched =
        child.call(json!({"op": "watch", "region": region.id, "for_ms": 120, "digest": digest}));
    assert!(watched["changed"] == false, "{what}: {watched}");
}

#[test]
fn a_source_may_be_rewritten_as_soon_as_its_call_returned() {
    let _bound = bounded();
    let agent = agent();
    let (mut child, address) = Child::with_agent(peer_config());
    let region = child.allocate(32 * MIB, "w", 2);
    let from = source(&agent, 32 * MIB, 1);
    let peer = agent.peer(&address).expect("an address");
    for (i, timeout_ms) in [1, 2, 4, 8, 10_000, 3, 10_000].into_iter().enumerate() {
        refill(&from, 1);
        let moves = batch(&from, &region.remote, if i % 2 == 0 { 32 * MIB } else { 8 * KIB });
        let outcome = peer.write(&moves, &within(Duration::from_millis(timeout_ms)));
        from.write_at(0, &vec![MARKER; from.len()]).expect("owned memory");
        thread::sleep(Duration::from_millis(30));
        let held = child.call(json!({"op": "count_bytes", "region": region.id, "byte": MARKER}));
        assert_eq!(held["count"], 0, "after {timeout_ms} ms: {outcome:?}");
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::Deadline, "{error:?}");
        }
    }
}

#[test]
fn no_byte_is_read_and_none_lands_after_a_confirmed_cancel() {
    let _bound = bounded();
    let agent = agent();
    let (mut child, address) = Child::with_agent(peer_config());
    let region = child.allocate(32 * MIB, "w", 2);
    let from = source(&agent, 32 * MIB, 1);
    let peer = agent.peer(&address).expect("an address");
    peer.connect(Duration::from_secs(5)).expect("the peer is there");
    let mut cancelled = 0;
    for us in [0, 200, 600, 1500, 3000, 6000, 9000] {
        refill(&from, 1);
        let transfer =
            peer.write_async(&batch(&from, &region.remote, 16 * KIB), &Options::default());
        thread::sleep(Duration::from_micros(us));
        transfer.cancel();
        let outcome = transfer.wait(Duration::from_secs(10)).expect("a cancel ends it");
        from.write_at(0, &vec![MARKER; from.len()]).expect("owned memory");
        let at_end = digest(&mut child, &region);
        assert_quiet(&mut child, &region, &at_end, &format!("after {outcome:?}"));
        let held = child.call(json!({"op": "count_bytes", "region": region.id, "byte": MARKER}));
        assert_eq!(held["count"], 0, "{outcome:?}");
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error:?}");
            assert_ne!(error.quiesced(), Some(false), "the peer is there: {error:?}");
            cancelled += 1;
        }
    }
    assert!(cancelled > 0, "no cancel came in time, so nothing was tested");
}

#[test]
fn no_byte_lands_after_the_owner_unregistered_the_memory() {
    let _bound = bounded();
    let agent = agent();
    let (mut child, address) = Child::with_agent(peer_config());
    let from = source(&agent, 32 * MIB, 1);
    let peer = agent.peer(&address).expect("an address");
    for (i, ms) in [0, 1, 2, 4, 8].into_iter().enumerate() {
        let region = child.allocate(32 * MIB, "w", 2);
        let block = if i % 2 == 0 { 32 * MIB } else { 16 * KIB };
        let began = Instant::now();
        let transfer = peer.write_async(&batch(&from, &region.remote, block), &Options::default());
        thread::sleep(Duration::from_millis(ms));
        let at_return =
            child.call(json!({"op": "unregister", "region": region.id}))["digest"].clone();
        assert_quiet(&mut child, &region, &at_return, "after unregister returned");
        let outcome = transfer.wait(Duration::from_secs(10)).expect("it ends");
        if let Err(error) = outcome {
            let kinds = [ErrorKind::Revoked, ErrorKind::NotRegistered];
            assert!(kinds.contains(&error.kind()), "{error:?}");
            assert_within(began, Duration::from_secs(3), "a write to memory that was taken back");
        }
        assert_quiet(&mut child, &region, &at_return, "after the write ended");
    }
}

#[test]
fn bad_ranges_are_refused_by_the_target_itself() {
    let _bound = bounded();
    let agent = agent();
    let (mut child, address) = Child::with_agent(peer_config());
    let region = child.allocate(64 * KIB, "rw", 2);
    // The kernel places new mappings right before older ones: unregister the one in between.
    let between = child.allocate(64 * KIB, "rw", 2);
    let read_only = child.allocate(64 * KIB, "r", 2);
    child.call(json!({"op": "unregister", "region": between.id}));
    let from = source(&agent, MIB, 1);
    let peer = agent.peer(&address).expect("an address");
    let end = region.addr + 64 * KIB as u64;
    let forged = |region: &ChildRegion| RemoteRegion {
        len: u64::MAX,
        access: Access::READ_WRITE,
        ..region.remote.clone()
    };
    let to_region = |remote: RemoteRegion, offset: u64, len: u64| {
        let mut batch = Batch::new();
        batch.push(&from, 0, &remote, offset, len).expect("a forgery fits itself");
        batch
    };
    let to_address = |address: u64, len: u64| {
        let mut batch = Batch::new();
        batch.push_to_address(&from, 0, address, len).expect("an address");
        batch
    };
    let mut unknown = forged(&region);
    unknown.id = kvferry::RegionId(4_000_000_000);
    let cases = [
        ("beyond its end", to_region(forged(&region), 64 * KIB as u64, 1), ErrorKind::OutOfBounds),
        ("across its end", to_region(forged(&region), 65_530, 16), ErrorKind::OutOfBounds),
        ("far away", to_region(forged(&region), 1 << 50, 4096), ErrorKind::OutOfBounds),
        ("overflowing", to_region(forged(&region), u64::MAX - 10, 10), ErrorKind::OutOfBounds),
        ("unknown", to_region(unknown, 0, 16), ErrorKind::NotRegistered),
        ("an address after it", to_address(end, 16), ErrorKind::NotRegistered),
        ("an address across its end", to_address(end - 8, 16), ErrorKind::OutOfBounds),
        ("an address before it", to_address(region.addr - 8, 8), ErrorKind::NotRegistered),
        ("the null page", to_address(0, 4096), ErrorKind::NotRegistered),
        ("the end of all addresses", to_address(u64::MAX - 15, 15), ErrorKind::NotRegistered),
    ];
    let (before, protected) = (child.memory(&region), child.memory(&read_only));
    let good = {
        let mut batch = Batch::new();
        batch.push(&from, 4096, &region.remote, 0, 4096).expect("inside");
        batch
    };
    for (what, batch, kind) in &cases {
        for write in [true, false] {
            let outcome = if write {
                peer.write(batch, &Options::default())
            } else {
                peer.read(batch, &Options::default())
            };
            let error = outcome.expect_err(what);
            assert_eq!(error.kind(), *kind, "{what}, write: {write}: {error:?}");
            assert!(child.memory(&region) == before, "{what}: memory was written");
        }
        let began = Instant::now();
        peer.read(&good, &Options::default()).expect("healthy traffic");
        assert_within(began, UNDELAYED, "a healthy read after a refusal");
    }
    let to_protected = to_region(forged(&read_only), 0, 4096);
    let error = peer.write(&to_protected, &Options::default()).expect_err("read-only");
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error:?}");
    assert!(child.memory(&read_only) == protected, "read-only memory was written");
    let stats = child.call(json!({"op": "stats"}));
    assert_eq!(stats["requests_in_flight"], 0, "{stats}");
}
