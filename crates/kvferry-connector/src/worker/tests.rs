//! What needs the inside of a worker half.

use super::names::is_literal;
use super::*;
use crate::metadata::{Compute, FetchRequest, Offer};
use kvferry::{Access, Peer};
use kvferry_models::engines::layout;
use kvferry_proto::engine_handshake::{EngineId, Model};
use kvferry_proto::handoff::{BlockTable, Limits};
use kvferry_proto::layout::{Heads, Packing, Shape};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

const BLOCK_TOKENS: u32 = 4;
const BUDGET_MS: u32 = 60_000;

/// The only rank of an engine with one layer.
fn start(engine: u128, look_up: impl FnOnce(&Agent) -> LookUp) -> (Worker, Agent) {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let agent = Agent::builder().listen(any).start().expect("an agent");
    let shape = Shape { layers: 1, blocks: 8, heads: 1, rows: 4, content: 8, kernel_blocks: 1 };
    let len = shape.bytes().expect("small");
    let memory = agent.allocate(len as usize, Access::READ).expect("memory");
    let heads = Heads::shard(1, 0, 1).expect("one head");
    let layout = layout(memory.id(), heads, &shape, Packing::Lbhnc);
    let (announce, limits) = (Announce::Chunks, Limits::default());
    let config = WorkerConfig { rank: 0, model: Model::default(), announce, limits };
    let look_up = look_up(&agent);
    let worker =
        Worker::start_with(&agent, layout, &[memory], config, look_up).expect("a worker half");
    let ranks = vec![worker.rank_metadata().to_vec().into()];
    let engine = Some(EngineMetadata { id: EngineId(engine), ranks });
    apply(&worker, ConnectorMetadata { engine, ..ConnectorMetadata::default() });
    (worker, agent)
}

fn apply(worker: &Worker, metadata: ConnectorMetadata) {
    worker.apply(&metadata.encode()).expect("valid metadata");
}

fn id(request: &str) -> HandoffId {
    HandoffId::new(request).expect("short")
}

fn fetch(worker: &Worker, request: &str, address: &str) {
    let fetch = FetchRequest {
        request: request.to_owned(),
        transfer: id(request),
        address: address.to_owned(),
        engine: None,
        tokens: (0, BLOCK_TOKENS),
        blocks: vec![BlockTable::new(0, vec![0])],
        budget_ms: BUDGET_MS,
    };
    apply(worker, ConnectorMetadata { fetches: vec![fetch], ..ConnectorMetadata::default() });
    worker.fetch();
}

fn offer(worker: &Worker, request: &str) {
    let offer = Offer { transfer: id(request), tokens: BLOCK_TOKENS, eager: true };
    let compute = Compute {
        request: request.to_owned(),
        offer: Some(offer),
        until: BLOCK_TOKENS,
        blocks: vec![BlockTable::new(0, vec![0])],
    };
    apply(worker, ConnectorMetadata { computes: vec![compute], ..ConnectorMetadata::default() });
    worker.step_computed(None);
}

/// Passes the outcome of the next fetch on, or fails: the worker's lock may be held for ever.
fn outcome(worker: &Arc<Worker>) -> (String, bool) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let worker = Arc::clone(worker);
    std::thread::spawn(move || {
        while !worker.wait(Duration::from_secs(1)) {}
        let reports = worker.reports();
        drop(sender.send((reports.received[0].clone(), reports.failed.is_empty())));
    });
    receiver.recv_timeout(Duration::from_secs(20)).expect("a fetch ends")
}

#[test]
fn a_name_lookup_that_hangs_holds_up_only_the_requests_that_wait_for_it() {
    let _bound = kvferry_testkit::Watchdog::new(Duration::from_secs(120));
    let agents_peer = |agent: &Agent| -> LookUp {
        let agent = agent.clone();
        Arc::new(move |name| agent.peer(name))
    };
    let (producer, p) = start(1, agents_peer);
    let address = p.advertised().replace("127.0.0.1", "localhost");
    let released = Arc::new((Mutex::new(false), Condvar::new()));
    let gate = Arc::clone(&released);
    let lookups = AtomicU32::new(0);
    let (consumer, _d) = start(2, |agent| {
        let agent = agent.clone();
        Arc::new(move |name: &str| -> kvferry::Result<Peer> {
            // The name of the producer is found once. All other lookups hang.
            let is_first =
                || name.contains("localhost") && lookups.fetch_add(1, Ordering::Relaxed) == 0;
            if is_literal(name) || is_first() {
                return agent.peer(name);
            }
            let state = gate.0.lock().expect("no panic");
            drop(gate.1.wait_while(state, |released| !*released).expect("no panic"));
            agent.peer("no address")
        })
    });
    let consumer = Arc::new(consumer);
    for request in ["first", "second"] {
        fetch(&consumer, "hangs", "nowhere.invalid:1");
        offer(&producer, request);
        fetch(&consumer, request, &address);
        assert_eq!(outcome(&consumer), (request.to_owned(), true));
        *released.0.lock().expect("no panic") = true;
        released.1.notify_all();
        assert_eq!(outcome(&consumer), ("hangs".to_owned(), false));
        *released.0.lock().expect("no panic") = false;
    }
}
