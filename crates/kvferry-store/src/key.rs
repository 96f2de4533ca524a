//! Names of blocks.
//!
//! A block is named by its [`Namespace`] and by the engine's hash of its content and of all before it.
//! The index finds it by 128 bits ([`Key`]): the hash's first 16 bytes, mixed with a mask of the namespace,
//! which costs a few instructions per block. When its bytes are read, 64 bits of a BLAKE3 digest of the
//! whole name are compared as well ([`Identity::check`]). So blocks of different namespaces are never taken for
//! each other, also where their hashes are equal.

use crate::error::{Error, Result};

/// Bytes of a block's hash, at least: shorter ones collide in a cache of millions of blocks.
pub const HASH_LEN_MIN: usize = 16;
/// Bytes of a block's hash, at most.
pub const HASH_LEN_MAX: usize = 64;

/// Key by which the index finds a block. Zero means "none".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub [u64; 2]);

/// What, besides their hash, two blocks must have in common to be the same.
///
/// ```
/// use kvferry_store::Namespace;
///
/// let namespace = Namespace::new("meta-llama/Llama-3.1-8B@0e9e39f")
///     .layout(b"bf16, 32 layers, 8 heads, 128, blocks of 16")
///     .tenant(b"acme")
///     .adapter("sql-lora@3")
///     .group(0)
///     .shard(1, 4);
/// assert_ne!(namespace.id(), namespace.clone().shard(2, 4).id());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Namespace {
    model: String,
    layout: Vec<u8>,
    tenant: Vec<u8>,
    adapter: String,
    group: u32,
    shard: (u32, u32),
    epoch: Vec<u8>,
}

impl Namespace {
    /// The KV of a model: its name and the revision of its weights.
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            layout: Vec::new(),
            tenant: Vec::new(),
            adapter: String::new(),
            group: 0,
            shard: (0, 1),
            epoch: Vec::new(),
        }
    }

    /// Sets the fingerprint of how the bytes of a block are laid out: data type, layers, heads, tokens in a block.
    #[must_use]
    pub fn layout(self, fingerprint: impl Into<Vec<u8>>) -> Self {
        Self { layout: fingerprint.into(), ..self }
    }

    /// A tenant's salt. Tenants do not see each other's blocks. It is not written to the disk.
    #[must_use]
    pub fn tenant(self, salt: impl Into<Vec<u8>>) -> Self {
        Self { tenant: salt.into(), ..self }
    }

    /// The adapter (LoRA), if the KV depends on one: its name and revision.
    #[must_use]
    pub fn adapter(self, name: impl Into<String>) -> Self {
        Self { adapter: name.into(), ..self }
    }

    /// The group of layers, if an engine keeps several kinds of KV.
    #[must_use]
    pub fn group(self, group: u32) -> Self {
        Self { group, ..self }
    }

    /// The part of a block that this rank has, of `of` parts.
    #[must_use]
    pub fn shard(self, shard: u32, of: u32) -> Self {
        Self { shard: (shard, of), ..self }
    }

    /// Separates what is put from what others have put under the same names: random bytes where hashes and namespace
    /// do not say which weights computed a block. It is not written to the disk.
    #[must_use]
    pub fn epoch(self, epoch: impl Into<Vec<u8>>) -> Self {
        Self { epoch: epoch.into(), ..self }
    }

    /// 128 bits that stand for the namespace.
    pub fn digest(&self) -> [u8; 16] {
        let [low, high] = self.identity().mask;
        (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
    }

    /// A number that stands for the namespace, as the records on disk and `kvferry store ls` have it.
    pub fn id(&self) -> u64 {
        self.identity().id
    }

    pub(crate) fn identity(&self) -> Identity {
        let mut hasher = blake3::Hasher::new_derive_key("kvferry store namespace v1");
        for part in [self.model.as_bytes(), &self.layout, &self.tenant, self.adapter.as_bytes()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        for number in [self.group, self.shard.0, self.shard.1] {
            hasher.update(&number.to_le_bytes());
        }
        // Names without an epoch are those of earlier releases.
        if !self.epoch.is_empty() {
            hasher.update(&(self.epoch.len() as u64).to_le_bytes());
            hasher.update(&self.epoch);
        }
        let mut bytes = [0; 56];
        hasher.finalize_xof().fill(&mut bytes);
        let word = |at: usize| word(&bytes[at..]);
        let secret = bytes[24..].try_into().expect("32 bytes");
        Identity { mask: [word(0), word(8)], id: word(16), secret }
    }
}

/// A namespace, ready to name blocks.
#[derive(Clone)]
pub(crate) struct Identity {
    mask: [u64; 2],
    pub(crate) id: u64,
    secret: [u8; 32],
}

impl Identity {
    /// Whether a block may have this hash.
    pub(crate) fn check_hash(hash: &[u8]) -> Result<()> {
        if (HASH_LEN_MIN..=HASH_LEN_MAX).contains(&hash.len()) {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "a block's hash has {HASH_LEN_MIN} to {HASH_LEN_MAX} bytes, got {}",
            hash.len()
        )))
    }

    pub(crate) fn key(&self, hash: &[u8]) -> Result<Key> {
        Self::check_hash(hash)?;
        Ok(self.key_of(stem(hash)))
    }

    /// The key of a hash that begins like this.
    pub(crate) fn key_of(&self, stem: [u64; 2]) -> Key {
        let key = [stem[0] ^ self.mask[0], stem[1] ^ self.mask[1]];
        // Zero means "none"; one name in 2^128 shares another's key, and the check tells them apart.
        Key(if key == [0, 0] { [1, 0] } else { key })
    }

    /// Returns the first 16 bytes of the hash that has this key in this namespace.
    pub(crate) fn stem_of(&self, key: &Key) -> [u64; 2] {
        [key.0[0] ^ self.mask[0], key.0[1] ^ self.mask[1]]
    }

    /// Returns the check of a name, which is compared, together with the sum of its bytes, when a block is read.
    pub(crate) fn check(&self, hash: &[u8]) -> u64 {
        word(blake3::keyed_hash(&self.secret, hash).as_bytes())
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Namespace[{:016x}]", self.id)
    }
}

