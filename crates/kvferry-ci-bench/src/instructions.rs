//! Instructions of fixed work of the protocol, under callgrind: the difference between many rounds
//! and few, divided, so that what happens once does not count.

use crate::Failure;
use crate::kept::Figures;
use kvferry_connector::{
    ConnectorMetadata, EngineId, GroupRule, HandoffId, Request, Scheduled, Scheduler,
    SchedulerConfig, producer_params,
};
use kvferry_models::lane_ends::LaneEnds;
use kvferry_proto::frame::verify_head;
use kvferry_proto::layout::Kind;
use kvferry_proto::message::{Decoder, Message, Ping, encode};
use kvferry_proto::{
    CONTROL_MAX, Flags, Incarnation, Limits, Op, RegionId, RequestHeader, Session, SessionConfig,
    SessionId, Timestamp, TransferId, WireDescriptor,
};
use std::cell::RefCell;
use std::hint::black_box;
use std::process::Command;
use std::time::Duration;

const DESCRIPTORS: u32 = 1024;
const FEW: u64 = 5;
const MANY: u64 = 25;

/// Workloads: the name of the figure, and the function.
const WORKS: &[(&str, fn())] = &[
    ("encode a request of 1024 descriptors", encode_request),
    ("decode a request of 1024 descriptors", decode_request),
    ("a write of one descriptor and its answer, both ends of a lane", || lane_request(false)),
    ("the same with keyed tags", || lane_request(true)),
    ("cut a batch of 1024 pairs into frames, with their tables", cut_batch),
    ("encode and decode a control message", control_message),
    ("a handshake, both sides", handshake),
    ("a step of 64 prefills that are handed over, its metadata made and decoded", connector_step),
];

/// Does a work so many times; what callgrind runs.
pub(crate) fn work(name: &str, rounds: &str) -> Result<(), Failure> {
    let (_, work) = WORKS.iter().find(|(known, _)| *known == name).ok_or("no such work")?;
    for _ in 0..rounds.parse::<u64>()? {
        work();
    }
    Ok(())
}

/// Counts all works.
pub(crate) fn count() -> Result<Figures, Failure> {
    let mut figures = Figures::default();
    let version = |program: &str| {
        let output = Command::new(program).arg("--version").output();
        output.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned()).unwrap_or_default()
    };
    figures.set("tools", format!("{}, {}", version("rustc"), version("valgrind")));
    for (name, _) in WORKS {
        let Some((few, many)) = under_callgrind(name, FEW)?.zip(under_callgrind(name, MANY)?)
        else {
            println!("SKIPPED: instructions: valgrind is not here");
            return Ok(figures);
        };
        figures.set(&format!("{name}: instructions"), (many - few) / (MANY - FEW));
    }
    Ok(figures)
}

fn under_callgrind(name: &str, rounds: u64) -> Result<Option<u64>, Failure> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe()?)
        .args(["work", name, &rounds.to_string()])
        .output();
    let Ok(output) = output else { return Ok(None) };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let collected = said.lines().find_map(|line| line.split_once("Collected : "));
    let count = collected.ok_or_else(|| format!("callgrind counted nothing:\n{said}"))?;
    Ok(Some(count.1.trim().parse()?))
}

fn request() -> (RequestHeader, Vec<u8>) {
    let mut table = Vec::with_capacity(DESCRIPTORS as usize * WireDescriptor::LEN);
    for i in 0..DESCRIPTORS {
        let region = RegionId(1 + i % 4);
        WireDescriptor { offset: u64::from(i) * 8192, len: 4096, region }.write_to(&mut table);
    }
    let header = RequestHeader {
        op: Op::Write,
        flags: Flags::NONE,
        descriptors: DESCRIPTORS,
        notify_len: 0,
        payload_len: u64::from(DESCRIPTORS) * 4096,
        transfer: TransferId(7),
        budget_ms: 1000,
        head_crc: 0,
    };
    (header, table)
}

#[inline(never)]
fn encode_request() {
    let (header, table) = request();
    black_box(header.seal(black_box(&table), &[]));
}

