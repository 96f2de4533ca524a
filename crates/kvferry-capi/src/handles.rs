//! Handles: numbers that stand for objects.
//!
//! A handle has the type of a pointer, so that C compilers tell an agent from a region, and is never
//! dereferenced. Its low bits say which kind of object it stands for; the rest is counted up in this
//! process and never used again.
//!
//! A forked child gets an empty table: a thread of the parent may have held the lock of the other
//! one. Numbers below the first one of the child belong to its parent.

use crate::failure::Failure;
use crate::tasks::driver::Endpoint;
use crate::tasks::end::End;
use kvferry::{Agent, Batch, FileRegion, Peer, Region, Transfer};
use kvferry_mooncake::MooncakeEngine;
use kvferry_proto::tasks::{RecvId, SendId};
use kvferry_sys::fd;
use kvferry_sys::sync::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Low bits of a handle that hold its kind.
const KIND_BITS: u32 = 4;

/// An object that handles stand for. A clone is the same object.
pub(crate) trait Object: Clone + Send + Sync + 'static {
    /// The kind, and the name of it for error texts.
    const KIND: (u64, &'static str);
    fn map(table: &Table) -> &Map<Self>;
}

type Map<T> = RwLock<HashMap<u64, T>>;

macro_rules! objects {
    ($($field:ident: $type:ty = $kind:literal $name:literal,)*) => {
        /// The objects of one process, by handle.
        #[derive(Debug, Default)]
        pub(crate) struct Table {
            pid: u32,
            forks: u32,
            first: u64,
            $($field: Map<$type>,)*
        }

        impl Table {
            fn len(&self) -> usize {
                0 $(+ self.$field.read().len())*
            }
        }

        $(impl Object for $type {
            const KIND: (u64, &'static str) = ($kind, $name);
            fn map(table: &Table) -> &Map<Self> {
                &table.$field
            }
        })*
    };
}

/// A region and the agent that it is registered with.
pub(crate) type OwnedRegion = Arc<(Agent, Region)>;
/// A file region and the agent that opened it.
pub(crate) type OwnedFile = Arc<(Agent, FileRegion)>;
/// A batch that several threads may fill.
pub(crate) type SharedBatch = Arc<Mutex<Batch>>;

/// A send, and the tasks that it belongs to.
#[derive(Clone, Debug)]
pub(crate) struct OwnedSend {
    pub(crate) owner: Arc<Endpoint>,
    pub(crate) id: SendId,
    pub(crate) end: Arc<End>,
}

/// A receive task, and the tasks that it belongs to.
#[derive(Clone, Debug)]
pub(crate) struct OwnedRecv {
    pub(crate) owner: Arc<Endpoint>,
    pub(crate) id: RecvId,
    pub(crate) end: Arc<End>,
}

objects! {
    agents: Agent = 1 "an agent",
    regions: OwnedRegion = 2 "a region",
    peers: Peer = 3 "a peer",
    batches: SharedBatch = 4 "a batch",
    transfers: Transfer = 5 "a transfer",
    files: OwnedFile = 6 "a file",
    engines: Arc<MooncakeEngine> = 7 "a transfer engine",
    tasks: Arc<Endpoint> = 8 "tasks",
    sends: OwnedSend = 9 "a send task",
    recvs: OwnedRecv = 10 "a receive task",
}

static NEXT: AtomicU64 = AtomicU64::new(1);
static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

/// The table of this process.
fn table() -> &'static Table {
    // A child in a pid namespace of its own may have its parent's number.
    let (pid, forks) = (std::process::id(), fd::forks());
    let known = TABLE.load(Ordering::Acquire);
    // SAFETY: a table is never freed: it is leaked when it is made, below.
    if let Some(table) = unsafe { known.as_ref() }
        && (table.pid, table.forks) == (pid, forks)
    {
        return table;
    }
    crate::log::prepare();
    // Without a descriptor left for it, the number of the process tells alone.
    let _ = fd::install_fork_handlers();
    let first = NEXT.load(Ordering::Relaxed);
    let fresh = Box::into_raw(Box::new(Table { pid, forks, first, ..Table::default() }));
    match TABLE.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: as above; `fresh` was just made.
        Ok(_) => unsafe { &*fresh },
        Err(other) => {
            // SAFETY: no other thread has seen `fresh`.
            drop(unsafe { Box::from_raw(fresh) });
            // SAFETY: as above; another thread of this process stored it.
            unsafe { &*other }
        }
    }
}

/// Makes a handle for an object.
pub(crate) fn add<T: Object>(object: T) -> u64 {
    let table = table();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let handle = number << KIND_BITS | T::KIND.0;
    T::map(table).write().insert(handle, object);
    handle
}

/// The object that a handle stands for.
pub(crate) fn look_up<T: Object, H>(handle: *const H) -> Result<T, Failure> {
    let table = table();
    let handle = handle.addr() as u64;
    let found = T::map(table).read().get(&handle).cloned();
    found.ok_or_else(|| unknown::<T>(table, handle))
}

/// Takes the object of a handle; from then on the handle is invalid.
pub(crate) fn take<T: Object, H>(handle: *const H) -> Result<T, Failure> {
    let table = table();
    let handle = handle.addr() as u64;
    let found = T::map(table).write().remove(&handle);
    found.ok_or_else(|| unknown::<T>(table, handle))
}

/// How many handles of this process were not freed. For tests that look for leaks.
///
/// Any thread; also after a fork.
#[unsafe(no_mangle)]
pub extern "C" fn kvferry_handles_in_use() -> usize {
    table().len()
}

fn unknown<T: Object>(table: &Table, handle: u64) -> Failure {
    let name = T::KIND.1;
    let number = handle >> KIND_BITS;
    let mask = (1 << KIND_BITS) - 1;
    if handle == 0 {
        return Failure::handle(format!("expected {name}, got NULL"));
    }
    if handle & mask != T::KIND.0 || number == 0 || number >= NEXT.load(Ordering::Relaxed) {
        return Failure::handle(format!("{handle:#x} is not the handle of {name}"));
    }
    if number < table.first {
        return Failure::forked(format!(
            "{handle:#x} is the handle of {name} in the process that forked this one"
        ));
    }
    Failure::handle(format!("the handle {handle:#x} of {name} was freed"))
}

/// A handle as C sees it.
pub(crate) fn pointer<H>(handle: u64) -> *mut H {
    std::ptr::without_provenance_mut(handle as usize)
}
