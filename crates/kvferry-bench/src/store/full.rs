//! Puts into a full store: `kvferry bench store --rows full`.
//!
//! In turns with the same puts into a store that has space: what the device is slower at for a while counts for both.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use kvferry::DirectIo;
use kvferry_store::{Namespace, Retain, Space, Stats, Store, StoreOptions};

use super::speed::{Case, Place, SEGMENT, failed, prompt};
use crate::failure::Failure;
use crate::options::StoreBench;
use crate::report::{Report, Row};
use crate::stats::Spread;

/// The form of the report's JSON.
pub(super) const SCHEMA: &str = "kvferry.bench-store-full/2";
/// The least rate of a full store, as a share of the rate of a store with space.
const SHARE: f64 = 0.5;
/// Bytes of the full store, in bytes of a turn, and its segments at least.
const TURNS_IN_STORE: u64 = 4;
const SEGMENTS_IN_STORE: u64 = 16;
/// Puts wait for space as the adapters have them.
const PUT_WAIT: Duration = Duration::from_secs(2);
/// The tier in host memory, and calls of 32 MiB, of which half of it holds some.
const HOST_BYTES: u64 = 256 << 20;

/// The path by which puts reach the full store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PutPath {
    Wait,
    Behind,
}

/// Measures puts into full stores; `bar` shows the progress.
///
/// # Errors
/// The store's first failure.
pub(super) fn measure(options: &StoreBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let default = if options.effort.quick { 5 } else { 60 };
    let seconds = f64::from(options.seconds.unwrap_or(default));
    let place = Place::new(options)?;
    let mut cases = Vec::new();
    for &block in &options.sizes {
        for direct in [DirectIo::Off, DirectIo::Auto] {
            for how in [PutPath::Wait, PutPath::Behind] {
                cases.push((Case { block, direct }, how));
            }
        }
    }
    bar.inc_length(cases.len() as u64);
    let mut rows = Vec::new();
    for (case, how) in cases {
        bar.set_message(case.name());
        rows.extend(rows_of(&place, case, how, seconds)?);
        bar.inc(1);
    }
    let remarks = vec![
        format!("folder: {}", place.folder.display()),
        format!(
            "{seconds} s of puts into each full store, in calls of 32 MiB by one thread, in turns with a new store"
        ),
    ];
    Ok(Report::new(SCHEMA, options.effort.quick, remarks, rows))
}

fn rows_of(place: &Place, case: Case, how: PutPath, seconds: f64) -> Result<Vec<Row>, Failure> {
    let capacity = (TURNS_IN_STORE * place.bytes).max(SEGMENTS_IN_STORE * SEGMENT);
    let open = |name: &str, how: PutPath| -> Result<(Store, Space), Failure> {
        let options = StoreOptions::new(place.folder.join(name), capacity)
            .segment_bytes(SEGMENT)
            .direct(case.direct)
            .put_wait(PUT_WAIT);
        let options = if how == PutPath::Behind { options.host_bytes(HOST_BYTES) } else { options };
        let store = Store::open(&place.agent, &options).map_err(failed)?;
        let space = store.space(&Namespace::new("bench"));
        Ok((store, space))
    };
    let remove = |name: &str| {
        let _ = std::fs::remove_dir_all(place.folder.join(name));
    };
    remove("full");
    let (full, into_full) = open("full", how)?;
    let mut seed = 0;
    while full.stats().evicted == 0 {
        turn(place, case, &full, &into_full, &mut seed)?;
    }
    let before = full.stats();
    let (mut spacious, mut rates, mut found) = (Vec::new(), Vec::new(), Vec::new());
    let (mut spent, mut round) = (0.0, 0);
    while spent < seconds {
        for is_full in if round % 2 == 0 { [false, true] } else { [true, false] } {
            if is_full {
                let first = seed + 1;
                let (rate, took) = turn(place, case, &full, &into_full, &mut seed)?;
                rates.push(rate);
                spent += took;
                found.push(read_back(place, case, &into_full, first)?);
            } else {
                remove("spacious");
                let (store, space) = open("spacious", how)?;
                let first = seed + 1;
                spacious.push(turn(place, case, &store, &space, &mut seed)?.0);
                if read_back(place, case, &space, first)? < 1.0 {
                    let what = "a store with space has lost blocks";
                    return Err(Failure::Check(format!("{}: {what}", case.name())));
                }
                store.close();
                remove("spacious");
            }
        }
        round += 1;
    }
    let after = full.stats();
    full.close();
    remove("full");
    let behind = if how == PutPath::Behind { ", behind host memory" } else { "" };
    let name = format!("{}{behind}", case.name());
    let row = |what, unit, value| Row::new("kept", format!("{name}: {what}"), unit, value);
    let once = |value: u64| Spread::of(vec![value as f64]);
    let moved = |of: fn(&Stats) -> u64| (of(&after) - of(&before)) as f64;
    let copied = moved(|it| it.bytes_collected) / moved(|it| it.bytes_written).max(1.0);
    Ok(vec![
        Row::new("full", name.as_str(), "GB/s", Spread::of(rates)).at_least_of(
            SHARE,
            "a store with space",
            Spread::of(spacious),
        ),
        row("refused", "blocks", once(after.refused - before.refused)).at_most(0.0),
        row("of the last turn's blocks, found again", "", Spread::of(found)),
        row("copied for each byte that was put", "B", Spread::of(vec![copied])),
    ])
}

/// Puts the bytes of a turn. Returns the rate, in GB/s, of what was stored, and the seconds.
fn turn(
    place: &Place,
    case: Case,
    store: &Store,
    space: &Space,
    seed: &mut u64,
) -> Result<(f64, f64), Failure> {
    let memory = place.blocks(case);
    let (mut seconds, mut stored) = (0.0, 0);
    for call in 0..place.calls(case) {
        *seed += 1;
        place.mark(case, number(*seed, call))?;
        let prompt = prompt(*seed, memory.len());
        let began = Instant::now();
        let put = space.put(&prompt, 0, &memory, Retain::default()).map_err(failed)?;
        seconds += began.elapsed().as_secs_f64();
        if put.failed > 0 {
            return Err(Failure::Failed(format!("{}: {put:?}", case.name())));
        }
        stored += put.stored as u64;
    }
    // What waits in host memory is of this turn.
    let began = Instant::now();
    while store.stats().waiting_bytes > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    seconds += began.elapsed().as_secs_f64();
    Ok(((stored * case.block) as f64 / seconds / 1e9, seconds))
}

/// The number of a call: its blocks begin with it.
fn number(seed: u64, call: u64) -> u64 {
    seed << 20 | call
}

/// Reads the blocks of a turn, the first of whose calls had the seed `first`, and compares them. Returns the part of
/// them that is in the store. The store compares all bytes with their sums.
///
/// # Errors
/// [`Failure::Check`] for a block that is not the one that was put.
fn read_back(place: &Place, case: Case, space: &Space, first: u64) -> Result<f64, Failure> {
    let memory = place.blocks(case);
    let (mut found, calls) = (0, place.calls(case));
    for call in 0..calls {
        let seed = first + call;
        // What is not read stays another call's.
        place.mark(case, number(0, call))?;
        let prompt = prompt(seed, memory.len());
        let read = space.get(&prompt, 0, &memory).map_err(failed)?;
        place.check_first(case, number(seed, call), read)?;
        found += read;
    }
    Ok(found as f64 / (memory.len() as f64 * calls as f64))
}
