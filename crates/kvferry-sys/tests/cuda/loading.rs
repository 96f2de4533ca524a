//! When the driver can be used, and which functions are found.

use crate::kit::{Stub, context, driver, stub, with_library, with_stub};
use kvferry_sys::cuda::{
    BatchCall, Context, DeviceUuid, Driver, Error, Event, Stream, Unavailable, WritesOrdering,
    host_function,
};
use kvferry_sys::host::LoadedDriver;
use std::path::Path;

/// The start of the stub's memory of a device.
const DEVICE: usize = 0x70 << 40;

/// Any thread may use and drop what the driver gives.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Driver>();
    shared::<Context>();
    shared::<Stream>();
    shared::<Event>();
};

fn refused() -> (Unavailable, String) {
    let why = Driver::get().expect_err("the driver can't be used");
    assert_eq!(Driver::get().expect_err("nor the second time"), why);
    (why.clone(), why.to_string())
}

#[test]
fn a_missing_library_is_reported_with_its_name() {
    let file = Path::new("/nonexistent/libcuda.so.1");
    with_library("loading::a_missing_library_is_reported_with_its_name", file, || {
        let (why, text) = refused();
        assert_eq!(why, Unavailable::NoLibrary("/nonexistent/libcuda.so.1".into()));
        assert!(text.contains("install the NVIDIA driver"), "{text}");
    });
}

#[test]
fn a_file_that_is_no_library_is_reported_as_broken() {
    let file = Path::new("/proc/self/cmdline");
    with_library("loading::a_file_that_is_no_library_is_reported_as_broken", file, || {
        let (why, text) = refused();
        assert!(matches!(why, Unavailable::BrokenLibrary(_)), "{why:?}");
        assert!(text.contains("reinstall the driver"), "{text}");
    });
}

#[test]
fn a_library_without_the_functions_is_refused_before_any_call() {
    let file = Path::new("libc.so.6");
    with_library(
        "loading::a_library_without_the_functions_is_refused_before_any_call",
        file,
        || {
            let (why, text) = refused();
            let Unavailable::MissingSymbols(names) = why else { panic!("{why:?}") };
            assert!(
                names.contains(&"cuInit") && names.contains(&"cuDeviceGetUuid_v2"),
                "{names:?}"
            );
            assert!(text.contains("more functions"), "{text}");
        },
    );
}

#[test]
fn missing_functions_are_named_and_the_driver_is_not_initialised() {
    let stub_of = Stub { macros: &["WITHOUT_EVENTS"], ..Stub::default() };
    let test = "loading::missing_functions_are_named_and_the_driver_is_not_initialised";
    with_stub(test, &stub_of, || {
        let (why, text) = refused();
        let missing = vec!["cuEventCreate", "cuEventDestroy_v2"];
        assert_eq!(why, Unavailable::MissingSymbols(missing));
        assert!(text.contains("no cuEventCreate, cuEventDestroy_v2;"), "{text}");
        assert!(!stub().calls().iter().any(|call| call.starts_with("cuInit")));
    });
}

#[test]
fn a_driver_before_11_4_is_too_old() {
    let stub_of = Stub { macros: &["VERSION=11020"], ..Stub::default() };
    with_stub("loading::a_driver_before_11_4_is_too_old", &stub_of, || {
        let (why, text) = refused();
        assert_eq!(why, Unavailable::TooOld(11020));
        assert!(text.contains("CUDA 11.2 only"), "{text}");
    });
}

/// Runs with a `cuInit` that fails.
fn with_init(test: &str, code: &str, check: impl FnOnce(Unavailable, String)) {
    let list = format!("cuInit={code}");
    let stub_of = Stub { environment: &[("STUB_FAIL", &list)], ..Stub::default() };
    with_stub(test, &stub_of, || {
        let (why, text) = refused();
        let inits = stub().calls().iter().filter(|call| call.starts_with("cuInit")).count();
        assert_eq!(inits, 1, "the driver is initialised once, even if it fails");
        check(why, text);
    });
}

