//! What `kvferry bench`, `kvferry bench file | store` and `kvferry bench handoff` measure, and how figures are
//! drawn.
//!
//! [`transfers`] measures reads and writes beside plain programs and other engines in the same
//! rounds. [`files`] measures files beside fio, [`store`] the hits of a trace. [`handoffs`] measures what a handoff costs beyond moving its bytes. Both take options in
//! which every default is filled in, and return a report that knows its table, its verdicts and its
//! JSON. [`plot`] draws. The other modules are tools that the command uses, too.
//!
//! The other side of a measurement is a helper process: the same program, started again with the
//! argument [`helper::COMMAND`]. A program that measures passes the rest of the arguments to
//! [`helper::run`].

#![forbid(unsafe_code)]

mod blocks;
pub mod child;
pub mod failure;
pub mod files;
pub mod handoffs;
pub mod helper;
pub mod layer_times;
pub mod lines;
pub mod machine;
pub mod model;
pub mod offload;
pub mod options;
pub mod plot;
pub mod report;
pub mod stats;
pub mod store;
pub mod table;
pub mod transfers;
pub mod units;
