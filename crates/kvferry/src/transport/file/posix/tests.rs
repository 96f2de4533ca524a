use super::*;
use crate::memory::pieces::Position;
use crate::memory::region::RegionUse;
use crate::transfer::batch::Batch;
use crate::transport::file::Storage;
use crate::transport::file::queue::Memory;
use crate::{Access, Agent, FileOptions};
use kvferry_sys::file::{File, OpenFlags};
use kvferry_sys::poll::{self, Interest};
use std::path::PathBuf;

const LEN: u64 = 4096;

/// Memory, and a place for files.
struct Rig {
    agent: Agent,
    batch: Batch,
    folder: PathBuf,
}

impl Rig {
    fn new(name: &str) -> Self {
        let agent = Agent::builder().name(name).start().expect("an agent");
        let folder = std::env::temp_dir().join(format!("kvferry-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let target = FileOptions::create(LEN);
        let target = agent.open_file(folder.join("target"), &target).expect("a file");
        let memory = agent.allocate_private(LEN as usize, Access::NONE).expect("memory");
        let mut batch = Batch::new();
        batch.push(&memory, 0, &target.remote(), 0, LEN).expect("inside");
        Self { agent, batch, folder }
    }

    fn file(&self, name: &str, len: u64) -> Arc<File> {
        let path = self.folder.join(name);
        std::fs::write(&path, vec![1; len as usize]).expect("space");
        self.open(name)
    }

    fn open(&self, name: &str) -> Arc<File> {
        let path = self.folder.join(name);
        let how = OpenFlags { read: true, write: false, create: false, direct: false };
        Arc::new(File::open(&path, how).expect("a file"))
    }

    /// An operation on 4 KiB of a file, at that number of 4 KiB.
    fn task(&self, results: &Arc<Results>, way: Way, file: &Arc<File>, number: u64) -> Task {
        let storage: Arc<Storage> = self.agent.services().get().expect("every agent has files");
        let gate = storage.link.core.memory.gates.gate();
        let at = Position { piece: 0, within: 0 };
        let held = RegionUse::new(&self.batch.local, &gate, at, LEN as usize);
        let (held, span) = held.map_err(drop).expect("registered");
        let (file, offset, memory) = (Arc::clone(file), number * LEN, Memory::Region(held));
        let operation = Operation {
            way,
            file,
            offset,
            span,
            is_direct: false,
            memory,
            pair: 0,
            _share: Arc::default(),
        };
        Task { operation, results: Arc::clone(results) }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.agent.shutdown();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn results() -> Arc<Results> {
    Arc::new(Results::new().expect("a descriptor"))
}

/// The file's number and the places of a run's tasks.
fn places(run: &Run) -> (FileKey, Vec<u64>) {
    let operations = run.tasks.iter().map(|task| &task.operation);
    let file = run.tasks[0].operation.file.inode();
    (file, operations.map(|it| it.offset / LEN).collect())
}

#[test]
fn neighbours_of_a_transfer_are_one_run_and_a_file_is_written_by_one_thread_at_a_time() {
    let rig = Rig::new("runs");
    let [a, b] = ["a", "b"].map(|name| rig.file(name, LEN));
    let [keys_a, keys_b] = [&a, &b].map(|file| file.inode());
    let again = rig.open("a");
    let [first, second] = [results(), results()];
    let mut lane = Lane::default();
    for number in [0, 1, 2] {
        lane.push(rig.task(&first, Way::Write, &a, number));
    }
    lane.push(rig.task(&first, Way::Read, &a, 0));
    lane.push(rig.task(&first, Way::Read, &a, 1));
    // A read of another transfer, and one of another place.
    lane.push(rig.task(&second, Way::Read, &a, 2));
    lane.push(rig.task(&second, Way::Read, &a, 7));
    lane.push(rig.task(&first, Way::Write, &b, 0));
    lane.push(rig.task(&first, Way::Write, &a, 9));
    // Through another open file.
    lane.push(rig.task(&second, Way::Write, &again, 10));
    let mut next = || {
        let run = lane.take(1);
        let places = places(&run);
        (run.writes, places)
    };
    let (written, taken) = next();
    assert_eq!((written, taken), (Some(keys_a), (keys_a, vec![0, 1, 2, 9])));
    assert_eq!(next(), (None, (keys_a, vec![0, 1])));
    assert_eq!(next(), (None, (keys_a, vec![2])));
    assert_eq!(next(), (None, (keys_a, vec![7])));
    assert_eq!(next(), (Some(keys_b), (keys_b, vec![0])));
    assert!(lane.turns.is_empty(), "a thread writes to the file");
    lane.ended(written);
    let last = lane.take(1);
    assert_eq!(places(&last), (keys_a, vec![10]));
    lane.ended(last.writes);
    lane.ended(Some(keys_b));
    (0..3).for_each(|_| lane.ended(None));
    assert_eq!((lane.busy, lane.turns.len(), lane.writes.len()), (0, 0, 0));
}

#[test]
fn a_stopped_transfer_does_not_wait_for_writes_of_another_one_to_its_file() {
    let rig = Rig::new("withdraw");
    let [a, b] = ["a", "b"].map(|name| rig.file(name, LEN));
    let [first, second] = [results(), results()];
    let mut work = Work::default();
    for (results, file, numbers) in [(&first, &a, 0..2), (&second, &a, 2..4), (&second, &b, 4..6)] {
        numbers.for_each(|number| work.push(1, rig.task(results, Way::Write, file, number)));
    }
    let hangs = work.take(1).expect("the first writes");
    work.push(1, rig.task(&second, Way::Read, &a, 6));
    work.push(2, rig.task(&second, Way::Read, &a, 7));
    assert_eq!(places(&hangs), (a.inode(), vec![0, 1]));
    let mut withdrawn: Vec<u64> =
        work.withdraw(&second).iter().map(|task| task.operation.offset / LEN).collect();
    withdrawn.sort_unstable();
    assert_eq!(withdrawn, [2, 3, 4, 5, 6, 7]);
    assert!(work.take(4).is_none() && work.lanes.len() == 1);
    // What comes later has its turn.
    work.push(1, rig.task(&second, Way::Write, &b, 8));
    let next = work.take(4).expect("a write to a file of which none is under way");
    assert_eq!(places(&next), (b.inode(), vec![8]));
    work.push(1, rig.task(&second, Way::Write, &a, 9));
    assert!(work.take(4).is_none(), "the first transfer writes to the file");
    work.ended(1, hangs.writes);
    let last = work.take(4).expect("the file's turn");
    assert_eq!(places(&last), (a.inode(), vec![9]));
    [next.writes, last.writes].into_iter().for_each(|file| work.ended(1, file));
    assert!(work.lanes.is_empty());
}

#[test]
fn file_systems_take_turns_also_where_there_are_fewer_threads() {
    let rig = Rig::new("turns");
    let file = rig.file("read", LEN);
    let results = results();
    let mut work = Work::default();
    for lane in [1, 2, 3] {
        // No neighbours: each is a run.
        for number in [0, 2, 4, 6] {
            work.push(lane, rig.task(&results, Way::Read, &file, number));
        }
    }
    // One thread. Another file system gets a task after each of the first runs.
    let mut taken = Vec::new();
    while let Some(Run { lane, writes, .. }) = work.take(4) {
        work.ended(lane, writes);
        if lane != 4 && taken.len() < 6 {
            work.push(4, rig.task(&results, Way::Read, &file, 0));
        }
        taken.push(lane);
    }
    for lane in [1, 2, 3] {
        let places: Vec<usize> = (0..taken.len()).filter(|at| taken[*at] == lane).collect();
        assert_eq!(places.len(), 4);
        // Each of the others at most once in between.
        assert!(places[0] < 4 && places.windows(2).all(|it| it[1] - it[0] <= 4), "{taken:?}");
    }
    assert!(work.lanes.is_empty());
}

#[test]
fn each_operation_of_a_run_has_its_own_result() {
    let rig = Rig::new("results");
    let file = rig.file("short", LEN + LEN / 2);
    let carried_out = |way| {
        let results = results();
        carry_out([0, 1, 2, 0].map(|number| rig.task(&results, way, &file, number)).into());
        let ended = results.ended.lock();
        ended
            .iter()
            .flatten()
            .map(|(_, moved)| moved.as_ref().map_err(io::Error::kind).copied())
            .collect()
    };
    let read: Vec<_> = carried_out(Way::Read);
    let again = Err(io::ErrorKind::Interrupted);
    assert_eq!(read, [Ok(4096), Ok(2048), again, Ok(4096)], "the file ends in the second");
    let written: Vec<_> = carried_out(Way::Write);
    assert!(written[0].is_err_and(|kind| kind != io::ErrorKind::Interrupted), "{written:?}");
    assert_eq!(written[1..], [again; 3], "not after a failed call");
}

#[test]
fn a_file_system_has_a_thread_also_while_many_others_hang() {
    const LANE_MAX: usize = 2;
    let rig = Rig::new("hang");
    let file = rig.file("read", LEN);
    let results = results();
    let mut work = Work::default();
    let push = |work: &mut Work, lane: u64| {
        let task = rig.task(&results, Way::Read, &file, 0);
        work.push(lane, task);
    };
    for lane in 0..LANES_BUSY_MAX as u64 {
        (0..2 * LANE_MAX).for_each(|_| push(&mut work, lane));
    }
    let hanging: Vec<Run> = std::iter::from_fn(|| work.take(LANE_MAX)).collect();
    assert_eq!(hanging.len(), LANES_BUSY_MAX * LANE_MAX);
    assert_eq!(work.wanted(LANE_MAX), hanging.len());
    (0..3).for_each(|_| push(&mut work, 100));
    assert_eq!(work.wanted(LANE_MAX), hanging.len() + 1);
    assert_eq!(work.take(LANE_MAX).map(|run| run.lane), Some(100));
    assert_eq!(work.wanted(LANE_MAX), hanging.len() + 1, "one for the tasks that wait, too");
}

#[test]
fn an_operation_that_ends_without_its_queue_keeps_no_memory_while_another_one_hangs() {
    let rig = Rig::new("without-queue");
    let file = rig.file("read", 2 * LEN);
    let queue = PoolQueue::new(&Arc::new(Pool::new())).expect("a descriptor");
    let [early, late, hangs] = [0, 1, 1].map(|n| rig.task(&queue.results, Way::Read, &file, n));
    carry_out(vec![early]);
    drop(queue);
    carry_out(vec![late]);
    assert!(hangs.results.ended.lock().is_none());
}

#[test]
fn a_queue_that_is_stopped_again_and_again_wakes_nobody() {
    let mut queue = PoolQueue::new(&Arc::new(Pool::new())).expect("a descriptor");
    queue.in_flight = 1;
    for _ in 0..2 {
        queue.stop();
        assert!(queue.completed().is_none());
        queue.stop();
        let ready = poll::wait_one(queue.fd(), Interest::Read, Some(Duration::ZERO));
        assert!(!ready.expect("a descriptor").read, "nothing has ended");
    }
    queue.in_flight = 0;
}
