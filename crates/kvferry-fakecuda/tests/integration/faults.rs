//! Every fault by its name, and the errors that misuse brings.

use crate::driver::{Driver, EXPORTABLE, STREAM, fresh, ready};
use kvferry_fakecuda::Fault;
use kvferry_fakecuda::control::ALL_ENGINES;

const LEN: usize = 8192;

fn once(cuda: &Driver, fault: Fault) {
    cuda.fake.fault(fault, 1, 1);
}

/// A stream with pinned and device memory.
fn parts(cuda: &Driver) -> (usize, u64, u64) {
    (cuda.stream().unwrap(), cuda.alloc_host(LEN).unwrap(), cuda.alloc(LEN).unwrap())
}

#[test]
fn initialization_finds_no_device_or_another_driver_version() {
    let cuda = fresh();
    once(cuda, Fault::NoDevice);
    assert_eq!(cuda.init(), Err(100));
    once(cuda, Fault::DriverMismatch);
    assert_eq!(cuda.init(), Err(803));
    assert_eq!(cuda.device_count(), Err(3));
    assert_eq!(cuda.init(), Ok(()));
}

#[test]
fn a_missing_symbol_is_not_found_once() {
    let cuda = ready(&[]);
    once(cuda, Fault::MissingSymbol);
    assert_eq!(cuda.find("cuMemAlloc", 12080), Err(500));
    assert!(cuda.find("cuMemAlloc", 12080).is_ok());
}

#[test]
fn allocations_and_registrations_run_out_at_the_stated_one() {
    let cuda = ready(&[]);
    cuda.fake.fault(Fault::AllocOom, 2, 1);
    let first = cuda.alloc(LEN).unwrap();
    assert_eq!(cuda.alloc(LEN), Err(2));
    cuda.free(first).unwrap();
    once(cuda, Fault::PinOom);
    assert_eq!(cuda.alloc_host(LEN), Err(2));
    let page = vec![0_u8; LEN];
    once(cuda, Fault::PinTwice);
    assert_eq!(cuda.register(page.as_ptr() as u64, LEN), Err(712));
    once(cuda, Fault::PinTooLong);
    assert_eq!(cuda.register(page.as_ptr() as u64, LEN), Err(1));
    cuda.fake.set("pin_limit", "4KiB");
    assert_eq!(cuda.register(page.as_ptr() as u64, LEN), Err(1));
    cuda.fake.set("pin_limit", "1GiB");
    cuda.fake.set("pin_total", "4KiB");
    assert_eq!(cuda.register(page.as_ptr() as u64, LEN), Err(2));
    cuda.fake.set("pin_total", "1GiB");
    assert_eq!(cuda.register(page.as_ptr() as u64, LEN), Ok(()));
    cuda.fake.set("memory", "1MiB");
    assert_eq!(cuda.alloc(2 << 20), Err(2));
    assert!(cuda.alloc(512 << 10).is_ok());
}

#[test]
fn contexts_streams_and_events_run_out() {
    let cuda = ready(&[]);
    once(cuda, Fault::ContextOom);
    assert_eq!(cuda.retain(1), Err(2));
    once(cuda, Fault::StreamOom);
    assert_eq!(cuda.stream(), Err(2));
    once(cuda, Fault::EventOom);
    assert_eq!(cuda.event(), Err(2));
    assert!(cuda.retain(1).is_ok() && cuda.stream().is_ok() && cuda.event().is_ok());
}

