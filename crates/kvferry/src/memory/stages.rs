//! Stages: bounded host memory through which a device's copies go.
//!
//! Ownership: the pool belongs to the device, so that the device can register the memory with its driver
//! ("pin" it) once. A [`Stage`] is one part of it, held by a batch or a cursor until it is dropped.
//!
//! Bound and fairness: the pool never grows; stages in reserve replace those that the device can't use. A user that has
//! no stage and finds none free waits in a queue, and a stage that is given back goes to the user at the head of it.
//! A user that has stages takes further ones only while no user waits, and only up to its part: the stages divided by
//! the users. It never waits for a further one. A cursor that waits for its peer and has no stage is no user (`Staging::park`).
//!
//! Progress: a stage in a device's copy comes back when the copy ends. A stage that waits for a peer instead is
//! *parked*: a user that begins to wait wakes the users that have parked stages, and they give them back
//! (`Staging::park`). So a slow peer delays the transfers of other peers by no more than that. As a user that
//! waits has no stage, of any device, transfers can't wait for each other.
//!
//! Wake-up: a user that was refused is woken when it has been granted a stage; the grant is made under the lock
//! that the refusal was made under.
//!
//! End: a device that is lost ends its pool. No one gets a stage any more, as copies that the device has begun may still
//! write to those that it has lost, and users that wait hear why.

use crate::sync::{Arc, Mutex, MutexGuard};
use kvferry_sys::map::Mapping;
use kvferry_sys::span::HostSpan;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::{fmt, io};

/// What a stage's size is a multiple of: whole pages are pinned.
const PAGE: usize = 4096;

/// The largest alignment of a device's address that its byte has in the stage, too: a cache line of a GPU.
pub(crate) const LINE: u64 = 128;

/// Called when memory that was not ready may be ready.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// The host memory of a device's copies: stages of one size, as many as the device allows.
pub struct StagePool {
    memory: Mapping,
    stage_bytes: usize,
    stages: usize,
    reserve: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Free stages, the first to be used last. Empty while users wait.
    free: Vec<usize>,
    /// Stages that no one has had, for the place of those that a device can't use.
    reserve: Vec<usize>,
    /// Stages that are free or come back.
    usable: usize,
    users: FxHashMap<u64, User>,
    /// Users that wait for a stage, in the order of their arrival.
    waiting: VecDeque<u64>,
    next_user: u64,
    /// Why no one gets a stage any more.
    ended: Option<String>,
}

struct User {
    wake: Wake,
    standing: Standing,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It has what it needs, or needs nothing.
    Idle,
    /// It is in the queue.
    Waiting,
    /// It was first in the queue when this stage was given back.
    Granted(usize),
    /// Its stages wait for a peer.
    Parked,
}

impl State {
    /// Passes a free stage to the first user that waits. Returns the waker to call.
    fn pass(&mut self, stage: usize) -> Option<Wake> {
        let granted = self.grant(stage);
        if granted.is_none() {
            self.free.push(stage);
        }
        granted
    }

    /// Passes a stage as [`State::pass`] does. If no user waits, the stage is used after all others that are free.
    fn pass_last(&mut self, stage: usize) -> Option<Wake> {
        let granted = self.grant(stage);
        if granted.is_none() {
            self.free.insert(0, stage);
        }
        granted
    }

    fn grant(&mut self, stage: usize) -> Option<Wake> {
        let first = self.waiting.pop_front();
        let user = first.and_then(|user| self.users.get_mut(&user))?;
        user.standing = Standing::Granted(stage);
        Some(Arc::clone(&user.wake))
    }

    fn standing(&mut self, user: u64) -> &mut Standing {
        &mut self.users.get_mut(&user).expect("a user leaves when it is dropped").standing
    }
}

