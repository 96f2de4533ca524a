//! Sender and receiver in one thread, without a clock or memory to transfer.

use kvferry_proto::handoff::PeerId;
use kvferry_proto::tasks::{
    Action, Code, Gauges, Message, Offered, Outcome, Part, RecvId, SendId, Tasks, Wanted,
};
use kvferry_proto::{Origin, Timestamp, pack};
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(10);
const PEER: PeerId = PeerId(7);

fn at(host: &str) -> Origin {
    Origin::from(host.parse::<IpAddr>().expect("an address"))
}

fn here() -> Origin {
    at("127.0.0.1")
}

/// A sender and a receiver, and what the driver of each did.
#[derive(Default)]
struct Pair {
    now: Timestamp,
    sender: Tasks,
    receiver: Tasks,
    /// Offers and messages are kept back.
    held: bool,
    reading: Vec<RecvId>,
    stopped: Vec<RecvId>,
    /// The sides whose heartbeat to the other one runs; true is the sender.
    watching: HashSet<bool>,
    sent: HashMap<SendId, Outcome>,
    received: HashMap<RecvId, Outcome>,
}

impl Pair {
    fn send(&mut self, key: &str, blocks: &[(i64, &[u64])]) -> SendId {
        let part = |len: &u64| Part(0, 0, *len);
        let blocks =
            blocks.iter().map(|(key, lens)| Offered(*key, lens.iter().map(part).collect()));
        let sent = self.sender.send(key, vec![], blocks.collect(), LONG, self.now);
        sent.expect("the arguments are valid")
    }

    fn recv(&mut self, key: &str, blocks: &[(i64, &[u64])]) -> RecvId {
        let wanted = blocks.iter().map(|(key, lens)| Wanted { key: *key, lens: lens.to_vec() });
        self.receiver.recv(key, wanted.collect(), LONG, self.now).expect("the key is free")
    }

    /// Carries out all actions of both sides, except that reads do not end.
    fn settle(&mut self) {
        loop {
            let action = self.sender.poll();
            let ours = action.is_some();
            let Some(action) = action.or_else(|| self.receiver.poll()) else { return };
            match action {
                Action::Connect { send } => self.sender.opened(send, Ok(PEER), self.now),
                Action::Offer { .. } | Action::Message { .. } if self.held => {}
                Action::Offer { bytes, .. } | Action::Message { bytes, .. } => {
                    let to = if ours { &mut self.receiver } else { &mut self.sender };
                    to.receive(PEER, here(), &bytes, self.now).expect("own output");
                }
                Action::Read { task, .. } => self.reading.push(task),
                Action::StopRead { task } => self.stopped.push(task),
                Action::Watch { on: true, .. } => assert!(self.watching.insert(ours), "once"),
                Action::Watch { on: false, .. } => assert!(self.watching.remove(&ours), "once"),
                Action::SendEnded { id, outcome } => {
                    assert_eq!(self.sent.insert(id, outcome), None, "a send ends once");
                }
                Action::RecvEnded { id, outcome } => {
                    assert_eq!(self.received.insert(id, outcome), None, "a task ends once");
                }
            }
        }
    }

    fn read_ends(&mut self, task: RecvId, result: Result<(), String>) {
        self.receiver.read_ended(task, result, self.now);
        self.settle();
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.sender.expire(self.now);
        self.receiver.expire(self.now);
        self.settle();
    }

    fn sent(&self, id: SendId) -> Option<Code> {
        self.sent.get(&id).map(|outcome| outcome.code)
    }

    fn got(&self, id: RecvId) -> Option<Code> {
        self.received.get(&id).map(|outcome| outcome.code)
    }

    /// Everything is forgotten, and nothing is left.
    fn end(mut self) {
        for id in self.received.keys() {
            assert!(self.receiver.forget(*id));
        }
        self.pass(LONG * 2);
        assert_eq!((self.sender.gauges(), self.receiver.gauges()), Default::default());
        assert!(self.watching.is_empty(), "nothing waits for a peer");
        assert_eq!((self.sender.next_timeout(), self.receiver.next_timeout()), (None, None));
    }
}

