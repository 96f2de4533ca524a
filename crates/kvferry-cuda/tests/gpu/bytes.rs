//! Every byte arrives, whatever the driver can do.

use crate::hardware::alone;
use crate::kit::*;
use kvferry::{Access, Batch, FileOptions, TransportKind};
use kvferry_cuda::gpu::Settings;
use kvferry_cuda::{Edge, Gpu, Method};
use kvferry_sys::cuda::Stream;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::process::Resources;
use kvferry_testkit::{Watchdog, eventually};

const KINDS: [TransportKind; 2] = [TransportKind::TCP, TransportKind::LOCAL];

#[test]
fn scattered_pieces_go_from_gpu_to_gpu_and_back() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    for kind in KINDS {
        for (count, piece) in [(1, 3), (7, 1), (1000, 64), (300, 4096), (3, 5 << 20)] {
            let len = 2 * count * piece;
            let (near, far) = (agent(kind), agent(kind));
            let peer = peer_of(&near, &far);
            let (ours, theirs) = (rig.memory(0, len, 1), rig.memory(1, len, 2));
            let batch = scattered(&register(&near, &ours), &register(&far, &theirs), count, piece);
            peer.write(&batch, &options()).expect("written");
            let (sent, left) = (Pattern::new(1).bytes(len), Pattern::new(2).bytes(len));
            let got = rig.bytes(&theirs, 0, len);
            for at in (0..count).map(|i| 2 * i * piece) {
                assert!(got[at..at + piece] == sent[at..at + piece], "{kind}: {count} of {piece}");
                assert!(got[at + piece..at + 2 * piece] == left[at + piece..at + 2 * piece]);
            }
            rig.write(&theirs, 0, &left);
            peer.read(&batch, &options()).expect("read");
            let got = rig.bytes(&ours, 0, len);
            for at in (0..count).map(|i| 2 * i * piece) {
                assert!(got[at..at + piece] == left[at..at + piece], "{kind}: {count} of {piece}");
                assert!(got[at + piece..at + 2 * piece] == sent[at + piece..at + 2 * piece]);
            }
        }
    }
    rig.ends_clean();
}

#[test]
fn host_memory_and_memory_of_a_gpu_take_part_in_one_batch() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    for kind in KINDS {
        let (near, far) = (agent(kind), agent(kind));
        let len = 3 << 20;
        let gpu = rig.memory(0, len, 1);
        let (device, host) = (register(&near, &gpu), near.allocate(len, Access::NONE).expect("it"));
        host.write_at(0, &Pattern::new(2).bytes(len)).expect("inside");
        let to = far.allocate(2 * len, Access::WRITE).expect("memory");
        let (mut batch, remote) = (kvferry::Batch::new(), to.remote());
        batch.set_after(kvferry::After::host());
        let part = len / 8;
        for i in 0..8 {
            let at = (i * part) as u64;
            batch.push(&device, at, &remote, 2 * at, part as u64).expect("inside");
            batch.push(&host, at, &remote, 2 * at + part as u64, part as u64).expect("inside");
        }
        peer_of(&near, &far).write(&batch, &options()).expect("written");
        let mut got = vec![0; 2 * len];
        to.read_at(0, &mut got).expect("inside");
        let sent = [1, 2].map(|seed| Pattern::new(seed).bytes(len));
        for (i, got) in got.chunks(part).enumerate() {
            let at = i / 2 * part;
            assert!(got == &sent[i % 2][at..at + part], "{kind}: part {i}");
        }
    }
    rig.ends_clean();
}

