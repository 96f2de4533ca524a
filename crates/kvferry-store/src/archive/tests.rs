//! Streams that are damaged in every way that files are.

use super::format::{END_BYTES, End, HEADER_BYTES, Header, RECORD_BYTES, Record};
use super::importer::rebased;
use super::reader::{Reader, StreamItem};
use crate::log::{Block, format::sum};
use crate::policy::{OnExpiry, Retention};
use fastrand::Rng;

const EXPORT: [u8; 16] = *b"an export's id..";

fn data(key: u64) -> Vec<u8> {
    let mut rng = Rng::with_seed(key);
    let mut data = vec![0; rng.usize(1..9000)];
    rng.fill(&mut data);
    data
}

fn record(key: u64) -> Record {
    let data = data(key);
    let block = Block {
        key: [key, !key],
        parent: (key > 1).then(|| [key - 1, !(key - 1)]),
        sum: sum(&data, key * 3),
        check: key * 3,
        namespace: key % 2,
        len: u32::try_from(data.len()).expect("short"),
        retention: 7,
        time: 9,
    };
    Record { export: EXPORT, block, created_ms: 1_763_900_000_000 }
}

/// A stream of records, and where each begins and ends.
fn stream(keys: std::ops::Range<u64>) -> (Vec<u8>, Vec<(u64, std::ops::Range<usize>)>) {
    let header = Header { export: EXPORT, created_ms: 1_763_900_000_000, store: [5; 16] };
    let mut bytes = header.encode().to_vec();
    let (mut places, mut all) = (Vec::new(), 0);
    for key in keys {
        let begin = bytes.len();
        bytes.extend(record(key).encode());
        bytes.extend(data(key));
        all += data(key).len() as u64;
        places.push((key, begin..bytes.len()));
    }
    let records = places.len() as u64;
    bytes.extend(End { export: EXPORT, records, bytes: all }.encode());
    (bytes, places)
}

/// The keys that are found, places of damage, records that are missing, and whether there is an end.
fn read(bytes: &[u8]) -> (Vec<u64>, u64, u64, bool) {
    let mut reader = Reader::new(bytes);
    let (mut keys, mut damaged) = (Vec::new(), 0);
    while let Some(found) = reader.next().expect("it is in memory") {
        match found {
            StreamItem::Record(found, bytes) => {
                let key = found.block.key[0];
                assert_eq!((found, bytes), (record(key), data(key)), "only what was exported");
                keys.push(key);
            }
            StreamItem::Damage => damaged += 1,
            StreamItem::Newer(version) => panic!("{version}"),
        }
    }
    assert_eq!(reader.consumed(), bytes.len() as u64);
    (keys, damaged, reader.missing(), reader.has_end())
}

#[test]
fn the_bytes_of_version_1_do_not_change() {
    let (bytes, _) = stream(1..4);
    assert_eq!((HEADER_BYTES, RECORD_BYTES, END_BYTES), (64, 112, 48));
    assert_eq!(bytes[..16], *b"kvfexprt\x01\0\0\0\xfe\xff\xff\xff");
    assert_eq!(bytes[64..72], *b"kvfblock");
    assert_eq!(crc_fast::crc64_nvme(&bytes), 0x35e0_ca0f_823e_a0f1);
}

#[test]
fn a_stream_is_read_as_it_was_written_also_behind_another() {
    let (bytes, _) = stream(1..30);
    assert_eq!(read(&bytes), ((1..30).collect(), 0, 0, true));
    let both = [bytes, stream(50..60).0].concat();
    assert_eq!(read(&both), ((1..30).chain(50..60).collect(), 0, 0, true));
}

#[test]
fn a_stream_that_is_cut_at_each_byte_has_the_records_before() {
    let (bytes, places) = stream(1..5);
    for len in 0..bytes.len() {
        let (keys, _, missing, has_end) = read(&bytes[..len]);
        let whole = places.iter().filter(|(_, place)| place.end <= len).map(|(key, _)| *key);
        assert_eq!((keys, missing, has_end), (whole.collect(), 0, false), "{len}");
    }
}

