//! Block tables: which block of a pool holds which part of a request.

/// A small generator of numbers (splitmix64): tables only need to look random, and a seed must give
/// the same ones in two processes.
#[derive(Debug, Clone)]
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn from_seed(seed: u64) -> Numbers {
        Numbers(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `bound`; the bias of the multiplication is far below anything visible here.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// A bijection on 64 bits that spreads neighbours apart.
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// Every block of a pool once, in random order, as an engine's free list looks after a day of work.
pub(crate) fn shuffled(blocks: u32, numbers: &mut Numbers) -> Vec<u32> {
    let mut order: Vec<u32> = (0..blocks).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, numbers.below(last as u64 + 1) as usize);
    }
    order
}

/// Where the block `index` of `count` goes in the bench: the same scatter as the floor program's.
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
        let order = shuffled(1000, &mut Numbers::from_seed(7));
        assert_eq!(order.iter().collect::<HashSet<_>>().len(), 1000);
        assert!(order.iter().all(|&block| block < 1000));
        let in_place = order.iter().enumerate().filter(|&(at, &block)| at == block as usize);
        assert!(in_place.count() < 20, "shuffled means shuffled");
    }

    #[test]
    fn a_seed_gives_the_same_table_again_and_another_seed_another() {
        let table = |seed| shuffled(64, &mut Numbers::from_seed(seed));
        assert_eq!(table(1), table(1));
        assert_ne!(table(1), table(2));
        assert!(shuffled(0, &mut Numbers::from_seed(1)).is_empty());
    }

    #[test]
    fn the_scatter_of_the_bench_is_one_to_one_for_any_count() {
        for count in [1, 2, 16, 256, 1000, 1024, 7919, 15838] {
            let places: HashSet<usize> = (0..count).map(|i| scattered(i, count)).collect();
            assert_eq!(places.len(), count, "{count}");
        }
        assert_eq!(scattered(5, 1024), (5 * 7919 + 13) % 1024);
    }
}
