//! Loads of blocks that are under way: of two calls that load a block at the same time, one reads it.
//!
//! The first call that wants a block *leads*: it reads the block into its own memory, and copies it to the memory
//! of the calls that *follow*. A leader ends its loads before it waits for those of others, and before it ends,
//! so calls never wait for each other in a circle. A call in the background joins when it is submitted, in the order of
//! its pool, so its leaders have begun before it.

use crate::key::Key;
use crate::memory::BlockMemory;
use crate::pending::{Pending, Promise};
use kvferry_sys::sync::Mutex;
use rustc_hash::FxHashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

/// Interval at which a call that follows another looks whether it is to go on by itself.
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[derive(Debug, Default)]
pub(crate) struct SingleFlight(Mutex<FxHashMap<Key, Vec<Follower>>>);

#[derive(Debug)]
struct Follower {
    memory: BlockMemory,
    check: u64,
    promise: Promise<bool>,
}

/// The loads that one call leads, and those that it follows. Dropping it ends the first without a block, and waits
/// for the others, so that no other call writes to this one's memory afterwards.
#[derive(Debug)]
pub(crate) struct JoinedLoads {
    flights: Arc<SingleFlight>,
    keys: Vec<Key>,
    roles: Vec<LoadRole>,
}

#[derive(Debug)]
enum LoadRole {
    Lead,
    Follow(Pending<bool>),
    Ended,
}

impl SingleFlight {
    /// `blocks`: the name of each block, and where this call wants it.
    pub(crate) fn join<'a>(
        self: &Arc<Self>,
        blocks: impl Iterator<Item = (Key, u64, &'a BlockMemory)>,
    ) -> JoinedLoads {
        let mut flights = self.0.lock();
        let (keys, roles) = blocks
            .map(|(key, check, memory)| {
                let role = match flights.entry(key) {
                    Entry::Vacant(none) => {
                        none.insert(Vec::new());
                        LoadRole::Lead
                    }
                    Entry::Occupied(mut led) => {
                        let (pending, promise) = Pending::new();
                        led.get_mut().push(Follower { memory: memory.clone(), check, promise });
                        LoadRole::Follow(pending)
                    }
                };
                (key, role)
            })
            .unzip();
        JoinedLoads { flights: Arc::clone(self), keys, roles }
    }

    /// Has a call that leads a block not copy it to one of those that follow. That call's wait ends without a block,
    /// or with it, if it is being copied.
    fn leave(&self, key: &Key, follower: &Pending<bool>) {
        let left = {
            let mut flights = self.0.lock();
            let led = flights.get_mut(key).map(|it| {
                let at = it.iter().position(|it| it.promise.is_of(follower));
                at.map(|at| it.swap_remove(at))
            });
            led.flatten()
        };
        if let Some(left) = left {
            left.promise.finish(Ok(false));
        }
    }
}

impl JoinedLoads {
    pub(crate) fn leads(&self, block: usize) -> bool {
        matches!(self.roles[block], LoadRole::Lead)
    }

    /// Ends the load of a block that this call leads. `landed`: where its bytes are now, and the check of its
    /// name; `None` if it could not be loaded.
    pub(crate) fn land(&mut self, block: usize, landed: Option<(&BlockMemory, u64)>) {
        if !self.leads(block) {
            return;
        }
        self.roles[block] = LoadRole::Ended;
        let followers = self.flights.0.lock().remove(&self.keys[block]).unwrap_or_default();
        for follower in followers {
            let is_there = landed.is_some_and(|(memory, check)| {
                // Memory that can't be written is the follower's fault, and the follower's own read reports it.
                check == follower.check && follower.memory.copy_from(memory).is_ok()
            });
            follower.promise.finish(Ok(is_there));
        }
    }

    /// Waits for a block that another call leads, or until `gives_up`, as that call may wait for a device that hangs.
    /// True if it is there. False for others.
    pub(crate) fn wait(&mut self, block: usize, gives_up: impl Fn() -> bool) -> bool {
        match std::mem::replace(&mut self.roles[block], LoadRole::Ended) {
            LoadRole::Follow(pending) => {
                loop {
                    // First: a call that follows many blocks waits for none of them then.
                    if gives_up() {
                        self.flights.leave(&self.keys[block], &pending);
                    }
                    if let Some(outcome) = pending.wait(Some(LOOK_EVERY)) {
                        return matches!(*outcome, Ok(true));
                    }
                }
            }
            role => {
                self.roles[block] = role;
                false
            }
        }
    }
}

