//! Results that come later.

use crate::error::{Error, Result};
use crate::threads::task_pool::Ticket;
use kvferry_sys::poll::EventFd;
use kvferry_sys::sync::{Condvar, Mutex};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// An operation of a store that is under way. Clones are the same operation; dropping them does not stop it.
#[derive(Debug)]
pub struct Pending<T>(Arc<Shared<T>>);

impl<T> Clone for Pending<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    done: Condvar,
    event: OnceLock<EventFd>,
    /// Of an operation that can be cancelled until it has begun.
    ticket: OnceLock<Ticket>,
    /// The process that the operation runs in.
    forks: u32,
}

#[derive(Debug)]
struct State<T> {
    outcome: Option<Arc<Result<T>>>,
    /// Wakers of the tasks that wait.
    wakers: Vec<Waker>,
}

impl<T> Pending<T> {
    /// An operation, and the promise to end it.
    pub(crate) fn new() -> (Self, Promise<T>) {
        let state = Mutex::new(State { outcome: None, wakers: Vec::new() });
        let forks = kvferry_sys::fd::forks();
        let (done, event, ticket) = Default::default();
        let pending = Self(Arc::new(Shared { state, done, event, ticket, forks }));
        (pending.clone(), Promise(Some(pending)))
    }

    /// Has [`Pending::cancel`] give up the operation's task.
    pub(crate) fn set_ticket(&self, ticket: Ticket) {
        let _ = self.0.ticket.set(ticket);
    }

    /// Ends a put in the background that has not begun: its memory is the caller's again when this returns, and its
    /// blocks are refused ([`Put::refused_waiting`](crate::Put::refused_waiting)). False if it has begun or ended, in a
    /// process that was forked while it ran, and for all other operations, which are not cancelled.
    pub fn cancel(&self) -> bool {
        !self.is_forked() && self.0.ticket.get().is_some_and(Ticket::cancel)
    }

    fn finish(&self, outcome: Result<T>) {
        let wakers = {
            let mut state = self.0.state.lock();
            debug_assert!(state.outcome.is_none(), "one outcome");
            state.outcome = Some(Arc::new(outcome));
            self.0.done.notify_all();
            if let Some(event) = self.0.event.get() {
                event.signal();
            }
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// The outcome, or `None` while it runs; `Closed` in a process that was forked while it ran.
    pub fn outcome(&self) -> Option<Arc<Result<T>>> {
        if self.is_forked() {
            return Some(self.outcome_after_fork());
        }
        self.0.state.lock().outcome.clone()
    }

    /// Waits for the outcome, for at most `timeout` if given; `None` if the time passed first. `Closed`, at once, in
    /// a process that was forked while it ran.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Arc<Result<T>>> {
        if self.is_forked() {
            return Some(self.outcome_after_fork());
        }
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.0.state.lock();
        loop {
            if let Some(outcome) = &state.outcome {
                return Some(Arc::clone(outcome));
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return None;
            }
            state = self.0.done.wait(state, left);
        }
    }

    fn is_forked(&self) -> bool {
        kvferry_sys::fd::forked_since(self.0.forks)
    }

    /// The operation's thread is in the parent, and the lock may have been taken there.
    fn outcome_after_fork(&self) -> Arc<Result<T>> {
        let known = self.0.state.try_lock().and_then(|state| state.outcome.clone());
        known.unwrap_or_else(|| Arc::new(Err(Error::Closed)))
    }

    /// A descriptor that is readable once the operation has ended.
    ///
    /// # Errors
    /// If the process has no free descriptor.
    pub fn event_fd(&self) -> io::Result<BorrowedFd<'_>> {
        if self.0.event.get().is_none() {
            let new = EventFd::new()?;
            // Under the lock of the outcome, so that its end is not missed.
            let state = self.0.state.lock();
            let event = self.0.event.get_or_init(|| new);
            if state.outcome.is_some() {
                event.signal();
            }
        }
        Ok(self.0.event.get().expect("made above").as_fd())
    }
}

impl<T> Future for Pending<T> {
    type Output = Arc<Result<T>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.is_forked() {
            return Poll::Ready(self.outcome_after_fork());
        }
        let mut state = self.0.state.lock();
        match &state.outcome {
            Some(outcome) => Poll::Ready(Arc::clone(outcome)),
            None => {
                if !state.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                    state.wakers.push(cx.waker().clone());
                }
                Poll::Pending
            }
        }
    }
}

/// Ends an operation, with `Closed` if it is dropped.
#[derive(Debug)]
pub(crate) struct Promise<T>(Option<Pending<T>>);

impl<T> Promise<T> {
    /// Whether it is to end this operation.
    pub(crate) fn is_of(&self, pending: &Pending<T>) -> bool {
        self.0.as_ref().is_some_and(|it| Arc::ptr_eq(&it.0, &pending.0))
    }

    pub(crate) fn finish(mut self, outcome: Result<T>) {
        if let Some(pending) = self.0.take() {
            pending.finish(outcome);
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        if let Some(pending) = self.0.take() {
            pending.finish(Err(Error::Closed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Wake;

    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    #[test]
    fn each_task_that_waits_for_an_operation_is_woken_once() {
        let (pending, promise) = Pending::new();
        let tasks = [(); 3].map(|()| Arc::new(Woken(AtomicUsize::new(0))));
        for task in tasks.iter().chain(&tasks) {
            let waker = Waker::from(Arc::clone(task));
            let polled = Pin::new(&mut pending.clone()).poll(&mut Context::from_waker(&waker));
            assert!(polled.is_pending());
        }
        promise.finish(Ok(()));
        assert_eq!(tasks.map(|task| task.0.load(SeqCst)), [1; 3]);
        assert!(pending.outcome().is_some());
    }
}
