//! Addresses, registrations, and memory of other processes.

use crate::kit::{Stub, context, driver, stub, with_stub};
use kvferry_sys::HostSpan;
use kvferry_sys::cuda::{
    DeviceAllocation, Error, FabricHandle, HostRegistration, IpcHandle, IpcMapping, MemoryKind,
    PointerInfo, VmmAllocation, VmmMapping, allocation_at, classify, dma_buf, granularity,
};
use kvferry_sys::map::Mapping;
use rustix::io::{FdFlags, fcntl_getfd};
use std::os::fd::{AsFd, AsRawFd};

const MIB: u64 = 1 << 20;
const DEVICE: u64 = 0x7000_0000_0000;
const PIECES: u64 = 0x7100_0000_0000;
const PINNED: u64 = 0x7200_0000_0000;
const MANAGED: u64 = 0x7300_0000_0000;
const POOL: u64 = 0x7400_0000_0000;
const RESERVED: u64 = 0x7500_0000_0000;

fn classified(address: u64, len: u64) -> Result<PointerInfo, Error> {
    classify(driver(), address, len)
}

#[test]
fn device_memory_is_classified_with_its_owner_and_allocation() {
    let test = "memory::device_memory_is_classified_with_its_owner_and_allocation";
    with_stub(test, &Stub::default(), || {
        let info = classified(DEVICE + 100, 10).expect("it is known");
        assert_eq!(info.kind, MemoryKind::Device);
        assert_eq!((info.base, info.len, info.buffer_id), (DEVICE, MIB, 40));
        assert!(info.legacy_ipc && info.gpu_direct_rdma);
        let owner = info.context().expect("it has one").expect("it has one");
        assert_eq!(owner, context(), "the owner is the primary context");
        assert!(owner.is_retained());
        let beyond = classified(DEVICE + 100, MIB).expect_err("it is too long");
        let (address, len) = (DEVICE + 100, MIB);
        let expected = Error::OutOfRange { address, len, base: DEVICE, allocation_len: MIB };
        assert_eq!(beyond, expected);
    });
}

#[test]
fn memory_of_a_pool_belongs_to_its_devices_primary_context() {
    let test = "memory::memory_of_a_pool_belongs_to_its_devices_primary_context";
    with_stub(test, &Stub::default(), || {
        let info = classified(POOL, MIB).expect("it is known");
        assert_eq!((&info.kind, info.legacy_ipc), (&MemoryKind::Device, false));
        assert_eq!(info.device.map(|device| device.ordinal()), Some(1));
        let calls = stub().calls();
        assert!(
            !calls.iter().any(|call| call.starts_with("cuDevicePrimaryCtxRetain")),
            "it made a context"
        );
        let owner = info.context().expect("it has one").expect("it has one");
        assert_eq!(owner.device().ordinal(), 1);
    });
}

#[test]
fn memory_that_was_mapped_in_pieces_is_listed_piece_by_piece() {
    let test = "memory::memory_that_was_mapped_in_pieces_is_listed_piece_by_piece";
    with_stub(test, &Stub::default(), || {
        let info = classified(PIECES + MIB, 2 * MIB).expect("it is known");
        let MemoryKind::Vmm(chunks) = &info.kind else { panic!("{:?}", info.kind) };
        let found: Vec<_> = chunks.iter().map(|it| (it.address, it.len, it.block_id)).collect();
        assert_eq!(found, [(PIECES, 2 * MIB, 90), (PIECES + 2 * MIB, 2 * MIB, 91)]);
        let properties = chunks[0].properties;
        assert_eq!(properties.device, Some(0));
        assert!(properties.export_fd && !properties.export_fabric && properties.gpu_direct_rdma);
        assert_eq!((info.base, info.len), (PIECES, 4 * MIB));
        let one = classified(PIECES, 1).expect("it is known");
        assert!(matches!(one.kind, MemoryKind::Vmm(chunks) if chunks.len() == 1));
        let hole = classified(PIECES + MIB, 8 * MIB).expect_err("the third piece is missing");
        assert_eq!(hole, Error::NotMapped(PIECES + 4 * MIB));
        let unmapped = classified(PIECES + 5 * MIB, 1).expect_err("nothing is mapped there");
        assert_eq!(unmapped, Error::NotMapped(PIECES + 5 * MIB));
        let reserved = classified(RESERVED, 1).expect_err("nothing is mapped there");
        assert_eq!(reserved, Error::NotMapped(RESERVED));
        let calls = stub().calls();
        let count = |name: &str| calls.iter().filter(|call| call.starts_with(name)).count();
        assert_eq!(count("cuMemRetainAllocationHandle"), count("cuMemRelease"));
    });
}

