//! What only files have, each sentence with io_uring and with threads. The promises of every transport are
//! in `conformance.rs`.

use kvferry::{
    Access, Agent, Batch, DirectIo, ErrorKind, FileOptions, FileRegion, Notification, Options,
    Region, TransportKind,
};
use kvferry_sys::map::Mapping;
use kvferry_testkit::hanging::HangingDisk;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// An agent, and a folder that is removed with it.
struct Rig {
    agent: Agent,
    folder: PathBuf,
}

impl Rig {
    /// `None` if the engine can't be used here.
    fn new(engine: &str) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("kvferry-file-{}-{count}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for temporary files");
        // `unregister` and `shutdown` wait that long for a loaded device.
        let agent = Agent::builder()
            .name("files")
            .silence(PATIENCE / 5)
            .setting("file_engine", engine)
            .start()
            .expect("an agent");
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

    fn memory(&self, len: u64) -> Region {
        self.agent
            .allocate_private(usize::try_from(len).expect("small"), Access::NONE)
            .expect("memory")
    }

    fn file(&self, name: &str, options: &FileOptions) -> FileRegion {
        self.agent.open_file(self.folder.join(name), options).expect("a file")
    }

    /// A device that can hang, below the rig's folder. `None` where none can be made.
    fn disk(&self, name: &str) -> Option<HangingDisk> {
        let at = self.folder.join(name);
        fs::create_dir(&at).expect("a folder");
        HangingDisk::mount(&at)
    }

    fn write(&self, batch: &Batch) -> kvferry::Result<kvferry::TransferStats> {
        self.agent.files().write(batch, &Options::default())
    }

    fn read(&self, batch: &Batch) -> kvferry::Result<kvferry::TransferStats> {
        self.agent.files().read(batch, &Options::default())
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
            $(#[test] fn $name() { super::Rig::new("uring").inspect(super::$name); })*
        }
        mod posix {
            $(#[test] fn $name() {
                super::$name(&super::Rig::new("posix").expect("always there"));
            })*
        }
    };
}

sentences! {
    ranges_of_any_alignment_go_past_the_page_cache_and_back
    a_batch_may_name_several_files
    the_end_of_a_file_is_an_error_that_names_file_and_offset
    a_full_device_is_an_error_and_the_next_transfer_works
    what_is_refused_names_the_file
    a_deadline_that_has_passed_ends_a_transfer
    a_closed_file_is_refused_and_transfers_that_have_begun_end
    a_range_of_a_file_is_a_region
    a_descriptor_is_a_region
    a_descriptor_that_appends_is_refused_for_writes
    memory_that_is_used_often_is_registered_until_it_is_unregistered
    registered_memory_is_unregistered_while_transfers_run
    a_region_of_more_than_a_gibibyte_is_registered_in_parts
    shutdown_ends_transfers
}

fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| rng.u8(..)).collect()
}

fn fill(region: &Region, seed: u64) -> Vec<u8> {
    let bytes = bytes(seed, region.len() as u64);
    region.write_at(0, &bytes).expect("inside");
    bytes
}

fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_at(0, &mut bytes).expect("inside");
    bytes
}

fn one(memory: &Region, file: &FileRegion, len: u64) -> Batch {
    let mut batch = Batch::new();
    batch.push(memory, 0, &file.remote(), 0, len).expect("inside");
    batch
}

fn ranges_of_any_alignment_go_past_the_page_cache_and_back(rig: &Rig) {
    for direct in [DirectIo::Off, DirectIo::Auto] {
        ranges_of_any_alignment(rig, direct);
    }
}

