//! The first copies of a process, the device memory that they take, the time in which copies are measured, and the rate at
//! which host memory is pinned.

use std::thread;
use std::time::{Duration, Instant};

use kvferry::Batch;
use kvferry_cuda::raw::{self, Buffers, Piece};
use kvferry_cuda::{Direction, Gpu};
use serde::{Deserialize, Serialize};

use super::bench::{Bench, failed, gigabytes_per_second};
use super::ours::{self, Subject};
use super::stalls;
use super::tables::scattered;
use crate::child::hold;
use crate::failure::Failure;
use crate::helper;
use crate::report::Row;
use crate::stats::Spread;
use crate::units;

/// The most milliseconds from the start of an agent to the end of its first copy.
const FIRST_MS: f64 = 150.0;
/// The most device memory that an agent takes, beyond what its counters state.
const DEVICE_MIB: f64 = 8.0;
/// The most milliseconds of all measurements of copies.
const MEASURING_MS: f64 = 50.0;
/// Bytes of a copy: one stage.
const BYTES: usize = 4 << 20;
/// Bytes of a small block.
const BLOCK: usize = 4 << 10;
/// Copies of small blocks, after which the measurements have begun.
const COPIES: u32 = 20;
/// Time without a further measurement, after which they have ended.
const SETTLE: Duration = Duration::from_millis(100);
/// The longest wait for that.
const PATIENCE: Duration = Duration::from_secs(10);
const MIB: f64 = (1 << 20) as f64;

/// Times of the first steps of a process, in milliseconds, and the device memory that they took.
#[derive(Debug, Serialize, Deserialize)]
struct Firsts {
    driver: f64,
    context: f64,
    register: f64,
    first_out: f64,
    second_out: f64,
    first_in: f64,
    second_in: f64,
    device_mib: f64,
    first_scattered_out: f64,
    second_scattered_out: f64,
    first_scattered_in: f64,
    /// `None` if nothing was measured.
    measuring: Option<f64>,
    /// Device memory that was taken in the end, without what the counters state.
    unstated_mib: f64,
}

/// Runs the helper `gpu-first`.
pub(crate) fn run_child(device: i32) -> Result<(), Failure> {
    crate::child::die_with_parent()?;
    let mut last = Instant::now();
    let mut lap = || {
        let took = last.elapsed().as_secs_f64() * 1e3;
        last = Instant::now();
        took
    };
    raw::device(device).map_err(failed)?;
    let driver = lap();
    let context = raw::context(device).map_err(failed)?;
    let context_ms = lap();
    let buffers = Buffers::new(&context, BYTES, BYTES).map_err(failed)?;
    let free = || context.memory_info().map(|info| info.free).map_err(failed);
    let before = free()?;
    lap();
    let subject = Subject::new(&buffers)?;
    let batch = subject.batch(&[Piece { device_at: 0, host_at: 0, len: BYTES }])?;
    let register = lap();
    let mut copy = |direction, batch: &Batch| {
        lap();
        ours::copy(direction, batch)?;
        Ok::<_, Failure>(lap())
    };
    let (first_out, second_out) = (copy(Direction::Out, &batch)?, copy(Direction::Out, &batch)?);
    let (first_in, second_in) = (copy(Direction::In, &batch)?, copy(Direction::In, &batch)?);
    let after = free()?;
    // The driver compiles the kernel for the first of these.
    let small = subject.batch(&scattered(BLOCK, BYTES / BLOCK, 9))?;
    let first_scattered_out = copy(Direction::Out, &small)?;
    let second_scattered_out = copy(Direction::Out, &small)?;
    let first_scattered_in = copy(Direction::In, &small)?;
    let measuring = measuring(&small)?;
    let stated: u64 = Gpu::all().iter().map(|gpu| gpu.counters().staging_bytes).sum();
    let taken = before.saturating_sub(free()?);
    hold(Firsts {
        driver,
        context: context_ms,
        register,
        first_out,
        second_out,
        first_in,
        second_in,
        device_mib: before.saturating_sub(after) as f64 / MIB,
        first_scattered_out,
        second_scattered_out,
        first_scattered_in,
        measuring,
        unstated_mib: (taken as f64 - stated as f64) / MIB,
    })
}

