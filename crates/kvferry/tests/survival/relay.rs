//! A relay between two agents that flips a byte, or holds bytes back.

use super::*;
use kvferry::{Checksum, ErrorKind};
use kvferry_testkit::pattern::Rng;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// One byte to be flipped: of which connection, in which direction, and where.
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
    /// Holds back what goes to the target on all connections but the first, which is the control
    /// connection.
    hold: AtomicBool,
    connections: AtomicUsize,
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
    fn pump(&self, mut from: TcpStream, mut to: TcpStream, number: usize, towards_target: bool) {
        let mut buffer = vec![0; 64 * KIB];
        let mut passed = 0;
        while let Ok(n) = from.read(&mut buffer) {
            if n == 0 {
                break;
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
            passed += n;
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        drop(to.shutdown(Shutdown::Write));
        drop(from.shutdown(Shutdown::Read));
    }
}

fn checked(name: &str) -> Agent {
    Agent::builder()
        .name(name)
        .checksum(Checksum::On)
        .silence(SILENCE)
        .streams_per_peer(2)
        .start()
        .expect("an agent")
}

#[test]
fn a_flipped_byte_in_flight_never_passes_for_done() {
    let _bound = bounded();
    let len = 300 * KIB;
    let rounds = 48;
    let next = AtomicUsize::new(0);
    let flipped = AtomicUsize::new(0);
    let round = |number: usize| {
        let mut rng = Rng::new(number as u64);
        let longest = [80, 400, 9000, len][number % 4];
        let flip = Flip {
            connection: [1, 1, 2, 0][(number / 4) % 4],
            towards_target: rng.below(3) > 0,
            at: rng.below(longest),
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
        // The target is as good as ever.
        let direct = near.peer(far.advertised()).expect("an address");
        direct
            .write(&batch(&from, &to.remote(), len), &options)
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
    assert!(flipped >= rounds / 3, "only {flipped} of {rounds} rounds met their byte");
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
        // Heartbeats pass, so it is not silence that ends it.
        let transfer = peer.write_async(moves, within(Duration::from_millis(900)));
        thread::sleep(Duration::from_millis(100 + 40 * round as u64));
        let began = Instant::now();
        if cancel {
            transfer.cancel();
        }
        let outcome = transfer.wait(Duration::from_secs(10)).expect("it ends");
        assert_within(began, Duration::from_secs(3), "ending a transfer whose bytes are held back");
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
