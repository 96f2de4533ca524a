//! The kernel on one GPU: compiled when a plan first has it, and not used again once the driver has refused it.
//!
//! A launch takes few multiprocessors, so that the engine's kernels have the others: few for as long as the bus takes, or
//! some for the short time that it takes to gather or scatter inside the device's memory. That memory is allocated, for
//! each direction, when it is used first.

#![allow(unsafe_code, reason = "the driver runs the kernel on memory that the caller keeps")]

use super::LANES;
use super::settings::Settings;
use super::tables::{JOBS_MAX, Table, TableError, Tables};
use crate::capabilities::{KernelLimits, Staging};
use crate::cost::Method;
use crate::job::{Direction, Job};
use crate::ptx;
use kvferry_sys::cuda::{
    self, Context, DeviceAllocation, Function, Grid, LoadError, Module, Stream, launch,
};

/// Bytes of the device's memory for one lane: a stage, and the gaps between several runs in it. The lanes of a direction
/// take whole pages of 2 MiB, which the driver allocates.
const STAGING_BYTES: usize = super::STAGE_BYTES + (1 << 20);

/// A launch has one block of eight warps for each 16 multiprocessors of the GPU. Each lane of a direction may have a
/// launch at the same time.
const MULTIPROCESSORS_PER_BLOCK: u32 = 16;
const BLOCKS_MAX: u32 = 8;
/// A launch that gathers or scatters has this many times the blocks, and takes that much less time.
const INSIDE: u32 = 4;

/// The kernel is compiled for this compute capability or a later one.
const OLDEST_CAPABILITY: (u32, u32) = (7, 0);

/// The kernel is not used again after this many launches in a row have failed.
const FAILURES_MAX: u32 = 3;

const LIMITS: KernelLimits = KernelLimits { jobs_max: JOBS_MAX as u32, slice_bytes: 16 << 10 };

/// An address that stands for the device's memory in plans, until there is some.
const UNALLOCATED: u64 = 1 << 40;

#[derive(Debug)]
pub(super) struct Kernels {
    context: Context,
    settings: Settings,
    kernel: Part<Loaded>,
    /// Memory to gather in, and to scatter in.
    staging: [Part<DeviceAllocation>; 2],
    tables: Tables,
    /// Launches that have failed since the last that has not.
    failures: u32,
}

#[derive(Debug)]
struct Loaded {
    function: Function,
    blocks_max: u32,
}

/// A part that is made when it is used first.
#[derive(Debug)]
enum Part<T> {
    Unused,
    Ready(T),
    Refused,
}

