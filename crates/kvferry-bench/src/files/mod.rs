//! Memory to files and back, beside fio and NIXL in the same rounds: `kvferry bench file`.
//!
//! Each moves blocks of a file of the same length in the same folder, in a random order, to and from as
//! much memory. fio gets io_uring with registered buffers and files; NIXL its POSIX plug-in with either of
//! its queues.
//!
//! A run moves the file several times: fio counts in milliseconds, and from the start of each thread,
//! which is late where threads are more than cores. Both overstate the rate of a short run.

mod fio;
mod nixl;

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use indicatif::ProgressBar;
use kvferry::{
    Access, Agent, Batch, DirectIo, FileRegion, Options, Region, TransportKind, Transports,
};
use kvferry_sys::file::{File, OpenFlags};

use crate::failure::Failure;
use crate::options::{FileBench, Op};
use crate::report::{Report, Row};
use crate::stats::Spread;
use crate::units;

use nixl::Nixl;

/// The form of the report's JSON.
pub const SCHEMA: &str = "kvferry.bench-file/2";
/// Memory of one thread, at most.
const MEMORY_BYTES: u64 = 64 << 20;
/// Operations of fio under way at once, and their bytes, as far as blocks allow.
const DEPTH: u64 = 256;
const DEPTH_MIN: u64 = 4;
const IN_FLIGHT: u64 = 32 << 20;
/// Bytes that a run moves: of a cached file, which is the fastest, and of the others.
const CACHED_BYTES: u64 = 2 << 30;
const BYTES: u64 = 1 << 30;
const QUICK_SHARE: u64 = 8;
/// Bytes that are moved in blocks below 32 KiB, which take longer.
const SMALL_BYTES: u64 = 128 << 20;
/// Required share of fio's rate: from 32 KiB on, and below.
const SHARE: f64 = 0.95;
const SHARE_SMALL: f64 = 0.8;

