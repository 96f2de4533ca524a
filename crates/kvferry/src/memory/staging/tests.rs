use super::*;
use crate::memory::cursor::{Cursor, Lent};
use crate::memory::device::{Device, DeviceCopy};
use crate::memory::pieces::MemoryFault;
use crate::memory::region::{Access, Backing, Region, RegionUse};
use crate::memory::stages::StagePool;
use crate::memory::table::RegionTable;
use crate::sync::Mutex;
use kvferry_proto::Incarnation;
use kvferry_sys::map::Mapping;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

const STAGE: usize = 4096;

/// A device that copies when a test says so.
struct Manual {
    stages: Arc<StagePool>,
    bytes: Mutex<Vec<u8>>,
    started: Mutex<Vec<(Direction, DeviceCopy)>>,
    /// True if a copy is complete before the call that starts it returns.
    is_immediate: bool,
}

impl Device for Manual {
    fn stages(&self) -> Arc<StagePool> {
        Arc::clone(&self.stages)
    }

    fn pieces_max(&self) -> usize {
        4
    }

    fn copy_out(&self, copy: DeviceCopy) {
        self.start(Direction::Out, copy);
    }

    fn copy_in(&self, copy: DeviceCopy) {
        self.start(Direction::In, copy);
    }
}

impl Manual {
    fn new(len: usize, stages: usize) -> Arc<Self> {
        Arc::new(Self::with(len, stages, false))
    }

    fn with(len: usize, stages: usize, is_immediate: bool) -> Self {
        Self {
            stages: StagePool::new(STAGE, stages).expect("memory"),
            bytes: Mutex::new((0..len).map(|i| (i / 7) as u8).collect()),
            started: Mutex::default(),
            is_immediate,
        }
    }

    fn start(&self, direction: Direction, copy: DeviceCopy) {
        self.started.lock().push((direction, copy));
        if self.is_immediate {
            self.run();
        }
    }

    fn region(self: &Arc<Self>, table: &RegionTable, address: usize, len: usize) -> Region {
        let device = Arc::clone(self) as Arc<dyn Device>;
        let memory = DeviceMemory::new(device, address as u64, len as u64);
        let backing = Backing::Device(memory);
        table.insert(Incarnation(7), 0, len, Access::NONE, backing).expect("a region")
    }

    /// Ends all copies; returns how many pieces each had.
    fn run(&self) -> Vec<usize> {
        let started = std::mem::take(&mut *self.started.lock());
        let counts = started.iter().map(|(_, copy)| copy.pieces().len()).collect();
        for (direction, copy) in started {
            let mut bytes = self.bytes.lock();
            let mut at = 0;
            for piece in copy.pieces() {
                let from = piece.address as usize;
                let range = &mut bytes[from..from + piece.len];
                match direction {
                    Direction::Out => copy.copy_from(at, range),
                    Direction::In => copy.copy_to(at, range),
                }
                at += piece.len;
            }
            copy.complete(Ok(()));
        }
        counts
    }
}

fn counted() -> (Wake, Arc<AtomicUsize>) {
    let woken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&woken);
    (Arc::new(move || _ = count.fetch_add(1, Ordering::SeqCst)), woken)
}

fn cursor(direction: Direction, pieces: &Arc<Pieces>, wake: &Wake) -> Cursor {
    let (pieces, at) = (Arc::clone(pieces), Position::default());
    let len = pieces.bytes;
    Cursor::new(direction, pieces, at, len, Gate::new(), Arc::clone(wake))
}

/// Pieces of `len` bytes, each at twice its place.
fn scattered(region: &Region, count: usize, len: usize) -> Pieces {
    let mut pieces = Pieces::default();
    for i in 0..count {
        pieces.push(&region.0, (2 * i * len) as u64, len as u64);
    }
    pieces
}

/// Takes what is ready, at most `limit` bytes.
fn take(cursor: &mut Cursor, limit: usize, into: &mut Vec<u8>) -> Lent {
    let lent = cursor.lend(limit, &mut |spans| {
        let before = into.len();
        spans.iter().for_each(|span| span.for_each_copy(|bytes| into.extend(bytes)));
        Ok(into.len() - before)
    });
    lent.expect("no fault")
}

fn block(cursor: &mut Cursor) -> Lent {
    cursor.lend(STAGE, &mut |_| Err(io::ErrorKind::WouldBlock.into())).expect("no fault")
}

