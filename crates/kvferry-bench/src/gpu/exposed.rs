//! A handoff of layers while they are computed.

use std::time::{Duration, Instant};

use kvferry::Batch;
use kvferry_cuda::raw::{Buffers, Compute, Piece};

use super::bench::{Bench, failed};
use super::rounds::ROUNDS_MIN;
use super::target::{Link, Memory};
use crate::failure::Failure;
use crate::report::Row;
use crate::stats::Spread;
use crate::units;

/// Layers of the computation, each a launch.
pub(super) const LAYERS: usize = 32;
/// Bytes of a block. The blocks of a layer are scattered as an engine's are.
const BLOCK: usize = 64 << 10;
/// The most time that copies take after the last layer is computed, as a part of the time of all copies.
const EXPOSED: f64 = 0.05;
/// The most time of the computation beside copies, as a multiple of its time without copies.
const SLOWDOWN: f64 = 1.05;
/// Time of a layer's computation, as a multiple of the time of its copies.
const COMPUTE: f64 = 1.3;
/// Blocks of a launch with --quick.
const QUICK_BLOCKS: u32 = 1;
/// The longest wait for the transfer of one layer.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Failure> {
    let bytes: usize = if bench.options.quick { 4 << 20 } else { 1 << 30 };
    if !bench.has_time_for("exposed time") {
        return Ok(());
    }
    bench.step("exposed time");
    let buffers = Buffers::new(&bench.context, bytes, 4096).map_err(failed)?;
    let blocks_max = if bench.options.quick { QUICK_BLOCKS } else { u32::MAX };
    let compute = Compute::new(&bench.context, blocks_max).map_err(failed)?;
    for (name, transports) in [("local", "tcp,local"), ("tcp", "tcp")] {
        if bench.has_time_for(&format!("exposed time over {name}")) {
            let link = Link::new(bench.options.device, transports, &buffers)?;
            over(bench, &link, &compute, name, bytes)?;
        }
    }
    Ok(())
}

/// Times of a round, in seconds.
#[derive(Default)]
struct Times {
    copies: Vec<f64>,
    compute: Vec<f64>,
    beside: Vec<f64>,
    left: Vec<f64>,
}

fn over(
    bench: &mut Bench<'_>,
    link: &Link,
    compute: &Compute,
    name: &'static str,
    bytes: usize,
) -> Result<(), Failure> {
    let layers = layers(link, bytes)?;
    copy_all(link, &layers)?;
    let alone = copy_all(link, &layers)?;
    let layer = alone.mul_f64(COMPUTE / LAYERS as f64);
    let rounds_of_layer = compute.rounds_for(layer).map_err(failed)?;
    let mut times = Times::default();
    for round in 0..bench.rounds {
        if round >= ROUNDS_MIN && !bench.budget.has_time(Instant::now()) {
            break;
        }
        bench.step(&format!("exposed time over {name}, round {}", round + 1));
        times.copies.push(copy_all(link, &layers)?.as_secs_f64());
        times.compute.push(compute_all(compute, rounds_of_layer)?.as_secs_f64());
        let (beside, left) = hand_over(link, compute, rounds_of_layer, &layers)?;
        times.beside.push(beside.as_secs_f64());
        times.left.push(left.as_secs_f64());
    }
    let milliseconds = |seconds: &[f64]| Spread::of(seconds.iter().map(|it| it * 1e3).collect());
    let what = units::bytes(bytes as u64);
    let row = |work: String, unit, value| Row::new("gpu exposed", work, unit, value).over(name);
    bench.rows.extend([
        row(format!("copies of {what} by themselves"), "ms", milliseconds(&times.copies)),
        row("computation by itself".into(), "ms", milliseconds(&times.compute)),
        row("computation beside copies".into(), "ms", milliseconds(&times.beside)),
        row("left when all is computed".into(), "ms", milliseconds(&times.left)),
        row(
            "the same as a part of the copies".into(),
            "",
            Spread::ratio(&times.left, &times.copies),
        )
        .at_most(EXPOSED),
        row(
            "computation beside copies and without".into(),
            "×",
            Spread::ratio(&times.beside, &times.compute),
        )
        .at_most(SLOWDOWN),
    ]);
    Ok(())
}

/// Makes a batch for each layer. The blocks of a layer lie apart.
fn layers(link: &Link, bytes: usize) -> Result<Vec<Batch>, Failure> {
    let blocks = bytes / LAYERS / BLOCK;
    let layer = |layer: usize| {
        // The neighbours of a block belong to other layers.
        let place = |block: usize| (block * LAYERS + layer) * BLOCK;
        let piece = |block| Piece { device_at: place(block), host_at: block * BLOCK, len: BLOCK };
        link.batch(Memory::Device, &(0..blocks).map(piece).collect::<Vec<_>>())
    };
    (0..LAYERS).map(layer).collect()
}

fn copy_all(link: &Link, layers: &[Batch]) -> Result<Duration, Failure> {
    let began = Instant::now();
    let transfers: Vec<_> = layers.iter().map(|layer| link.start_write(layer)).collect();
    for transfer in transfers {
        transfer.wait(PATIENCE).ok_or_else(|| failed("a transfer does not end"))??;
    }
    Ok(began.elapsed())
}

/// Computes all layers. Returns the time.
pub(super) fn compute_all(compute: &Compute, rounds: u32) -> Result<Duration, Failure> {
    let began = Instant::now();
    for _ in 0..LAYERS {
        compute.start(rounds).map_err(failed)?;
    }
    compute.wait().map_err(failed)?;
    Ok(began.elapsed())
}

/// Writes each layer after its computation. Returns the time of the computation, and the time from its end to the end
/// of the last transfer.
fn hand_over(
    link: &Link,
    compute: &Compute,
    rounds: u32,
    layers: &[Batch],
) -> Result<(Duration, Duration), Failure> {
    let mut transfers = Vec::with_capacity(layers.len());
    let began = Instant::now();
    for layer in layers {
        compute.start(rounds).map_err(failed)?;
        let mut layer = layer.clone();
        layer.set_after(compute.after().map_err(failed)?);
        transfers.push(link.start_write(&layer));
    }
    compute.wait().map_err(failed)?;
    let computed = Instant::now();
    for transfer in transfers {
        transfer.wait(PATIENCE).ok_or_else(|| failed("a transfer does not end"))??;
    }
    Ok((computed - began, computed.elapsed()))
}
