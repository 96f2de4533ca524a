//! The set-up of a scenario, the final checks, and helpers.

use crate::fabric::{
    Access, Effort, Endpoint, Fabric, Failure, Move, Options, Outcome, Region, TransferStats,
};
use crate::memory::{Memory, MemoryKind};
use crate::violation::{Violation, ensure};
use fastrand::Rng;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// One end of the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Starts most transfers.
    Near,
    /// The other end.
    Far,
}

/// A pair of endpoints, and the regions that the scenario registered with them.
pub struct Rig {
    /// Starts most transfers.
    pub near: Arc<dyn Endpoint>,
    /// The other end.
    pub far: Arc<dyn Endpoint>,
    /// The memory under test.
    pub kind: MemoryKind,
    effort: Effort,
    patience: Duration,
    regions: Mutex<Vec<(Side, Region)>>,
}

impl fmt::Debug for Rig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rig({})", self.kind)
    }
}

impl Rig {
    /// Two new endpoints.
    ///
    /// # Errors
    /// If the fabric can't make them.
    pub fn new(fabric: &dyn Fabric, kind: MemoryKind) -> Result<Self, Violation> {
        let pair = fabric
            .pair(kind)
            .map_err(|e| Violation::new(format!("the fabric can't make a pair: {e}")))?;
        Ok(Self {
            near: pair.near,
            far: pair.far,
            kind,
            effort: fabric.effort(),
            patience: fabric.patience(),
            regions: Mutex::new(Vec::new()),
        })
    }

    /// `full`, or `brief` if the fabric asks for less work.
    pub fn amount(&self, full: usize, brief: usize) -> usize {
        match self.effort {
            Effort::Full => full,
            Effort::Brief => brief,
        }
    }

    /// The longest that one healthy operation may take.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// A generator that draws the same in every run, unless `KVFERRY_TESTKIT_SEED` is set.
    pub fn rng(&self) -> Rng {
        let seed = std::env::var("KVFERRY_TESTKIT_SEED").ok().and_then(|s| s.parse().ok());
        Rng::with_seed(seed.unwrap_or(20))
    }

    /// Options with [`Rig::patience`] as the deadline.
    pub fn options(&self) -> Options {
        Options::within(self.patience)
    }

    /// The endpoint of a side.
    pub fn end(&self, side: Side) -> &Arc<dyn Endpoint> {
        match side {
            Side::Near => &self.near,
            Side::Far => &self.far,
        }
    }

    /// New memory, registered as a whole.
    ///
    /// # Errors
    /// If the transport refuses to register it.
    pub fn area(&self, side: Side, len: usize, access: Access) -> Result<Region, Violation> {
        self.register(side, &Memory::new(self.kind, len), 0, len, access)
    }

