//! Which rank reads what from which.

use crate::plans::engine::{Class, Engine, Model, PlaneModel, layer_name};
use kvferry_proto::layout::{Difference, Heads, Kind, Layout, Mismatch, Packing};
use kvferry_proto::plan::{Routing, Topology};
use std::collections::BTreeMap;

fn engine(model: &Model, tp: u32) -> Engine {
    Engine::plain(model, tp, 16, Packing::Lbhnc)
}

fn topology(model: &Model, engine: &Engine) -> Topology {
    Topology::new(&engine.layouts(model)).unwrap()
}

fn routing(model: &Model, producer: &Engine, consumer: &Engine) -> Routing {
    Routing::new(&topology(model, producer), &topology(model, consumer)).unwrap()
}

/// Per producer its readers, each with the heads that it reads of layer 0.
fn table(routing: &Routing, producers: usize) -> Vec<String> {
    let read = |producer, consumer| {
        let share = routing.share(producer, consumer);
        let of_first = share.items().filter(|(layer, ..)| *layer == layer_name(0));
        let heads: Vec<_> = of_first.map(|(_, _, heads)| format!("{heads:?}")).collect();
        format!("{consumer}: {}", heads.join(" "))
    };
    let readers = |p| routing.readers_of(p).iter().map(|&c| read(p, c)).collect::<Vec<_>>();
    (0..producers).map(|producer| readers(producer).join(", ")).collect()
}

/// Layers read per pair of ranks, of any plane.
fn layers_read(routing: &Routing, producers: usize) -> BTreeMap<(usize, usize), usize> {
    let mut read = BTreeMap::new();
    for producer in 0..producers {
        for &consumer in routing.readers_of(producer) {
            let share = routing.share(producer, consumer);
            let mut layers: Vec<_> = share.items().map(|(layer, ..)| layer).collect();
            layers.sort_unstable();
            layers.dedup();
            read.insert((producer, consumer), layers.len());
        }
    }
    read
}

#[test]
fn ranks_pair_up_by_heads_whichever_side_has_more_of_them() {
    for (heads, producers, consumers, expected) in [
        (8, 4, 2, &["0: 0..2", "0: 2..4", "1: 4..6", "1: 6..8"][..]),
        (8, 2, 4, &["0: 0..2, 1: 2..4", "2: 4..6, 3: 6..8"]),
        (8, 2, 2, &["0: 0..4", "1: 4..8"]),
        (6, 2, 3, &["0: 0..2, 1: 2..3", "1: 3..4, 2: 4..6"]),
    ] {
        let model = Model::plain(2, heads, 4);
        let routing = routing(&model, &engine(&model, producers), &engine(&model, consumers));
        assert_eq!(table(&routing, producers as usize), expected);
    }
}

#[test]
fn heads_that_no_rank_holds_are_named() {
    // Four heads over three ranks, one each: the fourth is nowhere.
    assert_eq!(Heads::shard(4, 0, 3), None);
    let four = Model::plain(1, 4, 4);
    let mut layouts = engine(&four, 4).layouts(&four);
    layouts.pop();
    let refused = Topology::new(&layouts).unwrap_err();
    assert_eq!(
        refused.difference,
        Difference::Unheld { head: 3, total: 4, context: 0, contexts: 1 }
    );
    assert_eq!(refused.to_string(), "layer model.layers.0.attn (kv): no rank holds KV head 3 of 4");
}

