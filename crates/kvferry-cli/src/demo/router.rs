//! The router: gives each request to a prefill and to a decode engine, and compares their tokens with the
//! model's.
//!
//! A thread per engine reads its events; everything else happens on the caller's thread. When an engine
//! ends, its requests fail and are aborted at the other engine. The rest go to the remaining engines.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use kvferry_connector::{ConsumerParams, HandoffId, producer_params};
use kvferry_refengine::{EngineConfig, Params};

use super::args::Flow;
use kvferry_bench::child::{Child, Commands};
use kvferry_bench::failure::Failure;
use kvferry_bench::lines::Answer;
use kvferry_bench::units;

use super::messages::{Command, Event, Part, RequestOutput, Setup, Submit};
use super::node::LEAVING;
use super::plan::{Asked, Plan, SAYS};

/// Time limit from a request's start to its last token. Fetches time out sooner, with a reason.
const DEADLINE: Duration = Duration::from_secs(120);

/// Time limit of a fetch: more than a busy machine takes on the slowest of devices, a fake GPU that interprets its kernels.
const FETCH: Duration = Duration::from_secs(60);

/// Time limit for the set-up of an engine.
const SET_UP: Duration = Duration::from_secs(60);

/// Time limit of an engine's report on what it holds: longer than the engine waits to release everything.
const LEAVE: Duration = LEAVING.saturating_add(Duration::from_secs(4));

/// Time between a decode engine's failure of a request and the look at the prefill engine, whose end is the better reason.
const HEARD_WITHIN: Duration = Duration::from_millis(200);

/// Time between updates of the progress bar.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// The time over which the bar's rate is taken.
const RATE_OVER: Duration = Duration::from_secs(1);

/// Index of an engine.
type Number = usize;

/// An engine's event or failure; `None` at the end of its output.
type EngineOutput = (Number, Option<Answer<Event>>);

/// Fields are dropped in this order: an engine ends when its command pipe is closed.
struct Engine {
    name: String,
    is_prefill: bool,
    /// Pipe to the engine. `None` once the engine has ended.
    commands: Option<Commands>,
    child: Child,
    /// The address of the agent of its first rank.
    address: String,
    /// Requests in flight that involve it.
    busy: u32,
    /// Requests that failed with it. The engine with the fewest gets the next request.
    failures: u32,
    left: bool,
}

/// The outcome of a request.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) tokens: u32,
    /// Time at which prefill had computed the last layer of the last chunk.
    pub(super) computed_ns: Option<u64>,
    pub(super) parts: Vec<Part>,
    /// Times at which the decode ranks had received everything.
    pub(super) received_ns: Vec<u64>,
    /// Tokens that were compared.
    pub(super) verified: u32,
    /// Reason of the request's failure, if it failed.
    pub(super) failure: Option<String>,
}

/// A request in flight.
struct Flight {
    asked: Asked,
    prefill: Number,
    decode: Number,
    began: Instant,
    prefilled: bool,
    /// Whether the decode engine has the request.
    given: bool,
    said: usize,
    decoded: bool,
    /// Decode ranks that have reported its end.
    received: usize,
    /// When and why the decode engine gave it up.
    given_up: Option<(Instant, String)>,
    outcome: Outcome,
}

/// The outcome of a demo.
#[derive(Debug)]
pub(super) struct Finished {
    /// Outcomes in the order of the requests.
    pub(super) outcomes: Vec<Outcome>,
    /// Engines that ended too early, and how.
    pub(super) lost: Vec<String>,
    /// Resources that engines still hold at the end.
    pub(super) held: Vec<String>,
    pub(super) seconds: f64,
}

pub(super) struct Router<'a> {
    plan: &'a Plan,
    engines: Vec<Engine>,
    heard: Receiver<EngineOutput>,
    waiting: VecDeque<(usize, Asked)>,
    flights: HashMap<usize, Flight>,
    outcomes: Vec<Option<Outcome>>,
    /// The request in whose KV a byte is flipped.
    flip: Option<usize>,
    lost: Vec<String>,
    meter: Meter<'a>,
}

