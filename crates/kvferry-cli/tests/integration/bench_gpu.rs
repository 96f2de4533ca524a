//! The bench of GPUs, on the fake driver and without a driver.

use std::process::{Command, Output};

use kvferry_fakecuda::control::library_path;
use serde_json::Value;

fn bench(library: &str, line: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(["bench", "gpu"]).args(line).env_remove("KVFERRY_SECRET");
    // A loaded machine stops a process for seconds.
    command.env("KVFERRY_SILENCE_MS", "300000");
    command.env("KVFERRY_LIBCUDA", library).output().expect("the command starts")
}

fn fake() -> String {
    library_path().to_str().expect("UTF-8").to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn rows<'a>(report: &'a Value, part: &str) -> Vec<&'a Value> {
    let rows = report["rows"].as_array().expect("rows");
    rows.iter().filter(|row| row["part"] == part).collect()
}

/// The names of a row's figures, each of which has a positive median.
fn figures(row: &Value) -> Vec<&str> {
    let figures = row["figures"].as_array().expect("figures");
    for figure in figures {
        assert!(figure["median"].as_f64().is_some_and(|median| median > 0.0), "{row}");
    }
    figures.iter().map(|figure| figure["who"].as_str().expect("a name")).collect()
}

#[test]
fn a_quick_bench_measures_every_part_and_names_what_it_leaves_out() {
    let folder = std::env::temp_dir().join(format!("kvferry-bench-gpu-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("gpu.json");
    let (out, at) = (file.to_str().expect("UTF-8"), folder.to_str().expect("UTF-8"));
    let output = bench(&fake(), &["--quick", "--json", "--out", out, "--folder", at]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["schema"], "kvferry.bench-gpu/1");
    assert!(rows(&report, "gpu parts").is_empty(), "{}", report["rows"]);
    for row in rows(&report, "gpu contiguous") {
        assert_eq!(figures(row), ["kvferry", "cuMemcpyAsync"]);
        assert!(row["judged"][0]["required"]["at_least"].as_f64() >= Some(0.95));
    }
    assert_eq!(rows(&report, "gpu contiguous").len(), 3, "out, in, and both");
    let scattered = rows(&report, "gpu scattered");
    assert_eq!(scattered.len(), 6, "three sizes, out and in");
    for row in scattered {
        let names = ["kvferry", "single", "batch 128", "batch 512", "batch all"];
        let kernels = ["kernel 16", "kernel 128", "gather"];
        assert_eq!(figures(row), [&names[..], &kernels[..]].concat());
        assert_eq!(row["judged"][0]["of"], "the best");
    }
    for transport in ["tcp", "local"] {
        let of = |part: &str| {
            let rows = rows(&report, part);
            rows.into_iter().filter(|row| row["transport"] == transport).collect::<Vec<_>>()
        };
        assert_eq!(of("gpu peers").len(), 6, "three shapes, written and read");
        for row in of("gpu peers") {
            assert_eq!(figures(row), ["kvferry", "host memory", "cuMemcpyAsync out"]);
        }
        assert_eq!(of("gpu exposed").len(), 6);
    }
    let cpu = rows(&report, "gpu cpu");
    let of = |work: &str| cpu.iter().find(|row| row["work"].as_str() == Some(work)).expect("a row");
    assert_eq!(of("idle agent, calls that copy")["figures"][0]["median"], 0.0);
    let calls = of("out, 1024 × 4 KiB, calls that copy")["figures"][0]["median"].as_f64();
    assert!(calls.is_some_and(|calls| (1.0..=9.0).contains(&calls)), "{calls:?}");
    let beside = rows(&report, "gpu beside");
    assert_eq!(beside.len(), 6, "copies in one piece, and of small blocks");
    for (rows, who, most) in [(&beside[..3], "cuMemcpyAsync", 1.05), (&beside[3..], "gather", 1.1)]
    {
        assert_eq!(figures(rows[0]), ["kvferry"]);
        assert_eq!(figures(rows[1]), ["kvferry", who]);
        assert_eq!(rows[1]["judged"][0]["required"]["at_most"], most);
        assert_eq!(rows[2]["unit"], "GB/s");
    }
    let first = rows(&report, "gpu first");
    assert_eq!(first.len(), 18, "{first:?}");
    let of = |work: &str| {
        let found =
            first.iter().find(|row| row["work"].as_str().is_some_and(|it| it.starts_with(work)));
        *found.unwrap_or_else(|| panic!("{work}: {first:?}"))
    };
    for (work, most) in [
        ("measurements of copies", 50.0),
        ("agent, registration, first copy and first of 1024 × 4 KiB", 150.0),
        ("longest copy of 1 MiB while another process pins 16 MiB", 50.0),
    ] {
        assert!(!figures(of(work)).is_empty());
        assert_eq!(of(work)["judged"][0]["required"]["at_most"], most, "{work}");
    }
    assert_eq!(figures(of("longest copy")), ["kvferry", "nothing pinned"]);
    let left_out = report["skipped"].as_array().expect("a list");
    let is_refused = left_out
        .iter()
        .any(|it| it.as_str().is_some_and(|it| it.starts_with("file, page cache: ")));
    assert!(is_refused != (rows(&report, "gpu file").len() >= 2), "{left_out:?}");
    let left: Vec<_> = std::fs::read_dir(&folder).expect("it is there").collect();
    assert_eq!(left.len(), 1, "the report, and no other file");

    let shown = bench(&fake(), &["--from", out]);
    let shown = text(&shown.stdout);
    for part in ["in one piece", "to host memory (out)", "over tcp", "Processor time of copies"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(shown.contains("SHORT") || shown.contains("meet their bounds"), "{shown}");
    std::fs::remove_dir_all(&folder).expect("it is ours");
}

#[test]
fn what_does_not_fit_into_the_limit_is_named() {
    let line = ["--quick", "--json", "--limit", "0", "--rows", "contiguous,peers"];
    let output = bench(&fake(), &line);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["rows"], Value::Array(vec![]));
    assert_eq!(report["skipped"].as_array().map(Vec::len), Some(2), "{report}");
    assert_eq!(report["skipped"][1], "peers: the limit of 0 s");
}

#[test]
fn a_part_that_fails_is_reported_and_the_others_go_on() {
    let line = ["--quick", "--json", "--check", "--rows", "contiguous,cpu"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(["bench", "gpu"]).args(line).env("KVFERRY_LIBCUDA", fake());
    // The first allocation of the device.
    let output = command.env("FAKECUDA", "alloc_oom=1").output().expect("the command starts");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("measurements that failed"));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let parts = rows(&report, "gpu parts");
    assert_eq!((&parts[0]["work"], parts.len()), (&"contiguous".into(), 2));
    assert!(parts[0]["figures"][0]["failed"].as_str().is_some_and(|why| why.contains("memory")));
    assert!(!rows(&report, "gpu cpu").is_empty(), "{report}");
}

#[test]
fn without_a_driver_the_bench_says_so_and_succeeds() {
    let output = bench("libcuda-that-is-nowhere.so.1", &[]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.starts_with("NOT MEASURED: ") && said.contains("no CUDA driver"), "{said}");
    let output = bench("libcuda-that-is-nowhere.so.1", &["--json", "--check"]);
    assert_eq!(output.status.code(), Some(0));
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(value["not_measured"].as_str().is_some_and(|why| why.contains("no CUDA driver")));
    let output = bench(&fake(), &["--device", "7"]);
    assert_eq!(
        (output.status.code(), text(&output.stdout).split(':').next()),
        (Some(0), Some("NOT MEASURED"))
    );
}
