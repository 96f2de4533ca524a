//! A relay between two agents that flips a byte, or holds bytes back.

use super::*;
use fastrand::Rng;
use kvferry::Checksum;
use kvferry_proto::RequestHeader;
use kvferry_proto::frame::head_crc;
use kvferry_sys::map::Mapping;
use kvferry_testkit::slow::SlowMemory;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// One byte to flip: its connection, direction and offset.
#[derive(Clone, Copy, Debug)]
struct Flip {
    connection: usize,
    towards_target: bool,
    at: usize,
}

#[derive(Default)]
struct Plan {
    flip: Option<Flip>,
    flipped: AtomicBool,
    /// Holds back bytes to the target on all connections but the first, the control connection.
    hold: AtomicBool,
    /// After the next bytes, closes the sending side of all connections but the first, and reads no
    /// answer.
    half_close: AtomicBool,
    /// Loses everything on connections with numbers from the first to before the second.
    forgotten_from: AtomicUsize,
    forgotten_to: AtomicUsize,
    connections: AtomicUsize,
    /// Moves the first descriptor of each request on a data stream up by so many bytes, and puts the
    /// CRC right where there is one.
    moves_by: AtomicUsize,
    moved: AtomicBool,
    ended: AtomicBool,
}

struct Relay {
    address: String,
    plan: Arc<Plan>,
}

impl Relay {
    fn to(target: &str, flip: Option<Flip>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let plan = Arc::new(Plan { flip, ..Plan::default() });
        let (target, shared) = (target.to_owned(), Arc::clone(&plan));
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if shared.ended.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(far) = TcpStream::connect(&target) else { return };
                let number = shared.connections.fetch_add(1, Ordering::SeqCst);
                for towards_target in [true, false] {
                    let (near, far) = (near.try_clone(), far.try_clone());
                    let (Ok(near), Ok(far)) = (near, far) else { return };
                    let (from, to) = if towards_target { (near, far) } else { (far, near) };
                    let plan = Arc::clone(&shared);
                    thread::spawn(move || plan.pump(from, to, number, towards_target));
                }
            }
        });
        Self { address, plan }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.plan.ended.store(true, Ordering::SeqCst);
        self.plan.hold.store(false, Ordering::SeqCst);
        drop(TcpStream::connect(&self.address));
    }
}

impl Plan {
    /// Drops all later bytes on the existing connections, except the first `kept`, and tells of no
    /// end. New connections work. A NAT does this to idle connections.
    fn forget(&self, kept: usize) {
        self.forgotten_from.store(kept, Ordering::SeqCst);
        self.forgotten_to.store(self.connections.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    fn is_forgotten(&self, number: usize) -> bool {
        let from = self.forgotten_from.load(Ordering::SeqCst);
        (from..self.forgotten_to.load(Ordering::SeqCst)).contains(&number)
    }

    fn move_descriptors(&self, bytes: &mut [u8]) {
        let by = self.moves_by.load(Ordering::SeqCst) as u64;
        // Small requests without a notification: header, one descriptor.
        let head = RequestHeader::LEN + 16;
        let is_request = bytes.len() >= head && bytes.starts_with(b"KVFq");
        if by == 0 || !is_request {
            return;
        }
        let (header, table) = bytes[..head].split_first_chunk_mut().expect("a head");
        let offset = u64::from_le_bytes(table[..8].try_into().expect("eight bytes")) + by;
        table[..8].copy_from_slice(&offset.to_le_bytes());
        if header[4] == 1 {
            let crc = head_crc(header, table, &[]);
            RequestHeader::set_head_crc(header, crc);
        }
        self.moved.store(true, Ordering::SeqCst);
    }

    fn pump(&self, mut from: TcpStream, mut to: TcpStream, number: usize, towards_target: bool) {
        let mut buffer = vec![0; 64 * KIB];
        let mut passed = 0;
        let deaf = || number > 0 && self.half_close.load(Ordering::SeqCst);
        while let Ok(n) = from.read(&mut buffer) {
            if n == 0 {
                break;
            }
            if self.is_forgotten(number) {
                continue;
            }
            while number > 0 && towards_target && self.hold.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(1));
            }
            if let Some(flip) = self.flip
                && (flip.connection, flip.towards_target) == (number, towards_target)
                && (passed..passed + n).contains(&flip.at)
            {
                buffer[flip.at - passed] ^= 0x10;
                self.flipped.store(true, Ordering::SeqCst);
            }
            if number > 0 && towards_target {
                self.move_descriptors(&mut buffer[..n]);
            }
            passed += n;
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
            if deaf() {
                if towards_target {
                    drop(to.shutdown(Shutdown::Write));
                }
                while !self.ended.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        // What forgets a connection does not tell of its end.
        while self.is_forgotten(number) && !self.ended.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(10));
        }
        drop(to.shutdown(Shutdown::Write));
        drop(from.shutdown(Shutdown::Read));
    }
}

