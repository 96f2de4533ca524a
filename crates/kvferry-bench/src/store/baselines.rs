//! Policies that know nothing of chains of blocks, and the optimum. Each gives the hits of each request: how many of
//! its blocks, from the first, are cached when it comes.

mod lru;
mod s3_fifo;

use std::collections::{BTreeSet, HashMap};

use super::trace::Request;

pub(super) use lru::Lru;
pub(super) use s3_fifo::S3Fifo;

/// A cache of blocks.
pub(super) trait Cache {
    fn contains(&self, block: u64) -> bool;

    /// A request uses a block, which is stored if it is missing.
    fn used(&mut self, block: u64);
}

/// A request uses its last block first, so that the beginnings of chains stay longer.
pub(super) fn hits(requests: &[Request], mut cache: impl Cache) -> Vec<usize> {
    let hits = requests.iter().map(|request| {
        let hits = request.blocks.iter().take_while(|block| cache.contains(**block)).count();
        request.blocks.iter().rev().for_each(|block| cache.used(*block));
        hits
    });
    hits.collect()
}

/// Belady's: what is used latest leaves first; of equals, what is deepest in its chain.
pub(super) fn optimum(requests: &[Request], capacity: usize) -> Vec<usize> {
    // Backwards: for each block of each request, the request that uses it next.
    let mut next_use = HashMap::new();
    let mut nexts: Vec<Vec<Option<usize>>> = Vec::with_capacity(requests.len());
    for (number, request) in requests.iter().enumerate().rev() {
        let of_request = request.blocks.iter().map(|block| next_use.insert(*block, number));
        nexts.push(of_request.collect());
    }
    nexts.reverse();
    let mut cached: HashMap<u64, (usize, usize)> = HashMap::new();
    let mut by_next = BTreeSet::new();
    let mut hits = Vec::with_capacity(requests.len());
    for (request, nexts) in requests.iter().zip(nexts) {
        hits.push(request.blocks.iter().take_while(|block| cached.contains_key(*block)).count());
        for (depth, (&block, next)) in request.blocks.iter().zip(nexts).enumerate() {
            if let Some((next, depth)) = cached.remove(&block) {
                by_next.remove(&(next, depth, block));
            }
            let Some(next) = next else { continue };
            cached.insert(block, (next, depth));
            by_next.insert((next, depth, block));
            if by_next.len() > capacity {
                let (_, _, last) = by_next.pop_last().expect("more than the capacity");
                cached.remove(&last);
            }
        }
    }
    hits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(chains: &[&[u64]]) -> Vec<Request> {
        let request =
            |(at, chain): (usize, &&[u64])| Request { at: at as u64, blocks: chain.to_vec() };
        chains.iter().enumerate().map(request).collect()
    }

    #[test]
    fn a_block_is_a_hit_only_behind_its_prefix() {
        let requests = requests(&[&[1, 2, 3], &[1, 2, 4], &[1, 2, 3]]);
        assert_eq!(hits(&requests, Lru::new(10)), [0, 2, 3]);
        // With three places: 3 was used before 4 and 2 and 1.
        assert_eq!(hits(&requests, Lru::new(3)), [0, 2, 2]);
        assert_eq!(optimum(&requests, 3), [0, 2, 3], "4 is not used again");
        assert_eq!(optimum(&requests, 1), [0, 1, 1]);
    }

    #[test]
    fn a_loop_larger_than_the_cache_has_no_hit_by_last_use_and_many_by_the_optimum() {
        let blocks: Vec<[u64; 1]> = (0..1000).map(|i| [i % 12]).collect();
        let chains: Vec<&[u64]> = blocks.iter().map(|block| &block[..]).collect();
        let requests = requests(&chains);
        assert_eq!(hits(&requests, Lru::new(10)).iter().sum::<usize>(), 0);
        assert!(optimum(&requests, 10).iter().sum::<usize>() > 800);
    }
}
