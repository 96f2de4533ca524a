//! A disk whose device can stop answering, or fail: a file system in memory, behind FUSE.
//!
//! [`HangingDisk::hold`] is what a device does that neither completes an operation nor fails it. Processes wait for
//! it in the kernel, and memory that a read was given is written once the device answers.
//!
//! The thread that serves the file system has file descriptors of its own. So the file system ends with the process,
//! also with one whose other threads wait for it.

mod steps;

pub use steps::DiskStep;

use kvferry_sys::sync::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Bytes of the longest write.
const WRITE_MAX: usize = 256 << 10;
/// Interval at which the thread checks whether the device answers again.
const LOOK_EVERY: Duration = Duration::from_millis(2);
const ROOT: u64 = 1;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RENAME: u32 = 12;
const FSYNC: u32 = 20;
const FSYNCDIR: u32 = 30;

/// A mounted file system. Dropping it ends all operations, with an error, and unmounts it.
#[derive(Debug)]
pub struct HangingDisk {
    at: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    is_held: AtomicBool,
    /// The device is asked for something while it is held.
    is_asked: AtomicBool,
    /// Reads, and writes past the page cache, that are to be lost.
    to_lose: AtomicUsize,
    writes_to_lose: AtomicUsize,
    /// The device is held with the renaming of a file behind so many others. The largest number: with none.
    renames: AtomicUsize,
    /// Operations that are lost until the device is released.
    lost: AtomicUsize,
    /// Error number with which writes fail. 0: they do not.
    write_error: AtomicI32,
    /// Writes that have failed so.
    failed_writes: AtomicUsize,
    /// Syncs of files, and of folders, that are to fail.
    syncs_to_fail: AtomicUsize,
    folder_syncs_to_fail: AtomicUsize,
    /// Bytes that all files may have.
    quota: AtomicU64,
    /// Steps are recorded.
    is_recorded: AtomicBool,
    steps: Mutex<Vec<DiskStep>>,
}

impl HangingDisk {
    /// Mounts an empty file system at a folder. `None`, with a line that says so, if this process may not.
    pub fn mount(at: &Path) -> Option<Self> {
        match Self::try_mount(at) {
            Ok(disk) => Some(disk),
            Err(e) => {
                println!("SKIPPED: this process can't mount a FUSE file system: {e}");
                None
            }
        }
    }

