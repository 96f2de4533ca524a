//! What an agent with the transport leaves behind. A second transport sees the agent from within.

use kvferry::transport::{Core, Directory, Service, Start, Startup, Transport, link};
use kvferry::{
    Access, Agent, Batch, Capabilities, Fence, Options, Result, TransportKind, Transports,
};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// A transport that moves nothing, and remembers the agents that it was started with.
struct Witness;

/// An agent's state and its sessions.
type Seen = (Weak<Core>, Weak<dyn Directory>);

static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

impl Transport for Witness {
    fn kind(&self) -> TransportKind {
        TransportKind::new("witness")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Fence::Local, Fence::Local)
    }
}

impl Start for Witness {
    fn is_native(&self) -> bool {
        false
    }

    fn start(&self, cx: &Startup<'_>) -> Result<Arc<dyn Service>> {
        let seen = (Arc::downgrade(cx.core), Arc::downgrade(cx.directory));
        SEEN.lock().expect("no panic").push(seen);
        Ok(Arc::new(Self))
    }
}

impl Service for Witness {}

#[test]
fn an_agent_that_was_dropped_leaves_nothing_behind() {
    kvferry_mooncake::link();
    link(&Witness);
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = silent.local_addr().expect("bound").to_string();
    for names in ["mooncake,witness", "all"] {
        let start = |names: &str| {
            let transports = Transports::parse(names).expect("linked");
            Agent::builder()
                .transports(transports)
                .setting("mooncake", true)
                .silence(Duration::from_secs(60))
                .start()
                .expect("an agent")
        };
        let (near, far) = (start(names), start("all"));
        let from = near.allocate(4096, Access::NONE).expect("memory");
        let _to = far.allocate(4096, Access::WRITE).expect("memory");
        let peer = near.peer(far.advertised()).expect("an address");
        let remote = peer.regions(None).expect("a list").remove(0);
        let mut batch = Batch::new();
        batch.push(&from, 0, &remote, 0, 4096).expect("inside");
        peer.write(&batch, &Options::default()).expect("a healthy write");
        let unanswered = near.peer(&silent).expect("an address");
        let waits = unanswered.write_async(&batch, &Options::default());
        drop((near, far));
        assert!(waits.outcome().is_some(), "{names}: the search ended with the agent");
        drop((peer, unanswered, waits, from, _to));
        let seen = std::mem::take(&mut *SEEN.lock().expect("no panic"));
        assert_eq!(seen.len(), 2, "{names}: both agents were seen");
        for (core, sessions) in seen {
            assert!(sessions.upgrade().is_none(), "{names}: sessions are left");
            assert!(core.upgrade().is_none(), "{names}: the core is left");
        }
    }
}