impl StagePool {
    /// A pool of `stages` stages of `stage_bytes` each. The address space is taken at once, memory only by
    /// stages that are used.
    ///
    /// # Errors
    /// `InvalidInput` if there are no stages, if `stage_bytes` is not a multiple of 4096, or for more bytes than
    /// can be addressed; else the kernel's error.
    pub fn new(stage_bytes: usize, stages: usize) -> io::Result<Arc<Self>> {
        Self::with_reserve(stage_bytes, stages, 0)
    }

    /// A pool as [`StagePool::new`] makes it, with more stages behind the others. Each of these takes the place of a stage
    /// that the device can't use, so that the others do not become fewer.
    ///
    /// # Errors
    /// Those of [`StagePool::new`].
    pub fn with_reserve(
        stage_bytes: usize,
        stages: usize,
        reserve: usize,
    ) -> io::Result<Arc<Self>> {
        if stages == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no stages"));
        }
        if !stage_bytes.is_multiple_of(PAGE) {
            let what = format!("a stage of {stage_bytes} bytes, not a multiple of {PAGE}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let all = stages.checked_add(reserve).ok_or(io::ErrorKind::InvalidInput)?;
        let bytes = stage_bytes.checked_mul(all).ok_or(io::ErrorKind::InvalidInput)?;
        let memory = Mapping::kept_from_children(bytes)?;
        let state = State {
            free: (0..stages).rev().collect(),
            reserve: (stages..all).rev().collect(),
            usable: stages,
            ..State::default()
        };
        Ok(Arc::new(Self { memory, stage_bytes, stages, reserve, state: Mutex::new(state) }))
    }

    /// Has the memory of stages that were not used yet come from a NUMA node, as long as the node has some.
    ///
    /// # Errors
    /// `PermissionDenied` in a container that may not choose; `InvalidInput` if the process may not use the node.
    pub fn prefer_node(&self, node: u32) -> io::Result<()> {
        self.memory.prefer_node(node)
    }

    /// Bytes of one stage.
    pub fn stage_bytes(&self) -> usize {
        self.stage_bytes
    }

    /// Number of stages, without those in reserve.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Number of stages, with those in reserve, which lie behind the others.
    pub fn all_stages(&self) -> usize {
        self.stages + self.reserve
    }

    /// Start address of the stages, which follow each other, for the calls that pin them. Whole stages must be
    /// pinned: a device may refuse a copy across two registrations.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Gives a stage's memory back to the system, after `unpin`, if no copy and no transfer has the stage; else calls
    /// nothing. No one gets the stage meanwhile. The stages that have memory are used before it.
    ///
    /// Returns whether the stage was free.
    pub fn give_up(&self, stage: usize, unpin: impl FnOnce()) -> bool {
        let mut state = self.state();
        let Some(at) = state.free.iter().position(|free| *free == stage) else { return false };
        state.free.remove(at);
        drop(state);
        unpin();
        // Where the system refuses, the stage keeps its memory.
        let _ = self.memory.give_back(stage * self.stage_bytes, self.stage_bytes);
        let wake = self.state().pass_last(stage);
        if let Some(wake) = wake {
            wake();
        }
        true
    }

    /// Takes a stage that the device can't use out of the pool, if no copy and no transfer has it. One in reserve takes its
    /// place. Without one, the last stage stays, so that transfers fail by it, and do not wait for none.
    ///
    /// Returns whether the stage is out of the pool.
    pub fn retire(&self, stage: usize) -> bool {
        let mut state = self.state();
        let Some(at) = state.free.iter().position(|free| *free == stage) else { return false };
        match state.reserve.pop() {
            Some(other) => state.free[at] = other,
            None if state.usable > 1 => {
                state.free.remove(at);
                state.usable -= 1;
            }
            None => return false,
        }
        true
    }

    /// Lets no one have a stage any more, for a device that is lost: each wait for a stage, and each later one, fails with
    /// this error. Stages that transfers have stay theirs.
    pub fn end(&self, why: impl Into<String>) {
        let mut state = self.state();
        state.ended.get_or_insert_with(|| why.into());
        let waiting = std::mem::take(&mut state.waiting);
        let mut wakes = Vec::new();
        for id in waiting {
            if let Some(user) = state.users.get_mut(&id) {
                user.standing = Standing::Idle;
                wakes.push(Arc::clone(&user.wake));
            }
        }
        drop(state);
        wakes.iter().for_each(|wake| wake());
    }

    /// Stages that no copy and no transfer has. For leak tests.
    pub fn free(&self) -> usize {
        self.state().free.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn give_back(&self, stage: usize) {
        let wake = self.state().pass(stage);
        if let Some(wake) = wake {
            wake();
        }
    }

    /// Bytes that a stage takes whose first byte is copied from or to this address of the device.
    pub(crate) fn room(&self, address: u64) -> usize {
        self.stage_bytes - lead(address)
    }

    /// A user of the pool, which calls `wake` when it has been granted a stage, or when it should give back those
    /// that it has parked.
    fn join(self: &Arc<Self>, wake: &Wake) -> StageUser {
        let mut state = self.state();
        let id = state.next_user;
        state.next_user += 1;
        state.users.insert(id, User { wake: Arc::clone(wake), standing: Standing::Idle });
        StageUser { pool: Arc::clone(self), id }
    }
}

/// How far into its stage a byte lies that comes first and has this address on the device.
fn lead(address: u64) -> usize {
    usize::try_from(address % LINE).expect("less than a line")
}

impl fmt::Debug for StagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StagePool[{} of {} bytes, {} free]", self.stages, self.stage_bytes, self.free())
    }
}

