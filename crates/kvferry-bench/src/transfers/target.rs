//! The target side of a bench: owns the memory that is written and read, and serves a control
//! connection of the measuring side.

use kvferry_sys::sync::Mutex;
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvferry::{Access, Agent, Region};
use serde_json::Value;

use crate::child::{die_with_parent, hold, value};
use crate::failure::Failure;
use crate::lines::{Answer, Described, Lines};
use crate::machine::random;
use crate::{machine, units};

use super::floor::{self, CHUNKS, STREAMS_MAX};
use super::messages::{Ask, Challenge, Hello, Opened, PROOF, Program, Reach, Sizes};
use super::pages::Pages;
use super::placement::pin;
use super::tables::Pair;
use super::usage::Usage;
use super::{raw, verify};

/// Memory of an additional agent: enough for one small block.
const SPARE_BYTES: usize = 64 << 10;
const SPARES_MAX: usize = 64;

/// Time limit for a measuring side to prove itself.
const PROOF_TIMEOUT: Duration = Duration::from_secs(10);
const PROOFS_MAX: usize = 1024;

type Control = Lines<TcpStream, TcpStream>;

/// Runs the helper `target` on a free port of this host until the parent ends.
pub(crate) fn run_child(core: Option<usize>) -> Result<(), Failure> {
    die_with_parent()?;
    core.map_or(Ok(()), pin)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let target = Target::start(&listener)?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || target.serve(&listener));
    hold(address)
}

/// Serves benches of other hosts, one at a time, until the process ends: `kvferry bench transfers --serve`.
/// Says on standard error where it listens.
///
/// # Errors
/// [`Failure::Usage`] if it can't listen on `listen`.
pub fn serve(listen: SocketAddr) -> Result<(), Failure> {
    let listener = TcpListener::bind(listen)
        .map_err(|error| Failure::Usage(format!("cannot listen on {listen}: {error}")))?;
    let target = Target::start(&listener)?;
    let address = listener.local_addr()?;
    note(&format!(
        "serving benches on {address}, agent at {}; Ctrl-C ends it",
        target.agent.advertised()
    ));
    if !address.ip().is_loopback() && target.agent.config().secret.is_none() {
        note(
            "note: without KVFERRY_SECRET, every host that reaches this port may run benches here",
        );
    }
    target.serve(&listener);
    Ok(())
}

