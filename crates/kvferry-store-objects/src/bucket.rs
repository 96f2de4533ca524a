//! [`Bucket`]: objects below a prefix of an object store.

use crate::fault::fault;
use bytes::Bytes;
use kvferry_store::objects::{Done, Fault, Got, IfExists, Objects};
use kvferry_store::{Error, Result};
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, PutMode, PutOptions, PutPayload};
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};

/// Threads that carry out requests, and threads for what blocks: names of hosts, and files.
const THREADS: usize = 2;
const BLOCKING_THREADS: usize = 4;
/// How long dropping a bucket waits for its threads.
const SHUTDOWN: Duration = Duration::from_secs(1);

/// Objects below a prefix, and the threads that read and write them. Requests that are under way when it is dropped
/// fail.
pub struct Bucket {
    requests: Arc<Requests>,
    location: String,
    /// `None` while it is dropped.
    runtime: Option<Runtime>,
    forks: u32,
}

struct Requests {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    timeout: Duration,
    /// The object store can't write objects only if they do not exist.
    must_replace: AtomicBool,
}

impl Bucket {
    /// Objects below `prefix`. A request ends within `timeout`. Log lines call it `location`.
    ///
    /// # Errors
    /// `Objects` if its threads can't be started.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        prefix: Path,
        location: &str,
        timeout: Duration,
    ) -> Result<Self> {
        let runtime = runtime().map_err(|e| Error::Objects {
            location: location.to_owned(),
            what: format!("its threads can't be started: {e}"),
        })?;
        let must_replace = AtomicBool::new(false);
        Ok(Self {
            requests: Arc::new(Requests { store, prefix, timeout, must_replace }),
            location: location.to_owned(),
            runtime: Some(runtime),
            forks: kvferry_sys::fd::forks(),
        })
    }

    fn spawn(&self, request: impl Future<Output = ()> + Send + 'static) {
        // A child that was forked has no threads that could carry it out; dropping it ends it.
        if let Some(runtime) = &self.runtime
            && !kvferry_sys::fd::forked_since(self.forks)
        {
            runtime.spawn(request);
        }
    }
}

/// A runtime whose threads have all signals blocked, as every thread that is started here.
pub(crate) fn runtime() -> io::Result<Runtime> {
    let start = || {
        Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("kvferry-objects")
            .enable_all()
            .build()
    };
    let started = kvferry_sys::thread::spawn("kvferry-objects".into(), start)?;
    started.join().map_err(|_| io::Error::other("starting them has panicked"))?
}

impl Objects for Bucket {
    fn get(&self, name: &str, len_max: u64, done: Done<Got>) {
        let (requests, name) = (Arc::clone(&self.requests), name.to_owned());
        self.spawn(async move {
            let outcome = requests.within(requests.get(&name, len_max)).await;
            drop(requests);
            done.end(outcome);
        });
    }

    fn put(&self, name: &str, content: Vec<u8>, if_exists: IfExists, done: Done<()>) {
        let (requests, name) = (Arc::clone(&self.requests), name.to_owned());
        self.spawn(async move {
            let outcome = requests.within(requests.put(&name, content.into(), if_exists)).await;
            drop(requests);
            done.end(outcome);
        });
    }

    fn location(&self) -> &str {
        &self.location
    }
}

impl Requests {
    async fn within<T>(
        &self,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> std::result::Result<T, Fault> {
        match tokio::time::timeout(self.timeout, request).await {
            Ok(outcome) => outcome.map_err(|e| fault(&e)),
            Err(_) => Err(Fault::Failed(format!("no answer within {:?}", self.timeout))),
        }
    }

    fn path(&self, name: &str) -> Path {
        Path::from_iter(self.prefix.parts().chain(Path::from(name).parts()))
    }

    async fn get(&self, name: &str, len_max: u64) -> object_store::Result<Got> {
        let found = match self.store.get_opts(&self.path(name), GetOptions::default()).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(Got::Absent),
            Err(e) => return Err(e),
        };
        if found.meta.size > len_max {
            return Ok(Got::TooLong);
        }
        Ok(Got::Found(found.bytes().await?.into()))
    }

