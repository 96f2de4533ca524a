//! Helper processes: one for reading each other's memory, and one per vendor's library, because a broken
//! driver may hang or crash the process that calls it.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child as Process, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_cuda::gpu::{CostSource, Trial};
use kvferry_sys::cuda::{Device, DeviceInfo, Driver};
use kvferry_sys::poll::{Interest, wait_one};
use kvferry_sys::vendor::{self, Unavailable};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::output;
use kvferry_bench::child::{Child, answer_parent, die_with_parent};
use kvferry_bench::failure::Failure;

/// Time limit of a vendor's library, and of each GPU that is tried. A first call to a GPU's driver takes seconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Free memory of a GPU that is tried, at least: its context takes some hundred MB.
pub(super) const TRIAL_BYTES: u64 = 1 << 30;

/// Start of the line with an answer, of which the last one counts: a library may write to standard output, too.
const ANSWER: &str = "@kvferry ";

/// Bytes of a line that are kept, at most. No answer has as many.
const LINE_MAX: usize = 1 << 20;

/// Time between two looks at whether a helper has ended.
const PAUSE: Duration = Duration::from_millis(20);

/// Task of a helper process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Probe {
    Memory,
    Verbs,
    Cuda,
    /// Makes no context on a GPU.
    CudaUntried,
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
    /// The trial, or why there was none. `None` if kvferry can't use the driver.
    pub(super) tried: Option<Result<CudaTried, Untried>>,
}

/// Why it is not known what works on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Untried {
    /// The trial has not ended: its time is over, or the process that made it is gone.
    Unended,
    /// The driver refuses to use the device, for this reason.
    Refused(String),
    /// Nothing was to be tried.
    Unwanted,
    /// The device has only so many bytes free, which another process may need.
    LittleMemory(u64),
    /// One process at a time may use the device, and another may be about to.
    Exclusive,
}

/// Results of a trial of a device: each, or why it does not work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CudaTried {
    pub(super) kernel: Result<(), String>,
    pub(super) pinned_per_second: Result<u64, String>,
    pub(super) pinned_bytes: u64,
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
            cuda(true)
        }
        Probe::CudaUntried => {
            die_with_parent()?;
            cuda(false)
        }
        Probe::Cufile => {
            die_with_parent()?;
            tell("libcufile.so", vendor::cufile())
        }
    }
}

/// Tells what the driver says of its devices, and again after each device that was tried: a driver may hang or crash.
fn cuda(tries: bool) -> Result<(), Failure> {
    const FILE: &str = "libcuda.so";
    // This call comes first, because it finds the library that kvferry uses.
    let driver = Driver::get();
    let cuda = match vendor::cuda() {
        Ok(cuda) => cuda,
        Err(why) => return tell::<CudaFound>(FILE, Err(why)),
    };
    let copies = match driver {
        Ok(driver) => Ok(CudaCopies { batch_call: driver.batch_call().is_some() }),
        Err(why) => Err(why.to_string()),
    };
    let known: Vec<Device> =
        driver.ok().and_then(|driver| driver.devices().ok()).unwrap_or_default();
    let devices = cuda.devices.into_iter().enumerate().map(|(index, device)| {
        let known = known.get(index);
        CudaDevice {
            name: device.name,
            memory_bytes: device.memory_bytes,
            bus: device.bus,
            more: known.and_then(|it| it.info().ok()).map(more),
            tried: known.map(|_| Err(if tries { Untried::Unended } else { Untried::Unwanted })),
        }
    });
    let mut found = CudaFound { version: cuda.version, devices: devices.collect(), copies };
    tell(FILE, Ok(&found))?;
    let known = if tries { known } else { Vec::new() };
    for (index, device) in known.into_iter().enumerate().take(found.devices.len()) {
        let outcome = attempt(device, &found.devices[index].bus);
        found.devices[index].tried = Some(outcome);
        tell(FILE, Ok(&found))?;
    }
    Ok(())
}

/// Tries a device, unless that could keep another process from using it.
fn attempt(device: Device, bus: &str) -> Result<CudaTried, Untried> {
    if device.is_exclusive().is_ok_and(|is_exclusive| is_exclusive) {
        return Err(Untried::Exclusive);
    }
    // The trial's context itself needs memory, so the driver is not asked.
    if let Ok(free) = vendor::gpu_memory_free(bus)
        && free < TRIAL_BYTES
    {
        return Err(Untried::LittleMemory(free));
    }
    Trial::of(device).map(tried).map_err(|refused| Untried::Refused(refused.to_string()))
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
        pinned_bytes: trial.pinned_bytes,
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
    verbs: Option<Helper>,
    cuda: Option<Helper>,
    cufile: Option<Helper>,
}

