//! fio, the baseline: <https://fio.readthedocs.io>.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::failure::Failure;
use crate::options::Op;

use super::{Case, Mode};

pub(super) struct Fio {
    version: String,
}

/// Finds fio on the search path. `None` if it is not there.
pub(super) fn find() -> Option<Fio> {
    let asked = Command::new("fio").arg("--version").output().ok()?;
    let version = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
    asked.status.success().then_some(Fio { version })
}

impl Fio {
    /// GB/s over `amount` bytes of the file's `len`.
    pub(super) fn run(
        &self,
        file: &Path,
        case: Case,
        len: u64,
        amount: u64,
    ) -> Result<f64, Failure> {
        let op = if case.op == Op::Write { "randwrite" } else { "randread" };
        let threads = case.threads as u64;
        let output = Command::new("fio")
            .args(["--name=baseline", "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"])
            .args(["--thread", "--group_reporting", "--gtod_reduce=1", "--randrepeat=0"])
            // As kvferry: huge pages, and fio leaves their bytes unchanged between operations. With small pages the
            // device's rate is halved or not, depending on which pages the system has free.
            .args(["--mem=malloc", "--iomem_align=2m", "--scramble_buffers=0", "--invalidate=0"])
            .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
            .args(["--fallocate=none", "--end_fsync=0", "--output-format=json"])
            .arg(format!("--filename={}", file.display()))
            .arg(format!("--rw={op}"))
            .arg(format!("--bs={}", case.block))
            .arg(format!("--iodepth={}", case.depth()))
            .arg(format!("--direct={}", u8::from(case.mode == Mode::Direct)))
            .arg(format!("--numjobs={threads}"))
            .arg(format!("--size={}", len / threads / case.block * case.block))
            .arg(format!("--offset_increment={}", len / threads / case.block * case.block))
            .arg(format!("--io_size={}", (amount / threads).max(case.block)))
            .output()
            .map_err(|e| Failure::Failed(format!("fio: {e}")))?;
        let failed = |what: &str| {
            let said = String::from_utf8_lossy(&output.stderr);
            Failure::Failed(format!("{}: {what}: {}", self.version, said.trim()))
        };
        if !output.status.success() {
            return Err(failed("it failed"));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let json = text.find('{').map_or("", |at| &text[at..]);
        let report: Value = serde_json::from_str(json).map_err(|e| failed(&e.to_string()))?;
        let side = if case.op == Op::Write { "write" } else { "read" };
        let rate = report["jobs"][0][side]["bw_bytes"].as_f64().filter(|rate| *rate > 0.0);
        rate.map(|rate| rate / 1e9).ok_or_else(|| failed("its report has no rate"))
    }
}