/// A cursor that uses stages of a pool. The stages outlive it: copies may still be in progress.
struct StageUser {
    pool: Arc<StagePool>,
    id: u64,
}

/// The users of one cursor or share: one for each pool that it takes stages of.
pub(crate) struct StageUsers {
    wake: Wake,
    users: SmallVec<[StageUser; 1]>,
}

impl StageUsers {
    /// Makes an empty set. Users that join a pool have `wake` called, as [`StagePool::join`] says.
    pub(crate) fn new(wake: Wake) -> Self {
        Self { wake, users: SmallVec::new() }
    }

    pub(crate) fn wake(&self) -> &Wake {
        &self.wake
    }

    /// Takes a stage of this pool for a cursor or share that has `has` stages in all; see [`StageUser::take`].
    ///
    /// # Errors
    /// If the pool has ended.
    pub(crate) fn take(&mut self, pool: &Arc<StagePool>, has: usize) -> io::Result<Option<Stage>> {
        let known = self.users.iter().position(|user| Arc::ptr_eq(&user.pool, pool));
        let user = known.unwrap_or_else(|| {
            self.users.push(pool.join(&self.wake));
            self.users.len() - 1
        });
        let user = &self.users[user];
        let stage = user.take(has);
        if stage.is_none()
            && let Some(why) = &pool.state().ended
        {
            return Err(io::Error::other(why.clone()));
        }
        Ok(stage)
    }

    /// Parks the stages of all pools. True if another user waits for one of them.
    pub(crate) fn park(&self) -> bool {
        self.users.iter().fold(false, |before, user| user.park() | before)
    }

    /// Leaves all pools, so that their stages are divided among the users that still need some.
    pub(crate) fn leave(&mut self) {
        self.users.clear();
    }
}

