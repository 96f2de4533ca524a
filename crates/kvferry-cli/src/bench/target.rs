//! The target side of a bench: owns the memory that is written to and read from, and does what the
//! other side asks over a control connection.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvferry::{Access, Agent, Region};
use serde_json::Value;

use crate::child::{die_with_parent, value};
use crate::content::random;
use crate::failure::Failure;
use crate::lines::{Answer, Described, Lines};
use crate::{machine, output, units};

use super::floor::{self, CHUNKS, Served};
use super::messages::{Ask, Door, Hello, KNOCK, Opened, Program, Reach, Sizes};
use super::pages::Pages;
use super::placement::pin;
use super::usage::Usage;
use super::{raw, verify};

/// What a spare agent offers: enough for one small block.
const SPARE_BYTES: usize = 64 << 10;
const MOST_SPARES: usize = 64;

/// How long whoever connects may take to knock.
const KNOCK_TIMEOUT: Duration = Duration::from_secs(10);
const MOST_KNOCKS: usize = 1024;

type Control = Lines<TcpStream, TcpStream>;

/// `kvferry bench-target`: on a free port of this host, for as long as the parent lives.
pub(crate) fn run_child(core: Option<usize>) -> Result<(), Failure> {
    die_with_parent()?;
    core.map_or(Ok(()), pin)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let target = Target::start(&listener)?;
    let hello: Answer<SocketAddr> = Ok(listener.local_addr()?);
    let mut pipe = Lines::new(io::stdin(), io::stdout());
    pipe.send(&hello)?;
    std::thread::spawn(move || target.serve(&listener));
    // Nothing more is said here: the end of the pipe is what we wait for.
    while pipe.receive::<Value>()?.is_some() {}
    Ok(())
}

/// `kvferry bench --serve`.
pub(super) fn run_server(listen: SocketAddr) -> Result<(), Failure> {
    let listener = TcpListener::bind(listen)
        .map_err(|error| Failure::Usage(format!("cannot listen on {listen}: {error}")))?;
    let target = Target::start(&listener)?;
    let address = listener.local_addr()?;
    output::note(&format!(
        "serving benches on {address}, agent at {}; Ctrl-C ends it",
        target.agent.advertised()
    ));
    if !address.ip().is_loopback() && target.agent.config().secret.is_none() {
        output::note(
            "note: without KVFERRY_SECRET, whoever reaches this port may run benches here",
        );
    }
    target.serve(&listener);
    Ok(())
}

/// The process: one agent, one bench at a time.
#[derive(Debug)]
struct Target {
    agent: Agent,
    listens_on: IpAddr,
    knocks: Mutex<HashSet<u64>>,
    current: Mutex<Option<Current>>,
}

/// What connections other than control may use.
#[derive(Debug, Clone)]
struct Current {
    token: u64,
    served: Arc<Served>,
}

const LOCK: &str = "nothing panics while it holds the lock";

impl Target {
    fn start(listener: &TcpListener) -> Result<Arc<Target>, Failure> {
        let listens_on = listener.local_addr()?.ip();
        let agent = start_agent("bench-target", listens_on)?;
        let (knocks, current) = Default::default();
        Ok(Arc::new(Target { agent, listens_on, knocks, current }))
    }

    /// One thread per connection: there are a handful, and measuring threads must not share.
    fn serve(self: Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming().flatten() {
            let target = self.clone();
            std::thread::spawn(move || {
                if let Err(failure) = target.connection(stream) {
                    output::note(&format!("bench target: {failure}"));
                }
            });
        }
    }

    fn connection(&self, stream: TcpStream) -> Result<(), Failure> {
        stream.set_nodelay(true)?;
        let mut lines = Lines::new(stream.try_clone()?, stream);
        match lines.receive()? {
            None => Ok(()),
            Some(Hello::Control) => self.control(&mut lines),
            Some(Hello::Raw { token, own: None }) => {
                let served = self.join(token)?;
                Ok(raw::serve(welcome(lines)?, &served.memory)?)
            }
            Some(Hello::Raw { token, own: Some(bytes) }) => {
                self.join(token)?;
                let memory = Mutex::new(Pages::filled(2, bytes.min(raw::STREAM_BYTES)));
                Ok(raw::serve(welcome(lines)?, &memory)?)
            }
            Some(Hello::Floor { token, buffer }) => {
                let served = self.join(token)?;
                Ok(floor::serve(&welcome(lines)?, buffer, &served)?)
            }
        }
    }

    fn join(&self, token: u64) -> Result<Arc<Served>, Failure> {
        let current = self.current.lock().expect(LOCK);
        let current = current.as_ref().filter(|current| current.token == token);
        current
            .map(|current| current.served.clone())
            .ok_or_else(|| Failure::Failed("a stream without a bench of its own".into()))
    }