const BLOCK: &[(i64, &[u64])] = &[(1, &[64, 32])];

/// A pair whose receiver is reading.
fn reading() -> (Pair, SendId, RecvId) {
    let mut pair = Pair::default();
    let recv = pair.recv("k", BLOCK);
    let send = pair.send("k", BLOCK);
    pair.settle();
    assert_eq!(pair.reading, [recv]);
    (pair, send, recv)
}

// V2, S3
#[test]
fn both_orders_of_arrival_end_well() {
    for sender_first in [true, false] {
        let mut pair = Pair::default();
        let early = sender_first.then(|| pair.send("k", BLOCK));
        pair.settle();
        assert_eq!(pair.receiver.gauges().parked, usize::from(sender_first));
        let recv = pair.recv("k", BLOCK);
        let send = early.unwrap_or_else(|| pair.send("k", BLOCK));
        pair.settle();
        assert_eq!((pair.sent(send), pair.got(recv)), (None, None), "the bytes are not there yet");
        pair.read_ends(recv, Ok(()));
        assert_eq!((pair.sent(send), pair.got(recv)), (Some(Code::Done), Some(Code::Done)));
        pair.end();
    }
}

// V1
#[test]
fn a_second_task_of_a_key_is_refused_and_the_first_one_stays() {
    let (mut pair, _, recv) = reading();
    let again = pair.receiver.recv("k", vec![], LONG, pair.now);
    assert_eq!(again.map_err(|refused| refused.code), Err(Code::Duplicate));
    pair.read_ends(recv, Ok(()));
    assert_eq!(pair.got(recv), Some(Code::Done));
    pair.end();
}

// V16, with exclusive grants: the second sender is refused
#[test]
fn a_second_sender_of_a_key_is_refused_while_the_first_one_is_waiting_read_or_done() {
    let (mut pair, first, recv) = reading();
    let second = pair.send("k", BLOCK);
    pair.settle();
    assert_eq!(pair.sent(second), Some(Code::Duplicate));
    pair.read_ends(recv, Ok(()));
    let third = pair.send("k", BLOCK);
    pair.settle();
    assert_eq!((pair.sent(first), pair.sent(third)), (Some(Code::Done), Some(Code::Duplicate)));
    let (early, late) = (pair.send("other", BLOCK), pair.send("other", BLOCK));
    pair.settle();
    assert_eq!((pair.sent(early), pair.sent(late)), (None, Some(Code::Duplicate)));
    pair.end();
}

// V5
#[test]
fn cancelling_a_task_without_a_sender_ends_it_at_once_and_a_later_sender_is_refused() {
    let mut pair = Pair::default();
    let recv = pair.recv("k", BLOCK);
    pair.receiver.cancel_recv(recv);
    pair.settle();
    assert_eq!(pair.got(recv), Some(Code::Cancelled));
    let send = pair.send("k", BLOCK);
    pair.settle();
    assert_eq!(pair.sent(send), Some(Code::Cancelled));
    pair.end();
}

#[test]
fn a_task_that_was_given_up_refuses_senders_until_its_time_has_passed_or_its_key_has_another_task()
{
    let mut pair = Pair::default();
    let given_up = |pair: &mut Pair| {
        let recv = pair.recv("k", BLOCK);
        assert!(pair.receiver.forget(recv));
        pair.settle();
    };
    given_up(&mut pair);
    let late = pair.send("k", BLOCK);
    pair.settle();
    assert_eq!((pair.sent(late), pair.receiver.gauges().taken), (Some(Code::Cancelled), 1));
    let recv = pair.recv("k", BLOCK);
    let send = pair.send("k", BLOCK);
    pair.settle();
    pair.read_ends(recv, Ok(()));
    assert_eq!((pair.sent(send), pair.got(recv)), (Some(Code::Done), Some(Code::Done)));
    assert!(pair.receiver.forget(recv));
    given_up(&mut pair);
    pair.pass(LONG);
    let later = pair.send("k", BLOCK);
    pair.settle();
    assert_eq!((pair.sent(later), pair.receiver.gauges().parked), (None, 1));
    pair.end();
}

