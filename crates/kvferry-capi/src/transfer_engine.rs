//! Mooncake's C API, `transfer_engine_c.h`: engines, segments, memory, and what needs no work here.
//!
//! The functions have Mooncake's names, arguments, layouts and codes. An engine is a handle of
//! [`handles`], in the type `void *`.

#![allow(non_snake_case, reason = "the names are Mooncake's")]

use crate::error;
use crate::failure::Failure;
use crate::guard::{self, contain};
use crate::handles;
use kvferry::Access;
use kvferry_mooncake::{MooncakeEngine, codes};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

/// An engine. A handle, not an address.
pub type transfer_engine_t = *mut c_void;
/// A transport. Any value that is not NULL stands for the engine's own choice.
pub type transport_t = *mut c_void;
/// A segment's number; 0 is the engine's own, a negative one an error's code.
pub type segment_id_t = i32;

/// A range of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct buffer_entry {
    pub addr: *mut c_void,
    pub length: usize,
}
pub type buffer_entry_t = buffer_entry;

/// The load of a network adapter. kvferry reports none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct nic_load_stat {
    pub device_name: [c_char; 64],
    pub inflight_bytes: u64,
    pub ewma_bandwidth_bps: f64,
}
pub type nic_load_stat_t = nic_load_stat;

/// Runs a call with an engine. `failed` is what it returns without one.
pub(crate) fn with<T>(
    engine: transfer_engine_t,
    failed: T,
    call: impl FnOnce(&MooncakeEngine) -> Result<T, Failure>,
) -> T {
    let called = contain(|| {
        let engine = handles::look_up::<Arc<MooncakeEngine>, _>(engine)?;
        call(&engine)
    });
    match called {
        Ok(Ok(result)) => result,
        Ok(Err(failure)) => {
            error::remember(&failure.text);
            failed
        }
        Err(text) => {
            error::remember(&text);
            failed
        }
    }
}

/// Runs a call as [`with`] does, for calls that return a code, which is negative if they failed. Their reason is kept for
/// `kvferry_last_error`.
pub(crate) fn code(
    engine: transfer_engine_t,
    call: impl FnOnce(&MooncakeEngine) -> Result<c_int, Failure>,
) -> c_int {
    with(engine, codes::INVALID, |engine| {
        let code = call(engine)?;
        if code < 0 {
            error::remember(&engine.last_error());
        }
        Ok(code)
    })
}

/// Starts an engine; NULL if it can't be started. The metadata server is `P2PHANDSHAKE` or
/// `http://host:port/metadata`. The port is ignored: the engine takes a free one, see
/// `getLocalIpAndPort`. Transports need not be installed.
///
/// # Safety
/// The texts are null or text.
#[unsafe(export_name = "kvferry_mooncake_createTransferEngine")]
pub unsafe extern "C" fn createTransferEngine(
    metadata_conn_string: *const c_char,
    local_server_name: *const c_char,
    ip_or_host_name: *const c_char,
    rpc_port: u64,
    auto_discover: c_int,
) -> transfer_engine_t {
    let _ = (rpc_port, auto_discover);
    let made = contain(|| {
        // SAFETY: the caller's promise.
        let (metadata, name, host) = unsafe {
            (
                guard::text(metadata_conn_string, "the metadata server")?,
                guard::text(local_server_name, "the engine's name")?,
                guard::optional_text(ip_or_host_name, "the engine's host")?.unwrap_or_default(),
            )
        };
        crate::log::prepare();
        let engine = MooncakeEngine::new();
        if engine.initialize_at(name, host, metadata) != codes::OK {
            return Err(Failure::invalid(engine.last_error()));
        }
        crate::log::warn(engine.take_warning());
        Ok(handles::pointer(handles::add(Arc::new(engine))))
    });
    let why = match made {
        Ok(Ok(engine)) => return engine,
        Ok(Err(failure)) => failure.text,
        Err(text) => text,
    };
    error::remember(&why);
    std::ptr::null_mut()
}

/// Ends an engine. Its transfers fail, its memory is unregistered, its sessions end.
#[unsafe(export_name = "kvferry_mooncake_destroyTransferEngine")]
pub extern "C" fn destroyTransferEngine(engine: transfer_engine_t) {
    let taken = contain(|| {
        let engine = handles::take::<Arc<MooncakeEngine>, _>(engine)?;
        engine.shutdown();
        Ok::<(), Failure>(())
    });
    if let Ok(Err(failure)) = taken {
        error::remember(&failure.text);
    }
}

