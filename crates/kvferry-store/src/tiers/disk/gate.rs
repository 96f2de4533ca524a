//! Tracks the operations in progress on the files of a directory, and whether its device hangs.
//!
//! A device that hangs neither completes an operation nor fails it, so a thread that waits for it may wait for ever.
//! Each operation holds its directory's [`Gate`]. A directory hangs while an operation is in progress for longer than
//! such an operation may take; nothing enters then. That is computed when it is asked, and over once the operation has
//! ended.

use crate::log::superblock::FILE;
use kvferry_sys::sync::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Factor on the time limit for an operation that works on a whole file, such as to sync it.
const SLOW: u32 = 6;
/// A thread that is awake later than it should by so much, or more, was not only kept waiting by others.
const SLEPT_MIN: Duration = Duration::from_millis(500);

/// Kind of an operation, which sets its time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Reads or writes bytes, opens a file, or lists a directory.
    Quick,
    /// Syncs, makes or removes files.
    Slow,
}

/// The error of an operation on a directory that hangs. No block is lost by that.
#[derive(Debug)]
pub(crate) struct Hangs {
    path: PathBuf,
    since: Duration,
}

impl fmt::Display for Hangs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} hangs: its device has not answered for {:.1} s; its blocks are missed until it does",
            self.path.display(),
            self.since.as_secs_f64()
        )
    }
}

impl std::error::Error for Hangs {}

/// Whether an operation failed, or was given up, because a device hangs.
pub(crate) fn is_hang(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|it| it.is::<Hangs>())
}

/// Interval at which a thread that waits for an operation looks at the time, and whether this process has slept.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 500 });

/// True if a thread that is awake so `late` must have slept with its process, such as while that was stopped: no device
/// was asked meanwhile. `limit` is the time limit of an operation.
fn must_have_slept(late: Duration, limit: Duration) -> bool {
    late >= (limit / 2).max(SLEPT_MIN)
}

/// Time for which a thread has waited for a device, without that in which its process slept.
#[derive(Debug)]
struct AwakeTime {
    /// Time limit of an operation.
    limit: Duration,
    spent: Duration,
}

impl AwakeTime {
    fn new(limit: Duration) -> Self {
        Self { limit, spent: Duration::ZERO }
    }

    /// Adds a wait that was to take `most`, and took `took`.
    fn add(&mut self, most: Duration, took: Duration) {
        let slept = must_have_slept(took.saturating_sub(most), self.limit);
        self.spent += if slept { most } else { took };
    }

    /// Receives an answer, within `limit` of this time.
    fn receive<T>(&mut self, told: &Receiver<T>, limit: Duration) -> Result<T, RecvTimeoutError> {
        let end = self.spent.saturating_add(limit);
        loop {
            let left = end.saturating_sub(self.spent);
            let (began, most) = (Instant::now(), left.min(LOOK_EVERY));
            match told.recv_timeout(most) {
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {
                    self.add(most, began.elapsed());
                }
                received => return received,
            }
        }
    }
}

/// Calls `ask` for each directory, on a thread of its own where the store has several. A directory that has not answered
/// within the limit hangs; its thread ends once `ask` returns, and the late answer is dropped.
pub(crate) fn ask_all<T: Send + 'static>(
    paths: &[PathBuf],
    bounds: Bounds,
    ask: impl Fn(&Path) -> io::Result<T> + Clone + Send + 'static,
) -> Vec<io::Result<T>> {
    if !bounds.has_several {
        return paths.iter().map(|path| ask(path)).collect();
    }
    let limit = bounds.limit;
    let (tell, told) = mpsc::channel();
    let mut answers: Vec<Option<io::Result<T>>> = paths.iter().map(|_| None).collect();
    for (at, path) in paths.iter().enumerate() {
        let (asked, tell, of_thread) = (path.clone(), tell.clone(), ask.clone());
        let run = move || _ = tell.send((at, of_thread(&asked)));
        if kvferry_sys::thread::spawn("kvferry-store-io".into(), run).is_err() {
            answers[at] = Some(ask(path));
        }
    }
    let mut awake = AwakeTime::new(limit);
    while answers.iter().any(Option::is_none)
        && let Ok((at, answer)) = awake.receive(&told, limit.saturating_sub(awake.spent))
    {
        answers[at] = Some(answer);
    }
    let hangs = |path: &PathBuf| {
        let hangs = Hangs { path: path.clone(), since: limit };
        Err(io::Error::new(io::ErrorKind::TimedOut, hangs))
    };
    answers.into_iter().zip(paths).map(|(it, path)| it.unwrap_or_else(|| hangs(path))).collect()
}

