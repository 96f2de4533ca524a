//! Kernels and transfers in turns, again and again: with edges no byte is wrong, without them some are.

use crate::kit::*;
use crate::machine::Kernel;
use kvferry::{Access, Batch, TransportKind};
use kvferry_cuda::Edge;
use kvferry_sys::cuda::{DeviceAllocation, Stream};
use kvferry_testkit::Watchdog;

/// Bytes of a round: few, so that a transfer takes about as long as a kernel.
const LEN: usize = 64 << 10;
/// The longest delay of a kernel. A transfer of a round is shorter.
const DELAY_NS: u64 = 300_000;

fn all(gpu: &DeviceAllocation) -> Option<(u64, u64)> {
    Some((gpu.address(), LEN as u64))
}

fn is_all(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|byte| *byte == value)
}

fn after(batch: &mut Batch, stream: &Stream) {
    // SAFETY: the stream exists.
    let edge = unsafe { Edge::after_stream(stream.raw(), 0) }.expect("an edge");
    batch.set_after(Edge::all([edge]));
}

#[test]
fn a_thousand_rounds_over_tcp_have_the_right_bytes() {
    rounds_have_the_right_bytes(TransportKind::TCP);
}

#[test]
fn a_thousand_rounds_over_local_have_the_right_bytes() {
    rounds_have_the_right_bytes(TransportKind::LOCAL);
}

/// A round: a kernel computes, its bytes are written to a peer; a kernel reads what is there, and bytes of the peer are
/// read over it; a kernel checks them.
fn rounds_have_the_right_bytes(kind: TransportKind) {
    let _bound = Watchdog::new(2 * LIMIT);
    let rig = Rig::new(&[]);
    let rounds = rig.rounds();
    let (near, far) = (agent(kind), agent(kind));
    let (gpu, far_gpu) = (rig.memory(0, LEN, 1), rig.memory(1, LEN, 2));
    let (region, far_region) = (register(&near, &gpu), register(&far, &far_gpu));
    let host = far.allocate(LEN, Access::READ_WRITE).expect("memory");
    let peer = peer_of(&near, &far);
    let [compute, other] = [(); 2].map(|()| Stream::new(&rig.context(0)).expect("a stream"));
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 0..rounds {
        let [computed, fetched] = [0, 1].map(|i| (2 * round + i) as u8);
        let to_gpu = round % 3 == 0;
        let remote = if to_gpu { &far_region } else { &host };
        let mut batch = whole(&region, remote, LEN);
        let kernel = Kernel {
            name: "computes",
            writes: all(&gpu),
            fill: computed,
            delay_ns: rng.u64(0..DELAY_NS),
            ..Kernel::default()
        };
        rig.launch(&compute, &kernel);
        after(&mut batch, &compute);
        peer.write(&batch, &options()).expect("written");
        let mut got = vec![0; LEN];
        if to_gpu {
            got = rig.bytes(&far_gpu, 0, LEN);
            rig.write(&far_gpu, 0, &[fetched; LEN]);
        } else {
            host.read_at(0, &mut got).expect("inside");
            host.write_at(0, &[fetched; LEN]).expect("inside");
        }
        assert!(is_all(&got, computed), "{kind}: round {round}: what was written");
        let kernel = Kernel {
            name: "reads last",
            reads: all(&gpu),
            expect: Some(computed),
            delay_ns: rng.u64(0..DELAY_NS),
            ..Kernel::default()
        };
        rig.launch(&other, &kernel);
        after(&mut batch, &other);
        peer.read(&batch, &options()).expect("read");
        let kernel =
            Kernel { name: "checks", reads: all(&gpu), expect: Some(fetched), ..Kernel::default() };
        rig.launch(&compute, &kernel);
        assert_eq!(rig.findings(), Vec::<String>::new(), "{kind}: round {round}");
    }
    compute.synchronize().expect("it has run");
    assert_eq!(rig.findings(), Vec::<String>::new());
    println!("FIGURE: {kind}: {rounds} rounds with edges, no wrong byte");
}

#[test]
fn without_edges_some_rounds_have_wrong_bytes() {
    let _bound = Watchdog::new(2 * LIMIT);
    let rig = Rig::new(&[]);
    let rounds = rig.rounds();
    for kind in [TransportKind::TCP, TransportKind::LOCAL] {
        let (near, far) = (agent(kind), agent(kind));
        let gpu = rig.memory(0, LEN, 1);
        let region = register(&near, &gpu);
        let host = far.allocate(LEN, Access::READ_WRITE).expect("memory");
        let peer = peer_of(&near, &far);
        let compute = Stream::new(&rig.context(0)).expect("a stream");
        let batch = whole(&region, &host, LEN);
        let (mut written, mut read, mut found) = (0, 0, 0);
        let has_seen = |written: usize, read: usize, found: usize| match rig.is_fake() {
            true => found > 0,
            false => written > 0 && read > 0,
        };
        // A thread that stops may make all the first rounds right.
        let most = 100 * rounds;
        let mut round = 0;
        while round < rounds || (round < most && !has_seen(written, read, found)) {
            let [computed, fetched] = [0, 1].map(|i| (2 * round + i) as u8);
            let delay_ns = DELAY_NS;
            let name = "computes";
            let kernel =
                Kernel { name, writes: all(&gpu), fill: computed, delay_ns, ..Kernel::default() };
            rig.launch(&compute, &kernel);
            peer.write(&batch, &options()).expect("written");
            let mut got = vec![0; LEN];
            host.read_at(0, &mut got).expect("inside");
            written += usize::from(!is_all(&got, computed));
            compute.synchronize().expect("it has run");
            host.write_at(0, &[fetched; LEN]).expect("inside");
            let name = "reads last";
            let expect = Some(computed);
            let kernel = Kernel { name, reads: all(&gpu), expect, delay_ns, ..Kernel::default() };
            rig.launch(&compute, &kernel);
            peer.read(&batch, &options()).expect("read");
            compute.synchronize().expect("it has run");
            let findings = rig.findings();
            read += usize::from(findings.iter().any(|it| it.contains("reads last")));
            found += findings.len();
            rig.clear_findings();
            round += 1;
        }
        println!(
            "FIGURE: {kind}: of {round} rounds without edges, {written} sent and {read} overwrote wrong bytes"
        );
        let has_seen = has_seen(written, read, found);
        assert!(has_seen, "{kind}: transfers have waited for kernels that they do not know");
    }
}
