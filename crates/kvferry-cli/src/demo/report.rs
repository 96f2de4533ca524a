//! The result of a demo.

use std::time::Duration;

use serde::Serialize;

use super::args::{AnnounceWhen, DemoTransport, Flow};
use crate::cli::name;
use crate::output;
use kvferry_bench::failure::Failure;
use kvferry_bench::machine::{self, Machine};
use kvferry_bench::stats::{median, quantile_of};
use kvferry_bench::transfers::baseline;
use kvferry_bench::{table, units};

use super::plan::{Plan, TOKEN_BYTES};
use super::router::{Finished, Outcome};

/// `kvferry demo --json`.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    schema: &'static str,
    version: &'static str,
    machine: Machine,
    prefill: u32,
    prefill_tp: u32,
    decode: u32,
    decode_tp: u32,
    pub(super) transport: DemoTransport,
    flow: Flow,
    announce: AnnounceWhen,
    in_flight: u32,
    requests: u32,
    token_bytes: u64,
    /// Bytes that were handed over.
    bytes: u64,
    seconds: f64,
    tokens_verified: u64,
    wrong_tokens: u64,
    pub(super) sizes: Vec<SizeReport>,
    failed: Vec<Failed>,
    /// Engines that ended too early, and how.
    lost: Vec<String>,
    /// Resources that engines still hold at the end.
    held: Vec<String>,
}

/// All requests of one prompt size. A figure is missing if none of them was handed over.
#[derive(Debug, Serialize)]
pub(super) struct SizeReport {
    tokens: u32,
    pub(super) bytes: u64,
    requests: usize,
    failed: usize,
    pub(super) figures: Option<Figures>,
    tokens_verified: u64,
}

/// Times in milliseconds; medians unless named otherwise.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// Time from the last layer that prefill computes until the last decode rank has received everything, which the
    /// handoff adds to a request's time.
    pub(super) latency_p50_ms: f64,
    pub(super) latency_p99_ms: f64,
    /// The part of the latency before the first read, if that began later: the decode engine computes a
    /// step of other requests, and fetches begin with the next one.
    pub(super) waiting_ms: f64,
    /// Time from the first read to the same end.
    pub(super) transfer_ms: f64,
    /// The rest of the latency.
    pub(super) exposed_ms: f64,
    /// Exposed time as a part of the transfer time.
    exposed: f64,
    /// Bytes by the time in which any byte of the request was being read.
    pub(super) gb_per_s: f64,
    /// The rate of plain code with nothing else running.
    pub(super) limit_gb_per_s: f64,
}

#[derive(Debug, Serialize)]
struct Failed {
    request: usize,
    reason: String,
}

/// Times of one handoff, in seconds.
struct Handoff {
    latency: f64,
    waiting: f64,
    transfer: f64,
    /// The part of the transfer that adds to the request's time.
    exposed: f64,
    reading: f64,
    bytes: u64,
}

/// The rate of plain code for each size, in bytes per second.
pub(super) fn limits(plan: &Plan) -> Result<Vec<f64>, Failure> {
    let threads = (plan.options.decode_tp as usize).min(machine::cpus());
    let limit = |&size: &u32| {
        let (bytes, block) = (plan.bytes(size) as usize, plan.piece_bytes());
        match plan.options.transport {
            DemoTransport::Local => baseline::process_vm(bytes, block, threads),
            DemoTransport::Tcp => baseline::loopback(bytes, block, threads),
        }
    };
    plan.options.sizes.iter().map(limit).collect()
}

impl Report {
    pub(super) fn new(plan: &Plan, limits: &[f64], finished: Finished) -> Report {
        let Finished { outcomes, lost, held, seconds } = finished;
        let sizes = plan.options.sizes.iter().zip(limits);
        let sizes = sizes
            .map(|(&size, &limit)| SizeReport::new(size, plan.bytes(size), limit, &outcomes))
            .collect();
        let reason = |(request, outcome): (usize, &Outcome)| {
            let reason = outcome.failure.clone()?;
            Some(Failed { request, reason })
        };
        Report {
            schema: "kvferry.demo/3",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            prefill: plan.options.prefill,
            prefill_tp: plan.options.prefill_tp,
            decode: plan.options.decode,
            decode_tp: plan.options.decode_tp,
            transport: plan.options.transport,
            flow: plan.options.flow,
            announce: plan.options.announce,
            in_flight: plan.concurrency,
            requests: plan.options.requests,
            token_bytes: TOKEN_BYTES,
            bytes: outcomes.iter().flat_map(|it| &it.parts).map(|part| part.bytes).sum(),
            seconds,
            tokens_verified: outcomes.iter().map(|it| u64::from(it.verified)).sum(),
            wrong_tokens: 0,
            sizes,
            failed: outcomes.iter().enumerate().filter_map(reason).collect(),
            lost,
            held,
        }
    }

