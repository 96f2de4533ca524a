//! Segments: peers by number, as the C API names them.

use crate::codes;
use crate::engine::MooncakeEngine;
use crate::refusal::{Answer, Refusal};
use crate::running::Running;
use kvferry::{Notification, Peer};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The engine's own segment.
pub const LOCAL_SEGMENT: i32 = 0;

/// The most names that are numbered.
const SEGMENTS_MAX: usize = 65_536;

/// Names by number. A number is never given to another name.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    names: Vec<String>,
    numbers: HashMap<String, i32>,
}

impl Segments {
    fn number(&mut self, name: &str) -> Answer<i32> {
        if let Some(number) = self.numbers.get(name) {
            return Ok(*number);
        }
        if self.names.len() >= SEGMENTS_MAX {
            return Err(Refusal::new(codes::TOO_MANY, "too many segments were opened"));
        }
        self.names.push(name.to_owned());
        let number = i32::try_from(self.names.len()).expect("at most SEGMENTS_MAX");
        self.numbers.insert(name.to_owned(), number);
        Ok(number)
    }

    fn name(&self, number: i32) -> Option<&str> {
        let at = usize::try_from(number).ok()?.checked_sub(1)?;
        self.names.get(at).map(String::as_str)
    }
}

impl MooncakeEngine {
    /// The number of a segment, or a negative code. Connects to the peer unless a session is live.
    pub fn open_segment(&self, name: &str) -> i32 {
        let opened = self.running().and_then(|running| {
            // Mooncake ignores slashes around a name.
            let name = name.trim_matches('/');
            if name.is_empty() {
                return Err(Refusal::invalid("the name of a segment is empty"));
            }
            if running.own_names.iter().any(|own| own == name) {
                return Ok(LOCAL_SEGMENT);
            }
            let peer = running.peer(name, &|| false)?;
            running.connect(&peer, &|| false).inspect_err(|why| running.forget(name, why))?;
            running.segments.lock().number(name)
        });
        self.note(opened).unwrap_or_else(|code| code)
    }

    /// Checks that a segment is known. It stays open, as with Mooncake.
    pub fn close_segment(&self, segment: i32) -> i32 {
        self.code(self.running().and_then(|running| running.segment(segment).map(drop)))
    }

    /// Forgets what is known of a peer's address; the next call looks it up again.
    pub fn forget_segment(&self, name: &str) -> i32 {
        self.code(self.running().map(|running| running.forget_name(name)))
    }

    /// Sends a notification to a segment's owner, after all transfers to it that are complete.
    pub fn notify(&self, segment: i32, name: String, message: Vec<u8>) -> i32 {
        self.code(self.running().and_then(|running| {
            let peer = running.segment(segment)?;
            let options = running.options(&kvferry::Batch::new());
            Ok(peer.notify(Notification::new(name, message), &options)?)
        }))
    }

    /// The `host:port` that peers connect to.
    pub fn address(&self) -> Option<String> {
        let address = self.running().map(|running| running.agent.advertised().to_owned());
        self.note(address).ok()
    }
}

impl Running {
    /// The peer that a number stands for.
    pub(crate) fn segment(&self, number: i32) -> Answer<Peer> {
        if number == LOCAL_SEGMENT {
            return Ok(self.agent.peer(&self_address(self.agent.local_addr()).to_string())?);
        }
        let name = self.segments.lock().name(number).map(str::to_owned);
        let unknown = || Refusal::invalid(format_args!("no segment has the number {number}"));
        self.peer(&name.ok_or_else(unknown)?, &|| false)
    }
}

/// The address at which an agent reaches itself.
fn self_address(listening: SocketAddr) -> SocketAddr {
    let ip = match listening.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, listening.port())
}
