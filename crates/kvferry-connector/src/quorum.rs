//! What each rank of an engine reports of a request, counted until all have.
//!
//! All ranks must be through with a request before it is, and it failed if it did on any.

use crate::orders::Fetched;
use kvferry_proto::WireCode;
use kvferry_proto::handoff::SIDE_DATA_MAX;
use rustc_hash::FxHashMap;
use serde_bytes::ByteBuf;

/// Requests that some rank has not reported yet.
#[derive(Debug)]
pub(crate) struct Quorum {
    ranks: usize,
    open: FxHashMap<String, Tally>,
}

/// What the ranks have reported of a request.
#[derive(Debug)]
struct Tally {
    /// By the number of the rank; none of those that have not reported.
    reports: Vec<Option<Vec<Vec<u8>>>>,
    missing: usize,
    failure: Option<(WireCode, String)>,
}

/// What a report changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    /// There is no such rank, or nothing is awaited of that request.
    Unknown,
    /// The rank has reported it before.
    Again,
    /// Some ranks have not reported it yet.
    Waiting,
    /// As above, and this is the first that failed.
    Failing {
        /// How.
        code: WireCode,
        /// In words.
        detail: String,
    },
    /// All ranks have: nothing more is awaited.
    Complete {
        /// How the first failed that did; [`WireCode::Ok`] if none.
        code: WireCode,
        /// What came along, in the order of the ranks; nothing if one failed.
        side_data: Vec<Vec<u8>>,
    },
}

impl Quorum {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks, open: FxHashMap::default() }
    }

    /// Reports of a request are awaited of all ranks.
    pub(crate) fn open(&mut self, request: &str) {
        let tally = Tally { reports: vec![None; self.ranks], missing: self.ranks, failure: None };
        self.open.insert(request.to_owned(), tally);
    }

    /// A rank has reported.
    pub(crate) fn report(&mut self, rank: usize, report: Fetched) -> Counted {
        let Fetched { request, code, detail, side_data } = report;
        let Some(tally) = self.open.get_mut(&request) else { return Counted::Unknown };
        let Some(place) = tally.reports.get_mut(rank) else { return Counted::Unknown };
        if place.is_some() {
            return Counted::Again;
        }
        *place = Some(bounded(side_data.into_iter()).map(ByteBuf::into_vec).collect());
        tally.missing -= 1;
        let first = !code.is_ok() && tally.failure.is_none();
        if tally.missing > 0 {
            if !first {
                return Counted::Waiting;
            }
            tally.failure = Some((code, detail.clone()));
            return Counted::Failing { code, detail };
        }
        let tally = self.open.remove(&request).expect("it was found above");
        match tally.failure {
            Some((code, _)) => Counted::Complete { code, side_data: Vec::new() },
            None if first => Counted::Complete { code, side_data: Vec::new() },
            None => {
                let side_data = tally.reports.into_iter().flatten().flatten().collect();
                Counted::Complete { code: WireCode::Ok, side_data }
            }
        }
    }

    /// Nothing is awaited of a request any more.
    pub(crate) fn forget(&mut self, request: &str) {
        self.open.remove(request);
    }

    /// Of how many requests reports are awaited.
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }
}

/// Side data of one rank, as much as one handoff may have.
pub(crate) fn bounded(side_data: impl Iterator<Item = ByteBuf>) -> impl Iterator<Item = ByteBuf> {
    let mut room = SIDE_DATA_MAX;
    side_data.filter(move |data| {
        let left = room.checked_sub(data.len());
        room = left.unwrap_or(room);
        left.is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fetched(request: &str, code: WireCode, data: &[&[u8]]) -> Fetched {
        Fetched {
            request: request.to_owned(),
            code,
            detail: format!("{code}"),
            side_data: data.iter().map(|data| serde_bytes::ByteBuf::from(*data)).collect(),
        }
    }

    fn done(request: &str) -> Fetched {
        fetched(request, WireCode::Ok, &[])
    }

    #[test]
    fn a_request_is_complete_when_the_last_rank_reports_whatever_the_order() {
        let mut quorum = Quorum::new(3);
        quorum.open("a");
        let say = |data: &[u8]| fetched("a", WireCode::Ok, &[data]);
        assert_eq!(quorum.report(2, say(b"two")), Counted::Waiting);
        assert_eq!(quorum.report(0, say(b"zero")), Counted::Waiting);
        let side_data = vec![b"zero".to_vec(), b"one".to_vec(), b"two".to_vec()];
        let complete = Counted::Complete { code: WireCode::Ok, side_data };
        assert_eq!(quorum.report(1, say(b"one")), complete);
        assert_eq!(quorum.len(), 0);
    }

    #[test]
    fn the_first_failure_is_the_outcome_and_said_at_once_but_nothing_ends_before_all_have() {
        let mut quorum = Quorum::new(3);
        quorum.open("a");
        let (silent, detail) = (WireCode::Silent, WireCode::Silent.to_string());
        let failing = Counted::Failing { code: silent, detail };
        assert_eq!(quorum.report(1, fetched("a", silent, &[])), failing);
        assert_eq!(quorum.report(0, fetched("a", WireCode::Cancelled, &[])), Counted::Waiting);
        let complete = Counted::Complete { code: silent, side_data: vec![] };
        assert_eq!(quorum.report(2, fetched("a", WireCode::Ok, &[b"useless"])), complete);
    }

    #[test]
    fn a_failure_of_the_last_rank_is_the_outcome() {
        let mut quorum = Quorum::new(2);
        quorum.open("a");
        assert_eq!(quorum.report(1, done("a")), Counted::Waiting);
        let complete = Counted::Complete { code: WireCode::Closed, side_data: vec![] };
        assert_eq!(quorum.report(0, fetched("a", WireCode::Closed, &[])), complete);
    }

    #[test]
    fn reports_twice_or_of_nobody_or_by_nobody_change_nothing() {
        let mut quorum = Quorum::new(2);
        quorum.open("a");
        assert_eq!(quorum.report(0, done("b")), Counted::Unknown);
        assert_eq!(quorum.report(2, done("a")), Counted::Unknown);
        assert_eq!(quorum.report(0, done("a")), Counted::Waiting);
        assert_eq!(quorum.report(0, fetched("a", WireCode::Closed, &[])), Counted::Again);
        let complete = Counted::Complete { code: WireCode::Ok, side_data: vec![] };
        assert_eq!(quorum.report(1, done("a")), complete);
        assert_eq!(quorum.report(1, done("a")), Counted::Unknown);
    }

    #[test]
    fn what_was_forgotten_is_not_awaited() {
        let mut quorum = Quorum::new(2);
        quorum.open("a");
        assert_eq!(quorum.report(0, done("a")), Counted::Waiting);
        quorum.forget("a");
        assert_eq!(quorum.len(), 0);
        assert_eq!(quorum.report(1, done("a")), Counted::Unknown);
    }

    #[test]
    fn side_data_beyond_the_most_of_a_handoff_is_left_out() {
        let mut quorum = Quorum::new(1);
        quorum.open("a");
        let most = vec![7; SIDE_DATA_MAX - 1];
        let report = fetched("a", WireCode::Ok, &[&most, b"xx", b"y"]);
        let side_data = vec![most, b"y".to_vec()];
        assert_eq!(quorum.report(0, report), Counted::Complete { code: WireCode::Ok, side_data });
    }
}