// V6, V13
#[test]
fn cancelling_a_task_that_is_read_ends_it_when_the_read_has_stopped_also_if_the_read_was_faster() {
    for result in [Ok(()), Err("stopped".to_owned())] {
        let (mut pair, send, recv) = reading();
        pair.receiver.cancel_recv(recv);
        pair.receiver.cancel_recv(recv);
        pair.settle();
        assert_eq!((pair.stopped.len(), pair.got(recv)), (1, None), "the memory is not quiet");
        assert!(!pair.receiver.forget(recv));
        pair.read_ends(recv, result);
        assert_eq!(
            (pair.sent(send), pair.got(recv)),
            (Some(Code::Cancelled), Some(Code::Cancelled))
        );
        pair.end();
    }
}

// V7, S12
#[test]
fn a_deadline_beats_success_failure_and_cancellation_but_never_changes_an_end() {
    for (cancels, result) in [(true, Ok(())), (false, Ok(())), (false, Err("failed".to_owned()))] {
        let (mut pair, send, recv) = reading();
        if cancels {
            pair.receiver.cancel_recv(recv);
        }
        pair.held = true;
        pair.pass(LONG);
        assert_eq!((pair.sent(send), pair.got(recv)), (Some(Code::Timeout), None));
        pair.read_ends(recv, result);
        assert_eq!(pair.got(recv), Some(Code::Timeout));
        pair.end();
    }
    let (mut pair, _, recv) = reading();
    pair.read_ends(recv, Ok(()));
    pair.pass(LONG);
    pair.receiver.cancel_recv(recv);
    pair.settle();
    assert_eq!(pair.got(recv), Some(Code::Done));
    pair.end();
}

// V3
#[test]
fn without_the_other_side_both_time_out_and_say_the_key() {
    let mut pair = Pair::default();
    let (send, recv) = (pair.send("a", BLOCK), pair.recv("b", BLOCK));
    pair.settle();
    pair.pass(LONG);
    assert_eq!((pair.sent(send), pair.got(recv)), (Some(Code::Timeout), Some(Code::Timeout)));
    assert!(pair.sent[&send].text.contains('a') && pair.received[&recv].text.contains('b'));
    pair.end();
}

// S4, S5, S6, S7, V14
#[test]
fn the_receivers_list_decides_and_a_mismatch_names_the_block() {
    type Blocks = &'static [(i64, &'static [u64])];
    let cases: [(Blocks, Blocks, Option<&str>); 6] = [
        (&[(1, &[64]), (2, &[8])], &[(1, &[64])], None),
        (&[(1, &[64, 8])], &[(1, &[0, 8])], None),
        (&[(1, &[64])], &[(1, &[64]), (5, &[64])], Some("lacks block 5")),
        (&[(1, &[64])], &[(1, &[64, 64])], Some("lacks part 1 of block 1")),
        (&[(1, &[64])], &[(1, &[65])], Some("64 bytes at the sender and 65")),
        (&[(1, &[64])], &[(1, &[0])], Some("no bytes")),
    ];
    for (theirs, ours, mismatch) in cases {
        let mut pair = Pair::default();
        let (recv, send) = (pair.recv("k", ours), pair.send("k", theirs));
        pair.settle();
        match mismatch {
            None => {
                pair.read_ends(recv, Ok(()));
                assert_eq!(pair.got(recv), Some(Code::Done));
            }
            Some(text) => {
                assert_eq!(pair.got(recv), Some(Code::Mismatch));
                assert_eq!(pair.sent[&send], pair.received[&recv], "both ends say the same");
                assert!(pair.sent[&send].text.contains(text), "{:?}", pair.sent[&send]);
            }
        }
        pair.end();
    }
}

