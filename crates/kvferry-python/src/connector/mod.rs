//! `kvferry.connector`: the halves of an engine's connector, with plain bytes between them.
//!
//! An adapter of an engine calls a [`scheduler::SchedulerHalf`] where requests are scheduled and a
//! [`worker::WorkerHalf`] in each rank's process, and carries bytes from one to the other. It holds no
//! state machine of its own.
//!
//! Calls that take microseconds keep the interpreter's lock: to give it up and take it again can cost
//! a switch interval of 5 ms. Only starting and closing a worker half detach. No thread of the halves
//! ever takes the interpreter's lock, so a lock held by one of them is free soon.

pub(crate) mod exchange;
pub(crate) mod ints;
pub(crate) mod scheduler;
mod values;
pub(crate) mod worker;

use kvferry_connector::{GroupRule, Kind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A group as Python gives it: kind, tokens of its window or chunk (0 for the other kinds), tokens of a
/// block.
type Group = (String, u32, u32);

/// The end of a producer's request in a step: the request, its handoff, and whether its blocks are held.
type Ending = (String, String, bool);

fn group_rule((kind, window, block_tokens): Group) -> PyResult<GroupRule> {
    let kind = match kind.as_str() {
        "full" => Kind::Full,
        "window" => Kind::Window { tokens: window },
        "chunk" => Kind::Chunk { tokens: window },
        "state" => Kind::State,
        other => return Err(PyValueError::new_err(format!("no kind of group: {other:?}"))),
    };
    Ok(GroupRule { kind, block_tokens })
}

/// The error of an argument that no core error describes.
fn refused(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}
