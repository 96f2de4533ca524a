//! A test's safe access to the control functions of the library that the process has loaded.
//!
//! The state is the loaded library's: this module finds the functions in the shared object, and
//! never in the crate that the test links.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use crate::faults::Fault;

/// Engines for [`Fake::hold`], as bits.
pub const HOST_TO_DEVICE: u32 = 1;
/// The engine of copies from the device.
pub const DEVICE_TO_HOST: u32 = 2;
/// The engines of copies between device addresses.
pub const DEVICE_TO_DEVICE: u32 = 4;
/// The engine of kernels and fills.
pub const COMPUTE: u32 = 8;
/// All engines.
pub const ALL_ENGINES: u32 = 15;

/// The loaded library.
#[derive(Debug, Clone, Copy)]
pub struct Fake {
    handle: *mut c_void,
}

// SAFETY: a handle of the dynamic loader is valid on all threads, and it is never closed.
unsafe impl Send for Fake {}
// SAFETY: as above; the functions behind it take a lock.
unsafe impl Sync for Fake {}

/// A fake kernel: the ranges that it reads and writes, as address and length.
#[derive(Debug, Clone, Default)]
pub struct FakeKernel<'a> {
    /// The name in findings.
    pub name: &'a str,
    /// Ranges that it reads once, after its delay.
    pub reads: &'a [(u64, u64)],
    /// Ranges that it fills with `fill` then.
    pub writes: &'a [(u64, u64)],
    /// The byte that it writes.
    pub fill: u8,
    /// The byte that all it reads must have. Another byte is a finding.
    pub expect: Option<u8>,
    /// Real and virtual ns before it reads.
    pub delay_ns: u64,
}

/// A result code of the driver other than 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub i32);

#[repr(C)]
struct RawRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct RawKernel {
    name: *const c_char,
    reads: *const RawRange,
    read_count: usize,
    writes: *const RawRange,
    write_count: usize,
    fill: c_int,
    expect: c_int,
    delay_ns: u64,
}

/// Path of the shared object that this crate makes, as cargo places it for a test or example.
///
/// # Panics
///
/// Panics when it is in neither place, which `cargo build -p kvferry-fakecuda` mends.
#[must_use]
pub fn library_path() -> PathBuf {
    let program = std::env::current_exe().expect("the process has a program");
    let mut folders = program.ancestors().skip(1).take(3);
    let found = folders.find_map(|folder| {
        let path = folder.join("libkvferry_fakecuda.so");
        path.exists().then_some(path)
    });
    found.unwrap_or_else(|| panic!("libkvferry_fakecuda.so is not near {}", program.display()))
}

