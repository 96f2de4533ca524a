//! Builds C programs against the library as it is packaged, and runs them.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Fault bound: the slowest program takes a few seconds.
const PROGRAM_LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn skipped(why: &str) {
    println!("SKIPPED: {why}");
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

const PREFIX: &str = "capi-";

/// Removes the folders of test processes that have ended.
fn remove_left_folders(all: &Path) {
    for entry in std::fs::read_dir(all).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// A folder with the libraries, made once per test process by what packages them.
pub(crate) fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let test = std::env::current_exe().expect("a test knows its file");
        let library = test.parent().expect("it is in a folder").join("libkvferry_capi.so");
        let all = Path::new(env!("CARGO_TARGET_TMPDIR"));
        remove_left_folders(all);
        let folder = all.join(format!("{PREFIX}{}", std::process::id()));
        let (library, to) = (library.to_str().expect("text"), folder.to_str().expect("text"));
        let package = here().join("package");
        let package = package.to_str().expect("text");
        output("sh", &[package, library, to, env!("CARGO_PKG_VERSION")]);
        folder
    })
}

/// A folder with a library of Mooncake's name that has its functions, and does nothing: programs are linked
/// to it as they are to Mooncake's, and run with ours.
fn stand_in() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = folder().join("mooncake");
        std::fs::create_dir_all(&folder).expect("a folder for the library");
        let mut names = exported(&self::folder().join("libtransfer_engine.so"));
        names.push("kvferry_last_error".to_owned());
        let code: String = names.iter().map(|name| format!("void {name}(void) {{}}\n")).collect();
        let source = folder.join("functions.c");
        std::fs::write(&source, code).expect("the folder was made");
        let library = folder.join("libtransfer_engine.so");
        let (source, library) = (source.to_str().expect("text"), library.to_str().expect("text"));
        let soname = "-Wl,-soname,libtransfer_engine.so";
        output("gcc", &["-shared", "-fPIC", "-fno-builtin", soname, source, "-o", library]);
        folder
    })
}

/// Whether the library and these tests are compiled with ThreadSanitizer, as `make test-sanitizers` does.
pub(crate) fn is_thread_sanitized() -> bool {
    std::env::var_os("KVFERRY_SANITIZER").is_some_and(|name| name == "thread")
}

/// A compiler's flags for code that runs with a library compiled by rustc with ThreadSanitizer: without
/// the runtime of gcc, which is another one.
pub(crate) const THREAD_SANITIZED: &[&str] = &["-fsanitize=thread", "-g", "-nodefaultlibs"];

/// The same for programs: they have the runtime that comes with rustc, and export it to the library.
fn thread_sanitized_program(language: Language) -> Vec<String> {
    let folder = output("rustc", &["--print", "target-libdir"]);
    let files = std::fs::read_dir(folder.trim()).expect("rustc has libraries").flatten();
    let mut files = files.map(|entry| entry.path().to_str().expect("text").to_owned());
    let runtime = files.find(|file| file.ends_with("rt.tsan.a"));
    let runtime = runtime.unwrap_or_else(|| panic!("{folder} has no runtime of ThreadSanitizer"));
    let mut flags: Vec<String> = THREAD_SANITIZED.iter().map(|&flag| flag.into()).collect();
    flags.extend(
        ["-rdynamic", "-Wl,--whole-archive", &runtime, "-Wl,--no-whole-archive"].map(Into::into),
    );
    flags.extend(matches!(language, Language::Cpp17).then(|| "-lstdc++".into()));
    flags.extend(["-lm", "-lc", "-lgcc_s", "-lgcc"].map(Into::into));
    flags
}

/// What a command prints; it must succeed.
pub(crate) fn output(command: &str, arguments: &[&str]) -> String {
    let ran = Command::new(command).args(arguments).output();
    let ran = ran.unwrap_or_else(|error| panic!("{command} can't be run: {error}"));
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{command} {arguments:?}: {}\n{text}{errors}", ran.status);
    text
}

/// The functions that a library exports, in order.
pub(crate) fn exported(library: &Path) -> Vec<String> {
    let library = library.to_str().expect("text");
    let text = output("nm", &["-D", "--defined-only", library]);
    text.lines().filter_map(|line| line.split(' ').next_back()).map(str::to_owned).collect()
}

