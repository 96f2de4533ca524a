//! The processes that share a store.
//!
//! The index is in memory that they share. The first process makes it, and reads the store from the disk; each
//! later one is given it by the *keeper*, over an abstract socket that is named after the store. Every
//! process stays connected to the keeper for as long as it has the store open: so the keeper learns at once
//! of a process that has died, and the others of a keeper that has. The socket's name exists once, and its
//! owner is the keeper: when it dies, the processes that are left try to take the name, and one of them
//! becomes the keeper.
//!
//! Two files in the store's first directory are locked (`flock`): `join` while a process opens the store,
//! one after another; `members` by every process that has it open, so that a process knows that it is alone, and
//! that the shared memory of the others, which it can't reach, does not exist.
//!
//! Wake-up: the thread of this module sleeps in `poll` until a process comes, leaves, or asks for space.

use crate::error::{Error, Result};
use crate::index::Index;
use crate::log::Superblock;
use crate::sync::lock;
use kvferry_sys::fd::Fd;
use kvferry_sys::lock::LockFile;
use kvferry_sys::poll::{EventFd, Interest, Ready, wait_any};
use kvferry_sys::unix::{Channel, user};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a process waits for others that open the store, and for an answer of the keeper. Reading a store
/// from the disk takes seconds.
pub(crate) const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long a process does nothing after the system could not wait.
const POLL_AGAIN: Duration = Duration::from_millis(50);

/// The files that are locked.
pub(crate) const JOIN: &str = "join";
pub(crate) const MEMBERS: &str = "members";

/// Messages of a member to the keeper. The keeper's answer to `HELLO` carries the descriptor of the index's
/// memory.
const HELLO: u8 = 1;
const MEMBER: u8 = 2;
const WAKE: u8 = 3;

/// What the thread of a process does for its store.
pub(crate) trait Keep: Send + Sync {
    /// This process has become the keeper: what dead processes left is its to repair.
    fn became_keeper(&self);
    /// A process has left or died, and this one is the keeper.
    fn left(&self);
    /// A process asks the keeper for space, or to take its events.
    fn woken(&self);
}

/// The index, and this process's place among those that share it.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) index: Arc<Index>,
    place: Place,
    /// Locked, shared, as long as the store is open.
    members: LockFile,
    name: Vec<u8>,
}

#[derive(Debug)]
enum Place {
    Keeper { listener: Channel, followers: Vec<Follower> },
    Follower(Arc<Channel>),
}

/// A process that is connected to this one.
#[derive(Debug)]
struct Follower {
    channel: Channel,
    /// It has joined the index.
    is_member: bool,
}

/// Joins the processes that have the store open, or makes the index if there are none. `open` makes or reads
/// the store's superblock; `fill` makes the index and reads the store into it.
pub(crate) fn join(
    directory: &Path,
    open: impl FnOnce() -> Result<Superblock>,
    fill: impl FnOnce(&Superblock) -> Result<Arc<Index>>,
) -> Result<(Superblock, Joined)> {
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::Directory { path, source }
    };
    let (join, members) = (directory.join(JOIN), directory.join(MEMBERS));
    let busy = |detail: &str| Error::Busy { path: directory.into(), detail: detail.into() };
    let joining = LockFile::open(&join).map_err(failed(&join))?;
    wait_until(JOIN_TIMEOUT, || joining.try_exclusive())
        .map_err(failed(&join))?
        .ok_or_else(|| busy("; one has been opening it for a minute"))?;
    let superblock = open()?;
    let name = name(superblock.store);
    let lock = LockFile::open(&members).map_err(failed(&members))?;
    let mut last = busy("");
    let found = wait_until_some(ANSWER_TIMEOUT, || match place(&lock, &name) {
        Ok(found) => Some(found),
        Err(e) => {
            last = busy(&format!("; {e}"));
            None
        }
    });
    let (index, place) = match found.ok_or(last)? {
        Found::NoProcess(listener) => {
            (fill(&superblock)?, Place::Keeper { listener, followers: Vec::new() })
        }
        Found::Keeper(index, channel) => (index, Place::Follower(Arc::new(channel))),
    };
    // No process can take the lock alone meanwhile: it would have to hold `join`.
    lock.try_shared().map_err(failed(&members))?;
    Ok((superblock, Joined { index, place, members: lock, name }))
}

