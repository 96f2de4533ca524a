//! C and C++ programs on the built library: compiled without a warning, and run.

use crate::kit::{self, Compiler, Language, Program, folder, scratch, skipped, text};
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const LANGUAGES: [Language; 2] = [Language::C11, Language::Cpp17];

/// Compiles a program with both compilers in the given languages, and runs what gcc made.
fn builds_and_runs(source: &str, languages: &[Language], arguments: &[&str]) {
    for language in languages {
        for compiler in [Compiler::Gcc, Compiler::Clang] {
            let Some(program) = Program::build(source, compiler, *language, &[]) else { continue };
            program.run(arguments);
        }
    }
}

#[test]
fn layouts_are_those_that_programs_were_compiled_with() {
    builds_and_runs("tests/c/layouts.c", &LANGUAGES, &[]);
}

#[test]
fn kvferry_h_does_what_it_says() {
    builds_and_runs("tests/c/kvferry.c", &LANGUAGES, &[]);
}

#[test]
fn a_forked_child_with_the_number_of_its_parent_uses_none_of_its_handles() {
    let program = Program::build("tests/c/pid_namespace.c", Compiler::Gcc, Language::C11, &[]);
    let Some(program) = program else { return };
    let (status, errors) = program.ran(&[]);
    if status.code() == Some(77) {
        return skipped("pid namespaces can't be made here");
    }
    assert!(status.success() && errors.is_empty(), "{status}\n{errors}");
}

#[test]
fn memory_of_gpus_is_moved_in_order() {
    runs_on_the_fake_driver("tests/c/gpu.c", &[]);
}

#[test]
fn bad_inputs_about_memory_of_gpus_are_refused_with_what_to_do() {
    // A transfer whose copy may still run fails once this limit has passed.
    runs_on_the_fake_driver("tests/c/gpu_inputs.c", &[("KVFERRY_SILENCE_MS", "10000")]);
}

#[test]
fn mooncakes_c_api_moves_memory_of_gpus() {
    runs_on_the_fake_driver("tests/c/transfer_engine_gpu.c", &[]);
}

#[test]
fn tasks_move_blocks_in_memory_of_gpus() {
    runs_on_the_fake_driver("tests/c/tasks_gpu.c", &[]);
}

fn runs_on_the_fake_driver(source: &str, environment: &[(&'static str, &'static str)]) {
    let driver = kvferry_fakecuda::control::library_path();
    for language in LANGUAGES {
        let program = Program::build(source, Compiler::Gcc, language, &["-ldl"]);
        let Some(program) = program else { continue };
        let driver: &'static str = text(&driver).to_owned().leak();
        let program = program.with("KVFERRY_LIBCUDA", driver);
        let given = environment.iter().fold(program, |it, (name, value)| it.with(name, value));
        given.run(&[driver]);
    }
}

#[test]
fn kvferry_tasks_h_does_what_it_says() {
    builds_and_runs("tests/c/tasks.c", &LANGUAGES, &[]);
}

#[test]
fn an_open_port_is_warned_about_without_a_log_and_refused_where_a_secret_is_required() {
    let program = Program::build("tests/c/open_port.c", Compiler::Gcc, Language::C11, &[]);
    let Some(program) = program else { return };
    program.fails(&["stderr"], "without a secret");
    program.run(&["callback"]);
    program.with("KVFERRY_REQUIRE_SECRET", "1").run(&["refused"]);
}

#[test]
fn the_example_in_c_runs() {
    builds_and_runs("examples/write.c", &[Language::C11], &[]);
}

#[test]
fn the_example_in_cpp_runs() {
    let file = scratch().join("example.kv");
    builds_and_runs("examples/offload.cpp", &[Language::Cpp17], &[text(&file)]);
}

#[test]
fn programs_linked_to_mooncakes_library_run_on_ours() {
    builds_and_runs("tests/c/transfer_engine.c", &LANGUAGES, &[]);
}

#[test]
fn c_programs_are_clean_under_the_address_sanitizer() {
    for source in ["tests/c/kvferry.c", "tests/c/tasks.c", "tests/c/transfer_engine.c"] {
        let flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"];
        match Program::build(source, Compiler::Gcc, Language::C11, &flags) {
            // What the last case leaves open, the process leaves to the kernel on purpose.
            Some(program) => program.with("ASAN_OPTIONS", "detect_leaks=0").run(&[]),
            None => skipped("AddressSanitizer: gcc has none here"),
        }
    }
}

