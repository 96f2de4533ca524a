//! RDMA, CUDA, GPUDirect Storage: devices and the libraries that reach them.

use serde_json::json;

use super::finding::{Finding, Group};
use super::helper::{
    CudaCopies, CudaDevice, CudaFound, CudaMore, CudaTried, Library, TRIAL_BYTES, Untried,
};
use super::host::{Host, Tries};
use super::same_host;
use kvferry_bench::units;

pub(super) fn check(host: &Host, tries: &Tries) -> Group {
    let mut findings = rdma(host, tries);
    findings.extend(cuda(host, tries));
    findings.push(gds(host, tries));
    Group { name: "devices", title: "RDMA, CUDA, storage".into(), findings }
}

/// The most host memory that the copies of a GPU go through.
fn stages_bytes() -> u64 {
    (kvferry_cuda::gpu::stages_max() * kvferry_cuda::gpu::STAGE_BYTES) as u64
}

const RDMA: &str = "sys/class/infiniband";

fn rdma(host: &Host, tries: &Tries) -> Vec<Finding> {
    let names = host.names(RDMA);
    let library = match &tries.verbs {
        Library::Works { file, .. } => format!("; libibverbs is there ({file})"),
        Library::NotInstalled => "; no libibverbs either".to_owned(),
        Library::Broken(why) => format!("; libibverbs: {why}"),
    };
    if names.is_empty() {
        return vec![
            Finding::missing("rdma", format!("no device{library}"))
                .fix("none needed for tcp; else a card, its driver, and /dev/infiniband in a container")
                .fact("devices", 0),
        ];
    }
    let mut findings = vec![match &tries.verbs {
        Library::Works { file, .. } => Finding::ok("rdma", format!("libibverbs ({file})")),
        Library::NotInstalled => Finding::missing("rdma", "devices, but no libibverbs")
            .fix("apt install libibverbs1 ibverbs-providers"),
        Library::Broken(why) => Finding::bad("rdma", format!("libibverbs: {why}"))
            .fix("libibverbs1 and ibverbs-providers of the same release"),
    }];
    findings[0].facts.insert("devices", json!(names.len()));
    for name in &names {
        for port in host.names(&format!("{RDMA}/{name}/ports")) {
            findings.push(rdma_port(host, tries, name, &port));
        }
    }
    findings
}

fn rdma_port(host: &Host, tries: &Tries, name: &str, port: &str) -> Finding {
    let read = |file: &str| host.text(&format!("{RDMA}/{name}/ports/{port}/{file}"));
    // "4: ACTIVE"
    let state = read("state").unwrap_or_default();
    let state = state.split(": ").last().unwrap_or_default().to_lowercase();
    let gid = read("gids/0").filter(|gid| gid.chars().any(|c| c.is_ascii_hexdigit() && c != '0'));
    let mut words = vec![state.clone()];
    words.extend(read("rate").map(|rate| rate.replace("Gb/sec", "Gbit/s")));
    words.extend(read("link_layer"));
    words.extend(gid.as_ref().map(|gid| format!("GID {gid}")));
    words.extend(host.text(&format!("{RDMA}/{name}/fw_ver")).map(|fw| format!("firmware {fw}")));
    let words = words.join(", ");
    let opens = match &tries.verbs {
        Library::Works { found, .. } => {
            found.devices.iter().find(|(device, _)| device == name).map(|(_, opens)| *opens)
        }
        _ => None,
    };
    let finding = match (state.as_str(), opens) {
        ("active", Some(false)) => {
            Finding::missing("rdma_port", format!("{words}; this process may not open it"))
                .fix("pass /dev/infiniband into the container, and lift its memlock limit")
        }
        ("active", _) => Finding::ok("rdma_port", words),
        _ => Finding::note("rdma_port", words)
            .fix("check cable and switch; on InfiniBand, the subnet manager"),
    };
    finding
        .of(format!("rdma {name}:{port}"))
        .fact("device", name)
        .fact("port", port)
        .fact("state", state)
        .fact("gid", gid)
        .fact("opens", opens)
}

/// The kernel's part of the driver, by its own account.
fn driver(host: &Host) -> Option<String> {
    let text = host.text("proc/driver/nvidia/version")?;
    let words = text.lines().next()?.split_whitespace();
    words.map(str::to_owned).find(|word| {
        word.split('.').count() >= 2 && word.split('.').all(|n| n.parse::<u32>().is_ok())
    })
}

