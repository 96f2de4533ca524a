//! An agent that can't start. The only test of its program, because it counts the process's threads.

use kvferry::{Agent, ErrorKind, Transports};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("Linux").count()
}

#[test]
fn an_agent_that_cannot_start_leaves_no_thread_behind() {
    let before = threads();
    let mooncake = Transports::only(kvferry_mooncake::link());
    let started = Agent::builder().transports(mooncake).secret(b"secret").start();
    let e = started.expect_err("Mooncake's protocol can't prove a secret");
    assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
    // The kernel lists a thread for a moment after its end.
    kvferry_testkit::eventually("no thread is left", || threads() <= before);
}
