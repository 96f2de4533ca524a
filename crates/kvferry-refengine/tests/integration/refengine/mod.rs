//! The engine compared with its model's output, and its seam with the contract.

mod contract;
mod flips;
mod kit;
mod loads;
mod script;
mod tokens;
