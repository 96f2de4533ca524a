//! The object tier: blocks that were put are uploaded to an object store, and blocks that are missing here are
//! fetched from it.
//!
//! - [`Objects`] is what the tier needs of an object store. `kvferry-store-objects` has it for S3, GCS, Azure and
//!   directories.
//! - [`ObjectTier`] says how a store uses it: [`StoreOptions::objects`](crate::StoreOptions::objects).
//! - `upload` reads new blocks back from the disk and uploads them; `fetch` carries out
//!   [`Space::prefetch`](crate::Space::prefetch). Each has one thread, which never waits for a request.
//! - `content` documents every byte of an object; `outage` decides when requests are made; `remembered` keeps the
//!   keys that the object store does not have.
//!
//! Nothing else in the store waits for the object store: `lookup`, `get` and `put` work as if there was none. A
//! request that fails, an object that is damaged, cut or another block's, and an object store that is away cost
//! hits, and are counted.

pub(crate) mod content;
pub(crate) mod fetch;
mod outage;
mod remembered;
mod upload;

use crate::core::Core;
use crate::key::Key;
use crate::log;
use kvferry_sys::sync::Mutex;
use outage::{Direction, Gate, OutageChange, Patience, Permit, RequestEnd};
use remembered::Remembered;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Keys of objects that are known to be damaged, and how long they are known.
const DAMAGED_MAX: usize = 4096;
const DAMAGED_FOR_MS: u64 = 3_600_000;

/// An object store: objects by name, whose bytes are written and read whole.
///
/// Requests run in the background, and end within a time that the object store bounds. Both calls return at once,
/// never block, and end each request by its [`Done`], exactly once, from any thread. The last reference to the
/// object store may be dropped anywhere, within a `Done` too.
pub trait Objects: Send + Sync + fmt::Debug {
    /// Begins to read an object of at most `len_max` bytes. Not more than these are read.
    fn get(&self, name: &str, len_max: u64, done: Done<GetResult>);

    /// Begins to write an object.
    fn put(&self, name: &str, content: Vec<u8>, if_exists: IfExists, done: Done<()>);

    /// Location of the object store, for log lines: no secrets.
    fn location(&self) -> &str;
}

/// Result of reading an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GetResult {
    /// The object's bytes.
    Found(Vec<u8>),
    /// There is no object of that name.
    Absent,
    /// There is one, with more bytes than were allowed.
    TooLong,
}

/// Treatment of an object that exists when it is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfExists {
    /// The object stays as it is, which is a success.
    Keep,
    /// The object is replaced.
    Replace,
}

/// Reason why a request failed. The text is for a log line: no secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// There was no answer, or the server failed. It may be repeated.
    Failed(String),
    /// The object store does not allow it: by these credentials, or because there is no such bucket.
    Refused(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Failed(what) | Self::Refused(what)) = self;
        f.write_str(what)
    }
}

type Outcome<T> = Result<T, Fault>;

/// Ends one request. One that is dropped has failed.
pub struct Done<T>(Option<Box<dyn FnOnce(Outcome<T>) + Send>>);

impl<T> Done<T> {
    /// Has a function called with the outcome.
    pub fn new(call: impl FnOnce(Outcome<T>) + Send + 'static) -> Self {
        Self(Some(Box::new(call)))
    }

    /// Ends the request.
    pub fn end(mut self, outcome: Outcome<T>) {
        if let Some(call) = self.0.take() {
            call(outcome);
        }
    }
}

impl<T> Drop for Done<T> {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call(Err(Fault::Failed("the request was given up".into())));
        }
    }
}

impl<T> fmt::Debug for Done<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Done")
    }
}

