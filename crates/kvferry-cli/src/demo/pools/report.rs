//! What a demo found.

use std::time::Duration;

use serde::Serialize;

use crate::machine::Machine;
use crate::stats::{Spread, median, quantile_of};
use crate::{table, units};

use super::messages::Verified;
use super::plan::Plan;

/// Collected while a demo runs.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// Seconds from prefill's call to decode being told.
    handoffs: Vec<f64>,
    /// Bytes per second of each wave.
    rates: Vec<f64>,
    /// Bytes per second of one raw TCP stream, once before each wave.
    pub(super) raw_rates: Vec<f64>,
    pages: u64,
    untouched_pages: u64,
    seconds: f64,
    bytes: u64,
}

impl Measured {
    pub(super) fn add_wave(
        &mut self,
        started: &[Duration],
        verified: &Verified,
        request_bytes: u64,
    ) {
        let told: Vec<Duration> =
            verified.told_ns.iter().map(|&told| Duration::from_nanos(told)).collect();
        let latency = |(told, started): (&Duration, &Duration)| (*told - *started).as_secs_f64();
        self.handoffs.extend(told.iter().zip(started).map(latency));
        let first = started.iter().min().expect("a wave has a request");
        let last = told.iter().max().expect("a wave has a request");
        let seconds = (*last - *first).as_secs_f64();
        let bytes = request_bytes * started.len() as u64;
        self.rates.push(bytes as f64 / seconds);
        self.pages += verified.pages;
        self.untouched_pages += verified.untouched_pages;
        self.seconds += seconds;
        self.bytes += bytes;
    }
}

/// `kvferry demo --json`.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    schema: &'static str,
    version: &'static str,
    machine: Machine,
    model: &'static str,
    dtype: &'static str,
    tokens: u32,
    block_tokens: u32,
    requests: u64,
    in_flight: u32,
    rounds: u32,
    request_bytes: u64,
    page_bytes: u64,
    bytes: u64,
    pages: u64,
    untouched_pages: u64,
    wrong_pages: u64,
    handoff: Handoff,
    throughput: Throughput,
    reduced: Vec<String>,
}

/// From prefill's call to decode being told, in milliseconds.
#[derive(Debug, Serialize)]
struct Handoff {
    p50_ms: f64,
    p90_ms: f64,
    p99_ms: f64,
}

#[derive(Debug, Serialize)]
struct Throughput {
    /// All bytes over the time in which they moved.
    gb_per_s: f64,
    raw_stream_gb_per_s: f64,
    /// Wave by wave.
    of_raw_stream: Spread,
}

impl Report {
    pub(super) fn new(plan: &Plan, measured: &Measured) -> Report {
        let mut handoffs = measured.handoffs.clone();
        let mut handoff_ms = |part| quantile_of(&mut handoffs, part) * 1e3;
        Report {
            schema: "kvferry.demo/1",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            model: plan.model.name,
            dtype: plan.dtype.name(),
            tokens: plan.tokens,
            block_tokens: plan.block_tokens,
            requests: measured.handoffs.len() as u64,
            in_flight: plan.concurrency,
            rounds: plan.rounds,
            request_bytes: plan.request_bytes(),
            page_bytes: plan.page_bytes(),
            bytes: measured.bytes,
            pages: measured.pages,
            untouched_pages: measured.untouched_pages,
            wrong_pages: 0,
            handoff: Handoff {
                p50_ms: handoff_ms(0.5),
                p90_ms: handoff_ms(0.9),
                p99_ms: handoff_ms(0.99),
            },
            throughput: Throughput {
                gb_per_s: measured.bytes as f64 / measured.seconds / 1e9,
                raw_stream_gb_per_s: median(&measured.raw_rates) / 1e9,
                of_raw_stream: Spread::ratio(&measured.rates, &measured.raw_rates),
            },
            reduced: plan.remarks.clone(),
        }
    }

    pub(super) fn to_table(&self) -> String {
        let ms = |value: f64| units::duration(Duration::from_secs_f64(value / 1e3));
        let Handoff { p50_ms, p90_ms, p99_ms } = self.handoff;
        let rate = &self.throughput;
        table::facts(&[
            ("requests", format!("{}, {} in flight", units::count(self.requests), self.in_flight)),
            (
                "moved",
                format!(
                    "{} in {} pages of {}",
                    units::bytes(self.bytes),
                    units::count(self.pages),
                    units::bytes(self.page_bytes)
                ),
            ),
            (
                "verified",
                format!(
                    "every byte, by the process that received it; {} other pages untouched",
                    units::count(self.untouched_pages)
                ),
            ),
            ("handoff", format!("p50 {}   p90 {}   p99 {}", ms(p50_ms), ms(p90_ms), ms(p99_ms))),
            ("throughput", format!("{} GB/s", units::figure(rate.gb_per_s))),
            (
                "raw TCP stream",
                format!(
                    "{} GB/s: kvferry moves {} of it ({} to {})",
                    units::figure(rate.raw_stream_gb_per_s),
                    units::figure(rate.of_raw_stream.median),
                    units::figure(rate.of_raw_stream.q1),
                    units::figure(rate.of_raw_stream.q3)
                ),
            ),
        ])
    }
}
