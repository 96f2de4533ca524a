//! Device memory to and from files. Each test runs with io_uring and with threads. The promises of every transport are
//! tested in `conformance.rs`.

use kvferry::{
    Access, After, Agent, Batch, Device, DirectIo, Error, ErrorKind, FileOptions, FileRegion,
    Options, Region,
};
use kvferry_sys::map::Mapping;
use kvferry_testkit::hanging::HangingDisk;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::slow::SlowMemory;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// An agent, and a folder that is removed with it.
struct Rig {
    agent: Agent,
    folder: PathBuf,
}

impl Rig {
    /// Starts the agent. `None` if the engine can't be used here.
    fn new(engine: &str) -> Option<Self> {
        Self::with_silence(engine, PATIENCE / 5)
    }

    fn with_silence(engine: &str, silence: Duration) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvferry-file-device-{}-{count}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).expect("a folder for temporary files");
        let builder = Agent::builder().name("files").silence(silence);
        let agent = builder.setting("file_engine", engine).start().expect("an agent");
        let rig = Self { agent, folder };
        match rig.agent.open_file(rig.folder.join("probe"), &FileOptions::create(1)) {
            Ok(_) => Some(rig),
            Err(e) if e.kind() == ErrorKind::Unsupported => {
                println!("SKIPPED: io_uring: {e}");
                None
            }
            Err(e) => panic!("a file can't be opened: {e}"),
        }
    }

    fn file(&self, name: &str, len: u64) -> FileRegion {
        let options = FileOptions::create(len);
        self.agent.open_file(self.folder.join(name), &options).expect("a file")
    }

    fn write(&self, batch: &Batch) -> Result<(), Error> {
        self.agent.files().write(batch, &options()).map(drop)
    }

    fn read(&self, batch: &Batch) -> Result<(), Error> {
        self.agent.files().read(batch, &options()).map(drop)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.agent.shutdown();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A test for each engine.
macro_rules! sentences {
    ($($name:ident)*) => {
        mod uring {
            $(#[test] fn $name() {
                let _bound = super::Watchdog::new(super::PATIENCE);
                super::Rig::new("uring").inspect(super::$name);
            })*
        }
        mod posix {
            $(#[test] fn $name() {
                let _bound = super::Watchdog::new(super::PATIENCE);
                super::$name(&super::Rig::new("posix").expect("always there"));
            })*
        }
    };
}

sentences! {
    ranges_of_any_alignment_go_to_a_file_and_back
    blocks_smaller_than_a_page_that_are_neighbours_in_a_file_take_as_few_copies_as_they_can
    pieces_of_two_devices_and_of_host_memory_go_to_several_files_and_back
    a_transfer_that_names_nothing_that_it_comes_after_is_refused
    a_transfer_touches_memory_of_its_device_only_after_its_edges
    a_full_device_is_an_error_that_names_the_pair_and_gives_the_stages_back
    the_end_of_a_file_is_an_error_that_names_the_pair_and_leaves_the_device_alone
    a_device_that_fails_a_copy_fails_its_transfer_and_no_other
    a_cancelled_transfer_ends_once_the_device_has_ended_its_copies
    unregister_waits_for_the_copies_of_a_transfer_with_a_file
    more_transfers_than_a_device_has_stages_all_end_and_give_them_back
    a_lost_copy_ends_its_transfer_and_leaves_the_memory_in_quarantine
    a_shutdown_ends_transfers_that_wait_for_a_stage
}

/// A device, and its memory as the test sees it.
struct TestDevice {
    slow: SlowMemory,
    mapping: Arc<Mapping>,
}

impl TestDevice {
    fn new(len: u64, seed: u64) -> Self {
        Self::made(len, seed, |mapping, len| SlowMemory::new(mapping, 0, len, seed))
    }

