//! Gates stop a copier for certain.
//!
//! A copier moves bytes between a socket and registered memory in short, non-blocking system calls,
//! each inside a *gate*. Memory returns to its owner only after every gate that a copier might have
//! been inside was seen empty (invariant I2).
//!
//! The argument. A copier stores "inside" to its gate, then loads whether the region is alive. A
//! revoker stores "dead" to the region, then loads the gate. All four accesses are sequentially
//! consistent, so at least one of the two sees the other's store: either the copier finds the
//! region dead and touches nothing, or the revoker finds the copier inside and waits until it has
//! left. The copier's next entry finds the region dead.
//!
//! A copier that knows which region it is going to touch stores that before it enters; a revoker of
//! another region then need not wait for it. The revoker loads this word after it found the copier
//! inside, so the word is that of this entry or of a later one.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use crate::sync::{Arc, Mutex, Weak, hint, lock, thread};
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
    /// What a copier of these regions touches.
    pub(crate) fn of(mut regions: impl ExactSizeIterator<Item = RegionId>) -> Self {
        match (regions.len(), regions.next()) {
            (0, _) => Self::None,
            (1, Some(region)) => Self::Only(region),
            _ => Self::Any,
        }
    }

    /// As a word of shared memory. Region ids have 32 bits and are never zero, which leaves 0 and
    /// `u64::MAX`.
    pub(crate) fn to_word(self) -> u64 {
        match self {
            Self::Any => 0,
            Self::Only(region) => region.0.into(),
            Self::None => u64::MAX,
        }
    }

    /// Whether a copier that stored this word may touch one of these regions.
    pub(crate) fn may_be(word: u64, regions: &[RegionId]) -> bool {
        word == 0 || regions.iter().any(|region| u64::from(region.0) == word)
    }
}

/// One copier's gate: odd while inside, with a bit that shuts it permanently.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: AtomicU64,
    /// [`Touches`] of the current or next entry.
    touches: AtomicU64,
    /// Copies that a device still performs after the copier has left the gate.
    pending: AtomicUsize,
}

/// The gate is shut: the copier must not touch memory any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shut;

/// The copier is inside the gate until this is dropped.
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

    /// Enters, to touch any region. A gate has one copier at a time.
    pub(crate) fn enter(&self) -> Result<Inside<'_>, Shut> {
        self.enter_to(Touches::Any)
    }

    /// Enters, to touch what `touches` names. A gate has one copier at a time.
    pub(crate) fn enter_to(&self, touches: Touches) -> Result<Inside<'_>, Shut> {
        // A thread that loads this word and sees an earlier entry's end also sees all that was done
        // inside that entry.
        self.touches.store(touches.to_word(), Ordering::Release);
        let before = self.state.fetch_add(1, Ordering::SeqCst);
        debug_assert!(before & 1 == 0, "a gate has one copier at a time");
        let inside = Inside(self);
        if before & SHUT != 0 {
            return Err(Shut);
        }
        Ok(inside)
    }

    /// Shuts the gate permanently. A copier may still be inside; see [`Gate::is_quiet`].
    pub(crate) fn shut(&self) {
        self.state.fetch_or(SHUT, Ordering::SeqCst);
    }

    pub(crate) fn is_shut(&self) -> bool {
        self.state.load(Ordering::SeqCst) & SHUT != 0
    }

    /// Whether no copier is inside and no device copy is in progress.
    pub(crate) fn is_quiet(&self) -> bool {
        self.state.load(Ordering::SeqCst) & 1 == 0 && !self.has_copies()
    }

    /// Whether a device still copies for this gate's copier. Each copy calls its waker after it has
    /// ended here.
    pub(crate) fn has_copies(&self) -> bool {
        self.pending.load(Ordering::SeqCst) > 0
    }

    /// Shuts the gate and waits until it is quiet. What runs inside is one non-blocking system call
    /// of bounded size or a device's copy, so the wait is short.
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

#[derive(Debug, Default)]
pub(crate) struct Gates(Mutex<Vec<Weak<Gate>>>);

impl Gates {
    /// A new gate of this agent.
    pub(crate) fn gate(&self) -> Arc<Gate> {
        let gate = Gate::new();
        let mut gates = lock(&self.0);
        if gates.len() == gates.capacity() {
            // Amortised: before the vector doubles, dropped gates are removed.
            gates.retain(|g| g.strong_count() > 0);
        }
        gates.push(Arc::downgrade(&gate));
        gate
    }

    /// Waits until every copier that may have been inside when this was called has left once. Every
    /// later entry sees stores made before the call.
    pub(crate) fn quiesce(&self) {
        self.quiesce_for(|_| true);
    }

    /// As [`Gates::quiesce`], for copiers that may touch one of these regions only.
    pub(crate) fn quiesce_regions(&self, regions: &[RegionId]) {
        self.quiesce_for(|touches| Touches::may_be(touches, regions));
    }

    fn quiesce_for(&self, concerns: impl Fn(u64) -> bool) {
        fence(Ordering::SeqCst);
        let live: Vec<Arc<Gate>> = {
            let gates = lock(&self.0);
            gates.iter().filter_map(Weak::upgrade).collect()
        };
        // A gate that is gone was left before it was dropped, and what was done inside happened
        // before that.
        fence(Ordering::Acquire);
        for gate in live {
            let seen = gate.state.load(Ordering::SeqCst);
            if seen & 1 == 0 || !concerns(gate.touches.load(Ordering::Acquire)) {
                continue;
            }
            let mut waits = 0;
            // Only the sequence counts: the shut bit may be set meanwhile, and is no progress.
            while gate.state.load(Ordering::SeqCst) & !SHUT == seen & !SHUT {
                back_off(&mut waits);
            }
        }
    }

    /// Gates in use. For leak tests.
    pub(crate) fn live(&self) -> usize {
        let gates = lock(&self.0);
        gates.iter().filter(|g| g.strong_count() > 0).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shut_gate_refuses_its_copier() {
        let gate = Gate::new();
        drop(gate.enter().expect("open at first"));
        gate.shut_and_wait();
        assert_eq!(gate.enter().expect_err("shut"), Shut);
        assert!(gate.is_quiet(), "a refused entry leaves the gate quiet");
    }
}
