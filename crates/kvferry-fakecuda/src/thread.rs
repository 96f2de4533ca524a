//! What the driver keeps for each host thread.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHashMap;

use crate::abi::CAPTURE_GLOBAL;
use crate::races::Point;

static NEXT: AtomicU64 = AtomicU64::new(1);

#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) id: u64,
    /// Handles of contexts, the current one last.
    pub(crate) contexts: Vec<usize>,
    pub(crate) capture_mode: c_int,
    /// The operation whose host function this thread runs.
    pub(crate) callback: Option<Arc<Point>>,
    /// Calls that this thread has made, by symbol.
    pub(crate) calls: FxHashMap<&'static str, u64>,
}

thread_local! {
    static LOCAL: RefCell<Local> = RefCell::new(Local {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        contexts: Vec::new(),
        capture_mode: CAPTURE_GLOBAL,
        callback: None,
        calls: FxHashMap::default(),
    });
}

/// Runs `f` on the calling thread's state. `f` must not come back here.
pub(crate) fn with<T>(f: impl FnOnce(&mut Local) -> T) -> T {
    LOCAL.with_borrow_mut(f)
}
