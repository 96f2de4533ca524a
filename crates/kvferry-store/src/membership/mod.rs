//! The processes that share a store.
//!
//! The index is in memory that they share. The first process makes it, and reads the store from the disk; each
//! later one is given it by the *keeper*, over an abstract socket where only processes of the store's user are served
//! ([`elect`]). Every process stays connected to the keeper for as long as it has the store open: so the keeper learns
//! at once of a process that has died, and the others of a keeper that has. Then one of those that are left becomes
//! the keeper, which the index decides, and the others connect to it.
//!
//! Two files in each of the store's directories that can be read are locked (`flock`): `join` while a process opens the
//! store, one after another; `members` by every process that has it open, so that a process knows that it is alone,
//! and that the shared memory of the others, which it can't reach, does not exist. A process is alone if it is in all
//! directories that it can read: so it finds the others also where they could read other ones when they came.
//!
//! Wake-up: the thread of this module sleeps in `poll` until a process comes, leaves, or asks for space.

pub(crate) mod elect;

use crate::error::{Error, Result};
use crate::index::{Index, Member, MemberId};
use crate::log::Superblock;
use crate::threads::task_pool::join_unless;
use crate::tiers::disk::gate::{Bounds, ask_all, is_hang};
use elect::{Beacon, Secret, TakenAddress, check_user};
use kvferry_sys::fd::Fd;
use kvferry_sys::lock::LockFile;
use kvferry_sys::poll::{EventFd, Interest, Ready, wait_any};
use kvferry_sys::sync::Mutex;
use kvferry_sys::unix::Channel;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait of a process for others that open the store, and for an answer of the keeper. Reading a store from the
/// disk takes seconds.
pub(crate) const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The longest pause between two tries to find the keeper, or to become it.
const ELECT_PAUSE_MAX: Duration = Duration::from_millis(250);
/// Time for which a name at which no process of this user listens counts as a dying keeper's.
const BEACON_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause of a process after waiting for events has failed.
const POLL_AGAIN: Duration = Duration::from_millis(50);

/// The files that are locked.
pub(crate) const JOIN: &str = "join";
pub(crate) const MEMBERS: &str = "members";

/// Messages of a member to the keeper. The keeper's answer to `HELLO` carries the descriptor of the index's
/// memory.
const HELLO: u8 = 1;
const MEMBER: u8 = 2;
/// The member's number and generation follow.
const MEMBER_LEN: usize = 6;
const WAKE: u8 = 3;
/// The keeper's message to a member: it is to seal what it does not write to.
const SEAL: u8 = 4;
/// The keeper's answer to `MEMBER`, as long: which member it is. Only the keeper itself knows: when another process is
/// connected to it, the index may name the next one.
const KEEPER: u8 = 5;

/// The store's side of its membership thread.
pub(crate) trait Keep: Send + Sync {
    /// The member that is this process.
    fn member(&self) -> &Member;
    /// This process has become the keeper, and has to repair what dead processes left.
    fn became_keeper(&self);
    /// A process has connected to this one, which is the keeper.
    fn connected(&self, member: MemberId);
    /// The connection to a member has ended: it has left or died. All its threads have ended then.
    fn left(&self, member: MemberId);
    /// A process asks the keeper for space, or to take its events.
    fn woken(&self);
    /// Signalled when this process, if it is the keeper, asks the others to seal segments that they do not write to.
    fn asks_to_seal(&self) -> &EventFd;
    /// The keeper asks for that.
    fn asked_to_seal(&self);
    /// Returns when nothing of this process touches the store's files any more. The store was closed.
    fn wait_quiet(&self);
}

/// The index, and this process's place among those that share it.
#[derive(Debug)]
pub(crate) struct JoinedIndex {
    pub(crate) index: Arc<Index>,
    place: RoleInStore,
    /// Locked, shared, as long as the store is open.
    members: Locks,
    names: StoreNames,
}

/// Names at which the keeper is found.
#[derive(Debug)]
struct StoreNames {
    directories: Vec<PathBuf>,
    /// Time limit for a directory's answer, if there are several.
    bounds: Bounds,
    beacon: Vec<u8>,
}

#[derive(Debug)]
enum RoleInStore {
    Keeper { listener: Channel, beacon: Beacon, followers: Vec<Follower> },
    Follower(Arc<Channel>),
}

