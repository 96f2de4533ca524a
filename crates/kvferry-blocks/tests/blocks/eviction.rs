//! Which blocks leave, and which stay.

use crate::sentences::{cached, config, events, finish_all, prompt, serve, world, worth};
use crate::world::World;
use kvferry_blocks::{
    Config, Diff, Error, EventKind, Match, Outcome, Retention, RetentionConfig, TokenRange,
};

#[test]
fn blocks_leave_from_the_end_of_a_prompt_by_priority_and_then_by_last_use() {
    let mut world = world(8, 0);
    let (low, high) = (worth(20, None), worth(60, None));
    serve(&mut world, &prompt(1, 8), &high);
    serve(&mut world, &prompt(2, 8), &low);
    serve(&mut world, &prompt(3, 8), &high);
    let left = |world: &World| [1, 2, 3].map(|n| cached(world, &prompt(n, 8)).blocks);
    let mut need = |len: u32| {
        let prompt = prompt(9, len);
        world.allocate(&prompt, 0, &low).unwrap();
        world.free(0, true);
        left(&world)
    };
    assert_eq!(need(8), [2, 2, 2]);
    assert_eq!(need(12), [2, 1, 2]);
    assert_eq!(need(16), [2, 0, 2]);
    assert_eq!(need(20), [1, 0, 2]);
    assert_eq!(need(28), [0, 0, 1]);
}

#[test]
fn a_block_that_is_used_is_never_evicted() {
    let mut world = world(4, 4);
    let default = RetentionConfig::default();
    world.allocate(&prompt(1, 12), 0, &default).unwrap();
    let error = world.allocate(&prompt(2, 8), 0, &default).unwrap_err();
    assert_eq!(error, Error::OutOfBlocks { group: 0, needed: 2, available: 1 });
    assert!(world.allocate(&prompt(3, 4), 0, &default).is_ok());
    assert!(matches!(world.append(0, &[1]), Err(Error::OutOfBlocks { .. })));
    world.free(1, true);
    assert_eq!(world.append(0, &[1]), Ok(1));
    world.check();
}

#[test]
fn a_block_of_a_priority_that_is_too_low_is_removed_and_others_are_offloaded() {
    let mut world = world(4, 4);
    serve(&mut world, &prompt(1, 8), &worth(29, None));
    serve(&mut world, &prompt(2, 8), &worth(30, None));
    serve(&mut world, &prompt(3, 16), &worth(35, None));
    assert_eq!(cached(&world, &prompt(1, 8)), Match::default());
    assert_eq!(cached(&world, &prompt(2, 8)), Match { blocks: 2, secondary_blocks: 2 });
    // It comes back, and its secondary blocks are free again.
    assert_eq!(serve(&mut world, &[&prompt(2, 8)[..], &[1]].concat(), &worth(35, None)), 8);
    assert_eq!(cached(&world, &prompt(2, 8)), Match { blocks: 2, secondary_blocks: 0 });
}

#[test]
fn secondary_gives_up_nothing_that_is_worth_more() {
    let mut world = world(2, 2);
    serve(&mut world, &prompt(1, 8), &worth(80, None));
    serve(&mut world, &prompt(2, 8), &worth(40, None));
    assert_eq!(cached(&world, &prompt(1, 8)).secondary_blocks, 2);
    serve(&mut world, &prompt(3, 8), &worth(90, None));
    assert_eq!(cached(&world, &prompt(1, 8)).secondary_blocks, 2);
    assert_eq!(cached(&world, &prompt(2, 8)).blocks, 0);
}

#[test]
fn a_priority_ends_a_while_after_the_block_was_let_go_and_never_while_it_is_used() {
    let mut world = world(4, 0);
    world.allocate(&prompt(1, 8), 0, &worth(90, Some(100))).unwrap();
    world.compute(0);
    world.now_ms = 1000;
    world.free(0, false);
    serve(&mut world, &prompt(2, 8), &worth(50, None));
    world.now_ms = 1099;
    world.allocate(&prompt(3, 4), 0, &worth(0, None)).unwrap();
    let left = |world: &World| [1, 2].map(|n| cached(world, &prompt(n, 8)).blocks);
    assert_eq!(left(&world), [2, 1]);
    world.now_ms = 1100;
    world.allocate(&prompt(4, 4), 0, &worth(0, None)).unwrap();
    assert_eq!(left(&world), [1, 1]);
    let told = events(&mut world);
    let ended = |event: &&EventKind| {
        matches!(event, EventKind::Updated { priority: Some(Diff { old: 90, new: 35 }), .. })
    };
    assert_eq!(told.iter().filter(ended).count(), 2);
}

#[test]
fn a_prompt_has_the_priorities_of_its_ranges_and_what_is_decoded_its_own() {
    let mut world = world(16, 0);
    let of = |priority| Retention { priority, duration_ms: None };
    let range = |start, end, priority| TokenRange { start, end, retention: of(priority) };
    let ranges = [range(0, Some(4), 90), range(7, Some(9), 70)];
    let retention = RetentionConfig::new(ranges).unwrap().decode(of(5)).unwrap();
    world.allocate(&prompt(1, 13), 0, &retention).unwrap();
    world.append(0, &prompt(2, 7)).unwrap();
    world.compute(0);
    world.free(0, false);
    let stored = events(&mut world).into_iter().filter_map(|event| match event {
        EventKind::Stored { priority, .. } => Some(priority),
        _ => None,
    });
    // The block of tokens 12 to 15 begins in the prompt, where no range has it.
    assert_eq!(stored.collect::<Vec<_>>(), [90, 35, 70, 35, 5]);
}

#[test]
fn a_large_subtree_dies_over_several_calls_and_is_not_found_meanwhile() {
    let mut world = World::new(&Config { background_per_call: 0, ..config(64, 64) });
    let (default, first) = (RetentionConfig::default(), prompt(1, 4));
    serve(&mut world, &first, &worth(10, None));
    let behind = |number: u32| [&first[..], &prompt(10 + number, 4)].concat();
    for number in 0..32 {
        serve(&mut world, &behind(number), &default);
    }
    // It needs all pages: the blocks behind the first one are offloaded, and the first one is removed.
    world.allocate(&prompt(2, 4 * 64), 0, &default).unwrap();
    assert_eq!(cached(&world, &first).blocks, 0);
    assert!(world.manager.advance(0), "blocks are yet to be removed");
    world.check();
    finish_all(&mut world, Outcome::Done);
    world.free(0, true);
    assert_eq!(serve(&mut world, &behind(0), &default), 0);
    assert_eq!(cached(&world, &behind(0)).blocks, 2);
    // A page that is taken removes two.
    assert!(world.manager.advance(0));
    world.allocate(&prompt(3, 4 * 64), 0, &default).unwrap();
    world.free(0, true);
    finish_all(&mut world, Outcome::Done);
    world.check();
}

#[test]
fn pinned_blocks_stay_when_their_sequence_is_freed() {
    let mut world = world(4, 4);
    let default = RetentionConfig::default();
    world.allocate(&prompt(1, 8), 0, &default).unwrap();
    world.compute(0);
    world.store(0).unwrap();
    world.pin(0);
    world.free(0, false);
    assert!(matches!(world.allocate(&prompt(2, 12), 0, &default), Err(Error::OutOfBlocks { .. })));
    assert_eq!(cached(&world, &prompt(1, 8)), Match { blocks: 2, secondary_blocks: 0 });
    world.unpin(0);
    assert!(world.allocate(&prompt(2, 12), 0, &default).is_ok());
}
