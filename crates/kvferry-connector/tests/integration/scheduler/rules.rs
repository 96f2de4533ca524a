//! One rule of the contract per test.

mod fetched;
mod produced;
mod room;

use super::{
    CHUNK, Calls, ENGINE, FULL, PRODUCER, RANKS, STATE, WINDOW, assert_idle, config, consumes,
    fetched, first, lost, next, offered, produces, request, scheduler, step, transfer,
};
use kvferry::{Access, Incarnation, RemoteRegion};
use kvferry_connector::{
    BlockTable, Cancel, Claim, ConnectorMetadata, ConsumerParams, EndingKind, EngineError, Expect,
    FetchRequest, FinishReason, Finished, Free, GroupRule, IdleLimit, Match, Model, NULL_BLOCK,
    Notes, Offer, Params, Producers, PromptId, RankMetadata, Refused, Request, Role, Scheduler,
    SchedulerConfig, Stats, producer_params,
};
use kvferry_models::engines::layout_of_rank;
use kvferry_proto::WireCode;
use kvferry_proto::layout::{Kind, Region};
use serde_json::json;

const NULL: u32 = NULL_BLOCK;

/// The metadata of tensor-parallel rank `rank`.
fn rank_metadata(rank: u32) -> Vec<u8> {
    let layout = layout_of_rank(rank, RANKS as u32, RANKS as u32);
    let (incarnation, addr, access) = (Incarnation(7), 4096, Access::READ);
    let remote = |it: &Region| RemoteRegion { incarnation, id: it.id, addr, len: it.len, access };
    let regions = layout.regions().iter().map(remote).collect();
    let address = format!("10.0.0.1:{rank}").parse().expect("an address");
    RankMetadata { address, model: Model::default(), layout, regions }.encode()
}

fn metadata_of_ranks() -> Vec<Vec<u8>> {
    (0..RANKS as u32).map(rank_metadata).collect()
}

/// The metadata of a step that computes nothing.
fn empty_step(scheduler: &mut Scheduler) -> ConnectorMetadata {
    step(scheduler, [], &[])
}

/// The only ending of metadata that have nothing else.
fn ending(metadata: ConnectorMetadata) -> EndingKind {
    let [ending] = <[_; 1]>::try_from(metadata.endings.clone()).expect("one ending");
    let rest = ConnectorMetadata { endings: vec![], ..metadata };
    assert!(rest.is_empty(), "{rest:?}");
    ending.how
}

fn withdrawn(metadata: ConnectorMetadata) -> WireCode {
    match ending(metadata) {
        EndingKind::Withdrawn { code, .. } => code,
        how @ EndingKind::Held { .. } => panic!("{how:?}"),
    }
}

#[test]
fn the_worker_halves_get_the_engine_once() {
    let mut it = scheduler(&[FULL], true);
    it.set_ranks(metadata_of_ranks()).expect("an engine");
    assert!(it.has_pending_work());
    let engine = empty_step(&mut it).engine.expect("the engine");
    assert_eq!(engine.id, ENGINE);
    assert_eq!(engine.ranks, metadata_of_ranks());
    assert!(empty_step(&mut it).is_empty());
    assert_idle(&it);
}

#[test]
fn ranks_that_contradict_each_other_are_refused() {
    let mut it = scheduler(&[FULL], true);
    let refused = it.set_ranks(metadata_of_ranks()[1..].to_vec()).expect_err("one is missing");
    assert!(matches!(refused, EngineError::Ranks { given: 2, ranks: RANKS }), "{refused}");
    let mut broken = metadata_of_ranks();
    broken[1] = b"hello".to_vec();
    let refused = it.set_ranks(broken).expect_err("one is malformed");
    assert!(matches!(refused, EngineError::Rank { rank: 1, .. }), "{refused}");
    let same = vec![rank_metadata(0); RANKS];
    let refused = it.set_ranks(same).expect_err("heads are on no rank");
    assert!(matches!(refused, EngineError::Topology(_)), "{refused}");
    assert_idle(&it);
}

/// A producer's request `a` of handoff `x`, whose prompt of 8 tokens is computed.
fn computed(eager: bool) -> Scheduler {
    let mut it = scheduler(&[FULL], eager);
    it.set_ranks(metadata_of_ranks()).expect("an engine");
    it.arrived(&request("a", 8, &produces("x")));
    assert_eq!(step(&mut it, [first("a", 8, &[&[1, 2, 3, 4]])], &[]).computes.len(), 1);
    it
}

fn end(it: &mut Scheduler, how: FinishReason) -> Finished {
    it.end_request(&request("a", 8, &produces("x")), how, None, None)
}

