//! Version profiles, devices and the pointers' attributes.

use std::ffi::{CString, c_char, c_int, c_void};

use crate::driver::{Driver, fresh, ready};

/// `cuGetProcAddress_v2`: the result, the address and the status.
fn find_v2(cuda: &Driver, name: &str, version: c_int) -> (c_int, usize, c_int) {
    type F = unsafe extern "C" fn(*const c_char, *mut usize, c_int, u64, *mut c_int) -> c_int;
    let symbol = cuda.fake.symbol("cuGetProcAddress_v2").unwrap();
    let name = CString::new(name).unwrap();
    let (mut address, mut status) = (1, -1);
    // SAFETY: the second form of the function has this signature.
    let code = unsafe {
        let f = std::mem::transmute::<*mut c_void, F>(symbol);
        f(name.as_ptr(), &mut address, version, 0, &mut status)
    };
    (code, address, status)
}

#[test]
fn each_profile_has_the_symbols_of_its_version() {
    let table = [
        ("11.4", 11040, false, false, false),
        ("12.2", 12020, true, false, false),
        ("12.8", 12080, true, true, false),
        ("13.0", 13000, true, true, true),
        ("13.2", 13020, true, true, true),
    ];
    for (profile, number, second_find, batch, second_batch) in table {
        let cuda = fresh();
        cuda.fake.set("version", profile);
        assert_eq!(cuda.version(), number);
        let (first, newest) =
            (cuda.find("cuGetProcAddress", 11030), cuda.find("cuGetProcAddress", number));
        assert_eq!(first != newest, second_find, "{profile}");
        assert_eq!(cuda.find("cuMemcpyBatchAsync", number).is_ok(), batch, "{profile}");
        let old = cuda.find("cuMemcpyBatchAsync", number.min(12080));
        assert_eq!(old.is_ok() && cuda.find("cuMemcpyBatchAsync", number) != old, second_batch);
        let dmabuf = cuda.find("cuMemGetHandleForAddressRange", number);
        assert_eq!(dmabuf.is_ok(), number >= 11070, "{profile}");
        assert!(cuda.find("cuMemAlloc", number).is_ok());
    }
}

#[test]
fn a_version_above_the_drivers_and_one_below_the_symbols_are_told_apart() {
    let cuda = ready(&[]);
    assert_eq!(cuda.find("cuMemAlloc", 13000), Err(1));
    assert_eq!(find_v2(cuda, "cuMemcpyBatchAsync", 12000), (500, 0, 2));
    assert_eq!(find_v2(cuda, "cuNoSuchThing", 12080), (500, 0, 1));
    assert_eq!(find_v2(cuda, "cuMemAlloc_v2", 12080), (500, 0, 1));
    let (code, address, status) = find_v2(cuda, "cuMemAlloc", 12080);
    assert!(code == 0 && address > 1 && status == 0);
    cuda.fake.set("missing", "success");
    assert_eq!(find_v2(cuda, "cuNoSuchThing", 12080), (0, 0, 1));
}

#[test]
fn a_client_attaches_to_the_library_that_is_loaded_and_sees_the_same_state() {
    let cuda = ready(&[]);
    let device = cuda.alloc(4096).unwrap();
    let attached = kvferry_fakecuda::control::Fake::attach().unwrap();
    attached.write(device, b"same").unwrap();
    assert_eq!(cuda.fake.read(device, 4).unwrap(), b"same");
    assert_eq!(attached.counter("allocations"), 1);
}

#[test]
fn a_hidden_symbol_is_denied_until_it_is_shown() {
    let cuda = ready(&[("hide", "cuMemcpyBatchAsync")]);
    assert_eq!(cuda.find("cuMemcpyBatchAsync", 12080), Err(500));
    cuda.fake.set("show", "cuMemcpyBatchAsync");
    assert!(cuda.find("cuMemcpyBatchAsync", 12080).is_ok());
}

#[test]
fn devices_have_identities_that_do_not_depend_on_their_order() {
    let cuda = ready(&[]);
    assert_eq!(cuda.device_count(), Ok(2));
    assert_ne!(cuda.uuid(0).unwrap(), cuda.uuid(1).unwrap());
    assert_eq!(cuda.uuid(2), Err(101));
    assert_eq!(cuda.attribute(75, 0), Ok(9));
    assert_eq!(cuda.attribute(102, 0), Ok(1));
    assert_eq!(cuda.attribute(10_000, 0), Err(1));
}

