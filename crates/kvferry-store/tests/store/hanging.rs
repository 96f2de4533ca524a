//! Devices that neither complete an operation nor fail it.

use crate::{Folder, MIB, content, options, prompt};
use kvferry::{Access, Agent, DirectIo, Region};
use kvferry_store::inspect::{Files, State};
use kvferry_store::{
    BlockMemory, Error, Namespace, Put, Report, Retain, Space, Store, StoreOptions,
};
use kvferry_testkit::hanging::HangingDisk;
use kvferry_testkit::{Watchdog, eventually};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

const LEN: u64 = 256 << 10;
const TIMEOUT: Duration = Duration::from_millis(100);

fn wait_until(what: &str, is: impl Fn() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A store on one disk, with an agent that waits for a transfer for [`TIMEOUT`] by default.
struct Rig {
    /// First, so that its operations end before the store waits for them.
    disk: HangingDisk,
    agent: Agent,
    pool: Region,
    store: Store,
    kv: Space,
    prompt: Vec<[u8; 32]>,
    _folder: Folder,
}

impl Rig {
    /// The first block of the prompt is in the store. `None` if this process can't mount file systems.
    fn new(name: &str, direct: DirectIo) -> Option<Self> {
        Self::with(&format!("{name}-{direct:?}"), |it| it.direct(direct))
    }

    fn with(name: &str, change: impl FnOnce(StoreOptions) -> StoreOptions) -> Option<Self> {
        let folder = Folder::new(name);
        let disk = HangingDisk::mount(folder.path())?;
        let agent = Agent::builder().name("engine").timeout(TIMEOUT).start().expect("an agent");
        let pool = agent.allocate(2 * LEN as usize, Access::NONE).expect("memory");
        let with = change(options(folder.path(), 24 * MIB));
        let store = Store::open(&agent, &with).expect("a store");
        let kv = store.space(&Namespace::new("model"));
        let rig = Self { disk, agent, pool, store, kv, prompt: prompt(1, 2), _folder: folder };
        assert_eq!(rig.put(0).stored, 1);
        Some(rig)
    }

    fn memory(&self) -> [BlockMemory; 1] {
        [BlockMemory::new(&self.pool, 0, LEN)]
    }

    fn put(&self, block: usize) -> Put {
        self.pool.write_at(0, &content(&self.prompt[block], LEN)).expect("inside");
        let one = &self.prompt[block..=block];
        self.kv.put(one, 0, &self.memory(), Retain::default()).expect("a put")
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN as usize];
        self.pool.read_at(0, &mut bytes).expect("inside");
        bytes
    }

    fn close(self) {
        self.store.close();
        self.agent.shutdown();
    }
}

#[test]
fn memory_of_a_get_is_not_written_by_the_device_once_the_get_has_returned() {
    let Some(rig) = Rig::new("lost-read", DirectIo::Auto) else { return };
    rig.pool.write_at(0, &[0; LEN as usize]).expect("inside");
    rig.disk.lose_reads(1);
    let marker = vec![0xa5; LEN as usize];
    thread::scope(|scope| {
        let get = scope.spawn(|| {
            let got = rig.kv.get(&rig.prompt[..1], 0, &rig.memory()).expect("a get");
            assert!(got == 0 || rig.bytes() == content(&rig.prompt[0], LEN));
            // The next request's KV.
            rig.pool.write_at(0, &marker).expect("inside");
        });
        wait_until("a read is lost", || rig.disk.lost() == 1);
        // Longer than the agent waits.
        thread::sleep(TIMEOUT * 5);
        rig.disk.release();
        wait_until("it is answered", || rig.disk.lost() == 0);
        get.join().expect("no panic");
    });
    // What was answered is in memory now.
    thread::sleep(Duration::from_millis(100));
    assert!(rig.bytes() == marker, "the device wrote to memory that was given back");
    rig.close();
}