/// Way in which the file is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Buffered,
    /// Like `Buffered`, with nothing of the file in the page cache before.
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
    /// Operations of fio under way at once.
    fn depth(self) -> u64 {
        (IN_FLIGHT / self.block).clamp(DEPTH_MIN, DEPTH)
    }

    /// Blocks of memory that the file's blocks share: as many as fio has. All of the file in memory would
    /// be slower for everyone, for it does not fit into the processor's cache.
    fn places(self) -> u64 {
        self.depth().min((MEMORY_BYTES / self.block).max(1))
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

/// GB/s of one case, round by round.
struct Rates {
    ours: Vec<f64>,
    fio: Vec<f64>,
    nixl: Vec<(&'static str, Vec<f64>)>,
}

impl Rates {
    fn new(nixl: &[Option<Nixl>]) -> Rates {
        let nixl = nixl.iter().flatten().map(|nixl| (nixl.who, Vec::new())).collect();
        Rates { ours: Vec::new(), fio: Vec::new(), nixl }
    }
}

/// Measures what `options` ask for; `bar` shows the progress.
///
/// # Errors
/// [`Failure::Check`] for a wrong byte; otherwise what a transfer or fio failed with.
pub fn measure(options: &FileBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let rounds = options.effort.rounds();
    let mut remarks = Vec::new();
    let fio = fio::find();
    if fio.is_none() {
        remarks.push("fio is not here (apt-get install fio): no rows beside it".to_owned());
    }
    let place = Place::new(options)?;
    if !place.direct_file.is_direct() {
        remarks.push("the file system has no access past the page cache: no direct rows".into());
    }
    let cases = place.cases(options);
    bar.inc_length((cases.len() * rounds) as u64);
    let mut nixl: Vec<Option<Nixl>> =
        match nixl::start(options.peers.as_deref(), THREADS, MEMORY_BYTES) {
            Ok(nixl) => nixl.into_iter().map(Some).collect(),
            Err(why) => {
                remarks.push(why);
                Vec::new()
            }
        };
    let mut rates: Vec<Rates> = cases.iter().map(|_| Rates::new(&nixl)).collect();
    for round in 0..rounds {
        for (case, rates) in cases.iter().zip(&mut rates) {
            bar.set_message(format!("round {}/{rounds}: {}", round + 1, case.name()));
            let subjects = 2 + nixl.len();
            // In turns: what one has written, the device may still move during the other's.
            for subject in (0..subjects).map(|i| (i + round) % subjects) {
                match (subject, &fio) {
                    (0, _) => rates.ours.push(place.run(*case, round as u64)?),
                    (1, Some(fio)) => {
                        place.prepare(*case, &place.fio_path)?;
                        rates.fio.push(fio.run(
                            &place.fio_path,
                            *case,
                            place.len,
                            place.amount(*case),
                        )?);
                    }
                    (1, None) => {}
                    (peer, _) => {
                        let peer = peer - 2;
                        let Some(engine) = &mut nixl[peer] else { continue };
                        place.prepare(*case, &place.fio_path)?;
                        let blocks = place.blocks(*case, round as u64);
                        match engine.run(&place.fio_path, *case, case.places(), &blocks) {
                            Ok(rate) => rates.nixl[peer].1.push(rate),
                            Err(e) => {
                                remarks.push(format!("{}: {}: {e}", engine.who, case.name()));
                                nixl[peer] = None;
                            }
                        }
                    }
                }
            }
            bar.inc(1);
        }
    }
    let share = place.agent.files().registered_operations();
    remarks.push(format!("files: {}", place.agent.files().engine().unwrap_or_default()));
    remarks.push(format!("operations of kvferry from registered memory: {share}"));
    let mut rows = Vec::new();
    for (case, Rates { ours, fio, nixl }) in cases.into_iter().zip(rates) {
        let rounds = ours.len();
        let bound = if case.block < 32 << 10 { SHARE_SMALL } else { SHARE };
        let others = std::iter::once(("fio", fio, bound));
        let others = others.chain(nixl.into_iter().map(|(who, rates)| (who, rates, 1.0)));
        let row = Row::new("file", case.name(), "GB/s", Spread::of(ours));
        rows.push(
            others
                .filter(|(_, theirs, _)| theirs.len() == rounds)
                .fold(row, |row, (who, theirs, bound)| {
                    row.at_least_of(bound, who, Spread::of(theirs))
                }),
        );
    }
    Ok(Report::new(SCHEMA, options.effort.quick, remarks, rows))
}

/// The agent, its file, and fio's.
struct Place {
    agent: Agent,
    path: PathBuf,
    fio_path: PathBuf,
    len: u64,
    /// Bytes that were written together, for any block size.
    piece: usize,
    buffered_file: FileRegion,
    direct_file: FileRegion,
    memory: Vec<Region>,
    pattern: Vec<u8>,
    is_quick: bool,
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
            .setting("file_engine", options.engine.name())
            .start()?;
        let folder = options.folder.clone().unwrap_or_else(std::env::temp_dir);
        let path = folder.join(format!("kvferry-bench-{}", std::process::id()));
        let fio_path = folder.join(format!("kvferry-bench-{}-fio", std::process::id()));
        let default = if options.effort.quick { 128 << 20 } else { 512 << 20 };
        let len = options.bytes.unwrap_or(default).next_multiple_of(MEMORY_BYTES);
        let how = kvferry::FileOptions::create(len);
        let buffered_file = agent.open_file(&path, &how.clone().direct(DirectIo::Off))?;
        let direct_file = agent.open_file(&path, &how.direct(DirectIo::Auto))?;
        let allocate =
            |_| agent.allocate(usize::try_from(MEMORY_BYTES).expect("64 MiB"), Access::NONE);
        let memory = (0..THREADS).map(allocate).collect::<Result<Vec<_>, _>>()?;
        let piece = options.sizes.iter().copied().fold(4096, gcd).max(8);
        let piece = usize::try_from(piece).expect("at most 4096");
        let pattern = (0..MEMORY_BYTES / 8).flat_map(|i| pattern(i).to_le_bytes()).collect();
        let is_quick = options.effort.quick;
        let place = Place {
            agent,
            path,
            fio_path,
            len,
            piece,
            buffered_file,
            direct_file,
            memory,
            pattern,
            is_quick,
        };
        place.fill()?;
        Ok(place)
    }

    /// Writes every byte of the file: a place that was only reserved reads as zeros, faster than data.
    fn fill(&self) -> Result<(), Failure> {
        for memory in &self.memory {
            memory.write_at(0, &self.pattern)?;
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
            let block = block.clamp(8, MEMORY_BYTES);
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

    /// Bytes that a case moves: all threads together.
    fn amount(&self, case: Case) -> u64 {
        let quick = if self.is_quick { QUICK_SHARE } else { 1 };
        match case.mode {
            _ if case.block < 32 << 10 => self.len.min(SMALL_BYTES),
            Mode::Cold => self.len,
            Mode::Buffered if case.op == Op::Read => CACHED_BYTES / quick,
            _ => BYTES / quick,
        }
    }

    /// The blocks that each thread moves, in its order. Threads have parts of the file of their own.
    fn blocks(&self, case: Case, seed: u64) -> Vec<Vec<u64>> {
        let all: Vec<u64> = (0..self.len / case.block).collect();
        let each = self.amount(case) / case.threads as u64 / case.block;
        let each = usize::try_from(each).expect("small").max(1);
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut one = |part: &[u64]| {
            let mut blocks = Vec::with_capacity(each);
            while blocks.len() < each {
                let mut turn = part.to_vec();
                rng.shuffle(&mut turn);
                turn.truncate(each - blocks.len());
                blocks.append(&mut turn);
            }
            blocks
        };
        all.chunks(all.len().div_ceil(case.threads)).map(&mut one).collect()
    }

    /// The state of the page cache that a case begins with.
    fn prepare(&self, case: Case, path: &Path) -> Result<(), Failure> {
        let failed = |e| Failure::Failed(format!("{}: {e}", path.display()));
        let file =
            File::open(path, OpenFlags { read: true, ..OpenFlags::default() }).map_err(failed)?;
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
        let blocks = self.blocks(case, seed);
        let start = Barrier::new(blocks.len());
        thread::scope(|scope| {
            let running: Vec<_> = blocks
                .iter()
                .zip(&self.memory)
                .map(|(blocks, memory)| {
                    let batch = self.batch(case, blocks, memory);
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
        let places = case.places();
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

    /// Reads as many blocks as there are places, each to its own, and checks that they are pieces of the
    /// pattern. What the timed reads left can't be checked: two may write to one place at once.
    fn verify(&self, case: Case) -> Result<(), Failure> {
        let bytes = case.places() * case.block;
        let mut bytes = vec![0xff; usize::try_from(bytes).expect("at most 64 MiB")];
        for (memory, mut blocks) in self.memory.iter().zip(self.blocks(case, 0)) {
            bytes.fill(0xff);
            memory.write_at(0, &bytes)?;
            blocks.truncate(usize::try_from(case.places()).expect("small"));
            let len = blocks.len() * usize::try_from(case.block).expect("at most 64 MiB");
            self.move_all(case, &self.batch(case, &blocks, memory)?)?;
            let bytes = &mut bytes[..len];
            memory.read_at(0, bytes)?;
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
        for memory in &self.memory[..case.threads] {
            memory.write_at(0, &self.pattern)?;
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
