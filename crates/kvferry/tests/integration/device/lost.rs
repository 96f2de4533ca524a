//! Devices that lose batches: transfers end, and memory is quiet afterwards.

use super::*;

/// Runs until the device has lost a batch of a transfer: a loaded machine may end the session of agents that wait
/// briefly for each other.
fn lost(device: &TestDevice, run: impl Fn() -> Result<(), Error>) -> Error {
    device.slow.lose_next(1);
    loop {
        let outcome = run();
        if device.slow.losing() == 0 {
            return outcome.expect_err("a batch never ends");
        }
    }
}

#[test]
fn a_transfer_whose_device_loses_a_batch_ends_and_leaves_the_memory_in_quarantine() {
    let _bound = Watchdog::new(PATIENCE);
    let brief = Options { timeout: Some(Duration::from_millis(100)), ..Options::default() };
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let [near, far] = [(); 2].map(|()| impatient(kind, Duration::from_millis(500)));
        let peer = peer_of(&near, &far);
        let to = far.allocate(4096, Access::READ_WRITE).expect("memory");
        for (write, blocks) in [(true, true), (true, false), (false, true), (false, false)] {
            let what = format!("{kind}, write: {write}, blocks: {blocks}");
            let ours = TestDevice::new(4096, 1);
            let [lost_region, region] = [(); 2].map(|()| ours.register(&near));
            let run = |region: &Region, options: &Options<'_>| {
                let batch = scattered(region, &to, 8);
                match (write, blocks) {
                    (true, true) => peer.write(&batch, options).map(drop),
                    (true, false) => ended(&peer.write_async(&batch, options)),
                    (false, true) => peer.read(&batch, options).map(drop),
                    (false, false) => ended(&peer.read_async(&batch, options)),
                }
            };
            let error = lost(&ours, || run(&lost_region, &brief));
            assert_eq!(error.quiesced(), Some(false), "{what}: {error}");
            let stages = ours.slow.stages();
            eventually("the other stages are free", || stages.free() == stages.stages() - 1);
            let refused = near.unregister(&lost_region).expect_err("the device may copy");
            assert_eq!(refused.kind(), ErrorKind::Quarantined, "{what}");
            assert!(lost_region.is_quarantined(), "{what}");
            eventually("another transfer of the device", || run(&region, &options()).is_ok());
            near.unregister(&region).expect("nothing copies");
        }
        assert_eq!(near.stats().transfers_in_flight, 0);
    }
}

#[test]
fn i2_a_transfer_that_was_given_up_is_quiet_once_its_device_has_ended_its_copies() {
    let _bound = Watchdog::new(PATIENCE);
    let brief = Options { timeout: Some(Duration::from_millis(100)), ..Options::default() };
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let [near, far] = [(); 2].map(|()| impatient(kind, Duration::from_millis(500)));
        let peer = peer_of(&near, &far);
        let to = far.allocate(4096, Access::READ_WRITE).expect("memory");
        for write in [true, false] {
            let what = format!("{kind}, write: {write}");
            let ours = TestDevice::new(4096, 1);
            let region = ours.register(&near);
            let batch = scattered(&region, &to, 8);
            let start = |options: &Options<'_>| match write {
                true => peer.write_async(&batch, options),
                false => peer.read_async(&batch, options),
            };
            ours.slow.hold();
            // On a loaded machine, a brief transfer may end before the device has its copies.
            let given_up = loop {
                let transfer = start(&brief);
                let error = ended(&transfer).expect_err("the device does not go on");
                if ours.slow.pending() > 0 {
                    assert_eq!(error.quiesced(), Some(false), "{what}: {error}");
                    break transfer;
                }
                assert!(transfer.is_quiet(), "{what}: {error}");
            };
            assert!(!given_up.is_quiet(), "{what}: the device has not ended its copies");
            ours.slow.release();
            eventually("its copies have ended", || given_up.is_quiet());
            assert_eq!(ours.slow.pending(), 0, "{what}");
            near.unregister(&region).expect("nothing copies");
        }
    }
}

#[test]
fn a_write_whose_peer_s_device_loses_a_batch_ends() {
    let _bound = Watchdog::new(PATIENCE);
    let brief = Options { timeout: Some(Duration::from_millis(100)), ..Options::default() };
    let [near, far] = [(); 2].map(|()| impatient(TransportKind::TCP, Duration::from_millis(500)));
    let from = near.allocate(4096, Access::NONE).expect("memory");
    let theirs = TestDevice::new(4096, 1);
    let region = theirs.register(&far);
    let peer = peer_of(&near, &far);
    let error = lost(&theirs, || peer.write(&scattered(&from, &region, 8), &brief).map(drop));
    assert_eq!(error.quiesced(), Some(false), "{error}");
    let refused = far.unregister(&region).expect_err("the device may copy");
    assert_eq!(refused.kind(), ErrorKind::Quarantined);
    near.unregister(&from).expect("nothing reads it");
}

#[test]
fn i9_a_call_whose_device_has_lost_its_batches_ends_after_its_agent() {
    let _bound = Watchdog::new(PATIENCE);
    // As much as two shares take frames of.
    const LEN: usize = 32 << 20;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        for (write, streams) in [(true, 1), (true, 2), (false, 1), (false, 2)] {
            let what = format!("{kind}, write: {write}, streams: {streams}");
            let [near, far] = [(); 2].map(|()| impatient(kind, Duration::from_millis(500)));
            let peer = peer_of(&near, &far);
            // Of six, one share takes up to four.
            let ours = TestDevice::with_stages(LEN, 1, 3 * streams);
            let to = far.allocate(LEN, Access::READ_WRITE).expect("memory");
            let mut batch = Batch::new();
            batch.set_after(After::host());
            batch.push(&ours.register(&near), 0, &to.remote(), 0, LEN as u64).expect("inside");
            let options = Options { streams: Some(streams), ..options() };
            // A stage that is taken may still wait for the peer's bytes.
            ours.slow.lose_next(usize::MAX);
            let lost = || usize::MAX - ours.slow.losing();
            // A loaded machine may end the session of agents that wait briefly for each other.
            let run = || loop {
                let outcome = match write {
                    true => peer.write(&batch, &options),
                    false => peer.read(&batch, &options),
                };
                if lost() > 0 {
                    return outcome.expect_err("a batch never ends");
                }
            };
            thread::scope(|scope| {
                let call = scope.spawn(run);
                // A new session of TCP has one lane, so one share.
                let least = if kind == TransportKind::LOCAL { 3 * streams } else { 1 };
                eventually("the device has lost batches of every share", || {
                    lost() >= least || call.is_finished()
                });
                near.shutdown();
                let error = call.join().expect("no panic");
                assert_eq!(error.quiesced(), Some(false), "{what}: {error}");
            });
        }
    }
}
