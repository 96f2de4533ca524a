//! Sizes, times and failures of the fetches of one rank, for the metrics of an engine.

use super::types::WorkerObserver;
use crate::rank::ReadPart;
use kvferry_proto::WireCode;
use kvferry_sys::sync::Mutex;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Ends that are kept; the oldest is dropped first.
const ENDED_MAX: usize = 65_536;

/// The end of a fetch on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// The engine's id of the request.
    pub request: String,
    /// Time from the first read to the end; zero if nothing was read.
    pub took: Duration,
    /// Payload bytes that were read.
    pub bytes: u64,
    /// The code and the reason in words, if it failed.
    pub failure: Option<(WireCode, String)>,
}

/// Keeps how the fetches of a worker half end, for [`Worker::set_observer`](crate::Worker::set_observer). At most 65 536
/// ends that are not taken. Any thread may call it.
#[derive(Debug, Default)]
pub struct Loads(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Time of the first read of a fetch, and the bytes read so far. Clients choose the keys.
    running: HashMap<String, (Instant, u64)>,
    ended: VecDeque<Load>,
}

impl Loads {
    /// Takes the ends since the last call, the first ones first.
    pub fn take(&self) -> Vec<Load> {
        std::mem::take(&mut self.0.lock().ended).into()
    }
}

impl WorkerObserver for Loads {
    fn received(&self, request: &str, code: WireCode, detail: &str) {
        let mut state = self.0.lock();
        let read = state.running.remove(request);
        let (took, bytes) =
            read.map_or_else(Default::default, |(began, bytes)| (began.elapsed(), bytes));
        if state.ended.len() == ENDED_MAX {
            state.ended.pop_front();
        }
        let failure = (!code.is_ok()).then(|| (code, detail.to_owned()));
        state.ended.push_back(Load { request: request.to_owned(), took, bytes, failure });
    }

    fn sent(&self, _request: &str) {}

    fn read(&self, request: &str, part: ReadPart) {
        let mut state = self.0.lock();
        match state.running.get_mut(request) {
            Some((_, bytes)) => *bytes += part.bytes,
            None => drop(state.running.insert(request.to_owned(), (part.began, part.bytes))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_has_all_that_was_read_since_its_first_read_and_the_oldest_are_dropped() {
        let loads = Loads::default();
        let began = Instant::now();
        for bytes in [3, 4] {
            loads.read("a", ReadPart { bytes, began, ended: Instant::now() });
        }
        loads.received("a", WireCode::Ok, "");
        let passed = began.elapsed();
        loads.received("b", WireCode::Silent, "nothing was heard");
        let [done, failed] = &loads.take()[..] else { panic!("two have ended") };
        assert_eq!((done.request.as_str(), done.bytes, &done.failure), ("a", 7, &None));
        assert!(done.took <= passed, "{:?} of {passed:?}", done.took);
        let failure = Some((WireCode::Silent, "nothing was heard".to_owned()));
        let (request, took) = ("b".to_owned(), Duration::ZERO);
        assert_eq!(*failed, Load { request, took, bytes: 0, failure });
        for at in 0..=ENDED_MAX {
            loads.received(&at.to_string(), WireCode::Ok, "");
        }
        let kept = loads.take();
        assert_eq!((kept.len(), kept[0].request.as_str()), (ENDED_MAX, "1"));
        assert_eq!((loads.take(), loads.0.lock().running.len()), (vec![], 0));
    }
}
