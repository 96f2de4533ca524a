//! `kvferry doctor`: checks this host, or the way to an agent elsewhere.
//!
//! `host.rs` reads everything: files of the kernel, under a root that tests replace, and results of
//! trials. The checks (`system.rs`, `same_host.rs`, `network.rs`, `devices.rs`) turn that into findings and
//! read nothing else. `helper.rs` tries what may crash or hang in processes of their own. `peer.rs` is
//! `doctor HOST:PORT`. `finding.rs` documents the JSON.

mod devices;
mod finding;
pub(crate) mod helper;
mod host;
mod network;
mod peer;
mod same_host;
mod show;
mod system;

use clap::Args;
use kvferry::{Config, Transports};

use crate::output;
use kvferry_bench::failure::Failure;

use finding::{Mark, Report};
use host::{Host, Tries};
use network::Settings;

const EXAMPLES: &str = "\
Examples:
  kvferry doctor                       this host: kernel, memory, network, RDMA, CUDA
  kvferry doctor 10.0.0.7:18515        an agent there: reachable, secret, transports, how fast
  kvferry doctor --json | jq '.groups[].findings[] | select(.mark != \"ok\")'

Run it where the engine runs: in the same container, as the same user, with the same KVFERRY_
variables. Each line has a mark:
  ok       works
  note     works, but could be better, or is worth knowing
  missing  something optional is not installed
  bad      something that kvferry is configured to use does not work
The line after an arrow says what to do.

An agent elsewhere sends what it sends every peer. Its memory is never written. Reads are measured
on memory that its peers may read, 64 MiB at a time for a second (not with --no-bandwidth). Writes
are measured at a `kvferry bench transfers --serve`, which has memory for them.

Each GPU that this process sees is tried, which takes some hundred MB of its memory for a moment;
not with --no-gpu-trial, nor a GPU with less than 1 GiB free or in exclusive compute mode.

Secrets and configurations are never shown. --json prints one object, schema kvferry.doctor/1:
version, target, worst, counts, and groups of findings: id, subject, mark, finding, fix, facts.

Exit codes:
  0  nothing is bad
  1  something is bad, or the agent does not answer or refuses this one
  2  the command line is wrong";

/// Check this host: what works, and what to do about the rest. With HOST:PORT, check an agent there:
/// whether it can be reached from here, over which transports, and how fast.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// An agent, or a `kvferry bench transfers --serve`
    #[arg(value_name = "HOST:PORT")]
    target: Option<String>,
    /// Seconds that each step with HOST:PORT may take
    #[arg(long, default_value_t = 5, value_name = "SECONDS", requires = "target",
          value_parser = clap::value_parser!(u16).range(1..=600))]
    timeout: u16,
    /// Do not measure bandwidth
    #[arg(long, requires = "target")]
    no_bandwidth: bool,
    /// Do not try GPUs: that makes a context on each for a moment
    #[arg(long, conflicts_with = "target")]
    no_gpu_trial: bool,
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let report = match &args.target {
        None => this_host(&Host::at("/"), &Tries::here(!args.no_gpu_trial), &settings()),
        Some(target) => peer::look(target, args)?,
    };
    output::show(&report, args.json)?;
    match report.counts[&Mark::Bad] {
        0 => Ok(()),
        1 => Err(Failure::Check("one finding is bad".into())),
        bad => Err(Failure::Check(format!("{bad} findings are bad"))),
    }
}

impl output::Report for Report {
    fn text(&self) -> String {
        show::text(self, show::Style::here())
    }
}

fn settings() -> Settings {
    Settings::of(Config::from_env().map_err(|error| error.to_string()))
}

/// Whether this build has the transport.
fn has_transport(name: &str) -> bool {
    Transports::parse(name).is_ok()
}

