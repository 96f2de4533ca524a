//! Traces of requests in the form that the Mooncake project publishes: a line per request, with the time
//! in milliseconds (`timestamp`) and the ids of its prompt's blocks (`hash_ids`), where equal ids mean an
//! equal prefix up to and with that block.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;

use crate::failure::Failure;

#[derive(Debug, Deserialize)]
pub(super) struct Request {
    /// Milliseconds.
    #[serde(rename = "timestamp")]
    pub(super) at: u64,
    #[serde(rename = "hash_ids")]
    pub(super) blocks: Vec<u64>,
}

pub(super) struct Trace {
    pub(super) requests: Vec<Request>,
    /// Blocks of all requests.
    pub(super) blocks: usize,
    pub(super) different: usize,
}

impl Trace {
    pub(super) fn read(path: &Path) -> Result<Trace, Failure> {
        let unusable = |why: String| Failure::Usage(format!("--trace {}: {why}", path.display()));
        let file = File::open(path).map_err(|e| unusable(e.to_string()))?;
        let mut requests = Vec::new();
        for (number, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(|e| unusable(e.to_string()))?;
            if line.trim().is_empty() {
                continue;
            }
            let request = serde_json::from_str(&line);
            requests.push(request.map_err(|e| unusable(format!("line {}: {e}", number + 1)))?);
        }
        if requests.is_empty() {
            return Err(unusable("it has no requests".into()));
        }
        Ok(Trace::of(requests))
    }

    pub(super) fn of(requests: Vec<Request>) -> Trace {
        let all = || requests.iter().flat_map(|request| &request.blocks);
        let different: std::collections::HashSet<_> = all().collect();
        let (blocks, different) = (all().count(), different.len());
        Trace { requests, blocks, different }
    }

    /// The first request of the second half.
    pub(super) fn half(&self) -> usize {
        self.requests.len() / 2
    }
}
