//! The handshake of a session: four messages, each valid in exactly one state.

use super::{ChecksumPolicy, KEYED_VERSION, PeerInfo, Session, Side, State};
use crate::auth::{HandshakeKeys, control_seals, macs_equal};
use crate::code::WireCode;
use crate::frame::MAGIC;
use crate::id::{Incarnation, SessionId};
use crate::keyed::Seals;
use crate::message::{
    ADVERTISED_MAX, CONTROL_MAX, Challenge, FINGERPRINT_MAX, Hello, Message, NAME_MAX, Proof,
    Ready, encode,
};
use crate::text::{sanitized, truncated};

/// The message that is awaited, and what is known so far.
#[derive(Debug)]
pub(super) enum Awaiting {
    /// Initiator, after `Hello`.
    Challenge { hello: Vec<u8>, expected: Option<Incarnation> },
    /// Initiator, after `Proof`.
    Ready { keys: HandshakeKeys, challenge: Challenge, proof: Vec<u8> },
    /// Acceptor, from the start.
    Hello { session: SessionId },
    /// Acceptor, after `Challenge`.
    Proof { session: SessionId, keys: HandshakeKeys, hello: Hello, version: u16 },
}

/// Reason for a failed handshake.
pub(super) struct Refusal {
    code: WireCode,
    detail: String,
    aux: u64,
}

impl Refusal {
    fn new(code: WireCode, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), aux: 0 }
    }
}

/// Checks that both sides have a secret, or neither has.
fn agree_on_secrets(initiator: bool, acceptor: bool) -> Result<(), Refusal> {
    match (initiator, acceptor) {
        (false, true) => Err(Refusal::new(
            WireCode::AuthRequired,
            "the acceptor requires a secret, the initiator has none",
        )),
        (true, false) => Err(Refusal::new(
            WireCode::AuthUnsupported,
            "the initiator requires a secret, the acceptor has none",
        )),
        (true, true) | (false, false) => Ok(()),
    }
}

impl Session {
    /// Queues the initiator's first bytes, magic included.
    pub(super) fn say_hello(&mut self, nonce: [u8; 32]) -> Vec<u8> {
        let hello = encode(&Message::Hello(Hello {
            versions: self.versions(),
            capabilities: self.cfg.capabilities,
            incarnation: self.cfg.incarnation,
            name: truncated(&self.cfg.name, NAME_MAX).to_owned(),
            nonce,
            authenticate: self.cfg.secret.is_some(),
            checksum: self.cfg.checksum == ChecksumPolicy::On,
            advertised: self.advertised(),
            fingerprint: self.fingerprint(),
        }));
        self.outbox.push_pinned([&MAGIC[..], &hello].concat());
        hello
    }

    /// Handles a message of the handshake, then awaits the next one or ends the handshake.
    pub(super) fn shake(&mut self, handshake: Awaiting, message: Message, frame: &[u8]) {
        let next = match (handshake, message) {
            (Awaiting::Hello { session }, Message::Hello(hello)) => {
                self.on_hello(session, hello, frame)
            }
            (Awaiting::Challenge { hello, expected }, Message::Challenge(challenge)) => {
                self.on_challenge(&hello, expected, challenge, frame)
            }
            (Awaiting::Proof { session, keys, hello, version }, Message::Proof(proof)) => {
                self.on_proof(session, &keys, hello, version, &proof, frame)
            }
            (Awaiting::Ready { keys, challenge, proof }, Message::Ready(ready)) => {
                self.on_ready(&keys, challenge, &proof, &ready, frame)
            }
            (Awaiting::Challenge { .. } | Awaiting::Ready { .. }, Message::Refused(refused)) => {
                // A refusal with the code for success is malformed, but still a refusal.
                let code = if refused.code.is_ok() { WireCode::Malformed } else { refused.code };
                self.finish(code, true, &refused.detail);
                return;
            }
            (_, message) => Err(Refusal::new(
                WireCode::Malformed,
                format!("unexpected {} message in the handshake", message.kind()),
            )),
        };
        match next {
            Ok(state) => self.state = state,
            Err(Refusal { code, detail, aux }) => self.refuse(code, &detail, aux),
        }
    }

    fn on_hello(
        &mut self,
        session: SessionId,
        hello: Hello,
        frame: &[u8],
    ) -> Result<State, Refusal> {
        let ours = self.versions();
        let version = ours.1.min(hello.versions.1);
        if version < ours.0.max(hello.versions.0).max(self.lowest()) {
            return Err(Refusal {
                code: WireCode::VersionMismatch,
                detail: format!(
                    "initiator speaks versions {} to {}, acceptor {} to {}",
                    hello.versions.0, hello.versions.1, ours.0, ours.1
                ),
                aux: u64::from(ours.0) | u64::from(ours.1) << 16,
            });
        }
        agree_on_secrets(hello.authenticate, self.cfg.secret.is_some())?;
        let challenge = encode(&Message::Challenge(Challenge {
            version,
            capabilities: self.cfg.capabilities,
            incarnation: self.cfg.incarnation,
            name: truncated(&self.cfg.name, NAME_MAX).to_owned(),
            nonce: self.nonce,
            authenticate: self.cfg.secret.is_some(),
        }));
        let keys = HandshakeKeys::new(self.cfg.secret.as_ref(), frame, &challenge);
        self.outbox.push_pinned(challenge);
        Ok(State::Handshake(Awaiting::Proof { session, keys, hello, version }))
    }