impl Drop for JoinedLoads {
    fn drop(&mut self) {
        (0..self.roles.len()).for_each(|block| self.land(block, None));
        for block in 0..self.roles.len() {
            // Nothing is copied to this call's memory any more, unless that has begun.
            self.wait(block, || true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry::{Access, Agent, Region};

    const LEN: u64 = 4096;
    const KEY: Key = Key([7, 9]);
    const CHECK: u64 = 5;

    struct Place {
        _agent: Agent,
        region: Region,
    }

    impl Place {
        fn new(blocks: u64) -> Self {
            let agent = Agent::builder().name("flights").start().expect("an agent");
            let len = usize::try_from(blocks * LEN).expect("short");
            let region = agent.allocate(len, Access::NONE).expect("memory");
            Self { _agent: agent, region }
        }

        fn memory(&self, block: u64) -> BlockMemory {
            BlockMemory::new(&self.region, block * LEN, LEN)
        }

        fn byte(&self, block: u64) -> u8 {
            let mut byte = [0];
            self.region
                .read_at(usize::try_from(block * LEN).expect("short"), &mut byte)
                .expect("inside");
            byte[0]
        }
    }

    #[test]
    fn a_thousand_loads_of_one_block_at_the_same_time_are_one_read() {
        let (place, flights) = (Place::new(1000), Arc::<SingleFlight>::default());
        let memory: Vec<_> = (0..1000).map(|block| place.memory(block)).collect();
        let join = |memory| flights.join([(KEY, CHECK, memory)].into_iter());
        let mut joined: Vec<_> = memory.iter().map(join).collect();
        let leaders = joined.iter().filter(|joined| joined.leads(0)).count();
        assert_eq!((leaders, joined[0].leads(0)), (1, true));
        place.region.write_at(0, &[42; LEN as usize]).expect("inside");
        joined[0].land(0, Some((&memory[0], CHECK)));
        for (block, joined) in (0..1000).zip(&mut joined).skip(1) {
            assert!(joined.wait(0, || false));
            assert_eq!(place.byte(block), 42);
        }
        // It is over: the next load is a new one.
        assert!(flights.join([(KEY, CHECK, &memory[1])].into_iter()).leads(0));
    }

    #[test]
    fn who_follows_a_load_that_fails_or_is_given_up_or_of_another_name_is_told() {
        let (place, flights) = (Place::new(2), Arc::<SingleFlight>::default());
        let [ours, theirs] = [0, 1].map(|block| place.memory(block));
        place.region.write_at(0, &[42; LEN as usize]).expect("inside");
        for how in ["fails", "is given up", "of another name"] {
            let mut leader = flights.join([(KEY, CHECK, &ours)].into_iter());
            let check = if how == "of another name" { CHECK + 1 } else { CHECK };
            let mut follower = flights.join([(KEY, check, &theirs)].into_iter());
            match how {
                "fails" => leader.land(0, None),
                "is given up" => drop(leader),
                _ => leader.land(0, Some((&ours, CHECK))),
            }
            assert!(!follower.wait(0, || false), "{how}");
            assert_eq!(place.byte(1), 0, "{how}");
        }
    }

    #[test]
    fn who_follows_a_load_that_waits_for_a_device_that_hangs_goes_on_and_its_memory_stays() {
        let (place, flights) = (Place::new(2), Arc::<SingleFlight>::default());
        let [ours, theirs] = [0, 1].map(|block| place.memory(block));
        place.region.write_at(0, &[42; LEN as usize]).expect("inside");
        let mut leader = flights.join([(KEY, CHECK, &ours)].into_iter());
        let mut follower = flights.join([(KEY, CHECK, &theirs)].into_iter());
        assert!(!follower.wait(0, || true));
        // Dropping one that waits does not wait either.
        drop(flights.join([(KEY, CHECK, &theirs)].into_iter()));
        leader.land(0, Some((&ours, CHECK)));
        assert_eq!(place.byte(1), 0);
    }
}
