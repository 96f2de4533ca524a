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

use kvferry_proto::handoff::{HandoffId, ID_MAX};
use std::fmt;
use thiserror::Error;

/// Bytes of `#` and the digits.
const SUFFIX: usize = 33;

/// Bytes of a router's `transfer_id` at most.
const TRANSFER_MAX: usize = ID_MAX - SUFFIX;

/// Why a `transfer_id` is not of a prompt.
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
        let mut hasher = blake3::Hasher::new_derive_key("kvferry prompt, v1");
        hasher.update(&(extra.len() as u64).to_le_bytes());
        for key in extra {
            hasher.update(&(key.len() as u64).to_le_bytes());
            hasher.update(key);
        }
        let mut bytes = Vec::with_capacity(4096);
        for tokens in tokens.chunks(1024) {
            bytes.clear();
            bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            hasher.update(&bytes);
        }
        let hash = hasher.finalize();
        Self(u128::from_be_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes")))
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
