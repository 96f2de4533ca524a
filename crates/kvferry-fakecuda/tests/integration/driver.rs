//! The driver's calls as the tests make them: each function found by `cuGetProcAddress`.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvferry_fakecuda::control::{Fake, library_path};

pub(crate) type Check<T = ()> = Result<T, c_int>;

pub(crate) const STREAM: c_int = 1;
pub(crate) const DURING: c_int = 2;
pub(crate) const ANY: c_int = 3;

/// The loaded driver.
pub(crate) struct Driver {
    pub(crate) fake: Fake,
    known: Mutex<HashMap<(&'static str, c_int), usize>>,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// The test that has the driver, where one process runs several.
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    static TAKEN: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// The driver as a new process finds it, for as long as the calling thread lives.
pub(crate) fn fresh() -> &'static Driver {
    let driver = driver();
    TAKEN.with_borrow_mut(|taken| {
        if taken.is_none() {
            *taken = Some(TURN.lock().unwrap_or_else(PoisonError::into_inner));
        }
    });
    driver.fake.reset();
    driver
}

pub(crate) fn driver() -> &'static Driver {
    DRIVER.get_or_init(|| {
        let fake = Fake::load(&library_path()).expect("the fake driver loads");
        Driver { fake, known: Mutex::default() }
    })
}

/// The driver, initialized, with device 0's primary context current, after settings.
pub(crate) fn ready(settings: &[(&str, &str)]) -> &'static Driver {
    let driver = fresh();
    for (key, value) in settings {
        driver.fake.set(key, value);
    }
    driver.init().unwrap();
    let context = driver.retain(0).unwrap();
    driver.set_current(context).unwrap();
    driver
}

macro_rules! call {
    ($driver:expr, $name:literal, ($($ty:ty),*), ($($arg:expr),*)) => {{
        let address = $driver.address($name).map_err(|_| -500)?;
        // SAFETY: the driver's function has this signature, and the arguments live for the call.
        let code = unsafe {
            std::mem::transmute::<usize, unsafe extern "C" fn($($ty),*) -> c_int>(address)($($arg),*)
        };
        check(code)
    }};
}

fn check(code: c_int) -> Check {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// One copy: destination, source, length.
pub(crate) type Copy = (u64, u64, usize);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    pub(crate) order: c_int,
    pub(crate) hints: [c_int; 4],
    pub(crate) flags: u32,
}

impl Attributes {
    pub(crate) fn new(order: c_int) -> Self {
        Self { order, hints: [0; 4], flags: 0 }
    }
}

impl Driver {
    /// A function by its base name, for the driver's own version.
    pub(crate) fn address(&self, name: &'static str) -> Check<usize> {
        let version = self.version();
        let mut known = self.known.lock().unwrap();
        if let Some(&address) = known.get(&(name, version)) {
            return Ok(address);
        }
        let address = self.find(name, version)?;
        known.insert((name, version), address);
        Ok(address)
    }

    /// `cuGetProcAddress`.
    pub(crate) fn find(&self, name: &str, version: c_int) -> Check<usize> {
        type F = unsafe extern "C" fn(*const c_char, *mut usize, c_int, u64) -> c_int;
        let symbol = self.fake.symbol("cuGetProcAddress").unwrap();
        let name = CString::new(name).unwrap();
        let mut address = 0;
        // SAFETY: the first form of the function has this signature.
        let code = unsafe {
            let f = std::mem::transmute::<*mut c_void, F>(symbol);
            f(name.as_ptr(), &mut address, version, 0)
        };
        check(code).map(|()| address)
    }

    pub(crate) fn version(&self) -> c_int {
        type F = unsafe extern "C" fn(*mut c_int) -> c_int;
        let symbol = self.fake.symbol("cuDriverGetVersion").unwrap();
        let mut version = 0;
        // SAFETY: the function has this signature.
        unsafe { std::mem::transmute::<*mut c_void, F>(symbol)(&mut version) };
        version
    }

    pub(crate) fn init(&self) -> Check {
        call!(self, "cuInit", (u32), (0))
    }

    pub(crate) fn device_count(&self) -> Check<c_int> {
        let mut n = 0;
        call!(self, "cuDeviceGetCount", (*mut c_int), (&mut n)).map(|()| n)
    }

    pub(crate) fn uuid(&self, device: c_int) -> Check<[u8; 16]> {
        let mut uuid = [0; 16];
        call!(self, "cuDeviceGetUuid", (*mut [u8; 16], c_int), (&mut uuid, device)).map(|()| uuid)
    }

