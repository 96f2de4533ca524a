//! What the manager promises, a sentence a test.

use crate::world::{World, keys_of};
use kvferry_blocks::{
    Action, BlockManager, Config, Diff, Error, Event, EventKind, GroupConfig, Key, Match, Outcome,
    Request, Retention, RetentionConfig, Tier, TokenRange, TransferMode, Usage, Warning,
};

pub(crate) const BLOCK: u32 = 4;

pub(crate) fn config(primary_blocks: u32, secondary_blocks: u32) -> Config {
    Config::new(BLOCK, [GroupConfig { primary_blocks, secondary_blocks }])
}

pub(crate) fn world(primary_blocks: u32, secondary_blocks: u32) -> World {
    World::new(&config(primary_blocks, secondary_blocks))
}

/// Tokens that no other prompt has.
pub(crate) fn prompt(number: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| number * 1000 + at).collect()
}

pub(crate) fn worth(priority: u8, duration_ms: Option<u64>) -> RetentionConfig {
    let retention = Retention { priority, duration_ms };
    RetentionConfig::new([TokenRange { start: 0, end: None, retention }]).expect("a right range")
}

/// Computes a prompt and lets it go, and ends all copies. Returns how many tokens were reused.
pub(crate) fn serve(world: &mut World, tokens: &[u32], retention: &RetentionConfig) -> u32 {
    let allocation = world.allocate(tokens, 0, retention).expect("blocks");
    finish_all(world, Outcome::Done);
    let at = world.running.len() - 1;
    assert_eq!(world.running[at].id, allocation.sequence);
    assert!(world.compute(at));
    world.free(at, false);
    world.check();
    allocation.reused_tokens
}

pub(crate) fn finish_all(world: &mut World, outcome: Outcome) {
    while !world.copies.is_empty() {
        world.finish(0, outcome);
    }
}

pub(crate) fn cached(world: &World, tokens: &[u32]) -> Match {
    world.manager.find_prefix(&keys_of(0, tokens, BLOCK as usize))
}

pub(crate) fn events(world: &mut World) -> Vec<EventKind> {
    std::iter::from_fn(|| world.manager.poll_event()).map(|event: Event| event.kind).collect()
}

#[test]
fn a_prompt_reuses_its_longest_stored_prefix_and_computes_at_least_one_token() {
    let mut world = world(32, 0);
    let default = RetentionConfig::default();
    let first = prompt(1, 16);
    assert_eq!(serve(&mut world, &first, &default), 0);
    let longer = [&first[..8], &prompt(2, 8)].concat();
    assert_eq!(serve(&mut world, &longer, &default), 8);
    // The same prompt again: the last token of its last block is computed.
    assert_eq!(serve(&mut world, &first, &default), 15);
}

#[test]
fn an_idle_block_is_taken_over_for_its_first_tokens_and_one_with_others_behind_it_is_copied() {
    let mut world = world(32, 0);
    let default = RetentionConfig::default();
    let first = prompt(1, 8);
    serve(&mut world, &first, &default);
    let similar = [&first[..6], &[7, 7, 7, 7]].concat();
    world.allocate(&first, 0, &default).unwrap();
    let allocation = world.allocate(&similar, 0, &default).unwrap();
    assert_eq!(allocation.reused_tokens, 4, "its owner took the second block over");
    world.free(1, true);
    world.free(0, true);
    serve(&mut world, &first, &default);
    // The second block gets a block behind it, so it can't be taken over.
    serve(&mut world, &prompt(1, 12), &default);
    let allocation = world.allocate(&similar, 0, &default).unwrap();
    assert_eq!((allocation.reused_tokens, allocation.is_ready), (6, false));
    assert_eq!(world.copies[0].0.tokens, 2);
    finish_all(&mut world, Outcome::Done);
    assert_eq!(world.running[0].reused, Some(6));
}

#[test]
fn a_part_of_a_first_block_is_reused_under_the_same_salt_only() {
    let mut world = world(32, 0);
    let default = RetentionConfig::default();
    serve(&mut world, &prompt(1, 4), &default);
    let similar = [&prompt(1, 3)[..], &[9, 9]].concat();
    assert_eq!(world.allocate(&similar, 7, &default).unwrap().reused_tokens, 0);
    assert_eq!(world.allocate(&similar, 0, &default).unwrap().reused_tokens, 3);
}