impl StageUser {
    /// A stage for a user that has so many, or `None`: one that has none is woken when it has been granted one.
    fn take(&self, has: usize) -> Option<Stage> {
        let mut state = self.pool.state();
        if state.ended.is_some() {
            return None;
        }
        let part = self.pool.stages / state.users.len();
        let standing = state.standing(self.id);
        let index = match *standing {
            Standing::Waiting => return None,
            Standing::Granted(stage) => Some(stage),
            Standing::Idle | Standing::Parked if has == 0 || has < part => state.free.pop(),
            Standing::Idle | Standing::Parked => None,
        };
        if index.is_some() || has > 0 {
            *state.standing(self.id) = Standing::Idle;
            drop(state);
            let pool = || Arc::clone(&self.pool);
            return index.map(|index| Stage { pool: pool(), index, lead: 0, is_bad: false });
        }
        *state.standing(self.id) = Standing::Waiting;
        state.waiting.push_back(self.id);
        let mut wakes = Vec::new();
        for user in state.users.values_mut().filter(|user| user.standing == Standing::Parked) {
            user.standing = Standing::Idle;
            wakes.push(Arc::clone(&user.wake));
        }
        drop(state);
        wakes.iter().for_each(|wake| wake());
        None
    }

    /// The stages of the user, which has some, wait for a peer. True if another user waits for a stage; if one
    /// begins to wait later, this user is woken.
    fn park(&self) -> bool {
        let mut state = self.pool.state();
        let is_contended = !state.waiting.is_empty();
        let standing = state.standing(self.id);
        if *standing == Standing::Idle && !is_contended {
            *standing = Standing::Parked;
        }
        is_contended
    }
}

impl Drop for StageUser {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        let user = state.users.remove(&self.id);
        state.waiting.retain(|id| *id != self.id);
        drop(state);
        if let Some(Standing::Granted(stage)) = user.map(|user| user.standing) {
            self.pool.give_back(stage);
        }
    }
}

/// One stage, until it is dropped.
#[derive(Debug)]
pub(crate) struct Stage {
    pool: Arc<StagePool>,
    index: usize,
    lead: usize,
    /// The device can't use it.
    is_bad: bool,
}

impl Stage {
    /// The stage, whose first byte has the alignment of this address of the device.
    pub(crate) fn aligned_as(mut self, address: u64) -> Self {
        self.lead = lead(address);
        self
    }

    /// The stage, whose first byte has the alignment of this address of the device. If the alignment allows it, the first
    /// byte also has the place in a page that this offset of a file has.
    pub(crate) fn aligned_to_file(mut self, address: u64, offset: u64) -> Self {
        let in_page = usize::try_from(offset % PAGE as u64).expect("less than a page");
        self.lead = if in_page % LINE as usize == lead(address) { in_page } else { lead(address) };
        self
    }

    /// Takes a stage in reserve, or a free one, in the place of this one, which the pool never gets back. False if there is
    /// none. Then the pool does not get this one back either, unless it is the last.
    pub(crate) fn exchange(&mut self) -> bool {
        let mut state = self.pool.state();
        let other = state.reserve.pop();
        let is_of_reserve = other.is_some();
        let other = other.or_else(|| state.free.pop());
        if other.is_some() && !is_of_reserve {
            state.usable -= 1;
        }
        drop(state);
        self.is_bad = other.is_none();
        self.index = other.unwrap_or(self.index);
        !self.is_bad
    }

    /// Never gives the stage back: its memory stays as it is for ever.
    pub(crate) fn lose(self) {
        self.pool.state().usable -= 1;
        std::mem::forget(self);
    }

    /// Bytes that the stage takes.
    pub(crate) fn room(&self) -> usize {
        self.pool.stage_bytes - self.lead
    }

    /// A part of the stage's bytes.
    pub(crate) fn span(&self, at: usize, len: usize) -> HostSpan {
        let bytes = self.pool.stage_bytes;
        let end = at.checked_add(len).and_then(|end| end.checked_add(self.lead));
        assert!(end.is_some_and(|end| end <= bytes), "outside the stage");
        self.pool.memory.span(self.index * bytes + self.lead + at, len)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if self.is_bad {
            let mut state = self.pool.state();
            if state.usable > 1 {
                state.usable -= 1;
                return;
            }
        }
        self.pool.give_back(self.index);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A user, and how often it was woken.
    fn user(pool: &Arc<StagePool>) -> (StageUser, Arc<AtomicUsize>) {
        let woken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&woken);
        let wake: Wake = Arc::new(move || _ = count.fetch_add(1, Ordering::SeqCst));
        (pool.join(&wake), woken)
    }