// V4, V1
#[test]
fn after_a_steal_no_sender_finds_the_task_and_the_key_is_free() {
    let mut pair = Pair::default();
    let old = pair.recv("k", BLOCK);
    pair.receiver.steal("k");
    pair.receiver.steal("k");
    let late = pair.send("k", BLOCK);
    pair.settle();
    assert_eq!((pair.got(old), pair.sent(late)), (Some(Code::Cancelled), Some(Code::Cancelled)));
    let (recv, send) = (pair.recv("k", BLOCK), pair.send("k", BLOCK));
    pair.settle();
    pair.read_ends(recv, Ok(()));
    assert_eq!((pair.got(recv), pair.sent(send)), (Some(Code::Done), Some(Code::Done)));
    pair.end();
}

#[test]
fn a_task_that_is_stolen_while_it_is_read_ends_as_the_read_does() {
    let (mut pair, send, recv) = reading();
    pair.receiver.steal("k");
    pair.read_ends(recv, Ok(()));
    assert_eq!((pair.got(recv), pair.sent(send)), (Some(Code::Done), Some(Code::Done)));
    pair.end();
}

// V12
#[test]
fn bytes_that_were_read_after_the_sender_gave_up_are_not_used() {
    let (mut pair, send, recv) = reading();
    pair.held = true;
    pair.sender.cancel_send(send);
    pair.settle();
    // The withdrawal is on its way.
    pair.held = false;
    pair.read_ends(recv, Ok(()));
    assert_eq!((pair.sent(send), pair.got(recv)), (Some(Code::Cancelled), Some(Code::Cancelled)));
    pair.end();
}

#[test]
fn a_sender_that_gives_up_stops_the_read_or_its_waiting_offer() {
    let (mut pair, send, recv) = reading();
    pair.sender.cancel_send(send);
    pair.settle();
    assert_eq!((pair.stopped.len(), pair.got(recv)), (1, None));
    pair.read_ends(recv, Err("stopped".to_owned()));
    assert_eq!(pair.got(recv), Some(Code::Cancelled));
    let waiting = pair.send("other", BLOCK);
    pair.settle();
    pair.sender.cancel_send(waiting);
    pair.settle();
    assert_eq!(pair.receiver.gauges().parked, 0);
    pair.end();
}

#[test]
fn a_peer_that_dies_ends_everything_that_needs_it_and_nothing_while_memory_is_written() {
    let (mut pair, send, recv) = reading();
    let confirming = pair.recv("confirming", BLOCK);
    let asked = pair.send("confirming", BLOCK);
    pair.send("parked", BLOCK);
    pair.settle();
    pair.held = true;
    pair.read_ends(confirming, Ok(()));
    pair.sender.lost(PEER, "reset");
    pair.receiver.lost(PEER, "reset");
    pair.settle();
    assert_eq!((pair.sent(send), pair.sent(asked)), (Some(Code::PeerLost), Some(Code::PeerLost)));
    assert_eq!((pair.got(confirming), pair.got(recv)), (Some(Code::PeerLost), None));
    pair.read_ends(recv, Err("reset".to_owned()));
    assert_eq!(pair.got(recv), Some(Code::PeerLost));
    assert_eq!(pair.receiver.gauges().parked, 0);
    pair.end();
}

// S14
#[test]
fn a_read_that_fails_fails_both_ends_with_its_reason() {
    let (mut pair, send, recv) = reading();
    pair.read_ends(recv, Err("checksum".to_owned()));
    assert_eq!(pair.received[&recv], Outcome::new(Code::ReadFailed, "checksum"));
    assert_eq!(pair.sent[&send], pair.received[&recv]);
    pair.end();
}

// S15, S16, V8
#[test]
fn a_send_without_bytes_key_or_receiver_fails() {
    let mut pair = Pair::default();
    let now = pair.now;
    let empty = pair.sender.send("k", vec![], vec![Offered(1, vec![])], LONG, now);
    assert_eq!(empty.map_err(|refused| refused.code), Err(Code::Invalid));
    let nameless = pair.receiver.recv("", vec![], LONG, now);
    assert_eq!(nameless.map_err(|refused| refused.code), Err(Code::Invalid));
    let send = pair.send("k", BLOCK);
    assert!(matches!(pair.sender.poll(), Some(Action::Connect { .. })));
    pair.sender.opened(send, Err("refused".to_owned()), now);
    pair.settle();
    assert_eq!(pair.sent(send), Some(Code::Unreachable));
    pair.end();
}

