//! Kernel, processors, memory, limits.

use super::finding::{Finding, Group};
use super::host::{Host, Tries};
use kvferry_bench::units;

/// The first kernel with everything that is checked here: `pidfd_open`, a reliable io_uring.
const KERNEL: (u32, u32) = (5, 10);

/// Descriptors of an agent with a few hundred peers, and those of the smallest one.
const OPEN_FILES: u64 = 4096;
const OPEN_FILES_LEAST: u64 = 256;

pub(super) fn check(host: &Host, tries: &Tries) -> Group {
    let findings = [
        Some(kernel(tries)),
        Some(container(host)),
        Some(cores(host, tries)),
        memory(host),
        Some(numa(host)),
        clock(host),
        Some(open_files(tries)),
        Some(io_uring(host, tries)),
    ];
    Group {
        name: "system",
        title: "Kernel, processors, limits".into(),
        findings: findings.into_iter().flatten().collect(),
    }
}

fn kernel(tries: &Tries) -> Finding {
    let mut numbers = tries.kernel.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let version = match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => (0, 0),
    };
    let words = format!("Linux {}, {}", tries.kernel, tries.c_library);
    let older = format!("{words}: older than {}.{}", KERNEL.0, KERNEL.1);
    let fix = "a newer kernel; kvferry does without what this one lacks, and is slower";
    let finding = Finding::ok("kernel", words).note_if(version < KERNEL, older, fix);
    finding.fact("release", tries.kernel.as_str()).fact("c_library", tries.c_library.as_str())
}

/// Inode numbers of a host's initial namespaces.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
const FIRST_USER_NAMESPACE: &str = "user:[4026531837]";

pub(super) fn own_pid_namespace(host: &Host) -> bool {
    host.link("proc/self/ns/pid").is_some_and(|name| name != FIRST_PID_NAMESPACE)
}

pub(super) fn own_user_namespace(host: &Host) -> bool {
    host.link("proc/self/ns/user").is_some_and(|name| name != FIRST_USER_NAMESPACE)
}

fn container(host: &Host) -> Finding {
    let groups = host.text("proc/self/cgroup").unwrap_or_default();
    let kind = if host.exists("var/run/secrets/kubernetes.io") || groups.contains("kubepods") {
        Some("Kubernetes")
    } else if host.exists(".dockerenv") || groups.contains("/docker") {
        Some("Docker")
    } else if host.exists("run/.containerenv") {
        Some("Podman")
    } else {
        None
    };
    let apart = own_pid_namespace(host);
    let words = match (kind, apart) {
        (Some(kind), true) => format!("{kind}; the PID namespace is its own"),
        (Some(kind), false) => format!("{kind}; the PID namespace is the host's"),
        (None, true) => "unknown kind; the PID namespace is its own".to_owned(),
        (None, false) => "none".to_owned(),
    };
    Finding::ok("container", words).fact("kind", kind).fact("own_pid_namespace", apart)
}

/// The number of entries of a list such as `0-3,8`.
fn listed(text: &str) -> usize {
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let first: usize = first.trim().parse().ok()?;
        let last: usize = last.trim().parse().ok()?;
        Some(last.saturating_sub(first) + 1)
    };
    text.split(',').filter_map(count).sum()
}

/// This process's directory in a controller's hierarchy, and the hierarchy's root: inside of a
/// container the path is the host's, and the root is the container's.
fn group_file(host: &Host, controller: &str, file_v2: &str, file_v1: &str) -> Option<String> {
    let groups = host.text("proc/self/cgroup")?;
    let path_of = |wanted: &str| {
        groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let names = fields.nth(1)?;
            names.split(',').any(|name| name == wanted).then(|| fields.next().unwrap_or("/"))
        })
    };
    let at = |dir: &str, path: &str, file: &str| {
        let own = host.text(&format!("sys/fs/cgroup{dir}{}/{file}", path.trim_end_matches('/')));
        own.or_else(|| host.text(&format!("sys/fs/cgroup{dir}/{file}")))
    };
    let unified = path_of("").and_then(|path| at("", path, file_v2));
    unified.or_else(|| at(&format!("/{controller}"), path_of(controller)?, file_v1))
}