    /// One bench, from its first ask to its end.
    fn control(&self, lines: &mut Control) -> Result<(), Failure> {
        let nonce = random();
        let door = Door { agent: self.agent.advertised().to_string(), nonce };
        lines.send(&Answer::Ok(door))?;
        let Some(first) = lines.receive()? else { return Ok(()) };
        if let Err(refusal) = self.await_knock(nonce).and_then(|()| self.begin(nonce)) {
            lines.send(&Answer::<()>::Err(refusal.clone()))?;
            return Err(refusal);
        }
        let ended = self.bench(lines, nonce, first);
        *self.current.lock().expect(LOCK) = None;
        ended
    }

    /// Until the agent at the other end has said the nonce to ours.
    fn await_knock(&self, nonce: u64) -> Result<(), Failure> {
        const SLICE: Duration = Duration::from_millis(20);
        let began = Instant::now();
        while began.elapsed() < KNOCK_TIMEOUT {
            let heard = self.agent.wait_notification(SLICE);
            let mut knocks = self.knocks.lock().expect(LOCK);
            if knocks.len() >= MOST_KNOCKS {
                knocks.clear();
            }
            let heard = heard.filter(|heard| heard.name == KNOCK);
            knocks.extend(
                heard.and_then(|heard| heard.message.try_into().ok()).map(u64::from_be_bytes),
            );
            if knocks.remove(&nonce) {
                return Ok(());
            }
        }
        Err(Failure::Unreachable("an agent that should have knocked did not".into()))
    }

    fn begin(&self, token: u64) -> Result<(), Failure> {
        let mut current = self.current.lock().expect(LOCK);
        if current.is_some() {
            return Err(Failure::Unreachable("another bench is running on this target".into()));
        }
        let chunk = AtomicUsize::new(CHUNKS[0]);
        let served = Arc::new(Served { memory: Mutex::default(), chunk });
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

/// Says that the stream is ready, and gives it up for something else than lines.
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
    /// What each program's memory was poisoned with.
    poisons: HashMap<Program, u64>,
    spares: Vec<(Agent, Region)>,
}

impl Bench<'_> {
    fn answer(&mut self, ask: Ask) -> Result<Value, Failure> {
        match ask {
            Ask::Open(sizes) => value(&self.open(sizes)?),
            Ask::Fill { program, seed, span } => value(&match program {
                Program::Floor => verify::fill(&mut *self.floor(), seed, span)?,
                agents => verify::fill(self.region(agents)?, seed, span)?,
            }),
            Ask::Poison { program, span } => {
                let poison = match program {
                    Program::Floor => verify::poison(&mut *self.floor(), span)?,
                    agents => verify::poison(self.region(agents)?, span)?,
                };
                self.poisons.insert(program, poison);
                value(&())
            }
            Ask::Check { program, seed, span, pairs } => {
                let poison = self.poisons.get(&program).copied();
                let poison = poison.ok_or_else(|| Failure::Usage("nothing was poisoned".into()))?;
                value(&match program {
                    Program::Floor => verify::check(&*self.floor(), seed, poison, span, &pairs)?,
                    agents => verify::check(self.region(agents)?, seed, poison, span, &pairs)?,
                })
            }
            Ask::Chunk(bytes) => {
                let bytes = bytes.clamp(4 << 10, 64 << 20);
                self.served.chunk.store(bytes, std::sync::atomic::Ordering::Relaxed);
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
        *self.floor() = Pages::filled(2, sizes.floor);
        let agent = &self.target.agent;
        let region = touched(agent.allocate_private(sizes.arena, Access::READ_WRITE)?)?;
        if sizes.shared > 0 {
            self.shared = Some(touched(agent.allocate(sizes.shared, Access::READ_WRITE)?)?);
        }
        let described = |region: &Region| Described(region.remote());
        let opened = Opened {
            token: self.token,
            region: described(&region),
            shared: self.shared.as_ref().map(described),
            floor_address: self.floor().as_ptr() as u64,
        };
        self.arena = Some(region);
        Ok(opened)
    }

    fn more_agents(&mut self, count: usize) -> Result<Vec<Reach>, Failure> {
        if self.spares.len() + count > MOST_SPARES {
            return Err(Failure::Usage(format!("{MOST_SPARES} more agents at most")));
        }
        (0..count)
            .map(|_| {
                let agent = start_agent("bench-spare", self.target.listens_on)?;
                let region = touched(agent.allocate(SPARE_BYTES, Access::READ_WRITE)?)?;
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

    fn floor(&self) -> MutexGuard<'_, Pages> {
        self.served.memory.lock().expect(LOCK)
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        for region in [self.arena.take(), self.shared.take()].into_iter().flatten() {
            // The measuring side has gone: there is nobody left to tell.
            let _ = self.target.agent.unregister(&region);
        }
    }
}

/// Memory whose pages are there: the first transfer must not pay for them.
fn touched(mut region: Region) -> Result<Region, Failure> {
    let bytes = region.len();
    verify::poison(&mut region, bytes)?;
    Ok(region)
}
