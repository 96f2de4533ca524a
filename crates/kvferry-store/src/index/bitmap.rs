//! Which of many numbers are taken: a tree of bits, without locks.
//!
//! A bit of the lowest level is set for a number that is taken; a bit above is set if all bits of the
//! word below it are. Zeroes are the empty bitmap. [`Bitmap::take`] goes down to the lowest number
//! that is free.
//!
//! The bits are hints. Whether a number is free is decided by compare-and-swap on its own state, so
//! a bit that is wrongly clear costs a second try, and a bit that a dead member left set costs the
//! number until [`Bitmap::repair`]. No order of events gives a number to two owners, which a free
//! list in the slots can't offer: after a death it does not tell whether a slot is in it.

use kvferry_sys::shared::Shared;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// 64⁶ is more than 2³².
const MAX_LEVELS: usize = 6;
const FULL: u64 = u64::MAX;
/// Failures to take a number, each because another thread was faster, until none counts as free.
const MAX_TRIES: usize = 4096;

#[derive(Debug)]
pub(super) struct Bitmap {
    /// Bits of each level, and the offset of its first word; the lowest level first. The highest
    /// has one word.
    levels: [(u32, usize); MAX_LEVELS],
    height: usize,
}

impl Bitmap {
    /// A bitmap of `len` numbers, in memory from `reserve`, which takes a length in bytes.
    pub(super) fn new(len: u32, mut reserve: impl FnMut(usize) -> usize) -> Self {
        let mut levels = [(0, 0); MAX_LEVELS];
        let mut bits = len;
        let mut height = 0;
        loop {
            let words = bits.div_ceil(64);
            levels[height] = (bits, reserve(words as usize * 8));
            height += 1;
            if words <= 1 {
                return Self { levels, height };
            }
            bits = words;
        }
    }

    /// Marks as taken what the last word of each level has too many.
    pub(super) fn initialise(&self, shared: &Shared) {
        for level in 0..self.height {
            let bits = self.levels[level].0;
            if !bits.is_multiple_of(64) {
                self.word(shared, level, bits / 64).fetch_or(FULL << (bits % 64), SeqCst);
            }
        }
    }

    /// Takes the lowest free number.
    pub(super) fn take(&self, shared: &Shared) -> Option<u32> {
        'tries: for _ in 0..MAX_TRIES {
            let mut number = 0;
            for level in (0..self.height).rev() {
                let bits = self.word(shared, level, number).load(SeqCst);
                if bits == FULL && level + 1 == self.height {
                    return None;
                }
                if bits == FULL {
                    self.note_full(shared, level, number);
                    continue 'tries;
                }
                number = number * 64 + bits.trailing_ones();
            }
            if self.put(shared, number) {
                return Some(number);
            }
        }
        None
    }

    /// Takes this number. True if it was free.
    pub(super) fn put(&self, shared: &Shared, number: u32) -> bool {
        let before = self.word(shared, 0, number / 64).fetch_or(bit(number), SeqCst);
        if before | bit(number) == FULL {
            self.note_full(shared, 0, number / 64);
        }
        before & bit(number) == 0
    }

    /// Makes a number free.
    pub(super) fn give(&self, shared: &Shared, number: u32) {
        self.clear(shared, 0, number);
    }

    /// Makes a number free that may be so already, even if bits above its own are wrong.
    pub(super) fn repair(&self, shared: &Shared, number: u32) {
        let mut number = number;
        for level in 0..self.height {
            let word = self.word(shared, level, number / 64);
            if word.load(SeqCst) & bit(number) != 0 {
                word.fetch_and(!bit(number), SeqCst);
            }
            number /= 64;
        }
    }

    #[cfg(test)]
    pub(super) fn is_taken(&self, shared: &Shared, number: u32) -> bool {
        self.word(shared, 0, number / 64).load(SeqCst) & bit(number) != 0
    }

    /// Sets the bit above a word that is full.
    fn note_full(&self, shared: &Shared, level: usize, word: u32) {
        let (mut level, mut word) = (level, word);
        while level + 1 < self.height {
            let before = self.word(shared, level + 1, word / 64).fetch_or(bit(word), SeqCst);
            // A thread that cleared a bit of the word before the bit above was set did not clear
            // that one.
            if self.word(shared, level, word).load(SeqCst) != FULL {
                return self.clear(shared, level + 1, word);
            }
            if before | bit(word) != FULL {
                return;
            }
            (level, word) = (level + 1, word / 64);
        }
    }

    /// Clears a bit, and the one above it if the word was full.
    fn clear(&self, shared: &Shared, level: usize, number: u32) {
        let mut number = number;
        for level in level..self.height {
            let before = self.word(shared, level, number / 64).fetch_and(!bit(number), SeqCst);
            if before != FULL {
                return;
            }
            number /= 64;
        }
    }

    fn word<'a>(&self, shared: &'a Shared, level: usize, word: u32) -> &'a AtomicU64 {
        shared.word(self.levels[level].1 + word as usize * 8)
    }
}

fn bit(number: u32) -> u64 {
    1 << (number % 64)
}
