//! Oracles for the decoders of Mooncake's protocol: entry points for fuzzers, behind the feature `fuzzing`; not part
//! of the API. `kvferry-models` lists and runs them.

use super::connect::understood;
use super::layout::{Answer, Awaited, Layout, Outgoing, STATUSES, lay_out, payload_of};
use super::peer::MooncakePeer;
use super::wire::{
    Alive, Caller, Descriptor, Kind, LENGTH, Notify, Opcode, Request, Status, frame, split,
};
use kvferry_proto::fuzzing::Script;
use kvferry_sys::map::Mapping;
use kvferry_sys::vectors::{RecvVector, SendVector};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::OnceLock;

/// Decodes one frame of a handshake, from its length on.
pub fn mooncake_handshake(bytes: &[u8]) {
    let Some((_, body)) = bytes.split_first_chunk::<LENGTH>() else { return };
    let Some((kind, json)) = split(body) else { return };
    assert_eq!(Kind::from_byte(kind.to_byte()), Some(kind));
    same_again::<Notify>(json);
    same_again::<Alive>(json);
    // A caller's other fields are not decoded, but every complete descriptor is also a caller's.
    let caller = serde_json::from_slice::<Caller>(json);
    let Ok(descriptor) = understood(json) else { return };
    same_again::<Descriptor>(json);
    if json.trim_ascii_start().starts_with(b"{") {
        let caller = caller.expect("a descriptor decodes as a caller, too");
        assert_eq!(caller.kvferry, descriptor.kvferry);
    }

    let answer = descriptor.clone().into_answer();
    assert!(answer.len() <= 1 << 20 || descriptor.buffers.is_empty(), "stock peers read no more");
    let decoded = split(&answer[LENGTH..]).expect("a frame").1;
    let decoded = understood(decoded).expect("own output");
    assert!(descriptor.buffers.starts_with(&decoded.buffers));

    for called in ["127.0.0.1:5", "192.0.2.7:5", "[2001:db8::1]:5"] {
        let called: SocketAddr = called.parse().expect("an address");
        let Ok(peer) = MooncakePeer::new(descriptor.clone(), called, 1, None) else {
            assert!(
                descriptor.tcp_data_port == 0
                    || !descriptor.protocol.split(',').any(|p| p.trim() == "tcp")
            );
            continue;
        };
        assert_eq!(peer.data.port(), descriptor.tcp_data_port);
        assert!(!peer.data.ip().is_unspecified(), "the data address is specified");
        assert!(
            called.ip().is_loopback() || !peer.data.ip().is_loopback(),
            "a remote peer's data is not on loopback"
        );
    }
}

fn same_again<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(json: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<T>(json) {
        let frame = frame(Kind::Metadata, &value);
        let len = u64::from_le_bytes(frame[..LENGTH].try_into().expect("eight bytes"));
        assert_eq!(len as usize, frame.len() - LENGTH);
        let (kind, json) = split(&frame[LENGTH..]).expect("a frame");
        assert_eq!(kind, Kind::Metadata);
        assert_eq!(serde_json::from_slice::<T>(json).expect("own output"), value);
    }
}

/// Decodes heads of requests, and statuses.
pub fn mooncake_data(bytes: &[u8]) {
    if let Some(head) = bytes.first_chunk::<{ Request::LEN }>() {
        let request = Request::decode(head);
        let again = request.encode();
        assert_eq!(Request::decode(&again), request);
        assert_eq!(again[..16], head[..16], "size and address are kept");
        assert_eq!(request.opcode == Opcode::Write, head[16] & 0x7f == 1);
    }
    if let Some(word) = bytes.first_chunk::<{ Status::LEN }>() {
        match Status::decode(*word) {
            Ok(status) => assert_eq!(status.encode(), *word),
            Err(e) => assert!(word[4..] != *b"VTCM" && !e.to_string().is_empty()),
        }
    }
}

/// Compares the mapping of a call's bytes to requests with counting them one by one.
pub fn mooncake_layout(bytes: &[u8]) {
    static MEMORY: OnceLock<Mapping> = OnceLock::new();
    let memory = MEMORY.get_or_init(|| Mapping::anonymous(1 << 20).expect("a mebibyte"));
    let mut script = Script::new(bytes);
    let requests = 1 + script.below(200);
    let lens: Vec<u64> = (0..requests).map(|_| 1 + u64::from(script.byte()) * 5).collect();
    let at = script.below(Request::LEN);
    let status_len = script.pick(&[0, Status::LEN]);
    let status_at = script.below(Status::LEN + 1).min(status_len);
    let mut left: u64 = lens.iter().sum();
    let mut spans = Vec::new();
    while left > 0 && spans.len() < 300 {
        let len = (1 + u64::from(script.short())).min(left);
        spans.push(memory.span(0, len as usize));
        left -= len;
    }
    let spanned: u64 = spans.iter().map(|span| span.len() as u64).sum();

    let out: VecDeque<_> = (0..requests)
        .map(|i| Outgoing {
            head: [0; Request::LEN],
            head_at: if i == 0 { at } else { 0 },
            left: lens[i],
        })
        .collect();
    let mut vector = SendVector::new();
    lay_out(&out, &spans, &mut vector);
    sends_add_up(&out, vector.bytes(), spanned);

    let awaited: VecDeque<_> = lens
        .iter()
        .map(|&bytes| Awaited { kind: Answer::Payload, pair: 0, bytes, last_of: None })
        .collect();
    let layout = Layout { awaited: &awaited, status_len, status_at, payload_left: lens[0] };
    let mut slots = [[0; Status::LEN]; STATUSES];
    let mut vector = RecvVector::new();
    layout.lay_out(&mut slots, &spans, &mut vector);
    let total = vector.bytes();
    let mut naive = 0;
    let mut kinds = lens.iter().enumerate().take(STATUSES).flat_map(|(i, &len)| {
        let status = if i == 0 { status_len - status_at } else { status_len };
        std::iter::repeat_n(false, status).chain(std::iter::repeat_n(true, len as usize))
    });
    for came in 0..=total {
        if came % 61 == 0 || came == total {
            assert_eq!(layout.payload_of(came), naive, "{came} of {total}");
        }
        naive += usize::from(kinds.next().unwrap_or(false));
    }
    assert!(layout.payload_of(total) as u64 <= spanned, "the payload fits the spans");
}

fn sends_add_up(out: &VecDeque<Outgoing>, total: usize, spanned: u64) {
    let mut naive = 0;
    let mut kinds = out.iter().flat_map(|request| {
        std::iter::repeat_n(false, Request::LEN - request.head_at)
            .chain(std::iter::repeat_n(true, request.left as usize))
    });
    for sent in 0..=total {
        if sent % 61 == 0 || sent == total {
            assert_eq!(payload_of(out, sent), naive, "{sent} of {total}");
        }
        naive += usize::from(kinds.next().unwrap_or(false));
    }
    assert!(payload_of(out, total) as u64 <= spanned, "the payload fits the spans");
}