/// A process that is connected to this one.
#[derive(Debug)]
struct Follower {
    channel: Channel,
    /// Once it has joined the index.
    member: Option<MemberId>,
}

/// Files of locks of a store's directories.
#[derive(Debug)]
pub(crate) struct Locks {
    files: Vec<LockFile>,
    /// Time limit for a directory's answer, if there are several.
    bounds: Bounds,
}

impl std::ops::Deref for Locks {
    type Target = [LockFile];

    fn deref(&self) -> &[LockFile] {
        &self.files
    }
}

impl Drop for Locks {
    /// Closes the files, of several directories each on a thread of its own: one that hangs is not waited for.
    fn drop(&mut self) {
        let files = std::mem::take(&mut self.files);
        if !self.bounds.has_several {
            return;
        }
        let (closed, told) = mpsc::channel::<()>();
        for file in files {
            let closed = closed.clone();
            let close = move || {
                drop(file);
                drop(closed);
            };
            // Without a thread it is closed here.
            let _ = kvferry_sys::thread::spawn("kvferry-store-io".into(), close);
        }
        drop(closed);
        // Until the last thread has dropped its end.
        let _ = told.recv_timeout(self.bounds.limit);
    }
}

/// Opens a file of locks in each directory, in an order that is the same for all processes, however they name them. A
/// directory that has no such file, and where none can be made, does without.
///
/// # Errors
/// If there is none in any directory, or one of several does not answer within its limit.
pub(crate) fn lock_files(
    directories: &[PathBuf],
    name: &'static str,
    bounds: Bounds,
) -> Result<Locks> {
    let (mut files, mut first_error) = (BTreeMap::new(), None);
    let open = move |directory: &Path| {
        let file = LockFile::open(&directory.join(name))?;
        directory.metadata().map(|it| ((it.dev(), it.ino()), file))
    };
    for (directory, opened) in directories.iter().zip(ask_all(directories, bounds, open)) {
        let path = directory.join(name);
        match opened {
            Ok((number, file)) => _ = files.insert(number, file),
            Err(source) if is_hang(&source) => {
                drop(Locks { files: files.into_values().collect(), bounds });
                return Err(Error::Directory { path, source });
            }
            Err(source) => {
                first_error.get_or_insert(Error::Directory { path, source });
            }
        }
    }
    match first_error {
        Some(error) if files.is_empty() => Err(error),
        _ => Ok(Locks { files: files.into_values().collect(), bounds }),
    }
}

/// Takes all locks alone. `false`: another open file has one; those that were taken stay so.
fn try_exclusive(locks: &[LockFile]) -> io::Result<bool> {
    locks.iter().try_fold(true, |all, lock| lock.try_exclusive().map(|is| all && is))
}

/// Joins the processes that have the store open, or makes the index if there are none. `directories` are those that
/// can be read. `open` makes or reads the store's superblock; `fill` makes the index and reads the store into it.
///
/// # Errors
/// `Directory` with an error for which [`is_hang`] holds, if one of several directories does not answer within its limit.
pub(crate) fn join(
    directories: &[PathBuf],
    bounds: Bounds,
    open: impl FnOnce() -> Result<Superblock>,
    fill: impl FnOnce(&Superblock) -> Result<Arc<Index>>,
) -> Result<(Superblock, JoinedIndex)> {
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::Directory { path, source }
    };
    let directory = &directories[0];
    let busy = |detail: &str| Error::Busy { path: directory.into(), detail: detail.into() };
    let joining = lock_files(directories, JOIN, bounds)?;
    for lock in joining.iter() {
        wait_until(JOIN_TIMEOUT, || lock.try_exclusive())
            .map_err(failed(&directory.join(JOIN)))?
            .ok_or_else(|| busy("; one has been opening it for a minute"))?;
    }
    let superblock = open()?;
    let names = StoreNames {
        directories: directories.to_vec(),
        bounds,
        beacon: elect::beacon(superblock.store),
    };
    let members = lock_files(directories, MEMBERS, bounds)?;
    let mut last = busy("");
    let began = Instant::now();
    let found = wait_until_some(ANSWER_TIMEOUT, || match place(&members, &names, began) {
        Ok(found) => Some(Some(found)),
        Err(e) => {
            last = busy(&format!("; {e}"));
            // Another release's: it stays so.
            (e.kind() == io::ErrorKind::InvalidData).then_some(None)
        }
    });
    let (index, place) = match found.flatten().ok_or(last)? {
        FoundKeeper::NoProcess { secret, listener, beacon } => {
            let index = fill(&superblock)?;
            index.set_secret(secret);
            elect::announce(directories, &index);
            let beacon = Beacon::new(names.beacon.clone(), beacon);
            (index, RoleInStore::Keeper { listener, beacon, followers: Vec::new() })
        }
        FoundKeeper::Keeper(index, channel) => (index, RoleInStore::Follower(Arc::new(channel))),
    };
    // No process can take the lock alone meanwhile: it would have to hold `join`.
    for lock in members.iter() {
        lock.try_shared().map_err(failed(&directory.join(MEMBERS)))?;
    }
    Ok((superblock, JoinedIndex { index, place, members, names }))
}

