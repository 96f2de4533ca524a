//! TCP sockets, gather and scatter over spans. Every socket is non-blocking and close-on-exec.

use crate::fd::Fd;
use crate::span::HostSpan;
use crate::{check, retry_on_intr};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use std::io;
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// Spans one vectored call takes (`IOV_MAX`).
pub const SPANS_MAX: usize = 1024;

/// A listening or connected TCP socket.
#[derive(Debug)]
pub struct Socket(Fd);

fn family(addr: &SocketAddr) -> AddressFamily {
    if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

fn create(addr: &SocketAddr) -> io::Result<Socket> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(family(addr), SocketType::STREAM, flags, None)?;
    Ok(Socket(Fd::new(fd)))
}

impl Socket {
    /// Listens on `addr` (port 0: one of the kernel's choice).
    ///
    /// # Errors
    /// What the kernel says, with the address.
    pub fn listen(addr: SocketAddr) -> io::Result<Self> {
        let socket = create(&addr)?;
        let with_addr = |e: rustix::io::Errno| {
            io::Error::new(io::Error::from(e).kind(), format!("{addr}: {e}"))
        };
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if addr.is_ipv6() {
            // `[::]` serves both families, as users of a wildcard address expect.
            let _ = sockopt::set_ipv6_v6only(&socket, false);
        }
        rustix::net::bind(&socket, &addr).map_err(with_addr)?;
        rustix::net::listen(&socket, 4096).map_err(with_addr)?;
        Ok(socket)
    }

