//! The adapter for RTP-LLM (adapters/rtp_llm), built on the library and run as two processes.

use crate::kit::{Compiler, Language, Program, skipped, text};
use std::path::{Path, PathBuf};

fn adapter() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../adapters/rtp_llm")
}

type Build = fn(&str, Compiler, Language, &[&str]) -> Option<Program>;

/// Builds the adapter with its tests.
fn built(build: Build, compiler: Compiler, more: &[&str]) -> Option<Program> {
    let adapter = adapter();
    let (include, source) = (adapter.join("src"), adapter.join("src/adapter.cc"));
    let flags = [&["-I", text(&include), "-ldl"], more, &[text(&source)]].concat();
    build(text(&adapter.join("tests/main.cc")), compiler, Language::Cpp17, &flags)
}

#[test]
fn the_rtp_llm_adapter_does_what_rtp_llms_tests_expect() {
    for compiler in [Compiler::Gcc, Compiler::Clang] {
        if let Some(program) = built(Program::build, compiler, &[]) {
            program.run(&[]);
        }
    }
}

#[test]
fn the_rtp_llm_adapter_moves_blocks_in_memory_of_a_gpu() {
    let driver = kvferry_fakecuda::control::library_path();
    let driver: &'static str = text(&driver).to_owned().leak();
    for compiler in [Compiler::Gcc, Compiler::Clang] {
        if let Some(program) = built(Program::build, compiler, &[]) {
            program.with("KVFERRY_LIBCUDA", driver).run(&["gpu"]);
        }
    }
}

#[test]
fn the_rtp_llm_adapter_is_clean_under_the_address_sanitizer() {
    // Optimising what the sanitizer adds takes longer than running it.
    let sanitized = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O0"];
    match built(Program::build, Compiler::Gcc, &sanitized) {
        // Processes end with everything open on purpose.
        Some(program) => program.with("ASAN_OPTIONS", "detect_leaks=0").run(&[]),
        None => skipped("AddressSanitizer: gcc has none here"),
    }
}

#[test]
fn the_rtp_llm_adapter_implements_rtp_llms_own_headers() {
    let Ok(source) = std::env::var("KVFERRY_RTPLLM_SRC") else {
        return skipped(
            "RTP-LLM's headers: set KVFERRY_RTPLLM_SRC to a checkout of alibaba/rtp-llm",
        );
    };
    let stub = adapter().join("tests/stub");
    let flags = ["-DKVFERRY_RTPLLM_HEADERS", "-I", text(&stub), "-isystem", &source];
    let build = Program::build_with_foreign_headers;
    if let Some(program) = built(build, Compiler::Gcc, &flags) {
        program.run(&[]);
    }
}
