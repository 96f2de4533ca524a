//! Frees space: the keeper, the thread that it runs on, and the cleaning of a store that no process has open.

pub mod clean;
pub(crate) mod keeper;
pub(crate) mod sealing;
pub(crate) mod worker;
