//! The thread of a GPU.

#![allow(
    unsafe_code,
    reason = "the driver copies to and from memory of batches, which their owner keeps"
)]

use super::calibrate::Calibrator;
use super::kernel::{Kernels, Refusal};
use super::lanes::Lanes;
use super::pace::Pace;
use super::pins::{Pinned, Pins};
use super::settings::Settings;
use super::submit::{Calls, OUTSTANDING_MAX, submit};
use super::{Counts, Shared, fail};
use crate::calibration::Calibration;
use crate::capabilities::Capabilities;
use crate::cost::Method;
use crate::edge::Edge;
use crate::error::Error;
use crate::job::{Direction, Job};
use crate::plan::{Plan, PlanError, Planner, make_disjoint};
use kvferry::{After, DeviceCopy, Happened};
use kvferry_sys::cuda::{self, Stream};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Time between two looks at all waits, as a multiple of what the first took: many waits that never end must not take
/// the thread from its copies.
const WAITS_REST: u32 = 8;

/// Why a GPU is lost whose thread has ended.
const PANICKED: &str = "the thread that copies has panicked";

pub(super) struct Engine {
    shared: Arc<Shared>,
    out: Lanes,
    into: Lanes,
    waits: Vec<(After, Happened)>,
    /// Time of the next look at the waits.
    waits_due: Instant,
    pins: Pins,
    kernels: Kernels,
    calibrator: Calibrator,
    calibration: Calibration,
    planner: Planner,
    plan: Plan,
    jobs: Vec<Job>,
    pace: Pace,
}

impl Engine {
    /// Serves the GPU until its last memory is gone.
    pub(super) fn run(shared: &Arc<Shared>) {
        let mut pins = Pins::new(shared, Settings::get());
        match catch_unwind(AssertUnwindSafe(|| pins.pin_until_work(shared))) {
            Ok(true) => {}
            Ok(false) => return,
            Err(_) => {
                shared.lose(PANICKED);
                return refuse(shared, &cuda::Error::NotSupported("a thread"));
            }
        }
        let engine = match Self::new(shared, pins) {
            Ok(engine) => engine,
            Err(error) => {
                // What was pinned ahead is not any more.
                shared.counts.pinned_stages.store(0, Relaxed);
                return refuse(shared, &error);
            }
        };
        // What the driver has must not be dropped by a panic.
        let mut engine = std::mem::ManuallyDrop::new(engine);
        let work = AssertUnwindSafe(|| engine.serve());
        match catch_unwind(work) {
            Ok(has_leaked) if !has_leaked => {
                drop(std::mem::ManuallyDrop::into_inner(engine));
            }
            Ok(_) => {}
            Err(_) => {
                shared.lose(PANICKED);
                refuse(shared, &cuda::Error::NotSupported("a thread"));
                engine.fail_all();
            }
        }
    }

    fn new(shared: &Arc<Shared>, pins: Pins) -> Result<Self, cuda::Error> {
        let settings = Settings::get();
        let (calibrator, calibration) = Calibrator::new(&shared.context, settings);
        shared.calibration.lock().clone_from(&calibration);
        Ok(Self {
            out: Lanes::new(shared)?,
            into: Lanes::new(shared)?,
            shared: Arc::clone(shared),
            waits: Vec::new(),
            waits_due: Instant::now(),
            pins,
            kernels: Kernels::new(&shared.context, settings),
            calibrator,
            calibration,
            planner: Planner::default(),
            plan: Plan::default(),
            jobs: Vec::new(),
            pace: Pace::new(Instant::now()),
        })
    }

    /// Returns, once the last memory is gone, whether a batch was leaked: then the stages stay pinned.
    fn serve(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let context = shared.context.clone();
        // One push of the context for all calls of the thread.
        let _entered = context.enter();
        while self.take_work() {
            while let Some(copy) = self.out.next() {
                self.start(Direction::Out, copy);
            }
            while let Some(copy) = self.into.next() {
                self.start(Direction::In, copy);
            }
            let has_ended = self.out.poll(&shared) | self.into.poll(&shared) | self.poll_waits();
            [&mut self.out, &mut self.into].into_iter().for_each(|it| it.fail_queue(&shared));
            if has_ended {
                self.pace.begin_anew(Instant::now());
                self.pins.note_use();
            }
            self.pin_ahead();
            self.unpin_idle();
            self.calibrate();
            // Comes last, because transfers wait for the steps above.
            shared.ended.clear();
        }
        shared.counts.read().leaked > 0
    }

