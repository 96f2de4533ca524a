//! A link without a peer.

use super::*;
use crate::Agent;
use crate::transport::local::Local;
use crate::transport::tcp::Tcp;

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

/// A route that takes every batch, or leaves it for this reason.
struct Reaches(&'static dyn Transport, Result<(), Fallback>);

impl Route for Reaches {
    fn transport(&self) -> &'static dyn Transport {
        self.0
    }

    fn run(&self, link: &Arc<Link>, job: &Arc<Job>, _: Interrupt<'_>) -> Offered {
        self.submit(link, job)
    }

    fn submit(&self, _: &Arc<Link>, _: &Arc<Job>) -> Offered {
        self.1.map_or_else(Offered::Elsewhere, |()| Offered::Taken)
    }
}

#[test]
fn each_fallback_is_counted_by_its_reason_and_the_first_of_each_is_logged() {
    let journal = kvferry_testkit::Journal::new("kvferry", tracing::Level::WARN);
    let agent = Agent::builder().start().expect("an agent");
    let core = agent.core();
    let link = || {
        let at = agent.local_addr();
        Link::new(Arc::clone(core), "peer".into(), at, Arc::new(NoPeer::default()), 1)
    };
    let counted = || {
        let stats = agent.stats();
        [stats.fallbacks_peer_device, stats.fallbacks_out_of_reach, stats.fallbacks_unlisted]
    };
    let options = || (Op::Write, Batch::new(), Duration::from_secs(60));
    let offer = |link: &Arc<Link>| {
        let (op, batch, timeout) = options();
        let job = Arc::new(Job::new(Arc::clone(core), op, batch, None, timeout, None));
        let offered = link.offer(|route| route.submit(link, &job));
        job.finish(Err(Error::shutdown()));
        offered
    };
    let kinds = [Fallback::PeerDevice, Fallback::OutOfReach, Fallback::Unlisted];
    for (n, why) in kinds.into_iter().enumerate() {
        let link = link();
        link.add_route(Arc::new(Reaches(&Tcp, Ok(()))));
        assert!(offer(&link).is_ok());
        assert_eq!((counted()[n], link.obstacle()), (0, None), "it took the fastest route");
        link.add_route(Arc::new(Reaches(&Local, Err(why))));
        tracing::subscriber::with_default(journal.clone(), || {
            assert!(offer(&link).is_ok() && offer(&link).is_ok());
        });
        let mut all = [0; 3];
        all[..=n].fill(2);
        assert_eq!(counted(), all, "{why:?}");
        let named = link.obstacle().expect("the reason");
        assert_eq!(named, format!("local has {}; such transfers go over tcp", why.in_words()));
        let lines = journal.take();
        assert!(matches!(&lines[..], [line] if line.contains(&named)), "{lines:?}");
    }
    // Without a slower route, the batch fails with the reason, and nothing fell back.
    let link = link();
    link.add_route(Arc::new(Reaches(&Local, Err(Fallback::PeerDevice))));
    let error = offer(&link).expect_err("no route takes it");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("no path to device memory of the peer"), "{error}");
    assert_eq!((counted(), link.obstacle()), ([2; 3], None));
    agent.shutdown();
}
