//! Messages of the directory, and what its machines make of them.

use crate::engines::here;
use kvferry_proto::directory::{
    ContentKey, DirectoryMessage, Follow, Followed, Gone, Limits, NotFollowed, OFFERS_MAX, Offer,
    Offered, Place, Publisher, PublisherAction, Subscriber, SubscriberAction,
};
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::{HandoffId, ID_MAX, PeerId};
use kvferry_proto::message::{ADVERTISED_MAX, DETAIL_MAX};
use kvferry_proto::{Timestamp, WireCode};

const OWN: EngineId = EngineId(1);
const STRANGER: PeerId = PeerId(7);

pub fn message(bytes: &[u8]) {
    match DirectoryMessage::decode(bytes) {
        Ok(message) => {
            check(&message);
            let encoded = message.encode();
            let again = DirectoryMessage::decode(&encoded);
            assert_eq!(again.as_ref(), Ok(&message), "it survives being sent on");
            assert_eq!(again.map(|again| again.encode()), Ok(encoded));
            told_to_a_publisher(&message);
            told_to_a_subscriber(&message);
        }
        Err(error) => assert!(!error.code().is_ok() && !error.to_string().is_empty()),
    }
}

fn check(message: &DirectoryMessage) {
    let id = |id: &HandoffId| assert!((1..=ID_MAX).contains(&id.as_str().len()));
    match message {
        DirectoryMessage::Follow(_) => {}
        DirectoryMessage::Followed(m) => assert!(m.address.len() <= ADVERTISED_MAX),
        DirectoryMessage::NotFollowed(m) => {
            assert!(!m.code.is_ok() && m.detail.len() <= DETAIL_MAX);
        }
        DirectoryMessage::Offered(m) => {
            assert!(m.offers.len() <= OFFERS_MAX);
            m.offers.iter().for_each(|offer| id(&offer.transfer));
        }
        DirectoryMessage::Gone(m) => id(&m.transfer),
        DirectoryMessage::Unknown { kind } => assert!(kind.len() <= 32),
    }
}

/// A publisher answers a request to follow, and nothing else.
fn told_to_a_publisher(message: &DirectoryMessage) {
    let now = Timestamp::default();
    let mut publisher = Publisher::new(OWN, "10.0.0.1:1".into(), Limits::default());
    publisher.publish(ContentKey([1; 32]), &HandoffId::new("a").unwrap(), now).unwrap();
    publisher.receive(STRANGER, here(), message, now);
    let actions: Vec<_> = std::iter::from_fn(|| publisher.poll()).collect();
    assert!(actions.iter().all(|it| matches!(it, PublisherAction::Send { to: STRANGER, .. })));
    let answers = match message {
        DirectoryMessage::Follow(it) if it.engine == OWN => 1,
        DirectoryMessage::Follow(_) => 2,
        _ => 0,
    };
    assert_eq!(actions.len(), answers, "{actions:?}");
    publisher.lost(STRANGER);
    assert_eq!(publisher.followers(), 0);
}

/// A subscriber that follows keeps what is offered for a limited time, and ends nothing.
fn told_to_a_subscriber(message: &DirectoryMessage) {
    let (now, place) = (Timestamp::default(), Place(0));
    let limits = Limits::default();
    let mut subscriber = Subscriber::new(OWN, 1, limits.clone(), now);
    subscriber.expire(now);
    subscriber.opened(place, here(), now);
    let followed =
        Followed { engine: EngineId(2), address: "10.0.0.2:1".into(), lease_ms: u32::MAX, term: 1 };
    subscriber.receive(place, followed.into(), now);
    (0..3).for_each(|_| subscriber.receive(place, message.clone(), now));
    while let Some(action) = subscriber.poll() {
        assert!(!matches!(action, SubscriberAction::Disconnect { .. }), "{action:?}");
    }
    let [(_, heard), (_, following)] = subscriber.gauges();
    match message {
        DirectoryMessage::Offered(offered) => {
            // Each handoff is kept once, and one with no time left is not.
            let kept = offered.offers.iter().rev().filter(|it| it.budget_ms > 0);
            let kept: std::collections::BTreeSet<_> = kept.map(|it| &it.transfer).collect();
            assert!(heard <= kept.len(), "{heard} of {}", kept.len());
            let found = offered.offers.iter().filter_map(|it| subscriber.take(&it.key, now));
            assert_eq!(found.count(), heard, "each is found by its key, once");
        }
        _ => assert_eq!(heard, 0),
    }
    assert_eq!(following, usize::from(!matches!(message, DirectoryMessage::NotFollowed(_))));
    subscriber.expire(now + limits.offer_ttl);
    assert_eq!(subscriber.gauges()[0].1, 0);
}

/// Messages of honest peers, and some of dishonest ones.
pub fn message_seeds() -> Vec<Vec<u8>> {
    let transfer = |text: &str| HandoffId::new(text).unwrap();
    let offer = |key: u8, text: &str, budget_ms| Offer {
        key: ContentKey([key; 32]),
        transfer: transfer(text),
        budget_ms,
    };
    let engine = EngineId(0x1234_5678_9abc_def0);
    let messages: [DirectoryMessage; 10] = [
        Follow { engine }.into(),
        Follow { engine: OWN }.into(),
        Followed { engine, address: "10.0.0.1:7600".into(), lease_ms: 10_000, term: 3 }.into(),
        Followed { engine: OWN, address: String::new(), lease_ms: 0, term: 0 }.into(),
        NotFollowed { code: WireCode::Busy, detail: "too many engines follow this one".into() }
            .into(),
        NotFollowed { code: WireCode::Ok, detail: String::new() }.into(),
        Offered { offers: vec![offer(1, "a", 60_000), offer(1, "b", 0), offer(2, "a", 7)] }.into(),
        Offered { offers: Vec::new() }.into(),
        Gone { transfer: transfer("xfer-42") }.into(),
        DirectoryMessage::Unknown { kind: "later".into() },
    ];
    messages.iter().map(DirectoryMessage::encode).collect()
}
