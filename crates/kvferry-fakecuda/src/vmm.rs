//! Virtual memory management: physical memory by handle, mapped into reserved addresses.

use std::sync::Arc;

use crate::abi::{Error, Result};
use crate::ipc::{Use, import_descriptor};
use crate::memory::{Kind, Mapping, UNWRITTEN, VmmHandle};
use crate::segments::Segment;
use crate::state::State;

/// The multiple of which sizes and addresses must be.
pub(crate) const GRANULARITY: u64 = 2 << 20;

impl State {
    pub(crate) fn create_vmm(
        &mut self,
        device: usize,
        len: u64,
        handle_types: i32,
        rdma_capable: u8,
    ) -> Result<u64> {
        if len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(Error::INVALID_VALUE);
        }
        self.charge(device, len)?;
        let name = self.segment_name(Use::Vmm, device);
        let segment = Arc::new(Segment::create(len, name, UNWRITTEN)?);
        let made =
            VmmHandle { segment, device, handle_types, rdma_capable, references: 1, charged: true };
        Ok(self.add_vmm(made))
    }

    /// A handle for the memory behind a descriptor.
    pub(crate) fn import_vmm(&mut self, descriptor: i32, handle_types: i32) -> Result<u64> {
        let segment = import_descriptor(descriptor)?;
        let device = self.named_device(segment.name())?;
        let segment = Arc::new(segment);
        let made = VmmHandle {
            segment,
            device,
            handle_types,
            rdma_capable: 1,
            references: 1,
            charged: false,
        };
        Ok(self.add_vmm(made))
    }

    fn add_vmm(&mut self, made: VmmHandle) -> u64 {
        let handle = self.new_handle() as u64;
        self.vmm.insert(handle, made);
        handle
    }

    /// A handle that the program still has.
    pub(crate) fn vmm(&mut self, handle: u64) -> Result<&mut VmmHandle> {
        let known = self.vmm.get_mut(&handle).filter(|known| known.references > 0);
        known.ok_or(Error::INVALID_VALUE)
    }

    pub(crate) fn release_vmm(&mut self, handle: u64) -> Result {
        self.vmm(handle)?.references -= 1;
        self.drop_unused_vmm(handle);
        Ok(())
    }

    /// Gives the memory back when neither a handle nor a mapping is left.
    fn drop_unused_vmm(&mut self, handle: u64) {
        let mapped = self.memory.mappings.values().any(|m| m.kind == Kind::Vmm(handle));
        let unused = self.vmm.get(&handle).is_some_and(|known| known.references == 0);
        if unused
            && !mapped
            && let Some(known) = self.vmm.remove(&handle)
            && known.charged
        {
            self.devices[known.device].used -= known.segment.len();
        }
    }

    pub(crate) fn map_vmm(&mut self, address: u64, len: u64, handle: u64) -> Result {
        let known = self.vmm(handle)?;
        let (segment, device) = (known.segment.clone(), known.device);
        let end = address.checked_add(len).ok_or(Error::INVALID_VALUE)?;
        if len == 0 || len > segment.len() || !(address | len).is_multiple_of(GRANULARITY) {
            return Err(Error::INVALID_VALUE);
        }
        let inside =
            |r: &crate::segments::Reserved| r.base() <= address && end <= r.base() + r.len();
        if !self.memory.reservations.values().any(inside) {
            return Err(Error::INVALID_VALUE);
        }
        let before = self.memory.mappings.range(..end).next_back();
        if before.is_some_and(|(_, m)| m.base + m.len > address) {
            return Err(Error::INVALID_VALUE);
        }
        let buffer_id = self.memory.fresh_id();
        let mapping = Mapping {
            base: address,
            len,
            segment,
            offset: 0,
            kind: Kind::Vmm(handle),
            device,
            readable: 0,
            writable: 0,
            buffer_id,
            reserved: None,
            opened: 1,
        };
        self.memory.mappings.insert(address, mapping);
        Ok(())
    }

    /// The bases of the VMM mappings that make up the range exactly.
    pub(crate) fn vmm_mappings(&self, address: u64, len: u64) -> Result<Vec<u64>> {
        let mut bases = Vec::new();
        let mut at = address;
        while at < address.saturating_add(len) {
            let mapping = self.memory.mappings.get(&at).ok_or(Error::INVALID_VALUE)?;
            if !matches!(mapping.kind, Kind::Vmm(_)) {
                return Err(Error::INVALID_VALUE);
            }
            bases.push(at);
            at += mapping.len;
        }
        if at == address + len { Ok(bases) } else { Err(Error::INVALID_VALUE) }
    }

    pub(crate) fn unmap_vmm(&mut self, address: u64, len: u64) -> Result {
        for base in self.vmm_mappings(address, len)? {
            let mapping = self.memory.free(base)?;
            self.checker.forget_range(mapping.base, mapping.len);
            if let Kind::Vmm(handle) = mapping.kind {
                self.drop_unused_vmm(handle);
            }
        }
        Ok(())
    }
}