#[test]
fn a_put_returns_once_a_device_that_hangs_does_not_read_its_memory_any_more() {
    for direct in [DirectIo::Off, DirectIo::Auto] {
        let Some(rig) = Rig::new("held-put", direct) else { return };
        rig.disk.hold();
        thread::scope(|scope| {
            let put = scope.spawn(|| rig.put(1));
            wait_until("the device is asked", || rig.disk.is_asked());
            thread::sleep(TIMEOUT * 5);
            let is_early = put.is_finished();
            rig.disk.release();
            put.join().expect("no panic");
            assert!(!is_early, "{direct:?}: the device had not read the memory");
        });
        assert_eq!(rig.store.stats().corrupt, 0);
        rig.close();
    }
}

#[test]
fn a_store_on_one_disk_that_hangs_waits_for_no_further_operation_and_serves_again_once_it_answers()
{
    let _watchdog = Watchdog::new(LIMIT);
    let with = |it: StoreOptions| it.direct(DirectIo::Auto).hang_after(HANG_AFTER);
    let Some(rig) = Rig::with("one", with) else { return };
    let other = [BlockMemory::new(&rig.pool, LEN, LEN)];
    let get = || rig.kv.get(&rig.prompt[..1], 0, &other).expect("a get");
    rig.disk.hold();
    thread::scope(|scope| {
        let _release = Release(&rig.disk);
        let waits = scope.spawn(|| rig.kv.get(&rig.prompt[..1], 0, &rig.memory()));
        wait_until("the device is asked", || rig.disk.is_asked());
        eventually("it takes longer than it may", || rig.store.stats().hanging_directories == 1);
        assert_eq!(get(), 0, "it is missed");
        assert_eq!(rig.put(1).failed, 1);
        assert!(!waits.is_finished(), "the device may write to its memory");
        rig.disk.release();
        assert_eq!(waits.join().expect("no panic").expect("a get"), 1);
    });
    eventually("it is well again", || get() == 1);
    eventually("blocks are put again", || {
        let put = rig.put(1);
        put.stored + put.present == 1
    });
    assert_eq!(rig.store.stats().corrupt, 0);
    rig.close();
}

#[test]
fn the_statistics_do_not_wait_for_a_device_that_hangs() {
    let _watchdog = Watchdog::new(LIMIT);
    let Some(rig) = Rig::new("stats", DirectIo::Off) else { return };
    assert_eq!(rig.store.stats().disk_bytes, MIB);
    rig.disk.hold();
    {
        let _release = Release(&rig.disk);
        eventually("the files are counted", || {
            assert_eq!(rig.store.stats().disk_bytes, MIB, "as it is known");
            rig.disk.is_asked()
        });
    }
    rig.close();
}

/// How long an operation may take on a device in memory: long enough for a machine that is busy with other tests.
const HANG_AFTER: Duration = Duration::from_secs(5);
const SHORT: u64 = 64 << 10;
/// Blocks of a prompt that has some in each of four directories.
const LONG: usize = 75;
/// One of its blocks that is in the third directory, behind a whole segment of the second one.
const LATE: usize = 50;
/// Places for blocks in memory: of one block each, and from here on of two long prompts.
const FIRST_LONG: u64 = 4;
const PLACES: u64 = FIRST_LONG + 2 * LONG as u64;
/// Each test of these ends in a fraction of it.
const LIMIT: Duration = Duration::from_secs(180);

/// File engine of the agent of a test, with what the other three directories are then.
#[derive(Clone, Copy, Debug)]
enum FileEngine {
    /// With devices in memory: what other tests do on the machine's disk takes no time there.
    Posix,
    /// io_uring where the system permits it, with folders on the machine's disk: for io_uring, the kernel begins writes to
    /// files of the devices in memory one after the other if their inodes fall into the same of 64 classes, whatever device
    /// they are on.
    Default,
}

/// A store in four directories, of which the third hangs in these tests.
struct Four {
    /// First, so that its operations end before the store waits for them.
    disk: HangingDisk,
    _others: Vec<HangingDisk>,
    agent: Agent,
    pool: Region,
    with: StoreOptions,
    folder: Folder,
}

/// The store of [`Four`], open, with blocks of one prompt each. The last one is in a segment of the third directory,
/// to which this process writes.
struct Filled {
    store: Store,
    kv: Space,
    seeds: Range<u64>,
    /// Blocks in the third directory.
    in_third: usize,
    /// Segments of all directories.
    segments: usize,
}

