//! The measuring side's connections to a target: one for control, and the streams that a part needs.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use kvferry::{Agent, Notification, Options, Peer, RemoteRegion};
use rustix::process::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::child::Child;
use crate::failure::Failure;
use crate::helper;
use crate::lines::Lines;

use super::copies::Reached;
use super::floor::{Floor, like_ours};
use super::messages::{Ask, Challenge, Hello, Opened, PROOF, Program, Sizes};
use super::tables::Pair;
use super::usage::Usage;
use crate::report::Session;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// An open bench on a target.
#[derive(Debug)]
pub(super) struct Link {
    control: Lines<TcpStream, TcpStream>,
    address: SocketAddr,
    opened: Opened,
    pub(super) peer: Peer,
    pub(super) session: Session,
    /// The address of its agent.
    pub(super) agent_address: String,
    // Dropped last: the target ends after its connections.
    child: Option<Child>,
}

impl Link {
    /// A second process on this host. Call it from the main thread (see [`Child`]).
    pub(super) fn spawn(agent: &Agent, sizes: Sizes) -> Result<Link, Failure> {
        Link::spawn_as(agent, sizes, &["target"])
    }

    /// The same, on one core.
    pub(super) fn spawn_on(core: usize, agent: &Agent, sizes: Sizes) -> Result<Link, Failure> {
        Link::spawn_as(agent, sizes, &["target", &core.to_string()])
    }

    fn spawn_as(agent: &Agent, sizes: Sizes, arguments: &[&str]) -> Result<Link, Failure> {
        let mut child = helper::spawn(arguments)?;
        let address = child.hello()?;
        Link::open(agent, address, sizes, Some(child))
    }

    /// A `kvferry bench transfers --serve` elsewhere.
    pub(super) fn connect(agent: &Agent, target: &str, sizes: Sizes) -> Result<Link, Failure> {
        let addresses = target.to_socket_addrs().map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => Failure::Usage(format!("--target {target}: {error}")),
            _ => Failure::Unreachable(format!("{target}: {error}")),
        })?;
        let mut refusal = Failure::Unreachable(format!("{target} has no address"));
        for address in addresses {
            match Link::open(agent, address, sizes, None) {
                Err(Failure::Unreachable(why)) => refusal = Failure::Unreachable(why),
                other => return other,
            }
        }
        Err(refusal)
    }

    fn open(
        agent: &Agent,
        address: SocketAddr,
        sizes: Sizes,
        child: Option<Child>,
    ) -> Result<Link, Failure> {
        let (mut control, challenge) = say_hello::<Challenge>(address, &Hello::Control)?;
        let peer = agent.peer(&challenge.agent)?;
        let session = Session::of(&peer.connect(CONNECT_TIMEOUT)?);
        let message = challenge.nonce.to_be_bytes().to_vec();
        peer.notify(Notification::new(PROOF, message), &Options::default())?;
        let opened = ask(&mut control, &Ask::Open(sizes))?;
        let agent_address = challenge.agent;
        Ok(Link { control, address, opened, peer, session, agent_address, child })
    }

    pub(super) fn ask<A: DeserializeOwned>(&mut self, question: &Ask) -> Result<A, Failure> {
        ask(&mut self.control, question)
    }

    /// A stream for [`super::raw::send`]; with memory of its own if it is one of several.
    pub(super) fn raw(&self, own: Option<usize>) -> Result<TcpStream, Failure> {
        let (lines, ()) = say_hello(self.address, &Hello::Raw { token: self.opened.token, own })?;
        Ok(lines.into_parts()?.1)
    }

    /// A floor program of so many streams, connected to its other half.
    pub(super) fn floor(&self, buffer: Option<usize>, streams: usize) -> Result<Floor, Failure> {
        let stream = |lane| {
            let hello = Hello::Floor { token: self.opened.token, buffer, lane };
            let (lines, ()) = say_hello(self.address, &hello)?;
            Ok::<_, Failure>(lines.into_parts()?.1)
        };
        let streams = (0..streams).map(stream).collect::<Result<_, _>>()?;
        Ok(Floor::new(streams, buffer)?)
    }

    pub(super) fn fill(&mut self, program: Program, seed: u64, span: usize) -> Result<(), Failure> {
        self.ask(&Ask::Fill { program, seed, span })
    }

    pub(super) fn poison(&mut self, program: Program, span: usize) -> Result<(), Failure> {
        self.ask(&Ask::Poison { program, span })
    }

    pub(super) fn check(
        &mut self,
        program: Program,
        seed: u64,
        span: usize,
        pairs: &[Pair],
    ) -> Result<Option<String>, Failure> {
        self.ask(&Ask::Check { program, seed, span, pairs: pairs.to_vec() })
    }

    /// Resources that the target's process has used so far.
    pub(super) fn usage(&mut self) -> Result<Usage, Failure> {
        match &self.child {
            Some(child) => Ok(Usage::of(child.id())?),
            None => self.ask(&Ask::Usage),
        }
    }

    /// The target's memory for programs that reach it from outside; only on this host.
    pub(super) fn reached(&self) -> Option<Reached> {
        let child = self.child.as_ref()?;
        Some(Reached {
            pid: i32::try_from(child.id()).ok()?,
            address: usize::try_from(self.opened.floor_address).ok()?,
        })
    }

    /// The target's memory for its agent.
    pub(super) fn region(&self) -> &RemoteRegion {
        &self.opened.region.0
    }

    /// The target's memory that its agent allocated.
    pub(super) fn shared(&self) -> Option<&RemoteRegion> {
        self.opened.shared.as_ref().map(|region| &region.0)
    }

    /// Signals the target's process, which must be a child of this one.
    pub(super) fn signal(&self, signal: Signal) -> Result<(), Failure> {
        self.child.as_ref().expect("fault parts start their own target").signal(signal)
    }
}

fn say_hello<A: DeserializeOwned>(
    address: SocketAddr,
    hello: &Hello,
) -> Result<(Lines<TcpStream, TcpStream>, A), Failure> {
    let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)
        .map_err(|error| Failure::Unreachable(format!("bench target {address}: {error}")))?;
    like_ours(&stream)?;
    let mut lines = Lines::new(stream.try_clone()?, stream);
    let welcome = lines.ask(hello).map_err(|error| {
        Failure::Unreachable(format!("{address} is not a bench target of this version: {error}"))
    })?;
    let answer = welcome.map_err(|why: Failure| why.while_doing(&address.to_string()))?;
    Ok((lines, answer))
}

fn ask<Q: Serialize, A: DeserializeOwned>(
    control: &mut Lines<TcpStream, TcpStream>,
    question: &Q,
) -> Result<A, Failure> {
    let answer = control.ask(question).map_err(|error| {
        Failure::Failed(format!("the bench target has closed the control connection: {error}"))
    })?;
    answer.map_err(|why: Failure| why.while_doing("the bench target"))
}