fn ranges_of_any_alignment(rig: &Rig, direct: DirectIo) {
    let options = FileOptions::create(3 * MIB).direct(direct);
    let file = rig.file(&format!("aligned-{direct:?}"), &options);
    println!("past the page cache: {}", file.is_direct());
    let (from, to) = (rig.memory(3 * MIB), rig.memory(3 * MIB));
    let source = fill(&from, 3);
    let mut rng = fastrand::Rng::with_seed(4);
    for round in 0..60 {
        let len = [rng.u64(1..200), rng.u64(1..20_000), rng.u64(1..2 * MIB)][round % 3];
        let offset = rng.u64(..MIB) & [!0, !511, !4095][rng.usize(..3)];
        let near = rng.u64(..MIB / 2) & [!0, !3, !511, !4095][rng.usize(..4)];
        let mut out = Batch::new();
        out.push(&from, near, &file.remote(), offset, len).expect("inside");
        rig.write(&out).expect("space");
        let mut back = Batch::new();
        back.push(&to, near, &file.remote(), offset, len).expect("inside");
        rig.read(&back).expect("written above");
        let range =
            usize::try_from(near).expect("small")..usize::try_from(near + len).expect("small");
        assert!(
            content(&to)[range.clone()] == source[range],
            "{len} bytes at {offset}, memory {near}"
        );
    }
    // Through the page cache, the file has the same bytes.
    let whole = one(&from, &file, 3 * MIB);
    rig.write(&whole).expect("space");
    assert!(fs::read(file.path()).expect("made above") == source);
}

fn a_batch_may_name_several_files(rig: &Rig) {
    let files: Vec<_> =
        (0..3).map(|i| rig.file(&format!("several-{i}"), &FileOptions::create(64 * KIB))).collect();
    let memory = rig.memory(192 * KIB);
    let source = fill(&memory, 5);
    let mut batch = Batch::new();
    for block in 0..48 {
        let (file, at) = (&files[block as usize % 3], block / 3 * 4 * KIB);
        batch.push(&memory, block * 4 * KIB, &file.remote(), at, 4 * KIB).expect("inside");
    }
    let stats = rig.write(&batch).expect("space");
    assert_eq!((stats.bytes, stats.descriptors), (batch.bytes(), 48));
    assert_eq!(stats.transport, Some(TransportKind::FILE));
    for (i, file) in files.iter().enumerate() {
        let of_file = source.chunks(4096).skip(i).step_by(3).flatten().copied();
        assert!(fs::read(file.path()).expect("made above") == of_file.collect::<Vec<_>>());
    }
}

fn the_end_of_a_file_is_an_error_that_names_file_and_offset(rig: &Rig) {
    let file = rig.file("short", &FileOptions::create(MIB));
    fs::OpenOptions::new()
        .write(true)
        .open(file.path())
        .expect("made")
        .set_len(100_000)
        .expect("shorter");
    let memory = rig.memory(MIB);
    let e = rig.read(&one(&memory, &file, MIB)).expect_err("the file is shorter");
    assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Io, Some(true)), "{e}");
    assert_eq!(e.context("file"), Some(&*file.path().display().to_string()));
    assert!(
        e.context("offset").is_some_and(|at| at.parse::<u64>().is_ok_and(|at| at >= 100_000)),
        "{e}"
    );
    assert!(e.to_string().contains("the file ends before the range"), "{e}");
}

fn a_full_device_is_an_error_and_the_next_transfer_works(rig: &Rig) {
    let full = fs::OpenOptions::new().read(true).write(true).open("/dev/full").expect("a Linux");
    let options = FileOptions::read_write().range(0, MIB);
    let full = rig.agent.register_file(full.into(), &options).expect("a device");
    let memory = rig.memory(MIB);
    let e = rig.write(&one(&memory, &full, MIB)).expect_err("it is full");
    assert_eq!((e.kind(), e.context("pair")), (ErrorKind::Io, Some("0")), "{e}");
    assert!(e.to_string().contains("No space left"), "{e}");
    let file = rig.file("after", &FileOptions::create(MIB));
    rig.write(&one(&memory, &file, MIB)).expect("space");
}

