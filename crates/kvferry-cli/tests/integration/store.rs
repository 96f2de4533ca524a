//! `kvferry store` on stores that this test makes.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry::{Access, Agent, Region};
use kvferry_store::{BlockMemory, Namespace, Retain, Store, StoreOptions};
use kvferry_testkit::network::in_own_network_or_skip;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const LEN: u64 = 64 << 10;
/// Blocks of a prompt: a segment of 1 MiB has room for one prompt.
const BLOCKS: usize = 8;

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("kvferry-cli-store-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a folder for temporary files");
        Self(path)
    }

    fn text(&self) -> &str {
        self.0.to_str().expect("plain letters")
    }

    fn segment(&self, number: &Value) -> PathBuf {
        self.0.join(format!("segment-{:08}", number.as_u64().expect("a number")))
    }

    /// The files as they would be if the processes that have the store open were killed now.
    fn killed(&self, name: &str) -> Self {
        let copy = Self::new(name);
        for entry in std::fs::read_dir(&self.0).expect("it exists") {
            let entry = entry.expect("it can be read");
            std::fs::copy(entry.path(), copy.0.join(entry.file_name())).expect("a copy");
        }
        copy
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An engine that has a store open.
struct Engine {
    _agent: Agent,
    store: Store,
    pool: Region,
}

impl Engine {
    fn open(options: &StoreOptions) -> Self {
        let agent = Agent::builder().start().expect("an agent");
        let bytes = BLOCKS * usize::try_from(LEN).expect("short");
        let pool = agent.allocate(bytes, Access::NONE).expect("memory");
        let store = Store::open(&agent, options).expect("a store");
        Self { _agent: agent, store, pool }
    }

    fn memory(&self) -> Vec<BlockMemory> {
        (0..BLOCKS as u64).map(|at| BlockMemory::new(&self.pool, at * LEN, LEN)).collect()
    }

    fn put(&self, model: &str, seed: u8) {
        let mut bytes = vec![0; self.pool.len()];
        fastrand::Rng::with_seed(seed.into()).fill(&mut bytes);
        self.pool.write_at(0, &bytes).expect("inside the pool");
        let space = self.store.space(&Namespace::new(model));
        let put = space.put(&prompt(seed), 0, &self.memory(), Retain::default()).expect("a put");
        assert_eq!(put.stored, BLOCKS);
    }

    /// How many blocks of a prompt there are, and are right.
    fn get(&self, model: &str, seed: u8) -> usize {
        let space = self.store.space(&Namespace::new(model));
        space.get(&prompt(seed), 0, &self.memory()).expect("a get")
    }
}

/// The hashes of the blocks of a prompt.
fn prompt(seed: u8) -> Vec<[u8; 32]> {
    let hash = |block| std::array::from_fn(|at| if at % 2 == 0 { seed } else { block });
    (0..BLOCKS as u8).map(hash).collect()
}

fn options(folder: &Folder, segments: u64) -> StoreOptions {
    StoreOptions::new(&folder.0, (segments + 1) * MIB).segment_bytes(MIB)
}

fn id(model: &str) -> String {
    format!("{:016x}", Namespace::new(model).id())
}

/// A closed store: a segment for each prompt of `model`, the first one oldest.
fn made(folder: &Folder, model: &str, prompts: std::ops::Range<u8>) {
    for seed in prompts {
        let engine = Engine::open(&options(folder, 24));
        engine.put(model, seed);
        engine.store.close();
    }
}

fn store(line: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.arg("store").args(line).output().expect("the command starts")
}

/// The report of a command that ends with `code`.
fn report(code: i32, line: &[&str]) -> Value {
    let output = store(&[line, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(code), "{}", errors(&output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn text(code: i32, line: &[&str]) -> String {
    let output = store(line);
    assert_eq!(output.status.code(), Some(code), "{}", errors(&output));
    String::from_utf8(output.stdout).expect("text")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn files(folder: &Folder) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(&folder.0).expect("it exists");
    let mut files: Vec<_> = entries.map(|it| it.expect("it can be read").path()).collect();
    files.sort();
    files
}

fn overwrite(file: &Path, at: u64, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(file).expect("it exists");
    file.write_all_at(bytes, at).expect("it can be written");
}

#[test]
fn stat_counts_segments_blocks_and_namespaces_of_a_store_that_is_open() {
    let folder = Folder::new("stat");
    let engine = Engine::open(&options(&folder, 24));
    engine.put("llama", 1);
    engine.put("llama", 2);
    engine.put("qwen", 3);
    let open = report(0, &["stat", folder.text()]);
    assert_eq!((&open["schema"], &open["format"]), (&"kvferry.store-stat/1".into(), &3.into()));
    assert_eq!((&open["blocks"], &open["copies"]), (&24.into(), &0.into()), "{open}");
    assert_eq!((&open["bytes"], &open["segment_bytes"]), (&(24 * LEN).into(), &MIB.into()));
    // The first segment is full, and sealed in the background.
    assert!(open["segments"]["open"].as_u64() >= Some(1), "{open}");
    let namespaces = serde_json::json!([
        {"namespace": id("llama"), "blocks": 16, "bytes": 16 * LEN},
        {"namespace": id("qwen"), "blocks": 8, "bytes": 8 * LEN},
    ]);
    assert_eq!(open["namespaces"], namespaces);
    engine.store.close();
    let closed = report(0, &["stat", folder.text()]);
    assert_eq!((&closed["segments"]["open"], &closed["blocks"]), (&0.into(), &24.into()));
    assert_eq!(closed["segments"]["sealed"], closed["segments"]["all"], "{closed}");
    let created = closed["created_unix_ms"].as_u64().expect("a time");
    let oldest = closed["oldest_unix_ms"].as_u64().expect("a time");
    assert!(created <= oldest && oldest <= created + 60_000, "{closed}");
    let shown = text(0, &["stat", folder.text()]);
    assert!(shown.contains("\nblocks    24, 1.5 MiB of data\n"), "{shown}");
    assert!(shown.contains(&format!("\n{}", id("qwen"))), "{shown}");
}

#[test]
fn ls_lists_segments_and_blocks_of_all_namespaces_or_one() {
    let folder = Folder::new("ls");
    made(&folder, "llama", 1..3);
    made(&folder, "qwen", 3..4);
    let listed = report(0, &["ls", folder.text()]);
    assert_eq!(listed["schema"], "kvferry.store-ls/1");
    let segments = listed["segments"].as_array().expect("segments");
    assert_eq!(segments.len(), 3, "{listed}");
    for segment in segments {
        assert_eq!((&segment["state"], &segment["blocks"]), (&"sealed".into(), &8.into()));
        assert!(segment["created_unix_ms"].as_u64() > Some(1_700_000_000_000), "{segment}");
    }
    let blocks = report(0, &["ls", folder.text(), "--blocks", "--namespace", &id("qwen")]);
    let blocks = blocks["blocks"].as_array().expect("blocks");
    assert_eq!(blocks.len(), 8);
    assert!(blocks.iter().all(|it| it["namespace"] == id("qwen").as_str() && it["bytes"] == LEN));
    assert!(blocks.iter().all(|it| it["key"].as_str().is_some_and(|key| key.len() == 32)));
    let theirs = report(0, &["ls", folder.text(), "--namespace", &id("qwen")]);
    assert_eq!(theirs["segments"].as_array().map(Vec::len), Some(1));
    let shown = text(0, &["ls", folder.text(), "--blocks"]);
    assert_eq!(shown.lines().count(), 1 + 24, "{shown}");
    assert!(text(0, &["ls", folder.text()]).lines().skip(1).all(|line| line.contains("sealed")));
}

#[test]
fn verify_names_each_bad_block_and_finds_none_in_a_store_that_is_right() {
    let folder = Folder::new("verify");
    made(&folder, "llama", 1..4);
    let right = report(0, &["verify", folder.text()]);
    assert_eq!(
        (&right["schema"], &right["blocks"]),
        (&"kvferry.store-verify/1".into(), &24.into())
    );
    assert_eq!((&right["bad"], &right["read_bytes"]), (&Value::Array(vec![]), &(24 * LEN).into()));
    assert!(right["gb_per_s"].as_f64() > Some(0.0));

    let blocks = report(0, &["ls", folder.text(), "--blocks"]);
    let victim = &blocks["blocks"][13];
    let file = folder.segment(&victim["segment"]);
    let at = victim["page"].as_u64().expect("a page") * 4096 + 70;
    let mut byte = [0];
    std::fs::File::open(&file).and_then(|it| it.read_exact_at(&mut byte, at)).expect("a byte");
    overwrite(&file, at, &[byte[0] ^ 1]);
    let wrong = report(1, &["verify", folder.text()]);
    let bad = wrong["bad"].as_array().expect("bad blocks");
    assert_eq!(bad.len(), 1, "{wrong}");
    for field in ["key", "segment", "page", "namespace"] {
        assert_eq!(bad[0][field], victim[field], "{field}");
    }
    let shown = text(1, &["verify", folder.text(), "--quiet"]);
    assert!(shown.contains(victim["key"].as_str().expect("text")), "{shown}");
    assert!(shown.contains("its bytes are not what was put\n"), "{shown}");
    assert!(shown.ends_with(": 1 bad\n"), "{shown}");

    // A file that was cut is a segment that can't be read.
    std::fs::File::options().write(true).open(&file).and_then(|it| it.set_len(5000)).expect("cut");
    let cut = report(1, &["verify", folder.text()]);
    assert_eq!(cut["unreadable"][0]["why"], "it has 5000 bytes");
}

#[test]
fn verify_takes_nothing_for_bad_that_a_process_writes_or_replaces_meanwhile() {
    let folder = Folder::new("busy");
    let engine = Engine::open(&options(&folder, 8));
    let mut outputs = Vec::new();
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let space = engine.store.space(&Namespace::new("llama"));
            for seed in (0..=u64::MAX).take_while(|_| !stop.load(Ordering::Relaxed)) {
                let mut bytes = vec![0; engine.pool.len()];
                fastrand::Rng::with_seed(seed).fill(&mut bytes);
                engine.pool.write_at(0, &bytes).expect("inside the pool");
                let hash = |block: u64| blocks_hash(seed, block);
                let prompt: Vec<_> = (0..BLOCKS as u64).map(hash).collect();
                let put = space.put(&prompt, 0, &engine.memory(), Retain::default());
                let stored = put.expect("a put").stored as u64;
                written.fetch_add(stored, Ordering::Relaxed);
                if stored == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        for _ in 0..3 {
            let before = written.load(Ordering::Relaxed);
            let began = Instant::now();
            while written.load(Ordering::Relaxed) < before + 500
                && began.elapsed() < Duration::from_secs(30)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            outputs.push(store(&["verify", folder.text()]));
        }
        stop.store(true, Ordering::Relaxed);
    });
    for output in outputs {
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    }
    let stats = engine.store.stats();
    assert!(stats.stored >= 1500 && stats.corrupt == 0, "{stats:?}");
}

fn blocks_hash(seed: u64, block: u64) -> [u8; 32] {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&seed.to_le_bytes());
    hash[8..16].copy_from_slice(&block.to_le_bytes());
    hash
}

#[test]
fn a_directory_without_a_store_and_a_wrong_command_line_have_exit_code_2() {
    let folder = Folder::new("none");
    let empty = folder.text();
    for command in ["stat", "ls", "verify", "gc"] {
        let output = store(&[command, empty]);
        assert_eq!(output.status.code(), Some(2), "{command}");
        assert!(errors(&output).contains("no store is here"), "{}", errors(&output));
        assert_eq!(store(&[command, "/nowhere/at/all"]).status.code(), Some(2));
        assert_eq!(store(&[command]).status.code(), Some(2));
    }
    assert!(files(&folder).is_empty(), "looking makes no file");
    made(&folder, "llama", 1..2);
    for line in [
        &["stat", empty, empty][..],
        &["ls", empty, "--namespace", "llama"],
        &["gc", empty, "--capacity", "2MiB"],
    ] {
        assert_eq!(store(line).status.code(), Some(2), "{line:?}");
    }
    std::fs::write(folder.0.join("kvferry.store"), "something else").expect("a file");
    let output = store(&["verify", empty]);
    assert_eq!(output.status.code(), Some(2));
    assert!(errors(&output).contains("does not belong to a kvferry store"), "{}", errors(&output));
}

#[test]
fn gc_leaves_a_store_alone_that_a_process_has_open() {
    let folder = Folder::new("in-use");
    let engine = Engine::open(&options(&folder, 24));
    engine.put("llama", 1);
    let output = store(&["gc", folder.text()]);
    assert_eq!(output.status.code(), Some(4));
    assert!(errors(&output).contains("a process has the store open"), "{}", errors(&output));
    engine.put("llama", 2);
    assert_eq!(engine.get("llama", 1) + engine.get("llama", 2), 16);
    engine.store.close();
    report(0, &["gc", folder.text()]);
}

#[test]
fn gc_in_another_network_namespace_leaves_a_store_alone_that_a_process_has_open() {
    let what = "kvferry store gc in another network namespace";
    let kvferry = env!("CARGO_BIN_EXE_kvferry");
    let Some(mut command) = in_own_network_or_skip(what, kvferry) else { return };
    let folder = Folder::new("in-use-elsewhere");
    let [first, second, away] = ["a", "b", "away"].map(|name| folder.0.join(name));
    let with = StoreOptions::new(&first, 25 * MIB).segment_bytes(MIB).and_directory(&second);
    let engine = Engine::open(&with);
    engine.put("llama", 1);
    engine.store.close();
    // The process that has the store open has no lock in the first directory.
    std::fs::rename(&first, &away).expect("it exists");
    let engine = Engine::open(&with);
    std::fs::rename(&away, &first).expect("it exists");
    engine.put("llama", 2);
    let output = command.args(["store", "gc"]).args([&first, &second]).output().expect("it starts");
    let said = errors(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("a process has the store open; close it first"), "{said}");
    assert_eq!(engine.get("llama", 2), BLOCKS);
    engine.store.close();
}

#[test]
fn adopt_takes_empty_directories_once_no_process_has_the_store_open() {
    let folder = Folder::new("adopt");
    let [first, second] = ["a", "b"].map(|name| folder.0.join(name));
    let with = StoreOptions::new(&first, 25 * MIB).segment_bytes(MIB).and_directory(&second);
    let engine = Engine::open(&with);
    engine.put("llama", 1);
    engine.store.close();
    std::fs::remove_dir_all(&second).expect("it was made");
    let [first, second] = [&first, &second].map(|it| it.to_str().expect("plain letters"));
    let output = store(&["adopt", first, second]);
    assert_eq!(output.status.code(), Some(2), "a directory that does not exist");
    assert!(errors(&output).contains(second), "{}", errors(&output));
    std::fs::create_dir(second).expect("a folder");
    let engine = Engine::open(&with);
    assert_eq!(engine.store.stats().lost_directories, 1);
    let output = store(&["adopt", first, second]);
    assert_eq!(output.status.code(), Some(4));
    assert!(errors(&output).contains("a process has the store open"), "{}", errors(&output));
    engine.store.close();
    let output = store(&["gc", first, second]);
    assert!(errors(&output).contains("kvferry store adopt"), "{}", errors(&output));
    let said = text(0, &["adopt", first, second, "--dry-run"]);
    assert!(
        said.starts_with(&format!("{second} would become directory 1 of 2 of store ")),
        "{said}"
    );
    assert!(said.contains("no device is mounted there"), "{said}");
    assert_eq!(std::fs::read_dir(second).expect("a folder").count(), 0, "nothing is written");
    let adopted = report(0, &["adopt", second, first]);
    assert_eq!(adopted["schema"], "kvferry.store-adopt/1");
    assert_eq!((&adopted["directories"], &adopted["dry_run"]), (&2.into(), &false.into()));
    let [one] = adopted["adopted"].as_array().expect("a list").as_slice() else {
        panic!("{adopted}");
    };
    assert_eq!((&one["number"], &one["directory"]), (&1.into(), &second.into()));
    assert_eq!(one["is_mounted"], false);
    assert!(text(0, &["adopt", first, second]).contains("nothing to adopt"));
    let engine = Engine::open(&with);
    assert_eq!(engine.store.stats().lost_directories, 0);
    engine.store.close();
    assert_eq!(store(&["adopt", folder.text()]).status.code(), Some(2), "no store");
}

#[test]
fn gc_seals_what_killed_processes_left_and_removes_what_is_no_segment() {
    let folder = Folder::new("killed-original");
    made(&folder, "llama", 1..3);
    let engine = Engine::open(&options(&folder, 24));
    engine.put("llama", 3);
    let killed = folder.killed("killed");
    engine.store.close();
    let at = killed.text();
    let blocks = report(0, &["ls", at, "--blocks"]);
    // The header of the first segment is damaged, and other files are left.
    overwrite(&killed.segment(&blocks["blocks"][0]["segment"]), 100, b"damage");
    std::fs::write(killed.0.join("kvferry.store.new"), "half").expect("a file");
    std::fs::write(killed.0.join("segment-00000020"), "short").expect("a file");
    std::fs::write(killed.0.join("notes"), "of a person").expect("a file");

    let before = files(&killed);
    let planned = report(0, &["gc", at, "--dry-run"]);
    assert_eq!(files(&killed), before, "a dry run changes nothing");
    assert_eq!(report(0, &["stat", at])["segments"]["open"], 1);
    let done = report(0, &["gc", at]);
    assert_eq!((&planned["dry_run"], &done["dry_run"]), (&true.into(), &false.into()));
    assert_eq!(planned["steps"], done["steps"]);
    let mut why: Vec<_> = done["steps"].as_array().expect("steps").iter().collect();
    why.sort_by_key(|step| step["why"].as_str());
    let why: Vec<_> = why.iter().map(|step| step["why"].as_str().unwrap_or("seal")).collect();
    assert_eq!(why, ["seal", "header", "length", "temporary"]);
    assert_eq!((&done["removed_files"], &done["sealed"]), (&3.into(), &1.into()));
    assert!(killed.0.join("notes").exists());

    let stat = report(0, &["stat", at]);
    assert_eq!((&stat["segments"]["all"], &stat["segments"]["sealed"]), (&2.into(), &2.into()));
    assert_eq!(report(0, &["gc", at])["steps"], Value::Array(vec![]), "nothing is left to do");
    report(0, &["verify", at]);
    let engine = Engine::open(&options(&killed, 24));
    assert_eq!([1, 2, 3].map(|seed| engine.get("llama", seed)), [0, 8, 8]);
}

#[test]
fn gc_with_a_capacity_keeps_what_is_newest_for_a_process_that_opens_the_store_with_it() {
    let folder = Folder::new("capacity");
    made(&folder, "llama", 0..20);
    let capacity = (9 * MIB).to_string();
    let done = report(0, &["gc", folder.text(), "--capacity", &capacity]);
    assert_eq!(
        (&done["removed_files"], &done["removed_blocks"]),
        (&14.into(), &112.into()),
        "{done}"
    );
    assert_eq!(done["renumbered"], 6, "{done}");
    assert!(text(0, &["gc", folder.text(), "--capacity", &capacity]).starts_with("0 files"));
    assert_eq!(report(0, &["verify", folder.text()])["blocks"], 48);
    let engine = Engine::open(&options(&folder, 8));
    for seed in 0..20 {
        assert_eq!(engine.get("llama", seed), if seed < 14 { 0 } else { BLOCKS }, "{seed}");
    }
}

#[test]
fn gc_with_a_capacity_keeps_what_is_newest_in_each_directory() {
    let (first, second) = (Folder::new("two-first"), Folder::new("two-second"));
    let with = |segments| options(&first, segments).and_directory(&second.0);
    for seed in 0..20 {
        let engine = Engine::open(&with(24));
        engine.put("llama", seed);
        engine.store.close();
    }
    let both = [first.text(), second.text()];
    let one = store(&["gc", both[1]]);
    assert_eq!(one.status.code(), Some(2), "{}", errors(&one));
    let capacity = (9 * MIB).to_string();
    let done = report(0, &["gc", both[1], both[0], "--capacity", &capacity]);
    assert_eq!(done["removed_files"], 14, "{done}");
    assert_eq!(report(0, &["stat", both[0], both[1]])["blocks"], 48);
    let engine = Engine::open(&with(8));
    let found: usize = (12..20).map(|seed| engine.get("llama", seed)).sum();
    assert_eq!(found, 6 * BLOCKS);
}

#[test]
fn gc_removes_whole_segments_of_a_namespace_and_counts_what_it_leaves() {
    let folder = Folder::new("namespace");
    made(&folder, "llama", 1..3);
    made(&folder, "qwen", 3..4);
    let engine = Engine::open(&options(&folder, 24));
    let space = engine.store.space(&Namespace::new("llama"));
    let some = &engine.memory()[..4];
    space.put(&prompt(4)[..4], 0, some, Retain::default()).expect("a put");
    let space = engine.store.space(&Namespace::new("qwen"));
    space.put(&prompt(4)[..4], 0, some, Retain::default()).expect("a put");
    engine.store.close();
    let done = report(0, &["gc", folder.text(), "--namespace", &id("llama")]);
    assert_eq!(
        (&done["removed_files"], &done["removed_blocks"]),
        (&2.into(), &16.into()),
        "{done}"
    );
    assert_eq!(done["namespace_blocks_left"], 4);
    let left = report(0, &["stat", folder.text()]);
    assert_eq!((&left["namespaces"][0]["blocks"], &left["blocks"]), (&12.into(), &16.into()));
}

#[test]
fn gc_never_removes_segments_of_another_store() {
    let (folder, other) = (Folder::new("mine"), Folder::new("theirs"));
    made(&folder, "llama", 1..2);
    made(&other, "llama", 1..2);
    let theirs = files(&other).into_iter().find(|it| it.to_string_lossy().contains("segment-"));
    let stranger = folder.0.join("segment-00000013");
    let renamed = std::fs::copy(theirs.expect("a segment"), &stranger);
    renamed.expect("a copy");
    let done = report(0, &["gc", folder.text()]);
    assert_eq!((&done["steps"], &done["segments_left"]), (&Value::Array(vec![]), &1.into()));
    assert!(stranger.exists());
    assert_eq!(report(0, &["stat", folder.text()])["segments"]["foreign"], 1);
}

/// A file for exported blocks, in a folder.
fn exported(folder: &Folder, name: &str) -> String {
    folder.0.join(name).to_str().expect("plain letters").to_owned()
}

const CAPACITY: &str = "24MiB";

#[test]
fn blocks_that_were_exported_are_found_in_the_store_that_they_are_imported_into() {
    let (folder, other, out) = (Folder::new("from"), Folder::new("to"), Folder::new("out"));
    made(&folder, "llama", 1..4);
    made(&folder, "qwen", 4..6);
    let file = exported(&out, "all");
    // While an engine has the store open, and on with what it writes.
    let engine = Engine::open(&options(&folder, 24));
    engine.put("llama", 6);
    let done = report(0, &["export", &file, folder.text()]);
    assert_eq!((&done["blocks"], &done["damaged"]), (&48.into(), &0.into()), "{done}");
    assert_eq!(done["bytes"], 48 * LEN);
    let mode = std::fs::metadata(&file).expect("it was written").mode() & 0o777;
    assert_eq!(mode, 0o600, "what users have asked is in it");
    drop(engine);
    let done = report(0, &["import", &file, other.text(), "--capacity", CAPACITY]);
    assert_eq!((&done["stored"], &done["present"]), (&48.into(), &0.into()), "{done}");
    report(0, &["verify", other.text()]);
    // Beside an engine, which finds them at once.
    let engine = Engine::open(&options(&other, 23));
    assert_eq!([1, 2, 3, 6].map(|seed| engine.get("llama", seed)), [BLOCKS; 4]);
    assert_eq!([4, 5].map(|seed| engine.get("qwen", seed)), [BLOCKS; 2]);
    let done = report(0, &["import", &file, other.text(), "--capacity", CAPACITY]);
    assert_eq!((&done["stored"], &done["present"]), (&0.into(), &48.into()), "{done}");
    assert!(
        text(0, &["import", &file, other.text(), "--capacity", CAPACITY]).contains("48 present")
    );
    // The bytes are those that were put.
    let mut bytes = vec![0; engine.pool.len()];
    fastrand::Rng::with_seed(2).fill(&mut bytes);
    assert_eq!(engine.get("llama", 2), BLOCKS);
    let mut back = vec![0; engine.pool.len()];
    engine.pool.read_at(0, &mut back).expect("inside the pool");
    assert!(back == bytes);
}

#[test]
fn export_and_import_of_a_namespace_leave_the_others_and_work_in_a_pipe() {
    let (folder, other, out) = (Folder::new("of"), Folder::new("into"), Folder::new("pipe"));
    made(&folder, "llama", 1..3);
    made(&folder, "qwen", 3..4);
    let file = exported(&out, "all");
    let piped = store(&["export", "-", folder.text(), "--namespace", &id("qwen"), "--quiet"]);
    assert!(piped.status.success() && errors(&piped).contains("8 blocks"), "{}", errors(&piped));
    std::fs::write(&file, &piped.stdout).expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(["store", "import", "-", other.text(), "--capacity", CAPACITY, "--json"]);
    let stdin = std::fs::File::open(&file).expect("written above");
    let done = command.stdin(stdin).output().expect("the command starts");
    let done: Value = serde_json::from_slice(&done.stdout).expect("a report");
    assert_eq!((&done["stored"], &done["is_cut"]), (&8.into(), &false.into()), "{done}");
    report(0, &["export", &file, folder.text()]);
    let only = ["import", &file, other.text(), "--capacity", CAPACITY, "--namespace", &id("llama")];
    let done = report(0, &only);
    assert_eq!((&done["stored"], &done["other_namespaces"]), (&16.into(), &8.into()), "{done}");
    let engine = Engine::open(&options(&other, 23));
    assert_eq!((engine.get("llama", 1), engine.get("qwen", 3)), (BLOCKS, BLOCKS));
}

#[test]
fn a_file_that_is_damaged_or_cut_is_imported_but_for_the_damage() {
    let (folder, out) = (Folder::new("whole"), Folder::new("damaged"));
    made(&folder, "llama", 1..4);
    let file = exported(&out, "blocks");
    report(0, &["export", &file, folder.text()]);
    let whole = std::fs::read(&file).expect("written above");
    let record = 112 + usize::try_from(LEN).expect("short");
    let import = |bytes: &[u8], name: &str| {
        std::fs::write(&file, bytes).expect("written");
        let into = Folder::new(name);
        report(1, &["import", &file, into.text(), "--capacity", CAPACITY])
    };
    // In the data of a block, and in the header of another.
    let mut bytes = whole.clone();
    bytes[64 + 3 * record + 5000] ^= 1;
    bytes[64 + 7 * record + 60] ^= 1;
    let done = import(&bytes, "flipped");
    assert_eq!((&done["stored"], &done["missing"]), (&22.into(), &2.into()), "{done}");
    assert_eq!((&done["damaged"], &done["is_cut"]), (&2.into(), &false.into()), "{done}");
    // Bytes are missing.
    let bytes = [&whole[..64 + 2 * record + 70], &whole[64 + 4 * record - 7..]].concat();
    let done = import(&bytes, "missing");
    assert_eq!((&done["stored"], &done["missing"]), (&22.into(), &2.into()), "{done}");
    // The beginning is missing, or the end.
    let done = import(&whole[30..], "beginning");
    assert_eq!((&done["stored"], &done["is_cut"]), (&24.into(), &false.into()), "{done}");
    let done = import(&whole[..64 + 10 * record + 100], "end");
    assert_eq!((&done["stored"], &done["is_cut"]), (&10.into(), &true.into()), "{done}");
    // What is no export at all.
    let into = Folder::new("no-export");
    std::fs::write(&file, b"[package]").expect("written");
    let refused = store(&["import", &file, into.text(), "--capacity", CAPACITY]);
    assert_eq!(refused.status.code(), Some(2), "{}", errors(&refused));
}

#[test]
fn export_leaves_bad_blocks_out_and_says_so() {
    let (folder, out) = (Folder::new("bad"), Folder::new("bad-out"));
    made(&folder, "llama", 1..3);
    let blocks = report(0, &["ls", folder.text(), "--blocks"]);
    let page = blocks["blocks"][2]["page"].as_u64().expect("a number");
    overwrite(&folder.segment(&blocks["blocks"][2]["segment"]), page * 4096 + 50, b"damage");
    let file = exported(&out, "blocks");
    let done = report(1, &["export", &file, folder.text()]);
    assert_eq!((&done["blocks"], &done["damaged"]), (&15.into(), &1.into()), "{done}");
    let into = Folder::new("bad-into");
    let done = report(0, &["import", &file, into.text(), "--capacity", CAPACITY]);
    assert_eq!((&done["stored"], &done["damaged"]), (&15.into(), &0.into()), "{done}");
}

#[test]
fn import_with_a_capacity_that_would_remove_segments_is_refused() {
    let (folder, out) = (Folder::new("smaller"), Folder::new("smaller-out"));
    made(&folder, "llama", 0..20);
    let file = exported(&out, "blocks");
    report(0, &["export", &file, folder.text()]);
    let before = files(&folder);
    let refused = store(&["import", &file, folder.text(), "--capacity", "9MiB"]);
    assert_eq!(refused.status.code(), Some(2), "{}", errors(&refused));
    assert!(errors(&refused).contains("engines open it with"), "{}", errors(&refused));
    assert_eq!(files(&folder), before);
}

#[test]
fn more_blocks_than_a_store_has_room_for_replace_others() {
    let (folder, into, out) =
        (Folder::new("large"), Folder::new("small"), Folder::new("large-out"));
    made(&folder, "llama", 0..22);
    let file = exported(&out, "blocks");
    report(0, &["export", &file, folder.text()]);
    let capacity = (10 * MIB).to_string();
    let options = options(&into, 9).segment_bytes(MIB);
    drop(Engine::open(&options));
    let done = report(0, &["import", &file, into.text(), "--capacity", &capacity]);
    assert_eq!((&done["stored"], &done["refused"]), (&176.into(), &0.into()), "{done}");
    let blocks = report(0, &["stat", into.text()])["blocks"].as_u64().expect("a number");
    assert!(blocks >= 40, "{blocks}");
}
