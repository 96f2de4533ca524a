//! Whether a range of addresses is host memory that this process may touch.
//!
//! Addresses of device memory look like others: a copy from one fails with `EFAULT`, or ends the
//! process where a processor touches it. The kernel's list of mappings tells them apart, and a CUDA
//! driver that the process has loaded already. Neither loads nor initialises a driver.
//!
//! A process that was forked from one that used the driver must not call it. There, the kernel's list alone tells: memory
//! of devices is refused as before, because nothing that this process may touch is mapped at its addresses, or a file of
//! the device is. So is memory that the driver of the parent has allocated on the host, if it is mapped from such a file.
//! The parent is known to have used the driver if it has initialised it by [`crate::cuda`], or if the driver has answered
//! a question of this module. If another library has initialised it after the last question, the driver of the child
//! is asked, and answers that it is not initialised.

use crate::cuda;
use libloading::os::unix::{Library, RTLD_LAZY};
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Files whose mappings are memory of a device.
const DEVICES: [&str; 3] = ["/dev/nvidia", "/dev/dri", "/dev/kfd"];

/// The reason why a range is not host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotHost {
    /// Memory of a device is at `addr`; `what` names the file that is mapped there, or the driver
    /// that reports it.
    Device {
        /// Address of a byte of that memory.
        addr: usize,
        /// Name of the mapped file, or of the driver.
        what: String,
    },
    /// Nothing is mapped at this address.
    Unmapped(usize),
    /// The bytes at this address can't be read.
    Unreadable(usize),
    /// The bytes at this address can't be written.
    ReadOnly(usize),
    /// The kernel does not list the process's mappings.
    Unknown(io::ErrorKind),
}

impl fmt::Display for NotHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device { addr, what } => write!(f, "{addr:#x} is memory of a device ({what})"),
            Self::Unmapped(addr) => write!(f, "nothing is mapped at {addr:#x}"),
            Self::Unreadable(addr) => write!(f, "this process can't read {addr:#x}"),
            Self::ReadOnly(addr) => write!(f, "this process can't write to {addr:#x}"),
            Self::Unknown(why) => write!(f, "the mappings of this process are not known: {why}"),
        }
    }
}

/// A mapping: its addresses and what may be done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapped {
    range: Range<usize>,
    reads: bool,
    writes: bool,
    /// The file of a device, if it is one.
    device: Option<String>,
}

/// Checks ranges. Create one for each call: it does not notice what is mapped later.
#[derive(Debug)]
pub struct HostMemory {
    maps: Maps,
    last: Option<Mapped>,
}

#[derive(Debug)]
enum Maps {
    /// The kernel is asked for each mapping, since Linux 6.11.
    Asked(File),
    /// The process's mappings in ascending order, read from the list.
    Read(Vec<Mapped>),
}

impl HostMemory {
    /// Prepares for checks.
    ///
    /// # Errors
    /// [`NotHost::Unknown`] without `/proc`.
    pub fn of_this_process() -> Result<Self, NotHost> {
        let unknown = |error: io::Error| NotHost::Unknown(error.kind());
        let file = File::open("/proc/self/maps").map_err(unknown)?;
        let maps = match query(&file, 0) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Maps::read(file),
            _ => Ok(Maps::Asked(file)),
        };
        Ok(Self { maps: maps.map_err(unknown)?, last: None })
    }

    /// Checks that this process may read a range, and write to it if `writes`, and that it is not
    /// memory of a device.
    ///
    /// # Errors
    /// The first reason against it.
    pub fn check(&mut self, addr: usize, len: usize, writes: bool) -> Result<(), NotHost> {
        let end = addr.checked_add(len).ok_or(NotHost::Unmapped(usize::MAX))?;
        let driver = driver();
        let mut is_host_to_driver = false;
        for at in [addr, end.saturating_sub(1)] {
            match driver.and_then(|driver| driver.kind_of(at)) {
                Some(Kind::Host) => is_host_to_driver = true,
                Some(Kind::Device) => {
                    return Err(NotHost::Device { addr: at, what: "the CUDA driver".to_owned() });
                }
                None => {}
            }
        }
        let mut at = addr;
        while at < end {
            let mapped = self.at(at)?;
            if !is_host_to_driver && let Some(file) = &mapped.device {
                return Err(NotHost::Device { addr: at, what: file.clone() });
            }
            if !mapped.reads {
                return Err(NotHost::Unreadable(at));
            }
            if writes && !mapped.writes {
                return Err(NotHost::ReadOnly(at));
            }
            at = mapped.range.end;
        }
        Ok(())
    }

    fn at(&mut self, addr: usize) -> Result<&Mapped, NotHost> {
        if !self.last.as_ref().is_some_and(|last| last.range.contains(&addr)) {
            let found = match &self.maps {
                Maps::Asked(file) => {
                    query(file, addr).map_err(|error| match error.raw_os_error() {
                        Some(libc::ENOENT) => NotHost::Unmapped(addr),
                        _ => NotHost::Unknown(error.kind()),
                    })?
                }
                Maps::Read(all) => {
                    let next = all.partition_point(|mapped| mapped.range.end <= addr);
                    let found = all.get(next).filter(|mapped| mapped.range.contains(&addr));
                    found.cloned().ok_or(NotHost::Unmapped(addr))?
                }
            };
            self.last = Some(found);
        }
        Ok(self.last.as_ref().expect("found above"))
    }
}