/// Result of looking for processes that have the store open.
enum FoundKeeper {
    /// No other process. This one listens at the name, and has the beacon unless another program has it.
    NoProcess {
        secret: Secret,
        listener: Channel,
        beacon: Option<Channel>,
    },
    Keeper(Arc<Index>, Channel),
}

/// Looks for the processes that have a store open. Fails while they leave, or choose a keeper.
fn place(members: &[LockFile], names: &StoreNames, began: Instant) -> io::Result<FoundKeeper> {
    if try_exclusive(members)? {
        let beacon = match elect::take(&names.beacon)? {
            TakenAddress::Now(beacon) => Some(beacon),
            TakenAddress::ByOwnUser => {
                let why = "a process that has none of these directories has it open";
                return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
            }
            TakenAddress::ByOther if began.elapsed() < BEACON_TIMEOUT => {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            TakenAddress::ByOther => None,
        };
        let (secret, listener) = elect::listen()?;
        return Ok(FoundKeeper::NoProcess { secret, listener, beacon });
    }
    let found = |(index, channel)| FoundKeeper::Keeper(index, channel);
    // Why a process that listens at an announced name is not asked.
    let mut refused = None;
    for name in elect::announced(&names.directories, names.bounds) {
        match ask(&name) {
            Ok(asked) => return Ok(found(asked)),
            Err(e) if is_refused(&e) => refused = refused.or(Some(e)),
            Err(_) => {}
        }
    }
    // Where the keeper's name can't be written, and of a keeper of an earlier release.
    ask(&names.beacon).map(found).map_err(|e| no_keeper(e, refused))
}

/// Whether a process is not asked as it may be another user's.
fn is_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// The error if no keeper was found: that of the beacon, or of the announced names, which are the keeper's for certain.
/// Another program may have the beacon.
fn no_keeper(e: io::Error, refused: Option<io::Error>) -> io::Error {
    match e.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::PermissionDenied => {
            let why = "no process of this user answers as its keeper";
            let refused = refused.or_else(|| is_refused(&e).then_some(e));
            match refused {
                Some(it) => io::Error::new(it.kind(), format!("{why}: {it}")),
                None => io::Error::new(io::ErrorKind::ConnectionRefused, why),
            }
        }
        io::ErrorKind::InvalidData => {
            let why = format!("a process of another release of kvferry has it open ({e})");
            io::Error::new(e.kind(), why)
        }
        _ => e,
    }
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
    /// Connection to the keeper; `None` if the keeper is this process, or not known at the moment.
    keeper: Mutex<Option<Arc<Channel>>>,
    is_keeper: AtomicBool,
}

