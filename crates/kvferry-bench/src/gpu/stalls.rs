//! The longest copy of a process while another one pins host memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_cuda::Direction;
use kvferry_cuda::raw::{self, Buffers, Method, Piece, Table};

use super::bench::{Bench, failed};
use crate::child::{Child, answer_parent, value};
use crate::failure::Failure;
use crate::helper;
use crate::machine::available_memory;
use crate::report::Row;
use crate::stats::Spread;
use crate::units;

/// The longest copy, in milliseconds.
const STALL_MS: f64 = 50.0;
/// Bytes that are pinned, at most. Less if they are more than a tenth of the memory that is free.
const PINNED: u64 = 16 << 30;
const QUICK_PINNED: u64 = 16 << 20;
/// Bytes of a registration: those of a stage.
const PART: usize = 4 << 20;
/// Bytes of a copy.
const COPY: usize = 1 << 20;
/// The longest time of copies beside which nothing is pinned.
const ALONE: Duration = Duration::from_secs(2);

/// Runs the helper `gpu-pin`, which pins as many bytes as it is asked to, and answers with the seconds that it took.
pub(crate) fn run_child(device: i32) -> Result<(), Failure> {
    let context = raw::context(device).map_err(failed)?;
    answer_parent(|bytes: usize| {
        let took = raw::pin_time(&context, bytes, PART).map_err(failed)?;
        value(&took.as_secs_f64())
    })
}

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Failure> {
    const WHAT: &str = "copies while another process pins memory";
    if !bench.has_time_for(WHAT) {
        return Ok(());
    }
    bench.step(WHAT);
    let most = if bench.options.quick { QUICK_PINNED } else { PINNED };
    let bytes = usize::try_from(most.min(available_memory() / 10)).map_err(failed)?;
    let bytes = (bytes / PART).max(1) * PART;
    let buffers = Buffers::new(&bench.context, COPY, COPY).map_err(failed)?;
    let whole = [Piece { device_at: 0, host_at: 0, len: COPY }];
    let table = Table::new(&buffers, Direction::Out, &whole).map_err(failed)?;
    let mut child = helper::spawn(&["gpu-pin", &bench.options.device.to_string()])?;
    // The process takes its context before anything is measured.
    if let Err(failure) = child.ask::<usize, f64>(&PART) {
        bench.left_out.push(format!("{WHAT}: {failure}"));
        return Ok(());
    }
    let [mut beside, mut alone]: [Vec<f64>; 2] = Default::default();
    for _ in 0..bench.rounds.min(3) {
        if !beside.is_empty() && !bench.budget.has_time(Instant::now()) {
            break;
        }
        match while_pinned(&mut child, bytes, &buffers, &table) {
            Ok((longest, took)) => {
                beside.push(longest);
                let (began, time) = (Instant::now(), took.min(ALONE));
                alone.push(longest_copy(&buffers, &table, || began.elapsed() >= time)?);
            }
            Err(failure) => {
                bench.left_out.push(format!("{WHAT}: {failure}"));
                break;
            }
        }
    }
    if !beside.is_empty() {
        let pinned = units::bytes(bytes as u64);
        let work = format!("longest copy of 1 MiB while another process pins {pinned}");
        let row = Row::new("gpu first", work, "ms", Spread::of(beside));
        bench.rows.push(row.beside("nothing pinned", Spread::of(alone)).at_most(STALL_MS));
    }
    Ok(())
}

/// Copies while the other process pins memory. Returns the milliseconds of the longest copy, and the time of the pinning.
fn while_pinned(
    child: &mut Child,
    bytes: usize,
    buffers: &Buffers,
    table: &Table,
) -> Result<(f64, Duration), Failure> {
    let is_pinned = AtomicBool::new(false);
    thread::scope(|scope| {
        let pinning = scope.spawn(|| {
            let took = child.ask::<usize, f64>(&bytes);
            is_pinned.store(true, Ordering::SeqCst);
            took
        });
        let longest = longest_copy(buffers, table, || is_pinned.load(Ordering::SeqCst));
        let took = pinning.join().expect("threads of a bench don't panic")?;
        Ok::<_, Failure>((longest?, Duration::from_secs_f64(took)))
    })
}

/// Copies again and again until `is_over`. Returns the milliseconds of the longest copy.
fn longest_copy(
    buffers: &Buffers,
    table: &Table,
    is_over: impl Fn() -> bool,
) -> Result<f64, Failure> {
    let mut longest = Duration::ZERO;
    loop {
        longest = longest.max(buffers.copy(table, Method::Single).map_err(failed)?);
        if is_over() {
            return Ok(longest.as_secs_f64() * 1e3);
        }
    }
}
