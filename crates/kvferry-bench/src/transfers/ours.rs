//! kvferry as a subject: an agent of this process, its peer at the target, memory at both.

use kvferry::{Access, Agent, Batch, Checksum, Options, Peer, Region, RemoteRegion};

use crate::failure::Failure;

use super::messages::Program;
use super::subject::{Cell, InProcess};
use super::verify::{self, Memory};
use super::{Bench, agent_builder, batch_between, transfer};

pub(super) struct Ours {
    who: &'static str,
    program: Program,
    peer: Peer,
    memory: Region,
    remote: RemoteRegion,
    batches: Vec<Batch>,
    /// Kept alive, if it is not the bench's agent.
    _agent: Option<Agent>,
}

impl Ours {
    /// Subject between private memory that is registered at both sides, like that of engines.
    pub(super) fn registered(bench: &Bench<'_>) -> Ours {
        Ours {
            who: "kvferry",
            program: Program::Kvferry,
            peer: bench.peer.clone(),
            memory: bench.arena.clone(),
            remote: bench.link.region().clone(),
            batches: Vec::new(),
            _agent: None,
        }
    }

    /// The same with checksums.
    pub(super) fn checked(bench: &Bench<'_>) -> Result<Ours, Failure> {
        let builder = agent_builder(bench.settings, bench.transport)?.checksum(Checksum::On);
        let agent = builder.start()?;
        let memory = verify::touched(agent.allocate_private(bench.arena.len(), Access::NONE)?)?;
        let peer = agent.peer(&bench.link.agent_address)?;
        Ok(Ours { who: "checksums", peer, memory, _agent: Some(agent), ..Ours::registered(bench) })
    }

    /// Subject between memory that the agents allocated and may share. `None` if the target has none.
    pub(super) fn shared(bench: &Bench<'_>) -> Result<Option<Ours>, Failure> {
        let Some(remote) = bench.link.shared().cloned() else { return Ok(None) };
        let memory = verify::touched(bench.agent.allocate(bench.arena.len(), Access::NONE)?)?;
        let program = Program::Shared;
        let ours = Ours::registered(bench);
        Ok(Some(Ours { who: "kvferry, allocated", program, memory, remote, ..ours }))
    }
}

impl InProcess for Ours {
    fn who(&self) -> &'static str {
        self.who
    }

    fn prepare(&mut self, _: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        let tables = cell.load.batches.iter();
        let batches = tables.map(|table| batch_between(&self.memory, &self.remote, cell.op, table));
        self.batches = batches.collect::<Result<_, _>>()?;
        Ok(())
    }

    fn one(&mut self, _: &mut Bench<'_>, cell: &Cell, batch: usize) -> Result<(), Failure> {
        let options = Options { streams: cell.streams.0, ..Options::default() };
        transfer(&self.peer, cell.op, &self.batches[batch], &options)
    }

    fn memory<'a>(&'a mut self, _: &'a mut Bench<'_>) -> &'a mut dyn Memory {
        &mut self.memory
    }

    fn program(&self) -> Program {
        self.program
    }
}
