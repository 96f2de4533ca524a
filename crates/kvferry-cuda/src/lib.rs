//! kvferry on NVIDIA GPUs: the parts that need no driver.
//!
//! A batch is copied between scattered memory of a device and its stage, which is pinned host memory. [`plan`] decides
//! by which calls: single copies, batches of copies for the copy engine, or a kernel that gathers and scatters. Its
//! decision minimises the time that a [`Calibration`] gives for the calls. A calibration is fitted to times measured on
//! the device ([`samples`] lists what to measure), and can be stored. [`ptx`] has the kernel.
//!
//! All of this is values: no driver, no clock, no thread.

#![forbid(unsafe_code)]

pub mod calibration;
mod capabilities;
mod cost;
mod fit;
mod job;
pub mod plan;
pub mod ptx;
pub mod samples;

pub use calibration::{Calibration, CalibrationError, Costs, DeviceKey};
pub use capabilities::{Capabilities, KernelLimits, Staging};
pub use cost::{Cost, Curve, Method};
pub use job::{Direction, Job, Unit};
pub use plan::{Plan, PlanError, Planner, Step, plan};
