//! What a calibration measures.

use crate::calibration::Calibration;
use crate::capabilities::Capabilities;
use crate::cost::{Cost, Curve, Method};
use crate::job::{Direction, Job};

/// How often each point is measured: of three times, the median leaves one outlier out.
pub const ROUNDS: usize = 3;

/// Bytes of device memory, and of pinned host memory, that a point uses at most.
pub const BYTES_MAX: u64 = 4 << 20;

/// Entries of one size that are copied by one method, from scattered to contiguous memory or back.
///
/// A batch is given in calls of [`Calibration::batch_entries`](crate::Calibration::batch_entries). Entries for the kernel
/// are divided by [`KernelLimits::divide`](crate::KernelLimits::divide), as a plan's are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Point {
    /// The method.
    pub method: Method,
    /// The direction; [`Direction::Out`] for [`Method::Gather`].
    pub direction: Direction,
    /// Entries.
    pub count: u32,
    /// Bytes of each entry.
    pub bytes: u64,
}

impl Point {
    /// The copies of the entries between two buffers: the device's, where neighbours are not copied one after the other,
    /// and the one on the host, or in the device's staging, where they are.
    pub fn jobs(&self, scattered: u64, packed: u64) -> impl Iterator<Item = Job> + use<> {
        let Self { direction, count, bytes, .. } = *self;
        (0..u64::from(count)).map(move |at| {
            let there = scattered + (u64::from(count) - 1 - at) * bytes;
            let here = packed + at * bytes;
            match direction {
                Direction::Out => Job { src: there, dst: here, len: bytes },
                Direction::In => Job { src: here, dst: there, len: bytes },
            }
        })
    }
}

/// The time of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The measured point.
    pub point: Point,
    /// Nanoseconds from the first call until all bytes were copied.
    pub ns: u64,
}

const KIB: u64 = 1 << 10;

/// Counts and sizes for each method. Methods with a cost for each call are measured with two counts of one size.
const COPY: [(u32, u64); 5] =
    [(32, 16 * KIB), (16, 64 * KIB), (16, 128 * KIB), (8, 256 * KIB), (4, 1024 * KIB)];
const BATCH: [(u32, u64); 7] = [
    (8, 4 * KIB),
    (128, 4 * KIB),
    (128, 16 * KIB),
    (64, 32 * KIB),
    (32, 64 * KIB),
    (8, 256 * KIB),
    (4, 1024 * KIB),
];
const KERNEL: [(u32, u64); 5] =
    [(512, KIB), (16, 4 * KIB), (512, 4 * KIB), (128, 16 * KIB), (8, 256 * KIB)];
const GATHER: [(u32, u64); 4] = [(16, 4 * KIB), (512, 4 * KIB), (128, 16 * KIB), (8, 256 * KIB)];

/// The points to measure on a device: at most 40, which take at most 50 ms in [`ROUNDS`] rounds by [`modelled_ns`].
/// To be measured round by round, so that a disturbance does not hit all times of one point.
pub fn points(capabilities: &Capabilities) -> Vec<Point> {
    let mut points = Vec::new();
    for direction in [Direction::Out, Direction::In] {
        let mut push = |method, list: &[(u32, u64)]| {
            points.extend(list.iter().map(|&(count, bytes)| Point {
                method,
                direction,
                count,
                bytes,
            }));
        };
        push(Method::Copy, &COPY);
        if capabilities.batch {
            push(Method::Batch, &BATCH);
        }
        if capabilities.kernel.is_some() {
            push(Method::Kernel, &KERNEL);
            if direction == Direction::Out && capabilities.staging.is_some() {
                push(Method::Gather, &GATHER);
            }
        }
    }
    points
}

/// Nanoseconds that measuring these points once takes on a slow device: half the rate of the default calibration, the
/// kernel as fast as that, and 20 µs to start and to wait for each point.
pub fn modelled_ns(points: &[Point]) -> f64 {
    let start_ns = 20_000.0;
    let slow = Curve::of_rate(1_000.0, 10.0).expect("positive and rising");
    let kernel = Cost { call_ns: 20_000.0, entry: slow };
    let default = Calibration::default();
    let time = |point: &Point| {
        let costs = default.costs(point.direction);
        let cost = costs.of(point.method).unwrap_or(&kernel);
        let calls = calls(point.method, point.count, default.batch_entries);
        let entry = cost.entry.at(point.bytes).max(slow.at(point.bytes));
        start_ns + calls * cost.call_ns + f64::from(point.count) * entry
    };
    points.iter().map(time).sum()
}

/// Calls that a point takes.
pub(crate) fn calls(method: Method, count: u32, batch_entries: u32) -> f64 {
    f64::from(match method {
        Method::Copy => count,
        Method::Batch => count.div_ceil(batch_entries),
        Method::Kernel | Method::Gather => 1,
    })
}
