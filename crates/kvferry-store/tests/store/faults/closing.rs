//! Stores that are closed or dropped while they are used.

use super::*;

#[test]
fn a_store_that_is_dropped_while_operations_run_ends_them_and_can_be_opened_again() {
    let folder = Folder::new("dropped");
    let prompt = prompt(1, POOL);
    for round in 0..30 {
        let Engine { agent, store, kv, pool, .. } =
            Engine::open(&options(folder.path(), 32 * MIB), LEN);
        let memory = |block: usize| BlockMemory::new(&pool, block as u64 * LEN, LEN);
        let put = |block| {
            let (one, memory) = (&prompt[block..=block], [memory(block)]);
            kv.put_async(one, 0, &memory, Retain::default(), Duration::ZERO).expect("it is open")
        };
        let pending: Vec<_> = (0..POOL).map(put).collect();
        if round % 2 == 0 {
            store.close();
        }
        drop((store, kv));
        for pending in pending {
            let outcome = pending.wait(Some(PATIENCE / 2)).expect("an outcome");
            let is_right = match outcome.as_ref() {
                Ok(put) => put.stored + put.present == 1,
                Err(e) => matches!(e, Error::Closed),
            };
            assert!(is_right, "{outcome:?}");
        }
        drop(agent);
    }
}

#[test]
fn puts_gets_and_a_close_on_many_threads_at_once_end_as_they_should() {
    let folder = Folder::new("threads");
    let hits = AtomicUsize::new(0);
    for round in 0..10 {
        let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
        let before = hits.load(SeqCst);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (engine, hits) = (&engine, &hits);
                scope.spawn(move || {
                    for seed in 0.. {
                        let prompt = prompt(round * 1_000_000 + thread * 10_000 + seed, 2);
                        let [to, from] = [thread as usize * 2, thread as usize * 2 + 1];
                        engine.fill(to, &content(&prompt[0], LEN));
                        let (put, get) = ([engine.memory(to)], [engine.memory(from)]);
                        match engine.kv.put(&prompt, 0, &put, Retain::default()) {
                            Ok(put) => assert_eq!(put.failed, 0),
                            Err(e) => return assert!(matches!(e, Error::Closed), "{e}"),
                        }
                        match engine.kv.get(&prompt, 0, &get) {
                            Ok(0) => {}
                            Ok(_) => {
                                assert!(engine.bytes(from) == content(&prompt[0], LEN));
                                hits.fetch_add(1, SeqCst);
                            }
                            Err(e) => return assert!(matches!(e, Error::Closed), "{e}"),
                        }
                    }
                });
            }
            eventually("a get finds a block", || hits.load(SeqCst) > before);
            std::thread::sleep(Duration::from_millis(30 + round * 3));
            engine.store.close();
        });
        assert_eq!(engine.store.stats().corrupt, 0);
    }
    assert!(hits.load(SeqCst) > 0);
}

#[test]
fn a_store_can_be_opened_at_each_moment_of_anothers_close() {
    let folder = Folder::new("close-open");
    let options = options(folder.path(), 32 * MIB);
    let agent = kvferry::Agent::builder().name("engine").start().expect("an agent");
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_done.load(SeqCst) {
                    Store::open(&agent, &options).expect("a store").close();
                }
            });
        }
        for _ in 0..100 {
            let store = Store::open(&agent, &options).expect("a store");
            assert_eq!(store.space(&Namespace::new("model")).lookup(&prompt(1, 1)).ok(), Some(0));
        }
        is_done.store(true, SeqCst);
    });
}
