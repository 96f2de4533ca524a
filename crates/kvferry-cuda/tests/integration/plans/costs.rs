//! What a plan costs, against the best of many.

use crate::plans::devices::{ALL, STAGING, calibrations, cost, packed, turned};
use kvferry_cuda::{
    Calibration, Capabilities, Costs, Direction, Job, Method, Plan, Planner, Staging,
};

/// The time of a choice by the calibration: the jobs with `true` are copied by the copy engine, the others by `rest`.
/// `None` if it is no choice.
fn time(
    jobs: &[Job],
    is_engine: impl Fn(usize) -> bool,
    rest: Method,
    costs: &Costs,
    limits: &Capabilities,
) -> Option<f64> {
    let (mut engine, mut entries, mut bytes, mut ns) = (Vec::new(), 0, 0, 0.0);
    let mut run: Option<(u64, u64)> = None;
    for (index, job) in jobs.iter().enumerate() {
        if is_engine(index) {
            engine.push(job.len);
            continue;
        }
        let kernel = limits.kernel?;
        let lead = if job.len > kernel.slice_bytes { job.dst % 128 } else { 0 };
        let slices = (lead + job.len).div_ceil(kernel.slice_bytes);
        if job.len > kernel.slice_bytes * 64 {
            return None;
        }
        entries += slices;
        bytes += job.len;
        ns += costs.of(rest)?.entry.at(job.len) * job.unit().slowdown();
        if rest == Method::Gather {
            run = match run {
                Some((start, end)) if end == job.dst => Some((start, end + job.len)),
                _ => {
                    ns += run.map_or(0.0, |(start, end)| costs.copy.entry.at(end - start));
                    Some((job.dst, job.dst + job.len))
                }
            };
        }
    }
    ns += run.map_or(0.0, |(start, end)| costs.copy.entry.at(end - start));
    if entries > 0 {
        let windows =
            if rest == Method::Gather { bytes.div_ceil(limits.staging?.bytes) } else { 1 };
        let launches = entries.div_ceil(u64::from(limits.kernel?.jobs_max)).max(windows);
        ns += launches as f64 * costs.of(rest)?.call_ns;
    }
    Some(ns + engine_time(&engine, costs, limits))
}

fn engine_time(lens: &[u64], costs: &Costs, limits: &Capabilities) -> f64 {
    let single = lens.iter().map(|&len| costs.copy.call_ns + costs.copy.entry.at(len)).sum();
    let Some(batch) = costs.batch.filter(|_| limits.batch) else { return single };
    let entries: f64 = lens.iter().map(|&len| batch.entry.at(len)).sum();
    let batched = lens.len().div_ceil(128) as f64 * batch.call_ns + entries;
    if lens.len() <= 4 { batched.min(single) } else { batched }
}

/// The least time of all choices of engine and kernel.
fn exhaustive(jobs: &[Job], costs: &Costs, limits: &Capabilities) -> f64 {
    let choices = (0u32..1 << jobs.len()).flat_map(|bits| {
        [Method::Kernel, Method::Gather]
            .map(|rest| time(jobs, |index| bits >> index & 1 == 1, rest, costs, limits))
    });
    choices.flatten().min_by(f64::total_cmp).expect("the engine copies all")
}

/// The least time of choices by size: the engine copies what is larger, the kernel what is smaller, and of those of
/// one size the engine copies none, all, or as many as fill its batches.
fn by_thresholds(jobs: &[Job], costs: &Costs, limits: &Capabilities) -> f64 {
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by_key(|&index| {
        std::cmp::Reverse((jobs[index].unit().slowdown() as u64, jobs[index].len))
    });
    let mut by_len = order.clone();
    by_len.sort_by_key(|&index| std::cmp::Reverse(jobs[index].len));
    let mut best = f64::INFINITY;
    for order in [order, by_len] {
        let mut rank = vec![0; jobs.len()];
        order.iter().enumerate().for_each(|(at, &index)| rank[index] = at);
        let is_cut = |cut: usize| {
            let len = |at: usize| order.get(at).map(|&index| jobs[index].len);
            cut == 0 || cut.is_multiple_of(128) || len(cut) != len(cut - 1)
        };
        for cut in (0..=jobs.len()).filter(|cut| is_cut(*cut)) {
            for rest in [Method::Kernel, Method::Gather] {
                let ns = time(jobs, |index| rank[index] < cut, rest, costs, limits);
                best = best.min(ns.unwrap_or(f64::INFINITY));
            }
        }
    }
    best
}