/// Copies the `host:port` that peers pass to `openSegment`.
///
/// # Safety
/// `buf_out` has `buf_len` bytes.
#[unsafe(export_name = "kvferry_mooncake_getLocalIpAndPort")]
pub unsafe extern "C" fn getLocalIpAndPort(
    engine: transfer_engine_t,
    buf_out: *mut c_char,
    buf_len: usize,
) -> c_int {
    code(engine, |engine| {
        let Some(address) = engine.address() else { return Ok(codes::INVALID) };
        // SAFETY: the caller's promise.
        unsafe { guard::store_text(&address, buf_out, buf_len, "the address") }?;
        Ok(codes::OK)
    })
}

/// The engine chooses transports by itself; this returns a value that is not NULL.
///
/// # Safety
/// Nothing is read.
#[unsafe(export_name = "kvferry_mooncake_installTransport")]
pub unsafe extern "C" fn installTransport(
    engine: transfer_engine_t,
    proto: *const c_char,
    args: *mut *mut c_void,
) -> transport_t {
    let _ = (proto, args);
    with(engine, std::ptr::null_mut(), |_| Ok(engine))
}

/// The engine chooses transports by itself; this does nothing.
///
/// # Safety
/// Nothing is read.
#[unsafe(export_name = "kvferry_mooncake_uninstallTransport")]
pub unsafe extern "C" fn uninstallTransport(
    engine: transfer_engine_t,
    proto: *const c_char,
) -> c_int {
    let _ = proto;
    code(engine, |_| Ok(codes::OK))
}

/// The number of the segment of the engine at `host:port`, or of that name at the metadata server. Connects
/// to it. Memory that the peer registers later belongs to the segment, too.
///
/// # Safety
/// `segment_name` is text.
#[unsafe(export_name = "kvferry_mooncake_openSegment")]
pub unsafe extern "C" fn openSegment(
    engine: transfer_engine_t,
    segment_name: *const c_char,
) -> segment_id_t {
    code(engine, |engine| {
        // SAFETY: the caller's promise.
        Ok(engine.open_segment(unsafe { guard::text(segment_name, "the segment's name") }?))
    })
}

/// Does what `openSegment` does, and looks the peer's address up again.
///
/// # Safety
/// `segment_name` is text.
#[unsafe(export_name = "kvferry_mooncake_openSegmentNoCache")]
pub unsafe extern "C" fn openSegmentNoCache(
    engine: transfer_engine_t,
    segment_name: *const c_char,
) -> segment_id_t {
    code(engine, |engine| {
        // SAFETY: the caller's promise.
        let name = unsafe { guard::text(segment_name, "the segment's name") }?;
        engine.forget_segment(name);
        Ok(engine.open_segment(name))
    })
}

/// Checks the number. The segment stays open, as with Mooncake.
#[unsafe(export_name = "kvferry_mooncake_closeSegment")]
pub extern "C" fn closeSegment(engine: transfer_engine_t, segment_id: segment_id_t) -> c_int {
    code(engine, |engine| Ok(engine.close_segment(segment_id)))
}

/// Forgets what is known of the segment's address.
///
/// # Safety
/// `segment_name` is text.
#[unsafe(export_name = "kvferry_mooncake_removeLocalSegment")]
pub unsafe extern "C" fn removeLocalSegment(
    engine: transfer_engine_t,
    segment_name: *const c_char,
) -> c_int {
    code(engine, |engine| {
        // SAFETY: the caller's promise.
        Ok(engine.forget_segment(unsafe { guard::text(segment_name, "the segment's name") }?))
    })
}

fn access(remote_accessible: c_int) -> Access {
    if remote_accessible == 0 { Access::NONE } else { Access::READ_WRITE }
}

/// Registers memory of the host or of a GPU. -7: it overlaps registered memory, even if it is the same.
///
/// A location that names a GPU, as "cuda:0", loads the CUDA driver. A process that has memory of a GPU has loaded the
/// driver before: then the driver tells whose memory it is, whatever the location. Callers wait for the work that uses
/// memory of GPUs before they start transfers of it, unless the environment has
/// `KVFERRY_MOONCAKE_AFTER=default-stream`.
///
/// # Safety
/// The memory stays mapped until it is unregistered or the engine ends. `location` is null or text.
#[unsafe(export_name = "kvferry_mooncake_registerLocalMemory")]
pub unsafe extern "C" fn registerLocalMemory(
    engine: transfer_engine_t,
    addr: *mut c_void,
    length: usize,
    location: *const c_char,
    remote_accessible: c_int,
) -> c_int {
    let (addr, length) = (addr.expose_provenance() as u64, length as u64);
    code(engine, |engine| {
        // SAFETY: the caller's promise.
        let location = unsafe { guard::optional_text(location, "the location") }?;
        let access = access(remote_accessible);
        Ok(engine.register_with(&[addr], &[length], location.unwrap_or_default(), access))
    })
}

