//! The engine compared with its model's output, and its seams with their contracts.

mod contract;
mod flips;
mod kit;
mod loads;
mod script;
mod tokens;
mod trt;
