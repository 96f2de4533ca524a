//! `kvferry bench gpu`: the speed of copies of a GPU's memory.
//!
//! Each report has kvferry's copies beside the driver's own calls ([`kvferry_cuda::raw`]) in the same rounds: single
//! copies, batches, and kernels. Most measurements need no peer: a table of blocks goes through the stages of the GPU, as
//! for a transport, and nothing is sent ([`kvferry::staged`]).

mod bench;
mod beside;
mod budget;
mod contiguous;
mod cpu;
mod exposed;
mod file;
pub(crate) mod first;
mod ours;
mod peers;
mod rounds;
mod scattered;
pub(crate) mod stalls;
mod tables;
pub(crate) mod target;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use kvferry_cuda::raw;
use kvferry_sys::cuda::DeviceInfo;

use crate::failure::Failure;
use crate::options::{GpuBench, GpuRows};
use crate::report::{Figure, Report, Row};
use crate::stats::Spread;
use crate::units;
use bench::{Bench, failed};
use budget::Budget;

/// The form of the report's JSON.
pub const SCHEMA: &str = "kvferry.bench-gpu/1";

/// The least number of rounds from which figures are judged.
const ROUNDS: usize = 9;

/// The name of the row that counts the parts that failed.
const FAILED: &str = "measurements that failed";

/// Returns why nothing can be measured here, if so: there is no driver, or no such device.
pub fn unavailable(options: &GpuBench) -> Option<String> {
    raw::device(options.device).err().map(|error| error.to_string())
}

/// Measures what `options` ask for; `bar` shows the progress. A part that fails is reported as failed, and the others go
/// on. `keep` gets the report of all parts so far after each part.
///
/// # Errors
/// [`Failure::Failed`] if the device can't be used.
pub fn measure(
    options: &GpuBench,
    bar: &ProgressBar,
    mut keep: impl FnMut(&Report),
) -> Result<Report, Failure> {
    let (device, version) = raw::device(options.device).map_err(failed)?;
    let context = raw::context(options.device).map_err(failed)?;
    let parts = parts(options);
    bar.inc_length(parts.len() as u64);
    let shares: Vec<f64> = parts.iter().map(|part| share(*part)).collect();
    let limit = Duration::from_secs(options.limit.into());
    let rounds = options.rounds.unwrap_or(if options.quick { 2 } else { ROUNDS });
    let mut bench = Bench {
        options,
        bar,
        context,
        rounds,
        budget: Budget::new(Instant::now(), limit, &shares),
        rows: Vec::new(),
        left_out: Vec::new(),
        remarks: remarks(&device, version, rounds),
        pinned_out: None,
        failures: 0,
    };
    for (index, part) in parts.into_iter().enumerate() {
        bench.budget.begin(index, Instant::now());
        let began = Instant::now();
        let name = name(part);
        // A panic is a failure of its part, too.
        let measured = catch_unwind(AssertUnwindSafe(|| run(part, &mut bench)));
        if let Err(failure) = measured.unwrap_or_else(|_| Err(failed("the part has panicked"))) {
            bench.failures += 1;
            let figure = Figure::failed("kvferry", failure.to_string());
            bench.rows.push(Row::with("gpu parts", name, "", vec![figure]));
        }
        bench.remarks.push(format!("{name}: took {}", units::duration(began.elapsed())));
        let so_far = report(&mut bench);
        keep(&so_far);
        take_back(&mut bench, so_far);
        bar.inc(1);
    }
    Ok(report(&mut bench))
}

fn run(part: GpuRows, bench: &mut Bench<'_>) -> Result<(), Failure> {
    match part {
        GpuRows::Contiguous => contiguous::run(bench),
        GpuRows::Scattered => scattered::run(bench),
        GpuRows::Peers => peers::run(bench),
        GpuRows::Exposed => exposed::run(bench),
        GpuRows::Beside => beside::run(bench),
        GpuRows::Cpu => cpu::run(bench),
        GpuRows::First => first::run(bench),
        GpuRows::File => file::run(bench),
    }
}

fn parts(options: &GpuBench) -> Vec<GpuRows> {
    use GpuRows::{Beside, Contiguous, Cpu, Exposed, File, First, Peers, Scattered};
    match options.rows.is_empty() {
        true => vec![Contiguous, Scattered, Peers, Exposed, Beside, Cpu, First, File],
        false => options.rows.clone(),
    }
}

fn name(part: GpuRows) -> &'static str {
    match part {
        GpuRows::Contiguous => "contiguous",
        GpuRows::Scattered => "scattered",
        GpuRows::Peers => "peers",
        GpuRows::Exposed => "exposed",
        GpuRows::Beside => "beside",
        GpuRows::Cpu => "cpu",
        GpuRows::First => "first",
        GpuRows::File => "file",
    }
}

/// A part's share of the time, relative to the shares of the other parts.
fn share(part: GpuRows) -> f64 {
    match part {
        GpuRows::Contiguous | GpuRows::Cpu | GpuRows::Beside => 10.0,
        GpuRows::Scattered => 70.0,
        GpuRows::Peers | GpuRows::File => 20.0,
        GpuRows::Exposed => 15.0,
        GpuRows::First => 30.0,
    }
}

/// Takes the figures so far from the bench, and makes a report of them.
fn report(bench: &mut Bench<'_>) -> Report {
    let mut rows = std::mem::take(&mut bench.rows);
    if bench.failures > 0 {
        let count = Spread::of(vec![bench.failures.into()]);
        rows.push(Row::new("gpu parts", FAILED, "", count).at_most(0.0));
    }
    let mut report = Report::new(SCHEMA, bench.options.quick, bench.remarks.clone(), rows);
    report.skipped.clone_from(&bench.left_out);
    report
}

/// Gives the figures of a report back to the bench, from which [`report`] took them.
fn take_back(bench: &mut Bench<'_>, report: Report) {
    bench.rows = report.rows;
    bench.rows.retain(|row| row.work != FAILED);
}

fn remarks(device: &DeviceInfo, version: i32, rounds: usize) -> Vec<String> {
    let (major, minor) = device.compute_capability;
    let version = format!("{}.{}", version / 1000, version % 1000 / 10);
    vec![
        format!(
            "{}, compute capability {major}.{minor}, {} multiprocessors, {} copy engines, driver of CUDA {version}",
            device.name, device.multiprocessors, device.copy_engines
        ),
        "kvferry: through its stages, from the call until the last byte is there; plain calls: until the stream has ended; \
         their lists are made before"
            .into(),
        "scattered: single is cuMemcpyAsync for each block; batch 128 is cuMemcpyBatchAsync for 128; kernel 16 copies on \
         mapped host memory in 16 blocks; gather copies inside the GPU, and contiguous bytes to the host or from it"
            .into(),
        format!("{rounds} rounds, or 3 at least where the time was up"),
    ]
}
