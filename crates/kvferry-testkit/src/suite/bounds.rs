//! A peer reaches only what was registered for it, and a refusal does not slow other transfers down.

use super::rig::{Rig, Side, done, ended, failed};
use crate::fabric::{Access, Aim, Fabric, Move, Region};
use crate::memory::{Memory, MemoryKind};
use crate::violation::{Violation, ensure};
use crate::watchdog::stretched;
use std::time::{Duration, Instant};

type Result<T = ()> = std::result::Result<T, Violation>;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// The longest that a healthy write may take right after a refusal.
const HEALTHY_WITHIN: Duration = Duration::from_millis(600);

/// However loaded the machine is: the fault that this finds pauses for one second.
const PENALTY: Duration = Duration::from_millis(950);

const REFUSED: [&str; 3] = ["out_of_bounds", "not_registered", "invalid_argument"];

/// Memory with a region in its middle, so that the bytes around the region are checked, too.
fn middle(rig: &Rig, side: Side, access: Access) -> Result<Region> {
    match rig.kind {
        MemoryKind::Host => {
            let memory = Memory::new(rig.kind, 192 * KIB);
            rig.register(side, &memory, 64 * KIB, 64 * KIB, access)
        }
        MemoryKind::Slow => rig.area(side, 64 * KIB, access),
    }
}

/// Moves that reach beyond the region of 64 KiB.
fn beyond(near: &Region, far: &Region) -> Vec<(String, Move)> {
    let end = far.len as u64;
    let mut cases = Vec::new();
    let mut case = |what: &str, offset: u64, len: u64, aim: Aim| {
        let mut m = Move::new(near, 0, far, 0, 0);
        (m.remote_offset, m.len, m.aim) = (offset, len, aim);
        cases.push((format!("{what}, {aim:?}"), m));
    };
    let mut aims = vec![Aim::Honest, Aim::Forged];
    if far.memory.kind() == MemoryKind::Host {
        aims.push(Aim::Address);
        case("a byte before", u64::MAX, 1, Aim::Address);
        case("across the start", 8u64.wrapping_neg(), 16, Aim::Address);
        case("far before", (40 * KIB as u64).wrapping_neg(), 4096, Aim::Address);
        let base = far.memory.span(far.offset, 1).as_ptr() as u64;
        let last = (u64::MAX - 7).wrapping_sub(base);
        case("around the end of all addresses", last, 16, Aim::Address);
        case("around the null page", 0u64.wrapping_sub(base), 64, Aim::Address);
    }
    for aim in aims {
        case("a byte after", end, 1, aim);
        case("across the end", end - 8, 16, aim);
        case("one byte too long", 0, end + 1, aim);
        case("far after", end + 40 * KIB as u64, 4096, aim);
        case("very far after", 1 << 45, 4096, aim);
    }
    case("around the end of all offsets", u64::MAX - 7, 16, Aim::Forged);
    cases
}

fn healthy(rig: &Rig, near: &Region, far: &Region, after: &str) -> Result {
    let began = Instant::now();
    rig.written(&[Move::new(near, 0, far, 0, 4096)], &format!("a healthy write after {after}"))?;
    let took = began.elapsed();
    let allowed = stretched(HEALTHY_WITHIN).min(PENALTY);
    ensure!(took < allowed, "a healthy write after {after} took {took:?}");
    Ok(())
}

pub(super) fn out_of_bounds_is_refused_and_nothing_lands(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let near = rig.area(Side::Near, 128 * KIB, Access::NONE)?;
    let far = middle(&rig, Side::Far, Access::BOTH)?;
    healthy(&rig, &near, &far, "nothing")?;
    for (what, m) in beyond(&near, &far) {
        failed(rig.near.write(&[m], &rig.options()), &REFUSED, &format!("a write {what}"))?;
        rig.check(&format!("a refused write {what}"))?;
        healthy(&rig, &near, &far, &format!("a refused write {what}"))?;
    }
    // The initiator's own side has bounds too.
    for (offset, len) in [(near.len, 1), (near.len - 8, 16), (0, near.len + 1), (1 << 45, 64)] {
        let m = Move::new(&near, offset, &far, 0, len);
        let what = format!("a write from {len} bytes at {offset} of ours");
        failed(rig.near.write(&[m], &rig.options()), &REFUSED, &what)?;
        rig.check(&what)?;
    }
    rig.finish()
}