    fn made(len: u64, seed: u64, slow: impl FnOnce(Arc<Mapping>, usize) -> SlowMemory) -> Self {
        let len = small(len);
        let mapping = Arc::new(Mapping::anonymous(len).expect("memory"));
        mapping.span(0, len).copy_from(&Pattern::new(seed).bytes(len));
        Self { slow: slow(Arc::clone(&mapping), len), mapping }
    }

    fn register(&self, rig: &Rig) -> Region {
        rig.agent.register_device(self.slow.memory(), Access::NONE).expect("a region")
    }

    fn fill(&self, seed: u64) {
        let len = self.slow.len();
        self.mapping.span(0, len).copy_from(&Pattern::new(seed).bytes(len));
    }

    fn bytes(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; small(len)];
        self.mapping.span(small(at), small(len)).copy_to(&mut bytes);
        bytes
    }

    fn content(&self) -> Vec<u8> {
        self.bytes(0, self.slow.len() as u64)
    }

    /// Waits until no copy and no transfer has a stage; then, nothing may have been misused.
    fn comes_to_rest(&self) {
        let stages = self.slow.stages();
        eventually("the stages are free", || stages.free() == stages.stages());
        assert_eq!(self.slow.misuse(), Vec::<String>::new());
    }
}

fn small(len: u64) -> usize {
    usize::try_from(len).expect("a 64-bit system")
}

fn options() -> Options<'static> {
    Options { timeout: Some(PATIENCE), ..Options::default() }
}

fn one(memory: &Region, file: &FileRegion, len: u64) -> Batch {
    let mut batch = Batch::new();
    batch.set_after(After::host());
    batch.push(memory, 0, &file.remote(), 0, len).expect("inside");
    batch
}

/// Blocks of `len` bytes, one after the other in the file, in reverse order in memory.
fn reversed(memory: &Region, file: &FileRegion, len: u64, count: u64) -> Batch {
    let mut batch = Batch::new();
    batch.set_after(After::host());
    for block in 0..count {
        let near = (count - 1 - block) * len;
        batch.push(memory, near, &file.remote(), block * len, len).expect("inside");
    }
    batch
}

fn ranges_of_any_alignment_go_to_a_file_and_back(rig: &Rig) {
    for direct in [DirectIo::Off, DirectIo::Auto] {
        let path = rig.folder.join(format!("any-{direct:?}"));
        let file = rig.agent.open_file(&path, &FileOptions::create(3 * MIB).direct(direct));
        let file = file.expect("a file");
        let device = TestDevice::new(3 * MIB, 3);
        let memory = device.register(rig);
        let mut rng = fastrand::Rng::with_seed(4);
        for round in 0..40 {
            let len = [rng.u64(1..200), rng.u64(1..20_000), rng.u64(1..2 * MIB)][round % 3];
            let offset = rng.u64(..MIB) & [!0, !511, !4095][rng.usize(..3)];
            let near = rng.u64(..MIB / 2) & [!0, !127, !511, !4095][rng.usize(..4)];
            let mut batch = Batch::new();
            batch.set_after(After::host());
            batch.push(&memory, near, &file.remote(), offset, len).expect("inside");
            device.fill(round as u64);
            let wanted = device.content();
            rig.write(&batch).expect("space");
            let range = small(offset)..small(offset + len);
            let near = small(near)..small(near + len);
            assert!(fs::read(&path).expect("made above")[range] == wanted[near.clone()]);
            device.fill(1000);
            let mut after = device.content();
            rig.read(&batch).expect("written above");
            after[near.clone()].copy_from_slice(&wanted[near.clone()]);
            assert!(device.content() == after, "{len} bytes at {offset}, memory {near:?}");
        }
        device.comes_to_rest();
    }
}