/// A helper that was started, and its answers. A thread reads what it writes, so that no helper waits for a full pipe.
#[derive(Debug)]
struct Helper {
    process: Process,
    said: Receiver<(Instant, String)>,
    /// Nothing but what is in the pipe by now is an answer. Another process that a library has started may keep it open.
    has_ended: Arc<AtomicBool>,
}

impl Helper {
    fn start(command: &mut Command) -> Option<Self> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        // Vendors' libraries log what they miss.
        let mut process = command.stderr(Stdio::null()).spawn().ok()?;
        let out = process.stdout.take()?;
        let (send, said) = mpsc::channel();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&has_ended);
        // It ends with the helper, or this process.
        thread::spawn(move || listen(out, &ends, &send));
        Some(Self { process, said, has_ended })
    }
}

/// Sends the answers among the lines that a helper writes, until it has ended and no more of them is in the pipe.
fn listen(mut out: ChildStdout, has_ended: &AtomicBool, send: &Sender<(Instant, String)>) {
    let tell = |line: &[u8]| {
        if let Some(answer) = String::from_utf8_lossy(line).strip_prefix(ANSWER) {
            // No one listens any more once the answer is not needed.
            let _ = send.send((Instant::now(), answer.to_owned()));
        }
    };
    let (mut lines, mut part, mut quiet) = (Lines::default(), [0; 4096], 0);
    // A signal ends a pause early.
    while quiet < 4 {
        // Comes first: what the helper has written by its end is seen below.
        let is_last = has_ended.load(Acquire);
        match wait_one(out.as_fd(), Interest::Read, Some(PAUSE)) {
            Ok(ready) if ready.any() => quiet = 0,
            Ok(_) => {
                quiet += u32::from(is_last);
                continue;
            }
            Err(_) => break,
        }
        match out.read(&mut part) {
            Ok(len @ 1..) => lines.take(&part[..len], tell),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => break,
        }
    }
    // Without its end, it may still be an answer.
    lines.take(b"\n", tell);
}

/// Cuts what a helper writes into lines. A longer one than [`LINE_MAX`] is dropped.
#[derive(Debug, Default)]
struct Lines {
    /// The line that has not ended.
    line: Vec<u8>,
    is_long: bool,
}

impl Lines {
    /// Takes the next bytes, and calls `each` for each line that ends in them.
    fn take(&mut self, part: &[u8], each: impl Fn(&[u8])) {
        for piece in part.split_inclusive(|byte| *byte == b'\n') {
            let text = piece.strip_suffix(b"\n").unwrap_or(piece);
            self.is_long |= self.line.len() + text.len() > LINE_MAX;
            if self.is_long {
                self.line.clear();
            } else {
                self.line.extend_from_slice(text);
            }
            if text.len() < piece.len() {
                if !std::mem::take(&mut self.is_long) {
                    each(&self.line);
                }
                self.line.clear();
            }
        }
    }
}

/// Starts the helpers of all libraries at once, one of which tries GPUs if it may: the slowest library is a GPU's driver.
pub(super) fn start_libraries(tries_gpus: bool) -> Libraries {
    let start = |name: &str| {
        Helper::start(Command::new("/proc/self/exe").arg0("kvferry").args(["doctor-probe", name]))
    };
    Libraries {
        began: Instant::now(),
        verbs: start("verbs"),
        cuda: start(if tries_gpus { "cuda" } else { "cuda-untried" }),
        cufile: start("cufile"),
    }
}

impl Libraries {
    pub(super) fn answers(self) -> (Library<VerbsFound>, Library<CudaFound>, Library<Option<u32>>) {
        let began = self.began;
        (
            answer(self.verbs, began, PATIENCE),
            answer(self.cuda, began, PATIENCE),
            answer(self.cufile, began, PATIENCE),
        )
    }
}

