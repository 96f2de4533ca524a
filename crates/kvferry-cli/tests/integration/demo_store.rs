//! `kvferry demo store` as its users run it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn demo_store(more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(["demo", "store", "--quiet", "--prefix-tokens", "512", "--requests", "2"]);
    command.args(more).env_remove("KVFERRY_SECRET").env_remove("KVFERRY_SECRET_FILE");
    command.output().expect("the command starts")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// A directory that does not exist, and is removed in the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("kvferry-{name}-{}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("names here are text")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_second_start_reads_what_the_first_one_put_and_a_kill_costs_only_what_was_not_whole() {
    let output = demo_store(&["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    let report = json(&output);
    assert_eq!(report["schema"], "kvferry.demo-store/1");
    assert_eq!(report["complaints"], Value::Array(vec![]));
    let [first, second, after] = &report["starts"].as_array().expect("starts")[..] else {
        panic!("three starts: {report}");
    };
    // The prefix has 32 blocks, and each prompt two more.
    assert_eq!((&first["loaded_blocks"], &first["stored_blocks"]), (&0.into(), &36.into()));
    assert_eq!((&second["loaded_blocks"], &second["cached_tokens"]), (&36.into(), &1056.into()));
    assert!(after["loaded_blocks"].as_u64() > second["loaded_blocks"].as_u64(), "{report}");
    let killed = |name: &str| report["killed"][name].as_u64().expect("a number");
    assert!(killed("whole_blocks") <= killed("found_blocks"), "{report}");
    assert!(killed("found_blocks") < killed("blocks"), "{report}");
    assert_eq!((&report["tokens_verified"], &report["wrong_tokens"]), (&36.into(), &0.into()));
}

#[test]
fn a_wrong_byte_of_a_block_that_was_read_is_exit_code_1() {
    let output = demo_store(&["--inject-fault"]);
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("WRONG") && errors(&output).contains("tokens are wrong"), "{text}");
}

#[test]
fn a_directory_that_is_given_keeps_the_store_and_is_not_used_twice() {
    let directory = Directory::new("demo-store-kept");
    let output = demo_store(&["--directory", directory.path(), "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    let killed = |name: &str| json(&output)["killed"][name].as_u64().expect("a number");
    let mut verify = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    let verify = verify.args(["store", "verify", "--json", directory.path()]).output();
    let verify = verify.expect("it starts");
    // The kill may have torn blocks. They are never read, and are bad until their segment is used again.
    let bad = json(&verify)["bad"].as_array().expect("a list").len() as u64;
    assert_eq!(verify.status.code(), Some(i32::from(bad > 0)), "{}", errors(&verify));
    assert!(bad <= killed("blocks") - killed("whole_blocks"), "{bad} bad, {:?}", json(&output));
    let again = demo_store(&["--directory", directory.path()]);
    assert_eq!(again.status.code(), Some(2), "{}", errors(&again));
    assert!(errors(&again).contains("not empty"), "{}", errors(&again));
}

#[test]
fn ctrl_c_leaves_no_temporary_folder() {
    let temporary = Directory::new("demo-store-interrupted");
    fs::create_dir(temporary.path()).expect("a new folder");
    let inside = || fs::read_dir(temporary.path()).expect("it is there").next();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(["demo", "store", "--prefix-tokens", "32768"]).env("TMPDIR", temporary.path());
    let mut child = command.stderr(Stdio::piped()).spawn().expect("the command starts");
    let mut said = String::new();
    let mut errors = BufReader::new(child.stderr.take().expect("a pipe"));
    errors.read_line(&mut said).expect("it says what it does");
    assert!(inside().is_some(), "{said}");
    let pid = Pid::from_child(&child);
    kill_process(pid, Signal::INT).expect("it runs");
    let status = child.wait().expect("it ends");
    assert_eq!(status.signal(), Some(Signal::INT.as_raw()), "{status}");
    assert!(inside().is_none(), "{:?}", inside());
}