impl Maps {
    fn read(mut file: File) -> io::Result<Self> {
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok(Self::Read(String::from_utf8_lossy(&text).lines().filter_map(parse).collect()))
    }
}

/// A line of `/proc/self/maps`: `start-end rwxp offset device inode name`.
fn parse(line: &str) -> Option<Mapped> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let access = words.next()?.as_bytes();
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    let name = words.nth(3).unwrap_or_default().trim_start();
    Some(Mapped {
        range,
        reads: access.first() == Some(&b'r'),
        writes: access.get(1) == Some(&b'w'),
        device: device(name),
    })
}

fn device(name: &str) -> Option<String> {
    DEVICES.iter().any(|device| name.starts_with(device)).then(|| name.to_owned())
}

/// `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    addr: u64,
    start: u64,
    end: u64,
    access: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name_addr: u64,
    build_id_addr: u64,
}

/// The mapping that covers an address: `PROCMAP_QUERY`.
fn query(file: &File, addr: usize) -> io::Result<Mapped> {
    const PROCMAP_QUERY: u64 = 0xc068_6611;
    const READABLE: u64 = 1;
    const WRITABLE: u64 = 2;
    let mut name = [0u8; 256];
    let mut query = Query {
        size: size_of::<Query>() as u64,
        addr: addr as u64,
        name_size: name.len() as u32,
        name_addr: name.as_mut_ptr() as u64,
        ..Query::default()
    };
    let ask = |query: &mut Query| {
        // SAFETY: the kernel reads and writes one `procmap_query`, whose size is in it, and at
        // most `name_size` bytes at `name_addr`, which outlive the call.
        let n = unsafe { libc::ioctl(file.as_raw_fd(), PROCMAP_QUERY as _, &raw mut *query) };
        crate::check(n as libc::ssize_t)
    };
    let mut asked = ask(&mut query);
    if asked.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENAMETOOLONG)) {
        // No device's file has so long a name.
        (query.name_size, query.name_addr) = (0, 0);
        asked = ask(&mut query);
    }
    asked?;
    let len = (query.name_size as usize).saturating_sub(1);
    let name = String::from_utf8_lossy(name.get(..len).unwrap_or_default());
    Ok(Mapped {
        range: query.start as usize..query.end as usize,
        reads: query.access & READABLE != 0,
        writes: query.access & WRITABLE != 0,
        device: device(&name),
    })
}

enum Kind {
    Host,
    Device,
}

/// `cuPointerGetAttribute(value, attribute, pointer)`.
type PointerAttribute = unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int;

/// A CUDA driver that the process uses.
#[derive(Clone, Copy)]
struct Driver(PointerAttribute);

/// The CUDA driver that this process uses already. Looking for it neither loads nor initialises one.
#[derive(Clone, Copy)]
pub struct LoadedDriver(Driver);

impl LoadedDriver {
    /// The driver, if the process has loaded it by now.
    pub fn find() -> Option<Self> {
        driver().map(Self)
    }

    /// Whether the driver says that the byte at `addr` is memory of a device, or managed memory. False while nothing
    /// has initialised the driver: then no such memory exists. False, too, in a process that was forked from one that
    /// used the driver: it can't use such memory, and the driver is not asked.
    pub fn has_device_memory_at(self, addr: usize) -> bool {
        matches!(self.0.kind_of(addr), Some(Kind::Device))
    }
}

impl fmt::Debug for LoadedDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedDriver").finish_non_exhaustive()
    }
}

/// The driver, if the process has loaded it by now.
fn driver() -> Option<Driver> {
    // Its function; null until it is found. No lock: a forked child might wait for a thread of its parent.
    static FUNCTION: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    // How many libraries had been loaded when the driver was not among them: looking for it takes longer
    // than a registration.
    static WITHOUT: AtomicU64 = AtomicU64::new(u64::MAX);
    let function = FUNCTION.load(Ordering::Relaxed);
    if !function.is_null() {
        // SAFETY: only pointers of this type are stored.
        let function = unsafe { std::mem::transmute::<*mut c_void, PointerAttribute>(function) };
        return Some(Driver(function));
    }
    let loaded = libraries_loaded();
    if WITHOUT.load(Ordering::Relaxed) == loaded {
        return None;
    }
    // SAFETY: with `RTLD_NOLOAD` no initialiser runs.
    let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_LAZY | libc::RTLD_NOLOAD) };
    let Ok(library) = library else {
        WITHOUT.store(loaded, Ordering::Relaxed);
        return None;
    };
    // The function must stay callable.
    let library = ManuallyDrop::new(library);
    // SAFETY: the type is that of `cuda.h`.
    let function = *unsafe { library.get::<PointerAttribute>(b"cuPointerGetAttribute\0") }.ok()?;
    FUNCTION.store(function as *mut c_void, Ordering::Relaxed);
    Some(Driver(function))
}

