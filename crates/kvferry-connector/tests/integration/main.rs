//! Ranks, the halves of a connector, and what finds prompts, over real agents or driven by plain data.

mod directory;
mod exchange;
mod rank;
mod scheduler;
mod worker;
