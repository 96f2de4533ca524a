//! Location of the engine's pages.

use kvferry::Region;
use kvferry_store::BlockMemory;

/// A part of each page of a group: page `n` has `len` bytes of it at `base + n * stride`.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "said above")]
pub struct Piece {
    pub region: Region,
    pub base: u64,
    pub stride: u64,
    pub len: u64,
}

impl Piece {
    pub(crate) fn offset(&self, page: u32) -> u64 {
        self.base + u64::from(page) * self.stride
    }
}

/// The pieces of which the pages of each group consist, in an order that never changes: it is that of the bytes in
/// files.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    groups: Vec<Vec<Piece>>,
}

impl Pages {
    /// `groups[n]`: the pieces of group `n`. Pieces that lie behind each other become one.
    pub fn new(groups: Vec<Vec<Piece>>) -> Self {
        let merged = groups.into_iter().map(|pieces| {
            let mut merged: Vec<Piece> = Vec::new();
            for piece in pieces {
                match merged.last_mut() {
                    Some(last)
                        if last.region.id() == piece.region.id()
                            && last.stride == piece.stride
                            && last.base + last.len == piece.base =>
                    {
                        last.len += piece.len;
                    }
                    _ => merged.push(piece),
                }
            }
            merged
        });
        Self { groups: merged.collect() }
    }

    /// Number of groups.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Bytes of a page of a group.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn page_bytes(&self, group: usize) -> u64 {
        self.groups[group].iter().map(|piece| piece.len).sum()
    }

    /// A page as the memory of a block.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn memory(&self, group: usize, page: u32) -> BlockMemory {
        self.groups[group].iter().fold(BlockMemory::default(), |memory, piece| {
            memory.and(&piece.region, piece.offset(page), piece.len)
        })
    }

    /// Copies a page to `offset` of a region, its pieces one behind another.
    pub(crate) fn gather(
        &self,
        group: usize,
        page: u32,
        into: &Region,
        offset: u64,
    ) -> kvferry::Result<()> {
        let mut at = offset;
        for piece in &self.groups[group] {
            into.copy_from(at, &piece.region, piece.offset(page), piece.len)?;
            at += piece.len;
        }
        Ok(())
    }

    /// The reverse of [`Pages::gather`].
    pub(crate) fn scatter(
        &self,
        group: usize,
        page: u32,
        from: &Region,
        offset: u64,
    ) -> kvferry::Result<()> {
        let mut at = offset;
        for piece in &self.groups[group] {
            piece.region.copy_from(piece.offset(page), from, at, piece.len)?;
            at += piece.len;
        }
        Ok(())
    }

    /// Copies a page to another one.
    pub(crate) fn copy(&self, group: usize, from: u32, to: u32) -> kvferry::Result<()> {
        for piece in &self.groups[group] {
            let (from, to) = (piece.offset(from), piece.offset(to));
            piece.region.copy_from(to, &piece.region, from, piece.len)?;
        }
        Ok(())
    }
}