fn blocks_smaller_than_a_page_that_are_neighbours_in_a_file_take_as_few_copies_as_they_can(
    rig: &Rig,
) {
    let path = rig.folder.join("neighbours");
    let file = rig.agent.open_file(&path, &FileOptions::create(2 * MIB));
    let file = file.expect("a file");
    let device = TestDevice::new(2 * MIB, 5);
    // Blocks smaller than a page.
    let (block, count) = (2 * KIB, MIB / KIB);
    let batch = reversed(&device.register(rig), &file, block, count);
    let wanted = device.content();
    rig.write(&batch).expect("space");
    let written = fs::read(&path).expect("made above");
    let in_order = wanted.chunks(small(block)).rev().flatten().copied();
    assert!(written == in_order.collect::<Vec<_>>());
    let calls = device.slow.started().0;
    assert_eq!(calls, small(count).div_ceil(128), "as many pieces in a copy as the device takes");
    device.fill(6);
    rig.read(&batch).expect("written above");
    assert!(device.content() == wanted);
    device.comes_to_rest();
}

fn pieces_of_two_devices_and_of_host_memory_go_to_several_files_and_back(rig: &Rig) {
    // An odd length, longer than a stage.
    const LEN: u64 = 300_001;
    const COUNT: u64 = 12;
    let devices = [1, 2].map(|seed| TestDevice::new(COUNT * LEN, seed));
    let host = rig.agent.allocate_private(small(COUNT * LEN), Access::NONE).expect("memory");
    host.write_at(0, &Pattern::new(3).bytes(small(COUNT * LEN))).expect("inside");
    let sources = [devices[0].register(rig), devices[1].register(rig), host.clone()];
    let files = [0, 1].map(|i| rig.file(&format!("mixed-{i}"), COUNT * LEN));
    let mut batch = Batch::new();
    batch.set_after(After::host());
    for i in 0..COUNT {
        let (memory, file, at) = (&sources[small(i) % 3], &files[small(i) % 2], i * LEN);
        batch.push(memory, at, &file.remote(), at, LEN).expect("inside");
    }
    let bytes_of = |i: u64| match i % 3 {
        2 => {
            let mut bytes = vec![0; small(LEN)];
            host.read_at(small(i * LEN), &mut bytes).expect("inside");
            bytes
        }
        device => devices[small(device)].bytes(i * LEN, LEN),
    };
    let wanted: Vec<_> = (0..COUNT).map(bytes_of).collect();
    rig.write(&batch).expect("space");
    let written = files.each_ref().map(|file| fs::read(file.path()).expect("made above"));
    for (i, wanted) in (0..COUNT).zip(&wanted) {
        let range = small(i * LEN)..small((i + 1) * LEN);
        assert!(written[small(i) % 2][range] == wanted[..], "piece {i}");
    }
    devices.iter().for_each(|device| device.fill(8));
    host.write_at(0, &Pattern::new(8).bytes(small(COUNT * LEN))).expect("inside");
    rig.read(&batch).expect("written above");
    for (i, wanted) in (0..COUNT).zip(&wanted) {
        assert!(bytes_of(i) == *wanted, "piece {i}");
    }
    devices.iter().for_each(TestDevice::comes_to_rest);
}

fn a_transfer_that_names_nothing_that_it_comes_after_is_refused(rig: &Rig) {
    let (device, file) = (TestDevice::new(MIB, 1), rig.file("no-order", MIB));
    let mut batch = one(&device.register(rig), &file, MIB);
    batch.set_after(After::default());
    let files = rig.agent.files();
    for outcome in [
        files.write(&batch, &options()),
        files.read(&batch, &options()),
        files.write_async(&batch, &options()).wait(PATIENCE).expect("it ends"),
        files.read_async(&batch, &options()).wait(PATIENCE).expect("it ends"),
    ] {
        let error = outcome.expect_err("it names nothing");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains("say what the transfer comes after"), "{error}");
    }
    assert_eq!(device.slow.started(), (0, 0));
}

