//! Counting the system calls of processes while something runs: by `perf`, which does not disturb
//! them, else by `strace`, which slows them down.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::content::random;
use crate::failure::Failure;

/// How they can be counted here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counter {
    Perf,
    Strace,
}

const EVENT: &str = "raw_syscalls:sys_enter";

impl Counter {
    /// The best there is, or why there is none.
    pub(super) fn find() -> Result<Counter, String> {
        let works = |line: &[&str]| {
            let mut probe = Command::new(line[0]);
            probe.args(&line[1..]).stdin(Stdio::null()).stdout(Stdio::null());
            probe.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
        };
        if works(&["perf", "stat", "-e", EVENT, "true"]) {
            return Ok(Counter::Perf);
        }
        if works(&["strace", "-c", "-f", "-o", "/dev/null", "true"]) {
            return Ok(Counter::Strace);
        }
        Err(format!("neither `perf stat -e {EVENT}` nor `strace` works here"))
    }

    /// System calls of all threads of these processes while `work` runs.
    pub(super) fn count(
        self,
        pids: &[u32],
        work: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<u64, Failure> {
        match self {
            Counter::Perf => perf(pids, work),
            Counter::Strace => strace(pids, work),
        }
    }
}

fn perf(pids: &[u32], work: impl FnOnce() -> Result<(), Failure>) -> Result<u64, Failure> {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let line = ["stat", "-x", ",", "-D", "-1", "-e", EVENT, "--control", "fd:0,1", "-p"];
    let mut perf = Command::new("perf")
        .args(line)
        .arg(pids.join(","))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (mut tell, answers) = (perf.stdin.take().expect("piped"), perf.stdout.take());
    let mut answers = BufReader::new(answers.expect("piped"));
    command(&mut tell, &mut answers, "enable")?;
    let worked = work();
    command(&mut tell, &mut answers, "disable")?;
    interrupt(&perf)?;
    let mut said = String::new();
    perf.stderr.take().expect("piped").read_to_string(&mut said)?;
    perf.wait()?;
    worked?;
    let line = said.lines().find(|line| line.contains(EVENT)).unwrap_or_default();
    let count = line.split(',').next().and_then(|count| count.parse().ok());
    count.ok_or_else(|| Failure::Failed(format!("perf says: {said}")))
}

fn command(
    tell: &mut ChildStdin,
    answers: &mut BufReader<ChildStdout>,
    what: &str,
) -> Result<(), Failure> {
    tell.write_all(format!("{what}\n").as_bytes())?;
    let mut answer = Vec::new();
    answers.read_until(b'\n', &mut answer)?;
    if answer.windows(3).any(|word| word == b"ack") {
        return Ok(());
    }
    Err(Failure::Failed(format!("perf does not {what}")))
}

fn interrupt(process: &Child) -> Result<(), Failure> {
    let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
    let sent = kill_process(pid.expect("a process id is a positive i32"), Signal::INT);
    sent.map_err(|error| Failure::Failed(error.to_string()))
}

fn strace(pids: &[u32], work: impl FnOnce() -> Result<(), Failure>) -> Result<u64, Failure> {
    /// Nothing says that it is attached.
    const ATTACHED: Duration = Duration::from_millis(500);
    let file = std::env::temp_dir().join(format!("kvferry-bench-{:016x}", random()));
    let mut strace = Command::new("strace");
    strace.args(["-c", "-f", "-q", "-U", "calls", "-o"]).arg(&file);
    for pid in pids {
        strace.args(["-p", &pid.to_string()]);
    }
    let mut strace = strace.stdin(Stdio::null()).stderr(Stdio::null()).spawn()?;
    std::thread::sleep(ATTACHED);
    let worked = work();
    interrupt(&strace)?;
    strace.wait()?;
    let said = fs::read_to_string(&file).unwrap_or_default();
    let _ = fs::remove_file(&file);
    worked?;
    let total = said.lines().find_map(|line| line.trim().strip_suffix("total"));
    let total = total.and_then(|total| total.trim().parse().ok());
    total.ok_or_else(|| Failure::Failed("strace did not count".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_this_process_are_counted() {
        let calls = || {
            (0..1000).for_each(|_| drop(fs::metadata("/")));
            Ok(())
        };
        let counted = Counter::find().and_then(|counter| {
            counter.count(&[std::process::id()], calls).map_err(|failure| failure.to_string())
        });
        match counted {
            Ok(counted) => assert!(counted >= 1000, "{counted}"),
            Err(why) => {
                let line = format!("SKIPPED: counting system calls: {why}\n");
                let _ = std::io::stderr().write_all(line.as_bytes());
            }
        }
    }
}
