//! Copies into the device through its staging.

use crate::plans::devices::{ALL, STAGING, h100, packed, turned};
use kvferry_cuda::{Calibration, Capabilities, Direction, Job, Method, Plan, Staging, plan};
use std::collections::BTreeMap;

/// A device whose kernel scatters as fast as it gathers.
fn scatters() -> Calibration {
    let mut calibration = h100();
    calibration.into.gather = calibration.out.gather;
    calibration
}

/// Jobs that copy packed host memory from address `start` on to places in random order on the device.
fn jobs(lens: impl IntoIterator<Item = u64>, start: u64) -> Vec<Job> {
    let mut jobs = turned(&packed(lens, 4096));
    let first = jobs[0].src;
    let mut places: Vec<u64> = (0..jobs.len() as u64).collect();
    fastrand::Rng::with_seed(2).shuffle(&mut places);
    let room = jobs.iter().map(|job| job.len).max().expect("some").next_multiple_of(128) + 4096;
    for (job, place) in jobs.iter_mut().zip(places) {
        job.src = job.src - first + start;
        job.dst = (1 << 40) + place * room + job.src % 128;
    }
    jobs
}

/// The source of each destination byte.
fn bytes(jobs: impl IntoIterator<Item = Job>) -> BTreeMap<u64, u64> {
    let of = |job: Job| (0..job.len).map(move |at| (job.dst + at, job.src + at));
    jobs.into_iter().flat_map(of).collect()
}

fn methods(plan: &Plan) -> Vec<Method> {
    plan.steps.iter().map(|step| step.method).collect()
}

#[test]
fn packed_sources_are_copied_at_once_and_scattered_from_the_staging() {
    let mut random = fastrand::Rng::with_seed(9);
    for start in [1u64 << 30, (1 << 30) + 48, (1 << 30) + 127] {
        let lens: Vec<u64> = (0..600).map(|_| random.u64(1..3000)).collect();
        let jobs = jobs(lens, start);
        let planned = plan(&jobs, Direction::In, &scatters(), &ALL).expect("valid");
        assert_eq!(methods(&planned), [Method::Copy, Method::Gather]);
        let staged = planned.jobs[0];
        assert_eq!((staged.src, staged.dst % 128), (start, start % 128));
        let end = STAGING.address + STAGING.bytes;
        assert!(staged.dst >= STAGING.address && staged.dst + staged.len <= end);
        let scattered = planned.jobs_of(&planned.steps[1]).iter().map(|job| Job {
            src: job.src.checked_sub(staged.dst).expect("inside the staging") + staged.src,
            ..*job
        });
        assert_eq!(bytes(scattered), bytes(jobs.iter().copied()));
        let units = |jobs: &[Job]| {
            jobs.iter().filter(|job| job.unit() == kvferry_cuda::Unit::Sixteen).count()
        };
        assert_eq!(
            units(planned.jobs_of(&planned.steps[1])),
            jobs.len(),
            "aligned as in the host's memory"
        );
    }
}

#[test]
fn sources_that_are_not_packed_or_do_not_fit_are_not_scattered() {
    let is_scattered = |jobs: &[Job], limits: &Capabilities| {
        let planned = plan(jobs, Direction::In, &scatters(), limits).expect("valid");
        methods(&planned).contains(&Method::Gather)
    };
    let packed = jobs([2048; 600], 1 << 30);
    assert!(is_scattered(&packed, &ALL));
    let small = Staging { bytes: 2048 * 600, ..STAGING };
    assert!(!is_scattered(&packed, &Capabilities { staging: Some(small), ..ALL }));
    assert!(!is_scattered(&packed, &Capabilities { staging: None, ..ALL }));
    let mut torn = packed.clone();
    torn.remove(300);
    assert!(!is_scattered(&torn, &ALL));
    let mut turned = packed;
    turned.swap(3, 4);
    assert!(!is_scattered(&turned, &ALL));
    assert!(!is_scattered(&jobs([2 << 20], 1 << 30), &ALL), "one copy is faster");
}

#[test]
fn what_a_scattering_plan_takes_is_what_the_calibration_says() {
    let jobs = jobs([2048; 600], 1 << 30);
    let calibration = scatters();
    let planned = plan(&jobs, Direction::In, &calibration, &ALL).expect("valid");
    let (copy, gather) = (calibration.into.copy, calibration.into.gather.expect("a kernel"));
    let wanted =
        copy.call_ns + copy.entry.at(2048 * 600) + gather.call_ns + 600.0 * gather.entry.at(2048);
    assert!((planned.modelled_ns - wanted).abs() < 1e-6 * wanted);
}
