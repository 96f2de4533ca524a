//! The primitives on loom, and ways to break them: a model proves something only if it can fail.
//!
//! Loom treats sequentially consistent *accesses* as acquire and release only, but implements
//! sequentially consistent *fences*. So each such access stands between two such fences here, which
//! orders it with every other one as the language does. Relaxed accesses next to it are then
//! ordered more strongly than in the language, so no code under test may rely on their order.

pub(crate) use loom::hint;
pub(crate) use loom::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};
use std::cell::Cell;
use std::time::Duration;

/// The defect in the models of the current test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// No defect.
    None,
    /// Sequentially consistent accesses are acquire and release only.
    WeakOrder,
    /// Atomic accesses order nothing.
    NoOrder,
    /// Waiting threads are never notified.
    LostNotify,
    /// An event descriptor is cleared after the work that follows, rather than before it.
    LateClear,
}

thread_local! {
    // Loom runs all threads of a model on the thread of its test.
    static MUTANT: Cell<Mutant> = const { Cell::new(Mutant::None) };
}

impl Mutant {
    /// Applies this defect for the rest of the test.
    pub(crate) fn enable(self) {
        MUTANT.set(self);
    }

    fn is_enabled(self) -> bool {
        MUTANT.get() == self
    }
}

pub(crate) mod atomic {
    use super::Mutant;
    pub(crate) use std::sync::atomic::Ordering;

    pub(crate) fn fence(order: Ordering) {
        let lost = match order {
            Ordering::SeqCst => Mutant::WeakOrder.is_enabled() || Mutant::NoOrder.is_enabled(),
            _ => Mutant::NoOrder.is_enabled(),
        };
        if !lost {
            loom::sync::atomic::fence(order);
        }
    }

    /// Does `access` with its order, or with `weak` where fences provide the rest.
    fn ordered<T>(order: Ordering, weak: Ordering, access: impl FnOnce(Ordering) -> T) -> T {
        if Mutant::NoOrder.is_enabled() {
            return access(Ordering::Relaxed);
        }
        if order != Ordering::SeqCst {
            return access(order);
        }
        fence(order);
        let result = access(weak);
        fence(order);
        result
    }

    macro_rules! atomics {
        ($($name:ident: $inner:ty, [$($arithmetic:ident),*];)*) => {$(
            #[derive(Debug, Default)]
            pub(crate) struct $name(loom::sync::atomic::$name);

            #[allow(dead_code, reason = "one list of methods for all of them")]
            impl $name {
                pub(crate) fn new(value: $inner) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }

                pub(crate) fn load(&self, order: Ordering) -> $inner {
                    ordered(order, Ordering::Acquire, |order| self.0.load(order))
                }

                pub(crate) fn store(&self, value: $inner, order: Ordering) {
                    ordered(order, Ordering::Release, |order| self.0.store(value, order));
                }

                pub(crate) fn swap(&self, value: $inner, order: Ordering) -> $inner {
                    ordered(order, Ordering::AcqRel, |order| self.0.swap(value, order))
                }

                pub(crate) fn fetch_or(&self, value: $inner, order: Ordering) -> $inner {
                    ordered(order, Ordering::AcqRel, |order| self.0.fetch_or(value, order))
                }

                $(pub(crate) fn $arithmetic(&self, value: $inner, order: Ordering) -> $inner {
                    ordered(order, Ordering::AcqRel, |order| self.0.$arithmetic(value, order))
                })*
            }
        )*};
    }

    atomics! {
        AtomicBool: bool, [];
        AtomicU8: u8, [fetch_add, fetch_sub];
        AtomicU32: u32, [fetch_add, fetch_sub];
        AtomicU64: u64, [fetch_add, fetch_sub];
        AtomicUsize: usize, [fetch_add, fetch_sub];
    }
}

// In a model, a holder that panics fails the test.
const NO_PANIC: &str = "no holder panics";

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect(NO_PANIC)
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().expect(NO_PANIC)
    }
}

#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().expect(NO_PANIC)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().expect(NO_PANIC)
    }
}

