//! The vendor libraries libibverbs, libcuda, libnvidia-ml and libcufile, loaded at run time if they are present.
//!
//! A loaded library stays loaded: unloading a driver's library while its threads run is not safe. A
//! driver that does not fit its library may hang or crash the process. A caller that must not crash
//! loads the library in a separate process.

use libloading::{Library, Symbol};
use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

/// The reason why a library can't be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// There is no file of that name.
    NotInstalled,
    /// The file exists, but can't be loaded or does not work, for this reason.
    Broken(String),
}

struct Vendor(ManuallyDrop<Library>);

impl Vendor {
    fn load(file: &str) -> Result<Self, Unavailable> {
        // SAFETY: loading runs the initialisers of a library that the host's owner installed under
        // this name for programs to load.
        match unsafe { Library::new(file) } {
            Ok(library) => Ok(Self(ManuallyDrop::new(library))),
            Err(e) => {
                let why = e.source().map_or_else(|| e.to_string(), ToString::to_string);
                // The loader's message starts with the missing file: this library, or one that it
                // needs.
                let absent = why.starts_with(file) && why.contains("No such file");
                Err(if absent { Unavailable::NotInstalled } else { Unavailable::Broken(why) })
            }
        }
    }

    /// # Safety
    /// `F` is the type that the library documents for the function `name`.
    unsafe fn function<F>(&self, name: &str) -> Result<Symbol<'_, F>, Unavailable> {
        // SAFETY: the caller keeps the promise of this function.
        unsafe { self.0.get(name.as_bytes()) }
            .map_err(|_| Unavailable::Broken(format!("the library has no function {name}")))
    }
}

/// A device of libibverbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsDevice {
    /// The device's name, as under `/sys/class/infiniband`.
    pub name: String,
    /// Whether this process can open it.
    pub opens: bool,
}

/// The RDMA devices that libibverbs finds.
///
/// # Errors
/// If there is no usable libibverbs.
pub fn verbs() -> Result<Vec<VerbsDevice>, Unavailable> {
    type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut c_void;
    type Free = unsafe extern "C" fn(*mut *mut c_void);
    type Name = unsafe extern "C" fn(*mut c_void) -> *const c_char;
    type Open = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
    type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
    let library = Vendor::load("libibverbs.so.1")?;
    // SAFETY: the types are those of `infiniband/verbs.h`; devices are used before their list is
    // freed, and a context is closed once, after it was opened.
    unsafe {
        let list: Symbol<'_, List> = library.function("ibv_get_device_list")?;
        let free: Symbol<'_, Free> = library.function("ibv_free_device_list")?;
        let name: Symbol<'_, Name> = library.function("ibv_get_device_name")?;
        let open: Symbol<'_, Open> = library.function("ibv_open_device")?;
        let close: Symbol<'_, Close> = library.function("ibv_close_device")?;
        let mut count = 0;
        let all = list(&raw mut count);
        if all.is_null() {
            let why = std::io::Error::last_os_error();
            return Err(Unavailable::Broken(format!("it can't list devices: {why}")));
        }
        let devices = (0..usize::try_from(count).unwrap_or(0))
            .map(|i| {
                let device = *all.add(i);
                let context = open(device);
                let opens = !context.is_null();
                if opens {
                    close(context);
                }
                VerbsDevice { name: text(name(device)), opens }
            })
            .collect();
        free(all);
        Ok(devices)
    }
}

/// The driver's version and its devices, as libcuda reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cuda {
    /// The newest CUDA version that the driver supports, such as 12080 for 12.8.
    pub version: u32,
    /// The devices that this process may use.
    pub devices: Vec<CudaDevice>,
}

/// A device of libcuda.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaDevice {
    /// The device's name, given by the vendor.
    pub name: String,
    /// The device's memory, in bytes.
    pub memory_bytes: u64,
    /// The device's address on the PCI bus, such as `0000:1b:00.0`.
    pub bus: String,
}

