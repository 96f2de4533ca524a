//! The measuring side's hold on a target: its control connection and whatever streams a part needs.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use kvferry::{Agent, Notification, Options, Peer, RemoteRegion};
use rustix::process::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::child::Child;
use crate::failure::Failure;
use crate::lines::Lines;

use super::floor::Floor;
use super::messages::{Ask, Door, Hello, KNOCK, Opened, Program};
use super::report::Session;
use super::verify::Blocks;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// An open bench on a target.
#[derive(Debug)]
pub(super) struct Link {
    control: Lines<TcpStream, TcpStream>,
    address: SocketAddr,
    opened: Opened,
    pub(super) peer: Peer,
    pub(super) session: Session,
    /// Where its agent is, for others that want to meet it.
    pub(super) agent_address: String,
    // Last: the target leaves after its connections.
    child: Option<Child>,
}

impl Link {
    /// A second process on this host. Call it from the main thread (see [`Child`]).
    pub(super) fn spawn(agent: &Agent, arena: usize, floor: usize) -> Result<Link, Failure> {
        Link::spawn_as(agent, arena, floor, &["bench-target"])
    }

    /// The same, on one core.
    pub(super) fn spawn_on(
        core: usize,
        agent: &Agent,
        arena: usize,
        floor: usize,
    ) -> Result<Link, Failure> {
        Link::spawn_as(agent, arena, floor, &["bench-target", "--core", &core.to_string()])
    }

    fn spawn_as(
        agent: &Agent,
        arena: usize,
        floor: usize,
        arguments: &[&str],
    ) -> Result<Link, Failure> {
        let mut child = Child::spawn(arguments)?;
        let address = child.hello()?;
        Link::open(agent, address, arena, floor, Some(child))
    }

    /// A `kvferry bench --serve` elsewhere.
    pub(super) fn connect(
        agent: &Agent,
        target: &str,
        arena: usize,
        floor: usize,
    ) -> Result<Link, Failure> {
        let addresses = target.to_socket_addrs().map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => Failure::Usage(format!("--target {target}: {error}")),
            _ => Failure::Unreachable(format!("{target}: {error}")),
        })?;
        let mut refusal = Failure::Unreachable(format!("{target} has no address"));
        for address in addresses {
            match Link::open(agent, address, arena, floor, None) {
                Err(Failure::Unreachable(why)) => refusal = Failure::Unreachable(why),
                other => return other,
            }
        }
        Err(refusal)
    }

    fn open(
        agent: &Agent,
        address: SocketAddr,
        arena: usize,
        floor: usize,
        child: Option<Child>,
    ) -> Result<Link, Failure> {
        let (mut control, door) = say_hello::<Door>(address, &Hello::Control)?;
        let peer = agent.peer(&door.agent)?;
        let session = Session::of(&peer.connect(CONNECT_TIMEOUT)?);
        let message = door.nonce.to_be_bytes().to_vec();
        let knock = Notification { from: String::new(), name: KNOCK.into(), message };
        peer.notify(knock, &Options::default())?;
        let opened = ask(&mut control, &Ask::Open { arena, floor })?;
        Ok(Link { control, address, opened, peer, session, agent_address: door.agent, child })
    }

    pub(super) fn ask<A: DeserializeOwned>(&mut self, question: &Ask) -> Result<A, Failure> {
        ask(&mut self.control, question)
    }

    /// A stream for [`super::raw::send`].
    pub(super) fn raw(&self) -> Result<TcpStream, Failure> {
        let (lines, ()) = say_hello(self.address, &Hello::Raw { token: self.opened.token })?;
        Ok(lines.into_parts()?.1)
    }

    /// A floor program connected to its other half.
    pub(super) fn floor(&self, buffer: Option<usize>) -> Result<Floor, Failure> {
        let hello = Hello::Floor { token: self.opened.token, buffer };
        let (lines, ()) = say_hello(self.address, &hello)?;
        Ok(Floor::new(lines.into_parts()?.1, buffer)?)
    }

    pub(super) fn fill(
        &mut self,
        program: Program,
        seed: u64,
        blocks: Blocks,
    ) -> Result<(), Failure> {
        self.ask(&Ask::Fill { program, seed, blocks })
    }

    pub(super) fn poison(&mut self, program: Program, blocks: Blocks) -> Result<(), Failure> {
        self.ask(&Ask::Poison { program, blocks })
    }

    pub(super) fn check(
        &mut self,
        program: Program,
        seed: u64,
        blocks: Blocks,
    ) -> Result<Option<String>, Failure> {
        self.ask(&Ask::Check { program, seed, blocks })
    }

    /// The target's memory for its agent.
    pub(super) fn region(&self) -> &RemoteRegion {
        &self.opened.region.0
    }

    /// To the target's process; only a target of our own can be signalled.
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
    stream.set_nodelay(true)?;
    let mut lines = Lines::new(stream.try_clone()?, stream);
    let welcome = lines.ask(hello).map_err(|error| {
        Failure::Unreachable(format!("{address} is no bench target of this version: {error}"))
    })?;
    let answer = welcome.map_err(|why: Failure| why.while_doing(&address.to_string()))?;
    Ok((lines, answer))
}

fn ask<Q: Serialize, A: DeserializeOwned>(
    control: &mut Lines<TcpStream, TcpStream>,
    question: &Q,
) -> Result<A, Failure> {
    let answer = control
        .ask(question)
        .map_err(|error| Failure::Failed(format!("the bench target has gone: {error}")))?;
    answer.map_err(|why: Failure| why.while_doing("the bench target"))
}