/// Flag that tells a thread that no other one waits for its operation any more.
#[derive(Clone, Debug, Default)]
pub(crate) struct GivenUp(Arc<AtomicBool>);

impl GivenUp {
    /// Fails if so. To be called before each step: what a directory is asked for late must not meet what others have done
    /// there since.
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.0.load(Relaxed) {
            true => Err(io::Error::other("the directory hangs, and the operation was given up")),
            false => Ok(()),
        }
    }
}

/// Time limit of directories that are asked, or written to, before their [`Gate`]s exist.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// The store has several directories, also if only one of them is left: for one that hangs, nothing waits.
    pub(crate) has_several: bool,
    pub(crate) limit: Duration,
}

impl Bounds {
    /// The bounds of a store of so many directories, those included that are lost.
    pub(crate) const fn of(directories: usize, limit: Duration) -> Self {
        Self { has_several: directories > 1, limit }
    }

    /// Writes to a directory, on a thread of its own where there are several. That may take as long as an operation of
    /// [`Pace::Slow`]; the directory hangs if it does not answer a read beside it within the limit.
    ///
    /// # Errors
    /// Those of `write`, and [`is_hang`].
    pub(crate) fn write<T: Send + 'static>(
        self,
        path: &Path,
        write: impl FnOnce(&GivenUp) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let given_up = GivenUp::default();
        if !self.has_several {
            return write(&given_up);
        }
        let (tell, told) = mpsc::channel();
        let of_thread = given_up.clone();
        #[cfg(test)]
        let cut = crate::log::superblock::cut::current();
        let run = move || {
            #[cfg(test)]
            crate::log::superblock::cut::follow(cut);
            let _ = tell.send(catch_unwind(AssertUnwindSafe(|| write(&of_thread))));
        };
        kvferry_sys::thread::spawn("kvferry-store-io".into(), run)?;
        let mut awake = AwakeTime::new(self.limit);
        loop {
            match awake.receive(&told, self.limit) {
                Ok(Ok(outcome)) => return outcome,
                Ok(Err(panic)) => resume_unwind(panic),
                Err(_) => {}
            }
            let is_late = awake.spent >= self.limit.saturating_mul(SLOW);
            if is_late || !answers(path, &mut awake)? {
                given_up.0.store(true, Relaxed);
                let hangs = Hangs { path: path.to_path_buf(), since: awake.spent };
                return Err(io::Error::new(io::ErrorKind::TimedOut, hangs));
            }
        }
    }
}

/// True if a directory answers a read within the limit of `awake`, to which the wait is added.
fn answers(path: &Path, awake: &mut AwakeTime) -> io::Result<bool> {
    let (tell, told) = mpsc::channel();
    let file = path.join(FILE);
    let read = move || {
        // What it answers is not asked.
        let _ = kvferry_sys::file::read_device(&file);
        let _ = tell.send(());
    };
    kvferry_sys::thread::spawn("kvferry-store-io".into(), read)?;
    let limit = awake.limit;
    Ok(awake.receive(&told, limit).is_ok())
}

/// [`Gate::hangs_at`] while no operation is in progress.
const NEVER: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct Gate {
    path: PathBuf,
    limit: Duration,
    /// Time at which the gate was made; `hangs_at` counts from it.
    made: Instant,
    /// Time at which the directory hangs unless an operation ends, in nanoseconds. It changes under the lock of
    /// `doing`, and is read without it: most readers find no operation in progress, or only a recent one.
    hangs_at: AtomicU64,
    doing: Mutex<RunningOperations>,
    /// An operation has ended.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct RunningOperations {
    /// Begin of each operation in progress, by the time from which on the directory hangs, and the operation's number.
    begun: BTreeMap<(Instant, u64), Instant>,
    /// Operations in progress that were given up, with the segment of each.
    given_up: BTreeMap<u64, u32>,
    /// Counts operations.
    count: u64,
    is_closed: bool,
    /// Latest time at which this process was found to have slept.
    woke: Option<Instant>,
}