#[test]
fn an_initialisation_without_a_device_says_so() {
    with_init("loading::an_initialisation_without_a_device_says_so", "100", |why, text| {
        assert_eq!(why, Unavailable::NoDevice);
        assert!(text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
    });
}

#[test]
fn a_driver_that_counts_no_device_has_none() {
    let stub_of = Stub { environment: &[("STUB_DEVICES", "0")], ..Stub::default() };
    with_stub("loading::a_driver_that_counts_no_device_has_none", &stub_of, || {
        assert_eq!(refused().0, Unavailable::NoDevice);
    });
}

#[test]
fn a_library_that_does_not_fit_the_kernel_module_says_so() {
    let test = "loading::a_library_that_does_not_fit_the_kernel_module_says_so";
    with_init(test, "803", |why, text| {
        assert_eq!(why, Unavailable::Mismatch);
        assert!(text.contains("restart the machine"), "{text}");
    });
}

#[test]
fn another_failure_of_the_initialisation_names_its_code() {
    let test = "loading::another_failure_of_the_initialisation_names_its_code";
    with_init(test, "999", |why, text| {
        let Unavailable::Init(error) = why else { panic!("{why:?}") };
        assert_eq!((error.call, error.code, error.name), ("cuInit", 999, "CUDA_ERROR_UNKNOWN"));
        assert!(error.is_sticky());
        assert!(text.contains("cuInit failed with CUDA_ERROR_UNKNOWN (999)"), "{text}");
    });
}

#[test]
fn a_driver_that_another_library_used_before_a_fork_points_to_spawn() {
    let test = "loading::a_driver_that_another_library_used_before_a_fork_points_to_spawn";
    with_init(test, "3", |_, text| assert!(text.contains("`spawn`"), "{text}"));
}

#[test]
fn the_stub_of_the_vendors_toolkit_is_recognised() {
    let test = "loading::the_stub_of_the_vendors_toolkit_is_recognised";
    with_init(test, "34", |_, text| assert!(text.contains("LD_LIBRARY_PATH"), "{text}"));
}

#[test]
fn a_function_that_the_driver_lacks_is_a_typed_error() {
    let stub_of = Stub { macros: &["WITHOUT_LAUNCH_HOST_FUNC"], ..Stub::default() };
    with_stub("loading::a_function_that_the_driver_lacks_is_a_typed_error", &stub_of, || {
        let stream = Stream::new(&context()).expect("a stream");
        let refused = host_function(&stream, Box::new(|| ())).expect_err("there is none");
        assert_eq!(refused, Error::NotSupported("cuLaunchHostFunc"));
        assert_eq!(stub().thread(), (0, 0));
    });
}

/// The version with which a function was requested, and the function that was asked.
fn requested(calls: &[String], name: &str) -> Vec<String> {
    let wanted = format!(" {name} ");
    calls.iter().filter(|call| call.contains(&wanted)).cloned().collect()
}

#[test]
fn functions_are_requested_with_the_version_of_their_signature() {
    let test = "loading::functions_are_requested_with_the_version_of_their_signature";
    let stub_of = Stub { macros: &["VERSION=13020", "HIDDEN_BATCH"], ..Stub::default() };
    with_stub(test, &stub_of, || {
        assert_eq!(driver().version(), 13020);
        // Neither form is exported: the driver's own search has found both.
        assert_eq!(driver().batch_call(), Some(BatchCall::V2));
        let calls = stub().calls();
        let batch = ["12080 1", "13000 1"]
            .map(|version| format!("cuGetProcAddress_v2 cuMemcpyBatchAsync {version}"));
        assert_eq!(requested(&calls, "cuMemcpyBatchAsync"), batch);
        let context = ["cuGetProcAddress_v2 cuStreamGetCtx 9020 1"];
        assert_eq!(requested(&calls, "cuStreamGetCtx"), context);
        let synchronize = ["cuGetProcAddress_v2 cuCtxSynchronize 2000 1"];
        assert_eq!(requested(&calls, "cuCtxSynchronize"), synchronize);
    });
}

#[test]
fn a_driver_is_not_asked_for_a_later_version_than_its_own() {
    let test = "loading::a_driver_is_not_asked_for_a_later_version_than_its_own";
    let macros = &["VERSION=12080", "HIDDEN_BATCH"];
    with_stub(test, &Stub { macros, ..Stub::default() }, || {
        assert_eq!(driver().batch_call(), Some(BatchCall::V1));
        let batch = ["cuGetProcAddress_v2 cuMemcpyBatchAsync 12080 1"];
        assert_eq!(requested(&stub().calls(), "cuMemcpyBatchAsync"), batch);
    });
}

#[test]
fn a_function_that_the_search_does_not_find_is_absent_even_if_it_is_exported() {
    let test = "loading::a_function_that_the_search_does_not_find_is_absent_even_if_it_is_exported";
    let stub_of = Stub { macros: &["VERSION=13000", "DENIED_BATCH"], ..Stub::default() };
    with_stub(test, &stub_of, || assert_eq!(driver().batch_call(), None));
}

#[test]
fn the_oldest_drivers_have_the_first_form_of_the_search_and_no_batches() {
    let test = "loading::the_oldest_drivers_have_the_first_form_of_the_search_and_no_batches";
    let macros = &["VERSION=11040", "WITHOUT_BATCH"];
    with_stub(test, &Stub { macros, ..Stub::default() }, || {
        assert_eq!(driver().batch_call(), None);
        let calls = stub().calls();
        let push = ["cuGetProcAddress cuCtxPushCurrent 4000 1"];
        assert_eq!(requested(&calls, "cuCtxPushCurrent"), push);
        assert!(!calls.iter().any(|call| call.starts_with("cuGetProcAddress_v2")));
        assert!(Stream::new(&context()).is_ok());
    });
}

#[test]
fn exported_names_serve_where_there_is_no_search() {
    let stub_of = Stub { macros: &["VERSION=13000", "WITHOUT_FIND"], ..Stub::default() };
    with_stub("loading::exported_names_serve_where_there_is_no_search", &stub_of, || {
        assert_eq!(driver().batch_call(), Some(BatchCall::V2));
        assert!(Event::new(&context()).is_ok());
    });
}

#[test]
fn a_forked_child_makes_no_call_of_the_driver() {
    let test = "loading::a_forked_child_makes_no_call_of_the_driver";
    with_stub(test, &Stub::default(), || {
        let stub = stub();
        let context = context();
        let (stream, event) = (Stream::new(&context), Event::new(&context));
        let (stream, event) = (stream.expect("a stream"), event.expect("an event"));
        let current = context.clone();
        let entered = current.enter().expect("it is current");
        stub.calls();
        let child = in_child(|| {
            let forked = |error: Error| error.is_forked();
            let refused = Driver::get().is_err_and(|why| *why == Unavailable::Forked)
                && event.record(&stream).is_err_and(forked)
                && stream.wait(&event).is_err_and(forked)
                && context.enter().is_err_and(forked)
                && Context::primary(context.device()).is_err_and(forked);
            drop((entered, event, stream, context));
            refused && stub.calls().is_empty()
        });
        assert!(child, "the child called the driver, or was not refused");
    });
}

/// Whether `body` returns true in a forked process.
fn in_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: this process has one more thread, that of the test runner, which holds no lock that `body`
    // takes. The child leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "no process can be forked");
    if pid == 0 {
        let body = std::panic::AssertUnwindSafe(body);
        let fine = std::panic::catch_unwind(body).unwrap_or(false);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!fine)) }
    }
    let mut status = 0;
    // SAFETY: the child is ours, and `status` outlives the call.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    waited == pid && status == 0
}

