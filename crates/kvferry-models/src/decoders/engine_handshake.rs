//! Messages of engine handshakes, and what two machines make of them.

use crate::engines::{here, introduced, model, own_engine, topology};
use kvferry_proto::engine_handshake::{
    EngineHandshakeAction, EngineHandshakeMessage, EngineHandshakes, Introduce, Introduced, Model,
    Turned,
};
use kvferry_proto::handoff::PeerId;
use kvferry_proto::message::{ADVERTISED_MAX, DETAIL_MAX};
use kvferry_proto::plan::RANKS_MAX;
use kvferry_proto::{Timestamp, WireCode};
use std::collections::BTreeMap;
use std::time::Duration;

const STRANGER: PeerId = PeerId(7);
const TICKET: u64 = 1;
const BUDGET: Duration = Duration::from_secs(30);
const RANKS: u32 = 4;

pub fn message(bytes: &[u8]) {
    match EngineHandshakeMessage::decode(bytes) {
        Ok(message) => {
            check(&message);
            let encoded = message.encode();
            let again = EngineHandshakeMessage::decode(&encoded);
            assert_eq!(again.as_ref(), Ok(&message), "it survives being sent on");
            assert_eq!(again.map(|again| again.encode()), Ok(encoded));
            asked(&message);
            told(&message);
        }
        Err(error) => assert!(!error.code().is_ok() && !error.to_string().is_empty()),
    }
}

fn check(message: &EngineHandshakeMessage) {
    let addresses = |addresses: &[String]| {
        assert!(addresses.len() <= RANKS_MAX);
        assert!(addresses.iter().all(|address| address.len() <= ADVERTISED_MAX));
    };
    match message {
        EngineHandshakeMessage::Introduce(m) => assert!(m.ranks.len() <= RANKS_MAX),
        EngineHandshakeMessage::Introduced(m) => {
            assert!(m.cards.len() <= RANKS_MAX);
            addresses(&m.addresses);
        }
        EngineHandshakeMessage::Turned(m) => {
            assert!(m.detail.len() <= DETAIL_MAX);
            addresses(&m.addresses);
        }
        EngineHandshakeMessage::Unknown { kind } => assert!(kind.len() <= 32),
    }
}

/// A rank that knows its engine answers a question, and nothing else.
fn asked(message: &EngineHandshakeMessage) {
    let mut machine = EngineHandshakes::new(Duration::ZERO, Duration::ZERO);
    machine.know(own_engine(1, 0, topology(RANKS, RANKS), 8));
    machine.receive(STRANGER, here(), message.clone());
    let actions: Vec<_> = std::iter::from_fn(|| machine.poll()).collect();
    let sent = actions.iter().filter(|action| matches!(action, EngineHandshakeAction::Send { .. }));
    let is_question = matches!(message, EngineHandshakeMessage::Introduce(_));
    assert_eq!(sent.count(), usize::from(is_question), "{actions:?}");
    assert!(machine.gauges().iter().all(|(_, count)| *count == 0));
}

/// Checks that a handshake ends once, for any message of the peer, even a repeated one.
fn told(message: &EngineHandshakeMessage) {
    let mut machine = EngineHandshakes::new(Duration::ZERO, Duration::ZERO);
    let now = Timestamp::default();
    machine.know(own_engine(1, 0, topology(1, RANKS), 8));
    machine.meet(TICKET, STRANGER, true, BUDGET, now);
    (0..3).for_each(|_| machine.receive(STRANGER, here(), message.clone()));
    machine.expire(now + BUDGET);
    let (mut ended, mut watched) = (0, 0);
    while let Some(action) = machine.poll() {
        match action {
            EngineHandshakeAction::Met { ticket, result } => {
                assert_eq!(ticket, TICKET);
                ended += 1;
                match result {
                    Ok(pairing) => {
                        let sources = pairing.routing.sources_of(0);
                        assert!(pairing.cards.keys().eq(sources), "the cards that it needs");
                        let ranks = pairing.addresses.len();
                        assert!(sources.iter().all(|rank| *rank < ranks), "each has an address");
                    }
                    Err(failure) => assert!(!failure.code.is_ok()),
                }
            }
            EngineHandshakeAction::Watch { on, .. } => watched += if on { 1 } else { -1 },
            EngineHandshakeAction::Send { to, .. } => assert_eq!(to, STRANGER),
            EngineHandshakeAction::Refused { .. } => {}
        }
    }
    assert_eq!((ended, watched), (1, 0));
    assert!(machine.gauges().iter().all(|(_, count)| *count == 0));
}

/// Messages of honest peers, and some of dishonest ones.
pub fn message_seeds() -> Vec<Vec<u8>> {
    let engine = own_engine(2, 0, topology(RANKS, RANKS), 8);
    let shown = |ranks| introduced(&engine, ranks);
    let ours = topology(1, RANKS).encode();
    let messages: [EngineHandshakeMessage; 9] = [
        Introduce { topology: ours.clone(), model: model("a"), ranks: Vec::new() }.into(),
        Introduce { topology: ours, model: Model::default(), ranks: vec![2, 3, u32::MAX] }.into(),
        Introduce {
            topology: topology(1, 2 * RANKS).encode(),
            model: Model::default(),
            ranks: Vec::new(),
        }
        .into(),
        shown(0..4).into(),
        Introduced { model: model("b"), ..shown(0..2) }.into(),
        Introduced { addresses: Vec::new(), cards: BTreeMap::new(), ..shown(0..1) }.into(),
        Turned {
            code: WireCode::LayoutMismatch,
            detail: "8 heads here, 4 there".into(),
            addresses: engine.addresses.clone(),
        }
        .into(),
        Turned { code: WireCode::Ok, detail: String::new(), addresses: Vec::new() }.into(),
        EngineHandshakeMessage::Unknown { kind: "later".into() },
    ];
    messages.iter().map(EngineHandshakeMessage::encode).collect()
}
