//! The private parts of a session; their models are beside them, in `kvferry_proto`.

use super::Model;
use kvferry_proto::fuzzing::{self, Script};

/// The queue of frames to the peer: first in, first out, heartbeats first, bounded.
pub const OUTBOX: Model = Model {
    name: "outbox_model",
    run: |bytes, met| fuzzing::outbox(&mut Script::new(bytes), met),
    rows: &["push", "wait", "release", "pop", "pin", "ping", "pong", "calm", "clear"],
    columns: &["empty", "some", "long", "full"],
    unreachable: &[],
    cases: (8000, 300),
};

/// The queue of events to the driver: first in, first out, bounded.
pub const INBOX: Model = Model {
    name: "inbox_model",
    run: |bytes, met| fuzzing::inbox(&mut Script::new(bytes), met),
    rows: &["request", "revoke", "answer", "pop"],
    columns: &["empty", "some", "long", "full"],
    unreachable: &[],
    cases: (300, 300),
};

/// Pings at their interval, silence after its window, and neither while the peer is not watched.
pub const HEARTBEAT: Model = Model {
    name: "heartbeat_model",
    run: |bytes, met| fuzzing::heartbeat(&mut Script::new(bytes), met),
    rows: &["watch", "unwatch", "hear", "hear late", "tick", "wait", "clock back"],
    columns: &["unwatched", "watched", "ping due", "silent"],
    unreachable: &[],
    cases: (4000, 300),
};

/// No stream id is used twice, and every recent new one may be.
pub const STREAM_WINDOW: Model = Model {
    name: "stream_window_model",
    run: |bytes, met| fuzzing::stream_window(&mut Script::new(bytes), met),
    rows: &["next", "same", "below", "far below", "ahead", "far ahead", "any"],
    columns: &["first", "new", "used", "too old"],
    unreachable: &[
        // Unless the highest is the last there is.
        ("next", &["used", "too old"], "it is above the highest id there was"),
        ("same", &["new", "too old"], "it is the highest id there was"),
        ("below", &["too old"], "at most 1020 below the highest is within the window"),
        ("ahead", &["too old"], "it is not below the highest id there was"),
        ("far ahead", &["used", "too old"], "it is above the highest id there was"),
    ],
    cases: (4000, 300),
};
