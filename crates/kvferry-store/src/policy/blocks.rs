//! Eight bytes per block: its run, the block before it, and how many are behind it.

use super::Slot;
use rustc_hash::FxHashMap;

/// Number of slots that can be told apart: two of the 2^31 values of a parent mean something else.
pub(super) const SLOTS_MAX: usize = (1 << 31) - 2;
/// The run of a block whose run is not formed yet.
pub(super) const PENDING: u32 = (1 << 31) - 2;

/// Predecessor of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// No predecessor: the block begins a prompt.
    Root,
    /// The block before it was removed.
    Lost,
    /// The block in this slot, known or not.
    Behind(Slot),
}

impl From<Option<Slot>> for Link {
    fn from(parent: Option<Slot>) -> Self {
        parent.map_or(Link::Root, Link::Behind)
    }
}

/// Packed fields, from the low end: two bits of children (three: see [`Blocks::many`]), 31 bits of the
/// link, 31 bits of the run. The run is stored plus one: zero means that the block is not known.
#[derive(Clone, Copy, Debug, Default)]
struct Word(u64);

const CHILDREN: u64 = 0b11;
const LINK_SHIFT: u32 = 2;
const RUN_SHIFT: u32 = 33;
const MASK: u64 = (1 << 31) - 1;

impl Word {
    fn field(self, shift: u32) -> u32 {
        u32::try_from(self.0 >> shift & MASK).expect("31 bits")
    }

    fn set_field(&mut self, shift: u32, value: u32) {
        debug_assert!(u64::from(value) <= MASK);
        self.0 = self.0 & !(MASK << shift) | u64::from(value) << shift;
    }
}

/// Blocks by slot. A slot that holds no known block may still have children: blocks that were added
/// before it, or that it left behind.
#[derive(Debug)]
pub(super) struct Blocks {
    words: Vec<Word>,
    /// The children of blocks that have three or more.
    many: FxHashMap<Slot, u32>,
    known: usize,
}

impl Blocks {
    pub(super) fn new(slots: usize) -> Self {
        let slots = slots.min(SLOTS_MAX);
        // Zeroed memory is not touched before it is used.
        Self { words: vec![Word(0); slots], many: FxHashMap::default(), known: 0 }
    }

    pub(super) fn slots(&self) -> usize {
        self.words.len()
    }

    pub(super) fn known(&self) -> usize {
        self.known
    }

    fn word(&self, slot: Slot) -> Word {
        self.words.get(slot as usize).copied().unwrap_or_default()
    }

    pub(super) fn is_known(&self, slot: Slot) -> bool {
        self.word(slot).0 >> RUN_SHIFT != 0
    }

    pub(super) fn run(&self, slot: Slot) -> Option<u32> {
        self.word(slot).field(RUN_SHIFT).checked_sub(1)
    }

    pub(super) fn set_run(&mut self, slot: Slot, run: u32) {
        self.words[slot as usize].set_field(RUN_SHIFT, run + 1);
    }

    pub(super) fn link(&self, slot: Slot) -> Link {
        match self.word(slot).field(LINK_SHIFT) {
            0 => Link::Root,
            1 => Link::Lost,
            parent => Link::Behind(parent - 2),
        }
    }

    /// The block before `slot`, known or not.
    pub(super) fn before(&self, slot: Slot) -> Option<Slot> {
        match self.link(slot) {
            Link::Behind(parent) => Some(parent),
            Link::Root | Link::Lost => None,
        }
    }

    /// Sets the link and nothing else: the children of neither parent are counted.
    pub(super) fn set_link(&mut self, slot: Slot, link: Link) {
        let link = match link {
            Link::Root => 0,
            Link::Lost => 1,
            Link::Behind(parent) => parent + 2,
        };
        self.words[slot as usize].set_field(LINK_SHIFT, link);
    }

    /// Makes a block known. Its children stay.
    pub(super) fn insert(&mut self, slot: Slot, link: Link, run: u32) {
        debug_assert!(!self.is_known(slot));
        self.set_run(slot, run);
        self.set_link(slot, link);
        self.known += 1;
    }

    /// Makes a block unknown. Its children stay.
    pub(super) fn remove(&mut self, slot: Slot) {
        debug_assert!(self.is_known(slot));
        self.words[slot as usize].0 &= CHILDREN;
        self.known -= 1;
    }

    pub(super) fn children(&self, slot: Slot) -> u32 {
        match self.word(slot).0 & CHILDREN {
            CHILDREN => self.many[&slot],
            few => u32::try_from(few).expect("two bits"),
        }
    }

    /// Counts one more behind `slot`. Returns how many there are.
    pub(super) fn add_child(&mut self, slot: Slot) -> u32 {
        let children = self.children(slot) + 1;
        self.set_children(slot, children);
        children
    }

    /// Counts one less behind `slot`. Returns how many there are.
    pub(super) fn drop_child(&mut self, slot: Slot) -> u32 {
        let children = self.children(slot).checked_sub(1).expect("each link is counted once");
        self.set_children(slot, children);
        children
    }

    fn set_children(&mut self, slot: Slot, children: u32) {
        let Some(word) = self.words.get_mut(slot as usize) else { return };
        word.0 = word.0 & !CHILDREN | u64::from(children).min(CHILDREN);
        if u64::from(children) >= CHILDREN {
            self.many.insert(slot, children);
        } else if u64::from(children) + 1 == CHILDREN {
            self.many.remove(&slot);
        }
    }

    /// Range of all slots, whether they hold a known block or not.
    pub(super) fn all_slots(&self) -> std::ops::Range<Slot> {
        0..Slot::try_from(self.words.len()).expect("at most SLOTS_MAX")
    }

    pub(super) fn bytes(&self) -> usize {
        self.words.capacity() * size_of::<Word>() + self.many.capacity() * size_of::<(Slot, u32)>()
    }
}