fn what_is_refused_names_the_file(rig: &Rig) {
    let path = rig.folder.join("refused");
    let missing = rig.agent.open_file(&path, &FileOptions::read_only()).expect_err("not there");
    assert_eq!(missing.kind(), ErrorKind::Io);
    assert_eq!(missing.context("file"), Some(&*path.display().to_string()));
    fs::write(&path, b"").expect("a file");
    let empty = rig.agent.open_file(&path, &FileOptions::read_only()).expect_err("empty");
    assert_eq!(empty.kind(), ErrorKind::InvalidArgument, "{empty}");
    fs::write(&path, bytes(8, 8192)).expect("a file");
    let beyond = FileOptions::read_only().range(4096, 4097);
    let beyond = rig.agent.open_file(&path, &beyond).expect_err("beyond the end");
    assert_eq!(beyond.kind(), ErrorKind::OutOfBounds, "{beyond}");

    let (memory, file) = (rig.memory(8192), rig.file("refused", &FileOptions::read_only()));
    let e = rig.write(&one(&memory, &file, 8192)).expect_err("read-only");
    assert_eq!(e.kind(), ErrorKind::AccessDenied, "{e}");
    assert_eq!(e.context("file"), Some(&*path.display().to_string()));
    let beyond = Batch::new().push(&memory, 0, &file.remote(), 1, 8192).expect_err("beyond");
    assert_eq!(beyond.kind(), ErrorKind::OutOfBounds, "{beyond}");

    let notify = Some(Notification::new("name", "text"));
    let options = Options { notify, ..Options::default() };
    let e = rig.agent.files().read(&one(&memory, &file, 8), &options).expect_err("nobody there");
    assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");

    let other = Agent::builder().name("other").start().expect("an agent");
    let e =
        other.files().read(&one(&memory, &file, 8), &Options::default()).expect_err("not its own");
    assert_eq!(e.kind(), ErrorKind::StaleIncarnation, "{e}");
    let mut batch = Batch::new();
    batch.push(&memory, 0, &memory.remote(), 0, 8).expect("inside");
    let e = rig.read(&batch).expect_err("memory is no file");
    assert_eq!(e.kind(), ErrorKind::NotRegistered, "{e}");
    assert_eq!(rig.read(&Batch::new()).expect("nothing to do").bytes, 0);
}

fn a_deadline_that_has_passed_ends_a_transfer(rig: &Rig) {
    let file = rig.file("late", &FileOptions::create(32 * MIB));
    let memory = rig.memory(32 * MIB);
    let options = Options { timeout: Some(Duration::ZERO), ..Options::default() };
    for blocking in [true, false] {
        let batch = one(&memory, &file, 32 * MIB);
        let e = match blocking {
            true => rig.agent.files().write(&batch, &options),
            false => {
                let transfer = rig.agent.files().write_async(&batch, &options);
                transfer.wait(PATIENCE).expect("it ends")
            }
        };
        assert_eq!(e.expect_err("no time").kind(), ErrorKind::Deadline);
    }
    let asked = AtomicBool::new(false);
    let interrupt = || {
        asked.store(true, Ordering::SeqCst);
        true
    };
    let options = Options { interrupt: Some(&interrupt), ..Options::default() };
    // Fast enough, or interrupted: both are right.
    if let Err(e) = rig.agent.files().write(&one(&memory, &file, 32 * MIB), &options) {
        assert_eq!(e.kind(), ErrorKind::Interrupted, "{e}");
        assert!(asked.load(Ordering::SeqCst));
    }
}

fn a_closed_file_is_refused_and_transfers_that_have_begun_end(rig: &Rig) {
    let file = rig.file("closed", &FileOptions::create(8 * MIB));
    let memory = rig.memory(8 * MIB);
    let transfer =
        rig.agent.files().write_async(&one(&memory, &file, 8 * MIB), &Options::default());
    rig.agent.close_file(&file).expect("open");
    transfer.wait(PATIENCE).expect("it ends").expect("it had begun");
    let e = rig.write(&one(&memory, &file, 8)).expect_err("closed");
    assert_eq!((e.kind(), e.context("pair")), (ErrorKind::NotRegistered, Some("0")), "{e}");
    assert_eq!(rig.agent.close_file(&file).expect_err("closed").kind(), ErrorKind::NotRegistered);
}

