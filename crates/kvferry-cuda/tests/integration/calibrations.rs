//! Calibrations: fitted to samples, stored, and what is measured for them.

use kvferry_cuda::samples::{BYTES_MAX, Point, ROUNDS, Sample, modelled_ns, points};
use kvferry_cuda::{
    Calibration, CalibrationError, Capabilities, Cost, Curve, DeviceKey, Direction, Job,
    KernelLimits, Method, Staging, plan,
};
use proptest::prelude::*;

const ALL: Capabilities = Capabilities {
    kernel: Some(KernelLimits { jobs_max: 1024, slice_bytes: 4096 }),
    staging: Some(Staging { address: 1 << 20, bytes: 1 << 22 }),
    ..Capabilities::ENGINE
};

fn key() -> DeviceKey {
    DeviceKey::new([0xa5; 16], 13_000)
}

/// What a device has whose calls take these times.
fn truth(method: Method) -> Cost {
    let (call_ns, entry_ns, rate) = match method {
        Method::Copy => (0.0, 2_300.0, 54.0),
        Method::Batch => (4_000.0, 600.0, 52.0),
        Method::Kernel => (8_000.0, 15.0, 40.0),
        Method::Gather => (7_000.0, 6.0, 900.0),
    };
    Cost { call_ns, entry: Curve::of_rate(entry_ns, rate).expect("it rises") }
}

fn time(point: &Point) -> f64 {
    let cost = truth(point.method);
    let calls = match point.method {
        Method::Copy => point.count,
        Method::Batch => point.count.div_ceil(128),
        Method::Kernel | Method::Gather => 1,
    };
    f64::from(calls) * cost.call_ns + f64::from(point.count) * cost.entry.at(point.bytes)
}

/// Times of all points, each multiplied by what `noise` returns.
fn measured(mut noise: impl FnMut(usize) -> f64) -> Vec<Sample> {
    let rounds = (0..ROUNDS).flat_map(|round| points(&ALL).into_iter().map(move |p| (round, p)));
    rounds
        .map(|(round, point)| Sample { point, ns: (time(&point) * noise(round)) as u64 })
        .collect()
}

fn fitted(samples: &[Sample]) -> Calibration {
    Calibration::fit(key(), samples).expect("valid samples")
}

/// The largest factor between fitted and true times, for one call with the count of entries of a batch.
fn error(calibration: &Calibration, method: Method, sizes: std::ops::Range<u32>) -> f64 {
    let directions = [Direction::Out, Direction::In];
    let directions = if method == Method::Gather { &directions[..1] } else { &directions };
    let mut worst = 1.0f64;
    for direction in directions {
        let found = calibration.costs(*direction).of(method).expect("it was measured");
        for bytes in sizes.clone().map(|octave| 1u64 << octave) {
            let of = |cost: &Cost| cost.call_ns + 128.0 * cost.entry.at(bytes);
            let ratio = of(found) / of(&truth(method));
            worst = worst.max(ratio).max(1.0 / ratio);
        }
    }
    worst
}

#[test]
fn times_without_noise_are_found_again() {
    let calibration = fitted(&measured(|_| 1.0));
    for method in Method::ALL {
        // At sizes where the entry's time is not bound by the rate, lines between points are above the truth.
        let found = error(&calibration, method, 12..24);
        assert!(found < 1.25, "{method:?}: {found}");
        let (call, wanted) = (calibration.out.of(method).expect("there"), truth(method));
        assert!(
            (call.call_ns - wanted.call_ns).abs() <= 0.1 * wanted.call_ns,
            "{method:?} {call:?}"
        );
    }
    assert_eq!(calibration.into.gather, None);
    assert!(calibration.is_of(&key()) && !calibration.is_of(&DeviceKey::new([0; 16], 13_000)));
    assert!(!calibration.is_of(&DeviceKey { driver: 13_001, ..key() }));
}