/// The time of a plan's steps by the calibration.
fn time_of(plan: &Plan, jobs: &[Job], costs: &Costs, limits: &Capabilities) -> f64 {
    let (mut ns, mut rest, mut by_engine) = (0.0, None, Vec::new());
    for step in &plan.steps {
        let cost = costs.of(step.method).expect("a method with costs");
        for job in plan.jobs_of(step) {
            let is_run =
                limits.staging.is_some_and(|s| (s.address..s.address + s.bytes).contains(&job.src));
            match step.method {
                Method::Copy => ns += cost.call_ns + cost.entry.at(job.len),
                Method::Batch => ns += cost.entry.at(job.len),
                Method::Kernel | Method::Gather => rest = Some(cost),
            }
            if matches!(step.method, Method::Copy | Method::Batch) && !is_run {
                by_engine.push(job.dst);
            }
        }
        ns += if step.method == Method::Copy { 0.0 } else { cost.call_ns };
    }
    by_engine.sort_unstable();
    let others = jobs.iter().filter(|job| by_engine.binary_search(&job.dst).is_err());
    let by_kernel = |job: &Job| rest.expect("a kernel").entry.at(job.len) * job.unit().slowdown();
    ns + others.map(by_kernel).sum::<f64>()
}

/// Jobs in the order of their host addresses, of which none follow each other on both sides.
fn table(random: &mut fastrand::Rng, count: usize) -> Vec<Job> {
    let sizes: Vec<u64> = (0..random.usize(1..5)).map(|_| size(random)).collect();
    let is_packed = random.bool();
    let is_aligned = random.u8(..4) > 0;
    let (mut src, mut dst) = (1 << 40, 1 << 30);
    let mut jobs = Vec::with_capacity(count);
    for _ in 0..count {
        let mut len = if random.u8(..8) == 0 {
            size(random)
        } else {
            random.choice(&sizes).copied().expect("one")
        };
        let mut gap = 16 * random.u64(1..300);
        if is_aligned {
            len = len.next_multiple_of(16);
        } else {
            gap += random.u64(..16);
        }
        if !is_packed && random.bool() {
            dst += 16 * random.u64(1..20);
        }
        src += gap;
        jobs.push(Job { src, dst, len });
        (src, dst) = (src + len, dst + len);
    }
    jobs
}

/// Blocks of one size, one after the other on the host.
fn blocks(random: &mut fastrand::Rng, count: usize) -> Vec<Job> {
    let len = size(random).next_multiple_of(128);
    let mut src = 1 << 40;
    (0..count as u64)
        .map(|at| {
            src += len + 16 * random.u64(1..300);
            Job { src, dst: (1 << 30) + at * len, len }
        })
        .collect()
}

fn size(random: &mut fastrand::Rng) -> u64 {
    let octave = random.u32(4..22);
    random.u64(1 << octave..2 << octave)
}

fn limits(random: &mut fastrand::Rng) -> Capabilities {
    let batch = random.u8(..8) > 0;
    let staging = if random.bool() { Some(STAGING) } else { None };
    Capabilities { batch, staging, ..ALL }
}

/// A device with fixed costs and rates as anyone may measure: the copy engine has one rate, however it is called.
fn device(random: &mut fastrand::Rng) -> Calibration {
    let mut between = |low: f64, high: f64| low * (high / low).powf(random.f64());
    let link = between(8.0, 60.0);
    let mut calibration = Calibration::default();
    let copy = cost(0.0, between(1e3, 10e3), link);
    let batch = Some(cost(between(1e3, 30e3), between(100.0, 2e3), link * between(0.9, 1.0)));
    let kernel = Some(cost(between(3e3, 50e3), between(3.0, 200.0), link * between(0.1, 1.1)));
    let gather = Some(cost(between(3e3, 50e3), between(2.0, 100.0), between(100.0, 2e3)));
    calibration.out = Costs { copy, batch, kernel, gather };
    calibration.into = Costs { gather: None, ..calibration.out.clone() };
    calibration
}

struct Worst(f64, String);

