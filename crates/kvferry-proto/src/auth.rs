//! Mutual authentication by a shared secret, and the key of a session.
//!
//! Both sides hold a shared secret, or neither does. The transcript is the exact bytes of the
//! initiator's `Hello` and the acceptor's `Challenge`, each with a fresh nonce. A MAC over it is
//! valid in this connection only (no replay), covers versions, capabilities and names (no
//! downgrade), and is not valid in the other direction, which has another label (no reflection).
//! The initiator proves first: a caller without the secret never gets a MAC for an offline attack.
//!
//! The session key is derived from the secret and the transcript, and every data stream proves it.
//! Without a secret it is derived from the transcript alone: that protects against mistakes (a
//! stream of another session, a restarted peer), not against an observer.
//!
//! With a secret the session's key also protects what follows the handshake: control frames, the
//! heads of requests and answers, tables and notifications carry keyed tags ([`crate::keyed`]). An
//! attacker who relays a connection can't change them without ending the session. There is no
//! encryption: a relay reads everything, and can change payload.

use crate::code::WireCode;
use crate::id::{SessionId, StreamId};
use crate::keyed::{Seal, Seals};
use crate::side::Side;
use blake3::hazmat::{self, HasherExt};
use std::fmt;
use std::sync::LazyLock;
use zeroize::{Zeroize, Zeroizing};

/// Length of a nonce, in bytes.
pub const NONCE_LEN: usize = 32;

/// Length of a MAC, in bytes.
pub const MAC_LEN: usize = 32;

/// Minimum length of a secret, in bytes. Shorter secrets can be guessed by trial: the initiator of
/// a handshake sends a MAC to any process that answers at the address that it dials.
pub const SECRET_LEN_MIN: usize = 16;

/// A secret shared by the agents that may talk to each other: one byte or more.
///
/// Wiped from memory on drop. `Debug` does not show it. Two secrets are compared in a time that
/// does not depend on where they differ.
#[derive(Clone)]
pub struct Secret {
    bytes: Zeroizing<Vec<u8>>,
    /// The key that handshakes derive from the secret.
    key: SessionKey,
}

impl Secret {
    /// A secret of these bytes. `None` for no bytes: agents with an empty secret would look
    /// protected and would not be.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Option<Self> {
        let bytes = Zeroizing::new(bytes.into());
        let key = SessionKey(blake3::derive_key("kvferry v1 shared secret", &bytes));
        (!bytes.is_empty()).then_some(Self { bytes, key })
    }

    /// Whether the secret has fewer than [`SECRET_LEN_MIN`] bytes.
    pub fn is_short(&self) -> bool {
        self.bytes.len() < SECRET_LEN_MIN
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        blake3::hash(&self.bytes) == blake3::hash(&other.bytes)
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The key of one session, which every stream of the session proves. Wiped from memory on drop.
#[derive(Clone)]
pub struct SessionKey([u8; 32]);

impl SessionKey {
    /// A key of these bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKey(..)")
    }
}

impl Drop for SessionKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// The MAC with which stream `stream` of session `session` proves the session's key.
pub fn stream_mac(key: &SessionKey, session: SessionId, stream: StreamId) -> [u8; MAC_LEN] {
    keyed(key, b"kvferry stream\0", session, stream)
}

/// The name of a transport whose own connections prove a session's key. A proof is valid under its
/// label only: a process that receives a hello of one transport can't use it for another one, nor
/// open a data stream with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProofLabel(&'static str);

impl ProofLabel {
    /// The label of the transport with this name: lower-case letters and digits.
    ///
    /// # Panics
    /// If the name has other characters or none, or belongs to a proof of the protocol itself
    /// (`stream`, `initiator`, `acceptor`). For constants, at compile time.
    pub const fn new(name: &'static str) -> Self {
        let bytes = name.as_bytes();
        assert!(!bytes.is_empty(), "a label has a character");
        let mut at = 0;
        while at < bytes.len() {
            // Without spaces and zeros, no label is the beginning of another proof's text.
            let is_plain = bytes[at].is_ascii_lowercase() || bytes[at].is_ascii_digit();
            assert!(is_plain, "a label has lower-case letters and digits only");
            at += 1;
        }
        let is_taken = matches!(bytes, b"stream" | b"initiator" | b"acceptor");
        assert!(!is_taken, "a proof of the protocol has this label");
        Self(name)
    }

