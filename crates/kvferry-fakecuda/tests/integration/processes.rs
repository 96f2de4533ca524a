//! Several processes: faults of the host, forks, handles of memory, and visible devices.
//!
//! A test that needs another program of its own runs itself again, with `FAKE_ROLE` set.

use std::process::{Command, Output};

use crate::driver::{Driver, EXPORTABLE, driver, in_child, ready};
use kvferry_fakecuda::{FREED, UNWRITTEN};

const LEN: usize = 10_000;

/// Runs one test of this file again in another role, with an argument.
fn again(test: &str, role: &str, argument: &str, settings: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = format!("processes::{test}");
    command.args(["--exact", &test, "--nocapture", "--test-threads=1"]);
    command.env("FAKE_ROLE", role).env("FAKE_ARGUMENT", argument);
    command.envs(settings.iter().copied());
    let output = command.output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("running 1 test"), "{test} has run");
    output
}

fn role() -> Option<(String, String)> {
    Some((std::env::var("FAKE_ROLE").ok()?, std::env::var("FAKE_ARGUMENT").ok()?))
}

fn succeeds(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Text that the other role printed after `mark`.
fn printed(output: &Output, mark: &str) -> String {
    succeeds(output);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.split_once(mark)).unwrap().1;
    line.trim().to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn handle_of(text: &str) -> [u8; 64] {
    let byte = |at: usize| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).unwrap();
    std::array::from_fn(byte)
}

#[test]
fn the_host_cannot_touch_device_memory() {
    let cuda = ready(&[]);
    let device = cuda.alloc(LEN).unwrap();
    let freed = cuda.alloc(LEN).unwrap();
    cuda.free(freed).unwrap();
    for address in [device, device + LEN as u64 - 1, freed] {
        let status = in_child(|| {
            // SAFETY: none; that the access ends the child is what the test proves.
            i32::from(unsafe { (address as *const u8).read_volatile() })
        });
        assert!(libc::WIFSIGNALED(status), "{status}");
        assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
    }
}

#[test]
fn calls_in_a_forked_child_fail_and_the_parent_counts_them() {
    let cuda = ready(&[]);
    let (device, other) = (cuda.alloc(LEN).unwrap(), cuda.alloc(LEN).unwrap());
    let before = cuda.fake.counter("fork_violations");
    // The child uses the addresses that these calls have found.
    cuda.device_count().unwrap();
    cuda.free(other).unwrap();
    let known = (cuda.address("cuDeviceGetCount").unwrap(), cuda.address("cuMemFree").unwrap());
    let status = in_child(|| {
        // SAFETY: the functions have these signatures.
        let codes = unsafe {
            let count: unsafe extern "C" fn(*mut i32) -> i32 = std::mem::transmute(known.0);
            let free: unsafe extern "C" fn(u64) -> i32 = std::mem::transmute(known.1);
            (count(&mut 0), free(device))
        };
        i32::from(codes != (3, 3))
    });
    assert_eq!(status, 0);
    assert_eq!(cuda.fake.counter("fork_violations"), before + 2);
    cuda.free(device).unwrap();
}

