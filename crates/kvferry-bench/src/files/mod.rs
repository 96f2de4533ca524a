//! Memory to files and back, beside fio in the same rounds: `kvferry bench file`.
//!
//! Each moves blocks of a file of its own, of the same length in the same folder, in a random order and with
//! as many bytes under way. fio gets io_uring with registered buffers and files.

mod fio;

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use indicatif::ProgressBar;
use kvferry::{
    Access, Agent, Batch, DirectIo, FileRegion, Options, Region, TransportKind, Transports,
};
use kvferry_sys::file::{File, How};

use crate::failure::Failure;
use crate::options::{FileBench, Op};
use crate::report::{Report, Row};
use crate::stats::Spread;
use crate::units;

/// The form of the report's JSON.
const SCHEMA: &str = "kvferry.bench-file/1";
/// Seven or more to judge by.
const ROUNDS: usize = 7;
const QUICK_ROUNDS: usize = 2;
/// Memory of one thread, twice of what is under way at once: blocks of a batch share it.
const MEMORY_BYTES: u64 = 2 * IN_FLIGHT;
/// Operations of kvferry under way at once, and bytes of one, at most.
const DEPTH: u64 = 64;
const OPERATION: u64 = 1 << 20;
const IN_FLIGHT: u64 = DEPTH * OPERATION;
/// What is moved of blocks below 32 KiB, which take longer.
const SMALL_BYTES: u64 = 128 << 20;
/// Of fio's figure: from 32 KiB on, and below.
const SHARE: f64 = 0.95;
const SHARE_SMALL: f64 = 0.8;

/// How the file is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Buffered,
    /// As `Buffered`, and nothing of the file is in the page cache before.
    Cold,
    Direct,
}

impl Mode {
    fn is_direct(self) -> bool {
        self == Mode::Direct
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    mode: Mode,
    op: Op,
    block: u64,
    threads: usize,
}

impl Case {
    /// Bytes of memory that its blocks share: twice of what is under way at once. fio has half of that; all
    /// of the memory at once would be slower, for it does not fit into the processor's cache.
    fn memory(self) -> u64 {
        (2 * DEPTH * self.block.min(OPERATION)).clamp(self.block, MEMORY_BYTES)
    }

    fn name(self) -> String {
        let mode = match (self.mode, self.op) {
            (Mode::Buffered, Op::Write) => "buffered",
            (Mode::Buffered, Op::Read) => "cached",
            (Mode::Cold, _) => "cold",
            (Mode::Direct, _) => "direct",
        };
        let threads = if self.threads == 1 { "" } else { ", 4 threads" };
        format!("{mode} {} {}{threads}", self.op.name(), units::bytes(self.block))
    }
}

/// Measures what `options` ask for; `bar` shows the progress.
///
/// # Errors
/// [`Failure::Check`] for a wrong byte; otherwise what a transfer or fio failed with.
pub fn measure(options: &FileBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let rounds = options.rounds.unwrap_or(if options.quick { QUICK_ROUNDS } else { ROUNDS });
    let mut remarks = Vec::new();
    let fio = fio::find();
    if fio.is_none() {
        remarks.push("fio is not here (apt-get install fio): nothing is judged".to_owned());
    }
    let place = Place::new(options)?;
    remarks.push(format!("files: {}", place.agent.files().engine().unwrap_or_default()));
    if !place.direct_file.is_direct() {
        remarks.push("the file system has no access past the page cache: no direct rows".into());
    }
    let cases = place.cases(options);
    bar.inc_length((cases.len() * rounds) as u64);
    let mut rates: Vec<[Vec<f64>; 2]> = cases.iter().map(|_| [vec![], vec![]]).collect();
    for round in 0..rounds {
        for (case, [ours, theirs]) in cases.iter().zip(&mut rates) {
            bar.set_message(format!("round {}/{rounds}: {}", round + 1, case.name()));
            let mut baseline = || -> Result<(), Failure> {
                if let Some(fio) = &fio {
                    place.prepare(*case, &place.fio_path)?;
                    let len = place.amount(*case);
                    theirs.push(fio.run(&place.fio_path, *case, place.len, len, IN_FLIGHT)?);
                }
                Ok(())
            };
            // In turns: what one has written, the device may still move during the other's.
            if round % 2 == 1 {
                baseline()?;
            }
            ours.push(place.run(*case, round as u64)?);
            if round % 2 == 0 {
                baseline()?;
            }
            bar.inc(1);
        }
    }
    let mut rows = Vec::new();
    for (case, [ours, theirs]) in cases.into_iter().zip(rates) {
        let name = case.name();
        if !theirs.is_empty() {
            let bound = if case.block < 32 << 10 { SHARE_SMALL } else { SHARE };
            let share = Spread::ratio(&ours, &theirs);
            rows.push(
                Row::new("file", format!("{name}, share of fio's"), "", share).at_least(bound),
            );
            rows.push(Row::new("file", format!("{name}, fio"), "GB/s", Spread::of(theirs)));
        }
        rows.push(Row::new("file", format!("{name}, kvferry"), "GB/s", Spread::of(ours)));
    }
    Ok(Report::new(SCHEMA, options.quick, remarks, rows))
}

/// The agent, its file, and fio's.
struct Place {
    agent: Agent,
    path: PathBuf,
    fio_path: PathBuf,
    len: u64,
    /// Bytes that were written together, whatever the block size.
    piece: usize,
    buffered_file: FileRegion,
    direct_file: FileRegion,
    memory: Vec<Region>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(&self.fio_path);
    }
}