    /// Failures of a demo in which no token was wrong.
    pub(super) fn complaint(&self) -> Option<String> {
        let failed =
            self.failed.iter().map(|it| format!("request {} failed: {}", it.request, it.reason));
        let lost = self.lost.iter().cloned();
        let held = self.held.iter().map(|held| format!("still held at the end: {held}"));
        let lines: Vec<String> = lost.chain(failed).chain(held).collect();
        (!lines.is_empty()).then(|| lines.join("\n         "))
    }

    fn to_table(&self) -> String {
        let header = [
            "KV",
            "requests",
            "latency p50",
            "p99",
            "waiting",
            "transfer",
            "exposed",
            "GB/s",
            "machine's limit",
            "tokens right",
        ];
        let ms = |value: f64| units::duration(Duration::from_secs_f64(value / 1e3));
        let row = |size: &SizeReport| {
            let mut row = vec![
                format!(
                    "{} ({} tokens)",
                    units::bytes(size.bytes),
                    units::count(size.tokens.into())
                ),
                match size.failed {
                    0 => size.requests.to_string(),
                    failed => format!("{}, {failed} failed", size.requests),
                },
            ];
            match &size.figures {
                Some(it) => row.extend([
                    ms(it.latency_p50_ms),
                    ms(it.latency_p99_ms),
                    ms(it.waiting_ms),
                    ms(it.transfer_ms),
                    units::figure(it.exposed),
                    units::figure(it.gb_per_s),
                    units::figure(it.limit_gb_per_s),
                ]),
                None => row.extend(std::iter::repeat_n("–".to_string(), 7)),
            }
            row.push(units::count(size.tokens_verified));
            row
        };
        let rows: Vec<Vec<String>> = self.sizes.iter().map(row).collect();
        format!("{}\n{}\n", table::aligned(&header, &rows), self.summary())
    }

    /// The result in a sentence.
    pub(super) fn summary(&self) -> String {
        let handed = self.requests as usize - self.failed.len();
        let what = match self.failed.len() {
            0 => format!("all {handed} requests"),
            _ => format!("{handed} of {} requests", self.requests),
        };
        let nothing_held = if self.held.is_empty() { "; nothing is held at the end" } else { "" };
        format!(
            "{what} handed over, {} in {}; all of their {} tokens are right{nothing_held}",
            units::bytes(self.bytes),
            units::duration(Duration::from_secs_f64(self.seconds)),
            units::count(self.tokens_verified)
        )
    }

    /// Configuration of the run, and the machine.
    pub(super) fn facts(&self) -> [String; 2] {
        [
            format!(
                "{} prefill of TP {} → {} decode of TP {}, {} in flight, over {}, {} flow, announced by {}",
                self.prefill,
                self.prefill_tp,
                self.decode,
                self.decode_tp,
                self.in_flight,
                name(&self.transport),
                name(&self.flow),
                name(&self.announce)
            ),
            format!(
                "kvferry {}, {}, {} cores, Linux {}",
                self.version, self.machine.cpu, self.machine.cpus, self.machine.kernel
            ),
        ]
    }
}

impl output::Report for Report {
    fn text(&self) -> String {
        self.to_table()
    }
}

impl SizeReport {
    fn new(tokens: u32, bytes: u64, limit: f64, outcomes: &[Outcome]) -> SizeReport {
        let of_size = || outcomes.iter().filter(|outcome| outcome.tokens == tokens);
        let done = of_size().filter(|outcome| outcome.failure.is_none());
        let handoffs: Vec<Handoff> = done.filter_map(Handoff::of).collect();
        SizeReport {
            tokens,
            bytes,
            requests: of_size().count(),
            failed: of_size().filter(|outcome| outcome.failure.is_some()).count(),
            figures: Figures::of(limit, &handoffs),
            tokens_verified: of_size().map(|outcome| u64::from(outcome.verified)).sum(),
        }
    }
}

