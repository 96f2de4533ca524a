//! The kernel's text, run instruction by instruction on arrays of bytes.

use kvferry_cuda::{Job, ptx};
use std::collections::{BTreeSet, HashMap};

/// Memory of a test: places that are apart, of which the kernel may touch no other byte.
struct Memory {
    places: Vec<Place>,
    /// Bytes of the kernel's stores.
    stores: BTreeSet<u64>,
}

struct Place {
    start: u64,
    bytes: Vec<u8>,
    is_written: Vec<bool>,
    may_write: bool,
}

impl Memory {
    fn place(&mut self, at: u64, len: u64) -> (&mut Place, usize) {
        assert!(at.is_multiple_of(len), "{len} bytes at {at:#x} are misaligned");
        let inside = |place: &&mut Place| {
            place.start <= at && at + len <= place.start + place.bytes.len() as u64
        };
        let place = self.places.iter_mut().find(inside);
        let place = place.unwrap_or_else(|| panic!("{len} bytes at {at:#x} are outside"));
        let offset = (at - place.start) as usize;
        (place, offset)
    }

    fn load(&mut self, at: u64, len: u64) -> u64 {
        let (place, offset) = self.place(at, len);
        let mut word = [0; 8];
        word[..len as usize].copy_from_slice(&place.bytes[offset..offset + len as usize]);
        u64::from_le_bytes(word)
    }

    fn store(&mut self, at: u64, len: u64, value: u64) {
        let (place, offset) = self.place(at, len);
        assert!(place.may_write, "a source is written at {at:#x}");
        let range = offset..offset + len as usize;
        assert!(!place.is_written[range.clone()].contains(&true), "{at:#x} is written twice");
        place.bytes[range.clone()].copy_from_slice(&value.to_le_bytes()[..len as usize]);
        place.is_written[range].fill(true);
    }
}

struct Instruction {
    guard: Option<String>,
    /// The parts of its name.
    name: Vec<String>,
    operands: Vec<String>,
}

/// The instructions of a kernel's body, and the index of the one after each label.
struct Program {
    instructions: Vec<Instruction>,
    labels: HashMap<String, usize>,
}

impl Program {
    fn parse(text: &str) -> Self {
        let body = text.split_once("\n{").expect("a body").1;
        let (mut instructions, mut labels) = (Vec::new(), HashMap::new());
        for line in body.lines() {
            let line = line.split("//").next().unwrap_or_default().trim();
            if line.is_empty() || line == "}" || line.starts_with(".reg") {
                continue;
            }
            if let Some(label) = line.strip_suffix(':') {
                labels.insert(label.to_owned(), instructions.len());
                continue;
            }
            let line = line.strip_suffix(';').expect("one instruction in a line");
            let (guard, line) = match line.strip_prefix('@') {
                Some(rest) => {
                    let (guard, line) = rest.split_once(' ').expect("a guarded instruction");
                    (Some(guard.to_owned()), line)
                }
                None => (None, line),
            };
            let (name, operands) = line.split_once(' ').unwrap_or((line, ""));
            let name = name.split('.').map(str::to_owned).collect();
            let operands = operands.split(',').map(|o| o.trim_matches([' ', '{', '}']).to_owned());
            instructions.push(Instruction { guard, name, operands: operands.collect() });
        }
        Self { instructions, labels }
    }
}

