//! What a layout is and is not, on the wire and off. The targets `layouts`, `maps` and `topologies` of
//! `kvferry-models` prove that any bytes are decoded as something sound or refused.

use crate::plans::engine::{Engine, Model};
use kvferry_proto::RegionId;
use kvferry_proto::layout::{
    ContextShard, DecodeError, Difference, Encoding, Fault, Group, Heads, Kind, LAYOUT_MAX, Layer,
    Layout, LayoutError, Packing, Plane, Region, Shape, View, compatible,
};
use kvferry_proto::plan::{Routing, Topology};

fn region(len: u64) -> Region {
    Region { id: RegionId(1), len }
}

fn group() -> Group {
    Group {
        name: "full".into(),
        kind: Kind::Full,
        block_tokens: 16,
        blocks: 10,
        context: ContextShard::WHOLE,
    }
}

fn plane() -> Plane {
    Plane {
        role: "kv".into(),
        encoding: Encoding::new("bfloat16", 16),
        heads: Heads { total: 8, start: 2, count: 4 },
        rows: 16,
        content: 32,
        view: View {
            region: 0,
            base: 0,
            block_stride: 2048,
            kernel_blocks: 1,
            kernel_stride: 0,
            head_stride: 512,
            row_stride: 32,
        },
    }
}

fn layer(plane: Plane) -> Layer {
    Layer { name: "model.layers.0".into(), group: 0, planes: vec![plane] }
}

fn layout() -> Layout {
    changed(|_, _, _| ()).unwrap()
}

/// The layout of these parts, changed.
fn changed(
    change: impl FnOnce(&mut Vec<Region>, &mut Vec<Group>, &mut Vec<Layer>),
) -> Result<Layout, LayoutError> {
    let (mut regions, mut groups) = (vec![region(20480)], vec![group()]);
    let mut layers = vec![layer(plane())];
    change(&mut regions, &mut groups, &mut layers);
    Layout::new(regions, groups, layers)
}

#[track_caller]
fn refused(change: impl FnOnce(&mut Vec<Region>, &mut Vec<Group>, &mut Vec<Layer>)) -> LayoutError {
    changed(change).unwrap_err()
}