fn this_host(host: &Host, tries: &Tries, settings: &Settings) -> Report {
    let groups = vec![
        system::check(host, tries),
        same_host::check(host, tries, has_transport("local")),
        network::check(host, tries, settings),
        devices::check(host, tries),
    ];
    Report::new(None, groups)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU64, Ordering};

    use kvferry_sys::net::InterfaceAddress;

    use super::helper::{
        CudaCopies, CudaDevice, CudaFound, CudaMore, CudaTried, Library, VerbsFound,
    };
    use super::*;

    /// Files of an imaginary kernel. Removed on drop.
    pub(super) struct Tree(PathBuf);

    impl Tree {
        pub(super) fn of(files: &[(&str, &str)]) -> Tree {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("kvferry-doctor-{}-{number}", std::process::id());
            let tree = Tree(std::env::temp_dir().join(name));
            for (path, content) in files {
                let path = tree.made(path);
                fs::write(path, content).expect("a file");
            }
            tree
        }

        fn made(&self, path: &str) -> PathBuf {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().expect("not the root")).expect("a directory");
            path
        }

        pub(super) fn linked(self, path: &str, target: &str) -> Tree {
            std::os::unix::fs::symlink(target, self.made(path)).expect("a link");
            self
        }

        pub(super) fn host(&self) -> Host {
            Host::at(&self.0)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    /// A host where everything works and nothing special is installed.
    pub(super) fn tries() -> Tries {
        Tries {
            kernel: "6.12.1-generic".into(),
            c_library: "glibc 2.36".into(),
            cores: 8,
            pidfd: Ok(()),
            memfd: Ok(()),
            io_uring: Ok(()),
            read_unrelated: Ok(()),
            read_child: Ok(()),
            memlock: None,
            open_files: Some(1 << 20),
            addresses: Vec::new(),
            verbs: Library::NotInstalled,
            cuda: Library::NotInstalled,
            cufile: Library::NotInstalled,
        }
    }

    /// A machine with everything, for the golden report.
    fn machine() -> (Tree, Tries, Settings) {
        let tree = Tree::of(&[
            ("proc/self/cgroup", "0::/"),
            ("proc/self/status", "Uid:\t1000\t1000\nSeccomp:\t2\nCapEff:\t0000000000000000\n"),
            ("proc/meminfo", "MemTotal:       65536000 kB\nMemAvailable:   32768000 kB\n"),
            ("proc/sys/kernel/io_uring_disabled", "0"),
            ("proc/sys/kernel/numa_balancing", "0"),
            ("proc/sys/kernel/yama/ptrace_scope", "1"),
            ("proc/sys/net/core/somaxconn", "4096"),
            ("proc/sys/net/core/rmem_max", "212992"),
            ("proc/sys/net/core/wmem_max", "212992"),
            ("proc/sys/net/ipv4/tcp_abort_on_overflow", "0"),
            ("proc/sys/net/ipv4/tcp_available_congestion_control", "reno cubic"),
            ("proc/sys/net/ipv4/tcp_congestion_control", "cubic"),
            ("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456"),
            ("proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t67108864"),
            ("proc/sys/net/ipv4/tcp_slow_start_after_idle", "0"),
            ("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999"),
            ("proc/driver/nvidia/version", "NVRM version: NVIDIA Kernel Module  570.86.15  x"),
            ("sys/devices/system/cpu/online", "0-15"),
            ("sys/devices/system/node/online", "0-1"),
            ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "1024"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "512"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never"),
            ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]"),
            ("sys/class/net/eth0/operstate", "up"),
            ("sys/class/net/eth0/speed", "100000"),
            ("sys/class/net/eth0/mtu", "9000"),
            ("sys/class/net/lo/operstate", "unknown"),
            ("sys/class/infiniband/mlx5_0/fw_ver", "20.38.1002"),
            ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
            ("sys/class/infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (4X EDR)"),
            ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet"),
            ("sys/class/infiniband/mlx5_0/ports/1/gids/0", "fe80::a00:27ff:fe00:1"),
        ]);
        let tries = Tries {
            memlock: Some(8 << 20),
            read_unrelated: Err("Operation not permitted (os error 1)".into()),
            addresses: vec![InterfaceAddress {
                interface: "eth0".into(),
                address: "10.0.0.7".parse().expect("an address"),
                prefix_len: 24,
            }],
            verbs: Library::Works {
                file: "libibverbs.so.1.14.44.0".into(),
                found: VerbsFound { devices: vec![("mlx5_0".into(), true)] },
            },
            cuda: Library::Works {
                file: "libcuda.so.570.86.15".into(),
                found: CudaFound {
                    version: 12080,
                    devices: vec![CudaDevice {
                        name: "NVIDIA H200".into(),
                        memory_bytes: 141 << 30,
                        bus: "0000:1b:00.0".into(),
                        more: Some(CudaMore {
                            uuid: "GPU-8c1b7d5e-0000-1111-2222-333344445555".into(),
                            compute_capability: (9, 0),
                            multiprocessors: 132,
                            copy_engines: 3,
                            dma_buf: true,
                            gpu_direct_rdma: true,
                            vmm: true,
                            vmm_export_fd: true,
                            vmm_export_fabric: false,
                        }),
                        tried: Some(Ok(CudaTried {
                            kernel: Ok(()),
                            pinned_per_second: Ok(8 << 30),
                            pinned_bytes: 64 << 20,
                            ipc: Ok(()),
                            costs: "model".into(),
                            is_measured: true,
                        })),
                    }],
                    copies: Ok(CudaCopies { batch_call: true }),
                },
            },
            cufile: Library::Broken("libmount.so.1: cannot open shared object file".into()),
            ..tries()
        };
        let mut config = Config::default();
        config.listen = Some("10.0.0.7:18515".into());
        config.advertise = Some("node-3:18515".into());
        config.transports = Transports::only(kvferry::TransportKind::TCP);
        config.secret = kvferry::Secret::new("hush-hush");
        (tree, tries, Settings::of(Ok(config)))
    }

    #[test]
    fn the_report_for_programs_stays_as_it_is() {
        let (tree, tries, mut settings) = machine();
        // What this host's routes say is no part of the golden report.
        settings.everywhere = Err("not looked at".into());
        let mut report = this_host(&tree.host(), &tries, &settings);
        report.version = "0.0.0";
        let json = serde_json::to_string_pretty(&report).expect("plain values") + "\n";
        let golden = include_str!("golden.json");
        assert!(!json.contains("hush"), "the secret is in the report");
        if json != golden {
            let path = std::env::temp_dir().join("kvferry-doctor-golden.json");
            fs::write(&path, &json).expect("a file");
            panic!("the report differs from golden.json; what it is now: {}", path.display());
        }
    }

    #[test]
    fn every_finding_that_is_not_ok_has_its_fix() {
        let (tree, tries, settings) = machine();
        let bare = this_host(&Tree::of(&[]).host(), &super::tests::tries(), &settings);
        for report in [this_host(&tree.host(), &tries, &settings), bare] {
            for finding in report.groups.iter().flat_map(|group| &group.findings) {
                assert_eq!(finding.mark == Mark::Ok, finding.fix.is_none(), "{finding:?}");
            }
        }
    }
}