#[test]
fn of_two_pairs_that_write_the_same_bytes_of_a_gpu_either_wins_wherever_they_stand_in_the_batch() {
    const LEN: usize = 4096;
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    // In one stage, and with two stages between them.
    for (kind, between) in KINDS.into_iter().flat_map(|kind| [(kind, 0), (kind, 8 << 20)]) {
        let gpu = rig.memory(0, 2 * LEN + between, 1);
        let Pair { near: _near, far: _far, region, to: from, peer } = Pair::new(kind, &gpu);
        let mut source = vec![3; 2 * LEN + between];
        source[..LEN].fill(1);
        source[LEN..2 * LEN].fill(2);
        from.write_at(0, &source).expect("inside");
        let mut batch = kvferry::Batch::new();
        batch.set_after(kvferry::After::host());
        // The second half of the first range is the first half of the last one.
        let ranges = [(0, 0, LEN), (2 * LEN, 2 * LEN, between), (LEN / 2, LEN, LEN)];
        for (at, remote, len) in ranges.into_iter().filter(|(_, _, len)| *len > 0) {
            batch
                .push(&region, at as u64, &from.remote(), remote as u64, len as u64)
                .expect("inside");
        }
        peer.read(&batch, &options()).expect("read");
        let got = rig.bytes(&gpu, 0, 2 * LEN + between);
        let all = |range: std::ops::Range<usize>, wanted: &[u8]| {
            got[range].iter().all(|byte| wanted.contains(byte))
        };
        assert!(all(0..LEN / 2, &[1]), "{kind}: {between}");
        assert!(all(LEN / 2..LEN, &[1, 2]), "{kind}: {between}");
        assert!(all(LEN..LEN + LEN / 2, &[2]), "{kind}: {between}");
        assert!(all(2 * LEN..2 * LEN + between, &[3]), "{kind}: {between}");
        if between == 0 {
            assert_eq!(rig.findings(), Vec::<String>::new());
        }
        // Two stages have no order between them: whichever is copied last wins.
        rig.clear_findings();
    }
    rig.ends_clean();
}

#[test]
fn drivers_of_each_version_copy_the_same_bytes_by_the_calls_that_they_have() {
    let _bound = Watchdog::new(LIMIT);
    if FakeRig::new(&[]).is_none() {
        return;
    }
    // A process loads one version.
    for (version, has_batches) in
        [("11.4", false), ("12.2", false), ("12.8", true), ("13.0", true), ("13.2", true)]
    {
        let output = std::process::Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", "bytes::child_of_a_version", "--ignored", "--nocapture"])
            .env("FAKECUDA", format!("version={version}"))
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{version}: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(text.contains(&format!("batches: {has_batches}")), "{version}: {text}");
    }
}

#[test]
#[ignore = "started by the test of versions"]
fn child_of_a_version() {
    let rig = Rig::new(&[]);
    let (count, piece) = (1000, 512);
    let len = 2 * count * piece;
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let gpu = rig.memory(0, len, 1);
    let to = far.allocate(len, Access::READ_WRITE).expect("memory");
    let batch = scattered(&register(&near, &gpu), &to, count, piece);
    let peer = peer_of(&near, &far);
    peer.write(&batch, &options()).expect("written");
    rig.write(&gpu, 0, &vec![0; len]);
    peer.read(&batch, &options()).expect("read");
    let (got, sent) = (rig.bytes(&gpu, 0, len), Pattern::new(1).bytes(len));
    for at in (0..count).map(|i| 2 * i * piece) {
        assert!(got[at..at + piece] == sent[at..at + piece]);
    }
    let counters = counters();
    println!("batches: {}", counters.batch_calls > 0);
    // 128 pieces a call.
    assert!(counters.batch_calls == 0 || counters.batch_calls + counters.single_calls <= 2 * 8);
    drop((near, far, batch, peer, to));
}

#[test]
fn neighbours_in_one_allocation_are_one_copy_and_two_allocations_are_two() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[("reuse", "0")]);
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let len = 64 << 10;
    let gpu = rig.memory(0, 2 * len, 1);
    let to = far.allocate(2 * len, Access::WRITE).expect("memory");
    let regions = [0, len].map(|at| {
        let half = kvferry_cuda::memory(gpu.address() + at as u64, len as u64, None);
        near.register_device(half.expect("memory of a GPU"), Access::NONE).expect("a region")
    });
    let mut batch = kvferry::Batch::new();
    batch.set_after(kvferry::After::host());
    for (i, region) in regions.iter().enumerate() {
        batch.push(region, 0, &to.remote(), (i * len) as u64, len as u64).expect("inside");
    }
    peer_of(&near, &far).write(&batch, &options()).expect("written");
    let after = counters();
    assert_eq!((after.batches, after.pieces, after.single_calls), (1, 2, 1));
    let mut got = vec![0; 2 * len];
    to.read_at(0, &mut got).expect("inside");
    assert!(got == Pattern::new(1).bytes(2 * len));
}

