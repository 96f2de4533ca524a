//! kvferry on NVIDIA GPUs: memory of a GPU takes part in transfers as host memory does.
//!
//! [`memory`] makes a [`kvferry::DeviceMemory`] of a range of a GPU's memory, to be registered with an agent. Its batches
//! are copied by the CUDA driver, between the range and stages of pinned host memory; [`gpu`] has the thread that does so.
//! [`order`] says what transfers of a batch have to come after: the work of a stream, or an event.
//!
//! [`plan()`] decides by which calls a batch is copied: single copies, batches of copies for the copy engine, or a kernel
//! that gathers and scatters. Its decision minimises the time that a [`Calibration`] gives for the calls. A calibration is
//! fitted to times measured on the device ([`samples`] lists what to measure), and can be stored. [`ptx`] has the kernel.
//! These are values: no driver, no clock, no thread.
//!
//! [`raw`] has the driver's plain copies, which benches compare with.
//!
//! The driver is loaded at the first call of [`memory`]; see [`kvferry_sys::cuda`].

#![deny(unsafe_code)]

pub mod calibration;
mod capabilities;
mod cost;
mod edge;
mod error;
mod fit;
pub mod gpu;
mod job;
mod memory;
mod models;
mod order;
mod pinned;
pub mod plan;
pub mod ptx;
pub mod raw;
pub mod samples;

pub use calibration::{Calibration, CalibrationError, Costs, DeviceKey};
pub use capabilities::{Capabilities, KernelLimits, Staging};
pub use cost::{Cost, Curve, Method};
pub use edge::Edge;
pub use error::Error;
pub use gpu::{Counters, Gpu};
pub use job::{Direction, Job, Unit};
pub use kvferry_sys::cuda::{DeviceName, DeviceUuid, PciAddress};
pub use memory::{memory, memory_on};
pub use order::{Order, after, devices, edges, order};
pub use plan::{Plan, PlanError, Planner, Step, plan};