fn cuda(host: &Host, tries: &Tries) -> Vec<Finding> {
    let driver = driver(host);
    let version = driver.as_deref().unwrap_or("unknown");
    let first = match &tries.cuda {
        Library::Works { found, .. } if found.devices.is_empty() => {
            Finding::missing("cuda", format!("driver {version}, and no device for this process"))
                .fix("CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all")
        }
        Library::Works { found, file } => {
            let (major, minor) = (found.version / 1000, found.version % 1000 / 10);
            let words = format!("driver {version}, CUDA {major}.{minor} ({file})");
            Finding::ok("cuda", words).fact("cuda_version", found.version)
        }
        Library::NotInstalled if driver.is_some() => {
            Finding::missing("cuda", format!("driver {version} in the kernel, but no libcuda.so.1"))
                .fix(
                    "in a container, start it with --gpus all; else install the driver's libraries",
                )
        }
        Library::NotInstalled => Finding::missing("cuda", "no NVIDIA driver: host memory only")
            .fix("none needed without a GPU; in a container, start it with --gpus all"),
        Library::Broken(why) if driver.is_none() => {
            Finding::missing("cuda", format!("libcuda without a driver in the kernel: {why}"))
                .fix("none needed without a GPU; in a container, start it with --gpus all")
        }
        Library::Broken(why) => {
            Finding::bad("cuda", format!("driver {version} is there, but libcuda fails: {why}"))
                .fix("libcuda and the kernel's driver must be of one version; see nvidia-smi")
        }
    };
    let mut findings = vec![first.fact("driver", driver)];
    if let Library::Works { found, .. } = &tries.cuda {
        for (index, device) in found.devices.iter().enumerate() {
            let node = host.number(&format!("sys/bus/pci/devices/{}/numa_node", device.bus));
            let mut words = vec![device.name.clone(), units::bytes(device.memory_bytes)];
            words.push(format!("PCI {}", device.bus));
            words.extend(node.map(|node| format!("NUMA node {node}")));
            let bar1 = bar1_bytes(host, &device.bus);
            words.extend(bar1.map(|bytes| format!("BAR1 {}", units::bytes(bytes))));
            words.extend(device.more.as_ref().map(about));
            let finding = Finding::ok("cuda_device", words.join(", ")).of(format!("cuda {index}"));
            let finding = finding
                .fact("name", device.name.as_str())
                .fact("memory_bytes", device.memory_bytes)
                .fact("bus", device.bus.as_str())
                .fact("numa_node", node)
                .fact("bar1_bytes", bar1);
            findings.push(match &device.more {
                Some(more) => with_facts(finding, more),
                None => finding,
            });
            findings.extend(worked(index, device));
        }
        if !found.devices.is_empty() {
            findings.push(copies(found));
            findings.push(stages(host, tries, found.devices.len() as u64));
        }
    }
    findings
}

/// A device's name and abilities, for people.
fn about(more: &CudaMore) -> String {
    let (major, minor) = more.compute_capability;
    let exported = if more.dma_buf { "dma-buf" } else { "no dma-buf" };
    let engines = more.copy_engines;
    format!("compute {major}.{minor}, {engines} copy engines, {exported}, {}", more.uuid)
}

fn with_facts(finding: Finding, more: &CudaMore) -> Finding {
    let (major, minor) = more.compute_capability;
    finding
        .fact("uuid", more.uuid.as_str())
        .fact("compute_capability", format!("{major}.{minor}"))
        .fact("multiprocessors", more.multiprocessors)
        .fact("copy_engines", more.copy_engines)
        .fact("dma_buf", more.dma_buf)
        .fact("gpu_direct_rdma", more.gpu_direct_rdma)
        .fact("vmm", more.vmm)
        .fact("vmm_export_fd", more.vmm_export_fd)
        .fact("vmm_export_fabric", more.vmm_export_fabric)
}

