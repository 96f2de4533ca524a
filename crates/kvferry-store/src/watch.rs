//! Watches blocks by their names, so that an engine can report the blocks that it has stored or found to a router.
//!
//! The index knows the first 16 bytes of a block's hash, mixed with its namespace, and an engine's block may be stored
//! in several parts, one for each rank. A [`Watch`] gets the hashes that its engine knows, and reports when the last
//! part of such a block has come to the disk, and when the first part has left it: each once, by turns.
//!
//! A block of which a part is in a directory that hangs, or was lost to this process, counts as one that has left: a
//! get misses it. It has come again once the directory answers. [`Watch::gather`] notices within about a second.
//!
//! # Which directories answer
//! A directory begins and ceases to hang whenever it is asked. So all names are judged by one list, [`Names::silent`],
//! that changes in one place only, and after each change all names are judged again.
//!
//! One thread gathers ([`Watch::gather`]); others add names and take reports, and never wait for more than a short
//! batch of the one that gathers.
//!
//! # Bounds
//! A name is kept while its block is in the store. Of those whose block has not come, the last 65 536 are kept. Reports
//! wait until they are taken: two for each name that was added, and one more for each name that is kept, at most. A
//! directory that begins or ceases to hang is not noticed while more reports wait than names are kept.

use crate::error::{Error, Result};
use crate::index::{Changes, Polled};
use crate::key::{Identity, Key, stem};
use crate::open_store::OpenStore;
use crate::space::Space;
use crate::store::Store;
use kvferry_sys::sync::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Names whose blocks have not come.
const EXPECTED_MAX: usize = 1 << 16;
/// Changes that are looked at while the names are locked.
const BATCH: usize = 256;
/// Batches after which reports are announced, although more changes come.
const BATCHES: usize = 64;
/// Time for which the gathering thread waits after the first change, so that a run of changes costs one wake-up. A
/// report is late by as much.
const GATHER_FOR: Duration = Duration::from_millis(20);
/// Cost of a report of a stored block in [`Watch::take`]: to publish one takes an engine longer than a removal.
const STORED_COST: usize = 8;

/// Blocks of one group that were stored, or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The group's number in [`Store::watch`].
    pub group: u32,
    /// True if the blocks have left the store, false if they have come.
    pub is_removed: bool,
    /// Hashes of the blocks, as they were added.
    pub hashes: Vec<Box<[u8]>>,
}

/// Watches blocks by their names. See [`Store::watch`].
#[derive(Debug)]
pub struct Watch {
    store: Arc<OpenStore>,
    /// Locked before `names` where both are locked.
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
    reports: Reports,
    /// Names whose blocks have not come, by [`Absent::number`].
    expected: BTreeMap<u64, (u32, Stem)>,
    added: u64,
    /// Whether gets miss the blocks of a directory because it hangs or is lost, by the directory's number.
    silent: Vec<bool>,
    /// Place from which on all names are to be looked up, as changes were lost.
    unsure: Option<Unsure>,
}

/// Watched blocks. The maps have an order, so that all of them can be looked at in batches.
#[derive(Debug)]
struct Group {
    /// Identities of the parts of a block.
    parts: Vec<Identity>,
    /// The hashes of those that were reported as stored.
    here: BTreeMap<Stem, Box<[u8]>>,
    /// The hashes of those that are in the store, and of which a part is in a directory that is silent. They are not
    /// reported as stored.
    unread: BTreeMap<Stem, Box<[u8]>>,
    absent: BTreeMap<Stem, Absent>,
}

/// A place in the names of all groups.
#[derive(Debug, Default)]
struct Unsure {
    group: u32,
    kind: Kind,
    /// The last name that was looked up. `None`: the first one is next.
    last: Option<Stem>,
}

/// State of a watched block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Absent,
    Unread,
    Here,
}

/// The part of a hash that is in the index.
type Stem = [u64; 2];

/// A block that has not come.
#[derive(Debug)]
struct Absent {
    hash: Box<[u8]>,
    /// Counts the names that were added: the same name may come, leave and be added again.
    number: u64,
}

/// Reports that wait to be read, in order.
#[derive(Debug, Default)]
struct Reports {
    queue: VecDeque<Reported>,
    len: usize,
}

#[derive(Debug)]
enum Reported {
    Block {
        group: u32,
        is_removed: bool,
        hash: Box<[u8]>,
    },
    /// Removal of all blocks in `here`, because their group is not watched any more.
    Group {
        group: u32,
        here: BTreeMap<Stem, Box<[u8]>>,
    },
}

impl Reports {
    fn push(&mut self, group: u32, is_removed: bool, hash: Box<[u8]>) {
        self.queue.push_back(Reported::Block { group, is_removed, hash });
        self.len += 1;
    }

