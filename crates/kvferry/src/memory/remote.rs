//! Copying to and from registered memory of another process of this host.

use kvferry_sys::process_vm::{self, RemoteSpan};
use kvferry_sys::span::HostSpan;
use std::io;

/// Copies `from` to a peer's registered memory at `to`, under its process number.
///
/// Callers hold a gate that the peer waits for, and have seen inside it that the ranges are
/// registered with the peer; the spans are lent inside a gate of ours.
pub(crate) fn write(pid: i32, from: &[HostSpan], to: &[RemoteSpan]) -> io::Result<usize> {
    // SAFETY: if the peer is an agent of this very process, the ranges are regions of that agent,
    // whose owner promised that nobody holds references to them (`Agent::register`) until the
    // gate our caller holds was left.
    unsafe { process_vm::write(pid, from, to) }
}