fn a_transfer_touches_memory_of_its_device_only_after_its_edges(rig: &Rig) {
    let (device, file) = (TestDevice::new(MIB, 1), rig.file("edges", MIB));
    let mut batch = one(&device.register(rig), &file, MIB);
    let (edge, after) = SlowMemory::edge();
    batch.set_after(after);
    let transfer = rig.agent.files().write_async(&batch, &options());
    eventually("the transfer waits", || device.slow.waiting() > 0);
    let stages = device.slow.stages();
    assert_eq!((device.slow.pending(), stages.free()), (0, stages.stages()));
    device.fill(2);
    edge.happen();
    transfer.wait(PATIENCE).expect("it ends").expect("space");
    assert!(fs::read(file.path()).expect("made above") == device.content());
    let (edge, after) = SlowMemory::edge();
    batch.set_after(after);
    thread::scope(|scope| {
        let reads = scope.spawn(|| rig.read(&batch));
        eventually("the call waits", || device.slow.waiting() > 0);
        device.fill(3);
        edge.happen();
        reads.join().expect("no panic").expect("written above");
    });
    assert!(fs::read(file.path()).expect("made above") == device.content());
    device.comes_to_rest();
}

fn a_full_device_is_an_error_that_names_the_pair_and_gives_the_stages_back(rig: &Rig) {
    let full = fs::OpenOptions::new().read(true).write(true).open("/dev/full").expect("a Linux");
    let range = FileOptions::read_write().range(0, 4 * MIB);
    let full = rig.agent.register_file(full.into(), &range).expect("a device");
    let device = TestDevice::new(4 * MIB, 1);
    let memory = device.register(rig);
    let e = rig.write(&one(&memory, &full, 4 * MIB)).expect_err("it is full");
    assert_eq!((e.kind(), e.context("pair")), (ErrorKind::Io, Some("0")), "{e}");
    assert!(e.to_string().contains("No space left") && e.quiesced() == Some(true), "{e}");
    device.comes_to_rest();
    let file = rig.file("after", 4 * MIB);
    rig.write(&one(&memory, &file, 4 * MIB)).expect("space");
    assert!(fs::read(file.path()).expect("made above") == device.content());
    device.comes_to_rest();
}

fn the_end_of_a_file_is_an_error_that_names_the_pair_and_leaves_the_device_alone(rig: &Rig) {
    let (block, count) = (4 * KIB, 32);
    let file = rig.file("short", block * count);
    let opened = fs::OpenOptions::new().write(true).open(file.path()).expect("made above");
    opened.set_len(20 * block + 100).expect("shorter");
    let device = TestDevice::new(block * count, 1);
    let before = device.content();
    let batch = reversed(&device.register(rig), &file, block, count);
    let e = rig.read(&batch).expect_err("the file is shorter");
    assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Io, Some(true)), "{e}");
    assert!(e.to_string().contains("the file ends before the range"), "{e}");
    assert_eq!(e.context("pair"), Some("20"), "{e}");
    assert_eq!(device.slow.started(), (0, 0), "the stage does not have all its bytes");
    assert!(device.content() == before);
    device.comes_to_rest();
}

fn a_device_that_fails_a_copy_fails_its_transfer_and_no_other(rig: &Rig) {
    let (device, file) = (TestDevice::new(2 * MIB, 1), rig.file("fails", 2 * MIB));
    let batch = one(&device.register(rig), &file, 2 * MIB);
    rig.write(&batch).expect("space");
    for write in [true, false] {
        let run = || if write { rig.write(&batch) } else { rig.read(&batch) };
        device.slow.fail_next(1);
        let e = run().expect_err("a copy failed");
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Internal, Some(true)), "{e}");
        let source = std::error::Error::source(&e).expect("the device's error");
        assert_eq!(source.to_string(), "the device failed this copy on purpose");
        device.comes_to_rest();
        run().expect("the next one is as it should be");
    }
    device.comes_to_rest();
}

