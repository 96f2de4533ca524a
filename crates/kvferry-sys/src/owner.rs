//! Whose process is at the other end of a TCP connection within this host.
//!
//! The kernel keeps the user of each socket, and tells it by `NETLINK_SOCK_DIAG` (sock_diag(7)). A socket that
//! no process has open (closed, or not accepted yet) has the inode 0 there, and on many kernels the superuser's
//! number.
//!
//! The kernel looks for a socket as for the receiver of a packet that arrives on an interface. A socket that is bound to a
//! device, as every user may bind its own to the loopback device, is found only if the question names that interface.

use crate::fd::Fd;
use crate::sync::Mutex;
use crate::unix::Credentials;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const HEADER: usize = 16;
const REQUEST: usize = HEADER + 56;
/// Where an answer has the socket's state: behind the header and the family.
const AT_STATE: usize = HEADER + 1;
/// Where an answer has the user: behind the header, four bytes, the socket's name and three numbers.
const AT_UID: usize = HEADER + 4 + 48 + 12;
const AT_INODE: usize = AT_UID + 4;
/// The loopback device is the first interface of each network namespace (the kernel's `LOOPBACK_IFINDEX`; a kernel that
/// numbers it otherwise does not start).
const LOOPBACK_INTERFACE: u32 = 1;
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;
const SYN_RECEIVED: u8 = 3;
const LISTEN: u8 = 10;

/// Tells the users of connections within this host. Its socket stays open: a question needs no descriptor.
#[derive(Debug)]
pub struct Owners(Mutex<Diag>);

impl Owners {
    /// Asks about the socket of this process that listens at `listening` first.
    ///
    /// # Errors
    /// `Unsupported` if the kernel does not tell that it is this process's: it has no `INET_DIAG`, or this process's user
    /// has no number of its own in its user namespace. Other errors pass, such as that of a process without a
    /// descriptor left.
    pub fn new(listening: SocketAddr) -> io::Result<Self> {
        let owners = Self(Mutex::new(Diag { netlink: open()?, questions: 0 }));
        let what = "the own port is reported as another user's";
        match owners.listener(listening) {
            Ok(found) if found.inode != 0 && found.is_trusted()? => Ok(owners),
            Ok(_) => Err(io::Error::new(io::ErrorKind::Unsupported, what)),
            // The port is open: the kernel has no answers for sockets of this kind.
            Err(e) => Err(unsupported(e, &[libc::ENOENT, libc::EOPNOTSUPP])),
        }
    }

    /// Whether the process that opened a connection from `peer`, which this process accepted at `local`,
    /// belongs to the user of this process or to the superuser.
    ///
    /// # Errors
    /// `NotConnected` if the peer's socket is known, and no process has it open: it was closed, and takes nothing that
    /// is sent to it. `NotFound` if no socket is known that could be the peer's. Other errors if the kernel does not tell.
    pub fn is_caller_trusted(&self, local: SocketAddr, peer: SocketAddr) -> io::Result<bool> {
        match self.lookup(peer, local)? {
            // Not the other end of an accepted connection: another socket that listens at its address, or connects from it.
            SocketEntry { state: LISTEN | SYN_SENT, .. } => {
                let what = "another socket is at the peer's address";
                Err(io::Error::new(io::ErrorKind::NotFound, what))
            }
            found => found.is_trusted(),
        }
    }

    /// Whether the process that this process has connected to, at `peer`, belongs to the user of this process
    /// or to the superuser. If that process has not accepted the connection yet, it is the one that
    /// listens at `peer`.
    ///
    /// # Errors
    /// If no process has the peer's socket open, or the kernel does not tell.
    pub fn is_target_trusted(&self, local: SocketAddr, peer: SocketAddr) -> io::Result<bool> {
        match self.lookup(peer, local)? {
            SocketEntry { inode: 0, state: ESTABLISHED | SYN_RECEIVED, .. } => {
                self.listener(peer)?.is_trusted()
            }
            found => found.is_trusted(),
        }
    }

    /// The socket that listens at an address.
    fn listener(&self, at: SocketAddr) -> io::Result<SocketEntry> {
        let nobody: IpAddr = match at.ip().to_canonical() {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        self.lookup(at, SocketAddr::new(nobody, 0))
    }

    fn lookup(&self, from: SocketAddr, to: SocketAddr) -> io::Result<SocketEntry> {
        self.0.lock().ask(from, to)
    }
}

/// As `Unsupported` if it is one of these errors.
fn unsupported(e: io::Error, these: &[i32]) -> io::Error {
    match e.raw_os_error() {
        Some(errno) if these.contains(&errno) => io::Error::new(io::ErrorKind::Unsupported, e),
        _ => e,
    }
}

fn no_owner() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "no process has the socket open")
}

