//! kvferry's C ABI.
//!
//! The library `libkvferry.so.0` exports two sets of functions: those of `include/kvferry.h` and `include/kvferry_tasks.h`, and
//! those of Mooncake's `transfer_engine_c.h` with the prefix `kvferry_mooncake_`. `libtransfer_engine.so` (`transfer_engine.c`) has the
//! latter under Mooncake's names: a program that has Mooncake's own library beside `libkvferry.so.0` keeps Mooncake's functions.
//! Both headers are generated from this crate; a test compares them. The functions translate and
//! decide nothing. Four rules hold for all of them:
//!
//! - A handle is a number in the type of a pointer, and is looked up ([`handles`]). So a null, freed,
//!   wrong or invented handle is an error, and an object lives as long as a call uses it.
//! - No panic leaves a function: it is the error `KVFERRY_INTERNAL` ([`guard`]).
//! - After a fork, the child has no handles: those of its parent are the error `KVFERRY_FORKED`, and
//!   no lock that a thread of the parent may have held is taken.
//! - Structures begin with their size, so that a program and a library of different versions
//!   understand each other ([`structs`]).
//!
//! | module | functions |
//! |---|---|
//! | `agent`, `region`, `peer`, `batch`, `transfer`, `notification`, `file` | `kvferry_*` |
//! | `tasks` | `kvferry_tasks_*`, `kvferry_send_task_*`, `kvferry_recv_task_*` of `kvferry_tasks.h` |
//! | `transfer_engine`, `transfer_engine_tasks` | Mooncake's |

#![allow(non_camel_case_types, reason = "the names are those of C")]
#![allow(missing_docs, reason = "fields whose names say what they are have no comment")]

pub mod agent;
pub mod batch;
pub mod error;
pub mod failure;
pub mod file;
pub mod guard;
pub mod handles;
pub mod log;
pub mod notification;
pub mod peer;
pub mod region;
pub mod structs;
pub mod tasks;
pub mod transfer;
pub mod transfer_engine;
pub mod transfer_engine_tasks;
