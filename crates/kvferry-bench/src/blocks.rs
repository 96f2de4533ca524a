//! Block tables: which block of a pool holds which part of a request.

use fastrand::Rng;

/// Every block of a pool once, in random order, as the free list of a busy engine.
pub(crate) fn shuffled(blocks: u32, rng: &mut Rng) -> Vec<u32> {
    let mut order: Vec<u32> = (0..blocks).collect();
    rng.shuffle(&mut order);
    order
}

/// A request's blocks, anywhere in a pool.
pub(crate) fn table(pool: u32, blocks: u32, rng: &mut Rng) -> Vec<u32> {
    let mut table = shuffled(pool, rng);
    table.truncate(blocks as usize);
    table
}

/// Position of the block `index` of `count` in a batch: the same scatter as the floor program's.
pub(crate) fn scattered(index: usize, count: usize) -> usize {
    const STRIDE: usize = 7919;
    // The stride is prime, so only a multiple of it would send two blocks to one place.
    let stride = if count.is_multiple_of(STRIDE) { 1 } else { STRIDE };
    (index * stride + 13) % count
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_shuffled_table_names_every_block_once() {
        let order = shuffled(1000, &mut Rng::with_seed(7));
        assert_eq!(order.iter().collect::<HashSet<_>>().len(), 1000);
        assert!(order.iter().all(|&block| block < 1000));
        assert!(order.iter().enumerate().filter(|&(at, &block)| at == block as usize).count() < 20);
    }

    #[test]
    fn the_scatter_is_one_to_one_for_any_count() {
        for count in [1, 2, 16, 256, 1000, 1024, 7919, 15838] {
            let places: HashSet<usize> = (0..count).map(|i| scattered(i, count)).collect();
            assert_eq!(places.len(), count, "{count}");
        }
        assert_eq!(scattered(5, 1024), (5 * 7919 + 13) % 1024);
    }
}
