//! Messages between agents.

use super::*;
use kvferry::{Channel, Error, Incarnation, MessageHandler};
use std::sync::{Arc, Mutex};

/// A message handler that records its calls.
#[derive(Default)]
struct MessageLog(Mutex<Vec<Entry>>);

#[derive(Clone, Debug, PartialEq)]
enum Entry {
    Began(Incarnation),
    Received(Vec<u8>),
    Ended(ErrorKind),
}

impl MessageLog {
    fn note(&self, entry: Entry) {
        self.0.lock().expect("no panic").push(entry);
    }

    fn entries(&self) -> Vec<Entry> {
        self.0.lock().expect("no panic").clone()
    }

    fn messages(&self) -> Vec<Vec<u8>> {
        let received = |entry| match entry {
            Entry::Received(message) => Some(message),
            _ => None,
        };
        self.entries().into_iter().filter_map(received).collect()
    }

    fn end(&self) -> Option<ErrorKind> {
        self.entries().into_iter().find_map(|entry| match entry {
            Entry::Ended(kind) => Some(kind),
            _ => None,
        })
    }
}

impl MessageHandler for MessageLog {
    fn began(&self, channel: &Channel) {
        self.note(Entry::Began(channel.incarnation()));
    }

    fn received(&self, _: &Channel, message: &[u8]) {
        self.note(Entry::Received(message.to_vec()));
    }

    fn ended(&self, channel: &Channel, error: &Error) {
        assert!(channel.end().is_some());
        self.note(Entry::Ended(error.kind()));
    }
}

fn writer() -> (Agent, Arc<MessageLog>) {
    let (agent, log) = (agent(), Arc::new(MessageLog::default()));
    agent
        .set_message_handler(Arc::clone(&log) as Arc<dyn MessageHandler>)
        .expect("the first handler");
    (agent, log)
}

fn echo() -> (Child, String) {
    let (mut child, address) = Child::with_agent(peer_config());
    child.call(json!({"op": "echo"}));
    (child, address)
}

fn channel_to(agent: &Agent, address: &str) -> Channel {
    let peer = agent.peer(address).expect("an address");
    peer.channel(Duration::from_secs(5)).expect("it is there")
}

#[test]
fn messages_arrive_in_order_and_once_in_both_directions() {
    let _bound = bounded();
    let (agent, log) = writer();
    let (_child, address) = echo();
    let channel = channel_to(&agent, &address);
    // More messages, and more bytes, than a session may have in flight.
    let message = |n: u32| {
        let len = if n.is_multiple_of(500) { 300_000 } else { 4 + n as usize % 50 };
        let mut bytes = n.to_le_bytes().to_vec();
        bytes.resize(len, n as u8);
        bytes
    };
    let all: Vec<_> = (0..5000).map(message).collect();
    for message in &all {
        channel.send(message.clone()).expect("there is room");
    }
    let limit = Duration::from_secs(20);
    eventually(limit, "all echoes arrived", || log.messages().len() >= all.len());
    assert!(log.messages() == all, "in order, each once");
    assert_eq!(log.entries()[0], Entry::Began(channel.incarnation()));
    assert_eq!(log.end(), None);
}

#[test]
fn a_killed_peer_ends_its_channel_and_a_restarted_peer_gets_a_new_one() {
    let _bound = bounded();
    let (agent, log) = writer();
    let (mut child, address) = echo();
    let channel = channel_to(&agent, &address);
    let _watch = channel.watch();
    let began = Instant::now();
    child.kill();
    eventually(NOTICED, "the end is reported", || log.end().is_some());
    assert_within(began, NOTICED, "a death");
    assert_eq!(log.end(), Some(ErrorKind::PeerReset));
    assert_eq!(channel.send(b"too late".to_vec()).expect_err("over").kind(), ErrorKind::PeerReset);
    let mut config = peer_config();
    config["listen"] = json!(address);
    let (mut child, _) = Child::with_agent(config);
    child.call(json!({"op": "echo"}));
    let again = channel_to(&agent, &address);
    assert_ne!(again.incarnation(), channel.incarnation());
    again.send(b"hello".to_vec()).expect("it is live");
    eventually(NOTICED, "the echo arrived", || log.messages() == [b"hello"]);
}

#[test]
fn a_stopped_peer_is_noticed_while_a_watch_is_held() {
    let _bound = bounded();
    let (agent, log) = writer();
    let (child, address) = echo();
    let channel = channel_to(&agent, &address);
    child.stop();
    thread::sleep(2 * SILENCE);
    assert_eq!(log.end(), None, "no heartbeat runs without a watch");
    let watch = channel.watch();
    eventually(3 * SILENCE, "silence is reported", || log.end() == Some(ErrorKind::PeerSilent));
    drop(watch);
    child.resume();
}

#[test]
fn a_long_message_is_refused_and_a_peer_without_a_handler_ends_the_session() {
    let _bound = bounded();
    let (agent, log) = writer();
    let (_child, address) = Child::with_agent(peer_config());
    let channel = channel_to(&agent, &address);
    let long = vec![0; Channel::MESSAGE_MAX + 1];
    assert_eq!(channel.send(long).expect_err("too long").kind(), ErrorKind::TooLarge);
    channel.send(b"hello".to_vec()).expect("the peer has not refused yet");
    eventually(NOTICED, "the end is reported", || log.end() == Some(ErrorKind::Unsupported));
    let second = agent.set_message_handler(log).expect_err("there is one");
    assert_eq!(second.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn messages_to_a_stopped_peer_use_bounded_memory() {
    let _bound = bounded();
    let (agent, log) = writer();
    let (child, address) = echo();
    let channel = channel_to(&agent, &address);
    child.stop();
    let message = vec![7; Channel::MESSAGE_MAX];
    let sent = (0..100).take_while(|_| channel.send(message.clone()).is_ok()).count();
    assert!((16..40).contains(&sent), "{sent}");
    assert_eq!(channel.send(message).expect_err("full").kind(), ErrorKind::Busy);
    drop(channel);
    child.resume();
    let limit = Duration::from_secs(20);
    eventually(limit, "all echoes arrived", || log.messages().len() == sent || log.end().is_some());
}
