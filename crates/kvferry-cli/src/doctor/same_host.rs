//! Access between processes of this host, and kinds of memory.

use super::finding::{Finding, Group};
use super::host::{Host, Tries};
use super::system::{own_pid_namespace, own_user_namespace};
use kvferry_bench::units;

const CAP_IPC_LOCK: u64 = 1 << 14;
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// Locked memory below this is not enough to register buffers with a network card.
const MEMLOCK: u64 = 1 << 30;

pub(super) fn check(host: &Host, tries: &Tries, has_local: bool) -> Group {
    let findings = [
        Some(pidfd(tries)),
        Some(process_vm(host, tries)),
        Some(ptrace_scope(host, tries)),
        seccomp(host),
        user(host),
        Some(same_host(host, tries, has_local)),
        Some(memfd(tries)),
        Some(huge_pages(host)),
        transparent(host),
        shared_transparent(host),
        Some(memlock(host, tries)),
    ];
    Group {
        name: "same_host",
        title: "Between processes of this host, and memory".into(),
        findings: findings.into_iter().flatten().collect(),
    }
}

fn pidfd(tries: &Tries) -> Finding {
    match tries.pidfd {
        Ok(()) => Finding::ok("pidfd", "a process can be watched for its exit"),
        Err(why) => Finding::missing("pidfd", format!("pidfd_open: {why}"))
            .fix("a kernel from 5.3 on, and a seccomp profile that allows pidfd_open"),
    }
}

fn capabilities(host: &Host) -> u64 {
    host.status("CapEff").and_then(|hex| u64::from_str_radix(&hex, 16).ok()).unwrap_or(0)
}

fn process_vm(host: &Host, tries: &Tries) -> Finding {
    let finding = match (&tries.read_unrelated, &tries.read_child) {
        (Ok(()), _) => Finding::ok("process_vm", "one process read 8 known bytes of another"),
        (Err(why), Ok(())) => Finding::missing(
            "process_vm",
            format!("only of processes it started itself: {why}"),
        )
        .fix(match scope(host) {
            Some(1..) => "see ptrace scope",
            _ => "a security module is in the way: allow ptrace between processes of one user",
        }),
        (Err(why), Err(_)) if why.contains("os error 38") => {
            Finding::missing("process_vm", "the kernel has no process_vm_readv for this process")
                .fix(
                    "a kernel with CONFIG_CROSS_MEMORY_ATTACH, or a seccomp profile that allows it",
                )
        }
        (Err(why), Err(_)) => Finding::missing("process_vm", format!("refused: {why}")).fix(
            "start the container with --cap-add=SYS_PTRACE, or with a seccomp profile that allows \
             process_vm_readv and process_vm_writev",
        ),
    };
    let usable = tries.read_unrelated.is_ok();
    finding.of("process_vm").fact("unrelated", usable).fact("child", tries.read_child.is_ok())
}

fn scope(host: &Host) -> Option<u64> {
    host.number("proc/sys/kernel/yama/ptrace_scope")
}

fn ptrace_scope(host: &Host, tries: &Tries) -> Finding {
    const FIX: &str = "sysctl -w kernel.yama.ptrace_scope=0, or give both processes CAP_SYS_PTRACE";
    let scope = scope(host);
    let words = match scope {
        None => "no Yama in this kernel".to_owned(),
        Some(0) => "0: processes of one user may reach each other".to_owned(),
        Some(1) => "1: a process may reach only those it started".to_owned(),
        Some(2) => "2: only with CAP_SYS_PTRACE".to_owned(),
        Some(3) => "3: no process may, until the next boot".to_owned(),
        Some(other) => other.to_string(),
    };
    let finding = match scope {
        None | Some(0) => Finding::ok("ptrace_scope", words),
        Some(_) if tries.read_unrelated.is_ok() => {
            Finding::ok("ptrace_scope", format!("{words}; this process has what it takes"))
        }
        Some(3) => Finding::note("ptrace_scope", words)
            .fix("set kernel.yama.ptrace_scope=0 in /etc/sysctl.d and boot again"),
        Some(_) => Finding::note("ptrace_scope", words).fix(FIX),
    };
    finding.fact("scope", scope)
}

