//! Files: batches between this agent's memory and files of its host.
//!
//! There is no peer. The transport has one [`Link`] of its own, whose only route is
//! [`FileRoute`](route::FileRoute); a batch's remote side names file regions ([`FileRegion`]).
//!
//! A share ([`share`]) cuts a batch into operations of bounded size and keeps a queue of them full.
//! Queues come from one of two engines ([`engine`]): io_uring, or threads that call `pread` and
//! `pwrite`. Both pass the conformance tests in `tests/file.rs`.
//!
//! Ownership: an operation holds its memory ([`Held`](crate::memory::held::Held)) and its file until
//! the kernel has completed it, even if no caller waits for the transfer. So a transfer can end at its
//! deadline although the device does not answer; unregistering the memory then waits for the device.
//!
//! Memory and files that are used often are registered with io_uring, for operations past the page cache.
//! A registration belongs to the region or the file ([`kvferry_sys::pins`]): `unregister` waits until no operation
//! holds the memory and takes its registrations back, and a region that is dropped does so before its
//! memory is unmapped. It is made while an operation holds the memory, so none follows.
//!
//! Wake-up: a queue has a descriptor that is readable while there are completions. A blocking caller
//! waits for it in `poll`, a thread of the agent in `epoll`.
//!
//! Past the page cache: a file may be open twice. The pages that a range covers whole go past the page
//! cache if the memory is aligned as the file system asks; the rest goes through it. The two never
//! share a page.

mod engine;
mod posix;
mod region;
mod route;
mod share;

pub use engine::FileEngine;
pub use region::{DirectIo, FileOptions, FileRegion};

use crate::core::Core;
use crate::error::Result;
use crate::sync::Arc;
use crate::transfer::kind::{Capabilities, Fence, Transport, TransportKind};
use crate::transfer::link::{Backend, Link};
use crate::transport::service::{Service, Start, Startup};
use engine::Engine;
use kvferry_proto::RegionId;
use region::Table;
use route::FileRoute;
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

impl Start for File {
    fn start(&self, cx: &Startup<'_>) -> Result<Box<dyn Service>> {
        Ok(Box::new(Storage::new(cx)))
    }
}

/// The files of an agent. Nothing is started before the first file is opened.
#[derive(Debug)]
pub(crate) struct Storage {
    pub(crate) link: Arc<Link>,
    pub(crate) shared: Arc<Shared>,
}

/// State of the agent that the shares of transfers use.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) table: Table,
    pub(crate) engine: Engine,
}

impl Storage {
    fn new(cx: &Startup<'_>) -> Self {
        let core = Arc::clone(cx.core);
        let shared = Arc::new(Shared {
            table: Table::default(),
            engine: Engine::new(cx.config.file_engine),
        });
        let link = Link::new(core, "files".to_owned(), cx.local_addr, Arc::new(NoPeer), 1);
        link.add_route(Arc::new(FileRoute(Arc::clone(&shared))));
        Self { link, shared }
    }
}

impl Service for Storage {
    fn storage(&self) -> Option<&Storage> {
        Some(self)
    }
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
