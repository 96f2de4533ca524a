//! The log on a disk that fails in every way that disks fail.

mod files;
mod golden;

use super::format::{self, EXTENT_RECORDS, bytes_of, pages_of};
use super::recover::{self, Fault, Scanned, scan, scan_all, verify};
use super::sim::{Event, Image, Memory, Replay, SimDisk};
use super::*;
use fastrand::Rng;
use kvferry_sys::sync::Mutex;
use proptest::prelude::*;
use rustc_hash::{FxHashMap, FxHashSet};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const STORE: [u8; 16] = *b"a store's own id";
const ENOSPC: i32 = 28;
const EIO: i32 = 5;
const EROFS: i32 = 30;

fn superblock(pages: u32) -> Superblock {
    let geometry = Geometry::tiny(pages);
    Superblock { store: STORE, geometry, created_ms: 0, directory: 0, directories: 1, id: 1 }
}

fn segment_header(segment: u32, incarnation: u64) -> SegmentHeader {
    let mut nonce = [0; 16];
    Rng::with_seed(incarnation).fill(&mut nonce);
    SegmentHeader { store: STORE, segment, incarnation, nonce, created_ms: incarnation }
}

/// A block of this data; the other fields follow from the key, so that a mix-up shows.
fn block(key: u64, data: &[u8]) -> Block {
    let mut rng = Rng::with_seed(key);
    let check = rng.u64(..);
    Block {
        key: [key, !key],
        parent: rng.bool().then(|| [key - 1, !(key - 1)]),
        sum: format::sum(data, check),
        check,
        namespace: rng.u64(..),
        len: data.len() as u32,
        retention: rng.u32(..),
        time: rng.u32(..),
    }
}

fn random_data(key: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    Rng::with_seed(key).fill(&mut data);
    data
}

fn padded(data: &[u8]) -> Vec<u8> {
    let mut padded = data.to_vec();
    padded.resize(bytes_of(pages_of(data.len() as u32)) as usize, 0);
    padded
}

fn memory(data: &[u8]) -> Memory {
    Arc::new(Mutex::new(padded(data)))
}

/// Reads a record's data and compares its sum, as a reader of the store does.
fn get(disk: &SimDisk, segment: u32, record: &Record) -> Option<Vec<u8>> {
    let mut data = vec![0; bytes_of(pages_of(record.block.len)) as usize];
    disk.read_at(segment, bytes_of(record.page), &mut data)
        .expect("the record lies in its segment");
    (format::sum(&data, record.block.check) == record.block.sum).then_some(data)
}

/// A block that was written, and when, in events of the disk.
#[derive(Clone, Debug)]
struct Put {
    key: u64,
    segment: u32,
    landed: usize,
}

/// Appends, seals and reuses at random, and remembers what must hold then.
struct Workload {
    store: Superblock,
    segments: u32,
    rng: Rng,
    /// The data of every key, written or not.
    data: FxHashMap<u64, Vec<u8>>,
    puts: Vec<Put>,
    /// Segments and when their use began.
    begins: Vec<(u32, usize)>,
    incarnation: u64,
    errno: Option<i32>,
}

impl Workload {
    fn new(seed: u64) -> Self {
        Self {
            store: superblock(28),
            segments: 3,
            rng: Rng::with_seed(seed),
            data: FxHashMap::default(),
            puts: Vec::new(),
            begins: Vec::new(),
            incarnation: 0,
            errno: None,
        }
    }

    fn disk(&self) -> SimDisk {
        SimDisk::new(self.store.geometry, self.segments)
    }

    fn run(&mut self, disk: &SimDisk, uses: u32) {
        for turn in 0..uses {
            self.incarnation += 1;
            let header = segment_header(turn % self.segments, self.incarnation);
            self.begins.push((header.segment, disk.now()));
            match Appender::begin(disk, self.store.geometry, header) {
                Ok(appender) => self.fill(disk, appender),
                Err(error) => self.expect(error),
            }
        }
    }

