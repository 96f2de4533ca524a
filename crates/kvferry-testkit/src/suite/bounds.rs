//! A peer reaches only what was registered for it, and a refusal does not slow other transfers down.

use super::*;

/// Duration from which the write after a refusal counts as held up.
const PENALTY: Duration = Duration::from_millis(900);

const REFUSED: [&str; 3] = ["out_of_bounds", "not_registered", "invalid_argument"];

/// Forms in which a move can name some memory.
fn aims(memory: &Memory) -> &'static [Aim] {
    match memory.address() {
        Some(_) => &[Aim::Honest, Aim::Forged, Aim::Address],
        None => &[Aim::Honest, Aim::Forged],
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
    if let Some(address) = far.memory.address() {
        case("a byte before", u64::MAX, 1, Aim::Address);
        case("across the start", 8u64.wrapping_neg(), 16, Aim::Address);
        case("far before", (40 * KIB as u64).wrapping_neg(), 4096, Aim::Address);
        let base = address + far.offset as u64;
        let last = (u64::MAX - 7).wrapping_sub(base);
        case("around the end of all addresses", last, 16, Aim::Address);
        case("around the null page", 0u64.wrapping_sub(base), 64, Aim::Address);
    }
    for aim in aims(&far.memory) {
        case("a byte after", end, 1, *aim);
        case("across the end", end - 8, 16, *aim);
        case("one byte too long", 0, end + 1, *aim);
        case("far after", end + 40 * KIB as u64, 4096, *aim);
        case("very far after", 1 << 45, 4096, *aim);
    }
    case("around the end of all offsets", u64::MAX - 7, 16, Aim::Forged);
    cases
}

/// Makes a write that must succeed; returns how long it took.
fn healthy(rig: &Rig<'_>, near: &Region, far: &Region, after: &str) -> Result<Duration> {
    let began = Instant::now();
    let what = format!("a healthy write after {after}");
    rig.moved(Write, &[Move::new(near, 0, far, 0, 4096)], &what)?;
    Ok(began.elapsed())
}

fn beyond_is_refused(rig: &Rig<'_>, way: Way) -> Result<(Region, Region)> {
    let near = rig.area(Side::Near, 128 * KIB, Access::NONE)?;
    let far = match rig.kind_of(Side::Far) {
        // A region in the middle of memory, so that the bytes around the region are checked, too.
        MemoryKind::Host => {
            let memory = Memory::new(MemoryKind::Host, 192 * KIB);
            rig.register(Side::Far, &memory, 64 * KIB, 64 * KIB, Access::READ_WRITE)?
        }
        _ => rig.area(Side::Far, 64 * KIB, Access::READ_WRITE)?,
    };
    healthy(rig, &near, &far, "nothing")?;
    let mut fastest = Duration::MAX;
    for (what, m) in beyond(&near, &far) {
        let what = format!("a refused {way} {what}");
        rig.refused(way, &[m], &REFUSED, &what)?;
        fastest = fastest.min(healthy(rig, &near, &far, &what)?);
    }
    // The fastest of all, so that load alone does not explain it.
    ensure!(fastest < PENALTY, "each write after a refusal takes {fastest:?} or more");
    Ok((near, far))
}

pub(super) fn out_of_bounds_is_refused_and_nothing_lands(rig: &Rig<'_>) -> Result {
    let (near, far) = beyond_is_refused(rig, Write)?;
    // The initiator's own side has bounds too.
    for (offset, len) in [(near.len, 1), (near.len - 8, 16), (0, near.len + 1), (1 << 45, 64)] {
        let what = format!("a write from {len} bytes at {offset} of ours");
        rig.refused(Write, &[Move::new(&near, offset, &far, 0, len)], &REFUSED, &what)?;
    }
    Ok(())
}

pub(super) fn out_of_bounds_reads_are_refused(rig: &Rig<'_>) -> Result {
    beyond_is_refused(rig, Read).map(drop)
}

pub(super) fn unregistered_ranges_are_refused(rig: &Rig<'_>) -> Result {
    let (near, far) = rig.both(64 * KIB)?;
    let gone = rig.area(Side::Far, 64 * KIB, Access::READ_WRITE)?;
    rig.moved(Write, &[Move::new(&near, 0, &gone, 0, 4096)], "a write while it is registered")?;
    rig.unregister(Side::Far, &gone)?;
    let kinds = ["not_registered", "revoked"];
    for aim in aims(&gone.memory) {
        for way in Way::ALL {
            let what = format!("a {way} of an unregistered region, {aim:?}");
            rig.refused(way, &[Move::new(&near, 0, &gone, 0, 4096).aimed(*aim)], &kinds, &what)?;
            gone.memory.check(&what)?;
            healthy(rig, &near, &far, &what)?;
        }
    }
    // Registered again it is another region: the old description stays dead.
    let back = rig.register(Side::Far, &gone.memory, 0, gone.len, Access::READ_WRITE)?;
    if rig.fabric.names_regions() {
        let stale = [Move::new(&near, 0, &gone, 0, 4096)];
        rig.refused(Write, &stale, &kinds, "a write by a stale description")?;
    }
    rig.moved(Write, &[Move::new(&near, 0, &back, 0, 4096)], "a write by the new description")
}

