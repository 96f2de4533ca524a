//! The abstract names at which the processes of a store meet, and programs that take them.

use crate::processes::Other;
use crate::{Engine, Folder, MIB, options, prompt};
use kvferry_store::Error;
use kvferry_sys::lock::LockFile;
use kvferry_sys::shared::Shared;
use kvferry_sys::unix::{Channel, user};
use kvferry_testkit::eventually;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

const LEN: u64 = 64 << 10;
const CAPACITY: u64 = 256 * MIB;
const BLOCKS: usize = 6;

/// Makes a store with one prompt. Returns the name that follows from its id.
fn made(folder: &Folder) -> Vec<u8> {
    let engine = Engine::open(&options(folder.path(), CAPACITY), LEN);
    assert_eq!(engine.put(&prompt(1, BLOCKS), 0).stored, BLOCKS);
    engine.store.close();
    let superblock = std::fs::read(folder.path().join("kvferry.store")).expect("a superblock");
    let id: String = superblock[16..32].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("kvferry-store-{id}").into_bytes()
}

/// Programs that have a name: one that does not listen there, and one of another user that does.
enum Taker {
    Silent(#[expect(dead_code, reason = "open until it is dropped")] OwnedFd),
    OtherUser(#[expect(dead_code, reason = "open until it is dropped")] Channel),
}

fn takers(name: &[u8]) -> impl Iterator<Item = Taker> + use<> {
    let name = name.to_vec();
    [false, true].into_iter().filter_map(move |is_of_another_user| {
        if !is_of_another_user {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
            let socket = socket.expect("a socket");
            let name = SocketAddrUnix::new_abstract_name(&name).expect("a short name");
            // A child of another test has it until it runs its program.
            eventually("the name is free", || rustix::net::bind(&socket, &name).is_ok());
            return Some(Taker::Silent(socket));
        }
        if user() != 0 {
            println!("SKIPPED: a program of another user: only root can start one");
            return None;
        }
        let name = name.clone();
        let listening = std::thread::spawn(move || {
            // Of this thread alone, which ends after it made a socket.
            let other = rustix::process::Uid::from_raw(65_534);
            rustix::thread::set_thread_res_uid(other, other, other).expect("root may");
            loop {
                if let Ok(channel) = Channel::listen(&name) {
                    return channel;
                }
            }
        });
        Some(Taker::OtherUser(listening.join().expect("it listens")))
    })
}

#[test]
fn a_program_that_takes_the_name_of_the_store_keeps_no_process_out() {
    let folder = Folder::new("taken");
    let name = made(&folder);
    for _taker in takers(&name) {
        let engine = Engine::open(&options(folder.path(), CAPACITY), LEN);
        assert_eq!(engine.get(&prompt(1, BLOCKS), 0), BLOCKS);
        let mut other = Other::start(folder.path(), CAPACITY, 1, 1);
        assert_eq!(other.next(), Some(1), "it joins");
        assert_eq!(engine.store.stats().processes, 2);
    }
}

#[test]
fn while_another_program_has_the_name_of_the_store_a_keepers_death_ends_in_a_new_keeper() {
    let folder = Folder::new("taken-later");
    let name = made(&folder);
    for _taker in takers(&name) {
        let mut keeper = Other::start(folder.path(), CAPACITY, 1, 1);
        assert_eq!(keeper.next(), Some(1));
        let engine = Engine::open(&options(folder.path(), CAPACITY), LEN);
        assert_eq!(engine.store.stats().is_keeper, 0);
        keeper.signal("-KILL");
        eventually("this process is the keeper, alone", || {
            let stats = engine.store.stats();
            stats.is_keeper == 1 && stats.processes == 1
        });
        let mut third = Other::start(folder.path(), CAPACITY, 1, 1);
        assert_eq!(third.next(), Some(1), "it finds the new keeper");
    }
}

#[test]
fn the_keepers_name_is_in_a_file_for_its_user_alone_and_is_another_one_each_time() {
    let folder = Folder::new("keeper-file");
    let path = folder.path().join("keeper");
    let mut names = std::collections::BTreeSet::new();
    for round in 1..=3 {
        let engine = Engine::open(&options(folder.path(), CAPACITY), LEN);
        while names.len() < round {
            names.extend(std::fs::read(&path));
        }
        assert_eq!(path.metadata().expect("read above").mode() & 0o777, 0o600);
        engine.store.close();
    }
}

#[test]
fn a_store_that_a_process_of_another_release_has_open_is_refused_and_gets_no_second_keeper() {
    let folder = Folder::new("release");
    let name = made(&folder);
    let lock = LockFile::open(&folder.path().join("members")).expect("a file");
    assert!(lock.try_shared().expect("locks"));
    let listener = Channel::listen(&name).expect("a free name");
    let memory = Shared::create("kvferry-test", 4096).expect("memory");
    memory.word(0).store(u64::from_le_bytes(*b"kvfidx\x00\x05"), Relaxed);
    // As a keeper of that release answers.
    std::thread::spawn(move || {
        let mut open = Vec::new();
        loop {
            if let Ok(channel) = listener.accept() {
                channel.send(&[0; 8], &[memory.as_fd()]).expect("it waits");
                open.push(channel);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    match Engine::try_open(&options(folder.path(), CAPACITY), LEN) {
        Err(Error::Busy { detail, .. }) => assert!(detail.contains("another release"), "{detail}"),
        other => panic!("{:?}", other.map(|_| "open")),
    }
}
