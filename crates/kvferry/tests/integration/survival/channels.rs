//! Messages between agents.

use super::*;
use kvferry::{Channel, Error, Incarnation, Message, MessageHandler, Receipt};
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

    fn received(&self, _: &Channel, message: Message<'_>) {
        self.note(Entry::Received(message.to_vec()));
    }

    fn ended(&self, channel: &Channel, error: &Error) {
        assert!(channel.end().is_some());
        self.note(Entry::Ended(error.kind()));
    }
}

fn writer() -> (Agent, Arc<MessageLog>) {
    writer_with(NEVER)
}

fn writer_with(silence: Duration) -> (Agent, Arc<MessageLog>) {
    let agent = agent_with("tcp", silence);
    let log = listens(&agent);
    (agent, log)
}

fn listens(agent: &Agent) -> Arc<MessageLog> {
    let log = Arc::new(MessageLog::default());
    agent
        .set_message_handler(Arc::clone(&log) as Arc<dyn MessageHandler>)
        .expect("the first handler");
    log
}

fn echo() -> (Child, String) {
    let (mut child, address) = Child::with_agent(peer_config());
    child.call(json!({"op": "echo"}));
    (child, address)
}

fn channel_to(agent: &Agent, address: &str) -> Channel {
    let peer = agent.peer(address).expect("an address");
    peer.channel(PATIENCE).expect("it is there")
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
    eventually("all echoes arrived", || log.messages().len() >= all.len());
    assert!(log.messages() == all, "in order, each once");
    assert_eq!(log.entries()[0], Entry::Began(channel.incarnation()));
    assert_eq!(log.end(), None);
}

#[test]
fn a_killed_peer_ends_its_channel_and_a_restarted_peer_gets_a_new_one() {
    let _bound = bounded();
    let (agent, log) = writer();
    let port = KeptPort::new();
    let mut config = peer_config();
    config["listen"] = json!(port.address());
    let (mut child, address) = Child::with_agent(config.clone());
    child.call(json!({"op": "echo"}));
    let channel = channel_to(&agent, &address);
    let _watch = channel.watch();
    child.kill();
    eventually("the end is reported", || log.end().is_some());
    assert_eq!(log.end(), Some(ErrorKind::PeerReset));
    assert_eq!(channel.send(b"too late".to_vec()).expect_err("over").kind(), ErrorKind::PeerReset);
    let (mut child, _) = Child::with_agent(config);
    child.call(json!({"op": "echo"}));
    let again = channel_to(&agent, &address);
    assert_ne!(again.incarnation(), channel.incarnation());
    again.send(b"hello".to_vec()).expect("it is live");
    eventually("the echo arrived", || log.messages() == [b"hello"]);
}

