//! A peer that says of itself what it likes, and does nothing but exchange messages.

use kvferry::Incarnation;
use kvferry_connector::HandoffId;
use kvferry_proto::handoff::HandoffMessage;
use kvferry_proto::rank_message::RankMessage;
use kvferry_proto::{MAGIC, Session, SessionConfig, SessionEvent, SessionId, Timestamp, WireCode};
use kvferry_testkit::{PATIENCE, eventually};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The kind of request that carries a message.
const MESSAGE: u16 = 5;

#[derive(Default)]
struct Shared {
    heard: Mutex<Vec<RankMessage>>,
    acknowledged: AtomicUsize,
    is_over: AtomicBool,
    /// The session ends as one that gave its place to another one.
    is_displaced: AtomicBool,
}

/// Ends its session when it is dropped.
pub(crate) struct Claimant {
    says: Sender<Vec<u8>>,
    said: AtomicUsize,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Where it listens; empty if it has called.
    pub(crate) address: String,
}

impl Claimant {
    /// Opens a session with an agent as the peer of this incarnation. The agent knows of it when this returns.
    pub(crate) fn call(address: &str, claimed: Incarnation) -> Self {
        let socket = TcpStream::connect(address).expect("the agent listens");
        let session = Session::initiator(config(claimed), None, nonce(), clock());
        let mut once = Some((session, socket));
        let claimant = Self::start(String::new(), move |_| once.take());
        let nothing = kvferry_proto::handoff::Expected { id: id("nothing") };
        claimant.say(HandoffMessage::from(nothing).encode());
        claimant
    }

    /// Accepts sessions, one after another, as the peer of this incarnation.
    pub(crate) fn listen(claimed: Incarnation) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        listener.set_nonblocking(true).expect("a socket");
        let mut sessions = 0;
        Self::start(address, move |shared| {
            let mut socket = loop {
                match listener.accept() {
                    Ok((socket, _)) => break socket,
                    Err(_) if shared.is_over.load(Ordering::Relaxed) => return None,
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            };
            socket.set_nonblocking(false).expect("a socket");
            let mut magic = [0; MAGIC.len()];
            socket.read_exact(&mut magic).expect("the magic");
            sessions += 1;
            Some((
                Session::acceptor(config(claimed), SessionId(sessions), nonce(), clock()),
                socket,
            ))
        })
    }

    fn start(
        address: String,
        mut begin: impl FnMut(&Shared) -> Option<(Session, TcpStream)> + Send + 'static,
    ) -> Self {
        let (says, to_say) = channel();
        let shared = Arc::new(Shared::default());
        let with = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while let Some((session, socket)) = begin(&with) {
                run(session, socket, &to_say, &with);
            }
        });
        Self { says, said: AtomicUsize::new(0), shared, thread: Some(thread), address }
    }

    /// Ends the session as a full agent does, for a newer one.
    pub(crate) fn displace(&self) {
        self.shared.is_displaced.store(true, Ordering::Relaxed);
    }

    /// Sends a message. Returns when the agent has handled it.
    pub(crate) fn say(&self, message: Vec<u8>) {
        self.says.send(message).expect("its thread runs");
        let said = 1 + self.said.fetch_add(1, Ordering::Relaxed);
        eventually("a message is acknowledged", || {
            self.shared.acknowledged.load(Ordering::Acquire) == said
        });
    }

    /// The messages of handoffs that it has got.
    pub(crate) fn heard(&self) -> Vec<HandoffMessage> {
        let heard = self.shared.heard.lock().expect("no panic");
        let handoffs = heard.iter().filter_map(|message| match message {
            RankMessage::Handoff(message) => Some(message.clone()),
            _ => None,
        });
        handoffs.collect()
    }

    /// Whether it was told what a producer has.
    pub(crate) fn was_told(&self) -> bool {
        use HandoffMessage::{Expected, Offer, Ready};
        self.heard().iter().any(|it| matches!(it, Offer(_) | Ready(_) | Expected(_)))
    }
}

impl Drop for Claimant {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("a claimant panicked");
        }
    }
}

fn run(mut session: Session, mut socket: TcpStream, to_say: &Receiver<Vec<u8>>, shared: &Shared) {
    socket.set_read_timeout(Some(Duration::from_millis(2))).expect("a socket");
    let mut buffer = [0; 4096];
    let mut is_established = false;
    while !shared.is_over.load(Ordering::Relaxed) {
        if shared.is_displaced.swap(false, Ordering::Relaxed) {
            session.close(WireCode::Busy, "the place of an idle session is needed", clock());
        }
        if is_established {
            for message in to_say.try_iter() {
                session.request(MESSAGE, message, Duration::from_secs(3600), clock());
            }
        }
        while let Some(bytes) = session.poll_transmit() {
            if socket.write_all(&bytes).is_err() {
                session.transport_closed(clock());
            }
        }
        while let Some(event) = session.poll_event() {
            match event {
                SessionEvent::Established(_) => is_established = true,
                SessionEvent::Request { id, kind, body } => {
                    if kind == MESSAGE {
                        let message = RankMessage::decode(&body).expect("an honest message");
                        shared.heard.lock().expect("no panic").push(message);
                    }
                    session.respond(id, WireCode::Ok, Vec::new());
                }
                SessionEvent::Response { code, .. } if code.is_ok() => {
                    shared.acknowledged.fetch_add(1, Ordering::Release);
                }
                SessionEvent::Closed(_) => return,
                _ => {}
            }
        }
        match socket.read(&mut buffer) {
            Ok(0) => session.transport_closed(clock()),
            Ok(n) => session.receive(&buffer[..n], clock()),
            Err(_) => session.handle_timeout(clock()),
        }
    }
}

/// Settings of a session that ends by no silence.
fn config(claimed: Incarnation) -> SessionConfig {
    let config = SessionConfig::new(claimed, "claimant");
    SessionConfig { handshake_timeout: PATIENCE, silence: PATIENCE, ..config }
}

fn id(name: &str) -> HandoffId {
    HandoffId::new(name).expect("short")
}

fn clock() -> Timestamp {
    use std::sync::OnceLock;
    static START: OnceLock<Instant> = OnceLock::new();
    let since = START.get_or_init(Instant::now).elapsed();
    Timestamp::from_nanos(1 + since.as_nanos() as u64)
}

fn nonce() -> [u8; 32] {
    let mut nonce = [0; 32];
    fastrand::fill(&mut nonce);
    nonce
}