fn a_range_of_a_file_is_a_region(rig: &Rig) {
    let path = rig.folder.join("range");
    let source = bytes(10, 100_000);
    fs::write(&path, &source).expect("a file");
    let file = rig.file("range", &FileOptions::read_only().range(5000, 50_000));
    assert_eq!((file.len(), file.path()), (50_000, &*path));
    let memory = rig.memory(50_000);
    rig.read(&one(&memory, &file, 50_000)).expect("inside");
    assert!(content(&memory) == source[5000..55_000]);
}

fn a_descriptor_is_a_region(rig: &Rig) {
    let path = rig.folder.join("descriptor");
    fs::write(&path, bytes(11, 8192)).expect("a file");
    let read_only: OwnedFd = fs::File::open(&path).expect("made above").into();
    let e = rig.agent.register_file(read_only, &FileOptions::read_write()).expect_err("read-only");
    assert_eq!(e.kind(), ErrorKind::AccessDenied, "{e}");
    let both = fs::OpenOptions::new().read(true).write(true).open(&path).expect("made above");
    fs::remove_file(&path).expect("made above");
    let again = both.try_clone().expect("a descriptor");
    let named = FileOptions::read_write().name(&path);
    let named = rig.agent.register_file(again.into(), &named).expect("open");
    assert_eq!(named.path(), path, "errors name the file");
    let file = rig.agent.register_file(both.into(), &FileOptions::read_write()).expect("open");
    assert!(file.path().to_string_lossy().starts_with("descriptor "), "{}", file.path().display());
    let (from, to) = (rig.memory(8192), rig.memory(8192));
    let source = fill(&from, 12);
    rig.write(&one(&from, &file, 8192)).expect("space");
    file.sync().expect("a file system");
    rig.read(&one(&to, &file, 8192)).expect("written");
    assert!(content(&to) == source, "a file without a name");
}

fn a_descriptor_that_appends_is_refused_for_writes(rig: &Rig) {
    let path = rig.folder.join("appends");
    fs::write(&path, bytes(13, 8192)).expect("a file");
    let open = || -> OwnedFd {
        let how = fs::OpenOptions::new().read(true).append(true).open(&path);
        how.expect("made above").into()
    };
    let off = FileOptions::read_write().direct(DirectIo::Off);
    match rig.agent.register_file(open(), &off) {
        Err(e) => assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}"),
        Ok(file) => {
            let memory = rig.memory(8192);
            let source = fill(&memory, 14);
            rig.write(&one(&memory, &file, 8192)).expect("space");
            let is_there = fs::read(&path).expect("made above") == source;
            panic!("accepted; the bytes are at their offset: {is_there}");
        }
    }
    let file = rig.agent.register_file(open(), &FileOptions::read_only()).expect("open");
    let memory = rig.memory(8192);
    rig.read(&one(&memory, &file, 8192)).expect("inside");
    assert!(content(&memory) == bytes(13, 8192));
}

fn shutdown_ends_transfers(rig: &Rig) {
    let file = rig.file("shutdown", &FileOptions::create(32 * MIB));
    let memory = rig.memory(32 * MIB);
    let transfers: Vec<_> = (0..4)
        .map(|_| rig.agent.files().write_async(&one(&memory, &file, 32 * MIB), &Options::default()))
        .collect();
    let late = one(&memory, &file, 8);
    rig.agent.shutdown();
    for transfer in transfers {
        let outcome = transfer.wait(PATIENCE).expect("it ends");
        if let Err(e) = outcome {
            assert_eq!(e.kind(), ErrorKind::Shutdown, "{e}");
        }
    }
    let e = rig.write(&late).expect_err("shut down");
    assert_eq!(e.kind(), ErrorKind::Shutdown, "{e}");
    let e = rig.agent.open_file(file.path(), &FileOptions::read_only()).expect_err("shut down");
    assert_eq!(e.kind(), ErrorKind::Shutdown, "{e}");
}

