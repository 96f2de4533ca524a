//! Streams and events: their state.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;

use crate::clocks::{Actor, Clock};
use crate::ops::Op;

/// A stream of a primary context.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    /// The legacy default stream waits for it and the reverse.
    pub(crate) blocking: bool,
    pub(crate) legacy: bool,
    /// The program created it, and must destroy it.
    pub(crate) owned: bool,
    pub(crate) queue: VecDeque<Op>,
    /// The last operation submitted, 0 for none.
    pub(crate) last: u64,
    pub(crate) actor: Actor,
    pub(crate) step: u64,
    pub(crate) clock: Clock,
    /// The virtual time at which all of it has completed.
    pub(crate) end: u64,
    pub(crate) slow: bool,
    pub(crate) capture: Option<Capture>,
    /// Destroyed, with operations that are still to complete.
    pub(crate) dying: bool,
}

/// A capture in progress.
#[derive(Debug, Clone)]
pub(crate) struct Capture {
    /// The stream in which the capture began.
    pub(crate) origin: usize,
    pub(crate) mode: c_int,
    pub(crate) thread: u64,
    pub(crate) invalidated: bool,
    /// A stream of the capture has waited for all that this one has.
    pub(crate) joined: bool,
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) timing: bool,
    pub(crate) record: Option<EventRecord>,
}

#[derive(Debug, Clone)]
pub(crate) struct EventRecord {
    pub(crate) op: u64,
    pub(crate) clock: Arc<Clock>,
    pub(crate) end: u64,
    /// The capture's origin and the recording stream, when the record is part of a graph.
    pub(crate) captured: Option<(usize, usize)>,
}

impl Stream {
    pub(crate) fn new(device: usize, blocking: bool, actor: Actor) -> Self {
        Self {
            device,
            blocking,
            legacy: false,
            owned: true,
            queue: VecDeque::new(),
            last: 0,
            actor,
            step: 0,
            clock: Clock::default(),
            end: 0,
            slow: false,
            capture: None,
            dying: false,
        }
    }
}
