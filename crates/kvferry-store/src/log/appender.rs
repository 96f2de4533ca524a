//! Assigns the pages of one segment to blocks.
//!
//! A caller has the appender behind a lock, and holds the lock to plan an extent and to report how its
//! write ended, not while it writes. Extents of several threads are written at the same time.
//!
//! Order of calls: [`Appender::begin`]; for each extent [`Appender::plan`], [`Extent::write`],
//! [`Appender::finished`]; [`Appender::seal`] once no extent is in flight. An appender that is dropped
//! leaves a segment that recovery reads without its footer.
//!
//! A write that fails costs its extent: the pages are not used again in this incarnation. Other extents
//! of the segment are as good as before.

use super::format::{
    Block, EXTENT_RECORDS, Geometry, PAGE_BYTES, Page, Record, SegmentHeader, bytes_of,
    footer_pages, pages_of,
};
use super::{Disk, Error, OnSegment, Result};
use std::io;

/// A segment that blocks are appended to.
#[derive(Debug)]
pub struct Appender {
    geometry: Geometry,
    header: SegmentHeader,
    /// The first page that is not assigned.
    next: u32,
    /// Blocks that the footer has to have room for, also if their write fails.
    planned: u32,
    in_flight: u32,
    written: Vec<Record>,
    is_sealed: bool,
}

/// Blocks with the pages that they are to be written to. It must be reported with
/// [`Appender::finished`].
#[derive(Debug)]
#[must_use = "a segment cannot be sealed before each of its extents is finished"]
pub struct Extent {
    header: SegmentHeader,
    page: u32,
    records: Vec<Record>,
}

impl Appender {
    /// Starts a use of the segment that `header` names. It exists on the disk and is free ([`free`]): blocks that
    /// were copied from it to other segments have been synced there.
    pub fn begin<D: Disk>(disk: &D, geometry: Geometry, header: SegmentHeader) -> Result<Self> {
        // Not synced: the sync that makes the first block durable also does so for this page.
        disk.write_at(header.segment, 0, &header.encode().0)
            .on(header.segment, "write the header")?;
        Ok(Self {
            geometry,
            header,
            next: 1,
            planned: 0,
            in_flight: 0,
            written: Vec::new(),
            is_sealed: false,
        })
    }

    /// Assigns pages to the first of `blocks`: as many as fit into one extent and into the segment. `None`
    /// if not even the first fits (then seal this segment and begin another; none fits a block of more
    /// than [`Geometry::max_block_bytes`]), if there is none, or after [`Appender::seal`].
    pub fn plan(&mut self, blocks: &[Block]) -> Option<Extent> {
        let page = self.next;
        let mut end = page + 1;
        let mut records = Vec::with_capacity(blocks.len().min(EXTENT_RECORDS));
        for block in blocks.iter().take(EXTENT_RECORDS) {
            let record = Record { block: *block, page: end };
            let footer = footer_pages(self.planned + records.len() as u32 + 1);
            if self.is_sealed || record.end() + u64::from(footer) > self.geometry.pages().into() {
                break;
            }
            end += pages_of(block.len);
            records.push(record);
        }
        if records.is_empty() {
            return None;
        }
        self.next = end;
        self.planned += records.len() as u32;
        self.in_flight += 1;
        Some(Extent { header: self.header, page, records })
    }

    /// Reports how the write of an extent of this appender ended. Blocks of an extent that was not
    /// written are not in the footer.
    pub fn finished(&mut self, extent: Extent, is_written: bool) {
        debug_assert_eq!(extent.header, self.header, "the extent is of another appender");
        self.in_flight -= 1;
        if is_written {
            self.written.extend(extent.records);
        }
    }

    /// Ends the segment: syncs its data, writes its footer, and syncs that. After an error the segment is
    /// not sealed, and the call may be repeated. The footer may then name data that the failed sync lost;
    /// its sum tells.
    pub fn seal<D: Disk>(&mut self, disk: &D) -> Result<()> {
        if self.in_flight > 0 {
            let (segment, extents) = (self.segment(), self.in_flight);
            return Err(Error::InFlight { segment, extents });
        }
        if !self.is_sealed {
            write_footer(disk, self.geometry, &self.header, &self.written)?;
            self.is_sealed = true;
        }
        Ok(())
    }

    /// The segment's number.
    pub fn segment(&self) -> u32 {
        self.header.segment
    }

    /// The use of the segment.
    pub fn incarnation(&self) -> u64 {
        self.header.incarnation
    }

    /// Extents that were planned and have not finished.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// The blocks that were written, in the order in which they finished.
    pub fn written(&self) -> &[Record] {
        &self.written
    }

    /// Pages that are assigned, with those of writes that failed.
    pub fn used_pages(&self) -> u32 {
        self.next
    }
}

/// Makes a segment free: recovery finds nothing in it. It is done before the next use begins. If only the next
/// header said so, the power could fail when that had not reached the disk, but data had: the old footer would then
/// name blocks that are no more.
pub fn free<D: Disk>(disk: &D, segment: u32) -> Result<()> {
    disk.write_at(segment, 0, &[0; PAGE_BYTES]).on(segment, "remove the header")?;
    disk.sync(segment).on(segment, "sync the removal of the header")
}

impl Extent {
    /// The blocks that got pages: the first of those that were given to [`Appender::plan`].
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The segment's number.
    pub fn segment(&self) -> u32 {
        self.header.segment
    }

    /// The header page and its offset.
    pub fn header(&self) -> (u64, Box<Page>) {
        (bytes_of(self.page), self.header.encode_extent(self.page, &self.records))
    }

    /// Writes the extent from the memory of its blocks, in their order: whole pages, padded with zeros.
    ///
    /// # Panics
    /// If there is not one memory for each record.
    pub fn write<D: Disk>(
        &self,
        disk: &D,
        memory: impl IntoIterator<Item = D::Memory>,
    ) -> io::Result<()> {
        let (at, header) = self.header();
        disk.write_blocks(self.segment(), (at, &header.0), &self.blocks(memory))
    }

    /// The memory of each block, with the offset that it is to be written to.
    ///
    /// # Panics
    /// If there is not one memory for each record.
    pub fn blocks<M>(&self, memory: impl IntoIterator<Item = M>) -> Vec<(u64, M)> {
        let offsets = self.records.iter().map(|record| bytes_of(record.page));
        let mut memory = memory.into_iter();
        let blocks: Vec<_> = offsets.zip(memory.by_ref()).collect();
        assert!(
            blocks.len() == self.records.len() && memory.next().is_none(),
            "an extent is written from one memory per block"
        );
        blocks
    }
}

/// Seals a segment. The records' data is synced first, so that the footer never outlives it.
pub(super) fn write_footer<D: Disk>(
    disk: &D,
    geometry: Geometry,
    header: &SegmentHeader,
    records: &[Record],
) -> Result<()> {
    let segment = header.segment;
    disk.sync(segment).on(segment, "sync the data")?;
    let (first, footer) = header.encode_footer(geometry, records);
    disk.write_at(segment, bytes_of(first), &footer).on(segment, "write the footer")?;
    disk.sync(segment).on(segment, "sync the footer")
}
