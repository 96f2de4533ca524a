//! Finds the blocks of a segment again.
//!
//! [`scan`] reads the footer of a sealed segment, and looks for extent headers in any other, in up to
//! all of its pages. Pages that can't be read may list more blocks: [`Scanned::unreadable`] says so. It does not read
//! data: the reader of a block compares the sum. [`verify`] compares the sums of all blocks of a segment.

use super::appender::write_footer;
use super::format::{PAGE_BYTES, Record, SegmentHeader, Trailer, bytes_of, footer_pages, pages_of};
use super::{Disk, Error, Geometry, OnSegment, Result, Superblock};
use crate::tiers::disk::gate::is_hang;
use crc_fast::{CrcAlgorithm, Digest};
use std::io;
use std::sync::Arc;

/// The end of a segment that is read at once: trailer and, mostly, the whole footer.
const TAIL_PAGES: u32 = 32;
/// Pages that the search for extent headers reads at once: the first read at a place, and the largest
/// where it goes on page by page.
const WINDOW_PAGES: u32 = 16;
const WINDOW_PAGES_MAX: u32 = 1024;
/// Pages of a segment that can't be read, until the segment counts as unreadable: a device that fails may take seconds
/// for each.
const UNREADABLE_MAX: u32 = 16;
/// Data that is verified at once.
const VERIFY_BYTES: u64 = 1 << 20;

/// A segment in use, as it was found.
#[derive(Clone, Debug)]
pub struct Scanned {
    /// The use of the segment.
    pub header: SegmentHeader,
    /// Whether the records are those of a footer.
    pub is_sealed: bool,
    /// The blocks. Their data may be missing or torn; a key may be there twice.
    pub records: Vec<Record>,
    /// The page behind the last block.
    pub end: u32,
    /// The error of pages that could not be read and may list more blocks.
    pub unreadable: Option<Arc<io::Error>>,
}

/// Scans all segments of a disk. A segment that cannot be read costs its own blocks.
pub fn scan_all<D: Disk>(
    disk: &D,
    store: &Superblock,
) -> Result<Vec<(u32, Result<Option<Scanned>>)>> {
    let segments = disk
        .segments()
        .map_err(|source| Error::Directory { doing: "list the segments", source })?;
    Ok(segments.into_iter().map(|segment| (segment, scan(disk, store, segment))).collect())
}

/// Lists the blocks of a segment, or returns `None` for a free one.
pub fn scan<D: Disk>(disk: &D, store: &Superblock, segment: u32) -> Result<Option<Scanned>> {
    let mut page = [0; PAGE_BYTES];
    disk.read_at(segment, 0, &mut page).on(segment, "read the header")?;
    let Some(header) = SegmentHeader::decode(&page, &store.store, segment) else {
        return Ok(None);
    };
    // A footer that cannot be read is as good as a damaged one: the extent headers say the same.
    let scanned = match read_footer(disk, store.geometry, &header) {
        Ok(Some(scanned)) => scanned,
        Err(error) if is_hang(&error) => return Err(error).on(segment, "read the footer"),
        Ok(None) | Err(_) => {
            walk(disk, store.geometry, &header).on(segment, "read the extent headers")?
        }
    };
    Ok(Some(scanned))
}

/// Seals a segment that its appender did not seal, so that the next start reads only its footer. The
/// appender is gone: its process has ended.
///
/// # Errors
/// The device's; `Damaged` if there is no room for the footer; and if pages could not be read: blocks that the footer
/// does not list would be gone for good.
pub fn seal<D: Disk>(disk: &D, store: &Superblock, scanned: &mut Scanned) -> Result<()> {
    if scanned.is_sealed {
        return Ok(());
    }
    if let Some(error) = &scanned.unreadable {
        return Err(repeat(error)).on(scanned.header.segment, "read the extent headers");
    }
    let footer = footer_pages(scanned.records.len() as u32);
    if u64::from(scanned.end) + u64::from(footer) > store.geometry.pages().into() {
        return Err(Error::Damaged("the room for a segment's footer"));
    }
    write_footer(disk, store.geometry, &scanned.header, &scanned.records)?;
    scanned.is_sealed = true;
    Ok(())
}

/// Reason why a block failed [`verify`].
#[derive(Debug)]
pub enum Fault {
    /// The device did not return its data.
    Unreadable(io::Error),
    /// The data is not what was put: never written, torn, or changed.
    Sum,
}

/// Reads all blocks of a segment and returns those that a reader would not get.
pub fn verify<D: Disk>(disk: &D, scanned: &Scanned) -> Vec<(Record, Fault)> {
    let lens = scanned.records.iter().map(|record| bytes_of(pages_of(record.block.len)));
    let mut buffer = vec![0; lens.max().unwrap_or(0).min(VERIFY_BYTES) as usize];
    let mut faults = Vec::new();
    for record in &scanned.records {
        match read_sum(disk, scanned.header.segment, record.page, record.block.len, &mut buffer) {
            Ok(sum) if sum ^ record.block.check == record.block.sum => (),
            Ok(_) => faults.push((*record, Fault::Sum)),
            Err(error) => faults.push((*record, Fault::Unreadable(error))),
        }
    }
    faults
}

/// The sum of the bytes of a block.
pub(crate) fn sum_of<D: Disk>(disk: &D, segment: u32, page: u32, len: u32) -> io::Result<u64> {
    let mut buffer = vec![0; bytes_of(pages_of(len)).min(VERIFY_BYTES) as usize];
    read_sum(disk, segment, page, len, &mut buffer)
}

