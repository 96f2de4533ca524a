//! The block manager as an engine has it.

mod compare;
mod eviction;
mod model;
mod model_finish;
mod model_ops;
mod random;
mod sentences;
mod world;