#[test]
fn a_sequence_waits_for_the_copies_that_leave_and_fill_its_blocks_and_these_are_in_order() {
    let mut world = world(2, 4);
    let default = RetentionConfig::default();
    serve(&mut world, &prompt(1, 8), &default);
    serve(&mut world, &prompt(2, 8), &default);
    let allocation = world.allocate(&prompt(1, 8), 0, &default).unwrap();
    assert_eq!((allocation.reused_tokens, allocation.is_ready), (7, false));
    // Two offloads; what is to be written to their sources comes later.
    let tiers =
        |world: &World| -> Vec<_> { world.copies.iter().map(|copy| copy.0.to.tier).collect() };
    assert_eq!(tiers(&world), [Tier::Secondary; 2]);
    world.finish(0, Outcome::Done);
    assert_eq!(tiers(&world), [Tier::Secondary, Tier::Primary]);
    world.finish(0, Outcome::Done);
    world.finish(0, Outcome::Done);
    assert_eq!(world.running[0].reused, None);
    world.finish(0, Outcome::Done);
    assert_eq!(world.running[0].reused, Some(7));
    world.check();
}

#[test]
fn a_failed_onboard_leaves_the_prefix_before_it_and_the_sequence_goes_on() {
    let mut world = world(4, 8);
    let default = RetentionConfig::default();
    serve(&mut world, &prompt(1, 16), &default);
    serve(&mut world, &prompt(2, 16), &default);
    let tokens = [&prompt(1, 12)[..], &[5]].concat();
    world.allocate(&tokens, 0, &default).unwrap();
    while world.copies.iter().any(|(copy, _)| copy.to.tier == Tier::Secondary) {
        let at = world.copies.iter().position(|(copy, _)| copy.to.tier == Tier::Secondary);
        world.finish(at.unwrap(), Outcome::Done);
    }
    let second = keys_of(0, &tokens, BLOCK as usize)[1];
    let at = world.copies.iter().position(|(copy, _)| copy.key == second).unwrap();
    world.finish(at, Outcome::Failed);
    finish_all(&mut world, Outcome::Done);
    assert_eq!(world.running[0].reused, Some(4));
    assert_eq!(world.running[0].tokens.len(), 4);
    assert_eq!(cached(&world, &tokens).blocks, 1);
    world.append(0, &tokens[4..]).unwrap();
    finish_all(&mut world, Outcome::Done);
    assert!(world.compute(0));
    world.free(0, false);
    assert_eq!(cached(&world, &tokens).blocks, 3);
    world.check();
}

#[test]
fn a_failed_offload_drops_the_block_only() {
    let mut world = world(4, 8);
    let default = RetentionConfig::default();
    serve(&mut world, &prompt(1, 16), &default);
    world.allocate(&prompt(2, 16), 0, &default).unwrap();
    // The last block of the first prompt leaves first.
    world.finish(0, Outcome::Failed);
    finish_all(&mut world, Outcome::Done);
    assert_eq!(world.running[0].reused, Some(0));
    assert_eq!(cached(&world, &prompt(1, 16)), Match { blocks: 3, secondary_blocks: 3 });
}

#[test]
fn blocks_of_an_aborted_sequence_stay_with_their_copies_until_these_end() {
    let mut world = world(4, 4);
    let default = RetentionConfig::default();
    serve(&mut world, &prompt(1, 16), &default);
    world.allocate(&prompt(2, 16), 0, &default).unwrap();
    world.free(0, true);
    let free = |world: &World| world.manager.usage(0).unwrap().primary_free;
    assert_eq!(free(&world), 0);
    assert!(matches!(world.allocate(&prompt(3, 4), 0, &default), Err(Error::OutOfBlocks { .. })));
    world.finish(0, Outcome::Done);
    assert_eq!(free(&world), 1);
    finish_all(&mut world, Outcome::Done);
    let usage = Usage { primary_free: 4, primary_cached: 0, secondary_free: 0 };
    assert_eq!(world.manager.usage(0), Some(usage));
    assert_eq!(world.manager.poll_action(), None);
}

#[test]
fn groups_reuse_the_prefix_that_all_of_them_have() {
    let group = |primary_blocks| GroupConfig { primary_blocks, secondary_blocks: 0 };
    let mut world = World::new(&Config::new(BLOCK, [group(16), group(5)]));
    let default = RetentionConfig::default();
    serve(&mut world, &prompt(1, 12), &default);
    serve(&mut world, &prompt(2, 12), &default);
    assert_eq!(cached(&world, &prompt(1, 12)).blocks, 2);
    assert_eq!(serve(&mut world, &prompt(1, 12), &default), 8);
}

