//! Streams, events and functions of the host.

use crate::kit::{Stub, context, stub, with_stub};
use kvferry_sys::cuda::{Error, Event, RawEvent, RawStream, Stream, host_function};
use std::sync::atomic::{AtomicU32, Ordering};

static CALLED: AtomicU32 = AtomicU32::new(0);

#[test]
fn streams_do_not_block_and_events_are_made_to_sleep_without_timing() {
    let test = "events::streams_do_not_block_and_events_are_made_to_sleep_without_timing";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        stub.calls();
        let (stream, event) =
            (Stream::new(&context).expect("one"), Event::new(&context).expect("one"));
        let (s, e) = (format!("{:#x}", stream.raw().0), format!("{:#x}", event.raw().0));
        event.record(&stream).expect("recorded");
        stream.wait(&event).expect("it waits");
        event.synchronize().expect("reached");
        stream.synchronize().expect("idle");
        drop((stream, event));
        let expected = [
            "cuStreamCreate 1".into(),
            "cuEventCreate 3".into(),
            format!("cuEventRecord {e} {s}"),
            format!("cuStreamWaitEvent {s} {e} 0"),
            format!("cuEventSynchronize {e}"),
            format!("cuStreamSynchronize {s}"),
            format!("cuStreamDestroy {s}"),
            format!("cuEventDestroy {e}"),
        ];
        assert_eq!(stub.work(), expected);
        assert_eq!(stub.thread(), (0, 0));
    });
}

#[test]
fn a_query_tells_not_ready_from_an_error() {
    with_stub("events::a_query_tells_not_ready_from_an_error", &Stub::default(), || {
        let stub = stub();
        let context = context();
        let (stream, event) =
            (Stream::new(&context).expect("one"), Event::new(&context).expect("one"));
        assert_eq!((stream.query(), event.query()), (Ok(true), Ok(true)));
        stub.fail("cuStreamQuery=600,cuEventQuery=600");
        assert_eq!((stream.query(), event.query()), (Ok(false), Ok(false)));
        stub.fail("cuEventQuery=700");
        let lost = event.query().expect_err("the device is lost");
        assert!(lost.is_sticky());
        assert_eq!(
            lost.to_string(),
            "cuEventQuery failed with CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was \
             encountered"
        );
        // SAFETY: the stub dereferences no handle.
        let raw = |event: u64| unsafe { RawEvent(event).query(&context) };
        assert_eq!(raw(0), Err(Error::NullEvent));
        stub.fail("cuEventQuery=600");
        assert_eq!(raw(0x77), Ok(false));
        // SAFETY: as above.
        assert_eq!(unsafe { stream.wait_raw(RawEvent(0)) }, Err(Error::NullEvent));
    });
}

#[test]
fn an_event_is_recorded_on_a_callers_stream_unless_that_is_in_a_capture() {
    let test = "events::an_event_is_recorded_on_a_callers_stream_unless_that_is_in_a_capture";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        let event = Event::new(&context).expect("one");
        let e = format!("{:#x}", event.raw().0);
        stub.calls();
        // SAFETY: the stub dereferences no handle.
        let record = |stream: u64| unsafe { event.record_raw(RawStream(stream)) };
        for stream in [0, 1, 2, 0x500] {
            record(stream).expect("recorded");
        }
        let recorded =
            [format!("{e} (nil)"), format!("{e} 0x1"), format!("{e} 0x2"), format!("{e} 0x500")];
        let mut calls = stub.work();
        calls.retain(|call| call.starts_with("cuEventRecord"));
        assert_eq!(calls, recorded.map(|it| format!("cuEventRecord {it}")));
        assert_eq!(record(0xcab), Err(Error::Capturing(0xcab)));
        // SAFETY: as above.
        assert_eq!(unsafe { RawStream(0xcab).wait(&event) }, Err(Error::Capturing(0xcab)));
        stub.fail("cuStreamIsCapturing=906");
        assert_eq!(record(0), Err(Error::Capturing(0)), "a blocking stream is in a capture");
        stub.fail("cuStreamIsCapturing=400");
        assert_eq!(record(0x500).expect_err("no such stream").code(), Some(400));
        assert_eq!(record(0x500), Err(Error::UnknownStream(0x500)));
        assert!(!stub.work().iter().any(|call| call.starts_with("cuEventRecord")));
        stub.fail("");
        // SAFETY: as above.
        unsafe { RawStream(0x500).wait(&event) }.expect("it waits");
        let waits = ["cuStreamIsCapturing 0x500".into(), format!("cuStreamWaitEvent 0x500 {e} 0")];
        assert_eq!(stub.work(), waits);
        assert!(RawStream(0).is_default() && RawStream::PER_THREAD.is_default());
        assert!(!RawStream(3).is_default());
    });
}

#[test]
fn a_stream_of_ours_does_not_join_a_capture_through_a_callers_event() {
    let test = "events::a_stream_of_ours_does_not_join_a_capture_through_a_callers_event";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let stream = Stream::new(&context()).expect("one");
        // SAFETY: the stub dereferences no handle.
        let wait = || unsafe { stream.wait_raw(RawEvent(0x77)) };
        stub.fail("cuEventQuery=600");
        stub.calls();
        assert_eq!(wait(), Ok(()), "the event is not reached yet");
        let s = format!("{:#x}", stream.raw().0);
        let calls = ["cuEventQuery 0x77".into(), format!("cuStreamWaitEvent {s} 0x77 0")];
        assert_eq!(stub.work(), calls);
        stub.fail("cuEventQuery=907");
        assert_eq!(wait(), Err(Error::CapturedEvent(0x77)));
        assert_eq!(stub.work(), ["cuEventQuery 0x77"]);
        stub.fail("cuEventQuery=400");
        assert_eq!(wait(), Err(Error::UnknownEvent(0x77)));
        assert_eq!(stub.work(), ["cuEventQuery 0x77"]);
    });
}

#[test]
fn a_host_function_is_called_once_and_its_panic_is_contained() {
    let test = "events::a_host_function_is_called_once_and_its_panic_is_contained";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let stream = Stream::new(&context()).expect("one");
        let called = || CALLED.load(Ordering::Relaxed);
        let count = || {
            CALLED.fetch_add(1, Ordering::Relaxed);
        };
        host_function(&stream, Box::new(count)).expect("queued");
        assert_eq!(called(), 1);
        let panics = || {
            CALLED.fetch_add(1, Ordering::Relaxed);
            std::panic::resume_unwind(Box::new(()));
        };
        host_function(&stream, Box::new(panics)).expect("queued");
        assert_eq!(called(), 2);
        struct Counted;
        impl Drop for Counted {
            fn drop(&mut self) {
                CALLED.fetch_add(100, Ordering::Relaxed);
            }
        }
        stub.fail("cuLaunchHostFunc=719");
        let counted = Counted;
        let refused = host_function(&stream, Box::new(move || drop(counted)));
        assert!(refused.expect_err("the device is lost").is_sticky());
        assert_eq!(called(), 102, "what was refused is dropped");
    });
}