fn a_cancelled_transfer_ends_once_the_device_has_ended_its_copies(rig: &Rig) {
    let (device, file) = (TestDevice::new(4 * MIB, 1), rig.file("cancelled", 4 * MIB));
    let batch = one(&device.register(rig), &file, 4 * MIB);
    for write in [true, false] {
        device.slow.hold();
        let files = rig.agent.files();
        let transfer = match write {
            true => files.write_async(&batch, &options()),
            false => files.read_async(&batch, &options()),
        };
        eventually("the device has copies", || device.slow.pending() > 0);
        transfer.cancel();
        thread::sleep(Duration::from_millis(20));
        assert!(transfer.outcome().is_none(), "the device may still touch the memory");
        device.slow.release();
        let e = transfer.wait(PATIENCE).expect("it ends").expect_err("cancelled");
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Cancelled, Some(true)), "{e}");
        assert_eq!(device.slow.pending(), 0);
        device.comes_to_rest();
    }
}

fn unregister_waits_for_the_copies_of_a_transfer_with_a_file(rig: &Rig) {
    for write in [true, false] {
        let (device, file) = (TestDevice::new(8 * MIB, 1), rig.file("unregister", 8 * MIB));
        let memory = device.register(rig);
        let batch = one(&memory, &file, 8 * MIB);
        let before = rig.agent.stats().regions;
        device.slow.hold();
        let files = rig.agent.files();
        let transfer = match write {
            true => files.write_async(&batch, &options()),
            false => files.read_async(&batch, &options()),
        };
        eventually("the device has copies", || device.slow.pending() > 0);
        thread::scope(|scope| {
            let unregister = scope.spawn(|| {
                rig.agent.unregister(&memory).expect("the device goes on");
                assert_eq!(device.slow.pending(), 0, "it copies while the memory is given back");
                device.slow.free();
            });
            eventually("the region is taken out", || rig.agent.stats().regions < before);
            assert!(!unregister.is_finished());
            device.slow.release();
            unregister.join().expect("no panic");
        });
        let e = transfer.wait(PATIENCE).expect("it ends").expect_err("more is left to be copied");
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Revoked, Some(true)), "{e}");
        device.comes_to_rest();
    }
}

fn more_transfers_than_a_device_has_stages_all_end_and_give_them_back(rig: &Rig) {
    const COUNT: u64 = 24;
    for stages in [1, 4] {
        let slow = |mapping, len| SlowMemory::with_stages(mapping, 0, len, 1, stages);
        let device = TestDevice::made(COUNT * MIB, 1, slow);
        let memory = device.register(rig);
        let file = rig.file(&format!("short-of-{stages}"), COUNT * MIB);
        let batches: Vec<_> = (0..COUNT)
            .map(|i| {
                let mut batch = Batch::new();
                batch.set_after(After::host());
                batch.push(&memory, i * MIB, &file.remote(), i * MIB, MIB).expect("inside");
                batch
            })
            .collect();
        let wanted = device.content();
        let (files, options) = (rig.agent.files(), options());
        let writes: Vec<_> = batches.iter().map(|it| files.write_async(it, &options)).collect();
        for write in &writes {
            write.wait(PATIENCE).expect("it ends").expect("space");
        }
        assert!(fs::read(file.path()).expect("made above") == wanted);
        device.fill(2);
        let reads: Vec<_> = batches.iter().map(|it| files.read_async(it, &options)).collect();
        for read in &reads {
            read.wait(PATIENCE).expect("it ends").expect("written above");
        }
        assert!(device.content() == wanted);
        device.comes_to_rest();
    }
}

