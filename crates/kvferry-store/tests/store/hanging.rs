//! Devices that neither complete an operation nor fail it.

use crate::{Folder, MIB, content, options, prompt};
use kvferry::{Access, Agent, DirectIo, Region};
use kvferry_store::{BlockMemory, Namespace, Put, Retain, Space, Store};
use kvferry_testkit::hanging::HangingDisk;
use std::thread;
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
        let folder = Folder::new(&format!("{name}-{direct:?}"));
        let disk = HangingDisk::mount(folder.path())?;
        let agent = Agent::builder().name("engine").timeout(TIMEOUT).start().expect("an agent");
        let pool = agent.allocate(2 * LEN as usize, Access::NONE).expect("memory");
        let with = options(folder.path(), 24 * MIB).direct(direct);
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
