//! Copying to and from registered memory of another process of this host.

use kvferry_sys::process_vm::{self, RemoteSpan};
use kvferry_sys::span::HostSpan;
use std::io;

/// Copies `from` to a peer's registered memory at `to`, by the peer's pid.
///
/// The caller holds a gate that the peer waits for, and has seen inside it that the ranges are
/// registered with the peer; the spans are lent inside a gate of this agent.
pub(crate) fn write(pid: i32, from: &[HostSpan], to: &[RemoteSpan]) -> io::Result<usize> {
    // SAFETY: if the peer is another agent of this process, the ranges are regions of that agent,
    // whose owner promised that no references to them exist (`Agent::register`) until the caller
    // has left the gate it holds.
    unsafe { process_vm::write(pid, from, to) }
}