impl<'a> Router<'a> {
    /// Starts all engines, and waits until they take requests.
    pub(super) fn start(plan: &'a Plan, bar: &'a ProgressBar) -> Result<Router<'a>, Failure> {
        let (tell, heard) = mpsc::channel();
        let kinds = [
            ("prefill", plan.options.prefill, plan.prefill()),
            ("decode", plan.options.decode, plan.decode()),
        ];
        let mut engines = Vec::new();
        for (kind, count, config) in kinds {
            for at in 0..count {
                let name = format!("{kind} {at}");
                engines.push(Engine::start(plan, name, &config, engines.len(), &tell)?);
            }
        }
        let mut router = Router {
            plan,
            engines,
            heard,
            waiting: VecDeque::new(),
            flights: HashMap::new(),
            outcomes: Vec::new(),
            flip: None,
            lost: Vec::new(),
            meter: Meter::new(plan, bar),
        };
        router.until_ready()?;
        Ok(router)
    }

    fn until_ready(&mut self) -> Result<(), Failure> {
        let until = Instant::now() + SET_UP;
        while let Some(engine) = self.engines.iter().find(|engine| engine.address.is_empty()) {
            let name = engine.name.clone();
            match self.heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((from, Some(Ok(Event::Ready { address })))) => {
                    self.engines[from].address = address;
                }
                Ok((from, Some(Err(failure)))) => {
                    return Err(failure.while_doing(&self.engines[from].name));
                }
                Ok((from, None)) => {
                    let why = self.engines[from].child.how_it_ended()?;
                    return Err(Failure::Failed(why).while_doing(&self.engines[from].name));
                }
                Ok((from, Some(Ok(event)))) => {
                    let why =
                        format!("{} sends {event:?} before any request", self.engines[from].name);
                    return Err(Failure::Failed(why));
                }
                Err(_) => {
                    let why = format!("{name} is not set up within {} s", SET_UP.as_secs());
                    return Err(Failure::Failed(why));
                }
            }
        }
        Ok(())
    }

    /// The process id of each engine.
    pub(super) fn describe(&self) -> String {
        let engine = |engine: &Engine| format!("{} is process {}", engine.name, engine.child.id());
        self.engines.iter().map(engine).collect::<Vec<_>>().join(", ")
    }

    /// Serves all requests, then asks all engines what they still hold.
    pub(super) fn run(mut self, asked: Vec<Asked>, flip: bool) -> Result<Finished, Failure> {
        let began = Instant::now();
        self.outcomes.resize_with(asked.len(), || None);
        self.flip = flip.then(|| asked.len() - 1);
        self.waiting = asked.into_iter().enumerate().collect();
        loop {
            self.dispatch();
            if self.flights.is_empty() && self.waiting.is_empty() {
                break;
            }
            let due = self.flights.values().map(|flight| flight.began + DEADLINE).min();
            let due = due.unwrap_or_else(Instant::now);
            let most = due.saturating_duration_since(Instant::now()).min(TELL_EVERY);
            match self.heard.recv_timeout(most) {
                Ok((from, heard)) => self.hear(from, heard)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.expire();
            self.end_given_up()?;
            let (flying, done) = (self.flights.len(), self.outcomes.iter().flatten().count());
            self.meter.tell(done, flying);
        }
        let seconds = began.elapsed().as_secs_f64();
        let held = self.leave()?;
        let outcomes = self.outcomes.into_iter().flatten().collect();
        Ok(Finished { outcomes, lost: self.lost, held, seconds })
    }

    /// Starts requests up to the number that may be in flight.
    fn dispatch(&mut self) {
        while self.flights.len() < self.plan.concurrency as usize {
            let Some((number, asked)) = self.waiting.pop_front() else { return };
            let idlest = |is_prefill: bool| {
                let engines = self.engines.iter().enumerate();
                let able =
                    engines.filter(|(_, it)| it.is_prefill == is_prefill && it.commands.is_some());
                able.min_by_key(|(_, it)| (it.failures, it.busy)).map(|(at, _)| at)
            };
            let tokens = self.plan.size(number);
            let (Some(prefill), Some(decode)) = (idlest(true), idlest(false)) else {
                let failure = Some("no engine is left for it".to_string());
                self.outcomes[number] = Some(Outcome { tokens, failure, ..Outcome::default() });
                continue;
            };
            self.engines[prefill].busy += 1;
            self.engines[decode].busy += 1;
            let flip = self.flip == Some(number);
            let concurrent = self.plan.options.flow == Flow::Concurrent && !flip;
            let transfer = handoff(number);
            let params = producer_params(concurrent.then_some(&transfer));
            let prompt = asked.prompt.clone();
            let submit = Submit { id: name(number), prompt, max_tokens: 1, params, flip };
            self.flights.insert(number, Flight::new(asked, tokens, prefill, decode));
            if concurrent {
                let address =
                    self.engines[prefill].address.parse().expect("the address of an agent");
                let offered = ConsumerParams { transfer, address, engine: None, tokens: None };
                self.give_to_decode(number, offered.to_params());
            }
            self.engines[prefill].command(&Command::Submit(submit));
        }
    }

    fn give_to_decode(&mut self, number: usize, params: Params) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        flight.given = true;
        let (id, prompt) = (name(number), flight.asked.prompt.clone());
        let submit = Submit { id, prompt, max_tokens: SAYS, params, flip: false };
        self.engines[flight.decode].command(&Command::Submit(submit));
    }

    fn hear(&mut self, from: Number, heard: Option<Answer<Event>>) -> Result<(), Failure> {
        match heard {
            None => self.gone(from)?,
            Some(Err(Failure::Check(why))) => {
                return Err(Failure::Check(format!("{}: {why}", self.engines[from].name)));
            }
            Some(Err(failure)) => self.lose(from, &failure.to_string()),
            Some(Ok(Event::Output(said))) => self.said(from, said)?,
            Some(Ok(Event::Read { id, part })) => {
                self.meter.read(part.bytes);
                if let Some(flight) = self.flight(&id) {
                    flight.outcome.parts.push(part);
                }
            }
            Some(Ok(Event::Received { id, at_ns, failure })) => {
                self.received(from, &id, at_ns, failure);
            }
            Some(Ok(Event::Left { .. } | Event::Ready { .. })) => {}
        }
        Ok(())
    }

    fn flight(&mut self, id: &str) -> Option<&mut Flight> {
        self.flights.get_mut(&number(id)?)
    }

    fn said(&mut self, from: Number, said: RequestOutput) -> Result<(), Failure> {
        let Some(number) = number(&said.id) else { return Ok(()) };
        let Some(flight) = self.flights.get_mut(&number) else { return Ok(()) };
        let is_prefill = flight.prefill == from;
        let first = if is_prefill { 0 } else { flight.said };
        let right = &flight.asked.right[first.min(SAYS)..];
        if let Some(at) = (0..said.tokens.len()).find(|&at| right.get(at) != said.tokens.get(at)) {
            let right = right.get(at).map_or_else(|| "nothing".to_string(), u32::to_string);
            let [prefill, decode, who] =
                [flight.prefill, flight.decode, from].map(|at| &self.engines[at].name);
            let (said, at) = (said.tokens[at], first + at);
            return Err(Failure::Check(format!(
                "WRONG TOKEN: request {number}, from {prefill} to {decode}: {who} says {said} as \
                 token {at}, the model {right}"
            )));
        }
        flight.outcome.verified += said.tokens.len() as u32;
        if is_prefill {
            flight.outcome.computed_ns = Some(said.computed_ns);
        } else {
            flight.said += said.tokens.len();
        }
        let Some(ended) = said.ended else { return Ok(()) };
        if let Some(why) = ended.failure {
            let why = flight.outcome.failure.take().unwrap_or(why);
            let why = format!("{}: {why}", self.engines[from].name);
            match is_prefill {
                true => self.fail(number, why),
                false => flight.given_up = Some((Instant::now(), why)),
            }
            return Ok(());
        }
        if is_prefill {
            flight.prefilled = true;
            if !flight.given {
                match ended.params {
                    Some(params) => self.give_to_decode(number, params),
                    None => {
                        let name = &self.engines[from].name;
                        let why = format!("{name} responded without kv_transfer_params");
                        self.fail(number, why);
                    }
                }
            }
        } else if flight.said == SAYS {
            flight.decoded = true;
        } else {
            let why = format!(
                "{}: it produced {} of {SAYS} tokens",
                self.engines[from].name, flight.said
            );
            self.fail(number, why);
        }
        self.end_if_over(number);
        Ok(())
    }

    fn received(&mut self, from: Number, id: &str, at_ns: u64, failure: Option<String>) {
        let Some(number) = number(id) else { return };
        let Some(flight) = self.flights.get_mut(&number) else { return };
        debug_assert_eq!(flight.decode, from);
        flight.received += 1;
        flight.outcome.received_ns.push(at_ns);
        if let Some(why) = failure {
            // The engine says that it failed; the first reason is the reason.
            flight.outcome.failure.get_or_insert(why);
        }
        self.end_if_over(number);
    }

    /// A request has ended when both engines and all decode ranks have reported its end.
    fn end_if_over(&mut self, number: usize) {
        let ranks = self.plan.options.decode_tp as usize;
        let is_over = self
            .flights
            .get(&number)
            .is_some_and(|it| it.prefilled && it.decoded && it.received == ranks);
        if is_over {
            self.end(number);
        }
    }

    fn end(&mut self, number: usize) {
        let Some(flight) = self.flights.remove(&number) else { return };
        self.engines[flight.prefill].busy -= 1;
        self.engines[flight.decode].busy -= 1;
        self.outcomes[number] = Some(flight.outcome);
    }

    fn fail(&mut self, number: usize, why: String) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        flight.outcome.failure = Some(why);
        for engine in [flight.prefill, flight.decode] {
            self.engines[engine].failures += 1;
            self.engines[engine].command(&Command::Abort { id: name(number) });
        }
        self.end(number);
    }

    fn expire(&mut self) {
        let late = |flight: &Flight| flight.began.elapsed() >= DEADLINE;
        let late: Vec<usize> =
            self.flights.iter().filter(|(_, flight)| late(flight)).map(|(at, _)| *at).collect();
        for number in late {
            let flight = &self.flights[&number];
            let engine = if flight.prefilled { flight.decode } else { flight.prefill };
            let name = &self.engines[engine].name;
            self.fail(
                number,
                format!("it has not ended within {} s: {name} does not answer", DEADLINE.as_secs()),
            );
        }
    }

    /// Fails the requests that a decode engine gave up: for the end of the prefill engine, if it has ended.
    fn end_given_up(&mut self) -> Result<(), Failure> {
        let due: Vec<(usize, Number, String)> = self
            .flights
            .iter()
            .filter_map(|(number, flight)| {
                let (at, why) = flight.given_up.as_ref()?;
                (at.elapsed() >= HEARD_WITHIN).then(|| (*number, flight.prefill, why.clone()))
            })
            .collect();
        for (number, prefill, why) in due {
            if self.engines[prefill].child.has_ended()? {
                self.gone(prefill)?;
            }
            self.fail(number, why);
        }
        Ok(())
    }

    fn gone(&mut self, from: Number) -> Result<(), Failure> {
        let why = self.engines[from].child.how_it_ended()?;
        self.lose(from, &why);
        Ok(())
    }

    /// Handles the end of an engine: its requests fail unless its part of them is complete.
    fn lose(&mut self, from: Number, why: &str) {
        if self.engines[from].commands.take().is_none() {
            return;
        }
        self.lost.push(format!("{}: {why}", self.engines[from].name));
        let ranks = self.plan.options.decode_tp as usize;
        let needs = |flight: &Flight| match flight.prefill == from {
            true => !flight.prefilled || flight.received < ranks || flight.given_up.is_some(),
            false => flight.decode == from,
        };
        let lost: Vec<usize> =
            self.flights.iter().filter(|(_, flight)| needs(flight)).map(|(at, _)| *at).collect();
        for number in lost {
            self.fail(number, format!("{}: {why}", self.engines[from].name));
        }
    }

    /// Lets the engines release everything. Returns what they still hold.
    fn leave(&mut self) -> Result<Vec<String>, Failure> {
        self.meter.bar.set_message("waiting until engines have released everything");
        let mut held = Vec::new();
        for engine in &mut self.engines {
            engine.command(&Command::Finish);
        }
        let until = Instant::now() + LEAVE;
        let is_asked = |engine: &Engine| engine.commands.is_some() && !engine.left;
        while self.engines.iter().any(is_asked) {
            match self.heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((from, Some(Ok(Event::Left { held: what })))) => {
                    self.engines[from].left = true;
                    let name = &self.engines[from].name;
                    held.extend(what.into_iter().map(|what| format!("{name}: {what}")));
                }
                Ok((from, None)) => {
                    let why = self.engines[from].child.how_it_ended()?;
                    held.push(format!(
                        "{}: {why} before it had reported what it holds",
                        self.engines[from].name
                    ));
                    self.engines[from].commands = None;
                }
                Ok((from, Some(Err(failure)))) => {
                    held.push(format!("{}: {failure}", self.engines[from].name));
                    self.engines[from].commands = None;
                }
                Ok((_, Some(Ok(_)))) => {}
                Err(_) => {
                    let silent = self.engines.iter().filter(|engine| is_asked(engine));
                    let words = |engine: &Engine| {
                        format!("{}: no answer within {} s", engine.name, LEAVE.as_secs())
                    };
                    held.extend(silent.map(words));
                    break;
                }
            }
        }
        Ok(held)
    }
}

