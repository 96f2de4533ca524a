//! Calibrations and tables of jobs that tests plan.

use kvferry_cuda::{Calibration, Capabilities, Cost, Costs, Curve, Job, KernelLimits, Staging};

pub(crate) const STAGING: Staging = Staging { address: 0x7700_0000_0000, bytes: 4 << 20 };

pub(crate) const LIMITS: KernelLimits = KernelLimits { jobs_max: 4096, slice_bytes: 16 << 10 };

/// A driver with all methods.
pub(crate) const ALL: Capabilities = Capabilities {
    batch: true,
    kernel: Some(LIMITS),
    staging: Some(STAGING),
    outstanding_max: 512,
    merges: true,
};

pub(crate) fn cost(call_ns: f64, entry_ns: f64, gb_per_s: f64) -> Cost {
    Cost { call_ns, entry: Curve::of_rate(entry_ns, gb_per_s).expect("it rises") }
}

fn of(copy: Cost, batch: Option<Cost>, kernel: Option<Cost>, gather: Option<Cost>) -> Calibration {
    let mut calibration = Calibration::default();
    calibration.out = Costs { copy, batch, kernel, gather };
    calibration.into = Costs { gather: None, ..calibration.out.clone() };
    calibration
}

/// Times as on an H100.
pub(crate) fn h100() -> Calibration {
    let kernel = Some(cost(8_000.0, 15.0, 40.0));
    let gather = Some(cost(7_000.0, 6.0, 900.0));
    of(cost(0.0, 2_300.0, 54.0), Some(cost(4_000.0, 600.0, 52.0)), kernel, gather)
}

/// Made-up devices, by their names.
pub(crate) fn calibrations() -> [(&'static str, Calibration); 6] {
    let copy = cost(0.0, 2_500.0, 50.0);
    let batch = Some(cost(4_000.0, 700.0, 50.0));
    let fast = (Some(cost(2_000.0, 5.0, 60.0)), Some(cost(2_000.0, 2.0, 2_000.0)));
    let slow = (Some(cost(30_000.0, 500.0, 4.0)), Some(cost(30_000.0, 300.0, 20.0)));
    let late = (Some(cost(90_000.0, 10.0, 30.0)), Some(cost(100_000.0, 5.0, 500.0)));
    [
        ("H100", h100()),
        ("fast kernel", of(copy, batch, fast.0, fast.1)),
        ("slow kernel", of(copy, batch, slow.0, slow.1)),
        ("no batch call", of(copy, None, fast.0, fast.1)),
        (
            "high fixed costs",
            of(cost(0.0, 20e3, 50.0), Some(cost(60e3, 500.0, 50.0)), late.0, late.1),
        ),
        ("copy engine only", of(copy, batch, None, None)),
    ]
}

/// Jobs that lie one after the other in host memory, out of scattered memory of a device.
pub(crate) fn packed(lens: impl IntoIterator<Item = u64>, gap: u64) -> Vec<Job> {
    let (mut src, mut dst) = (1 << 40, 1 << 30);
    let job = |len| {
        let job = Job { src, dst, len };
        (src, dst) = (src + len + gap, dst + len);
        job
    };
    lens.into_iter().map(job).collect()
}

/// The same copies in the other direction.
pub(crate) fn turned(jobs: &[Job]) -> Vec<Job> {
    jobs.iter().map(|job| Job { src: job.dst, dst: job.src, len: job.len }).collect()
}