/// An operation in progress.
#[derive(Debug)]
pub(crate) struct Entered {
    gate: Arc<Gate>,
    key: (Instant, u64),
}

/// Handle of a thread that waits for the end of an operation which another one carries out.
#[derive(Debug)]
pub(crate) struct Waiter {
    gate: Arc<Gate>,
    count: u64,
}

impl Waiter {
    /// Stops waiting for an operation on a segment, which is *held* until the operation ends. An operation leaves the
    /// directory and releases its segment in one step: a thread that finds no operation in progress finds no segment
    /// held. False if the operation has ended.
    pub(crate) fn give_up(&self, segment: u32) -> bool {
        let mut doing = self.gate.doing.lock();
        let is_in_progress = doing.begun.keys().any(|(_, count)| *count == self.count);
        if is_in_progress {
            doing.given_up.insert(self.count, segment);
        }
        is_in_progress
    }
}

impl Entered {
    pub(crate) fn waiter(&self) -> Waiter {
        Waiter { gate: Arc::clone(&self.gate), count: self.key.1 }
    }
}

impl Gate {
    pub(crate) fn new(path: &Path, limit: Duration) -> Self {
        let (doing, ended) = (Mutex::default(), Condvar::new());
        let (made, hangs_at) = (Instant::now(), AtomicU64::new(NEVER));
        Self { path: path.to_path_buf(), limit, made, hangs_at, doing, ended }
    }

    /// Begins an operation.
    ///
    /// # Errors
    /// The directory hangs ([`is_hang`]), or the store was closed.
    pub(crate) fn enter(self: &Arc<Self>, pace: Pace) -> io::Result<Entered> {
        let now = Instant::now();
        let limit = if pace == Pace::Slow { self.limit.saturating_mul(SLOW) } else { self.limit };
        // Longer than any clock: never.
        let hangs_at = now.checked_add(limit).unwrap_or(now + Duration::from_secs(u32::MAX.into()));
        let mut doing = self.doing.lock();
        if doing.is_closed {
            return Err(io::Error::other("the store was closed"));
        }
        if let Some(hangs) = self.find_hang(&doing, now) {
            return Err(hangs);
        }
        doing.count += 1;
        let key = (hangs_at, doing.count);
        doing.begun.insert(key, now);
        self.note_first(&doing);
        Ok(Entered { gate: Arc::clone(self), key })
    }

    /// The operations in progress have changed.
    fn note_first(&self, doing: &RunningOperations) {
        let nanos = |at: Instant| {
            let nanos = at.saturating_duration_since(self.made).as_nanos();
            u64::try_from(nanos).unwrap_or(NEVER).min(NEVER - 1)
        };
        let first = doing.begun.first_key_value().map_or(NEVER, |((at, _), _)| nanos(*at));
        self.hangs_at.store(first, Relaxed);
    }

    /// Whether the directory hangs.
    pub(crate) fn is_hanging(&self) -> bool {
        let hangs_at = self.hangs_at.load(Relaxed);
        hangs_at != NEVER && self.made.elapsed().as_nanos() >= hangs_at.into()
    }

    /// Whether an operation on a segment that was given up is in progress.
    pub(crate) fn is_held(&self, segment: u32) -> bool {
        self.doing.lock().given_up.values().any(|it| *it == segment)
    }

    fn find_hang(&self, doing: &RunningOperations, now: Instant) -> Option<io::Error> {
        let ((hangs_at, _), begun) = doing.begun.first_key_value()?;
        (now >= *hangs_at).then(|| self.error(now.saturating_duration_since(*begun)))
    }

    fn error(&self, since: Duration) -> io::Error {
        io::Error::new(io::ErrorKind::TimedOut, Hangs { path: self.path.clone(), since })
    }

    /// The error of operations, while the directory hangs.
    pub(crate) fn hangs(&self) -> Option<io::Error> {
        self.find_hang(&self.doing.lock(), Instant::now())
    }

