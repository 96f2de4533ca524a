//! Requests that fail or are not answered, and stores that are closed meanwhile.

use super::*;

#[test]
fn uploads_wait_for_an_object_store_that_is_away() {
    let (memory, folder) = (Memory::new(), Folder::new("uploads-wait"));
    let engine = engine(&folder, &memory);
    memory.set(|state| state.does_fail = true);
    let prompt = prompt(1, 10);
    assert_eq!(engine.put(&prompt, 0).stored, 10);
    // More probes than a block has tries.
    wait_failed(&engine, 20);
    memory.set(|state| state.does_fail = false);
    let stats = flush(&engine);
    assert_eq!((stats.uploaded + stats.upload_dropped, stats.uploads_waiting), (10, 0));
    assert_eq!((stats.upload_dropped, memory.state().objects.len()), (0, 10));
}

#[test]
fn an_outage_costs_no_block_however_often_one_is_tried_in_it() {
    let (memory, folder) = (Memory::new(), Folder::new("one-waits"));
    let engine = engine(&folder, &memory);
    memory.set(|state| state.does_fail = true);
    // Alone: each failure is one of it, before the object store counts as away, too.
    assert_eq!(engine.put(&prompt(1, 1), 0).stored, 1);
    wait_failed(&engine, 20);
    memory.set(|state| state.does_fail = false);
    let stats = flush(&engine);
    assert_eq!((stats.uploaded, stats.upload_dropped), (1, 0));
}

#[test]
fn a_block_whose_upload_always_fails_keeps_no_other_waiting_and_is_given_up() {
    let (memory, folder) = (Memory::new(), Folder::new("poison"));
    let engine = engine(&folder, &memory);
    memory.set(|state| state.does_fail_first = true);
    engine.put(&prompt(1, 10), 0);
    wait_failed(&engine, 20);
    assert_eq!((memory.state().objects.len(), engine.store.stats().upload_dropped), (9, 0));
    engine.put(&prompt(2, 5), 0);
    let stats = flush(&engine);
    assert_eq!((stats.uploaded, stats.upload_dropped, stats.uploads_waiting), (14, 1, 0));
}

#[test]
fn a_request_that_is_given_up_has_failed() {
    let (memory, folder) = (Memory::new(), Folder::new("given-up"));
    let engine = engine(&folder, &memory);
    memory.set(|state| state.does_drop = true);
    assert_eq!(prefetch(&engine, &prompt(1, 4)), 0);
    assert_eq!(engine.store.stats().fetch_failed, 1);
}