    fn fill(&mut self, disk: &SimDisk, mut appender: Appender) {
        let mut in_flight = Vec::new();
        while let Some(extent) = appender.plan(&self.new_blocks(disk)) {
            in_flight.push(extent);
            if self.rng.u32(0..2) == 0 {
                self.write(disk, &mut appender, std::mem::take(&mut in_flight));
            }
            if self.rng.u32(0..5) == 0
                && let Err(error) = disk.sync(appender.segment())
            {
                self.expect(Error::Segment { segment: 0, doing: "", source: error });
            }
        }
        if !in_flight.is_empty() {
            assert!(matches!(appender.seal(disk), Err(Error::InFlight { .. })));
        }
        self.write(disk, &mut appender, in_flight);
        if self.rng.u32(0..4) > 0
            && let Err(error) = appender.seal(disk)
        {
            self.expect(error);
            if self.rng.bool()
                && let Err(error) = appender.seal(disk)
            {
                self.expect(error);
            }
        }
    }

    /// Blocks of one to five pages. Some have data that looks like a page of the log.
    fn new_blocks(&mut self, disk: &SimDisk) -> Vec<Block> {
        let blocks = self.rng.usize(1..=4);
        let mut new = Vec::new();
        for _ in 0..blocks {
            let key = self.data.len() as u64 + 1;
            let len = self.rng.usize(1..=4 * PAGE_BYTES);
            let mut data = random_data(key, len);
            if len > PAGE_BYTES && self.rng.bool() {
                let image = disk.image();
                let from = &image[&self.rng.u32(..self.segments)];
                let page = self.rng.usize(..from.len() / PAGE_BYTES) * PAGE_BYTES;
                data[..PAGE_BYTES].copy_from_slice(&from[page..page + PAGE_BYTES]);
            }
            new.push(block(key, &data));
            self.data.insert(key, data);
        }
        new
    }

    /// Writes the pieces of several extents in any order.
    fn write(&mut self, disk: &SimDisk, appender: &mut Appender, extents: Vec<Extent>) {
        let mut pieces = Vec::new();
        for (number, extent) in extents.iter().enumerate() {
            let (at, header) = extent.header();
            pieces.push((number, at, header.0.to_vec()));
            for record in extent.records() {
                let data = padded(&self.data[&record.block.key[0]]);
                pieces.push((number, bytes_of(record.page), data));
            }
        }
        self.rng.shuffle(&mut pieces);
        let mut failed = FxHashSet::default();
        for (number, at, bytes) in pieces {
            if let Err(error) = disk.write_at(appender.segment(), at, &bytes) {
                self.expect(Error::Segment { segment: 0, doing: "", source: error });
                failed.insert(number);
            }
        }
        for (number, extent) in extents.into_iter().enumerate() {
            let is_written = !failed.contains(&number);
            if is_written {
                let segment = appender.segment();
                self.puts.extend(extent.records().iter().map(|record| Put {
                    key: record.block.key[0],
                    segment,
                    landed: disk.now(),
                }));
            }
            appender.finished(extent, is_written);
        }
    }

    fn expect(&self, error: Error) {
        match (&error, self.errno) {
            (Error::Segment { source, .. }, Some(errno)) => {
                assert_eq!(source.raw_os_error(), Some(errno));
            }
            _ => panic!("{error:?}"),
        }
    }

    /// The blocks that must be found when event `cut` is not completed, if only those are certain that
    /// have been written before event `certain` of their segment.
    fn expected(&self, cut: usize, certain: impl Fn(u32) -> usize) -> FxHashSet<u64> {
        self.puts
            .iter()
            .filter(|put| put.landed <= certain(put.segment).min(cut))
            .filter(|put| {
                let mut begins = self.begins.iter().filter(|begin| begin.0 == put.segment);
                !begins.any(|begin| (put.landed..=cut).contains(&begin.1))
            })
            .map(|put| put.key)
            .collect()
    }

