//! [`Bucket`]: objects below a prefix of an object store.

use crate::directory::Directory;
use crate::fault::{fault, is_no_bucket};
use bytes::Bytes;
use kvferry_store::objects::{Done, Fault, GetResult, IfExists, Objects};
use kvferry_store::{Error, Result};
use kvferry_sys::sync::Mutex;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, PutMode, PutOptions, PutPayload};
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Threads that carry out requests, and threads for what blocks: names of hosts, and files.
const THREADS: usize = 2;
const BLOCKING_THREADS: usize = 4;
/// An object that hosts which upload write, so that hosts which fetch find out whether they may.
const HELLO: &str = "v1/hello";
/// Time for which a successful read proves that objects may be read: until then, a refusal means that an object is
/// absent.
const READABLE_FOR: Duration = Duration::from_secs(60);
/// Time for which a failed check proves that they may not be read: until then, a refusal costs one request and not two.
const UNREADABLE_FOR: Duration = Duration::from_secs(5);
/// Longest wait for the bucket's threads when it is dropped.
const SHUTDOWN: Duration = Duration::from_secs(1);

/// Objects below a prefix, and the threads that read and write them. Requests that are under way when it is dropped
/// fail.
pub struct Bucket {
    requests: Arc<Requests>,
    location: String,
    /// Runtime of the requests. `None` while the bucket is dropped.
    runtime: Option<Runtime>,
    forks: u32,
}

struct Requests {
    place: Place,
    timeout: Duration,
    /// A permit for each thread that may block. A request that waits for one holds its content until its timeout.
    blocking: Arc<Semaphore>,
}

enum Place {
    Remote(Remote),
    Directory(Directory),
}

struct Remote {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    /// The object store can't write objects only if they do not exist.
    must_replace: AtomicBool,
    /// Time at which an object was last read, or last found to be unreadable.
    asked: Mutex<Option<(Instant, MayRead)>>,
    /// Set before this process writes [`HELLO`], once.
    has_greeted: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MayRead {
    Yes,
    No,
}

impl MayRead {
    const fn is_known_for(self) -> Duration {
        match self {
            Self::Yes => READABLE_FOR,
            Self::No => UNREADABLE_FOR,
        }
    }
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
        Self::start(Place::Remote(Remote::new(store, prefix)), location, timeout)
    }

    /// Objects as files of a directory.
    pub(crate) fn of_directory(
        directory: Directory,
        location: &str,
        timeout: Duration,
    ) -> Result<Self> {
        Self::start(Place::Directory(directory), location, timeout)
    }