/// Unregisters memory. When this returns 0, no copier touches it any more. -3: nothing is registered there.
#[unsafe(export_name = "kvferry_mooncake_unregisterLocalMemory")]
pub extern "C" fn unregisterLocalMemory(engine: transfer_engine_t, addr: *mut c_void) -> c_int {
    code(engine, |engine| Ok(engine.unregister(&[addr.addr() as u64])))
}

/// Registers ranges that peers may read and write: all, or none on an error. Otherwise the same as `registerLocalMemory`.
///
/// # Safety
/// As `registerLocalMemory`; `buffer_list` has `buffer_len` elements.
#[unsafe(export_name = "kvferry_mooncake_registerLocalMemoryBatch")]
pub unsafe extern "C" fn registerLocalMemoryBatch(
    engine: transfer_engine_t,
    buffer_list: *mut buffer_entry_t,
    buffer_len: usize,
    location: *const c_char,
) -> c_int {
    code(engine, |engine| {
        // SAFETY: the caller's promise.
        let location = unsafe { guard::optional_text(location, "the location") }?;
        // SAFETY: the caller's promise.
        let buffers = unsafe { guard::array(buffer_list, buffer_len, "the list of buffers") }?;
        let addrs: Vec<_> = buffers.iter().map(|b| b.addr.expose_provenance() as u64).collect();
        let lengths: Vec<_> = buffers.iter().map(|b| b.length as u64).collect();
        Ok(engine.register(&addrs, &lengths, location.unwrap_or_default()))
    })
}

/// Unregisters ranges, each even if another fails; returns the first failure.
///
/// # Safety
/// `addr_list` has `addr_len` elements.
#[unsafe(export_name = "kvferry_mooncake_unregisterLocalMemoryBatch")]
pub unsafe extern "C" fn unregisterLocalMemoryBatch(
    engine: transfer_engine_t,
    addr_list: *mut *mut c_void,
    addr_len: usize,
) -> c_int {
    code(engine, |engine| {
        // SAFETY: the caller's promise.
        let addrs = unsafe { guard::array(addr_list, addr_len, "the list of addresses") }?;
        let addrs: Vec<_> = addrs.iter().map(|addr| addr.addr() as u64).collect();
        Ok(engine.unregister(&addrs))
    })
}

/// Has no effect: what peers register is looked up when bytes move.
#[unsafe(export_name = "kvferry_mooncake_syncSegmentCache")]
pub extern "C" fn syncSegmentCache(engine: transfer_engine_t) -> c_int {
    code(engine, |_| Ok(codes::OK))
}

/// Has no effect: the engine finds its transports by itself.
#[unsafe(export_name = "kvferry_mooncake_discoverTopology")]
pub extern "C" fn discoverTopology(engine: transfer_engine_t) -> c_int {
    code(engine, |_| Ok(codes::OK))
}

/// Has no effect: `openSegment` has connected.
///
/// # Safety
/// Nothing is read.
#[unsafe(export_name = "kvferry_mooncake_warmupEfaSegment")]
pub unsafe extern "C" fn warmupEfaSegment(
    engine: transfer_engine_t,
    segment_name: *const c_char,
) -> c_int {
    let _ = segment_name;
    code(engine, |_| Ok(codes::OK))
}

/// Reports no adapters: `*count` becomes 0.
///
/// # Safety
/// `count` is null or can be written.
#[unsafe(export_name = "kvferry_mooncake_getNicLoadStats")]
pub unsafe extern "C" fn getNicLoadStats(
    engine: transfer_engine_t,
    stats: *mut nic_load_stat_t,
    count: *mut usize,
) -> c_int {
    let _ = stats;
    code(engine, |_| {
        // SAFETY: the caller's promise.
        unsafe { guard::store(count, 0, "the place for the count") }?;
        Ok(codes::OK)
    })
}

/// Has no effect: kvferry installs no signal handlers. A process that ends with engines open ends cleanly.
#[unsafe(export_name = "kvferry_mooncake_enableGracefulShutdown")]
pub extern "C" fn enableGracefulShutdown(engine: transfer_engine_t) {
    let _ = engine;
}

/// Describes the peers' connections: kvferry lists none. Writes an empty text, or `[]` as JSON.
///
/// # Safety
/// `buf_out` has `buf_len` bytes.
#[unsafe(export_name = "kvferry_mooncake_showLinks")]
pub unsafe extern "C" fn showLinks(
    engine: transfer_engine_t,
    buf_out: *mut c_char,
    buf_len: usize,
    json: c_int,
) -> c_int {
    let text = if json == 0 { "" } else { "[]" };
    code(engine, |_| {
        // SAFETY: the caller's promise.
        unsafe { guard::store_text(text, buf_out, buf_len, "the text") }?;
        Ok(codes::OK)
    })
}
