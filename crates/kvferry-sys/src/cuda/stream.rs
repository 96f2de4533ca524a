//! Streams and events: our own, and raw handles of the engine's.
//!
//! Own streams never synchronise with the legacy default stream. A stream of the engine only gets events
//! recorded, and waits for events: no work of ours runs on it.

use super::abi::*;
use super::context::Context;
use super::error::{Error, Result};
use super::load::{Driver, call};
use std::fmt;

/// A non-blocking stream, destroyed on drop. Work that it has keeps running after that.
pub struct Stream {
    context: Context,
    handle: CUstream,
}

impl Stream {
    /// A new stream of the context.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn new(context: &Context) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = CUstream::default();
        // SAFETY: the driver writes a handle.
        unsafe { call!(context.driver(), stream_create(&raw mut handle, CU_STREAM_NON_BLOCKING)) }?;
        Ok(Self { context: context.clone(), handle })
    }

    /// The stream's context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The stream's handle for another library, valid until the stream is dropped.
    pub fn raw(&self) -> RawStream {
        RawStream(self.handle.0 as u64)
    }

    pub(super) fn handle(&self) -> CUstream {
        self.handle
    }

    /// Makes later work of the stream wait for the work that was before the event's last record. The event
    /// may be of another device.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: stream and event are ours.
        unsafe { call!(self.context.driver(), stream_wait_event(self.handle, event.handle, 0)) }
    }

    /// Makes later work of the stream wait for another library's event.
    ///
    /// # Errors
    /// [`Error::CapturedEvent`] if the event was recorded in a graph capture; [`Error::NullEvent`]; an error of
    /// the event's context; if the driver refuses, or in a forked child.
    ///
    /// # Safety
    /// The event exists and is not destroyed during the call.
    pub unsafe fn wait_raw(&self, event: RawEvent) -> Result<()> {
        let _entered = self.context.enter()?;
        // The driver's answer is about captures alone: the event may be reached or not.
        // SAFETY: the caller promised that the event exists.
        unsafe { event.query(&self.context) }?;
        let event = event.handle()?;
        // SAFETY: the stream is ours, and the caller promised that the event exists.
        unsafe { call!(self.context.driver(), stream_wait_event(self.handle, event, 0)) }
    }

    /// Whether all work of the stream has run.
    ///
    /// # Errors
    /// The first error of that work, if the driver refuses, or in a forked child.
    pub fn query(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is ours.
        ready(unsafe { call!(self.context.driver(), stream_query(self.handle)) })
    }

    /// Waits until all work of the stream has run.
    ///
    /// # Errors
    /// The first error of that work, if the driver refuses, or in a forked child.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is ours.
        unsafe { call!(self.context.driver(), stream_synchronize(self.handle)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made by this value, and destroyed once.
            let _ = unsafe { call!(self.context.driver(), stream_destroy(self.handle)) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:#x})", self.handle.0)
    }
}

/// An event without timing, destroyed on drop. A thread that waits for it sleeps.
pub struct Event {
    context: Context,
    handle: CUevent,
}

impl Event {
    /// A new event of the context. Until it is recorded it counts as reached.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn new(context: &Context) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = CUevent::default();
        let flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
        // SAFETY: the driver writes a handle.
        unsafe { call!(context.driver(), event_create(&raw mut handle, flags)) }?;
        Ok(Self { context: context.clone(), handle })
    }

    /// The event's context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The event's handle for another library, valid until the event is dropped.
    pub fn raw(&self) -> RawEvent {
        RawEvent(self.handle.0 as u64)
    }

    /// Records the event after the present work of the stream, which is of the event's context.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: event and stream are ours.
        unsafe { call!(self.context.driver(), event_record(self.handle, stream.handle)) }
    }

    /// Records the event after the present work of another library's stream, which is of the event's context.
    /// A default stream is the one of the event's context; [`RawStream::PER_THREAD`] is the calling thread's.
    ///
    /// # Errors
    /// [`Error::Capturing`] if the stream is in a graph capture; if the driver refuses, or in a forked child.
    ///
    /// # Safety
    /// The stream exists and is not destroyed during the call.
    pub unsafe fn record_raw(&self, stream: RawStream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller promised that the stream exists.
        if unsafe { stream.is_capturing(&self.context) }? {
            return Err(Error::Capturing(stream.0));
        }
        // SAFETY: as above.
        unsafe { call!(self.context.driver(), event_record(self.handle, stream.handle())) }
    }

    /// Whether the work before the last record has run.
    ///
    /// # Errors
    /// An error of the context, if the driver refuses, or in a forked child.
    pub fn query(&self) -> Result<bool> {
        // SAFETY: the event is ours.
        unsafe { self.raw().query(&self.context) }
    }

    /// Waits until the work before the last record has run.
    ///
    /// # Errors
    /// An error of the context, if the driver refuses, or in a forked child.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is ours.
        unsafe { call!(self.context.driver(), event_synchronize(self.handle)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made by this value, and destroyed once. The driver keeps it for streams that wait.
            let _ = unsafe { call!(self.context.driver(), event_destroy(self.handle)) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:#x})", self.handle.0)
    }
}

/// Another library's stream: a `CUstream` or `cudaStream_t` as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(pub u64);

impl RawStream {
    /// The legacy default stream of the current context; zero means the same.
    pub const LEGACY: Self = Self(1);
    /// The default stream of the calling thread.
    pub const PER_THREAD: Self = Self(2);

    fn handle(self) -> CUstream {
        CUstream(self.0 as usize)
    }

    /// Whether this is a default stream, which belongs to no context of its own.
    pub fn is_default(self) -> bool {
        self.0 <= Self::PER_THREAD.0
    }

    /// Whether the stream is in a graph capture. The legacy stream counts as in one while a blocking stream
    /// of the context is.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    ///
    /// # Safety
    /// The stream exists and is not destroyed during the call.
    pub unsafe fn is_capturing(self, context: &Context) -> Result<bool> {
        let _entered = context.enter()?;
        let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the driver writes one integer; the caller promised that the stream exists.
        let asked =
            unsafe { call!(context.driver(), stream_is_capturing(self.handle(), &raw mut status)) };
        match asked {
            Ok(()) => Ok(status != CU_STREAM_CAPTURE_STATUS_NONE),
            Err(error) if is_of_capture(&error) => Ok(true),
            Err(error) => Err(self.named_in(error)),
        }
    }

    /// The context of a stream that is no default stream.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    ///
    /// # Safety
    /// The stream exists and is not destroyed during the call.
    pub unsafe fn context(self, driver: &'static Driver) -> Result<Context> {
        let mut handle = CUcontext::default();
        // SAFETY: the driver writes a handle; the caller promised that the stream exists.
        let asked = unsafe { call!(driver, stream_get_ctx(self.handle(), &raw mut handle)) };
        asked.map_err(|error| self.named_in(error))?;
        Context::of_handle(driver, handle)
    }

    /// The error of a call whose only handle is the stream's.
    fn named_in(self, error: Error) -> Error {
        if is_unknown(&error) { Error::UnknownStream(self.0) } else { error }
    }

    /// Makes later work of the stream wait for an own event: only for events whose work no peer can delay.
    ///
    /// # Errors
    /// [`Error::Capturing`] if the stream is in a graph capture; if the driver refuses, or in a forked child.
    ///
    /// # Safety
    /// The stream exists and is not destroyed during the call.
    pub unsafe fn wait(self, event: &Event) -> Result<()> {
        let _entered = event.context.enter()?;
        // SAFETY: the caller promised that the stream exists.
        if unsafe { self.is_capturing(&event.context) }? {
            return Err(Error::Capturing(self.0));
        }
        // SAFETY: as above, and the event is ours.
        unsafe { call!(event.context.driver(), stream_wait_event(self.handle(), event.handle, 0)) }
    }
}

/// Another library's event: a `CUevent` or `cudaEvent_t` as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawEvent(pub u64);

impl RawEvent {
    /// Whether the work before the event's last record has run.
    ///
    /// # Errors
    /// [`Error::CapturedEvent`] if that was in a graph capture; [`Error::UnknownEvent`] if the driver reports so; an error of the
    /// event's context, if the driver refuses, or in a forked child.
    ///
    /// # Safety
    /// The event exists and is not destroyed during the call.
    pub unsafe fn query(self, context: &Context) -> Result<bool> {
        let event = self.handle()?;
        let _entered = context.enter()?;
        // SAFETY: the caller promised that the event exists.
        match ready(unsafe { call!(context.driver(), event_query(event)) }) {
            Err(error) if is_of_capture(&error) => Err(Error::CapturedEvent(self.0)),
            Err(error) if is_unknown(&error) => Err(Error::UnknownEvent(self.0)),
            answer => answer,
        }
    }

    fn handle(self) -> Result<CUevent> {
        if self.0 == 0 { Err(Error::NullEvent) } else { Ok(CUevent(self.0 as usize)) }
    }
}

/// Turns the driver's answer to "has it run?" into a value.
fn ready(asked: Result<()>) -> Result<bool> {
    match asked {
        Ok(()) => Ok(true),
        Err(Error::Driver(error)) if error.code == CUDA_ERROR_NOT_READY => Ok(false),
        Err(error) => Err(error),
    }
}

/// True if the driver refused because it does not know a handle. Drivers promise no such answer.
fn is_unknown(error: &Error) -> bool {
    error.code() == Some(CUDA_ERROR_INVALID_HANDLE)
}

/// Whether the driver refused because of a graph capture.
fn is_of_capture(error: &Error) -> bool {
    const CODES: std::ops::RangeInclusive<CUresult> =
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED..=CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    error.code().is_some_and(|code| CODES.contains(&code))
}