/// Reason why the kernel, or what it needs, can't be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("the GPU has compute capability {0}.{1}, the kernel needs 7.0")]
    TooOld(u32, u32),
    #[error("the driver refuses the kernel: {0}")]
    Load(#[from] LoadError),
    #[error("the driver refuses a call for the kernel: {0}")]
    Driver(#[from] cuda::Error),
    #[error("no memory of the GPU for copies of small pieces: {0}")]
    Staging(cuda::Error),
    #[error(transparent)]
    Table(#[from] TableError),
}

impl Refusal {
    /// The driver's error, if it is one.
    pub(super) fn driver(&self) -> Option<&cuda::Error> {
        match self {
            Self::TooOld(..) | Self::Table(TableError::Memory(_)) => None,
            Self::Load(refused) => Some(&refused.error),
            Self::Driver(error) | Self::Staging(error) | Self::Table(TableError::Driver(error)) => {
                Some(error)
            }
        }
    }
}

impl Kernels {
    pub(super) fn new(context: &Context, settings: Settings) -> Self {
        Self {
            context: context.clone(),
            settings,
            kernel: Part::Unused,
            staging: [Part::Unused, Part::Unused],
            tables: Tables::default(),
            failures: 0,
        }
    }

    /// The limits of the kernel in plans. [`Kernels::prepare`] may still find that the driver refuses the kernel.
    pub(super) fn limits(&self) -> Option<KernelLimits> {
        let is_usable = !matches!(self.kernel, Part::Refused) && self.failures < FAILURES_MAX;
        is_usable.then_some(LIMITS)
    }

    /// Memory of the device in which a lane of the direction gathers or scatters.
    pub(super) fn staging(&self, direction: Direction, lane: usize) -> Option<Staging> {
        let start = match &self.staging[index(direction)] {
            Part::Unused => UNALLOCATED,
            Part::Ready(memory) => memory.address(),
            Part::Refused => return None,
        };
        assert!(lane < LANES, "each lane has its own");
        Some(Staging {
            address: start + (lane * STAGING_BYTES) as u64,
            bytes: STAGING_BYTES as u64,
        })
    }

    /// Bytes of the device's memory that copies take.
    pub(super) fn staging_bytes(&self) -> usize {
        let bytes = |part: &Part<DeviceAllocation>| match part {
            Part::Ready(memory) => memory.len(),
            Part::Unused | Part::Refused => 0,
        };
        self.staging.iter().map(bytes).sum()
    }

    /// Makes the kernel ready, and the memory in which it gathers or scatters, if a plan needs them. Returns whether the
    /// limits for plans have changed. The caller then plans again, as after an error.
    pub(super) fn prepare(
        &mut self,
        kernel: bool,
        inside: Option<Direction>,
    ) -> Result<bool, Refusal> {
        if !kernel && inside.is_none() {
            return Ok(false);
        }
        if matches!(self.kernel, Part::Unused) {
            // The kernel counts as refused if this returns early.
            self.kernel = Part::Refused;
            self.kernel = Part::Ready(Loaded::new(&self.context, self.settings.blocks_max)?);
        }
        if !matches!(self.kernel, Part::Ready(_)) {
            return Ok(false);
        }
        let Some(direction) = inside else { return Ok(false) };
        let staging = &mut self.staging[index(direction)];
        if matches!(staging, Part::Unused) {
            *staging = Part::Refused;
            let memory = DeviceAllocation::new(&self.context, LANES * STAGING_BYTES);
            *staging = Part::Ready(memory.map_err(Refusal::Staging)?);
            return Ok(true);
        }
        Ok(false)
    }

    /// Gives the stream a launch that copies the jobs. The table is kept until an event behind the call has been reached.
    ///
    /// # Safety
    /// The memory of the jobs is as [`launch`] requires.
    pub(super) unsafe fn launch(
        &mut self,
        stream: &Stream,
        method: Method,
        jobs: &[Job],
        tables: &mut Vec<Table>,
    ) -> Result<(), Refusal> {
        let Part::Ready(Loaded { function, blocks_max }) = &self.kernel else {
            return Err(cuda::Error::NotSupported("a kernel that is not ready").into());
        };
        let table = self.tables.write(&self.context, jobs)?;
        let count = u32::try_from(jobs.len()).expect("a table has fewer");
        let blocks_max = if method == Method::Gather { blocks_max * INSIDE } else { *blocks_max };
        let blocks = ptx::blocks(count, blocks_max);
        let grid = Grid { blocks, threads: ptx::THREADS, shared_bytes: 0 };
        let arguments = [table.device_address(), u64::from(count)];
        // A call that fails may have made the launch.
        tables.push(table);
        // SAFETY: the kernel has these two parameters. The table stays with `tables`, and the caller promises the rest.
        unsafe { launch(stream, function, grid, &arguments) }?;
        self.failures = 0;
        Ok(())
    }

    /// Notes that a launch has failed. True if the kernel is not used again.
    pub(super) fn has_failed(&mut self) -> bool {
        self.failures += 1;
        self.failures == FAILURES_MAX
    }
}

fn index(direction: Direction) -> usize {
    usize::from(direction == Direction::In)
}

impl Loaded {
    fn new(context: &Context, blocks_max: Option<u32>) -> Result<Self, Refusal> {
        // What fails here is a refusal of the kernel, not of a launch.
        let info = context.device().info().map_err(LoadError::from)?;
        let (major, minor) = info.compute_capability;
        if (major, minor) < OLDEST_CAPABILITY {
            return Err(Refusal::TooOld(major, minor));
        }
        let module = Module::load_ptx(context, ptx::TEXT)?;
        let function = module.function(ptx::ENTRY).map_err(LoadError::from)?;
        // The driver takes this many blocks times `INSIDE`.
        let named = blocks_max.map(|blocks| blocks.min(1 << 16));
        let part = (info.multiprocessors / MULTIPROCESSORS_PER_BLOCK).clamp(1, BLOCKS_MAX);
        Ok(Self { function, blocks_max: named.unwrap_or(part) })
    }
}
