//! Faults of a GPU's driver through a handoff: both ranks end it alike and in time, no byte is written late, and
//! handoffs of another GPU go on.

#![allow(unsafe_code, reason = "a stream is named by its raw handle")]

use super::kv::OnGpu;
use super::*;
use kvferry::After;
use kvferry_cuda::gpu::Settings;
use kvferry_cuda::{Edge, Gpu, Method};
use kvferry_fakecuda::control::{Fake, library_path};
use kvferry_fakecuda::{Effect, Fault};
use kvferry_sys::cuda::{Context, DeviceAllocation, Driver, Stream};
use kvferry_sys::sync::{Mutex, MutexGuard};

/// The method by which copies make the calls that the fault is about.
fn method(fault: Fault) -> Option<Method> {
    match fault {
        Fault::AllocOom => Some(Method::Gather),
        Fault::JitRefused | Fault::LaunchRefused => Some(Method::Kernel),
        Fault::BatchEntry => Some(Method::Batch),
        _ => None,
    }
}

/// The engine whose KV is on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Prefill,
    Decode,
}

/// The fake driver, which a process has once: its tests run one after the other.
struct Rig {
    fake: Fake,
    _alone: MutexGuard<'static, ()>,
}

impl Rig {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        static FAKE: OnceLock<Fake> = OnceLock::new();
        let alone = ALONE.lock();
        let fake = FAKE.get_or_init(|| {
            // SAFETY: it is set once, and kvferry reads it after that.
            unsafe { std::env::set_var("KVFERRY_LIBCUDA", library_path()) };
            Fake::load(&library_path()).expect("the fake driver loads")
        });
        Self { fake: *fake, _alone: alone }
    }

    fn hits(&self, fault: Fault) -> u64 {
        self.fake.counter(&format!("hit:{}", fault.name()))
    }

    /// Nothing of the driver is left, and each context was released.
    fn assert_clean(&self) {
        let [retained, released] = ["Retain", "Release_v2"]
            .map(|it| move || self.fake.counter(&format!("call:cuDevicePrimaryCtx{it}")));
        eventually("contexts are released", || retained() == released());
        for name in ["contexts", "streams", "events", "modules", "host_registrations", "pending"] {
            eventually(name, || self.fake.counter(name) == 0);
        }
        assert_eq!(self.fake.findings(), Vec::<String>::new());
    }
}

impl OnGpu {
    pub(super) fn new(agent: &Agent, len: usize, device: i32) -> Self {
        let driver = Driver::get().expect("the fake driver");
        let context = Context::primary(driver.device(device).expect("a GPU")).expect("a context");
        let allocation = DeviceAllocation::new(&context, len).expect("memory");
        let stream = Stream::new(&context).expect("a stream");
        let memory = kvferry_cuda::memory(allocation.address(), len as u64, Some(device));
        let region = agent.register_device(memory.expect("memory of a GPU"), Access::READ);
        Self { region: region.expect("a region"), allocation, stream }
    }

    /// Writes nothing to memory that a destroyed context has taken with it.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        let fake = Fake::attach().expect("it is loaded");
        let _ = fake.write(self.allocation.address() + at as u64, bytes);
    }

    pub(super) fn read(&self, at: usize, bytes: &mut [u8]) {
        let fake = Fake::attach().expect("it is loaded");
        let read = fake.read(self.allocation.address() + at as u64, bytes.len());
        bytes.copy_from_slice(&read.expect("it is mapped"));
    }

    pub(super) fn after(&self) -> Result<After, String> {
        let device = self.stream.context().device().ordinal();
        // SAFETY: the stream exists.
        let edge = unsafe { Edge::after_stream(self.stream.raw(), device) };
        edge.map(|edge| Edge::all([edge])).map_err(|error| error.to_string())
    }
}

/// A prefill and a decode engine, one of them with its KV on a GPU.
struct Engines {
    p: Engine,
    d: Engine,
}

/// The end of a handoff.
struct Ended {
    code: WireCode,
    detail: String,
}