#[test]
fn a_driver_that_can_not_list_pieces_says_so() {
    let stub_of = Stub { macros: &["VERSION=11060", "WITHOUT_BATCH"], ..Stub::default() };
    with_stub("memory::a_driver_that_can_not_list_pieces_says_so", &stub_of, || {
        let refused = classified(PIECES, 1).expect_err("it can't");
        assert_eq!(refused, Error::NotSupported("CU_POINTER_ATTRIBUTE_MAPPING_SIZE"));
        assert!(classified(DEVICE, 1).is_ok());
    });
}

#[test]
fn host_memory_is_pinned_managed_or_unknown_to_the_driver() {
    let test = "memory::host_memory_is_pinned_managed_or_unknown_to_the_driver";
    with_stub(test, &Stub::default(), || {
        let pinned = classified(PINNED + 5, MIB).expect("it is known");
        assert_eq!(pinned.kind, MemoryKind::PinnedHost);
        assert!(pinned.contains(PINNED, MIB) && !pinned.contains(PINNED + 5, MIB));
        assert!(!pinned.contains(u64::MAX, 2));
        assert_eq!(classified(MANAGED, 1).expect("it is known").kind, MemoryKind::Managed);
        let map = Mapping::anonymous(4096).expect("memory");
        let address = map.as_ptr() as u64;
        let pageable = classified(address, 4096).expect("it is host memory");
        assert_eq!(pageable.kind, MemoryKind::Pageable);
        assert_eq!(pageable.context(), Ok(None));
        drop(map);
        let freed = classified(address, 4096).expect_err("it was unmapped");
        assert_eq!(freed, Error::UnknownPointer(address));
        let freed = classified(DEVICE + 2 * MIB, 1).expect_err("the driver does not know it");
        assert_eq!(freed, Error::UnknownPointer(DEVICE + 2 * MIB));
    });
}

#[test]
fn a_range_that_is_none_is_refused_without_a_call() {
    with_stub("memory::a_range_that_is_none_is_refused_without_a_call", &Stub::default(), || {
        driver();
        let stub = stub();
        stub.calls();
        for (address, len) in [(0, 1), (DEVICE, 0), (u64::MAX - 1, 3)] {
            let refused = classified(address, len).expect_err("it is no range");
            assert_eq!(refused, Error::BadRange { address, len });
        }
        assert!(stub.calls().is_empty());
        stub.fail("cuPointerGetAttributes=201");
        let unknown = classified(DEVICE, 1).expect_err("no context knows it");
        assert_eq!(unknown, Error::UnknownPointer(DEVICE));
        stub.fail("cuPointerGetAttributes=700");
        assert!(classified(DEVICE, 1).expect_err("the device is lost").is_sticky());
    });
}

#[test]
fn whole_pages_of_host_memory_are_registered_and_unregistered() {
    let test = "memory::whole_pages_of_host_memory_are_registered_and_unregistered";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        let map = Mapping::anonymous(8192).expect("memory");
        // SAFETY: the mapping outlives the spans.
        let span = |at: usize, len| unsafe { HostSpan::new(map.as_ptr().add(at), len) };
        stub.calls();
        // SAFETY: the mapping outlives the registration.
        let register = |span| unsafe { HostRegistration::new(&context, span) };
        let registered = register(span(0, 8192)).expect("registered");
        assert_eq!(registered.device_address(), Ok(map.as_ptr() as u64));
        assert_eq!(registered.span().len(), 8192);
        drop(registered);
        assert_eq!(stub.work(), ["cuMemHostRegister 8192 3", "cuMemHostUnregister"]);
        for refused in [span(1, 4096), span(0, 4095), span(0, 0)] {
            let refused = register(refused).expect_err("these are no whole pages");
            assert!(matches!(refused, Error::BadRange { .. }), "{refused:?}");
        }
        stub.fail("cuMemHostRegister=712");
        assert_eq!(register(span(0, 4096)).expect_err("it is already").code(), Some(712));
        assert_eq!(stub.work(), ["cuMemHostRegister 4096 3"], "what failed is not unregistered");
    });
}

#[test]
fn device_memory_of_our_own_is_freed_once() {
    with_stub("memory::device_memory_of_our_own_is_freed_once", &Stub::default(), || {
        let stub = stub();
        let context = context();
        stub.calls();
        let memory = DeviceAllocation::new(&context, 512).expect("allocated");
        assert_eq!((memory.address(), memory.len()), (DEVICE, 512));
        assert_eq!(allocation_at(&context, DEVICE + 9), Ok((DEVICE, MIB as usize)));
        drop(memory);
        assert_eq!(stub.work(), ["cuMemAlloc 512", "cuMemFree 700000000000"]);
        assert!(DeviceAllocation::new(&context, 0).is_err());
        stub.fail("cuMemAlloc=2");
        assert_eq!(DeviceAllocation::new(&context, 1).expect_err("full").code(), Some(2));
        assert_eq!(stub.work(), ["cuMemAlloc 1"]);
    });
}

