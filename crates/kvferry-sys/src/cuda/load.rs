//! Loads the driver's library, once, at the first use.
//!
//! The library stays loaded: it runs threads of its own. It is used only by the process that initialised it:
//! a forked child can't, so each call first checks that the process was not forked since.

use super::abi::*;
use super::error::{DriverError, Error, OLDEST_VERSION, Result, Unavailable};
use super::table::{Resolver, Symbol, Table};
use crate::fd;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::error::Error as _;
use std::ffi::{CStr, c_char};
use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The CUDA driver, initialised in this process.
pub struct Driver {
    table: Table,
    version: i32,
    /// Value of [`fd::forks`] in the process that initialised the driver.
    forks: u32,
    _library: ManuallyDrop<Library>,
}

static DRIVER: OnceLock<std::result::Result<Driver, Unavailable>> = OnceLock::new();
/// One more than [`fd::forks`] of the process that began to use the driver; zero if none did. A child must not
/// call it, nor wait for a thread of its parent that was loading it.
static USER: AtomicU64 = AtomicU64::new(0);
static FORKED: Unavailable = Unavailable::Forked;

impl Driver {
    /// The driver, which the first call loads and initialises. That takes up to seconds; a failure is kept.
    ///
    /// # Errors
    /// The reason why this process can't use the driver.
    pub fn get() -> std::result::Result<&'static Self, &'static Unavailable> {
        if let Some(Err(why)) = DRIVER.get()
            && why.is_before_init()
        {
            return Err(why);
        }
        let Some(is_first) = Self::claim_first() else {
            // A failure is the child's as well.
            return match DRIVER.get() {
                Some(Err(why)) => Err(why),
                _ => Err(&FORKED),
            };
        };
        let loaded = DRIVER.get_or_init(|| load(&library_file())).as_ref();
        if is_first && loaded.is_err_and(Unavailable::is_before_init) {
            // Nothing was initialised that a child could not use, and no other library is known to use the driver.
            let _ = USER.compare_exchange(this_process(), 0, Ordering::Relaxed, Ordering::Relaxed);
        }
        loaded
    }

    /// The driver, if [`Driver::get`] has initialised it in this process. Loads none, calls none, and waits for no thread.
    pub fn in_use() -> Option<&'static Self> {
        DRIVER.get()?.as_ref().ok().filter(|driver| !driver.is_forked())
    }

    /// True if this process was forked from the one that initialised the driver: then every call fails.
    pub fn is_forked(&self) -> bool {
        fd::forked_since(self.forks)
    }

    /// Notes that this process uses the driver, by this module or by another library. False in a process that was forked
    /// from one that did, in which no function of the driver may be called.
    pub(crate) fn claim() -> bool {
        Self::claim_first().is_some()
    }

    /// Notes what [`Driver::claim`] notes: `Some` where that is true. Whether this call is the first that notes it.
    fn claim_first() -> Option<bool> {
        // Without the handlers a fork is not noticed; if only their placeholder fails, it is.
        let _ = fd::install_fork_handlers();
        let this_process = this_process();
        let claimed = USER.compare_exchange(0, this_process, Ordering::Relaxed, Ordering::Relaxed);
        match claimed {
            Ok(_) => Some(true),
            Err(by) if by == this_process => Some(false),
            Err(_) => None,
        }
    }

    /// True if a process that this one was forked from is known to have used the driver, or to have begun to load it.
    pub(crate) fn is_inherited() -> bool {
        let user = USER.load(Ordering::Relaxed);
        user != 0 && user != this_process()
    }

    /// The newest CUDA version that the driver supports, such as 12080 for 12.8.
    pub fn version(&self) -> i32 {
        self.version
    }

    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    /// Fails in a forked child.
    pub(super) fn check_process(&self) -> Result<()> {
        if self.is_forked() { Err(Error::Unavailable(&FORKED)) } else { Ok(()) }
    }

    /// A function to call, if the driver has it and this process may call it.
    pub(super) fn function<F: Copy>(&self, symbol: &Symbol<F>) -> Result<(&'static str, F)> {
        self.check_process()?;
        let function = symbol.function.ok_or(Error::NotSupported(symbol.name))?;
        Ok((symbol.name, function))
    }

    /// Turns the code that `call` returned into a result.
    pub(super) fn check(&self, call: &'static str, code: CUresult) -> Result<()> {
        if code == CUDA_SUCCESS { Ok(()) } else { Err(failure(&self.table, call, code).into()) }
    }
}

