//! Published corruption bugs of serving engines, re-created: the race checker finds each one, and
//! finds nothing once the missing edge is there.

use crate::driver::{ANY, Driver, STREAM, processor_time, ready};
use kvferry_fakecuda::control::FakeKernel;

const BLOCK: usize = 64 << 10;

/// Two streams of an engine, a KV block of the device and one of the host.
struct Engine {
    cuda: &'static Driver,
    compute: usize,
    copies: usize,
    block: u64,
    host: u64,
}

impl Engine {
    fn new() -> Self {
        let cuda = ready(&[]);
        let (compute, copies) = (cuda.stream().unwrap(), cuda.stream().unwrap());
        let (block, host) = (cuda.alloc(BLOCK).unwrap(), cuda.alloc_host(BLOCK).unwrap());
        Self { cuda, compute, copies, block, host }
    }

    fn kernel(&self, stream: usize, name: &str, reads: &[u64], writes: &[u64]) {
        let range = |&start: &u64| (start, BLOCK as u64);
        let reads: Vec<(u64, u64)> = reads.iter().map(range).collect();
        let writes: Vec<(u64, u64)> = writes.iter().map(range).collect();
        let kernel = FakeKernel {
            name,
            reads: &reads,
            writes: &writes,
            fill: 0x42,
            delay_ns: 100_000,
            ..FakeKernel::default()
        };
        self.cuda.fake.launch(stream, &kernel).unwrap();
    }

    /// The edge from all work of one stream to what another does next.
    fn edge(&self, from: usize, to: usize) {
        let event = self.cuda.mark(from);
        self.cuda.stream_after(to, event).unwrap();
    }

    fn races(&self) -> usize {
        self.cuda.synchronize().unwrap();
        let races = self.cuda.fake.findings();
        races.iter().filter(|finding| finding.starts_with("race on")).count()
    }
}

/// Runs a program without its edge and with it, in two states of the checker.
fn caught_and_clean(program: impl Fn(&Engine, bool)) {
    let engine = Engine::new();
    program(&engine, false);
    assert!(engine.races() > 0, "the missing edge is not found");
    engine.cuda.fake.clear_findings();
    let engine = Engine::new();
    program(&engine, true);
    assert_eq!(engine.races(), 0, "{:?}", engine.cuda.fake.findings());
}

#[test]
fn a_store_that_does_not_follow_the_kernel_that_wrote_the_block_is_caught() {
    // vllm#45704
    caught_and_clean(|e, edge| {
        e.kernel(e.compute, "attention writes the block", &[], &[e.block]);
        if edge {
            e.edge(e.compute, e.copies);
        }
        e.cuda.batch(&[(e.host, e.block, BLOCK)], STREAM, e.copies).unwrap();
    });
}

#[test]
fn a_load_that_does_not_follow_the_last_reader_of_the_old_block_is_caught() {
    // vllm#47282
    caught_and_clean(|e, edge| {
        e.kernel(e.compute, "attention reads the old block", &[e.block], &[]);
        if edge {
            e.edge(e.compute, e.copies);
        }
        e.cuda.copy(e.block, e.host, BLOCK, e.copies).unwrap();
    });
}

#[test]
fn a_load_that_does_not_follow_the_zeroing_of_its_block_is_caught() {
    // vllm#50696
    caught_and_clean(|e, edge| {
        e.cuda.fill(e.block, 0, BLOCK, e.compute).unwrap();
        if edge {
            e.edge(e.compute, e.copies);
        }
        e.cuda.copy(e.block, e.host, BLOCK, e.copies).unwrap();
    });
}

#[test]
fn a_store_whose_source_may_be_read_in_any_order_is_caught_in_spite_of_the_stream() {
    // vllm#39306: the edge to the copy stream is there, and ANY undoes it.
    caught_and_clean(|e, right| {
        e.kernel(e.compute, "attention writes the block", &[], &[e.block]);
        e.edge(e.compute, e.copies);
        let order = if right { STREAM } else { ANY };
        e.cuda.batch(&[(e.host, e.block, BLOCK)], order, e.copies).unwrap();
    });
}

#[test]
fn a_peer_copy_reported_as_done_before_its_stream_is_waited_for_is_caught() {
    // Mooncake#2163: the transfer returned after a copy between device addresses, which is not
    // synchronous with the host, and the receiver used the block.
    caught_and_clean(|e, edge| {
        let received = e.cuda.alloc(BLOCK).unwrap();
        e.kernel(e.copies, "the sender writes", &[], &[e.block]);
        e.cuda.copy(received, e.block, BLOCK, e.copies).unwrap();
        if edge {
            e.cuda.wait_stream(e.copies).unwrap();
        }
        e.kernel(e.compute, "the receiver reads", &[received], &[]);
    });
}