#[test]
fn an_allocation_is_exported_and_opened_by_its_handle() {
    with_stub(
        "memory::an_allocation_is_exported_and_opened_by_its_handle",
        &Stub::default(),
        || {
            let stub = stub();
            let context = context();
            stub.calls();
            let handle = IpcHandle::of_allocation(&context, DEVICE).expect("exported");
            assert_eq!(handle, IpcHandle([0x1c; 64]));
            let mapping = IpcMapping::open(&context, &handle).expect("opened");
            assert_eq!(mapping.address(), 0x7600_0000_0000);
            drop(mapping);
            let expected = [
                "cuIpcGetMemHandle 700000000000",
                "cuIpcOpenMemHandle 1c 1c 1",
                "cuIpcCloseMemHandle 760000000000",
            ];
            assert_eq!(stub.work(), expected);
        },
    );
}

#[test]
fn physical_memory_is_made_exported_imported_and_mapped() {
    let test = "memory::physical_memory_is_made_exported_imported_and_mapped";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        let bytes = granularity(context.device(), true).expect("it is known");
        stub.calls();
        let made = VmmAllocation::new(&context, bytes, true).expect("made");
        let fd = made.export_fd().expect("exported");
        assert!(fcntl_getfd(&fd).expect("it is open").contains(FdFlags::CLOEXEC));
        let number = fd.as_raw_fd();
        let imported = VmmAllocation::import_fd(&context, fd.as_fd()).expect("imported");
        let fabric = made.export_fabric().expect("exported");
        assert_eq!(fabric, FabricHandle([0xfa; 64]));
        drop(VmmAllocation::import_fabric(&context, fabric).expect("imported"));
        let pieces = [(&made, bytes), (&imported, bytes)];
        let mapping = VmmMapping::new(&context, &pieces).expect("mapped");
        assert_eq!((mapping.address(), mapping.len()), (0x7500_0000_0000, 2 * bytes));
        drop(mapping);
        let mut calls = stub.work();
        calls.retain(|call| !call.starts_with("cuMemRelease"));
        let calls: Vec<_> = calls.iter().map(String::as_str).collect();
        assert_eq!(calls[0], "cuMemCreate 2097152 1 1 1 0");
        assert_eq!(calls[2], format!("cuMemImportFromShareableHandle 1 {number}"));
        assert_eq!(calls[4], "cuMemImportFromShareableHandle 8 250");
        assert_eq!(calls[5], "cuMemAddressReserve 4194304");
        assert!(calls[7].starts_with("cuMemMap 750000200000 2097152"), "{}", calls[7]);
        let rest = [
            "cuMemSetAccess 750000000000 4194304 1 0 3 1",
            "cuMemUnmap 750000000000 2097152",
            "cuMemUnmap 750000200000 2097152",
            "cuMemAddressFree 750000000000 4194304",
        ];
        assert_eq!(calls[8..], rest);
        drop((made, imported));
        let released = stub.calls();
        assert_eq!(released.len(), 2, "{released:?}");
    });
}

#[test]
fn a_mapping_that_fails_half_way_is_undone() {
    with_stub("memory::a_mapping_that_fails_half_way_is_undone", &Stub::default(), || {
        let stub = stub();
        let context = context();
        let made = VmmAllocation::new(&context, 2 << 20, false).expect("made");
        stub.fail("cuMemMap=1");
        stub.calls();
        let pieces = [(&made, 2 << 20), (&made, 2 << 20)];
        assert_eq!(VmmMapping::new(&context, &pieces).expect_err("refused").code(), Some(1));
        let calls = stub.work();
        let undone = ["cuMemUnmap 750000000000 2097152", "cuMemAddressFree 750000000000 4194304"];
        assert_eq!(calls[3..], undone);
        assert_eq!(stub.thread(), (0, 0));
        assert!(VmmMapping::new(&context, &[]).is_err());
        assert!(VmmMapping::new(&context, &[(&made, usize::MAX), (&made, 2)]).is_err());
    });
}

#[test]
fn a_dma_buf_is_of_whole_pages() {
    with_stub("memory::a_dma_buf_is_of_whole_pages", &Stub::default(), || {
        let stub = stub();
        let context = context();
        stub.calls();
        let fd = dma_buf(&context, DEVICE, 1 << 20, false).expect("exported");
        assert!(fcntl_getfd(&fd).expect("it is open").contains(FdFlags::CLOEXEC));
        dma_buf(&context, DEVICE, 1 << 20, true).expect("exported");
        let expected = ["0", "1"]
            .map(|flags| format!("cuMemGetHandleForAddressRange 700000000000 1048576 1 {flags}"));
        assert_eq!(stub.work(), expected);
        for (address, len) in [(DEVICE + 1, 1 << 20), (DEVICE, 100), (DEVICE, 0)] {
            let refused = dma_buf(&context, address, len, false).expect_err("no whole pages");
            assert_eq!(refused, Error::BadRange { address, len: len as u64 });
        }
        stub.fail("cuMemGetHandleForAddressRange=801");
        assert_eq!(dma_buf(&context, DEVICE, 4096, true).expect_err("refused").code(), Some(801));
    });
}
