//! Work of a stream that a transfer has to come after.

#![allow(unsafe_code, reason = "streams and events of other libraries are named by raw handles")]

use crate::error::Error;
use kvferry::After;
use kvferry_sys::cuda::{self, Context, Driver, Event, RawEvent, RawStream, Stream};
use std::any::Any;
use std::sync::Arc;

/// The work that a stream, or an event, stood for when the edge was made. A transfer that has it in
/// [`kvferry::Batch::set_after`] touches memory of GPUs only after that work has run.
///
/// An edge has an event of its own: what the caller does with the stream or the event later does not change it.
#[derive(Debug)]
pub struct Edge {
    event: Event,
    /// Carries the wait for another library's event.
    _stream: Option<Stream>,
}

impl Edge {
    /// The work that the stream has now. A default stream is the one of the GPU `device`, and 2 stands for the default
    /// stream of the calling thread.
    ///
    /// # Errors
    /// If the driver can't be used, or the stream is in a graph capture.
    ///
    /// # Safety
    /// The stream exists and is not destroyed during the call.
    pub unsafe fn after_stream(stream: RawStream, device: i32) -> Result<Self, Error> {
        let driver = Driver::get()?;
        let mut context = Context::primary(driver.device(device)?)?;
        if !stream.is_default() {
            // The driver answers only where some context is current.
            let entered = context.enter()?;
            // SAFETY: the caller promised that the stream exists.
            let of_stream = unsafe { stream.context(driver) }?;
            drop(entered);
            context = of_stream;
        }
        let event = Event::new(&context)?;
        // SAFETY: as above.
        unsafe { event.record_raw(stream) }?;
        Ok(Self { event, _stream: None })
    }

    /// The work before the last record of the event, of the GPU `device`.
    ///
    /// # Errors
    /// If the driver can't be used, or the event was recorded in a graph capture.
    ///
    /// # Safety
    /// The event exists and is not destroyed during the call.
    pub unsafe fn after_event(event: RawEvent, device: i32) -> Result<Self, Error> {
        let context = Context::primary(Driver::get()?.device(device)?)?;
        // A stream for each: one whose event never happens must not hold up another.
        let stream = Stream::new(&context)?;
        // SAFETY: the caller promised that the event exists.
        unsafe { stream.wait_raw(event) }?;
        let own = Event::new(&context)?;
        own.record(&stream)?;
        Ok(Self { event: own, _stream: Some(stream) })
    }

    /// The edges as transfers take them.
    pub fn all(edges: impl IntoIterator<Item = Self>) -> After {
        After::all(edges.into_iter().map(|edge| Arc::new(edge) as Arc<dyn Any + Send + Sync>))
    }

    /// True once the work has run.
    ///
    /// # Errors
    /// An error of the GPU's context, or if the driver refuses.
    pub fn has_happened(&self) -> Result<bool, cuda::Error> {
        self.event.query()
    }

    /// True once all edges have happened that are a GPU's. Never waits.
    ///
    /// # Errors
    /// If the driver reports that one never will.
    pub fn have_happened(after: &After) -> Result<bool, Error> {
        for edge in after.edges().iter().filter_map(|edge| edge.downcast_ref::<Self>()) {
            if !edge.has_happened()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
