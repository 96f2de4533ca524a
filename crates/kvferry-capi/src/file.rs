//! Files as the remote side of batches.

use crate::agent::kvferry_agent;
use crate::batch::kvferry_batch;
use crate::error::kvferry_error;
use crate::failure::Failure;
use crate::guard;
use crate::handles::{self, OwnedFile};
use crate::region::kvferry_remote;
use crate::structs::{self, Versioned};
use crate::transfer::{
    self, Route, kvferry_transfer, kvferry_transfer_options, kvferry_transfer_stats,
};
use kvferry::{Agent, DirectIo, FileOptions};
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// A range of a file of this host. A handle, not an address.
#[derive(Debug)]
pub struct kvferry_file(());

/// Past the page cache where ranges and memory are aligned.
pub const KVFERRY_DIRECT_AUTO: u32 = 0;
/// I/O goes through the page cache.
pub const KVFERRY_DIRECT_OFF: u32 = 1;
/// Same as auto, but opening fails where the file system does not have it.
pub const KVFERRY_DIRECT_REQUIRE: u32 = 2;

/// Options to open a file with. Set `size` to `sizeof(kvferry_file_options)`, and the rest to zero: the whole of
/// an existing file, to be read.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_file_options {
    pub size: usize,
    /// 1: to be read and written.
    pub write: u32,
    /// 1: made if it does not exist, at least `offset + len` bytes long. Implies `write`.
    pub create: u32,
    /// Offset in the file at which the region begins.
    pub offset: u64,
    /// Bytes of the region; 0: up to the end.
    pub len: u64,
    /// A `KVFERRY_DIRECT_`.
    pub direct: u32,
    pub reserved: u32,
}

// SAFETY: `repr(C)`, begins with its size, and holds numbers only.
unsafe impl Versioned for kvferry_file_options {}

fn file_options(theirs: &kvferry_file_options) -> Result<FileOptions, Failure> {
    let base = match (theirs.create != 0, theirs.write != 0) {
        (true, _) => FileOptions::create(theirs.len),
        (false, true) => FileOptions::read_write(),
        (false, false) => FileOptions::read_only(),
    };
    let ranged = match (theirs.offset, theirs.len) {
        (0, 0) => base,
        (_, 0) => return Err(Failure::invalid("a file's range that has an offset needs a length")),
        (offset, len) => base.range(offset, len),
    };
    Ok(ranged.direct(match theirs.direct {
        KVFERRY_DIRECT_AUTO => DirectIo::Auto,
        KVFERRY_DIRECT_OFF => DirectIo::Off,
        KVFERRY_DIRECT_REQUIRE => DirectIo::Require,
        other => return Err(Failure::invalid(format!("{other} is no KVFERRY_DIRECT_"))),
    }))
}

/// Opens a range of a file as a region that batches can name as their remote side.
///
/// Any thread. Blocks as long as the file system does. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `path` is text; `file` can be written; `options` and `error` are null or structures whose field `size`
/// is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_file_open(
    agent: *const kvferry_agent,
    path: *const c_char,
    options: *const kvferry_file_options,
    file: *mut *mut kvferry_file,
    error: *mut kvferry_error,
) -> c_int {
    const PLACE: &str = "the place for the file";
    guard::run(error, || {
        if path.is_null() {
            return Err(Failure::invalid("the file's path is NULL"));
        }
        // SAFETY: the caller's promise. A path need not be UTF-8.
        let (path, options) = unsafe {
            guard::store(file, std::ptr::null_mut(), PLACE)?;
            let options = structs::read(options, "the file's options")?;
            (OsStr::from_bytes(CStr::from_ptr(path).to_bytes()), options)
        };
        let agent = handles::look_up::<Agent, _>(agent)?;
        let opened = agent.open_file(path, &file_options(&options)?)?;
        let handle = handles::add::<OwnedFile>(Arc::new((agent, opened)));
        // SAFETY: the caller's promise.
        unsafe { guard::store(file, handles::pointer(handle), PLACE) }?;
        Ok(0)
    })
}

/// The description that batches need to name the file, for `kvferry_batch_push`.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `remote` can be written; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_file_remote(
    file: *const kvferry_file,
    remote: *mut kvferry_remote,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let owned = handles::look_up::<OwnedFile, _>(file)?;
        let description = kvferry_remote::of(&owned.1.remote());
        // SAFETY: the caller's promise.
        unsafe { guard::store(remote, description, "the place for the description") }?;
        Ok(0)
    })
}

/// Waits until everything that was written to the file before is on its device (`fdatasync`).
///
/// Any thread. Blocks without a time limit. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_file_sync(
    file: *mut kvferry_file,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::look_up::<OwnedFile, _>(file)?.1.sync()?;
        Ok(0)
    })
}

/// Closes the file and frees its handle. Transfers that have begun keep it open until they end.
///
/// Any thread; also after the agent was shut down or freed. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_file_close(
    file: *mut kvferry_file,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let owned = handles::take::<OwnedFile, _>(file)?;
        // After a shutdown the agent has no files any more.
        let _ = owned.0.close_file(&owned.1);
        Ok(0)
    })
}

/// Writes memory to files (offload) and waits: the remote side of the batch names files of this agent. The
/// bytes are on the device after `kvferry_file_sync`. `options` and `stats` may be NULL.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `options`, `stats` and `error` are null or structures whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_file_write(
    agent: *const kvferry_agent,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    stats: *mut kvferry_transfer_stats,
    error: *mut kvferry_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { transfer::run(Route::WriteFile(agent), batch, options, stats, error) }
}

/// Reads files into memory (onboard) and waits, as `kvferry_file_write`.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `options`, `stats` and `error` are null or structures whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_file_read(
    agent: *const kvferry_agent,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    stats: *mut kvferry_transfer_stats,
    error: *mut kvferry_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { transfer::run(Route::ReadFile(agent), batch, options, stats, error) }
}

/// Starts writing memory to files, as `kvferry_write_async`.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `options` and `error` are null or structures whose field `size` is right; `transfer` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_file_write_async(
    agent: *const kvferry_agent,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    transfer: *mut *mut kvferry_transfer,
    error: *mut kvferry_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { transfer::start(Route::WriteFile(agent), batch, options, transfer, error) }
}

/// Starts reading files into memory, as `kvferry_write_async`.
///
/// Any thread. Does not block. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `options` and `error` are null or structures whose field `size` is right; `transfer` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_file_read_async(
    agent: *const kvferry_agent,
    batch: *const kvferry_batch,
    options: *const kvferry_transfer_options,
    transfer: *mut *mut kvferry_transfer,
    error: *mut kvferry_error,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { transfer::start(Route::ReadFile(agent), batch, options, transfer, error) }
}
