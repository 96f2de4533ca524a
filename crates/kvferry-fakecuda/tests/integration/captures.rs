//! Stream captures: what they take, and what breaks them.

use crate::driver::{Driver, STREAM, ready};
use kvferry_fakecuda::UNWRITTEN;

const LEN: usize = 4096;
const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

/// A captured stream with pinned and device memory.
fn captured(cuda: &Driver, mode: i32) -> (usize, u64, u64) {
    let stream = cuda.stream().unwrap();
    let (host, device) = (cuda.alloc_host(LEN).unwrap(), cuda.alloc(LEN).unwrap());
    cuda.begin_capture(stream, mode).unwrap();
    (stream, host, device)
}

#[test]
fn work_in_a_capture_does_not_run_and_batches_are_dropped_in_silence() {
    let cuda = ready(&[]);
    let (stream, host, device) = captured(cuda, GLOBAL);
    assert_eq!(cuda.is_capturing(stream), Ok(1));
    cuda.copy(device, host, LEN, stream).unwrap();
    cuda.fill(device, 1, LEN, stream).unwrap();
    cuda.batch(&[(device, host, LEN)], STREAM, stream).unwrap();
    assert_eq!(cuda.fake.counter("captured_batches"), 1);
    assert_eq!(cuda.fake.counter("captured"), 2);
    assert_ne!(cuda.end_capture(stream).unwrap(), 0);
    assert_eq!(cuda.is_capturing(stream), Ok(0));
    cuda.wait_stream(stream).unwrap();
    assert_eq!(cuda.fake.read(device, 1).unwrap(), [UNWRITTEN]);
    assert_eq!(cuda.end_capture(stream), Err(401));
}

#[test]
fn a_batch_in_a_capture_can_be_refused_instead() {
    let cuda = ready(&[("capture_batch", "refuse")]);
    let (stream, host, device) = captured(cuda, RELAXED);
    assert_eq!(cuda.batch(&[(device, host, LEN)], STREAM, stream), Err((900, None)));
    assert_eq!(cuda.end_capture(stream), Err(901));
}

#[test]
fn a_global_capture_is_broken_by_unsafe_calls_of_any_thread_that_is_not_relaxed() {
    let cuda = ready(&[]);
    let (stream, _, _) = captured(cuda, GLOBAL);
    let context = cuda.retain(0).unwrap();
    let on_thread = |mode| {
        let work = || {
            cuda.set_current(context).unwrap();
            assert_eq!(cuda.exchange_capture_mode(mode), Ok(GLOBAL));
            cuda.alloc(LEN).map(|_| ())
        };
        std::thread::scope(|scope| scope.spawn(work).join().unwrap())
    };
    assert_eq!(on_thread(RELAXED), Ok(()));
    assert_eq!(on_thread(THREAD_LOCAL), Ok(()));
    assert_eq!(cuda.is_capturing(stream), Ok(1));
    assert_eq!(on_thread(GLOBAL), Err(900));
    assert_eq!(cuda.is_capturing(stream), Ok(2));
    assert_eq!(cuda.end_capture(stream), Err(901));
}

#[test]
fn a_thread_local_capture_is_broken_by_its_own_thread_only() {
    let cuda = ready(&[]);
    let (stream, _, _) = captured(cuda, THREAD_LOCAL);
    let context = cuda.retain(0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            cuda.set_current(context).unwrap();
            assert!(cuda.alloc(LEN).is_ok());
            assert_eq!(cuda.end_capture(stream), Err(908));
        });
    });
    assert_eq!(cuda.is_capturing(stream), Ok(1));
    assert_eq!(cuda.alloc(LEN), Err(900));
    assert_eq!(cuda.end_capture(stream), Err(901));
}

#[test]
fn a_relaxed_capture_is_broken_by_no_call_beside_it() {
    let cuda = ready(&[]);
    let (stream, _, _) = captured(cuda, RELAXED);
    cuda.alloc(LEN).unwrap();
    let event = cuda.event().unwrap();
    assert_eq!(cuda.query(event), Ok(()));
    assert!(cuda.end_capture(stream).is_ok());
}

#[test]
fn asking_for_the_progress_of_a_captured_stream_or_event_breaks_the_capture() {
    let cuda = ready(&[]);
    let (stream, _, _) = captured(cuda, RELAXED);
    assert_eq!(cuda.query_stream(stream), Err(900));
    assert_eq!(cuda.end_capture(stream), Err(901));
    let (stream, _, _) = captured(cuda, RELAXED);
    let event = cuda.mark(stream);
    assert_eq!(cuda.query(event), Err(907));
    assert_eq!(cuda.end_capture(stream), Err(901));
}

#[test]
fn a_captured_event_pulls_the_stream_that_waits_for_it_into_the_capture() {
    let cuda = ready(&[]);
    let (stream, host, device) = captured(cuda, RELAXED);
    let ours = cuda.stream().unwrap();
    cuda.stream_after(ours, cuda.mark(stream)).unwrap();
    assert_eq!(cuda.is_capturing(ours), Ok(1));
    cuda.copy(device, host, LEN, ours).unwrap();
    assert_eq!(cuda.end_capture(ours), Err(903));
    cuda.stream_after(stream, cuda.mark(ours)).unwrap();
    assert!(cuda.end_capture(stream).is_ok(), "the fork was joined");
    assert_eq!(cuda.is_capturing(ours), Ok(0));
    let (stream, _, _) = captured(cuda, RELAXED);
    cuda.stream_after(ours, cuda.mark(stream)).unwrap();
    assert_eq!(cuda.end_capture(stream), Err(904));
}

#[test]
fn the_legacy_stream_breaks_the_captures_of_blocking_streams() {
    let cuda = ready(&[]);
    let blocking = cuda.stream_with(0).unwrap();
    let device = cuda.alloc(LEN).unwrap();
    cuda.begin_capture(blocking, RELAXED).unwrap();
    assert_eq!(cuda.fill(device, 0, LEN, 0), Err(906));
    assert_eq!(cuda.end_capture(blocking), Err(901));
    let (free, _, _) = captured(cuda, RELAXED);
    assert_eq!(cuda.fill(device, 0, LEN, 0), Ok(()), "non-blocking streams do not mind");
    assert!(cuda.end_capture(free).is_ok());
    assert_eq!(cuda.begin_capture(0, RELAXED), Err(900));
}
