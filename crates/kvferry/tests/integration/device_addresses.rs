//! Device memory with addresses of the process: batches and peers name it as they name host memory.

use kvferry::{Access, After, Agent, Batch, ErrorKind, Options, TransportKind, Transports};
use kvferry_sys::map::Mapping;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::slow::SlowMemory;
use kvferry_testkit::{PATIENCE, Watchdog};
use std::sync::Arc;

const PIECE: usize = 64;

/// Makes a device filled with a pattern. The mapping is its memory, for the test to read.
fn device(len: usize, seed: u64) -> (SlowMemory, Arc<Mapping>) {
    let mapping = Arc::new(Mapping::anonymous(len).expect("memory"));
    mapping.span(0, len).copy_from(&Pattern::new(seed).bytes(len));
    (SlowMemory::new(Arc::clone(&mapping), 0, len, seed), mapping)
}

fn bytes((_, mapping): &(SlowMemory, Arc<Mapping>), at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mapping.span(at, len).copy_to(&mut bytes);
    bytes
}

#[test]
fn device_memory_with_addresses_of_the_process_is_named_by_them_at_both_ends() {
    let _bound = Watchdog::new(PATIENCE);
    const START: usize = 4096;
    const LEN: usize = 64 << 10;
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let transports = Transports::only(TransportKind::TCP).with(kind);
        let builder = || Agent::builder().transports(transports).silence(PATIENCE / 5);
        let agent = || builder().start().expect("an agent starts");
        let (near, far) = (agent(), agent());
        let peer = near.peer(far.advertised()).expect("an address");
        let (ours, theirs) = (device(START + LEN, 1), device(START + LEN, 2));
        let addressed =
            |(slow, _): &(SlowMemory, _)| slow.part(START, LEN).with_process_addresses();
        let from = near.register_device(addressed(&ours), Access::NONE).expect("a region");
        let to = far.register_device(addressed(&theirs), Access::READ_WRITE).expect("a region");
        assert_eq!((from.addr(), to.remote().addr), (START, START as u64));
        assert_eq!(near.region_at(START).map(|found| found.id()), Some(from.id()));
        let again = near.register_device(addressed(&ours), Access::NONE).expect_err("it overlaps");
        assert_eq!(again.kind(), ErrorKind::Overlap);

        let host = Mapping::anonymous(PIECE).expect("memory");
        host.span(0, PIECE).copy_from(&[9; PIECE]);
        let at = std::ptr::without_provenance_mut::<u8>(START + PIECE);
        let mut batch = Batch::new();
        // SAFETY: the device's memory is found before a transfer, and the host's outlives it.
        unsafe {
            batch.push_raw(at, (START + 3 * PIECE) as u64, LEN as u64 / 2).expect("a range");
            batch.push_raw(host.as_ptr(), START as u64, PIECE as u64).expect("a range");
        }
        batch.find_device_memory(&near).expect("it is registered");
        assert_eq!(batch.devices().len(), 1);
        batch.set_after(After::host());
        let options = Options { timeout: Some(PATIENCE), ..Options::default() };
        peer.write(&batch, &options).expect("written");
        assert_eq!(bytes(&theirs, START, PIECE), [9; PIECE], "{kind}");
        let (to_at, from_at) = (START + 3 * PIECE, START + PIECE);
        assert!(bytes(&theirs, to_at, LEN / 2) == bytes(&ours, from_at, LEN / 2), "{kind}");

        let mut beyond = Batch::new();
        // SAFETY: no transfer has the range.
        unsafe { beyond.push_raw(at, START as u64, LEN as u64) }.expect("a range");
        let error = beyond.find_device_memory(&near).expect_err("it ends beyond the region");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
        near.unregister(&from).expect("registered");
        near.register_device(addressed(&ours), Access::NONE).expect("the range is free");
    }
}