#[test]
fn a_send_of_what_is_never_computed_ends_without_blaming_its_receiver() {
    let mut pair = Pair::default();
    let send = pair.send("k", BLOCK);
    assert!(matches!(pair.sender.poll(), Some(Action::Connect { .. })));
    pair.sender.not_computed(send, "an illegal address");
    pair.settle();
    assert_eq!(pair.sent(send), Some(Code::NotComputed));
    pair.end();
}

#[test]
fn an_offer_too_long_for_a_message_is_refused_with_a_reason() {
    let mut pair = Pair::default();
    let blocks: Vec<(i64, &[u64])> = (0..200_000).map(|key| (key, &[64][..])).collect();
    let send = pair.send("k", &blocks);
    pair.settle();
    assert_eq!(pair.sent(send), Some(Code::TooLarge));
    pair.end();
}

/// An offer as it is on the wire.
fn offer(id: u64, key: &str, budget_ms: u64, blocks: Vec<Offered>) -> Vec<u8> {
    let regions = vec![vec![0; 500_000].into()];
    pack::encode(&Message::Offer { id, key: key.to_owned(), budget_ms, regions, blocks })
}

/// Offers until an offer of this peer is refused as busy; returns how many were not.
fn park(tasks: &mut Tasks, peer: PeerId, origin: Origin, blocks: &[Offered]) -> usize {
    for number in 0.. {
        let key = format!("{peer:?} {number}");
        let bytes = offer(number as u64, &key, 1000, blocks.to_vec());
        tasks.receive(peer, origin, &bytes, Timestamp::default()).expect("an offer");
        let said = |action| match action {
            Action::Message { to, bytes } => Some((to, pack::decode(&bytes).expect("own output"))),
            Action::Watch { .. } => None,
            other => unreachable!("{other:?}"),
        };
        let said: Vec<(PeerId, Message)> =
            std::iter::from_fn(|| tasks.poll()).filter_map(said).collect();
        let busy = Code::Busy.to_wire();
        let is_busy = |(_, it): &_| matches!(it, Message::Refuse { code, .. } if *code == busy);
        assert!(said.iter().all(is_busy), "{said:?}");
        if said.iter().any(|(to, _)| *to == peer) {
            return number;
        }
    }
    unreachable!("the loop has no end")
}

#[test]
fn a_host_gets_all_the_room_for_waiting_offers_and_leaves_a_later_host_half_of_it() {
    let mut tasks = Tasks::new();
    let all = 256 * 1024 * 1024 / 500_200;
    let near = |parked: usize, share: usize| (share - 2..=share + 2).contains(&parked);
    let parked = park(&mut tasks, PeerId(1), at("10.0.0.1"), &[]);
    assert!(near(parked, all), "{parked} of {all}");
    // Its other connections get no more of it.
    for peer in 2..20 {
        park(&mut tasks, PeerId(peer), at("10.0.0.1"), &[]);
    }
    let parked = park(&mut tasks, PeerId(20), at("10.0.1.1"), &[]);
    assert!(near(parked, all / 2), "{parked} of {all}");
    (1..21).for_each(|peer| tasks.lost(PeerId(peer), "reset"));
    assert_eq!(tasks.gauges(), Gauges::default());
    assert!(park(&mut tasks, PeerId(21), at("10.0.0.1"), &[]) > 500, "the room is free again");
}

#[test]
fn waiting_offers_are_counted_by_the_memory_that_they_take() {
    let mut tasks = Tasks::new();
    // 3 bytes each in a message, 32 in memory.
    let blocks: Vec<_> = (0..100).cycle().take(100_000).map(|key| Offered(key, vec![])).collect();
    let parked = park(&mut tasks, PeerId(1), here(), &blocks);
    assert!((66..=72).contains(&parked), "{parked} of 3.7 MB are not 256 MiB");
}

