//! Tables of scattered blocks: kvferry's copies beside each method of the driver.

use kvferry_cuda::raw::{self, Buffers, Method};
use kvferry_cuda::{Direction, ptx};

use super::bench::{Bench, failed};
use super::ours::{self, Subject};
use super::rounds::{self, TimedWork, rate};
use super::tables::{Case, scattered};
use crate::failure::Failure;
use crate::report::{Bound, Figure, Row};
use crate::stats::Spread;
use crate::units;

/// Required share of the best plain method at each point.
const SHARE: f64 = 0.95;
/// Required multiple of the batch call, for many small blocks into the device.
const TIMES_BATCH: f64 = 3.0;
const MANY: usize = 10_000;
const SMALL: usize = 16 << 10;
/// Required share of 64 MiB in one piece, for 16 384 blocks of 4 KiB that go out as contiguous bytes.
const SHARE_OF_CONTIGUOUS: f64 = 0.8;

/// The most time of kvferry's kernel, as a multiple of the time of one that nvcc has compiled.
const TIMES_NVCC: f64 = 1.05;

const BLOCKS: [usize; 6] = [4 << 10, 16 << 10, 28 << 10, 64 << 10, 256 << 10, 2 << 20];
const COUNTS: [usize; 3] = [1024, 16_384, 64];
const QUICK_COUNTS: [usize; 1] = [16];

/// Blocks of a kernel's launch: few and many on mapped host memory, as many as run at a time inside the device.
const KERNEL_BLOCKS: [u32; 2] = [16, 128];
const GATHER_BLOCKS_OF_ONE: u32 = 2;

/// Entries of `bench/gpu/copy.cu`: name, threads of a block, threads that share a job.
const ENTRIES: [(&str, u32, u32); 2] = [("copy_by_warps", 256, 32), ("copy_by_blocks", 256, 256)];

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Failure> {
    let quick = bench.options.quick;
    let default = if quick { 4 << 20 } else { 2 << 30 };
    let host = bench.options.host_memory.unwrap_or(default).max(1 << 20);
    let host = usize::try_from(host).expect("at most what can be addressed");
    bench.step("pinning host memory");
    let mut buffers = Buffers::new(&bench.context, host, host).map_err(failed)?;
    let mut methods = raw::supported().map_err(failed)?;
    methods.extend(kernels(bench, &mut buffers));
    let subject = Subject::new(&buffers)?;
    let (counts, blocks) =
        if quick { (&QUICK_COUNTS[..], &BLOCKS[..3]) } else { (&COUNTS[..], &BLOCKS[..]) };
    for &count in counts {
        for &block in blocks {
            let name = format!("{} × {}", units::bytes(block as u64), units::count(count as u64));
            if block * count > host {
                let more = "more than --host-memory";
                bench.left_out.push(format!("scattered {name}: {more}"));
                continue;
            }
            if bench.has_time_for(&format!("scattered {name}")) {
                let pieces = scattered(block, count, (block + count) as u64);
                let case = Case::new(&buffers, &subject, pieces)?;
                for direction in [Direction::Out, Direction::In] {
                    point(bench, &case, &methods, direction, &name)?;
                }
            }
        }
    }
    Ok(())
}

/// Loads the kernels of this program and of --kernel. Lists those that can't be used as left out.
fn kernels(bench: &mut Bench<'_>, buffers: &mut Buffers) -> Vec<Method> {
    let mut methods = Vec::new();
    let multiprocessors = bench.context.device().info().map_or(1, |info| info.multiprocessors);
    let gather_blocks = multiprocessors.max(1) * GATHER_BLOCKS_OF_ONE;
    match buffers.load_kernel(ptx::TEXT, ptx::ENTRY, ptx::THREADS, 32) {
        Ok(kernel) => {
            methods.extend(KERNEL_BLOCKS.map(|blocks| Method::Kernel(kernel, blocks)));
            methods.push(Method::Gather(kernel, gather_blocks));
        }
        Err(why) => bench.left_out.push(format!("kvferry's kernel: {why}")),
    }
    let Some(file) = &bench.options.kernel else { return methods };
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(why) => {
            bench.left_out.push(format!("--kernel {}: {why}", file.display()));
            return methods;
        }
    };
    for (entry, threads, threads_of_job) in ENTRIES {
        match buffers.load_kernel(&text, entry, threads, threads_of_job) {
            Ok(kernel) => {
                methods.extend(KERNEL_BLOCKS.map(|blocks| Method::Kernel(kernel, blocks)));
                methods.push(Method::Gather(kernel, gather_blocks));
            }
            Err(why) => bench.left_out.push(format!("--kernel: {why}")),
        }
    }
    methods
}

