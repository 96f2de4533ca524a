//! Random operations, with copies that fail and end late.

use crate::world::World;
use kvferry_blocks::{
    Config, GroupConfig, Outcome, PRIORITY_MAX, Retention, RetentionConfig, TokenRange,
    TransferMode,
};
use proptest::prelude::*;

/// What an engine does. Numbers choose among what there is.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Allocate { prompt: u32, len: usize, retention: u8 },
    Append { which: usize, tokens: u32, len: usize },
    Compute { which: usize },
    Store { which: usize },
    Free { which: usize, is_aborted: bool },
    Pin { which: usize },
    Unpin { which: usize },
    Finish { which: usize, is_done: bool },
    Wait { ms: u64 },
    Reset,
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let which = 0..64usize;
    prop_oneof![
        7 => ((0..8u32).prop_map(prompt), 1..14usize, any::<u8>())
            .prop_map(|(prompt, len, retention)| Op::Allocate { prompt, len, retention }),
        2 => (which.clone(), any::<u32>(), 1..6usize)
            .prop_map(|(which, tokens, len)| Op::Append { which, tokens, len }),
        9 => which.clone().prop_map(|which| Op::Compute { which }),
        3 => which.clone().prop_map(|which| Op::Store { which }),
        7 => (which.clone(), prop::bool::weighted(0.2))
            .prop_map(|(which, is_aborted)| Op::Free { which, is_aborted }),
        1 => which.clone().prop_map(|which| Op::Pin { which }),
        1 => which.clone().prop_map(|which| Op::Unpin { which }),
        8 => (which, prop::bool::weighted(0.85))
            .prop_map(|(which, is_done)| Op::Finish { which, is_done }),
        1 => (0..40u64).prop_map(|ms| Op::Wait { ms }),
        1 => Just(Op::Reset),
    ]
}

pub(crate) fn config() -> impl Strategy<Value = Config> {
    let group = (5..20u32, 0..12u32).prop_map(|(primary_blocks, secondary_blocks)| GroupConfig {
        primary_blocks,
        secondary_blocks,
    });
    let groups = prop::collection::vec(group, 1..4);
    (groups, 1..5u32, prop::bool::weighted(0.8), prop::bool::weighted(0.7)).prop_map(
        |(groups, tokens_per_block, partial_reuse, copy_on_partial_reuse)| Config {
            partial_reuse,
            copy_on_partial_reuse,
            events: 1 << 16,
            background_per_call: u32::MAX,
            ..Config::new(tokens_per_block, groups)
        },
    )
}

/// One of few prompts; the highest bit is its salt.
fn prompt(number: u32) -> u32 {
    number.wrapping_mul(0x9e37_79b9)
}

/// Tokens of few kinds: prompts have prefixes in common.
pub(crate) fn tokens(seed: u32, len: usize) -> Vec<u32> {
    (0..len).map(|at| seed >> (at * 2 % 32) & u32::from(at % 3 == 0)).collect()
}

pub(crate) fn retention(seed: u8) -> RetentionConfig {
    let worth = |bits: u8| match bits & 3 {
        0 => Retention { priority: 10, duration_ms: None },
        1 => Retention { priority: 80, duration_ms: Some(20) },
        2 => Retention { priority: PRIORITY_MAX, duration_ms: None },
        _ => Retention::DEFAULT,
    };
    let range = |start, end| TokenRange { start, end, retention: worth(seed) };
    let ranges = match seed >> 2 & 3 {
        0 => vec![range(0, None)],
        1 => vec![range(0, Some(5))],
        _ => vec![],
    };
    let config = RetentionConfig::new(ranges).expect("right ranges");
    let config = config.decode(worth(seed >> 4)).expect("a right priority");
    match seed >> 6 {
        0 => config.transfer(TransferMode::Gds, Some("a")).expect("a right directory"),
        1 => {
            config.transfer(TransferMode::PosixDebugFallback, Some("b")).expect("a right directory")
        }
        _ => config,
    }
}

/// One of what there is.
pub(crate) fn pick(which: usize, len: usize) -> Option<usize> {
    which.checked_rem(len)
}

pub(crate) fn apply(world: &mut World, op: &Op) {
    let running = world.running.len();
    match *op {
        Op::Allocate { prompt, len, retention: seed } => {
            let salt = u64::from(prompt >> 31);
            _ = world.allocate(&tokens(prompt, len), salt, &retention(seed));
        }
        Op::Append { which, tokens: seed, len } => {
            if let Some(at) = pick(which, running) {
                _ = world.append(at, &tokens(seed, len));
            }
        }
        Op::Compute { which } => {
            if let Some(at) = pick(which, running) {
                world.compute(at);
            }
        }
        Op::Store { which } => {
            if let Some(at) = pick(which, running) {
                world.store(at).expect("the keys are right");
            }
        }
        Op::Free { which, is_aborted } => {
            if let Some(at) = pick(which, running) {
                world.free(at, is_aborted);
            }
        }
        Op::Pin { which } => {
            if let Some(at) = pick(which, running) {
                world.pin(at);
            }
        }
        Op::Unpin { which } => {
            if let Some(at) = pick(which, world.pins.len()) {
                world.unpin(at);
            }
        }
        Op::Finish { which, is_done } => {
            if let Some(at) = pick(which, world.copies.len()) {
                world.finish(at, if is_done { Outcome::Done } else { Outcome::Failed });
            }
        }
        Op::Wait { ms } => world.now_ms += ms,
        Op::Reset => world.reset(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn no_block_has_two_owners_or_other_content_than_the_manager_says(
        config in config(),
        ops in prop::collection::vec(op(), 1..160),
    ) {
        let mut world = World::new(&config);
        for op in &ops {
            apply(&mut world, op);
            world.check();
        }
        world.settle(&config);
    }

    #[test]
    fn work_that_is_put_off_harms_no_block(
        config in config(),
        background_per_call in 0..3u32,
        ops in prop::collection::vec(op(), 1..160),
    ) {
        let config = Config { background_per_call, ..config };
        let mut world = World::new(&config);
        for op in &ops {
            apply(&mut world, op);
            world.check();
        }
        world.settle(&config);
        while background_per_call > 0 && world.manager.advance(world.now_ms) {
            world.check();
        }
    }
}