pub(super) fn out_of_bounds_reads_are_refused(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let near = rig.area(Side::Near, 128 * KIB, Access::NONE)?;
    let far = middle(&rig, Side::Far, Access::BOTH)?;
    for (what, m) in beyond(&near, &far) {
        failed(rig.near.read(&[m], &rig.options()), &REFUSED, &format!("a read {what}"))?;
        rig.check(&format!("a refused read {what}"))?;
        healthy(&rig, &near, &far, &format!("a refused read {what}"))?;
    }
    rig.finish()
}

pub(super) fn unregistered_ranges_are_refused(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(64 * KIB)?;
    let gone = rig.area(Side::Far, 64 * KIB, Access::BOTH)?;
    rig.written(&[Move::new(&near, 0, &gone, 0, 4096)], "a write while it is registered")?;
    rig.unregister(Side::Far, &gone)?;
    let mut aims = vec![Aim::Honest, Aim::Forged];
    if kind == MemoryKind::Host {
        aims.push(Aim::Address);
    }
    for aim in aims {
        let moves = [Move::new(&near, 0, &gone, 0, 4096).aimed(aim)];
        for write in [true, false] {
            let (outcome, what) = if write {
                (rig.near.write(&moves, &rig.options()), "a write to an unregistered region")
            } else {
                (rig.near.read(&moves, &rig.options()), "a read of an unregistered region")
            };
            failed(outcome, &["not_registered", "revoked"], &format!("{what}, {aim:?}"))?;
            gone.memory.check(what)?;
            rig.check(what)?;
            healthy(&rig, &near, &far, what)?;
        }
    }
    // Registered again it is another region: the old description stays dead.
    let back = rig.register(Side::Far, &gone.memory, 0, gone.len, Access::BOTH)?;
    if fabric.names_regions() {
        let stale = [Move::new(&near, 0, &gone, 0, 4096)];
        let outcome = rig.near.write(&stale, &rig.options());
        failed(outcome, &["not_registered", "revoked"], "a write by a stale description")?;
    }
    rig.written(&[Move::new(&near, 0, &back, 0, 4096)], "a write by the new description")?;
    rig.finish()
}

pub(super) fn neighbouring_regions_are_not_one(fabric: &dyn Fabric, kind: MemoryKind) -> Result {
    if kind == MemoryKind::Slow {
        println!("nothing to test: a device's memory is registered as a whole");
        return Ok(());
    }
    let rig = Rig::new(fabric, kind)?;
    let near = rig.area(Side::Near, 128 * KIB, Access::NONE)?;
    let memory = Memory::new(kind, 128 * KIB);
    let left = rig.register(Side::Far, &memory, 0, 64 * KIB, Access::BOTH)?;
    let right = rig.register(Side::Far, &memory, 64 * KIB, 64 * KIB, Access::BOTH)?;
    for (offset, len) in [(64 * KIB - 8, 16), (0, 128 * KIB), (64 * KIB - 1, 2)] {
        for aim in [Aim::Address, Aim::Forged, Aim::Honest] {
            let m = [Move::new(&near, 0, &left, offset, len).aimed(aim)];
            let what = format!("{len} bytes at {offset} across two regions, {aim:?}");
            failed(rig.near.write(&m, &rig.options()), &REFUSED, &what)?;
            failed(rig.near.read(&m, &rig.options()), &REFUSED, &what)?;
            rig.check(&what)?;
        }
    }
    let by_address = Move::new(&near, 0, &left, 64 * KIB, 4096).aimed(Aim::Address);
    rig.written(&[by_address], "an address in the right neighbour")?;
    rig.check("an address in the right neighbour")?;
    healthy(&rig, &near, &right, "refusals across two regions")?;
    rig.finish()
}

