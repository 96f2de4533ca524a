//! The loopback agent in `adapters/trtllm_loopback`: built by its script, loaded and called as TensorRT-LLM does.

use crate::kit::{self, Compiler, Language, Program, folder, output, skipped, text};
use kvferry_testkit::hanging::HangingDisk;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

const LIBRARY: &str = "libtensorrt_llm_nixl_wrapper.so";
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../adapters/trtllm_loopback");
/// The agent's own `kLeftMax`.
const STAGES_LEFT_MAX: usize = 4;
const SANITIZERS: &str = "-fsanitize=address,undefined";
/// The program finds kvferry through the agent's library only.
const PLAIN: &[&str] = &["-Wl,--as-needed"];
const SANITIZED: &[&str] = &["-Wl,--as-needed", SANITIZERS, "-fno-sanitize-recover=all", "-g"];

fn compilers() -> impl Iterator<Item = (Compiler, &'static str)> {
    [(Compiler::Gcc, "g++"), (Compiler::Clang, "clang++")].into_iter()
}

/// An empty folder that no other test has.
fn empty(name: &str) -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = kit::scratch().join(format!("{name}-{count}"));
    fs::create_dir(&folder).expect("a folder for the test");
    folder
}

/// What makes the library in `to`. `settings` are environment variables.
fn script(to: &Path, original: Option<&Path>, settings: &[&str]) -> Command {
    let mut call = Command::new("env");
    call.args(["-u", "KVFERRY_TRTLLM_SRC"]).args(settings);
    if kit::is_thread_sanitized() {
        let libraries = "-lstdc++ -lm -lc -lgcc_s -lgcc";
        call.arg(format!("CXXFLAGS={} {libraries}", kit::THREAD_SANITIZED.join(" ")));
    }
    call.arg(format!("{SOURCES}/build.sh"));
    call.arg(folder()).arg(to).args(original);
    call
}