fn wanted(device: &Manual, pieces: &Pieces) -> Vec<u8> {
    let bytes = device.bytes.lock();
    let of = |piece: &crate::memory::pieces::Piece| {
        bytes[piece.offset as usize..(piece.offset + piece.len) as usize].to_vec()
    };
    pieces.pieces.iter().flat_map(of).collect()
}

#[test]
fn the_first_batches_out_and_the_last_ones_in_are_small() {
    const MIB: usize = 1 << 20;
    for (direction, wanted) in [(Direction::Out, [1, 2, 4, 4, 1]), (Direction::In, [4, 4, 2, 1, 1])]
    {
        let stages = StagePool::new(4 * MIB, 8).expect("memory");
        let device = Arc::new(Manual { stages, ..Manual::with(12 * MIB, 1, false) });
        let region = device.region(&RegionTable::default(), 0, 12 * MIB);
        let mut pieces = Pieces::default();
        pieces.push(&region.0, 0, 12 * MIB as u64);
        let mut cursor = cursor(direction, &Arc::new(pieces), &counted().0);
        let mut lens = Vec::new();
        loop {
            let lent = match cursor.remaining() {
                0 => cursor.flush(),
                _ => {
                    cursor.lend(usize::MAX, &mut |spans| Ok(spans.iter().map(HostSpan::len).sum()))
                }
            };
            match lent.expect("no fault") {
                Lent::NotReady => {
                    let started = device.started.lock();
                    lens.extend(started.iter().map(|(_, copy)| copy.len() / MIB));
                    drop(started);
                    device.run();
                }
                _ if cursor.remaining() == 0 => break,
                _ => {}
            }
        }
        lens.extend(device.started.lock().iter().map(|(_, copy)| copy.len() / MIB));
        assert_eq!(lens, wanted, "{direction:?}");
        device.run();
    }
}

#[test]
fn batches_have_as_many_pieces_as_the_device_allows_and_adjacent_ones_are_one() {
    let (table, device) = (RegionTable::default(), Manual::new(1 << 16, 8));
    let layers = [0, 1 << 15].map(|at| device.region(&table, at, 1 << 15));
    let mut pieces = Pieces::default();
    for i in 0..10 {
        pieces.push(&layers[i % 2].0, (i * 64) as u64, 32);
    }
    // Two that are one to the device, and one that is longer than a stage.
    pieces.push(&layers[0].0, 1000, 10);
    pieces.push(&layers[0].0, 1010, 10);
    pieces.push(&layers[0].0, 2000, 5000);
    let pieces = Arc::new(pieces);
    let mut cursor = cursor(Direction::Out, &pieces, &counted().0);
    let mut bytes = Vec::new();
    assert_eq!(take(&mut cursor, 1, &mut bytes), Lent::NotReady);
    assert_eq!(device.run(), [4, 4, 4, 1], "the fourth piece of the third is cut");
    while cursor.remaining() > 0 {
        take(&mut cursor, STAGE, &mut bytes);
        device.run();
    }
    let memory = device.bytes.lock();
    let at = |i: usize| (i % 2) * (1 << 15) + i * 64;
    let mut wanted: Vec<u8> = (0..10).flat_map(|i| memory[at(i)..at(i) + 32].to_vec()).collect();
    wanted.extend(&memory[1000..1020]);
    wanted.extend(&memory[2000..7000]);
    assert!(bytes == wanted);
}

#[test]
fn a_cursor_whose_peer_is_not_ready_gives_its_stage_to_one_that_waits() {
    let (table, device) = (RegionTable::default(), Manual::new(4 * STAGE, 1));
    let region = device.region(&table, 0, 4 * STAGE);
    let pieces = Arc::new(scattered(&region, 2, STAGE));
    let ((slow_wake, slow_woken), (wake, woken)) = (counted(), counted());
    let mut slow = cursor(Direction::Out, &pieces, &slow_wake);
    let (mut sent, mut other) = (Vec::new(), Vec::new());
    assert_eq!(take(&mut slow, 100, &mut sent), Lent::NotReady);
    device.run();
    assert_eq!(take(&mut slow, 100, &mut sent), Lent::Moved(100));
    assert_eq!(block(&mut slow), Lent::WouldBlock);
    let before = slow_woken.load(Ordering::SeqCst);
    let mut waits = cursor(Direction::Out, &pieces, &wake);
    assert_eq!(take(&mut waits, STAGE, &mut other), Lent::NotReady);
    assert_eq!(slow_woken.load(Ordering::SeqCst), before + 1, "it is asked for its stage");
    assert_eq!(block(&mut slow), Lent::WouldBlock);
    assert_eq!(woken.load(Ordering::SeqCst), 0, "the peer may be ready in a moment");
    assert_eq!(block(&mut slow), Lent::WouldBlock);
    assert_eq!(woken.load(Ordering::SeqCst), 1);
    while waits.remaining() > 0 {
        take(&mut waits, STAGE, &mut other);
        device.run();
    }
    drop(waits);
    // The peer is ready: what was given back is copied again.
    while slow.remaining() > 0 {
        take(&mut slow, 1000, &mut sent);
        device.run();
    }
    assert!(sent == wanted(&device, &pieces) && other == sent);
    drop(slow);
    assert_eq!(device.stages.free(), 1);
}