/// Has the disk answer also where a test fails: threads wait for it.
struct Release<'a>(&'a HangingDisk);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl FileEngine {
    /// How long an operation may take. The machine's disk is also busy with other tests.
    fn hang_after(self) -> Duration {
        match self {
            Self::Posix => HANG_AFTER,
            Self::Default => HANG_AFTER * 4,
        }
    }
}

impl Four {
    /// `None` if this process can't mount file systems.
    fn new(name: &str) -> Option<Self> {
        Self::with(name, |it| it)
    }

    fn with(name: &str, change: impl FnOnce(StoreOptions) -> StoreOptions) -> Option<Self> {
        Self::with_engine(name, FileEngine::Posix, change)
    }

    fn with_engine(
        name: &str,
        engine: FileEngine,
        change: impl FnOnce(StoreOptions) -> StoreOptions,
    ) -> Option<Self> {
        let folder = Folder::new(name);
        let paths = ["a", "b", "c", "d"].map(|it| folder.path().join(it));
        paths.iter().for_each(|it| std::fs::create_dir(it).expect("a folder"));
        let disk = HangingDisk::mount(&paths[2])?;
        let agent = Agent::builder().name("engine");
        let (agent, in_memory) = match engine {
            FileEngine::Posix => (agent.setting("file_engine", "posix"), &[0, 1, 3][..]),
            FileEngine::Default => (agent, &[][..]),
        };
        let mount = |it: &usize| HangingDisk::mount(&paths[*it]).expect("as the third");
        let others = in_memory.iter().map(mount).collect();
        let agent = agent.start().expect("an agent");
        let pool = agent.allocate(PLACES as usize * SHORT as usize, Access::NONE).expect("memory");
        let [first, rest @ ..] = paths;
        // Past the page cache: it would answer for the device.
        let first = options(&first, 24 * MIB)
            .direct(DirectIo::Auto)
            .put_wait(LIMIT / 4)
            .hang_after(engine.hang_after());
        let with = change(rest.into_iter().fold(first, StoreOptions::and_directory));
        Some(Self { disk, _others: others, agent, pool, with, folder })
    }

    fn third(&self) -> PathBuf {
        self.folder.path().join("c")
    }

    fn open(&self) -> (Store, Space) {
        let store = Store::open(&self.agent, &self.with).expect("a store");
        let kv = store.space(&Namespace::new("model"));
        (store, kv)
    }

    /// One of the places in memory.
    fn memory(&self, place: u64) -> [BlockMemory; 1] {
        [BlockMemory::new(&self.pool, place * SHORT, SHORT)]
    }

    /// Memory of a long prompt, from this place on.
    fn long_memory(&self, place: u64) -> Vec<BlockMemory> {
        (place..place + LONG as u64).flat_map(|it| self.memory(it)).collect()
    }

    /// Puts all blocks of a prompt in one call.
    fn put_long(&self, kv: &Space, prompt: &[[u8; 32]]) -> Put {
        for (place, hash) in (FIRST_LONG..).zip(prompt) {
            let at = (place * SHORT) as usize;
            self.pool.write_at(at, &content(hash, SHORT)).expect("inside");
        }
        kv.put(prompt, 0, &self.long_memory(FIRST_LONG), Retain::default()).expect("a put")
    }

    /// Gets all blocks of a prompt in one call. Returns how many are there. Their bytes are right then.
    fn get_long(&self, kv: &Space, place: u64, prompt: &[[u8; 32]]) -> usize {
        let got = kv.get(prompt, 0, &self.long_memory(place)).expect("a get");
        for (place, hash) in (place..).zip(&prompt[..got]) {
            let mut bytes = vec![0; SHORT as usize];
            self.pool.read_at((place * SHORT) as usize, &mut bytes).expect("inside");
            assert!(bytes == content(hash, SHORT), "a block is not what was put");
        }
        got
    }

    fn put(&self, kv: &Space, seed: u64) -> Put {
        let hash = prompt(seed, 1);
        self.pool.write_at(0, &content(&hash[0], SHORT)).expect("inside");
        kv.put(&hash, 0, &self.memory(0), Retain::default()).expect("a put")
    }