fn a_lost_copy_ends_its_transfer_and_leaves_the_memory_in_quarantine(rig: &Rig) {
    let engine =
        if rig.agent.files().engine().as_deref() == Some("uring") { "uring" } else { "posix" };
    let rig = Rig::with_silence(engine, Duration::from_millis(200)).expect("as the other agent");
    let (device, file) = (TestDevice::new(MIB, 1), rig.file("lost", MIB));
    for write in [true, false] {
        let memory = device.register(&rig);
        let batch = one(&memory, &file, MIB);
        device.slow.lose_next(1);
        let short = Options { timeout: Some(Duration::from_millis(300)), ..Options::default() };
        let files = rig.agent.files();
        // The time of a transfer may be over before it copies.
        let e = loop {
            let lost = if write { files.write(&batch, &short) } else { files.read(&batch, &short) };
            if device.slow.losing() == 0 {
                break lost.expect_err("the device has lost a copy");
            }
        };
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Deadline, Some(false)), "{e}");
        let e = rig.agent.unregister(&memory).expect_err("the copy may go on");
        assert_eq!(e.kind(), ErrorKind::Quarantined, "{e}");
        assert!(memory.is_quarantined());
    }
    let stages = device.slow.stages();
    eventually("other stages are free", || stages.free() == stages.stages() - 2);
    assert_eq!(device.slow.misuse(), Vec::<String>::new());
}

fn a_shutdown_ends_transfers_that_wait_for_a_stage(rig: &Rig) {
    let slow = |mapping, len| SlowMemory::with_stages(mapping, 0, len, 1, 1);
    let device = TestDevice::made(2 * MIB, 1, slow);
    let file = rig.file("shutdown", 2 * MIB);
    let batch = one(&device.register(rig), &file, 2 * MIB);
    device.slow.hold();
    let transfers = [0, 1].map(|_| rig.agent.files().write_async(&batch, &options()));
    eventually("the device has a copy", || device.slow.pending() > 0);
    thread::scope(|scope| {
        let shutdown = scope.spawn(|| rig.agent.shutdown());
        eventually("the shutdown has begun", || {
            let refused = rig.agent.allocate_private(4096, Access::NONE);
            refused.is_err_and(|e| e.kind() == ErrorKind::Shutdown)
        });
        thread::sleep(Duration::from_millis(20));
        device.slow.release();
        shutdown.join().expect("no panic");
    });
    for transfer in transfers {
        let e = transfer.wait(PATIENCE).expect("it ends").expect_err("the agent is gone");
        assert_eq!(e.kind(), ErrorKind::Shutdown, "{e}");
    }
    device.comes_to_rest();
}

#[test]
fn a_file_whose_device_hangs_keeps_its_stages_until_the_device_answers() {
    let _bound = Watchdog::new(PATIENCE);
    for engine in ["posix", "uring"] {
        let silence = Duration::from_millis(200);
        let Some(rig) = Rig::with_silence(engine, silence) else { continue };
        let at = rig.folder.join("hangs");
        fs::create_dir(&at).expect("a folder");
        let Some(disk) = HangingDisk::mount(&at) else { return };
        let options = FileOptions::create(MIB).direct(DirectIo::Off);
        let file = rig.agent.open_file(at.join("file"), &options).expect("a file");
        let device = TestDevice::new(MIB, 1);
        let memory = device.register(&rig);
        let batch = one(&memory, &file, MIB);
        rig.write(&batch).expect("the device answers");
        disk.hold();
        let short = Options { timeout: Some(Duration::from_millis(300)), ..Options::default() };
        // The time of a transfer may be over before it has asked the file's device.
        let e = loop {
            let transfer = rig.agent.files().write_async(&batch, &short);
            let e = transfer.wait(PATIENCE).expect("it ends").expect_err("no answer");
            if disk.is_asked() {
                break e;
            }
        };
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Deadline, Some(false)), "{e}");
        let stages = device.slow.stages();
        assert!(stages.free() < stages.stages(), "{engine}");
        // The file's device has the stages only, not the memory.
        eventually("the device has copied to the stages", || device.slow.pending() == 0);
        eventually("the memory goes back", || rig.agent.unregister(&memory).is_ok());
        device.slow.free();
        disk.release();
        device.comes_to_rest();
    }
}
