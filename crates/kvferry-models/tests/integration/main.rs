//! State machines against oracles and sentence by sentence, in virtual time; decoders on the kept corpus.

mod decoders;
mod directory;
mod engine_handshakes;
mod handoff;
mod models;