/// Settings of a store's use of an object store.
///
/// A host can fetch what another one uploaded if both name the model, the layout, the tenant, the adapter, the
/// group and the shard alike.
#[derive(Clone, Debug)]
pub struct ObjectTier {
    objects: Arc<dyn Objects>,
    settings: Settings,
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    priority_min: u8,
    concurrency: usize,
    waiting_blocks: usize,
    waiting_bytes: u64,
    absent_for: Duration,
    close_timeout: Duration,
    no_room_for: Duration,
    patience: Patience,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            priority_min: 0,
            concurrency: 16,
            waiting_blocks: 16_384,
            waiting_bytes: 4 << 30,
            absent_for: Duration::from_secs(5),
            close_timeout: Duration::from_secs(5),
            no_room_for: Duration::from_secs(1),
            patience: Patience {
                failures_max: 3,
                away_min: Duration::from_secs(1),
                away_max: Duration::from_secs(60),
            },
        }
    }
}

impl ObjectTier {
    /// A tier with the default settings, which the methods below change.
    pub fn new(objects: Arc<dyn Objects>) -> Self {
        Self { objects, settings: Settings::default() }
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    /// Blocks of a lower priority are not uploaded. 0 by default: all are.
    #[must_use]
    pub fn priority_min(self, priority: u8) -> Self {
        self.with(|it| it.priority_min = priority)
    }

    /// Requests under way at most: so many uploads, and so many fetches. 16 by default, at least 1.
    #[must_use]
    pub fn concurrency(self, requests: usize) -> Self {
        self.with(|it| it.concurrency = requests.max(1))
    }

    /// Blocks that may wait for their upload, and their bytes, which are on the disk meanwhile. 16 384 blocks and
    /// 4 GiB by default. Further ones are not uploaded.
    #[must_use]
    pub fn waiting_max(self, blocks: usize, bytes: u64) -> Self {
        self.with(|it| (it.waiting_blocks, it.waiting_bytes) = (blocks, bytes))
    }

    /// Sets for how long a block that the object store does not have is not asked for again. 5 s by default.
    #[must_use]
    pub fn absent_for(self, time: Duration) -> Self {
        self.with(|it| it.absent_for = time)
    }

    /// Sets how long [`Store::close`](crate::Store::close) goes on uploading the blocks that wait. 5 s by default.
    /// An object store that does not answer is not waited for.
    #[must_use]
    pub fn close_timeout(self, time: Duration) -> Self {
        self.with(|it| it.close_timeout = time)
    }

    /// Sets how long blocks that have arrived wait for space on the disk, since one of them got some. 1 s by default.
    #[doc(hidden)]
    #[must_use]
    pub fn no_room_for(self, time: Duration) -> Self {
        self.with(|it| it.no_room_for = time)
    }

    /// Sets the number of failures in a row after which the object store is away, and for how long: first, and at
    /// most, as the time doubles while it does not answer. After 3 failures for 1 s to 60 s by default.
    #[must_use]
    pub fn away(self, failures: u32, first: Duration, at_most: Duration) -> Self {
        let (failures_max, away_max) = (failures.max(1), at_most.max(first));
        self.with(|it| it.patience = Patience { failures_max, away_min: first, away_max })
    }
}

/// State that uploads and fetches of an open store's tier share.
#[derive(Debug)]
pub(crate) struct Shared {
    settings: Settings,
    /// The object store. `None` once the store is closed: the object store may have threads, which end with it.
    objects: Mutex<Option<Arc<dyn Objects>>>,
    location: String,
    core: Arc<Core>,
    gate: Mutex<Gate>,
    uploads: Arc<upload::Queue>,
    /// Keys of damaged objects, which the next upload replaces.
    damaged: Mutex<Remembered>,
}

impl Shared {
    fn now_ms(&self) -> u64 {
        self.core.clock.now_ms()
    }

    /// Creation time of the store, in Unix seconds.
    fn created_s(&self) -> u64 {
        self.core.superblock.created_ms / 1000
    }

    fn is_away(&self) -> bool {
        self.gate.lock().is_away()
    }

    fn get(&self, name: &str, len_max: u64, done: Done<GetResult>) {
        let objects = self.objects.lock().clone();
        if let Some(objects) = objects {
            objects.get(name, len_max, done);
        }
    }