/// A socket, as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SocketEntry {
    state: u8,
    uid: u32,
    /// 0 if no process has the socket open.
    inode: u32,
}

impl SocketEntry {
    fn is_trusted(self) -> io::Result<bool> {
        if self.inode == 0 {
            return Err(no_owner());
        }
        Ok(self.uid == 0 || Credentials::of_user(self.uid).is_own_user())
    }
}

#[derive(Debug)]
struct Diag {
    netlink: Fd,
    /// The number of the last question. An answer repeats it.
    questions: u32,
}

impl Diag {
    /// Asks for the socket that is bound to `from` and connected to `to`; if there is none, for the one that
    /// listens at `from`.
    fn ask(&mut self, from: SocketAddr, to: SocketAddr) -> io::Result<SocketEntry> {
        self.questions = self.questions.wrapping_add(1);
        let request = request(self.questions, from, to);
        let netlink = self.netlink.as_raw_fd();
        let sent = crate::retry_on_intr(|| {
            // SAFETY: the kernel reads `request`, whose length is passed.
            crate::check(unsafe {
                libc::send(netlink, request.as_ptr().cast(), request.len(), libc::MSG_NOSIGNAL)
            })
        })?;
        debug_assert_eq!(sent, request.len());
        loop {
            let mut answer = [0_u8; 512];
            // The kernel has answered before `send` returned.
            let received = crate::retry_on_intr(|| {
                // SAFETY: the kernel writes at most the length of `answer`.
                crate::check(unsafe {
                    libc::recv(
                        netlink,
                        answer.as_mut_ptr().cast(),
                        answer.len(),
                        libc::MSG_DONTWAIT,
                    )
                })
            })?;
            // Other numbers are answers to questions that failed before they were read.
            let answer = &answer[..received];
            if u32_at(answer, 8)? == self.questions {
                return parse(answer);
            }
        }
    }
}

