//! Measurements of `kvferry bench`, and pictures of their figures.
//!
//! [`transfers`] measures reads and writes beside plain programs and other engines in the same rounds, [`handoffs`] what
//! a handoff costs beyond moving its bytes, [`files`] files beside fio, [`idle`] processes with nothing to do, [`gpu`] memory of GPUs, [`store`] the store of blocks and the hits of a
//! trace, [`offload`] the block manager. Each takes [`options`], which are the flags of the command, and returns a
//! [`report::Report`]: rows of figures, with their table, verdicts, JSON and page. [`plot`] draws. The other modules are
//! tools that the command uses, too.
//!
//! The other side of a measurement is a helper process: the same program, started again with the
//! argument [`helper::COMMAND`]. A program that measures passes the rest of the arguments to
//! [`roles::run`].

#![forbid(unsafe_code)]

mod blocks;
pub mod child;
pub mod failure;
pub mod files;
pub mod gpu;
pub mod handoffs;
pub mod helper;
pub mod idle;
pub mod layer_times;
pub mod lines;
pub mod machine;
pub mod model;
pub mod offload;
pub mod options;
pub mod plot;
pub mod report;
pub mod roles;
pub mod stats;
pub mod store;
pub mod table;
pub mod transfers;
pub mod units;
