//! Transfers whose batch names edges: work of devices that has to happen before their memory is touched.
//!
//! They wait before they have a connection, a lane or a stage. What an edge stands for, such as a kernel, may itself
//! wait for another transfer, which needs these.

use crate::error::{Error, ErrorKind};
use crate::memory::device::Wait;
use crate::reactor::{Cause, Cx, Handler, Next};
use crate::sync::Arc;
use crate::transfer::job::Job;
use crate::transfer::slot::{INTERRUPT_EVERY, Interrupt, interrupted, says_stop};
use kvferry_sys::poll::Interest;
use std::sync::mpsc::{self, RecvTimeoutError};

/// Calls `then` once all edges of the job's batch have happened; at once if there are none. If the job is stopped
/// before that, or an edge fails, ends it instead.
pub(crate) fn when_happened(job: &Arc<Job>, then: impl FnOnce() + Send + 'static) {
    if !job.batch.local.has_edges() {
        return then();
    }
    let io = job.core.threads.io();
    let token = io.token();
    job.add_handler(&io, token);
    let waits = job.batch.local.wait_for_edges(&io.waker(token));
    io.add(token, Box::new(Waiting { job: Arc::clone(job), waits, then: Some(then) }));
}

/// Waits until all edges of the job's batch have happened. False if the job ends instead.
pub(crate) fn have_happened(job: &Arc<Job>, interrupt: Interrupt<'_>) -> bool {
    if !job.batch.local.has_edges() {
        return true;
    }
    let (happened, waits) = mpsc::channel();
    when_happened(job, move || {
        let _ = happened.send(());
    });
    loop {
        match waits.recv_timeout(INTERRUPT_EVERY) {
            Ok(()) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
            Err(RecvTimeoutError::Timeout) if interrupt.is_some_and(says_stop) => {
                job.stop(interrupted());
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// The error of a job whose deadline has passed before its edges have happened.
fn still_waits(job: &Job) -> Error {
    let awaited = job.batch.local.awaited();
    let awaited = awaited.as_deref().unwrap_or("the work that it comes after");
    let what = format!(
        "the transfer did not end in time: it still waited for {awaited}; look at what runs before that, such as a kernel \
         that does not end, or name other work"
    );
    Error::new(ErrorKind::Deadline, what)
}

struct Waiting<F> {
    job: Arc<Job>,
    waits: Vec<Arc<Wait>>,
    /// `None` once the job goes on or has ended.
    then: Option<F>,
}

impl<F: FnOnce() + Send> Handler for Waiting<F> {
    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let job = &self.job;
        if cx.now >= job.deadline && !job.is_stopped() {
            job.stop(still_waits(job));
        }
        self.waits.retain(|wait| match wait.outcome.lock().take() {
            None => true,
            Some(Ok(())) => false,
            Some(Err(e)) => {
                let what = "a device can't wait for what has to happen before the transfer";
                job.fail(Error::new(ErrorKind::Internal, what).caused_by(e));
                false
            }
        });
        if job.is_stopped() {
            self.then = None;
            job.finish_unstarted();
        } else if !self.waits.is_empty() {
            return Next::Wait { interest: Interest::None, deadline: Some(job.deadline) };
        } else if let Some(then) = self.then.take() {
            then();
        }
        Next::Close
    }
}

impl<F> Drop for Waiting<F> {
    fn drop(&mut self) {
        if self.then.is_some() {
            self.job.finish(Err(Error::shutdown().with_quiesced(true)));
        }
    }
}
