//! epoll, event descriptors, waiting for one descriptor.

use crate::fd::Fd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// What a descriptor is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes to read.
    Read,
    /// Room to write.
    Write,
    /// Either.
    Both,
    /// The peer's closing of its side.
    Hangup,
    /// Only errors and hang-ups of both sides.
    None,
}

/// What a descriptor became ready for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// There are bytes to read, or an end.
    pub read: bool,
    /// There is room to write.
    pub write: bool,
    /// The peer closed its side.
    pub peer_closed: bool,
    /// Both sides are closed, or the connection was reset.
    pub closed: bool,
}

impl Ready {
    /// Whether anything is ready.
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

/// A descriptor's readiness with the token it was added under.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The token given to [`Epoll::add`].
    pub token: u64,
    /// What is ready.
    pub ready: Ready,
}

fn flags(interest: Interest) -> epoll::EventFlags {
    let base = epoll::EventFlags::RDHUP;
    match interest {
        Interest::Read => base | epoll::EventFlags::IN,
        Interest::Write => base | epoll::EventFlags::OUT,
        Interest::Both => base | epoll::EventFlags::IN | epoll::EventFlags::OUT,
        Interest::Hangup => base,
        // A half-closed connection would report RDHUP for ever to somebody who can't act on it.
        Interest::None => epoll::EventFlags::empty(),
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

    /// Starts to watch `fd`.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    /// Changes what `fd` is watched for.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    /// Stops to watch `fd`.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn delete(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Waits until something is ready or `timeout` passed, and appends at most 64 events.
    ///
    /// # Errors
    /// What the kernel says; an interrupted wait is an empty one.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<()> {
        let mut raw = [MaybeUninit::<epoll::Event>::uninit(); 64];
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

/// Waits for one descriptor; an empty [`Ready`] if `timeout` passed or a signal came.
///
/// # Errors
/// What the kernel says.
pub fn wait_one(
    fd: BorrowedFd<'_>,
    interest: Interest,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let want = match interest {
        Interest::Read => PollFlags::IN,
        Interest::Write => PollFlags::OUT,
        Interest::Both => PollFlags::IN | PollFlags::OUT,
        Interest::Hangup => PollFlags::RDHUP,
        Interest::None => PollFlags::empty(),
    };
    let mut fds = [PollFd::from_borrowed_fd(fd, want)];
    let timeout = timeout.map(timespec);
    match rustix::event::poll(&mut fds, timeout.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
        Err(e) => return Err(e.into()),
    }
    let got = fds[0].revents();
    Ok(Ready {
        read: got.intersects(PollFlags::IN),
        write: got.intersects(PollFlags::OUT),
        peer_closed: got.intersects(PollFlags::RDHUP),
        closed: got.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
    })
}

/// Waits for the first of several descriptors, each with its own interest; `None` if `timeout`
/// passed or a signal came.
///
/// # Errors
/// What the kernel says.
pub fn wait_any(
    fds: &[(BorrowedFd<'_>, Interest)],
    timeout: Option<Duration>,
) -> io::Result<Vec<Ready>> {
    let mut set: Vec<_> = fds
        .iter()
        .map(|(fd, interest)| {
            let want = match interest {
                Interest::Read => PollFlags::IN,
                Interest::Write => PollFlags::OUT,
                Interest::Both => PollFlags::IN | PollFlags::OUT,
                Interest::Hangup => PollFlags::RDHUP,
                Interest::None => PollFlags::empty(),
            };
            PollFd::from_borrowed_fd(*fd, want)
        })
        .collect();
    let timeout = timeout.map(timespec);
    match rustix::event::poll(&mut set, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    Ok(set
        .iter()
        .map(|p| {
            let got = p.revents();
            Ready {
                read: got.intersects(PollFlags::IN),
                write: got.intersects(PollFlags::OUT),
                peer_closed: got.intersects(PollFlags::RDHUP),
                closed: got.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
            }
        })
        .collect())
}

/// A descriptor that becomes readable when somebody signals it.
#[derive(Debug)]
pub struct EventFd(Fd);

impl EventFd {
    /// A new one, not signalled.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Fd::new(rustix::event::eventfd(0, flags)?)))
    }

    /// Makes it readable. Never blocks: a counter that is full is readable already.
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
