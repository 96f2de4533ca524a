//! Processes in different network namespaces. They do not reach each other: only the locks of the directories tell that the
//! store is open.

use super::{BLOCKS, LEN, PROMPTS, directories, directories_in, found, made, segments};
use crate::{Engine, Folder};
use kvferry_store::Error;
use kvferry_store::clean::Cleaner;
use kvferry_testkit::network::in_own_network_or_skip;
use kvferry_testkit::{PATIENCE, Watchdog};
use std::path::PathBuf;
use std::process::Stdio;

const NAMES: [&str; 3] = ["a", "b", "c"];
/// Folder of the store that the process below opens.
const ELSEWHERE: &str = "KVFERRY_STORE_TEST_ELSEWHERE";

#[test]
#[ignore = "the process in another network namespace of the test below"]
fn elsewhere() {
    // `make test-slow` runs all ignored tests. Without a parent, this one has nothing to do.
    let Some(folder) = std::env::var_os(ELSEWHERE).map(PathBuf::from) else { return };
    match Cleaner::open(&NAMES.map(|name| folder.join(name))) {
        Err(Error::InUse { .. }) => println!("clean: in use"),
        other => println!("clean: {other:?}"),
    }
    match Engine::try_open(&directories_in(&folder, &NAMES), LEN) {
        Err(Error::Busy { detail, .. }) => println!("open: busy{detail}"),
        Err(other) => println!("open: {other}"),
        Ok(engine) => println!("open: {:?}", engine.store.stats()),
    }
}

#[test]
fn a_process_in_another_network_namespace_gets_busy_and_cleans_nothing_wherever_the_locks_are() {
    let _bound = Watchdog::new(PATIENCE);
    let what = "a process in another network namespace";
    let this = std::env::current_exe().expect("the path of this program");
    let mut running = Vec::new();
    // The directory that was lost when the process here opened the store, and is back.
    for lost in [None, Some("a"), Some("c")] {
        let Some(mut command) = in_own_network_or_skip(what, &this) else { return };
        let folder = Folder::new(&format!("elsewhere-{}", lost.unwrap_or("none")));
        let with = directories(&folder, &NAMES);
        made(&with);
        let away = folder.path().join("away");
        let path = lost.map(|name| folder.path().join(name));
        if let Some(path) = &path {
            std::fs::rename(path, &away).expect("it exists");
        }
        let engine = Engine::open(&with, LEN);
        if let Some(path) = &path {
            std::fs::rename(&away, path).expect("it exists");
        }
        let before = segments(folder.path());
        let child = command
            .args(["--exact", "directories::networks::elsewhere", "--ignored", "--nocapture"])
            .env(ELSEWHERE, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        running.push((folder, with, engine, before, child));
    }
    for (folder, with, engine, before, child) in running {
        let output = child.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&output.stdout);
        // The name of the test may be before it.
        let has = |line: &str| said.lines().any(|it| it.ends_with(line));
        assert!(has("clean: in use"), "{said}");
        assert!(has("open: busy; no process of this user answers as its keeper"), "{said}");
        assert!(segments(folder.path()) == before, "no segment is changed");
        let stats = engine.store.stats();
        assert_eq!((stats.processes, stats.is_keeper), (1, 1));
        // It has left no lock.
        let other = Engine::open(&with, LEN);
        assert_eq!((other.store.stats().processes, other.store.stats().is_keeper), (2, 0));
        assert_eq!(found(&other), found(&engine));
        drop((engine, other));
        assert_eq!(found(&Engine::open(&with, LEN)), PROMPTS as usize * BLOCKS);
    }
}
