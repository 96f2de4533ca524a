//! Runs a test's body in a process of its own, with a stub in place of the driver's library.
//!
//! The driver is loaded once in a process and named by the environment. So each test starts its own program
//! again for its one test, whatever runs the tests.

use kvferry_sys::cuda::{Context, Driver};
use libloading::os::unix::Library;
use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the test whose body this process runs.
const CHILD: &str = "KVFERRY_CUDA_TEST";
const LIBRARY: &str = "KVFERRY_LIBCUDA";

/// A stub of the driver: how it is compiled, and its environment.
#[derive(Default)]
pub(crate) struct Stub<'a> {
    pub(crate) macros: &'a [&'a str],
    pub(crate) environment: &'a [(&'a str, &'a str)],
}

/// Runs `body` in a process that uses the stub. `test` is the test's own path, as the runner prints it.
pub(crate) fn with_stub(test: &str, stub: &Stub<'_>, body: impl FnOnce()) {
    if is_child(test) {
        return body();
    }
    if let Some(library) = compiled(test, stub.macros) {
        run_again(test, &library, stub.environment);
        let folder = library.parent().expect("it is in a folder");
        std::fs::remove_dir_all(folder).expect("nothing uses the stub any more");
    }
}

/// Runs `body` in a process that loads `library` as the driver.
pub(crate) fn with_library(test: &str, library: &Path, body: impl FnOnce()) {
    if is_child(test) { body() } else { run_again(test, library, &[]) }
}

fn is_child(test: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|name| name == test)
}

fn run_again(test: &str, library: &Path, environment: &[(&str, &str)]) {
    let program = std::env::current_exe().expect("a test knows its file");
    let ran = Command::new(program)
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, test)
        .env(LIBRARY, library)
        .envs(environment.iter().copied())
        .output()
        .expect("a test program starts");
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}\n{out}\n{err}", ran.status);
    assert!(out.contains("1 passed"), "no test is named {test}:\n{out}");
}

/// Compiles the stub into a folder of the test. `None` without a compiler.
fn compiled(test: &str, macros: &[&str]) -> Option<PathBuf> {
    let name = format!("cuda-{}-{}", test.replace("::", "-"), std::process::id());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("the folder of tests is writable");
    let library = folder.join("libcuda.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/stub.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(&library)
        .args(macros.iter().map(|it| format!("-D{it}")))
        .arg(source)
        .output();
    match built {
        Ok(ran) => {
            let said = String::from_utf8_lossy(&ran.stderr);
            assert!(ran.status.success(), "the stub does not compile: {said}");
            Some(library)
        }
        Err(e) => {
            println!("SKIPPED: a stub of the CUDA driver: no C compiler: {e}");
            None
        }
    }
}

/// The stub that this process has loaded.
pub(crate) struct Loaded(Library);

/// The stub of this process.
pub(crate) fn stub() -> Loaded {
    let file = std::env::var(LIBRARY).expect("the child has it");
    // SAFETY: the stub's initialiser reads a variable.
    Loaded(unsafe { Library::new(file) }.expect("the stub is loaded"))
}

impl Loaded {
    /// The calls since the last one of this function.
    pub(crate) fn calls(&self) -> Vec<String> {
        // SAFETY: the types are those of the stub; no other thread calls it meanwhile.
        unsafe {
            let calls = self.0.get::<unsafe extern "C" fn() -> *const c_char>(b"stub_calls\0");
            let clear = self.0.get::<unsafe extern "C" fn()>(b"stub_clear\0");
            let text = CStr::from_ptr(calls.expect("it is there")()).to_str().expect("it is ASCII");
            let lines = text.lines().map(str::to_owned).collect();
            clear.expect("it is there")();
            lines
        }
    }

    /// The names of the calls since the last one, without those that make a context current and back.
    pub(crate) fn work(&self) -> Vec<String> {
        const AROUND: [&str; 3] =
            ["cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"];
        let mut calls = self.calls();
        calls.retain(|call| !AROUND.iter().any(|name| call.starts_with(name)));
        calls
    }

    /// Makes functions fail from now on, as `cuMemcpyAsync=700,cuEventQuery=600`.
    pub(crate) fn fail(&self, list: &str) {
        let list = CString::new(list).expect("no zero byte");
        // SAFETY: the type is that of the stub, which copies the text.
        unsafe {
            let fail = self.0.get::<unsafe extern "C" fn(*const c_char)>(b"stub_fail\0");
            fail.expect("it is there")(list.as_ptr());
        }
    }

    /// Whether a thread is held in `cuInit`, for which `STUB_HELD_INIT` is set.
    pub(crate) fn is_in_init(&self) -> bool {
        // SAFETY: the type is that of the stub.
        let is_in = unsafe { self.0.get::<unsafe extern "C" fn() -> i32>(b"stub_in_init\0") };
        // SAFETY: as above. The function reads an atomic variable.
        unsafe { is_in.expect("it is there")() != 0 }
    }

    /// Lets the thread that is held in `cuInit` go on.
    pub(crate) fn release_init(&self) {
        // SAFETY: the type is that of the stub.
        let release = unsafe { self.0.get::<unsafe extern "C" fn()>(b"stub_release_init\0") };
        // SAFETY: as above. The function writes an atomic variable.
        unsafe { release.expect("it is there")() };
    }

    /// Number of contexts that are pushed on this thread, and its capture mode.
    pub(crate) fn thread(&self) -> (i32, u32) {
        // SAFETY: the types are those of the stub.
        unsafe {
            let depth = self.0.get::<unsafe extern "C" fn() -> i32>(b"stub_depth\0");
            let mode = self.0.get::<unsafe extern "C" fn() -> u32>(b"stub_mode\0");
            (depth.expect("it is there")(), mode.expect("it is there")())
        }
    }
}

pub(crate) fn driver() -> &'static Driver {
    Driver::get().expect("the stub works")
}

/// The primary context of the first device.
pub(crate) fn context() -> Context {
    Context::primary(driver().device(0).expect("a device")).expect("a context")
}
