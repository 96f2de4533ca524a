//! Messages of the handoff protocol.

use kvferry_proto::WireCode;
use kvferry_proto::handoff::{
    Announced, Ask, BLOCKS_MAX, BlockTable, Confirm, Confirmed, Expected, GROUPS_MAX, Generation,
    HandoffId, HandoffMessage, ID_MAX, NULL_BLOCK, Offer, Progress, Ready, SIDE_DATA_MAX, Stop,
};
use kvferry_proto::message::DETAIL_MAX;

pub fn message(bytes: &[u8]) {
    match HandoffMessage::decode(bytes) {
        Ok(message) => {
            check(&message);
            let again = HandoffMessage::decode(&message.encode());
            assert_eq!(again.as_ref(), Ok(&message), "it survives being sent on");
        }
        Err(error) => assert!(!error.code().is_ok() && !error.to_string().is_empty()),
    }
}

fn check(message: &HandoffMessage) {
    let id = |id: &HandoffId| assert!((1..=ID_MAX).contains(&id.as_str().len()));
    match message {
        HandoffMessage::Ask(m) => {
            id(&m.id);
            assert!(m.readers > 0);
        }
        HandoffMessage::Offer(Offer { id: name, announced, .. })
        | HandoffMessage::Ready(Ready { id: name, announced, .. }) => {
            id(name);
            assert!(announced.tables.len() <= GROUPS_MAX && announced.progress.is_sound());
            assert!(announced.tables.iter().all(|table| table.blocks() <= BLOCKS_MAX
                && table.unpack().blocks.len() == table.blocks()));
            assert!(announced.side_data.as_ref().is_none_or(|data| data.len() <= SIDE_DATA_MAX));
        }
        HandoffMessage::Expected(m) => id(&m.id),
        HandoffMessage::Confirm(m) => id(&m.id),
        HandoffMessage::Confirmed(m) => id(&m.id),
        HandoffMessage::Stop(m) => {
            id(&m.id);
            assert!(m.detail.len() <= DETAIL_MAX);
        }
        HandoffMessage::Unknown { kind } => assert!(kind.len() <= 32),
    }
}

/// Messages of honest peers.
pub fn message_seeds() -> Vec<Vec<u8>> {
    let id = || HandoffId::new("xfer-42").unwrap();
    let generation = Generation(7);
    let announced = Announced {
        count: 3,
        tables: vec![
            BlockTable::new(0, vec![5, 6, 7, 1000, NULL_BLOCK, NULL_BLOCK, 3]).into(),
            BlockTable::new(9, Vec::new()).into(),
        ],
        progress: Progress::tokens(48).and(2, 64),
        last: true,
        side_data: Some(vec![1, 2, 3]),
    };
    let ready = Announced { progress: Progress::tokens(64), ..Announced::default() };
    let messages: [HandoffMessage; 8] = [
        Ask { id: id(), readers: 2, budget_ms: 30_000 }.into(),
        Expected { id: id() }.into(),
        Offer { id: id(), generation, announced }.into(),
        Ready { id: id(), generation, announced: ready }.into(),
        Confirm { id: id(), generation }.into(),
        Confirmed { id: id(), generation }.into(),
        Stop {
            id: id(),
            by_consumer: false,
            code: WireCode::Expired,
            detail: "no consumer asked for it in time".into(),
        }
        .into(),
        HandoffMessage::Unknown { kind: "later".into() },
    ];
    messages.iter().map(HandoffMessage::encode).collect()
}
