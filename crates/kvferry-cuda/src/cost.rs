//! The cost model: what a method's calls take.

use serde::{Deserialize, Serialize};

/// A way to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// One driver call for each copy (`cuMemcpyAsync`).
    Copy,
    /// One driver call for many copies of the copy engine (`cuMemcpyBatchAsync`).
    Batch,
    /// The kernel, with one side in mapped host memory.
    Kernel,
    /// The kernel, with both sides in memory of the device: it gathers what goes out, and scatters what comes in.
    Gather,
}

impl Method {
    /// Every method.
    pub const ALL: [Self; 4] = [Self::Copy, Self::Batch, Self::Kernel, Self::Gather];
}

/// Binary logarithms of a curve's first and last sizes.
const FIRST: usize = 8;
const LAST: usize = FIRST + Curve::POINTS - 1;

/// The time of one entry of a call by its bytes, in nanoseconds; it never falls. Given at powers of two from 256 bytes to
/// 16 MiB, linear between them, constant below and proportional to the bytes above.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Curve([f64; Self::POINTS]);

impl Curve {
    /// Sizes at which a curve is given.
    pub const POINTS: usize = 17;

    /// The curve through these times, in nanoseconds, or `None` if they fall, are negative or too large to be times.
    pub fn new(ns: [f64; Self::POINTS]) -> Option<Self> {
        let curve = Self(ns);
        curve.is_valid().then_some(curve)
    }

    /// The curve of an engine that starts an entry each `entry_ns` and moves `gb_per_s` gigabytes a second: whatever
    /// takes longer.
    pub fn of_rate(entry_ns: f64, gb_per_s: f64) -> Option<Self> {
        Self::new(std::array::from_fn(|at| (Self::bytes(at) as f64 / gb_per_s).max(entry_ns)))
    }

    /// Bytes of the point at this index.
    pub fn bytes(at: usize) -> u64 {
        1 << (FIRST + at)
    }

    /// Nanoseconds for an entry of so many bytes.
    pub fn at(&self, bytes: u64) -> f64 {
        self.at_place(Place::of(bytes))
    }

    /// Nanoseconds for an entry whose bytes are at this place.
    pub(crate) fn at_place(&self, place: Place) -> f64 {
        let low = self.0[place.point];
        // Beyond the last point, the curve rises as if from zero.
        let rise = self.0.get(place.point + 1).map_or(low, |high| high - low);
        low + rise * place.fraction
    }

    /// Nanoseconds that each further byte takes in an entry of many megabytes.
    pub(crate) fn slope(&self) -> f64 {
        self.0[Self::POINTS - 1] / (1u64 << LAST) as f64
    }

    pub(crate) fn is_valid(&self) -> bool {
        let is_time = |ns: &f64| (0.0..=NS_MAX).contains(ns);
        self.0.iter().all(is_time) && self.0.is_sorted()
    }
}

/// The place of a number of bytes among the points of a curve.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The last point that is not above it.
    point: usize,
    /// How far it is to the next point: 0 to 1, and beyond the last point, to the next powers of two.
    fraction: f64,
}

impl Place {
    pub(crate) fn of(bytes: u64) -> Self {
        let bytes = bytes.max(1 << FIRST);
        let octave = (bytes.ilog2() as usize).min(LAST);
        // A division by a power of two, by its exponent: this is done for each job.
        let scale = f64::from_bits((1023 - octave as u64) << 52);
        Self { point: octave - FIRST, fraction: (bytes - (1 << octave)) as f64 * scale }
    }
}

/// The longest time of a call or an entry, in nanoseconds: one minute.
pub(crate) const NS_MAX: f64 = 60e9;

/// The time of a method's calls in one direction: a call of `n` entries takes `call_ns` and the times of its entries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// Nanoseconds for each call: for a kernel, with the upload of its jobs and the launch.
    pub call_ns: f64,
    /// The time of an entry.
    pub entry: Curve,
}

impl Cost {
    pub(crate) fn is_valid(&self) -> bool {
        (0.0..=NS_MAX).contains(&self.call_ns) && self.entry.is_valid()
    }

    /// Nanoseconds for a call of one entry.
    pub(crate) fn single(&self, bytes: u64) -> f64 {
        self.call_ns + self.entry.at(bytes)
    }
}
