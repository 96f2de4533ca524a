//! Batches of blocks, scattered as by an engine's free list. They come from a block size and a count, from
//! the shape of a model's cache, or from a trace.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use fastrand::Rng;

use crate::blocks::{scattered, shuffled};
use crate::failure::Failure;
use crate::options::{Op, Shape, Size};
use crate::units;

/// One block: offsets into the memory of the source and into that of the destination, and a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "(usize, usize, usize)", from = "(usize, usize, usize)")]
pub(crate) struct Pair {
    pub(crate) source: usize,
    pub(crate) destination: usize,
    pub(crate) len: usize,
}

impl From<(usize, usize, usize)> for Pair {
    fn from((source, destination, len): (usize, usize, usize)) -> Pair {
        Pair { source, destination, len }
    }
}

impl From<Pair> for (usize, usize, usize) {
    fn from(pair: Pair) -> (usize, usize, usize) {
        (pair.source, pair.destination, pair.len)
    }
}

/// The blocks of one batch. No two share a byte of the destination.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) pairs: Vec<Pair>,
    /// Indices of `pairs` in the order of their destinations.
    pub(super) order: Vec<usize>,
}

impl Table {
    pub(super) fn new(pairs: Vec<Pair>) -> Result<Table, String> {
        let mut order: Vec<usize> = (0..pairs.len()).collect();
        order.sort_by_key(|&pair| pairs[pair].destination);
        let ends = |pair: &Pair| pair.destination.checked_add(pair.len);
        for two in order.windows(2) {
            let (one, next) = (&pairs[two[0]], &pairs[two[1]]);
            if ends(one).is_none_or(|end| end > next.destination) {
                let (one, next) = (two[0] + 1, two[1] + 1);
                return Err(format!("blocks {one} and {next} overlap at the destination"));
            }
        }
        Ok(Table { pairs, order })
    }

    /// Blocks side by side from `at` on at the source, scattered over as many bytes at the destination.
    pub(super) fn scatter(at: usize, Size { block, count }: Size) -> Table {
        let pair = |index| Pair {
            source: at + index * block,
            destination: at + scattered(index, count) * block,
            len: block,
        };
        Table::new((0..count).map(pair).collect()).expect("a scatter is one to one")
    }

    pub(super) fn bytes(&self) -> usize {
        self.pairs.iter().map(|pair| pair.len).sum()
    }

    /// Bytes of memory that hold every block, at the source and at the destination.
    pub(super) fn span(&self) -> usize {
        let end = |pair: &Pair| pair.source.max(pair.destination) + pair.len;
        self.pairs.iter().map(end).max().unwrap_or(0)
    }

    /// Offsets at the measuring side, offsets at the target, lengths.
    pub(super) fn columns(&self, op: Op) -> (Vec<usize>, Vec<usize>, Vec<usize>) {
        let sources = self.pairs.iter().map(|pair| pair.source).collect();
        let destinations = self.pairs.iter().map(|pair| pair.destination).collect();
        let lens = self.pairs.iter().map(|pair| pair.len).collect();
        match op {
            Op::Write => (sources, destinations, lens),
            Op::Read => (destinations, sources, lens),
        }
    }
}

/// The pieces of `memory` that are destinations, in the order of the pairs. `None` if one is beyond its
/// end.
pub(super) fn carve<'a>(memory: &'a mut [u8], table: &Table) -> Option<Vec<&'a mut [u8]>> {
    let mut pieces: Vec<&mut [u8]> = Vec::new();
    pieces.resize_with(table.pairs.len(), Default::default);
    let (mut rest, mut at) = (memory, 0);
    for &number in &table.order {
        let Pair { destination, len, .. } = table.pairs[number];
        let (_, tail) = rest.split_at_mut_checked(destination.checked_sub(at)?)?;
        let (piece, tail) = tail.split_at_mut_checked(len)?;
        pieces[number] = piece;
        (rest, at) = (tail, destination + len);
    }
    Some(pieces)
}