#[test]
fn what_arrived_so_far_is_copied_when_another_cursor_waits_for_the_stage() {
    let (table, device) = (RegionTable::default(), Manual::new(4 * STAGE, 1));
    let region = device.region(&table, 0, 4 * STAGE);
    let pieces = Arc::new(scattered(&region, 4, 512));
    let mut slow = cursor(Direction::In, &pieces, &counted().0);
    let receive = |cursor: &mut Cursor, len: usize| {
        let lent = cursor.lend(len, &mut |spans| {
            spans[0].copy_from(&vec![0xEE; spans[0].len()]);
            Ok(spans[0].len())
        });
        lent.expect("no fault")
    };
    assert_eq!(receive(&mut slow, 700), Lent::Moved(700));
    let (wake, woken) = counted();
    let mut waits = cursor(Direction::In, &pieces, &wake);
    assert_eq!(receive(&mut waits, 1), Lent::NotReady);
    block(&mut slow);
    block(&mut slow);
    assert_eq!(woken.load(Ordering::SeqCst), 0, "the device copies");
    assert_eq!(device.run(), [2], "one whole piece and a part of the next");
    assert_eq!(woken.load(Ordering::SeqCst), 1, "the stage is free with the end of its copy");
    drop(waits);
    while slow.remaining() > 0 {
        receive(&mut slow, STAGE);
        device.run();
    }
    assert_eq!(slow.flush().expect("no fault"), Lent::Moved(0));
    assert!(wanted(&device, &pieces).iter().all(|byte| *byte == 0xEE));
}

#[test]
fn copies_of_a_cursor_that_is_dropped_keep_stage_and_region() {
    let (table, device) = (RegionTable::default(), Manual::new(4 * STAGE, 2));
    let region = device.region(&table, 0, 4 * STAGE);
    let pieces = Arc::new(scattered(&region, 2, STAGE));
    let mut cursor = cursor(Direction::Out, &pieces, &counted().0);
    assert_eq!(take(&mut cursor, STAGE, &mut Vec::new()), Lent::NotReady);
    drop(cursor);
    assert_eq!((device.stages.free(), region.0.copies.load(Ordering::SeqCst)), (0, 2));
    device.run();
    assert_eq!((device.stages.free(), region.0.copies.load(Ordering::SeqCst)), (2, 0));
}

#[test]
fn a_device_may_complete_copies_before_its_calls_return() {
    let (table, device) = (RegionTable::default(), Manual::with(16 * STAGE, 1, true));
    let device = Arc::new(device);
    let region = device.region(&table, 0, 16 * STAGE);
    let pieces = Arc::new(scattered(&region, 4, 2 * STAGE - 1));
    let mut out = cursor(Direction::Out, &pieces, &counted().0);
    let mut bytes = Vec::new();
    while out.remaining() > 0 {
        assert!(matches!(take(&mut out, 1000, &mut bytes), Lent::Moved(1..)));
    }
    assert!(bytes == wanted(&device, &pieces));
    bytes.reverse();
    let mut into = cursor(Direction::In, &pieces, &counted().0);
    let mut at = 0;
    while into.remaining() > 0 {
        let lent = into.lend(1000, &mut |spans| {
            let len = spans[0].len();
            spans[0].copy_from(&bytes[at..at + len]);
            at += len;
            Ok(len)
        });
        assert!(matches!(lent, Ok(Lent::Moved(1..))), "{lent:?}");
    }
    assert_eq!(into.flush().expect("no fault"), Lent::Moved(0));
    assert!(bytes == wanted(&device, &pieces));
    assert_eq!(device.stages.free(), 1);
}

