//! Batches of one direction, which the driver copies one after the other on a stream of their own.

use super::submit::{Submitted, submit};
use super::{Counts, Shared};
use crate::error::Error;
use crate::job::Direction;
use crate::plan::Plan;
use kvferry::DeviceCopy;
use kvferry_sys::cuda::{self, Event, SourceOrder, Stream};
use std::collections::VecDeque;

/// Calls in a stream, beyond which the next batch waits here. At about a thousand, each further call waits for the device.
const CALLS_MAX: usize = 512;

#[derive(Debug)]
pub(super) struct Lane {
    direction: Direction,
    stream: Stream,
    /// Batches that wait for room in the stream.
    pub(super) queue: VecDeque<DeviceCopy>,
    running: VecDeque<Running>,
    calls: usize,
    /// Events that can be recorded again.
    spare: Vec<Event>,
}

/// A batch that the driver has.
#[derive(Debug)]
struct Running {
    submitted: Submitted,
    event: Event,
}

impl Lane {
    pub(super) fn new(shared: &Shared, direction: Direction) -> Result<Self, cuda::Error> {
        Ok(Self {
            direction,
            stream: Stream::new(&shared.context)?,
            queue: VecDeque::new(),
            running: VecDeque::new(),
            calls: 0,
            spare: Vec::new(),
        })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running.is_empty()
    }

    /// The next batch that the stream has room for.
    pub(super) fn next(&mut self) -> Option<DeviceCopy> {
        if self.calls >= CALLS_MAX {
            return None;
        }
        self.queue.pop_front()
    }

    /// Gives a batch to the driver.
    pub(super) fn start(&mut self, shared: &Shared, copy: DeviceCopy, plan: &Plan) {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => match Event::new(&shared.context) {
                Ok(event) => event,
                // Nothing was given to the driver.
                Err(error) => return end(shared, copy, Err(error)),
            },
        };
        let order = match self.direction {
            Direction::Out => SourceOrder::Stream,
            // Nothing writes the stage before the batch has ended.
            Direction::In => SourceOrder::Any,
        };
        let submitted = submit(shared, &self.stream, copy, plan, order);
        // The first error may be of another call.
        let recorded = event.record(&self.stream).or_else(|_| event.record(&self.stream));
        if let Err(error) = recorded {
            return self.lose(shared, submitted, error);
        }
        self.calls += submitted.calls;
        self.running.push_back(Running { submitted, event });
    }

    /// Ends what the driver has copied. Returns whether a batch has ended.
    pub(super) fn poll(&mut self, shared: &Shared) -> bool {
        let mut has_ended = false;
        while let Some(first) = self.running.front() {
            // The first error may be of another call.
            match first.event.query().or_else(|_| first.event.query()) {
                // The stream ends its work in order: an event may be lost, but not two in a row.
                Ok(false) if !self.has_second_ended() => break,
                Ok(is_reached) => {
                    let Running { submitted, event } = self.running.pop_front().expect("the first");
                    self.spare.extend(is_reached.then_some(event));
                    self.calls -= submitted.calls;
                    let Submitted { copy, error, .. } = submitted;
                    end(shared, copy, error.map_or(Ok(()), Err));
                }
                Err(error) => {
                    let Running { submitted, .. } = self.running.pop_front().expect("the first");
                    self.calls -= submitted.calls;
                    self.lose(shared, submitted, error);
                }
            }
            has_ended = true;
        }
        has_ended
    }

    fn has_second_ended(&self) -> bool {
        self.running.get(1).is_some_and(|second| second.event.query() == Ok(true))
    }

    /// Ends a batch that no event tells of.
    fn lose(&self, shared: &Shared, submitted: Submitted, error: cuda::Error) {
        if shared.is_lost_by(&error) {
            // The driver has ended all work of the context.
            let Submitted { copy, .. } = submitted;
            return end(shared, copy, Err(error));
        }
        // Before anything that may panic: a drop would give its stage and its regions back.
        std::mem::forget(submitted);
        Counts::add(&shared.counts.leaked, 1);
        tracing::error!(
            device = shared.device,
            %error,
            "a copy of the GPU can't be followed: its memory stays in quarantine"
        );
    }

    /// Fails what the driver does not have, if the GPU is lost.
    pub(super) fn fail_queue(&mut self, shared: &Shared) {
        let Some(lost) = shared.lost() else { return };
        for copy in std::mem::take(&mut self.queue) {
            Counts::add(&shared.counts.failed, 1);
            copy.complete(Err(lost.clone().into()));
        }
    }
}

/// Completes a batch.
pub(super) fn end(shared: &Shared, copy: DeviceCopy, result: Result<(), cuda::Error>) {
    if let Err(error) = &result {
        Counts::add(&shared.counts.failed, 1);
        shared.is_lost_by(error);
    }
    copy.complete(result.map_err(|error| Error::Driver(error).into()));
}
