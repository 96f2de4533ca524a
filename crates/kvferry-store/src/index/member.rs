//! The processes that change the index.
//!
//! A member has a number, and a generation that tells it from earlier members of the number. A
//! thread of its process holds a mark that the kernel sets when the process ends, so every other
//! member sees a death with one load.

use super::layout::{MAX_MEMBERS, MEMBER_LEN, MemberId};
use super::slot::SlotId;
use super::{Index, layout};
use kvferry_sys::alive::{self, AliveMark};
use kvferry_sys::process::Process;
use kvferry_sys::sync::Mutex;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

// Words of a member, in lines of a processor's cache.
const STATE: usize = 0;
/// Subscriptions of the member.
pub(super) const SUBSCRIBERS: usize = 8;
const MARK: usize = 64;
pub(super) const HEAD: usize = 128;
pub(super) const LOST: usize = 136;
pub(super) const REBUILD: usize = 144;
/// The process: [`Process::to_words`].
const PROCESS: [usize; 3] = [152, 160, 168];
pub(super) const TAIL: usize = 192;
/// Entries of the ring of changes, those that are being written included.
pub(super) const BEGUN: usize = 256;
/// Entries that may be read.
pub(super) const PUBLISHED: usize = 264;

/// Whether a number is given to a member: the low byte of its state. The generation is above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Unused,
    /// The member makes its mark. It owns nothing yet.
    Joining,
    Joined,
}

impl Use {
    fn with(self, generation: u32) -> u64 {
        u64::from(generation) << 8 | self as u64
    }

    fn split(word: u64) -> (Self, u32) {
        let generation = (word >> 8) as u32;
        match word as u8 {
            0 => (Self::Unused, generation),
            1 => (Self::Joining, generation),
            _ => (Self::Joined, generation),
        }
    }
}

impl Index {
    /// Makes this process a member, until the value is dropped.
    ///
    /// # Errors
    /// `StorageFull` if all numbers are given: [`Member::sweep`] gives back those of dead members.
    /// Else the kernel's error.
    pub fn join(self: &Arc<Self>) -> io::Result<Member> {
        kvferry_sys::fd::install_fork_handlers()?;
        let (mark, id) = Mark::make(self)?;
        let (index, forks) = (Arc::clone(self), kvferry_sys::fd::forks());
        let (events, changes) = (Mutex::default(), Mutex::default());
        Ok(Member { index, id, mark: Some(mark), events, changes, forks })
    }

    /// Whether the process of a member still runs and has not left.
    pub fn is_alive(&self, member: MemberId) -> bool {
        self.member(member.number) == Some(member) && !self.has_died(member)
    }

    /// The members, dead ones that were not swept included.
    pub fn members(&self) -> impl Iterator<Item = MemberId> + '_ {
        (0..MAX_MEMBERS as u8).filter_map(|number| self.member(number))
    }

    /// Whether a member's process ended without leaving.
    pub fn has_died(&self, member: MemberId) -> bool {
        usize::from(member.number) < MAX_MEMBERS
            && self.member_word(member.number, STATE).load(Acquire)
                == Use::Joined.with(member.generation)
            && alive::has_ended(&self.shared, self.member_offset(member.number) + MARK)
    }

    /// The member that is the keeper. It may have died.
    pub fn keeper(&self) -> Option<MemberId> {
        let word = self.shared.word(layout::KEEPER).load(Acquire);
        (word != 0).then(|| MemberId::from_word(word))
    }

    /// Name at which the keeper listens. While it changes, the two words may be of no name.
    pub fn secret(&self) -> [u64; 2] {
        layout::SECRET.map(|at| self.shared.word(at).load(Acquire))
    }

    /// Sets [`Index::secret`]; for the keeper.
    pub fn set_secret(&self, secret: [u64; 2]) {
        for (at, word) in layout::SECRET.into_iter().zip(secret) {
            self.shared.word(at).store(word, Release);
        }
    }

    /// Whether the process of a member that has died still has threads, as far as that can be seen: the mark is one
    /// thread's, and others may be in the middle of a write that ends late.
    pub fn has_threads(&self, dead: MemberId) -> bool {
        let words = PROCESS.map(|at| self.member_word(dead.number, at).load(Relaxed));
        Process::from_words(words).and_then(|it| it.runs()) == Some(true)
    }

    fn member(&self, number: u8) -> Option<MemberId> {
        if usize::from(number) >= MAX_MEMBERS {
            return None;
        }
        let (used, generation) = Use::split(self.member_word(number, STATE).load(Acquire));
        (used == Use::Joined).then_some(MemberId { number, generation })
    }

    /// Takes a number for this thread. A process that is killed between the two stores keeps its number until all
    /// processes have closed the store; so there is nothing between them that takes long.
    ///
    /// No other process takes such a number back: one that was stopped there, and not killed, would go on and make its
    /// mark in memory that is another member's by then.
    fn take_number(&self) -> io::Result<(AliveMark, MemberId)> {
        let id = (0..MAX_MEMBERS as u8).find_map(|number| {
            let state = self.member_word(number, STATE);
            let before = state.load(Relaxed);
            let (used, generation) = Use::split(before);
            let generation = generation.wrapping_add(1);
            let joining = Use::Joining.with(generation);
            let taken = used == Use::Unused
                && state.compare_exchange(before, joining, AcqRel, Relaxed).is_ok();
            taken.then_some(MemberId { number, generation })
        });
        let id = id.ok_or(io::ErrorKind::StorageFull)?;
        let words = Process::this().map_or([0; 3], Process::to_words);
        for (at, word) in PROCESS.into_iter().zip(words) {
            self.member_word(id.number, at).store(word, Relaxed);
        }
        let mark = AliveMark::new(Arc::clone(&self.shared), self.member_offset(id.number) + MARK);
        let used = if mark.is_ok() { Use::Joined } else { Use::Unused };
        self.member_word(id.number, STATE).store(used.with(id.generation), Release);
        Ok((mark?, id))
    }

    /// Gives back the number of a member that leaves or is dead.
    pub(super) fn forget(&self, member: MemberId) {
        let joined = Use::Joined.with(member.generation);
        let unused = Use::Unused.with(member.generation);
        let state = self.member_word(member.number, STATE);
        // If this fails, another keeper was faster.
        let _ = state.compare_exchange(joined, unused, AcqRel, Relaxed);
    }

    pub(super) fn member_word(&self, number: u8, at: usize) -> &AtomicU64 {
        self.shared.word(self.member_offset(number) + at)
    }

    fn member_offset(&self, number: u8) -> usize {
        self.layout.members + usize::from(number) * MEMBER_LEN
    }
}

