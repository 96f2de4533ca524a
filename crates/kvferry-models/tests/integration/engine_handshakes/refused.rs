//! Engines that do not fit, and answers that are wrong.

use super::*;

#[test]
fn a_mismatch_is_refused_with_both_numbers_and_all_addresses_whichever_side_finds_it() {
    for producer_finds_it in [true, false] {
        let mut pair = Pair::new();
        pair.consumer.know(own_engine(OURS, 0, topology(1, 32), SMALL));
        pair.meet(1);
        if producer_finds_it {
            pair.producer.know(producer(8, SMALL));
            pair.work();
            assert_eq!(pair.refused.len(), 1);
        } else {
            pair.hear(introduced(&producer(8, SMALL), 0..8));
        }
        let failure = pair.failure();
        assert_eq!(failure.code, WireCode::LayoutMismatch);
        for detail in pair.refused.iter().chain([&failure.detail]) {
            assert!(detail.contains("32") && detail.contains('8'), "{detail}");
        }
        assert_eq!(failure.addresses, producer(8, SMALL).addresses);
    }
}

#[test]
fn engines_of_two_models_refuse_each_other_with_both_values_whichever_side_finds_it() {
    for producer_finds_it in [true, false] {
        let mut pair = Pair::new();
        pair.consumer.know(OwnEngine { model: model("llama"), ..consumer(4) });
        pair.meet(1);
        let theirs = OwnEngine { model: model("mistral"), ..producer(4, SMALL) };
        if producer_finds_it {
            pair.producer.know(theirs.clone());
            pair.work();
            assert_eq!(pair.refused.len(), 1);
        } else {
            pair.hear(introduced(&theirs, 0..4));
        }
        let failure = pair.failure();
        assert_eq!(failure.code, WireCode::ModelMismatch);
        for detail in pair.refused.iter().chain([&failure.detail]) {
            assert!(detail.contains("mistral") && detail.contains("llama"), "{detail}");
        }
        assert_eq!(failure.addresses, theirs.addresses);
    }
}

#[test]
fn properties_of_a_model_that_one_engine_does_not_give_are_not_compared() {
    let mut more = model("llama");
    more.0.insert("revision".to_owned(), "7".to_owned());
    for (theirs, ours) in [(model("llama"), more.clone()), (more, Model::default())] {
        let mut pair = Pair::new();
        pair.consumer.know(OwnEngine { model: ours, ..consumer(4) });
        pair.producer.know(OwnEngine { model: theirs, ..producer(4, SMALL) });
        pair.meet(1);
        pair.work();
        assert_eq!(pair.pairing().cards.len(), 4);
    }
}

#[test]
fn a_topology_that_is_none_is_refused() {
    let mut pair = Pair::knowing(4, SMALL);
    let (model, ranks) = (Model::default(), Vec::new());
    let nonsense = Introduce { topology: b"nonsense".to_vec(), model, ranks };
    pair.deliver(true, nonsense.into());
    assert_eq!(pair.refused.len(), 1);
    let [(false, EngineHandshakeMessage::Turned(turned))] = pair.wire.make_contiguous() else {
        panic!("{:?}", pair.wire)
    };
    assert_eq!(turned.code, WireCode::LayoutMismatch);
    pair.assert_empty();
}

#[test]
fn a_refusal_with_the_code_for_success_is_malformed() {
    let mut pair = Pair::knowing(4, SMALL);
    pair.meet(1);
    pair.hear(Turned { code: WireCode::Ok, detail: String::new(), addresses: Vec::new() });
    assert_eq!(pair.failure().code, WireCode::Malformed);
}

#[test]
fn who_has_not_asked_yet_is_not_turned_away() {
    let mut pair = Pair::new();
    pair.producer.know(producer(4, SMALL));
    pair.meet(1);
    let (code, detail) = (WireCode::LayoutMismatch, "of another day".to_owned());
    pair.hear(Turned { code, detail, addresses: Vec::new() });
    pair.consumer.know(consumer(4));
    pair.work();
    assert_eq!(pair.pairing().cards.len(), 4);
}

#[test]
fn a_producer_that_does_not_show_all_of_its_ranks_is_an_error_and_no_loop() {
    let mut pair = Pair::knowing(4, SMALL);
    pair.producer.know(OwnEngine { cards: Vec::new(), ..producer(4, SMALL) });
    pair.meet(1);
    pair.work();
    let failure = pair.failure();
    assert_eq!(failure.code, WireCode::Malformed);
    assert_eq!(failure.addresses, producer(4, SMALL).addresses);
}

#[test]
fn a_producer_that_shows_ever_the_same_of_its_ranks_is_not_asked_for_ever() {
    let mut pair = Pair::knowing(4, SMALL);
    pair.meet(1);
    for _ in 0..20 {
        pair.hear(introduced(&producer(4, SMALL), 0..2));
    }
    assert_eq!(pair.wire.len(), 2, "the first question, and the one for the rest");
    pair.wire.clear();
    pair.pass(BUDGET);
    assert!(!pair.failure().code.is_ok());
}

#[test]
fn as_many_addresses_as_ranks_or_it_is_an_error() {
    for addresses in [0, 3, 5] {
        let mut pair = Pair::knowing(4, SMALL);
        let wrong = vec!["host:1".to_owned(); addresses];
        pair.producer.know(OwnEngine { addresses: wrong, ..producer(4, SMALL) });
        pair.meet(1);
        pair.work();
        let failure = pair.failure();
        assert!(!failure.code.is_ok());
        let said = format!("4 ranks, and {addresses} addresses");
        assert!(failure.detail.contains(&said), "{failure:?}");
    }
}