    async fn put(&self, name: &str, content: Bytes, mode: IfExists) -> object_store::Result<()> {
        use object_store::Error as E;
        let path = self.path(name);
        if mode == IfExists::Keep && !self.must_replace.load(Relaxed) {
            match self.put_as(&path, content.clone(), PutMode::Create).await {
                Ok(()) | Err(E::AlreadyExists { .. } | E::Precondition { .. }) => return Ok(()),
                // An object that exists has the same bytes: replacing it only costs more.
                Err(E::NotImplemented { .. } | E::NotSupported { .. }) => {
                    self.must_replace.store(true, Relaxed);
                }
                Err(e) => return Err(e),
            }
        }
        self.put_as(&path, content, PutMode::Overwrite).await
    }

    async fn put_as(&self, path: &Path, content: Bytes, mode: PutMode) -> object_store::Result<()> {
        let options = PutOptions { mode, ..PutOptions::default() };
        self.store.put_opts(path, PutPayload::from(content), options).await.map(drop)
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if kvferry_sys::fd::forked_since(self.forks) {
            // Its threads are the parent's.
            std::mem::forget(runtime);
        } else if Handle::try_current().is_ok() {
            // On one of its own threads, or another runtime's: it must not wait.
            runtime.shutdown_background();
        } else {
            runtime.shutdown_timeout(SHUTDOWN);
        }
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bucket[{}]", self.location)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faulty::{self, Faulty};
    use std::sync::atomic::Ordering::SeqCst;
    use std::time::Instant;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn requests(store: &Faulty) -> Requests {
        Requests {
            store: Arc::new(store.clone()),
            prefix: Path::from("a/b"),
            timeout: TIMEOUT,
            must_replace: AtomicBool::new(false),
        }
    }

    /// Runs in virtual time.
    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(future)
    }

    #[test]
    fn a_request_without_an_answer_fails_at_its_timeout() {
        let began = Instant::now();
        let requests = requests(&Faulty::new(|_| Some(faulty::Fault::Hang)));
        let (outcome, took) = block_on(async {
            let began = tokio::time::Instant::now();
            let outcome = requests.within(requests.get("x", 100)).await;
            (outcome, began.elapsed())
        });
        assert_eq!(outcome, Err(Fault::Failed("no answer within 10s".into())));
        assert!(took >= TIMEOUT && took < TIMEOUT * 2 && began.elapsed() < TIMEOUT);
    }

    #[test]
    fn an_answer_that_comes_late_within_the_timeout_is_taken() {
        let late = TIMEOUT - Duration::from_millis(1);
        let store = Faulty::new(move |_| Some(faulty::Fault::Late(late)));
        let requests = requests(&store);
        let got = block_on(async {
            requests.within(requests.put("x", vec![1, 2].into(), IfExists::Keep)).await?;
            requests.within(requests.get("x", 2)).await
        });
        assert_eq!(got, Ok(Got::Found(vec![1, 2])));
    }

    #[test]
    fn an_object_is_kept_or_replaced_as_asked() {
        let store = Faulty::new(|_| None);
        let requests = requests(&store);
        let got = block_on(async {
            assert_eq!(requests.get("x", 9).await?, Got::Absent);
            requests.put("x", vec![1].into(), IfExists::Keep).await?;
            requests.put("x", vec![2].into(), IfExists::Keep).await?;
            assert_eq!(requests.get("x", 9).await?, Got::Found(vec![1]));
            requests.put("x", vec![3; 9].into(), IfExists::Replace).await?;
            assert_eq!(requests.get("x", 9).await?, Got::Found(vec![3; 9]));
            requests.get("x", 8).await
        });
        assert_eq!(got.expect("an answer"), Got::TooLong);
        assert_eq!(store.requests.load(SeqCst), 7);
    }
}