fn checked(name: &str) -> Agent {
    Agent::builder()
        .name(name)
        .checksum(Checksum::On)
        .silence(NEVER)
        .streams_per_peer(2)
        .start()
        .expect("an agent")
}

#[test]
fn a_flipped_byte_never_ends_a_transfer_as_done() {
    let _bound = bounded();
    let len = 300 * KIB;
    let rounds = 48;
    let next = AtomicUsize::new(0);
    let flipped = AtomicUsize::new(0);
    let round = |number: usize| {
        let mut rng = Rng::with_seed(number as u64);
        let longest = [80, 400, 9000, len][number % 4];
        let flip = Flip {
            connection: [1, 1, 2, 0][(number / 4) % 4],
            towards_target: rng.usize(..3) > 0,
            at: rng.usize(..longest),
        };
        let (near, far) = (checked("near"), checked("far"));
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        let beside = far.allocate(len, Access::READ_WRITE).expect("memory");
        refill(&to, 2);
        refill(&beside, 3);
        let (from, back) = (source(&near, len, 1), source(&near, len, 4));
        let relay = Relay::to(far.advertised(), Some(flip));
        let peer = near.peer(&relay.address).expect("an address");
        let options = within(Duration::from_millis(2500));
        let written = peer.write(&batch(&from, &to.remote(), 3000), &options);
        if written.is_ok() {
            let mut model = Pattern::new(2).bytes(len);
            let whole = len / 3000 * 3000;
            model[..whole].copy_from_slice(&Pattern::new(1).bytes(len)[..whole]);
            assert!(content(&to) == model, "{flip:?}: done, and the bytes are wrong");
        }
        refill(&to, 5);
        let read = peer.read(&batch(&back, &to.remote(), len), &options);
        if read.is_ok() {
            assert!(
                content(&back) == Pattern::new(5).bytes(len),
                "{flip:?}: done, and the bytes are wrong"
            );
        }
        assert!(content(&beside) == Pattern::new(3).bytes(len), "{flip:?}: memory beside it");
        flipped
            .fetch_add(usize::from(relay.plan.flipped.load(Ordering::SeqCst)), Ordering::Relaxed);
        // The target still works.
        let direct = near.peer(far.advertised()).expect("an address");
        direct
            .write(&batch(&from, &to.remote(), len), &within(NEVER))
            .unwrap_or_else(|e| panic!("{flip:?}, then past the relay: {e:?}"));
    };
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= rounds {
                        break;
                    }
                    round(number);
                }
            });
        }
    });
    let flipped = flipped.into_inner();
    assert!(flipped >= rounds / 3, "only {flipped} of {rounds} rounds flipped a byte");
}