    /// Whether a block is there. Its bytes are right then.
    fn get(&self, kv: &Space, seed: u64) -> bool {
        self.get_to(kv, 1, seed).expect("a get")
    }

    fn get_to(&self, kv: &Space, place: u64, seed: u64) -> kvferry_store::Result<bool> {
        let hash = prompt(seed, 1);
        let got = kv.get(&hash, 0, &self.memory(place))?;
        let mut bytes = vec![0; SHORT as usize];
        self.pool.read_at((place * SHORT) as usize, &mut bytes).expect("inside");
        assert!(got == 0 || bytes == content(&hash[0], SHORT), "block {seed} is not what was put");
        Ok(got == 1)
    }

    /// The numbers of the segments that have a file.
    fn segments(&self) -> Vec<usize> {
        let names = ["a", "b", "c", "d"].map(|it| self.folder.path().join(it));
        let files = names.iter().flat_map(|it| std::fs::read_dir(it).expect("a folder"));
        let number = |it: std::io::Result<std::fs::DirEntry>| {
            let name = it.expect("a file").file_name();
            name.to_str().and_then(|it| it.strip_prefix("segment-")?.parse().ok())
        };
        files.filter_map(number).collect()
    }

    fn filled(&self) -> Filled {
        self.filled_up_to(2)
    }

    /// The last segment that was begun is in the directory of number `last`.
    fn filled_up_to(&self, last: usize) -> Filled {
        let (store, kv) = self.open();
        let mut seeds = 0..0;
        while seeds.end < 100 || self.segments().iter().max().is_none_or(|it| it % 4 != last) {
            assert_eq!(self.put(&kv, seeds.end).stored, 1);
            seeds.end += 1;
        }
        let paths = ["a", "b", "c", "d"].map(|it| self.folder.path().join(it));
        let files = Files::open(&paths).expect("a store");
        let in_third = |it: &kvferry_store::inspect::Segment| match &it.state {
            State::Used(scanned) if it.number % 4 == 2 => scanned.records.len(),
            _ => 0,
        };
        let in_third = files.segments().expect("segments").iter().map(in_third).sum();
        assert!((1..100).contains(&in_third), "{in_third}");
        let segments = self.segments().len();
        Filled { store, kv, seeds, in_third, segments }
    }

    /// Holds the third disk, and gets blocks on a thread until one is there that it waits for. Returns when the directory
    /// hangs.
    fn hang<'a>(
        &'a self,
        scope: &'a Scope<'a, '_>,
        filled: &'a Filled,
    ) -> ScopedJoinHandle<'a, ()> {
        self.disk.hold();
        let waits = scope.spawn(|| {
            // Until the store is closed.
            let _ =
                filled.seeds.clone().try_for_each(|it| self.get_to(&filled.kv, 3, it).map(drop));
        });
        eventually("the device is asked", || self.disk.is_asked());
        eventually("the directory hangs", || filled.store.stats().hanging_directories == 1);
        assert!(!waits.is_finished(), "it waits for the device, which may write to its memory");
        waits
    }
}

#[test]
fn a_directory_that_hangs_is_missed_while_the_others_serve_and_serves_again_once_it_answers() {
    others_serve_while_one_directory_hangs(FileEngine::Posix);
}

#[test]
fn with_the_default_engine_a_directory_that_hangs_is_missed_while_the_others_serve() {
    others_serve_while_one_directory_hangs(FileEngine::Default);
}