/// Which processes have a store open.
enum Found {
    /// No other process: this one has the store's name now.
    NoProcess(Channel),
    Keeper(Arc<Index>, Channel),
}

/// Looks for the processes that have a store open. Fails while they leave, or choose a keeper.
fn place(members: &LockFile, name: &[u8]) -> io::Result<Found> {
    if members.try_exclusive()? {
        return Channel::listen(name).map(Found::NoProcess);
    }
    ask(name).map(|(index, channel)| Found::Keeper(index, channel))
}

fn name(store: [u8; 16]) -> Vec<u8> {
    let id = store.map(|byte| format!("{byte:02x}")).concat();
    format!("kvferry-store-{id}").into_bytes()
}

pub(crate) fn wait_until(
    timeout: Duration,
    mut is: impl FnMut() -> io::Result<bool>,
) -> io::Result<Option<()>> {
    let mut outcome = Ok(());
    let found = wait_until_some(timeout, || match is() {
        Ok(is) => is.then_some(()),
        Err(e) => {
            outcome = Err(e);
            Some(())
        }
    });
    outcome.map(|()| found)
}

fn wait_until_some<T>(timeout: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if began.elapsed() > timeout {
            return None;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Asks the keeper for the index.
fn ask(name: &[u8]) -> io::Result<(Arc<Index>, Channel)> {
    let channel = Channel::connect(name)?;
    check_user(&channel)?;
    channel.send(&[HELLO], &[])?;
    let ready = wait_any(&[(channel.as_fd(), Interest::Read)], Some(ANSWER_TIMEOUT))?;
    if !ready[0].any() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let packet = channel.recv(&mut [0; 8])?;
    let memory = packet.fds.into_iter().next().ok_or(io::ErrorKind::ConnectionReset)?;
    Ok((Arc::new(Index::open(memory)?), channel))
}

/// The name is visible to every user of the network namespace.
fn check_user(channel: &Channel) -> io::Result<()> {
    let theirs = channel.credentials()?.uid;
    if theirs == user() {
        return Ok(());
    }
    let why = format!("the process runs as user {theirs}, this one as {}", user());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// A running membership.
#[derive(Debug)]
pub(crate) struct Membership {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    stop: EventFd,
    is_stopped: AtomicBool,
    /// Where the keeper is; `None` if it is this process, or not known at the moment.
    keeper: Mutex<Option<Arc<Channel>>>,
    is_keeper: AtomicBool,
}

impl Membership {
    /// Starts the thread.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start(joined: Joined, keep: Arc<impl Keep + 'static>) -> io::Result<Self> {
        let Joined { index, place, members, name } = joined;
        let is_keeper = matches!(place, Place::Keeper { .. });
        let shared = Arc::new(Shared {
            stop: EventFd::new()?,
            is_stopped: AtomicBool::new(false),
            keeper: Mutex::new(match &place {
                Place::Keeper { .. } => None,
                Place::Follower(keeper) => Some(Arc::clone(keeper)),
            }),
            is_keeper: AtomicBool::new(is_keeper),
        });
        let memory = Fd::new(index.memory().as_fd().try_clone_to_owned()?);
        let mut run = Run { shared: Arc::clone(&shared), place, name, memory, keep };
        let body = move || {
            run.serve();
            // The name is free before the store is.
            drop(run);
            drop(members);
        };
        let thread = kvferry_sys::thread::spawn("kvferry-store".into(), body)?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Whether this process is the keeper.
    pub(crate) fn is_keeper(&self) -> bool {
        self.shared.is_keeper.load(Ordering::Acquire)
    }

    /// Wakes the keeper, if it is another process. Never waits.
    pub(crate) fn wake_keeper(&self) {
        if let Some(keeper) = &*lock(&self.shared.keeper) {
            // Refused if the keeper has not read earlier ones, which wake it as well.
            let _ = keeper.send(&[WAKE], &[]);
        }
    }

    /// Leaves. Idempotent. Not to be called on the thread itself.
    pub(crate) fn stop(&self) {
        self.shared.is_stopped.store(true, Ordering::Release);
        self.shared.stop.signal();
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Run<K> {
    shared: Arc<Shared>,
    place: Place,
    name: Vec<u8>,
    /// The index's memory, for those that come.
    memory: Fd,
    keep: Arc<K>,
}

impl<K: Keep> Run<K> {
    fn serve(&mut self) {
        match self.place {
            Place::Keeper { .. } => self.keep.became_keeper(),
            Place::Follower(_) => self.introduce(),
        }
        while !self.shared.is_stopped.load(Ordering::Acquire) {
            match &mut self.place {
                Place::Keeper { listener, followers } => {
                    let mut fds = vec![
                        (self.shared.stop.as_fd(), Interest::Read),
                        (listener.as_fd(), Interest::Read),
                    ];
                    fds.extend(followers.iter().map(|it| (it.channel.as_fd(), Interest::Read)));
                    let Some(ready) = wait(&fds) else { continue };
                    let (ready, of_followers) = ready.split_at(2);
                    let ready_followers: Vec<_> =
                        of_followers.iter().map(|ready| ready.any()).collect();
                    if ready[1].any() {
                        let new = listener.accept().inspect_err(|_| {
                            // Such as: no descriptor is free, and the process that came still waits.
                            std::thread::sleep(LOOK_EVERY);
                        });
                        let new = new.and_then(|channel| {
                            check_user(&channel).map(|()| Follower { channel, is_member: false })
                        });
                        followers.extend(new);
                    }
                    let mut at = 0;
                    followers.retain_mut(|follower| {
                        let is_ready = ready_followers.get(at).copied().unwrap_or(false);
                        at += 1;
                        !is_ready || follower.answer(&self.memory, &*self.keep)
                    });
                }
                Place::Follower(keeper) => {
                    let keeper = Arc::clone(keeper);
                    let fds = [
                        (self.shared.stop.as_fd(), Interest::Read),
                        (keeper.as_fd(), Interest::Read),
                    ];
                    let Some(ready) = wait(&fds) else { continue };
                    // A keeper says nothing after its answer, so it is gone.
                    if ready[1].any() {
                        self.elect();
                    }
                }
            }
        }
    }

    /// Becomes the keeper, or finds the one that has.
    fn elect(&mut self) {
        *lock(&self.shared.keeper) = None;
        while !self.shared.is_stopped.load(Ordering::Acquire) {
            if let Ok(listener) = Channel::listen(&self.name) {
                self.place = Place::Keeper { listener, followers: Vec::new() };
                self.shared.is_keeper.store(true, Ordering::Release);
                self.keep.became_keeper();
                return;
            }
            let found = Channel::connect(&self.name)
                .and_then(|channel| check_user(&channel).map(|()| channel));
            if let Ok(channel) = found {
                let channel = Arc::new(channel);
                self.place = Place::Follower(Arc::clone(&channel));
                *lock(&self.shared.keeper) = Some(channel);
                self.introduce();
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn introduce(&self) {
        if let Place::Follower(keeper) = &self.place {
            // If it fails, the keeper is gone, and the next election says it again.
            let _ = keeper.send(&[MEMBER], &[]);
        }
    }
}

/// Waits for one of the descriptors. `None` if the system can't, such as for lack of memory: the caller tries
/// again.
fn wait(fds: &[(BorrowedFd<'_>, Interest)]) -> Option<Vec<Ready>> {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    match wait_any(fds, None) {
        Ok(ready) => Some(ready),
        Err(error) => {
            if !IS_TOLD.swap(true, Ordering::Relaxed) {
                tracing::warn!(%error, "the store can't wait for other processes; it tries again");
            }
            std::thread::sleep(POLL_AGAIN);
            None
        }
    }
}

impl Follower {
    /// Reads one message. Returns whether the process is still connected.
    fn answer(&mut self, memory: &Fd, keep: &impl Keep) -> bool {
        let mut message = [0; 8];
        let len = match self.channel.recv(&mut message) {
            Ok(packet) => packet.len,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
            Err(_) => 0,
        };
        match (len, message[0]) {
            (0, ..) => {
                if self.is_member {
                    keep.left();
                }
                false
            }
            (1, HELLO) => self.channel.send(&[0; 8], &[memory.as_fd()]).is_ok(),
            (1, MEMBER) => {
                self.is_member = true;
                true
            }
            (1, WAKE) => {
                keep.woken();
                true
            }
            _ => false,
        }
    }
}