fn read_sum<D: Disk>(
    disk: &D,
    segment: u32,
    page: u32,
    len: u32,
    buffer: &mut [u8],
) -> io::Result<u64> {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    let mut at = bytes_of(page);
    let mut left = bytes_of(pages_of(len));
    while left > 0 {
        let len = left.min(buffer.len() as u64) as usize;
        disk.read_at(segment, at, &mut buffer[..len])?;
        digest.update(&buffer[..len]);
        at += len as u64;
        left -= len as u64;
    }
    Ok(digest.finalize())
}

fn read_footer<D: Disk>(
    disk: &D,
    geometry: Geometry,
    header: &SegmentHeader,
) -> io::Result<Option<Scanned>> {
    let tail = TAIL_PAGES.min(geometry.pages() - 1);
    let tail_at = geometry.pages() - tail;
    let mut bytes = vec![0; bytes_of(tail) as usize];
    disk.read_at(header.segment, bytes_of(tail_at), &mut bytes)?;
    let trailer_at = bytes.len() - PAGE_BYTES;
    let Some(trailer) = header.decode_trailer(geometry, &bytes[trailer_at..]) else {
        return Ok(None);
    };
    let Trailer { first, .. } = trailer;
    let mut skipped = 0;
    if first >= tail_at {
        skipped = bytes_of(first - tail_at) as usize;
    } else {
        bytes = vec![0; bytes_of(geometry.pages() - first) as usize];
        disk.read_at(header.segment, bytes_of(first), &mut bytes)?;
    }
    let footer = &bytes[skipped..bytes.len() - PAGE_BYTES];
    let Some(records) = header.decode_footer(trailer, footer) else {
        return Ok(None);
    };
    let records: Vec<_> = records.filter(|record| is_between(record, 1, first)).collect();
    let end = end_of(&records).max(1);
    Ok(Some(Scanned { header: *header, is_sealed: true, records, end, unreadable: None }))
}

fn walk<D: Disk>(disk: &D, geometry: Geometry, header: &SegmentHeader) -> io::Result<Scanned> {
    let mut window = Window { first: 0, bytes: Vec::new(), unreadable: 0, error: None };
    let mut records = Vec::new();
    let mut page = 1;
    let mut end = 1;
    while page < geometry.pages() {
        let bytes = match window.page(disk, geometry, header.segment, page) {
            Ok(bytes) => bytes,
            Err(error) if records.is_empty() || is_hang(&error) => return Err(error),
            // The file may be cut. Records before this page stay valid.
            Err(error) => {
                window.error = Some(error);
                break;
            }
        };
        if let Some(extent) = header.decode_extent(page, bytes) {
            let before = records.len();
            records.extend(extent.filter(|record| is_between(record, page + 1, geometry.pages())));
            // The data of an extent holds no extents.
            end = end_of(&records[before..]).max(page + 1);
            page = end;
        } else {
            page += 1;
        }
    }
    let unreadable = window.error.map(Arc::new);
    Ok(Scanned { header: *header, is_sealed: false, records, end, unreadable })
}

/// Whether a record's data lies in pages `from..to`.
fn is_between(record: &Record, from: u32, to: u32) -> bool {
    record.page >= from && record.end() <= u64::from(to)
}

/// The page behind the last block of records that lie within their segment.
fn end_of(records: &[Record]) -> u32 {
    records.iter().map(|record| record.end() as u32).max().unwrap_or(0)
}

/// The part of a segment that was read last.
struct Window {
    first: u32,
    bytes: Vec<u8>,
    /// Pages that were asked for and can't be read, and the last error.
    unreadable: u32,
    error: Option<io::Error>,
}

impl Window {
    fn page<D: Disk>(
        &mut self,
        disk: &D,
        geometry: Geometry,
        segment: u32,
        page: u32,
    ) -> io::Result<&[u8]> {
        let pages = (self.bytes.len() / PAGE_BYTES) as u32;
        if !(self.first..self.first + pages).contains(&page) {
            // Behind an extent, a header is expected at once; else it may be anywhere.
            let continues = page == self.first + pages;
            let wanted = if continues { (pages * 2).min(WINDOW_PAGES_MAX) } else { WINDOW_PAGES };
            let wanted = wanted.min(geometry.pages() - page);
            self.bytes.resize(bytes_of(wanted) as usize, 0);
            self.first = page;
            if disk.read_at(segment, bytes_of(page), &mut self.bytes).is_err() {
                self.read_one(disk, segment)?;
            }
        }
        let at = bytes_of(page - self.first) as usize;
        Ok(&self.bytes[at..at + PAGE_BYTES])
    }

    /// Reads only the first page. One that can't be read holds no header: it reads as zeros.
    fn read_one<D: Disk>(&mut self, disk: &D, segment: u32) -> io::Result<()> {
        self.bytes.clear();
        self.bytes.resize(PAGE_BYTES, 0);
        let Err(error) = disk.read_at(segment, bytes_of(self.first), &mut self.bytes) else {
            return Ok(());
        };
        self.unreadable += 1;
        // What is on a device that hangs can be read later.
        if self.unreadable > UNREADABLE_MAX || is_hang(&error) {
            return Err(error);
        }
        self.error = Some(error);
        self.bytes.fill(0);
        Ok(())
    }
}

/// The same error once more.
fn repeat(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}
