//! Copies blocks of a segment that is collected to the keeper's own.

use super::evict::is_there;
use super::{Keeper, seal_own};
use crate::index::Entry;
use crate::log::format::{EXTENT_RECORDS, bytes_of, pages_of};
use crate::log::{Disk, Record};
use crate::stats::Counters;
use crate::tiers::disk::gate::is_hang;
use crate::tiers::disk::is_of_device;
use crate::writer::begin_segment;
use crc_fast::CrcAlgorithm;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Data that is copied at once.
const COPY_BYTES: usize = 4 << 20;
/// Blocks of a segment that can't be read, until the segment counts as unreadable: a device that fails may take
/// seconds for each.
pub(super) const UNREADABLE_MAX: u32 = 16;
/// Interval and number of the keeper's looks for a segment to copy to, until it takes none as free.
const LAST_EVERY: Duration = Duration::from_millis(1);
const LAST_TRIES: u32 = 5;

/// Result of copying a segment's blocks.
pub(super) enum Collected {
    /// Nothing lives in it, unless its headers are damaged.
    All,
    /// No block that the headers list lives in it. Some of those could not be read.
    Listed,
    /// A block could not be moved: a process that is stopped holds its lock, or it could not be written.
    NotAll,
    /// No segment is free to copy to.
    NoRoom,
    /// Too many blocks may not leave for others.
    TooMuch,
}

