//! Messages of tasks, and what a process with one task of each role makes of them.

use crate::engines::here;
use crate::pair::ms;
use kvferry_proto::handoff::PeerId;
use kvferry_proto::tasks::{Action, Code, Gauges, Message, Offered, Part, RecvId, Tasks, Wanted};
use kvferry_proto::{Timestamp, pack};
use std::collections::HashSet;

const STRANGER: PeerId = PeerId(7);
/// The longest key, in bytes.
const KEY_MAX: usize = 1024;
/// Longer than any offer waits.
const LONG_MS: u64 = 24 * 3600 * 1000;

pub fn message(bytes: &[u8]) {
    let message = pack::decode::<Message>(bytes).ok();
    if let Some(message) = &message {
        let again = pack::decode::<Message>(&pack::encode(message)).ok();
        assert_eq!(again.as_ref(), Some(message), "it survives being sent on");
    }
    for from in [PeerId(1), STRANGER] {
        received(from, bytes, message.as_ref());
    }
}

/// A process has a task for the key "k", and has offered a block to the first peer. It takes the message twice.
fn received(from: PeerId, bytes: &[u8], message: Option<&Message>) {
    let mut now = Timestamp::default();
    let mut tasks = Tasks::new();
    let wanted = vec![Wanted { key: 1, lens: vec![8, 0] }];
    let recv = tasks.recv("k", wanted, ms(1000), now).unwrap();
    let blocks = vec![Offered(1, vec![Part(0, 0, 8)])];
    let send = tasks.send("other", vec![], blocks, ms(1000), now).unwrap();
    tasks.opened(send, Ok(PeerId(1)), now);
    let mut ends = Ends::default();
    ends.take(&mut tasks);
    let is_refused = match message {
        None => true,
        Some(Message::Offer { key, .. }) => key.len() > KEY_MAX,
        Some(_) => false,
    };
    for _ in 0..2 {
        assert_eq!(tasks.receive(from, here(), bytes, now).is_err(), is_refused);
        ends.take(&mut tasks);
    }
    assert!(from != STRANGER || ends.sends.is_empty(), "a stranger ends no send");
    if let Some(recv) = ends.reading.take() {
        tasks.read_ended(recv, Ok(()), now);
        ends.take(&mut tasks);
    }
    [from, PeerId(1)].iter().for_each(|peer| tasks.lost(*peer, "reset"));
    now = now + ms(LONG_MS);
    tasks.expire(now);
    assert!(tasks.forget(recv));
    tasks.expire(now);
    ends.take(&mut tasks);
    assert_eq!((ends.sends.len(), ends.recvs.len()), (1, 1), "each ends once");
    assert!(!ends.recvs.contains(&Code::Done), "a task needs the sender's confirmation");
    assert_eq!(tasks.gauges(), Gauges::default());
    assert!(ends.watched.is_empty(), "nothing waits for a peer");
}

/// The ends, reads and watches that the machine reports to its driver.
#[derive(Default)]
struct Ends {
    sends: Vec<Code>,
    recvs: Vec<Code>,
    reading: Option<RecvId>,
    watched: HashSet<PeerId>,
}

impl Ends {
    fn take(&mut self, tasks: &mut Tasks) {
        while let Some(action) = tasks.poll() {
            match action {
                Action::Watch { peer, on: true } => assert!(self.watched.insert(peer)),
                Action::Watch { peer, on: false } => assert!(self.watched.remove(&peer)),
                Action::Read { task, copies, .. } => {
                    assert_eq!((copies.len(), copies[0].local, copies[0].from.2), (1, 0, 8));
                    self.reading = Some(task);
                }
                Action::SendEnded { outcome, .. } => self.sends.push(outcome.code),
                Action::RecvEnded { outcome, .. } => self.recvs.push(outcome.code),
                _ => {}
            }
        }
    }
}

/// Messages of honest peers, and some of dishonest ones.
pub fn message_seeds() -> Vec<Vec<u8>> {
    let offer = |key: &str, blocks: Vec<Offered>| Message::Offer {
        id: 3,
        key: key.to_owned(),
        budget_ms: 30_000,
        regions: vec![vec![1, 2, 3].into()],
        blocks,
    };
    let text = || "the sender gave up".to_owned();
    let messages = [
        offer("k", vec![Offered(1, vec![Part(0, 64, 8)])]),
        offer("k", vec![Offered(1, vec![Part(0, 64, 9)]), Offered(-7, vec![])]),
        offer("unknown", vec![Offered(1, vec![Part(u32::MAX, u64::MAX, u64::MAX)])]),
        Message::Withdraw { id: 3, code: Code::Cancelled.to_wire(), text: text() },
        Message::Confirm { id: 2 },
        Message::Confirmed { id: 3, valid: true },
        Message::Refuse { id: 2, code: Code::Mismatch.to_wire(), text: text() },
        Message::Refuse { id: 2, code: 0, text: String::new() },
        Message::Refuse { id: 2, code: 999, text: String::new() },
    ];
    messages.iter().map(pack::encode).collect()
}