    fn put(&self, name: &str, content: Vec<u8>, if_exists: IfExists, done: Done<()>) {
        let objects = self.objects.lock().clone();
        if let Some(objects) = objects {
            objects.put(name, content, if_exists, done);
        }
    }

    /// Takes note of how a request ended, and logs when the object store goes away and when it is back.
    fn note<T>(&self, direction: Direction, permit: Permit, outcome: &Outcome<T>) {
        let end = match outcome {
            Ok(_) => RequestEnd::Answered,
            Err(Fault::Refused(_)) => RequestEnd::Refused,
            Err(Fault::Failed(_)) => RequestEnd::Failed,
        };
        let change = self.gate.lock().ended(direction, permit, end, self.now_ms());
        let location = &self.location;
        match (change, outcome) {
            (OutageChange::Back, _) => tracing::info!("the object store {location} answers again"),
            (OutageChange::Away, Err(fault)) => tracing::warn!(
                "the object store {location} fails; until it answers again, blocks are neither fetched nor \
                 uploaded: {fault}"
            ),
            (OutageChange::AwayInDirection, Err(fault)) => {
                let what = match direction {
                    Direction::Up => "uploads",
                    Direction::Down => "fetches",
                };
                tracing::warn!(
                    "the object store {location} refuses {what}; it is asked again: {fault}"
                );
            }
            _ => {}
        }
        if change != OutageChange::None || permit.is_probe() {
            self.uploads.wake();
        }
    }
}

/// The object tier of an open store.
#[derive(Debug)]
pub(crate) struct Tier {
    shared: Arc<Shared>,
    uploader: upload::Uploader,
    fetcher: fetch::Handle,
}

impl Tier {
    pub(crate) fn start(tier: &ObjectTier, core: &Arc<Core>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            settings: tier.settings,
            objects: Mutex::new(Some(Arc::clone(&tier.objects))),
            location: tier.objects.location().to_owned(),
            core: Arc::clone(core),
            gate: Mutex::new(Gate::new(tier.settings.patience)),
            uploads: Arc::default(),
            damaged: Mutex::new(Remembered::new(DAMAGED_MAX, DAMAGED_FOR_MS)),
        });
        let uploader = upload::Uploader::start(&shared)?;
        let fetcher = fetch::Handle::start(&shared).inspect_err(|_| uploader.stop())?;
        Ok(Self { shared, uploader, fetcher })
    }

    /// Has blocks uploaded that were just stored. Those that the index has elsewhere were there before.
    pub(crate) fn stored(&self, segment: u32, records: &[log::Record]) {
        let core = &self.shared.core;
        let is_new = |record: &&log::Record| {
            let place = core.superblock.geometry.place(segment, record.page);
            core.member.find(&key_of(&record.block)).is_some_and(|entry| entry.page == place)
        };
        let new: Vec<_> = records.iter().filter(is_new).map(|record| record.block).collect();
        self.uploader.offer(&new);
    }

    pub(crate) fn prefetch(&self, prefetch: Box<fetch::Prefetch>) {
        self.fetcher.begin(prefetch);
    }

    /// Waits until no upload waits or is under way. False if the time passed first.
    pub(crate) fn flush(&self, timeout: Duration) -> bool {
        self.shared.uploads.wait_idle(timeout, || false)
    }

    /// Uploads what waits, for a time, and ends the threads. Idempotent.
    pub(crate) fn close(&self) {
        self.fetcher.stop();
        self.shared.uploads.refuse();
        let timeout = self.shared.settings.close_timeout;
        self.shared
            .uploads
            .wait_idle(timeout, || self.shared.gate.lock().is_away_in(Direction::Up));
        self.uploader.stop();
        let objects = self.shared.objects.lock().take();
        drop(objects);
    }

    pub(crate) fn is_away(&self) -> bool {
        self.shared.is_away()
    }

    /// Blocks that wait for their upload, or are being uploaded.
    pub(crate) fn uploads_waiting(&self) -> usize {
        self.shared.uploads.len()
    }
}

fn key_of(block: &log::Block) -> Key {
    Key(block.key)
}
