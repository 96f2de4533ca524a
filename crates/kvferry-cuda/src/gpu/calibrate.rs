//! Measures what copies take on a GPU.
//!
//! The points of [`samples`] are measured one by one while the GPU's thread has nothing to copy, once enough batches of
//! small pieces have come for the result to matter. The process keeps the result for the GPU. A GPU that takes too long
//! keeps the times that are assumed of its model.

#![allow(unsafe_code, reason = "the driver copies between memory that the measurement owns")]

use super::Counts;
use super::kernel::{Kernels, Refusal};
use super::settings::Settings;
use super::submit::{Calls, OUTSTANDING_MAX, submit};
use crate::calibration::{BATCH_ENTRIES, Calibration, DeviceKey};
use crate::capabilities::{Capabilities, Staging};
use crate::cost::Method;
use crate::job::Direction;
use crate::pinned::Pinned;
use crate::plan::{Plan, Step};
use crate::samples::{self, BYTES_MAX, Point, ROUNDS, Sample};
use kvferry_sys::cuda::{self, Context, DeviceAllocation, DeviceUuid, Event, Stream};
use kvferry_sys::map::Mapping;
use kvferry_sys::sync::Mutex;
use std::io;
use std::time::{Duration, Instant};

/// Batches of small pieces after which measuring pays.
const BATCHES: u32 = 16;
/// A batch is one of small pieces if it has this many or more, of at most [`PIECE_BYTES`] on average.
const PIECES: u64 = 16;
const PIECE_BYTES: u64 = 128 << 10;

/// The longest time of all measurements together. The points that were measured by then count.
const TIME_MAX: Duration = Duration::from_millis(50);
/// The longest time of one point. A GPU that takes longer counts as stuck.
const POINT_MAX: Duration = Duration::from_millis(20);

/// Calibrations that this process has measured.
static MEASURED: Mutex<Vec<Calibration>> = Mutex::new(Vec::new());

#[derive(Debug)]
pub(super) struct Calibrator {
    state: State,
    patience: Option<Duration>,
}

#[derive(Debug)]
enum State {
    /// Nothing is measured, now or later. The memory of measurements stays as long as the thread: to free it, the driver
    /// waits for all work of the device, and a kernel may itself wait for a transfer.
    Over {
        kept: Option<Box<Run>>,
    },
    /// Measurements begin after `batches` more batches of small pieces.
    Waits {
        key: DeviceKey,
        batches: u32,
    },
    Measures {
        key: DeviceKey,
        run: Option<Box<Run>>,
    },
    /// A measurement has failed. Its memory stays until its calls have ended.
    Ends {
        run: Box<Run>,
    },
}

impl State {
    fn over() -> Self {
        Self::Over { kept: None }
    }
}

/// Measurements in progress.
#[derive(Debug)]
struct Run {
    points: Vec<Point>,
    samples: Vec<Sample>,
    /// Time that the points have taken so far.
    spent: Duration,
    rounds: usize,
    time_max: Duration,
    point_max: Duration,
    limits: Capabilities,
    memory: Memory,
    /// One for each direction, apart from the streams of batches: a measured copy may wait for a kernel that itself
    /// waits for a transfer.
    streams: [Stream; 2],
    event: Event,
    /// Calls of the driver for the current point.
    calls: Calls,
}

/// Memory that the points are copied between.
#[derive(Debug)]
struct Memory {
    /// First the scattered bytes, then the memory in which the kernel gathers them.
    device: DeviceAllocation,
    packed: Pinned,
    /// Kernels find `packed` at the same address as the process.
    is_mapped: bool,
}

