//! The first copy of a process, the device memory that it takes, and the rate at which host memory is pinned.

use std::time::Instant;

use kvferry_cuda::Direction;
use kvferry_cuda::raw::{self, Buffers, Piece};
use serde::{Deserialize, Serialize};

use super::bench::{Bench, failed, gigabytes_per_second};
use super::ours::{self, Subject};
use crate::child::hold;
use crate::failure::Failure;
use crate::helper;
use crate::report::Row;
use crate::stats::Spread;
use crate::units;

/// The most milliseconds from the start of an agent to the end of its first copy.
const FIRST_MS: f64 = 150.0;
/// The most device memory that an agent takes.
const DEVICE_MIB: f64 = 8.0;
/// Bytes of a copy: one stage.
const BYTES: usize = 4 << 20;

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
    let mut copy = |direction| {
        ours::copy(direction, &batch)?;
        Ok::<_, Failure>(lap())
    };
    let (first_out, second_out) = (copy(Direction::Out)?, copy(Direction::Out)?);
    let (first_in, second_in) = (copy(Direction::In)?, copy(Direction::In)?);
    let after = free()?;
    hold(Firsts {
        driver,
        context: context_ms,
        register,
        first_out,
        second_out,
        first_in,
        second_in,
        device_mib: before.saturating_sub(after) as f64 / f64::from(1 << 20),
    })
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
        ]);
    }
    pins(bench)
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
