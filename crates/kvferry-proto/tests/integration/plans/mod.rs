//! Layouts and plans, held against a copy byte by byte.

mod coalescing;
mod engine;
mod layouts;
mod naive;
mod requests;
mod topologies;
