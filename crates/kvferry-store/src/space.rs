//! [`Space`]: the blocks of one namespace.

use crate::error::{Error, Result};
use crate::index::{Entry, SlotId};
use crate::key::{Identity, Key, Namespace};
use crate::memory::BlockMemory;
use crate::open_store::OpenStore;
use std::sync::Arc;

/// Blocks of a prompt that are looked for first. Most prompts have none, or many more.
const FIRST_WINDOW: usize = 16;
/// Bytes that one thread reads or writes while another computes the sums of as many.
pub(crate) const CHUNK_BYTES: u64 = 2 << 20;

/// The blocks of one namespace of a store. Clones are the same.
///
/// A prompt is given by the hashes of its blocks, the first block first. Hashes have 16 to 64 bytes.
#[derive(Clone, Debug)]
pub struct Space {
    pub(crate) store: Arc<OpenStore>,
    pub(crate) identity: Identity,
    /// Keeps the store open. `None` in a task of the store itself.
    _open: Option<Arc<dyn KeepsOpen>>,
}

/// A handle that keeps a store open, and closes it when the last one is dropped.
pub(crate) trait KeepsOpen: std::fmt::Debug + Send + Sync {}

impl Space {
    pub(crate) fn new(store: Arc<OpenStore>, identity: Identity, open: Arc<dyn KeepsOpen>) -> Self {
        Self { store, identity, _open: Some(open) }
    }

    /// Clone for a task in the background, which the store waits for when it is closed.
    pub(crate) fn for_task(&self) -> Self {
        Self { store: Arc::clone(&self.store), identity: self.identity.clone(), _open: None }
    }

    /// Space of a task whose blocks come with their names.
    pub(crate) fn of_task(store: &Arc<OpenStore>) -> Self {
        let identity = Namespace::new("").identity();
        Self { store: Arc::clone(store), identity, _open: None }
    }

    /// How many blocks of a prompt, from its beginning, are in the store. Those of a directory that is known to hang,
    /// and those behind them, do not count: a get would miss them. This is no use of them: call [`Space::touch`] where
    /// they are not read because the engine has them.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a hash that is too short or too long.
    pub fn lookup<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<usize> {
        let _call = self.store.enter()?;
        let (keys, found) = self.find_prompt(prompt)?;
        Ok(self.readable(&keys, &found))
    }

    /// Counts as a use of the blocks of a prompt that are in the store, also of a directory that hangs. Returns how
    /// many.
    ///
    /// # Errors
    /// As [`Space::lookup`].
    pub fn touch<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<usize> {
        let _call = self.store.enter()?;
        let (keys, found) = self.find_prompt(prompt)?;
        self.note_use(&keys, &found, prompt.len() - found.len());
        Ok(found.len())
    }

    pub(crate) fn keys<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<Vec<Key>> {
        let mut keys = Vec::with_capacity(prompt.len());
        for hash in prompt {
            keys.push(self.identity.key(hash.as_ref())?);
        }
        Ok(keys)
    }

    /// Like [`Space::find`], but also returns the keys that were computed to find the end of the prefix.
    pub(crate) fn find_prompt<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
    ) -> Result<(Vec<Key>, Vec<Option<Entry>>)> {
        for hash in prompt {
            Identity::check_hash(hash.as_ref())?;
        }
        let (mut keys, mut found) = (Vec::new(), Vec::new());
        let mut window = FIRST_WINDOW;
        loop {
            let end = prompt.len().min(keys.len() + window);
            keys.extend(self.keys(&prompt[keys.len()..end])?);
            found.extend(self.find(&keys[found.len()..]));
            if found.len() < keys.len() || end == prompt.len() {
                return Ok((keys, found));
            }
            window *= 4;
        }
    }

    /// The blocks of the longest prefix that is there. Those that are in host memory only have no entry.
    pub(crate) fn find(&self, keys: &[Key]) -> Vec<Option<Entry>> {
        // Their memory grows with what is found: a miss costs next to nothing.
        let (mut entries, mut found) = (Vec::new(), Vec::new());
        loop {
            entries.clear();
            self.store.core.member.find_prefix(&keys[found.len()..], &mut entries);
            found.extend(entries.iter().copied().map(Some));
            let Some(host) = &self.store.host else { return found };
            let in_host = host.prefix(&keys[found.len()..]);
            if in_host == 0 {
                return found;
            }
            found.extend(std::iter::repeat_n(None, in_host));
        }
    }

    /// Number of leading blocks of `found` that a get can read: the rest is behind one whose directory hangs.
    pub(crate) fn readable(&self, keys: &[Key], found: &[Option<Entry>]) -> usize {
        let core = &self.store.core;
        if found.is_empty() || !core.disk.is_any_hanging() {
            return found.len();
        }
        let in_host = |key| self.store.host.as_ref().is_some_and(|host| host.prefix(&[key]) == 1);
        let is_there = |(key, entry): &(&Key, &Option<Entry>)| {
            entry.is_none_or(|entry| !core.hangs(&entry)) || in_host(**key)
        };
        keys.iter().zip(found).take_while(is_there).count()
    }

    pub(crate) fn note_use(&self, keys: &[Key], found: &[Option<Entry>], missing: usize) {
        let core = &self.store.core;
        let (now, now_ms) = (core.clock.now_s(), core.clock.now_ms());
        let on_disk = || found.iter().flatten();
        on_disk().for_each(|entry| core.member.touch(entry, now));
        let slots: Vec<_> = on_disk().map(|entry| entry.slot).collect();
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        if core.member.note_used(now_ms, missing, &slots) {
            self.store.wake_keeper();
        }
        if let Some(host) = &self.store.host {
            host.note_use(now_ms, &keys[..found.len()], missing as usize);
        }
    }

    /// Tells the keeper of blocks that a put has found, each behind the one before it.
    pub(crate) fn note_found(&self, parent: Option<SlotId>, slots: &[SlotId]) {
        let core = &self.store.core;
        if !slots.is_empty() && core.member.note_found(core.clock.now_ms(), parent, slots) {
            self.store.wake_keeper();
        }
    }

    /// Tells the keeper of blocks that came, each behind the one before it.
    pub(crate) fn note_added(&self, parent: Option<SlotId>, slots: &[SlotId]) {
        let core = &self.store.core;
        if !slots.is_empty() && core.member.note_added(core.clock.now_ms(), parent, slots) {
            self.store.wake_keeper();
        }
    }
}

/// Cuts blocks into parts of at least `part_bytes`.
pub(crate) fn chunks<T>(
    blocks: &[T],
    part_bytes: u64,
    len: impl Fn(&T) -> u32,
) -> impl Iterator<Item = &[T]> {
    let mut rest = blocks;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let is_more = |block: &&T| {
            let is_more = bytes < part_bytes;
            bytes += u64::from(len(block));
            is_more
        };
        let count = rest.iter().take_while(is_more).count();
        let (chunk, others) = rest.split_at(count);
        rest = others;
        (count > 0).then_some(chunk)
    })
}

pub(crate) fn own<H: AsRef<[u8]>>(prompt: &[H]) -> Vec<Vec<u8>> {
    prompt.iter().map(|hash| hash.as_ref().to_vec()).collect()
}

pub(crate) fn check_range(prompt: usize, first: usize, memory: &[BlockMemory]) -> Result<()> {
    if first.checked_add(memory.len()).is_none_or(|end| end > prompt) {
        return Err(Error::InvalidArgument(format!(
            "memory for {} blocks from number {first} on, but the prompt has {prompt}",
            memory.len()
        )));
    }
    memory.iter().try_for_each(|memory| memory.checked_len().map(|_| ()))
}
