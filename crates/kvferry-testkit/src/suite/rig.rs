//! The set-up of a scenario, the final checks, and helpers.

use super::Result;
use crate::fabric::{Effort, Endpoint, Fabric, Failure, Handle, Move, Outcome, Region, Way};
use crate::memory::{Memory, MemoryKind};
use crate::slow::SlowMemory;
use crate::violation::{Violation, ensure};
use fastrand::Rng;
use kvferry::{Access, Notification, Options};
use kvferry_sys::sync::{Mutex, MutexGuard};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// An end of the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Starts most transfers.
    Near,
    Far,
}

/// A pair of endpoints, and the regions that the scenario registered with them.
pub(super) struct Rig<'a> {
    pub(super) fabric: &'a dyn Fabric,
    /// Starts most transfers.
    pub(super) near: Arc<dyn Endpoint>,
    pub(super) far: Arc<dyn Endpoint>,
    /// The memory under test; see [`Rig::kind_of`].
    pub(super) kind: MemoryKind,
    regions: Mutex<Vec<(Side, Region)>>,
    /// Kept, so that no later region has its addresses: a late request may still name them.
    unregistered: Mutex<Vec<Memory>>,
}

/// Options with a deadline.
pub(super) fn within(timeout: Duration) -> Options<'static> {
    Options { timeout: Some(timeout), ..Options::default() }
}

impl<'a> Rig<'a> {
    pub(super) fn new(fabric: &'a dyn Fabric, kind: MemoryKind) -> Result<Self> {
        let pair = fabric
            .pair()
            .map_err(|e| Violation::new(format!("the fabric can't make a pair: {e}")))?;
        Ok(Self {
            fabric,
            near: pair.near,
            far: pair.far,
            kind,
            regions: Mutex::default(),
            unregistered: Mutex::default(),
        })
    }

    /// `full`, or `brief` if the fabric asks for less work.
    pub(super) fn amount(&self, full: usize, brief: usize) -> usize {
        match self.fabric.effort() {
            Effort::Full => full,
            Effort::Brief => brief,
        }
    }

    /// The longest that one healthy operation may take.
    pub(super) fn patience(&self) -> Duration {
        self.fabric.patience()
    }

    /// A generator that draws the same in every run, unless `KVFERRY_TESTKIT_SEED` is set.
    pub(super) fn rng(&self) -> Rng {
        let seed = std::env::var("KVFERRY_TESTKIT_SEED").ok().and_then(|s| s.parse().ok());
        Rng::with_seed(seed.unwrap_or(20))
    }

