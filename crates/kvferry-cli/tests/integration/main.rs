//! The command as its users run it.

mod bench_gpu;
mod demo_store;
mod doctor;
mod end_to_end;
mod store;