pub(super) fn a_region_allows_only_what_its_owner_said(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(64 * KIB)?;
    for access in [Access::NONE, Access::READ, Access::WRITE, Access::BOTH] {
        let region = rig.area(Side::Far, 64 * KIB, access)?;
        let mut aims = vec![Aim::Honest, Aim::Forged];
        if kind == MemoryKind::Host {
            aims.push(Aim::Address);
        }
        for aim in aims {
            let moves = [Move::new(&near, 0, &region, 128, 40_000).aimed(aim)];
            if access.write {
                rig.written(&moves, "an allowed write")?;
            } else {
                let outcome = rig.near.write(&moves, &rig.options());
                // Memory that peers may do nothing with may be unknown to them.
                let kinds: &[_] = if access.read && fabric.names_regions() {
                    &["access_denied"]
                } else {
                    &["access_denied", "not_registered"]
                };
                failed(outcome, kinds, &format!("a write with {access:?}, {aim:?}"))?;
            }
            if access.read {
                rig.fetched(&moves, "an allowed read")?;
            } else {
                let outcome = rig.near.read(&moves, &rig.options());
                let kinds: &[_] = if access.write && fabric.names_regions() {
                    &["access_denied"]
                } else {
                    &["access_denied", "not_registered"]
                };
                failed(outcome, kinds, &format!("a read with {access:?}, {aim:?}"))?;
            }
            rig.check(&format!("after transfers with {access:?}, {aim:?}"))?;
            healthy(&rig, &near, &far, "a question of access")?;
        }
    }
    rig.finish()
}

pub(super) fn one_bad_descriptor_fails_the_batch_and_lands_nothing_beyond(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(512 * KIB)?;
    let protected = rig.area(Side::Far, 64 * KIB, Access::READ)?;
    let count = 100;
    let good: Vec<_> =
        (0..count).map(|i| Move::new(&near, i * 4096, &far, i * 4096, 3000)).collect();
    let bad = [
        ("out of bounds", Move::new(&near, 0, &far, far.len - 100, 4096).aimed(Aim::Forged)),
        ("protected", Move::new(&near, 0, &protected, 0, 4096).aimed(Aim::Forged)),
    ];
    for (what, bad) in bad {
        for place in [0, count / 2, count] {
            near.memory.refill();
            let mut moves = good.clone();
            moves.insert(place, bad.clone());
            let outcome = rig.near.write(&moves, &rig.options());
            let what = format!("a batch with a descriptor that is {what} at place {place}");
            let kinds: &[_] = if fabric.names_regions() {
                &["out_of_bounds", "access_denied"]
            } else {
                &["out_of_bounds", "not_registered"]
            };
            failed(outcome, kinds, &what)?;
            for m in &good {
                far.memory.accept_range(m.remote_offset as usize, m.len as usize);
            }
            rig.check(&what)?;
            healthy(&rig, &near, &far, &what)?;
        }
    }
    rig.finish()
}

pub(super) fn refusals_do_not_disturb_healthy_traffic(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    let rig = Rig::new(fabric, kind)?;
    let (near, far) = rig.both(rig.amount(16 * MIB, 4 * MIB))?;
    let other = rig.area(Side::Near, 64 * KIB, Access::NONE)?;
    let third = far.len / 3;
    let healthy: Vec<_> =
        (0..3).map(|i| [Move::new(&near, i * third, &far, i * third, third)]).collect();
    healthy.iter().for_each(|m| m[0].expect_written());
    let outside = [Move::new(&other, 0, &far, far.len - 1, 64 * KIB).aimed(Aim::Forged)];
    for _ in 0..rig.amount(4, 2) {
        let running: Vec<_> =
            healthy.iter().map(|m| rig.near.write_async(m, &rig.options())).collect();
        for _ in 0..5 {
            let outcome = rig.near.write(&outside, &rig.options());
            failed(outcome, &REFUSED, "a write out of bounds among healthy ones")?;
        }
        for (handle, moves) in running.iter().zip(&healthy) {
            let outcome = ended(&rig, &**handle, "a healthy write among refused ones")?;
            done(outcome, moves, "a healthy write among refused ones")?;
        }
        rig.check("healthy writes among refused ones")?;
    }
    rig.finish()
}