impl Membership {
    /// Starts the thread.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start(joined: JoinedIndex, keep: Arc<impl Keep + 'static>) -> io::Result<Self> {
        let JoinedIndex { index, place, members, names } = joined;
        let is_keeper = matches!(place, RoleInStore::Keeper { .. });
        if is_keeper && !keep.member().stand() {
            return Err(io::Error::other("another process is the keeper of a new index"));
        }
        let shared = Arc::new(Shared {
            stop: EventFd::new()?,
            is_stopped: AtomicBool::new(false),
            keeper: Mutex::new(match &place {
                RoleInStore::Keeper { .. } => None,
                RoleInStore::Follower(keeper) => Some(Arc::clone(keeper)),
            }),
            is_keeper: AtomicBool::new(is_keeper),
        });
        let memory = Fd::new(index.memory().as_fd().try_clone_to_owned()?);
        let quiet = Arc::clone(&keep);
        let mut run = Run { shared: Arc::clone(&shared), place, keeper: None, names, memory, keep };
        let body = move || {
            run.serve();
            run.keep.member().step_down();
            // The names are free before the store is.
            drop(run);
            // Another process that was alone would read the files, and write to them.
            quiet.wait_quiet();
            drop(quiet);
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
        if let Some(keeper) = &*self.shared.keeper.lock() {
            // Refused if the keeper has not read earlier ones, which wake it as well.
            let _ = keeper.send(&[WAKE], &[]);
        }
    }

    /// Leaves. Idempotent. Not to be called on the thread itself. If a device that hangs is touched when `gives_up` says
    /// so, the store stays locked until it has answered.
    pub(crate) fn stop(&self, gives_up: impl Fn() -> bool) {
        self.shared.is_stopped.store(true, Ordering::Release);
        self.shared.stop.signal();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            join_unless(thread, gives_up);
        }
    }
}

/// State of the membership thread.
struct Run<K> {
    shared: Arc<Shared>,
    place: RoleInStore,
    /// The member that this process is connected to, once it has said so.
    keeper: Option<MemberId>,
    names: StoreNames,
    /// The index's memory, for those that come.
    memory: Fd,
    keep: Arc<K>,
}

impl<K: Keep> Run<K> {
    fn serve(&mut self) {
        match self.place {
            RoleInStore::Keeper { .. } => self.keep.became_keeper(),
            RoleInStore::Follower(_) => self.introduce(),
        }
        while !self.shared.is_stopped.load(Ordering::Acquire) {
            match &mut self.place {
                RoleInStore::Keeper { listener, beacon, followers } => {
                    let at_most = beacon.keep();
                    let listeners: Vec<_> =
                        [&*listener].into_iter().chain(beacon.channel()).collect();
                    let mut fds = vec![
                        (self.shared.stop.as_fd(), Interest::Read),
                        (self.keep.asks_to_seal().as_fd(), Interest::Read),
                    ];
                    fds.extend(listeners.iter().map(|it| (it.as_fd(), Interest::Read)));
                    fds.extend(followers.iter().map(|it| (it.channel.as_fd(), Interest::Read)));
                    let Some(ready) = wait(&fds, at_most) else { continue };
                    let (ready, others) = ready.split_at(2);
                    let (of_listeners, of_followers) = others.split_at(listeners.len());
                    let ready_followers: Vec<_> =
                        of_followers.iter().map(|ready| ready.any()).collect();
                    for (listener, _) in
                        listeners.iter().zip(of_listeners).filter(|(_, ready)| ready.any())
                    {
                        let new = accept_all(listener).into_iter();
                        followers.extend(new.map(|channel| Follower { channel, member: None }));
                    }
                    if ready[1].any() {
                        self.keep.asks_to_seal().clear();
                        for follower in followers.iter().filter(|it| it.member.is_some()) {
                            // Refused if the process has not read earlier ones, which ask for the same.
                            let _ = follower.channel.send(&[SEAL], &[]);
                        }
                    }
                    let mut at = 0;
                    followers.retain_mut(|follower| {
                        let is_ready = ready_followers.get(at).copied().unwrap_or(false);
                        at += 1;
                        !is_ready || follower.answer(&self.memory, &*self.keep)
                    });
                }
                RoleInStore::Follower(keeper) => {
                    let keeper = Arc::clone(keeper);
                    let fds = [
                        (self.shared.stop.as_fd(), Interest::Read),
                        (keeper.as_fd(), Interest::Read),
                    ];
                    let Some(ready) = wait(&fds, None) else { continue };
                    if ready[1].any() {
                        let mut message = [0; 8];
                        match keeper.recv(&mut message) {
                            Ok(packet) if packet.len > 0 => self.hear(&message[..packet.len]),
                            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                            // It is gone.
                            _ => self.elect(),
                        }
                    }
                }
            }
        }
    }

