//! Batches with host memory on one side and device memory on the other.

use super::*;

/// Time for which a call that should wait for a device is watched for an early return.
const WATCHED: Duration = Duration::from_millis(60);

/// New memory of a kind, registered as a whole.
fn area(rig: &Rig<'_>, side: Side, kind: MemoryKind, len: usize) -> Result<Region> {
    rig.register(side, &Memory::new(kind, len), 0, len, Access::READ_WRITE)
}

/// Every pair of kinds: each half of each far region comes from, or goes to, near memory of another
/// kind; in pieces of one size, the kinds by turns.
fn mix([near, far]: &[[Region; 2]; 2], piece: usize) -> Vec<Move> {
    let half = near[0].len / 2;
    let mut moves = Vec::new();
    for at in (0..half).step_by(piece) {
        let len = piece.min(half - at);
        for (n, near) in near.iter().enumerate() {
            for (f, far) in far.iter().enumerate() {
                moves.push(Move::new(near, f * half + at, far, n * half + at, len));
            }
        }
    }
    moves
}

pub(super) fn host_and_device_memory_in_one_batch_land_whole(rig: &Rig<'_>) -> Result {
    if rig.kind == MemoryKind::Host {
        println!("nothing to test: a mix of host and device memory is about device memory");
        return Ok(());
    }
    let new = |side, kind| area(rig, side, kind, 2 * MIB);
    let both =
        |side| -> Result<_> { Ok([new(side, MemoryKind::Host)?, new(side, rig.kind_of(side))?]) };
    let regions = [both(Side::Near)?, both(Side::Far)?];
    for piece in [MIB, 700 * KIB, 64 * KIB, 4097] {
        for way in Way::ALL {
            regions.as_flattened().iter().for_each(|region| region.memory.refill());
            rig.lands(way, &mix(&regions, piece), &format!("a mixed {way} in pieces of {piece}"))?;
        }
    }
    Ok(())
}

/// A transfer between host and device memory that waits for its device.
struct WaitingTransfer {
    what: String,
    handle: Box<dyn Handle>,
    moves: [Move; 1],
    /// The side of the device.
    side: Side,
}

impl WaitingTransfer {
    fn start(rig: &Rig<'_>, side: Side, way: Way) -> Result<Self> {
        let (near, far) = match side {
            Side::Near => (rig.kind_of(side), MemoryKind::Host),
            Side::Far => (MemoryKind::Host, rig.kind_of(side)),
        };
        let near = area(rig, Side::Near, near, 3 * MIB)?;
        let far = area(rig, Side::Far, far, 3 * MIB)?;
        let device = if side == Side::Near { &near } else { &far }.device();
        device.hold();
        let moves = [Move::new(&near, 0, &far, 0, near.len)];
        let handle = rig.start(way, &moves);
        rig.wait_for_copies(device)?;
        Ok(Self { what: format!("a {way}, the device {side:?}"), handle, moves, side })
    }

    fn device(&self) -> &Region {
        match self.side {
            Side::Near => &self.moves[0].local,
            Side::Far => &self.moves[0].remote,
        }
    }
}

pub(super) fn a_confirmed_cancel_leaves_no_copy_between_host_and_device(rig: &Rig<'_>) -> Result {
    let cases = [(Side::Near, Write), (Side::Near, Read), (Side::Far, Write), (Side::Far, Read)];
    for (side, way) in with_devices(rig, cases, "a cancel while a device copies") {
        let held = WaitingTransfer::start(rig, side, way)?;
        held.handle.cancel();
        let early = held.handle.wait(WATCHED);
        let confirmed = matches!(&early, Some(Err(e)) if e.is_quiet());
        let writes = held.device().device().pending_in();
        held.device().device().release();
        ensure!(
            !confirmed || writes == 0,
            "{} was confirmed as cancelled while {writes} copies to the device ran ({early:?})",
            held.what
        );
        rig.ended_or_failed(&*held.handle, &held.moves, &["cancelled"], &held.what)?;
        rig.unregister(Side::Near, &held.moves[0].local)?;
        rig.unregister(Side::Far, &held.moves[0].remote)?;
    }
    Ok(())
}

pub(super) fn a_close_waits_for_the_copies_of_its_devices(rig: &Rig<'_>) -> Result {
    // The near device is written by a read, the far one by a write. Each twice: a thread that is late to close sees no copy.
    let cases = with_devices(
        rig,
        [(Side::Near, Read), (Side::Far, Write)],
        "a close while a device copies",
    );
    for (side, way) in cases.repeat(2) {
        let rig = Rig::new(rig.fabric, rig.kind)?;
        let held = WaitingTransfer::start(&rig, side, way)?;
        let device = held.device().device();
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
        let outcome = rig.ended(&*held.handle, "a transfer whose end was closed")?;
        if outcome.is_ok() {
            done(outcome, &held.moves, "a transfer that was faster than the close")?;
        }
    }
    Ok(())
}