#[test]
fn a_forked_child_hears_why_its_parent_has_no_driver() {
    let file = Path::new("/nonexistent/libcuda.so.1");
    with_library("loading::a_forked_child_hears_why_its_parent_has_no_driver", file, || {
        let why = refused().0;
        assert!(in_child(|| Driver::get().is_err_and(|it| *it == why)));
    });
}

/// Whether the driver that this process has loaded says that a byte is memory of a device.
fn is_of_a_device(address: usize) -> bool {
    LoadedDriver::find().expect("it is loaded").has_device_memory_at(address)
}

#[test]
fn a_driver_that_answers_without_knowing_the_memory_is_left_to_a_forked_child() {
    let test =
        "loading::a_driver_that_answers_without_knowing_the_memory_is_left_to_a_forked_child";
    let environment = &[("STUB_FAIL", "cuPointerGetAttribute=999")];
    with_stub(test, &Stub { environment, ..Stub::default() }, || {
        let stub = stub();
        assert!(!is_of_a_device(DEVICE));
        assert!(stub.calls().iter().any(|call| call.starts_with("cuPointerGetAttribute ")));
        assert!(in_child(|| Driver::get().is_ok()));
        // An answer that an initialised driver gives.
        stub.fail("cuPointerGetAttribute=1");
        assert!(!is_of_a_device(DEVICE));
        assert!(in_child(|| Driver::get().is_err_and(|why| *why == Unavailable::Forked)));
    });
}

#[test]
fn a_library_that_was_refused_before_its_first_call_is_asked_in_a_forked_child() {
    let test =
        "loading::a_library_that_was_refused_before_its_first_call_is_asked_in_a_forked_child";
    let stub_of = Stub { macros: &["WITHOUT_EVENTS"], ..Stub::default() };
    with_stub(test, &stub_of, || {
        let _stub = stub();
        let why = refused().0;
        assert!(in_child(|| is_of_a_device(DEVICE) && Driver::get().is_err_and(|it| *it == why)));
    });
}

