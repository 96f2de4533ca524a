//! What members tell the keeper: a ring of words for each member.
//!
//! The member's threads write, one at a time, and publish an event by advancing the head after its
//! last word. The keeper reads, and advances the tail after each event. So an event is never torn;
//! a keeper that dies leaves its successor the event that it was at.
//!
//! | words of 32 bits | use |
//! |---|---|
//! | 1 | kind, and words in all |
//! | 2 | the time (not in `Removed`) |
//! | 1 | `Used`: missing blocks. `Added`, `Found`: 1 + parent, or 0 (not in `Removed`) |
//! | rest | slots |
//!
//! Head and tail count words since the ring was made.

use super::Index;
use super::layout::{MAX_MEMBERS, RING_LEN, RING_WORDS};
use super::member::{HEAD, LOST, Member, REBUILD, TAIL};
use super::slot::SlotId;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Words before the slots of all events but `Removed`.
const HEADER: usize = 4;

/// Event that a member reports to the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A request used these blocks, in the order of its prompt, and `missing` more were not there.
    Used {
        /// Milliseconds.
        now_ms: u64,
        /// Blocks of the prompt behind `slots`.
        missing: u32,
        /// The slots; empty if the first block was missing.
        slots: &'a [SlotId],
    },
    /// Blocks were inserted, in the order of their prompt.
    Added {
        /// Milliseconds.
        now_ms: u64,
        /// The block before the first one.
        parent: Option<SlotId>,
        /// The new blocks.
        slots: &'a [SlotId],
    },
    /// A put has found these blocks, in the order of its prompt, behind one that may be new.
    Found {
        /// Milliseconds.
        now_ms: u64,
        /// The block before the first one.
        parent: Option<SlotId>,
        /// The blocks that were there.
        slots: &'a [SlotId],
    },
    /// The member removed the block of this slot. Rings are not ordered among each other: if
    /// [`Index::entry`] has a block there, the slot was used again since.
    Removed {
        /// The slot.
        slot: SlotId,
    },
}

/// Events that [`Index::drain`] could not deliver, since the previous call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Events that did not fit into the ring, other than `Removed`.
    pub lost: u64,
    /// A `Removed` event did not fit: the keeper has to look at all slots.
    pub rebuild: bool,
}

#[derive(Clone, Copy, Debug)]
#[repr(u32)]
enum Kind {
    Found = 0,
    Used = 1,
    Added = 2,
    Removed = 3,
}

/// Each method returns whether the event made its ring more than half full: then the keeper should
/// be woken. A ring that is full loses the event.
impl Member {
    /// Writes an [`Event::Used`].
    pub fn note_used(&self, now_ms: u64, missing: u32, slots: &[SlotId]) -> bool {
        self.note(Kind::Used, &stamped(now_ms, missing), slots)
    }

    /// Writes an [`Event::Added`].
    pub fn note_added(&self, now_ms: u64, parent: Option<SlotId>, slots: &[SlotId]) -> bool {
        self.note(Kind::Added, &stamped(now_ms, parent.map_or(0, |parent| parent + 1)), slots)
    }

    /// Writes an [`Event::Found`].
    pub fn note_found(&self, now_ms: u64, parent: Option<SlotId>, slots: &[SlotId]) -> bool {
        self.note(Kind::Found, &stamped(now_ms, parent.map_or(0, |parent| parent + 1)), slots)
    }

    /// Writes an [`Event::Removed`].
    pub fn note_removed(&self, slot: SlotId) -> bool {
        self.note(Kind::Removed, &[], &[slot])
    }

    fn note(&self, kind: Kind, head: &[u32], slots: &[SlotId]) -> bool {
        let _one_writer = self.events.lock();
        let number = self.id().number;
        let [end, tail] = [HEAD, TAIL].map(|at| self.member_word(number, at));
        let at = end.load(Relaxed);
        let used = at.wrapping_sub(tail.load(Acquire));
        let len = (1 + head.len() + slots.len()) as u64;
        if used + len > RING_WORDS {
            match kind {
                Kind::Removed => self.member_word(number, REBUILD).store(1, Release),
                Kind::Found | Kind::Used | Kind::Added => {
                    self.member_word(number, LOST).fetch_add(1, Relaxed);
                }
            }
            return false;
        }
        let first = (len as u32) << 2 | kind as u32;
        let words = [first].into_iter().chain(head.iter().copied()).chain(slots.iter().copied());
        for (at, word) in (at..).zip(words) {
            self.ring_word(number, at).store(word, Relaxed);
        }
        end.store(at + len, Release);
        used <= RING_WORDS / 2 && used + len > RING_WORDS / 2
    }
}

fn stamped(now_ms: u64, third: u32) -> [u32; 3] {
    [now_ms as u32, (now_ms >> 32) as u32, third]
}

impl Index {
    /// Takes the events of the member of this number, in their order. For one process at a time, the
    /// keeper; if another one drains meanwhile, this returns.
    pub fn drain(&self, number: u8, mut each: impl FnMut(Event<'_>)) -> Drained {
        assert!(usize::from(number) < MAX_MEMBERS, "members have numbers below {MAX_MEMBERS}");
        let mut words = Vec::new();
        let tail = self.member_word(number, TAIL);
        let mut at = tail.load(Acquire);
        let end = self.member_word(number, HEAD).load(Acquire);
        while at != end {
            let Some(next) = self.read_event(number, at, end, &mut words) else {
                // No member wrote this. What is in the ring is given up.
                self.member_word(number, REBUILD).store(1, Release);
                tail.store(end, Release);
                break;
            };
            if tail.load(Acquire) != at {
                break;
            }
            if let Some(event) = parse(&words) {
                each(event);
            }
            if tail.compare_exchange(at, next, AcqRel, Relaxed).is_err() {
                break;
            }
            at = next;
        }
        Drained {
            lost: self.member_word(number, LOST).swap(0, Relaxed),
            rebuild: self.member_word(number, REBUILD).swap(0, AcqRel) != 0,
        }
    }

    /// Copies the words of the event at `at`. Returns where it ends.
    fn read_event(&self, number: u8, at: u64, end: u64, words: &mut Vec<u32>) -> Option<u64> {
        let len = u64::from(self.ring_word(number, at).load(Relaxed) >> 2);
        if !(1..=RING_WORDS.min(end.wrapping_sub(at))).contains(&len) {
            return None;
        }
        words.clear();
        words.extend((at..at + len).map(|at| self.ring_word(number, at).load(Relaxed)));
        Some(at + len)
    }

    fn ring_word(&self, number: u8, at: u64) -> &AtomicU32 {
        let offset = usize::from(number) * RING_LEN + (at % RING_WORDS) as usize * 4;
        &self.shared.words32::<1>(self.layout.rings + offset)[0]
    }
}

fn parse(words: &[u32]) -> Option<Event<'_>> {
    let kind = words.first()? & 0b11;
    if kind == Kind::Removed as u32 {
        return Some(Event::Removed { slot: *words.get(1)? });
    }
    let (&[_, low, high, third], slots) = words
        .split_at_checked(HEADER)
        .and_then(|(head, slots)| Some((<&[u32; HEADER]>::try_from(head).ok()?, slots)))?;
    let now_ms = u64::from(high) << 32 | u64::from(low);
    match kind {
        0 => Some(Event::Found { now_ms, parent: third.checked_sub(1), slots }),
        1 => Some(Event::Used { now_ms, missing: third, slots }),
        2 => Some(Event::Added { now_ms, parent: third.checked_sub(1), slots }),
        _ => None,
    }
}