#[track_caller]
fn faulty(change: impl FnOnce(&mut Plane)) -> Fault {
    match refused(|_, _, layers| change(&mut layers[0].planes[0])) {
        LayoutError::Plane { fault, .. } => fault,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn faulty_group(change: impl FnOnce(&mut Group)) -> Fault {
    match refused(|_, groups, _| change(&mut groups[0])) {
        LayoutError::Group { fault, .. } => fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_packing_lies_as_its_name_says() {
    let shape = Shape { layers: 3, blocks: 5, heads: 2, rows: 4, content: 10, kernel_blocks: 1 };
    let bytes = shape.bytes().unwrap();
    assert_eq!(bytes, 1200);
    for packing in Packing::ALL {
        assert_eq!(packing.to_string().parse(), Ok(packing));
        // Walks memory in the order of the axes' names, the slowest first.
        let views = packing.views(&shape, 0, 7).unwrap();
        let mut at = 7;
        let mut index = [0u64; 4];
        let axes: Vec<(usize, u64)> = packing.name()[..4]
            .chars()
            .map(|axis| match axis {
                'L' => (0, 3),
                'B' => (1, 5),
                'H' => (2, 2),
                _ => (3, 4),
            })
            .collect();
        for element in 0..bytes / 10 {
            let mut rest = element;
            for &(axis, count) in axes.iter().rev() {
                index[axis] = rest % count;
                rest /= count;
            }
            let [layer, block, head, row] = index;
            let view = views[layer as usize];
            let place = view.base
                + block * view.block_stride
                + head * view.head_stride
                + row * view.row_stride;
            assert_eq!(place, at, "{packing} {index:?}");
            at += 10;
        }
    }
    assert_eq!("HND".parse(), Ok(Packing::Lbhnc));
    assert_eq!("NHD".parse(), Ok(Packing::Lbnhc));
    assert!("LBH".parse::<Packing>().is_err());
}

#[test]
fn a_packing_of_nothing_of_too_much_or_of_uneven_kernel_blocks_has_no_views() {
    let shape = Shape { layers: 3, blocks: 5, heads: 2, rows: 4, content: 10, kernel_blocks: 2 };
    assert!(Packing::Lbhnc.views(&shape, 0, 0).is_some());
    for shape in [
        Shape { kernel_blocks: 3, ..shape },
        Shape { kernel_blocks: 0, ..shape },
        Shape { rows: 0, ..shape },
        Shape { layers: 0, ..shape },
        Shape { blocks: u32::MAX, heads: u32::MAX, ..shape },
    ] {
        assert_eq!(Packing::Lbhnc.views(&shape, 0, 0), None, "{shape:?}");
    }
    assert_eq!(Packing::Lbhnc.views(&shape, 0, u64::MAX - 1199), None);
}

#[test]
fn a_plane_ends_within_its_region() {
    assert_eq!(
        refused(|regions, _, _| regions[0].len -= 1),
        LayoutError::Plane {
            layer: "model.layers.0".into(),
            plane: "kv".into(),
            fault: Fault::Bounds { end: 20480, len: 20479 },
        }
    );
    assert_eq!(faulty(|plane| plane.view.base = 1), Fault::Bounds { end: 20481, len: 20480 });
    let huge = Fault::Bounds { end: u64::MAX, len: 20480 };
    assert_eq!(faulty(|plane| plane.view.base = u64::MAX), huge);
    assert_eq!(faulty(|plane| plane.view.block_stride = u64::MAX / 2), huge);
    assert_eq!(faulty(|plane| plane.view.region = 1), Fault::NoRegion { region: 1, regions: 1 });
}

#[test]
fn no_two_elements_of_a_plane_share_a_byte() {
    for (change, axis, stride, extent) in [
        ((|view| view.row_stride = 31) as fn(&mut View), "row", 31, 32),
        (|view| view.head_stride = 511, "head", 511, 512),
        (|view| view.block_stride = 2047, "block", 2047, 2048),
        (|view| view.block_stride = 0, "block", 0, 32),
    ] {
        let fault = faulty(|plane| change(&mut plane.view));
        assert_eq!(fault, Fault::Overlap { axis, stride, extent });
    }
    // A head's blocks together is another order, not an overlap; gaps are none either.
    for (head_stride, len) in [(5120, 20480), (5200, 30000)] {
        let apart = changed(|regions, _, layers| {
            let view = &mut layers[0].planes[0].view;
            (view.block_stride, view.head_stride, regions[0].len) = (512, head_stride, len);
        });
        assert!(apart.is_ok());
    }
}

#[test]
fn numbers_out_of_their_range_are_refused() {
    assert_eq!(faulty(|plane| plane.rows = 0), Fault::Zero("rows"));
    assert_eq!(faulty(|plane| plane.content = 0), Fault::Zero("content"));
    assert_eq!(faulty(|plane| plane.encoding.bits = 0), Fault::Zero("bits of an element"));
    assert_eq!(faulty(|plane| plane.view.kernel_blocks = 0), Fault::Zero("kernel blocks"));
    assert_eq!(
        faulty(|plane| plane.view.kernel_blocks = 3),
        Fault::Indivisible { what: "kernel blocks", divisor: 3, of: "rows", value: 16 }
    );
    for (start, count) in [(5, 4), (0, 0), (u32::MAX, 2)] {
        let fault = faulty(|plane| plane.heads = Heads { total: 8, start, count });
        assert_eq!(fault, Fault::Heads { start, count, total: 8 });
    }
    assert_eq!(faulty_group(|group| group.block_tokens = 0), Fault::Zero("tokens of a block"));
    assert_eq!(faulty_group(|group| group.blocks = 0), Fault::Zero("blocks"));
    let window = Kind::Window { tokens: 0 };
    assert_eq!(faulty_group(|group| group.kind = window), Fault::Zero("window"));
    assert!(matches!(
        faulty_group(|group| group.context = ContextShard::round_robin(2, 2)),
        Fault::TooLarge { value: 2, limit: 1, .. }
    ));
    assert_eq!(
        faulty_group(|group| {
            group.kind = Kind::State;
            group.context = ContextShard::round_robin(0, 2);
        }),
        Fault::SpreadState(2)
    );
    assert!(matches!(
        faulty_group(|group| group.context = ContextShard { rank: 0, size: 2, interleave: 5 }),
        Fault::Indivisible { divisor: 5, value: 16, .. }
    ));
    let fault = refused(|_, groups, layers| {
        groups[0].kind = Kind::State;
        layers[0].planes[0].view.kernel_blocks = 2;
    });
    assert!(matches!(fault, LayoutError::Plane { fault: Fault::SplitState(2), .. }));
    // A scale for eight tokens cannot be dealt out with four of them.
    let fault = refused(|_, groups, layers| {
        groups[0].context = ContextShard { rank: 0, size: 2, interleave: 4 };
        layers[0].planes[0].rows = 2;
    });
    assert!(
        matches!(
            &fault,
            LayoutError::Plane { fault: Fault::Indivisible { divisor: 8, value: 4, .. }, .. }
        ),
        "{fault}"
    );
}

#[test]
fn names_are_there_once_and_fit_to_be_shown() {
    assert_eq!(
        refused(|_, _, layers| layers.push(layers[0].clone())),
        LayoutError::Twice { what: "layer", name: "model.layers.0".into() }
    );
    assert_eq!(
        refused(|regions, _, _| regions.push(regions[0])),
        LayoutError::Twice { what: "region", name: "1".into() }
    );
    assert_eq!(
        refused(|_, groups, _| groups.push(groups[0].clone())),
        LayoutError::Twice { what: "group", name: "full".into() }
    );
    assert!(matches!(
        refused(|_, _, layers| layers[0].planes.push(plane())),
        LayoutError::Twice { what: "plane", .. }
    ));
    for name in ["", "a\x1b[2J", &"x".repeat(257)] {
        let error = refused(|_, _, layers| layers[0].name = name.to_owned());
        assert!(matches!(error, LayoutError::Name { what: "layer", .. }), "{error}");
        assert!(!error.to_string().contains('\x1b'));
    }
    assert_eq!(refused(|regions, _, _| regions[0].id = RegionId::ABSOLUTE), LayoutError::Absolute);
    assert!(matches!(
        refused(|_, _, layers| layers[0].planes.clear()),
        LayoutError::NoPlanes(name) if name == "model.layers.0"
    ));
    assert!(matches!(
        refused(|_, _, layers| layers[0].group = 1),
        LayoutError::NoGroup { group: 1, groups: 1, .. }
    ));
    assert!(matches!(
        refused(
            |_, groups, _| groups.extend((0..64).map(|n| Group { name: n.to_string(), ..group() }))
        ),
        LayoutError::TooMany { what: "groups", count: 65, limit: 64 }
    ));
}

#[test]
fn tensor_parallel_shares_are_even_or_replicated_or_there_are_none() {
    let shares = |total, size| (0..size).map(|rank| Heads::shard(total, rank, size)).collect();
    let held: Vec<_> = shares(8, 4);
    let starts = held.iter().map(|heads| heads.unwrap().range());
    assert!(starts.eq([0..2, 2..4, 4..6, 6..8]));
    let replicated: Vec<_> = shares(2, 4);
    let starts = replicated.iter().map(|heads| heads.unwrap().range());
    assert!(starts.eq([0..1, 0..1, 1..2, 1..2]));
    assert_eq!(Heads::shard(4, 0, 3), None);
    assert_eq!(Heads::shard(4, 4, 4), None);
    assert_eq!(Heads::shard(0, 0, 4), None);
}

/// One of everything, small.
fn specimen() -> Layout {
    let view = |region, base, block_stride, row_stride| View {
        region,
        base,
        block_stride,
        kernel_blocks: 1,
        kernel_stride: 0,
        head_stride: 64,
        row_stride,
    };
    let kv = |base| Plane {
        heads: Heads { total: 4, start: 1, count: 1 },
        content: 64,
        rows: 4,
        view: view(0, base, 256, 64),
        ..plane()
    };
    let conv = Plane {
        role: "conv".into(),
        encoding: Encoding::new("float32", 32),
        heads: Heads::REPLICATED,
        rows: 3,
        content: 8,
        view: view(1, 0, 1024, 8),
    };
    let window = Group {
        name: "swa".into(),
        kind: Kind::Window { tokens: 6 },
        block_tokens: 4,
        blocks: 3,
        context: ContextShard::round_robin(1, 2),
    };
    let state =
        Group { name: "gdn".into(), kind: Kind::State, block_tokens: 99, blocks: 2, ..group() };
    let layers = vec![
        Layer { name: "l.0".into(), group: 0, planes: vec![kv(0)] },
        Layer { name: "l.1".into(), group: 1, planes: vec![conv] },
        Layer { name: "l.2".into(), group: 0, planes: vec![kv(1024)] },
    ];
    let regions = vec![region(2048), Region { id: RegionId(9), len: 2048 }];
    Layout::new(regions, vec![window, state], layers).unwrap()
}

/// How `specimen` was encoded by version 1. It is decoded for ever.
const GOLDEN_LAYOUT: &str = "\
    85a17601a7726567696f6e739282a2696401a36c656ecd080082a2696409a36c656ecd0800a667726f757073\
    9286a46e616d65a3737761a46b696e64a677696e646f77a677696e646f7706ac626c6f636b5f746f6b656e73\
    04a6626c6f636b7303a7636f6e7465787483a472616e6b01a473697a6502aa696e7465726c656176650084a4\
    6e616d65a367646ea46b696e64a57374617465ac626c6f636b5f746f6b656e7363a6626c6f636b7302a67368\
    61706573928da4726f6c65a26b76a8656e636f64696e67a862666c6f61743136a46269747310ab6865616473\
    5f746f74616c04aa686561645f737461727401a5686561647301a4726f777304a7636f6e74656e7440ac626c\
    6f636b5f737472696465cd0100ad6b65726e656c5f626c6f636b7301ad6b65726e656c5f73747269646500ab\
    686561645f73747269646540aa726f775f737472696465408da4726f6c65a4636f6e76a8656e636f64696e67\
    a7666c6f61743332a46269747320ab68656164735f746f74616c01aa686561645f737461727400a568656164\
    7301a4726f777303a7636f6e74656e7408ac626c6f636b5f737472696465cd0400ad6b65726e656c5f626c6f\
    636b7301ad6b65726e656c5f73747269646500ab686561645f73747269646540aa726f775f73747269646508\
    a66c61796572739383a46e616d65a36c2e30a567726f757000a6706c616e65739183a5736861706500a67265\
    67696f6e00a4626173650083a46e616d65a36c2e31a567726f757001a6706c616e65739183a5736861706501\
    a6726567696f6e01a4626173650083a46e616d65a36c2e32a567726f757000a6706c616e65739183a5736861\
    706500a6726567696f6e00a462617365cd0400";

/// How the topology of `whole` was encoded by version 1.
const GOLDEN_TOPOLOGY: &str = "\
    84a17601a67368617065739284a46b696e64a677696e646f77a677696e646f7706ac626c6f636b5f746f6b65\
    6e7304a6706c616e65739187a4726f6c65a26b76a8656e636f64696e67a862666c6f61743136a46269747310\
    a5686561647301a7636f6e74656e7440a4726f777301aa726f775f746f6b656e730183a46b696e64a5737461\
    7465ac626c6f636b5f746f6b656e7363a6706c616e65739187a4726f6c65a4636f6e76a8656e636f64696e67\
    a7666c6f61743332a46269747320a5686561647301a7636f6e74656e7408a4726f777303aa726f775f746f6b\
    656e7300a66c61796572739382a46e616d65a36c2e30a573686170650082a46e616d65a36c2e31a573686170\
    650182a46e616d65a36c2e32a5736861706500a572616e6b739181a6736c696365739386a5666972737400a5\
    636f756e7401a5686561647391920001ac636f6e746578745f72616e6b00ac636f6e746578745f73697a6501\
    ab636f6e746578745f72756e0486a5666972737401a5636f756e7401a5686561647391920001ac636f6e7465\
    78745f72616e6b00ac636f6e746578745f73697a6501ab636f6e746578745f72756e6386a5666972737402a5\
    636f756e7401a5686561647391920001ac636f6e746578745f72616e6b00ac636f6e746578745f73697a6501\
    ab636f6e746578745f72756e04";

/// A single rank with everything, as a topology must have.
fn whole() -> Layout {
    let specimen = specimen();
    let mut groups = specimen.groups().to_vec();
    groups[0].context = ContextShard::WHOLE;
    let mut layers = specimen.layers().to_vec();
    for layer in &mut layers {
        for plane in &mut layer.planes {
            plane.heads = Heads { total: 1, start: 0, count: 1 };
        }
    }
    Layout::new(specimen.regions().to_vec(), groups, layers).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn encodings_of_version_1_never_change() {
    assert_eq!(hex(&specimen().encode()), GOLDEN_LAYOUT);
    assert_eq!(Layout::decode(&specimen().encode()).unwrap(), specimen());
    let topology = Topology::new([&whole()]).unwrap();
    assert_eq!(hex(&topology.encode()), GOLDEN_TOPOLOGY);
    assert_eq!(Topology::decode(&topology.encode()).unwrap(), topology);
}

#[test]
fn a_fingerprint_never_changes() {
    assert_eq!(specimen().fingerprint().to_string(), "364f426f1699c367a069095ee9eaf8d0");
    assert_eq!(Topology::new([&whole()]).unwrap().fingerprint(), whole().fingerprint());
}

/// The encoding as a map that can be changed.
fn as_json(bytes: &[u8]) -> serde_json::Value {
    rmp_serde::from_slice(bytes).unwrap()
}

fn from_json(map: &serde_json::Value) -> Vec<u8> {
    rmp_serde::to_vec(map).unwrap()
}

#[test]
fn fields_of_later_versions_are_ignored_and_a_later_version_is_refused() {
    let mut map = as_json(&specimen().encode());
    map["later"] = serde_json::json!([1, "x", null]);
    assert_eq!(Layout::decode(&from_json(&map)).unwrap(), specimen());
    map["v"] = 2.into();
    let refused = Layout::decode(&from_json(&map)).unwrap_err().to_string();
    assert!(refused.contains("version 2") && refused.contains("up to 1"), "{refused}");
    map.as_object_mut().unwrap().remove("v");
    assert!(Layout::decode(&from_json(&map)).is_err());
}

#[test]
fn bytes_after_the_end_and_too_many_of_them_are_refused() {
    let mut bytes = specimen().encode();
    bytes.push(0xc0);
    assert!(matches!(Layout::decode(&bytes), Err(DecodeError::Malformed(_))));
    let len = LAYOUT_MAX + 1;
    let too_long = DecodeError::TooLong { len, limit: LAYOUT_MAX };
    assert_eq!(Layout::decode(&vec![0xc0; len]), Err(too_long));
    // Nested beyond any use, and lists that claim to be endless.
    assert!(Layout::decode(&vec![0x91; 100_000]).is_err());
    for name in ["regions", "groups", "shapes", "layers"] {
        let bytes = specimen().encode();
        let at = bytes.windows(name.len()).position(|it| it == name.as_bytes()).unwrap();
        let endless = [&bytes[..at + name.len()], &[0xdd, 0xff, 0xff, 0xff, 0xff]].concat();
        assert!(Layout::decode(&endless).is_err());
    }
}

#[test]
fn what_was_encoded_unsound_is_refused() {
    let bytes = specimen().encode();
    // The length of the second region, which is the last `len` in the list of regions.
    let at = bytes.windows(6).rposition(|it| it == b"\xa3len\xcd\x08").unwrap();
    let mut short = bytes.clone();
    short[at + 5] = 0x01;
    let refused = Layout::decode(&short).unwrap_err().to_string();
    assert!(refused.contains("bytes into a region of"), "{refused}");
}

#[test]
fn a_topology_that_no_layouts_have_is_refused() {
    let sound = Topology::new([&whole()]).unwrap().encode();
    let refused = |was: &[u8], is: &[u8], words: &str| {
        let at = sound.windows(was.len()).position(|it| it == was).unwrap();
        let unsound = [&sound[..at], is, &sound[at + was.len()..]].concat();
        let error = Topology::decode(&unsound).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let dealt = "how tokens are dealt out is out of its range";
    refused(b"\xa6window\x06", b"\xa6window\x00", "a window is out of its range");
    // All tokens, of which a block has four, in twos.
    refused(b"\xabcontext_run\x04", b"\xabcontext_run\x02", dealt);
    // A state, at the first of three ranks.
    let state = |size: u8| [b"\xaccontext_size", &[size][..], b"\xabcontext_run\x63"].concat();
    refused(&state(1), &state(3), dealt);
}

#[test]
fn a_layout_of_many_alike_layers_is_small_on_the_wire() {
    let model = Model::plain(64, 8, 256);
    let layouts = Engine::plain(&model, 2, 16, Packing::Lbhnc).layouts(&model);
    let bytes = layouts[0].encode().len();
    assert!(bytes < 64 * 80, "{bytes} bytes");
    let topology = Topology::new(&layouts).unwrap();
    assert!(topology.encode().len() < 64 * 50, "{} bytes", topology.encode().len());
}

/// A topology of one rank that holds layers one by one and many that hold all of them, which is
/// about the most work that bytes can make.
fn crowded(layers: usize, ranks: u16) -> Result<Topology, DecodeError> {
    let mut layers: Vec<Layer> =
        (0..layers).map(|n| Layer { name: format!("l.{n}"), ..layer(plane()) }).collect();
    let mut held = |start, count: fn(usize) -> u32| {
        for (at, layer) in layers.iter_mut().enumerate() {
            layer.planes[0].heads = Heads { total: 4, start, count: count(at) };
        }
        Layout::new(vec![region(20480)], vec![group()], layers.clone()).unwrap()
    };
    let ranks_of = [held(0, |at| 1 + at as u32 % 2), held(0, |_| 4)];
    let mut map = as_json(&Topology::new(&ranks_of).unwrap().encode());
    let all = map["ranks"][1].clone();
    map["ranks"].as_array_mut().unwrap().resize(ranks.into(), all);
    Topology::decode(&from_json(&map))
}

#[test]
fn many_ranks_of_many_layers_are_routed_or_refused_before_they_take_long() {
    let crowd = crowded(64, 1024).unwrap();
    let routing = Routing::new(&crowd, &crowd).unwrap();
    for consumer in 1..1024 {
        let shares = routing.sources_of(consumer).iter().map(|&from| routing.share(from, consumer));
        let heads: usize =
            shares.flat_map(|share| share.items().map(|it| it.2.len()).collect::<Vec<_>>()).sum();
        assert_eq!(heads, 64 * 4, "all of each layer, for rank {consumer}");
    }
    let beyond = |difference: &Difference, limit| match difference {
        Difference::TooMany { what, .. } => assert_eq!(*what, limit),
        other => panic!("{other:?}"),
    };
    let (few, many) = (crowded(600, 2).unwrap(), crowded(600, 1024).unwrap());
    beyond(&Routing::new(&few, &many).unwrap_err().difference, "runs of layers");
    beyond(&Routing::new(&many, &many).unwrap_err().difference, "comparisons of ranks");
    let refused = crowded(4096, 1024).unwrap_err().to_string();
    assert!(refused.contains("comparisons of ranks"), "{refused}");
}

/// A change of a layout's parts.
type Change = fn(&mut Vec<Region>, &mut Vec<Group>, &mut Vec<Layer>);

#[test]
fn a_fingerprint_ignores_placement() {
    let changes: [Change; 9] = [
        |regions, _, _| regions[0] = Region { id: RegionId(77), len: 1 << 30 },
        |regions, _, layers| {
            regions.insert(0, Region { id: RegionId(4), len: 1 });
            layers[0].planes[0].view.region = 1;
        },
        |_, groups, _| groups[0].blocks = 3,
        |_, groups, _| groups[0].name = "other".into(),
        |_, groups, _| groups[0].context = ContextShard::round_robin(1, 2),
        |_, groups, layers| {
            groups[0].block_tokens = 8;
            layers[0].planes[0].rows = 8;
        },
        |_, _, layers| layers[0].planes[0].heads = Heads { total: 8, start: 6, count: 2 },
        |_, _, layers| {
            let view = &mut layers[0].planes[0].view;
            (view.block_stride, view.head_stride, view.base) = (512, 5120, 0);
        },
        |_, _, layers| {
            let view = &mut layers[0].planes[0].view;
            (view.kernel_blocks, view.kernel_stride, view.head_stride) = (4, 512, 128);
        },
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let changed = changed(change).unwrap();
        assert_eq!(changed.fingerprint(), layout().fingerprint(), "change {at}");
        assert_eq!(compatible(&changed, &layout()), Ok(()), "change {at}");
    }
}

#[test]
fn a_fingerprint_notices_what_changes_the_meaning_of_bytes_and_so_does_who_compares() {
    let changes: [(Change, &str); 9] = [
        (
            |_, _, layers| layers[0].planes[0].encoding = Encoding::new("fp8_e4m3", 8),
            "layer model.layers.0 (kv): producer stores fp8_e4m3 (8 bits), consumer bfloat16 (16 bits)",
        ),
        (
            |_, _, layers| layers[0].planes[0].encoding.bits = 8,
            "layer model.layers.0 (kv): producer stores bfloat16 (8 bits), consumer bfloat16 (16 bits)",
        ),
        (
            |_, _, layers| layers[0].planes[0].heads.total = 16,
            "layer model.layers.0 (kv): producer has 16 KV heads, consumer 8",
        ),
        (
            |_, _, layers| layers[0].planes[0].content = 16,
            "layer model.layers.0 (kv): producer has 16 bytes per head and row, consumer 32",
        ),
        (
            |_, _, layers| layers[0].planes[0].rows = 8,
            "layer model.layers.0 (kv): producer has 1 row(s) per 2 token(s), consumer 1 row(s) per \
             1 token(s)",
        ),
        (
            |_, _, layers| layers[0].planes[0].role = "k".into(),
            "layer model.layers.0: producer has 1 planes (k), consumer 1 (kv)",
        ),
        (
            |_, groups, _| groups[0].kind = Kind::Window { tokens: 128 },
            "layer model.layers.0: producer keeps a window of 128 tokens, consumer all tokens",
        ),
        (
            |_, groups, _| groups[0].kind = Kind::Chunk { tokens: 64 },
            "layer model.layers.0: producer keeps chunks of 64 tokens, consumer all tokens",
        ),
        (
            |_, groups, _| groups[0].kind = Kind::State,
            "layer model.layers.0: producer keeps a state, consumer all tokens",
        ),
    ];
    for (change, words) in changes {
        let changed = changed(change).unwrap();
        assert_ne!(changed.fingerprint(), layout().fingerprint(), "{words}");
        assert_eq!(compatible(&changed, &layout()).unwrap_err().to_string(), words);
    }
    let renamed = changed(|_, _, layers| layers[0].name = "model.layers.1".into()).unwrap();
    assert_ne!(renamed.fingerprint(), layout().fingerprint());
    // Another stage's layers are no contradiction.
    assert_eq!(compatible(&renamed, &layout()), Ok(()));
    let window = |tokens| changed(|_, groups, _| groups[0].kind = Kind::Window { tokens }).unwrap();
    assert_ne!(window(4).fingerprint(), window(5).fingerprint());
}

#[test]
fn blocks_of_which_neither_size_divides_the_other_are_refused_with_both() {
    let sized = |tokens: u32| {
        let it = changed(|regions, groups, layers| {
            (regions[0].len, groups[0].block_tokens) = (1 << 20, tokens);
            let plane = &mut layers[0].planes[0];
            (plane.rows, plane.view.head_stride) = (tokens, u64::from(tokens) * 32);
            plane.view.block_stride = u64::from(tokens) * 128;
        });
        it.unwrap()
    };
    for (ours, theirs) in [(16, 64), (64, 16), (48, 16)] {
        assert_eq!(compatible(&sized(ours), &sized(theirs)), Ok(()));
    }
    let refused = compatible(&sized(48), &sized(64)).unwrap_err();
    assert_eq!(refused.difference, Difference::BlockTokens(48, 64));
    assert_eq!(
        refused.to_string(),
        "layer model.layers.0: blocks of producer have 48 tokens, those of consumer 64: neither \
         divides the other"
    );
}
