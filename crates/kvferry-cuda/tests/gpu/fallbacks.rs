//! `local` has no path to memory of the peer's GPU: transfers that name it go over tcp, and say so.

use crate::kit::*;
use kvferry::{Access, TransportKind};
use kvferry_testkit::{Journal, Watchdog};
use tracing::Level;

const LEN: usize = 256 << 10;

#[test]
fn transfers_with_memory_of_the_peers_gpu_are_counted_by_the_reason_why_they_are_not_local() {
    let _bound = Watchdog::new(LIMIT);
    let rig = Rig::new(&[]);
    let (near, far) = (agent(TransportKind::LOCAL), agent(TransportKind::LOCAL));
    let (ours, theirs) = (rig.memory(0, LEN, 1), rig.memory(1, LEN, 2));
    let host = |agent: &kvferry::Agent| agent.allocate(LEN, Access::READ_WRITE).expect("memory");
    let near_regions = [host(&near), register(&near, &ours)];
    let far_regions = [host(&far), register(&far, &theirs)];
    let peer = peer_of(&near, &far);
    let summary = || peer.connect(options().timeout).expect("it is connected");
    let journal = Journal::new("kvferry", Level::WARN);
    let _here = tracing::subscriber::set_default(journal.clone());
    let mut count = 0;
    for (is_gpu, to) in [false, true].into_iter().zip(&far_regions) {
        assert_eq!((summary().transport, summary().fallback), (TransportKind::LOCAL, None));
        for from in &near_regions {
            let batch = whole(from, to, LEN);
            let outcomes = [
                peer.write(&batch, &options()),
                peer.read(&batch, &options()),
                peer.write_async(&batch, &options()).wait(LIMIT).expect("it ends"),
                peer.read_async(&batch, &options()).wait(LIMIT).expect("it ends"),
            ];
            for outcome in outcomes {
                let expected = if is_gpu { TransportKind::TCP } else { TransportKind::LOCAL };
                assert_eq!(outcome.expect("it is moved").transport, Some(expected));
                count += u64::from(is_gpu);
            }
            assert_eq!(near.stats().fallbacks_peer_device, count);
        }
    }
    // One range in memory of the peer's GPU takes the whole batch along.
    let mut batch = whole(&near_regions[0], &far_regions[0], LEN / 2);
    let (at, len) = (LEN as u64 / 2, LEN as u64 / 2);
    batch.push(&near_regions[0], at, &far_regions[1].remote(), at, len).expect("inside");
    let mixed = peer.write(&batch, &options()).expect("written");
    assert_eq!(mixed.transport, Some(TransportKind::TCP));

    let named = summary().fallback.expect("the reason");
    assert_eq!(named, "local has no path to device memory of the peer; such transfers go over tcp");
    assert_eq!(summary().transport, TransportKind::LOCAL, "other memory goes over it");
    let lines = journal.take();
    assert!(matches!(&lines[..], [line] if line.contains(&named)), "{lines:?}");
    let (stats, peers) = (near.stats(), far.stats());
    assert_eq!((stats.fallbacks_peer_device, peers.fallbacks_peer_device), (count + 1, 0));
    assert_eq!((stats.fallbacks_out_of_reach, stats.fallbacks_unlisted), (0, 0));
    assert_eq!(rig.findings(), Vec::<String>::new());
}
