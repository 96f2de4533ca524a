//! Addresses of producers, and bootstrap servers.

use super::*;

#[test]
fn a_producer_that_is_named_in_many_spellings_has_one_session_and_one_engine() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let port = p.address.rsplit_once(':').expect("host:port").1;
    for n in 0..32 {
        let spellings = [
            format!("127.0.0.1:{}{port}", "0".repeat(n)),
            format!("[::ffff:127.0.0.1%{n}]:{port}"),
        ];
        for (way, address) in spellings.iter().enumerate() {
            let request = format!("{n}-{way}");
            p.compute(&request, 1, &blocks(8, 1), 0..32);
            d.fetch_request(&request, address, &blocks(8, 5), 0..32);
            d.assert_fetched(&request);
            p.hold(&request);
            p.assert_sent(&request);
        }
    }
    assert_eq!(p.ranks[0].agent.stats().sessions_accepted, 1);
    assert_eq!((gauge(&d, "peers"), gauge(&d, "engines")), (1, 1));
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn addresses_that_lead_to_one_producer_are_bounded_and_have_a_session_each() {
    let _bounded = bounded();
    let p = Engine::new(Build { listen: "0.0.0.0:0", ..Build::new(1, 1) }, "tcp", b"");
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    let port = p.address.rsplit_once(':').expect("host:port").1;
    for n in 1..=40 {
        let request = format!("r{n}");
        p.compute(&request, n, &blocks(8, 1), 0..32);
        d.fetch_request(&request, &format!("127.0.0.{n}:{port}"), &blocks(8, 5), 0..32);
        d.assert_fetched(&request);
        d.assert_has(n, &blocks(8, 5), 0..32);
        p.hold(&request);
        p.assert_sent(&request);
    }
    let sessions = || p.ranks[0].agent.stats().sessions;
    eventually("the sessions of forgotten addresses have ended", || sessions() <= 8);
    // At most eight addresses of the incarnation.
    assert!(gauge(&d, "peers") <= 8, "{:?}", d.ranks[0].worker.gauges());
    p.assert_idle();
    d.assert_idle();
}

/// How a fetch by a bootstrap server ends. It begins again if the answer took too long: a thread of this process may not run
/// for a while.
fn outcome(d: &Engine, request: &str, begin: impl Fn()) -> (WireCode, String) {
    loop {
        begin();
        let ended = d.fetched(request).remove(0);
        if !ended.1.contains("too long") {
            return ended;
        }
    }
}

#[test]
fn a_bootstrap_address_leads_to_the_engine_whose_id_the_request_names() {
    let _bounded = bounded();
    let (p, q) =
        (Engine::new(Build::new(1, 1), "tcp", b""), Engine::new(Build::new(3, 1), "tcp", b""));
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    // A name is looked up in a second step.
    let by_name = q.address.replace("127.0.0.1", "localhost");
    let both = http_server(vec![json_answer(&[(1, &p.address), (3, &by_name)])]);
    let one = http_server(vec![json_answer(&[(1, &p.address)])]);
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    let cases =
        [("a", &both, Some(1)), ("b", &both, Some(3)), ("c", &both, Some(3)), ("d", &one, None)];
    for (seed, (request, url, engine)) in (1..).zip(cases) {
        let producer = if engine == Some(3) { &q } else { &p };
        producer.compute(request, seed, &there, 0..32);
        let (code, detail) = outcome(&d, request, || {
            let fetch = fetch(request, url, &here, 0..32);
            let fetches = vec![FetchRequest { engine: engine.map(EngineId), ..fetch }];
            d.apply(&ConnectorMetadata { fetches, ..metadata() });
            d.fetch();
        });
        assert!(code.is_ok(), "{request}: {code}: {detail}");
        d.assert_has(seed, &here, 0..32);
        producer.hold(request);
        producer.assert_sent(request);
    }
    d.assert_idle();
}

