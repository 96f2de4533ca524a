//! Modules of PTX text, and launches.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::{In, Out, Text, enter_current};
use crate::abi::{Error, Result};
use crate::faults::Fault;
use crate::modules::Module;
use crate::ops::{Kernel, Touches, Work};
use crate::ptx::{Function, Launch, parse};
use crate::state::Session;
use crate::submit::Order;
use crate::timeline::Engine;

/// `CU_JIT_ERROR_LOG_BUFFER` and its size.
const ERROR_LOG: c_int = 5;
const ERROR_LOG_BYTES: c_int = 6;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleLoadData(module: Out<usize>, image: In<c_char>) -> c_int {
    enter_current("cuModuleLoadData", |session, device| {
        load(session, device, &module, &image).map_err(|(error, _)| error)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleLoadDataEx(
    module: Out<usize>,
    image: In<c_char>,
    count: c_uint,
    options: In<c_int>,
    values: In<*mut c_void>,
) -> c_int {
    enter_current("cuModuleLoadDataEx", |session, device| {
        let options = options.slice(count as usize)?;
        let values = values.slice(count as usize)?;
        load(session, device, &module, &image).map_err(|(error, text)| {
            let value = |wanted| options.iter().position(|&o| o == wanted).map(|at| values[at]);
            if let (Some(buffer), Some(room)) = (value(ERROR_LOG), value(ERROR_LOG_BYTES)) {
                let mut bytes: Vec<c_char> = text.bytes().map(|b| b as c_char).collect();
                bytes.truncate((room as usize).saturating_sub(1));
                bytes.push(0);
                // The caller gave no buffer for the log.
                let _ = Out(buffer.cast()).set_slice(&bytes, room as usize);
            }
            error
        })
    })
}

/// The newest PTX version of each driver, as major * 10 + minor.
fn newest_ptx(driver: c_int) -> u32 {
    match driver {
        11040 => 74,
        12020 => 82,
        12080 => 87,
        13000 => 90,
        _ => 92,
    }
}

fn load(
    session: &mut Session,
    device: usize,
    out: &Out<usize>,
    image: &In<c_char>,
) -> std::result::Result<(), (Error, String)> {
    let plain = |error| (error, String::new());
    out.require().map_err(plain)?;
    session.unsafe_in_capture().map_err(plain)?;
    let bytes = image.get().map_err(plain)? as u8;
    if bytes == 0x7f || bytes == 0x50 {
        return Err((Error::INVALID_IMAGE, "binary images are not supported".to_owned()));
    }
    let text = Text(image.0).read().map_err(|_| plain(Error::INVALID_IMAGE))?;
    if session.faults.hit(Fault::JitRefused) {
        return Err((Error::UNSUPPORTED_PTX_VERSION, "refused by a fault".to_owned()));
    }
    let functions = parse(&text, newest_ptx(session.config.version), 90).map_err(|refusal| {
        let text = format!("line {}: {}", refusal.line, refusal.text);
        eprintln!("fakecuda refuses a module: {text}");
        (refusal.error, text)
    })?;
    let functions: Vec<(usize, Arc<Function>)> =
        functions.into_iter().map(|f| (session.new_handle(), Arc::new(f))).collect();
    let handle = session.new_handle();
    session.modules.insert(handle, Module { device, functions });
    out.set(handle).map_err(plain)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleUnload(module: usize) -> c_int {
    enter_current("cuModuleUnload", |session, _| {
        session.modules.remove(&module).map(|_| ()).ok_or(Error::INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleGetFunction(
    function: Out<usize>,
    module: usize,
    name: Text,
) -> c_int {
    enter_current("cuModuleGetFunction", |session, _| {
        let name = name.read()?;
        let module = session.modules.get(&module).ok_or(Error::INVALID_HANDLE)?;
        let found = module.functions.iter().find(|(_, function)| function.name == name);
        function.set(found.ok_or(Error::NOT_FOUND)?.0)
    })
}

/// Markers of `extra`: its end, the parameter buffer and that buffer's size.
const EXTRA_END: usize = 0;
const EXTRA_BUFFER: usize = 1;
const EXTRA_SIZE: usize = 2;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: usize,
    params: In<In<u8>>,
    extra: In<usize>,
) -> c_int {
    enter_current("cuLaunchKernel", |session, device| {
        let (owner, function) = Module::function(session.modules.values(), function)?;
        let handle = session.stream_handle(stream, device)?;
        if owner != device || session.stream(handle)?.device != device {
            return Err(Error::INVALID_CONTEXT);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let per_block: u64 = block.iter().map(|&n| u64::from(n)).product();
        let empty = grid.iter().chain(&block).any(|&n| n == 0);
        if empty || per_block > 1024 || block_z > 64 || grid_y > 65535 || grid_z > 65535 {
            return Err(Error::INVALID_VALUE);
        }
        if shared_bytes > 227 << 10 || session.faults.hit(Fault::LaunchRefused) {
            return Err(Error::LAUNCH_OUT_OF_RESOURCES);
        }
        let params = parameters(&function, &params, &extra)?;
        let call_ns = session.config.rates.call_ns;
        session.timeline.advance(call_ns);
        launch(session, device, handle, Launch { function, params, grid, block })
    })
}

/// Copies the arguments, which may change once the call returns.
fn parameters(function: &Function, params: &In<In<u8>>, extra: &In<usize>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; function.param_bytes as usize];
    if !params.0.is_null() {
        for (index, param) in function.params.iter().enumerate() {
            // SAFETY: the caller promises a pointer for each parameter of the kernel.
            let source = unsafe { params.0.add(index).read_unaligned() };
            let at = param.offset as usize;
            let value = source.slice(param.len as usize)?;
            bytes[at..at + value.len()].copy_from_slice(&value);
        }
        return Ok(bytes);
    }
    if extra.0.is_null() {
        return if function.params.is_empty() { Ok(bytes) } else { Err(Error::INVALID_VALUE) };
    }
    let (mut buffer, mut size) = (std::ptr::null(), 0);
    for index in 0.. {
        // SAFETY: the caller promises pairs up to an end mark, which the loop does not pass.
        let (key, value) = unsafe {
            let key = extra.0.add(index * 2).read_unaligned();
            (key, if key == EXTRA_END { 0 } else { extra.0.add(index * 2 + 1).read_unaligned() })
        };
        match key {
            EXTRA_END => break,
            EXTRA_BUFFER => buffer = value as *const u8,
            EXTRA_SIZE => size = In(value as *const usize).get()?,
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    if size != bytes.len() {
        return Err(Error::INVALID_VALUE);
    }
    In(buffer).slice(size)
}

fn launch(session: &mut Session, device: usize, handle: usize, launch: Launch) -> Result {
    let forecast = session.forecast(device, &launch);
    let unknown = forecast.is_none();
    let forecast = forecast.unwrap_or_default();
    let kernel = Kernel {
        threads: (0..launch.threads()).collect(),
        unknown,
        touches: Vec::new(),
        read_only: Vec::new(),
        launch,
    };
    let what = format!("kernel `{}`", kernel.launch.function.name);
    let order = Order {
        work: Work::Kernel(Box::new(kernel)),
        engine: Engine::Compute,
        touches: Touches { ordered: forecast.touches, ..Touches::default() },
        ns: session.config.rates.kernel_ns(forecast.bytes, forecast.host),
        what,
    };
    let submitted = session.submit(handle, order)?;
    session.checker.unknown += u64::from(unknown && submitted.is_some());
    Ok(())
}