fn others_serve_while_one_directory_hangs(engine: FileEngine) {
    let _watchdog = Watchdog::new(LIMIT);
    let name = format!("four-{engine:?}");
    let Some(four) = Four::with_engine(&name, engine, |it| it) else { return };
    let filled = four.filled();
    let (store, kv) = (&filled.store, &filled.kv);
    // The keeper of a full store drops none of them.
    let pinned = filled.seeds.clone().map(|it| kv.pin(&prompt(it, 1), LIMIT).expect("a pin"));
    let _pinned: Vec<_> = pinned.collect();
    thread::scope(|scope| {
        let _release = Release(&four.disk);
        let waits = four.hang(scope, &filled);
        assert_eq!(store.stats().disk_bytes, filled.segments as u64 * MIB, "as it is known");
        let missed: Vec<u64> = filled.seeds.clone().filter(|seed| !four.get(kv, *seed)).collect();
        assert_eq!(missed.len(), filled.in_third);
        let pins = missed.iter().map(|it| kv.pin(&prompt(*it, 1), LIMIT).expect("a pin"));
        let pins: Vec<_> = pins.collect();
        assert!(pins.iter().all(|it| it.blocks() == 0), "a get would miss them");
        let promised = |it: &u64| kv.lookup(&prompt(*it, 1)).expect("a lookup") == 1;
        assert_eq!(
            filled.seeds.clone().filter(promised).count(),
            filled.seeds.clone().count() - missed.len()
        );
        // Three times what the store holds: segments of the others are freed.
        for seed in 1000..2000 {
            let put = four.put(kv, seed);
            assert_eq!((put.stored, put.failed), (1, 0), "{seed}: {:?}", store.stats());
        }
        let synced = store.sync().expect_err("blocks are on the disk that hangs");
        assert!(synced.to_string().contains(&*four.third().to_string_lossy()), "{synced}");
        assert!(synced.to_string().contains("hangs"), "{synced}");
        assert_eq!(store.stats().hanging_directories, 1);
        assert!(!waits.is_finished());
        four.disk.release();
        waits.join().expect("no panic");
        eventually("it is well again", || store.stats().hanging_directories == 0);
        assert!(missed.iter().all(|seed| four.get(kv, *seed)), "{:?}", store.stats());
        assert!(missed.iter().all(promised), "{:?}", store.stats());
    });
    eventually("what was put there is synced", || store.sync().is_ok());
    assert_eq!(store.stats().corrupt, 0);
    store.close();
    four.agent.shutdown();
}

#[test]
fn a_watch_reports_blocks_of_a_directory_that_hangs_as_removed_and_as_stored_once_it_answers() {
    let _watchdog = Watchdog::new(LIMIT);
    let Some(four) = Four::new("watched") else { return };
    let filled = four.filled();
    let (store, kv) = (&filled.store, &filled.kv);
    let watch = store.watch(&[vec![kv.clone()]]).expect("it is open");
    let hashes: Vec<_> = filled.seeds.clone().map(|seed| prompt(seed, 1)[0]).collect();
    watch.add(0, &hashes).expect("a group");
    // Each report is of a block that was not, or was, believed.
    let mut told: BTreeSet<Box<[u8]>> = BTreeSet::new();
    let mut settle = |count: usize| {
        eventually("a router believes what can be read", || {
            for Report { is_removed, hashes, .. } in watch.take(usize::MAX) {
                for hash in hashes {
                    assert!(if is_removed { told.remove(&hash) } else { told.insert(hash) });
                }
            }
            told.len() == count || {
                watch.gather(TIMEOUT).expect("it is open");
                false
            }
        });
        let believed = |hash: &[u8; 32]| told.contains(&hash[..]);
        hashes.iter().map(believed).collect::<Vec<_>>()
    };
    settle(hashes.len());
    thread::scope(|scope| {
        let _release = Release(&four.disk);
        let waits = four.hang(scope, &filled);
        let believed = settle(hashes.len() - filled.in_third);
        let readable: Vec<_> = filled.seeds.clone().map(|seed| four.get(kv, seed)).collect();
        assert_eq!(believed, readable);
        // What an engine finds out meanwhile has no effect on blocks that can't be read.
        watch.add(0, &hashes).expect("a group");
        settle(hashes.len() - filled.in_third);
        four.disk.release();
        waits.join().expect("no panic");
    });
    settle(hashes.len());
    store.close();
    four.agent.shutdown();
}

/// Has blocks of the other directories put, got and synced. Those of the third one are missed.
fn others_serve(four: &Four, filled: &Filled, seed: u64) {
    let (store, kv) = (&filled.store, &filled.kv);
    assert_eq!(store.stats().hanging_directories, 1);
    let found = filled.seeds.clone().filter(|it| four.get(kv, *it)).count();
    assert_eq!(found, filled.seeds.clone().count() - filled.in_third);
    assert_eq!(four.put(kv, seed).stored, 1);
    assert_eq!(store.stats().hanging_directories, 1);
}

