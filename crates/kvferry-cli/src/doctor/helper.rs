//! Helper processes: one for reading each other's memory, and one per vendor's library, because a broken
//! driver may hang or crash the process that calls it.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child as Process, Command, Stdio};
use std::time::{Duration, Instant};

use kvferry_cuda::gpu::{CostSource, Trial};
use kvferry_sys::cuda::{DeviceInfo, Driver};
use kvferry_sys::vendor::{self, Unavailable};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::output;
use kvferry_bench::child::{Child, answer_parent, die_with_parent};
use kvferry_bench::failure::Failure;

/// Time limit of a vendor's library. A first call to a GPU's driver takes seconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Start of the line with the answer: a library may write to standard output, too.
const ANSWER: &str = "@kvferry ";

/// Task of a helper process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Probe {
    Memory,
    Verbs,
    Cuda,
    Cufile,
}

/// The state of a vendor's library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Library<T> {
    Works {
        /// The name of the file, which has its version.
        file: String,
        found: T,
    },
    NotInstalled,
    Broken(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VerbsFound {
    /// Names, and whether this process can open them.
    pub(super) devices: Vec<(String, bool)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CudaFound {
    pub(super) version: u32,
    pub(super) devices: Vec<CudaDevice>,
    /// How kvferry copies, or why it can't use the driver.
    pub(super) copies: Result<CudaCopies, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CudaCopies {
    /// The driver makes many copies in one call.
    pub(super) batch_call: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CudaDevice {
    pub(super) name: String,
    pub(super) memory_bytes: u64,
    pub(super) bus: String,
    /// `None` if kvferry can't use the driver.
    pub(super) more: Option<CudaMore>,
    /// What was tried, or why the driver refuses to use the device. `None` if kvferry can't use the driver.
    pub(super) tried: Option<Result<CudaTried, String>>,
}

/// What works on a device, or why not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CudaTried {
    pub(super) kernel: Result<(), String>,
    pub(super) pinned_per_second: Result<u64, String>,
    pub(super) ipc: Result<(), String>,
    /// Where the times of copies come from: `setting`, `model` or `unknown`.
    pub(super) costs: String,
    /// Times are measured while the device is used.
    pub(super) is_measured: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CudaMore {
    pub(super) uuid: String,
    pub(super) compute_capability: (u32, u32),
    pub(super) multiprocessors: u32,
    pub(super) copy_engines: u32,
    /// A dma-buf can export the device's memory to network cards.
    pub(super) dma_buf: bool,
    /// Whether NVIDIA's own module can export the device's memory to network cards.
    pub(super) gpu_direct_rdma: bool,
    /// The driver maps memory in chunks, as expandable segments do.
    pub(super) vmm: bool,
    /// Such memory can be given to another process as a file descriptor.
    pub(super) vmm_export_fd: bool,
    /// Such memory can be given to another host as a fabric handle.
    pub(super) vmm_export_fabric: bool,
}

/// The helper's side.
pub(crate) fn run(probe: Probe) -> Result<(), Failure> {
    match probe {
        Probe::Memory => serve_memory(),
        Probe::Verbs => {
            die_with_parent()?;
            let found = vendor::verbs().map(|devices| VerbsFound {
                devices: devices.into_iter().map(|d| (d.name, d.opens)).collect(),
            });
            tell("libibverbs.so", found)
        }
        Probe::Cuda => {
            die_with_parent()?;
            tell("libcuda.so", cuda())
        }
        Probe::Cufile => {
            die_with_parent()?;
            tell("libcufile.so", vendor::cufile())
        }
    }
}

fn cuda() -> Result<CudaFound, Unavailable> {
    // This call comes first, because it finds the library that kvferry uses.
    let driver = Driver::get();
    let cuda = vendor::cuda()?;
    let copies = match driver {
        Ok(driver) => Ok(CudaCopies { batch_call: driver.batch_call().is_some() }),
        Err(why) => Err(why.to_string()),
    };
    let known = driver.ok().and_then(|driver| driver.devices().ok()).unwrap_or_default();
    let mut known = known.into_iter();
    let devices = cuda.devices.into_iter().map(|device| {
        let known = known.next();
        CudaDevice {
            name: device.name,
            memory_bytes: device.memory_bytes,
            bus: device.bus,
            more: known.and_then(|it| it.info().ok()).map(more),
            tried: known.map(|it| Trial::of(it).map(tried).map_err(|refused| refused.to_string())),
        }
    });
    Ok(CudaFound { version: cuda.version, devices: devices.collect(), copies })
}

fn more(info: DeviceInfo) -> CudaMore {
    CudaMore {
        uuid: info.uuid.to_string(),
        compute_capability: info.compute_capability,
        multiprocessors: info.multiprocessors,
        copy_engines: info.copy_engines,
        dma_buf: info.dma_buf,
        gpu_direct_rdma: info.gpu_direct_rdma,
        vmm: info.vmm,
        vmm_export_fd: info.vmm_export_fd,
        vmm_export_fabric: info.vmm_export_fabric,
    }
}

fn tried(trial: Trial) -> CudaTried {
    let costs = match trial.costs {
        CostSource::Setting => "setting",
        CostSource::Model => "model",
        _ => "unknown",
    };
    CudaTried {
        kernel: trial.kernel,
        pinned_per_second: trial.pinned_per_second,
        ipc: trial.ipc,
        costs: costs.to_owned(),
        is_measured: trial.is_measured,
    }
}

fn tell<T: Serialize>(file: &str, found: Result<T, Unavailable>) -> Result<(), Failure> {
    let answer = serde_json::to_string(&match found {
        Ok(found) => Library::Works { file: loaded(file), found },
        Err(Unavailable::NotInstalled) => Library::NotInstalled,
        Err(Unavailable::Broken(why)) => Library::Broken(why),
    });
    Ok(output::print(&format!("\n{ANSWER}{}\n", answer.map_err(std::io::Error::from)?))?)
}

/// The name of the file that was loaded: links to it are resolved.
fn loaded(starts_with: &str) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut names = maps.lines().filter_map(|line| line.rsplit_once('/').map(|(_, name)| name));
    names.find(|name| name.starts_with(starts_with)).unwrap_or(starts_with).to_owned()
}

/// Helpers that were started, whose answers have not been read.
#[derive(Debug)]
pub(super) struct Libraries {
    began: Instant,
    verbs: Option<Process>,
    cuda: Option<Process>,
    cufile: Option<Process>,
}

/// Starts the helpers of all libraries at once: the slowest library is a GPU's driver.
pub(super) fn start_libraries() -> Libraries {
    let start = |name: &str| {
        Command::new("/proc/self/exe")
            .arg0("kvferry")
            .args(["doctor-probe", name])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Vendors' libraries log what they miss.
            .stderr(Stdio::null())
            .spawn()
            .ok()
    };
    Libraries {
        began: Instant::now(),
        verbs: start("verbs"),
        cuda: start("cuda"),
        cufile: start("cufile"),
    }
}

impl Libraries {
    pub(super) fn answers(self) -> (Library<VerbsFound>, Library<CudaFound>, Library<Option<u32>>) {
        let until = self.began + PATIENCE;
        (answer(self.verbs, until), answer(self.cuda, until), answer(self.cufile, until))
    }
}

/// The answer of a helper, or why there is none.
fn answer<T: DeserializeOwned>(process: Option<Process>, until: Instant) -> Library<T> {
    let broken = |why: &str| Library::Broken(why.to_owned());
    let Some(mut process) = process else { return broken("no helper process can be started") };
    // The answer fits the pipe, so the helper can end before it is read.
    while let Ok(None) = process.try_wait() {
        if Instant::now() >= until {
            // Not reaped: a process that hangs inside a driver can't be killed.
            let _ = process.kill();
            return broken(&format!("no answer within {} s", PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut said = String::new();
    if let Some(mut out) = process.stdout.take() {
        let _ = out.read_to_string(&mut said);
    }
    let ended = match process.wait().map(|status| status.signal()) {
        Ok(Some(signal)) => format!("the process that asked it died of signal {signal}"),
        _ => "the process that asked it gave no answer".to_owned(),
    };
    let answer = said.lines().rev().find_map(|line| line.strip_prefix(ANSWER));
    answer.and_then(|answer| serde_json::from_str(answer).ok()).unwrap_or_else(|| broken(&ended))
}

/// Bytes that are known, and their address.
#[derive(Debug, Serialize, Deserialize)]
struct KnownBytes {
    pid: i32,
    address: usize,
    bytes: u64,
}

impl KnownBytes {
    fn new(bytes: &u64) -> KnownBytes {
        let address = std::ptr::from_ref(bytes) as usize;
        let pid = std::process::id().cast_signed();
        KnownBytes { pid, address, bytes: *bytes }
    }

    fn read(&self) -> Result<(), String> {
        let mut found = [0; 8];
        match kvferry_sys::process_vm::read_bytes(self.pid, self.address, &mut found) {
            Ok(()) if u64::from_ne_bytes(found) == self.bytes => Ok(()),
            Ok(()) => Err("the bytes read are not those in memory".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Gets the address of the parent's bytes. Answers whether it could read them, and its own address.
fn serve_memory() -> Result<(), Failure> {
    let bytes = Box::new(fastrand::u64(..));
    answer_parent(|parent: KnownBytes| {
        let told = (parent.read(), KnownBytes::new(&bytes));
        serde_json::to_value(told).map_err(|error| Failure::Failed(error.to_string()))
    })
}

/// Whether a process may read its parent, and a parent its child.
///
/// The first is the answer for unrelated processes: Yama may let a process read its descendants only.
pub(super) fn read_each_other() -> (Result<(), String>, Result<(), String>) {
    let bytes = Box::new(fastrand::u64(..));
    let asked = Child::spawn(&["doctor-probe", "memory"]).and_then(|mut child| {
        let answer: Value = child.ask(&KnownBytes::new(&bytes))?;
        let (up, there): (Result<(), String>, KnownBytes) = serde_json::from_value(answer)
            .map_err(|error| Failure::Failed(format!("the helper process: {error}")))?;
        Ok((up, there.read()))
    });
    asked.unwrap_or_else(|why| (Err(why.to_string()), Err(why.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A helper that may end after its test, and so holds none of the test's streams.
    fn shell(script: &str) -> Option<Process> {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(Stdio::null()).spawn().ok()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(120)
    }

    #[test]
    fn a_library_that_crashes_hangs_or_babbles_is_a_finding() {
        let crashed: Library<u32> = answer(shell("kill -SEGV $$"), soon());
        assert_eq!(crashed, Library::Broken("the process that asked it died of signal 11".into()));
        let hung: Library<u32> = answer(shell("exec sleep 600"), Instant::now());
        assert!(matches!(&hung, Library::Broken(why) if why.starts_with("no answer")), "{hung:?}");
        let babbling: Library<u32> = answer(
            shell(r#"echo hello; echo '@kvferry {"Works":{"file":"x","found":7}}'; echo bye"#),
            soon(),
        );
        assert_eq!(babbling, Library::Works { file: "x".into(), found: 7 });
        let silent: Library<u32> = answer(shell("exit 3"), soon());
        assert!(matches!(silent, Library::Broken(_)));
        assert_eq!(
            answer::<u32>(shell("echo '@kvferry \"NotInstalled\"'"), soon()),
            Library::NotInstalled
        );
    }
}
