//! [`Files`]: moving bytes between this agent's memory and files of its host.

use super::{FileOptions, FileRegion, Storage};
use crate::agent::Agent;
use crate::error::Result;
use crate::transfer::batch::Batch;
use crate::transfer::job::{Op, TransferStats};
use crate::transfer::{Options, Transfer};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

impl Agent {
    /// Opens a range of a file as a region that batches can name as their remote side. Blocks as long as
    /// the file system does.
    ///
    /// ```
    /// use kvferry::{Access, Agent, Batch, FileOptions, Options};
    ///
    /// let agent = Agent::builder().name("offload").start()?;
    /// let pool = agent.allocate(1 << 20, Access::NONE)?;
    /// # let folder = std::env::temp_dir().join(format!("kvferry-doc-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder).expect("a folder for temporary files");
    /// let file = agent.open_file(folder.join("kv"), &FileOptions::create(1 << 20))?;
    ///
    /// // Two blocks of 64 KiB to the file, and one of them back to another place.
    /// let mut offload = Batch::new();
    /// offload.push(&pool, 0, &file.remote(), 0, 65_536)?;
    /// offload.push(&pool, 524_288, &file.remote(), 65_536, 65_536)?;
    /// agent.files().write(&offload, &Options::default())?;
    ///
    /// let mut onboard = Batch::new();
    /// onboard.push(&pool, 131_072, &file.remote(), 65_536, 65_536)?;
    /// agent.files().read(&onboard, &Options::default())?;
    /// agent.close_file(&file)?;
    /// # std::fs::remove_dir_all(&folder).expect("made above");
    /// # Ok::<(), kvferry::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Io` with the file's path; `InvalidArgument` for an empty range; `OutOfBounds` if a range to be
    /// read reaches beyond the file's end; `Unsupported` if the settings ask for io_uring and the system
    /// does not permit it.
    pub fn open_file(&self, path: impl AsRef<Path>, options: &FileOptions) -> Result<FileRegion> {
        self.storage().open(path.as_ref(), options)
    }

    /// As [`Agent::open_file`], for a descriptor, which the agent takes: a file without a name, or a
    /// device.
    ///
    /// # Errors
    /// As [`Agent::open_file`]; `AccessDenied` if the descriptor was opened for less; `InvalidArgument` if the region is to
    /// be written and the descriptor appends (`O_APPEND`).
    pub fn register_file(&self, fd: OwnedFd, options: &FileOptions) -> Result<FileRegion> {
        self.storage().adopt(fd, options)
    }

    /// Closes a file region: later transfers refuse it. Transfers that have begun keep the file open
    /// until they end.
    ///
    /// # Errors
    /// `NotRegistered` if the region is not open at this agent.
    pub fn close_file(&self, file: &FileRegion) -> Result<()> {
        self.storage().close(file)
    }

    /// The agent's files.
    pub fn files(&self) -> Files {
        Files { storage: self.storage(), _agent: self.clone() }
    }

    fn storage(&self) -> Arc<Storage> {
        self.services().get().expect("every agent has files")
    }
}

/// The files of an agent. Clones are the same. All methods may be called from any thread.
///
/// The remote side of a batch names file regions of the same agent ([`FileRegion::remote`]), the local
/// side its host memory and that of its devices. A batch may name several files. Pairs are moved in any order.
///
/// Device memory goes through the stages of its device ([`StagePool`](crate::StagePool)), of which a transfer takes eight at
/// most: the device copies some while others are written or read. Operations on a file whose device does not answer keep
/// their stages until it does.
///
/// Bytes that were written are there for every reader of the file once the transfer is done. They are on
/// the device after [`FileRegion::sync`].
///
/// A device that does not answer, such as a network file system whose server is gone, ends no transfer late.
/// But the kernel does not let go of the memory, nor, with io_uring, of the thread that started the
/// operation: `unregister` of the memory, the end of that thread, and a shutdown of the agent if it was one
/// of its threads, wait until the device answers. So an interrupt check must not unregister the memory of
/// its own transfer.
#[derive(Clone, Debug)]
pub struct Files {
    storage: Arc<Storage>,
    /// Keeps the agent's threads running.
    _agent: Agent,
}

impl Files {
    /// Writes memory to files (offload). Blocks; the calling thread does the work that does not wait for
    /// a device.
    ///
    /// After it returns, kvferry does not read the memory, unless [`Error::quiesced`](crate::Error::quiesced) is `Some(false)`:
    /// the device did not answer in time, and unregistering the memory waits for it. With a timeout of
    /// `Duration::MAX` it returns only once the device has answered, unless the agent is shut down.
    ///
    /// # Errors
    /// `Io` with the file, the offset and the number of the pair: a full disk, a device's error, the
    /// file's end. `OutOfBounds`, `AccessDenied`, `NotRegistered`, `Revoked`, `StaleIncarnation`;
    /// `Internal` with the device's error as its source if a device fails to copy its memory.
    /// `InvalidArgument` for memory of a device without an order ([`Batch::set_after`]).
    /// `Unsupported` with a notification. `Deadline`, `Interrupted`. After an
    /// error, some of the bytes may be in the file.
    pub fn write(&self, batch: &Batch, options: &Options<'_>) -> Result<TransferStats> {
        self.storage.run(Op::Write, batch, options)
    }

    /// Reads files into memory (onboard). Blocks, as [`Files::write`].
    ///
    /// # Errors
    /// As [`Files::write`].
    pub fn read(&self, batch: &Batch, options: &Options<'_>) -> Result<TransferStats> {
        self.storage.run(Op::Read, batch, options)
    }

    /// Like [`Files::write`], but returns at once. An error is the outcome of the transfer.
    pub fn write_async(&self, batch: &Batch, options: &Options<'_>) -> Transfer {
        self.storage.submit(Op::Write, batch, options)
    }

    /// Like [`Files::read`], but returns at once. An error is the outcome of the transfer.
    pub fn read_async(&self, batch: &Batch, options: &Options<'_>) -> Transfer {
        self.storage.submit(Op::Read, batch, options)
    }

    /// The engine that reads and writes files: `uring`, with the reason if memory can't be registered with it, or
    /// `posix` and the reason why it is not `uring`. `None` before the first file was opened. Text for people.
    pub fn engine(&self) -> Option<String> {
        self.storage.engine().text()
    }

    /// Operations so far whose memory was registered with io_uring. For tests and measurements.
    #[doc(hidden)]
    pub fn registered_operations(&self) -> u64 {
        self.storage.engine().registered_operations()
    }
}
