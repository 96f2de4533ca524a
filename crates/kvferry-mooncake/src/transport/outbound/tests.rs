use super::super::Mooncake;
use super::super::wire::{Descriptor, STATUS_VERSION};
use super::*;
use kvferry::transport::{
    self, Core, Dialed, Dialer, OnDialed, OnLanes, Service, Start, Startup, Transport,
};
use kvferry::{
    Access, Agent, Batch, Capabilities, ErrorKind, Options, Result, TransportKind, Transports,
};
use kvferry_testkit::{PATIENCE, Watchdog};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{self, Sender};

const LEN: usize = 4096;

/// This transport, but each share halts between its last byte and its notification until its job is stopped. It
/// tells so.
struct Halts(Sender<()>);

impl Transport for Halts {
    fn kind(&self) -> TransportKind {
        TransportKind::new("halts")
    }

    fn capabilities(&self) -> Capabilities {
        Mooncake.capabilities()
    }
}

impl Start for Halts {
    fn is_native(&self) -> bool {
        false
    }

    fn start(&self, cx: &Startup<'_>) -> Result<Arc<dyn Service>> {
        Ok(Arc::new(HaltingService { core: Arc::clone(cx.core), halted: self.0.clone() }))
    }
}

struct HaltingService {
    core: Arc<Core>,
    halted: Sender<()>,
}

impl Service for HaltingService {
    fn dialer(&self) -> Option<&dyn Dialer> {
        Some(self)
    }
}

impl Dialer for HaltingService {
    fn dial(&self, address: &str, addr: SocketAddr, _native_too: bool, dialed: OnDialed) {
        let descriptor = Descriptor {
            protocol: "tcp".into(),
            tcp_data_port: addr.port(),
            tcp_proto_version: STATUS_VERSION,
            ..Descriptor::default()
        };
        let peer = MooncakePeer::new(descriptor, addr, 0, None).expect("it has a port");
        let (core, peer) = (Arc::clone(&self.core), Arc::new(peer));
        let link = Link::new(core, address.to_owned(), addr, Arc::clone(&peer) as _, 1);
        link.add_lanes(OnHaltingPeer { peer, halted: self.halted.clone() });
        dialed(Dialed::Link(link));
    }
}

#[derive(Clone)]
struct OnHaltingPeer {
    peer: Arc<MooncakePeer>,
    halted: Sender<()>,
}

impl OnLanes for OnHaltingPeer {
    type Share = HaltingShare;

    fn transport(&self) -> &'static dyn Transport {
        &Mooncake
    }

    fn share(&self, link: &Arc<Link>, lane: Arc<Lane>, job: &Arc<Job>, wake: Wake) -> HaltingShare {
        let (peer, link, job) = (Arc::clone(&self.peer), Arc::clone(link), Arc::clone(job));
        let share = Share::new(peer, link, lane, job, wake);
        HaltingShare { share, halted: Some(self.halted.clone()) }
    }
}

struct HaltingShare {
    share: Share,
    halted: Option<Sender<()>>,
}

impl Drive for HaltingShare {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.share.fd()
    }

    fn progress(&mut self, now: Timestamp) -> Progress {
        let share = &mut self.share;
        let is_sent = share.out.is_empty() && !share.awaited.is_empty();
        if share.job.is_stopped() || !(is_sent || share.notification.is_some()) {
            return share.progress(now);
        }
        let mut budget = STEP_BYTES;
        while !share.is_clean() {
            if !matches!(share.receive(&mut budget), Step::On) {
                return Progress::Wait(Interest::Read);
            }
        }
        // All bytes are in place at the peer, and the notification has not left.
        assert!(share.notification.is_some());
        if let Some(halted) = self.halted.take() {
            halted.send(()).expect("the test waits");
        }
        Progress::Memory
    }
}

#[test]
fn i1_a_write_that_is_cancelled_between_its_last_byte_and_its_notification_is_cancelled() {
    let _bound = Watchdog::new(PATIENCE);
    let (halted, has_halted) = mpsc::channel();
    let kind = transport::link(Box::leak(Box::new(Halts(halted))));
    let builder = Agent::builder().transports(Transports::only(kind)).silence(PATIENCE);
    let agent = builder.start().expect("an agent");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("bound").to_string();
    let region = agent.allocate_private(LEN, Access::READ).expect("memory");
    let mut batch = Batch::new();
    batch.push_to_address(&region, 0, 0x1000, LEN as u64).expect("inside");
    let notify = Some(Notification::new("layer", "done"));
    let options = Options { timeout: Some(PATIENCE), notify, ..Options::default() };
    let transfer = agent.peer(&at).expect("an address").write_async(&batch, &options);
    let (mut far, _) = listener.accept().expect("a connection");
    far.read_exact(&mut [0; Request::LEN + LEN]).expect("the request and its payload");
    far.write_all(&Status::Done.encode()).expect("room");
    has_halted.recv().expect("the share takes the answer");
    transfer.cancel();
    let outcome = transfer.wait(None).expect("its only share has ended");
    let error = outcome.expect_err("the peer never hears of it");
    assert_eq!((error.kind(), error.quiesced()), (ErrorKind::Cancelled, Some(true)));
    agent.shutdown();
}