impl Flight {
    fn new(asked: Asked, tokens: u32, prefill: Number, decode: Number) -> Flight {
        Flight {
            asked,
            prefill,
            decode,
            began: Instant::now(),
            prefilled: false,
            given: false,
            said: 0,
            decoded: false,
            received: 0,
            given_up: None,
            outcome: Outcome { tokens, ..Outcome::default() },
        }
    }
}

impl Engine {
    fn start(
        plan: &Plan,
        name: String,
        config: &EngineConfig,
        number: Number,
        tell: &Sender<EngineOutput>,
    ) -> Result<Engine, Failure> {
        let mut child = Child::spawn(&["demo-engine"])?;
        let (mut said, commands) = child.take_pipe()?;
        let tell = tell.clone();
        std::thread::spawn(move || {
            loop {
                // A line that is cut off means that the engine has ended.
                let heard: Option<Answer<Event>> = said.receive().unwrap_or(None);
                let is_over = heard.is_none();
                if tell.send((number, heard)).is_err() || is_over {
                    return;
                }
            }
        });
        let is_prefill = name.starts_with("prefill");
        let setup = Setup {
            name: name.replace(' ', "-"),
            config: config.clone(),
            transports: plan.transports().to_string(),
            announce: plan.options.announce,
            timeout_ms: FETCH.as_millis() as u64,
            gpu: plan.options.device.0,
        };
        let (commands, address) = (Some(commands), String::new());
        let mut engine = Engine {
            name,
            is_prefill,
            commands,
            child,
            address,
            busy: 0,
            failures: 0,
            left: false,
        };
        engine.command(&Command::Open(Box::new(setup)));
        Ok(engine)
    }