/// Work of one figure: batches that are moved one after the other.
#[derive(Debug, Clone)]
pub(super) struct Load {
    /// `4 KiB × 1024`.
    pub(super) name: String,
    pub(super) batches: Vec<Table>,
    /// The place on the axis of a picture, if it is one of the sizes.
    pub(super) size: Option<Size>,
}

impl Load {
    pub(super) fn of_size(size: Size) -> Load {
        let name = format!("{} × {}", units::bytes(size.block as u64), size.count);
        Load { name, batches: vec![Table::scatter(0, size)], size: Some(size) }
    }

    /// Requests of a model, one batch each: every block of every layer, between two pools that the
    /// requests nearly fill.
    pub(super) fn of_model(shape: &Shape, seed: u64) -> Load {
        let Shape { model, tokens, requests, block_tokens, dtype } = *shape;
        let page = model.page_bytes(block_tokens, dtype) as usize;
        let per_request = tokens.div_ceil(block_tokens);
        let pool = requests * per_request + (requests * per_request / 64).max(4);
        let mut rng = Rng::with_seed(seed);
        let (ours, theirs) = (shuffled(pool, &mut rng), shuffled(pool, &mut rng));
        let batch = |request: u32| {
            let blocks = (request * per_request) as usize..((request + 1) * per_request) as usize;
            let layer = |layer: u32| {
                let place = move |block: u32| (layer * pool + block) as usize * page;
                let (ours, theirs) = (&ours[blocks.clone()], &theirs[blocks.clone()]);
                ours.iter().zip(theirs).map(move |(&source, &destination)| Pair {
                    source: place(source),
                    destination: place(destination),
                    len: page,
                })
            };
            Table::new((0..model.layers).flat_map(layer).collect()).expect("a pool's blocks differ")
        };
        let batches: Vec<Table> = (0..requests).map(batch).collect();
        let blocks = per_request * model.layers;
        let page = units::bytes(page as u64);
        let name = format!("{requests} × {tokens} tokens of {} ({page} × {blocks})", model.name);
        Load { name, batches, size: None }
    }

    /// Reads one batch per line of the file; see [`TraceLine`].
    pub(super) fn of_trace(path: &Path, op: Op) -> Result<Load, Failure> {
        let wrong = |why: String| Failure::Usage(format!("--trace {}: {why}", path.display()));
        let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let batches: Result<Vec<Table>, String> = text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty())
            .map(|(number, line)| {
                parse(line, op).map_err(|why| format!("line {}: {why}", number + 1))
            })
            .collect();
        let batches = batches.map_err(wrong)?;
        if batches.is_empty() {
            return Err(wrong("it has no batch".into()));
        }
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let name = format!("{file}, {} batches", batches.len());
        Ok(Load { name, batches, size: None })
    }

    pub(super) fn bytes(&self) -> usize {
        self.batches.iter().map(Table::bytes).sum()
    }

    pub(super) fn span(&self) -> usize {
        self.batches.iter().map(Table::span).max().unwrap_or(0)
    }
}

/// One batch of a trace. *Local* is the side that measures; offsets are into its memory and the
/// target's, which are as large as the trace needs.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum TraceLine {
    /// `[[local offset, remote offset, length], …]`
    Pairs(Vec<(usize, usize, usize)>),
    /// `{"block_bytes": 65536, "local": [7, 3], "remote": [12, 40]}`: blocks of one size, by number.
    Blocks { block_bytes: usize, local: Vec<usize>, remote: Vec<usize> },
}