    pub(crate) fn attribute(&self, attribute: c_int, device: c_int) -> Check<c_int> {
        let mut n = 0;
        let types = call!(
            self,
            "cuDeviceGetAttribute",
            (*mut c_int, c_int, c_int),
            (&mut n, attribute, device)
        );
        types.map(|()| n)
    }

    pub(crate) fn can_access_peer(&self, a: c_int, b: c_int) -> Check<bool> {
        let mut n: c_int = 0;
        call!(self, "cuDeviceCanAccessPeer", (*mut c_int, c_int, c_int), (&mut n, a, b))
            .map(|()| n != 0)
    }

    pub(crate) fn retain(&self, device: c_int) -> Check<usize> {
        let mut context = 0;
        call!(self, "cuDevicePrimaryCtxRetain", (*mut usize, c_int), (&mut context, device))
            .map(|()| context)
    }

    pub(crate) fn release(&self, device: c_int) -> Check {
        call!(self, "cuDevicePrimaryCtxRelease", (c_int), (device))
    }

    pub(crate) fn set_current(&self, context: usize) -> Check {
        call!(self, "cuCtxSetCurrent", (usize), (context))
    }

    pub(crate) fn synchronize(&self) -> Check {
        call!(self, "cuCtxSynchronize", (), ())
    }

    pub(crate) fn alloc(&self, len: usize) -> Check<u64> {
        let mut pointer = 0;
        call!(self, "cuMemAlloc", (*mut u64, usize), (&mut pointer, len)).map(|()| pointer)
    }

    pub(crate) fn alloc_managed(&self, len: usize) -> Check<u64> {
        let mut pointer = 0;
        call!(self, "cuMemAllocManaged", (*mut u64, usize, u32), (&mut pointer, len, 1))
            .map(|()| pointer)
    }

    pub(crate) fn free(&self, pointer: u64) -> Check {
        call!(self, "cuMemFree", (u64), (pointer))
    }

    pub(crate) fn alloc_host(&self, len: usize) -> Check<u64> {
        let mut pointer = 0;
        call!(self, "cuMemAllocHost", (*mut u64, usize), (&mut pointer, len)).map(|()| pointer)
    }

    pub(crate) fn free_host(&self, pointer: u64) -> Check {
        call!(self, "cuMemFreeHost", (u64), (pointer))
    }

    pub(crate) fn register(&self, pointer: u64, len: usize) -> Check {
        call!(self, "cuMemHostRegister", (u64, usize, u32), (pointer, len, 3))
    }

    pub(crate) fn unregister(&self, pointer: u64) -> Check {
        call!(self, "cuMemHostUnregister", (u64), (pointer))
    }

    pub(crate) fn copy(&self, to: u64, from: u64, len: usize, stream: usize) -> Check {
        call!(self, "cuMemcpyAsync", (u64, u64, usize, usize), (to, from, len, stream))
    }

    pub(crate) fn fill(&self, to: u64, byte: u8, len: usize, stream: usize) -> Check {
        call!(self, "cuMemsetD8Async", (u64, u8, usize, usize), (to, byte, len, stream))
    }

    /// The batch call of the driver's version; the index that failed, where it tells.
    pub(crate) fn batch(
        &self,
        copies: &[Copy],
        order: c_int,
        stream: usize,
    ) -> Result<(), (c_int, Option<usize>)> {
        self.batch_with(copies, &[(0, Attributes::new(order))], stream)
    }

    pub(crate) fn batch_with(
        &self,
        copies: &[Copy],
        attributes: &[(usize, Attributes)],
        stream: usize,
    ) -> Result<(), (c_int, Option<usize>)> {
        let to: Vec<u64> = copies.iter().map(|copy| copy.0).collect();
        let from: Vec<u64> = copies.iter().map(|copy| copy.1).collect();
        let lens: Vec<usize> = copies.iter().map(|copy| copy.2).collect();
        let starts: Vec<usize> = attributes.iter().map(|a| a.0).collect();
        let attributes: Vec<Attributes> = attributes.iter().map(|a| a.1).collect();
        let (to, from, lens) = (to.as_ptr(), from.as_ptr(), lens.as_ptr());
        let (list, starts_list) = (attributes.as_ptr(), starts.as_ptr());
        let (count, attribute_count) = (copies.len(), attributes.len());
        let failed = Cell::new(usize::MAX);
        let old = self.version() < 13000;
        let result = if old {
            self.batch_v1(
                to,
                from,
                lens,
                count,
                list,
                starts_list,
                attribute_count,
                &failed,
                stream,
            )
        } else {
            self.batch_v2(to, from, lens, count, list, starts_list, attribute_count, stream)
        };
        let index = Some(failed.get()).filter(|&index| index != usize::MAX);
        result.map_err(|code| (code, index))
    }

