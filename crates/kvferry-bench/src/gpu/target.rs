//! A second process with memory of the GPU and host memory, and this process's agent.

use std::net::{Ipv4Addr, SocketAddr};

use kvferry::{Access, After, Agent, Batch, Options, Peer, Region, RemoteRegion, Transports};
use kvferry_cuda::raw::{self, Buffers, Piece};
use serde::{Deserialize, Serialize};

use super::bench::failed;
use crate::child::{Child, die_with_parent, hold};
use crate::failure::Failure;
use crate::helper;
use crate::lines::Described;
use crate::options::Op;

/// Bytes of pinned host memory in buffers whose device memory alone is used.
const HOST_BYTES: usize = 4096;

/// The address of a second process, and its regions.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    address: String,
    device: Described,
    host: Described,
}

/// Runs the helper `gpu-target`.
pub(crate) fn run_child(device: i32, bytes: usize) -> Result<(), Failure> {
    die_with_parent()?;
    let context = raw::context(device).map_err(failed)?;
    let buffers = Buffers::new(&context, bytes, HOST_BYTES).map_err(failed)?;
    let near = BufferAgent::new("tcp,local", &buffers)?;
    hold(Hello {
        address: near.agent.advertised().to_string(),
        device: Described(near.device.remote()),
        host: Described(near.host.remote()),
    })
}

/// An agent with the device memory of buffers, and as much host memory.
pub(super) struct BufferAgent {
    agent: Agent,
    device: Region,
    host: Region,
}

impl BufferAgent {
    /// Starts the agent. `transports` is written as in `KVFERRY_TRANSPORTS`.
    pub(super) fn new(transports: &str, buffers: &Buffers) -> Result<BufferAgent, Failure> {
        let agent = Agent::builder()
            .name("bench-gpu")
            .transports(Transports::parse(transports)?)
            .listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            .start()?;
        let (address, len) = (buffers.device_address(), buffers.device_len());
        let memory = kvferry_cuda::memory(address, len as u64, None).map_err(failed)?;
        let device = agent.register_device(memory, Access::READ_WRITE)?;
        let host = agent.allocate(len, Access::READ_WRITE)?;
        // Writes populate the pages.
        let bytes = vec![1; 1 << 20];
        for at in (0..len).step_by(bytes.len()) {
            host.write_at(at, &bytes[..bytes.len().min(len - at)])?;
        }
        Ok(BufferAgent { agent, device, host })
    }
}

impl Drop for BufferAgent {
    fn drop(&mut self) {
        // An agent that can't unregister the region keeps it until the agent ends.
        let _ = self.agent.unregister(&self.device);
    }
}

/// This process, and a second one that it has connected to.
pub(super) struct Link {
    near: BufferAgent,
    peer: Peer,
    device: RemoteRegion,
    host: RemoteRegion,
    /// The session's transport.
    pub(super) transport: String,
    _child: Child,
}

/// The kind of memory on both sides of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    Device,
    Host,
}

impl Link {
    /// Starts a second process that has as much device memory as the buffers, and as much host memory, and connects to it.
    pub(super) fn new(device: i32, transports: &str, buffers: &Buffers) -> Result<Link, Failure> {
        let len = buffers.device_len().to_string();
        let mut child = helper::spawn(&["gpu-target", &device.to_string(), &len])?;
        let hello: Hello = child.hello()?;
        let near = BufferAgent::new(transports, buffers)?;
        let peer = near.agent.peer(hello.address.as_str())?;
        let summary = peer.connect(None)?;
        let (Described(device), Described(host)) = (hello.device, hello.host);
        let transport = summary.transport.to_string();
        Ok(Link { near, peer, device, host, transport, _child: child })
    }

    /// Makes a batch of the pieces, each at the same place on both sides.
    pub(super) fn batch(&self, memory: Memory, pieces: &[Piece]) -> Result<Batch, Failure> {
        let (local, remote) = match memory {
            Memory::Device => (&self.near.device, &self.device),
            Memory::Host => (&self.near.host, &self.host),
        };
        let mut batch = Batch::with_capacity(pieces.len());
        batch.set_after(After::host());
        for piece in pieces {
            let (at, len) = (piece.device_at as u64, piece.len as u64);
            batch.push(local, at, remote, at, len)?;
        }
        Ok(batch)
    }

    pub(super) fn transfer(&self, op: Op, batch: &Batch) -> Result<(), Failure> {
        let options = Options::default();
        let moved = match op {
            Op::Write => self.peer.write(batch, &options)?,
            Op::Read => self.peer.read(batch, &options)?,
        };
        match moved.bytes == batch.bytes() {
            true => Ok(()),
            false => Err(Failure::Failed(format!("{} bytes of {}", moved.bytes, batch.bytes()))),
        }
    }

    pub(super) fn start_write(&self, batch: &Batch) -> kvferry::Transfer {
        self.peer.write_async(batch, &Options::default())
    }
}