#[test]
fn a_file_is_named_by_content_and_read_where_it_was_written() {
    let mut world = world(2, 4);
    let to = |mode, directory| RetentionConfig::default().transfer(mode, Some(directory)).unwrap();
    serve(&mut world, &prompt(1, 4), &to(TransferMode::Gds, "a"));
    world.allocate(&prompt(2, 8), 0, &to(TransferMode::PosixDebugFallback, "b")).unwrap();
    let key = keys_of(0, &prompt(1, 4), BLOCK as usize)[0];
    let offload = world.copies[0].0.clone();
    assert_eq!(offload.file_name(), format!("{key}-0-0.kv"));
    assert_eq!((offload.mode, offload.directory.as_deref()), (TransferMode::Gds, Some("a")));
    finish_all(&mut world, Outcome::Done);
    world.free(0, true);
    // Another request's directory does not matter for a block that is there.
    let longer = [&prompt(1, 4)[..], &[1]].concat();
    world.allocate(&longer, 0, &to(TransferMode::PosixDebugFallback, "b")).unwrap();
    let onboard = world.copies[0].0.clone();
    assert_eq!((onboard.mode, onboard.directory.as_deref()), (TransferMode::Gds, Some("a")));
    assert_eq!(onboard.file_name(), offload.file_name());
}

#[test]
fn a_file_mode_without_a_directory_falls_back_to_memory_with_one_warning() {
    let mut world = world(1, 1);
    let mode = TransferMode::Gds;
    let wish = RetentionConfig::default().transfer(mode, Some("")).unwrap();
    let allocation = world.allocate(&prompt(1, 4), 0, &wish).unwrap();
    assert_eq!(allocation.warning, Some(Warning::DirectoryMissing { mode }));
    world.compute(0);
    world.free(0, false);
    let allocation = world.allocate(&prompt(2, 4), 0, &RetentionConfig::default()).unwrap();
    assert_eq!(allocation.warning, None);
    assert_eq!(world.copies[0].0.mode, TransferMode::Dram);
    assert_eq!(world.copies[0].0.directory, None);
}

#[test]
fn events_tell_the_life_of_a_block() {
    let mut world = world(1, 1);
    let default = RetentionConfig::default();
    serve(&mut world, &prompt(1, 4), &default);
    serve(&mut world, &prompt(2, 4), &default);
    let [first, second] = [1, 2].map(|n| keys_of(0, &prompt(n, 4), BLOCK as usize)[0]);
    let stored = |key| EventKind::Stored { key, parent: None, tokens: BLOCK, priority: 35 };
    let tier = Some(Diff { old: Tier::Primary, new: Tier::Secondary });
    let offloaded = |key| EventKind::Updated { key, tier, priority: None };
    let wanted = [
        EventKind::Created { primary_blocks: 1, secondary_blocks: 1 },
        stored(first),
        offloaded(first),
        stored(second),
    ];
    assert_eq!(events(&mut world), wanted);
    serve(&mut world, &prompt(3, 4), &default);
    let wanted = [EventKind::Removed { key: first }, offloaded(second)];
    assert_eq!(events(&mut world)[..2], wanted);
}

#[test]
fn wrong_calls_are_errors_that_change_nothing() {
    let mut manager = BlockManager::new(&config(4, 4)).unwrap();
    let retention = RetentionConfig::default();
    let keys = [Key([1, 1]), Key([1, 2])];
    let right =
        Request { prompt_tokens: 9, keys: &keys, tokens: &[], salt: 0, retention: &retention };
    let wrong = [
        Request { prompt_tokens: 0, keys: &[], ..right },
        Request { prompt_tokens: 12, ..right },
        Request { tokens: &[1, 2], ..right },
    ];
    for request in wrong {
        assert!(matches!(manager.allocate(&request, 0), Err(Error::Request(_))));
    }
    let id = manager.allocate(&right, 0).unwrap().sequence;
    let too_many = [keys[0], keys[1], Key([1, 3])];
    assert!(matches!(manager.store(id, &too_many, &[]), Err(Error::Request(_))));
    assert!(matches!(manager.store(id, &keys, &[1; 7]), Err(Error::Request(_))));
    assert_eq!(manager.store(id, &keys, &[]), Ok(2));
    let other = [keys[0], Key([9, 9])];
    assert_eq!(manager.free(id, &other, &[], 0), Err(Error::KeyMismatch { block: 1 }));
    assert_eq!(manager.free(id, &keys, &[], 0), Ok(()));
    assert_eq!(manager.free(id, &keys, &[], 0), Err(Error::UnknownSequence));
    assert_eq!(manager.append(id, 1, 0), Err(Error::UnknownSequence));
    assert_eq!((manager.blocks(id, 0), manager.is_ready(id)), (None, None));
    assert_eq!(manager.check(), Ok(()));
    assert_eq!(manager.poll_action(), None::<Action>);
}

