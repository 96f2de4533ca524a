//! A stock Mooncake peer, written from the protocol's description: blocking, a thread per
//! connection, one request at a time. [`Behaviour`] makes it slow or faulty.

use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The address of the fake's memory on the wire.
pub(crate) const BASE: u64 = 0x10_0000;

const STATUS_OK: u64 = 0x4d43_5456_0000_0000;
const STATUS_REJECTED: u64 = STATUS_OK | 1;

/// The behaviour of a fake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Behaviour {
    /// The protocol version that it announces and serves.
    pub(crate) version: u32,
    /// Requests that it reads before it answers the first.
    pub(crate) answers_after: usize,
    /// It sends and receives a few bytes at a time.
    pub(crate) sends_pieces: bool,
    /// It sends this instead of its first status.
    pub(crate) false_status: Option<u64>,
    /// It stops answering after so many requests.
    pub(crate) stalls_after: usize,
    /// It closes its connections after so many requests.
    pub(crate) closes_after: usize,
    /// The data host that it announces.
    pub(crate) data_host: &'static str,
    /// The fake peer answers notifications when the test says so.
    pub(crate) holds_notes: bool,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            version: 2,
            answers_after: 1,
            sends_pieces: false,
            false_status: None,
            stalls_after: usize::MAX,
            closes_after: usize::MAX,
            data_host: "127.0.0.1",
            holds_notes: false,
        }
    }
}

#[derive(Debug)]
struct Shared {
    behaviour: Behaviour,
    memory: Mutex<Vec<u8>>,
    notified: Mutex<Vec<(String, String)>>,
    connections: AtomicUsize,
    requests: AtomicUsize,
    gone: AtomicBool,
    /// Whether notifications that are held get an answer, once the test has said so.
    note_answers: (Mutex<Option<bool>>, Condvar),
    streams: Mutex<Vec<TcpStream>>,
    data_port: u16,
}

/// A fake stock peer; dropping it stops it.
#[derive(Debug)]
pub(crate) struct Fake {
    shared: Arc<Shared>,
    address: SocketAddr,
    /// The threads that accept handshakes and data connections.
    acceptors: Vec<JoinHandle<()>>,
}

impl Fake {
    pub(crate) fn start(memory: usize, behaviour: Behaviour) -> Self {
        Self::start_at("127.0.0.1:0", memory, behaviour)
    }

