//! Agents and sessions that come and go, to find what they leave behind.

use super::command::Command;
use super::{Outcome, Server, start, transfers};
use crate::watchdog::PATIENCE;
use kvferry::{Access, Agent, Batch, Options};
use serde_json::json;

impl Server {
    /// Starts two agents, writes from one to the other, and ends both; `times` times.
    pub(super) fn start_and_stop(&self, command: Command<'_>) -> Outcome {
        let config = command.get("config");
        for _ in 0..command.number("times") {
            let (a, b) = (start(config)?, start(config)?);
            let (from, to) = (a.allocate(8192, Access::NONE)?, b.allocate(8192, Access::WRITE)?);
            let mut batch = Batch::new();
            batch.push(&from, 0, &to.remote(), 0, 8192)?;
            a.peer(b.advertised())?.write(&batch, &Options::default())?;
            // One is shut down, the other is only dropped.
            b.shutdown();
        }
        Ok(json!({}))
    }

    /// Connects to a peer, writes a batch and disconnects; `times` times.
    pub(super) fn connect_and_disconnect(&self, command: Command<'_>) -> Outcome {
        let batch = self.batch(command)?;
        for _ in 0..command.number("times") {
            let peer = self.peer(command)?;
            peer.write(&batch, &transfers::options(command))?;
            peer.disconnect();
        }
        Ok(json!({}))
    }

    /// Connects this agent with `count` other ones, which stay.
    pub(super) fn sessions(&mut self, command: Command<'_>) -> Outcome {
        for _ in 0..command.number("count") {
            let other = Agent::builder().start()?;
            let peer = self.agent().peer(other.advertised())?;
            peer.connect(PATIENCE)?;
            self.idle.push((other, peer));
        }
        Ok(json!({}))
    }
}
