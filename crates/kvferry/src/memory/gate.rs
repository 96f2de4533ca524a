//! Stopping a copier for certain.
//!
//! Whoever moves bytes between a socket and registered memory does it in short, non-blocking
//! system calls, each inside a *gate*. Memory is given back to its owner only after every gate
//! that might have been inside was seen outside (invariant I2).
//!
//! The argument. A copier stores "inside" to its gate, then loads whether the region is alive.
//! A revoker stores "dead" to the region, then loads the gate. All four are sequentially
//! consistent, so at least one of the two sees the other's store: either the copier finds the
//! region dead and touches nothing, or the revoker finds the copier inside and waits for it to
//! come out. The next entry finds the region dead.
//!
//! A copier that knows says which region it is going to touch, before it goes inside; who takes
//! another region back need not wait for it. The revoker reads that after it found the copier
//! inside, so it is what was said for this entry, or for a later one.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use crate::sync::{Arc, Mutex, PoisonError, Weak, hint, thread};
use kvferry_proto::RegionId;

const SHUT: u64 = 1 << 63;

/// What a copier is going to touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Touches {
    /// Any region.
    #[default]
    Any,
    /// No other region than this.
    Only(RegionId),
    /// No region.
    None,
}

impl Touches {
    /// By all the regions there are.
    pub(crate) fn of(mut regions: impl ExactSizeIterator<Item = RegionId>) -> Self {
        match (regions.len(), regions.next()) {
            (0, _) => Self::None,
            (1, Some(region)) => Self::Only(region),
            _ => Self::Any,
        }
    }

    /// As a word of shared memory; ids of regions are below, and never zero.
    pub(crate) fn to_word(self) -> u64 {
        match self {
            Self::Any => 0,
            Self::Only(region) => region.0.into(),
            Self::None => u64::MAX,
        }
    }

    /// Whether what a word says may be one of these regions.
    pub(crate) fn may_be(word: u64, regions: &[RegionId]) -> bool {
        word == 0 || regions.iter().any(|region| u64::from(region.0) == word)
    }
}

/// One copier's gate: odd while inside, with a bit that shuts it for good.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: AtomicU64,
    /// [`Touches`] of the entry that comes next or is.
    touches: AtomicU64,
    /// Copies that were started and end on their own time (device memory).
    pending: AtomicUsize,
}

/// The gate is shut: the copier must not touch memory any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shut;

/// Inside the gate, until dropped.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_add(1, Ordering::Release);
    }
}

impl Gate {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Goes inside, to touch any region. A gate has one copier at a time.
    pub(crate) fn enter(&self) -> Result<Inside<'_>, Shut> {
        self.enter_to(Touches::Any)
    }

    /// Goes inside, to touch what is said. A gate has one copier at a time.
    pub(crate) fn enter_to(&self, touches: Touches) -> Result<Inside<'_>, Shut> {
        // Whoever reads this after an earlier entry knows all that was done inside of that.
        self.touches.store(touches.to_word(), Ordering::Release);
        let before = self.state.fetch_add(1, Ordering::SeqCst);
        debug_assert!(before & 1 == 0, "a gate has one copier at a time");
        let inside = Inside(self);
        if before & SHUT != 0 {
            return Err(Shut);
        }
        Ok(inside)
    }

    /// Shuts the gate for good. What is inside may still be; see [`Gate::is_quiet`].
    pub(crate) fn shut(&self) {
        self.state.fetch_or(SHUT, Ordering::SeqCst);
    }

    pub(crate) fn is_shut(&self) -> bool {
        self.state.load(Ordering::SeqCst) & SHUT != 0
    }

    /// Nobody is inside and no started copy is pending.
    pub(crate) fn is_quiet(&self) -> bool {
        self.state.load(Ordering::SeqCst) & 1 == 0 && self.pending.load(Ordering::SeqCst) == 0
    }

    /// Shuts the gate and waits until it is quiet. What is inside is one non-blocking system
    /// call of bounded size or a device's copy, so the wait is short.
    pub(crate) fn shut_and_wait(&self) {
        self.shut();
        let mut waits = 0;
        while !self.is_quiet() {
            back_off(&mut waits);
        }
    }

    pub(crate) fn copy_started(&self) {
        self.pending.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn copy_ended(&self) {
        self.pending.fetch_sub(1, Ordering::SeqCst);
    }
}