#[test]
fn one_producer_serves_eight_consumers_and_eight_serve_one() {
    let model = Model::plain(2, 8, 4);
    let (one, eight) = (engine(&model, 1), engine(&model, 8));
    assert_eq!(routing(&model, &one, &eight).readers_of(0), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(routing(&model, &eight, &one).sources_of(0), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn replicated_heads_are_read_from_different_replicas() {
    // Two heads, each on two of four ranks.
    let model = Model::plain(4, 2, 4);
    let (two, four) = (engine(&model, 2), engine(&model, 4));
    let routed = routing(&model, &four, &four);
    for rank in 0..4 {
        assert_eq!(routed.readers_of(rank), [rank]);
    }
    // One reader per head: its two replicas share the layers.
    let routed = routing(&model, &four, &two);
    assert_eq!(
        layers_read(&routed, 4),
        BTreeMap::from([((0, 0), 2), ((1, 0), 2), ((2, 1), 2), ((3, 1), 2)])
    );
    let routed = routing(&model, &two, &four);
    assert_eq!(routed.readers_of(0), [0, 1]);
    assert_eq!(routed.readers_of(1), [2, 3]);
}

#[test]
fn latents_are_dealt_out_evenly_whatever_the_worlds_are() {
    let latent = Class { kind: Kind::Full, planes: vec![PlaneModel::new("latent", 1, 4)] };
    let model = Model { classes: vec![latent], layers: vec![0; 60] };
    for (producers, consumers) in [(1, 8), (8, 1), (4, 2), (2, 4), (3, 2), (2, 3), (5, 7), (8, 8)] {
        let routing = routing(&model, &engine(&model, producers), &engine(&model, consumers));
        let read = layers_read(&routing, producers as usize);
        let served = |p: usize| read.iter().filter(|(pair, _)| pair.0 == p).map(|(_, n)| n).sum();
        let loads: Vec<usize> = (0..producers as usize).map(served).collect();
        let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
        assert!(most - least <= 1, "{producers}P{consumers}D: {loads:?}");
        assert_eq!(loads.iter().sum::<usize>(), 60 * consumers as usize);
        for consumer in 0..consumers as usize {
            let got: usize =
                read.iter().filter(|(pair, _)| pair.1 == consumer).map(|(_, n)| n).sum();
            assert_eq!(got, 60);
        }
        // No more pairs than a chain through all of them.
        assert!(read.len() < (producers + consumers) as usize);
    }
}

#[test]
fn a_replica_of_some_heads_takes_its_part_of_those_only() {
    let model = Model::plain(2, 3, 4);
    let whole = engine(&model, 1).layouts(&model).remove(0);
    let middle = engine(&model, 3).layouts(&model).remove(1);
    let producers = Topology::new([&whole, &middle]).unwrap();
    let routing = Routing::new(&producers, &topology(&model, &engine(&model, 1))).unwrap();
    let items = |producer| {
        let share = routing.share(producer, 0);
        let mut items: Vec<_> =
            share.items().map(|(layer, _, heads)| format!("{layer} {heads:?}")).collect();
        items.sort_unstable();
        items
    };
    let (first, second) = (layer_name(0), layer_name(1));
    assert_eq!(
        items(0),
        [format!("{first} 0..3"), format!("{second} 0..1"), format!("{second} 2..3")]
    );
    assert_eq!(items(1), [format!("{second} 1..2")]);
}

#[test]
fn a_producer_whose_bytes_are_not_needed_has_a_reader_that_releases_it() {
    // One layer, one head, everywhere: one replica is enough, the others are only released.
    let model = Model::plain(1, 1, 4);
    let routing = routing(&model, &engine(&model, 8), &engine(&model, 2));
    let mut readers = vec![0; 2];
    for producer in 0..8 {
        let [reader] = routing.readers_of(producer) else { panic!("one reader") };
        readers[*reader] += 1;
    }
    assert_eq!(readers, [4, 4]);
    let read: usize = layers_read(&routing, 8).values().sum();
    assert_eq!(read, 2);
    for consumer in 0..2 {
        assert_eq!(routing.sources_of(consumer).len(), 4);
    }
}

#[test]
fn pipelines_are_matched_by_the_names_of_layers() {
    let model = Model::plain(6, 4, 4);
    let halves = engine(&model, 1).with_stages(&[3, 6]);
    let thirds = engine(&model, 1).with_stages(&[2, 4, 6]);
    let routed = routing(&model, &halves, &thirds);
    assert_eq!(
        layers_read(&routed, 2),
        BTreeMap::from([((0, 0), 2), ((0, 1), 1), ((1, 1), 1), ((1, 2), 2)])
    );
    // With unequal tensor parallelism on top: each stage deals with its heads.
    let ours = engine(&model, 2).with_stages(&[3, 6]);
    let theirs = engine(&model, 1).with_stages(&[2, 4, 6]);
    let routed = routing(&model, &ours, &theirs);
    assert_eq!(routed.readers_of(0), [0, 1]);
    assert_eq!(routed.readers_of(1), [0, 1]);
    assert_eq!(routed.readers_of(2), [1, 2]);
    assert_eq!(routed.sources_of(1), [0, 1, 2, 3]);
}

#[test]
fn names_are_in_the_order_of_layers_not_of_letters() {
    let model = Model::plain(12, 1, 4);
    let topology = topology(&model, &engine(&model, 1));
    let expected: Vec<_> = (0..12).map(layer_name).collect();
    assert!(topology.layers().eq(expected.iter().map(String::as_str)));
}

#[test]
fn context_parallel_ranks_meet_where_their_tokens_do() {
    let model = Model::plain(1, 1, 4);
    let plain = engine(&model, 1);
    // Whole blocks in turn: two ranks over four, each of the two has blocks of two of the four.
    let two = plain.clone().with_context(2, 0);
    let four = plain.clone().with_context(4, 0);
    let routed = routing(&model, &two, &four);
    assert_eq!(routed.readers_of(0), [0, 2]);
    assert_eq!(routed.readers_of(1), [1, 3]);
    // A token each in turn meets blocks everywhere.
    let tokens = plain.clone().with_context(2, 1);
    let routed = routing(&model, &tokens, &four);
    assert_eq!(routed.readers_of(0), [0, 1, 2, 3]);
    let routed = routing(&model, &four, &plain);
    assert_eq!(routed.sources_of(0), [0, 1, 2, 3]);
}

#[test]
fn both_ends_compute_the_same_from_what_crossed_the_wire() {
    let model = Model::plain(5, 4, 4);
    let (ours, theirs) = (engine(&model, 2).with_stages(&[1, 5]), engine(&model, 8));
    let here = routing(&model, &ours, &theirs);
    let decoded = |engine| Topology::decode(&topology(&model, engine).encode()).unwrap();
    assert_eq!(Routing::new(&decoded(&ours), &decoded(&theirs)).unwrap(), here);
}

#[track_caller]
fn refused(ours: &[Layout], theirs: &[Layout], words: &str) {
    let (ours, theirs) = (Topology::new(ours).unwrap(), Topology::new(theirs).unwrap());
    let error = Routing::new(&ours, &theirs).unwrap_err();
    assert_eq!(error.to_string(), words);
}

#[test]
fn impossible_pairings_are_refused_with_the_two_numbers() {
    let eight = Model::plain(4, 8, 4);
    let four = Model::plain(4, 4, 4);
    let longer = Model::plain(5, 8, 4);
    let plain = |model: &Model| engine(model, 1).layouts(model);
    refused(
        &plain(&eight),
        &plain(&four),
        "layer model.layers.0.attn (kv): producer has 8 KV heads, consumer 4",
    );
    refused(
        &plain(&eight),
        &plain(&longer),
        "layer model.layers.4.attn: consumer has it among 5 layers, producer not among 4",
    );
    refused(
        &plain(&longer),
        &plain(&eight),
        "layer model.layers.4.attn: producer has it among 5 layers, consumer not among 4",
    );
    refused(
        &Engine::plain(&eight, 1, 12, Packing::Lbhnc).layouts(&eight),
        &plain(&eight),
        "layer model.layers.0.attn: blocks of producer have 12 tokens, those of consumer 16: \
         neither divides the other",
    );
    refused(&plain(&eight), &[], "producer has 1 ranks, consumer 0");
}

#[test]
fn ranks_of_one_engine_must_not_contradict_each_other() {
    let model = Model::plain(2, 2, 4);
    let contradiction = |other: Engine| {
        let mut layouts = engine(&model, 1).layouts(&model);
        layouts.extend(other.layouts(&model));
        Topology::new(&layouts).unwrap_err()
    };
    assert_eq!(
        contradiction(Engine::plain(&model, 1, 32, Packing::Lbhnc)).to_string(),
        "layer model.layers.0.attn: blocks of rank 0 have 16 tokens, those of rank 1 32"
    );
    assert_eq!(
        contradiction(engine(&model, 1).with_context(2, 4)).to_string(),
        "layer model.layers.0.attn: rank 0 deals 16 tokens in turn to 1 ranks, rank 1 4 to 2"
    );
    let wide = Model::plain(2, 2, 8);
    let mut layouts = engine(&model, 1).layouts(&model);
    layouts.extend(engine(&wide, 1).layouts(&wide));
    let Mismatch { difference, .. } = Topology::new(&layouts).unwrap_err();
    assert_eq!(difference, Difference::Content(4, 8));
    // A rank of the context is missing.
    let mut layouts = engine(&model, 1).with_context(3, 0).layouts(&model);
    layouts.remove(1);
    assert_eq!(
        Topology::new(&layouts).unwrap_err().to_string(),
        "layer model.layers.0.attn (kv): no rank holds KV head 0 of 2 at context-parallel rank 1 \
         of 3"
    );
}

#[test]
fn the_fingerprint_of_an_engine_does_not_depend_on_its_ranks() {
    let model = Model::plain(6, 4, 4);
    let one = topology(&model, &engine(&model, 1));
    let many = topology(&model, &engine(&model, 8).with_stages(&[1, 4, 6]).with_context(2, 1));
    assert_eq!(one.fingerprint(), many.fingerprint());
    assert_eq!(one.fingerprint(), engine(&model, 1).layouts(&model)[0].fingerprint());
    let longer = Model::plain(7, 4, 4);
    assert_ne!(one.fingerprint(), topology(&longer, &engine(&longer, 1)).fingerprint());
}

/// Layers that have 64 and 32 heads by turns.
fn hybrid(layers: usize) -> Model {
    let class = |heads| Class {
        kind: Kind::Full,
        planes: vec![PlaneModel::new("k", heads, 4), PlaneModel::new("v", heads, 4)],
    };
    let layers = (0..layers).map(|layer| layer % 2).collect();
    Model { classes: vec![class(64), class(32)], layers }
}

#[test]
fn the_largest_engines_are_routed() {
    let model = hybrid(128);
    let stages = |layers: usize| (1..=128 / layers).map(|stage| stage * layers).collect::<Vec<_>>();
    let large = topology(&model, &engine(&model, 64).with_stages(&stages(8)));
    let decoded = Topology::decode(&large.encode()).unwrap();
    assert_eq!((decoded.ranks(), &decoded), (1024, &large));
    let routed = Routing::new(&large, &decoded).unwrap();
    assert_eq!(routed.sources_of(1023), [1023]);
    // All stages at once, of each of the heads.
    let routed = Routing::new(&large, &topology(&model, &engine(&model, 8))).unwrap();
    assert_eq!(routed.sources_of(0).len(), 128);
}

#[test]
fn i8_no_rank_has_more_producer_ranks_than_it_has_room_for() {
    let model = Model::plain(1, 1, 4);
    let one = topology(&model, &engine(&model, 1));
    let most = topology(&model, &engine(&model, 128));
    assert_eq!(Routing::new(&most, &one).unwrap().sources_of(0).len(), 128);
    let more = topology(&model, &engine(&model, 129));
    let refused = Routing::new(&more, &one).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "129 producer ranks for one consumer rank are beyond the limit of 128"
    );
}