    /// A failure to write is ignored: the end of the engine's output is handled elsewhere.
    fn command(&mut self, command: &Command) {
        if let Some(commands) = &mut self.commands {
            let _ = commands.send(command);
        }
    }
}

fn name(number: usize) -> String {
    format!("request-{number}")
}

fn number(name: &str) -> Option<usize> {
    name.strip_prefix("request-")?.parse().ok()
}

fn handoff(number: usize) -> HandoffId {
    HandoffId::new(&format!("handoff-{number}")).expect("short")
}

/// Progress for the bar.
struct Meter<'a> {
    bar: &'a ProgressBar,
    requests: usize,
    total: u64,
    bytes: u64,
    told: Instant,
    /// Moments of the last [`RATE_OVER`], and the bytes handed over until then.
    past: VecDeque<(Instant, u64)>,
}

impl Meter<'_> {
    fn new<'a>(plan: &Plan, bar: &'a ProgressBar) -> Meter<'a> {
        Meter {
            bar,
            requests: plan.options.requests as usize,
            total: plan.total_bytes(),
            bytes: 0,
            told: Instant::now(),
            past: VecDeque::new(),
        }
    }

    fn read(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.bar.set_position(self.bytes.min(self.total));
    }

    fn tell(&mut self, done: usize, flying: usize) {
        let now = Instant::now();
        if now - self.told < TELL_EVERY {
            return;
        }
        self.told = now;
        self.past.push_back((now, self.bytes));
        while self.past.front().is_some_and(|(at, _)| now - *at > RATE_OVER) {
            self.past.pop_front();
        }
        let rate = self.past.front().map_or(0.0, |(at, bytes)| {
            let seconds = (now - *at).as_secs_f64();
            if seconds > 0.0 { (self.bytes - bytes) as f64 / seconds / 1e9 } else { 0.0 }
        });
        self.bar.set_message(format!(
            "{done} of {} requests, {flying} in flight; {} of {} handed over, {} GB/s",
            self.requests,
            units::bytes(self.bytes),
            units::bytes(self.total),
            units::figure(rate)
        ));
    }
}