/// Processors that the control group allows.
fn quota(host: &Host) -> Option<f64> {
    let limit = group_file(host, "cpu", "cpu.max", "cpu.cfs_quota_us")?;
    let mut fields = limit.split_whitespace();
    let quota: f64 = fields.next()?.parse().ok().filter(|quota| *quota > 0.0)?;
    let period = match fields.next() {
        Some(period) => period.to_owned(),
        None => group_file(host, "cpu", "cpu.max", "cpu.cfs_period_us")?,
    };
    Some(quota / period.parse::<f64>().ok().filter(|period| *period > 0.0)?)
}

fn cores(host: &Host, tries: &Tries) -> Finding {
    let online = host.text("sys/devices/system/cpu/online").map_or(0, |text| listed(&text));
    let (usable, quota) = (tries.cores, quota(host));
    let mut words = format!("{usable} usable of {}", online.max(usable));
    if let Some(quota) = quota {
        words.push_str(&format!("; the control group gives {} of processor time", figure(quota)));
    }
    let finding = if usable == 1 {
        Finding::note("cores", format!("{words}: both ends of a stream share one"))
            .fix("give the process two cores or more")
    } else if quota.is_some_and(|quota| quota < 2.0) {
        Finding::note("cores", format!("{words}: transfers are throttled"))
            .fix("raise the limit (Kubernetes: resources.limits.cpu) to two or more")
    } else {
        Finding::ok("cores", words)
    };
    finding.fact("usable", usable).fact("online", online).fact("quota", quota)
}

