//! A driver with a GPU as a machine: it is used through the functions of CUDA only.
//!
//! A launch is two parts in the stream: one that waits, and a kernel that reads and fills. A page of pinned host memory
//! has the words that they share with the tests:
//!
//! ```text
//! 0     0 while kernels are held
//! 64    1 after a kernel was held for too long
//! 128+  1 after the kernel of that index has read a wrong byte
//! ```

use crate::machine::{Kernel, Machine, Mode};
use kvferry_cuda::Gpu;
use kvferry_fakecuda::control::Fake;
use kvferry_sys::HostSpan;
use kvferry_sys::cuda::{
    Context, Driver, Function, Grid, HostRegistration, Module, Stream, copy_async, host_function,
    launch,
};
use kvferry_sys::map::Mapping;
use kvferry_sys::sync::Mutex;
use kvferry_testkit::eventually;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Longest time that a kernel is held: less than what ends a test.
const HELD_MAX: Duration = Duration::from_secs(20);

/// Bytes of the page, and the offsets of its words.
const PAGE_BYTES: usize = 64 << 10;
const GATE: usize = 0;
const LATE: usize = 64;
const WRONG: usize = 128;

/// Blocks and threads of the kernel that reads and fills.
const WORKERS: Grid = Grid { blocks: 64, threads: 256, shared_bytes: 0 };
const ALONE: Grid = Grid { blocks: 1, threads: 1, shared_bytes: 0 };

pub(crate) struct RealMachine {
    driver: &'static Driver,
    /// The driver's library, for its symbols.
    library: Fake,
    /// Contexts of all GPUs, kept until the process ends: they take long to make.
    contexts: Vec<Context>,
    page: HostRegistration,
    /// The page's address for kernels.
    page_on_device: u64,
    /// The kernel that waits. `None`: work waits in a host function.
    spin: Option<Function>,
    work: Function,
    /// Names of kernels, by index.
    names: Mutex<Vec<String>>,
    _map: Mapping,
}

impl RealMachine {
    pub(crate) fn new(mode: Mode) -> Self {
        let driver = Driver::get().unwrap_or_else(|why| panic!("KVFERRY_TEST_GPU: {why}"));
        let file = std::env::var("KVFERRY_LIBCUDA").unwrap_or_else(|_| "libcuda.so.1".to_owned());
        let library = Fake::load(&PathBuf::from(file)).expect("it is loaded already");
        let devices = driver.devices().expect("they are counted");
        let contexts: Vec<Context> =
            devices.into_iter().map(|it| Context::primary(it).expect("a context")).collect();
        let first = &contexts[0];
        let map = Mapping::populated(PAGE_BYTES).expect("memory");
        // SAFETY: the mapping outlives the registration, which is never dropped.
        let page = unsafe { HostRegistration::new(first, HostSpan::new(map.as_ptr(), PAGE_BYTES)) };
        let page = page.expect("a page can be pinned");
        let page_on_device = page.device_address().expect("it is mapped");
        let function = |text: &str, name: &str| {
            let module =
                Module::load_ptx(first, text).unwrap_or_else(|why| panic!("{name}: {why}"));
            module.function(name).expect("it is in the module")
        };
        let spin = (mode == Mode::Real).then(|| function(include_str!("spin.ptx"), "spin"));
        let work = function(include_str!("work.ptx"), "work");
        let names = Mutex::new(Vec::new());
        let machine =
            Self { driver, library, contexts, page, page_on_device, spin, work, names, _map: map };
        machine.release();
        // A kernel is loaded when it is launched first, which may wait for those that run.
        let stream = Stream::new(&machine.contexts[0]).expect("a stream");
        machine.launch(&stream, &Kernel { name: "none", ..Kernel::default() });
        stream.synchronize().expect("it has run");
        machine
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the page is mapped for ever, the word is aligned and inside, and all others of the process use it
        // through this function. A GPU writes whole words.
        unsafe { AtomicU32::from_ptr(self.page.span().as_ptr().add(at).cast()) }
    }

    /// The index of a kernel's name.
    fn index(&self, name: &str) -> usize {
        let mut names = self.names.lock();
        names.iter().position(|it| it == name).unwrap_or_else(|| {
            names.push(name.to_owned());
            names.len() - 1
        })
    }

