//! Copies, fills and kernels.

use crate::kit::{Loaded, Stub, context, stub, with_stub};
use kvferry_sys::cuda::{
    BatchError, CopyBatch, Error, Grid, Module, SourceOrder, Stream, copy_async, copy_batch,
    fill_async, launch,
};

const DEVICE: u64 = 0x7000_0000_0000;

/// The stub, and the result of a batch of three copies.
fn three_copies(fail: &str, order: SourceOrder) -> (Loaded, Result<(), BatchError>) {
    let stub = stub();
    let stream = Stream::new(&context()).expect("one");
    let copies = (0..3).map(|i| (DEVICE + i, 0x1000 * (i + 1), 10 + i as usize));
    let batch: CopyBatch = copies.collect();
    stub.fail(fail);
    stub.calls();
    // SAFETY: the stub copies nothing.
    let copied = unsafe { copy_batch(&stream, &batch, order) };
    (stub, copied)
}

const LISTS: &str = "700000000000<-1000+10 700000000001<-2000+11 700000000002<-3000+12";

#[test]
fn a_batch_uses_the_second_form_where_the_driver_has_it() {
    let test = "copies::a_batch_uses_the_second_form_where_the_driver_has_it";
    with_stub(test, &Stub { macros: &["VERSION=13000"], ..Stub::default() }, || {
        let orders = [SourceOrder::Stream, SourceOrder::DuringCall, SourceOrder::Any];
        for (order, number) in orders.into_iter().zip(1..) {
            let (stub, copied) = three_copies("", order);
            assert_eq!(copied, Ok(()));
            let call =
                format!("cuMemcpyBatchAsync_v2 order {number} flags 0 first 0 of 1: {LISTS}");
            assert_eq!(stub.work()[0], call);
        }
        let (_, failed) = three_copies("cuMemcpyBatchAsync=700", SourceOrder::Stream);
        let failed = failed.expect_err("the device is lost");
        assert_eq!((failed.failed_at, failed.started), (None, true));
        assert!(failed.error.is_sticky());
    });
}

#[test]
fn a_batch_uses_the_first_form_with_12_8_and_reports_the_copy_that_failed() {
    let test = "copies::a_batch_uses_the_first_form_with_12_8_and_reports_the_copy_that_failed";
    let macros = &["VERSION=12080", "WITHOUT_BATCH_V2"];
    with_stub(test, &Stub { macros, ..Stub::default() }, || {
        let (stub, copied) = three_copies("", SourceOrder::Stream);
        assert_eq!(copied, Ok(()));
        let call = format!("cuMemcpyBatchAsync order 1 flags 0 first 0 of 1: {LISTS}");
        assert_eq!(stub.work()[0], call);
        let (_, failed) = three_copies("cuMemcpyBatchAsync=1", SourceOrder::Stream);
        let failed = failed.expect_err("a copy is wrong");
        assert_eq!((failed.failed_at, failed.started), (Some(1), true));
        assert!(failed.to_string().starts_with("copy 1 of a batch: cuMemcpyBatchAsync failed"));
    });
}

#[test]
fn a_batch_before_12_8_is_not_supported_and_starts_nothing() {
    let test = "copies::a_batch_before_12_8_is_not_supported_and_starts_nothing";
    let macros = &["VERSION=12020", "WITHOUT_BATCH"];
    with_stub(test, &Stub { macros, ..Stub::default() }, || {
        let (_, refused) = three_copies("", SourceOrder::Stream);
        let refused = refused.expect_err("there is no such call");
        assert_eq!(refused.error, Error::NotSupported("cuMemcpyBatchAsync"));
        assert!(!refused.started);
    });
}

#[test]
fn an_empty_batch_calls_nothing_and_a_batch_is_used_again() {
    let test = "copies::an_empty_batch_calls_nothing_and_a_batch_is_used_again";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let stream = Stream::new(&context()).expect("one");
        let mut batch = CopyBatch::with_capacity(1);
        batch.push(1, 2, 3);
        assert_eq!(batch.iter().collect::<Vec<_>>(), [(1, 2, 3)]);
        batch.clear();
        assert!(batch.is_empty());
        stub.calls();
        // SAFETY: there is no copy.
        assert_eq!(unsafe { copy_batch(&stream, &batch, SourceOrder::Stream) }, Ok(()));
        assert!(stub.calls().is_empty());
        stub.fail("cuCtxPushCurrent=709");
        batch.push(1, 2, 3);
        // SAFETY: the stub copies nothing.
        let refused = unsafe { copy_batch(&stream, &batch, SourceOrder::Any) }.expect_err("gone");
        assert!(refused.error.is_sticky());
        assert!(!stub.calls().iter().any(|call| call.starts_with("cuMemcpy")));
    });
}

#[test]
fn single_copies_and_fills_reach_the_driver() {
    with_stub("copies::single_copies_and_fills_reach_the_driver", &Stub::default(), || {
        let stub = stub();
        let stream = Stream::new(&context()).expect("one");
        stub.calls();
        // SAFETY: the stub copies and fills nothing.
        unsafe {
            copy_async(&stream, DEVICE, 0x1234, 99).expect("copied");
            fill_async(&stream, DEVICE, 0xab, 77).expect("filled");
        }
        let expected =
            ["cuMemcpyAsync 700000000000 1234 99", "cuMemsetD8Async 700000000000 171 77"];
        assert_eq!(stub.work(), expected);
        stub.fail("cuMemcpyAsync=700");
        // SAFETY: as above.
        let lost = unsafe { copy_async(&stream, DEVICE, 0x1234, 99) }.expect_err("lost");
        assert!(lost.is_sticky());
        assert_eq!(stub.thread(), (0, 0));
    });
}

#[test]
fn a_kernel_is_loaded_launched_and_unloaded_after_its_last_function() {
    let test = "copies::a_kernel_is_loaded_launched_and_unloaded_after_its_last_function";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        let stream = Stream::new(&context).expect("one");
        stub.calls();
        let module = Module::load_ptx(&context, "ptx").expect("it compiles");
        let function = module.function("gather").expect("it is there");
        drop(module);
        let grid = Grid { blocks: 12, threads: 256, shared_bytes: 64 };
        // SAFETY: the stub runs nothing, and reads two parameters.
        unsafe { launch(&stream, &function, grid, &[DEVICE, 5]) }.expect("launched");
        let expected = [
            "cuModuleLoadDataEx ptx 2 options 5 6 size 4095",
            "cuModuleGetFunction gather",
            "cuLaunchKernel 12 1 1 256 1 1 64 parameters 700000000000 5",
        ];
        assert_eq!(stub.work(), expected);
        drop(function);
        assert!(stub.work()[0].starts_with("cuModuleUnload"));
        stub.fail("cuModuleLoadDataEx=218");
        let refused = Module::load_ptx(&context, "ptx").expect_err("it does not compile");
        assert_eq!((refused.error.code(), refused.log.as_str()), (Some(218), "line 1: nonsense"));
        let zero = Module::load_ptx(&context, "a\0b").expect_err("no text of C");
        assert_eq!(zero.error, Error::BadText);
    });
}