    #[allow(clippy::too_many_arguments, reason = "the driver's form")]
    fn batch_v1(
        &self,
        to: *const u64,
        from: *const u64,
        lens: *const usize,
        count: usize,
        attributes: *const Attributes,
        starts: *const usize,
        attribute_count: usize,
        failed: &Cell<usize>,
        stream: usize,
    ) -> Check {
        call!(
            self,
            "cuMemcpyBatchAsync",
            (
                *const u64,
                *const u64,
                *const usize,
                usize,
                *const Attributes,
                *const usize,
                usize,
                *mut usize,
                usize
            ),
            (to, from, lens, count, attributes, starts, attribute_count, failed.as_ptr(), stream)
        )
    }

    #[allow(clippy::too_many_arguments, reason = "the driver's form")]
    fn batch_v2(
        &self,
        to: *const u64,
        from: *const u64,
        lens: *const usize,
        count: usize,
        attributes: *const Attributes,
        starts: *const usize,
        attribute_count: usize,
        stream: usize,
    ) -> Check {
        call!(
            self,
            "cuMemcpyBatchAsync",
            (
                *const u64,
                *const u64,
                *const usize,
                usize,
                *const Attributes,
                *const usize,
                usize,
                usize
            ),
            (to, from, lens, count, attributes, starts, attribute_count, stream)
        )
    }

    /// A stream that does not wait for the legacy one.
    pub(crate) fn stream(&self) -> Check<usize> {
        self.stream_with(1)
    }

    pub(crate) fn stream_with(&self, flags: u32) -> Check<usize> {
        let mut stream = 0;
        call!(self, "cuStreamCreate", (*mut usize, u32), (&mut stream, flags)).map(|()| stream)
    }

    pub(crate) fn destroy_stream(&self, stream: usize) -> Check {
        call!(self, "cuStreamDestroy", (usize), (stream))
    }

    pub(crate) fn query_stream(&self, stream: usize) -> Check {
        call!(self, "cuStreamQuery", (usize), (stream))
    }

    pub(crate) fn wait_stream(&self, stream: usize) -> Check {
        call!(self, "cuStreamSynchronize", (usize), (stream))
    }

    pub(crate) fn stream_after(&self, stream: usize, event: usize) -> Check {
        call!(self, "cuStreamWaitEvent", (usize, usize, u32), (stream, event, 0))
    }

    pub(crate) fn begin_capture(&self, stream: usize, mode: c_int) -> Check {
        call!(self, "cuStreamBeginCapture", (usize, c_int), (stream, mode))
    }

    pub(crate) fn end_capture(&self, stream: usize) -> Check<usize> {
        let mut graph = 0;
        call!(self, "cuStreamEndCapture", (usize, *mut usize), (stream, &mut graph)).map(|()| graph)
    }

    pub(crate) fn is_capturing(&self, stream: usize) -> Check<c_int> {
        let mut status = 0;
        call!(self, "cuStreamIsCapturing", (usize, *mut c_int), (stream, &mut status))
            .map(|()| status)
    }

    pub(crate) fn exchange_capture_mode(&self, mode: c_int) -> Check<c_int> {
        let mut mode = mode;
        call!(self, "cuThreadExchangeStreamCaptureMode", (*mut c_int), (&mut mode)).map(|()| mode)
    }

    pub(crate) fn event(&self) -> Check<usize> {
        let mut event = 0;
        call!(self, "cuEventCreate", (*mut usize, u32), (&mut event, 2)).map(|()| event)
    }

    pub(crate) fn destroy_event(&self, event: usize) -> Check {
        call!(self, "cuEventDestroy", (usize), (event))
    }

    pub(crate) fn record(&self, event: usize, stream: usize) -> Check {
        call!(self, "cuEventRecord", (usize, usize), (event, stream))
    }

    pub(crate) fn query(&self, event: usize) -> Check {
        call!(self, "cuEventQuery", (usize), (event))
    }

    pub(crate) fn wait(&self, event: usize) -> Check {
        call!(self, "cuEventSynchronize", (usize), (event))
    }

    /// An event recorded now.
    pub(crate) fn mark(&self, stream: usize) -> usize {
        let event = self.event().unwrap();
        self.record(event, stream).unwrap();
        event
    }

