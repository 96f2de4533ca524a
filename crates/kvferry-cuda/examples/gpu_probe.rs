//! Prints, as JSON, what the driver and its GPUs can do. `e2e/gpu/run` stores it before anything else.
//!
//! Without a usable driver it prints why, and ends with status 3.

use kvferry_sys::cuda::{
    Context, Device, DeviceAllocation, Driver, IpcHandle, Module, VmmAllocation, allocation_at,
    dma_buf, granularity,
};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let began = Instant::now();
    let driver = match Driver::get() {
        Ok(driver) => driver,
        Err(why) => {
            println!("{}", json!({ "unavailable": why.to_string() }));
            return ExitCode::from(3);
        }
    };
    let load_ms = ms(began);
    let devices = match driver.devices() {
        Ok(devices) => devices,
        Err(why) => {
            println!("{}", json!({ "unavailable": why.to_string() }));
            return ExitCode::from(3);
        }
    };
    let probe = json!({
        "cuda": format!("{}.{}", driver.version() / 1000, driver.version() % 1000 / 10),
        "driver_loads_in_ms": load_ms,
        "batch_call": driver.batch_call().map(|call| format!("{call:?}")),
        "gpus": devices.into_iter().map(of_device).collect::<Vec<_>>(),
    });
    println!("{probe:#}");
    ExitCode::SUCCESS
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Returns `yes`, or the driver's error text.
fn said<T>(outcome: Result<T, impl std::fmt::Display>) -> Value {
    match outcome {
        Ok(_) => json!("yes"),
        Err(why) => json!(why.to_string()),
    }
}

fn of_device(device: Device) -> Value {
    let info = match device.info() {
        Ok(info) => info,
        Err(why) => return json!({ "ordinal": device.ordinal(), "error": why.to_string() }),
    };
    let (major, minor) = info.compute_capability;
    let mut all = json!({
        "ordinal": info.ordinal,
        "name": info.name,
        "uuid": info.uuid.to_string(),
        "pci_bus_id": info.pci_bus_id,
        "numa_node": info.numa_node,
        "compute_capability": format!("{major}.{minor}"),
        "multiprocessors": info.multiprocessors,
        "copy_engines": info.copy_engines,
        "unified_addressing": info.unified_addressing,
        "host_register": info.host_register,
        "host_pointer_on_device": info.host_pointer_on_device,
        "dma_buf": info.dma_buf,
        "gpu_direct_rdma": info.gpu_direct_rdma,
        "gpu_direct_rdma_with_vmm": info.gpu_direct_rdma_with_vmm,
        "rdma_writes_ordering": format!("{:?}", info.rdma_writes_ordering),
        "rdma_flush": info.rdma_flush,
        "vmm": info.vmm,
        "vmm_export_fd": info.vmm_export_fd,
        "vmm_export_fabric": info.vmm_export_fabric,
    });
    let tried = tried(device);
    if let (Some(all), Value::Object(tried)) = (all.as_object_mut(), tried) {
        all.extend(tried);
    }
    all
}

/// Results of calls that were made, because the driver's attributes may promise more than works.
fn tried(device: Device) -> Value {
    const LEN: usize = 4 << 20;
    let began = Instant::now();
    let context = match Context::primary(device) {
        Ok(context) => context,
        Err(why) => return json!({ "context": why.to_string() }),
    };
    let context_ms = ms(began);
    let memory = context.memory_info();
    let allocation = DeviceAllocation::new(&context, LEN);
    let mut tried = json!({
        "context_takes_ms": context_ms,
        "memory_bytes": memory.as_ref().map_or(0, |it| it.total),
        "memory_free_bytes": memory.as_ref().map_or(0, |it| it.free),
        "tried_kernel_of_ptx": said(Module::load_ptx(&context, kvferry_cuda::ptx::TEXT)),
        "tried_allocation": said(allocation.as_ref()),
    });
    let Ok(allocation) = allocation else { return tried };
    let exported = |over_pcie| said(dma_buf(&context, allocation.address(), LEN, over_pcie));
    let base = allocation_at(&context, allocation.address()).map_or(0, |(base, _)| base);
    let bytes = granularity(device, true).unwrap_or(2 << 20);
    let vmm = VmmAllocation::new(&context, bytes, true);
    let export_fd = |vmm: &VmmAllocation| said(vmm.export_fd());
    tried["tried_dma_buf"] = exported(false);
    tried["tried_dma_buf_over_pcie"] = exported(true);
    tried["tried_ipc_handle"] = said(IpcHandle::of_allocation(&context, base));
    tried["vmm_granularity_bytes"] = json!(bytes);
    tried["tried_vmm"] = said(vmm.as_ref());
    tried["tried_vmm_export_fd"] = vmm.as_ref().map_or_else(|_| json!("not tried"), export_fd);
    tried
}