#[test]
fn a_driver_that_another_library_uses_is_left_to_no_child_though_this_one_was_refused_before() {
    let test = "loading::a_driver_that_another_library_uses_is_left_to_no_child_though_this_one_was_refused_before";
    let stub_of = Stub { macros: &["WITHOUT_EVENTS"], ..Stub::default() };
    with_stub(test, &stub_of, || {
        let _stub = stub();
        // An answer that an initialised driver gives.
        assert!(is_of_a_device(DEVICE));
        let why = refused().0;
        assert!(in_child(|| !is_of_a_device(DEVICE) && Driver::get().is_err_and(|it| *it == why)));
    });
}

#[test]
fn a_child_in_which_the_driver_is_not_initialised_hears_that_it_was_forked() {
    let test = "loading::a_child_in_which_the_driver_is_not_initialised_hears_that_it_was_forked";
    let environment = &[("STUB_FAIL", "cuInit=3")];
    with_stub(test, &Stub { environment, ..Stub::default() }, || {
        // As an agent does.
        kvferry_sys::fd::install_fork_handlers().expect("a placeholder");
        assert!(in_child(|| Driver::get().is_err_and(|why| *why == Unavailable::Forked)));
    });
}

#[test]
fn a_child_that_was_forked_during_the_first_use_is_refused() {
    let test = "loading::a_child_that_was_forked_during_the_first_use_is_refused";
    let stub_of = Stub { environment: &[("STUB_HELD_INIT", "1")], ..Stub::default() };
    with_stub(test, &stub_of, || {
        let stub = stub();
        let loading = std::thread::spawn(|| Driver::get().is_ok());
        while !stub.is_in_init() {
            std::thread::yield_now();
        }
        assert!(in_child(|| Driver::get().is_err_and(|why| *why == Unavailable::Forked)));
        stub.release_init();
        assert!(loading.join().expect("no panic"));
    });
}

#[test]
fn a_device_is_found_by_its_name_though_the_driver_does_not_tell_that_of_another() {
    let test =
        "loading::a_device_is_found_by_its_name_though_the_driver_does_not_tell_that_of_another";
    let environment = &[("STUB_FAIL", "cuDeviceGetUuid 0=46,cuDeviceGetPCIBusId 0=46")];
    with_stub(test, &Stub { environment, ..Stub::default() }, || {
        let devices = driver().devices().expect("two");
        let named = |name: &str| driver().device_named(name.parse().expect("a name"));
        for name in ["1", "GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1", "0000:1c:00.0"] {
            assert_eq!(named(name), Ok(devices[1]), "{name}");
        }
        // It may be the one that the driver does not tell of.
        for name in ["GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0", "0000:1b:00.0"] {
            assert_eq!(named(name).expect_err("unknown").code(), Some(46), "{name}");
        }
    });
}

#[test]
fn a_device_is_described() {
    with_stub("loading::a_device_is_described", &Stub::default(), || {
        let devices = driver().devices().expect("two");
        let info = devices[1].info().expect("it is described");
        assert_eq!((info.ordinal, info.name.as_str()), (1, "Stub 1"));
        assert_eq!(info.pci_bus_id, "0000:1c:00.0");
        assert_eq!(info.uuid, DeviceUuid([0xa1; 16]));
        assert_eq!(info.uuid.to_string(), "GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1");
        assert_eq!((info.compute_capability, info.multiprocessors), ((75, 76), 16));
        assert_eq!(info.rdma_writes_ordering, WritesOrdering::Owner);
        assert!(info.dma_buf && info.host_register && info.vmm && info.vmm_export_fd);
        assert!(!info.vmm_export_fabric, "the driver does not know the attribute");
        let named = |name: &str| driver().device_named(name.parse().expect("a name"));
        for name in ["1", "GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1", "0000:1c:00.0"] {
            assert_eq!(named(name), Ok(devices[1]), "{name}");
        }
        for name in ["2", "GPU-07070707-0707-0707-0707-070707070707", "0000:1d:00.0"] {
            let unknown = named(name).expect_err("there is none").to_string();
            assert!(unknown.contains(&format!("no CUDA device {name} in")), "{unknown}");
            let seen = "1 (GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1, 0000:1c:00.0)";
            assert!(unknown.contains(seen) && unknown.contains("sees 0 ("), "{unknown}");
        }
        assert!(driver().device(2).is_err() && driver().device(-1).is_err());
        assert_eq!(devices[0].has_primary_context(), Ok(true));
        assert_eq!(devices[1].has_primary_context(), Ok(false));
        assert!(
            !stub().calls().iter().any(|call| call.starts_with("cuDevicePrimaryCtxRetain")),
            "it made a context"
        );
    });
}
