//! Memory that callers name by address alone: the host's, or a GPU's.

use crate::refusal::{Answer, Refusal};
use crate::running::{Running, pointer, size};
use kvferry::{Access, After, Batch, DeviceMemory, Error, Region};
use kvferry_cuda::Order;
use kvferry_sys::cuda::RawStream;
use kvferry_sys::host::LoadedDriver;
use std::any::Any;
use std::ffi::OsStr;
use std::sync::Arc;

/// Names the order of transfers of memory of GPUs, unless the caller has set one.
const AFTER: &str = "KVFERRY_MOONCAKE_AFTER";

/// Whether a location of Mooncake, such as `cuda:0`, names a GPU.
fn names_gpu(location: &str) -> bool {
    location.split(':').next() == Some("cuda")
}

/// Returns the memory of a GPU at an address, or [`NoGpu`] for host memory, as far as the CUDA driver knows.
///
/// The driver is asked if the process already uses it, as a process with memory of a GPU does, or if the location
/// names a GPU. A location is a hint only: callers of Mooncake give one for host memory, too.
fn gpu_memory(addr: u64, len: u64, location: &str) -> Answer<Result<DeviceMemory, NoGpu>> {
    let is_gpus = size(addr)
        .is_ok_and(|addr| LoadedDriver::find().is_some_and(|it| it.has_device_memory_at(addr)));
    if !is_gpus && !names_gpu(location) {
        return Ok(Err(NoGpu(None)));
    }
    match kvferry_cuda::memory(addr, len, None) {
        Ok(memory) => Ok(Ok(memory.with_process_addresses())),
        Err(why) if is_gpus => Err(Refusal::invalid(why)),
        Err(why) => Ok(Err(NoGpu(Some(why)))),
    }
}

/// The address is not memory of a GPU. Has the reason if the location names a GPU.
struct NoGpu(Option<kvferry_cuda::Error>);

/// Registers ranges of host memory and of memory of GPUs, all or none.
///
/// # Safety
/// The same as for [`kvferry::Agent::register`], for each range.
pub(crate) unsafe fn register(
    running: &Running,
    ranges: impl Iterator<Item = (u64, u64)>,
    location: &str,
    access: Access,
) -> Answer<Vec<Region>> {
    let (mut host, mut gpus, mut why) = (Vec::new(), Vec::new(), None);
    for (addr, len) in ranges {
        match gpu_memory(addr, len, location)? {
            Ok(memory) => gpus.push(memory),
            Err(NoGpu(not)) => {
                why = why.or(not);
                host.push((pointer(addr)?, size(len)?));
            }
        }
    }
    let refused = |error: Error| {
        let mut refusal = Refusal::from(error);
        if let Some(why) = &why {
            refusal.why = format!("{}; it is not memory of a GPU either: {why}", refusal.why);
        }
        refusal
    };
    let mut regions = Vec::new();
    if !host.is_empty() {
        // SAFETY: the caller's promise.
        regions = unsafe { running.agent.register_batch(&host, access) }.map_err(refused)?;
    }
    for memory in gpus {
        match running.agent.register_device(memory, access) {
            Ok(region) => regions.push(region),
            Err(error) => {
                let _ = running.agent.unregister_batch(&regions);
                return Err(error.into());
            }
        }
    }
    Ok(regions)
}

/// A value that keeps streams and events until it is dropped, on any thread.
pub type Owner = Arc<dyn Any + Send + Sync>;

/// The work that transfers of memory of GPUs come after. If there is none, the caller has waited for the work that uses
/// the memory, which is Mooncake's contract.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    all: Arc<[Order]>,
    /// The owner of the streams and events. Calls that took a clone before another order was set keep it, too.
    _owner: Option<Owner>,
}

impl Orders {
    /// The order that the environment names.
    pub(crate) fn from_env() -> Answer<Self> {
        Self::of_text(&std::env::var_os(AFTER).unwrap_or_default())
    }

    fn of_text(text: &OsStr) -> Answer<Self> {
        match text.to_str() {
            Some("" | "host") => Ok(Self::default()),
            Some("default-stream") => Ok(Self::new(&[Order::Stream(RawStream(0))], None)),
            _ => Err(Refusal::invalid(format_args!(
                "{AFTER} is \"host\" or \"default-stream\", not {text:?}"
            ))),
        }
    }

    pub(crate) fn new(orders: &[Order], owner: Option<Owner>) -> Self {
        let all = orders.iter().copied().filter(|order| *order != Order::Host).collect();
        Self { all, _owner: owner }
    }

    /// Finds memory of GPUs in a batch, and makes its transfers come after these orders.
    pub(crate) fn apply(&self, running: &Running, batch: &mut Batch) -> Answer<()> {
        batch.find_device_memory(&running.agent)?;
        if self.all.is_empty() {
            // Mooncake's contract: the caller has waited.
            batch.set_after(After::host());
            return Ok(());
        }
        // SAFETY: `MooncakeEngine::set_after` passes this promise on to its caller.
        unsafe { kvferry_cuda::order(batch, &self.all) }.map_err(Refusal::invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn an_order_that_the_environment_names_in_no_unicode_is_refused_and_not_taken_for_none() {
        let names_stream = Orders::of_text(OsStr::new("default-stream"));
        assert!(names_stream.is_ok_and(|orders| orders.all.len() == 1));
        for text in ["", "host"] {
            let orders = Orders::of_text(OsStr::new(text));
            assert!(orders.is_ok_and(|orders| orders.all.is_empty()), "{text}");
        }
        for text in [&b"default-stream\xff"[..], b"stream"] {
            assert!(Orders::of_text(OsStr::from_bytes(text)).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_call_keeps_the_owner_of_the_orders_that_it_has_taken() {
        let owner: Owner = Arc::new(());
        let set = Orders::new(&[Order::Stream(RawStream(7))], Some(Arc::clone(&owner)));
        let taken = set.clone();
        drop(set);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(taken);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn a_location_names_a_gpu_by_cuda_and_a_number() {
        for location in ["cuda", "cuda:0", "cuda:11", "cuda:GPU-1b", "cuda:0000:1b:00.0"] {
            assert!(names_gpu(location), "{location}");
        }
        for location in ["", "*", "cpu:0", "cudax:0", "0:cuda"] {
            assert!(!names_gpu(location), "{location}");
        }
    }
}
