//! What a plan copies.

use crate::plans::devices::{ALL, LIMITS, STAGING, calibrations, cost, h100, packed, turned};
use kvferry_cuda::{
    Calibration, Capabilities, Direction, Job, KernelLimits, Method, Plan, PlanError, Planner,
    Staging, Unit, plan, plan::make_disjoint,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

const SOURCES: u64 = 0x1000_0000;
const TARGETS: u64 = 0x2000_0000;

/// Memory at three places, whose bytes are found by their addresses.
struct Memory {
    sources: Vec<u8>,
    targets: Vec<u8>,
    /// How often each byte of the targets was written.
    writes: Vec<u8>,
    /// Bytes of staging, while they are valid.
    staging: BTreeMap<u64, u8>,
}

impl Memory {
    fn new(sources: usize, targets: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(7);
        let sources = (0..sources).map(|_| random.u8(..)).collect();
        Self {
            sources,
            targets: vec![0; targets],
            writes: vec![0; targets],
            staging: BTreeMap::new(),
        }
    }

    fn is_staging(&self, at: u64, len: u64, staging: Option<Staging>) -> bool {
        staging.is_some_and(|s| at >= s.address && at + len <= s.address + s.bytes)
    }

    fn copy(&mut self, job: &Job, staging: Option<Staging>) {
        let from_staging = self.is_staging(job.src, job.len, staging);
        let to_staging = self.is_staging(job.dst, job.len, staging);
        for at in 0..job.len {
            let byte = match from_staging {
                true => self.staging[&(job.src + at)],
                false => self.sources[(job.src + at - SOURCES) as usize],
            };
            if to_staging {
                self.staging.insert(job.dst + at, byte);
                continue;
            }
            let to = (job.dst + at - TARGETS) as usize;
            self.targets[to] = byte;
            self.writes[to] += 1;
        }
    }

    fn run(&mut self, plan: &Plan, limits: &Capabilities) {
        let mut next = 0;
        for step in &plan.steps {
            assert_eq!(step.first, next, "steps follow each other");
            assert!(step.count > 0);
            next += step.count;
            let jobs = plan.jobs_of(step);
            let kernel = || limits.kernel.expect("the kernel is there");
            match step.method {
                Method::Copy => assert!(jobs.len() <= limits.outstanding_max as usize),
                Method::Batch => assert!(limits.batch && jobs.len() <= 128),
                Method::Kernel | Method::Gather => {
                    assert!(jobs.len() <= kernel().jobs_max as usize);
                    assert!(jobs.iter().all(|job| (1..=kernel().slice_bytes).contains(&job.len)));
                }
            }
            if step.method == Method::Gather {
                // A window takes the place of the last one.
                self.staging.clear();
                let mut parts: Vec<&Job> = jobs.iter().collect();
                parts.sort_unstable_by_key(|part| part.dst);
                let is_apart = |pair: &[&Job]| pair[0].dst + pair[0].len <= pair[1].dst;
                assert!(parts.windows(2).all(is_apart), "parts overlap in staging");
                let is_inside = |part: &&Job| self.is_staging(part.dst, part.len, limits.staging);
                assert!(parts.iter().all(is_inside));
            }
            // No order among the copies of a step.
            let mut jobs = jobs.to_vec();
            fastrand::Rng::with_seed(next as u64).shuffle(&mut jobs);
            jobs.iter().for_each(|job| self.copy(job, limits.staging));
        }
        assert_eq!(next, plan.jobs.len(), "each job is of a step");
    }
}

/// Asserts that the plan copies what a loop over the jobs copies, and each byte once.
fn assert_copies(
    jobs: &[Job],
    (sources, targets): (u64, u64),
    direction: Direction,
    calibration: &Calibration,
    limits: &Capabilities,
) -> Plan {
    let plan = plan(jobs, direction, calibration, limits).expect("the jobs are valid");
    let [mut naive, mut planned] =
        [(); 2].map(|()| Memory::new(sources as usize, targets as usize));
    jobs.iter().for_each(|job| naive.copy(job, None));
    planned.run(&plan, limits);
    assert!(naive.targets == planned.targets, "other bytes than a loop's");
    assert!(naive.writes == planned.writes, "a byte is written twice or never");
    plan
}

/// Jobs with gaps of some bytes between their destinations and sources anywhere, in any order.
fn tables() -> impl Strategy<Value = (Vec<Job>, u64)> {
    let len = prop_oneof![1u64..40, Just(512), Just(4096), 1u64..9000, 30_000u64..70_000];
    let gap = prop_oneof![4 => Just(0u64), 1 => 1u64..20, 1 => Just(128)];
    let from = prop_oneof![3 => Just(None), 2 => (0u64..60_000).prop_map(Some)];
    let shifts = (0u64..200, 0u64..200);
    let rows = prop::collection::vec((len, gap, from), 0..40);
    (rows, shifts, any::<u64>()).prop_map(|(rows, (mut next_src, mut dst), seed)| {
        let mut jobs = Vec::new();
        for (len, gap, from) in rows {
            dst += gap;
            let src = from.unwrap_or(next_src);
            jobs.push(Job { src: SOURCES + src, dst: TARGETS + dst, len });
            (next_src, dst) = (src + len, dst + len);
        }
        let bytes = jobs.iter().map(|job| job.src + job.len - SOURCES).max().unwrap_or(0);
        fastrand::Rng::with_seed(seed).shuffle(&mut jobs);
        (jobs, bytes.max(dst))
    })
}

fn limits() -> impl Strategy<Value = Capabilities> {
    let slice_bytes = prop_oneof![Just(128u64), Just(1024), Just(16 << 10)];
    let kernel = (128u32..600, slice_bytes)
        .prop_map(|(jobs_max, slice_bytes)| KernelLimits { jobs_max, slice_bytes });
    let staging = prop_oneof![Just(4096u64), Just(10_000), Just(1 << 20)]
        .prop_map(|bytes| Staging { bytes, ..STAGING });
    let options = (prop::option::weighted(0.8, kernel), prop::option::weighted(0.8, staging));
    (any::<bool>(), options, 1u32..600, any::<bool>()).prop_map(
        |(batch, options, outstanding_max, merges)| {
            let (kernel, staging) = options;
            Capabilities { batch, kernel, staging, outstanding_max, merges }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_plan_copies_what_a_loop_copies_and_each_byte_once(
        (jobs, bytes) in tables(),
        limits in limits(),
        device in 0usize..6,
        is_out in any::<bool>(),
    ) {
        let direction = if is_out { Direction::Out } else { Direction::In };
        let calibration = &calibrations()[device].1;
        assert_copies(&jobs, (bytes, bytes), direction, calibration, &limits);
    }
}

#[test]
fn copies_that_follow_each_other_on_both_sides_are_one_copy_unless_allocations_may_end_between() {
    let mut jobs = packed([4096; 1024], 0);
    fastrand::Rng::with_seed(1).shuffle(&mut jobs);
    let merged = plan(&jobs, Direction::Out, &h100(), &ALL).expect("valid");
    assert_eq!((merged.jobs.len(), merged.steps.len()), (1, 1));
    let (job, step) = (merged.jobs[0], merged.steps[0]);
    assert_eq!((job.src, job.dst, job.len), (1 << 40, 1 << 30, 4 << 20));
    assert_eq!(step.method, Method::Copy);
    let engine = Capabilities { merges: false, ..Capabilities::ENGINE };
    let apart = plan(&jobs, Direction::Out, &h100(), &engine).expect("valid");
    assert_eq!((apart.jobs.len(), apart.calls()), (1024, 8));
}

#[test]
fn a_thousand_scattered_blocks_take_at_most_eight_calls_where_there_is_a_batch_or_a_kernel() {
    let kernel = Some(KernelLimits { jobs_max: 1 << 16, ..LIMITS });
    let staging = Some(Staging { bytes: 2 << 30, ..STAGING });
    let limits = Capabilities { kernel, staging, ..ALL };
    for (name, calibration) in calibrations() {
        for bytes in [512, 4096, 28 << 10, 64 << 10, 1 << 20] {
            let out = packed([bytes; 1024], 4096);
            let into = turned(&out);
            for (direction, jobs) in [(Direction::Out, &out), (Direction::In, &into)] {
                let plan = plan(jobs, direction, &calibration, &limits).expect("valid");
                assert!(plan.calls() <= 8, "{name} {direction:?} {bytes}: {:?}", plan.steps);
            }
        }
    }
}

#[test]
fn single_calls_are_divided_by_what_may_be_outstanding() {
    let jobs = packed([4096; 1100], 64);
    let old = Capabilities { batch: false, ..Capabilities::ENGINE };
    let plan = plan(&jobs, Direction::Out, &h100(), &old).expect("valid");
    let steps: Vec<_> = plan.steps.iter().map(|step| (step.method, step.count)).collect();
    assert_eq!(steps, [(Method::Copy, 512), (Method::Copy, 512), (Method::Copy, 76)]);
}

#[test]
fn large_copies_are_made_by_the_engine_and_small_ones_by_the_kernel_in_one_plan() {
    let lens = (0..256).map(|at| if at % 4 == 0 { 512 << 10 } else { 2048 });
    for direction in [Direction::Out, Direction::In] {
        let out = packed(lens.clone(), 4096);
        let jobs = if direction == Direction::In { turned(&out) } else { out };
        let limits = Capabilities { staging: None, ..ALL };
        let plan = plan(&jobs, direction, &h100(), &limits).expect("valid");
        let counts: Vec<_> = plan.steps.iter().map(|step| (step.method, step.count)).collect();
        assert_eq!(counts, [(Method::Kernel, 192), (Method::Batch, 64)]);
        assert!(plan.jobs_of(&plan.steps[0]).iter().all(|job| job.len == 2048));
    }
}

#[test]
fn small_blocks_leave_the_device_by_one_large_copy_where_gathering_is_fast() {
    let jobs = packed([4096; 1000], 4096);
    let plan = plan(&jobs, Direction::Out, &h100(), &ALL).expect("valid");
    let counts: Vec<_> = plan.steps.iter().map(|step| (step.method, step.count)).collect();
    assert_eq!(counts, [(Method::Gather, 1000), (Method::Copy, 1)]);
    assert_eq!(plan.jobs[1000], Job { src: STAGING.address, dst: 1 << 30, len: 4_096_000 });
}

#[test]
fn gathering_more_than_staging_holds_takes_several_windows() {
    let out: Vec<Job> = packed([3000; 1000], 8)
        .into_iter()
        .map(|job| Job {
            src: job.src - (1 << 40) + SOURCES,
            dst: job.dst - (1 << 30) + TARGETS,
            ..job
        })
        .collect();
    let limits = Capabilities { staging: Some(Staging { bytes: 1 << 20, ..STAGING }), ..ALL };
    let copied = assert_copies(&out, (4 << 20, 4 << 20), Direction::Out, &h100(), &limits);
    let methods: Vec<_> = copied.steps.iter().map(|step| step.method).collect();
    assert_eq!(methods, [Method::Gather, Method::Copy].repeat(3)[..]);
}

#[test]
fn a_gathered_run_has_the_alignment_of_its_host_address() {
    let mut jobs = packed([48; 600], 16);
    jobs.iter_mut().for_each(|job| job.dst += 80);
    jobs.remove(300);
    let plan = plan(&jobs, Direction::Out, &h100(), &ALL).expect("valid");
    assert_eq!(plan.steps[0].method, Method::Gather);
    for run in plan.jobs_of(&plan.steps[1]) {
        assert_eq!((run.src % 128, run.dst % 128), (run.dst % 128, run.src % 128));
    }
    assert!(plan.jobs_of(&plan.steps[0]).iter().all(|part| part.unit() == Unit::Sixteen));
}

#[test]
fn slices_of_a_long_job_end_at_lines() {
    let mut calibration = h100();
    calibration.into.copy = cost(0.0, 1e6, 1.0);
    calibration.into.batch = None;
    let job = Job { src: 1 << 40, dst: (1 << 30) + 72, len: 100_001 };
    let plan = plan(&[job], Direction::In, &calibration, &ALL).expect("valid");
    assert_eq!((plan.steps.len(), plan.steps[0].method), (1, Method::Kernel));
    assert_eq!(plan.jobs.len() as u64, (72u64 + 100_001).div_ceil(LIMITS.slice_bytes));
    assert!(plan.jobs[1..].iter().all(|slice| slice.dst % 128 == 0));
}

#[test]
fn what_the_kernel_would_copy_by_bytes_is_copied_by_the_engine_where_that_is_faster() {
    let mut jobs = packed([8192; 200], 4096);
    jobs.iter_mut().for_each(|job| job.src += 1);
    let unaligned = plan(&jobs, Direction::In, &h100(), &ALL).expect("valid");
    assert!(unaligned.steps.iter().all(|step| step.method == Method::Batch));
    jobs.iter_mut().for_each(|job| job.src -= 1);
    let aligned = plan(&jobs, Direction::In, &h100(), &ALL).expect("valid");
    assert!(aligned.steps.iter().all(|step| step.method == Method::Kernel));
}

#[test]
fn an_unknown_device_uses_its_copy_engine_only() {
    let jobs = packed([512; 1024], 512);
    for direction in [Direction::Out, Direction::In] {
        let plan = plan(&jobs, direction, &Calibration::default(), &ALL).expect("valid");
        assert!(plan.steps.iter().all(|step| step.method == Method::Batch));
        assert_eq!(plan.calls(), 8);
    }
}

#[test]
fn jobs_that_cannot_be_copied_are_refused_by_their_index() {
    let refused = |jobs: &[Job]| plan(jobs, Direction::Out, &h100(), &ALL).expect_err("refused");
    let job = |src, dst, len| Job { src, dst, len };
    let good = job(0, 0, 8);
    let error = refused(&[good, job(64, 64, 0)]);
    assert!(matches!(error, PlanError::ZeroLength { index: 1 }), "{error}");
    for bad in [job(u64::MAX - 7, 64, 9), job(64, u64::MAX - 7, 9), job(1, 1, u64::MAX)] {
        let error = refused(&[good, good, bad]);
        assert!(matches!(error, PlanError::Wraps { index: 2 }), "{error}");
    }
    let error = refused(&[job(0, 107, 10), job(0, 100, 8), job(0, 50, 50)]);
    assert!(matches!(error, PlanError::Overlap { first: 1, second: 0 }), "{error}");
    let error = refused(&[good; 300]);
    assert!(matches!(error, PlanError::Overlap { .. }), "{error}");
}

/// The sources of each destination byte.
fn sources_of(jobs: &[Job]) -> BTreeMap<u64, Vec<u64>> {
    let mut sources = BTreeMap::<u64, Vec<u64>>::new();
    for (dst, src) in
        jobs.iter().flat_map(|job| (0..job.len).map(|at| (job.dst + at, job.src + at)))
    {
        sources.entry(dst).or_default().push(src);
    }
    sources
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn jobs_made_disjoint_write_each_byte_once_from_a_source_that_was_named(
        ranges in prop::collection::vec((0u64..200, 1u64..40), 1..40),
    ) {
        // Sources follow each other, as in a stage.
        let mut end = SOURCES;
        let mut jobs = Vec::new();
        for (at, len) in ranges {
            jobs.push(Job { src: end, dst: TARGETS + at, len });
            end += len;
        }
        let named = sources_of(&jobs);
        make_disjoint(&mut jobs);
        let left = sources_of(&jobs);
        prop_assert!(left.keys().eq(named.keys()), "no byte is left out, and none is added");
        for (dst, sources) in &left {
            prop_assert!(sources.len() == 1 && named[dst].contains(&sources[0]), "{dst}");
        }
        for (_, calibration) in calibrations() {
            let planned = plan(&jobs, Direction::In, &calibration, &ALL);
            prop_assert!(planned.is_ok(), "{planned:?}");
        }
    }
}

#[test]
fn no_jobs_take_no_calls_and_the_longest_job_takes_one() {
    let none = plan(&[], Direction::In, &h100(), &ALL).expect("valid");
    assert_eq!((none.calls(), none.modelled_ns), (0, 0.0));
    for job in [Job { src: 0, dst: 0, len: u64::MAX }, Job { src: u64::MAX - 1, dst: 0, len: 1 }] {
        for direction in [Direction::Out, Direction::In] {
            let plan = plan(&[job], direction, &h100(), &ALL).expect("valid");
            assert_eq!((plan.jobs.as_slice(), plan.calls()), (&[job][..], 1));
        }
    }
}

#[test]
fn sources_may_overlap() {
    let jobs: Vec<Job> =
        (0..500).map(|at| Job { src: SOURCES, dst: TARGETS + at * 700, len: 600 }).collect();
    assert_copies(&jobs, (600, 400_000), Direction::Out, &h100(), &ALL);
    assert_copies(&jobs, (600, 400_000), Direction::In, &h100(), &ALL);
}

#[test]
fn limits_out_of_range_are_refused() {
    let kernel = |jobs_max, slice_bytes| Some(KernelLimits { jobs_max, slice_bytes });
    let staging = |address, bytes| Some(Staging { address, bytes });
    let limits = [
        Capabilities { outstanding_max: 0, ..ALL },
        Capabilities { kernel: kernel(127, 1024), ..ALL },
        Capabilities { kernel: kernel(u32::MAX, 1024), ..ALL },
        Capabilities { kernel: kernel(128, 0), ..ALL },
        Capabilities { kernel: kernel(128, 1000), ..ALL },
        Capabilities { kernel: kernel(128, 1 << 40), ..ALL },
        Capabilities { staging: staging(64, 4096), ..ALL },
        Capabilities { staging: staging(128, 4095), ..ALL },
        Capabilities { staging: staging(1 << 63, 1 << 63), ..ALL },
    ];
    for limits in limits {
        let error = plan(&[], Direction::Out, &h100(), &limits).expect_err("refused");
        assert!(matches!(error, PlanError::Limits { .. }), "{limits:?}: {error}");
    }
    let mut calibration = h100();
    calibration.out.copy.call_ns = f64::NAN;
    let error = plan(&[], Direction::In, &calibration, &ALL).expect_err("refused");
    assert!(matches!(error, PlanError::Calibration(_)), "{error}");
}

#[test]
fn jobs_anywhere_in_the_address_space_are_sorted_and_merged() {
    let jobs = [
        Job { src: 500, dst: u64::MAX - 100, len: 50 },
        Job { src: 7, dst: 0, len: 10 },
        Job { src: 550, dst: u64::MAX - 50, len: 50 },
        Job { src: 17, dst: 10, len: 10 },
    ];
    let merged = plan(&jobs, Direction::In, &h100(), &Capabilities::ENGINE).expect("valid");
    let wanted = [Job { src: 7, dst: 0, len: 20 }, Job { src: 500, dst: u64::MAX - 100, len: 100 }];
    assert_eq!(merged.jobs, wanted);
    let over = [jobs[0], jobs[1], Job { src: 0, dst: u64::MAX - 51, len: 51 }];
    let error = plan(&over, Direction::In, &h100(), &Capabilities::ENGINE).expect_err("overlap");
    assert!(matches!(error, PlanError::Overlap { first: 0, second: 2 }), "{error}");
}

#[test]
fn a_planner_that_is_used_again_makes_the_same_plans() {
    let (mut planner, mut again) = (Planner::default(), Plan::default());
    let mut random = fastrand::Rng::with_seed(3);
    let devices = calibrations();
    for _ in 0..200 {
        let lens: Vec<u64> = (0..random.usize(..300)).map(|_| random.u64(1..100_000)).collect();
        let jobs = packed(lens, 16 * random.u64(1..10));
        let calibration = &devices[random.usize(..devices.len())].1;
        let first = plan(&jobs, Direction::Out, calibration, &ALL).expect("valid");
        planner.plan(&jobs, Direction::Out, calibration, &ALL, &mut again).expect("valid");
        assert_eq!(first, again);
        let bad = [Job { src: 0, dst: 0, len: 0 }];
        planner.plan(&bad, Direction::Out, calibration, &ALL, &mut again).expect_err("empty");
        assert_eq!(again, Plan::default());
    }
}
