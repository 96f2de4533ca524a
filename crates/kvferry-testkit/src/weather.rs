//! A network that delays, reorders and loses: every frame between two ports goes through this
//! process.
//!
//! The kernels that this runs on have no `netem`. So the two hosts of a [`Network`] have no bridge
//! between them, but two threads here, which take frames off one port and put them onto the other,
//! when and if the weather lets them. Checksums and segmentation that a kernel left to its network
//! card travel with the frame (`PACKET_VNET_HDR`).
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

use crate::pattern::Rng;

/// A segment of 64 KiB with its headers.
const FRAME: usize = 66 * 1024;
/// Frames that are held back; more are lost, as in any router.
const QUEUE: usize = 8192;
/// How often the threads look whether they are to end.
const LOOK: Duration = Duration::from_millis(50);

/// What happens to frames, and what has happened. It may be changed at any time.
#[derive(Debug, Default)]
pub struct Sky {
    delay_us: AtomicU64,
    jitter_us: AtomicU64,
    loss_per_mille: AtomicU64,
    passed: AtomicU64,
    lost: AtomicU64,
    overtaken: AtomicU64,
    ended: AtomicBool,
}

impl Sky {
    /// Every frame is late by `delay`, and by up to `jitter` more, each by its own: with a jitter,
    /// frames overtake each other.
    pub fn delay(&self, delay: Duration, jitter: Duration) {
        self.delay_us.store(delay.as_micros() as u64, Ordering::Relaxed);
        self.jitter_us.store(jitter.as_micros() as u64, Ordering::Relaxed);
    }

    /// So many of a thousand frames are lost; 1000 is a cut cable.
    pub fn lose(&self, per_mille: u64) {
        self.loss_per_mille.store(per_mille, Ordering::Relaxed);
    }

    /// Frames that arrived.
    pub fn passed(&self) -> u64 {
        self.passed.load(Ordering::Relaxed)
    }

    /// Frames that did not.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Frames that arrived before one that had left earlier.
    pub fn overtaken(&self) -> u64 {
        self.overtaken.load(Ordering::Relaxed)
    }
}

/// The threads that move frames. Ended on drop.
#[derive(Debug)]
pub(crate) struct Weather {
    pub(crate) sky: Arc<Sky>,
    threads: Vec<JoinHandle<()>>,
}

impl Weather {
    /// Between two interfaces of a network namespace.
    pub(crate) fn between(namespace: &str, ports: [&str; 2]) -> io::Result<Self> {
        let sky = Arc::new(Sky::default());
        let (namespace, names) = (namespace.to_owned(), ports.map(str::to_owned));
        // A namespace is a thread's own: sockets are opened by one that has moved there.
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
                let (from, to, sky) = (Arc::clone(from), Arc::clone(to), Arc::clone(&sky));
                std::thread::spawn(move || Road::new(from, to, sky, seed as u64).run())
            })
            .collect();
        Ok(Self { sky, threads })
    }
}

impl Drop for Weather {
    fn drop(&mut self) {
        self.sky.ended.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A socket that takes and gives whole frames of one interface.
fn port(interface: &str) -> io::Result<OwnedFd> {
    let all = (libc::ETH_P_ALL as u16).to_be();
    let flags = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: makes a descriptor and touches no memory.
    let fd = checked(unsafe { libc::socket(libc::AF_PACKET, flags, i32::from(all)) })?;
    // SAFETY: a new descriptor that nobody else knows.
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

/// A frame that is on its way: when it arrives, and the how manyth it is.
type Held = Reverse<(Instant, u64, Vec<u8>)>;

/// One direction.
struct Road {
    from: Arc<OwnedFd>,
    to: Arc<OwnedFd>,
    sky: Arc<Sky>,
    held: BinaryHeap<Held>,
    rng: Rng,
    taken: u64,
    /// The latest that arrived.
    latest: u64,
}

impl Road {
    fn new(from: Arc<OwnedFd>, to: Arc<OwnedFd>, sky: Arc<Sky>, seed: u64) -> Self {
        Self { from, to, sky, held: BinaryHeap::new(), rng: Rng::new(seed), taken: 0, latest: 0 }
    }

    fn run(&mut self) {
        let mut buffer = vec![0; FRAME];
        while !self.sky.ended.load(Ordering::SeqCst) {
            self.wait();
            while let Ok(len) = rustix::io::read(&self.from, &mut buffer) {
                self.take(&buffer[..len]);
            }
            self.deliver();
        }
    }

    /// For a frame, or until the next one that is held back is due.
    fn wait(&self) {
        use rustix::event::{PollFd, PollFlags, poll};
        let now = Instant::now();
        let due =
            self.held.peek().map_or(LOOK, |Reverse((at, ..))| at.saturating_duration_since(now));
        let timeout = rustix::event::Timespec::try_from(due.min(LOOK)).ok();
        let _ = poll(&mut [PollFd::new(&self.from, PollFlags::IN)], timeout.as_ref());
    }

    fn take(&mut self, frame: &[u8]) {
        let loss = self.sky.loss_per_mille.load(Ordering::Relaxed);
        if (self.rng.below(1000) as u64) < loss || self.held.len() >= QUEUE {
            self.sky.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let jitter = self.sky.jitter_us.load(Ordering::Relaxed) as usize;
        let late = self.sky.delay_us.load(Ordering::Relaxed) + self.rng.below(jitter + 1) as u64;
        self.taken += 1;
        let at = Instant::now() + Duration::from_micros(late);
        self.held.push(Reverse((at, self.taken, frame.to_vec())));
    }

    fn deliver(&mut self) {
        let now = Instant::now();
        while self.held.peek().is_some_and(|Reverse((at, ..))| *at <= now) {
            let Some(Reverse((_, number, frame))) = self.held.pop() else { return };
            // What the port does not take is lost, as on any wire.
            let counter = match rustix::io::write(&self.to, &frame) {
                Ok(_) => &self.sky.passed,
                Err(_) => &self.sky.lost,
            };
            counter.fetch_add(1, Ordering::Relaxed);
            if number < self.latest {
                self.sky.overtaken.fetch_add(1, Ordering::Relaxed);
            }
            self.latest = self.latest.max(number);
        }
    }
}