    /// Registers a part of some memory.
    ///
    /// # Errors
    /// If the transport refuses.
    pub fn register(
        &self,
        side: Side,
        memory: &Memory,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<Region, Violation> {
        let region = self
            .end(side)
            .register(memory, offset, len, access)
            .map_err(|e| Violation::new(format!("{len} bytes can't be registered: {e}")))?;
        self.regions().push((side, region.clone()));
        Ok(region)
    }

    fn regions(&self) -> std::sync::MutexGuard<'_, Vec<(Side, Region)>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A region of the near side and one of the far side, `len` bytes each.
    ///
    /// # Errors
    /// If the transport refuses to register them.
    pub fn both(&self, len: usize) -> Result<(Region, Region), Violation> {
        let near = self.area(Side::Near, len, Access::NONE)?;
        Ok((near, self.area(Side::Far, len, Access::BOTH)?))
    }

    /// Unregisters a region before the end of the scenario.
    ///
    /// # Errors
    /// If the transport can't.
    pub fn unregister(&self, side: Side, region: &Region) -> Result<(), Violation> {
        self.regions().retain(|(_, other)| !Arc::ptr_eq(&other.inner, &region.inner));
        self.end(side)
            .unregister(region)
            .map_err(|e| Violation::new(format!("a region can't be unregistered: {e}")))
    }

    /// Writes from the near side, expects success, and updates the model.
    ///
    /// # Errors
    /// If the transfer failed.
    pub fn written(&self, moves: &[Move], what: &str) -> Result<(), Violation> {
        done(self.near.write(moves, &self.options()), moves, what)?;
        moves.iter().for_each(Move::expect_written);
        Ok(())
    }

    /// Reads from the near side, expects success, and updates the model.
    ///
    /// # Errors
    /// If the transfer failed.
    pub fn fetched(&self, moves: &[Move], what: &str) -> Result<(), Violation> {
        done(self.near.read(moves, &self.options()), moves, what)?;
        moves.iter().for_each(Move::expect_read);
        Ok(())
    }

    /// Waits until no device copies: after outcomes that do not imply that.
    ///
    /// # Errors
    /// If copies never end.
    pub fn settle(&self) -> Result<(), Violation> {
        let give_up = Instant::now() + self.patience;
        for (_, region) in self.regions().iter() {
            while region.memory.device().is_some_and(|device| device.pending() > 0) {
                ensure!(Instant::now() < give_up, "copies of a device never end");
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Compares all memory with the model.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, what: &str) -> Result<(), Violation> {
        for (side, region) in self.regions().iter() {
            region.memory.check(&format!("{what}, {side:?}"))?;
        }
        Ok(())
    }

    /// Waits until every gauge is zero.
    ///
    /// # Errors
    /// The gauges that are not, after [`Rig::patience`].
    pub fn expect_zero(&self, when: &str) -> Result<(), Violation> {
        let give_up = Instant::now() + self.patience;
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
    ///
    /// # Errors
    /// The first check that fails.
    pub fn finish(self) -> Result<(), Violation> {
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

/// Expects that a transfer succeeded, with the right counts.
pub(crate) fn done(
    outcome: Outcome,
    moves: &[Move],
    what: &str,
) -> Result<TransferStats, Violation> {
    let moved = outcome.map_err(|e| Violation::new(format!("{what} failed: {e}")))?;
    let bytes: u64 = moves.iter().map(|m| m.len).sum();
    ensure!(
        moved.bytes == bytes && moved.descriptors == moves.len(),
        "{what} says it moved {} bytes of {} descriptors, asked for {bytes} of {}",
        moved.bytes,
        moved.descriptors,
        moves.len()
    );
    Ok(moved)
}

/// Expects that a transfer failed, for one of these reasons.
pub(crate) fn failed(outcome: Outcome, kinds: &[&str], what: &str) -> Result<Failure, Violation> {
    match outcome {
        Ok(moved) => Err(Violation::new(format!(
            "{what} should have failed ({}), it says {} bytes were moved",
            kinds.join(" or "),
            moved.bytes
        ))),
        Err(failure) => {
            ensure!(
                kinds.contains(&failure.kind.as_str()),
                "{what} should have failed with {}, not: {failure}",
                kinds.join(" or ")
            );
            Ok(failure)
        }
    }
}

/// The outcome of a handle, which must come within the patience of the rig.
pub(crate) fn ended(
    rig: &Rig,
    handle: &dyn crate::fabric::Handle,
    what: &str,
) -> Result<Outcome, Violation> {
    handle
        .wait(rig.patience())
        .ok_or_else(|| Violation::new(format!("{what} did not end within {:?}", rig.patience())))
}

/// Checks memory every 8 ms for `time`.
pub(crate) fn watch(memory: &Memory, time: Duration, what: &str) -> Result<(), Violation> {
    let end = Instant::now() + time;
    loop {
        memory.check(what)?;
        if Instant::now() >= end {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(8));
    }
}

/// Whether `kind` has a device; if not, prints that there is nothing to test.
pub(crate) fn needs_device(kind: MemoryKind, what: &str) -> bool {
    if kind == MemoryKind::Host {
        println!("nothing to test: {what} is about device memory");
    }
    kind == MemoryKind::Slow
}