#[test]
fn attributes_classify_device_pinned_managed_and_unknown_memory() {
    let cuda = ready(&[]);
    let second = cuda.retain(1).unwrap();
    cuda.set_current(second).unwrap();
    let device = cuda.alloc(5000).unwrap();
    let managed = cuda.alloc_managed(4096).unwrap();
    let pinned = cuda.alloc_host(4096).unwrap();
    let of = |pointer| cuda.pointer_attributes([2, 8, 9, 1, 11, 12], pointer).unwrap();
    assert_eq!(of(device + 77), [2, 0, 1, second as u64, device, 5000]);
    assert_eq!(of(managed), [2, 1, 1, second as u64, managed, 4096]);
    assert_eq!(of(pinned)[..2], [1, 0]);
    let local = 0_u64;
    let unknown = std::ptr::from_ref(&local) as u64;
    assert_eq!(of(unknown), [0, 0, u64::from(-2i32 as u32), 0, 0, 0]);
    assert_eq!(cuda.pointer_attribute(2, unknown), Err(1));
    assert_eq!(cuda.pointer_attribute(10, device), Ok(1), "legacy IPC");
    assert_eq!(cuda.address_range(device + 77), Ok((device, 5000)));
    cuda.free(device).unwrap();
    assert_eq!(of(device)[..2], [0, 0]);
    assert_eq!(cuda.address_range(device), Err(500));
}

#[test]
fn an_address_that_is_used_again_has_another_buffer_id() {
    let cuda = ready(&[("reuse", "100")]);
    let first = cuda.alloc(4096).unwrap();
    let id = cuda.pointer_attribute(7, first).unwrap();
    cuda.free(first).unwrap();
    let second = cuda.alloc(4096).unwrap();
    assert_eq!(first, second);
    assert_ne!(cuda.pointer_attribute(7, second).unwrap(), id);
}

#[test]
fn managed_memory_is_the_hosts_too() {
    let cuda = ready(&[]);
    let managed = cuda.alloc_managed(4096).unwrap();
    // SAFETY: managed memory is mapped for the process.
    unsafe { std::ptr::write_bytes(managed as *mut u8, 0x31, 4096) };
    assert_eq!(cuda.fake.read(managed, 4096).unwrap(), [0x31; 4096]);
}

#[test]
fn counters_return_to_zero_and_calls_are_counted_by_symbol() {
    let cuda = ready(&[]);
    for round in 0..100 {
        let (stream, event) = (cuda.stream().unwrap(), cuda.event().unwrap());
        let (host, device) = (cuda.alloc_host(4096).unwrap(), cuda.alloc(4096).unwrap());
        let block = vec![0_u8; 4096];
        cuda.register(block.as_ptr() as u64, 4096).unwrap();
        cuda.copy(device, host, 4096, stream).unwrap();
        cuda.record(event, stream).unwrap();
        cuda.wait(event).unwrap();
        cuda.unregister(block.as_ptr() as u64).unwrap();
        cuda.free(device).unwrap();
        cuda.free_host(host).unwrap();
        cuda.destroy_event(event).unwrap();
        cuda.destroy_stream(stream).unwrap();
        assert_eq!(cuda.fake.counter("call:cuMemcpyAsync"), round + 1);
    }
    let charge = cuda.fake.counter("device_used:0");
    assert_eq!(charge, 500_000_000);
    assert_eq!(cuda.fake.counter("contexts"), 1);
    cuda.release(0).unwrap();
    for name in [
        "contexts",
        "streams",
        "events",
        "modules",
        "allocations",
        "allocated_bytes",
        "host_registrations",
        "host_registered_bytes",
        "host_allocations",
        "ipc_mappings",
        "vmm_handles",
        "vmm_reservations",
        "vmm_mappings",
        "pending",
        "device_used:0",
    ] {
        assert_eq!(cuda.fake.counter(name), 0, "{name}");
    }
    let counters = cuda.fake.counters();
    let calls = |symbol: &str| counters.iter().find(|(name, _)| name == symbol).unwrap().1;
    assert_eq!(calls("call:cuStreamDestroy_v2"), 100);
    assert_eq!(calls("completed"), calls("submitted"));
}

#[test]
fn no_thread_exists_before_the_first_operation() {
    fresh();
    let named = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.map(|t| std::fs::read_to_string(t.unwrap().path().join("comm")).unwrap());
        names.filter(|name| name.starts_with("fakecuda")).count()
    };
    if named() > 0 {
        println!("SKIPPED: another test of this process was first");
        return;
    }
    let cuda = ready(&[]);
    let device = cuda.alloc(4096).unwrap();
    assert_eq!(named(), 0);
    let stream = cuda.stream().unwrap();
    cuda.fill(device, 1, 4096, stream).unwrap();
    cuda.wait_stream(stream).unwrap();
    // A thread takes its name after it has begun.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while named() < 2 && std::time::Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(named(), 2);
}
