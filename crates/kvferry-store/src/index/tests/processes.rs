use super::crash::{DIE_AT, POINTS};
use super::threads::{churn, look};
use super::*;
use crate::index::{MAX_MEMBERS, MemberId};
use fastrand::Rng;
use kvferry_testkit::eventually;
use rustix::process::{Pid, Signal, kill_process};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

/// Environment variable that names the child's task.
const ROLE: &str = "KVFERRY_INDEX_ROLE";
/// A path of the index's memory.
const MEMORY: &str = "KVFERRY_INDEX_MEMORY";
const RACED: u64 = 3000;

pub(super) fn spawn(index: &Index, role: &str, die_at: Option<&str>) -> Child {
    let fd = index.memory().as_fd().as_raw_fd();
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    let test = "index::tests::processes::a_child_of_other_tests";
    child.args(["--ignored", "--exact", "--nocapture", test]);
    child.env(ROLE, role).env(MEMORY, format!("/proc/{}/fd/{fd}", std::process::id()));
    if let Some(point) = die_at {
        child.env(DIE_AT, point);
    }
    child.stdout(Stdio::piped()).spawn().expect("a process")
}

#[test]
#[ignore = "the child process that other tests start"]
fn a_child_of_other_tests() {
    // `make test-slow` runs all ignored tests. Without a parent, this one has nothing to do.
    let Ok(memory) = std::env::var(MEMORY) else { return };
    let memory = std::fs::File::options().read(true).write(true).open(memory);
    let index = Arc::new(Index::open(memory.expect("of the parent").into()).expect("an index"));
    let member = index.join().expect("a member");
    match std::env::var(ROLE).expect("set").as_str() {
        "churn" => thread::scope(|scope| {
            for seed in 0..2 {
                let (member, seed) = (&member, seed + u64::from(std::process::id()));
                scope.spawn(move || churn(member, seed, || true));
            }
        }),
        "hold a lock" => {
            let _locked = member.lock(member.bucket_of(&key(0)));
            // The parent waits for an event.
            member.note_removed(0);
            loop {
                thread::park();
            }
        }
        "subscribe" => {
            let _subscriptions = [(); 3].map(|()| member.subscribe());
            loop {
                thread::park();
            }
        }
        "race" => {
            let parent = joined(&index, &member);
            eventually("the parent gives the start", || sent_event(&index, parent));
            println!("{}", race(&member));
        }
        role => panic!("unknown role {role}"),
    }
}

/// Inserts the same keys as another member. Returns how many it inserted.
fn race(member: &Member) -> usize {
    (0..RACED).filter(|&n| matches!(insert(member, n, 0), Inserted::New(_))).count()
}

/// Whether a member sent an event.
fn sent_event(index: &Index, by: MemberId) -> bool {
    let mut sent_event = false;
    index.drain(by.number, |_| sent_event = true);
    sent_event
}

/// The other member of an index that two processes join.
pub(super) fn joined(index: &Index, ours: &Member) -> MemberId {
    let other = || index.members().find(|&id| id != ours.id());
    eventually("the other joins", || other().is_some());
    other().expect("it has joined")
}

pub(super) fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("our child");
}

/// Waits for the end of a process that was killed.
pub(super) fn killed(mut child: Child) {
    child.wait().expect("our child");
}

/// Sweeps a member whose process has ended, and checks that nothing is left of it.
fn sweep_and_verify(index: &Index, keeper: &Member, dead: MemberId, mut child: Child) {
    child.wait().expect("our child");
    assert!(index.has_died(dead) && !index.is_alive(dead));
    assert!(keeper.sweep(dead) && !keeper.sweep(dead));
    assert_eq!(keeper.recount(), 0);
    verify(index);
}

#[test]
fn a_member_may_die_at_any_point_of_a_change() {
    for point in POINTS {
        let index = index(16);
        let keeper = index.join().expect("a member");
        // Without it, no change is published.
        let _subscription = keeper.subscribe();
        let child = spawn(&index, "churn", Some(point));
        let dead = joined(&index, &keeper);
        eventually(point, || index.has_died(dead));
        // Its locks are taken over, and what it left in chains is no obstacle.
        for n in 0..24 {
            assert_ne!(insert(&keeper, n, 0), Inserted::Contended, "{point}");
            index.find(&key(n)).inspect(|entry| assert_is_whole(entry, n));
        }
        sweep_and_verify(&index, &keeper, dead, child);
        let live = (1000..).take_while(|&n| insert(&keeper, n, 0) != Inserted::Full).count() as u64;
        assert!(index.live() == 16 && live <= 16, "{point}: a slot is lost");
    }
}