#[test]
fn a_round_that_was_disturbed_changes_nothing() {
    let calm = fitted(&measured(|_| 1.0));
    for bad in 0..ROUNDS {
        let disturbed = fitted(&measured(|round| if round == bad { 50.0 } else { 1.0 }));
        assert_eq!(disturbed, calm);
    }
}

#[test]
fn times_that_vary_by_a_twentieth_are_found_within_a_third() {
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..200 {
        let calibration = fitted(&measured(|_| 0.95 + 0.1 * random.f64()));
        for method in Method::ALL {
            let found = error(&calibration, method, 12..24);
            assert!(found < 1.34, "{method:?}: {found}");
        }
    }
}

#[test]
fn methods_that_were_not_measured_are_not_used_but_for_those_of_the_copy_engine() {
    let calibration = fitted(&[]);
    let unknown = Calibration::default();
    assert_eq!((&calibration.out, &calibration.into), (&unknown.out, &unknown.into));
    let is_kernel =
        |s: &Sample| s.point.method == Method::Kernel && s.point.direction == Direction::In;
    let samples: Vec<Sample> = measured(|_| 1.0).into_iter().filter(is_kernel).collect();
    let calibration = fitted(&samples);
    assert!(calibration.into.kernel.is_some() && calibration.out.kernel.is_none());
    assert_eq!(calibration.into.batch, unknown.into.batch);
}

#[test]
fn samples_that_say_nothing_are_refused() {
    let point = Point { method: Method::Batch, direction: Direction::In, count: 8, bytes: 4096 };
    let good = Sample { point, ns: 1000 };
    for bad in [
        Sample { ns: 0, ..good },
        Sample { point: Point { count: 0, ..point }, ..good },
        Sample { point: Point { bytes: 0, ..point }, ..good },
    ] {
        let error = Calibration::fit(key(), &[good, bad]).expect_err("refused");
        assert!(matches!(error, CalibrationError::EmptySample { index: 1 }), "{error}");
    }
    let error = Calibration::fit(key(), &[good, good]).expect_err("refused");
    let wanted = CalibrationError::OneSize { method: Method::Batch, direction: Direction::In };
    assert_eq!(error.to_string(), wanted.to_string());
    let device = DeviceKey { uuid: "GPU-1".into(), driver: 1 };
    let error = Calibration::fit(device, &[]).expect_err("refused");
    assert!(matches!(error, CalibrationError::Device), "{error}");
}

#[test]
fn a_stored_calibration_is_read_back_as_it_was() {
    for calibration in [Calibration::default(), fitted(&measured(|_| 1.0))] {
        let read = Calibration::from_text(&calibration.to_text()).expect("its own text");
        assert_eq!(read, calibration);
    }
}

#[test]
fn a_text_that_is_no_calibration_is_refused() {
    let text = fitted(&measured(|_| 1.0)).to_text();
    let read = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        Calibration::from_text(&text.replacen(from, to, 1)).expect_err("refused")
    };
    type Wanted = fn(&CalibrationError) -> bool;
    let malformed: Wanted = |error| matches!(error, CalibrationError::Malformed { .. });
    let costs: Wanted = |error| matches!(error, CalibrationError::Costs);
    let version: Wanted = |error| matches!(error, CalibrationError::Version { found: 2 });
    let entries: Wanted = |error| matches!(error, CalibrationError::BatchEntries { .. });
    let device: Wanted = |error| matches!(error, CalibrationError::Device);
    let cases: [(&str, &str, Wanted); 10] = [
        ("\"version\": 1", "\"version\": 2", version),
        ("\"version\": 1", "\"version\": -1", malformed),
        ("\"version\": 1,", "", malformed),
        ("\"in\"", "\"into\"", malformed),
        ("\"call_ns\": 0.0", "\"call_ns\": -1.0", costs),
        ("\"call_ns\": 0.0", "\"call_ns\": 1e300", costs),
        ("\"call_ns\": 0.0", "\"call_ns\": 1e999", malformed),
        ("\"batch_entries\": 128", "\"batch_entries\": 0", entries),
        ("\"batch_entries\": 128", "\"batch_entries\": 1000000", entries),
        ("a5a5", "A5a5", device),
    ];
    for (from, to, is_wanted) in cases {
        let error = read(from, to);
        assert!(is_wanted(&error), "{to}: {error}");
    }
    // Times that fall.
    let first = text.find("\"entry\": [").expect("a curve") + "\"entry\": [".len();
    let error = Calibration::from_text(&format!("{}5e9,{}", &text[..first], &text[first..]));
    assert!(malformed(&error.expect_err("one time too many")));
    let end = first + text[first..].find(',').expect("several times");
    let error = Calibration::from_text(&format!("{}5e9{}", &text[..first], &text[end..]));
    assert!(costs(&error.expect_err("falling")));
    for length in 0..text.len() {
        let error = Calibration::from_text(&text[..length]).expect_err("cut");
        assert!(malformed(&error), "{length}: {error}");
    }
}

