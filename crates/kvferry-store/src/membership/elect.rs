//! Where the processes of a store find their keeper.
//!
//! Which process is the keeper is decided in the index, which only the store's processes have: one word names the member
//! (`Member::stand`). The keeper listens on an abstract name that it draws at random, so that no other user can take
//! it first. Members read the name from the index. A process that joins reads it from a file in the store's
//! directories, which is written by the keeper and readable for its user only.
//!
//! The name is no secret: the kernel lists abstract names to every user of the network namespace (`/proc/net/unix`).
//! Other users can connect, and are refused ([`check_user`]). One that keeps connecting can fill the listener's queue, and so
//! delay processes that join and an election; it learns nothing of the store.
//!
//! The keeper also takes a name that follows from the store's id, the *beacon*. Earlier releases know no other name, and
//! it shows a process that can read none of the keeper's directories that the store is open. Any user can compute and
//! take it, so a beacon counts only if a process of the same user listens there.

use crate::index::Index;
use crate::tiers::disk::gate::{Bounds, ask_all};
use kvferry_sys::file::open_regular;
use kvferry_sys::unix::{Channel, user};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The file with the keeper's name, and the one that replaces it.
pub(crate) const KEEPER: &str = "keeper";
const NEW: &str = "keeper.new";
/// Prefix of the keeper's name; 32 hexadecimal digits follow.
const PREFIX: &str = "kvferry-keeper-";
const NAME_LEN: usize = PREFIX.len() + 32;
/// The permissions to write that other users may have.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Longest wait until the name is written.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_millis(500);
/// Pauses between tries to take the beacon.
const BEACON_PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(60));

/// The keeper's name, as the index has it.
pub(crate) type Secret = [u64; 2];

/// Draws a name and listens there.
pub(crate) fn listen() -> io::Result<(Secret, Channel)> {
    let bytes: [u8; 16] = kvferry_sys::random::bytes()?;
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let secret = [word(0), word(8)];
    Ok((secret, Channel::listen(&name_of(secret))?))
}

/// The abstract name.
pub(crate) fn name_of(secret: Secret) -> Vec<u8> {
    format!("{PREFIX}{:016x}{:016x}", secret[0], secret[1]).into_bytes()
}

/// The beacon of a store.
pub(crate) fn beacon(store: [u8; 16]) -> Vec<u8> {
    let id = store.map(|byte| format!("{byte:02x}")).concat();
    format!("kvferry-store-{id}").into_bytes()
}

/// Writes the keeper's name, which the index has, to each directory. One is enough; without any, processes that join
/// find the beacon. A device that hangs is waited for only briefly.
pub(crate) fn announce(directories: &[PathBuf], index: &Arc<Index>) {
    let (done, is_done) = mpsc::channel();
    for directory in directories {
        let (directory, done, index) = (directory.clone(), done.clone(), Arc::downgrade(index));
        let write = move || {
            let written = write_current(&directory, || index.upgrade().map(|it| it.secret()));
            let _ = done.send(());
            if let Err(error) = written {
                let path = directory.join(KEEPER);
                tracing::debug!(%error, "can't write {}", path.display());
            }
        };
        let _ = kvferry_sys::thread::spawn("kvferry-store-name".into(), write);
    }
    drop(done);
    let until = Instant::now() + ANNOUNCE_TIMEOUT;
    while is_done.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
}

/// Writes the name that the keeper has when it is written, which may take a device long: another process may have become
/// the keeper meanwhile. `current` is `None` once this process has closed the store.
fn write_current(directory: &Path, current: impl Fn() -> Option<Secret>) -> io::Result<()> {
    loop {
        let Some(secret) = current() else { return Ok(()) };
        let written = write_name(directory, secret);
        // A keeper that comes after this writes its own name later.
        if current().is_none_or(|now| now == secret) {
            return written;
        }
    }
}

