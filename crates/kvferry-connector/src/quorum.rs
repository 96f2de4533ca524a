//! Counts the ranks' reports of each request.
//!
//! A request has ended when it has ended on all ranks. It failed if it failed on any.

use crate::metadata::RequestOutcome;
use kvferry_proto::WireCode;
use kvferry_proto::handoff::SIDE_DATA_MAX;
use rustc_hash::FxHashMap;
use serde_bytes::ByteBuf;

/// Requests that at least one rank has not reported yet.
#[derive(Debug)]
pub(crate) struct Quorum {
    ranks: usize,
    open: FxHashMap<String, Tally>,
}

/// The reports of the ranks on a request.
#[derive(Debug)]
struct Tally {
    /// Side data by the number of the rank; `None` before the rank's report.
    reports: Vec<Option<Vec<Vec<u8>>>>,
    missing: usize,
    failure: Option<WireCode>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    /// The rank does not exist, or the request is not open.
    Unknown,
    /// The rank has reported the request before.
    Again,
    /// Other ranks have not reported it yet.
    Waiting,
    /// Other ranks have not reported it yet, and this is the first failure.
    Failing { code: WireCode, detail: String },
    /// Every rank has reported it; the request is no longer open.
    Complete {
        /// The first failure; [`WireCode::Ok`] if there was none.
        code: WireCode,
        /// Side data in the order of the ranks; empty after a failure.
        side_data: Vec<Vec<u8>>,
    },
}

impl Quorum {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks, open: FxHashMap::default() }
    }

    /// Awaits a report of the request from each rank.
    pub(crate) fn open(&mut self, request: &str) {
        let tally = Tally { reports: vec![None; self.ranks], missing: self.ranks, failure: None };
        self.open.insert(request.to_owned(), tally);
    }

    pub(crate) fn report(&mut self, rank: usize, report: RequestOutcome) -> Counted {
        let RequestOutcome { request, code, detail, side_data } = report;
        let Some(tally) = self.open.get_mut(&request) else { return Counted::Unknown };
        let Some(place) = tally.reports.get_mut(rank) else { return Counted::Unknown };
        if place.is_some() {
            return Counted::Again;
        }
        *place = Some(bounded(side_data.into_iter()).map(ByteBuf::into_vec).collect());
        tally.missing -= 1;
        let is_first_failure = !code.is_ok() && tally.failure.is_none();
        if is_first_failure {
            tally.failure = Some(code);
        }
        if tally.missing > 0 {
            let failing = Counted::Failing { code, detail };
            return if is_first_failure { failing } else { Counted::Waiting };
        }
        let tally = self.open.remove(&request).expect("it was found above");
        match tally.failure {
            Some(code) => Counted::Complete { code, side_data: Vec::new() },
            None => {
                let side_data = tally.reports.into_iter().flatten().flatten().collect();
                Counted::Complete { code: WireCode::Ok, side_data }
            }
        }
    }

    /// Closes a request that ranks have not reported.
    pub(crate) fn forget(&mut self, request: &str) {
        self.open.remove(request);
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }
}

/// Drops what exceeds [`SIDE_DATA_MAX`] bytes of one rank's side data.
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

    fn fetched(request: &str, code: WireCode, data: &[&[u8]]) -> RequestOutcome {
        RequestOutcome {
            request: request.to_owned(),
            code,
            detail: format!("{code}"),
            side_data: data.iter().map(|data| serde_bytes::ByteBuf::from(*data)).collect(),
        }
    }

    fn done(request: &str) -> RequestOutcome {
        fetched(request, WireCode::Ok, &[])
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
    fn reports_of_a_forgotten_request_are_ignored() {
        let mut quorum = Quorum::new(2);
        quorum.open("a");
        assert_eq!(quorum.report(0, done("a")), Counted::Waiting);
        quorum.forget("a");
        assert_eq!(quorum.len(), 0);
        assert_eq!(quorum.report(1, done("a")), Counted::Unknown);
    }

    #[test]
    fn side_data_beyond_the_limit_is_dropped() {
        let mut quorum = Quorum::new(1);
        quorum.open("a");
        let most = vec![7; SIDE_DATA_MAX - 1];
        let report = fetched("a", WireCode::Ok, &[&most, b"xx", b"y"]);
        let side_data = vec![most, b"y".to_vec()];
        assert_eq!(quorum.report(0, report), Counted::Complete { code: WireCode::Ok, side_data });
    }
}