    /// The MAC of the initiator's hello on a connection of the transport.
    pub fn hello_mac(
        self,
        key: &SessionKey,
        session: SessionId,
        stream: StreamId,
    ) -> [u8; MAC_LEN] {
        keyed(key, format!("kvferry {} hello\0", self.0).as_bytes(), session, stream)
    }

    /// The MAC of the acceptor's answer to that hello.
    pub fn answer_mac(
        self,
        key: &SessionKey,
        session: SessionId,
        stream: StreamId,
    ) -> [u8; MAC_LEN] {
        keyed(key, format!("kvferry {}\0", self.0).as_bytes(), session, stream)
    }
}

/// The MAC of the acceptor's answer to the opening of a stream: [`WireCode::Ok`] if it is accepted.
pub(crate) fn stream_answer_mac(
    key: &SessionKey,
    session: SessionId,
    stream: StreamId,
    code: WireCode,
) -> [u8; MAC_LEN] {
    let label = [&b"kvferry stream answer\0"[..], &code.to_u16().to_le_bytes()].concat();
    keyed(key, &label, session, stream)
}

fn keyed(key: &SessionKey, label: &[u8], session: SessionId, stream: StreamId) -> [u8; MAC_LEN] {
    let said = [label, &session.0.to_le_bytes(), &stream.0.to_le_bytes()].concat();
    *blake3::keyed_hash(&key.0, &said).as_bytes()
}

/// The tags of the control connection, for one side of the session.
pub(crate) fn control_seals(key: &SessionKey, session: SessionId, side: Side) -> Seals {
    // No stream has this number: the initiator counts from 1.
    let direction = |label: &[u8]| Seal::new(keyed(key, label, session, StreamId(0)));
    seals(
        side,
        direction(b"kvferry control of the initiator\0"),
        direction(b"kvferry control of the acceptor\0"),
    )
}

/// The tags of a data stream, for one side of the session.
pub(crate) fn stream_seals(
    key: &SessionKey,
    session: SessionId,
    stream: StreamId,
    side: Side,
) -> Seals {
    let direction = |label: &[u8]| Seal::new(keyed(key, label, session, stream));
    seals(side, direction(b"kvferry stream requests\0"), direction(b"kvferry stream answers\0"))
}

fn seals(side: Side, initiator: Seal, acceptor: Seal) -> Seals {
    match side {
        Side::Initiator => Seals { outgoing: initiator, incoming: acceptor },
        Side::Acceptor => Seals { outgoing: acceptor, incoming: initiator },
    }
}

/// Whether two MACs are equal, in a time that does not depend on where they differ.
pub fn macs_equal(ours: &[u8; MAC_LEN], theirs: &[u8; MAC_LEN]) -> bool {
    blake3::Hash::from_bytes(*ours) == blake3::Hash::from_bytes(*theirs)
}

/// The key of handshakes without a secret, which is public. One path for both cases keeps the state machine small.
static NO_SECRET: LazyLock<SessionKey> =
    LazyLock::new(|| SessionKey(blake3::derive_key("kvferry v1 no secret", &[])));

/// Result of [`blake3::Hasher::new_derive_key`] for the transcripts' context, which is the same in
/// each handshake.
static TRANSCRIPTS: LazyLock<hazmat::ContextKey> =
    LazyLock::new(|| hazmat::hash_derive_key_context("kvferry v1 handshake transcript"));

/// The keys of one handshake. Both sides can compute them after `Hello` and `Challenge`.
pub(crate) struct HandshakeKeys {
    key: SessionKey,
    transcript: [u8; 32],
}

impl HandshakeKeys {
    /// Derives the keys from the secret, if there is one, and the frames exactly as they crossed
    /// the wire.
    pub(crate) fn new(secret: Option<&Secret>, hello: &[u8], challenge: &[u8]) -> Self {
        let mut transcript = blake3::Hasher::new_from_context_key(&TRANSCRIPTS);
        for part in [hello, challenge] {
            transcript.update(&(part.len() as u64).to_le_bytes());
            transcript.update(part);
        }
        let key = secret.map_or(&*NO_SECRET, |secret| &secret.key).clone();
        Self { key, transcript: *transcript.finalize().as_bytes() }
    }