    fn push_group(&mut self, group: u32, here: BTreeMap<Stem, Box<[u8]>>) {
        if here.is_empty() {
            return;
        }
        self.len += here.len();
        self.queue.push_back(Reported::Group { group, here });
    }

    /// The oldest one, whose cost is taken from `budget`. `None` if it costs more.
    fn pop(&mut self, budget: &mut usize) -> Option<(u32, bool, Box<[u8]>)> {
        let popped = loop {
            let is_removed = match self.queue.front()? {
                Reported::Block { is_removed, .. } => *is_removed,
                Reported::Group { .. } => true,
            };
            let left = budget.checked_sub(if is_removed { 1 } else { STORED_COST })?;
            if let Some(Reported::Group { group, here }) = self.queue.front_mut()
                && let Some((_, hash)) = here.pop_first()
            {
                *budget = left;
                break (*group, true, hash);
            }
            if let Some(Reported::Block { group, is_removed, hash }) = self.queue.pop_front() {
                *budget = left;
                break (group, is_removed, hash);
            }
        };
        self.len -= 1;
        Some(popped)
    }
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
        let names = Names { groups, silent: store.core.disk.silent(), ..Names::default() };
        Ok(Watch { store, reader: Mutex::new(reader), names: Mutex::new(names) })
    }
}