#[test]
fn a_batch_that_its_device_loses_keeps_stage_and_region_in_use() {
    for is_told in [false, true] {
        let (table, device) = (RegionTable::default(), Manual::new(STAGE, 2));
        let region = device.region(&table, 0, STAGE);
        let pieces = Arc::new(scattered(&region, 1, 512));
        let (wake, woken) = counted();
        let mut cursor = cursor(Direction::Out, &pieces, &wake);
        assert_eq!(take(&mut cursor, STAGE, &mut Vec::new()), Lent::NotReady);
        let (_, copy) = device.started.lock().remove(0);
        if is_told {
            copy.lose(io::Error::other("no event"));
            assert_eq!(woken.load(Ordering::SeqCst), 1);
            let fault = cursor.lend(STAGE, &mut |_| Ok(0)).expect_err("the device has lost it");
            assert!(format!("{fault:?}").contains("no event"), "{fault:?}");
        } else {
            std::mem::forget(copy);
        }
        drop(cursor);
        table.remove(&region).expect("registered");
        assert!(region.is_quarantined(), "{is_told}");
        assert_eq!(device.stages.free(), 1);
    }
}

#[test]
fn device_memory_in_quarantine_keeps_no_host_memory_from_being_registered() {
    let (table, device) = (RegionTable::default(), Manual::new(STAGE, 1));
    let region = device.region(&table, 0, STAGE);
    let _copied = RegionUse::begin(&region.0).expect("registered");
    table.remove(&region).expect("registered");
    table.quarantine([&region], &[], &[]);
    assert!(region.is_quarantined());
    // At an address that is inside of the device's memory, counted from zero.
    let host = table.insert(Incarnation(7), STAGE / 2, 64, Access::NONE, Backing::Borrowed);
    host.expect("the device's addresses are others");
}

#[test]
fn a_copy_of_an_unregistered_region_is_refused_and_leaves_nothing_counted() {
    let (table, device) = (RegionTable::default(), Manual::new(4 * STAGE, 2));
    let regions = [0, STAGE].map(|at| device.region(&table, at, STAGE));
    let mut pieces = Pieces::default();
    regions.iter().for_each(|region| pieces.push(&region.0, 0, 512));
    table.remove(&regions[1]).expect("registered");
    let mut cursor = cursor(Direction::Out, &Arc::new(pieces), &counted().0);
    let fault = cursor.lend(STAGE, &mut |_| Ok(0)).expect_err("one of two is gone");
    assert!(matches!(fault, Fault::Memory(MemoryFault { index: 1, .. })), "{fault:?}");
    drop(cursor);
    let counts = regions.map(|region| region.0.copies.load(Ordering::SeqCst));
    assert_eq!((counts, device.stages.free()), ([0, 0], 2));
}

#[test]
fn a_cursor_whose_transport_waits_without_a_call_gives_its_stages_to_one_that_needs_them() {
    let (table, device) = (RegionTable::default(), Manual::new(4 * STAGE, 2));
    let region = device.region(&table, 0, 4 * STAGE);
    let pieces = Arc::new(scattered(&region, 2, STAGE));
    let ((slow_wake, slow_woken), (wake, woken)) = (counted(), counted());
    let mut slow = cursor(Direction::Out, &pieces, &slow_wake);
    slow.park().expect("there is nothing to give back");
    let (mut sent, mut other) = (Vec::new(), Vec::new());
    assert_eq!(take(&mut slow, 100, &mut sent), Lent::NotReady);
    device.run();
    assert_eq!(take(&mut slow, 100, &mut sent), Lent::Moved(100));
    slow.park().expect("no fault");
    let mut waits = cursor(Direction::Out, &pieces, &wake);
    let before = slow_woken.load(Ordering::SeqCst);
    assert_eq!(take(&mut waits, STAGE, &mut other), Lent::NotReady);
    assert_eq!(slow_woken.load(Ordering::SeqCst), before + 1, "it is asked for its stages");
    slow.park().expect("no fault");
    slow.park().expect("no fault");
    assert_eq!(woken.load(Ordering::SeqCst), 1, "it has been granted a stage");
    let before = slow_woken.load(Ordering::SeqCst);
    slow.park().expect("no fault");
    assert_eq!(slow_woken.load(Ordering::SeqCst), before, "it has nothing to give back");
    while waits.remaining() > 0 {
        take(&mut waits, STAGE, &mut other);
        device.run();
    }
    while slow.remaining() > 0 {
        take(&mut slow, 1000, &mut sent);
        device.run();
    }
    assert!(sent == wanted(&device, &pieces) && other == sent);
}