impl Figures {
    fn of(limit: f64, handoffs: &[Handoff]) -> Option<Figures> {
        if handoffs.is_empty() {
            return None;
        }
        let all = |figure: fn(&Handoff) -> f64| handoffs.iter().map(figure).collect::<Vec<f64>>();
        let mut latencies = all(|it| it.latency * 1e3);
        let rates: Vec<f64> =
            handoffs.iter().map(|it| it.bytes as f64 / it.reading / 1e9).collect();
        Some(Figures {
            latency_p50_ms: quantile_of(&mut latencies, 0.5),
            latency_p99_ms: quantile_of(&mut latencies, 0.99),
            waiting_ms: median(&all(|it| it.waiting * 1e3)),
            transfer_ms: median(&all(|it| it.transfer * 1e3)),
            exposed_ms: median(&all(|it| it.exposed * 1e3)),
            exposed: median(&all(|it| it.exposed / it.transfer)),
            gb_per_s: median(&rates),
            limit_gb_per_s: limit / 1e9,
        })
    }
}

impl Handoff {
    fn of(outcome: &Outcome) -> Option<Handoff> {
        let computed = outcome.computed_ns?;
        let received = *outcome.received_ns.iter().max()?;
        let mut parts: Vec<(u64, u64)> =
            outcome.parts.iter().map(|part| (part.began_ns, part.ended_ns)).collect();
        parts.sort_unstable();
        let began = parts.first()?.0;
        let seconds = |ns: u64| ns as f64 / 1e9;
        Some(Handoff {
            latency: seconds(received.saturating_sub(computed)),
            waiting: seconds(began.saturating_sub(computed)),
            transfer: seconds(received.saturating_sub(began).max(1)),
            exposed: seconds(received.saturating_sub(began.max(computed)).max(1)),
            reading: seconds(covered(&parts).max(1)),
            bytes: outcome.parts.iter().map(|part| part.bytes).sum(),
        })
    }
}

/// The time that the spans cover together, each moment once. They must be sorted by their beginnings.
fn covered(spans: &[(u64, u64)]) -> u64 {
    let (mut sum, mut until) = (0, 0);
    for &(began, ended) in spans {
        let ended = ended.max(began);
        sum += ended.saturating_sub(began.max(until));
        until = until.max(ended);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::super::messages::Part;
    use super::*;

    #[test]
    fn time_in_which_several_ranks_read_counts_once() {
        assert_eq!(covered(&[]), 0);
        assert_eq!(covered(&[(10, 20), (10, 15), (18, 25), (30, 31)]), 16);
        assert_eq!(covered(&[(5, 50), (6, 7), (8, 60)]), 55);
    }

    #[test]
    fn reads_while_prefill_computes_are_not_latency() {
        let part = |began_ns, ended_ns| Part { bytes: 1, began_ns, ended_ns };
        let mut outcome = Outcome {
            computed_ns: Some(1_000),
            parts: vec![part(900, 1_100), part(200, 400)],
            received_ns: vec![1_200, 1_150],
            ..Outcome::default()
        };
        let handoff = Handoff::of(&outcome).expect("it was handed over");
        let ns = |seconds: f64| (seconds * 1e9).round() as u64;
        assert_eq!(ns(handoff.latency), 200);
        assert_eq!(ns(handoff.waiting), 0);
        assert_eq!(ns(handoff.transfer), 1_000);
        assert_eq!(ns(handoff.exposed), 200);
        assert_eq!(ns(handoff.reading), 400);
        // Nothing is read before everything is computed: all of the transfer is exposed, but not what
        // comes before it.
        outcome.parts.truncate(0);
        outcome.parts.push(part(1_050, 1_150));
        let handoff = Handoff::of(&outcome).expect("it was handed over");
        assert_eq!(ns(handoff.latency), 200);
        assert_eq!(ns(handoff.waiting), 50);
        assert_eq!(ns(handoff.transfer), 150);
        assert_eq!(ns(handoff.exposed), 150);
        assert!(Handoff::of(&Outcome::default()).is_none());
    }
}
