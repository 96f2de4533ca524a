//! What is not a GPU's memory is refused, with what to do.

use crate::kit::*;
use kvferry::{Access, TransportKind};
use kvferry_cuda::{DeviceName, Error, memory, memory_on};
use kvferry_fakecuda::Fault;
use kvferry_sys::cuda::{self, DeviceAllocation, Driver, HostRegistration, classify};
use kvferry_sys::map::Mapping;
use kvferry_testkit::Watchdog;
use std::process::Command;

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

/// Registers memory of each GPU under each of its names, and under those of the next GPU.
fn names_mean_their_gpus(rig: &Rig) {
    let devices = Driver::get().expect("a driver").devices().expect("they are counted");
    for (at, device) in devices.iter().enumerate() {
        let gpu = DeviceAllocation::new(&rig.context(device.ordinal()), 4096).expect("memory");
        let on = |name: &str| memory_on(gpu.address(), 4096, name.parse().expect("a name"));
        let info = device.info().expect("it is described");
        let names = [device.ordinal().to_string(), info.uuid.to_string(), info.pci_bus_id];
        for name in &names {
            assert!(on(name).is_ok() && on(&format!("cuda:{name}")).is_ok(), "{name}");
            assert!(on(&name.to_uppercase()).is_ok(), "{name}");
        }
        let unknown = ["77", "GPU-07070707-0707-0707-0707-070707070707", "00000007:07:07.7"];
        for name in unknown {
            let refused = on(name).expect_err("there is none");
            let Error::Driver(cuda::Error::NoSuchDevice { seen, .. }) = &refused else {
                panic!("{name}: {refused:?}");
            };
            assert_eq!(seen.len(), devices.len(), "{refused}");
            for known in &names {
                assert!(seen[at].contains(known), "{known}: {refused}");
            }
        }
        let next = &devices[(at + 1) % devices.len()];
        if next != device {
            let [owner, named] = [device, next].map(|it| it.ordinal());
            let info = next.info().expect("it is described");
            for name in [info.uuid.to_string(), info.pci_bus_id] {
                let refused = on(&name).expect_err("the other one");
                let address = gpu.address();
                assert_eq!(refused, Error::OtherDevice { address, owner, named }, "{name}");
            }
        }
    }
}

#[test]
fn a_gpu_is_named_by_number_uuid_or_pci_address_and_an_unknown_one_is_refused_with_those_there() {
    let rig = Rig::new(&[]);
    names_mean_their_gpus(&rig);
    let text = "GPU 0".parse::<DeviceName>().expect_err("no name");
    assert_eq!(text, cuda::Error::BadDeviceName("GPU 0".into()));
}

#[test]
fn a_uuid_means_the_same_gpu_in_a_process_that_numbers_them_otherwise() {
    let Some(rig) = FakeRig::new(&[]) else { return };
    let device = Driver::get().expect("a driver").device(1).expect("the second one");
    let uuid = device.uuid().expect("it has one").to_string();
    for visible in ["1,0", "1"] {
        let output = Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", "refused::child_whose_first_gpu_has_this_uuid", "--ignored"])
            .arg("--nocapture")
            .env("CUDA_VISIBLE_DEVICES", visible)
            .env("TEST_UUID", &uuid)
            .output()
            .expect("it starts");
        let [out, err] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
        assert!(output.status.success() && out.contains("1 passed"), "{visible}: {out}{err}");
    }
    let first = DeviceAllocation::new(&rig.context(0), 4096).expect("memory");
    let name = uuid.parse().expect("a name");
    let refused = memory_on(first.address(), 4096, name).expect_err("here it is the second one");
    assert_eq!(refused, Error::OtherDevice { address: first.address(), owner: 0, named: 1 });
}

#[test]
#[ignore = "started by the test of numbers that differ"]
fn child_whose_first_gpu_has_this_uuid() {
    let uuid = std::env::var("TEST_UUID").expect("the test sets it");
    let rig = Rig::new(&[]);
    let gpu = DeviceAllocation::new(&rig.context(0), 4096).expect("memory");
    for name in [uuid.as_str(), "0"] {
        assert!(memory_on(gpu.address(), 4096, name.parse().expect("a name")).is_ok(), "{name}");
    }
    names_mean_their_gpus(&rig);
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
