//! Ports of this host at which no process listens.

use std::net::{TcpListener, TcpStream};

/// A port of 127.0.0.1 that refuses connections while the value lives. An open connection uses it, so the kernel gives
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
