//! A GPU as a device of transfers.
//!
//! Ownership: a [`Gpu`] is shared by all memory of one context. Its thread owns the streams, the pinned stages and every
//! batch that the driver has; it completes a batch when an event behind the batch's last call has been reached. The thread
//! ends, and the stages are unpinned, when the last memory of the GPU is dropped.
//!
//! Wake-up: [`kvferry::Device`]'s methods put work into an inbox and wake the thread; they never call the driver. Without
//! work the thread pins a few stages, one by one, and then sleeps without a time limit, or once until the stages that copies
//! have pinned beyond these are to be unpinned. While the driver has work, the thread asks for events: without pause at
//! first, then at intervals that grow with the time that the work takes.
//!
//! Order: edges are waited for here, before a transfer takes a stage, never by a stream of copies. So no stream waits for
//! what another transfer, or a peer, must do first.
//!
//! Errors: a call that failed fails its batch, after an event behind it; the driver may have made a part of the call. A
//! batch for whose copies no event can be had is lost: it fails, and keeps its stage and regions for ever. After a sticky
//! error nothing of the context runs any more: all batches fail, those that come later too, and other GPUs go on. After an
//! error that says that the device is gone, they fail as well, but the driver's batches are lost: copies may still run.

mod allocations;
mod calibrate;
mod engine;
mod kernel;
mod lane;
mod lanes;
mod pace;
mod pins;
mod settings;
mod submit;
mod tables;
mod trial;

use crate::calibration::Calibration;
use crate::edge::{Edge, Ended};
use crate::error::Error;
use crate::job::Direction;
use allocations::Allocations;
use engine::Engine;
use kvferry::{After, Device, DeviceCopy, DeviceMemory, DevicePiece, Happened, StagePool};
use kvferry_sys::cuda::{self, Context, Driver, Event};
use kvferry_sys::sync::{Condvar, Mutex, MutexGuard};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

/// Bytes of a stage: large enough for the bus's rate, small enough that a transfer's copies and its network overlap.
pub const STAGE_BYTES: usize = 4 << 20;
/// Stages of a GPU, at most, unless `KVFERRY_GPU_STAGES` says otherwise. Only those that were used, and a few more, are
/// pinned. 256 MiB.
pub const STAGES: usize = 64;
/// Address space behind the stages for the place of those that the driver has for registered, in stages.
const RESERVE: usize = 8;
/// Pieces of one batch, at most: a stage of blocks of 1 KiB.
pub const PIECES_MAX: usize = 4096;

/// Streams of one direction.
const LANES: usize = 2;

#[doc(hidden)]
pub use settings::Settings;
pub use trial::{CostSource, Trial};

/// Stages of a GPU, at most, in this process.
pub fn stages_max() -> usize {
    Settings::get().stages()
}

/// A GPU's context, its stages, and the thread that copies.
pub struct Gpu {
    shared: Arc<Shared>,
}

/// State that the thread shares with the memory of the GPU.
pub(crate) struct Shared {
    context: Context,
    /// Number of the GPU in this process.
    device: i32,
    stages: Arc<StagePool>,
    inbox: Mutex<Inbox>,
    /// Work has come, or the last memory is gone.
    changed: Condvar,
    allocations: Mutex<Allocations>,
    counts: Counts,
    /// The driver's objects of dropped edges, which the thread destroys.
    ended: Arc<Ended>,
    /// The costs by which the thread plans copies.
    calibration: Mutex<Calibration>,
    /// The sticky error that the driver reported first.
    lost: OnceLock<String>,
}

/// Work for the thread.
#[derive(Default)]
struct Inbox {
    copies: Vec<(Direction, DeviceCopy)>,
    waits: Vec<(After, Happened)>,
    is_running: bool,
    has_ended: bool,
}