/// A batch that moves the whole of `memory` in blocks of 512 KiB, to and from the same offsets.
fn blocks(memory: &Region, file: &FileRegion) -> Batch {
    let mut batch = Batch::new();
    let len = memory.len() as u64;
    for at in (0..len).step_by(512 << 10) {
        batch.push(memory, at, &file.remote(), at, (len - at).min(512 * KIB)).expect("inside");
    }
    batch
}

/// Whether operations on the file use registered memory once it was used often.
fn registers(rig: &Rig, file: &FileRegion) -> bool {
    let engine = rig.agent.files().engine().expect("a file is open");
    println!("engine: {engine}; past the page cache: {}", file.is_direct());
    engine == "uring" && file.is_direct()
}

fn memory_that_is_used_often_is_registered_until_it_is_unregistered(rig: &Rig) {
    let file = rig.file("often", &FileOptions::create(24 * MIB));
    let mut map = Mapping::anonymous(24 << 20).expect("memory");
    for round in 0..4 {
        // SAFETY: unregistered below, before the memory is unmapped.
        let memory = unsafe { rig.agent.register(map.as_ptr(), map.len(), Access::NONE) };
        let memory = memory.expect("free");
        let source = bytes(20 + round, 24 * MIB);
        map.span(0, source.len()).copy_from(&source);
        let before = rig.agent.files().registered_operations();
        for _ in 0..3 {
            rig.write(&blocks(&memory, &file)).expect("space");
        }
        map.span(0, source.len()).copy_from(&vec![0; source.len()]);
        rig.read(&blocks(&memory, &file)).expect("written above");
        let registered = rig.agent.files().registered_operations() - before;
        assert_eq!(registered > 0, registers(rig, &file), "{registered} operations");
        let mut back = vec![0; source.len()];
        map.span(0, back.len()).copy_to(&mut back);
        assert!(back == source, "round {round}");
        rig.agent.unregister(&memory).expect("registered");
        // Other pages, most likely at the same address: a registration that was left would move the
        // former ones.
        let at = map.as_ptr();
        drop(map);
        map = Mapping::anonymous(24 << 20).expect("memory");
        println!("the same address: {}", map.as_ptr() == at);
    }
}

fn registered_memory_is_unregistered_while_transfers_run(rig: &Rig) {
    let file = rig.file("running", &FileOptions::create(24 * MIB));
    for delay in [0, 200, 1000, 3000, 10_000] {
        let memory = rig.memory(24 * MIB);
        for _ in 0..2 {
            rig.write(&blocks(&memory, &file)).expect("space");
        }
        let transfers = [(); 3]
            .map(|()| rig.agent.files().read_async(&blocks(&memory, &file), &Options::default()));
        std::thread::sleep(Duration::from_micros(delay));
        rig.agent.unregister(&memory).expect("registered");
        memory.write_at(0, &vec![0xaa; memory.len()]).expect("inside");
        for transfer in transfers {
            if let Err(e) = transfer.wait(PATIENCE).expect("it ends") {
                assert_eq!(e.kind(), ErrorKind::Revoked, "{e}");
            }
        }
        assert!(content(&memory).iter().all(|byte| *byte == 0xaa), "after {delay} µs");
    }
}

