//! Queues of copies to make, and of outcomes.
//!
//! One lock, which is held for a few moves of values and never while anything is copied: the engine's scheduler takes
//! it, too.

use crate::carry::Directory;
use kvferry_blocks::{Action, Discard, Outcome, Tier, Transfer, TransferId, TransferMode};
use kvferry_sys::sync::{Condvar, Mutex};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Directories that are remembered. Beyond, one that has nothing to do is closed.
const DIRECTORIES_MAX: usize = 64;
/// Operations on a directory that a thread takes at once, at most: copies to or from a block store are one call.
pub(crate) const RUN_MAX: usize = 256;
/// Bytes of these, at most.
pub(crate) const RUN_BYTES: u64 = 32 << 20;

/// An operation on a directory.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    Copy(Transfer),
    Remove(Discard),
}

/// Queue of one directory's operations, in order.
#[derive(Debug, Default)]
struct Line {
    tasks: VecDeque<Task>,
    is_taken: bool,
    /// Blocks of it were files of their own.
    has_files: bool,
    /// State of the directory, kept between runs.
    directory: Option<Box<Directory>>,
    /// State of another directory, to be closed by the thread that takes this line.
    leaves: Option<Box<Directory>>,
}

#[derive(Debug, Default)]
struct State {
    memory: VecDeque<Transfer>,
    lines: FxHashMap<Arc<str>, Line>,
    /// Lines with tasks that no thread has taken.
    ready: VecDeque<Arc<str>>,
    finished: VecDeque<(TransferId, Outcome)>,
    /// Copies that were submitted and are not in `finished`.
    under_way: usize,
    is_closed: bool,
}

/// A part of a line that a thread carries out.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) path: Arc<str>,
    pub(crate) tasks: Vec<Task>,
    pub(crate) directory: Option<Box<Directory>>,
    pub(crate) leaves: Option<Box<Directory>>,
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    memory: Condvar,
    directories: Condvar,
    ended: Condvar,
}

impl Queue {
    pub(crate) fn submit(&self, actions: impl IntoIterator<Item = Action>) {
        let mut actions = actions.into_iter().peekable();
        if actions.peek().is_none() {
            return;
        }
        let (mut for_memory, mut ready) = (false, 0);
        let mut state = self.state.lock();
        let ended = state.finished.len();
        for action in actions {
            let (directory, task) = match action {
                Action::Copy(transfer) if state.is_closed => {
                    state.finished.push_back((transfer.id, Outcome::Failed));
                    continue;
                }
                _ if state.is_closed => continue,
                Action::Copy(mut transfer) => {
                    state.under_way += 1;
                    let directory = transfer.directory.clone();
                    match directory {
                        Some(directory) if transfer.mode != TransferMode::Dram => {
                            (directory, Task::Copy(transfer))
                        }
                        _ => {
                            transfer.mode = TransferMode::Dram;
                            state.memory.push_back(transfer);
                            for_memory = true;
                            continue;
                        }
                    }
                }
                Action::Discard(discard) => {
                    // A block store makes room by itself.
                    if discard.mode == TransferMode::Gds {
                        continue;
                    }
                    if !state.lines.get(&discard.directory).is_some_and(|line| line.has_files) {
                        continue;
                    }
                    (Arc::clone(&discard.directory), Task::Remove(discard))
                }
                _ => continue,
            };
            ready += usize::from(state.add(&directory, task));
        }
        let has_refused = state.finished.len() > ended;
        drop(state);
        if has_refused {
            self.ended.notify_all();
        }
        if for_memory {
            self.memory.notify_one();
        }
        for _ in 0..ready {
            self.directories.notify_one();
        }
    }

