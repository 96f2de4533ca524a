//! epoll, event descriptors, waiting for one descriptor.

use crate::fd::Fd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// The events that a descriptor is watched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Readable.
    Read,
    /// Writable, and the peer has closed its side.
    Write,
    /// Writable only. Level-triggered, a half-closed connection would report its closing on every
    /// wait.
    WriteOnly,
    /// Readable or writable.
    Both,
    /// The peer has closed its side.
    Hangup,
    /// Only errors and hang-ups of both sides; epoll reports them once.
    None,
}

/// The events that a descriptor reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// There are bytes to read, or the stream has ended.
    pub read: bool,
    /// The send buffer has space.
    pub write: bool,
    /// The peer has closed its side.
    pub peer_closed: bool,
    /// The connection is closed on both sides, or was reset.
    pub closed: bool,
}

impl Ready {
    /// Whether any event was reported.
    pub fn any(self) -> bool {
        self.read || self.write || self.closed || self.peer_closed
    }
}

pub(crate) fn timespec(timeout: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    }
}

/// An epoll instance, level-triggered.
#[derive(Debug)]
pub struct Epoll(Fd);

/// The events of one descriptor, with the token it was added with.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The token given to [`Epoll::add`].
    pub token: u64,
    /// Events that the descriptor reported.
    pub ready: Ready,
}

fn flags(interest: Interest) -> epoll::EventFlags {
    let base = epoll::EventFlags::RDHUP;
    match interest {
        Interest::Read => base | epoll::EventFlags::IN,
        Interest::Write => base | epoll::EventFlags::OUT,
        Interest::Both => base | epoll::EventFlags::IN | epoll::EventFlags::OUT,
        Interest::WriteOnly => epoll::EventFlags::OUT,
        Interest::Hangup => base,
        // The kernel always reports HUP and ERR. A handler that waits for another event can't clear
        // them, so level-triggered they would wake it again and again.
        Interest::None => epoll::EventFlags::ET,
    }
}

impl Epoll {
    /// A new instance.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Fd::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)))
    }

    /// Starts to watch `fd` for `interest`; its events carry `token`.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    /// Changes the events that `fd` is watched for.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    /// Stops watching `fd`.
    pub fn delete(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Events that a wait reports at most. The kernel reports the others before it reports these again.
    pub const EVENTS_MAX: usize = 64;

    /// Waits until a descriptor is ready or `timeout` has passed, and appends at most [`Epoll::EVENTS_MAX`] events.
    ///
    /// # Errors
    /// The kernel's error; an interrupted wait is an empty one.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<()> {
        let mut raw = [MaybeUninit::<epoll::Event>::uninit(); Self::EVENTS_MAX];
        let timeout = timeout.map(timespec);
        let ready = match epoll::wait(&self.0, &mut raw, timeout.as_ref()) {
            Ok((ready, _)) => ready,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        events.extend(ready.iter().map(|e| {
            let (data, bits) = (e.data, e.flags);
            Event {
                token: data.u64(),
                ready: Ready {
                    read: bits.intersects(epoll::EventFlags::IN),
                    write: bits.intersects(epoll::EventFlags::OUT),
                    peer_closed: bits.intersects(epoll::EventFlags::RDHUP),
                    closed: bits.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR),
                },
            }
        }));
        Ok(())
    }
}

fn poll_flags(interest: Interest) -> PollFlags {
    match interest {
        Interest::Read => PollFlags::IN,
        Interest::Write | Interest::WriteOnly => PollFlags::OUT,
        Interest::Both => PollFlags::IN | PollFlags::OUT,
        Interest::Hangup => PollFlags::RDHUP,
        Interest::None => PollFlags::empty(),
    }
}

fn reported(fd: &PollFd<'_>) -> Ready {
    let got = fd.revents();
    Ready {
        read: got.intersects(PollFlags::IN),
        write: got.intersects(PollFlags::OUT),
        peer_closed: got.intersects(PollFlags::RDHUP),
        closed: got.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
    }
}

/// Waits for one descriptor; an empty [`Ready`] if `timeout` has passed or a signal came.
pub fn wait_one(
    fd: BorrowedFd<'_>,
    interest: Interest,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let mut fds = [PollFd::from_borrowed_fd(fd, poll_flags(interest))];
    let timeout = timeout.map(timespec);
    match rustix::event::poll(&mut fds, timeout.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
        Err(e) => return Err(e.into()),
    }
    Ok(reported(&fds[0]))
}

/// Waits for the first of several descriptors, each with its own interest; `None` if `timeout` has
/// passed or a signal came.
pub fn wait_any(
    fds: &[(BorrowedFd<'_>, Interest)],
    timeout: Option<Duration>,
) -> io::Result<Vec<Ready>> {
    let mut set: Vec<_> = fds
        .iter()
        .map(|(fd, interest)| PollFd::from_borrowed_fd(*fd, poll_flags(*interest)))
        .collect();
    let timeout = timeout.map(timespec);
    match rustix::event::poll(&mut set, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    Ok(set.iter().map(reported).collect())
}

/// An event descriptor: readable from a signal until it is cleared.
#[derive(Debug)]
pub struct EventFd(Fd);

impl EventFd {
    /// A descriptor that is not signalled.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Fd::new(rustix::event::eventfd(0, flags)?)))
    }

    /// Makes it readable. Never blocks: a full counter is readable already.
    pub fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable again.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
