//! The identity of a prompt, which the id of a handoff carries.
//!
//! Routers give one `transfer_id` to requests with different prompts: batch completions do. The
//! halves of both engines therefore append the identity of the prompt:
//!
//! ```text
//! <transfer_id>#<32 lowercase hexadecimal digits>
//! ```
//!
//! Two requests with different prompts are different handoffs, so the KV of another prompt is never
//! loaded.
//!
//! The identity is a hash of the tokens and not of the engine's hashes of blocks, though vLLM has those before its
//! scheduler sees a request. Both engines compute the identity before they talk to each other, and block hashes of the
//! same tokens differ with settings of one engine alone: the tokens in a block, the hash function, its seed, the version
//! of the engine, and whether it caches prefixes at all. They also have names of adapters and images that two engines
//! need not share. A prompt is hashed once per request, when it arrives.

use kvferry_proto::handoff::{HandoffId, ID_MAX};
use std::fmt;
use thiserror::Error;

/// Bytes of `#` and the digits.
const SUFFIX: usize = 33;

/// Bytes of a router's `transfer_id` at most.
const TRANSFER_MAX: usize = ID_MAX - SUFFIX;

/// Bytes that are hashed together. BLAKE3 hashes the chunks of a piece side by side if the piece is long and begins at a
/// multiple of its length.
const AT_ONCE: usize = 64 << 10;
/// Tokens that are converted to bytes together.
const TOKENS_AT_ONCE: usize = 1024;

/// The reason why a `transfer_id` can't identify the handoff of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum Unidentified {
    #[error("transfer_id is of another prompt")]
    OtherPrompt,
    #[error("transfer_id has more than {TRANSFER_MAX} bytes")]
    TooLong,
}

/// Identifies a prompt: a hash over its token ids and over what else its KV depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PromptId(u128);

impl PromptId {
    /// The identity of all of a prompt's tokens. `extra` is what else its KV depends on, in an order that
    /// both engines use: the name of the LoRA, identifiers of multimodal inputs, the cache salt.
    pub fn new(extra: &[&[u8]], tokens: &[u32]) -> Self {
        let mut hasher = PromptHasher::new(extra);
        hasher.update_tokens(tokens);
        hasher.finish()
    }

    /// The identity that [`PromptId::to_bytes`] returned.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }

    /// The identity as bytes.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    fn parse(digits: &str) -> Option<Self> {
        let plain = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let plain = digits.len() == SUFFIX - 1 && digits.bytes().all(plain);
        plain.then(|| u128::from_str_radix(digits, 16).ok().map(Self)).flatten()
    }

    /// The prompt that a handoff's id names, if it names one.
    fn of(id: &HandoffId) -> Option<Self> {
        id.as_str().rsplit_once('#').and_then(|(_, digits)| Self::parse(digits))
    }

    /// The handoff of a request with this prompt: `transfer` with the prompt's digits.
    pub(crate) fn identify(self, transfer: HandoffId) -> Result<HandoffId, Unidentified> {
        match Self::of(&transfer) {
            Some(prompt) if prompt == self => Ok(transfer),
            Some(_) => Err(Unidentified::OtherPrompt),
            None => HandoffId::new(&format!("{}#{self}", transfer.as_str()))
                .map_err(|_| Unidentified::TooLong),
        }
    }
}

/// Computes [`PromptId::new`] piece by piece.
pub struct PromptHasher {
    hasher: blake3::Hasher,
    /// Fewer than [`AT_ONCE`] bytes.
    waiting: Vec<u8>,
}

impl PromptHasher {
    /// A prompt without tokens yet.
    pub fn new(extra: &[&[u8]]) -> Self {
        let hasher = blake3::Hasher::new_derive_key("kvferry prompt, v1");
        let mut made = Self { hasher, waiting: Vec::with_capacity(AT_ONCE) };
        made.update(&(extra.len() as u64).to_le_bytes());
        for key in extra {
            made.update(&(key.len() as u64).to_le_bytes());
            made.update(key);
        }
        made
    }

