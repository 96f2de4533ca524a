//! Engines that refuse each other, fetches that fail, and halves that close.

use super::*;

/// An event of a lost device.
struct Lost;

impl ComputeEvent for Lost {
    fn is_ready(&self) -> bool {
        false
    }

    fn wait(&self, _: &dyn Fn() -> bool) {}

    fn failure(&self) -> Option<String> {
        Some("the device is lost".to_owned())
    }
}

#[test]
fn a_step_whose_event_never_happens_is_withdrawn_with_the_reason() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    d.fetch_request("a", &p.address, &here, 0..32);
    p.apply(&ConnectorMetadata { computes: vec![compute("a", &there)], ..metadata() });
    p.ranks[0].worker.step_computed(Some(Box::new(Lost)));
    let (code, detail) = d.fetched("a").remove(0);
    assert_eq!(code, WireCode::Internal);
    assert!(detail.contains("the device is lost"), "{detail}");
    assert!(!d.ranks[0].has(1, &here, 0, 0));
    d.assert_idle();
}

#[test]
fn a_fetch_whose_order_is_not_known_fails_and_frees_its_producer() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    p.compute("a", 1, &there, 0..32);
    p.hold("a");
    let fetches = vec![fetch("a", &p.address, &here, 0..32)];
    let step = ConnectorMetadata { fetches, ..metadata() }.encode();
    let worker = &d.ranks[0].worker;
    worker.apply_after(&step, || Err("the stream is in a capture".to_owned())).expect("valid");
    d.fetch();
    let (code, detail) = d.fetched("a").remove(0);
    assert_eq!((code, &detail[..]), (WireCode::Internal, "the stream is in a capture"));
    p.assert_sent("a");
    assert!(!d.ranks[0].has(1, &here, 0, 0));
    // A step without fetches needs no order.
    worker.apply_after(&metadata().encode(), || panic!("it has no fetches")).expect("valid");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn engines_with_different_layouts_refuse_each_other_with_both_numbers() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 2), "tcp", b"");
    let d = Engine::new(Build { content: CONTENT * 2, ..Build::new(2, 1) }, "tcp", b"");
    p.compute("a", 1, &blocks(8, 1), 0..32);
    p.hold("a");
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    let failed = d.fetched("a");
    assert_eq!(failed[0].0, WireCode::LayoutMismatch);
    assert!(failed[0].1.contains("32") && failed[0].1.contains("64"), "{}", failed[0].1);
    // All ranks of the producer free the blocks at once, not by a timer.
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn engines_with_different_models_refuse_each_other_and_the_producer_frees_its_blocks() {
    let _bounded = bounded();
    let other = Build::new(2, 1);
    // Values of 2 bytes each, so that the layouts do not differ.
    let others = [
        (Build { model: "mistral", ..other }, "llama", "mistral"),
        (Build { dtype: "float16", ..other }, "bfloat16", "float16"),
    ];
    for (other, own, theirs) in others {
        let p = Engine::new(Build::new(1, 2), "tcp", b"");
        let d = Engine::new(other, "tcp", b"");
        p.compute("a", 1, &blocks(8, 1), 0..32);
        p.hold("a");
        d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
        let failed = d.fetched("a");
        assert_eq!(failed[0].0, WireCode::ModelMismatch);
        assert!(failed[0].1.contains(own) && failed[0].1.contains(theirs), "{failed:?}");
        p.assert_sent("a");
        p.assert_idle();
        d.assert_idle();
    }
}

#[test]
fn a_bad_engine_card_is_reported_after_restarts_and_endings_were_carried_out() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 1), "tcp", b"");
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    let card = p.ranks[0].worker.rank_metadata().to_vec();
    let bad = [vec![b"nonsense".to_vec().into()], vec![card.clone().into(), card.into()]];
    for (request, ranks) in ["a", "b"].into_iter().zip(bad) {
        d.fetch_request(request, &p.address, &blocks(8, 5), 0..32);
        p.compute(request, 1, &blocks(8, 1), 0..12);
        let (code, detail) = (WireCode::Cancelled, "the client left".to_owned());
        let how = EndingKind::Withdrawn { code, detail, held: false };
        let ending = Ending { request: request.to_owned(), transfer: id(request), how };
        let engine = Some(EngineMetadata { id: EngineId(1), ranks });
        let metadata = ConnectorMetadata { engine, endings: vec![ending], ..metadata() };
        let error = p.ranks[0].worker.apply(&metadata.encode()).expect_err("a bad card");
        assert!(matches!(error, WorkerError::Engine(_)), "{error}");
        assert_eq!(d.fetched(request)[0].0, WireCode::Cancelled);
    }
    p.assert_idle();
}

