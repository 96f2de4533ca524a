//! Tests of the membership.

use super::*;
use crate::index::Geometry;
use kvferry_testkit::hanging::HangingDisk;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};

struct Fake {
    member: Member,
    left: Mutex<Vec<MemberId>>,
    asks_to_seal: EventFd,
}

impl Fake {
    fn join(index: &Arc<Index>) -> Arc<Self> {
        let (left, asks_to_seal) = (Mutex::default(), EventFd::new().expect("a descriptor"));
        Arc::new(Self { member: index.join().expect("a member"), left, asks_to_seal })
    }
}

impl Keep for Fake {
    fn member(&self) -> &Member {
        &self.member
    }

    fn became_keeper(&self) {}

    fn connected(&self, _: MemberId) {}

    fn left(&self, member: MemberId) {
        self.left.lock().push(member);
    }

    fn woken(&self) {}

    fn asks_to_seal(&self) -> &EventFd {
        &self.asks_to_seal
    }

    fn asked_to_seal(&self) {}

    fn wait_quiet(&self) {}
}

#[test]
fn a_directory_that_hangs_before_it_is_locked_is_not_waited_for() {
    let _watchdog = Watchdog::new(PATIENCE);
    let folder = std::env::temp_dir().join(format!("kvferry-lock-hangs-{}", std::process::id()));
    let directories = ["a", "b"].map(|it| folder.join(it));
    directories.iter().for_each(|it| std::fs::create_dir_all(it).expect("a folder"));
    let Some(disk) = HangingDisk::mount(&directories[1]) else { return };
    // In memory, too: it answers also while the machine's disk is busy.
    let other = HangingDisk::mount(&directories[0]).expect("as the second");
    // Longer than any thread of this test is kept waiting for a processor.
    let bounds = Bounds { has_several: true, limit: Duration::from_secs(10) };
    assert_eq!(lock_files(&directories, JOIN, bounds).expect("they answer").len(), 2);
    disk.hold();
    // Both, and where the other one is lost.
    for asked in [&directories[..], &directories[1..]] {
        let refused = lock_files(asked, JOIN, bounds).expect_err("it does not answer");
        let Error::Directory { path, source } = refused else { panic!("{refused}") };
        assert!(is_hang(&source) && path.starts_with(&directories[1]), "{source}");
    }
    disk.release();
    drop((disk, other));
    std::fs::remove_dir_all(&folder).expect("made above");
}

#[test]
fn where_no_keeper_answers_the_error_says_why_a_process_is_not_asked() {
    let [absent, denied] = [io::ErrorKind::ConnectionRefused, io::ErrorKind::PermissionDenied]
        .map(|kind| move |what: &str| io::Error::new(kind, what.to_owned()));
    let text = |beacon, refused| no_keeper(beacon, refused).to_string();
    let why = "no process of this user answers as its keeper";
    assert_eq!(text(absent("nothing listens"), None), why);
    assert_eq!(text(denied("as user 7"), None), format!("{why}: as user 7"));
    assert_eq!(text(denied("as user 7"), Some(denied("as 8"))), format!("{why}: as 8"));
    assert_eq!(text(absent("nothing listens"), Some(denied("as 8"))), format!("{why}: as 8"));
}

#[test]
fn a_connection_that_ends_is_that_of_the_keeper_which_had_accepted_it() {
    let geometry = Geometry { slots: 64, segments: 8, pages_per_segment: 256 };
    let index = Arc::new(Index::create(geometry).expect("memory"));
    let [first, second, third] = [(); 3].map(|()| Fake::join(&index));
    assert!(first.member.stand());
    let (secret, listener) = elect::listen().expect("a name");
    first.member.set_secret(secret);
    let channel = Channel::connect(&elect::name_of(secret)).expect("it listens");
    let mut follower = Follower { channel: listener.accept().expect("one"), member: None };
    // It is the keeper no more before the third one has said who it is.
    first.member.step_down();
    assert!(second.member.stand());
    drop(listener);
    let shared = Arc::new(Shared {
        stop: EventFd::new().expect("a descriptor"),
        is_stopped: AtomicBool::new(false),
        keeper: Mutex::default(),
        is_keeper: AtomicBool::new(false),
    });
    let memory = || Fd::new(index.memory().as_fd().try_clone_to_owned().expect("open"));
    let mut run = Run {
        shared: Arc::clone(&shared),
        place: RoleInStore::Follower(Arc::new(channel)),
        keeper: None,
        names: StoreNames {
            directories: Vec::new(),
            bounds: Bounds { has_several: false, limit: Duration::MAX },
            beacon: Vec::new(),
        },
        memory: memory(),
        keep: Arc::clone(&third),
    };
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || run.serve());
        let memory = memory();
        eventually("it says who it is", || {
            assert!(follower.answer(&memory, &*first));
            follower.member == Some(third.member.id())
        });
        drop(follower);
        eventually("it sees the end", || !third.left.lock().is_empty());
        shared.is_stopped.store(true, Ordering::Release);
        serving.join().expect("no panic");
    });
    assert_eq!(*third.left.lock(), [first.member.id()]);
}

#[test]
fn a_queue_of_processes_that_came_is_emptied_at_once() {
    let name = format!("kvferry-came-{}", std::process::id());
    let listener = Channel::listen(name.as_bytes()).expect("a free name");
    let came: Vec<_> = (0..50).map(|_| Channel::connect(name.as_bytes())).collect();
    assert!(came.iter().all(|it| it.is_ok()));
    assert_eq!(accept_all(&listener).len(), 50);
    assert!(accept_all(&listener).is_empty());
}
