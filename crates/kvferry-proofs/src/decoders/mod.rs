//! One entry per decoder. Each asks for more than not to panic: what was decoded and encoded again
//! is what it was, limits hold, lengths add up, and how the bytes were chopped makes no difference.

pub mod agent;
pub mod frames;
pub mod handoff;
pub mod introduction;
pub mod messages;
pub mod session;