#[test]
fn bytes_that_change_or_are_lost_or_inserted_cost_the_records_that_they_are_in() {
    let (whole, places) = stream(1..30);
    for seed in 0..2000 {
        let mut rng = Rng::with_seed(seed);
        let at = rng.usize(0..whole.len());
        let len = [1, 10, 3000, 30_000][rng.usize(0..4)].min(whole.len() - at);
        let mut bytes = whole.clone();
        let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(len).collect();
        // Also parts of the stream, in the wrong place.
        let copied = &whole[rng.usize(..whole.len())..];
        let copied = copied[..len.min(copied.len())].to_vec();
        match rng.u8(..5) {
            0 => bytes[at..at + len].iter_mut().for_each(|byte| *byte ^= 0x55),
            1 => drop(bytes.drain(at..at + len)),
            2 => drop(bytes.splice(at..at, noise)),
            3 => drop(bytes.splice(at..at + len, noise)),
            _ => drop(bytes.splice(at..at, copied)),
        }
        let (keys, damaged, missing, _) = read(&bytes);
        for (key, place) in &places {
            let is_touched = place.start < at + len && at < place.end;
            assert!(is_touched || keys.contains(key), "{key} with seed {seed}");
        }
        let is_same = bytes == whole;
        let lost = 29 - places.iter().filter(|(key, _)| keys.contains(key)).count() as u64;
        assert!(is_same || damaged > 0 || missing > 0 || lost == 0, "seed {seed}");
        assert!(lost == 0 || damaged + missing > 0 || !read(&bytes).3, "seed {seed}");
    }
}

#[test]
fn noise_is_no_stream() {
    let mut bytes = vec![0; 3 << 20];
    Rng::with_seed(1).fill(&mut bytes);
    let mut reader = Reader::new(bytes.as_slice());
    assert!(matches!(reader.next(), Ok(Some(StreamItem::Damage))));
    assert!(matches!(reader.next(), Ok(None)));
    assert!(!reader.is_stream());
}

#[test]
fn a_later_version_is_told() {
    let mut bytes = stream(1..3).0;
    bytes[8..12].copy_from_slice(&3u32.to_le_bytes());
    bytes[12..16].copy_from_slice(&(!3u32).to_le_bytes());
    assert!(matches!(Reader::new(bytes.as_slice()).next(), Ok(Some(StreamItem::Newer(3)))));
}

#[test]
fn times_are_kept_on_the_clock_of_another_store() {
    // The block was put 100 s after its store was made, which was 1000 s before the other one.
    let of = |retention: Retention, time| {
        let mut record = record(1);
        (record.created_ms, record.block.retention) = (5_000_000, retention.to_bits());
        record.block.time = time;
        rebased(&record, 6_000_000, 320)
    };
    let until = |until_s, then| Retention { priority: 60, until_s, then };
    let forever = of(until(None, OnExpiry::Default), 100).expect("it stays");
    assert_eq!(Retention::from_bits(forever.retention), until(None, OnExpiry::Default));
    assert_eq!(forever.time, 0, "before the store was made");
    let later = of(until(Some(1600), OnExpiry::Leave), 1200).expect("it stays");
    // 600 s, in units of 16 s.
    assert_eq!(Retention::from_bits(later.retention), until(Some(608), OnExpiry::Leave));
    assert_eq!(later.time, 200);
    assert_eq!(of(until(Some(1312), OnExpiry::Leave), 1), None, "it has left");
    let over = of(until(Some(1312), OnExpiry::Default), 5000).expect("it stays");
    assert_eq!(Retention::from_bits(over.retention), Retention::DEFAULT);
    assert_eq!(over.time, 320, "not after now");
}
