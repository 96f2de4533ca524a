//! Processor time of copies, and of an agent with nothing to do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_cuda::raw::{self, Buffers, Method};
use kvferry_cuda::{Calibration, Capabilities, Direction, Gpu, Job, Plan, Planner};

use super::bench::{Bench, failed};
use super::ours::{self, Subject};
use super::tables::{Case, scattered};
use crate::failure::Failure;
use crate::machine::{agent_time, agent_waits, process_time, thread_time};
use crate::report::Row;
use crate::stats::Spread;

/// Blocks of a batch, and bytes of each block. Together they fill one stage.
const COUNT: usize = 1024;
const BLOCK: usize = 4 << 10;

/// The most processor time of a copy, as a multiple of that of one batch call and the wait for it.
const TIMES_BATCH: f64 = 1.2;
/// The most calls of the driver for [`COUNT`] blocks.
const CALLS: f64 = 8.0;
/// The most processor time of an agent with nothing to do, in percent of a core.
const IDLE: f64 = 0.02;
/// Time after which the threads of earlier copies sleep.
const SETTLE: Duration = Duration::from_millis(500);

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Failure> {
    if !bench.has_time_for("processor time") {
        return Ok(());
    }
    let bytes = COUNT * BLOCK;
    let buffers = Buffers::new(&bench.context, bytes, bytes).map_err(failed)?;
    let subject = Subject::new(&buffers)?;
    let case = Case::new(&buffers, &subject, scattered(BLOCK, COUNT, 5))?;
    let methods = raw::supported().map_err(failed)?;
    // The last method gives the driver all copies by one call.
    let method = *methods.last().expect("single copies at least");
    for direction in [Direction::Out, Direction::In] {
        copies(bench, &case, method, direction)?;
    }
    plans(bench, &case)?;
    idle(bench)
}

/// Microseconds for each of `times` calls, by this clock.
fn microseconds(
    times: u32,
    clock: fn() -> Duration,
    mut call: impl FnMut() -> Result<(), Failure>,
) -> Result<f64, Failure> {
    let before = clock();
    for _ in 0..times {
        call()?;
    }
    Ok((clock() - before).as_secs_f64() * 1e6 / f64::from(times))
}

fn copies(
    bench: &mut Bench<'_>,
    case: &Case<'_>,
    method: Method,
    direction: Direction,
) -> Result<(), Failure> {
    let name = if direction == Direction::Out { "out" } else { "in" };
    bench.step(&format!("processor time, {name}"));
    let times = if bench.options.quick { 4 } else { 100 };
    let table = case.table(direction);
    let [mut ours, mut waited, mut alone] = [const { Vec::new() }; 3];
    ours::copy(direction, &case.batch)?;
    let calls = driver_calls();
    for _ in 0..bench.rounds {
        let copy = || ours::copy(direction, &case.batch).map(drop);
        ours.push(microseconds(times, process_time, copy)?);
        let copy = || case.buffers.copy(table, method).map(drop).map_err(failed);
        waited.push(microseconds(times, process_time, copy)?);
        let mut sum = Duration::ZERO;
        for _ in 0..times {
            sum += case.buffers.submit_time(table, method, thread_time).map_err(failed)?;
        }
        alone.push(sum.as_secs_f64() * 1e6 / f64::from(times));
    }
    let copies = u64::from(times) * bench.rounds as u64;
    let calls = (driver_calls() - calls) as f64 / copies as f64;
    let what = format!("{name}, {COUNT} × 4 KiB");
    let ratio = Spread::ratio(&ours, &waited);
    let row = Row::new("gpu cpu", format!("{what}, all threads"), "µs", Spread::of(ours))
        .beside("batch call and wait", Spread::of(waited))
        .beside("batch call alone", Spread::of(alone))
        .judged("batch call and wait", ratio, crate::report::Bound::AtMost(TIMES_BATCH));
    bench.rows.push(row);
    let calls =
        Row::new("gpu cpu", format!("{what}, calls that copy"), "", Spread::of(vec![calls]));
    bench.rows.push(calls.at_most(CALLS));
    Ok(())
}

/// Calls of the driver that copied for kvferry, so far.
fn driver_calls() -> u64 {
    let calls = |gpu: Arc<Gpu>| {
        let it = gpu.counters();
        it.single_calls + it.batch_calls + it.kernel_calls + it.gather_calls
    };
    Gpu::all().into_iter().map(calls).sum()
}

/// Measures the planner by itself, for the copies of the table out of the device.
fn plans(bench: &mut Bench<'_>, case: &Case<'_>) -> Result<(), Failure> {
    let base = case.buffers.device_address();
    let job = |piece: &raw::Piece| Job {
        src: base + piece.device_at as u64,
        dst: (1 << 40) + piece.host_at as u64,
        len: piece.len as u64,
    };
    let jobs: Vec<Job> = case.pieces.iter().map(job).collect();
    let (mut planner, mut plan) = (Planner::default(), Plan::default());
    let calibration = Calibration::default();
    let mut times = Vec::new();
    for _ in 0..bench.rounds {
        let plan = || {
            let capabilities = &Capabilities::ENGINE;
            planner
                .plan(&jobs, Direction::Out, &calibration, capabilities, &mut plan)
                .map_err(failed)
        };
        times.push(microseconds(100, thread_time, plan)?);
    }
    let work = format!("planning {COUNT} copies");
    bench.rows.push(Row::new("gpu cpu", work, "µs", Spread::of(times)));
    Ok(())
}

/// Measures an agent with memory of the GPU that has nothing to do after a copy.
fn idle(bench: &mut Bench<'_>) -> Result<(), Failure> {
    bench.step("idling");
    let time = Duration::from_millis(if bench.options.quick { 300 } else { 5_000 });
    std::thread::sleep(SETTLE);
    let (cpu, waits, calls, began) =
        (agent_time()?, agent_waits()?, driver_calls(), Instant::now());
    std::thread::sleep(time);
    let took = began.elapsed().as_secs_f64();
    let percent = (agent_time()? - cpu).as_secs_f64() / took * 100.0;
    let waits = (agent_waits()? - waits) as f64 / took;
    let calls = (driver_calls() - calls) as f64;
    let row = |work, unit, value| Row::new("gpu cpu", work, unit, Spread::of(vec![value]));
    bench.rows.push(row("idle agent", "% of a core", percent).at_most(IDLE));
    bench.rows.push(row("idle agent, wake-ups", "per s", waits));
    bench.rows.push(row("idle agent, calls that copy", "", calls).at_most(0.0));
    Ok(())
}