    /// Pins a stage before it is used, if one is due and nothing is copied or waited for.
    fn pin_ahead(&mut self) {
        let is_idle = self.out.is_idle() && self.into.is_idle() && self.waits.is_empty();
        if is_idle && self.pins.is_due() {
            self.pins.pin_next(&self.shared);
        }
    }

    /// Unpins a stage if nothing was copied for long, and nothing is copied or waited for.
    fn unpin_idle(&mut self) {
        let is_idle = self.out.is_idle() && self.into.is_idle() && self.waits.is_empty();
        if is_idle && !self.calibrator.is_ending() {
            self.pins.unpin_idle(&self.shared);
        }
    }

    /// Measures one point of the calibration, if one is due and nothing is copied.
    fn calibrate(&mut self) {
        if self.shared.lost().is_some() {
            self.calibrator.stop();
        }
        if self.calibrator.is_ending() {
            return self.calibrator.end();
        }
        let is_idle = self.out.is_idle() && self.into.is_idle() && self.waits.is_empty();
        if !is_idle || !self.calibrator.is_due() {
            return;
        }
        let began = Instant::now();
        while self.calibrator.begins() && self.make_ready(true, None) {}
        let Self { shared, kernels, calibrator, .. } = self;
        if let Some(calibration) = calibrator.step(&shared.context, kernels) {
            shared.calibration.lock().clone_from(&calibration);
            self.calibration = calibration;
        }
        let took = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        Counts::add(&self.shared.counts.measuring_us, took);
        self.state_memory();
    }

    /// States how much of the GPU's memory is taken.
    fn state_memory(&self) {
        let bytes = self.kernels.staging_bytes() + self.calibrator.device_bytes();
        self.shared.counts.staging_bytes.store(bytes as u64, Relaxed);
    }

    /// Fails what no driver has. The GPU is lost.
    fn fail_all(&mut self) {
        let shared = &self.shared;
        [&mut self.out, &mut self.into].into_iter().for_each(|it| it.fail_queue(shared));
        if let Some(lost) = shared.lost() {
            for (_, happened) in std::mem::take(&mut self.waits) {
                happened.complete(Err(lost.clone().into()));
            }
        }
    }

    /// Takes what has come; waits for it if there is nothing to do, or for a while. False: the last memory is gone.
    fn take_work(&mut self) -> bool {
        let has_batches = !self.out.is_idle() || !self.into.is_idle();
        let has_copies = has_batches || self.calibrator.is_ending();
        let is_idle = !has_copies && self.waits.is_empty();
        let now = Instant::now();
        let pause = self.pace.pause(now, has_copies);
        let shared = Arc::clone(&self.shared);
        let mut inbox = shared.inbox.lock();
        while inbox.copies.is_empty() && inbox.waits.is_empty() {
            if is_idle && inbox.has_ended {
                return false;
            }
            if is_idle && (self.calibrator.is_due() || self.pins.is_due()) {
                return true;
            }
            if pause.is_zero() {
                drop(inbox);
                std::thread::yield_now();
                return true;
            }
            let limit = if is_idle { self.pins.until_unpinned() } else { Some(pause) };
            if is_idle && limit.is_some_and(|limit| limit.is_zero()) {
                return true;
            }
            inbox = shared.changed.wait(inbox, limit);
            if !is_idle {
                break;
            }
        }
        for (direction, copy) in inbox.copies.drain(..) {
            self.pace.begin_anew(now);
            match direction {
                Direction::Out => self.out.push(copy),
                Direction::In => self.into.push(copy),
            }
        }
        if !inbox.waits.is_empty() {
            self.pace.begin_anew(now);
            self.waits.append(&mut inbox.waits);
        }
        true
    }

