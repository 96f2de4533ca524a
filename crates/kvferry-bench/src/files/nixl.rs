//! NIXL with its POSIX plug-in, driven from Python: `bench/peers/kvferry_peers/nixl_files.py`.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::child::Child;
use crate::failure::Failure;
use crate::helper;
use crate::options::Op;

use super::{Case, Mode};

/// Operations in one transfer, at most: the plug-in's limit.
const OPERATIONS_MAX: usize = 65_536;
const START_PATIENCE: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(60);

/// The plug-in with one of its queues.
pub(super) struct Nixl {
    pub(super) who: &'static str,
    child: Child,
}

/// Starts one process for each queue. The error says why there is none.
pub(super) fn start(
    python: Option<&Path>,
    threads: usize,
    memory: u64,
) -> Result<Vec<Nixl>, String> {
    let Some(python) = python else {
        return Err("NIXL is not measured: --peers names no Python that has it".to_owned());
    };
    if !helper::imports(python, "kvferry_peers, nixl_cu12._api") {
        return Err(format!(
            "NIXL is not measured: {} can't import kvferry_peers and nixl_cu12",
            python.display()
        ));
    }
    let start = |who: &'static str, engine: &str| -> Result<Nixl, Failure> {
        let mut command = Command::new(python);
        command.args(["-m", "kvferry_peers", engine, "initiator"]);
        let mut child = Child::start(command.stderr(Stdio::null()))?;
        child.hear_within::<Value>(START_PATIENCE)?;
        child.ask_within::<_, Value>(&("open", json!([threads, memory])), START_PATIENCE)?;
        Ok(Nixl { who, child })
    };
    [("NIXL aio", "nixl-file-aio"), ("NIXL io_uring", "nixl-file-uring")]
        .into_iter()
        .map(|(who, engine)| start(who, engine).map_err(|e| format!("{who}: {e}")))
        .collect()
}

impl Nixl {
    /// GB/s of all threads together.
    pub(super) fn run(
        &mut self,
        file: &Path,
        case: Case,
        places: u64,
        blocks: &[Vec<u64>],
    ) -> Result<f64, Failure> {
        let op = if case.op == Op::Write { "write" } else { "read" };
        let is_direct = case.mode == Mode::Direct;
        let arguments = json!([op, file.to_string_lossy(), is_direct, case.block, places, blocks]);
        let seconds: f64 = self.child.ask_within(&("run", arguments), PATIENCE)?;
        let moved: usize = blocks.iter().map(|blocks| blocks.len().min(OPERATIONS_MAX)).sum();
        Ok(moved as f64 * case.block as f64 / seconds / 1e9)
    }
}