    /// The next connection, or `WouldBlock`.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn accept(&self) -> io::Result<(Self, Option<SocketAddr>)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (fd, addr) = retry_on_intr(|| Ok(rustix::net::acceptfrom_with(self, flags)?))?;
        let addr = addr.and_then(|a| SocketAddr::try_from(a).ok());
        Ok((Self(Fd::new(fd)), addr))
    }

    /// Starts to connect; the socket becomes writable when it is connected or has failed
    /// ([`Socket::error`] tells).
    ///
    /// # Errors
    /// What the kernel says at once.
    pub fn connect(addr: SocketAddr) -> io::Result<Self> {
        let socket = create(&addr)?;
        match rustix::net::connect(&socket, &addr) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => Ok(socket),
            Err(e) => Err(e.into()),
        }
    }

    /// The pending error of the socket, and clears it.
    ///
    /// # Errors
    /// That error.
    pub fn error(&self) -> io::Result<()> {
        match sockopt::socket_error(self) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) | Err(e) => Err(e.into()),
        }
    }

    /// The address at this end.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let any = rustix::net::getsockname(self)?;
        SocketAddr::try_from(any).map_err(|e| io::Error::other(e.to_string()))
    }

    /// The address at the other end.
    ///
    /// # Errors
    /// What the kernel says; `NotConnected` before and after a connection.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match rustix::net::getpeername(self)? {
            Some(any) => SocketAddr::try_from(any).map_err(|e| io::Error::other(e.to_string())),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Sends small segments at once.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_nodelay(&self) -> io::Result<()> {
        Ok(sockopt::set_tcp_nodelay(self, true)?)
    }

    /// Has the kernel use another congestion control than the system's, by name.
    ///
    /// # Errors
    /// What the kernel says; `NotFound` where it does not have it, `PermissionDenied` where only
    /// root may choose it.
    pub fn set_congestion_control(&self, name: &str) -> io::Result<()> {
        Ok(sockopt::set_tcp_congestion(self, name)?)
    }

    /// Has the kernel probe a connection that was idle for `idle`, and break it when some probes
    /// in a row went unanswered: after about twice that time.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_keepalive(&self, idle: Duration) -> io::Result<()> {
        const PROBES: u32 = 4;
        sockopt::set_socket_keepalive(self, true)?;
        sockopt::set_tcp_keepidle(self, idle)?;
        sockopt::set_tcp_keepintvl(self, idle / PROBES)?;
        Ok(sockopt::set_tcp_keepcnt(self, PROBES)?)
    }

    /// Sizes of both kernel buffers, in bytes; turns the kernel's own tuning off.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_buffers(&self, bytes: usize) -> io::Result<()> {
        sockopt::set_socket_send_buffer_size(self, bytes)?;
        Ok(sockopt::set_socket_recv_buffer_size(self, bytes)?)
    }

    /// Asks the kernel to call the socket readable only when `bytes` are there.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set_receive_low_water(&self, bytes: usize) -> io::Result<()> {
        let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        // SAFETY: the option takes one int, whose address and size are passed.
        let rc = unsafe {
            libc::setsockopt(
                self.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        check(rc as libc::ssize_t).map(drop)
    }

    /// Makes the next close a reset: what is still in the send buffer is dropped.
    pub fn reset_on_close(&self) {
        let _ = sockopt::set_socket_linger(self, Some(Duration::ZERO));
    }

    /// Closes one or both directions; whoever waits on the socket wakes up.
    pub fn shutdown(&self, how: Shutdown) {
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        // Fails only on a socket that is not connected any more.
        let _ = rustix::net::shutdown(self, how);
    }

    /// Bytes handed to the kernel that the peer's kernel has not acknowledged.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn unacknowledged(&self) -> io::Result<usize> {
        let mut n: libc::c_int = 0;
        // SAFETY: `TIOCOUTQ` writes one int, whose address is passed.
        let rc = unsafe { libc::ioctl(self.as_raw_fd(), libc::TIOCOUTQ, &raw mut n) };
        check(rc as libc::ssize_t)?;
        Ok(usize::try_from(n).unwrap_or(0))
    }

    /// Sends from `bytes`; returns how many were taken.
    ///
    /// # Errors
    /// `WouldBlock`, or what the kernel says.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        retry_on_intr(|| {
            Ok(rustix::net::send(self, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
        })
    }

    /// Receives into `bytes`; 0 is the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or what the kernel says.
    pub fn recv(&self, bytes: &mut [u8]) -> io::Result<usize> {
        retry_on_intr(|| Ok(rustix::net::recv(self, &mut *bytes, RecvFlags::DONTWAIT)?.0))
    }

    /// Reads and throws away at most `len` bytes; 0 is the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or what the kernel says.
    pub fn discard(&self, len: usize) -> io::Result<usize> {
        let flags = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
        retry_on_intr(|| {
            // SAFETY: with `MSG_TRUNC` a TCP socket drops the bytes in the kernel and writes
            // nothing to the (null) buffer; see tcp(7).
            let n = unsafe { libc::recv(self.as_raw_fd(), std::ptr::null_mut(), len, flags) };
            check(n)
        })
    }

    /// Sends `head` and then the spans, at most [`SPANS_MAX`] pieces, in one call.
    ///
    /// # Errors
    /// `WouldBlock`, or what the kernel says.
    pub fn send_spans(&self, head: &[u8], spans: &[HostSpan]) -> io::Result<usize> {
        if head.is_empty() {
            let n = spans.len().min(SPANS_MAX);
            return self.sendmsg(&HostSpan::as_iovecs(spans)[..n]);
        }
        let head = libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
        self.sendmsg(joined(&mut [MaybeUninit::uninit(); SPANS_MAX], head, spans))
    }

    pub(crate) fn sendmsg(&self, iovecs: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: an all-zero header is a valid one without address and control data.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = iovecs.as_ptr().cast_mut();
        header.msg_iovlen = iovecs.len() as _;
        retry_on_intr(|| {
            // SAFETY: the header points to `iovecs.len()` entries; each is either a live slice
            // or a span whose maker promises that it is mapped. The kernel only reads them.
            check(unsafe {
                libc::sendmsg(
                    self.as_raw_fd(),
                    &raw const header,
                    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                )
            })
        })
    }

    /// Receives into at most [`SPANS_MAX`] spans in one call; 0 is the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or what the kernel says.
    pub fn recv_spans(&self, spans: &[HostSpan]) -> io::Result<usize> {
        self.recvmsg(&HostSpan::as_iovecs(spans)[..spans.len().min(SPANS_MAX)])
    }

    /// Receives into `head` and then into the spans, at most [`SPANS_MAX`] pieces, in one call; 0
    /// is the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or what the kernel says.
    pub fn recv_head_and_spans(&self, head: &mut [u8], spans: &[HostSpan]) -> io::Result<usize> {
        let head = libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: head.len() };
        self.recvmsg(joined(&mut [MaybeUninit::uninit(); SPANS_MAX], head, spans))
    }

    pub(crate) fn recvmsg(&self, iovecs: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: an all-zero header is a valid one without address and control data.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = iovecs.as_ptr().cast_mut();
        header.msg_iovlen = iovecs.len() as _;
        retry_on_intr(|| {
            // SAFETY: the header points to `iovecs.len()` entries; each is a buffer borrowed
            // mutably or a span whose maker promises that it is mapped and writable while it is
            // lent.
            check(unsafe { libc::recvmsg(self.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) })
        })
    }
}

/// `head` and the first of the spans, as many as fit.
fn joined<'a>(
    room: &'a mut [MaybeUninit<libc::iovec>; SPANS_MAX],
    head: libc::iovec,
    spans: &[HostSpan],
) -> &'a [libc::iovec] {
    room[0].write(head);
    let n = spans.len().min(SPANS_MAX - 1);
    for (to, from) in room[1..].iter_mut().zip(HostSpan::as_iovecs(&spans[..n])) {
        to.write(*from);
    }
    // SAFETY: the first `n + 1` entries were written above.
    unsafe { std::slice::from_raw_parts(room.as_ptr().cast(), n + 1) }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
