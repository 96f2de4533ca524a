//! A computation beside copies that never pause, and the speed of both.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_cuda::raw::{Buffers, Compute, Method, Piece};
use kvferry_cuda::{Direction, ptx};

use super::bench::{Bench, failed, gigabytes_per_second};
use super::exposed::{LAYERS, compute_all};
use super::ours::{self, Subject};
use super::rounds::ROUNDS_MIN;
use super::tables::{Case, scattered};
use crate::failure::Failure;
use crate::report::Row;
use crate::stats::Spread;
use crate::units;

/// The most time of the computation beside copies, as a multiple of its time by itself: copies by the copy engine, and
/// copies of small blocks, which a kernel makes.
const SLOWDOWN: f64 = 1.05;
const SLOWDOWN_BY_KERNEL: f64 = 1.1;
/// Bytes of a small block.
const BLOCK: usize = 4 << 10;
/// Blocks of a launch with --quick.
const QUICK_BLOCKS: u32 = 1;

/// A copy that is made again and again.
type Again<'a> = &'a (dyn Fn() -> Result<Duration, Failure> + Sync);

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Failure> {
    if !bench.has_time_for("computation beside copies") {
        return Ok(());
    }
    bench.step("computation beside copies");
    let quick = bench.options.quick;
    let bytes: usize = if quick { 256 << 10 } else { 64 << 20 };
    let time = Duration::from_millis(if quick { 20 } else { 200 });
    let mut buffers = Buffers::new(&bench.context, bytes, bytes).map_err(failed)?;
    let kernel = buffers.load_kernel(ptx::TEXT, ptx::ENTRY, ptx::THREADS, 32);
    let blocks = bench.context.device().info().map_err(failed)?.multiprocessors.max(1) * 2;
    let blocks_max = if quick { QUICK_BLOCKS } else { u32::MAX };
    let compute = Compute::new(&bench.context, blocks_max).map_err(failed)?;
    let rounds = compute.rounds_for(time / LAYERS as u32).map_err(failed)?;
    let subject = Subject::new(&buffers)?;
    let whole = vec![Piece { device_at: 0, host_at: 0, len: bytes }];
    let case = Case::new(&buffers, &subject, whole)?;
    let what = format!("copies of {}", units::bytes(bytes as u64));
    let plain = (Method::Single, "cuMemcpyAsync");
    measure(bench, &compute, rounds, &case, &what, plain, SLOWDOWN)?;
    drop(case);
    let count = bytes / BLOCK;
    let what = format!("copies of 4 KiB × {}", units::count(count as u64));
    match kernel {
        Ok(kernel) if bench.has_time_for(&format!("computation beside {what}")) => {
            let case = Case::new(&buffers, &subject, scattered(BLOCK, count, 7))?;
            let plain = (Method::Gather(kernel, blocks), "gather");
            measure(bench, &compute, rounds, &case, &what, plain, SLOWDOWN_BY_KERNEL)?;
        }
        Ok(_) => {}
        Err(why) => bench.left_out.push(format!("computation beside {what}: {why}")),
    }
    Ok(())
}

/// Measures the computation by itself, beside kvferry's copies out of the device, and beside those of a plain method.
fn measure(
    bench: &mut Bench<'_>,
    compute: &Compute,
    rounds: u32,
    case: &Case<'_>,
    what: &str,
    plain: (Method, &'static str),
    slowdown: f64,
) -> Result<(), Failure> {
    let (method, who) = plain;
    let table = case.table(Direction::Out);
    let ours = || ours::copy(Direction::Out, &case.batch);
    let raw = || case.buffers.copy(table, method).map_err(failed);
    // What a first copy makes ready is not measured.
    ours()?;
    raw()?;
    let mut alone = Vec::new();
    let [mut times, mut rates]: [[Vec<f64>; 2]; 2] = Default::default();
    for round in 0..bench.rounds {
        if round >= ROUNDS_MIN && !bench.budget.has_time(Instant::now()) {
            break;
        }
        bench.step(&format!("computation beside {what}, round {}", round + 1));
        alone.push(compute_all(compute, rounds)?.as_secs_f64());
        let copies: [Again<'_>; 2] = [&ours, &raw];
        for (at, copy) in copies.into_iter().enumerate() {
            let (time, made) = beside(compute, rounds, copy)?;
            times[at].push(time.as_secs_f64());
            rates[at].push(gigabytes_per_second(made * table.bytes(), time));
        }
    }
    let [ours, raw] = times.map(|times| Spread::ratio(&times, &alone));
    let [our_rate, raw_rate] = rates.map(Spread::of);
    let by_itself = Spread::of(alone.iter().map(|seconds| seconds * 1e3).collect());
    let row = |work: String, unit, value| Row::new("gpu beside", work, unit, value);
    bench.rows.extend([
        row(format!("computation by itself, then beside {what}"), "ms", by_itself),
        row(format!("computation beside {what}"), "×", ours).beside(who, raw).at_most(slowdown),
        row(format!("{what} beside the computation"), "GB/s", our_rate).beside(who, raw_rate),
    ]);
    Ok(())
}

/// Runs the computation while another thread makes a copy again and again. Returns the time of the computation, and the
/// number of copies.
fn beside(compute: &Compute, rounds: u32, copy: Again<'_>) -> Result<(Duration, u64), Failure> {
    let (has_begun, is_computed) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let copies = scope.spawn(|| {
            has_begun.store(true, Ordering::SeqCst);
            let mut made = 0;
            while !is_computed.load(Ordering::SeqCst) {
                copy()?;
                made += 1;
            }
            Ok::<_, Failure>(made)
        });
        while !has_begun.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let computed = compute_all(compute, rounds);
        is_computed.store(true, Ordering::SeqCst);
        let made = copies.join().expect("threads of a bench don't panic")?;
        Ok::<_, Failure>((computed?, made))
    })
}