fn a_region_of_more_than_a_gibibyte_is_registered_in_parts(rig: &Rig) {
    let (window, distance) = (4 * MIB, (1 << 30) - 2 * MIB);
    let file = rig.file("long", &FileOptions::create(window));
    // No page is taken before it is used; a part that is registered takes all of its pages.
    let memory = rig.memory((1 << 30) + 64 * MIB);
    let source = bytes(30, window);
    let (mut out, mut back) = (Batch::new(), Batch::new());
    for at in (0..window).step_by(64 << 10) {
        out.push(&memory, distance + at, &file.remote(), at, 64 * KIB).expect("inside");
        back.push(&memory, distance + at, &file.remote(), window - at - 64 * KIB, 64 * KIB)
            .expect("inside");
    }
    let start = usize::try_from(distance).expect("a 64-bit system");
    memory.write_at(start, &source).expect("inside");
    // More than one part is long, on both sides of the gibibyte.
    for _ in 0..12 {
        rig.write(&out).expect("space");
    }
    let registered = rig.agent.files().registered_operations();
    assert_eq!(registered > 0, registers(rig, &file), "{registered} operations");
    rig.read(&back).expect("written above");
    let mut read = vec![0; source.len()];
    memory.read_at(start, &mut read).expect("inside");
    assert!(read.chunks(64 << 10).rev().flatten().eq(&source), "blocks in reverse order");
    rig.agent.unregister(&memory).expect("registered");
}

/// In a process of its own: the limit is the process's, the capability to pass it the thread's.
#[test]
fn a_low_limit_of_locked_memory_only_means_that_none_is_registered() {
    const NAME: &str = "file::a_low_limit_of_locked_memory_only_means_that_none_is_registered";
    if std::env::var_os("KVFERRY_TEST_LIMITED").is_none() {
        let this = std::env::current_exe().expect("a running program");
        let mut limited = std::process::Command::new(this);
        limited.args(["--exact", NAME, "--nocapture"]).env("KVFERRY_TEST_LIMITED", "1");
        let ran = limited.output().expect("a process");
        let said = String::from_utf8_lossy(&ran.stdout);
        print!("{said}");
        assert!(ran.status.success() && said.contains("1 passed"), "{ran:?}");
        return;
    }
    let limit = libc::rlimit { rlim_cur: 64 << 10, rlim_max: 64 << 10 };
    // SAFETY: a plain system call with a valid argument.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
    drop_ipc_lock();
    let Some(rig) = Rig::new("uring") else { return };
    let file = rig.file("limited", &FileOptions::create(24 * MIB));
    let memory = rig.memory(24 * MIB);
    let source = fill(&memory, 40);
    for _ in 0..3 {
        rig.write(&blocks(&memory, &file)).expect("space");
    }
    assert!(fs::read(file.path()).expect("made above") == source);
    assert_eq!(rig.agent.files().registered_operations(), 0);
    let engine = rig.agent.files().engine().expect("a file is open");
    let expected = "the limit of locked memory, ulimit -l";
    assert!(engine.contains(expected) || !file.is_direct(), "{engine}");
}

/// Gives up the right to lock more memory than the limit, in this thread.
fn drop_ipc_lock() {
    const CAP_IPC_LOCK: u32 = 14;
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable, of the lower and of the upper half.
    let mut sets = [0u32; 6];
    // SAFETY: both calls get a header and sets of the size that this version has.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()), 0);
        sets[..3].iter_mut().for_each(|set| *set &= !(1 << CAP_IPC_LOCK));
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
    }
}

#[test]
fn a_shutdown_ends_a_transfer_without_a_deadline_whose_device_hangs() {
    for engine in ["posix", "uring"] {
        let Some(rig) = Rig::new(engine) else { continue };
        let Some(disk) = HangingDisk::mount(&rig.folder) else { return };
        let builder = Agent::builder().name("hangs").setting("file_engine", engine);
        let agent = builder.silence(Duration::from_millis(200)).start().expect("an agent");
        let file = agent.open_file(rig.folder.join("file"), &FileOptions::create(MIB));
        let file = file.expect("a file");
        let memory = agent.allocate_private(MIB as usize, Access::NONE).expect("memory");
        let mut batch = Batch::new();
        batch.push(&memory, 0, &file.remote(), 0, MIB).expect("inside");
        let for_ever = Options { timeout: Some(Duration::MAX), ..Options::default() };
        agent.files().write(&batch, &for_ever).expect("the device answers");
        // Through the page cache, only a write asks the device each time.
        disk.hold();
        let (tell, told) = std::sync::mpsc::channel();
        let writer = agent.clone();
        std::thread::spawn(move || {
            let for_ever = Options { timeout: Some(Duration::MAX), ..Options::default() };
            tell.send(writer.files().write(&batch, &for_ever))
        });
        eventually("the device is asked", || disk.is_asked());
        agent.shutdown();
        let outcome = told.recv_timeout(PATIENCE).expect("the transfer ends");
        let e = outcome.expect_err("the device has not answered");
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::Shutdown, Some(false)), "{e}");
        disk.release();
    }
}