#[test]
fn a_transfer_that_does_not_wait_for_the_callers_stream_is_caught() {
    // Mooncake#3570: the engine's stream had not written the source when the copy began.
    caught_and_clean(|e, edge| {
        let received = e.cuda.alloc(BLOCK).unwrap();
        e.kernel(e.compute, "the caller writes", &[], &[e.block]);
        if edge {
            let event = e.cuda.mark(e.compute);
            e.cuda.wait(event).unwrap();
        }
        e.cuda.copy(received, e.block, BLOCK, e.copies).unwrap();
    });
}

#[test]
fn a_block_that_is_offloaded_and_reused_before_its_copy_ends_is_caught() {
    // TensorRT-LLM#9056: the pending read of a block must hold back its next writer.
    caught_and_clean(|e, edge| {
        e.kernel(e.compute, "first use", &[], &[e.block]);
        e.edge(e.compute, e.copies);
        e.cuda.copy(e.host, e.block, BLOCK, e.copies).unwrap();
        if edge {
            e.edge(e.copies, e.compute);
        }
        e.kernel(e.compute, "second use", &[], &[e.block]);
    });
}

#[test]
fn a_host_buffer_that_is_filled_again_before_its_copy_has_read_it_is_caught() {
    // TensorRT-LLM#15546
    caught_and_clean(|e, edge| {
        e.cuda.fake.host_access(e.host, BLOCK, true);
        e.cuda.copy(e.block, e.host, BLOCK, e.copies).unwrap();
        if edge {
            let event = e.cuda.mark(e.copies);
            while e.cuda.query(event) == Err(600) {}
        }
        e.cuda.fake.host_access(e.host, BLOCK, true);
    });
}

#[test]
fn findings_name_both_accesses() {
    let e = Engine::new();
    e.kernel(e.compute, "the writer", &[], &[e.block]);
    e.cuda.copy(e.host, e.block, BLOCK, e.copies).unwrap();
    assert_eq!(e.races(), 1);
    let text = &e.cuda.fake.findings()[0];
    assert!(text.contains("kernel `the writer`") && text.contains("D2H copy"), "{text}");
    let (a, b) = (format!("{:#x}", e.compute), format!("{:#x}", e.copies));
    assert!(text.contains(&a) && text.contains(&b), "{text}");
}

#[test]
fn findings_show_where_both_operations_were_submitted_when_stacks_are_on() {
    let e = Engine::new();
    e.cuda.fake.set("stacks", "on");
    e.kernel(e.compute, "the writer", &[], &[e.block]);
    e.cuda.copy(e.host, e.block, BLOCK, e.copies).unwrap();
    let text = e.cuda.fake.findings().join("\n");
    let named = |name: &str| text.contains(name);
    assert!(named("fakecuda_launch") && named("cuMemcpyAsync"), "{text}");
}

#[test]
fn a_kernel_that_reads_other_bytes_than_it_expects_is_a_finding() {
    let e = Engine::new();
    let reads = [(e.block, BLOCK as u64)];
    let check = |expect| {
        let name = "check";
        let kernel = FakeKernel { name, reads: &reads, expect, ..FakeKernel::default() };
        e.cuda.fake.launch(e.compute, &kernel).unwrap();
        e.cuda.wait_stream(e.compute).unwrap();
        e.cuda.fake.counter("kernel_mismatches")
    };
    e.kernel(e.compute, "write 0x42", &[], &[e.block]);
    assert_eq!(check(Some(0x42)), 0);
    assert_eq!(check(None), 0);
    assert_eq!(check(Some(0x43)), 1);
    assert!(e.cuda.fake.findings()[0].contains("expected 0x43"));
}

#[test]
fn the_legacy_stream_orders_blocking_streams_and_no_others() {
    let e = Engine::new();
    let blocking = e.cuda.stream_with(0).unwrap();
    e.kernel(blocking, "before", &[], &[e.block]);
    e.kernel(0, "legacy", &[e.block], &[]);
    e.kernel(blocking, "after", &[], &[e.block]);
    assert_eq!(e.races(), 0, "{:?}", e.cuda.fake.findings());
    e.kernel(0, "legacy", &[], &[e.block]);
    e.kernel(e.copies, "beside", &[e.block], &[]);
    assert_eq!(e.races(), 1);
}