#[test]
fn a_destroyed_context_fails_every_later_call_and_ends_waits() {
    let cuda = ready(&[]);
    let (stream, host, device) = parts(cuda);
    cuda.fake.hold(ALL_ENGINES);
    cuda.copy(device, host, LEN, stream).unwrap();
    let event = cuda.mark(stream);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| cuda.wait(event));
        std::thread::sleep(std::time::Duration::from_millis(20));
        once(cuda, Fault::ContextDestroyed);
        assert_eq!(cuda.copy(device, host, LEN, stream), Err(709));
        assert_eq!(waiter.join().unwrap(), Err(709));
    });
    assert_eq!(cuda.query(event), Err(709));
    assert_eq!(cuda.alloc(LEN), Err(709));
    assert_eq!(cuda.fake.counter("contexts"), 0);
    // Nothing of it runs: the host may use the memory of its copies.
    cuda.fake.host_access(host, LEN, true);
    assert_eq!(cuda.fake.findings(), Vec::<String>::new());
    let context = cuda.retain(0).unwrap();
    cuda.set_current(context).unwrap();
    assert!(cuda.alloc(LEN).is_ok());
}

#[test]
fn calls_without_a_context_fail() {
    let cuda = ready(&[]);
    let (stream, host, device) = parts(cuda);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(cuda.copy(device, host, LEN, stream), Err(201));
            assert_eq!(cuda.alloc(LEN), Err(201));
            assert_eq!(cuda.stream(), Err(201));
            assert_eq!(cuda.pointer_attribute(9, device), Ok(0));
        });
    });
    let other = cuda.retain(1).unwrap();
    cuda.set_current(other).unwrap();
    let event = cuda.event().unwrap();
    assert_eq!(cuda.record(event, stream), Err(400));
    assert_eq!(cuda.set_current(0x1234), Err(201));
}

#[test]
fn an_error_of_the_device_sticks_and_ends_all_waits() {
    let sticky =
        [(Fault::IllegalAddress, 700), (Fault::LaunchFailed, 719), (Fault::DeviceRemoved, 46)];
    for (fault, code) in sticky {
        let cuda = ready(&[]);
        let (stream, host, device) = parts(cuda);
        cuda.fake.hold(ALL_ENGINES);
        let copies: Vec<crate::driver::Copy> =
            (0..8).map(|i| (device + i * 1024, host + i * 1024, 1024)).collect();
        cuda.batch(&copies, STREAM, stream).unwrap();
        let event = cuda.mark(stream);
        cuda.fake.fault(fault, 4, 1);
        cuda.fake.release();
        assert_eq!(cuda.wait(event), Err(code));
        assert_eq!(cuda.query(event), Err(code));
        assert_eq!(cuda.query_stream(stream), Err(code));
        assert_eq!(cuda.copy(device, host, LEN, stream), Err(code));
        assert_eq!(cuda.free(device), Err(code));
        assert_eq!(cuda.fake.counter("pending"), 0);
        let other = cuda.retain(1).unwrap();
        cuda.set_current(other).unwrap();
        assert!(cuda.alloc(LEN).is_ok(), "the other device goes on");
        cuda.fake.clear_faults();
    }
}

#[test]
fn a_device_that_is_removed_gets_no_new_context() {
    let cuda = ready(&[("removed_code", "100")]);
    let (stream, host, device) = parts(cuda);
    once(cuda, Fault::DeviceRemoved);
    cuda.copy(device, host, LEN, stream).unwrap();
    assert_eq!(cuda.wait_stream(stream), Err(100));
    assert!(cuda.retain(0).is_ok(), "the one that it has can be retained");
    cuda.release(0).unwrap();
    cuda.release(0).unwrap();
    assert_eq!(cuda.retain(0), Err(100));
    assert!(cuda.retain(1).is_ok(), "the other device goes on");
    cuda.fake.clear_faults();
    assert!(cuda.retain(0).is_ok());
}

#[test]
fn an_event_that_never_signals_holds_back_its_waiters_and_not_its_stream() {
    let cuda = ready(&[]);
    let (stream, host, device) = parts(cuda);
    once(cuda, Fault::EventNeverSignals);
    cuda.copy(device, host, LEN, stream).unwrap();
    let event = cuda.mark(stream);
    cuda.wait_stream(stream).unwrap();
    assert_eq!(cuda.query(event), Err(600));
    let other = cuda.stream().unwrap();
    cuda.stream_after(other, event).unwrap();
    assert_eq!(cuda.query_stream(other), Err(600));
    cuda.fake.clear_faults();
    cuda.wait_stream(other).unwrap();
    assert_eq!(cuda.query(event), Ok(()));
}

