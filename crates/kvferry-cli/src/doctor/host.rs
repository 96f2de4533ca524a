//! Input of the doctor: files of the kernel, under a root that tests replace, and results of live checks.

use std::fs;
use std::path::PathBuf;

use kvferry_sys::net::InterfaceAddress;
use rustix::io::Errno;

use super::helper::{self, CudaFound, Library, VerbsFound};

/// The kernel's files.
#[derive(Debug)]
pub(super) struct Host {
    root: PathBuf,
}

impl Host {
    pub(super) fn at(root: impl Into<PathBuf>) -> Host {
        Host { root: root.into() }
    }

    /// A file's content without white space around it; none if it can't be read.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    pub(super) fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.root.join(path).symlink_metadata().is_ok()
    }

    /// Names in a directory, in order.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Target of a link.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.root.join(path)).ok()?;
        Some(target.to_string_lossy().into_owned())
    }

    /// A line `name: value` of a file of this process.
    pub(super) fn status(&self, name: &str) -> Option<String> {
        let status = self.text("proc/self/status")?;
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.map(|value| value.trim().to_owned())
    }

    /// The choice in brackets: `always [madvise] never`.
    pub(super) fn chosen(&self, path: &str) -> Option<String> {
        let text = self.text(path)?;
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }
}

pub(super) type Tried = Result<(), Errno>;

/// Answers of the kernel and of the libraries.
#[derive(Debug, Clone)]
pub(super) struct Tries {
    pub(super) kernel: String,
    pub(super) c_library: String,
    pub(super) cores: usize,
    pub(super) pidfd: Tried,
    pub(super) memfd: Tried,
    pub(super) io_uring: Tried,
    /// A process reads memory of the one that started it, as unrelated processes would.
    pub(super) read_unrelated: Result<(), String>,
    /// A process reads memory of one that it started.
    pub(super) read_child: Result<(), String>,
    /// Bytes that may be locked, none for no limit; the same for open files.
    pub(super) memlock: Option<u64>,
    pub(super) open_files: Option<u64>,
    pub(super) addresses: Vec<InterfaceAddress>,
    pub(super) verbs: Library<VerbsFound>,
    pub(super) cuda: Library<CudaFound>,
    pub(super) cufile: Library<Option<u32>>,
}

impl Tries {
    pub(super) fn here(tries_gpus: bool) -> Tries {
        use rustix::fs::MemfdFlags;
        use rustix::process::{PidfdFlags, Resource, getpid, getrlimit, pidfd_open};
        let errno = |e: std::io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
        let libraries = helper::start_libraries(tries_gpus);
        let (read_unrelated, read_child) = helper::read_each_other();
        let (verbs, cuda, cufile) = libraries.answers();
        Tries {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            c_library: kvferry_sys::probe::c_library(),
            cores: kvferry_bench::machine::cpus(),
            pidfd: pidfd_open(getpid(), PidfdFlags::empty()).map(drop),
            memfd: rustix::fs::memfd_create("kvferry-doctor", MemfdFlags::CLOEXEC).map(drop),
            io_uring: kvferry_sys::probe::io_uring().map_err(errno),
            read_unrelated,
            read_child,
            memlock: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).current,
            addresses: kvferry_sys::net::interface_addresses().unwrap_or_default(),
            verbs,
            cuda,
            cufile,
        }
    }
}