const THREADS: usize = 4;

impl Place {
    fn new(options: &FileBench) -> Result<Place, Failure> {
        let agent = Agent::builder()
            .name("bench-file")
            .transports(Transports::only(TransportKind::TCP))
            .file_engine(options.engine)
            .start()?;
        let folder = options.folder.clone().unwrap_or_else(std::env::temp_dir);
        let path = folder.join(format!("kvferry-bench-{}", std::process::id()));
        let fio_path = folder.join(format!("kvferry-bench-{}-fio", std::process::id()));
        let len = options.bytes.next_multiple_of(MEMORY_BYTES);
        let how = kvferry::FileOptions::create(len);
        let buffered_file = agent.open_file(&path, &how.clone().direct(DirectIo::Off))?;
        let direct_file = agent.open_file(&path, &how.direct(DirectIo::Auto))?;
        let allocate =
            |_| agent.allocate(usize::try_from(MEMORY_BYTES).expect("128 MiB"), Access::NONE);
        let memory = (0..THREADS).map(allocate).collect::<Result<Vec<_>, _>>()?;
        let piece = options.sizes.iter().copied().fold(4096, gcd).max(8);
        let piece = usize::try_from(piece).expect("at most 4096");
        let place = Place { agent, path, fio_path, len, piece, buffered_file, direct_file, memory };
        place.fill()?;
        Ok(place)
    }

    /// Writes every byte of the file: a place that was only reserved reads as zeros, faster than data.
    fn fill(&self) -> Result<(), Failure> {
        let pattern: Vec<u8> =
            (0..MEMORY_BYTES / 8).flat_map(|i| pattern(i).to_le_bytes()).collect();
        for memory in &self.memory {
            memory.write_at(0, &pattern)?;
        }
        let how = kvferry::FileOptions::create(self.len).direct(DirectIo::Off);
        let of_fio = self.agent.open_file(&self.fio_path, &how)?;
        for file in [&self.buffered_file, &of_fio] {
            let mut at = 0;
            while at < self.len {
                let mut batch = Batch::new();
                batch.push(&self.memory[0], 0, &file.remote(), at, MEMORY_BYTES)?;
                self.agent.files().write(&batch, &Options::default())?;
                at += MEMORY_BYTES;
            }
            file.sync()?;
        }
        self.agent.close_file(&of_fio)?;
        Ok(())
    }

    fn cases(&self, options: &FileBench) -> Vec<Case> {
        let mut cases = Vec::new();
        for &block in &options.sizes {
            let block = block.clamp(8, IN_FLIGHT);
            for (mode, op) in [
                (Mode::Buffered, Op::Write),
                (Mode::Buffered, Op::Read),
                (Mode::Cold, Op::Read),
                (Mode::Direct, Op::Write),
                (Mode::Direct, Op::Read),
            ] {
                let aligned = block.is_multiple_of(kvferry_sys::file::page());
                if mode.is_direct() && !(self.direct_file.is_direct() && aligned) {
                    continue;
                }
                let threads = if mode == Mode::Cold { &[1][..] } else { &[1, THREADS] };
                cases.extend(threads.iter().map(|&threads| Case { mode, op, block, threads }));
            }
        }
        cases
    }

    /// Bytes that a case moves.
    fn amount(&self, case: Case) -> u64 {
        if case.block < 32 << 10 { self.len.min(SMALL_BYTES) } else { self.len }
    }

    /// The state of the page cache that a case begins with.
    fn prepare(&self, case: Case, path: &Path) -> Result<(), Failure> {
        let failed = |e| Failure::Failed(format!("{}: {e}", path.display()));
        let file = File::open(path, How { read: true, ..How::default() }).map_err(failed)?;
        file.sync_data().map_err(failed)?;
        if case.mode == Mode::Buffered {
            file.will_need(self.len);
        } else {
            file.forget_cached();
        }
        Ok(())
    }