fn figure(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn memory(host: &Host) -> Option<Finding> {
    let info = host.text("proc/meminfo")?;
    let line = |name: &str| {
        let kib = info.lines().find_map(|line| line.strip_prefix(name))?;
        kib.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    let (total, free) = (line("MemTotal:")?, line("MemAvailable:")?);
    let number = |v2, v1| group_file(host, "memory", v2, v1)?.parse::<u64>().ok();
    let limit = number("memory.max", "memory.limit_in_bytes").filter(|limit| *limit < total);
    let used = number("memory.current", "memory.usage_in_bytes");
    let mut words = format!("{} of {} free", units::bytes(free), units::bytes(total));
    let room = match (limit, used) {
        (Some(limit), Some(used)) => {
            let room = limit.saturating_sub(used);
            let (room_is, limit_is) = (units::bytes(room), units::bytes(limit));
            words.push_str(&format!("; the control group has {room_is} left of {limit_is}"));
            room.min(free)
        }
        _ => free,
    };
    let fix = "free some, or raise the control group's memory limit";
    let finding = Finding::ok("memory", words.as_str()).note_if(room < 1 << 30, words, fix);
    Some(finding.fact("total", total).fact("available", room).fact("limit", limit))
}

fn numa(host: &Host) -> Finding {
    let nodes = host.text("sys/devices/system/node/online").map_or(1, |text| listed(&text));
    let balancing = host.number("proc/sys/kernel/numa_balancing").is_some_and(|on| on > 0);
    let finding = if nodes <= 1 {
        Finding::ok("numa", "one node")
    } else if balancing {
        let words = format!("{nodes} nodes, and the kernel moves pages between them");
        Finding::note("numa", words).fix("sysctl -w kernel.numa_balancing=0")
    } else {
        Finding::ok("numa", format!("{nodes} nodes, no automatic balancing"))
    };
    finding.fact("nodes", nodes).fact("balancing", balancing)
}

fn clock(host: &Host) -> Option<Finding> {
    let source = host.text("sys/devices/system/clocksource/clocksource0/current_clocksource")?;
    let slow = ["hpet", "acpi_pm", "jiffies", "pit", "xen"].contains(&source.as_str());
    let worse = format!("{source}: reading it costs a microsecond or more");
    let fix = "boot with clocksource=tsc where the processor's counter is stable";
    let finding = Finding::ok("clock", source.as_str()).note_if(slow, worse, fix);
    Some(finding.fact("source", source))
}

fn open_files(tries: &Tries) -> Finding {
    const FIX: &str = "ulimit -n 65536 (systemd: LimitNOFILE=65536, Docker: --ulimit nofile=65536)";
    let finding = match tries.open_files {
        None => Finding::ok("open_files", "no limit"),
        Some(limit) if limit >= OPEN_FILES => Finding::ok("open_files", format!("{limit}")),
        Some(limit) if limit >= OPEN_FILES_LEAST => {
            Finding::note("open_files", format!("{limit}: a few dozen peers use it up")).fix(FIX)
        }
        Some(limit) => Finding::bad(
            "open_files",
            format!("{limit}: too few for an agent and its host process"),
        )
        .fix(FIX),
    };
    finding.fact("limit", tries.open_files)
}

fn io_uring(host: &Host, tries: &Tries) -> Finding {
    let disabled = host.number("proc/sys/kernel/io_uring_disabled");
    let finding = match (tries.io_uring, disabled) {
        (Ok(()), _) => Finding::ok("io_uring", "can be set up"),
        (Err(_), Some(level @ 1..)) => {
            Finding::missing("io_uring", format!("kernel.io_uring_disabled is {level}"))
                .fix("sysctl -w kernel.io_uring_disabled=0; files are read and written by threads without it")
        }
        (Err(rustix::io::Errno::NOSYS), _) => {
            Finding::missing("io_uring", "this kernel is built without it")
                .fix("a kernel with CONFIG_IO_URING; files are read and written by threads without it")
        }
        (Err(why), _) => Finding::missing("io_uring", format!("refused: {why}")).fix(
            "allow io_uring_setup in the container's seccomp profile; files are read and written by threads without it",
        ),
    };
    let finding = finding.of("io_uring");
    finding.fact("usable", tries.io_uring.is_ok()).fact("disabled", disabled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Mark;
    use crate::doctor::tests::{Tree, tries};

    #[test]
    fn lists_of_processors_are_counted() {
        assert_eq!((listed("0"), listed("0-3,8"), listed("0-1,4-7"), listed("")), (1, 5, 6, 0));
    }

    #[test]
    fn limits_of_a_control_group_are_found_in_both_versions() {
        let v2 = Tree::of(&[
            ("proc/self/cgroup", "0::/kubepods/pod1"),
            ("sys/fs/cgroup/kubepods/pod1/cpu.max", "150000 100000"),
            ("sys/fs/cgroup/memory.max", "2147483648"),
            ("sys/fs/cgroup/memory.current", "1610612736"),
            ("proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 30000000 kB"),
        ]);
        assert_eq!(quota(&v2.host()), Some(1.5));
        let cores = cores(&v2.host(), &tries());
        assert_eq!(cores.mark, Mark::Note, "{cores:?}");
        assert!(cores.finding.contains("gives 1.5 of processor time"), "{cores:?}");
        let memory = memory(&v2.host()).expect("it is known");
        assert_eq!(memory.facts["available"], 512 << 20, "{memory:?}");
        assert_eq!(memory.mark, Mark::Note);
        assert!(container(&v2.host()).finding.starts_with("Kubernetes"));
        let v1 = Tree::of(&[
            ("proc/self/cgroup", "4:memory:/job\n1:cpu,cpuacct:/job\n0::/"),
            ("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "400000"),
            ("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000"),
        ]);
        assert_eq!(quota(&v1.host()), Some(4.0));
        let none = Tree::of(&[
            ("proc/self/cgroup", "1:cpu:/"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1"),
        ]);
        assert_eq!(quota(&none.host()), None);
        let none =
            Tree::of(&[("proc/self/cgroup", "0::/"), ("sys/fs/cgroup/cpu.max", "max 100000")]);
        assert_eq!(quota(&none.host()), None);
    }

    #[test]
    fn what_is_too_little_or_too_old_comes_with_its_fix() {
        let odd = Tries {
            kernel: "4.18.0-553.el8".into(),
            open_files: Some(1024),
            io_uring: Err(rustix::io::Errno::PERM),
            cores: 1,
            ..tries()
        };
        let tree = Tree::of(&[
            ("proc/sys/kernel/io_uring_disabled", "2"),
            ("sys/devices/system/node/online", "0-1"),
            ("proc/sys/kernel/numa_balancing", "1"),
            ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet"),
        ]);
        let group = check(&tree.host(), &odd);
        for id in ["kernel", "cores", "numa", "clock", "open_files", "io_uring"] {
            let found = group.findings.iter().find(|f| f.id == id).expect(id);
            assert!(found.mark > Mark::Ok && found.fix.is_some(), "{found:?}");
        }
        let few = Tries { open_files: Some(64), ..tries() };
        assert_eq!(open_files(&few).mark, Mark::Bad);
    }
}