    fn start(&mut self, direction: Direction, mut copy: DeviceCopy) {
        let shared = &self.shared;
        let pinned = match self.pins.pin(shared, &mut copy) {
            Ok(pinned) => pinned,
            Err(error) => {
                Counts::add(&shared.counts.failed, 1);
                return copy.complete(Err(error.into()));
            }
        };
        fill(&mut self.jobs, shared, direction, &copy);
        if let Err(error) = self.plan(direction, pinned) {
            Counts::add(&self.shared.counts.failed, 1);
            return copy.complete(Err(io::Error::new(io::ErrorKind::InvalidInput, error)));
        }
        let shared = &self.shared;
        let (bytes, pieces) = (copy.len() as u64, copy.pieces().len() as u64);
        let bytes_of = match direction {
            Direction::Out => &shared.counts.bytes_out,
            Direction::In => &shared.counts.bytes_in,
        };
        Counts::add(bytes_of, bytes);
        Counts::add(&shared.counts.batches, 1);
        Counts::add(&shared.counts.pieces, pieces);
        self.calibrator.note(bytes, pieces);
        self.submit(direction, pinned, copy);
    }

    /// Plans the copies of a batch, and makes ready what the plan needs.
    fn plan(&mut self, direction: Direction, pinned: Pinned) -> Result<(), PlanError> {
        loop {
            let allowed = self.capabilities(direction, pinned);
            let (jobs, calibration) = (&self.jobs, &self.calibration);
            match self.planner.plan(jobs, direction, calibration, &allowed, &mut self.plan) {
                // Pieces of the batch have the same bytes, of which either may win.
                Err(PlanError::Overlap { .. }) => {
                    make_disjoint(&mut self.jobs);
                    continue;
                }
                planned => planned?,
            }
            let has = |method| self.plan.steps.iter().any(|step| step.method == method);
            let inside = has(Method::Gather).then_some(direction);
            if !self.make_ready(has(Method::Kernel), inside) {
                return Ok(());
            }
        }
    }

    /// Makes the kernel ready, and the memory in which it gathers or scatters. True if what plans may use has changed.
    fn make_ready(&mut self, kernel: bool, inside: Option<Direction>) -> bool {
        match self.kernels.prepare(kernel, inside) {
            Ok(has_changed) => {
                self.state_memory();
                has_changed
            }
            Err(refusal) => {
                refuse_kernel(&self.shared, &refusal);
                true
            }
        }
    }

    fn capabilities(&self, direction: Direction, pinned: Pinned) -> Capabilities {
        let lanes = match direction {
            Direction::Out => &self.out,
            Direction::In => &self.into,
        };
        let kernel = self.kernels.limits().filter(|_| pinned == Pinned::Mapped);
        Capabilities {
            // CUDA does not promise that a batch of pageable memory works.
            batch: pinned != Pinned::No && self.shared.context.driver().batch_call().is_some(),
            kernel,
            staging: self.kernels.staging(direction, lanes.turn()),
            outstanding_max: OUTSTANDING_MAX,
            // Neighbours of one allocation are joined already.
            merges: false,
        }
    }

    /// Gives the driver the copies of the plan. If it refuses a launch, they are all made by the copy engine behind it.
    fn submit(&mut self, direction: Direction, pinned: Pinned, copy: DeviceCopy) {
        let allowed = Capabilities { kernel: None, ..self.capabilities(direction, pinned) };
        let Self { shared, out, into, kernels, calibration, planner, plan, jobs, .. } = self;
        let is_of_kernel =
            plan.steps.iter().any(|it| matches!(it.method, Method::Kernel | Method::Gather));
        let lane = match direction {
            Direction::Out => out.lane(is_of_kernel),
            Direction::In => into.lane(is_of_kernel),
        };
        lane.start(shared, copy, |stream: &Stream, calls: &mut Calls| {
            // SAFETY: the pieces are in regions that the batch holds, and the stage is the batch's. The lane keeps both until
            // it has seen an event behind the calls, or for ever. A gate keeps others from the regions' memory meanwhile, and
            // nothing writes the stage of a batch that is given to a device.
            let made = unsafe { submit(&shared.counts, stream, direction, plan, kernels, calls) };
            let Err(refusal) = made else { return };
            if kernels.has_failed() {
                refuse_kernel(shared, &refusal);
            }
            if planner.plan(jobs, direction, calibration, &allowed, plan).is_ok() {
                // SAFETY: as above. No plan without a kernel is refused.
                let _ = unsafe { submit(&shared.counts, stream, direction, plan, kernels, calls) };
            }
        });
    }