/// Bytes of the window through which other devices of the bus reach the device's memory, by the kernel's list of the
/// device's resources: first the registers, then this window.
fn bar1_bytes(host: &Host, bus: &str) -> Option<u64> {
    let text = host.text(&format!("sys/bus/pci/devices/{bus}/resource"))?;
    let mut words = text.lines().nth(1)?.split_whitespace();
    let mut number = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let (first, last) = (number()?, number()?);
    let bytes = last.checked_sub(first)?.checked_add(1)?;
    (last > 0).then_some(bytes)
}

/// The findings on what was tried on a device: the kernel, pinning, exports, the times of copies.
fn worked(index: usize, device: &CudaDevice) -> Vec<Finding> {
    let tried = match &device.tried {
        None => return Vec::new(),
        Some(Err(why)) => return vec![untried(why).of(format!("cuda {index} kernel"))],
        Some(Ok(tried)) => tried,
    };
    let mut findings = vec![kernel(index, tried), pinning(index, tried)];
    findings.extend(device.more.as_ref().map(|more| exports(index, more, tried)));
    findings.push(costs(index, tried));
    findings
}

/// The finding why nothing was tried on a device.
fn untried(why: &Untried) -> Finding {
    let (why, fix) = match why {
        Untried::Unended => (
            "the driver did not answer any more".to_owned(),
            "nvidia-smi, and the kernel's log (dmesg, lines with Xid): the driver hangs or crashes when this GPU, or one \
             before it, is used",
        ),
        Untried::Refused(why) => (
            why.clone(),
            "nvidia-smi shows what else uses the GPU; leave 1 GiB of its memory for this, or let it be shared (compute mode \
             Default)",
        ),
        Untried::Unwanted => ("--no-gpu-trial".to_owned(), "run the doctor without it"),
        Untried::LittleMemory(free) => (
            format!(
                "{} of the GPU's memory are free, and the trial needs {}",
                units::bytes(*free),
                units::bytes(TRIAL_BYTES)
            ),
            "run the doctor before the engine, or leave 1 GiB of the GPU's memory",
        ),
        Untried::Exclusive => (
            "one process at a time may use the GPU (compute mode EXCLUSIVE_PROCESS)".to_owned(),
            "nvidia-smi -c DEFAULT, where the GPU may be shared",
        ),
    };
    Finding::note("cuda_kernel", format!("copies were not tried: {why}")).fix(fix)
}

/// The finding whether the driver compiles the kernel that copies small pieces.
fn kernel(index: usize, tried: &CudaTried) -> Finding {
    let finding = match &tried.kernel {
        Ok(()) => Finding::ok("cuda_kernel", "the driver compiles the kernel for small pieces"),
        Err(why) => {
            let words = format!("small pieces are copied by the copy engine, more slowly: {why}");
            Finding::note("cuda_kernel", words).fix(
                "the driver's compiler (libnvidia-ptxjitcompiler.so.1; in a container \
                 NVIDIA_DRIVER_CAPABILITIES=compute,utility), and a GPU of compute capability 7.0 or later",
            )
        }
    };
    let is_accepted = tried.kernel.is_ok();
    finding
        .of(format!("cuda {index} kernel"))
        .fact("accepted", is_accepted)
        .fact("refusal", tried.kernel.as_ref().err().cloned())
}

/// The finding how fast the driver pins host memory.
fn pinning(index: usize, tried: &CudaTried) -> Finding {
    let finding = match &tried.pinned_per_second {
        Ok(rate) => Finding::ok(
            "cuda_pinning",
            format!("pins {} of host memory a second", units::bytes(*rate)),
        ),
        Err(why) => {
            let words = match tried.pinned_bytes {
                0 => format!("host memory can't be pinned, copies are slow: {why}"),
                some => format!(
                    "{} of host memory can be pinned, and no more, which makes copies slow: {why}",
                    units::bytes(some)
                ),
            };
            Finding::note("cuda_pinning", words)
                .fix("ulimit -l unlimited (Docker: --ulimit memlock=-1), and memory for 64 MiB")
        }
    };
    let rate = tried.pinned_per_second.as_ref().ok().copied();
    finding.of(format!("cuda {index} pinning")).fact("bytes_per_second", rate)
}

