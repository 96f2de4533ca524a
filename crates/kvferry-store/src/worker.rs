//! The thread of a process that seals its segments and, in the keeper, frees space.

use crate::core::Core;
use crate::keeper::Keeper;
use crate::membership::Keep;
use crate::sync::lock;
use crate::writer::Writer;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

#[derive(Debug)]
pub(crate) struct Worker {
    core: Arc<Core>,
    pub(crate) writer: Writer,
    tasks: Mutex<Tasks>,
    changed: Condvar,
    /// Ends the freeing of space early.
    is_stopping: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Tasks {
    look: bool,
    /// This process has become the keeper.
    begin: bool,
    /// Processes have left: there may be something to repair.
    repair: bool,
    stop: bool,
}

impl Worker {
    pub(crate) fn start(core: Arc<Core>) -> io::Result<Arc<Self>> {
        let worker = Arc::new(Self {
            core,
            writer: Writer::default(),
            tasks: Mutex::default(),
            changed: Condvar::new(),
            is_stopping: AtomicBool::new(false),
            thread: Mutex::default(),
        });
        let run = Arc::clone(&worker);
        let thread = kvferry_sys::thread::spawn("kvferry-store-gc".into(), move || run.run())?;
        *lock(&worker.thread) = Some(thread);
        Ok(worker)
    }

    /// Has the thread look whether there is something to do.
    pub(crate) fn wake(&self) {
        self.ask(|tasks| tasks.look = true);
    }

    /// Seals what this process has written, and ends the thread. Idempotent.
    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.ask(|tasks| tasks.stop = true);
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }

    fn ask(&self, change: impl FnOnce(&mut Tasks)) {
        change(&mut lock(&self.tasks));
        self.changed.notify_one();
    }

    fn run(&self) {
        let mut is_keeper = false;
        let mut keeper: Option<Keeper> = None;
        loop {
            let tasks = self.next_tasks();
            if tasks.stop {
                break;
            }
            is_keeper |= tasks.begin;
            if tasks.begin {
                keeper = None;
            }
            let work = || {
                // First: the keeper frees sealed segments only, and would evict more than it must.
                self.writer.seal(&self.core, false);
                if is_keeper {
                    let new = || Keeper::new(Arc::clone(&self.core));
                    let keeper = keeper.get_or_insert_with(new);
                    if tasks.repair {
                        keeper.repair();
                    }
                    keeper.look(&self.is_stopping);
                }
            };
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                // What it knows may be half changed. The index is as it was: all processes change it so that it
                // is right at each moment.
                tracing::error!("the store's thread that frees space has panicked; it begins anew");
                keeper = None;
            }
        }
        if let Some(keeper) = &mut keeper {
            keeper.stop();
        }
        self.writer.seal(&self.core, true);
    }

    fn next_tasks(&self) -> Tasks {
        let idle = |tasks: &mut Tasks| !(tasks.look || tasks.begin || tasks.repair || tasks.stop);
        let waited = self.changed.wait_while(lock(&self.tasks), idle);
        std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner))
    }
}

impl Keep for Worker {
    fn became_keeper(&self) {
        self.ask(|tasks| tasks.begin = true);
    }

    fn left(&self) {
        self.ask(|tasks| tasks.repair = true);
    }

    fn woken(&self) {
        self.wake();
    }
}