    fn try_mount(at: &Path) -> io::Result<Self> {
        let fuse = File::options().read(true).write(true).open("/dev/fuse")?;
        let fd = fuse.as_raw_fd();
        let target = CString::new(at.as_os_str().as_bytes())?;
        let data = format!("fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions");
        let data = CString::new(data)?;
        let (source, kind) = (c"kvferry-test", c"fuse");
        // SAFETY: all pointers are strings that outlive the call.
        let done = unsafe {
            libc::mount(
                source.as_ptr(),
                target.as_ptr(),
                kind.as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                data.as_ptr().cast(),
            )
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        let shared = Arc::new(Shared {
            renames: AtomicUsize::new(usize::MAX),
            quota: AtomicU64::new(u64::MAX),
            ..Shared::default()
        });
        let (tell, told) = mpsc::channel();
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name("fuse".into()).spawn(move || {
            let is_alone = keep_alone(fd);
            let is_ok = is_alone.is_ok();
            let _ = tell.send(is_alone);
            if is_ok {
                Server { fd, shared: of_thread, nodes: Nodes::new(), lost: VecDeque::new() }
                    .serve();
            }
        })?;
        let disk = Self { at: at.to_path_buf(), shared, thread: Some(thread) };
        told.recv().map_err(io::Error::other)??;
        // From here on the thread's descriptor is the only one.
        drop(fuse);
        Ok(disk)
    }

    /// Begins no operation until [`HangingDisk::release`].
    pub fn hold(&self) {
        self.shared.is_asked.store(false, SeqCst);
        self.shared.is_held.store(true, SeqCst);
    }

    /// Like [`HangingDisk::hold`], once a file is to be renamed after `renames` others were. That operation is lost.
    pub fn hold_at_rename(&self, renames: usize) {
        self.shared.renames.store(renames, SeqCst);
    }

    /// Loses the next `count` reads: they are answered after [`HangingDisk::release`]. All other operations are
    /// answered at once.
    pub fn lose_reads(&self, count: usize) {
        self.shared.to_lose.store(count, SeqCst);
    }

    /// Like [`HangingDisk::lose_reads`], for writes past the page cache. They are carried out when they are answered.
    pub fn lose_direct_writes(&self, count: usize) {
        self.shared.writes_to_lose.store(count, SeqCst);
    }

    /// Has all writes fail with `EINTR` from now on, although there is no signal.
    pub fn interrupt_writes(&self) {
        self.shared.write_error.store(libc::EINTR, SeqCst);
    }

    /// Writes that have failed with `EINTR`.
    pub fn interrupted(&self) -> usize {
        self.shared.failed_writes.load(SeqCst)
    }

    /// Has all writes fail with `EIO` until [`HangingDisk::mend`].
    pub fn fail_writes(&self) {
        self.shared.write_error.store(libc::EIO, SeqCst);
    }

    /// Has the next `count` syncs of files fail with `EIO`. Later ones succeed, as those of a kernel that has told of a
    /// failed write once.
    pub fn fail_syncs(&self, count: usize) {
        self.shared.syncs_to_fail.store(count, SeqCst);
    }

    /// Like [`HangingDisk::fail_syncs`], for syncs of folders.
    pub fn fail_syncs_of_folders(&self, count: usize) {
        self.shared.folder_syncs_to_fail.store(count, SeqCst);
    }

    /// Syncs of files that are still to fail.
    pub fn syncs_to_fail(&self) -> usize {
        self.shared.syncs_to_fail.load(SeqCst)
    }

    /// Has no further operation fail.
    pub fn mend(&self) {
        self.shared.write_error.store(0, SeqCst);
        self.shared.syncs_to_fail.store(0, SeqCst);
        self.shared.folder_syncs_to_fail.store(0, SeqCst);
    }

    /// From now on, what would give the files more than `bytes` in all fails with `EDQUOT`. The file system still says
    /// that it has room, as one with quotas of users does. A file counts with its length while it has a name.
    pub fn quota(&self, bytes: u64) {
        self.shared.quota.store(bytes, SeqCst);
    }

    /// Has the device answer everything, in the order in which it was asked.
    pub fn release(&self) {
        self.shared.to_lose.store(0, SeqCst);
        self.shared.writes_to_lose.store(0, SeqCst);
        self.shared.renames.store(usize::MAX, SeqCst);
        self.shared.is_held.store(false, SeqCst);
    }

    /// Whether an operation waits for the device that is held.
    pub fn is_asked(&self) -> bool {
        self.shared.is_asked.load(SeqCst)
    }

    /// Operations that were lost and are not answered.
    pub fn lost(&self) -> usize {
        self.shared.lost.load(SeqCst)
    }
}

impl Drop for HangingDisk {
    fn drop(&mut self) {
        self.release();
        let target = CString::new(self.at.as_os_str().as_bytes()).expect("it was mounted");
        // SAFETY: the pointer is a string that outlives the call.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_FORCE | libc::MNT_DETACH) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Gives this thread a table of descriptors of its own, with the standard ones and `fd`.
fn keep_alone(fd: RawFd) -> io::Result<()> {
    let number = u32::try_from(fd).expect("open");
    // SAFETY: the calls change the calling thread's table only, in which nothing else is used.
    let done = unsafe {
        libc::unshare(libc::CLONE_FILES) == 0
            && (number == 3 || libc::syscall(libc::SYS_close_range, 3, number - 1, 0) == 0)
            && libc::syscall(libc::SYS_close_range, number + 1, u32::MAX, 0) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[derive(Default)]
struct Node {
    /// `None`: a file.
    names: Option<BTreeMap<Vec<u8>, u64>>,
    bytes: Vec<u8>,
    mode: u32,
}

/// The node of number `n` is at `n - 1`.
struct Nodes(Vec<Node>);

type Answer = Result<Vec<u8>, i32>;

impl Nodes {
    fn new() -> Self {
        Self(vec![Node { names: Some(BTreeMap::new()), mode: 0o755, ..Node::default() }])
    }

    fn get(&mut self, number: u64) -> Result<&mut Node, i32> {
        let at = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
        at.and_then(|at| self.0.get_mut(at)).ok_or(libc::ENOENT)
    }

    fn names(&mut self, number: u64) -> Result<&mut BTreeMap<Vec<u8>, u64>, i32> {
        self.get(number)?.names.as_mut().ok_or(libc::ENOTDIR)
    }

    fn find(&mut self, parent: u64, name: &[u8]) -> Result<u64, i32> {
        self.names(parent)?.get(name).copied().ok_or(libc::ENOENT)
    }

    fn add(&mut self, parent: u64, name: &[u8], node: Node) -> Result<u64, i32> {
        let number = self.0.len() as u64 + 1;
        self.names(parent)?.insert(name.to_vec(), number);
        self.0.push(node);
        Ok(number)
    }

    /// Bytes of the files that have a name.
    fn used(&self) -> u64 {
        let named = self.0.iter().filter_map(|it| it.names.as_ref()).flat_map(BTreeMap::values);
        named.map(|number| self.0[*number as usize - 1].bytes.len() as u64).sum()
    }

    /// The bytes of a file, with zeros up to `end` at least.
    fn grown(&mut self, number: u64, end: u64, quota: u64) -> Result<&mut Vec<u8>, i32> {
        let len = self.get(number)?.bytes.len() as u64;
        if end > len && end - len > quota.saturating_sub(self.used()) {
            return Err(libc::EDQUOT);
        }
        let end = usize::try_from(end.max(len)).map_err(|_| libc::EFBIG)?;
        let bytes = &mut self.get(number)?.bytes;
        bytes.resize(end, 0);
        Ok(bytes)
    }

    fn attributes(&mut self, number: u64) -> Answer {
        let node = self.get(number)?;
        let len = node.bytes.len() as u64;
        let kind = if node.names.is_some() { libc::S_IFDIR } else { libc::S_IFREG };
        let mut out = Vec::with_capacity(88);
        for word in [number, len, len.div_ceil(512), 0, 0, 0] {
            out.extend(word.to_le_bytes());
        }
        for word in [0, 0, 0, kind | node.mode & 0o7777, 1, 0, 0, 0, 4096, 0] {
            out.extend(word.to_le_bytes());
        }
        Ok(out)
    }

    fn entry(&mut self, number: u64) -> Answer {
        let mut out = Vec::with_capacity(128);
        for word in [number, 0, 0, 0, 0] {
            out.extend(word.to_le_bytes());
        }
        out.extend(self.attributes(number)?);
        Ok(out)
    }

    fn attr_out(&mut self, number: u64) -> Answer {
        let mut out = vec![0; 16];
        out.extend(self.attributes(number)?);
        Ok(out)
    }

    fn list(&mut self, number: u64, from: u64, size: usize) -> Answer {
        let entries: Vec<_> =
            self.names(number)?.iter().map(|(name, number)| (name.clone(), *number)).collect();
        let mut out = Vec::new();
        for (at, (name, number)) in (1u64..).zip(entries).filter(|(at, _)| *at > from) {
            let kind = if self.get(number)?.names.is_some() { 4u32 } else { 8 };
            let len = (24 + name.len()).next_multiple_of(8);
            if out.len() + len > size {
                break;
            }
            let end = out.len() + len;
            out.extend(number.to_le_bytes());
            out.extend(at.to_le_bytes());
            out.extend((name.len() as u32).to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend(name);
            out.resize(end, 0);
        }
        Ok(out)
    }

    /// Carries out an operation, while all files may have `quota` bytes. The numbers are those of the kernel's `fuse.h`.
    fn carry_out(&mut self, opcode: u32, node: u64, body: &[u8], quota: u64) -> Answer {
        let word = |at| u64_at(body, at);
        match opcode {
            // LOOKUP
            1 => {
                let found = self.find(node, name_at(body, 0))?;
                self.entry(found)
            }
            // GETATTR
            3 => self.attr_out(node),
            // SETATTR
            4 => {
                let valid = u32_at(body, 0)?;
                let (size, mode) = (word(16)?, u32_at(body, 68)?);
                if valid & 8 != 0 {
                    let bytes = self.grown(node, size, quota)?;
                    bytes.truncate(usize::try_from(size).map_err(|_| libc::EFBIG)?);
                }
                if valid & 1 != 0 {
                    self.get(node)?.mode = mode;
                }
                self.attr_out(node)
            }
            // MKDIR
            9 => {
                let mode = u32_at(body, 0)?;
                let new = Node { names: Some(BTreeMap::new()), mode, ..Node::default() };
                let new = self.add(node, name_at(body, 8), new)?;
                self.entry(new)
            }
            // UNLINK and RMDIR
            10 | 11 => {
                self.names(node)?.remove(name_at(body, 0)).ok_or(libc::ENOENT)?;
                Ok(Vec::new())
            }
            // RENAME and RENAME2
            RENAME | 45 => {
                let names = if opcode == RENAME { 8 } else { 16 };
                let from = name_at(body, names).to_vec();
                let to = name_at(body, names + from.len() + 1).to_vec();
                let moved = self.names(node)?.remove(&from).ok_or(libc::ENOENT)?;
                self.names(word(0)?)?.insert(to, moved);
                Ok(Vec::new())
            }
            // LINK
            13 => {
                let linked = word(0)?;
                self.get(linked)?;
                self.names(node)?.insert(name_at(body, 8).to_vec(), linked);
                self.entry(linked)
            }
            // OPEN and OPENDIR
            14 | 27 => Ok(vec![0; 16]),
            READ => {
                let (at, size) = (word(8)? as usize, u32_at(body, 16)? as usize);
                let bytes = &self.get(node)?.bytes;
                let end = bytes.len().min(at + size);
                Ok(bytes.get(at..end).unwrap_or_default().to_vec())
            }
            WRITE => {
                let (at, size) = (word(8)? as usize, u32_at(body, 16)? as usize);
                let new = body.get(40..40 + size).ok_or(libc::EINVAL)?;
                let bytes = self.grown(node, (at + size) as u64, quota)?;
                bytes[at..at + size].copy_from_slice(new);
                Ok((size as u64).to_le_bytes().to_vec())
            }
            // STATFS
            17 => Ok(statfs_out()),
            // RELEASE, RELEASEDIR and DESTROY
            18 | FSYNC | 29 | FSYNCDIR | 38 => Ok(Vec::new()),
            // INIT
            26 => Ok(init_out()),
            // READDIR
            28 => self.list(node, word(8)?, u32_at(body, 16)? as usize),
            // CREATE
            35 => {
                let mode = u32_at(body, 4)?;
                let new = self.add(node, name_at(body, 16), Node { mode, ..Node::default() })?;
                let mut out = self.entry(new)?;
                out.extend([0; 16]);
                Ok(out)
            }
            // FALLOCATE
            43 => {
                self.grown(node, word(8)? + word(16)?, quota)?;
                Ok(Vec::new())
            }
            _ => Err(libc::ENOSYS),
        }
    }
}

/// A file system with room: `fuse_statfs_out`.
fn statfs_out() -> Vec<u8> {
    let mut out = Vec::with_capacity(80);
    for word in [1u64 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20] {
        out.extend(word.to_le_bytes());
    }
    for word in [4096u32, 255, 4096, 0] {
        out.extend(word.to_le_bytes());
    }
    out.resize(80, 0);
    out
}

/// What this server can do: `fuse_init_out`.
fn init_out() -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    // ASYNC_READ, BIG_WRITES, ASYNC_DIO, PARALLEL_DIROPS, MAX_PAGES
    let flags = 1 | 1 << 5 | 1 << 15 | 1 << 18 | 1 << 22;
    for word in [7u32, 31, 128 << 10, flags] {
        out.extend(word.to_le_bytes());
    }
    out.extend([64u16, 48].map(u16::to_le_bytes).concat());
    out.extend((WRITE_MAX as u32).to_le_bytes());
    out.extend(1u32.to_le_bytes());
    out.extend(((WRITE_MAX / 4096) as u16).to_le_bytes());
    out.resize(64, 0);
    out
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, i32> {
    let word = bytes.get(at..at + 8).and_then(|it| it.try_into().ok());
    word.map(u64::from_le_bytes).ok_or(libc::EINVAL)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, i32> {
    let word = bytes.get(at..at + 4).and_then(|it| it.try_into().ok());
    word.map(u32::from_le_bytes).ok_or(libc::EINVAL)
}

/// A name that ends with a zero.
fn name_at(bytes: &[u8], at: usize) -> &[u8] {
    let rest = bytes.get(at..).unwrap_or_default();
    rest.split(|byte| *byte == 0).next().unwrap_or_default()
}

struct Server {
    fd: RawFd,
    shared: Arc<Shared>,
    nodes: Nodes,
    lost: VecDeque<Vec<u8>>,
}

impl Server {
    fn serve(&mut self) {
        let mut buffer = vec![0; WRITE_MAX + (64 << 10)];
        loop {
            let is_asked = self.is_asked();
            if self.shared.is_held.load(SeqCst) {
                // Not even read: what is written is not copied before the device answers.
                self.shared.is_asked.store(is_asked, SeqCst);
                thread::sleep(LOOK_EVERY);
                continue;
            }
            if self.to_lose(READ) + self.to_lose(WRITE) == 0 {
                while let Some(request) = self.lost.pop_front() {
                    self.answer(&request);
                    self.shared.lost.store(self.lost.len(), SeqCst);
                }
            }
            if !is_asked {
                continue;
            }
            // SAFETY: the buffer outlives the call, and its length is given.
            let len = unsafe { libc::read(self.fd, buffer.as_mut_ptr().cast(), buffer.len()) };
            let Ok(len) = usize::try_from(len) else {
                match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => continue,
                    // ENODEV: it was unmounted.
                    _ => break,
                }
            };
            let request = &buffer[..len];
            match u32_at(request, 4) {
                // FORGET, INTERRUPT and BATCH_FORGET have no answer.
                Ok(2 | 36 | 42) | Err(_) => {}
                Ok(RENAME) if self.is_last_rename() => {
                    self.lost.push_back(request.to_vec());
                    self.shared.lost.store(self.lost.len(), SeqCst);
                    self.shared.is_held.store(true, SeqCst);
                }
                Ok(opcode) if self.loses(opcode, request) => {
                    self.lost.push_back(request.to_vec());
                    self.shared.lost.store(self.lost.len(), SeqCst);
                }
                Ok(_) => {
                    let request = request.to_vec();
                    self.answer(&request);
                }
            }
        }
        // SAFETY: the thread's own descriptor, which nothing uses any more.
        unsafe { libc::close(self.fd) };
    }

    /// Whether the device is to be held with this renaming.
    fn is_last_rename(&self) -> bool {
        let next =
            |left: usize| (left < usize::MAX).then(|| left.checked_sub(1).unwrap_or(usize::MAX));
        self.shared.renames.fetch_update(SeqCst, SeqCst, next) == Ok(0)
    }

    /// Number of operations of a kind to lose.
    fn to_lose(&self, opcode: u32) -> usize {
        match opcode {
            READ => self.shared.to_lose.load(SeqCst),
            WRITE => self.shared.writes_to_lose.load(SeqCst),
            _ => 0,
        }
    }

    /// Whether an operation is to be lost.
    fn loses(&self, opcode: u32, request: &[u8]) -> bool {
        // Behind the header: how the file was opened.
        let is_direct = || u32_at(request, 40 + 32).is_ok_and(|it| it & libc::O_DIRECT as u32 != 0);
        self.lost.len() < self.to_lose(opcode) && (opcode == READ || is_direct())
    }

    /// Waits a moment for a request. True if there is one, or the file system was unmounted.
    fn is_asked(&self) -> bool {
        let mut ready = libc::pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 };
        let timeout = i32::try_from(LOOK_EVERY.as_millis()).expect("short");
        // SAFETY: one entry, which outlives the call.
        unsafe { libc::poll(&raw mut ready, 1, timeout) != 0 }
    }

    /// The error with which an operation is to fail.
    fn error_of(&self, opcode: u32) -> Option<i32> {
        let is_next = |to_fail: &AtomicUsize| {
            to_fail.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
        };
        match (opcode, self.shared.write_error.load(SeqCst)) {
            (WRITE, 0) => None,
            (WRITE, errno) => {
                self.shared.failed_writes.fetch_add(1, SeqCst);
                Some(errno)
            }
            (FSYNC, _) => is_next(&self.shared.syncs_to_fail).then_some(libc::EIO),
            (FSYNCDIR, _) => is_next(&self.shared.folder_syncs_to_fail).then_some(libc::EIO),
            _ => None,
        }
    }

    fn answer(&mut self, request: &[u8]) {
        let (Ok(opcode), Ok(unique), Ok(node)) =
            (u32_at(request, 4), u64_at(request, 8), u64_at(request, 16))
        else {
            return;
        };
        let node = if opcode == 26 { ROOT } else { node };
        let answer = match self.error_of(opcode) {
            Some(errno) => Err(errno),
            None => {
                let quota = self.shared.quota.load(SeqCst);
                self.nodes.carry_out(opcode, node, &request[40..], quota)
            }
        };
        if answer.is_ok() && self.shared.is_recorded.load(SeqCst) {
            let steps = self.nodes.steps(opcode, node, &request[40..]);
            self.shared.steps.lock().extend(steps);
        }
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut out = Vec::with_capacity(16 + body.len());
        out.extend((16 + body.len() as u32).to_le_bytes());
        out.extend(error.to_le_bytes());
        out.extend(unique.to_le_bytes());
        out.extend(body);
        // Fails if who asked was killed meanwhile.
        // SAFETY: the buffer outlives the call, and its length is given.
        unsafe { libc::write(self.fd, out.as_ptr().cast(), out.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::FileExt;
    use std::time::Instant;

    #[test]
    fn files_are_kept_and_a_held_disk_answers_once_it_is_released() {
        let at = std::env::temp_dir().join(format!("kvferry-hanging-{}", std::process::id()));
        std::fs::create_dir_all(&at).expect("a folder");
        let Some(disk) = HangingDisk::mount(&at) else { return };
        let path = at.join("folder").join("file");
        std::fs::create_dir(at.join("folder")).expect("a folder");
        let mut file =
            File::options().read(true).write(true).create_new(true).open(&path).expect("new");
        file.write_all(&[7; 300_000]).expect("written");
        file.sync_all().expect("synced");
        std::fs::rename(&path, at.join("other")).expect("renamed");
        assert_eq!(std::fs::read(at.join("other")).expect("it is there"), [7; 300_000]);
        let names: Vec<_> = std::fs::read_dir(&at)
            .expect("listed")
            .map(|it| it.expect("one").file_name())
            .collect();
        assert_eq!(names, ["folder", "other"]);
        disk.hold();
        let writing = thread::spawn(move || file.write_at(&[8; 4096], 4096));
        let began = Instant::now();
        while !disk.is_asked() {
            assert!(began.elapsed() < Duration::from_secs(60), "it is asked");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!writing.is_finished());
        disk.release();
        assert_eq!(writing.join().expect("no panic").expect("written"), 4096);
        assert_eq!(std::fs::read(at.join("other")).expect("it is there")[4095..4097], [7, 8]);
        drop(disk);
        std::fs::remove_dir(&at).expect("it is empty");
    }

    #[test]
    fn writes_and_syncs_fail_as_long_and_as_often_as_they_are_to() {
        let at = std::env::temp_dir().join(format!("kvferry-failing-{}", std::process::id()));
        std::fs::create_dir_all(&at).expect("a folder");
        let Some(disk) = HangingDisk::mount(&at) else { return };
        let fails = |done: io::Result<()>| done.is_err_and(|e| e.raw_os_error() == Some(libc::EIO));
        let file = File::create_new(at.join("file")).expect("new");
        let folder = File::open(&at).expect("it is there");
        file.write_all_at(&[1; 4096], 0).expect("written");
        disk.fail_syncs(2);
        folder.sync_all().expect("only files are not synced");
        assert!(fails(file.sync_all()) && fails(file.sync_data()));
        assert_eq!(disk.syncs_to_fail(), 0);
        disk.fail_syncs_of_folders(1);
        file.sync_all().expect("only folders are not synced");
        assert!(fails(folder.sync_all()));
        folder.sync_all().expect("it was one");
        disk.fail_writes();
        assert!((0..3).all(|_| fails(file.write_all_at(&[2; 4096], 0))));
        disk.fail_syncs(1);
        disk.mend();
        file.write_all_at(&[3; 4096], 0).expect("written");
        assert_eq!(disk.syncs_to_fail(), 0);
        assert_eq!(std::fs::read(at.join("file")).expect("it is there"), [3; 4096]);
        drop((file, folder, disk));
        std::fs::remove_dir(&at).expect("it is empty");
    }

    #[test]
    fn beyond_a_quota_files_do_not_grow_until_others_are_cut_or_removed() {
        let at = std::env::temp_dir().join(format!("kvferry-quota-{}", std::process::id()));
        std::fs::create_dir_all(&at).expect("a folder");
        let Some(disk) = HangingDisk::mount(&at) else { return };
        let new = |name| File::create_new(at.join(name)).expect("new");
        let (first, second) = (new("first"), new("second"));
        let is_beyond = |done: io::Result<()>| match done {
            Ok(()) => false,
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::EDQUOT));
                true
            }
        };
        let reserve = |file: &File, len| {
            // SAFETY: the descriptor is open.
            match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        disk.quota(8192);
        reserve(&first, 4096).expect("inside");
        second.write_all_at(&[1; 4096], 0).expect("inside");
        assert!(is_beyond(reserve(&first, 4097)));
        assert!(is_beyond(second.set_len(4097)));
        assert!(is_beyond(second.write_all_at(&[2], 4096)));
        second.write_all_at(&[2], 4095).expect("it does not grow");
        first.set_len(1000).expect("it is cut");
        second.set_len(4096 + 3096).expect("inside");
        assert!(is_beyond(reserve(&first, 1001)));
        std::fs::remove_file(at.join("second")).expect("it is there");
        reserve(&first, 8192).expect("inside");
        assert!(is_beyond(reserve(&first, 8193)));
        disk.quota(u64::MAX);
        reserve(&first, 8193).expect("no quota");
        drop((first, second, disk));
        std::fs::remove_dir(&at).expect("it is empty");
    }
}
