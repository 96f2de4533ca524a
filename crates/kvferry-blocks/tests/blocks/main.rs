//! The block manager as an engine has it.

mod random;
mod world;