    pub(crate) fn host_function(
        &self,
        stream: usize,
        function: unsafe extern "C" fn(*mut c_void),
        user: *mut c_void,
    ) -> Check {
        call!(
            self,
            "cuLaunchHostFunc",
            (usize, unsafe extern "C" fn(*mut c_void), *mut c_void),
            (stream, function, user)
        )
    }
}

/// `CUmemAllocationProp` of pinned memory on a device.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Prop {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: [c_int; 2],
    pub(crate) rest: [u64; 2],
}

/// A pinned allocation on device 0 that exports descriptors.
pub(crate) const EXPORTABLE: Prop =
    Prop { kind: 1, handle_types: 1, location: [1, 0], rest: [0; 2] };

/// Calls of memory between processes, and of virtual memory.
impl Driver {
    pub(crate) fn address_range(&self, pointer: u64) -> Check<(u64, usize)> {
        let (mut base, mut len) = (0, 0);
        let types = (&mut base, &mut len);
        call!(
            self,
            "cuMemGetAddressRange",
            (*mut u64, *mut usize, u64),
            (types.0, types.1, pointer)
        )
        .map(|()| (base, len))
    }

    /// An attribute of a pointer in 64 bits.
    pub(crate) fn pointer_attribute(&self, attribute: c_int, pointer: u64) -> Check<u64> {
        let mut value = 0_u64;
        call!(
            self,
            "cuPointerGetAttribute",
            (*mut u64, c_int, u64),
            (&mut value, attribute, pointer)
        )
        .map(|()| value)
    }

    pub(crate) fn pointer_attributes<const N: usize>(
        &self,
        attributes: [c_int; N],
        pointer: u64,
    ) -> Check<[u64; N]> {
        let mut values = [0_u64; N];
        let mut places = values.each_mut().map(std::ptr::from_mut);
        call!(
            self,
            "cuPointerGetAttributes",
            (u32, *const c_int, *mut *mut u64, u64),
            (N as u32, attributes.as_ptr(), places.as_mut_ptr(), pointer)
        )
        .map(|()| values)
    }

    pub(crate) fn ipc_handle(&self, pointer: u64) -> Check<[u8; 64]> {
        let mut handle = [0; 64];
        call!(self, "cuIpcGetMemHandle", (*mut [u8; 64], u64), (&mut handle, pointer))
            .map(|()| handle)
    }

    pub(crate) fn open_ipc(&self, handle: [u8; 64]) -> Check<u64> {
        #[repr(C)]
        struct Handle([u8; 64]);
        let mut pointer = 0;
        let handle = Handle(handle);
        call!(self, "cuIpcOpenMemHandle", (*mut u64, Handle, u32), (&mut pointer, handle, 1))
            .map(|()| pointer)
    }

    pub(crate) fn close_ipc(&self, pointer: u64) -> Check {
        call!(self, "cuIpcCloseMemHandle", (u64), (pointer))
    }

    pub(crate) fn reserve(&self, len: usize) -> Check<u64> {
        let mut pointer = 0;
        call!(
            self,
            "cuMemAddressReserve",
            (*mut u64, usize, usize, u64, u64),
            (&mut pointer, len, 0, 0, 0)
        )
        .map(|()| pointer)
    }

    pub(crate) fn free_reserved(&self, pointer: u64, len: usize) -> Check {
        call!(self, "cuMemAddressFree", (u64, usize), (pointer, len))
    }

    pub(crate) fn create(&self, len: usize, prop: &Prop) -> Check<u64> {
        let mut handle = 0;
        call!(self, "cuMemCreate", (*mut u64, usize, *const Prop, u64), (&mut handle, len, prop, 0))
            .map(|()| handle)
    }

    pub(crate) fn release_handle(&self, handle: u64) -> Check {
        call!(self, "cuMemRelease", (u64), (handle))
    }

    pub(crate) fn map(&self, pointer: u64, len: usize, handle: u64) -> Check {
        call!(self, "cuMemMap", (u64, usize, usize, u64, u64), (pointer, len, 0, handle, 0))
    }

    pub(crate) fn unmap(&self, pointer: u64, len: usize) -> Check {
        call!(self, "cuMemUnmap", (u64, usize), (pointer, len))
    }

    pub(crate) fn set_access(&self, pointer: u64, len: usize, device: c_int) -> Check {
        let desc: [c_int; 3] = [1, device, 3];
        call!(
            self,
            "cuMemSetAccess",
            (u64, usize, *const [c_int; 3], usize),
            (pointer, len, &desc, 1)
        )
    }

