use super::*;
use crate::index::SegmentState::{Active, Collecting, Free, Sealed};
use std::thread;

#[test]
fn a_segment_is_claimed_by_one_member_and_has_a_new_incarnation_each_time() {
    let index = index(10);
    let members = [(); 2].map(|()| index.join().expect("a member"));
    let claims: [Vec<u32>; 2] = thread::scope(|scope| {
        let claim =
            |member| scope.spawn(move || std::iter::from_fn(|| Member::claim(member)).collect());
        members.each_ref().map(claim).map(|thread| thread.join().expect("no panic"))
    });
    let mut all = claims.concat();
    all.sort_unstable();
    assert_eq!(all, (0..70).collect::<Vec<_>>());
    let mut incarnations: Vec<u64> = index.segments().map(|(_, s)| s.incarnation).collect();
    incarnations.sort_unstable();
    assert_eq!(incarnations, (1..=70).collect::<Vec<_>>());
    assert_eq!(index.held_by(members[1].id()).count(), claims[1].len());
    let (a, b) = (members[0].id(), members[1].id());
    assert!(index.set_segment(3, index.segment(3).state, Sealed));
    assert!(
        index.set_segment(3, Sealed, Collecting(a)) && !index.set_segment(3, Sealed, Collecting(b))
    );
    assert!(index.set_segment(3, Collecting(a), Free));
    assert_eq!(members[1].claim(), Some(3));
    let again = index.segment(3);
    assert_eq!((again.state, again.incarnation), (Active(b), 71));
}

#[test]
fn segments_count_what_lives_in_them() {
    let member = index(10).join().expect("a member");
    for n in 0..3 {
        insert(&member, n, 5 * PAGES_PER_SEGMENT + 1);
    }
    let counts = |segment| {
        let segment = member.segment(segment);
        (segment.live_pages, segment.live_blocks)
    };
    let entry = member.find(&key(0)).expect("there");
    let pages = entry.len.div_ceil(4096);
    assert_eq!(counts(5), (3 * pages, 3));
    member.relocate(&entry, 6 * PAGES_PER_SEGMENT);
    member.remove(&member.find(&key(1)).expect("there"));
    assert_eq!((counts(5), counts(6)), ((pages, 1), (pages, 1)));
    member.live_in(5).store(77, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(member.recount(), 0);
    verify(&member);
}

#[test]
fn restored_segments_are_sealed_and_later_incarnations_are_higher() {
    let member = index(10).join().expect("a member");
    assert!(member.restore_segment(0, 900) && member.restore_segment(1, 17));
    assert!(!member.restore_segment(1, 17), "it is not free");
    assert_eq!(member.claim(), Some(2));
    assert_eq!(member.segment(2).incarnation, 901);
    assert_eq!(member.segment(1).state, Sealed);
}