fn open() -> io::Result<Fd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes numbers and returns a descriptor.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_SOCK_DIAG) };
    crate::check(fd as libc::ssize_t)
        .map_err(|e| unsupported(e, &[libc::EPROTONOSUPPORT, libc::EAFNOSUPPORT]))?;
    // SAFETY: the descriptor is new, and nothing else closes it.
    Ok(Fd::new(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// `struct nlmsghdr` and `struct inet_diag_req_v2`, for exactly one socket.
fn request(number: u32, from: SocketAddr, to: SocketAddr) -> [u8; REQUEST] {
    let (source, destination) = (from.ip().to_canonical(), to.ip().to_canonical());
    let mut out = [0; REQUEST];
    out[0..4].copy_from_slice(&(REQUEST as u32).to_ne_bytes());
    out[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    out[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    out[8..12].copy_from_slice(&number.to_ne_bytes());
    let family = if source.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let body = &mut out[HEADER..];
    (body[0], body[1]) = (family as u8, libc::IPPROTO_TCP as u8);
    // Any state.
    body[4..8].fill(0xff);
    body[8..10].copy_from_slice(&from.port().to_be_bytes());
    body[10..12].copy_from_slice(&to.port().to_be_bytes());
    write_address(&mut body[12..28], source);
    write_address(&mut body[28..44], destination);
    // The packets of a connection with an end on loopback arrive on the loopback device. A socket that is bound to no device
    // is found by any interface.
    let is_loopback = source.is_loopback() || destination.is_loopback();
    let interface = if is_loopback { LOOPBACK_INTERFACE } else { 0 };
    body[44..48].copy_from_slice(&interface.to_ne_bytes());
    // No cookie, which would name an earlier answer.
    body[48..56].fill(0xff);
    out
}

fn write_address(out: &mut [u8], address: IpAddr) {
    match address {
        IpAddr::V4(v4) => out[..4].copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => out.copy_from_slice(&v6.octets()),
    }
}

fn u32_at(answer: &[u8], at: usize) -> io::Result<u32> {
    let bytes = answer.get(at..at + 4).and_then(|bytes| bytes.first_chunk());
    bytes.copied().map(u32::from_ne_bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn parse(answer: &[u8]) -> io::Result<SocketEntry> {
    let kind = (u32_at(answer, 4)? & 0xffff) as u16;
    if i32::from(kind) == libc::NLMSG_ERROR {
        let errno = u32_at(answer, HEADER)?.cast_signed();
        return Err(io::Error::from_raw_os_error(errno.saturating_neg()));
    }
    if kind != SOCK_DIAG_BY_FAMILY {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let (uid, inode) = (u32_at(answer, AT_UID)?, u32_at(answer, AT_INODE)?);
    Ok(SocketEntry { state: answer[AT_STATE], uid, inode })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::bind_to_device;
    use rustix::net::{AddressFamily, SocketType, sockopt};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    #[test]
    fn only_a_kernel_that_does_not_tell_users_is_unsupported() {
        let of = |errno| unsupported(io::Error::from_raw_os_error(errno), &[libc::ENOENT]).kind();
        assert_eq!(of(libc::ENOENT), io::ErrorKind::Unsupported);
        for passes in [libc::EMFILE, libc::ENOBUFS, libc::EADDRINUSE, libc::EPERM] {
            assert_ne!(of(passes), io::ErrorKind::Unsupported, "{passes}");
        }
    }

    /// At an address of each family that this host has, with the accepted end of a connection.
    fn for_each_family(check: impl Fn(&Owners, TcpListener, TcpStream)) {
        for ip in [IpAddr::from([127, 0, 0, 1]), Ipv6Addr::LOCALHOST.into()] {
            let Ok(listener) = TcpListener::bind((ip, 0)) else { continue };
            let Ok(owners) = Owners::new(listener.local_addr().expect("bound")) else {
                println!("SKIPPED: users at {ip}: this kernel does not tell them");
                continue;
            };
            let calling = TcpStream::connect(listener.local_addr().expect("bound"));
            check(&owners, listener, calling.expect("it listens"));
        }
    }

    #[test]
    fn the_user_of_a_connection_within_this_host_is_known_at_both_ends() {
        for_each_family(|owners, listener, calling| {
            let (here, there) = (calling.local_addr().unwrap(), calling.peer_addr().unwrap());
            assert!(
                owners.is_target_trusted(here, there).expect("not accepted yet: the listener's")
            );
            let accepted = listener.accept().expect("it was called").0;
            assert!(owners.is_caller_trusted(there, here).expect("an open socket"));
            assert!(owners.is_target_trusted(here, there).expect("an open socket"));
            let found = owners.lookup(here, there).expect("an open socket");
            // SAFETY: the call takes nothing and returns a number.
            let me = unsafe { libc::geteuid() };
            assert_eq!((found.state, found.uid), (ESTABLISHED, me));
            drop(accepted);
            let nobody = SocketAddr::new(there.ip(), 1);
            let unknown = owners.is_caller_trusted(there, nobody).expect_err("no such connection");
            assert_eq!(unknown.kind(), io::ErrorKind::NotFound);
        });
    }

    #[test]
    fn a_socket_that_its_process_has_closed_is_nobodys_and_not_the_superusers() {
        for_each_family(|owners, listener, calling| {
            let (here, there) = (calling.local_addr().unwrap(), calling.peer_addr().unwrap());
            let accepted = listener.accept().expect("it was called").0;
            drop(calling);
            let unknown = owners.is_caller_trusted(there, here).expect_err("it is closed");
            assert_eq!(unknown.kind(), io::ErrorKind::NotConnected, "{unknown}");
            drop(accepted);
        });
        for_each_family(|owners, listener, calling| {
            let (here, there) = (calling.local_addr().unwrap(), calling.peer_addr().unwrap());
            drop(listener.accept().expect("it was called"));
            let unknown = owners.is_target_trusted(here, there).expect_err("it is closed");
            assert_eq!(unknown.kind(), io::ErrorKind::NotConnected, "{unknown}");
        });
    }

    #[test]
    fn a_listener_at_the_address_of_a_connection_that_has_ended_does_not_stand_in_for_it() {
        for_each_family(|owners, listener, calling| {
            let (at, other) = (listener.local_addr().unwrap(), calling.local_addr().unwrap());
            let nobody = SocketAddr::new(other.ip(), 1);
            let unknown = owners.is_caller_trusted(nobody, at).expect_err("there is no connection");
            assert_eq!(unknown.kind(), io::ErrorKind::NotFound, "{unknown}");
        });
    }

    #[test]
    fn a_socket_that_is_bound_to_the_loopback_device_is_found() {
        for_each_family(|owners, listener, calling| {
            let (here, there) = (calling.local_addr().unwrap(), calling.peer_addr().unwrap());
            let accepted = listener.accept().expect("it was called").0;
            for socket in [&calling, &accepted] {
                if bind_to_device(socket, c"lo").is_err() {
                    println!("SKIPPED: this kernel lets the superuser alone bind to a device");
                    return;
                }
            }
            assert!(owners.is_caller_trusted(there, here).expect("an open socket"));
            assert!(owners.is_target_trusted(here, there).expect("an open socket"));
            // Nor does a listener at the same address hide it.
            sockopt::set_socket_reuseport(calling.as_fd(), true).expect("an option");
            let family = if here.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            let other = rustix::net::socket(family, SocketType::STREAM, None).expect("a socket");
            sockopt::set_socket_reuseport(&other, true).expect("an option");
            rustix::net::bind(&other, &here).expect("both sockets permit it");
            rustix::net::listen(&other, 1).expect("bound");
            assert!(owners.is_caller_trusted(there, here).expect("an open socket"));
            drop(accepted);
        });
    }
}