/// The GPUs that are in use. `None` while this process uses no driver, as in a child that was forked from one that does: a
/// thread of its parent may have held the lock.
fn gpus() -> Option<MutexGuard<'static, Vec<Weak<Gpu>>>> {
    static GPUS: Mutex<Vec<Weak<Gpu>>> = Mutex::new(Vec::new());
    Driver::in_use().map(|_| GPUS.lock())
}

impl Gpu {
    /// The GPU of a context.
    pub(crate) fn of(context: Context) -> Result<Arc<Self>, Error> {
        Driver::get()?;
        let mut gpus = gpus().expect("this process uses the driver");
        gpus.retain(|gpu| gpu.strong_count() > 0);
        let found = gpus.iter().filter_map(Weak::upgrade).find(|it| it.shared.context == context);
        if let Some(gpu) = found {
            return match gpu.shared.lost() {
                Some(lost) => Err(lost),
                None => Ok(gpu),
            };
        }
        let device = context.device().ordinal();
        let settings = Settings::get();
        let stages = StagePool::with_reserve(STAGE_BYTES, settings.stages(), RESERVE)
            .map_err(|error| Error::Host { device, why: error.to_string() })?;
        if let Some(node) = context.device().numa_node()
            && let Err(error) = stages.prefer_node(node)
        {
            // It matters only where the host has several nodes.
            tracing::debug!(device, node, %error, "host memory for copies may be far from the GPU");
        }
        let shared = Arc::new(Shared {
            context,
            device,
            stages,
            inbox: Mutex::default(),
            changed: Condvar::new(),
            allocations: Mutex::default(),
            counts: Counts::default(),
            ended: Arc::default(),
            calibration: Mutex::default(),
            lost: OnceLock::new(),
        });
        let gpu = Arc::new(Self { shared });
        gpus.push(Arc::downgrade(&gpu));
        if settings.pin_ahead > 0 {
            // The thread pins stages. If it does not start, the first copy tries again.
            let _ = gpu.shared.give(|_| {});
        }
        Ok(gpu)
    }

    /// The GPUs of which this process has memory registered. A forked child has none.
    pub fn all() -> Vec<Arc<Self>> {
        let upgrade =
            |gpus: MutexGuard<'_, Vec<Weak<Self>>>| gpus.iter().filter_map(Weak::upgrade).collect();
        gpus().map_or_else(Vec::new, upgrade)
    }

    /// The GPU of this memory, if it is one's.
    pub fn of_memory(memory: &DeviceMemory) -> Option<Arc<Self>> {
        Self::all().into_iter().find(|gpu| Arc::ptr_eq(&gpu.shared.stages, memory.stages()))
    }

    /// Leaves the end of an edge to the thread of its GPU, if memory of the GPU is registered.
    pub(crate) fn adopt(edge: Edge) -> Edge {
        let gpu = Self::all().into_iter().find(|gpu| gpu.shared.context == *edge.context());
        match gpu {
            Some(gpu) => edge.ended_in(&gpu.shared.ended),
            None => edge,
        }
    }

    /// The error of a call for the GPU of this number: that the GPU is lost, if that is why the driver refuses.
    pub(crate) fn explain(device: i32, error: Error) -> Error {
        let Error::Driver(refused) = &error else { return error };
        let Some(gpu) = Self::all().into_iter().find(|gpu| gpu.device() == device) else {
            return error;
        };
        gpu.shared.is_lost_by(refused);
        gpu.shared.lost().unwrap_or(error)
    }

    /// Number of the GPU in this process.
    pub fn device(&self) -> i32 {
        self.shared.device
    }

    /// Counts of what the GPU has done.
    pub fn counters(&self) -> Counters {
        self.shared.counts.read()
    }

