//! Entry points for fuzzers, behind the feature `fuzzing`; not part of the API. `kvferry-models` lists and runs them.

pub use crate::exchange::model::exchange;
