//! A small interpreter of PTX text.
//!
//! It takes the integer instructions that copy kernels need, on registers of 16 to 64 bits and on
//! global memory. Threads run one after the other, each to its end: there is no shared memory and
//! nothing that makes threads meet. What it does not know it refuses when the module is loaded,
//! with the line.

mod code;
mod lexer;
mod parser;
mod run;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub(crate) use code::Function;
pub(crate) use parser::parse;
pub(crate) use run::{Bus, Trap, run_thread};

/// A kernel with its arguments and its extent.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) function: Arc<Function>,
    /// The bytes of all parameters at their offsets.
    pub(crate) params: Vec<u8>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
}

impl Launch {
    /// Threads of the whole grid.
    pub(crate) fn threads(&self) -> u64 {
        self.grid.iter().chain(&self.block).map(|&n| u64::from(n)).product()
    }
}
