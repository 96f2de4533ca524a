//! S3-FIFO: three queues and two bits for each block. Yang et al., "FIFO queues are all you need for cache eviction",
//! SOSP 2023, algorithm 1.

use std::collections::{HashMap, VecDeque};

use super::{Cache, Lru};

/// The small queue has one of so many blocks, the main queue the others.
const SMALL_ONE_OF: usize = 10;
const USES_MAX: u8 = 3;
/// A block of the small queue that was used more often than this moves to the main queue.
const MOVES_ABOVE: u8 = 1;

/// Blocks for which the main queue has room.
fn main_share(capacity: usize) -> usize {
    capacity - capacity / SMALL_ONE_OF
}

/// A block is stored in the small queue, or in the main queue if it is a ghost. Blocks leave at the front of a queue.
#[derive(Debug)]
pub(in crate::store) struct S3Fifo {
    capacity: usize,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    /// Blocks that have left the small queue. As many are remembered as the main queue has room for. A ghost is never
    /// used, so the order is that of leaving.
    ghosts: Lru,
    /// Uses of each cached block since it came into its queue; each turn in the main queue takes one off.
    uses: HashMap<u64, u8>,
}

impl S3Fifo {
    /// `capacity` is at least 1.
    pub(in crate::store) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghosts: Lru::new(main_share(capacity)),
            uses: HashMap::new(),
        }
    }

    fn evict(&mut self) {
        if self.small.len() * SMALL_ONE_OF >= self.capacity {
            self.evict_from_small();
        } else {
            self.evict_from_main();
        }
    }

    fn evict_from_small(&mut self) {
        while let Some(block) = self.small.pop_front() {
            let uses = self.uses.get_mut(&block).expect("it is cached");
            if *uses <= MOVES_ABOVE {
                self.uses.remove(&block);
                self.ghosts.used(block);
                return;
            }
            *uses = 0;
            self.main.push_back(block);
            if self.main.len() > main_share(self.capacity) {
                self.evict_from_main();
            }
        }
    }

    fn evict_from_main(&mut self) {
        while let Some(block) = self.main.pop_front() {
            let uses = self.uses.get_mut(&block).expect("it is cached");
            if *uses == 0 {
                self.uses.remove(&block);
                return;
            }
            *uses -= 1;
            self.main.push_back(block);
        }
    }
}

impl Cache for S3Fifo {
    fn contains(&self, block: u64) -> bool {
        self.uses.contains_key(&block)
    }

    fn used(&mut self, block: u64) {
        if let Some(uses) = self.uses.get_mut(&block) {
            *uses = USES_MAX.min(*uses + 1);
            return;
        }
        while self.uses.len() >= self.capacity {
            self.evict();
        }
        let queue = if self.ghosts.remove(block) { &mut self.main } else { &mut self.small };
        queue.push_back(block);
        self.uses.insert(block, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of ten blocks, one of them in the small queue, to which `blocks` came.
    fn ten(blocks: impl IntoIterator<Item = u64>) -> S3Fifo {
        let mut cache = S3Fifo::new(10);
        blocks.into_iter().for_each(|block| cache.used(block));
        cache
    }

    fn use_times(cache: &mut S3Fifo, block: u64, times: usize) {
        (0..times).for_each(|_| cache.used(block));
    }

    #[test]
    fn a_full_cache_evicts_the_oldest_block_of_the_small_queue() {
        let mut cache = ten(0..10);
        assert!((0..10).all(|block| cache.contains(block)));
        cache.used(10);
        assert!(!cache.contains(0) && (1..=10).all(|block| cache.contains(block)));
    }

    #[test]
    fn a_block_that_was_used_twice_more_moves_to_the_main_queue_others_leave() {
        let mut cache = ten(0..10);
        use_times(&mut cache, 0, 2);
        use_times(&mut cache, 1, 1);
        cache.used(10);
        assert_eq!(cache.main, [0]);
        assert!(cache.contains(0) && !cache.contains(1) && cache.ghosts.contains(1));
        assert_eq!(cache.uses[&0], 0, "the move clears the uses");
    }

    #[test]
    fn blocks_of_the_main_queue_survive_a_scan_of_blocks_that_come_once() {
        let mut cache = ten([1, 2, 3]);
        (1..=3).for_each(|block| use_times(&mut cache, block, 2));
        (100..1000).for_each(|block| cache.used(block));
        assert_eq!(cache.main, [1, 2, 3]);
        assert!((1..=3).all(|block| cache.contains(block)));
    }

    #[test]
    fn a_ghost_that_comes_back_enters_the_main_queue_and_is_no_ghost_any_more() {
        let mut cache = ten(0..11);
        assert!(cache.ghosts.contains(0));
        cache.used(0);
        assert_eq!(cache.main, [0]);
        assert!(!cache.ghosts.contains(0) && cache.uses[&0] == 0);
        assert!(cache.ghosts.contains(1), "1 left for it");
    }

    #[test]
    fn as_many_ghosts_are_remembered_as_the_main_queue_has_room_for_the_oldest_is_forgotten() {
        let cache = ten(0..20);
        let ghosts: Vec<u64> = (0..20).filter(|block| cache.ghosts.contains(*block)).collect();
        assert_eq!(ghosts, (1..10).collect::<Vec<_>>());
    }

    #[test]
    fn the_main_queue_gives_a_block_another_turn_for_each_of_up_to_three_uses() {
        let mut cache = ten(0..11);
        // Ghosts fill the main queue, until the small one has less than its share.
        (0..10).for_each(|block| cache.used(block));
        assert_eq!(cache.main, (0..10).collect::<Vec<_>>());
        use_times(&mut cache, 0, 7);
        use_times(&mut cache, 1, 1);
        assert_eq!([cache.uses[&0], cache.uses[&1]], [3, 1]);
        let mut left = Vec::new();
        while !cache.main.is_empty() {
            cache.evict_from_main();
            let has_left = (0..10).find(|it| !cache.contains(*it) && !left.contains(it));
            left.extend(has_left);
        }
        assert_eq!(left, [2, 3, 4, 5, 6, 7, 8, 9, 1, 0]);
    }

    #[test]
    fn the_capacity_holds_and_each_block_is_in_one_queue() {
        for capacity in [1, 2, 9, 10, 11, 100] {
            let mut rng = fastrand::Rng::with_seed(capacity as u64);
            let mut cache = S3Fifo::new(capacity);
            for _ in 0..5000 {
                let block = rng.u64(..3 * capacity as u64).min(rng.u64(..3 * capacity as u64));
                cache.used(block);
                assert!(cache.contains(block));
                assert!(cache.uses.len() <= capacity);
                assert!(cache.uses.values().all(|uses| *uses <= USES_MAX));
                assert_eq!(cache.small.len() + cache.main.len(), cache.uses.len());
                assert!(cache.small.iter().chain(&cache.main).all(|block| cache.contains(*block)));
                assert!(cache.uses.keys().all(|block| !cache.ghosts.contains(*block)));
            }
        }
    }
}