#[test]
fn a_stream_that_stalls_goes_on_when_the_faults_are_cleared() {
    let cuda = ready(&[]);
    let (stream, host, device) = parts(cuda);
    once(cuda, Fault::StreamStalls);
    cuda.copy(device, host, LEN, stream).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(cuda.query_stream(stream), Err(600));
    assert_eq!(cuda.fake.counter("pending"), 1);
    cuda.fake.clear_faults();
    cuda.wait_stream(stream).unwrap();
}

#[test]
fn a_slow_stream_takes_a_hundred_times_as_long() {
    let cuda = ready(&[]);
    let (quick, host, device) = parts(cuda);
    once(cuda, Fault::StreamSlow);
    let slow = cuda.stream().unwrap();
    let took = |stream| {
        let begun = cuda.fake.now();
        cuda.copy(device, host, LEN, stream).unwrap();
        cuda.wait_stream(stream).unwrap();
        cuda.fake.now() - begun - 500
    };
    let quick = took(quick);
    assert_eq!(took(slow), quick * 100);
}

#[test]
fn a_slow_stream_goes_on_at_once_when_the_faults_are_cleared() {
    // An operation takes up to 11 days.
    let cuda = ready(&[("delay_us", "1000"), ("slow_times", "1000000000")]);
    once(cuda, Fault::StreamSlow);
    let (slow, host, device) = parts(cuda);
    let quick = cuda.stream().unwrap();
    cuda.copy(device, host, LEN / 2, slow).unwrap();
    let other = cuda.alloc(LEN).unwrap();
    cuda.copy(other, host, LEN / 2, quick).unwrap();
    cuda.wait_stream(quick).unwrap();
    assert_eq!(cuda.query_stream(slow), Err(600));
    cuda.fake.clear_faults();
    cuda.wait_stream(slow).unwrap();
    cuda.copy(device, host, LEN, slow).unwrap();
    cuda.wait_stream(slow).unwrap();
}

#[test]
fn a_batch_that_fails_names_the_entry_in_the_first_form_and_not_in_the_second() {
    let cuda = ready(&[("fail_index", "5")]);
    let (stream, host, device) = parts(cuda);
    let copies: Vec<crate::driver::Copy> =
        (0..8).map(|i| (device + i * 1024, host + i * 1024, 1024)).collect();
    cuda.fake.write(host, &[3; LEN]).unwrap();
    once(cuda, Fault::BatchEntry);
    assert_eq!(cuda.batch(&copies, STREAM, stream), Err((1, Some(5))));
    cuda.wait_stream(stream).unwrap();
    let arrived = cuda.fake.read(device, LEN).unwrap();
    assert!(arrived[5 * 1024..].iter().all(|&byte| byte != 3), "only entries before it may run");
    cuda.fake.set("version", "13.0");
    once(cuda, Fault::BatchEntry);
    assert_eq!(cuda.batch(&copies, STREAM, stream), Err((1, None)));
}

#[test]
fn a_foreign_error_fails_one_call() {
    let cuda = ready(&[]);
    once(cuda, Fault::ForeignError);
    assert_eq!(cuda.alloc(LEN), Err(702));
    assert!(cuda.alloc(LEN).is_ok());
}

#[test]
fn memory_handles_fail_in_every_way() {
    let cuda = ready(&[]);
    let device = cuda.alloc(LEN).unwrap();
    for (fault, code) in [(Fault::IpcRefused, 801), (Fault::IpcNotCapable, 1)] {
        once(cuda, fault);
        assert_eq!(cuda.ipc_handle(device), Err(code));
    }
    let handle = cuda.ipc_handle(device).unwrap();
    for (fault, code) in [
        (Fault::IpcRefused, 801),
        (Fault::IpcExporterDead, 400),
        (Fault::IpcFreed, 205),
        (Fault::IpcFull, 2),
    ] {
        once(cuda, fault);
        assert_eq!(cuda.open_ipc(handle), Err(code));
    }
    assert_eq!(cuda.open_ipc(handle), Err(201), "the own process");
    let shared = cuda.create(2 << 20, &EXPORTABLE).unwrap();
    once(cuda, Fault::VmmNotExportable);
    assert_eq!(cuda.export(shared), Err(801));
}