#[test]
fn a_closed_worker_half_has_ended_all_fetches_and_its_memory_is_read_by_no_peer() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    p.compute("a", 1, &blocks(8, 1), 0..12);
    std::thread::scope(|scope| {
        // Each call returns only when all is over.
        for _ in 0..2 {
            scope.spawn(|| {
                d.ranks[0].worker.close();
                assert!(!d.ranks[0].memory.region().is_registered());
            });
        }
    });
    assert_eq!(d.fetched("a")[0].0, WireCode::Shutdown);
    d.fetch_request("b", &p.address, &blocks(8, 5), 0..32);
    assert_eq!(d.fetched("b")[0].0, WireCode::Shutdown);
    p.ranks[0].worker.close();
    p.ranks[0].worker.close();
    assert!(!p.ranks[0].memory.region().is_registered());
}

/// An event that never happens. Its end is counted.
struct Never(Arc<AtomicUsize>);

impl ComputeEvent for Never {
    fn is_ready(&self) -> bool {
        false
    }

    fn wait(&self, is_over: &dyn Fn() -> bool) {
        while !is_over() {
            std::thread::yield_now();
        }
    }
}

impl Drop for Never {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_closed_worker_half_waits_for_no_event() {
    let _bounded = bounded();
    let (p, _d) = two_engines();
    let ended = Arc::new(AtomicUsize::new(0));
    for request in ["a", "b"] {
        let computes = vec![compute(request, &blocks(8, 1))];
        p.apply(&ConnectorMetadata { computes, ..metadata() });
        p.ranks[0].worker.step_computed(Some(Box::new(Never(Arc::clone(&ended)))));
    }
    p.ranks[0].worker.close();
    eventually("neither is waited for", || ended.load(Ordering::SeqCst) == 2);
}

#[test]
fn a_consumer_with_another_secret_fetches_nothing() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 1), "tcp", b"a secret");
    let d = Engine::new(Build::new(2, 1), "tcp", b"another");
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    let failed = d.fetched("a");
    assert_eq!(failed[0].0, WireCode::AuthFailed, "{}", failed[0].1);
    assert!(!format!("{failed:?}").contains("another"));
    d.assert_idle();
}

#[test]
fn a_fetch_from_a_wrong_address_or_another_incarnation_of_the_engine_fails_with_a_reason() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    for address in ["127.0.0.1:1", "no-such-host.invalid:99"] {
        d.fetch_request("a", address, &blocks(8, 5), 0..32);
        let failed = d.fetched("a");
        assert!(!failed[0].0.is_ok() && !failed[0].1.is_empty(), "{address}: {failed:?}");
    }
    let fetch = fetch("b", &p.address, &blocks(8, 5), 0..32);
    let fetches = vec![FetchRequest { engine: Some(EngineId(77)), ..fetch }];
    d.apply(&ConnectorMetadata { fetches, ..metadata() });
    d.fetch();
    assert_eq!(d.fetched("b")[0].0, WireCode::StaleIncarnation);
    d.assert_idle();
}

#[test]
fn a_fetch_that_no_producer_offers_ends_at_its_deadline_with_the_reason() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let fetch = fetch("a", &p.address, &blocks(8, 5), 0..32);
    let fetches = vec![FetchRequest { budget_ms: 300, ..fetch }];
    let began = Instant::now();
    d.apply(&ConnectorMetadata { fetches, ..metadata() });
    d.fetch();
    let (code, detail) = d.fetched("a").remove(0);
    assert_eq!(code, WireCode::Deadline, "{detail}");
    assert!(began.elapsed() >= Duration::from_millis(300) && !detail.is_empty(), "{detail}");
    d.assert_idle();
}