    /// Copies, and waits.
    fn copy(&self, context: &Context, to: u64, from: u64, len: usize) {
        let stream = Stream::new(context).expect("a stream");
        // SAFETY: the caller's memory lives until the stream is synchronised.
        unsafe { copy_async(&stream, to, from, len) }.expect("copied");
        stream.synchronize().expect("copied");
    }

    fn wait_in_stream(&self, stream: &Stream, delay_ns: u64) {
        let Some(spin) = &self.spin else {
            let [gate, late] = [GATE, LATE].map(|at| self.word(at).as_ptr() as usize);
            let wait = move || {
                // SAFETY: the page is mapped for ever, as the process has one machine.
                let [gate, late] = unsafe { [gate, late].map(|at| AtomicU32::from_ptr(at as _)) };
                let began = Instant::now();
                while gate.load(SeqCst) == 0 && began.elapsed() < HELD_MAX {
                    std::thread::sleep(Duration::from_micros(100));
                }
                if gate.load(SeqCst) == 0 {
                    late.store(1, SeqCst);
                }
                std::thread::sleep(Duration::from_nanos(delay_ns));
            };
            return host_function(stream, Box::new(wait)).expect("queued");
        };
        let limit_ns = HELD_MAX.as_nanos() as u64;
        let at = |offset: usize| self.page_on_device + offset as u64;
        // SAFETY: the kernel uses words of the page only, which is pinned until the process ends.
        unsafe { launch(stream, spin, ALONE, &[at(GATE), delay_ns, limit_ns, at(LATE)]) }
            .expect("launched");
    }
}

impl Machine for RealMachine {
    fn devices(&self) -> i32 {
        self.contexts.len() as i32
    }

    fn context(&self, device: i32) -> Context {
        self.contexts[device as usize].clone()
    }

    fn read(&self, context: &Context, address: u64, bytes: &mut [u8]) {
        self.copy(context, bytes.as_mut_ptr() as u64, address, bytes.len());
    }

    fn write(&self, context: &Context, address: u64, bytes: &[u8]) {
        self.copy(context, address, bytes.as_ptr() as u64, bytes.len());
    }

    fn launch(&self, stream: &Stream, kernel: &Kernel<'_>) {
        self.wait_in_stream(stream, kernel.delay_ns);
        let (reads, read_len) = kernel.reads.unwrap_or_default();
        let (writes, write_len) = kernel.writes.unwrap_or_default();
        let wrong = self.page_on_device + (WRONG + 4 * self.index(kernel.name)) as u64;
        let expect = kernel.expect.map_or(256, u64::from);
        let arguments = [reads, read_len, expect, writes, write_len, u64::from(kernel.fill), wrong];
        // SAFETY: the test keeps the ranges until it has seen the kernel's end.
        unsafe { launch(stream, &self.work, WORKERS, &arguments) }.expect("launched");
    }

    fn hold(&self) {
        self.word(GATE).store(0, SeqCst);
    }

    fn release(&self) {
        self.word(GATE).store(1, SeqCst);
    }

    fn findings(&self) -> Vec<String> {
        let names = self.names.lock();
        let is_wrong = |index: &usize| self.word(WRONG + 4 * index).load(SeqCst) != 0;
        let wrong = (0..names.len()).filter(is_wrong);
        let late = (self.word(LATE).load(SeqCst) != 0)
            .then(|| format!("a kernel was held for {HELD_MAX:?}: something waits for it"));
        wrong
            .map(|index| format!("kernel `{}` read a wrong byte", names[index]))
            .chain(late)
            .collect()
    }

    fn clear_findings(&self) {
        let names = self.names.lock();
        let wrong = (0..names.len()).map(|index| WRONG + 4 * index);
        wrong.chain([LATE]).for_each(|at| self.word(at).store(0, SeqCst));
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        self.library.symbol(name).expect("the driver has it")
    }

    fn ends_clean(&self) {
        eventually("no GPU is in use", || Gpu::all().is_empty());
        let all = self.driver.devices().expect("they are counted");
        assert!(all.iter().all(|it| it.has_primary_context() == Ok(true)), "a context is gone");
    }
}
