//! Plain copies of a table: within one process, and between two by `process_vm_writev` and
//! `process_vm_readv`.

use std::io::{self, IoSlice, IoSliceMut};

use kvferry_sys::process_vm::{self, RANGES_MAX, RemoteSpan};

use crate::options::Op;

use super::pages::Pages;
use super::tables::Table;

/// Numbers of ranges in one call that are tried; the last is the kernel's limit.
pub(super) const RANGES: [usize; 3] = [16, 128, RANGES_MAX];

/// Memory of another process, which this one may reach.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reached {
    pub(super) pid: i32,
    /// The address of its first byte there.
    pub(super) address: usize,
}

impl Reached {
    /// Copies a table's blocks between `memory` and the other process's, `ranges` of them in one call.
    pub(super) fn copy(
        self,
        op: Op,
        memory: &mut [u8],
        table: &Table,
        ranges: usize,
    ) -> io::Result<()> {
        match op {
            Op::Write => self.write(memory, table, ranges),
            Op::Read => self.read(memory, table, ranges),
        }
    }

    /// Takes a shared reference, so that several threads can write at once.
    pub(super) fn write(self, memory: &[u8], table: &Table, ranges: usize) -> io::Result<()> {
        let mut remote = Vec::with_capacity(ranges);
        let mut local = Vec::with_capacity(ranges);
        for pairs in table.pairs.chunks(ranges) {
            local.clear();
            remote.clear();
            for pair in pairs {
                local.push(IoSlice::new(&memory[pair.source..][..pair.len]));
                remote.push(self.at(pair.destination, pair.len));
            }
            whole(
                process_vm::write_slices(self.pid, &local, &remote)?,
                pairs.iter().map(|pair| pair.len).sum(),
            )?;
        }
        Ok(())
    }

    fn read(self, memory: &mut [u8], table: &Table, ranges: usize) -> io::Result<()> {
        let pieces = super::tables::carve(memory, table);
        let pieces = pieces.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let mut local: Vec<IoSliceMut<'_>> = pieces.into_iter().map(IoSliceMut::new).collect();
        let mut remote = Vec::with_capacity(ranges);
        for (pairs, local) in table.pairs.chunks(ranges).zip(local.chunks_mut(ranges)) {
            remote.clear();
            remote.extend(pairs.iter().map(|pair| self.at(pair.source, pair.len)));
            let bytes = pairs.iter().map(|pair| pair.len).sum();
            whole(process_vm::read_slices(self.pid, local, &remote)?, bytes)?;
        }
        Ok(())
    }

    fn at(self, offset: usize, len: usize) -> RemoteSpan {
        RemoteSpan::new(self.address + offset, len)
    }
}

/// Both processes own all of the memory, so a short copy is an error.
fn whole(copied: usize, meant: usize) -> io::Result<()> {
    if copied == meant { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// A table's blocks from one memory of this process to another.
pub(super) fn copy_here(from: &Pages, to: &mut Pages, table: &Table) {
    for pair in &table.pairs {
        to[pair.destination..][..pair.len].copy_from_slice(&from[pair.source..][..pair.len]);
    }
}