impl Keeper {
    pub(super) fn copy_all(
        &mut self,
        from: u32,
        blocks: &[(Entry, Record)],
    ) -> io::Result<Collected> {
        let mut rest = blocks;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(entry, _): &&(Entry, Record)| {
                bytes += bytes_of(pages_of(entry.len));
                bytes <= COPY_BYTES as u64
            };
            let count = rest.iter().take(EXTENT_RECORDS).take_while(fits).count().max(1);
            let (some, others) = rest.split_at(count);
            match self.copy(from, some)? {
                Collected::All => {}
                other => return Ok(other),
            }
            rest = others;
        }
        Ok(Collected::All)
    }

    /// Copies blocks of a segment to the keeper's own. A block that can't be read is removed.
    pub(super) fn copy(&mut self, from: u32, blocks: &[(Entry, Record)]) -> io::Result<Collected> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let copied = self
            .read_right(&mut buffer, from, blocks)
            .and_then(|(right, filled)| self.write_own(from, &right, &buffer[..filled]));
        self.buffer = buffer;
        copied
    }

    /// Reads blocks of a segment into `buffer`, one after another. Returns those that are right, and their bytes in the
    /// buffer. A block that can't be read, or is wrong, is removed.
    fn read_right<'a>(
        &mut self,
        buffer: &mut Vec<u8>,
        from: u32,
        blocks: &'a [(Entry, Record)],
    ) -> io::Result<(Vec<(&'a Entry, &'a Record)>, usize)> {
        let core = Arc::clone(&self.core);
        let bytes: usize = blocks.iter().map(|(entry, _)| page_bytes(entry.len)).sum();
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        let (mut right, mut filled) = (Vec::with_capacity(blocks.len()), 0);
        let are_neighbours = |(_, one): &(Entry, Record), (_, next): &(Entry, Record)| {
            one.end() == u64::from(next.page)
        };
        for run in blocks.chunk_by(are_neighbours) {
            let bytes: usize = run.iter().map(|(entry, _)| page_bytes(entry.len)).sum();
            let at = bytes_of(run[0].1.page);
            let is_read = core.disk.read_at(from, at, &mut buffer[filled..filled + bytes]).is_ok();
            // Where the last block of the run is that was looked at. Blocks that are right follow each other.
            let mut there = filled;
            for (entry, record) in run {
                let len = page_bytes(entry.len);
                let data = &mut buffer[there..there + len];
                // Of neighbours that can't be read at once, most can be read alone.
                let read = match is_read {
                    true => Ok(()),
                    false => core.disk.read_at(from, bytes_of(record.page), data),
                };
                if let Err(e) = read {
                    self.unreadable += 1;
                    if !is_of_device(&e) || is_hang(&e) || self.unreadable > UNREADABLE_MAX {
                        return Err(e);
                    }
                    core.fault("read a block of", from, &e);
                    if core.member.remove(entry) {
                        Counters::add(&core.counters.failed, 1);
                        self.policy.removed(entry.slot);
                    }
                    there += len;
                    continue;
                }
                let sum = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, data) ^ record.block.check;
                if sum == entry.sum {
                    if there > filled {
                        buffer.copy_within(there..there + len, filled);
                    }
                    right.push((entry, record));
                    filled += len;
                } else if core.member.remove(entry) {
                    core.fault("verify a block of", from, &"its bytes are not what was put");
                    Counters::add(&core.counters.corrupt, 1);
                    core.member.note_removed(entry.slot);
                }
                there += len;
            }
        }
        Ok((right, filled))
    }

    /// Writes blocks, whose bytes are in `data` one after another, to the keeper's own segment.
    fn write_own(
        &mut self,
        from: u32,
        blocks: &[(&Entry, &Record)],
        data: &[u8],
    ) -> io::Result<Collected> {
        let core = Arc::clone(&self.core);
        let (mut rest, mut data) = (blocks, data);
        while !rest.is_empty() {
            let described: Vec<_> = rest.iter().map(|(_, record)| record.block).collect();
            let planned = self.own.as_mut().and_then(|own| own.plan(&described));
            let Some(extent) = planned else {
                match self.begin_own() {
                    Ok(true) => continue,
                    Ok(false) => {}
                    // Such as: the disk is full. The segment that is collected exists, and can be begun.
                    Err(e) => core.fault("begin a segment after", from, &e),
                }
                return Ok(Collected::NoRoom);
            };
            let (at, header) = extent.header();
            let to = extent.segment();
            // First, so that the next keeper knows of the copies.
            core.member.note_copies(to, true);
            self.sources.note_copied(&core.member, from, to);
            let some = &rest[..extent.records().len()];
            let bytes = some.iter().map(|(entry, _)| page_bytes(entry.len)).sum();
            let (now, behind) = data.split_at(bytes);
            // The blocks of an extent follow each other.
            let first = bytes_of(extent.records()[0].page);
            let written = core.disk.write_at(to, at, &header.0);
            let written = written.and_then(|()| core.disk.write_at(to, first, now));
            let mut is_moved = true;
            if written.is_ok() {
                for (record, (entry, _)) in extent.records().iter().zip(some) {
                    let page = core.superblock.geometry.place(to, record.page);
                    // Not, if the block was removed meanwhile, or a stopped process holds its lock.
                    is_moved &= core.member.relocate(entry, page) || !is_there(&core, entry);
                    core.counters.bytes_collected.fetch_add(entry.len.into(), Relaxed);
                }
            }
            let count = some.len();
            self.own.as_mut().expect("it planned").finished(extent, written.is_ok());
            if let Err(e) = written {
                core.fault("write", to, &e);
                self.stop();
                return Ok(Collected::NotAll);
            }
            if !is_moved {
                return Ok(Collected::NotAll);
            }
            (rest, data) = (&rest[count..], behind);
        }
        Ok(Collected::All)
    }

    /// Begins another segment of the keeper's own. If none is free, that of the other worth takes its place. False if
    /// there is none either.
    pub(super) fn begin_own(&mut self) -> io::Result<bool> {
        seal_own(&self.core, &mut self.own);
        // A writer that takes the last segment gives it back at once.
        for _ in 0..LAST_TRIES {
            self.own = begin_segment(&self.core, 0)?;
            if self.own.is_some() {
                break;
            }
            std::thread::sleep(LAST_EVERY);
        }
        match &self.own {
            Some(own) => {
                self.begun += 1;
                self.sources.begin(own.segment());
            }
            None => self.own = self.other.take(),
        }
        Ok(self.own.is_some())
    }
}

pub(super) fn page_bytes(len: u32) -> usize {
    usize::try_from(bytes_of(pages_of(len))).expect("at most a segment")
}