/// What the other ranks of its engine say of it stays wrong, however often it is learned.
#[test]
fn a_request_to_an_engine_one_rank_of_which_was_restarted_alone_fails() {
    let _bounded = bounded();
    let (port, both) = (KeptPort::new(), Build::new(1, 2));
    let at_port = Build { listen: String::leak(port.address().to_owned()), ..both };
    let (first, second) = (RankOf::new(both, 0, "tcp", b""), RankOf::new(at_port, 1, "tcp", b""));
    let cards = [&first, &second].map(|it| it.worker.rank_metadata().to_vec().into());
    let engine = EngineMetadata { id: EngineId(1), ranks: cards.to_vec() };
    let metadata = ConnectorMetadata { engine: Some(engine), ..metadata() };
    first.worker.apply(&metadata.encode()).expect("valid metadata");
    second.agent.shutdown();
    drop(second);
    let _second = RankOf::new(at_port, 1, "tcp", b"");
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    d.fetch_request("a", &first.address(), &blocks(8, 5), 0..32);
    let failed = d.fetched("a");
    assert_eq!(failed[0].0, WireCode::StaleIncarnation, "{failed:?}");
    d.assert_idle();
}

#[test]
fn a_fetch_that_is_cancelled_before_its_producer_is_known_frees_the_producer() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    p.compute("a", 1, &blocks(8, 1), 0..32);
    p.hold("a");
    let fetches = vec![fetch("a", &p.address, &blocks(8, 5), 0..32)];
    let cancel = Cancel {
        request: "a".to_owned(),
        code: WireCode::Cancelled,
        detail: "the client is gone".to_owned(),
    };
    d.apply(&ConnectorMetadata { fetches, cancels: vec![cancel], ..metadata() });
    d.fetch();
    let ended = d.fetched("a");
    assert_eq!(ended[0], (WireCode::Cancelled, "the client is gone".to_owned()));
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_handoff_that_is_not_needed_is_freed_on_all_ranks() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 4), "tcp", b"");
    let d = Engine::new(Build::new(2, 2), "tcp", b"");
    p.compute("a", 1, &blocks(8, 1), 0..32);
    p.hold("a");
    let free = Free {
        transfer: id("a"),
        address: p.address.parse().expect("an address"),
        engine: Some(EngineId(1)),
        code: WireCode::NotNeeded,
        budget_ms: BUDGET_MS,
    };
    d.apply(&ConnectorMetadata { frees: vec![free], ..metadata() });
    d.fetch();
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_fetch_fails_if_the_producer_has_too_few_tokens_or_a_null_block() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    p.compute("short", 1, &blocks(4, 1), 0..16);
    d.fetch_request("short", &p.address, &blocks(8, 5), 0..32);
    let failed = d.fetched("short");
    assert_eq!(failed[0].0, WireCode::LayoutMismatch);
    assert!(failed[0].1.contains("16 of 32"), "{}", failed[0].1);
    let mut holes = blocks(8, 1);
    holes[3] = NULL_BLOCK;
    p.apply(&ConnectorMetadata { computes: vec![compute("holes", &holes)], ..metadata() });
    p.ranks[0].worker.step_computed(None);
    d.fetch_request("holes", &p.address, &blocks(8, 5), 0..32);
    let failed = d.fetched("holes");
    assert_eq!(failed[0].0, WireCode::LayoutMismatch);
    assert!(failed[0].1.contains("block 3"), "{}", failed[0].1);
    for request in ["short", "holes"] {
        p.hold(request);
        p.assert_sent(request);
    }
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn an_observer_gets_every_byte_read_and_each_end_once() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 1), "local,tcp", b"");
    let d = Engine::new(Build::new(2, 1), "local,tcp", b"");
    let (ours, theirs) = (Arc::new(Calls::default()), Arc::new(Calls::default()));
    d.ranks[0].worker.set_observer(ours.clone());
    p.ranks[0].worker.set_observer(theirs.clone());
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    let began = Instant::now();
    d.fetch_request("a", &p.address, &here, 0..32);
    p.compute("a", 1, &there, 0..20);
    p.compute("a", 1, &there, 20..32);
    d.assert_fetched("a");
    p.hold("a");
    p.assert_sent("a");
    assert_eq!(*ours.0.lock().expect("no panic"), [format!("a received, {}", WireCode::Ok)]);
    assert_eq!(*theirs.0.lock().expect("no panic"), ["a sent"]);
    let parts = ours.1.lock().expect("no panic");
    let bytes: u64 = parts.iter().map(|part| part.bytes).sum();
    assert_eq!(bytes, u64::from(32 * LAYERS * HEADS * CONTENT));
    for part in parts.iter() {
        assert!(began <= part.began && part.began <= part.ended && part.ended <= Instant::now());
    }
    // It gets failures, too.
    d.fetch_request("b", "127.0.0.1:1", &here, 0..32);
    let (code, _) = d.fetched("b").remove(0);
    let calls = ours.0.lock().expect("no panic");
    assert_eq!(calls[1..], [format!("b received, {code}")]);
}