    /// The counters of all GPUs of which this process has memory registered, by the names in agents' statistics, such as
    /// `gpu0_bytes_out`. `gpu0_lost` is 1 for a GPU that is lost to this process. A GPU with several contexts, as after one was
    /// destroyed, has the sums of theirs, and is lost if one of them is.
    pub fn named_counters() -> Vec<(String, u64)> {
        let mut named: Vec<(String, u64)> = Vec::new();
        for gpu in Self::all() {
            let device = gpu.device();
            let counters = gpu.counters();
            let lost = ("lost", u64::from(gpu.is_lost()));
            for (name, value) in counters.each().chain([lost]) {
                let full = format!("gpu{device}_{name}");
                match named.iter_mut().find(|(known, _)| *known == full) {
                    Some((_, all)) if name == lost.0 => *all |= value,
                    Some((_, all)) => *all += value,
                    None => named.push((full, value)),
                }
            }
        }
        named
    }

    /// The costs of copies on this GPU: measured, or assumed until they are. [`Calibration::device`] tells which.
    pub fn calibration(&self) -> Calibration {
        self.shared.calibration.lock().clone()
    }

    /// True if a sticky error has made the GPU unusable for this process.
    pub fn is_lost(&self) -> bool {
        self.shared.lost.get().is_some()
    }

    /// Neighbours in one allocation are copied by one call.
    pub(crate) fn note_allocation(&self, base: u64, len: u64) {
        self.shared.allocations.lock().note(base, len);
    }

    fn copy(&self, direction: Direction, copy: DeviceCopy) {
        if let Some(lost) = self.shared.lost() {
            return copy.complete(Err(lost.into()));
        }
        let refused = self.shared.give(|inbox| inbox.copies.push((direction, copy)));
        if let Err(error) = refused {
            let copies = std::mem::take(&mut self.shared.inbox.lock().copies);
            fail(copies, &error);
        }
    }
}

/// Fails copies that no driver has.
fn fail(copies: Vec<(Direction, DeviceCopy)>, error: &io::Error) {
    for (_, copy) in copies {
        copy.complete(Err(io::Error::new(error.kind(), error.to_string())));
    }
}

impl Device for Gpu {
    fn stages(&self) -> Arc<StagePool> {
        Arc::clone(&self.shared.stages)
    }

    fn pieces_max(&self) -> usize {
        PIECES_MAX
    }

    fn copy_out(&self, copy: DeviceCopy) {
        self.copy(Direction::Out, copy);
    }

    fn copy_in(&self, copy: DeviceCopy) {
        self.copy(Direction::In, copy);
    }

    fn wait_for(&self, after: &After, happened: Happened) {
        if let Some(lost) = self.shared.lost() {
            return happened.complete(Err(lost.into()));
        }
        if !after.edges().iter().all(|edge| edge.is::<Edge>()) {
            let what = "an edge that is not of a GPU: make it by kvferry_cuda::Edge";
            return happened.complete(Err(io::Error::new(io::ErrorKind::InvalidInput, what)));
        }
        let refused = self.shared.give(|inbox| inbox.waits.push((after.clone(), happened)));
        if refused.is_err() {
            // Dropping the waits fails them, and wakes their transfers.
            let waits = std::mem::take(&mut self.shared.inbox.lock().waits);
            drop(waits);
        }
    }

