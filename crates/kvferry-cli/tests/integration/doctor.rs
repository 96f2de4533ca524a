//! The doctor as its users run it: on this host, and against agents, benches and other programs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::thread;

use kvferry::{Access, Agent};
use kvferry_testkit::ports::ClosedPort;
use serde_json::Value;

fn doctor(line: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.arg("doctor").args(line);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KVFERRY_") {
            command.env_remove(name);
        }
    }
    // A loaded machine stops a process for seconds.
    command.env("KVFERRY_SILENCE_MS", "300000");
    command
}

fn run(command: &mut Command) -> (i32, Value) {
    let output = command.arg("--json").output().expect("the command starts");
    let code = output.status.code().expect("it was not killed");
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", said(&output)));
    (code, report)
}

fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

fn findings(report: &Value) -> Vec<&Value> {
    let groups = report["groups"].as_array().expect("groups");
    groups.iter().flat_map(|group| group["findings"].as_array().expect("findings")).collect()
}

#[track_caller]
fn finding<'a>(report: &'a Value, id: &str) -> &'a Value {
    let found = findings(report).into_iter().find(|finding| finding["id"] == id);
    found.unwrap_or_else(|| panic!("{id} is not in {report}"))
}

#[test]
fn this_host_is_described_and_every_shortcoming_has_its_fix() {
    let (code, report) = run(&mut doctor(&[]));
    assert_eq!(report["schema"], "kvferry.doctor/1");
    let bad = findings(&report).iter().filter(|f| f["mark"] == "bad").count();
    assert_eq!(report["counts"]["bad"], bad);
    assert_eq!(code, i32::from(bad > 0), "{report}");
    for finding in findings(&report) {
        assert_eq!(finding["mark"] == "ok", finding["fix"].is_null(), "{finding}");
    }
}

#[test]
fn gpus_are_described_and_how_kvferry_copies_their_memory() {
    let driver = kvferry_fakecuda::control::library_path();
    let mut command = doctor(&[]);
    let (_, report) = run(command.env("KVFERRY_LIBCUDA", driver).env("FAKECUDA", "devices=2"));
    let of = |id: &str| {
        let all = findings(&report).into_iter();
        all.filter(|finding| finding["id"] == id).collect::<Vec<_>>()
    };
    let gpus = of("cuda_device");
    assert_eq!(gpus.len(), 2, "{report}");
    for gpu in gpus {
        assert!(
            gpu["facts"]["uuid"].as_str().is_some_and(|uuid| uuid.starts_with("GPU-")),
            "{gpu}"
        );
        assert!(gpu["facts"]["copy_engines"].as_u64().is_some_and(|n| n > 0), "{gpu}");
        assert!(gpu["finding"].as_str().is_some_and(|text| text.contains("compute ")), "{gpu}");
        for fact in ["vmm", "vmm_export_fd", "vmm_export_fabric"] {
            assert!(gpu["facts"][fact].is_boolean(), "{fact}: {gpu}");
        }
    }
    for id in ["cuda_kernel", "cuda_pinning", "cuda_exports", "cuda_costs"] {
        let each = of(id);
        assert_eq!(each.len(), 2, "{id}: {report}");
        assert!(each.iter().all(|finding| finding["mark"] == "ok"), "{each:?}");
    }
    assert_eq!(finding(&report, "cuda_kernel")["facts"]["accepted"], true);
    assert_eq!(finding(&report, "cuda_exports")["facts"]["ipc"], true);
    let pinning = &finding(&report, "cuda_pinning")["facts"]["bytes_per_second"];
    assert!(pinning.as_u64().is_some_and(|rate| rate > 0), "{pinning}");
    assert_eq!(finding(&report, "cuda_costs")["facts"]["measured"], true);
    assert_eq!(finding(&report, "cuda_copies")["facts"]["batch_call"], true);
    assert_eq!(finding(&report, "cuda_stages")["facts"]["bytes"], 512 << 20);

    let old = kvferry_fakecuda::control::library_path();
    let mut command = doctor(&[]);
    let settings = "devices=1,version=12.2";
    let (_, report) = run(command.env("KVFERRY_LIBCUDA", old).env("FAKECUDA", settings));
    assert_eq!(finding(&report, "cuda_copies")["mark"], "note");
}

