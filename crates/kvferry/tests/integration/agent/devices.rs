//! Devices that hang or panic.

use super::*;

#[test]
fn unregister_of_memory_whose_device_hangs_ends_as_quarantined_after_the_silence_limit() {
    let _bound = bounded();
    let near = agent();
    let far = Agent::builder().silence(Duration::from_secs(1)).start().expect("an agent");
    let (device, to) = held_device(&far, 64 * KIB);
    let writing = held_write(&near, &far, &device, &to);
    for _ in 0..2 {
        let error = far.unregister(&to).expect_err("the device hangs");
        assert_eq!(error.kind(), ErrorKind::Quarantined, "{error:?}");
        assert!(to.is_quarantined());
    }
    device.release();
    while to.is_quarantined() {
        thread::sleep(Duration::from_millis(1));
    }
    far.unregister(&to).expect("the copy has ended");
    drop(writing);
}

/// Results of the calls, each with true if the device still copied when the call returned. The first call has taken the agent's only region out
/// of the table before the others begin.
fn ended_late<T: Send>(
    agent: &Agent,
    device: &SlowMemory,
    calls: &[&(dyn Fn() -> T + Sync)],
) -> Vec<(T, bool)> {
    thread::scope(|scope| {
        let running: Vec<_> = calls
            .iter()
            .map(|call| {
                let (begins, begun) = mpsc::channel();
                let running = scope.spawn(move || {
                    begins.send(()).expect("it is waited for");
                    (call(), device.pending() > 0)
                });
                begun.recv().expect("it begins");
                eventually("the first call takes the region out", || agent.stats().regions == 0);
                running
            })
            .collect();
        // Long enough for a call that doesn't wait to end early.
        thread::sleep(Duration::from_millis(50));
        device.release();
        running.into_iter().map(|call| call.join().expect("no panic")).collect()
    })
}

#[test]
fn a_shutdown_from_a_callback_returns_at_once_and_the_next_call_waits_for_its_end() {
    let _bound = bounded();
    let (near, far) = (one_thread_agent(), one_thread_agent());
    // The shutdown of `far` lasts until its device has ended this copy.
    let (slow, to) = held_device(&far, 64 * KIB);
    let _write = held_write(&near, &far, &slow, &to);
    let (device, back) = held_device(&near, 64 * KIB);
    let transfer = held_write(&far, &near, &device, &back);
    let (sender, returned) = mpsc::channel();
    let stopping = far.clone();
    let (waiting, region) = (slow.clone(), to.clone());
    transfer.on_end(move |_| {
        stopping.shutdown();
        stopping.shutdown();
        let refused =
            [kind(stopping.allocate(4096, Access::READ)), kind(stopping.unregister(&region))];
        // The memory is not its owner's yet.
        let is_held = region.is_in_use();
        sender.send((waiting.pending(), refused, is_held)).expect("the test waits");
    });
    device.release();
    let returned = returned.recv_timeout(PATIENCE);
    assert_eq!(returned.expect("it returns"), (1, [ErrorKind::Shutdown; 2], true));
    assert_eq!(ended_late(&far, &slow, &[&|| far.shutdown()]), [((), false)]);
    assert!(!to.is_in_use());
}

#[test]
fn every_shutdown_and_unregister_call_waits_for_the_copies_of_a_device() {
    let _bound = bounded();
    let gone = Err(ErrorKind::NotRegistered);
    for case in ["shutdowns", "unregisters", "a shutdown during an unregister"] {
        let (near, far) = (agent(), agent());
        let (device, to) = held_device(&far, 64 * KIB);
        let writing = held_write(&near, &far, &device, &to);
        let shutdown = || {
            far.shutdown();
            Ok(())
        };
        let one = || far.unregister(&to).map_err(|e| e.kind());
        let many = || far.unregister_batch(std::slice::from_ref(&to)).map_err(|e| e.kind());
        let (calls, outcomes): ([&(dyn Fn() -> _ + Sync); 3], _) = match case {
            "shutdowns" => ([&shutdown, &shutdown, &shutdown], [Ok(()); 3]),
            "unregisters" => ([&one, &one, &many], [Ok(()), gone, gone]),
            _ => ([&one, &shutdown, &shutdown], [Ok(()); 3]),
        };
        let ended = ended_late(&far, &device, &calls);
        assert_eq!(ended, outcomes.map(|outcome| (outcome, false)), "{case}");
        let outcome = writing.wait(PATIENCE / 2).expect("it ends");
        assert!(case != "shutdowns" || outcome.is_err(), "the peer is gone");
        assert!(!to.is_quarantined());
    }
}

struct PanickingDevice(Arc<StagePool>);

impl Device for PanickingDevice {
    fn stages(&self) -> Arc<StagePool> {
        Arc::clone(&self.0)
    }

    fn pieces_max(&self) -> usize {
        1
    }

    fn copy_out(&self, _: DeviceCopy) {
        panic!("a panic of a device");
    }

    fn copy_in(&self, _: DeviceCopy) {
        panic!("a panic of a device");
    }
}

#[test]
fn a_device_that_panics_fails_its_transfers_and_no_others() {
    let _bound = bounded();
    let (near, far) = (one_thread_agent(), one_thread_agent());
    let host = filled(&near, 4096, Access::NONE, 1);
    let device = |agent: &Agent| {
        let stages = StagePool::new(4096, 1).expect("memory");
        let memory = DeviceMemory::new(Arc::new(PanickingDevice(stages)), 0, 4096);
        agent.register_device(memory, Access::READ_WRITE).expect("a region")
    };
    let (ours, theirs) = (device(&near), device(&far));
    let other = far.allocate(4096, Access::READ_WRITE).expect("memory");
    let peer = near.peer(far.advertised()).expect("an address");
    for (what, local, remote) in [("theirs", &host, &theirs), ("ours", &ours, &other)] {
        for write in [true, false] {
            let moves = batch(local, &remote.remote(), 4096);
            let options = Options { timeout: Some(PATIENCE / 2), ..Options::default() };
            let transfer = match write {
                true => peer.write_async(&moves, &options),
                false => peer.read_async(&moves, &options),
            };
            let outcome = transfer.wait(PATIENCE / 2).expect("it ends");
            assert_eq!(kind(outcome), ErrorKind::Internal, "{what}, write: {write}");
            healthy_write(&near, &far, "a panic of a device");
            healthy_write(&far, &near, "a panic of a device");
        }
    }
    near.unregister(&ours).expect("no copy is under way");
    far.unregister(&theirs).expect("no copy is under way");
}
