//! Where blocks lie: on disks, in host memory in front of them, and in an object store behind them.

pub(crate) mod disk;
pub(crate) mod host;
pub mod objects;
