//! Reports the blocks that come to a store and leave it, by any process.
//!
//! Events are those of the index, so of blocks on the disk: a block in host memory that waits to be written has none
//! yet, and a block that is moved from one segment to another has none at all. They say what the index says when they
//! are read, not what has changed: a block that came and left in between may be said to be removed twice, or never to
//! have come. Applied to a set in the order in which they are read, they lead to what is in the store.
//!
//! A subscriber that reads too slowly, or has just begun, has to take a snapshot. No process waits for it.

use crate::error::Result;
use crate::index::{self, Changes};
use crate::key::Key;
use crate::open_store::OpenStore;
use crate::store::Store;
use std::sync::Arc;
use std::time::Duration;

/// A change of a block's presence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The block is in the store.
    Stored(Key),
    /// The block is not in the store: evicted, damaged, lost with its device, or replaced.
    Removed(Key),
}

/// Result of [`Events::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// Nothing is left to read at the moment.
    All,
    /// There may be more.
    More,
    /// Events were lost, or the subscription has just begun: [`Events::snapshot`] has what is there. Events that are
    /// read afterwards go on from it.
    Lost,
}

/// A subscription to the events of a store. See [`Store::events`].
#[derive(Debug)]
pub struct Events {
    store: Arc<OpenStore>,
    changes: Changes,
    keys: Vec<Key>,
}

impl Store {
    /// Subscribes to the events of the store, also of those that other processes cause. The first
    /// [`Events::poll`] asks for a snapshot.
    ///
    /// ```
    /// use std::collections::HashSet;
    /// use kvferry_store::{Event, Events, Key, Polled};
    ///
    /// /// Brings a set of the blocks that are in the store up to date.
    /// fn follow(events: &mut Events, here: &mut HashSet<Key>) -> kvferry_store::Result<()> {
    ///     loop {
    ///         let mut new = Vec::new();
    ///         let polled = events.poll(1000, &mut new)?;
    ///         for event in new {
    ///             match event {
    ///                 Event::Stored(key) => here.insert(key),
    ///                 Event::Removed(key) => here.remove(&key),
    ///             };
    ///         }
    ///         match polled {
    ///             Polled::All => return Ok(()),
    ///             Polled::More => {}
    ///             Polled::Lost => *here = events.snapshot().collect(),
    ///         }
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// `Closed`.
    pub fn events(&self) -> Result<Events> {
        let store = Arc::clone(self.inner());
        store.check()?;
        let changes = store.core.member.subscribe();
        Ok(Events { store, changes, keys: Vec::new() })
    }
}

impl Events {
    /// Appends the next events to `out`, `max` at most. Never waits.
    ///
    /// # Errors
    /// `Closed`.
    pub fn poll(&mut self, max: usize, out: &mut Vec<Event>) -> Result<Polled> {
        self.store.check()?;
        let member = &self.store.core.member;
        self.keys.clear();
        let polled = member.poll(&mut self.changes, max, &mut self.keys);
        out.extend(self.keys.iter().map(|key| match member.find(key) {
            Some(_) => Event::Stored(*key),
            None => Event::Removed(*key),
        }));
        Ok(match polled {
            index::Polled::All => Polled::All,
            index::Polled::More => Polled::More,
            index::Polled::Lost => Polled::Lost,
        })
    }

    /// The blocks that are in the store.
    pub fn snapshot(&self) -> impl Iterator<Item = Key> + '_ {
        self.store.core.member.snapshot()
    }

    /// Waits until there are events. False if `timeout` passed first.
    ///
    /// # Errors
    /// `Closed`, also when the store is closed meanwhile.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let is_over = || self.store.check().is_err();
        let is_changed = self.store.core.member.wait_changed(&self.changes, timeout, is_over);
        self.store.check().map(|()| is_changed)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // A forked child's is its parent's.
        if !self.store.is_forked() {
            self.store.core.member.unsubscribe(&self.changes);
        }
    }
}
