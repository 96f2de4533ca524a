//! What the disks of recorded stores have, and what a loss of power or a kill leaves of that.
//!
//! A file's bytes and length are durable once a sync of the file that began after they were written has ended. Its
//! name is durable once a sync of its directory that began after it was made has ended; so is a directory's. All
//! else is there or not, independently of each other; sectors of a write, too. Changes of one name have an order. After
//! a sync that failed, later ones do not cover what it should have covered.

use super::recorder::Event;
use crate::fault_points::Op;
use fastrand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Size of a sector, which a device writes whole or not at all.
const SECTOR_BYTES: usize = 512;

#[derive(Clone, Debug)]
pub(super) struct World {
    root: PathBuf,
    files: Vec<File>,
    /// Names that survive, and all names.
    durable: BTreeMap<PathBuf, Node>,
    names: BTreeMap<PathBuf, Node>,
    /// Changes of names that a sync does not cover, with their steps.
    renamed: Vec<(usize, NameChange)>,
    /// Steps that have begun and not ended, with what a sync would cover.
    under_way: BTreeMap<usize, UnderWay>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Directory,
    File(usize),
}

#[derive(Clone, Debug, Default)]
struct File {
    durable: Vec<u8>,
    /// Bytes that a read returns.
    seen: Vec<u8>,
    /// The length that was asked for: not durable before the first sync.
    len: usize,
    has_len: bool,
    writes: Vec<Write>,
}

#[derive(Clone, Debug)]
struct Write {
    step: usize,
    has_ended: bool,
    /// A sync has failed that should have written it: later ones do not.
    is_lost: bool,
    pieces: Arc<Vec<(u64, Vec<u8>)>>,
}

#[derive(Clone, Debug)]
struct NameChange {
    has_ended: bool,
    names: Vec<(PathBuf, Option<Node>)>,
}

#[derive(Clone, Debug)]
enum UnderWay {
    Write(usize),
    Names,
    Sync { file: usize, covers: BTreeSet<usize> },
    SyncDirectory(BTreeSet<usize>),
}

impl World {
    /// The files below `root` as they are, all durable.
    pub(super) fn of(root: &Path) -> io::Result<Self> {
        let mut world = Self {
            root: root.to_path_buf(),
            files: Vec::new(),
            durable: BTreeMap::new(),
            names: BTreeMap::new(),
            renamed: Vec::new(),
            under_way: BTreeMap::new(),
        };
        world.load(root)?;
        world.names = world.durable.clone();
        Ok(world)
    }

    fn load(&mut self, path: &Path) -> io::Result<()> {
        for entry in fs::read_dir(path)? {
            let path = entry?.path();
            if path.is_dir() {
                self.durable.insert(path.clone(), Node::Directory);
                self.load(&path)?;
            } else {
                let bytes = fs::read(&path)?;
                let file = File {
                    len: bytes.len(),
                    has_len: true,
                    seen: bytes.clone(),
                    durable: bytes,
                    writes: vec![],
                };
                self.durable.insert(path, Node::File(self.files.len()));
                self.files.push(file);
            }
        }
        Ok(())
    }

    pub(super) fn advance(&mut self, event: &Event) {
        match event {
            Event::Begin(step, op) => self.begin(*step, op),
            Event::End(step, is_ok) => self.end(*step, *is_ok),
            Event::Note(_) => {}
        }
    }

    fn begin(&mut self, step: usize, op: &Op) {
        let under_way = match op {
            Op::MakeDirectory(path) => {
                let above = path.ancestors().take_while(|it| *it != self.root);
                let new: Vec<_> = above.filter(|it| !self.names.contains_key(*it)).collect();
                let new = new.into_iter().map(|it| (it.to_path_buf(), Some(Node::Directory)));
                let new: Vec<_> = new.collect();
                // Each by itself: they are in different directories.
                for (at, it) in new.into_iter().enumerate() {
                    // Numbers of their own, which no step has.
                    self.rename(usize::MAX - step * 16 - at, vec![it], true);
                }
                return;
            }
            Op::Create { path, len } => {
                let len = usize::try_from(*len).expect("short");
                self.files.push(File { len, seen: vec![0; len], ..File::default() });
                let node = Node::File(self.files.len() - 1);
                self.rename(step, vec![(path.clone(), Some(node))], false);
                UnderWay::Names
            }
            Op::Remove(path) => {
                self.rename(step, vec![(path.clone(), None)], false);
                UnderWay::Names
            }
            Op::Rename { from, to } => {
                let node = self.names.get(from).copied();
                self.rename(step, vec![(from.clone(), None), (to.clone(), node)], false);
                UnderWay::Names
            }
            Op::Write { path, pieces } => {
                let Some(file) = self.file(path) else { return };
                let pieces = Arc::new(pieces.clone());
                self.files[file].writes.push(Write {
                    step,
                    has_ended: false,
                    is_lost: false,
                    pieces,
                });
                UnderWay::Write(file)
            }
            Op::Sync(path) => {
                let Some(file) = self.file(path) else { return };
                let ended = self.files[file].writes.iter().filter(|it| it.has_ended && !it.is_lost);
                UnderWay::Sync { file, covers: ended.map(|it| it.step).collect() }
            }
            Op::SyncDirectory(path) => {
                let is_here = |change: &NameChange| {
                    change.names.iter().any(|(name, _)| name.parent() == Some(path))
                };
                let ended = self.renamed.iter().filter(|(_, it)| it.has_ended && is_here(it));
                UnderWay::SyncDirectory(ended.map(|(step, _)| *step).collect())
            }
            Op::Open { .. } | Op::Read(_) | Op::SyncSegment(_) | Op::Evicted(..) => return,
        };
        self.under_way.insert(step, under_way);
    }

