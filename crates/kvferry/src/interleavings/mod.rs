//! Models of the synchronisation: the real code, a few threads, and every interleaving of them with
//! a bounded number of preemptions. `make loom` runs them.
//!
//! Each model has a counterpart that is broken on purpose and must be detected: a model proves
//! something only if it can fail.

mod gates;
mod jobs;
mod links;
mod reactors;

use crate::config::Config;
use crate::core::Core;
use crate::reactor::{Remote, Threads, now};
use crate::suspend::SuspendDetector;
use crate::users::Users;
use kvferry_proto::Incarnation;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Preemptions of one interleaving: most bugs need one or two. More take minutes.
const PREEMPTIONS: usize = 4;

/// Runs `model` in all its interleavings, and prints how many there were.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.max_branches = 20_000;
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{} interleavings", count.load(Ordering::Relaxed));
}

/// The shared state of an agent without threads and sockets, for models of its parts.
fn bare() -> Arc<Core> {
    let config = Config { streams_per_peer: Some(1), io_threads: Some(1), ..Config::default() };
    let threads =
        Threads::new(Remote::without_thread(), vec![Remote::without_thread()], Vec::new());
    let suspend = SuspendDetector::new(config.silence(), now());
    Arc::new(Core::new(
        Incarnation(7),
        config.settings(),
        config.sizing(),
        threads,
        suspend,
        Users::default(),
    ))
}