/// What pkg-config says for the packaged folder; `None` without pkg-config.
#[allow(dead_code, reason = "not every test that shares the kit calls it")]
pub(crate) fn pkg_config() -> Option<String> {
    let ran = Command::new("pkg-config")
        .args(["--cflags", "--libs", "kvferry"])
        .env("PKG_CONFIG_PATH", folder())
        .output()
        .ok()?;
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    Some(String::from_utf8_lossy(&ran.stdout).into_owned())
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Compiler {
    Gcc,
    Clang,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Language {
    #[allow(dead_code, reason = "not every test that shares the kit uses it")]
    C11,
    Cpp17,
}

/// A compiled program.
#[derive(Clone)]
pub(crate) struct Program {
    file: PathBuf,
    environment: Vec<(&'static str, &'static str)>,
}

impl Program {
    /// Compiles a program of this crate; `None`, after a line that says so, without the compiler.
    pub(crate) fn build(
        source: &str,
        compiler: Compiler,
        language: Language,
        flags: &[&str],
    ) -> Option<Self> {
        let (command, standard) = match (compiler, language) {
            (Compiler::Gcc, Language::C11) => ("gcc", ["-xc", "-std=c11"]),
            (Compiler::Gcc, Language::Cpp17) => ("g++", ["-xc++", "-std=c++17"]),
            (Compiler::Clang, Language::C11) => ("clang", ["-xc", "-std=c11"]),
            (Compiler::Clang, Language::Cpp17) => ("clang++", ["-xc++", "-std=c++17"]),
        };
        let there = Command::new(command).arg("--version").stdout(Stdio::null()).status();
        if there.is_err() {
            skipped(&format!("{source} with {command}, which is not here"));
            return None;
        }
        let sanitized = match compiler {
            Compiler::Gcc if is_thread_sanitized() => thread_sanitized_program(language),
            Compiler::Clang if is_thread_sanitized() => {
                skipped(&format!(
                    "ThreadSanitizer: {source} with {command}, which adds a runtime of its own"
                ));
                return None;
            }
            _ => Vec::new(),
        };
        let stem = Path::new(source).file_stem().expect("a file").to_str().expect("text");
        let name = format!("{stem}-{command}-{}", flags.len());
        let (folder, source) = (folder(), here().join(source));
        let file = folder.join(name);
        let (include, search) = (folder.join("include"), folder.display());
        let linked = match stem {
            "transfer_engine" => format!("{}/libtransfer_engine.so", stand_in().display()),
            _ => format!("{search}/libkvferry.so.0"),
        };
        let mut call = Command::new(command);
        call.args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-pthread"])
            .args(["-D_POSIX_C_SOURCE=200809L", "-D_DEFAULT_SOURCE"])
            .args(flags)
            .args(standard)
            .arg("-I")
            .arg(include)
            .arg(source)
            .args(["-xnone", "-o"])
            .arg(&file)
            .arg(linked)
            .args(sanitized)
            .arg(format!("-Wl,-rpath,{search}"));
        let built = call.output().expect("the compiler was there");
        let errors = String::from_utf8_lossy(&built.stderr);
        let lacks_sanitizer = !flags.is_empty() && errors.contains("cannot find");
        assert!(built.status.success() || lacks_sanitizer, "{call:?}\n{errors}");
        built.status.success().then_some(Self { file, environment: Vec::new() })
    }

    #[allow(dead_code, reason = "not every test that shares the kit calls it")]
    pub(crate) fn with(mut self, name: &'static str, value: &'static str) -> Self {
        self.environment.push((name, value));
        self
    }

    /// Runs the program: it must succeed and say nothing on stderr.
    pub(crate) fn run(&self, arguments: &[&str]) {
        let (status, errors) = self.ran(arguments);
        assert!(status.success(), "{}: {status}\n{errors}", self.file.display());
        assert_eq!(errors, "", "{} wrote to stderr", self.file.display());
    }

    /// Runs the program: it must fail and say `word` on stderr.
    #[allow(dead_code, reason = "not every test that shares the kit calls it")]
    pub(crate) fn fails(&self, arguments: &[&str], word: &str) {
        let (status, errors) = self.ran(arguments);
        let is_said = !status.success() && errors.contains(word);
        assert!(is_said, "{}: {status}, without '{word}'\n{errors}", self.file.display());
    }

    /// How the program ended, and what it wrote to stderr.
    fn ran(&self, arguments: &[&str]) -> (ExitStatus, String) {
        let mut child = Command::new(&self.file)
            .args(arguments)
            // Programs fork, with threads running.
            .env("TSAN_OPTIONS", "die_after_fork=0:halt_on_error=1")
            .envs(self.environment.iter().copied())
            .env_remove("KVFERRY_LOG")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program was built");
        let mut stderr = child.stderr.take().expect("it is piped");
        let reader = std::thread::spawn(move || {
            let mut errors = Vec::new();
            let _ = stderr.read_to_end(&mut errors);
            String::from_utf8_lossy(&errors).into_owned()
        });
        let until = Instant::now() + PROGRAM_LIMIT;
        let status = loop {
            match child.try_wait().expect("it is our child") {
                Some(status) => break status,
                None if Instant::now() > until => {
                    let _ = child.kill();
                    panic!("{} did not end in {PROGRAM_LIMIT:?}", self.file.display());
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        (status, reader.join().expect("reading does not panic"))
    }
}