#[test]
fn a_stopped_peer_is_noticed_while_a_watch_is_held() {
    let _bound = bounded();
    let is_noticed = || {
        let (agent, log) = writer_with(SILENCE);
        let (child, address) = echo();
        let peer = agent.peer(&address).expect("an address");
        let mut channel = None;
        eventually("it is there", || {
            channel = peer.channel(PATIENCE).ok();
            channel.is_some()
        });
        child.stop();
        thread::sleep(2 * SILENCE);
        let has_ended = log.end().is_some();
        assert!(!has_ended || agent.stats().slept > 0, "no heartbeat runs without a watch");
        let watch = channel.map(|channel| channel.watch());
        eventually("silence is reported", || log.end() == Some(ErrorKind::PeerSilent));
        drop(watch);
        match has_ended {
            false => Ok(()),
            true => Err("the session has ended without a watch".to_owned()),
        }
    };
    // A session that ends because this process does not run shows nothing.
    in_one_try(is_noticed);
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
    eventually("the end is reported", || log.end() == Some(ErrorKind::Unsupported));
    let second = agent.set_message_handler(log).expect_err("there is one");
    assert_eq!(second.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn messages_to_a_stopped_peer_use_bounded_memory() {
    let _bound = bounded();
    let builder = Agent::builder().peer_memory(1024 * MIB as u64).silence(NEVER);
    let agent = builder.start().expect("an agent");
    let log = listens(&agent);
    let (child, address) = echo();
    let channel = channel_to(&agent, &address);
    child.stop();
    let message = vec![7; Channel::MESSAGE_MAX];
    let sent = (0..100).take_while(|_| channel.send(message.clone()).is_ok()).count();
    assert!((16..40).contains(&sent), "{sent}");
    assert_eq!(channel.send(message).expect_err("full").kind(), ErrorKind::Busy);
    drop(channel);
    child.resume();
    eventually("all echoes arrived", || log.messages().len() == sent);
    assert_eq!(log.end(), None, "the session goes on");
}

/// Takes no message until it is told to.
#[derive(Default)]
struct Late(Mutex<Vec<(Vec<u8>, Receipt)>>);

impl Late {
    fn waiting(&self) -> (usize, usize) {
        let waiting = self.0.lock().expect("no panic");
        (waiting.len(), waiting.iter().map(|(message, _)| message.len()).sum())
    }

    /// Takes what waits.
    fn take(&self) -> Vec<Vec<u8>> {
        let waiting = std::mem::take(&mut *self.0.lock().expect("no panic"));
        waiting.into_iter().map(|(message, _)| message).collect()
    }
}

impl MessageHandler for Late {
    fn began(&self, _: &Channel) {}

    fn received(&self, _: &Channel, message: Message<'_>) {
        self.0.lock().expect("no panic").push(message.take_later());
    }

    fn ended(&self, _: &Channel, _: &Error) {}
}

#[test]
fn a_message_that_finds_no_memory_is_refused_and_the_session_goes_on() {
    let _bound = bounded();
    let budget = 16 * MIB;
    let builder = Agent::builder().peer_memory(budget as u64).silence(NEVER);
    let agent = builder.start().expect("an agent");
    let log = listens(&agent);
    let (child, address) = echo();
    let channel = channel_to(&agent, &address);
    child.stop();
    let message = vec![7; 256 * KIB];
    let sent = (0..).take_while(|_| channel.send(message.clone()).is_ok()).count();
    let busy = channel.send(message.clone()).expect_err("as before");
    assert_eq!(busy.kind(), ErrorKind::Busy, "{busy}");
    assert!(channel.end().is_none() && agent.stats().peer_memory_refused > 0);
    assert!((2..=1 + budget / 5 / message.len()).contains(&sent), "{sent} messages");
    child.resume();
    eventually("the echoes arrive", || log.messages().len() == sent);
    eventually("the memory is released", || agent.stats().peer_memory_bytes == 0);
    channel.send(message).expect("there is room again");
}

#[test]
fn messages_that_are_taken_late_hold_the_sender_back_and_none_is_lost() {
    let _bound = bounded();
    let tcp = Transports::parse("tcp").expect("a name");
    let soon = Duration::from_millis(100);
    let builder = Agent::builder().timeout(soon).silence(NEVER).transports(tcp);
    let writer = builder.start().expect("an agent");
    let (reader, late) = (agent(), Arc::new(Late::default()));
    reader.set_message_handler(Arc::clone(&late) as Arc<dyn MessageHandler>).expect("the first");
    for (len, count) in [(4, 2000), (100_000, 100)] {
        let channel = channel_to(&writer, reader.advertised());
        for number in 0..count as u32 {
            let mut message = number.to_le_bytes().to_vec();
            message.resize(len, 7);
            channel.send(message).expect("there is room");
        }
        eventually("the window is full", || {
            let (messages, bytes) = late.waiting();
            messages == Channel::WINDOW_MESSAGES || bytes >= 1_000_000
        });
        // Longer than the time limit of the sender's requests.
        thread::sleep(4 * soon);
        let (messages, bytes) = late.waiting();
        assert!(messages <= Channel::WINDOW_MESSAGES && bytes <= Channel::WINDOW_BYTES);
        assert!(messages < count && channel.end().is_none(), "{messages}: {:?}", channel.end());
        let mut taken = Vec::new();
        eventually("all arrive", || {
            taken.extend(late.take());
            taken.len() >= count
        });
        let numbers = taken.iter().map(|it| u32::from_le_bytes(it[..4].try_into().expect("four")));
        assert!(numbers.eq(0..count as u32), "in order, each once");
    }
    assert_eq!((writer.stats().sessions_opened, writer.stats().sessions), (1, 1));
}