#[test]
fn an_offer_waits_for_an_hour_at_most_whatever_its_sender_says() {
    let mut tasks = Tasks::new();
    let mut now = Timestamp::default();
    let bytes = offer(1, "k", u64::MAX, vec![Offered(1, vec![Part(0, 0, 8)])]);
    tasks.receive(PEER, here(), &bytes, now).expect("an offer");
    assert_eq!(tasks.next_timeout(), Some(now + Duration::from_secs(3600)));
    now = now + Duration::from_secs(3600);
    tasks.expire(now);
    assert_eq!(tasks.gauges(), Gauges::default());
}

// V17
/// The sender withdraws the only send of the pair.
fn withdraw(pair: &mut Pair, send: SendId, code: Code, text: &str) {
    let message = Message::Withdraw { id: send.0, code: code.to_wire(), text: text.to_owned() };
    let bytes = pack::encode(&message);
    pair.receiver.receive(PEER, here(), &bytes, pair.now).expect("well formed");
    pair.settle();
}

#[test]
fn a_task_that_its_sender_gave_up_leaves_its_key_to_another_sender() {
    for code in [Code::Cancelled, Code::Done, Code::Timeout] {
        let (mut pair, send, recv) = reading();
        withdraw(&mut pair, send, code, "");
        pair.read_ends(recv, Err("stopped".to_owned()));
        assert!(pair.receiver.forget(recv));
        let other = pair.send("k", BLOCK);
        pair.settle();
        assert_eq!((pair.sent(other), pair.receiver.gauges().parked), (None, 1), "{code:?}");
    }
}

#[test]
fn a_sender_that_gives_up_does_not_change_that_the_receiver_cancelled() {
    let (mut pair, send, recv) = reading();
    pair.receiver.cancel_recv(recv);
    withdraw(&mut pair, send, Code::Timeout, "");
    pair.read_ends(recv, Ok(()));
    assert_eq!(pair.got(recv), Some(Code::Cancelled));
    assert!(pair.receiver.forget(recv));
    assert_eq!(pair.receiver.gauges().taken, 1, "the receiver gave the key up");
}

#[test]
fn a_peers_text_is_cut_before_it_reaches_programs_logs_and_other_peers() {
    let text = "\x1b[2J".repeat(1 << 18);
    let (mut pair, send, recv) = reading();
    withdraw(&mut pair, send, Code::Other(300), &text);
    pair.read_ends(recv, Ok(()));
    let kept = &pair.received[&recv].text;
    assert!(kept.len() < 1024 && !kept.contains('\x1b'), "{kept}");
    let other = offer(99, "k", 1000, vec![]);
    pair.receiver.receive(PeerId(8), at("10.0.0.8"), &other, pair.now).expect("well formed");
    let Some(Action::Message { to: PeerId(8), bytes }) = pair.receiver.poll() else {
        panic!("the other sender is refused")
    };
    assert!(bytes.len() < 1024, "{} bytes", bytes.len());
    let unknown = pack::encode(&HashMap::from([(text, 0)]));
    let error = pair.receiver.receive(PEER, here(), &unknown, pair.now).expect_err("malformed");
    assert!(error.len() < 1024 && !error.contains('\x1b'), "{error}");
}

#[test]
fn every_code_survives_the_wire_also_one_of_a_later_version() {
    for number in 0..300 {
        assert_eq!(Code::from_wire(number).to_wire(), number);
    }
    assert_eq!(Code::from_wire(299), Code::Other(299));
}

#[test]
fn malformed_messages_are_errors() {
    let mut tasks = Tasks::new();
    for bytes in [&b""[..], b"\xc1", b"\x80", b"\x81\xa5Offer\x80"] {
        assert!(tasks.receive(PEER, here(), bytes, Timestamp::default()).is_err());
    }
    assert_eq!(tasks.gauges(), Gauges::default());
}
