//! A disk that records what is written to it, and what a power cut or a kill leaves of that.

use super::{Disk, Geometry, PAGE_BYTES};
use fastrand::Rng;
use kvferry_sys::sync::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// Size of a sector, which a device writes whole or not at all.
const SECTOR_BYTES: usize = 512;

/// Memory that a block is written from or read into.
pub(super) type Memory = Arc<Mutex<Vec<u8>>>;

/// The bytes of all segments.
pub(super) type Image = BTreeMap<u32, Vec<u8>>;

/// An operation that reached the disk.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Write { segment: u32, offset: usize, bytes: Vec<u8> },
    Sync { segment: u32 },
}

/// Calls that fail, by their number.
#[derive(Clone, Debug)]
pub(super) struct Faults {
    pub(super) calls: std::ops::Range<u64>,
    pub(super) errno: i32,
}

#[derive(Debug)]
pub(super) struct SimDisk(Mutex<State>);

#[derive(Debug)]
struct State {
    image: Image,
    events: Vec<Event>,
    calls: u64,
    faults: Option<Faults>,
    /// Pages that can't be read, by segment.
    bad: Option<(u32, std::ops::Range<u32>)>,
    rng: Rng,
}

impl SimDisk {
    /// Segments `0..segments`, all zero.
    pub(super) fn new(geometry: Geometry, segments: u32) -> Self {
        let zeros = vec![0; geometry.segment_bytes() as usize];
        Self::of((0..segments).map(|segment| (segment, zeros.clone())).collect())
    }

    pub(super) fn of(image: Image) -> Self {
        let rng = Rng::with_seed(1);
        Self(Mutex::new(State {
            image,
            events: Vec::new(),
            calls: 0,
            faults: None,
            bad: None,
            rng,
        }))
    }

    pub(super) fn with_faults(self, calls: std::ops::Range<u64>, errno: i32) -> Self {
        self.state().faults = Some(Faults { calls, errno });
        self
    }

    /// Pages of a segment that can't be read.
    pub(super) fn spoil(&self, segment: u32, pages: std::ops::Range<u32>) {
        self.state().bad = Some((segment, pages));
    }

    pub(super) fn heal(&self) {
        self.state().faults = None;
    }

    pub(super) fn events(&self) -> Vec<Event> {
        self.state().events.clone()
    }

    /// Events so far.
    pub(super) fn now(&self) -> usize {
        self.state().events.len()
    }

    pub(super) fn calls(&self) -> u64 {
        self.state().calls
    }

    pub(super) fn image(&self) -> Image {
        self.state().image.clone()
    }

    pub(super) fn holds(&self, segment: u32, offset: u64, bytes: &[u8]) -> bool {
        self.state().image[&segment][offset as usize..].starts_with(bytes)
    }

