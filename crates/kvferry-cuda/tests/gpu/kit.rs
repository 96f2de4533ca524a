//! What the tests have in common: the fake driver, its memory, and agents.

use kvferry::{
    Access, Agent, Batch, Error, Options, Peer, Region, Transfer, TransportKind, Transports,
};
use kvferry_cuda::{Counters, Gpu};
use kvferry_fakecuda::control::{Fake, FakeKernel, library_path};
use kvferry_sys::cuda::{Context, DeviceAllocation, Driver, Stream};
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::{PATIENCE, eventually};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// A test ends within this time, or fails.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The fake driver with these settings, which a process has once: its tests run one after the other.
pub(crate) struct Rig {
    pub(crate) fake: Fake,
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Rig {
    pub(crate) fn new(settings: &[(&str, &str)]) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let rig = Self { _alone: Some(alone), ..Self::shared() };
        for (key, value) in settings {
            rig.fake.set(key, value);
        }
        rig
    }

    /// The fake driver, beside other tests of the process.
    pub(crate) fn shared() -> Self {
        static FAKE: OnceLock<Fake> = OnceLock::new();
        let fake = FAKE.get_or_init(|| {
            let path = library_path();
            // SAFETY: they are set once, and kvferry reads them after that.
            unsafe {
                std::env::set_var("KVFERRY_LIBCUDA", &path);
                // Tests of calibrations set it on.
                std::env::set_var("KVFERRY_GPU_CALIBRATE", "off");
            }
            Fake::load(&path).expect("the fake driver loads")
        });
        Self { fake: *fake, _alone: None }
    }

    pub(crate) fn context(&self, device: i32) -> Context {
        let driver = Driver::get().expect("the fake driver");
        Context::primary(driver.device(device).expect("a device")).expect("a context")
    }

    /// Memory of a GPU with a pattern.
    pub(crate) fn memory(&self, device: i32, len: usize, seed: u64) -> DeviceAllocation {
        let memory = DeviceAllocation::new(&self.context(device), len).expect("memory");
        self.fake.write(memory.address(), &Pattern::new(seed).bytes(len)).expect("it is mapped");
        memory
    }

    /// Runs a fake kernel after the stream's earlier work.
    pub(crate) fn launch(&self, stream: &Stream, kernel: &FakeKernel<'_>) {
        let _current = stream.context().enter().expect("current");
        self.fake.launch(stream.raw().0 as usize, kernel).expect("it is launched");
    }

    /// Calls of the driver by its functions.
    pub(crate) fn calls(&self) -> Vec<(String, u64)> {
        let counters = self.fake.counters().into_iter();
        counters.filter(|(name, _)| name.starts_with("call:cu")).collect()
    }

    pub(crate) fn bytes(&self, memory: &DeviceAllocation, at: usize, len: usize) -> Vec<u8> {
        self.fake.read(memory.address() + at as u64, len).expect("it is mapped")
    }

    /// No access was unordered, and nothing of the driver is left.
    pub(crate) fn ends_clean(&self) {
        assert_eq!(self.fake.findings(), Vec::<String>::new());
        for name in ["streams", "events", "host_registrations", "contexts", "allocations"] {
            eventually(name, || self.fake.counter(name) == 0);
        }
    }
}

pub(crate) fn agent(kind: TransportKind) -> Agent {
    impatient(kind, PATIENCE / 5)
}

pub(crate) fn impatient(kind: TransportKind, silence: Duration) -> Agent {
    let transports = Transports::only(TransportKind::TCP).with(kind);
    Agent::builder().transports(transports).silence(silence).start().expect("an agent starts")
}

pub(crate) fn register(agent: &Agent, memory: &DeviceAllocation) -> Region {
    let memory = kvferry_cuda::memory(memory.address(), memory.len() as u64, None).expect("a GPU");
    agent.register_device(memory, Access::READ_WRITE).expect("a region")
}

pub(crate) fn options() -> Options<'static> {
    Options { timeout: Some(PATIENCE), ..Options::default() }
}

pub(crate) fn peer_of(near: &Agent, far: &Agent) -> Peer {
    near.peer(far.advertised()).expect("an address")
}

pub(crate) fn ended(transfer: &Transfer) -> Result<(), Error> {
    transfer.wait(PATIENCE).expect("it ends").map(drop)
}

/// Pairs of pieces: piece `i` of `len` bytes is at `2 * i * len` on both sides.
pub(crate) fn scattered(local: &Region, remote: &Region, count: usize, len: usize) -> Batch {
    let mut batch = Batch::new();
    let remote = remote.remote();
    for at in (0..count).map(|i| (2 * i * len) as u64) {
        batch.push(local, at, &remote, at, len as u64).expect("inside");
    }
    batch
}

/// Everything from the first byte on.
pub(crate) fn whole(local: &Region, remote: &Region, len: usize) -> Batch {
    let mut batch = Batch::new();
    batch.push(local, 0, &remote.remote(), 0, len as u64).expect("inside");
    batch
}

/// The counters of the GPU that is in use.
pub(crate) fn counters() -> Counters {
    Gpu::all().first().expect("a GPU is in use").counters()
}
