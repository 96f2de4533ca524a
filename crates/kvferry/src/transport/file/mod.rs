//! Files: batches between this agent's memory and files of its host.
//!
//! There is no peer. The transport has one [`Link`] of its own, whose only route is
//! [`FileRoute`](route::FileRoute); a batch's remote side names file regions ([`FileRegion`]).
//!
//! A share ([`share`]) cuts a batch into operations of bounded size and keeps a queue of them full.
//! Queues ([`queue`]) come from one of two engines ([`engine`]): io_uring, or threads that call `pread` and
//! `pwrite`. Both pass the conformance tests in `tests/integration/file.rs`. Transfers that write through the page cache
//! go to the threads in any case.
//!
//! Host memory is read and written in place. Device memory goes through the stages of its device ([`staged`]).
//!
//! Ownership: an operation holds its memory ([`Memory`](queue::Memory)) and its file until
//! the kernel has completed it, even if no caller waits for the transfer. So a transfer can end at its
//! deadline although the device does not answer; unregistering the memory then waits for the device.
//!
//! Memory and files that are used often are registered with io_uring, for operations past the page cache.
//! A registration belongs to the region, as a [key](crate::memory::user::RegionKey) of it, or to the file
//! ([`kvferry_sys::pins`]): `unregister` waits until no operation holds the memory and takes its registrations back, and a region that is dropped does so before its
//! memory is unmapped. It is made while an operation holds the memory, so none follows.
//!
//! Wake-up: a queue has a descriptor that is readable while there are completions. A blocking caller
//! waits for it in `poll`, a thread of the agent in `epoll`.
//!
//! Past the page cache: a file may be open twice. The pages that a range covers whole go past the page
//! cache if the memory is aligned as the file system asks; the rest goes through it. The two never
//! share a page.

mod engine;
mod files;
mod filled;
mod posix;
mod queue;
mod region;
mod route;
mod share;
mod staged;
mod targets;

pub use files::Files;
pub use region::{DirectIo, FileOptions, FileRegion};

use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Arc;
use crate::transfer::batch::Batch;
use crate::transfer::drive;
use crate::transfer::edges;
use crate::transfer::job::{Job, Op, TransferStats};
use crate::transfer::kind::{Capabilities, Fence, Transport, TransportKind};
use crate::transfer::link::{Backend, Link};
use crate::transfer::{Options, Transfer};
use crate::transport::service::{Service, Start, Startup};
use crate::transport::settings::TransportSetting;
use engine::Engine;
use kvferry_proto::{Incarnation, RegionId};
use region::Table;
use route::FileRoute;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

/// The transport; stateless.
#[derive(Clone, Copy)]
pub(crate) struct File;

impl File {
    pub(crate) const KIND: TransportKind = TransportKind::new("file");
}

impl Transport for File {
    fn kind(&self) -> TransportKind {
        Self::KIND
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            write_fence: Fence::Local,
            read_fence: Fence::Local,
            notifications: false,
            checksums: false,
        }
    }
}

static ENGINE: TransportSetting = TransportSetting::new(
    "file_engine",
    Some("KVFERRY_FILE_ENGINE"),
    "how files are read and written: `uring`, `posix` (threads), `auto` (io_uring where the system permits it). \
     Transfers that write through the page cache always go to the threads: io_uring would let one wait for another device",
    engine::AUTO,
    engine::parse,
);

impl Start for File {
    fn settings(&self) -> &'static [TransportSetting] {
        std::slice::from_ref(&ENGINE)
    }

    fn start(&self, cx: &Startup<'_>) -> Result<Arc<dyn Service>> {
        Ok(Arc::new(Storage::new(cx)))
    }
}

/// The files of an agent. Nothing is started before the first file is opened.
#[derive(Debug)]
pub(crate) struct Storage {
    link: Arc<Link>,
    shared: Arc<Shared>,
}

/// State of the agent that the shares of transfers use.
#[derive(Debug)]
struct Shared {
    table: Table,
    engine: Engine,
}

impl Service for Storage {}