    /// Adds tokens, as four little-endian bytes each.
    pub fn update(&mut self, mut tokens: &[u8]) {
        while !tokens.is_empty() {
            let room = AT_ONCE - self.waiting.len();
            let (now, later) = tokens.split_at(room.min(tokens.len()));
            self.waiting.extend_from_slice(now);
            if self.waiting.len() == AT_ONCE {
                self.hasher.update(&self.waiting);
                self.waiting.clear();
            }
            tokens = later;
        }
    }

    /// Adds tokens.
    pub fn update_tokens(&mut self, tokens: &[u32]) {
        let mut bytes = Vec::with_capacity(TOKENS_AT_ONCE * 4);
        for tokens in tokens.chunks(TOKENS_AT_ONCE) {
            bytes.clear();
            bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            self.update(&bytes);
        }
    }

    /// The identity.
    pub fn finish(mut self) -> PromptId {
        self.hasher.update(&self.waiting);
        let hash = self.hasher.finalize();
        let half = hash.as_bytes().first_chunk().expect("a hash has 32 bytes");
        PromptId(u128::from_be_bytes(*half))
    }
}

impl fmt::Debug for PromptHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PromptHasher").finish_non_exhaustive()
    }
}

impl fmt::Display for PromptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for PromptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_covers_every_token_their_order_and_the_extra_keys() {
        let prompt: Vec<u32> = (0..2500).collect();
        let id = PromptId::new(&[b"lora"], &prompt);
        assert_eq!(id, PromptId::new(&[b"lora"], &prompt));
        for at in [0, 1023, 1024, 2499] {
            let mut other = prompt.clone();
            other[at] += 1 << 24;
            assert_ne!(id, PromptId::new(&[b"lora"], &other));
        }
        let mut other = prompt.clone();
        other.swap(7, 2000);
        assert_ne!(id, PromptId::new(&[b"lora"], &other));
        assert_ne!(id, PromptId::new(&[b"lora"], &prompt[..2499]));
        for extra in [&[][..], &["lore"], &["lo", "ra"], &["lora", ""]] {
            let extra: Vec<_> = extra.iter().map(|key| key.as_bytes()).collect();
            assert_ne!(id, PromptId::new(&extra, &prompt));
        }
    }

    #[test]
    fn the_identity_is_the_hash_of_all_bytes_however_they_are_split() {
        let prompt: Vec<u32> = (0..50_000).collect();
        let bytes: Vec<u8> = prompt.iter().flat_map(|token| token.to_le_bytes()).collect();
        for key in ["", "lora", &"x".repeat(AT_ONCE - 16), &"x".repeat(3 * AT_ONCE + 1)] {
            let mut whole = blake3::Hasher::new_derive_key("kvferry prompt, v1");
            whole.update(&1_u64.to_le_bytes());
            whole.update(&(key.len() as u64).to_le_bytes());
            whole.update(key.as_bytes());
            whole.update(&bytes);
            let whole = PromptId(u128::from_be_bytes(
                *whole.finalize().as_bytes().first_chunk().expect("a hash has 32 bytes"),
            ));
            let key = key.as_bytes();
            assert_eq!(PromptId::new(&[key], &prompt), whole);
            for piece in [1, 4096, 65_535, 65_536, 65_537, bytes.len()] {
                let mut hasher = PromptHasher::new(&[key]);
                bytes.chunks(piece).for_each(|piece| hasher.update(piece));
                assert_eq!(hasher.finish(), whole, "{} {piece}", key.len());
            }
        }
    }

    #[test]
    fn a_transfer_id_gets_the_digits_once_and_only_of_the_same_prompt() {
        let (prompt, other) = (PromptId::new(&[], &[1, 2]), PromptId::new(&[], &[1, 3]));
        let id = prompt.identify(HandoffId::new("x#y").expect("short")).expect("no digits yet");
        assert_eq!(id.as_str(), format!("x#y#{prompt}"));
        assert_eq!(prompt.identify(id.clone()), Ok(id.clone()));
        assert_eq!(other.identify(id), Err(Unidentified::OtherPrompt));
        for (len, fits) in [(TRANSFER_MAX, true), (TRANSFER_MAX + 1, false)] {
            let transfer = HandoffId::new(&"x".repeat(len)).expect("short enough without digits");
            assert_eq!(prompt.identify(transfer).is_ok(), fits);
        }
    }
}