#[test]
fn what_the_driver_of_a_gpu_refuses_is_a_note_with_its_reason_and_its_fix() {
    let refusals = [
        ("jit_refused", "cuda_kernel", "the driver refuses the kernel", "compiler"),
        ("pin_oom", "cuda_pinning", "OUT_OF_MEMORY", "memlock"),
        ("context_oom", "cuda_kernel", "not tried", "nvidia-smi"),
    ];
    for (fault, id, why, fix) in refusals {
        let mut command = doctor(&[]);
        command.env("KVFERRY_LIBCUDA", kvferry_fakecuda::control::library_path());
        let (_, report) = run(command.env("FAKECUDA", format!("devices=1,{fault}=1:ever")));
        let found = finding(&report, id);
        let has =
            |field: &str, part: &str| found[field].as_str().is_some_and(|it| it.contains(part));
        assert!(found["mark"] == "note" && has("finding", why) && has("fix", fix), "{found}");
        assert_eq!(finding(&report, "cuda_copies")["mark"], "ok", "{fault}");
    }
    let mut command = doctor(&[]);
    command.env("KVFERRY_LIBCUDA", kvferry_fakecuda::control::library_path());
    command.env("KVFERRY_GPU_METHOD", "batch");
    let (_, report) = run(command.env("FAKECUDA", "devices=1"));
    assert_eq!(finding(&report, "cuda_costs")["facts"]["source"], "setting");
    assert_eq!(finding(&report, "cuda_costs")["facts"]["measured"], false);
}

#[test]
fn the_advertised_address_is_the_one_an_agent_gives() {
    for (listen, host_ip) in
        [("0.0.0.0:0", None), ("0.0.0.0:0", Some("10.1.2.3")), ("127.0.0.1:0", None)]
    {
        let mut command = doctor(&[]);
        command.env("KVFERRY_LISTEN", listen).env_remove("HOST_IP").env_remove("POD_IP");
        let mut builder =
            Agent::builder().listen(listen.parse::<std::net::SocketAddr>().expect("one"));
        if let Some(ip) = host_ip {
            command.env("HOST_IP", ip);
            builder = builder.advertise(ip);
        }
        let (_, report) = run(&mut command);
        let agent = builder.start().expect("an agent");
        let (told, _) = agent.advertised().rsplit_once(':').expect("a port");
        let shown = finding(&report, "advertise")["facts"]["address"].as_str().expect("one");
        assert_eq!(shown, format!("{told}:0"));
    }
}

#[test]
fn settings_that_no_agent_takes_are_bad() {
    for (name, value, id) in [
        ("KVFERRY_IO_THREADS", "many", "agent"),
        ("KVFERRY_LISTEN", "198.51.100.7:0", "listen"),
        ("KVFERRY_TRANSPORTS", "pigeon", "agent"),
        ("KVFERRY_SECRET_FILE", "/nonexistent/file", "agent"),
    ] {
        let (code, report) = run(doctor(&[]).env(name, value));
        assert_eq!(finding(&report, id)["mark"], "bad", "{name}: {report}");
        assert_eq!(code, 1);
    }
}

#[test]
fn secrets_never_appear() {
    let agent = Agent::builder().secret(b"hush-hush").start().expect("an agent");
    for target in [None, Some(agent.advertised())] {
        for json in [None, Some("--json")] {
            let line: Vec<&str> = target.into_iter().chain(json).collect();
            for secret in ["hush-hush", "hush-wrong"] {
                let output =
                    doctor(&line).env("KVFERRY_SECRET", secret).output().expect("it starts");
                assert!(!said(&output).contains("hush"), "{}", said(&output));
            }
        }
    }
}

