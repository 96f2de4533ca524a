//! The machine of tasks with what the driver keeps for it: sessions, reads, and places in memory.

use super::end::Ending;
use super::inbox::Event;
use kvferry::{After, Agent, Batch, Channel, Peer, Region, RemoteRegion, Transfer, Watch};
use kvferry_proto::handoff::PeerId;
use kvferry_proto::tasks::{Copy, Part, RecvId, SendId, Tasks};
use kvferry_proto::{Origin, Timestamp};
use serde_bytes::ByteBuf;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

/// The least time between two checks whether GPUs have computed the bytes to send, and the same as a multiple of the time
/// that a check takes: many sends must not take the thread from its other work.
const COMPUTED_CHECK: Duration = Duration::from_micros(200);
const COMPUTED_REST: u32 = 8;
/// The time between two looks at reads that a device still copies for.
const QUIET_CHECK: Duration = Duration::from_millis(10);

/// Addresses of senders that are remembered.
const PEERS_MAX: usize = 4096;

pub(super) fn now() -> Timestamp {
    Timestamp::from_nanos(kvferry_sys::clock::boottime_ns())
}

/// The place of each part of a receive task, in order; `None` is a part that is not wanted.
pub(crate) type Places = Vec<Option<(Region, u64)>>;

pub(super) struct Receiving {
    pub(super) ending: Ending,
    pub(super) places: Places,
    /// The work that used the places' memory of GPUs before.
    pub(super) after: After,
    pub(super) read: Option<Transfer>,
    /// The program has freed its handle.
    pub(super) freed: bool,
}

struct Session {
    channel: Channel,
    /// The heartbeat, while a task waits for the peer.
    watch: Option<Watch>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) tasks: Tasks,
    sessions: HashMap<PeerId, Session>,
    numbers: HashMap<Channel, PeerId>,
    last: u64,
    /// The receivers that sends are to connect to.
    pub(super) dialing: HashMap<SendId, Peer>,
    /// Sends whose memory a GPU still computes.
    pub(super) computed: HashMap<SendId, After>,
    /// Time of the next check of `computed`.
    computed_due: Option<Timestamp>,
    /// Senders, by the address that they advertise.
    peers: HashMap<String, Peer>,
    pub(super) sends: HashMap<SendId, Ending>,
    pub(super) recvs: HashMap<RecvId, Receiving>,
    /// Reads that have failed while a device still copies for them, and why.
    unquiet: Vec<(RecvId, Transfer, String)>,
    pub(super) closed: bool,
}

impl State {
    pub(super) fn happened(&mut self, event: Event) {
        match event {
            Event::Lost(channel, why) => {
                if let Some(peer) = self.numbers.remove(&channel) {
                    self.sessions.remove(&peer);
                    self.tasks.lost(peer, &why);
                }
            }
            Event::Opened(send, Err(text)) => self.tasks.opened(send, Err(text), now()),
            Event::Opened(send, Ok(channel)) => {
                let opened = match channel.end() {
                    Some(error) => Err(error.to_string()),
                    None => Ok(self.number(&channel)),
                };
                self.tasks.opened(send, opened, now());
            }
            Event::ReadEnded(task, result) => self.tasks.read_ended(task, result, now()),
            Event::ReadGivenUp(task, read, why) => self.unquiet.push((task, read, why)),
            Event::Message(..) | Event::Ended(..) => {}
        }
    }

    pub(super) fn message(&mut self, channel: &Channel, bytes: &[u8]) {
        let from = self.number(channel);
        let origin = Origin::from(channel.peer_ip());
        if let Err(text) = self.tasks.receive(from, origin, bytes, now()) {
            kvferry::warn_limited!(peer = channel.peer_name(), "dropped a {text}");
        }
    }

    fn number(&mut self, channel: &Channel) -> PeerId {
        if let Some(known) = self.numbers.get(channel) {
            return *known;
        }
        self.last += 1;
        let number = PeerId(self.last);
        self.numbers.insert(channel.clone(), number);
        self.sessions.insert(number, Session { channel: channel.clone(), watch: None });
        number
    }

    pub(super) fn channel(&self, peer: PeerId) -> Option<&Channel> {
        self.sessions.get(&peer).map(|session| &session.channel)
    }

