//! What the tests have in common: the machine, its memory, and agents.

use crate::fake::FakeMachine;
use crate::machine::{Kernel, Machine, Mode, machine};
use kvferry::{
    Access, After, Agent, Batch, Error, Options, Peer, Region, Transfer, TransportKind, Transports,
};
use kvferry_cuda::{Counters, Gpu};
use kvferry_fakecuda::Fault;
use kvferry_fakecuda::control::Fake;
use kvferry_sys::cuda::{Context, DeviceAllocation, Stream};
use kvferry_testkit::PATIENCE;
use kvferry_testkit::pattern::Pattern;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// A test ends within this time, or fails.
pub(crate) const LIMIT: Duration = PATIENCE;

/// The machine, which a process has once: its tests run one after the other.
pub(crate) struct Rig {
    machine: &'static dyn Machine,
    _alone: MutexGuard<'static, ()>,
}

impl Rig {
    /// Takes the machine. The fake driver gets these settings; a real one has none.
    pub(crate) fn new(settings: &[(&str, &str)]) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let rig = Self { machine: machine(), _alone: alone };
        if Mode::get() == Mode::Fake {
            settings.iter().for_each(|(key, value)| FakeMachine::get().fake.set(key, value));
        }
        rig
    }

    /// Whether the driver is the fake one, for limits and numbers of rounds.
    pub(crate) fn is_fake(&self) -> bool {
        Mode::get() == Mode::Fake
    }

    /// Whether a GPU runs the kernels.
    pub(crate) fn is_real(&self) -> bool {
        Mode::get() == Mode::Real
    }

    /// Rounds of a test that repeats the same work: `KVFERRY_TEST_ROUNDS`, else 1000 on a GPU and 25 without one.
    pub(crate) fn rounds(&self) -> usize {
        let named = std::env::var("KVFERRY_TEST_ROUNDS").ok();
        let default = if self.is_real() { 1000 } else { 25 };
        named.map_or(default, |text| text.parse().expect("a number of rounds"))
    }

    /// Whether there are `count` GPUs. If not, prints that `what` is skipped.
    pub(crate) fn has_devices(&self, count: i32, what: &str) -> bool {
        let devices = self.machine.devices();
        if devices < count {
            println!("SKIPPED: {what}: needs {count} GPUs, this machine has {devices}");
        }
        devices >= count
    }

    /// The context of a GPU, or of the last one if there are fewer.
    pub(crate) fn context(&self, device: i32) -> Context {
        self.machine.context(device.min(self.machine.devices() - 1))
    }

    /// Memory of a GPU with a pattern.
    pub(crate) fn memory(&self, device: i32, len: usize, seed: u64) -> DeviceAllocation {
        let memory = DeviceAllocation::new(&self.context(device), len).expect("memory");
        self.write(&memory, 0, &Pattern::new(seed).bytes(len));
        memory
    }

    pub(crate) fn write(&self, memory: &DeviceAllocation, at: usize, bytes: &[u8]) {
        self.machine.write(memory.context(), memory.address() + at as u64, bytes);
    }

    pub(crate) fn bytes(&self, memory: &DeviceAllocation, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.machine.read(memory.context(), memory.address() + at as u64, &mut bytes);
        bytes
    }

    /// Runs a kernel after the stream's earlier work.
    pub(crate) fn launch(&self, stream: &Stream, kernel: &Kernel<'_>) {
        self.machine.launch(stream, kernel);
    }

    /// Keeps kernels from starting.
    pub(crate) fn hold(&self) {
        self.machine.hold();
    }

    /// Lets kernels start again.
    pub(crate) fn release(&self) {
        self.machine.release();
    }

    pub(crate) fn findings(&self) -> Vec<String> {
        self.machine.findings()
    }

    pub(crate) fn clear_findings(&self) {
        self.machine.clear_findings();
    }

    pub(crate) fn symbol(&self, name: &str) -> *mut c_void {
        self.machine.symbol(name)
    }

    /// No access was unordered, and nothing of the driver is left.
    pub(crate) fn ends_clean(&self) {
        assert_eq!(self.findings(), Vec::<String>::new());
        self.machine.ends_clean();
    }
}

