//! Kernels from PTX text, which the driver compiles for the device.

use super::abi::*;
use super::context::Context;
use super::error::{Error, Result};
use super::load::call;
use super::stream::Stream;
use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::sync::Arc;

/// Compiled kernels, unloaded when this value, its clones and their [`Function`]s are dropped.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    handle: CUmodule,
}

/// PTX that the driver refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// What went wrong.
    pub error: Error,
    /// The compiler's messages.
    pub log: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error)?;
        if self.log.is_empty() { Ok(()) } else { write!(f, ": {}", self.log.trim()) }
    }
}

impl std::error::Error for LoadError {}

impl From<Error> for LoadError {
    fn from(error: Error) -> Self {
        Self { error, log: String::new() }
    }
}

/// Bytes of the compiler's messages that are kept.
const LOG_BYTES: usize = 4096;

impl Module {
    /// Compiles PTX text for the context's device. That takes milliseconds; the driver caches the result.
    ///
    /// # Errors
    /// If the text has a zero byte, if the driver refuses, or in a forked child.
    pub fn load_ptx(context: &Context, ptx: &str) -> std::result::Result<Self, LoadError> {
        let ptx = CString::new(ptx).map_err(|_| Error::BadText)?;
        let _entered = context.enter()?;
        let mut log = [0u8; LOG_BYTES];
        let mut handle = CUmodule::default();
        let mut options = [CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The driver reads the size from the pointer itself. The last byte stays zero.
        let size = std::ptr::without_provenance_mut(LOG_BYTES - 1);
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), size];
        // SAFETY: the text ends in a zero byte; the lists have two entries; the log is as long as its size.
        let loaded = unsafe {
            call!(
                context.driver(),
                module_load(
                    &raw mut handle,
                    ptx.as_ptr().cast(),
                    2,
                    options.as_mut_ptr(),
                    values.as_mut_ptr()
                )
            )
        };
        loaded.map_err(|error| {
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            LoadError { error, log: log.to_string_lossy().into_owned() }
        })?;
        Ok(Self(Arc::new(Loaded { context: context.clone(), handle })))
    }

    /// The kernel of that name.
    ///
    /// # Errors
    /// If there is none, if the driver refuses, or in a forked child.
    pub fn function(&self, name: &str) -> Result<Function> {
        let name = CString::new(name).map_err(|_| Error::BadText)?;
        let _entered = self.0.context.enter()?;
        let mut handle = CUfunction::default();
        // SAFETY: the name ends in a zero byte, and the driver writes a handle.
        unsafe {
            call!(
                self.0.context.driver(),
                module_get_function(&raw mut handle, self.0.handle, name.as_ptr())
            )
        }?;
        Ok(Function { _module: self.clone(), handle })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: loaded by this value, and unloaded once. The driver waits for kernels that run.
            let _ = unsafe { call!(self.context.driver(), module_unload(self.handle)) };
        }
    }
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Function {
    _module: Module,
    handle: CUfunction,
}

/// Blocks of a launch, and threads of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// Runs a kernel after the stream's earlier work. `arguments` are its parameters, each of at most eight bytes;
/// shorter ones are in the low bytes.
///
/// # Errors
/// If the driver refuses, or in a forked child.
///
/// # Safety
/// The kernel has as many parameters. All memory that it reads or writes is valid, and is used by nothing
/// else in a conflicting way, until an event recorded on the stream after this call is reached. Function and
/// stream are of the same context.
pub unsafe fn launch(
    stream: &Stream,
    function: &Function,
    grid: Grid,
    arguments: &[u64],
) -> Result<()> {
    let mut places: Vec<*mut c_void> =
        arguments.iter().map(|argument| std::ptr::from_ref(argument).cast_mut().cast()).collect();
    let _entered = stream.context().enter()?;
    let Grid { blocks, threads, shared_bytes } = grid;
    // SAFETY: the driver copies the arguments during the call; the caller keeps the promises of this function.
    unsafe {
        call!(
            stream.context().driver(),
            launch_kernel(
                function.handle,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream.handle(),
                places.as_mut_ptr(),
                std::ptr::null_mut()
            )
        )
    }
}