#[test]
fn dropping_a_worker_half_ends_its_handoffs_on_the_other_side() {
    let _bounded = bounded();
    let (mut p, mut d) = two_engines();
    // A producer; its agent stays.
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    p.compute("a", 1, &blocks(8, 1), 0..12);
    await_consumer(&p);
    let gone = p.ranks.pop().expect("a rank");
    let memory = gone.memory.region().clone();
    drop(gone);
    assert_eq!(d.fetched("a")[0].0, WireCode::Shutdown);
    d.assert_idle();
    drop(memory);
    // A consumer.
    let p = Engine::new(Build::new(3, 1), "tcp", b"");
    p.compute("b", 1, &blocks(8, 1), 0..16);
    d.fetch_request("b", &p.address, &blocks(8, 5), 0..32);
    await_consumer(&p);
    drop(d.ranks.pop().expect("a rank"));
    let producer = &p.ranks[0].worker;
    assert!(producer.wait(PATIENCE / 2), "the producer never notices");
    let notes = producer.reports().notes.expect("the loss is noted");
    let lost = Notes::decode(&notes).expect("it was just encoded").lost;
    assert_eq!((lost[0].request.as_str(), lost[0].code), ("b", WireCode::Shutdown));
    // Only the request's end is missing.
    p.hold("b");
    p.assert_sent("b");
    p.assert_idle();
}

#[test]
fn a_fetch_from_a_producer_that_is_not_accepted_sends_nothing_and_fails() {
    let _bound = bounded();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let port = listener.local_addr().expect("an address").port();
    let producers = kvferry_connector::Producers::parse(&["10.0.0.0/8"]).expect("a network");
    let engine = Engine::new(Build::new(2, 1), "tcp", b"");
    let agent = Agent::builder().listen(SocketAddr::from(([127, 0, 0, 1], 0))).start().expect("it");
    let rank = &engine.ranks[0];
    let memory = agent.allocate(rank.memory.region().len(), Access::READ).expect("memory");
    let shape = Shape {
        layers: LAYERS,
        blocks: BLOCKS,
        heads: HEADS,
        rows: BLOCK_TOKENS,
        content: CONTENT,
        kernel_blocks: 1,
    };
    let heads = Heads::shard(HEADS, 0, 1).expect("divisible");
    let layout = layout(memory.id(), heads, &shape, Packing::Lbhnc);
    let config = WorkerConfig {
        rank: 0,
        model: model("llama"),
        announce: Announce::End,
        limits: Limits::default(),
        producers: Some(producers),
    };
    let worker = Worker::start(&agent, layout, &[memory], config).expect("it starts");
    for (at, address) in [
        format!("127.0.0.1:{port}"),
        format!("localhost:{port}"),
        format!("http://127.0.0.1:{port}"),
        format!("http://localhost:{port}"),
    ]
    .iter()
    .enumerate()
    {
        let request = format!("r{at}");
        let fetches = vec![fetch(&request, address, &[0], 0..4)];
        worker.apply(&ConnectorMetadata { fetches, ..metadata() }.encode()).expect("valid");
        worker.fetch();
        assert!(worker.wait(PATIENCE / 2), "{address} never ends");
        let notes = worker.reports().notes.expect("a fetch has ended");
        let ended = Notes::decode(&notes).expect("it was just encoded").fetched;
        assert_eq!(ended[0].code, WireCode::ForbiddenProducer, "{address}: {}", ended[0].detail);
    }
    assert!(listener.accept().is_err(), "the engine has connected");
}