#[test]
fn a_descriptor_that_a_relay_rewrote_between_two_agents_of_one_secret_lands_nowhere() {
    let _bound = bounded();
    let started = |name: &str, secret: Option<&[u8]>| {
        let builder = Agent::builder()
            .name(name)
            .silence(NEVER)
            .checksum(Checksum::Off)
            .transports(Transports::parse("tcp").expect("a name"));
        let builder = match secret {
            Some(secret) => builder.secret(secret),
            None => builder,
        };
        builder.start().expect("an agent")
    };
    let len = 64 * KIB;
    for secret in [None, Some(&b"a secret that both agents have"[..])] {
        let (near, far) = (started("near", secret), started("far", secret));
        let to = far.allocate(len, Access::READ_WRITE).expect("memory");
        let from = source(&near, len, 1);
        let relay = Relay::to(far.advertised(), None);
        let peer = near.peer(&relay.address).expect("an address");
        let mut moves = Batch::new();
        moves.push(&from, 0, &to.remote(), 0, 4096).expect("inside");
        let options = within(NEVER);
        peer.write(&moves, &options).expect("a relay that changes nothing");
        refill(&to, 2);
        relay.plan.moves_by.store(8 * KIB, Ordering::SeqCst);
        let outcome = peer.write(&moves, &options);
        assert!(relay.plan.moved.load(Ordering::SeqCst), "the relay had its chance");
        let is_untouched = content(&to) == Pattern::new(2).bytes(len);
        if secret.is_none() {
            assert!(outcome.is_ok() && !is_untouched, "nothing keeps a relay from that");
            continue;
        }
        assert!(is_untouched, "bytes landed where the relay sent them");
        let error = outcome.expect_err("the target refused it");
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error:?}");
        // The session has ended; past the relay there is another one.
        let direct = near.peer(far.advertised()).expect("an address");
        direct.write(&moves, &options).expect("past the relay");
    }
}

#[test]
fn bytes_that_the_network_held_back_do_not_land_after_a_confirmed_cancel() {
    let _bound = bounded();
    let (near, far) = (agent(), agent());
    let len = 4 * MIB;
    let to = far.allocate(len, Access::WRITE).expect("memory");
    let from = source(&near, len, 1);
    for (round, cancel) in [true, false, true, false].into_iter().enumerate() {
        let relay = Relay::to(far.advertised(), None);
        let peer = near.peer(&relay.address).expect("an address");
        let moves = batch(&from, &to.remote(), 16 * KIB);
        peer.write(&moves, &Options::default()).expect("a healthy write");
        relay.plan.hold.store(true, Ordering::SeqCst);
        // Heartbeats pass, so the peer is not silent.
        let timeout = if cancel { NEVER } else { Duration::from_millis(900) };
        let transfer = peer.write_async(&moves, &within(timeout));
        thread::sleep(Duration::from_millis(100 + 40 * round as u64));
        if cancel {
            transfer.cancel();
        }
        let outcome = transfer.wait(PATIENCE).expect("it ends");
        let error = outcome.expect_err("its bytes are held back");
        let kind = if cancel { ErrorKind::Cancelled } else { ErrorKind::Deadline };
        assert_eq!(error.kind(), kind, "{error:?}");
        assert_ne!(error.quiesced(), Some(false), "the peer can be asked: {error:?}");
        refill(&to, 9);
        relay.plan.hold.store(false, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(150));
        assert!(
            content(&to) == Pattern::new(9).bytes(len),
            "bytes that were held back landed after the end was confirmed"
        );
    }
}

#[test]
fn a_peer_that_half_closes_and_never_reads_uses_no_cpu() {
    let _bound = bounded();
    let (mut child, address) = Child::with_agent(peer_config());
    let len = 64 * MIB;
    let region = child.allocate(len, "r", 1);
    let near = agent();
    let to = source(&near, len, 2);
    let relay = Relay::to(&address, None);
    let peer = near.peer(&relay.address).expect("an address");
    let one = batch(&source(&near, 4096, 3), &region.remote, 4096);
    peer.read(&one, &Options::default()).expect("a healthy read");
    relay.plan.half_close.store(true, Ordering::SeqCst);
    let transfer =
        peer.read_async(&batch(&to, &region.remote, len), &within(Duration::from_secs(9)));
    thread::sleep(Duration::from_millis(300));
    let before = child.resources().cpu;
    let time = Duration::from_secs(1);
    thread::sleep(time);
    let used = child.resources().cpu - before;
    // An I/O thread that spins would use a whole core.
    assert!(used < time / 5, "the target used {used:?} of {time:?}");
    transfer.cancel();
    transfer.wait(PATIENCE).expect("it ends").expect_err("nothing was answered");
}

/// Device memory whose copies wait until it is released.
fn held_device(agent: &Agent, len: usize) -> (SlowMemory, Region) {
    let device = SlowMemory::new(Arc::new(Mapping::anonymous(len).expect("memory")), 0, len, 1);
    device.hold();
    let region = agent.register_device(device.memory(), Access::READ_WRITE);
    (device, region.expect("a region"))
}