    fn start(place: Place, location: &str, timeout: Duration) -> Result<Self> {
        let runtime = runtime().map_err(|e| Error::Objects {
            location: location.to_owned(),
            what: format!("its threads can't be started: {e}"),
        })?;
        Ok(Self {
            requests: Arc::new(Requests::new(place, timeout)),
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
    fn get(&self, name: &str, len_max: u64, done: Done<GetResult>) {
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
    fn new(place: Place, timeout: Duration) -> Self {
        Self { place, timeout, blocking: Arc::new(Semaphore::new(BLOCKING_THREADS)) }
    }

    async fn within<T>(
        &self,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> std::result::Result<T, Fault> {
        match tokio::time::timeout(self.timeout, request).await {
            Ok(outcome) => outcome.map_err(|e| fault(&e)),
            Err(_) => Err(Fault::Failed(format!("no answer within {:?}", self.timeout))),
        }
    }

    async fn get(&self, name: &str, len_max: u64) -> object_store::Result<GetResult> {
        match &self.place {
            Place::Remote(remote) => remote.get(name, len_max).await,
            Place::Directory(directory) => {
                let (directory, name) = (directory.clone(), name.to_owned());
                blocking(&self.blocking, move || directory.get(&name, len_max)).await
            }
        }
    }

    async fn put(&self, name: &str, content: Bytes, mode: IfExists) -> object_store::Result<()> {
        match &self.place {
            Place::Remote(remote) => remote.put(name, content, mode).await,
            Place::Directory(directory) => {
                let (directory, name) = (directory.clone(), name.to_owned());
                blocking(&self.blocking, move || directory.put(&name, &content, mode)).await
            }
        }
    }
}

/// Has a thread carry out what may block. Work is given to the runtime only when a thread is free for it: work that waits
/// in the runtime's own queue stays there, with its content, after its request has ended.
async fn blocking<T: Send + 'static>(
    threads: &Arc<Semaphore>,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> object_store::Result<T> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::PermissionDenied => object_store::Error::PermissionDenied {
            path: "the directory".into(),
            source: Box::new(source),
        },
        _ => object_store::Error::Generic { store: "directory", source: Box::new(source) },
    };
    let closed = |e| failed(io::Error::other(e));
    let thread = Arc::clone(threads).acquire_owned().await.map_err(closed)?;
    let work = move || {
        let outcome = work();
        drop(thread);
        outcome
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome.map_err(failed),
        Err(e) => Err(failed(io::Error::other(e))),
    }
}

impl Remote {
    fn new(store: Arc<dyn ObjectStore>, prefix: Path) -> Self {
        Self {
            store,
            prefix,
            must_replace: AtomicBool::new(false),
            asked: Mutex::default(),
            has_greeted: AtomicBool::new(false),
        }
    }

    fn path(&self, name: &str) -> Path {
        Path::from_iter(self.prefix.parts().chain(Path::from(name).parts()))
    }

    fn found_out(&self, may_read: MayRead) {
        let now = Some((Instant::now(), may_read));
        *self.asked.lock() = now;
    }

    async fn get(&self, name: &str, len_max: u64) -> object_store::Result<GetResult> {
        use object_store::Error::{NotFound, PermissionDenied};
        let found = match self.store.get_opts(&self.path(name), GetOptions::default()).await {
            Ok(found) => found,
            Err(e @ NotFound { .. }) if !is_no_bucket(&e) => return Ok(GetResult::Absent),
            // S3 says that of an object that does not exist to a user who may not list objects.
            Err(PermissionDenied { .. }) if self.may_read().await => return Ok(GetResult::Absent),
            Err(e) => return Err(e),
        };
        self.found_out(MayRead::Yes);
        if found.meta.size > len_max {
            return Ok(GetResult::TooLong);
        }
        Ok(GetResult::Found(found.bytes().await?.into()))
    }

    /// Whether objects that exist may be read.
    async fn may_read(&self) -> bool {
        let known = *self.asked.lock();
        if let Some((at, may_read)) = known
            && at.elapsed() < may_read.is_known_for()
        {
            return may_read == MayRead::Yes;
        }
        let asked = self.store.get_opts(&self.path(HELLO), GetOptions::default()).await;
        self.found_out(if asked.is_ok() { MayRead::Yes } else { MayRead::No });
        asked.is_ok()
    }

    async fn put(&self, name: &str, content: Bytes, mode: IfExists) -> object_store::Result<()> {
        self.put_object(name, content, mode).await?;
        if !self.has_greeted.swap(true, Relaxed) {
            // If it fails, fetches of users who may not list objects wait for the first block that is there.
            let _ = self.put_object(HELLO, Bytes::from_static(b"kvferry"), IfExists::Keep).await;
        }
        Ok(())
    }

    async fn put_object(
        &self,
        name: &str,
        content: Bytes,
        mode: IfExists,
    ) -> object_store::Result<()> {
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
        let remote = Remote::new(Arc::new(store.clone()), Path::from("a/b"));
        // Requests are counted.
        remote.has_greeted.store(true, Relaxed);
        Requests::new(Place::Remote(remote), TIMEOUT)
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
    fn requests_of_a_directory_that_hangs_leave_nothing_behind_but_those_under_way() {
        let runtime = runtime().expect("a runtime");
        let threads = Arc::new(Semaphore::new(BLOCKING_THREADS));
        let hangs = Arc::new(Mutex::new(()));
        let content = Arc::new(());
        let held = hangs.lock();
        runtime.block_on(async {
            for _ in 0..100 {
                let (hangs, content) = (Arc::clone(&hangs), Arc::clone(&content));
                let work = move || {
                    drop((hangs.lock(), content));
                    Ok(())
                };
                let request = blocking(&threads, work);
                let ended = tokio::time::timeout(Duration::from_millis(1), request).await;
                assert!(ended.is_err(), "it hangs");
            }
        });
        let alive = Arc::strong_count(&content) - 1;
        assert!(alive <= BLOCKING_THREADS, "{alive} contents");
        drop(held);
        runtime.block_on(blocking(&threads, || Ok(()))).expect("the directory answers again");
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
        assert_eq!(got, Ok(GetResult::Found(vec![1, 2])));
    }

    #[test]
    fn an_object_is_kept_or_replaced_as_asked() {
        let store = Faulty::new(|_| None);
        let requests = requests(&store);
        let got = block_on(async {
            assert_eq!(requests.get("x", 9).await?, GetResult::Absent);
            requests.put("x", vec![1].into(), IfExists::Keep).await?;
            requests.put("x", vec![2].into(), IfExists::Keep).await?;
            assert_eq!(requests.get("x", 9).await?, GetResult::Found(vec![1]));
            requests.put("x", vec![3; 9].into(), IfExists::Replace).await?;
            assert_eq!(requests.get("x", 9).await?, GetResult::Found(vec![3; 9]));
            requests.get("x", 8).await
        });
        assert_eq!(got.expect("an answer"), GetResult::TooLong);
        assert_eq!(store.requests.load(SeqCst), 7);
    }

    #[test]
    fn a_refusal_of_a_user_who_may_not_list_is_an_absent_object_if_others_can_be_read() {
        let store = Faulty::new(|_| None);
        // Without anything that can be read, it is a refusal.
        store.set(|_| Some(faulty::Fault::Refused));
        let host = requests(&store);
        let refused =
            |got: std::result::Result<GetResult, Fault>| matches!(got, Err(Fault::Refused(_)));
        assert!(refused(block_on(host.within(host.get("x", 9)))));
        // A host that uploads leaves what can be read.
        store.set(|_| None);
        let remote = Remote::new(Arc::new(store.clone()), Path::from("a/b"));
        let uploading = Requests::new(Place::Remote(remote), TIMEOUT);
        block_on(uploading.put("y", vec![1].into(), IfExists::Keep)).expect("a put");
        store.set(|_| Some(faulty::Fault::RefusedIfAbsent));
        let got = block_on(async {
            tokio::time::sleep(UNREADABLE_FOR).await;
            host.within(host.get("x", 9)).await
        });
        assert_eq!(got, Ok(GetResult::Absent));
        assert_eq!(block_on(host.within(host.get("y", 9))), Ok(GetResult::Found(vec![1])));
        // Credentials that end are noticed.
        store.set(|_| Some(faulty::Fault::Refused));
        let later = block_on(async {
            tokio::time::sleep(2 * READABLE_FOR).await;
            host.within(host.get("x", 9)).await
        });
        assert!(refused(later));
    }

    #[test]
    fn a_bucket_that_does_not_exist_is_a_refusal_and_not_an_absent_object() {
        let store = Faulty::new(|_| Some(faulty::Fault::NoBucket));
        let requests = requests(&store);
        let got = block_on(requests.within(requests.get("x", 9)));
        assert!(
            matches!(&got, Err(Fault::Refused(text)) if text.contains("NoSuchBucket")),
            "{got:?}"
        );
    }

    #[test]
    fn fetches_of_a_user_who_may_read_nothing_are_one_request_each() {
        let store = Faulty::new(|_| Some(faulty::Fault::Refused));
        let remote = Remote::new(Arc::new(store.clone()), Path::default());
        block_on(async {
            for _ in 0..100 {
                remote.get("v1/0011/abcdef", 9).await.expect_err("it may not be read");
            }
            assert_eq!(store.requests.load(SeqCst), 100 + 1);
            // With new credentials, what may be read is found out after a few seconds.
            store.set(|_| Some(faulty::Fault::RefusedIfAbsent));
            let (hello, options) = (PutPayload::from_static(b"kvferry"), PutOptions::default());
            store.inner.put_opts(&Path::from(HELLO), hello, options).await.expect("a put");
            tokio::time::sleep(UNREADABLE_FOR).await;
            assert_eq!(remote.get("v1/0011/abcdef", 9).await.expect("absent"), GetResult::Absent);
        });
    }
}