#[test]
fn a_cursor_can_lend_while_another_one_lends() {
    let table = RegionTable::default();
    let [from, to] = [7, 0].map(|byte| {
        let map = Mapping::anonymous(STAGE).expect("memory");
        map.span(0, STAGE).copy_from(&[byte; STAGE]);
        let (base, backing) = (map.as_ptr() as usize, Backing::Owned(map));
        table.insert(Incarnation(7), base, STAGE, Access::NONE, backing).expect("a region")
    });
    let [mut out, mut into] = [(&from, Direction::Out), (&to, Direction::In)]
        .map(|(region, way)| cursor(way, &Arc::new(scattered(region, 2, 1000)), &counted().0));
    let copied = out.lend(STAGE, &mut |sources| {
        let lent = into.lend(STAGE, &mut |targets| {
            let both = targets.iter().zip(sources);
            both.clone().for_each(|(target, source)| target.copy_from_span(source));
            Ok(both.map(|(target, _)| target.len()).sum())
        });
        match lent {
            Ok(Lent::Moved(moved)) => Ok(moved),
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(copied.expect("no fault"), Lent::Moved(2000));
    let mut bytes = vec![0; STAGE];
    to.read_at(0, &mut bytes).expect("inside");
    assert!(bytes[..1000] == [7; 1000] && bytes[2000..3000] == [7; 1000] && bytes[1000] == 0);
}

#[test]
fn a_cursor_that_sends_host_memory_holds_no_stage() {
    let (table, device) = (RegionTable::default(), Manual::new(4 * STAGE, 8));
    let region = device.region(&table, 0, 4 * STAGE);
    let map = Mapping::anonymous(STAGE).expect("memory");
    let (base, backing) = (map.as_ptr() as usize, Backing::Owned(map));
    let host = table.insert(Incarnation(7), base, STAGE, Access::NONE, backing);
    let mut pieces = Pieces::default();
    let host = host.expect("a region");
    for (region, at, len) in [(&region, 0, 500), (&host, 0, 300), (&region, 1000, 500)] {
        pieces.push(&region.0, at, len);
    }
    let pieces = Arc::new(pieces);
    let mut cursor = cursor(Direction::Out, &pieces, &counted().0);
    let mut bytes = Vec::new();
    assert_eq!(take(&mut cursor, STAGE, &mut bytes), Lent::NotReady);
    assert_eq!(device.run(), [1]);
    assert_eq!(take(&mut cursor, STAGE, &mut bytes), Lent::Moved(500));
    assert_eq!(block(&mut cursor), Lent::WouldBlock);
    assert_eq!(device.stages.free(), 8);
    assert_eq!(take(&mut cursor, STAGE, &mut bytes), Lent::Moved(300));
    assert_eq!(take(&mut cursor, STAGE, &mut bytes), Lent::NotReady);
    assert_eq!(device.run(), [1]);
    assert_eq!(take(&mut cursor, STAGE, &mut bytes), Lent::Moved(500));
    assert_eq!((cursor.remaining(), bytes.len()), (0, 1300));
}

#[test]
fn bytes_have_the_alignment_in_the_stage_that_they_have_on_the_device() {
    let (table, device) = (RegionTable::default(), Manual::new(8 * STAGE, 8));
    let region = device.region(&table, 0, 8 * STAGE);
    let mut pieces = Pieces::default();
    pieces.push(&region.0, 16, 1000);
    pieces.push(&region.0, 5000, 0);
    pieces.push(&region.0, 5000, 8000);
    let pieces = Arc::new(pieces);
    // As after a part of the batch was given back.
    let at = Position { piece: 0, within: 333 };
    let (left, wake) = (pieces.bytes - 333, counted().0);
    let mut cursor = Cursor::new(Direction::Out, pieces, at, left, Gate::new(), wake);
    assert_eq!(take(&mut cursor, STAGE, &mut Vec::new()), Lent::NotReady);
    let started = device.started.lock();
    assert_eq!(started.iter().map(|(_, copy)| copy.len() as u64).sum::<u64>(), left);
    for (_, copy) in &*started {
        assert_eq!(copy.as_ptr() as u64 % 128, copy.pieces()[0].address % 128, "{copy:?}");
    }
    assert_eq!(started.len(), 3, "the second and the third have whole stages");
}

#[test]
fn a_cursor_without_bytes_from_its_peer_holds_no_stage() {
    let (table, device) = (RegionTable::default(), Manual::new(STAGE, 1));
    let region = device.region(&table, 0, STAGE);
    let pieces = Arc::new(scattered(&region, 1, STAGE));
    let mut cursor = cursor(Direction::In, &pieces, &counted().0);
    assert_eq!(block(&mut cursor), Lent::WouldBlock);
    assert_eq!(device.stages.free(), 1);
}

#[test]
fn cursors_that_wait_for_their_peers_without_a_stage_leave_the_others_their_part() {
    let (table, device) = (RegionTable::default(), Manual::new(8 * STAGE, 8));
    let region = device.region(&table, 0, 8 * STAGE);
    let pieces = Arc::new(scattered(&region, 4, STAGE));
    let mut silent: Vec<_> = (0..7).map(|_| cursor(Direction::In, &pieces, &counted().0)).collect();
    silent.iter_mut().for_each(|silent| assert_eq!(block(silent), Lent::WouldBlock));
    let mut busy = cursor(Direction::Out, &pieces, &counted().0);
    assert_eq!(take(&mut busy, STAGE, &mut Vec::new()), Lent::NotReady);
    assert_eq!(device.run().len(), AHEAD, "no silent cursor counts");
}

#[test]
fn a_cursor_that_has_given_back_its_stages_leaves_the_others_its_part() {
    let (table, device) = (RegionTable::default(), Manual::new(8 * STAGE, AHEAD));
    let region = device.region(&table, 0, 8 * STAGE);
    let pieces = Arc::new(scattered(&region, 4, STAGE));
    let [mut slow, mut waits] = [(); 2].map(|()| cursor(Direction::Out, &pieces, &counted().0));
    let (mut sent, mut other) = (Vec::new(), Vec::new());
    assert_eq!(take(&mut slow, 100, &mut sent), Lent::NotReady);
    assert_eq!(device.run().len(), AHEAD);
    assert_eq!(take(&mut waits, STAGE, &mut other), Lent::NotReady);
    assert_eq!([block(&mut slow), block(&mut slow)], [Lent::WouldBlock; 2]);
    assert_eq!(device.stages.free(), AHEAD - 1, "one is granted");
    assert_eq!(take(&mut waits, STAGE, &mut other), Lent::NotReady);
    assert_eq!(device.run().len(), AHEAD);
    while waits.remaining() > 0 {
        take(&mut waits, STAGE, &mut other);
        device.run();
    }
    while slow.remaining() > 0 {
        take(&mut slow, STAGE, &mut sent);
        device.run();
    }
    assert!(sent == wanted(&device, &pieces) && other == sent);
}

#[test]
fn a_cursor_whose_peer_is_not_ready_for_its_host_memory_leaves_the_others_its_part() {
    for direction in [Direction::Out, Direction::In] {
        let (table, device) = (RegionTable::default(), Manual::new(8 * STAGE, AHEAD));
        let region = device.region(&table, 0, 8 * STAGE);
        let map = Mapping::anonymous(STAGE).expect("memory");
        let (base, backing) = (map.as_ptr() as usize, Backing::Owned(map));
        let host = table.insert(Incarnation(7), base, STAGE, Access::NONE, backing);
        let host = host.expect("a region");
        let mut pieces = Pieces::default();
        for region in [&region, &host] {
            pieces.push(&region.0, 0, 500);
        }
        let mut slow = cursor(direction, &Arc::new(pieces), &counted().0);
        while slow.remaining() > 500 {
            let lent = slow.lend(STAGE, &mut |spans| Ok(spans.iter().map(HostSpan::len).sum()));
            lent.expect("no fault");
            if matches!(direction, Direction::Out) {
                device.run();
            }
        }
        assert_eq!(block(&mut slow), Lent::WouldBlock, "its copy runs, if it receives");
        device.run();
        assert_eq!(block(&mut slow), Lent::WouldBlock);
        let pieces = Arc::new(scattered(&region, 4, STAGE));
        let mut busy = cursor(Direction::Out, &pieces, &counted().0);
        assert_eq!(take(&mut busy, STAGE, &mut Vec::new()), Lent::NotReady);
        assert_eq!(device.run().len(), AHEAD, "{direction:?}");
    }
}