fn groups_of(store: &Arc<OpenStore>, groups: &[Vec<Space>]) -> Result<Vec<Group>> {
    let group = |spaces: &Vec<Space>| {
        if !spaces.iter().all(|space| Arc::ptr_eq(&space.store, store)) {
            return Err(Error::InvalidArgument("a space is of another store".into()));
        }
        let parts = spaces.iter().map(|space| space.identity.clone()).collect();
        let (here, unread) = (BTreeMap::new(), BTreeMap::new());
        Ok(Group { parts, here, unread, absent: BTreeMap::new() })
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
        let names = &mut *self.names.lock();
        let Some(known) = names.groups.get_mut(group as usize) else {
            return Err(Error::InvalidArgument(format!("there is no group {group}")));
        };
        let mut new = Vec::new();
        for hash in hashes {
            let stem = stem(hash.as_ref());
            if known.here.contains_key(&stem) || known.unread.contains_key(&stem) {
                continue;
            }
            known.absent.entry(stem).or_insert_with(|| {
                names.added += 1;
                new.push((stem, names.added));
                Absent { hash: hash.as_ref().into(), number: names.added }
            });
        }
        for (stem, number) in new {
            names.judge(&self.store, group, stem);
            if names.groups[group as usize].absent.contains_key(&stem) {
                names.expected.insert(number, (group, stem));
            }
        }
        while names.expected.len() > EXPECTED_MAX
            && let Some((_, (group, stem))) = names.expected.pop_first()
        {
            names.groups[group as usize].absent.remove(&stem);
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
        let reader = &mut *self.reader.lock();
        loop {
            let (made, is_all) = self.read(reader)?;
            let left = until.map_or(timeout, |it| it.saturating_duration_since(Instant::now()));
            if made > 0 || left.is_zero() {
                return Ok(made);
            }
            if !is_all {
                continue;
            }
            let is_over =
                || self.store.check().is_err() || self.names.lock().heard(&self.store).is_some();
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
        let names = &mut *self.names.lock();
        let (mut taken, mut left): (Vec<Report>, _) = (Vec::new(), budget);
        while let Some((group, is_removed, hash)) = names.reports.pop(&mut left) {
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
        self.names.lock().reports.len
    }

    /// Watches other groups. All blocks that were reported as stored are reported as removed.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a space of another store.
    pub fn reset(&self, groups: &[Vec<Space>]) -> Result<()> {
        self.store.check()?;
        let groups = groups_of(&self.store, groups)?;
        let mut forgotten = Vec::new();
        let mut names = self.names.lock();
        let before = std::mem::replace(&mut names.groups, groups);
        for (number, group) in (0..).zip(before) {
            names.reports.push_group(number, group.here);
            forgotten.push((group.absent, group.unread));
        }
        let expected = std::mem::take(&mut names.expected);
        names.unsure = None;
        // To drop many takes time: without the lock.
        drop(names);
        drop((forgotten, expected));
        Ok(())
    }

    /// Turns changes into reports. Returns how many, and whether these were all.
    fn read(&self, reader: &mut Reader) -> Result<(usize, bool)> {
        let mut made = 0;
        for _ in 0..BATCHES {
            self.store.check()?;
            reader.keys.clear();
            let polled = self.store.core.member.poll(&mut reader.changes, BATCH, &mut reader.keys);
            let names = &mut *self.names.lock();
            let before = names.reports.len;
            if polled == Polled::Lost {
                names.unsure = Some(Unsure::default());
            }
            if let Some(silent) = names.heard(&self.store) {
                names.silent = silent;
                names.unsure = Some(Unsure::default());
            }
            for key in &reader.keys {
                names.judge_key(&self.store, key);
            }
            for (group, stem) in names.next_unsure() {
                names.judge(&self.store, group, stem);
            }
            made += names.reports.len - before;
            if polled == Polled::All && names.unsure.is_none() {
                return Ok((made, true));
            }
        }
        Ok((made, false))
    }
}

impl Names {
    /// Returns which directories are silent, if that has changed and all names can be judged again.
    fn heard(&self, store: &OpenStore) -> Option<Vec<bool>> {
        let silent = store.core.disk.silent();
        (silent != self.silent && self.has_room()).then_some(silent)
    }

    fn has_room(&self) -> bool {
        let kept = |it: &Group| it.here.len() + it.unread.len() + it.absent.len();
        self.reports.len <= self.groups.iter().map(kept).sum()
    }

    /// Looks up a block that is in these parts.
    fn look(&self, store: &OpenStore, parts: &[Identity], stem: Stem) -> Kind {
        let core = &store.core;
        let mut kind = if parts.is_empty() { Kind::Absent } else { Kind::Here };
        for part in parts {
            let Some(entry) = core.member.find(&part.key_of(stem)) else { return Kind::Absent };
            if self.silent[core.directory_of(&entry)] {
                kind = Kind::Unread;
            }
        }
        kind
    }

    /// Looks a block up, and reports it if it has come or gone.
    fn judge(&mut self, store: &OpenStore, group: u32, stem: Stem) {
        let Some(known) = self.groups.get(group as usize) else { return };
        let Some(was) = known.kind_of(&stem) else { return };
        let is = self.look(store, &known.parts, stem);
        if is == was {
            return;
        }
        let known = &mut self.groups[group as usize];
        let hash = match was {
            Kind::Here => known.here.remove(&stem),
            Kind::Unread => known.unread.remove(&stem),
            Kind::Absent => known.absent.remove(&stem).map(|Absent { hash, number }| {
                self.expected.remove(&number);
                hash
            }),
        };
        let hash = hash.expect("it is of that kind");
        match is {
            Kind::Here => _ = known.here.insert(stem, hash.clone()),
            Kind::Unread => _ = known.unread.insert(stem, hash.clone()),
            // What has left is forgotten.
            Kind::Absent => {}
        }
        if is == Kind::Here || was == Kind::Here {
            self.reports.push(group, was == Kind::Here, hash);
        }
    }

    /// Looks the blocks up that a key may be a part of.
    fn judge_key(&mut self, store: &OpenStore, key: &Key) {
        for group in 0..self.groups.len() {
            for part in 0..self.groups[group].parts.len() {
                let stem = self.groups[group].parts[part].stem_of(key);
                self.judge(store, u32::try_from(group).unwrap_or(u32::MAX), stem);
            }
        }
    }

    /// The next names that are to be looked up, [`BATCH`] at most.
    fn next_unsure(&mut self) -> Vec<(u32, Stem)> {
        let mut next = Vec::new();
        while next.len() < BATCH
            && let Some(Unsure { group, kind, last }) = &mut self.unsure
        {
            let Some(known) = self.groups.get(*group as usize) else {
                self.unsure = None;
                break;
            };
            let range = (last.map_or(Unbounded, Excluded), Unbounded);
            let (number, room, before) = (*group, BATCH - next.len(), next.len());
            let name = |stem: &Stem| (number, *stem);
            match *kind {
                Kind::Absent => {
                    next.extend(known.absent.range(range).take(room).map(|it| name(it.0)))
                }
                Kind::Unread => {
                    next.extend(known.unread.range(range).take(room).map(|it| name(it.0)))
                }
                Kind::Here => next.extend(known.here.range(range).take(room).map(|it| name(it.0))),
            }
            if next.len() - before == room {
                *last = next.last().map(|(_, stem)| *stem);
                continue;
            }
            *last = None;
            *group += u32::from(*kind == Kind::Here);
            *kind = match *kind {
                Kind::Absent => Kind::Unread,
                Kind::Unread => Kind::Here,
                Kind::Here => Kind::Absent,
            };
        }
        next
    }
}

impl Group {
    fn kind_of(&self, stem: &Stem) -> Option<Kind> {
        [
            (Kind::Here, self.here.contains_key(stem)),
            (Kind::Unread, self.unread.contains_key(stem)),
            (Kind::Absent, self.absent.contains_key(stem)),
        ]
        .into_iter()
        .find_map(|(kind, is_it)| is_it.then_some(kind))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A forked child's is its parent's.
        if !self.store.is_forked() {
            self.store.core.member.unsubscribe(&self.reader.lock().changes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockMemory, Namespace, Retain, StoreOptions};
    use kvferry::{Access, Agent};

    #[test]
    fn a_directory_that_comes_and_goes_makes_no_more_reports_than_three_for_each_name() {
        let folder = std::env::temp_dir().join(format!("kvferry-silent-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let agent = Agent::builder().start().expect("an agent");
        let pool = agent.allocate(100, Access::NONE).expect("memory");
        let store = Store::open(&agent, &StoreOptions::new(&folder, 64 << 20)).expect("a store");
        let space = store.space(&Namespace::new("model"));
        let watch = store.watch(&[vec![space.clone()]]).expect("open");
        let hash = [[7; 32]];
        let memory = [BlockMemory::new(&pool, 0, 100)];
        assert_eq!(space.put(&hash, 0, &memory, Retain::default()).expect("open").stored, 1);
        watch.add(0, &hash).expect("open");
        // The directory answers and hangs in turns, and no subscriber takes reports.
        for _ in 0..10 {
            for is_silent in [true, false] {
                let names = &mut *watch.names.lock();
                if names.has_room() {
                    names.silent = vec![is_silent];
                    names.judge(store.inner(), 0, stem(&hash[0]));
                }
            }
        }
        assert!((2..=3).contains(&watch.reports()), "{}", watch.reports());
        while watch.reports() > 0 {
            watch.take(usize::MAX);
            watch.gather(Duration::ZERO).expect("open");
        }
        assert!(watch.names.lock().groups[0].here.len() == 1);
        store.close();
        agent.shutdown();
        let _ = std::fs::remove_dir_all(&folder);
    }

    #[test]
    fn after_changes_were_lost_all_names_are_looked_up() {
        const LEN: usize = 100;
        const BLOCKS: usize = 2 * BATCH + 10;
        let folder = std::env::temp_dir().join(format!("kvferry-watch-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let agent = Agent::builder().start().expect("an agent");
        let pool = agent.allocate(LEN, Access::NONE).expect("memory");
        let store = Store::open(&agent, &StoreOptions::new(&folder, 64 << 20)).expect("a store");
        let spaces = ["one", "other"].map(|model| store.space(&Namespace::new(model)));
        let watch = store.watch(&spaces.each_ref().map(|it| vec![it.clone()])).expect("open");
        let memory: Vec<_> = (0..BLOCKS).map(|_| BlockMemory::new(&pool, 0, LEN as u64)).collect();
        let hashes: Vec<[u8; 32]> =
            (0..BLOCKS as u64).map(|it| *blake3::hash(&it.to_le_bytes()).as_bytes()).collect();
        // Of one group half is there and will leave, of the other one nothing is there and half will come.
        let half = BLOCKS / 2;
        let put = |space: &Space| {
            let put = space.put(&hashes[..half], 0, &memory[..half], Retain::default());
            assert_eq!(put.expect("open").stored, half);
        };
        put(&spaces[0]);
        for group in [0, 1] {
            watch.add(group, &hashes).expect("open");
        }
        let count = |is_removed: bool, group: u32| {
            let reports = watch.take(usize::MAX);
            let of: Vec<_> =
                reports.into_iter().map(|it| (it.group, it.is_removed, it.hashes.len())).collect();
            assert_eq!(of, [(group, is_removed, half)]);
        };
        let lose = || {
            let reader = &mut *watch.reader.lock();
            let member = &store.inner().core.member;
            while member.poll(&mut reader.changes, BATCH, &mut reader.keys) != Polled::All {}
            assert_eq!(watch.reports(), 0);
            watch.names.lock().unsure = Some(Unsure::default());
        };
        count(false, 0);
        put(&spaces[1]);
        lose();
        watch.gather(Duration::ZERO).expect("open");
        count(false, 1);
        let member = &store.inner().core.member;
        // The last one first: the keeper, if it looks meanwhile, frees those behind one that is missing.
        for key in spaces[0].keys(&hashes[..half]).expect("hashes").into_iter().rev() {
            assert!(member.remove(&member.find(&key).expect("it was put")));
        }
        lose();
        watch.gather(Duration::ZERO).expect("open");
        count(true, 0);
        assert!(watch.names.lock().groups[0].here.is_empty());
        store.close();
        agent.shutdown();
        let _ = std::fs::remove_dir_all(&folder);
    }
}
