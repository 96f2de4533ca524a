//! Packets and descriptors between processes of one host, over abstract unix sockets.
//!
//! An abstract name is visible in one network namespace and disappears with its listener. The
//! kernel vouches for the credentials of the process at the other end.

use crate::fd::Fd;
use crate::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::PidfdFlags;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Descriptors in one packet, at most.
pub const FDS_MAX: usize = 4;

/// `SO_PEERPIDFD` of Linux 6.5, which `libc` does not define for every target.
const SO_PEERPIDFD: libc::c_int = 77;

/// A listening or connected socket that preserves packet boundaries. Non-blocking, close-on-exec.
#[derive(Debug)]
pub struct Channel(Fd);

/// The process at the other end, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The process's pid in this process's namespace; `None` if it is not visible here.
    pub pid: Option<i32>,
    /// The process's effective user id.
    pub uid: u32,
}

impl Credentials {
    /// Credentials of a process of which only the user is known.
    pub(crate) const fn of_user(uid: u32) -> Self {
        Self { pid: None, uid }
    }

    /// Whether the process runs as the user of this process, for certain.
    ///
    /// Users without a number in this process's user namespace all have the overflow number here, so
    /// that number proves nothing, unless the namespace has all users. Where the other process is
    /// visible, its user namespace must be this one's: the same number is another user elsewhere.
    pub fn is_own_user(&self) -> bool {
        self.uid == user()
            && !(self.uid == overflow_user() && has_unmapped_users())
            && self.pid.is_none_or(shares_user_namespace)
    }
}

fn overflow_user() -> u32 {
    let number = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    number.and_then(|number| number.trim().parse().ok()).unwrap_or(65_534)
}

/// Whether users exist that have no number of their own in this process's user namespace.
fn has_unmapped_users() -> bool {
    std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !maps_all_users(&map))
}

/// Whether a namespace with this `uid_map` has all users of the host under their own numbers.
fn maps_all_users(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// False only if both namespaces are visible and differ.
fn shares_user_namespace(pid: i32) -> bool {
    let theirs = std::fs::read_link(format!("/proc/{pid}/ns/user"));
    let ours = std::fs::read_link("/proc/self/ns/user");
    theirs.ok().zip(ours.ok()).is_none_or(|(theirs, ours)| theirs == ours)
}

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// The packet's length in the caller's buffer; 0 at the end of the connection.
    pub len: usize,
    /// The descriptors that it carried.
    pub fds: Vec<OwnedFd>,
}

fn create() -> io::Result<Channel> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    Ok(Channel(Fd::new(rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?)))
}

impl Channel {
    /// Connections that wait to be accepted, at most.
    pub const QUEUE: usize = 1024;

    /// Listens on an abstract name.
    ///
    /// # Errors
    /// The kernel's error; `AddrInUse` if the name is taken.
    pub fn listen(name: &[u8]) -> io::Result<Self> {
        let channel = create()?;
        rustix::net::bind(&channel, &SocketAddrUnix::new_abstract_name(name)?)?;
        rustix::net::listen(&channel, Self::QUEUE as i32)?;
        Ok(channel)
    }

    /// Connects to an abstract name. The connection is established when this returns.
    ///
    /// # Errors
    /// The kernel's error; `ConnectionRefused` if no process listens at the name in this network
    /// namespace, `WouldBlock` if the listener's queue is full.
    pub fn connect(name: &[u8]) -> io::Result<Self> {
        let channel = create()?;
        let addr = SocketAddrUnix::new_abstract_name(name)?;
        retry_on_intr(|| Ok(rustix::net::connect(&channel, &addr)?))?;
        Ok(channel)
    }

