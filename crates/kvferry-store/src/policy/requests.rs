//! Requests whose prompts are being stored: what their first blocks say of the next.

use super::Slot;
use std::collections::VecDeque;

/// Requests that are remembered; the oldest are forgotten first.
const REQUESTS_MAX: usize = 256;

/// A request of which blocks are missing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    /// Slot of the request's last cached block.
    pub(super) tail: Option<Slot>,
    pub(super) at: u64,
    /// Blocks that are not cached.
    pub(super) missing: usize,
    /// Blocks that were not known before.
    pub(super) new: usize,
    /// Number of earlier uses of the request's last known block.
    pub(super) turns: u32,
}

#[derive(Debug, Default)]
pub(super) struct Requests {
    by_age: VecDeque<Request>,
}

impl Requests {
    pub(super) fn remember(&mut self, request: Request) {
        if request.missing == 0 {
            return;
        }
        if self.by_age.len() == REQUESTS_MAX {
            self.by_age.pop_front();
        }
        self.by_age.push_back(request);
    }

    /// Takes the request to which `blocks` blocks behind `tail` belong. Of several, one that misses just
    /// these, or else the oldest: requests store what they miss in the order in which they came.
    pub(super) fn take(&mut self, tail: Option<Slot>, blocks: usize) -> Option<Request> {
        let of_tail = |missing: &dyn Fn(usize) -> bool| {
            let fits = |request: &Request| request.tail == tail && missing(request.missing);
            self.by_age.iter().position(fits)
        };
        let at =
            of_tail(&|missing| missing == blocks).or_else(|| of_tail(&|missing| missing > blocks));
        self.by_age.remove(at?)
    }
}