/// The fake driver and its faults, for tests that no other driver can run.
pub(crate) struct FakeRig {
    pub(crate) fake: Fake,
    rig: Rig,
}

impl FakeRig {
    /// `None` with another driver, after it has printed that the test is skipped.
    pub(crate) fn new(settings: &[(&str, &str)]) -> Option<Self> {
        if Mode::get() != Mode::Fake {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("a test");
            println!(
                "SKIPPED: {test}: only the fake driver has such faults, versions and counters"
            );
            return None;
        }
        let rig = Rig::new(settings);
        Some(Self { fake: FakeMachine::get().fake, rig })
    }

    /// Calls of the driver by its functions.
    pub(crate) fn calls(&self) -> Vec<(String, u64)> {
        let counters = self.fake.counters().into_iter();
        counters.filter(|(name, _)| name.starts_with("call:cu")).collect()
    }

    /// Waits until each context that was retained is released. A late release of a destroyed context would end its successor.
    pub(crate) fn releases_contexts(&self) {
        let [retained, released] = ["Retain", "Release_v2"]
            .map(|it| move || self.fake.counter(&format!("call:cuDevicePrimaryCtx{it}")));
        kvferry_testkit::eventually("contexts are released", || retained() == released());
    }

    /// Waits until the driver has not been called for this time: a thread may end its last call after the transfer.
    pub(crate) fn becomes_idle(&self, time: Duration) {
        kvferry_testkit::eventually("no call of the driver", || {
            let before = self.calls();
            std::thread::sleep(time);
            self.calls() == before
        });
    }
}

impl std::ops::Deref for FakeRig {
    type Target = Rig;

    fn deref(&self) -> &Rig {
        &self.rig
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

/// Two agents: the near one has memory of a GPU, the far one as much host memory.
pub(crate) struct Pair {
    pub(crate) region: Region,
    pub(crate) to: Region,
    pub(crate) peer: Peer,
    pub(crate) near: Agent,
    pub(crate) far: Agent,
}

impl Pair {
    pub(crate) fn new(kind: TransportKind, gpu: &DeviceAllocation) -> Self {
        let (near, far) = (agent(kind), agent(kind));
        let region = register(&near, gpu);
        let to = far.allocate(gpu.len(), Access::READ_WRITE).expect("memory");
        Self { region, to, peer: peer_of(&near, &far), near, far }
    }
}

/// Pairs of pieces, without work to wait for: piece `i` of `len` bytes is at `2 * i * len` on both sides.
pub(crate) fn scattered(local: &Region, remote: &Region, count: usize, len: usize) -> Batch {
    let mut batch = Batch::new();
    batch.set_after(After::host());
    let remote = remote.remote();
    for at in (0..count).map(|i| (2 * i * len) as u64) {
        batch.push(local, at, &remote, at, len as u64).expect("inside");
    }
    batch
}

/// Everything from the first byte on, without work to wait for.
pub(crate) fn whole(local: &Region, remote: &Region, len: usize) -> Batch {
    let mut batch = Batch::new();
    batch.set_after(After::host());
    batch.push(local, 0, &remote.remote(), 0, len as u64).expect("inside");
    batch
}

/// The counters of the GPU that is in use.
pub(crate) fn counters() -> Counters {
    Gpu::all().first().expect("a GPU is in use").counters()
}

/// Writes a batch until a copy of the GPU has stalled, and returns that write's error. A loaded machine may end the session
/// of agents that wait briefly for each other, or a write before it copies.
pub(crate) fn stalled(rig: &FakeRig, peer: &Peer, batch: &Batch) -> Error {
    while peer.write(batch, &options()).is_err() {}
    rig.fake.fault(Fault::StreamStalls, 1, 1);
    let brief = Options { timeout: Some(Duration::from_millis(100)), ..Options::default() };
    loop {
        let outcome = peer.write(batch, &brief);
        if rig.fake.counter("hit:stream_stalls") > 0 {
            return outcome.expect_err("the copy never ends");
        }
    }
}