    /// Accepts the next connection; `WouldBlock` if none waits.
    pub fn accept(&self) -> io::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = retry_on_intr(|| Ok(rustix::net::accept_with(self, flags)?))?;
        Ok(Self(Fd::new(fd)))
    }

    /// The credentials of the process that connected or listened.
    pub fn credentials(&self) -> io::Result<Credentials> {
        let mut raw = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // Not through rustix's wrapper: a process that is not visible here has pid 0.
        // SAFETY: the option writes one `ucred`; its address and size are passed.
        let rc = unsafe {
            libc::getsockopt(
                self.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut raw).cast(),
                &raw mut len,
            )
        };
        crate::check(rc as libc::ssize_t)?;
        Ok(Credentials { pid: (raw.pid > 0).then_some(raw.pid), uid: raw.uid })
    }

    /// A descriptor that becomes readable when all threads of the process at the other end have
    /// exited.
    ///
    /// # Errors
    /// The kernel's error; `Unsupported` if the process is not visible here.
    pub fn peer_pidfd(&self) -> io::Result<Fd> {
        let mut raw: libc::c_int = -1;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the option writes one descriptor number; its address and size are passed.
        let rc = unsafe {
            libc::getsockopt(
                self.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERPIDFD,
                (&raw mut raw).cast(),
                &raw mut len,
            )
        };
        if rc == 0 && raw >= 0 {
            // SAFETY: a descriptor that the kernel made in the call above.
            return Ok(Fd::new(unsafe { OwnedFd::from_raw_fd(raw) }));
        }
        // Before Linux 6.5. The pid is still the peer's: the connection is open, which the caller
        // confirms by its next packet.
        let pid = self.credentials()?.pid.and_then(rustix::process::Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::Unsupported)?;
        Ok(Fd::new(rustix::process::pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Sends one packet with descriptors.
    ///
    /// # Errors
    /// `WouldBlock`, or another error of the kernel.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        assert!(fds.len() <= FDS_MAX, "more than FDS_MAX descriptors in a packet");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(
                control.push(SendAncillaryMessage::ScmRights(fds)),
                "the buffer holds FDS_MAX descriptors"
            );
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let parts = [IoSlice::new(bytes)];
        let n = retry_on_intr(|| Ok(rustix::net::sendmsg(self, &parts, &mut control, flags)?))?;
        if n == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Receives one packet with its descriptors.
    ///
    /// # Errors
    /// `WouldBlock`; `InvalidData` for a packet longer than the buffer or with more descriptors
    /// than [`FDS_MAX`]; or another error of the kernel.
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<Packet> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = retry_on_intr(|| {
            let mut parts = [IoSliceMut::new(buffer)];
            Ok(rustix::net::recvmsg(self, &mut parts, &mut control, flags)?)
        })?;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Packet { len: got.bytes, fds })
    }

    /// Whether the other end is certainly gone: its process has exited, or has closed every
    /// descriptor of the connection, explicitly or by running another program.
    pub fn is_gone(&self, pidfd: &Fd) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(self, PollFlags::empty()), PollFd::new(pidfd, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut fds, Some(&at_once)) {
            Ok(_) => {
                fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)
                    || !fds[1].revents().is_empty()
            }
            // Interrupted or out of memory: not known to be gone.
            Err(_) => false,
        }
    }

    /// Waits until [`Channel::is_gone`] may be true, for at most `timeout`.
    pub fn wait_gone(&self, pidfd: &Fd, timeout: std::time::Duration) {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut fds = [PollFd::new(self, PollFlags::empty()), PollFd::new(pidfd, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&crate::poll::timespec(timeout)));
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The effective user id of this process.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Permits any process of this user to attach to this one, even where Yama permits only ancestors.
///
/// # Errors
/// `InvalidInput` if the kernel has no Yama, which then restricts nothing.
pub fn let_any_process_attach() -> io::Result<()> {
    // SAFETY: sets a property of this process; takes no pointer.
    let rc = unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
    crate::check(rc as libc::ssize_t).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_users_that_are_not_mapped_proves_nothing_in_a_user_namespace() {
        let own = |uid| Credentials { pid: i32::try_from(std::process::id()).ok(), uid };
        assert!(own(user()).is_own_user() || user() == overflow_user());
        assert!(!own(user() + 1).is_own_user());
        assert!(maps_all_users("         0          0 4294967295\n"));
        for map in ["0 1000 1\n", "0 100000 65536\n", "0 0 65534\n", ""] {
            assert!(!maps_all_users(map), "{map}");
        }
    }

    #[test]
    fn a_process_in_another_user_namespace_is_not_of_this_user() {
        let child = std::process::Command::new("unshare").args(["-U", "sleep", "60"]).spawn();
        let Ok(mut child) = child else { return println!("SKIPPED: unshare is not there") };
        let pid = i32::try_from(child.id()).expect("a pid is positive");
        let namespace = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/user"));
        let give_up = std::time::Instant::now() + std::time::Duration::from_secs(150);
        // Until the child has made its namespace, or can't, it is in this one.
        let made = loop {
            match (namespace("self"), namespace(&pid.to_string())) {
                (Ok(ours), Ok(theirs)) if ours != theirs => break true,
                (Ok(_), Ok(_)) if child.try_wait().expect("our child").is_none() => {}
                _ => break false,
            }
            assert!(std::time::Instant::now() < give_up, "unshare does nothing");
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        let is_refused = !Credentials { pid: Some(pid), uid: user() }.is_own_user();
        let _ = child.kill();
        let _ = child.wait();
        if !made {
            return println!("SKIPPED: user namespaces can't be made or seen here");
        }
        assert!(is_refused);
    }
    use std::io::ErrorKind;

    fn pair(name: &str) -> (Channel, Channel) {
        let name = format!("kvferry-test-{name}-{}", std::process::id());
        let listener = Channel::listen(name.as_bytes()).expect("a free name");
        let one = Channel::connect(name.as_bytes()).expect("the listener is open");
        (one, listener.accept().expect("a connection waits"))
    }

    #[test]
    fn packets_keep_their_boundaries_and_carry_descriptors() {
        let (one, other) = pair("packets");
        let (reader, writer) = std::io::pipe().expect("two descriptors");
        one.send(b"first", &[writer.as_fd()]).expect("the socket buffer is empty");
        one.send(b"second", &[]).expect("the socket buffer is empty");
        let mut buffer = [0; 16];
        let first = other.recv(&mut buffer).expect("a packet");
        assert_eq!((&buffer[..first.len], first.fds.len()), (&b"first"[..], 1));
        rustix::io::write(&first.fds[0], b"x").expect("the same pipe");
        assert_eq!(rustix::io::read(&reader, &mut [0; 4]).expect("a byte"), 1);
        let second = other.recv(&mut buffer).expect("a packet");
        assert_eq!((&buffer[..second.len], second.fds.len()), (&b"second"[..], 0));
        let e = other.recv(&mut buffer).expect_err("nothing more");
        assert_eq!(e.kind(), ErrorKind::WouldBlock);
    }

    #[test]
    fn a_packet_that_does_not_fit_is_an_error_and_not_truncated() {
        let (one, other) = pair("long");
        one.send(&[7; 64], &[]).expect("the socket buffer is empty");
        let e = other.recv(&mut [0; 8]).expect_err("too long");
        assert_eq!(e.kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn the_kernel_reports_the_peers_credentials_and_its_exit() {
        let (one, other) = pair("gone");
        let who = other.credentials().expect("connected");
        assert_eq!(who.pid, i32::try_from(std::process::id()).ok());
        assert_eq!(who.uid, user());
        let pidfd = other.peer_pidfd().expect("this process");
        assert!(!other.is_gone(&pidfd));
        drop(one);
        assert!(other.is_gone(&pidfd));
    }

    #[test]
    fn connecting_to_a_name_without_a_listener_is_refused() {
        let e = Channel::connect(b"kvferry-test-no-listener").expect_err("no listener");
        assert_eq!(e.kind(), ErrorKind::ConnectionRefused);
    }
}