    fn times(woken: &AtomicUsize) -> usize {
        woken.load(Ordering::SeqCst)
    }

    #[test]
    fn a_stage_that_is_given_back_goes_to_the_user_that_waits_longest() {
        let pool = StagePool::new(PAGE, 1).expect("memory");
        let [(a, _), (b, b_woken), (c, c_woken)] = [(); 3].map(|()| user(&pool));
        let stage = a.take(0).expect("free");
        assert!(b.take(0).is_none() && c.take(0).is_none() && b.take(0).is_none());
        drop(stage);
        assert_eq!((times(&b_woken), times(&c_woken)), (1, 0));
        assert!(a.take(0).is_none() && c.take(0).is_none(), "it is granted to another user");
        let stage = b.take(0).expect("granted");
        drop((b, stage));
        assert_eq!(times(&c_woken), 1);
        drop(c.take(0).expect("granted"));
        drop(a.take(0).expect("granted"));
        assert_eq!(pool.free(), 1);
    }

    #[test]
    fn a_user_that_leaves_gives_its_grant_to_the_next_one() {
        let pool = StagePool::new(PAGE, 1).expect("memory");
        let [(a, _), (b, _), (c, woken)] = [(); 3].map(|()| user(&pool));
        let stage = a.take(0).expect("free");
        assert!(b.take(0).is_none() && c.take(0).is_none());
        drop(stage);
        drop(b);
        assert_eq!(times(&woken), 1);
        drop(c.take(0).expect("granted"));
        drop((a, c));
        let state = pool.state();
        assert_eq!((state.free.len(), state.waiting.len(), state.users.len()), (1, 0, 0));
    }

    #[test]
    fn a_stage_in_whose_place_another_is_taken_never_comes_back() {
        let pool = StagePool::new(PAGE, 2).expect("memory");
        let (a, _) = user(&pool);
        let mut stage = a.take(0).expect("free").aligned_as(5);
        let former = stage.span(0, 1).as_ptr();
        assert!(stage.exchange());
        assert_ne!(stage.span(0, 1).as_ptr(), former);
        assert_eq!(stage.span(0, 1).as_ptr() as u64 % LINE, 5);
        assert!(!stage.exchange(), "none is free");
        drop(stage);
        assert_eq!(pool.free(), 1);
    }

    #[test]
    fn a_stage_that_can_not_be_used_is_replaced_by_one_in_reserve_while_all_are_in_use() {
        let pool = StagePool::with_reserve(PAGE, 64, 1).expect("memory");
        assert_eq!((pool.stages(), pool.all_stages(), pool.free()), (64, 65, 64));
        let (a, _) = user(&pool);
        let mut stages: Vec<Stage> = (0..64).map(|has| a.take(has).expect("free")).collect();
        assert_eq!(pool.free(), 0);
        assert!(stages[63].exchange());
        assert_eq!(stages[63].index, 64);
        stages.clear();
        assert_eq!(pool.free(), 64);
        let again: Vec<Stage> = (0..64).map(|has| a.take(has).expect("free")).collect();
        assert!(again.iter().all(|stage| stage.index != 63), "it is out of use");
    }

    #[test]
    fn a_stage_without_another_in_its_place_never_comes_back_unless_it_is_the_last() {
        let pool = StagePool::new(PAGE, 3).expect("memory");
        let (a, _) = user(&pool);
        let [mut bad, mut well, other] = [0, 1, 2].map(|has| a.take(has).expect("free"));
        other.lose();
        let (b, woken) = user(&pool);
        assert!(b.take(0).is_none());
        assert!(!bad.exchange(), "none is free");
        drop(bad);
        assert_eq!(times(&woken), 0, "no one gets it");
        assert!(!well.exchange());
        drop(well);
        assert_eq!(times(&woken), 1, "a copy by the last one fails");
        drop(b.take(0).expect("granted"));
        assert_eq!(pool.free(), 1);
    }

