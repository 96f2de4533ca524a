//! A wrong byte of any rank, layer, plane, head and block is a wrong token.

use crate::refengine::kit::{Random, config, dense, engine, hybrid, prompt, run};
use kvferry_refengine::{
    Attention, BlockId, Engine, EngineConfig, GroupSpec, KvCaches, ModelSpec, Packing, Rank,
    Request, RequestId, Storage, continuation,
};

const PROMPT: usize = 43;
const SAID: usize = 6;

/// An engine that has produced one token of one request, and the tokens to follow.
fn prefilled(config: &EngineConfig) -> (Engine, Vec<u32>) {
    let mut engine = engine(config.clone());
    engine.submit(Request::new("a", prompt(1, PROMPT), SAID)).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.take_outputs().len(), 1, "the whole prompt was one chunk");
    let right = continuation(&config.model, &prompt(1, PROMPT), SAID);
    (engine, right[1..].to_vec())
}

fn finish(mut engine: Engine) -> Vec<u32> {
    run(&mut engine).of("a").to_vec()
}

/// The rows that the next token attends to: layer (on the rank), plane, block, head, token.
fn visible(engine: &Engine, caches: &KvCaches) -> Vec<(usize, usize, BlockId, usize, usize)> {
    let tables = engine.blocks(&RequestId::from("a")).unwrap();
    let mut rows = vec![];
    for (at, layer) in caches.layout.layers.iter().enumerate() {
        let group = &caches.layout.groups[layer.group];
        let positions: Vec<usize> = match group.attention {
            Attention::Full => (0..PROMPT).collect(),
            Attention::Window { tokens } => (PROMPT + 1 - tokens..PROMPT).collect(),
            Attention::State => vec![PROMPT - 1],
        };
        for position in positions {
            let block = tables[layer.group][position / group.block_tokens];
            assert!(!block.is_null());
            let token = match group.attention {
                Attention::State => 0,
                _ => position % group.block_tokens,
            };
            for plane in 0..layer.planes.len() {
                rows.extend((0..group.heads.count).map(|head| (at, plane, block, head, token)));
            }
        }
    }
    rows
}

/// Flips the bytes of each row that `choose` returns, one at a time. Returns how many.
fn flip_each(config: &EngineConfig, mut choose: impl FnMut(usize) -> Vec<usize>) -> usize {
    let mut flips = 0;
    for rank in config.ranks() {
        let (reference, right) = prefilled(config);
        let rows = visible(&reference, reference.caches(rank));
        for (layer, plane, block, head, token) in rows {
            let bytes = reference.caches(rank).layout.layers[layer].planes[plane].bytes;
            for byte in choose(bytes) {
                let (engine, _) = prefilled(config);
                let caches = engine.caches(rank).clone();
                let view = &caches.layout.layers[layer];
                let mut row = caches.row(view, plane, block, head, token);
                row[byte] ^= 1 << (flips % 8);
                caches.set_row(view, plane, block, head, token, &row);
                let outputs = finish(engine);
                assert_ne!(outputs, right, "{rank}, {}, plane {plane}, {block:?}", view.name);
                flips += 1;
            }
        }
        assert_eq!(finish(reference), right);
    }
    flips
}

#[test]
fn a_flipped_byte_changes_a_token_in_every_group_layer_plane_head_block_and_rank() {
    for (storage, layout) in
        [(Storage::Separate, Packing::Lbhnc), (Storage::Shared, Packing::Bhlnc)]
    {
        let mut config = config(&hybrid(), 8, 64);
        (config.tp, config.pp, config.storage, config.layout) = (2, 2, storage, layout);
        let mut random = Random::new(5);
        let flips = flip_each(&config, |bytes| vec![random.below(bytes)]);
        assert!(flips > 1000, "{flips}");
    }
}

#[test]
fn no_byte_goes_unnoticed() {
    let groups = vec![GroupSpec::full(2, 3).with_scales(2), GroupSpec::state(1, 3, 9)];
    let config = config(&ModelSpec::new(groups, 2), 8, 64);
    let flips = flip_each(&config, |bytes| (0..bytes).collect());
    assert_eq!(flips, PROMPT * 2 * (6 + 2) + 12);
}

