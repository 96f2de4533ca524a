//! The ends of a lane without faults, memories or a network between them. Measurements of the
//! protocol's own work run requests on it.

use crate::pair::guards;
use kvferry_proto::lane::{Begin, Initiator, Next, Receive, Target};
use kvferry_proto::{Limits, Op, RegionId, RequestHeader, TransferId, WireCode, WireDescriptor};
use std::hint::black_box;

const PAYLOAD: u32 = 4096;
const WRITE: Begin =
    Begin { op: Op::Write, descriptors: 1, payload_len: PAYLOAD as u64, budget_ms: 1000 };

/// The ends of a lane, between two requests.
#[derive(Debug)]
pub struct LaneEnds {
    initiator: Initiator<()>,
    target: Target,
    head: Vec<u8>,
}

impl LaneEnds {
    /// `keyed`: its frames have keyed tags, else CRCs.
    pub fn new(keyed: bool) -> Self {
        let [near, far] = guards(keyed);
        let limits = Limits::default();
        let mut head = vec![0; RequestHeader::LEN];
        WireDescriptor { offset: 0, len: PAYLOAD, region: RegionId(1) }.write_to(&mut head);
        Self {
            initiator: Initiator::new(TransferId(7), false, limits, near),
            target: Target::new(limits, false, far, Vec::new()),
            head,
        }
    }

    /// A write of one descriptor, without its payload's bytes, and its answer.
    #[inline]
    pub fn request(&mut self) {
        self.initiator.begin(WRITE, std::mem::take(&mut self.head), ());
        let head = self.initiator.transmit().expect("a request").bytes;
        let Next::Receive(into) = self.target.poll().expect("own output") else { panic!() };
        into[..head.len()].copy_from_slice(head);
        let len = head.len();
        self.target.received(len);
        self.head = self.initiator.sent(len + PAYLOAD as usize).expect("all of it");
        assert!(matches!(self.target.poll().expect("own output"), Next::Decide(_)));
        self.target.accept();
        self.target.received(PAYLOAD as usize);
        assert!(matches!(self.target.poll().expect("own output"), Next::Flush));
        self.target.placed();
        self.target.answer(WireCode::Ok);
        let Next::Transmit(answer) = self.target.poll().expect("own output") else { panic!() };
        let Receive::Bytes { into, .. } = self.initiator.receive() else { panic!() };
        into.copy_from_slice(answer.bytes);
        let len = answer.bytes.len();
        self.target.sent(len);
        black_box(self.initiator.received(len).expect("own output").expect("the end"));
    }
}