/// A consumer's request `b` of handoff `x`, whose tokens 4 to 10 are being fetched.
fn fetching() -> Scheduler {
    let mut it = scheduler(&[FULL, WINDOW], true);
    it.give_blocks(&request("b", 10, &consumes("x")), 4, 6, &[vec![1, 2, 3], vec![NULL, 5]]);
    it
}

fn end_fetching(it: &mut Scheduler, how: FinishReason) {
    let params = consumes("x");
    assert_eq!(it.end_request(&request("b", 10, &params), how, None, None), Finished::default());
}

fn freed(metadata: &ConnectorMetadata) -> Vec<(&str, WireCode)> {
    metadata.frees.iter().map(|free| (free.transfer.as_str(), free.code)).collect()
}

#[test]
fn a_response_has_what_routers_pass_on_under_nixls_names() {
    let params = end(&mut computed(true), FinishReason::Length).params.expect("handed over");
    for (key, value) in [
        ("do_remote_prefill", json!(true)),
        ("do_remote_decode", json!(false)),
        ("remote_engine_id", json!(ENGINE.to_string())),
        ("remote_request_id", json!("x")),
        ("remote_host", json!("10.0.0.1")),
        ("remote_port", json!(0)),
        ("remote_block_ids", json!([[]])),
        ("tp_size", json!(RANKS)),
    ] {
        assert_eq!(params.get(key), Some(&value), "{key}");
    }
}

#[test]
fn refusals_are_counted_by_reason() {
    let mut it = scheduler(&[FULL], true);
    let foreign = json!({"do_remote_prefill": true, "remote_engine_id": "a-b", "transfer_id": "x"});
    let invalid = json!({"do_remote_prefill": true});
    let taken = json!({"do_remote_decode": true, "transfer_id": "x"});
    let all = [&foreign, &invalid, &foreign, &taken, &taken];
    for (n, params) in all.into_iter().enumerate() {
        it.arrived(&request(&n.to_string(), 9, params.as_object().expect("an object")));
    }
    let counts =
        [(Refused::ForeignProducer, 2), (Refused::InvalidParams, 1), (Refused::Duplicate, 1)];
    assert_eq!(it.refusals(), counts);
}

#[test]
fn a_request_that_names_a_producer_outside_a_list_of_names_is_refused() {
    let mut it = scheduler(&[FULL], true);
    it.set_producers(Producers::parse(&["prefill-0", "*.prefill.svc"]).expect("names"));
    let mut arrives = |id: &str, address: &str| {
        let params =
            json!({"do_remote_prefill": true, "transfer_id": id, "remote_address": address});
        it.arrived(&request(id, 9, params.as_object().expect("an object")));
        it.refusals().to_vec()
    };
    assert_eq!(arrives("a", "prefill-0:7"), []);
    assert_eq!(arrives("b", "one.prefill.svc:7"), []);
    let others =
        ["prefill-00:7", "prefill.svc.example:7", "prefill.svc:7", "10.0.0.1:7", "[::1]:7"];
    for (at, address) in (1..).zip(others) {
        let refusals = arrives(address, address);
        assert_eq!(refusals, [(Refused::ForbiddenProducer, at)], "{address}");
    }
}

#[test]
fn a_reset_withdraws_all_offers_and_cancels_all_fetches() {
    let mut it = scheduler(&[FULL], true);
    let [held, running, waiting] = ["x", "y", "z"].map(produces);
    let consumed = consumes("w");
    it.arrived(&request("waiting", 8, &waiting));
    it.arrived(&request("held", 8, &held));
    it.arrived(&request("running", 8, &running));
    it.give_blocks(&request("fetched", 10, &consumed), 0, 10, &[vec![4, 5, 6]]);
    step(&mut it, [first("held", 8, &[&[1, 2]]), first("running", 4, &[&[3]])], &[]);
    assert!(it.end_request(&request("held", 8, &held), FinishReason::Length, None, None).held);
    empty_step(&mut it);

    it.reset_cache();
    // It ends before the worker halves know.
    assert!(it.end_request(&request("running", 8, &running), FinishReason::Abort, None, None).held);
    let metadata = empty_step(&mut it);
    let mut endings = metadata.endings;
    endings.sort_by(|a, b| a.request.cmp(&b.request));
    for (ending, (request, is_held)) in endings.iter().zip([("held", false), ("running", true)]) {
        let EndingKind::Withdrawn { code, held, .. } = ending.how else { panic!("{ending:?}") };
        assert_eq!((&ending.request[..], code, held), (request, WireCode::Revoked, is_held));
    }
    assert_eq!(endings.len(), 2);
    assert_eq!(metadata.cancels[0].request, "fetched");
    assert!(it.has_pending_work());
    it.sent(["held", "running"]);
    it.received(["fetched"]);
    it.end_request(&request("fetched", 10, &consumed), FinishReason::Length, None, None);

    assert_eq!(step(&mut it, [first("waiting", 8, &[&[1, 2]])], &[]).computes.len(), 1);
    assert!(it.end_request(&request("waiting", 8, &waiting), FinishReason::Stop, None, None).held);
    it.sent(["waiting"]);
    empty_step(&mut it);
    assert_idle(&it);
}