/// The finding how the device's memory can be given to other processes.
fn exports(index: usize, more: &CudaMore, tried: &CudaTried) -> Finding {
    let kinds = [
        ("IPC handles", tried.ipc.is_ok()),
        ("file descriptors", more.vmm && more.vmm_export_fd),
        ("fabric handles", more.vmm && more.vmm_export_fabric),
        ("dma-buf", more.dma_buf),
    ];
    let names: Vec<&str> =
        kinds.iter().filter(|(_, works)| *works).map(|(name, _)| *name).collect();
    let ipc = tried.ipc.as_ref().err();
    let ipc = ipc.map_or_else(String::new, |why| format!("; no IPC handles: {why}"));
    let finding = if names.is_empty() {
        let words = format!("memory can't be given to other processes{ipc}");
        Finding::missing("cuda_exports", words)
            .fix("none needed: kvferry copies through host memory")
    } else {
        let words = format!("memory can be given to other processes as {}{ipc}", names.join(", "));
        Finding::ok("cuda_exports", words)
    };
    finding
        .of(format!("cuda {index} exports"))
        .fact("ipc", tried.ipc.is_ok())
        .fact("ipc_refusal", tried.ipc.as_ref().err().cloned())
}

/// The finding where the times come from by which kvferry chooses how to copy.
fn costs(index: usize, tried: &CudaTried) -> Finding {
    let from = match tried.costs.as_str() {
        "setting" => "KVFERRY_GPU_METHOD names the only method",
        "model" => "known for the GPU's model",
        _ => "not known for the GPU's model: the kernel waits for a measurement",
    };
    let then = if tried.is_measured { "; measured in use" } else { "; not measured" };
    let finding = Finding::ok("cuda_costs", format!("{from}{then}")).note_if(
        tried.costs == "unknown" && !tried.is_measured,
        "not known for the GPU's model, and not measured: small pieces are copied without the kernel",
        "unset KVFERRY_GPU_CALIBRATE",
    );
    finding
        .of(format!("cuda {index} times of copies"))
        .fact("source", tried.costs.as_str())
        .fact("measured", tried.is_measured)
}

/// The finding that names the calls by which kvferry copies memory of GPUs.
fn copies(found: &CudaFound) -> Finding {
    let finding = match &found.copies {
        Ok(CudaCopies { batch_call: true }) => {
            Finding::ok("cuda_copies", "many copies in one call of the driver")
        }
        Ok(CudaCopies { batch_call: false }) => {
            let words = "one call of the driver for each copy: many small blocks take longer";
            Finding::note("cuda_copies", words).fix("a driver of CUDA 12.8 or later")
        }
        Err(why) => Finding::bad("cuda_copies", format!("kvferry can't use the driver: {why}"))
            .fix("the error says what is missing; memory of GPUs is refused until then"),
    };
    let batch_call = found.copies.as_ref().ok().map(|copies| copies.batch_call);
    finding.of("cuda copies").fact("batch_call", batch_call)
}

/// The finding whether the host memory of the stages can be pinned.
fn stages(host: &Host, tries: &Tries, devices: u64) -> Finding {
    let needed = devices * stages_bytes();
    let is_free = same_host::has_ipc_lock(host);
    let words = format!("{} of pinned host memory at most", units::bytes(needed));
    let finding = match tries.memlock {
        Some(limit) if limit < needed && !is_free => {
            let words = format!("{words}, and {} may be locked", units::bytes(limit));
            Finding::note("cuda_stages", words).fix(
                "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1), if the log says \
                 that host memory can't be pinned",
            )
        }
        _ => Finding::ok("cuda_stages", words),
    };
    finding.of("cuda stages").fact("bytes", needed).fact("limit", tries.memlock)
}