#[test]
fn routers_may_send_the_id_of_an_engines_earlier_incarnation_to_decode() {
    let _bounded = bounded();
    let (old, new) =
        (Engine::new(Build::new(1, 1), "tcp", b""), Engine::new(Build::new(3, 1), "tcp", b""));
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    let answers = [&old.address, &new.address].into_iter().zip([1, 3]);
    let url = http_server(answers.map(|(address, id)| json_answer(&[(id, address)])).collect());
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    let hand_over = |producer: &Engine, request: &str, seed| {
        producer.compute(request, seed, &there, 0..32);
        let fetch = fetch(request, &url, &here, 0..32);
        let fetch = FetchRequest { engine: Some(EngineId(1)), ..fetch };
        let FetchRequest { request: id, transfer, address, engine, .. } = fetch.clone();
        let claims = vec![Claim { request: id, transfer, address, engine, tokens: 32 }];
        let (code, detail) = outcome(&d, request, || {
            d.apply(&ConnectorMetadata { claims: claims.clone(), ..metadata() });
            d.apply(&ConnectorMetadata { fetches: vec![fetch.clone()], ..metadata() });
            d.fetch();
        });
        assert!(code.is_ok(), "{request}: {code}: {detail}");
        d.assert_has(seed, &here, 0..32);
        producer.hold(request);
        producer.assert_sent(request);
    };
    hand_over(&old, "a", 1);
    drop(old);
    let engines = || d.ranks[0].worker.gauges().iter().find(|it| it.0 == "engines").map(|it| it.1);
    let until = Instant::now() + PATIENCE / 2;
    while engines() != Some(0) {
        assert!(Instant::now() < until, "the loss of the old engine is not noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    hand_over(&new, "b", 2);
    hand_over(&new, "c", 3);
}

#[test]
fn a_bootstrap_server_that_names_itself_is_asked_at_most_once_for_each_action() {
    let _bounded = bounded();
    let (_p, d) = two_engines();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let (answer, asked) = (json_answer(&[(7, &url)]), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a caller");
            let len = stream.read(&mut [0; 1024]).expect("a question");
            assert!(len > 0);
            count.fetch_add(1, Ordering::Relaxed);
            drop(stream.write_all(answer.as_bytes()));
        }
    });
    let asked = || asked.load(Ordering::Relaxed);

    let of = |request: &str| fetch(request, &url, &blocks(8, 5), 0..32);
    let begin = |fetches, cancels| {
        d.apply(&ConnectorMetadata { fetches, cancels, ..metadata() });
        d.fetch();
    };
    begin(vec![of("fetched")], Vec::new());
    let (code, why) = d.fetched("fetched").remove(0);
    assert!(code == WireCode::Malformed && why.contains("is not host:port"), "{code}: {why}");
    d.assert_idle();
    assert_eq!(asked(), 1);

    let (request, detail) = ("cancelled".to_owned(), String::new());
    let cancel = Cancel { request, code: WireCode::Cancelled, detail };
    begin(vec![of("cancelled")], vec![cancel]);
    assert_eq!(d.fetched("cancelled")[0].0, WireCode::Cancelled);
    d.assert_idle();
    // An answer serves what comes a moment later, too.
    assert!(asked() <= 2);

    d.claim("claimed", &url);
    d.assert_idle();
    let before = asked();
    assert!(before <= 3);

    begin(vec![FetchRequest { budget_ms: 0, ..of("late") }], Vec::new());
    let (code, why) = d.fetched("late").remove(0);
    assert!(matches!(code, WireCode::Deadline | WireCode::Malformed), "{code}: {why}");
    d.assert_idle();
    assert_eq!(asked(), before);
}

#[test]
fn a_bootstrap_server_that_is_of_no_use_is_named_with_what_was_wrong() {
    let _bounded = bounded();
    let (_p, d) = two_engines();
    let endless = format!("HTTP/1.0 200 OK\r\n\r\n{}", " ".repeat(2 << 20));
    let answers = [
        (json_answer(&[(7, "a:1"), (8, "b:1")]), None, "2 engines", WireCode::Malformed),
        (
            json_answer(&[(7, "a:1"), (8, "b:1")]),
            Some(1),
            "none of its 2 engines has the id 000",
            WireCode::StaleIncarnation,
        ),
        ("HTTP/1.0 404 Not Found\r\n\r\n".to_owned(), None, "404", WireCode::Malformed),
        (
            "HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n".to_owned(),
            None,
            "302",
            WireCode::Malformed,
        ),
        ("HTTP/1.0 200 OK\r\n\r\n[1]".to_owned(), None, "expected a map", WireCode::Malformed),
        ("SSH-2.0".to_owned(), None, "is not HTTP", WireCode::Malformed),
        (endless, None, "more than 1048576 bytes", WireCode::Closed),
        (json_answer(&[(7, "a b:1")]), None, "is not host:port", WireCode::Malformed),
        (json_answer(&[(7, &"a".repeat(300))]), None, "is not host:port", WireCode::Malformed),
    ];
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = (format!("http://{}", silent.local_addr().expect("bound")), silent);
    let servers = answers
        .into_iter()
        .map(|(answer, engine, what, code)| (http_server(vec![answer]), engine, what, code));
    let others = [
        ("http://127.0.0.1:1".to_owned(), None, "refused", WireCode::Closed),
        (silent.0.clone(), None, "too long", WireCode::Closed),
    ];
    for (url, engine, what, code) in servers.chain(others) {
        let begin = || {
            let fetch = fetch("a", &url, &blocks(8, 5), 0..32);
            let fetches = vec![FetchRequest { engine: engine.map(EngineId), ..fetch }];
            d.apply(&ConnectorMetadata { fetches, ..metadata() });
            d.fetch();
        };
        let (is, why) = if what == "too long" {
            begin();
            d.fetched("a").remove(0)
        } else {
            outcome(&d, "a", begin)
        };
        assert!(is == code && why.contains(&url) && why.contains(what), "{is}: {why}");
    }
    d.assert_idle();
}
