//! The users of this host that an agent without a secret talks to.
//!
//! Where only processes of this host reach an agent, the user of a process stands in for the secret: those of the
//! agent's own user and of the superuser may connect, and only they are connected to. Every place that
//! accepts a connection or opens one asks here, unless the connection proves the key of a session.

use crate::error::{Error, ErrorKind, Result};
use kvferry_sys::owner::Owners;
use kvferry_sys::socket::Socket;
use std::io;
use std::net::SocketAddr;

/// Whose process has opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// One of the agent's own user or of the superuser.
    Trusted,
    /// Another user's, or nothing is known of it.
    Other,
    /// The process has closed the connection, and the kernel does not tell of which user it was: perhaps of another
    /// one. It can receive nothing.
    Gone,
}

/// Decided once, when the agent starts: later errors of the kernel refuse a connection.
#[derive(Debug, Default)]
pub(crate) struct Users(Option<Owners>);

impl Users {
    /// The check of an agent whose port is open at `listening`. There is none with a secret, on a port that other
    /// hosts reach, or if the kernel does not tell the users of connections.
    ///
    /// # Errors
    /// `Io` if something else is in the way: another user of the host may have caused it, and must not switch the
    /// check off.
    pub(crate) fn new(listening: SocketAddr, has_secret: bool) -> Result<Self> {
        if has_secret || !listening.ip().to_canonical().is_loopback() {
            return Ok(Self(None));
        }
        Self::with(Owners::new(listening))
    }

    fn with(owners: io::Result<Owners>) -> Result<Self> {
        match owners {
            Ok(owners) => Ok(Self(Some(owners))),
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                tracing::debug!(error = %e, "the kernel does not tell the users of connections");
                Ok(Self(None))
            }
            Err(e) => {
                let what =
                    "can't tell the users of connections apart; set a secret, or start again";
                Err(Error::io(what, e))
            }
        }
    }

    /// Whether users are told apart.
    pub(crate) const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Whether a connection that proves no secret may come in.
    pub(crate) fn admits(&self, socket: &Socket) -> bool {
        self.caller(socket) == Owner::Trusted
    }

    /// Whose process has opened a connection.
    pub(crate) fn caller(&self, socket: &Socket) -> Owner {
        let Some(owners) = &self.0 else { return Owner::Trusted };
        let of = |(here, there)| owners.is_caller_trusted(here, there);
        match ends(socket).and_then(of) {
            Ok(true) => Owner::Trusted,
            Ok(false) => Owner::Other,
            Err(e) => {
                tracing::debug!(error = %e, "the user of a connection is not known");
                match e.kind() {
                    io::ErrorKind::NotConnected => Owner::Gone,
                    // The peer's socket is not found, for example, or no memory is left in the kernel: the peer may live.
                    _ => Owner::Other,
                }
            }
        }
    }

    /// Checks the process that this agent has connected to, before anything is sent to it.
    ///
    /// # Errors
    /// `AccessDenied` if it is another user's, `PeerReset` if its user can't be known any more.
    pub(crate) fn check_target(&self, socket: &Socket) -> Result<()> {
        let Some(owners) = &self.0 else { return Ok(()) };
        let of = |(here, there): (SocketAddr, SocketAddr)| {
            // What lies beyond loopback is another host's, or reached by way of one.
            let is_here = there.ip().to_canonical().is_loopback();
            if is_here { owners.is_target_trusted(here, there) } else { Ok(true) }
        };
        match ends(socket).and_then(of) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::new(
                ErrorKind::AccessDenied,
                "the process that listens there belongs to another user of this host; set a secret",
            )),
            Err(e) => {
                let what = "the connection was lost before its user was known";
                Err(Error::new(ErrorKind::PeerReset, what).caused_by(e))
            }
        }
    }
}

/// The addresses at this end of a connection and at the other.
fn ends(socket: &Socket) -> io::Result<(SocketAddr, SocketAddr)> {
    Ok((socket.local_addr()?, socket.peer_addr()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn at(addr: &str) -> SocketAddr {
        addr.parse().expect("an address")
    }

    #[test]
    fn users_are_told_apart_on_loopback_without_a_secret_only() {
        let new = |at, has_secret| Users::new(at, has_secret).expect("nothing is in the way");
        assert!(!new(at("127.0.0.1:1"), true).is_on());
        assert!(!new(at("0.0.0.0:1"), false).is_on());
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let users = new(listener.local_addr().expect("bound"), false);
        if !users.is_on() {
            println!("SKIPPED: this kernel does not tell the users of connections");
            return;
        }
        let socket = Socket::connect(listener.local_addr().expect("bound")).expect("it listens");
        users.check_target(&socket).expect("this process listens there");
        assert!(users.admits(&socket) || listener.accept().is_ok_and(|_| users.admits(&socket)));
        // The question fails: the connection has no other end any more.
        drop(listener);
        socket.shutdown(std::net::Shutdown::Both);
        assert_eq!(users.caller(&socket), Owner::Gone);
        assert!(!users.admits(&socket));
        let lost = users.check_target(&socket).expect_err("nobody is there");
        assert_eq!(lost.kind(), ErrorKind::PeerReset, "{lost}");
    }

    #[test]
    fn the_check_of_users_is_off_only_where_the_kernel_does_not_tell_them() {
        let with = |kind: io::ErrorKind| Users::with(Err(kind.into()));
        assert!(!with(io::ErrorKind::Unsupported).expect("an open port is warned about").is_on());
        for passes in [io::ErrorKind::AddrInUse, io::ErrorKind::NotConnected, io::ErrorKind::Other]
        {
            let refused = with(passes).expect_err("it may pass, or be another user's doing");
            assert!(refused.to_string().contains("secret"), "{refused}");
        }
    }
}