    /// GB/s of all threads together.
    fn run(&self, case: Case, seed: u64) -> Result<f64, Failure> {
        self.prepare(case, &self.path)?;
        let blocks: Vec<u64> = (0..self.len / case.block).collect();
        let amount = self.amount(case) / case.threads as u64;
        let start = Barrier::new(case.threads);
        thread::scope(|scope| {
            let each = blocks.chunks(blocks.len().div_ceil(case.threads)).zip(&self.memory);
            let running: Vec<_> = each
                .map(|(blocks, memory)| {
                    let mut blocks = blocks.to_vec();
                    fastrand::Rng::with_seed(seed).shuffle(&mut blocks);
                    blocks.truncate(usize::try_from(amount / case.block).expect("small").max(1));
                    let batch = self.batch(case, &blocks, memory);
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        let began = Instant::now();
                        let moved = batch.and_then(|batch| self.move_all(case, &batch));
                        moved.map(|bytes| (bytes, began, Instant::now()))
                    })
                })
                .collect();
            let ended = running.into_iter().map(|thread| thread.join());
            let ended: Result<Vec<_>, Failure> =
                ended.map(|ended| ended.expect("threads of a bench don't panic")).collect();
            let ended = ended?;
            let bytes: u64 = ended.iter().map(|(bytes, ..)| bytes).sum();
            let began = ended.iter().map(|(_, began, _)| began).min().expect("one thread");
            let last = ended.iter().map(|(.., end)| end).max().expect("one thread");
            let took = last.duration_since(*began).as_secs_f64();
            if case.op == Op::Read {
                self.verify(case)?;
            }
            Ok(bytes as f64 / took / 1e9)
        })
    }

    /// All blocks of one thread: a transfer keeps its queue full until its end.
    fn batch(&self, case: Case, blocks: &[u64], memory: &Region) -> Result<Batch, Failure> {
        let file = if case.mode.is_direct() { &self.direct_file } else { &self.buffered_file };
        let remote = file.remote();
        let mut batch = Batch::with_capacity(blocks.len());
        let places = (case.memory() / case.block).max(1);
        for (i, block) in blocks.iter().enumerate() {
            let near = i as u64 % places * case.block;
            batch.push(memory, near, &remote, block * case.block, case.block)?;
        }
        Ok(batch)
    }

    fn move_all(&self, case: Case, batch: &Batch) -> Result<u64, Failure> {
        let (files, options) = (self.agent.files(), Options::default());
        let moved = match case.op {
            Op::Write => files.write(batch, &options),
            Op::Read => files.read(batch, &options),
        };
        Ok(moved?.bytes)
    }

    /// Whether what was read are pieces of the pattern; writes the pattern anew.
    fn verify(&self, case: Case) -> Result<(), Failure> {
        let mut bytes = vec![0; usize::try_from(case.block).expect("at most 64 MiB")];
        for memory in &self.memory[..case.threads] {
            memory.read_at(0, &mut bytes)?;
            // What was written in smaller blocks came from anywhere in memory.
            for piece in bytes.chunks(self.piece) {
                let first = u64::from_le_bytes(piece[..8].try_into().expect("eight bytes"));
                // The pattern's words are distinct: the first one says where the piece is from.
                let at = first.wrapping_mul(PATTERN_INVERSE);
                let is_right = |(i, word): (usize, &[u8])| {
                    word == pattern(at.wrapping_add(i as u64)).to_le_bytes()
                };
                if at >= MEMORY_BYTES / 8 || !piece.chunks_exact(8).enumerate().all(is_right) {
                    return Err(Failure::Check(format!("{}: a wrong byte", case.name())));
                }
            }
        }
        let pattern: Vec<u8> =
            (0..MEMORY_BYTES / 8).flat_map(|i| pattern(i).to_le_bytes()).collect();
        for memory in &self.memory[..case.threads] {
            memory.write_at(0, &pattern)?;
        }
        Ok(())
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Odd, so that different words of memory differ.
const PATTERN: u64 = 0x9e37_79b9_7f4a_7c15;
const PATTERN_INVERSE: u64 = inverse(PATTERN);

const fn pattern(word: u64) -> u64 {
    word.wrapping_mul(PATTERN)
}

/// The inverse of an odd number modulo 2^64, by Newton's method.
const fn inverse(odd: u64) -> u64 {
    let (mut x, mut step) = (odd, 0);
    while step < 6 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        step += 1;
    }
    x
}

/// Whether a folder can be used; for arguments.
///
/// # Errors
/// [`Failure::Usage`].
pub fn check_folder(folder: &Path) -> Result<(), Failure> {
    if folder.is_dir() {
        return Ok(());
    }
    Err(Failure::Usage(format!("--folder {}: not a folder", folder.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_the_pattern_says_where_it_is() {
        for word in [0, 1, 77, 8_388_607] {
            assert_eq!(pattern(word).wrapping_mul(PATTERN_INVERSE), word);
        }
    }
}
