//! Threads that work for the calls of a store.

pub(crate) mod helpers;
pub(crate) mod parallel;
pub(crate) mod task_pool;