    /// Ends the waits for edges that have happened. Returns whether there was one.
    fn poll_waits(&mut self) -> bool {
        let began = Instant::now();
        if self.waits.is_empty() || began < self.waits_due {
            return false;
        }
        let shared = &self.shared;
        let mut has_ended = false;
        for (after, happened) in std::mem::take(&mut self.waits) {
            if !happened.is_needed() {
                continue;
            }
            let outcome = match shared.lost() {
                Some(lost) => Err(lost.into()),
                // All edges are of GPUs: `Gpu::wait_for` takes no others.
                None => Edge::have_happened(&after).map_err(io::Error::from),
            };
            match outcome {
                Ok(false) => self.waits.push((after, happened)),
                outcome => {
                    has_ended = true;
                    Counts::add(&shared.counts.edges, 1);
                    happened.complete(outcome.map(drop));
                }
            }
        }
        let ended = Instant::now();
        self.waits_due = ended + (ended - began) * WAITS_REST;
        has_ended
    }
}

/// Notes that the kernel, or the memory that it gathers in, is not used again.
fn refuse_kernel(shared: &Shared, refusal: &Refusal) {
    let counts = &shared.counts;
    let by_reason = match refusal {
        Refusal::TooOld(..) => &counts.kernel_refused_old,
        Refusal::Load(_) => &counts.kernel_refused_jit,
        Refusal::Driver(_) => &counts.kernel_refused_launch,
        Refusal::Staging(_) => &counts.kernel_refused_memory,
        Refusal::Table(_) => &counts.kernel_refused_table,
    };
    Counts::add(&counts.kernel_refused, 1);
    Counts::add(by_reason, 1);
    refusal.driver().into_iter().for_each(|error| _ = shared.is_lost_by(error));
    let device = shared.device;
    tracing::warn!(device, %refusal, "small pieces of the GPU's memory are copied by the copy engine, more slowly");
}

/// The copies of a batch. Neighbours in one allocation are one.
fn fill(jobs: &mut Vec<Job>, shared: &Shared, direction: Direction, copy: &DeviceCopy) {
    jobs.clear();
    let mut host = copy.as_ptr() as u64;
    let mut before = None;
    for &piece in copy.pieces() {
        let len = piece.len as u64;
        match jobs.last_mut() {
            Some(last) if before.is_some_and(|before| shared.are_joined(before, piece)) => {
                last.len += len;
            }
            _ => jobs.push(match direction {
                Direction::Out => Job { src: piece.address, dst: host, len },
                Direction::In => Job { src: host, dst: piece.address, len },
            }),
        }
        before = Some(piece);
        host += len;
    }
}

/// Fails all work: the GPU has no streams. What comes later starts another thread, which tries again.
fn refuse(shared: &Shared, error: &cuda::Error) {
    shared.is_lost_by(error);
    let (copies, waits) = {
        let mut inbox = shared.inbox.lock();
        inbox.is_running = false;
        (std::mem::take(&mut inbox.copies), std::mem::take(&mut inbox.waits))
    };
    Counts::add(&shared.counts.failed, copies.len() as u64);
    let error =
        shared.lost().map_or_else(|| io::Error::from(Error::Driver(error.clone())), Into::into);
    fail(copies, &error);
    for (_, happened) in waits {
        happened.complete(Err(io::Error::new(error.kind(), error.to_string())));
    }
}
