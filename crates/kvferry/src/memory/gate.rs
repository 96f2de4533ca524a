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

use crate::reactor::now;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use crate::sync::{Arc, Mutex, Weak, hint, thread};
use kvferry_proto::{RegionId, Timestamp};

const SHUT: u64 = 1 << 63;

/// Regions that a copier is going to touch.
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
    /// Regions that a copier of these regions touches.
    pub(crate) fn of(mut regions: impl ExactSizeIterator<Item = RegionId>) -> Self {
        match (regions.len(), regions.next()) {
            (0, _) => Self::None,
            (1, Some(region)) => Self::Only(region),
            _ => Self::Any,
        }
    }

    /// Encodes the value as a word of shared memory. Region ids have 32 bits and are never zero, which leaves 0 and
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

/// The gate of one copier: odd while inside, with a bit that shuts it permanently.
#[derive(Debug, Default)]
pub struct Gate {
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

    /// Shuts the gate permanently. A copier may still be inside, for one call.
    pub fn shut(&self) {
        self.state.fetch_or(SHUT, Ordering::SeqCst);
    }

    /// Whether the gate was shut.
    pub fn is_shut(&self) -> bool {
        self.state.load(Ordering::SeqCst) & SHUT != 0
    }

    /// Whether no copier is inside and no device copy is in progress.
    pub(crate) fn is_quiet(&self) -> bool {
        self.state.load(Ordering::SeqCst) & 1 == 0 && !self.has_copies()
    }

    /// Whether a device still copies for this gate's copier. Each copy calls its waker after it has
    /// ended here.
    pub fn has_copies(&self) -> bool {
        self.pending.load(Ordering::SeqCst) > 0
    }

    /// Shuts the gate and waits until it is quiet, as the threads do that check it from time to time.
    #[cfg(test)]
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
        50..SPINS => thread::yield_now(),
        _ => thread::sleep(std::time::Duration::from_micros(50)),
    }
}

/// Number of rounds before a waiting thread sleeps and checks the time.
const SPINS: u32 = 100;

/// A copier that was inside its gate, and may still be: what it copies to or from hangs, such as a mapped
/// file whose device does not answer.
#[derive(Clone, Debug)]
pub(crate) struct Stuck {
    gate: Arc<Gate>,
    seen: u64,
}

impl Stuck {
    /// Waits until the copier has left, at most until `until`. Looks at least once.
    pub(crate) fn wait(&self, until: Timestamp) -> bool {
        let mut waits = 0;
        while !self.is_left() {
            if waits >= SPINS && now() >= until {
                return false;
            }
            back_off(&mut waits);
        }
        true
    }

    /// Whether the copier has left the gate since.
    pub(crate) fn is_left(&self) -> bool {
        // Only the sequence counts: the shut bit may be set meanwhile, and is no progress.
        self.gate.state.load(Ordering::SeqCst) & !SHUT != self.seen & !SHUT
    }
}

#[derive(Debug, Default)]
pub(crate) struct Gates(Mutex<Vec<Weak<Gate>>>);

impl Gates {
    /// A new gate of this agent.
    pub(crate) fn gate(&self) -> Arc<Gate> {
        let gate = Gate::new();
        let mut gates = self.0.lock();
        if gates.len() == gates.capacity() {
            // Amortised: before the vector doubles, dropped gates are removed.
            gates.retain(|g| g.strong_count() > 0);
        }
        gates.push(Arc::downgrade(&gate));
        gate
    }

    /// The copiers that may be inside a gate now, to touch one of these regions (`None`: any region).
    /// Every later entry sees stores made before the call. Wait for each of them with [`Stuck::wait`].
    #[must_use]
    pub(crate) fn inside(&self, regions: Option<&[RegionId]>) -> Vec<Stuck> {
        fence(Ordering::SeqCst);
        let live: Vec<Arc<Gate>> = {
            let gates = self.0.lock();
            gates.iter().filter_map(Weak::upgrade).collect()
        };
        // A gate that is gone was left before it was dropped, and what was done inside happened
        // before that.
        fence(Ordering::Acquire);
        let copier = |gate: Arc<Gate>| {
            let seen = gate.state.load(Ordering::SeqCst);
            let concerns = |them| Touches::may_be(gate.touches.load(Ordering::Acquire), them);
            let is_inside = seen & 1 == 1 && regions.is_none_or(concerns);
            is_inside.then_some(Stuck { gate, seen })
        };
        live.into_iter().filter_map(copier).collect()
    }

    /// Waits for the copiers that may be inside now; returns those that have not left by `until`.
    #[cfg(test)]
    pub(crate) fn quiesce(&self, regions: Option<&[RegionId]>, until: Timestamp) -> Vec<Stuck> {
        let mut stuck = self.inside(regions);
        stuck.retain(|copier| !copier.wait(until));
        stuck
    }

    /// Gates in use. For leak tests.
    pub(crate) fn live(&self) -> usize {
        let gates = self.0.lock();
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

    #[test]
    fn a_copier_that_does_not_leave_is_reported_when_the_time_is_over() {
        let gates = Gates::default();
        let [hangs, other] = [gates.gate(), gates.gate()];
        let inside = hangs.enter_to(Touches::Only(RegionId(7))).expect("open");
        let beside = other.enter_to(Touches::Only(RegionId(8))).expect("open");
        let stuck = gates.quiesce(Some(&[RegionId(7)]), now());
        assert!(stuck.len() == 1 && !stuck[0].is_left());
        hangs.shut();
        assert!(!stuck[0].is_left(), "a gate that is shut was not left");
        assert_eq!(gates.quiesce(None, now()).len(), 2);
        drop((inside, beside));
        assert!(stuck[0].is_left() && gates.inside(None).is_empty());
    }

    #[test]
    fn a_copier_that_has_left_is_not_reported_because_another_one_hangs() {
        let gates = Gates::default();
        let [hangs, other] = [gates.gate(), gates.gate()];
        let _inside = hangs.enter().expect("open");
        let beside = other.enter().expect("open");
        let mut seen = gates.inside(None);
        assert_eq!(seen.len(), 2);
        // It is inside again, with stores to the table seen, when its turn to be looked at comes.
        drop(beside);
        let _again = other.enter().expect("open");
        seen.retain(|copier| !copier.wait(now()));
        assert!(seen.len() == 1 && Arc::ptr_eq(&seen[0].gate, &hangs));
    }
}