fn seccomp(host: &Host) -> Option<Finding> {
    let mode: u64 = host.status("Seccomp")?.parse().ok()?;
    let words = match mode {
        0 => "no filter on this process",
        1 => "strict mode",
        _ => "a filter is on this process; what it refuses is shown line by line",
    };
    Some(Finding::ok("seccomp", words).fact("mode", mode))
}

fn user(host: &Host) -> Option<Finding> {
    let uid: u64 = host.status("Uid")?.split_whitespace().next()?.parse().ok()?;
    let ptrace = capabilities(host) & CAP_SYS_PTRACE != 0;
    let namespace = own_user_namespace(host);
    let mut words =
        format!("uid {uid}, {} CAP_SYS_PTRACE", if ptrace { "with" } else { "without" });
    if namespace {
        words.push_str(", in a user namespace of its own");
    }
    let finding = Finding::ok("user", words).fact("uid", uid);
    Some(finding.fact("cap_sys_ptrace", ptrace).fact("own_user_namespace", namespace))
}

/// The transport between two processes of this host.
fn same_host(host: &Host, tries: &Tries, has_local: bool) -> Finding {
    let apart = own_pid_namespace(host);
    let able = tries.read_unrelated.is_ok() && tries.pidfd.is_ok();
    let finding = if !able {
        let what = if tries.read_unrelated.is_err() { "process_vm" } else { "pidfd" };
        Finding::note("same_host", format!("`tcp` is forced by what {what} says"))
            .fix(format!("see {what}; until then processes of this host talk over loopback"))
    } else if !has_local {
        Finding::ok(
            "same_host",
            "nothing here forces `tcp` between processes of one user, but this build has no other",
        )
    } else if apart {
        Finding::note(
            "same_host",
            "`local` with processes of this container and user; `tcp` with those of other containers",
        )
        .fix(
            "a shared PID namespace where `local` is wanted across containers (Kubernetes: \
             shareProcessNamespace: true; Docker: --pid=container:NAME)",
        )
    } else {
        Finding::ok("same_host", "`local` between processes of one user")
    };
    finding.fact("forced_to_tcp", !able)
}

fn memfd(tries: &Tries) -> Finding {
    match tries.memfd {
        Ok(()) => Finding::ok("memfd", "memory can be shared by descriptor"),
        Err(why) => Finding::missing("memfd", format!("memfd_create: {why}"))
            .fix("a seccomp profile that allows memfd_create"),
    }
}

fn huge_pages(host: &Host) -> Finding {
    let size = |kib: u64| {
        let read = |file| host.number(&format!("sys/kernel/mm/hugepages/hugepages-{kib}kB/{file}"));
        (read("free_hugepages").unwrap_or(0), read("nr_hugepages").unwrap_or(0))
    };
    let ((small_free, small), (large_free, large)) = (size(2048), size(1 << 20));
    let words = format!("2 MiB: {small_free} free of {small}; 1 GiB: {large_free} free of {large}");
    let finding = if small_free + large_free > 0 {
        Finding::ok("huge_pages", words)
    } else {
        Finding::missing("huge_pages", words)
            .fix("sysctl -w vm.nr_hugepages=1024 for 2 GiB, before engines start")
    };
    finding
        .fact("free_2mib", small_free)
        .fact("total_2mib", small)
        .fact("free_1gib", large_free)
        .fact("total_1gib", large)
}

const THP: &str = "sys/kernel/mm/transparent_hugepage";

fn transparent(host: &Host) -> Option<Finding> {
    let mode = host.chosen(&format!("{THP}/enabled"))?;
    let worse = "never: ordinary memory has small pages only";
    let fix = format!("echo madvise > /{THP}/enabled");
    let finding = Finding::ok("thp", mode.as_str()).note_if(mode == "never", worse, &fix);
    Some(finding.of("thp").fact("mode", mode))
}

fn shared_transparent(host: &Host) -> Option<Finding> {
    let mode = host.chosen(&format!("{THP}/shmem_enabled"))?;
    let never = ["never", "deny"].contains(&mode.as_str());
    let worse = format!("{mode}: memory shared by descriptor has small pages");
    let fix = format!("echo advise > /{THP}/shmem_enabled");
    let finding = Finding::ok("thp_shared", mode.as_str()).note_if(never, worse, &fix);
    Some(finding.of("thp, shared").fact("mode", mode))
}