    /// No block is wrong, and `expected` are there. Returns what was found, by segment.
    fn check(&self, disk: &SimDisk, expected: &FxHashSet<u64>) -> Vec<Scanned> {
        let mut found = FxHashSet::default();
        let mut all = Vec::new();
        for (segment, scanned) in scan_all(disk, &self.store).expect("the disk is healthy") {
            let Some(scanned) = scanned.expect("the disk is healthy") else { continue };
            for record in &scanned.records {
                let key = record.block.key[0];
                let data = self.data.get(&key).expect("only keys that were put are found");
                assert_eq!(record.block, block(key, data));
                if let Some(got) = get(disk, segment, record) {
                    assert_eq!(got, padded(data), "the wrong block for key {key}");
                    found.insert(key);
                }
            }
            all.push(scanned);
        }
        let lost: Vec<_> = expected.difference(&found).collect();
        assert!(lost.is_empty(), "blocks {lost:?} are lost");
        all
    }
}

/// The last completed sync of each segment before event `cut`.
fn last_syncs(events: &[Event], cut: usize) -> impl Fn(u32) -> usize {
    let mut syncs: FxHashMap<u32, usize> = FxHashMap::default();
    for (at, event) in events[..cut].iter().enumerate() {
        if let Event::Sync { segment } = event {
            syncs.insert(*segment, at);
        }
    }
    move |segment| syncs.get(&segment).copied().unwrap_or(0)
}