/// The last answer of a helper, or why there is none. The helper has the time of `patience` from `began` on, and again after
/// each answer.
fn answer<T: DeserializeOwned>(
    helper: Option<Helper>,
    began: Instant,
    patience: Duration,
) -> Library<T> {
    let broken = |why: &str| Library::Broken(why.to_owned());
    let Some(Helper { mut process, said, has_ended }) = helper else {
        return broken("no helper process can be started");
    };
    let (mut until, mut last) = (began + patience, None);
    loop {
        if !matches!(process.try_wait(), Ok(None)) {
            has_ended.store(true, Release);
        }
        let left = until.saturating_duration_since(Instant::now());
        match said.recv_timeout(left.min(PAUSE)) {
            Ok((at, answer)) => {
                until = at + patience;
                // The last one may have been cut off.
                last = serde_json::from_str(&answer).ok().or(last);
            }
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    let mut ended = process.try_wait();
    while matches!(ended, Ok(None)) && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
        ended = process.try_wait();
    }
    let why = match ended.map(|status| status.map(|status| status.signal())) {
        Ok(None) => {
            // Not reaped: a process that hangs inside a driver can't be killed.
            let _ = process.kill();
            format!("no answer within {} s", patience.as_secs())
        }
        Ok(Some(Some(signal))) => format!("the process that asked it died of signal {signal}"),
        _ => "the process that asked it gave no answer".to_owned(),
    };
    has_ended.store(true, Release);
    last.unwrap_or_else(|| broken(&why))
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

    /// A helper that may end after its test.
    fn shell(script: &str) -> Option<Helper> {
        Helper::start(Command::new("sh").args(["-c", script]))
    }

    /// The answer of a helper that has time.
    fn said(script: &str) -> Library<u32> {
        answer(shell(script), Instant::now(), Duration::from_secs(120))
    }

    fn works(found: u32) -> Library<u32> {
        Library::Works { file: "x".into(), found }
    }

    #[test]
    fn a_library_that_crashes_hangs_or_babbles_is_a_finding() {
        let crashed = said("kill -SEGV $$");
        assert_eq!(crashed, Library::Broken("the process that asked it died of signal 11".into()));
        let hung: Library<u32> = answer(shell("exec sleep 600"), Instant::now(), Duration::ZERO);
        assert!(matches!(&hung, Library::Broken(why) if why.starts_with("no answer")), "{hung:?}");
        let script = r#"echo hello; echo '@kvferry {"Works":{"file":"x","found":7}}'; echo bye"#;
        assert_eq!(said(script), works(7));
        assert!(matches!(said("exit 3"), Library::Broken(_)));
        assert_eq!(said("echo '@kvferry \"NotInstalled\"'"), Library::NotInstalled);
    }

    #[test]
    fn what_a_library_said_before_it_crashed_or_hung_is_its_answer() {
        let first = r#"echo '@kvferry {"Works":{"file":"x","found":1}}'"#;
        let second = r#"echo '@kvferry {"Works":{"file":"x","found":2}}'"#;
        assert_eq!(said(&format!("{first}; {second}; kill -SEGV $$")), works(2));
        // An answer that was cut off.
        assert_eq!(said(&format!("{first}; printf '@kvferry {{\"Wor'; kill -SEGV $$")), works(1));
        let script = format!("{first}; exec sleep 600");
        let hung: Library<u32> = answer(shell(&script), Instant::now(), Duration::from_secs(10));
        assert_eq!(hung, works(1));
    }

    #[test]
    fn a_process_that_a_library_leaves_behind_is_not_waited_for() {
        let _bound = kvferry_testkit::Watchdog::new(kvferry_testkit::PATIENCE);
        // It ends once no one reads what it writes.
        let left = "while sleep 1 && echo more; do :; done &";
        let script = format!(r#"{left} echo '@kvferry {{"Works":{{"file":"x","found":4}}}}'"#);
        let hour = Duration::from_secs(3600);
        let heard: Library<u32> = answer(shell(&script), Instant::now(), hour);
        assert_eq!(heard, works(4));
        let heard: Library<u32> = answer(shell(left), Instant::now(), hour);
        assert!(matches!(heard, Library::Broken(_)), "{heard:?}");
    }

    #[test]
    fn a_line_without_an_end_takes_no_more_than_its_limit_and_hides_no_later_answer() {
        let heard = std::cell::RefCell::new(Vec::new());
        let hear = |line: &[u8]| heard.borrow_mut().push(line.to_vec());
        let mut lines = Lines::default();
        lines.take(b"one\ntw", hear);
        lines.take(b"o\n", hear);
        for _ in 0..3 * LINE_MAX / 4096 {
            lines.take(&[b'x'; 4096], hear);
            assert!(lines.line.len() <= LINE_MAX);
        }
        lines.take(b"\n\nthree\n", hear);
        assert_eq!(*heard.borrow(), [&b"one"[..], b"two", b"", b"three"]);
    }

    #[test]
    fn a_library_that_writes_more_than_a_pipe_holds_is_heard() {
        let much = "head -c 300000 /dev/zero | tr '\\0' x; echo";
        let script = format!(r#"{much}; echo '@kvferry {{"Works":{{"file":"x","found":3}}}}'"#);
        assert_eq!(said(&script), works(3));
    }
}