#[test]
fn nothing_that_has_arrived_is_handed_over_or_fetched_once_all_is_given_up() {
    let mut it = scheduler(&[FULL], true);
    it.set_ranks(metadata_of_ranks()).expect("an engine");
    for name in ["held", "running", "waiting"] {
        it.arrived(&request(name, 8, &produces(name)));
    }
    for name in ["fetched", "open"] {
        it.arrived(&request(name, 10, &consumes(name)));
        assert_eq!(it.matched(name, 0), Match::Tokens(10));
    }
    it.allocated("fetched", 10, &[vec![4, 5, 6]]);
    step(&mut it, [first("held", 8, &[&[1, 2]]), first("running", 4, &[&[3]])], &[]);
    let end = |it: &mut Scheduler, name| {
        it.finished(name, FinishReason::Length, None, None).expect("it has arrived")
    };
    assert!(end(&mut it, "held").held);
    empty_step(&mut it);

    it.give_up_all();
    let metadata = empty_step(&mut it);
    let mut endings: Vec<_> = metadata.endings.iter().map(|it| &it.request[..]).collect();
    endings.sort_unstable();
    assert_eq!(endings, ["held", "running"]);
    assert_eq!(metadata.cancels[0].request, "fetched");
    assert_eq!(freed(&metadata), [("open", WireCode::NotNeeded)]);
    for name in ["fetched", "open"] {
        assert_eq!(it.matched(name, 0), Match::NONE, "{name}");
    }
    assert!(!it.waits_for_blocks("open"));
    for name in ["running", "waiting"] {
        assert!(!it.produces(name) && !it.may_restart(name), "{name}");
    }
    assert!(step(&mut it, [first("waiting", 8, &[&[7, 8]])], &[]).is_empty());
    assert!(!end(&mut it, "running").held);
    assert_eq!(end(&mut it, "waiting"), Finished::default());
    assert_eq!(withdrawn(empty_step(&mut it)), WireCode::Internal);

    // What arrives later is not concerned.
    it.arrived(&request("later", 8, &produces("later")));
    assert_eq!(step(&mut it, [first("later", 8, &[&[7, 8]])], &[]).computes.len(), 1);
    assert!(end(&mut it, "later").held);
    it.sent(["held", "later"]);
    it.received(["fetched"]);
    for name in ["fetched", "open"] {
        end(&mut it, name);
    }
    empty_step(&mut it);
    assert_idle(&it);
}

#[test]
fn a_request_that_the_adapter_fails_with_after_its_arrival_is_given_up() {
    let mut it = scheduler(&[FULL], true);
    it.arrived(&request("a", 8, &produces("x")));
    it.arrived(&request("b", 8, &consumes("y")));
    for request in ["a", "b", "c"] {
        it.refuse(request, Refused::Internal);
    }
    assert_eq!(it.refusals(), [(Refused::Internal, 1)], "only one has not arrived");
    assert!(!it.produces("a") && !it.waits_for_blocks("b"));
    assert_eq!(it.matched("b", 0), Match::NONE);
    assert_eq!(freed(&empty_step(&mut it)), [("y", WireCode::NotNeeded)]);
    for request in ["a", "b", "c"] {
        let ended = it.finished(request, FinishReason::Length, None, None);
        assert_eq!(ended, Some(Finished::default()), "{request}");
    }
    assert_eq!(withdrawn(empty_step(&mut it)), WireCode::Internal);
    assert_idle(&it);
}