/// Milliseconds of the measurements of copies, which begin after some copies of small blocks. `None` if they do not.
fn measuring(small: &Batch) -> Result<Option<f64>, Failure> {
    let spent = || Gpu::all().iter().map(|gpu| gpu.counters().measuring_us).sum::<u64>();
    for _ in 0..COPIES {
        ours::copy(Direction::Out, small)?;
    }
    let began = Instant::now();
    let mut before = spent();
    loop {
        thread::sleep(SETTLE);
        let now = spent();
        if now == before || began.elapsed() > PATIENCE {
            return Ok((now > 0).then_some(now as f64 / 1e3));
        }
        before = now;
    }
}

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Failure> {
    let mut firsts: Vec<Firsts> = Vec::new();
    for _ in 0..bench.rounds {
        if !bench.has_time_for("further first copies") {
            break;
        }
        bench.step("first copies");
        let mut child = helper::spawn(&["gpu-first", &bench.options.device.to_string()])?;
        firsts.push(child.hello()?);
    }
    if !firsts.is_empty() {
        let spread = |of: fn(&Firsts) -> f64| Spread::of(firsts.iter().map(of).collect());
        let row = |work, unit, of| Row::new("gpu first", work, unit, spread(of));
        bench.rows.extend([
            row("the driver is loaded", "ms", |it| it.driver),
            row("a context is made", "ms", |it| it.context),
            row("an agent starts, and registers memory", "ms", |it| it.register),
            row("first copy out, 4 MiB", "ms", |it| it.first_out),
            row("second copy out", "ms", |it| it.second_out),
            row("first copy in", "ms", |it| it.first_in),
            row("second copy in", "ms", |it| it.second_in),
            row("agent, registration and first copy", "ms", |it| it.register + it.first_out)
                .at_most(FIRST_MS),
            row("device memory that is taken", "MiB", |it| it.device_mib).at_most(DEVICE_MIB),
            row("first copy out of 1024 × 4 KiB", "ms", |it| it.first_scattered_out),
            row("second copy out of 1024 × 4 KiB", "ms", |it| it.second_scattered_out),
            row("first copy in of 1024 × 4 KiB", "ms", |it| it.first_scattered_in),
            row("agent, registration, first copy and first of 1024 × 4 KiB", "ms", |it| {
                it.register + it.first_out + it.first_scattered_out
            })
            .at_most(FIRST_MS),
            row("device memory in the end, beyond what is stated", "MiB", |it| it.unstated_mib)
                .at_most(DEVICE_MIB),
        ]);
        let measuring: Vec<f64> = firsts.iter().filter_map(|it| it.measuring).collect();
        match measuring.is_empty() {
            true => bench.left_out.push("measurements of copies: none were made".into()),
            false => {
                let spread = Spread::of(measuring);
                let row = Row::new("gpu first", "measurements of copies", "ms", spread);
                bench.rows.push(row.at_most(MEASURING_MS));
            }
        }
    }
    pins(bench)?;
    stalls::run(bench)
}

fn pins(bench: &mut Bench<'_>) -> Result<(), Failure> {
    let bytes: usize = if bench.options.quick { 16 << 20 } else { 1 << 30 };
    let rounds = bench.rounds.min(3);
    let parts = [4 << 20, 64 << 20];
    let mut rates = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        if !bench.has_time_for("pinning") {
            return Ok(());
        }
        bench.step("pinning");
        for (part, rates) in parts.into_iter().zip(&mut rates) {
            let took = raw::pin_time(&bench.context, bytes, part).map_err(failed)?;
            rates.push(gigabytes_per_second(bytes as u64, took));
        }
    }
    for (part, rates) in parts.into_iter().zip(rates) {
        let work = format!(
            "pinning {} in parts of {}",
            units::bytes(bytes as u64),
            units::bytes(part as u64)
        );
        bench.rows.push(Row::new("gpu first", work, "GB/s", Spread::of(rates)));
    }
    Ok(())
}