fn cut_at_every_event(seed: u64, mut at_cut: impl FnMut(&Workload, &Replay<'_>, &[Event], usize)) {
    let mut workload = Workload::new(seed);
    let disk = workload.disk();
    let before = disk.image();
    workload.run(&disk, 8);
    let events = disk.events();
    let mut replay = Replay::new(before, &events);
    for cut in 0..=events.len() {
        at_cut(&workload, &replay, &events, cut);
        if cut < events.len() {
            replay.advance();
        }
    }
}

#[test]
fn after_a_power_cut_at_any_write_synced_blocks_are_found_and_none_is_wrong() {
    let mut certain = 0;
    for seed in 0..4 {
        cut_at_every_event(seed, |workload, replay, events, cut| {
            let expected = workload.expected(cut, last_syncs(events, cut));
            certain += expected.len();
            for seed in 0..10 {
                let mut rng = Rng::with_seed(seed * 1_000_003 + cut as u64);
                workload.check(&SimDisk::of(replay.power_cut(&mut rng)), &expected);
            }
        });
    }
    assert!(certain > 1000, "the workload proves nothing: {certain}");
}

#[test]
fn after_a_kill_at_any_write_all_written_blocks_are_found_and_none_is_wrong() {
    for seed in 10..14 {
        cut_at_every_event(seed, |workload, replay, _, cut| {
            let expected = workload.expected(cut, |_| cut);
            for seed in 0..3 {
                let mut rng = Rng::with_seed(seed * 1_000_003 + cut as u64);
                workload.check(&SimDisk::of(replay.kill(&mut rng)), &expected);
            }
        });
    }
}

#[test]
fn a_second_power_cut_while_recovered_segments_are_sealed_loses_nothing() {
    cut_at_every_event(20, |workload, replay, events, cut| {
        if cut % 5 != 0 {
            return;
        }
        let expected = workload.expected(cut, last_syncs(events, cut));
        let mut rng = Rng::with_seed(cut as u64);
        let image = replay.power_cut(&mut rng);
        let disk = SimDisk::of(image.clone());
        for mut scanned in workload.check(&disk, &expected) {
            let records = scanned.records.clone();
            recover::seal(&disk, &workload.store, &mut scanned).unwrap();
            let again = scan(&disk, &workload.store, scanned.header.segment).unwrap().unwrap();
            assert!(scanned.is_sealed && again.is_sealed);
            assert_eq!(again.records, records);
        }
        let events = disk.events();
        let mut replay = Replay::new(image, &events);
        for _ in &events {
            workload.check(&SimDisk::of(replay.power_cut(&mut rng)), &expected);
            replay.advance();
        }
    });
}

#[test]
fn a_failed_call_is_a_typed_error_and_costs_no_block_that_was_written() {
    let mut counted = Workload::new(30);
    let healthy = counted.disk();
    counted.run(&healthy, 5);
    for call in 0..healthy.calls() {
        let faults = [(call..call + 1, ENOSPC), (call..call + 1, EIO), (call..u64::MAX, EROFS)];
        for (calls, errno) in faults {
            let mut workload = Workload::new(30);
            workload.errno = Some(errno);
            let disk = workload.disk().with_faults(calls, errno);
            workload.run(&disk, 5);
            disk.heal();
            let end = disk.now();
            // A use that could not begin leaves the one before, or ends it if its header was torn.
            let expected = workload.expected(end, |_| end);
            workload.check(&disk, &expected);
        }
    }
}

/// A segment with two extents of small blocks, and its blocks' data.
fn small_segment(is_sealed: bool) -> (Superblock, SimDisk, FxHashMap<u64, Vec<u8>>) {
    let store = superblock(10);
    let disk = SimDisk::new(store.geometry, 1);
    let mut appender = Appender::begin(&disk, store.geometry, segment_header(0, 1)).unwrap();
    let mut data = FxHashMap::default();
    for extent in 0..2 {
        let keys: Vec<u64> = (1..=2).map(|key| extent * 2 + key).collect();
        let blocks: Vec<_> =
            keys.iter().map(|key| random_data(*key, 3000 + *key as usize)).collect();
        let new: Vec<_> = keys.iter().zip(&blocks).map(|(key, data)| block(*key, data)).collect();
        let extent = appender.plan(&new).unwrap();
        extent.write(&disk, blocks.iter().map(|data| memory(data))).unwrap();
        appender.finished(extent, true);
        data.extend(keys.into_iter().zip(blocks));
    }
    if is_sealed {
        appender.seal(&disk).unwrap();
    }
    (store, disk, data)
}

/// Flips each bit of a page and returns the fewest blocks that were found then.
fn fewest_found_with_a_bit_flipped(is_sealed: bool, page: usize) -> usize {
    let (store, disk, data) = small_segment(is_sealed);
    let mut fewest = usize::MAX;
    for bit in page * PAGE_BYTES * 8..(page + 1) * PAGE_BYTES * 8 {
        disk.flip(0, bit);
        let mut found = 0;
        if let Some(scanned) = scan(&disk, &store, 0).unwrap() {
            for record in &scanned.records {
                let key = record.block.key[0];
                assert_eq!(record.block, block(key, &data[&key]));
                if disk.holds(0, bytes_of(record.page), &padded(&data[&key])) {
                    found += 1;
                } else {
                    let bad = verify(&disk, &scanned);
                    assert!(bad.iter().any(|(bad, _)| bad == record), "a wrong block");
                }
            }
        }
        fewest = fewest.min(found);
        disk.flip(0, bit);
    }
    fewest
}

#[test]
fn a_flipped_bit_in_a_segment_header_frees_the_segment() {
    let (store, disk, _) = small_segment(true);
    for bit in 0..PAGE_BYTES * 8 {
        disk.flip(0, bit);
        assert!(scan(&disk, &store, 0).unwrap().is_none(), "bit {bit}");
        disk.flip(0, bit);
    }
}

#[test]
fn a_flipped_bit_in_an_extent_header_costs_its_extent_until_the_segment_is_sealed() {
    assert_eq!(fewest_found_with_a_bit_flipped(false, 1), 2);
    assert_eq!(fewest_found_with_a_bit_flipped(true, 1), 4);
}

#[test]
fn a_flipped_bit_in_data_costs_its_block() {
    assert_eq!(fewest_found_with_a_bit_flipped(false, 2), 3);
    assert_eq!(fewest_found_with_a_bit_flipped(true, 2), 3);
}

#[test]
fn a_flipped_bit_in_the_footer_or_its_trailer_costs_no_block() {
    assert_eq!(fewest_found_with_a_bit_flipped(true, 8), 4);
    assert_eq!(fewest_found_with_a_bit_flipped(true, 9), 4);
}

#[test]
fn data_that_imitates_an_extent_header_is_none_without_the_nonce() {
    let store = superblock(14);
    let disk = SimDisk::new(store.geometry, 1);
    let header = segment_header(0, 1);
    let forged = Record { block: block(1, &[1]), page: 4 };
    let data_of = |nonce| SegmentHeader { nonce, ..header }.encode_extent(2, &[forged]).0;
    for (nonce, is_found) in
        [([0; 16], false), (segment_header(0, 2).nonce, false), (header.nonce, true)]
    {
        let data = data_of(nonce);
        let mut appender = Appender::begin(&disk, store.geometry, header).unwrap();
        let extent = appender.plan(&[block(2, &data)]).unwrap();
        extent.write(&disk, [memory(&data)]).unwrap();
        appender.finished(extent, true);
        let scanned = scan(&disk, &store, 0).unwrap().unwrap();
        assert!(!scanned.records.contains(&forged), "data of a known extent is not looked at");
        // The extent's own header is lost, so recovery looks at its data.
        disk.flip(0, PAGE_BYTES * 8);
        let scanned = scan(&disk, &store, 0).unwrap().unwrap();
        assert_eq!(scanned.records.contains(&forged), is_found);
    }
}

#[test]
fn a_page_of_the_log_holds_only_at_its_place_and_in_its_use_of_the_segment() {
    let geometry = Geometry::tiny(10);
    let header = segment_header(0, 1);
    let record = Record { block: block(1, &[1]), page: 6 };
    let extent = header.encode_extent(5, &[record]);
    let (_, footer) = header.encode_footer(geometry, &[record]);
    let trailer = &footer[PAGE_BYTES..];
    let holds = |header: SegmentHeader, page, pages| {
        let extent = header.decode_extent(page, &extent.0).is_some();
        let trailer = header.decode_trailer(Geometry::tiny(pages), trailer).is_some();
        (extent, trailer)
    };
    assert_eq!(holds(header, 5, 10), (true, true));
    assert_eq!(holds(header, 6, 11), (false, false));
    assert_eq!(holds(SegmentHeader { incarnation: 2, ..header }, 5, 10), (false, false));
    assert_eq!(holds(SegmentHeader { nonce: [0; 16], ..header }, 5, 10), (false, false));
    assert!(header.decode_extent(9, trailer).is_none(), "a trailer is no extent header");
}

#[test]
fn records_that_reach_beyond_their_segment_are_ignored() {
    let store = superblock(10);
    let header = segment_header(0, 1);
    let at = |page, len| Record { block: block(1, &vec![0; len]), page };
    let records = [at(2, 1), at(9, 1), at(9, 4097), at(10, 1), at(u32::MAX, 1), at(1, 1), at(0, 1)];
    let write = |offset, bytes: &[u8]| {
        let disk = SimDisk::new(store.geometry, 1);
        disk.write_at(0, 0, &header.encode().0).unwrap();
        disk.write_at(0, offset, bytes).unwrap();
        scan(&disk, &store, 0).unwrap().unwrap()
    };
    let walked = write(bytes_of(1), &header.encode_extent(1, &records).0);
    assert_eq!(walked.records, records[..2]);
    let (first, footer) = header.encode_footer(store.geometry, &records);
    let sealed = write(bytes_of(first), &footer);
    assert!(sealed.is_sealed);
    assert_eq!(sealed.records, [records[0], records[5]]);
}

#[test]
fn a_recovered_segment_without_room_for_its_footer_is_not_sealed() {
    let (store, disk, _) = small_segment(false);
    let mut scanned = scan(&disk, &store, 0).unwrap().unwrap();
    scanned.end = store.geometry.pages() - 1;
    let before = disk.now();
    assert!(matches!(recover::seal(&disk, &store, &mut scanned), Err(Error::Damaged(_))));
    assert_eq!((disk.now(), scanned.is_sealed), (before, false));
}

#[test]
fn a_footer_that_survives_a_power_cut_names_only_data_that_does_and_it_survives_once_sealed() {
    let (store, disk, _) = small_segment(true);
    let events = disk.events();
    let mut replay = Replay::new(SimDisk::new(store.geometry, 1).image(), &events);
    for cut in 0..=events.len() {
        for seed in 0..200 {
            let disk = SimDisk::of(replay.power_cut(&mut Rng::with_seed(seed)));
            let scanned = scan(&disk, &store, 0).unwrap();
            let sealed = scanned.filter(|scanned| scanned.is_sealed);
            assert!(sealed.is_some() || cut < events.len());
            assert!(sealed.is_none_or(|scanned| verify(&disk, &scanned).is_empty()));
        }
        if cut < events.len() {
            replay.advance();
        }
    }
}

#[test]
fn a_footer_that_cannot_be_read_costs_no_block() {
    let (store, disk, data) = small_segment(true);
    let calls = disk.calls();
    // The first read is that of the segment header, the second that of the footer.
    let disk = disk.with_faults(calls + 1..calls + 2, EIO);
    let scanned = scan(&disk, &store, 0).unwrap().unwrap();
    assert_eq!((scanned.is_sealed, scanned.records.len()), (false, data.len()));
}

#[test]
fn a_segment_whose_headers_could_not_all_be_read_says_so_and_is_not_sealed_without_their_blocks() {
    let (store, disk, data) = small_segment(false);
    let calls = disk.calls();
    // The segment header and the footer can be read, the first pages behind the header can't.
    let disk = disk.with_faults(calls + 2..calls + 4, EIO);
    let mut scanned = scan(&disk, &store, 0).unwrap().unwrap();
    let error = scanned.unreadable.as_ref().expect("a page could not be read");
    assert_eq!(error.raw_os_error(), Some(EIO));
    assert!(scanned.records.len() < data.len());
    let before = disk.now();
    match recover::seal(&disk, &store, &mut scanned) {
        Err(Error::Segment { source, .. }) => assert_eq!(source.raw_os_error(), Some(EIO)),
        other => panic!("{other:?}"),
    }
    assert_eq!((disk.now(), scanned.is_sealed), (before, false));
    let mut scanned = scan(&disk, &store, 0).unwrap().unwrap();
    assert_eq!((scanned.unreadable.is_none(), scanned.records.len()), (true, data.len()));
    recover::seal(&disk, &store, &mut scanned).unwrap();
}

#[test]
fn a_segment_that_cannot_be_read_costs_only_its_own_blocks() {
    let mut workload = Workload::new(40);
    let disk = workload.disk();
    workload.run(&disk, 3);
    let calls = disk.calls();
    let scanned = scan_all(&disk, &workload.store).unwrap();
    let reads = disk.calls() - calls;
    let image = disk.image();
    let mut failed = 0;
    for read in 1..reads {
        let disk = SimDisk::of(image.clone()).with_faults(read..read + 1, EIO);
        let again = scan_all(&disk, &workload.store).unwrap();
        for ((segment, before), (_, after)) in scanned.iter().zip(&again) {
            let keys = |scanned: &Result<Option<Scanned>>| -> Vec<_> {
                let scanned = scanned.as_ref().unwrap().as_ref().unwrap();
                let mut keys: Vec<_> = scanned.records.iter().map(|r| r.block.key).collect();
                keys.sort_unstable();
                keys
            };
            match after {
                Err(Error::Segment { segment: bad, source, .. }) => {
                    assert_eq!((bad, source.raw_os_error()), (segment, Some(EIO)));
                    failed += 1;
                }
                after => assert_eq!(keys(before), keys(after)),
            }
        }
    }
    assert!((1..reads).contains(&failed), "{failed} of {reads}");
    let disk = SimDisk::of(image).with_faults(0..1, EIO);
    assert!(matches!(scan_all(&disk, &workload.store), Err(Error::Directory { .. })));
}

#[test]
fn a_segment_of_another_store_or_of_another_number_is_free() {
    let (store, disk, _) = small_segment(true);
    let other = Superblock { store: *b"another store id", ..store };
    assert!(scan(&disk, &other, 0).unwrap().is_none());
    let bytes = disk.image().remove(&0).unwrap();
    let renamed = SimDisk::of(Image::from([(1, bytes)]));
    assert!(scan(&renamed, &store, 1).unwrap().is_none());
}

#[test]
fn verify_names_the_blocks_that_cannot_be_read_and_those_that_changed() {
    let (store, disk, _) = small_segment(true);
    let scanned = scan(&disk, &store, 0).unwrap().unwrap();
    disk.flip(0, bytes_of(scanned.records[2].page) as usize * 8);
    let calls = disk.calls();
    let disk = disk.with_faults(calls..calls + 1, EIO);
    match verify(&disk, &scanned).as_slice() {
        [(unreadable, Fault::Unreadable(error)), (changed, Fault::Sum)] => {
            assert_eq!(error.raw_os_error(), Some(EIO));
            assert_eq!((unreadable, changed), (&scanned.records[0], &scanned.records[2]));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_of_extents_that_failed_are_not_in_the_footer() {
    let store = superblock(14);
    let disk = SimDisk::new(store.geometry, 1);
    let mut appender = Appender::begin(&disk, store.geometry, segment_header(0, 1)).unwrap();
    let extents: Vec<_> = (1..=3)
        .map(|key| {
            let data = random_data(key, 10);
            let extent = appender.plan(&[block(key, &data)]).unwrap();
            extent.write(&disk, [memory(&data)]).unwrap();
            extent
        })
        .collect();
    for (number, extent) in extents.into_iter().enumerate() {
        assert!(matches!(appender.seal(&disk), Err(Error::InFlight { segment: 0, .. })));
        appender.finished(extent, number != 1);
    }
    appender.seal(&disk).unwrap();
    assert!(appender.plan(&[block(9, &[0])]).is_none(), "a sealed segment takes no more");
    let keys: Vec<_> =
        scan(&disk, &store, 0).unwrap().unwrap().records.iter().map(|r| r.block.key[0]).collect();
    assert_eq!(keys, [1, 3]);
}

#[test]
fn a_page_that_cannot_be_read_costs_the_extent_that_it_describes_and_no_other() {
    let store = superblock(64);
    for is_sealed in [false, true] {
        let disk = SimDisk::new(store.geometry, 1);
        let mut appender = Appender::begin(&disk, store.geometry, segment_header(0, 1)).unwrap();
        let mut extents = Vec::new();
        for first in [1u64, 10, 20, 30] {
            let data: Vec<_> = (first..first + 4).map(|key| random_data(key, 5000)).collect();
            let blocks: Vec<_> = (first..).zip(&data).map(|(key, data)| block(key, data)).collect();
            let extent = appender.plan(&blocks).expect("room");
            extent.write(&disk, data.iter().map(|data| memory(data))).unwrap();
            let header = (extent.header().0 / PAGE_BYTES as u64) as u32;
            extents.push((header, extent.records().to_vec()));
            appender.finished(extent, true);
        }
        if is_sealed {
            appender.seal(&disk).unwrap();
        }
        for page in 0..store.geometry.pages() {
            disk.spoil(0, page..page + 1);
            let scanned = match scan(&disk, &store, 0) {
                Ok(scanned) => scanned.expect("it is in use"),
                Err(Error::Segment { .. }) => {
                    assert_eq!(page, 0, "only the segment's header is needed");
                    continue;
                }
                Err(other) => panic!("{other:?}"),
            };
            for (header, records) in &extents {
                let is_there = records.iter().all(|it| scanned.records.contains(it));
                assert_eq!(is_there, is_sealed || *header != page, "page {page}");
                for record in records.iter().filter(|it| scanned.records.contains(it)) {
                    let is_bad = verify(&disk, &scanned).iter().any(|(bad, _)| bad == record);
                    let holds = (u64::from(record.page)..record.end()).contains(&page.into());
                    assert_eq!(is_bad, holds, "page {page}");
                }
            }
        }
        // From a page on, such as where a file was cut: what is before is found.
        for page in 1..store.geometry.pages() {
            disk.spoil(0, page..store.geometry.pages());
            let found = scan(&disk, &store, 0).map_or(0, |it| it.expect("in use").records.len());
            let before = extents.iter().filter(|(header, _)| *header < page);
            assert_eq!(found, before.map(|(_, records)| records.len()).sum::<usize>(), "{page}");
        }
    }
}