#[test]
fn counts_of_an_interval_are_taken_once_and_can_be_added_and_carried() {
    let mut it = computed(true);
    end(&mut it, FinishReason::Length);
    it.sent(["a"]);
    it.arrived(&request("b", 8, &produces("y")));
    step(&mut it, [first("b", 4, &[&[1]])], &[]);
    it.end_request(&request("b", 8, &produces("y")), FinishReason::Abort, None, None);
    let (invalid, consumed) = (json!({"do_remote_prefill": true}), ["v", "w", "z"].map(consumes));
    it.arrived(&request("c", 9, invalid.as_object().expect("an object")));
    it.give_blocks(&request("d", 10, &consumed[0]), 4, 6, &[vec![1, 2, 3]]);
    it.give_blocks(&request("e", 10, &consumed[1]), 4, 6, &[vec![4, 5, 6]]);
    it.end_request(&request("f", 10, &consumed[2]), FinishReason::Abort, None, None);
    for rank in 0..RANKS {
        it.reported(rank, &fetched("d", WireCode::Ok).encode());
        it.reported(rank, &fetched("e", WireCode::LayoutMismatch).encode());
    }
    let count = |name: &str| [(name.to_owned(), 1)].into();
    let expected = Stats {
        fetched: [("ok".to_owned(), 1), ("layout_mismatch".to_owned(), 1)].into(),
        fetched_tokens: 6,
        freed: 1,
        offered: 1,
        offered_tokens: 8,
        withdrawn: count("cancelled"),
        refused: count("invalid_params"),
    };
    let stats = it.take_stats();
    assert_eq!(stats, expected);
    assert!(it.take_stats().is_empty());
    let json = serde_json::to_string(&stats).expect("counts");
    let mut sum: Stats = serde_json::from_str(&json).expect("counts");
    sum.add(&stats);
    assert_eq!((sum.fetched["ok"], sum.offered_tokens, sum.refused["invalid_params"]), (2, 16, 2));
}

fn done(data: &[u8]) -> Vec<u8> {
    let mut notes = fetched("b", WireCode::Ok);
    notes.fetched[0].side_data = vec![data.to_vec().into()];
    notes.encode()
}

#[test]
fn outcomes_are_counted_by_code_and_unknown_codes_together() {
    let mut it = scheduler(&[FULL], true);
    let codes = [WireCode::Ok, WireCode::Other(900), WireCode::Ok, WireCode::Other(901)];
    for (n, code) in codes.into_iter().enumerate() {
        let (id, params) = (n.to_string(), consumes(&n.to_string()));
        it.give_blocks(&request(&id, 10, &params), 0, 10, &[vec![1, 2, 3]]);
        (0..RANKS).for_each(|rank| it.reported(rank, &fetched(&id, code).encode()));
    }
    let counts: Vec<u64> = it.outcomes().iter().map(|(_, count)| *count).collect();
    assert_eq!((it.outcomes()[0].0, counts), (WireCode::Ok, vec![2, 2]));
}

#[test]
fn malformed_notes_and_notes_of_unknown_ranks_or_requests_change_nothing() {
    let mut it = fetching();
    empty_step(&mut it);
    it.reported(0, b"hello");
    it.reported(RANKS, &fetched("b", WireCode::Closed).encode());
    it.reported(0, &fetched("unknown", WireCode::Closed).encode());
    it.reported(0, &lost("unknown", WireCode::Closed).encode());
    it.reported(0, &Notes::default().encode());
    assert!(empty_step(&mut it).is_empty());
    for _ in 0..2 * RANKS {
        it.reported(0, &fetched("b", WireCode::Ok).encode());
    }
    assert!(it.outcomes().is_empty(), "only one rank has reported");
}

/// A pool of 100 blocks, 8 of which may be kept for engines that do nothing with them.
fn limited(groups: &[GroupRule]) -> Scheduler {
    let idle = Some(IdleLimit { pool_blocks: 100, idle_blocks: 8 });
    Scheduler::new(SchedulerConfig { idle, ..config(groups, true) }, ENGINE)
}

fn gauge(scheduler: &Scheduler, name: &str) -> usize {
    let found = scheduler.gauges().into_iter().find(|(is, _)| *is == name);
    found.expect("there is such a gauge").1
}

/// A producer's request of 12 tokens computes and ends with these blocks.
fn produce(it: &mut Scheduler, id: &str, blocks: [u32; 3]) -> ConnectorMetadata {
    let params = produces(id);
    it.arrived(&request(id, 12, &params));
    step(it, [first(id, 12, &[&blocks])], &[]);
    let blocks = vec![blocks.to_vec()];
    let how = FinishReason::Length;
    assert!(it.end_request(&request(id, 12, &params), how, Some(&blocks), None).held);
    empty_step(it)
}

/// Loads all 8 tokens of a request into two blocks, from this producer.
fn load(it: &mut Scheduler, id: &str, producer: &str, allowed: Match) -> bool {
    let address = format!("{producer}:4711").parse().expect("an address");
    let params = ConsumerParams { address, ..offered(id, None) }.to_params();
    let request = request(id, 8, &params);
    it.arrived(&request);
    assert_eq!(it.match_request(&request, 0), allowed, "{id}");
    let loads = allowed == Match::Tokens(8);
    if loads {
        it.give_blocks(&request, 0, 8, &[vec![1, 2]]);
    }
    loads
}

fn answered(request: &str) -> Vec<u8> {
    Notes { answered: vec![request.to_owned()], ..Notes::default() }.encode()
}
