//! Every state machine against its oracle, with operations and faults drawn at random; each run
//! draws the same. What was tried is printed, and nothing that can happen may be left out.

use kvferry_models::models::{MODELS, Model, Table};
use proptest::collection::vec;
use proptest::prelude::any;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::cell::RefCell;

fn check(name: &str) {
    let model: &Model = MODELS.iter().find(|model| model.name == name).expect("a model's name");
    let table = RefCell::new(Table::default());
    let (cases, len_max) = model.cases;
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    // Bytes shrink well: shorter scripts do less.
    let result =
        TestRunner::new_with_rng(config, rng).run(&vec(any::<u8>(), 1..len_max), |bytes| {
            (model.run)(&bytes, &mut |row, column| table.borrow_mut().note(row, column));
            Ok(())
        });
    if let Err(failure) = result {
        panic!("{failure}");
    }
    let (text, missing) = table.borrow().against(model);
    println!("{name}, {cases} scripts\n{text}");
    assert!(missing.is_empty(), "{missing:#?}");
}

macro_rules! models {
    ($($test:ident: $name:literal;)*) => {$(
        #[test]
        fn $test() {
            check($name);
        }
    )*};
}

models! {
    i1_each_side_of_a_session_ends_once_and_both_with_the_same_outcome: "session_model";
    i1_i7_requests_on_a_lane_end_once_and_in_order_with_the_right_bytes: "lane_model";
    i1_i2_i3_i5_handoffs_end_once_on_each_rank_with_the_right_bytes: "handoff_model";
    i1_i8_every_ticket_ends_once_and_its_peer_is_watched_until_then: "engine_handshake_model";
    i3_i8_i12_a_follower_knows_what_is_on_offer_whatever_was_lost: "directory_model";
    i1_i2_i3_i8_tasks_end_once_when_their_memory_is_quiet_and_leave_nothing: "tasks_model";
    i8_every_pending_connection_leaves_once_and_the_oldest_first: "admission_model";
    i8_frames_leave_in_order_with_heartbeats_first_and_are_bounded: "outbox_model";
    i8_events_leave_in_order_and_are_bounded: "inbox_model";
    i6_pings_are_due_at_their_interval_and_silence_after_its_window: "heartbeat_model";
    no_stream_id_is_ever_used_twice_and_recent_new_ones_always_may_be: "stream_window_model";
}
