//! Memory that is unregistered or given back while the GPU copies: no byte comes late.

use crate::kit::*;
use kvferry::TransportKind;
use kvferry_fakecuda::FREED;
use kvferry_fakecuda::control::ALL_ENGINES;
use kvferry_sys::cuda::DeviceAllocation;
use kvferry_testkit::{Watchdog, eventually};

const LEN: usize = 256 << 10;

#[test]
fn memory_is_unregistered_when_its_copies_have_ended_and_freed_memory_gets_no_late_byte() {
    let _bound = Watchdog::new(LIMIT);
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        for (write, cancels) in [(true, false), (true, true), (false, false), (false, true)] {
            // Memory of the same size gets the address of what was freed.
            let Some(rig) = FakeRig::new(&[("reuse", "100")]) else { return };
            let gpu = rig.memory(0, LEN, 1);
            let Pair { near, far, region, to, peer } = Pair::new(kind, &gpu);
            let batch = scattered(&region, &to, 32, 4096);
            rig.fake.hold(ALL_ENGINES);
            let running = match write {
                true => peer.write_async(&batch, &options()),
                false => peer.read_async(&batch, &options()),
            };
            eventually("the driver has a copy", || rig.fake.counter("pending") > 0);
            if cancels {
                running.cancel();
            }
            let at = gpu.address();
            std::thread::scope(|scope| {
                let unregisters = scope.spawn(|| {
                    near.unregister(&region).expect("its copies end");
                    let pending = rig.fake.counter("pending");
                    // Frees the memory at once.
                    drop(gpu);
                    pending
                });
                eventually("another thread unregisters it", || region.is_quarantined());
                assert!(!unregisters.is_finished(), "{kind}, {write}: the GPU copies");
                rig.release();
                assert_eq!(unregisters.join().expect("no panic"), 0, "{kind}, {write}");
            });
            let next = DeviceAllocation::new(&rig.context(0), LEN).expect("memory");
            assert_eq!(next.address(), at);
            let _ = ended(&running);
            drop((running, batch, region, to, peer));
            near.shutdown();
            far.shutdown();
            assert!(rig.bytes(&next, 0, LEN).iter().all(|byte| *byte == FREED), "{kind}, {write}");
            drop(next);
            rig.ends_clean();
        }
    }
}