#[test]
fn a_write_that_its_file_system_interrupts_each_time_ends_at_its_deadline_and_asks_no_more() {
    let _watchdog = Watchdog::new(PATIENCE);
    for engine in ["posix", "uring"] {
        let Some(rig) = Rig::new(engine) else { continue };
        let Some(disk) = rig.disk("interrupts") else { return };
        let options = FileOptions::create(4 * KIB).direct(DirectIo::Off);
        let file = rig.file("interrupts/file", &options);
        let memory = rig.memory(4 * KIB);
        disk.interrupt_writes();
        let brief = Options { timeout: Some(Duration::from_millis(500)), ..Options::default() };
        let e = loop {
            // A transfer whose time is over before it begins has asked for nothing.
            let written = rig.agent.files().write(&one(&memory, &file, 4 * KIB), &brief);
            let e = written.expect_err("interrupted");
            if disk.interrupted() > 0 {
                break e;
            }
        };
        assert_eq!(e.kind(), ErrorKind::Deadline, "{e}");
        // A thread that asks again and again never stops.
        rig.agent.unregister(&memory).expect("nothing copies");
        let asked = disk.interrupted();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(disk.interrupted(), asked, "asked after the end");
    }
}

/// Writes of 4 KiB to each of `files`.
fn writes(memory: &Region, files: &[FileRegion]) -> Batch {
    let mut batch = Batch::new();
    for (file, at) in files.iter().zip((0..).step_by(4 * KIB as usize)) {
        batch.push(memory, at, &file.remote(), 0, 4 * KIB).expect("inside");
    }
    batch
}

#[test]
fn a_device_that_hangs_holds_up_no_write_to_another() {
    // More files than there are threads, and than the classes of files that a thread of io_uring writes to in turns.
    const FILES: usize = 240;
    let _watchdog = Watchdog::new(PATIENCE);
    for engine in ["posix", "uring"] {
        let Some(rig) = Rig::new(engine) else { continue };
        let Some(disk) = rig.disk("hangs") else { return };
        let memory = rig.memory(FILES as u64 * 4 * KIB);
        let options = FileOptions::create(4 * KIB).direct(DirectIo::Off);
        let file = |name: String| rig.file(&name, &options);
        let hanging: Vec<_> = (0..FILES).map(|it| file(format!("hangs/{it}"))).collect();
        let others: Vec<_> = (0..FILES).map(|it| file(format!("{it}"))).collect();
        disk.hold();
        let without_end = Options { timeout: Some(Duration::MAX), ..Options::default() };
        let begin = |files| rig.agent.files().write_async(&writes(&memory, files), &without_end);
        let waits = begin(&hanging);
        eventually("the device is asked", || disk.is_asked());
        // Of any thread of the agent, and of this one.
        let written: Vec<_> = others.chunks(FILES / 8).map(begin).collect();
        rig.agent.files().write(&writes(&memory, &others), &without_end).expect("it answers");
        for transfer in written {
            transfer.wait(None).expect("it ends").expect("its device answers");
        }
        assert!(waits.outcome().is_none());
        disk.release();
        waits.wait(None).expect("it ends").expect("the device answers");
    }
}