impl Storage {
    fn new(cx: &Startup<'_>) -> Self {
        let core = Arc::clone(cx.core);
        let shared = Arc::new(Shared {
            table: Table::default(),
            engine: Engine::new(cx.settings.value(&ENGINE)),
        });
        let link = Link::new(core, "files".to_owned(), cx.local_addr, Arc::new(NoPeer), 1);
        link.add_route(Arc::new(FileRoute(Arc::clone(&shared))));
        Self { link, shared }
    }

    /// Opens a range of the file at `path`.
    pub(crate) fn open(&self, path: &Path, options: &FileOptions) -> Result<FileRegion> {
        self.shared.table.open(self.new_id()?, path, options)
    }

    /// Takes a range of an open file.
    pub(crate) fn adopt(&self, fd: OwnedFd, options: &FileOptions) -> Result<FileRegion> {
        self.shared.table.adopt(self.new_id()?, fd, options)
    }

    /// Closes a region; later transfers refuse it.
    pub(crate) fn close(&self, file: &FileRegion) -> Result<()> {
        self.link.core.check()?;
        self.shared.table.close(file)
    }

    /// The names of a new region, once the engine can be used.
    fn new_id(&self) -> Result<(Incarnation, FileId)> {
        let core = &self.link.core;
        core.check()?;
        self.shared.engine.choose()?;
        Ok((core.incarnation, core.memory.regions.next_id()?))
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.shared.engine
    }

    /// Moves a batch on the caller's thread.
    pub(crate) fn run(
        &self,
        op: Op,
        batch: &Batch,
        options: &Options<'_>,
    ) -> Result<TransferStats> {
        self.check(batch, options)?;
        let job = self.job(op, batch, options);
        if batch.is_empty() {
            job.finish(Ok(nothing()));
            return Ok(nothing());
        }
        if !edges::have_happened(&job, options.interrupt) {
            return drive::outcome(&job, options.interrupt);
        }
        drive::run(&job, &self.link, options.interrupt)
    }

    /// Moves a batch on the agent's threads. An error is the transfer's outcome.
    pub(crate) fn submit(&self, op: Op, batch: &Batch, options: &Options<'_>) -> Transfer {
        let job = self.job(op, batch, options);
        match self.check(batch, options) {
            Err(e) => job.finish(Err(e)),
            Ok(()) if batch.is_empty() => job.finish(Ok(nothing())),
            Ok(()) => {
                let (submitted, link) = (Arc::clone(&job), Arc::clone(&self.link));
                edges::when_happened(&job, move || drive::submit(&submitted, &link));
            }
        }
        Transfer(job)
    }

    fn job(&self, op: Op, batch: &Batch, options: &Options<'_>) -> Arc<Job> {
        let core = &self.link.core;
        let timeout = options.timeout.unwrap_or(core.settings.timeout);
        Arc::new(Job::new(Arc::clone(core), op, batch.clone(), None, timeout, None))
    }

    /// Refuses what can be refused before anything is read or written.
    fn check(&self, batch: &Batch, options: &Options<'_>) -> Result<()> {
        let core = &self.link.core;
        core.check()?;
        if options.notify.is_some() {
            let what = "transfers with files carry no notification: a file has no agent behind it";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        match batch.incarnation {
            Some(named) if named != core.incarnation => Err(Error::new(
                ErrorKind::StaleIncarnation,
                "the batch names regions of another agent, or of an earlier one",
            )
            .with("named", named)),
            _ => batch.local.check_order(),
        }
    }
}

fn nothing() -> TransferStats {
    TransferStats { bytes: 0, descriptors: 0, streams: 0, transport: None }
}

/// The backend of the link to files, which have no peer that could be asked.
struct NoPeer;

impl Backend for NoPeer {
    fn open_lane(&self, _: &Arc<Link>) {}

    fn wake(&self, _: &Core) {}

    fn regions(
        &self,
        _: &Arc<Link>,
        _: Duration,
    ) -> Result<Vec<crate::memory::region::RemoteRegion>> {
        Ok(Vec::new())
    }

    fn probe(&self, _: &Arc<Link>, _: Duration) -> Result<Duration> {
        Ok(Duration::ZERO)
    }
}

/// The number of a file region: from the same counter as those of memory, so that neither can be
/// taken for the other.
pub(crate) type FileId = RegionId;
