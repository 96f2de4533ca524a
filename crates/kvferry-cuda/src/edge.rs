//! Work of a stream that a transfer has to come after.

#![allow(unsafe_code, reason = "streams and events of other libraries are named by raw handles")]

use crate::error::Error;
use crate::gpu::Gpu;
use kvferry::After;
use kvferry_sys::cuda::{self, Context, Driver, Event, RawEvent, RawStream, Stream};
use kvferry_sys::sync::Mutex;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// The most dropped edges that wait for the thread of their GPU, which sleeps while no transfer needs it.
const ENDED_MAX: usize = 1024;

/// The work that a stream, or an event, stood for when the edge was made. A transfer that has it in
/// [`kvferry::Batch::set_after`] touches memory of GPUs only after that work has run.
///
/// An edge has an event of its own: what the caller does with the stream or the event later does not change it.
#[derive(Debug)]
pub struct Edge {
    /// `None` only while the edge is dropped.
    recorded: Option<Recorded>,
    /// The list that takes `recorded` from the thread that drops the edge.
    ended: Weak<Ended>,
    source: Source,
    /// The number of the stream's GPU, or of the GPU that waits for the event.
    device: i32,
    /// Set once a look at the edge has found that the work has run.
    has_happened: AtomicBool,
}

/// The handle of the stream or event that an edge was made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Stream(RawStream),
    Event(RawEvent),
}

/// The driver's objects of an edge.
#[derive(Debug)]
struct Recorded {
    event: Event,
    /// Carries the wait for another library's event.
    _stream: Option<Stream>,
}

/// The driver's objects of dropped edges, until the thread of their GPU destroys them.
#[derive(Debug, Default)]
pub(crate) struct Ended(Mutex<Vec<Recorded>>);

impl Ended {
    /// Destroys the objects that have come, with calls of the driver.
    pub(crate) fn clear(&self) {
        // The calls are made without the lock.
        let ended = std::mem::take(&mut *self.0.lock());
        drop(ended);
    }
}

impl Edge {
    fn new(source: Source, event: Event, stream: Option<Stream>) -> Self {
        let device = event.context().device().ordinal();
        Self {
            recorded: Some(Recorded { event, _stream: stream }),
            ended: Weak::new(),
            source,
            device,
            has_happened: AtomicBool::new(false),
        }
    }

    /// Leaves the end of the edge to the thread that clears `ended`.
    pub(crate) fn ended_in(mut self, ended: &Arc<Ended>) -> Self {
        self.ended = Arc::downgrade(ended);
        self
    }

    fn event(&self) -> &Event {
        &self.recorded.as_ref().expect("there until it is dropped").event
    }

    /// The context of its event.
    pub(crate) fn context(&self) -> &Context {
        self.event().context()
    }

    /// The work that the stream has now. A default stream is the one of the GPU `device`, and 2 stands for the default
    /// stream of the calling thread.
    ///
    /// # Errors
    /// If the driver can't be used, the stream is in a graph capture, or the GPU is lost.
    ///
    /// # Safety
    /// The stream exists and is not destroyed during the call.
    pub unsafe fn after_stream(stream: RawStream, device: i32) -> Result<Self, Error> {
        // SAFETY: the caller promised that the stream exists.
        unsafe { Self::of_stream(stream, device) }.map_err(|error| Gpu::explain(device, error))
    }

    /// The same, with the driver's own errors.
    ///
    /// # Safety
    /// The contract of [`Edge::after_stream`].
    unsafe fn of_stream(stream: RawStream, device: i32) -> Result<Self, Error> {
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
        Ok(Self::new(Source::Stream(stream), event, None))
    }

    /// The work before the last record of the event, of the GPU `device`.
    ///
    /// # Errors
    /// If the driver can't be used, the event was recorded in a graph capture, or the GPU is lost.
    ///
    /// # Safety
    /// The event exists and is not destroyed during the call.
    pub unsafe fn after_event(event: RawEvent, device: i32) -> Result<Self, Error> {
        // SAFETY: the caller promised that the event exists.
        unsafe { Self::of_event(event, device) }.map_err(|error| Gpu::explain(device, error))
    }

    /// The same, with the driver's own errors.
    ///
    /// # Safety
    /// The contract of [`Edge::after_event`].
    unsafe fn of_event(event: RawEvent, device: i32) -> Result<Self, Error> {
        let context = Context::primary(Driver::get()?.device(device)?)?;
        // A stream for each: one whose event never happens must not hold up another.
        let stream = Stream::new(&context)?;
        // SAFETY: the caller promised that the event exists.
        unsafe { stream.wait_raw(event) }?;
        let own = Event::new(&context)?;
        own.record(&stream)?;
        Ok(Self::new(Source::Event(event), own, Some(stream)))
    }

    /// The edges as transfers take them. Without an edge, they name nothing: see [`After::host`].
    pub fn all(edges: impl IntoIterator<Item = Self>) -> After {
        After::all(edges.into_iter().map(|edge| Arc::new(edge) as Arc<dyn Any + Send + Sync>))
    }

    /// True once the work has run.
    ///
    /// # Errors
    /// An error of the GPU's context, or if the driver refuses.
    pub fn has_happened(&self) -> Result<bool, cuda::Error> {
        // The first error may come from another call of the driver.
        let has_happened = self.event().query().or_else(|_| self.event().query())?;
        if has_happened {
            self.has_happened.store(true, Ordering::Relaxed);
        }
        Ok(has_happened)
    }

    /// Names the first edge that no look has found to have happened, and its place among several. Calls no driver.
    pub(crate) fn awaited(after: &After) -> Option<String> {
        let edges = after.edges();
        let (at, edge) = edges.iter().enumerate().find_map(|(at, edge)| {
            let edge = edge.downcast_ref::<Self>()?;
            (!edge.has_happened.load(Ordering::Relaxed)).then_some((at, edge))
        })?;
        Some(match edges.len() {
            1 => edge.to_string(),
            all => format!("{edge} (edge {} of {all})", at + 1),
        })
    }

    /// True once all edges of GPUs have happened. Never waits.
    ///
    /// # Errors
    /// If the driver reports that an edge never will.
    pub fn have_happened(after: &After) -> Result<bool, Error> {
        for edge in after.edges().iter().filter_map(|edge| edge.downcast_ref::<Self>()) {
            if !edge.has_happened()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl fmt::Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.device;
        match self.source {
            Source::Stream(RawStream::PER_THREAD) => {
                write!(f, "the calling thread's default stream of GPU {device}")
            }
            Source::Stream(stream) if stream.is_default() => {
                write!(f, "the default stream of GPU {device}")
            }
            Source::Stream(stream) => write!(f, "stream {:#x} of GPU {device}", stream.0),
            Source::Event(event) => write!(f, "event {:#x}, waited for on GPU {device}", event.0),
        }
    }
}

impl Drop for Edge {
    /// A call of the driver may wait for work of the GPU. The thread that drops the edge may hold the lock of a Python
    /// interpreter for which that work waits, or serve peers.
    fn drop(&mut self) {
        let Some(ended) = self.ended.upgrade() else { return };
        // Without waiting for the lock: in a forked child, a thread of the parent may hold it for ever.
        if let Some(mut all) = ended.0.try_lock()
            && all.len() < ENDED_MAX
        {
            all.extend(self.recorded.take());
        }
    }
}
