//! What the transfers of a batch come after.

#![allow(unsafe_code, reason = "streams and events of other libraries are named by raw handles")]

use crate::edge::Edge;
use crate::error::Error;
use crate::gpu::Gpu;
use kvferry::{After, Batch, DeviceMemory};
use kvferry_sys::cuda::{RawEvent, RawStream};

/// Work that a transfer comes after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// What the stream has at the time of the call. 0 and 1 are the default stream of each GPU of the batch, 2 the calling
    /// thread's.
    Stream(RawStream),
    /// Work of the device before the event's last record.
    Event(RawEvent),
    /// Nothing: the caller has waited for what uses the memory.
    Host,
}

/// Has transfers of a batch come after this work, if the batch has memory of a GPU; else it stays as it is.
///
/// # Errors
/// [`Error::NoOrder`] if `after` is empty; if a stream or an event is in a graph capture, or the driver refuses. The batch
/// is unchanged.
///
/// # Safety
/// The streams and events exist and are not destroyed during the call.
pub unsafe fn order(batch: &mut Batch, after: &[Order]) -> Result<(), Error> {
    let devices = devices(batch.devices());
    if devices.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller promised that the streams and events exist.
    batch.set_after(unsafe { self::after(&devices, after) }?);
    Ok(())
}

/// The numbers of the GPUs that own these memories, each once.
pub fn devices<'a>(memories: impl IntoIterator<Item = &'a DeviceMemory>) -> Vec<i32> {
    let mut found = Vec::new();
    for gpu in memories.into_iter().filter_map(Gpu::of_memory) {
        if !found.contains(&gpu.device()) {
            found.push(gpu.device());
        }
    }
    found
}

/// Makes the edges of this work as [`edges`] does, for a batch or for what makes batches.
///
/// # Errors
/// Those of [`edges`].
///
/// # Safety
/// The contract of [`edges`].
pub unsafe fn after(devices: &[i32], after: &[Order]) -> Result<After, Error> {
    // SAFETY: the caller promised that the streams and events exist.
    let edges = unsafe { edges(devices, after) }?;
    Ok(if edges.is_empty() { After::host() } else { Edge::all(edges) })
}

/// Makes the edges of this work, for memory of the GPUs with these numbers. [`Order::Host`] needs no edge, and without a
/// GPU there are none.
///
/// # Errors
/// [`Error::NoOrder`] if `after` is empty; if a stream or an event is in a graph capture, or the driver refuses.
///
/// # Safety
/// The streams and events exist and are not destroyed during the call.
pub unsafe fn edges(devices: &[i32], after: &[Order]) -> Result<Vec<Edge>, Error> {
    let Some(&device) = devices.first() else { return Ok(Vec::new()) };
    if after.is_empty() {
        return Err(Error::NoOrder { device });
    }
    let mut edges = Vec::with_capacity(after.len());
    for order in after {
        match *order {
            Order::Host => {}
            Order::Event(event) => {
                // SAFETY: the caller promised that the event exists.
                edges.push(Gpu::adopt(unsafe { Edge::after_event(event, device) }?));
            }
            Order::Stream(stream) => {
                let of = if stream.is_default() { devices } else { &devices[..1] };
                for device in of {
                    // SAFETY: the caller promised that the stream exists.
                    edges.push(Gpu::adopt(unsafe { Edge::after_stream(stream, *device) }?));
                }
            }
        }
    }
    Ok(edges)
}