fn build_library(to: &Path, original: Option<&Path>, settings: &[&str]) {
    let built = script(to, original, settings).output().expect("env is there");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// The folder of the library that a compiler makes, without an original behind it.
fn shared_library(command: &str) -> PathBuf {
    let built = kit::shared(&format!("loopback-{command}"), |to| {
        build_library(to, None, &[&format!("CXX={command}")]);
        true
    });
    built.expect("the script ended with success")
}

/// Runs cases of the program, each in an empty folder, with the library of that folder.
fn run(program: Program, library: &Path, cases: &[&str]) {
    let program = program.with("LD_LIBRARY_PATH", text(library).to_owned().leak());
    let program = program.with("ASAN_OPTIONS", "detect_leaks=0");
    for case in cases {
        program.run(&[case, text(&empty("files"))]);
    }
}

fn program(compiler: Compiler, flags: &[&str]) -> Option<Program> {
    let source = "../../adapters/trtllm_loopback/tests/loopback.cpp";
    Program::build(source, compiler, Language::Cpp17, flags)
}

/// Runs the cases with library and program of each compiler.
fn passes(cases: &[&str]) {
    for (compiler, command) in compilers() {
        let Some(program) = program(compiler, PLAIN) else { continue };
        run(program, &shared_library(command), cases);
    }
}

#[test]
fn every_byte_goes_to_its_file_and_back() {
    passes(&["bytes", "cases"]);
}

#[test]
fn blocks_in_memory_of_gpus_go_to_files_and_back() {
    let driver = text(&kvferry_fakecuda::control::library_path()).to_owned().leak();
    let Some(program) = program(Compiler::Gcc, PLAIN) else { return };
    run(program.with("KVFERRY_LIBCUDA", driver), &shared_library("g++"), &["on-device"]);
}

#[test]
fn stages_that_a_disk_still_writes_to_are_kept_and_released_once_the_disk_has_answered() {
    let driver = text(&kvferry_fakecuda::control::library_path()).to_owned().leak();
    let Some(program) = program(Compiler::Gcc, PLAIN) else { return };
    let folder = empty("hangs");
    let at = folder.join("disk");
    fs::create_dir(&at).expect("a folder for the file system");
    let Some(disk) = HangingDisk::mount(&at) else { return };
    // The pattern of seed 1 of the program.
    let block: Vec<u8> = (0..4096u32).map(|at| (at * 31 + 8) as u8).collect();
    for number in 0..STAGES_LEFT_MAX {
        fs::write(at.join(number.to_string()), &block).expect("the disk answers");
    }
    disk.lose_reads(STAGES_LEFT_MAX);
    let library = text(&shared_library("g++")).to_owned().leak();
    let program = program.with("LD_LIBRARY_PATH", library).with("KVFERRY_LIBCUDA", driver);
    let program = program.with("KVFERRY_TIMEOUT_MS", "1000").with("KVFERRY_SILENCE_MS", "200");
    thread::scope(|scope| {
        let running = scope.spawn(|| program.ran(&["hangs", text(&folder)]));
        while !running.is_finished() && !folder.join("answer").exists() {
            thread::sleep(Duration::from_millis(1));
        }
        disk.release();
        let (status, errors) = running.join().expect("no panic");
        assert!(status.success(), "{status}\n{errors}");
    });
}

#[test]
fn each_refusal_is_an_exception_with_reason_file_and_advice() {
    passes(&["refusals"]);
}

#[test]
fn an_offload_without_space_fails_and_leaves_no_part_of_a_block() {
    passes(&["file-too-large", "full-device"]);
    let probe = empty("probe");
    let mount = ["-m", "mount", "-t", "tmpfs", "kvferry", text(&probe)];
    let mounted = Command::new("unshare").args(mount).output();
    if !mounted.is_ok_and(|ran| ran.status.success()) {
        return skipped("a full file system: mounting one needs root");
    }
    passes(&["full-disk"]);
}

#[test]
fn requests_come_from_many_threads_and_not_from_a_forked_child() {
    passes(&["many-threads", "forked"]);
}

#[test]
fn an_agent_leaves_no_thread_descriptor_or_handle_and_may_outlive_main() {
    passes(&["ends", "stays-open"]);
}

#[test]
#[ignore = "slow: make test-slow"]
fn the_agent_is_clean_under_the_address_sanitizer() {
    let Some(program) = program(Compiler::Gcc, SANITIZED) else {
        return skipped("AddressSanitizer: g++ has none here");
    };
    let library = empty("sanitized");
    build_library(&library, None, &["CXX=g++", &format!("CXXFLAGS={SANITIZERS} -g")]);
    let cases = ["cases", "refusals", "file-too-large", "many-threads", "ends", "stays-open"];
    run(program, &library, &cases);
}

/// The toy original and its dependency in a folder of their own.
fn build_original(folder: &Path) -> PathBuf {
    let source = format!("{SOURCES}/tests/original.cpp");
    let (original, dependency) = (folder.join(LIBRARY), folder.join("libtoy_nixl.so"));
    let (original_file, dependency_file) = (text(&original), text(&dependency));
    let common = ["-shared", "-fPIC", &source, "-o"];
    output(
        "g++",
        &[&common[..], &[dependency_file, "-DDEPENDENCY", "-Wl,-soname,libtoy_nixl.so"]].concat(),
    );
    let soname = format!("-Wl,-soname,{LIBRARY}");
    output(
        "g++",
        &[&common[..], &[original_file, dependency_file, &soname, "-Wl,-rpath,$ORIGIN"]].concat(),
    );
    original
}

#[test]
fn the_original_is_found_through_the_library_which_names_what_it_lacks_and_works_without_it() {
    let Some(program) = program(Compiler::Gcc, PLAIN) else { return };
    let (library, libs) = (empty("behind"), empty("libs"));
    let original = build_original(&libs);
    build_library(&library, Some(&original), &["CXX=g++"]);
    run(program.clone(), &library, &["original"]);
    for missing in [libs.join("libtoy_nixl.so"), original.clone()] {
        fs::remove_file(&missing).expect("it was built");
        let named = if missing == original { text(&original) } else { "libtoy_nixl.so" };
        let program = program.clone().with("LD_LIBRARY_PATH", text(&library).to_owned().leak());
        program.run(&["incomplete", named]);
    }
    run(program, &shared_library("g++"), &["alone"]);
}

#[test]
fn the_script_refuses_an_original_that_is_not_one() {
    let library = empty("refused");
    let (ours, copy) = (library.join(LIBRARY), library.join("copy.so"));
    for to in [&ours, &copy] {
        fs::copy(shared_library("g++").join(LIBRARY), to).expect("it was built");
    }
    for (original, reason) in [
        (ours, "would be overwritten"),
        (copy, "is not TensorRT-LLM's library"),
        (library.join("none.so"), "no such file"),
    ] {
        let ran = script(&library, Some(&original), &[]).output().expect("env is there");
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert!(!ran.status.success() && errors.contains(reason), "{errors}");
    }
}

#[test]
fn the_library_exports_one_function_has_tensorrt_llms_name_and_stays_loaded() {
    let library = shared_library("g++").join(LIBRARY);
    assert_eq!(kit::exported(&library), ["createNixlLoopbackAgent"]);
    let dynamic = output("readelf", &["-d", text(&library)]);
    for line in [format!("soname: [{LIBRARY}]"), "[libkvferry.so.0]".into(), "NODELETE".into()] {
        assert!(dynamic.contains(&line), "{line} is missing in:\n{dynamic}");
    }
}

/// The program is compiled with our restatement: it runs only if both have the same layouts.
#[test]
fn the_library_compiled_with_tensorrt_llms_headers_serves_callers_of_our_restatement() {
    let Ok(source) = std::env::var("KVFERRY_TRTLLM_SRC") else {
        return skipped("TensorRT-LLM's headers: KVFERRY_TRTLLM_SRC does not name its source");
    };
    let Some(program) = program(Compiler::Gcc, PLAIN) else { return };
    let library = empty("headers");
    build_library(&library, None, &[&format!("KVFERRY_TRTLLM_SRC={source}")]);
    run(program, &library, &["bytes", "cases", "refusals"]);
}
