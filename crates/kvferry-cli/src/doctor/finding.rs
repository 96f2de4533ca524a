//! Findings, one line each, and the report for programs.
//!
//! `--json` prints one object, `kvferry.doctor/1`:
//!
//! | field | meaning |
//! |---|---|
//! | `schema` | `kvferry.doctor/1`; fields may be added under the same number |
//! | `version` | kvferry's |
//! | `target` | the `HOST:PORT` that was asked about; absent for this host |
//! | `worst` | the worst mark of all findings |
//! | `counts` | findings by mark: `ok`, `note`, `missing`, `bad` |
//! | `groups` | in the order they are shown: `name`, `title`, `findings` |
//! | a finding | `id` (stable), `subject` (what is shown; differs where an id occurs several times), `mark`, `finding` (for people), `fix` (only where something can be done), `facts` (for programs; sizes in bytes, times in microseconds) |

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

/// Severity of a finding; worse ones are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mark {
    /// The subject is as it should be.
    Ok,
    /// The subject works, but could be better or is worth knowing.
    Note,
    /// Something optional is not there.
    Missing,
    /// Something that kvferry is configured to use does not work.
    Bad,
}

impl Mark {
    pub(super) const ALL: [Mark; 4] = [Mark::Ok, Mark::Note, Mark::Missing, Mark::Bad];

    pub(super) fn name(self) -> &'static str {
        match self {
            Mark::Ok => "ok",
            Mark::Note => "note",
            Mark::Missing => "missing",
            Mark::Bad => "bad",
        }
    }
}

/// A line of the report.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Finding {
    pub(super) id: &'static str,
    pub(super) subject: String,
    pub(super) mark: Mark,
    pub(super) finding: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) facts: BTreeMap<&'static str, Value>,
}

impl Finding {
    fn new(mark: Mark, id: &'static str, finding: impl Into<String>) -> Finding {
        Finding {
            id,
            subject: id.replace('_', " "),
            mark,
            finding: finding.into(),
            fix: None,
            facts: BTreeMap::new(),
        }
    }

    pub(super) fn ok(id: &'static str, finding: impl Into<String>) -> Finding {
        Finding::new(Mark::Ok, id, finding)
    }

    pub(super) fn note(id: &'static str, finding: impl Into<String>) -> Finding {
        Finding::new(Mark::Note, id, finding)
    }

    pub(super) fn missing(id: &'static str, finding: impl Into<String>) -> Finding {
        Finding::new(Mark::Missing, id, finding)
    }

    pub(super) fn bad(id: &'static str, finding: impl Into<String>) -> Finding {
        Finding::new(Mark::Bad, id, finding)
    }

    /// A note with these words instead, if `is_worse`, and what to do about it.
    pub(super) fn note_if(self, is_worse: bool, words: impl Into<String>, fix: &str) -> Finding {
        if is_worse { Finding::note(self.id, words).fix(fix) } else { self }
    }

    /// Adds advice on the finding.
    pub(super) fn fix(mut self, fix: impl Into<String>) -> Finding {
        self.fix = Some(fix.into());
        self
    }

    /// Shown instead of the id.
    pub(super) fn of(mut self, subject: impl Into<String>) -> Finding {
        self.subject = subject.into();
        self
    }

    /// A value for programs.
    pub(super) fn fact(mut self, name: &'static str, value: impl Into<Value>) -> Finding {
        self.facts.insert(name, value.into());
        self
    }
}

/// Findings about one thing.
#[derive(Debug, Serialize)]
pub(super) struct Group {
    pub(super) name: &'static str,
    pub(super) title: String,
    pub(super) findings: Vec<Finding>,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    schema: &'static str,
    pub(super) version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) target: Option<String>,
    pub(super) worst: Mark,
    pub(super) counts: BTreeMap<Mark, usize>,
    pub(super) groups: Vec<Group>,
}

impl Report {
    pub(super) fn new(target: Option<String>, groups: Vec<Group>) -> Report {
        let mut counts: BTreeMap<Mark, usize> = Mark::ALL.into_iter().map(|m| (m, 0)).collect();
        for finding in groups.iter().flat_map(|group| &group.findings) {
            *counts.entry(finding.mark).or_default() += 1;
        }
        let worst = counts.iter().filter(|(_, n)| **n > 0).map(|(mark, _)| *mark).max();
        Report {
            schema: "kvferry.doctor/1",
            version: env!("CARGO_PKG_VERSION"),
            target,
            worst: worst.unwrap_or(Mark::Ok),
            counts,
            groups,
        }
    }
}