/// The driver and the devices that libcuda finds.
///
/// # Errors
/// If there is no usable libcuda, or libcuda reports an error.
pub fn cuda() -> Result<Cuda, Unavailable> {
    type Init = unsafe extern "C" fn(c_uint) -> c_int;
    type Number = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Device = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type Text = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type Size = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    type ErrorString = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
    const TEXT_MAX: usize = 256;
    let library = Vendor::load("libcuda.so.1")?;
    // SAFETY: the types are those of `cuda.h`; every pointer is to a local variable of that type,
    // and a buffer for text is passed with its size.
    unsafe {
        let why: Symbol<'_, ErrorString> = library.function("cuGetErrorString")?;
        let ok = |call: &str, code: c_int| {
            if code == 0 {
                return Ok(());
            }
            let mut words = std::ptr::null();
            why(code, &raw mut words);
            let words = if words.is_null() { String::new() } else { format!(", {}", text(words)) };
            Err(Unavailable::Broken(format!("{call}: error {code}{words}")))
        };
        let init: Symbol<'_, Init> = library.function("cuInit")?;
        let version: Symbol<'_, Number> = library.function("cuDriverGetVersion")?;
        let count: Symbol<'_, Number> = library.function("cuDeviceGetCount")?;
        let device: Symbol<'_, Device> = library.function("cuDeviceGet")?;
        let name: Symbol<'_, Text> = library.function("cuDeviceGetName")?;
        let bus: Symbol<'_, Text> = library.function("cuDeviceGetPCIBusId")?;
        let size: Symbol<'_, Size> = library.function("cuDeviceTotalMem_v2")?;
        ok("cuInit", init(0))?;
        let (mut served, mut devices) = (0, 0);
        ok("cuDriverGetVersion", version(&raw mut served))?;
        ok("cuDeviceGetCount", count(&raw mut devices))?;
        let mut found = Cuda { version: u32::try_from(served).unwrap_or(0), devices: Vec::new() };
        for i in 0..devices {
            let (mut id, mut bytes) = (0, 0);
            ok("cuDeviceGet", device(&raw mut id, i))?;
            ok("cuDeviceTotalMem", size(&raw mut bytes, id))?;
            let ask = |call: &str, function: &Symbol<'_, Text>| {
                let mut buffer = [0 as c_char; TEXT_MAX];
                // The last byte is never written, so the text ends in a zero byte.
                ok(call, function(buffer.as_mut_ptr(), TEXT_MAX as c_int - 1, id))?;
                Ok(text(buffer.as_ptr()))
            };
            found.devices.push(CudaDevice {
                name: ask("cuDeviceGetName", &name)?,
                memory_bytes: bytes as u64,
                bus: ask("cuDeviceGetPCIBusId", &bus)?.to_ascii_lowercase(),
            });
        }
        Ok(found)
    }
}

/// Bytes of a GPU's memory that nothing uses, by the address of the GPU on the PCI bus, such as `0000:1b:00.0`. Unlike
/// libcuda, the library that is asked makes no context on the GPU.
///
/// # Errors
/// If there is no usable libnvidia-ml, or it does not know the GPU.
pub fn gpu_memory_free(bus: &str) -> Result<u64, Unavailable> {
    /// `nvmlMemory_t`.
    #[repr(C)]
    #[derive(Default)]
    struct Memory {
        _total: u64,
        free: u64,
        _used: u64,
    }
    type Init = unsafe extern "C" fn() -> c_int;
    type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    type Info = unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int;
    let bus = CString::new(bus).map_err(|error| Unavailable::Broken(error.to_string()))?;
    let library = Vendor::load("libnvidia-ml.so.1")?;
    // SAFETY: the types are those of `nvml.h`; every pointer is to a local variable of that type, and the text ends with
    // a zero byte.
    unsafe {
        let init: Symbol<'_, Init> = library.function("nvmlInit_v2")?;
        let find: Symbol<'_, Find> = library.function("nvmlDeviceGetHandleByPciBusId_v2")?;
        let info: Symbol<'_, Info> = library.function("nvmlDeviceGetMemoryInfo")?;
        let ok = |call: &str, code: c_int| match code {
            0 => Ok(()),
            code => Err(Unavailable::Broken(format!("{call}: error {code}"))),
        };
        let (mut device, mut memory) = (std::ptr::null_mut(), Memory::default());
        ok("nvmlInit", init())?;
        ok("nvmlDeviceGetHandleByPciBusId", find(bus.as_ptr(), &raw mut device))?;
        ok("nvmlDeviceGetMemoryInfo", info(device, &raw mut memory))?;
        Ok(memory.free)
    }
}

/// The version of libcufile, such as 1130 for 1.13; `None` if the library has no version function.
///
/// # Errors
/// If there is no usable libcufile.
pub fn cufile() -> Result<Option<u32>, Unavailable> {
    /// `CUfileError_t`.
    #[repr(C)]
    struct Status {
        error: c_int,
        cuda: c_int,
    }
    type Version = unsafe extern "C" fn(*mut c_int) -> Status;
    let library = Vendor::load("libcufile.so.0")?;
    // SAFETY: the type is that of `cufile.h`, and the pointer is to a local variable of that type.
    unsafe {
        let Ok(version) = library.function::<Version>("cuFileGetVersion") else { return Ok(None) };
        let mut number = 0;
        let status = version(&raw mut number);
        if (status.error, status.cuda) != (0, 0) {
            let why = format!("cuFileGetVersion: error {}", status.error);
            return Err(Unavailable::Broken(why));
        }
        Ok(u32::try_from(number).ok())
    }
}

/// # Safety
/// `from` is a C string that stays unchanged during the call.
unsafe fn text(from: *const c_char) -> String {
    // SAFETY: the caller keeps the promise of this function.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_distinguished_from_a_broken_one() {
        assert_eq!(
            Vendor::load("libkvferry-no-such-thing.so.1").err(),
            Some(Unavailable::NotInstalled)
        );
        let broken = Vendor::load("/proc/self/cmdline").err();
        assert!(matches!(broken, Some(Unavailable::Broken(_))), "{broken:?}");
        let library = Vendor::load("libc.so.6");
        if let Ok(library) = library {
            // SAFETY: never called.
            let none = unsafe { library.function::<unsafe extern "C" fn()>("no_such_function") };
            assert!(none.is_err());
        }
    }
}