    /// A thread was to look at this directory again after `asked` and some moments, and looks only `late` after them. If
    /// that is so long that this process must have slept, such as while it was stopped, no device was asked meanwhile:
    /// operations in progress get the time once more.
    pub(crate) fn looked_late(&self, asked: Instant, late: Duration) {
        if !must_have_slept(late, self.limit) {
            return;
        }
        let mut doing = self.doing.lock();
        if doing.woke.is_some_and(|woke| woke >= asked) {
            // Another thread has found out.
            return;
        }
        let now = Instant::now();
        doing.woke = Some(now);
        let begun = std::mem::take(&mut doing.begun);
        let later = |((hangs_at, count), begun): ((Instant, u64), Instant)| {
            // Of one that has begun since, no more than it may have slept.
            let late = late.min(now.saturating_duration_since(begun));
            ((hangs_at.checked_add(late).unwrap_or(hangs_at), count), begun)
        };
        doing.begun = begun.into_iter().map(later).collect();
        self.note_first(&doing);
    }

    /// Makes all operations in progress appear to have begun earlier.
    #[cfg(test)]
    pub(crate) fn age(&self, by: Duration) {
        let mut doing = self.doing.lock();
        let begun = std::mem::take(&mut doing.begun);
        let before = |at: Instant| at.checked_sub(by).expect("clocks go back so far");
        let earlier = |((hangs_at, count), begun): ((Instant, u64), Instant)| {
            ((before(hangs_at), count), before(begun))
        };
        doing.begun = begun.into_iter().map(earlier).collect();
        self.note_first(&doing);
    }

    /// The error of an operation on a file on which another one that was given up is in progress.
    pub(crate) fn busy(&self) -> io::Error {
        let doing = self.doing.lock();
        let begun = doing.begun.values().min().map_or(Duration::ZERO, Instant::elapsed);
        self.error(begun)
    }

    /// Time until the directory hangs, if no operation ends.
    pub(crate) fn left(&self) -> Duration {
        let doing = self.doing.lock();
        let first = doing.begun.first_key_value();
        first.map_or(self.limit, |((at, _), _)| at.saturating_duration_since(Instant::now()))
    }

    /// Time limit of an operation of [`Pace::Quick`].
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Time limit of the operation in progress whose deadline is the earliest.
    #[cfg(test)]
    pub(crate) fn first_limit(&self) -> Option<Duration> {
        let doing = self.doing.lock();
        doing.begun.first_key_value().map(|((hangs_at, _), begun)| *hangs_at - *begun)
    }

    /// Nothing enters from now on.
    pub(crate) fn close(&self) {
        self.doing.lock().is_closed = true;
    }