fn note(text: &str) {
    // Standard error may be closed.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// The process: one agent, one bench at a time.
#[derive(Debug)]
struct Target {
    agent: Agent,
    listens_on: IpAddr,
    proofs: Mutex<HashSet<u64>>,
    current: Mutex<Option<Current>>,
}

/// The bench that other connections may join.
#[derive(Debug, Clone)]
struct Current {
    token: u64,
    served: Arc<Served>,
}

/// Memory and settings of the plain programs.
#[derive(Debug)]
struct Served {
    /// Memory for each stream of the floor; everything else uses the first.
    memory: [Mutex<Pages>; STREAMS_MAX],
    /// Bytes of one call of the floor.
    chunk: AtomicUsize,
    /// Streams that share a table of the floor.
    streams: AtomicUsize,
}

impl Target {
    fn start(listener: &TcpListener) -> Result<Arc<Target>, Failure> {
        let listens_on = listener.local_addr()?.ip();
        let agent = start_agent("bench-target", listens_on)?;
        let (proofs, current) = Default::default();
        Ok(Arc::new(Target { agent, listens_on, proofs, current }))
    }

    /// One thread per connection: there are few, and threads that are measured must not share.
    fn serve(self: Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming().flatten() {
            let target = self.clone();
            std::thread::spawn(move || {
                if let Err(failure) = target.connection(stream) {
                    note(&format!("bench target: {failure}"));
                }
            });
        }
    }

    fn connection(&self, stream: TcpStream) -> Result<(), Failure> {
        floor::like_ours(&stream)?;
        let mut lines = Lines::new(stream.try_clone()?, stream);
        match lines.receive()? {
            None => Ok(()),
            Some(Hello::Control) => self.control(&mut lines),
            Some(Hello::Raw { token, own: None }) => {
                let served = self.join(token)?;
                Ok(raw::serve(welcome(lines)?, &served.memory[0])?)
            }
            Some(Hello::Raw { token, own: Some(bytes) }) => {
                self.join(token)?;
                let memory = Mutex::new(Pages::filled(2, bytes.min(raw::STREAM_BYTES)));
                Ok(raw::serve(welcome(lines)?, &memory)?)
            }
            Some(Hello::Floor { token, buffer, lane }) => {
                let served = self.join(token)?;
                let memory = served.memory.get(lane);
                let memory =
                    memory.ok_or_else(|| Failure::Usage(format!("no floor stream {lane}")))?;
                Ok(floor::serve(&welcome(lines)?, buffer, memory, &served.chunk)?)
            }
        }
    }

    fn join(&self, token: u64) -> Result<Arc<Served>, Failure> {
        let current = self.current.lock();
        let current = current.as_ref().filter(|current| current.token == token);
        current.map(|current| current.served.clone()).ok_or_else(|| {
            Failure::Failed("this stream belongs to no bench that is running".into())
        })
    }

    /// Serves one bench, from its first ask to its end.
    fn control(&self, lines: &mut Control) -> Result<(), Failure> {
        let nonce = random();
        let challenge = Challenge { agent: self.agent.advertised().to_string(), nonce };
        lines.send(&Answer::Ok(challenge))?;
        let Some(first) = lines.receive()? else { return Ok(()) };
        if let Err(refusal) = self.await_proof(nonce).and_then(|()| self.begin(nonce)) {
            lines.send(&Answer::<()>::Err(refusal.clone()))?;
            return Err(refusal);
        }
        let ended = self.bench(lines, nonce, first);
        *self.current.lock() = None;
        ended
    }

    /// Waits until the measuring side's agent has sent the nonce to this one.
    fn await_proof(&self, nonce: u64) -> Result<(), Failure> {
        const SLICE: Duration = Duration::from_millis(20);
        let began = Instant::now();
        while began.elapsed() < PROOF_TIMEOUT {
            let heard = self.agent.wait_notification(SLICE)?;
            let mut proofs = self.proofs.lock();
            if proofs.len() >= PROOFS_MAX {
                proofs.clear();
            }
            let heard = heard.filter(|heard| heard.name == PROOF);
            proofs.extend(
                heard.and_then(|heard| heard.message.try_into().ok()).map(u64::from_be_bytes),
            );
            if proofs.remove(&nonce) {
                return Ok(());
            }
        }
        Err(Failure::Unreachable("the measuring side has not sent the nonce through its agent: do both have the same KVFERRY_SECRET?".into()))
    }

    fn begin(&self, token: u64) -> Result<(), Failure> {
        let mut current = self.current.lock();
        if current.is_some() {
            return Err(Failure::Unreachable("another bench is running on this target".into()));
        }
        let (chunk, streams) = (AtomicUsize::new(CHUNKS[0]), AtomicUsize::new(1));
        let served = Arc::new(Served { memory: Default::default(), chunk, streams });
        *current = Some(Current { token, served });
        Ok(())
    }

    fn bench(&self, lines: &mut Control, token: u64, first: Ask) -> Result<(), Failure> {
        let served = self.join(token)?;
        let mut bench = Bench {
            target: self,
            token,
            served,
            arena: None,
            shared: None,
            poisons: HashMap::new(),
            spares: Vec::new(),
        };
        let mut next = Some(first);
        while let Some(ask) = next {
            lines.send::<Answer<_>>(&bench.answer(ask))?;
            next = lines.receive()?;
        }
        Ok(())
    }
}

/// Answers that the stream is ready, and returns it for another protocol.
fn welcome(mut lines: Control) -> io::Result<TcpStream> {
    lines.send(&Answer::Ok(()))?;
    Ok(lines.into_parts()?.1)
}

fn start_agent(name: &str, listens_on: IpAddr) -> Result<Agent, Failure> {
    Ok(Agent::builder().name(name).listen((listens_on, 0)).start()?)
}

struct Bench<'a> {
    target: &'a Target,
    token: u64,
    served: Arc<Served>,
    arena: Option<Region>,
    shared: Option<Region>,
    /// The poison of each program's memory.
    poisons: HashMap<Program, u64>,
    spares: Vec<(Agent, Region)>,
}