fn back_off(waits: &mut u32) {
    *waits += 1;
    match *waits {
        0..50 => hint::spin_loop(),
        50..100 => thread::yield_now(),
        _ => thread::sleep(std::time::Duration::from_micros(50)),
    }
}

/// All gates of an agent.
#[derive(Debug, Default)]
pub(crate) struct Gates(Mutex<Vec<Weak<Gate>>>);

impl Gates {
    /// A new gate of this agent.
    pub(crate) fn gate(&self) -> Arc<Gate> {
        let gate = Gate::new();
        let mut gates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if gates.len() == gates.capacity() {
            // Amortised: every doubling first drops what is gone.
            gates.retain(|g| g.strong_count() > 0);
        }
        gates.push(Arc::downgrade(&gate));
        gate
    }

    /// Waits until every copier that may have been inside when this was called has come out
    /// once. Stores made before the call are seen by every later entry.
    pub(crate) fn quiesce(&self) {
        self.quiesce_for(|_| true);
    }

    /// The same, for copiers that may touch one of these regions.
    pub(crate) fn quiesce_regions(&self, regions: &[RegionId]) {
        self.quiesce_for(|touches| Touches::may_be(touches, regions));
    }

    fn quiesce_for(&self, concerns: impl Fn(u64) -> bool) {
        fence(Ordering::SeqCst);
        let live: Vec<Arc<Gate>> = {
            let gates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            gates.iter().filter_map(Weak::upgrade).collect()
        };
        // A gate that is gone was left before, and what was done inside of it happened before.
        fence(Ordering::Acquire);
        for gate in live {
            let seen = gate.state.load(Ordering::SeqCst);
            if seen & 1 == 0 || !concerns(gate.touches.load(Ordering::Acquire)) {
                continue;
            }
            let mut waits = 0;
            // Only the sequence counts: the shut bit may come and must not look like progress.
            while gate.state.load(Ordering::SeqCst) & !SHUT == seen & !SHUT {
                back_off(&mut waits);
            }
        }
    }

    /// Gates in use. For leak tests.
    pub(crate) fn live(&self) -> usize {
        let gates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        gates.iter().filter(|g| g.strong_count() > 0).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_shut_gate_lets_nobody_in() {
        let gate = Gate::new();
        drop(gate.enter().expect("open at first"));
        gate.shut_and_wait();
        assert_eq!(gate.enter().expect_err("shut"), Shut);
        assert!(gate.is_quiet(), "a refused entry leaves the gate quiet");
    }

    #[test]
    fn a_revoker_never_overtakes_a_copier_that_saw_the_region_alive() {
        let gates = Arc::new(Gates::default());
        for _ in 0..500 {
            let alive = Arc::new(AtomicBool::new(true));
            let touched_late = Arc::new(AtomicBool::new(false));
            let returned = Arc::new(AtomicBool::new(false));
            let gate = gates.gate();
            let copier = {
                let (alive, late, returned) =
                    (alive.clone(), touched_late.clone(), returned.clone());
                std::thread::spawn(move || {
                    loop {
                        let _inside = gate.enter().expect("never shut here");
                        if !alive.load(Ordering::SeqCst) {
                            return;
                        }
                        if returned.load(Ordering::SeqCst) {
                            late.store(true, Ordering::SeqCst);
                        }
                    }
                })
            };
            std::thread::yield_now();
            alive.store(false, Ordering::SeqCst);
            gates.quiesce();
            returned.store(true, Ordering::SeqCst);
            copier.join().expect("the copier ends");
            assert!(!touched_late.load(Ordering::SeqCst));
        }
    }
}