    #[test]
    fn a_free_stage_is_retired_while_another_is_left() {
        let pool = StagePool::with_reserve(PAGE, 2, 1).expect("memory");
        let (a, _) = user(&pool);
        let stage = a.take(0).expect("free");
        assert!(!pool.retire(stage.index), "it is in use");
        drop(stage);
        assert!(pool.retire(0), "the one in reserve takes its place");
        assert_eq!(pool.free(), 2);
        assert!(pool.retire(1) && !pool.retire(1));
        assert!(!pool.retire(2), "it is the last");
        assert_eq!(a.take(0).expect("free").index, 2);
    }

    #[test]
    fn users_get_equal_parts_of_the_stages() {
        let pool = StagePool::new(PAGE, 8).expect("memory");
        let (a, _) = user(&pool);
        let mut of_a: Vec<Stage> = Vec::new();
        let mut of_b: Vec<Stage> = Vec::new();
        let take = |user: &StageUser, of: &mut Vec<Stage>| {
            while let Some(stage) = user.take(of.len()) {
                of.push(stage);
            }
        };
        take(&a, &mut of_a);
        assert_eq!(of_a.len(), 8, "one user may take all");
        let (b, woken) = user(&pool);
        assert!(b.take(0).is_none());
        of_a.truncate(6);
        assert_eq!(times(&woken), 1);
        take(&a, &mut of_a);
        take(&b, &mut of_b);
        assert_eq!((of_a.len(), of_b.len()), (6, 2), "six of eight are more than a part");
        of_a.truncate(2);
        take(&b, &mut of_b);
        take(&a, &mut of_a);
        assert_eq!((of_a.len(), of_b.len()), (4, 4));
    }

    #[test]
    fn a_user_that_begins_to_wait_wakes_those_whose_stages_wait_for_a_peer() {
        let pool = StagePool::new(PAGE, 2).expect("memory");
        let [(a, a_woken), (b, b_woken), (c, c_woken)] = [(); 3].map(|()| user(&pool));
        let (of_a, _of_b) = (a.take(0).expect("free"), b.take(0).expect("free"));
        assert!(!a.park(), "nobody waits");
        assert!(c.take(0).is_none());
        assert_eq!((times(&a_woken), times(&b_woken)), (1, 0));
        assert!(a.park() && b.park(), "another user waits");
        drop(of_a);
        assert_eq!(times(&c_woken), 1);
    }

    #[test]
    fn the_first_byte_of_a_stage_has_the_alignment_of_its_address() {
        let pool = StagePool::new(PAGE, 2).expect("memory");
        let (user, _) = user(&pool);
        for address in [0, 1, 16, 127, 128, 4096, u64::MAX] {
            let room = pool.room(address);
            let stage = user.take(0).expect("free").aligned_as(address);
            let start = stage.span(0, room).as_ptr() as u64;
            assert_eq!(start % LINE, address % LINE);
            assert_eq!((start + room as u64) % PAGE as u64, 0, "to the end of the stage");
        }
    }

    #[test]
    fn a_stage_has_the_alignment_of_a_file_where_that_of_the_address_allows_it() {
        let pool = StagePool::new(PAGE, 1).expect("memory");
        let (user, _) = user(&pool);
        for (address, offset, lead) in [
            (0, 0, 0),
            (4096, 8192, 0),
            (0, 4096 + 512, 512),
            (130, 4096 + 258, 258),
            (130, 512, 2),
        ] {
            let stage = user.take(0).expect("free").aligned_to_file(address, offset);
            assert_eq!(stage.room(), PAGE - lead, "{address}, {offset}");
            let start = stage.span(0, stage.room()).as_ptr() as usize;
            assert_eq!(start % PAGE, lead, "{address}, {offset}");
        }
    }