    pub(super) fn watch(&mut self, peer: PeerId, on: bool) {
        if let Some(session) = self.sessions.get_mut(&peer) {
            session.watch = on.then(|| session.channel.watch());
        }
    }

    pub(super) fn peer_of(&mut self, agent: &Agent, sender: PeerId) -> Result<Peer, String> {
        let session = self.sessions.get(&sender).ok_or("the sender is gone")?;
        let address = session.channel.peer_address();
        if let Some(peer) = self.peers.get(address) {
            return Ok(peer.clone());
        }
        if address.is_empty() {
            return Err("the sender's agent accepts no connections".to_owned());
        }
        if address.parse::<SocketAddr>().is_err() {
            // Resolving a name may take seconds, under the lock that calls of the program wait for, and
            // the peer chooses the name.
            return Err(format!(
                "the sender advertises the name {address}, not an address; set KVFERRY_ADVERTISE there"
            ));
        }
        if self.peers.len() >= PEERS_MAX {
            self.peers.clear();
        }
        let peer = agent.peer(address).map_err(|error| error.to_string())?;
        self.peers.insert(address.to_owned(), peer.clone());
        Ok(peer)
    }

    /// What a task reads. All of it is the sender's own memory: it can't have this agent read what a third one lends.
    pub(super) fn batch(
        &self,
        task: RecvId,
        from: PeerId,
        regions: &[ByteBuf],
        copies: &[Copy],
    ) -> Result<Batch, String> {
        let receiving = self.recvs.get(&task).ok_or("the task is gone")?;
        let regions: Result<Vec<_>, _> =
            regions.iter().map(|bytes| RemoteRegion::from_bytes(bytes)).collect();
        let regions = regions.map_err(|error| error.to_string())?;
        let sender = self.channel(from).ok_or("the sender is gone")?.incarnation();
        if let Some(foreign) = regions.iter().find(|region| region.incarnation != sender) {
            let owner = foreign.incarnation;
            return Err(format!(
                "the sender {sender} offers memory of another agent, {owner}; a sender offers its own memory"
            ));
        }
        let mut batch = Batch::with_capacity(copies.len());
        for copy in copies {
            let Part(region, offset, len) = copy.from;
            let remote = regions.get(region as usize).ok_or("the offer names no such region")?;
            let place = receiving.places.get(copy.local).and_then(Option::as_ref);
            let (local, at) = place.ok_or("the task has no such part")?;
            let pushed = batch.push(local, *at, remote, offset, len);
            pushed.map_err(|error| error.to_string())?;
        }
        batch.set_after(receiving.after.clone());
        Ok(batch)
    }

    /// Time of the next check of sends whose memory a GPU still computes.
    pub(super) fn next_computed(&self) -> Option<Timestamp> {
        (!self.computed.is_empty()).then(|| self.computed_due.unwrap_or(Timestamp::from_nanos(0)))
    }

    /// When to look again at reads that a device still copies for.
    pub(super) fn next_quiet(&self) -> Option<Timestamp> {
        (!self.unquiet.is_empty()).then(|| now() + QUIET_CHECK)
    }

    /// Ends the failed reads whose copies have ended meanwhile: their memory is not written any more.
    pub(super) fn end_quiet(&mut self) {
        for (task, _, why) in self.unquiet.extract_if(.., |(_, read, _)| read.is_quiet()) {
            self.tasks.read_ended(task, Err(why), now());
        }
    }

    /// Takes the sends whose memory is computed now, or never will be. Checks them only when the next check is due.
    pub(super) fn take_computed(&mut self) -> Vec<(SendId, Result<(), String>)> {
        let began = now();
        if self.next_computed().is_none_or(|due| began < due) {
            return Vec::new();
        }
        let have = |(id, after): (&SendId, &After)| {
            let outcome = kvferry_cuda::Edge::have_happened(after).map_err(|e| e.to_string());
            (outcome != Ok(false)).then_some((*id, outcome.map(drop)))
        };
        let computed: Vec<_> = self.computed.iter().filter_map(have).collect();
        for (id, _) in &computed {
            self.computed.remove(id);
        }
        let took = now().saturating_since(began);
        self.computed_due = Some(began + COMPUTED_CHECK.max(took * COMPUTED_REST));
        computed
    }
}