/// Reason why nothing more is measured.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Driver(#[from] cuda::Error),
    #[error(transparent)]
    Memory(#[from] io::Error),
    #[error(transparent)]
    Kernel(#[from] Refusal),
    #[error("a copy takes more than {0:?}")]
    Stuck(Duration),
}

impl Calibrator {
    /// Returns the calibrator, and the calibration that plans use until the measurements are over.
    pub(super) fn new(context: &Context, settings: Settings) -> (Self, Calibration) {
        let patience = settings.patience;
        let with = |state, calibration| (Self { state, patience }, calibration);
        if let Some(method) = settings.method {
            return with(State::over(), Calibration::only(method));
        }
        let device = context.device();
        let assumed =
            device.name().map_or_else(|_| Calibration::default(), |it| Calibration::of_model(&it));
        let (Ok(DeviceUuid(uuid)), false) = (device.uuid(), settings.is_uncalibrated) else {
            return with(State::over(), assumed);
        };
        let key = DeviceKey::new(uuid, context.driver().version().unsigned_abs());
        if let Some(known) = MEASURED.lock().iter().find(|known| known.is_of(&key)) {
            return with(State::over(), known.clone());
        }
        with(State::Waits { key, batches: BATCHES }, assumed)
    }

    /// Counts a batch, if it is one of small pieces.
    pub(super) fn note(&mut self, bytes: u64, pieces: u64) {
        let is_small = pieces >= PIECES && bytes <= pieces * PIECE_BYTES;
        if let State::Waits { key, batches } = &mut self.state
            && is_small
        {
            *batches -= 1;
            if *batches == 0 {
                self.state = State::Measures { key: key.clone(), run: None };
            }
        }
    }

    /// True if a point is to be measured.
    pub(super) fn is_due(&self) -> bool {
        matches!(self.state, State::Measures { .. })
    }

    /// Bytes of the device's memory that measurements take.
    pub(super) fn device_bytes(&self) -> usize {
        let run = match &self.state {
            State::Over { kept } => kept.as_deref(),
            State::Waits { .. } => None,
            State::Measures { run, .. } => run.as_deref(),
            State::Ends { run } => Some(&**run),
        };
        run.map_or(0, |run| run.memory.device.len())
    }

    /// True if the next point is the first.
    pub(super) fn begins(&self) -> bool {
        matches!(self.state, State::Measures { run: None, .. })
    }

    /// True if the calls of a failed measurement may be in progress.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.state, State::Ends { .. })
    }

    /// Looks whether the calls of a failed measurement have ended.
    pub(super) fn end(&mut self) {
        let State::Ends { run } = &self.state else { return };
        let ended: Result<Vec<bool>, cuda::Error> = run.streams.iter().map(Stream::query).collect();
        if ended.as_ref().is_ok_and(|ended| ended.contains(&false)) {
            return;
        }
        match std::mem::replace(&mut self.state, State::over()) {
            State::Ends { run } if ended.is_ok() => self.state = State::Over { kept: Some(run) },
            // The driver does not say whether they have.
            ends => std::mem::forget(ends),
        }
    }

    /// Measures nothing more, because the GPU is lost. What a failed measurement has begun may still run: not every error by
    /// which a GPU is lost says that it does not.
    pub(super) fn stop(&mut self) {
        if let ends @ State::Ends { .. } = std::mem::replace(&mut self.state, State::over()) {
            std::mem::forget(ends);
        }
    }

    /// Measures the next point. Returns the calibration after the last one.
    pub(super) fn step(&mut self, context: &Context, kernels: &mut Kernels) -> Option<Calibration> {
        let State::Measures { key, run } = std::mem::replace(&mut self.state, State::over()) else {
            return None;
        };
        let device = context.device().ordinal();
        let refused =
            |error: &Failure| tracing::info!(device, %error, "times of copies can't be measured");
        let patience = self.patience;
        let run = run.map_or_else(|| Run::new(context, kernels, patience).map(Box::new), Ok);
        let mut run = run.inspect_err(refused).ok()?;
        if let Err(error) = run.step(kernels) {
            refused(&error);
            self.state = State::Ends { run };
            return None;
        }
        if !run.is_over() {
            self.state = State::Measures { key, run: Some(run) };
            return None;
        }
        let (samples, spent) = (run.samples.len(), run.spent);
        let fitted = Calibration::fit(key, &run.samples);
        let measured = fitted.inspect_err(|error| tracing::info!(device, %error, "no calibration"));
        let is_whole = samples >= run.points.len();
        self.state = State::Over { kept: Some(run) };
        let mut measured = measured.ok().filter(|_| is_whole)?;
        // The kernel takes as long to scatter as to gather.
        measured.into.gather = measured.out.gather;
        tracing::debug!(device, samples, ?spent, "times of copies were measured");
        MEASURED.lock().push(measured.clone());
        Some(measured)
    }
}

