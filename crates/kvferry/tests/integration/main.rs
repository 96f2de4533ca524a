//! The library as programs use it: agents in one process and in several, over every transport.

mod agent;
mod conformance;
mod device;
mod device_addresses;
mod endurance;
mod examples;
mod file;
mod file_device;
mod link;
mod survival;

kvferry_testkit::child_processes!();