    /// Returns when no operation is in progress.
    pub(crate) fn wait_quiet(&self) {
        let busy = |doing: &mut RunningOperations| !doing.begun.is_empty();
        drop(self.ended.wait_while(self.doing.lock(), None, busy));
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut doing = self.gate.doing.lock();
        if doing.begun.remove(&self.key).is_none() {
            // Its time was put off.
            doing.begun.retain(|(_, count), _| *count != self.key.1);
        }
        doing.given_up.remove(&self.key.1);
        self.gate.note_first(&doing);
        if doing.begun.is_empty() {
            self.gate.ended.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_testkit::PATIENCE;

    const LIMIT: Duration = Duration::from_secs(3600);

    #[test]
    fn a_directory_hangs_while_an_operation_takes_longer_than_it_may() {
        let gate = Arc::new(Gate::new(Path::new("/mnt/kv"), LIMIT));
        let slow = gate.enter(Pace::Slow).expect("it does not hang");
        let quick = gate.enter(Pace::Quick).expect("it does not hang");
        assert!(gate.hangs().is_none());
        assert!(!gate.is_hanging());
        gate.age(LIMIT);
        assert!(gate.is_hanging());
        let refused = gate.enter(Pace::Quick).expect_err("it hangs");
        assert!(is_hang(&refused) && refused.to_string().starts_with("/mnt/kv hangs"), "{refused}");
        drop(quick);
        assert!(gate.hangs().is_none() && !gate.is_hanging(), "the other one may take longer");
        gate.age(LIMIT * 5);
        assert!(gate.hangs().is_some());
        drop(slow);
        assert!(gate.hangs().is_none() && !gate.is_hanging());
        drop(gate.enter(Pace::Quick).expect("it is well again"));
        gate.wait_quiet();
        gate.close();
        let refused = gate.enter(Pace::Quick).expect_err("it is closed");
        assert!(!is_hang(&refused));
    }

    #[test]
    fn of_several_directories_those_that_do_not_answer_hang() {
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let paths = ["/mnt/a", "/mnt/b", "/mnt/c"].map(PathBuf::from);
        let ask = move |path: &Path| {
            if path.ends_with("b") {
                let _ = held.lock().recv();
            }
            Ok(path.to_path_buf())
        };
        // Longer than any thread of this test is kept waiting for a processor.
        let bounds = Bounds { has_several: true, limit: Duration::from_secs(10) };
        let [a, b, c] = ask_all(&paths, bounds, ask).try_into().expect("three");
        assert_eq!(
            (a.expect("it answers"), c.expect("it answers")),
            (paths[0].clone(), paths[2].clone())
        );
        assert!(is_hang(&b.expect_err("it does not answer")));
        drop(release);
    }

    #[test]
    fn a_process_that_was_stopped_takes_no_directory_to_hang_for_that() {
        let gate = Arc::new(Gate::new(Path::new("/mnt/kv"), LIMIT));
        let entered = gate.enter(Pace::Quick).expect("it does not hang");
        let asked = Instant::now();
        // It was stopped for a day.
        let day = LIMIT * 24;
        gate.age(day);
        assert!(gate.hangs().is_some());
        gate.looked_late(asked, day);
        assert!(gate.hangs().is_none() && gate.left() <= LIMIT);
        // So all threads find that wait.
        gate.looked_late(asked, day);
        assert!(gate.left() <= LIMIT);
        gate.age(LIMIT);
        gate.looked_late(Instant::now(), LIMIT / 4);
        assert!(gate.hangs().is_some(), "others had the processor");
        drop(entered);
        gate.wait_quiet();
    }

    #[test]
    fn time_in_which_a_process_was_stopped_is_not_waited_for_a_device() {
        let mut awake = AwakeTime::new(LIMIT);
        awake.add(LIMIT / 8, LIMIT / 4);
        assert_eq!(awake.spent, LIMIT / 4, "others had the processor");
        // It was stopped for a day.
        awake.add(LIMIT / 8, LIMIT * 24);
        assert_eq!(awake.spent, LIMIT * 3 / 8);
        // A message counts that is there at the end.
        let (tell, told) = mpsc::channel();
        awake.spent = LIMIT * 2;
        tell.send(7).expect("it is open");
        assert_eq!(awake.receive(&told, Duration::ZERO), Ok(7));
        assert_eq!(awake.receive(&told, Duration::ZERO), Err(RecvTimeoutError::Timeout));
    }

    #[test]
    fn an_operation_that_began_after_a_process_was_stopped_gets_no_more_time() {
        let gate = Arc::new(Gate::new(Path::new("/mnt/kv"), LIMIT));
        let asked = Instant::now();
        let _entered = gate.enter(Pace::Quick).expect("it does not hang");
        gate.looked_late(asked, LIMIT * 24);
        assert!(gate.left() <= LIMIT + PATIENCE);
    }

    #[test]
    fn a_segment_is_held_until_the_operation_that_was_given_up_has_left_the_directory() {
        let gate = Arc::new(Gate::new(Path::new("/mnt/kv"), LIMIT));
        let entered = gate.enter(Pace::Quick).expect("it does not hang");
        let (waiter, other) = (entered.waiter(), gate.enter(Pace::Quick).expect("as before"));
        assert!(waiter.give_up(7));
        assert!(gate.is_held(7) && !gate.is_held(8));
        gate.looked_late(Instant::now(), LIMIT);
        drop(other);
        assert!(gate.is_held(7));
        drop(entered);
        assert!(!gate.is_held(7) && !waiter.give_up(7) && !gate.is_held(7));
        gate.wait_quiet();
    }

    #[test]
    fn an_operation_on_a_whole_file_may_take_longer() {
        let gate = Arc::new(Gate::new(Path::new("/mnt/kv"), Duration::from_secs(3600)));
        let slow = gate.enter(Pace::Slow).expect("it does not hang");
        assert!(gate.left() > Duration::from_secs(5 * 3600));
        drop(slow);
        let forever = Arc::new(Gate::new(Path::new("/mnt/kv"), Duration::MAX));
        let _quick = forever.enter(Pace::Quick).expect("it does not hang");
        assert!(forever.hangs().is_none());
    }
}
