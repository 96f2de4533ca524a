//! Maps the bytes of one system call to requests and answers.

use super::wire::{Request, Status};
use crate::transfer::batch::Frame;
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
    /// A status.
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
    let mut spans = spans.iter().copied();
    let mut span = spans.next();
    for request in out {
        if request.head_at < Request::LEN && !vector.push_bytes(&request.head[request.head_at..]) {
            return;
        }
        let mut left = request.left;
        while left > 0 {
            let Some(rest) = span else { return };
            let (now, later) = take(rest, left);
            if !vector.push_span(now) {
                return;
            }
            left -= now.len() as u64;
            span = if later.is_empty() { spans.next() } else { Some(later) };
        }
    }
}

/// Splits a span after `left` bytes.
fn take(span: HostSpan, left: u64) -> (HostSpan, HostSpan) {
    span.split_at(span.len().min(usize::try_from(left).unwrap_or(usize::MAX)))
}

/// How many of the first `sent` bytes are payload.
pub(super) fn payload_of(out: &VecDeque<Outgoing>, mut sent: usize) -> usize {
    let mut payload = 0;
    for request in out {
        sent -= sent.min(Request::LEN - request.head_at);
        let of_payload = usize::try_from(request.left).unwrap_or(usize::MAX).min(sent);
        payload += of_payload;
        sent -= of_payload;
        if sent == 0 {
            break;
        }
    }
    payload
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
        let mut spans = spans.iter().copied();
        let mut span = spans.next();
        for ((status, payload), slot) in self.parts().zip(slots) {
            if span.is_none() {
                return;
            }
            if status > 0 && !vector.push_buffer(&mut slot[Status::LEN - status..]) {
                return;
            }
            let mut left = payload;
            while left > 0 {
                let Some(rest) = span else { return };
                let (now, later) = take(rest, left);
                if !vector.push_span(now) {
                    return;
                }
                left -= now.len() as u64;
                span = if later.is_empty() { spans.next() } else { Some(later) };
            }
        }
    }

    /// How many of the first `came` bytes are payload.
    pub(super) fn payload_of(&self, mut came: usize) -> usize {
        let mut sum = 0;
        for (status, payload) in self.parts() {
            came -= came.min(status);
            let of_payload = usize::try_from(payload).unwrap_or(usize::MAX).min(came);
            sum += of_payload;
            came -= of_payload;
            if came == 0 {
                break;
            }
        }
        sum
    }
}
