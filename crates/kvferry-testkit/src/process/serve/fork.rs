//! The agent in a forked process.

use super::command::Command;
use super::{Outcome, Server};
use crate::forked::in_forked_process;
use kvferry::{Access, ErrorKind, Options};
use serde_json::json;
use std::time::Duration;

impl Server {
    /// Forks, makes three calls to the agent in the forked process, and counts those that failed
    /// with [`ErrorKind::Forked`].
    pub(super) fn fork(&self, command: Command<'_>) -> Outcome {
        let (peer, batch) = (self.peer(command)?, self.batch(command)?);
        let forked = in_forked_process(|| {
            let errors = [
                peer.write(&batch, &Options::default()).err(),
                self.agent().allocate(4096, Access::NONE).err(),
                peer.write_async(&batch, &Options::default())
                    .wait(Duration::from_secs(30))
                    .and_then(Result::err),
            ];
            let forked = errors.iter().flatten().filter(|e| e.kind() == ErrorKind::Forked).count();
            u8::try_from(forked).expect("three calls")
        });
        Ok(forked.map_or(json!({"forked": "hangs"}), |forked| json!({"forked": forked})))
    }
}