    fn on_challenge(
        &mut self,
        hello: &[u8],
        expected: Option<Incarnation>,
        challenge: Challenge,
        frame: &[u8],
    ) -> Result<State, Refusal> {
        let (lowest, highest) = self.versions();
        if challenge.version < self.lowest() || !(lowest..=highest).contains(&challenge.version) {
            return Err(Refusal::new(
                WireCode::VersionMismatch,
                format!(
                    "initiator speaks versions {lowest} to {highest}, acceptor chose {}",
                    challenge.version
                ),
            ));
        }
        // No proof for another peer than the expected one.
        if let Some(expected) = expected.filter(|&expected| expected != challenge.incarnation) {
            return Err(Refusal::new(
                WireCode::StaleIncarnation,
                format!("expected incarnation {expected}, got {}", challenge.incarnation),
            ));
        }
        agree_on_secrets(self.cfg.secret.is_some(), challenge.authenticate)?;
        let keys = HandshakeKeys::new(self.cfg.secret.as_ref(), hello, frame);
        let proof = encode(&Message::Proof(Proof { mac: keys.initiator_mac() }));
        self.outbox.push_pinned(proof.clone());
        Ok(State::Handshake(Awaiting::Ready { keys, challenge, proof }))
    }

    fn on_proof(
        &mut self,
        session: SessionId,
        keys: &HandshakeKeys,
        hello: Hello,
        version: u16,
        proof: &Proof,
        frame: &[u8],
    ) -> Result<State, Refusal> {
        if !macs_equal(&keys.initiator_mac(), &proof.mac) {
            return Err(Refusal::new(WireCode::AuthFailed, "the two sides' secrets differ"));
        }
        // After the proof: an unauthenticated peer learns nothing about the layout.
        if let (Some(ours), Some(theirs)) = (self.fingerprint(), &hello.fingerprint)
            && ours != *theirs
        {
            return Err(Refusal::new(
                WireCode::LayoutMismatch,
                "the two sides' layout fingerprints differ",
            ));
        }
        let checksum = hello.checksum || self.cfg.checksum == ChecksumPolicy::On;
        let advertised = self.advertised();
        let mac = keys.acceptor_mac(session, checksum, &advertised);
        let ready = encode(&Message::Ready(Ready { session, mac, checksum, advertised }));
        self.key = Some(keys.session_key(session, frame, &ready));
        self.outbox.push_pinned(ready);
        let peer = PeerInfo {
            incarnation: hello.incarnation,
            name: sanitized(&hello.name, NAME_MAX),
            version,
            capabilities: self.cfg.capabilities & hello.capabilities,
            session,
            checksum,
            advertised: sanitized(&hello.advertised, ADVERTISED_MAX),
            authenticated: self.cfg.secret.is_some(),
        };
        Ok(self.establish(peer))
    }

    fn on_ready(
        &mut self,
        keys: &HandshakeKeys,
        challenge: Challenge,
        proof: &[u8],
        ready: &Ready,
        frame: &[u8],
    ) -> Result<State, Refusal> {
        let mac = keys.acceptor_mac(ready.session, ready.checksum, &ready.advertised);
        if !macs_equal(&mac, &ready.mac) {
            return Err(Refusal::new(WireCode::AuthFailed, "the two sides' secrets differ"));
        }
        self.key = Some(keys.session_key(ready.session, proof, frame));
        let peer = PeerInfo {
            incarnation: challenge.incarnation,
            name: sanitized(&challenge.name, NAME_MAX),
            version: challenge.version,
            capabilities: self.cfg.capabilities & challenge.capabilities,
            session: ready.session,
            checksum: ready.checksum,
            advertised: sanitized(&ready.advertised, ADVERTISED_MAX),
            authenticated: self.cfg.secret.is_some(),
        };
        Ok(self.establish(peer))
    }

    fn establish(&mut self, peer: PeerInfo) -> State {
        self.decoder.set_limit(CONTROL_MAX);
        if let (true, Some(key)) = (peer.authenticated, &self.key) {
            let Seals { outgoing, incoming } = control_seals(key, peer.session, self.side);
            self.outbox.seal(outgoing);
            self.decoder.open_with(incoming);
        }
        self.heartbeat.received(self.now);
        self.announce(peer);
        State::Established
    }

    /// The lowest version that this side speaks. With a secret, frames must have keyed tags.
    fn lowest(&self) -> u16 {
        if self.cfg.secret.is_some() { KEYED_VERSION } else { 0 }
    }

    fn versions(&self) -> (u16, u16) {
        let (lowest, highest) = self.cfg.versions;
        // Never an empty range: a build without keyed tags is refused by its number.
        (lowest.max(self.lowest()).min(highest), highest)
    }

    /// Empty if it is too long: half an address would be wrong.
    fn advertised(&self) -> String {
        if self.cfg.advertised.len() > ADVERTISED_MAX {
            String::new()
        } else {
            self.cfg.advertised.clone()
        }
    }

    /// Fingerprints are only compared, so a long one is hashed.
    fn fingerprint(&self) -> Option<Vec<u8>> {
        self.cfg.fingerprint.as_ref().map(|fingerprint| {
            if fingerprint.len() > FINGERPRINT_MAX {
                blake3::hash(fingerprint).as_bytes().to_vec()
            } else {
                fingerprint.clone()
            }
        })
    }

    /// Ends the handshake with the message that this side sends in that case.
    fn refuse(&mut self, code: WireCode, detail: &str, aux: u64) {
        match self.side {
            Side::Acceptor => self.send_refused(code, detail, aux),
            Side::Initiator => self.send_close(code, detail),
        }
        self.finish(code, false, detail);
    }
}