/// The part of a hash that is in a key.
pub(crate) fn stem(hash: &[u8]) -> [u64; 2] {
    [word(hash), word(&hash[8..])]
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_part_of_a_name_makes_another_key_and_another_check() {
        let base = Namespace::new("model");
        let others = [
            base.clone(),
            Namespace::new("model2"),
            base.clone().layout("l"),
            base.clone().tenant("l"),
            base.clone().adapter("l"),
            base.clone().group(1),
            base.clone().shard(1, 2),
            base.clone().shard(0, 2),
            base.clone().epoch("l"),
        ];
        let hash = [7; 32];
        let identities: Vec<_> = others.iter().map(Namespace::identity).collect();
        let keys: HashSet<_> = identities.iter().map(|it| it.key(&hash).expect("a key")).collect();
        let checks: HashSet<_> = identities.iter().map(|it| it.check(&hash)).collect();
        let ids: HashSet<_> = identities.iter().map(|it| it.id).collect();
        assert_eq!((keys.len(), checks.len(), ids.len()), (9, 9, 9));
    }

    #[test]
    fn bytes_of_a_hash_behind_the_first_sixteen_make_another_check() {
        let identity = Namespace::new("model").identity();
        let (mut one, mut other) = ([7; 32], [7; 32]);
        (one[31], other[31]) = (1, 2);
        assert_eq!(identity.key(&one).expect("a key"), identity.key(&other).expect("a key"));
        assert_ne!(identity.check(&one), identity.check(&other));
    }

    #[test]
    fn a_hash_that_is_too_short_or_too_long_is_refused() {
        let identity = Namespace::new("model").identity();
        for len in [0, 15, 65] {
            assert!(matches!(identity.key(&vec![1; len]), Err(Error::InvalidArgument(_))), "{len}");
        }
    }
}