pub(super) fn neighbouring_regions_are_not_one(rig: &Rig<'_>) -> Result {
    if rig.kind_of(Side::Far) != MemoryKind::Host {
        println!("nothing to test: a device's memory is registered as a whole");
        return Ok(());
    }
    let near = rig.area(Side::Near, 128 * KIB, Access::NONE)?;
    let memory = Memory::new(MemoryKind::Host, 128 * KIB);
    let left = rig.register(Side::Far, &memory, 0, 64 * KIB, Access::READ_WRITE)?;
    let right = rig.register(Side::Far, &memory, 64 * KIB, 64 * KIB, Access::READ_WRITE)?;
    for (offset, len) in [(64 * KIB - 8, 16), (0, 128 * KIB), (64 * KIB - 1, 2)] {
        for aim in aims(&memory) {
            let m = [Move::new(&near, 0, &left, offset, len).aimed(*aim)];
            let what = format!("{len} bytes at {offset} across two regions, {aim:?}");
            for way in Way::ALL {
                rig.refused(way, &m, &REFUSED, &what)?;
            }
        }
    }
    let by_address = Move::new(&near, 0, &left, 64 * KIB, 4096).aimed(Aim::Address);
    rig.lands(Write, &[by_address], "an address in the right neighbour")?;
    healthy(rig, &near, &right, "refusals across two regions").map(drop)
}

pub(super) fn a_region_allows_only_what_its_owner_said(rig: &Rig<'_>) -> Result {
    let (near, far) = rig.both(64 * KIB)?;
    for access in [Access::NONE, Access::READ, Access::WRITE, Access::READ_WRITE] {
        let region = rig.area(Side::Far, 64 * KIB, access)?;
        for aim in aims(&region.memory) {
            let moves = [Move::new(&near, 0, &region, 128, 40_000).aimed(*aim)];
            for (way, allowed) in [(Write, access.write), (Read, access.read)] {
                let what = format!("a {way} with {access:?}, {aim:?}");
                if allowed {
                    rig.lands(way, &moves, &what)?;
                    continue;
                }
                // Memory that peers may do nothing with may be unknown to them.
                let known = access != Access::NONE && rig.fabric.names_regions();
                let kinds = &["access_denied", "not_registered"][..if known { 1 } else { 2 }];
                rig.refused(way, &moves, kinds, &what)?;
            }
            healthy(rig, &near, &far, "a question of access")?;
        }
    }
    Ok(())
}

pub(super) fn one_bad_descriptor_fails_the_batch_and_lands_nothing_beyond(rig: &Rig<'_>) -> Result {
    let (near, other) = rig.both(512 * KIB)?;
    let protected = rig.area(Side::Far, 64 * KIB, Access::READ)?;
    let count = 100;
    let denied = if rig.fabric.names_regions() { "access_denied" } else { "not_registered" };
    for what in ["out of bounds", "protected"] {
        for place in [0, count / 2, count] {
            near.memory.refill();
            let far = rig.area(Side::Far, 512 * KIB, Access::READ_WRITE)?;
            let mut moves: Vec<_> =
                (0..count).map(|i| Move::new(&near, i * 4096, &far, i * 4096, 3000)).collect();
            let bad = match what {
                "protected" => Move::new(&near, 0, &protected, 0, 4096),
                _ => Move::new(&near, 0, &far, far.len - 100, 4096),
            };
            moves.insert(place, bad.aimed(Aim::Forged));
            let what = format!("a batch with a descriptor that is {what} at place {place}");
            failed(rig.transfer(Write, &moves), &["out_of_bounds", denied], &what)?;
            // The others may land until then.
            rig.unregister(Side::Far, &far)?;
            moves.remove(place);
            for m in &moves {
                far.memory.accept_range(m.remote_offset as usize, m.len as usize);
            }
            far.memory.check(&what)?;
            rig.check(&what)?;
            healthy(rig, &near, &other, &what)?;
        }
    }
    Ok(())
}

pub(super) fn refusals_do_not_disturb_healthy_traffic(rig: &Rig<'_>) -> Result {
    let (near, far) = rig.both(rig.amount(16 * MIB, 4 * MIB))?;
    let other = rig.area(Side::Near, 64 * KIB, Access::NONE)?;
    let healthy = pieces(&near, &far, far.len / 3);
    healthy.iter().for_each(|m| m.expect(Write));
    let outside = [Move::new(&other, 0, &far, far.len - 1, 64 * KIB).aimed(Aim::Forged)];
    for _ in 0..rig.amount(4, 2) {
        let running: Vec<_> = healthy.chunks(1).map(|m| (m, rig.start(Write, m))).collect();
        for _ in 0..5 {
            let outcome = rig.transfer(Write, &outside);
            failed(outcome, &REFUSED, "a write out of bounds among healthy ones")?;
        }
        let what = "a healthy write among refused ones";
        for (moves, handle) in running {
            done(rig.ended(&*handle, what)?, moves, what)?;
        }
        rig.check(what)?;
    }
    Ok(())
}