impl Bench<'_> {
    fn answer(&mut self, ask: Ask) -> Result<Value, Failure> {
        match ask {
            Ask::Open(sizes) => value(&self.open(sizes)?),
            Ask::Fill { program, seed, span } => value(&self.fill(program, seed, span)?),
            Ask::Poison { program, span } => {
                let poison = random();
                self.fill(program, poison, span)?;
                self.poisons.insert(program, poison);
                value(&())
            }
            Ask::Check { program, seed, span, pairs } => {
                let poison = self.poisons.get(&program).copied();
                let poison = poison.ok_or_else(|| Failure::Usage("nothing was poisoned".into()))?;
                value(&match program {
                    Program::Floor => self.check_floor(seed, poison, span, &pairs)?,
                    agents => verify::check(self.region(agents)?, seed, poison, span, &pairs)?,
                })
            }
            Ask::Floor { chunk, streams } => {
                self.served.chunk.store(chunk.clamp(4 << 10, 64 << 20), Relaxed);
                self.served.streams.store(streams.clamp(1, STREAMS_MAX), Relaxed);
                value(&())
            }
            Ask::Agents(count) => value(&self.more_agents(count)?),
            Ask::Usage => value(&Usage::here()?),
        }
    }

    fn open(&mut self, sizes: Sizes) -> Result<Opened, Failure> {
        let (asked, free) = (sizes.total() as u64, machine::available_memory());
        if asked > free / 10 * 8 {
            let (asked, free) = (units::bytes(asked), units::bytes(free));
            return Err(Failure::Usage(format!("the target needs {asked} and has {free} free")));
        }
        for memory in self.served.memory.iter().take(sizes.floor_streams) {
            *memory.lock() = Pages::filled(2, sizes.floor);
        }
        let agent = &self.target.agent;
        let region = verify::touched(agent.allocate_private(sizes.arena, Access::READ_WRITE)?)?;
        if sizes.shared > 0 {
            self.shared = Some(verify::touched(agent.allocate(sizes.shared, Access::READ_WRITE)?)?);
        }
        let described = |region: &Region| Described(region.remote());
        let opened = Opened {
            token: self.token,
            region: described(&region),
            shared: self.shared.as_ref().map(described),
            floor_address: self.served.memory[0].lock().as_ptr() as u64,
        };
        self.arena = Some(region);
        Ok(opened)
    }

    fn more_agents(&mut self, count: usize) -> Result<Vec<Reach>, Failure> {
        if self.spares.len() + count > SPARES_MAX {
            return Err(Failure::Usage(format!("{SPARES_MAX} more agents at most")));
        }
        (0..count)
            .map(|_| {
                let agent = start_agent("bench-spare", self.target.listens_on)?;
                let region = verify::touched(agent.allocate(SPARE_BYTES, Access::READ_WRITE)?)?;
                let reach = Reach {
                    agent: agent.advertised().to_string(),
                    region: Described(region.remote()),
                };
                self.spares.push((agent, region));
                Ok(reach)
            })
            .collect()
    }

    fn region(&mut self, program: Program) -> Result<&mut Region, Failure> {
        let region = match program {
            Program::Shared => self.shared.as_mut(),
            _ => self.arena.as_mut(),
        };
        region.ok_or_else(|| Failure::Failed("no bench is open".into()))
    }

    fn fill(&mut self, program: Program, seed: u64, span: usize) -> Result<(), Failure> {
        let Program::Floor = program else {
            return verify::fill(self.region(program)?, seed, span);
        };
        let streams = self.served.streams.load(Relaxed);
        let memories = self.served.memory.iter().take(streams);
        memories.into_iter().try_for_each(|memory| verify::fill(&mut *memory.lock(), seed, span))
    }

    /// Describes an error in the memory of one of the floor's streams, if there is one.
    fn check_floor(
        &self,
        seed: u64,
        poison: u64,
        span: usize,
        pairs: &[Pair],
    ) -> Result<Option<String>, Failure> {
        let streams = self.served.streams.load(Relaxed);
        for (pairs, memory) in floor::shares(pairs, streams).zip(&self.served.memory) {
            let memory = memory.lock();
            if let Some(wrong) = verify::check(&*memory, seed, poison, span, pairs)? {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        for region in [self.arena.take(), self.shared.take()].into_iter().flatten() {
            // The measuring side has gone, and with it the receiver of an error.
            let _ = self.target.agent.unregister(&region);
        }
    }
}