fn write_name(directory: &Path, secret: Secret) -> io::Result<()> {
    let new = directory.join(NEW);
    // A new file: a link in its place is not followed, and it is this user's.
    match fs::remove_file(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(&name_of(secret))?;
    fs::rename(&new, directory.join(KEEPER))
}

/// The names that the directories' files have, without those that another user may have written, and of directories that
/// do not answer in time.
pub(crate) fn announced(directories: &[PathBuf], bounds: Bounds) -> BTreeSet<Vec<u8>> {
    let names = ask_all(directories, bounds, |it| read_name(&it.join(KEEPER)));
    names.into_iter().filter_map(|it| it.ok().flatten()).collect()
}

fn read_name(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = open_regular(path)? else { return Ok(None) };
    let metadata = file.metadata()?;
    if metadata.uid() != user() || metadata.mode() & WRITABLE_BY_OTHERS != 0 {
        return Ok(None);
    }
    let mut name = Vec::new();
    file.take(NAME_LEN as u64 + 1).read_to_end(&mut name)?;
    let is_name = name.len() == NAME_LEN && name.starts_with(PREFIX.as_bytes());
    Ok(is_name.then_some(name))
}

/// The process at the other end must run as this one's user, for certain.
pub(crate) fn check_user(channel: &Channel) -> io::Result<()> {
    let theirs = channel.credentials()?;
    if theirs.is_own_user() {
        return Ok(());
    }
    let (theirs, ours) = (theirs.uid, user());
    let why = if theirs == ours {
        format!(
            "the process at the other end may be another user's: both have the number {ours} here, in different \
             user namespaces or as one of many users without a number; run both in one user namespace, as a user \
             that has a number there"
        )
    } else {
        format!("the process at the other end runs as user {theirs}, this one as {ours}")
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Result of taking the beacon, for a process that has met no other one in the store's directories.
#[derive(Debug)]
pub(crate) enum TakenAddress {
    /// The beacon is this process's.
    Now(Channel),
    /// A process of this user listens there: it has the store open, and none of these directories.
    ByOwnUser,
    /// Another user's program has it, or a program that does not listen.
    ByOther,
}

/// Takes the beacon.
///
/// # Errors
/// The kernel's error, but for a name that is taken.
pub(crate) fn take(beacon: &[u8]) -> io::Result<TakenAddress> {
    match Channel::listen(beacon) {
        Ok(channel) => return Ok(TakenAddress::Now(channel)),
        Err(e) if e.kind() != io::ErrorKind::AddrInUse => return Err(e),
        Err(_) => {}
    }
    let is_own = Channel::connect(beacon).is_ok_and(|it| check_user(&it).is_ok());
    Ok(if is_own { TakenAddress::ByOwnUser } else { TakenAddress::ByOther })
}

/// The keeper's beacon, which another program may have at first.
#[derive(Debug)]
pub(crate) struct Beacon {
    name: Vec<u8>,
    channel: Option<Channel>,
    /// Time of the next try, and the pause after that one.
    next: Instant,
    pause: Duration,
    began: Instant,
    is_told: bool,
}

impl Beacon {
    pub(crate) fn new(name: Vec<u8>, channel: Option<Channel>) -> Self {
        let (now, pause) = (Instant::now(), BEACON_PAUSES.0);
        Self { name, channel, next: now, pause, began: now, is_told: false }
    }

    /// Channel on which other processes connect. `None`: the beacon is not taken yet.
    pub(crate) fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    /// Tries to take the name, if it is time to. Returns how long the keeper may sleep; `None`: as long as it wants.
    pub(crate) fn keep(&mut self) -> Option<Duration> {
        let now = Instant::now();
        if self.channel.is_none() && now >= self.next {
            self.channel = Channel::listen(&self.name).ok();
            (self.next, self.pause) = (now + self.pause, (self.pause * 2).min(BEACON_PAUSES.1));
            if self.channel.is_none() && !self.is_told && now - self.began > BEACON_TOLD_AFTER {
                self.is_told = true;
                warn_of(&self.name);
            }
        }
        self.channel.is_none().then(|| self.next.saturating_duration_since(now))
    }
}

/// A name that a dying keeper has is free sooner.
const BEACON_TOLD_AFTER: Duration = Duration::from_secs(1);

fn warn_of(name: &[u8]) {
    tracing::warn!(
        "another program has taken the name {}: earlier releases can't open the store meanwhile",
        String::from_utf8_lossy(name)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const BOUNDS: Bounds = Bounds { has_several: true, limit: Duration::MAX };

    #[test]
    fn a_name_is_read_back_unless_another_user_may_have_written_it() {
        let folder = std::env::temp_dir().join(format!("kvferry-elect-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let folders = [folder.join("none"), folder.clone()];
        assert!(announced(&folders, BOUNDS).is_empty());
        let path = folder.join(KEEPER);
        for secret in [[1, u64::MAX], [7, 9]] {
            write_name(&folder, secret).expect("written");
            assert_eq!(announced(&folders, BOUNDS), BTreeSet::from([name_of(secret)]));
            assert_eq!(path.metadata().expect("there").mode() & 0o777, 0o600);
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).expect("this user's");
        assert!(announced(&folders, BOUNDS).is_empty());
        let elsewhere = folder.join("elsewhere");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("this user's");
        fs::rename(&path, &elsewhere).expect("there");
        std::os::unix::fs::symlink(&elsewhere, &path).expect("a link");
        assert!(announced(&folders, BOUNDS).is_empty(), "a link");
        write_name(&folder, [3, 4]).expect("it replaces the link");
        assert_eq!(fs::read(&elsewhere).expect("there"), name_of([7, 9]));
        fs::write(&path, [name_of([3, 4]), b"x".to_vec()].concat()).expect("written");
        assert!(announced(&folders, BOUNDS).is_empty(), "it is no name");
        fs::remove_dir_all(&folder).expect("made above");
    }

    #[test]
    fn a_name_that_is_written_late_is_the_one_of_the_keeper_at_that_time() {
        let folder = std::env::temp_dir().join(format!("kvferry-late-name-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let folders = [folder.clone()];
        write_current(&folder, || None).expect("nothing to do");
        assert!(announced(&folders, BOUNDS).is_empty(), "the store was closed");
        let asked = std::cell::Cell::new(0);
        // Another keeper comes while the first one's name is written.
        let current = || {
            asked.set(asked.get() + 1);
            Some(if asked.get() == 1 { [1, 1] } else { [2, 2] })
        };
        write_current(&folder, current).expect("written");
        assert_eq!(announced(&folders, BOUNDS), BTreeSet::from([name_of([2, 2])]));
        fs::remove_dir_all(&folder).expect("made above");
    }

    #[test]
    fn a_pipe_in_place_of_the_name_delays_no_process() {
        let _bound = kvferry_testkit::Watchdog::new(kvferry_testkit::PATIENCE);
        let folder = std::env::temp_dir().join(format!("kvferry-pipe-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let made = std::process::Command::new("mkfifo").arg(folder.join(KEEPER)).status();
        assert!(made.is_ok_and(|status| status.success()), "mkfifo");
        assert_eq!(read_name(&folder.join(KEEPER)).expect("no fault"), None);
        fs::remove_dir_all(&folder).expect("made above");
    }

    #[test]
    fn a_beacon_counts_if_a_process_of_this_user_listens_there() {
        let name = format!("kvferry-beacon-{}", std::process::id()).into_bytes();
        let first = take(&name).expect("no fault");
        assert!(matches!(first, TakenAddress::Now(_)));
        assert!(matches!(take(&name).expect("no fault"), TakenAddress::ByOwnUser));
        let mut second = Beacon::new(name.clone(), None);
        assert!(second.keep().is_some() && second.channel().is_none());
        drop(first);
        while second.channel().is_none() {
            second.keep();
        }
        assert_eq!(second.keep(), None);
    }
}
