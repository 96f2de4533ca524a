//! Secrets: right, wrong or missing, on either side.

use super::*;

const RIGHT: &str = "correct horse battery staple";
const WRONG: &str = "incorrect donkey";

fn with_secret(secret: Option<&str>) -> Agent {
    let mut builder = Agent::builder().name("caller").silence(NEVER);
    if let Some(secret) = secret {
        builder = builder.secret(secret.as_bytes());
    }
    builder.start().expect("an agent")
}

fn called(secret: Option<&str>) -> (Child, String) {
    let mut config = peer_config();
    if let Some(secret) = secret {
        config["secret"] = json!(secret);
    }
    Child::with_agent(config)
}

#[test]
fn a_wrong_or_missing_secret_is_a_clear_error_on_both_sides() {
    let _bound = bounded();
    let cases = [
        (None, None, None),
        (Some(RIGHT), Some(RIGHT), None),
        (Some(WRONG), Some(RIGHT), Some(ErrorKind::AuthFailed)),
        (None, Some(RIGHT), Some(ErrorKind::AuthRequired)),
        (Some(RIGHT), None, Some(ErrorKind::AuthUnsupported)),
    ];
    for (ours, theirs, refused) in cases {
        let (agent, (mut child, address)) = (with_secret(ours), called(theirs));
        let region = child.allocate(64 * KIB, "rw", 2);
        let from = source(&agent, 64 * KIB, 1);
        let peer = agent.peer(&address).expect("an address");
        let moves = batch(&from, &region.remote, 4096);
        let what = format!("caller has {}, called has {}", ours.is_some(), theirs.is_some());
        let Some(kind) = refused else {
            peer.write(&moves, &Options::default()).unwrap_or_else(|e| panic!("{what}: {e:?}"));
            let summary = peer.connect(PATIENCE).expect("connected");
            assert_eq!(summary.authenticated, ours.is_some(), "{what}");
            continue;
        };
        let before = child.memory(&region);
        for _ in 0..3 {
            for outcome in [
                peer.write(&moves, &Options::default()).map(drop),
                peer.read(&moves, &Options::default()).map(drop),
                peer.connect(PATIENCE).map(drop),
                peer.regions(PATIENCE).map(drop),
            ] {
                let error = outcome.expect_err(&what);
                assert_eq!(error.kind(), kind, "{what}: {error:?}");
                let text = format!("{error} {error:?}");
                assert!(!text.contains(RIGHT) && !text.contains(WRONG), "{what}: {text}");
            }
        }
        assert!(child.memory(&region) == before, "{what}: memory was written");
        let stats = child.stats();
        assert!(stats["handshakes_failed"].as_u64() >= Some(1), "{what}: {stats}");
        assert_eq!(stats["sessions"], 0, "{what}");
        // The same from the other side.
        let theirs = child
            .try_call(json!({"op": "connect", "peer": agent.advertised(), "timeout_ms": 60_000}));
        let mirrored = match kind {
            ErrorKind::AuthRequired => ErrorKind::AuthUnsupported,
            ErrorKind::AuthUnsupported => ErrorKind::AuthRequired,
            other => other,
        };
        let refusal = theirs.expect_err(&what);
        assert_eq!(refusal.kind, mirrored.as_str(), "{what}, the other way: {refusal:?}");
        assert!(agent.stats().handshakes_failed >= 1, "{what}: {:?}", agent.stats());
    }
}

#[test]
fn connections_with_a_wrong_secret_do_not_delay_the_right_one() {
    let _bound = bounded();
    let (mut child, address) = called(Some(RIGHT));
    let region = child.allocate(64 * KIB, "w", 2);
    let wrong = with_secret(Some(WRONG));
    let wrong = wrong.peer(&address).expect("an address");
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..50 {
                drop(wrong.connect(Duration::from_secs(1)));
            }
        });
        for _ in 0..5 {
            let right = with_secret(Some(RIGHT));
            let from = source(&right, 64 * KIB, 1);
            let peer = right.peer(&address).expect("an address");
            peer.write(&batch(&from, &region.remote, 4096), &Options::default())
                .expect("the right secret");
        }
    });
}