    fn awaited(&self, after: &After) -> Option<String> {
        Edge::awaited(after)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.shared.context.driver().is_forked() {
            // There is no thread to be told, and a thread of the parent may have held the lock.
            return;
        }
        // The thread may be the one that drops it, so nothing waits for it.
        self.shared.inbox.lock().has_ended = true;
        self.shared.changed.notify_one();
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("device", &self.shared.device)
            .field("stages", &self.shared.stages)
            .field("lost", &self.shared.lost)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Gives the thread work, and starts it if none runs.
    fn give(self: &Arc<Self>, put: impl FnOnce(&mut Inbox)) -> io::Result<()> {
        let mut inbox = self.inbox.lock();
        put(&mut inbox);
        if inbox.is_running {
            self.changed.notify_one();
            return Ok(());
        }
        let shared = Arc::clone(self);
        kvferry_sys::thread::spawn("kvferry-gpu".into(), move || Engine::run(&shared))?;
        inbox.is_running = true;
        Ok(())
    }

    fn lost(&self) -> Option<Error> {
        self.lost.get().map(|why| Error::Lost { device: self.device, why: why.clone() })
    }

    /// Notes the first sticky error.
    fn lose(&self, why: &str) {
        if self.lost.set(why.to_owned()).is_ok() {
            tracing::error!(device = self.device, why, "the GPU is lost; restart the process");
            // Transfers that wait for a stage would else wait for those of copies that never end.
            if let Some(lost) = self.lost() {
                self.stages.end(lost.to_string());
            }
        }
    }

    /// Whether an error means that the GPU is lost, which is then noted: the driver repeats the error. A call may also
    /// report, once, what another library's call has caused.
    fn is_lost_by(&self, error: &cuda::Error) -> bool {
        let is_lost =
            error.is_fatal() && Event::new(&self.context).is_err_and(|again| again.is_fatal());
        if is_lost {
            self.lose(&error.to_string());
        }
        is_lost
    }

    /// True if two pieces that follow each other lie in one allocation.
    fn are_joined(&self, one: DevicePiece, next: DevicePiece) -> bool {
        one.address + one.len as u64 == next.address
            && self.allocations.lock().is_one(one.address, next.address)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What a GPU has done for transfers, since its first memory was registered.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// The counters by name, in a fixed order.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }

        #[derive(Debug, Default)]
        struct Counts {
            $($name: AtomicU64,)*
        }

        impl Counts {
            fn read(&self) -> Counters {
                Counters { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Bytes copied from the GPU.
    bytes_out,
    /// Bytes copied to the GPU.
    bytes_in,
    /// Batches of transfers.
    batches,
    /// Pieces of those batches.
    pieces,
    /// Calls of the driver that made one copy.
    single_calls,
    /// Calls of the driver that made many copies.
    batch_calls,
    /// Launches of the kernel that copied between the GPU's memory and stages.
    kernel_calls,
    /// Launches of the kernel that gathered or scattered inside the GPU's memory.
    gather_calls,
    /// Refusals for which the kernel, or gathering by it, is not used again: the sum of those by reason.
    kernel_refused,
    /// Those because the GPU is older than the kernel's text.
    kernel_refused_old,
    /// Those because the driver does not compile the kernel.
    kernel_refused_jit,
    /// Those because launches failed.
    kernel_refused_launch,
    /// Those because the GPU has no memory to gather or scatter in.
    kernel_refused_memory,
    /// Those because there is no pinned host memory for the tables of jobs.
    kernel_refused_table,
    /// Bytes of the GPU's memory that copies are gathered and scattered in, and that the measurements of copies take.
    staging_bytes,
    /// Microseconds that the measurements of copies have taken.
    measuring_us,
    /// Stages that are pinned.
    pinned_stages,
    /// Times that a stage could not be pinned: copies through it are slow, and go one by one, or the stage is out of use. One
    /// that was tried before its first use is tried once more then, and one of those refused when it is used after some
    /// seconds, later minutes. The sum of those by reason.
    unpinned_stages,
    /// Those for which memory, or the limit of locked memory, does not suffice.
    unpinned_memory,
    /// Those that are out of use, because the driver has their memory for registered: something unmapped other memory at
    /// the same address without unregistering it.
    unpinned_registered,
    /// Those that the driver refuses for another reason.
    unpinned_other,
    /// Waits for edges that have ended.
    edges,
    /// Batches that failed.
    failed,
    /// Batches that were leaked: whether their copies have ended is not known.
    leaked,
}

impl Counts {
    fn add(count: &AtomicU64, n: u64) {
        count.fetch_add(n, Relaxed);
    }

    fn subtract(count: &AtomicU64, n: u64) {
        count.fetch_sub(n, Relaxed);
    }
}