#[test]
fn another_process_maps_an_allocation_and_sees_its_end() {
    const NAME: &str = "another_process_maps_an_allocation_and_sees_its_end";
    if let Some((_, argument)) = role() {
        importer(&argument);
        return;
    }
    let cuda = ready(&[]);
    let device = cuda.alloc(LEN).unwrap();
    cuda.fake.write(device, &[0x21; LEN]).unwrap();
    let handle = cuda.ipc_handle(device + 5).unwrap();
    succeeds(&again(NAME, "importer", &hex(&handle), &[]));
    assert_eq!(cuda.fake.read(device, 3).unwrap(), [0x22; 3], "the importer wrote");
    for bit in [0, 70, 200, 300, 511] {
        let mut changed = handle;
        changed[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(cuda.open_ipc(changed), Err(1));
    }
    cuda.free(device).unwrap();
    let stale = again(NAME, "stale", &hex(&handle), &[]);
    succeeds(&stale);
    let dead = printed(&again(NAME, "exporter", "", &[]), "handle=");
    assert_eq!(cuda.open_ipc(handle_of(&dead)), Err(400), "its process is gone");
    let hidden = again(NAME, "hidden", &hex(&handle), &[("CUDA_VISIBLE_DEVICES", "1")]);
    succeeds(&hidden);
}

fn importer(argument: &str) {
    let cuda = ready(&[]);
    match role().unwrap().0.as_str() {
        "importer" => import(cuda, handle_of(argument)),
        "stale" => assert_eq!(cuda.open_ipc(handle_of(argument)), Err(205)),
        "hidden" => assert_eq!(cuda.open_ipc(handle_of(argument)), Err(101)),
        _ => {
            let device = cuda.alloc(LEN).unwrap();
            println!("handle={}", hex(&cuda.ipc_handle(device).unwrap()));
        }
    }
}

fn import(cuda: &Driver, handle: [u8; 64]) {
    cuda.fake.set("ipc_limit", "0");
    assert_eq!(cuda.open_ipc(handle), Err(2));
    cuda.fake.set("ipc_limit", "1");
    let mapped = cuda.open_ipc(handle).unwrap();
    assert_eq!(cuda.open_ipc(handle).unwrap(), mapped);
    let stream = cuda.stream().unwrap();
    let host = cuda.alloc_host(LEN).unwrap();
    cuda.copy(host, mapped, LEN, stream).unwrap();
    cuda.wait_stream(stream).unwrap();
    assert_eq!(cuda.fake.read(host, LEN).unwrap(), [0x21; LEN]);
    assert_eq!(cuda.copy(host, mapped + 1, LEN, stream), Err(1));
    cuda.fill(mapped, 0x22, LEN, stream).unwrap();
    cuda.wait_stream(stream).unwrap();
    assert_eq!(cuda.ipc_handle(mapped), Err(1), "no handle of what was imported");
    assert_eq!(cuda.free(mapped), Err(1));
    assert_eq!(cuda.fake.counter("ipc_mappings"), 1);
    cuda.close_ipc(mapped).unwrap();
    assert_eq!(cuda.fake.counter("ipc_mappings"), 1);
    cuda.close_ipc(mapped).unwrap();
    assert_eq!(cuda.fake.counter("ipc_mappings"), 0);
    assert_eq!(cuda.close_ipc(mapped), Err(1));
}

#[test]
fn an_importer_sees_the_poison_of_freed_memory() {
    const NAME: &str = "an_importer_sees_the_poison_of_freed_memory";
    if let Some((_, argument)) = role() {
        // The exporter frees when its input ends; the answer tells that it has.
        let cuda = ready(&[]);
        let device = cuda.alloc(LEN).unwrap();
        let handle = hex(&cuda.ipc_handle(device).unwrap());
        std::fs::write(format!("{argument}/handle.part"), handle).unwrap();
        std::fs::rename(format!("{argument}/handle.part"), format!("{argument}/handle")).unwrap();
        wait_for(&format!("{argument}/mapped"));
        cuda.free(device).unwrap();
        std::fs::write(format!("{argument}/freed"), "").unwrap();
        wait_for(&format!("{argument}/seen"));
        return;
    }
    let folder = std::env::temp_dir().join(format!("fakecuda-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let at = folder.to_str().unwrap().to_owned();
    let cuda = ready(&[]);
    std::thread::scope(|scope| {
        let exporter = scope.spawn(|| again(NAME, "exporter", &at, &[]));
        wait_for(&format!("{at}/handle"));
        let handle = std::fs::read_to_string(format!("{at}/handle")).unwrap();
        let mapped = cuda.open_ipc(handle_of(&handle)).unwrap();
        assert_eq!(cuda.fake.read(mapped, LEN).unwrap(), [UNWRITTEN; LEN]);
        std::fs::write(format!("{at}/mapped"), "").unwrap();
        wait_for(&format!("{at}/freed"));
        assert_eq!(cuda.fake.read(mapped, LEN).unwrap(), [FREED; LEN]);
        assert_eq!(cuda.open_ipc(handle_of(&handle)), Ok(mapped), "it is open already");
        cuda.close_ipc(mapped).unwrap();
        cuda.close_ipc(mapped).unwrap();
        assert_eq!(cuda.open_ipc(handle_of(&handle)), Err(205));
        std::fs::write(format!("{at}/seen"), "").unwrap();
        succeeds(&exporter.join().unwrap());
    });
    std::fs::remove_dir_all(&folder).unwrap();
}

fn wait_for(path: &str) {
    let begun = std::time::Instant::now();
    while !std::path::Path::new(path).exists() {
        assert!(begun.elapsed().as_secs() < 150, "{path} does not come");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn a_descriptor_carries_virtual_memory_to_another_process() {
    const NAME: &str = "a_descriptor_carries_virtual_memory_to_another_process";
    const SIZE: usize = 2 << 20;
    let map = |cuda: &Driver, handle| {
        let address = cuda.reserve(SIZE).unwrap();
        cuda.map(address, SIZE, handle).unwrap();
        cuda.set_access(address, SIZE, 0).unwrap();
        address
    };
    let cuda = ready(&[]);
    if let Some((_, argument)) = role() {
        let handle = cuda.import(argument.parse().unwrap()).unwrap();
        assert_eq!(cuda.import(0), Err(1), "standard input is no memory");
        let address = map(cuda, handle);
        assert_eq!(cuda.fake.read(address, 4).unwrap(), [9; 4]);
        cuda.fake.write(address, &[8; 4]).unwrap();
        return;
    }
    let handle = cuda.create(SIZE, &EXPORTABLE).unwrap();
    let address = map(cuda, handle);
    cuda.fake.write(address, &[9; SIZE]).unwrap();
    let fd = cuda.export(handle).unwrap();
    // SAFETY: the descriptor is this test's own; its copy is inherited.
    let inherited = unsafe { libc::dup(fd) };
    succeeds(&again(NAME, "importer", &inherited.to_string(), &[]));
    assert_eq!(cuda.fake.read(address, 5).unwrap(), [8, 8, 8, 8, 9]);
}

#[test]
fn visible_devices_are_selected_and_ordered_by_number_and_identity() {
    const NAME: &str = "visible_devices_are_selected_and_ordered_by_number_and_identity";
    if role().is_some() {
        let cuda = driver();
        let init = cuda.init();
        let count = cuda.device_count().unwrap_or(0);
        let last: Vec<u8> = (0..count).map(|d| cuda.uuid(d).unwrap()[15]).collect();
        println!("seen={init:?} {last:?}");
        return;
    }
    let seen = |visible: &str| {
        let settings = [("CUDA_VISIBLE_DEVICES", visible), ("FAKECUDA", "devices=3")];
        printed(&again(NAME, "visible", "", &settings), "seen=")
    };
    assert_eq!(seen("2,0"), "Ok(()) [2, 0]");
    assert_eq!(seen("1,9,0"), "Ok(()) [1]");
    assert_eq!(seen(""), "Err(100) []");
    let cuda = ready(&[]);
    let id = hex(&cuda.uuid(1).unwrap());
    let (a, b, c, d, e) = (&id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]);
    assert_eq!(seen(&format!("GPU-{a}-{b}-{c}-{d}-{e},0")), "Ok(()) [1, 0]");
}

#[test]
fn settings_and_faults_come_from_the_environment() {
    const NAME: &str = "settings_and_faults_come_from_the_environment";
    if role().is_some() {
        let cuda = driver();
        println!("init={:?} {}", cuda.init(), cuda.version());
        return;
    }
    let init = |text: &str| printed(&again(NAME, "env", "", &[("FAKECUDA", text)]), "init=");
    assert_eq!(init("version=13.0"), "Ok(()) 13000");
    assert_eq!(init("driver_mismatch=1"), "Err(803) 12080");
    assert_eq!(init("devices=0"), "Err(100) 12080");
    assert_eq!(init("no_such_fault=1"), "Err(1) 12080");
}
