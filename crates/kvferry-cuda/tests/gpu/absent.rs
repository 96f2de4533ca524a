//! Drivers that can't be used, or that lack functions: each refusal says what to do, and memory of the host goes on.

use crate::kit::*;
use kvferry::{Access, TransportKind};
use kvferry_cuda::Edge;
use kvferry_fakecuda::Fault;
use kvferry_sys::cuda::{RawStream, VmmAllocation, VmmMapping, granularity};
use kvferry_testkit::Watchdog;
use kvferry_testkit::pattern::Pattern;
use std::process::Command;

const LEN: usize = 64 << 10;

/// Runs a test of this binary in a process of its own, whose fake driver has these settings. Returns its output.
fn child(test: &str, settings: &str) -> String {
    let output = Command::new(std::env::current_exe().expect("a program"))
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("FAKECUDA", settings)
        .output()
        .expect("it starts");
    let [out, err] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
    assert!(output.status.success() && out.contains("1 passed"), "{settings}: {out}{err}");
    out.into_owned()
}

#[test]
fn a_driver_that_can_not_be_used_is_refused_with_what_to_do_and_host_memory_goes_on() {
    let _bound = Watchdog::new(LIMIT);
    if FakeRig::new(&[]).is_none() {
        return;
    }
    for (settings, says) in [
        ("no_device=1:ever", "sees no device; check CUDA_VISIBLE_DEVICES"),
        ("devices=0", "sees no device; check CUDA_VISIBLE_DEVICES"),
        ("driver_mismatch=1:ever", "(803); restart the machine after a driver update"),
        ("missing_symbol=2", "library has no cuInit; is another library in its place?"),
        ("missing_symbol=1:ever", "more functions; is another library in its place?"),
    ] {
        let out = child("absent::child_of_a_driver_that_can_not_be_used", settings);
        let refused = out.lines().find(|line| line.starts_with("refused: "));
        assert!(refused.is_some_and(|line| line.contains(says)), "{settings}: {out}");
    }
}

#[test]
#[ignore = "started by the test of drivers that can't be used"]
fn child_of_a_driver_that_can_not_be_used() {
    let _bound = Watchdog::new(LIMIT);
    let _rig = Rig::new(&[]);
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let refused = kvferry_cuda::memory(1 << 40, 4096, None).expect_err("no memory of a GPU");
        println!("refused: {refused}");
        let [from, to] =
            [&near, &far].map(|it| it.allocate(LEN, Access::READ_WRITE).expect("memory"));
        from.write_at(0, &Pattern::new(1).bytes(LEN)).expect("inside");
        let peer = peer_of(&near, &far);
        peer.write(&whole(&from, &to, LEN), &options()).expect("written");
        from.write_at(0, &[0; LEN]).expect("inside");
        peer.read(&whole(&from, &to, LEN), &options()).expect("read");
        let mut got = vec![0; LEN];
        from.read_at(0, &mut got).expect("inside");
        assert!(got == Pattern::new(1).bytes(LEN), "{kind}");
        // The failure is kept.
        let again = kvferry_cuda::memory(1 << 40, 4096, None).expect_err("no memory of a GPU");
        assert_eq!(again, refused);
    }
}

#[test]
fn a_driver_that_lacks_a_function_which_is_not_required_moves_every_byte_without_it() {
    let _bound = Watchdog::new(LIMIT);
    if FakeRig::new(&[]).is_none() {
        return;
    }
    for (symbol, has_batches) in [
        ("cuMemcpyBatchAsync", false),
        ("cuMemHostRegister", false),
        ("cuMemHostGetDevicePointer", true),
        ("cuModuleLoadDataEx", true),
        ("cuLaunchKernel", true),
        ("cuGetErrorName", true),
    ] {
        let out = child("bytes::child_of_a_version", &format!("hide={symbol}"));
        assert!(out.contains(&format!("batches: {has_batches}")), "{symbol}: {out}");
    }
}

/// Memory of the virtual memory functions belongs to no context.
#[test]
fn without_memory_for_a_context_a_range_is_refused_and_taken_later() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let context = rig.context(1);
    let len = granularity(context.device(), false).expect("it is known");
    let allocation = VmmAllocation::new(&context, len, false).expect("memory");
    let mapping = VmmMapping::new(&context, &[(&allocation, len)]).expect("mapped");
    rig.fake.destroy_context(1);
    let memory = || kvferry_cuda::memory(mapping.address(), len as u64, Some(1));
    rig.fake.fault(Fault::ContextOom, 1, 1);
    let refused = memory().expect_err("no context");
    assert!(refused.to_string().contains("OUT_OF_MEMORY"), "{refused}");
    assert_eq!(rig.fake.counter("contexts"), 0);
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let region = near.register_device(memory().expect("a context"), Access::READ_WRITE);
    let region = region.expect("a region");
    rig.fake.write(mapping.address(), &Pattern::new(1).bytes(LEN)).expect("it is mapped");
    let to = far.allocate(LEN, Access::READ_WRITE).expect("memory");
    peer_of(&near, &far).write(&whole(&region, &to, LEN), &options()).expect("written");
    let mut got = vec![0; LEN];
    to.read_at(0, &mut got).expect("inside");
    assert!(got == Pattern::new(1).bytes(LEN));
    assert_eq!(rig.findings(), Vec::<String>::new());
    // A default stream of a GPU without a context makes one.
    rig.fake.fault(Fault::ContextOom, 1, 1);
    // SAFETY: default streams always exist.
    let refused = unsafe { Edge::after_stream(RawStream(0), 0) }.expect_err("no context");
    assert!(refused.to_string().contains("OUT_OF_MEMORY"), "{refused}");
    // SAFETY: as above.
    assert!(unsafe { Edge::after_stream(RawStream(0), 0) }.is_ok());
}