/// Whether the limit of locked memory does not apply to this process.
pub(super) fn has_ipc_lock(host: &Host) -> bool {
    capabilities(host) & CAP_IPC_LOCK != 0
}

fn memlock(host: &Host, tries: &Tries) -> Finding {
    let free = has_ipc_lock(host);
    let finding = match tries.memlock {
        None => Finding::ok("memlock", "no limit"),
        Some(limit) if free => {
            let limit = units::bytes(limit);
            Finding::ok("memlock", format!("{limit}, not applied: this process has CAP_IPC_LOCK"))
        }
        Some(limit) if limit >= MEMLOCK => Finding::ok("memlock", units::bytes(limit)),
        Some(limit) => {
            let words = format!("{}: too little for RDMA and pinned memory", units::bytes(limit));
            Finding::note("memlock", words).fix(
                "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1)",
            )
        }
    };
    finding.fact("limit", tries.memlock).fact("cap_ipc_lock", free)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Mark;
    use crate::doctor::tests::{Tree, tries};

    fn refused() -> Result<(), String> {
        Err("Operation not permitted (os error 1)".into())
    }

    #[test]
    fn yama_is_named_where_only_a_child_can_be_read() {
        let yama = Tree::of(&[("proc/sys/kernel/yama/ptrace_scope", "1\n")]);
        let odd = Tries { read_unrelated: refused(), ..tries() };
        let found = process_vm(&yama.host(), &odd);
        assert_eq!((found.mark, found.fix.as_deref()), (Mark::Missing, Some("see ptrace scope")));
        let scope = ptrace_scope(&yama.host(), &odd);
        assert!(scope.fix.expect("there is one").contains("ptrace_scope=0"));
        assert_eq!(ptrace_scope(&yama.host(), &tries()).mark, Mark::Ok, "with CAP_SYS_PTRACE");
        let conclusion = same_host(&yama.host(), &odd, true);
        assert!(conclusion.finding.contains("`tcp` is forced"), "{conclusion:?}");
        assert_eq!(conclusion.facts["forced_to_tcp"], true);
    }

    #[test]
    fn a_missing_call_a_filter_and_a_namespace_are_told_apart() {
        let plain = Tree::of(&[]);
        let none = Err("Function not implemented (os error 38)".to_owned());
        let odd = Tries { read_unrelated: none.clone(), read_child: none, ..tries() };
        let fix = process_vm(&plain.host(), &odd).fix.expect("there is one");
        assert!(fix.contains("CONFIG_CROSS_MEMORY_ATTACH"), "{fix}");
        let odd = Tries { read_unrelated: refused(), read_child: refused(), ..tries() };
        let fix = process_vm(&plain.host(), &odd).fix.expect("there is one");
        assert!(fix.contains("SYS_PTRACE") && fix.contains("seccomp"), "{fix}");
        let container = Tree::of(&[]).linked("proc/self/ns/pid", "pid:[4026532999]");
        let found = same_host(&container.host(), &tries(), true);
        assert!(found.fix.expect("there is one").contains("shareProcessNamespace"));
        assert_eq!(same_host(&plain.host(), &tries(), true).mark, Mark::Ok);
        assert!(same_host(&plain.host(), &tries(), false).finding.contains("this build has no"));
    }

    #[test]
    fn pages_and_locked_memory_are_judged() {
        let tree = Tree::of(&[
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "8"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"),
            ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never"),
            ("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\nUid:\t7\t7\t7\t7"),
        ]);
        assert_eq!(huge_pages(&tree.host()).facts["free_2mib"], 3);
        assert_eq!(huge_pages(&tree.host()).mark, Mark::Ok);
        assert_eq!(huge_pages(&Tree::of(&[]).host()).mark, Mark::Missing);
        assert_eq!(transparent(&tree.host()).expect("known").mark, Mark::Note);
        assert_eq!(shared_transparent(&tree.host()).expect("known").mark, Mark::Ok);
        let limited = Tries { memlock: Some(64 << 10), ..tries() };
        assert_eq!(memlock(&tree.host(), &limited).mark, Mark::Ok, "CAP_IPC_LOCK");
        assert_eq!(memlock(&Tree::of(&[]).host(), &limited).mark, Mark::Note);
        assert_eq!(user(&tree.host()).expect("known").facts["uid"], 7);
    }
}
