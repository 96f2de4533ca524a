//! Builds C programs against the library as it is packaged, and runs them.
//!
//! Each test is a process of its own under nextest, and compiling takes longer than what most of them do. Test processes
//! with equal inputs share a folder with the packaged libraries and with all that is compiled against them: each thing is
//! built once, by the first that needs it. A change of an input leads to another folder.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kvferry_testkit::PATIENCE;

/// Fault bound: the slowest program takes less than a minute, and many times that under a sanitizer on a loaded machine.
const PROGRAM_LIMIT: Duration = PATIENCE.saturating_mul(2);

pub(crate) fn skipped(why: &str) {
    println!("SKIPPED: {why}");
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library as cargo made it.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its file");
    test.parent().expect("it is in a folder").join("libkvferry_capi.so")
}

const COMPILERS: [&str; 5] = ["cc", "gcc", "g++", "clang", "clang++"];
/// Variables that compilers and the scripts read.
const VARIABLES: [&str; 7] =
    ["CC", "CXX", "CXXFLAGS", "CPATH", "LIBRARY_PATH", "PATH", "KVFERRY_SANITIZER"];

/// A hash of the library, of each file that tests compile or run, of the compilers and of what directs them.
fn inputs() -> u64 {
    let mut found = DefaultHasher::new();
    fs::read(library()).expect("cargo builds the library with the tests").hash(&mut found);
    hash_files(here(), &mut found);
    hash_files(&here().join("../../adapters"), &mut found);
    for name in COMPILERS {
        let version = Command::new(name).arg("--version").output();
        version.map(|ran| ran.stdout).unwrap_or_default().hash(&mut found);
    }
    VARIABLES.map(std::env::var_os).hash(&mut found);
    found.finish()
}

/// Takes in name and content of each file in a folder and in those below it.
pub(crate) fn hash_files(folder: &Path, found: &mut DefaultHasher) {
    let entries = fs::read_dir(folder).expect("a folder of the sources is readable");
    let mut entries: Vec<_> = entries.map(|entry| entry.expect("it is listed").path()).collect();
    entries.sort();
    for entry in entries {
        entry.hash(found);
        if entry.is_dir() {
            hash_files(&entry, found);
        } else {
            fs::read(&entry).expect("a file of the sources is readable").hash(found);
        }
    }
}

/// Folders of this prefix are shared by the test processes that have them locked.
const SHARED: &str = "capi-shared-";
/// Folders of this prefix and a process's number are that process's own.
const OWN: &str = "capi-";

fn locked(file: &Path) -> File {
    let file = File::create(file).expect("the folder is there");
    file.lock().expect("the file system has locks");
    file
}

/// Removes the folders that no process uses. The caller has the lock under which a process takes one.
fn remove_unused_folders(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_used = if name.starts_with(SHARED) {
            // Without this file, the process that made the folder ended at once.
            let file = File::open(entry.path().join("used"));
            file.is_ok_and(|file| file.try_lock().is_err())
        } else {
            let Some(pid) = name.strip_prefix(OWN) else { continue };
            Path::new("/proc").join(pid).exists()
        };
        if !is_used && entry.path().is_dir() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A folder with the libraries, made by what packages them, and with what tests build on them.
pub(crate) fn folder() -> &'static Path {
    static FOLDER: OnceLock<(PathBuf, File)> = OnceLock::new();
    let (folder, _used) = FOLDER.get_or_init(|| {
        let all = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let folder = all.join(format!("{SHARED}{:016x}", inputs()));
        let _lock = locked(&all.join("capi.lock"));
        fs::create_dir_all(&folder).expect("a folder for what is built");
        let used = File::create(folder.join("used")).expect("the folder was made");
        used.lock_shared().expect("the file system has locks");
        remove_unused_folders(all);
        (folder, used)
    });
    static PACKAGE: OnceLock<PathBuf> = OnceLock::new();
    PACKAGE.get_or_init(|| {
        let package = shared_in(folder, "package", |to| {
            let (library, script) = (library(), here().join("package"));
            let [script, library, to] = [script.as_path(), &library, to].map(text);
            output("sh", &[script, library, to, env!("CARGO_PKG_VERSION")]);
            true
        });
        package.expect("the script ended with success")
    })
}

/// A file or folder of this name that `make` builds, unless a process with the same inputs has built it. `None` if it
/// can't be built here, of which `make` returns false. A test may read it and must not write to it.
pub(crate) fn shared(name: &str, make: impl FnOnce(&Path) -> bool) -> Option<PathBuf> {
    shared_in(folder().parent().expect("the package is in a folder"), name, make)
}

pub(crate) fn shared_in(
    folder: &Path,
    name: &str,
    make: impl FnOnce(&Path) -> bool,
) -> Option<PathBuf> {
    let (built, new) = (folder.join(name), folder.join(format!("{name}.new")));
    let _lock = locked(&folder.join(format!("{name}.lock")));
    if !built.exists() {
        // A process that was killed left what it had.
        let _ = fs::remove_dir_all(&new);
        let _ = fs::remove_file(&new);
        if !make(&new) {
            return None;
        }
        fs::rename(&new, &built).expect("it was built");
    }
    Some(built)
}

/// A folder for this process alone. A later test process removes it.
pub(crate) fn scratch() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let name = format!("{OWN}{}", std::process::id());
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        // A process of the same number may have left one.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder for the test");
        folder
    })
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("the path is text")
}

