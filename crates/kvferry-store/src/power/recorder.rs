//! Records the steps of the stores below a folder, and lets some fail.

use crate::fault_points::Op;
use kvferry_sys::sync::Mutex;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

static RECORDERS: Mutex<Vec<Arc<Recorder>>> = Mutex::new(Vec::new());

/// Entry of a record. Steps of several threads overlap.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Begin(usize, Op),
    /// The step, and whether it succeeded.
    End(usize, bool),
    Note(Note),
}

/// Observation that the test adds to the record.
#[derive(Clone, Debug)]
pub(crate) enum Note {
    /// A block was stored by a put that began when there were so many events.
    Stored { process: usize, block: u64, began: usize },
    /// A process has synced or closed its store: what it had put before is durable.
    Synced { process: usize, began: usize },
}

impl Event {
    /// Describes the event without its bytes.
    pub(crate) fn in_short(&self) -> String {
        match self {
            Self::Begin(step, op) => format!("step {step}: {}", op.name()),
            other => format!("{other:?}"),
        }
    }

    /// The same, with so many events before the first.
    pub(crate) fn later(self, events: usize) -> Self {
        match self {
            Self::Note(Note::Stored { process, block, began }) => {
                Self::Note(Note::Stored { process, block, began: began + events })
            }
            Self::Note(Note::Synced { process, began }) => {
                Self::Note(Note::Synced { process, began: began + events })
            }
            step => step,
        }
    }
}

/// Steps that fail: the one of this number, or all from it on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) at: usize,
    pub(crate) stays: bool,
    pub(crate) errno: i32,
    /// Only syncs of files fail: the first one from this number on, or all.
    pub(crate) is_of_syncs: bool,
}

impl Fault {
    fn is_first(&self, injected: &[String]) -> bool {
        self.is_of_syncs && injected.is_empty()
    }
}

#[derive(Debug)]
pub(crate) struct Recorder {
    root: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    events: Vec<Event>,
    /// Reads of each file. They change nothing and are no steps.
    reads: HashMap<PathBuf, usize>,
    steps: usize,
    fault: Option<Fault>,
    /// Operations on files, of which some may fail.
    operations: usize,
    /// Operations that were made to fail.
    injected: Vec<String>,
    /// Steps after which the thread that takes the next one ends.
    kill_after: Option<usize>,
    /// Least time that syncing a segment takes.
    sync_takes: Duration,
}

/// Payload of the unwinding that [`Recording::kill_after`] starts in a thread.
pub(crate) struct Killed;

/// A recorder of a folder, until it is dropped.
#[derive(Debug)]
pub(crate) struct Recording(Arc<Recorder>);

impl Recording {
    pub(crate) fn start(root: &Path) -> Self {
        let recorder = Recorder { root: root.to_path_buf(), state: Mutex::default() };
        let recorder = Arc::new(recorder);
        RECORDERS.lock().push(Arc::clone(&recorder));
        Self(recorder)
    }

    /// Events so far.
    pub(crate) fn now(&self) -> usize {
        self.0.state.lock().events.len()
    }

    pub(crate) fn note(&self, note: Note) {
        self.0.state.lock().events.push(Event::Note(note));
    }

    pub(crate) fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.state.lock().events)
    }

    /// Reads of a file so far.
    pub(crate) fn reads(&self, path: &Path) -> usize {
        self.0.state.lock().reads.get(path).copied().unwrap_or_default()
    }

    /// The keys of blocks that had to leave.
    pub(crate) fn evicted(&self) -> Vec<[u64; 2]> {
        let evicted = |event: &Event| match event {
            Event::Begin(_, Op::Evicted(_, key)) => Some(*key),
            _ => None,
        };
        self.0.state.lock().events.iter().filter_map(evicted).collect()
    }

    pub(crate) fn fail(&self, fault: Option<Fault>) {
        self.0.state.lock().fault = fault;
    }

    /// The thread that takes the step behind so many further ones unwinds with [`Killed`] instead, once.
    pub(crate) fn kill_after(&self, steps: Option<usize>) {
        self.0.state.lock().kill_after = steps;
    }

    /// Steps that are left until a thread unwinds. `None`: none is to, or one has.
    pub(crate) fn kill_left(&self) -> Option<usize> {
        self.0.state.lock().kill_after
    }

    /// Has each sync of a segment take this time at least.
    pub(crate) fn slow_syncs(&self, each: Duration) {
        self.0.state.lock().sync_takes = each;
    }

    /// Returns the number of operations on files, and those that were made to fail.
    pub(crate) fn injected(&self) -> (usize, Vec<String>) {
        let state = self.0.state.lock();
        (state.operations, state.injected.clone())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDERS.lock().retain(|it| !Arc::ptr_eq(it, &self.0));
    }
}

