//! Costs fitted to measured times.

use crate::calibration::CalibrationError;
use crate::cost::{Cost, Curve, Method, NS_MAX};
use crate::job::Direction;
use crate::samples::{Sample, calls};
use std::collections::BTreeMap;

/// Median times by bytes and count.
type Times = BTreeMap<u64, BTreeMap<u32, f64>>;

/// The costs of a method, or `None` if it was not measured. They depend on medians only: of the repetitions of a point,
/// and of what its sizes say about a call.
pub(crate) fn cost(
    samples: &[Sample],
    method: Method,
    direction: Direction,
    batch_entries: u32,
) -> Result<Option<Cost>, CalibrationError> {
    let mut all: BTreeMap<(u64, u32), Vec<f64>> = BTreeMap::new();
    for (index, Sample { point, ns }) in samples.iter().enumerate() {
        if point.count == 0 || point.bytes == 0 || *ns == 0 {
            return Err(CalibrationError::EmptySample { index });
        }
        if point.method == method && point.direction == direction {
            all.entry((point.bytes, point.count)).or_default().push((*ns as f64).min(NS_MAX));
        }
    }
    let mut times = Times::new();
    for ((bytes, count), mut ns) in all {
        times.entry(bytes).or_default().insert(count, median(&mut ns));
    }
    match times.len() {
        0 => return Ok(None),
        1 => return Err(CalibrationError::OneSize { method, direction }),
        _ => {}
    }
    let call_ns = if method == Method::Copy { 0.0 } else { call_ns(&times, method, batch_entries) };
    let mut entries: Vec<(f64, f64)> = Vec::with_capacity(times.len());
    for (bytes, by_count) in &times {
        // The most entries have the least error for each.
        let (&count, ns) = by_count.last_key_value().expect("a size has a time");
        let rest = ns - calls(method, count, batch_entries) * call_ns;
        entries.push((*bytes as f64, rest.max(0.0) / f64::from(count)));
    }
    make_rise(&mut entries);
    let mut least = 0.0f64;
    let ns = std::array::from_fn(|at| {
        // Rounding may make a line fall.
        least = least.max(interpolate(&entries, Curve::bytes(at) as f64));
        to_picoseconds(least)
    });
    let call_ns = to_picoseconds(call_ns);
    let entry = Curve::new(ns).expect("the entries rise, and are times");
    Ok(Some(Cost { call_ns, entry }))
}

/// What a call takes beside its entries: the median of what sizes with several counts say. Zero if none has.
fn call_ns(times: &Times, method: Method, batch_entries: u32) -> f64 {
    let mut found = Vec::new();
    for by_count in times.values() {
        let counts: Vec<(f64, f64, f64)> = by_count
            .iter()
            .map(|(&count, &ns)| (f64::from(count), calls(method, count, batch_entries), ns))
            .collect();
        for (at, &(n1, c1, t1)) in counts.iter().enumerate() {
            for &(n2, c2, t2) in &counts[at + 1..] {
                // t = c * call + n * entry, twice.
                let determinant = c1 * n2 - c2 * n1;
                if determinant != 0.0 {
                    found.push(((t1 * n2 - t2 * n1) / determinant).max(0.0));
                }
            }
        }
    }
    if found.is_empty() { 0.0 } else { median(&mut found).min(NS_MAX) }
}

/// Nanoseconds with three decimals, which their text gives back exactly.
fn to_picoseconds(ns: f64) -> f64 {
    (ns * 1e3).round() / 1e3
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// Replaces neighbours that fall by their mean, until none does.
fn make_rise(entries: &mut [(f64, f64)]) {
    let mut levels: Vec<(f64, usize)> = Vec::with_capacity(entries.len());
    for &(_, ns) in entries.iter() {
        let (mut mean, mut width) = (ns, 1);
        while let Some((before, count)) = levels.pop_if(|(before, _)| *before > mean) {
            mean = (mean * width as f64 + before * count as f64) / (width + count) as f64;
            width += count;
        }
        levels.push((mean, width));
    }
    let flat = levels.into_iter().flat_map(|(mean, width)| std::iter::repeat_n(mean, width));
    entries.iter_mut().zip(flat).for_each(|(entry, mean)| entry.1 = mean);
}

/// The time at a size: linear between those measured, constant below and proportional to the bytes above.
fn interpolate(entries: &[(f64, f64)], bytes: f64) -> f64 {
    let above = entries.partition_point(|(size, _)| *size <= bytes);
    let Some(&(high_bytes, high)) = entries.get(above) else {
        let (last_bytes, last) = entries[entries.len() - 1];
        return (last * bytes / last_bytes).min(NS_MAX);
    };
    let Some(&(low_bytes, low)) = above.checked_sub(1).map(|below| &entries[below]) else {
        return high;
    };
    low + (high - low) * (bytes - low_bytes) / (high_bytes - low_bytes)
}