impl Engines {
    fn new(side: Side, device: i32, silence: Duration) -> Self {
        let gpu_of = |it| (side == it).then_some(device);
        let (p, d) = (Build::new(1, 1), Build::new(2, 1));
        Self {
            p: Engine::new(Build { gpu: gpu_of(Side::Prefill), silence, ..p }, "tcp", b""),
            d: Engine::new(Build { gpu: gpu_of(Side::Decode), silence, ..d }, "tcp", b""),
        }
    }

    /// Hands a request over. Checks that both ranks end it alike, and that a success brings every byte.
    fn hand_over(&self, request: &str, seed: u32, budget: Duration) -> Ended {
        let (p, d) = (&self.p, &self.d);
        let (there, here) = (blocks(8, 1), blocks(8, 5));
        let fetch = fetch(request, &p.address, &here, 0..32);
        let fetches = vec![FetchRequest { budget_ms: budget.as_millis() as u32, ..fetch }];
        d.apply(&ConnectorMetadata { fetches, ..metadata() });
        d.fetch();
        p.compute(request, seed, &there, 0..12);
        p.compute(request, seed, &there, 12..32);
        p.hold(request);
        let (code, detail) = d.fetched(request).remove(0);
        let (mut sent, mut lost) = (Vec::new(), Vec::new());
        while sent.is_empty() {
            assert!(p.ranks[0].worker.wait(PATIENCE / 2), "{request} is never sent");
            let reports = p.ranks[0].worker.reports();
            sent.extend(reports.sent);
            let notes = reports.notes.map(|it| Notes::decode(&it).expect("just encoded"));
            lost.extend(notes.into_iter().flat_map(|notes| notes.lost));
        }
        assert_eq!(sent, [request]);
        assert_eq!(lost.is_empty(), code.is_ok(), "{code}: {detail}; {lost:?}");
        if code.is_ok() {
            d.assert_has(seed, &here, 0..32);
        }
        Ended { code, detail }
    }

    /// The engines use their blocks again: a copy of a GPU that still runs is a finding.
    fn reuse(&self) {
        let fake = Fake::attach().expect("it is loaded");
        for engine in [&self.p, &self.d] {
            if let Kv::Gpu(gpu) = &engine.ranks[0].memory {
                fake.host_access(gpu.allocation.address(), gpu.allocation.len(), true);
            }
        }
    }

    /// Hands a request over whose copies may never end. Once it has ended, or waits for a copy of a read that was given
    /// up, the GPU goes on.
    fn hand_over_past(&self, rig: &Rig, fault: Fault, request: &str, budget: Duration) -> Ended {
        let hits = rig.hits(fault);
        let unquiet = || {
            let gauges = self.d.ranks[0].worker.gauges();
            gauges.iter().any(|&(name, count)| name == "unquiet" && count > 0)
        };
        std::thread::scope(|scope| {
            let handoff = scope.spawn(|| self.hand_over(request, 1, budget));
            eventually("it waits or ends", || unquiet() || handoff.is_finished());
            if handoff.is_finished() {
                self.reuse();
            }
            if rig.hits(fault) > hits {
                rig.fake.clear_faults();
            }
            handoff.join().expect("it ends")
        })
    }

    fn assert_idle(&self) {
        self.p.assert_idle();
        self.d.assert_idle();
    }
}

const BUDGET: Duration = Duration::from_millis(BUDGET_MS as u64);
/// Budget of a handoff whose copy never ends, and its agents' limit of silence: after it they give up a copy. Threads that
/// do not run for half of it may end a session.
const BRIEF: Duration = Duration::from_millis(500);
const SILENCE: Duration = Duration::from_secs(14);

