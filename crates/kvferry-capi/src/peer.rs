//! Peers.

use crate::agent::kvferry_agent;
use crate::error::kvferry_error;
use crate::guard;
use crate::handles;
use crate::region::kvferry_remote;
use crate::structs::{self, Versioned};
use kvferry::{Agent, Peer};
use std::ffi::{c_char, c_int};
use std::time::Duration;

/// A peer of an agent, by address. A handle, not an address.
#[derive(Debug)]
pub struct kvferry_peer(());

/// Facts about a connected peer. Set `size` to `sizeof(kvferry_peer_info)`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_peer_info {
    pub size: usize,
    /// The peer's name; cut if it does not fit.
    pub name: [c_char; 264],
    /// `local`, `tcp`, `mooncake`, …
    pub transport: [c_char; 24],
    /// 1 if both sides proved that they know the secret.
    pub authenticated: u32,
    /// 1 if payload carries checksums.
    pub checksum: u32,
}

// SAFETY: `repr(C)`, begins with its size, and holds numbers only.
unsafe impl Versioned for kvferry_peer_info {}

/// A time limit of the caller; 0 is the agent's.
pub(crate) fn limit(timeout_ms: u64) -> Option<Duration> {
    /// A day, far beyond any use.
    const LONGEST_MS: u64 = 86_400_000;
    (timeout_ms > 0).then(|| Duration::from_millis(timeout_ms.min(LONGEST_MS)))
}

/// A peer by its `host:port`. Sends nothing: the first transfer, or `kvferry_peer_connect`, connects. A
/// peer that restarts at its address is connected to again.
///
/// Any thread. Blocks while a host name is resolved. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `address` is text; `peer` can be written; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_peer_open(
    agent: *const kvferry_agent,
    address: *const c_char,
    peer: *mut *mut kvferry_peer,
    error: *mut kvferry_error,
) -> c_int {
    const PLACE: &str = "the place for the peer";
    guard::run(error, || {
        // SAFETY: the caller's promise.
        let address = unsafe {
            guard::store(peer, std::ptr::null_mut(), PLACE)?;
            guard::text(address, "the peer's address")?
        };
        let found = handles::look_up::<Agent, _>(agent)?.peer(address)?;
        // SAFETY: the caller's promise.
        unsafe { guard::store(peer, handles::pointer(handles::add(found)), PLACE) }?;
        Ok(0)
    })
}

/// Connects to the peer if there is no live session, and fills in what is known of it. `timeout_ms` 0 is
/// the agent's time limit; `info` may be NULL.
///
/// Any thread. Blocks. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `info` and `error` are null or structures whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_peer_connect(
    peer: *const kvferry_peer,
    timeout_ms: u64,
    info: *mut kvferry_peer_info,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let summary = handles::look_up::<Peer, _>(peer)?.connect(limit(timeout_ms))?;
        let known = kvferry_peer_info {
            size: 0,
            name: structs::fixed(&summary.name),
            transport: structs::fixed(summary.transport.as_str()),
            authenticated: summary.authenticated.into(),
            checksum: summary.checksum.into(),
        };
        // SAFETY: the caller's promise.
        unsafe { structs::write(info, &known, "the peer's facts") }?;
        Ok(0)
    })
}

/// The peer's region of that name.
///
/// Any thread. Blocks for one round trip, for `timeout_ms` at most. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `name` is text; `remote` can be written; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_peer_region(
    peer: *const kvferry_peer,
    name: *const c_char,
    timeout_ms: u64,
    remote: *mut kvferry_remote,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        // SAFETY: the caller's promise.
        let name = unsafe { guard::text(name, "the region's name") }?;
        let found = handles::look_up::<Peer, _>(peer)?.region(name, limit(timeout_ms))?;
        let found = kvferry_remote::of(&found);
        // SAFETY: the caller's promise.
        unsafe { guard::store(remote, found, "the place for the description") }?;
        Ok(0)
    })
}

/// Measures one round trip to the peer, in nanoseconds. `nanoseconds` may be NULL.
///
/// Any thread. Blocks for `timeout_ms` at most. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `nanoseconds` is null or can be written; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_peer_probe(
    peer: *const kvferry_peer,
    timeout_ms: u64,
    nanoseconds: *mut u64,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let took = handles::look_up::<Peer, _>(peer)?.probe(limit(timeout_ms))?;
        if !nanoseconds.is_null() {
            let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            // SAFETY: the caller's promise.
            unsafe { guard::store(nanoseconds, took, "the place for the time") }?;
        }
        Ok(0)
    })
}

/// Ends the live session; its transfers fail. The next call connects again.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_peer_disconnect(
    peer: *mut kvferry_peer,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::look_up::<Peer, _>(peer)?.disconnect();
        Ok(0)
    })
}

/// Frees the handle. The session stays, for other handles of the same peer.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_peer_free(
    peer: *mut kvferry_peer,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        handles::take::<Peer, _>(peer)?;
        Ok(0)
    })
}