    fn rename(&mut self, step: usize, names: Vec<(PathBuf, Option<Node>)>, has_ended: bool) {
        apply(&mut self.names, &names);
        self.renamed.push((step, NameChange { has_ended, names }));
    }

    fn end(&mut self, step: usize, is_ok: bool) {
        match self.under_way.remove(&step) {
            None => {}
            Some(UnderWay::Write(file)) => {
                let file = &mut self.files[file];
                let write = file.writes.iter_mut().find(|it| it.step == step);
                let write = write.expect("a sync covers writes that have ended");
                // One that has failed may be anything until it is written again.
                write.has_ended = is_ok;
                write_to(&mut file.seen, &write.pieces, |_| true);
            }
            Some(UnderWay::Names) => {
                let change = self.renamed.iter_mut().find(|(it, _)| *it == step);
                change.expect("a sync covers what has ended").1.has_ended = true;
            }
            Some(UnderWay::Sync { file, covers }) if is_ok => {
                let file = &mut self.files[file];
                file.durable.resize(file.len, 0);
                file.has_len = true;
                let is_covered = |it: &Write| covers.contains(&it.step);
                for write in file.writes.iter().filter(|it| is_covered(it)) {
                    write_to(&mut file.durable, &write.pieces, |_| true);
                }
                file.writes.retain(|it| !is_covered(it));
                file.len = file.durable.len();
            }
            Some(UnderWay::Sync { file, covers }) => {
                let writes = &mut self.files[file].writes;
                writes
                    .iter_mut()
                    .filter(|it| covers.contains(&it.step))
                    .for_each(|it| it.is_lost = true);
            }
            Some(UnderWay::SyncDirectory(covers)) if is_ok => {
                for (_, change) in self.renamed.iter().filter(|(it, _)| covers.contains(it)) {
                    apply(&mut self.durable, &change.names);
                }
                self.renamed.retain(|(it, _)| !covers.contains(it));
            }
            Some(_) => {}
        }
    }

    fn file(&self, path: &Path) -> Option<usize> {
        match self.names.get(path) {
            Some(Node::File(file)) => Some(*file),
            _ => None,
        }
    }

    /// Makes the files at another folder as they may be if the power fails now.
    pub(super) fn power_cut(&self, rng: &mut Rng, to: &Path) -> io::Result<()> {
        // Some cuts leave nearly all, some nearly nothing.
        let loss = rng.u32(0..=100);
        let mut names = self.durable.clone();
        for name in self.changed_names() {
            // Changes of a name, and of those that it was renamed from, are carried out in order.
            let changes = self.renamed.iter().filter(|(_, it)| it.group() == name);
            for (_, change) in changes.take_while(|_| rng.u32(0..100) >= loss) {
                apply(&mut names, &change.names);
            }
        }
        self.build(&names, to, |file| file.power_cut(loss, rng))
    }

    fn changed_names(&self) -> BTreeSet<PathBuf> {
        self.renamed.iter().map(|(_, it)| it.group()).collect()
    }

    /// Makes the files at another folder as they are if all processes are killed now.
    pub(super) fn kill(&self, rng: &mut Rng, to: &Path) -> io::Result<()> {
        self.build(&self.names, to, |file| {
            let mut bytes = file.seen.clone();
            for write in file.writes.iter().filter(|it| !it.has_ended) {
                let share = rng.u32(0..=100);
                write_to(&mut bytes, &write.pieces, |_| rng.u32(0..100) < share);
            }
            bytes
        })
    }

