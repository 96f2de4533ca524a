//! TCP sockets, with gather and scatter over spans. Every socket is non-blocking and close-on-exec.

use crate::fd::Fd;
use crate::span::HostSpan;
use crate::{check, retry_on_intr};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// Spans of one vectored call at most (`IOV_MAX`).
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
    /// Listens on `addr`; for port 0 the kernel chooses a port.
    ///
    /// # Errors
    /// The kernel's error, with the address.
    pub fn listen(addr: SocketAddr) -> io::Result<Self> {
        let socket = create(&addr)?;
        let with_addr = |e: rustix::io::Errno| {
            io::Error::new(io::Error::from(e).kind(), format!("{addr}: {e}"))
        };
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if addr.is_ipv6() {
            // `[::]` accepts both address families, as users of a wildcard address expect.
            let _ = sockopt::set_ipv6_v6only(&socket, false);
        }
        rustix::net::bind(&socket, &addr).map_err(with_addr)?;
        rustix::net::listen(&socket, 4096).map_err(with_addr)?;
        Ok(socket)
    }

    /// Accepts the next connection; `WouldBlock` if none waits.
    pub fn accept(&self) -> io::Result<(Self, Option<SocketAddr>)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (fd, addr) = retry_on_intr(|| Ok(rustix::net::acceptfrom_with(self, flags)?))?;
        let addr = addr.and_then(|a| SocketAddr::try_from(a).ok());
        Ok((Self(Fd::new(fd)), addr))
    }

    /// Starts to connect. The socket becomes writable when it is connected or has failed;
    /// [`Socket::error`] returns the failure.
    ///
    /// # Errors
    /// An error that the kernel reports at once.
    pub fn connect(addr: SocketAddr) -> io::Result<Self> {
        let socket = create(&addr)?;
        match rustix::net::connect(&socket, &addr) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => Ok(socket),
            Err(e) => Err(e.into()),
        }
    }

    /// Returns and clears the socket's pending error.
    ///
    /// # Errors
    /// The pending error.
    pub fn error(&self) -> io::Result<()> {
        match sockopt::socket_error(self) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) | Err(e) => Err(e.into()),
        }
    }

    /// The address at this end.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let any = rustix::net::getsockname(self)?;
        SocketAddr::try_from(any).map_err(|e| io::Error::other(e.to_string()))
    }

    /// The address at the other end.
    ///
    /// # Errors
    /// The kernel's error; `NotConnected` before and after a connection.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match rustix::net::getpeername(self)? {
            Some(any) => SocketAddr::try_from(any).map_err(|e| io::Error::other(e.to_string())),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Sends small segments at once (`TCP_NODELAY`).
    pub fn set_nodelay(&self) -> io::Result<()> {
        Ok(sockopt::set_tcp_nodelay(self, true)?)
    }

    /// Sets the congestion control, by its name in the kernel.
    ///
    /// # Errors
    /// The kernel's error; `NotFound` if it does not have that one, `PermissionDenied` if only root
    /// may choose it.
    pub fn set_congestion_control(&self, name: &str) -> io::Result<()> {
        Ok(sockopt::set_tcp_congestion(self, name)?)
    }

    /// Has the kernel probe a connection that was idle for `idle` (at least one second), and break
    /// it after four unanswered probes: after about twice that time.
    pub fn set_keepalive(&self, idle: Duration) -> io::Result<()> {
        const PROBES: u32 = 4;
        /// The kernel's unit is seconds.
        const UNIT: Duration = Duration::from_secs(1);
        sockopt::set_socket_keepalive(self, true)?;
        sockopt::set_tcp_keepidle(self, idle.max(UNIT))?;
        sockopt::set_tcp_keepintvl(self, (idle / PROBES).max(UNIT))?;
        Ok(sockopt::set_tcp_keepcnt(self, PROBES)?)
    }

    /// Has the kernel break the connection if sent bytes stay unacknowledged, or can't be sent
    /// because the peer does not read, for this long. Keep-alive covers only connections without
    /// outstanding bytes.
    pub fn set_user_timeout(&self, timeout: Duration) -> io::Result<()> {
        let ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        Ok(sockopt::set_tcp_user_timeout(self, ms)?)
    }

    /// Sets the size of both kernel buffers, in bytes, and turns off the kernel's automatic sizing.
    pub fn set_buffers(&self, bytes: usize) -> io::Result<()> {
        sockopt::set_socket_send_buffer_size(self, bytes)?;
        Ok(sockopt::set_socket_recv_buffer_size(self, bytes)?)
    }

    /// Makes the socket readable only when `bytes` bytes have arrived.
    pub fn set_receive_low_water(&self, bytes: usize) -> io::Result<()> {
        let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        // SAFETY: the option takes one int; its address and size are passed.
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

    /// Makes the next close a reset: the kernel drops what is still in the send buffer.
    pub fn reset_on_close(&self) {
        let _ = sockopt::set_socket_linger(self, Some(Duration::ZERO));
    }

    /// Closes one or both directions, and wakes every thread that waits on the socket.
    pub fn shutdown(&self, how: Shutdown) {
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        // Fails only if the socket is no longer connected.
        let _ = rustix::net::shutdown(self, how);
    }

    /// Bytes given to the kernel that the peer's kernel has not acknowledged.
    pub fn unacknowledged(&self) -> io::Result<usize> {
        let mut n: libc::c_int = 0;
        // SAFETY: `TIOCOUTQ` writes one int; its address is passed.
        let rc = unsafe { libc::ioctl(self.as_raw_fd(), libc::TIOCOUTQ, &raw mut n) };
        check(rc as libc::ssize_t)?;
        Ok(usize::try_from(n).unwrap_or(0))
    }

    /// Bytes that have arrived and that [`Socket::recv`] would return now.
    pub fn readable(&self) -> io::Result<usize> {
        Ok(usize::try_from(rustix::io::ioctl_fionread(self)?).unwrap_or(usize::MAX))
    }

    /// Sends from `bytes`; returns how many bytes the kernel took.
    ///
    /// # Errors
    /// `WouldBlock`, or another error of the kernel.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        retry_on_intr(|| {
            Ok(rustix::net::send(self, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
        })
    }

    /// Receives into `bytes`; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or another error of the kernel.
    pub fn recv(&self, bytes: &mut [u8]) -> io::Result<usize> {
        retry_on_intr(|| Ok(rustix::net::recv(self, &mut *bytes, RecvFlags::DONTWAIT)?.0))
    }

    /// Reads and drops at most `len` bytes; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or another error of the kernel.
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
    /// `WouldBlock`, or another error of the kernel.
    pub fn send_spans(&self, head: &[u8], spans: &[HostSpan]) -> io::Result<usize> {
        if head.is_empty() {
            let n = spans.len().min(SPANS_MAX);
            return self.sendmsg(&HostSpan::as_iovecs(spans)[..n]);
        }
        let head = libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
        self.sendmsg(joined(&mut [MaybeUninit::uninit(); SPANS_MAX], head, spans))
    }

    pub(crate) fn sendmsg(&self, iovecs: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: an all-zero header is valid: it has neither address nor control data.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = iovecs.as_ptr().cast_mut();
        header.msg_iovlen = iovecs.len() as _;
        retry_on_intr(|| {
            // SAFETY: the header points to `iovecs.len()` entries; each is either a live slice or a
            // span that is mapped, as its maker promised. The kernel only reads them.
            check(unsafe {
                libc::sendmsg(
                    self.as_raw_fd(),
                    &raw const header,
                    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                )
            })
        })
    }

    /// Receives into at most [`SPANS_MAX`] spans in one call; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or another error of the kernel.
    pub fn recv_spans(&self, spans: &[HostSpan]) -> io::Result<usize> {
        self.recvmsg(&HostSpan::as_iovecs(spans)[..spans.len().min(SPANS_MAX)])
    }

    /// Receives into `head` and then into the spans, at most [`SPANS_MAX`] pieces, in one call; 0
    /// at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or another error of the kernel.
    pub fn recv_head_and_spans(&self, head: &mut [u8], spans: &[HostSpan]) -> io::Result<usize> {
        let head = libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: head.len() };
        self.recvmsg(joined(&mut [MaybeUninit::uninit(); SPANS_MAX], head, spans))
    }

    pub(crate) fn recvmsg(&self, iovecs: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: an all-zero header is valid: it has neither address nor control data.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = iovecs.as_ptr().cast_mut();
        header.msg_iovlen = iovecs.len() as _;
        retry_on_intr(|| {
            // SAFETY: the header points to `iovecs.len()` entries; each is a buffer borrowed
            // mutably or a span that is mapped and writable, as its maker promised.
            check(unsafe { libc::recvmsg(self.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) })
        })
    }
}

/// `head` and as many of the spans as fit, in `entries`.
fn joined<'a>(
    entries: &'a mut [MaybeUninit<libc::iovec>; SPANS_MAX],
    head: libc::iovec,
    spans: &[HostSpan],
) -> &'a [libc::iovec] {
    entries[0].write(head);
    let n = spans.len().min(SPANS_MAX - 1);
    for (to, from) in entries[1..].iter_mut().zip(HostSpan::as_iovecs(&spans[..n])) {
        to.write(*from);
    }
    // SAFETY: the first `n + 1` entries were written above.
    unsafe { std::slice::from_raw_parts(entries.as_ptr().cast(), n + 1) }
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
/// Binds a socket to a network device (`SO_BINDTODEVICE`): its packets leave and arrive by this one alone.
///
/// # Errors
/// The kernel's; `PermissionDenied` where it lets only the superuser bind to a device (before Linux 5.7).
pub fn bind_to_device(socket: &impl AsFd, name: &CStr) -> io::Result<()> {
    let name = name.to_bytes_with_nul();
    // SAFETY: the kernel reads `name`, whose length is passed.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            name.as_ptr().cast(),
            name.len() as libc::socklen_t,
        )
    };
    check(rc as libc::ssize_t).map(drop)
}
