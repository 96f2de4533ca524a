use super::*;
use crate::index::{Drained, Event};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// An event that owns its slots.
#[derive(Debug, PartialEq, Eq)]
enum Owned {
    Used(u64, u32, Vec<u32>),
    Added(u64, Option<u32>, Vec<u32>),
    Found(u64, Option<u32>, Vec<u32>),
    Removed(u32),
}

fn owned(event: Event<'_>) -> Owned {
    match event {
        Event::Used { now_ms, missing, slots } => Owned::Used(now_ms, missing, slots.to_vec()),
        Event::Added { now_ms, parent, slots } => Owned::Added(now_ms, parent, slots.to_vec()),
        Event::Found { now_ms, parent, slots } => Owned::Found(now_ms, parent, slots.to_vec()),
        Event::Removed { slot } => Owned::Removed(slot),
    }
}

fn drain(index: &Index, member: &Member) -> (Vec<Owned>, Drained) {
    let mut all = Vec::new();
    let drained = index.drain(member.id().number, |event| all.push(owned(event)));
    (all, drained)
}

#[test]
fn the_keeper_gets_the_events_in_their_order() {
    let member = index(10).join().expect("a member");
    member.note_used(1 << 40, 3, &[1, 2]);
    member.note_added(5, Some(0), &[7]);
    member.note_added(6, None, &[8, 9]);
    member.note_found(7, Some(9), &[3]);
    member.note_found(0, None, &[]);
    member.note_removed(4);
    let expected = vec![
        Owned::Used(1 << 40, 3, vec![1, 2]),
        Owned::Added(5, Some(0), vec![7]),
        Owned::Added(6, None, vec![8, 9]),
        Owned::Found(7, Some(9), vec![3]),
        Owned::Found(0, None, vec![]),
        Owned::Removed(4),
    ];
    assert_eq!(drain(&member, &member), (expected, Drained::default()));
    assert_eq!(drain(&member, &member), (vec![], Drained::default()));
}

#[test]
fn a_full_ring_counts_what_it_loses_and_asks_for_a_rebuild_if_that_was_a_removal() {
    let member = index(10).join().expect("a member");
    let slots: Vec<u32> = (0..1000).collect();
    // 261 events of 1004 words fit into 262144 words; the 131st passes the half.
    let half_full = (0..262).map(|_| member.note_used(0, 0, &slots));
    let rings: Vec<usize> =
        half_full.enumerate().filter_map(|(n, rings)| rings.then_some(n)).collect();
    assert_eq!(rings, [130]);
    for slot in 0..51 {
        member.note_removed(slot);
    }
    let (all, drained) = drain(&member, &member);
    assert_eq!(all.len(), 261 + 50);
    assert_eq!(drained, Drained { lost: 1, rebuild: true });
    member.note_removed(51);
    assert_eq!(drain(&member, &member), (vec![Owned::Removed(51)], Drained::default()));
    assert!(!member.note_used(0, 0, &vec![0; 1 << 18]));
    assert_eq!(drain(&member, &member).1.lost, 1);
}

#[test]
fn a_keeper_that_ends_at_an_event_leaves_it_to_its_successor() {
    let member = index(10).join().expect("a member");
    for slot in 0..3 {
        member.note_removed(slot);
    }
    let ends = std::panic::AssertUnwindSafe(|| {
        member.drain(member.id().number, |event| {
            assert!(event != Event::Removed { slot: 1 }, "the keeper ends");
        })
    });
    std::panic::catch_unwind(ends).expect_err("the keeper ends");
    assert_eq!(drain(&member, &member).0, [Owned::Removed(1), Owned::Removed(2)]);
}

#[test]
fn threads_that_tell_and_a_keeper_that_drains_lose_and_tear_nothing() {
    const EVENTS: u64 = 40_000;
    let member = index(10).join().expect("a member");
    let telling = AtomicBool::new(true);
    let mut seen = [0; 2];
    let mut lost = 0;
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|thread| {
            let member = &member;
            scope.spawn(move || {
                for n in 0..EVENTS {
                    let slots = vec![n as u32; n as usize % 100];
                    member.note_used(n, thread, &slots);
                }
            })
        });
        let (telling, member) = (&telling, &member);
        scope.spawn(move || {
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
            telling.store(false, SeqCst);
        });
        loop {
            let is_last = !telling.load(SeqCst);
            let drained = member.drain(member.id().number, |event| {
                let Event::Used { now_ms, missing, slots } = event else { panic!("{event:?}") };
                assert_eq!(slots, vec![now_ms as u32; now_ms as usize % 100]);
                seen[missing as usize] += 1;
            });
            lost += drained.lost;
            if is_last {
                break;
            }
        }
    });
    assert_eq!(seen[0] + seen[1] + lost, 2 * EVENTS);
}