fn gds(host: &Host, tries: &Tries) -> Finding {
    let module = host.exists("sys/module/nvidia_fs") || host.exists("proc/driver/nvidia-fs");
    let finding = match (&tries.cufile, module) {
        (Library::Works { file, found }, true) => {
            let version =
                found.map_or_else(String::new, |v| format!(" {}.{}", v / 1000, v % 1000 / 10));
            Finding::ok("gds", format!("nvidia-fs and libcufile{version} ({file})"))
        }
        (Library::Works { .. }, false) => Finding::missing("gds", "libcufile, but no nvidia-fs")
            .fix("modprobe nvidia-fs; without it libcufile copies through host memory"),
        (Library::NotInstalled, true) => {
            Finding::missing("gds", "nvidia-fs, but no libcufile.so.0")
                .fix("install libcufile of the CUDA toolkit")
        }
        (Library::NotInstalled, false) => {
            Finding::missing("gds", "neither nvidia-fs nor libcufile")
                .fix("none needed unless storage is to reach GPU memory without a copy")
        }
        (Library::Broken(why), _) => Finding::missing("gds", format!("libcufile: {why}"))
            .fix("libcufile of the CUDA toolkit that fits the driver"),
    };
    finding.of("gds").fact("nvidia_fs", module)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Mark;
    use crate::doctor::helper::{CudaDevice, CudaFound, VerbsFound};
    use crate::doctor::tests::{Tree, tries};

    #[test]
    fn a_port_is_shown_with_state_rate_and_gid() {
        let base = "sys/class/infiniband/mlx5_0";
        let files = [
            (format!("{base}/fw_ver"), "20.38.1002"),
            (format!("{base}/ports/1/state"), "4: ACTIVE"),
            (format!("{base}/ports/1/rate"), "200 Gb/sec (4X HDR)"),
            (format!("{base}/ports/1/link_layer"), "Ethernet"),
            (format!("{base}/ports/1/gids/0"), "fe80:0000:0000:0000:0a00:27ff:fe00:0001"),
            (format!("{base}/ports/2/state"), "1: DOWN"),
            (format!("{base}/ports/2/gids/0"), "0000:0000:0000:0000:0000:0000:0000:0000"),
        ];
        let files: Vec<(&str, &str)> = files.iter().map(|(p, c)| (p.as_str(), *c)).collect();
        let tree = Tree::of(&files);
        let works = |opens| Tries {
            verbs: Library::Works {
                file: "libibverbs.so.1.14".into(),
                found: VerbsFound { devices: vec![("mlx5_0".into(), opens)] },
            },
            ..tries()
        };
        let findings = rdma(&tree.host(), &works(true));
        assert_eq!(findings.len(), 3, "{findings:?}");
        assert_eq!(
            findings[1].finding,
            "active, 200 Gbit/s (4X HDR), Ethernet, GID fe80:0000:0000:0000:0a00:27ff:fe00:0001, \
             firmware 20.38.1002"
        );
        assert_eq!((findings[1].mark, findings[2].mark), (Mark::Ok, Mark::Note));
        let findings = rdma(&tree.host(), &works(false));
        assert!(findings[1].fix.as_deref().is_some_and(|fix| fix.contains("/dev/infiniband")));
        let findings = rdma(&tree.host(), &tries());
        assert!(findings[0].fix.as_deref().is_some_and(|fix| fix.contains("apt install")));
    }

    #[test]
    fn a_gpu_without_its_library_and_a_library_without_its_gpu_are_different_things() {
        let driven = Tree::of(&[(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC 13",
        )]);
        let plain = Tree::of(&[]);
        assert_eq!(driver(&driven.host()).as_deref(), Some("570.86.15"));
        let broken = Tries { cuda: Library::Broken("cuInit: error 803".into()), ..tries() };
        assert_eq!(cuda(&driven.host(), &broken)[0].mark, Mark::Bad);
        assert_eq!(cuda(&plain.host(), &broken)[0].mark, Mark::Missing);
        assert_eq!(cuda(&driven.host(), &tries())[0].mark, Mark::Missing);
        assert!(cuda(&plain.host(), &tries())[0].finding.contains("host memory only"));
        let device = CudaDevice {
            name: "NVIDIA H200".into(),
            memory_bytes: 141 << 30,
            bus: "0000:1b:00.0".into(),
            more: None,
            tried: None,
        };
        let copies = Err("CUDA 11.3 is too old".to_owned());
        let found = CudaFound { version: 12080, devices: vec![device], copies };
        let works = Tries {
            cuda: Library::Works { file: "libcuda.so.570.86.15".into(), found },
            ..tries()
        };
        let findings = cuda(&driven.host(), &works);
        assert_eq!(findings[0].finding, "driver 570.86.15, CUDA 12.8 (libcuda.so.570.86.15)");
        assert_eq!(findings[1].finding, "NVIDIA H200, 141 GiB, PCI 0000:1b:00.0");
        assert_eq!(findings[2].mark, Mark::Bad);
        assert!(findings[2].finding.contains("CUDA 11.3 is too old"), "{findings:?}");
    }

    #[test]
    fn the_window_of_the_bus_is_the_second_resource_of_the_device() {
        let file = "sys/bus/pci/devices/0000:1b:00.0/resource";
        let text = "0x00000000c0000000 0x00000000c0ffffff 0x0000000000040200\n\
                    0x0000210000000000 0x0000211fffffffff 0x000000000014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000";
        let tree = Tree::of(&[(file, text)]);
        assert_eq!(bar1_bytes(&tree.host(), "0000:1b:00.0"), Some(128 << 30));
        assert_eq!(bar1_bytes(&tree.host(), "0000:1c:00.0"), None);
        for text in ["", "0x1 0x2 0x0", "0x1 0x2 0x0\n0x0 0x0 0x0", "0x1 0x2 0x0\nnothing"] {
            let tree = Tree::of(&[(file, text)]);
            assert_eq!(bar1_bytes(&tree.host(), "0000:1b:00.0"), None, "{text}");
        }
    }

    fn refused<T>() -> Result<T, String> {
        Err("no".to_owned())
    }

    #[test]
    fn what_a_device_refuses_is_a_note_with_what_to_do_about_it() {
        let device = |tried| CudaDevice {
            name: "NVIDIA H200".into(),
            memory_bytes: 141 << 30,
            bus: "0000:1b:00.0".into(),
            more: None,
            tried,
        };
        let refused_by_driver = Untried::Refused("CUDA_ERROR_OUT_OF_MEMORY".into());
        let others = [Untried::Unended, Untried::Unwanted, Untried::Exclusive];
        let little = Untried::LittleMemory(512 << 20);
        for why in others.into_iter().chain([refused_by_driver, little]) {
            let busy = worked(0, &device(Some(Err(why))));
            assert!(busy.len() == 1 && busy[0].mark == Mark::Note && busy[0].fix.is_some());
        }
        let tried = CudaTried {
            kernel: refused(),
            pinned_per_second: refused(),
            pinned_bytes: 0,
            ipc: refused(),
            costs: "unknown".into(),
            is_measured: false,
        };
        let findings = worked(0, &device(Some(Ok(tried))));
        assert_eq!(findings.len(), 3, "{findings:?}");
        for finding in findings {
            assert!(finding.mark == Mark::Note && finding.fix.is_some(), "{finding:?}");
        }
        assert!(worked(0, &device(None)).is_empty());
    }

    #[test]
    fn single_copies_and_a_limit_of_pinned_memory_are_noted() {
        let found = |batch_call| CudaFound {
            version: 12060,
            devices: Vec::new(),
            copies: Ok(CudaCopies { batch_call }),
        };
        assert_eq!(copies(&found(true)).mark, Mark::Ok);
        let single = copies(&found(false));
        assert!(single.mark == Mark::Note && single.fix.is_some_and(|fix| fix.contains("12.8")));
        let plain = Tree::of(&[]);
        let limited = |memlock| Tries { memlock, ..tries() };
        let mark = |memlock, devices| stages(&plain.host(), &limited(memlock), devices).mark;
        assert_eq!((mark(None, 8), mark(Some(256 << 20), 1)), (Mark::Ok, Mark::Ok));
        assert_eq!((mark(Some(256 << 20), 2), mark(Some(8 << 20), 1)), (Mark::Note, Mark::Note));
        let free = Tree::of(&[("proc/self/status", "CapEff:\t0000000000004000\n")]);
        assert_eq!(stages(&free.host(), &limited(Some(8 << 20)), 1).mark, Mark::Ok);
    }

    #[test]
    fn gds_needs_both_halves() {
        let module = Tree::of(&[("proc/driver/nvidia-fs/version", "2.19")]);
        let works = Tries {
            cufile: Library::Works { file: "libcufile.so.1.13".into(), found: Some(1130) },
            ..tries()
        };
        assert_eq!(gds(&module.host(), &works).mark, Mark::Ok);
        assert!(gds(&module.host(), &works).finding.contains("libcufile 1.13"));
        for (tree, tries) in [(&Tree::of(&[]), &works), (&module, &tries())] {
            let found = gds(&tree.host(), tries);
            assert!(found.mark == Mark::Missing && found.fix.is_some(), "{found:?}");
        }
    }
}