/// The time of kvferry's kernel on mapped memory, as a multiple of the time of the fastest kernel of --kernel. `None` if
/// one of them lacks rounds.
fn kernel_times(figures: &[Figure], rounds: usize) -> Option<Spread> {
    let fastest = |prefix: &str| {
        let kernels = figures.iter().filter(|figure| figure.who.starts_with(prefix));
        let whole =
            kernels.flat_map(|figure| &figure.spread).filter(|it| it.rounds.len() == rounds);
        whole.max_by(|a, b| a.median.total_cmp(&b.median))
    };
    // The figures are rates, so that the ratio of times is the other way round.
    Some(Spread::ratio(&fastest("copy_by_")?.rounds, &fastest("kernel ")?.rounds))
}

/// Measures one table in one direction.
fn point(
    bench: &mut Bench<'_>,
    case: &Case<'_>,
    methods: &[Method],
    direction: Direction,
    name: &str,
) -> Result<(), Failure> {
    let way = if direction == Direction::Out { "out" } else { "in" };
    let work = format!("{way} {name}");
    bench.step(&work);
    case.verify_ours(direction)?;
    let mut ways: Vec<TimedWork<'_>> = vec![Box::new(|| ours::copy(direction, &case.batch))];
    for &method in methods {
        case.verify(direction, method)?;
        let copy = move || case.buffers.copy(case.table(direction), method).map_err(failed);
        ways.push(Box::new(copy));
    }
    let seconds = rounds::run(&mut ways, bench.rounds, &bench.budget, true)?;
    let bytes = case.table(direction).bytes();
    let mut rates = seconds.iter().map(|seconds| rate(seconds, bytes));
    let ours = rates.next().expect("kvferry is the first way");
    let figures: Vec<Figure> = methods
        .iter()
        .zip(rates)
        .map(|(method, spread)| Figure {
            who: method.name(case.buffers).into(),
            ..Figure::of("", spread)
        })
        .collect();
    bench.rows.push(row(work, case, direction, ours, figures, bench.pinned_out.as_ref()));
    Ok(())
}

/// The row of a point, with the bounds that its figures must meet.
fn row(
    work: String,
    case: &Case<'_>,
    direction: Direction,
    ours: Spread,
    raw: Vec<Figure>,
    contiguous: Option<&Spread>,
) -> Row {
    let median = |figure: &&Figure| figure.spread.as_ref().map_or(0.0, |spread| spread.median);
    let rounds = ours.rounds.len();
    let is_whole =
        |figure: &&Figure| figure.spread.as_ref().is_some_and(|it| it.rounds.len() == rounds);
    // Ways that were left out early are slower.
    let best = raw.iter().filter(is_whole).max_by(|a, b| median(a).total_cmp(&median(b)));
    let best = best.expect("the fastest has all rounds").clone();
    let batch = raw.iter().filter(|figure| figure.who.starts_with("batch"));
    let batch = batch.map(|figure| median(&figure)).max_by(f64::total_cmp);
    let (block, count) = (case.pieces[0].len, case.pieces.len());
    let mut row = Row::new("gpu scattered", work.clone(), "GB/s", ours.clone());
    row.figures.extend(raw);
    let theirs = best.spread.expect("it has all rounds");
    let ratio = Spread::ratio(&ours.rounds, &theirs.rounds);
    let what = format!("{work}, best: {}", best.who);
    row.judge(what, "the best", Some(ratio), Bound::AtLeast(SHARE));
    if let Some(batch) =
        batch.filter(|_| direction == Direction::In && count >= MANY && block <= SMALL)
    {
        let ratio = Spread::of(ours.rounds.iter().map(|rate| rate / batch).collect());
        row.judge(
            format!("{work} (provisional)"),
            "batch",
            Some(ratio),
            Bound::AtLeast(TIMES_BATCH),
        );
    }
    if let Some(ratio) = kernel_times(&row.figures, rounds) {
        let what = format!("{work}, time of the kernel");
        row.judge(what, "nvcc's kernel", Some(ratio), Bound::AtMost(TIMES_NVCC));
    }
    let is_staging = direction == Direction::Out && count >= MANY && block == 4 << 10;
    if let Some(contiguous) = contiguous.filter(|_| is_staging) {
        let ratio = Spread::of(ours.rounds.iter().map(|rate| rate / contiguous.median).collect());
        let what = format!("{work} (provisional)");
        row.judge(what, "64 MiB in one piece", Some(ratio), Bound::AtLeast(SHARE_OF_CONTIGUOUS));
    }
    row
}