    pub(super) fn flip(&self, segment: u32, bit: usize) {
        let mut state = self.state();
        let bytes = state.image.get_mut(&segment).expect("the segment exists");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl State {
    /// Counts a call; `Err` if it is one that fails.
    fn call(&mut self) -> io::Result<()> {
        let call = self.calls;
        self.calls += 1;
        match &self.faults {
            Some(faults) if faults.calls.contains(&call) => {
                Err(io::Error::from_raw_os_error(faults.errno))
            }
            _ => Ok(()),
        }
    }

    fn segment(&mut self, segment: u32) -> io::Result<&mut Vec<u8>> {
        self.image.get_mut(&segment).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn write(&mut self, segment: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        assert!(offset.is_multiple_of(PAGE_BYTES as u64) && bytes.len().is_multiple_of(PAGE_BYTES));
        let result = self.call();
        let offset = offset as usize;
        if result.is_ok() {
            self.record(segment, offset, bytes)?;
        } else if self.rng.bool() {
            // A write that fails has written some of its bytes.
            let sectors: Vec<_> = bytes.chunks(SECTOR_BYTES).enumerate().collect();
            for (at, sector) in sectors {
                if self.rng.bool() {
                    self.record(segment, offset + at * SECTOR_BYTES, sector)?;
                }
            }
        }
        result
    }

    fn record(&mut self, segment: u32, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.segment(segment)?[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.events.push(Event::Write { segment, offset, bytes: bytes.to_vec() });
        Ok(())
    }
}

impl Disk for SimDisk {
    type Memory = Memory;

    fn segments(&self) -> io::Result<Vec<u32>> {
        let mut state = self.state();
        state.call()?;
        Ok(state.image.keys().copied().collect())
    }

    fn create(&self, _: u32) -> io::Result<()> {
        unreachable!("the log does not create segments")
    }

    fn remove(&self, _: u32) -> io::Result<()> {
        unreachable!("the log does not remove segments")
    }

    fn read_at(&self, segment: u32, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut state = self.state();
        state.call()?;
        let page = |offset: usize| (offset / PAGE_BYTES) as u32;
        let (first, last) = (page(offset as usize), page(offset as usize + bytes.len() - 1));
        if let Some((bad, pages)) = &state.bad
            && *bad == segment
            && first < pages.end
            && last >= pages.start
        {
            return Err(io::Error::from_raw_os_error(5));
        }
        let from = &state.segment(segment)?[offset as usize..][..bytes.len()];
        bytes.copy_from_slice(from);
        Ok(())
    }

    fn write_at(&self, segment: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.state().write(segment, offset, bytes)
    }

    fn write_blocks(
        &self,
        segment: u32,
        header: (u64, &[u8]),
        blocks: &[(u64, Memory)],
    ) -> io::Result<()> {
        let mut pieces = vec![(header.0, header.1.to_vec())];
        pieces.extend(blocks.iter().map(|(offset, memory)| (*offset, memory.lock().clone())));
        let mut state = self.state();
        state.rng.shuffle(&mut pieces);
        pieces.into_iter().try_for_each(|(offset, bytes)| state.write(segment, offset, &bytes))
    }

    fn read_blocks(&self, blocks: &[(u32, u64, Memory)]) -> io::Result<()> {
        blocks.iter().try_for_each(|(segment, offset, memory)| {
            self.read_at(*segment, *offset, &mut memory.lock())
        })
    }

    fn sync(&self, segment: u32) -> io::Result<()> {
        let mut state = self.state();
        state.call()?;
        state.events.push(Event::Sync { segment });
        Ok(())
    }
}

/// Replays the events of a disk, and ends it after any of them by a power cut or a kill.
pub(super) struct Replay<'a> {
    events: &'a [Event],
    /// Bytes that are certain to survive a power cut.
    durable: Image,
    /// Writes since the last sync of their segment.
    volatile: Vec<&'a Event>,
    /// Bytes that the host reads.
    seen: Image,
}

impl<'a> Replay<'a> {
    /// `image` is what the disk had before the first event.
    pub(super) fn new(image: Image, events: &'a [Event]) -> Self {
        Self { events, durable: image.clone(), volatile: Vec::new(), seen: image }
    }

    /// The next event completes.
    pub(super) fn advance(&mut self) {
        let event = &self.events[0];
        self.events = &self.events[1..];
        match event {
            Event::Write { .. } => {
                apply(&mut self.seen, event, |_| true);
                self.volatile.push(event);
            }
            Event::Sync { segment: synced } => {
                let (durable, volatile) = std::mem::take(&mut self.volatile)
                    .into_iter()
                    .partition(|event| event.segment() == *synced);
                self.volatile = volatile;
                let durable: Vec<_> = durable;
                durable.into_iter().for_each(|event| apply(&mut self.durable, event, |_| true));
            }
        }
    }

    /// The power fails during the next event: of the writes since the last sync, some are lost, some are
    /// torn, and later ones may have been written before earlier ones.
    pub(super) fn power_cut(&self, rng: &mut Rng) -> Image {
        let mut image = self.durable.clone();
        let mut writes = self.volatile.clone();
        writes.extend(self.events.first());
        rng.shuffle(&mut writes);
        // Some cuts leave nearly all, some nearly nothing.
        let loss = rng.u32(0..=100);
        for write in writes {
            if rng.u32(0..100) < loss {
                let sectors = rng.u32(0..=100) * u32::from(rng.bool());
                apply(&mut image, write, |_| rng.u32(0..100) < sectors);
            } else {
                apply(&mut image, write, |_| true);
            }
        }
        image
    }

    /// The process is killed during the next event: all before is there, and the first sectors of it.
    pub(super) fn kill(&self, rng: &mut Rng) -> Image {
        let mut image = self.seen.clone();
        if let Some(event) = self.events.first() {
            let len = event.sectors();
            let kept = rng.usize(0..=len);
            apply(&mut image, event, |sector| sector < kept);
        }
        image
    }
}

impl Event {
    fn segment(&self) -> u32 {
        match self {
            Self::Write { segment, .. } | Self::Sync { segment } => *segment,
        }
    }

    fn sectors(&self) -> usize {
        match self {
            Self::Write { bytes, .. } => bytes.len() / SECTOR_BYTES,
            Self::Sync { .. } => 0,
        }
    }
}

fn apply(image: &mut Image, event: &Event, mut keeps: impl FnMut(usize) -> bool) {
    let Event::Write { segment, offset, bytes } = event else { return };
    let to = &mut image.get_mut(segment).expect("the segment exists")[*offset..];
    for (sector, (to, from)) in
        to.chunks_mut(SECTOR_BYTES).zip(bytes.chunks(SECTOR_BYTES)).enumerate()
    {
        if keeps(sector) {
            to.copy_from_slice(from);
        }
    }
}