    /// Like [`World::kill`]; returns the world that later processes find. Bytes and names that were not durable still
    /// are not.
    pub(super) fn kill_and_go_on(&self, rng: &mut Rng, to: &Path) -> io::Result<Self> {
        self.kill(rng, to)?;
        let moved = |name: &PathBuf| to.join(name.strip_prefix(&self.root).expect("below it"));
        let rebased = |names: &BTreeMap<PathBuf, Node>| {
            names.iter().map(|(name, node)| (moved(name), *node)).collect::<BTreeMap<_, _>>()
        };
        let mut world = Self {
            root: to.to_path_buf(),
            durable: rebased(&self.durable),
            names: rebased(&self.names),
            under_way: BTreeMap::new(),
            ..self.clone()
        };
        // Steps of later processes have other numbers.
        for (at, (step, change)) in world.renamed.iter_mut().enumerate() {
            (*step, change.has_ended) = (usize::MAX / 2 + at, true);
            change.names.iter_mut().for_each(|(name, _)| *name = moved(name));
        }
        for (name, node) in &world.names {
            if let Node::File(file) = node {
                world.files[*file].seen = fs::read(name)?;
            }
        }
        for file in &mut world.files {
            for (at, write) in file.writes.iter_mut().enumerate() {
                write.step = usize::MAX / 2 + at;
                if !write.has_ended {
                    // What it had written is as good as of a whole write; the rest is never written.
                    let seen = |(at, bytes): &(u64, Vec<u8>)| {
                        let from = usize::try_from(*at).expect("short");
                        (*at, file.seen[from..from + bytes.len()].to_vec())
                    };
                    write.pieces = Arc::new(write.pieces.iter().map(seen).collect());
                    write.has_ended = true;
                }
            }
        }
        Ok(world)
    }

    fn build(
        &self,
        names: &BTreeMap<PathBuf, Node>,
        to: &Path,
        mut bytes: impl FnMut(&File) -> Vec<u8>,
    ) -> io::Result<()> {
        let _ = fs::remove_dir_all(to);
        fs::create_dir_all(to)?;
        // A directory comes before what is in it.
        for (name, node) in names {
            let is_reached = name.ancestors().skip(1).take_while(|it| *it != self.root);
            if !is_reached.into_iter().all(|it| names.get(it) == Some(&Node::Directory)) {
                continue;
            }
            let path = to.join(name.strip_prefix(&self.root).expect("below it"));
            match node {
                Node::Directory => fs::create_dir(path)?,
                Node::File(file) => fs::write(path, bytes(&self.files[*file]))?,
            }
        }
        Ok(())
    }
}

impl NameChange {
    /// The superblock's two names change together.
    fn group(&self) -> PathBuf {
        let name = &self.names[0].0;
        match name.extension() {
            Some(it) if it == "new" => name.with_extension(""),
            _ => name.clone(),
        }
    }
}

impl File {
    fn power_cut(&self, loss: u32, rng: &mut Rng) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        let has_len = self.has_len || rng.u32(0..100) >= loss;
        if has_len {
            bytes.resize(bytes.len().max(self.len), 0);
        }
        let mut writes: Vec<_> = self.writes.iter().collect();
        rng.shuffle(&mut writes);
        for write in writes {
            if rng.u32(0..100) < loss {
                let share = rng.u32(0..=100) * u32::from(rng.bool());
                write_to(&mut bytes, &write.pieces, |_| rng.u32(0..100) < share);
            } else {
                write_to(&mut bytes, &write.pieces, |_| true);
            }
        }
        if !has_len {
            // An empty file, or the beginning of one.
            bytes.truncate(rng.usize(0..=bytes.len()) * usize::from(rng.bool()));
        }
        bytes
    }
}

fn apply(names: &mut BTreeMap<PathBuf, Node>, changes: &[(PathBuf, Option<Node>)]) {
    for (name, node) in changes {
        match node {
            Some(node) => names.insert(name.clone(), *node),
            None => names.remove(name),
        };
    }
}

fn write_to(file: &mut Vec<u8>, pieces: &[(u64, Vec<u8>)], mut keeps: impl FnMut(usize) -> bool) {
    for (at, bytes) in pieces {
        let at = usize::try_from(*at).expect("short");
        for (sector, from) in bytes.chunks(SECTOR_BYTES).enumerate() {
            let at = at + sector * SECTOR_BYTES;
            if keeps(sector) {
                file.resize(file.len().max(at + from.len()), 0);
                file[at..at + from.len()].copy_from_slice(from);
            }
        }
    }
}