#[test]
fn at_most_forty_points_are_measured_in_at_most_fifty_milliseconds() {
    let points = points(&ALL);
    assert!((30..=40).contains(&points.len()), "{}", points.len());
    let ns = modelled_ns(&points) * ROUNDS as f64;
    assert!(ns <= 50e6, "{ns}");
    for point in &points {
        assert!(u64::from(point.count) * point.bytes <= BYTES_MAX, "{point:?}");
    }
    let engine =
        kvferry_cuda::samples::points(&Capabilities { batch: false, ..Capabilities::ENGINE });
    assert!(engine.iter().all(|point| point.method == Method::Copy) && engine.len() == 10);
}

#[test]
fn the_copies_of_a_point_are_inside_of_its_buffers_and_none_can_be_merged() {
    for point in points(&ALL) {
        let jobs: Vec<Job> = point.jobs(1 << 40, 1 << 30).collect();
        assert_eq!(jobs.len(), point.count as usize);
        let device = |job: &Job| if point.direction == Direction::Out { job.src } else { job.dst };
        let is_inside = |job: &Job| {
            let at = device(job) - (1 << 40);
            job.len == point.bytes && at + job.len <= BYTES_MAX
        };
        assert!(jobs.iter().all(is_inside), "{point:?}");
        let engine = Capabilities { outstanding_max: 1, ..Capabilities::ENGINE };
        let planned = plan(&jobs, point.direction, &Calibration::default(), &engine);
        assert_eq!(planned.expect("apart").jobs.len(), jobs.len(), "{point:?}");
    }
}

proptest! {
    #[test]
    fn any_samples_make_costs_that_rise_or_a_typed_error(
        samples in prop::collection::vec(
            (0usize..4, any::<bool>(), 1u32..3000, 1u64..1 << 40, prop_oneof![1u64..1 << 40, Just(u64::MAX)]),
            0..60,
        ),
    ) {
        let sample = |(method, out, count, bytes, ns)| {
            let direction = if out { Direction::Out } else { Direction::In };
            Sample { point: Point { method: Method::ALL[method], direction, count, bytes }, ns }
        };
        let samples: Vec<Sample> = samples.into_iter().map(sample).collect();
        if let Ok(calibration) = Calibration::fit(key(), &samples) {
            let read = Calibration::from_text(&calibration.to_text());
            prop_assert_eq!(read.expect("valid"), calibration);
        }
    }

    #[test]
    fn a_curve_rises_with_the_bytes(
        times in prop::collection::vec(0.0f64..1e6, Curve::POINTS),
        a in any::<u64>(),
        b in 1u64..1 << 26,
    ) {
        let mut times = times;
        times.sort_by(f64::total_cmp);
        let curve = Curve::new(times.try_into().expect("as many")).expect("they rise");
        let (low, high) = (a.min(b), a.max(b));
        prop_assert!(curve.at(low) <= curve.at(high));
        prop_assert!(curve.at(high).is_finite());
    }
}
