//! A network that delays, reorders and loses frames: every frame between two ports goes through
//! this process.
//!
//! The kernels that the tests run on have no `netem`. Instead of a bridge, two threads connect the
//! hosts of a [`Network`]: each reads frames from one port and writes them to the other, as
//! [`Impairments`] say. Checksums and segmentation that the kernel left to the network card travel
//! with the frame (`PACKET_VNET_HDR`).
//!
//! [`Network`]: crate::network::Network

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fastrand::Rng;

/// Bytes of the largest frame: a segment of 64 KiB with its headers.
const FRAME: usize = 66 * 1024;
/// Frames that wait in one direction; more are lost, as in a router.
const QUEUE: usize = 8192;
/// Interval at which the threads check whether they must end.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// Delay, jitter and loss of both directions, which may change at any time, and counters of frames.
#[derive(Debug, Default)]
pub struct Impairments {
    delay_us: AtomicU64,
    jitter_us: AtomicU64,
    loss_per_mille: AtomicU64,
    passed: AtomicU64,
    lost: AtomicU64,
    reordered: AtomicU64,
    ended: AtomicBool,
}

impl Impairments {
    /// Delays every frame by `delay` and a random time up to `jitter`, drawn for each frame: with
    /// jitter, frames overtake each other.
    pub fn delay(&self, delay: Duration, jitter: Duration) {
        self.delay_us.store(delay.as_micros() as u64, Ordering::Relaxed);
        self.jitter_us.store(jitter.as_micros() as u64, Ordering::Relaxed);
    }

    /// Loses this many of a thousand frames; 1000 is a cut cable.
    pub fn lose(&self, per_mille: u64) {
        self.loss_per_mille.store(per_mille, Ordering::Relaxed);
    }

    /// Frames that were delivered.
    pub fn passed(&self) -> u64 {
        self.passed.load(Ordering::Relaxed)
    }

    /// Frames that were lost.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Frames that arrived after a frame that had been sent later.
    pub fn reordered(&self) -> u64 {
        self.reordered.load(Ordering::Relaxed)
    }
}

/// The threads that move frames. Ended on drop.
#[derive(Debug)]
pub(crate) struct Netem {
    pub(crate) impairments: Arc<Impairments>,
    threads: Vec<JoinHandle<()>>,
}

impl Netem {
    /// Connects two interfaces of a network namespace.
    pub(crate) fn between(namespace: &str, ports: [&str; 2]) -> io::Result<Self> {
        let impairments = Arc::new(Impairments::default());
        let (namespace, names) = (namespace.to_owned(), ports.map(str::to_owned));
        // The network namespace belongs to the thread: a thread that moves there opens the sockets.
        let opening = std::thread::spawn(move || {
            let file = File::open(format!("/var/run/netns/{namespace}"))?;
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(file.as_fd(), kind)?;
            Ok::<_, io::Error>([port(&names[0])?, port(&names[1])?])
        });
        let opened = opening.join().map_err(|_| io::Error::other("the thread panicked"))?;
        let [near, far] = opened?.map(Arc::new);
        let threads = [(&near, &far), (&far, &near)]
            .into_iter()
            .enumerate()
            .map(|(seed, (from, to))| {
                let (from, to, impairments) =
                    (Arc::clone(from), Arc::clone(to), Arc::clone(&impairments));
                std::thread::spawn(move || Direction::new(from, to, impairments, seed as u64).run())
            })
            .collect();
        Ok(Self { impairments, threads })
    }
}

impl Drop for Netem {
    fn drop(&mut self) {
        self.impairments.ended.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A raw socket that reads and writes whole frames of one interface.
fn port(interface: &str) -> io::Result<OwnedFd> {
    let all = (libc::ETH_P_ALL as u16).to_be();
    let flags = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: makes a descriptor and touches no memory.
    let fd = checked(unsafe { libc::socket(libc::AF_PACKET, flags, i32::from(all)) })?;
    // SAFETY: a new descriptor, which nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    for option in [libc::PACKET_VNET_HDR, libc::PACKET_IGNORE_OUTGOING] {
        let on: libc::c_int = 1;
        // SAFETY: the options take one int, whose address and size are passed.
        checked(unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                option,
                (&raw const on).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        })?;
    }
    let name = CString::new(interface)?;
    // SAFETY: a string of C that outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: an address of this kind may be all zero.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = all;
    address.sll_ifindex = index as i32;
    // SAFETY: an address with its size.
    checked(unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    })?;
    Ok(socket)
}

/// A frame in flight: its arrival time, its number and its bytes.
type FrameInFlight = Reverse<(Instant, u64, Vec<u8>)>;

/// A direction of the network.
struct Direction {
    from: Arc<OwnedFd>,
    to: Arc<OwnedFd>,
    impairments: Arc<Impairments>,
    held: BinaryHeap<FrameInFlight>,
    rng: Rng,
    taken: u64,
    /// The highest number of a frame that was delivered.
    latest: u64,
}

impl Direction {
    fn new(from: Arc<OwnedFd>, to: Arc<OwnedFd>, impairments: Arc<Impairments>, seed: u64) -> Self {
        Self {
            from,
            to,
            impairments,
            held: BinaryHeap::new(),
            rng: Rng::with_seed(seed),
            taken: 0,
            latest: 0,
        }
    }

    fn run(&mut self) {
        let mut buffer = vec![0; FRAME];
        while !self.impairments.ended.load(Ordering::SeqCst) {
            self.wait();
            while let Ok(len) = rustix::io::read(&self.from, &mut buffer) {
                self.take(&buffer[..len]);
            }
            self.deliver();
        }
    }

    /// Waits for a frame, or until the next delayed frame is due.
    fn wait(&self) {
        use rustix::event::{PollFd, PollFlags, poll};
        let now = Instant::now();
        let due = self
            .held
            .peek()
            .map_or(CHECK_EVERY, |Reverse((at, ..))| at.saturating_duration_since(now));
        let timeout = rustix::event::Timespec::try_from(due.min(CHECK_EVERY)).ok();
        let _ = poll(&mut [PollFd::new(&self.from, PollFlags::IN)], timeout.as_ref());
    }

    fn take(&mut self, frame: &[u8]) {
        let loss = self.impairments.loss_per_mille.load(Ordering::Relaxed);
        if self.rng.u64(..1000) < loss || self.held.len() >= QUEUE {
            self.impairments.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let jitter = self.impairments.jitter_us.load(Ordering::Relaxed);
        let late = self.impairments.delay_us.load(Ordering::Relaxed) + self.rng.u64(..=jitter);
        self.taken += 1;
        let at = Instant::now() + Duration::from_micros(late);
        self.held.push(Reverse((at, self.taken, frame.to_vec())));
    }

    fn deliver(&mut self) {
        let now = Instant::now();
        while self.held.peek().is_some_and(|Reverse((at, ..))| *at <= now) {
            let Some(Reverse((_, number, frame))) = self.held.pop() else { return };
            // A frame that the port does not take is lost.
            let counter = match rustix::io::write(&self.to, &frame) {
                Ok(_) => &self.impairments.passed,
                Err(_) => &self.impairments.lost,
            };
            counter.fetch_add(1, Ordering::Relaxed);
            if number < self.latest {
                self.impairments.reordered.fetch_add(1, Ordering::Relaxed);
            }
            self.latest = self.latest.max(number);
        }
    }
}
