//! Puts of blocks whose lock in the index another process holds.

use super::*;
use kvferry_sys::sync::Mutex;

#[test]
fn a_block_whose_lock_a_stopped_process_holds_is_not_written_again_with_each_put_behind_it() {
    let bench = bench("contended");
    let (store, kv) = bench.with_host();
    let (other, _) = bench.open(&bench.options());
    let contended = prompt(1, 1);
    let key = kv.keys(&contended).expect("a hash")[0];
    let held = other.inner().core.member.hold_stripe(&key);
    let recording = Recording::start(&bench.folder);
    let began = Instant::now();
    bench.put(&kv, 0, &contended);
    let bytes = bench.memory(0, 1)[0].to_vec().expect("registered");
    until("it is tried", || store.stats().unwritten_blocks == 1);
    for block in 100..130 {
        let new = prompt(block, 1);
        bench.put(&kv, 1, &new);
        until("it is on the disk", || on_disk(&kv, &new) == 1);
    }
    let is_of_it = |it: &Event| match it {
        Event::Begin(_, Op::Write { pieces, .. }) => {
            pieces.iter().any(|(_, piece)| piece.starts_with(&bytes))
        }
        _ => false,
    };
    let tries = recording.take().into_iter().filter(is_of_it).count();
    // It is tried again every second, however long the puts take.
    let most = 10.max(5 + began.elapsed().as_secs());
    assert!(tries >= 1 && (tries as u64) < most, "{tries} times");
    assert!(store.sync().is_err());
    drop(held);
    store.sync().expect("it is tried at once");
    assert_eq!(on_disk(&kv, &contended), 1);
}

#[test]
fn a_put_that_may_wait_waits_for_the_lock_of_a_block_until_the_store_is_closed() {
    let _watchdog = Watchdog::new(PATIENCE);
    let bench = bench("lock-waits");
    let (store, kv) = bench.open(&bench.options().put_wait(HOUR));
    let (other, _) = bench.open(&bench.options());
    let contended = |block| {
        let key = kv.keys(&prompt(block, 1)).expect("a hash")[0];
        other.inner().core.member.hold_stripe(&key)
    };
    // A put that has tried again, and has not ended.
    let put = |block| {
        let tries = kv.store.waits.lock_tries.load(Relaxed);
        let put = kv
            .put_async(&prompt(block, 1), 0, &bench.memory(0, 1), Retain::default(), Duration::ZERO)
            .expect("a put");
        until("it waits for the lock", || {
            assert!(put.outcome().is_none(), "it has ended");
            kv.store.waits.lock_tries.load(Relaxed) > tries
        });
        put
    };
    let held = contended(1);
    let stored = put(1);
    drop(held);
    let outcome = stored.wait(Some(PATIENCE)).expect("it ends");
    assert!(matches!(*outcome, Ok(Put { stored: 1, refused: 0, .. })), "{outcome:?}");
    let held = contended(2);
    let refused = put(2);
    store.close();
    let outcome = refused.outcome().expect("carried out before the close");
    assert!(matches!(*outcome, Ok(Put { refused_contended: 1, .. })), "{outcome:?}");
    drop(held);
}

#[test]
fn a_sync_waits_for_the_lock_of_a_block_in_host_memory() {
    let _watchdog = Watchdog::new(PATIENCE);
    let bench = bench("lock-sync");
    let (store, kv) = bench.with_host();
    let (other, _) = bench.open(&bench.options());
    let key = kv.keys(&prompt(1, 1)).expect("a hash")[0];
    let held = Mutex::new(Some(other.inner().core.member.hold_stripe(&key)));
    bench.put(&kv, 0, &prompt(1, 1));
    until("it is tried", || store.stats().unwritten_blocks == 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            until("a sync tries again", || kv.store.waits.lock_tries.load(Relaxed) > 0);
            drop(held.lock().take());
        });
        // One whose time is over before the lock is free fails.
        until("a sync", || store.sync().is_ok());
    });
    assert_eq!((on_disk(&kv, &prompt(1, 1)), store.stats().unwritten_blocks), (1, 0));
    store.close();
}
