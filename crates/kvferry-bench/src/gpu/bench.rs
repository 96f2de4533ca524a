//! The state that the parts of the bench share.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use kvferry_sys::cuda::Context;

use super::budget::Budget;
use crate::failure::Failure;
use crate::options::GpuBench;
use crate::report::Row;
use crate::stats::Spread;

/// The means of a part of the bench: its device, its limits, and the lists that take its figures.
pub(super) struct Bench<'a> {
    pub(super) options: &'a GpuBench,
    pub(super) bar: &'a ProgressBar,
    pub(super) context: Context,
    pub(super) rounds: usize,
    pub(super) budget: Budget,
    pub(super) rows: Vec<Row>,
    /// Parts and points that were not measured, with the reasons.
    pub(super) left_out: Vec<String>,
    pub(super) remarks: Vec<String>,
    /// Rates of plain copies of 64 MiB out of the device, in GB/s. `None` until they have been measured.
    pub(super) pinned_out: Option<Spread>,
    /// Parts that failed.
    pub(super) failures: u32,
}

impl Bench<'_> {
    /// Whether there is time for another point. If not, lists `what` as left out.
    pub(super) fn has_time_for(&mut self, what: &str) -> bool {
        let has_time = self.budget.has_time(Instant::now());
        if !has_time {
            self.left_out.push(format!("{what}: the limit of {} s", self.options.limit));
        }
        has_time
    }

    pub(super) fn step(&self, what: &str) {
        self.bar.set_message(what.to_owned());
    }
}

pub(super) fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::Failed(error.to_string())
}

pub(super) fn gigabytes_per_second(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}
