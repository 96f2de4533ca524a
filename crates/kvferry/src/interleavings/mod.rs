//! Models of the hand-rolled synchronisation: the real code, a few threads, every interleaving of
//! them that has at most so many preemptions. `make loom` runs them.
//!
//! Beside each model stands one that is broken on purpose and must be noticed: a model that can't
//! fail proves nothing.

mod gates;
mod jobs;
mod links;
mod reactors;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Preemptions of one interleaving: most bugs need one or two. More take minutes.
const PREEMPTIONS: usize = 4;

/// Runs `model` in all its interleavings, and says how many there were.
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