/// The number by which this process is known to [`USER`].
fn this_process() -> u64 {
    u64::from(fd::forks()) + 1
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("version", &self.version).finish_non_exhaustive()
    }
}

/// Calls a function of the driver's table: `call!(driver, mem_free(address))` is a [`Result`]. The caller
/// writes the `unsafe` block.
macro_rules! call {
    ($driver:expr, $symbol:ident($($arg:expr),* $(,)?)) => {{
        let driver: &'static $crate::cuda::load::Driver = $driver;
        match driver.function(&driver.table().$symbol) {
            Ok((name, function)) => driver.check(name, function($($arg),*)),
            Err(error) => Err(error),
        }
    }};
}
pub(super) use call;

fn failure(table: &Table, call: &'static str, code: CUresult) -> DriverError {
    let name = text(table.get_error_name.function, code).unwrap_or("an unknown code");
    let message = text(table.get_error_string.function, code).unwrap_or("no description");
    DriverError { call, code, name, message }
}

/// A function that tells a text of a code.
type Describe = unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult;

fn text(describe: Option<Describe>, code: CUresult) -> Option<&'static str> {
    let mut text = std::ptr::null();
    // SAFETY: the driver writes a pointer, and touches no device.
    if unsafe { describe?(code, &raw mut text) } != CUDA_SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: the text is a constant of the library, which stays loaded.
    unsafe { CStr::from_ptr::<'static>(text) }.to_str().ok()
}

fn load(file: &str) -> std::result::Result<Driver, Unavailable> {
    // SAFETY: loading runs the initialisers of a library that the host's owner installed under this name
    // for programs to load.
    let library = unsafe { Library::open(Some(file), RTLD_LAZY | RTLD_LOCAL) };
    let library = ManuallyDrop::new(library.map_err(|e| refused_by_linker(file, &e))?);
    let resolver = Resolver::new(&library);
    let version = resolver.version();
    if (1..OLDEST_VERSION).contains(&version) {
        return Err(Unavailable::TooOld(version));
    }
    let table = Table::resolve(&resolver);
    let missing = table.missing();
    let (Some(init), Some(count)) = (table.init.function, table.device_get_count.function) else {
        return Err(Unavailable::MissingSymbols(missing));
    };
    if !missing.is_empty() {
        return Err(Unavailable::MissingSymbols(missing));
    }
    // SAFETY: the only flags that exist are zero.
    let code = unsafe { init(0) };
    check_init(&table, "cuInit", code)?;
    let mut devices = 0;
    // SAFETY: the driver writes one integer.
    let code = unsafe { count(&raw mut devices) };
    check_init(&table, "cuDeviceGetCount", code)?;
    if devices == 0 {
        return Err(Unavailable::NoDevice);
    }
    Ok(Driver { table, version, forks: fd::forks(), _library: library })
}

fn check_init(
    table: &Table,
    call: &'static str,
    code: CUresult,
) -> std::result::Result<(), Unavailable> {
    match code {
        CUDA_SUCCESS => Ok(()),
        // Another library of a parent has initialised it.
        CUDA_ERROR_NOT_INITIALIZED if fd::forks() > 0 => Err(Unavailable::Forked),
        CUDA_ERROR_NO_DEVICE => Err(Unavailable::NoDevice),
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => Err(Unavailable::Mismatch),
        code => Err(Unavailable::Init(failure(table, call, code))),
    }
}

fn refused_by_linker(file: &str, error: &libloading::Error) -> Unavailable {
    let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    // The linker's message starts with the missing file: this library, or one that it needs.
    if why.starts_with(file) && why.contains("No such file") {
        Unavailable::NoLibrary(file.to_owned())
    } else {
        Unavailable::BrokenLibrary(why)
    }
}

/// The driver's library as the dynamic linker finds it.
const LIBRARY: &str = "libcuda.so.1";

#[cfg(any(debug_assertions, feature = "testing"))]
fn library_file() -> String {
    // SAFETY: reads a number that the kernel gave the process.
    let gained_privileges = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    let named = std::env::var("KVFERRY_LIBCUDA").ok();
    named.filter(|_| !gained_privileges).unwrap_or_else(|| LIBRARY.to_owned())
}

#[cfg(not(any(debug_assertions, feature = "testing")))]
fn library_file() -> String {
    LIBRARY.to_owned()
}
