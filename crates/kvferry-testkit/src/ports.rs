//! Ports of this host that the kernel gives to no other socket.

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

/// A port of 127.0.0.1 that refuses connections while the value exists. An open connection uses it, so the kernel gives
/// it to no other socket.
#[derive(Debug)]
pub struct ClosedPort {
    address: String,
    _taken: (TcpListener, TcpStream),
}

impl ClosedPort {
    /// Takes a port.
    #[expect(clippy::new_without_default, reason = "a value takes a port of the host")]
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let taken = TcpStream::connect(listener.local_addr().expect("bound"));
        let taken = taken.expect("the port listens");
        let address = taken.local_addr().expect("connected").to_string();
        Self { address, _taken: (listener, taken) }
    }

    /// `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// A port of 127.0.0.1 at which agents listen, one after another. The kernel gives it to no other socket while the value
/// exists, also between two agents.
#[derive(Debug)]
pub struct KeptPort {
    address: String,
    _bound: OwnedFd,
}

impl KeptPort {
    /// Takes a port.
    #[expect(clippy::new_without_default, reason = "a value takes a port of the host")]
    pub fn new() -> Self {
        let bound = rustix::net::socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket");
        // Sockets that listen may share an address with one that has the option, too, and does not listen.
        sockopt::set_socket_reuseaddr(&bound, true).expect("an option of sockets");
        rustix::net::bind(&bound, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            .expect("a port is free");
        let address = rustix::net::getsockname(&bound).expect("bound");
        let address = SocketAddr::try_from(address).expect("of IPv4").to_string();
        Self { address, _bound: bound }
    }

    /// `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }
}