#[test]
fn peer_access_is_refused_by_the_matrix_and_by_the_fault() {
    let cuda = ready(&[("peers", "0-1")]);
    let other = cuda.retain(1).unwrap();
    assert_eq!(cuda.can_access_peer(0, 1), Ok(true));
    assert_eq!(cuda.can_access_peer(1, 0), Ok(false));
    once(cuda, Fault::PeerRefused);
    assert_eq!(cuda.enable_peer(other), Err(217));
    assert_eq!(cuda.enable_peer(other), Ok(()));
    assert_eq!(cuda.enable_peer(other), Err(704));
    let own = cuda.retain(0).unwrap();
    cuda.set_current(other).unwrap();
    assert_eq!(cuda.enable_peer(own), Err(217));
}

#[test]
fn dma_buf_is_refused_in_every_way() {
    let cuda = ready(&[]);
    let device = cuda.alloc(LEN).unwrap();
    once(cuda, Fault::DmabufUnsupported);
    assert_eq!(cuda.attribute(124, 0), Ok(0));
    for (fault, code) in [(Fault::DmabufUnsupported, 801), (Fault::DmabufNotSupp, 304)] {
        once(cuda, fault);
        assert_eq!(cuda.dmabuf(device, LEN, 0), Err(code));
    }
    once(cuda, Fault::DmabufFlagRefused);
    assert_eq!(cuda.dmabuf(device, LEN, 1), Err(801));
    assert_eq!(cuda.dmabuf(device + 1, 4096, 0), Err(1));
    assert_eq!(cuda.dmabuf(device, LEN + 4096, 0), Err(1));
    let fd = cuda.dmabuf(device, LEN, 0).unwrap();
    assert_eq!(std::fs::metadata(format!("/proc/self/fd/{fd}")).unwrap().len(), LEN as u64);
    assert_eq!(cuda.import(fd), Err(1), "a dma-buf is no VMM allocation");
}

#[test]
fn modules_and_launches_are_refused() {
    let cuda = ready(&[]);
    let ptx = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k() { ret; }";
    once(cuda, Fault::JitRefused);
    assert_eq!(cuda.load(ptx), Err(222));
    let module = cuda.load(ptx).unwrap();
    let function = cuda.function(module, "k").unwrap();
    let stream = cuda.stream().unwrap();
    once(cuda, Fault::LaunchRefused);
    assert_eq!(cuda.launch(function, 1, 32, stream, &[]), Err(701));
    assert_eq!(cuda.launch(function, 1, 32, stream, &[]), Ok(()));
    assert_eq!(cuda.launch(function, 1, 2048, stream, &[]), Err(1));
    cuda.wait_stream(stream).unwrap();
}

#[test]
fn the_legacy_stream_takes_no_batch() {
    let cuda = ready(&[]);
    let (_, host, device) = parts(cuda);
    for stream in [0, 1] {
        assert_eq!(cuda.batch(&[(device, host, LEN)], STREAM, stream), Err((1, None)));
    }
    assert_eq!(cuda.batch(&[(device, host, LEN)], STREAM, 2), Ok(()));
}

#[test]
fn faults_of_the_environment_are_parsed_and_counted() {
    let cuda = ready(&[]);
    once(cuda, Fault::AllocOom);
    assert_eq!(cuda.alloc(1), Err(2));
    assert_eq!(cuda.fake.counter("hit:alloc_oom"), 1);
    assert_eq!(cuda.fake.counter("hit:pin_oom"), 0);
}