#[test]
fn an_agent_is_met_measured_and_left_as_it_was() {
    let agent = Agent::builder().name("decode-0").start().expect("an agent");
    let region = agent.allocate(1 << 20, Access::READ_WRITE).expect("memory");
    let before: Vec<u8> = (0..region.len()).map(|i| (i / 7) as u8).collect();
    region.write_at(0, &before).expect("owned memory");
    let (code, report) = run(&mut doctor(&[agent.advertised()]));
    assert_eq!(code, 0, "{report}");
    assert_eq!(report["target"], agent.advertised());
    assert_eq!(finding(&report, "handshake")["facts"]["name"], "decode-0");
    assert_eq!(finding(&report, "route")["facts"]["same_host"], true);
    assert_eq!(finding(&report, "regions")["facts"]["readable"], 1 << 20);
    assert!(finding(&report, "round_trip")["facts"]["p50_us"].as_f64() > Some(0.0));
    let facts = &finding(&report, "bandwidth")["facts"];
    assert!(facts["read_gb_per_s"].as_f64() > Some(0.0) && facts["write_gb_per_s"].is_null());
    let mut after = vec![0; region.len()];
    region.read_at(0, &mut after).expect("owned memory");
    assert!(before == after, "the doctor wrote to a peer's memory");
    assert_eq!(agent.stats().bytes_received, 0);
    let (_, report) = run(&mut doctor(&[agent.advertised(), "--no-bandwidth"]));
    assert!(!findings(&report).iter().any(|f| f["id"] == "bandwidth"), "{report}");
}

#[test]
fn an_agent_without_readable_memory_comes_with_a_way_to_measure() {
    kvferry_mooncake::link();
    let agent = Agent::builder().setting("mooncake", true).start().expect("an agent");
    let (code, report) = run(&mut doctor(&[agent.advertised()]));
    assert_eq!(code, 0, "{report}");
    let bandwidth = finding(&report, "bandwidth");
    assert_eq!(bandwidth["mark"], "note");
    assert!(bandwidth["fix"].as_str().is_some_and(|fix| fix.contains("bench transfers --serve")));
    let both = finding(&report, "transports")["facts"]["both"].as_array().expect("a list");
    assert!(both.contains(&"tcp".into()) && both.contains(&"mooncake".into()), "{report}");
}

#[test]
fn a_bench_that_serves_has_both_directions_measured() {
    let mut server = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["bench", "transfers", "--serve", "--listen", "127.0.0.1:0"])
        .env_remove("KVFERRY_SECRET")
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut line = String::new();
    let mut errors = BufReader::new(server.stderr.take().expect("piped"));
    errors.read_line(&mut line).expect("it says where it listens");
    thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
    let address = line.split_whitespace().nth(3).expect("serving benches on ADDRESS,");
    let (code, report) = run(&mut doctor(&[address.trim_end_matches(',')]));
    server.kill().expect("still there");
    server.wait().expect("killed");
    assert_eq!(code, 0, "{report}");
    assert_eq!(finding(&report, "handshake")["facts"]["kind"], "bench");
    let facts = &finding(&report, "bandwidth")["facts"];
    assert!(facts["write_gb_per_s"].as_f64() > Some(0.0), "{report}");
    assert!(facts["read_gb_per_s"].as_f64() > Some(0.0), "{report}");
}

#[test]
fn every_reason_for_a_missing_session_has_its_own_finding() {
    let secret = Agent::builder().secret(b"right").start().expect("an agent");
    let open = Agent::builder().start().expect("an agent");
    for (agent, ours, error) in [
        (&secret, None, "auth_required"),
        (&secret, Some("wrong"), "auth_failed"),
        (&open, Some("any"), "auth_unsupported"),
    ] {
        let mut command = doctor(&[agent.advertised()]);
        if let Some(ours) = ours {
            command.env("KVFERRY_SECRET", ours);
        }
        let (code, report) = run(&mut command);
        assert_eq!(finding(&report, "handshake")["facts"]["error"], error, "{report}");
        assert_eq!(code, 1);
    }
    let (code, report) = run(doctor(&[secret.advertised()]).env("KVFERRY_SECRET", "right"));
    assert_eq!(finding(&report, "handshake")["facts"]["authenticated"], true, "{report}");
    assert_eq!(code, 0);
}

