//! What is not a GPU's memory is refused, with what to do.

use crate::kit::*;
use kvferry::{Access, TransportKind};
use kvferry_cuda::{Error, memory};
use kvferry_fakecuda::Fault;
use kvferry_sys::cuda::{DeviceAllocation, Driver, HostRegistration, classify};
use kvferry_sys::map::Mapping;
use kvferry_testkit::Watchdog;

#[test]
fn host_memory_is_refused_as_such() {
    let rig = Rig::new(&[]);
    let host = Mapping::anonymous(8192).expect("memory");
    let at = host.as_ptr() as u64;
    assert_eq!(
        memory(at, 8192, None).expect_err("pageable"),
        Error::HostMemory { address: at, kind: "pageable" }
    );
    // SAFETY: the memory stays mapped, and no copy uses it.
    let pinned = unsafe { HostRegistration::new(&rig.context(0), host.span(0, 8192)) };
    let pinned = pinned.expect("pinned");
    let refused = memory(at, 8192, None).expect_err("pinned");
    assert_eq!(refused, Error::HostMemory { address: at, kind: "pinned" });
    assert!(refused.to_string().contains("register it as host memory"));
    drop(pinned);
}

#[test]
fn ranges_outside_an_allocation_are_refused() {
    let rig = Rig::new(&[("reuse", "0")]);
    let gpu = rig.memory(0, 1 << 20, 1);
    let refused = |address, len| memory(address, len, None).expect_err("refused").to_string();
    // A real driver may round up.
    let driver = Driver::get().expect("a driver");
    let len = classify(driver, gpu.address(), 1 << 20).expect("it is known").len;
    assert!(len == 1 << 20 || !rig.is_fake(), "{len}");
    assert!(refused(gpu.address(), len + 1).contains("not within the allocation"));
    assert!(refused(gpu.address() + 10, len).contains("not within the allocation"));
    for (address, len) in [(0, 5), (gpu.address(), 0), (u64::MAX - 4, 5), (u64::MAX, 1)] {
        assert!(refused(address, len).contains("not a range"), "{address:#x}, {len}");
    }
    let freed = gpu.address();
    drop(gpu);
    assert!(refused(freed, 4096).contains("freed"));
    assert!(refused(16, 4096).contains("memory neither of a CUDA device nor of this process"));
}

#[test]
fn a_gpu_that_is_not_the_owner_is_refused_by_both_numbers() {
    let rig = Rig::new(&[]);
    if !rig.has_devices(2, "the owner of memory") {
        return;
    }
    let gpu = DeviceAllocation::new(&rig.context(1), 4096).expect("memory");
    assert!(memory(gpu.address(), 4096, Some(1)).is_ok());
    let refused = memory(gpu.address(), 4096, Some(0)).expect_err("the other one");
    assert_eq!(refused, Error::OtherDevice { address: gpu.address(), owner: 1, named: 0 });
}

#[test]
fn without_a_stream_or_an_event_transfers_fail_and_the_next_one_works() {
    let _bound = Watchdog::new(LIMIT);
    for fault in [Fault::StreamOom, Fault::EventOom] {
        let Some(rig) = FakeRig::new(&[]) else { return };
        let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
        let gpu = rig.memory(0, 8192, 1);
        let to = far.allocate(8192, Access::WRITE).expect("memory");
        let batch = scattered(&register(&near, &gpu), &to, 4, 1024);
        let peer = peer_of(&near, &far);
        rig.fake.fault(fault, 1, 1);
        let error = peer.write(&batch, &options()).expect_err("the driver is out of memory");
        assert_eq!(error.quiesced(), Some(true), "{error}");
        assert!(format!("{error:?}").contains("OUT_OF_MEMORY"), "{error:?}");
        peer.write(&batch, &options()).expect("written");
        assert_eq!(counters().failed, 1);
    }
}