    pub(crate) fn retain_handle(&self, pointer: u64) -> Check<u64> {
        let mut handle = 0;
        call!(self, "cuMemRetainAllocationHandle", (*mut u64, u64), (&mut handle, pointer))
            .map(|()| handle)
    }

    pub(crate) fn properties(&self, handle: u64) -> Check<Prop> {
        let mut prop = Prop { kind: 0, handle_types: 0, location: [0; 2], rest: [0; 2] };
        call!(self, "cuMemGetAllocationPropertiesFromHandle", (*mut Prop, u64), (&mut prop, handle))
            .map(|()| prop)
    }

    pub(crate) fn export(&self, handle: u64) -> Check<c_int> {
        let mut fd = -1;
        call!(
            self,
            "cuMemExportToShareableHandle",
            (*mut c_int, u64, c_int, u64),
            (&mut fd, handle, 1, 0)
        )
        .map(|()| fd)
    }

    pub(crate) fn import(&self, fd: c_int) -> Check<u64> {
        let mut handle = 0;
        call!(
            self,
            "cuMemImportFromShareableHandle",
            (*mut u64, usize, c_int),
            (&mut handle, fd as usize, 1)
        )
        .map(|()| handle)
    }

    pub(crate) fn dmabuf(&self, pointer: u64, len: usize, flags: u64) -> Check<c_int> {
        let mut fd = -1;
        call!(
            self,
            "cuMemGetHandleForAddressRange",
            (*mut c_int, u64, usize, c_int, u64),
            (&mut fd, pointer, len, 1, flags)
        )
        .map(|()| fd)
    }

    pub(crate) fn enable_peer(&self, context: usize) -> Check {
        call!(self, "cuCtxEnablePeerAccess", (usize, u32), (context, 0))
    }
}

/// Calls of modules.
impl Driver {
    pub(crate) fn load(&self, ptx: &str) -> Check<usize> {
        let text = CString::new(ptx).unwrap();
        let mut module = 0;
        call!(self, "cuModuleLoadData", (*mut usize, *const c_char), (&mut module, text.as_ptr()))
            .map(|()| module)
    }

    /// Loads with an error log; the log of a refusal.
    pub(crate) fn load_with_log(&self, ptx: &str) -> Result<usize, (c_int, String)> {
        let text = CString::new(ptx).unwrap();
        let mut module = 0;
        let mut log = vec![0_u8; 256];
        let options: [c_int; 2] = [5, 6];
        let values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
        let result = (|| {
            call!(
                self,
                "cuModuleLoadDataEx",
                (*mut usize, *const c_char, u32, *const c_int, *const *mut c_void),
                (&mut module, text.as_ptr(), 2, options.as_ptr(), values.as_ptr())
            )
        })();
        let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
        let text = String::from_utf8_lossy(&log[..end]).into_owned();
        result.map(|()| module).map_err(|code| (code, text))
    }

    pub(crate) fn unload(&self, module: usize) -> Check {
        call!(self, "cuModuleUnload", (usize), (module))
    }

    pub(crate) fn function(&self, module: usize, name: &str) -> Check<usize> {
        let name = CString::new(name).unwrap();
        let mut function = 0;
        call!(
            self,
            "cuModuleGetFunction",
            (*mut usize, usize, *const c_char),
            (&mut function, module, name.as_ptr())
        )
        .map(|()| function)
    }

    /// Launches with parameters of 8 bytes each.
    pub(crate) fn launch(
        &self,
        function: usize,
        grid: u32,
        block: u32,
        stream: usize,
        params: &[u64],
    ) -> Check {
        let places: Vec<*const u64> = params.iter().map(std::ptr::from_ref).collect();
        call!(
            self,
            "cuLaunchKernel",
            (usize, u32, u32, u32, u32, u32, u32, u32, usize, *const *const u64, *const c_void),
            (function, grid, 1, 1, block, 1, 1, 0, stream, places.as_ptr(), std::ptr::null())
        )
    }
}

/// Runs a program in a child process that has no thread but this one; its exit status.
pub(crate) fn in_child(program: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs only `program`, which the tests keep to system calls and to calls of
    // the driver that take no lock after a fork, or it is the first to use the driver.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(program());
        }
        let mut status = 0;
        libc::waitpid(child, &mut status, 0);
        status
    }
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| rng.u8(1..0x80)).collect()
}

/// The time for which processors have run this process. A test that has the driver is the only one that runs.
pub(crate) fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the result is local.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(code, 0, "every kernel has this clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