fn compare(
    seed: u64,
    tables: usize,
    counts: std::ops::Range<usize>,
    table: fn(&mut fastrand::Rng, usize) -> Vec<Job>,
    best: fn(&[Job], &Costs, &Capabilities) -> f64,
) {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut planner, mut plan) = (Planner::default(), Plan::default());
    let known = calibrations();
    let mut worst = Worst(0.0, String::new());
    for _ in 0..tables {
        let count = random.usize(counts.clone());
        let (jobs, limits) = (table(&mut random, count), limits(&mut random));
        let direction = if random.bool() { Direction::Out } else { Direction::In };
        let (name, calibration) = match random.usize(..known.len() + 3) {
            at if at < known.len() => known[at].clone(),
            _ => ("random", device(&mut random)),
        };
        let costs = calibration.costs(direction);
        planner.plan(&jobs, direction, &calibration, &limits, &mut plan).expect("valid");
        let ns = time_of(&plan, &jobs, costs, &limits);
        let error = (ns - plan.modelled_ns).abs() / ns;
        assert!(error < 1e-9, "{name}: {ns} ns, the plan says {}", plan.modelled_ns);
        let ratio = ns / best(&jobs, costs, &limits);
        if ratio > worst.0 {
            let methods: Vec<_> = plan.steps.iter().map(|step| (step.method, step.count)).collect();
            worst = Worst(
                ratio,
                format!("{name} {direction:?} {limits:?}\n{jobs:?}\n{methods:?}\n{costs:?}"),
            );
        }
    }
    println!("{tables} tables: at most {:.4} of the best", worst.0);
    assert!(worst.0 <= 1.1, "{} of the best: {}", worst.0, worst.1);
}

#[test]
fn plans_of_few_jobs_take_at_most_a_tenth_more_than_the_best_choice() {
    compare(11, 100_000, 1..7, table, exhaustive);
    compare(12, 2_000, 7..11, table, exhaustive);
}

#[test]
fn plans_of_few_jobs_take_at_most_a_tenth_more_on_other_tables() {
    for seed in 21..31 {
        compare(seed, 20_000, 1..7, table, exhaustive);
        compare(seed + 10, 2_000, 7..11, table, exhaustive);
    }
}

#[test]
fn plans_of_many_jobs_take_at_most_a_tenth_more_than_the_best_thresholds() {
    compare(13, 2_000, 11..300, table, by_thresholds);
    compare(14, 200, 1000..1025, table, by_thresholds);
}

#[test]
fn plans_of_blocks_of_one_size_take_at_most_a_tenth_more_than_the_best_thresholds() {
    compare(15, 2_000, 100..300, blocks, by_thresholds);
    compare(16, 200, 1000..1025, blocks, by_thresholds);
}

#[test]
#[ignore = "a measurement"]
fn time_to_plan_few_jobs() {
    let (mut planner, mut plan) = (Planner::default(), Plan::default());
    for count in [1, 4, 8, 12, 16, 32] {
        let mut random = fastrand::Rng::with_seed(5);
        let tables: Vec<Vec<Job>> = (0..2000).map(|_| table(&mut random, count)).collect();
        for (name, calibration) in calibrations() {
            let start = std::time::Instant::now();
            for jobs in &tables {
                planner.plan(jobs, Direction::Out, &calibration, &ALL, &mut plan).expect("valid");
            }
            let ns = start.elapsed().as_nanos() / tables.len() as u128;
            println!("{count} jobs, {name}: {ns} ns");
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn time_to_plan_1024_jobs() {
    let limits = Capabilities { staging: Some(Staging { bytes: 32 << 20, ..STAGING }), ..ALL };
    let mut random = fastrand::Rng::with_seed(5);
    let mixed: Vec<u64> = (0..1024).map(|_| 16 * random.u64(1..2048)).collect();
    let two: Vec<u64> = (0..1024).map(|_| if random.bool() { 2048 } else { 32_768 }).collect();
    for (name, lens) in [("equal", vec![4096; 1024]), ("two sizes", two), ("mixed", mixed)] {
        let out = packed(lens, 4096);
        let mut into = turned(&out);
        random.shuffle(&mut into);
        let cases = [(Direction::Out, &out), (Direction::In, &into)];
        for (device, calibration) in calibrations() {
            for (direction, jobs) in cases {
                let (mut planner, mut plan) = (Planner::default(), Plan::default());
                let mut times: Vec<u128> = (0..2001)
                    .map(|_| {
                        let start = std::time::Instant::now();
                        planner
                            .plan(jobs, direction, &calibration, &limits, &mut plan)
                            .expect("valid");
                        start.elapsed().as_nanos()
                    })
                    .collect();
                times.sort_unstable();
                let [least, median] = [0, times.len() / 2].map(|at| times[at] as f64 / 1e3);
                println!("{name}, {device}, {direction:?}: {least:.1} to {median:.1} µs");
            }
        }
    }
}