    #[test]
    fn a_stage_is_given_up_while_no_one_has_it_and_used_after_the_others() {
        let pool = StagePool::new(PAGE, 3).expect("memory");
        let (user, _) = user(&pool);
        let stage = user.take(0).expect("free");
        assert_eq!(stage.index, 0);
        stage.span(0, 1).copy_from(&[7]);
        assert!(!pool.give_up(0, || panic!("it is in use")));
        let mut byte = [0];
        stage.span(0, 1).copy_to(&mut byte);
        assert_eq!(byte, [7], "its memory stays");
        drop(stage);
        let mut unpinned = 0;
        assert!(pool.give_up(0, || unpinned += 1));
        assert_eq!((unpinned, pool.free()), (1, 3));
        let stages = [0, 1, 2].map(|has| user.take(has).expect("free"));
        assert_eq!([0, 1, 2].map(|at: usize| stages[at].index), [1, 2, 0]);
        stages[2].span(0, 1).copy_to(&mut byte);
        assert_eq!(byte, [0], "its memory was given back");
    }

    #[test]
    fn a_user_that_waits_meanwhile_is_granted_the_stage_that_was_given_up() {
        let pool = StagePool::new(PAGE, 1).expect("memory");
        let (user, woken) = user(&pool);
        assert!(pool.give_up(0, || assert!(user.take(0).is_none(), "no one gets it meanwhile")));
        assert_eq!(times(&woken), 1);
        drop(user.take(0).expect("granted"));
        assert_eq!(pool.free(), 1);
    }

    #[test]
    fn a_pool_that_ends_wakes_all_who_wait_and_no_one_gets_a_stage_any_more() {
        let pool = StagePool::new(PAGE, 2).expect("memory");
        let woken = [(); 5].map(|()| Arc::new(AtomicUsize::new(0)));
        let mut users = woken.each_ref().map(|woken| {
            let count = Arc::clone(woken);
            StageUsers::new(Arc::new(move || _ = count.fetch_add(1, Ordering::SeqCst)))
        });
        let mut take = |user: usize| users[user].take(&pool, 0);
        let stages = [0, 1].map(|user| take(user).expect("not ended").expect("free"));
        assert!([2, 3].iter().all(|user| take(*user).is_ok_and(|stage| stage.is_none())));
        pool.end("lost");
        assert_eq!(woken.each_ref().map(|woken| times(woken)), [0, 0, 1, 1, 0]);
        for user in [2, 3, 4] {
            assert_eq!(take(user).expect_err("ended").to_string(), "lost");
        }
        stages[0].span(0, 1).copy_from(&[7]);
        drop(stages);
        assert!(take(2).is_err(), "no stage that comes back is granted");
        drop(users);
        assert_eq!(pool.free(), 2);
    }

    #[test]
    fn a_stage_that_was_granted_before_its_pool_ended_is_given_back() {
        let pool = StagePool::new(PAGE, 1).expect("memory");
        let [(a, _), (b, woken)] = [(); 2].map(|()| user(&pool));
        let stage = a.take(0).expect("free");
        assert!(b.take(0).is_none());
        drop(stage);
        assert_eq!(times(&woken), 1);
        pool.end("lost");
        assert!(b.take(0).is_none());
        drop(b);
        assert_eq!(pool.free(), 1);
    }

    #[test]
    fn a_pool_without_stages_or_of_parts_of_pages_is_refused() {
        assert!(StagePool::new(0, 4).is_err() && StagePool::new(PAGE, 0).is_err());
        assert!(StagePool::new(PAGE / 2, 4).is_err() && StagePool::new(PAGE + 1, 4).is_err());
        assert!(StagePool::new(usize::MAX - (PAGE - 1), 2).is_err());
    }
}
