//! Where gathered copies lie in the device's staging.
//!
//! Copies that follow each other on the host follow each other in staging, too, and leave it by one copy: a *run*. A run
//! has the alignment of its host address, so that a copy has the same unit on both ways. What does not fit follows in
//! another *window*: a gather step, and the copies out of staging after it.

use crate::capabilities::{KernelLimits, LINE, Staging};
use crate::cost::Cost;
use crate::job::Job;

/// Receiver of the parts of a layout.
pub(super) trait Sink {
    /// A part of a copy, into staging.
    fn part(&mut self, part: Job);
    /// A run, out of staging.
    fn run(&mut self, run: Job);
    /// The end of a window.
    fn end_window(&mut self);
}

/// Lays out copies, which are in the order of their destinations.
pub(super) fn lay_out(
    jobs: impl Iterator<Item = Job>,
    staging: Staging,
    limits: KernelLimits,
    sink: &mut impl Sink,
) {
    let (mut used, mut slices) = (0u64, 0u64);
    let mut run: Option<Job> = None;
    for mut job in jobs {
        while job.len > 0 {
            let joined = run.as_mut().filter(|run| run.dst + run.len == job.dst);
            let at = match joined {
                Some(_) => used,
                None => used.next_multiple_of(LINE) + job.dst % LINE,
            };
            let fits = fitting(&job, staging.bytes.saturating_sub(at));
            let added = limits.slices(job.dst, fits);
            if fits == 0 || slices + added > u64::from(limits.jobs_max) {
                run.take().into_iter().for_each(|run| sink.run(run));
                sink.end_window();
                (used, slices) = (0, 0);
                continue;
            }
            let part = Job { src: job.src, dst: staging.address + at, len: fits };
            sink.part(part);
            let new = Job { src: part.dst, dst: job.dst, len: fits };
            match joined {
                Some(run) => run.len += fits,
                None => run.replace(new).into_iter().for_each(|run| sink.run(run)),
            }
            (used, slices) = (at + fits, slices + added);
            job = Job { src: job.src + fits, dst: job.dst + fits, len: job.len - fits };
        }
    }
    if let Some(run) = run {
        sink.run(run);
        sink.end_window();
    }
}

/// Bytes of a copy that fit into `room`: all, or up to the end of a line.
fn fitting(job: &Job, room: u64) -> u64 {
    if job.len <= room { job.len } else { room.saturating_sub((job.dst % LINE + room) % LINE) }
}

/// The windows of a layout, and the times of its copies.
pub(super) struct Tally<'a> {
    copy: &'a Cost,
    pub(super) copies_ns: f64,
    pub(super) count: usize,
    /// The destination of the last window's first run.
    pub(super) last_start: u64,
    is_in_window: bool,
}

impl<'a> Tally<'a> {
    pub(super) fn new(copy: &'a Cost) -> Self {
        Self { copy, copies_ns: 0.0, count: 0, last_start: 0, is_in_window: false }
    }
}

impl Sink for Tally<'_> {
    fn part(&mut self, _part: Job) {}

    fn run(&mut self, run: Job) {
        self.copies_ns += self.copy.single(run.len);
        if !std::mem::replace(&mut self.is_in_window, true) {
            self.last_start = run.dst;
        }
    }

    fn end_window(&mut self) {
        self.count += 1;
        self.is_in_window = false;
    }
}
