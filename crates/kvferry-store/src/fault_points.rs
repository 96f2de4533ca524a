//! Where the store reads and changes files. Tests record these steps, cut the power at each of them, and let
//! each fail (`power/`). Other builds carry them out, and nothing else.

use crate::memory::BlockMemory;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

#[cfg(test)]
pub(crate) use crate::power::recorder::Step;
#[cfg(not(test))]
pub(crate) use unrecorded::Step;

/// A step. Parts of [`Op::SyncSegment`] are steps, too.
#[derive(Clone, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests look at it"))]
pub(crate) enum Op {
    MakeDirectory(PathBuf),
    /// The file is empty, then has `len` zeros.
    Create {
        path: PathBuf,
        len: u64,
    },
    /// An existing file is opened.
    Open {
        path: PathBuf,
        to_write: bool,
    },
    Read(PathBuf),
    Write {
        path: PathBuf,
        pieces: Vec<(u64, Vec<u8>)>,
    },
    Sync(PathBuf),
    SyncDirectory(PathBuf),
    Rename {
        from: PathBuf,
        to: PathBuf,
    },
    Remove(PathBuf),
    /// A segment with its name.
    SyncSegment(PathBuf),
    /// No operation on a file: a block had to leave a store that has this file.
    Evicted(PathBuf, [u64; 2]),
}

impl Op {
    pub(crate) fn write(path: PathBuf, at: u64, bytes: &[u8]) -> Self {
        Self::Write { path, pieces: vec![(at, bytes.to_vec())] }
    }

    /// Blocks, padded to whole pages.
    pub(crate) fn write_blocks(path: PathBuf, blocks: &[(u64, BlockMemory)]) -> Self {
        let piece = |(at, memory): &(u64, BlockMemory)| {
            let mut bytes = memory.to_vec().expect("the agent allocated the memory");
            bytes.resize(bytes.len() + crate::memory::padding(memory.len()), 0);
            (*at, bytes)
        };
        Self::Write { path, pieces: blocks.iter().map(piece).collect() }
    }
}

/// Carries a step out.
pub(crate) fn step<T>(
    op: impl FnOnce() -> Op,
    run: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    let step = Step::begin(op)?;
    let outcome = run();
    step.end(outcome.is_ok());
    outcome
}

/// Returns when the names of a directory's files survive a loss of power.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    step(|| Op::SyncDirectory(path.to_path_buf()), || File::open(path)?.sync_all())
}

#[cfg(not(test))]
mod unrecorded {
    use super::Op;
    use std::io;

    /// A step that was begun and has not ended.
    #[derive(Debug)]
    pub(crate) struct Step(());

    impl Step {
        #[inline]
        #[expect(clippy::unnecessary_wraps, reason = "it fails in tests")]
        pub(crate) fn begin(_: impl FnOnce() -> Op) -> io::Result<Self> {
            Ok(Self(()))
        }

        #[inline]
        #[expect(clippy::unused_self, reason = "it ends in tests")]
        pub(crate) fn end(self, _is_ok: bool) {}
    }
}
