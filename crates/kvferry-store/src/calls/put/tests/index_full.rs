//! Puts into a store whose index has no room, as no keeper gives blocks up.

use super::*;

const BLOCKS: u64 = 1024;

impl Bench {
    /// Options of a store with as many slots as it may have at least.
    fn few_slots(&self) -> StoreOptions {
        self.options().blocks_max(BLOCKS as u32)
    }

    /// Puts short blocks, from the number `first` on.
    fn put_short(&self, kv: &Space, first: u64, blocks: u64) -> Put {
        let memory = vec![BlockMemory::new(&self.pool, 0, 512); blocks as usize];
        kv.put(&prompt(first, blocks), 0, &memory, Retain::default()).expect("a put")
    }
}

/// Ends the thread that would give blocks up.
fn end_keeper(store: &Store) {
    store.inner().worker.stop();
}

#[test]
fn blocks_for_which_the_index_has_no_room_are_refused_and_counted_until_the_keeper_makes_some() {
    let _watchdog = Watchdog::new(PATIENCE * 2);
    let bench = bench("index-full");
    let (store, kv) = bench.open(&bench.few_slots());
    end_keeper(&store);
    assert_eq!(bench.put_short(&kv, 0, BLOCKS).stored, BLOCKS as usize);
    let put = bench.put_short(&kv, 2000, 3);
    let refused = Put { refused: 3, refused_index_full: 3, ..Put::default() };
    assert_eq!(put, refused);
    assert_eq!(bench.put_short(&kv, 0, 2), Put { present: 2, ..Put::default() });
    let stats = store.stats();
    assert_eq!((stats.refused, stats.refused_index_full), (3, 3));
    assert_eq!((stats.blocks, stats.stored), (BLOCKS, BLOCKS));
    store.close();
    let (store, kv) = bench.open(&bench.few_slots());
    until("the keeper makes room", || bench.put_short(&kv, 3000, 1).stored == 1);
    store.close();
}

#[test]
fn a_block_in_host_memory_for_which_the_index_has_no_room_is_refused_when_it_is_put_again() {
    let _watchdog = Watchdog::new(PATIENCE * 2);
    let bench = bench("index-full-host");
    let (store, kv) = bench.open(&bench.few_slots().host_bytes(4 << 20));
    end_keeper(&store);
    assert_eq!(bench.put_short(&kv, 0, BLOCKS).stored, BLOCKS as usize);
    store.sync().expect("the index has room");
    assert_eq!(store.stats().blocks, BLOCKS);
    assert_eq!(bench.put_short(&kv, 2000, 1).stored, 1, "in memory");
    until("it is tried", || store.stats().unwritten_blocks == 1);
    let again = bench.put_short(&kv, 2000, 1);
    assert_eq!(again, Put { refused: 1, refused_index_full: 1, ..Put::default() });
    assert!(store.sync().is_err());
    // It counts once more, as it is never written.
    store.close();
    assert_eq!(store.stats().refused_index_full, 2);
}