/// Number of libraries that this process has loaded so far, including those that were unloaded.
fn libraries_loaded() -> u64 {
    unsafe extern "C" fn take(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        adds: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a valid `info` and the `adds` of the call below.
        unsafe { *adds.cast::<u64>() = (*info).dlpi_adds };
        // The first object says it.
        1
    }
    let mut adds = 0u64;
    // SAFETY: `take` writes to `adds`, which outlives the call, and does not unwind.
    unsafe { libc::dl_iterate_phdr(Some(take), (&raw mut adds).cast()) };
    adds
}

impl Driver {
    /// Kind of the memory at an address, as the driver reports it. `None` for memory that is not
    /// its own, and in a process that was forked from one that used it.
    fn kind_of(self, addr: usize) -> Option<Kind> {
        const MEMORY_TYPE: c_int = 2;
        const IS_MANAGED: c_int = 8;
        const HOST: c_uint = 1;
        const SUCCESS: c_int = 0;
        const INVALID_VALUE: c_int = 1;
        if cuda::Driver::is_inherited() {
            return None;
        }
        let attribute = |which| {
            let mut value: c_uint = 0;
            // SAFETY: both attributes are numbers of 32 bits; the driver only looks the address up.
            let code = unsafe { (self.0)((&raw mut value).cast(), which, addr as u64) };
            // Only an initialised driver knows the address, or that it does not.
            if matches!(code, SUCCESS | INVALID_VALUE) {
                cuda::Driver::claim();
            }
            (code == SUCCESS).then_some(value)
        };
        let kind = attribute(MEMORY_TYPE)?;
        // The driver moves the pages of managed memory to devices and back.
        let is_managed = attribute(IS_MANAGED).is_some_and(|managed| managed & 0xff != 0);
        Some(if kind == HOST && !is_managed { Kind::Host } else { Kind::Device })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Mapping;

    /// Returns a checker for each way of asking the kernel.
    fn both() -> [HostMemory; 2] {
        let file = || File::open("/proc/self/maps").expect("a list");
        let read = HostMemory { maps: Maps::read(file()).expect("a list"), last: None };
        [HostMemory::of_this_process().expect("a list"), read]
    }

    fn protect(addr: usize, len: usize, access: c_int) {
        // SAFETY: the range belongs to the caller's own mapping, which nothing reads meanwhile.
        let done = unsafe { libc::mprotect(addr as *mut c_void, len, access) };
        assert_eq!(done, 0);
    }

    #[test]
    fn memory_that_this_process_reads_and_writes_is_host_memory() {
        let map = Mapping::anonymous(1 << 20).expect("memory");
        let base = map.as_ptr() as usize;
        let heap = Box::new([0u8; 100]);
        for mut host in both() {
            assert_eq!(host.check(base, 1 << 20, true), Ok(()));
            assert_eq!(host.check(base + 17, 1, true), Ok(()));
            assert_eq!(host.check(heap.as_ptr() as usize, 100, true), Ok(()));
        }
    }

    #[test]
    fn a_range_with_a_part_that_is_missing_read_only_or_without_access_is_not() {
        const PAGE: usize = 65_536;
        let map = Mapping::anonymous(4 * PAGE).expect("memory");
        let base = map.as_ptr() as usize;
        protect(base + PAGE, PAGE, libc::PROT_NONE);
        protect(base + 2 * PAGE, PAGE, libc::PROT_READ);
        for mut host in both() {
            let refused = host.check(base, 4 * PAGE, true);
            assert_eq!(refused, Err(NotHost::Unreadable(base + PAGE)));
            let read_only = base + 2 * PAGE;
            assert_eq!(host.check(read_only, 2 * PAGE, true), Err(NotHost::ReadOnly(read_only)));
            assert_eq!(host.check(read_only, 2 * PAGE, false), Ok(()));
            assert_eq!(host.check(4096, 10, false), Err(NotHost::Unmapped(4096)));
            assert!(host.check(usize::MAX - 5, 10, false).is_err());
        }
        drop(map);
        for mut host in both() {
            assert_eq!(host.check(base, 1, false), Err(NotHost::Unmapped(base)));
        }
    }

    #[test]
    fn a_mapping_of_a_devices_file_is_memory_of_a_device() {
        let mapped = parse("7f0000-7f2000 rw-s 00000000 00:06 450                 /dev/nvidia-uvm");
        let mapped = mapped.expect("a line");
        assert_eq!(mapped.range, 0x7f_0000..0x7f_2000);
        let mut host = HostMemory { maps: Maps::Read(vec![mapped]), last: None };
        let refused = host.check(0x7f_1000, 8, true).expect_err("a device");
        assert!(refused.to_string().contains("/dev/nvidia-uvm"), "{refused}");
    }
}
