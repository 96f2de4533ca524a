//! Another user of this host.

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;

/// Returns true if the kernel tells the user of a connection within this host.
///
/// # Panics
/// If no port is free.
pub fn kernel_tells_users() -> bool {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    kvferry_sys::owner::Owners::new(listener.local_addr().expect("bound")).is_ok()
}

/// Runs `make` on a thread of another user of this host, whose sockets the kernel takes for that user's; also
/// those of the threads that it starts. `None`, with a line that says so, where there is no other user or the
/// kernel does not tell whose a connection is.
///
/// # Panics
/// If `make` panics.
pub fn as_another_user<T: Send>(what: &str, make: impl FnOnce() -> T + Send) -> Option<T> {
    if kvferry_sys::unix::user() != 0 || !kernel_tells_users() {
        println!("SKIPPED: {what}: needs root, and a kernel with INET_DIAG");
        return None;
    }
    let becoming = move || {
        let keep = -1;
        // SAFETY: changes the user of this thread alone.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, keep, 65_534, keep) };
        assert_eq!(rc, 0, "root becomes another user");
        make()
    };
    thread::scope(|scope| Some(scope.spawn(becoming).join().expect("no panic")))
}

/// Connects to an address of IPv4 with a socket that is bound to the loopback device (`SO_BINDTODEVICE`), and a second socket
/// that listens at the address of the first.
///
/// # Errors
/// The kernel's; `PermissionDenied` where it lets only the superuser bind to a device (before Linux 5.7).
pub fn connect_by_loopback_device(to: SocketAddr) -> io::Result<(TcpStream, TcpListener)> {
    let socket = || {
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_reuseport(&socket, true)?;
        Ok::<_, io::Error>(socket)
    };
    let calling = socket()?;
    kvferry_sys::socket::bind_to_device(&calling, c"lo")?;
    rustix::net::bind(&calling, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    let here = SocketAddr::try_from(rustix::net::getsockname(&calling)?)?;
    let listening = socket()?;
    rustix::net::bind(&listening, &here)?;
    rustix::net::listen(&listening, 1)?;
    rustix::net::connect(&calling, &to)?;
    Ok((calling.into(), listening.into()))
}

/// Runs `make` on a thread whose files the kernel gives to another user of this host, as NFS does with a superuser's
/// (`root_squash`); also those of the threads that it starts. `None`, with a line that says so, without root.
///
/// # Panics
/// If `make` panics.
pub fn with_files_of_another_user<T: Send>(
    what: &str,
    make: impl FnOnce() -> T + Send,
) -> Option<T> {
    if kvferry_sys::unix::user() != 0 {
        println!("SKIPPED: {what}: needs root");
        return None;
    }
    let becoming = move || {
        for _ in 0..2 {
            // SAFETY: changes the user of this thread alone, for files. Returns the one before.
            let before = unsafe { libc::syscall(libc::SYS_setfsuid, 65_534) };
            assert!(before == 0 || before == 65_534);
        }
        make()
    };
    thread::scope(|scope| Some(scope.spawn(becoming).join().expect("no panic")))
}