/// A process's membership. All threads of the process share it; a forked child must not use it.
///
/// A member leaves when this is dropped. Segments that it still owns are found by
/// [`Index::held_by`], like a dead member's.
#[derive(Debug)]
pub struct Member {
    pub(super) index: Arc<Index>,
    id: MemberId,
    /// The mark that the kernel sets when the process ends; `None` only during `drop`.
    mark: Option<Mark>,
    /// Held while a thread writes events. The words of one event, kept for their allocation.
    pub(super) events: Mutex<Vec<SlotId>>,
    /// Held while a thread writes changes.
    pub(super) changes: Mutex<()>,
    forks: u32,
}

impl Member {
    /// Id of this member.
    pub fn id(&self) -> MemberId {
        self.id
    }

    /// The index that it is a member of.
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// Becomes the keeper, unless another live member is. Only the index decides this, so there is one keeper,
    /// regardless of the names that other programs take and of the directories that can be read.
    pub fn stand(&self) -> bool {
        let (keeper, mine) = (self.shared.word(layout::KEEPER), self.id.to_word());
        let now = keeper.load(Acquire);
        let is_free = now == 0 || !self.is_alive(MemberId::from_word(now));
        now == mine || is_free && keeper.compare_exchange(now, mine, AcqRel, Relaxed).is_ok()
    }

    /// Is the keeper no longer.
    pub fn step_down(&self) {
        let (keeper, mine) = (self.shared.word(layout::KEEPER), self.id.to_word());
        // If this fails, it was not the keeper.
        let _ = keeper.compare_exchange(mine, 0, AcqRel, Relaxed);
    }

    /// Leaves what a process leaves that is killed.
    #[cfg(test)]
    pub(crate) fn die(&self) {
        self.forget_process();
        self.die_in_part();
    }

    /// Clears the identity of the member's process, as if the process could not be seen.
    #[cfg(test)]
    pub(crate) fn forget_process(&self) {
        for at in PROCESS {
            self.member_word(self.id.number, at).store(0, Relaxed);
        }
    }

    /// Leaves what a process leaves that is killed, while one of its threads has not ended.
    #[cfg(test)]
    pub(crate) fn die_in_part(&self) {
        let mark = self.mark.as_ref().expect("it is not dropped");
        mark.leave.send(()).expect("the thread waits");
        while !self.has_died(self.id) {
            std::thread::yield_now();
        }
    }
}

impl Deref for Member {
    type Target = Index;

    fn deref(&self) -> &Index {
        &self.index
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let Some(mark) = self.mark.take() else { return };
        if kvferry_sys::forked_since(self.forks) {
            // The thread of the mark is the parent's.
            return std::mem::forget(mark);
        }
        mark.leave();
    }
}

/// The alive mark, with the thread that it is tied to: any other thread of the process may end
/// while the member goes on.
#[derive(Debug)]
struct Mark {
    leave: Sender<()>,
    thread: JoinHandle<()>,
}

impl Mark {
    /// Takes a number and marks it as alive, on a new thread.
    fn make(index: &Arc<Index>) -> io::Result<(Self, MemberId)> {
        let index = Arc::clone(index);
        let (leave, left) = mpsc::channel();
        let (made, is_made) = mpsc::channel();
        let thread = kvferry_sys::thread::spawn("kvferry-member".into(), move || {
            let joined = index.take_number();
            let _ = made.send(joined.as_ref().map(|&(_, id)| id).map_err(io::Error::kind));
            if let Ok((mark, id)) = joined {
                // Fails when the member drops its end. Only tests send: they have the process die.
                if left.recv().is_ok() {
                    return std::mem::forget(mark);
                }
                drop(mark);
                index.forget(id);
            }
        })?;
        match is_made.recv() {
            Ok(Ok(id)) => Ok((Self { leave, thread }, id)),
            Ok(Err(io::ErrorKind::StorageFull)) => {
                let why = format!("the index has {MAX_MEMBERS} members already");
                Err(io::Error::new(io::ErrorKind::StorageFull, why))
            }
            Ok(Err(kind)) => Err(kind.into()),
            Err(_) => Err(io::Error::other("the thread of the mark ended")),
        }
    }

    fn leave(self) {
        drop(self.leave);
        // It does not panic.
        let _ = self.thread.join();
    }
}