    /// Becomes the keeper, or finds the one that has.
    fn elect(&mut self) {
        *self.shared.keeper.lock() = None;
        if let Some(keeper) = self.keeper.take() {
            self.keep.left(keeper);
        }
        let (began, mut pause, mut is_told) = (Instant::now(), LOOK_EVERY, false);
        while !self.shared.is_stopped.load(Ordering::Acquire) {
            if let Some(place) = self.stand() {
                self.place = place;
                self.shared.is_keeper.store(true, Ordering::Release);
                self.keep.became_keeper();
                return;
            }
            let found = Channel::connect(&elect::name_of(self.keep.member().secret()))
                .and_then(|channel| check_user(&channel).map(|()| channel));
            if let Ok(channel) = found {
                let channel = Arc::new(channel);
                self.place = RoleInStore::Follower(Arc::clone(&channel));
                *self.shared.keeper.lock() = Some(channel);
                self.introduce();
                return;
            }
            if !is_told && began.elapsed() > ANSWER_TIMEOUT {
                is_told = true;
                tracing::warn!(
                    "the store has no process that frees space: the one that is to do it does not \
                     answer; puts are refused until it does, or ends"
                );
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(ELECT_PAUSE_MAX);
        }
    }

    /// Becomes the keeper, if there is none and this process can listen.
    fn stand(&self) -> Option<RoleInStore> {
        let member = self.keep.member();
        if !member.stand() {
            return None;
        }
        match elect::listen() {
            Ok((secret, listener)) => {
                member.set_secret(secret);
                elect::announce(&self.names.directories, member.index());
                let beacon = Beacon::new(self.names.beacon.clone(), None);
                Some(RoleInStore::Keeper { listener, beacon, followers: Vec::new() })
            }
            // Such as: no descriptor is free. Another process may have one.
            Err(_) => {
                member.step_down();
                None
            }
        }
    }

    fn introduce(&self) {
        if let RoleInStore::Follower(keeper) = &self.place {
            // If it fails, the keeper is gone, and the next election says it again.
            let _ = keeper.send(&naming(MEMBER, self.keep.member().id()), &[]);
        }
    }

    /// A message of the keeper.
    fn hear(&mut self, message: &[u8]) {
        match message {
            [SEAL, ..] => self.keep.asked_to_seal(),
            [KEEPER, ..] => self.keeper = named(message),
            _ => {}
        }
    }
}

/// A message that names a member.
fn naming(what: u8, MemberId { number, generation }: MemberId) -> [u8; MEMBER_LEN] {
    let [a, b, c, d] = generation.to_le_bytes();
    [what, number, a, b, c, d]
}

/// The member that a message names.
fn named(message: &[u8]) -> Option<MemberId> {
    let &[_, number, a, b, c, d] = message else { return None };
    Some(MemberId { number, generation: u32::from_le_bytes([a, b, c, d]) })
}

/// The processes of this user among those that have connected. A queue that others have filled is emptied at once.
fn accept_all(listener: &Channel) -> Vec<Channel> {
    let mut own = Vec::new();
    for _ in 0..Channel::QUEUE {
        match listener.accept() {
            Ok(channel) => own.extend(check_user(&channel).is_ok().then_some(channel)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(_) => {
                // Such as: no descriptor is free, and the process that came still waits.
                std::thread::sleep(LOOK_EVERY);
                break;
            }
        }
    }
    own
}

/// Waits for one of the descriptors. `None` if the system can't, such as for lack of memory: the caller tries
/// again.
fn wait(fds: &[(BorrowedFd<'_>, Interest)], at_most: Option<Duration>) -> Option<Vec<Ready>> {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    match wait_any(fds, at_most) {
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
                if let Some(member) = self.member {
                    keep.left(member);
                }
                false
            }
            (1, HELLO) => self.channel.send(&[0; 8], &[memory.as_fd()]).is_ok(),
            (MEMBER_LEN, MEMBER) => {
                let Some(member) = named(&message[..len]) else { return false };
                self.member = Some(member);
                keep.connected(member);
                // If it fails, the member has ended: its end of the connection says so.
                let _ = self.channel.send(&naming(KEEPER, keep.member().id()), &[]);
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

#[cfg(test)]
mod tests;