#[test]
fn connecting_and_closing_again_and_again_leaves_nothing_in_the_driver() {
    alone(|| connect_and_close(50));
}

#[test]
#[ignore = "slow: make test-slow"]
fn connecting_and_closing_a_thousand_times_leaves_nothing_in_the_driver() {
    alone(|| connect_and_close(1000));
}

fn connect_and_close(cycles: usize) {
    const PIECES: usize = 300;
    const PIECE: usize = 64;
    const LEN: usize = 2 * PIECES * PIECE;
    let _bound = Watchdog::new(5 * LIMIT);
    let rig = Rig::new(&[]);
    let method = Some(Method::Gather);
    Settings::give(Some(Settings { method, is_uncalibrated: true, ..Settings::default() }));
    let name = format!("kvferry-gpu-cycles-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let cycle = |i: usize| {
        let (near, far) = (agent(KINDS[i % 2]), agent(KINDS[i % 2]));
        let gpu = rig.memory(0, LEN, 1);
        let to = far.allocate(LEN, Access::READ_WRITE).expect("memory");
        let region = register(&near, &gpu);
        let stream = Stream::new(&rig.context(0)).expect("a stream");
        let after = || {
            // SAFETY: the stream exists.
            Edge::all([unsafe { Edge::after_stream(stream.raw(), 0) }.expect("an edge")])
        };
        let mut batch = scattered(&region, &to, PIECES, PIECE);
        let peer = peer_of(&near, &far);
        batch.set_after(after());
        peer.write(&batch, &options()).expect("written");
        batch.set_after(after());
        peer.read(&batch, &options()).expect("read");
        let options_of_file = FileOptions::create(LEN as u64);
        let file = near.open_file(&path, &options_of_file).expect("a file");
        let mut batch = Batch::new();
        batch.push(&region, 0, &file.remote(), 0, LEN as u64).expect("inside");
        batch.set_after(after());
        near.files().write(&batch, &options()).expect("written");
        batch.set_after(after());
        near.files().read(&batch, &options()).expect("read");
        let counters = counters();
        assert!(counters.gather_calls >= 2 && counters.edges >= 4, "{counters:?}");
    };
    // The first cycles start threads that stay.
    (0..4).for_each(cycle);
    eventually("no GPU is in use", || Gpu::all().is_empty());
    let before = Resources::of(std::process::id());
    (0..cycles).for_each(cycle);
    Settings::give(None);
    let _ = std::fs::remove_file(&path);
    rig.ends_clean();
    // A real driver may keep more of both.
    let is_fake = rig.is_fake();
    eventually("threads and descriptors are as before", || {
        let now = Resources::of(std::process::id());
        !is_fake || now.threads <= before.threads && now.descriptors <= before.descriptors
    });
}

#[test]
fn an_idle_agent_with_memory_of_a_gpu_calls_no_driver() {
    let _bound = Watchdog::new(LIMIT);
    let Some(rig) = FakeRig::new(&[]) else { return };
    let (near, far) = (agent(TransportKind::TCP), agent(TransportKind::TCP));
    let gpu = rig.memory(0, 8192, 1);
    let to = far.allocate(8192, Access::WRITE).expect("memory");
    let batch = scattered(&register(&near, &gpu), &to, 4, 1024);
    peer_of(&near, &far).write(&batch, &options()).expect("written");
    assert!(!rig.calls().is_empty());
    rig.becomes_idle(std::time::Duration::from_secs(2));
}