#[test]
fn what_tests_share_is_built_once_and_anew_when_an_input_has_changed() {
    let folder = scratch().join("shared");
    fs::create_dir_all(folder.join("below")).expect("a folder for the test");
    // A process was killed while it built this.
    fs::create_dir(folder.join("thing.new")).expect("a folder for the test");
    assert_eq!(kit::shared_in(&folder, "thing", |_| false), None);
    let built = AtomicUsize::new(0);
    let build = |to: &Path| {
        built.fetch_add(1, Ordering::Relaxed);
        fs::write(to, "whole").is_ok()
    };
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let thing = kit::shared_in(&folder, "thing", build).expect("it is built");
                assert_eq!(fs::read(thing).expect("it was built"), b"whole");
            });
        }
    });
    assert_eq!(built.into_inner(), 1);

    let inputs = || {
        let mut found = DefaultHasher::new();
        kit::hash_files(&folder, &mut found);
        found.finish()
    };
    let before = inputs();
    assert_eq!(inputs(), before);
    let source = folder.join("below/source.c");
    let after = ["int a;", "int b;"].map(|code| {
        fs::write(&source, code).expect("the folder was made");
        inputs()
    });
    assert!(before != after[0] && after[0] != after[1]);
}

/// Without this, the silence about the other programs says nothing.
#[test]
fn the_thread_sanitizer_sees_races_with_callbacks_and_with_memory_under_way() {
    if !kit::is_thread_sanitized() {
        return skipped("ThreadSanitizer: `make test-sanitizers` compiles the library with it");
    }
    let program = Program::build("tests/c/race.c", Compiler::Gcc, Language::C11, &[]);
    let program = program.expect("gcc compiles for ThreadSanitizer");
    for case in ["callback", "memory"] {
        program.fails(&[case], "ThreadSanitizer: data race");
    }
}

#[test]
fn the_library_exports_these_functions_and_no_others() {
    let exported = kit::exported(&folder().join("libkvferry.so.0"));
    let golden = include_str!("../exported.txt");
    let golden: Vec<_> = golden.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(exported, golden);
    let foreign: Vec<_> = exported.iter().filter(|name| !name.starts_with("kvferry_")).collect();
    assert!(foreign.is_empty(), "a program may have Mooncake's own library beside it: {foreign:?}");
}

#[test]
fn the_library_needs_only_libraries_of_the_c_compiler() {
    let library = folder().join("libkvferry.so.0");
    let dynamic = kit::output("readelf", &["-d", text(&library)]);
    let needed = dynamic.lines().filter(|line| line.contains("(NEEDED)"));
    for line in needed {
        let known = ["libc.so", "libgcc_s.so", "libm.so", "ld-linux"];
        assert!(known.iter().any(|name| line.contains(&format!("[{name}"))), "{line}");
    }
}

#[test]
fn the_second_library_has_mooncakes_names_alone_and_needs_the_first_one_beside_it() {
    let library = folder().join("libtransfer_engine.so");
    let first = kit::exported(&folder().join("libkvferry.so.0"));
    let mooncake = first.iter().filter_map(|name| name.strip_prefix("kvferry_mooncake_"));
    let mooncake: Vec<_> = mooncake.collect();
    assert_eq!(
        (kit::exported(&library), mooncake.len()),
        (mooncake.iter().map(|&name| name.to_owned()).collect(), 27)
    );
    let size = library.metadata().expect("it is there").len();
    assert!(size < 20_000, "{size} bytes");
    let dynamic = kit::output("readelf", &["-d", text(&library)]);
    for needed in ["libtransfer_engine.so", "NEEDED", "libkvferry.so.0", "RUNPATH", "$ORIGIN"] {
        assert!(dynamic.contains(needed), "{needed} is missing in:\n{dynamic}");
    }
}

#[test]
fn pkg_config_finds_header_and_library() {
    let Some(flags) = kit::pkg_config() else {
        return skipped("pkg-config is not here (apt-get install pkg-config)");
    };
    assert!(flags.contains("-l:libkvferry.so.0") && flags.contains("/include"), "{flags}");
}