#[test]
fn the_default_stream_of_a_thread_is_ordered_with_the_legacy_one() {
    let e = Engine::new();
    e.kernel(2, "per thread", &[], &[e.block]);
    e.kernel(0, "legacy", &[e.block], &[]);
    assert_eq!(e.races(), 0, "{:?}", e.cuda.fake.findings());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let context = e.cuda.retain(0).unwrap();
            e.cuda.set_current(context).unwrap();
            e.kernel(2, "another thread", &[], &[e.block]);
        });
    });
    e.kernel(2, "per thread", &[e.block], &[]);
    assert_eq!(e.races(), 1);
}

#[test]
fn host_functions_are_ordered_after_what_precedes_them_and_before_what_follows() {
    unsafe extern "C" fn touch(host: *mut std::ffi::c_void) {
        crate::driver::driver().fake.host_access(host as u64, BLOCK, true);
    }
    let e = Engine::new();
    e.cuda.copy(e.block, e.host, BLOCK, e.copies).unwrap();
    e.cuda.host_function(e.copies, touch, e.host as *mut _).unwrap();
    e.cuda.copy(e.block, e.host, BLOCK, e.copies).unwrap();
    assert_eq!(e.races(), 0, "{:?}", e.cuda.fake.findings());
    e.cuda.host_function(e.copies, touch, e.host as *mut _).unwrap();
    e.cuda.copy(e.block, e.host, BLOCK, e.compute).unwrap();
    e.cuda.synchronize().unwrap();
    assert!(e.races() > 0);
}

#[test]
fn separate_host_threads_need_an_edge_of_their_own() {
    let cuda = ready(&[("hosts", "separate")]);
    let host = cuda.alloc_host(BLOCK).unwrap();
    let on_thread = |work: &(dyn Fn() + Sync)| {
        std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    };
    cuda.fake.host_access(host, BLOCK, true);
    cuda.fake.host_release(7);
    on_thread(&|| {
        cuda.fake.host_acquire(7);
        cuda.fake.host_access(host, BLOCK, true);
        cuda.fake.host_release(8);
    });
    cuda.fake.host_acquire(8);
    cuda.fake.host_access(host, BLOCK, false);
    assert_eq!(cuda.fake.findings(), [""; 0]);
    on_thread(&|| cuda.fake.host_access(host, 1, true));
    assert!(!cuda.fake.findings().is_empty());
    cuda.fake.set("hosts", "joined");
    cuda.fake.clear_findings();
    let host = cuda.alloc_host(BLOCK).unwrap();
    cuda.fake.host_access(host, 1, true);
    on_thread(&|| cuda.fake.host_access(host, 1, true));
    assert_eq!(cuda.fake.findings(), [""; 0]);
}

#[test]
fn a_wait_that_finds_the_event_not_ready_is_no_edge() {
    let e = Engine::new();
    e.cuda.fake.hold(kvferry_fakecuda::control::ALL_ENGINES);
    e.cuda.copy(e.host, e.block, BLOCK, e.copies).unwrap();
    let event = e.cuda.mark(e.copies);
    assert_eq!(e.cuda.query(event), Err(600));
    e.cuda.fake.host_access(e.host, BLOCK, false);
    e.cuda.fake.release();
    assert_eq!(e.races(), 1);
}

#[test]
fn a_host_read_after_the_wait_is_clean_and_a_host_write_beside_a_reading_copy_is_not() {
    let e = Engine::new();
    e.cuda.copy(e.host, e.block, BLOCK, e.copies).unwrap();
    e.cuda.wait_stream(e.copies).unwrap();
    e.cuda.fake.host_access(e.host, BLOCK, false);
    e.cuda.copy(e.block, e.host, BLOCK, e.copies).unwrap();
    e.cuda.fake.host_access(e.host, BLOCK, false);
    assert_eq!(e.races(), 0, "{:?}", e.cuda.fake.findings());
    e.cuda.copy(e.block, e.host, BLOCK, e.copies).unwrap();
    e.cuda.fake.host_access(e.host, BLOCK, true);
    assert_eq!(e.races(), 1);
}

#[test]
fn a_thousand_transfers_over_reused_memory_stay_clean_and_cheap() {
    let e = Engine::new();
    let begun = processor_time();
    for _ in 0..1000 {
        let stream = e.cuda.stream().unwrap();
        e.kernel(e.compute, "compute", &[], &[e.block]);
        e.edge(e.compute, stream);
        e.cuda.copy(e.host, e.block, BLOCK, stream).unwrap();
        e.edge(stream, e.compute);
        e.cuda.destroy_stream(stream).unwrap();
        if e.cuda.fake.counter("pending") > 100 {
            e.cuda.wait_stream(e.compute).unwrap();
        }
    }
    assert_eq!(e.races(), 0, "{:?}", e.cuda.fake.findings());
    let took = processor_time() - begun;
    assert!(took.as_secs() < 30, "{took:?}");
}
