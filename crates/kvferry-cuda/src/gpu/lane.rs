//! Batches that the driver copies one after the other on a stream of their own.

use super::submit::Calls;
use super::{Counts, Shared};
use crate::error::Error;
use kvferry::DeviceCopy;
use kvferry_sys::cuda::{self, Event, Stream};
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

/// Calls in a stream, beyond which the next batch waits here. At about a thousand, each further call waits for the device.
const CALLS_MAX: usize = 512;

/// Time without the end of a batch after which the stream is asked, and between two such questions.
const UNHEARD: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Lane {
    stream: Stream,
    running: VecDeque<Running>,
    calls: usize,
    /// Events that can be recorded again.
    spare: Vec<Event>,
    /// Time of the next question to the stream.
    ask_at: Instant,
}

/// A batch that the driver has.
#[derive(Debug)]
struct Running {
    submitted: Submitted,
    event: Event,
}

/// A batch with its calls of the driver. Its stage and regions stay until it is completed.
#[derive(Debug)]
struct Submitted {
    copy: DeviceCopy,
    calls: Calls,
}

impl Lane {
    pub(super) fn new(shared: &Shared) -> Result<Self, cuda::Error> {
        Ok(Self {
            stream: Stream::new(&shared.context)?,
            running: VecDeque::new(),
            calls: 0,
            spare: Vec::new(),
            ask_at: Instant::now(),
        })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// True if the stream has room for the calls of a batch.
    pub(super) fn has_room(&self) -> bool {
        self.calls < CALLS_MAX
    }

    /// Gives a batch to the driver, by the calls that `submit` makes on the stream.
    pub(super) fn start(
        &mut self,
        shared: &Shared,
        copy: DeviceCopy,
        submit: impl FnOnce(&Stream, &mut Calls),
    ) {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => match Event::new(&shared.context) {
                Ok(event) => event,
                // Nothing was given to the driver.
                Err(error) => return end(shared, copy, Err(error)),
            },
        };
        // A panic must not drop memory that the driver uses.
        let mut submitted = ManuallyDrop::new(Submitted { copy, calls: Calls::default() });
        submit(&self.stream, &mut submitted.calls);
        let submitted = ManuallyDrop::into_inner(submitted);
        // The first error may be of another call.
        let recorded = event.record(&self.stream).or_else(|_| event.record(&self.stream));
        if let Err(error) = recorded {
            return self.lose(shared, submitted, error);
        }
        self.calls += submitted.calls.count;
        if self.running.is_empty() {
            self.ask_at = Instant::now() + UNHEARD;
        }
        self.running.push_back(Running { submitted, event });
    }

    /// Ends what the driver has copied. Returns whether a batch has ended.
    pub(super) fn poll(&mut self, shared: &Shared) -> bool {
        let mut has_ended = false;
        while let Some(first) = self.running.front() {
            // The first error may be of another call.
            let heard = first.event.query().or_else(|_| first.event.query());
            let is_reached = heard == Ok(true);
            let answer = match heard {
                Ok(false) => self.has_ended_unheard(shared),
                heard => heard,
            };
            match answer {
                Ok(false) => break,
                Ok(true) => {
                    let Running { submitted, event } = self.running.pop_front().expect("the first");
                    self.spare.extend(is_reached.then_some(event));
                    self.calls -= submitted.calls.count;
                    let Submitted { copy, calls } = submitted;
                    end(shared, copy, calls.error.map_or(Ok(()), Err));
                }
                Err(error) => {
                    let Running { submitted, .. } = self.running.pop_front().expect("the first");
                    self.calls -= submitted.calls.count;
                    self.lose(shared, submitted, error);
                }
            }
            has_ended = true;
        }
        if has_ended {
            self.ask_at = Instant::now() + UNHEARD;
        }
        has_ended
    }

    /// True if the first batch has ended, though its event was lost. The stream ends its work in order: the next event tells,
    /// or after a while the stream, once nothing is left in it. An error is one by which the GPU is lost.
    fn has_ended_unheard(&mut self, shared: &Shared) -> Result<bool, cuda::Error> {
        if self.running.get(1).is_some_and(|second| second.event.query() == Ok(true)) {
            return Ok(true);
        }
        let now = Instant::now();
        // Nothing is to be gained by waiting for a GPU that is lost.
        if now < self.ask_at && shared.lost().is_none() {
            return Ok(false);
        }
        self.ask_at = now + UNHEARD;
        // Any other error may be of another call: the stream is asked again after a while.
        self.stream.query().or_else(|error| match shared.is_lost_by(&error) {
            true => Err(error),
            false => Ok(false),
        })
    }

    /// Ends a batch that no event tells of. By a sticky error, the driver has ended all work of the context. That a device
    /// is gone says nothing of the copies that it has begun.
    fn lose(&self, shared: &Shared, submitted: Submitted, error: cuda::Error) {
        let is_lost = shared.is_lost_by(&error);
        let Submitted { copy, calls } = submitted;
        if is_lost && error.is_sticky() {
            return end(shared, copy, Err(error));
        }
        // Before anything that may panic: a drop would give them back.
        std::mem::forget(calls);
        Counts::add(&shared.counts.leaked, 1);
        copy.lose(Error::Driver(error.clone()).into());
        tracing::error!(
            device = shared.device,
            %error,
            "a copy of the GPU can't be followed: its memory stays in quarantine"
        );
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