/// A folder with a library of Mooncake's name that has its functions, and does nothing: programs are linked
/// to it as they are to Mooncake's, and run with ours.
fn stand_in() -> PathBuf {
    let made = shared("mooncake", |folder| {
        fs::create_dir_all(folder).expect("a folder for the library");
        let mut names = exported(&self::folder().join("libtransfer_engine.so"));
        names.push("kvferry_last_error".to_owned());
        let code: String = names.iter().map(|name| format!("void {name}(void) {{}}\n")).collect();
        let source = folder.join("functions.c");
        fs::write(&source, code).expect("the folder was made");
        let library = folder.join("libtransfer_engine.so");
        let soname = "-Wl,-soname,libtransfer_engine.so";
        let (source, library) = (text(&source), text(&library));
        output("gcc", &["-shared", "-fPIC", "-fno-builtin", soname, source, "-o", library]);
        true
    });
    made.expect("gcc compiles it")
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
    let files = fs::read_dir(folder.trim()).expect("rustc has libraries").flatten();
    let mut files = files.map(|entry| text(&entry.path()).to_owned());
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
    let printed = output("nm", &["-D", "--defined-only", text(library)]);
    printed.lines().filter_map(|line| line.split(' ').next_back()).map(str::to_owned).collect()
}

/// What pkg-config says for the packaged folder; `None` without pkg-config.
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
    C11,
    Cpp17,
}

/// One call of a compiler.
struct Call {
    command: &'static str,
    stem: String,
    arguments: Vec<String>,
    /// The linker's arguments, behind the name of the output.
    linked: Vec<String>,
    may_lack_library: bool,
}

impl Call {
    /// `None`, after a line that says so, without the compiler.
    fn new(source: &str, compiler: Compiler, language: Language, flags: &[&str]) -> Option<Self> {
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
        let stem = text(Path::new(Path::new(source).file_stem().expect("a file"))).to_owned();
        let (folder, source) = (folder(), here().join(source));
        let arguments: Vec<String> = [
            &["-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-pthread"][..],
            &["-D_POSIX_C_SOURCE=200809L", "-D_DEFAULT_SOURCE"],
            flags,
            &standard[..],
            &["-I", text(&folder.join("include")), text(&source), "-xnone"],
        ]
        .concat()
        .into_iter()
        .map(Into::into)
        .collect();
        let library = match &*stem {
            stem if stem.starts_with("transfer_engine") => stand_in().join("libtransfer_engine.so"),
            _ => folder.join("libkvferry.so.0"),
        };
        let mut linked = vec![text(&library).to_owned()];
        linked.extend(sanitized);
        linked.push(format!("-Wl,-rpath,{}", folder.display()));
        let may_lack_library = !flags.is_empty();
        Some(Self { command, stem, arguments, linked, may_lack_library })
    }

    /// A name that another call does not have.
    fn name(&self) -> String {
        let mut all = DefaultHasher::new();
        (&self.arguments, &self.linked).hash(&mut all);
        format!("{}-{}-{:016x}", self.stem, self.command, all.finish())
    }

    /// False without the library of a sanitizer.
    fn compile(&self, to: &Path) -> bool {
        let mut call = Command::new(self.command);
        call.args(&self.arguments).arg("-o").arg(to).args(&self.linked);
        let built = call.output().expect("the compiler was there");
        let errors = String::from_utf8_lossy(&built.stderr);
        let lacks_library = self.may_lack_library && errors.contains("cannot find");
        assert!(built.status.success() || lacks_library, "{call:?}\n{errors}");
        built.status.success()
    }
}

/// A compiled program.
#[derive(Clone)]
pub(crate) struct Program {
    file: PathBuf,
    environment: Vec<(&'static str, &'static str)>,
}

impl Program {
    /// Compiles a program of this crate, or finds it compiled; `None`, after a line that says so, without the compiler.
    /// The sources and what they include must be of this repository, or the system's.
    pub(crate) fn build(
        source: &str,
        compiler: Compiler,
        language: Language,
        flags: &[&str],
    ) -> Option<Self> {
        let call = Call::new(source, compiler, language, flags)?;
        let file = shared(&call.name(), |to| call.compile(to))?;
        Some(Self { file, environment: Vec::new() })
    }

    /// Compiles a program that includes files which are not this repository's.
    pub(crate) fn build_with_foreign_headers(
        source: &str,
        compiler: Compiler,
        language: Language,
        flags: &[&str],
    ) -> Option<Self> {
        let call = Call::new(source, compiler, language, flags)?;
        let file = scratch().join(call.name());
        call.compile(&file).then_some(Self { file, environment: Vec::new() })
    }

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
    pub(crate) fn fails(&self, arguments: &[&str], word: &str) {
        let (status, errors) = self.ran(arguments);
        let is_said = !status.success() && errors.contains(word);
        assert!(is_said, "{}: {status}, without '{word}'\n{errors}", self.file.display());
    }

    /// How the program ended, and what it wrote to stderr.
    pub(crate) fn ran(&self, arguments: &[&str]) -> (ExitStatus, String) {
        let mut child = Command::new(&self.file)
            .args(arguments)
            // Programs fork, with threads running.
            .env("TSAN_OPTIONS", "die_after_fork=0:halt_on_error=1")
            // No program is about the silence limit; a loaded machine delays heartbeats.
            .env("KVFERRY_SILENCE_MS", "300000")
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