/// Another program on a port: answers every connection with these bytes, or only accepts it.
fn stranger(answer: Option<&'static [u8]>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    thread::spawn(move || {
        let mut kept = Vec::new();
        for mut stream in listener.incoming().flatten() {
            if let Some(answer) = answer {
                drop(stream.read(&mut [0; 64]));
                drop(stream.write_all(answer));
            } else {
                kept.push(stream);
            }
        }
    });
    address
}

#[test]
fn other_protocols_are_named() {
    for (answer, word) in [
        (Some(&b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"[..]), "web server"),
        (Some(b"SSH-2.0-OpenSSH_9.2\r\n"), "SSH"),
        (Some(b""), "closes the connection"),
        (None, "sends nothing"),
    ] {
        let (code, report) = run(&mut doctor(&[&stranger(answer)]));
        let found = finding(&report, "handshake");
        assert!(found["finding"].as_str().is_some_and(|f| f.contains(word)), "{word}: {found}");
        assert_eq!((code, &found["mark"]), (1, &"bad".into()));
    }
}

#[test]
fn a_missing_agent_is_bad_and_a_wrong_command_line_has_another_exit_code() {
    let closed = ClosedPort::new();
    let (code, report) = run(&mut doctor(&[closed.address()]));
    assert_eq!((code, &finding(&report, "connect")["mark"]), (1, &"bad".into()), "{report}");
    let (code, report) = run(&mut doctor(&["no-such-host.invalid:1"]));
    assert_eq!((code, &finding(&report, "name")["mark"]), (1, &"bad".into()), "{report}");
    let of_this_host = &["127.0.0.1:1", "--no-gpu-trial"];
    let of_an_agent = [&["--timeout", "3"][..], &["--no-bandwidth"]];
    for line in [&["no-port"][..], of_this_host, &["--what"]].into_iter().chain(of_an_agent) {
        let output = doctor(line).output().expect("the command starts");
        assert_eq!(output.status.code(), Some(2), "{line:?}: {}", said(&output));
    }
}

/// The directory of a libcuda of our own making.
fn made_cuda(name: &str, init: &str) -> Option<std::path::PathBuf> {
    let source = format!(
        "#include <string.h>\n#include <stdlib.h>\n
         int cuInit(unsigned f) {{ {init} }}
         int cuGetErrorString(int e, const char **s) {{ *s = \"made up\"; return 0; }}
         int cuDriverGetVersion(int *v) {{ *v = 12080; return 0; }}
         int cuDeviceGetCount(int *n) {{ *n = 1; return 0; }}
         int cuDeviceGet(int *d, int i) {{ *d = i; return 0; }}
         int cuDeviceGetName(char *s, int n, int d) {{ strncpy(s, \"Made Up GPU\", n); return 0; }}
         int cuDeviceGetPCIBusId(char *s, int n, int d) {{ strncpy(s, \"0000:1B:00.0\", n); return 0; }}
         int cuDeviceTotalMem_v2(size_t *n, int d) {{ *n = 1ul << 37; return 0; }}"
    );
    made(name, "libcuda.so.1", &source)
}

/// The directory of a library that is compiled from this source.
fn made(name: &str, library: &str, source: &str) -> Option<std::path::PathBuf> {
    let dir = std::env::temp_dir().join(format!("kvferry-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    std::fs::write(dir.join("made.c"), source).expect("a file");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o", library, "made.c"])
        .current_dir(&dir)
        .status();
    match built {
        Ok(status) if status.success() => Some(dir),
        _ => {
            drop(writeln!(std::io::stderr(), "SKIPPED: a made up {library}: no C compiler"));
            None
        }
    }
}

/// The doctor on a host with one fake GPU, with these settings.
fn doctor_of_a_gpu(line: &[&str], settings: &str) -> Command {
    let mut command = doctor(line);
    command.env("KVFERRY_LIBCUDA", kvferry_fakecuda::control::library_path());
    command.env("FAKECUDA", format!("devices=1,{settings}"));
    command
}

#[track_caller]
fn is_untried(report: &Value, why: &str) {
    let kernel = finding(report, "cuda_kernel");
    assert!(kernel["finding"].as_str().is_some_and(|text| text.contains(why)), "{why}: {kernel}");
    assert_eq!(kernel["mark"], "note", "{kernel}");
    for id in ["cuda_pinning", "cuda_exports", "cuda_costs"] {
        assert!(findings(report).iter().all(|finding| finding["id"] != id), "{id}: {report}");
    }
    // What the driver says without a context.
    assert!(finding(report, "cuda_device")["facts"]["uuid"].is_string(), "{report}");
    assert_eq!(finding(report, "cuda_copies")["mark"], "ok");
}

#[test]
fn a_gpu_is_not_tried_that_others_need_nor_where_the_user_says_so() {
    let (_, report) = run(&mut doctor_of_a_gpu(&["--no-gpu-trial"], "compute_mode=0"));
    is_untried(&report, "not tried: --no-gpu-trial");
    let (_, report) = run(&mut doctor_of_a_gpu(&[], "compute_mode=3"));
    is_untried(&report, "EXCLUSIVE_PROCESS");
    let source = "#include <string.h>\n
         int nvmlInit_v2(void) { return 0; }
         int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
             *device = (void *)1;
             return strcmp(bus, \"0000:10:00.0\") ? 6 : 0;
         }
         int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *bytes) {
             bytes[0] = 1ull << 37; bytes[1] = 512ull << 20; bytes[2] = bytes[0] - bytes[1];
             return 0;
         }";
    let Some(dir) = made("nvml", "libnvidia-ml.so.1", source) else { return };
    let mut command = doctor_of_a_gpu(&[], "compute_mode=0");
    let (_, report) = run(command.env("LD_LIBRARY_PATH", &dir));
    is_untried(&report, "512 MiB of the GPU's memory are free");
    std::fs::remove_dir_all(dir).expect("ours");
}

#[test]
fn the_doctor_says_what_has_failed_of_pinning_and_of_exports() {
    let (_, report) = run(&mut doctor_of_a_gpu(&[], "pin_total=38MiB"));
    let pinning = finding(&report, "cuda_pinning");
    let words = pinning["finding"].as_str().expect("words");
    assert!(words.starts_with("36 MiB of host memory can be pinned"), "{pinning}");
    assert_eq!(pinning["mark"], "note", "{pinning}");
    let (_, report) = run(&mut doctor_of_a_gpu(&[], "alloc_oom=1:ever"));
    let exports = finding(&report, "cuda_exports");
    let words = exports["finding"].as_str().expect("words");
    assert!(words.contains("2 MiB of the GPU's memory can't be allocated"), "{exports}");
}

#[test]
fn a_gpu_library_that_works_fails_or_crashes_is_a_line_of_the_report() {
    let cases = [
        ("works", "return 0;", "CUDA 12.8"),
        ("fails", "return 803;", "error 803, made up"),
        ("crashes", "abort();", "died of signal 6"),
        ("leaves", "_exit(0);", "gave no answer"),
    ];
    for (name, init, wanted) in cases {
        let Some(dir) = made_cuda(name, init) else { return };
        let (_, report) = run(doctor(&[]).env("LD_LIBRARY_PATH", &dir));
        let found = finding(&report, "cuda");
        assert!(found["finding"].as_str().is_some_and(|f| f.contains(wanted)), "{name}: {found}");
        if name == "works" {
            assert_eq!(finding(&report, "cuda_device")["facts"]["memory_bytes"], 1u64 << 37);
        }
        std::fs::remove_dir_all(dir).expect("ours");
    }
}
