//! Anonymous memory.

use crate::retry_on_intr;
use crate::shared::{TAKE_STEP, check_available};
use crate::span::HostSpan;
use rustix::io::Errno;
use rustix::mm::Advice;
use std::io;
use std::ptr::NonNull;

/// Private anonymous memory, zeroed, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range of the process that this value owns; any thread may use and
// unmap it.
unsafe impl Send for Mapping {}
// SAFETY: shared access only yields spans and raw copies; races on the bytes are the caller's.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, rounded up to whole pages by the kernel.
    ///
    /// # Errors
    /// `InvalidInput` for zero bytes, else the kernel's error (no memory, a limit).
    pub fn anonymous(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a mapping can't be empty"));
        }
        // SAFETY: a new anonymous mapping at an address that the kernel chooses overlaps nothing.
        let p = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
            )
        }?;
        let base = NonNull::new(p.cast()).expect("the kernel maps page zero only on request");
        Ok(Self { base, len })
    }

    /// Maps memory as [`Mapping::anonymous`] does and takes the pages from the system, where the
    /// kernel can (Linux 5.14). They are huge pages if the system has free ones and does not forbid
    /// them: a device moves contiguous memory in fewer parts.
    ///
    /// # Errors
    /// As [`Mapping::anonymous`]; `OutOfMemory` if the system has less memory than 64 MiB or more
    /// that are asked for.
    pub fn populated(len: usize) -> io::Result<Self> {
        let mapping = Self::anonymous(len)?;
        check_available(len)?;
        // SAFETY: the range is the mapping. Advice changes no byte.
        let _ = unsafe {
            rustix::mm::madvise(mapping.base.as_ptr().cast(), len, Advice::LinuxHugepage)
        };
        let step = usize::try_from(TAKE_STEP).expect("it fits into an address space");
        for at in (0..len).step_by(step) {
            let size = step.min(len - at);
            // SAFETY: the range is inside the mapping. Populating changes no byte.
            let taken = retry_on_intr(|| unsafe {
                let first = mapping.base.as_ptr().add(at).cast();
                Ok(rustix::mm::madvise(first, size, Advice::LinuxPopulateWrite)?)
            });
            match taken {
                Err(e) if Errno::from_io_error(&e) == Some(Errno::INVAL) => break,
                taken => taken?,
            }
        }
        Ok(mapping)
    }

    /// Maps memory as [`Mapping::anonymous`] does; a forked child finds zeroes there. A device copies from and to the pages
    /// that it has pinned: were they shared with a child, the kernel could give this process others at its next write.
    ///
    /// # Errors
    /// As [`Mapping::anonymous`].
    pub fn kept_from_children(len: usize) -> io::Result<Self> {
        let mapping = Self::anonymous(len)?;
        // Linux 4.14. Before that, a child shares the pages.
        // SAFETY: the range is the mapping. Advice changes no byte of this process.
        let _ = unsafe {
            rustix::mm::madvise(mapping.base.as_ptr().cast(), len, Advice::LinuxWipeOnFork)
        };
        Ok(mapping)
    }

    /// Has the pages that the mapping takes from now on come from a NUMA node, as long as the node has free ones.
    ///
    /// # Errors
    /// `PermissionDenied` in a container that may not choose (Docker without `CAP_SYS_NICE`); `InvalidInput` if the
    /// process may not use the node, or there is none of this number; else the kernel's error.
    pub fn prefer_node(&self, node: u32) -> io::Result<()> {
        const WORD: u32 = std::ffi::c_ulong::BITS;
        let mut nodes: Vec<std::ffi::c_ulong> = vec![0; (node / WORD) as usize + 1];
        nodes[(node / WORD) as usize] = 1 << (node % WORD);
        // `mbind` reads one bit less than this argument says.
        let bits = nodes.len() * WORD as usize + 1;
        // SAFETY: the range is the mapping, and the policy of its pages changes no byte. The kernel reads `nodes`.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.len,
                libc::MPOL_PREFERRED,
                nodes.as_ptr(),
                bits,
                0,
            )
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Gives the pages of a part of the mapping back to the system. Its bytes are zero afterwards.
    ///
    /// # Errors
    /// The kernel's, as for memory that is locked: the pages then stay as they are.
    ///
    /// # Panics
    /// If the part is not inside the mapping.
    pub fn give_back(&self, offset: usize, len: usize) -> io::Result<()> {
        let part = self.span(offset, len);
        // SAFETY: the part is inside the mapping, to whose bytes no reference exists. The kernel refuses what is not whole
        // pages.
        let given =
            unsafe { rustix::mm::madvise(part.as_ptr().cast(), len, Advice::LinuxDontNeed) };
        Ok(given?)
    }

    /// Start address of the mapping.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The requested length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: an empty mapping can't be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes `offset..offset + len` as a span.
    ///
    /// # Panics
    /// If the range is not inside the mapping.
    pub fn span(&self, offset: usize, len: usize) -> HostSpan {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "the range is outside the mapping"
        );
        // SAFETY: the range is inside the mapping, which is readable and writable until drop; no
        // reference to it is ever made. The owners of span and mapping (`kvferry::memory`) ensure
        // that no span outlives the mapping.
        unsafe { HostSpan::new(self.base.as_ptr().add(offset), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped; the value is gone afterwards. `munmap` can
        // only fail if the range is not mapped, and then there is nothing to undo.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::available;

    /// Bytes of pages that this mapping has.
    fn taken(mapping: &Mapping) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("this is Linux");
        let range = format!("{:x}-", mapping.as_ptr().addr());
        let entry = smaps.lines().skip_while(|line| !line.starts_with(&range));
        let kib = entry.filter_map(|line| line.strip_prefix("Rss:")).next().expect("a mapping");
        kib.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") * 1024
    }

    #[test]
    fn a_populated_mapping_has_its_pages_before_the_first_touch() {
        let len = usize::try_from(TAKE_STEP).expect("small") + 4097;
        let mapping = Mapping::populated(len).expect("memory");
        assert!(taken(&mapping) >= len, "{} of {len}", taken(&mapping));
        let mut bytes = [1; 8];
        mapping.span(len - 8, 8).copy_to(&mut bytes);
        assert_eq!(bytes, [0; 8]);
    }

    #[test]
    fn a_forked_child_shares_no_page_of_memory_that_is_kept_from_children() {
        let bytes_in_child = |mapping: &Mapping| {
            mapping.span(0, 1).copy_from(&[7]);
            let mut byte = [1];
            // SAFETY: the child copies a byte and ends.
            match unsafe { libc::fork() } {
                0 => {
                    mapping.span(0, 1).copy_to(&mut byte);
                    // SAFETY: ends the child without the handlers of its parent.
                    unsafe { libc::_exit(byte[0].into()) }
                }
                child => {
                    let mut status = 0;
                    // SAFETY: the child was made above, and the kernel writes one integer.
                    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                    libc::WEXITSTATUS(status)
                }
            }
        };
        assert_eq!(bytes_in_child(&Mapping::anonymous(4096).expect("memory")), 7);
        assert_eq!(bytes_in_child(&Mapping::kept_from_children(4096).expect("memory")), 0);
    }

    #[test]
    fn a_mapping_takes_its_pages_from_the_node_that_it_prefers() {
        let mapping = Mapping::anonymous(1 << 20).expect("memory");
        match mapping.prefer_node(0) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                println!("SKIPPED: this container may not choose the NUMA node of memory: {error}");
                return;
            }
            preferred => preferred.expect("there is a node 0"),
        }
        mapping.span(0, 1).copy_from(&[7]);
        let maps = std::fs::read_to_string("/proc/self/numa_maps").expect("this is Linux");
        let begin = format!("{:x} ", mapping.as_ptr().addr());
        let policy = maps.lines().find(|line| line.starts_with(&begin)).expect("the mapping");
        assert!(policy.contains(" prefer:0 "), "{policy}");
        assert!(policy.contains("N0="), "{policy}");
    }

    #[test]
    fn pages_that_were_given_back_are_zero_and_taken_anew() {
        let (page, len) = (rustix::param::page_size(), 16 * rustix::param::page_size());
        let mapping = Mapping::kept_from_children(len).expect("memory");
        mapping.span(0, len).copy_from(&vec![7; len]);
        assert_eq!(taken(&mapping), len);
        mapping.give_back(page, 8 * page).expect("whole pages");
        assert_eq!(taken(&mapping), len - 8 * page);
        let mut bytes = vec![1; len];
        mapping.span(0, len).copy_to(&mut bytes);
        let given = page..9 * page;
        assert!(
            bytes.iter().enumerate().all(|(at, byte)| *byte == 7 * u8::from(!given.contains(&at)))
        );
        mapping.give_back(1, page).expect_err("no whole pages");
    }

    #[test]
    fn a_node_that_does_not_exist_is_refused() {
        let mapping = Mapping::anonymous(4096).expect("memory");
        for node in [1023, 1 << 20] {
            mapping.prefer_node(node).expect_err("there is no such node");
        }
    }

    #[test]
    fn more_memory_than_the_system_has_is_refused() {
        let available = usize::try_from(available().expect("this is Linux")).expect("64 bits");
        let refused = Mapping::populated(2 * available).expect_err("twice what there is");
        assert_eq!(refused.kind(), io::ErrorKind::OutOfMemory, "{refused}");
    }
}
