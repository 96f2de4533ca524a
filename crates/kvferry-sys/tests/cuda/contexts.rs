//! Which context is current, and what a thread gets back.

use crate::kit::{Stub, context, driver, stub, with_stub};
use kvferry_sys::cuda::{Context, Event, RawStream, Stream};
use std::cell::RefCell;

#[test]
fn a_guard_pushes_the_context_and_restores_the_threads_state() {
    let test = "contexts::a_guard_pushes_the_context_and_restores_the_threads_state";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        stub.calls();
        let entered = context.enter().expect("it is current");
        assert_eq!(stub.thread(), (1, 2));
        drop(entered);
        assert_eq!(stub.thread(), (0, 0));
        let expected = [
            "cuCtxPushCurrent 0xc000",
            "cuThreadExchangeStreamCaptureMode 2",
            "cuThreadExchangeStreamCaptureMode 0",
            "cuCtxPopCurrent",
        ];
        assert_eq!(stub.calls(), expected);
    });
}

#[test]
fn calls_within_a_guard_push_nothing_more() {
    with_stub("contexts::calls_within_a_guard_push_nothing_more", &Stub::default(), || {
        let stub = stub();
        let context = context();
        let stream = Stream::new(&context).expect("a stream");
        let entered = context.enter().expect("it is current");
        stub.calls();
        stream.query().expect("it is idle");
        stream.query().expect("it is idle");
        assert_eq!(stub.calls().len(), 2);
        assert_eq!(stub.thread(), (1, 2));
        drop(entered);
        assert_eq!(stub.thread(), (0, 0));
        stream.query().expect("it is idle");
        assert_eq!(stub.calls().len(), 2 + 5, "without a guard a call makes one of its own");
    });
}

#[test]
fn guards_of_two_devices_nest_and_may_be_dropped_in_any_order() {
    let test = "contexts::guards_of_two_devices_nest_and_may_be_dropped_in_any_order";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let first = context();
        let second = Context::primary(driver().device(1).expect("a device")).expect("a context");
        let outer = first.enter().expect("it is current");
        let inner = second.enter().expect("it is current");
        let innermost = first.enter().expect("it is current");
        assert_eq!(stub.thread(), (3, 2));
        assert_eq!(Context::current(driver()), Ok(Some(first.clone())));
        drop(outer);
        assert_eq!(stub.thread(), (3, 2), "contexts that were pushed later are still in use");
        drop(innermost);
        assert_eq!(stub.thread(), (2, 2));
        assert_eq!(Context::current(driver()), Ok(Some(second.clone())));
        drop(inner);
        assert_eq!(stub.thread(), (0, 0));
        assert_eq!(Context::current(driver()), Ok(None));
    });
}

#[test]
fn errors_and_panics_leave_no_context_behind() {
    with_stub("contexts::errors_and_panics_leave_no_context_behind", &Stub::default(), || {
        let stub = stub();
        let context = context();
        stub.fail("cuStreamCreate=2,cuEventCreate=700");
        assert_eq!(Stream::new(&context).expect_err("no memory").code(), Some(2));
        assert!(Event::new(&context).expect_err("lost").is_sticky());
        assert_eq!(stub.thread(), (0, 0));
        stub.fail("");
        let panics = std::panic::AssertUnwindSafe(|| {
            let _entered = context.enter().expect("it is current");
            std::panic::resume_unwind(Box::new(()));
        });
        std::panic::catch_unwind(panics).expect_err("it panics");
        assert_eq!(stub.thread(), (0, 0));
    });
}

#[test]
fn a_guard_that_fails_half_way_pops_what_it_pushed() {
    with_stub(
        "contexts::a_guard_that_fails_half_way_pops_what_it_pushed",
        &Stub::default(),
        || {
            let stub = stub();
            let context = context();
            stub.fail("cuThreadExchangeStreamCaptureMode=999");
            context.enter().expect_err("the mode can't be changed");
            assert_eq!(stub.thread(), (0, 0));
            stub.fail("cuCtxPushCurrent=709");
            stub.calls();
            let refused = context.enter().expect_err("the context is gone");
            assert!(refused.is_sticky());
            assert_eq!(stub.calls(), ["cuCtxPushCurrent 0xc000"], "nothing is popped");
        },
    );
}

thread_local! {
    static LAST: RefCell<Option<Stream>> = const { RefCell::new(None) };
}

#[test]
fn a_stream_that_a_thread_drops_at_its_end_is_destroyed() {
    let test = "contexts::a_stream_that_a_thread_drops_at_its_end_is_destroyed";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        let thread = std::thread::spawn(move || {
            // What a thread has used first is dropped last.
            LAST.with_borrow_mut(|_| ());
            let stream = Stream::new(&context).expect("a stream");
            LAST.set(Some(stream));
        });
        thread.join().expect("no panic");
        let calls = stub.calls();
        assert_eq!(calls.iter().filter(|it| it.starts_with("cuStreamDestroy")).count(), 1);
        let pushed = calls.iter().filter(|it| it.starts_with("cuCtxPushCurrent")).count();
        assert_eq!(pushed, calls.iter().filter(|it| *it == "cuCtxPopCurrent").count());
        let mode = |to: &str| format!("cuThreadExchangeStreamCaptureMode {to}");
        let exchanged = |to: &str| calls.iter().filter(|it| **it == mode(to)).count();
        assert_eq!((pushed, exchanged("2"), exchanged("0")), (2, 2, 2));
    });
}

#[test]
fn a_primary_context_is_released_once_after_the_last_user() {
    let test = "contexts::a_primary_context_is_released_once_after_the_last_user";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        let stream = Stream::new(&context).expect("a stream");
        drop((context.clone(), context));
        assert!(!stub.calls().iter().any(|call| call.starts_with("cuDevicePrimaryCtxRelease")));
        let handle = format!("{:#x}", stream.raw().0);
        drop(stream);
        let expected = [format!("cuStreamDestroy {handle}"), "cuDevicePrimaryCtxRelease 0".into()];
        assert_eq!(stub.work(), expected);
    });
}

#[test]
fn the_context_of_a_stream_on_an_inactive_device_is_borrowed() {
    let test = "contexts::the_context_of_a_stream_on_an_inactive_device_is_borrowed";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        driver();
        stub.calls();
        // SAFETY: the stub dereferences no handle.
        let found = unsafe { RawStream(0x500).context(driver()) }.expect("a context");
        assert_eq!(found.device().ordinal(), 1);
        assert!(!found.is_retained());
        drop(found);
        assert_eq!(stub.work(), ["cuStreamGetCtx 0x500"], "it made or released a context");
        assert_eq!(stub.thread(), (0, 0));
    });
}

#[test]
fn writes_of_network_devices_are_flushed_for_the_current_context() {
    let test = "contexts::writes_of_network_devices_are_flushed_for_the_current_context";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        stub.calls();
        context.flush_rdma_writes(false).expect("flushed");
        context.flush_rdma_writes(true).expect("flushed");
        context.synchronize().expect("idle");
        let expected = [
            "cuFlushGPUDirectRDMAWrites 0 100",
            "cuFlushGPUDirectRDMAWrites 0 200",
            "cuCtxSynchronize",
        ];
        assert_eq!(stub.work(), expected);
    });
}
