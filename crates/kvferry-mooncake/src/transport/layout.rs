//! Maps the bytes of one system call to requests and answers.

use super::wire::{Request, Status};
use kvferry::transport::Frame;
use kvferry_sys::HostSpan;
use kvferry_sys::vectors::{RecvVector, SendVector};
use std::collections::VecDeque;

/// Reads whose answers are received in one call.
pub(super) const STATUSES: usize = 128;

/// A request that is being sent.
pub(super) struct Outgoing {
    pub(super) head: [u8; Request::LEN],
    pub(super) head_at: usize,
    pub(super) left: u64,
}

/// A request without a complete answer.
pub(super) struct Awaited {
    pub(super) kind: Answer,
    /// The first pair of the batch that it covers.
    pub(super) pair: usize,
    pub(super) bytes: u64,
    /// The frame that this request completes.
    pub(super) last_of: Option<Frame>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Status,
    /// One byte of any value.
    Barrier,
    /// A status if the peer sends any, and the payload.
    Payload,
}

impl Awaited {
    /// Bytes of the answer before its payload.
    pub(super) fn answer_len(&self) -> usize {
        if self.kind == Answer::Barrier { 1 } else { Status::LEN }
    }
}

/// The heads and payloads of requests, alternating, as far as the spans reach.
pub(super) fn lay_out<'a>(
    out: &'a VecDeque<Outgoing>,
    spans: &[HostSpan],
    vector: &mut SendVector<'a>,
) {
    let mut spans = Spans::new(spans);
    for request in out {
        if request.head_at < Request::LEN && !vector.push_bytes(&request.head[request.head_at..]) {
            return;
        }
        if !spans.give(request.left, |span| vector.push_span(span)) {
            return;
        }
    }
}

/// Spans that are divided among requests, in order.
struct Spans<'a> {
    rest: std::slice::Iter<'a, HostSpan>,
    current: Option<HostSpan>,
}

impl<'a> Spans<'a> {
    fn new(spans: &'a [HostSpan]) -> Self {
        let mut rest = spans.iter();
        let current = rest.next().copied();
        Self { rest, current }
    }

    /// Gives the next `bytes` bytes to `push`; false if the spans end before, or `push` is full.
    fn give(&mut self, bytes: u64, mut push: impl FnMut(HostSpan) -> bool) -> bool {
        let mut left = bytes;
        while left > 0 {
            let Some(span) = self.current else { return false };
            let len = span.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let (now, later) = span.split_at(len);
            if !push(now) {
                return false;
            }
            left -= len as u64;
            self.current = if later.is_empty() { self.rest.next().copied() } else { Some(later) };
        }
        true
    }
}

/// How many of the first `sent` bytes are payload.
pub(super) fn payload_of(out: &VecDeque<Outgoing>, sent: usize) -> usize {
    count_payload(out.iter().map(|request| (Request::LEN - request.head_at, request.left)), sent)
}

/// How many of the first `moved` bytes of messages, each a head and a payload, are payload.
fn count_payload(messages: impl Iterator<Item = (usize, u64)>, mut moved: usize) -> usize {
    let mut sum = 0;
    for (head, payload) in messages {
        moved -= moved.min(head);
        let of_payload = usize::try_from(payload).unwrap_or(usize::MAX).min(moved);
        sum += of_payload;
        moved -= of_payload;
        if moved == 0 {
            break;
        }
    }
    sum
}

/// The destinations of answers to reads: a slot for each status, the sink's spans for payload.
pub(super) struct Layout<'a> {
    pub(super) awaited: &'a VecDeque<Awaited>,
    /// 0 if the peer sends none.
    pub(super) status_len: usize,
    pub(super) status_at: usize,
    pub(super) payload_left: u64,
}

impl Layout<'_> {
    /// For each answer: bytes of status and of payload that it lacks.
    fn parts(&self) -> impl Iterator<Item = (usize, u64)> {
        let parts = self.awaited.iter().enumerate().take(STATUSES);
        parts.map(|(i, awaited)| {
            if i == 0 {
                (self.status_len.saturating_sub(self.status_at), self.payload_left)
            } else {
                (self.status_len, awaited.bytes)
            }
        })
    }

    pub(super) fn lay_out<'v>(
        &self,
        slots: &'v mut [[u8; Status::LEN]; STATUSES],
        spans: &[HostSpan],
        vector: &mut RecvVector<'v>,
    ) {
        let mut spans = Spans::new(spans);
        for ((status, payload), slot) in self.parts().zip(slots) {
            if spans.current.is_none() {
                return;
            }
            if status > 0 && !vector.push_buffer(&mut slot[Status::LEN - status..]) {
                return;
            }
            if !spans.give(payload, |span| vector.push_span(span)) {
                return;
            }
        }
    }

    pub(super) fn payload_of(&self, came: usize) -> usize {
        count_payload(self.parts(), came)
    }
}
