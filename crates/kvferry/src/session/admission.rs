//! The places of connections that are not authenticated yet, and how connections are refused.

use crate::core::Core;
use crate::reactor::Remote;
use crate::sync::{Arc, Mutex, MutexGuard, Weak};
use kvferry_proto::message::{Refused, encode};
use kvferry_proto::{Handshakes, Message, Timestamp, WireCode};
use kvferry_sys::socket::Socket;
use std::net::SocketAddr;

/// The places of connections that are not authenticated yet. A connection's key is its token on the
/// control thread.
pub(super) struct Places {
    control: Remote,
    listener: u64,
    state: Mutex<PlacesState>,
}

pub(super) struct PlacesState {
    pub(super) pending: Handshakes<u64>,
    /// The listener waits for a place.
    is_awaited: bool,
}

impl Places {
    /// `listener` is the token of the handler that waits for places, on the control thread.
    pub(super) fn new(control: Remote, listener: u64, pending: Handshakes<u64>) -> Self {
        Self { control, listener, state: Mutex::new(PlacesState { pending, is_awaited: false }) }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, PlacesState> {
        self.state.lock()
    }

    /// The time until which the listener must wait for a place; `None` if there is one.
    pub(super) fn wait_until(&self, now: Timestamp) -> Option<Timestamp> {
        let mut state = self.state();
        let until = state.pending.room_at().filter(|at| *at > now);
        state.is_awaited = until.is_some();
        until
    }

    /// Releases a place. Returns whether the connection still held it.
    pub(super) fn leave(&self, token: u64) -> bool {
        let (was_held, is_awaited) = {
            let mut state = self.state();
            (state.pending.done(&token), std::mem::take(&mut state.is_awaited))
        };
        if is_awaited {
            self.control.wake(self.listener);
        }
        was_held
    }
}

/// The place of a connection whose session handshake runs. Dropping it releases the place.
pub(crate) struct Admission {
    core: Weak<Core>,
    places: Arc<Places>,
    token: u64,
    until: Timestamp,
}

impl Admission {
    pub(super) fn new(
        core: &Arc<Core>,
        places: &Arc<Places>,
        token: u64,
        until: Timestamp,
    ) -> Self {
        Self { core: Arc::downgrade(core), places: Arc::clone(places), token, until }
    }

    /// The token of the connection's handler.
    pub(super) fn token(&self) -> u64 {
        self.token
    }

    /// Deadline of the handshake.
    pub(super) fn until(&self) -> Timestamp {
        self.until
    }

    /// False if the place was given to another connection.
    pub(crate) fn is_held(&self) -> bool {
        self.places.state().pending.contains(&self.token)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.places.leave(self.token);
        if let Some(core) = self.core.upgrade() {
            core.counters.handshakes_pending.less_one();
        }
    }
}

pub(super) fn refuse(socket: &Socket, code: WireCode, detail: &str) {
    refuse_with(socket, code, detail, None);
}

/// Sends a refusal. `mac` is the proof that the session of a stream refuses it.
pub(super) fn refuse_with(socket: &Socket, code: WireCode, detail: &str, mac: Option<Vec<u8>>) {
    let refused = Refused { code, detail: detail.to_owned(), aux: 0, mac };
    // The first bytes that we send on this connection fit the socket's buffer.
    let _ = socket.send(&encode(&Message::Refused(refused)));
}

/// Refuses a connection because the process may use no more descriptors for connections of this kind.
pub(super) fn refuse_full(
    core: &Core,
    socket: &Socket,
    peer: SocketAddr,
    what: &str,
    mac: Option<Vec<u8>>,
) {
    refuse_with(socket, WireCode::Busy, &is_full(core, peer, what), mac);
}

/// Counts a connection that is refused because the process may use no more descriptors for connections of
/// this kind. Returns the reason in words.
pub(super) fn is_full(core: &Core, peer: SocketAddr, what: &str) -> String {
    core.counters.connections_refused.one();
    tracing::debug!(%peer, "refused a connection: too many {what} for the descriptor limit of the process");
    format!("too many {what} for the descriptor limit of the process (RLIMIT_NOFILE)")
}