/// Has the fault strike at the occasion `at` of a handoff. False if the handoff has fewer occasions.
fn strike(rig: &Rig, fault: Fault, effect: Effect, side: Side, at: u64) -> bool {
    let what = format!("{fault:?}, {side:?}, occasion {at}");
    let never_ends = effect == Effect::Hang;
    let (budget, silence) = if never_ends { (BRIEF, SILENCE) } else { (BUDGET, PATIENCE) };
    let struck = Engines::new(side, 0, silence);
    let other = Engines::new(side, 1, PATIENCE);
    let before = rig.hits(fault);
    rig.fake.fault(fault, at, 1);
    let hand_over = |request: &str| match never_ends && side == Side::Decode {
        true => struck.hand_over_past(rig, fault, request, budget),
        false => struck.hand_over(request, 1, budget),
    };
    let mut ended = hand_over("a");
    // On a loaded machine, a brief handoff may end before the fault strikes.
    for n in (0..).take_while(|_| never_ends && rig.hits(fault) == before) {
        ended = hand_over(&format!("a{n}"));
    }
    let Ended { code, detail } = ended;
    if rig.hits(fault) == before {
        rig.fake.clear_faults();
        assert!(code.is_ok(), "{what}: no fault has struck: {code}: {detail}");
        return false;
    }
    match effect {
        Effect::Succeed => assert!(code.is_ok(), "{what}: {code}: {detail}"),
        Effect::Fail | Effect::Lose => assert_ne!(code, WireCode::Deadline, "{what}: {detail}"),
        Effect::Hang | Effect::Miss(_) => {}
    }
    // A GPU may still read blocks of a handoff that has failed: no rank takes such bytes. It writes none of them.
    if code.is_ok() || side == Side::Decode {
        struck.reuse();
    }
    let ended = other.hand_over("c", 3, BUDGET);
    assert!(ended.code.is_ok(), "{what}: the other GPU: {}: {}", ended.code, ended.detail);
    other.reuse();
    if effect == Effect::Lose {
        let Ended { code, detail } = struck.hand_over("b", 2, BUDGET);
        assert!(!code.is_ok() && code != WireCode::Deadline, "{what}: {code}: {detail}");
    }
    rig.fake.clear_faults();
    eventually("the GPU goes on", || rig.fake.counter("pending") == 0);
    if effect != Effect::Lose {
        let Ended { code, detail } = struck.hand_over("b", 2, BUDGET);
        assert!(code.is_ok(), "{what}: the next: {code}: {detail}");
    }
    if side == Side::Decode {
        struck.reuse();
    }
    struck.assert_idle();
    other.assert_idle();
    assert!(Gpu::all().iter().all(|gpu| gpu.counters().leaked == 0), "{what}");
    drop((struck, other));
    rig.assert_clean();
    true
}

/// The most occasions of a fault that are tried.
const OCCASIONS_MAX: u64 = 8;

fn faults_strike(side: Side) {
    // Each fault strikes several handoffs, and some of them last as long as `SILENCE`.
    let _bounded = Watchdog::new(3 * PATIENCE);
    let rig = Rig::new();
    // By other errors, a device that is gone keeps memory in quarantine.
    rig.fake.set("removed_code", "999");
    for fault in Fault::ALL {
        let effect = fault.on_copies();
        if let Effect::Miss(why) = effect {
            println!("{}: not in a handoff: {why}", fault.name());
            continue;
        }
        let method = method(fault);
        Settings::give(Some(Settings { method, is_uncalibrated: true, ..Settings::default() }));
        // A copy that never ends takes as long as `SILENCE`.
        let max = if effect == Effect::Hang { 2 } else { OCCASIONS_MAX };
        let struck = (1..=max).take_while(|at| strike(&rig, fault, effect, side, *at)).count();
        println!("{}: struck at {struck} occasions", fault.name());
        assert!(struck > 0, "{fault:?} strikes no handoff");
    }
}

#[test]
fn each_fault_of_a_driver_ends_a_handoff_from_a_gpu_on_both_sides_alike() {
    faults_strike(Side::Prefill);
}

#[test]
fn each_fault_of_a_driver_ends_a_handoff_to_a_gpu_on_both_sides_alike() {
    faults_strike(Side::Decode);
}
