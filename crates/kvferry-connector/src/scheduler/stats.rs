//! Counts of what a scheduler half has decided, and of how it ended, in an interval.

use kvferry_proto::WireCode;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counts of an interval: see [`crate::Scheduler::take_stats`]. Those of several intervals or engines
/// can be added.
///
/// Codes are the names of [`WireCode`] in snake case: `ok`, `layout_mismatch`; `other` for those of later
/// versions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Fetches that have ended on all ranks, by code.
    pub fetched: BTreeMap<String, u64>,
    /// Tokens of the fetches that succeeded.
    pub fetched_tokens: u64,
    /// Handoffs that were freed: their KV was not needed here.
    pub freed: u64,
    /// Producer's requests that have ended and were handed over.
    pub offered: u64,
    /// Tokens of the requests in `offered`.
    pub offered_tokens: u64,
    /// Producer's requests that were withdrawn, by code.
    pub withdrawn: BTreeMap<String, u64>,
    /// Requests that got no handoff, by the name of [`crate::Refused`] in snake case.
    pub refused: BTreeMap<String, u64>,
}

impl Stats {
    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the names that [`Stats::refused`] can have.
    pub fn reasons() -> Vec<String> {
        super::Refused::ALL.iter().map(|reason| reason_name(*reason)).collect()
    }

    /// Returns the names that [`Stats::withdrawn`] can have.
    pub fn failures() -> Vec<String> {
        let known = WireCode::KNOWN.iter().filter(|code| !code.is_ok());
        known.map(|code| code_name(*code)).chain(["other".to_owned()]).collect()
    }

    /// Adds the counts of another interval or engine.
    pub fn add(&mut self, other: &Self) {
        for (ours, theirs) in [
            (&mut self.fetched, &other.fetched),
            (&mut self.withdrawn, &other.withdrawn),
            (&mut self.refused, &other.refused),
        ] {
            for (name, count) in theirs {
                *ours.entry(name.clone()).or_default() += count;
            }
        }
        self.fetched_tokens += other.fetched_tokens;
        self.freed += other.freed;
        self.offered += other.offered;
        self.offered_tokens += other.offered_tokens;
    }

    pub(super) fn count_fetch(&mut self, code: WireCode, tokens: u32) {
        *self.fetched.entry(code_name(code)).or_default() += 1;
        self.fetched_tokens += if code.is_ok() { tokens.into() } else { 0 };
    }

    pub(super) fn count_withdrawal(&mut self, code: WireCode) {
        *self.withdrawn.entry(code_name(code)).or_default() += 1;
    }

    pub(super) fn count_refusal(&mut self, reason: super::Refused) {
        *self.refused.entry(reason_name(reason)).or_default() += 1;
    }
}

/// The name of a code in [`Stats`].
fn code_name(code: WireCode) -> String {
    match code {
        // There may be any number of them.
        WireCode::Other(_) => "other".to_owned(),
        code => snake_case(&format!("{code:?}")),
    }
}

fn reason_name(reason: super::Refused) -> String {
    snake_case(&format!("{reason:?}"))
}

fn snake_case(name: &str) -> String {
    let mut out = String::with_capacity(name.len() + 4);
    for (at, letter) in name.char_indices() {
        if letter.is_ascii_uppercase() && at > 0 {
            out.push('_');
        }
        out.push(letter.to_ascii_lowercase());
    }
    out
}
