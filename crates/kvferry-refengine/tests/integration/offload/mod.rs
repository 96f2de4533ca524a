//! An engine whose blocks the block manager decides on: each token and each KV value is compared with the model's.

mod directories;
mod failures;
mod faults;
mod kit;
mod retention;
mod reuse;
mod scheduler;
mod soak;
