//! The thread of a GPU.

use super::lane::Lane;
use super::pace::Pace;
use super::pins::Pins;
use super::{Counts, Shared, fail};
use crate::calibration::Calibration;
use crate::capabilities::Capabilities;
use crate::edge::Edge;
use crate::error::Error;
use crate::job::{Direction, Job};
use crate::plan::{Plan, Planner};
use kvferry::{After, DeviceCopy, Happened};
use kvferry_sys::cuda;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

/// Time between two looks at all waits, as a multiple of what the first took: many waits that never end must not take
/// the thread from its copies.
const WAITS_REST: u32 = 8;
/// Single copies in a step of a plan, at most.
const OUTSTANDING_MAX: u32 = 512;

pub(super) struct Engine {
    shared: Arc<Shared>,
    out: Lane,
    into: Lane,
    waits: Vec<(After, Happened)>,
    /// Time of the next look at the waits.
    waits_due: Instant,
    pins: Pins,
    calibration: Calibration,
    planner: Planner,
    plan: Plan,
    jobs: Vec<Job>,
    pace: Pace,
}

impl Engine {
    /// Serves the GPU until its last memory is gone.
    pub(super) fn run(shared: &Arc<Shared>) {
        let engine = match Self::new(shared) {
            Ok(engine) => engine,
            Err(error) => return refuse(shared, &error),
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
                shared.lose("the thread that copies has panicked");
                refuse(shared, &cuda::Error::NotSupported("a thread"));
                engine.fail_all();
            }
        }
    }

    fn new(shared: &Arc<Shared>) -> Result<Self, cuda::Error> {
        Ok(Self {
            out: Lane::new(shared, Direction::Out)?,
            into: Lane::new(shared, Direction::In)?,
            shared: Arc::clone(shared),
            waits: Vec::new(),
            waits_due: Instant::now(),
            pins: Pins::default(),
            calibration: Calibration::default(),
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
            }
        }
        shared.counts.read().leaked > 0
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
        let has_copies = !self.out.is_idle() || !self.into.is_idle();
        let is_idle = !has_copies && self.waits.is_empty();
        let now = Instant::now();
        let pause = self.pace.pause(now, has_copies);
        let shared = Arc::clone(&self.shared);
        let mut inbox = shared.inbox.lock();
        while inbox.copies.is_empty() && inbox.waits.is_empty() {
            if is_idle && inbox.has_ended {
                return false;
            }
            if !is_idle && pause.is_zero() {
                drop(inbox);
                std::thread::yield_now();
                return true;
            }
            inbox = shared.changed.wait(inbox, (!is_idle).then_some(pause));
            if !is_idle {
                break;
            }
        }
        for (direction, copy) in inbox.copies.drain(..) {
            self.pace.begin_anew(now);
            match direction {
                Direction::Out => self.out.queue.push_back(copy),
                Direction::In => self.into.queue.push_back(copy),
            }
        }
        if !inbox.waits.is_empty() {
            self.pace.begin_anew(now);
            self.waits.append(&mut inbox.waits);
        }
        true
    }

    fn start(&mut self, direction: Direction, copy: DeviceCopy) {
        let shared = &self.shared;
        if let Some(lost) = shared.lost() {
            Counts::add(&shared.counts.failed, 1);
            return copy.complete(Err(lost.into()));
        }
        let is_pinned = self.pins.pin(shared, &copy);
        fill(&mut self.jobs, shared, direction, &copy);
        let capabilities = Capabilities {
            // A batch of pageable memory is not promised to work.
            batch: is_pinned && shared.context.driver().batch_call().is_some(),
            outstanding_max: OUTSTANDING_MAX,
            // Those of one allocation are joined already.
            merges: false,
            ..Capabilities::ENGINE
        };
        let planned = self.planner.plan(
            &self.jobs,
            direction,
            &self.calibration,
            &capabilities,
            &mut self.plan,
        );
        if let Err(error) = planned {
            Counts::add(&shared.counts.failed, 1);
            return copy.complete(Err(io::Error::new(io::ErrorKind::InvalidInput, error)));
        }
        let (bytes, pieces) = (copy.len() as u64, copy.pieces().len() as u64);
        let (lane, bytes_of) = match direction {
            Direction::Out => (&mut self.out, &shared.counts.bytes_out),
            Direction::In => (&mut self.into, &shared.counts.bytes_in),
        };
        Counts::add(bytes_of, bytes);
        Counts::add(&shared.counts.batches, 1);
        Counts::add(&shared.counts.pieces, pieces);
        lane.start(shared, copy, &self.plan);
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
                None => have_happened(&after),
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

/// True once all edges have happened.
fn have_happened(after: &After) -> io::Result<bool> {
    // Each is a GPU's: `Gpu::wait_for` takes no others.
    for edge in after.edges().iter().filter_map(|edge| edge.downcast_ref::<Edge>()) {
        if !edge.has_happened().map_err(|error| io::Error::from(Error::Driver(error)))? {
            return Ok(false);
        }
    }
    Ok(true)
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