fn parse(line: &str, op: Op) -> Result<Table, String> {
    /// Bound of offsets: beyond any machine's memory, and small enough that sums with lengths stay in range.
    const FARTHEST: usize = 1 << 44;
    let line: TraceLine = serde_json::from_str(line).map_err(|_| {
        "neither [[local, remote, length], …] nor {\"block_bytes\": …, \"local\": […], \"remote\": […]}"
    })?;
    let triples = match line {
        TraceLine::Pairs(triples) => triples,
        TraceLine::Blocks { local, remote, .. } if local.len() != remote.len() => {
            return Err(format!("{} local blocks and {} remote ones", local.len(), remote.len()));
        }
        TraceLine::Blocks { block_bytes, local, remote } => {
            let at = |block: usize| block.saturating_mul(block_bytes);
            let both = local.into_iter().zip(remote);
            both.map(|(local, remote)| (at(local), at(remote), block_bytes)).collect()
        }
    };
    let fits = |&(local, remote, len): &(usize, usize, usize)| {
        (1..1 << 32).contains(&len) && local < FARTHEST && remote < FARTHEST
    };
    if let Some(bad) = triples.iter().position(|triple| !fits(triple)) {
        return Err(format!(
            "block {} has no bytes, 4 GiB or more, or an offset beyond 16 TiB",
            bad + 1
        ));
    }
    if triples.is_empty() {
        return Err("a batch needs a block".into());
    }
    let pair = |(local, remote, len)| match op {
        Op::Write => Pair { source: local, destination: remote, len },
        Op::Read => Pair { source: remote, destination: local, len },
    };
    Table::new(triples.into_iter().map(pair).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Dtype, Model};
    use std::collections::HashSet;

    #[test]
    fn a_scatter_names_every_place_once_and_memory_is_carved_as_it_says() {
        let table = Table::scatter(100, Size { block: 8, count: 16 });
        assert_eq!((table.bytes(), table.span()), (128, 228));
        let mut memory = vec![0; 300];
        let pieces = carve(&mut memory, &table).expect("it fits");
        for (number, piece) in pieces.into_iter().enumerate() {
            piece.fill(number as u8 + 1);
        }
        for (number, pair) in table.pairs.iter().enumerate() {
            assert!(memory[pair.destination..][..8].iter().all(|&byte| byte == number as u8 + 1));
        }
        assert!(carve(&mut [0; 100], &table).is_none());
    }

    #[test]
    fn a_batch_of_a_model_has_every_block_of_every_layer_once() {
        let model = Model::find("opt-125m").expect("listed");
        let shape = Shape { model, tokens: 40, requests: 3, block_tokens: 16, dtype: Dtype::Bf16 };
        let load = Load::of_model(&shape, 7);
        assert_eq!(load.batches.len(), 3);
        assert!(load.batches.iter().all(|batch| batch.pairs.len() == 12 * 3));
        let all = load.batches.iter().flat_map(|batch| &batch.pairs);
        let places: HashSet<usize> = all.map(|pair| pair.destination).collect();
        assert_eq!(places.len(), 3 * 36, "no block belongs to two requests");
        assert_eq!(load.bytes(), 3 * 36 * 16 * 3072);
        assert!(load.span() > load.bytes(), "some blocks of the pools belong to no request");
    }

    #[test]
    fn both_forms_of_a_trace_mean_the_same() {
        let pairs = parse("[[448, 768, 64], [192, 2560, 64]]", Op::Write).expect("well formed");
        let line = r#"{"block_bytes": 64, "local": [7, 3], "remote": [12, 40]}"#;
        assert_eq!(parse(line, Op::Write).expect("well formed").pairs, pairs.pairs);
        let back = parse(line, Op::Read).expect("well formed");
        assert_eq!(back.pairs[0], Pair { source: 768, destination: 448, len: 64 });
        assert_eq!(pairs.columns(Op::Write), back.columns(Op::Read));
    }

    #[test]
    fn traces_that_cannot_be_moved_are_refused() {
        let bad = [
            "[]",
            "[[0, 0, 0]]",
            "[[0, 0, 8], [64, 4, 8]]",
            "[[0, 0]]",
            "[[18446744073709551615, 0, 8]]",
            r#"{"block_bytes": 64, "local": [1], "remote": []}"#,
            r#"{"block_bytes": 64, "local": [288230376151711744], "remote": [1]}"#,
        ];
        for line in bad {
            assert!(parse(line, Op::Write).is_err(), "{line}");
        }
        // Two blocks may have the same source: requests may share a prefix.
        assert!(parse("[[0, 0, 8], [0, 8, 8]]", Op::Write).is_ok());
        assert!(parse("[[0, 0, 8], [0, 8, 8]]", Op::Read).is_err());
    }
}