impl Fake {
    /// Loads the library at `path`, or attaches to it where the process has it already.
    ///
    /// # Errors
    ///
    /// The dynamic loader's text.
    pub fn load(path: &Path) -> Result<Self, String> {
        let c_path =
            CString::new(path.as_os_str().as_encoded_bytes()).map_err(|e| e.to_string())?;
        // SAFETY: `c_path` is a C string. Loading runs no code of the library but its runtime's.
        let handle = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: after a failure, the loader's text is a C string of this thread.
            let text = unsafe { std::ffi::CStr::from_ptr(libc::dlerror()) };
            return Err(text.to_string_lossy().into_owned());
        }
        Ok(Self { handle })
    }

    /// Attaches to the driver that the process has loaded, from whatever path.
    #[must_use]
    pub fn attach() -> Option<Self> {
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD;
        // SAFETY: the name is a C string, and nothing is loaded that is not there.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), flags) };
        let fake = (!handle.is_null()).then_some(Self { handle })?;
        fake.symbol("fakecuda_set").map(|_| fake)
    }

    /// The address of an exported symbol.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle is open and `name` is a C string.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }

    fn control(&self, name: &str) -> *mut c_void {
        self.symbol(name).unwrap_or_else(|| panic!("the loaded library has no {name}"))
    }

    /// Changes a setting of `FAKECUDA`.
    ///
    /// # Panics
    ///
    /// Panics when the key or the value means nothing.
    pub fn set(&self, key: &str, value: &str) {
        let code = self.two_texts("fakecuda_set", key, value);
        assert_eq!(code, 0, "`{key}={value}` is no setting");
    }

    fn two_texts(&self, name: &str, a: &str, b: &str) -> c_int {
        type F = unsafe extern "C" fn(*const c_char, *const c_char) -> c_int;
        let (a, b) = (text(a), text(b));
        // SAFETY: the symbol has this signature, and both arguments are C strings.
        unsafe { std::mem::transmute::<*mut c_void, F>(self.control(name))(a.as_ptr(), b.as_ptr()) }
    }

    /// Lets the `at`-th occasion from now, 1 being the next, and `count` - 1 after it fail.
    pub fn fault(&self, fault: Fault, at: u64, count: u64) {
        type F = unsafe extern "C" fn(*const c_char, u64, u64) -> c_int;
        let name = text(fault.name());
        // SAFETY: the symbol has this signature, and the name is a C string.
        let code = unsafe {
            let f = std::mem::transmute::<*mut c_void, F>(self.control("fakecuda_fault"));
            f(name.as_ptr(), at, count)
        };
        assert_eq!(code, 0, "{fault:?}");
    }

    /// Starts over: nothing is initialized or allocated, and the settings are those of
    /// `FAKECUDA`. A program that uses the driver at the time loses all its objects.
    pub fn reset(&self) {
        self.plain("fakecuda_reset");
    }

    /// Switches all faults off. What they stopped goes on, and errors that stick are gone.
    pub fn clear_faults(&self) {
        self.plain("fakecuda_clear_faults");
    }

    fn plain(&self, name: &str) {
        type F = unsafe extern "C" fn() -> c_int;
        // SAFETY: the symbol has this signature.
        let code = unsafe { std::mem::transmute::<*mut c_void, F>(self.control(name))() };
        assert_eq!(code, 0, "{name}");
    }

    fn number(&self, name: &str, argument: u64) {
        type F = unsafe extern "C" fn(u64) -> c_int;
        // SAFETY: the symbol takes one integer, which the calling convention widens alike.
        let code = unsafe { std::mem::transmute::<*mut c_void, F>(self.control(name))(argument) };
        assert_eq!(code, 0, "{name}");
    }

    /// Keeps these engines from starting anything.
    pub fn hold(&self, engines: u32) {
        self.number("fakecuda_hold", u64::from(engines));
    }

    /// Lets all engines start again.
    pub fn release(&self) {
        self.hold(0);
    }

    /// A counter by its name.
    ///
    /// # Panics
    ///
    /// Panics when the name is none.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        type F = unsafe extern "C" fn(*const c_char, *mut u64) -> c_int;
        let c_name = text(name);
        let mut value = 0;
        // SAFETY: the symbol has this signature; the name is a C string and the result is local.
        let code = unsafe {
            let f = std::mem::transmute::<*mut c_void, F>(self.control("fakecuda_counter"));
            f(c_name.as_ptr(), &mut value)
        };
        assert_eq!(code, 0, "no counter is named {name}");
        value
    }

    /// All counters and the calls by symbol.
    #[must_use]
    pub fn counters(&self) -> Vec<(String, u64)> {
        let text = self.long_text("fakecuda_counters");
        let pairs = text.lines().filter_map(|line| line.split_once(' '));
        pairs.map(|(name, n)| (name.to_owned(), n.parse().expect("a number"))).collect()
    }

    /// The findings so far.
    #[must_use]
    pub fn findings(&self) -> Vec<String> {
        let text = self.long_text("fakecuda_findings");
        text.split("\n\n").filter(|finding| !finding.is_empty()).map(str::to_owned).collect()
    }

    /// Forgets the findings; the accesses behind them stay known.
    pub fn clear_findings(&self) {
        self.plain("fakecuda_clear_findings");
    }

    fn long_text(&self, name: &str) -> String {
        type F = unsafe extern "C" fn(*mut c_char, usize, *mut usize) -> c_int;
        let mut bytes: Vec<u8> = Vec::new();
        loop {
            let mut needed = 0;
            // SAFETY: the symbol has this signature, and the buffer has the stated room.
            let code = unsafe {
                let f = std::mem::transmute::<*mut c_void, F>(self.control(name));
                f(bytes.as_mut_ptr().cast(), bytes.len(), &mut needed)
            };
            assert_eq!(code, 0, "{name}");
            if needed <= bytes.len() {
                bytes.truncate(needed);
                return String::from_utf8_lossy(&bytes).into_owned();
            }
            bytes.resize(needed + 1024, 0);
        }
    }

    /// Reads device or host memory past all rules of order.
    ///
    /// # Errors
    ///
    /// The driver's code when something in the range is not mapped.
    pub fn read(&self, address: u64, len: usize) -> Result<Vec<u8>, Code> {
        type F = unsafe extern "C" fn(u64, *mut u8, usize) -> c_int;
        let mut bytes = vec![0; len];
        // SAFETY: the symbol has this signature, and the buffer has `len` bytes.
        let code = unsafe {
            let f = std::mem::transmute::<*mut c_void, F>(self.control("fakecuda_read"));
            f(address, bytes.as_mut_ptr(), len)
        };
        if code == 0 { Ok(bytes) } else { Err(Code(code)) }
    }

    /// Writes device memory past all rules of order.
    ///
    /// # Errors
    ///
    /// The driver's code when something in the range is not mapped.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Code> {
        type F = unsafe extern "C" fn(u64, *const u8, usize) -> c_int;
        // SAFETY: the symbol has this signature, and the slice has the stated length.
        let code = unsafe {
            let f = std::mem::transmute::<*mut c_void, F>(self.control("fakecuda_write"));
            f(address, bytes.as_ptr(), bytes.len())
        };
        if code == 0 { Ok(()) } else { Err(Code(code)) }
    }

    /// Tells the race checker of an access by the calling thread.
    pub fn host_access(&self, address: u64, len: usize, write: bool) {
        type F = unsafe extern "C" fn(*const c_void, usize, c_int) -> c_int;
        // SAFETY: the symbol has this signature, and touches nothing at the address.
        let code = unsafe {
            let f = std::mem::transmute::<*mut c_void, F>(self.control("fakecuda_host_access"));
            f(address as *const c_void, len, c_int::from(write))
        };
        assert_eq!(code, 0);
    }

    /// Publishes what the calling thread has seen under `token`.
    pub fn host_release(&self, token: u64) {
        self.number("fakecuda_host_release", token);
    }

    /// Learns what was published under `token`.
    pub fn host_acquire(&self, token: u64) {
        self.number("fakecuda_host_acquire", token);
    }

    /// The host's virtual time in ns.
    #[must_use]
    pub fn now(&self) -> u64 {
        type F = unsafe extern "C" fn(*mut u64) -> c_int;
        let mut ns = 0;
        // SAFETY: the symbol has this signature, and the result is local.
        let code =
            unsafe { std::mem::transmute::<*mut c_void, F>(self.control("fakecuda_now"))(&mut ns) };
        assert_eq!(code, 0);
        ns
    }

    /// Lets the host work for so many virtual ns.
    pub fn advance(&self, ns: u64) {
        self.number("fakecuda_advance", ns);
    }

    /// Destroys the primary context of a device, although users have retained it.
    pub fn destroy_context(&self, device: usize) {
        self.number("fakecuda_destroy_context", device as u64);
    }

    /// Submits a fake kernel to a stream of the current context.
    ///
    /// # Errors
    ///
    /// The code that a launch would return.
    pub fn launch(&self, stream: usize, kernel: &FakeKernel<'_>) -> Result<(), Code> {
        type F = unsafe extern "C" fn(usize, *const RawKernel) -> c_int;
        let raw = |ranges: &[(u64, u64)]| -> Vec<RawRange> {
            ranges.iter().map(|&(start, len)| RawRange { start, len }).collect()
        };
        let (name, reads, writes) = (text(kernel.name), raw(kernel.reads), raw(kernel.writes));
        let argument = RawKernel {
            name: name.as_ptr(),
            reads: reads.as_ptr(),
            read_count: reads.len(),
            writes: writes.as_ptr(),
            write_count: writes.len(),
            fill: c_int::from(kernel.fill),
            expect: kernel.expect.map_or(-1, c_int::from),
            delay_ns: kernel.delay_ns,
        };
        // SAFETY: the symbol has this signature, and all that the argument points to is alive.
        let code = unsafe {
            let f = std::mem::transmute::<*mut c_void, F>(self.control("fakecuda_launch"));
            f(stream, &argument)
        };
        if code == 0 { Ok(()) } else { Err(Code(code)) }
    }
}

fn text(text: &str) -> CString {
    CString::new(text).expect("names hold no zero byte")
}