    /// The initiator's proof.
    pub(crate) fn initiator_mac(&self) -> [u8; MAC_LEN] {
        self.mac(b"kvferry initiator\0", &[])
    }

    /// The acceptor's proof. It also covers the fields of `Ready`.
    pub(crate) fn acceptor_mac(
        &self,
        session: SessionId,
        checksum: bool,
        advertised: &str,
    ) -> [u8; MAC_LEN] {
        let mut said = Vec::with_capacity(9 + advertised.len());
        said.extend_from_slice(&session.0.to_le_bytes());
        said.push(checksum.into());
        said.extend_from_slice(advertised.as_bytes());
        self.mac(b"kvferry acceptor\0", &said)
    }

    /// The key of the session. It depends on every byte of the handshake, `proof` and `ready` being
    /// the frames exactly as they crossed the wire.
    pub(crate) fn session_key(&self, session: SessionId, proof: &[u8], ready: &[u8]) -> SessionKey {
        let length = |part: &[u8]| (part.len() as u64).to_le_bytes();
        let (proof_len, ready_len) = (length(proof), length(ready));
        let said = [&session.0.to_le_bytes()[..], &proof_len, proof, &ready_len, ready].concat();
        SessionKey(self.mac(b"kvferry session key\0", blake3::hash(&said).as_bytes()))
    }

    /// Hashes one buffer: a hasher would be 1.9 kB to fill, finish and wipe, for some 80 bytes.
    fn mac(&self, label: &[u8], said: &[u8]) -> [u8; MAC_LEN] {
        *blake3::keyed_hash(&self.key.0, &[label, &self.transcript, said].concat()).as_bytes()
    }
}

impl fmt::Debug for HandshakeKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandshakeKeys(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proofs_of_the_local_socket_have_the_texts_of_version_1() {
        let key = SessionKey::from_bytes([7; 32]);
        let (session, stream) = (SessionId(3), StreamId(4));
        let local = ProofLabel::new("local");
        let text = |label: &[u8]| keyed(&key, label, session, stream);
        assert_eq!(local.hello_mac(&key, session, stream), text(b"kvferry local hello\0"));
        assert_eq!(local.answer_mac(&key, session, stream), text(b"kvferry local\0"));
    }

    #[test]
    fn a_label_that_could_be_taken_for_another_proof_is_refused() {
        for name in ["", "stream", "initiator", "acceptor", "a hello", "a\0", "Stream"] {
            let refused = std::panic::catch_unwind(|| ProofLabel::new(name));
            assert!(refused.is_err(), "{name:?}");
        }
        let (key, session, stream) = (SessionKey::from_bytes([7; 32]), SessionId(3), StreamId(4));
        let labels = ["local", "verbs", "control"].map(ProofLabel::new);
        let mut proofs: Vec<_> = labels
            .iter()
            .flat_map(|it| {
                [it.hello_mac(&key, session, stream), it.answer_mac(&key, session, stream)]
            })
            .collect();
        proofs.push(stream_mac(&key, session, stream));
        let count = proofs.len();
        proofs.sort_unstable();
        proofs.dedup();
        assert_eq!(proofs.len(), count);
    }

    #[test]
    fn proofs_are_macs_of_the_transcript_with_a_key_derived_from_the_secret() {
        let hash = |hasher: &blake3::Hasher| *hasher.finalize().as_bytes();
        let mut transcript = blake3::Hasher::new_derive_key("kvferry v1 handshake transcript");
        for part in [&b"hello"[..], b"challenge"] {
            transcript.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        let secret = Secret::new("secret").expect("not empty");
        let derived = [
            (Some(&secret), blake3::derive_key("kvferry v1 shared secret", b"secret")),
            (None, blake3::derive_key("kvferry v1 no secret", b"")),
        ];
        for (secret, key) in derived {
            let mut mac = blake3::Hasher::new_keyed(&key);
            mac.update(b"kvferry initiator\0").update(&hash(&transcript));
            let keys = HandshakeKeys::new(secret, b"hello", b"challenge");
            assert_eq!(keys.initiator_mac(), hash(&mac));
        }
    }
}