#[test]
fn members_are_killed_at_random_moments_while_others_read_and_write() {
    let index = index(16);
    let keeper = index.join().expect("a member");
    let runs = AtomicBool::new(true);
    let mut rng = Rng::with_seed(3);
    for _ in 0..15 {
        runs.store(true, SeqCst);
        let running = || runs.load(SeqCst);
        let mut child = spawn(&index, "churn", None);
        let dead = joined(&index, &keeper);
        thread::scope(|scope| {
            scope.spawn(|| look(&index, 1, &AtomicU64::new(0), running));
            scope.spawn(|| churn(&keeper, 2, running));
            thread::sleep(Duration::from_micros(rng.u64(0..30_000)));
            signal(&child, Signal::KILL);
            child.wait().expect("our child");
            runs.store(false, SeqCst);
        });
        sweep_and_verify(&index, &keeper, dead, child);
    }
}

#[test]
fn a_stopped_owner_of_a_lock_costs_writers_a_put_and_readers_nothing() {
    let index = index(16);
    let keeper = index.join().expect("a member");
    assert!(matches!(insert(&keeper, 0, 7), Inserted::New(_)));
    let child = spawn(&index, "hold a lock", None);
    let stopped = joined(&index, &keeper);
    eventually("the child holds the lock", || sent_event(&index, stopped));
    signal(&child, Signal::STOP);
    let entry = index.find(&key(0)).expect("readers take no lock");
    assert_is_whole(&entry, 0);
    assert_eq!(insert(&keeper, 0, 0), Inserted::Contended);
    assert!(!keeper.remove(&entry) && !keeper.relocate(&entry, 0));
    let other = (1..).find(|&n| index.bucket_of(&key(n)) != index.bucket_of(&key(0)));
    let other = other.expect("another bucket");
    assert!(matches!(insert(&keeper, other, 0), Inserted::New(_)), "other stripes are free");
    assert!(index.is_alive(stopped) && !keeper.sweep(stopped));
    signal(&child, Signal::KILL);
    eventually("the kernel marks the member", || index.has_died(stopped));
    assert!(keeper.remove(&entry), "the lock is taken over");
    sweep_and_verify(&index, &keeper, stopped, child);
}

#[test]
fn of_two_members_that_insert_a_key_at_once_one_does() {
    let index = index(RACED as u32);
    let ours = index.join().expect("a member");
    let child = spawn(&index, "race", None);
    joined(&index, &ours);
    ours.note_removed(0);
    let inserted = race(&ours);
    let output = child.wait_with_output().expect("our child");
    assert!(output.status.success());
    let output = String::from_utf8(output.stdout).expect("text");
    let theirs: usize = output.lines().find_map(|line| line.trim().parse().ok()).expect("a count");
    assert_eq!(inserted + theirs, RACED as usize);
    assert_eq!(verify(&index), RACED as u32);
}

#[test]
fn a_member_that_leaves_gives_its_number_to_the_next_one_with_another_generation() {
    let index = index(1);
    let mut members: Vec<Member> = (0..MAX_MEMBERS).map(|_| index.join().expect("room")).collect();
    assert_eq!(index.join().expect_err("64 members").kind(), std::io::ErrorKind::StorageFull);
    let left = members.remove(5);
    let id = left.id();
    assert!(index.is_alive(id));
    // Another thread than the one that joined.
    thread::spawn(move || drop(left)).join().expect("no panic");
    assert!(!index.is_alive(id) && !index.has_died(id));
    let next = index.join().expect("a free number");
    assert_eq!(next.id(), MemberId { generation: id.generation + 1, ..id });
    assert!(index.is_alive(next.id()) && !index.is_alive(id));
}

#[test]
fn the_segments_of_a_dead_member_are_found_by_its_name() {
    let index = index(1);
    let id = {
        let member = index.join().expect("a member");
        assert_eq!((member.claim(), member.claim()), (Some(0), Some(1)));
        member.id()
    };
    let next = index.join().expect("a member");
    assert_eq!((next.id().number, next.claim()), (id.number, Some(2)));
    let held = |id| index.held_by(id).map(|(segment, _)| segment).collect::<Vec<_>>();
    assert_eq!((held(id), held(next.id())), (vec![0, 1], vec![2]));
}
