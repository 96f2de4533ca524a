//! Tests of what directories are found to be.

use super::*;
use crate::log::superblock::{FILE, NEW_FILE, cut};
use crate::{BlockMemory, Namespace, Retain, Store, StoreOptions};
use kvferry::{Access, Agent};

const LEN: u64 = 64 << 10;
const BLOCKS: u64 = 60;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("kvferry-arrange-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn directories(&self) -> [PathBuf; 3] {
        ["a", "b", "c"].map(|name| self.0.join(name))
    }

    fn options(&self) -> StoreOptions {
        let [first, second, third] = self.directories();
        let options = StoreOptions::new(first, 24 << 20).segment_bytes(1 << 20);
        options.and_directory(second).and_directory(third)
    }

    /// Puts the blocks, or gets them. Returns how many were stored, or found.
    fn with_store(&self, is_put: bool) -> usize {
        let agent = Agent::builder().start().expect("an agent");
        let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
        let store = Store::open(&agent, &self.options()).expect("a store");
        let space = store.space(&Namespace::new("model"));
        let memory = [BlockMemory::new(&pool, 0, LEN)];
        let each = |block: u64| {
            let prompt = [*blake3::hash(&block.to_le_bytes()).as_bytes()];
            pool.write_at(0, &[if is_put { block as u8 } else { 0 }; 8]).expect("inside");
            match is_put {
                true => space.put(&prompt, 0, &memory, Retain::default()).expect("a put").stored,
                false => space.get(&prompt, 0, &memory).expect("a get"),
            }
        };
        let count = (0..BLOCKS).map(each).sum();
        store.close();
        count
    }

    /// Makes it what the release before would have written.
    fn downgrade(&self) {
        let [first, others @ ..] = self.directories();
        let bytes = fs::read(first.join(FILE)).expect("a superblock");
        fs::write(first.join(FILE), superblock::downgrade_bytes(&bytes)).expect("written");
        others.iter().for_each(|it| fs::remove_file(it.join(FILE)).expect("it exists"));
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn power_that_fails_at_each_step_of_an_upgrade_leaves_a_store_that_opens() {
    let folder = Folder::new("upgrade");
    assert_eq!(folder.with_store(true), BLOCKS as usize);
    for steps in 0.. {
        folder.downgrade();
        let mut arranged =
            arrange(&folder.directories(), FileOwners::Own).expect("a store of format 1");
        assert_eq!(arranged.format, 1);
        cut::after(Some(steps));
        arranged.mark();
        cut::after(None);
        // A file that was not synced may have any bytes.
        for directory in folder.directories() {
            if directory.join(NEW_FILE).exists() {
                fs::write(directory.join(NEW_FILE), [0xff; 31]).expect("written");
            }
        }
        let is_whole = arranged.directories.iter().all(|it| matches!(it.state, State::Marked));
        assert_eq!(folder.with_store(false), BLOCKS as usize, "after {steps} steps");
        let again = arrange(&folder.directories(), FileOwners::Own).expect("a store");
        assert_eq!(again.format, VERSION);
        assert!(again.directories.iter().all(|it| matches!(it.state, State::Marked)));
        if is_whole {
            assert_eq!(steps, 15, "five steps for each directory");
            return;
        }
    }
}

#[test]
fn power_that_fails_twice_while_a_store_is_made_loses_no_directory() {
    let geometry = log::Geometry::new(1 << 20).expect("in bounds");
    let (store, created_ms, directory, directories, id) = ([7; 16], 1, 0, 1, 0);
    let new = Superblock { store, geometry, created_ms, directory, directories, id };
    for (first, second) in [5, 7, 10, 15, 18, 20].into_iter().flat_map(|it| {
        let each = move |second| (it, second);
        (0..=30).map(each)
    }) {
        let folder = Folder::new("make-twice");
        folder.directories().iter().for_each(|it| fs::create_dir_all(it).expect("a folder"));
        let mut arranged = arrange(&folder.directories(), FileOwners::Own).expect("no store yet");
        cut::after(Some(first));
        assert!(arranged.make(new).is_err());
        cut::after(Some(second));
        let mut arranged = arrange(&folder.directories(), FileOwners::Own).expect("a store");
        arranged.mark();
        cut::after(None);
        let mut arranged = arrange(&folder.directories(), FileOwners::Own).expect("a store");
        let is_empty = |it: &Directory| matches!(it.state, State::Empty);
        assert!(!arranged.directories.iter().any(is_empty), "{first}, {second}");
        arranged.mark();
        let is_marked = |it: &Directory| matches!(it.state, State::Marked);
        assert!(arranged.directories.iter().all(is_marked), "{first}, {second}");
    }
}

#[test]
fn power_that_fails_at_each_step_of_an_upgrade_from_format_2_leaves_a_store_that_opens() {
    let folder = Folder::new("upgrade-2");
    assert_eq!(folder.with_store(true), BLOCKS as usize);
    for steps in 0..=15 {
        for directory in folder.directories() {
            let bytes = fs::read(directory.join(FILE)).expect("a superblock");
            fs::write(directory.join(FILE), superblock::downgrade_to_2(&bytes)).expect("written");
        }
        let mut arranged = arrange(&folder.directories(), FileOwners::Own).expect("a store");
        assert_eq!(arranged.format, 2);
        assert!(arranged.directories.iter().all(|it| matches!(it.state, State::Old)));
        cut::after(Some(steps));
        arranged.mark();
        cut::after(None);
        assert_eq!(folder.with_store(false), BLOCKS as usize, "after {steps} steps");
        let again = arrange(&folder.directories(), FileOwners::Own).expect("a store");
        assert!(again.directories.iter().all(|it| matches!(it.state, State::Marked)));
        let ids: BTreeSet<_> = again.directories.iter().map(|it| it.id).collect();
        assert_eq!(ids.len(), 3, "each directory has an id of its own");
    }
}

#[test]
fn power_that_fails_at_each_step_of_making_a_store_leaves_one_that_opens() {
    for steps in 0..=30 {
        let folder = Folder::new("make");
        folder.directories().iter().for_each(|it| fs::create_dir_all(it).expect("a folder"));
        let mut arranged = arrange(&folder.directories(), FileOwners::Own).expect("no store yet");
        let geometry = log::Geometry::new(1 << 20).expect("in bounds");
        let (directory, directories) = (0, 1);
        let store = [7; 16];
        let id = 0;
        let new = Superblock { store, geometry, created_ms: 1, directory, directories, id };
        cut::after(Some(steps));
        let made = arranged.make(new);
        cut::after(None);
        assert_eq!(made.is_ok(), steps == 30);
        assert_eq!(folder.with_store(true), BLOCKS as usize, "after {steps} steps");
        assert_eq!(folder.with_store(false), BLOCKS as usize, "after {steps} steps");
    }
}
