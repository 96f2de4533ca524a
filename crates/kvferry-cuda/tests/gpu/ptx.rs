//! The kernel that gathers and scatters, compiled by the driver: `tests/integration/kernel.rs` has the promises of the kernel.

use crate::kit::*;
use kvferry_cuda::{Job, ptx};
use kvferry_sys::cuda::{Grid, Module, Stream, launch};
use kvferry_testkit::Watchdog;
use kvferry_testkit::pattern::Pattern;

#[test]
fn the_kernel_copies_each_job_and_nothing_else() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let context = rig.context(0);
    let stream = Stream::new(&context).expect("a stream");
    let texts = [
        (ptx::TEXT.to_owned(), ptx::ENTRY),
        (ptx::text_of_constant_sources(), ptx::ENTRY_OF_CONSTANT_SOURCES),
    ];
    let (rounds, longest) = if rig.is_real() { (200, 100_000) } else { (4, 700) };
    let mut random = fastrand::Rng::with_seed(11);
    for (text, entry) in texts {
        let module = Module::load_ptx(&context, &text).expect("it compiles");
        let function = module.function(entry).expect("it is there");
        for round in 0..rounds {
            let count = random.usize(1..60);
            // Destinations follow each other with gaps, sources lie anywhere.
            let (mut jobs, mut end) = (Vec::new(), 0);
            for _ in 0..count {
                let (gap, len) = (random.usize(0..40), random.usize(1..longest));
                jobs.push((random.usize(0..4096), end + gap, len));
                end += gap + len;
            }
            let (from, to) = (rig.memory(0, 4096 + longest, 1), rig.memory(0, end, 2));
            let table: Vec<u8> = jobs
                .iter()
                .flat_map(|&(src, dst, len)| {
                    let (src, dst) = (from.address() + src as u64, to.address() + dst as u64);
                    Job { src, dst, len: len as u64 }.to_bytes()
                })
                .collect();
            let on_device = rig.memory(0, table.len(), 3);
            rig.write(&on_device, 0, &table);
            let blocks = ptx::blocks(count as u32, 1 + round % 16);
            let grid = Grid { blocks, threads: ptx::THREADS, shared_bytes: 0 };
            // SAFETY: all memory lives until the stream is synchronised, and nothing else uses it.
            unsafe { launch(&stream, &function, grid, &[on_device.address(), count as u64]) }
                .expect("launched");
            stream.synchronize().expect("it has run");
            let source = Pattern::new(1).bytes(4096 + longest);
            let mut wanted = Pattern::new(2).bytes(end);
            for &(src, dst, len) in &jobs {
                wanted[dst..dst + len].copy_from_slice(&source[src..src + len]);
            }
            assert!(rig.bytes(&to, 0, end) == wanted, "{entry}, round {round}: {jobs:?}");
            assert!(rig.bytes(&from, 0, source.len()) == source, "{entry}: a source was written");
        }
    }
    assert_eq!(rig.findings(), Vec::<String>::new());
}