    pub(crate) fn start_at(at: &str, memory: usize, behaviour: Behaviour) -> Self {
        let handshake = TcpListener::bind(at).expect("the port is free");
        let data = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = handshake.local_addr().expect("bound");
        let shared = Arc::new(Shared {
            behaviour,
            memory: Mutex::new(vec![0; memory]),
            notified: Mutex::default(),
            connections: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            gone: AtomicBool::new(false),
            note_answers: Default::default(),
            streams: Mutex::default(),
            data_port: data.local_addr().expect("bound").port(),
        });
        let handshakes =
            serve(handshake, Arc::clone(&shared), |shared, stream| shared.handshake(stream));
        let connections = serve(data, Arc::clone(&shared), |shared, stream| {
            shared.connections.fetch_add(1, Ordering::SeqCst);
            let (clone, id) =
                (stream.try_clone().expect("descriptors are there"), stream.peer_addr());
            let streams = || shared.streams.lock().expect("no panic");
            streams().push(clone);
            // The client may have closed the connection.
            let _ = shared.serve(stream);
            streams().retain(|s| s.peer_addr().ok() != id.as_ref().ok().copied());
        });
        Self { shared, address, acceptors: vec![handshakes, connections] }
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn memory(&self) -> Vec<u8> {
        self.shared.memory.lock().expect("no panic").clone()
    }

    pub(crate) fn fill(&self, bytes: &[u8]) {
        self.shared.memory.lock().expect("no panic")[..bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn notified(&self) -> Vec<(String, String)> {
        self.shared.notified.lock().expect("no panic").clone()
    }

    /// Answers the notifications that it holds, or closes their connections.
    pub(crate) fn end_notes(&self, answers: bool) {
        let (end, changed) = &self.shared.note_answers;
        *end.lock().expect("no panic") = Some(answers);
        changed.notify_all();
    }

    /// Requests whose heads it has read.
    pub(crate) fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Data connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Ends every data connection, as a process that is killed does.
    pub(crate) fn cut(&self) {
        for stream in self.shared.streams.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.gone.store(true, Ordering::SeqCst);
        self.end_notes(false);
        self.cut();
        // Wake the acceptors, which block in `accept`, so that they end.
        let data = SocketAddr::from(([127, 0, 0, 1], self.shared.data_port));
        for address in [self.address, data] {
            let _ = TcpStream::connect(address);
        }
        // The ports are free then. A panic of theirs has failed the test.
        self.acceptors.drain(..).for_each(|it| drop(it.join()));
    }
}

fn serve(
    listener: TcpListener,
    shared: Arc<Shared>,
    each: fn(&Shared, TcpStream),
) -> JoinHandle<()> {
    thread::spawn(move || {
        for stream in listener.incoming() {
            if shared.gone.load(Ordering::SeqCst) {
                return;
            }
            let shared = Arc::clone(&shared);
            let stream = stream.expect("a connection");
            thread::spawn(move || each(&shared, stream));
        }
    })
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

impl Shared {
    fn handshake(&self, stream: TcpStream) {
        crate::wire::answer(stream, |kind, json| {
            Some(match kind {
                1 => self.descriptor(),
                2 => {
                    let json: Value = serde_json::from_str(json).expect("JSON");
                    let text = |key: &str| json[key].as_str().expect("text").to_owned();
                    let said = (text("name"), text("notify_msg"));
                    self.notified.lock().expect("no panic").push(said);
                    if self.behaviour.holds_notes {
                        let (end, changed) = &self.note_answers;
                        let end = end.lock().expect("no panic");
                        let end = changed.wait_while(end, |end| end.is_none()).expect("no panic");
                        (*end == Some(true)).then_some(())?;
                    }
                    json!({"name": "", "notify_msg": "success"})
                }
                3 => json!({"status": "success"}),
                other => panic!("a handshake of type {other}"),
            })
        });
    }

    fn descriptor(&self) -> Value {
        let len = self.memory.lock().expect("no panic").len();
        let mut json = json!({
            "name": "fake:1", "protocol": "tcp", "tcp_data_host": self.behaviour.data_host,
            "tcp_data_port": self.data_port, "rdma_server_name": "", "timestamp": "now",
            "buffers": [{"name": "fake:1", "addr": BASE, "length": len}],
        });
        if self.behaviour.version >= 2 {
            json["tcp_proto_version"] = self.behaviour.version.into();
        }
        json
    }

    fn serve(&self, mut stream: TcpStream) -> io::Result<()> {
        let _ = stream.set_nodelay(true);
        let mut held = Vec::new();
        let mut taken = 0;
        let mut false_status = self.behaviour.false_status;
        loop {
            let mut head = [0; 24];
            self.take(&mut stream, &mut head)?;
            taken += 1;
            let requests = self.requests.fetch_add(1, Ordering::SeqCst) + 1;
            if requests > self.behaviour.stalls_after {
                thread::sleep(Duration::from_secs(60));
            }
            if requests > self.behaviour.closes_after {
                return Ok(());
            }
            let (size, addr, opcode) = (word(&head[..8]), word(&head[8..16]), head[16]);
            let status = self.behaviour.version >= 2 && opcode & 0x80 != 0;
            let range = self.range(addr, size);
            let ok = if range.is_some() { STATUS_OK } else { STATUS_REJECTED };
            if status {
                held.extend_from_slice(&false_status.take().unwrap_or(ok).to_le_bytes());
            }
            let Some(range) = range else {
                stream.write_all(&held)?;
                return Ok(());
            };
            if opcode & 1 == 1 {
                // Like the real one, it sends the status when the payload is in place.
                let mut payload = vec![0; range.len()];
                let early = if status { held.split_off(held.len() - 8) } else { Vec::new() };
                self.take(&mut stream, &mut payload)?;
                held.extend_from_slice(&early);
                self.memory.lock().expect("no panic")[range].copy_from_slice(&payload);
            } else {
                held.extend_from_slice(&self.memory.lock().expect("no panic")[range]);
            }
            if taken >= self.behaviour.answers_after {
                self.give(&mut stream, &held)?;
                held.clear();
            }
        }
    }

    fn range(&self, addr: u64, size: u64) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(addr.checked_sub(BASE)?).ok()?;
        let end = start.checked_add(usize::try_from(size).ok()?)?;
        (end <= self.memory.lock().expect("no panic").len()).then_some(start..end)
    }

    fn take(&self, stream: &mut TcpStream, into: &mut [u8]) -> io::Result<()> {
        if !self.behaviour.sends_pieces {
            return stream.read_exact(into);
        }
        into.chunks_mut(1000).try_for_each(|part| stream.read_exact(part))
    }

    fn give(&self, stream: &mut TcpStream, from: &[u8]) -> io::Result<()> {
        if !self.behaviour.sends_pieces {
            return stream.write_all(from);
        }
        from.chunks(5).try_for_each(|part| {
            stream.write_all(part)?;
            thread::sleep(Duration::from_micros(50));
            Ok(())
        })
    }
}