/// Decodes a request. Includes the encoding, which has a figure of its own.
#[inline(never)]
fn decode_request() {
    let (header, table) = request();
    let head = black_box(header.seal(&table, &[]));
    let header = RequestHeader::decode(&head, &Limits::default()).expect("own output");
    verify_head(&head, &table, &[]).expect("own output");
    black_box(header.decode_table(&table).expect("own output"));
}

thread_local! {
    static LANES: [RefCell<LaneEnds>; 2] = [false, true].map(|keyed| RefCell::new(LaneEnds::new(keyed)));
}

#[inline(never)]
fn lane_request(keyed: bool) {
    LANES.with(|lanes| lanes[usize::from(keyed)].borrow_mut().request());
}

#[inline(never)]
fn cut_batch() {
    black_box(kvferry::fuzzing::cut(black_box(DESCRIPTORS as usize), 4096));
}

#[inline(never)]
fn control_message() {
    let frame = black_box(encode(&Message::Ping(Ping { seq: 7, active: true })));
    black_box(Decoder::new(CONTROL_MAX).read(&mut &frame[..]).expect("own output"));
}

#[inline(never)]
fn handshake() {
    let now = Timestamp::from_nanos(1_000_000_000);
    let config = |id, name: &str| SessionConfig::new(Incarnation(id), name);
    let mut a = Session::initiator(config(1, "a"), None, [1; 32], now);
    let mut b = Session::acceptor(config(2, "b"), SessionId(1), [2; 32], now);
    let hello = a.poll_transmit().expect("says hello");
    b.receive(&hello[kvferry_proto::MAGIC.len()..], now);
    a.receive(&b.poll_transmit().expect("challenges"), now);
    b.receive(&a.poll_transmit().expect("proves"), now);
    a.receive(&b.poll_transmit().expect("is ready"), now);
    assert!(black_box(a.is_established() && b.is_established()));
}

const PREFILLS: u32 = 64;
/// Tokens of each prefill in each step: two blocks.
const CHUNK_TOKENS: u32 = 32;
const BLOCK_TOKENS: u32 = 16;

/// A scheduler half with its prefills, and their tokens that are computed.
struct Prefills {
    scheduler: Scheduler,
    names: Vec<String>,
    computed: u32,
}

thread_local! {
    static PREFILLED: RefCell<Prefills> = RefCell::new(Prefills::new());
}

impl Prefills {
    fn new() -> Self {
        let config = SchedulerConfig {
            groups: vec![GroupRule { kind: Kind::Full, block_tokens: BLOCK_TOKENS }],
            ranks: 1,
            timeout: Duration::from_secs(60),
            eager: true,
            recomputed_tokens: 0,
            null_block: None,
            idle: None,
        };
        let mut scheduler = Scheduler::new(config, EngineId(1));
        let names: Vec<_> = (0..PREFILLS).map(|n| format!("prefilled-{n}")).collect();
        for name in &names {
            let transfer = HandoffId::new(name).expect("short");
            let params = producer_params(Some(&transfer));
            scheduler.arrived(&Request {
                id: name,
                prompt_tokens: 1 << 20,
                max_tokens: 1,
                params: Some(&params),
                prompt: None,
            });
        }
        Self { scheduler, names, computed: 0 }
    }

    fn step(&mut self) -> Vec<u8> {
        let computed = self.computed;
        self.computed += CHUNK_TOKENS;
        let (first, end) = (computed / BLOCK_TOKENS, self.computed / BLOCK_TOKENS);
        // Blocks anywhere in a pool.
        let block = |at: u32| at.wrapping_mul(2_654_435_761) % 4096;
        let scheduled = self.names.iter().map(|request| Scheduled {
            request,
            computed: computed.into(),
            tokens: CHUNK_TOKENS.into(),
            all: computed == 0,
            blocks: vec![(first..end).map(block).collect()],
        });
        self.scheduler.step(scheduled, []).encode()
    }
}

#[inline(never)]
fn connector_step() {
    let metadata = PREFILLED.with_borrow_mut(Prefills::step);
    black_box(ConnectorMetadata::decode(black_box(&metadata)).expect("own output"));
}