/// Waits without a clock: in a model, no timeout passes.
#[derive(Debug, Default)]
pub(crate) struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(loom::sync::Condvar::new())
    }

    pub(crate) fn wait<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: impl Into<Option<Duration>>,
    ) -> MutexGuard<'a, T> {
        match timeout.into() {
            None => self.0.wait(guard).expect(NO_PANIC),
            Some(timeout) => self.0.wait_timeout(guard, timeout).expect(NO_PANIC).0,
        }
    }

    pub(crate) fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        timeout: impl Into<Option<Duration>>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let timeout = timeout.into();
        while condition(&mut guard) {
            guard = self.wait(guard, timeout);
        }
        guard
    }

    pub(crate) fn notify_one(&self) {
        if !Mutant::LostNotify.is_enabled() {
            self.0.notify_one();
        }
    }

    pub(crate) fn notify_all(&self) {
        if !Mutant::LostNotify.is_enabled() {
            self.0.notify_all();
        }
    }
}

pub(crate) mod thread {
    pub(crate) use loom::thread::{JoinHandle, ThreadId, current, yield_now};
    use std::io;
    use std::time::Duration;

    pub(crate) fn spawn<T: Send + 'static>(
        name: String,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        loom::thread::Builder::new().name(name).spawn(body)
    }

    /// A model has no time: joining it waits.
    pub(crate) fn is_finished<T>(_: &JoinHandle<T>) -> bool {
        true
    }

    /// A model has no time: other threads run.
    pub(crate) fn sleep(_: Duration) {
        yield_now();
    }
}

/// Descriptors of a reactor; only its wake-up descriptor ever becomes ready.
pub(crate) mod poll {
    use super::{Condvar, Mutant, Mutex};
    use kvferry_sys::poll::{Event, Interest, Ready};
    use std::io;
    use std::os::fd::BorrowedFd;
    use std::sync::{Arc, OnceLock};
    use std::time::Duration;

    #[derive(Debug)]
    struct Shared {
        state: Mutex<State>,
        signalled: Condvar,
    }

    #[derive(Debug, Default)]
    struct State {
        is_signalled: bool,
        clear_later: bool,
    }

    #[derive(Clone, Debug)]
    pub(crate) struct EventFd(Arc<Shared>);

    impl EventFd {
        #[allow(clippy::unnecessary_wraps, reason = "as the type it replaces")]
        pub(crate) fn new() -> io::Result<Self> {
            let state = Mutex::new(State::default());
            Ok(Self(Arc::new(Shared { state, signalled: Condvar::new() })))
        }

        pub(crate) fn signal(&self) {
            self.0.state.lock().is_signalled = true;
            self.0.signalled.notify_all();
        }

        pub(crate) fn clear(&self) {
            let mut state = self.0.state.lock();
            if Mutant::LateClear.is_enabled() {
                state.clear_later = true;
            } else {
                state.is_signalled = false;
            }
        }
    }

    /// A descriptor; the wake-up descriptor returns itself.
    pub(crate) trait Watched {
        fn wakeup(&self) -> Option<EventFd>;
    }

    impl Watched for &EventFd {
        fn wakeup(&self) -> Option<EventFd> {
            Some((*self).clone())
        }
    }

    impl Watched for BorrowedFd<'_> {
        fn wakeup(&self) -> Option<EventFd> {
            None
        }
    }

    #[derive(Debug)]
    pub(crate) struct Epoll(OnceLock<(EventFd, u64)>);

    #[allow(clippy::unnecessary_wraps, reason = "as the type it replaces")]
    impl Epoll {
        pub(crate) const EVENTS_MAX: usize = kvferry_sys::poll::Epoll::EVENTS_MAX;

        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self(OnceLock::new()))
        }

        pub(crate) fn add(&self, what: impl Watched, token: u64, _: Interest) -> io::Result<()> {
            if let Some(wakeup) = what.wakeup() {
                self.0.set((wakeup, token)).expect("a reactor adds one wake-up descriptor");
            }
            Ok(())
        }

        pub(crate) fn modify(&self, _: impl Watched, _: u64, _: Interest) -> io::Result<()> {
            Ok(())
        }

        pub(crate) fn delete(&self, _: impl Watched) -> io::Result<()> {
            Ok(())
        }

        pub(crate) fn wait(
            &self,
            events: &mut Vec<Event>,
            timeout: Option<Duration>,
        ) -> io::Result<()> {
            let (wakeup, token) = self.0.get().expect("the wake-up descriptor is added first");
            let mut state = wakeup.0.state.lock();
            if std::mem::take(&mut state.clear_later) {
                state.is_signalled = false;
            }
            while !state.is_signalled && timeout != Some(Duration::ZERO) {
                state = wakeup.0.signalled.wait(state, None);
            }
            if state.is_signalled {
                events
                    .push(Event { token: *token, ready: Ready { read: true, ..Ready::default() } });
            }
            Ok(())
        }
    }
}
