//! A page with three figures of a demo: latency of a handoff, its part of the transfer, and throughput
//! beside the machine's limit.

use kvferry_bench::plot::columns::{self, Column, Words};
use kvferry_bench::plot::page::Page;
use kvferry_bench::units;

use super::args::DemoTransport;

use super::report::{Figures, Report};

const METHOD: &str = "Engines are processes with a scheduler, a small model of integers and a paged KV cache; every \
byte of KV that a token may see goes into it, so that a wrong byte is a wrong token. All times are on one clock. A \
handoff's latency begins when prefill has computed the last layer of the prompt and ends when the last decode rank \
has received everything; the transfer begins with the first read. If that is later, the decode engine was computing a \
step of other requests: a fetch begins with a step. Throughput is a request's bytes by the time in \
which any of them were being read, while the engines compute on the same cores; the machine's limit was measured \
just before, with nothing else running.";

pub(super) fn html(report: &Report) -> String {
    let sizes: Vec<(u64, &Figures)> =
        report.sizes.iter().filter_map(|size| Some((size.bytes, size.figures.as_ref()?))).collect();
    let columns = |values: fn(&Figures) -> [f64; 2]| -> Vec<Column> {
        sizes.iter().map(|(bytes, it)| (units::bytes(*bytes), values(it))).collect()
    };
    let latency = Words {
        title: "Handoff latency",
        subtitle: "ms from the last layer computed to everything received, logarithmic; lower is better",
        unit: "ms",
        legend: ["p50", "p99"],
        axis: "KV of the request",
    };
    let exposure = Words {
        title: "Exposed and whole transfer",
        subtitle: "ms, medians, logarithmic; the time between them was hidden behind prefill's computing",
        legend: ["exposed: after prefill computed", "whole transfer"],
        ..latency
    };
    let limit = match report.transport {
        DemoTransport::Local => "process_vm_readv by itself, nothing else running",
        DemoTransport::Tcp => "plain readv over loopback, nothing else running",
    };
    let throughput = Words {
        title: "Throughput while reading",
        subtitle: "GB/s, higher is better",
        unit: "GB/s",
        legend: ["kvferry, beside computing engines", limit],
        ..latency
    };
    let pictures = [
        columns::ranges(&latency, &columns(|it| [it.latency_p50_ms, it.latency_p99_ms])),
        columns::ranges(&exposure, &columns(|it| [it.exposed_ms, it.transfer_ms])),
        columns::bars(&throughput, &columns(|it| [it.gb_per_s, it.limit_gb_per_s])),
    ];
    let complaint = report.complaint().unwrap_or_default();
    let facts: Vec<String> =
        report.facts().into_iter().chain(complaint.lines().map(str::to_owned)).collect();
    Page {
        title: "kvferry demo",
        facts: &facts,
        verdict: (complaint.is_empty(), &report.summary()),
        summary: "",
        pictures: if sizes.is_empty() { Vec::new() } else { pictures.iter().collect() },
        details: "",
        method: METHOD,
    }
    .html()
}
