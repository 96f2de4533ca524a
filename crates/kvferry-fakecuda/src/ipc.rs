//! Memory of other processes: legacy handles and descriptors, and the names by which they are
//! recognized.
//!
//! A handle states a process, a descriptor in it, and the name of the memfd behind the
//! descriptor. The importer opens the descriptor through `/proc` and compares the name, which is
//! unique: a handle whose memory was freed, or whose process has ended, finds another name or
//! none.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::abi::{Error, IpcHandle, Result};
use crate::devices::uuid_text;
use crate::memory::Mapping;
use crate::segments::Segment;
use crate::state::State;

const MAGIC: [u8; 8] = *b"fakecuda";

/// Content of a legacy handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) process: u32,
    descriptor: i32,
    /// The number that only this memory has.
    id: u64,
    created: u64,
    len: u64,
    physical: u32,
}

impl Description {
    pub(crate) fn of(mapping: &Mapping, physical: usize) -> Self {
        let (process, id, created) = name_parts(mapping.segment.name()).unwrap_or_default();
        Self {
            process,
            descriptor: mapping.segment.fd().as_raw_fd(),
            id,
            created,
            len: mapping.len,
            physical: physical as u32,
        }
    }

    pub(crate) fn encode(&self) -> IpcHandle {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.process.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.descriptor.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.id.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.created.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.len.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.physical.to_le_bytes());
        let sum = checksum(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        IpcHandle(bytes)
    }

    /// `INVALID_VALUE` for bytes that no exporter made.
    pub(crate) fn decode(handle: &IpcHandle) -> Result<Self> {
        let bytes = &handle.0;
        let wide = |at: usize| {
            let mut part = [0; 8];
            part.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(part)
        };
        if bytes[..8] != MAGIC || wide(56) != checksum(&bytes[..56]) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(Self {
            process: wide(8) as u32,
            descriptor: (wide(8) >> 32) as i32,
            id: wide(16),
            created: wide(24),
            len: wide(32),
            physical: wide(40) as u32,
        })
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The visible ordinal of the device that has the memory.
    pub(crate) fn device(&self, state: &State) -> Result<usize> {
        let is_it = |device: &crate::devices::Device| device.physical == self.physical as usize;
        state.devices.iter().position(is_it).ok_or(Error::INVALID_DEVICE)
    }

    /// Opens the memory. `INVALID_HANDLE`: the process is gone; `MAP_FAILED`: the memory is.
    pub(crate) fn open(&self) -> Result<Segment> {
        let process = format!("/proc/{}", self.process);
        if !std::path::Path::new(&process).exists() {
            return Err(Error::INVALID_HANDLE);
        }
        let path = format!("{process}/fd/{}", self.descriptor);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|_| Error::MAP_FAILED)?;
        let name = memfd_name(file.as_fd()).ok_or(Error::MAP_FAILED)?;
        if name_parts(&name) != Some((self.process, self.id, self.created)) {
            return Err(Error::MAP_FAILED);
        }
        Segment::import(OwnedFd::from(file), name)
    }

    /// Whether `segment` is this memory.
    pub(crate) fn names(&self, segment: &Segment) -> bool {
        name_parts(segment.name()) == Some((self.process, self.id, self.created))
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Purpose of a segment's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Allocation,
    Vmm,
    Dmabuf,
}

impl Use {
    fn prefix(self) -> &'static str {
        match self {
            Self::Allocation => "fakecuda-mem:",
            Self::Vmm => "fakecuda-vmm:",
            Self::Dmabuf => "fakecuda-dmabuf:",
        }
    }
}

impl State {
    /// The name of a new segment: what it is, its device, its process, and numbers that no other
    /// segment has.
    pub(crate) fn segment_name(&mut self, used: Use, device: usize) -> String {
        let id = self.memory.fresh_id();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let uuid = uuid_text(self.devices[device].uuid());
        let (process, created) = (std::process::id(), since.as_nanos() as u64);
        format!("{}{uuid}:{process}:{id}:{created}", used.prefix())
    }

    /// The visible ordinal of the device in a segment's name.
    pub(crate) fn named_device(&self, name: &str) -> Result<usize> {
        let uuid = name.split(':').nth(1).ok_or(Error::INVALID_VALUE)?;
        let is_it = |device: &crate::devices::Device| uuid_text(device.uuid()) == uuid;
        self.devices.iter().position(is_it).ok_or(Error::INVALID_DEVICE)
    }
}

/// The process, identifier and creation time in a segment's name.
fn name_parts(name: &str) -> Option<(u32, u64, u64)> {
    let mut parts = name.split(':').skip(2);
    let process = parts.next()?.parse().ok()?;
    let id = parts.next()?.parse().ok()?;
    Some((process, id, parts.next()?.parse().ok()?))
}

/// The name that a memfd was created with.
fn memfd_name(fd: BorrowedFd<'_>) -> Option<String> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:")?;
    Some(name.strip_suffix(" (deleted)").unwrap_or(name).to_owned())
}

/// Takes a copy of a descriptor that another handle was exported as.
pub(crate) fn import_descriptor(descriptor: i32) -> Result<Segment> {
    if descriptor < 0 {
        return Err(Error::INVALID_VALUE);
    }
    // The path opens the same memory anew, so the caller's descriptor stays the caller's.
    let path = format!("/proc/self/fd/{descriptor}");
    let link = std::fs::read_link(&path).map_err(|_| Error::INVALID_VALUE)?;
    let expected = format!("/memfd:{}", Use::Vmm.prefix());
    if !link.to_str().is_some_and(|link| link.starts_with(&expected)) {
        return Err(Error::INVALID_VALUE);
    }
    let file = File::options().read(true).write(true).open(&path);
    let file = file.map_err(|_| Error::INVALID_VALUE)?;
    let name = memfd_name(file.as_fd()).ok_or(Error::INVALID_VALUE)?;
    Segment::import(OwnedFd::from(file), name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_its_bytes_and_no_bit_of_it_may_change() {
        let description = Description {
            process: 77,
            descriptor: 12,
            id: 3,
            created: u64::MAX - 1,
            len: 4096,
            physical: 1,
        };
        let handle = description.encode();
        assert_eq!(Description::decode(&handle), Ok(description));
        for bit in 0..512 {
            let mut changed = handle;
            changed.0[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Description::decode(&changed), Err(Error::INVALID_VALUE), "bit {bit}");
        }
    }
}