    /// Options with [`Rig::patience`] as the deadline.
    pub(super) fn options(&self) -> Options<'static> {
        within(self.patience())
    }

    /// The same, with a notification after the data.
    pub(super) fn noting(&self, name: &str, message: impl ToString) -> Options<'static> {
        let note = Notification::new(name, message.to_string());
        Options { notify: Some(note), ..self.options() }
    }

    pub(super) fn end(&self, side: Side) -> &Arc<dyn Endpoint> {
        match side {
            Side::Near => &self.near,
            Side::Far => &self.far,
        }
    }

    /// The kind of memory that a side has.
    pub(super) fn kind_of(&self, side: Side) -> MemoryKind {
        match side {
            Side::Near => self.kind,
            Side::Far => self.fabric.far_kind(self.kind),
        }
    }

    /// Whether the memory of a side is a device's that can be held and made to fail.
    pub(super) fn can_be_held(&self, side: Side) -> bool {
        !matches!(self.kind_of(side), MemoryKind::Host | MemoryKind::Provided)
    }

    /// New memory, registered as a whole.
    pub(super) fn area(&self, side: Side, len: usize, access: Access) -> Result<Region> {
        self.register(side, &Memory::new(self.kind_of(side), len), 0, len, access)
    }

    /// Registers a part of some memory.
    pub(super) fn register(
        &self,
        side: Side,
        memory: &Memory,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<Region> {
        let region = self
            .end(side)
            .register(memory, offset, len, access)
            .map_err(|e| Violation::new(format!("{len} bytes can't be registered: {e}")))?;
        self.regions().push((side, region.clone()));
        Ok(region)
    }

    fn regions(&self) -> MutexGuard<'_, Vec<(Side, Region)>> {
        self.regions.lock()
    }

    /// A region of the near side and one of the far side, `len` bytes each.
    pub(super) fn both(&self, len: usize) -> Result<(Region, Region)> {
        let near = self.area(Side::Near, len, Access::NONE)?;
        Ok((near, self.area(Side::Far, len, Access::READ_WRITE)?))
    }

    /// Unregisters a region before the end of the scenario, which leaves its memory out of the final checks. What a
    /// transfer without a confirmed end has sent may land in a region for as long as that is registered, so that only
    /// after this nothing lands (I2).
    pub(super) fn unregister(&self, side: Side, region: &Region) -> Result {
        self.regions().retain(|(_, other)| !Arc::ptr_eq(&other.inner, &region.inner));
        self.unregistered.lock().push(region.memory.clone());
        self.end(side)
            .unregister(region)
            .map_err(|e| Violation::new(format!("a region can't be unregistered: {e}")))
    }

    /// A transfer of the near side.
    pub(super) fn transfer(&self, way: Way, moves: &[Move]) -> Outcome {
        self.near.transfer(way, moves, &self.options())
    }

    /// Starts a transfer of the near side.
    pub(super) fn start(&self, way: Way, moves: &[Move]) -> Box<dyn Handle> {
        self.near.start(way, moves, &self.options())
    }

    /// Moves bytes from the near side, expects success, and updates the model.
    pub(super) fn moved(&self, way: Way, moves: &[Move], what: &str) -> Result {
        done(self.transfer(way, moves), moves, what)?;
        moves.iter().for_each(|m| m.expect(way));
        Ok(())
    }

    /// The same, then compares all memory with the model.
    pub(super) fn lands(&self, way: Way, moves: &[Move], what: &str) -> Result {
        self.moved(way, moves, what)?;
        self.check(what)
    }

    /// Expects a failure of one of these kinds, and that nothing was moved.
    pub(super) fn refused(&self, way: Way, moves: &[Move], kinds: &[&str], what: &str) -> Result {
        failed(self.transfer(way, moves), kinds, what)?;
        self.check(what)
    }

    /// Waits for the outcome of a handle, at most [`Rig::patience`].
    pub(super) fn ended(&self, handle: &dyn Handle, what: &str) -> Result<Outcome> {
        let patience = self.patience();
        let late = || Violation::new(format!("{what} did not end within {patience:?}"));
        handle.wait(patience).ok_or_else(late)
    }

    /// The same for a transfer that is expected to fail with one of these kinds, or to be done.
    /// Returns whether it was done.
    pub(super) fn ended_or_failed(
        &self,
        handle: &dyn Handle,
        moves: &[Move],
        kinds: &[&str],
        what: &str,
    ) -> Result<bool> {
        let outcome = self.ended(handle, what)?;
        let is_done = outcome.is_ok();
        match is_done {
            true => done(outcome, moves, what)?,
            false => drop(failed(outcome, kinds, what)?),
        }
        Ok(is_done)
    }

    /// Waits until a device has work.
    pub(super) fn wait_for_copies(&self, device: &SlowMemory) -> Result {
        let give_up = Instant::now() + self.patience();
        while device.pending() == 0 {
            ensure!(Instant::now() < give_up, "the device is never asked to copy");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits until no device copies: after outcomes that do not imply that.
    pub(super) fn settle(&self) -> Result {
        let give_up = Instant::now() + self.patience();
        for (_, region) in self.regions().iter() {
            while region.memory.device().is_some_and(|device| device.pending() > 0) {
                ensure!(Instant::now() < give_up, "copies of a device never end");
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Compares all memory with the model.
    pub(super) fn check(&self, what: &str) -> Result {
        for (side, region) in self.regions().iter() {
            region.memory.check(&format!("{what}, {side:?}"))?;
        }
        Ok(())
    }

    /// Waits until every gauge is zero.
    pub(super) fn expect_zero(&self, when: &str) -> Result {
        let give_up = Instant::now() + self.patience();
        for side in [Side::Near, Side::Far] {
            loop {
                let mut gauges = self.end(side).gauges();
                gauges.retain(|(_, value)| *value != 0);
                if gauges.is_empty() {
                    break;
                }
                ensure!(Instant::now() < give_up, "not at zero {when}: {side:?} {gauges:?}");
                thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    }

    /// Compares all memory with the model, unregisters everything, takes the devices back and
    /// expects every gauge at zero.
    pub(super) fn finish(&self) -> Result {
        self.check("at the end")?;
        let regions = self.regions().clone();
        for (side, region) in &regions {
            self.unregister(*side, region)?;
        }
        for (_, region) in &regions {
            if let Some(device) = region.memory.device() {
                device.free();
            }
        }
        self.expect_zero("in the end")?;
        for (side, region) in &regions {
            region.memory.check(&format!("after the end, {side:?}"))?;
            region.memory.check_misuse()?;
        }
        Ok(())
    }
}

/// Moves of one size between the same offsets of two regions, as many as fit.
pub(super) fn pieces(near: &Region, far: &Region, piece: usize) -> Vec<Move> {
    let count = near.len.min(far.len) / piece;
    (0..count).map(|i| Move::new(near, i * piece, far, i * piece, piece)).collect()
}

/// Expects that a transfer succeeded, with the right counts.
pub(super) fn done(outcome: Outcome, moves: &[Move], what: &str) -> Result {
    let moved = outcome.map_err(|e| Violation::new(format!("{what} failed: {e}")))?;
    let bytes: u64 = moves.iter().map(|m| m.len).sum();
    ensure!(
        moved.bytes == bytes && moved.descriptors == moves.len(),
        "{what} says it moved {} bytes of {} descriptors, asked for {bytes} of {}",
        moved.bytes,
        moved.descriptors,
        moves.len()
    );
    Ok(())
}

/// Expects that a transfer failed, for one of these reasons.
pub(super) fn failed(outcome: Outcome, kinds: &[&str], what: &str) -> Result<Failure> {
    let kinds_text = kinds.join(" or ");
    let failure = match outcome {
        Ok(moved) => {
            let text = format!("{what} should have failed ({kinds_text}), it says {moved:?}");
            return Err(Violation::new(text));
        }
        Err(failure) => failure,
    };
    ensure!(
        kinds.contains(&failure.kind.as_str()),
        "{what} should have failed with {kinds_text}, not: {failure}"
    );
    Ok(failure)
}

/// Checks memory every 8 ms for `time`.
pub(super) fn watch(memory: &Memory, time: Duration, what: &str) -> Result {
    let end = Instant::now() + time;
    loop {
        memory.check(what)?;
        if Instant::now() >= end {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(8));
    }
}

/// Whether the memory of the far side is a device's that can be held and made to fail; if not, prints that there is
/// nothing to test.
pub(super) fn needs_far_device(rig: &Rig<'_>, what: &str) -> bool {
    let can_be_held = rig.can_be_held(Side::Far);
    if !can_be_held {
        println!("nothing to test: {what} is about device memory that the test can hold");
    }
    can_be_held
}

/// The cases whose side has a device that can be held and made to fail; prints if there are none.
pub(super) fn with_devices<const N: usize>(
    rig: &Rig<'_>,
    cases: [(Side, Way); N],
    what: &str,
) -> Vec<(Side, Way)> {
    let cases: Vec<_> = cases.into_iter().filter(|(side, _)| rig.can_be_held(*side)).collect();
    if cases.is_empty() {
        println!("nothing to test: {what} is about device memory that the test can hold");
    }
    cases
}
