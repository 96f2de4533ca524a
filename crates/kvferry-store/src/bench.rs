//! Fixture of this crate's tests: a folder, an agent, and memory for blocks.

use kvferry::{Access, Agent, Region};
use std::path::PathBuf;

/// A folder for stores, an agent, and memory for blocks. All are given back when the value is dropped.
pub(crate) struct Bench {
    pub(crate) folder: PathBuf,
    pub(crate) agent: Agent,
    pub(crate) pool: Region,
}

impl Bench {
    /// `name` is unique among the tests of this crate.
    pub(crate) fn new(name: &str, pool_bytes: usize) -> Self {
        let name = format!("kvferry-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&folder);
        let agent = Agent::builder().start().expect("an agent");
        let pool = agent.allocate(pool_bytes, Access::NONE).expect("memory");
        Self { folder, agent, pool }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.agent.shutdown();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