impl Op {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Create { path, .. } | Self::Open { path, .. } | Self::Write { path, .. } => path,
            Self::MakeDirectory(path)
            | Self::Read(path)
            | Self::Sync(path)
            | Self::SyncDirectory(path)
            | Self::Rename { from: path, .. }
            | Self::Remove(path)
            | Self::SyncSegment(path)
            | Self::Evicted(path, _) => path,
        }
    }

    pub(crate) fn is_sync(&self) -> bool {
        matches!(self, Self::Sync(_) | Self::SyncDirectory(_) | Self::SyncSegment(_))
    }

    /// Describes the operation without its bytes.
    fn name(&self) -> String {
        match self {
            Self::Write { path, pieces } => {
                let at: Vec<_> = pieces.iter().map(|(at, bytes)| (at, bytes.len())).collect();
                format!("Write({}, {at:?})", path.display())
            }
            other => format!("{other:?}"),
        }
    }

    /// Whether a device could answer the operation with this error.
    fn can_fail_with(&self, errno: i32) -> bool {
        const EROFS: i32 = 30;
        const EIO: i32 = 5;
        const EMFILE: i32 = 24;
        match self {
            Self::Read(_) | Self::Sync(_) | Self::Open { .. } if errno == EMFILE => true,
            Self::SyncSegment(_) | Self::Evicted(..) => false,
            Self::Read(_) | Self::Sync(_) | Self::SyncDirectory(_) => errno == EIO,
            Self::Open { to_write, .. } => errno == EIO || errno == EROFS && *to_write,
            Self::Remove(_) => errno == EIO || errno == EROFS,
            // Blocks of a file that exists are reserved, and an open file is written also if the file system
            // has become read-only.
            Self::Write { .. }
            | Self::MakeDirectory(_)
            | Self::Create { .. }
            | Self::Rename { .. } => true,
        }
    }
}

impl State {
    /// The number of the step, unless it changes nothing.
    fn begin(&mut self, op: Op) -> io::Result<Option<usize>> {
        if !matches!(op, Op::SyncSegment(_) | Op::Evicted(..)) {
            let number = self.operations;
            self.operations += 1;
            if let Some(fault) = self.fault
                && (number == fault.at
                    || number > fault.at && (fault.stays || fault.is_first(&self.injected)))
                && op.can_fail_with(fault.errno)
                && (!fault.is_of_syncs || matches!(op, Op::Sync(_)))
            {
                self.injected.push(op.name());
                if matches!(op, Op::Sync(_)) && errno_loses(fault.errno) {
                    let step = self.steps;
                    self.steps += 1;
                    self.events.extend([Event::Begin(step, op), Event::End(step, false)]);
                }
                return Err(io::Error::from_raw_os_error(fault.errno));
            }
        }
        match op {
            Op::Read(path) => {
                *self.reads.entry(path).or_default() += 1;
                return Ok(None);
            }
            Op::Open { .. } => return Ok(None),
            _ => {}
        }
        let step = self.steps;
        self.steps += 1;
        self.events.push(Event::Begin(step, op));
        Ok(Some(step))
    }
}

/// Whether what a sync should have written may be lost after it has failed so: the next sync may say nothing of it.
fn errno_loses(errno: i32) -> bool {
    errno != 24
}

/// A step that was begun. One that is dropped counts as failed.
#[derive(Debug)]
pub(crate) struct Step(Option<(Arc<Recorder>, usize)>);

impl Step {
    pub(crate) fn begin(op: impl FnOnce() -> Op) -> io::Result<Self> {
        if RECORDERS.lock().is_empty() {
            return Ok(Self(None));
        }
        let op = op();
        let recorders = RECORDERS.lock();
        let recorder = recorders.iter().find(|it| op.path().starts_with(&it.root)).cloned();
        drop(recorders);
        let Some(recorder) = recorder else { return Ok(Self(None)) };
        let mut state = recorder.state.lock();
        let is_killed = state.kill_after == Some(0);
        state.kill_after = state.kill_after.and_then(|left| left.checked_sub(1));
        if is_killed {
            drop(state);
            std::panic::resume_unwind(Box::new(Killed));
        }
        let takes = if let Op::SyncSegment(_) = op { state.sync_takes } else { Duration::ZERO };
        let step = state.begin(op)?;
        drop(state);
        std::thread::sleep(takes);
        Ok(Self(step.map(|step| (recorder, step))))
    }

    pub(crate) fn end(mut self, is_ok: bool) {
        self.note_end(is_ok);
    }

    fn note_end(&mut self, is_ok: bool) {
        if let Some((recorder, step)) = self.0.take() {
            recorder.state.lock().events.push(Event::End(step, is_ok));
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.note_end(false);
    }
}