impl Run {
    fn new(
        context: &Context,
        kernels: &Kernels,
        patience: Option<Duration>,
    ) -> Result<Self, Failure> {
        let (streams, event) =
            ([Stream::new(context)?, Stream::new(context)?], Event::new(context)?);
        let memory = Memory::new(context)?;
        let kernel = kernels.limits().filter(|_| memory.is_mapped);
        let limits = Capabilities {
            batch: context.driver().batch_call().is_some(),
            kernel,
            staging: kernel.map(|_| memory.staging()),
            outstanding_max: OUTSTANDING_MAX,
            merges: false,
        };
        let points = samples::points(&limits);
        let rounds = if patience.is_some() { 1 } else { ROUNDS };
        let samples = Vec::with_capacity(points.len() * rounds);
        let (spent, calls) = (Duration::ZERO, Calls::default());
        let [time_max, point_max] = [TIME_MAX, POINT_MAX].map(|most| patience.unwrap_or(most));
        Ok(Self {
            points,
            samples,
            spent,
            rounds,
            time_max,
            point_max,
            limits,
            memory,
            streams,
            event,
            calls,
        })
    }

    fn is_over(&self) -> bool {
        self.samples.len() == self.points.len() * self.rounds || self.spent >= self.time_max
    }

    /// Measures the next point.
    fn step(&mut self, kernels: &mut Kernels) -> Result<(), Failure> {
        let point = self.points[self.samples.len() % self.points.len()];
        let plan = self.plan(&point);
        let stream = &self.streams[usize::from(point.direction == Direction::In)];
        let counts = Counts::default();
        let began = Instant::now();
        // SAFETY: the memory is the measurement's. It stays until the event behind the calls has been reached: that of a
        // measurement that failed is kept until then, or leaked.
        unsafe { submit(&counts, stream, point.direction, &plan, kernels, &mut self.calls) }?;
        if let Some(error) = self.calls.error.take() {
            return Err(error.into());
        }
        self.event.record(stream)?;
        while !self.event.query()? {
            if began.elapsed() > self.point_max {
                return Err(Failure::Stuck(self.point_max));
            }
            std::hint::spin_loop();
        }
        let elapsed = began.elapsed();
        self.calls = Calls::default();
        self.spent += elapsed;
        let ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX).max(1);
        self.samples.push(Sample { point, ns });
        Ok(())
    }

    /// The calls of a point.
    fn plan(&self, point: &Point) -> Plan {
        let packed = match (point.method, self.limits.staging) {
            (Method::Gather, Some(staging)) => staging.address,
            _ => self.memory.packed.address(),
        };
        let mut plan = Plan::default();
        let jobs = point.jobs(self.memory.device.address(), packed);
        let is_of_kernel = matches!(point.method, Method::Kernel | Method::Gather);
        match self.limits.kernel.filter(|_| is_of_kernel) {
            Some(kernel) => jobs.for_each(|job| kernel.divide(&job, &mut plan.jobs)),
            None => plan.jobs.extend(jobs),
        }
        let count = plan.jobs.len();
        let in_call = if point.method == Method::Batch { BATCH_ENTRIES as usize } else { count };
        let steps = (0..count).step_by(in_call).map(|first| Step {
            method: point.method,
            first,
            count: in_call.min(count - first),
        });
        plan.steps.extend(steps);
        plan
    }
}

impl Memory {
    fn new(context: &Context) -> Result<Self, Failure> {
        let bytes = BYTES_MAX as usize;
        let packed = Mapping::kept_from_children(bytes)?;
        // SAFETY: a measurement that failed is kept until its last copy has ended, or leaked.
        let packed = unsafe { Pinned::new(context, packed) }?;
        let is_mapped = packed.device_address()? == packed.address();
        // Allocated last, so that no failure frees it: that would wait for all work of the device.
        let device = DeviceAllocation::new(context, 2 * bytes)?;
        Ok(Self { device, packed, is_mapped })
    }

    fn staging(&self) -> Staging {
        Staging { address: self.device.address() + BYTES_MAX, bytes: BYTES_MAX }
    }
}
