//! Watches blocks by their names: what an engine tells a router of the blocks that it has stored or found.
//!
//! The index knows the first 16 bytes of a block's hash, mixed with its namespace, and an engine's block may be stored
//! in several parts, one for each rank. A [`Watch`] is told the hashes that its engine knows, and says when the last
//! part of such a block has come to the disk, and when the first part has left it: each once, by turns.
//!
//! One thread gathers ([`Watch::gather`]); others add names and take reports, and never wait for more than a short
//! batch of the one that gathers.
//!
//! # Bounds
//! A name is kept while its block is in the store. Of those whose block has not come, the last 65 536 are kept. Reports
//! wait until they are taken: two for each name that was added, at most.

use crate::error::{Error, Result};
use crate::index::{Changes, Polled};
use crate::key::{Identity, Key, stem};
use crate::store::{Inner, Space, Store};
use crate::sync::lock;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Names whose blocks have not come.
const EXPECTED_MAX: usize = 1 << 16;
/// Changes that are looked at while the names are locked.
const BATCH: usize = 256;
/// Batches until reports are told of, though more changes come.
const BATCHES: usize = 64;
/// After the first change, the thread that gathers waits for others, so that a run of them costs one wake-up. A report
/// is late by as much.
const GATHER_FOR: Duration = Duration::from_millis(20);
/// What a report of a stored block counts for in [`Watch::take`]: to publish one takes an engine longer than a removal.
const STORED_COST: usize = 8;

/// Blocks of one group that were stored, or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The group's number in [`Store::watch`].
    pub group: u32,
    /// They have left the store; else they have come.
    pub is_removed: bool,
    /// Their hashes, as they were added.
    pub hashes: Vec<Box<[u8]>>,
}

/// Watches blocks by their names. See [`Store::watch`].
#[derive(Debug)]
pub struct Watch {
    store: Arc<Inner>,
    /// Before `names` where both are locked.
    reader: Mutex<Reader>,
    names: Mutex<Names>,
}

#[derive(Debug)]
struct Reader {
    changes: Changes,
    keys: Vec<Key>,
}

#[derive(Debug, Default)]
struct Names {
    groups: Vec<Group>,
    reports: VecDeque<(u32, bool, Box<[u8]>)>,
    /// Names whose blocks have not come, by [`Name::number`].
    expected: BTreeMap<u64, (u32, Stem)>,
    added: u64,
    /// Names that are to be looked up, as changes were lost.
    unsure: VecDeque<(u32, Stem)>,
}

#[derive(Debug)]
struct Group {
    /// Of the parts of a block.
    parts: Vec<Identity>,
    names: FxHashMap<Stem, Name>,
}

/// The part of a hash that is in the index.
type Stem = [u64; 2];

#[derive(Debug)]
struct Name {
    hash: Box<[u8]>,
    /// It was reported as stored.
    is_here: bool,
    /// Counts the names that were added: the same name may come, leave and be added again.
    number: u64,
}

impl Store {
    /// Watches blocks: of each group those that are in all of its spaces. No block is watched until it is
    /// [added](Watch::add).
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a space of another store.
    pub fn watch(&self, groups: &[Vec<Space>]) -> Result<Watch> {
        let store = Arc::clone(self.inner());
        store.check()?;
        let groups = groups_of(&store, groups)?;
        let reader = Reader { changes: store.core.member.subscribe(), keys: Vec::new() };
        let names = Names { groups, ..Names::default() };
        Ok(Watch { store, reader: Mutex::new(reader), names: Mutex::new(names) })
    }
}

fn groups_of(store: &Arc<Inner>, groups: &[Vec<Space>]) -> Result<Vec<Group>> {
    let group = |spaces: &Vec<Space>| {
        if !spaces.iter().all(|space| Arc::ptr_eq(&space.store, store)) {
            return Err(Error::InvalidArgument("a space is of another store".into()));
        }
        let parts = spaces.iter().map(|space| space.identity.clone()).collect();
        Ok(Group { parts, names: FxHashMap::default() })
    };
    groups.iter().map(group).collect()
}

impl Watch {
    /// Watches blocks of a group. Those that are in the store are reported at once, the others when they come. Blocks
    /// that are watched already cost a look-up in a table.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a group that does not exist, or a hash that is too short or too long.
    pub fn add<H: AsRef<[u8]>>(&self, group: u32, hashes: &[H]) -> Result<()> {
        self.store.check()?;
        for hash in hashes {
            Identity::check_hash(hash.as_ref())?;
        }
        let names = &mut *lock(&self.names);
        let Some(known) = names.groups.get_mut(group as usize) else {
            return Err(Error::InvalidArgument(format!("there is no group {group}")));
        };
        let mut new = Vec::new();
        for hash in hashes {
            let stem = stem(hash.as_ref());
            known.names.entry(stem).or_insert_with(|| {
                names.added += 1;
                new.push((stem, names.added));
                Name { hash: hash.as_ref().into(), is_here: false, number: names.added }
            });
        }
        for (stem, number) in new {
            names.judge(&self.store, group, stem);
            if names.groups[group as usize].names.get(&stem).is_some_and(|name| !name.is_here) {
                names.expected.insert(number, (group, stem));
            }
        }
        while names.expected.len() > EXPECTED_MAX
            && let Some((_, (group, stem))) = names.expected.pop_first()
        {
            names.groups[group as usize].names.remove(&stem);
        }
        Ok(())
    }

