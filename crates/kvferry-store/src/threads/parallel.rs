//! Threads that share the parts of a call.

use crate::threads::task_pool::TaskPool;
use kvferry_sys::sync::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::time::Duration;

/// The caller and some threads beside it, which share the parts of a call. A part is computed where its bytes were touched last, so that they
/// are still in that processor's cache.
#[derive(Debug)]
pub(crate) struct Parallel {
    beside: TaskPool,
    threads: usize,
}

struct Call<T, F> {
    work: F,
    parts: usize,
    next: AtomicUsize,
    results: Mutex<Results<T>>,
    changed: Condvar,
}

struct Results<T> {
    of_part: Vec<Option<T>>,
    at_work: usize,
}

impl Parallel {
    /// Creates a group of `threads`, including the caller's.
    /// `patience`: see [`TaskPool::new`].
    pub(crate) fn new(threads: usize, patience: Duration) -> Self {
        let threads = threads.max(1);
        Self { beside: TaskPool::new(threads - 1, patience), threads }
    }

    /// Calls `work` with the number of each part, in any order, until one call says that it was the last. Returns
    /// the results by part; `None` for those that were not computed.
    pub(crate) fn share<T, F>(&self, parts: usize, work: F) -> Vec<Option<T>>
    where
        T: Send + 'static,
        F: Fn(usize) -> (T, IsLast) + Send + Sync + 'static,
    {
        let of_part = std::iter::repeat_with(|| None).take(parts).collect();
        let call = Arc::new(Call {
            work,
            parts,
            next: AtomicUsize::new(0),
            results: Mutex::new(Results { of_part, at_work: 0 }),
            changed: Condvar::new(),
        });
        for _ in 1..self.threads.min(parts) {
            let call = Arc::clone(&call);
            // If it begins late, it finds nothing to do. A group that is closed is the caller alone.
            let _ = self.beside.submit(move || call.run());
        }
        call.run();
        let idle = |results: &mut Results<T>| results.at_work > 0;
        let mut done = call.changed.wait_while(call.results.lock(), None, idle);
        std::mem::take(&mut done.of_part)
    }

    /// See [`TaskPool::close_unless`].
    pub(crate) fn close_unless(&self, gives_up: impl Fn() -> bool) {
        self.beside.close_unless(gives_up);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IsLast {
    Yes,
    No,
}

impl<T, F: Fn(usize) -> (T, IsLast)> Call<T, F> {
    fn run(&self) {
        // Counted before it takes a part, so that the caller does not miss it.
        let _at_work = AtWork::new(self);
        loop {
            let part = self.next.fetch_add(1, AcqRel);
            if part >= self.parts {
                return;
            }
            let (result, is_last) = (self.work)(part);
            if let Some(place) = self.results.lock().of_part.get_mut(part) {
                *place = Some(result);
            }
            if is_last == IsLast::Yes {
                self.next.fetch_max(self.parts, AcqRel);
            }
        }
    }
}

/// Ends also if the work panics.
struct AtWork<'a, T, F>(&'a Call<T, F>);

impl<'a, T, F> AtWork<'a, T, F> {
    fn new(call: &'a Call<T, F>) -> Self {
        call.results.lock().at_work += 1;
        Self(call)
    }
}

impl<T, F> Drop for AtWork<'_, T, F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.next.fetch_max(self.0.parts, AcqRel);
        }
        self.0.results.lock().at_work -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Acquire;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn each_part_is_computed_once_by_the_caller_or_beside_it() {
        let parallel = Parallel::new(3, HOUR);
        for parts in [0, 1, 2, 100] {
            let computed = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&computed);
            let results = parallel.share(parts, move |part| {
                count.fetch_add(1, AcqRel);
                (part * part, IsLast::No)
            });
            assert_eq!(computed.load(Acquire), parts);
            assert!(
                results.into_iter().enumerate().all(|(part, result)| result == Some(part * part))
            );
        }
        parallel.close_unless(|| false);
        assert_eq!(parallel.share(2, |part| (part, IsLast::No)), [Some(0), Some(1)]);
    }

    #[test]
    fn nothing_begins_behind_the_last_part() {
        let parallel = Parallel::new(1, HOUR);
        let last = |part| (part, if part == 3 { IsLast::Yes } else { IsLast::No });
        let results = parallel.share(10, last);
        assert_eq!(results.iter().flatten().count(), 4);
    }
}
