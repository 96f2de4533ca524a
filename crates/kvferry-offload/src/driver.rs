//! [`Driver`] and its threads.

use crate::carrier::Carrier;
use crate::carry::Directory;
use crate::host::Host;
use crate::names::Names;
use crate::options::{Error, Fault, Options};
use crate::pages::Pages;
use crate::queue::Queue;
use crate::stats::{Counters, Stats};
use kvferry::Agent;
use kvferry_blocks::{Action, Outcome, TransferId};
use kvferry_sys::sync::Mutex;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Makes the copies of one block manager. See the [crate's documentation](crate).
///
/// When it is dropped, it is closed.
#[derive(Debug)]
pub struct Driver {
    queue: Arc<Queue>,
    counters: Arc<Counters>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Driver {
    /// `secondary_blocks[n]`: as many as the manager has in group `n`. The pages must be host memory.
    ///
    /// # Errors
    /// [`Error`].
    pub fn start(
        agent: &Agent,
        pages: Pages,
        secondary_blocks: &[u32],
        options: Options,
    ) -> Result<Self, Error> {
        if secondary_blocks.len() != pages.groups() {
            let (given, groups) = (secondary_blocks.len(), pages.groups());
            return Err(Error::Groups { given, groups });
        }
        options.store("").check()?;
        let host = Host::new(agent, &pages, secondary_blocks)?;
        let (queue, counters) = (Arc::new(Queue::default()), Arc::new(Counters::default()));
        let names = Names::new(&options).map_err(Error::Random)?;
        let directory_threads = options.directory_threads;
        let carrier = Arc::new(Carrier {
            agent: agent.clone(),
            pages,
            host,
            names,
            options,
            counters: Arc::clone(&counters),
        });
        let mut driver = Self { queue, counters, threads: Mutex::default() };
        for at in 0..=directory_threads {
            let (queue, carrier) = (Arc::clone(&driver.queue), Arc::clone(&carrier));
            let name =
                if at == 0 { "kvferry-copies".into() } else { format!("kvferry-files-{at}") };
            let body = move || match at {
                0 => copy_in_memory(&queue, &carrier),
                _ => serve_directories(&queue, &carrier),
            };
            let threads = driver.threads.get_mut();
            threads.push(kvferry_sys::thread::spawn(name, body).map_err(Error::Thread)?);
        }
        Ok(driver)
    }

    /// Takes the copies and discards among the manager's actions, in the order in which the manager gave them.
    pub fn submit(&self, actions: impl IntoIterator<Item = Action>) {
        self.queue.submit(actions);
    }

    /// Copies that have ended, the first ones first, at most `most`: for
    /// [`BlockManager::finished`](kvferry_blocks::BlockManager::finished). A scheduler takes as many as it has time for;
    /// 64 take some 40 µs in the manager.
    pub fn take_finished(&self, most: usize) -> Vec<(TransferId, Outcome)> {
        self.queue.take_finished(most)
    }

    /// Blocks until [`Driver::take_finished`] has something to return. False: no copy is under way, or `timeout` has
    /// passed. For an engine that has nothing else to do.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.queue.wait(timeout)
    }

    /// Copies that were submitted and have not ended.
    pub fn under_way(&self) -> usize {
        self.queue.under_way()
    }

    /// Counters since the driver was started.
    pub fn stats(&self) -> Stats {
        self.counters.read()
    }

    /// Ends the threads, after the copies that they make: no page is accessed when it returns. Other copies fail, and so
    /// do those that are submitted later. A second call waits for the first one.
    pub fn close(&self) {
        self.queue.close();
        let mut threads = self.threads.lock();
        for thread in threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread for offloading has panicked");
            }
        }
        drop(self.queue.take_directories());
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.close();
    }
}

fn copy_in_memory(queue: &Queue, carrier: &Carrier) {
    while let Some(transfer) = queue.next_in_memory() {
        let outcome = match carrier.ask(&transfer) {
            Fault::Fail => Outcome::Failed,
            Fault::None => match carrier.host.carry(&carrier.pages, &transfer) {
                Ok(()) => Outcome::Done,
                Err(error) => {
                    tracing::warn!(%error, "a copy between the engine's pages and host memory failed");
                    Outcome::Failed
                }
            },
        };
        carrier.count(&transfer, outcome);
        queue.finish([(transfer.id, outcome)]);
    }
}

fn serve_directories(queue: &Queue, carrier: &Carrier) {
    while let Some(run) = queue.next_run(|group| carrier.pages.page_bytes(group.into())) {
        drop(run.leaves);
        let mut directory =
            run.directory.unwrap_or_else(|| Box::new(Directory::new(Arc::clone(&run.path))));
        queue.finish(directory.carry_out(carrier, run.tasks));
        queue.put_back(run.path, directory);
    }
}