#[test]
fn a_damaged_transfer_ends_only_after_the_copies_to_its_device() {
    let _bound = bounded();
    let len = 64 * KIB;
    for way in Way::ALL {
        let write = way == Way::Write;
        let (near, far) = (checked("near"), checked("far"));
        // In the payload of the first request, or of its answer.
        let flip = Flip { connection: 1, towards_target: write, at: 1000 };
        let relay = Relay::to(far.advertised(), Some(flip));
        let peer = near.peer(&relay.address).expect("an address");
        let (device, held) = held_device(if write { &far } else { &near }, len);
        let other = if write { &near } else { &far }.allocate(len, Access::READ).expect("memory");
        let transfer = match write {
            true => peer.write_async(&batch(&other, &held.remote(), len), &within(NEVER)),
            false => peer.read_async(&batch(&held, &other.remote(), len), &within(NEVER)),
        };
        eventually("the device is asked to copy", || device.pending() > 0);
        let early = transfer.wait(Duration::from_millis(100));
        device.release();
        assert!(early.is_none(), "write {write}: the device was still copying: {early:?}");
        let outcome = transfer.wait(PATIENCE).expect("it ends");
        let error = outcome.expect_err("a byte was flipped");
        assert_eq!((error.kind(), error.quiesced()), (ErrorKind::Checksum, Some(true)));
        assert_eq!(device.pending(), 0);
    }
}

#[test]
fn the_first_transfer_after_a_nat_forgot_idle_connections_goes_over_new_ones() {
    let _bound = bounded();
    // The NAT drops all connections, or the lanes only.
    thread::scope(|scope| {
        for kept in [0, 1] {
            scope.spawn(move || {
                // A process that does not run for a part of the limit ends its sessions, once.
                let errors: Vec<_> = (0..3).map_while(|_| first_after_a_nat_forgot(kept)).collect();
                assert!(errors.len() < 3, "{kept} connections kept: {errors:?}");
            });
        }
    });
}

/// The error of the first transfer after a NAT has forgotten all idle connections but so many.
fn first_after_a_nat_forgot(kept: usize) -> Option<kvferry::Error> {
    let (near, far) = (agent_with("tcp", SILENCE), agent());
    let to = far.allocate(MIB, Access::WRITE).expect("memory");
    let from = source(&near, MIB, 1);
    let relay = Relay::to(far.advertised(), None);
    let peer = near.peer(&relay.address).expect("an address");
    let moves = batch(&from, &to.remote(), 64 * KIB);
    eventually("a healthy write", || peer.write(&moves, &Options::default()).is_ok());
    // A session counts as idle for long after ten silence limits.
    thread::sleep(11 * SILENCE);
    relay.plan.forget(kept);
    peer.write(&moves, &within(NEVER)).err()
}

/// Only its silence shows that the old session is over.
#[test]
fn the_first_call_to_a_peer_whose_death_was_not_noticed_connects_again() {
    let _bound = bounded();
    thread::scope(|scope| {
        for synchronous in [true, false] {
            scope.spawn(move || first_after_an_unnoticed_restart(synchronous));
        }
    });
}

fn first_after_an_unnoticed_restart(synchronous: bool) {
    let port = KeptPort::new();
    let mut config = peer_config();
    config["listen"] = json!(port.address());
    let (mut child, address) = Child::with_agent(config.clone());
    let old = child.allocate(MIB, "rw", 2);
    let agent = agent_with("tcp", Duration::from_secs(4));
    let from = source(&agent, MIB, 1);
    let relay = Relay::to(&address, None);
    let peer = agent.peer(&relay.address).expect("an address");
    let moves = batch(&from, &old.remote, 64 * KIB);
    eventually("a healthy write", || peer.write(&moves, &Options::default()).is_ok());
    let opened = agent.stats().sessions_opened;
    relay.plan.forget(0);
    child.kill();

    let (mut second, _) = Child::with_agent(config);
    let new = second.allocate(MIB, "rw", 3);
    let moves = batch(&from, &new.remote, 64 * KIB);
    let outcome = if synchronous {
        peer.write(&moves, &within(NEVER))
    } else {
        peer.write_async(&moves, &within(NEVER)).wait(PATIENCE).expect("the silence limit ends it")
    };
    outcome.expect("the first call to the restarted peer");
    assert!(second.matches(&new, 1));
    assert!(agent.stats().sessions_opened > opened);
}