    /// Waits for changes of the store and turns them into reports. Returns how many were made: 0 if `timeout` passed
    /// first. For a thread of its own.
    ///
    /// # Errors
    /// `Closed`, also when the store is closed meanwhile.
    pub fn gather(&self, timeout: Duration) -> Result<usize> {
        self.store.check()?;
        let until = Instant::now().checked_add(timeout);
        let reader = &mut *lock(&self.reader);
        loop {
            let (made, is_all) = self.read(reader)?;
            let left = until.map_or(timeout, |it| it.saturating_duration_since(Instant::now()));
            if made > 0 || left.is_zero() {
                return Ok(made);
            }
            if !is_all {
                continue;
            }
            let is_over = || self.store.check().is_err();
            if self.store.core.member.wait_changed(&reader.changes, left, is_over) {
                std::thread::sleep(GATHER_FOR);
            }
        }
    }

    /// Takes reports in their order, the oldest first: of removed blocks `budget` at most, of stored ones an eighth of
    /// it. None in a forked child.
    pub fn take(&self, budget: usize) -> Vec<Report> {
        if self.store.is_forked() {
            // A thread of the parent may have held the lock at the fork.
            return Vec::new();
        }
        let names = &mut *lock(&self.names);
        let (mut taken, mut left): (Vec<Report>, _) = (Vec::new(), budget);
        while let Some((_, is_removed, _)) = names.reports.front() {
            let cost = if *is_removed { 1 } else { STORED_COST };
            if cost > left {
                break;
            }
            left -= cost;
            let Some((group, is_removed, hash)) = names.reports.pop_front() else { break };
            match taken.last_mut() {
                Some(last) if (last.group, last.is_removed) == (group, is_removed) => {
                    last.hashes.push(hash);
                }
                _ => taken.push(Report { group, is_removed, hashes: vec![hash] }),
            }
        }
        taken
    }

    /// Reports that wait to be taken. 0 in a forked child.
    pub fn reports(&self) -> usize {
        if self.store.is_forked() {
            return 0;
        }
        lock(&self.names).reports.len()
    }

    /// Watches other groups. All blocks that were reported as stored are reported as removed.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a space of another store.
    pub fn reset(&self, groups: &[Vec<Space>]) -> Result<()> {
        self.store.check()?;
        let groups = groups_of(&self.store, groups)?;
        let names = &mut *lock(&self.names);
        let before = std::mem::replace(&mut names.groups, groups);
        for (number, group) in (0..).zip(before) {
            let here = group.names.into_values().filter(|name| name.is_here);
            names.reports.extend(here.map(|name| (number, true, name.hash)));
        }
        names.expected.clear();
        names.unsure.clear();
        Ok(())
    }

    /// Turns changes into reports. Returns how many, and whether these were all.
    fn read(&self, reader: &mut Reader) -> Result<(usize, bool)> {
        let mut made = 0;
        for _ in 0..BATCHES {
            self.store.check()?;
            reader.keys.clear();
            let polled = self.store.core.member.poll(&mut reader.changes, BATCH, &mut reader.keys);
            let names = &mut *lock(&self.names);
            let before = names.reports.len();
            if polled == Polled::Lost {
                names.doubt_all();
            }
            for key in &reader.keys {
                names.judge_key(&self.store, key);
            }
            for _ in 0..BATCH {
                let Some((group, stem)) = names.unsure.pop_front() else { break };
                names.judge(&self.store, group, stem);
            }
            made += names.reports.len() - before;
            if polled == Polled::All && names.unsure.is_empty() {
                return Ok((made, true));
            }
        }
        Ok((made, false))
    }
}

impl Names {
    /// Looks a block up, and reports it if it has come or gone.
    fn judge(&mut self, store: &Inner, group: u32, stem: Stem) {
        let Some(known) = self.groups.get_mut(group as usize) else { return };
        let Some(name) = known.names.get_mut(&stem) else { return };
        let is_here = |part: &Identity| store.core.member.find(&part.key_of(stem)).is_some();
        let is_here = !known.parts.is_empty() && known.parts.iter().all(is_here);
        if is_here && !name.is_here {
            name.is_here = true;
            self.expected.remove(&name.number);
            self.reports.push_back((group, false, name.hash.clone()));
        } else if !is_here && name.is_here {
            let name = known.names.remove(&stem).expect("found above");
            self.reports.push_back((group, true, name.hash));
        }
    }

    /// Looks the blocks up that a key may be a part of.
    fn judge_key(&mut self, store: &Inner, key: &Key) {
        for group in 0..self.groups.len() {
            for part in 0..self.groups[group].parts.len() {
                let stem = self.groups[group].parts[part].stem_of(key);
                if self.groups[group].names.contains_key(&stem) {
                    self.judge(store, u32::try_from(group).unwrap_or(u32::MAX), stem);
                }
            }
        }
    }

    fn doubt_all(&mut self) {
        self.unsure.clear();
        for (number, group) in (0..).zip(&self.groups) {
            self.unsure.extend(group.names.keys().map(|stem| (number, *stem)));
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A forked child's is its parent's.
        if !self.store.is_forked() {
            self.store.core.member.unsubscribe(&lock(&self.reader).changes);
        }
    }
}
