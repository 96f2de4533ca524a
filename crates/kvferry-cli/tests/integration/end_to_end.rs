//! The command as its users run it: real processes, real sockets, real exit codes.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kvferry_testkit::ports::ClosedPort;
use kvferry_testkit::{PATIENCE, Watchdog};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn kvferry(line: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(line).env_remove("KVFERRY_SECRET").env_remove("KVFERRY_SECRET_FILE");
    // No test is about the silence limit; a loaded machine delays heartbeats.
    command.env("KVFERRY_SILENCE_MS", "300000");
    command
}

fn run(line: &[&str]) -> Output {
    kvferry(line).output().expect("the command starts")
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// A demo with small engines: its report, if all went well.
fn engines(more: &[&str]) -> Value {
    let output = kvferry(&["demo", "--sizes", "16,600", "--requests", "6", "--json"])
        .args(more)
        .output()
        .expect("the command starts");
    assert_eq!(code(&output), Some(0), "{}", errors(&output));
    let report = json(&output);
    assert_eq!(report["schema"], "kvferry.demo/3");
    assert_eq!(
        (&report["failed"], &report["held"]),
        (&Value::Array(vec![]), &Value::Array(vec![]))
    );
    // One that prefill says, and four that decode says.
    assert_eq!((&report["tokens_verified"], &report["wrong_tokens"]), (&30.into(), &0.into()));
    // Every byte of every block once, over however many ranks.
    assert_eq!(report["bytes"], 3 * (16 + 608) * 32_768);
    for size in report["sizes"].as_array().expect("sizes") {
        let figure = |name: &str| size["figures"][name].as_f64().expect("a number");
        let (p50, p99) = (figure("latency_p50_ms"), figure("latency_p99_ms"));
        assert!(0.0 < p50 && p50 <= p99 && figure("waiting_ms") <= p50, "{size}");
        assert!(figure("exposed_ms") <= figure("transfer_ms"), "{size}");
        assert!(figure("exposed") > 0.0 && figure("exposed") <= 1.0, "{size}");
        assert!(figure("gb_per_s") > 0.0 && figure("limit_gb_per_s") > 0.0, "{size}");
    }
    report
}

#[test]
fn engines_hand_requests_over_to_more_ranks_and_every_token_is_right() {
    let report = engines(&[]);
    assert_eq!((&report["prefill"], &report["decode"]), (&2.into(), &1.into()));
    assert_eq!((&report["prefill_tp"], &report["decode_tp"]), (&2.into(), &4.into()));
    assert_eq!(report["flow"], "concurrent");
}

#[test]
fn engines_hand_requests_over_to_fewer_ranks_over_tcp_too() {
    let line = ["--prefill", "1", "--prefill-tp", "4", "--decode", "2", "--decode-tp", "1"];
    let report = engines(&[&line[..], &["--transport", "tcp", "--announce", "chunks"]].concat());
    assert_eq!(report["transport"], "tcp");
}

#[test]
fn engines_with_caches_in_memory_of_gpus_say_the_right_tokens() {
    let line = ["demo", "--sizes", "16,48", "--requests", "2", "--json", "--device", "cuda:1"];
    let ranks = ["--prefill", "1", "--prefill-tp", "1", "--decode-tp", "2"];
    let with = |driver: &std::path::Path| {
        let mut command = kvferry(&[&line[..], &ranks].concat());
        command.env("KVFERRY_LIBCUDA", driver).env("FAKECUDA", "devices=2").output()
    };
    let output = with(&kvferry_fakecuda::control::library_path()).expect("the command starts");
    assert_eq!(code(&output), Some(0), "{}", errors(&output));
    let report = json(&output);
    assert_eq!((&report["tokens_verified"], &report["wrong_tokens"]), (&10.into(), &0.into()));
    assert_eq!(
        (&report["bytes"], &report["held"]),
        (&((16 + 48) * 32_768).into(), &Value::Array(vec![]))
    );
    let output = with("/no/libcuda.so.1".as_ref()).expect("the command starts");
    assert_ne!(code(&output), Some(0));
    assert!(errors(&output).contains("--device cuda:1: no CUDA driver"), "{}", errors(&output));
    assert_eq!(code(&run(&["demo", "--device", "tpu"])), Some(2));
}

#[test]
fn what_is_handed_over_after_prefill_has_ended_is_exposed_as_a_whole() {
    let report = engines(&["--flow", "sequential", "--announce", "end"]);
    for size in report["sizes"].as_array().expect("sizes") {
        assert_eq!(size["figures"]["exposed"], 1.0, "{size}");
    }
}

#[test]
fn one_flipped_byte_of_kv_is_a_wrong_token_and_is_named() {
    let line = ["demo", "--sizes", "64", "--requests", "3", "--quiet", "--inject-fault"];
    let output = run(&line);
    assert_eq!(code(&output), Some(1), "{}", errors(&output));
    let errors = errors(&output);
    assert!(errors.contains("WRONG TOKEN: request 2, from prefill "), "{errors}");
    assert!(errors.contains(" to decode 0: decode 0 says "), "{errors}");
    assert!(output.stdout.is_empty(), "no report of a demo that failed");
}

#[test]
fn a_killed_prefill_engine_ends_a_demo_with_its_reason_and_takes_no_other_requests_along() {
    const REQUESTS: usize = 200;
    let _bound = Watchdog::new(PATIENCE);
    // A demo that ends before its engine is killed shows nothing. One that has lost an engine has not ended before.
    let is_in_time = |(output, _): &(Output, String)| {
        let is_lost = || json(output)["lost"].as_array().is_some_and(|it| !it.is_empty());
        code(output) != Some(0) || is_lost()
    };
    let mut tries = (0..10).map(|_| demo_with_a_killed_engine(REQUESTS));
    let (output, errors) = tries.find(is_in_time).expect("a kill in time");
    assert_eq!(code(&output), Some(1), "{errors}");
    assert!(errors.contains("prefill 0: the process ended: signal: 9"), "{errors}");
    let report = json(&output);
    let failed = report["failed"].as_array().expect("requests");
    // What it had in flight, at most. None has waited until its time was over.
    assert!(failed.len() <= 4, "{failed:?}");
    let reason = "prefill 0: the process ended: signal: 9 (SIGKILL)";
    assert!(failed.iter().all(|it| it["reason"] == reason), "{failed:?}");
    assert_eq!(report["lost"].as_array().map(Vec::len), Some(1));
    assert_eq!(report["held"], Value::Array(vec![]));
    assert!(
        report["tokens_verified"].as_u64() >= Some(5 * (REQUESTS - failed.len()) as u64),
        "{report}"
    );
}

/// Kills the first prefill engine of a demo. Returns what the demo wrote, and its standard error by itself.
fn demo_with_a_killed_engine(requests: usize) -> (Output, String) {
    let mut demo =
        kvferry(&["demo", "--sizes", "16", "--requests", &requests.to_string(), "--json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
    let mut said = BufReader::new(demo.stderr.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("prefill 0 is process ") {
        line.clear();
        assert!(said.read_line(&mut line).expect("text") > 0, "it says which process is which");
    }
    let pid = line.split([' ', ',']).nth(4).and_then(|pid| pid.parse().ok()).expect("its number");
    std::thread::sleep(Duration::from_millis(100));
    // The demo may have ended, and its engine with it.
    let engine = Pid::from_raw(pid).expect("not zero");
    let _ = kill_process(engine, Signal::KILL);
    let mut errors = String::new();
    said.read_to_string(&mut errors).expect("text");
    (demo.wait_with_output().expect("it ends"), errors)
}

#[test]
fn a_demo_draws_three_figures_that_need_nothing_else() {
    let file = std::env::temp_dir().join(format!("kvferry-demo-{}.html", std::process::id()));
    engines(&["--plot", file.to_str().expect("text")]);
    let page = std::fs::read_to_string(&file).expect("it was written");
    std::fs::remove_file(&file).expect("it is ours");
    assert_eq!(page.matches("<svg").count(), 3);
    for title in ["Handoff latency", "Exposed and whole transfer", "Throughput while reading"] {
        assert!(page.contains(&format!("aria-label=\"{title}\"")), "{title}");
    }
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("19 MiB"), "{page}");
    // But for the name of its vocabulary.
    assert_eq!(page.matches("http").count(), 3, "{page}");
}

/// The median of a subject's figure in a row of a bench.
fn median(row: &Value, who: &str) -> f64 {
    let figures = row["figures"].as_array().expect("figures");
    let figure = figures.iter().find(|figure| figure["who"] == who).expect(who);
    figure["median"].as_f64().expect("a number")
}

#[test]
#[ignore = "slow: make test-slow"]
fn a_quick_bench_measures_every_part_and_draws_it() {
    let folder = std::env::temp_dir().join(format!("kvferry-plot-{}", std::process::id()));
    let line = ["bench", "transfers", "--quick", "--rounds", "1", "--json", "--plot"];
    let output = kvferry(&line)
        .arg(&folder)
        .args(["--transport", "tcp"])
        .output()
        .expect("the command starts");
    assert_eq!(code(&output), Some(0), "{}", errors(&output));
    let report = json(&output);
    assert_eq!(report["schema"], "kvferry.bench/2");
    assert_eq!(report["sessions"][0]["transport"], "tcp");
    let rows = report["rows"].as_array().expect("rows");
    for part in ["throughput", "cpu", "waits", "callers", "churn", "latency", "setup", "idle"] {
        assert!(rows.iter().any(|row| row["part"] == part), "{part} is missing");
    }
    for row in rows.iter().filter(|row| row["part"] == "throughput") {
        let judged = &row["judged"][0];
        assert!(judged["reached"]["median"].as_f64() > Some(0.0), "{row}");
        assert_eq!(
            (&judged["required"]["at_least"], &judged["of"]),
            (&0.95.into(), &"floor".into())
        );
        assert!(row["floor_settings"]["chunk"].as_u64() > Some(0));
        for who in ["kvferry", "floor", "checksums", "raw", "raw × 4"] {
            assert!(median(row, who) > 0.0, "{row}");
        }
    }
    for file in ["tcp-write.svg", "tcp-read-cpu.svg", "report.html"] {
        let drawn = std::fs::read_to_string(folder.join(file)).expect(file);
        assert!(drawn.contains("<svg") && drawn.contains("kvferry"), "{file}");
    }
    std::fs::remove_dir_all(&folder).expect("it is ours");
}

#[test]
#[ignore = "slow: make test-slow"]
fn a_quick_bench_of_handoffs_measures_everything_and_judges_what_has_a_bound() {
    let output = run(&["bench", "handoff", "--quick", "--json", "--rounds", "1"]);
    // It is too short to judge by, but judged.
    assert!(matches!(code(&output), Some(0 | 1)), "{}", errors(&output));
    let report = json(&output);
    assert_eq!(report["schema"], "kvferry.bench-handoff/2");
    assert_eq!(report["ok"], code(&output) == Some(0), "{}", errors(&output));
    let rows = report["rows"].as_array().expect("rows");
    let judged = |part: &str, transport: Option<&str>, bound: &str, limit: f64| {
        let of = rows.iter().filter(|row| row["part"] == part);
        let mut over = of.filter(|row| row["transport"].as_str() == transport);
        let judged = over.any(|row| {
            let judged = &row["judged"][0];
            judged["required"][bound] == limit
                && judged["reached"]["median"].as_f64() > Some(0.0)
                && judged["ok"].is_boolean()
        });
        assert!(judged, "{part}, {transport:?}, {bound} {limit}: {report}");
    };
    for transport in [Some("local"), Some("tcp")] {
        judged("exposed", transport, "at_most", 0.06);
        judged("exposed", transport, "at_most", 0.3);
        judged("control", transport, "at_most", 4.0);
        judged("one block", transport, "at_most", 1.0);
        judged("one block", transport, "at_least", 0.85);
    }
    for (part, most) in [("step", 200.0), ("plan", 1.0), ("plan", 20.0), ("invented", 1.2)] {
        judged(part, None, "at_most", most);
    }
}

/// The row of a bench with this name, whose only bound is `most`.
fn judged_at_most<'a>(report: &'a Value, work: &str, most: f64) -> &'a Value {
    let rows = report["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["work"] == work).expect(work);
    assert_eq!(row["judged"][0]["required"]["at_most"], most, "{row}");
    assert!(row["judged"][0]["ok"].is_boolean(), "{row}");
    row
}

#[test]
fn a_quick_bench_of_made_up_requests_compares_handoffs_with_those_beside_plain_requests() {
    let _bound = Watchdog::new(PATIENCE);
    let output =
        run(&["bench", "handoff", "--quick", "--json", "--rounds", "1", "--only", "invented"]);
    // It is too short to judge by, but judged.
    assert!(matches!(code(&output), Some(0 | 1)), "{}", errors(&output));
    let report = json(&output);
    for part in ["to its first token, p50", "p50", "p99"] {
        let name = format!("a handoff beside 1 000 made-up requests: {part}");
        let row = judged_at_most(&report, &name, 1.2);
        assert_eq!(row["judged"][0]["of"], "plain requests");
        assert!(median(row, "kvferry") > 0.0 && median(row, "plain requests") > 0.0, "{row}");
    }
    let rows = report["rows"].as_array().expect("rows");
    let arrive = rows.iter().find(|row| row["work"] == "requests that arrive").expect("a rate");
    let ended = median(arrive, "requests that the engines end");
    assert!(median(arrive, "kvferry") < ended / 2.0, "{arrive}");
}

#[test]
fn a_short_bench_of_idle_processes_judges_each_and_counts_its_wake_ups() {
    let _bound = Watchdog::new(PATIENCE);
    let output = run(&["bench", "idle", "--seconds", "1", "--json"]);
    // Without --check no figure fails the command.
    assert_eq!(code(&output), Some(0), "{}", errors(&output));
    let report = json(&output);
    assert_eq!(report["schema"], "kvferry.bench-idle/1");
    for subject in [
        "agent with 8 sessions over TCP",
        "agent with 8 sessions within the host",
        "block store",
        "connector: scheduler half and worker half",
    ] {
        judged_at_most(&report, subject, 0.02);
        let wakes = format!("{subject}: wake-ups of ");
        let rows = report["rows"].as_array().expect("rows");
        let is_wakes = |row: &Value| row["work"].as_str().expect("text").starts_with(&wakes);
        assert!(rows.iter().any(is_wakes), "{subject}: {report}");
    }
}

#[test]
fn a_quick_bench_of_events_measures_the_lag_of_what_is_stored_and_what_is_removed() {
    let _bound = Watchdog::new(PATIENCE);
    let folder = std::env::temp_dir().join(format!("kvferry-events-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let at = folder.to_str().expect("plain letters");
    let line = ["bench", "store", "--rows", "events", "--quick", "--rounds", "1", "--json"];
    let output = run(&[&line[..], &["--folder", at]].concat());
    assert_eq!(code(&output), Some(0), "{}", errors(&output));
    let report = json(&output);
    assert_eq!(report["schema"], "kvferry.bench-store-events/1");
    for what in [
        "100 blocks put into a store that is not full",
        "100 blocks put into a store that is full",
        "100 blocks or more that leave it",
    ] {
        let lag = |part: &str| {
            median(judged_at_most(&report, &format!("{what}: {part}"), 100.0), "kvferry")
        };
        assert!(0.0 < lag("p99") && lag("p99") <= lag("max"), "{report}");
    }
    std::fs::remove_dir(&folder).expect("empty");
}

#[test]
fn a_bench_of_files_verifies_what_it_moved_and_leaves_no_file() {
    let folder = std::env::temp_dir().join(format!("kvferry-cli-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let at = folder.to_str().expect("plain letters");
    for engine in ["auto", "posix"] {
        let line = ["bench", "file", "--quick", "--rounds", "1", "--json", "--folder", at];
        let more = ["--bytes", "64MiB", "--sizes", "2MiB", "--engine", engine];
        let output = run(&[&line[..], &more].concat());
        assert_eq!(code(&output), Some(0), "{}", errors(&output));
        let report = json(&output);
        assert_eq!(report["schema"], "kvferry.bench-file/2");
        assert_eq!(report["verified"], true);
        let rows = report["rows"].as_array().expect("rows");
        for work in ["buffered write 2 MiB", "cold read 2 MiB"] {
            let row = rows.iter().find(|row| row["work"] == work).expect(work);
            assert!(median(row, "kvferry") > 0.0, "{row}");
        }
    }
    let left: Vec<_> = std::fs::read_dir(&folder).expect("made above").collect();
    assert!(left.is_empty(), "{left:?}");
    std::fs::remove_dir(&folder).expect("empty");
    let missing = run(&["bench", "file", "--folder", "/nowhere/at/all"]);
    assert_eq!(code(&missing), Some(2), "{}", errors(&missing));
}

#[test]
fn a_bench_of_the_store_replays_a_trace_beside_last_use_and_the_optimum() {
    let file = std::env::temp_dir().join(format!("kvferry-requests-{}", std::process::id()));
    let at = file.to_str().expect("plain letters");
    // A loop over more chains than fit, which an order by last use never hits.
    let request = |i: u64| {
        let first = i % 60 * 10;
        format!("{{\"timestamp\": {}, \"hash_ids\": [{first}, {}]}}\n", i * 1000, first + 1)
    };
    let trace: String = (0..3000).map(request).collect();
    std::fs::write(&file, &trace).expect("a file can be written");
    let output = run(&["bench", "store", "--trace", at, "--blocks", "100", "--check", "--json"]);
    assert_eq!(code(&output), Some(0), "{}", errors(&output));
    let report = json(&output);
    assert_eq!(report["schema"], "kvferry.bench-store/2");
    let rows = report["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["work"] == "100 blocks, second half").expect("a row");
    assert_eq!(median(row, "least recently used"), 0.0);
    let [ours, best] = ["kvferry", "the optimum"].map(|who| median(row, who));
    assert!(ours > 60.0 && ours <= best, "{report}");
    assert!(median(row, "S3-FIFO") <= best, "{report}");

    std::fs::write(&file, trace.replacen("hash_ids", "hashes", 1)).expect("a file can be written");
    let output = run(&["bench", "store", "--trace", at]);
    std::fs::remove_file(&file).expect("it was written above");
    assert_eq!(code(&output), Some(2));
    assert!(errors(&output).contains("line 1: missing field `hash_ids`"), "{}", errors(&output));
}

#[test]
fn a_bench_moves_the_tables_of_a_model_and_of_a_trace() {
    let file = std::env::temp_dir().join(format!("kvferry-trace-{}", std::process::id()));
    let trace = "[[0, 8192, 4096], [20000, 5, 100]]\n\
                 {\"block_bytes\": 4096, \"local\": [7, 3], \"remote\": [12, 40]}\n";
    std::fs::write(&file, trace).expect("a file can be written");
    let line = ["bench", "transfers", "--quick", "--rounds", "1", "--only", "throughput", "--json"];
    let output = kvferry(&line)
        .args(["--transport", "tcp", "--checksums", "off"])
        .args(["--model", "opt-125m", "--tokens", "100", "--requests", "2", "--trace"])
        .arg(&file)
        .output()
        .expect("the command starts");
    std::fs::remove_file(&file).expect("it is ours");
    assert_eq!(code(&output), Some(0), "{}", errors(&output));
    let report = json(&output);
    let rows = report["rows"].as_array().expect("rows");
    let works: Vec<&str> = rows
        .iter()
        .filter(|row| row["part"] == "throughput")
        .map(|row| row["work"].as_str().expect("a name"))
        .collect();
    assert_eq!(works.len(), 4, "{works:?}");
    assert_eq!(works[0], "write 2 × 100 tokens of opt-125m (48 KiB × 84)");
    assert!(works[3].starts_with("read ") && works[3].ends_with(", 2 batches"), "{works:?}");
}

#[test]
fn a_bench_across_hosts_needs_the_secret_of_the_target() {
    let (mut server, address) = serve("right");
    let bench = |secret: &str| {
        let line =
            ["bench", "transfers", "--quick", "--only", "latency", "--rounds", "1", "--json"];
        kvferry(&line).args(["--target", &address]).env("KVFERRY_SECRET", secret).output()
    };
    let welcome = bench("right").expect("the command starts");
    assert_eq!(code(&welcome), Some(0), "{}", errors(&welcome));
    assert_eq!(json(&welcome)["sessions"][0]["authenticated"], true);
    assert_eq!(json(&welcome)["hosts"], 2);
    let refused = bench("wrong").expect("the command starts");
    assert_eq!(code(&refused), Some(3), "{}", errors(&refused));
    // One bench has ended and one was refused: the target serves on.
    let again = bench("right").expect("the command starts");
    assert_eq!(code(&again), Some(0), "{}", errors(&again));
    server.kill().expect("still there");
    server.wait().expect("killed");
}

/// A target on a free port, and where it listens.
fn serve(secret: &str) -> (Child, String) {
    let mut server = kvferry(&["bench", "transfers", "--serve", "--listen", "127.0.0.1:0"])
        .env("KVFERRY_SECRET", secret)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut said = BufReader::new(server.stderr.take().expect("piped"));
    let mut line = String::new();
    said.read_line(&mut line).expect("it says where it listens");
    // Whatever else it says must not fill the pipe.
    std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
    let address = line.split_whitespace().nth(3).expect("serving benches on ADDRESS,");
    (server, address.trim_end_matches(',').to_string())
}

#[test]
fn an_unreachable_target_and_a_bad_command_line_have_different_exit_codes() {
    let unused = ClosedPort::new();
    assert_eq!(code(&run(&["bench", "transfers", "--target", unused.address()])), Some(3));
    assert_eq!(code(&run(&["bench", "transfers", "--target", "nobody.invalid:1"])), Some(3));
    assert_eq!(code(&run(&["bench", "transfers", "--model", "gpt-5"])), Some(2));
    assert_eq!(code(&run(&["demo", "--decode-tp", "3"])), Some(2));
    assert_eq!(code(&run(&["bench", "transfers", "--sizes", "4KiB"])), Some(2));
    assert_eq!(code(&run(&["bench", "transfers", "--transport", "pigeon"])), Some(2));
    assert_eq!(code(&run(&["bench", "transfers", "--peers", "/nowhere/python"])), Some(2));
    assert_eq!(code(&run(&["bench", "transfers", "--trace", "/nowhere/blocks.jsonl"])), Some(2));
    assert_eq!(code(&run(&[])), Some(2));
}

#[test]
fn the_version_is_readable_by_programs() {
    let version = json(&run(&["version", "--json"]));
    assert_eq!(version["schema"], "kvferry.version/1");
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn a_reader_that_leaves_early_causes_no_panic() {
    let mut version = kvferry(&["version"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop(version.stdout.take());
    let mut said = String::new();
    version.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(version.wait().expect("it ends").success());
    assert_eq!(said, "");
}

#[test]
fn no_process_outlives_an_interrupted_or_killed_demo() {
    let line = ["demo", "--quiet", "--sizes", "16", "--requests", "5000"];
    for signal in [Signal::INT, Signal::KILL] {
        let mut demo = kvferry(&line).stdout(Stdio::null()).spawn().expect("the command starts");
        let helpers = until("its processes", || {
            Some(helpers_of(demo.id())).filter(|helpers| helpers.len() == 3)
        });
        std::thread::sleep(Duration::from_millis(300));
        kill(demo.id(), signal);
        demo.wait().expect("it ends");
        for helper in helpers {
            until("the end of its processes", || has_ended(helper).then_some(()));
        }
    }
}

fn kill(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.cast_signed()).expect("not zero");
    kill_process(pid, signal).expect("still there");
}

/// The processes of a demo that move KV.
fn helpers_of(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let is_of_demo = |pid: &u32| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.contains("demo-")
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(is_of_demo).collect()
}

/// Gone, or dead and not yet reaped.
fn has_ended(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.is_empty() || status.contains("State:\tZ") || status.contains("State:\tX")
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    while began.elapsed() < PATIENCE / 2 {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what} did not come");
}
