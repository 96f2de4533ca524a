//! The adapter for RTP-LLM (adapters/rtp_llm), built on the library and run as two processes.

mod kit;

use kit::{Compiler, Language, Program, skipped};
use std::path::{Path, PathBuf};

fn adapter() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../adapters/rtp_llm")
}

fn text(path: &Path) -> String {
    path.to_str().expect("the path is text").to_owned()
}

/// Builds the adapter with its tests.
fn build(compiler: Compiler, more: &[&str]) -> Option<Program> {
    let adapter = adapter();
    let mut flags = vec!["-I".to_owned(), text(&adapter.join("src"))];
    flags.extend(more.iter().map(|flag| (*flag).to_owned()));
    for source in ["src/adapter.cc", "tests/task_cases.cc", "tests/peer_cases.cc"] {
        flags.push(text(&adapter.join(source)));
    }
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    Program::build(&text(&adapter.join("tests/main.cc")), compiler, Language::Cpp17, &flags)
}

#[test]
fn the_rtp_llm_adapter_does_what_rtp_llms_tests_expect() {
    for compiler in [Compiler::Gcc, Compiler::Clang] {
        if let Some(program) = build(compiler, &[]) {
            program.run(&[]);
        }
    }
}

#[test]
fn the_rtp_llm_adapter_is_clean_under_the_address_sanitizer() {
    // Optimising what the sanitizer adds takes longer than running it.
    let sanitized = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O0"];
    match build(Compiler::Gcc, &sanitized) {
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
    let stub = text(&adapter().join("tests/stub"));
    let flags = ["-DKVFERRY_RTPLLM_HEADERS", "-I", &stub, "-isystem", &source];
    if let Some(program) = build(Compiler::Gcc, &flags) {
        program.run(&[]);
    }
}