/// One thread of a launch.
struct Thread<'a> {
    registers: HashMap<&'a str, u64>,
    parameters: [(&'a str, u64); 2],
    memory: &'a mut Memory,
}

impl<'a> Thread<'a> {
    fn value(&self, operand: &str) -> u64 {
        let read = self.registers.get(operand).copied();
        read.or_else(|| operand.parse().ok()).unwrap_or_else(|| panic!("{operand} is not set"))
    }

    fn address(&self, operand: &str) -> u64 {
        let inner = operand.strip_prefix('[').and_then(|o| o.strip_suffix(']')).expect("[address]");
        let (register, offset) = inner.split_once('+').unwrap_or((inner, "0"));
        self.value(register) + offset.parse::<u64>().expect("an offset")
    }

    fn run(&mut self, program: &'a Program) {
        let mut next = 0;
        for _ in 0..1_000_000 {
            let instruction = &program.instructions[next];
            next += 1;
            if instruction.guard.as_ref().is_some_and(|guard| self.value(guard) == 0) {
                continue;
            }
            match instruction.name[0].as_str() {
                "ret" => return,
                "bra" => next = program.labels[&instruction.operands[0]],
                "ld" | "st" => self.access(instruction),
                _ => self.compute(instruction),
            }
        }
        panic!("the thread does not end");
    }

    fn access(&mut self, instruction: &'a Instruction) {
        let (name, operands) = (&instruction.name, &instruction.operands);
        let parts: Vec<&str> = name.iter().map(String::as_str).filter(|p| *p != "nc").collect();
        let bytes = match *parts.last().expect("a type") {
            "u8" => 1,
            "u32" => 4,
            "u64" => 8,
            other => panic!("{other} is no type of memory"),
        };
        match parts[..] {
            ["ld", "param", _] => {
                let wanted = operands[1].trim_matches(['[', ']']);
                let parameter = self.parameters.iter().find(|(name, _)| *name == wanted);
                self.registers.insert(&operands[0], parameter.expect("a parameter").1);
            }
            ["ld", "global", _] => {
                let value = self.memory.load(self.address(&operands[1]), bytes);
                self.registers.insert(&operands[0], value);
            }
            ["st", "global", _] => {
                self.memory.stores.insert(bytes);
                self.memory.store(self.address(&operands[0]), bytes, self.value(&operands[1]));
            }
            ["ld", "global", "v2", "u64"] => {
                let at = self.address(&operands[2]);
                assert!(at.is_multiple_of(16), "16 bytes at {at:#x} are misaligned");
                for (half, register) in operands[..2].iter().enumerate() {
                    let value = self.memory.load(at + 8 * half as u64, 8);
                    self.registers.insert(register, value);
                }
            }
            ["st", "global", "v2", "u64"] => {
                self.memory.stores.insert(16);
                let at = self.address(&operands[0]);
                assert!(at.is_multiple_of(16), "16 bytes at {at:#x} are misaligned");
                for (half, register) in operands[1..].iter().enumerate() {
                    self.memory.store(at + 8 * half as u64, 8, self.value(register));
                }
            }
            _ => panic!("{parts:?} is unknown"),
        }
    }

    fn compute(&mut self, instruction: &'a Instruction) {
        let Instruction { name, operands, .. } = instruction;
        let parts: Vec<&str> = name.iter().map(String::as_str).collect();
        let of = |at: usize| self.value(&operands[at]);
        let value = match parts[..] {
            ["mov" | "cvt", ..] | ["cvta", "to", "global", "u64"] => of(1),
            ["add", _] => of(1).wrapping_add(of(2)),
            ["sub", _] => of(1).wrapping_sub(of(2)),
            ["mul", "lo" | "wide", _] => of(1).wrapping_mul(of(2)),
            ["mad", "lo", _] => of(1).wrapping_mul(of(2)).wrapping_add(of(3)),
            ["shl", _] => of(1) << of(2),
            ["shr", _] => of(1) >> of(2),
            ["and", _] => of(1) & of(2),
            ["xor", _] => of(1) ^ of(2),
            ["min", _] => of(1).min(of(2)),
            ["setp", "ge", _] => u64::from(of(1) >= of(2)),
            ["setp", "lt", _] => u64::from(of(1) < of(2)),
            ["setp", "eq", _] => u64::from(of(1) == of(2)),
            _ => panic!("{parts:?} is unknown"),
        };
        let is_wide =
            parts.last().is_some_and(|kind| kind.ends_with("64")) || parts.contains(&"wide");
        let value = if is_wide { value } else { value & u64::from(u32::MAX) };
        self.registers.insert(&operands[0], value);
    }
}

/// Runs a launch, its threads one after the other: they share nothing.
fn launch(
    text: &str,
    entry: &str,
    memory: &mut Memory,
    jobs: u64,
    count: u64,
    blocks: u64,
    threads: u64,
) {
    let program = Program::parse(text);
    let names = [format!("{entry}_jobs"), format!("{entry}_count")];
    for block in 0..blocks {
        for thread in 0..threads {
            let special = [
                ("%tid.x", thread),
                ("%ntid.x", threads),
                ("%ctaid.x", block),
                ("%nctaid.x", blocks),
            ];
            let parameters = [(names[0].as_str(), jobs), (names[1].as_str(), count)];
            Thread { registers: HashMap::from(special), parameters, memory }.run(&program);
        }
    }
}

const SOURCES: u64 = 0x10_0000;
const TARGETS: u64 = 0x20_0000;
const TABLE: u64 = 0x30_0008;

/// Copies jobs of these offsets and lengths by the kernel, checks the bytes, and returns the sizes of its stores.
fn check(text: &str, entry: &str, jobs: &[(u64, u64, u64)], blocks: u64) -> BTreeSet<u64> {
    let end = |of: fn(&(u64, u64, u64)) -> u64| jobs.iter().map(of).max().unwrap_or(0);
    let (sources, targets) = (end(|job| job.0 + job.2), end(|job| job.1 + job.2));
    let mut random = fastrand::Rng::with_seed(9);
    let source: Vec<u8> = (0..sources).map(|_| random.u8(..)).collect();
    let table: Vec<u8> = jobs
        .iter()
        .flat_map(|&(src, dst, len)| Job { src: SOURCES + src, dst: TARGETS + dst, len }.to_bytes())
        .collect();
    let place = |start, bytes: Vec<u8>, may_write| {
        let is_written = vec![false; bytes.len()];
        Place { start, bytes, is_written, may_write }
    };
    let target = vec![0xee; targets as usize];
    let places = vec![
        place(SOURCES, source.clone(), false),
        place(TARGETS, target.clone(), true),
        place(TABLE, table, false),
    ];
    let mut memory = Memory { places, stores: BTreeSet::new() };
    launch(text, entry, &mut memory, TABLE, jobs.len() as u64, blocks, 64);
    let mut wanted = target;
    let mut is_written = vec![false; wanted.len()];
    for &(src, dst, len) in jobs {
        let (from, to) = (src as usize..(src + len) as usize, dst as usize..(dst + len) as usize);
        wanted[to.clone()].copy_from_slice(&source[from]);
        is_written[to].fill(true);
    }
    assert!(memory.places[1].bytes == wanted, "other bytes than those of the jobs {jobs:?}");
    assert!(memory.places[1].is_written == is_written, "bytes of the jobs {jobs:?} are missing");
    memory.stores
}

fn both() -> [(String, &'static str); 2] {
    [
        (ptx::TEXT.to_owned(), ptx::ENTRY),
        (ptx::text_of_constant_sources(), ptx::ENTRY_OF_CONSTANT_SOURCES),
    ]
}

#[test]
fn the_kernel_copies_any_alignment_and_length_exactly() {
    let mut random = fastrand::Rng::with_seed(4);
    for (text, entry) in both() {
        for src in 0..16 {
            for dst in 0..16 {
                let len = match random.u8(..4) {
                    0 => random.u64(1..40),
                    1 => random.u64(1..700),
                    _ => random.u64(1..4000),
                };
                check(&text, entry, &[(src, 16 + dst, len)], 1);
            }
        }
        for len in 1..150 {
            let at = random.u64(..16);
            check(&text, entry, &[(at, at + [0, 8, 4, 1][len as usize % 4], len)], 1);
        }
    }
}

#[test]
fn the_kernel_copies_all_jobs_with_fewer_warps_and_with_more() {
    let mut random = fastrand::Rng::with_seed(6);
    for (text, entry) in both() {
        for count in [0, 1, 5, 40] {
            let mut dst = 3;
            let mut jobs = Vec::new();
            for _ in 0..count {
                let len = random.u64(1..600);
                jobs.push((random.u64(..300), dst, len));
                dst += len + random.u64(..30);
            }
            for blocks in [1, 3, 50] {
                check(&text, entry, &jobs, blocks);
            }
        }
    }
}

#[test]
fn the_kernel_uses_the_largest_unit_that_the_distance_of_the_addresses_allows() {
    for (text, entry) in both() {
        for (apart, unit) in [(0, 16), (8, 8), (4, 4), (12, 4), (2, 1), (1, 1), (15, 1)] {
            let aligned = check(&text, entry, &[(64, 64 + apart, 4096)], 1);
            assert_eq!(aligned, BTreeSet::from([unit]), "{apart} bytes apart");
            let shifted = check(&text, entry, &[(65, 65 + apart, 4096)], 1);
            assert_eq!(shifted, BTreeSet::from([unit, 1]), "{apart} bytes apart");
        }
    }
}

#[test]
fn only_instructions_of_any_gpu_since_compute_capability_7_are_used() {
    let allowed = [
        "add", "and", "bra", "cvt", "cvta", "ld", "mad", "min", "mov", "mul", "or", "ret", "selp",
        "setp", "shl", "shr", "st", "sub", "xor",
    ];
    for (text, entry) in both() {
        assert!(text.contains(&format!(".visible .entry {entry}(")));
        assert!(text.contains("\n.version 7.0\n.target sm_70\n.address_size 64\n"));
        let program = Program::parse(&text);
        for instruction in &program.instructions {
            assert!(allowed.contains(&instruction.name[0].as_str()), "{:?}", instruction.name);
            let is_constant = instruction.name.iter().any(|part| part == "nc");
            let is_load = instruction.name[..2.min(instruction.name.len())] == ["ld", "global"];
            assert_eq!(is_constant, is_load && entry == ptx::ENTRY_OF_CONSTANT_SOURCES);
        }
    }
}

#[test]
fn a_launch_has_a_warp_for_each_job_up_to_the_most_blocks() {
    let warps = |jobs| ptx::blocks(jobs, 12) * ptx::THREADS / 32;
    assert_eq!([0, 1, 8, 9, 96, 97, 5000].map(warps), [8, 8, 8, 16, 96, 96, 96]);
    assert_eq!((ptx::blocks(100, 0), ptx::blocks(u32::MAX, u32::MAX)), (1, u32::MAX / 8 + 1));
}
