//! After the first batches to a peer, moving a batch allocates nothing.

use kvferry::{Access, Agent, Batch, Checksum, Options, TransportKind, Transports};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The longest silence that may be set: a thread that does not run for a while ends no session.
const NEVER: Duration = Duration::from_secs(600);

/// The system's allocator, counting allocations of all threads.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of the whole process, both agents' threads included, while `work` runs `times`.
fn allocations(times: u64, mut work: impl FnMut()) -> u64 {
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    (0..times).for_each(|_| work());
    ALLOCATIONS.load(Ordering::SeqCst) - before
}

#[test]
fn a_batch_allocates_nothing_at_either_end() {
    let mut found = Vec::new();
    for (names, kind) in [("tcp", TransportKind::TCP), ("local,tcp", TransportKind::LOCAL)] {
        let transports = Transports::parse(names).expect("names");
        let start = |name: &str| {
            let builder = Agent::builder().name(name).transports(transports).silence(NEVER);
            builder.checksum(Checksum::Off).start().expect("an agent starts")
        };
        let (near, far) = (start("near"), start("far"));
        let len = 4 << 20;
        let from = near.allocate(len, Access::NONE).expect("memory");
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        let peer = near.peer(far.advertised()).expect("an address");
        for (block, count) in [(4096, 1), (4096, 1024), (32 << 10, 100), (1 << 20, 4)] {
            let mut batch = Batch::new();
            for at in (0..count).map(|i| i * block) {
                batch.push(&from, at, &to.remote(), at, block).expect("inside both");
            }
            for write in [true, false] {
                let mut once = || {
                    let options = Options::default();
                    let moved = if write {
                        peer.write(&batch, &options)
                    } else {
                        peer.read(&batch, &options)
                    };
                    assert_eq!(moved.expect("done").transport, Some(kind));
                };
                allocations(50, &mut once);
                // A heartbeat may allocate in between: take the least of 40 samples.
                let least = (0..40).map(|_| {
                    std::thread::sleep(Duration::from_millis(1));
                    allocations(5, &mut once)
                });
                let least = least.min().expect("several");
                let what = if write { "write" } else { "read" };
                println!("{kind} {what} {block} B x {count}: {least} allocations in 5 batches");
                if least > 0 {
                    found.push(format!("{kind} {what} {block} B x {count}: {least}"));
                }
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}