#[test]
fn a_get_that_waits_for_one_directory_has_no_other_one_hang() {
    gets_while_one_directory_hangs(DirectIo::Off);
}

#[test]
fn a_direct_get_that_waits_for_one_directory_has_no_other_one_hang() {
    gets_while_one_directory_hangs(DirectIo::Auto);
}

fn gets_while_one_directory_hangs(direct: DirectIo) {
    let _watchdog = Watchdog::new(LIMIT);
    let name = format!("get-{direct:?}");
    let Some(four) = Four::with(&name, |it| it.direct(direct)) else { return };
    let mut filled = four.filled_up_to(3);
    let long = prompt(5000, LONG);
    assert_eq!(four.put_long(&filled.kv, &long).stored, LONG);
    assert_eq!(four.get_long(&filled.kv, FIRST_LONG, &long), LONG);
    // The page cache has no block then.
    filled.store.close();
    (filled.store, filled.kv) = four.open();
    let (store, kv) = (&filled.store, &filled.kv);
    // One of the third directory: its file is open then, and the device has the memory of the next ones.
    assert_eq!(kv.get(&long[..=LATE], LATE, &four.memory(1)).expect("a get"), 1);
    four.disk.hold();
    thread::scope(|scope| {
        let _release = Release(&four.disk);
        let waits = scope.spawn(|| four.get_long(kv, FIRST_LONG, &long));
        eventually("a directory hangs", || store.stats().hanging_directories > 0);
        // Longer than each operation that had begun may take.
        thread::sleep(HANG_AFTER * 2);
        others_serve(&four, &filled, 6000);
        // Of the same prompt, whose blocks the other call has or waits for.
        let before = kv.lookup(&long).expect("a lookup");
        assert!((1..=LATE).contains(&before), "{before}");
        assert_eq!(four.get_long(kv, FIRST_LONG + LONG as u64, &long), before);
        assert!(!waits.is_finished(), "the device may write to its memory");
        four.disk.release();
        assert_eq!(waits.join().expect("no panic"), LONG);
    });
    assert_eq!(store.stats().corrupt, 0);
    store.close();
    four.agent.shutdown();
}

#[test]
fn a_put_that_waits_for_one_directory_has_no_other_one_hang_and_goes_on_in_the_others() {
    put_while_one_directory_hangs(FileEngine::Posix);
}

#[test]
fn with_the_default_engine_a_put_that_waits_for_one_directory_goes_on_in_the_others() {
    put_while_one_directory_hangs(FileEngine::Default);
}

fn put_while_one_directory_hangs(engine: FileEngine) {
    let _watchdog = Watchdog::new(LIMIT);
    let name = format!("put-{engine:?}");
    let Some(four) = Four::with_engine(&name, engine, |it| it) else { return };
    // The next segment is the third directory's.
    let filled = four.filled_up_to(1);
    let (store, kv) = (&filled.store, &filled.kv);
    four.disk.hold();
    {
        let _release = Release(&four.disk);
        let put = four.put_long(kv, &prompt(5000, LONG));
        assert_eq!((put.stored, put.failed), (LONG, 0), "{put:?}, {:?}", store.stats());
        others_serve(&four, &filled, 6000);
        assert_eq!(four.get_long(kv, FIRST_LONG, &prompt(5000, LONG)), LONG);
    }
    eventually("it is well again", || store.stats().hanging_directories == 0);
    store.sync().expect("all is on the disks");
    assert_eq!(store.stats().corrupt, 0);
    store.close();
    four.agent.shutdown();
}

