//! The manager and the model do the same.

use crate::model::{At, Model};
use crate::model_ops::Short;
use crate::random::{self, Op, pick};
use crate::world::World;
use kvferry_blocks::{Error, EventKind, Key, Outcome, Tier};
use proptest::prelude::*;
use std::collections::BTreeMap;

struct Both {
    world: World,
    model: Model,
    /// Of each running sequence.
    ids: Vec<u64>,
    /// What the events say: tier and priority of each block.
    announced: BTreeMap<(u16, Key), (Tier, u8)>,
}

fn short<T>(result: Result<T, Error>) -> Result<T, Short> {
    result.map_err(|error| match error {
        Error::OutOfBlocks { .. } => Short::OutOfBlocks,
        Error::AwaitTransfers { .. } => Short::AwaitTransfers,
        other => panic!("{other}"),
    })
}

impl Both {
    fn apply(&mut self, op: &Op) {
        let Self { world, model, ids, .. } = self;
        let running = ids.len();
        match *op {
            Op::Allocate { prompt, len, retention } => {
                let (tokens, salt) = (random::tokens(prompt, len), u64::from(prompt >> 31));
                let retention = random::retention(retention);
                let allocated = short(world.allocate(&tokens, salt, &retention));
                model.advance(world.now_ms);
                let wanted = model.allocate(&tokens, salt, &retention);
                ids.extend(wanted.map(|(id, _)| id));
                assert_eq!(
                    allocated.map(|it| (it.reused_tokens, it.is_ready)),
                    wanted.map(|(id, reused)| (reused, model.is_ready(id)))
                );
            }
            Op::Append { which, tokens, len } => {
                let Some(at) = pick(which, running) else { return };
                let tokens = random::tokens(tokens, len);
                let appended = short(world.append(at, &tokens).map(|_| ()));
                model.advance(world.now_ms);
                assert_eq!(appended, model.append(ids[at], &tokens));
            }
            Op::Compute { which } => {
                let Some(at) = pick(which, running) else { return };
                assert_eq!(world.compute(at), model.is_ready(ids[at]));
            }
            Op::Store { which } => {
                let Some(at) = pick(which, running) else { return };
                let stored = world.store(at).expect("the keys are right") as usize;
                assert_eq!(stored, model.store(ids[at], world.running[at].computed));
            }
            Op::Free { which, is_aborted } => {
                let Some(at) = pick(which, running) else { return };
                let computed = if is_aborted { 0 } else { world.running[at].computed };
                world.free(at, is_aborted);
                model.free(ids.swap_remove(at), computed, world.now_ms);
            }
            Op::Pin { which } => {
                let Some(at) = pick(which, running) else { return };
                world.pin(at);
                model.pin(ids[at]);
            }
            Op::Unpin { which } => {
                let Some(at) = pick(which, world.pins.len()) else { return };
                world.unpin(at);
                model.advance(world.now_ms);
                model.unpin(at);
            }
            Op::Finish { which, is_done } => {
                let Some(at) = pick(which, world.copies.len()) else { return };
                let at = world.first_of_file(at);
                world.finish(at, if is_done { Outcome::Done } else { Outcome::Failed });
                model.advance(world.now_ms);
                model.finish(at, is_done);
            }
            Op::Wait { ms } => world.now_ms += ms,
            Op::Reset => {
                world.reset();
                if model.sequences.is_empty() && model.pins.is_empty() {
                    model.groups.iter_mut().for_each(|group| group.cached.clear());
                }
            }
        }
    }

    fn compare(&mut self) {
        let Self { world, model, ids, announced } = self;
        for (running, &id) in world.running.iter().zip(&*ids) {
            let is_ready = model.is_ready(id);
            let sequence = model.sequence(id);
            assert_eq!(running.tokens, sequence.tokens);
            assert_eq!(running.reused.is_some(), is_ready);
        }
        let copies = world.copies.iter().map(|(copy, _)| {
            (usize::from(copy.group), copy.key, copy.from.tier, copy.to.tier, copy.tokens)
        });
        let tier = |at: At| match at {
            At::Page(_) => Tier::Primary,
            At::Slot(_) => Tier::Secondary,
        };
        let wanted = model.started.iter().map(|id| {
            let copy = model.copies.iter().find(|copy| copy.id == *id).expect("it has not ended");
            (copy.group, copy.key, tier(copy.from), tier(copy.to), copy.tokens)
        });
        assert_eq!(copies.collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
        for group in 0..model.groups.len() {
            let usage = world.manager.usage(group as u16).expect("a group");
            let idle = model.groups[group].cached.values().filter(|it| it.is_idle()).count();
            assert_eq!(usage.primary_free as usize, model.free_pages(group).len(), "free pages");
            assert_eq!(usage.secondary_free as usize, model.free_slots(group).len(), "free slots");
            assert_eq!(usage.primary_cached as usize, idle, "idle blocks");
        }
        while let Some(event) = world.manager.poll_event() {
            let block = |key| (event.group, key);
            match event.kind {
                EventKind::Stored { key, priority, .. } => {
                    let before = announced.insert(block(key), (Tier::Primary, priority));
                    assert_eq!(before, None, "a block is stored once");
                }
                EventKind::Removed { key } => {
                    assert!(announced.remove(&block(key)).is_some(), "what is removed was stored");
                }
                EventKind::Updated { key, tier, priority } => {
                    let known = announced.get_mut(&block(key)).expect("it was stored");
                    if let Some(diff) = tier {
                        assert_eq!(std::mem::replace(&mut known.0, diff.new), diff.old);
                    }
                    if let Some(diff) = priority {
                        assert_eq!(std::mem::replace(&mut known.1, diff.new), diff.old);
                    }
                }
                _ => {}
            }
        }
        let cached = model.groups.iter().zip(0..).flat_map(|(group, number)| {
            let cached = group.cached.iter();
            cached.map(move |(key, it)| ((number, *key), (it.announced, it.retention.priority)))
        });
        assert_eq!(*announced, cached.collect(), "what events say");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn the_manager_does_what_the_naive_model_does(
        config in random::config(),
        ops in prop::collection::vec(random::op(), 1..160),
    ) {
        let (world, model) = (World::new(&config), Model::new(&config));
        let mut both = Both { world, model, ids: Vec::new(), announced: BTreeMap::new() };
        for op in &ops {
            both.apply(op);
            both.compare();
        }
    }
}