#[test]
fn a_byte_of_a_replicated_head_matters_on_each_rank_that_has_the_head() {
    let model = ModelSpec::new(vec![GroupSpec::mla(16), GroupSpec::full(2, 4)], 2);
    let mut config = config(&model, 8, 64);
    config.tp = 4;
    let mut random = Random::new(9);
    let flips = flip_each(&config, |bytes| vec![random.below(bytes)]);
    assert_eq!(flips, 4 * PROMPT * 2);
}

pub(crate) type Rows = Vec<Vec<u8>>;

/// All rows of one block of one layer.
pub(crate) fn read(caches: &KvCaches, layer: usize, block: BlockId) -> Rows {
    let view = &caches.layout.layers[layer];
    let mut rows = vec![];
    for (plane, it) in view.planes.iter().enumerate() {
        for head in 0..it.heads {
            rows.extend((0..it.tokens).map(|token| caches.row(view, plane, block, head, token)));
        }
    }
    rows
}

pub(crate) fn write(caches: &KvCaches, layer: usize, block: BlockId, rows: &Rows) {
    let view = &caches.layout.layers[layer];
    let mut rows = rows.iter();
    for (plane, it) in view.planes.iter().enumerate() {
        for head in 0..it.heads {
            for token in 0..it.tokens {
                caches.set_row(view, plane, block, head, token, rows.next().unwrap());
            }
        }
    }
}

fn exchange(caches: &KvCaches, a: (usize, BlockId), b: (usize, BlockId)) {
    let (of_a, of_b) = (read(caches, a.0, a.1), read(caches, b.0, b.1));
    write(caches, a.0, a.1, &of_b);
    write(caches, b.0, b.1, &of_a);
}

#[test]
fn exchanged_blocks_layers_and_heads_change_a_token() {
    let mut config = config(&dense(), 8, 64);
    config.tp = 2;
    type Damage = fn(&KvCaches, &[BlockId]);
    let damages: [(&str, Damage); 5] = [
        ("nothing", |_, _| {}),
        ("neighbouring blocks", |caches, blocks| exchange(caches, (1, blocks[1]), (1, blocks[2]))),
        ("layers", |caches, blocks| exchange(caches, (0, blocks[3]), (1, blocks[3]))),
        ("heads", |caches, blocks| {
            let view = &caches.layout.layers[0];
            let rows = [0, 1].map(|head| caches.row(view, 0, blocks[2], head, 5));
            caches.set_row(view, 0, blocks[2], 0, 5, &rows[1]);
            caches.set_row(view, 0, blocks[2], 1, 5, &rows[0]);
        }),
        ("tokens", |caches, blocks| {
            let view = &caches.layout.layers[2];
            let rows = [3, 4].map(|token| caches.row(view, 0, blocks[0], 1, token));
            caches.set_row(view, 0, blocks[0], 1, 3, &rows[1]);
            caches.set_row(view, 0, blocks[0], 1, 4, &rows[0]);
        }),
    ];
    for rank in config.ranks() {
        for (what, damage) in damages {
            let (engine, right) = prefilled(&config);
            let blocks = engine.blocks(&RequestId::from("a")).unwrap()[0].clone();
            damage(engine.caches(rank), &blocks);
            assert_eq!(finish(engine) == right, what == "nothing", "{what} on {rank}");
        }
    }
}

#[test]
fn a_block_of_an_earlier_request_changes_a_token() {
    let config = config(&dense(), 8, 64);
    let (mut engine, right) = prefilled(&config);
    let rank = Rank { pp: 0, tp: 0 };
    // Only the first token differs, so every row does.
    let mut other = prompt(1, PROMPT);
    other[0] += 1;
    engine.submit(Request::new("b", other, SAID)).unwrap();
    engine.step().unwrap();
    let of = |id: &str, engine: &Engine| engine.blocks(&RequestId::from(id)).unwrap()[0][4];
    let (a, b) = (of("a", &engine), of("b", &engine));
    let caches = engine.caches(rank).clone();
    let stale = read(&caches, 1, b);
    write(&caches, 1, a, &stale);
    assert_ne!(run(&mut engine).of("a"), right);
}
