//! The policy against its rules, on random events and on workloads whose best answer is known.

use super::runs::Run;
use super::*;
use rustc_hash::FxHashSet;

/// Chains of a random forest: a block's key says which block is before it.
fn random_chain(rng: &mut Rng, roots: u64, depth: usize) -> Vec<Key> {
    let mut key = rng.u64(..roots);
    let mut chain = vec![key];
    for _ in 1..rng.usize(1..=depth) {
        key = key.wrapping_mul(7).wrapping_add(rng.u64(..2)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if chain.contains(&key) {
            break;
        }
        chain.push(key);
    }
    chain
}

impl Policy {
    /// Everything that the fields say of each other.
    fn check(&self) {
        let known: Vec<Slot> =
            self.blocks.all_slots().filter(|slot| self.blocks.is_known(*slot)).collect();
        assert_eq!(known.len(), self.len());
        self.check_children(&known);
        self.check_runs(&known);
        self.runs.check(self.now, |run| self.blocks.children(run.last) == 0);
        assert!(self.ghosts.len() <= REMEMBERED_MAX);
    }

    fn check_children(&self, known: &[Slot]) {
        let mut children: FxHashMap<Slot, u32> = FxHashMap::default();
        for slot in self.pins.keys() {
            assert!(self.contains(*slot), "pins are of known blocks");
            *children.entry(*slot).or_default() += 1;
        }
        for &slot in known {
            let chain = std::iter::successors(Some(slot), |slot| self.blocks.before(*slot));
            assert!(chain.take(known.len() + 2).count() < known.len() + 2, "a circle");
            if let Some(parent) = self.blocks.before(slot) {
                *children.entry(parent).or_default() += 1;
            }
        }
        for slot in self.blocks.all_slots() {
            let expected = children.get(&slot).copied().unwrap_or_default();
            assert_eq!(self.blocks.children(slot), expected);
        }
        for hole in &self.holes {
            assert!(!self.contains(*hole) && self.blocks.children(*hole) > 0);
        }
    }

    fn check_runs(&self, known: &[Slot]) {
        let mut of_runs: FxHashMap<u32, u32> = FxHashMap::default();
        for slot in known {
            *of_runs.entry(self.blocks.run(*slot).expect("it is known")).or_default() += 1;
        }
        for (id, len) in of_runs {
            let run = self.runs.get(id);
            assert_eq!(run.len, len);
            let blocks = std::iter::successors(Some(run.last), |slot| self.blocks.before(*slot));
            assert!(blocks.take(len as usize).all(|slot| self.blocks.run(slot) == Some(id)));
            assert!(run.used_at <= self.now && run.uses > 0 && run.whole >= len);
        }
        assert_eq!(self.runs.iter().map(|run| run.len as usize).sum::<usize>(), known.len());
    }

    fn next(&mut self, now_ms: u64) -> Option<Slot> {
        self.evict(now_ms, Key::from)
    }

    /// Adds blocks with their slots as keys.
    fn add(&mut self, now_ms: u64, parent: Option<Slot>, slots: &[Slot], retention: Retention) {
        let blocks: Vec<_> = slots.iter().map(|slot| (*slot, Key::from(*slot))).collect();
        self.added(now_ms, parent, &blocks, retention);
    }

    fn evict_all(&mut self, now_ms: u64) -> Vec<Slot> {
        std::iter::from_fn(|| self.next(now_ms)).collect()
    }
}

fn priority(priority: u8) -> Retention {
    Retention { priority, ..Retention::DEFAULT }
}

#[test]
fn the_bound_holds_and_no_block_leaves_before_those_behind_it() {
    for (capacity, roots, depth) in [(1, 3, 4), (7, 2, 20), (64, 20, 12), (500, 60, 40)] {
        let mut rng = Rng::with_seed(capacity as u64);
        let mut tier = Keyed::new(capacity, depth);
        let mut cached: FxHashSet<Key> = FxHashSet::default();
        let mut now = 0;
        for _ in 0..2000 {
            let chain = random_chain(&mut rng, roots, depth);
            now += rng.u64(..5_000);
            let expected = chain.iter().take_while(|key| cached.contains(*key)).count();
            let mut left = Vec::new();
            let hits = tier.request(now, &chain, &mut left);
            assert_eq!(hits, expected);
            cached.extend(&chain);
            for key in left {
                assert!(cached.remove(&key), "what leaves was there");
            }
            assert_eq!(cached.len(), tier.len());
            assert!(tier.len() <= capacity);
            assert!(cached.iter().all(|key| tier.contains(*key)));
            tier.policy().check();
            for slot in
                tier.policy().blocks.all_slots().filter(|slot| tier.policy().contains(*slot))
            {
                let parent = tier.policy().blocks.before(slot);
                assert!(parent.is_none_or(|parent| tier.policy().contains(parent)));
            }
        }
    }
}

#[test]
fn the_same_requests_have_the_same_outcome() {
    let run = || {
        let (mut tier, mut rng) = (Keyed::new(300, 30), Rng::with_seed(1));
        let mut left = Vec::new();
        let hits =
            (0..3000).map(|i| tier.request(i * 700, &random_chain(&mut rng, 200, 30), &mut left));
        (hits.sum::<usize>(), left.len())
    };
    assert_eq!(run(), run());
}

/// An event, as a ring between processes carries it.
#[derive(Clone, Debug)]
enum Event {
    Used { now: u64, chain: Vec<Slot>, missing: usize },
    Added { now: u64, parent: Option<Slot>, blocks: Vec<(Slot, Key)>, retention: Retention },
    Found { now: u64, parent: Option<Slot>, slots: Vec<Slot> },
    Removed { slot: Slot },
}

/// Blocks in slots that are used again, and the events that this causes.
struct World {
    rng: Rng,
    slots: FxHashMap<Key, Slot>,
    keys: FxHashMap<Slot, Key>,
    free: Vec<Slot>,
    now: u64,
}

impl World {
    fn new(slots: Slot, seed: u64) -> Self {
        let (slots_of, keys) = (FxHashMap::default(), FxHashMap::default());
        let free = (0..slots).collect();
        Self { rng: Rng::with_seed(seed), slots: slots_of, keys, free, now: 0 }
    }

    fn forget(&mut self, slot: Slot) {
        if let Some(key) = self.keys.remove(&slot) {
            self.slots.remove(&key);
            self.free.push(slot);
        }
    }

    fn retention(&mut self) -> Retention {
        let until_s = self
            .rng
            .bool()
            .then(|| u32::try_from(self.now / 1000).expect("small") + self.rng.u32(..100));
        let then = if self.rng.bool() { OnExpiry::Leave } else { OnExpiry::Default };
        match self.rng.u8(..4) {
            0 => Retention { priority: self.rng.u8(..=100), until_s, then },
            _ => Retention::DEFAULT,
        }
    }

    fn request(&mut self, events: &mut Vec<Event>) {
        self.now += self.rng.u64(..3_000);
        let keys = random_chain(&mut self.rng, 6, 20);
        let chain: Vec<Slot> = keys.iter().map_while(|key| self.slots.get(key).copied()).collect();
        let (now, missing) = (self.now, keys.len() - chain.len());
        let (mut parent, mut blocks) = (chain.last().copied(), Vec::new());
        events.push(Event::Used { now, chain: chain.clone(), missing });
        for key in &keys[chain.len()..] {
            if self.slots.contains_key(key) {
                break;
            }
            let Some(slot) = self.free.pop() else { break };
            self.slots.insert(*key, slot);
            self.keys.insert(slot, *key);
            blocks.push((slot, *key));
        }
        let retention = self.retention();
        let pieces: Vec<_> = blocks.chunks(self.rng.usize(1..8)).map(<[_]>::to_vec).collect();
        for blocks in pieces {
            let next = blocks.last().map(|(slot, _)| *slot);
            events.push(Event::Added { now, parent, blocks, retention });
            parent = next;
        }
        // Blocks that were behind a missing one, and are there.
        let behind =
            keys[chain.len()..].iter().skip_while(|key| self.slots.get(key) != parent.as_ref());
        let slots: Vec<Slot> =
            behind.skip(1).map_while(|key| self.slots.get(key).copied()).collect();
        if !slots.is_empty() {
            events.push(Event::Found { now, parent, slots });
        }
    }

    /// Nothing that any process would send.
    fn nonsense(&mut self) -> Event {
        let slot = |rng: &mut Rng| rng.u32(..90);
        let (now, rng) = (self.rng.u64(..1_000_000), &mut self.rng);
        let slots: Vec<Slot> = (0..rng.usize(..12)).map(|_| slot(rng)).collect();
        match rng.u8(..4) {
            0 => Event::Used { now, chain: slots, missing: rng.usize(..5) },
            2 => Event::Found { now, parent: rng.bool().then(|| slot(rng)), slots },
            1 => {
                let parent = rng.bool().then(|| slot(rng));
                let blocks = slots.iter().map(|slot| (*slot, rng.u64(..50))).collect();
                Event::Added { now, parent, blocks, retention: Retention::DEFAULT }
            }
            _ => Event::Removed { slot: slot(rng) },
        }
    }
}

impl Policy {
    fn apply(&mut self, event: Event) {
        match event {
            Event::Used { now, chain, missing } => self.used(now, &chain, missing),
            Event::Added { now, parent, blocks, retention } => {
                self.added(now, parent, &blocks, retention);
            }
            Event::Found { now, parent, slots } => self.found(now, parent, &slots),
            Event::Removed { slot } => self.removed(slot),
        }
    }
}

/// Random events. Of a thousand, so many are lost, given twice, late, and nonsense.
fn events_come(seed: u64, [lost, twice, late, nonsense]: [u32; 4]) {
    let slots = 80;
    let mut world = World::new(slots, seed);
    let mut policy = Policy::new(slots as usize);
    let mut delayed: Vec<Event> = Vec::new();
    for _ in 0..1500 {
        let mut events = Vec::new();
        world.request(&mut events);
        if world.rng.u8(..20) == 0 {
            let slot = world.rng.u32(..slots);
            world.forget(slot);
            events.push(Event::Removed { slot });
        }
        let of_thousand = |rng: &mut Rng, share| rng.u32(..1000) < share;
        if of_thousand(&mut world.rng, nonsense) {
            events.push(world.nonsense());
        }
        for event in events {
            if of_thousand(&mut world.rng, lost) {
                continue;
            }
            if of_thousand(&mut world.rng, twice) {
                policy.apply(event.clone());
                policy.check();
            }
            if of_thousand(&mut world.rng, late) {
                delayed.push(event);
                continue;
            }
            policy.apply(event);
            policy.check();
        }
        while world.rng.bool() && !delayed.is_empty() {
            let at = world.rng.usize(..delayed.len());
            policy.apply(delayed.swap_remove(at));
            policy.check();
        }
        let slot = world.rng.u32(..slots);
        match world.rng.u8(..8) {
            0 => _ = policy.pin(slot),
            1..4 => _ = policy.unpin(slot),
            _ => (),
        }
        policy.check();
        while world.free.len() < 25 {
            let evicted = match world.rng.u8(..4) {
                0 => policy.evict_due(world.now, Key::from),
                _ => policy.next(world.now),
            };
            policy.check();
            // What the policy does not know, the caller finds by itself.
            let slot = evicted.unwrap_or_else(|| world.rng.u32(..slots));
            if evicted.is_none() {
                policy.removed(slot);
            }
            world.forget(slot);
        }
    }
    for slot in 0..slots {
        while policy.unpin(slot) {}
    }
    let left = policy.len();
    assert_eq!(policy.evict_all(u64::MAX).len(), left, "each block can leave");
    assert!(policy.is_empty());
    policy.check();
}

#[test]
fn every_field_agrees_after_each_of_many_events() {
    (0..4).for_each(|seed| events_come(seed, [0; 4]));
}

#[test]
fn events_that_are_lost_late_given_twice_or_nonsense_do_no_harm() {
    for (seed, share) in (100..).zip([10, 50, 200, 500]) {
        events_come(seed, [share, share, share, 0]);
        events_come(seed, [share, 0, 0, share]);
        events_come(seed, [share; 4]);
    }
}

#[test]
fn slots_that_do_not_exist_do_no_harm() {
    let mut policy = Policy::new(4);
    for slot in [4, 1 << 31, Slot::MAX] {
        policy.used(1, &[slot], 0);
        policy.add(2, Some(slot), &[0, slot, 1], priority(3));
        policy.removed(slot);
        assert!(!policy.pin(slot) && !policy.unpin(slot) && !policy.contains(slot));
        policy.check();
    }
    assert_eq!(policy.evict_all(3), [0]);
}

#[test]
fn a_clock_that_goes_back_counts_as_one_that_stands_still() {
    let mut policy = Policy::new(4);
    policy.add(1_000_000, None, &[0, 1], Retention::DEFAULT);
    policy.used(5, &[0, 1], 0);
    assert!(policy.runs.iter().all(|run| run.used_at == 1_000_000 && run.uses == 2));
    policy.used(u64::MAX, &[0], 0);
    policy.check();
    assert_eq!(policy.evict_all(0), [1, 0]);
}

#[test]
fn a_block_that_a_chain_has_elsewhere_is_moved_there() {
    let mut policy = Policy::new(10);
    policy.add(1, None, &[0, 1, 2, 3], Retention::DEFAULT);
    policy.used(2, &[2, 3], 0);
    policy.check();
    assert_eq!(policy.blocks.link(2), Link::Root);
    policy.used(3, &[0, 2, 0], 0);
    policy.check();
    assert_eq!(policy.blocks.before(2), Some(0));
    assert_eq!(policy.len(), 4);
}

#[test]
fn a_parent_may_be_added_after_what_is_behind_it() {
    let mut policy = Policy::new(10);
    policy.add(1, Some(1), &[2, 3], priority(90));
    policy.add(2, Some(0), &[1], priority(10));
    policy.add(3, None, &[0], priority(10));
    policy.check();
    assert_eq!(policy.evict_all(4), [3, 2, 1, 0]);
}

#[test]
fn what_is_behind_a_removed_block_leaves_first() {
    let mut policy = Policy::new(20);
    policy.add(1, None, &[0, 1, 2, 3], priority(90));
    policy.add(2, Some(3), &[4, 5], priority(80));
    policy.add(3, None, &[9, 10], priority(0));
    policy.removed(1);
    policy.check();
    let due: Vec<_> = std::iter::from_fn(|| policy.evict_due(4, Key::from)).collect();
    assert_eq!(due, [5, 4, 3, 2]);
    assert_eq!(policy.evict_all(4), [10, 9, 0]);
}

#[test]
fn what_was_behind_a_removed_block_stays_if_a_request_finds_it_again() {
    let mut policy = Policy::new(20);
    policy.add(1, None, &[0, 1, 2, 3], Retention::DEFAULT);
    policy.removed(1);
    policy.add(2, Some(0), &[1], Retention::DEFAULT);
    policy.used(3, &[0, 1, 2, 3], 0);
    policy.check();
    assert_eq!(policy.evict_due(4, Key::from), None);
    assert_eq!(policy.evict_all(4), [3, 2, 1, 0]);
}

#[test]
fn what_was_behind_a_removed_block_stays_with_its_branches_if_a_put_finds_it_again() {
    let mut policy = Policy::new(20);
    policy.add(1, None, &[0, 1, 2, 3], Retention::DEFAULT);
    policy.add(2, Some(2), &[4, 5], priority(0));
    policy.add(3, None, &[9], priority(10));
    policy.removed(1);
    assert_eq!(policy.evict_due(4, Key::from), Some(5));
    // In another slot.
    policy.add(5, Some(0), &[11], Retention::DEFAULT);
    policy.found(6, Some(11), &[2]);
    policy.check();
    assert_eq!(policy.evict_due(7, Key::from), None);
    assert_eq!(policy.blocks.before(2), Some(11));
    assert_eq!(policy.evict_all(7), [4, 9, 3, 2, 11, 0]);
}

#[test]
fn a_block_that_a_put_finds_behind_another_one_keeps_what_is_behind_it() {
    let mut policy = Policy::new(20);
    policy.add(1, None, &[0, 1], Retention::DEFAULT);
    policy.add(2, None, &[2, 3, 4], Retention::DEFAULT);
    policy.found(3, Some(4), &[0]);
    policy.check();
    assert_eq!(policy.evict_due(4, Key::from), None);
    assert_eq!(policy.evict_all(4), [1, 0, 4, 3, 2]);
}

#[test]
fn found_blocks_that_would_close_a_circle_stay_where_they_are() {
    let mut policy = Policy::new(20);
    policy.add(1, None, &[0, 1, 2], Retention::DEFAULT);
    policy.found(2, Some(2), &[0, 7]);
    policy.found(2, Some(1), &[1]);
    policy.check();
    assert_eq!(policy.evict_due(3, Key::from), None);
    assert_eq!(policy.evict_all(3), [2, 1, 0]);
}

#[test]
fn what_is_due_by_its_retention_stays_due_if_a_put_finds_it() {
    let mut policy = Policy::new(20);
    let ends = Retention { priority: 50, until_s: Some(16), then: OnExpiry::Leave };
    policy.add(1, None, &[0], Retention::DEFAULT);
    policy.add(1, Some(0), &[1, 2], ends);
    policy.removed(0);
    policy.add(20_000, None, &[5], Retention::DEFAULT);
    policy.found(20_001, Some(5), &[1, 2]);
    policy.check();
    let due: Vec<_> = std::iter::from_fn(|| policy.evict_due(20_002, Key::from)).collect();
    assert_eq!(due, [2, 1]);
}

#[test]
fn a_lower_priority_leaves_first_but_never_before_what_is_behind_it() {
    let mut policy = Policy::new(20);
    policy.add(1, None, &[0, 1], priority(90));
    policy.add(2, Some(1), &[2, 3], priority(10));
    policy.add(3, None, &[4, 5], Retention::DEFAULT);
    policy.add(4, None, &[6], priority(0));
    policy.add(5, Some(6), &[7], priority(100));
    policy.check();
    assert_eq!(policy.evict_all(6), [3, 2, 5, 4, 1, 0, 7, 6]);
}

#[test]
fn a_priority_above_the_highest_counts_as_the_highest() {
    let mut policy = Policy::new(4);
    policy.add(1, None, &[0], priority(100));
    policy.add(2, None, &[1], priority(u8::MAX));
    policy.add(3, None, &[2], priority(99));
    policy.check();
    assert_eq!(policy.evict_all(4), [2, 0, 1]);
}

#[test]
fn a_priority_ends_with_its_time() {
    let ends = |priority, then| Retention { priority, until_s: Some(32), then };
    let policy = |now| {
        let mut policy = Policy::new(20);
        policy.add(1, None, &[0], ends(100, OnExpiry::Default));
        policy.add(2, None, &[1], Retention::DEFAULT);
        policy.add(3, None, &[2], ends(1, OnExpiry::Default));
        policy.add(4, None, &[3], ends(100, OnExpiry::Leave));
        let due: Vec<_> = std::iter::from_fn(|| policy.evict_due(now, Key::from)).collect();
        policy.check();
        (due, policy.evict_all(now))
    };
    assert_eq!(policy(31_999), (vec![], vec![2, 1, 0, 3]));
    assert_eq!(policy(32_000), (vec![3], vec![0, 1, 2]), "the default, so by last use");
}

#[test]
fn what_is_due_stays_behind_until_nothing_is_behind_it_and_stays_due_when_used() {
    let mut policy = Policy::new(20);
    let ends = Retention { priority: 50, until_s: Some(16), then: OnExpiry::Leave };
    policy.add(1, None, &[0, 1], ends);
    policy.add(2, Some(1), &[2], Retention::DEFAULT);
    policy.used(20_000, &[0, 1, 2], 0);
    assert_eq!(policy.evict_due(20_001, Key::from), None);
    policy.removed(2);
    policy.used(20_002, &[0, 1], 0);
    assert_eq!(policy.evict_due(20_003, Key::from), Some(1));
    assert_eq!(policy.evict_due(20_003, Key::from), Some(0));
}

#[test]
fn a_pinned_block_and_all_before_it_stay() {
    let mut policy = Policy::new(20);
    policy.add(1, None, &[0, 1, 2, 3], priority(0));
    assert!(policy.pin(1) && policy.pin(1));
    assert!(!policy.pin(9), "it is not known");
    policy.check();
    assert_eq!(policy.evict_all(2), [3, 2]);
    assert!(policy.unpin(1));
    assert_eq!(policy.evict_all(3), Vec::<Slot>::new());
    assert!(policy.unpin(1));
    assert!(!policy.unpin(1));
    assert_eq!(policy.evict_all(4), [1, 0]);
}

#[test]
fn a_pin_ends_with_a_block_that_is_removed() {
    let mut policy = Policy::new(4);
    policy.add(1, None, &[0, 1], Retention::DEFAULT);
    policy.pin(1);
    policy.removed(1);
    policy.check();
    assert!(!policy.unpin(1));
    policy.add(2, None, &[1], Retention::DEFAULT);
    assert_eq!(policy.evict_all(3), [0, 1]);
}

#[test]
fn a_prompt_that_is_stored_in_pieces_is_one_run_and_its_end() {
    let mut policy = Policy::new(100);
    policy.used(1, &[], 30);
    let slots: Vec<Slot> = (0..30).collect();
    for piece in slots.chunks(7) {
        policy.add(50, piece[0].checked_sub(1), piece, Retention::DEFAULT);
        policy.check();
    }
    let lens: Vec<u32> =
        policy.runs.iter().map(|run: &Run| run.len).filter(|len| *len > 0).collect();
    assert_eq!(lens, [29, 1]);
}

/// A request whose last five blocks have left comes again and stores them in pieces. Returns the runs
/// afterwards: how many blocks they have, and how often those were used.
fn runs_when_blocks_come_back(pieces: &[(usize, usize)]) -> Vec<(u32, u32)> {
    let mut policy = Policy::new(100);
    let slots: Vec<Slot> = (0..10).collect();
    policy.used(0, &[], 10);
    policy.add(0, None, &slots, Retention::DEFAULT);
    assert_eq!([(); 5].map(|()| policy.next(1000)), [9, 8, 7, 6, 5].map(Some));
    policy.used(2000, &slots[..5], 5);
    for &(from, to) in pieces {
        policy.add(2000, Some(slots[from - 1]), &slots[from..to], Retention::DEFAULT);
        policy.check();
    }
    policy.runs.iter().map(|run| (run.len, run.uses)).collect()
}

#[test]
fn what_comes_back_has_its_history_and_tells_of_the_blocks_before_it() {
    // Nothing of the request is new, so its first nine blocks are of one class.
    assert_eq!(runs_when_blocks_come_back(&[(5, 10)]), [(9, 2), (1, 2)]);
    // The first piece is taken for new until the second one comes.
    assert_eq!(runs_when_blocks_come_back(&[(5, 7), (7, 10)]), [(5, 2), (4, 2), (1, 2)]);
}

#[test]
fn a_rebuilt_policy_has_all_blocks_and_lets_them_leave_by_last_use() {
    for seed in 0..200 {
        let mut rng = Rng::with_seed(seed);
        let slots: Slot = rng.u32(1..200);
        let mut kept: Vec<Kept> = Vec::new();
        for slot in (0..slots).filter(|slot| slot % 7 != 3) {
            // Some parents are gone, and some close circles.
            let parent = rng.bool().then(|| rng.u32(..slots + 2));
            let used_at_ms = rng.u64(..5) * 1000;
            let retention = if rng.u8(..9) == 0 { priority(60) } else { Retention::DEFAULT };
            kept.push(Kept { slot, parent, used_at_ms, retention });
        }
        rng.shuffle(&mut kept);
        let mut policy = Policy::rebuild(slots as usize, kept.iter().copied());
        policy.check();
        assert_eq!(policy.len(), kept.len());
        assert_eq!(policy.evict_all(10_000).len(), kept.len());
    }
}

#[test]
fn a_rebuilt_policy_has_a_run_for_each_chain_of_equal_time() {
    let mut policy = Policy::new(1000);
    for chain in 0..10u32 {
        let slots: Vec<Slot> = (chain * 100..chain * 100 + 100).collect();
        policy.add(u64::from(chain) * 1000, None, &slots, priority(7));
    }
    let kept = (0..1000).rev().map(|slot: Slot| Kept {
        slot,
        parent: (!slot.is_multiple_of(100)).then(|| slot - 1),
        used_at_ms: u64::from(slot / 100) * 1000,
        retention: priority(7),
    });
    let mut rebuilt = Policy::rebuild(1000, kept);
    rebuilt.check();
    assert_eq!(rebuilt.runs.iter().filter(|run| run.len == 100).count(), 10);
    assert_eq!(rebuilt.evict_all(20_000), policy.evict_all(20_000));
}

#[test]
fn ten_million_blocks_in_chains_of_a_thousand_take_twelve_bytes_each() {
    let slots = 10_000_000;
    let mut policy = Policy::new(slots);
    for chain in 0..slots as u64 / 1000 {
        let first = Slot::try_from(chain * 1000).expect("a slot");
        let blocks: Vec<_> = (first..first + 1000).map(|slot| (slot, Key::from(slot))).collect();
        policy.used(chain, &[], blocks.len());
        policy.added(chain, None, &blocks, Retention::DEFAULT);
    }
    // As many ghosts as there can be.
    for slot in 0..200_000u32 {
        let interval = policy.reuse.begin(policy.now, policy.runs.get(0).class);
        let ghost = Ghost { uses: 1, used_at: 0, len: 1, interval };
        policy.ghosts.remember(u64::MAX - u64::from(slot), ghost);
    }
    assert_eq!(policy.len(), slots);
    assert!(policy.bytes() <= 12 * slots, "{} bytes", policy.bytes());
}

/// Hits of single blocks in the second half of a workload, as a share.
fn share_of_hits(capacity: usize, blocks: impl ExactSizeIterator<Item = Key>) -> f64 {
    let mut tier = Keyed::new(capacity, 1);
    let (count, mut hits, mut left) = (blocks.len(), 0, Vec::new());
    for (i, block) in blocks.enumerate() {
        let hit = tier.request(i as u64 * 10, &[block], &mut left);
        hits += if i >= count / 2 { hit } else { 0 };
    }
    hits as f64 / (count / 2) as f64
}

#[test]
fn a_loop_that_is_larger_than_the_cache_keeps_a_part_of_it() {
    // An order by last use has no hit at all; the best is 1000 of 1200.
    let share = share_of_hits(1000, (0..60_000u32).map(|i| Key::from(i % 1200)));
    assert!(share > 0.75, "{share}");
}

#[test]
fn what_comes_once_does_not_push_out_what_comes_again() {
    let mut rng = Rng::with_seed(2);
    // Every second block is new; the others are of 900.
    let blocks = (0..60_000u32).map(|i| match i % 2 {
        0 => rng.u64(..900),
        _ => Key::from(i) + 1_000_000,
    });
    let share = share_of_hits(1000, blocks);
    assert!(share > 0.45, "{share} of at most 0.5");
}