#[test]
fn blocks_in_host_memory_are_written_and_synced_while_a_directory_hangs_that_has_none_of_them() {
    let _watchdog = Watchdog::new(LIMIT);
    let with = |it: StoreOptions| it.host_bytes(8 * MIB);
    let Some(four) = Four::with("host", with) else { return };
    let (store, kv) = four.open();
    let seeds = 0..40;
    assert!(seeds.clone().all(|seed| four.put(&kv, seed).stored == 1));
    store.sync().expect("no device fails");
    store.close();
    // In no segment that this process writes to, and not in host memory.
    let (store, kv) = four.open();
    four.disk.hold();
    thread::scope(|scope| {
        let _release = Release(&four.disk);
        scope.spawn(|| seeds.clone().for_each(|it| _ = four.get(&kv, it)));
        eventually("the device is asked", || four.disk.is_asked());
        eventually("the directory hangs", || store.stats().hanging_directories == 1);
        for seed in 1000..1040 {
            assert_eq!(four.put(&kv, seed).stored, 1);
            store.sync().expect("the blocks are in other directories");
            assert_eq!(store.stats().waiting_bytes, 0);
        }
        assert_eq!(store.stats().hanging_directories, 1);
        four.disk.release();
    });
    assert_eq!(store.stats().corrupt, 0);
    store.close();
    four.agent.shutdown();
}

#[test]
fn blocks_in_host_memory_are_written_to_other_directories_while_one_hangs() {
    let _watchdog = Watchdog::new(LIMIT);
    for direct in [DirectIo::Auto, DirectIo::Off] {
        let Some(mut four) = Four::new(&format!("behind-{direct:?}")) else { return };
        four.with = four.with.clone().direct(direct).host_bytes(8 * MIB);
        let (store, kv) = four.open();
        let put = |seed| {
            assert_eq!(four.put(&kv, seed).stored, 1);
            store.sync()
        };
        let mut seeds = 0..0;
        // The next blocks are written to the third directory.
        while four.segments().iter().max().is_none_or(|it| it % 4 != 2) {
            put(seeds.end).expect("no device fails");
            seeds.end += 1;
        }
        four.disk.hold();
        let _release = Release(&four.disk);
        for seed in 1000..1040 {
            // Fails if blocks from before are not synced.
            let _ = put(seed);
            assert_eq!(store.stats().waiting_bytes, 0, "it is written to another directory");
        }
        assert_eq!(store.stats().hanging_directories, 1);
        four.disk.release();
        eventually("it is well again", || store.stats().hanging_directories == 0);
        eventually("all is synced", || store.sync().is_ok());
        assert!((1000..1040).chain(seeds).all(|seed| four.get(&kv, seed)));
        assert_eq!(store.stats().corrupt, 0);
        store.close();
        four.agent.shutdown();
    }
}

#[test]
fn a_store_closes_while_a_directory_hangs_and_opens_again_once_it_answers() {
    let _watchdog = Watchdog::new(LIMIT);
    let Some(four) = Four::new("closes") else { return };
    let filled = four.filled();
    thread::scope(|scope| {
        let _release = Release(&four.disk);
        let waits = four.hang(scope, &filled);
        filled.store.close();
        assert!(!waits.is_finished());
        assert!(matches!(filled.store.sync(), Err(Error::Closed)));
        four.disk.release();
        waits.join().expect("no panic");
    });
    let (store, kv) = four.open();
    let found = filled.seeds.clone().filter(|seed| four.get(&kv, *seed)).count();
    assert_eq!(found, filled.seeds.clone().count());
    assert_eq!(store.stats().corrupt, 0);
    store.close();
    four.agent.shutdown();
}

#[test]
fn a_directory_that_hangs_when_a_store_is_opened_is_lost() {
    let _watchdog = Watchdog::new(LIMIT);
    let Some(four) = Four::new("opens") else { return };
    let filled = four.filled();
    filled.store.close();
    four.disk.hold();
    let (store, kv) = four.open();
    assert_eq!(store.stats().lost_directories, 1);
    // Further ones at the same time: they wait for the device at the same time, too.
    let others: Vec<_> = thread::scope(|scope| {
        let opened: Vec<_> = (0..3).map(|_| scope.spawn(|| four.open())).collect();
        opened.into_iter().map(|it| it.join().expect("no panic")).collect()
    });
    assert!(others.iter().all(|(other, _)| other.stats().lost_directories == 1));
    let found = filled.seeds.clone().filter(|seed| four.get(&kv, *seed)).count();
    assert_eq!(found, filled.seeds.clone().count() - filled.in_third);
    assert_eq!(four.put(&kv, 5000).stored, 1);
    thread::scope(|scope| others.iter().for_each(|(other, _)| _ = scope.spawn(|| other.close())));
    four.disk.release();
    store.close();
    four.agent.shutdown();
}
