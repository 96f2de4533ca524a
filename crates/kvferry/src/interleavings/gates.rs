//! Memory returns to its owner only when no copier can touch it any more (invariant I2).
//!
//! Gates outlive their threads here: loom does not model the counts of an `Arc`, by which
//! `Gates::quiesce` skips a gate that is gone.

use super::explore;
use crate::memory::Access;
use crate::memory::gate::{Gate, Gates, Touches};
use crate::memory::region::Backing;
use crate::sync::Mutant;
use crate::sync::atomic::{AtomicBool, Ordering};
use kvferry_proto::{Incarnation, RegionId, Timestamp};
use loom::cell::UnsafeCell;
use loom::thread;
use std::sync::Arc;

/// The memory of an owner: loom panics if a copier touches it at the same time as its owner.
#[derive(Debug)]
struct Memory(UnsafeCell<u32>);

impl Memory {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    fn touch(&self) {
        self.0.with(|memory| {
            // SAFETY: the cell is alive; the model proves that no thread writes it now.
            assert_eq!(unsafe { *memory }, 0, "touched after it was returned to its owner");
        });
    }

    fn give_back(&self) {
        self.0.with_mut(|memory| {
            // SAFETY: the cell is alive; the model proves that no thread reads it now.
            unsafe { *memory = 1 };
        });
    }
}

// SAFETY: loom checks whether threads touch the cell at the same time.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

/// Touches the memory inside the gate, if it is alive.
const NEVER: Timestamp = Timestamp::from_nanos(u64::MAX);

fn touch_if_alive(gate: &Gate, touches: Touches, alive: &AtomicBool, memory: &Memory) {
    let inside = gate.enter_to(touches).expect("never shut here");
    if alive.load(Ordering::SeqCst) {
        memory.touch();
    }
    drop(inside);
}

fn unregister_against_two_copies() {
    let gates = Arc::new(Gates::default());
    let (memory, alive) = (Memory::new(), Arc::new(AtomicBool::new(true)));
    let copier = {
        let (gate, memory, alive) = (gates.gate(), Arc::clone(&memory), Arc::clone(&alive));
        thread::spawn(move || {
            for _ in 0..2 {
                touch_if_alive(&gate, Touches::Any, &alive, &memory);
            }
            gate
        })
    };
    alive.store(false, Ordering::SeqCst);
    let stuck = gates.quiesce(None, NEVER);
    assert!(stuck.is_empty());
    memory.give_back();
    drop(copier.join().expect("the copier ends"));
}

#[test]
fn loom_i2_unregister_returns_when_no_copier_touches_the_memory() {
    explore(unregister_against_two_copies);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_noticed_unregister_with_a_weaker_order() {
    Mutant::WeakOrder.enable();
    explore(unregister_against_two_copies);
}

#[test]
fn loom_i2_the_real_table_of_regions_quiesces_its_copiers() {
    explore(|| {
        let core = super::bare();
        let memory = Memory::new();
        let region = core
            .memory
            .regions
            .insert(Incarnation(7), 0x1000, 16, Access::READ_WRITE, Backing::Borrowed)
            .expect("the first region overlaps none");
        let copier = {
            let (gate, memory, region) =
                (core.memory.gates.gate(), Arc::clone(&memory), region.clone());
            thread::spawn(move || {
                let inside = gate.enter().expect("never shut here");
                if region.0.is_alive() {
                    memory.touch();
                }
                drop(inside);
                gate
            })
        };
        core.memory.regions.remove(&region).expect("registered");
        let stuck = core.memory.gates.quiesce(None, NEVER);
        assert!(stuck.is_empty());
        memory.give_back();
        drop(copier.join().expect("the copier ends"));
    });
}

#[test]
fn loom_i2_a_copier_that_comes_while_others_are_waited_for_finds_the_memory_gone() {
    explore(|| {
        let gates = Arc::new(Gates::default());
        let (memory, alive) = (Memory::new(), Arc::new(AtomicBool::new(true)));
        let copier = {
            let (gates, memory, alive) =
                (Arc::clone(&gates), Arc::clone(&memory), Arc::clone(&alive));
            thread::spawn(move || {
                let gate = gates.gate();
                touch_if_alive(&gate, Touches::Any, &alive, &memory);
                gate
            })
        };
        alive.store(false, Ordering::SeqCst);
        let stuck = gates.quiesce(None, NEVER);
        assert!(stuck.is_empty());
        memory.give_back();
        drop(copier.join().expect("the copier ends"));
    });
}

/// A copier that touches this region and then another one, and a revoke of the first.
fn unregister_against_a_copier_that_names_its_region() {
    let gates = Arc::new(Gates::default());
    let (memory, alive) = (Memory::new(), Arc::new(AtomicBool::new(true)));
    let (ours, other) = (RegionId(1), RegionId(2));
    let copier = {
        let (gate, memory, alive) = (gates.gate(), Arc::clone(&memory), Arc::clone(&alive));
        thread::spawn(move || {
            touch_if_alive(&gate, Touches::Only(ours), &alive, &memory);
            drop(gate.enter_to(Touches::Only(other)).expect("never shut here"));
            gate
        })
    };
    alive.store(false, Ordering::SeqCst);
    let stuck = gates.quiesce(Some(&[ours]), NEVER);
    assert!(stuck.is_empty());
    memory.give_back();
    drop(copier.join().expect("the copier ends"));
}

#[test]
fn loom_i2_who_takes_a_region_back_waits_for_those_who_touch_it() {
    explore(unregister_against_a_copier_that_names_its_region);
}

fn revoke_against_two_copies() {
    let gate = Gate::new();
    let memory = Memory::new();
    let copier = {
        let (gate, memory) = (Arc::clone(&gate), Arc::clone(&memory));
        thread::spawn(move || {
            for _ in 0..2 {
                let Ok(inside) = gate.enter() else { return };
                memory.touch();
                drop(inside);
            }
        })
    };
    gate.shut_and_wait();
    memory.give_back();
    copier.join().expect("the copier ends");
    assert!(gate.is_quiet() && gate.is_shut());
}

#[test]
fn loom_i2_a_shut_gate_is_quiet_and_stays_so() {
    explore(revoke_against_two_copies);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_noticed_a_gate_that_orders_nothing() {
    Mutant::NoOrder.enable();
    explore(revoke_against_two_copies);
}

fn revoke_against_a_device() {
    let gate = Gate::new();
    let memory = Memory::new();
    let copier = {
        let (gate, memory) = (Arc::clone(&gate), Arc::clone(&memory));
        thread::spawn(move || {
            let Ok(inside) = gate.enter() else { return };
            gate.copy_started();
            drop(inside);
            // The device copies at any time.
            memory.touch();
            gate.copy_ended();
        })
    };
    gate.shut_and_wait();
    memory.give_back();
    copier.join().expect("the copier ends");
}

#[test]
fn loom_i2_a_revoke_waits_for_copies_that_a_device_was_told_to_make() {
    explore(revoke_against_a_device);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_noticed_a_count_of_copies_that_orders_nothing() {
    Mutant::NoOrder.enable();
    explore(revoke_against_a_device);
}
