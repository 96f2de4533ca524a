//! A link without a peer.

use super::*;
use crate::Agent;

/// A peer that is asked for nothing.
#[derive(Default)]
pub(crate) struct NoPeer {
    has_ended: AtomicBool,
}

impl Backend for NoPeer {
    fn open_lane(&self, _: &Arc<Link>) {}

    fn wake(&self, _: &Core) {}

    fn regions(&self, _: &Arc<Link>, _: Duration) -> Result<Vec<RemoteRegion>> {
        Ok(Vec::new())
    }

    fn probe(&self, _: &Arc<Link>, timeout: Duration) -> Result<Duration> {
        Ok(timeout)
    }

    fn ended(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_transfer_that_waits_for_a_lane_fails_after_the_ended_link_has_stopped_all_else() {
    let agent = Agent::builder().start().expect("an agent");
    let (peer, at) = (Arc::new(NoPeer::default()), agent.local_addr());
    let backend = Arc::clone(&peer) as _;
    let link = Link::new(Arc::clone(agent.core()), "peer".into(), at, backend, 1);
    let (tell, told) = std::sync::mpsc::channel();
    let give = move |lane: Result<Arc<Lane>>| {
        let kind = lane.err().map(|e| e.kind());
        tell.send((kind, peer.has_ended.load(Ordering::SeqCst))).expect("the test waits");
    };
    link.acquire(1, now() + Duration::from_secs(60), Box::new(give));
    link.terminate(Error::new(ErrorKind::PeerReset, "a test"));
    assert_eq!(told.try_recv(), Ok((Some(ErrorKind::PeerReset), true)));
    agent.shutdown();
}
