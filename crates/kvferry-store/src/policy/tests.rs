//! The policy against its rules, on random chains and on workloads whose best answer is known.

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
        assert!(self.blocks.len() <= self.capacity);
        let mut children: FxHashMap<Key, u32> = FxHashMap::default();
        for (key, block) in &self.blocks {
            assert!(self.run(block.run).blocks.contains(key));
            if let Some(parent) = block.parent {
                assert!(self.blocks.contains_key(&parent), "a block has left before one behind it");
                *children.entry(parent).or_default() += 1;
            }
        }
        for (key, block) in &self.blocks {
            assert_eq!(block.children, children.get(key).copied().unwrap_or_default());
        }
        let of_runs: usize = self.runs.iter().flatten().map(|run| run.blocks.len()).sum();
        assert_eq!(of_runs, self.blocks.len());
        for (id, run) in self.runs.iter().enumerate() {
            let Some(run) = run else { continue };
            let last = run.blocks.back().expect("runs have blocks");
            assert_eq!(run.candidate.is_some(), self.blocks[last].children == 0);
            if let Some(place) = run.candidate {
                assert_eq!(self.candidates[place] as usize, id);
            }
        }
        assert!(self.ghosts.len() <= REMEMBERED_MIN.max(self.capacity));
    }
}

#[test]
fn the_bound_holds_and_no_block_leaves_before_those_behind_it() {
    for (capacity, roots, depth) in [(1, 3, 4), (7, 2, 20), (64, 20, 12), (500, 60, 40)] {
        let mut rng = Rng::with_seed(capacity as u64);
        let mut policy = Policy::new(capacity);
        let mut cached: FxHashSet<Key> = FxHashSet::default();
        let mut now = 0;
        for _ in 0..2000 {
            let chain = random_chain(&mut rng, roots, depth);
            now += rng.u64(..5_000);
            let expected = chain.iter().take_while(|key| cached.contains(*key)).count();
            let mut left = Vec::new();
            let hits = policy.request(now, &chain, &mut left);
            assert_eq!(hits, expected);
            cached.extend(&chain);
            for key in left {
                assert!(cached.remove(&key), "what leaves was there");
            }
            assert_eq!(cached.len(), policy.len());
            assert!(cached.iter().all(|key| policy.contains(*key)));
            policy.check();
        }
    }
}

#[test]
fn the_same_requests_have_the_same_outcome() {
    let run = || {
        let (mut policy, mut rng) = (Policy::new(300), Rng::with_seed(1));
        let mut left = Vec::new();
        let hits =
            (0..3000).map(|i| policy.request(i * 700, &random_chain(&mut rng, 200, 30), &mut left));
        (hits.sum::<usize>(), left.len())
    };
    assert_eq!(run(), run());
}

#[test]
fn a_clock_that_goes_back_and_chains_that_contradict_each_other_do_no_harm() {
    let mut policy = Policy::new(4);
    let mut left = Vec::new();
    assert_eq!(policy.request(1_000_000, &[1, 2, 3], &mut left), 0);
    assert_eq!(policy.request(5, &[1, 2, 3], &mut left), 3, "an earlier time");
    assert_eq!(policy.request(1_000_010, &[1, 3], &mut left), 1, "3 was cached behind 2");
    assert_eq!(policy.request(1_000_020, &[9, 1], &mut left), 0, "1 was cached as a first block");
    assert_eq!(policy.request(1_000_030, &[7, 7, 7], &mut left), 0);
    assert_eq!(policy.request(u64::MAX, &[1], &mut left), 1);
    policy.check();
}

/// Hits of single blocks in the second half of a workload, as a share.
fn share_of_hits(capacity: usize, blocks: impl ExactSizeIterator<Item = Key>) -> f64 {
    let mut policy = Policy::new(capacity);
    let (count, mut hits, mut left) = (blocks.len(), 0, Vec::new());
    for (i, block) in blocks.enumerate() {
        let hit = policy.request(i as u64 * 10, &[block], &mut left);
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
