//! The suite fails every transport that breaks a promise, and says which.

use kvferry_testkit::broken::{Fault, InMemory};
use kvferry_testkit::slow::DeviceFault;
use kvferry_testkit::suite::{SCENARIOS, Scenario};
use kvferry_testkit::{AgentFabric, Effort, Fabric, FileFabric, MemoryKind, PATIENCE};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The time after which a scenario is given up whose transport may be stuck.
const LIMIT: Duration = Duration::from_secs(25);

/// The scenarios that notice a fault, and what they say.
fn caught_by(fault: Fault, scenarios: &[&'static Scenario]) -> BTreeMap<&'static str, String> {
    let fabric: Arc<dyn Fabric> = Arc::new(InMemory::broken(fault));
    let limit = if fault.hangs() { LIMIT } else { PATIENCE };
    let runs: Vec<_> =
        scenarios.iter().flat_map(|s| MemoryKind::ALL.map(|kind| (*s, kind))).collect();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..6)
            .map(|_| {
                scope.spawn(|| {
                    let mut caught = Vec::new();
                    while let Some((scenario, kind)) =
                        runs.get(next.fetch_add(1, Ordering::Relaxed))
                    {
                        if let Err(violation) = scenario.run_within(&fabric, *kind, limit) {
                            caught.push((scenario.name, violation.to_string()));
                        }
                    }
                    caught
                })
            })
            .collect();
        workers.into_iter().flat_map(|w| w.join().expect("no panic escapes a scenario")).collect()
    })
}

#[test]
fn every_fault_is_caught_by_the_promise_it_breaks() {
    let next = AtomicUsize::new(0);
    let missed: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..6)
            .map(|_| {
                scope.spawn(|| {
                    let mut missed = Vec::new();
                    while let Some(&fault) = Fault::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
                        missed.extend((!is_caught(fault)).then_some(fault));
                    }
                    missed
                })
            })
            .collect();
        workers.into_iter().flat_map(|w| w.join().expect("no panic escapes a scenario")).collect()
    });
    assert!(missed.is_empty(), "the suite does not notice, or not for the reason: {missed:?}");
}

#[test]
fn every_fault_of_a_device_is_caught_by_the_promise_it_breaks() {
    let agents = |transports| -> Arc<dyn Fabric> {
        Arc::new(AgentFabric { effort: Effort::Brief, ..AgentFabric::new(transports) })
    };
    let files = |engine| -> Arc<dyn Fabric> { Arc::new(FileFabric { engine }) };
    for fabric in [agents("tcp"), agents("local,tcp"), files("auto"), files("posix")] {
        for fault in DeviceFault::ALL {
            println!("{fault:?} over {}: {}", fabric.name(), fault.found_in(&fabric));
        }
    }
}

#[test]
fn a_transfer_over_another_transport_than_the_fabric_says_is_noticed() {
    // The agents take `local`, the fastest.
    let says_tcp = AgentFabric { effort: Effort::Brief, ..AgentFabric::new("tcp,local") };
    let fabric: Arc<dyn Fabric> = Arc::new(says_tcp);
    let scenario = Scenario::named("every_byte_lands_and_nothing_else").expect("its name");
    let violation = scenario.run_within(&fabric, MemoryKind::Host, PATIENCE);
    let violation = violation.expect_err("the bytes go over local").to_string();
    assert!(violation.contains("not over tcp"), "{violation}");
}

fn is_caught(fault: Fault) -> bool {
    let scenario = Scenario::named(fault.breaks()).expect("a fault names a scenario");
    let began = Instant::now();
    let caught = caught_by(fault, &[scenario]);
    let mut line = format!("{fault:?}");
    for (name, violation) in &caught {
        line += &format!("\n    {name}: {violation}");
    }
    println!("{line}\n    after {:.1?}", began.elapsed());
    // A wrong transport should be told what is wrong; only a stuck one may be given up on.
    let given_up = caught.values().all(|v| v.contains("did not end"));
    !caught.is_empty() && (!given_up || fault.hangs())
}

#[test]
fn the_same_transport_without_a_fault_passes() {
    let fabric: Arc<dyn Fabric> = Arc::new(InMemory::brief());
    for scenario in SCENARIOS {
        for kind in MemoryKind::ALL {
            if let Err(violation) = scenario.run_within(&fabric, kind, PATIENCE) {
                panic!("{scenario:?} on {kind} memory: {violation}");
            }
        }
    }
}

#[test]
fn every_scenario_has_a_fault_that_only_it_is_for() {
    let guarded: BTreeSet<_> = Fault::ALL.iter().map(|f| f.breaks()).collect();
    let unguarded: Vec<_> = SCENARIOS.iter().filter(|s| !guarded.contains(s.name)).collect();
    println!("without a fault of their own: {unguarded:?}");
    assert!(unguarded.len() <= 6, "{unguarded:?}");
}
