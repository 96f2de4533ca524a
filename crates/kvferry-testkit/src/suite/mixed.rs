//! Batches with host memory on one side and device memory on the other.

use super::rig::{Rig, Side, done, ended, failed, needs_device};
use crate::fabric::{Access, Fabric, Handle, Move, Region};
use crate::memory::{Memory, MemoryKind};
use crate::violation::{Violation, ensure};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

type Result<T = ()> = std::result::Result<T, Violation>;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// How long a call that should wait for a device is watched for returning early.
const WATCHED: Duration = Duration::from_millis(60);

/// New memory of a kind, registered as a whole.
fn area(rig: &Rig, side: Side, kind: MemoryKind, len: usize) -> Result<Region> {
    rig.register(side, &Memory::new(kind, len), 0, len, Access::BOTH)
}

/// The memory of a batch with every pair of kinds in it.
struct Mix {
    near: [Region; 2],
    far: [Region; 2],
}

impl Mix {
    fn new(rig: &Rig, len: usize) -> Result<Self> {
        let both =
            |side| Ok([MemoryKind::Host, MemoryKind::Slow].map(|kind| area(rig, side, kind, len)));
        let pair = |[host, slow]: [Result<Region>; 2]| Ok::<_, Violation>([host?, slow?]);
        Ok(Self { near: pair(both(Side::Near)?)?, far: pair(both(Side::Far)?)? })
    }

    /// Each half of each far region comes from, or goes to, near memory of another kind; in pieces
    /// of one size, the kinds by turns.
    fn moves(&self, piece: usize) -> Vec<Move> {
        let half = self.near[0].len / 2;
        let mut moves = Vec::new();
        for at in (0..half).step_by(piece) {
            let len = piece.min(half - at);
            for (n, near) in self.near.iter().enumerate() {
                for (f, far) in self.far.iter().enumerate() {
                    moves.push(Move::new(near, f * half + at, far, n * half + at, len));
                }
            }
        }
        moves
    }
}

pub(super) fn host_and_device_memory_in_one_batch_land_whole(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    if !needs_device(kind, "a mix of host and device memory") {
        return Ok(());
    }
    let rig = Rig::new(fabric, kind)?;
    let mix = Mix::new(&rig, 2 * MIB)?;
    for piece in [MIB, 700 * KIB, 64 * KIB, 4097] {
        mix.near.iter().chain(&mix.far).for_each(|region| region.memory.refill());
        let what = format!("a mixed write in pieces of {piece}");
        rig.written(&mix.moves(piece), &what)?;
        rig.check(&what)?;
        mix.near.iter().chain(&mix.far).for_each(|region| region.memory.refill());
        let what = format!("a mixed read in pieces of {piece}");
        rig.fetched(&mix.moves(piece), &what)?;
        rig.check(&what)?;
    }
    rig.finish()
}

/// Waits until a device has work.
fn wait_for_copies(rig: &Rig, region: &Region) -> Result {
    let device = region.memory.device().expect("the kind is slow");
    let give_up = Instant::now() + rig.patience();
    while device.pending() == 0 {
        ensure!(Instant::now() < give_up, "the device is never asked to copy");
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// A transfer between host and device memory that waits for the device.
struct Held<'a> {
    what: String,
    handle: Box<dyn Handle>,
    device: &'a Region,
}

/// Runs `scenario` with each way in which a held device can be one of two sides.
fn with_each_held(rig: &Rig, scenario: &dyn Fn(Held<'_>) -> Result) -> Result {
    for (ours, write) in [(true, true), (true, false), (false, true), (false, false)] {
        let (near, far) = match ours {
            true => (MemoryKind::Slow, MemoryKind::Host),
            false => (MemoryKind::Host, MemoryKind::Slow),
        };
        let near = area(rig, Side::Near, near, 3 * MIB)?;
        let far = area(rig, Side::Far, far, 3 * MIB)?;
        let device = if ours { &near } else { &far };
        device.memory.device().expect("the kind is slow").hold();
        let moves = [Move::new(&near, 0, &far, 0, near.len)];
        let handle = match write {
            true => rig.near.write_async(&moves, &rig.options()),
            false => rig.near.read_async(&moves, &rig.options()),
        };
        let way = if write { "write" } else { "read" };
        let what = format!("a {way} with {} device memory", if ours { "our" } else { "their" });
        wait_for_copies(rig, device)?;
        scenario(Held { what, handle, device })?;
        rig.settle()?;
        near.memory.accept();
        far.memory.accept();
    }
    Ok(())
}

pub(super) fn a_confirmed_cancel_leaves_no_copy_between_host_and_device(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    if !needs_device(kind, "a cancel while a device copies") {
        return Ok(());
    }
    let rig = Rig::new(fabric, kind)?;
    with_each_held(&rig, &|held| {
        let device = held.device.memory.device().expect("the kind is slow");
        held.handle.cancel();
        let early = held.handle.wait(WATCHED);
        let confirmed = matches!(&early, Some(Err(e)) if e.is_quiet());
        let writes = device.pending_in();
        device.release();
        ensure!(
            !confirmed || writes == 0,
            "{} was confirmed as cancelled while {writes} copies to the device ran ({early:?})",
            held.what
        );
        let outcome = ended(&rig, &*held.handle, &held.what)?;
        if outcome.is_err() {
            failed(outcome, &["cancelled"], &held.what)?;
        }
        Ok(())
    })?;
    rig.finish()
}

pub(super) fn a_close_waits_for_the_copies_of_its_devices(
    fabric: &dyn Fabric,
    kind: MemoryKind,
) -> Result {
    if !needs_device(kind, "a close while a device copies") {
        return Ok(());
    }
    for side in [Side::Near, Side::Far] {
        let rig = Rig::new(fabric, kind)?;
        let (near, far) = match side {
            Side::Near => (MemoryKind::Slow, MemoryKind::Host),
            Side::Far => (MemoryKind::Host, MemoryKind::Slow),
        };
        let near = area(&rig, Side::Near, near, MIB)?;
        let far = area(&rig, Side::Far, far, MIB)?;
        let held = if side == Side::Near { &near } else { &far };
        let device = held.memory.device().expect("the kind is slow").clone();
        device.hold();
        // Ours is written by a read, theirs by a write.
        let moves = [Move::new(&near, 0, &far, 0, MIB)];
        let handle = match side {
            Side::Near => rig.near.read_async(&moves, &rig.options()),
            Side::Far => rig.near.write_async(&moves, &rig.options()),
        };
        wait_for_copies(&rig, held)?;
        let (tell, told) = mpsc::channel();
        let early = thread::scope(|scope| {
            scope.spawn(|| {
                rig.end(side).close();
                let _ = tell.send(device.pending());
            });
            let early = told.recv_timeout(WATCHED);
            device.release();
            early
        });
        let pending = early.or_else(|_| told.recv());
        let pending = pending.map_err(|_| Violation::new("a close went away"))?;
        ensure!(pending == 0, "{side:?} was closed while its device made {pending} copies");
        let outcome = ended(&rig, &*handle, "a transfer whose end was closed")?;
        if outcome.is_ok() {
            done(outcome, &moves, "a transfer that was faster than the close")?;
        }
    }
    Ok(())
}