    /// The next copy within memory, when there is one. None: the driver ends.
    pub(crate) fn next_in_memory(&self) -> Option<Transfer> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(next) = state.memory.pop_front() {
                return Some(next);
            }
            state = self.memory.wait(state, None);
        }
    }

    /// The next tasks of a directory, when there are any. They are removals, or one copy to or from a
    /// file, or copies of one direction to or from a block store, each of another block. None: the driver ends.
    pub(crate) fn next_run(&self, page_bytes: impl Fn(u16) -> u64) -> Option<Run> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(path) = state.ready.pop_front() {
                let line = state.lines.get_mut(&path).expect("a ready line is there");
                line.is_taken = true;
                let tasks = take_run(&mut line.tasks, page_bytes);
                let (directory, leaves) = (line.directory.take(), line.leaves.take());
                return Some(Run { path, tasks, directory, leaves });
            }
            state = self.directories.wait(state, None);
        }
    }

    /// Returns a directory's state after a run.
    pub(crate) fn put_back(&self, path: Arc<str>, directory: Box<Directory>) {
        let mut state = self.state.lock();
        let line = state.lines.get_mut(&path).expect("a taken line stays");
        line.directory = Some(directory);
        line.is_taken = false;
        if !line.tasks.is_empty() {
            state.ready.push_back(path);
            drop(state);
            self.directories.notify_one();
        }
    }

    pub(crate) fn finish(&self, ended: impl IntoIterator<Item = (TransferId, Outcome)>) {
        let mut state = self.state.lock();
        let before = state.finished.len();
        state.finished.extend(ended);
        let count = state.finished.len() - before;
        state.under_way -= count;
        drop(state);
        self.ended.notify_all();
    }

    pub(crate) fn take_finished(&self, most: usize) -> Vec<(TransferId, Outcome)> {
        let mut state = self.state.lock();
        let count = state.finished.len().min(most);
        state.finished.drain(..count).collect()
    }

    pub(crate) fn under_way(&self) -> usize {
        self.state.lock().under_way
    }

    /// Waits until a copy has ended that was not taken yet. False: none is under way, or `timeout` has passed.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock();
        while state.finished.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if state.under_way == 0 || left.is_zero() {
                return false;
            }
            state = self.ended.wait(state, left);
        }
        true
    }

    /// Threads end after what they carry out now. What was not begun has failed.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let State { memory, lines, .. } = &mut *state;
        let mut left: Vec<TransferId> = memory.drain(..).map(|transfer| transfer.id).collect();
        for task in lines.values_mut().flat_map(|line| line.tasks.drain(..)) {
            if let Task::Copy(transfer) = task {
                left.push(transfer.id);
            }
        }
        state.ready.clear();
        state.under_way -= left.len();
        state.finished.extend(left.into_iter().map(|id| (id, Outcome::Failed)));
        drop(state);
        self.memory.notify_all();
        self.directories.notify_all();
        self.ended.notify_all();
    }

    /// Takes the states that lines have kept, to be closed.
    pub(crate) fn take_directories(&self) -> Vec<Directory> {
        let mut state = self.state.lock();
        let lines = state.lines.values_mut();
        lines
            .flat_map(|line| [line.directory.take(), line.leaves.take()])
            .flatten()
            .map(|directory| *directory)
            .collect()
    }
}

impl State {
    /// Appends a task. Returns whether a thread must be woken for it.
    fn add(&mut self, path: &Arc<str>, task: Task) -> bool {
        if !self.lines.contains_key(path) {
            let mut line = Line::default();
            if self.lines.len() >= DIRECTORIES_MAX {
                let idle = self.lines.iter().find(|(_, it)| !it.is_taken && it.tasks.is_empty());
                let Some(idle) = idle.map(|(path, _)| Arc::clone(path)) else {
                    self.refuse(&task);
                    return false;
                };
                let gone = self.lines.remove(&idle).expect("found just now");
                line.leaves = gone.directory;
            }
            self.lines.insert(Arc::clone(path), line);
        }
        let line = self.lines.get_mut(path).expect("inserted where it was missing");
        line.has_files |= matches!(&task, Task::Copy(copy) if copy.mode != TransferMode::Gds);
        line.tasks.push_back(task);
        let is_ready = line.tasks.len() == 1 && !line.is_taken;
        if is_ready {
            self.ready.push_back(Arc::clone(path));
        }
        is_ready
    }

    /// Fails a task for which no line is free.
    fn refuse(&mut self, task: &Task) {
        if let Task::Copy(transfer) = task {
            self.under_way -= 1;
            self.finished.push_back((transfer.id, Outcome::Failed));
        }
    }
}

fn take_run(tasks: &mut VecDeque<Task>, page_bytes: impl Fn(u16) -> u64) -> Vec<Task> {
    let mut run: Vec<Task> = tasks.pop_front().into_iter().collect();
    let Some(Task::Copy(first)) = run.first() else {
        while run.len() < RUN_MAX && matches!(tasks.front(), Some(Task::Remove(_))) {
            run.extend(tasks.pop_front());
        }
        return run;
    };
    if first.mode != TransferMode::Gds {
        return run;
    }
    let (to, resets): (Tier, u32) = (first.to.tier, first.resets);
    let mut names = FxHashSet::default();
    names.insert((first.group, first.key));
    let mut bytes = page_bytes(first.group);
    while let Some(Task::Copy(next)) = tasks.front() {
        bytes += page_bytes(next.group);
        let belongs = next.mode == TransferMode::Gds && next.to.tier == to && next.resets == resets;
        let is_full = run.len() == RUN_MAX || bytes > RUN_BYTES;
        if !belongs || is_full || !names.insert((next.group, next.key)) {
            break;
        }
        run.extend(tasks.pop_front());
    }
    run
}