#[test]
fn a_config_without_blocks_is_an_error_that_names_the_group() {
    let group = |primary_blocks| GroupConfig { primary_blocks, secondary_blocks: 1 };
    let error = BlockManager::new(&Config::new(BLOCK, [group(1), group(0)])).unwrap_err();
    assert_eq!(error.to_string(), "block manager: group 1 has no primary blocks");
    assert!(BlockManager::new(&Config::new(0, [group(1)])).is_err());
    assert!(BlockManager::new(&Config::new(BLOCK, [])).is_err());
    let config = Config { secondary_offload_min_priority: 101, ..config(1, 1) };
    assert!(BlockManager::new(&config).is_err());
}

#[test]
fn a_config_that_needs_more_memory_than_there_is_is_an_error() {
    let group = GroupConfig { primary_blocks: u32::MAX / 4, secondary_blocks: u32::MAX / 4 };
    for config in [
        Config::new(u32::MAX, [group]),
        Config { events: usize::MAX, ..config(1, 1) },
        Config { events: usize::MAX >> 8, ..config(1, 1) },
    ] {
        let error = BlockManager::new(&config).unwrap_err().to_string();
        assert!(error.contains("bytes of memory, which the system does not give"), "{error}");
    }
}

#[test]
fn a_reset_forgets_all_blocks_and_is_refused_while_they_are_used() {
    let mut world = world(4, 4);
    let default = RetentionConfig::default();
    serve(&mut world, &prompt(1, 16), &default);
    world.allocate(&prompt(2, 8), 0, &default).unwrap();
    assert_eq!(world.manager.reset(), Err(Error::InUse { sequences: 1, pins: 0 }));
    world.free(0, true);
    // Two offloads are in progress.
    assert_eq!(world.manager.reset(), Ok(()));
    assert_eq!(cached(&world, &prompt(1, 16)), Match::default());
    world.check();
    finish_all(&mut world, Outcome::Done);
    world.check();
    let usage = Usage { primary_free: 4, primary_cached: 0, secondary_free: 4 };
    assert_eq!(world.manager.usage(0), Some(usage));
}

#[test]
fn a_file_is_discarded_when_no_block_uses_it_also_if_its_block_was_forgotten_and_came_again() {
    let mut world = world(2, 2);
    let files = RetentionConfig::default().transfer(TransferMode::Gds, Some("a")).unwrap();
    let again = |world: &mut World| {
        world.allocate(&prompt(1, 4), 0, &files).unwrap();
        assert!(world.compute(0));
        world.free(0, false);
    };
    again(&mut world);
    world.allocate(&prompt(2, 8), 0, &files).unwrap();
    world.free(0, true);
    world.manager.reset().unwrap();
    again(&mut world);
    world.allocate(&prompt(3, 4), 0, &files).unwrap();
    assert_eq!(world.copies.len(), 2, "each writes a file of its own");
    finish_all(&mut world, Outcome::Done);
    let key = keys_of(0, &prompt(1, 4), BLOCK as usize)[0];
    assert_eq!(world.discarded, [format!("{key}-0-0.kv")]);
    world.free(0, true);
    let longer = [&prompt(1, 4)[..], &[1]].concat();
    assert_eq!(serve(&mut world, &longer, &files), 4);
    assert_eq!(world.discarded, [0, 1].map(|resets| format!("{key}-0-{resets}.kv")));
}

#[test]
fn blocks_that_a_reset_has_left_are_not_offloaded() {
    let mut config = config(4, 4);
    // Nodes behind the first one die in later calls.
    config.background_per_call = 0;
    let mut world = World::new(&config);
    let files = RetentionConfig::default().transfer(TransferMode::Gds, Some("a")).unwrap();
    serve(&mut world, &prompt(1, 16), &files);
    world.manager.reset().unwrap();
    world.allocate(&prompt(1, 16), 0, &files).unwrap();
    assert!(world.copies.is_empty(), "what no prompt can find is not copied");
    world.check();
    // What is stored again is copied.
    assert!(world.compute(0));
    world.free(0, false);
    assert_eq!(cached(&world, &prompt(1, 16)).blocks, 4);
    world.allocate(&prompt(2, 16), 0, &files).unwrap();
    assert_eq!(world.copies.len(), 4);
    finish_all(&mut world, Outcome::Done);
    world.free(0, true);
    assert_eq!(cached(&world, &prompt(1, 16)), Match { blocks: 4, secondary_blocks: 4 });
    world.check();
}
